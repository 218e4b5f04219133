"""What is promised about the history: a row for each hold that ended, and nothing of it on the caller's way."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
from datetime import timedelta
from io import StringIO
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import connection, connections, transaction
from django.db.utils import DataError, OperationalError
from django.test import TestCase
from django.test.utils import CaptureQueriesContext

from dlocks import LockLost, db_lock, db_rwlock, history
from dlocks.backends.database.records import Records
from dlocks.conf import backends
from dlocks.exceptions import LockBackendError
from dlocks.keeper import keeper
from dlocks.models import HoldRecord, ResourceLock
from dlocks.testing import lose
from tests import jobs, rows

pytestmark = pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"])

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def nothing_is_left():
    """What a test left to be written is written in its own database, and in its own time."""

    def write():
        history.flush()
        with keeper._mutex:
            # Due for what has been written by now, and perhaps in the middle of the next test.
            keeper._chores.clear()

    write()
    yield
    write()


def records(**conditions):
    history.flush()
    return list(HoldRecord.objects.filter(**conditions).order_by("id"))


# What is recorded.


def test_a_hold_that_ended_is_a_row(elsewhere):
    """Who held which key, from when to when by the database's clock, and after what wait."""
    with db_lock("stock:7", using="recorded") as hold:
        pass
    (record,) = records()
    assert (record.key_resource, record.token, record.holder) == ("stock:7", hold.token, hold.claim.holder)
    assert (record.owner_ip, record.scope, record.shared, record.waited) == (hold.claim.owner_ip, "L", False, 0)
    assert record.get_ending_display() == "released"
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {backends['recorded'].dialect.ticks}")
        now = cursor.fetchone()[0] / 1e6
    assert now - 10 < record.begin_time.timestamp() <= record.end_time.timestamp() < now + 0.1


def test_a_holder_with_a_long_name_is_recorded_as_the_row_has_it(monkeypatch):
    """The thread that runs a command is called as that is."""
    monkeypatch.setattr(threading.current_thread(), "name", "x" * 300)
    with db_lock("stock:7", using="recorded"):
        pass
    (record,) = records()
    assert record.holder == ResourceLock.objects.get().holder
    assert len(record.holder) == 255


def test_how_it_ended_is_told():
    """Released, failed with an error, lost, or handed over."""
    with pytest.raises(ZeroDivisionError):
        with db_lock("failed", using="recorded"):
            1 / 0  # noqa: B018
    with pytest.raises(LockLost):
        with db_lock("lost", using="recorded"):
            lose("lost", using="recorded")
    db_lock("given", using="recorded").acquire().detach()
    with pytest.raises(ZeroDivisionError):
        with transaction.atomic(), db_lock("inside", using="recorded"):
            1 / 0  # noqa: B018
    endings = {record.key_resource: (record.get_ending_display(), record.scope) for record in records()}
    assert endings == {
        "failed": ("failed", "L"),
        "lost": ("lost", "L"),
        "given": ("handed over", "L"),
        "inside": ("failed", "T"),
    }
    backends["recorded"].clear("given", rows.now("given").version)


def test_shares_keys_and_waits_are_told(workers, until):
    """Each share and each of several keys is a row of its own, and who had to wait has waited."""
    with db_rwlock("shared", using="recorded").read(), db_lock("a", "b", using="recorded"):
        pass
    (worker,) = workers(1)
    with db_lock("busy", using="recorded"):
        worker.start(jobs.wait_for, "busy", using="recorded")
        worker.hear()
        until(lambda: backends["recorded"].waiting("busy"))
    worker.hear()
    worker.call(jobs.flush_history)
    found = {(record.key_resource, record.shared): record for record in records(waited=0)}
    assert set(found) == {("shared", True), ("a", False), ("b", False), ("busy", False)}
    (waited,) = records(waited__gt=0)
    assert (waited.key_resource, waited.token > found["busy", False].token) == ("busy", True)


def test_only_what_is_asked_for_is_recorded():
    """Without the option nothing is recorded, and an entry into a hold is no hold of its own."""
    with db_lock("stock:7"), db_lock("stock:8", using="memory"):
        pass
    lock = db_lock("stock:9", using="recorded")
    with lock, lock:
        pass
    assert [record.key_resource for record in records()] == ["stock:9"]


def test_the_option_is_true_or_false(settings):
    """A mistake in the settings is told by name."""
    settings.DLOCKS = {
        "default": {"BACKEND": "dlocks.backends.database.PessimisticBackend", "OPTIONS": {"history": "yes"}}
    }
    with pytest.raises(ImproperlyConfigured, match="history must be True or False, not 'yes'"):
        backends["default"]


