"""The drivers of acquisitions: one for threads, and one for event loops.

A driver lets an acquisition make its requests, and waits between them. Unless a grant
ends it, the driver lets the acquisition leave its entries and cancel its claims. So it
earns promise 7 of docs/safety.md.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from dlocks.core.acquire import Acquisition
from dlocks.core.attempt import DONE
from dlocks.runtime import clock
from dlocks.runtime.coroutines import Undoable, waiting_for_a_lock
from dlocks.runtime.threads import Flag


def drive(acquisition: Acquisition) -> Any:
    """Run an acquisition in this thread, and return its hold."""
    try:
        try:
            while True:
                pause = acquisition.advance()
                if pause is DONE:
                    return acquisition.result
                with waiting_for_a_lock():
                    acquisition.wakeup.rest(pause)
        except BaseException:
            acquisition.cancel()
            raise
    except BaseException:
        # Once more, because an interrupt may have hit the first call.
        acquisition.cancel()
        raise


async def adrive(acquisition: Acquisition) -> Any:
    """Run an acquisition in an event loop. Each request is made in Django's thread."""
    requests = Undoable(
        acquisition.cancel,
        acquisition.cancel_later,
        lambda: acquisition.has_transaction_scope,
    )
    return await requests.complete(_adrive(acquisition, requests))


async def _adrive(acquisition: Acquisition, requests: Undoable) -> Any:
    while True:
        pause = await requests.make(acquisition.advance)
        if pause is DONE:
            return acquisition.result
        with waiting_for_a_lock():
            await acquisition.wakeup.rest(pause)


class ThreadWakeup:
    """Wakes a waiting thread."""

    @property
    def _flag(self) -> Flag:
        # Usually there is no wait. Two threads may need the first one at once.
        return cast("Flag", vars(self).setdefault("_made", Flag()))

    def wake(self) -> None:
        self._flag.set()

    def rest(self, seconds: float | None) -> None:
        clock.rest(self._flag, seconds)


class TaskWakeup:
    """Wakes a task that waits in its event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def wake(self) -> None:
        clock.call_in(self._loop, self._event.set)

    async def rest(self, seconds: float | None) -> None:
        await clock.arest(self._event, seconds)
