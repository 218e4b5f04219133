"""What is known of a lock row, and of a grant, while a claim is processed."""

from __future__ import annotations

from dataclasses import dataclass

from dlocks.backends.table import KeyState, Moment
from dlocks.values import Claim, Grant, Ticket


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


@dataclass(slots=True)
class LockedRow:
    """A lock row that the current step has locked, as a state without claims."""

    key: str
    state: KeyState
    at: Moment
    # The numbers of counted waiters and of shared holds.
    waiters: int
    shares: int
    # The end of the lease in microseconds since 1970.
    ends: int

    @property
    def is_free(self) -> bool:
        return self.state.expires_in(self.at) <= 0

    @property
    def is_stale(self) -> bool:
        return self.state.is_held and self.state.expires_in(self.at) <= self.at.grace

    def is_held_by(self, claim: Claim) -> bool:
        """Return whether the key is held by a claim, or reserved for it."""
        held = self.state.held
        return bool(held and held.claim.owner == claim.owner and not self.is_free)


# The ticket of a claim whose turn has come.
MINE = Ticket(must_retry=True, position=0)


@dataclass(frozen=True, slots=True)
class LockSnapshot:
    """A snapshot of a lock row, which may have changed since."""

    holder: str
    status: str
    version: int
    left: float
    free: bool
    ahead: int
    # The end of the lease in microseconds since 1970, and the monotonic time at which
    # the row was requested.
    ends: int
    asked_at: float

    @property
    def is_silent(self) -> bool:
        """Return whether the key may become free without a notification.

        It is kept for a transaction. If a notification needs a statement of its own,
        the end of the transaction sends none.
        """
        return self.status != "P" and not self.free

    @property
    def own_ticket(self) -> Ticket:
        """Return the ticket of the claim that holds the key.

        A lease is already granted. In transaction scope, the claim still has to acquire
        the key.
        """
        return (
            Ticket(grant=Grant(self.version, self.left))
            if self.status == "P"
            else Ticket(must_retry=True, next_check=0.1)
        )
