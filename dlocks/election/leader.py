"""Leader election: two loops, one for a thread and one for a task.

Both do the same:

1. Acquire the lock of the election, and wait for it without an end.
2. Call ``on_elected``. Rest until the lead ends: by a loss, ``resign()`` or ``stop()``.
3. Call ``on_deposed``, and release the lock. The next candidate in the queue leads.
4. After a failure, pause. Begin again, unless the election is stopped.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
import weakref
from asyncio import _get_running_loop
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Self

from django.db import close_old_connections, connections

# It reports that the app is not installed, so the app cannot register it.
from dlocks import checks  # noqa: F401
from dlocks.conf import DEFAULT_ALIAS, backends
from dlocks.core.acquire import Acquisition, TaskWakeup, adrive, drive
from dlocks.core.callers import current_caller
from dlocks.core.explain import shut_down_error
from dlocks.core.hold import Hold
from dlocks.core.lock import Lock
from dlocks.core.policy import FROM_SETTINGS, check_key
from dlocks.election.failures import Failures
from dlocks.exceptions import LockBackendError, LockError, LockShutDown
from dlocks.keys import LEADER_PREFIX
from dlocks.runtime import clock
from dlocks.runtime.coroutines import run_in_sync_thread, waiting_for_a_lock
from dlocks.runtime.delays import LONGEST_DELAY, delays
from dlocks.runtime.greenlets import is_alive
from dlocks.runtime.keeper import keeper
from dlocks.runtime.threads import Flag, Latch, new_mutex
from dlocks.runtime.waits import waits
from dlocks.values import Duration, Holder, Waiter, check_count, in_seconds, seconds

logger = logging.getLogger("dlocks")

# Bounds in seconds for the delays between requests to an unreachable backend.
RETRY_DELAYS = 0.25, 10.0

# Seconds after a lead in which other candidates go first, where all of them poll. A
# former leader would otherwise find the key free before their next poll.
HEAD_START = 4 * LONGEST_DELAY

# Seconds for which the end of the process waits for an election in another thread.
EXIT_TIMEOUT = 5.0

UNREACHABLE = "The election %r cannot reach its backend, and retries: %s"
NOT_AWAITED = "which run() and start() do not await. Use arun()."


class RealThreadWakeup(Flag):
    """Wakes a thread, also from a signal handler. It rests for real time."""

    wake, rest = Flag.set, Flag.wait


class RealTaskWakeup(TaskWakeup):
    """Wakes a task, which rests for real time."""

    async def rest(self, seconds: float | None) -> None:
        await clock.wait_for(self._event, seconds)
        self._event.clear()


class Lead:
    """One lead, from its campaign on. It is over at its end, or before that."""

    def __init__(self) -> None:
        # The lock, once it is acquired and until it is released.
        self.hold: Hold | None = None
        # Set when the lead is to end, or is lost.
        self.over = Latch()

    @property
    def stands(self) -> bool:
        hold = self.hold
        return hold is not None and not self.over.is_set() and hold.held


class LeaderElection:
    """An election among all processes that run one of the same name.

    The process campaigns until it leads, and campaigns again after its lead.

    ``on_elected(hold)`` is called when this process has become the leader. It can do
    the leader's work for as long as ``is_leader`` is true, or start that work and
    return. The lead lasts until it is lost, or until ``resign()`` or ``stop()`` is
    called. Then ``on_deposed(hold)`` is called, once for each ``on_elected``, however
    that ended. After that, a lead that was not lost is released, and the next process
    in the queue acquires it at once. The two functions are never called at the same
    time.

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

    _is_stopped = False
    # The thread in which the election runs, and whether that is one of its own.
    _runner: threading.Thread | None = None
    _is_alone = False
    _wakeup: Any = None
    _pid = 0

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
        self._failures = Failures(name, give_up_after)
        self._lock = Lock(
            # The name itself is left to the application: a leader may acquire a lock of
            # that name.
            key=LEADER_PREFIX + name,
            using=using,
            timeout=None,
            ttl=FROM_SETTINGS if ttl is None else in_seconds(ttl),
            scope="lease",
            release_at="exit",
            on_lost=self._lost,
        )
        self._mutex = new_mutex()
        self._ended = Latch()
        # The current lead, or the next one.
        self._current = Lead()

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
        return self._continues(self._current)

    @property
    def token(self) -> int | None:
        """The fencing token of this process's lead, or None if it does not lead."""
        # Read once, since the next lead may begin meanwhile.
        lead = self._current
        hold = lead.hold
        return hold.token if hold is not None and self._continues(lead) else None

    def leader(self) -> Holder | None:
        """Return the current leader, or None. Queries the backend."""
        holder = self._lock.holder()
        if (
            holder is None
            or holder.stale
            or (holder.in_transaction and not holder.token)
        ):
            # No candidate leads by a lock in a transaction.
            return None
        return holder

    async def aleader(self) -> Holder | None:
        return await self._lock._read(self.leader)

    def candidates(self) -> list[Waiter]:
        """Return the candidates, in the order in which they will lead.

        The leader is none of them. Queries the backend. There are none on backends
        without a queue, nor with session locks, where candidates poll.
        """
        return self._lock.waiters()

    async def acandidates(self) -> list[Waiter]:
        return await self._lock._read(self.candidates)

    def run(self) -> None:
        """Campaign and lead until ``stop()`` is called.

        If the backend cannot be reached, retry until it can.
        """
        with self._begun(RealThreadWakeup()):
            self._campaign()

    def start(self) -> None:
        """Run the election in a new thread."""
        thread = threading.Thread(
            target=self._run_in_thread, name=f"dlocks-{self.key}", daemon=True
        )
        with self._begun(RealThreadWakeup(), thread):
            self._is_alone = True
            thread.start()

    async def arun(self) -> None:
        """Campaign and lead until ``stop()`` is called or this task is cancelled.

        ``on_elected`` and ``on_deposed`` may be coroutine functions. The coroutine of
        ``on_elected`` is cancelled if the lead ends first.
        """
        with self._begun(RealTaskWakeup()):
            await self._acampaign()

    def resign(self) -> bool:
        """Let the lead end, and campaign again behind the other candidates.

        This does not wait. The lead ends as after ``stop()``, when ``on_elected`` and
        ``on_deposed`` have returned. Return whether this process led.
        """
        lead = self._current
        led = self._continues(lead)
        if led:
            self._end(lead)
        return led

    def stop(self, timeout: Duration | None = None) -> bool:
        """Stop the election, release the lead, and wait until that is done.

        Wait for ``timeout`` at most, and return whether it is done. A signal handler
        passes 0, because the election may need what the interrupted thread has.

        A call from within the election itself returns without waiting. The election
        then ends as soon as ``on_elected`` has returned.
        """
        limit = None if timeout is None else seconds("timeout", timeout)
        self._is_stopped = True
        if self._runner is None or self._pid != os.getpid():
            # It has not begun, or runs in the process of which this one is a fork.
            return True
        self._end(self._current)
        if self._runner is threading.current_thread():
            return self._ended.is_set()
        # This may be the thread of ``sync_to_async()``, in which the election would
        # release the lead. The mark makes it use another thread.
        with waiting_for_a_lock():
            return self._ended.wait(limit)

    def wait(self, timeout: Duration | None = None) -> bool:
        """Wait within ``on_elected`` while this process leads.

        Wait for ``timeout`` at most, in seconds or as a ``timedelta``. Return whether
        the process still leads. Without a ``timeout``, wait for the end of the lead.

        Threads that ``on_elected`` started may wait too. The end of the lead wakes all
        of them. A thread that is at work then, and waits later, may wait within the
        next lead. ``hold.held`` says whether its own lead stands.
        """
        deadline = clock.FOREVER
        if timeout is not None:
            deadline = clock.now() + in_seconds(timeout)
        lead = self._current
        while True:
            leads = lead.stands
            left = deadline - clock.now()
            if not leads or left <= 0:
                return leads
            lead.over.wait(left)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # What both loops share.

    @contextmanager
    def _begun(
        self, wakeup: Any, runner: threading.Thread | None = None
    ) -> Iterator[None]:
        """Begin the election, which has ended if the block ends with an error."""
        in_task = isinstance(wakeup, RealTaskWakeup)
        for function in (self.on_elected, self.on_deposed):
            if inspect.iscoroutinefunction(function) and not in_task:
                raise TypeError(f"{function!r} is a coroutine function, {NOT_AWAITED}")
        if not waits.may_begin:
            raise shut_down_error(self.key, 0.0)
        try:
            with self._mutex:
                if self._runner is not None:
                    state = (
                        "has ended" if self._ended.is_set() else "is already running"
                    )
                    if self._is_stopped:
                        state = f"was stopped, and {state}"
                    raise RuntimeError(
                        f"The election {self.name!r} {state}. Create a new"
                        " LeaderElection."
                    )
                self._wakeup, self._pid = wakeup, os.getpid()
                self._runner = runner or threading.current_thread()
            begun.add(self)
            yield
        except BaseException:
            if self._wakeup is wakeup:
                # Perhaps an interrupt came before the campaign, or its thread runs.
                self._is_stopped = True
                self._end(self._current)
                self._ended.set()
            raise

    @property
    def _campaign_lock(self) -> Lock:
        # A claim in the queue would occupy a connection for as long.
        return replace(self._lock, fair=False) if self._polls else self._lock

    def _has_stopped(self) -> bool:
        return self._is_stopped

    @property
    def _polls(self) -> bool:
        """Whether candidates poll, because there is no queue that they can join."""
        backend = backends[self._lock.using]
        return backend.waits_in_statement or not backend.supports_queue

    def _end_pause(self) -> float:
        """Return the seconds until the next campaign, or raise the last error."""
        seconds = self._failures.end_lead()
        return max(seconds, HEAD_START) if self._polls else seconds

    def _log(self, what: str, hold: Hold) -> None:
        logger.info(
            "%s %r: %s, token %d", what, self.name, hold.claim.holder, hold.token
        )

    def _continues(self, lead: Lead) -> bool:
        return lead.stands and not self._is_stopped

    def _end(self, lead: Lead) -> None:
        """Let a lead be over. Wake the election, and the threads in ``wait()``."""
        lead.over.set()
        self._wakeup.wake()

    def _lost(self, hold: Hold) -> None:
        if self._current.hold is hold:
            self._end(self._current)

    def _release(self) -> None:
        lead = self._current
        hold = lead.hold
        if hold is not None:
            # The loss of a lead has been reported already. If the backend cannot be
            # reached, the lease expires.
            with suppress(LockError):
                hold.release(failed=self._failures.error is not None)
        # Only now, since a second call completes an interrupted one.
        lead.hold = None

    # The loop of a thread.

    def _run_in_thread(self) -> None:
        try:
            self._campaign()
        except BaseException:
            if not self._failures.has_given_up:
                logger.exception("The election %r ended with an error", self.name)
        finally:
            connections.close_all()

    def _campaign(self) -> None:
        try:
            while True:
                if self._is_stopped:
                    break
                if self._is_alone:
                    close_old_connections()
                self._acquire()
                lead = self._current
                if lead.hold is not None and not self._is_stopped:
                    self._lead(lead, lead.hold)
                self._release()
                self._pause(self._end_pause())
        finally:
            try:
                self._release()
            finally:
                self._ended.set()

    def _acquire(self) -> None:
        """Wait for the lead, unless the election is stopped."""
        self._current = Lead()
        for delay in delays(clock.FOREVER, *RETRY_DELAYS):
            try:
                acquisition = Acquisition(
                    self._campaign_lock,
                    current_caller(),
                    self._wakeup,
                    is_stopped=self._has_stopped,
                )
                # One line, so that an interrupt in between does not lose the hold.
                self._current.hold = drive(acquisition)
                return
            except LockShutDown:
                # The shutdown stops this election, too.
                self._is_stopped = True
                return
            except LockBackendError as error:
                logger.warning(UNREACHABLE, self.name, error)
            self._pause(delay)

    def _lead(self, lead: Lead, hold: Hold) -> None:
        # A lead of any length is normal.
        hold.allow_long()
        self._log("Elected", hold)
        try:
            _call(self.on_elected, hold)
            while True:
                if not self.is_leader:
                    break
                self._wakeup.rest(hold.remaining)
        except (Exception, SystemExit) as error:
            # SystemExit would end only a thread of ``start()``, so it counts there.
            if isinstance(error, SystemExit) and not self._is_alone:
                raise
            self._failures.add(hold, error)
        finally:
            # Before ``on_deposed``, which may wait for threads in ``wait()``.
            lead.over.set()
            self._log("Deposed", hold)
            try:
                _call(self.on_deposed, hold)
            except Exception:
                logger.exception("on_deposed of %r failed", self.name)

    def _pause(self, seconds: float) -> None:
        """Wait for ``seconds``, unless the election is stopped."""
        deadline = clock.now() + seconds
        while not self._is_stopped and (left := deadline - clock.now()) > 0:
            self._wakeup.rest(left)

    # The loop of a task. Requests run in Django's thread.

    async def _acampaign(self) -> None:
        try:
            while True:
                if self._is_stopped:
                    break
                await self._aacquire()
                lead = self._current
                if lead.hold is not None and not self._is_stopped:
                    await self._alead(lead, lead.hold)
                await run_in_sync_thread(self._release)
                await self._apause(self._end_pause())
        finally:
            try:
                if _get_running_loop() is None:
                    # The coroutine is closed, and nothing can be awaited.
                    keeper.post(self._release, backends[self._lock.using])
                else:
                    await run_in_sync_thread(self._release)
            finally:
                self._ended.set()

    async def _aacquire(self) -> None:
        self._current = Lead()
        for delay in delays(clock.FOREVER, *RETRY_DELAYS):
            try:
                acquisition = await self._campaign_lock._abegin(
                    current_caller(), self._wakeup, is_stopped=self._has_stopped
                )
                self._current.hold = await adrive(acquisition)
                return
            except LockShutDown:
                # The shutdown stops this election, too.
                self._is_stopped = True
                return
            except LockBackendError as error:
                logger.warning(UNREACHABLE, self.name, error)
            await self._apause(delay)

    async def _alead(self, lead: Lead, hold: Hold) -> None:
        hold.allow_long()
        self._log("Elected", hold)
        work: asyncio.Future[Any] | None = None
        try:
            if self.on_elected is not None:
                result = self.on_elected(hold)
                if inspect.isawaitable(result):
                    work = asyncio.ensure_future(result)
                    work.add_done_callback(lambda _: self._wakeup.wake())
            while True:
                if not self.is_leader or _error_of(work) is not None:
                    break
                await self._wakeup.rest(hold.remaining)
            if self.is_leader and work is not None and work.cancelled():
                raise RuntimeError("It was cancelled, but not by the election.")
        except Exception as error:  # noqa: BLE001 (it is logged, and ends the lead)
            self._failures.add(hold, error)
        finally:
            # Before ``on_deposed``, which may wait for threads in ``wait()``.
            lead.over.set()
            cancelled = None if work is None else await _end(work)
            self._log("Deposed", hold)
            try:
                if self.on_deposed is not None:
                    result = self.on_deposed(hold)
                    if inspect.isawaitable(result):
                        await result
            except Exception:
                logger.exception("on_deposed of %r failed", self.name)
        if cancelled is not None:
            raise cancelled
        if isinstance(trouble := _error_of(work), Exception):
            self._failures.add(hold, trouble)

    async def _apause(self, seconds: float) -> None:
        deadline = clock.now() + seconds
        while not self._is_stopped and (left := deadline - clock.now()) > 0:
            await self._wakeup.rest(left)


