"""Several keys as one lock: all of them or none, in one order, so that no two callers wait for each other."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from dlocks import clock
from dlocks.exceptions import LockBackendError, LockError
from dlocks.holds import Caller, Hold, not_in_a_coroutine
from dlocks.locks import Attempt, Lock, check_key
from dlocks.transactions import open_connections
from dlocks.waiting import delays


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiLock(Lock):
    """
    What ``db_lock()`` returns for more than one key; to be used as any lock.

    It is had when all keys are. They are asked for at once, in one statement where the backend can; where one of them
    is busy, one after the other in the order of their bytes, each waited for in its line. ``timeout`` is for all
    together, and what was had already is given back when it has passed. ``key`` is all keys, for people to read.
    """

    # One for each key, in order.
    locks: tuple[Lock, ...]

    def __post_init__(self) -> None:
        """Check nothing: that is done for each key."""

    @classmethod
    def of(cls, keys: Sequence[str], *, using: str, **policy: Any) -> MultiLock:
        """Return the lock on the keys; one that is there twice counts once."""
        for key in keys:
            check_key(key)
        # Strings are ordered as their UTF-8 is, and no less so with a prefix before each.
        ordered = sorted(set(keys))
        locks = tuple(Lock(key=key, using=using, **policy) for key in ordered)
        return cls(key=", ".join(ordered), locks=locks, using=using, **policy)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(lock.key for lock in self.locks)

    def __call__(self, function: Any) -> Any:
        raise TypeError("A decorator takes the lock on one key; take several with 'with' inside the function.")

    def holder(self) -> Any:
        """Return who has the first of the keys that somebody has, or None."""
        return next((holder for lock in self.locks if (holder := lock.holder()) is not None), None)

    def locked(self) -> bool:
        """Return whether somebody's lease on one of the keys stands, this caller's too."""
        return any(lock.locked() for lock in self.locks)

    def _attempt(self, caller: Caller, ring: Callable[[], object], *, wait: bool, here: bool = False) -> MultiAttempt:
        return MultiAttempt(self, caller, ring, wait=wait)


class MultiHold(Hold):
    """
    The holding of several keys: ``holds`` has one for each, in their order.

    It is held while all of them are. ``tokens`` are the fencing tokens by key: give each thing that is guarded the
    token of its own key. ``token`` is the largest. Each ``acquire()`` returns one, to be released once.
    """

    def __init__(self, lock: MultiLock, holds: Sequence[Hold]) -> None:
        # Nothing is counted, renewed or lost here, but in the holds of the keys.
        self.lock = lock
        self.holds = tuple(holds)
        self.backend = holds[0].backend
        self.scope = holds[0].scope
        self.token = max(hold.token for hold in holds)
        self.waited = max(hold.waited for hold in holds)
        self._connection = holds[0]._connection
        self._mutex = threading.Lock()
        # What is still to leave, and the count of each inside.
        self._inside = [(hold, hold.count) for hold in holds]

    def __repr__(self) -> str:
        keys = ", ".join(map(repr, self.keys))
        return f"<MultiHold {keys} count={self.count} {'held' if self.held else 'ended or lost'}>"

    @property
    def _entries(self) -> int:
        return 1 if self._inside else 0

    @property
    def tokens(self) -> dict[str, int]:
        return {hold.key: hold.token for hold in self.holds}

    @property
    def owner(self) -> str:
        raise AttributeError("A hold of several keys has no owner of its own: each of its 'holds' has one.")

    @property
    def pinned(self) -> bool:
        return any(hold.pinned for hold in self.holds)

    @property
    def takeover(self) -> bool:  # type: ignore[override]
        return any(hold.takeover for hold in self.holds)

    @property
    def age(self) -> float:
        return max(hold.age for hold in self.holds)

    @contextmanager
    def atomic(self, *, using: str | None = None, **atomic: Any) -> Iterator[None]:
        with ExitStack() as guards:
            for number, hold in enumerate(self.holds):
                # The first opens the transaction; a durable one is not inside another.
                guards.enter_context(hold.atomic(using=using, **(atomic if number == 0 else {"savepoint": False})))
            yield

    def detach(self, *, within: float | None = None) -> str:
        raise RuntimeError("A hold of several keys cannot be handed over: hand its 'holds' over one by one.")

    @property
    def count(self) -> int:
        return min(hold.count for hold in self.holds)

    @property
    def held(self) -> bool:
        return bool(self._inside) and all(hold.held for hold in self.holds)

    @property
    def remaining(self) -> float:
        return min(hold.remaining for hold in self.holds) if self._inside else 0.0

    @property
    def waiting(self) -> int:
        """How many callers stand in line for the keys now; see ``Hold``."""
        return sum(hold.waiting for hold in self.holds)

    def check(self) -> None:
        """Ask the backend whether all keys are still this hold's; raise LockLost when not."""
        not_in_a_coroutine()
        if not (self.held and self._is_alike and self._ask(self.backend.check_all, self._claims)):
            for hold in self.holds:
                hold.check()

    def renew(self) -> None:
        """Extend all leases to their ttl from now; raise LockLost when one is gone."""
        not_in_a_coroutine()
        if self.held and self._is_alike and self.scope == "lease" and not self.pinned:
            sent = clock.now()
            left = self._ask(self.backend.renew, [hold.next_claim() for hold in self.holds])
            for hold in self.holds:
                hold.renewed(sent, left)
        else:
            for hold in self.holds:
                hold.renew()

    def release(self, *, failed: bool = False) -> None:
        """Leave each key once, as ``Hold.release()`` does; what is wrong with one does not keep the others."""
        not_in_a_coroutine()
        inside = self._inside
        # Before the block: what a tracer raises in an inlined comprehension passes the handlers by (CPython 3.12).
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
            # Interrupted on the way: no key must stay taken for that.
            self._inside = []
            for hold, count in inside:
                with suppress(LockError):
                    if hold.count >= count:
                        hold.release(failed=True)
                    elif count == 1:
                        hold.abandon()
                        hold.take_back()
            raise

    # Inside.

    @property
    def _is_alike(self) -> bool:
        """Whether the keys can be asked about in one question."""
        return len({hold.scope for hold in self.holds}) == 1

    @property
    def _claims(self) -> list[Any]:
        return [hold.claim for hold in self.holds]

    def _release(self, holds: Sequence[Hold], *, failed: bool) -> None:
        together: list[Hold] = []
        leaves_nothing = self.backend.lease_refused() is None and not any(hold.pinned for hold in holds)
        if not all(hold.leaves_at_exit for hold in holds):
            leaves_nothing = leaves_nothing and not any(open_connections())
        if self._is_alike and (self.scope == "transaction" or leaves_nothing):
            together = [hold for hold in holds if hold.end_with_others(failed=failed)]
        done = False
        trouble: LockError | None = None
        if len(together) > 1:
            try:
                done = self._ask(self.backend.release_all, [hold.claim for hold in together], failed=failed)
            except LockBackendError as error:
                # In a transaction it is broken, and each hold knows what that means.
                if self.scope == "lease":
                    trouble = error
                    holds = [hold for hold in holds if hold not in together]
        for hold in holds:
            try:
                if hold in together:
                    hold.give_back(done=done)
                else:
                    hold.release(failed=failed)
            except LockError as error:
                trouble = trouble or error
        if trouble is not None:
            raise trouble


