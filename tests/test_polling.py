"""How an answer is waited for: awake where it comes soon, asleep where it does not."""

from __future__ import annotations

import os
import select
import signal
import socket

import pytest

from dlocks import polling

pytestmark = pytest.mark.engine("sqlite")


@pytest.fixture
def ends():
    """Return the two ends of a connection."""
    here, there = socket.socketpair()
    with here, there:
        yield here, there


@pytest.fixture
def slept(monkeypatch):
    """Return a list that gets the milliseconds, or None, of each time that somebody slept in poll()."""
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
    """Return a function that lets time pass on the clock by which it is looked for how long."""
    now = 0.0

    def let_pass(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(polling, "perf_counter", lambda: now)
    return let_pass


def test_an_answer_that_is_there_is_not_slept_for(ends, slept):
    here, there = ends
    wait = polling.readable(here.fileno())
    there.send(b"answer")
    assert wait()
    assert not slept


def test_who_looks_gives_way_to_whoever_answers(ends, slept, stopped, monkeypatch):
    """As it would not on one processor, where the answer could then not come."""
    here, there = ends
    monkeypatch.setattr(os, "sched_yield", lambda: there.send(b"answer"))
    assert polling.readable(here.fileno())()
    assert not slept


def test_what_does_not_come_soon_is_slept_for(ends, slept, stopped, monkeypatch):
    here, _ = ends
    looks = []
    monkeypatch.setattr(os, "sched_yield", lambda: (looks.append(True), stopped(polling.LOOKS_FOR / 10)))
    assert not polling.readable(here.fileno())(timeout=0.001)
    assert 9 <= len(looks) <= 11
    assert slept == [1.0]


def test_where_answers_come_late_nobody_looks_for_them_until_one_is_quick_again(ends, slept, stopped, monkeypatch):
    here, there = ends
    looks = []
    monkeypatch.setattr(os, "sched_yield", lambda: (looks.append(True), stopped(polling.LOOKS_FOR)))
    wait = polling.readable(here.fileno())
    for _ in range(polling.LATE_AT_MOST):
        wait(timeout=0.001)
    assert len(looks) == polling.LATE_AT_MOST
    there.send(b"answer")
    assert wait(timeout=0.001)
    assert len(looks) == polling.LATE_AT_MOST
    assert len(slept) == polling.LATE_AT_MOST + 1
    # Quick, by the clock that stands still: it is looked for again.
    assert wait()
    assert len(slept) == polling.LATE_AT_MOST + 1


def test_who_does_not_wait_looks_once(ends, slept, monkeypatch):
    here, there = ends
    monkeypatch.setattr(os, "sched_yield", lambda: pytest.fail("it waited"))
    wait = polling.readable(here.fileno())
    assert not wait(timeout=0)
    there.send(b"answer")
    assert wait(timeout=0)
    assert not slept


def test_a_signal_s_handler_may_wait_for_the_same_answer(ends):
    """One that gives locks back, say, while the thread that it interrupts waits for the session of these."""
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


def test_a_connection_that_is_closed_is_told_at_once(ends, slept):
    here, there = ends
    wait = polling.readable(here.fileno())
    there.close()
    assert wait()
    assert not slept


def test_where_there_is_no_giving_way_it_is_slept_for(ends, monkeypatch):
    here, there = ends
    monkeypatch.delattr(os, "sched_yield")
    wait = polling.readable(here.fileno())
    assert not wait(timeout=0.001)
    there.send(b"answer")
    assert wait()
