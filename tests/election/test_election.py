"""Leader election: one leader at a time, and a successor without delay."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import queue
import signal
import threading
import time

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
from tests.internals import KeyState, backends, election
from tests.promises.database.test_faults import on_server, server  # noqa: F401 (fixtures)
from tests.scripts import run_python
from tests.timing import eventually, in_time

pytestmark = pytest.mark.front

TTL = 1.5


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
    """``on_deposed`` runs under the lock at a stop."""
    held = []

    def deposed(hold):
        held.append(hold.held)
        heard.put(("first", "deposed", hold))

    first = elections(**{**telling(heard, "first"), "on_deposed": deposed})
    second = elections(**telling(heard, "second"))
    first.start()
    told, hold = next_of(heard)
    assert told == "first elected"
    assert (first.is_leader, first.token) == (True, hold.token)
    assert first.leader().token == hold.token
    assert first.key == hold.key == "leader:scheduler"
    second.start()
    assert (second.is_leader, second.token) == (False, None)
    assert first.stop(10)
    assert (first.is_leader, first.token) == (False, None)
    assert next_of(heard)[0] == "first deposed"
    told, later = next_of(heard)
    assert told == "second elected"
    assert later.token > hold.token
    assert second.is_leader
    assert held == [True]


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
    with pytest.raises(LockLost):
        hold.check()
    told, again = next_of(heard)
    assert told == "one elected"
    assert again.token > hold.token
    assert one.stop(10)
    assert next_of(heard) == ("one deposed", again)
    assert heard.empty()


def test_the_work_of_a_leader_ends_during_on_deposed(elections, heard, monkeypatch):
    """Every thread in ``wait()`` learns of the end, even if ``on_elected`` fails.

    This holds even if the same process is elected again at once, with another token and
    new work. A thread in ``wait()`` does not delay ``stop()``. A SystemExit, as
    ``call_command("run_locked")`` raises it, is a failure like others.
    """
    monkeypatch.setattr(election, "PAUSE", 0.0)
    waiting, waited, threads = threading.Barrier(5), queue.SimpleQueue(), []
    endings = [SystemExit(3), ZeroDivisionError()]

    def work(seconds):
        waiting.wait(10)
        waited.put(one.wait(seconds))

    def elected(hold):
        for seconds in (60, 60, 60, float("inf")):
            threads.append(threading.Thread(target=work, args=[seconds], daemon=True))
            threads[-1].start()
        waiting.wait(10)
        eventually(lambda: len(one._wakeups_of_work) == 4)
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


def test_a_leader_is_deposed_when_its_process_ends():
    """The key is released for good when the process ends.

    The release of its other holds takes some time. A shutdown before that, and a second
    one, are harmless. All elections of a process are stopped at once, so the works of
    two elections end, although each waits for the other's stop.
    """
    ended = run_python("-c", ENDING)
    assert ended.returncode == 0, ended.stderr
    once = ["elected", "deposed", "free"]
    assert ended.stdout.split() == [*once, *once, "met", "met", "free"], ended.stderr


ENDING = """
import atexit, os, sys, threading, time
from django.conf import settings
import django, django.db
memory = {"BACKEND": "dlocks.backends.memory.MemoryBackend"}
settings.configure(DLOCKS={"default": memory})
django.setup()
for case in ("", "again", "two"):
    if not os.fork():
        break
    if os.wait()[1]:
        sys.exit(case)
else:
    sys.exit()

def look():
    print("free" if backends["default"].holder("leader:x") is None else "taken")

# The last to be called.
atexit.register(look)
from dlocks.conf import backends
from dlocks import LeaderElection, db_lock, shutdown
if case == "two":
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
    sys.exit()
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
if case == "again":
    shutdown()
    shutdown()
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


def fail(hold):
    raise ZeroDivisionError("on purpose")


def test_the_pause_after_a_failure_doubles_up_to_a_minute(
    elections, caplog, monkeypatch
):
    """A programming error is logged with one traceback, then one line each time.

    The retries become less frequent. A new error is logged with its traceback.
    """
    pauses, errors = [], [ZeroDivisionError("on purpose")] * 6 + [KeyError("stock")] * 2

    def fail_by_turns(hold):
        raise errors.pop(0)

    async def rest(self, seconds):
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


