"""Locks on several keys: all of them or none.

The keys are acquired in one order, so that no two callers wait for each other.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dlocks.core.acquire import Attempt
from dlocks.core.callers import Caller
from dlocks.core.hold import Hold
from dlocks.core.lock import Lock
from dlocks.core.multi_hold import LossOfMember, MultiHold
from dlocks.core.policy import check_key
from dlocks.runtime import clock
from dlocks.runtime.delays import delays


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MultiLock(Lock):
    """A lock on several keys, as returned by ``db_lock()``.

    It is acquired when all keys are. All are requested at once, in one statement where
    the backend can. If one is busy, they are acquired one by one, in the order of their
    bytes and each in its queue. ``timeout`` covers all keys together. When it passes,
    the keys acquired so far are released. ``key`` lists all keys, for people.
    """

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

    def _attempt(
        self,
        caller: Caller,
        wake: Callable[[], object],
        *,
        wait: bool,
        here: bool = False,
    ) -> MultiAttempt:
        return MultiAttempt(self, caller, wake, wait=wait)


class MultiAttempt:
    """One caller's attempt at several keys, first at all of them at once.

    After that, each key has its own ``Attempt``.
    """

    attempts: Sequence[Attempt] = ()

    def __init__(
        self, lock: MultiLock, caller: Caller, wake: Callable[[], object], *, wait: bool
    ) -> None:
        self.lock = lock
        self.began = clock.now()
        self._on_lost = None if lock.on_lost is None else LossOfMember(lock.on_lost)
        locks = [dataclasses.replace(one, on_lost=self._on_lost) for one in lock.locks]
        self._new = partial(self._make, locks, caller, wake, wait)
        self._start()

    def _make(self, locks: Sequence[Lock], *arguments: Any) -> list[Attempt]:
        caller, wake, wait = arguments
        attempts = [Attempt(lock, caller, wake, wait=wait) for lock in locks]
        for attempt in attempts:
            attempt.began = self.began
        return attempts

    def _start(self) -> None:
        attempts = self._new()
        for attempt, earlier in zip(attempts, self.attempts, strict=False):
            # Keep the first prefix. A coroutine may continue in another thread.
            attempt.key = earlier.key
        self.attempts = attempts
        self.holds: dict[Attempt, Hold] = {}
        self.fresh = True

    @property
    def in_transaction(self) -> bool:
        return any(attempt.in_transaction for attempt in self.attempts)

    def once(self) -> Hold | None:
        """Try once, and return the hold or None."""
        if self.fresh:
            self.fresh = False
            self._all_at_once()
        for attempt in self.attempts:
            if attempt not in self.holds:
                hold = attempt.once()
                if hold is None:
                    return None
                self.holds[attempt] = hold
        if any(hold.count == 1 and not hold.held for hold in self.holds.values()):
            # A hold was lost during the wait. Acquiring it again now would violate the
            # order.
            self.cancel()
            self._start()
            return None
        hold = MultiHold(self.lock, [self.holds[attempt] for attempt in self.attempts])
        if self._on_lost is not None:
            self._on_lost.hold = weakref.ref(hold)
        return hold

    def waits_here(self, pause: float | None, wakeup: threading.Event) -> bool:
        return False

    def pause(self) -> float | None:
        """Return the seconds until the next try, or None for no limit.

        Raise LockTimeout when ``timeout`` has passed.
        """
        if self.fresh:
            return 0.0
        attempt = next(
            attempt for attempt in self.attempts if attempt not in self.holds
        )
        if attempt.timeout is not None and not attempt.paused:
            # The timeout is shared by all keys.
            attempt.delays = delays(max(clock.now(), self.began + attempt.timeout))
        return attempt.pause()

    def cancel(self) -> None:
        """Cancel the attempt, and leave no key acquired or queued."""
        for attempt in reversed(self.attempts):
            attempt.cancel()

    def close(self) -> None:
        """Let the background thread cancel the claims of a closed coroutine."""
        for attempt in self.attempts:
            attempt.close()

    def _all_at_once(self) -> None:
        """Enter the holds that the caller has, and claim all other keys at once."""
        rest: list[Attempt] = []
        for attempt in self.attempts:
            if (mine := attempt.begin()) is not None:
                self.holds[attempt] = mine
            else:
                rest.append(attempt)
        if len(rest) < 2:
            return
        backend = rest[0].backend
        sent = clock.now()
        claims = [attempt.claim for attempt in rest if attempt.claim is not None]
        for attempt, grant in zip(
            rest, Attempt.ask_for(rest, backend.acquire_all, claims) or (), strict=False
        ):
            if (hold := attempt.accept(grant, sent)) is not None:
                self.holds[attempt] = hold
