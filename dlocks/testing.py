"""Helpers for a project's own tests.

They simulate another holder, a lease that ends, and a frozen clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

from django.test import override_settings

from dlocks.backends.base import Backend
from dlocks.backends.database.backend import DatabaseBackend
from dlocks.backends.memory import MemoryBackend
from dlocks.conf import DEFAULT_ALIAS, backends, options_of
from dlocks.core.hold import Hold
from dlocks.core.lock import Lock
from dlocks.exceptions import LockError
from dlocks.runtime import clock
from dlocks.runtime.keeper import keeper
from dlocks.runtime.waits import waits
from dlocks.values import Claim, Duration, in_seconds, seconds

NAMES = {
    "memory": "dlocks.backends.memory.MemoryBackend",
    "dummy": "dlocks.backends.dummy.DummyBackend",
}
# Options that every backend has.
COMMON = options_of(Backend)

# Seconds since the end of a simulated expired lease, more than any grace.
LONG_AGO = 3600.0

# The longest step of a frozen clock during a wait, in seconds.
LONGEST_STEP = 0.25

# A simulated holder. Its address is reserved for documentation (RFC 5737).
HOLDER, HOLDER_IP = "elsewhere:1:MainThread", "192.0.2.1"


class override_locks(override_settings):  # noqa: N801 (as Django's own)
    """Use the ``"memory"`` or ``"dummy"`` backend for every alias of DLOCKS.

    It is a context manager, and a decorator for tests and classes.

    Memory locks exclude the threads and tasks of the process, and need no database.
    Dummy locks exclude no caller. Aliases keep their prefix, ttl, timeout and grace,
    unless they are given here.
    """

    def __init__(self, backend: str = "memory", **options: Any) -> None:
        if backend not in NAMES:
            raise ValueError(
                f"override_locks() takes {' or '.join(map(repr, NAMES))}, not"
                f" {backend!r}"
            )
        if unknown := options.keys() - COMMON:
            raise TypeError(
                f"override_locks() takes {', '.join(sorted(COMMON))}, not"
                f" {', '.join(sorted(unknown))}"
            )
        settings = {
            alias: {
                "BACKEND": NAMES[backend],
                "OPTIONS": {
                    **{
                        name: value
                        for name, value in conf.get("OPTIONS", {}).items()
                        if name in COMMON
                    },
                    **options,
                },
            }
            for alias, conf in backends.settings.items()
        }
        super().__init__(DLOCKS=settings)


@contextmanager
def held_elsewhere(
    key: str,
    *,
    using: str = DEFAULT_ALIAS,
    ttl: Duration = LONG_AGO,
    holder: str = HOLDER,
) -> Iterator[None]:
    """Hold a key as another process would, for the length of the block.

    The key is busy for all callers in this process.
    """
    backend, claim = _claim(key, using, seconds("ttl", ttl), holder)
    _take(backend, claim)
    try:
        yield
    finally:
        # The test may have cleared the hold.
        with suppress(LockError):
            backend.release(claim)


def abandoned(key: str, *, using: str = DEFAULT_ALIAS, holder: str = HOLDER) -> None:
    """Leave a key as a process does that crashed while it held the key.

    The crash was longer ago than the ttl, so the key is stale and can be taken over.
    """
    backend, claim = _claim(key, using, LONG_AGO, holder)
    _take(_expirable(backend), claim)
    _end_lease(backend, claim)


def undo_shutdown() -> None:
    """Let this process wait for keys again, after a test of ``shutdown()``."""
    waits.resume()


def expire(hold: Hold | str, *, using: str = DEFAULT_ALIAS) -> None:
    """Let the lease of a hold expire without a notification.

    ``hold`` may be a key, which stands for this process's hold on it.

    The loss is noticed by ``hold.check()``, by ``hold.atomic()`` and by the next
    renewal. It is also noticed at the end of the block if another caller has acquired
    the key by then.
    """
    hold = _live(hold, using)
    _end_lease(hold.backend, hold.claim)


def lose(hold: Hold | str, *, using: str = DEFAULT_ALIAS) -> None:
    """Let another caller take over the key of a hold, and report the loss.

    ``hold`` may be a key, which stands for this process's hold on it.

    On return, ``lock_lost`` and ``on_lost`` have been called, and ``hold.held`` is
    False. The block ends with LockLost. The other caller has released the key again.
    """
    hold = _live(hold, using)
    _end_lease(hold.backend, hold.claim)
    # The permit of a shared hold is free. A new holder for it is not needed.
    if not hold.claim.shared:
        key = hold.claim.key
        thief = Claim(
            key=key, ttl=LONG_AGO, fair=False, holder=HOLDER, owner_ip=HOLDER_IP
        )
        # Otherwise a waiter was faster.
        if hold.backend.acquire(thief) is not None:
            hold.backend.release(thief)
    hold._parts[0].lose(f"{HOLDER} took it over, for a test")


class FrozenClock:
    """A frozen clock for locks, which ``tick()`` advances."""

    def __init__(self) -> None:
        # A whole number, so that sums and comparisons in tests are exact.
        self._now = math.ceil(clock.now()) * 1.0

    def __call__(self) -> float:
        return self._now

    def tick(self, duration: Duration) -> None:
        """Advance the clock by a number of seconds or a ``timedelta``.

        On return, the keeper has renewed the leases that were due and noticed lost
        ones.
        """
        self._now += in_seconds(duration)
        keeper.catch_up()


@contextmanager
def frozen_clock() -> Iterator[FrozenClock]:
    """Freeze the clock of holds, memory leases and waiting.

    A wait for a lock advances the clock by its length without taking real time, so
    timeouts occur at once. Leases in a database expire by the database's clock, which
    cannot be frozen. Combine this with ``override_locks()``.
    """
    frozen = FrozenClock()

    def sleep(seconds: float) -> None:
        # In small steps, so that other threads can release or renew in between.
        frozen._now += min(seconds, LONGEST_STEP)
        time.sleep(0)
        for backend in list(backends._backends.values()):
            if isinstance(backend, MemoryBackend) and backend.waiters is not None:
                backend.waiters.poll_now()

    before = clock._read, clock._sleep
    clock._read, clock._sleep = frozen, sleep
    try:
        yield frozen
    finally:
        clock._read, clock._sleep = before
        # The keeper may be sleeping until a time on the frozen clock.
        keeper.check_soon()


def _claim(key: str, using: str, ttl: float, holder: str) -> tuple[Backend, Claim]:
    backend = backends[using]
    if not backend.exclusive:
        raise RuntimeError(
            f"DLOCKS[{using!r}] is a {type(backend).__name__}, which cannot hold a key."
        )
    full_key = Lock(key=key, using=using)._full_key(backend)
    return backend, Claim(key=full_key, ttl=ttl, holder=holder, owner_ip=HOLDER_IP)


def _take(backend: Backend, claim: Claim) -> None:
    if backend.acquire(claim) is None:
        raise RuntimeError(
            f"{claim.key!r} is already held by {backend.holder(claim.key)}."
        )


def _end_lease(backend: Backend, claim: Claim) -> None:
    _expirable(backend).expire(claim, LONG_AGO)


def _expirable(backend: Backend) -> DatabaseBackend | MemoryBackend:
    if not isinstance(backend, (DatabaseBackend, MemoryBackend)):
        raise NotImplementedError(
            f"A lease of {type(backend).__name__} cannot be expired for a test."
        )
    return backend


def _live(hold: Hold | str, using: str) -> Hold:
    if isinstance(hold, str):
        backend = backends[using]
        key = Lock(key=hold, using=using)._full_key(backend)
        found = [
            one
            for one in keeper.holds
            if one.claim.key == key and one.backend is backend
        ]
        if not found:
            raise RuntimeError(f"This process has no lease on {hold!r}.")
        hold = cast("Hold", found[0].face)
    # The loss of the first hold is the loss of all.
    hold = hold.holds[0]
    if hold.scope != "lease" or not hold.held:
        raise RuntimeError(
            f"{hold!r} is not a live lease. Acquire it outside a transaction, or use"
            " override_locks()."
        )
    return hold
