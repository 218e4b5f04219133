"""Locks as rows of one table, in the project's own database.

The backends share the table and exclude each other. They differ in how they acquire a
row:

* ``PessimisticBackend`` locks the row without waiting, and writes it, in one statement.
  It uses ``SELECT ... FOR UPDATE SKIP LOCKED``, or on MariaDB an ``UPDATE`` that waits
  for no lock.
* ``OptimisticBackend`` reads the row without a lock, and writes it if ``version`` is
  unchanged.
* ``InsertBackend`` inserts and deletes the row. The unique key itself is the lock.

A lease is a row with an ``end_time`` in the future. Each change of it is a committed
statement of its own. In transaction scope the row is written so that it is free as soon
as the caller's transaction commits. Until then the database itself keeps all other
callers away from it. No statement here waits for a row that another transaction has
locked.
"""

from __future__ import annotations

import copy
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar

from django.db import transaction
from django.db.utils import DatabaseError, Error

from dlocks.backends.base import Backend
from dlocks.backends.database.batch import Batch
from dlocks.backends.database.checks import check_database
from dlocks.backends.database.driver import (
    FREE_BY_CLOCK,
    GRANT,
    IN_QUEUE,
    MICROSECONDS,
    RELEASED,
    STALE_AFTER_GRACE,
)
from dlocks.backends.database.expiry import Observations
from dlocks.backends.database.history import HistoryTable
from dlocks.backends.database.inspector import DatabaseInspector, holder_of
from dlocks.backends.database.maintenance import BATCH, STALE, Maintenance
from dlocks.backends.database.queue import (
    RELEASE_RETRY_LIMIT,
    ROW_LOCK_LIMIT,
    QueueBatcher,
)
from dlocks.backends.database.watchdog import table_watchdog
from dlocks.backends.notifiers import RecentKeys
from dlocks.exceptions import LockBackendError, LockNotAwaitable, LockStale
from dlocks.runtime import clock
from dlocks.runtime.pools import is_pooled
from dlocks.sql.dialect import KEY
from dlocks.sql.direct import Reply
from dlocks.sql.engines import refuse_lost
from dlocks.sql.innodb import InnoDB
from dlocks.text import permits_taken
from dlocks.values import UNLIMITED, Claim, Grant, Holder, Kept

T = TypeVar("T")

# Attempts to acquire a key that appears to be free, per call.
FREE_TRIES = 3
# Reads that find a row locked before a transaction is assumed to keep it.
LOCKED_TRIES = 4

# The isolation levels at which each statement takes its own snapshot.
STATEMENT_SNAPSHOTS = {"READ COMMITTED", "READ UNCOMMITTED"}


@dataclass(frozen=True, slots=True)
class Row:
    """A lock row, as read without a row lock. ``free`` depends on the claim."""

    free: bool
    stale: bool
    version: int
    # Free, but the key has shared holds or earlier waiters.
    blocked: bool
    # The end of the lease in microseconds since 1970.
    ends: int


class Either:
    """The members of two sets."""

    def __init__(self, one: set[str], other: set[str]) -> None:
        self._sets = one, other

    def __contains__(self, key: object) -> bool:
        return key in self._sets[0] or key in self._sets[1]