# What it costs.


def test_the_caller_pays_no_statement_for_it():
    """One statement to acquire and one to release, on the caller's connection, with and without."""
    lock = db_lock("stock:7", using="recorded")
    with lock:
        pass
    with CaptureQueriesContext(connection) as queries:
        with lock:
            pass
    assert len(queries) == 2, queries.captured_queries
    with CaptureQueriesContext(connection) as queries:
        with transaction.atomic(), lock:
            pass
    assert not [query for query in queries if "holdrecord" in query["sql"]]
    assert len(records()) == 3


def test_many_holds_are_one_statement(monkeypatch, django_assert_num_queries):
    """A batch of holds is written at once."""
    monkeypatch.setattr(history, "WRITE_EVERY", 3600)
    sent = []
    remember = Records.remember
    monkeypatch.setattr(
        Records, "remember", lambda self, batch, now: sent.append(len(batch)) or remember(self, batch, now)
    )
    for number in range(30):
        with db_lock(f"stock:{number}", using="recorded"):
            pass
    assert len(records()) == 30
    assert sent == [30]


def test_the_keeper_writes_by_itself_and_leaves_no_connection_open(monkeypatch, until):
    """Nobody has to ask for it, and soon after the connection is closed."""
    monkeypatch.setattr(history, "WRITE_EVERY", 0.01)
    with db_lock("stock:7", using="recorded"):
        pass
    until(HoldRecord.objects.exists)
    until(lambda: not keeper._connected)


def test_it_is_written_once(monkeypatch):
    """A reply that got lost makes no second row."""
    finished = []
    remember = Records.remember

    def twice(self, batch, now):
        finished.append(batch)
        remember(self, batch, now)
        remember(self, batch, now)

    monkeypatch.setattr(Records, "remember", twice)
    with db_lock("stock:7", using="recorded"):
        pass
    assert len(records()) == 1
    assert finished


# What may go wrong.


class Down:
    """A database that cannot be written to, for as long as it is told to be."""

    def __init__(self, monkeypatch, cause):
        self.cause, self.tries, self.down = cause, 0, True
        remember = Records.remember

        def fail(backend, batch, now):
            if not self.down:
                return remember(backend, batch, now)
            self.tries += 1
            raise LockBackendError("the database is away") from self.cause

        monkeypatch.setattr(Records, "remember", fail)


def test_a_database_that_is_down_is_waited_for(monkeypatch, caplog):
    """Holds go on as ever, one warning is logged, and what ended meanwhile is written when the database is back."""
    monkeypatch.setattr(history, "WRITE_EVERY", 3600)
    monkeypatch.setattr(history, "TRY_AGAIN", 3600)
    down = Down(monkeypatch, OperationalError("away"))
    for _ in range(3):
        with db_lock("stock:7", using="recorded"):
            pass
        history.flush()
    assert down.tries == 3
    assert [record.message for record in caplog.records] == ["The history could not be written: the database is away"]
    down.down = False
    assert len(records()) == 3
    tokens = [record.token for record in records()]
    assert tokens == sorted(tokens)


def test_what_is_kept_meanwhile_is_bounded(monkeypatch, caplog):
    """Beyond the bound holds are left out, with one warning."""
    monkeypatch.setattr(history, "KEPT", 2)
    down = Down(monkeypatch, OperationalError("away"))
    for _ in range(5):
        with db_lock("stock:7", using="recorded"):
            pass
    history.flush()
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert sorted(told) == [
        "The history could not be written: the database is away",
        "The history of DLOCKS['recorded'] leaves holds out: 2 wait",
    ]
    down.down = False
    assert len(records()) == 2


def test_what_the_database_refuses_is_not_tried_for_ever(monkeypatch):
    """An error that time does not mend costs its batch, and no other."""
    down = Down(monkeypatch, DataError("refused"))
    with db_lock("a", using="recorded"):
        pass
    history.flush()
    down.down = False
    with db_lock("b", using="recorded"):
        pass
    assert [record.key_resource for record in records()] == ["b"]


SCRIPT = """
import django, os, sys
django.setup()
from dlocks import db_lock
with db_lock("ended", using="recorded"):
    pass
left = db_lock("left", using="recorded").acquire()
"""


def script(text):
    """Run a program on this test's database; its exit status."""
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", textwrap.dedent(text)],
        env=environment,
        timeout=60,
        check=False,
        capture_output=True,
    )
    assert not done.stderr, done.stderr.decode()
    return done.returncode


