"""Promises about time, and machines that stand still now and then."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep  # Tests put others into their module.
from typing import TypeVar

T = TypeVar("T")

# A first lease from the line is 1.5 s, and is renewed after a third of it: a stop of half a second is felt already.
STOOD_STILL = 0.5


class TooLateError(AssertionError):
    """
    Something took longer than is promised.

    A machine that stood still for a while looks the same, so the test runs again, twice at most (``--only-rerun``). No
    other failure has a second chance: a promise of safety that is broken once is broken.
    """


class NotYetError(AssertionError):
    """What a test waited for did not come to be in time."""


def eventually(
    condition: Callable[[], T], seconds: float = 30.0, *, but: tuple[type[Exception], ...] = (), pause: float = 0.005
) -> T:
    """Wait until something is so, and return what it is; these errors mean: not yet."""
    deadline = monotonic() + seconds
    while True:
        with suppress(*but):
            if value := condition():
                return value
        if monotonic() > deadline:
            raise NotYetError(f"It did not come to be in {seconds:g} s.")
        sleep(pause)


def in_time(seconds: float, limit: float) -> None:
    """Fail if something took so many seconds, and that is not less than the limit."""
    if not seconds < limit:
        raise TooLateError(f"It took {seconds:.3f} s, and less than {limit:.3f} s are promised.")


def seldom(times: int, limit: int) -> None:
    """
    Fail if something happened so many times, and that is not less than the limit.

    For what is done as time goes by, and so more often on a machine that stands still meanwhile.
    """
    if not times < limit:
        raise TooLateError(f"It happened {times} times, and less than {limit} are promised.")


class Witness:
    """
    Notices when this machine stands still.

    A thread sleeps for a moment, over and over: while it slept too long, nothing else here has worked either.
    """

    MOMENT = 0.05

    def __init__(self) -> None:
        # When each ended, and how long it was.
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
        """Return how long it stood still at the longest within so many seconds until now; 0 if that is not felt."""
        since = monotonic() - seconds
        # The one that has just ended may not be noted yet.
        now = self._late()
        return max([late for ended, late in list(self.stops) if ended >= since] + [now if now >= STOOD_STILL else 0.0])


witness = Witness()
