"""The drivers of acquisitions: one for threads, and one for event loops.

A driver makes the requests of an acquisition, and waits between them. Unless a grant
ends it, the driver lets the acquisition leave its entries and cancel its claims. So it
earns promise 7 of docs/safety.md.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from dlocks.core.acquire import Acquisition
from dlocks.core.attempt import DONE
from dlocks.runtime import clock
from dlocks.runtime.coroutines import run_in_sync_thread, waiting_for_a_lock
from dlocks.runtime.threads import Flag

T = TypeVar("T")


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
    requests = _Requests(acquisition)
    try:
        return await _adrive(acquisition, requests)
    except GeneratorExit:
        # For example, the garbage collector closes a task whose loop was closed.
        # Nothing can be awaited.
        requests.close()
        raise


async def _adrive(acquisition: Acquisition, requests: _Requests) -> Any:
    steps: Iterator[Any] = acquisition.steps()
    try:
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
    except GeneratorExit:
        raise
    except BaseException:
        await requests.make(acquisition.cancel)
        raise


class _Requests:
    """The requests of a coroutine, which may be closed while one is made."""

    def __init__(self, acquisition: Acquisition) -> None:
        self._acquisition = acquisition
        # A finalizer may close the coroutine within a section of its own thread.
        self._mutex = threading.RLock()
        self._is_made = self._is_closed = False

    async def make(self, request: Callable[[], T]) -> T | None:
        """Make a request in Django's thread, and return the answer."""
        return await run_in_sync_thread(
            partial(self._make, request),
            in_transaction_only=self._acquisition.has_transaction_scope,
        )

    def _make(self, request: Callable[[], T]) -> T | None:
        """Make a request, and cancel the acquisition if the coroutine was closed."""
        with self._mutex:
            self._is_made = True
            is_closed = self._is_closed
        try:
            return None if is_closed else request()
        finally:
            with self._mutex:
                self._is_made = False
                is_closed = self._is_closed
            if is_closed:
                self._acquisition.cancel()

    def close(self) -> None:
        """Cancel the acquisition after the request, or in the background."""
        with self._mutex:
            self._is_closed = True
            is_made = self._is_made
        if not is_made:
            self._acquisition.cancel_later()


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
