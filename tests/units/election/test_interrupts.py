"""An election that is interrupted keeps nothing."""

from __future__ import annotations

import contextlib
import itertools
import threading

import pytest

from dlocks import LeaderElection, db_lock
from tests.internals import leader
from tests.strikes import StruckExit

pytest_plugins = ["tests.moments"]
pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]


def test_an_interrupt_of_its_release_does_not_keep_the_lead(
    strike_in_dlocks, is_busy, threads
):
    """Otherwise the process would renew the key and not lead.

    No thread waits for an end that never comes.
    """
    for number in itertools.count():
        election = LeaderElection("scheduler", using="memory")
        election.on_elected = lambda hold, election=election: election.stop()
        release, struck = election._release, []

        def once(election=election, release=release, struck=struck, number=number):
            election._release = release
            struck.append(strike_in_dlocks(number, release))
            if struck[0]:
                raise StruckExit

        election._release = once
        with contextlib.suppress(StruckExit):
            election.run()
        assert not is_busy("leader:scheduler", "memory"), number
        stopping = threads(election.stop)
        stopping.join(5)
        assert not stopping.is_alive(), number
        if not struck[0]:
            break
    assert number > 10


def test_an_interrupt_at_its_start_ends_it(monkeypatch, threads):
    """Otherwise ``stop()`` would wait without an end."""

    class Elections:
        def add(self, election):
            raise StruckExit

    monkeypatch.setattr(leader, "begun", Elections())
    election = LeaderElection("scheduler", using="memory")
    with pytest.raises(StruckExit):
        election.run()
    stopping = threads(election.stop)
    stopping.join(5)
    assert not stopping.is_alive()


def test_an_interrupt_of_its_start_leaves_no_candidate(monkeypatch, until, is_busy):
    """The thread runs already, and its election ends."""
    start, started = threading.Thread.start, []

    def interrupted(thread):
        start(thread)
        if thread.name.startswith("dlocks-leader:"):
            started.append(thread)
            raise StruckExit

    election = LeaderElection("scheduler", using="memory")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(StruckExit):
            election.start()
    (thread,) = started
    thread.join(10)
    assert not thread.is_alive()
    assert not is_busy("leader:scheduler", "memory")


def test_a_look_at_the_lead_is_about_one_lead(monkeypatch):
    """The last lead ends and the next one begins in the middle of the look."""
    lock = db_lock("leader:scheduler", using="memory")
    last = lock.acquire()
    last.release()
    current = lock.acquire()
    for look in (
        lambda election: election.token in (None, current.token),
        lambda election: not election.resign() or not election.is_leader,
    ):
        leads = [leader.Lead(), leader.Lead()]
        leads[0].hold, leads[1].hold = last, current
        looks = itertools.chain(leads, itertools.repeat(leads[1]))

        class Elected(LeaderElection):
            _current = property(lambda self, looks=looks: next(looks), lambda *_: None)

        assert look(Elected("scheduler", using="memory"))
    current.release()
