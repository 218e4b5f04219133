"""An election that is interrupted keeps nothing."""

from __future__ import annotations

import contextlib
import itertools

import pytest

from dlocks import LeaderElection
from tests.internals import leader
from tests.strikes import StruckExit

pytest_plugins = ["tests.moments"]
pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]


def test_an_interrupt_of_its_release_does_not_keep_the_lead(strike_in_dlocks, is_busy):
    """Otherwise the process would renew the key and not lead."""
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
