"""Leader election: one leader at a time, and a successor without delay."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import freezegun
import pytest
from asgiref.sync import sync_to_async
from django.db import connections

from dlocks import (
    Hold,
    LeaderElection,
    LockBackendError,
    LockLost,
    db_lock,
    lock_acquired,
)
from tests import jobs
from tests.database.test_faults import on_server, server  # noqa: F401 (fixtures)
from tests.internals import KeyState, backends, election
from tests.timing import eventually, in_time

pytestmark = pytest.mark.front

TTL = 1.5
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def elections():
    """Return a function that creates elections and stops them after the test."""
    made = []

    def make(name="scheduler", **options):
        made.append(LeaderElection(name, **{"using": "memory", **options}))
        return made[-1]

    yield make
    for one in made:
        assert one.stop(10)


@pytest.fixture
def heard():
    return queue.SimpleQueue()


def telling(heard, who):
    return {
        "on_elected": lambda hold: heard.put((who, "elected", hold)),
        "on_deposed": lambda hold: heard.put((who, "deposed", hold)),
    }


def next_of(heard):
    who, what, hold = heard.get(timeout=20)
    return f"{who} {what}", hold


def take_away(key):
    """Make a leader lose its key, as if an administrator had cleared it."""
    backend = backends["memory"]
    backend._states[key] = KeyState(backend._states[key].version)


# One process, on the memory backend.


def test_the_next_candidate_leads_when_the_leader_stops(elections, heard):
    first, second = (
        elections(**telling(heard, "first")),
        elections(**telling(heard, "second")),
    )
    first.start()
    told, hold = next_of(heard)
    assert told == "first elected"
    assert first.is_leader
    assert first.token == hold.token
    assert first.leader().token == hold.token
    assert first.key == hold.key == "leader:scheduler"
    second.start()
    assert not second.is_leader
    assert second.token is None
    assert first.stop(10)
    assert not first.is_leader
    assert first.token is None
    assert next_of(heard)[0] == "first deposed"
    told, later = next_of(heard)
    assert told == "second elected"
    assert later.token > hold.token
    assert second.is_leader


def test_a_stopped_candidate_leaves_the_queue(elections, heard):
    """The key is not kept for it when the leader stops."""
    leader, candidate = elections(**telling(heard, "leader")), elections()
    leader.start()
    assert next_of(heard)[0] == "leader elected"
    candidate.start()
    backend = backends["memory"]
    eventually(lambda: backend.waiting(candidate.key) == 1)
    assert candidate.stop(10)
    assert backend.waiting(candidate.key) == 0


def test_a_leader_is_deposed_once_and_elected_again(elections, heard):
    one = elections(ttl=0.6, **telling(heard, "one"))
    one.start()
    _, hold = next_of(heard)
    take_away(one.key)
    assert next_of(heard) == ("one deposed", hold)
    assert not hold.held
    told, again = next_of(heard)
    assert told == "one elected"
    assert again.token > hold.token
    assert one.stop(10)
    assert next_of(heard) == ("one deposed", again)
    assert heard.empty()


def test_on_deposed_runs_under_the_lock_at_a_stop(elections):
    held = []
    elected = threading.Event()
    one = elections(
        on_elected=lambda hold: elected.set(),
        on_deposed=lambda hold: held.append(hold.held),
    )
    with one:
        assert elected.wait(10)
    assert held == [True]
    assert one.leader() is None


def test_the_work_of_a_leader_ends_during_on_deposed(elections):
    """The work of a leader ends even if ``on_elected`` raises an error.

    ``on_elected`` has started a thread that works while the process leads.
    """
    led, worked = [], threading.Event()

    def elected(hold):
        def work():
            while one.wait(60):
                pass
            worked.set()

        threading.Thread(target=work, daemon=True).start()
        raise ZeroDivisionError

    def deposed(hold):
        led.append((one.is_leader, worked.wait(10)))

    one = elections(on_elected=elected, on_deposed=deposed)
    one.start()
    assert one._ended.wait(0) is False
    eventually(lambda: led)
    assert led[0] == (False, True)


def test_a_thread_in_wait_does_not_delay_stop(elections):
    elected, waits = threading.Event(), []

    def begin(hold):
        waits.extend(
            threading.Thread(target=one.wait, args=(seconds,), daemon=True)
            for seconds in (60, float("inf"))
        )
        for thread in waits:
            thread.start()
        elected.set()

    one = elections(on_elected=begin)
    one.start()
    assert elected.wait(10)
    assert one.stop(5)
    for thread in waits:
        thread.join(5)
        assert not thread.is_alive()


def test_all_threads_in_wait_learn_of_the_end_of_a_lead(elections, monkeypatch):
    """Every waiting thread learns of the end of the lead.

    This holds even if the same process is elected again at once, with another token and
    new work.
    """
    monkeypatch.setattr(election, "PAUSE", 0.0)
    waited = queue.SimpleQueue()
    elected = queue.SimpleQueue()
    waiting = threading.Barrier(5)

    def work():
        waiting.wait(10)
        waited.put(one.wait(60))

    def lead(hold):
        elected.put(hold)
        if elected.qsize() == 1:
            for _ in range(4):
                threading.Thread(target=work, daemon=True).start()
            waiting.wait(10)
            while len(one._wakeups_of_work) < 4:
                time.sleep(0.001)
            raise ZeroDivisionError

    one = elections(on_elected=lead)
    one.start()
    assert [waited.get(timeout=20) for _ in range(4)] == [False] * 4
    while elected.qsize() < 2:
        time.sleep(0.001)


def test_a_system_exit_in_on_elected_is_a_failure(
    elections, heard, caplog, monkeypatch
):
    """``on_elected`` raises SystemExit, as ``call_command("run_locked")`` does.

    The exit must not end the election's thread silently.
    """
    monkeypatch.setattr(election, "PAUSE", 0.0)
    left = [SystemExit(3)]

    def lead(hold):
        heard.put(("one", "elected", hold))
        if left:
            raise left.pop()

    one = elections(on_elected=lead)
    one.start()
    assert [next_of(heard)[0] for _ in range(2)] == ["one elected"] * 2
    assert "on_elected of 'scheduler' failed" in caplog.text


@pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"])
def test_a_broken_connection_is_replaced_before_the_next_lead(
    elections, heard, monkeypatch
):
    monkeypatch.setattr(election, "PAUSE", 0.0)

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


@pytest.mark.parametrize("ending", ["", "shutdown()\nshutdown()"])
def test_a_leader_is_deposed_when_its_process_ends(ending):
    """The key is released for good when the process ends.

    The release of its other holds takes some time. A shutdown before that, and a second
    one, are harmless.
    """
    ended = subprocess.run(
        [sys.executable, "-c", ENDING + ending],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
    )
    assert ended.stdout.split() == ["elected", "deposed", "free"], ended.stderr


ENDING = """
import atexit, time

