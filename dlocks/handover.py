"""A hold that one process begins and another one ends: given away as a signed text, and resumed by it."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from contextlib import suppress

from django.core import signing

from dlocks import clock
from dlocks.backends.base import seconds
from dlocks.coroutines import in_django_thread
from dlocks.exceptions import LockError, LockLost
from dlocks.holds import Caller, Hold, current_caller
from dlocks.keeper import FOREVER
from dlocks.locks import Attempt, Lock

SALT = "dlocks.handover"


def detach(hold: Hold, *, within: float | None = None) -> str:
    """
    Give a hold away and return the text by which ``resume_hold()`` resumes it, once, in any process.

    From here on the hold is of no use where it was, and its ``with`` block ends without giving the key back. Nothing
    renews the lease until it is resumed: it lasts for ``within`` seconds from now, by default its ttl. The text is
    signed with SECRET_KEY and not encrypted: whoever has it has the hold.

    Raise LockLost when the hold is held no more, and RuntimeError when it cannot be given away: in the scope of a
    transaction, or entered more than once. Inside a transaction send the text from ``on_commit()``.
    """
    if within is not None:
        seconds("within", within, above_zero=True)
        if (why := hold.backend.ttl_refused(within)) is not None:
            raise ValueError(f"{hold.key!r} cannot be kept for {within:g} s. {why}")
    was_over = hold.is_over
    try:
        return _detached(hold, hold.claim.ttl if within is None else float(within))
    except BaseException:
        if hold.is_over and not was_over:
            # Interrupted in the middle of it: nobody will ever have the text.
            with suppress(LockError):
                hold.take_back()
        raise


def _detached(hold: Hold, ttl: float) -> str:
    lock = hold.lock
    at_least, max_hold = hold.give_away(ttl)
    told = {
        # What is left of its max_hold is counted from here, in whichever process.
        "at": time.time(),
        "key": lock.key,
        "using": lock.using,
        "owner": hold.owner,
        "token": hold.token,
        "policy": {
            "ttl": hold.claim.ttl,
            "renew": lock.renew,
            "reentrant": lock.reentrant,
            "release_at": lock.release_at,
            # It is counted from the answer, and max_hold from the question.
            "at_least": min(at_least, max_hold),
            "max_hold": None if max_hold == FOREVER else max_hold,
        },
    }
    return signing.dumps(told, salt=SALT)


def resume_hold(text: str, *, on_lost: Callable[[Hold], object] | None = None) -> Hold:
    """
    Resume the hold that ``hold.detach()`` gave away: ``with resume_hold(text) as hold``.

    It is this process's own from here on: renewed, with a larger token, and the text is worth nothing more. Raise
    LockLost when the lease ran out, was cleared or was resumed already, and django.core.signing.BadSignature for a
    text that is not of this project's making. ``on_lost`` is that of ``db_lock()``, which cannot be sent along.
    """
    return _resume(text, on_lost, current_caller())


async def aresume_hold(text: str, *, on_lost: Callable[[Hold], object] | None = None) -> Hold:
    caller, resumed = current_caller(), []

    def resume() -> Hold:
        resumed.append(_resume(text, on_lost, caller))
        return resumed[0]

    try:
        return await in_django_thread(resume)
    except asyncio.CancelledError:
        for hold in resumed:
            with suppress(LockError):
                await hold.arelease(failed=True)
        raise


def _resume(text: str, on_lost: Callable[[Hold], object] | None, caller: Caller) -> Hold:
    told = signing.loads(text, salt=SALT)
    policy = told["policy"]
    if policy["max_hold"] is not None:
        # Not all of it: whose lease is not over has some left, by whatever clocks.
        on_its_way = max(0.0, time.time() - told["at"])
        policy["max_hold"] = max(policy["max_hold"] - on_its_way, policy["max_hold"] / 100)
        policy["at_least"] = min(policy["at_least"], policy["max_hold"])
    lock = Lock(key=told["key"], using=told["using"], scope="lease", on_lost=on_lost, **policy)
    attempt = Attempt(lock, caller, lambda: None, wait=False)
    attempt.claim = attempt._claim()
    predecessor = dataclasses.replace(attempt.claim, owner=told["owner"])
    sent = clock.now()
    attempt.unknown = True
    try:
        grant = attempt._ask(attempt.backend.exchange, predecessor, attempt.claim)
        if grant is not None:
            return attempt._hold(attempt.claim, grant, sent)
    except BaseException:
        # If it came to be, nobody knows of it: then the key is given back.
        attempt.give_up()
        raise
    else:
        raise LockLost(
            f"{lock.key!r} (token {told['token']}) cannot be resumed: its lease ran out or was cleared, or somebody "
            "has resumed it already.",
            key=lock.key,
            token=told["token"],
        )
