"""Requests of the session backend that coincide with others, statement by statement."""

from __future__ import annotations

import contextlib
import hashlib
import threading

import pytest
from django.db import connection

from dlocks import LockBackendError
from tests import jobs
from tests.finalizers import by_finalizer, noting
from tests.internals import (
    Claim,
    SessionBackend,
    backends,
    disconnect,
    session_claims,
)
from tests.promises.session.server import POSTGRESQL, SERVERS, lock

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.engine("postgresql", "mariadb"),
]
# A statement that fails if it is interrupted, and how another session finds it.
SLEEP = {
    "postgresql": "SELECT pg_sleep(2)",
    "mysql": "SELECT IF(SLEEP(2), (SELECT 1 UNION SELECT 2), 0)",
}
SLEEPING = {
    "postgresql": "SELECT pid FROM pg_stat_activity WHERE state = 'active' AND query ="
    " 'SELECT pg_sleep(2)'",
    "mysql": "SELECT id FROM information_schema.processlist WHERE info LIKE"
    " 'SELECT IF(SLEEP%'",
}

# A statement that is cancelled, and one that returns the idle timeout in seconds.
CANCELLED = {
    "postgresql": "SELECT pg_cancel_backend(pg_backend_pid()), pg_sleep(10)",
    "mysql": "KILL QUERY CONNECTION_ID()",
}
IDLE_TIMEOUT = {
    "postgresql": "SELECT extract(epoch FROM current_setting("
    "'idle_session_timeout')::interval)",
    "mysql": "SELECT @@SESSION.wait_timeout",
}


def claim(key="stock:7", **options):
    return Claim(key=key, **{"ttl": 30.0, "holder": "session", **options})


@pytest.fixture
def backend(transactional_db):
    backends.reset()
    backend = backends["session"]
    yield backend
    disconnect(backend)
    backends.reset()


@pytest.fixture
def other():
    """A backend with sessions of its own, as of another process."""
    other = SessionBackend("other")
    yield other
    disconnect(other)


@pytest.fixture
def is_free(other):
    """Return a function that returns whether another caller could hold the key."""

    def attempt(key="stock:7"):
        mine = claim(key)
        return other.acquire(mine) is not None and other.release(mine)

    return attempt


@pytest.fixture
def in_queue(until, other):
    def wait(number, key="stock:7"):
        until(lambda: other.waiting(key) == number)

    return wait


@pytest.fixture
def at_statement(monkeypatch, backend):
    """Return a function that calls another one, once, before or after a statement."""
    kind = type(backend.sessions.session_for())

    def arrange(statement, *, before=None, after=None):
        ask, done = kind.ask, []

        def ask_and_call(self, name, *args):
            is_it = name == statement and not done
            if is_it:
                done.append(True)
                if before:
                    before()
            row = ask(self, name, *args)
            if is_it and after:
                after()
            return row

        monkeypatch.setattr(kind, "ask", ask_and_call)

    return arrange


@pytest.fixture
def refused(monkeypatch):
    """Return a function that lets the server refuse one kind of statement."""

    def refuse(session, statement):
        sql = {**session.statements, statement: "SELECT no_such_column"}
        monkeypatch.setattr(session, "statements", sql)

    return refuse


@pytest.mark.engine("mariadb")
def test_the_names_of_one_database_are_not_those_of_another(backend):
    """All databases of a server share the names of GET_LOCK."""
    name = backend.sessions.name("stock:7")
    assert len(name) <= 64
    assert name == name.lower() != backend.sessions.name("STOCK:7")
    other = hashlib.sha256(b"another\0stock:7").hexdigest()[:48]
    assert name != f"dlocks:{other}"


@POSTGRESQL
def test_a_refused_statement_does_not_affect_other_holds(refused, backend):
    with lock() as held:
        refused(backend.sessions.main, "try")
        with pytest.raises(LockBackendError, match="no_such_column"):
            lock("stock:8").acquire()
        held.check()
        held.renew()
        assert [entry.claim.key for entry in backend.claims.entries.values()] == [
            "stock:7"
        ]


