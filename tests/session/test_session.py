"""Session locks: PostgreSQL's advisory locks and ``GET_LOCK``."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections, transaction
from django.test import override_settings

from dlocks import (
    LockBackendError,
    LockLost,
    LockTimeout,
    db_lock,
    db_rwlock,
    db_semaphore,
)
from tests import jobs
from tests.for_each import for_each
from tests.internals import (
    Claim,
    Entry,
    backends,
    check_settings,
    check_tables,
    clock,
    disconnect,
)
from tests.proxy import Proxy
from tests.scripts import run_python
from tests.servers import PgBouncer
from tests.settings import PORT
from tests.timing import in_time
from tests.volume import volume

pytestmark = [
    pytest.mark.django_db(transaction=True),
    # The contract and some of these tests run on MySQL too. Its other statements are
    # those of MariaDB.
    pytest.mark.engine("postgresql", "mariadb"),
]
POSTGRESQL = pytest.mark.engine("postgresql")
SERVERS = pytest.mark.engine("postgresql", "mariadb", "mysql")


def lock(key="stock:7", **policy):
    return db_lock(key, using="session", **policy)


def claim(key="stock:7", **options):
    return Claim(key=key, **{"ttl": 30.0, "holder": "session", **options})


@pytest.fixture(autouse=True)
def sessions_closed(transactional_db):
    """Close all lock sessions before the next test."""
    backends.reset()
    yield
    if "session" in list(backends):
        disconnect(backends["session"])
    backends.reset()


@pytest.fixture
def backend():
    backend = backends["session"]
    yield backend
    disconnect(backend)


@pytest.fixture
def proxy(monkeypatch):
    """Return a proxy between this process's sessions and the server.

    The test's own connection is direct.
    """
    connection.ensure_connection()
    proxy = Proxy(int(PORT))
    monkeypatch.setitem(connection.settings_dict, "PORT", str(proxy.port))
    yield proxy
    proxy.close()


@pytest.fixture
def in_queue(until):
    """Return a function that waits until a key has a number of waiters.

    They wait on the server or for a session.
    """

    def wait(number, key="stock:7"):
        until(lambda: backends["session"].waiting(key) == number)

    return wait


def own_sessions():
    """Return the server's ids of the lock sessions of this process."""
    return {one.pid for one in backends["session"]._sessions() if one.identity}


def query(postgresql, mysql, *values):
    """Run the statement of this engine, and return the rows."""
    with connection.cursor() as cursor:
        cursor.execute(
            postgresql if connection.vendor == "postgresql" else mysql, values
        )
        return cursor.fetchall() if cursor.description else []


def end_session(pid):
    query("SELECT pg_terminate_backend(%s)", "KILL %s", pid)


def sessions_on_server():
    """Return the ids of all sessions of the server."""
    rows = query(
        "SELECT pid FROM pg_stat_activity",
        "SELECT id FROM information_schema.processlist",
    )
    return {pid for (pid,) in rows}


@contextlib.contextmanager
def taken_elsewhere(key="stock:7"):
    """Wait for the key, and hold it in a session that is not the backend's."""
    name = backends["session"]._name(key)
    ((got,),) = query("SELECT pg_advisory_lock(%s)", "SELECT GET_LOCK(%s, 20)", name)
    assert got != 0
    yield
    query("SELECT pg_advisory_unlock(%s)", "SELECT RELEASE_LOCK(%s)", name)


def is_free_elsewhere(key="stock:7"):
    """Return whether another session could acquire the key exclusively now."""
    name = backends["session"]._name(key)
    ((got, _),) = query(
        "SELECT pg_try_advisory_lock(%s), pg_advisory_unlock(%s)",
        "SELECT GET_LOCK(%s, 0), RELEASE_LOCK(%s)",
        name,
        name,
    )
    return bool(got)


def is_taken(key="stock:7"):
    """Return whether any session of the server has the key.

    Trying the key could interfere with a caller that tries it just then.
    """
    ((taken,),) = query(
        "SELECT EXISTS (SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND"
        " granted AND objsubid = 1 AND (classid::bigint << 32 | objid::bigint) = %s)",
        "SELECT IS_USED_LOCK(%s) IS NOT NULL",
        backends["session"]._name(key),
    )
    return bool(taken)


# Exclusion.


def test_no_increment_is_lost_by_processes(workers, tmp_path):
    path = tmp_path / "counter"
    path.write_text("0 0")
    crowd, times = workers(4), volume(30)
    policy = {"scope": "lease", "using": "session", "timeout": None}
    for worker in crowd:
        worker.start(jobs.count, str(path), "counter", times=times, **policy)
    tokens = list(itertools.chain.from_iterable(worker.hear(150) for worker in crowd))
    value, last = map(int, path.read_text().split())
    assert value == len(crowd) * times == len(set(tokens))
    assert last == max(tokens)


