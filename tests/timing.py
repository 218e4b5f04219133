"""Assertions about time that allow for machines that stand still."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep  # Tests replace those of the time module.
from typing import TypeVar

T = TypeVar("T")

# Seconds without progress after which the machine stood still. The first lease of a
# waiter lasts 1.5 s and is renewed after a third of it, so half a second matters.
STOOD_STILL = 0.5


class TooLateError(AssertionError):
    """Something took longer than promised.

    A machine that stood still for a while looks the same. The test therefore runs
    again, twice at most (``--only-rerun``). No other failure is retried, because one
    violation of a safety promise is enough.
    """


class NotYetError(AssertionError):
    """A test waited for a condition that did not become true in time."""


def eventually(
    condition: Callable[[], T],
    seconds: float = 30.0,
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
            raise NotYetError(f"It did not come to be in {seconds:g} s.")
        sleep(pause)


def in_time(seconds: float, limit: float) -> None:
    """Fail if a duration is not below the limit. Both are in seconds."""
    if not seconds < limit:
        raise TooLateError(
            f"It took {seconds:.3f} s, and less than {limit:.3f} s are promised."
        )


def seldom(times: int, limit: int) -> None:
    """Fail if a number of events is not below the limit.

    This is for events that happen as time passes. A machine that stands still causes
    more of them.
    """
    if not times < limit:
        raise TooLateError(
            f"It happened {times} times, and less than {limit} are promised."
        )


class Witness:
    """A thread that notices when this machine stands still.

    It sleeps for a moment, again and again. While it sleeps too long, nothing else in
    this process has run either.
    """

    MOMENT = 0.05

    def __init__(self) -> None:
        # The end and the duration of each stop, in seconds.
        self.stops: deque[tuple[float, float]] = deque(maxlen=1000)
        self._began: float | None = None

    def start(self) -> None:
        threading.Thread(target=self._watch, name="witness", daemon=True).start()

    def _watch(self) -> None:
        while True:
            self._began = monotonic()
            sleep(self.MOMENT)
            if (late := self._late()) >= STOOD_STILL:
                self.stops.append((monotonic(), late))

    def _late(self) -> float:
        return 0.0 if self._began is None else monotonic() - self._began - self.MOMENT

    def longest(self, seconds: float) -> float:
        """Return the longest stop within the last seconds.

        The result is 0 if no stop was long enough to matter.
        """
        since = monotonic() - seconds
        # A stop that has just ended may not be recorded yet.
        now = self._late()
        return max(
            [late for ended, late in list(self.stops) if ended >= since]
            + [now if now >= STOOD_STILL else 0.0]
        )


witness = Witness()