@POSTGRESQL
def test_repeated_statements_are_prepared(backend):
    with lock() as held:
        for _ in range(6):
            held.check()
        count = "SELECT count(*) FROM pg_prepared_statements"
        assert backend.sessions.main.first_row(count)[0] >= 1


# Leases that expire meanwhile.


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
        assert backend.release(mine, rest_for=60.0) is False
        assert backend.release(mine) is False
    finally:
        ends.set()
    until(lambda: backend.holder(mine.key) is None)


@POSTGRESQL
def test_a_missed_turn_is_not_granted_while_it_is_released(
    at_statement, monkeypatch, backend, threads, is_free
):
    late, ends, go_on = claim(ttl=0.3), threading.Event(), threading.Event()
    at_statement("free", before=lambda: (ends.set(), go_on.wait(10)))
    missed = backend.acquire(late)
    assert ends.wait(10)
    # The next turn lasts as long as this test.
    monkeypatch.setattr(backend, "grace", 30.0)
    thread = threads(lambda: backend.acquire(late))
    thread.join(0.2)
    go_on.set()
    thread.join(30)
    assert thread.results[0].token > missed.token
    assert not is_free()
    assert backend.release(late)


@SERVERS
def test_a_session_is_not_closed_as_idle_before_its_first_request(backend, monkeypatch):
    """With ``linger=0``, the thread that closes sessions may come first each time."""
    monkeypatch.setattr(backend, "linger", 0.0)
    session_for, mine = backend.sessions.session_for, claim()

    def session_for_and_close(claim=None):
        session = session_for(claim)
        backend.sessions.close_if_idle(session, backend.linger)
        return session

    monkeypatch.setattr(backend.sessions, "session_for", session_for_and_close)
    assert backend.acquire(mine)
    assert backend.release(mine)
    assert backend.acquire(mine)
    assert backend.release(mine)


@SERVERS
def test_a_key_that_rests_until_its_release_is_noticed_is_not_lost(
    backend, monkeypatch, until
):
    """The rest of min_hold may be shorter than a pause of this thread."""
    mine, main = claim(), threading.current_thread()
    assert backend.acquire(mine)
    entry = backend.claims.entries[mine.owner]

    def pause(_):
        if threading.current_thread() is main:
            until(lambda: entry.gone)

    monkeypatch.setattr(backend.queue, "wait_without", pause)
    assert backend.release(mine, rest_for=0.01)


@SERVERS
def test_a_key_rests_no_longer_because_of_a_late_renewal(
    backend, is_free, monkeypatch, until
):
    """The renewal was under way when the holder released the key."""
    mine, ping = claim(), backend.sessions.ping
    assert backend.acquire(mine)

    def ping_and_release(session):
        ping(session)
        assert backend.release(mine, rest_for=0.1)

    with monkeypatch.context() as patched:
        patched.setattr(backend.sessions, "ping", ping_and_release)
        backend.renew([mine])
    until(is_free, seconds=5)


# Readers that leave or join.


@POSTGRESQL
def test_a_reader_joining_at_the_last_release_has_its_own_hold(
    at_statement, backend, threads, is_free
):
    reader, second = claim(shared=True), claim(shared=True)
    assert backend.acquire(reader)
    leaves, came = threading.Event(), threading.Event()
    # The wait is limited, because both readers use this session.
    at_statement("free shared", before=lambda: (leaves.set(), came.wait(0.5)))
    threads(lambda: backend.release(reader))
    assert leaves.wait(10)
    joining = threads(lambda: (backend.acquire(second), came.set()))
    joining.join(10)
    assert joining.results[0][0] is not None
    assert not is_free()
    assert backend.release(second)


