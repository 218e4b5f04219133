"""Leases: how long a hold lasts, and when it is renewed."""

from __future__ import annotations

import dataclasses

from dlocks.backends.base import Backend
from dlocks.core.life import Life
from dlocks.core.policy import FromSettings, LockPolicy
from dlocks.runtime import clock
from dlocks.runtime.clock import FOREVER
from dlocks.runtime.keeper import keeper
from dlocks.values import Claim, Grant

# Seconds after which a short lease from the queue is first renewed.
RENEW_SOON = 0.1
# Minimum seconds before a failed renewal is retried.
SOONEST_RENEWAL = 0.02
# Seconds before its deadline in which a lease may expire on the way to the database.
ALMOST_OVER = 1.0
# Seconds for which an expired lease counts as not lost, after a reply that it could not
# be renewed just then.
NOT_LOST_FOR = 1.0
# The ttls after which a hold that was not released is reported, without ``slow_hold``.
SLOW_TTLS = 10


class Lease:
    """The times of a hold by the clock of this process.

    A hold in a transaction has no deadline, and ends with the transaction. The
    ``claim`` has the ttl of the next renewal. The deadline is a part of the state of
    ``Life``: a reply to an earlier request must not outlive a shorter ttl, and a
    renewal must not come between the look at the deadline and the end of the hold. So
    it earns promise 2 of docs/safety.md.
    """

    # When the backend last answered a renewal.
    answered_at = 0.0
    # When its ttl was changed.
    changed_at = 0.0
    # Why the last renewal failed, or nothing if it succeeded.
    failure = ""
    # From when its max_hold counts, in words, if not from the grant.
    limited_from = ""

    def __init__(
        self,
        lock: LockPolicy,
        backend: Backend,
        claim: Claim,
        grant: Grant,
        sent: float,
        life: Life,
        ttl: float,
    ) -> None:
        self.claim = claim
        self.max_hold = lock.max_hold
        # That of a claim is not longer than ``max_hold``.
        self._ttl = backend.ttl if isinstance(lock.ttl, FromSettings) else lock.ttl
        self._renew_every = backend.renew_every
        self.granted_at = clock.now()
        self._granted = ttl
        self._life = life
        self.last_at = FOREVER if lock.max_hold is None else sent + lock.max_hold
        # Without renewal, a hold still lasts for its ttl if the backend grants shorter
        # leases.
        short = grant.lease is not None and self._renew_every < FOREVER
        self.renewed_until = (
            FOREVER if lock.renew else sent + claim.ttl if short else 0.0
        )
        # The first lease of a queued claim is short. Only a very short hold needs no
        # renewal.
        due = self.granted_at + RENEW_SOON if grant.lease else sent + ttl / 3
        self.renew_at = min(due, self.granted_at + self._renew_every)

    @property
    def deadline(self) -> float:
        """Return until when the key is certainly held."""
        return self._life.state.deadline

    @property
    def age(self) -> float:
        return clock.now() - self.granted_at

    @property
    def can_grow(self) -> bool:
        """Return whether a renewal may extend it, at most until ``max_hold``."""
        longest = min(self.last_at, self.renewed_until)
        # A late renewal that begins after ``max_hold`` extends nothing.
        return self.deadline < longest and clock.now() < self.last_at

    def lost_at(self, *, may_be_late: bool) -> float:
        """Return when it is lost unless it is renewed."""
        if may_be_late:
            return max(self.deadline, self.answered_at + NOT_LOST_FOR)
        return self.deadline

    def next_claim(self, *, may_be_late: bool) -> Claim:
        """Return the claim for a renewal, at most until ``max_hold``.

        It is ``late`` where the lease may have expired.
        """
        now = clock.now()
        ttl = min(
            self.claim.ttl, min(self.last_at, self.renewed_until or FOREVER) - now
        )
        late = self.deadline - now < ALMOST_OVER and may_be_late
        if ttl == self.claim.ttl and not late:
            return self.claim
        return dataclasses.replace(self.claim, ttl=max(ttl, 0.0), late=late)

    def change(self, ttl: float | None, max_hold: float | None) -> None:
        """Let renewals that are sent from now on last for ``ttl`` seconds.

        ``max_hold`` counts from now. A shorter lease counts at once. It is certain in
        any case, even if the reply to its request is lost.
        """
        if max_hold is not None:
            self.max_hold, self.limited_from = max_hold, " from a renewal"
            self.last_at = clock.now() + max_hold
        self._ttl = ttl = self._ttl if ttl is None else ttl
        # Also before the claim. After an interrupt here, renewals have the other ttl.
        self.shorten(min(clock.now() + ttl, self.last_at))
        self.claim = dataclasses.replace(self.claim, ttl=ttl)
        # After the claim. A thread that uses the earlier claim has read the clock
        # before this.
        self.changed_at = now = clock.now()
        self.shorten(min(now + ttl, self.last_at))
        if 0.0 < self.renewed_until < FOREVER:
            self.renewed_until = now + ttl
        self.put_off_renewal("")
        # The keeper would sleep for a third of the earlier ttl.
        keeper.check_soon()

    def shorten(self, until: float) -> None:
        """Let the lease be certain until this time at most."""
        self._life.set_deadline(lambda deadline: min(deadline, until))

    def record_answer(self, sent: float, seconds: float) -> None:
        """Record a renewal that lasts for ``seconds`` from ``sent``."""
        self.answered_at = clock.now()

        def rule(deadline: float) -> float:
            if sent < self.changed_at:
                # Sent with another ttl, and perhaps carried out after a request with
                # the present one.
                return min(deadline, sent + seconds)
            return max(deadline, min(sent + seconds, self.last_at))

        self._life.set_deadline(rule)
        if self.changed_at > sent:
            self.renew_at = self.answered_at
            keeper.check_soon()
            return
        step = min(self.claim.ttl / 3, self._renew_every)
        if seconds >= step:
            self.renew_at, self.failure = sent + step, ""
            return
        # The row was locked, so the lease was not fully extended. Retry soon. (Without
        # ``renew``, it is not extended to its full ttl in any case.)
        renews = self.renewed_until == FOREVER
        self.put_off_renewal("another transaction had locked its row" if renews else "")

    def record_failure(self, sent: float, seconds: float) -> None:
        """Record a renewal that has no reply. It may end a longer lease early."""
        if self.changed_at > sent:
            self.record_answer(sent, seconds)

    def put_off_renewal(self, why: BaseException | str) -> None:
        """Let the next renewal follow after a short delay, and note the reason."""
        # The errors of some drivers have several lines.
        self.failure = " ".join(str(why).split())
        # The first lease of a queued claim is much shorter than its ttl.
        now = clock.now()
        delay = max(
            SOONEST_RENEWAL, min(self.claim.ttl / 10, (self.deadline - now) / 4)
        )
        self.renew_at = now + min(delay, self._renew_every)

    def why_not(self) -> str:
        """Return why it is over, if no reason is known."""
        if self.claim.scope == "transaction":
            return "its transaction has ended"
        if clock.now() >= self.last_at:
            since = self.limited_from
            return f"it was held for its max_hold of {self.max_hold:.10g} s{since}"
        why = f" (the last renewal failed: {self.failure})" if self.failure else ""
        lasts = f"ttl of {self.claim.ttl:g} s"
        if not self.answered_at and self._granted < self.claim.ttl:
            lasts = f"first lease of {self._granted:.2g} s"
        return f"it was not renewed within its {lasts}{why}"


def slow_after(backend: Backend, ttl: float) -> float:
    """Return the seconds after which a hold that was not released is reported."""
    return SLOW_TTLS * ttl if backend.slow_hold is None else backend.slow_hold
