"""Threads that yield at random moments, so that a race which is rare happens often."""

import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def yielding(seed: int, often: float = 0.05) -> Iterator[None]:
    """Let this thread yield at random lines of the code that it calls."""
    choice = random.Random(seed)

    def trace(_frame: Any, event: str, _argument: Any) -> Any:
        if event == "line" and choice.random() < often:
            time.sleep(0.0001)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
