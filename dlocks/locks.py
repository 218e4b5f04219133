"""The lock: a key and a policy. It is immutable, can be shared, and holds nothing."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from asgiref.sync import sync_to_async

from dlocks import checks, clock  # noqa: F401 (checks registers the system checks, installed or not)
from dlocks.backends.base import KEY_LENGTH, BaseBackend, Claim, Grant, Holder, Scope, seconds
from dlocks.conf import DEFAULT_ALIAS, backends
from dlocks.exceptions import LockBackendError, LockError, LockTimeout
from dlocks.holds import Caller, Hold, current_caller, holds_by_caller
from dlocks.keeper import keeper
from dlocks.signals import lock_acquired, lock_timeout
from dlocks.transactions import warn_of_old_snapshots
from dlocks.waiting import delays

logger = logging.getLogger("dlocks")


class _FromSettings:
    """The value of an argument that was not given: the settings of the alias decide."""

    def __repr__(self) -> str:
        return "<from settings>"


FROM_SETTINGS = _FromSettings()


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
    release: Literal["transaction", "exit"] = "transaction"
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
        if self.scope not in {None, "lease", "transaction"}:
            raise ValueError(f"scope must be 'lease', 'transaction' or None, not {self.scope!r}")
        if self.release not in {"transaction", "exit"}:
            raise ValueError(f"release must be 'transaction' or 'exit', not {self.release!r}")
        if self.on_lost is not None and not callable(self.on_lost):
            raise TypeError(f"on_lost must be callable, not {type(self.on_lost).__name__}")

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
        return _holder(backends[self.using], self._full_key())

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
            entered.append(_Entry(self, hold, hold.count, entered))
            return hold
        except BaseException:
            del entered[depth:]
            if hold is not None:
                with suppress(LockError):
                    hold.release(failed=True)
            raise

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self._leave(error)
        except Exception:
            raise
        except BaseException:
            # Interrupted, perhaps before anything was done: leave all the same.
            entry = self._innermost()
            if entry.hold.count >= entry.count:
                with suppress(LockError):
                    entry.hold.release(failed=True)
            entry.forget()
            raise

    # The same for coroutines: the same steps, each in Django's own thread, and the waiting here.

    async def aacquire(self) -> Hold:
        return await self._aacquire(wait=True)

    async def atry_acquire(self) -> Hold | None:
        try:
            return await self._aacquire(wait=False)
        except LockTimeout:
            return None

    async def aholder(self) -> Holder | None:
        return await sync_to_async(self.holder)()

    async def alocked(self) -> bool:
        return await sync_to_async(self.locked)()

    async def __aenter__(self) -> Hold:
        hold = await self.aacquire()
        entered = _entered.setdefault(current_caller(), [])
        entered.append(_Entry(self, hold, hold.count, entered))
        return hold

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        entry = self._innermost()
        entry.forget()
        await entry.hold.__aexit__(kind, error, traceback)

    # Inside.

    def _acquire(self, caller: Caller, *, wait: bool) -> Hold:
        attempt = Attempt(self, caller, wait=wait)
        try:
            while True:
                hold = attempt.once()
                if hold is not None:
                    return hold
                time.sleep(attempt.pause())
        except BaseException:
            attempt.give_up()
            raise

    async def _aacquire(self, *, wait: bool) -> Hold:
        attempt = Attempt(self, current_caller(), wait=wait)
        try:
            while True:
                hold: Hold | None = await _in_django_thread(attempt.once)
                if hold is not None:
                    return hold
                await asyncio.sleep(await _in_django_thread(attempt.pause))
        except BaseException:
            await _in_django_thread(attempt.give_up)
            raise

    def _full_key(self) -> str:
        key = backends[self.using].prefix + self.key
        if len(key) > KEY_LENGTH:
            raise ValueError(f"With its prefix the key has {len(key)} characters; {KEY_LENGTH} is the most: {key!r}")
        return key

    def _leave(self, error: BaseException | None) -> None:
        entry = self._innermost()
        try:
            entry.hold.leave(error)
        except Exception:
            entry.forget()
            raise
        entry.forget()

    def _innermost(self) -> _Entry:
        for entry in reversed(_entered.get(current_caller(), [])):
            if entry.lock is self:
                return entry
        raise RuntimeError(f"The block of {self.key!r} ends in another thread or task than it began in.")


@dataclass(slots=True, eq=False)
class _Entry:
    """One block that a caller is in: its lock and hold, and the hold's count inside it."""

    lock: Lock
    hold: Hold
    count: int
    entered: list[_Entry]

    def forget(self) -> None:
        if self in self.entered:
            self.entered.remove(self)


