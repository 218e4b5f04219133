"""The lock: a key and a policy. It is immutable, can be shared, and holds nothing."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Never, Protocol, TypeVar, cast, overload

from dlocks import checks, clock, history, telemetry  # noqa: F401 (they are there, installed or not)
from dlocks.backends.base import KEPT_FOR, KEY_LENGTH, UNLIMITED, BaseBackend, Claim, Grant, Holder, Scope, seconds
from dlocks.conf import DEFAULT_ALIAS, backends
from dlocks.connected import connection_of
from dlocks.coroutines import acquiring, in_django_thread, refuse_in_a_coroutine, waiting_for_a_lock
from dlocks.exceptions import LockBackendError, LockError, LockNotAwaitable, LockTimeout
from dlocks.holds import Caller, Hold, current_caller, hold_by, holds_by_caller
from dlocks.keeper import OUTSIDE_PATIENCE, keeper
from dlocks.signals import tell_acquired, tell_ended, tell_timed_out
from dlocks.transactions import Mark, warn_of_old_snapshots
from dlocks.waiting import FIRST_DELAY, Waiter, delays, room_of

if TYPE_CHECKING:
    from dlocks.decorators import LockDecorator

A = TypeVar("A")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger("dlocks")

GENERATORS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class _FromSettings:
    """The value of an argument that was not given: the settings of the alias decide."""

    def __repr__(self) -> str:
        return "<from settings>"

    def __reduce__(self) -> str:
        return "FROM_SETTINGS"


FROM_SETTINGS = _FromSettings()

# What other libraries' locks have, and here the hold has.
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
    """What ``db_lock()`` returns; see there."""

    key: str
    using: str = DEFAULT_ALIAS
    timeout: float | _FromSettings | None = FROM_SETTINGS
    ttl: float | _FromSettings = FROM_SETTINGS
    renew: bool = True
    reentrant: bool = True
    scope: Scope | None = None
    max_hold: float | None = None
    at_least: float = 0.0
    takeover: bool = True
    fair: bool = True
    shared: bool = False
    permits: int = UNLIMITED
    release_at: Literal["transaction", "exit"] = "transaction"
    on_lost: Callable[[Hold], object] | None = None

    def __post_init__(self) -> None:
        check_key(self.key)
        if not isinstance(self.timeout, _FromSettings) and self.timeout is not None:
            seconds("timeout", self.timeout)
        if not isinstance(self.ttl, _FromSettings):
            seconds("ttl", self.ttl, above_zero=True)
        if self.max_hold is not None:
            seconds("max_hold", self.max_hold, above_zero=True)
        seconds("at_least", self.at_least)
        if self.max_hold is not None and self.at_least > self.max_hold:
            raise ValueError(f"at_least cannot be more than max_hold: {self.at_least} and {self.max_hold}")
        for name in ("renew", "reentrant", "takeover", "fair", "shared"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {value!r}")
        if self.scope not in {None, "lease", "transaction"}:
            raise ValueError(f"scope must be 'lease', 'transaction' or None, not {self.scope!r}")
        if self.release_at not in {"transaction", "exit"}:
            raise ValueError(f"release_at must be 'transaction' or 'exit', not {self.release_at!r}")
        if isinstance(self.permits, bool) or not isinstance(self.permits, int):
            raise TypeError(f"permits must be an int, not {type(self.permits).__name__}")
        if not 1 <= self.permits <= UNLIMITED:
            raise ValueError(f"permits must be 1 or more and at most {UNLIMITED}, not {self.permits}")
        if self.on_lost is not None:
            if not callable(self.on_lost):
                raise TypeError(f"on_lost must be callable, not {type(self.on_lost).__name__}")
            if inspect.iscoroutinefunction(self.on_lost):
                raise TypeError(
                    "on_lost cannot be a coroutine function: it is called in a thread, where nobody awaits it."
                )

    @property
    def keys(self) -> tuple[str, ...]:
        """The key; of a lock on several, all of them."""
        return (self.key,)

    def acquire(self) -> Hold:
        """Wait for the key up to ``timeout`` and return the hold; raise LockTimeout when it is still not free."""
        return self._acquire(current_caller(), wait=True)

    def try_acquire(self) -> Hold | None:
        """Try once, without waiting; return None when somebody else has the key."""
        try:
            return self._acquire(current_caller(), wait=False)
        except LockTimeout:
            return None

    def holder(self) -> Holder | None:
        """Return who has the key, or None. What a transaction has taken is not seen until it has ended."""
        backend = backends[self.using]
        return _holder(backend, self._full_key(backend))

    def locked(self) -> bool:
        """Return whether somebody's lease on the key stands, this caller's too."""
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

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        entry = None
        try:
            entry = self._innermost(_generator())
            entry.hold.leave(error)
            entry.forget()
        except BaseException as trouble:
            entry = entry or self._innermost(_generator())
            # Interrupted, perhaps before anything was done, or by what a signal's handler raised: leave all the same.
            if not isinstance(trouble, LockError) and entry.there and entry.hold.count >= entry.count:
                with suppress(Exception):
                    entry.hold.release(failed=True)
            entry.forget()
            raise

    def __call__(self, function: F) -> F:
        """Decorate a function, whose arguments the fields of the key then are; see ``db_lock()``."""
        return cast("F", self._decorator(function))

    # The same for coroutines: the same steps, each in Django's own thread, and the waiting here.

    async def aacquire(self) -> Hold:
        return await self._aacquire(wait=True)

    async def atry_acquire(self) -> Hold | None:
        try:
            return await self._aacquire(wait=False)
        except LockTimeout:
            return None

    async def aholder(self) -> Holder | None:
        return await in_django_thread(self.holder)

    async def alocked(self) -> bool:
        return await in_django_thread(self.locked)

    async def __aenter__(self) -> Hold:
        hold = await self.aacquire()
        entered = _entered.setdefault(current_caller(), [])
        entered.append(_Entry(self, hold, hold.count, entered, _generator()))
        return hold

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        entry = self._innermost(_generator())
        entry.forget()
        await entry.hold.aleave(error)

    # Inside.

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Never:
            there = ": the hold has it, which acquire() returns, and 'with … as'" if name in OF_THE_HOLD else ""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{there}", name=name, obj=self
            )

    @property
    def _decorator(self) -> LockDecorator[Never]:
        from dlocks.decorators import LockDecorator

        return LockDecorator(**{field.name: getattr(self, field.name) for field in fields(self)})

    def _acquire(self, caller: Caller, *, wait: bool) -> Hold:
        refuse_in_a_coroutine("'async with', or 'await lock.aacquire()'")
        bell = _Bell()
        attempt = self._attempt(caller, bell.ring, wait=wait, here=True)
        try:
            try:
                while True:
                    hold = attempt.once()
                    if hold is not None:
                        return hold
                    # Made before anybody is told of it who may ring.
                    event = bell.event = bell.event or threading.Event()
                    pause = attempt.pause()
                    with waiting_for_a_lock():
                        if not attempt.waits_here(pause, event):
                            clock.rest(event, pause)
            except BaseException:
                attempt.give_up()
                raise
        except BaseException:
            # Once more: an interrupt may have come in the middle of it.
            attempt.give_up()
            raise

    async def _aacquire(self, *, wait: bool) -> Hold:
        bell = asyncio.Event()
        ring = functools.partial(ring_in, asyncio.get_running_loop(), bell)
        caller = current_caller()
        attempt = self._attempt(caller, ring, wait=wait)
        acquiring.add(caller)
        try:
            while True:
                hold = await in_django_thread(attempt.once, only_there=attempt.in_transaction)
                if hold is not None:
                    return hold
                pause = await in_django_thread(attempt.pause, only_there=attempt.in_transaction)
                await clock.arest(bell, pause)
        except GeneratorExit:
            # By who collects a task whose loop was closed, say: nothing can be waited for.
            attempt.close()
            raise
        except BaseException:
            await in_django_thread(attempt.give_up, only_there=attempt.in_transaction)
            raise
        finally:
            acquiring.discard(caller)

    def _attempt(self, caller: Caller, ring: Callable[[], object], *, wait: bool, here: bool = False) -> Trying:
        return Attempt(self, caller, ring, wait=wait, here=here)

    def _full_key(self, backend: BaseBackend) -> str:
        key = backend.prefix + self.key
        if len(key) > KEY_LENGTH:
            raise ValueError(f"With its prefix the key has {len(key)} characters; {KEY_LENGTH} is the most: {key!r}")
        return key

    def _innermost(self, generator: int | None) -> _Entry:
        """Return the block that ends now: in its generator, or else the last one that this caller has begun."""
        mine = [entry for entry in reversed(_entered.get(current_caller(), [])) if entry.lock is self]
        for entry in mine:
            if entry.generator == generator:
                return entry
        # A generator that was left in the middle is closed by whoever finds it: asyncio has a task of its own for that.
        blocks: dict[Any, list[_Entry]] = _entered.data  # type: ignore[attr-defined]
        others = [entry for entered in list(blocks.values()) for entry in list(entered) if entry.lock is self]
        for entry in others if generator is not None else ():
            if entry.generator == generator:
                return entry
        if mine or len(others) == 1:
            return (mine or others)[0]
        raise RuntimeError(f"The block of {self.key!r} ends in another thread or task than it began in.")


class _Bell:
    """What wakes a thread that waits; most find the key free, and never need it."""

    event: threading.Event | None = None

    def ring(self) -> None:
        if self.event is not None:
            self.event.set()


@dataclass(slots=True, eq=False)
class _Entry:
    """One block that a caller is in: its lock and hold, the hold's count inside it, and the generator that it is in."""

    lock: Lock
    hold: Hold
    count: int
    entered: list[_Entry]
    generator: int | None

    @property
    def there(self) -> bool:
        """Whether its end has not been seen yet."""
        return self in self.entered

    def forget(self) -> None:
        if self.there:
            self.entered.remove(self)


