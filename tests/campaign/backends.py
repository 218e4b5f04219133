"""Backends that pause at random, and record when they free a key.

``DLOCKS`` names them, for example ``tests.campaign.backends.SlowMemoryBackend``.
"""

from __future__ import annotations

import itertools
import random
import time
from contextvars import ContextVar

from django.dispatch import receiver
from django.utils.module_loading import import_string

from dlocks import lock_lost

# The random numbers of a caller. Background threads have none of their own.
pauses: ContextVar[random.Random | None] = ContextVar("pauses", default=None)
# Pauses in the background are at most this long, in seconds. They delay all rounds.
LONGEST_IN_BACKGROUND = 0.001

_ticks = itertools.count(1)
# When the backend freed the key of an owner, as the number of the event.
freed: dict[str, int] = {}
# The owners of holds of which a signal has reported the loss.
lost: set[str] = set()


@receiver(lock_lost)
def _record_loss(hold, **_):
    lost.add(hold.owner)


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


# The methods of a backend that callers wait for, and those of them that free the keys
# of their first argument, a claim or several.
SLOW = "acquire", "acquire_all", "enqueue", "pin", "renew", "verify"
FREEING = "exchange", "release", "release_all"


class Slow:
    """Pauses before and after each method of a backend that callers wait for."""


def _slow(name):
    def method(self, claims, *args, **options):
        pause()
        answer = getattr(super(Slow, self), name)(claims, *args, **options)
        if name in FREEING and answer:
            for claim in claims if name == "release_all" else [claims]:
                freed.setdefault(claim.owner, tick())
        pause()
        return answer

    return method


for _name in (*SLOW, *FREEING):
    setattr(Slow, _name, _slow(_name))


class SlowMemoryBackend(Slow, import_string("dlocks.backends.memory.MemoryBackend")):
    """The memory backend with pauses."""


class SlowDatabaseBackend(
    Slow, import_string("dlocks.backends.database.PessimisticBackend")
):
    """The pessimistic backend with pauses."""
