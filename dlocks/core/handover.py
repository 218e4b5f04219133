"""Handing a hold over to another process as a signed text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from django.core import signing

from dlocks.core.acquire import Acquisition, ThreadWakeup
from dlocks.core.attempt import ask_for
from dlocks.core.callers import current_caller
from dlocks.core.detach import SALT
from dlocks.core.hold import Hold
from dlocks.core.lock import Lock
from dlocks.exceptions import LockLost
from dlocks.runtime import clock
from dlocks.runtime.coroutines import make_undoable, refuse_in_a_coroutine
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
    refuse_in_a_coroutine("'await aresume_hold(text)'")
    acquisition, data = _acquisition(text, on_lost)
    try:
        return _exchange(acquisition, data)
    except BaseException:
        # If the exchange succeeded, the key must be released.
        acquisition.cancel()
        raise


async def aresume_hold(
    text: str, *, on_lost: Callable[[Hold], object] | None = None
) -> Hold:
    acquisition, data = _acquisition(text, on_lost)
    return await make_undoable(
        partial(_exchange, acquisition, data),
        acquisition.cancel,
        acquisition.cancel_later,
    )


def _acquisition(
    text: str, on_lost: Callable[[Hold], object] | None
) -> tuple[Acquisition, dict[str, Any]]:
    """Return the acquisition of a detached hold, and what its text says."""
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
    # The prefix may depend on the tenant, which may differ in this process.
    key, wakeup = data["claimed"], ThreadWakeup()
    return Acquisition(lock, current_caller(), wakeup, timeout=0.0, key=key), data


def _exchange(acquisition: Acquisition, data: dict[str, Any]) -> Hold:
    """Exchange the claim of the detached hold for one of this process."""
    refuse_nested()
    (attempt,) = acquisition.attempts
    claim = attempt.ensure_claim()
    predecessor = dataclasses.replace(claim, owner=data["owner"])
    exchange = partial(acquisition.backend.exchange, predecessor)
    sent = clock.now()
    grant = ask_for([attempt], exchange, claim)
    if grant is not None:
        return attempt.begin_hold(grant, sent)
    key = acquisition.lock.key
    raise LockLost(
        f"{key!r} (token {data['token']}) cannot be resumed: its lease has"
        " expired or was cleared, or it has already been resumed.",
        key=key,
        token=data["token"],
    )
