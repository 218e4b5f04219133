"""Interrupts while PostgreSQL executes a statement of a lock."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial

import pytest
from django.db import connection

from dlocks import LockTimeout, db_lock, db_rwlock, db_semaphore
from dlocks.models import LockClaim

pytest_plugins = ["tests.promises.stops"]
pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.engine("postgresql"),
]

# The status of libpq while a statement is running.
ACTIVE = 1
# Uses after which a statement is prepared, or not yet.
USES = pytest.mark.parametrize("times", [20, 1])


@pytest.fixture(autouse=True)
def new_session():
    with db_lock("stock:7"):
        # This creates the row.
        pass
    connection.close()
    yield
    connection.close()


def use(times):
    for _ in range(times):
        with db_lock("stock:7"):
            pass


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


@USES
def test_a_grant_pending_at_an_interrupt_is_released(interrupt, stopped, until, times):
    """The server may be slow to begin with the statement.

    After a Ctrl-C, psycopg waits for its end, and the key is free at once. After an
    error of a signal handler, the key is free once the ttl has passed.
    """
    use(times)
    pid = connection.connection.info.backend_pid
    interrupt(then=stopped())
    with pytest.raises(interrupt.kind):
        db_lock("stock:7", ttl=1.0).acquire()
    until(lambda: is_over(pid))
    timeout = 0 if interrupt.kind is KeyboardInterrupt else 30
    db_lock("stock:7", timeout=timeout).acquire().release()
    # The next statements get their own replies.
    use(3)


@USES
def test_a_claim_pending_at_an_interrupt_leaves_the_queue(
    interrupt, stopped, until, in_other_thread, stops, times
):
    """After a Ctrl-C, the claim has left the queue when the caller gets the exception.

    After an error of a signal handler, the server may still queue the claim. It can
    then be granted the key, which is free again after the lease of that grant.
    """
    held = in_other_thread(db_lock("stock:7").acquire)
    for _ in range(times):
        with pytest.raises(LockTimeout):
            db_lock("stock:7", timeout=0.001).acquire()
    pid = connection.connection.info.backend_pid

    stops.call("enqueue", lambda: interrupt(then=stopped()))
    with pytest.raises(interrupt.kind):
        db_lock("stock:7", timeout=30).acquire()
    until(lambda: is_over(pid))
    if interrupt.kind is KeyboardInterrupt:
        assert not LockClaim.objects.exists()
    in_other_thread(held.release)
    db_lock("stock:7", timeout=30).acquire().release()


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
