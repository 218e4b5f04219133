"""The waits of a process, all of which a shutdown ends."""

import pytest

from dlocks.runtime.waits import Waits

pytestmark = [pytest.mark.once, pytest.mark.engine("sqlite")]


class Wait:
    """A wait, which counts how often it was woken."""

    def __init__(self):
        self.wakeup, self.woken = self, 0

    def wake(self):
        self.woken += 1


def test_a_wait_that_has_ended_does_not_continue():
    """Neither does it acquire a key, although other waits may begin again."""
    waits, ended, later = Waits(), Wait(), Wait()
    waits.begin(ended)
    waits.end_all()
    waits.resume()
    assert waits.begin(later)
    assert waits.is_open(later)
    assert not waits.is_open(ended)
    assert not waits.complete(ended)
