"""Leader election: one process of many leads, until it ends, is lost or stops; then the next one does."""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import logging
import os
import queue
import random
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from django.db import connections

from dlocks import clock
from dlocks.backends.base import Holder
from dlocks.conf import DEFAULT_ALIAS
from dlocks.coroutines import in_django_thread, waiting_for_a_lock
from dlocks.exceptions import LockBackendError, LockError, LockLost, StaleToken
from dlocks.greenlets import is_alive
from dlocks.holds import Hold, current_caller
from dlocks.locks import FROM_SETTINGS, Attempt, Lock, check_key, ring_in

logger = logging.getLogger("dlocks")

# How long to wait before campaigning again after on_elected has failed.
PAUSE = 5.0
# How long between two questions to a backend that cannot be asked: twice as long each time.
FIRST_RETRY, LONGEST_RETRY = 0.25, 10.0
# How long the end of the process waits for one that runs in another thread.
EXIT_PATIENCE = 5.0


class LeaderElection:
    """
    Campaigns for the lead among all that run an election of the same name, leads, and campaigns again.

    ``on_elected(hold)`` is called when this process has become the leader. It may do the leader's work, as long as
    ``is_leader`` says so, or begin it and return: the lead is kept until it is lost or ``stop()`` is called. After
    that ``on_deposed(hold)`` is called, once for each ``on_elected`` and however that ended, and then a lead that was
    not lost is given back: the next in line has it at once. The two are never called at the same time. An error in
    ``on_elected`` is logged, and gives the lead back for a while.

    A leader that dies or cannot reach the backend is followed by another after ``ttl`` seconds and the backend's
    grace. By then it has ceased to be the leader by its own ``is_leader``, even if it was stopped meanwhile.
    ``hold.token`` grows with every lead.

    ``run()`` blocks, ``start()`` runs it in a thread, as ``with`` does; ``arun()`` is for an event loop. An election
    runs once: after ``stop()`` it is over. One that runs in a thread is stopped as the process ends, which waits for
    ``on_elected`` and ``on_deposed`` five seconds at most.
    """

    def __init__(
        self,
        name: str,
        *,
        on_elected: Callable[[Hold], Any] | None = None,
        on_deposed: Callable[[Hold], Any] | None = None,
        using: str = DEFAULT_ALIAS,
        ttl: float | None = None,
    ) -> None:
        check_key(name)
        for argument, value in (("on_elected", on_elected), ("on_deposed", on_deposed)):
            if value is not None and not callable(value):
                raise TypeError(f"{argument} must be callable, not {type(value).__name__}")
        self.name = name
        self.on_elected = on_elected
        self.on_deposed = on_deposed
        self._lock = Lock(
            # Not the name itself: whoever leads may well take a lock of that name.
            key=f"leader:{name}",
            using=using,
            timeout=None,
            ttl=FROM_SETTINGS if ttl is None else ttl,
            scope="lease",
            release_at="exit",
            on_lost=self._lost,
        )
        self._hold: Hold | None = None
        self._stopping = False
        # Whether it is about to give the lead back.
        self._deposing = False
        self._pid = 0
        self._mutex = threading.Lock()
        self._ended = threading.Event()
        self._runner: threading.Thread | None = None
        # Whether the thread that it runs in is one of its own.
        self._alone = False
        # Unlike an Event it can be rung from a signal handler whatever it interrupts.
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ring: Callable[[], object] = functools.partial(self._bell.put, None)
        # Those of the threads that wait().
        self._bells_of_work: list[queue.SimpleQueue[None]] = []

    def __repr__(self) -> str:
        return f"<LeaderElection {self.name!r} {'leads' if self.is_leader else 'does not lead'}>"

    # What it is.

    @property
    def key(self) -> str:
        """The key of the lock behind it."""
        return self._lock.key

    @property
    def is_leader(self) -> bool:
        """Whether this process leads for certain, and is to go on. No I/O."""
        hold = self._hold
        return hold is not None and not (self._stopping or self._deposing) and hold.held

    @property
    def token(self) -> int | None:
        """The fencing token of this process's lead, or None when it does not lead."""
        hold = self._hold
        return hold.token if hold is not None and self.is_leader else None

    def leader(self) -> Holder | None:
        """Ask who leads now; None when nobody does."""
        holder = self._lock.holder()
        return None if holder is None or holder.stale else holder

    async def aleader(self) -> Holder | None:
        return await in_django_thread(self.leader)

    # Running it.

    def run(self) -> None:
        """Campaign and lead until ``stop()`` is called; a backend that cannot be asked is asked again and again."""
        self._refuse_coroutines()
        self._begin()
        retries = _retries()
        try:
            while not self._stopping:
                try:
                    self._campaign()
                except LockBackendError as error:
                    self._rest_of(next(retries), error)
                    continue
                retries = _retries()
                if self._hold is not None:
                    self._lead(self._hold)
                    self._see_to_connections()
        finally:
            try:
                self._give_back()
            finally:
                self._ended.set()

    def start(self) -> None:
        """Run in a thread of its own."""
        self._refuse_coroutines()
        thread = threading.Thread(target=self._run_in_thread, name=f"dlocks-{self.key}", daemon=True)
        self._begin(thread)
        self._alone = True
        try:
            thread.start()
        except BaseException:
            self._ended.set()
            raise

    def stop(self, timeout: float | None = None) -> bool:
        """
        Stop, give the lead back, and wait until that is done, for so many seconds at most; return whether it is done.

        From within the election itself, as from a signal handler over ``run()``, it returns without waiting: the
        election ends as soon as ``on_elected`` has returned.
        """
        self._stopping = True
        self._ring()
        self._ring_work()
        if self._runner is None:
            return True
        if self._pid != os.getpid():
            # It runs in the process that this one is a fork of.
            self._hold = None
            return True
        if self._runner is threading.current_thread():
            return self._ended.is_set()
        # Perhaps in Django's one thread, where the election would give the lead back.
        with waiting_for_a_lock():
            return self._ended.wait(timeout)

    def wait(self, seconds: float) -> bool:
        """
        Wait within ``on_elected``, as long as this process leads; return whether it still does.

        Threads of its work may wait too: the end of the lead wakes them all, and a later one is not theirs.
        """
        deadline = clock.now() + seconds
        bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        # Before there is a bell: a lead that ends in between has ended when it is looked at, and is not taken for the
        # next one's.
        hold = self._hold
        self._bells_of_work.append(bell)
        try:
            while self._hold is hold and self.is_leader and (left := deadline - clock.now()) > 0:
                with suppress(queue.Empty):
                    bell.get(timeout=min(left, threading.TIMEOUT_MAX))
            return self._hold is hold and self.is_leader
        finally:
            self._bells_of_work.remove(bell)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    async def arun(self) -> None:
        """
        Campaign and lead until ``stop()`` is called or this task is cancelled.

        ``on_elected`` and ``on_deposed`` may be coroutine functions. The coroutine of the first is cancelled when the
        lead ends before it does.
        """
        self._begin()
        bell = asyncio.Event()
        self._ring = functools.partial(ring_in, asyncio.get_running_loop(), bell)
        retries = _retries()
        try:
            while not self._stopping:
                try:
                    await self._acampaign(bell)
                except LockBackendError as error:
                    logger.warning("Nobody can be elected %r just now: %s", self.name, error)
                    await _arest(bell, next(retries))
                    continue
                retries = _retries()
                if self._hold is not None:
                    await self._alead(self._hold, bell)
        finally:
            try:
                await in_django_thread(self._give_back)
            finally:
                self._ended.set()

    # Inside.

    def _refuse_coroutines(self) -> None:
        for function in (self.on_elected, self.on_deposed):
            if inspect.iscoroutinefunction(function):
                raise TypeError(f"{function!r} is a coroutine function, which nobody would await here: use arun().")

    def _begin(self, runner: threading.Thread | None = None) -> None:
        with self._mutex:
            if self._runner is not None and not (runner is None and self._runner is threading.current_thread()):
                raise RuntimeError(f"The election of {self.name!r} runs already, or is over: make another one.")
            self._runner = runner or threading.current_thread()
            self._pid = os.getpid()
        _begun.add(self)

    def _ring_work(self) -> None:
        """Ring for those in ``wait()``."""
        for bell in list(self._bells_of_work):
            bell.put(None)

    def _run_in_thread(self) -> None:
        try:
            self.run()
        except BaseException:
            logger.exception("The election of %r ended", self.name)
        finally:
            connections.close_all()

    def _see_to_connections(self) -> None:
        """Do between leads what Django does between requests, where nobody else does."""
        for connection in connections.all(initialized_only=True) if self._alone else ():
            connection.close_if_unusable_or_obsolete()

    def end_at_exit(self) -> None:
        """Stop as the process ends, if it runs in another thread: it would campaign again as its lead is given back."""
        runner = self._runner
        if self._pid == os.getpid() and runner is not None and is_alive(runner) and not self._ended.is_set():
            self.stop(EXIT_PATIENCE)

    def _lost(self, hold: Hold) -> None:
        self._ring()
        self._ring_work()

    def _campaign(self) -> None:
        attempt = Attempt(self._lock, current_caller(), self._ring, wait=True)
        try:
            while not self._stopping:
                self._hold = attempt.once()
                if self._hold is not None:
                    return
                self._rest(attempt.pause())
        except BaseException:
            self._hold = None
            attempt.give_up()
            raise
        attempt.give_up()

    def _lead(self, hold: Hold) -> None:
        logger.info("Elected %r: %s, token %d", self.name, hold.claim.holder, hold.token)
        failed = False
        try:
            try:
                if self.on_elected is not None:
                    _refuse_coroutine(self.on_elected(hold))
                while self.is_leader:
                    self._rest(hold.remaining)
            except Exception as error:  # noqa: BLE001 (logged there)
                failed = self._failed(hold, error)
            except SystemExit as error:
                if not self._alone:
                    raise
                # Nothing but this thread would end by it.
                failed = self._failed(hold, error)
            finally:
                self._depose(hold)
        finally:
            self._give_back(failed=failed)
        if failed:
            self._pause(PAUSE)

    def _failed(self, hold: Hold, error: BaseException) -> bool:
        """Log an error of on_elected; return whether it is not how that learned that it leads no more."""
        lost = isinstance(error, LockLost) and error.key == hold.key
        stale = isinstance(error, StaleToken) and error.token == hold.token
        if (lost or stale) and not hold.held:
            return False
        logger.error("on_elected of %r failed, and the lead is given back", self.name, exc_info=error)
        return True

    def _depose(self, hold: Hold) -> None:
        self._deposing = True
        # For those who wait(), whom on_deposed may wait for.
        self._ring_work()
        logger.info("Deposed %r: %s, token %d", self.name, hold.claim.holder, hold.token)
        if self.on_deposed is not None:
            try:
                _refuse_coroutine(self.on_deposed(hold))
            except Exception:
                logger.exception("on_deposed of %r failed", self.name)

    def _give_back(self, *, failed: bool = False) -> None:
        hold, self._hold = self._hold, None
        self._deposing = False
        if hold is not None:
            # That it was lost is known, and a backend that cannot be asked lets the lease run out.
            with suppress(LockError):
                hold.release(failed=failed)

    def _rest(self, seconds: float | None) -> None:
        """Wait for the bell, for so many seconds at most."""
        with suppress(queue.Empty):
            self._bell.get(timeout=None if seconds is None else min(seconds, threading.TIMEOUT_MAX))

    def _rest_of(self, seconds: float, error: LockError) -> None:
        logger.warning("Nobody can be elected %r just now: %s", self.name, error)
        self._pause(seconds)

    def _pause(self, seconds: float) -> None:
        """Wait for so long, unless stopped."""
        deadline = clock.now() + seconds
        while not self._stopping and (left := deadline - clock.now()) > 0:
            self._rest(left)

    # The same for coroutines.

    async def _acampaign(self, bell: asyncio.Event) -> None:
        attempt = Attempt(self._lock, current_caller(), self._ring, wait=True)
        try:
            while not self._stopping:
                self._hold = await in_django_thread(attempt.once)
                if self._hold is not None:
                    return
                await _arest(bell, await in_django_thread(attempt.pause))
        except BaseException:
            self._hold = None
            await in_django_thread(attempt.give_up)
            raise
        await in_django_thread(attempt.give_up)

    async def _alead(self, hold: Hold, bell: asyncio.Event) -> None:
        logger.info("Elected %r: %s, token %d", self.name, hold.claim.holder, hold.token)
        failed = False
        work: asyncio.Future[Any] | None = None
        try:
            if self.on_elected is not None and inspect.isawaitable(begun := self.on_elected(hold)):
                work = asyncio.ensure_future(begun)
                work.add_done_callback(lambda _: bell.set())
            while self.is_leader and (work is None or not work.done() or _returned(work)):
                await _arest(bell, hold.remaining)
            if self.is_leader and work is not None and work.cancelled():
                failed = self._failed(hold, RuntimeError("It was cancelled, and not by the election."))
        except Exception as error:  # noqa: BLE001 (logged there)
            failed = self._failed(hold, error)
        finally:
            await self._adepose(hold, work)
        if work is not None and not work.cancelled() and isinstance(trouble := work.exception(), Exception):
            failed = self._failed(hold, trouble)
        await in_django_thread(functools.partial(self._give_back, failed=failed))
        deadline = clock.now() + PAUSE
        while failed and not self._stopping and (left := deadline - clock.now()) > 0:
            await _arest(bell, left)

    async def _adepose(self, hold: Hold, work: asyncio.Future[Any] | None) -> None:
        self._deposing = True
        # For those of its threads that wait().
        self._ring_work()
        cancelled: asyncio.CancelledError | None = None
        if work is not None:
            work.cancel()
            while not work.done():
                try:
                    await asyncio.wait([work])
                except asyncio.CancelledError as error:
                    # The lead is not over before the work is.
                    cancelled = error
        logger.info("Deposed %r: %s, token %d", self.name, hold.claim.holder, hold.token)
        try:
            if self.on_deposed is not None and inspect.isawaitable(told := self.on_deposed(hold)):
                await told
        except Exception:
            logger.exception("on_deposed of %r failed", self.name)
        if cancelled is not None:
            raise cancelled


def _refuse_coroutine(result: object) -> None:
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError(f"{result!r} was returned, which nobody awaits here: use arun().")


def _returned(work: asyncio.Future[Any]) -> bool:
    return not work.cancelled() and work.exception() is None


async def _arest(bell: asyncio.Event, seconds: float | None) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await bell.wait()
    bell.clear()


def _retries() -> Any:
    """Yield the seconds between two questions to a backend that cannot be asked."""
    longest = FIRST_RETRY
    while True:
        # Half of it by chance, so that those who failed together do not come back together.
        yield random.uniform(longest / 2, longest)  # noqa: S311 (jitter)
        longest = min(longest * 2, LONGEST_RETRY)


# Those that may have to be stopped as the process ends.
_begun: weakref.WeakSet[LeaderElection] = weakref.WeakSet()


def _at_exit() -> None:
    for election in list(_begun):
        election.end_at_exit()


# Before the keeper's, which is registered already.
atexit.register(_at_exit)
