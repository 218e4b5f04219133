"""Strict or unusual modes of servers and sessions.

Locks work there, or an error names the setting.
"""

from __future__ import annotations

import json

import pytest
from django.core.checks import run_checks
from django.db import connection

from dlocks import LockBackendError, db_lock, db_rwlock
from tests import jobs

pytestmark = pytest.mark.django_db(transaction=True)

FAMILY = ["default", "optimistic", "insert"]


@pytest.mark.engine("mariadb")
def test_every_kind_of_lock_works_with_sql_safe_updates(doomed):
    """A server with ``sql_safe_updates`` refuses writes that use no key.

    It decides by its own view of a statement, and reports error 1175.
    """
    option = {"init_command": "SET SESSION sql_safe_updates = 1"}
    worker = doomed(DLOCKS_TEST_OPTIONS=json.dumps(option))
    for using in FAMILY:
        assert len(worker.call(jobs.whole_cycle, using)) == 5
    assert worker.call(jobs.rights, "purge") > 0


# How a session becomes read-only, the options for this, and the name of the setting.
READ_ONLY, OPTIONS, SETTING = {
    "postgresql": (
        "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
        {"options": "-c default_transaction_read_only=on"},
        "default_transaction_read_only",
    ),
    "mysql": (
        "SET SESSION TRANSACTION READ ONLY",
        {"init_command": "SET SESSION TRANSACTION READ ONLY"},
        "transaction_read_only",
    ),
}.get(connection.vendor, ("", {}, ""))


def make_read_only():
    """Make this thread's session read-only.

    After a failover, the server of a session may be a replica.
    """
    with connection.cursor() as cursor:
        cursor.execute(READ_ONLY)
    return connection.connection


@pytest.mark.engine("postgresql", "mariadb")
def test_a_session_that_became_read_only_is_replaced():
    """A lock reconnects after a failover, as it does with a dead connection.

    It does so to acquire, to renew and to release, whatever the kind of lock.
    """

    def replaced(work):
        before = make_read_only()
        result = work()
        assert connection.connection is not before, (using, work)
        return result

    for using in FAMILY:
        for lock in (
            db_lock("a", using=using),
            db_lock("a", "b", using=using),
            db_rwlock("a", using=using).read(),
        ):
            # The rows exist, so the first statement is the one that grants.
            lock.acquire().release()
            hold = replaced(lock.acquire)
            replaced(hold.renew)
            replaced(hold.release)
            make_read_only()
            with lock as hold:
                assert hold.held


def acquire_in_a_read_only_session(pipe):
    errors = []
    for using in FAMILY:
        for lock in db_lock("a", using=using), db_rwlock("a", using=using).read():
            try:
                lock.acquire()
            except LockBackendError as error:
                errors.append(str(error))
    return errors


@pytest.mark.engine("postgresql", "mariadb")
def test_a_read_only_server_is_reported_with_its_setting(doomed):
    """If a new session is read-only too, the error names the setting."""
    worker = doomed(DLOCKS_TEST_OPTIONS=json.dumps(OPTIONS))
    errors = worker.call(acquire_in_a_read_only_session)
    assert len(errors) == 2 * len(FAMILY)
    for error in errors:
        assert f" {SETTING} is on" in error


@pytest.mark.engine("postgresql")
def test_the_isolation_level_of_the_server_is_checked():
    """``manage.py check --database`` reads ``default_transaction_isolation``.

    It finds PostgreSQL's setting wherever it is set.
    """
    try:
        for level, expected in (
            ("read committed", []),
            ("repeatable read", ["dlocks.W004"]),
        ):
            with connection.cursor() as cursor:
                cursor.execute(f"SET default_transaction_isolation = '{level}'")
            found = run_checks(tags=["database"], databases=["default"])
            assert [message.id for message in found] == expected
        assert "repeatable read" in found[0].msg
        assert "default_transaction_isolation" in found[0].hint
    finally:
        connection.cursor().execute("RESET default_transaction_isolation")
        connection.close()
