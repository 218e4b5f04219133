"""A session lock ends with its session, its process or its lease, and not before."""

import asyncio
import contextlib
import gc
import os
import queue
import signal
import sys
import threading
import time
from itertools import pairwise

import pytest
from django.db import connection
from django.test import override_settings

from dlocks import LockBackendError, LockLost, db_lock
from dlocks.backends.session import SessionBackend
from dlocks.values import Claim
from tests import jobs
from tests.for_each import for_each
from tests.processes import on_database
from tests.promises.session.server import (
    POSTGRESQL,
    SERVERS,
    clients,
    end_session,
    lock,
)
from tests.scripts import run_python
from tests.timing import in_time

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.engine("postgresql", "mariadb"),
]


# The end of a process.


def test_a_killed_holders_key_goes_to_the_waiter(doomed, elsewhere, in_queue):
    """A waiter that was killed does not block the next."""
    holder, killed = doomed(), doomed()
    holder.start(jobs.hold, "stock:7", using="session", ttl=300)
    holder.hear()
    killed.start(jobs.hold, "stock:7", using="session", timeout=None)
    in_queue(1)
    elsewhere.start(jobs.wait_quietly, "stock:7", using="session", timeout=30)
    in_queue(2)
    killed.kill()
    holder.kill()
    granted, _ = elsewhere.hear()
    in_time(granted - holder.killed_at, 2.0)


@SERVERS
def test_a_stopped_holder_loses_its_session_after_its_ttl(doomed, elsewhere):
    """The server ends a session that sends nothing for the ttl of its holds.

    An earlier hold with a longer ttl makes no difference.
    """
    worker = doomed(DLOCKS_TEST_SESSION_TTL="2")
    assert worker.call(jobs.try_once, "another", using="session", ttl=300)
    worker.call(jobs.acquire, "stock:7", using="session")
    worker.stop()
    stopped = time.monotonic()
    try:
        granted, _ = elsewhere.call(
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


# Only psycopg warns of connections that are still open.
@POSTGRESQL
def test_a_program_closes_its_sessions_without_a_warning(elsewhere):
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
    assert elsewhere.call(jobs.try_once, "b", using="session")


def test_the_connections_are_closed_soon_after_the_last_hold(sessions, until, waiter):
    with lock():
        waiting = waiter()
        assert len(sessions()) == 2
    waiting.join(30)
    until(lambda: not sessions(), 5.0)


@POSTGRESQL
def test_a_database_can_be_dropped_after_use(doomed):
    with connection.cursor() as cursor:
        cursor.execute("DROP DATABASE IF EXISTS dlocks_dropped")
        cursor.execute("CREATE DATABASE dlocks_dropped")
        worker = doomed(DLOCKS_TEST_NAME="dlocks_dropped")
        assert worker.call(jobs.try_once, "stock:7", using="session")
        # The worker still runs. The server waits 5 s for other sessions to end.
        cursor.execute("DROP DATABASE dlocks_dropped")


# The end of a session.


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
    waited, policy, sessions, threads, in_queue, held_elsewhere
):
    """The next ping detects it. Any thread sends one every half second."""
    told = queue.SimpleQueue()
    if waited:
        release = held_elsewhere()
        threads(lambda: (in_queue(1), release()))
    others = clients()
    on_lost = lambda hold: told.put((time.monotonic(), hold))  # noqa: E731
    held = lock(on_lost=on_lost, **policy).acquire()
    ended = time.monotonic()
    for pid in sessions() - others:
        end_session(pid)
    lost, hold = told.get(timeout=10)
    in_time(lost - ended, 1.0)
    assert hold is held
    assert not held.held
    with pytest.raises(LockLost):
        held.release()
    with lock(timeout=5):
        pass


def test_check_detects_an_ended_session_at_once(sessions):
    """A session that ends while it is idle is replaced."""
    with lock():
        pass
    for pid in sessions():
        end_session(pid)
    held = lock(renew=False).acquire()
    held.check()
    for pid in sessions():
        end_session(pid)
    with pytest.raises(LockLost):
        held.check()
    with pytest.raises(LockLost):
        held.release()


class TimeLimitError(Exception):
    """What a task queue raises in its signal handler."""


@for_each("error", [KeyboardInterrupt, TimeLimitError])
@for_each("request", ["acquire", "release"])
def test_an_interrupted_request_ends_no_other_hold(
    error, request, proxy, observer, threads, until, elsewhere, handled
):
    """It is unknown what the server has done. The next requests find out."""
    other, mine = lock("another").acquire(), None
    main = threading.main_thread().ident

    def handler(*_):
        raise error

    def interrupt():
        until(lambda: (observer.holder("stock:7") is None) == (request == "release"))
        signal.pthread_kill(main, signal.SIGUSR1)
        proxy.late.clear()

    handled(signal.SIGUSR1, handler)
    if request == "release":
        mine = lock().acquire()
    proxy.late.set()
    interrupting = threads(interrupt)
    with pytest.raises(error):
        (lock().acquire if mine is None else mine.release)()
    interrupting.join(30)
    other.check()
    assert elsewhere.call(jobs.try_once, "another", using="session") is None
    until(lambda: elsewhere.call(jobs.try_once, "stock:7", using="session"))
    with lock(timeout=5):
        other.check()
    other.release()
    for key in ("stock:7", "another"):
        assert elsewhere.call(jobs.try_once, key, using="session")


