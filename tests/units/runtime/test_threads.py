"""What background threads and their callers wait for."""

import itertools

import pytest

from dlocks.runtime.threads import Latch

pytest_plugins = ["tests.moments"]
pytestmark = [pytest.mark.once, pytest.mark.engine("sqlite")]


class SetDuringWait:
    """The lock of a latch that is set just before a thread waits for the lock."""

    def __init__(self, latch):
        self._latch, self._lock = latch, latch._lock

    def acquire(self, timeout):
        self._latch.set()
        return self._lock.acquire(timeout=timeout)

    def release(self):
        self._lock.release()

    @property
    def is_free(self):
        return not self._lock.locked()


def test_an_interrupted_wait_leaves_no_other_thread_waiting(strike_in_dlocks):
    """Neither does the interrupt of the thread that sets the latch."""
    for number in itertools.count():
        latch = Latch()
        latch._lock = lock = SetDuringWait(latch)
        struck = strike_in_dlocks(number, latch.wait, within=("runtime",))
        assert lock.is_free or not latch.is_set(), number
        if not struck:
            break
    assert number > 3