@pytest.mark.parametrize("how", ["run", "arun", "start"])
def test_an_election_ends_after_repeated_failures(
    how, elections, caplog, monkeypatch, until
):
    """With ``give_up_after=3`` the third failure in a row ends the election.

    The error is raised, or logged by a thread, and the key is free.
    """
    monkeypatch.setattr(election, "PAUSE", 0.01)
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
    """An interrupt ends it too. The key is released."""
    one = elections()

    def kill():
        eventually(lambda: one.is_leader)
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

    def interrupted(hold):
        raise KeyboardInterrupt

    one = elections(on_elected=interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.run()
    assert one.leader() is None


async def test_an_election_can_run_only_once():
    """A stop before the start takes effect."""
    one = LeaderElection("scheduler", using="memory")
    one.start()
    with pytest.raises(RuntimeError, match="already running"):
        one.start()
    with pytest.raises(RuntimeError, match="already running"):
        await one.arun()
    assert await asyncio.to_thread(one.stop, 5)
    with pytest.raises(RuntimeError, match="has ended"):
        one.start()
    other = LeaderElection("scheduler", using="memory")
    assert other.stop()
    await asyncio.to_thread(other.run)
    assert not other.is_leader
    with pytest.raises(RuntimeError, match="has ended"):
        await asyncio.to_thread(other.run)


def test_invalid_arguments_of_an_election_are_refused():
    for arguments, error in (
        ({"name": ""}, ValueError),
        ({"name": 7}, TypeError),
        ({"ttl": 0}, ValueError),
        ({"on_elected": "work"}, TypeError),
        ({"on_deposed": 1}, TypeError),
    ):
        with pytest.raises(error):
            LeaderElection(**{"name": "a", **arguments})
    for value in (0, -1, True, 1.5):
        error = ValueError if type(value) is int else TypeError
        with pytest.raises(error, match="give_up_after must be"):
            LeaderElection("scheduler", give_up_after=value)


# Coroutines.


async def test_async_work_is_cancelled_when_the_lead_ends():
    """A thread of the work learns of the end at once.

    The election can be stopped from Django's thread, in which it releases its key.
    """
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
    waits = asyncio.create_task(asyncio.to_thread(one.wait, 60))
    while not one._wakeups_of_work:
        await asyncio.sleep(0.001)
    assert await sync_to_async(one.stop)(20)
    assert await asyncio.wait_for(waits, 5) is False
    await running
    assert told[4:] == ["cancelled", "deposed"]
    assert await one.aleader() is None


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
    monkeypatch.setattr(election, "PAUSE", 0.7)
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

DATABASE = pytest.mark.django_db(transaction=True)


def campaigns(worker, ttl=TTL):
    worker.start(jobs.campaign, "scheduler", ttl=ttl)


@DATABASE
def test_a_killed_leader_is_replaced_soon_after_its_ttl(doomed):
    first, second = doomed(), doomed()
    campaigns(first)
    _, _, token = first.hear()
    campaigns(second)
    # The second process is in the queue before the end.
    eventually(lambda: backends["default"].waiting("leader:scheduler") == 1)
    first.kill()
    what, elected, later = second.hear()
    assert what == "elected"
    assert later > token
    in_time(elected - first.killed_at, TTL + 0.5 + 1.0)
    second.tell("stop")


@DATABASE
def test_paused_leaders_never_lead_at_the_same_time(doomed):
    """A paused leader is deposed at once when it continues."""
    crowd = [doomed() for _ in range(3)]
    for worker in crowd:
        campaigns(worker, ttl=1.0)
    for _ in range(4):
        leader = next_elected(crowd)
        leader.stop()
        time.sleep(2.0)
        resumed = time.monotonic()
        leader.resume()
        what, deposed, _ = leader.hear()
        assert what == "deposed"
        in_time(deposed - resumed, 1.0)
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
