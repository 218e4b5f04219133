"""Detaching a hold, whose key then belongs to a signed text."""

from __future__ import annotations

import dataclasses
import time
from functools import partial

from django.core import signing

from dlocks.core.callers import is_elsewhere, is_used_elsewhere
from dlocks.core.kept_hold import KeptHold
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.clock import FOREVER
from dlocks.runtime.keeper import keeper
from dlocks.runtime.requests import refuse_nested, request
from dlocks.signals import send_ended
from dlocks.transactions import standing
from dlocks.values import Claim, Duration, seconds

SALT = "dlocks.handover"

HANDED_OVER = "it was handed over"


def detach(hold: KeptHold, *, within: Duration | None = None) -> str:
    """Detach a hold and return the text by which a process resumes it.

    ``resume_hold()`` resumes it once, in any process. The hold can no longer be used
    here, and its ``with`` block does not release the key. Until it is resumed, nothing
    renews the lease. It lasts for ``within``, by default for its ttl. The text is
    signed with SECRET_KEY but not encrypted. Any process with the text can resume the
    hold.

    Raise LockLost if the hold is no longer held. Raise RuntimeError in transaction
    scope, for a shared hold, for one that was entered more than once, while a block of
    another thread or task or ``hold.atomic()`` uses it, and if the backend cannot hand
    over. A hold that is left while this fails is released. Inside a transaction, send
    the text from ``on_commit()``.
    """
    if within is not None:
        within = seconds("within", within, above_zero=True)
        refusal, claim = hold.backend.refusal, hold.claim
        why = refusal(dataclasses.replace(claim, ttl=within))
        if why is not None and refusal(claim) is None:
            raise ValueError(f"{hold.lock.key!r} cannot be detached. {why}")
    offer = object()
    try:
        return _detached(hold, hold.claim.ttl if within is None else within, offer)
    except BaseException:
        if hold.offer is offer and hold.is_over:
            # Interrupted, so no process will ever receive the text.
            hold.forget()
            hold.release_again()
        raise


def _detached(hold: KeptHold, ttl: float, offer: object) -> str:
    lock = hold.lock
    min_hold, max_hold = _transfer(hold, ttl, offer)
    data = {
        # The rest of max_hold counts from here, in any process.
        "at": clock.wall_now(),
        "key": lock.key,
        "claimed": hold.claim.key,
        "using": lock.using,
        "owner": hold.claim.owner,
        "token": hold.token,
        "policy": {
            "ttl": hold.claim.ttl,
            "renew": lock.renew,
            "reentrant": lock.reentrant,
            "release_at": lock.release_at,
            # min_hold is counted from the reply, and max_hold from the request.
            "min_hold": min(min_hold, max_hold),
            "max_hold": None if max_hold == FOREVER else max_hold,
        },
    }
    return signing.dumps(data, salt=SALT)


def release_detached(hold: KeptHold) -> None:
    """Release the key of a detached hold, whose text no process will receive."""
    if hold.lease.lost == HANDED_OVER:
        hold.release_again()


def _transfer(hold: KeptHold, ttl: float, offer: object) -> tuple[float, float]:
    """End the hold here, without releasing the key.

    The lease lasts for ``ttl`` more seconds. Return the seconds left of
    ``min_hold`` and ``max_hold``. ``offer`` identifies this call.
    """
    if hold.scope == "transaction":
        raise RuntimeError(
            f"{hold.lock.key!r} is held by a transaction, and cannot be handed over."
            " Acquire it with scope='lease'."
        )
    if hold.lock.shared:
        raise RuntimeError(
            f"The shared hold on {hold.lock.key!r} cannot be handed over."
        )
    if not hold.backend.supports_handover:
        raise RuntimeError(
            f"{type(hold.backend).__name__} cannot hand {hold.lock.key!r} over to"
            " another process."
        )
    refuse_nested()
    if (why := hold.backend.refusal(hold.claim)) is not None:
        raise RuntimeError(f"{hold.lock.key!r} cannot be handed over here. {why}")
    is_used = is_used_elsewhere(hold)
    with hold.lease.mutex:
        if hold.count > 1:
            raise RuntimeError(
                f"{hold.lock.key!r} cannot be handed over while its caller has acquired"
                f" it {hold.count} times. Release the inner holds first."
            )
        if is_used or any(map(is_elsewhere, hold.users)):
            raise RuntimeError(
                f"{hold.lock.key!r} cannot be handed over, because another thread or"
                " task is in a block that holds it. Detach it there."
            )
        if hold.pinned:
            raise RuntimeError(
                f"{hold.lock.key!r} cannot be handed over inside hold.atomic()."
            )
        if standing(hold.left_before):
            raise RuntimeError(
                f"{hold.lock.key!r} cannot be handed over before the end of a"
                " transaction in which it was left."
            )
        ended = hold.lease.ended or hold.count == 0
        if not ended and hold.held:
            # From here on, no caller enters it. Written first, for an interrupt.
            hold.offer = offer
            hold.lease.ended = True
    now = clock.now()
    left = hold.lease.kept_for, hold.lease.last_at - now
    if hold.offer is not offer:
        if not ended:
            hold.loss(hold.lease.why_not())
        raise hold.lost_error(hold.lease.lost or "it has ended")
    keeper.drop(hold)
    claim = dataclasses.replace(hold.claim, ttl=min(ttl, left[1]))
    sent = clock.now()
    try:
        # By the keeper, so that no pending renewal comes after it.
        stands = keeper.run(partial(_leave_lease, hold, claim), hold.backend)
    except LockBackendError:
        # The backend may have changed the lease all the same.
        hold.lease.deadline = min(hold.lease.deadline, sent + claim.ttl)
        hold.lease.renew_at = sent
        if hold.withdraw_offer():
            keeper.keep(hold)
        raise
    hold.forget()
    if not stands:
        hold.lease.lost = hold.why_gone()
        hold.report_loss()
        raise hold.lost_error()
    hold.lease.lost = HANDED_OVER
    send_ended(hold.hold, "detached")
    hold.hold = None
    return left


def _leave_lease(hold: KeptHold, claim: Claim) -> bool:
    for number in range(10):
        left = request(hold.backend.renew, [claim])
        if claim.owner not in left:
            return False
        if left[claim.owner] >= claim.ttl:
            return True
        # A caller that tried to acquire the key has locked the row for a moment.
        time.sleep(0.001 * 2**number)
    raise LockBackendError(
        f"The lease on {hold.lock.key!r} could not be extended: another transaction has"
        " locked its row."
    )
