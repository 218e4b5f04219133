"""Locks: a key and a policy, immutable and shareable."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Never, TypeVar, cast

from dlocks.backends.base import Backend
from dlocks.conf import backends
from dlocks.core import callers
from dlocks.core.acquire import (
    Acquisition,
    TaskWakeup,
    ThreadWakeup,
    adrive,
    drive,
)
from dlocks.core.callers import (
    Acquired,
    Blocks,
    Caller,
    Place,
    current_caller,
    frame_id_of,
)
from dlocks.core.claims import hold_at
from dlocks.core.hold import (
    Hold,
    aleave_block,
    leave_block,
    leave_entries,
    leave_interrupted,
)
from dlocks.core.options import METHODS, no_attribute, refuse_arguments
from dlocks.core.policy import LockPolicy, check_key
from dlocks.exceptions import LockDeadlock, LockTimeout
from dlocks.runtime.coroutines import (
    acquiring,
    is_away_from_tenant,
    refuse_in_a_coroutine,
    run_in_sync_thread,
)
from dlocks.runtime.keeper import OUTSIDE_TIMEOUT
from dlocks.runtime.requests import refuse_nested
from dlocks.values import LONGEST_WAIT, Duration, Holder, Waiter, seconds

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

AWAIT = "'async with', or 'await lock.aacquire()'"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Lock(LockPolicy):
    """A key, or several, and a policy, as returned by ``db_lock()``.

    A lock on several keys is acquired when all of them are. All are requested at once
    if the backend can. If one is busy, they are acquired one by one, in the order of
    their bytes and each in its queue. So no two callers wait for each other.
    ``timeout`` covers all keys together. When it passes, the keys acquired so far are
    released. ``key`` lists all keys, for people, and ``locks`` has one lock per key.
    """

    # The locks of the single keys, in order, if there are several.
    locks: tuple[Lock, ...] = ()
    # The open ``with`` blocks of this object. A copy has none of them.
    _blocks: Blocks = field(default_factory=Blocks, init=False, compare=False)

    def __post_init__(self) -> None:
        # The lock of each of several keys has checked itself.
        if not self.locks:
            LockPolicy.__post_init__(self)

    @classmethod
    def on_keys(cls, keys: Sequence[str], **options: Any) -> Lock:
        """Return the lock on several keys. A duplicate key counts once."""
        for key in keys:
            check_key(key)
        # Strings sort by code points, and so do their bytes in UTF-8, also behind a
        # common prefix. So the order is the same on every database.
        ordered = sorted(set(keys))
        locks = tuple(cls(key=key, **options) for key in ordered)
        # As the locks have them, with durations in seconds.
        policy = {name: getattr(locks[0], name) for name in options}
        return cls(key=", ".join(ordered), locks=locks, **policy)

    def __getstate__(self) -> list[Any]:
        return [getattr(self, one.name) for one in fields(self) if one.init]

    def __setstate__(self, state: list[Any]) -> None:
        named = [one for one in fields(self) if one.init]
        for one, value in zip(named, state, strict=True):
            object.__setattr__(self, one.name, value)
        object.__setattr__(self, "_blocks", Blocks())

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the key, or all keys of a lock on several."""
        return tuple(lock.key for lock in self._each)

    def acquire(self, *args: Never, **options: Never) -> Hold:
        """Wait for the key for at most ``timeout``, and return the hold.

        Raise LockTimeout if the key is not free by then. There are no arguments,
        because the options belong to the lock.
        """
        if args or options:
            refuse_arguments("acquire", "try_acquire")
        refuse_in_a_coroutine(AWAIT)
        acquisition = Acquisition(
            self, current_caller(), ThreadWakeup(), releasable=True
        )
        # One line, so that no interrupt can come between the grant and the return.
        return drive(acquisition)  # type: ignore[no-any-return]

    def try_acquire(self, *, timeout: Duration | None = 0.0) -> Hold | None:
        """Return the hold, or None if the key is not free within ``timeout``.

        By default this tries once, without waiting. ``None`` is no limit. Whatever is
        not a matter of time raises an error, as ``acquire()`` does: LockDeadlock too.
        """
        refuse_in_a_coroutine(AWAIT)
        caller, wakeup, limit = current_caller(), ThreadWakeup(), _limit(timeout)
        acquisition = Acquisition(self, caller, wakeup, timeout=limit, releasable=True)
        try:
            return drive(acquisition)  # type: ignore[no-any-return]
        except LockDeadlock:
            raise
        except LockTimeout:
            return None

    def release(self) -> None:
        """Leave the hold that this caller acquired last by this lock.

        The last use to end releases the key. After the end of the hold's own
        transaction this does nothing.

        If this task has acquired none, leave that of a task of the same event loop that
        is done, as after ``asyncio.wait_for(lock.aacquire(), 5)``. The hold of a
        running task is never meant. Raise RuntimeError if there is none, and LockLost
        if it was lost.
        """
        refuse_in_a_coroutine("'await lock.arelease()'")
        self._release(current_caller())

    def held(self) -> bool:
        """Return whether this caller holds the key, or all keys. This does no I/O.

        The hold is one of this thread or task, or one that ``release()`` would release.
        """
        return self._is_held_by(current_caller())

    def holder(self) -> Holder | None:
        """Return the holder of the key, or that of the first key that is held, or None.

        If a transaction keeps the key without a lease, the holder is its database
        session, which PostgreSQL finds. MariaDB and MySQL find it if there are waiters,
        and SQLite never. So None means there: free, or in a transaction.
        """
        found = self._ask_each(lambda backend, key: backend.holder(key))
        return next((holder for holder in found if holder is not None), None)

    def holders(self) -> list[Holder]:
        """Return all holders of the key, in the order of their grants, key by key.

        A semaphore, and a read lock, may have several. A stale one is included.
        """
        found = self._ask_each(lambda backend, key: backend.inspector.holders(key))
        return list(chain.from_iterable(found))

    def waiters(self) -> list[Waiter]:
        """Return the callers that are queued for the key, in the order of the queue.

        There are none on a backend without a queue, nor with ``fair=False``.
        """
        prefix = backends[self.using].prefix
        found = self._ask_each(
            lambda backend, key: backend.inspector.waiters(key, prefix)
        )
        return list(chain.from_iterable(found))

    def locked(self) -> bool:
        """Return whether a key is held, as far as ``holder()`` can tell."""
        return any(
            holder is not None and not holder.stale
            for holder in map(Lock.holder, self._each)
        )

    def __enter__(self) -> Hold:
        refuse_in_a_coroutine(AWAIT)
        frame, caller = sys._getframe(1), current_caller()
        frame_id = id(frame), frame.f_code
        acquisition = Acquisition(self, caller, ThreadWakeup(), frame_id=frame_id)
        return drive(acquisition)  # type: ignore[no-any-return]

    def __exit__(self, kind: object, error: BaseException | None, *exc: object) -> None:
        block = None
        try:
            block = self._blocks.to_end(sys._getframe(1), self.key)
            leave_block(self._blocks, block, error)
        except BaseException as trouble:
            leave_interrupted(self._blocks, block, sys._getframe(1), trouble)
            raise

    def __call__(self, function: F) -> F:
        """Decorate a function. See ``db_lock()``.

        The fields of the key are filled from the arguments of the call.
        """
        if self.locks:
            raise TypeError(
                "A lock on several keys cannot be a decorator. Use 'with db_lock(…)'"
                " inside the function."
            )
        return cast("F", decorate_with[0](self, function))

    # The same methods for coroutines. Each step runs in Django's sync thread, and the
    # coroutine waits.

    async def aacquire(self, *args: Never, **options: Never) -> Hold:
        if args or options:
            refuse_arguments("aacquire", "atry_acquire")
        return await self._aacquire(releasable=True)

    async def atry_acquire(
        self,
        *,
        timeout: Duration | None = 0.0,  # noqa: ASYNC109 (that of a lock's queue)
    ) -> Hold | None:
        limit = _limit(timeout)
        try:
            return await self._aacquire(timeout=limit, releasable=True)
        except LockDeadlock:
            raise
        except LockTimeout:
            return None

    async def arelease(self) -> None:
        """Leave the hold that this task acquired last by this lock.

        If it has acquired none, this leaves that of a task that is done. See
        ``release()``.
        """
        caller = current_caller()
        last = callers.last_acquired(self, caller)
        # Together, so that a cancellation comes after the release.
        await run_in_sync_thread(
            partial(self._release, caller),
            in_transaction_only=last is not None and last.hold.scope == "transaction",
        )

    async def aholder(self) -> Holder | None:
        return await self._read(self.holder)

    async def aholders(self) -> list[Holder]:
        return await self._read(self.holders)

    async def awaiters(self) -> list[Waiter]:
        return await self._read(self.waiters)

    async def alocked(self) -> bool:
        return await self._read(self.locked)

    async def __aenter__(self) -> Hold:
        callers.record_context(current_caller())
        # The coroutine or the generator that awaits this.
        return await self._aacquire(frame_id=frame_id_of(sys._getframe().f_back))

    async def __aexit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        block = self._blocks.to_end(sys._getframe().f_back, self.key)
        await aleave_block(self._blocks, block, error)

    # Internal methods.

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Never:
            raise no_attribute(self, name, METHODS.get(name))

    @property
    def _each(self) -> tuple[Lock, ...]:
        """Return the lock of each key."""
        return self.locks or (self,)

    def _ask_each(self, ask: Callable[[Backend, str], T]) -> Iterator[T]:
        """Ask the backend about each key, outside of the caller's transaction."""
        backend = backends[self.using]
        for lock in self._each:
            about = partial(ask, backend, lock._full_key(backend))
            yield callers.read_outside(about, backend, OUTSIDE_TIMEOUT)

    def _is_held_by(self, caller: Caller) -> bool:
        last = callers.last_acquired(self, caller)
        if last is not None and last.hold.held:
            return True
        if self.locks:
            return all(lock._is_held_by(caller) for lock in self.locks)
        held = (hold_at(caller, place) for place in self._places_of(caller))
        return any(hold is not None and hold.count > 0 and hold.held for hold in held)

    def _places_of(self, caller: Caller) -> list[Place]:
        """Return where a caller may hold the key."""
        backend = backends[self.using]
        if backend.has_fixed_prefix or not is_away_from_tenant():
            return [(backend.identity, self._full_key(backend), self.shared)]
        # The prefix is not known here, but that of its holds is.
        return [
            place
            for place, entries in list(callers.places_of(caller).items())
            if (place[0], place[2]) == (backend.identity, self.shared)
            and any(entry.hold.lock.key == self.key for entry in list(entries))
        ]

    async def _read(self, function: Callable[[], T]) -> T:
        # The prefix may depend on Django's connections.
        fixed = backends[self.using].has_fixed_prefix
        return await run_in_sync_thread(function, in_transaction_only=not fixed)

    def _release(self, caller: Caller) -> None:
        # First, because it could not be released again.
        refuse_nested()
        last: Acquired | None = callers.last_acquired(self, caller)
        if last is None:
            kind = "task" if hasattr(caller, "get_loop") else "thread"
            raise RuntimeError(
                f"{self.key!r} was not acquired by this {kind}, or has been released."
                " 'lock.release()' releases what 'lock.acquire()' of the same lock"
                " returned."
            )
        leave_entries(last.entries, failed=False, block=False)

    async def _abegin(self, caller: Caller, wakeup: Any, **options: Any) -> Acquisition:
        begin = partial(Acquisition, self, caller, wakeup, **options)
        if backends[self.using].has_fixed_prefix:
            return begin()
        # The prefix may depend on Django's connections, which belong to Django's sync
        # thread.
        return await run_in_sync_thread(begin, in_transaction_only=True)

    async def _aacquire(self, **options: Any) -> Hold:
        wakeup, caller = TaskWakeup(), current_caller()
        acquisition = await self._abegin(caller, wakeup, **options)
        acquiring.add(caller)
        try:
            hold: Hold = await adrive(acquisition)
        finally:
            acquiring.discard(caller)
        return hold


def _limit(timeout: Duration | None) -> float | None:
    """Return the seconds to wait at most, or None."""
    if timeout is None:
        return None
    return seconds("timeout", timeout, longest=LONGEST_WAIT)


# The function that puts a function under a lock. The module of the decorators adds it,
# because it imports this module.
decorate_with: list[Callable[[Lock, Any], Any]] = []
