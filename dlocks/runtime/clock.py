"""Clocks and timers for local deadlines."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from dlocks.runtime.threads import Flag

# The monotonic clock of the machine, which no test stops, or one that also counts
# suspensions. It is called a dozen times for each lock, so it is written in C. Windows
# has one clock for this. The names in this module are partial objects because freezegun
# replaces time.monotonic() and its like wherever they are an attribute of a module.
# time-machine does not touch monotonic clocks.
real_now: Callable[[], float] = partial(time.monotonic)
if hasattr(time, "clock_gettime"):
    real_now = partial(
        time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    )

# The time of day, for times that other processes compare with their own clock.
wall_now: Callable[[], float] = partial(time.time)

# A time that never comes.
FOREVER = float("inf")


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


def call_in(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Call a function in an event loop, from any thread.

    Do nothing if the loop is closed.
    """
    # A closed loop has no waiters.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


async def wait_for(event: asyncio.Event, seconds: float | None) -> None:
    """Wait for an event, at most ``seconds``.

    The event is set when the time has passed.
    """
    timer = None
    if seconds is not None:
        timer = asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        await event.wait()
    finally:
        if timer is not None:
            timer.cancel()


async def wait_for_any(
    futures: Sequence[asyncio.Future[Any]], seconds: float | None
) -> None:
    """Wait until one of the futures is done, at most ``seconds``."""
    await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)


async def asleep(seconds: float) -> None:
    """Sleep for ``seconds``."""
    await wait_for(asyncio.Event(), seconds)


# dlocks.testing.frozen_clock() replaces these two.
_read: Callable[[], float] = real_now
_sleep: Callable[[float], None] | None = None
