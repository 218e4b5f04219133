"""The waits of a process, all of which a shutdown ends."""

import gc

import pytest

from dlocks.runtime.waits import Waits

pytestmark = [pytest.mark.once, pytest.mark.engine("sqlite")]


class Wait:
    """A wait, which counts how often it was woken."""

    def __init__(self):
        self.wakeup, self.woken = self, 0

    def wake(self):
        self.woken += 1


def test_open_waits_are_woken_once():
    waits, open_wait, completed = Waits(), Wait(), Wait()
    assert waits.begin(open_wait)
    assert waits.begin(completed)
    assert waits.complete(completed)
    waits.end_all()
    waits.end_all()
    assert (open_wait.woken, completed.woken) == (1, 0)
    assert not waits.is_open(open_wait)
    assert not waits.complete(open_wait)
    assert not waits.begin(Wait())


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


def test_a_wait_is_not_kept_alive():
    """It refers to its task, which is collected with its loop."""
    waits = Waits()
    waits.begin(Wait())
    gc.collect()
    waits.end_all()
    assert waits.complete(Wait()) is False
