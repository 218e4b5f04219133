"""The drivers of acquisitions: one for threads, and one for event loops.

A driver runs the steps of an acquisition, sleeps between them, and cancels the claim if
it is interrupted. No other code does that.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, TypeVar

from dlocks.runtime import clock
from dlocks.runtime.coroutines import run_in_sync_thread, waiting_for_a_lock
from dlocks.runtime.threads import Flag

T = TypeVar("T")

DONE: Any = object()


class Steps(Protocol):
    """An acquisition. See ``dlocks.core.acquire.Acquisition``."""

    hold: Any
    wakeup: Any

    @property
    def in_transaction(self) -> bool: ...
    def steps(self) -> Iterator[float | None]: ...
    def cancel(self) -> None: ...
    def abandon(self) -> None: ...


def drive(acquisition: Steps, is_stopped: Callable[[], bool] | None = None) -> Any:
    """Run an acquisition in this thread, and return its hold.

    Return None if ``is_stopped()`` becomes true first.
    """
    steps = acquisition.steps()
    try:
        try:
            while True:
                if is_stopped is not None and is_stopped():
                    break
                pause = next(steps, DONE)
                if pause is DONE:
                    return acquisition.hold
                with waiting_for_a_lock():
                    acquisition.wakeup.rest(pause)
        except BaseException:
            acquisition.cancel()
            raise
    except BaseException:
        # Once more, because an interrupt may have hit the first call.
        acquisition.cancel()
        raise
    acquisition.cancel()
    return None


async def adrive(
    acquisition: Steps, is_stopped: Callable[[], bool] | None = None
) -> Any:
    """Run an acquisition in an event loop. Each step runs in Django's sync thread."""
    requests = _Requests(acquisition)
    try:
        return await _adrive(acquisition, requests, is_stopped)
    except GeneratorExit:
        # For example, the garbage collector closes a task whose loop was closed.
        # Nothing can be awaited.
        requests.close()
        raise


async def _adrive(
    acquisition: Steps, requests: _Requests, is_stopped: Callable[[], bool] | None
) -> Any:
    steps = acquisition.steps()
    cancel = partial(requests.make, acquisition.cancel)
    try:
        while True:
            if is_stopped is not None and is_stopped():
                break
            pause = await run_in_sync_thread(
                partial(requests.make, partial(next, steps, DONE)),
                in_transaction_only=acquisition.in_transaction,
            )
            if pause is DONE:
                return acquisition.hold
            with waiting_for_a_lock():
                await acquisition.wakeup.rest(pause)
    except GeneratorExit:
        raise
    except BaseException:
        await run_in_sync_thread(cancel, in_transaction_only=acquisition.in_transaction)
        raise
    await run_in_sync_thread(cancel)
    return None


class _Requests:
    """The requests of a coroutine, which may be closed while one is made."""

    def __init__(self, acquisition: Steps) -> None:
        self._acquisition = acquisition
        # A finalizer may close the coroutine within a section of its own thread.
        self._mutex = threading.RLock()
        self._is_made = self._is_closed = False

    def make(self, request: Callable[[], T]) -> T | None:
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
            self._acquisition.abandon()


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
