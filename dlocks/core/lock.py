"""Locks: a key and a policy, immutable and shareable."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Never, Protocol, TypeVar, cast

from dlocks.backends.base import (
    ANY_LEASE,
    HANDOVER_LEASE,
    Backend,
    TableLockedError,
    UnstorableKeyError,
    is_outside,
)
from dlocks.conf import DEFAULT_ALIAS, backends
from dlocks.core.hold import Caller, Hold, current_caller, hold_by, holds_by_caller
from dlocks.exceptions import LockBackendError, LockError, LockNotAwaitable, LockTimeout
from dlocks.runtime import clock
from dlocks.runtime.connected import connection_of
from dlocks.runtime.coroutines import (
    acquiring,
    refuse_in_a_coroutine,
    run_in_sync_thread,
    waiting_for_a_lock,
)
from dlocks.runtime.delays import FIRST_DELAY, delays
from dlocks.runtime.keeper import OUTSIDE_TIMEOUT, keeper
from dlocks.runtime.waiter import Waiter
from dlocks.runtime.waiters import waiters_of
from dlocks.signals import send_acquired, send_ended, send_timed_out
from dlocks.text import permits_taken
from dlocks.transactions import TransactionMarker, warn_of_old_snapshots
from dlocks.values import KEY_LENGTH, UNLIMITED, Claim, Grant, Holder, Scope, seconds

A = TypeVar("A")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger("dlocks")

GENERATORS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class _FromSettings:
    """The value of an argument that was not given: the alias's settings decide."""

    def __repr__(self) -> str:
        return "<from settings>"

    def __reduce__(self) -> str:
        return "FROM_SETTINGS"


FROM_SETTINGS = _FromSettings()

