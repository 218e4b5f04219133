"""Signals and lost connections at the wrong moment."""

from __future__ import annotations

import contextlib
import itertools
import signal
import time
from functools import partial

import pytest
from django.db import OperationalError, connection, transaction

from dlocks import LockBackendError, db_lock, db_rwlock, db_semaphore
from dlocks.models import ResourceLock
from tests import jobs
from tests.for_each import ROWS
from tests.proxy import Proxy
from tests.settings import PORT

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("no_claim_left"),
]


@contextlib.contextmanager
def ended_by_a_signal(kind):
    """Raise an error in a signal handler, as task queues do at a time limit."""

    def end(*_):
        raise kind("the task took too long")

    former = signal.signal(signal.SIGALRM, end)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(kind, match="took too long"):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


@pytest.mark.engine("postgresql")
def test_an_error_raised_by_a_signal_handler_ends_the_wait(worker, in_queue):
    with worker.doing(jobs.hold, "stock:7"):
        for kind in (TimeoutError, RuntimeError, KeyboardInterrupt):
            with ended_by_a_signal(kind):
                db_lock("stock:7", timeout=30).acquire()
            in_queue(0)


@pytest.mark.engine("mariadb", "mysql")
def test_a_signal_at_the_end_of_a_step_is_not_swallowed(is_busy):
    """The step restores the limits of its session at this moment."""
    from MySQLdb.cursors import Cursor

    class SlowCursor(Cursor):
        def execute(self, query, args=None):
            result = super().execute(query, args)
            if query.startswith("SET SESSION") and "= 2" not in query:
                time.sleep(0.6)
            return result

    connection.ensure_connection()
    connection.connection.cursorclass = SlowCursor
    with ended_by_a_signal(RuntimeError):
        db_rwlock("stock:7").read().acquire()
    assert not is_busy("stock:7", "default")
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@SESSION.wait_timeout")
        assert cursor.fetchone()[0] > 2
    connection.close()


@pytest.mark.engine("postgresql", "mariadb")
def test_an_interrupt_during_an_outage_is_not_swallowed(monkeypatch):
    """Ctrl-C comes when the session ends, and Django cannot open another one."""

    def connect():
        raise OperationalError("the server is down")

    def end_session(execute, sql, *arguments):
        result = execute(sql, *arguments)
        if "FOR UPDATE" in sql:
            connection.connection.close()
            monkeypatch.setattr(connection, "connect", connect)
            raise KeyboardInterrupt
        return result

    with connection.execute_wrapper(end_session), pytest.raises(KeyboardInterrupt):
        db_rwlock("stock:7").read().acquire()
    monkeypatch.undo()
    assert db_rwlock("stock:7").read().acquire().release() is None


# Connections lost around a commit. Django keeps the broken connection as if it were in
# a transaction, and its on-commit callbacks.


@pytest.fixture
def lose():
    """Return a function that loses connections on their return to autocommit.

    Its argument is the number of connections.
    """
    proxy, settings = Proxy(int(PORT)), connection.settings_dict
    connection.close()
    # Other threads have connections of their own.
    connection.settings_dict = {**settings, "PORT": proxy.port}
    yield partial(proxy.swallow, b"autocommit=1", None)
    connection.close()
    connection.settings_dict = settings
    proxy.close()


@pytest.mark.engine("mariadb", "mysql")
def test_a_connection_lost_before_autocommit_leaves_nothing(lose):
    """Later statements would fail for this reason."""
    locks = db_lock("stock:7", timeout=0), db_semaphore("stock:8", 1, timeout=0)
    for lock, losses in itertools.product(locks, (1, 2, 20)):
        lose(losses)
        hold = None
        while hold is None:
            try:
                hold = lock.acquire()
            except LockBackendError:
                assert not connection.in_atomic_block
        with transaction.atomic():
            assert ResourceLock.objects.filter(pk=hold.key).exists()
        hold.release()
        connection.close()


@pytest.mark.engine("mariadb", "mysql")
def test_a_lease_is_released_after_a_failed_commit(lose, is_busy):
    for using in ROWS:
        hold = db_lock("stock:7", using=using).acquire()
        with pytest.raises(OperationalError), hold.atomic():
            lose(1)
        assert hold.held
        hold.check()
        hold.renew()
        hold.release()
        assert not is_busy("stock:7", using)
        connection.close()


@pytest.mark.engine("mariadb", "mysql")
def test_a_connection_lost_at_the_end_of_a_transaction_raises(lose):
    """The broken connection raises, as it would for any statement.

    A lease needs no connection of the caller.
    """
    with pytest.raises(OperationalError), transaction.atomic():
        hold = db_lock("stock:7").acquire()
        lose(1)
    assert not hold.held
    with pytest.raises(LockBackendError, match="lost while a transaction ended"):
        db_lock("stock:8").acquire()
    with db_lock("stock:8", scope="lease") as lease:
        with (
            pytest.raises(LockBackendError, match="lost while a transaction ended"),
            lease.atomic(),
        ):
            pass
    connection.close()
    with db_lock("stock:7", timeout=0), db_lock("stock:8", timeout=0):
        pass