def acquire_interrupted(pipe):
    """Acquire a lock, and return the longest pause of another thread meanwhile."""

    def handler(*_):
        raise TimeLimitError

    def beat():
        while not is_over.wait(0.01):
            beats.append(time.monotonic())

    beats, is_over = [time.monotonic()], threading.Event()
    signal.signal(signal.SIGUSR1, handler)
    with lock("warm"):
        pipe.pause("connected")
        beating = threading.Thread(target=beat)
        beating.start()
        with pytest.raises(TimeLimitError):
            lock().acquire()
        is_over.set()
        beating.join()
    beats.append(time.monotonic())
    return max(after - before for before, after in pairwise(beats))


@POSTGRESQL
def test_a_late_reply_to_an_interrupted_request_stops_no_thread(
    doomed, proxy, observer, until
):
    """Other threads go on while the release of an unknown grant waits for the reply."""
    worker = doomed(**on_database())
    worker.call(acquire_interrupted)
    proxy.late.set()
    worker.tell()
    until(lambda: observer.holder("stock:7"))
    os.kill(worker.process.pid, signal.SIGUSR1)
    # So late is the reply.
    time.sleep(1.0)
    proxy.late.clear()
    in_time(worker.hear(), 0.5)
    until(lambda: observer.holder("stock:7") is None)


@POSTGRESQL
def test_a_signal_handler_gets_an_error_instead_of_a_deadlock(
    proxy, observer, threads, until, handled
):
    """The handler has interrupted a request on the session that it needs."""
    errors = []
    main = threading.main_thread().ident

    def handler(*_):
        with pytest.raises(LockBackendError, match="signal handler") as caught:
            lock("another").acquire()
        errors.append(caught)
        proxy.late.clear()

    def strike():
        until(lambda: observer.holder("stock:7"))
        signal.pthread_kill(main, signal.SIGUSR1)

    handled(signal.SIGUSR1, handler)
    with lock("warm"):
        proxy.late.set()
        threads(strike)
        with lock() as held:
            held.check()
    assert errors


@pytest.fixture
def collect_in_new_threads():
    """Return a function that lets the garbage collector run in each new thread.

    It calls a function there, once in each thread, as it would call a ``__del__()``.
    """
    thresholds, known, function = gc.get_threshold(), set(), None

    def collected(phase, _):
        thread = threading.get_ident()
        if phase == "start" and thread not in known:
            known.add(thread)
            function()

    def begin(strike):
        nonlocal function
        function = strike
        known.update(one.ident for one in threading.enumerate())
        gc.callbacks.append(collected)
        gc.set_threshold(1, 1_000_000, 1_000_000)

    yield begin
    gc.set_threshold(*thresholds)
    gc.callbacks.remove(collected)


@pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="collects nothing before a thread has started"
)
def test_garbage_in_a_thread_that_starts_stops_no_caller(
    collect_in_new_threads, held_elsewhere, in_queue, threads, is_busy
):
    """The collector ends abandoned blocks in new threads of dlocks."""

    def abandoned(number):
        with lock(f"abandoned:{number}"):
            yield

    blocks = [abandoned(number) for number in range(5)]
    for block in blocks:
        next(block)
    left = list(blocks)
    release = held_elsewhere()
    collect_in_new_threads(lambda: left and left.pop().close())
    thread = threads(lambda: lock(timeout=60).acquire().release())
    in_queue(1)
    release()
    thread.join(60)
    assert len(left) < 4
    ended = [f"abandoned:{number}" for number in range(len(left), 5)]
    assert not any(is_busy(key, "session") for key in ended)


# Replies that are late, and servers that are silent.


@POSTGRESQL
def test_a_slow_server_does_not_lose_holds(proxy):
    """Each reply takes up to 0.6 s, for longer than the ttl."""
    with lock(ttl=4.0) as held:
        ends = time.monotonic() + 6.0
        while time.monotonic() < ends:
            proxy.late.set()
            time.sleep(0.6)
            proxy.late.clear()
            time.sleep(0.02)
        assert held.held


def test_a_released_key_is_free_once_the_late_reply_arrives(
    proxy, observer, threads, until
):
    hold = lock(ttl=300.0).acquire()
    proxy.late.set()
    releasing = threads(hold.release)
    until(lambda: observer.holder("stock:7") is None)
    assert releasing.is_alive()
    proxy.late.clear()
    releasing.join(30)
    with lock(timeout=0):
        pass


@POSTGRESQL
def test_a_free_key_is_not_busy_after_a_slow_request(proxy, threads):
    """The reply says that the key is granted, although its lease has expired."""
    backend = SessionBackend("slow")
    another, mine = (Claim(key=key, ttl=0.05, holder="me") for key in "ab")
    assert backend.acquire(another)
    proxy.late.set()
    trying = threads(lambda: backend.acquire(mine))
    trying.join(0.5)
    assert trying.is_alive()
    proxy.late.clear()
    trying.join(30)
    assert trying.results[0] is not None


