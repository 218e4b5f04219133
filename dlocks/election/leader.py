"""Leader election: the campaign, which threads and event loops share."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
from contextlib import suppress
from typing import Any, Self

from django.db import close_old_connections, connections

# It reports that the app is not installed, so the app cannot register it.
from dlocks import checks  # noqa: F401
from dlocks.core.acquire import Acquisition
from dlocks.core.callers import current_caller
from dlocks.core.drive import TaskWakeup, adrive, drive
from dlocks.core.hold import Hold
from dlocks.election.state import ElectionState, begun
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.coroutines import run_in_sync_thread
from dlocks.runtime.delays import delays
from dlocks.runtime.threads import Flag

logger = logging.getLogger("dlocks")

# Bounds in seconds for the delays between requests to an unreachable backend.
RETRY_DELAYS = 0.25, 10.0

UNREACHABLE = "The election %r cannot reach its backend, and retries: %s"
NOT_AWAITED = "which run() and start() do not await. Use arun()."


class RealThreadWakeup(Flag):
    """Wakes a thread, also from a signal handler. It rests for real time."""

    wake, rest = Flag.set, Flag.wait

    def arm(self) -> None:
        """Do nothing."""


class RealTaskWakeup(TaskWakeup):
    """Wakes a task, which rests for real time."""

    async def rest(self, seconds: float | None) -> None:
        await clock.wait_for(self._event, seconds)
        self._event.clear()


class LeaderElection(ElectionState):
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

    # Whether the election runs in a thread of its own, or in a task.
    _alone = _in_task = False

    def run(self) -> None:
        """Campaign and lead until ``stop()`` is called.

        If the backend cannot be reached, retry until it can.
        """
        self._begin(RealThreadWakeup())
        # No call returns an awaitable, so the coroutine ends in one step.
        with suppress(StopIteration):
            self._campaign(drive, lambda function: function()).send(None)

    def start(self) -> None:
        """Run the election in a new thread."""
        thread = threading.Thread(
            target=self._run_in_thread, name=f"dlocks-{self.key}", daemon=True
        )
        self._begin(None, thread)
        self._alone = True
        try:
            thread.start()
        except BaseException:
            self._ended.set()
            raise

    async def arun(self) -> None:
        """Campaign and lead until ``stop()`` is called or this task is cancelled.

        ``on_elected`` and ``on_deposed`` may be coroutine functions. The coroutine of
        ``on_elected`` is cancelled if the lead ends first.
        """
        self._begin(RealTaskWakeup())
        await self._campaign(adrive, run_in_sync_thread)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # Internal methods.

    def _begin(self, wakeup: Any, runner: threading.Thread | None = None) -> None:
        in_task = isinstance(wakeup, TaskWakeup)
        for function in (self.on_elected, self.on_deposed):
            if inspect.iscoroutinefunction(function) and not in_task:
                raise TypeError(f"{function!r} is a coroutine function, {NOT_AWAITED}")
        runner = runner or threading.current_thread()
        with self._mutex:
            if self._wakeup is not None or self._runner not in {None, runner}:
                raise RuntimeError(
                    f"The election {self.name!r} is already running, or has ended."
                    " Create a new LeaderElection."
                )
            self._in_task, self._wakeup = in_task, wakeup
            self._pid, self._runner = os.getpid(), runner
        begun.add(self)

    def _run_in_thread(self) -> None:
        try:
            self.run()
        except BaseException:
            if self._backoff is not None:
                logger.exception("The election %r ended with an error", self.name)
        finally:
            connections.close_all()

    # The campaign. In a task, the calls that block return awaitables.

    async def _campaign(self, drive: Any, call: Any) -> None:
        try:
            while True:
                if self._stopping:
                    break
                await self._acquire(drive)
                if self._hold is None or self._stopping:
                    continue
                await self._lead(self._hold)
                await self._result(call(self._release))
                await self._pause(self._end_lead())
                if not self._alone:
                    continue
                close_old_connections()
        finally:
            try:
                await self._result(call(self._release))
            finally:
                self._ended.set()

    async def _result(self, value: Any) -> Any:
        return await value if self._is_awaited(value) else value

    def _is_awaited(self, value: object) -> bool:
        """Return whether to await a value. Refuse a coroutine in a thread."""
        if self._in_task:
            return inspect.isawaitable(value)
        if inspect.iscoroutine(value):
            value.close()
            raise TypeError(f"{value!r} was returned, {NOT_AWAITED}")
        return False

    async def _acquire(self, drive: Any) -> None:
        """Wait for the lead, unless the election is stopped."""
        for delay in delays(clock.FOREVER, *RETRY_DELAYS):
            try:
                acquisition = Acquisition(
                    self._lock,
                    current_caller(),
                    self._wakeup,
                    is_stopped=lambda: self._stopping,
                )
                hold = drive(acquisition)
                # A call in between might raise an interrupt, and lose the hold.
                self._hold = (await hold) if self._in_task else hold
                return
            except LockBackendError as error:
                logger.warning(UNREACHABLE, self.name, error)
            await self._pause(delay)

    async def _lead(self, hold: Hold) -> None:
        # The leader holds the key for as long as it runs.
        hold.has_no_limit()
        facts = self.name, hold.claim.holder, hold.token
        logger.info("Elected %r: %s, token %d", *facts)
        work: asyncio.Future[Any] | None = None
        try:
            if self.on_elected is not None and self._is_awaited(
                begun := self.on_elected(hold)
            ):
                work = asyncio.ensure_future(begun)
                work.add_done_callback(lambda _: self._wakeup.wake())
            while True:
                if not self.is_leader or _error_of(work) is not None:
                    break
                await self._result(self._wakeup.rest(hold.remaining))
            if self.is_leader and work is not None and work.cancelled():
                raise RuntimeError("It was cancelled, but not by the election.")
        except (Exception, SystemExit) as error:
            # SystemExit would end only a thread of ``start()``, so it counts there.
            if isinstance(error, SystemExit) and not self._alone:
                raise
            self._fail(hold, error)
        finally:
            self._deposing = True
            # ``on_deposed`` may wait for threads in ``wait()``.
            self._wake()
            cancelled = None if work is None else await _end(work)
            logger.info("Deposed %r: %s, token %d", *facts)
            try:
                if self.on_deposed is not None:
                    await self._result(self.on_deposed(hold))
            except Exception:
                logger.exception("on_deposed of %r failed", self.name)
        if cancelled is not None:
            raise cancelled
        if isinstance(trouble := _error_of(work), Exception):
            self._fail(hold, trouble)

    async def _pause(self, seconds: float) -> None:
        """Wait for ``seconds``, unless the election is stopped."""
        deadline = clock.now() + seconds
        while not self._stopping and (left := deadline - clock.now()) > 0:
            await self._result(self._wakeup.rest(left))


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
