"""What background threads and their callers wait for."""

import itertools
import threading
from functools import partial
from queue import SimpleQueue
from threading import Barrier, Event
from types import SimpleNamespace

import pytest

from dlocks.backends.quorum.members import THREADS, Member
from dlocks.runtime.threads import BackgroundThread, Latch

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


@pytest.fixture
def starts(monkeypatch):
    """Let a test call something before each start of its thread, in order."""
    steps, start = [], threading.Thread.start

    def begin(thread):
        if "tested" in thread.name and steps:
            steps.pop(0)()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)
    return steps


def test_a_thread_works_although_another_start_at_once_was_interrupted(starts, threads):
    """Otherwise the interrupt of one caller stops the renewals of another one."""
    first_looks, second_ends, worked = Event(), Event(), Event()

    def work():
        if background.is_current:
            worked.set()

    def pause():
        first_looks.set()
        second_ends.wait(10)

    def interrupt():
        raise KeyboardInterrupt

    background = BackgroundThread("dlocks-tested", work)
    starts += [pause, interrupt]
    first = threads(background.start)
    assert first_looks.wait(10)
    with pytest.raises(KeyboardInterrupt):
        background.start()
    second_ends.set()
    first.join(10)
    assert worked.wait(10)


def test_a_thread_that_ends_during_a_look_causes_no_error():
    class Ending(BackgroundThread):
        @property
        def thread(self):
            return reads.pop(0)

        @thread.setter
        def thread(self, thread):
            pass

    reads = [threading.current_thread(), None]
    assert Ending("dlocks-tested", int).is_running


def test_one_of_two_threads_that_are_started_at_once_works(starts, threads):
    both_look, are_current, may_end = Barrier(2), SimpleQueue(), Event()

    def work():
        are_current.put(background.is_current)
        may_end.wait(10)

    background = BackgroundThread("dlocks-tested", work)
    starts += [partial(both_look.wait, 10)] * 2
    for one in [threads(background.start) for _ in range(2)]:
        one.join(10)
    assert {are_current.get(timeout=10) for _ in range(2)} == {True, False}
    assert background.is_running
    may_end.set()


def test_many_callers_at_once_ask_a_member_by_a_few_threads(starts, threads):
    """Each thread has connections of its own, whose number the server limits."""
    member = Member("tested", SimpleNamespace(close=lambda: None))
    callers, asked_in, may_reply = 3 * THREADS, SimpleQueue(), Event()

    def question(member):
        asked_in.put(threading.current_thread())
        may_reply.wait(10)

    starts += [partial(Barrier(callers).wait, 10)] * callers
    for one in [
        threads(partial(member.ask, question, SimpleQueue())) for _ in range(callers)
    ]:
        one.join(10)
    first = {asked_in.get(timeout=10) for _ in range(THREADS)}
    may_reply.set()
    rest = {asked_in.get(timeout=10) for _ in range(callers - THREADS)}
    assert len(first) == THREADS
    assert rest <= first


def test_a_member_of_a_quorum_is_never_asked_in_the_thread_of_a_caller(starts, threads):
    """Its request would wait there, or become part of the caller's transaction."""
    member = Member("tested", SimpleNamespace(close=lambda: None))
    asked_in = SimpleQueue()
    first_looks, second_looks, first_returns = Event(), Event(), Event()

    def question(member):
        asked_in.put(threading.current_thread())
        first_returns.wait(10)

    def let_second_look():
        first_looks.set()
        second_looks.wait(10)

    def let_first_return():
        second_looks.set()
        first_returns.wait(10)

    def ask_first():
        member.ask(question, SimpleQueue())
        first_returns.set()

    starts += [let_second_look, let_first_return]
    first = threads(ask_first)
    assert first_looks.wait(10)
    second = threads(partial(member.ask, question, SimpleQueue()))
    first.join(20)
    second.join(20)
    assert not {asked_in.get(timeout=10) for _ in range(2)} & {first, second}
