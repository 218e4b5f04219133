"""Operations on several keys: one transaction changes all of their rows, or none.

It locks the rows in the order of their keys, and then writes them together. Each
operation covers one case: keys without claims of other callers, and exclusive leases.
In every other case it changes nothing, and the caller handles each key by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import CharField, Expression

from dlocks.backends import table as rules
from dlocks.backends.database.holders import Holders
from dlocks.backends.database.session import RowLockedError
from dlocks.backends.database.state import Key, batches
from dlocks.backends.database.store import Store
from dlocks.exceptions import LockStale
from dlocks.runtime import clock
from dlocks.sql.clock import After, Now
from dlocks.values import Claim, Grant

T = TypeVar("T")


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


class Several:
    """The part that acquires and releases several keys in one step."""

    def __init__(self, store: Store, holders: Holders) -> None:
        self.store = store
        self.holders = holders

    def acquire(self, claims: Sequence[Claim], until: float) -> Sequence[Grant] | None:
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

        grants, is_lost = self._step(claims, work, until=until)
        if grants is None and is_lost:
            # It may have granted what the repeated one has found claimed or locked by
            # others.
            for claim in claims:
                self.holders.release(claim, failed=True, rest_for=0.0)
        return grants

    def release(self, claims: Sequence[Claim], *, failed: bool) -> bool:
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
        released, is_lost = self._step(claims, work, flush=False)
        return bool(released) or (
            is_lost and all(self.holders.was_released(one, began) for one in claims)
        )

    def _step(
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
        session, result = self.store.session.raw, None
        with suppress(RowLockedError, LockStale):
            result = self.store.step_all([one.key for one in claims], work, **options)
        return result, not result and self.store.session.raw is not session


def _is_exclusive_lease(claim: Claim) -> bool:
    return not claim.shared and claim.scope == "lease"
