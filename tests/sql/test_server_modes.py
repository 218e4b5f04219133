"""Strict or unusual modes of servers and sessions.

Locks work there, or an error names the setting.
"""

from __future__ import annotations

import pytest
from django.db import connection, transaction

from dlocks import LockBackendError, db_lock, db_rwlock, db_semaphore
from tests.internals import backends, check_tables

pytestmark = pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"])

FAMILY = ["default", "optimistic", "insert"]


def use_every_kind_of_lock(pipe, options):
    """Use every kind of lock with these connection options."""
    connection.settings_dict["OPTIONS"] |= options
    for using in FAMILY:
        with db_lock("lease", using=using) as hold:
            hold.renew()
            with hold.atomic():
                assert hold.held
        with transaction.atomic(), db_lock("transaction", using=using) as hold:
            assert hold.scope == "transaction"
        with db_rwlock("shared", using=using).read() as hold:
            hold.renew()
            with hold.atomic():
                assert hold.held
        with db_lock("one", "other", using=using) as hold:
            hold.renew()
        with transaction.atomic(), db_lock("one", "other", using=using):
            pass
        with db_semaphore("permits", 2, using=using) as hold:
            assert hold.held
        assert sum(backends[using].purge(0))
    return "used"


@pytest.mark.engine("mariadb")
def test_every_kind_of_lock_works_with_sql_safe_updates(doomed):
    """A server with ``sql_safe_updates`` refuses writes that use no key.

    It decides by its own view of a statement, and reports error 1175.
    """
    worker = doomed()
    assert (
        worker.call(
            use_every_kind_of_lock, {"init_command": "SET SESSION sql_safe_updates = 1"}
        )
        == "used"
    )


READ_ONLY = {
    "postgresql": "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
    "mysql": "SET SESSION TRANSACTION READ ONLY",
}


def make_read_only():
    """Make this thread's session read-only.

    After a failover, the server of a session may be a replica.
    """
    with connection.cursor() as cursor:
        cursor.execute(READ_ONLY[connection.vendor])
    return connection.connection


@pytest.mark.engine("postgresql", "mariadb", "mysql")
@pytest.mark.parametrize("using", FAMILY)
@pytest.mark.parametrize(
    "make",
    [lambda **policy: db_lock("a", **policy), lambda **policy: db_lock("a", "b",
    **policy),
     lambda **policy: db_rwlock("a", **policy).read()],
    ids=["one", "several", "shared"],
)  # fmt: skip
def test_a_session_that_became_read_only_is_replaced(using, make):
    """A lock reconnects after a failover, as it does with a dead connection."""
    lock = make(using=using)
    # The rows exist, so the first statement is the one that grants.
    lock.acquire().release()
    before = make_read_only()
    hold = lock.acquire()
    assert connection.connection is not before
    before = make_read_only()
    hold.renew()
    assert connection.connection is not before
    before = make_read_only()
    hold.release()
    assert connection.connection is not before
    before = make_read_only()
    with make(using=using, scope="lease") as hold:
        assert hold.held


def ask_where_nobody_can_write(pipe, options):
    connection.settings_dict["OPTIONS"] |= options
    errors = []
    for using in FAMILY:
        for lock in (
            db_lock("a", using=using, timeout=0),
            db_rwlock("a", using=using, timeout=0).read(),
        ):
            try:
                lock.acquire()
            except LockBackendError as error:
                errors.append(str(error))
    return errors


@pytest.mark.engine("postgresql", "mariadb", "mysql")
def test_a_read_only_server_is_reported_with_its_setting(doomed):
    """If a new session is read-only too, the error names the setting."""
    if connection.vendor == "postgresql":
        options, setting = (
            {"options": "-c default_transaction_read_only=on"},
            "default_transaction_read_only is on",
        )
    else:
        options, setting = (
            {"init_command": READ_ONLY["mysql"]},
            "transaction_read_only is on",
        )
    errors = doomed().call(ask_where_nobody_can_write, options)
    assert len(errors) == 2 * len(FAMILY)
    for error in errors:
        assert setting in error


@pytest.mark.engine("postgresql")
@pytest.mark.parametrize(
    ("level", "warned"), [("read committed", False), ("repeatable read", True)]
)
def test_the_isolation_level_of_the_server_is_checked(level, warned):
    """``manage.py check --database`` reads ``default_transaction_isolation``.

    It finds PostgreSQL's setting wherever it is set.
    """
    with connection.cursor() as cursor:
        cursor.execute(f"SET default_transaction_isolation = '{level}'")
    try:
        found = check_tables(databases=["default"])
        assert [message.id for message in found] == ["dlocks.W004"] * warned
        for message in found:
            assert "repeatable read" in message.msg
            assert "default_transaction_isolation" in message.hint
    finally:
        connection.cursor().execute("RESET default_transaction_isolation")
        connection.close()
