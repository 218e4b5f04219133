"""The parameters of a campaign and of its workers, and what these share."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

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
class Plan:
    """The parameters of a campaign.

    ``faults`` are weights by name. ``through`` is the way to the server: "direct",
    "proxy", "pgbouncer" or "network". With "network", every other worker is in a
    network namespace of its own. ``think`` is the maximum of seconds of work under a
    hold, ``odd`` the fraction of odd attempts, and ``nested`` that of attempts that
    acquire two or three keys, one inside the other.
    """

    engine: str
    seconds: float
    seed: int
    workers: int = 6
    ttl: float = 1.5
    keys: tuple[str, ...] = tuple(KEYS)
    aliases: tuple[str, ...] = ("default", "optimistic", "insert")
    faults: Mapping[str, float] = field(default_factory=dict)
    pause: float = 0.3
    think: float = 0.03
    odd: float = 0.12
    through: str = "direct"
    leases: bool = True
    transactions: bool = True
    oddities: bool = True
    nested: float = 0.0
    locked: bool = True
    # Hours by which the clocks of every other worker are wrong.
    skew: float = 0.0
    # The only oddity of the workers, the state at which most faults aim, and whether
    # the server's clock can be stepped.
    oddity: str = ""
    seek: str = ""
    clock: bool = False
    bug: str = ""
    peer: str = ""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The parameters of a worker. It is ``far`` if it behaves as if on another host."""

    plan: Plan
    slot: int
    seed: int
    directory: str
    host: str = ""
    port: int = 0
    far: bool = False


def now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)
