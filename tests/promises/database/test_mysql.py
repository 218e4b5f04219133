"""MySQL's options, limits, errors, isolation level and authentication."""

from __future__ import annotations

import contextlib
import itertools
import json
import time

import pytest
from django.contrib.auth.models import Group
from django.core.checks import run_checks
from django.db import connection, transaction
from django.db.backends.signals import connection_created
from django.db.transaction import TransactionManagementError
from django.db.utils import OperationalError
from django.test import override_settings

from dlocks import LockBackendError, db_lock
from dlocks.backends.session import SessionBackend
from dlocks.models import ResourceLock
from tests import jobs
from tests.for_each import ROWS, for_each
from tests.processes import Worker
from tests.servers import MySQL
from tests.settings import PORT

pytestmark = [pytest.mark.engine("mysql"), pytest.mark.django_db(transaction=True)]


# innodb_rollback_on_timeout


@pytest.fixture(scope="module")
def strict_server(django_db_setup):
    """Processes on a server that rolls back a transaction after a lock wait timeout."""
    # A subclass would have to initialize its data again.
    server = MySQL()
    server.options = "--innodb-rollback-on-timeout=ON", "--innodb-lock-wait-timeout=1"
    with server:
        server.execute("CREATE DATABASE strict")
        environment = {**server.environment, "DLOCKS_TEST_NAME": "strict"}
        workers = [Worker(**environment) for _ in range(2)]
        workers[0].call(jobs.migrate_dlocks)
        yield workers
        for worker in workers:
            worker.close()


def test_busy_keys_roll_nothing_back_with_rollback_on_timeout(strict_server):
    """A lock in a transaction never waits for a row. Other writes are committed."""
    worker, other = strict_server
    for using in ROWS:
        leased, locked = f"leased {using}", f"locked {using}"
        other.call(jobs.acquire, leased, using=using)
        other.call(jobs.acquire, locked)
        answers = {leased: "LockTimeout", locked: "LockTimeout", f"new {using}": ""}
        with other.doing(jobs.lock_row, locked):
            for key, answer in answers.items():
                policy = {"using": using, "timeout": 0.2}
                assert worker.call(jobs.write_and_ask, key, **policy) == (answer, 1)
    assert worker.call(jobs.what_the_check_says) == []
    other.call(jobs.release_all)


def test_a_hold_is_lost_with_its_transaction_after_a_timeout(strict_server):
    """A statement of the caller times out, and the server rolls back all of it."""
    worker, other = strict_server
    for using in ROWS:
        mine, locked = f"mine {using}", f"row {using}"
        other.call(jobs.acquire, locked)
        with other.doing(jobs.lock_row, locked):
            answer = worker.call(jobs.outwait_a_row, mine, locked, using=using)
        assert answer == [1205, "LockLost", "LockLost"]
        assert isinstance(other.call(jobs.try_once, mine, using=using), int)
    other.call(jobs.release_all)


def test_a_transaction_that_the_server_has_ended_commits_nothing():
    """A request for a lock is the victim of a deadlock. The caller goes on."""

    def deadlock(execute, sql, *arguments):
        if "dlocks_" in sql:
            connection.connection.rollback()
            raise OperationalError(1213, "Deadlock found")
        return execute(sql, *arguments)

    Group.objects.create(name="before")
    with pytest.raises(TransactionManagementError), transaction.atomic():
        Group.objects.update(name="first")
        with connection.execute_wrapper(deadlock), pytest.raises(LockBackendError):
            db_lock("stock:7").acquire()
        Group.objects.update(name="second")
    assert Group.objects.get().name == "before"


# GET_LOCK


LONG = {
    "BACKEND": "dlocks.backends.session.SessionBackend",
    "OPTIONS": {"prefix": "p" * 200},
}


