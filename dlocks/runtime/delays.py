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
# Seconds of frequent polls after a grant that was not notified. They cover holders that
# do not notify.
POLLING_SECONDS = 10.0


def delays(
    deadline: float, first: float = FIRST_DELAY, longest: float = LONGEST_DELAY
) -> Iterator[float]:
    """Yield the seconds to sleep before each further try.

    They double each time, from ``first`` to ``longest``. The last delay ends at
    ``deadline``, a time of ``clock.now()``.
    """
    bound = first
    while (left := deadline - clock.now()) > 0:
        # Half of it is random, so that callers that failed together do not retry
        # together.
        yield min(random.uniform(bound / 2, bound), left)  # noqa: S311 (jitter)
        bound = min(bound * 2, longest)


class PollSchedule:
    """How often to poll the queue for grants that are not notified.

    With a complete notifier there are none, and no polls are needed. With another one,
    the first waiter polls every 50 ms. Without a notifier, and for a while after a
    grant that was not notified, it polls after 1 to 50 ms. A waiter that is not the
    first polls less often.
    """

    def __init__(self) -> None:
        # Whether every grant is notified, or some are.
        self.is_complete = self.is_notified = False
        self._frequent_until = 0.0
        # Claims ahead of the first one of this process, since when, and the seconds per
        # turn.
        self._ahead = 0
        self._moved_at = 0.0
        self._turn: float | None = None

    @property
    def is_frequent(self) -> bool:
        """Return whether to poll as often as possible."""
        return not self.is_notified or clock.now() < self._frequent_until

    @property
    def is_needed(self) -> bool:
        """Return whether grants may come without a notification."""
        return not self.is_complete or self.is_frequent

    @property
    def notified_within(self) -> float:
        """Return the age of a grant in seconds, from which it was not notified."""
        return 0.1 if self.is_complete else 0.005

    def missed(self) -> None:
        """Poll frequently for a while, because a grant was not notified."""
        self._frequent_until = clock.now() + POLLING_SECONDS

    def delay(self, ahead: int) -> float:
        """Return the seconds until the next poll.

        ``ahead`` is the number of claims ahead of the first one of this process.
        """
        now = clock.now()
        if ahead != self._ahead:
            if ahead < self._ahead:
                # The duration of one turn follows from how far the queue has moved.
                turn = (now - self._moved_at) / (self._ahead - ahead)
                self._turn = turn if self._turn is None else (3 * self._turn + turn) / 4
            self._ahead, self._moved_at = ahead, now
        if not self.is_needed:
            return clock.FOREVER
        if not self.is_frequent:
            return LONGEST_POLL_DELAY * max(1, ahead)
        delay = (now - self._moved_at) / 10
        if ahead > 0:
            delay = ahead * (self._turn or LONGEST_POLL_DELAY / 10) / 2
        return min(LONGEST_POLL_DELAY * max(1, ahead), max(SHORTEST_POLL_DELAY, delay))