def look():
    print("free" if backends["default"].holder("leader:x") is None else "taken")

# The last to be called.
atexit.register(look)
from dlocks.conf import backends
from django.conf import settings
settings.configure(
    DLOCKS={"default": {"BACKEND": "dlocks.backends.memory.MemoryBackend"}}
)
import django
django.setup()
from dlocks import LeaderElection, db_lock, shutdown
release = backends["default"].release
def slow_release(*args, **kwargs):
    time.sleep(0.01)
    return release(*args, **kwargs)

backends["default"].release = slow_release
holds = [db_lock(str(number)).acquire() for number in range(20)]
one = LeaderElection(
    "x",
    on_elected=lambda hold: print("elected"),
    on_deposed=lambda hold: print("deposed"),
)
one.start()
while not one.is_leader:
    time.sleep(0.01)
"""


def test_all_elections_are_stopped_at_once_at_exit():
    """The works of two elections end, although each waits for the other's stop.

    A process with many elections has as little time to end as one with a single one.
    """
    ended = subprocess.run(
        [sys.executable, "-c", STOPPED_TOGETHER],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
    )
    assert ended.stdout.split() == ["met", "met"], ended.stderr


STOPPED_TOGETHER = """
import threading
from django.conf import settings
settings.configure(
    DLOCKS={"default": {"BACKEND": "dlocks.backends.memory.MemoryBackend"}}
)
import django
django.setup()
from dlocks import LeaderElection
elected, stopped = threading.Barrier(3), threading.Barrier(2)
def start(name):
    def work(hold):
        elected.wait()
        election.wait(60)
        # Shorter than the bound of the wait for one election.
        stopped.wait(4)
        print("met ", end="")

    election = LeaderElection(name, on_elected=work)
    election.start()