def _generator() -> int | None:
    """Return what tells the generator, sync or async, whose block begins or ends; None where it is another's."""
    # Its frame is the same as long as the block lasts, whoever goes on with it or closes it.
    frame = sys._getframe(2)
    return id(frame) if frame.f_code.co_flags & GENERATORS else None


class Trying(Protocol):
    """One caller's way to a hold, step by step; see ``Attempt``."""

    @property
    def in_transaction(self) -> bool: ...
    def once(self) -> Hold | None: ...
    def pause(self) -> float | None: ...
    def waits_here(self, pause: float | None, bell: threading.Event) -> bool: ...
    def give_up(self) -> None: ...
    def close(self) -> None: ...


class Attempt:
    """
    One caller's way to a hold: enter the one it has, or claim the key, and wait for it until the time is over.

    ``ring`` is called, in any thread, when it is worth to try again before the end of a pause.
    """

    paused = False
    # The pauses between its tries, where it cannot stand in line.
    delays: Iterator[float] | None = None
    claim: Claim | None = None
    hold: Hold | None = None
    asked = False
    # Whether a request may have been granted without our knowing; and whether the last one was.
    unknown = False
    granted = False
    # Standing in line; and whether it asks once more for what it was told to ask for.
    waiter: Waiter | None = None
    asks_again = False
    # The hold that this attempt enters once more, and its count before.
    entering: Hold | None = None
    count_before = 0

    def __init__(
        self, lock: Lock, caller: Caller, ring: Callable[[], object], *, wait: bool, here: bool = False
    ) -> None:
        self.lock = lock
        # Whether the caller's thread is free to wait.
        self.here = here
        self.caller = caller
        self.ring = ring
        self.backend = backends[lock.using]
        timeout = self.backend.timeout if isinstance(lock.timeout, _FromSettings) else lock.timeout
        self.timeout = timeout if wait else 0.0
        self.key = lock._full_key(self.backend)
        self.began = clock.now()

    @property
    def in_transaction(self) -> bool:
        """Whether what is claimed is to be part of the caller's transaction."""
        return self.lock.scope == "transaction" or (self.claim is not None and self.claim.scope == "transaction")

    def once(self) -> Hold | None:
        """Try once."""
        if self.claim is not None and self._kept_for() == 0:
            # What this caller has left itself can be entered by now, and would be waited for in vain.
            self.give_up()
            self.claim = None
        if self.claim is None and (mine := self.begin()) is not None:
            return mine
        claim = self.claim or self._claim()
        if self.waiter is not None and (hold := self._given(claim, self.waiter)) is not None:
            return hold
        if self._better_in_line(claim) or (self.waiter is not None and self.waiter.seated and not self.waiter.woken):
            # The line gives the key, with the place in it: one that was asked for would leave the place behind.
            return None
        sent = clock.now()
        grant = self.ask_for([self], self.backend.acquire, claim)
        return None if grant is None else self.accept(grant, sent)

    def begin(self) -> Hold | None:
        """Enter the hold that the caller has, and return it; or else make the claim."""
        mine = self._own_hold()
        if mine is not None and self._enter(mine):
            return mine
        self.claim = self._claim()
        return None

    @staticmethod
    def ask_for(attempts: Sequence[Attempt], acquire: Callable[[A], T | None], claimed: A) -> T | None:
        """Ask the backend for what these attempts claim, and note with each whether it may have been granted."""
        for attempt in attempts:
            attempt.asked = attempt.unknown = True
            attempt.granted = False
        answer: T | None = None
        try:
            answer = attempts[0]._ask(acquire, claimed)
        except LockBackendError:
            raise
        except (LockError, RuntimeError) as refusal:
            # Refused: nothing was granted, so there is nothing to take back. A lease is not refused by a RuntimeError,
            # which a signal's handler has raised then.
            for attempt in attempts:
                attempt.unknown = not (isinstance(refusal, LockError) or attempt.in_transaction)
            if not (isinstance(refusal, LockNotAwaitable) and all(attempt.timeout == 0 for attempt in attempts)):
                raise
        for attempt in attempts:
            attempt.unknown = attempt.granted = answer is not None
        return answer

    def accept(self, grant: Grant, sent: float) -> Hold | None:
        """Return the hold that was granted, or None where it was over before the answer came."""
        claim = self.claim or self._claim()
        lease = claim.ttl if grant.lease is None else min(grant.lease, claim.ttl)
        if claim.scope == "lease" and clock.now() >= sent + lease:
            # The answer came when the lease it told of was over.
            self.give_up()
            self.claim = self._claim()
            return None
        return self._hold(claim, grant, sent)

    def pause(self) -> float | None:
        """Return how long to wait before the next try, None for ever; raise LockTimeout when the time is over."""
        pause, kept = self._pause(), self._kept_for()
        return pause if kept is None else kept if pause is None else min(pause, kept)

    def _kept_for(self) -> float | None:
        """Return for how long what the caller has left, in a transaction, is kept from itself; None: there is none."""
        mine = hold_by((self.caller, self.backend.identity, self.key, self.lock.shared))
        if mine is None or not mine.is_left:
            return None
        return max(0.0, mine.lock.at_least - mine.age)

    def _pause(self) -> float | None:
        left = None if self.timeout is None else self.began + self.timeout - clock.now()
        claim = self.claim if self.backend.supports_queue else None
        if self.waiter is None and claim is not None and claim.fair and (left is None or left > 0):
            self.paused = True
            if self._stand_in_line(claim):
                return 0.0
        if self.waiter is None:
            if self.delays is None:
                self.delays = delays(None if self.timeout is None else self.began + self.timeout)
            delay = next(self.delays, None)
            if delay is not None:
                self.paused = True
                return delay
            if claim is not None and not self.asked:
                # It was to stand in line first, and came too late for that: nobody has said yet that the key is held.
                self.paused = True
                return 0.0
        elif left is None or left > 0:
            if self.waiter.woken and not self.asks_again:
                # Its turn has come, but the row was locked when it asked, say: most likely for a moment only.
                self.asks_again = True
                return FIRST_DELAY if left is None else min(FIRST_DELAY, left)
            if not self.waiter.here and (not self.waiter.seated or self.waiter.woken):
                # Still, or it came too late: back to its place.
                self.waiter.woken = 0.0
                room_of(self.backend).seat(self.waiter)
            self.asks_again = False
            return left
        elif left > -KEPT_FOR and self._granted_at_last(self.waiter):
            # At once; and then, where the row is locked as it asks, with a pause.
            delay, self.asks_again = (FIRST_DELAY if self.asks_again else 0.0), True
            return delay
        holder = None
        with suppress(LockBackendError):
            holder = _holder(self.backend, self.key)
        tell_timed_out(self.lock, holder, clock.now() - self.began)
        waited = f"not acquired in {self.timeout:.1f} s" if self.timeout else "not acquired at the first try"
        who = f"held by {holder}" if holder is not None else "held by a transaction that has not ended, or just freed"
        raise LockTimeout(f"{self.lock.key!r} {waited}; {who}", key=self.lock.key, timeout=self.timeout, holder=holder)

    def waits_here(self, pause: float | None, bell: threading.Event) -> bool:
        """Wait where the thread itself can be told of its turn; return False where another one rings the bell."""
        waiter = self.waiter
        if waiter is None or pause == 0:
            return False
        if waiter.listens and not clock.stands_still():
            until = None if pause is None else clock.now() + pause
            if not room_of(self.backend).listen(bell, until):
                clock.rest(bell, None if until is None else max(0.0, until - clock.now()))
            bell.clear()
            return True
        if not waiter.here:
            return False
        if not self.backend.wait(waiter.claim, pause):
            # The place was lost: it asks again, and stands in line anew.
            self.waiter, self.unknown = None, True
        return True

    def give_up(self) -> None:
        """Leave nothing behind of an attempt that came to nothing."""
        if self.entering is not None:
            self.entering.undo_entry(self.count_before)
        waiter = self.waiter
        if waiter is not None:
            room_of(self.backend).leave(waiter)
        if self.claim is None or not (self.unknown or waiter is not None):
            return
        ended = self.hold is not None and self.hold.abandon()
        release = functools.partial(self.backend.release, self.claim, failed=True)
        try:
            if waiter is None:
                self._ask(release)
            elif not self._given_back_inside(release):
                self._outside(release, patience=OUTSIDE_PATIENCE)
        except LockError as trouble:
            logger.warning("A claim on %r could not be taken back, and ends by itself: %s", self.lock.key, trouble)
        self.unknown, self.waiter = False, None
        if ended and self.hold is not None:
            tell_ended(self.hold, "released")

    def close(self) -> None:
        """Have the room give up for it, which cannot do so itself."""
        if self.waiter is not None:
            self.waiter.closed = True

    def _better_in_line(self, claim: Claim) -> bool:
        """Whether to stand in line before asking at all: others did so a moment ago."""
        waits = self.waiter is None and not self.paused and self.timeout != 0
        if not (waits and claim.fair and claim.takeover and not claim.beside and self.backend.crowded(claim.key)):
            return False
        # Inside of the one writer's transaction nobody can wait in line; asking says so.
        return claim.scope == "lease" or self.backend.lease_refused() is None

    def _stand_in_line(self, claim: Claim) -> bool:
        """Take a place in the line; return whether there is something to try at once."""
        room = room_of(self.backend)
        until = math.inf if self.timeout is None else self.began + self.timeout
        self.waiter = waiter = Waiter(claim, self.ring, self.caller, until)
        if self.here and self.backend.tells_here:
            place = self._outside(functools.partial(self.backend.queue, claim))
            if place is not None and place.here:
                waiter.here = True
                return place.ask
        waiter.listens = self.here
        room.enter(waiter)
        sent = clock.now()
        patience = None if self.timeout is None else max(0.0, until - sent) + OUTSIDE_PATIENCE
        place = self._outside(functools.partial(self.backend.queue, claim, room.channel), patience=patience)
        if place is None or (place.ask and place.number is None):
            # There is no standing in line just now, or no need for it.
            room.leave(waiter)
            self.waiter, self.unknown = None, place is not None
            return place is not None
        at_once = waiter.told(place, sent)
        # In any case: what it is to try may come to nothing, where somebody looks at the row just then.
        room.seat(waiter)
        return at_once

    def _granted_at_last(self, waiter: Waiter) -> bool:
        """Look whether the key was given to the claim at the last moment, or is by now."""
        for _ in range(2):
            sent = clock.now()
            look = functools.partial(self.backend.look, [waiter.claim], heard=False)
            places = self._outside(look, patience=OUTSIDE_PATIENCE)
            place = places.get(waiter.claim.owner)
            if place is None or place.grant is not None or place.ask:
                return place is not None and waiter.told(place, sent)
            if place.ahead:
                break
            # The first in line: what is free was handed on, and the next look tells to whom.
        return False

    def _given(self, claim: Claim, waiter: Waiter) -> Hold | None:
        """Return the hold that the line has given to the claim, or None where that has to be asked for."""
        if waiter.error is not None:
            raise waiter.error
        given, waiter.given = waiter.given, None
        if given is None or claim.scope != "lease" or not self.lock.renew or not self.backend.tells_leases:
            # What the line gives is a short lease, for the keeper to renew.
            return None
        grant, sent = given
        if grant.lease is None or sent + grant.lease - clock.now() < min(claim.ttl, KEPT_FOR) / 3:
            # Too little is left of it to rely on: it is asked for, and counted from then.
            return None
        return self._hold(claim, grant, sent)

    def _hold(self, claim: Claim, grant: Grant, sent: float) -> Hold:
        self.unknown = True
        waited = clock.now() - self.began if self.paused else 0.0
        self.hold = Hold(self.lock, self.backend, claim, grant, self.caller, sent, waited)
        entrance = (self.caller, self.backend.identity, self.key, self.lock.shared)
        mine = hold_by(entrance)
        if mine is None or not (mine.lock.reentrant and mine.enterable):
            # Otherwise this is one beside it, and that is the one to be entered again.
            self.hold.entered_as.append(entrance)
            holds_by_caller[entrance] = self.hold
        if claim.scope == "lease":
            keeper.keep(self.hold)
        if self.waiter is not None:
            room_of(self.backend).leave(self.waiter)
            self.waiter = None
        tell_acquired(self.hold)
        return self.hold

    def _own_hold(self) -> Hold | None:
        """Return the hold of the same caller to enter, if there is one."""
        mine = hold_by((self.caller, self.backend.identity, self.key, self.lock.shared))
        if mine is None or not mine.enterable:
            return None
        if self.lock.shared and mine.count and not (self.lock.reentrant and mine.lock.reentrant):
            # Another share.
            return None
        return mine

    def _enter(self, hold: Hold) -> bool:
        if hold.count and not (self.lock.reentrant and hold.lock.reentrant):
            raise RuntimeError(
                f"{self.lock.key!r} is held by this {'task' if hasattr(self.caller, 'get_loop') else 'thread'}"
                " already, and reentrant=False refuses to enter again."
            )
        if hold.scope == "transaction" and self.lock.scope == "lease":
            raise RuntimeError(
                f"{self.lock.key!r} belongs to this thread's transaction already: a lease beside it could only wait "
                "for that transaction to end."
            )
        if hold.scope == "lease" and self.lock.scope == "transaction":
            raise RuntimeError(
                f"{self.lock.key!r} is held by this caller as a lease already, and would not belong to the transaction:"
                " begin that with 'with hold.atomic()' of the lease, or leave out scope='transaction'."
            )
        self.entering, self.count_before = hold, hold.count
        return hold.enter(self.lock)

    def _claim(self) -> Claim:
        lock, backend = self.lock, self.backend
        if lock.shared and not backend.supports_sharing:
            raise RuntimeError(f"{type(backend).__name__} has no locks that can be shared.")
        if lock.shared and lock.permits < UNLIMITED and not backend.supports_permits:
            raise RuntimeError(f"{type(backend).__name__} cannot bound how many share a key.")
        if not lock.takeover and not backend.knows_takeovers:
            raise RuntimeError(
                f"takeover=False is not possible with {type(backend).__name__}, which does not know whether the last "
                "holder came back."
            )
        other = hold_by((self.caller, backend.identity, self.key, not lock.shared))
        if other is not None and not (other.is_left or (other.enterable and other.count)):
            other = None
        if other is not None and not lock.shared:
            kept = " (it is kept until the transaction ends)" if other.is_left else ""
            raise RuntimeError(
                f"{lock.key!r} is shared by this caller, who cannot have it alone before giving its share back{kept}: "
                "two who tried that would wait for each other. Take it alone from the start."
            )
        in_transaction = backend.in_transaction()
        scope = lock.scope
        if scope is None:
            scope = "transaction" if in_transaction and self._can_belong_to_transaction() else "lease"
        elif scope == "transaction" and not (backend.supports_transactions and self._can_belong_to_transaction()):
            what = "for a lock that is shared" if lock.shared else f"with {type(backend).__name__}"
            raise RuntimeError(f"scope='transaction' is not possible {what}.")
        if scope == "transaction" and not in_transaction:
            raise RuntimeError(
                f"scope='transaction' needs a transaction: enter 'with atomic(using={_database_of(backend)!r})' before "
                f"the lock on {lock.key!r}."
            )
        if scope == "transaction" and (why := backend.transaction_refused()) is not None:
            raise RuntimeError(f"{lock.key!r} cannot be locked in this transaction. {why}")
        if scope == "lease":
            if (why := backend.lease_refused()) is not None:
                raise RuntimeError(f"{lock.key!r} cannot be leased here. {why}")
            if in_transaction and Mark.keeps(connection_of(_database_of(backend)), (backend.identity, self.key)):
                raise RuntimeError(
                    f"{lock.key!r} is kept by this thread's transaction until that ends: a lease or a share beside it"
                    " could only wait for that."
                )
            warn_of_old_snapshots(lock.key)
        ttl = backend.ttl if isinstance(lock.ttl, _FromSettings) else float(lock.ttl)
        if lock.max_hold is not None:
            ttl = min(ttl, lock.max_hold)
        if (why := backend.ttl_refused(ttl)) is not None:
            raise ValueError(f"{lock.key!r} cannot be leased for {ttl:g} s. {why}")
        return Claim(
            key=self.key,
            ttl=ttl,
            scope=scope,
            takeover=lock.takeover,
            fair=lock.fair,
            shared=lock.shared,
            permits=lock.permits,
            beside=other.owner if other is not None else "",
            holder=_holder_name(os.getpid(), threading.current_thread().name),
            owner_ip=_own_ip(),
        )

    def _can_belong_to_transaction(self) -> bool:
        # A share is not the lock row, which a transaction could keep.
        return self.backend.supports_transactions and (not self.lock.shared or self.backend.keeps_shares())

    def _given_back_inside(self, release: Callable[[], bool]) -> bool:
        """Give back what the caller's transaction was granted: from outside one would wait for its end."""
        if self.claim is None or self.claim.scope != "transaction" or not self.granted:
            return False
        if connection_of(_database_of(self.backend)).needs_rollback:
            return False
        with suppress(LockError):
            return release()
        return False

    def _outside(self, function: Callable[[], T], *, patience: float | None = None) -> T:
        """Ask about a place in line, which belongs to no transaction."""
        if self.backend.in_transaction() and self.backend.lease_refused() is None:
            return keeper.run(function, self.backend, patience=patience)
        return function()

    def _ask(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Ask the backend; for a lease, from outside of the caller's transaction."""
        if self.claim is not None and self.claim.scope == "lease" and self.backend.in_transaction():
            return keeper.run(functools.partial(function, *arguments, **keywords), self.backend)
        return function(*arguments, **keywords)


@overload
def db_lock(
    key: str | Callable[..., str], *, busy: Literal["raise"], using: str = ..., **policy: Any
) -> LockDecorator[Never]: ...


@overload
def db_lock(
    key: str | Callable[..., str], *, busy: Literal["skip"], using: str = ..., **policy: Any
) -> LockDecorator[None]: ...


@overload
def db_lock(
    key: str | Callable[..., str], *, busy: Callable[..., T], using: str = ..., **policy: Any
) -> LockDecorator[T]: ...


@overload
def db_lock(key: str, *more: str, using: str = ..., **policy: Any) -> Lock: ...


@overload
def db_lock(key: Callable[..., str], *, using: str = ..., **policy: Any) -> LockDecorator[Never]: ...


def db_lock(key: Any, *more: str, using: str = DEFAULT_ALIAS, **policy: Any) -> Any:
    """
    Return the lock on ``key``: ``with db_lock("stock:7") as hold``, or ``@db_lock("report:{region}")``.

    On several keys, in any order: on all of them or none. They are taken in one order, so that no two callers ever
    wait for each other; see ``MultiLock``.

    ``using`` is an alias of the DLOCKS setting. All times are seconds. The policy:

    ``timeout``
        How long to wait; ``None`` for ever, ``0`` not at all. From the settings unless given (10).
    ``ttl``
        How long the lease outlives a holder that has gone silent. From the settings unless given (30).
    ``renew``
        Whether the lease is renewed in the background for as long as it is held.
    ``max_hold``
        How long it is renewed at most.
    ``reentrant``
        Whether the same thread or task may enter again; otherwise that is a RuntimeError at once.
    ``scope``
        ``"lease"``, ``"transaction"``, or ``None``: the transaction where the caller is in one, else a lease.
    ``release_at``
        When a lease left inside an open transaction is given back: at the end of that ``"transaction"``, or at the
        block's own ``"exit"``.
    ``at_least``
        How long the key stays taken after the beginning, even when the work is done sooner.
    ``takeover``
        Whether a lease may be taken over from a holder that never came back; otherwise LockStale is raised.
    ``on_lost``
        Called with the hold when it is lost, perhaps in another thread.
    ``busy``
        For decorating only: when the key is busy a call may ``"raise"`` LockTimeout, ``"skip"`` the work and return
        None, or return what a function gives that is called with the LockTimeout and the call's arguments.

    In a decorator the fields of the key are the arguments of the call, and the key may be a function of them. In a
    ``with`` block braces are characters like others.

    A wrong key or policy is a TypeError or ValueError here, before anything is asked.
    """
    refuse("db_lock", policy, "permits")
    if more:
        from dlocks.multi import MultiLock

        return MultiLock.of((key, *more), using=using, **policy)
    if callable(key) or "busy" in policy:
        from dlocks.decorators import LockDecorator

        return LockDecorator(key, using=using, **policy)
    return Lock(key=key, using=using, **policy)


def refuse(function: str, policy: Mapping[str, Any], *names: str) -> None:
    """Refuse what belongs to another kind of lock."""
    for name in names:
        if name in policy:
            raise TypeError(
                f"{function}() takes no {name!r}: db_semaphore(key, permits) is for so many at a time, and "
                "db_rwlock(key).read() for those who only read."
            )


def check_key(key: object) -> None:
    """Refuse what cannot be a key: the same on every backend."""
    if not isinstance(key, str):
        hint = "; how long to wait is timeout=…" if isinstance(key, (int, float)) or key is None else ""
        raise TypeError(f"A key is a string, not {type(key).__name__}: {key!r}{hint}")
    if not key:
        raise ValueError("A key cannot be empty")
    if len(key) > KEY_LENGTH:
        raise ValueError(f"A key has at most {KEY_LENGTH} characters, not {len(key)}: {key[:40]!r}…")
    if "\0" in key:
        raise ValueError(f"A key cannot have a NUL character: {key!r}")
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"A key must be encodable as UTF-8: {error}") from error


