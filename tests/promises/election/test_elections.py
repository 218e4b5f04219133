"""Leader election: one leader at a time, and a successor without delay."""

import asyncio
import logging
import math
import signal
import threading
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from enum import Enum
from functools import partial

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection

from dlocks import LeaderElection, LockBackendError, LockLost, db_lock, lock_acquired
from dlocks.models import LockClaim
from dlocks.testing import lose
from tests.promises.database.test_faults import on_server, server  # noqa: F401 (fixtures)
from tests.promises.election.campaigns import next_of, telling
from tests.promises.received import received
from tests.scripts import run_python
from tests.timing import eventually, in_time
from tests.volume import volume

pytest_plugins = ["tests.promises.stops"]
pytestmark = pytest.mark.front


def campaign(pipe, name, **policy):
    """Run an election until notified, and send its callbacks.

    Return the first and last time at which each lead was observed.
    """
    seen = {}

    def elected(hold):
        at = time.monotonic()
        # Each reported lead lasts until it has been observed.
        while hold.token not in seen and election.is_leader:
            time.sleep(0.001)
        pipe.say(("elected", at, hold.token))

    def deposed(hold):
        pipe.say(("deposed", time.monotonic(), hold.token))

    election = LeaderElection(name, on_elected=elected, on_deposed=deposed, **policy)
    with election:
        told_to_stop = False
        while not told_to_stop:
            # The message is read first, so that a state before the end is observed at
            # least once.
            told_to_stop = pipe.poll()
            now, token = time.monotonic(), election.token
            # It led at that moment if it still leads with the same token.
            if token is not None and election.is_leader and election.token == token:
                seen[token] = (seen.get(token, (now,))[0], now)
            time.sleep(0.001)
        pipe.hear()
    return seen


TTL = 1.5


# One process, on the memory backend.


def test_the_next_candidate_leads_when_the_leader_stops(elections, heard):
    """``on_deposed`` runs under the lock at a stop."""
    first = elections(
        on_elected=lambda hold: heard.put(("first", "elected", hold)),
        on_deposed=lambda hold: heard.put(("first", f"deposed {hold.held}", hold)),
    )
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
    assert next_of(heard)[0] == "first deposed True"
    told, later = next_of(heard)
    assert told == "second elected"
    assert later.token > hold.token
    assert second.is_leader


def test_a_stopped_candidate_leaves_the_queue(elections, heard):
    """The key is not kept for it when the leader stops."""
    leader, candidate = elections(**telling(heard, "leader")), elections()
    leader.start()
    _, hold = next_of(heard)
    candidate.start()
    eventually(lambda: hold.queue_length() == 1)
    assert candidate.stop(10)
    assert hold.queue_length() == 0


def test_a_leader_that_resigns_lets_the_next_candidate_lead(elections, heard):
    """It then campaigns again. Without another candidate it leads again."""
    first = elections(**telling(heard, "first"))
    assert not first.resign()
    first.start()
    _, hold = next_of(heard)
    assert first.resign()
    assert not first.is_leader
    assert next_of(heard) == ("first deposed", hold)
    told, again = next_of(heard)
    assert told == "first elected"
    assert again.token > hold.token
    second = elections(**telling(heard, "second"))
    second.start()
    eventually(lambda: again.queue_length() == 1)
    assert first.resign()
    told = {next_of(heard)[0] for _ in range(2)}
    assert told == {"first deposed", "second elected"}
    assert second.stop(10)
    told = {next_of(heard)[0] for _ in range(2)}
    assert told == {"second deposed", "first elected"}


def test_candidates_are_listed_in_their_order(elections, threads):
    """They lead in this order. The leader is no candidate."""
    first, second, third = (elections() for _ in range(3))
    for number, one in enumerate((first, second, third)):
        assert len(first.candidates()) == max(0, number - 1)
        threads(one.run)
        eventually(lambda number=number: len(first.candidates()) == number)
    holders = [one.holder for one in async_to_sync(first.acandidates)()]
    assert len({first.leader().holder, *holders}) == 3
    assert first.stop(10)
    eventually(lambda: second.is_leader)
    assert second.leader().holder == holders[0]
    assert [one.holder for one in third.candidates()] == holders[1:]
    assert second.stop(10)
    assert third.stop(10)