def test_no_increment_is_lost_by_threads(threads):
    """Some threads come from the engine's queue, and others find the key free.

    They use different sessions of one process. The engine itself would grant a session
    its own lock twice.
    """
    counter, times = [0], volume(12)

    def add():
        for _ in range(times):
            with lock(timeout=None):
                value = counter[0]
                time.sleep(0)
                counter[0] = value + 1

    for thread in [threads(add) for _ in range(12)]:
        thread.join(150)
    assert counter == [12 * times]


def test_no_increment_is_lost_with_few_connections_for_waiting(doomed, tmp_path):
    """Some callers wait in the engine's queue, and some for a connection.

    Some keys are polled, and some callers time out.
    """
    paths = [str(tmp_path / name) for name in "abc"]
    for path in paths:
        Path(path).write_text("0")
    crowd = [doomed(DLOCKS_TEST_SESSION_WAITING="2") for _ in range(2)]
    policy = {"threads": 6, "times": (times := volume(20)), "using": "session"}
    for worker in crowd:
        worker.start(jobs.count_by_threads, paths, **policy)
    done = [worker.hear(150) for worker in crowd]
    assert [int(Path(path).read_text()) for path in paths] == [
        sum(column) for column in zip(*done, strict=True)
    ]
    assert sum(map(sum, done)) > 0.7 * len(crowd) * 6 * times


def test_in_a_transaction_no_increment_is_lost(workers, tmp_path):
    """On PostgreSQL the lock belongs to the transaction.

    On MariaDB the lease is kept until the transaction ends.
    """
    path = tmp_path / "counter"
    path.write_text("0 0")
    crowd, times = workers(4), volume(15)
    policy = {"using": "session", "timeout": None, "times": times}
    for worker in crowd:
        worker.start(jobs.count_in_transactions, str(path), "counter", **policy)
    for worker in crowd:
        worker.hear(100)
    assert path.read_text().split()[0] == str(4 * times)


def test_keys_of_a_database_are_compared_byte_for_byte(backend):
    keys = ["a", "a ", "A", "ä", "a\u0308", "stock:7"]
    names = [backend._name(key) for key in keys]
    assert len(set(names)) == len(keys)
    if connection.vendor == "postgresql":
        digest = "encode(sha256(convert_to(%s, 'UTF8')), 'hex')"
        named = f"SELECT ('x' || left({digest}, 16))::bit(64)::bigint"
        assert query(named, "", "stock:7") == [(names[-1],)]
    else:
        assert all(len(name) <= 64 and name == name.lower() for name in names)
        # All databases of a server share one namespace.
        other = hashlib.sha256(b"another\0stock:7").hexdigest()[:48]
        assert names[-1] != f"dlocks:{other}"


# The end of a hold.


def test_a_killed_holders_key_goes_to_the_waiter(doomed, workers, in_queue):
    """A waiter that was killed does not block the next."""
    holder, killed, (waiter,) = doomed(), doomed(), workers(1)
    holder.start(jobs.hold, "stock:7", using="session", ttl=300)
    holder.hear()
    killed.start(jobs.hold, "stock:7", using="session", timeout=None)
    in_queue(1)
    waiter.start(jobs.wait_quietly, "stock:7", using="session", timeout=30)
    in_queue(2)
    killed.kill()
    holder.kill()
    granted, _ = waiter.hear()
    in_time(granted - holder.killed_at, 2.0)


@pytest.mark.parametrize(
    ("waited", "policy"),
    [
        (True, {}),
        pytest.param(False, {"renew": False}, marks=POSTGRESQL),
        pytest.param(False, {"max_hold": 20}, marks=POSTGRESQL),
    ],
    ids=["renewed", "not renewed", "bounded"],
)
def test_a_hold_with_an_ended_session_is_lost_within_a_second(
    waited, policy, threads, in_queue, in_other_thread, until, backend, monkeypatch
):
    """The next ping detects it. Any thread sends one every half second."""
    told = []
    event = threading.Event()

    def on_lost(hold):
        told.append((time.monotonic(), hold))
        event.set()

    ready = threading.Event()
    if waited:
        first = in_other_thread(lock().acquire)
        threads(lambda: (in_queue(1), first.release(), ready.set()))
    held = lock(on_lost=on_lost, **policy).acquire()
    if waited:
        assert ready.wait(10)
    # The session of this process that has the key, by the server's id.
    (pid,) = {entry.session.pid for entry in backends["session"]._entries.values()}
    assert held.held
    ping, gone, overlooked = backend._ping, threading.Event(), []

    def watched(session):
        after = gone.is_set()
        ping(session)
        if after and session.pid == pid and not session.dead:
            overlooked.append(session)

    monkeypatch.setattr(backend, "_ping", watched)
    ended = time.monotonic()
    end_session(pid)
    until(lambda: pid not in sessions_on_server())
    gone.set()
    assert event.wait(10)
    assert not overlooked
    in_time(told[0][0] - ended, 1.0)
    assert told[0][1] is held
    assert not held.held
    with pytest.raises(LockLost):
        held.release()
    with lock(timeout=5):
        pass


@pytest.fixture
def refused(monkeypatch):
    """Return a function that lets the server refuse one kind of statement."""

    def refuse(session, statement):
        sql = {**session.statements, statement: "SELECT no_such_column"}
        monkeypatch.setattr(session, "statements", sql)

    return refuse


