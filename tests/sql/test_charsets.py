"""Databases and connections whose character set lacks some characters."""

from __future__ import annotations

import logging
import threading

import pytest
from django.conf import settings
from django.core.management import call_command
from django.db import connection, transaction
from django.test import override_settings

from dlocks import db_lock, db_rwlock
from tests.internals import backends, history
from tests.timing import eventually

pytestmark = [
    pytest.mark.engine("postgresql", "mariadb", "mysql"),
    pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"]),
]

FAMILY = ["default", "optimistic", "insert"]
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

# WIN1251 is PostgreSQL's name. Python has another one.
CHARSETS = {
    "postgresql": {
        "LATIN1": NONE,
        "WIN1251": RUSSIAN,
        "SQL_ASCII": ALL,
    },
    "mysql": {"latin1": ALL, "utf8mb3": ALL},
}.get(connection.vendor, {})


@pytest.fixture
def in_database(doomed):
    """Return a function that runs a job on another character set.

    The job runs in a process of its own. The character set is that of its database or
    of its connection.
    """
    databases = []

    def run(job, database_charset, *args, **options):
        databases.append(name := f"dlocks_{database_charset.lower()}")
        with connection.cursor() as cursor:
            cursor.execute(f"DROP DATABASE IF EXISTS {name}")
            cursor.execute(CREATE[connection.vendor].format(name, database_charset))
        worker = doomed(DLOCKS_TEST_NAME=name)
        worker.call(_prepare, options)
        return worker.call(job, *args)

    yield run
    with connection.cursor() as cursor:
        for name in databases:
            cursor.execute(
                "DROP DATABASE"
                f" {name}{' WITH (FORCE)' if connection.vendor == 'postgresql' else ''}"
            )


def _prepare(pipe, options):
    connection.settings_dict["OPTIONS"] |= options
    call_command("migrate", "dlocks", verbosity=0)
    threading.current_thread().name = NAME


def names_of_holders(pipe):
    """Use every kind of lock, and wait for one.

    Return the names under which this thread, and one that waited, was shown.
    """
    from tests.internals import HoldRecord

    names = set()
    options = {"OPTIONS": {"history": True}}

    def note(using, key):
        names.add(backends[using].holder(key).holder)

    with override_settings(
        DLOCKS={alias: settings.DLOCKS[alias] | options for alias in FAMILY}
    ):
        for using in FAMILY:
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
            waited.append(backends["default"].holder("stock:7").holder)
        connection.close()

    waiter = threading.Thread(target=wait, name=NAME, daemon=True)
    with db_lock("stock:7"):
        waiter.start()
        eventually(lambda: backends["default"].waiting("stock:7") == 1)
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
@pytest.mark.parametrize(("charset", "letters"), CHARSETS.items())
def test_a_thread_may_have_any_name_in_any_database(charset, letters, in_database):
    """A thread whose name the database cannot store acquires every kind of lock.

    It can wait for a lock too. Its name is shown with escapes.
    """
    assert in_database(names_of_holders, charset) == {SHOWN[letters]}


@pytest.mark.engine("mariadb")
@pytest.mark.parametrize(
    ("charset", "letters"),
    {"utf8mb3": RUSSIAN, "latin1": NONE, "cp1251": RUSSIAN}.items(),
)
def test_a_connection_may_have_any_charset(charset, letters, in_database):
    """Every kind of lock works with any ``OPTIONS["charset"]``.

    This option limits the characters that can be sent. A holder's name is shown with
    escapes.
    """
    found = in_database(names_of_holders, "utf8mb4", charset=charset)
    assert found == {SHOWN[letters]}


def test_a_key_that_cannot_be_stored_is_refused(in_database):
    """A key that cannot be stored is refused, and never altered.

    The error says what to do, and the caller's transaction goes on.
    """
    key = "склад:🔒"
    charset, options = (
        ("LATIN1", {})
        if connection.vendor == "postgresql"
        else ("utf8mb4", {"charset": "utf8mb3"})
    )
    refused, logged = in_database(
        ask_for_a_key_that_cannot_be_stored, charset, key, **options
    )
    assert len(refused) == 6
    for message in refused:
        assert message.startswith(
            f"The key {key!r} cannot be stored on database 'default'"
        )
        assert "user_key()" in message
    assert logged == []