def test_work_waits_for_the_end_of_its_lead(elections):
    """Without a timeout, for as long as it lasts. A negative one has passed already."""
    led, began = [], threading.Event()

    def lead(hold):
        led.append(one.wait(timedelta(seconds=0.01)))
        led.append(one.wait(-1))
        for wrong in "5", -1, math.nan:
            with pytest.raises((TypeError, ValueError), match="timeout"):
                one.stop(wrong)
        began.set()
        led.append(one.wait())

    one = elections(on_elected=lead)
    assert one.wait() is False
    one.start()
    assert began.wait(20)
    assert one.stop(10)
    assert led == [True, True, False]


def test_a_leader_is_deposed_once_and_elected_again(elections, heard):
    one = elections(ttl=0.6, **telling(heard, "one"))
    one.start()
    _, hold = next_of(heard)
    lose(one.key, using="memory")
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
settings.configure(DLOCKS={"default": {"BACKEND": "__main__.Slow"}})
django.setup()
for case in ("", "again", "two"):
    if not os.fork():
        break
    if os.wait()[1]:
        sys.exit(case)
else:
    sys.exit()

def look():
    print("free" if Slow.made.holder("leader:x") is None else "taken")

# The last to be called.
atexit.register(look)
from dlocks import LeaderElection, db_lock, shutdown
from dlocks.backends.memory import MemoryBackend

class Slow(MemoryBackend):
    seconds = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        Slow.made = self

    def release(self, *args, **kwargs):
        time.sleep(self.seconds)
        return super().release(*args, **kwargs)

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
Slow.seconds = 0.01
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
    with received(lock_acquired, lambda **_: one.stop(0)):
        one.run()
    assert heard.empty()
    assert one.leader() is None


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


def test_work_that_raises_lock_lost_is_no_failure(elections, heard, caplog):
    def work(hold):
        heard.put(("one", "began", hold))
        while one.wait(0.05):
            hold.check()
        hold.check()

    one = elections(on_elected=work)
    with caplog.at_level(logging.ERROR, "dlocks"):
        one.start()
        next_of(heard)
        lose(one.key, using="memory")
        assert next_of(heard)[0] == "one began"
        lose(one.key, using="memory")
        assert one.stop(10)
    assert not caplog.records


def test_an_outage_does_not_end_the_election(elections, heard, stops, caplog):
    def fail(*_):
        raise LockBackendError("away")

    one = elections(ttl=0.6, using="stopping memory", **telling(heard, "one"))
    one.start()
    _, hold = next_of(heard)
    with ExitStack() as outage, caplog.at_level(logging.WARNING, "dlocks"):
        for name in ("acquire", "renew", "release"):
            outage.push(stops.replace(name, fail))
        assert next_of(heard) == ("one deposed", hold)
        assert not one.is_leader
        eventually(lambda: "cannot reach its backend" in caplog.text)
    assert next_of(heard)[0] == "one elected"
    assert one.stop(10)


def test_run_blocks_until_a_signal_handler_stops_it(elections, handled, threads):
    """An interrupt ends it too. The key is released."""
    one = elections()

    def kill():
        eventually(lambda: one.is_leader)
        signal.pthread_kill(main, signal.SIGTERM)

    main = threading.get_ident()
    handled(signal.SIGTERM, lambda *_: one.stop())
    threads(kill)
    one.run()
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
    with pytest.raises(RuntimeError, match="was stopped, and has ended"):
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
        ({"give_up_after": 0}, ValueError),
        ({"give_up_after": -1}, ValueError),
        ({"give_up_after": True}, TypeError),
        ({"give_up_after": 1.5}, TypeError),
    ):
        with pytest.raises(error):
            LeaderElection(**{"name": "a", **arguments})


