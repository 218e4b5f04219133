"""
Locks as rows of one table, in the database that the project already runs.

The backends share the table and exclude each other on it; they differ in how they take a row:

* ``PessimisticBackend`` locks it, without waiting for it, and writes it, in one statement: by ``SELECT … FOR UPDATE
  SKIP LOCKED``, or on MariaDB by an ``UPDATE`` that waits for no lock;
* ``OptimisticBackend`` reads it without a lock, and writes it where ``version`` is still the one it read;
* ``InsertBackend`` inserts it and deletes it: the unique key itself is the lock.

A lease is a row whose ``end_time`` lies ahead, each change of it a committed statement of its own. In transaction
scope the row is written so that it is free as soon as the caller's transaction commits; until then the database
itself keeps everybody else away from it. No statement here waits for a row that another transaction has.
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
from typing import Any, ClassVar

from django.db import transaction
from django.db.utils import Error

from dlocks import clock
from dlocks.backends.base import BaseBackend, Claim, Grant, Holder
from dlocks.backends.database.dialects import KEY, refuse_lost
from dlocks.backends.database.direct import Reply
from dlocks.backends.database.line import PERSISTENT_FOR, STOPPED_FOR, Entrance
from dlocks.backends.database.observing import Observations
from dlocks.backends.database.records import Records
from dlocks.backends.database.several import Several
from dlocks.backends.database.statements import FREE_BY_CLOCK, GRANT, IN_LINE, MICROSECONDS
from dlocks.backends.database.tending import BATCH, STALE, Tending
from dlocks.exceptions import LockBackendError, LockNotAwaitable, LockStale

# How often a key that looks free is tried in one attempt.
FREE_TRIES = 3


@dataclass(frozen=True, slots=True)
class Row:
    """What one look at a row told. ``free`` is for the claim that looked."""

    free: bool
    stale: bool
    version: int
    # Free, but others share the key, or stand in line before the claim.
    blocked: bool
    # When the lease ends, in microseconds since 1970.
    ends: int


class DatabaseBackend(Several, Tending, Records, BaseBackend):
    """
    What the backends of the database family share. ``database`` is an alias of DATABASES, and always written to.

    ``listen`` says whether waiting claims are told of their turn: by datagrams from processes of the same machine, from
    others by NOTIFY on PostgreSQL, by ending a sleep on MariaDB and MySQL. By default the server does where the session
    is the process's own; behind a pooler, and on SQLite, processes look for what they are not told. With ``False``
    nobody is told. ``prepare`` says whether most statements outside of transactions go to the driver itself, past
    Django's cursor, where nobody looks at what goes through that. On PostgreSQL they are those that a session sends
    often, which are prepared: by default where the session is the process's own, with ``True`` behind a pooler too that
    knows prepared statements. ``history`` says whether each hold that ends becomes a row of the history.

    ``expiry`` says how others know that a holder is gone: by the database's ``"clock"``, at the end of its lease; or
    ``"observed"``, once the row has been the same for ttl and grace on the clock of the process that waits. That
    cannot be fooled by a clock that is stepped, takes that long from when somebody began to wait, and only waiters can
    do it. All processes have to have it alike, and no claim's ttl may be longer than the backend's.
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
        if expiry not in {"clock", "observed"}:
            raise ValueError(f"expiry must be 'clock' or 'observed', not {expiry!r}")
        self.database = database
        self.listening = listen
        self.prepare = prepare
        self.history = history
        self._crowded: set[str] = set()
        self._asked: set[str] = set()
        self._entrance = Entrance()
        # The texts of the statements that are sent most, by what they depend on.
        self._grants: dict[tuple[Any, ...], str] = {}
        self._releases: dict[bool, str] = {}
        self.expiry = expiry
        if expiry == "observed":
            self.observations = Observations(self.ttl + self.grace)

    @property
    def tells_leases(self) -> bool:  # type: ignore[override]
        return self.observations is None

    # The waist.

    def acquire(self, claim: Claim) -> Grant | None:
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
                # Not made: where the row is to be, somebody else's statement had the gap locked just then.
                time.sleep(random.uniform(0, 0.001 * 2**number))  # noqa: S311 (jitter)
            self._create(claim.key)
            token, row = self._take(claim)
        if token is None and row is not None and row.blocked and self._unblock(claim.key):
            # They were dead, or it was their turn and is over.
            token, row = self._take(claim)
        if token is None and row is not None and row.stale and claim.takeover and self.observations is not None:
            # By what was seen, not by the clock.
            end = partial(self._end_silent, claim.key, row.version, row.ends)
            if self.outside(end) if self.in_transaction() and not self.dialect.one_writer else end():
                token, _ = self._take(claim)
        if token is not None:
            return Grant(token, takeover=row is not None and row.stale)
        self._refuse(claim, row)
        return None

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        left: dict[str, float] = {}
        for ttl, shared in {(claim.ttl, claim.shared) for claim in claims}:
            alike = [claim for claim in claims if (claim.ttl, claim.shared) == (ttl, shared)]
            for start in range(0, len(alike), BATCH):
                left |= self._renew(alike[start : start + BATCH], ttl, shared)
        return left

    def recount(self, claim: Claim, count: int) -> bool:
        if claim.shared:
            sql = f"UPDATE {{claims}} SET hold_count = %(count)s WHERE owner = %(owner)s AND {self._live_share}"
            return self._count(self._text(sql), {"owner": claim.owner, "count": count}) == 1
        where = f"{KEY} AND owner = %(owner)s"
        if claim.scope == "lease":
            # In transaction scope the row is written as free already; while it is this owner's it is held.
            where += f" AND {self._live}"
        return self._write(claim, "hold_count = %(count)s", where, {"count": count})

    def release(self, claim: Claim, *, failed: bool = False, keep: float = 0.0) -> bool:
        if claim.scope == "transaction" and not claim.shared and self.in_transaction():
            if self.connection.needs_rollback:
                # It is given back by that.
                return True
            return self._release_on_commit(claim, failed=failed, keep=keep)
        session, began = self._session(), clock.now()
        if failed:
            # Perhaps of who gives up, and has no more than a place in line: then it has no time left.
            with self._briefly():
                released = self._release(claim, failed=failed, keep=keep)
        else:
            released = self._release(claim, failed=failed, keep=keep)
        if released:
            return True
        return not claim.shared and self._was_given_back([claim], session, began)

    def _release(self, claim: Claim, *, failed: bool, keep: float) -> bool:
        if not claim.shared:
            crowded = not keep and claim.key in self._crowded
            if crowded and self._hand_over(claim, failed=failed):
                return True
            if self._release_at_once(claim, failed=failed, keep=keep):
                self._crowded.discard(claim.key)
                return True
            # Somebody waits, or the claim has something else to give back.
            if not keep and not crowded and self._hand_over(claim, failed=failed):
                return True
        return self._leave(claim, failed=failed, keep=keep)

    def _release_at_once(self, claim: Claim, *, failed: bool, keep: float) -> bool:
        """Give the key back in one statement, where nobody waits for it."""
        # A crash of the server may forget a lease's release; then the lease runs out, that is all.
        forgettable = not keep and not self.in_transaction()
        if (sql := self._releases.get(forgettable)) is None:
            assignments = f"status = %(status)s, hold_count = 0, end_time = {self.dialect.after('keep')}"
            where = f"{KEY} AND owner = %(owner)s AND waiters = 0"
            sql = self._sql(self.dialect.compare_and_swap, assignments, where)
            sql = self._releases[forgettable] = sql + (self.dialect.forgettable if forgettable else "")
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
        assignments = f"status = %(status)s, hold_count = 0, end_time = {dialect.after('keep')}{dialect.count_in}"
        parameters = {"status": "F" if failed else "S", "keep": round(keep * MICROSECONDS)}
        return self._write(claim, assignments, f"{KEY} AND owner = %(owner)s", parameters, dialect.tell_first)

    def pin(self, claim: Claim, database: str) -> bool:
        there = self if database == self.database else copy.copy(self)
        there.database = database
        return there._pin(claim)

    def _pin(self, claim: Claim) -> bool:
        # Written, not only locked: a row lock is not seen by the other nodes of a Galera cluster.
        parameters: dict[str, Any] = {
            "key": claim.key,
            "owner": claim.owner,
            "ttl": round(claim.ttl * MICROSECONDS),
        }
        if claim.shared:
            # Whoever looks for shares that ended passes over one that is locked.
            table, primary, mine = "{claims}", "id", f"owner = %(owner)s AND NOT {IN_LINE}"
            if (row := self._row_of(claim)) is not None:
                # For MySQL and MariaDB, which at REPEATABLE READ find it by its owner only by locking the gap before
                # that too: nobody whose owner falls in there could go into line, for whichever key.
                mine += " AND id = %(id)s"
                parameters["id"] = row[0]
        else:
            table, primary, mine = "{locks}", "key_resource", f"{KEY} AND owner = %(owner)s AND status = 'P'"
        sql = self._text(self.dialect.update(table, f"end_time = {self._renewed}", mine, primary))
        return bool(self._insist(lambda: self._count(sql, parameters), claim.key, mine, parameters, table=table))

    def exchange(self, claim: Claim, successor: Claim) -> Grant | None:
        # Of the successor too: of an exchange whose reply was lost.
        where = f"{KEY} AND owner IN (%(owner)s, %(predecessor)s) AND {self._live}"
        sql = self._sql(self.dialect.compare_and_swap, GRANT, where) + self.dialect.returning
        parameters = {**self._parameters(successor), "predecessor": claim.owner}
        token = self._insist(lambda: self._granted(sql, parameters), claim.key, where, parameters)
        return None if token is None else Grant(token)

    def holder(self, key: str) -> Holder | None:
        from dlocks.models import LockState, ResourceLock

        rows = ResourceLock.objects.using(self.database).by_clock().filter(pk=key).values()
        row: Any = self._run(lambda *_: rows.first())
        if row is not None and row["state"] == LockState.FREE and row["shares"]:
            row = self._first_share(key)
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

    def _first_share(self, key: str) -> Any:
        from dlocks.models import LockClaim

        shares = LockClaim.objects.using(self.database).by_clock().filter(key_resource=key, version__isnull=False)
        # One that is held rather than one that is stale.
        return self._run(lambda *_: shares.order_by("state", "id").values().first())

    @cached_property
    def identity(self) -> str:
        return f"database {self.database}"

    def transaction_refused(self) -> str | None:
        if not self.connection.in_atomic_block:
            refuse_lost(self.connection)
            return (
                f"Autocommit is switched off on {self.database!r}, and Django does not tell when such a transaction "
                "ends. Use 'with atomic()', or scope='lease'."
            )
        return None

    def keeps_shares(self) -> bool:
        # In a TestCase nobody else is there to wait, and what would be committed would stay for the next test.
        return self.in_transaction() and (
            self.dialect.one_writer
            or any(getattr(block, "_from_testcase", False) for block in self.connection.atomic_blocks)
        )

    def lease_refused(self) -> str | None:
        if self.dialect.one_writer and self.in_transaction():
            return (
                f"SQLite has one writer, and the transaction open on {self.database!r} may be it: a lease could not "
                "be written beside it. Take the lock before the transaction, or leave out scope='lease'."
            )
        return None

    def ttl_refused(self, ttl: float) -> str | None:
        if self.observations is not None and ttl > self.ttl:
            return (
                f"With expiry='observed' others watch a row for the ttl of the backend, which is {self.ttl:g} s, and"
                " would take a longer lease for ended. Raise OPTIONS['ttl'], in all processes."
            )
        return None

    def close(self) -> None:
        self.connection.close()

    def check(self) -> list[Any]:
        from dlocks.checks import check_database_backend

        return check_database_backend(self)

    # Taking a row.

    def _take(self, claim: Claim) -> tuple[int | None, Row | None]:
        """Return the token of the grant, or None, and what was seen of the row before, if there was a need to look."""
        raise NotImplementedError

    def _grant(self, claim: Claim, *conditions: str, stale: bool = False, **parameters: Any) -> int | None:
        """Write the row to be this claim's where it was given back, or is ``stale``, and return the token."""
        stale = stale and claim.takeover
        shape = (claim.scope, claim.fair, stale, conditions)
        if (sql := self._grants.get(shape)) is None:
            where = " AND ".join([KEY, f"({self._free(claim, stale=stale)})", *conditions])
            statement: Callable[..., str] = self.dialect.compare_and_swap
            if claim.scope == "transaction":
                statement = self.dialect.write_or_leave
                if self.dialect.read_committed:
                    where += f" AND {self.dialect.read_committed}"
            sql = self._grants[shape] = self._sql(statement, GRANT, where) + self.dialect.returning
        if claim.scope == "transaction" and self.dialect.locks_in_passing:
            return self._granted_or_undone(sql, self._parameters(claim) | parameters)
        return self._granted(sql, self._parameters(claim) | parameters)

    def _grant_or_take_over(self, claim: Claim) -> tuple[int | None, Row | None]:
        # In two steps, so that a takeover is known to be one; the second is rarely needed.
        if (token := self._grant(claim)) is not None:
            return token, None
        row = self._look(claim)
        for number in range(FREE_TRIES):
            if row is None or not row.free:
                return None, row
            if (token := self._grant(claim, stale=True)) is not None:
                return token, row
            # Free, and yet not to be had: somebody looks at the row just then, or a transaction that goes on has it.
            time.sleep(random.uniform(0, 0.001 * 2**number))  # noqa: S311 (jitter)
            row = self._look(claim)
        return None, row

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
        if not self.dialect.one_writer:
            return self.dialect.granted(self._ask(sql, parameters, locked=_nothing))
        with self._briefly():
            try:
                return self.dialect.granted(self._ask(sql, parameters, locked=_nothing))
            except LockBackendError as error:
                if self.in_transaction():
                    error.add_note("Set OPTIONS['transaction_mode'] = 'IMMEDIATE' for this database.")
                raise

    def _look(self, claim: Claim) -> Row | None:
        # First, since at SERIALIZABLE a mere look locks the row on InnoDB.
        self._refuse_unfit_transaction(claim)
        sql = self._sql(
            lambda table, free, stale: (
                f"SELECT CASE WHEN {free} THEN 1 ELSE 0 END, CASE WHEN {stale} THEN 1 ELSE 0 END, version,"
                f" CASE WHEN {FREE_BY_CLOCK} AND (waiters > 0 OR shares > 0) THEN 1 ELSE 0 END,"
                f" {self.dialect.ticks_of('end_time')} FROM {table} WHERE {KEY}"
            ),
            self._free(claim, stale=True),
            STALE if self.observations is None else "status = 'P'",
        )
        asked_at = clock.now()
        for free, stale, version, blocked, ends in self._rows(sql, self._parameters(claim)):
            if stale and self.observations is not None:
                stale = self.observations.note(claim.key, (version, ends), asked_at) <= 0
            return Row(bool(free), bool(stale), version, bool(blocked), int(ends))
        return None

    def _unblock(self, key: str) -> bool:
        """Let the line move on; return whether nobody is in the way any more."""
        if self.in_transaction() and not self.dialect.one_writer:
            return self.outside(partial(self.move_on, key))
        return self.move_on(key)

    def _create(self, key: str) -> None:
        """Make the row, free, in a statement committed by itself: an open insert would make everybody wait."""
        inside = self.keeps_shares()
        at_once, term = ("", "") if inside else (self.dialect.at_once, "{at_once_term}")
        before, after = self.dialect.insert_or_ignore
        sql = self._sql(
            self._insertion, at_once + before, f"%(key)s, 'S', '', '', NULL, NULL, {{now}}, 0{term}, {{ticks}}", after
        )

        def create() -> int:
            with self._briefly():
                return self._count(sql, {"key": key}, locked=lambda: 0)

        if self.in_transaction() and not inside:
            self.outside(create)
        else:
            create()

    def _insertion(self, table: str, before: str, values: str, after: str) -> str:
        return (
            f"{before} INTO {table} (key_resource, status, owner, holder, owner_ip, begin_time,"
            f" end_time, hold_count, version) VALUES ({values}) {after}"
        )

    def _refuse_unfit_transaction(self, claim: Claim) -> None:
        # One whose snapshot may be older than the lock would not see what the last holder did; one that ends where a
        # row is locked could not ask at all.
        dialect = self.dialect
        if claim.scope != "transaction" or dialect.read_committed is None:
            return
        level, *all_or_nothing = self._rows(dialect.show_isolation, {})[0]
        level = level.upper().replace("-", " ")
        if level not in {"READ COMMITTED", "READ UNCOMMITTED"}:
            raise RuntimeError(
                f"{claim.key!r} cannot be locked in this transaction: on database {self.database!r} it runs at "
                f"{level}, so its snapshot may be older than the lock and would not show what the last "
                "holder did. Take the lock before the transaction begins, or run it at READ COMMITTED."
            )
        if any(all_or_nothing):
            raise RuntimeError(
                f"{claim.key!r} cannot be locked in this transaction: on database {self.database!r} the server runs"
                " with innodb_rollback_on_timeout=ON, and a key that is busy would take back all of the transaction."
                " Take the lock before the transaction begins, or with scope='lease'."
            )

    def _refuse(self, claim: Claim, row: Row | None) -> None:
        """Raise where waiting would not help."""
        if row is not None and row.stale and not claim.takeover:
            raise LockStale(key=claim.key, holder=self.holder(claim.key))
        if claim.scope == "transaction" and self.connection.vendor == "sqlite":
            holder = self.holder(claim.key)
            raise LockNotAwaitable(
                f"{claim.key!r} is held by {holder}, and cannot be waited for inside a transaction: SQLite has one "
                "writer, so its holder could never give it back. Take the lock before the transaction.",
                key=claim.key,
                holder=holder,
            )

    def _renew(self, claims: Sequence[Claim], ttl: float, shared: bool) -> dict[str, float]:
        owners, owner_parameters = self._one_of("owner", [claim.owner for claim in claims])
        if shared:
            return self._renew_shares(claims, owners, owner_parameters, ttl)
        keys, key_parameters = self._one_of("key_resource", [claim.key for claim in claims])
        mine = f"{keys} AND {owners} AND {self._live}"
        parameters = {"ttl": round(ttl * MICROSECONDS), **key_parameters, **owner_parameters}
        sql = self._sql(self.dialect.update, f"end_time = {self._renewed}", mine)
        with self._briefly():
            renewed = self._count(sql, parameters, locked=lambda: -1)
        if renewed == len(claims):
            return {claim.owner: ttl for claim in claims}
        if self.observations is not None:
            mine = f"{KEY} AND owner = %(owner)s AND {self._live}"
            return self._renew_each(claims, ttl, self.table, "key_resource", mine)
        # Some are lost, or were locked just now: an own transaction may pin the row. What stands, stands.
        left = self.dialect.seconds_until("end_time")
        sql = self._sql(lambda table, where: f"SELECT owner, {left} FROM {table} WHERE {where}", mine)
        return {owner: min(float(seconds), ttl) for owner, seconds in self._rows(sql, parameters)}

    def _renew_each(self, claims: Sequence[Claim], ttl: float, table: str, primary: str, mine: str) -> dict[str, float]:
        """Renew one by one where no clock tells what is left: a claim whose row is locked has what it had."""
        left: dict[str, float] = {}
        sql = self._text(self.dialect.update(table, f"end_time = {self._renewed}", mine, primary))
        for claim in claims:
            parameters = {"key": claim.key, "owner": claim.owner, "ttl": round(ttl * MICROSECONDS)}
            with self._briefly():
                if self._count(sql, parameters, locked=lambda: 0) == 1:
                    left[claim.owner] = ttl
                    continue
            if self._rows(self._text(f"SELECT 1 FROM {table} WHERE {mine}"), parameters):
                left[claim.owner] = 0.0
        return left

    def _renew_shares(
        self, claims: Sequence[Claim], owners: str, parameters: Mapping[str, Any], ttl: float
    ) -> dict[str, float]:
        parameters = {"ttl": round(ttl * MICROSECONDS), **parameters}
        with self._briefly():
            # A transaction that pins one must not keep the others from being renewed.
            mine = f"{owners} AND {self._live_share}"
            sql = self._text(self.dialect.update("{claims}", f"end_time = {self._renewed}", mine, "id"))
            renewed = self._count(sql, parameters, locked=lambda: -1)
        if renewed == len(claims):
            return {claim.owner: ttl for claim in claims}
        if self.observations is not None:
            return self._renew_each(claims, ttl, "{claims}", "id", f"owner = %(owner)s AND {self._live_share}")
        left = self.dialect.seconds_until("end_time")
        sql = self._text(f"SELECT owner, {left} FROM {{claims}} WHERE {owners} AND {self._live_share}")
        return {owner: min(float(seconds), ttl) for owner, seconds in self._rows(sql, parameters)}

    # The holder's own row.

    def _write(
        self, claim: Claim, assignments: str, where: str, parameters: Mapping[str, Any], returning: str = ""
    ) -> bool:
        """Write the holder's own row, without waiting for its lock; return False when it is the holder's no more."""
        parameters = {"key": claim.key, "owner": claim.owner, **parameters}
        if claim.scope == "transaction":
            # Locked by this transaction already, unless the server has rolled it back meanwhile.
            sql = self._sql(self.dialect.write_or_leave, assignments, where) + self._text(returning)
            return self._count(sql, parameters, locked=lambda: 0) == 1
        sql = self._sql(self.dialect.compare_and_swap, assignments, where)
        write = partial(self._count, sql, parameters, locked=lambda: 0)
        return bool(self._insist(write, claim.key, where, parameters, taken_over=True))

    def _insist(
        self,
        write: Callable[[], int | None],
        key: str,
        where: str,
        parameters: Mapping[str, Any],
        *,
        table: str = "{locks}",
        taken_over: bool = False,
    ) -> int | None:
        """Write the holder's own row, which others lock for moments; return None where it is the holder's no more."""
        began = time.monotonic()
        looking = self._text(f"SELECT {self.dialect.seconds_until('end_time')} FROM {table} WHERE {where}")
        for number in itertools.count():
            if written := write():
                return written
            # Not there, or locked: for a moment by a renewal, a look, or a step of the line, or by a transaction that
            # goes on.
            left = self._rows(looking, parameters)
            if not left:
                return None
            if time.monotonic() > began + (PERSISTENT_FOR if float(left[0][0]) > 0 else STOPPED_FOR):
                break
            time.sleep(random.uniform(0, 0.002 * 2 ** min(number, 5)))  # noqa: S311 (jitter)
        if taken_over and self.observations is None and float(left[0][0]) <= 0:
            # It ran out, and a transaction that has not ended is taking it over.
            return None
        raise LockBackendError(f"The row of {key!r} on database {self.database!r} is locked by another transaction.")

    def _free(self, claim: Claim, *, stale: bool) -> str:
        free = "(status <> 'P' AND end_time <= {now})"
        if stale and claim.takeover:
            free = f"({free} OR (status = 'P' AND end_time <= {{grace}}))"
        free += " AND shares = 0"
        if claim.fair:
            free += " AND waiters = 0"
        # The claim's own earlier grant, whose reply was lost; or kept for it, since its turn has come.
        return free + " OR ((status = 'P' OR end_time > {now}) AND owner = %(owner)s)"

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
            "grace": self._grace,
        }