class DatabaseBackend(Batch, Maintenance, HistoryTable, Backend):
    """The base class of the database backends.

    ``database`` is an alias of DATABASES that accepts writes.

    ``listen`` says whether waiters are notified of their turn. Processes on the same
    host send each other datagrams. Processes on other hosts use NOTIFY on PostgreSQL,
    and interrupt a sleeping statement on MariaDB and MySQL. By default the server
    notifies if the session belongs to the process alone. Behind a pooler, and on
    SQLite, processes poll for grants without a notification. With ``False`` there are
    no notifications.

    ``prepare`` says whether most statements outside of transactions bypass Django's
    cursor and go to the driver. Connections with an instrumented cursor are excepted.
    On PostgreSQL these are the statements that a session sends often, which are
    prepared. By default this needs a session that belongs to the process alone. With
    ``True`` it includes poolers that support prepared statements.

    ``history`` says whether each hold that ends is recorded in the history.

    ``expiry`` says how other callers detect that a holder is gone. With ``"clock"`` it
    is gone when its lease has ended by the database's clock. With ``"observed"`` it is
    gone when its row has not changed for ttl and grace on the clock of the waiting
    process. That is immune to clock steps, but it takes that long from the start of the
    wait, and only waiters can do it. All processes need the same value, and no claim's
    ttl may exceed the backend's.
    """

    supports_transactions: ClassVar[bool] = True
    supports_handover: ClassVar[bool] = True
    supports_guard: ClassVar[bool] = True

    def __init__(
        self,
        alias: str,
        *,
        database: str = "default",
        listen: bool | None = None,
        prepare: bool | None = None,
        history: bool = False,
        expiry: str = "clock",
        **options: Any,
    ) -> None:
        super().__init__(alias, **options)
        if not isinstance(database, str):
            raise TypeError(f"database must be an alias of DATABASES, not {database!r}")
        for name, value in (("listen", listen), ("prepare", prepare)):
            if value is not None and not isinstance(value, bool):
                raise TypeError(f"{name} must be True, False or None, not {value!r}")
        if not isinstance(history, bool):
            raise TypeError(f"history must be True or False, not {history!r}")
        if expiry not in ("clock", "observed"):
            raise ValueError(f"expiry must be 'clock' or 'observed', not {expiry!r}")
        self.database = database
        self.listening = listen
        self.prepare = prepare
        self.history = history
        self._crowded = RecentKeys()
        self._asked: set[str] = set()
        self.contended = Either(self._crowded, self._asked)
        self._batcher = QueueBatcher()
        # The texts of the most frequent statements, by what they depend on.
        self._texts = {}
        self._grants: dict[tuple[Any, ...], str] = {}
        self._releases: dict[bool, str] = {}
        self.inspector = DatabaseInspector(self)
        self.expiry = expiry
        if expiry == "observed":
            self.observations = Observations(self.ttl + self.grace)

    @property
    def grants_in_queue(self) -> bool:  # type: ignore[override]
        return self.observations is None

    @property
    def renews_late(self) -> bool:
        # While a transaction writes to SQLite, no lease can be renewed and no other
        # caller can acquire a key.
        return self.dialect.one_writer

    # The interface of a backend.

    def acquire(self, claim: Claim) -> Grant | None:
        self._refuse_unstorable(claim.key)
        if claim.shared:
            if (grant := self._share(claim)) is None:
                self._refuse(claim, None)
            return grant
        self._asked.add(claim.key)
        try:
            return self._acquire(claim)
        finally:
            self._asked.discard(claim.key)

    def _acquire(self, claim: Claim) -> Grant | None:
        token, row = self._take(claim)
        for number in range(FREE_TRIES):
            if token is not None or row is not None:
                break
            if number:
                # The row was not created, because another statement had locked the gap
                # at that moment.
                time.sleep(random.uniform(0, 0.001 * 2**number))  # noqa: S311 (jitter)
            self._create(claim.key)
            token, row = self._take(claim)
        if (
            token is None
            and row is not None
            and row.blocked
            and self._unblock(claim.key)
        ):
            # The waiters were dead, or their turn has passed.
            token, row = self._take(claim)
        if (
            token is None
            and row is not None
            and row.stale
            and claim.takeover
            and self.observations is not None
        ):
            # Observations decide here, not the clock.
            end = partial(self._expire_observed, claim.key, row.version, row.ends)
            if self._beside(end):
                token, _ = self._take(claim)
        if token is not None:
            return Grant(token, takeover=row is not None and row.stale)
        self._refuse(claim, row)
        return None

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        left: dict[str, float] = {}
        for kind in {(claim.ttl, claim.shared, claim.late) for claim in claims}:
            alike = [
                claim
                for claim in claims
                if (claim.ttl, claim.shared, claim.late) == kind
            ]
            for start in range(0, len(alike), BATCH):
                left |= self._renew(alike[start : start + BATCH], *kind)
        return left

    def verify(self, claims: Sequence[Claim], count: int | None = None) -> bool:
        if count is None:
            return self._verify_all(claims)
        (claim,) = claims
        assignments = "hold_count = %(count)s" + (
            f", end_time = {self._renewed}" if claim.late else ""
        )
        parameters = {"count": count, "ttl": round(claim.ttl * MICROSECONDS)}
        if claim.shared:
            live = "version IS NOT NULL" if claim.late else self._live_share
            sql = (
                f"UPDATE {{claims}} SET {assignments} WHERE owner = %(owner)s AND"
                f" {live}"
            )
            return (
                self._count(self._text(sql), {"owner": claim.owner, **parameters}) == 1
            )
        where = f"{KEY} AND owner = %(owner)s"
        if claim.scope == "lease":
            # In transaction scope the row is already written as free. It is held as
            # long as it has this owner.
            where += " AND status = 'P'" if claim.late else f" AND {self._live}"
        return self._write(claim, assignments, where, parameters)

    def release(self, claim: Claim, *, failed: bool = False, keep: float = 0.0) -> bool:
        if claim.scope == "transaction" and not claim.shared and self.in_transaction():
            if self.connection.needs_rollback:
                # The rollback releases it.
                return True
            return self._release_on_commit(claim, failed=failed, keep=keep)
        session, began = self._session(), clock.now()
        if failed:
            # The caller may have timed out as a waiter. Then it has no time left.
            with self._briefly():
                released = self._release(claim, failed=failed, keep=keep)
        else:
            with table_watchdog.patience():
                released = self._release(claim, failed=failed, keep=keep)
        if released:
            return True
        return not claim.shared and self._was_released([claim], session, began)

    def _release(self, claim: Claim, *, failed: bool, keep: float) -> bool:
        if not claim.shared:
            contended = not keep and claim.key in self._crowded
            if contended and self._hand_over(claim, failed=failed):
                return True
            if self._release_at_once(claim, failed=failed, keep=keep):
                self._crowded.discard(claim.key)
                return True
            # The key has waiters, or the claim has something else to release.
            if not keep and not contended and self._hand_over(claim, failed=failed):
                return True
        return self._release_queued(claim, failed=failed, keep=keep)

    def _release_at_once(self, claim: Claim, *, failed: bool, keep: float) -> bool:
        """Release the key in one statement if it has no waiters."""
        # A crash of the server may lose the release of a lease. Then the lease expires,
        # and there is no other harm.
        forgettable = not keep and not self.in_transaction()
        if (sql := self._releases.get(forgettable)) is None:
            assignments = (
                "status = %(status)s, hold_count = 0, end_time ="
                f" {self.dialect.after('keep')}"
            )
            where = f"{KEY} AND owner = %(owner)s AND waiters = 0"
            sql = self._sql(self.dialect.compare_and_swap, assignments, where)
            sql = self._releases[forgettable] = sql + (
                self.dialect.forgettable if forgettable else ""
            )
        parameters = {
            "status": "F" if failed else "S",
            "keep": round(keep * MICROSECONDS),
            "key": claim.key,
            "owner": claim.owner,
        }
        with self._forgettably() if forgettable else nullcontext():
            return self._count(sql, parameters, locked=lambda: 0) == 1

    def _release_on_commit(self, claim: Claim, *, failed: bool, keep: float) -> bool:
        dialect = self.dialect
        assignments = (
            "status = %(status)s, hold_count = 0, end_time ="
            f" {dialect.after('keep')}{dialect.count_in}"
        )
        parameters = {
            "status": "F" if failed else "S",
            "keep": round(keep * MICROSECONDS),
        }
        return self._write(
            claim,
            assignments,
            f"{KEY} AND owner = %(owner)s",
            parameters,
            dialect.tell_first,
        )

    def pin(self, claim: Claim, database: str) -> bool:
        if database == self.database:
            return self._pin(claim, self)
        there = copy.copy(self)
        # The schema in which the hold was granted. Sessions of the other alias may
        # begin with another search path.
        there._tables = self._tables
        there.database = database
        return there._pin(claim, self)

    def _pin(self, claim: Claim, own: DatabaseBackend) -> bool:
        # The row is written, not only locked, because the other nodes of a Galera
        # cluster do not see row locks.
        parameters: dict[str, Any] = {
            "key": claim.key,
            "owner": claim.owner,
            "ttl": round(claim.ttl * MICROSECONDS),
        }
        if claim.shared:
            # The search for expired shared holds skips rows that are locked.
            table, primary, mine = (
                "{claims}",
                "id",
                f"owner = %(owner)s AND NOT {IN_QUEUE}",
            )
        else:
            table, primary, mine = (
                "{locks}",
                "key_resource",
                f"{KEY} AND owner = %(owner)s AND status = 'P'",
            )
        row = mine, parameters, table, primary
        read, write = partial(self._own_row, *row), partial(self._renew_picked, *row)
        if isinstance(self.dialect, InnoDB):
            # One statement at READ COMMITTED. At another level it finds and locks
            # nothing.
            if self._renew_picked(
                f"{mine} AND {self.dialect.read_committed}", parameters, table, primary
            ):
                return True
            level, rolls_back = self._isolation()
            if level not in STATEMENT_SNAPSHOTS:
                # A plain SELECT would take the transaction's snapshot. MariaDB then
                # refuses to lock a row that changed since (innodb_snapshot_isolation,
                # 11.6). The rows of a TestCase cannot be seen from outside.
                if not self.keeps_shares():
                    read = partial(own.runtime.run, partial(own._own_row, *row))
                if claim.shared:
                    if not (rows := read()):
                        return False
                    parameters["id"] = rows[0][1]
                write = partial(self._renew_by_primary_key, *row, rolls_back=rolls_back)
        return bool(self._retry_release(write, claim.key, read))

    def _renew_picked(
        self, mine: str, parameters: Mapping[str, Any], table: str, primary: str
    ) -> int:
        return self._count(
            self._text(
                self.dialect.update(table, f"end_time = {self._renewed}", mine, primary)
            ),
            parameters,
        )

    def _renew_by_primary_key(
        self,
        mine: str,
        parameters: Mapping[str, Any],
        table: str,
        primary: str,
        *,
        rolls_back: bool,
    ) -> int:
        """Lock and write a row in an InnoDB transaction above READ COMMITTED.

        Return 0 if the row is locked. At that level a search by another index, or one
        that skips a locked row, also locks the gap beside the row until the transaction
        ends. Then no session can insert a row there. A search by the whole primary key
        does not lock the gap.
        """
        row = KEY if primary == "key_resource" else "id = %(id)s"
        indexed = f"{table} FORCE INDEX (PRIMARY)"
        try:
            self._rows(
                self._text(f"SELECT 1 FROM {indexed} WHERE {row} FOR UPDATE NOWAIT"),
                parameters,
            )
        except LockBackendError as error:
            if rolls_back or not (
                isinstance(error.__cause__, DatabaseError)
                and self.dialect.is_locked(error.__cause__)
            ):
                raise
            return 0
        writing = (
            f"UPDATE {indexed} SET end_time = {self._renewed} WHERE {row} AND {mine}"
        )
        return self._count(self._text(writing), parameters)

    def _own_row(
        self,
        mine: str,
        parameters: Mapping[str, Any],
        table: str = "{locks}",
        column: str = "version",
    ) -> Any:
        """Return the seconds left of a lease, and the value of a column.

        ``mine`` is the condition for the row.
        """
        left = self.dialect.seconds_until("end_time")
        return self._rows(
            self._text(f"SELECT {left}, {column} FROM {table} WHERE {mine}"), parameters
        )

    def exchange(self, claim: Claim, successor: Claim) -> Grant | None:
        # The successor's row matches too, in case the reply to an exchange was lost.
        where = f"{KEY} AND owner IN (%(owner)s, %(predecessor)s) AND {self._live}"
        sql = (
            self._sql(self.dialect.compare_and_swap, GRANT, where)
            + self.dialect.returning
        )
        parameters = {**self._parameters(successor), "predecessor": claim.owner}
        read = partial(self._own_row, where, parameters)
        token = self._retry_release(
            lambda: self._granted(sql, parameters), claim.key, read
        )
        return None if token is None else Grant(token)

    def holder(self, key: str) -> Holder | None:
        from dlocks.models import LockState

        row = self._holder_row(key, Kept())
        if (
            row is not None
            and row["state"] == LockState.STALE
            and (kept := self.kept([key])) != Kept()
        ):
            row = self._holder_row(key, kept)
        if row is None or row["state"] == LockState.FREE:
            return None
        return holder_of(row)

    def row_of(self, key: str, kept: Kept = Kept()) -> Any:  # noqa: B008 (immutable)
        from dlocks.models import ResourceLock

        rows = ResourceLock.objects.using(self.database).by_clock(kept)
        return self._run(lambda *_: rows.filter(pk=key).values().first())

    def _holder_row(self, key: str, kept: Kept) -> Any:
        from dlocks.models import LockState

        row = self.row_of(key, kept)
        if row is None or row["state"] != LockState.FREE or not row["shares"]:
            return row
        # A live hold comes before a stale one.
        return self._run(lambda *_: self.shares_of(key, kept).first())

    def shares_of(self, key: str, kept: Kept) -> Any:
        from dlocks.models import LockClaim

        shares = (
            LockClaim.objects.using(self.database)
            .by_clock(kept)
            .filter(key_resource=key, version__isnull=False)
        )
        return shares.order_by("state", "id").values()

    @cached_property
    def identity(self) -> str:
        return f"database {self.database}"

    @property
    def connect_first(self) -> Callable[[], object] | None:
        connection = self.connection
        if connection.connection is None and is_pooled(connection):
            return self._session
        return None

    def refusal(self, claim: Claim) -> str | None:
        if claim.scope == "lease":
            if self.dialect.one_writer and self.in_transaction():
                return (
                    "SQLite has one writer, which may be the transaction open on"
                    f" {self.database!r}. A lease could not be written beside it."
                    " Acquire the lock before the transaction, or omit scope='lease'."
                )
        elif claim.shared:
            # A shared hold is not the lock row, which a transaction could keep.
            if not self.keeps_shares():
                return "A shared lock does not support scope='transaction'."
        elif self.in_transaction() and not self.connection.in_atomic_block:
            refuse_lost(self.connection)
        if (why := super().refusal(claim)) is not None:
            return why
        if self.observations is not None and claim.ttl > self.ttl:
            return (
                f"A ttl of {claim.ttl:g} s is too long. With expiry='observed', other"
                f" callers watch a row for the ttl of the backend ({self.ttl:g} s), and"
                " would treat a longer lease as expired. Raise OPTIONS['ttl'] in all"
                " processes."
            )
        return None

    def keeps_shares(self) -> bool:
        """Return whether no other caller can exist beside the open transaction.

        Then even a shared hold can belong to it. In a TestCase no other caller can
        wait, and a committed row would remain for the next test.
        """
        return self.in_transaction() and (
            self.dialect.one_writer
            or any(
                getattr(block, "_from_testcase", False)
                for block in self.connection.atomic_blocks
            )
        )

    def close(self) -> None:
        self.connection.close()

    def check(self) -> list[Any]:
        return check_database(self.alias, self.database)

    # How a row is acquired.

    def _take(self, claim: Claim) -> tuple[int | None, Row | None]:
        """Return the token of the grant, or None, and the row if it was read.

        The row is as it was before the grant.
        """
        raise NotImplementedError

    def _grant(
        self, claim: Claim, *conditions: str, stale: bool = False, **parameters: Any
    ) -> int | None:
        """Write the row for this claim, and return the token.

        The last holder must have released the key. With ``stale``, its lease must have
        expired without a release.
        """
        stale = stale and claim.takeover
        shape = (claim.scope, claim.fair, stale, conditions)
        if (sql := self._grants.get(shape)) is None:
            free = STALE_AFTER_GRACE if stale else RELEASED
            where = " AND ".join([KEY, f"({self._free(claim, free)})", *conditions])
            statement: Callable[..., str] = self.dialect.compare_and_swap
            if claim.scope == "transaction":
                statement = self.dialect.write_or_leave
                if self.dialect.read_committed:
                    where += f" AND {self.dialect.read_committed}"
            sql = self._grants[shape] = (
                self._sql(statement, GRANT, where) + self.dialect.returning
            )
        if claim.scope == "transaction" and self.dialect.locks_in_passing:
            return self._granted_or_undone(sql, self._parameters(claim) | parameters)
        return self._granted(sql, self._parameters(claim) | parameters)

    def _grant_or_take_over(self, claim: Claim) -> tuple[int | None, Row | None]:
        # There are two steps, so that a takeover is known to be one. The second step is
        # rarely needed.
        if (token := self._grant(claim)) is not None:
            return token, None
        row = self._look(claim)
        for number in range(FREE_TRIES):
            if row is None or not row.free:
                return None, row
            # ``row.stale`` may be outdated, since the holder may have released the row
            # after the read.
            if (token := self._grant(claim, stale=row.stale)) is not None:
                return token, row
            # The key is free but was not granted. Another caller reads the row at that
            # moment, or an open transaction has locked it.
            time.sleep(random.uniform(0, 0.001 * 2**number))  # noqa: S311 (jitter)
            row = self._look(claim)
        return None, row

    def _granted_or_undone(self, sql: str, parameters: Mapping[str, Any]) -> int | None:
        """Grant inside a savepoint; roll back to it if nothing was granted.

        So no row stays locked.
        """
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
        if not self.dialect.one_writer:
            return self.dialect.granted(self._ask(sql, parameters, locked=_nothing))
        with self._briefly():
            try:
                return self.dialect.granted(self._ask(sql, parameters, locked=_nothing))
            except LockBackendError as error:
                if self.in_transaction():
                    error.add_note(
                        "Set OPTIONS['transaction_mode'] = 'IMMEDIATE' for this"
                        " database."
                    )
                raise

    def _look(self, claim: Claim) -> Row | None:
        # This check comes first, since at SERIALIZABLE even a read locks the row on
        # InnoDB.
        self._refuse_unfit_transaction(claim)
        sql = self._sql(
            lambda table, free, stale: (
                f"SELECT CASE WHEN {free} THEN 1 ELSE 0 END, CASE WHEN {stale} THEN 1"
                f" ELSE 0 END, version, CASE WHEN {FREE_BY_CLOCK} AND (waiters > 0 OR"
                f" shares > 0) THEN 1 ELSE 0 END, {self.dialect.ticks_of('end_time')}"
                f" FROM {table} WHERE {KEY}"
            ),
            self._free(claim, FREE_BY_CLOCK if claim.takeover else RELEASED),
            STALE if self.observations is None else "status = 'P'",
        )
        asked_at = clock.now()
        for free, stale, version, blocked, ends in self._rows(
            sql, self._parameters(claim)
        ):
            if stale and self.observations is not None:
                stale = (
                    self.observations.note(claim.key, (version, ends), asked_at) <= 0
                )
            return Row(bool(free), bool(stale), version, bool(blocked), int(ends))
        return None

    def in_transactions(
        self, rows: Sequence[Any], table: str = "{locks}", primary: str = "key_resource"
    ) -> frozenset[Any]:
        """Return the rows that an open transaction has locked.

        ``rows`` are primary keys. On SQLite all of them are returned while another
        transaction writes, since that locks the whole database. None are returned where
        no other transaction can have locked them, as within a transaction on SQLite or
        in a TestCase.
        """
        if not rows or self.keeps_shares():
            return frozenset()
        if self.dialect.one_writer:
            sql = self._text(
                f"UPDATE {table} SET version = version WHERE {primary} IS NULL"
            )
            with self._briefly():
                return (
                    frozenset(rows)
                    if self._count(sql, {}, locked=lambda: -1) < 0
                    else frozenset()
                )
        # In a caller's transaction, a row locked by this read would stay locked until
        # the end.
        return self._beside(partial(self._find_transaction_locks, rows, table, primary))

    def _find_transaction_locks(
        self, rows: Sequence[Any], table: str, primary: str
    ) -> frozenset[Any]:
        locked = frozenset(rows)
        index = " FORCE INDEX (PRIMARY)" if self.connection.vendor == "mysql" else ""
        for number in range(LOCKED_TRIES):
            if number:
                # Most statements lock a row for a moment only.
                time.sleep(random.uniform(0, 0.002 * 2**number))  # noqa: S311 (jitter)
            where, parameters = self._one_of(primary, list(locked))
            sql = (
                f"SELECT {primary} FROM {table}{index} WHERE"
                f" {where}{self.dialect.for_update}"
            )
            locked -= {row for (row,) in self._rows(self._text(sql), parameters)}
            if not locked:
                break
        return locked

    def _unblock(self, key: str) -> bool:
        """Advance the queue; return whether no waiter is in the way any more."""
        return self._beside(partial(self.move_on, key))

    def _beside(self, function: Callable[[], T]) -> T:
        """Call a function outside of the caller's transaction, where that can be."""
        if self.in_transaction() and not self.dialect.one_writer:
            return self.runtime.run(function)
        return function()

    def _create(self, key: str) -> None:
        """Create the row as free, in a statement that is committed by itself.

        An uncommitted insert would make all other callers wait.
        """
        inside = self.keeps_shares()
        at_once, term = ("", "") if inside else (self.dialect.at_once, "{at_once_term}")
        before, after = self.dialect.insert_or_ignore
        sql = self._sql(
            self._insertion,
            at_once + before,
            f"%(key)s, 'S', '', '', NULL, NULL, {{now}}, 0{term}, {{ticks}}",
            after,
        )

        def create() -> int:
            with self._briefly():
                return self._count(sql, {"key": key}, locked=lambda: 0)

        if self.in_transaction() and not inside:
            self.runtime.run(create)
        else:
            create()

    def _insertion(self, table: str, before: str, values: str, after: str) -> str:
        return (
            f"{before} INTO {table} (key_resource, status, owner, holder, owner_ip,"
            f" begin_time, end_time, hold_count, version) VALUES ({values}) {after}"
        )

    def _refuse_unfit_transaction(self, claim: Claim) -> None:
        # A snapshot that is older than the lock would not show the changes of the last
        # holder. A transaction that ends when it meets a locked row could not try at
        # all.
        dialect = self.dialect
        if claim.scope != "transaction" or dialect.read_committed is None:
            return
        level, all_or_nothing = self._isolation()
        if level not in STATEMENT_SNAPSHOTS:
            raise RuntimeError(
                f"{claim.key!r} cannot be locked in this transaction, which runs at"
                f" {level} on database {self.database!r}. Its snapshot may be older"
                " than the lock and hide the last holder's changes. Acquire the lock"
                " before the transaction begins, or run it at READ COMMITTED."
            )
        if all_or_nothing:
            raise RuntimeError(
                f"{claim.key!r} cannot be locked in this transaction. The server of"
                f" database {self.database!r} runs with innodb_rollback_on_timeout=ON,"
                " so a busy key would roll back the whole transaction. Acquire the lock"
                " before the transaction begins, or with scope='lease'."
            )

    def _isolation(self) -> tuple[str, bool]:
        """Return the isolation level, and the effect of a lock wait timeout.

        The second value is true if the timeout rolls back the whole transaction.
        """
        level, *all_or_nothing = self._rows(self.dialect.show_isolation, {})[0]
        return level.upper().replace("-", " "), any(all_or_nothing)

    def _refuse(self, claim: Claim, row: Row | None) -> None:
        """Raise an error if waiting would not help."""
        if (
            row is not None
            and row.stale
            and not claim.takeover
            and not self.in_transactions([claim.key])
        ):
            raise LockStale(key=claim.key, holder=self.holder(claim.key))
        if claim.scope == "transaction" and self.connection.vendor == "sqlite":
            holder = self.holder(claim.key)
            who = f"held by {holder or 'another caller'}"
            if claim.permits < UNLIMITED:
                sharers, waiting = self.inspector.sharers(claim.key)
                who = permits_taken(claim.permits, sharers, waiting) if sharers else who
            raise LockNotAwaitable(
                f"{claim.key!r} cannot be waited for inside a transaction: {who}."
                " SQLite has one writer, so its holder cannot release it before this"
                " transaction ends. Acquire the lock before the transaction.",
                key=claim.key,
                holder=holder,
            )

    def _renew(
        self, claims: Sequence[Claim], ttl: float, shared: bool, late: bool
    ) -> dict[str, float]:
        owners, owner_parameters = self._one_of(
            "owner", [claim.owner for claim in claims]
        )
        if shared:
            return self._renew_shares(claims, owners, owner_parameters, ttl, late)
        keys, key_parameters = self._one_of(
            "key_resource", [claim.key for claim in claims]
        )
        live = "status = 'P'" if late else self._live
        mine = f"{keys} AND {owners} AND {live}"
        parameters = {
            "ttl": round(ttl * MICROSECONDS),
            **key_parameters,
            **owner_parameters,
        }
        sql = self._sql(self.dialect.update, f"end_time = {self._renewed}", mine)
        with self._briefly():
            renewed = self._count(sql, parameters, locked=lambda: -1)
        if renewed == len(claims):
            return {claim.owner: ttl for claim in claims}
        if renewed < 0 and self.renews_late:
            # Another transaction writes. The rows stay unchanged until it has ended.
            return {claim.owner: 0.0 for claim in claims}
        if self.observations is not None:
            mine = f"{KEY} AND owner = %(owner)s AND {self._live}"
            return self._renew_each(claims, ttl, self.table, "key_resource", mine)
        # Some claims are lost, or their rows were locked at that moment, perhaps by a
        # transaction of this process that pins one. Leases that are still valid are
        # kept.
        left = self.dialect.seconds_until("end_time")
        sql = self._sql(
            lambda table, where: f"SELECT owner, {left} FROM {table} WHERE {where}",
            mine,
        )
        return {
            owner: min(float(seconds), ttl)
            for owner, seconds in self._rows(sql, parameters)
        }

    def _renew_each(
        self, claims: Sequence[Claim], ttl: float, table: str, primary: str, mine: str
    ) -> dict[str, float]:
        """Renew the claims one by one, without relying on a clock.

        A claim whose row is locked keeps its previous lease.
        """
        left: dict[str, float] = {}
        sql = self._text(
            self.dialect.update(table, f"end_time = {self._renewed}", mine, primary)
        )
        for claim in claims:
            parameters = {
                "key": claim.key,
                "owner": claim.owner,
                "ttl": round(ttl * MICROSECONDS),
            }
            with self._briefly():
                if self._count(sql, parameters, locked=lambda: 0) == 1:
                    left[claim.owner] = ttl
                    continue
            if self._rows(
                self._text(f"SELECT 1 FROM {table} WHERE {mine}"), parameters
            ):
                left[claim.owner] = 0.0
        return left

    def _renew_shares(
        self,
        claims: Sequence[Claim],
        owners: str,
        parameters: Mapping[str, Any],
        ttl: float,
        late: bool,
    ) -> dict[str, float]:
        parameters = {"ttl": round(ttl * MICROSECONDS), **parameters}
        live = "version IS NOT NULL" if late else self._live_share
        with self._briefly():
            # A transaction that pins one row must not prevent the renewal of the
            # others.
            mine = f"{owners} AND {live}"
            sql = self._text(
                self.dialect.update(
                    "{claims}", f"end_time = {self._renewed}", mine, "id"
                )
            )
            renewed = self._count(sql, parameters, locked=lambda: -1)
        if renewed == len(claims):
            return {claim.owner: ttl for claim in claims}
        if renewed < 0 and self.renews_late:
            return {claim.owner: 0.0 for claim in claims}
        if self.observations is not None:
            return self._renew_each(
                claims,
                ttl,
                "{claims}",
                "id",
                f"owner = %(owner)s AND {self._live_share}",
            )
        left = self.dialect.seconds_until("end_time")
        sql = self._text(
            f"SELECT owner, {left} FROM {{claims}} WHERE {owners} AND {live}"
        )
        return {
            owner: min(float(seconds), ttl)
            for owner, seconds in self._rows(sql, parameters)
        }

    # The holder's own row.

    def _write(
        self,
        claim: Claim,
        assignments: str,
        where: str,
        parameters: Mapping[str, Any],
        returning: str = "",
    ) -> bool:
        """Write the holder's own row, without waiting for its lock.

        Return False if it no longer belongs to the holder.
        """
        parameters = {"key": claim.key, "owner": claim.owner, **parameters}
        if claim.scope == "transaction":
            # This transaction has locked the row already, unless the server has rolled
            # it back in the meantime.
            sql = self._sql(
                self.dialect.write_or_leave, assignments, where
            ) + self._text(returning)
            return self._count(sql, parameters, locked=lambda: 0) == 1
        sql = self._sql(self.dialect.compare_and_swap, assignments, where)
        write = partial(self._count, sql, parameters, locked=lambda: 0)
        return bool(
            self._retry_release(
                write,
                claim.key,
                partial(self._own_row, where, parameters),
                taken_over=True,
            )
        )

    def _retry_release(
        self,
        write: Callable[[], int | None],
        key: str,
        read: Callable[[], Any],
        *,
        taken_over: bool = False,
    ) -> int | None:
        """Retry to write the holder's own row, which others lock for moments.

        Return None if it no longer belongs to the holder. ``read`` returns the row,
        beginning with the seconds left of its lease, or nothing.
        """
        began = clock.real_now()
        for number in itertools.count():
            if written := write():
                return written
            # The row is missing or locked. A renewal, a poll or a step of the queue
            # locks it for a moment, and an open transaction for longer.
            left = read()
            if not left:
                return None
            if clock.real_now() > began + (
                RELEASE_RETRY_LIMIT if float(left[0][0]) > 0 else ROW_LOCK_LIMIT
            ):
                break
            time.sleep(random.uniform(0, 0.002 * 2 ** min(number, 5)))  # noqa: S311 (jitter)
        by_clock = self.observations is None and not self.dialect.one_writer
        if taken_over and by_clock and float(left[0][0]) <= 0:
            # The lease has expired, and an open transaction is taking it over.
            return None
        raise LockBackendError(
            f"The lock row of {key!r} on database {self.database!r} is locked by"
            " another transaction."
        )

    def _free(self, claim: Claim, free: str) -> str:
        """Return the condition under which the claim can be granted.

        ``free`` is the part about the last hold.
        """
        free += " AND shares = 0"
        if claim.fair:
            free += " AND waiters = 0"
        # This includes an earlier grant of the claim, whose reply was lost, and a key
        # that is reserved for it, since its turn has come.
        return free + " OR ((status = 'P' OR end_time > {now}) AND owner = %(owner)s)"

    def _parameters(self, claim: Claim) -> dict[str, Any]:
        in_transaction = claim.scope == "transaction"
        return {
            "key": claim.key,
            # Free on commit. Until then the database itself keeps the row locked.
            "status": "S" if in_transaction else "P",
            "ttl": 0 if in_transaction else round(claim.ttl * MICROSECONDS),
            "owner": claim.owner,
            "holder": self._fitted(claim.holder)[:255],
            "owner_ip": claim.owner_ip,
            "grace": self._grace,
        }


