"""How often tests repeat what happens at random.

With DLOCKS_TEST_VOLUME=3, tests that use it repeat three times as much.
"""

from __future__ import annotations

import os

VOLUME = float(os.environ.get("DLOCKS_TEST_VOLUME", "1"))


def volume(times: int) -> int:
    """Return how often a test repeats something, or for how many seconds."""
    return max(1, round(times * VOLUME))
