"""How a caller waits for a key without a queue: jittered back-off, and a last try exactly at the deadline."""

from __future__ import annotations

import random
from collections.abc import Iterator

from dlocks import clock

FIRST_DELAY = 0.01
LONGEST_DELAY = 0.25


def delays(timeout: float | None) -> Iterator[float]:
    """Yield the seconds to sleep before each further try; the last of them ends at ``timeout`` seconds from now."""
    deadline = None if timeout is None else clock.now() + timeout
    longest = FIRST_DELAY
    while True:
        # Half of it by chance, so that those who failed together do not come back together.
        delay = random.uniform(longest / 2, longest)  # noqa: S311 (jitter)
        longest = min(longest * 2, LONGEST_DELAY)
        if deadline is not None:
            left = deadline - clock.now()
            if left <= 0:
                return
            delay = min(delay, left)
        yield delay
