"""The keeper: renews and watches the holds of this process.

One thread keeps the time and sends no requests, so it reports a loss in time, whatever
a server does. Workers (``ServerWorker``), one for each server, send the requests. A
server that does not answer blocks only its own worker.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import connections

from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.greenlets import is_alive
from dlocks.runtime.pools import leave_pools
from dlocks.runtime.process import at_child_exit, in_child

if TYPE_CHECKING:
    from dlocks.backends.base import Backend
    from dlocks.protocols import KeptHold

T = TypeVar("T")

# Seconds for which a caller in a transaction waits for an answer on another connection,
# after its timeout. Behind a pooler, each waiter may occupy a session that the others
# wait for.
OUTSIDE_TIMEOUT = 5.0

logger = logging.getLogger("dlocks")

# Seconds for which an unneeded private connection stays open. DROP DATABASE waits
# longer than that for it to close.
IDLE_CLOSE_AFTER = 0.5
# Seconds for which the keeper stays ready after a hold. Further holds then need not
# wake it.
READY = 0.1
# Seconds that a renewal may take before its hold is reported as lost, even after the
# deadline. A process that was stopped may find that it still holds the key.
REPLY_TIMEOUT = 1.0

FOREVER = float("inf")

# Maximum lost holds per renewal for which the backend is asked who took the key.
EXPLAINED = 10
# The reason given for all other lost holds.
GONE = "the backend reports that this hold has ended"


class ServerWorker:
    """The worker of one server: a thread that runs one job after the other.

    It runs outside of all transactions of callers, on private connections. When nothing
    needs them, they are closed and the thread ends.
    """

    def __init__(self, is_needed: Callable[[ServerWorker], bool]) -> None:
        self._is_needed = is_needed
        # Entered in place of the condition. It is written in C, so a signal in the
        # middle leaves nothing locked.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._thread: threading.Thread | None = None
        self._idle_at = FOREVER
        self.jobs: deque[Callable[[], None]] = deque()
        # Renewals, which do not queue behind the jobs, and whether the last job was
        # one.
        self.renewals: deque[Callable[[], None]] = deque()
        self._renewed = False
        self.connected: list[Any] = []
        # The backends that are renewing their holds, with the time of the start, and
        # the holds that are about to be settled.
        self.renewing: dict[Backend, float] = {}
        self.settling: set[KeptHold] = set()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def post(self, job: Callable[[], object], *, renewal: bool = False) -> None:
        """Queue a job. Renewals and other jobs take turns."""

        def safely() -> None:
            try:
                job()
            except BaseException:  # the worker survives any error of a job
                logger.exception("A background job failed. Others continue.")
                time.sleep(IDLE_CLOSE_AFTER)

        self._queue(safely, self.renewals if renewal else self.jobs)

    def run(self, function: Callable[[], T], patience: float | None = None) -> T:
        """Call a function in the worker's thread, and return its result.

        Raise LockBackendError if there is none after ``patience`` seconds. The function
        is called even then.
        """
        if self.is_current:
            return function()
        # In C. An interrupted Event may stay locked, and the worker would wait for it.
        done: SimpleQueue[None] = SimpleQueue()
        results: list[T] = []
        errors: list[BaseException] = []

        def job() -> None:
            try:
                results.append(function())
            except BaseException as error:  # noqa: BLE001 (passed to the caller)
                errors.append(error)
            finally:
                done.put(None)

        self._queue(job, self.jobs)
        try:
            done.get(timeout=patience)
        except Empty:
            raise LockBackendError(
                f"No second database connection became available within {patience:g} s"
                " (one is needed because this transaction is still open). The"
                " connection pool may be exhausted by transactions that wait for locks."
            ) from None
        if errors:
            raise errors[0]
        return results[0]

    def _queue(self, job: Callable[[], None], jobs: deque[Callable[[], None]]) -> None:
        with self._mutex:
            jobs.append(job)
            try:
                self._wake()
            except BaseException:
                # No caller waits for it any more. A retry queues a new job.
                jobs.remove(job)
                raise

    def notify(self) -> None:
        """Make the worker check now whether it is needed, if it has a thread."""
        with self._mutex:
            self._changed.notify()

    def _wake(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            # Recorded before its start. An interrupt in between must not leave a second
            # thread running beside the next one.
            self._thread = threading.Thread(
                target=self._loop, name="dlocks-worker", daemon=True
            )
            self._thread.start()
        self._changed.notify()

    def _loop(self) -> None:
        this = threading.current_thread()
        leave_pools()
        self._idle_at = clock.now() + IDLE_CLOSE_AFTER
        while True:
            with self._mutex:
                if self._thread is not this:
                    # Its start was interrupted, and another thread has started since.
                    self._changed.notify()
                    break
                # A test may have turned the clock back.
                self._idle_at = min(self._idle_at, clock.now() + IDLE_CLOSE_AFTER)
                pause = self._idle_at - clock.now()
                if not (self.jobs or self.renewals) and pause > 0:
                    self._changed.wait(pause)
                job = self._next()
                if (
                    job is None
                    and clock.now() >= self._idle_at
                    and not self._is_needed(self)
                ):
                    self._thread = None
                    break
            if job is not None:
                job()
            self.connected = [
                one.connection
                for one in connections.all(initialized_only=True)
                if one.connection
            ]
            if job is not None or self._is_needed(self):
                self._idle_at = clock.now() + IDLE_CLOSE_AFTER
            # A reference kept during the pause would keep a hold alive.
            job = None
        connections.close_all()
        with self._mutex:
            if self._thread is None:
                self.connected = []

    def _next(self) -> Callable[[], None] | None:
        self._renewed = bool(self.renewals) and not (self._renewed and self.jobs)
        jobs = self.renewals if self._renewed else self.jobs
        return jobs.popleft() if jobs else None


def _is_at_work(hold: KeptHold) -> bool:
    """Return whether another thread still works under a hold."""
    caller = hold.caller
    if hasattr(caller, "get_loop"):
        return caller.get_loop().is_running()
    return caller is not threading.current_thread() and is_alive(caller)


class Keeper:
    """The background service that renews leases and detects lost holds.

    It renews in batches, and sends requests outside of callers' transactions. Its
    thread starts when first needed. Its references are weak, so a forgotten hold ends
    with its ttl.
    """

    def __init__(self) -> None:
        self._reset()
        self._inherited: list[Any] = []
        # Called at the end of the process, before the holds are released.
        self.before_exit: list[Callable[[], None]] = []
        in_child(self._forked)
        atexit.register(self.exit)

    def _reset(self) -> None:
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        # A plain set, since WeakSet is written in Python.
        self._kept: set[weakref.ref[KeptHold]] = set()
        # Holds that may have no other reference, to be released at the end of a
        # transaction.
        self._left: set[KeptHold] = set()
        self._jobs: deque[Callable[[], None]] = deque()
        self._chores: dict[Callable[[], None], tuple[float, ServerWorker]] = {}
        self._workers: dict[str, ServerWorker] = {}
        self._thread: threading.Thread | None = None
        # The thread that has begun to work and has not ended.
        self._at_work: threading.Thread | None = None
        self._wakes_at = FOREVER
        self._has_kept = False
        # Whether this is an ending child process, in which only threads at work are
        # left.
        self.is_exiting = False

    @property
    def is_current(self) -> bool:
        """Return whether the current thread belongs to the keeper."""
        this = threading.current_thread()
        return this is self._thread or any(
            worker.is_current for worker in list(self._workers.values())
        )

    @property
    def holds(self) -> list[KeptHold]:
        """Return the holds that the keeper watches."""
        return [hold for kept in list(self._kept) if (hold := kept()) is not None]

    def keep(self, hold: KeptHold) -> None:
        """Renew and watch a hold until it is dropped."""
        with self._mutex:
            self._kept.add(weakref.ref(hold, self._kept.discard))
            self._has_kept = True
            # A hold is due long after it was added, so this is rarely necessary.
            thread = self._thread
            if (
                thread is None
                or self._at_work is not thread
                or hold.first_due_at < self._wakes_at
            ):
                self._wake()

    def await_end(self, hold: KeptHold) -> None:
        """Keep a hold that was left in a transaction until it is settled.

        Its caller may have forgotten it.
        """
        with self._mutex:
            # Otherwise it has just been dropped.
            if not hold.is_over:
                self._left.add(hold)
            self._wake()

    def forget_end(self, hold: KeptHold) -> None:
        """Stop keeping a hold whose caller has entered it again."""
        self._left.discard(hold)

    def keeps_for(self, caller: Any) -> bool:
        """Return whether a thread or task holds any lock."""
        with self._mutex:
            return any(hold.caller is caller for hold in self.holds)

    def drop(self, hold: KeptHold) -> None:
        """Stop watching a hold."""
        with self._mutex:
            self._kept.discard(weakref.ref(hold))
            self._left.discard(hold)
            idle = not self._kept
        # Outside of the mutex. From Python 3.12 on, an interrupt in a comprehension
        # would leave it locked.
        for worker in list(self._workers.values()) if idle else ():
            if worker.connected:
                worker.notify()

    def check_soon(self) -> None:
        """Check all holds now, because one has changed."""
        with self._mutex:
            self._wake()

    def report_lost(self, owners: Collection[str], why: str) -> None:
        """Mark the holds of these owners as lost, soon and in the keeper's thread."""

        def job() -> None:
            with self._mutex:
                holds = [hold for hold in self.holds if hold.claim.owner in owners]
            for hold in holds:
                hold.lose(why)

        with self._mutex:
            self._jobs.append(job)
            self._wake()

    def run(
        self,
        function: Callable[[], T],
        backend: Backend | None = None,
        *,
        patience: float | None = None,
    ) -> T:
        """Call a function in the worker of a backend. See ``Desk.run``.

        No transaction of the caller is open there.
        """
        # A worker has no transaction, and two workers must not wait for each other.
        return (
            function()
            if self.is_current
            else self._worker(backend).run(function, patience)
        )

    def later(
        self, chore: Callable[[], None], seconds: float, backend: Backend
    ) -> None:
        """Call a function in the worker of a backend after ``seconds``, or at exit.

        Further requests before that are merged.
        """
        due = clock.now() + seconds
        known = self._chores.get(chore)
        if known is not None and known[0] <= due:
            return
        worker = self._worker(backend)
        with self._mutex:
            self._chores[chore] = due, worker
            if (
                self._thread is None
                or not self._thread.is_alive()
                or due < self._wakes_at
            ):
                self._wake()

    def catch_up(self) -> None:
        """Return when all work that is due now is done. This is for tests."""
        for _ in range(2):
            for _ in range(2):
                # Jobs run before the round, so the second job follows a whole round.
                done = threading.Event()
                with self._mutex:
                    self._jobs.append(done.set)
                    self._wake()
                done.wait()
            for worker in list(self._workers.values()):
                worker.run(lambda: None)
                while worker.renewals:
                    worker.run(lambda: None)

    def exit(self) -> None:
        """Stop all background work and release all holds, at the end of the process."""
        for step in self.before_exit:
            self._at_exit(step)
        self.close()

    def close(self) -> None:
        """Release all holds and do deferred work, at the end of the process."""
        with self._mutex:
            holds = self.holds
        # No other thread can start any more, and a pool may be exhausted.
        leave_pools()
        for hold in holds:
            if not (self.is_exiting and _is_at_work(hold)):
                self._at_exit(hold.end_at_exit)
        with self._mutex:
            chores = list(self._chores)
        for chore in chores:
            self._at_exit(chore)

    def _exit_child(self) -> None:
        # The libraries that call this join threads, or sleep, before the process ends.
        # A lock must not be released under a thread that still works.
        self.is_exiting = True
        self.exit()

    def _at_exit(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            # An error in one step must not prevent the others.
            logger.exception("A step of the shutdown failed. Others continue.")

    # The keeper's thread.

    def _worker(self, backend: Backend | None) -> ServerWorker:
        identity = "" if backend is None else backend.identity
        worker = self._workers.get(identity)
        if worker is None:
            with self._mutex:
                worker = self._workers.setdefault(
                    identity, ServerWorker(self._is_needed)
                )
        return worker

    def _is_needed(self, worker: ServerWorker) -> bool:
        """Return whether a worker will have further jobs."""
        with self._mutex:
            return any(
                self._workers.get(hold.backend.identity) is worker
                for hold in self.holds
            ) or any(there is worker for _, there in self._chores.values())

    def _wake(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            if self._thread is None:
                # Once in each process, before it holds a lock.
                at_child_exit(self._exit_child)
            # Recorded before its start. An interrupt in between must not leave a second
            # thread running beside the next one.
            self._thread = threading.Thread(
                target=self._loop, name="dlocks-keeper", daemon=True
            )
            self._thread.start()
        self._changed.notify()

    def _loop(self) -> None:
        this = threading.current_thread()
        try:
            self._check_deadlines(this)
        finally:
            if self._at_work is this:
                self._at_work = None

    def _check_deadlines(self, this: threading.Thread) -> None:
        while True:
            with self._mutex:
                if self._thread is not this:
                    # The start of this thread was interrupted, and another one has
                    # started since.
                    self._changed.notify()
                    return
                self._at_work = this
                try:
                    self._wakes_at = self._next()
                except Exception:
                    logger.exception("A background job failed. Others continue.")
                    self._wakes_at = clock.now() + IDLE_CLOSE_AFTER
                pause = self._wakes_at - clock.now()
                if not self._jobs and pause > 0:
                    self._changed.wait(None if pause == FOREVER else pause)
                jobs = list(self._jobs)
                self._jobs.clear()
                holds = self.holds
                now = clock.now()
                chores = [
                    (chore, worker)
                    for chore, (due, worker) in self._chores.items()
                    if due <= now
                ]
                for chore, worker in chores:
                    self._chores[chore] = FOREVER, worker
            if not self._safely(self._round, jobs, chores, holds):
                time.sleep(IDLE_CLOSE_AFTER)
            # A reference kept during the pause would keep the hold alive.
            del jobs, holds, chores
            chore = worker = None  # type: ignore[assignment]

    def _round(
        self,
        jobs: Iterable[Callable[[], None]],
        chores: Iterable[tuple[Callable[[], None], ServerWorker]],
        holds: Sequence[KeptHold],
    ) -> bool:
        done = [self._safely(job) for job in jobs]
        done += [self._safely(self._have_done, *chore) for chore in chores]
        done += [
            self._safely(self._have_renewed, *renewals) for renewals in self._due(holds)
        ]
        done += [self._safely(self._check, hold) for hold in holds]
        return all(done)

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
                *(due for due, _ in self._chores.values()),
            ],
            default=FOREVER,
        )
        if self._has_kept:
            # Short holds in succession would wake it each time.
            self._has_kept = False
            due = min(due, clock.now() + READY)
        return due

    def _due_at(self, hold: KeptHold) -> float:
        answer_by = self._answer_by(hold)
        return (
            hold.due_at
            if answer_by is None or hold.in_transactions
            else max(hold._deadline, answer_by)
        )

    def _answer_by(self, hold: KeptHold) -> float | None:
        """Return until when the reply to a pending renewal may arrive, or None."""
        worker = self._workers.get(hold.backend.identity)
        asked_at = None if worker is None else worker.renewing.get(hold.backend)
        return (
            asked_at + REPLY_TIMEOUT
            if asked_at is not None and hold.renewable
            else None
        )

    def _check(self, hold: KeptHold) -> None:
        if hold.is_over:
            # The call that ended the hold was interrupted before it dropped it.
            self.drop(hold)
            return
        if hold.to_settle:
            self._have_settled(hold)
            return
        answer_by = self._answer_by(hold)
        if answer_by is None or clock.now() >= answer_by:
            hold.check_expiry()

    def _due(self, holds: Iterable[KeptHold]) -> list[tuple[Backend, list[KeptHold]]]:
        """Return the backends with a lease to renew now, each with its holds."""
        now = clock.now()
        due = {
            hold.backend for hold in holds if hold.renewable and hold.renew_at <= now
        }
        return [
            (backend, [hold for hold in holds if hold.backend is backend])
            for backend in due
        ]

    # Jobs of the workers.

    def _have_done(self, chore: Callable[[], None], worker: ServerWorker) -> None:
        try:
            worker.post(partial(self._do, chore))
        except BaseException:
            with self._mutex:
                self._chores[chore] = clock.now() + IDLE_CLOSE_AFTER, worker
            raise

    def _do(self, chore: Callable[[], None]) -> None:
        try:
            chore()
        finally:
            with self._mutex:
                # Kept until now, so that the exit does not miss it, and longer if it
                # was requested again.
                if self._chores.get(chore, (0.0, None))[0] == FOREVER:
                    del self._chores[chore]

    def _have_settled(self, hold: KeptHold) -> None:
        worker = self._worker(hold.backend)
        if hold in worker.settling:
            return
        worker.settling.add(hold)
        try:
            worker.post(partial(self._settle, worker, hold))
        except BaseException:
            worker.settling.discard(hold)
            raise

    def _settle(self, worker: ServerWorker, hold: KeptHold) -> None:
        try:
            hold.settle(patience=0.0)
        finally:
            worker.settling.discard(hold)

    def _have_renewed(self, backend: Backend, holds: Iterable[KeptHold]) -> None:
        worker = self._worker(backend)
        if backend in worker.renewing:
            return
        worker.renewing[backend] = clock.now()
        try:
            # Other jobs may take seconds where a row is locked. A queue of them would
            # outlast a lease.
            worker.post(partial(self._renew_all, worker, backend), renewal=True)
        except BaseException:
            del worker.renewing[backend]
            for hold in holds:
                hold.put_off_renewal()
            raise

    def _renew_all(self, worker: ServerWorker, backend: Backend) -> None:
        try:
            with self._mutex:
                holds = [hold for hold in self.holds if hold.backend is backend]
            self._renew(holds)
            for hold in holds:
                # The reply is here. The next renewal may already be due, and must not
                # be waited for.
                hold.check_expiry()
        finally:
            del worker.renewing[backend]
            self.check_soon()

    def _renew(self, holds: Iterable[KeptHold]) -> None:
        renewable = [hold for hold in holds if hold.renewable]
        now = clock.now()
        for backend in {hold.backend for hold in renewable if hold.renew_at <= now}:
            # All of the backend's holds, not only those that are due. It is one
            # statement.
            by_owner = {
                hold.claim.owner: hold for hold in renewable if hold.backend is backend
            }
            claims = [hold.next_claim() for hold in by_owner.values()]
            sent = clock.now()
            try:
                left = backend.renew(claims)
            except Exception as error:  # noqa: BLE001 (it concerns one backend only)
                # Not lost, but unknown until each deadline. The next try reconnects,
                # since after a failover the old server may answer but never write.
                named = [repr(claim.key) for claim in claims[:EXPLAINED]]
                named += ["…"] * (len(claims) > EXPLAINED)
                logger.warning(
                    "Could not renew the holds on %s: %s", ", ".join(named), error
                )
                with suppress(Exception):
                    connections.close_all()
                for hold in by_owner.values():
                    hold.put_off_renewal()
                continue
            lost = []
            for owner, hold in by_owner.items():
                if owner in left:
                    hold.note_answer(sent, left[owner])
                else:
                    lost.append(hold)
            for number, hold in enumerate(lost):
                # After a long pause there may be many, and other holds wait.
                hold.lose(hold.why_gone() if number < EXPLAINED else GONE)

    # Forks.

    @property
    def _connected(self) -> list[Any]:
        return [
            connection
            for worker in list(self._workers.values())
            for connection in worker.connected
        ]

    def _forked(self) -> None:
        # Keep the parent's connections. Collecting them here could close its sessions
        # on the server.
        self._inherited += self._connected
        self._reset()


keeper = Keeper()


def shutdown() -> None:
    """Release the holds of this process before it ends.

    This also writes its history and stops its elections. It runs at the end of a Python
    process, of a child of multiprocessing and of a Celery worker. Call it in a process
    that ends by ``os._exit()`` or by a signal.
    """
    keeper.exit()