# Names that locks of other libraries have, and that the hold has here.
OF_THE_HOLD = {
    "release",
    "arelease",
    "renew",
    "arenew",
    "check",
    "acheck",
    "held",
    "remaining",
    "token",
    "owner",
    "atomic",
}


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Lock:
    """A key and a policy, as returned by ``db_lock()``."""

    key: str
    using: str = DEFAULT_ALIAS
    timeout: float | _FromSettings | None = FROM_SETTINGS
    ttl: float | _FromSettings = FROM_SETTINGS
    renew: bool = True
    reentrant: bool = True
    scope: Scope | None = None
    max_hold: float | None = None
    min_hold: float = 0.0
    takeover: bool = True
    fair: bool = True
    shared: bool = False
    permits: int = UNLIMITED
    release_at: Literal["transaction", "exit"] = "transaction"
    on_lost: Callable[[Hold], object] | None = None

    def __post_init__(self) -> None:
        check_key(self.key)
        if not isinstance(self.timeout, _FromSettings) and self.timeout is not None:
            self._in_seconds("timeout")
        if not isinstance(self.ttl, _FromSettings):
            self._in_seconds("ttl", above_zero=True)
        if self.max_hold is not None:
            self._in_seconds("max_hold", above_zero=True)
        self._in_seconds("min_hold")
        if self.max_hold is not None and self.min_hold > self.max_hold:
            raise ValueError(
                f"min_hold must not be greater than max_hold: {shown(self.min_hold)} s"
                f" and {shown(self.max_hold)} s"
            )
        for name in ("renew", "reentrant", "takeover", "fair", "shared"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {value!r}")
        if self.scope not in {None, "lease", "transaction"}:
            raise ValueError(
                f"scope must be 'lease', 'transaction' or None, not {self.scope!r}"
            )
        if self.release_at not in {"transaction", "exit"}:
            raise ValueError(
                f"release_at must be 'transaction' or 'exit', not {self.release_at!r}"
            )
        if isinstance(self.permits, bool) or not isinstance(self.permits, int):
            raise TypeError(
                f"permits must be an int, not {type(self.permits).__name__}"
            )
        if not 1 <= self.permits <= UNLIMITED:
            raise ValueError(
                f"permits must be between 1 and {UNLIMITED}, not {self.permits}"
            )
        if self.on_lost is not None:
            if not callable(self.on_lost):
                raise TypeError(
                    f"on_lost must be callable, not {type(self.on_lost).__name__}"
                )
            if inspect.iscoroutinefunction(self.on_lost):
                raise TypeError(
                    "on_lost cannot be a coroutine function, because it is called in a"
                    " thread without an event loop."
                )

    def _in_seconds(self, name: str, *, above_zero: bool = False) -> None:
        """Check a duration, and replace a ``timedelta`` by its seconds."""
        value = getattr(self, name)
        number = seconds(name, value, above_zero=above_zero)
        if isinstance(value, timedelta):
            object.__setattr__(self, name, number)

    def __repr__(self) -> str:
        keys = ", ".join(map(repr, self.keys))
        return f"<{type(self).__name__} {keys}{changed_options(self)}>"

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the key, or all keys of a lock on several."""
        return (self.key,)

    def acquire(self) -> Hold:
        """Wait for the key up to ``timeout``, and return the hold.

        Raise LockTimeout when the key is still not free.
        """
        return self._acquire(current_caller(), wait=True)

    def try_acquire(self) -> Hold | None:
        """Try once, without waiting. Return None if another caller holds the key."""
        try:
            return self._acquire(current_caller(), wait=False)
        except LockTimeout:
            return None

    def holder(self) -> Holder | None:
        """Return the holder of the key, or None.

        A key that a transaction has acquired is not visible until the transaction ends.
        """
        backend = backends[self.using]
        ask = partial(backend.holder, self._full_key(backend))
        return _run_outside(ask, backend, OUTSIDE_TIMEOUT)

    def locked(self) -> bool:
        """Return whether the key is leased, by this caller or another."""
        holder = self.holder()
        return holder is not None and not holder.stale

    def __enter__(self) -> Hold:
        hold = None
        entered = _entered.setdefault(current_caller(), [])
        depth = len(entered)
        try:
            hold = self.acquire()
            entered.append(_Entry(self, hold, hold.count, entered, _generator()))
            return hold
        except BaseException:
            del entered[depth:]
            if hold is not None:
                with suppress(LockError):
                    hold.release(failed=True)
            raise

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        entry = None
        try:
            entry = self._innermost(_generator())
            entry.hold.exit(error)
            entry.forget()
        except BaseException as trouble:
            entry = entry or self._innermost(_generator())
            # Interrupted, perhaps before anything was done. Leave all the same.
            if (
                not isinstance(trouble, LockError)
                and entry.there
                and entry.hold.count >= entry.count
            ):
                with suppress(Exception):
                    entry.hold.release(failed=True)
            entry.forget()
            raise

    def __call__(self, function: F) -> F:
        """Decorate a function. See ``db_lock()``.

        The fields of the key are filled from the arguments of the call.
        """
        return cast("F", decorate_with[0](self, function))

    # The same methods for coroutines. Each step runs in Django's sync thread, and the
    # coroutine waits.

    async def aacquire(self) -> Hold:
        return await self._aacquire(wait=True)

    async def atry_acquire(self) -> Hold | None:
        try:
            return await self._aacquire(wait=False)
        except LockTimeout:
            return None

    async def aholder(self) -> Holder | None:
        return await run_in_sync_thread(
            self.holder, in_transaction_only=not backends[self.using].has_fixed_prefix
        )

    async def alocked(self) -> bool:
        return await run_in_sync_thread(
            self.locked, in_transaction_only=not backends[self.using].has_fixed_prefix
        )

    async def __aenter__(self) -> Hold:
        hold = await self.aacquire()
        entered = _entered.setdefault(current_caller(), [])
        entered.append(_Entry(self, hold, hold.count, entered, _generator()))
        return hold

    async def __aexit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        entry = self._innermost(_generator())
        entry.forget()
        await entry.hold.aleave(error)

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

    def _acquire(self, caller: Caller, *, wait: bool) -> Hold:
        refuse_in_a_coroutine("'async with', or 'await lock.aacquire()'")
        wakeup = _Wakeup()
        attempt = self._attempt(caller, wakeup.wake, wait=wait, here=True)
        try:
            try:
                while True:
                    hold = attempt.once()
                    if hold is not None:
                        return hold
                    # Any thread that may set the event learns of this caller later.
                    event = wakeup.event = wakeup.event or threading.Event()
                    pause = attempt.pause()
                    with waiting_for_a_lock():
                        if not attempt.waits_here(pause, event):
                            clock.rest(event, pause)
            except BaseException:
                attempt.cancel()
                raise
        except BaseException:
            # Once more, because an interrupt may have hit the first call.
            attempt.cancel()
            raise

    async def _aacquire(self, *, wait: bool) -> Hold:
        wakeup = asyncio.Event()
        wake = partial(wake_in, asyncio.get_running_loop(), wakeup)
        caller = current_caller()
        if backends[self.using].has_fixed_prefix:
            attempt = self._attempt(caller, wake, wait=wait)
        else:
            # The prefix may depend on Django's connections, which belong to Django's
            # sync thread.
            attempt = await run_in_sync_thread(
                partial(self._attempt, caller, wake, wait=wait),
                in_transaction_only=True,
            )
        acquiring.add(caller)
        try:
            while True:
                hold = await run_in_sync_thread(
                    attempt.once, in_transaction_only=attempt.in_transaction
                )
                if hold is not None:
                    return hold
                pause = await run_in_sync_thread(
                    attempt.pause, in_transaction_only=attempt.in_transaction
                )
                await clock.arest(wakeup, pause)
        except GeneratorExit:
            # For example, the garbage collector closes a task whose loop was closed.
            # Nothing can be awaited.
            attempt.close()
            raise
        except BaseException:
            await run_in_sync_thread(
                attempt.cancel, in_transaction_only=attempt.in_transaction
            )
            raise
        finally:
            acquiring.discard(caller)

    def _attempt(
        self,
        caller: Caller,
        wake: Callable[[], object],
        *,
        wait: bool,
        here: bool = False,
    ) -> Trying:
        return Attempt(self, caller, wake, wait=wait, here=here)

    def _full_key(self, backend: Backend) -> str:
        key = backend.prefix + self.key
        if len(key) > KEY_LENGTH:
            raise ValueError(
                f"A key can have at most {KEY_LENGTH} characters with its prefix, not"
                f" {len(key)}: {key!r}"
            )
        return key

    def _innermost(self, generator: int | None) -> _Entry:
        """Return the block that ends now.

        This is the one in its generator, or else the caller's last one.
        """
        mine = [
            entry
            for entry in reversed(_entered.get(current_caller(), []))
            if entry.lock is self
        ]
        for entry in mine:
            if entry.generator == generator:
                return entry
        # Another caller may close an unfinished generator. asyncio has a task for that.
        blocks: dict[Any, list[_Entry]] = _entered.data  # type: ignore[attr-defined]
        others = [
            entry
            for entered in list(blocks.values())
            for entry in list(entered)
            if entry.lock is self
        ]
        for entry in others if generator is not None else ():
            if entry.generator == generator:
                return entry
        if mine or len(others) == 1:
            return (mine or others)[0]
        raise RuntimeError(
            f"The 'with' block of {self.key!r} must end in the thread or task in which"
            " it began."
        )


# The function that puts a function under a lock. The module of the decorators adds it,
# because it imports this module.
decorate_with: list[Callable[[Lock, Any], Any]] = []


class _Wakeup:
    """An event that wakes a waiting thread, created when it is first needed."""

    event: threading.Event | None = None

    def wake(self) -> None:
        if self.event is not None:
            self.event.set()


@dataclass(slots=True, eq=False)
class _Entry:
    """One block that a caller is in.

    ``count`` is the hold's count inside the block. ``generator`` identifies the
    generator around it.
    """

    lock: Lock
    hold: Hold
    count: int
    entered: list[_Entry]
    generator: int | None

    @property
    def there(self) -> bool:
        """Return whether the end of the block has not been seen yet."""
        return self in self.entered

    def forget(self) -> None:
        if self.there:
            self.entered.remove(self)


def _generator() -> int | None:
    """Return the identity of the generator around a block, or None."""
    # The frame stays the same, whichever caller resumes or closes the generator.
    frame = sys._getframe(2)
    return id(frame) if frame.f_code.co_flags & GENERATORS else None


class Trying(Protocol):
    """The steps in which one caller acquires a lock. See ``Attempt``."""

    @property
    def in_transaction(self) -> bool: ...
    def once(self) -> Hold | None: ...
    def pause(self) -> float | None: ...
    def waits_here(self, pause: float | None, wakeup: threading.Event) -> bool: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


class Attempt:
    """One caller's attempt to acquire a lock.

    It enters the caller's hold, or claims the key and waits for it. ``wake`` is called,
    in any thread, when a retry before the end of a pause is worthwhile.
    """

    paused = False
    # The pauses between tries, where there is no queue.
    delays: Iterator[float] | None = None
    claim: Claim | None = None
    hold: Hold | None = None
    asked = False
    # Whether a request may have been granted unnoticed, and whether the last one was
    # granted.
    unknown = False
    granted = False
    # Set while the claim is queued, and whether to retry once more after a
    # notification.
    waiter: Waiter | None = None
    asks_again = False
    # The hold that this attempt enters again, and its count before that.
    entering: Hold | None = None
    count_before = 0

    def __init__(
        self,
        lock: Lock,
        caller: Caller,
        wake: Callable[[], object],
        *,
        wait: bool,
        here: bool = False,
    ) -> None:
        self.lock = lock
        # Whether the caller's thread is free to wait.
        self.here = here
        self.caller = caller
        self.wake = wake
        self.backend = backends[lock.using]
        timeout = (
            self.backend.timeout
            if isinstance(lock.timeout, _FromSettings)
            else lock.timeout
        )
        self.timeout = timeout if wait else 0.0
        self.key = lock._full_key(self.backend)
        self.began = clock.now()

    @property
    def in_transaction(self) -> bool:
        """Return whether the claim is to be part of the caller's transaction."""
        return self.lock.scope == "transaction" or (
            self.claim is not None and self.claim.scope == "transaction"
        )

    def once(self) -> Hold | None:
        """Try once, and return the hold or None."""
        if self.claim is not None and self._kept_for() == 0:
            # The caller can now enter the hold that it left. Waiting would be in vain.
            self.cancel()
            self.claim = None
        if self.claim is None and (mine := self.begin()) is not None:
            return mine
        claim = self.claim or self._claim()
        if (
            self.waiter is not None
            and (hold := self._granted_by_notification(claim, self.waiter)) is not None
        ):
            return hold
        if self._should_queue(claim) or (
            self.waiter is not None and self.waiter.seated and not self.waiter.woken
        ):
            # A grant by the queue also ends the claim's position. A direct request
            # would leave it behind.
            return None
        sent = clock.now()
        grant = self.ask_for([self], self.backend.acquire, claim)
        return None if grant is None else self.accept(grant, sent)

    def begin(self) -> Hold | None:
        """Enter and return the hold that the caller has, or else make the claim."""
        mine = self._own_hold()
        if mine is not None and self._enter(mine):
            return mine
        self.claim = self._claim()
        connect = self.backend.connect_first
        if connect is not None and not keeper.keeps_for(self.caller):
            # Connect before waiting. Otherwise the callers behind this one may use up
            # the pool before its turn. A caller that holds a lock must not wait for the
            # pool, because waiters for that lock may have used it up.
            connect()
        return None

    @staticmethod
    def ask_for(
        attempts: Sequence[Attempt], acquire: Callable[[A], T | None], claimed: A
    ) -> T | None:
        """Request the claims, and record whether they may have been granted."""
        for attempt in attempts:
            attempt.asked = attempt.unknown = True
            attempt.granted = False
        answer: T | None = None
        try:
            answer = attempts[0]._ask(acquire, claimed)
        except TableLockedError:
            for attempt in attempts:
                # A release would wait for the table too, and end the caller's
                # transaction.
                attempt.unknown = not attempt.in_transaction
            raise
        except LockBackendError:
            raise
        except (LockError, RuntimeError, UnstorableKeyError) as refusal:
            # A refused request has granted nothing to release. For a lease, a
            # RuntimeError is no refusal. A signal handler has raised it.
            for attempt in attempts:
                attempt.unknown = (
                    isinstance(refusal, RuntimeError) and not attempt.in_transaction
                )
            if not (
                isinstance(refusal, LockNotAwaitable)
                and all(attempt.timeout == 0 for attempt in attempts)
            ):
                raise
        for attempt in attempts:
            attempt.unknown = attempt.granted = answer is not None
        return answer

    def accept(self, grant: Grant, sent: float) -> Hold | None:
        """Return the granted hold, or None if it expired before the reply came."""
        claim = self.claim or self._claim()
        lease = claim.ttl if grant.lease is None else min(grant.lease, claim.ttl)
        if claim.scope == "lease" and clock.now() >= sent + lease:
            self.cancel()
            self.claim = self._claim()
            return None
        return self._hold(claim, grant, sent)

    def pause(self) -> float | None:
        """Return the seconds until the next try, or None for no limit.

        Raise LockTimeout when ``timeout`` has passed.
        """
        pause, kept = self._pause(), self._kept_for()
        return pause if kept is None else kept if pause is None else min(pause, kept)

    def _kept_for(self) -> float | None:
        """Return the seconds for which the caller's own left hold keeps the key.

        Return None if the caller has left no hold in a transaction.
        """
        mine = hold_by((self.caller, self.backend.identity, self.key, self.lock.shared))
        if mine is None or not mine.is_left:
            return None
        return max(0.0, mine.lock.min_hold - mine.age)

    def _pause(self) -> float | None:
        left = None if self.timeout is None else self.began + self.timeout - clock.now()
        claim = self.claim if self.backend.supports_queue else None
        if (
            self.waiter is None
            and claim is not None
            and claim.fair
            and (left is None or left > 0)
        ):
            self.paused = True
            if self._join_queue(claim):
                return 0.0
        if self.waiter is None:
            if self.delays is None:
                self.delays = delays(
                    None if self.timeout is None else self.began + self.timeout
                )
            delay = next(self.delays, None)
            if delay is not None:
                self.paused = True
                return delay
            if claim is not None and not self.asked:
                # It was too late to join the queue first. No reply has said yet that
                # the key is held.
                self.paused = True
                return 0.0
        elif left is None or left > 0:
            if self.waiter.woken and not self.asks_again:
                # Its turn has come, but the row was locked, for example. That is most
                # likely brief.
                self.asks_again = True
                return FIRST_DELAY if left is None else min(FIRST_DELAY, left)
            if self.waiter.notifier is None and (
                not self.waiter.seated or self.waiter.woken
            ):
                # The row is still locked, or the waiter was late. It returns to its
                # position.
                self.waiter.woken = 0.0
                waiters_of(self.backend).mark_queued(self.waiter)
            self.asks_again = False
            return left
        elif left > -HANDOVER_LEASE and self._granted_on_last_poll(self.waiter):
            # Retry at once. If the row is locked then, pause first.
            delay, self.asks_again = (FIRST_DELAY if self.asks_again else 0.0), True
            return delay
        holder, who = None, ""
        with suppress(LockBackendError):
            holder, who = _run_outside(
                self._current_holder, self.backend, OUTSIDE_TIMEOUT
            )
        send_timed_out(self.lock, holder, clock.now() - self.began)
        when = f"within {shown(self.timeout)} s" if self.timeout else "without waiting"
        who = who or "held by an open transaction, or just released"
        raise LockTimeout(
            f"{self.lock.key!r} could not be acquired {when}: {who}",
            key=self.lock.key,
            timeout=self.timeout,
            holder=holder,
        )

    def _current_holder(self) -> tuple[Holder | None, str]:
        """Return a holder of the key, and a phrase that names all holders.

        Another caller is preferred to this one.
        """
        if self.lock.permits < UNLIMITED:
            sharers, waiting = self.backend.inspector.sharers(self.key)
            if sharers:
                own = _own_holder_name()
                other = next((one for one in sharers if one.holder != own), sharers[0])
                return other, permits_taken(
                    self.lock.permits, sharers, waiting - (self.waiter is not None)
                )
        holder = self.backend.holder(self.key)
        return holder, "" if holder is None else f"held by {holder}"

    def waits_here(self, pause: float | None, wakeup: threading.Event) -> bool:
        """Wait in this thread, if it can be notified itself.

        Return False where another thread sets ``wakeup``.
        """
        waiter = self.waiter
        if waiter is None or pause == 0:
            return False
        if waiter.listens and not clock.is_frozen():
            until = None if pause is None else clock.now() + pause
            if not waiters_of(self.backend).listen(wakeup, until):
                clock.rest(
                    wakeup, None if until is None else max(0.0, until - clock.now())
                )
            wakeup.clear()
            return True
        if waiter.notifier is None:
            return False
        timeout = math.inf if pause is None else pause
        if not waiter.notifier.wait(timeout, [waiter.claim]):
            # The position was lost. Retry, and join the queue again.
            self.waiter, self.unknown = None, True
        return True

    def cancel(self) -> None:
        """Cancel the attempt, and leave nothing acquired or queued."""
        if self.entering is not None:
            self.entering.revert_entry(self.count_before)
        waiter = self.waiter
        if waiter is not None:
            waiters_of(self.backend).remove(waiter)
        if self.claim is None or not (self.unknown or waiter is not None):
            return
        ended = self.hold is not None and self.hold.discard()
        release = partial(self.backend.release, self.claim, failed=True)
        try:
            if waiter is None:
                self._ask(release)
            elif not self._given_back_inside(release):
                _run_outside(release, self.backend, OUTSIDE_TIMEOUT)
        except LockError as trouble:
            logger.warning(
                "The claim on %r could not be cancelled, and expires by itself: %s",
                self.lock.key,
                trouble,
            )
        self.unknown, self.waiter = False, None
        if ended and self.hold is not None:
            send_ended(self.hold, "released")

    def close(self) -> None:
        """Let the background thread cancel the claim of a closed coroutine."""
        if self.waiter is not None:
            self.waiter.closed = True

    def _should_queue(self, claim: Claim) -> bool:
        """Return whether to join the queue before the first request.

        It is better if other callers were queued a moment ago.
        """
        waits = self.waiter is None and not self.paused and self.timeout != 0
        if not (
            waits
            and claim.fair
            and claim.takeover
            and not claim.beside
            and claim.key in self.backend.contended
        ):
            return False
        # No caller can queue in the transaction of a single writer. The request reports
        # that.
        return claim.scope == "lease" or self.backend.refusal(ANY_LEASE) is None

    def _join_queue(self, claim: Claim) -> bool:
        """Join the queue, and return whether there is something to try at once."""
        room = waiters_of(self.backend)
        until = math.inf if self.timeout is None else self.began + self.timeout
        self.waiter = waiter = Waiter(claim, self.wake, self.caller, until)
        notifier = self.backend.notifier("") if self.here else None
        if notifier is not None:
            place = _run_outside(partial(self.backend.enqueue, claim), self.backend)
            if place is not None and place.own_thread:
                waiter.notifier = notifier
                return place.must_retry
        waiter.listens = self.here
        room.enter(waiter)
        sent = clock.now()
        patience = (
            None if self.timeout is None else max(0.0, until - sent) + OUTSIDE_TIMEOUT
        )
        enqueue = partial(self.backend.enqueue, claim, room.channel)
        place = _run_outside(enqueue, self.backend, patience)
        if place is None or (place.must_retry and place.position is None):
            # Queueing is not possible at the moment, or not necessary.
            room.remove(waiter)
            self.waiter, self.unknown = None, place is not None
            return place is not None
        at_once = waiter.apply(place, sent)
        # In any case, because the first try may fail while another session reads the
        # row.
        room.mark_queued(waiter)
        return at_once

    def _granted_on_last_poll(self, waiter: Waiter) -> bool:
        """Return whether the key was granted at the last moment, or can be now."""
        for _ in range(2):
            sent = clock.now()
            look = partial(self.backend.poll, [waiter.claim], heartbeat=False)
            places = _run_outside(look, self.backend, OUTSIDE_TIMEOUT)
            place = places.get(waiter.claim.owner)
            if place is None or place.grant is not None or place.must_retry:
                return place is not None and waiter.apply(place, sent)
            if place.ahead:
                break
            # This poll has handed a free key on. The next one shows to which claim.
        return False

    def _granted_by_notification(self, claim: Claim, waiter: Waiter) -> Hold | None:
        """Return the hold granted by the queue, or None if it must be requested."""
        if waiter.error is not None:
            raise waiter.error
        given, waiter.given = waiter.given, None
        if (
            given is None
            or claim.scope != "lease"
            or not self.lock.renew
            or not self.backend.grants_in_queue
        ):
            # The queue grants a short lease, which the keeper has to renew.
            return None
        grant, sent = given
        if (
            grant.lease is None
            or sent + grant.lease - clock.now() < min(claim.ttl, HANDOVER_LEASE) / 3
        ):
            # Too little of the lease is left. A new request starts a new one.
            return None
        return self._hold(claim, grant, sent)

    def _hold(self, claim: Claim, grant: Grant, sent: float) -> Hold:
        self.unknown = True
        waited = clock.now() - self.began if self.paused else 0.0
        self.hold = Hold(
            self.lock, self.backend, claim, grant, self.caller, sent, waited
        )
        entrance = (self.caller, self.backend.identity, self.key, self.lock.shared)
        mine = hold_by(entrance)
        if mine is None or not (mine.lock.reentrant and mine.enterable):
            # Otherwise this is a second hold, and the first one is entered again.
            self.hold.entered_as.append(entrance)
            holds_by_caller[entrance] = self.hold
        if claim.scope == "lease":
            keeper.keep(self.hold)
        if self.waiter is not None:
            waiters_of(self.backend).remove(self.waiter)
            self.waiter = None
        send_acquired(self.hold)
        return self.hold

    def _own_hold(self) -> Hold | None:
        """Return the hold of the same caller to enter, or None."""
        mine = hold_by((self.caller, self.backend.identity, self.key, self.lock.shared))
        if mine is None or not mine.enterable:
            return None
        if (
            self.lock.shared
            and mine.count
            and not (self.lock.reentrant and mine.lock.reentrant)
        ):
            return None
        return mine

    def _enter(self, hold: Hold) -> bool:
        if hold.count and not (self.lock.reentrant and hold.lock.reentrant):
            raise RuntimeError(
                f"{self.lock.key!r} is already held by this"
                f" {'task' if hasattr(self.caller, 'get_loop') else 'thread'}, which"
                " cannot acquire it again because of reentrant=False."
            )
        if hold.scope == "transaction" and self.lock.scope == "lease":
            raise RuntimeError(
                f"{self.lock.key!r} is already held by the transaction of this thread."
                " A lease would have to wait for the end of that transaction. Leave out"
                " scope='lease' to use the transaction's hold."
            )
        if hold.scope == "lease" and self.lock.scope == "transaction":
            raise RuntimeError(
                f"{self.lock.key!r} is already held by this caller as a lease, which is"
                " not part of the transaction. Begin the transaction with 'with"
                " hold.atomic()' of the lease, or leave out scope='transaction'."
            )
        self.entering, self.count_before = hold, hold.count
        return hold.enter(self.lock)

    def _claim(self) -> Claim:
        lock, backend = self.lock, self.backend
        other = hold_by((self.caller, backend.identity, self.key, not lock.shared))
        if other is not None and not (
            other.is_left or (other.enterable and other.count)
        ):
            other = None
        if other is not None and not lock.shared:
            what = "permit" if other.lock.permits < UNLIMITED else "read lock"
            kept = " It is kept until the transaction ends." if other.is_left else ""
            raise RuntimeError(
                f"The {what} on {lock.key!r} cannot be upgraded to a write lock: two"
                f" callers doing this would deadlock. Release the {what} first, or take"
                f" the write lock from the start.{kept}"
            )
        in_transaction = backend.in_transaction()
        ttl = backend.ttl if isinstance(lock.ttl, _FromSettings) else float(lock.ttl)
        if lock.max_hold is not None:
            ttl = min(ttl, lock.max_hold)
        belongs = in_transaction and backend.supports_transactions
        claim = Claim(
            key=self.key,
            ttl=ttl,
            scope=lock.scope or ("transaction" if belongs else "lease"),
            takeover=lock.takeover,
            fair=lock.fair,
            shared=lock.shared,
            permits=lock.permits,
            beside=other.owner if other is not None else "",
            holder=_own_holder_name(),
            owner_ip=_own_ip(),
        )
        why = backend.refusal(claim)
        if why and lock.shared and lock.scope is None and belongs:
            claim = replace(claim, scope="lease")
            why = backend.refusal(claim)
        if why is not None:
            text = f"{lock.key!r} cannot be acquired here. {why}"
            # A claim that is only refused for its ttl has a wrong argument.
            if backend.refusal(replace(claim, ttl=0.0)) is None:
                raise ValueError(text)
            raise RuntimeError(text)
        if claim.scope == "lease":
            if in_transaction and TransactionMarker.keeps(
                connection_of(backend.database), (backend.identity, self.key)
            ):
                raise RuntimeError(
                    f"{lock.key!r} is kept by the transaction of this thread until it"
                    " ends. A lease or a shared hold would have to wait for that."
                )
            warn_of_old_snapshots(lock.key)
        return claim

    def _given_back_inside(self, release: Callable[[], bool]) -> bool:
        """Release what was granted in the caller's transaction, inside of it.

        A release from outside would wait for its end. Return whether it succeeded.
        """
        if self.claim is None or self.claim.scope != "transaction" or not self.granted:
            return False
        if connection_of(self.backend.database).needs_rollback:
            return False
        with suppress(LockError):
            return release()
        return False

    def _ask(
        self, function: Callable[..., Any], *arguments: Any, **keywords: Any
    ) -> Any:
        """Call the backend.

        A lease is requested outside of the caller's transaction and pool.
        """
        lease = self.claim is not None and self.claim.scope == "lease"
        ask = partial(function, *arguments, **keywords)
        if lease and (self.backend.in_transaction() or self.backend.connect_first):
            return keeper.run(ask, self.backend)
        return ask()


def check_key(key: object) -> None:
    """Raise TypeError or ValueError for an invalid key, on every backend alike."""
    if not isinstance(key, str):
        hint = (
            " To set how long to wait, use timeout=…."
            if isinstance(key, (int, float)) or key is None
            else ""
        )
        raise TypeError(
            f"A key must be a string, not {type(key).__name__}: {key!r}.{hint}"
        )
    if not key:
        raise ValueError("A key cannot be empty")
    if len(key) > KEY_LENGTH:
        raise ValueError(
            f"A key can have at most {KEY_LENGTH} characters, not {len(key)}:"
            f" {key[:40]!r}…"
        )
    if "\0" in key:
        raise ValueError(f"A key cannot contain a NUL character: {key!r}")
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"A key must be encodable as UTF-8: {error}") from error


