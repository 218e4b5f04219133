"""Waiting for a reply: poll at first, and sleep if it takes longer."""

from __future__ import annotations

import os
import select
import signal
import socket

import pytest

from tests.internals import polling

pytestmark = pytest.mark.engine("sqlite")


@pytest.fixture
def ends():
    """Return the two ends of a connection."""
    here, there = socket.socketpair()
    with here, there:
        yield here, there


def test_polling_stops_while_replies_are_late(ends, monkeypatch):
    """A reader polls for a short time, and yields the processor. Then it sleeps.

    An available reply, or a closed connection, is reported without either. Without
    ``sched_yield()`` a reader sleeps at once.
    """
    here, there = ends
    slept, looks, step, now = [], [], polling.SPIN_SECONDS / 10, 0.0

    class Poll:
        def __init__(self, made=select.poll):
            self.made = made()
            self.register = self.made.register

        def poll(self, timeout=None):
            if timeout != 0:
                slept.append(timeout)
            return self.made.poll(timeout)

    def give_way():
        nonlocal now
        now += step
        looks.append(True)

    monkeypatch.setattr(polling, "BuiltinFunctionType", object)
    monkeypatch.setattr(select, "poll", Poll)
    monkeypatch.setattr(polling.clock, "real_now", lambda: now)
    monkeypatch.setattr(os, "sched_yield", give_way)
    wait, limit = polling.readable(here.fileno()), polling.LATE_REPLIES_LIMIT
    assert not wait(timeout=0)
    assert not looks
    assert not wait(timeout=0.001)
    assert 9 <= len(looks) <= 11
    assert slept == [1.0]
    step = 2 * polling.SPIN_SECONDS
    looks.clear()
    for _ in range(limit - 1):
        wait(timeout=0.001)
    assert len(looks) == limit - 1
    # A reply that arrives is quick by the stopped clock, so polling is used again.
    there.send(b"answer")
    assert wait(timeout=0.001)
    assert wait()
    assert wait(timeout=0)
    assert here.recv(10) == b"answer"
    there.close()
    assert wait()
    assert (len(looks), len(slept)) == (limit - 1, limit + 1)
    monkeypatch.delattr(os, "sched_yield")
    assert polling.readable(here.fileno())()


def test_a_signal_handler_may_wait_for_the_same_reply(ends):
    """A handler may release locks while its thread waits for the same session."""
    here, there = ends
    wait, seen = polling.readable(here.fileno()), []

    def handle(*_):
        there.send(b"answer")
        seen.append(wait(timeout=10))

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert wait(timeout=10)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen == [True]