@pytest.fixture
def left_by_the_first(at_statement, monkeypatch, backend):
    """Return a second reader, whose request is sent after the first has left.

    The second reader was about to join the shared hold of the first.
    """
    reader, second, left = claim(shared=True), claim(shared=True, ttl=60.0), []
    # No other request is under way then.
    monkeypatch.setattr(backend, "renew_every", 60.0)
    assert backend.acquire(reader)
    # Its ttl is longer than the one that the session has.
    at_statement("idle", before=lambda: left.append(backend.release(reader)))
    yield second
    assert left == [True]


@POSTGRESQL
def test_the_second_reader_releases_the_key_after_the_first(
    left_by_the_first, backend, is_free
):
    assert backend.acquire(left_by_the_first)
    assert not is_free()
    assert backend.release(left_by_the_first)
    assert is_free()


@POSTGRESQL
def test_a_reader_that_joins_at_a_release_passes_no_writer(
    left_by_the_first, backend, other, in_queue
):
    writing = claim()
    assert other.enqueue(writing).position
    in_queue(1)
    assert backend.acquire(left_by_the_first) is None
    other.release(writing)


@POSTGRESQL
def test_a_reader_that_joins_at_an_interrupted_release_has_its_own_hold(
    backend, monkeypatch, is_free
):
    """The last reader's thread was struck after the server had freed the key."""

    def strike(_):
        raise KeyboardInterrupt

    reader, second = claim(shared=True), claim(shared=True)
    assert backend.acquire(reader)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(backend.claims, "forget", strike)
        backend.release(reader)
    assert backend.acquire(second)
    # The reader's thread goes on to release it.
    backend.release(reader)
    assert not is_free()
    assert backend.release(second)
    assert is_free()


@pytest.fixture
def struck_at_release(backend, monkeypatch):
    """Return a function that releases a claim, in a thread that is struck meanwhile.

    The claim has just left its session, which another thread may use.
    """

    def release(claim):
        session, remove = (
            backend.claims.entries[claim.owner].session,
            session_claims.remove,
        )

        def strike(table, entry):
            remove(table, entry)
            if table is session.at:
                raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(session_claims, "remove", strike)
            backend.release(claim)

    return release


@SERVERS
def test_an_interrupted_release_takes_no_key_from_the_next_claim(
    backend, struck_at_release, is_free
):
    first, second = claim(), claim()
    assert backend.acquire(first)
    struck_at_release(first)
    assert backend.acquire(second)
    # The first one's thread goes on to release it.
    backend.release(first)
    assert not is_free()
    assert backend.release(second)
    assert is_free()


@pytest.mark.engine("mariadb")
def test_an_interrupted_waiter_does_not_wait_for_the_next_one(
    backend, other, struck_at_release, in_queue, threads
):
    """That one waits for as long as the holder needs."""
    holder, first, second = claim(), claim(), claim()
    assert other.acquire(holder)
    backend.queue.places = 1
    assert backend.enqueue(first).position
    in_queue(1)
    struck_at_release(first)
    assert backend.enqueue(second).position
    in_queue(1)
    releasing = threads(lambda: backend.release(first))
    releasing.join(10)
    results = [*releasing.results]
    assert other.release(holder)
    backend.release(second)
    assert results == [False]


# Cancelled claims and statements.


@POSTGRESQL
def test_a_claim_cancelled_while_it_is_tried_leaves_the_key_free(
    monkeypatch, backend, in_other_thread, in_queue, is_free
):
    backend.queue.places = 1
    with lock("stock:8"), contextlib.ExitStack() as blocked:
        blocker = in_other_thread(lock("stock:9").acquire)
        blocked.callback(in_other_thread, blocker.release)
        # The only session for waiting is taken.
        assert backend.enqueue(claim("stock:9"), "").position
        in_queue(1, "stock:9")
        waiter = claim("stock:7")
        assert backend.enqueue(waiter, "").position
        request = backend.sessions.send
        gave_up = []

        def come_between(statement, entry, *args):
            if not gave_up:
                gave_up.append(backend.release(entry.claim))
            return request(statement, entry, *args)

        monkeypatch.setattr(backend.sessions, "send", come_between)
        assert not backend.poll([waiter]).get(waiter.owner, None)
        assert gave_up == [False]
        assert is_free()