@POSTGRESQL
def test_a_refused_statement_does_not_affect_other_holds(refused, backend):
    with lock() as held:
        refused(backend._main, "try")
        with pytest.raises(LockBackendError, match="no_such_column"):
            lock("stock:8").acquire()
        held.check()
        held.renew()
        assert [entry.claim.key for entry in backend._entries.values()] == ["stock:7"]


@POSTGRESQL
def test_a_slow_server_does_not_lose_holds(monkeypatch, backend):
    with lock(ttl=4.0) as held:
        kind = type(backend._main)
        first_row = kind.first_row

        def slowly(*args):
            row = first_row(*args)
            time.sleep(0.6)
            return row

        with monkeypatch.context() as patched:
            patched.setattr(kind, "first_row", slowly)
            time.sleep(6)
            assert held.held


@POSTGRESQL
def test_a_free_key_is_not_busy_after_a_slow_request(backend, threads, until):
    with lock("stock:8"):
        session, brief = backend._main, claim(ttl=0.05)
        another = claim("stock:9", ttl=0.05)
        with session.mutex:
            trying = threads(lambda: backend.acquire(brief))
            asking = until(lambda: backend._entries.get(brief.owner))
            # This entry expires after the claim that is being tried. Once it is being
            # released, the thread that releases expired entries has checked both.
            over = Entry(another, name="stock:9", ends_at=clock.now() + 0.05)
            with backend._mutex:
                backend._entries[another.owner] = over
                backend._changed.notify()
            until(lambda: over.leaving or asking.leaving)
        assert until(lambda: trying.results)[0] is not None


@POSTGRESQL
def test_an_expired_holder_cannot_release_during_the_handover(
    backend, monkeypatch, until
):
    """The key has been taken from it by then, which an error of a waiter says.

    The next holder may have the key before this is recorded.
    """
    ending, ends, end = threading.Event(), threading.Event(), backend._end

    def end_later(entry):
        ending.set()
        assert ends.wait(30)
        end(entry)

    monkeypatch.setattr(backend, "_end", end_later)
    mine = claim(ttl=0.1)
    assert backend.acquire(mine)
    assert ending.wait(30)
    try:
        assert "its lease expired" in str(backend.holder(mine.key))
        assert dict(backend.renew([mine])) == {}
        assert backend.release(mine, keep=60.0) is False
        assert backend.release(mine) is False
    finally:
        ends.set()
    until(lambda: backend.holder(mine.key) is None)


@POSTGRESQL
def test_a_claim_cancelled_while_it_is_tried_leaves_the_key_free(
    monkeypatch, backend, in_other_thread, in_queue
):
    backend.places = 1
    with lock("stock:8"), contextlib.ExitStack() as blocked:
        blocker = in_other_thread(lock("stock:9").acquire)
        blocked.callback(in_other_thread, blocker.release)
        # The only session for waiting is taken.
        assert backend.enqueue(claim("stock:9"), "").position
        in_queue(1, "stock:9")
        waiter = claim("stock:7")
        assert backend.enqueue(waiter, "").position
        request = backend._request
        gave_up = []

        def come_between(entry, *args):
            if not gave_up:
                gave_up.append(backend.release(entry.claim))
            return request(entry, *args)

        monkeypatch.setattr(backend, "_request", come_between)
        assert not backend.poll([waiter]).get(waiter.owner, None)
        assert gave_up == [False]
        assert is_free_elsewhere()


@POSTGRESQL
def test_a_reader_joining_at_the_last_release_has_its_own_hold(
    monkeypatch, backend, threads
):
    reader, second = claim(shared=True), claim(shared=True)
    assert backend.acquire(reader)
    kind = type(backend._main)
    ask, leaves, come = kind.ask, threading.Event(), threading.Event()

    def ask_late(self, statement, *args):
        if statement == "free shared" and not leaves.is_set():
            leaves.set()
            # The wait is limited, because both readers use this session.
            come.wait(0.5)
        return ask(self, statement, *args)

    monkeypatch.setattr(kind, "ask", ask_late)
    threads(lambda: backend.release(reader))
    assert leaves.wait(10)
    grants = []
    threads(lambda: (grants.append(backend.acquire(second)), come.set()))
    assert come.wait(10)
    assert grants[0] is not None
    assert not is_free_elsewhere()
    assert backend.release(second)


@pytest.fixture
def left_by_the_first(monkeypatch, backend):
    """Return a second reader, whose request is sent after the first has left.

    The second reader was about to join the shared hold of the first.
    """
    reader, second = claim(shared=True), claim(shared=True, ttl=60.0)
    # No other request is under way then.
    monkeypatch.setattr(backend, "renew_every", 60.0)
    assert backend.acquire(reader)
    kind = type(backend._main)
    ask, left = kind.ask, []

    def ask_late(self, statement, *args):
        # Its ttl is longer than the one that the session has.
        if statement == "idle":
            left.append(backend.release(reader))
        return ask(self, statement, *args)

    monkeypatch.setattr(kind, "ask", ask_late)
    yield second
    assert left == [True]


