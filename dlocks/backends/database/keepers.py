"""Which rows open transactions keep, and the sessions of those transactions.

The committed row of a key that a transaction holds is free. PostgreSQL shows without a
lock which rows are locked (``IN_TRANSACTION``). Elsewhere a probe has to lock
them, which may be in the way of a caller. So for what people read, a probe covers only
keys that have waiters and no lease, and expired leases. A process sends at most one of
each a second, and none on a replica. MySQL needs no probe for the former where its user
may read ``performance_schema.data_locks``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

from django.db.models import Q

from dlocks.backends.database.session import RowLockedError
from dlocks.backends.database.state import (
    IN_TRANSACTION,
    IS_IN_TRANSACTION,
    LOCKED_BY,
    Key,
    models,
)
from dlocks.backends.database.store import NOTHING, Store
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.sql.clock import Now
from dlocks.values import Holder, Kept

A = TypeVar("A")
R = TypeVar("R")

# Maximum number of rows that are read at a time.
PAGE = 1000
# Reads that find a row locked before a transaction is assumed to keep it.
LOCKED_TRIES = 4
# Seconds for which one of our own statements or steps may lock a row. Nothing shorter
# is shown.
BRIEF = 0.05
# Seconds between two probes of a process for the same kind of rows.
PROBE_EVERY = 1.0

# The transactions on PostgreSQL that may have locked rows of the table.
WRITERS = (
    "SELECT transactionid::text::bigint, pid, application_name, host(client_addr),"
    " EXTRACT(EPOCH FROM clock_timestamp() - xact_start)::float8 FROM pg_locks AS own"
    " LEFT JOIN pg_stat_activity USING (pid) WHERE locktype = 'transactionid' AND mode"
    " = 'ExclusiveLock' AND granted AND EXISTS (SELECT 1 FROM pg_locks AS theirs WHERE"
    " theirs.virtualtransaction = own.virtualtransaction AND theirs.relation ="
    " %(table)s::regclass AND theirs.mode IN ('RowShareLock', 'RowExclusiveLock'))"
)
# The keys on MySQL whose rows are locked, as literals. A lock of another mode covers
# the gap before a row, and not the row. The time at which a transaction began is in the
# time zone of the server.
LOCKERS = (
    "SELECT lock_data, engine_transaction_id, processlist_id, (SELECT attr_value FROM"
    " performance_schema.session_connect_attrs AS named WHERE named.processlist_id ="
    " threads.processlist_id AND attr_name = 'program_name'), processlist_host,"
    " TIMESTAMPDIFF(SECOND, trx_started, CONVERT_TZ(UTC_TIMESTAMP(), '+00:00',"
    " 'SYSTEM')) FROM performance_schema.data_locks JOIN performance_schema.threads"
    " USING (thread_id) JOIN information_schema.innodb_trx ON trx_id ="
    " engine_transaction_id WHERE object_schema = DATABASE() AND object_name ="
    " %(table)s AND index_name = 'PRIMARY' AND lock_type = 'RECORD' AND lock_status ="
    " 'GRANTED' AND lock_mode IN ('X', 'X,REC_NOT_GAP')"
)
# The time and the result of the last probe of each database for each kind of rows.
_probes: dict[tuple[str, str], tuple[float, Mapping[Any, Any]]] = {}


class Writer(NamedTuple):
    """A transaction, and its session as far as the user may see it."""

    transaction: int
    pid: int | None
    application: str | None
    host: str | None
    age: float | None


class Keepers:
    """The part that finds the open transactions which keep keys."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.session = store.session
        # Whether the user may read the row locks of MySQL.
        self._may_read_locks = True

    @property
    def finds_all(self) -> bool:
        """Return whether a transaction is found on every key, without a probe."""
        return self.session.engine.vendor == "postgresql"

    # Expired leases, and keys without a lease.

    def kept(self, keys: Sequence[str] | None = None) -> Kept:
        """Return what open transactions keep.

        ``None`` covers all keys under the prefix. At most one page is checked, starting
        with the leases that expired last. Nothing is returned if the database user may
        not lock rows, but by PostgreSQL, which shows locks without one.
        """
        if keys is None:
            mine = models().under(self.store.prefix())
        else:
            mine = Q(key_resource__in=keys)
        locks, claims = self.store.locks.filter(mine), self.store.claims.filter(mine)
        shares = self._newest(claims.filter(version__isnull=False, end_time__lte=Now()))
        if self.finds_all:
            stale, transactions = self._find(locks)
            kept = self.in_transactions(shares, shares=True)
            return Kept(frozenset(stale), kept, transactions)
        expired = self._newest(locks.filter(status="P", end_time__lte=Now()))
        locked_shares = partial(self._locked, shares=True)
        with suppress(LockBackendError):
            return Kept(
                frozenset(self._rarely("stale", expired, self._locked)),
                frozenset(self._rarely("shares", shares, locked_shares)),
                self._probe(locks),
            )
        return Kept()

    def _locked(self, rows: Sequence[R], *, shares: bool = False) -> Mapping[R, None]:
        return dict.fromkeys(self.in_transactions(rows, shares=shares))

    def _rarely(
        self, kind: str, rows: Sequence[R], look: Callable[[Sequence[R]], Mapping[R, A]]
    ) -> Mapping[R, A]:
        """Return what the last probe has found of rows, at most a second ago.

        It counts for the rows that it covered.
        """
        place = self.session.database, kind
        asked_at, known = _probes.get(place, (-PROBE_EVERY, {}))
        if rows and clock.now() >= asked_at + PROBE_EVERY:
            _probes[place] = clock.now(), {}
            known = {} if self._is_replica() else look(rows)
            _probes[place] = clock.now(), known
        return {row: known[row] for row in rows if row in known}

    def _is_replica(self) -> bool:
        """Return whether a probe would be in the way of the replication."""
        if self.session.engine.one_writer:
            return False
        ((read_only,),) = self.session.rows("SELECT @@GLOBAL.read_only", {})
        return str(read_only) not in {"0", "OFF"}

    def _newest(self, rows: Any) -> list[Any]:
        newest = rows.order_by("-end_time").values_list("pk", flat=True)
        return self.session.unlocked(list, newest[:PAGE])

    def of(self, key: Key) -> Holder | None:
        """Return the session that keeps a key without a lease, if it is known."""
        name = key.row.pk
        rows = self.store.locks.filter(pk=name)
        with suppress(LockBackendError):
            if self.finds_all:
                return self._find(rows)[1].get(name) if key.row.is_kept else None
            return self._probe(rows).get(name) if key.state.live(key.at) else None
        return None

    def in_transactions(
        self, rows: Sequence[Any], *, shares: bool = False
    ) -> frozenset[Any]:
        """Return the rows that an open transaction has locked.

        ``rows`` are keys, or the ids of shared holds. On SQLite all of them are
        returned while another transaction writes, since that locks the whole database.
        None are returned where no other transaction can have locked them, as within a
        transaction on SQLite or in a TestCase.
        """
        if not rows or self.session.is_alone:
            return frozenset()
        locked = frozenset(rows)
        table, primary = ("{claims}", "id") if shares else ("{locks}", "key_resource")
        if self.session.engine.one_writer:
            # It fails if another transaction writes.
            try:
                self.session.ask(NOTHING, {})
            except RowLockedError:
                return locked
            return frozenset()
        index = " FORCE INDEX (PRIMARY)" if self.session.engine.idle else ""
        unless = f"AND NOT {IN_TRANSACTION}"
        if not self.finds_all:
            unless = "FOR UPDATE SKIP LOCKED"
        for number in range(LOCKED_TRIES):
            if number:
                # Most statements lock a row for a moment only.
                clock.back_off(0.002 * 2**number)
            mine, parameters = self.session.one_of(primary, [*locked], "row")
            sql = f"SELECT {primary} FROM {table}{index} WHERE {mine} {unless}"
            # In a caller's transaction, a row that this locks would stay locked.
            ask = partial(self.session.ask, sql, parameters)
            try:
                found = self.store.run_outside(ask)
            except RowLockedError:
                # A table is locked.
                return locked
            locked -= {row for (row,) in found.rows}
            if not locked:
                break
        return locked

    # PostgreSQL.

    def _find(self, rows: Any) -> tuple[list[str], dict[str, Holder]]:
        """Return the kept keys with an expired lease, and the sessions of the others.

        A row that was locked within a savepoint has a number of its own. The server
        forgets whose it is when the savepoint is released, but not that it is in
        progress. So it belongs to the only writer that began earlier, if there is just
        one. If there are several, the session is not known.
        """
        if self.session.is_alone:
            return [], {}
        before = self._locked_by(rows)
        if not before:
            return [], {}
        table = self.session.sql("{locks}")
        writers = [Writer(*row) for row in self.session.rows(WRITERS, {"table": table})]
        found = {
            key: _writer_of(number, writers) for key, (number, _) in before.items()
        }
        if any(one.age is None or one.age < BRIEF for one in found.values()):
            time.sleep(BRIEF)
        # A transaction that has ended meanwhile is no writer any more.
        after = self._locked_by(rows.filter(pk__in=found))
        stale, transactions = [], {}
        for key, (number, status) in before.items():
            if after.get(key) != (number, status):
                continue
            if status == "P":
                stale.append(key)
            else:
                transactions[key] = _holder(key, found[key])
        return stale, transactions

    def _locked_by(self, rows: Any) -> dict[str, tuple[int, str]]:
        rows = rows.filter(IS_IN_TRANSACTION, end_time__lte=Now())
        rows = rows.filter(Q(status="P") | Q(shares=0))
        rows = rows.annotate(number=LOCKED_BY).order_by("-end_time")
        columns = rows.values_list("pk", "number", "status")[:PAGE]
        found: list[Any] = self.session.unlocked(list, columns)
        return {key: (number, status) for key, number, status in found}

    # The other servers.

    def _probe(self, rows: Any) -> Mapping[str, Holder]:
        """Return the sessions that keep keys with waiters and no lease."""
        engine = self.session.engine
        if engine.one_writer or self.session.is_alone:
            return {}
        waiting = self.store.claims.filter(version__isnull=True, end_time__gt=Now())
        rows = rows.filter(end_time__lte=Now(), shares=0).exclude(status="P")
        rows = rows.filter(pk__in=waiting.values("key_resource"))
        keys: list[str] = self.session.unlocked(
            list, rows.values_list("pk", flat=True)[:PAGE]
        )
        return self._rarely("waiting", keys, self._keepers_of)

    def _keepers_of(self, keys: Sequence[str]) -> Mapping[str, Holder]:
        # MariaDB has no such table.
        if self._may_read_locks and not self.session.engine.compound:
            try:
                return self._named(keys)
            except LockBackendError:
                self._may_read_locks = False
        return {key: _holder(key, UNKNOWN) for key in self.in_transactions(keys)}

    def _named(self, keys: Sequence[str]) -> Mapping[str, Holder]:
        """Return the sessions that have locked the rows of keys on MySQL."""
        if not (before := self._lockers(keys)):
            return {}
        time.sleep(BRIEF)
        after = self._lockers(keys)
        return {
            key: _holder(key, writer)
            for key, writer in after.items()
            if key in before and writer.transaction == before[key].transaction
        }

    def _lockers(self, keys: Sequence[str]) -> Mapping[str, Writer]:
        literals = {_literal(key): key for key in keys}
        table = self.store.locks.model._meta.db_table
        found = self.session.rows(LOCKERS, {"table": table})
        return {
            literals[literal]: Writer(*row)
            for literal, *row in found
            if literal in literals
        }


