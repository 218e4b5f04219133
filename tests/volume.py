"""How often tests repeat what happens at random.

DLOCKS_TEST_VOLUME=10 is for a long run. Then every test repeats ten times as much.
"""

from __future__ import annotations

import os

VOLUME = float(os.environ.get("DLOCKS_TEST_VOLUME", "1"))


def volume(times: int) -> int:
    """Return how often a test repeats something, or for how many seconds."""
    return max(1, round(times * VOLUME))