class MultiAttempt:
    """One caller's way to a hold of several keys: that of an attempt at each, and first one at all of them."""

    def __init__(self, lock: MultiLock, caller: Caller, ring: Callable[[], object], *, wait: bool) -> None:
        self.lock = lock
        self.began = clock.now()
        self._on_lost = None if lock.on_lost is None else _OnLost(lock.on_lost)
        locks = [dataclasses.replace(one, on_lost=self._on_lost) for one in lock.locks]
        self._new = partial(self._make, locks, caller, ring, wait)
        self._start()

    def _make(self, locks: Sequence[Lock], *arguments: Any) -> list[Attempt]:
        caller, ring, wait = arguments
        attempts = [Attempt(lock, caller, ring, wait=wait) for lock in locks]
        for attempt in attempts:
            attempt.began = self.began
        return attempts

    def _start(self) -> None:
        self.attempts = self._new()
        self.holds: dict[Attempt, Hold] = {}
        self.fresh = True

    @property
    def in_transaction(self) -> bool:
        return any(attempt.in_transaction for attempt in self.attempts)

    def once(self) -> Hold | None:
        """Try once."""
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
            # Lost while the others were waited for. Not to be had anew behind them: the order would be wrong.
            self.give_up()
            self._start()
            return None
        hold = MultiHold(self.lock, [self.holds[attempt] for attempt in self.attempts])
        if self._on_lost is not None:
            self._on_lost.hold = weakref.ref(hold)
        return hold

    def waits_here(self, pause: float | None, bell: threading.Event) -> bool:
        return False

    def pause(self) -> float | None:
        """Return how long to wait before the next try, None for ever; raise LockTimeout when the time is over."""
        if self.fresh:
            return 0.0
        attempt = next(attempt for attempt in self.attempts if attempt not in self.holds)
        if attempt.timeout is not None and not attempt.paused:
            # What is left of the time for all of them.
            attempt.delays = delays(max(clock.now(), self.began + attempt.timeout))
        return attempt.pause()

    def give_up(self) -> None:
        """Leave nothing behind of an attempt that came to nothing."""
        for attempt in reversed(self.attempts):
            attempt.give_up()

    def close(self) -> None:
        """Have the room give up for those that cannot do so themselves."""
        for attempt in self.attempts:
            attempt.close()

    def _all_at_once(self) -> None:
        """Enter what the caller has, and claim all the rest in one step."""
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
        for attempt, grant in zip(rest, Attempt.ask_for(rest, backend.acquire_all, claims) or (), strict=False):
            if (hold := attempt.accept(grant, sent)) is not None:
                self.holds[attempt] = hold


class _OnLost:
    """Tells of a hold of several keys that is lost: once, however many of them are."""

    def __init__(self, on_lost: Callable[[Hold], object]) -> None:
        self.on_lost = on_lost
        # Weak, since a hold that nobody has is in nobody's way. None: its caller never learned of it.
        self.hold: Callable[[], Hold | None] | None = None
        self._mutex = threading.Lock()

    def __call__(self, lost: Hold) -> None:
        with self._mutex:
            hold, self.hold = self.hold and self.hold(), None
        if hold is not None:
            self.on_lost(hold)
