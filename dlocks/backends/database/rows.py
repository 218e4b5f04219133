"""What is known of a lock row, and of a grant, while a claim is processed."""

from __future__ import annotations

from dataclasses import dataclass

from dlocks.values import Grant, Ticket


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
    """A lock row that the current step has locked and read."""

    key: str
    status: str
    owner: str
    version: int
    waiters: int
    shares: int
    free: bool
    token: int


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


@dataclass(frozen=True, slots=True)
class Granted:
    """A queued claim that a step has granted.

    Without a token, the key is reserved for the claim until it retries.
    """

    owner: str
    token: int | None
    lease: float

    @property
    def ticket(self) -> Ticket:
        return (
            MINE if self.token is None else Ticket(grant=Grant(self.token, self.lease))
        )