start("x")
start("y")
elected.wait()
"""


def test_an_election_that_is_stopped_begins_no_work(elections, heard):
    """Also if it is stopped while the grant is on its way."""
    one = elections(**telling(heard, "one"))

    def stop(**_):
        one.stop(0)

    lock_acquired.connect(stop)
    try:
        one.run()
    finally:
        lock_acquired.disconnect(stop)
    assert heard.empty()
    assert one.leader() is None


def test_a_deposed_leader_does_not_lead_until_its_release(elections, monkeypatch):
    """A thread that reads ``is_leader`` meanwhile may have read the hold before."""
    release, answers = Hold.release, []

    def read_and_release(hold, **options):
        one._hold = hold
        answers.append(one.is_leader)
        one._hold = None
        release(hold, **options)

    monkeypatch.setattr(Hold, "release", read_and_release)
    one = elections(on_elected=fail, give_up_after=1)
    with pytest.raises(ZeroDivisionError):
        one.run()
    assert answers == [False]


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


async def test_a_second_run_does_not_disturb_an_election():
    one = LeaderElection("scheduler", using="memory")
    one.start()
    with pytest.raises(RuntimeError, match="already running"):
        await one.arun()
    assert await asyncio.to_thread(one.stop, 5)


async def test_an_async_election_can_be_stopped_from_djangos_thread():
    """The election releases its key in that same thread."""
    one = LeaderElection("scheduler", using="memory")
    task = asyncio.create_task(one.arun())
    while not one.is_leader:
        await asyncio.sleep(0.01)
    assert await sync_to_async(one.stop)(20)
    await task


def test_a_fork_of_a_leader_does_not_wait_for_its_parent(elections, monkeypatch):
    elected = threading.Event()
    one = elections(on_elected=lambda hold: elected.set())
    one.start()
    assert elected.wait(10)
    inherited = copy.copy(one)
    # A forked process has a wakeup of its own.
    inherited._wake = lambda: None
    with monkeypatch.context() as patched:
        patched.setattr(election.os, "getpid", lambda: 1)
        assert not inherited.is_leader
        assert inherited.stop(5)
    assert one.is_leader


async def test_a_lead_ends_after_its_work_despite_cancellations():
    told, elected = [], asyncio.Event()

    async def work(hold):
        elected.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.3)
            told.append(("work ended", hold.held))

    one = LeaderElection(
        "scheduler",
        using="memory",
        on_elected=work,
        on_deposed=lambda hold: told.append(("deposed", hold.held)),
    )
    running = asyncio.create_task(one.arun())
    await elected.wait()
    for _ in range(3):
        running.cancel()
        await asyncio.sleep(0.05)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert told == [("work ended", True), ("deposed", True)]
    assert await one.aleader() is None


async def test_a_thread_of_async_work_learns_of_the_end_at_once():
    elected = asyncio.Event()
    one = LeaderElection(
        "scheduler", using="memory", on_elected=lambda hold: elected.set()
    )
    running = asyncio.create_task(one.arun())
    await elected.wait()
    waits = asyncio.create_task(asyncio.to_thread(one.wait, 60))
    await asyncio.sleep(0.1)
    one.stop(0)
    assert await asyncio.wait_for(waits, 5) is False
    await running


def test_an_error_in_on_elected_releases_the_key_for_a_while(
    elections, heard, caplog, monkeypatch
):
    monkeypatch.setattr(election, "PAUSE", 0.3)
    times = []

    def fail_once(hold):
        times.append(time.monotonic())
        heard.put(("one", "elected", hold))
        if len(times) == 1:
            raise ZeroDivisionError("on purpose")

    one = elections(
        on_elected=fail_once,
        on_deposed=lambda hold: heard.put(("one", "deposed", hold)),
    )
    with caplog.at_level(logging.ERROR, "dlocks"):
        one.start()
        told = [next_of(heard)[0] for _ in range(3)]
    assert told == ["one elected", "one deposed", "one elected"]
    assert times[1] - times[0] >= 0.3
    (record,) = caplog.records
    assert "on_elected of 'scheduler' failed" in record.getMessage()
    assert "on purpose" in str(record.exc_info[1])


def fail(hold):
    raise ZeroDivisionError("on purpose")


def test_the_pause_after_a_failure_doubles_up_to_a_minute(
    elections, caplog, monkeypatch
):
    """A programming error is logged with one traceback, then one line each time.

    The retries become less frequent.
    """
    pauses = []

    async def rest(self, seconds):
        pauses.append(seconds)
        if len(pauses) == 6:
            self.stop()

    monkeypatch.setattr(LeaderElection, "_pause", rest)
    with caplog.at_level(logging.ERROR, "dlocks"):
        elections(on_elected=fail).run()
    assert pauses == [5, 10, 20, 40, 60, 60]
    assert [record.exc_info is not None for record in caplog.records] == [True] + [
        False
    ] * 5
    first, second, *_ = caplog.messages
    assert first == "on_elected of 'scheduler' failed. The next campaign begins in 5 s."
    assert second.startswith(
        "on_elected of 'scheduler' failed 2 times in a row: ZeroDivisionError: on"
        " purpose. The next"
    )


def test_a_different_error_is_logged_with_its_traceback(elections, caplog, monkeypatch):
    """A new error is logged with its traceback."""
    errors = [
        ZeroDivisionError(),
        ZeroDivisionError(),
        KeyError("stock"),
        KeyError("stock"),
    ]

    def fail(hold):
        raise errors.pop(0)

    async def rest(self, seconds):
        if not errors:
            self.stop()

    monkeypatch.setattr(LeaderElection, "_pause", rest)
    with caplog.at_level(logging.ERROR, "dlocks"):
        elections(on_elected=fail).run()
    assert [record.exc_info is not None for record in caplog.records] == [
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("good", ["short", "long"])
def test_a_successful_lead_resets_the_failure_count(good, elections, monkeypatch):
    """The count restarts after a lead without error or of more than a minute."""
    pauses, leads = [], []

    def lead(hold):
        leads.append(hold)
        if len(leads) == 3 and good == "short":
            take_away(hold.lock.key)
            hold.check()
        if len(leads) == 3:
            hold._state.lease.granted_at -= 61
        raise ZeroDivisionError

    async def rest(self, seconds):
        pauses.append(seconds)
        if len(pauses) == 5:
            self.stop()

    monkeypatch.setattr(LeaderElection, "_pause", rest)
    elections(on_elected=lead).run()
    assert pauses == ([5, 10, 0, 5, 10] if good == "short" else [5, 10, 5, 10, 20])


@pytest.mark.parametrize("how", ["run", "arun"])
def test_an_election_ends_after_repeated_failures(how, elections, caplog, monkeypatch):
    """With ``give_up_after=3`` the third failure in a row ends the election.

    The error is raised, and the key is free.
    """
    monkeypatch.setattr(election, "PAUSE", 0.01)
    deposed = []
    one = elections(on_elected=fail, on_deposed=deposed.append, give_up_after=3)
    with (
        caplog.at_level(logging.ERROR, "dlocks"),
        pytest.raises(ZeroDivisionError, match="on purpose") as caught,
    ):
        if how == "run":
            one.run()
        else:
            asyncio.run(one.arun())
    assert "3 failures in a row" in caught.value.__notes__[0]
    assert caplog.messages[-1].endswith("The election ends.")
    assert (len(deposed), len(caplog.records), one.leader()) == (3, 3, None)
    assert one.stop(0)


def test_an_election_in_a_thread_ends_after_repeated_failures(
    elections, caplog, monkeypatch, until
):
    """The log has one traceback and the message that the election has ended."""
    monkeypatch.setattr(election, "PAUSE", 0.01)
    with caplog.at_level(logging.ERROR, "dlocks"):
        one = elections(on_elected=fail, give_up_after=2)
        one.start()
        until(lambda: not one._runner.is_alive())
    assert [record.exc_info is not None for record in caplog.records] == [True, False]
    assert caplog.messages[-1].endswith("The election ends.")
    assert one.stop(0)


@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-1, ValueError), (True, TypeError), (1.5, TypeError)],
)
def test_an_invalid_number_of_failures_is_refused(value, error):
    with pytest.raises(error, match="give_up_after must be"):
        LeaderElection("scheduler", give_up_after=value)


async def test_an_election_continues_under_freezegun(monkeypatch):
    """The pause after a failure ends, although the event loop's clock is frozen."""
    monkeypatch.setattr(election, "PAUSE", 0.05)
    leads = []

    async def lead(hold):
        leads.append(hold)
        if len(leads) == 2:
            one.stop()
        raise ZeroDivisionError

    one = LeaderElection("scheduler", using="memory", on_elected=lead)
    with freezegun.freeze_time("2012-01-14"):
        await one.arun()
    assert len(leads) == 2


