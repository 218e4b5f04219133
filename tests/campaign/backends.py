"""Backends that pause at random, and record when they free a key.

``DLOCKS`` names them, for example ``tests.campaign.backends.SlowMemoryBackend``.
"""

from __future__ import annotations

import itertools
import random
import time
from contextvars import ContextVar

from django.utils.module_loading import import_string

# The random numbers of a caller. Background threads have none of their own.
pauses: ContextVar[random.Random | None] = ContextVar("pauses", default=None)
# Pauses in the background are at most this long, in seconds. They delay all rounds.
LONGEST_IN_BACKGROUND = 0.001

_ticks = itertools.count(1)
# When the backend freed the key of an owner, as the number of the event.
freed: dict[str, int] = {}


def tick() -> int:
    """Return the number of an event. Later events have larger numbers."""
    return next(_ticks)


def pause():
    """Sleep for a random short time, which is often none."""
    numbers = pauses.get()
    if numbers is None:
        time.sleep(random.uniform(0, LONGEST_IN_BACKGROUND))
        return
    chance = numbers.random()
    if chance < 0.4:
        return
    if chance < 0.6:
        time.sleep(0)
    elif chance < 0.95:
        time.sleep(numbers.uniform(0, 0.003))
    else:
        time.sleep(numbers.uniform(0.005, 0.02))


class Slow:
    """Pauses before and after each method of a backend that callers wait for."""

    def acquire(self, claim):
        pause()
        grant = super().acquire(claim)
        pause()
        return grant

    def acquire_all(self, claims, **options):
        pause()
        grants = super().acquire_all(claims, **options)
        pause()
        return grants

    def renew(self, claims):
        pause()
        left = super().renew(claims)
        pause()
        return left

    def verify(self, claims, count=None):
        pause()
        verified = super().verify(claims, count)
        pause()
        return verified

    def release(self, claim, *, failed=False, rest_for=0.0):
        pause()
        released = super().release(claim, failed=failed, rest_for=rest_for)
        if released:
            freed.setdefault(claim.owner, tick())
        pause()
        return released

    def release_all(self, claims, *, failed=False):
        pause()
        released = super().release_all(claims, failed=failed)
        if released:
            for claim in claims:
                freed.setdefault(claim.owner, tick())
        pause()
        return released

    def pin(self, claim, database):
        pause()
        pinned = super().pin(claim, database)
        pause()
        return pinned

    def exchange(self, claim, successor):
        pause()
        grant = super().exchange(claim, successor)
        if grant is not None:
            freed.setdefault(claim.owner, tick())
        pause()
        return grant

    def enqueue(self, claim, channel="", position=None):
        pause()
        ticket = super().enqueue(claim, channel, position)
        pause()
        return ticket


class SlowMemoryBackend(Slow, import_string("dlocks.backends.memory.MemoryBackend")):
    """The memory backend with pauses."""


class SlowDatabaseBackend(
    Slow, import_string("dlocks.backends.database.PessimisticBackend")
):
    """The pessimistic backend with pauses."""
