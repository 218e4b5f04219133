"""Detaching a hold, whose key then belongs to a signed text."""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from typing import Any

from django.core import signing

from dlocks.core.callers import acts_for
from dlocks.core.confirm import checked_ttl, refuse_ended
from dlocks.core.holding import Holding
from dlocks.core.life import Effect, Phase
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.clock import FOREVER
from dlocks.runtime.keeper import keeper
from dlocks.runtime.requests import refuse_nested, request
from dlocks.values import Claim, Duration

SALT = "dlocks.handover"


def detach(hold: Holding, within: Duration | None, offer: object) -> str:
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

    ``offer`` is the identity of this call for ``recall()``.
    """
    ttl = checked_ttl("within", within, [hold], "detached") or hold.lease.claim.ttl
    _refuse(hold)
    face = hold.face
    # An entry that is added meanwhile has another caller, so it refuses the offer.
    mine = [one.caller for one in hold.life.state.entries if acts_for(one.caller)]
    hold.end_if_expired()
    refuse_ended(hold)
    try:
        if hold.life.offer(mine, offer):
            raise _why_not_offered(hold)
        min_hold, max_hold = hold.min_hold_left, hold.lease.last_at - clock.now()
        _pass_on(hold, dataclasses.replace(hold.claim, ttl=min(ttl, max_hold)))
        return signing.dumps(_data_of(hold, min_hold, max_hold), salt=SALT)
    except BaseException:
        # It was interrupted, so no process will receive the text.
        recall(hold, offer, face)
        raise


def _data_of(hold: Holding, min_hold: float, max_hold: float) -> dict[str, Any]:
    lock = hold.lock
    return {
        # The rest of max_hold counts from here, in any process.
        "at": clock.wall_now(),
        "key": lock.key,
        "claimed": hold.claim.key,
        "using": lock.using,
        "owner": hold.claim.owner,
        "token": hold.token,
        "policy": {
            "ttl": hold.lease.claim.ttl,
            "renew": lock.renew,
            "reentrant": lock.reentrant,
            "release_at": lock.release_at,
            "note": lock.note,
            # min_hold is counted from the reply, and max_hold from the request.
            "min_hold": min(min_hold, max_hold),
            "max_hold": None if max_hold == FOREVER else max_hold,
        },
    }


def recall(hold: Holding, offer: object, face: Any) -> None:
    """End a hold whose text no process will receive, and release its key.

    It is lost to a block of its caller, which may go on. ``face`` is the hold as
    callers see it, for the report.
    """
    why = "its handover to another process was interrupted"
    effect = hold.life.recall(why, offer)
    if effect & Effect.REPORT:
        # It may have been signalled as detached, and forgotten then.
        hold.face = face
        hold.forget_entries()
        hold.perform_loss(effect)
    else:
        hold.perform_quietly(effect)


def _refuse(hold: Holding) -> None:
    """Raise RuntimeError if no caller could hand the hold over."""
    key, backend = hold.lock.key, hold.backend
    if hold.scope == "transaction":
        raise RuntimeError(
            f"{key!r} is held by a transaction, and cannot be handed over. Acquire it"
            " with scope='lease'."
        )
    if hold.lock.shared:
        raise RuntimeError(f"The shared hold on {key!r} cannot be handed over.")
    if not backend.supports_handover:
        raise RuntimeError(
            f"{type(backend).__name__} cannot hand {key!r} over to another process."
        )
    refuse_nested()
    if (why := backend.refusal(hold.claim)) is not None:
        raise RuntimeError(f"{key!r} cannot be handed over here. {why}")


def _why_not_offered(hold: Holding) -> Exception:
    """Return the error for a hold that another caller uses, or that has ended."""
    state = hold.life.state
    was_left = state.phase is Phase.DETACHING and state.is_kept
    if not was_left and (hold.is_over or not state.entries):
        return hold.lost_error()
    why = " before the end of a transaction in which it was left."
    if state.is_pinned:
        why = " inside hold.atomic()."
    elif any(not acts_for(entry.caller) for entry in state.blocks):
        why = (
            ", because another thread or task is in a block that holds it. Detach it"
            " there."
        )
    elif len(state.entries) > 1:
        why = (
            f" while its caller has acquired it {len(state.entries)} times. Release the"
            " inner holds first."
        )
    return RuntimeError(f"{hold.lock.key!r} cannot be handed over{why}")


def _pass_on(hold: Holding, claim: Claim) -> None:
    """Let the lease last for the claim's ttl, and end the hold."""
    try:
        # By the keeper, so that no pending renewal comes after it.
        stands = keeper.run(partial(_extend_lease, hold, claim), hold.backend)
    except LockBackendError:
        hold.perform_quietly(hold.life.withdraw())
        keeper.check_soon()
        raise
    if not stands:
        raise hold.end_as_lost()
    if hold.life.detach():
        raise _why_not_offered(hold)
    hold.unwatch()
    hold.forget_entries()
    hold.send_ended("detached")


def _extend_lease(hold: Holding, claim: Claim) -> bool:
    for number in range(10):
        # Another writer may have held up the renewals, and hold up this one.
        late = hold.lease.next_claim(may_be_late=hold.backend.renews_late).late
        # Here, because the request may come after its caller has given up waiting. It
        # may also change the lease although there is no reply.
        hold.lease.shorten(clock.now() + claim.ttl)
        hold.lease.renew_at = clock.now()
        keeper.check_soon()
        left = request(hold.backend.renew, [dataclasses.replace(claim, late=late)])
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