def test_work_in_on_elected_continues_while_it_leads(elections, heard):
    def work(hold):
        heard.put(("one", "began", hold))
        while one.wait(30):
            pass
        heard.put(("one", "ended", hold))

    one = elections(
        ttl=0.6,
        on_elected=work,
        on_deposed=lambda hold: heard.put(("one", "deposed", hold)),
    )
    one.start()
    next_of(heard)
    take_away(one.key)
    assert [next_of(heard)[0] for _ in range(3)] == [
        "one ended",
        "one deposed",
        "one began",
    ]
    assert one.stop(10)
    assert [next_of(heard)[0] for _ in range(2)] == ["one ended", "one deposed"]


def test_work_that_raises_lock_lost_is_no_failure(elections, heard, caplog):
    def work(hold):
        heard.put(("one", "began", hold))
        while True:
            hold.check()
            one.wait(0.05)

    one = elections(on_elected=work)
    with caplog.at_level(logging.ERROR, "dlocks"):
        one.start()
        next_of(heard)
        take_away(one.key)
        assert next_of(heard)[0] == "one began"
        take_away(one.key)
        one._stopping = True
        assert one.stop(10)
    assert not caplog.records


def test_an_outage_does_not_end_the_election(elections, heard, monkeypatch, caplog):
    backend = backends["memory"]
    down = threading.Event()

    def failing(method):
        def call(*args, **kwargs):
            if down.is_set():
                raise LockBackendError("away")
            return method(*args, **kwargs)

        return call

    for name in ("acquire", "renew", "release"):
        monkeypatch.setattr(backend, name, failing(getattr(backend, name)))
    one = elections(ttl=0.6, **telling(heard, "one"))
    one.start()
    _, hold = next_of(heard)
    down.set()
    with caplog.at_level(logging.WARNING, "dlocks"):
        assert next_of(heard) == ("one deposed", hold)
        assert not one.is_leader
        while "cannot reach its backend" not in caplog.text:
            time.sleep(0.01)
    down.clear()
    assert next_of(heard)[0] == "one elected"


