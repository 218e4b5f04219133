"""What a process has seen of rows that others hold: how it knows that a holder is gone without trusting any clock."""

from __future__ import annotations

from collections.abc import Hashable

from dlocks import clock

# Rows that a process remembers. One that it forgot is watched anew.
REMEMBERED = 10_000


class Observations:
    """
    Since when each row is as it was seen, by this process's own monotonic clock.

    A holder writes its row anew at each renewal, and trusts in it for its ttl, counted from before it asked for that.
    So a row that has been the same for longer belongs to nobody, whatever the database's clock says. This needs clocks
    that run at the same rate, and no clocks that show the same time.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._seen: dict[Hashable, tuple[Hashable, float]] = {}

    def note(self, row: Hashable, state: Hashable, asked_at: float) -> float:
        """
        Note the state in which a row was found, asked for at that moment; return for how long it has to be watched yet.

        Zero or less: it has been so for long enough.
        """
        known, since = self._seen.get(row, (None, 0.0))
        if known != state:
            if len(self._seen) >= REMEMBERED:
                self._seen.clear()
            # It may have been written a moment before the answer came.
            since = clock.now()
            self._seen[row] = state, since
        return since + self.seconds - asked_at
