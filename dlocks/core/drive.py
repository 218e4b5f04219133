"""The drivers of acquisitions: one for threads, and one for event loops.

A driver makes the requests of an acquisition, and waits between them. Unless a grant
ends it, the driver lets the acquisition leave its entries and cancel its claims. So it
earns promise 7 of docs/safety.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from dlocks.core.acquire import Acquisition
from dlocks.core.attempt import DONE
from dlocks.runtime import clock
from dlocks.runtime.coroutines import Undoable, waiting_for_a_lock
from dlocks.runtime.threads import Flag


def drive(acquisition: Acquisition) -> Any:
    """Run an acquisition in this thread, and return its hold."""
    steps: Iterator[Any] = acquisition.steps()
    try:
        try:
            while True:
                request: Any = next(steps, DONE)
                if request is DONE:
                    return acquisition.result
                acquisition.answer = request()
                pause: Any = next(steps, DONE)
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
    steps: Iterator[Any] = acquisition.steps()
    while True:
        request: Any = next(steps, DONE)
        if request is DONE:
            return acquisition.result
        acquisition.answer = await requests.make(request)
        pause: Any = next(steps, DONE)
        if pause is DONE:
            return acquisition.result
        with waiting_for_a_lock():
            await acquisition.wakeup.rest(pause)


class ThreadWakeup:
    """Wakes a waiting thread. Its flag is created when it is first needed."""

    _flag: Flag | None = None

    def arm(self) -> None:
        """Prepare for ``wake()``, before another thread learns of this one."""
        self._flag = self._flag or Flag()

    def wake(self) -> None:
        if self._flag is not None:
            self._flag.set()

    def rest(self, seconds: float | None) -> None:
        self._flag = self._flag or Flag()
        clock.rest(self._flag, seconds)


class TaskWakeup:
    """Wakes a task that waits in its event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def arm(self) -> None:
        """Do nothing."""

    def wake(self) -> None:
        clock.call_in(self._loop, self._event.set)

    async def rest(self, seconds: float | None) -> None:
        await clock.arest(self._event, seconds)
