"""Execution of SQL statements, with retries, reconnection and error handling."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DatabaseError, Error, InterfaceError, OperationalError

# This is not functools.cached_property, which holds a lock in Python 3.11. A thread
# that waits there for a connection of a pool would block the threads that have one. See
# https://docs.python.org/3/library/functools.html#functools.cached_property
from django.utils.functional import cached_property

from dlocks.backends.base import TableLockedError, UnstorableKeyError
from dlocks.backends.database.expiry import Observations
from dlocks.backends.database.watchdog import table_watchdog
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.connected import connection_of
from dlocks.sql.dialect import Dialect
from dlocks.sql.direct import (
    TEXT_AT_MOST,
    TEXTS_AT_MOST,
    Reply,
    connect,
    is_instrumented,
)
from dlocks.sql.engines import dialect_of
from dlocks.sql.postgresql import sqlstate_of
from dlocks.sql.schemas import find_tables, qualified, schema_of
from dlocks.values import Claim

T = TypeVar("T")

MICROSECONDS = 1_000_000
# Ten years in seconds. No clock is ever stepped back that far.
NEVER = 10 * 365 * 86_400.0

# Number of retries of a statement that lost against a concurrent one.
CONTENTION_TRIES = 8
# The same if the server has rolled back the transaction. The nodes of a Galera cluster
# do so for as long as they write concurrently. The longest delay is in seconds.
CONFLICT_TRIES = 40
LONGEST_CONFLICT_DELAY = 0.1

# Milliseconds for which SQLite waits for its single writer within one attempt. This is
# enough for a short write of another process.
SQLITE_BUSY_TIMEOUT_MS = 100
# The value of NORMAL for the setting "synchronous". In WAL mode a commit is then not
# flushed, and a crash can lose only the last commits.
SQLITE_NORMAL = 1
# The condition for claims that are queued, which have no shared hold yet.
IN_QUEUE = "version IS NULL"

# The conditions for a free key. Its last hold was released, or its lease expired at
# least ``grace`` ago.
RELEASED = "(status <> 'P' AND end_time <= {now})"
STALE_AFTER_GRACE = "(status = 'P' AND end_time <= {grace})"
FREE_BY_CLOCK = f"({RELEASED} OR {STALE_AFTER_GRACE})"

CLEAR = "status = 'F', owner = '', hold_count = 0, end_time = {now}"

GRANT = (
    "status = %(status)s, owner = %(owner)s, holder = %(holder)s, owner_ip ="
    " %(owner_ip)s, begin_time = {now}, end_time = {end}, hold_count = 1, version ="
    " {token}"
)


class Statements:
    """The execution of statements on one database.

    ``database`` is an alias of DATABASES. It must accept writes.
    """

    database: str
    grace: float
    prefix: str
    # Whether statements may bypass Django's cursor. PostgreSQL prepares them. ``None``
    # means that on PostgreSQL they do so only if the session is the process's own.
    prepare: bool | None = None

    # Detects dead holders if no clock is trusted. None if the database clock is
    # trusted.
    observations: Observations | None = None

    # Statements with the engine's SQL and the table names inserted, by template. The
    # same templates occur again and again.
    _texts: dict[str, str]

    @property
    def _live(self) -> str:
        """Return the condition that the caller's own lease is live.

        If no clock is trusted, the lease is live for as long as the row is the
        caller's.
        """
        return "status = 'P'" + (
            " AND end_time > {now}" if self.observations is None else ""
        )

    @property
    def _live_share(self) -> str:
        return "version IS NOT NULL" + (
            " AND end_time > {now}" if self.observations is None else ""
        )

    @property
    def _renewed(self) -> str:
        """Return the SQL of the new end of a lease.

        If other processes observe the row, the new end always differs from the old one.
        """
        if self.observations is None:
            return "{end}"
        return (
            f"{self.dialect.greatest}({{end}}, {self.dialect.later_than('end_time')})"
        )

    @property
    def _grace(self) -> int:
        """Return the offset from now, in microseconds, to the latest expired end.

        It is negative. A lease that ended before that time may be taken over by the
        clock.
        """
        return -round(
            (self.grace if self.observations is None else NEVER) * MICROSECONDS
        )

    @property
    def connection(self) -> BaseDatabaseWrapper:
        return connection_of(self.database)

    @cached_property
    def dialect(self) -> Dialect:
        connection = self.connection
        if connection.vendor == "mysql" and "mysql_server_data" not in vars(connection):
            # Django queries the server once whether it is MariaDB or MySQL. This may
            # fail like any statement.
            try:
                return dialect_of(connection)
            except Error as error:
                if connection.connection is None or self.in_transaction():
                    raise self._failure(error) from error
                connection.close()
        try:
            return dialect_of(connection)
        except Error as error:
            raise self._failure(error) from error

    @property
    def table(self) -> str:
        """Return the quoted name of the table of the lock rows."""
        return self._tables[0]

    @cached_property
    def _tables(self) -> list[str]:
        try:
            from dlocks.models import HoldRecord, LockClaim, ResourceLock
        except RuntimeError as error:
            raise ImproperlyConfigured(
                "Add 'dlocks' to INSTALLED_APPS, and run 'manage.py migrate'."
            ) from error
        connection = self.connection
        schema = schema_of(connection, self._rows)
        if connection.vendor == "postgresql" and not schema:
            if (
                refusal := find_tables(connection, self._rows).refusal(self.database)
            ) is not None:
                raise ImproperlyConfigured(refusal)
            raise LockBackendError(
                f"Database {self.database!r} has no tables of dlocks."
                f" {self._how_to_migrate}"
            )
        return [
            qualified(model._meta.db_table, connection, schema)
            for model in (ResourceLock, LockClaim, HoldRecord)
        ]

    @property
    def _how_to_migrate(self) -> str:
        return f"Run 'manage.py migrate dlocks --database {self.database}'."

    def in_transaction(self, connection: BaseDatabaseWrapper | None = None) -> bool:
        connection = connection or self.connection
        if connection.in_atomic_block:
            return True
        if connection.connection is None:
            return not connection.settings_dict["AUTOCOMMIT"]
        return not connection.autocommit

    def _sql(self, statement: Callable[..., str], *pieces: str) -> str:
        return self._text(statement(self.table, *pieces))

    def _text(self, sql: str) -> str:
        """Return a statement with the engine's SQL inserted for its placeholders."""
        if (text := self._texts.get(sql)) is not None:
            return text
        dialect = self.dialect
        locks, claims, records = self._tables
        fragments = {
            "{locks}": locks,
            # FOR UPDATE OF requires the name of a table without its schema.
            "{of_locks}": locks.rpartition(".")[2],
            "{claims}": claims,
            "{records}": records,
            "{free_by_clock}": FREE_BY_CLOCK,
            "{now}": dialect.now,
            "{ticks}": dialect.ticks,
            "{at_once_term}": dialect.at_once_term,
            "{token}": dialect.token(),
            "{next_version}": dialect.next_version(),
            "{end}": dialect.after("ttl"),
            "{grace}": dialect.after("grace"),
            "{idle}": dialect.after("idle"),
            "{heard}": dialect.after("heard"),
            "{ends}": dialect.ticks_of("end_time"),
            "{server}": dialect.server,
        }
        text = sql
        for name, fragment in fragments.items():
            text = text.replace(name, fragment)
        if len(text) <= TEXT_AT_MOST:
            if len(self._texts) >= TEXTS_AT_MOST:
                self._texts.clear()
            self._texts[sql] = text
        return text

    def hearing(self, owners: str) -> str:
        """Return the statement that sends a heartbeat for queued claims.

        It skips claims that another transaction is granting at the moment.
        """
        return self._text(
            self.dialect.update(
                "{claims}", "end_time = {heard}", f"{owners} AND {IN_QUEUE}", "id"
            )
        )

    def _fitted(self, text: str) -> str:
        """Return a text with the characters escaped that the database cannot store."""
        return text if text.isascii() else self.dialect.fitted(text, self._session())

    def _refuse_unstorable(self, key: str) -> None:
        """Raise UnstorableKeyError if the database cannot store a key's characters."""
        if (fitted := self._fitted(key)) != key:
            raise UnstorableKeyError(
                f"The key {key!r} cannot be stored on database {self.database!r}. Its"
                " encoding, or the charset of the connection, lacks some characters"
                f" ({fitted}). Use user_key(), which makes keys of ASCII characters."
            )

    def _of_prefix(self) -> tuple[str, dict[str, Any]]:
        """Return SQL that limits a condition to keys under the backend's prefix.

        It is returned with its parameters.
        """
        if not self.prefix:
            return "", {}
        of_prefix = " AND SUBSTR(key_resource, 1, %(length)s) = %(prefix)s"
        return of_prefix, {"prefix": self.prefix, "length": len(self.prefix)}

    def _one_of(self, column: str, values: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        names = {f"{column}_{number}": value for number, value in enumerate(values)}
        return f"{column} IN ({', '.join(f'%({name})s' for name in names)})", names

    def _rows(self, sql: str, parameters: Mapping[str, Any]) -> Any:
        return self._ask(sql, parameters).rows

    def _count(
        self,
        sql: str,
        parameters: Mapping[str, Any],
        *,
        locked: Callable[[], int] | None = None,
    ) -> int:
        """Return the number of rows that the statement changed."""
        reply = self._ask(
            sql,
            parameters,
            locked=None if locked is None else lambda: Reply([], locked()),
        )
        return reply.changed

    def _ask(
        self,
        sql: str,
        parameters: Mapping[str, Any],
        *,
        locked: Callable[[], Reply] | None = None,
    ) -> Reply:
        return self._run(self._execute, sql, parameters, locked=locked)

    def _execute(
        self,
        connection: BaseDatabaseWrapper,
        in_transaction: bool,
        sql: str,
        parameters: Mapping[str, Any],
    ) -> Reply:
        if (
            not in_transaction
            and self.prepare is not False
            and not is_instrumented(connection)
        ):
            try:
                try:
                    # This may detect that the connection was lost in an earlier
                    # statement, which was not ours.
                    reply = self.dialect.send(
                        connection,
                        sql,
                        parameters,
                        through_a_pooler=self.prepare is True,
                    )
                except Exception:
                    # Convert the driver's errors to Django's. This is done only after
                    # an error, because the context manager takes time.
                    with connection.wrap_database_errors:
                        raise
                if reply is not None:
                    return reply
            except Error:
                raise
            except BaseException:
                self.dialect.abort_statement(connection)
                raise
        return self._by_cursor(connection, in_transaction, sql, parameters)

    def _by_cursor(
        self,
        connection: BaseDatabaseWrapper,
        in_transaction: bool,
        sql: str,
        parameters: Mapping[str, Any],
    ) -> Reply:
        with connection.cursor() as cursor:
            try:
                cursor.execute(sql, parameters)
                # Fetch all rows, because an unfinished statement keeps SQLite's write
                # lock.
                rows = cursor.fetchall() if cursor.description else []
                while connection.vendor == "mysql" and cursor.nextset():
                    rows = cursor.fetchall() if cursor.description else rows
            except Error:
                raise
            except BaseException:
                # The statement was interrupted, by Ctrl-C or by an exception from a
                # signal handler.
                if not in_transaction:
                    self.dialect.abort_statement(connection)
                raise
            return Reply(
                rows,
                int(cursor.rowcount),
                cursor.lastrowid if connection.vendor == "mysql" else 0,
            )

    def _run(
        self,
        work: Callable[..., T],
        *arguments: Any,
        locked: Callable[[], T] | None = None,
    ) -> T:
        """Execute one statement, and retry it after lost races and connections.

        It is only retried outside a transaction. ``work`` is called with the
        connection, whether it is in a transaction, and ``arguments``. If another
        transaction has locked the row, the result of ``locked()`` is returned. Every
        statement of this module may be sent twice.
        """
        connection = self.connection
        in_transaction = self.in_transaction(connection)
        tries, reconnected = 0, False
        while True:
            watched = None
            try:
                # The statement that finds the tables is not watched.
                watched = table_watchdog.begin(
                    connection, self.dialect, vars(self).get("_tables", [])[:2]
                )
                return work(connection, in_transaction, *arguments)
            except Error as error:
                if (
                    watched
                    and watched.was_cancelled
                    and self.dialect.was_cancelled(error)
                ):
                    raise TableLockedError(
                        f"A lock request to database {self.database!r} was cancelled. A"
                        " table of dlocks is locked as a whole by a migration, a"
                        " backup, VACUUM FULL or LOCK TABLE. Wait for its end, or end"
                        " the session that locks it."
                    ) from error
                if (
                    locked is not None
                    and isinstance(error, DatabaseError)
                    and (self.dialect.fails_alone or not in_transaction)
                    and self.dialect.is_locked(error)
                ):
                    return locked()
                if in_transaction or not isinstance(
                    error, (DatabaseError, InterfaceError)
                ):
                    if (
                        in_transaction
                        and isinstance(error, DatabaseError)
                        and self.dialect.ends_transaction(error)
                    ):
                        # Otherwise the later writes of the caller would be committed
                        # without the earlier ones.
                        connection.needs_rollback = connection.in_atomic_block
                    raise self._failure(error) from error
                if isinstance(error, DatabaseError) and self._again(error, tries):
                    tries += 1
                    continue
                if (
                    connection.connection is not None
                    and not reconnected
                    and self._must_reconnect(connection, error)
                ):
                    connection.close()
                    reconnected = True
                    continue
                self._drop_half_made(connection)
                raise self._failure(error) from error
            finally:
                table_watchdog.end(watched)

    def _must_reconnect(self, connection: BaseDatabaseWrapper, error: Error) -> bool:
        """Return whether the session is lost, or its server became a replica."""
        if self._is_left_read_only(connection, error):
            return True
        if not isinstance(
            error, (OperationalError, InterfaceError)
        ) and not self.dialect.is_desynchronised(error):
            return False
        return not connection.is_usable()

    def _is_left_read_only(self, connection: BaseDatabaseWrapper, error: Error) -> bool:
        if not self.dialect.is_read_only(error):
            return False
        if connection.vendor == "postgresql" and connection.connection is not None:
            # A pool would keep the session and hand it out again.
            with suppress(connection.Database.Error):  # type: ignore[attr-defined]
                connection.connection.close()
        return True

    def _drop_half_made(self, connection: BaseDatabaseWrapper) -> None:
        """Close a failed connection that appears to be in a transaction.

        No transaction was open, but the connection failed before it returned to
        autocommit. Django would keep it, and treat the next atomic() as a nested one.
        If that one failed at its beginning, all later ones would fail too.
        """
        if connection.connection is not None and self.in_transaction(connection):
            connection.in_atomic_block = False
            with suppress(Error):
                connection.close()

    def _again(self, error: DatabaseError, tries: int) -> bool:
        """Wait, and return whether to retry after this number of ``tries``.

        The wait grows with each try. Return False without waiting if the error is not a
        lost race, or after too many tries.
        """
        if not self.dialect.is_contention(error):
            return False
        delay = 0.004 * 2**tries
        if self.dialect.ends_transaction(error):
            delay, at_most = min(delay, LONGEST_CONFLICT_DELAY), CONFLICT_TRIES
        else:
            at_most = CONTENTION_TRIES
        if tries >= at_most:
            return False
        time.sleep(random.uniform(0, delay))  # noqa: S311 (jitter)
        return True

    def _session(self) -> Any:
        """Return the session, which differs after a reconnection by Django."""
        connection = self.connection
        try:
            connect(connection)
        except Error as error:
            self._drop_half_made(connection)
            raise self._failure(error) from error
        return connection.connection

    def _was_released(
        self, claims: Sequence[Claim], session: Any, began: float
    ) -> bool:
        """Return whether a failed release already released the keys before.

        The reply may be lost together with the session. The statements were then sent
        again, and it is unknown whether the first ones were executed. This is only
        possible if the release ``began`` in another session.

        Every grant, and every clearing by a person, takes its version from the clock.
        If the version is older than the release, the key was taken from the claim
        before, and its work may have overlapped with another holder's. If the version
        is newer, the claim held the key until the release began. Its work was then
        exclusive, no matter which of the two ended the hold.
        """
        if self._session() is session:
            return False
        owners = {claim.key: claim.owner for claim in claims}
        keys, parameters = self._one_of("key_resource", list(owners))
        sql = (
            "SELECT key_resource, owner, status, {ticks} - version FROM {locks}"
            f" WHERE {keys}"
        )
        rows = self._rows(self._text(sql), parameters)
        # The time is read after the reply, so every grant since the beginning is
        # younger than this.
        since = (clock.now() - began) * MICROSECONDS
        # A missing row has no version. It only shows that no caller holds the key. This
        # release may be the reason.
        return all(
            status != "P" if owner == owners[key] else age <= since
            for key, owner, status, age in rows
        )

    def _failure(self, error: Error) -> LockBackendError:
        what = (
            f"A lock request to database {self.database!r} failed:"
            f" {type(error).__name__}: {error}"
        )
        if is_unmigrated(error):
            what = f"{what.rstrip()}. {self._how_to_migrate}"
        elif "dialect" in vars(self) and self.dialect.is_read_only(error):
            what = (
                f"{what.rstrip()}. The session cannot write:"
                f" {self.dialect.read_only_settings}."
            )
        return LockBackendError(what)

    def _briefly(self) -> AbstractContextManager[object]:
        """Limit how long SQLite waits for its single writer.

        On other engines no statement waits.
        """
        return self._with_at_most("busy_timeout", SQLITE_BUSY_TIMEOUT_MS)

    def _forgettably(self) -> AbstractContextManager[object]:
        """Commit without a flush on SQLite, so that a crash may lose the change.

        On PostgreSQL the statement itself has this option.
        """
        return self._with_at_most("synchronous", SQLITE_NORMAL)

    def _with_at_most(self, setting: str, most: int) -> AbstractContextManager[object]:
        connection: Any = self.connection
        if connection.vendor != "sqlite" or self.in_transaction(connection):
            return _AS_USUAL
        return _with_limit(
            self._session(), setting, most, unless=connection.Database.Error
        )


def is_unmigrated(error: BaseException) -> bool:
    """Return whether the error means that a table or column of dlocks is missing."""
    # These are undefined_table and undefined_column of PostgreSQL, the codes of MySQL
    # and MariaDB, and SQLite's messages.
    return (
        sqlstate_of(error) in {"42P01", "42703"}
        or error.args[:1] in {(1146,), (1054,)}
        or any(words in str(error) for words in ("no such table", "no such column"))
    )


_AS_USUAL = nullcontext()


@contextmanager
def _with_limit(
    raw: Any, setting: str, most: int, *, unless: type[Exception]
) -> Iterator[None]:
    """Limit a setting of an sqlite3 connection to ``most`` within the block.

    Nothing is changed if reading the setting raises ``unless``.
    """
    try:
        ((usual,),) = raw.execute(f"PRAGMA {setting}").fetchall()
        # With a rollback journal, the whole database depends on the order of the
        # flushes.
        stays = setting == "synchronous" and raw.execute(
            "PRAGMA journal_mode"
        ).fetchall() != [("wal",)]
    except unless:
        # Reading a setting may require reading the file. The next statement reports the
        # problem with the file.
        usual, stays = most, True
    if stays or usual <= most:
        yield
        return
    # Build the statement now. If it were built in the ``finally`` block, an interrupt
    # could arrive before it is complete.
    as_usual = f"PRAGMA {setting} = {usual}"
    try:
        raw.execute(f"PRAGMA {setting} = {most}")
        # This is a generator instead of a class. A signal at the beginning of
        # __exit__() would leave the setting changed.
        yield
    finally:
        raw.execute(as_usual)
