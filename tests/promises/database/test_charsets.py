"""Databases and connections whose character set lacks some characters."""

from __future__ import annotations

import json
import logging
import threading

import pytest
from django.conf import settings
from django.db import connection, transaction
from django.test import override_settings

from dlocks import db_lock, db_rwlock, history
from dlocks.models import HoldRecord
from tests import jobs
from tests.for_each import for_each
from tests.timing import eventually

pytestmark = [
    pytest.mark.engine("postgresql", "mariadb", "mysql"),
    pytest.mark.django_db(transaction=True),
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
    """A thread whose name the database cannot store acquires every kind of lock.

    It can wait for a lock too. Its name is shown with escapes.
    """
    for charset, letters in CHARSETS.items():
        assert in_database(names_of_holders, charset) == {SHOWN[letters]}, charset


@pytest.mark.engine("mariadb")
@for_each("charset", {"utf8mb3": RUSSIAN, "latin1": NONE}.items())
def test_a_connection_may_have_any_charset(charset, over_connection):
    """Every kind of lock works with any ``OPTIONS["charset"]``.

    This option limits the characters that can be sent. A holder's name is shown with
    escapes.
    """
    name, letters = charset
    HoldRecord.objects.all().delete()
    assert over_connection(names_of_holders, name) == {SHOWN[letters]}


def test_a_key_that_cannot_be_stored_is_refused(in_database, over_connection):
    """A key that cannot be stored is refused, and never altered.

    The error says what to do, and the caller's transaction goes on.
    """
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
