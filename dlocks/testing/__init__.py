"""Test helpers, and a test suite for backends."""

from dlocks.testing.aids import (
    FrozenClock,
    abandoned,
    expire,
    frozen_clock,
    held_elsewhere,
    lose,
    override_locks,
)
from dlocks.testing.contract import BackendContract

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
