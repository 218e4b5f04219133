"""MySQL's options, limits, errors, isolation level and authentication."""

from __future__ import annotations

import contextlib
import json
import time
from concurrent import futures

import pytest
from django.contrib.auth.models import Group
from django.db import OperationalError, connection, connections, transaction
from django.db.backends.signals import connection_created
from django.test import override_settings

from dlocks import LockBackendError, LockLost, LockTimeout, db_lock
from tests import jobs
from tests.internals import (
    ResourceLock,
    backends,
    check_settings,
    check_tables,
    disconnect,
)
from tests.processes import Worker
from tests.rows import PAST
from tests.servers import MySQL
from tests.settings import PORT
from tests.timing import in_time

pytestmark = [
    pytest.mark.engine("mysql"),
    pytest.mark.django_db(transaction=True),
]

FAMILY = pytest.mark.parametrize("using", ["default", "optimistic", "insert"])


# innodb_rollback_on_timeout


class RollbackOnTimeout(MySQL):
    """A server that rolls back the whole transaction after a lock wait timeout."""

    options = ("--innodb-rollback-on-timeout=ON", "--innodb-lock-wait-timeout=1")


@pytest.fixture(scope="module")
def strict_server():
    with RollbackOnTimeout() as server:
        server_environment = {**server.environment, "DLOCKS_TEST_NAME": "strict"}
        worker = Worker(**server_environment)
        worker.call(jobs.migrate)
        worker.close()
        yield server_environment


@pytest.fixture
def strict_workers(strict_server, doomed):
    """Return two processes that use the strict server."""
    return doomed(**strict_server), doomed(**strict_server)


@FAMILY
def test_busy_keys_roll_nothing_back_with_rollback_on_timeout(using, strict_workers):
    """A lock in a transaction never waits for a row.

    The transaction continues, and its writes are committed.
    """
    worker, other = strict_workers
    leased, locked = f"leased {using}", f"locked {using}"
    other.call(jobs.acquire, leased, using=using)
    other.call(jobs.acquire, locked)
    other.start(jobs.lock_row, locked)
    assert other.hear() == "locked"
    assert worker.call(jobs.write_and_try, leased, using=using) == ("LockTimeout", 1)
    assert worker.call(jobs.write_and_try, locked, using=using) == ("LockTimeout", 1)
    assert worker.call(jobs.write_and_try, f"new {using}", using=using) == (
        "acquired",
        1,
    )
    assert worker.call(jobs.what_the_check_says) == []
    other.tell()
    assert other.hear() == "unlocked"


@FAMILY
def test_a_hold_is_lost_with_its_transaction_after_a_timeout(using, strict_workers):
    """A statement of the caller times out while it waits for a row.

    The server rolls back the whole transaction.
    """
    worker, other = strict_workers
    mine, locked = f"mine {using}", f"row {using}"
    other.call(jobs.acquire, locked)
    other.start(jobs.lock_row, locked)
    assert other.hear() == "locked"
    assert worker.call(jobs.outwait_a_row, mine, locked, using=using) == [
        1205,
        "LockLost",
        "LockLost",
    ]
    other.tell()
    assert other.hear() == "unlocked"
    assert isinstance(other.call(jobs.try_once, mine, using=using), int)


# GET_LOCK