def test_long_keys_and_prefixes_fit_into_64_characters(is_busy):
    """MySQL refuses longer names.

    Long keys that differ only in the last character are still different locks. One
    session holds them. Releasing one releases no other, nor a named lock of the caller.
    """
    keys = ["k" * 54 + last for last in "abcd"]
    with override_settings(DLOCKS={"session": LONG}), connection.cursor() as cursor:
        cursor.execute("SELECT GET_LOCK('the application''s own', 0)")
        holds = [db_lock(key, using="session").acquire() for key in keys[:3]]
        with connection.cursor() as schema:
            schema.execute(
                "SELECT object_name, owner_thread_id FROM"
                " performance_schema.metadata_locks WHERE object_type = 'USER LEVEL"
                " LOCK' AND lock_status = 'GRANTED' AND object_name LIKE '%dlocks%'"
            )
            names = dict(schema.fetchall())
        assert max(map(len, names)) <= 64
        granted = [names[name] for name in names if name.startswith("dlocks:")]
        assert (len(granted), len(set(granted))) == (3, 1), "one session"
        holds[1].release()
        busy = [is_busy(key, "session") for key in keys]
        assert busy == [True, False, True, False]
        for hold in holds[0], holds[2]:
            hold.check()
            hold.release()
        cursor.execute("SELECT RELEASE_LOCK('the application''s own')")
        assert cursor.fetchone() == (1,)


# LAST_INSERT_ID()


def test_acquiring_sets_last_insert_id_and_nothing_else():
    """The token arrives through ``LAST_INSERT_ID()``.

    Django reads generated keys from its cursor, where they stay. One statement writes
    the rows of several keys, and each key has the token of its row.
    """
    for using, scope in itertools.product(ROWS, ["lease", "transaction"]):
        key, first, second = (f"{one} {using} {scope}" for one in ("key", "a", "b"))
        with db_lock(key, using=using):
            pass
        block = transaction.atomic if scope == "transaction" else contextlib.nullcontext
        with block(), connection.cursor() as cursor:
            cursor.execute("INSERT INTO auth_group (name) VALUES (%s)", [first])
            number = cursor.lastrowid
            hold = db_lock(key, using=using, scope=scope).acquire()
            assert cursor.lastrowid == number == Group.objects.get(name=first).pk
            cursor.execute("SELECT LAST_INSERT_ID()")
            assert cursor.fetchone() == (hold.token,)
            created = Group.objects.create(name=second)
            assert created.pk == Group.objects.get(name=second).pk
            assert ResourceLock.objects.get(pk=key).version == hold.token
            hold.release()
    keys = ["stock:1", "stock:2", "stock:3"]
    for _ in range(2):
        with db_lock(*keys) as hold:
            rows = ResourceLock.objects.filter(pk__in=keys)
            assert hold.tokens == dict(rows.values_list("pk", "version"))


# max_execution_time


@pytest.fixture
def limited():
    """Limit the duration of statements in every new session, as a project may."""

    def limit(connection, **rest):
        with connection.cursor() as cursor:
            # The first limit is for SELECTs, in milliseconds. Other statements wait for
            # a table for one second at most.
            cursor.execute(
                "SET SESSION max_execution_time = 200, lock_wait_timeout = 1"
            )

    connection_created.connect(limit)
    connection.close()
    yield
    connection_created.disconnect(limit)
    connection.close()


@pytest.mark.usefixtures("limited")
def test_a_waiter_outwaits_max_execution_time(worker, threads, until):
    """The wait in the engine's queue is a SELECT, but has no such limit."""
    with worker.doing(jobs.hold, "stock:7", using="session"):
        waiter = threads(
            lambda: db_lock("stock:7", using="session", timeout=30).acquire().release()
        )
        until(lambda: SessionBackend("default").waiting("stock:7") == 1)
        time.sleep(0.6)
        assert waiter.is_alive()
    waiter.join(30)


@pytest.mark.usefixtures("limited")
def test_a_select_over_its_time_is_neither_grant_nor_contention(in_other_thread):
    """The backend reads the row first, but another session has locked the table."""
    import MySQLdb

    there = connection.settings_dict
    admin = MySQLdb.connect(
        host="127.0.0.1", port=int(PORT), user=there["USER"], db=there["NAME"]
    )
    with contextlib.closing(admin), admin.cursor() as cursor:
        for using in "optimistic", "insert":
            # This process has not read the row yet.
            with db_lock(f"of {using}"):
                pass
            lock = db_lock(f"of {using}", using=using)
            cursor.execute("LOCK TABLES dlocks_resourcelock WRITE")
            # Where the machine stalls, the watchdog cancels it first.
            with pytest.raises(LockBackendError, match="3024|locked as a whole"):
                in_other_thread(lock.try_acquire)
            cursor.execute("UNLOCK TABLES")
            hold = in_other_thread(lock.try_acquire)
            assert hold is not None
            hold.release()


