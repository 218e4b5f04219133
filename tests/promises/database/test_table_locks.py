"""Tables that another session has locked: a lock waits as long as any query may."""

from __future__ import annotations

import contextlib
import json
import re
import time

import pytest
from django.db import connection, transaction

from dlocks import LockBackendError, db_lock, db_rwlock
from dlocks.models import LockClaim
from tests import jobs
from tests.models import Counter, Place
from tests.timing import in_time

pytestmark = [
    pytest.mark.engine("postgresql", "mariadb", "mysql"),
    pytest.mark.django_db(transaction=True),
]

LOCK_TABLE = {
    "postgresql": "LOCK TABLE dlocks_resourcelock IN ACCESS EXCLUSIVE MODE",
    "mysql": "LOCK TABLES dlocks_resourcelock WRITE, dlocks_lockclaim WRITE",
}.get(connection.vendor, "")
LOCK_CLAIMS = {
    "postgresql": "LOCK TABLE dlocks_lockclaim IN ACCESS EXCLUSIVE MODE",
    "mysql": "LOCK TABLES dlocks_lockclaim WRITE",
}.get(connection.vendor, "")
READ_LOCK = {
    "postgresql": "LOCK TABLE dlocks_resourcelock, dlocks_lockclaim IN SHARE MODE",
    "mysql": "FLUSH TABLES WITH READ LOCK",
}.get(connection.vendor, "")
# Limits the wait for a table to one second.
LIMIT = {
    "postgresql": "SET lock_timeout = '1s'",
    "mysql": "SET SESSION lock_wait_timeout = 1",
}.get(connection.vendor, "")
# Seconds of three statements that wait so long.
AT_MOST = 4.0
SAYS = "A table of dlocks is locked as a whole"


@contextlib.contextmanager
def table_locked(statement):
    """Lock the tables in another session."""
    is_postgresql = connection.vendor == "postgresql"
    with contextlib.closing(connection.copy()) as session, session.cursor() as cursor:
        if is_postgresql:
            cursor.execute("BEGIN")
        cursor.execute(statement)
        try:
            yield
        finally:
            cursor.execute("ROLLBACK" if is_postgresql else "UNLOCK TABLES")


SETTINGS = {
    "postgresql": "SELECT name, setting FROM pg_settings WHERE source = 'session'"
    " ORDER BY name",
    "mysql": "SHOW SESSION VARIABLES WHERE Variable_name LIKE '%timeout%' OR"
    " Variable_name LIKE '%safe%'",
}.get(connection.vendor, "")


def session_settings():
    with connection.cursor() as cursor:
        cursor.execute(SETTINGS)
        return cursor.fetchall()


def read_lock(key, **policy):
    return db_rwlock(key, **policy).read()


@pytest.fixture
def limit_waits():
    """Return a function that limits the waits of this session, as a project may."""

    def limit():
        with connection.cursor() as cursor:
            cursor.execute(LIMIT)

    yield limit
    connection.close()


def test_a_locked_table_is_an_error_at_the_limit_of_the_project(limit_waits):
    """``timeout=0`` waits for a migration or a backup no longer than other queries.

    The error names the cause, and the session is unchanged. A transaction loses the
    lock, but no write.
    """
    for using, make, statement in (
        ("default", db_lock, LOCK_TABLE),
        ("default", read_lock, READ_LOCK),
        ("default", db_lock, READ_LOCK),
        ("optimistic", db_lock, READ_LOCK),
        ("insert", db_lock, LOCK_TABLE),
        ("insert", read_lock, LOCK_TABLE),
    ):
        lock = make("stock:7", using=using, timeout=0)
        lock.acquire().release()
        limit_waits()
        session, before = connection.connection, session_settings()
        with table_locked(statement):
            began = time.monotonic()
            with pytest.raises(LockBackendError, match=SAYS):
                lock.acquire()
            in_time(time.monotonic() - began, AT_MOST)
        assert (connection.connection, session_settings()) == (session, before)
        make("stock:7", using=using).acquire().release()
    # The optimistic backend has not read the second key yet.
    db_lock("stock:8").acquire().release()
    for using, key in (
        ("default", "stock:7"), ("insert", "stock:7"),
        ("optimistic", "stock:7"), ("optimistic", "stock:8"),
    ):  # fmt: skip
        db_lock("stock:7", using=using).acquire().release()
        with transaction.atomic():
            Place.objects.create(name=f"{using} {key} before")
            with table_locked(LOCK_TABLE):
                began = time.monotonic()
                with pytest.raises(LockBackendError, match=SAYS):
                    db_lock(key, using=using, timeout=0).acquire()
                in_time(time.monotonic() - began, AT_MOST)
            Place.objects.create(name=f"{using} {key} after")
    assert Place.objects.count() == 2 * 4


def test_a_claim_that_was_queued_before_its_table_was_locked_is_cancelled(
    limit_waits, worker
):
    """The claim joins the queue of a locked row. Then a migration begins."""
    joined, failed = [], []

    def lock_table(execute, sql, *arguments):
        queued = "dlocks_lockclaim" in sql and not connection.in_atomic_block
        if queued and joined and not failed:
            failed.append(sql)
            with table_locked(LOCK_CLAIMS):
                return execute(sql, *arguments)
        joined.extend(re.findall("^INSERT INTO .*dlocks_lockclaim", sql))
        return execute(sql, *arguments)

    db_lock("stock:7").acquire().release()
    with worker.doing(jobs.lock_row, "stock:7"):
        limit_waits()
        with (
            connection.execute_wrapper(lock_table),
            pytest.raises(LockBackendError, match=SAYS),
        ):
            db_lock("stock:7", timeout=30).acquire()
        assert failed
        assert not LockClaim.objects.exists()


@pytest.mark.engine("postgresql")
def test_a_read_of_a_locked_table_aborts_no_transaction(doomed):
    """The caller writes and commits after it."""
    Counter.objects.create(name="stock")
    worker = doomed(
        DLOCKS_TEST_OPTIONS=json.dumps({"options": "-c lock_timeout=200ms"})
    )
    with table_locked(LOCK_TABLE):
        errors = worker.call(jobs.write_after_reads, "stock:7")
    assert len(errors) == 5
    assert all("lock timeout" in error for error in errors), errors
    assert Counter.objects.get().value == 6


def test_a_caller_waits_for_the_end_of_a_table_lock(threads):
    """Without a limit a lock waits, as every query of Django does."""
    db_lock("stock:7").acquire().release()
    with table_locked(LOCK_TABLE):
        thread = threads(lambda: db_lock("stock:7", timeout=0).acquire().release())
        thread.join(1.7)
        assert thread.is_alive()
    thread.join(30)


def test_a_release_waits_for_the_end_of_a_table_lock(threads, in_other_thread):
    """The key is free after a migration, not only after the ttl."""
    for keys in ("stock:7",), ("stock:7", "stock:8"):
        hold = in_other_thread(db_lock(*keys).acquire)
        with table_locked(LOCK_TABLE):
            thread = threads(hold.release)
            thread.join(1.7)
            assert thread.is_alive(), keys
        thread.join()
        db_lock(*keys, timeout=0).acquire().release()
