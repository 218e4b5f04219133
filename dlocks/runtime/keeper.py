"""The keeper: renews and watches the holds of this process.

One thread keeps the time and sends no requests, so it reports a loss in time, whatever
a server does. Workers (``ServerWorker``), one for each server, send the requests. A
server that does not answer blocks only its own worker.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
import weakref
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dlocks.runtime import clock
from dlocks.runtime.clock import FOREVER
from dlocks.runtime.greenlets import is_alive
from dlocks.runtime.jobs import Workers
from dlocks.runtime.pools import call_privately, leave_pools
from dlocks.runtime.process import at_child_exit, in_child
from dlocks.runtime.threads import (
    BackgroundThread,
    Flag,
    Latch,
    PythonIsExitingError,
    new_mutex,
    this_thread,
)
from dlocks.runtime.waits import waits
from dlocks.runtime.workers import IDLE_CLOSE_AFTER

if TYPE_CHECKING:
    from dlocks.backends.base import Backend

T = TypeVar("T")

logger = logging.getLogger("dlocks")

# Seconds for which a caller in a transaction waits for an answer on another connection,
# after its timeout. Behind a pooler, each waiter may occupy a session that the others
# wait for.
OUTSIDE_TIMEOUT = 5.0

# Seconds after which any other request on another connection fails, if there is no
# answer. A pool of psycopg gives up after the same time.
LONGEST_TIMEOUT = 30.0

# Seconds for which the keeper stays ready after a hold. Further holds then need not
# wake it.
READY = 0.1

# Seconds between two checks whether the callers of a lease have ended. It is lost if
# two of them find none. A thread that is about to end may pass it to another one.
LOOK_EVERY = 0.4


def _is_at_work(hold: Any) -> bool:
    """Return whether another thread still works under a hold."""
    this = threading.current_thread()
    return any(
        caller.get_loop().is_running()
        if hasattr(caller, "get_loop")
        else caller is not this and is_alive(caller)
        for caller in hold.callers
    )


class Keeper:
    """The background service that renews leases and detects lost holds.

    It renews in batches, and sends requests outside of callers' transactions. Its
    thread starts when first needed. ``dlocks.core.callers`` keeps the holds alive.
    """

    def __init__(self) -> None:
        self._reset()
        # Called at the end of the process, before the holds are released.
        self.before_exit: list[Callable[[], None]] = []
        in_child(self._forked)
        atexit.register(self.exit)

    def _reset(self) -> None:
        self._main_thread = threading.main_thread()
        self._mutex = new_mutex()
        # Wakes the thread. Unlike a condition, it also counts before the sleep. A
        # finalizer in that thread may set it.
        self._wakeup = Flag()
        # A plain set, since WeakSet is written in Python.
        self._holds: set[weakref.ref[Any]] = set()
        # Holds that may have no other reference, to be released at the end of a
        # transaction.
        self._left: set[Any] = set()
        self._jobs: deque[Callable[[], None]] = deque()
        self._workers = Workers(self, self._mutex)
        self._thread = BackgroundThread("dlocks-keeper", self._loop)
        # The thread that has begun to work and has not ended.
        self._working_thread: threading.Thread | None = None
        self._wakes_at = FOREVER
        self._has_added = False
        # Whether a warning has said that the thread cannot start.
        self._has_warned = False
        # Whether this is an ending child process, in which only threads at work are
        # left.
        self.is_exiting = False

    @property
    def is_current(self) -> bool:
        """Return whether the current thread belongs to the keeper."""
        return this_thread.is_keepers

    @property
    def holds(self) -> list[Any]:
        """Return the holds that the keeper watches."""
        return [hold for one in list(self._holds) if (hold := one()) is not None]

    def add(self, hold: Any) -> None:
        """Renew and watch a hold until it is removed."""
        with self._mutex:
            self._holds.add(weakref.ref(hold, self._holds.discard))
            self._has_added = True
            # It is due long after it was added, unless its caller may end without a
            # release, so this is rarely necessary.
            thread, entries = self._thread.thread, hold.life.state.entries
            due = min(hold.lease.renew_at, hold.life.state.deadline)
            if entries and entries[0].caller is not self._main_thread:
                due = min(due, hold.lease.granted_at + LOOK_EVERY)
            is_early = (
                thread is None
                or self._working_thread is not thread
                or due < self._wakes_at
            )
        if is_early:
            self._wake()

    def add_left(self, hold: Any) -> None:
        """Refer to a hold that was left in a transaction until it is settled."""
        with self._mutex:
            # Otherwise it has just been removed.
            if not hold.is_over:
                self._left.add(hold)
        self._wake()

    def remove_left(self, hold: Any) -> None:
        """Stop referring to a hold whose caller has entered it again."""
        self._left.discard(hold)

    def remove(self, hold: Any) -> None:
        """Stop watching a hold."""
        with self._mutex:
            self._holds.discard(weakref.ref(hold))
            self._left.discard(hold)
            idle = not self._holds
        # Outside of the mutex. From Python 3.12 on, an interrupt in a comprehension
        # would leave it locked.
        for worker in list(self._workers.by_server.values()) if idle else ():
            if worker.connected:
                worker.notify()

    def check_soon(self) -> None:
        """Check all holds now, because one has changed."""
        self._wake()

    def report_lost(self, owners: Collection[str], why: str) -> None:
        """Mark the holds of these owners as lost, soon and in the keeper's thread."""

        def job() -> None:
            for hold in self.holds:
                if hold.claim.owner in owners:
                    hold.lose(why)

        self._do(job)

    def post(self, function: Callable[[], object], backend: Backend) -> None:
        """Let the worker of a backend call a function. A finalizer may call this.

        When Python ends, no thread runs any more, and leases expire by themselves.
        """
        if sys.is_finalizing():
            return

        self._do(lambda: self._workers.of(backend).post(function))

    def _do(self, job: Callable[[], None]) -> None:
        """Run a short job in the keeper's thread."""
        with self._mutex:
            self._jobs.append(job)
        self._wake()

    def run(
        self,
        function: Callable[[], T],
        backend: Backend | None = None,
        *,
        timeout: float | None = LONGEST_TIMEOUT,
    ) -> T:
        """Call a function in the worker of a backend. See ``ServerWorker.run``.

        No transaction of the caller is open there.
        """
        # A worker has no transaction, and two workers must not wait for each other.
        if self.is_current:
            return function()
        try:
            return self._workers.of(backend).run(function, timeout)
        except PythonIsExitingError:
            if backend is not None and backend.in_transaction():
                raise
            # Neither the worker nor the keeper runs. Only this thread is left.
            return function()

    def later(
        self, function: Callable[[], None], seconds: float, backend: Backend
    ) -> None:
        """Call a function in the worker of a backend after ``seconds``, or at exit.

        Further requests before that are merged.
        """
        due = clock.now() + seconds
        current = self._workers.deferred.get(function)
        if current is not None and current[0] <= due:
            return
        worker = self._workers.of(backend)
        with self._mutex:
            self._workers.deferred[function] = due, worker
            is_early = not self._thread.is_running or due < self._wakes_at
        if is_early:
            self._wake()

    def catch_up(self) -> None:
        """Return when all work that is due now is done. This is for tests."""
        for _ in range(2):
            for _ in range(2):
                # Jobs run before the round, so the second job follows a whole round.
                done = Latch()
                self._do(done.set)
                done.wait()
            for worker in list(self._workers.by_server.values()):
                worker.run(lambda: None)
                while worker.renewals:
                    worker.run(lambda: None)

    def exit(self) -> None:
        """Stop elections, release all holds and do deferred work before the end."""
        for step in self.before_exit:
            self._at_exit(step)
        if _get_running_loop() is None:
            self._end_all()
        else:
            # Django refuses requests in the thread of an event loop.
            self.run(self._end_all, timeout=None)

    def _end_all(self) -> None:
        holds = [
            hold for hold in self.holds if not (self.is_exiting and _is_at_work(hold))
        ]
        # No other thread can start any more, and a pool may be exhausted.
        leave_pools()
        with ExitStack() as reports:
            # Receivers of signals are user code. They must not delay the other
            # releases, and no interrupt hides a loss that nothing else would report.
            for hold in holds:
                report = partial(hold.watch.report_exit, hold)
                reports.callback(self._at_exit, report)
            for hold in holds:
                self._at_exit(partial(hold.watch.end_at_exit, hold))
        for function in list(self._workers.deferred):
            self._at_exit(function)

    def _exit_child(self) -> None:
        # The libraries that call this join threads, or sleep, before the process ends.
        # A lock must not be released under a thread that still works.
        self.is_exiting = True
        self.exit()

    def _at_exit(self, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except Exception:
            # An error in one step must not prevent the others.
            logger.exception("A step of the shutdown failed. Others continue.")
            return None

    def run_at_exit(self, job: Callable[[], object]) -> bool:
        """Let the keeper's thread run a job of a worker that cannot start any more.

        Return whether that thread runs. It then also sends the renewals.
        """
        with self._mutex:
            if self._thread.is_running:
                self._jobs.append(partial(call_privately, job))
                self._wakeup.set()
            return self._thread.is_running

    # The keeper's thread.

    def _wake(self) -> None:
        if self._thread.thread is None:
            # In each process, before it holds a lock. Two threads at once may do so
            # twice, which does no harm.
            at_child_exit(self._exit_child)
        try:
            self._thread.start()
        except PythonIsExitingError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "This process used its first lock when Python was about to exit."
                    " Leases are not renewed, and end after their ttl: %s",
                    error,
                )
        self._wakeup.set()

    def _loop(self) -> None:
        this_thread.is_keepers = True
        this = threading.current_thread()
        try:
            self._check_deadlines(this)
        finally:
            if self._working_thread is this:
                self._working_thread = None

    def _check_deadlines(self, this: threading.Thread) -> None:
        while True:
            with self._mutex:
                if not self._thread.is_current:
                    # Another thread has begun to work first.
                    self._wakeup.set()
                    return
                self._working_thread = this
                # A finalizer may defer a function after ``_next()`` has looked.
                self._wakes_at = FOREVER
                try:
                    self._wakes_at = self._next()
                except Exception:
                    logger.exception("A background job failed. Others continue.")
                    self._wakes_at = clock.now() + IDLE_CLOSE_AFTER
            self._wakeup.wait(self._wakes_at - clock.now())
            with self._mutex:
                # One step. A finalizer in this thread may post a job.
                jobs, self._jobs = self._jobs, deque()
                jobs += self._workers.take_deferred()
                holds = self.holds
            if not self._safely(self._round, jobs, holds):
                time.sleep(IDLE_CLOSE_AFTER)
            # A reference kept during the pause would keep the hold alive.
            del jobs, holds

    def _round(self, jobs: Iterable[Callable[[], None]], holds: Sequence[Any]) -> bool:
        succeeded = [self._safely(job) for job in jobs]
        succeeded += [
            self._safely(self._workers.post_renewal, backend)
            for backend in self._workers.due(holds)
        ]
        succeeded += [self._safely(self._check, hold) for hold in holds]
        return all(succeeded)

    def _safely(self, step: Callable[..., object], *arguments: object) -> bool:
        """Run one step and return whether it succeeded.

        An error is only logged, so that the other work continues.
        """
        try:
            return step(*arguments) is not False
        except BaseException:
            logger.exception("A background job failed. Others continue.")
            return False

    def _next(self) -> float:
        due = min(
            [
                *map(self._due_at, self.holds),
                *(due for due, _ in self._workers.deferred.copy().values()),
            ],
            default=FOREVER,
        )
        if self._has_added:
            # Short holds in succession would wake it each time.
            self._has_added = False
            due = min(due, clock.now() + READY)
        return due

    def _due_at(self, hold: Any) -> float:
        due: float
        reply_by = self._workers.reply_by(hold)
        if reply_by is None or hold.awaits_transactions:
            due = hold.watch.due_at(hold)
        else:
            due = max(hold.lease.deadline, reply_by)
        return due

    def _check(self, hold: Any) -> None:
        if hold.is_over:
            if hold.life.state.reason is not None:
                # The call that ended it was interrupted before it removed it.
                self.remove(hold)
            return
        hold.watch.watch_callers(hold)
        if hold.to_settle or hold.watch.is_orphaned(hold):
            self._workers.post_end(hold)
            return
        hold.watch.report_slow(hold)
        reply_by = self._workers.reply_by(hold)
        if reply_by is None and hold.renewable and hold.lease.renew_at <= clock.now():
            # It is renewable since this round has begun. The next one sends the
            # renewal.
            return
        if reply_by is None or clock.now() >= reply_by:
            hold.watch.check_expiry(hold)

    # Forks.

    def _forked(self) -> None:
        # The child's only thread may have belonged to the keeper of the parent.
        this_thread.is_keepers = False
        for hold in self.holds:
            # A thread of the parent may have held it.
            hold.life.replace_mutex()
        self._reset()


keeper = Keeper()


def shutdown() -> None:
    """End the waits of this process, and release its holds, before it ends.

    This also writes its history and stops its elections. Python does the same at the
    end of a process, of a child of multiprocessing and of a Celery worker, except that
    waits continue. Call it in a process that ends by ``os._exit()`` or by a signal, or
    whose threads wait with ``timeout=None``.

    Each thread and task that waits for a key gets LockShutDown, and so does each that
    would begin to wait. A free key can still be acquired. A fork may wait again.

    A hold with an open block is lost: ``on_lost`` and ``lock_lost`` report it, and the
    block ends with LockLost. A hold without a block is released with a warning. If its
    caller still releases it, that raises LockLost. A hold that an open transaction
    keeps lasts until that transaction ends.
    """
    waits.end_all()
    keeper.exit()
