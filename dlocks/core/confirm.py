"""The requests by which a caller confirms or renews its hold."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dlocks.core.settlement import pins_here
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.clock import FOREVER
from dlocks.runtime.keeper import keeper
from dlocks.runtime.requests import refuse_nested, request
from dlocks.values import Duration, seconds

# How often a renewal with another ttl is sent while the row is locked, in a second.
TRIES = 10

# A new ttl and a new max_hold of leases, in seconds, or None.
Terms = tuple[float | None, float | None]


def check(hold: Any) -> None:
    """Check with the backend that the key is held, or raise LockLost."""
    hold.end_if_expired()
    refuse_ended(hold)
    # A hold that only transactions keep has no entries. Zero would mean released.
    if not verify(hold, max(1, hold.count)):
        raise hold.end_as_lost()
    refuse_ended(hold)


def verify(hold: Any, count: int) -> bool:
    """Ask the backend whether the key is still held, and store the count."""
    while True:
        guards = hold.life.state.guards
        if _ask(hold, count):
            return True
        if hold.life.state.guards == guards:
            return False
        # A guard has locked the row meanwhile, and the request found its old lease.


def _ask(hold: Any, count: int) -> bool:
    for pin in pins_here(hold):
        # Only this transaction can check the row, which it has locked.
        late = replace(hold.next_claim(), late=True)
        return bool(request(hold.backend.pin, late, pin.alias))
    if _is_locked_elsewhere(hold):
        return True
    sent = clock.now()
    claim = hold.next_claim() if hold.may_be_late else hold.claim
    try:
        confirmed = bool(hold.ask(hold.backend.verify, [claim], count))
    except BaseException:
        if claim.late:
            # It may be carried out all the same, perhaps after one with another ttl.
            hold.lease.record_failure(sent, claim.ttl)
        raise
    if confirmed and claim.late and hold.backend.refusal(hold.claim) is None:
        hold.lease.record_answer(sent, claim.ttl)
    return confirmed


def _is_locked_elsewhere(hold: Any) -> bool:
    """Return whether a transaction of another thread has locked the row of a hold.

    The lease may have expired, but no caller takes the key before that transaction
    ends. While it is about to lock the row, wait for the reply, which may be a loss.
    """
    while pins := [
        pin for pin in hold.life.state.pins if pin.stands and pin.is_elsewhere
    ]:
        # It may need this thread of the keeper.
        if keeper.is_current or any(hold.claim.owner in pin.leases for pin in pins):
            return True
        if hold.backend.refusal(hold.claim) is not None:
            # On SQLite it may wait for the transaction of this thread.
            break
        clock.back_off(0.002)
    return False


def checked_ttl(
    name: str, value: Duration | None, holds: Sequence[Any], verb: str
) -> float | None:
    """Return a new ttl in seconds, or raise an error if no lease can have it."""
    if value is None:
        return None
    ttl = seconds(name, value, above_zero=True)
    for hold in holds:
        refusal, claim = hold.backend.refusal, hold.claim
        why = refusal(replace(claim, ttl=ttl))
        if why is not None and refusal(claim) is None:
            raise ValueError(f"{hold.lock.key!r} cannot be {verb}. {why}")
    return ttl


def checked_terms(
    ttl: Duration | None, max_hold: Duration | None, holds: Sequence[Any]
) -> Terms:
    """Return the terms of ``renew()``, or raise TypeError or ValueError."""
    if max_hold is not None:
        max_hold = seconds("max_hold", max_hold, above_zero=True)
    return checked_ttl("ttl", ttl, holds, "renewed"), max_hold


def renew(hold: Any, terms: Terms) -> None:
    """Extend the lease to its ttl from now, or raise LockLost.

    ``terms`` are new ones, for this and all later renewals.
    """
    if hold.scope == "transaction" or hold.life.state.is_pinned:
        if any(terms) and hold.scope == "lease":
            hold.lease.change(*terms)
        check(hold)
        return
    hold.end_if_expired()
    refuse_ended(hold)
    renew_together([hold], terms)


def renew_together(holds: Sequence[Any], terms: Terms) -> None:
    """Extend leases in one request. See ``renew()``."""
    guards = [hold.life.state.guards for hold in holds]
    try:
        sent, left = _renew_with(holds, terms) if any(terms) else _renew(holds)
        for hold, number in zip(holds, guards, strict=True):
            owner = hold.claim.owner
            if owner in left:
                if hold.backend.refusal(hold.claim) is None:
                    # Otherwise the caller's transaction wrote it, and may roll it back.
                    hold.lease.record_answer(sent, left[owner])
                refuse_ended(hold)
            elif hold.life.state.is_pinned or hold.life.state.guards != number:
                # A guard had locked the row, and the request found its old lease.
                check(hold)
            else:
                raise hold.end_as_lost()
    finally:
        for hold in holds:
            hold.free_if_lost()


def _renew(holds: Sequence[Any]) -> tuple[float, Mapping[str, float]]:
    sent = clock.now()
    for hold in holds:
        lease = hold.lease
        if lease.renewed_until:
            lease.renewed_until = max(lease.renewed_until, sent + lease.claim.ttl)
    claims = [hold.next_claim() for hold in holds]
    try:
        return sent, holds[0].ask(holds[0].backend.renew, claims)
    except BaseException:
        # It may be carried out all the same, perhaps after one with another ttl.
        for hold, claim in zip(holds, claims, strict=True):
            hold.lease.record_failure(sent, claim.ttl)
        raise


def _renew_with(
    holds: Sequence[Any], terms: Terms
) -> tuple[float, Mapping[str, float]]:
    """Change the terms of leases, and extend them.

    A row may be locked for a moment. Raise LockBackendError if it stays locked.
    """
    first = holds[0]

    def change() -> tuple[float, Mapping[str, float]]:
        for hold in holds:
            hold.lease.change(*terms)
        sent = clock.now()
        claims = [hold.next_claim() for hold in holds]
        return sent, request(first.backend.renew, claims)

    refuse_nested()
    for number in range(TRIES):
        # By the keeper, so that no renewal with the other terms comes after it. In a
        # transaction on SQLite, only this thread can write.
        if first.backend.refusal(first.claim) is None:
            sent, left = keeper.run(change, first.backend)
        else:
            sent, left = change()
        if not any(_is_shorter(hold, left) for hold in holds):
            return sent, left
        time.sleep(0.001 * 2**number)
    raise LockBackendError(
        f"The lease on {first.lock.key!r} could not be extended to"
        f" {first.lease.claim.ttl:g} s, because another transaction has locked its row,"
        " or a server did not answer. The next renewal extends it."
    )


def _is_shorter(hold: Any, left: Mapping[str, float]) -> bool:
    """Return whether a lease was not extended, for a reason that passes.

    Some backends never grant the whole ttl. They renew often.
    """
    seconds = left.get(hold.claim.owner)
    if seconds is None or hold.backend.renew_every < FOREVER:
        return False
    # A quorum rounds.
    return bool(seconds < 0.999 * hold.next_claim().ttl)


def refuse_ended(hold: Any) -> None:
    """Raise LockLost if the hold has ended, perhaps during a request about it."""
    if hold.is_over:
        raise hold.lost_error()
