"""What an election does after its leader's work has failed."""

from __future__ import annotations

import logging

from dlocks.core.hold import Hold
from dlocks.exceptions import LockLost, StaleToken

logger = logging.getLogger("dlocks")

# Seconds before the next campaign after ``on_elected`` has failed. They double with
# each further failure in a row, up to the second value.
PAUSE, LONGEST_PAUSE = 5.0, 60.0


class Failures:
    """The failures of one election in a row."""

    def __init__(self, name: str, give_up_after: int | None) -> None:
        self._name = name
        self._give_up_after = give_up_after
        self._count = 0
        self._last: type[BaseException] | None = None
        # The error that ended the current lead.
        self.error: BaseException | None = None

    @property
    def has_given_up(self) -> bool:
        """Whether the last failure ends the election."""
        return self._give_up_after is not None and self._count >= self._give_up_after

    def add(self, hold: Hold, error: BaseException) -> None:
        """Count and log an error, unless it only reports the loss of the lead."""
        lost = isinstance(error, LockLost) and error.key == hold.key
        stale = isinstance(error, StaleToken) and error.token == hold.token
        if (lost or stale) and not hold.held:
            return
        self._count = 1 if hold.age > LONGEST_PAUSE else self._count + 1
        again = self._count > 1 and self._last is type(error)
        self.error, self._last = error, type(error)
        times = ""
        if again:
            times = f" {self._count} times in a row: {type(error).__name__}: {error}"
        then = f"The next campaign begins in {self._pause():g} s."
        logger.error(
            "on_elected of %r failed%s. %s",
            self._name,
            times,
            "The election ends." if self.has_given_up else then,
            exc_info=None if times else error,
        )

    def end_lead(self) -> float:
        """Return the seconds until the next campaign, or raise the last error."""
        error, self.error = self.error, None
        if error is None:
            self._count = 0
            return 0.0
        if self.has_given_up:
            error.add_note(
                f"The election {self._name!r} ends after {self._count} failures in a"
                " row."
            )
            raise error
        return self._pause()

    def _pause(self) -> float:
        return min(PAUSE * 2.0 ** min(self._count - 1, 30), LONGEST_PAUSE)
