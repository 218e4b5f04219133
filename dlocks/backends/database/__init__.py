"""
Locks as rows of one table, in the database that the project already runs.

The backends share the table and exclude each other on it; they differ in how they take a row:

* ``PessimisticBackend`` locks it (``SELECT … FOR UPDATE SKIP LOCKED``) and writes it, in one statement;
* ``OptimisticBackend`` reads it without a lock, and writes it where ``version`` is still the one it read;
* ``InsertBackend`` inserts it and deletes it: the unique key itself is the lock.

A lease is a row whose ``end_time`` lies ahead, each change of it a committed statement of its own. In transaction
scope the row is written so that it is free as soon as the caller's transaction commits; until then the database
itself keeps everybody else away from it. No statement here waits for a row that another transaction has.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DatabaseError, Error, InterfaceError, OperationalError

from dlocks.backends.base import BaseBackend, Claim, Grant, Holder
from dlocks.backends.database.dialects import KEY, Dialect, dialect_of
from dlocks.exceptions import LockBackendError, LockError, LockStale

T = TypeVar("T")

MICROSECONDS = 1_000_000

# How often a statement that only lost against another one is sent again.
CONTENTION_TRIES = 8

# How long SQLite may wait for its one writer within a single attempt: enough for somebody's short write.
SQLITE_PATIENCE_MS = 100

# Rows that one statement of reaping, purging or renewing touches at most.
BATCH = 1000

GRANT = (
    "status = %(status)s, owner = %(owner)s, holder = %(holder)s, owner_ip = %(owner_ip)s, begin_time = {now}, "
    "end_time = {end}, hold_count = 1, version = {token}"
)
CLEAR = "status = 'F', owner = '', hold_count = 0, end_time = {now}, version = {token}"
STALE = "status = 'P' AND end_time <= {now}"


@dataclass(frozen=True, slots=True)
class Row:
    """What one look at a row told. ``free`` is for the claim that looked."""

    free: bool
    stale: bool
    version: int


class DatabaseBackend(BaseBackend):
    """What the backends of the database family share. ``database`` is an alias of DATABASES, and always written to."""

    supports_transactions: ClassVar[bool] = True
    supports_clearing: ClassVar[bool] = True

    def __init__(self, alias: str, *, database: str = "default", **options: Any) -> None:
        super().__init__(alias, **options)
        self.database = database

    # The waist.

    def acquire(self, claim: Claim) -> Grant | None:
        token, row = self._take(claim)
        if token is None and row is None:
            self._create(claim)
            token, row = self._take(claim)
        if token is not None:
            return Grant(token)
        self._refuse(claim, row)
        return None

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        left: dict[str, float] = {}
        for ttl in {claim.ttl for claim in claims}:
            alike = [claim for claim in claims if claim.ttl == ttl]
            for start in range(0, len(alike), BATCH):
                left |= self._renew(alike[start : start + BATCH], ttl)
        return left

    def recount(self, claim: Claim, count: int) -> bool:
        where = f"{KEY} AND owner = %(owner)s"
        if claim.scope == "lease":
            # In transaction scope the row is written as free already; while it is this owner's it is held.
            where += " AND status = 'P' AND end_time > {now}"
        return self._write(claim, "hold_count = %(count)s", where, {"count": count})

    def release(self, claim: Claim, *, failed: bool = False, keep: float = 0.0) -> bool:
        assignments = f"status = %(status)s, hold_count = 0, end_time = {self.dialect.after('keep')}"
        parameters = {"status": "F" if failed else "S", "keep": round(keep * MICROSECONDS)}
        # A crash of the server may forget a lease's release; then the lease runs out, that is all. In a transaction
        # of the caller's the durability is the caller's.
        forgettable = not keep and claim.scope == "lease" and self.connection.vendor == "postgresql"
        returning = " RETURNING set_config('synchronous_commit', 'off', true)" if forgettable else ""
        return self._write(claim, assignments, f"{KEY} AND owner = %(owner)s", parameters, returning)

    def holder(self, key: str) -> Holder | None:
        from dlocks.models import LockState, ResourceLock

        rows = ResourceLock.objects.using(self.database).by_clock().filter(pk=key).values()
        row: Any = self._run(lambda cursor: rows.first())
        if row is None or row["state"] == LockState.FREE:
            return None
        return Holder(
            key=key,
            holder=row["holder"],
            owner_ip=row["owner_ip"],
            since=row["begin_time"],
            remaining=row["seconds_left"],
            token=row["version"],
            count=row["hold_count"],
            stale=row["state"] == LockState.STALE,
        )

    def in_transaction(self) -> bool:
        connection = self.connection
        if connection.in_atomic_block:
            return True
        if connection.connection is None:
            return not connection.settings_dict["AUTOCOMMIT"]
        return not connection.autocommit

    @property
    def identity(self) -> str:
        return f"database {self.database}"

    def transaction_refused(self) -> str | None:
        if not self.connection.in_atomic_block:
            return (
                f"Autocommit is switched off on {self.database!r}, and Django does not tell when such a transaction "
                "ends. Use 'with atomic()', or scope='lease'."
            )
        return None

    def lease_refused(self) -> str | None:
        if self.connection.vendor == "sqlite" and self.in_transaction():
            return (
                f"SQLite has one writer, and the transaction open on {self.database!r} may be it: a lease could not "
                "be written beside it. Take the lock before the transaction, or leave out scope='lease'."
            )
        return None

    def close(self) -> None:
        self.connection.close()

    def check(self) -> list[Any]:
        from dlocks.checks import check_database_backend

        return check_database_backend(self)

    # Seeing to what was left behind.

    def clear(self, key: str, version: int, *, stale_only: bool = False) -> bool:
        """
        Make a key free and fence its holder off, if its version is still the one that was seen.

        Return False when it is not, when the key is locked by a transaction, or with ``stale_only`` not stale.
        """
        where = f"{KEY} AND version = %(version)s"
        if stale_only:
            where += " AND " + STALE
        sql = self._sql(self.dialect.update, CLEAR, where)
        with self._briefly():
            return self._count(sql, {"key": key, "version": version}, locked=lambda: 0) == 1

    def reap(self, *, dry_run: bool = False) -> Iterator[int]:
        """Make stale rows free, as failed, batch by batch; yield the number of each batch."""
        where = f"{STALE} AND end_time <= {{grace}}"
        for keys, parameters in self._batches("P"):
            parameters["grace"] = -round(self.grace * MICROSECONDS)
            yield self._sweep(self.dialect.update, CLEAR, f"{keys} AND {where}", parameters, dry_run)

    def purge(self, idle_for: float, *, dry_run: bool = False) -> Iterator[int]:
        """Delete rows that have been free for so many seconds, batch by batch; yield the number of each batch."""
        # Only once the clock has passed the version: the next row's begins at the clock and must be larger.
        where = "status <> 'P' AND end_time <= {idle} AND version < {ticks}"
        for keys, parameters in self._batches("S", "F"):
            parameters["idle"] = -round(idle_for * MICROSECONDS)
            yield self._sweep(self.dialect.delete, "", f"{keys} AND {where}", parameters, dry_run)

    def _batches(self, *statuses: str) -> Iterator[tuple[str, dict[str, Any]]]:
        # By ranges of the primary key: there is no index on what changes, and no lock is taken to look.
        from dlocks.models import ResourceLock

        rows = ResourceLock.objects.using(self.database).order_by("pk").values_list("pk", "status")
        last = ""
        while True:
            page = self._run(lambda cursor, last=last: list(rows.filter(pk__gt=last)[:BATCH]))  # type: ignore[misc]
            if not page:
                return
            last = page[-1][0]
            if keys := [key for key, status in page if status in statuses]:
                yield self._one_of("key_resource", keys)

    def _sweep(
        self, statement: Callable[..., str], assignments: str, where: str, parameters: dict[str, Any], dry_run: bool
    ) -> int:
        if dry_run:
            sql = self._sql(lambda table, where: f"SELECT COUNT(*) FROM {table} WHERE {where}", where)
            return int(self._rows(sql, parameters)[0][0])
        pieces = (assignments, where) if assignments else (where,)
        return self._count(self._sql(statement, *pieces), parameters)

    # Taking a row.

    def _take(self, claim: Claim) -> tuple[int | None, Row | None]:
        """Return the token of the grant, or else what was seen of the row: None when there is none."""
        raise NotImplementedError

    def _grant(self, claim: Claim, *conditions: str, **parameters: Any) -> int | None:
        """Write the row to be this claim's where it is free, and return the token."""
        where = " AND ".join([KEY, f"({self._free(claim)})", *conditions])
        statement = self.dialect.update
        if claim.scope == "transaction" and self.dialect.read_committed:
            where += f" AND {self.dialect.read_committed}"
        elif claim.scope == "lease" and conditions:
            statement = self.dialect.compare_and_swap
        sql = self._sql(statement, GRANT, where) + self.dialect.returning
        if claim.scope == "transaction" and self.dialect.locks_in_passing:
            return self._granted_or_undone(sql, self._parameters(claim) | parameters)
        return self._granted(sql, self._parameters(claim) | parameters)

    def _granted_or_undone(self, sql: str, parameters: Mapping[str, Any]) -> int | None:
        """Grant inside a savepoint, and go back to it where that came to nothing, so that no row stays locked."""
        try:
            with transaction.atomic(using=self.database):
                token = self._granted(sql, parameters)
                if token is None:
                    raise _NothingGrantedError
                return token
        except _NothingGrantedError:
            return None
        except Error as error:
            raise self._failure(error) from error

    def _granted(self, sql: str, parameters: Mapping[str, Any]) -> int | None:
        def grant(cursor: Any) -> int | None:
            cursor.execute(sql, parameters)
            return self.dialect.granted(cursor)

        with self._briefly():
            try:
                return self._run(grant, locked=lambda: None)
            except LockBackendError as error:
                if self.in_transaction() and self.connection.vendor == "sqlite":
                    error.add_note("Set OPTIONS['transaction_mode'] = 'IMMEDIATE' for this database.")
                raise

    def _look(self, claim: Claim) -> Row | None:
        # First, since at SERIALIZABLE a mere look locks the row on InnoDB.
        self._refuse_snapshot(claim)
        sql = self._sql(
            lambda table, free, stale: (
                f"SELECT CASE WHEN {free} THEN 1 ELSE 0 END, CASE WHEN {stale} THEN 1 ELSE 0 END, version"
                f" FROM {table} WHERE {KEY}"
            ),
            self._free(claim),
            STALE,
        )
        for free, stale, version in self._rows(sql, self._parameters(claim)):
            return Row(bool(free), bool(stale), version)
        return None

    def _create(self, claim: Claim) -> None:
        """Make the row, free, in a statement committed by itself: an open insert would make everybody wait."""
        connection = self.connection
        # In a TestCase nobody else is there to wait, and what would be committed would stay for the next test.
        inside = self.in_transaction() and (
            connection.vendor == "sqlite"
            or any(getattr(block, "_from_testcase", False) for block in connection.atomic_blocks)
        )
        at_once, term = ("", "") if inside else (self.dialect.at_once, "{at_once_term}")
        before, after = self.dialect.insert_or_ignore
        sql = self._sql(
            self._insertion, at_once + before, f"%(key)s, 'S', '', '', NULL, NULL, {{now}}, 0{term}, {{ticks}}", after
        )

        def create() -> int:
            with self._briefly():
                return self._count(sql, {"key": claim.key}, locked=lambda: 0)

        if self.in_transaction() and not inside:
            self.outside(create)
        else:
            create()

    def _insertion(self, table: str, before: str, values: str, after: str) -> str:
        return (
            f"{before} INTO {table} (key_resource, status, owner, holder, owner_ip, begin_time,"
            f" end_time, hold_count, version) VALUES ({values}) {after}"
        )

    def _refuse_snapshot(self, claim: Claim) -> None:
        # A transaction whose snapshot may be older than the lock would not see what the last holder did.
        dialect = self.dialect
        if claim.scope != "transaction" or dialect.read_committed is None:
            return
        level = self._rows(dialect.show_isolation, {})[0][0].upper().replace("-", " ")
        if level not in {"READ COMMITTED", "READ UNCOMMITTED"}:
            raise RuntimeError(
                f"{claim.key!r} cannot be locked in this transaction: on database {self.database!r} it runs at "
                f"{level}, so its snapshot may be older than the lock and would not show what the last "
                "holder did. Take the lock before the transaction begins, or run it at READ COMMITTED."
            )

    def _refuse(self, claim: Claim, row: Row | None) -> None:
        """Raise where waiting would not help."""
        if row is not None and row.stale and not claim.takeover:
            raise LockStale(key=claim.key, holder=self.holder(claim.key))
        if claim.scope == "transaction" and self.connection.vendor == "sqlite":
            raise LockError(
                f"{claim.key!r} is held by {self.holder(claim.key)}, and cannot be waited for inside a transaction: "
                "SQLite has one writer, so its holder could never give it back. Take the lock before the transaction."
            )

    def _renew(self, claims: Sequence[Claim], ttl: float) -> dict[str, float]:
        keys, key_parameters = self._one_of("key_resource", [claim.key for claim in claims])
        owners, owner_parameters = self._one_of("owner", [claim.owner for claim in claims])
        mine = f"{keys} AND {owners} AND status = 'P' AND end_time > {{now}}"
        parameters = {"ttl": round(ttl * MICROSECONDS), **key_parameters, **owner_parameters}
        sql = self._sql(self.dialect.update, "end_time = {end}", mine)
        with self._briefly():
            renewed = self._count(sql, parameters, locked=lambda: -1)
        if renewed == len(claims):
            return {claim.owner: ttl for claim in claims}
        # Some are lost, or were locked just now: an own transaction may pin the row. What stands, stands.
        left = self.dialect.seconds_until("end_time")
        sql = self._sql(lambda table, where: f"SELECT owner, {left} FROM {table} WHERE {where}", mine)
        return {owner: min(float(seconds), ttl) for owner, seconds in self._rows(sql, parameters)}

    # Statements.

    @property
    def connection(self) -> BaseDatabaseWrapper:
        return connections[self.database]

    @property
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
        try:
            from dlocks.models import ResourceLock
        except RuntimeError as error:
            raise ImproperlyConfigured("Add 'dlocks' to INSTALLED_APPS, and run 'manage.py migrate'.") from error
        return self.connection.ops.quote_name(ResourceLock._meta.db_table)

    def _sql(self, statement: Callable[..., str], *pieces: str) -> str:
        dialect = self.dialect
        fragments = {
            "{now}": dialect.now,
            "{ticks}": dialect.ticks,
            "{at_once_term}": dialect.at_once_term,
            "{token}": dialect.token(),
            "{end}": dialect.after("ttl"),
            "{grace}": dialect.after("grace"),
            "{idle}": dialect.after("idle"),
        }
        sql = statement(self.table, *pieces)
        for name, fragment in fragments.items():
            sql = sql.replace(name, fragment)
        return sql

    def _write(
        self, claim: Claim, assignments: str, where: str, parameters: Mapping[str, Any], returning: str = ""
    ) -> bool:
        """Write the holder's own row, without waiting for its lock; return False when it is the holder's no more."""
        parameters = {"key": claim.key, "owner": claim.owner, **parameters}
        if claim.scope == "transaction":
            # Locked by this transaction already, unless the server has rolled it back meanwhile.
            return self._count(self._sql(self.dialect.update, assignments, where), parameters) == 1
        sql = self._sql(self.dialect.compare_and_swap, assignments, where) + returning
        mine = self._sql(lambda table: f"SELECT {self.dialect.seconds_until('end_time')} FROM {table} WHERE {where}")
        for number in range(CONTENTION_TRIES):
            if self._count(sql, parameters, locked=lambda: 0) == 1:
                return True
            # Not there, or locked: for a moment by a renewal or a look, or by a transaction that goes on.
            left = self._rows(mine, parameters)
            if not left:
                return False
            time.sleep(random.uniform(0, 0.002 * 2**number))  # noqa: S311 (jitter)
        if float(left[0][0]) <= 0:
            # It ran out, and a transaction that has not ended is taking it over.
            return False
        raise LockBackendError(
            f"The row of {claim.key!r} on database {self.database!r} is locked by another transaction."
        )

    def _free(self, claim: Claim) -> str:
        free = "(status <> 'P' AND end_time <= {now})"
        if claim.takeover:
            free += " OR (status = 'P' AND end_time <= {grace})"
        # The claim's own earlier grant, whose reply was lost.
        return free + " OR (status = 'P' AND owner = %(owner)s)"

    def _parameters(self, claim: Claim) -> dict[str, Any]:
        in_transaction = claim.scope == "transaction"
        return {
            "key": claim.key,
            # Free on commit: the database itself keeps the row until then.
            "status": "S" if in_transaction else "P",
            "ttl": 0 if in_transaction else round(claim.ttl * MICROSECONDS),
            "owner": claim.owner,
            "holder": claim.holder[:255],
            "owner_ip": claim.owner_ip,
            "grace": -round(self.grace * MICROSECONDS),
        }

    def _one_of(self, column: str, values: Sequence[str]) -> tuple[str, dict[str, Any]]:
        names = {f"{column}_{number}": value for number, value in enumerate(values)}
        return f"{column} IN ({', '.join(f'%({name})s' for name in names)})", names

    def _rows(self, sql: str, parameters: Mapping[str, Any]) -> Any:
        def fetch(cursor: Any) -> Any:
            cursor.execute(sql, parameters)
            return cursor.fetchall()

        return self._run(fetch)

    def _count(
        self,
        sql: str,
        parameters: Mapping[str, Any],
        *,
        locked: Callable[[], int] | None = None,
    ) -> int:
        """Return the number of rows that the statement changed."""

        def count(cursor: Any) -> int:
            cursor.execute(sql, parameters)
            return int(cursor.rowcount)

        return self._run(count, locked=locked)

    def _run(self, work: Callable[[Any], T], *, locked: Callable[[], T] | None = None) -> T:
        """
        Do one statement's work; outside a transaction, again when it only lost a race or its connection was dead.

        ``locked`` answers for a row that another transaction has. Every statement of this module may be sent twice.
        """
        connection = self.connection
        ours = not self.in_transaction()
        tries, reconnected = 0, False
        while True:
            try:
                with connection.cursor() as cursor:
                    return work(cursor)
            except Error as error:
                if not ours or not isinstance(error, (DatabaseError, InterfaceError)):
                    raise self._failure(error) from error
                if locked is not None and isinstance(error, DatabaseError) and self.dialect.is_locked(error):
                    return locked()
                if isinstance(error, DatabaseError) and self.dialect.is_contention(error) and tries < CONTENTION_TRIES:
                    tries += 1
                    time.sleep(random.uniform(0, 0.002 * 2**tries))  # noqa: S311 (jitter)
                    continue
                if (
                    isinstance(error, (OperationalError, InterfaceError))
                    and connection.connection is not None
                    and not reconnected
                    and not connection.is_usable()
                ):
                    connection.close()
                    reconnected = True
                    continue
                raise self._failure(error) from error

    def _failure(self, error: Error) -> LockBackendError:
        return LockBackendError(
            f"Database {self.database!r} could not be asked about a lock: {type(error).__name__}: {error}"
        )

    @contextmanager
    def _briefly(self) -> Iterator[None]:
        """Bound what SQLite waits for its one writer; elsewhere no statement waits."""
        connection = self.connection
        if connection.vendor != "sqlite" or self.in_transaction():
            yield
            return
        try:
            connection.ensure_connection()
        except Error as error:
            raise self._failure(error) from error
        raw = connection.connection
        ((usual,),) = raw.execute("PRAGMA busy_timeout").fetchall()
        raw.execute(f"PRAGMA busy_timeout = {min(usual, SQLITE_PATIENCE_MS)}")
        try:
            yield
        finally:
            raw.execute(f"PRAGMA busy_timeout = {usual}")