@POSTGRESQL
def test_the_second_reader_releases_the_key_after_the_first(left_by_the_first, backend):
    assert backend.acquire(left_by_the_first)
    assert not is_free_elsewhere()
    assert backend.release(left_by_the_first)
    assert is_free_elsewhere()


@POSTGRESQL
def test_a_reader_that_joins_at_a_release_passes_no_writer(
    left_by_the_first, backend, threads, in_queue
):
    written = threading.Event()

    def write():
        with taken_elsewhere():
            assert written.wait(60)

    threads(write)
    in_queue(1)
    assert backend.acquire(left_by_the_first) is None
    written.set()


@POSTGRESQL
def test_a_failed_reader_leaves_the_key_free(left_by_the_first, backend, refused):
    refused(backend._main, "try shared")
    with pytest.raises(LockBackendError):
        backend.acquire(left_by_the_first)
    backend.release(left_by_the_first)
    assert is_free_elsewhere()


@pytest.fixture
def let_go_late(proxy, threads, backend, until):
    """Return a function that releases a claim, with a late reply."""

    def release(mine):
        proxy.late.set()
        thread = threads(lambda: backend.release(mine))
        until(is_free_elsewhere)
        thread.join(0.3)
        assert thread.is_alive()
        proxy.late.clear()
        thread.join(30)
        assert thread.results == [True]

    return release


def test_a_released_key_is_free_once_the_late_reply_arrives(let_go_late, backend):
    mine = claim(ttl=300.0)
    assert backend.acquire(mine)
    let_go_late(mine)
    assert backend.acquire(claim(owner="the next one"))


@POSTGRESQL
def test_a_late_release_reply_keeps_the_shared_hold_of_another(let_go_late, backend):
    first, second = claim(shared=True), claim(shared=True)
    assert backend.acquire(first)
    let_go_late(first)
    assert backend.acquire(second)
    assert not backend.release(first)
    assert not is_free_elsewhere()
    assert backend.release(second)
    assert is_free_elsewhere()


@POSTGRESQL
def test_a_silent_server_is_trusted_for_the_ttl():
    told = threading.Event()
    held = lock(ttl=2.0, on_lost=lambda hold: told.set()).acquire()
    (pid,) = own_sessions()
    with db_lock("another", using="brisk") as other:
        os.kill(pid, signal.SIGSTOP)
        stopped = clock.now()
        try:
            assert held.held
            assert told.wait(10)
            assert 1.0 < clock.now() - stopped < 4.0
            assert not held.held
            # Its ttl is 0.6 s.
            other.check()
        finally:
            os.kill(pid, signal.SIGCONT)
    with pytest.raises(LockLost):
        held.release()


@override_settings(
    DLOCKS={
        "session": {
            "BACKEND": "dlocks.backends.session.SessionBackend",
            "OPTIONS": {"ttl": 3.0, "linger": 60},
        }
    }
)
@pytest.mark.parametrize("waited", [False, True])
def test_a_partitioned_holder_ends_before_the_next_grant(
    waited, proxy, threads, in_queue, until
):
    """The server counts from its reply, not from when the reply was read."""
    lock().acquire().release()
    holds, acquired, done = [], threading.Event(), threading.Event()

    def hold():
        holds.append(lock(timeout=30).acquire())
        acquired.set()
        done.wait(60)

    with contextlib.ExitStack() as stack:
        stack.callback(done.set)
        if waited:
            with taken_elsewhere():
                threads(hold)
                until(lambda: len(own_sessions()) == 2)
                in_queue(1)
                proxy.late.set()
        else:
            proxy.late.set()
            threads(hold)
        until(is_taken)
        # This is most of the ttl.
        time.sleep(2.0)
        proxy.late.clear()
        assert acquired.wait(30)
        proxy.cut.set()
        with taken_elsewhere():
            assert not holds[0].held
    proxy.close()
    with pytest.raises(LockLost):
        holds[0].release()


async def test_a_late_task_holds_only_for_the_rest_of_its_lease(
    in_queue, in_other_thread, until
):
    first = await lock().aacquire()
    task = asyncio.ensure_future(lock(ttl=2.0, renew=False).aacquire())
    await asyncio.to_thread(in_queue, 1)
    # From here on, the test blocks the event loop.
    in_other_thread(first.release)
    entries = backends["session"]._entries
    until(lambda: any(entry.token for entry in list(entries.values())))
    in_other_thread(time.sleep, 1.5)
    held = await task
    assert held.held

    def is_held_after_its_session():
        with taken_elsewhere():
            return held.held

    assert not in_other_thread(is_held_after_its_session)
    with pytest.raises(LockLost):
        await held.arelease()


