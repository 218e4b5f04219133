"""Callers that wait for a session lock, in the queue of the engine."""

import contextlib
import queue
import signal
import threading
import time
from functools import partial

import pytest
from django.db import connection

from dlocks import LeaderElection, LockBackendError, LockTimeout
from tests import jobs
from tests.promises.ended import is_refused
from tests.promises.session.server import SERVERS, end_session, lock, query
from tests.timing import in_time

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.engine("postgresql", "mariadb"),
]


@SERVERS
def test_the_engines_queue_is_first_come_first_served(workers, in_queue):
    crowd, began = workers(5), time.monotonic()
    with lock():
        for number, worker in enumerate(crowd, 1):
            worker.start(jobs.wait_quietly, "stock:7", using="session", timeout=60)
            in_queue(number)
    granted = [worker.hear() for worker in crowd]
    order = sorted(range(5), key=lambda number: granted[number])
    if connection.vendor == "postgresql":
        # After 2 s, a waiter queues again behind the others.
        in_time(max(granted)[0] - began, 2.0)
    assert order == list(range(5))
    assert sorted(granted) == sorted(granted, key=lambda one: one[1])


# What a wait blocks.


def begun_before(number):
    """Return how many lock sessions have a snapshot or transaction of before then."""
    ((count,),) = query(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'dlocks %%'"
        " AND age(backend_xmin) >= age(%s::text::xid)",
        "SELECT count(*) FROM information_schema.innodb_trx WHERE %s IS NULL",
        number,
    )
    return count


@SERVERS
@pytest.mark.parametrize("who", ["waiter", "candidate"])
def test_a_caller_that_waits_does_not_hold_back_vacuum(
    who, held_elsewhere, waiter, until, in_queue
):
    """A statement that waits is a transaction on PostgreSQL, and has a snapshot."""
    election = LeaderElection("scheduler", using="session")
    key = election.key if who == "candidate" else "stock:7"
    release = held_elsewhere(key)
    with contextlib.ExitStack() as stack:
        if who == "candidate":
            stack.enter_context(election)
        else:
            waiter()
        for _ in range(2):
            ((number,),) = query("SELECT txid_current()", "SELECT NULL")
            until(lambda number=number: not begun_before(number))
        if who == "waiter":
            in_queue(1)
        assert not election.is_leader
        release()


@pytest.mark.engine("postgresql")
def test_the_holder_can_create_an_index_concurrently(waiter):
    """That statement waits for the end of all older snapshots."""
    query("CREATE TABLE indexed AS SELECT 1 AS number", "")
    try:
        with lock():
            waiting = waiter()
            query("SET statement_timeout = '30s'", "")
            query("CREATE INDEX CONCURRENTLY ON indexed (number)", "")
            assert not waiting.results
        waiting.join(30)
    finally:
        query("RESET statement_timeout", "")
        query("DROP TABLE indexed", "")


@SERVERS
def test_a_waiter_of_another_process_has_waited_since_it_came(
    elsewhere, in_queue, until
):
    with lock() as held:
        elsewhere.start(jobs.wait_quietly, "stock:7", using="session", timeout=60)
        in_queue(1)
        until(lambda: [one for one in held.lock.waiters() if one.waited > 2.5])
    elsewhere.hear()


def test_no_session_waiter_is_overtaken(threads, in_queue):
    """A caller that only tries does not pass a waiter either.

    It may find the key free for a moment.
    """
    order = []
    first = lock().acquire()
    done = threading.Event()

    def wait():
        with lock(timeout=30):
            order.append("waiter")
            done.wait(30)

    waiter = threads(wait)
    in_queue(1)
    first.release()
    found = lock().try_acquire()
    done.set()
    waiter.join(30)
    assert order == ["waiter"]
    if found is not None:
        # The turn of the waiter was over already.
        found.release()


@SERVERS
def test_a_session_waiter_that_times_out_leaves_nothing(
    elsewhere, held_elsewhere, observer, until
):
    """Its error shows the holder, which is in another process."""
    release = held_elsewhere()
    with pytest.raises(LockTimeout) as caught:
        lock(timeout=0.4).acquire()
    assert "held by" in str(caught.value)
    holder = lock().holder()
    assert holder.owner_ip == "127.0.0.1"
    if connection.vendor == "postgresql":
        assert str(elsewhere.process.pid) in str(caught.value)
        assert f":{elsewhere.process.pid} " in str(holder)
    assert "left" not in str(holder)
    assert lock().locked()
    assert observer.waiting("stock:7") == 0
    release()
    assert not lock().locked()
    until(lambda: not is_refused(lock()))


def test_a_waiter_with_an_ended_session_queues_again(sessions, waiter, in_queue, until):
    with lock():
        main = sessions()
        waiting = waiter()
        (ended,) = sessions() - main
        end_session(ended)
        until(lambda: ended not in sessions())
        in_queue(1)
    until(lambda: waiting.results)


@pytest.mark.parametrize("waiters", [1, 2])
def test_a_wait_for_a_server_that_has_left_is_no_contention(
    waiters, proxy, held_elsewhere, threads, until
):
    release = held_elsewhere()
    waiting = [threads(lock(timeout=4).acquire) for _ in range(waiters)]
    until(lambda: len(lock().waiters()) == waiters)
    proxy.close()
    for one in waiting:
        with pytest.raises(LockBackendError):
            one.join(30)
    release()


