"""Clocks and timers for local deadlines."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from dlocks.runtime.threads import Flag

# The monotonic clock of the machine, which no test stops. The names in this module are
# partial objects because freezegun replaces time.monotonic() and its like wherever they
# are an attribute of a module. time-machine does not touch monotonic clocks.
_monotonic: Callable[[], float] = partial(time.monotonic)

# The same clock, or one that also counts suspensions. It is called a dozen times for
# each lock, so it is written in C. Windows has one clock for this.
real_now: Callable[[], float] = _monotonic
if hasattr(time, "clock_gettime"):
    real_now = partial(
        time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    )

# The time of day, for times that other processes compare with their own clock.
wall_now: Callable[[], float] = partial(time.time)

# A time that never comes.
FOREVER = float("inf")

# Seconds by which the clock of an event loop may differ from the machine's.
LOOP_TOLERANCE = 1.0


def now() -> float:
    """Return seconds on a clock that never goes backward, for differences.

    Where possible, it also counts the time for which the machine was suspended. A hold
    therefore does not trust a lease that expired meanwhile.
    """
    return _read()


def back_off(longest: float) -> None:
    """Sleep for up to ``longest`` seconds, at random, before another attempt."""
    time.sleep(random.uniform(0, longest))  # noqa: S311 (jitter)


def rest(wakeup: Flag, seconds: float | None) -> None:
    """Sleep for ``seconds`` on this clock, or until ``wakeup`` is set.

    None is no limit. ``wakeup`` is cleared at the end.
    """
    if _sleep is None or seconds is None:
        wakeup.wait(seconds)
    elif not wakeup.is_set():
        _sleep(seconds)
    wakeup.clear()


async def arest(wakeup: asyncio.Event, seconds: float | None) -> None:
    if _sleep is None or seconds is None:
        await wait_for(wakeup, seconds)
    elif not wakeup.is_set():
        _sleep(seconds)
        await asyncio.sleep(0)
    wakeup.clear()


# Waiting in a coroutine. freezegun also stops the clock of event loops, and
# asyncio.sleep() would then never return.


class Timer(Protocol):
    def cancel(self) -> object: ...


def call_later(seconds: float, callback: Callable[[], object]) -> Timer:
    """Call a function in the running event loop after ``seconds`` of real time.

    Return an object whose ``cancel()`` cancels the call.
    """
    loop = asyncio.get_running_loop()
    if abs(loop.time() - _monotonic()) < LOOP_TOLERANCE:
        return loop.call_later(seconds, callback)
    timer = threading.Timer(
        min(seconds, threading.TIMEOUT_MAX), call_in, (loop, callback)
    )
    timer.daemon = True
    timer.start()
    return timer


def call_in(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Call a function in an event loop, from any thread.

    Do nothing if the loop is closed.
    """
    # A closed loop has no waiters.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


async def wait_for(event: asyncio.Event, seconds: float | None) -> None:
    """Wait for an event, at most ``seconds`` of real time.

    The event is set when the time has passed.
    """
    timer = None if seconds is None else call_later(seconds, event.set)
    try:
        await event.wait()
    finally:
        if timer is not None:
            timer.cancel()


async def wait_for_any(
    futures: Sequence[asyncio.Future[Any]], seconds: float | None
) -> None:
    """Wait until one of the futures is done, at most ``seconds`` of real time."""
    if seconds is None:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        return
    late: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    timer = call_later(seconds, partial(late.set_result, None))
    try:
        await asyncio.wait([*futures, late], return_when=asyncio.FIRST_COMPLETED)
    finally:
        timer.cancel()


async def asleep(seconds: float) -> None:
    """Sleep for ``seconds`` of real time."""
    await wait_for(asyncio.Event(), seconds)


# dlocks.testing.frozen_clock() replaces these two.
_read: Callable[[], float] = real_now
_sleep: Callable[[float], None] | None = None
