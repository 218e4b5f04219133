"""Prepared statements on PostgreSQL, which only make a lock cheaper."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial

import pytest
from django.db import OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext

from dlocks import LockBackendError, LockTimeout, db_lock, db_rwlock, db_semaphore
from tests.internals import PREPARED_AT, STATEMENTS_PREPARED, LockClaim, backends
from tests.timing import in_time

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.engine("postgresql"),
]

# The status of libpq while a statement is running.
ACTIVE = 1


def prepared():
    """Return the prepared statements of this session and their execution counts."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT name, generic_plans + custom_plans FROM pg_prepared_statements"
        )
        return dict(cursor.fetchall())


@pytest.fixture(autouse=True)
def new_session():
    with db_lock("stock:7"):
        # This creates the row.
        pass
    connection.close()
    yield
    connection.close()


def run(sql, parameters=None):
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)


def use(times):
    tokens = []
    for _ in range(times):
        with db_lock("stock:7") as hold:
            tokens.append(hold.token)
    assert tokens == sorted(set(tokens))


def test_frequent_statements_are_prepared_and_planned_once():
    """A request that acquires a lock once prepares nothing.

    In a transaction nothing is prepared. A statement that the session has forgotten
    raises an error, which would abort the caller's work there.
    """
    with CaptureQueriesContext(connection) as queries:
        use(1)
    assert not [query for query in queries if "pg_backend_pid" in query["sql"]]
    for _ in range(PREPARED_AT + 3):
        with transaction.atomic(), db_lock("stock:7"):
            pass
    use(PREPARED_AT - 1)
    assert not prepared()
    use(PREPARED_AT + 10)
    counts = prepared()
    assert len(counts) == 2, "to acquire, to release"
    assert min(counts.values()) > 10


def test_a_changed_session_does_not_break_prepared_statements(in_other_thread):
    """A pool may clean up a session between two clients.

    A name that exists already is not used, and a table may be altered. A session that
    was killed is replaced, also if a statement of the application fails before this
    thread's first lock.
    """
    alter = "ALTER TABLE dlocks_resourcelock ALTER COLUMN version TYPE"
    kill = "SELECT pg_terminate_backend(%s, 5000)"
    use(PREPARED_AT + 3)
    (first, *_) = prepared()
    for sql in "DISCARD ALL", "DEALLOCATE ALL":
        run(sql)
        use(20)
    try:
        run(f"{alter} numeric")
        use(5)
    finally:
        run(f"{alter} bigint")
    use(5)
    connection.close()
    run(f"PREPARE {first} AS SELECT 1")
    use(20)
    assert prepared()[first] == 0
    pid = connection.connection.info.backend_pid
    in_other_thread(run, kill, [pid])
    use(PREPARED_AT + 3)
    assert connection.connection.info.backend_pid != pid
    connection.close()
    connection.ensure_connection()
    in_other_thread(run, kill, [connection.connection.info.backend_pid])
    with pytest.raises(OperationalError):
        run("SELECT 1")
    use(1)


def test_the_number_of_prepared_statements_is_limited(monkeypatch):
    """With ``prepare=False``, no statement is prepared.

    With ``spin=0``, a caller sleeps until the server replies.
    """

    def use_often(**options):
        backend = kind("default", **options)
        for _ in range(PREPARED_AT + 3):
            assert backend.acquire(claim)
            assert backend.release(claim)

    kind = type(backends["default"])
    with db_lock("stock:7") as hold:
        claim = hold.claim
    use_often(prepare=False)
    assert not prepared()
    for wrong, error in ({"prepare": "yes"}, TypeError), ({"spin": -1}, ValueError):
        with pytest.raises(error, match=next(iter(wrong))):
            kind("default", **wrong)
    for number in range(STATEMENTS_PREPARED + 20):
        for _ in range(PREPARED_AT + 1):
            backends["default"]._rows(f"SELECT {number}", {})
    assert len(prepared()) == STATEMENTS_PREPARED
    use(5)
    connection.close()
    monkeypatch.setattr("os.sched_yield", lambda: pytest.fail("it polled"))
    use_often(spin=0, listen=False)
    assert prepared()


class TimeLimitExceededError(Exception):
    """An error like that of Celery's handler of SIGUSR1."""


@pytest.fixture(params=[KeyboardInterrupt, TimeLimitExceededError])
def interrupt(request, until):
    """Return a function that interrupts this thread during a statement.

    ``then`` is called half a second after the interrupt. A caller that stops waiting
    too early would do so before.
    """
    main, threads = threading.main_thread().ident, []

    def limit(*_):
        raise TimeLimitExceededError

    def interrupt(then=lambda: None):
        pgconn = connection.connection.pgconn

        def run():
            until(lambda: pgconn.transaction_status == ACTIVE)
            time.sleep(0.05)
            signal.pthread_kill(
                main,
                signal.SIGINT if request.param is KeyboardInterrupt else signal.SIGUSR1,
            )
            time.sleep(0.5)
            then()

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    interrupt.kind = request.param
    before = signal.signal(signal.SIGUSR1, limit)
    yield interrupt
    for thread in threads:
        thread.join()
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def stopped():
    """Return a function that stops the server's process of this session.

    The function returns another one, which resumes the process.
    """
    with ExitStack() as stack:

        def stop():
            pid = connection.connection.info.backend_pid
            os.kill(pid, signal.SIGSTOP)
            return stack.callback(partial(resume, pid))

        yield stop


