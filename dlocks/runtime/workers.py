"""The worker of a server: a thread that sends requests outside of transactions."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import TIMEOUT_MAX
from typing import Any, TypeVar, cast

from django.db import connections

from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.clock import FOREVER
from dlocks.runtime.pools import use_private_connections
from dlocks.runtime.threads import (
    BackgroundThread,
    Flag,
    PythonIsExitingError,
    new_mutex,
    this_thread,
)

T = TypeVar("T")

logger = logging.getLogger("dlocks")

# Seconds for which an unneeded private connection stays open. DROP DATABASE waits
# longer than that for it to close.
IDLE_CLOSE_AFTER = 0.5


class ServerWorker:
    """The worker of one server: a thread that runs one job after the other.

    It runs outside of all transactions of callers, on private connections. When nothing
    needs them, they are closed and the thread ends.
    """

    def __init__(
        self,
        is_needed: Callable[[ServerWorker], bool],
        run_elsewhere: Callable[[Callable[[], object]], bool],
    ) -> None:
        self._is_needed = is_needed
        # Runs a job if this thread cannot start any more, or returns False.
        self._run_elsewhere = run_elsewhere
        self._mutex = new_mutex()
        self._wakeup = Flag()
        self._thread = BackgroundThread("dlocks-worker", self._loop)
        self._idle_at = FOREVER
        self.jobs: deque[Callable[[], object]] = deque()
        # Renewals, which do not queue behind the jobs, and whether the last job was
        # one.
        self.renewals: deque[Callable[[], object]] = deque()
        self._renewed = False
        self.connected: list[Any] = []
        # When a job was posted about a backend that renews its holds, or about a hold
        # that is to be ended, until the end of that job.
        self.pending: dict[Any, float] = {}

    @property
    def is_current(self) -> bool:
        return self._thread.is_current

    def post(self, job: Callable[[], object], *, renewal: bool = False) -> None:
        """Queue a job. Renewals and other jobs take turns."""
        jobs = self.renewals if renewal else self.jobs
        try:
            with self._mutex:
                jobs.append(job)
            self._thread.start()
        except PythonIsExitingError:
            # Unless a thread that runs has taken it.
            if self._take_back(jobs, job) and not self._run_elsewhere(job):
                raise
        except BaseException:
            # No caller waits for it any more. A retry queues a new job.
            self._take_back(jobs, job)
            raise
        self._wakeup.set()

    def _take_back(
        self, jobs: deque[Callable[[], object]], job: Callable[[], object]
    ) -> bool:
        with self._mutex:
            if job not in jobs:
                return False
            jobs.remove(job)
            return True

    def run(self, function: Callable[[], T], timeout: float | None = None) -> T:
        """Call a function in the worker's thread, and return its result.

        Raise LockBackendError if there is none after ``timeout`` seconds. The function
        is called even then.
        """
        if self.is_current:
            return function()
        # In C. An interrupted Event may stay locked, and the worker would wait for it.
        answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def job() -> None:
            try:
                answers.put((function(), None))
            except BaseException as error:  # noqa: BLE001 (passed to the caller)
                answers.put((None, error))

        self.post(job)
        if timeout is not None:
            timeout = min(timeout, TIMEOUT_MAX)
        try:
            answer, failure = answers.get(timeout=timeout)
        except Empty:
            error = LockBackendError(
                f"There was no answer within {timeout:g} s on a separate connection of"
                " dlocks. The server may not answer, or transactions that wait for"
                " locks may have exhausted its connections."
            )
            error.is_pending = True
            raise error from None
        if failure is not None:
            raise failure
        return cast("T", answer)

    def notify(self) -> None:
        """Make the worker check now whether it is needed, if it has a thread."""
        self._wakeup.set()

    def _loop(self) -> None:
        this_thread.is_keepers = True
        this_thread.send_renewals = self._send_renewals
        use_private_connections()
        self._idle_at = clock.now() + IDLE_CLOSE_AFTER
        while self._safely(self._turn):
            pass
        self._safely(connections.close_all)
        with self._mutex:
            if not self._thread.is_running:
                self.connected = []

    def _safely(self, step: Callable[[], object]) -> object:
        """Run one step, and return its result, or True after an error.

        The worker survives any error. What waits for it must not wait in vain.
        """
        try:
            return step()
        except BaseException:
            logger.exception("A background job failed. Others continue.")
            time.sleep(IDLE_CLOSE_AFTER)
            return True

    def _turn(self) -> bool:
        """Run the next job, and return whether the thread goes on."""
        # A test may have turned the clock back.
        self._idle_at = min(self._idle_at, clock.now() + IDLE_CLOSE_AFTER)
        has_jobs = self.jobs or self.renewals
        self._wakeup.wait(0.0 if has_jobs else self._idle_at - clock.now())
        with self._mutex:
            if not self._thread.is_current:
                # Another thread has begun to work first.
                self._wakeup.set()
                return False
            job = self._next()
            is_idle = job is None and clock.now() >= self._idle_at
            if is_idle and not self._is_needed(self):
                self._thread.end()
                return False
        if is_idle and self.connected:
            # The database may be dropped while a hold is not released.
            connections.close_all()
            use_private_connections()
        if job is not None:
            self._safely(job)
        self.connected = [
            wrapper.connection
            for wrapper in connections.all(initialized_only=True)
            if wrapper.connection
        ]
        if job is not None or self._is_needed(self):
            self._idle_at = clock.now() + IDLE_CLOSE_AFTER
        return True

    def _send_renewals(self) -> None:
        """Run the renewals that are due, within a job that waits for a row."""
        while self.renewals:
            self._safely(self.renewals.popleft())

    def _next(self) -> Callable[[], object] | None:
        self._renewed = bool(self.renewals) and not (self._renewed and self.jobs)
        jobs = self.renewals if self._renewed else self.jobs
        return jobs.popleft() if jobs else None