def named_locks():
    """Return the granted named locks of dlocks, each with its session's thread."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT object_name, owner_thread_id FROM performance_schema.metadata_locks"
            " WHERE object_type = 'USER LEVEL LOCK' AND lock_status = 'GRANTED' AND"
            " object_name LIKE %s",
            ["%dlocks%"],
        )
        return dict(cursor.fetchall())


@override_settings(
    DLOCKS={
        "session": {
            "BACKEND": "dlocks.backends.session.SessionBackend",
            "OPTIONS": {"prefix": "p" * 200},
        }
    }
)
def test_long_keys_and_prefixes_fit_into_64_characters(is_busy):
    """MySQL refuses longer names.

    Long keys that differ only in the last character are still different locks.
    """
    first, second, third = ("k" * 54 + last for last in "abc")
    with db_lock(first, using="session"), db_lock(second, using="session"):
        assert is_busy(first, "session")
        assert is_busy(second, "session")
        assert not is_busy(third, "session")
        names = named_locks()
        assert len([name for name in names if name.startswith("dlocks:")]) == 2
        assert max(map(len, names)) <= 64
    disconnect(backends["session"])


def test_one_session_holds_several_named_locks(is_busy):
    """Releasing one lock releases no other, nor a named lock of the caller."""
    keys = ["stock:1", "stock:2", "stock:3"]
    with connection.cursor() as cursor:
        cursor.execute("SELECT GET_LOCK('the application''s own', 0)")
        holds = [db_lock(key, using="session").acquire() for key in keys]
        sessions = {
            thread
            for name, thread in named_locks().items()
            if name.startswith("dlocks:")
        }
        assert len(sessions) == 1
        holds[1].release()
        assert [is_busy(key, "session") for key in keys] == [True, False, True]
        for hold in holds[0], holds[2]:
            hold.check()
            hold.release()
        cursor.execute("SELECT RELEASE_LOCK('the application''s own')")
        assert cursor.fetchone() == (1,)
    disconnect(backends["session"])


# LAST_INSERT_ID()


@FAMILY
@pytest.mark.parametrize("scope", ["lease", "transaction"])
def test_acquiring_sets_last_insert_id_and_nothing_else(using, scope):
    """The token arrives through ``LAST_INSERT_ID()``.

    Django reads generated keys from its cursor, where they stay.
    """
    with db_lock("stock:7", using=using):
        pass
    with (
        transaction.atomic() if scope == "transaction" else contextlib.nullcontext(),
        connection.cursor() as cursor,
    ):
        cursor.execute("INSERT INTO auth_group (name) VALUES ('first')")
        number = cursor.lastrowid
        hold = db_lock("stock:7", using=using, scope=scope).acquire()
        assert cursor.lastrowid == number == Group.objects.get(name="first").pk
        cursor.execute("SELECT LAST_INSERT_ID()")
        assert cursor.fetchone() == (hold.token,)
        assert (
            Group.objects.create(name="second").pk
            == Group.objects.get(name="second").pk
        )
        assert ResourceLock.objects.get(pk="stock:7").version == hold.token
        hold.release()


def test_each_of_several_keys_has_the_token_of_its_row():
    """One statement writes all rows, but ``LAST_INSERT_ID()`` holds one number."""
    for _ in range(2):
        with db_lock("stock:1", "stock:2", "stock:3") as hold:
            assert hold.tokens == dict(
                ResourceLock.objects.values_list("pk", "version")
            )


# Error 3572, of NOWAIT


@FAMILY
@pytest.mark.parametrize("scope", ["lease", "transaction"])
def test_a_row_locked_by_another_transaction_is_contention(using, scope, workers):
    (other,) = workers(1)
    with db_lock("stock:7"):
        pass
    other.start(jobs.lock_row, "stock:7")
    assert other.hear() == "locked"
    with pytest.raises(OperationalError) as caught, transaction.atomic():
        ResourceLock.objects.select_for_update(nowait=True).get(pk="stock:7")
    error, dialect = caught.value, backends["default"].dialect
    assert error.args[0] == 3572
    assert dialect.is_locked(error)
    assert dialect.is_contention(error)
    assert not dialect.ends_transaction(error)
    with transaction.atomic() if scope == "transaction" else contextlib.nullcontext():
        assert db_lock("stock:7", using=using, scope=scope).try_acquire() is None
        with pytest.raises(LockTimeout):
            db_lock("stock:7", using=using, scope=scope, timeout=0.1).acquire()
    other.tell()
    assert other.hear() == "unlocked"


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
def test_a_waiter_outwaits_max_execution_time(workers, threads, until):
    """The wait in the engine's queue is a SELECT, but has no such limit."""
    (other,) = workers(1)
    other.start(jobs.hold, "stock:7", using="session")
    other.hear()
    waiter = threads(
        lambda: db_lock("stock:7", using="session", timeout=30).acquire().release()
    )
    until(lambda: backends["session"].waiting("stock:7") == 1)
    time.sleep(0.6)
    assert waiter.is_alive()
    other.tell()
    waiter.join(30)
    disconnect(backends["session"])


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("using", ["optimistic", "insert"])
def test_a_select_over_its_time_is_neither_grant_nor_contention(using, in_other_thread):
    """The backend reads the row first, but another session has locked the table."""
    with db_lock("stock:7"):
        pass
    backends["optimistic"]._versions.clear()
    import MySQLdb

    there = connection.settings_dict
    admin = MySQLdb.connect(
        host="127.0.0.1", port=int(PORT), user=there["USER"], db=there["NAME"]
    )
    with contextlib.closing(admin), admin.cursor() as cursor:
        cursor.execute("LOCK TABLES dlocks_resourcelock WRITE")
        # Where the machine stalls, the watchdog cancels it first.
        with pytest.raises(LockBackendError, match="3024|locked as a whole"):
            in_other_thread(db_lock("stock:7", using=using).try_acquire)
        cursor.execute("UNLOCK TABLES")
    hold = in_other_thread(db_lock("stock:7", using=using).try_acquire)
    assert hold is not None
    hold.release()


# REPEATABLE READ, MySQL's default


