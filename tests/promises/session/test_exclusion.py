"""Session locks exclude other callers, and can be shared, as documented."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from django.db import connection, transaction

from dlocks import LockLost, db_rwlock, db_semaphore
from tests import jobs
from tests.promises.session.server import POSTGRESQL, lock, query
from tests.scripts import run_python
from tests.volume import volume

# MySQL's statements are those of MariaDB.
pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.engine("postgresql", "mariadb"),
]


@pytest.mark.parametrize("scope", ["lease", "transaction"])
def test_no_increment_is_lost_by_processes(scope, workers, count_together):
    """In a transaction on MariaDB, the lease is kept until the transaction ends."""
    times = volume(30 if scope == "lease" else 15)
    policy = {"scope": scope, "using": "session", "timeout": None}
    count_together(workers(4), times, **policy)


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


def test_greenlets_exclude_each_other():
    """Locks of rows and of sessions work, renew and expire under gevent.

    It replaces threads by greenlets, as the gevent worker of gunicorn does.
    """
    done = run_python(
        "-m", "gevent.monkey", "tests/under_gevent.py", "default", "session"
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.splitlines()
        == [
            "threads 24 1",
            "greenlets 24 1",
            "renewed True",
            "beside busy",
            "forgotten False",
            "ended LockShutDown",
        ]
        * 2
    )


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


@POSTGRESQL
def test_a_lock_in_a_transaction_needs_no_table(doomed):
    with connection.cursor() as cursor:
        cursor.execute("DROP DATABASE IF EXISTS dlocks_empty")
        cursor.execute("CREATE DATABASE dlocks_empty")
        holder = doomed(DLOCKS_TEST_NAME="dlocks_empty")
        holder.start(jobs.hold_in_transaction, "stock:7", using="session")
        assert holder.hear()
        holder.tell()
        assert holder.hear() == "ended"
        cursor.execute("DROP DATABASE dlocks_empty WITH (FORCE)")


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


@pytest.fixture
def shelf():
    return db_rwlock("stock:7", using="session", timeout=60)


@POSTGRESQL
def test_readers_share_and_writers_do_not(shelf, in_other_thread, waiter, until):
    with shelf.read() as mine:
        other = in_other_thread(shelf.read().try_acquire)
        assert other.token > mine.token
        assert in_other_thread(shelf.write().try_acquire) is None
        written = waiter(shelf.write())
        # A reader that comes after a waiting writer queues behind it.
        assert in_other_thread(shelf.read().try_acquire) is None
        other.release()
        assert not written.results
    until(lambda: written.results)
    with shelf.write(), shelf.read() as both:
        pass
    assert not both.held


@POSTGRESQL
def test_a_writer_that_reads_many_times_ends_no_other_hold(elsewhere):
    """Each read lock is a hold of its own, and the last one releases the key."""
    both = db_rwlock("stock:7", using="session", reentrant=False)
    with lock("another") as other:
        with both.write():
            reads = [both.read().acquire() for _ in range(6)]
            for read in reads:
                read.release()
        other.check()
        assert elsewhere.call(jobs.try_once, "stock:7", using="session")


@POSTGRESQL
def test_a_writer_may_read_while_another_writer_waits(shelf, elsewhere, waiter, until):
    writing = shelf.write().acquire()
    waiting = waiter(shelf.write())
    for _ in range(2):
        reading = shelf.read().try_acquire()
        assert reading is not None
        reading.release()
    reading = shelf.read().acquire()
    writing.release()
    # A new reader is refused, because a writer waits in front of it.
    assert elsewhere.call(jobs.try_once, "stock:7", using="session") is None
    reading.check()
    assert not waiting.results
    reading.release()
    until(lambda: waiting.results)


@POSTGRESQL
def test_many_readers_that_waited_for_a_writer_read_together(shelf, threads):
    """They are more readers than the process has sessions for waiters."""
    number = 18
    coming, reading = threading.Barrier(number + 1), threading.Barrier(number)

    def read():
        coming.wait(30)
        with shelf.read():
            reading.wait(30)

    with shelf.write():
        for _ in range(number):
            threads(read)
        coming.wait(30)


@POSTGRESQL
@pytest.mark.parametrize("reply", ["at once", "late"])
def test_a_shared_hold_outlives_other_shared_holds(
    reply, shelf, proxy, observer, threads, in_other_thread, elsewhere, until
):
    """The shared holds of one process are one lock of the engine.

    The last of them releases it, also if another reader came before the reply to a
    release.
    """
    one = shelf.read().acquire()
    two = in_other_thread(shelf.read().acquire) if reply == "at once" else None
    if reply == "late":
        proxy.late.set()
    leaving = threads(one.release)
    if reply == "late":
        until(lambda: observer.holder("stock:7") is None)
        assert leaving.is_alive()
        proxy.late.clear()
    leaving.join(30)
    two = two or in_other_thread(shelf.read().acquire)
    one.release()
    assert elsewhere.call(jobs.try_once, "stock:7", using="session") is None
    two.release()
    assert elsewhere.call(jobs.try_once, "stock:7", using="session")


def test_session_locks_cannot_limit_shared_holds():
    """There are no semaphores, and on MariaDB no shared locks either."""
    refused = "SessionBackend does not support"
    with pytest.raises(RuntimeError, match=f"{refused} (semaphores|shared locks)"):
        db_semaphore("stock:7", 3, using="session").acquire()
    if connection.vendor == "mysql":
        with pytest.raises(RuntimeError, match=f"{refused} shared locks"):
            db_rwlock("stock:7", using="session").read().acquire()
