"""What a holder does with its own rows: it renews, verifies and releases them.

Others lock the row for moments, and a transaction may lock it for longer. A renewal
skips it then. The others are sent again for a while, and let renewals pass meanwhile.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import CharField, Expression

from dlocks.backends import table as rules
from dlocks.backends.base import HANDOVER_LEASE, TableLockedError
from dlocks.backends.database.queue import Queue
from dlocks.backends.database.session import RowLockedError
from dlocks.backends.database.state import MOMENT, Key, batches
from dlocks.backends.database.store import Store
from dlocks.backends.table import KeyState, Moment
from dlocks.exceptions import LockBackendError, LockStale
from dlocks.runtime import clock
from dlocks.runtime.requests import let_renewals_pass
from dlocks.sql.clock import After, Now, ticks
from dlocks.sql.engines import HELD, LIVE, SHARED
from dlocks.values import Claim, Grant

T = TypeVar("T")

# Seconds for which a holder waits for its row while its lease is live. A thousand
# simultaneous callers may keep the row locked, one after another.
LIVE_WAIT = 15.0
# Seconds for which it waits afterwards. A process that was stopped in the middle of a
# step may keep the row locked for 2 seconds.
LAPSED_WAIT = 3.0
# Seconds for which one step waits that releases a key or passes it on, renews a short
# lease, or lets a writer read.
STEP_WAIT = 0.5


class Holders:
    """The part that writes the rows of claims that hold their keys.

    The claims of one request are of one kind.
    """

    def __init__(self, store: Store, queue: Queue) -> None:
        self.store = store
        self.session = store.session
        self.queue = queue

    def on(self, database: str) -> Holders:
        """Return the holders as another alias of the database writes them.

        It uses the schema in which the holds were granted. Sessions of the other alias
        may begin with another search path.
        """
        there = copy.copy(self)
        if database != self.session.database:
            there.session = self.session.of_alias(database)
        return there

    # The own rows.

    def renewed(self) -> str:
        """Return the SQL of the new end of a lease.

        If other processes observe the row, the new end always differs from the old one.
        """
        if not self.store.observed:
            return "end_time = {after:ttl}"
        return "end_time = {greatest}({after:ttl}, {next})"

    def own(self, claims: Sequence[Claim]) -> tuple[str, str, dict[str, Any]]:
        """Return the table, the condition and the parameters of the own rows of claims.

        In transaction scope, the row is already written as free. A late claim's lease,
        and any if no clock is trusted, is live for as long as the row is the claim's.
        """
        first, one_of = claims[0], self.session.one_of
        mine, parameters = one_of("owner", [one.owner for one in claims], "owner")
        if first.shared:
            table, held = "{claims}", SHARED
        else:
            keys, more = one_of("key_resource", [one.key for one in claims], "key")
            mine, parameters = f"{keys} AND {mine}", parameters | more
            table, held = "{locks}", HELD
            if first.scope == "transaction":
                return table, mine, parameters
        if not (first.late or self.store.observed):
            held += f" AND {LIVE}"
        return table, f"{mine} AND {held}", parameters

    def write(
        self,
        what: str,
        claims: Sequence[Claim],
        *,
        also: str = "",
        **parameters: Any,
    ) -> int:
        """Change the own rows that are not locked, and return their number."""
        table, condition, mine = self.own(claims)
        text = self.session.engine.many(table, what, condition + also)
        sql, ttls = self._with_ttls(self.session.sql(text), claims)
        parameters = mine | ttls | parameters
        return self.session.run(self.session.prepared, sql, parameters).changed

    def _with_ttls(
        self, sql: str, claims: Sequence[Claim]
    ) -> tuple[str, dict[str, Any]]:
        """Let a statement give each row the ttl of its claim."""
        owners: dict[float, list[str]] = {}
        for claim in claims:
            owners.setdefault(claim.ttl, []).append(claim.owner)
        (usual, _), *others = owners.items()
        cases, parameters = "", {"ttl": ticks(usual)}
        for number, (ttl, some) in enumerate(others):
            theirs, more = self.session.one_of("owner", some, f"owner{number}_")
            cases += f" WHEN {theirs} THEN %(ttl{number})s"
            parameters |= more | {f"ttl{number}": ticks(ttl)}
        if cases:
            sql = sql.replace("%(ttl)s", f"(CASE{cases} ELSE %(ttl)s END)")
        return sql, parameters

    def left(self, claims: Sequence[Claim]) -> dict[str, float]:
        """Return the seconds left of the leases of claims, by owner."""
        table, condition, parameters = self.own(claims)
        sql = f"SELECT owner, {{left}} FROM {table} WHERE {condition}"
        rows = self.session.rows(sql, parameters)
        return {owner: float(seconds) for owner, seconds in rows}

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

        # SQLite may refuse even to read while its single writer commits.
        with suppress(TableLockedError):
            if self.left([claim]):
                self.retried(step, claim)
        return grant

    # Renewal.

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        left: dict[str, float] = {}
        for kind in {(claim.shared, claim.late) for claim in claims}:
            alike = [one for one in claims if (one.shared, one.late) == kind]
            for some in batches(alike):
                left |= self._renew(some)
        short = [
            one
            for one in claims
            if 0 < left.get(one.owner, 0.0) < min(one.ttl / 3, HANDOVER_LEASE)
        ]
        for claim in short:
            # Others lock the row of a contended key one after another. A few tries that
            # skip a locked row may all fail before a short lease expires.
            wait = min(left[claim.owner], STEP_WAIT) / len(short)
            step = partial(self.store.step, wait=wait, in_turn=True)
            with suppress(RowLockedError):
                if step(claim.key, rules.renew, claim)[0]:
                    left[claim.owner] = claim.ttl
        return left

    def _renew(self, claims: Sequence[Claim]) -> dict[str, float]:
        ttls = {one.owner: one.ttl for one in claims}
        observed = self.store.observed
        try:
            renewed = self.write(self.renewed(), claims)
        except RowLockedError:
            if self.session.engine.one_writer:
                # Another transaction writes. The rows stay unchanged until it has
                # ended.
                return {claim.owner: 0.0 for claim in claims}
            renewed = 0
        if renewed == len(claims):
            return ttls
        if observed and len(claims) > 1:
            # No clock shows which of them were renewed.
            each = (self._renew([claim]) for claim in claims)
            return {owner: left for one in each for owner, left in one.items()}
        # Some claims are lost, or their rows were locked, perhaps by a transaction of
        # this process that pins one. Valid leases are kept.
        return {
            owner: 0.0 if observed else _kept(seconds, ttls[owner])
            for owner, seconds in self.left(claims).items()
        }

    # Verification.

    def verify(self, claims: Sequence[Claim], count: int | None = None) -> bool:
        if count is None:
            if any(claim.shared or claim.late for claim in claims):
                return False
            held = {owner for some in batches(claims) for owner in self.left(some)}
            return {claim.owner for claim in claims} <= held
        (claim,) = claims
        what = "hold_count = %(count)s"
        if claim.late:
            what += f", {self.renewed()}"

        def write() -> bool:
            return self.write(what, claims, count=count) == 1

        if claim.scope == "transaction" and not claim.shared:
            # This transaction has locked the row already, unless the server has rolled
            # it back in the meantime.
            return write()
        by_clock = not self.store.observed
        taken_over = by_clock and not self.session.engine.one_writer
        return self.retried(write, claim, taken_over=taken_over)

    def retried(
        self,
        write: Callable[[], bool],
        claim: Claim,
        *,
        taken_over: bool = False,
        left: Callable[[], Mapping[str, float]] | None = None,
    ) -> bool:
        """Retry to write a holder's own row, which others lock for moments.

        Return False if it no longer belongs to the holder. With ``taken_over``, also if
        the lease has expired and an open transaction is taking it over. ``left`` is the
        method of that name, unless another session has to call it.
        """
        left = left or partial(self.left, [claim])
        began, remaining = clock.real_now(), 0.0
        for number in itertools.count():
            with suppress(RowLockedError):
                if write():
                    return True
            found = left().get(claim.owner)
            if found is None:
                return False
            remaining = found
            most = LIVE_WAIT if remaining > 0 else LAPSED_WAIT
            if clock.real_now() > began + most:
                break
            let_renewals_pass()
            clock.back_off(0.002 * 2 ** min(number, 5))
        if taken_over and remaining <= 0:
            return False
        raise self.locked(claim.key)

    def locked(self, key: str) -> LockBackendError:
        return LockBackendError(
            f"The lock row of {key!r} on database {self.session.database!r} is locked"
            " by another transaction."
        )

    def exchange(self, claim: Claim, successor: Claim) -> Grant | None:
        began, arguments = clock.real_now(), (rules.exchange, claim, successor)
        while True:
            try:
                return self.store.step(
                    claim.key, *arguments, wait=STEP_WAIT, in_turn=True
                )[0]
            except RowLockedError as error:
                if clock.real_now() > began + LAPSED_WAIT:
                    raise self.locked(claim.key) from error
                let_renewals_pass()

    def expire(self, claim: Claim, ago: float) -> bool:
        """Let the lease of a claim have ended some seconds ago."""
        claim = replace(claim, late=True, ttl=-ago)
        what = "end_time = {after:ttl}"
        return self.retried(lambda: self.write(what, [claim]) == 1, claim)

    # Release.

    def release(self, claim: Claim, *, failed: bool, rest_for: float) -> bool:
        session, began = self.session.raw, clock.now()
        if self._release(claim, failed=failed, rest_for=rest_for):
            return True
        if claim.shared or self.session.raw is session:
            return False
        return self.was_released(claim, began)

    def _release(self, claim: Claim, *, failed: bool, rest_for: float) -> bool:
        status = "F" if failed else "S"
        if not claim.shared:
            contended = not rest_for and claim.key in self.queue.contended
            if not contended and self._release_at_once(claim, status, rest_for):
                return True
            # The key has waiters, or the claim has something else to release.
            directly = not (rest_for or self.store.deletes)
            if directly and self.queue.hand_over(claim, status):
                return True
        return self._release_by_step(claim, status, rest_for)

    @staticmethod
    def releasing(claim: Claim, status: str, rest_for: float) -> dict[str, Any]:
        """Return the parameters of the statements that release a key, and no others.

        mysqlclient quotes all of them.
        """
        return {
            "key": claim.key,
            "owner": claim.owner,
            "status": status,
            "rest_for": ticks(rest_for),
        }

    def _release_at_once(self, claim: Claim, status: str, rest_for: float) -> bool:
        """Release the key in one statement if it has no waiters.

        A crash of the server may lose this. Then the lease expires, and there is no
        other harm.
        """
        flush = bool(rest_for) or self.session.in_transaction
        parameters = self.releasing(claim, status, rest_for)
        with suppress(RowLockedError):
            if self.store.deletes and not rest_for:
                reply = self.session.send("delete_own", parameters, flush)
            else:
                reply = self.session.send("release", parameters, flush, flushed=flush)
            return reply.changed == 1
        return False

    def _release_by_step(self, claim: Claim, status: str, rest_for: float) -> bool:
        """Release the key, the shared hold or the queue position of a claim.

        The queue advances.
        """
        released = False

        def rule(state: KeyState, claim: Claim, at: Moment) -> tuple[KeyState, bool]:
            nonlocal released
            after, ended = rules.release(state, claim, at, rest_for)
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
                    outcome := self._release_locked(claim, status, rest_for, began)
                ) is not None:
                    return outcome or released
                let_renewals_pass()
            else:
                if not key.state.queue:
                    self.queue.contended.discard(claim.key)
                return ended

    def _release_locked(
        self, claim: Claim, status: str, rest_for: float, began: float
    ) -> bool | None:
        """Release a claim whose key another transaction has locked, if that can be.

        Return None if the step has to be tried again.
        """
        row = self.queue.row_of(claim)
        is_share = row is not None and row.version is not None
        live = is_share and (row.end_time > row.now or self.store.observed)
        one_writer = self.session.engine.one_writer
        gone = row is None
        if not (gone or rest_for or one_writer):
            # The reply to a deletion may be lost. The next step that locks the lock row
            # counts the remaining claims.
            gone = self.queue.delete(claim) or self.queue.row_of(claim) is None
            if gone and is_share:
                return live
        # Only now. The key may have been handed to a claim that was queued until then.
        own = self.store.peek(claim.key)
        mine = own is not None and own.row.owner == claim.owner
        if one_writer:
            # A claim that holds nothing need not leave. It is skipped soon in any case.
            if status == "F" and not (mine or is_share):
                raise LockBackendError(
                    f"The single writer of database {self.session.database!r} is busy."
                )
        elif gone and not mine:
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

    # Several keys: one transaction changes all of their rows, or none. It locks them in
    # the order of their keys, and then writes them together. It covers keys without
    # claims of other callers, and exclusive leases. In every other case it changes
    # nothing, and the caller handles each key by itself.

    def acquire_all(
        self, claims: Sequence[Claim], until: float
    ) -> Sequence[Grant] | None:
        def work(keys: Sequence[Key]) -> Sequence[Grant] | None:
            for key, claim in zip(keys, claims, strict=True):
                if key.claims or key.row.waiters or key.row.shares:
                    return None
                grant = rules.acquire(key.state, claim, key.at)[1]
                if grant is None or grant.takeover:
                    # A stale key is taken over by a step of its own, so that the
                    # takeover is recognized as one.
                    return None
            # It is larger than the token of each of them was.
            token = max(max(key.row.version + 1, key.at.ticks) for key in keys)
            who = self.store.who(claims[0])
            for some in batches(claims):
                changes = {
                    **who,
                    "owner": OwnerOf(some),
                    "status": "P",
                    "begin_time": Now(),
                    "end_time": After(some[0].ttl),
                    "hold_count": 1,
                    "version": token,
                    "waiters": 0,
                }
                self.store.write_rows([one.key for one in some], changes)
            return [Grant(token)] * len(claims)

        grants, is_lost = self._step_all(claims, work, until=until)
        if grants is None and is_lost:
            # It may have granted what the repeated one has found claimed or locked by
            # others.
            for claim in claims:
                self.release(claim, failed=True, rest_for=0.0)
        return grants

    def release_all(self, claims: Sequence[Claim], *, failed: bool) -> bool:
        def work(keys: Sequence[Key]) -> bool:
            for key, claim in zip(keys, claims, strict=True):
                others = key.claims or key.row.waiters
                if others or key.row.owner != claim.owner:
                    return False
            for some in batches(claims):
                changes = {
                    "status": "F" if failed else "S",
                    "hold_count": 0,
                    "end_time": Now(),
                    "waiters": 0,
                }
                self.store.write_rows([one.key for one in some], changes)
            return True

        began = clock.now()
        # If a crash loses it, the leases expire.
        released, is_lost = self._step_all(claims, work, flush=False)
        return bool(released) or (
            is_lost and all(self.was_released(one, began) for one in claims)
        )

    def _step_all(
        self,
        claims: Sequence[Claim],
        work: Callable[[Sequence[Key]], T],
        **options: Any,
    ) -> tuple[T | None, bool]:
        """Return the result of a step, and whether the reply to a first one is lost.

        It may be lost together with the session. The step was then sent again.
        """
        # The rows of some strategies are inserted and deleted one by one.
        if self.store.deletes or not all(map(_is_exclusive_lease, claims)):
            return None, False
        for claim in claims:
            self.store.refuse_unstorable(claim.key)
        session, result = self.session.raw, None
        with suppress(RowLockedError, LockStale):
            result = self.store.step_all([one.key for one in claims], work, **options)
        return result, not result and self.session.raw is not session


def _kept(seconds: float, ttl: float) -> float:
    """Return the seconds left of a lease whose row was locked during a renewal.

    A lease longer than the ttl was not shortened. Less than the ttl is returned for it,
    so that its caller tries again.
    """
    return min(seconds, ttl) if seconds < ttl + MOMENT else 0.99 * ttl


class OwnerOf(Expression):
    """The owner of the claim on a row's key.

    ``Case()`` of Django would take a millisecond for each key.
    """

    output_field = CharField()

    def __init__(self, claims: Sequence[Claim]) -> None:
        super().__init__()
        self.claims = claims

    def as_sql(self, compiler: Any, connection: BaseDatabaseWrapper) -> Any:
        column = connection.ops.quote_name("key_resource")
        cases = " ".join("WHEN %s THEN %s" for _ in self.claims)
        names = [name for one in self.claims for name in (one.key, one.owner)]
        return f"CASE {column} {cases} END", names


def _is_exclusive_lease(claim: Claim) -> bool:
    return not claim.shared and claim.scope == "lease"
