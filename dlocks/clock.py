"""The clock that local deadlines are counted on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial


def now() -> float:
    """
    Return seconds on a clock that only ever goes forward, for differences.

    Where the system has it, the clock counts the time that the machine was suspended too, so a hold does not
    believe in a lease that ran out while the machine slept.
    """
    return _read()


def stands_still() -> bool:
    """Return whether a test has stopped the clock."""
    return _sleep is not None


def rest(bell: threading.Event, seconds: float | None) -> None:
    """Let so many seconds pass on this clock, or fewer where the bell rings; None is for ever."""
    if _sleep is None or seconds is None:
        bell.wait(seconds)
    elif not bell.is_set():
        _sleep(seconds)
    bell.clear()


async def arest(bell: asyncio.Event, seconds: float | None) -> None:
    if _sleep is None or seconds is None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await bell.wait()
    elif not bell.is_set():
        _sleep(seconds)
        await asyncio.sleep(0)
    bell.clear()


# In C, since it is asked a dozen times for each lock. Windows has one clock for this.
_system: Callable[[], float] = time.monotonic
if hasattr(time, "clock_gettime"):
    _system = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))

# For dlocks.testing.frozen_clock(), which puts its own in their place.
_read: Callable[[], float] = _system
_sleep: Callable[[float], None] | None = None
