"""How a backend of the database family speaks to its database: statements, and what became of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DatabaseError, Error, InterfaceError, OperationalError

from dlocks import clock
from dlocks.backends.base import Claim
from dlocks.backends.database.dialects import Dialect, dialect_of
from dlocks.backends.database.direct import TEXT_AT_MOST, TEXTS_AT_MOST, Reply, connect, nobody_looks_on
from dlocks.backends.database.observing import Observations
from dlocks.connected import connection_of
from dlocks.exceptions import LockBackendError

T = TypeVar("T")

MICROSECONDS = 1_000_000
# Seconds: ten years, in which no clock is stepped back.
NEVER = 10 * 365 * 86_400.0

# How often a statement that only lost against another one is sent again.
CONTENTION_TRIES = 8
# The same where the server has rolled it back: the nodes of a Galera cluster do so as long as they write at once.
CONFLICT_TRIES = 40
LONGEST_CONFLICT_DELAY = 0.1

# How long SQLite may wait for its one writer within a single attempt: enough for somebody's short write.
SQLITE_PATIENCE_MS = 100
# Of its levels of "synchronous": in WAL mode a commit is not flushed, and nothing but the last ones can be lost.
SQLITE_NORMAL = 1

# Of claims: those that have no share yet.
IN_LINE = "version IS NULL"

FREE_BY_CLOCK = "((status <> 'P' AND end_time <= {now}) OR (status = 'P' AND end_time <= {grace}))"

CLEAR = "status = 'F', owner = '', hold_count = 0, end_time = {now}"

# Statements with the engine's words in place: they are the same again and again.
_texts: dict[tuple[Dialect, str], str] = {}
GRANT = (
    "status = %(status)s, owner = %(owner)s, holder = %(holder)s, owner_ip = %(owner_ip)s, begin_time = {now}, "
    "end_time = {end}, hold_count = 1, version = {token}"
)


class Statements:
    """The statements of one database; ``database`` is an alias of DATABASES, and always written to."""

    database: str
    grace: float
    prefix: str
    # Whether they may go past Django's cursor; None: on PostgreSQL, which prepares them, where the session is
    # the process's own.
    prepare: bool | None = None

    # How holders are known to be gone where no clock is trusted.
    observations: Observations | None = None

    @property
    def _live(self) -> str:
        """The condition that one's own lease stands; where no clock is trusted, as long as the row is one's own."""
        return "status = 'P'" + (" AND end_time > {now}" if self.observations is None else "")

    @property
    def _live_share(self) -> str:
        return "version IS NOT NULL" + (" AND end_time > {now}" if self.observations is None else "")

    @property
    def _renewed(self) -> str:
        """The new end of a lease; where others watch, another one in any case."""
        if self.observations is None:
            return "{end}"
        return f"{self.dialect.greatest}({{end}}, {self.dialect.later_than('end_time')})"

    @property
    def _grace(self) -> int:
        """Microseconds, below zero, from now to when a lease must have ended to be taken over by the clock."""
        return -round((self.grace if self.observations is None else NEVER) * MICROSECONDS)

    @property
    def connection(self) -> BaseDatabaseWrapper:
        return connection_of(self.database)

    @cached_property
    def dialect(self) -> Dialect:
        connection = self.connection
        if connection.vendor == "mysql" and "mysql_server_data" not in vars(connection):
            # Which of the two it is, the server is asked once; that may fail as any statement may.
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
        """Return the quoted name of the lock rows' table."""
        return self._tables[0]

    @cached_property
    def _tables(self) -> list[str]:
        try:
            from dlocks.models import HoldRecord, LockClaim, ResourceLock
        except RuntimeError as error:
            raise ImproperlyConfigured("Add 'dlocks' to INSTALLED_APPS, and run 'manage.py migrate'.") from error
        quote = self.connection.ops.quote_name
        return [quote(model._meta.db_table) for model in (ResourceLock, LockClaim, HoldRecord)]

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
        """Return a statement with the engine's own words in the places of ``{…}``."""
        dialect = self.dialect
        if (text := _texts.get((dialect, sql))) is not None:
            return text
        locks, claims, records = self._tables
        fragments = {
            "{locks}": locks,
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
            if len(_texts) >= TEXTS_AT_MOST:
                _texts.clear()
            _texts[dialect, sql] = text
        return text

    def hearing(self, owners: str) -> str:
        """Return the statement by which claims in line are heard of: those that nobody is just granting."""
        return self._text(self.dialect.update("{claims}", "end_time = {heard}", f"{owners} AND {IN_LINE}", "id"))

    def _of_prefix(self) -> tuple[str, dict[str, Any]]:
        """Return what limits a condition to keys under the backend's prefix, and its parameters."""
        if not self.prefix:
            return "", {}
        of_prefix = " AND SUBSTR(key_resource, 1, %(length)s) = %(prefix)s"
        return of_prefix, {"prefix": self.prefix, "length": len(self.prefix)}

    def _one_of(self, column: str, values: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        names = {f"{column}_{number}": value for number, value in enumerate(values)}
        return f"{column} IN ({', '.join(f'%({name})s' for name in names)})", names

    def _rows(self, sql: str, parameters: Mapping[str, Any]) -> Any:
        return self._ask(sql, parameters).rows

    def _count(self, sql: str, parameters: Mapping[str, Any], *, locked: Callable[[], int] | None = None) -> int:
        """Return the number of rows that the statement changed."""
        reply = self._ask(sql, parameters, locked=None if locked is None else lambda: Reply([], locked()))
        return reply.changed

    def _ask(self, sql: str, parameters: Mapping[str, Any], *, locked: Callable[[], Reply] | None = None) -> Reply:
        return self._run(self._execute, sql, parameters, locked=locked)

    def _execute(
        self, connection: BaseDatabaseWrapper, in_transaction: bool, sql: str, parameters: Mapping[str, Any]
    ) -> Reply:
        if not in_transaction and self.prepare is not False and nobody_looks_on(connection):
            try:
                try:
                    # It may find that the connection was lost, in a statement that was not ours.
                    reply = self.dialect.send(connection, sql, parameters, through_a_pooler=self.prepare is True)
                except Exception:
                    # The driver's errors are Django's; by hand, since this costs something where there is none.
                    with connection.wrap_database_errors:
                        raise
                if reply is not None:
                    return reply
            except Error:
                raise
            except BaseException:
                self.dialect.break_off(connection)
                raise
        return self._by_cursor(connection, in_transaction, sql, parameters)

    def _by_cursor(
        self, connection: BaseDatabaseWrapper, in_transaction: bool, sql: str, parameters: Mapping[str, Any]
    ) -> Reply:
        with connection.cursor() as cursor:
            try:
                cursor.execute(sql, parameters)
                # All rows: a statement that is not finished keeps SQLite's write lock.
                rows = cursor.fetchall() if cursor.description else []
                while connection.vendor == "mysql" and cursor.nextset():
                    rows = cursor.fetchall() if cursor.description else rows
            except Error:
                raise
            except BaseException:
                # Interrupted, by a Ctrl-C or by what a handler of a signal raised.
                if not in_transaction:
                    self.dialect.break_off(connection)
                raise
            return Reply(rows, int(cursor.rowcount), cursor.lastrowid if connection.vendor == "mysql" else 0)

    def _run(self, work: Callable[..., T], *arguments: Any, locked: Callable[[], T] | None = None) -> T:
        """
        Do one statement's work; outside a transaction, again when it only lost a race or its connection was dead.

        ``work`` is called with the connection, whether it is in a transaction, and the arguments. ``locked`` answers
        for a row that another transaction has. Every statement of this module may be sent twice.
        """
        connection = self.connection
        in_transaction = self.in_transaction(connection)
        tries, reconnected = 0, False
        while True:
            try:
                return work(connection, in_transaction, *arguments)
            except Error as error:
                if (
                    locked is not None
                    and isinstance(error, DatabaseError)
                    and (self.dialect.fails_alone or not in_transaction)
                    and self.dialect.is_locked(error)
                ):
                    return locked()
                if in_transaction or not isinstance(error, (DatabaseError, InterfaceError)):
                    if in_transaction and isinstance(error, DatabaseError) and self.dialect.ends_transaction(error):
                        # Or else what the caller writes from here on would be committed without what came before.
                        connection.needs_rollback = connection.in_atomic_block
                    raise self._failure(error) from error
                if isinstance(error, DatabaseError) and self._again(error, tries):
                    tries += 1
                    continue
                if (
                    (isinstance(error, (OperationalError, InterfaceError)) or self.dialect.is_out_of_step(error))
                    and connection.connection is not None
                    and not reconnected
                    and not connection.is_usable()
                ):
                    connection.close()
                    reconnected = True
                    continue
                self._drop_half_made(connection)
                raise self._failure(error) from error

    def _drop_half_made(self, connection: BaseDatabaseWrapper) -> None:
        """
        Close a connection that failed where no transaction was open, and yet looks as though one were.

        It failed on its way to autocommit. Django would keep it, and take the next atomic() for one inside of a
        transaction; where that fails at its beginning, the next ones too.
        """
        if connection.connection is not None and self.in_transaction(connection):
            connection.in_atomic_block = False
            with suppress(Error):
                connection.close()

    def _again(self, error: DatabaseError, tries: int) -> bool:
        """Tell whether what failed so often should be sent again, after the while that this waits."""
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
        """Return what is another one once the session was lost, and Django has connected anew."""
        connection = self.connection
        try:
            connect(connection)
        except Error as error:
            self._drop_half_made(connection)
            raise self._failure(error) from error
        return connection.connection

    def _was_given_back(self, claims: Sequence[Claim], session: Any, began: float) -> bool:
        """
        Tell whether a release that finds the keys with others has given them back itself, and its reply was lost.

        That can be where it ``began`` in another session: its statements were sent again, and the first ones may have
        been executed or not. Each grant, and each clearing by a person, draws its version from the clock. So one that
        came before the release began has taken the key away, and what was done under the claim was perhaps not done
        alone. Until one that came later the key was the claim's own: then all was done alone, whichever of the two has
        ended it.
        """
        if self._session() is session:
            return False
        owners = {claim.key: claim.owner for claim in claims}
        keys, parameters = self._one_of("key_resource", list(owners))
        sql = f"SELECT key_resource, owner, status, {{ticks}} - version FROM {{locks}} WHERE {keys}"
        rows = self._rows(self._text(sql), parameters)
        # Read after the reply: no grant since the beginning is as old.
        since = (clock.now() - began) * MICROSECONDS
        # A row that is gone tells no moment, only that nobody has the key: it may as well have gone by this release.
        return all(status != "P" if owner == owners[key] else age <= since for key, owner, status, age in rows)

    def _failure(self, error: Error) -> LockBackendError:
        what = f"Database {self.database!r} could not be asked about a lock: {type(error).__name__}: {error}"
        # 42P01, 1146, and SQLite's words
        known = getattr(error.__cause__, "sqlstate", None) == "42P01" or error.args[:1] == (1146,)
        if known or "no such table" in str(error):
            what = f"{what.rstrip()}. Run 'manage.py migrate dlocks --database {self.database}'."
        return LockBackendError(what)

    def _briefly(self) -> AbstractContextManager[object]:
        """Bound what SQLite waits for its one writer; elsewhere no statement waits."""
        return self._with_at_most("busy_timeout", SQLITE_PATIENCE_MS)

    def _forgettably(self) -> AbstractContextManager[object]:
        """Have what a crash of the machine may forget cost no flush: on SQLite; PostgreSQL's statements say it."""
        return self._with_at_most("synchronous", SQLITE_NORMAL)

    def _with_at_most(self, setting: str, most: int) -> AbstractContextManager[object]:
        connection: Any = self.connection
        if connection.vendor != "sqlite" or self.in_transaction(connection):
            return _AS_USUAL
        return _at_most(self._session(), setting, most, unless=connection.Database.Error)


_AS_USUAL = nullcontext()


@contextmanager
def _at_most(raw: Any, setting: str, most: int, *, unless: type[Exception]) -> Iterator[None]:
    """Have a setting of sqlite3's connection be no more than that meanwhile, ``unless`` it cannot be asked for."""
    try:
        ((usual,),) = raw.execute(f"PRAGMA {setting}").fetchall()
        # Where a journal is rolled back, all of the database depends on the order of what is flushed.
        stays = setting == "synchronous" and raw.execute("PRAGMA journal_mode").fetchall() != [("wal",)]
    except unless:
        # It may have to read the file for that. What is asked next says what is wrong with it.
        usual, stays = most, True
    if stays or usual <= most:
        yield
        return
    # Put together before: where it is wanted, an interrupt could come in the middle of that.
    as_usual = f"PRAGMA {setting} = {usual}"
    try:
        raw.execute(f"PRAGMA {setting} = {most}")
        # No class: a signal at the beginning of its __exit__() would leave the connection as it is here.
        yield
    finally:
        raw.execute(as_usual)