class Attempt:
    """One caller's way to a hold: enter the one it has, or claim the key, again and again until the time is over."""

    def __init__(self, lock: Lock, caller: Caller, *, wait: bool) -> None:
        self.lock = lock
        self.caller = caller
        self.backend = backends[lock.using]
        timeout = self.backend.timeout if isinstance(lock.timeout, _FromSettings) else lock.timeout
        self.timeout = timeout if wait else 0.0
        self.key = lock._full_key()
        self.began = clock.now()
        self.paused = False
        self.delays = delays(self.timeout)
        self.claim: Claim | None = None
        self.hold: Hold | None = None
        # Whether a request may have been granted without our knowing.
        self.unknown = False
        # The hold that this attempt enters once more, and its count before.
        self.entering: Hold | None = None
        self.count_before = 0

    def once(self) -> Hold | None:
        """Try once."""
        if self.claim is None:
            mine = holds_by_caller.get((self.caller, self.backend.identity, self.key))
            if mine is not None and mine.enterable and self._enter(mine):
                return mine
            self.claim = self._claim()
        sent = clock.now()
        self.unknown = True
        try:
            grant: Grant | None = self._ask(self.backend.acquire, self.claim)
        except LockBackendError:
            raise
        except (LockError, RuntimeError):
            # Refused: nothing was granted, so there is nothing to take back.
            self.unknown = False
            raise
        if grant is None:
            self.unknown = False
            return None
        if self.claim.scope == "lease" and clock.now() >= sent + self.claim.ttl:
            # The answer came when the lease it told of was over.
            self.give_up()
            self.claim = self._claim()
            return None
        waited = sent - self.began if self.paused else 0.0
        self.hold = Hold(self.lock, self.backend, self.claim, grant, self.caller, sent, waited)
        place = (self.caller, self.backend.identity, self.key)
        self.hold.entered_as.append(place)
        holds_by_caller[place] = self.hold
        if self.claim.scope == "lease":
            keeper.keep(self.hold)
        logger.debug("%r acquired by %s, token %d", self.lock.key, self.claim.holder, grant.token)
        lock_acquired.send_robust(Lock, hold=self.hold)
        return self.hold

    def pause(self) -> float:
        """Return how long to wait before the next try; raise LockTimeout when the time is over."""
        delay = next(self.delays, None)
        if delay is not None:
            self.paused = True
            return delay
        holder = None
        with suppress(LockBackendError):
            holder = _holder(self.backend, self.key)
        lock_timeout.send_robust(Lock, lock=self.lock, holder=holder)
        waited = f"not acquired in {self.timeout:.1f} s" if self.timeout else "not acquired at the first try"
        who = f"held by {holder}" if holder is not None else "held by a transaction that has not ended, or just freed"
        raise LockTimeout(f"{self.lock.key!r} {waited}; {who}", key=self.lock.key, timeout=self.timeout, holder=holder)

    def give_up(self) -> None:
        """Leave nothing behind of an attempt that came to nothing."""
        if self.entering is not None:
            self.entering.undo_entry(self.count_before)
        if self.claim is None or not self.unknown:
            return
        if self.hold is not None:
            self.hold.abandon()
        try:
            self._ask(self.backend.release, self.claim, failed=True)
        except LockError as trouble:
            logger.warning("A claim on %r could not be taken back, and ends by itself: %s", self.lock.key, trouble)
        self.unknown = False

    def _enter(self, hold: Hold) -> bool:
        if hold.count and not (self.lock.reentrant and hold.lock.reentrant):
            raise RuntimeError(
                f"{self.lock.key!r} is held by this {'thread' if isinstance(self.caller, threading.Thread) else 'task'}"
                " already, and reentrant=False refuses to enter again."
            )
        if hold.scope == "transaction" and self.lock.scope == "lease":
            raise RuntimeError(
                f"{self.lock.key!r} belongs to this thread's transaction already: a lease beside it could only wait "
                "for that transaction to end."
            )
        self.entering, self.count_before = hold, hold.count
        return hold.enter()

    def _claim(self) -> Claim:
        lock, backend = self.lock, self.backend
        in_transaction = backend.in_transaction()
        scope = lock.scope
        if scope is None:
            scope = "transaction" if in_transaction and backend.supports_transactions else "lease"
        elif scope == "transaction" and not backend.supports_transactions:
            raise RuntimeError(f"scope='transaction' is not possible with {type(backend).__name__}.")
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
            warn_of_old_snapshots(lock.key)
        ttl = backend.ttl if isinstance(lock.ttl, _FromSettings) else float(lock.ttl)
        if lock.max_hold is not None:
            ttl = min(ttl, lock.max_hold)
        return Claim(
            key=self.key,
            ttl=ttl,
            scope=scope,
            takeover=lock.takeover,
            holder=f"{_hostname()}:{os.getpid()}:{threading.current_thread().name}",
            owner_ip=_own_ip(),
        )

    def _ask(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Ask the backend; for a lease, from outside of the caller's transaction."""
        if self.claim is not None and self.claim.scope == "lease" and self.backend.in_transaction():
            return keeper.run(functools.partial(function, *arguments, **keywords))
        return function(*arguments, **keywords)


def db_lock(key: str, *, using: str = DEFAULT_ALIAS, **policy: Any) -> Lock:
    """
    Return the lock on ``key``: ``with db_lock("stock:7") as hold``.

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
    ``release``
        When a lease left inside an open transaction is given back: at the end of that ``"transaction"``, or at the
        block's own ``"exit"``.
    ``at_least``
        How long the key stays taken after the beginning, even when the work is done sooner.
    ``takeover``
        Whether a lease may be taken over from a holder that never came back; otherwise LockStale is raised.
    ``on_lost``
        Called with the hold when it is lost, perhaps in another thread.

    A wrong key or policy is a TypeError or ValueError here, before anything is asked.
    """
    return Lock(key=key, using=using, **policy)


def check_key(key: object) -> None:
    """Refuse what cannot be a key: the same on every backend."""
    if not isinstance(key, str):
        raise TypeError(f"A key is a string, not {type(key).__name__}: {key!r}")
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


async def _in_django_thread(function: Callable[..., Any]) -> Any:
    """Call in Django's one thread, to the end even if the caller is cancelled, so that its outcome is known."""
    future = asyncio.ensure_future(sync_to_async(function, thread_sensitive=True)())
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise


def _holder(backend: BaseBackend, key: str) -> Holder | None:
    """Ask for the holder, from outside of the caller's transaction, which may lock what it looks at."""
    ask = functools.partial(backend.holder, key)
    return backend.outside(ask) if backend.in_transaction() and backend.lease_refused() is None else ask()


def _database_of(backend: BaseBackend) -> str:
    return getattr(backend, "database", "default")


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