@POSTGRESQL
def test_a_missed_turn_is_not_granted_while_it_is_released(
    monkeypatch, backend, threads
):
    late = claim(ttl=0.3)
    kind = type(backend._session_for())
    ask, ends, go_on = kind.ask, threading.Event(), threading.Event()

    def ask_late(self, statement, *args):
        if statement == "free" and not ends.is_set():
            ends.set()
            go_on.wait(10)
        return ask(self, statement, *args)

    monkeypatch.setattr(kind, "ask", ask_late)
    missed = backend.acquire(late)
    assert ends.wait(10)
    # The next turn lasts as long as this test.
    monkeypatch.setattr(backend, "grace", 30.0)
    grants = []
    thread = threads(lambda: grants.append(backend.acquire(late)))
    thread.join(0.2)
    go_on.set()
    thread.join(30)
    assert grants[0].token > missed.token
    assert not is_free_elsewhere()
    assert backend.release(late)


def test_check_detects_an_ended_session_at_once():
    """A session that ends while it is idle is replaced."""
    with lock():
        pass
    for pid in own_sessions():
        end_session(pid)
    held = lock(renew=False).acquire()
    held.check()
    (pid,) = own_sessions()
    end_session(pid)
    with pytest.raises(LockLost):
        held.check()
    with pytest.raises(LockLost):
        held.release()


@SERVERS
def test_a_stopped_holder_loses_its_session_after_its_ttl(doomed, workers):
    """The server ends a session that sends nothing for the ttl of its holds."""
    worker, (other,) = doomed(DLOCKS_TEST_SESSION_TTL="2"), workers(1)
    worker.call(jobs.acquire, "stock:7", using="session")
    worker.stop()
    stopped = time.monotonic()
    try:
        granted, _ = other.call(
            jobs.wait_quietly, "stock:7", using="session", timeout=30
        )
    finally:
        worker.resume()
    assert granted - stopped > 1.0
    in_time(granted - stopped, 8.0)
    assert worker.call(jobs.check) == "LockLost"
    assert worker.call(jobs.release_all) == ["LockLost"]


def test_a_fork_does_not_keep_the_locks_of_a_dead_parent(doomed, until, is_busy):
    worker = doomed()
    worker.start(jobs.hold_and_fork, "stock:7", using="session")
    child, tried, held = worker.hear()
    try:
        assert (tried, held) == (None, False)
        assert is_busy(using="session")
        worker.kill()
        # The child still runs, with the connections that it has inherited.
        until(lambda: not is_busy(using="session"), 3.0)
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_connections_are_closed_soon_after_the_last_hold(until, threads, in_queue):
    with lock():
        waiter = threads(lambda: lock().acquire().release())
        until(lambda: len(own_sessions()) == 2)
        in_queue(1)
        sessions = own_sessions()
        assert sessions <= sessions_on_server()
    waiter.join(30)
    until(lambda: not sessions & sessions_on_server(), 5.0)
    assert own_sessions() == set()


# Only psycopg warns of connections that are still open.
@POSTGRESQL
def test_a_program_closes_its_sessions_without_a_warning(workers):
    code = (
        "import django; django.setup()\n"
        "from dlocks import db_lock\n"
        "with db_lock('a', using='session'): pass\n"
        "held = db_lock('b', using='session').acquire()\n"
    )
    done = run_python("-c", code, DJANGO_SETTINGS_MODULE="tests.settings")
    assert done.returncode == 0
    # The only warning is that of the hold.
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("'b' was never released by")
    (worker,) = workers(1)
    assert worker.call(jobs.try_once, "b", using="session")


@POSTGRESQL
def test_a_database_can_be_dropped_after_use(doomed):
    with connection.cursor() as cursor:
        cursor.execute("DROP DATABASE IF EXISTS dlocks_dropped")
        cursor.execute("CREATE DATABASE dlocks_dropped")
        worker = doomed(DLOCKS_TEST_NAME="dlocks_dropped")
        assert worker.call(jobs.try_once, "stock:7", using="session")
        # The worker still runs. The server waits 5 s for other sessions to end.
        cursor.execute("DROP DATABASE dlocks_dropped")


# Waiting.


@SERVERS
def test_the_engines_queue_is_first_come_first_served(workers, in_queue):
    crowd = workers(5)
    with lock():
        for number, worker in enumerate(crowd, 1):
            worker.start(jobs.wait_quietly, "stock:7", using="session", timeout=60)
            in_queue(number)
    granted = [worker.hear() for worker in crowd]
    assert granted == sorted(granted)
    assert [token for _, token in granted] == sorted(token for _, token in granted)


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
def test_a_session_waiter_that_times_out_leaves_nothing(workers, until):
    """Its error shows the holder, which is in another process."""
    (worker,) = workers(1)
    worker.start(jobs.hold, "stock:7", using="session")
    worker.hear()
    with pytest.raises(LockTimeout) as caught:
        lock(timeout=0.4).acquire()
    assert "held by" in str(caught.value)
    holder = lock().holder()
    assert holder.owner_ip == "127.0.0.1"
    if connection.vendor == "postgresql":
        assert str(worker.process.pid) in str(caught.value)
        assert f":{worker.process.pid} " in str(holder)
    assert "left" not in str(holder)
    assert lock().locked()
    assert backends["session"].waiting("stock:7") == 0
    worker.tell()
    worker.hear()
    assert not lock().locked()
    until(
        lambda: (found := lock(timeout=0).try_acquire()) and (found.release() or True)
    )
    assert not backends["session"]._entries


