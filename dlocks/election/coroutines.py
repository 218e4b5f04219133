"""Elections that run in an event loop."""

from __future__ import annotations

import asyncio
import inspect
import logging
from functools import partial
from typing import Any

from dlocks.core.acquire import Acquisition
from dlocks.core.callers import current_caller
from dlocks.core.drive import TaskWakeup, adrive
from dlocks.core.hold import Hold
from dlocks.election.state import UNREACHABLE, ElectionState, retry_delays
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.coroutines import run_in_sync_thread

logger = logging.getLogger("dlocks")


class _Wakeup(TaskWakeup):
    async def rest(self, seconds: float | None) -> None:
        """Wait until woken, at most ``seconds`` of real time."""
        await clock.wait_for(self._event, seconds)
        self._event.clear()


class CoroutineElection(ElectionState):
    """An election in a task."""

    async def arun(self) -> None:
        """Campaign and lead until ``stop()`` is called or this task is cancelled.

        ``on_elected`` and ``on_deposed`` may be coroutine functions. The coroutine of
        ``on_elected`` is cancelled if the lead ends first.
        """
        self._begin()
        self._wakeup = _Wakeup()
        retries = retry_delays()
        try:
            while not self._stopping:
                try:
                    await self._acampaign()
                except LockBackendError as error:
                    logger.warning(UNREACHABLE, self.name, error)
                    await self._wakeup.rest(next(retries))
                    continue
                retries = retry_delays()
                if self._hold is not None:
                    await self._alead(self._hold)
        finally:
            try:
                await run_in_sync_thread(self._release)
            finally:
                self._ended.set()

    # Internal methods.

    async def _acampaign(self) -> None:
        acquisition = Acquisition(self._lock, current_caller(), self._wakeup, wait=True)
        self._hold = await adrive(
            acquisition, self._wakeup.rest, lambda: self._stopping
        )
        self._expect_a_long_hold()

    async def _alead(self, hold: Hold) -> None:
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
                work.add_done_callback(lambda _: self._wakeup.wake())
            while self.is_leader and (
                work is None or not work.done() or _returned(work)
            ):
                await self._wakeup.rest(hold.remaining)
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
            await self._wakeup.rest(left)

    async def _adepose(self, hold: Hold, work: asyncio.Future[Any] | None) -> None:
        self._deposing = True
        # ``on_deposed`` may wait for threads in ``wait()``.
        self._wake_work()
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
                begun := self.on_deposed(hold)
            ):
                await begun
        except Exception:
            logger.exception("on_deposed of %r failed", self.name)
        if cancelled is not None:
            raise cancelled


def _returned(work: asyncio.Future[Any]) -> bool:
    return not work.cancelled() and work.exception() is None