def _call(function: Callable[[Hold], Any] | None, hold: Hold) -> None:
    """Call a function in a thread. Refuse the coroutine that it returns."""
    result = None if function is None else function(hold)
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError(f"{result!r} was returned, {NOT_AWAITED}")


def _error_of(work: asyncio.Future[Any] | None) -> BaseException | None:
    """Return the error with which the work has ended, if it has."""
    if work is None or not work.done():
        return None
    return asyncio.CancelledError() if work.cancelled() else work.exception()


async def _end(work: asyncio.Future[Any]) -> BaseException | None:
    """Cancel work, wait for its end, and return a cancellation meanwhile."""
    cancelled = None
    work.cancel()
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            # The lead must not end before its work has ended.
            cancelled = error
    return cancelled


# The elections that may have to be stopped at the end of the process.
begun: weakref.WeakSet[LeaderElection] = weakref.WeakSet()


def _at_exit() -> None:
    """Stop the elections of other threads at the end of the process.

    Otherwise they would campaign again when the keeper releases their leads. All are
    stopped before the wait for the first one.
    """
    for timeout in (0.0, EXIT_TIMEOUT):
        for election in list(begun):
            if election._runner is not None and is_alive(election._runner):
                election.stop(timeout)


keeper.before_exit.append(_at_exit)