def resume(pid):
    # An abandoned session may have ended.
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def is_over(pid):
    """Return whether an abandoned session has ended, or was not abandoned."""
    with connection.cursor() as cursor:
        # After a Ctrl-C, the session of a cursor is intact and stays in use.
        cursor.execute(
            "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND pid <> pg_backend_pid()",
            [pid],
        )
        return cursor.fetchone() is None


def times(interrupt):
    """Return how often to run a statement before it is interrupted.

    It is prepared in one of the two cases.
    """
    return PREPARED_AT + 3 if interrupt.kind is KeyboardInterrupt else 1


def test_an_interrupted_statement_leaves_no_pending_reply(interrupt, until):
    """The server ends a statement that a Ctrl-C interrupts.

    The next statement gets its own reply.
    """
    use(PREPARED_AT + 3)
    backend, pid = backends["default"], connection.connection.info.backend_pid
    sql = "SELECT pg_sleep(%(seconds)s)::text, 5"
    for _ in range(times(interrupt)):
        backend._rows(sql, {"seconds": 0})
    interrupt()
    with pytest.raises(interrupt.kind):
        backend._rows(sql, {"seconds": 30})
    until(lambda: is_over(pid))
    use(3)


@pytest.mark.parametrize("times", [PREPARED_AT + 3, 1])
def test_a_grant_pending_at_an_interrupt_is_released(interrupt, stopped, until, times):
    """The server may be slow to begin with the statement.

    The key is never granted after it was released.
    """
    use(times)
    pid = connection.connection.info.backend_pid
    interrupt(then=stopped())
    with pytest.raises(interrupt.kind):
        db_lock("stock:7").acquire()
    until(lambda: is_over(pid))
    hold = db_lock("stock:7").try_acquire()
    assert hold is not None
    hold.release()


def test_a_claim_pending_at_an_interrupt_leaves_the_queue(
    interrupt, stopped, until, in_other_thread, monkeypatch
):
    held = in_other_thread(db_lock("stock:7").acquire)
    backend = backends["default"]
    for _ in range(times(interrupt)):
        with pytest.raises(LockTimeout):
            db_lock("stock:7", timeout=0.001).acquire()
    pid, queue = connection.connection.info.backend_pid, backend.enqueue

    def slowly(*arguments):
        interrupt(then=stopped())
        return queue(*arguments)

    monkeypatch.setattr(backend, "enqueue", slowly)
    with pytest.raises(interrupt.kind):
        db_lock("stock:7", timeout=30).acquire()
    until(lambda: is_over(pid))
    assert not LockClaim.objects.exists()
    in_other_thread(held.release)


def test_a_shared_hold_committing_at_an_interrupt_is_released(
    interrupt, stopped, until, monkeypatch
):
    """Django cannot clean up during the COMMIT and raises its own error instead."""
    lock = db_rwlock("stock:7")
    permit = db_semaphore("a permit", permits=1)
    for share, all_of_it in ((lock.read(), lock.write()), (permit, permit)):
        use(1)
        pid, commit = connection.connection.info.backend_pid, connection.commit

        def slowly(commit=commit):
            monkeypatch.undo()
            interrupt(then=stopped())
            commit()

        monkeypatch.setattr(connection, "commit", slowly)
        with pytest.raises(interrupt.kind):
            share.acquire()
        until(lambda pid=pid: is_over(pid))
        hold = all_of_it.try_acquire()
        assert hold is not None
        hold.release()


def test_an_interrupt_does_not_wait_for_a_silent_server(
    interrupt, stopped, monkeypatch
):
    """The wait for the server is limited, and another Ctrl-C ends it too."""
    backend, main = backends["default"], threading.main_thread().ident
    ctrl_c = partial(signal.pthread_kill, main, signal.SIGINT)
    for patience, then in ((0.5, lambda: None), (60.0, ctrl_c)):
        monkeypatch.setattr("dlocks.sql.prepared.REPLY_TIMEOUT", patience)
        for _ in range(PREPARED_AT):
            backend._rows("SELECT 1", {})
        stopped()
        interrupt(then=then)
        began = time.monotonic()
        with pytest.raises((interrupt.kind, KeyboardInterrupt)):
            backend._rows("SELECT 1", {})
        in_time(time.monotonic() - began, 10.0)
        use(1)


def test_prepared_statements_raise_the_same_errors():
    """A statement that the server refuses raises the same error and code.

    It is never reported as a busy key. The same text is accepted.
    """
    use(PREPARED_AT + 3)
    backend, sql = backends["default"], "SELECT length(%(holder)s)"
    for _ in range(PREPARED_AT + 1):
        with pytest.raises(LockBackendError, match="division by zero") as error:
            backend._rows("SELECT 1 / %(number)s", {"number": 0})
        assert error.value.__cause__.__cause__.sqlstate == "22012"
        assert backend._rows(sql, {"holder": "ä'\\ €"}) == [(5,)]
    with pytest.raises(LockBackendError, match="NUL"):
        backend._rows(sql, {"holder": "a\0b"})
    use(1)
