"""Holds: the object that ``with db_lock(…) as hold`` returns."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from dlocks.core.callers import current_caller, note_context, read_outside
from dlocks.core.detach import detach, release_detached
from dlocks.core.guard import guarded
from dlocks.core.kept_hold import KeptHold
from dlocks.exceptions import LockError
from dlocks.runtime.coroutines import refuse_in_a_coroutine, run_in_sync_thread
from dlocks.runtime.keeper import OUTSIDE_TIMEOUT
from dlocks.values import Claim, Duration

if TYPE_CHECKING:
    from dlocks.backends.base import Backend
    from dlocks.protocols import Policy

P = ParamSpec("P")
R = TypeVar("R")

# Refused before anything happens, so that the asynchronous method can do it.
ensure_sync = partial(
    refuse_in_a_coroutine,
    "'async with', or the method with an 'a', as in 'await hold.arelease()'",
)


class Hold:
    """One holding of one key, which ends by ``release()`` or is lost.

    Any thread with a reference to it may release it, or use it in a ``with`` block. A
    hold is lost, and its key released, soon after all of its callers have ended: the
    thread or event loop that acquired it, and those of its open blocks. ``token`` is
    the fencing token, larger than that of every earlier hold of the key. ``owner`` is
    the secret identity, never to be shown whole. ``waited`` is the seconds that the
    caller waited, 0 if the key was free. ``takeover`` says that the last holder never
    released the key.
    """

    def __init__(self, state: Any) -> None:
        self._state: KeptHold = state
        state.hold = self
        self.lock: Policy = state.lock
        self.backend: Backend = state.backend
        self.claim: Claim = state.claim
        self.scope: str = state.scope
        self.token: int = state.token
        self.takeover: bool = state.takeover
        self.waited: float = state.waited

    def __repr__(self) -> str:
        keys = ", ".join(map(repr, self.keys))
        token = f" token={self.token}" if len(self.keys) == 1 else ""
        return (
            f"<{type(self).__name__} {keys}{token} count={self.count}"
            f" {'held' if self.held else 'ended or lost'}>"
        )

    @property
    def key(self) -> str:
        return self.lock.key

    @property
    def keys(self) -> tuple[str, ...]:
        return self.lock.keys

    @property
    def tokens(self) -> dict[str, int]:
        """Return the fencing tokens by key.

        There is one, unless several keys are held.
        """
        return {part.lock.key: part.token for part in self._state.parts}

    @property
    def owner(self) -> str:
        return self.claim.owner

    @property
    def count(self) -> int:
        """Return how often the holder has entered and not left."""
        return self._state.count

    @property
    def held(self) -> bool:
        """Return whether the key is certainly held. This does no I/O.

        False may mean that the state is unknown.
        """
        return self._state.held

    @property
    def remaining(self) -> float:
        """Return the seconds for which the key is held without a renewal.

        This is infinite in a transaction.
        """
        return self._state.remaining

    @property
    def age(self) -> float:
        """Return the seconds since the grant."""
        return self._state.age

    def check(self) -> None:
        """Check with the backend that the key is held, or raise LockLost."""
        ensure_sync()
        self._state.check()

    def renew(self) -> None:
        """Extend the lease to its ttl from now, or raise LockLost.

        In a transaction there is no lease, so this only checks the hold.
        """
        ensure_sync()
        self._state.renew()

    def release(self, *, failed: bool = False) -> None:
        """Leave the hold once. The last entry to leave releases the key.

        Releasing again does nothing, nor does releasing after the end of the hold's own
        transaction. ``failed`` sets the status of the row to F instead of S, for people
        who read it. Raise LockLost if the hold was lost, because its work was perhaps
        not exclusive.
        """
        ensure_sync()
        self._state.release(failed=failed)

    def queue_length(self) -> int:
        """Return the number of callers that are queued for the key now.

        This asks the backend. It is 0 where there is no queue.
        """
        backend = self.backend
        return sum(
            read_outside(
                partial(backend.waiting, part.claim.key), backend, OUTSIDE_TIMEOUT
            )
            for part in self._state.parts
        )

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
        return guarded(self._state.parts, using, atomic)

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
        return detach(self._state, within=within)

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
            await self._there(partial(release_detached, self._state))
            raise

    async def arelease(self, *, failed: bool = False) -> None:
        await self._there(partial(self.release, failed=failed))

    # Blocks.

    def __enter__(self) -> Self:
        state, fits = self._state, False
        try:
            # In one section, since several threads may begin a block.
            with state.mutex:
                fits = state.blocks < state.entries
                state.blocks += fits
            if fits:
                caller = current_caller()
                if hasattr(caller, "get_loop"):
                    note_context(caller)
                state.add_user(caller)
                return self
        except BaseException:
            if fits:
                state.end_block()
            raise
        raise RuntimeError(
            f"This hold of {', '.join(map(repr, self.keys))} has been released, or"
            " an outer block releases it. Acquire the lock once for each block."
        )

    def __exit__(self, kind: object, error: BaseException | None, *exc: object) -> None:
        try:
            self.exit(error, ends_block=True)
        finally:
            # Afterwards, because without a caller the keeper would end the hold.
            self._state.remove_user(current_caller())

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        try:
            await self._there(partial(self.exit, error, ends_block=True))
        finally:
            self._state.remove_user(current_caller())

    def exit(self, error: BaseException | None, *, ends_block: bool = False) -> None:
        """End a block by releasing the hold. ``ends_block`` says that it is one of it.

        If the block itself failed, a failed release only adds a note to its error.
        """
        try:
            ensure_sync()
            self._state.release(
                failed=error is not None, at_block_end=True, ends_block=ends_block
            )
        except LockError as trouble:
            if error is None:
                raise
            error.add_note(f"{type(trouble).__name__}: {trouble}")

    async def aleave(self, error: BaseException | None) -> None:
        await self._there(partial(self.exit, error))

    async def _there(self, function: Callable[[], R]) -> R:
        return await run_in_sync_thread(
            function, in_transaction_only=self.scope == "transaction"
        )
