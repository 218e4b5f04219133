"""The state of an election: who leads, the failures so far, and its end."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dlocks.conf import DEFAULT_ALIAS
from dlocks.core.hold import Hold
from dlocks.core.lock import Lock
from dlocks.core.policy import FROM_SETTINGS, check_key
from dlocks.exceptions import LockError, LockLost, StaleToken
from dlocks.runtime import clock
from dlocks.runtime.coroutines import run_in_sync_thread, waiting_for_a_lock
from dlocks.runtime.greenlets import is_alive
from dlocks.runtime.keeper import keeper
from dlocks.runtime.threads import Flag, Latch
from dlocks.values import Duration, Holder, check_count, in_seconds

logger = logging.getLogger("dlocks")

# Seconds before the next campaign after ``on_elected`` has failed. They double with
# each further failure in a row, up to the second value.
PAUSE, LONGEST_PAUSE = 5.0, 60.0

# Seconds for which the end of the process waits for an election in another thread.
EXIT_TIMEOUT = 5.0


class ElectionState:
    """An election, apart from its campaign."""

    _hold: Hold | None = None
    _stopping = False
    # Whether the lead is about to be released.
    _deposing = False
    _runner: threading.Thread | None = None
    _wakeup: Any = None
    _pid = 0
    _error: BaseException | None = None
    # Seconds until the next campaign, or None if failures have ended the election.
    _backoff: float | None = 0.0
    # Failures in a row.
    _failures = 0
    _last_failure: type[BaseException] | None = None

    def __init__(
        self,
        name: str,
        *,
        on_elected: Callable[[Hold], Any] | None = None,
        on_deposed: Callable[[Hold], Any] | None = None,
        using: str = DEFAULT_ALIAS,
        ttl: Duration | None = None,
        give_up_after: int | None = None,
    ) -> None:
        check_key(name)
        if give_up_after is not None:
            check_count("give_up_after", give_up_after, "an int or None")
        for argument, value in (("on_elected", on_elected), ("on_deposed", on_deposed)):
            if value is not None and not callable(value):
                raise TypeError(
                    f"{argument} must be callable, not {type(value).__name__}"
                )
        self.name = name
        self.on_elected = on_elected
        self.on_deposed = on_deposed
        self.give_up_after = give_up_after
        self._lock = Lock(
            # The name itself is left to the application: a leader may acquire a lock of
            # that name.
            key=f"leader:{name}",
            using=using,
            timeout=None,
            ttl=FROM_SETTINGS if ttl is None else in_seconds(ttl),
            scope="lease",
            release_at="exit",
            on_lost=self._wake,
        )
        self._mutex = threading.Lock()
        self._ended = Latch()
        # One flag for each thread in ``wait()``.
        self._wakeups_of_work: list[Flag] = []

    def __repr__(self) -> str:
        leads = "leads" if self.is_leader else "does not lead"
        return f"<LeaderElection {self.name!r} {leads}>"

    @property
    def key(self) -> str:
        """Return the key of the lock behind the election."""
        return self._lock.key

    @property
    def is_leader(self) -> bool:
        """Whether this process certainly leads and is to continue. Does no I/O."""
        hold = self._hold
        return hold is not None and not (self._stopping or self._deposing) and hold.held

    @property
    def token(self) -> int | None:
        """The fencing token of this process's lead, or None if it does not lead."""
        hold = self._hold
        return hold.token if hold is not None and self.is_leader else None

    def leader(self) -> Holder | None:
        """Return the current leader, or None. Queries the backend."""
        holder = self._lock.holder()
        return None if holder is None or holder.stale else holder

    async def aleader(self) -> Holder | None:
        return await run_in_sync_thread(self.leader)

    def stop(self, timeout: Duration | None = None) -> bool:
        """Stop the election, release the lead, and wait until that is done.

        Wait for ``timeout`` at most, and return whether it is done.

        A call from within the election itself, for example from a signal handler during
        ``run()``, returns without waiting. The election then ends as soon as
        ``on_elected`` has returned.
        """
        self._stopping = True
        self._wake()
        if self._runner is None or self._pid != os.getpid():
            # It has not begun, or runs in the process of which this one is a fork.
            self._hold = None
            return True
        if self._runner is threading.current_thread():
            return self._ended.is_set()
        # This may be the thread of ``sync_to_async()``, in which the election would
        # release the lead. The mark makes it use another thread.
        with waiting_for_a_lock():
            return self._ended.wait(in_seconds(timeout))

    def wait(self, seconds: Duration) -> bool:
        """Wait within ``on_elected`` while this process leads.

        Wait for ``seconds`` at most, and return whether the process still leads.

        Threads that ``on_elected`` started may wait too. The end of the lead wakes all
        of them, and a later lead does not count as theirs.
        """
        deadline = clock.now() + in_seconds(seconds)
        wakeup = Flag()
        # Read the hold before registering the flag. If the lead ends in between, the
        # loop notices it and does not mistake a later lead for this one.
        hold = self._hold
        self._wakeups_of_work.append(wakeup)
        try:
            while True:
                leads = self._hold is hold and self.is_leader
                left = deadline - clock.now()
                if not leads or left <= 0:
                    break
                wakeup.wait(left)
            return leads
        finally:
            self._wakeups_of_work.remove(wakeup)

    def end_at_exit(self, timeout: float = EXIT_TIMEOUT) -> None:
        """Stop at the end of the process, if the election runs in another thread.

        Otherwise it would campaign again when the keeper releases its lead.
        """
        if self._runner is not None and is_alive(self._runner):
            self.stop(timeout)

    # Internal methods.

    def _wake(self, hold: Hold | None = None) -> None:
        """Wake the election, and the threads in ``wait()``."""
        if self._wakeup is not None:
            self._wakeup.wake()
        for wakeup in list(self._wakeups_of_work):
            wakeup.set()

    def _fail(self, hold: Hold, error: BaseException) -> None:
        """Count and log an error, unless it only reports the loss of the lead."""
        lost = isinstance(error, LockLost) and error.key == hold.key
        stale = isinstance(error, StaleToken) and error.token == hold.token
        if (lost or stale) and not hold.held:
            return
        self._failures = 1 if hold.age > LONGEST_PAUSE else self._failures + 1
        known, kind = self._failures > 1 and self._last_failure, type(error)
        self._error, self._last_failure = error, kind
        times = ""
        if known is kind:
            times = f" {self._failures} times in a row: {kind.__name__}: {error}"
        if self.give_up_after is not None and self._failures >= self.give_up_after:
            self._backoff, then = None, "The election ends."
        else:
            self._backoff = min(PAUSE * 2 ** min(self._failures - 1, 30), LONGEST_PAUSE)
            then = f"The next campaign begins in {self._backoff:g} s."
        logger.error(
            "on_elected of %r failed%s. %s",
            self.name,
            times,
            then,
            exc_info=None if times else error,
        )

    def _end_lead(self) -> float:
        """Return the seconds until the next campaign, or raise the last error."""
        error, self._error = self._error, None
        if error is None:
            self._failures, self._backoff = 0, 0.0
        elif self._backoff is None:
            error.add_note(
                f"The election {self.name!r} ends after {self._failures} failures in a"
                " row."
            )
            raise error
        return self._backoff

    def _release(self) -> None:
        hold, self._hold = self._hold, None
        if hold is not None:
            # The loss of a lead has been reported already. If the backend cannot be
            # reached, the lease expires.
            with suppress(LockError):
                hold.release(failed=self._error is not None)
        self._deposing = False


# The elections that may have to be stopped at the end of the process.
begun: weakref.WeakSet[ElectionState] = weakref.WeakSet()


def _at_exit() -> None:
    # Stop all of them before the wait for the first one.
    for timeout in (0.0, EXIT_TIMEOUT):
        for election in list(begun):
            election.end_at_exit(timeout)


keeper.before_exit.append(_at_exit)
