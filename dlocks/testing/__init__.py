"""Test helpers, and a test suite for backends."""

from dlocks.testing.contract import BackendContract
from dlocks.testing.helpers import (
    FrozenClock,
    abandoned,
    expire,
    frozen_clock,
    held_elsewhere,
    lose,
    override_locks,
)

__all__ = [
    "BackendContract",
    "FrozenClock",
    "abandoned",
    "expire",
    "frozen_clock",
    "held_elsewhere",
    "lose",
    "override_locks",
]