@POSTGRESQL
def test_a_claim_cancelled_at_its_grant_takes_no_other_key(
    at_statement, monkeypatch, backend, in_other_thread, in_queue, until
):
    """The session may receive a cancellation late.

    The next claim must not use it yet, or it would lose its key.
    """
    monkeypatch.setattr(backend.queue, "places", 1)
    holder = in_other_thread(lock().acquire)
    late, next_one = claim(), claim("another")
    backend.enqueue(late)
    in_queue(1)
    entry = backend.claims.entries[late.owner]

    def grant():
        holder.release()
        until(lambda: entry.token)
        # There is no session for this claim until the other one has left.
        backend.enqueue(next_one)
        assert backend.claims.entries[next_one.owner].session is None

    session = until(lambda: entry.session)
    at_statement("cancel", before=grant)
    assert not backend.release(late)
    until(lambda: backend.poll([next_one])[next_one.owner].grant)
    assert backend.claims.entries[next_one.owner].session is not session
    assert next_one.owner in backend.renew([next_one])
    assert in_other_thread(lock("another", timeout=0).try_acquire) is None
    assert backend.release(next_one)
    with lock(timeout=5):
        pass


def test_a_key_granted_with_its_cancellation_is_released(
    monkeypatch, backend, in_other_thread, in_queue, until, is_free
):
    """An engine may grant the key and then report a cancelled statement.

    The session holds the key in this case. The claim waits once more.
    """
    kind = type(backend.sessions.session_for())
    first_row, cancelled = kind.first_row, []

    def cancel(self, sql, values=None):
        row = first_row(self, sql, values)
        if sql.endswith(self.statements["wait"]) and not cancelled:
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
    assert not backend.claims.entries
    assert is_free()


@SERVERS
def test_a_cancelled_release_is_repeated(monkeypatch, backend, is_free):
    """An administrator may cancel any running statement."""
    another = lock("another").acquire()
    hold = lock().acquire()
    session = backend.claims.entries[hold.owner].session
    first_row = session.first_row

    def cancelled(sql, values):
        assert sql == session.statements["free"]
        monkeypatch.undo()
        return first_row(CANCELLED[connection.vendor])

    monkeypatch.setattr(session, "first_row", cancelled)
    hold.release()
    assert is_free()
    another.check()
    another.release()


@SERVERS
def test_a_timeout_does_not_cancel_an_unrelated_statement(
    backend, in_other_thread, in_queue, workers, until
):
    """After a failover, another client may have the same session id."""
    (client,) = workers(1)
    holder = in_other_thread(lock().acquire)
    waiting = claim()
    backend.enqueue(waiting)
    until(lambda: backend.claims.entries[waiting.owner].session)
    in_queue(1)
    client.start(jobs.run_sql, SLEEP[connection.vendor])

    def sleeper():
        with connection.cursor() as cursor:
            cursor.execute(SLEEPING[connection.vendor])
            return cursor.fetchone()

    (number,) = until(sleeper)
    backend.claims.entries[waiting.owner].session.pid = number
    backend.release(waiting)
    client.hear()
    holder.release()


@SERVERS
def test_a_hold_with_a_long_ttl_makes_no_other_release_slower(monkeypatch, backend):
    """The session keeps its idle timeout, so the server needs no statement for it."""
    long, mine = claim("another", ttl=300.0), claim()
    assert backend.acquire(long)
    session, sent = backend.sessions.main, []
    ask = session.ask

    def note(statement, *args):
        sent.append(statement)
        return ask(statement, *args)

    monkeypatch.setattr(session, "ask", note)
    assert backend.acquire(mine)
    assert backend.release(mine)
    assert sent == ["try", "free"]
    assert backend.release(long)
    assert sent[2:] == ["free", "idle"]


