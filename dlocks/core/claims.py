"""What a caller does first: it enters the hold that it has, or makes a claim."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from dlocks.backends.base import Backend
from dlocks.core import callers, explain
from dlocks.core.callers import Caller, Place
from dlocks.core.holder import holder_name, noted, own_ip
from dlocks.core.holding import Holding
from dlocks.core.policy import FromSettings, LockPolicy
from dlocks.core.settlement import marks_here, pins_here
from dlocks.runtime.clock import FOREVER
from dlocks.runtime.connected import connection_of
from dlocks.runtime.keeper import keeper
from dlocks.transactions import (
    TransactionMarker,
    open_connections,
    warn_of_old_snapshots,
)
from dlocks.values import UNLIMITED, Claim


def hold_at(caller: Caller, place: Place) -> Holding | None:
    """Return the hold of a caller at a place that it can enter, or None.

    If it has several permits, this is one that can be entered again.
    """
    entries = callers.entries_at(caller, place)
    found: list[Holding] = [entry.hold for entry in entries if entry.hold.is_enterable]
    reentrant = [hold for hold in found if hold.lock.reentrant]
    return (reentrant or found)[-1] if found else None


def own_hold(attempt: Any) -> Holding | None:
    """Return the hold of an attempt's caller to enter, or None if it has to claim.

    Raise LockTimeout if the hold is not reentrant, and RuntimeError if it cannot be
    entered for another reason.
    """
    caller, place, lock = attempt.caller, attempt.place, attempt.lock
    hold = hold_at(caller, place)
    if hold is None:
        _refuse_lost(caller, place, lock)
        return None
    reentrant = lock.reentrant and hold.lock.reentrant
    if hold.count and not reentrant:
        if lock.shared or _lose_if_expired(hold):
            return None
        raise explain.reentry_error(attempt)
    if hold.scope == "transaction" and lock.scope == "lease":
        raise RuntimeError(
            f"{lock.key!r} is already held by the transaction of this thread. A lease"
            " would have to wait for the end of that transaction. Leave out"
            " scope='lease' to use the transaction's hold."
        )
    if hold.scope == "lease" and lock.scope == "transaction":
        raise RuntimeError(
            f"{lock.key!r} is already held by this caller as a lease, which is not part"
            " of the transaction. Begin the transaction with 'with hold.atomic()' of"
            " the lease, or leave out scope='transaction'."
        )
    return hold


def _refuse_lost(caller: Caller, place: Place, lock: LockPolicy) -> None:
    """Raise LockLost if the caller would enter a hold that is lost.

    A block inside of the block of that hold must not begin. This is raised once.
    """
    for entry in callers.entries_at(caller, place):
        hold: Holding = entry.hold
        if hold.is_lost and not (hold.is_forked or entry.knows_end):
            entry.knows_end = True
            if lock.reentrant and hold.lock.reentrant:
                raise hold.lost_error()


def until_reentry(caller: Caller, place: Place) -> float:
    """Return the seconds until the caller can enter the hold that it has left.

    This is infinite if the caller has left no hold in a transaction.
    """
    entries = callers.entries_at(caller, place)
    if entries and entries[-1].hold.is_left:
        return entries[-1].hold.min_hold_left  # type: ignore[no-any-return]
    return FOREVER


def claim_for(
    caller: Caller, place: Place, lock: LockPolicy, backend: Backend
) -> Claim:
    """Return a claim for the key.

    Raise RuntimeError or ValueError if it cannot be acquired here.
    """
    identity, key, shared = place
    beside: Place = identity, key, not shared
    other = None
    if beside in callers.places_of(caller):
        other = _other_hold(caller, beside)
    if other is not None and not shared:
        what = "permit" if other.lock.permits < UNLIMITED else "read lock"
        kept = " It is kept until the transaction ends." if other.is_left else ""
        raise RuntimeError(
            f"The {what} on {lock.key!r} cannot be upgraded to a write lock: two"
            f" callers doing this would deadlock. Release the {what} first, or take"
            f" the write lock from the start.{kept}"
        )
    in_transaction, is_kept = backend.in_transaction(), False
    if in_transaction:
        in_it = TransactionMarker.keys_of(connection_of(backend.database))
        is_kept = (identity, key) in in_it
    ttl = backend.ttl if isinstance(lock.ttl, FromSettings) else float(lock.ttl)
    if lock.max_hold is not None:
        ttl = min(ttl, lock.max_hold)
    belongs = in_transaction and backend.supports_transactions
    holder = holder_name(caller)
    if lock.note or backend.describe_caller is not None:
        holder = noted(holder, backend.describe_caller, lock.note)
    claim = Claim(
        key=key,
        ttl=ttl,
        scope=lock.scope or ("transaction" if belongs else "lease"),
        takeover=lock.takeover,
        # Behind the waiters, it would wait for its own transaction.
        fair=lock.fair and not is_kept,
        shared=shared,
        permits=lock.permits,
        beside=other.claim.owner if other is not None else "",
        holder=holder,
        owner_ip=own_ip(),
    )
    why = backend.refusal(claim)
    if why and shared and lock.scope is None and belongs:
        claim = replace(claim, scope="lease")
        why = backend.refusal(claim)
    if why is not None:
        text = f"{lock.key!r} cannot be acquired here. {why}"
        # A claim that is only refused for its ttl has a wrong argument.
        if backend.refusal(replace(claim, ttl=0.0)) is None:
            raise ValueError(text)
        raise RuntimeError(text)
    if claim.scope == "lease":
        if is_kept or (other is not None and pins_here(other)):
            raise RuntimeError(
                f"{lock.key!r} is kept by the transaction of this thread until it"
                " ends. A lease or a shared hold would have to wait for that. Acquire"
                " it before the transaction begins."
            )
        warn_of_old_snapshots(lock.key)
    return claim


def refuse_own_wait(caller: Caller, place: Place, lock: LockPolicy) -> None:
    """Raise RuntimeError if a transaction of this thread keeps a hold that it has left.

    It cannot enter the hold again, because another thread has left it last, or has not
    left it yet. To wait for the key would be to wait for its own transaction.
    """
    if caller is not threading.current_thread() or not open_connections():
        return
    place = (*place[:2], False)
    mine = [entry.hold for entry in callers.entries_at(caller, place)]
    if any(
        hold.place == place and hold not in mine and marks_here(hold)
        for hold in keeper.holds
    ):
        raise RuntimeError(
            f"{lock.key!r} is kept by the transaction of this thread until it ends. A"
            " hold was released there that is shared with another thread. To wait for"
            " the key would be to wait for that end. Release it after the transaction."
        )


def _other_hold(caller: Caller, place: Place) -> Holding | None:
    """Return the caller's hold of the other kind, shared or exclusive."""
    for entry in callers.entries_at(caller, place):
        hold: Holding = entry.hold
        if hold.is_left or (
            hold.is_enterable and hold.count and not _lose_if_expired(hold)
        ):
            return hold
    return None


def _lose_if_expired(hold: Holding) -> bool:
    """End a hold whose lease has run out, and return whether it is lost."""
    if hold.may_be_held:
        return False
    hold.expire(hold.has_run_out)
    return hold.is_over