def _nothing() -> Reply:
    return Reply([], 0)


class _NothingGrantedError(Exception):
    """Takes a savepoint back."""


class PessimisticBackend(DatabaseBackend):
    """Lock the row, then write it: the default."""

    def _take(self, claim: Claim) -> tuple[int | None, Row | None]:
        return self._grant_or_take_over(claim)


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
        return self._swap(claim, row.version, stale=row.stale), row

    def _swap(self, claim: Claim, version: int, *, stale: bool = False) -> int | None:
        token = self._grant(claim, "version = %(version)s", stale=stale, version=version)
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

    # Its rows come and go one by one.
    acquire_all = BaseBackend.acquire_all
    release_all = BaseBackend.release_all
    supports_fencing: ClassVar[bool] = False

    def _take(self, claim: Claim) -> tuple[int | None, Row | None]:
        if claim.scope == "lease":
            # Elsewhere an insert could wait for a transaction that has the row.
            row = None if self.connection.vendor == "sqlite" else self._look(claim)
            if row is None and (token := self._insert(claim)) is not None:
                # Drawn before the row was there: somebody else may have had the key, and a larger token, in between.
                # SQLite's was drawn under the lock of the one writer.
                return (token if self.connection.vendor == "sqlite" else self._draw_again(claim)), None
        return self._grant_or_take_over(claim)

    def _draw_again(self, claim: Claim) -> int | None:
        """Return the token of a row that is this claim's, or None where it is so no more."""
        mine = f"{KEY} AND owner = %(owner)s"
        return self._insist(lambda: self._grant(claim), claim.key, mine, {"key": claim.key, "owner": claim.owner})

    def _insert(self, claim: Claim) -> int | None:
        if self.connection.vendor == "mysql":
            before, after, first = "INSERT IGNORE", "", "LAST_INSERT_ID({ticks})"
        else:
            before, after, first = "INSERT", "ON CONFLICT DO NOTHING", "{ticks}"
        values = "%(key)s, %(status)s, %(owner)s, %(holder)s, %(owner_ip)s, {now}, {end}, 1{at_once_term}, " + first
        sql = self._sql(self._insertion, self.dialect.at_once + before, values, after + self.dialect.returning)
        return self._granted(sql, self._parameters(claim))

    def release(self, claim: Claim, *, failed: bool = False, keep: float = 0.0) -> bool:
        # A row deleted by an open transaction would make everybody's insert wait, so it goes after the commit.
        if claim.scope == "transaction" and self.connection.in_atomic_block and not keep:

            def delete() -> None:
                # No partial(): Django names what fails after a commit, and that has no name.
                self._delete(claim)

            transaction.on_commit(delete, using=self.database, robust=True)
        return super().release(claim, failed=failed, keep=keep)

    def _release(self, claim: Claim, *, failed: bool, keep: float) -> bool:
        if claim.scope == "lease" and not keep and self._delete(claim):
            self._crowded.discard(claim.key)
            return True
        return super()._release(claim, failed=failed, keep=keep)

    def _delete(self, claim: Claim) -> bool:
        # Only once the clock has passed the token, or the next row could be given the same one.
        sql = self._sql(
            self.dialect.delete, f"{KEY} AND owner = %(owner)s AND version < {{ticks}} AND waiters = 0 AND shares = 0"
        )
        return self._count(sql, {"key": claim.key, "owner": claim.owner}, locked=lambda: 0) == 1
