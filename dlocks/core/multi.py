"""Locks on several keys: all of them or none.

The keys are acquired in one order, so that no two callers wait for each other.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dlocks.core.guard import guarded
from dlocks.core.hold import Caller, Hold, ensure_sync
from dlocks.core.lock import Attempt, Lock, check_key
from dlocks.exceptions import LockBackendError, LockError
from dlocks.runtime import clock
from dlocks.runtime.delays import delays
from dlocks.transactions import open_connections
from dlocks.values import Duration


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


class MultiHold(Hold):
    """The holding of several keys, with one hold per key in ``holds``.

    It is held while all of them are. ``tokens`` has the fencing token of each key, for
    what that key guards. ``token`` is the largest. Each ``acquire()`` returns a new
    object, to be released once.
    """

    def __init__(self, lock: MultiLock, holds: Sequence[Hold]) -> None:
        # The holds of the keys count, renew and report losses.
        self.lock = lock
        self.holds = tuple(holds)
        self.backend = holds[0].backend
        self.scope = holds[0].scope
        self.token = max(hold.token for hold in holds)
        self.waited = max(hold.waited for hold in holds)
        self._connection = holds[0]._connection
        self._mutex = threading.Lock()
        # Holds that are still to be released, each with its count inside.
        self._inside = [(hold, hold.count) for hold in holds]

    def __repr__(self) -> str:
        keys = ", ".join(map(repr, self.keys))
        return (
            f"<MultiHold {keys} count={self.count}"
            f" {'held' if self.held else 'ended or lost'}>"
        )

    @property
    def _entries(self) -> int:
        return 1 if self._inside else 0

    @property
    def tokens(self) -> dict[str, int]:
        return {hold.key: hold.token for hold in self.holds}

    @property
    def owner(self) -> str:
        raise AttributeError(
            "A hold of several keys has no single owner. Each hold in 'holds' has one."
        )

    @property
    def pinned(self) -> bool:
        return any(hold.pinned for hold in self.holds)

    @property
    def takeover(self) -> bool:  # type: ignore[override]
        return any(hold.takeover for hold in self.holds)

    @property
    def age(self) -> float:
        return max(hold.age for hold in self.holds)

    def atomic(
        self, *, using: str | None = None, **atomic: Any
    ) -> AbstractContextManager[None]:
        return guarded(self.holds, using, atomic)

    def detach(self, *, within: Duration | None = None) -> str:
        raise RuntimeError(
            "A hold of several keys cannot be handed over. Detach each hold in 'holds'"
            " instead."
        )

    @property
    def count(self) -> int:
        return min(hold.count for hold in self.holds)

    @property
    def held(self) -> bool:
        return bool(self._inside) and all(hold.held for hold in self.holds)

    @property
    def remaining(self) -> float:
        return min(hold.remaining for hold in self.holds) if self._inside else 0.0

    def queue_length(self) -> int:
        """Return the number of callers that are queued for the keys now."""
        return sum(hold.queue_length() for hold in self.holds)

    def check(self) -> None:
        """Check with the backend that all keys are held, or raise LockLost."""
        ensure_sync()
        if not (
            self.held
            and self._is_alike
            and self._ask(self.backend.verify, self._claims)
        ):
            for hold in self.holds:
                hold.check()

    def renew(self) -> None:
        """Extend all leases to their ttl from now, or raise LockLost."""
        ensure_sync()
        if self.held and self._is_alike and self.scope == "lease" and not self.pinned:
            sent = clock.now()
            left = self._ask(
                self.backend.renew, [hold.next_claim() for hold in self.holds]
            )
            for hold in self.holds:
                hold.renewed(sent, left)
        else:
            for hold in self.holds:
                hold.renew()

    def release(self, *, failed: bool = False) -> None:
        """Release each key once, even if the release of another fails."""
        ensure_sync()
        inside = self._inside
        # Outside of the block, because an exception of a tracer in an inlined
        # comprehension bypasses the handlers (CPython 3.12).
        holds = [hold for hold, _ in inside]
        try:
            with self._mutex:
                if self._inside is not inside:
                    return
                self._inside = []
            self._release(holds, failed=failed)
        except LockError:
            raise
        except BaseException:
            # An interrupted release must leave no key acquired.
            self._inside = []
            for hold, count in inside:
                with suppress(LockError):
                    if hold.count >= count:
                        hold.release(failed=True)
                    elif count == 1:
                        hold.discard()
                        hold.release_again()
            raise

    # Internal methods.

    @property
    def _is_alike(self) -> bool:
        """Return whether one request can cover all keys."""
        return len({hold.scope for hold in self.holds}) == 1

    @property
    def _claims(self) -> list[Any]:
        return [hold.claim for hold in self.holds]

    def _leaves_nothing(self, holds: Sequence[Hold]) -> bool:
        """Return whether no open transaction needs the leases."""
        if self.pinned or self.backend.refusal(self.holds[0].claim):
            return False
        return all(hold.leaves_at_exit for hold in holds) or not open_connections()

    def _release(self, holds: Sequence[Hold], *, failed: bool) -> None:
        together: list[Hold] = []
        if self._is_alike and (
            self.scope == "transaction" or self._leaves_nothing(holds)
        ):
            together = [hold for hold in holds if hold.end_with_others(failed=failed)]
        done = False
        trouble: LockError | None = None
        if len(together) > 1:
            try:
                done = self._ask(
                    self.backend.release_all,
                    [hold.claim for hold in together],
                    failed=failed,
                )
            except LockBackendError as error:
                # In a transaction, which is broken now, each hold handles this itself.
                if self.scope == "lease":
                    trouble = error
                    holds = [hold for hold in holds if hold not in together]
        for hold in holds:
            try:
                if hold in together:
                    hold.release_claim(done=done)
                else:
                    hold.release(failed=failed)
            except LockError as error:
                trouble = trouble or error
        if trouble is not None:
            raise trouble


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
        self._on_lost = None if lock.on_lost is None else _LossOfMember(lock.on_lost)
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


class _LossOfMember:
    """A callback that reports the loss of a hold of several keys only once."""

    def __init__(self, on_lost: Callable[[Hold], object]) -> None:
        self.on_lost = on_lost
        # Weak, so that a forgotten hold can end. None until the caller has the hold.
        self.hold: Callable[[], Hold | None] | None = None
        self._mutex = threading.Lock()

    def __call__(self, lost: Hold) -> None:
        with self._mutex:
            hold, self.hold = self.hold and self.hold(), None
        if hold is not None:
            self.on_lost(hold)
