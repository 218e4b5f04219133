"""The acquisition of one or several keys: the requests, the wait, and its end.

There is a driver for threads and one for event loops. Each lets an acquisition make its
requests, and waits between them. Unless a grant ends it, the driver lets the
acquisition leave its entries and cancel its claims. So it earns promise 7 of
docs/safety.md.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tracemalloc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, cast

from dlocks.backends.base import HANDOVER_LEASE
from dlocks.conf import backends
from dlocks.core import callers, explain
from dlocks.core.attempt import DONE, Attempt, Wakeup, ask_for
from dlocks.core.callers import Block, Caller, FrameId
from dlocks.core.entry import Entry
from dlocks.core.hold import Hold
from dlocks.core.losses import LossOfMember
from dlocks.core.policy import FROM_SETTINGS, FromSettings
from dlocks.exceptions import LockShutDown
from dlocks.runtime import clock
from dlocks.runtime.clock import FOREVER
from dlocks.runtime.coroutines import Undoable, waiting_for_a_lock
from dlocks.runtime.keeper import keeper
from dlocks.runtime.threads import Flag
from dlocks.runtime.waits import waits


class Acquisition:
    """The acquisition of a lock by one caller: of its key, or of all its keys.

    ``wakeup.wake()`` is called, in any thread, when a request before the end of a pause
    is worthwhile. ``timeout`` replaces that of the lock. ``frame_id`` is that of the
    frame whose block begins. ``key`` is the full key, if it is known. The result is
    None if ``is_stopped()`` becomes true first.
    """

    def __init__(
        self,
        lock: Any,
        caller: Caller,
        wakeup: Wakeup,
        *,
        timeout: float | FromSettings | None = FROM_SETTINGS,
        releasable: bool = False,
        frame_id: FrameId | None = None,
        key: str | None = None,
        is_stopped: Callable[[], bool] | None = None,
    ) -> None:
        self.lock = lock
        self.caller = caller
        self.wakeup = wakeup
        # Whether ``lock.release()`` may leave it.
        self.releasable = releasable
        self.frame_id = frame_id
        self.is_stopped = is_stopped
        self.backend = backends[lock.using]
        if isinstance(timeout, FromSettings):
            timeout = lock.timeout
        if isinstance(timeout, FromSettings):
            timeout = self.backend.timeout
        self.timeout = timeout
        self.began = clock.now()
        # The lock and the full key of each attempt. The first prefix is kept, since a
        # coroutine may continue in another thread.
        if not lock.locks:
            self._locks = [(lock, key or lock._full_key(self.backend))]
        else:
            self._locks = [(one, one._full_key(self.backend)) for one in lock.locks]
        self._on_lost: LossOfMember | None = None
        self.attempts = self._new_attempts()
        # Whether all keys were claimed at once, and whether this counts as a wait.
        self._has_begun = self._waits = False
        self._pid = os.getpid()
        self.result: Hold | None = None
        # The block that has begun, to be undone if the caller does not enter it.
        self.opened: Block | None = None

    def _new_attempts(self) -> list[Attempt]:
        attempts = []
        if self.lock.on_lost is not None and len(self._locks) > 1:
            # A new one each time. The loss of an earlier attempt may be reported late.
            self._on_lost = LossOfMember(self.lock.on_lost)
        for lock, key in self._locks:
            if self._on_lost is not None:
                lock = replace(lock, on_lost=self._on_lost)
            # It has no reference to this object. No cycle keeps the hold alive.
            attempt = Attempt(
                lock,
                key,
                backend=self.backend,
                caller=self.caller,
                wakeup=self.wakeup,
                timeout=self.timeout,
                began=self.began,
                block=self.frame_id is not None,
            )
            attempt.entry.is_member = len(self._locks) > 1
            attempts.append(attempt)
        return attempts

    @property
    def has_transaction_scope(self) -> bool:
        return any(attempt.has_transaction_scope for attempt in self.attempts)

    def advance(self) -> Any:
        """Request the missing keys. Return DONE, or the seconds until the next call.

        None is no limit: the caller is woken. In the end, the hold is in ``result``.
        """
        if self._waits and not waits.is_open(self):
            raise self._shut_down()
        if self.is_stopped is not None and self.is_stopped():
            self.cancel()
            return DONE
        pause = self._try()
        for attempt in self.attempts:
            # It pauses, or has joined the queue, perhaps before a shutdown.
            if attempt.paused and not self._waits:
                self._waits = True
                if not waits.begin(self):
                    raise self._shut_down()
        if pause is DONE and self._waits and not waits.complete(self):
            raise self._shut_down()
        return pause

    def _shut_down(self) -> LockShutDown:
        """Return the error, which names the key that was waited for."""
        missing = (one for one in self.attempts if not one.is_granted)
        lock = next(missing, self.attempts[-1]).lock
        return explain.shut_down_error(lock.key, clock.now() - self.began)

    def _try(self) -> Any:
        """Request the missing keys. Return DONE, or the seconds until the next try.

        All keys are claimed at once. If one is busy, they are acquired one by one.
        """
        if len(self.attempts) > 1 and not self._has_begun:
            for attempt in self.attempts:
                attempt.begin()
            self._request_together()
            self._has_begun = True
        for attempt in self.attempts:
            if not attempt.is_granted:
                if len(self.attempts) > 1:
                    self._refuse_late(attempt)
                pause = attempt.step()
                if pause is not DONE:
                    return pause
        entries = tuple(map(attrgetter("entry"), self.attempts))
        hold: Any = self.attempts[0].face
        if len(entries) > 1:
            parts = [entry.hold for entry in entries]
            hold = Hold(self.lock, parts, entries)
            if self._on_lost is not None:
                # Before the last look, since it reports each loss that follows.
                self._on_lost.holds[:] = [weakref.ref(hold)]
            if not all(part.count > 1 or part.held for part in parts) and (
                self._on_lost is None or self._on_lost.take() is not None
            ):
                # A hold was lost during the wait. Acquiring it again now would violate
                # the order of the keys. The caller gets this hold only if ``on_lost``
                # has already been called with it.
                self.cancel()
                earlier, self.attempts = self.attempts, self._new_attempts()
                for attempt, before in zip(self.attempts, earlier, strict=True):
                    # It has waited since the beginning.
                    attempt.paused = before.paused
                self._has_begun = False
                return 0.0
        self._finish(hold, entries)
        return DONE

    def _request_together(self) -> None:
        rest = [attempt for attempt in self.attempts if not attempt.is_granted]
        if len(rest) < 2:
            return
        claims = [attempt.ensure_claim() for attempt in rest]
        sent = clock.now()
        # A try without a wait takes as long as its requests.
        until = rest[0].deadline if self.timeout else FOREVER
        acquire = partial(self.backend.acquire_all, until=until)
        for attempt, grant in zip(
            rest, ask_for(rest, acquire, claims) or (), strict=False
        ):
            attempt.accept(grant, sent)

    def _refuse_late(self, attempt: Attempt) -> None:
        """Raise LockTimeout if the requests for other keys took all of the time.

        A key that was granted at the last moment of a wait leaves some for the others.
        """
        if not self.timeout or attempt.paused:
            return
        more = HANDOVER_LEASE if any(one.paused for one in self.attempts) else 0.0
        if clock.now() > attempt.deadline + more:
            rest = [one for one in self.attempts if not one.is_granted]
            raise explain.late_error(rest)

    def _finish(self, hold: Hold, entries: tuple[Entry, ...]) -> None:
        """Record the hold as the result, and the entries that leave it."""
        for attempt in self.attempts:
            if attempt.has_entered:
                attempt.receive()
        if self.frame_id is not None:
            self.opened = Block(self.caller, self.frame_id, hold, entries)
            self.lock._blocks.open.append(self.opened)
        elif self.releasable:
            callers.add_acquired(self.lock, hold, entries)
            if sys.flags.dev_mode or tracemalloc.is_tracing():
                for entry in entries:
                    entry.hold.watch.acquired_at = _line_of_caller()
        self.result = hold

    def cancel(self) -> None:
        """Leave and cancel everything, and leave no key acquired or queued."""
        if os.getpid() != self._pid:
            # A receiver or a signal handler has forked. The claims are the parent's.
            return
        self.result = None
        if self.opened is not None:
            self.lock._blocks.remove(self.opened)
        for attempt in reversed(self.attempts):
            attempt.cancel()

    def cancel_later(self) -> None:
        """Let the background threads cancel the acquisition."""
        for attempt in self.attempts:
            if attempt.waiter is not None:
                attempt.waiter.closed = True
        # What is part of a transaction ends with it.
        if not self.has_transaction_scope:
            keeper.post(self.cancel, self.backend)


def _line_of_caller() -> tuple[str, int]:
    """Return the file and the line outside of dlocks that called it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_globals.get("__name__", "").startswith("dlocks.")
    ):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def drive(acquisition: Acquisition) -> Any:
    """Run an acquisition in this thread, and return its hold."""
    try:
        try:
            while True:
                pause = acquisition.advance()
                if pause is DONE:
                    return acquisition.result
                with waiting_for_a_lock():
                    acquisition.wakeup.rest(pause)
        except BaseException:
            acquisition.cancel()
            raise
    except BaseException:
        # Once more, because an interrupt may have hit the first call.
        acquisition.cancel()
        raise


async def adrive(acquisition: Acquisition) -> Any:
    """Run an acquisition in an event loop. Each request is made in Django's thread."""
    requests = Undoable(
        acquisition.cancel,
        acquisition.cancel_later,
        lambda: acquisition.has_transaction_scope,
    )
    return await requests.complete(_adrive(acquisition, requests))


async def _adrive(acquisition: Acquisition, requests: Undoable) -> Any:
    while True:
        pause = await requests.make(acquisition.advance)
        if pause is DONE:
            return acquisition.result
        with waiting_for_a_lock():
            await acquisition.wakeup.rest(pause)


class ThreadWakeup:
    """Wakes a waiting thread."""

    @property
    def _flag(self) -> Flag:
        # Usually there is no wait. Two threads may need the first one at once.
        return cast("Flag", vars(self).setdefault("_made", Flag()))

    def wake(self) -> None:
        self._flag.set()

    def rest(self, seconds: float | None) -> None:
        clock.rest(self._flag, seconds)


class TaskWakeup:
    """Wakes a task that waits in its event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def wake(self) -> None:
        clock.call_in(self._loop, self._event.set)

    async def rest(self, seconds: float | None) -> None:
        await clock.arest(self._event, seconds)