class _NothingGrantedError(Exception):
    """Takes a savepoint back."""


class PessimisticBackend(DatabaseBackend):
    """Lock the row, then write it: the default."""

    def _take(self, claim: Claim) -> tuple[int | None, Row | None]:
        token = self._grant(claim)
        return token, None if token is not None else self._look(claim)


class OptimisticBackend(DatabaseBackend):
    """
    Read the row without a lock, then write it where its version is still the one that was read.

    A process remembers the version that it left behind, so it need not read a key that nobody else took meanwhile.
    Waiting only reads.
    """

    _REMEMBERED = 10_000

    def __init__(self, alias: str, **options: Any) -> None:
        super().__init__(alias, **options)
        self._versions: dict[str, int] = {}

    def _take(self, claim: Claim) -> tuple[int | None, Row | None]:
        version = self._versions.pop(claim.key, None)
        if version is not None:
            token = self._swap(claim, version)
            if token is not None:
                return token, None
        row = self._look(claim)
        if row is None or not row.free:
            return None, row
        return self._swap(claim, row.version), row

    def _swap(self, claim: Claim, version: int) -> int | None:
        token = self._grant(claim, "version = %(version)s", version=version)
        if token is not None:
            # A bet that nobody else takes the key before this process does again; lost bets cost a read.
            if len(self._versions) >= self._REMEMBERED:
                self._versions.clear()
            self._versions[claim.key] = token
        return token


