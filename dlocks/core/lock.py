"""Locks: a key and a policy, immutable and shareable."""

from __future__ import annotations

import sys
from asyncio import _get_running_loop
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Never, TypeVar, cast

from dlocks.conf import backends
from dlocks.core.acquire import Acquisition
from dlocks.core.callers import (
    Caller,
    current_caller,
    enter_block,
    forget_block,
    hold_by,
    innermost_block,
    last_acquired,
    place_of,
    read_outside,
)
from dlocks.core.drive import TaskWakeup, ThreadWakeup, adrive, drive
from dlocks.core.hold import Hold
from dlocks.core.policy import LockPolicy
from dlocks.exceptions import LockError, LockTimeout
from dlocks.runtime.coroutines import (
    acquiring,
    is_away_from_tenant,
    refuse_in_a_coroutine,
    run_in_sync_thread,
)
from dlocks.runtime.keeper import OUTSIDE_TIMEOUT, keeper
from dlocks.runtime.requests import refuse_nested
from dlocks.values import Holder

F = TypeVar("F", bound=Callable[..., Any])

# Names that locks of other libraries have, and that the hold has here.
OF_THE_HOLD = {
    "renew",
    "arenew",
    "check",
    "acheck",
    "remaining",
    "token",
    "owner",
    "atomic",
}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Lock(LockPolicy):
    """A key and a policy, as returned by ``db_lock()``."""

    _acquisition: ClassVar[Any] = Acquisition

    def acquire(self) -> Hold:
        """Wait for the key up to ``timeout``, and return the hold.

        Raise LockTimeout when the key is still not free.
        """
        return self._acquire(current_caller(), wait=True, keep=True)

    def try_acquire(self) -> Hold | None:
        """Try once, without waiting. Return None if another caller holds the key."""
        try:
            return self._acquire(current_caller(), wait=False, keep=True)
        except LockTimeout:
            return None

    def release(self) -> None:
        """Release the hold that this caller acquired last by this lock.

        If this task has acquired none, release that of a task of the same event loop
        that is done, as after ``asyncio.wait_for(lock.aacquire(), 5)``. The hold of a
        running task is never meant. Raise RuntimeError if there is none, and LockLost
        if it was lost.
        """
        refuse_in_a_coroutine("'await lock.arelease()'")
        self._last(current_caller()).release()

    def held(self) -> bool:
        """Return whether this caller holds the key. This does no I/O.

        The hold is one of this thread or task, or one that ``release()`` would release.
        """
        backend, caller = backends[self.using], current_caller()
        mine = hold_by((caller, backend.identity, self._full_key(backend), self.shared))
        if mine is None or not mine.count:
            mine = last_acquired(self, caller)
        return mine is not None and mine.count > 0 and mine.held

    def holder(self) -> Holder | None:
        """Return the holder of the key, or None.

        A key that a transaction has acquired is not visible until the transaction ends.
        """
        backend = backends[self.using]
        ask = partial(backend.holder, self._full_key(backend))
        return read_outside(ask, backend, OUTSIDE_TIMEOUT)

    def locked(self) -> bool:
        """Return whether the key is leased, by this caller or another."""
        holder = self.holder()
        return holder is not None and not holder.stale

    def __enter__(self) -> Hold:
        caller, frame = current_caller(), sys._getframe(1)
        place = id(frame), frame.f_code
        block = caller, self, self._acquire(caller, wait=True, keep=False), place
        try:
            enter_block(block)
        except BaseException:
            forget_block(block)
            with suppress(LockError):
                block[2].release(failed=True)
            raise
        return block[2]

    def __exit__(self, kind: object, error: BaseException | None, *exc: object) -> None:
        block = count = None
        try:
            block = innermost_block(self, sys._getframe(1))
            count = block[2].count
            block[2].exit(error)
            forget_block(block)
        except BaseException as trouble:
            block = block or innermost_block(self, sys._getframe(1))
            hold = block[2]
            if not isinstance(trouble, LockError) and count in {None, hold.count}:
                # Interrupted before anything was released.
                with suppress(Exception):
                    hold.release(failed=True)
            forget_block(block)
            raise

    def __call__(self, function: F) -> F:
        """Decorate a function. See ``db_lock()``.

        The fields of the key are filled from the arguments of the call.
        """
        return cast("F", decorate_with[0](self, function))

    # The same methods for coroutines. Each step runs in Django's sync thread, and the
    # coroutine waits.

    async def aacquire(self) -> Hold:
        return await self._aacquire(wait=True, keep=True)

    async def atry_acquire(self) -> Hold | None:
        try:
            return await self._aacquire(wait=False, keep=True)
        except LockTimeout:
            return None

    async def arelease(self) -> None:
        caller = current_caller()
        last = last_acquired(self, caller)
        # Together, so that a cancellation comes after the release.
        await run_in_sync_thread(
            lambda: self._last(caller).release(),
            in_transaction_only=last is not None and last.scope == "transaction",
        )

    async def aholder(self) -> Holder | None:
        return await run_in_sync_thread(
            self.holder, in_transaction_only=not backends[self.using].has_fixed_prefix
        )

    async def alocked(self) -> bool:
        return await run_in_sync_thread(
            self.locked, in_transaction_only=not backends[self.using].has_fixed_prefix
        )

    async def __aenter__(self) -> Hold:
        hold = await self._aacquire(wait=True, keep=False)
        # The coroutine or the generator that awaits this.
        place = place_of(sys._getframe().f_back)
        enter_block((current_caller(), self, hold, place))
        return hold

    async def __aexit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        block = innermost_block(self, sys._getframe().f_back)
        forget_block(block)
        if isinstance(error, GeneratorExit) and _get_running_loop() is None:
            # The coroutine is closed outside of its loop. Nothing can be awaited.
            keeper.post(partial(block[2].exit, error), block[2].backend)
            return
        await block[2].aleave(error)

    # Internal methods.

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Never:
            hint = (
                ". The hold has it, which acquire() and 'with … as' return"
                if name in OF_THE_HOLD
                else ""
            )
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{hint}",
                name=name,
                obj=self,
            )

    def _key_of_tenant(self) -> str | None:
        """Return the first full key, or None if the prefix is fixed or not known."""
        backend = backends[self.using]
        fixed = backend.has_fixed_prefix or is_away_from_tenant()
        return None if fixed else backend.prefix + self.keys[0]

    def _last(self, caller: Caller) -> Hold:
        # First, because it could not be released again.
        refuse_nested()
        last = last_acquired(self, caller, take=True)
        # Another thread may be ending it at this moment.
        hold: Hold | None = None if last is None else last.hold
        if hold is None:
            raise RuntimeError(
                f"{self.key!r} was not acquired by this"
                f" {'task' if hasattr(caller, 'get_loop') else 'thread'}, or"
                " has been released. 'lock.release()' releases what 'lock.acquire()' of"
                " the same lock returned."
            )
        return hold

    def _acquire(self, caller: Caller, *, wait: bool, keep: bool) -> Hold:
        """Acquire the key. With ``keep``, the hold is kept alive until it ends."""
        refuse_in_a_coroutine("'async with', or 'await lock.aacquire()'")
        wakeup = ThreadWakeup()
        acquisition = self._acquisition(self, caller, wakeup, wait=wait, keep=keep)
        # One line, so that no interrupt can come between the grant and the return.
        return drive(acquisition)  # type: ignore[no-any-return]

    async def _aacquire(self, *, wait: bool, keep: bool) -> Hold:
        wakeup, caller = TaskWakeup(), current_caller()
        begin = partial(self._acquisition, self, caller, wakeup, wait=wait, keep=keep)
        if backends[self.using].has_fixed_prefix:
            acquisition = begin()
        else:
            # The prefix may depend on Django's connections, which belong to Django's
            # sync thread.
            acquisition = await run_in_sync_thread(begin, in_transaction_only=True)
        acquiring.add(caller)
        try:
            hold: Hold = await adrive(acquisition)
        finally:
            acquiring.discard(caller)
        return hold


# The function that puts a function under a lock. The module of the decorators adds it,
# because it imports this module.
decorate_with: list[Callable[[Lock, Any], Any]] = []
