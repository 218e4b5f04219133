"""The waits of a process, all of which a shutdown ends."""

import itertools
from functools import partial

import pytest

from dlocks import LockShutDown, db_lock, shutdown
from dlocks.conf import backends
from dlocks.runtime.waits import Waits
from dlocks.testing import undo_shutdown
from tests.internals import Claim, Waiter, Waiters

pytest_plugins = ["tests.moments"]
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


def test_a_caller_that_is_about_to_join_the_queue_at_a_shutdown_ends(
    monkeypatch, threads
):
    """The shutdown has freed its key, and would otherwise be followed by a grant."""
    backend = backends["memory"]
    enqueue, lock = backend.enqueue, db_lock("stock:7", using="memory", timeout=None)

    def late(*arguments, **options):
        threads(shutdown).join(30)
        return enqueue(*arguments, **options)

    def wait():
        with pytest.raises(LockShutDown):
            lock.acquire()

    hold = lock.acquire()
    monkeypatch.setattr(backend, "enqueue", late)
    try:
        threads(wait).join(30)
    finally:
        undo_shutdown()
    assert not hold.held
    assert not lock.locked()


def test_a_waiter_whose_removal_is_interrupted_does_not_rejoin(strike_in_dlocks):
    """It is removed once more, and its claim is deleted, which a late poll notices."""
    for number in itertools.count():
        waiters = Waiters(backends["memory"])
        waiter = Waiter(Claim(key="stock:7", ttl=30.0), lambda: None)
        waiters._waiters[waiter.claim.owner] = waiter
        remove = partial(waiters.remove, waiter)
        struck = strike_in_dlocks(number, remove, within=("runtime",))
        remove()
        assert waiters._rejoin(waiter) is None, number
        if not struck:
            break
    assert number > 3
