"""One caller whose claim is in the queue of a key."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.values import Claim, Grant, Ticket, WaitingClaim


class Waiter:
    """One caller whose claim is in the queue.

    ``wake`` is called in another thread when the caller has something to do.

    ``given`` is a grant, and when the request was sent from which its lease counts.
    """

    def __init__(
        self,
        claim: Claim,
        wake: Callable[[], object],
        caller: object = None,
        until: float = math.inf,
    ) -> None:
        self.claim = claim
        self.wake = wake
        self.caller = caller
        # When its timeout ends. Other waiters do not wait for it much beyond that.
        self.until = until
        self.given: tuple[Grant, float] | None = None
        self.error: LockBackendError | None = None
        self.position: int | None = None
        # Held while the claim rejoins the queue, and once the waiter has left for good.
        self.mutex = threading.Lock()
        self.is_queued = False
        # When to poll for it next, at the latest.
        self.poll_at = 0.0
        # When it was woken, unless it waits again.
        self.woken = 0.0
        # Whether the key may become free without a notification.
        self.unnotified = False
        # Whether its coroutine was closed, so that no caller waits any more.
        self.closed = False
        # When to look for a deadlock next, the one seen at the last look, and the one
        # that is certain.
        self.check_at = math.inf
        self.suspected: Sequence[str] = ()
        self.deadlock: Sequence[WaitingClaim] = ()

    @property
    def is_abandoned(self) -> bool:
        """Return whether the coroutine or its event loop was closed."""
        return self.closed or (
            isinstance(self.caller, asyncio.Task) and self.caller.get_loop().is_closed()
        )

    def apply(self, ticket: Ticket, sent: float) -> bool:
        """Record the reply to a request that was sent at ``sent``.

        Return whether the caller has to be woken.
        """
        self.position = ticket.position or self.position
        self.unnotified = ticket.unnotified
        if ticket.grant is not None:
            self.given = ticket.grant, sent
        must_wake = ticket.grant is not None or ticket.must_retry
        if must_wake:
            self.woken = clock.now()
        return must_wake


def foremost(queued: Iterable[Waiter]) -> Iterator[Waiter]:
    """Yield the waiters that may be granted next.

    These are the first waiter of each key that takes part in every grant, and those in
    front of it: shared claims, and claims that take nothing over.
    """
    by_key: defaultdict[str, list[Waiter]] = defaultdict(list)
    for waiter in queued:
        if not waiter.woken:
            by_key[waiter.claim.key].append(waiter)
    for waiters in by_key.values():
        for waiter in sorted(waiters, key=lambda one: one.position or 0):
            yield waiter
            if waiter.claim.takeover and not waiter.claim.shared:
                break
