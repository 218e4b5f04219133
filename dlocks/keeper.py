"""
The keeper: looks after the holds of this process, in the background.

One thread keeps the time and asks nothing, so that it tells of a loss in time whatever a server does. What there is to
ask is asked at desks, one for each server: a server that gives no answer keeps its own desk waiting, and no other.
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

from dlocks import clock
from dlocks.exceptions import LockBackendError
from dlocks.forks import in_child

if TYPE_CHECKING:
    from dlocks.backends.base import BaseBackend
    from dlocks.holds import Hold

T = TypeVar("T")

# For how many seconds who is in a transaction waits for an answer from outside of it, where his time is over: behind a
# pooler, each of those who wait may have one of the sessions that the others wait for.
OUTSIDE_PATIENCE = 5.0

logger = logging.getLogger("dlocks")

# How long a private connection stays open when nothing needs it: less than a DROP DATABASE waits for it to go.
LINGER = 0.5

# How long the keeper stays ready after a hold: those that come meanwhile need not wake it.
READY = 0.1

# How long after its deadline a hold is not told to be lost, while a renewal of it waits for its answer: a process that
# was stopped for a while may find that the key is still its own.
PATIENCE = 1.0

FOREVER = float("inf")


class Desk:
    """
    Where one server is asked: by one thread, one question after the other, outside of all transactions of callers.

    What Django connects in the thread are private connections. They are closed, and the thread ends, when nothing
    needs them.
    """

    def __init__(self, is_needed: Callable[[Desk], bool]) -> None:
        self._is_needed = is_needed
        # Entered in the condition's place: in C, so that a signal in the middle of it leaves nothing taken.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._thread: threading.Thread | None = None
        self._idle_at = FOREVER
        self.jobs: deque[Callable[[], None]] = deque()
        # What is not to stand behind those, and whether one of these was done last.
        self.renewals: deque[Callable[[], None]] = deque()
        self._renewed = False
        self.connected: list[Any] = []
        # Which backends' holds are being renewed, and since when; and which holds are about to be settled.
        self.renewing: dict[BaseBackend, float] = {}
        self.settling: set[Hold] = set()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def post(self, job: Callable[[], object], *, renewal: bool = False) -> None:
        """Have something done here, soon; a renewal and what others have asked take turns."""

        def safely() -> None:
            try:
                job()
            except BaseException:  # the desk outlives whatever is asked at it
                logger.exception("The keeper of dlocks failed, and goes on")
                time.sleep(LINGER)

        self._queue(safely, self.renewals if renewal else self.jobs)

    def run(self, function: Callable[[], T], patience: float | None = None) -> T:
        """
        Call a function here, and return its result.

        Raise LockBackendError where there is none after so many seconds; the function is called all the same, then.
        """
        if self.is_current:
            return function()
        # In C: an interrupted Event may stay locked, and the desk would wait for it.
        done: SimpleQueue[None] = SimpleQueue()
        results: list[T] = []
        errors: list[BaseException] = []

        def job() -> None:
            try:
                results.append(function())
            except BaseException as error:  # noqa: BLE001 (it is the caller's)
                errors.append(error)
            finally:
                done.put(None)

        self._queue(job, self.jobs)
        try:
            done.get(timeout=patience)
        except Empty:
            raise LockBackendError(
                f"There was no answer in {patience:g} s on a connection outside of the caller's transaction. Have those"
                " who wait in one all the sessions of a pooler?"
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
                # Nobody waits for it any more, and who asks again asks anew.
                jobs.remove(job)
                raise

    def look(self) -> None:
        """See now whether anything here is still needed; a desk without a thread has nothing."""
        with self._mutex:
            self._changed.notify()

    def _wake(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            # Noted before it starts: an interrupt in between must not leave a second one at work beside the next.
            self._thread = threading.Thread(target=self._loop, name="dlocks-desk", daemon=True)
            self._thread.start()
        self._changed.notify()

    def _loop(self) -> None:
        this = threading.current_thread()
        leave_pools()
        self._idle_at = clock.now() + LINGER
        while True:
            with self._mutex:
                if self._thread is not this:
                    # Whoever started this one was interrupted, and another has been started since.
                    self._changed.notify()
                    break
                # A test may have turned the clock back.
                self._idle_at = min(self._idle_at, clock.now() + LINGER)
                pause = self._idle_at - clock.now()
                if not (self.jobs or self.renewals) and pause > 0:
                    self._changed.wait(pause)
                job = self._next()
                if job is None and clock.now() >= self._idle_at and not self._is_needed(self):
                    self._thread = None
                    break
            if job is not None:
                job()
            self.connected = [one.connection for one in connections.all(initialized_only=True) if one.connection]
            if job is not None or self._is_needed(self):
                self._idle_at = clock.now() + LINGER
            # A reference kept over the pause would keep a hold alive.
            job = None
        connections.close_all()
        with self._mutex:
            if self._thread is None:
                self.connected = []

    def _next(self) -> Callable[[], None] | None:
        self._renewed = bool(self.renewals) and not (self._renewed and self.jobs)
        jobs = self.renewals if self._renewed else self.jobs
        return jobs.popleft() if jobs else None


def leave_pools() -> None:
    """
    Have Django connect in this thread past its pool of connections.

    Who waits for a lock, or is in a transaction, has one of the pool's; what he waits for must not need another one.
    """
    for alias in connections:
        settings = connections.settings[alias]
        options = settings.get("OPTIONS") or {}
        # Other drivers have pools of their own.
        if options.get("pool") and settings.get("ENGINE", "").endswith("postgresql"):
            own = {name: value for name, value in options.items() if name != "pool"}
            # Whoever needs one that cannot be had is told why.
            with suppress(Exception):
                # Its own copy: the settings are those of all threads.
                connections[alias].settings_dict = {**settings, "OPTIONS": own}


class Keeper:
    """
    Renews leases in batches, notices what is lost, and speaks to the servers from outside of a transaction.

    Its thread starts when first needed. Holds are referred to weakly: one that nobody has any more ends with its ttl.
    """

    def __init__(self) -> None:
        self._reset()
        self._inherited: list[Any] = []
        in_child(self._forked)
        atexit.register(self.close)

    def _reset(self) -> None:
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        # Their references, rather than a WeakSet, which is written in Python.
        self._kept: set[weakref.ref[Hold]] = set()
        # Those that nobody may have any more, and that are to be given back when a transaction has ended.
        self._left: set[Hold] = set()
        self._jobs: deque[Callable[[], None]] = deque()
        self._chores: dict[Callable[[], None], tuple[float, Desk]] = {}
        self._desks: dict[str, Desk] = {}
        self._thread: threading.Thread | None = None
        # The thread that has begun to look, and has not ended.
        self._at_work: threading.Thread | None = None
        self._wakes_at = FOREVER
        self._has_kept = False

    @property
    def is_current(self) -> bool:
        """Whether this is a thread of the keeper."""
        this = threading.current_thread()
        return this is self._thread or any(desk.is_current for desk in list(self._desks.values()))

    @property
    def holds(self) -> list[Hold]:
        """What it looks after."""
        return [hold for kept in list(self._kept) if (hold := kept()) is not None]

    def keep(self, hold: Hold) -> None:
        """Look after a hold, from now until it is dropped."""
        with self._mutex:
            self._kept.add(weakref.ref(hold, self._kept.discard))
            self._has_kept = True
            # A hold is looked at first long after the last one was added: rarely is there a need to wake up.
            thread = self._thread
            if thread is None or self._at_work is not thread or hold.first_due_at < self._wakes_at:
                self._wake()

    def await_end(self, hold: Hold) -> None:
        """Look after a hold that was left in a transaction, though its caller forgets it: it is still to be settled."""
        with self._mutex:
            # Or else it has been dropped, just now.
            if not hold.is_over:
                self._left.add(hold)
            self._wake()

    def forget_end(self, hold: Hold) -> None:
        """Leave a hold to its caller, who has entered it again."""
        self._left.discard(hold)

    def keeps_for(self, caller: Any) -> bool:
        """Return whether a thread or task holds something."""
        with self._mutex:
            return any(hold.caller is caller for hold in self.holds)

    def drop(self, hold: Hold) -> None:
        """Look after a hold no longer."""
        with self._mutex:
            self._kept.discard(weakref.ref(hold))
            self._left.discard(hold)
            idle = not self._kept
        # Not under the lock: from Python 3.12 on an interrupt in a comprehension there would not let go of it.
        for desk in list(self._desks.values()) if idle else ():
            if desk.connected:
                desk.look()

    def look(self) -> None:
        """Look at all holds now, since the state of one has changed."""
        with self._mutex:
            self._wake()

    def tell_lost(self, owners: Collection[str], why: str) -> None:
        """Tell the holds of these owners, soon and in the keeper's thread, that they are lost."""

        def job() -> None:
            with self._mutex:
                holds = [hold for hold in self.holds if hold.claim.owner in owners]
            for hold in holds:
                hold.lose(why)

        with self._mutex:
            self._jobs.append(job)
            self._wake()

    def run(self, function: Callable[[], T], backend: BaseBackend | None = None, *, patience: float | None = None) -> T:
        """Call a function at the desk of a backend, where no transaction of the caller's is open; see ``Desk.run``."""
        # At a desk there is none, and two desks must not wait for each other.
        return function() if self.is_current else self._desk(backend).run(function, patience)

    def later(self, chore: Callable[[], None], seconds: float, backend: BaseBackend) -> None:
        """Call a function at the desk of a backend after so many seconds, or at exit; asked again before, once."""
        due = clock.now() + seconds
        known = self._chores.get(chore)
        if known is not None and known[0] <= due:
            return
        desk = self._desk(backend)
        with self._mutex:
            self._chores[chore] = due, desk
            if self._thread is None or not self._thread.is_alive() or due < self._wakes_at:
                self._wake()

    def catch_up(self) -> None:
        """Return when all has been done that is due now: for tests, and for those of users."""
        for _ in range(2):
            for _ in range(2):
                # Jobs come before the round, so after the second one a whole round has been.
                done = threading.Event()
                with self._mutex:
                    self._jobs.append(done.set)
                    self._wake()
                done.wait()
            for desk in list(self._desks.values()):
                desk.run(lambda: None)
                while desk.renewals:
                    desk.run(lambda: None)

    def close(self) -> None:
        """Give back all that this process still holds, and do what was put off: at its exit."""
        with self._mutex:
            holds = self.holds
        for hold in holds:
            self._at_exit(hold.end_at_exit)
        with self._mutex:
            chores = list(self._chores)
        for chore in chores:
            self._at_exit(chore)

    def _at_exit(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            # One's trouble is not the others'.
            logger.exception("The keeper of dlocks failed at the end, and goes on")

    # The thread.

    def _desk(self, backend: BaseBackend | None) -> Desk:
        identity = "" if backend is None else backend.identity
        desk = self._desks.get(identity)
        if desk is None:
            with self._mutex:
                desk = self._desks.setdefault(identity, Desk(self._is_needed))
        return desk

    def _is_needed(self, desk: Desk) -> bool:
        """Return whether there will be something to ask at a desk."""
        with self._mutex:
            return any(self._desks.get(hold.backend.identity) is desk for hold in self.holds) or any(
                there is desk for _, there in self._chores.values()
            )

    def _wake(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            # Noted before it starts: an interrupt in between must not leave a second one at work beside the next.
            self._thread = threading.Thread(target=self._loop, name="dlocks-keeper", daemon=True)
            self._thread.start()
        self._changed.notify()

    def _loop(self) -> None:
        this = threading.current_thread()
        try:
            self._look_around(this)
        finally:
            if self._at_work is this:
                self._at_work = None

    def _look_around(self, this: threading.Thread) -> None:
        while True:
            with self._mutex:
                if self._thread is not this:
                    # Whoever started this one was interrupted, and another has been started since.
                    self._changed.notify()
                    return
                self._at_work = this
                try:
                    self._wakes_at = self._next()
                except Exception:
                    logger.exception("The keeper of dlocks failed, and goes on")
                    self._wakes_at = clock.now() + LINGER
                pause = self._wakes_at - clock.now()
                if not self._jobs and pause > 0:
                    self._changed.wait(None if pause == FOREVER else pause)
                jobs = list(self._jobs)
                self._jobs.clear()
                holds = self.holds
                now = clock.now()
                chores = [(chore, desk) for chore, (due, desk) in self._chores.items() if due <= now]
                for chore, desk in chores:
                    self._chores[chore] = FOREVER, desk
            if not self._safely(self._round, jobs, chores, holds):
                time.sleep(LINGER)
            # A reference kept over the pause would keep the hold alive.
            del jobs, holds, chores
            chore = desk = None  # type: ignore[assignment]

    def _round(
        self,
        jobs: Iterable[Callable[[], None]],
        chores: Iterable[tuple[Callable[[], None], Desk]],
        holds: Sequence[Hold],
    ) -> bool:
        done = [self._safely(job) for job in jobs]
        done += [self._safely(self._have_done, *chore) for chore in chores]
        done += [self._safely(self._have_renewed, *renewals) for renewals in self._due(holds)]
        done += [self._safely(self._look_at, hold) for hold in holds]
        return all(done)

    def _safely(self, step: Callable[..., object], *arguments: object) -> bool:
        """Do one thing; the keeper, and all the rest that it has to do, outlive whatever happens."""
        try:
            return step(*arguments) is not False
        except BaseException:
            logger.exception("The keeper of dlocks failed, and goes on")
            return False

    def _next(self) -> float:
        due = min([*map(self._due_at, self.holds), *(due for due, _ in self._chores.values())], default=FOREVER)
        if self._has_kept:
            # Short holds, one after the other, would wake it each time.
            self._has_kept = False
            due = min(due, clock.now() + READY)
        return due

    def _due_at(self, hold: Hold) -> float:
        answer_by = self._answer_by(hold)
        return hold.due_at if answer_by is None or hold.in_transactions else max(hold._deadline, answer_by)

    def _answer_by(self, hold: Hold) -> float | None:
        """Return until when the answer to a renewal of a hold may come, if there is one on its way."""
        desk = self._desks.get(hold.backend.identity)
        asked_at = None if desk is None else desk.renewing.get(hold.backend)
        return asked_at + PATIENCE if asked_at is not None and hold.renewable else None

    def _look_at(self, hold: Hold) -> None:
        if hold.is_over:
            # Whoever ended it was interrupted before it was dropped.
            self.drop(hold)
            return
        if hold.to_settle:
            self._have_settled(hold)
            return
        answer_by = self._answer_by(hold)
        if answer_by is None or clock.now() >= answer_by:
            hold.look()

    def _due(self, holds: Iterable[Hold]) -> list[tuple[BaseBackend, list[Hold]]]:
        """Return the backends of which a lease is to be renewed now, each with its holds."""
        now = clock.now()
        due = {hold.backend for hold in holds if hold.renewable and hold.renew_at <= now}
        return [(backend, [hold for hold in holds if hold.backend is backend]) for backend in due]

    # What is done at the desks.

    def _have_done(self, chore: Callable[[], None], desk: Desk) -> None:
        try:
            desk.post(partial(self._do, chore))
        except BaseException:
            with self._mutex:
                self._chores[chore] = clock.now() + LINGER, desk
            raise

    def _do(self, chore: Callable[[], None]) -> None:
        try:
            chore()
        finally:
            with self._mutex:
                # Until now, so that it is not forgotten at the exit; unless it has been asked for anew.
                if self._chores.get(chore, (0.0, None))[0] == FOREVER:
                    del self._chores[chore]

    def _have_settled(self, hold: Hold) -> None:
        desk = self._desk(hold.backend)
        if hold in desk.settling:
            return
        desk.settling.add(hold)
        try:
            desk.post(partial(self._settle, desk, hold))
        except BaseException:
            desk.settling.discard(hold)
            raise

    def _settle(self, desk: Desk, hold: Hold) -> None:
        try:
            hold.settle(patience=0.0)
        finally:
            desk.settling.discard(hold)

    def _have_renewed(self, backend: BaseBackend, holds: Iterable[Hold]) -> None:
        desk = self._desk(backend)
        if backend in desk.renewing:
            return
        desk.renewing[backend] = clock.now()
        try:
            # A question may take seconds, where others have a row locked; many of them would outlast a lease.
            desk.post(partial(self._renew_all, desk, backend), renewal=True)
        except BaseException:
            del desk.renewing[backend]
            for hold in holds:
                hold.put_off_renewal()
            raise

    def _renew_all(self, desk: Desk, backend: BaseBackend) -> None:
        try:
            with self._mutex:
                holds = [hold for hold in self.holds if hold.backend is backend]
            self._renew(holds)
            for hold in holds:
                # There is an answer; the next renewal may be due already, and is not to be waited for.
                hold.look()
        finally:
            del desk.renewing[backend]
            self.look()

    def _renew(self, holds: Iterable[Hold]) -> None:
        renewable = [hold for hold in holds if hold.renewable]
        now = clock.now()
        for backend in {hold.backend for hold in renewable if hold.renew_at <= now}:
            # All of the backend's, not only those that are due: one statement each time.
            by_owner = {hold.claim.owner: hold for hold in renewable if hold.backend is backend}
            claims = [hold.next_claim() for hold in by_owner.values()]
            sent = clock.now()
            try:
                left = backend.renew(claims)
            except Exception as error:  # noqa: BLE001 (one backend's trouble is not the others')
                # Not lost: unknown, until the deadline of each. The next try connects anew: a server that answers and
                # does not write any more, after a failover say, would be asked for ever.
                logger.warning("Could not renew %d holds: %s", len(claims), error)
                with suppress(Exception):
                    connections.close_all()
                for hold in by_owner.values():
                    hold.put_off_renewal()
                continue
            for owner, hold in by_owner.items():
                if owner in left:
                    hold.note_answer(sent, left[owner])
                else:
                    hold.lose("the backend says it is no longer this hold's")

    # Forks.

    @property
    def _connected(self) -> list[Any]:
        return [connection for desk in list(self._desks.values()) for connection in desk.connected]

    def _forked(self) -> None:
        # The parent's connections: to collect them here could say good-bye to the server in the parent's name.
        self._inherited += self._connected
        self._reset()


keeper = Keeper()