def test_the_name_of_an_election_may_be_a_member_of_an_enum():
    """It is equal to its text, and so is the election."""
    names = Enum("names", {"SCHEDULER": "scheduler"}, type=str)
    for name in ("scheduler", names.SCHEDULER):
        assert LeaderElection(name).key == "leader:scheduler"


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
            told.append("leads" if one.is_leader else "cancelled")
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
    for end in one.resign, partial(lose, one.key, using="memory"):
        del told[:]
        working.clear()
        end()
        await working.wait()
        assert told == ["cancelled", "deposed", "began"]
    waiting = threading.Event()

    def wait():
        waiting.set()
        return one.wait(60)

    waits = asyncio.create_task(asyncio.to_thread(wait))
    await asyncio.to_thread(waiting.wait, 10)
    assert await sync_to_async(one.stop)(20)
    assert await asyncio.wait_for(waits, 5) is False
    await running
    assert told[3:] == ["cancelled", "deposed"]
    assert await one.aleader() is None


def test_the_lead_of_a_closed_coroutine_is_released(until):
    """Nothing can be awaited. The loop is not closed, so no caller seems to end."""
    one, loop = LeaderElection("scheduler", using="memory"), asyncio.new_event_loop()
    running = loop.create_task(one.arun())
    while not one.is_leader:
        loop.run_until_complete(asyncio.sleep(0.01))
    with suppress(RuntimeError):
        running.get_coro().close()
    assert one.stop(10)
    until(lambda: one.leader() is None)
    running.cancel()
    with suppress(RuntimeError, asyncio.CancelledError):
        loop.run_until_complete(running)
    loop.close()


async def test_a_task_leads_under_the_prefix_of_its_tenant(settings):
    """A function returns the prefix, in the thread of Django's connections."""

    def prefix():
        return f"{getattr(connection, 'tenant', 'none')}:"

    memory = {**settings.DLOCKS["memory"], "OPTIONS": {"prefix": prefix}}
    settings.DLOCKS = {**settings.DLOCKS, "tenants": memory}
    leaders = []

    async def lead(hold):
        leaders.append(await election.aleader())
        await sync_to_async(election.stop)()

    election = LeaderElection("scheduler", using="tenants", on_elected=lead)
    await sync_to_async(setattr)(connection, "tenant", "shop")
    try:
        await election.arun()
    finally:
        await sync_to_async(delattr)(connection, "tenant")
    (leader,) = leaders
    assert leader.key.startswith("shop:")


def test_coroutine_functions_are_refused_without_an_event_loop():
    async def work(hold):
        pytest.fail("nobody awaits it")

    for arguments in ({"on_elected": work}, {"on_deposed": work}):
        one = LeaderElection("scheduler", using="memory", **arguments)
        for begin in (one.run, one.start):
            with pytest.raises(TypeError, match="arun"):
                begin()
    with pytest.raises(TypeError, match="on_lost"):
        db_lock("a", on_lost=work)


# Processes on the database.

DATABASE = pytest.mark.django_db(transaction=True)


def campaigns(worker, ttl=TTL):
    worker.start(campaign, "scheduler", ttl=ttl)


@DATABASE
def test_a_killed_leader_is_replaced_soon_after_its_ttl(doomed):
    first, second = doomed(), doomed()
    campaigns(first)
    _, _, token = first.hear()
    campaigns(second)
    # The second process is in the queue before the end.
    eventually(LockClaim.objects.exists)
    first.kill()
    what, elected, later = second.hear()
    assert what == "elected"
    assert later > token
    in_time(elected - first.killed_at, TTL + 0.5 + 1.0)
    second.tell("stop")


@DATABASE
def test_paused_leaders_never_lead_at_the_same_time(doomed):
    """A paused leader is deposed at once when it continues."""
    crowd, rounds = [doomed() for _ in range(3)], volume(3)
    for worker in crowd:
        campaigns(worker, ttl=1.0)
    leader = next_elected(crowd)
    for _ in range(rounds):
        leader.stop()
        successor = next_elected([one for one in crowd if one is not leader])
        resumed = time.monotonic()
        leader.resume()
        what, deposed, _ = leader.hear()
        assert what == "deposed"
        in_time(deposed - resumed, 1.0)
        leader = successor
    for worker in crowd:
        worker.tell("stop")
    seen = {}
    for worker in crowd:
        seen |= last_of(worker)
    intervals = sorted(seen.values())
    assert len(intervals) > rounds
    for (_, end), (begin, _) in zip(intervals, intervals[1:], strict=False):
        assert end < begin


def next_elected(crowd):
    def elected():
        for worker in crowd:
            if worker.pipe.poll(0.005) and worker.hear()[0] == "elected":
                return worker
        return None

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
