"""Unusual modes of servers and sessions, and character sets that lack characters.

Locks work there, or an error names the setting.
"""

from __future__ import annotations

import json
import logging
import threading
from io import StringIO

import pytest
from django.conf import settings
from django.core.checks import run_checks
from django.core.management import call_command
from django.db import connection, transaction
from django.test import override_settings

from dlocks import LockBackendError, db_lock, db_rwlock, history
from dlocks.models import HoldRecord, LockClaim, ResourceLock
from tests import jobs
from tests.for_each import ROWS, for_each
from tests.timing import eventually

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.engine("mariadb")
def test_every_kind_of_lock_works_with_sql_safe_updates(doomed):
    """The server refuses writes that use no key by its own view of a statement."""
    option = {"init_command": "SET SESSION sql_safe_updates = 1"}
    worker = doomed(DLOCKS_TEST_OPTIONS=json.dumps(option))
    for using in ROWS:
        assert len(worker.call(jobs.whole_cycle, using)) == 5
    assert isinstance(worker.call(jobs.try_once, "stock:7"), int)
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
    """A lock reconnects after a failover to acquire, to renew and to release."""

    def replaced(work):
        before = make_read_only()
        result = work()
        assert connection.connection is not before, (using, work)
        return result

    for using in ROWS:
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
    for using in ROWS:
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
    assert len(errors) == 2 * len(ROWS)
    for error in errors:
        assert f" {SETTING} is on" in error


@pytest.mark.engine("postgresql")
def test_a_read_only_transaction_is_not_blamed_on_the_server():
    """The error names it as the first reason. The transaction can continue."""
    with transaction.atomic():
        connection.cursor().execute("SET TRANSACTION READ ONLY")
        with pytest.raises(
            LockBackendError, match="write: the transaction is READ ONLY"
        ):
            db_lock("a").acquire()
        assert not ResourceLock.objects.exclude(status="S").exists()


@pytest.mark.engine("sqlite")
def test_a_read_only_file_is_reported_with_advice():
    run = connection.cursor().execute
    run("PRAGMA query_only = ON")
    try:
        with pytest.raises(LockBackendError, match="must be able to write the file"):
            db_lock("stock:7").acquire()
    finally:
        run("PRAGMA query_only = OFF")


@pytest.mark.engine("postgresql")
def test_the_isolation_level_of_the_server_is_checked():
    """The check finds PostgreSQL's setting wherever it is set."""
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


# Character sets.

CREATE = {
    "postgresql": "CREATE DATABASE {} TEMPLATE template0 ENCODING '{}' LOCALE 'C'",
    "mysql": "CREATE DATABASE {} CHARACTER SET {}",
}
NAME = "импорт-1 🔒"
# The name as it is shown where the character set has none of its letters, only the
# Russian ones, or all of them.
SHOWN = [
    NAME.encode("ascii", "backslashreplace").decode(),
    NAME[:-1] + "\\U0001f512",
    NAME,
]
NONE, RUSSIAN, ALL = range(3)

# The character sets of databases. WIN1251 is PostgreSQL's name, Python has another one.
CHARSETS = {
    "postgresql": {"LATIN1": NONE, "WIN1251": RUSSIAN, "SQL_ASCII": ALL},
    "mysql": {"latin1": ALL},
}.get(connection.vendor, {})


@pytest.fixture
def in_database(doomed):
    """Return a function that runs a job in a process on a database of a charset."""
    databases = []

    def run(job, charset, *args):
        databases.append(name := f"dlocks_{charset.lower()}")
        with connection.cursor() as cursor:
            cursor.execute(f"DROP DATABASE IF EXISTS {name}")
            cursor.execute(CREATE[connection.vendor].format(name, charset))
        worker = doomed(DLOCKS_TEST_NAME=name)
        worker.call(jobs.migrate_databases, "default")
        return worker.call(job, *args)

    yield run
    force = " WITH (FORCE)" if connection.vendor == "postgresql" else ""
    with connection.cursor() as cursor:
        for name in databases:
            cursor.execute(f"DROP DATABASE {name}{force}")


@pytest.fixture
def over_connection(doomed):
    """Return a function that runs a job with a charset of its connection."""
    return lambda job, charset, *args: doomed(
        DLOCKS_TEST_OPTIONS=json.dumps({"charset": charset})
    ).call(job, *args)


