"""What a holder does with its own row: it renews, verifies and releases it.

Others lock the row for moments, and a transaction may lock it for longer. A renewal
skips it then. The others are sent again for a while.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from dlocks.backends import table as rules
from dlocks.backends.base import TableLockedError
from dlocks.backends.database.direct import Direct
from dlocks.backends.database.queue import Queue
from dlocks.backends.database.session import RowLockedError
from dlocks.backends.database.state import rounded
from dlocks.backends.database.store import BATCH, Store
from dlocks.backends.table import KeyState, Moment
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.sql.clock import ticks
from dlocks.sql.engines import HELD, LIVE, MINE, SHARED
from dlocks.values import Claim, Grant

# Seconds for which a holder waits for its row while its lease is live. A thousand
# simultaneous callers may keep the row locked, one after another.
LIVE_WAIT = 15.0
# Seconds for which it waits afterwards. A process that was stopped in the middle of a
# step may keep the row locked for 2 seconds.
LAPSED_WAIT = 3.0
# Seconds for which one step of a release waits.
STEP_WAIT = 0.5


class Holders:
    """The part that writes the rows of claims that hold their keys.

    The session of ``own`` may be that of another alias of the database.
    """

    def __init__(self, store: Store, queue: Queue, direct: Direct) -> None:
        self.store = store
        self.session = store.session
        self.queue = queue
        self.direct = direct

    # The conditions and assignments for an own row.

    def renewed(self) -> str:
        """Return the SQL of the new end of a lease.

        If other processes observe the row, the new end always differs from the old one.
        """
        if self.store.observations is None:
            return "end_time = {after:ttl}"
        return "end_time = {greatest}({after:ttl}, {next})"

    def condition(self, claim: Claim, *, live: bool = True) -> str:
        """Return the condition that a claim holds its key.

        In transaction scope, the row is already written as free. If no clock is
        trusted, the lease is live for as long as the row is the claim's.
        """
        if claim.shared:
            held = SHARED
        elif claim.scope == "lease":
            held = HELD
        else:
            return MINE
        trusted = live and self.store.observations is None
        return f"{MINE} AND {held} AND {LIVE}" if trusted else f"{MINE} AND {held}"

    def writing(self, claim: Claim, what: str, condition: str) -> str:
        """Return the statement that writes the row of a claim, if it is not locked."""
        engine = self.session.engine
        if claim.shared:
            return engine.many("{claims}", what, condition, engine.returning)
        return engine.one(what, condition, engine.returning)

    # Acquisition.

    def grant_again(self, claim: Claim) -> Grant | None:
        """Return a grant if the locked row of a key is the claim's own, or None.

        The claim has inserted it, or the reply to its first request was lost.
        """
        grant: Grant | None = None

        def step() -> bool:
            nonlocal grant
            grant, _ = self.store.step(claim.key, rules.acquire, claim)
            return grant is not None

        left = partial(self._left, claim, self.condition(claim))
        # SQLite may refuse even to read while its single writer commits.
        with suppress(TableLockedError):
            if left() is not None:
                self.retried(step, left, claim.key)
        return rounded(grant, claim)

    # Renewal.

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        left: dict[str, float] = {}
        for kind in {(claim.ttl, claim.shared, claim.late) for claim in claims}:
            alike = [one for one in claims if (one.ttl, one.shared, one.late) == kind]
            for start in range(0, len(alike), BATCH):
                left |= self._renew(alike[start : start + BATCH])
        return left

    def _renew(self, claims: Sequence[Claim]) -> dict[str, float]:
        first, session = claims[0], self.session
        table = "{claims}" if first.shared else "{locks}"
        mine, parameters = session.one_of(
            "owner", [claim.owner for claim in claims], "owner"
        )
        if not first.shared:
            keys, more = session.one_of(
                "key_resource", [claim.key for claim in claims], "key"
            )
            mine, parameters = f"{keys} AND {mine}", parameters | more
        condition = self.condition(first, live=not first.late).replace(MINE, mine)
        engine = session.engine
        sql = engine.many(table, self.renewed(), condition, engine.returning)
        try:
            renewed = session.ask(sql, {**parameters, "ttl": ticks(first.ttl)}).changed
        except RowLockedError:
            if engine.one_writer:
                # Another transaction writes. The rows stay unchanged until it has
                # ended.
                return {claim.owner: 0.0 for claim in claims}
            renewed = 0
        if renewed == len(claims):
            return {claim.owner: first.ttl for claim in claims}
        if self.store.observations is not None:
            return self._renew_each(claims)
        # Some claims are lost, or their rows were locked, perhaps by a transaction of
        # this process that pins one. Valid leases are kept.
        sql = session.sql(f"SELECT owner, {{left}} FROM {table} WHERE {condition}")
        return {
            owner: min(float(seconds), first.ttl)
            for owner, seconds in session.rows(sql, parameters)
        }

    def _renew_each(self, claims: Sequence[Claim]) -> dict[str, float]:
        """Renew the claims one by one, without relying on a clock.

        A claim whose row is locked keeps its previous lease.
        """
        left: dict[str, float] = {}
        for claim in claims:
            condition = self.condition(claim)
            sql = self.writing(claim, self.renewed(), condition)
            renewed = False
            with suppress(RowLockedError):
                renewed = self.session.ask(sql, self.of(claim)).changed == 1
            if renewed:
                left[claim.owner] = claim.ttl
            elif self._left(claim, condition) is not None:
                left[claim.owner] = 0.0
        return left

    @staticmethod
    def of(claim: Claim, **parameters: Any) -> dict[str, Any]:
        """Return the parameters of a statement on the row of a claim."""
        return {
            "key": claim.key,
            "owner": claim.owner,
            "ttl": ticks(claim.ttl),
            **parameters,
        }

    def _left(self, claim: Claim, condition: str) -> float | None:
        """Return the seconds left of the lease of a claim's row, or None."""
        table = "{claims}" if claim.shared else "{locks}"
        key = "" if claim.shared else "key_resource = %(key)s AND "
        sql = self.session.sql(f"SELECT {{left}} FROM {table} WHERE {key}{condition}")
        for (left,) in self.session.rows(sql, self.of(claim)):
            return float(left)
        return None

    # Verification.

    def verify(self, claims: Sequence[Claim], count: int | None = None) -> bool:
        if count is None:
            return self._verify_all(claims)
        (claim,) = claims
        what = "hold_count = %(count)s"
        if claim.late:
            what += f", {self.renewed()}"
        condition = self.condition(claim, live=not claim.late)
        sql = self.writing(claim, what, condition)
        write = partial(self.session.ask, sql, self.of(claim, count=count))
        if claim.scope == "transaction" and not claim.shared:
            # This transaction has locked the row already, unless the server has rolled
            # it back in the meantime.
            return write().changed == 1
        by_clock = self.store.observations is None
        return self.retried(
            lambda: write().changed == 1,
            lambda: self._left(claim, condition),
            claim.key,
            taken_over=by_clock and not self.session.engine.one_writer,
        )

    def _verify_all(self, claims: Sequence[Claim]) -> bool:
        if any(claim.shared for claim in claims):
            return False
        found: set[tuple[str, str]] = set()
        held = self.condition(claims[0]).partition(" AND ")[2]
        for start in range(0, len(claims), BATCH):
            some = [claim.key for claim in claims[start : start + BATCH]]
            mine, parameters = self.session.one_of("key_resource", some, "key")
            sql = f"SELECT key_resource, owner FROM {{locks}} WHERE {mine}"
            if held:
                sql += f" AND {held}"
            rows = self.session.rows(self.session.sql(sql), parameters)
            found |= {(key, owner) for key, owner in rows}
        return {(claim.key, claim.owner) for claim in claims} <= found

    def retried(
        self,
        write: Callable[[], bool],
        left: Callable[[], float | None],
        key: str,
        *,
        taken_over: bool = False,
    ) -> bool:
        """Retry to write a holder's own row, which others lock for moments.

        Return False if it no longer belongs to the holder: ``left`` returns the seconds
        left of its lease, or None. With ``taken_over``, also if the lease has expired
        and an open transaction is taking it over.
        """
        began, remaining = clock.real_now(), 0.0
        for number in itertools.count():
            with suppress(RowLockedError):
                if write():
                    return True
            found = left()
            if found is None:
                return False
            remaining = found
            most = LIVE_WAIT if remaining > 0 else LAPSED_WAIT
            if clock.real_now() > began + most:
                break
            time.sleep(random.uniform(0, 0.002 * 2 ** min(number, 5)))  # noqa: S311 (jitter)
        if taken_over and remaining <= 0:
            return False
        raise self.locked(key)

    def locked(self, key: str) -> LockBackendError:
        return LockBackendError(
            f"The lock row of {key!r} on database {self.session.database!r} is locked"
            " by another transaction."
        )

    def exchange(self, claim: Claim, successor: Claim) -> Grant | None:
        try:
            grant, _ = self.store.step(
                claim.key, rules.exchange, claim, successor, wait=LAPSED_WAIT
            )
        except RowLockedError as error:
            raise self.locked(claim.key) from error
        return rounded(grant, successor)

    def expire(self, claim: Claim, ago: float) -> bool:
        """Let the lease of a claim have ended some seconds ago."""
        condition = self.condition(claim, live=False)
        sql = self.writing(claim, "end_time = {after:ttl}", condition)
        parameters = {**self.of(claim), "ttl": -ticks(ago)}
        return self.retried(
            lambda: self.session.ask(sql, parameters).changed == 1,
            lambda: self._left(claim, condition),
            claim.key,
        )

    # Release.

    def release(self, claim: Claim, *, failed: bool, keep: float) -> bool:
        session, began = self.session.raw, clock.now()
        if self._release(claim, failed=failed, keep=keep):
            return True
        if claim.shared or self.session.raw is session:
            return False
        return self.was_released(claim, began)

    def _release(self, claim: Claim, *, failed: bool, keep: float) -> bool:
        status = "F" if failed else "S"
        if not claim.shared:
            contended = not keep and claim.key in self.queue.contended
            if not contended and self._release_at_once(claim, status, keep):
                return True
            # The key has waiters, or the claim has something else to release.
            if not keep and self._hand_over(claim, status):
                return True
        return self._release_by_step(claim, status, keep)

    def _hand_over(self, claim: Claim, status: str) -> bool:
        if self.store.deletes:
            return False
        waiters = self.direct.hand_over(claim, status)
        if waiters == 0:
            self.queue.contended.discard(claim.key)
        return waiters is not None

    def _release_at_once(self, claim: Claim, status: str, keep: float) -> bool:
        """Release the key in one statement if it has no waiters.

        A crash of the server may lose this. Then the lease expires, and there is no
        other harm.
        """
        flush = bool(keep) or self.session.in_transaction
        # Without what the statement does not use. mysqlclient quotes all of them.
        parameters = {
            "key": claim.key,
            "owner": claim.owner,
            "status": status,
            "keep": ticks(keep),
        }
        with suppress(RowLockedError):
            if self.store.deletes and not keep:
                reply = self.session.send("delete_own", parameters, flush)
            else:
                reply = self.session.send("release", parameters, flush, flushed=flush)
            return reply.changed == 1
        return False

    def _release_by_step(self, claim: Claim, status: str, keep: float) -> bool:
        """Release the key, the shared hold or the queue position of a claim.

        The queue advances.
        """
        released = False

        def rule(state: KeyState, claim: Claim, at: Moment) -> tuple[KeyState, bool]:
            nonlocal released
            after, ended = rules.release(state, claim, at, keep)
            # It may have been released before, and the reply was lost.
            released = released or ended
            return after, released

        began = clock.real_now()
        while True:
            try:
                ended, key = self.store.step(
                    claim.key, rule, claim, wait=STEP_WAIT, in_turn=True, status=status
                )
            except RowLockedError:
                if (
                    outcome := self._release_locked(claim, status, keep, began)
                ) is not None:
                    return outcome
            else:
                if not key.state.queue:
                    self.queue.contended.discard(claim.key)
                return ended

    def _release_locked(
        self, claim: Claim, status: str, keep: float, began: float
    ) -> bool | None:
        """Release a claim whose key another transaction has locked, if that can be.

        Return None if the step has to be tried again.
        """
        own = self.store.peek(claim.key)
        mine = own is not None and own.row.owner == claim.owner
        row = self.queue.row_of(claim)
        is_share = row is not None and row.version is not None
        live = is_share and (
            row.end_time > row.now or self.store.observations is not None
        )
        if self.session.engine.one_writer:
            # A claim that holds nothing need not leave. It is skipped soon in any case.
            if status == "F" and not (mine or is_share):
                raise LockBackendError(
                    f"The single writer of database {self.session.database!r} is busy."
                )
        elif row is not None:
            # The next step that locks the lock row counts the remaining claims.
            if not keep and self.queue.delete(claim):
                return live
        elif not mine:
            return False
        if mine and own is not None:
            live = own.state.expires_in(own.at) > 0
        if clock.real_now() <= began + (LIVE_WAIT if live else LAPSED_WAIT):
            return None
        if not live:
            # A transaction that is still open is taking the key over.
            return False
        raise self.locked(claim.key)

    def was_released(self, claim: Claim, began: float) -> bool:
        """Return whether a release that ``began`` at a time had succeeded before.

        The reply may be lost together with the session. The statements were then sent
        again, and it is unknown whether the first ones were executed.

        Every grant, and every clearing by a person, takes its version from the clock.
        If the version is older than the release, the key was taken from the claim
        before, and its work may have overlapped with another holder's. If the version
        is newer, the claim held the key until the release began. Its work was then
        exclusive, no matter which of the two ended the hold.
        """
        key = self.store.peek(claim.key)
        if key is None:
            # A missing row only shows that no caller holds the key. This release may be
            # the reason.
            return True
        if key.row.owner == claim.owner:
            return bool(key.row.status != "P")
        # The time is read after the reply, so every grant since the beginning is
        # younger than this.
        return bool(key.at.ticks - key.row.version <= ticks(clock.now() - began))