# REPEATABLE READ, MySQL's default


@for_each("level", [None, "repeatable read"])
def test_repeatable_read_refuses_locks_in_transactions_only(
    level, monkeypatch, in_other_thread, is_busy
):
    """Django sets READ COMMITTED unless ``isolation_level`` names another level.

    ``None`` means the level of the server.
    """
    options = connection.settings_dict.setdefault("OPTIONS", {})
    monkeypatch.setitem(options, "isolation_level", level)
    refused = "runs at REPEATABLE READ.*Acquire the lock before"
    warned = r"at REPEATABLE READ\. Its snapshot may be older"

    def work(using):
        lock = db_lock("stock:7", using=using)
        with lock:
            assert is_busy("stock:7", using)
        for key in "stock:7", f"new {using}":
            with transaction.atomic():
                Group.objects.count()
                with pytest.raises(RuntimeError, match=refused):
                    db_lock(key, using=using).acquire()
                Group.objects.create(name=f"{key} {using}")
        with lock as hold, transaction.atomic():
            hold.check()
        with pytest.warns(RuntimeWarning, match=warned):
            with transaction.atomic(), db_lock("stock:7", using=using, scope="lease"):
                assert is_busy("stock:7", using)
        found = run_checks(databases=["default"])
        return {one.id for one in found if one.id.startswith("dlocks.")}

    for using in ROWS:
        assert in_other_thread(work, using) == {"dlocks.W003", "dlocks.W004"}
    assert Group.objects.count() == 2 * len(ROWS)
    Group.objects.all().delete()


# caching_sha2_password


@pytest.fixture
def account():
    """Return the settings of an account with a password.

    The server has not cached the password yet.
    """
    there, ada = connection.settings_dict, "ada@'127.0.0.1'"
    database = connection.ops.quote_name(there["NAME"])
    with connection.cursor() as cursor:
        for sql in (
            f"DROP USER IF EXISTS {ada}",
            f"CREATE USER {ada} IDENTIFIED WITH caching_sha2_password BY 'open sesame'",
            f"GRANT ALL ON {database}.* TO {ada}",
        ):
            cursor.execute(sql)
        same = {name: there[name] for name in ("ENGINE", "NAME", "HOST", "PORT")}
        yield {**same, "USER": "ada", "PASSWORD": "open sesame"}
        cursor.execute(f"DROP USER {ada}")


@for_each("tls", ["off", "required"])
def test_caching_sha2_password_works_with_and_without_tls(
    tls, account, doomed, count_together
):
    """Leases, waiting and session locks work with a password."""
    import MySQLdb

    with connection.cursor() as cursor:
        # The server forgets the passwords that it has cached.
        cursor.execute("FLUSH PRIVILEGES")
    options = {"ssl_mode": "DISABLED" if tls == "off" else "REQUIRED"}
    databases = {"default": {**account, "OPTIONS": options}}
    environment = {"DLOCKS_TEST_DATABASES": json.dumps(databases)}
    crowd = [doomed(far=number == 1, **environment) for number in range(2)]
    # Oracle's client library sends an uncached password over TLS only.
    is_oracles = not MySQLdb.get_client_info().startswith("3.")
    if tls == "off" and is_oracles:
        assert crowd[0].call(jobs.acquire, "stock:7") == "LockBackendError"
        return
    for worker in crowd:
        # It is empty without TLS.
        sql = "SHOW SESSION STATUS LIKE 'Ssl_cipher'"
        ((_, cipher),) = worker.call(jobs.run_sql, sql)
        assert bool(cipher) == (tls != "off")
    for using in "default", "session":
        count_together(crowd, 5, using=using)


def test_a_wrong_password_is_an_error_and_never_contention(account, doomed):
    databases = {"default": {**account, "PASSWORD": "wrong"}}
    worker = doomed(DLOCKS_TEST_DATABASES=json.dumps(databases))
    for using in "default", "session":
        assert worker.call(jobs.acquire, "stock:7", using=using) == "LockBackendError"
