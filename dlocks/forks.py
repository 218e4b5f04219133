"""What a process that was made by fork must not take over from its parent."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_child(forget: Callable[[], object]) -> None:
    """Have a function called in each process that is forked from this one; where there is no fork, never."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget)
