"""What a worker is told at its start, and what it shares with who tells it."""

from __future__ import annotations

import time
from dataclasses import dataclass

# What the keys are for; "alone-2" is for what "alone" is.
KEYS = {"alone": "x", "either": "x", "pages": "rw", "seats": "semaphore"}
PERMITS = 2


def kind_of(key: str) -> str:
    return KEYS[key.partition("-")[0]]


def keys_of_each(number: int) -> tuple[str, ...]:
    """Return so many keys of each kind."""
    return tuple(f"{name}-{one}" for one in range(number) for name in KEYS)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a worker is told at its start."""

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
    # For how many seconds at most a hold is thought about, and which share of the turns is odd.
    think: float = 0.03
    odd: float = 0.12
    host: str = ""
    port: int = 0
    # Whether it is as if on another machine.
    far: bool = False
    # The only oddity, of all turns.
    oddity: str = ""
    bug: str = ""
    # Whose lock it is, if not that of dlocks.
    peer: str = ""


def now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)
