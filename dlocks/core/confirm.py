"""The requests by which a caller confirms or renews its hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlocks.runtime import clock


def check(hold: Any) -> None:
    """Check with the backend that the key is held, or raise LockLost."""
    if not hold.may_be_held:
        raise hold.end_as_expired()
    if not hold.verify(hold.count):
        raise hold.end_as_lost(hold.why_gone())
    refuse_ended(hold)


def renew(hold: Any) -> None:
    """Extend the lease to its ttl from now, or raise LockLost."""
    if hold.scope == "transaction" or hold.life.is_pinned:
        check(hold)
        return
    if not hold.may_be_held:
        raise hold.end_as_expired()
    sent, lease = clock.now(), hold.lease
    if lease.renewed_until:
        lease.renewed_until = max(lease.renewed_until, sent + hold.claim.ttl)
    record_renewal(hold, sent, hold.ask(hold.backend.renew, [hold.next_claim()]))


def record_renewal(hold: Any, sent: float, left: Mapping[str, float]) -> None:
    """Record the reply to the caller's renewal: the seconds left, by owner."""
    if hold.claim.owner not in left:
        raise hold.end_as_lost(hold.why_gone())
    if hold.backend.refusal(hold.claim) is None:
        # Otherwise the caller's transaction wrote it, and may roll it back.
        hold.lease.record_answer(sent, left[hold.claim.owner])
    refuse_ended(hold)


def refuse_ended(hold: Any) -> None:
    """Raise LockLost if the hold ended while the backend was asked about it."""
    if hold.is_over:
        raise hold.lost_error()