def test_a_process_that_ends_writes_what_is_left():
    """At a normal exit nothing is lost, not even the hold that ends with the process."""
    assert script(SCRIPT) == 0
    assert {record.key_resource: record.ending for record in records()} == {"ended": "R", "left": "F"}


def test_a_process_that_is_killed_loses_its_last_batch_only():
    """What was written stays written."""
    flushed = "\nfrom dlocks import history; history.flush()"
    assert script(SCRIPT + flushed + "\nos.kill(os.getpid(), 9)") == -9
    assert [record.key_resource for record in records()] == ["ended"]


def test_a_fork_writes_nothing_of_its_parent():
    """The parent's holds are recorded once."""
    fork = "\nif os.fork() == 0:\n    from dlocks import history; history.flush(); os._exit(0)\nos.wait()"
    assert script(SCRIPT + fork) == 0
    assert [record.key_resource for record in records()] == ["ended", "left"]


def test_the_end_of_the_tests_is_not_written_into_another_database(monkeypatch):
    """A hold of the test database is not recorded in the one that the alias names afterwards."""
    monkeypatch.setattr(history, "WRITE_EVERY", 3600)
    with db_lock("stock:7", using="recorded"):
        pass
    (book,) = [book for book in history._books.values() if book._notes]
    settings = connections["default"].settings_dict
    with monkeypatch.context() as patch:
        sent = []
        patch.setattr(Records, "remember", lambda self, batch, now: sent.append(batch))
        patch.setitem(settings, "NAME", "the_real_one")
        book.write()
    assert (sent, records()) == ([], [])


class InTestCase(TestCase):
    def test_a_test_case_leaves_nothing_behind(self):
        """Everything in it is rolled back, so nothing of it is recorded, at once or later."""
        with db_lock("stock:7", using="recorded"):
            pass
        assert not any(book._notes for book in history._books.values())


# How long it is kept.


def ended(key, **ago):
    with db_lock(key, using="recorded"):
        pass
    history.flush()
    changed = HoldRecord.objects.filter(key_resource=key)
    end = changed.get().end_time - timedelta(**ago)
    with connection.cursor() as cursor:
        text = end.strftime("%Y-%m-%d %H:%M:%S.%f") + ("+00" if connection.vendor == "postgresql" else "")
        cursor.execute("UPDATE dlocks_holdrecord SET end_time = %s WHERE key_resource = %s", [text, key])


def reap(*arguments):
    out = StringIO()
    call_command("reap_locks", *arguments, "--using", "recorded", stdout=out)
    return out.getvalue().strip()


def test_the_history_is_bounded_by_age():
    """``reap_locks`` forgets what ended long ago: 30 days, or as long as I say."""
    ended("old", days=31)
    ended("recent", days=29)
    ended("now")
    assert reap("--dry-run") == "0 stale locks would be made free, 1 record of the history would be deleted."
    assert reap() == "0 stale locks made free, 1 record of the history deleted."
    assert [record.key_resource for record in records()] == ["recent", "now"]
    assert reap("--history-for", "12h").endswith("1 record of the history deleted.")
    assert [record.key_resource for record in records()] == ["now"]
    with pytest.raises(CommandError, match="--history-for takes a duration such as"):
        reap("--history-for", "long")


def test_it_is_forgotten_by_batches(monkeypatch):
    """However much there is, one statement deletes only so much."""
    monkeypatch.setattr("dlocks.backends.database.records.BATCH", 2)
    for number in range(5):
        ended(str(number), days=31)
    assert list(backends["recorded"].forget(86400)) == [2, 2, 1]


@pytest.mark.parametrize(
    "look", [lambda: sum(backends["recorded"].forget(86400)), lambda: len(HoldRecord.objects.since(60).with_times())]
)
def test_a_large_history_is_not_read_from_end_to_end(look):
    """To forget its oldest part, and to look at its latest, there is an index."""
    ended("old", days=31)
    ended("now")
    with CaptureQueriesContext(connection) as queries:
        assert look() == 1
    look = queries[0]["sql"]
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SET enable_seqscan = off")
        try:
            cursor.execute(("EXPLAIN QUERY PLAN " if connection.vendor == "sqlite" else "EXPLAIN ") + look)
            plan = str(cursor.fetchall())
        finally:
            if connection.vendor == "postgresql":
                cursor.execute("RESET enable_seqscan")
    assert "dlocks_record_end" in plan, plan
