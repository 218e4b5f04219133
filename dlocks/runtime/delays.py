"""When to retry, and when to poll the queue again."""

from __future__ import annotations

import random
from collections.abc import Iterator

from dlocks.backends.base import HEARTBEAT_TIMEOUT
from dlocks.runtime import clock

# Bounds in seconds for the delays between two tries.
FIRST_DELAY = 0.01
LONGEST_DELAY = 0.25

# Seconds between two heartbeats of a process.
HEARTBEAT_EVERY = HEARTBEAT_TIMEOUT / 4
# Bounds in seconds for the first waiter's polls. It polls after a tenth of the time for
# which it has been first.
SHORTEST_POLL_DELAY = 0.001
LONGEST_POLL_DELAY = 0.05


def delays(deadline: float | None) -> Iterator[float]:
    """Yield the seconds to sleep before each further try.

    The last delay ends at ``deadline``, a time of ``clock.now()``.
    """
    longest = FIRST_DELAY
    while True:
        # Half of it is random, so that callers that failed together do not retry
        # together.
        delay = random.uniform(longest / 2, longest)  # noqa: S311 (jitter)
        longest = min(longest * 2, LONGEST_DELAY)
        if deadline is not None:
            left = deadline - clock.now()
            if left <= 0:
                return
            delay = min(delay, left)
        yield delay


class PollDelays:
    """The delays between two polls of a queue. A nearer turn means shorter ones."""

    def __init__(self) -> None:
        # Claims ahead of the first one of this process, since when, and the seconds per
        # turn.
        self._nearest = 0
        self._moved_at = 0.0
        self._turn: float | None = None

    def pause(self, nearest: int) -> float:
        """Return the seconds until the next poll.

        ``nearest`` claims are ahead of the first one of this process.
        """
        now = clock.now()
        if nearest != self._nearest:
            if nearest < self._nearest:
                # The duration of one turn follows from how far the queue has moved.
                turn = (now - self._moved_at) / (self._nearest - nearest)
                self._turn = turn if self._turn is None else (3 * self._turn + turn) / 4
            self._nearest, self._moved_at = nearest, now
        if nearest == 0:
            return min(
                LONGEST_POLL_DELAY,
                max(SHORTEST_POLL_DELAY, (now - self._moved_at) / 10),
            )
        return min(
            LONGEST_POLL_DELAY * nearest,
            max(
                SHORTEST_POLL_DELAY,
                nearest * (self._turn or LONGEST_POLL_DELAY / 10) / 2,
            ),
        )
