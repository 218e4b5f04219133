"""The threads of the keeper, where some cannot be started."""

from __future__ import annotations

import threading

import pytest

from dlocks import LockLost, db_lock
from tests.internals import backends, keeper

pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]


def test_only_tasks_are_run_later_if_no_worker_could_start(desks_fail, until):
    """A call is not, because its key would be acquired for a caller with an error.

    A renewal is a task.
    """
    taken, failed = [], desks_fail(1)
    with pytest.raises(RuntimeError, match="new thread"):
        keeper.run(lambda: taken.append("stock:7"), backends["memory"])
    assert failed()
    keeper.run(lambda: None, backends["memory"])
    assert not taken

    until(no_worker_runs)
    done, failed = [], desks_fail(1)

    def chore():
        done.append(1)

    keeper.later(chore, 0.0, backends["memory"])
    until(failed)
    until(lambda: done)
    until(lambda: chore not in keeper._deferred)
    assert done == [1]
    until(no_worker_runs)
    with db_lock("stock:7", using="memory", ttl=2.4) as hold:
        failed, deadline = desks_fail(1), hold._state.lease.deadline
        until(failed)
        until(lambda: hold._state.lease.deadline > deadline)


def test_starting_the_keeper_thread_is_retried(monkeypatch, until):
    monkeypatch.setattr(keeper._thread, "thread", None)

    def fail(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            db_lock("stock:7", using="memory").acquire()
    with db_lock("stock:7", using="memory", ttl=3) as hold:
        deadline = hold._state.lease.deadline
        until(lambda: hold._state.lease.deadline > deadline)


def no_worker_runs():
    return all(thread.name != "dlocks-worker" for thread in threading.enumerate())


@pytest.fixture
def desks_fail(monkeypatch, until):
    """Return a function that makes the next starts of desk threads fail.

    Another call replaces the number of failures.
    """
    start, left = threading.Thread.start, 0

    def begin(thread):
        nonlocal left
        if thread.name == "dlocks-worker" and left > 0:
            left -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    def fail(times):
        nonlocal left
        left = times
        return lambda: left == 0

    until(no_worker_runs)
    monkeypatch.setattr(threading.Thread, "start", begin)
    yield fail
    left = 0


def test_a_worker_that_cannot_start_does_not_affect_others(desks_fail, until, settings):
    memory = settings.DLOCKS["memory"]
    settings.DLOCKS = {f"memory {number}": memory for number in range(6)}
    healthy = [
        db_lock("stock:7", using=using, ttl=2.4).acquire() for using in settings.DLOCKS
    ]
    began = max(hold._state.lease.deadline for hold in healthy)
    until(lambda: min(hold._state.lease.deadline for hold in healthy) > began)
    settings.DLOCKS = {**settings.DLOCKS, "new": memory}
    desks_fail(1000)
    with pytest.raises(LockLost), db_lock("stock:7", using="new", ttl=3) as sick:
        until(lambda: sick._state.is_over)
    for hold in healthy:
        hold.release()