@POSTGRESQL
def test_a_claim_cancelled_at_its_grant_takes_no_other_key(
    monkeypatch, in_other_thread, in_queue, until
):
    """The session may receive a cancellation late.

    The next claim must not use it yet, or it would lose its key.
    """
    backend = backends["session"]
    monkeypatch.setattr(backend, "places", 1)
    holder = in_other_thread(lock().acquire)
    late, next_one = claim(), claim("another")
    backend.enqueue(late)
    in_queue(1)
    entry, ask = backend._entries[late.owner], backend._ask_main

    def ask_after_the_grant(statement, value):
        if statement == "cancel":
            holder.release()
            until(lambda: entry.token)
            # There is no session for this claim until the other one has left.
            backend.enqueue(next_one)
            assert backend._entries[next_one.owner].session is None
        return ask(statement, value)

    monkeypatch.setattr(backend, "_ask_main", ask_after_the_grant)
    session = until(lambda: entry.session)
    assert not backend.release(late)
    until(lambda: backend.poll([next_one])[next_one.owner].grant)
    assert backend._entries[next_one.owner].session is not session
    assert next_one.owner in backend.renew([next_one])
    assert in_other_thread(lock("another", timeout=0).try_acquire) is None
    assert backend.release(next_one)
    with lock(timeout=5):
        pass


def test_a_key_granted_with_its_cancellation_is_released(
    monkeypatch, backend, in_other_thread, in_queue, until
):
    """An engine may grant the key and then report a cancelled statement.

    The session holds the key in this case. The claim waits once more.
    """
    kind = type(backend._session_for())
    first_row, cancelled = kind.first_row, []

    def cancel(self, sql, values=None):
        row = first_row(self, sql, values)
        if sql == self.statements["wait"] and not cancelled:
            cancelled.append(row)
            return None
        return row

    monkeypatch.setattr(kind, "first_row", cancel)
    holder = in_other_thread(lock().acquire)
    waiting = claim()
    backend.enqueue(waiting)
    in_queue(1)
    holder.release()
    until(lambda: backend.poll([waiting])[waiting.owner].grant)
    assert cancelled[0][0] is not None
    assert backend.release(waiting)
    assert not backend._entries
    assert is_free_elsewhere()


@SERVERS
def test_a_cancelled_release_is_repeated(monkeypatch, backend):
    """An administrator may cancel any running statement."""
    other = lock("another").acquire()
    hold = lock().acquire()
    session = backend._entries[hold.owner].session
    first_row = session.first_row

    def cancelled(sql, values):
        assert sql == session.statements["free"]
        monkeypatch.undo()
        return first_row(
            "SELECT pg_cancel_backend(pg_backend_pid()), pg_sleep(10)"
            if connection.vendor == "postgresql"
            else "KILL QUERY CONNECTION_ID()"
        )

    monkeypatch.setattr(session, "first_row", cancelled)
    hold.release()
    assert is_free_elsewhere()
    other.check()
    other.release()


@SERVERS
def test_a_timeout_does_not_cancel_an_unrelated_statement(
    in_other_thread, in_queue, until
):
    """After a failover, another client may have the same session id."""
    backend = backends["session"]
    holder = in_other_thread(lock().acquire)
    waiting = claim()
    backend.enqueue(waiting)
    until(lambda: backend._entries[waiting.owner].session)
    in_queue(1)
    other = connections["default"].copy()
    other.inc_thread_sharing()
    running = (
        "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND state = 'active'",
        "SELECT SUM(command = 'Query') FROM information_schema.processlist WHERE id=%s",
    )
    own, sleeping = "CONNECTION_ID()", "SLEEP(2) + 1"
    if other.vendor == "postgresql":
        own, sleeping = "pg_backend_pid()", "1 FROM pg_sleep(2)"
    with other.cursor() as cursor:
        cursor.execute(f"SELECT {own}")
        backend._entries[waiting.owner].session.pid = number = cursor.fetchone()[0]
        slept = []

        def sleep():
            cursor.execute(f"SELECT {sleeping}")
            slept.append(cursor.fetchone()[0])

        sleeper = threading.Thread(target=sleep, daemon=True)
        sleeper.start()
        until(lambda: query(*running, number)[0][0])
        backend.release(waiting)
        sleeper.join(20)
    other.close()
    assert slept == [1]
    holder.release()


def test_a_waiter_with_an_ended_session_queues_again(threads, in_queue, until):
    done = []
    with lock():
        main = own_sessions()
        threads(lambda: done.append(lock(timeout=30).acquire().release()))
        (waiting,) = until(lambda: own_sessions() - main)
        in_queue(1)
        end_session(waiting)
        until(lambda: waiting not in own_sessions())
        in_queue(1)
    until(lambda: done)


