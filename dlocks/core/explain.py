"""What the errors say about a key that is busy, and about a hold that is lost."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from django.db import Error

from dlocks.core import callers
from dlocks.core.entry import Entry
from dlocks.core.holder import holder_name
from dlocks.core.life import Phase, Reason
from dlocks.core.policy import shown
from dlocks.exceptions import (
    LockBackendError,
    LockDeadlock,
    LockError,
    LockLost,
    LockShutDown,
    LockTimeout,
)
from dlocks.runtime import clock
from dlocks.runtime.deadlocks import described
from dlocks.runtime.jobs import GONE
from dlocks.runtime.keeper import OUTSIDE_TIMEOUT
from dlocks.runtime.threads import PythonIsExitingError
from dlocks.signals import send_event
from dlocks.text import duration, permits_taken, shown_holder, without_note
from dlocks.values import UNLIMITED, Holder

logger = logging.getLogger("dlocks")

# Keys at which the error of several late requests looks for a holder.
LOOKS = 10

# Why a hold has ended.
DETACHED = "it was handed over"
EXITED = "its process released all of its locks because it was about to end"


# A key that could not be acquired.


# A holder of a key, and what an error says about its holders.
Found = tuple[Holder | None, str]


def timeout_error(attempt: Any, found: Found | None = None) -> LockTimeout:
    """Return the error of an attempt that took too long, with what keeps the key."""
    lock, timeout = attempt.lock, attempt.timeout
    holder, who = found or _look(attempt)
    facts = _facts_of_timeout(attempt, holder)
    if attempt.waiter is not None and attempt.waiter.deadlock:
        members = tuple(described(attempt.waiter.deadlock, _prefix(attempt)))
        keys = sorted({member.waits_for for member in members})
        error = LockDeadlock(
            f"{lock.key!r} could not be acquired because of a deadlock:"
            f" {'; '.join(map(str, members))}. Acquire the keys in the same order"
            f" everywhere, or together: db_lock({', '.join(map(repr, keys))}).",
            **facts,
        )
        error.members = members
        return error
    when = f"within {shown(timeout)} s" if timeout else "without waiting"
    why = who or "held by an open transaction, or just released"
    return LockTimeout(f"{lock.key!r} could not be acquired {when}: {why}", **facts)


def late_error(attempts: Sequence[Any]) -> LockTimeout:
    """Return the error if the requests for several keys took all of the time.

    It is about the first one that has a holder, if a look at a few of them finds it.
    """
    for one in attempts[:LOOKS]:
        found = _look(one)
        if found[0] is not None:
            return timeout_error(one, found)
    why = "the requests for the other keys took all of this time"
    return timeout_error(attempts[0], (None, why))


def reentry_error(attempt: Any) -> LockTimeout:
    """Return the error of a caller that holds the key, if it is not reentrant."""
    facts = _facts_of_timeout(attempt, _look(attempt)[0])
    caller = "task" if hasattr(attempt.caller, "get_loop") else "thread"
    return LockTimeout(
        f"{attempt.lock.key!r} could not be acquired: this {caller} holds it already,"
        " and cannot acquire it again because of reentrant=False",
        **facts,
    )


def _facts_of_timeout(attempt: Any, holder: Holder | None) -> dict[str, Any]:
    """Send the signal, and return the arguments of the error."""
    lock, waited = attempt.lock, clock.now() - attempt.began
    send_event("timed_out", lock, lock=lock, holder=holder, waited=waited)
    return {"key": lock.key, "timeout": attempt.timeout, "holder": holder}


def _look(attempt: Any) -> Found:
    """Look for the holders of a key that the attempt could not acquire."""
    look = partial(_current_holder, attempt)
    found: Found = None, ""
    with suppress(LockBackendError):
        found = callers.read_outside(look, attempt.backend, OUTSIDE_TIMEOUT)
    return found


def shut_down_error(key: str, waited: float) -> LockShutDown:
    """Return the error of a wait that a shutdown has ended or does not let begin."""
    when = f" after {duration(waited)}" if waited >= 1 else ""
    return LockShutDown(
        f"{key!r} could not be acquired{when}: dlocks.shutdown() has ended all waits of"
        " this process. Let this thread or task end.",
        key=key,
    )


def _current_holder(attempt: Any) -> Found:
    """Return a holder of the key, and a phrase that names all holders.

    Another caller is preferred to this one. After a wait, the phrase says what the
    holder itself waits for.
    """
    lock, backend, key = attempt.lock, attempt.backend, attempt.key
    if lock.permits < UNLIMITED:
        sharers, waiting = backend.inspector.sharers(key)
        if sharers:
            own = without_note(holder_name(attempt.caller))
            others = (one for one in sharers if without_note(one.holder) != own)
            other = next(others, sharers[0])
            return other, permits_taken(
                lock.permits, sharers, waiting - (attempt.waiter is not None)
            )
    holder = backend.holder(key)
    if holder is None:
        return None, ""
    wait = _wait_of(holder, attempt) if attempt.paused else ""
    return holder, f"held by {holder}{wait}"


def _prefix(attempt: Any) -> str:
    # This may run in another thread, where the backend's prefix is not known.
    return str(attempt.key.removesuffix(attempt.lock.key))


def _wait_of(holder: Holder, attempt: Any) -> str:
    """Return a phrase about what the holder waits for, or an empty one."""
    who = without_note(holder.holder)
    for claim in attempt.backend.inspector.waiting_claims():
        # The same caller may have another note in another claim.
        if without_note(claim.holder) == who and any(
            held.key == attempt.key for held in claim.holding
        ):
            key = claim.key.removeprefix(_prefix(attempt))
            return f", and has waited for {key!r} for {duration(claim.waited)}"
    return ""


# A hold that was lost.


def why_gone(hold: Any) -> str:
    """Return why the key is no longer held, and who took it, if known."""
    if hold.scope == "transaction" or hold.is_over:
        return GONE
    about = hold.claim, hold.token, hold.lease.age
    ask = partial(hold.backend.inspector.taken_by, *about)
    try:
        fact = callers.run_outside(ask, hold.backend, OUTSIDE_TIMEOUT)
    except (LockError, Error, PythonIsExitingError):
        # The loss is certain, and it is what matters. The admin's log may be missing.
        logger.debug("The new holder of %r is not known", hold.lock.key, exc_info=True)
        fact = None
    if not fact and clock.now() >= hold.lease.last_at:
        # Its lease has ended at its max_hold, just before this process noticed.
        return str(hold.lease.why_not())
    return f"{GONE}: {fact}" if fact else GONE


def why_orphaned(entries: Sequence[Entry]) -> str:
    """Return why a hold ends whose callers have all ended."""
    why = "it was never released, and "
    if len(entries) > 1:
        return why + "all of its callers have ended"
    is_task = any(hasattr(entry.caller, "get_loop") for entry in entries)
    return f"{why}its {'event loop' if is_task else 'thread'} has ended"


def lost_error(hold: Any, why: str | None = None) -> LockLost:
    """Return the error that a hold is lost, detached or released."""
    state = hold.life.state
    if why is None and hold.is_forked:
        why = "this process is a fork of its holder"
    if why is None and state.phase is Phase.DETACHING:
        why = "it is being handed over"
    if why is None and state.reason is Reason.DETACHED:
        why = DETACHED
    if why is None and state.reason is not Reason.RELEASED:
        why = state.why
    who = f"{shown_holder(hold.claim.holder)} (token {hold.token})"
    return LockLost(
        (
            f"{hold.lock.key!r} was lost by {who}: {why}."
            if why
            else f"{hold.lock.key!r} has been released by {who}."
        ),
        key=hold.lock.key,
        token=hold.token,
    )


def block_error(hold: Any) -> Exception:
    """Return the error for a ``with hold`` block that cannot begin."""
    if hold.is_lost:
        return lost_error(hold)
    return RuntimeError(
        f"This hold of {hold.lock.key!r} has been released, or an outer block releases"
        " it. Acquire the lock once for each block."
    )


class RefusedReleaseError(RuntimeError):
    """A release that would end the block of another caller changed nothing."""


def release_error(hold: Any) -> RefusedReleaseError:
    """Return the error for a release that would end the block of another caller."""
    return RefusedReleaseError(
        f"{hold.lock.key!r} is not released, because another thread or task is in a"
        " block that holds it. The end of that block releases it."
    )