# The options of a lock.
DEFAULTS = {field.name: field.default for field in fields(Lock) if field.name != "key"}


def changed_options(lock: Lock) -> str:
    """Return the options that differ from the defaults, as text."""
    return "".join(
        f" {name}={shown(value)}"
        for name, default in DEFAULTS.items()
        if (value := getattr(lock, name)) is not default and value != default
    )


def shown(value: Any) -> str:
    """Return an option's value as text. Functions are shown by their names."""
    if isinstance(value, float):
        return f"{value:.10g}"
    if callable(value):
        return str(getattr(value, "__qualname__", None) or repr(value))
    return repr(value)


# The blocks that each caller is in, innermost last.
_entered: weakref.WeakKeyDictionary[Caller, list[_Entry]] = weakref.WeakKeyDictionary()


def wake_in(loop: asyncio.AbstractEventLoop, wakeup: asyncio.Event) -> None:
    clock.call_in(loop, wakeup.set)


def _run_outside(
    function: Callable[[], T], backend: Backend, patience: float | None = None
) -> T:
    """Call a function outside of the caller's transaction and pool."""
    if is_outside(backend):
        return keeper.run(function, backend, patience=patience)
    return function()


def _sayable(name: str) -> str:
    """Return a name in a form that every database can store."""
    return (
        name.replace("\0", "\N{REPLACEMENT CHARACTER}")
        .encode("utf-8", "backslashreplace")
        .decode()
    )


def _own_holder_name() -> str:
    return _holder_name(os.getpid(), threading.current_thread().name)


@functools.lru_cache(1000)
def _holder_name(process: int, thread: str) -> str:
    # A thread's name may come from a command line, or from anywhere.
    return f"{_hostname()}:{process}:{_sayable(thread)}"


@functools.cache
def _hostname() -> str:
    return socket.gethostname()


@functools.cache
def _own_ip() -> str | None:
    """Return the IP address from which this host sends, without sending."""
    for family, anywhere in (
        (socket.AF_INET, "192.0.2.1"),
        (socket.AF_INET6, "2001:db8::1"),
    ):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((anywhere, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"
