"""The state of a key as it was read, and the values between it and the rows."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dlocks.backends import table as rules
from dlocks.backends.database.failures import not_installed
from dlocks.backends.table import KeyState, Moment
from dlocks.values import Claim, Grant, Ticket

T = TypeVar("T")

# The maximum size in bytes of what a caller holds, as text. MySQL allows twice that.
LONGEST_HOLDING = 32_000
# Seconds that make no difference to a lease.
MOMENT = 0.001
# Maximum number of rows that one statement reads or writes.
BATCH = 500
# The ticket of a claim whose turn has come, in a transaction that it has to begin.
RESERVED = Ticket(must_retry=True, position=0, next_check=0.1)


@dataclass(slots=True)
class Key:
    """A key as it was read from its row and its claims.

    ``at`` is a reading of the database's clock, in seconds since 1970. ``notified`` are
    the channels of the claims that a step has granted.
    """

    row: Any
    claims: Sequence[Any]
    state: KeyState
    at: Moment
    notified: Collection[str] = ()

    @property
    def is_free(self) -> bool:
        """Return whether the key is free of exclusive holds, or stale."""
        return self.state.expires_in(self.at) <= 0

    @property
    def can_advance(self) -> bool:
        return rules.admit(self.state, self.at).version > self.state.version

    @property
    def has_uncounted(self) -> bool:
        """Return whether claims wait that the row does not count."""
        waiters: int = self.row.waiters
        return len(self.state.live(self.at)) > waiters

    @property
    def is_silent(self) -> bool:
        """Return whether the key is kept for a transaction, which may not notify."""
        return self.state.is_released and not self.is_free

    def is_reserved_for(self, claim: Claim) -> bool:
        """Return whether the key waits for the transaction of this claim."""
        held = self.state.held
        mine = bool(held and held.claim.owner == claim.owner)
        return mine and claim.scope == "transaction" and not self.is_free

    def ticket(self, claim: Claim) -> Ticket | None:
        if self.is_reserved_for(claim):
            return RESERVED
        return rules.ticket(self.state, claim, self.at)


def models() -> Any:
    """Return the module of the models, or raise ImproperlyConfigured."""
    try:
        from dlocks import models
    except RuntimeError as error:
        raise not_installed() from error
    return models


def batches(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield what one statement reads or writes at a time."""
    for start in range(0, len(values), BATCH):
        yield values[start : start + BATCH]


def rounded(grant: Grant | None, claim: Claim) -> Grant | None:
    """Return a grant without a lease that is the ttl but for a rounding error.

    A shorter lease would be renewed at once.
    """
    if grant is None or grant.lease is None or grant.lease < claim.ttl - MOMENT:
        return grant
    return replace(grant, lease=None)


def is_unused(state: KeyState, at: Moment) -> bool:
    # A new row could get the same token, until the clock has passed it.
    return (
        state.is_released
        and state.expires_in(at) <= 0
        and not state.queue
        and not state.shares
        and state.version < at.ticks
    )


def at_position(
    state: KeyState, owner: str, position: int, result: T
) -> tuple[KeyState, T]:
    """Give a new waiter the position that the database has chosen."""
    queue = tuple(
        replace(one, position=position) if one.claim.owner == owner else one
        for one in state.queue
    )
    if isinstance(result, Ticket) and result.position is not None:
        result = replace(result, position=position)
    return replace(state, queue=queue), result


def claim_of(row: Any) -> Claim:
    """Return the claim of a row of LockClaim."""
    return Claim(
        key=row.key_resource,
        ttl=row.handover_ttl / 1_000_000,
        scope="lease" if row.scope == "P" else "transaction",
        takeover=row.takeover,
        shared=row.shared,
        permits=row.permits,
        holder=row.holder,
        owner_ip=row.owner_ip,
        owner=row.owner,
    )


def to_text(holding: Iterable[Any]) -> str:
    """Return the keys that a caller holds as JSON, or an empty text for none."""
    holding = list(holding)
    while len(text := json.dumps(holding)) > LONGEST_HOLDING:
        # The deadlock may then stay unnoticed, and end by a timeout.
        holding = holding[: len(holding) // 2]
    return text if holding else ""
