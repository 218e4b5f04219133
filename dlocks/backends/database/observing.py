"""Detection of dead holders without trusting any wall clock."""

from __future__ import annotations

from collections.abc import Hashable

from dlocks import clock

# Rows that a process remembers. A forgotten row is observed from the start again.
REMEMBERED = 10_000


class Observations:
    """How long each row has been unchanged, by this process's monotonic clock.

    A holder changes its row at each renewal. It trusts its lease for the ttl, counted
    from before it sent the renewal. A row that has not changed for longer therefore has
    no live holder, whatever the database's clock says. This requires clocks that run at
    the same rate, not clocks that show the same time.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._seen: dict[Hashable, tuple[Hashable, float]] = {}

    def note(self, row: Hashable, state: Hashable, asked_at: float) -> float:
        """Record the state of a row, and return the seconds still to observe it.

        ``asked_at`` is the time at which the row was requested. The result is zero or
        negative if the row has been unchanged for long enough.
        """
        known, since = self._seen.get(row, (None, 0.0))
        if known != state:
            if len(self._seen) >= REMEMBERED:
                self._seen.clear()
            # The row may have been written a moment before the reply arrived.
            since = clock.now()
            self._seen[row] = state, since
        return since + self.seconds - asked_at