@POSTGRESQL
def test_more_keys_than_sessions_can_be_waited_for(threads, until):
    """Keys without a free session are polled, and each waiter gets its turn."""
    number, waiting = backends["session"].places + 4, backends["session"].waiting
    holds = [lock(f"stock:{n}").acquire() for n in range(number)]
    done = []

    def wait(n):
        done.append((n, lock(f"stock:{n}", timeout=60).acquire().release()))

    for n in range(number):
        threads(partial(wait, n))
    until(lambda: sum(waiting(f"stock:{n}") for n in range(number)) == number)
    assert len(own_sessions()) <= backends["session"].places + 1
    # The last keys are released first. They do not wait for the others.
    for hold in reversed(holds):
        before = len(done)
        hold.release()
        until(lambda before=before: len(done) > before)
    assert sorted(n for n, _ in done) == list(range(number))


def test_an_interrupted_waiter_leaves_nothing(in_other_thread, threads, in_queue):
    first = in_other_thread(lock().acquire)
    main = threading.main_thread().ident
    threads(lambda: (in_queue(1), signal.pthread_kill(main, signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        lock(timeout=30).acquire()
    assert backends["session"].waiting("stock:7") == 0
    first.release()
    with lock(timeout=0):
        pass


@pytest.fixture
def during(monkeypatch, backend):
    """Return a function that calls another one after a statement was executed."""

    def arrange(statement, function):
        kind = type(backend._session_for())
        first_row = kind.first_row

        def first_row_and_more(self, sql, values=None):
            row = first_row(self, sql, values)
            if sql == self.statements[statement]:
                monkeypatch.undo()
                function()
            return row

        monkeypatch.setattr(kind, "first_row", first_row_and_more)

    return arrange


@for_each("statement", ["try", "free"])
def test_an_interrupted_request_leaves_no_lock(statement, during, until):
    """It is unknown what the server has done, so the session ends with all holds."""
    lost = threading.Event()
    other = lock("another", on_lost=lambda hold: lost.set()).acquire()
    during(statement, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt), lock():
        pass
    assert lost.wait(10)
    with pytest.raises(LockLost):
        other.release()
    until(is_free_elsewhere)
    with lock(timeout=5), lock("another", timeout=5):
        pass


@POSTGRESQL
def test_a_signal_handler_gets_an_error_instead_of_a_deadlock(during):
    """The handler has interrupted a request on the session that it needs."""
    errors = []

    def handler():
        with pytest.raises(LockBackendError, match="signal handler") as caught:
            lock("another").acquire()
        errors.append(caught)

    during("try", handler)
    with lock() as held:
        held.check()
    assert errors


# Transactions.


@POSTGRESQL
def test_in_a_transaction_the_lock_ends_with_it(is_busy):
    """``check()`` detects a rollback to an earlier savepoint.

    A transaction with an old snapshot is refused.
    """
    for roll_back in (False, True):
        with transaction.atomic():
            with lock() as held:
                assert held.scope == "transaction"
                assert is_busy(using="session")
                held.check()
            assert is_busy(using="session")
            transaction.set_rollback(roll_back)
        assert not is_busy(using="session")
    with transaction.atomic():
        savepoint = transaction.savepoint()
        held = lock().acquire()
        transaction.savepoint_rollback(savepoint)
        with pytest.raises(LockLost):
            held.check()
    with transaction.atomic():
        query("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "")
        with pytest.raises(RuntimeError, match="READ COMMITTED"):
            lock().acquire()


@pytest.mark.engine("mariadb")
def test_on_mariadb_a_lease_lasts_until_the_transaction_ends(is_busy):
    with transaction.atomic():
        with lock() as held:
            assert held.scope == "lease"
        assert is_busy(using="session")
    assert not is_busy(using="session")
    with (
        transaction.atomic(),
        pytest.raises(RuntimeError, match="does not support scope='transaction'"),
    ):
        lock(scope="transaction").acquire()


# Shared holds.


@POSTGRESQL
def test_readers_share_and_writers_do_not(in_other_thread, threads, in_queue, until):
    shelf = db_rwlock("stock:7", using="session")
    with shelf.read() as mine:
        other = in_other_thread(shelf.read().try_acquire)
        assert other is not None
        assert other.token > mine.token
        assert in_other_thread(shelf.write().try_acquire) is None
        written = []
        threads(lambda: written.append(shelf.write().acquire().release()))
        in_queue(1)
        # A reader that comes after a waiting writer queues behind it.
        assert in_other_thread(shelf.read().try_acquire) is None
        other.release()
        assert not written
    until(lambda: written)
    with shelf.write(), shelf.read() as both:
        pass
    assert not both.held


@POSTGRESQL
def test_many_readers_that_waited_for_a_writer_read_together(threads, until, in_queue):
    shelf = db_rwlock("stock:7", using="session", timeout=60)
    number = backends["session"].places + 10
    barrier = threading.Barrier(number)

    def read():
        with shelf.read():
            barrier.wait(30)

    with shelf.write():
        for _ in range(number):
            threads(read)
        in_queue(number)


@POSTGRESQL
def test_a_shared_hold_outlives_other_shared_holds(workers, in_other_thread):
    """The shared holds of one process are one lock of the engine.

    The last of them releases it.
    """
    (other,) = workers(1)
    shelf = db_rwlock("stock:7", using="session")
    one, two = shelf.read().acquire(), in_other_thread(shelf.read().acquire)
    one.release()
    assert other.call(jobs.try_once, "stock:7", using="session") is None
    two.release()
    assert other.call(jobs.try_once, "stock:7", using="session")


def test_session_locks_cannot_limit_shared_holds():
    """There are no semaphores, and on MariaDB no shared locks either."""
    refused = "SessionBackend does not support"
    with pytest.raises(RuntimeError, match=f"{refused} (semaphores|shared locks)"):
        db_semaphore("stock:7", 3, using="session").acquire()
    if connection.vendor == "mysql":
        with pytest.raises(RuntimeError, match=f"{refused} shared locks"):
            db_rwlock("stock:7", using="session").read().acquire()


# Settings.


@pytest.mark.engine("sqlite")
def test_sqlite_has_no_session_locks():
    """Invalid options are refused."""
    backend = {"BACKEND": "dlocks.backends.session.SessionBackend"}
    with override_settings(DLOCKS={"session": backend}):
        with pytest.raises(ImproperlyConfigured, match="database 'default' is sqlite"):
            lock().acquire()
        assert [found.id for found in check_settings()] == ["dlocks.E004"]
    for option, value in (
        ("waiting", -1),
        ("waiting", True),
        ("ping", 0),
        ("linger", "1"),
        ("deadlock_after", -1),
    ):
        wrong = {"session": {**backend, "OPTIONS": {option: value}}}
        with (
            override_settings(DLOCKS=wrong),
            pytest.raises(ImproperlyConfigured, match=option),
        ):
            backends["session"]


# Behind a pooler.


@pytest.fixture
def pooled(monkeypatch):
    """Return a function that puts PgBouncer in between, in the given mode."""
    with contextlib.ExitStack() as stack:

        def put(mode):
            server = stack.enter_context(PgBouncer(int(PORT), mode=mode))
            connections.close_all()
            backends.reset()
            monkeypatch.setitem(connection.settings_dict, "PORT", str(server.port))

        yield put
        disconnect(backends["session"])
        connections.close_all()
        monkeypatch.undo()


SAYS_SESSIONS_ARE_KEPT = {
    "session": {
        "BACKEND": "dlocks.backends.session.SessionBackend",
        "OPTIONS": {"session_pooling": True},
    }
}


@POSTGRESQL
@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_session_locks_behind_a_pooler_are_refused(mode, pooled):
    pooled(mode)
    with pytest.raises(
        ImproperlyConfigured, match="is behind a pooler .*PessimisticBackend"
    ):
        lock().acquire()
    assert "dlocks.E007" in [found.id for found in check_tables(databases=["default"])]
    # The session of the pooler is unchanged.
    assert query("SELECT count(*) FROM pg_prepared_statements", "") == [(0,)]
    settings = (
        "SELECT current_setting('idle_session_timeout'),"
        " current_setting('application_name')"
    )
    assert query(settings, "") == [("0", "")]
    # In a transaction the pooler does not matter.
    with transaction.atomic(), lock() as held:
        assert held.scope == "transaction"
        held.check()


@POSTGRESQL
@override_settings(DLOCKS=SAYS_SESSIONS_ARE_KEPT)
def test_session_locks_work_with_session_pooling(
    pooled, in_other_thread, threads, in_queue
):
    """A wrong option is detected."""
    pooled("session")
    done = []
    with lock():
        assert in_other_thread(lock().try_acquire) is None
        waiter = threads(lambda: done.append(lock(timeout=30).acquire().release()))
        in_queue(1)
        with pytest.raises(LockTimeout):
            in_other_thread(lock(timeout=0.2).acquire)
    waiter.join(30)
    assert done
    disconnect(backends["session"])
    pooled("transaction")
    with pytest.raises(ImproperlyConfigured, match="to two connections at a time"):
        lock().acquire()


@POSTGRESQL
def test_a_failed_connection_is_not_contention(monkeypatch):
    monkeypatch.setitem(connection.settings_dict, "PORT", "1")
    with pytest.raises(
        LockBackendError, match="No session for locks on database 'default'"
    ):
        lock().acquire()


@pytest.mark.engine("mariadb", "mysql")
def test_no_deprecated_table_is_read(threads, in_queue):
    """``holder()`` and the number of waiters use no deprecated table.

    MySQL has announced the removal of that table.
    """

    def uses_of_deprecated_table():
        # MariaDB has no such counter, and no other table.
        return query(
            "", "SHOW GLOBAL STATUS LIKE 'Deprecated_use_i_s_processlist_count'"
        )

    with taken_elsewhere():
        waiter = threads(lambda: lock(timeout=30).acquire().release())
        before = uses_of_deprecated_table()
        in_queue(1)
        assert lock().holder().holder.startswith("session ")
        assert uses_of_deprecated_table() == before
    waiter.join()