@FAMILY
@pytest.mark.parametrize("level", [None, "repeatable read"])
def test_repeatable_read_refuses_locks_in_transactions_only(
    using, level, monkeypatch, in_other_thread, is_busy
):
    """Django sets READ COMMITTED unless ``isolation_level`` names another level.

    ``None`` means the level of the server.
    """
    monkeypatch.setitem(
        connection.settings_dict.setdefault("OPTIONS", {}), "isolation_level", level
    )
    lock = db_lock("stock:7", using=using)

    def work():
        with lock:
            assert is_busy("stock:7", using)
        for key in "stock:7", "new":
            with transaction.atomic():
                Group.objects.count()
                with pytest.raises(
                    RuntimeError,
                    match="runs at REPEATABLE READ.*Acquire the lock before",
                ):
                    db_lock(key, using=using).acquire()
                Group.objects.create(name=key)
        with lock as hold, transaction.atomic():
            hold.check()
        with pytest.warns(
            RuntimeWarning, match=r"at REPEATABLE READ\. Its snapshot may be older"
        ):
            with transaction.atomic(), db_lock("stock:7", using=using, scope="lease"):
                assert is_busy("stock:7", using)
        return {
            message.id
            for message in [*check_settings(), *check_tables(databases=["default"])]
        }

    assert in_other_thread(work) == {"dlocks.W003", "dlocks.W004"}
    assert Group.objects.count() == 2


# caching_sha2_password


@pytest.fixture
def account():
    """Return a function that returns the settings of an account.

    The account has a password, which the server has not cached yet.
    """

    def settings(**options):
        return {
            **{
                name: connection.settings_dict[name]
                for name in ("ENGINE", "NAME", "HOST", "PORT")
            },
            "USER": "ada",
            "PASSWORD": "open sesame",
            "OPTIONS": options,
        }

    with connection.cursor() as cursor:
        cursor.execute("DROP USER IF EXISTS ada@'127.0.0.1'")
        cursor.execute(
            "CREATE USER ada@'127.0.0.1' IDENTIFIED WITH caching_sha2_password BY 'open"
            " sesame'"
        )
        database = connection.ops.quote_name(connection.settings_dict["NAME"])
        cursor.execute(f"GRANT ALL ON {database}.* TO ada@'127.0.0.1'")
        yield settings
        cursor.execute("DROP USER ada@'127.0.0.1'")


def authority():
    """Return the path of the certificate authority made by the server."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@datadir")
        return cursor.fetchone()[0] + "ca.pem"


def refuses_plain():
    """Return whether the client library is Oracle's.

    That library sends an uncached password over TLS only.
    """
    import MySQLdb

    return not MySQLdb.get_client_info().startswith("3.")


@pytest.mark.parametrize("tls", ["off", "required", "by authority"])
def test_caching_sha2_password_works_with_and_without_tls(
    tls, account, doomed, tmp_path
):
    """Leases, waiting and session locks work with a password."""
    options = {
        "off": {"ssl_mode": "DISABLED"},
        "required": {"ssl_mode": "REQUIRED"},
        "by authority": {"ssl": {"ca": authority()}},
    }[tls]
    environment = {"DLOCKS_TEST_DATABASES": json.dumps({"default": account(**options)})}
    crowd = [doomed(far=number == 1, **environment) for number in range(2)]
    if tls == "off" and refuses_plain():
        assert crowd[0].call(jobs.acquire, "stock:7") == "LockBackendError"
        return
    assert [bool(worker.call(jobs.cipher)) for worker in crowd] == [tls != "off"] * 2
    for using in "default", "session":
        path = tmp_path / using
        path.write_text("0 0")
        for worker in crowd:
            worker.start(
                jobs.count,
                str(path),
                "stock:7",
                times=20,
                scope="lease",
                using=using,
                timeout=60,
            )
        tokens = [token for worker in crowd for token in worker.hear()]
        assert path.read_text() == f"40 {max(tokens)}"


def test_a_wrong_password_is_an_error_and_never_contention(account, doomed):
    worker = doomed(
        DLOCKS_TEST_DATABASES=json.dumps(
            {"default": {**account(), "PASSWORD": "wrong"}}
        )
    )
    for using in "default", "session":
        assert worker.call(jobs.acquire, "stock:7", using=using) == "LockBackendError"


# A release waits for the row, but not for a transaction that keeps it.


@FAMILY
def test_a_late_release_outlasts_a_transaction(using, in_other_thread):
    """A transaction that takes over an expired lease delays its release by 3 s."""
    lease = db_lock("k", using=using, ttl=0.2, renew=False)
    hold = in_other_thread(lease.acquire)
    ResourceLock.objects.filter(pk="k").update(end_time=PAST)
    with transaction.atomic():
        assert db_lock("k", using=using).try_acquire() is not None
        began = time.monotonic()
        with pytest.raises(LockLost):
            in_other_thread(hold.release)
        in_time(time.monotonic() - began, 5)


@FAMILY
def test_a_release_waits_for_a_short_row_lock(using, in_other_thread):
    """A statement that locks the row for a moment does not fail the release."""
    hold = db_lock("k", using=using).acquire()
    with futures.ThreadPoolExecutor() as threads:
        with transaction.atomic():
            ResourceLock.objects.select_for_update().get(pk="k")
            releasing = threads.submit(hold.release)
            assert not futures.wait([releasing], 0.3).done
        began = time.monotonic()
        releasing.result()
        in_time(time.monotonic() - began, 1.0)
        threads.submit(connections.close_all).result()
    assert not db_lock("k", using=using).locked()
