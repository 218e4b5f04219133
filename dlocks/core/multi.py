"""Locks on several keys: all of them or none.

The keys are acquired in one order, so that no two callers wait for each other.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dlocks.core.acquire import Acquisition
from dlocks.core.callers import (
    Caller,
    current_caller,
    forget_acquired,
    last_acquired,
    note_acquired,
)
from dlocks.core.claims import Wakeup
from dlocks.core.lock import Lock
from dlocks.core.multi_hold import LossOfMember, MultiHold
from dlocks.core.policy import check_key
from dlocks.runtime import clock


class MultiAcquisition:
    """The acquisition of several keys, first of all at once, and then one by one."""

    hold: MultiHold | None = None
    members: Sequence[Acquisition] = ()

    def __init__(
        self, lock: MultiLock, caller: Caller, wakeup: Wakeup, *, wait: bool, keep: bool
    ) -> None:
        self.lock = lock
        self._keep = keep
        self.wakeup = wakeup
        self.began = clock.now()
        self._on_lost = None if lock.on_lost is None else LossOfMember(lock.on_lost)
        self._locks = [
            dataclasses.replace(one, on_lost=self._on_lost) for one in lock.locks
        ]
        self._caller, self._wait = caller, wait
        self._start()

    def _start(self) -> None:
        earlier, self.members = (
            self.members,
            [
                Acquisition(lock, self._caller, self.wakeup, wait=self._wait)
                for lock in self._locks
            ],
        )
        for member in self.members:
            # The timeout is shared by all keys.
            member.began = self.began
        for member, before in zip(self.members, earlier, strict=False):
            # Keep the first prefix. A coroutine may continue in another thread.
            member.key = before.key

    @property
    def in_transaction(self) -> bool:
        return any(member.in_transaction for member in self.members)

    def steps(self) -> Iterator[float | None]:
        """Acquire all keys, and set ``hold``. See ``Acquisition``."""
        while True:
            self._all_at_once()
            for member in self.members:
                if member.hold is None:
                    yield from member.steps()
            holds = [member.hold for member in self.members if member.hold is not None]
            if all(hold.count > 1 or hold.held for hold in holds):
                break
            # A hold was lost during the wait. Acquiring it again now would violate the
            # order.
            self.cancel()
            self._start()
            self.wakeup.arm()
            yield 0.0
        self.hold = MultiHold(self.lock, holds)
        if self._on_lost is not None:
            self._on_lost.hold = weakref.ref(self.hold)
        if self._keep:
            note_acquired(self.lock, self.hold._state)

    def cancel(self) -> None:
        """Cancel the claims, and leave no key acquired or queued."""
        if self.hold is not None:
            forget_acquired(self.hold._state)
        for member in reversed(self.members):
            member.cancel()

    def abandon(self) -> None:
        """Let the background thread cancel the claims of a closed coroutine."""
        for member in self.members:
            member.abandon()

    def _all_at_once(self) -> None:
        """Enter the holds that the caller has, and claim all other keys at once."""
        rest: list[Acquisition] = []
        for member in self.members:
            member.hold = member.begin()
            if member.hold is None:
                rest.append(member)
        if len(rest) < 2:
            return
        backend = rest[0].backend
        sent = clock.now()
        claims = [member.claim for member in rest if member.claim is not None]
        for member, grant in zip(
            rest,
            Acquisition.ask_for(rest, backend.acquire_all, claims) or (),
            strict=False,
        ):
            member.hold = member.accept(grant, sent)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MultiLock(Lock):
    """A lock on several keys, as returned by ``db_lock()``.

    It is acquired when all keys are. All are requested at once, in one statement where
    the backend can. If one is busy, they are acquired one by one, in the order of their
    bytes and each in its queue. ``timeout`` covers all keys together. When it passes,
    the keys acquired so far are released. ``key`` lists all keys, for people.
    """

    _acquisition: ClassVar[Any] = MultiAcquisition
    # One lock per key, in order.
    locks: tuple[Lock, ...]

    def __post_init__(self) -> None:
        """Check nothing. The lock of each key checks itself."""

    @classmethod
    def of(cls, keys: Sequence[str], **options: Any) -> MultiLock:
        """Return the lock on the keys. A duplicate key counts once."""
        for key in keys:
            check_key(key)
        # Strings sort like their UTF-8, also behind a common prefix.
        ordered = sorted(set(keys))
        locks = tuple(Lock(key=key, **options) for key in ordered)
        # As the locks have them, with durations in seconds.
        policy = {name: getattr(locks[0], name) for name in options}
        return cls(key=", ".join(ordered), locks=locks, **policy)

    # These return the hold of several keys. Type checkers need to know.
    if TYPE_CHECKING:

        def acquire(self) -> MultiHold: ...
        def try_acquire(self) -> MultiHold | None: ...
        def __enter__(self) -> MultiHold: ...
        async def aacquire(self) -> MultiHold: ...
        async def atry_acquire(self) -> MultiHold | None: ...
        async def __aenter__(self) -> MultiHold: ...

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(lock.key for lock in self.locks)

    def __call__(self, function: Any) -> Any:
        raise TypeError(
            "A lock on several keys cannot be a decorator. Use 'with db_lock(…)' inside"
            " the function."
        )

    def holder(self) -> Any:
        """Return the holder of the first key that is held, or None."""
        return next(
            (holder for lock in self.locks if (holder := lock.holder()) is not None),
            None,
        )

    def locked(self) -> bool:
        """Return whether any of the keys is leased, by this caller or another."""
        return any(lock.locked() for lock in self.locks)

    def held(self) -> bool:
        """Return whether this caller holds all keys. This does no I/O."""
        last = last_acquired(self, current_caller())
        return (last is not None and last.held) or all(
            lock.held() for lock in self.locks
        )
