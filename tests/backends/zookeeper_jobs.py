"""Additional jobs of the ZooKeeper tests."""

from __future__ import annotations

import time
from pathlib import Path

from dlocks import LockLost, db_lock
from tests.internals import waiters


def be_patient(pipe, seconds):
    """Set the seconds after which unreachable servers are reported to waiters."""
    waiters.CONNECT_TIMEOUT = seconds


def hold_until_lost(pipe, key, **policy):
    """Hold without further requests and send the token.

    Return the losses that were reported, and the outcome of leaving the block.
    """
    told = []
    try:
        with db_lock(
            key, on_lost=lambda hold: told.append((hold.token, hold.held)), **policy
        ) as held:
            pipe.say(held.token)
            deadline = time.monotonic() + 30
            while not told and time.monotonic() < deadline:
                time.sleep(0.01)
    except LockLost:
        return told, "LockLost"
    return told, "released"


def read_or_write(pipe, path, key, *, times, write, **policy):
    """Add two to the counter in two steps, or check that it is even."""
    path = Path(path)
    for _ in range(times):
        with db_lock(key, shared=not write, timeout=None, **policy):
            value = int(path.read_text())
            assert value % 2 == 0, "a writer is active"
            if write:
                path.write_text(str(value + 1))
                time.sleep(0.001)
                path.write_text(str(value + 2))
