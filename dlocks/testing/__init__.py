"""For tests: the aids of ``dlocks.testing.aids``, and the rules for backends as a suite."""

from dlocks.testing.aids import FrozenClock, abandoned, expire, frozen_clock, held_elsewhere, lose, override_locks
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