def names_of_holders(pipe):
    """Use every kind of lock, and wait for one.

    Return the names under which this thread, and one that waited, was shown.
    """
    threading.current_thread().name = NAME
    names = set()
    options = {"OPTIONS": {"history": True}}

    def note(using, key):
        names.add(db_lock(key, using=using).holder().holder)

    with override_settings(
        DLOCKS={alias: settings.DLOCKS[alias] | options for alias in ROWS}
    ):
        for using in ROWS:
            with db_lock("lease", using=using) as hold, hold.atomic():
                note(using, "lease")
            with transaction.atomic(), db_lock("transaction", using=using) as hold:
                assert hold.scope == "transaction"
            with db_rwlock("shared", using=using).read():
                note(using, "shared")
            with db_lock("one", "other", using=using):
                note(using, "other")
        history.flush()
    names |= {record.holder for record in HoldRecord.objects.all()}
    waited = []

    def wait():
        with db_lock("stock:7"):
            waited.append(db_lock("stock:7").holder().holder)
        connection.close()

    waiter = threading.Thread(target=wait, name=NAME, daemon=True)
    with db_lock("stock:7") as hold:
        waiter.start()
        eventually(lambda: hold.queue_length() == 1)
    waiter.join(30)
    assert waited
    return {holder.split(":", 2)[2] for holder in [*names, *waited]}


def ask_for_a_key_that_cannot_be_stored(pipe, key):
    """Return the error messages and the log messages."""
    refused, logged = [], []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("dlocks").addHandler(handler)
    with transaction.atomic():
        for scope in "lease", "transaction":
            for lock in (
                db_lock(key, scope=scope),
                db_lock("other", key, scope=scope),
                db_rwlock(key).read(),
            ):
                try:
                    lock.acquire()
                except ValueError as error:
                    refused.append(str(error))
        # The caller's transaction goes on.
        with db_lock("stock:7") as hold:
            assert hold.held
    return refused, logged


@pytest.mark.engine("postgresql", "mariadb")
def test_a_thread_may_have_any_name_in_any_database(in_database):
    """It can wait for a lock too. Its name is shown with escapes."""
    for charset, letters in CHARSETS.items():
        assert in_database(names_of_holders, charset) == {SHOWN[letters]}, charset


@pytest.mark.engine("mariadb")
@for_each("charset", {"utf8mb3": RUSSIAN, "latin1": NONE}.items())
def test_a_connection_may_have_any_charset(charset, over_connection):
    """It limits the characters that can be sent. Names are shown with escapes."""
    name, letters = charset
    HoldRecord.objects.all().delete()
    assert over_connection(names_of_holders, name) == {SHOWN[letters]}


@pytest.mark.engine("postgresql", "mariadb", "mysql")
def test_a_key_that_cannot_be_stored_is_refused(in_database, over_connection):
    """It is never altered. The error says what to do. The transaction goes on."""
    key, ask = "склад:🔒", ask_for_a_key_that_cannot_be_stored
    refused, logged = (
        in_database(ask, "LATIN1", key)
        if connection.vendor == "postgresql"
        else over_connection(ask, "utf8mb3", key)
    )
    assert len(refused) == 6
    for message in refused:
        assert message.startswith(
            f"The key {key!r} cannot be stored on database 'default'"
        )
        assert "user_key()" in message
    assert logged == []


def keys_of_the_tables(pipe, key):
    """Hold a key and share it, with a history, and return the keys in the tables."""
    options = settings.DLOCKS["default"] | {"OPTIONS": {"history": True}}
    with override_settings(DLOCKS={"default": options}):
        db_lock(key).acquire().release()
        with db_rwlock(key).read():
            keys = [*LockClaim.objects.all(), *ResourceLock.objects.all()]
        history.flush()
    return {one.key_resource for one in (*keys, *HoldRecord.objects.all())}


@pytest.mark.engine("mariadb", "mysql")
def test_a_server_with_compact_rows_stores_the_longest_keys(in_database):
    """The migration states the row format, whose indexes have room for them."""
    key, printed = "🔒" * 255, StringIO()
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@GLOBAL.innodb_default_row_format")
        (usual,) = cursor.fetchone()
        cursor.execute("SET GLOBAL innodb_default_row_format = compact")
        try:
            found = in_database(keys_of_the_tables, "utf8mb4", key)
        finally:
            cursor.execute(f"SET GLOBAL innodb_default_row_format = {usual}")
    assert found == {key}
    call_command("sqlmigrate", "dlocks", "0001", stdout=printed)
    assert printed.getvalue().count(" ROW_FORMAT=DYNAMIC;") == 3