class InsertBackend(DatabaseBackend):
    """
    Insert the row, then delete it: the unique key is the lock, and the table holds only what is held.

    Tokens come from the clock alone between two rows of a key, so they grow as long as it does not step back between
    two holds. Giving back needs the right to DELETE.
    """

    def _take(self, claim: Claim) -> tuple[int | None, Row | None]:
        if claim.scope == "lease":
            # Elsewhere an insert could wait for a transaction that has the row.
            row = None if self.connection.vendor == "sqlite" else self._look(claim)
            if row is None and (token := self._insert(claim)) is not None:
                return self._token_of_own_row(claim, token), None
        token = self._grant(claim)
        return token, None if token is not None else self._look(claim)

    def _token_of_own_row(self, claim: Claim, first: int) -> int:
        """Draw the token again, now that the row is this claim's."""
        if self.connection.vendor == "sqlite":
            # Drawn under the lock of the one writer.
            return first
        # The first was drawn before the row was there: somebody else may have had the key, and a larger token, in
        # between.
        for number in range(CONTENTION_TRIES):
            if (token := self._grant(claim)) is not None:
                return token
            # Locked for a moment by somebody who looks whether it is free.
            time.sleep(random.uniform(0, 0.002 * 2**number))  # noqa: S311 (jitter)
        raise LockBackendError(
            f"The row of {claim.key!r} on database {self.database!r} is locked by another transaction."
        )

    def _insert(self, claim: Claim) -> int | None:
        if self.connection.vendor == "mysql":
            before, after, first = "INSERT IGNORE", "", "LAST_INSERT_ID({ticks})"
        else:
            before, after, first = "INSERT", "ON CONFLICT DO NOTHING", "{ticks}"
        values = "%(key)s, %(status)s, %(owner)s, %(holder)s, %(owner_ip)s, {now}, {end}, 1{at_once_term}, " + first
        sql = self._sql(self._insertion, self.dialect.at_once + before, values, after + self.dialect.returning)
        return self._granted(sql, self._parameters(claim))

    def release(self, claim: Claim, *, failed: bool = False, keep: float = 0.0) -> bool:
        if claim.scope == "transaction":
            # A row deleted by an open transaction would make everybody's insert wait, so it goes after the commit.
            if self.connection.in_atomic_block and not keep:
                transaction.on_commit(partial(self._delete, claim), using=self.database, robust=True)
            return super().release(claim, failed=failed, keep=keep)
        return (not keep and self._delete(claim)) or super().release(claim, failed=failed, keep=keep)

    def _delete(self, claim: Claim) -> bool:
        # Only once the clock has passed the token, or the next row could be given the same one.
        sql = self._sql(self.dialect.delete, f"{KEY} AND owner = %(owner)s AND version < {{ticks}}")
        parameters = {"key": claim.key, "owner": claim.owner}
        sent = 0

        def delete(cursor: Any) -> int:
            nonlocal sent
            sent += 1
            cursor.execute(sql, parameters)
            return int(cursor.rowcount)

        if self._run(delete) == 1:
            return True
        # The reply to the first may have been lost, and the row with it.
        gone = self._sql(lambda table: f"SELECT COUNT(*) FROM {table} WHERE {KEY}")
        return sent > 1 and int(self._rows(gone, parameters)[0][0]) == 0