@SERVERS
def test_a_cancelled_setting_is_not_taken_for_granted(monkeypatch, backend):
    """The server would end the session of a paused process before its lease ends."""
    assert backend.acquire(claim("another"))
    session, long = backend.sessions.main, claim(ttl=300.0)
    first_row = session.first_row

    def cancelled(sql, values):
        assert sql == session.statements["idle"]
        monkeypatch.undo()
        return first_row(CANCELLED[connection.vendor])

    monkeypatch.setattr(session, "first_row", cancelled)
    with pytest.raises(LockBackendError, match="cancelled"):
        backend.acquire(long)
    assert backend.acquire(long)
    (seconds,) = session.first_row(IDLE_TIMEOUT[connection.vendor])
    assert seconds >= long.ttl


@POSTGRESQL
def test_a_cancellation_does_not_hit_the_next_waiter(
    at_statement, monkeypatch, backend, in_other_thread, in_queue, until
):
    """The maintenance thread may be first to release a claim, and its session."""
    monkeypatch.setattr(backend.queue, "places", 1)
    for key in ("stock:7", "another"):
        in_other_thread(lock(key).acquire)
    late, next_one = claim(), claim("another")
    backend.enqueue(late)
    in_queue(1)
    entry, ask, cancelled = backend.claims.entries[late.owner], backend.sessions.ask, []
    session = entry.session

    def count(statement, value):
        cancelled.extend([value] * (statement == "cancel"))
        return ask(statement, value)

    def release_first():
        until(session.wait_over.is_set)
        backend._end(entry)
        backend.enqueue(next_one)
        until(lambda: backend.claims.entries[next_one.owner].session is session)
        in_queue(1, "another")

    monkeypatch.setattr(backend.sessions, "ask", count)
    at_statement("cancel", after=release_first)
    assert not backend.release(late)
    assert len(cancelled) == 1
    assert backend.claims.entries[next_one.owner].session is session


@SERVERS
def test_a_waiter_leaves_at_once_although_the_last_one_was_woken_late(
    monkeypatch, backend, in_other_thread, in_queue, until, threads
):
    """Its session may be that of a grant that was polled, used and released before."""
    monkeypatch.setattr(backend.queue, "places", 1)
    holder = in_other_thread(lock().acquire)
    in_other_thread(lock("another").acquire)
    first, next_one = claim(), claim("another")
    goes_on, has_gone_on = threading.Event(), threading.Event()
    send = backend.sessions.send

    def pause_after(statement, entry, *args):
        answer = send(statement, entry, *args)
        if entry.claim.owner == first.owner:
            assert goes_on.wait(30)
        return answer

    monkeypatch.setattr(backend.sessions, "send", pause_after)
    monkeypatch.setattr(
        backend.queue.notifier, "on_grant", lambda *_: has_gone_on.set()
    )
    backend.enqueue(first)
    in_queue(1)
    session = backend.claims.entries[first.owner].session
    holder.release()
    until(lambda: backend.poll([first])[first.owner].grant)
    assert backend.release(first)
    backend.enqueue(next_one)
    until(lambda: backend.claims.entries[next_one.owner].session is session)
    in_queue(1, "another")
    goes_on.set()
    assert has_gone_on.wait(30)
    leaving = threads(lambda: backend.release(next_one))
    leaving.join(10)
    assert leaving.results == [False]


@SERVERS
def test_a_cancellation_ends_no_session_of_the_next_waiter(
    monkeypatch, backend, in_other_thread, in_queue, until
):
    """The maintenance thread may be first to release a claim, and its session."""
    monkeypatch.setattr(backend.queue, "places", 1)
    in_other_thread(lock().acquire)
    late, next_one = claim(), claim("another")
    backend.enqueue(late)
    in_queue(1)
    entry = backend.claims.entries[late.owner]
    session, close = entry.session, backend.sessions.close
    cancellations, requested = backend.queue._cancellations, []

    def one_more(*wait):
        # The server reacts late, so that a cancellation may still be on its way.
        number = cancellations(*wait)
        requested.append(number)
        return number + (len(requested) == 1)

    def close_late(*args, **options):
        monkeypatch.undo()
        backend._end(entry)
        backend.enqueue(next_one)
        until(lambda: backend.poll([next_one])[next_one.owner].grant)
        close(*args, **options)

    monkeypatch.setattr(backend.queue, "_cancellations", one_more)
    monkeypatch.setattr(backend.sessions, "close", close_late)
    assert not backend.release(late)
    assert backend.claims.entries[next_one.owner].session is session
    assert next_one.owner in backend.renew([next_one])
    assert backend.release(next_one)


