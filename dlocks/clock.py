"""The clock that local deadlines are counted on."""

import time


def now() -> float:
    """
    Return seconds on a clock that only ever goes forward, for differences.

    Where the system has it, the clock counts the time that the machine was suspended too, so a hold does not
    believe in a lease that ran out while the machine slept.
    """
    return time.clock_gettime(_CLOCK)


_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
