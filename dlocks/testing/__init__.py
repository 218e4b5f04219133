"""Test helpers."""

from dlocks.testing.helpers import (
    FrozenClock,
    abandoned,
    expire,
    frozen_clock,
    held_elsewhere,
    lose,
    override_locks,
    undo_shutdown,
)

__all__ = [
    "FrozenClock",
    "abandoned",
    "expire",
    "frozen_clock",
    "held_elsewhere",
    "lose",
    "override_locks",
    "undo_shutdown",
]