# Sessions that end while others use them.


@SERVERS
@pytest.mark.parametrize("moment", ["before its request", "after its request"])
def test_a_key_is_not_busy_because_a_session_has_ended(
    moment, at_statement, backend, threads, until
):
    """Another thread notices the end while this one uses the session."""
    other = claim("another")
    assert backend.acquire(other)
    main = backend.sessions.main
    if moment == "after its request":
        at_statement("try", after=lambda: backend.sessions.close(main))
        trying = threads(lambda: lock(timeout=0).acquire())
    else:
        with main.mutex:
            trying = threads(lambda: lock(timeout=0).acquire())
            until(lambda: backend.sessions.name("stock:7") in main.at)
            backend.sessions.close(main)
    trying.join(30)
    (hold,) = trying.results
    hold.check()
    hold.release()
    assert not backend.claims.entries


@SERVERS
def test_an_unreachable_server_is_reported_when_a_thread_is_about_to_wait(
    backend, monkeypatch
):
    """The thread has not connected yet, so nothing has said that the key is busy."""
    kind, move_back = backend.sessions.kind, backend.claims.move_back

    def refused(self):
        raise LockBackendError("unreachable")

    monkeypatch.setattr(kind, "connect", refused)
    monkeypatch.setattr(backend.queue, "advance", lambda: None)
    mine = claim()
    backend.enqueue(mine)
    entry = backend.claims.entries[mine.owner]

    def begin_to_wait(names):
        move_back(names)
        backend.claims.assign(entry, backend.sessions.new())

    monkeypatch.setattr(backend.claims, "move_back", begin_to_wait)
    with pytest.raises(LockBackendError, match="unreachable"):
        backend.poll([mine])
    backend.claims.forget(entry)


# The threads of the backend.


@POSTGRESQL
def test_an_interrupt_while_a_renewal_starts_its_thread_is_passed_on(
    monkeypatch, backend
):
    """A condition of ``threading`` then raises another error in its place."""
    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        if thread.name == "dlocks-session":
            try:
                raise KeyboardInterrupt
            except KeyboardInterrupt:
                # The interrupt struck before its condition was locked again.
                threading.Lock().release()

    hold = lock().acquire()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading.Thread, "start", interrupted)
        hold.renew()
    hold.check()
    hold.release()


@SERVERS
@pytest.mark.parametrize("name", ["dlocks-session-waiter", "dlocks-sessions"])
def test_a_finalizer_in_a_thread_of_the_backend_is_refused(
    name, monkeypatch, backend, in_other_thread, threads, in_queue
):
    """The garbage collector may call it while this thread changes the tables."""
    answers, sessions = [], backend.sessions.all

    other = lock("another", timeout=0)
    strike = by_finalizer(noting(answers, other.try_acquire))

    def collect():
        if threading.current_thread().name == name and not answers:
            strike()

    def all_sessions():
        collect()
        return sessions()

    def without_session():
        collect()
        return waiting()

    waiting = backend.claims.without_session
    monkeypatch.setattr(backend.sessions, "all", all_sessions)
    monkeypatch.setattr(backend.claims, "without_session", without_session)
    holder = in_other_thread(lock().acquire)
    waiter = threads(lambda: lock(timeout=30).acquire().release())
    in_queue(1)
    holder.release()
    waiter.join(30)
    assert "__del__" in answers[0]