# The blocks that each caller is in, innermost last.
_entered: weakref.WeakKeyDictionary[Caller, list[_Entry]] = weakref.WeakKeyDictionary()


def ring_in(loop: asyncio.AbstractEventLoop, bell: asyncio.Event) -> None:
    # A loop that is closed has nobody who waits.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(bell.set)


def _holder(backend: BaseBackend, key: str) -> Holder | None:
    """Ask for the holder, from outside of the caller's transaction, which may lock what it looks at."""
    ask = functools.partial(backend.holder, key)
    outside = backend.in_transaction() and backend.lease_refused() is None
    return keeper.run(ask, backend, patience=OUTSIDE_PATIENCE) if outside else ask()


def _database_of(backend: BaseBackend) -> str:
    return getattr(backend, "database", "default")


def _sayable(name: str) -> str:
    """Return a name as every database can keep it."""
    return name.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "backslashreplace").decode()


@functools.lru_cache(1000)
def _holder_name(process: int, thread: str) -> str:
    # A thread's name may be made of what came from a command line, or from anywhere.
    return f"{_hostname()}:{process}:{_sayable(thread)}"


@functools.cache
def _hostname() -> str:
    return socket.gethostname()


@functools.cache
def _own_ip() -> str | None:
    """Return the address that this host speaks from; nothing is sent to find out."""
    for family, anywhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((anywhere, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"