# A transaction whose session is not known.
UNKNOWN = Writer(0, None, None, None, None)


def _writer_of(number: int, writers: Iterable[Writer]) -> Writer:
    """Return the transaction with a number, or that of a savepoint with it."""
    earlier: dict[int | None, Writer] = {}
    for writer in writers:
        if writer.transaction == number:
            return writer
        # The numbers have 32 bits, and start again.
        if (number - writer.transaction) % 2**32 < 2**31:
            earlier[writer.pid] = writer
    if len(earlier) == 1:
        return earlier.popitem()[1]
    return UNKNOWN


def _holder(key: str, writer: Writer) -> Holder:
    """Return a session as the holder of a key."""
    since = None
    if writer.age is not None:
        since = datetime.now(UTC) - timedelta(seconds=writer.age)
    session = "" if writer.pid is None else f"session {writer.pid}"
    if session and writer.application:
        session = f"{writer.application} ({session})"
    return Holder(
        key=key,
        holder=session,
        owner_ip=writer.host or None,
        since=since,
        remaining=math.inf,
        token=0,
        count=1,
        stale=False,
        in_transaction=True,
    )


def _literal(key: str) -> str:
    """Return a key as ``performance_schema.data_locks`` writes it."""
    return "'" + key.replace("\\", "\\\\").replace("'", "''") + "'"
