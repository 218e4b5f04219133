"""Holds: the object that ``with db_lock(…) as hold`` returns."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from dlocks.core.callers import run_outside
from dlocks.core.guard import guarded
from dlocks.core.hold_state import ensure_sync
from dlocks.core.release import Release
from dlocks.exceptions import LockError
from dlocks.runtime.coroutines import run_in_sync_thread
from dlocks.runtime.keeper import keeper
from dlocks.values import Duration

if TYPE_CHECKING:
    from dlocks.protocols import Policy

P = ParamSpec("P")
R = TypeVar("R")


class Hold(Release):
    """One holding of one key, which ends by ``release()`` or is lost.

    Any thread with a reference to it may release it. ``token`` is the fencing token,
    larger than that of every earlier hold of the key. ``owner`` is the secret identity,
    never to be shown whole. ``waited`` is the seconds that the caller waited, 0 if the
    key was free. ``takeover`` says that the last holder never released the key.
    """

    # Methods for the holder.

    def queue_length(self) -> int:
        """Return the number of callers that are queued for the key now.

        This asks the backend. It is 0 where there is no queue.
        """
        backend = self.backend
        ask = partial(backend.waiting, self.claim.key)
        return run_outside(ask, backend)

    def atomic(
        self, *, using: str | None = None, **atomic: Any
    ) -> AbstractContextManager[None]:
        """Open a transaction that commits while the key is held, or not at all.

            with hold.atomic():
                ...

        However long the process is paused, no other caller acquires the key before the
        transaction ends. If the hold is lost already, raise LockLost and write nothing.
        ``using`` may be another alias of the lock's database. Other arguments are those
        of Django's ``atomic()``.
        """
        return guarded([self], using, atomic)

    async def aatomic(
        self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call a function in ``hold.atomic()``, in Django's sync thread.

        Return its result.
        """

        def call() -> R:
            with self.atomic():
                result = function(*args, **kwargs)
                if inspect.isawaitable(result):
                    if inspect.iscoroutine(result):
                        result.close()
                    raise TypeError(
                        "aatomic() calls a synchronous function in Django's sync"
                        f" thread, but {function!r} returned an awaitable. Pass its"
                        " synchronous version."
                    )
                return result

        return await run_in_sync_thread(call, in_transaction_only=True)

    def detach(self, *, within: Duration | None = None) -> str:
        """Detach the hold, and return the text by which a process resumes it.

        See ``dlocks.core.detach``.
        """
        ensure_sync()
        from dlocks.core.detach import detach

        return detach(self, within=within)

    # The same methods for coroutines.

    async def aqueue_length(self) -> int:
        return await self._there(self.queue_length)

    async def acheck(self) -> None:
        await self._there(self.check)

    async def arenew(self) -> None:
        await self._there(self.renew)

    async def adetach(self, *, within: Duration | None = None) -> str:
        try:
            return await self._there(partial(self.detach, within=within))
        except asyncio.CancelledError:
            # No process will ever receive the text.
            await self._there(self._release_again)
            raise

    async def arelease(self, *, failed: bool = False) -> None:
        await self._there(partial(self.release, failed=failed))

    # Blocks.

    def __enter__(self) -> Self:
        if self._blocks >= self._entries:
            raise RuntimeError(
                f"This hold of {', '.join(map(repr, self.keys))} has been released, or"
                " an outer block releases it. Acquire the lock once for each block."
            )
        self._blocks += 1
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        self._blocks = max(0, self._blocks - 1)
        self.exit(error)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        self._blocks = max(0, self._blocks - 1)
        await self.aleave(error)

    def exit(self, error: BaseException | None) -> None:
        """End a block by releasing the hold.

        If the block itself failed, a failed release only adds a note to its error.
        """
        try:
            self.release(failed=error is not None)
        except LockError as trouble:
            if error is None:
                raise
            error.add_note(f"{type(trouble).__name__}: {trouble}")

    async def aleave(self, error: BaseException | None) -> None:
        await self._there(partial(self.exit, error))

    @property
    def _entries(self) -> int:
        """Return how many entries are still to be left."""
        return 0 if self._ended else self._count

    async def _there(self, function: Callable[[], R]) -> R:
        return await run_in_sync_thread(
            function, in_transaction_only=self.scope == "transaction"
        )

    # Methods for the lock.

    @property
    def enterable(self) -> bool:
        """Return whether the same caller enters this hold, and needs no new one."""
        if self._ended or self._pid != os.getpid():
            return False
        if self.scope == "transaction":
            return self.held
        # A hold left in a transaction is kept for its min_hold from all callers, even
        # this one.
        return self._count > 0 or (self.held and self.age >= self.lock.min_hold)

    @property
    def is_left(self) -> bool:
        """Return whether only open transactions keep the hold."""
        return self._count == 0 and self.in_transactions and self.held

    def enter(self, lock: Policy) -> bool:
        """Count one more entry, and check that the key is still held.

        Return False if the hold has ended. Raise LockLost if it is lost.
        """
        with self._mutex:
            # Counted first, so that no other thread releases the key meanwhile.
            if self._ended:
                return False
            if self._count == 0:
                # The hold was left in a transaction. Its earlier blocks no longer
                # count.
                self._blocks = 0
                self.leaves_at_exit = True
            self.leaves_at_exit = self.leaves_at_exit and lock.release_at == "exit"
            self._count += 1
            count = self._count
            # The earlier transactions do not matter until the hold is left again.
            left_in, self._left_in = self._left_in, []
        keeper.forget_end(self)
        try:
            if not self._keeps:
                self.lose(self.why_not())
                raise self._reported_lost()
            if not self._confirmed(count):
                self.lose(self.why_gone())
                raise self._reported_lost()
        except BaseException:
            with self._mutex:
                self._count = count - 1
                self._left_in = left_in
            if left_in:
                keeper.await_end(self)
            raise
        return True

    def prolong(self) -> None:
        """Count one more entry, so that the hold outlasts the current block."""
        with self._mutex:
            self._count += 1

    def revert_entry(self, count: int) -> None:
        """Restore the count from before an entry that its caller never received."""
        self._count = min(self._count, count)
        if (
            self._count == 0
            and not self._left_in
            and not self._leave_in_transactions()
            and self._end()
        ):
            self.release_claim()
