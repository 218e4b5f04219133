"""What an election does after an error: pauses, cancellations, connections, forks."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import os
import queue
import threading
import time

import pytest
from django.db import connections

from dlocks import Hold, LeaderElection
from dlocks.testing import lose
from tests.internals import failures, leader
from tests.promises.election.campaigns import elections, fail, heard, next_of

__all__ = ["elections", "heard"]

pytestmark = pytest.mark.front


def test_the_work_of_a_leader_ends_during_on_deposed(elections, heard, monkeypatch):
    """Every thread in ``wait()`` learns of the end, even if ``on_elected`` fails.

    This holds even if the same process is elected again at once, with another token and
    new work. A thread in ``wait()`` does not delay ``stop()``. A SystemExit, as
    ``call_command("run_locked")`` raises it, is a failure like others.
    """
    monkeypatch.setattr(failures, "PAUSE", 0.0)
    waiting, waited, threads = threading.Semaphore(0), queue.SimpleQueue(), []
    endings = [SystemExit(3), ZeroDivisionError()]

    class WaitedFor(leader.Latch):
        def wait(self, seconds=None):
            waiting.release()
            return super().wait(seconds)

    def work(seconds):
        waited.put(one.wait(seconds))

    def elected(hold):
        one._current.over = WaitedFor()
        for seconds in (60, 60, 60, float("inf")):
            threads.append(threading.Thread(target=work, args=[seconds], daemon=True))
            threads[-1].start()
        for _ in threads[-4:]:
            assert waiting.acquire(timeout=10)
        heard.put(("one", "elected", hold))
        if endings:
            raise endings.pop()

    def deposed(hold):
        led = one.is_leader
        ended = [waited.get(timeout=10) for _ in range(4)]
        heard.put(("one", "deposed", (led, ended)))

    one = elections(on_elected=elected, on_deposed=deposed)
    one.start()
    told = [next_of(heard) for _ in range(5)]
    assert one.stop(5)
    told.append(next_of(heard))
    assert [what for what, _ in told] == ["one elected", "one deposed"] * 3
    assert [seen for _, seen in told[1::2]] == [(False, [False] * 4)] * 3
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


@pytest.mark.django_db(transaction=True)
def test_a_broken_connection_is_replaced_before_the_next_lead(
    elections, heard, monkeypatch
):
    monkeypatch.setattr(failures, "PAUSE", 0.0)

    def lead(hold):
        there = connections["default"]
        there.ensure_connection()
        heard.put(("one", "elected", there.connection))
        if not hasattr(one, "broke"):
            one.broke = True
            # Django sets this flag when a statement fails.
            there.errors_occurred = True
            monkeypatch.setattr(there, "is_usable", lambda: False)
            raise ZeroDivisionError

    one = elections(on_elected=lead)
    one.start()
    (_, broken), (_, whole) = next_of(heard), next_of(heard)
    assert broken is not whole


def test_a_deposed_leader_does_not_lead_until_its_release(elections, monkeypatch):
    release, answers = Hold.release, []

    def read_and_release(hold, **options):
        answers.append((one.is_leader, hold.held))
        release(hold, **options)

    monkeypatch.setattr(Hold, "release", read_and_release)
    one = elections(on_elected=fail, give_up_after=1)
    with pytest.raises(ZeroDivisionError):
        one.run()
    assert answers == [(False, True)]


async def test_an_election_that_is_cancelled_twice_ends(monkeypatch):
    """``asyncio.run()`` cancels remaining tasks a second time.

    If that skipped the cleanup, ``stop()`` in another thread would never return.
    """
    one = LeaderElection("twice", using="memory")
    task = asyncio.create_task(one.arun())
    while not one.is_leader:
        await asyncio.sleep(0.001)
    begun, going_on = threading.Event(), threading.Event()
    release = one._release

    def slowly(**options):
        begun.set()
        going_on.wait(10)
        release(**options)

    monkeypatch.setattr(one, "_release", slowly)
    task.cancel()
    await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    await asyncio.sleep(0)
    going_on.set()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(one.stop, 5)


def test_a_fork_of_a_leader_does_not_wait_for_its_parent(elections, monkeypatch):
    elected = threading.Event()
    one = elections(on_elected=lambda hold: elected.set())
    one.start()
    assert elected.wait(10)
    inherited = copy.copy(one)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: 1)
        assert not inherited.is_leader
        assert inherited.stop(5)
    assert one.is_leader


def test_the_pause_after_a_failure_doubles_up_to_a_minute(
    elections, caplog, monkeypatch
):
    """A programming error is logged with one traceback, then one line each time.

    The retries become less frequent. A new error is logged with its traceback.
    """
    pauses, errors = [], [ZeroDivisionError("on purpose")] * 6 + [KeyError("stock")] * 2

    def fail_by_turns(hold):
        raise errors.pop(0)

    def rest(self, seconds):
        pauses.append(seconds)
        if not errors:
            self.stop()

    monkeypatch.setattr(LeaderElection, "_pause", rest)
    with caplog.at_level(logging.ERROR, "dlocks"):
        elections(on_elected=fail_by_turns).run()
    assert pauses == [5, 10, 20, 40, 60, 60, 60, 60]
    traced = [record.exc_info is not None for record in caplog.records]
    assert traced == [True, *[False] * 5, True, False]
    first, second, *_ = caplog.messages
    assert first == "on_elected of 'scheduler' failed. The next campaign begins in 5 s."
    assert second.startswith(
        "on_elected of 'scheduler' failed 2 times in a row: ZeroDivisionError: on"
        " purpose. The next"
    )


@pytest.mark.parametrize("good", ["short", "long"])
def test_a_successful_lead_resets_the_failure_count(good, elections, monkeypatch):
    """The count restarts after a lead without error or of more than a minute."""
    pauses, leads = [], []

    def lead(hold):
        leads.append(hold)
        if len(leads) == 3 and good == "short":
            lose(hold)
            hold.check()
        if len(leads) == 3:
            hold._parts[0].lease.granted_at -= 61
        raise ZeroDivisionError

    def rest(self, seconds):
        pauses.append(seconds)
        if len(pauses) == 5:
            self.stop()

    monkeypatch.setattr(LeaderElection, "_pause", rest)
    elections(on_elected=lead).run()
    assert pauses == ([5, 10, 0, 5, 10] if good == "short" else [5, 10, 5, 10, 20])


@pytest.mark.parametrize("how", ["run", "arun", "start"])
def test_an_election_ends_after_repeated_failures(
    how, elections, caplog, monkeypatch, until
):
    """With ``give_up_after=3`` the third failure in a row ends the election.

    The error is raised, or logged by a thread, and the key is free.
    """
    monkeypatch.setattr(failures, "PAUSE", 0.01)
    deposed = []
    one = elections(on_elected=fail, on_deposed=deposed.append, give_up_after=3)
    with caplog.at_level(logging.ERROR, "dlocks"):
        if how == "start":
            one.start()
            until(lambda: not one._runner.is_alive())
        else:
            with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
                one.run() if how == "run" else asyncio.run(one.arun())
            assert "3 failures in a row" in caught.value.__notes__[0]
    traced = [record.exc_info is not None for record in caplog.records]
    assert traced == [True, False, False]
    assert caplog.messages[-1].endswith("The election ends.")
    assert (len(deposed), one.leader()) == (3, None)
    assert one.stop(0)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ZeroDivisionError("on purpose"), "on purpose"),
        # Other code has cancelled the work.
        (asyncio.CancelledError(), "not by the election"),
    ],
    ids=["error", "cancelled"],
)
async def test_an_error_of_async_work_is_logged_and_releases_the_key(
    error, message, caplog, monkeypatch
):
    monkeypatch.setattr(failures, "PAUSE", 0.7)
    tries, at = [], []
    leading = asyncio.Event()

    async def work(hold):
        tries.append(hold)
        at.append(time.monotonic())
        if len(tries) == 1:
            raise error
        leading.set()

    one = LeaderElection("scheduler", using="memory", on_elected=work)
    with caplog.at_level(logging.ERROR, "dlocks"):
        running = asyncio.create_task(one.arun())
        await leading.wait()
    assert message in caplog.text
    assert tries[1].token > tries[0].token
    assert at[1] - at[0] > 0.65, "others have a chance"
    one.stop()
    await running
