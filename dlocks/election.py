"""Leader election: one of many processes leads.

When its lead ends or is lost, or the process stops, the next one is elected.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import logging
import os
import queue
import random
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Self

from django.db import connections

# It reports that the app is not installed, so the app cannot register it.
from dlocks import checks  # noqa: F401
from dlocks.conf import DEFAULT_ALIAS
from dlocks.core.hold import Hold, current_caller
from dlocks.core.lock import FROM_SETTINGS, Attempt, Lock, check_key, wake_in
from dlocks.exceptions import LockBackendError, LockError, LockLost, StaleToken
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


class LeaderElection:
    """An election among all processes that run one of the same name.

    The process campaigns until it leads, and campaigns again after its lead.

    ``on_elected(hold)`` is called when this process has become the leader. It can do
    the leader's work for as long as ``is_leader`` is true, or start that work and
    return. The lead lasts until it is lost or ``stop()`` is called. Then
    ``on_deposed(hold)`` is called, once for each ``on_elected``, however that ended.
    After that, a lead that was not lost is released, and the next process in the queue
    acquires it at once. The two functions are never called at the same time.

    An error in ``on_elected`` is logged and ends the lead. The process campaigns again
    after 5 seconds. This time doubles with each further failure in a row, up to a
    minute. With ``give_up_after=3`` the third failure in a row ends the election:
    ``run()`` and ``arun()`` raise the error, and a thread of ``start()`` logs it. A
    lead that ended well or lasted more than a minute resets the count.

    If a leader dies or cannot reach the backend, another one follows after ``ttl``
    seconds and the backend's grace. By then ``is_leader`` is false in the old leader,
    even if its process was paused meanwhile. ``hold.token`` grows with every lead.

    ``run()`` blocks. ``start()`` and ``with`` run the election in a thread, and
    ``arun()`` runs it in an event loop. An election runs once, and cannot be restarted
    after ``stop()``. An election in a thread is stopped at the end of the process,
    which waits at most five seconds for ``on_elected`` and ``on_deposed``.
    """

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
        # A signal handler can put into a SimpleQueue whatever it interrupts. It cannot
        # safely set an Event.
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ring: Callable[[], object] = partial(self._bell.put, None)
        # One queue for each thread in ``wait()``.
        self._bells_of_work: list[queue.SimpleQueue[None]] = []

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

    # Running and stopping.

    def run(self) -> None:
        """Campaign and lead until ``stop()`` is called.

        If the backend cannot be reached, retry until it can.
        """
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
                self._release()
            finally:
                self._ended.set()

    def start(self) -> None:
        """Run the election in a new thread."""
        self._refuse_coroutines()
        thread = threading.Thread(
            target=self._run_in_thread, name=f"dlocks-{self.key}", daemon=True
        )
        self._begin(thread)
        self._alone = True
        try:
            thread.start()
        except BaseException:
            self._ended.set()
            raise

    def stop(self, timeout: Duration | None = None) -> bool:
        """Stop the election, release the lead, and wait until that is done.

        Wait for ``timeout`` at most, and return whether it is done.

        A call from within the election itself, for example from a signal handler during
        ``run()``, returns without waiting. The election then ends as soon as
        ``on_elected`` has returned.
        """
        self._stopping = True
        self._ring()
        self._ring_work()
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
        self._bells_of_work.append(wakeup)
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
            self._bells_of_work.remove(wakeup)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    async def arun(self) -> None:
        """Campaign and lead until ``stop()`` is called or this task is cancelled.

        ``on_elected`` and ``on_deposed`` may be coroutine functions. The coroutine of
        ``on_elected`` is cancelled if the lead ends first.
        """
        self._begin()
        wakeup = asyncio.Event()
        self._ring = partial(wake_in, asyncio.get_running_loop(), wakeup)
        retries = _retries()
        try:
            while not self._stopping:
                try:
                    await self._acampaign(wakeup)
                except LockBackendError as error:
                    logger.warning(UNREACHABLE, self.name, error)
                    await _arest(wakeup, next(retries))
                    continue
                retries = _retries()
                if self._hold is not None:
                    await self._alead(self._hold, wakeup)
        finally:
            try:
                await run_in_sync_thread(self._release)
            finally:
                self._ended.set()

    # Internals.

    def _refuse_coroutines(self) -> None:
        for function in (self.on_elected, self.on_deposed):
            if inspect.iscoroutinefunction(function):
                raise TypeError(
                    f"{function!r} is a coroutine function, which run() and start() do"
                    " not await. Use arun()."
                )

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

    def _ring_work(self) -> None:
        """Wake the threads in ``wait()``."""
        for wakeup in list(self._bells_of_work):
            wakeup.put(None)

    def _run_in_thread(self) -> None:
        try:
            self.run()
        except BaseException:
            if not self._gives_up:
                logger.exception("The election %r ended with an error", self.name)
        finally:
            connections.close_all()

    def _see_to_connections(self) -> None:
        """Close unusable connections between leads, as Django does between requests.

        This is needed only in a thread of the election's own.
        """
        for connection in connections.all(initialized_only=True) if self._alone else ():
            connection.close_if_unusable_or_obsolete()

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
            attempt.cancel()
            raise
        attempt.cancel()

    def _lead(self, hold: Hold) -> None:
        logger.info(
            "Elected %r: %s, token %d", self.name, hold.claim.holder, hold.token
        )
        failure: BaseException | None = None
        try:
            try:
                if self.on_elected is not None:
                    _refuse_coroutine(self.on_elected(hold))
                while self.is_leader:
                    self._rest(hold.remaining)
            except Exception as error:  # noqa: BLE001 (logged there)
                failure = self._failure(hold, error)
            except SystemExit as error:
                if not self._alone:
                    raise
                # SystemExit would end only this thread, so it counts as a failure.
                failure = self._failure(hold, error)
            finally:
                self._depose(hold)
        finally:
            self._release(failed=failure is not None)
        # Drop the reference to the error, whose traceback refers to this frame.
        pause, failure = self._pause_after(failure), None
        self._pause(pause)

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

    def _depose(self, hold: Hold) -> None:
        self._deposing = True
        # ``on_deposed`` may wait for threads in ``wait()``.
        self._ring_work()
        logger.info(
            "Deposed %r: %s, token %d", self.name, hold.claim.holder, hold.token
        )
        if self.on_deposed is not None:
            try:
                _refuse_coroutine(self.on_deposed(hold))
            except Exception:
                logger.exception("on_deposed of %r failed", self.name)

    def _release(self, *, failed: bool = False) -> None:
        hold, self._hold = self._hold, None
        self._deposing = False
        if hold is not None:
            # The loss of a lead has been reported already. If the backend cannot be
            # reached, the lease expires.
            with suppress(LockError):
                hold.release(failed=failed)

    def _rest(self, seconds: float | None) -> None:
        """Wait until woken, at most ``seconds``."""
        with suppress(queue.Empty):
            self._bell.get(
                timeout=None if seconds is None else min(seconds, threading.TIMEOUT_MAX)
            )

    def _rest_of(self, seconds: float, error: LockError) -> None:
        logger.warning(UNREACHABLE, self.name, error)
        self._pause(seconds)

    def _pause(self, seconds: float) -> None:
        """Wait for ``seconds``, unless the election is stopped."""
        deadline = clock.now() + seconds
        while not self._stopping and (left := deadline - clock.now()) > 0:
            self._rest(left)

    # The same for coroutines.

    async def _acampaign(self, wakeup: asyncio.Event) -> None:
        attempt = Attempt(self._lock, current_caller(), self._ring, wait=True)
        try:
            while not self._stopping:
                self._hold = await run_in_sync_thread(attempt.once)
                if self._hold is not None:
                    return
                await _arest(wakeup, await run_in_sync_thread(attempt.pause))
        except BaseException:
            self._hold = None
            await run_in_sync_thread(attempt.cancel)
            raise
        await run_in_sync_thread(attempt.cancel)

    async def _alead(self, hold: Hold, wakeup: asyncio.Event) -> None:
        logger.info(
            "Elected %r: %s, token %d", self.name, hold.claim.holder, hold.token
        )
        failure: BaseException | None = None
        work: asyncio.Future[Any] | None = None
        try:
            if self.on_elected is not None and inspect.isawaitable(
                begun := self.on_elected(hold)
            ):
                work = asyncio.ensure_future(begun)
                work.add_done_callback(lambda _: wakeup.set())
            while self.is_leader and (
                work is None or not work.done() or _returned(work)
            ):
                await _arest(wakeup, hold.remaining)
            if self.is_leader and work is not None and work.cancelled():
                failure = self._failure(
                    hold, RuntimeError("It was cancelled, but not by the election.")
                )
        except Exception as error:  # noqa: BLE001 (logged there)
            failure = self._failure(hold, error)
        finally:
            await self._adepose(hold, work)
        if (
            work is not None
            and not work.cancelled()
            and isinstance(trouble := work.exception(), Exception)
        ):
            failure = self._failure(hold, trouble)
        await run_in_sync_thread(partial(self._release, failed=failure is not None))
        deadline, failure = clock.now() + self._pause_after(failure), None
        while not self._stopping and (left := deadline - clock.now()) > 0:
            await _arest(wakeup, left)

    async def _adepose(self, hold: Hold, work: asyncio.Future[Any] | None) -> None:
        self._deposing = True
        # ``on_deposed`` may wait for threads in ``wait()``.
        self._ring_work()
        cancelled: asyncio.CancelledError | None = None
        if work is not None:
            work.cancel()
            while not work.done():
                try:
                    await asyncio.wait([work])
                except asyncio.CancelledError as error:
                    # The lead must not end before its work has ended.
                    cancelled = error
        logger.info(
            "Deposed %r: %s, token %d", self.name, hold.claim.holder, hold.token
        )
        try:
            if self.on_deposed is not None and inspect.isawaitable(
                told := self.on_deposed(hold)
            ):
                await told
        except Exception:
            logger.exception("on_deposed of %r failed", self.name)
        if cancelled is not None:
            raise cancelled


def _refuse_coroutine(result: object) -> None:
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError(
            f"{result!r} was returned, which run() and start() do not await. Use"
            " arun()."
        )


def _returned(work: asyncio.Future[Any]) -> bool:
    return not work.cancelled() and work.exception() is None


async def _arest(wakeup: asyncio.Event, seconds: float | None) -> None:
    await clock.wait_for(wakeup, seconds)
    wakeup.clear()


def _retries() -> Any:
    """Yield the seconds between two requests to an unreachable backend."""
    longest = FIRST_RETRY
    while True:
        # Half of the time is random, so that processes that failed together do not
        # retry together.
        yield random.uniform(longest / 2, longest)  # noqa: S311 (jitter)
        longest = min(longest * 2, LONGEST_RETRY)


# The elections that may have to be stopped at the end of the process.
_begun: weakref.WeakSet[LeaderElection] = weakref.WeakSet()


def _at_exit() -> None:
    for election in list(_begun):
        election.end_at_exit()


# atexit calls the last function first, so this one runs before the keeper's. The second
# line covers processes that skip atexit.
atexit.register(_at_exit)
keeper.before_exit.append(_at_exit)