def _nothing() -> Reply:
    return Reply([], 0)


class _NothingGrantedError(Exception):
    """An exception that rolls back a savepoint."""


class PessimisticBackend(DatabaseBackend):
    """A backend that locks the row, then writes it. This is the default."""

    def _take(self, claim: Claim) -> tuple[int | None, Row | None]:
        return self._grant_or_take_over(claim)


class OptimisticBackend(DatabaseBackend):
    """A backend that reads the row and writes it if ``version`` is unchanged.

    The read takes no lock. A process remembers the versions that it wrote. So it need
    not read a key that no other process has acquired in the meantime. Waiting only
    reads.
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
        return self._swap(claim, row.version, stale=row.stale), row

    def _swap(self, claim: Claim, version: int, *, stale: bool = False) -> int | None:
        token = self._grant(
            claim, "version = %(version)s", stale=stale, version=version
        )
        if token is not None:
            # The guess is that no other process acquires the key before this one does
            # again. A wrong guess costs a read.
            if len(self._versions) >= self._REMEMBERED:
                self._versions.clear()
            self._versions[claim.key] = token
        return token


class InsertBackend(DatabaseBackend):
    """A backend that inserts and deletes the row; the unique key is the lock.

    The table contains only keys that are held. Between two rows of a key, tokens come
    from the clock alone. So they grow as long as the clock does not step back between
    two holds. A release needs the DELETE privilege.
    """

    # Its rows are inserted and deleted one by one.
    acquire_all = Backend.acquire_all
    release_all = Backend.release_all
    supports_fencing: ClassVar[bool] = False

    def _take(self, claim: Claim) -> tuple[int | None, Row | None]:
        if claim.scope == "lease":
            # On other engines, an insert could wait for a transaction that has locked
            # the row.
            row = None if self.connection.vendor == "sqlite" else self._look(claim)
            if row is None and (token := self._insert(claim)) is not None:
                # The token was calculated before the row existed. Another caller may
                # have held the key, with a larger token, in between. On SQLite it was
                # calculated under the lock of the one writer.
                return (
                    token
                    if self.connection.vendor == "sqlite"
                    else self._draw_again(claim)
                ), None
        return self._grant_or_take_over(claim)

    def _draw_again(self, claim: Claim) -> int | None:
        """Return a new token for this claim's row, or None if the row is lost."""
        read = partial(
            self._own_row,
            f"{KEY} AND owner = %(owner)s",
            {"key": claim.key, "owner": claim.owner},
        )
        return self._retry_release(lambda: self._grant(claim), claim.key, read)

    def _insert(self, claim: Claim) -> int | None:
        if self.connection.vendor == "mysql":
            before, after, first = "INSERT IGNORE", "", "LAST_INSERT_ID({ticks})"
        else:
            before, after, first = "INSERT", "ON CONFLICT DO NOTHING", "{ticks}"
        values = (
            "%(key)s, %(status)s, %(owner)s, %(holder)s, %(owner_ip)s, {now}, {end},"
            " 1{at_once_term}, " + first
        )
        sql = self._sql(
            self._insertion,
            self.dialect.at_once + before,
            values,
            after + self.dialect.returning,
        )
        return self._granted(sql, self._parameters(claim))

    def release(self, claim: Claim, *, failed: bool = False, keep: float = 0.0) -> bool:
        # A row deleted by an open transaction would make all inserts wait. So it is
        # deleted after the commit.
        if (
            claim.scope == "transaction"
            and self.connection.in_atomic_block
            and not keep
        ):

            def delete() -> None:
                # This is not a partial(), which has no name. Django logs the name of a
                # callback that fails after a commit.
                self._delete(claim)

            transaction.on_commit(delete, using=self.database, robust=True)
        return super().release(claim, failed=failed, keep=keep)

    def _release(self, claim: Claim, *, failed: bool, keep: float) -> bool:
        if claim.scope == "lease" and not keep and self._delete(claim):
            self._crowded.discard(claim.key)
            return True
        return super()._release(claim, failed=failed, keep=keep)

    def _delete(self, claim: Claim) -> bool:
        # Only once the clock has passed the token. Otherwise the next row could get the
        # same token.
        sql = self._sql(
            self.dialect.delete,
            f"{KEY} AND owner = %(owner)s AND version < {{ticks}} AND waiters = 0 AND"
            " shares = 0",
        )
        return (
            self._count(sql, {"key": claim.key, "owner": claim.owner}, locked=lambda: 0)
            == 1
        )
