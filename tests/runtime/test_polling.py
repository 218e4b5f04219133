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


@pytest.fixture
def slept(monkeypatch):
    """Return a list of the timeouts of all ``poll()`` calls that sleep.

    The timeouts are milliseconds or None.
    """
    times = []

    class Poll:
        def __init__(self, poll):
            self._poll = poll
            self.register = poll.register

        def poll(self, timeout=None):
            if timeout != 0:
                times.append(timeout)
            return self._poll.poll(timeout)

    made = select.poll
    monkeypatch.setattr(polling, "BuiltinFunctionType", object)
    monkeypatch.setattr(select, "poll", lambda: Poll(made()))
    return times


@pytest.fixture
def stopped(monkeypatch):
    """Return a function that advances the clock that limits the polling."""
    now = 0.0

    def let_pass(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(polling.clock, "real_now", lambda: now)
    return let_pass


def test_polling_stops_while_replies_are_late(ends, slept, stopped, monkeypatch):
    """A reader polls for a short time, and yields the processor. Then it sleeps."""
    here, there = ends
    looks, step = [], polling.SPIN_SECONDS / 10
    monkeypatch.setattr(os, "sched_yield", lambda: (looks.append(True), stopped(step)))
    wait = polling.readable(here.fileno())
    assert not wait(timeout=0.001)
    assert 9 <= len(looks) <= 11
    assert slept == [1.0]
    step = 2 * polling.SPIN_SECONDS
    looks.clear()
    for _ in range(polling.LATE_REPLIES_LIMIT - 1):
        wait(timeout=0.001)
    assert len(looks) == polling.LATE_REPLIES_LIMIT - 1
    there.send(b"answer")
    assert wait(timeout=0.001)
    assert len(looks) == polling.LATE_REPLIES_LIMIT - 1
    assert len(slept) == polling.LATE_REPLIES_LIMIT + 1
    # The reply is quick by the stopped clock, so polling is used again.
    assert wait()
    assert len(slept) == polling.LATE_REPLIES_LIMIT + 1


def test_a_timeout_of_zero_polls_once(ends, slept, monkeypatch):
    """An available reply, or a closed connection, is reported without sleeping."""
    here, there = ends
    monkeypatch.setattr(os, "sched_yield", lambda: pytest.fail("it waited"))
    wait = polling.readable(here.fileno())
    assert not wait(timeout=0)
    there.send(b"answer")
    assert wait(timeout=0)
    assert wait()
    assert here.recv(10) == b"answer"
    there.close()
    assert wait()
    assert not slept


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


def test_a_reader_sleeps_without_sched_yield(ends, monkeypatch):
    here, there = ends
    monkeypatch.delattr(os, "sched_yield")
    wait = polling.readable(here.fileno())
    assert not wait(timeout=0.001)
    there.send(b"answer")
    assert wait()
