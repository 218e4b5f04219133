"""Assertions about time that allow for machines that stall."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep  # Tests replace those of the time module.
from typing import TypeVar

T = TypeVar("T")

# Seconds without progress that count as a stall. The first lease of a waiter lasts
# 1.5 s and is renewed after a third of it, so half a second matters.
STALL = 0.5


class TooLateError(AssertionError):
    """Something took longer than promised.

    The cause may be a machine that stalled for a while. The test therefore runs
    again, twice at most (``--only-rerun``), and once more after all others
    (tests/run.py). No other failure is retried, because one violation of a safety
    promise is enough.
    """


class NotYetError(AssertionError):
    """A test waited for a condition that did not become true in time."""


def eventually(
    condition: Callable[[], T],
    seconds: float = 90.0,
    *,
    but: tuple[type[Exception], ...] = (),
    pause: float = 0.005,
) -> T:
    """Wait until a condition is true, and return its value.

    Errors of the types in ``but`` mean that it is not true yet.
    """
    deadline = monotonic() + seconds
    while True:
        with suppress(*but):
            if value := condition():
                return value
        if monotonic() > deadline:
            raise NotYetError(f"The condition was not true within {seconds:g} s.")
        sleep(pause)


def in_time(seconds: float, limit: float) -> None:
    """Fail if a duration is not below the limit. Both are in seconds."""
    if not seconds < limit:
        raise TooLateError(
            f"It took {seconds:.3f} s instead of less than {limit:.3f} s."
        )


def seldom(times: int, limit: int) -> None:
    """Fail if a number of events is not below the limit.

    This is for events that happen as time passes. A machine that stalls causes more
    of them.
    """
    if not times < limit:
        raise TooLateError(
            f"It happened {times} times instead of fewer than {limit} times."
        )


class Witness:
    """A thread that notices when this machine stalls.

    It sleeps for a moment, again and again. If a sleep takes too long, nothing else in
    this process has run either.
    """

    MOMENT = 0.05

    def __init__(self) -> None:
        # The end and the duration of each stall, in seconds.
        self.stops: deque[tuple[float, float]] = deque(maxlen=1000)
        self._began: float | None = None

    def start(self) -> None:
        threading.Thread(target=self._watch, name="witness", daemon=True).start()

    def _watch(self) -> None:
        while True:
            self._began = monotonic()
            sleep(self.MOMENT)
            if (late := self._late()) >= STALL:
                self.stops.append((monotonic(), late))

    def _late(self) -> float:
        return 0.0 if self._began is None else monotonic() - self._began - self.MOMENT

    def longest(self, seconds: float) -> float:
        """Return the longest stall within the last seconds.

        The result is 0 if no stall was long enough to matter.
        """
        since = monotonic() - seconds
        # A stall that has just ended may not be recorded yet.
        now = self._late()
        return max(
            [late for ended, late in list(self.stops) if ended >= since]
            + [now if now >= STALL else 0.0]
        )


witness = Witness()
