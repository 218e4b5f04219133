"""Elections that run in an event loop."""

from __future__ import annotations

import asyncio
import inspect
import logging
from functools import partial
from typing import Any

from dlocks.core.acquire import Attempt
from dlocks.core.callers import current_caller
from dlocks.core.hold import Hold
from dlocks.core.lock import wake_in
from dlocks.election.state import UNREACHABLE, ElectionState, retry_delays
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.coroutines import run_in_sync_thread

logger = logging.getLogger("dlocks")


class CoroutineElection(ElectionState):
    """An election in a task."""

    async def arun(self) -> None:
        """Campaign and lead until ``stop()`` is called or this task is cancelled.

        ``on_elected`` and ``on_deposed`` may be coroutine functions. The coroutine of
        ``on_elected`` is cancelled if the lead ends first.
        """
        self._begin()
        wakeup = asyncio.Event()
        self._wake = partial(wake_in, asyncio.get_running_loop(), wakeup)
        retries = retry_delays()
        try:
            while not self._stopping:
                try:
                    await self._acampaign(wakeup)
                except LockBackendError as error:
                    logger.warning(UNREACHABLE, self.name, error)
                    await _asleep(wakeup, next(retries))
                    continue
                retries = retry_delays()
                if self._hold is not None:
                    await self._alead(self._hold, wakeup)
        finally:
            try:
                await run_in_sync_thread(self._release)
            finally:
                self._ended.set()

    # Internal methods.

    async def _acampaign(self, wakeup: asyncio.Event) -> None:
        attempt = Attempt(self._lock, current_caller(), self._wake, wait=True)
        try:
            while not self._stopping:
                self._hold = await run_in_sync_thread(attempt.once)
                if self._hold is not None:
                    return
                await _asleep(wakeup, await run_in_sync_thread(attempt.pause))
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
                await _asleep(wakeup, hold.remaining)
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
            await _asleep(wakeup, left)

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


async def _asleep(wakeup: asyncio.Event, seconds: float | None) -> None:
    await clock.wait_for(wakeup, seconds)
    wakeup.clear()