@POSTGRESQL
def test_a_silent_server_is_trusted_for_the_ttl(sessions):
    told = threading.Event()
    held = lock(ttl=2.0, on_lost=lambda hold: told.set()).acquire()
    (pid,) = sessions()
    with db_lock("another", using="brisk") as other:
        os.kill(pid, signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            assert held.held
            assert told.wait(10)
            assert 1.0 < time.monotonic() - stopped < 4.0
            assert not held.held
            # Its ttl is 0.6 s.
            other.check()
        finally:
            os.kill(pid, signal.SIGCONT)
    with pytest.raises(LockLost):
        held.release()


@POSTGRESQL
def test_a_silent_connection_does_not_end_the_holds_on_others(proxy, from_queue, until):
    """The network may lose one connection of a process and keep the others."""
    silent = threading.Event()
    with contextlib.ExitStack() as stack:
        stack.callback(silent.set)
        holds = [lock("another", ttl=4.0).acquire(), from_queue(ttl=4.0)]
        proxy.swallow(b"SELECT pg_backend_pid() + 0 *", silent)
        assert proxy.swallowed.wait(10)
        until(lambda: not all(hold.held for hold in holds))
        (other,) = [hold for hold in holds if hold.held]

        def deadline():
            return time.monotonic() + other.remaining

        for _ in range(3):
            before = deadline()
            until(lambda before=before: deadline() > before + 0.2)
        other.check()
        other.release()


@pytest.fixture
def silent_main(proxy, from_queue, threads):
    """Return a function that silences the connection of keys that were free.

    It returns a hold that has a connection of its own.
    """
    over = threading.Event()

    def silence(**policy):
        hold = from_queue(**policy)
        # This ttl is longer than that of the connection.
        proxy.swallow(b"idle_session_timeout", over)
        threads(lambda: lock("free", ttl=300.0, timeout=30).acquire().release())
        assert proxy.swallowed.wait(10)
        return hold

    yield silence
    over.set()


@POSTGRESQL
def test_a_bounded_hold_on_a_silent_connection_ends_no_other(silent_main, until):
    """The server learns of each new ttl, and those of its last renewals shrink."""
    began = time.monotonic()
    bounded = lock("bounded", ttl=6.0, max_hold=9.0).acquire()
    other = silent_main(ttl=2.0)
    until(lambda: time.monotonic() + other.remaining > began + 7.0)
    other.check()
    other.release()
    with contextlib.suppress(LockLost):
        bounded.release()


@POSTGRESQL
def test_a_release_on_a_silent_connection_keeps_no_other_key(
    silent_main, observer, threads, until
):
    mine = lock("mine").acquire()
    other = silent_main(min_hold=3.0)

    def release():
        with contextlib.suppress(LockLost):
            mine.release()

    releasing = threads(release)
    other.release()
    until(lambda: observer.holder("stock:7") is None, 10.0)
    assert releasing.is_alive()


def test_a_kept_key_of_an_ended_session_is_lost(sessions, elsewhere, until):
    """Another caller may have had it since."""
    held = lock(min_hold=60).acquire()
    for pid in sessions():
        end_session(pid)
    until(lambda: elsewhere.call(jobs.try_once, "stock:7", using="session"))
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
    waited, proxy, observer, held_elsewhere, threads, in_queue, until
):
    """The server counts from its reply, not from when the reply was read."""
    lock().acquire().release()
    acquired, done = queue.SimpleQueue(), threading.Event()

    def hold():
        acquired.put(lock(timeout=30).acquire())
        done.wait(60)

    with contextlib.ExitStack() as stack:
        stack.callback(done.set)
        release = held_elsewhere() if waited else None
        if not waited:
            proxy.late.set()
        threads(hold)
        if waited:
            in_queue(1)
            proxy.late.set()
            release()
        until(lambda: observer.holder("stock:7"))
        # This is most of the ttl.
        time.sleep(2.0)
        proxy.late.clear()
        held = acquired.get(timeout=30)
        proxy.cut.set()
        release = held_elsewhere()
        assert not held.held
        release()
    proxy.close()
    with pytest.raises(LockLost):
        held.release()


async def test_a_late_task_holds_only_for_the_rest_of_its_lease(
    observer, in_queue, in_other_thread, elsewhere, until
):
    first = await lock().aacquire()
    task = asyncio.ensure_future(lock(ttl=2.0, renew=False).aacquire())
    await asyncio.to_thread(in_queue, 1)
    # From here on, the test blocks the event loop.
    in_other_thread(first.release)
    in_other_thread(until, lambda: observer.holder("stock:7"))
    in_other_thread(time.sleep, 1.5)
    held = await task
    assert held.held

    def is_held_after_its_session():
        elsewhere.call(jobs.wait_quietly, "stock:7", using="session", timeout=60)
        return held.held

    assert not in_other_thread(is_held_after_its_session)
    with pytest.raises(LockLost):
        await held.arelease()
