"""The state of an election: who leads, the failures so far, and its end."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import random
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
from dlocks.values import Duration, Holder, in_seconds

logger = logging.getLogger("dlocks")

# Seconds before the next campaign after ``on_elected`` has failed. They double with
# each further failure in a row, up to the second value.
PAUSE, LONGEST_PAUSE = 5.0, 60.0
# Seconds between two requests to a backend that cannot be reached. They double each
# time, up to the second value.
FIRST_RETRY, LONGEST_RETRY = 0.25, 10.0
UNREACHABLE = "The election %r cannot reach its backend, and retries: %s"

# Seconds for which the end of the process waits for an election in another thread.
EXIT_TIMEOUT = 5.0


class SignalWakeup:
    """Wakes the thread of an election, also from a signal handler.

    A signal handler can put into a SimpleQueue whatever it interrupts. It cannot safely
    set an Event.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()

    def arm(self) -> None:
        """Do nothing."""

    def wake(self) -> None:
        self._queue.put(None)

    def rest(self, seconds: float | None) -> None:
        """Wait until woken, at most ``seconds``."""
        with suppress(queue.Empty):
            self._queue.get(
                timeout=None if seconds is None else min(seconds, threading.TIMEOUT_MAX)
            )


class ElectionState:
    """The state of an election, which is the same in threads and in coroutines."""

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
            if isinstance(give_up_after, bool) or not isinstance(give_up_after, int):
                raise TypeError(
                    "give_up_after must be an int or None, not"
                    f" {type(give_up_after).__name__}"
                )
            if give_up_after < 1:
                raise ValueError(
                    f"give_up_after must be 1 or more, not {give_up_after}"
                )
        for argument, value in (("on_elected", on_elected), ("on_deposed", on_deposed)):
            if value is not None and not callable(value):
                raise TypeError(
                    f"{argument} must be callable, not {type(value).__name__}"
                )
        self.name = name
        self.on_elected = on_elected
        self.on_deposed = on_deposed
        self.give_up_after = give_up_after
        # The number of failures of ``on_elected`` in a row, and the type of the last
        # one.
        self._failures = 0
        self._last_failure: type[BaseException] | None = None
        self._lock = Lock(
            # The name itself is left to the application: a leader may acquire a lock of
            # that name.
            key=f"leader:{name}",
            using=using,
            timeout=None,
            ttl=FROM_SETTINGS if ttl is None else in_seconds(ttl),
            scope="lease",
            release_at="exit",
            on_lost=self._lost,
        )
        self._hold: Hold | None = None
        self._stopping = False
        # Whether the lead is about to be released.
        self._deposing = False
        self._pid = 0
        self._mutex = threading.Lock()
        self._ended = threading.Event()
        self._runner: threading.Thread | None = None
        # Whether ``start()`` created the thread in which the election runs.
        self._alone = False
        self._wakeup: Any = SignalWakeup()
        # One queue for each thread in ``wait()``.
        self._wakeups_of_work: list[queue.SimpleQueue[None]] = []

    def __repr__(self) -> str:
        return (
            f"<LeaderElection {self.name!r}"
            f" {'leads' if self.is_leader else 'does not lead'}>"
        )

    # State.

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

    def _expect_a_long_hold(self) -> None:
        if self._hold is not None:
            # The leader holds the key for as long as it runs.
            self._hold._state.slow_reported = True

    # Waiting and stopping.

    def stop(self, timeout: Duration | None = None) -> bool:
        """Stop the election, release the lead, and wait until that is done.

        Wait for ``timeout`` at most, and return whether it is done.

        A call from within the election itself, for example from a signal handler during
        ``run()``, returns without waiting. The election then ends as soon as
        ``on_elected`` has returned.
        """
        self._stopping = True
        self._wakeup.wake()
        self._wake_work()
        if self._runner is None:
            return True
        if self._pid != os.getpid():
            # This process is a fork of the one in which the election runs.
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
        wakeup: queue.SimpleQueue[None] = queue.SimpleQueue()
        # Read the hold before registering the queue. If the lead ends in between, the
        # loop notices it and does not mistake a later lead for this one.
        hold = self._hold
        self._wakeups_of_work.append(wakeup)
        try:
            while (
                self._hold is hold
                and self.is_leader
                and (left := deadline - clock.now()) > 0
            ):
                with suppress(queue.Empty):
                    wakeup.get(timeout=min(left, threading.TIMEOUT_MAX))
            return self._hold is hold and self.is_leader
        finally:
            self._wakeups_of_work.remove(wakeup)

    def end_at_exit(self) -> None:
        """Stop at the end of the process, if the election runs in another thread.

        Otherwise it would campaign again when the keeper releases its lead.
        """
        runner = self._runner
        if (
            self._pid == os.getpid()
            and runner is not None
            and is_alive(runner)
            and not self._ended.is_set()
        ):
            self.stop(EXIT_TIMEOUT)

    # Internal methods.

    def _begin(self, runner: threading.Thread | None = None) -> None:
        with self._mutex:
            if self._runner is not None and not (
                runner is None and self._runner is threading.current_thread()
            ):
                raise RuntimeError(
                    f"The election {self.name!r} is already running, or has ended."
                    " Create a new LeaderElection."
                )
            self._runner = runner or threading.current_thread()
            self._pid = os.getpid()
        _begun.add(self)

    def _wake_work(self) -> None:
        """Wake the threads in ``wait()``."""
        for wakeup in list(self._wakeups_of_work):
            wakeup.put(None)

    def _lost(self, hold: Hold) -> None:
        self._wakeup.wake()
        self._wake_work()

    def _failure(self, hold: Hold, error: BaseException) -> BaseException | None:
        """Count, log and return an error of ``on_elected``.

        Return None if the error only reports that the lead was lost.
        """
        lost = isinstance(error, LockLost) and error.key == hold.key
        stale = isinstance(error, StaleToken) and error.token == hold.token
        if (lost or stale) and not hold.held:
            return None
        if hold.age > LONGEST_PAUSE:
            self._failures = 0
        self._failures += 1
        is_known = self._failures > 1 and type(error) is self._last_failure
        self._last_failure = type(error)
        then = (
            "The election ends."
            if self._gives_up
            else f"The next campaign begins in {self._backoff:g} s."
        )
        if is_known:
            what = f"{type(error).__name__}: {error}"
            logger.error(
                "on_elected of %r failed %d times in a row: %s. %s",
                self.name,
                self._failures,
                what,
                then,
            )
        else:
            logger.error("on_elected of %r failed. %s", self.name, then, exc_info=error)
        return error

    @property
    def _backoff(self) -> float:
        """Seconds until the next campaign after a failure."""
        return float(min(PAUSE * 2 ** min(self._failures - 1, 30), LONGEST_PAUSE))

    @property
    def _gives_up(self) -> bool:
        return self.give_up_after is not None and self._failures >= self.give_up_after

    def _pause_after(self, failure: BaseException | None) -> float:
        """Return the seconds until the next campaign.

        Raise the error of ``on_elected`` if it ends the election.
        """
        if failure is None:
            self._failures = 0
            return 0.0
        if self._gives_up:
            failure.add_note(
                f"The election {self.name!r} ends after {self._failures} failures in a"
                " row."
            )
            raise failure
        return self._backoff

    def _release(self, *, failed: bool = False) -> None:
        hold, self._hold = self._hold, None
        self._deposing = False
        if hold is not None:
            # The loss of a lead has been reported already. If the backend cannot be
            # reached, the lease expires.
            with suppress(LockError):
                hold.release(failed=failed)


def retry_delays() -> Any:
    """Yield the seconds between two requests to an unreachable backend."""
    longest = FIRST_RETRY
    while True:
        # Half of the time is random, so that processes that failed together do not
        # retry together.
        yield random.uniform(longest / 2, longest)  # noqa: S311 (jitter)
        longest = min(longest * 2, LONGEST_RETRY)


# The elections that may have to be stopped at the end of the process.
_begun: weakref.WeakSet[ElectionState] = weakref.WeakSet()


def _at_exit() -> None:
    for election in list(_begun):
        election.end_at_exit()


# atexit calls the last function first, so this one runs before the keeper's. The second
# line covers processes that skip atexit.
atexit.register(_at_exit)
keeper.before_exit.append(_at_exit)