def test_run_blocks_until_a_signal_handler_stops_it(elections):
    one = elections()

    def kill():
        while not one.is_leader:
            time.sleep(0.005)
        signal.pthread_kill(main, signal.SIGTERM)

    main = threading.get_ident()
    before = signal.signal(signal.SIGTERM, lambda *_: one.stop())
    thread = threading.Thread(target=kill)
    try:
        thread.start()
        one.run()
    finally:
        signal.signal(signal.SIGTERM, before)
        thread.join(10)
    assert one.leader() is None


def test_an_interrupt_in_run_releases_the_key(elections):
    def interrupted(hold):
        raise KeyboardInterrupt

    one = elections(on_elected=interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.run()
    assert one.leader() is None


def test_an_election_can_run_only_once(elections):
    one = elections()
    with one:
        with pytest.raises(RuntimeError, match="already running"):
            one.start()
    with pytest.raises(RuntimeError, match="has ended"):
        one.start()
    other = elections()
    other.stop()
    other.run()
    with pytest.raises(RuntimeError, match="has ended"):
        other.run()


def test_a_stop_before_the_start_takes_effect(elections):
    one = elections()
    assert one.stop()
    one.run()
    assert not one.is_leader


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"name": ""}, ValueError),
        ({"name": 7}, TypeError),
        ({"name": "a", "ttl": 0}, ValueError),
        ({"name": "a", "on_elected": "work"}, TypeError),
        ({"name": "a", "on_deposed": 1}, TypeError),
    ],
)
def test_invalid_arguments_of_an_election_are_refused(arguments, error):
    with pytest.raises(error):
        LeaderElection(**arguments)


