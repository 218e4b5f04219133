"""The parameters of a worker, and the definitions that it shares."""

from __future__ import annotations

import time
from dataclasses import dataclass

# The kind of lock for each key. A suffix as in "alone-2" does not change the kind.
KEYS = {"alone": "x", "either": "x", "pages": "rw", "seats": "semaphore"}
PERMITS = 2


def kind_of(key: str) -> str:
    return KEYS[key.partition("-")[0]]


def keys_of_each(number: int) -> tuple[str, ...]:
    """Return that number of keys of each kind."""
    return tuple(f"{name}-{one}" for one in range(number) for name in KEYS)


def keys_of(name: str, number: int) -> tuple[str, ...]:
    """Return that number of keys of one kind."""
    return tuple(f"{name}-{one}" for one in range(number))


@dataclass(frozen=True, kw_only=True)
class Task:
    """The parameters of a worker."""

    slot: int
    seed: int
    directory: str
    ttl: float
    aliases: list[str]
    keys: list[str]
    leases: bool = True
    transactions: bool = True
    oddities: bool = True
    locked: bool = True
    # The maximum seconds of work under a hold, and the fraction of odd attempts.
    think: float = 0.03
    odd: float = 0.12
    host: str = ""
    port: int = 0
    # Whether the worker behaves as if it were on another host.
    far: bool = False
    # The fraction of attempts that acquire two or three keys, one inside the other.
    nested: float = 0.0
    # The only oddity that the worker uses.
    oddity: str = ""
    # The peer whose lock is used instead of dlocks.
    peer: str = ""


def now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)