@pytest.mark.engine("postgresql")
def test_more_keys_than_sessions_can_be_waited_for(sessions, observer, threads, until):
    """Keys without a free session are polled, and each waiter gets its turn."""
    places = 8
    number = places + 4
    holds = [lock(f"stock:{n}").acquire() for n in range(number)]
    done = []

    def wait(n):
        done.append((n, lock(f"stock:{n}", timeout=60).acquire().release()))

    for n in range(number):
        threads(partial(wait, n))
    until(lambda: sum(observer.waiting(f"stock:{n}") for n in range(number)) == places)
    assert len(sessions()) <= places + 1
    # The last keys are released first. They do not wait for the others.
    for hold in reversed(holds):
        before = len(done)
        hold.release()
        until(lambda before=before: len(done) > before)
    assert sorted(n for n, _ in done) == list(range(number))


@pytest.mark.engine("postgresql")
def test_the_timeouts_of_a_project_do_not_end_a_wait(
    elsewhere, monkeypatch, sessions, waiter, until
):
    """They are meant for its own statements. PostgreSQL 17 has a third one."""
    ((version,),) = query("SELECT current_setting('server_version_num')::int", "")
    names = ["statement_timeout", "lock_timeout"]
    names += ["transaction_timeout"] * (version >= 170000)
    given = " ".join(f"-c {name}=300" for name in names)
    options = {**connection.settings_dict["OPTIONS"], "options": given}
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
    elsewhere.call(jobs.acquire, "stock:7", using="session")
    waiting = waiter()
    waits = sessions()
    until(lambda: [one for one in lock().waiters() if one.waited > 1])
    assert waits <= sessions()
    elsewhere.call(jobs.release_all)
    waiting.join(30)


@pytest.mark.engine("postgresql")
def test_keys_take_turns_in_the_queue_of_the_engine(
    elsewhere, settings, observer, threads, until
):
    """A key without a session is polled, and would never be free at these moments."""
    session = settings.DLOCKS["session"]
    options = {**session["OPTIONS"], "waiting": 1}
    settings.DLOCKS = {**settings.DLOCKS, "session": {**session, "OPTIONS": options}}
    elsewhere.call(jobs.acquire, "a", using="session")
    elsewhere.call(jobs.acquire, "b", using="session")
    for key in ("a", "b"):
        threads(lambda key=key: lock(key, timeout=60).acquire().release())
        until(lambda key=key: observer.waiting(key))
    until(lambda: observer.waiting("a"))
    elsewhere.call(jobs.release_all)


def test_an_interrupted_waiter_leaves_nothing(
    in_other_thread, threads, in_queue, observer
):
    first = in_other_thread(lock().acquire)
    main = threading.main_thread().ident
    threads(lambda: (in_queue(1), signal.pthread_kill(main, signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        lock(timeout=30).acquire()
    assert observer.waiting("stock:7") == 0
    first.release()
    with lock(timeout=0):
        pass


@pytest.mark.engine("postgresql")
def test_candidates_of_an_election_poll(held_elsewhere, until):
    """Their wait may last for weeks. Its snapshot would hold back VACUUM."""
    polls, led = set(), threading.Event()

    def asks():
        """Return what the sessions wait for that ask for a lock."""
        rows = query(
            "SELECT query_start, wait_event FROM pg_stat_activity WHERE query LIKE"
            " '%%advisory_lock(%%' AND pid <> pg_backend_pid()",
            "",
        )
        polls.update(began for began, _ in rows)
        return {wait_event for _, wait_event in rows}

    election = LeaderElection(
        "scheduler", using="session", on_elected=lambda hold: led.set()
    )
    release = held_elsewhere(election.key)
    asks()
    polls.clear()
    with election:
        until(lambda: "advisory" not in asks() and len(polls) > 3)
        assert "advisory" not in asks()
        assert not led.is_set()
        release()
        assert led.wait(30)


def test_a_candidate_that_polls_leads_after_a_leader_that_resigns(observer):
    """The former leader does not find the key free before the next poll of another.

    On a busy machine it may do so once, but not each time.
    """
    elected = queue.SimpleQueue()
    elections = {
        who: LeaderElection(
            "scheduler", using="session", on_elected=lambda _, who=who: elected.put(who)
        )
        for who in ("first", "second")
    }
    with elections["first"]:
        led = [elected.get(timeout=30)]
        with elections["second"]:
            while led[-1] == "first" and len(led) < 10:
                assert elections["first"].resign()
                led.append(elected.get(timeout=30))
    assert led[-1] == "second", led


@pytest.mark.engine("mariadb", "mysql")
def test_no_deprecated_table_is_read(held_elsewhere, threads, in_queue):
    """MySQL has announced the removal of that table."""

    def uses_of_deprecated_table():
        # MariaDB has no such counter, and no other table.
        return query(
            "", "SHOW GLOBAL STATUS LIKE 'Deprecated_use_i_s_processlist_count'"
        )

    release = held_elsewhere()
    waiter = threads(lambda: lock(timeout=30).acquire().release())
    before = uses_of_deprecated_table()
    in_queue(1)
    assert lock().holder().holder.startswith("session ")
    assert uses_of_deprecated_table() == before
    release()
    waiter.join()