# Coroutines.


async def test_async_work_is_cancelled_when_the_lead_ends():
    told = []
    working = asyncio.Event()

    async def work(hold):
        told.append("began")
        working.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            told.append("cancelled")
            raise

    async def deposed(hold):
        told.append("deposed")

    one = LeaderElection(
        "scheduler", using="memory", ttl=0.6, on_elected=work, on_deposed=deposed
    )
    running = asyncio.create_task(one.arun())
    await working.wait()
    assert one.is_leader
    assert (await one.aleader()).token == one.token
    working.clear()
    take_away(one.key)
    await working.wait()
    assert told == ["began", "cancelled", "deposed", "began"]
    one.stop()
    await running
    assert told[4:] == ["cancelled", "deposed"]
    assert await one.aleader() is None


async def test_a_cancelled_election_releases_the_key():
    elected = asyncio.Event()
    one = LeaderElection(
        "scheduler", using="memory", on_elected=lambda hold: elected.set()
    )
    running = asyncio.create_task(one.arun())
    await elected.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await one.aleader() is None


async def test_an_error_of_async_work_is_logged_and_releases_the_key(
    caplog, monkeypatch
):
    monkeypatch.setattr(election, "PAUSE", 0.7)
    tries, at = [], []
    leading = asyncio.Event()

    async def work(hold):
        tries.append(hold)
        at.append(time.monotonic())
        if len(tries) == 1:
            raise ZeroDivisionError("on purpose")
        leading.set()

    one = LeaderElection("scheduler", using="memory", on_elected=work)
    with caplog.at_level(logging.ERROR, "dlocks"):
        running = asyncio.create_task(one.arun())
        await leading.wait()
    assert "on purpose" in caplog.text
    assert tries[1].token > tries[0].token
    assert at[1] - at[0] > 0.65, "others have a chance"
    one.stop()
    await running


async def test_work_cancelled_by_other_code_is_a_failure(caplog, monkeypatch):
    monkeypatch.setattr(election, "PAUSE", 0.7)
    at = []
    leading = asyncio.Event()

    async def work(hold):
        at.append(time.monotonic())
        if len(at) == 1:
            raise asyncio.CancelledError
        leading.set()

    one = LeaderElection("scheduler", using="memory", on_elected=work)
    with caplog.at_level(logging.ERROR, "dlocks"):
        running = asyncio.create_task(one.arun())
        await leading.wait()
    assert "not by the election" in caplog.text
    assert at[1] - at[0] > 0.65, "others have a chance"
    one.stop()
    await running


def test_coroutine_functions_are_refused_without_an_event_loop(
    elections, caplog, monkeypatch
):
    monkeypatch.setattr(election, "PAUSE", 0.01)

    async def work(hold):
        pytest.fail("nobody awaits it")

    for arguments in ({"on_elected": work}, {"on_deposed": work}):
        one = LeaderElection("scheduler", using="memory", **arguments)
        for begin in (one.run, one.start):
            with pytest.raises(TypeError, match="arun"):
                begin()
    with caplog.at_level(logging.ERROR, "dlocks"):
        one = elections(
            "scheduler",
            on_elected=lambda hold: work(hold),
            on_deposed=lambda hold: one.stop(),
        )
        assert one.stop()
    with pytest.raises(TypeError, match="on_lost"):
        db_lock("a", on_lost=work)


# Processes on the database.

DATABASE = pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"])


def campaigns(worker, ttl=TTL):
    worker.start(jobs.campaign, "scheduler", ttl=ttl)


@DATABASE
def test_a_stopped_leader_is_replaced_at_once(doomed):
    first, second = doomed(), doomed()
    campaigns(first, ttl=30)
    assert first.hear()[0] == "elected"
    campaigns(second, ttl=30)
    # The second process is in the queue before the stop.
    wait_for_waiters(1)
    stopped = time.monotonic()
    first.tell("stop")
    assert first.hear()[0] == "deposed"
    what, elected, _ = second.hear()
    assert what == "elected"
    in_time(elected - stopped, 3)
    second.tell("stop")


