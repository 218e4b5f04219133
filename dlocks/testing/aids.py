"""What a project's own tests need of locks: somebody else who holds, a lease that ends, time that stands still."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from django.test import override_settings

from dlocks import clock
from dlocks.backends.base import BaseBackend, Claim
from dlocks.backends.database import DatabaseBackend
from dlocks.backends.database.dialects import KEY
from dlocks.backends.database.statements import MICROSECONDS
from dlocks.backends.memory import MemoryBackend
from dlocks.conf import DEFAULT_ALIAS, backends
from dlocks.exceptions import LockError
from dlocks.holds import Hold
from dlocks.keeper import keeper
from dlocks.locks import Lock
from dlocks.multi import MultiHold

NAMES = {"memory": "dlocks.backends.memory.MemoryBackend", "dummy": "dlocks.backends.dummy.DummyBackend"}
# Options that every backend has.
COMMON = {"prefix", "ttl", "timeout", "grace", "slow_wait", "slow_hold"}

# How long ago what is expired ran out: beyond any grace.
LONG_AGO = 3600.0

# Pretended holders; the address is one of those kept for documentation.
HOLDER, HOLDER_IP = "elsewhere:1:MainThread", "192.0.2.1"


class override_locks(override_settings):  # noqa: N801 (as Django's own)
    """
    Put every alias of DLOCKS on ``"memory"``, or ``"dummy"``: a context manager, and a decorator for tests and classes.

    On memory, locks exclude the threads and tasks of the process and need no database; dummy locks exclude nobody.
    Aliases keep their prefix, ttl, timeout and grace, unless they are given here.
    """

    def __init__(self, backend: str = "memory", **options: Any) -> None:
        if backend not in NAMES:
            raise ValueError(f"override_locks() takes {' or '.join(map(repr, NAMES))}, not {backend!r}")
        if unknown := options.keys() - COMMON:
            raise TypeError(f"override_locks() takes {', '.join(sorted(COMMON))}, not {', '.join(sorted(unknown))}")
        settings = {
            alias: {
                "BACKEND": NAMES[backend],
                "OPTIONS": {
                    **{name: value for name, value in conf.get("OPTIONS", {}).items() if name in COMMON},
                    **options,
                },
            }
            for alias, conf in backends.settings.items()
        }
        super().__init__(DLOCKS=settings)


@contextmanager
def held_elsewhere(
    key: str, *, using: str = DEFAULT_ALIAS, ttl: float = LONG_AGO, holder: str = HOLDER
) -> Iterator[None]:
    """Hold a key as another process would, for the length of the block: it is busy for everybody here."""
    backend, claim = _claim(key, using, ttl, holder)
    _take(backend, claim)
    try:
        yield
    finally:
        # Not there any more when the test has cleared it.
        with suppress(LockError):
            backend.release(claim)


def abandoned(key: str, *, using: str = DEFAULT_ALIAS, holder: str = HOLDER) -> None:
    """Leave a key as a process does that crashed under it, longer ago than its ttl: stale, and to be taken over."""
    backend, claim = _claim(key, using, LONG_AGO, holder)
    _take(backend, claim)
    _end_lease(backend, claim)


def expire(hold: Hold | str, *, using: str = DEFAULT_ALIAS) -> None:
    """
    Let the lease of a hold, or of the hold that this process has on a key, have run out unnoticed.

    Nobody is told: ``hold.check()`` or the next renewal will find out, or the end of the block once somebody has it.
    """
    hold = _live(hold, using)
    _end_lease(hold.backend, hold.claim)


def lose(hold: Hold | str, *, using: str = DEFAULT_ALIAS) -> None:
    """
    Let somebody else take over the key of a hold, or of the hold that this process has on a key, and tell so.

    ``lock_lost`` and ``on_lost`` have been called on return, ``hold.held`` is False, and the block ends with
    LockLost. The other has given the key back again.
    """
    hold = _live(hold, using)
    _end_lease(hold.backend, hold.claim)
    if hold.claim.shared:
        # Its place is free: that there is nobody in it is enough.
        hold.lose(f"{HOLDER} took it over, for a test")
        return
    thief = Claim(key=hold.claim.key, ttl=LONG_AGO, holder=HOLDER, owner_ip=HOLDER_IP)
    _take(hold.backend, thief)
    hold.backend.release(thief)
    hold.lose(f"{HOLDER} took it over, for a test")


class FrozenClock:
    """The clock of the locks, standing still: ``tick()`` turns it."""

    def __init__(self) -> None:
        # A whole number, so that what tests add and compare is exact.
        self._now = math.ceil(clock.now()) * 1.0

    def __call__(self) -> float:
        return self._now

    def tick(self, seconds: float) -> None:
        """Let so many seconds pass; on return the keeper has renewed what was due, and noticed what is lost."""
        self._now += seconds
        keeper.catch_up()


@contextmanager
def frozen_clock() -> Iterator[FrozenClock]:
    """
    Stop the clock on which holds, leases in memory and waiting are counted.

    Whoever waits for a lock turns it by as long as the wait, without any time passing, so time-outs come at once.
    Leases in a database run out by the database's clock, which nobody can stop: use ``override_locks()`` with it.
    """
    frozen = FrozenClock()

    def sleep(seconds: float) -> None:
        frozen._now += seconds
        # For other threads, which may have to give back first.
        time.sleep(0)

    before = clock._read, clock._sleep
    clock._read, clock._sleep = frozen, sleep
    try:
        yield frozen
    finally:
        clock._read, clock._sleep = before
        # It may have gone to sleep by the frozen clock.
        keeper.look()


def _claim(key: str, using: str, ttl: float, holder: str) -> tuple[BaseBackend, Claim]:
    backend = backends[using]
    if not backend.exclusive:
        raise RuntimeError(f"DLOCKS[{using!r}] is a {type(backend).__name__}, where nobody can hold a key.")
    full_key = Lock(key=key, using=using)._full_key(backend)
    return backend, Claim(key=full_key, ttl=ttl, holder=holder, owner_ip=HOLDER_IP)


def _take(backend: BaseBackend, claim: Claim) -> None:
    if backend.acquire(claim) is None:
        raise RuntimeError(f"{claim.key!r} is held already, by {backend.holder(claim.key)}.")


def _end_lease(backend: BaseBackend, claim: Claim) -> None:
    if isinstance(backend, MemoryBackend):
        with backend._mutex:
            entry = backend._live(claim)
            if entry is not None:
                entry.ends_at = backend.time() - LONG_AGO
    elif isinstance(backend, DatabaseBackend) and claim.shared:
        sql = "UPDATE {claims} SET end_time = {idle} WHERE owner = %(owner)s AND version IS NOT NULL"
        if not backend._count(backend._text(sql), {"owner": claim.owner, "idle": -round(LONG_AGO * MICROSECONDS)}):
            raise RuntimeError(f"{claim.key!r} is not held by {claim.holder} any more.")
    elif isinstance(backend, DatabaseBackend):
        ended = backend._write(
            claim, "end_time = {idle}", f"{KEY} AND owner = %(owner)s", {"idle": -round(LONG_AGO * MICROSECONDS)}
        )
        if not ended:
            raise RuntimeError(f"{claim.key!r} is not held by {claim.holder} any more.")
    else:
        raise NotImplementedError(f"A lease of {type(backend).__name__} cannot be ended for a test.")


def _live(hold: Hold | str, using: str) -> Hold:
    if isinstance(hold, str):
        backend = backends[using]
        key = Lock(key=hold, using=using)._full_key(backend)
        found = [one for one in keeper.holds if one.claim.key == key and one.backend is backend]
        if not found:
            raise RuntimeError(f"This process has no lease on {hold!r}.")
        hold = found[0]
    if isinstance(hold, MultiHold):
        # That the first is lost is that all are.
        hold = hold.holds[0]
    if hold.scope != "lease" or not hold.held:
        raise RuntimeError(
            f"{hold!r} is no lease that could end: a transaction keeps its locks. Take it outside of the transaction, "
            "or put the test under override_locks()."
        )
    return hold
