"""Handing a hold over to another process as a signed text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from django.core import signing

from dlocks.core.acquire import Acquisition
from dlocks.core.attempt import ask_for
from dlocks.core.callers import Caller, current_caller
from dlocks.core.detach import SALT
from dlocks.core.drive import ThreadWakeup
from dlocks.core.hold import Hold
from dlocks.core.lock import Lock
from dlocks.exceptions import LockError, LockLost
from dlocks.runtime import clock
from dlocks.runtime.coroutines import make_undoable
from dlocks.runtime.keeper import keeper
from dlocks.runtime.requests import refuse_nested


def resume_hold(text: str, *, on_lost: Callable[[Hold], object] | None = None) -> Hold:
    """Resume the hold that ``hold.detach()`` detached.

        with resume_hold(text) as hold:
            ...

    The hold now belongs to this process. It is renewed, has a larger token, and makes
    the text invalid. Raise LockLost if the lease has expired, was cleared or was
    already resumed. Raise ``django.core.signing.BadSignature`` if this project did not
    sign the text. ``on_lost`` is that of ``db_lock()``, which the text cannot contain.
    """
    return _resume(text, on_lost, current_caller())


async def aresume_hold(
    text: str, *, on_lost: Callable[[Hold], object] | None = None
) -> Hold:
    caller, resumed = current_caller(), list[Hold]()

    def resume() -> Hold:
        resumed.append(_resume(text, on_lost, caller))
        return resumed[0]

    def release() -> None:
        for hold in resumed:
            with suppress(LockError, RuntimeError):
                hold.release(failed=True)

    def release_later() -> None:
        for hold in resumed:
            keeper.post(release, hold.backend)

    return await make_undoable(resume, release, release_later)


def _resume(
    text: str, on_lost: Callable[[Hold], object] | None, caller: Caller
) -> Hold:
    try:
        data = signing.loads(text, salt=SALT)
    except signing.BadSignature:
        raise signing.BadSignature(
            "detach() did not return this text, or SECRET_KEY has changed."
        ) from None
    policy = data["policy"]
    if policy["max_hold"] is not None:
        # Keep a hundredth. A lease that has not expired has some left, by whatever
        # clock.
        on_its_way = max(0.0, clock.wall_now() - data["at"])
        policy["max_hold"] = max(
            policy["max_hold"] - on_its_way, policy["max_hold"] / 100
        )
        policy["min_hold"] = min(policy["min_hold"], policy["max_hold"])
    lock = Lock(
        key=data["key"], using=data["using"], scope="lease", on_lost=on_lost, **policy
    )
    refuse_nested()
    # The prefix may depend on the tenant, which may differ in this process.
    key = data["claimed"]
    acquisition = Acquisition(lock, caller, ThreadWakeup(), timeout=0.0, key=key)
    (attempt,) = acquisition.attempts
    claim = attempt.ensure_claim()
    predecessor = dataclasses.replace(claim, owner=data["owner"])
    exchange = partial(acquisition.backend.exchange, predecessor)
    sent = clock.now()
    try:
        grant = ask_for([attempt], exchange, claim)
        if grant is not None:
            return attempt.begin_hold(grant, sent)
    except BaseException:
        # If the exchange succeeded, the key must be released.
        acquisition.cancel()
        raise
    raise LockLost(
        f"{lock.key!r} (token {data['token']}) cannot be resumed: its lease has"
        " expired or was cleared, or it has already been resumed.",
        key=lock.key,
        token=data["token"],
    )