@DATABASE
def test_a_killed_leader_is_replaced_soon_after_its_ttl(doomed):
    first, second = doomed(), doomed()
    campaigns(first)
    _, _, token = first.hear()
    campaigns(second)
    # The second process is in the queue before the kill.
    wait_for_waiters(1)
    first.kill()
    what, elected, later = second.hear()
    assert what == "elected"
    assert later > token
    in_time(elected - first.killed_at, TTL + 0.5 + 1.0)
    second.tell("stop")


@DATABASE
def test_a_paused_leader_is_deposed_at_once_when_it_continues(doomed):
    first, second = doomed(), doomed()
    campaigns(first)
    _, _, token = first.hear()
    campaigns(second)
    wait_for_waiters(1)
    first.stop()
    what, _, later = second.hear()
    assert (what, later > token) == ("elected", True)
    resumed = time.monotonic()
    first.resume()
    what, deposed, of = first.hear()
    assert (what, of) == ("deposed", token)
    for worker in (first, second):
        worker.tell("stop")
    reports = {
        token: seen
        for worker in (second, first)
        for token, seen in last_of(worker).items()
    }
    # By their own deadlines, no two processes led at the same time.
    intervals = sorted(reports.values())
    assert len(intervals) >= 2
    for (_, end), (begin, _) in zip(intervals, intervals[1:], strict=False):
        assert end < begin
    in_time(deposed - resumed, 1.0)


@DATABASE
def test_paused_leaders_never_lead_at_the_same_time(doomed):
    crowd = [doomed() for _ in range(4)]
    for worker in crowd:
        campaigns(worker, ttl=1.0)
    for _ in range(4):
        leader = next_elected(crowd)
        leader.stop()
        time.sleep(2.0)
        leader.resume()
    for worker in crowd:
        worker.tell("stop")
    seen = {}
    for worker in crowd:
        seen |= last_of(worker)
    intervals = sorted(seen.values())
    assert len(intervals) >= 4
    for (_, end), (begin, _) in zip(intervals, intervals[1:], strict=False):
        assert end < begin


def next_elected(crowd):
    def elected():
        return next(
            (
                worker
                for worker in crowd
                if worker.pipe.poll(0.005) and worker.hear()[0] == "elected"
            ),
            None,
        )

    return eventually(elected)


@DATABASE
@pytest.mark.engine("postgresql")
def test_a_crash_of_the_server_deposes_the_leader(server, on_server):  # noqa: F811
    worker = on_server()
    campaigns(worker)
    what, _, token = worker.hear()
    assert what == "elected"
    server.crash()
    crashed = time.monotonic()
    what, deposed, _ = worker.hear()
    assert what == "deposed"
    server.start()
    what, _, later = worker.hear()
    assert what == "elected"
    assert later > token
    worker.tell("stop")
    # By its own clock it stops leading before another process could be elected.
    assert last_of(worker)[token][1] < crashed + TTL
    in_time(deposed - crashed, TTL + 0.5)


def last_of(worker):
    """Return the first and last moments of each lead of a campaign, by token."""
    while not isinstance(answer := worker.hear(), dict):
        pass
    return answer


def wait_for_waiters(number):
    eventually(lambda: backends["default"].waiting("leader:scheduler") >= number)


@DATABASE
def test_a_lock_of_the_same_name_is_another_lock():
    told = []

    def work(hold):
        with db_lock("scheduler", timeout=0):
            told.append(hold.held)

    with LeaderElection("scheduler", on_elected=work) as one:
        eventually(lambda: told)
        assert one.is_leader
    assert told == [True]
    connections.close_all()


def test_a_lost_lead_raises_only_in_the_hold(elections, heard):
    one = elections(ttl=0.6, **telling(heard, "one"))
    one.start()
    _, hold = next_of(heard)
    take_away(one.key)
    assert next_of(heard)[0] == "one deposed"
    with pytest.raises(LockLost):
        hold.check()
