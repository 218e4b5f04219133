"""The history: one record per ended hold, at no cost for the caller."""

from __future__ import annotations

import threading
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, connections, transaction
from django.db.utils import DataError, OperationalError
from django.test import TestCase
from django.test.utils import CaptureQueriesContext

from dlocks import LockBackendError, LockLost, db_lock, db_rwlock
from dlocks.testing import lose
from tests import jobs, rows
from tests.for_each import for_each
from tests.internals import (
    HistoryTable,
    HoldRecord,
    ResourceLock,
    backends,
    history,
    keeper,
)
from tests.scripts import run_python

pytestmark = [
    pytest.mark.front,
    pytest.mark.django_db(transaction=True),
]


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Write remaining records before and after each test.

    They belong to the database of the test that made them.
    """

    def write():
        history.flush()
        with keeper._mutex:
            # These jobs are for records that are written by now. They could run during
            # the next test.
            keeper._deferred.clear()

    write()
    yield
    write()


def records(**conditions):
    history.flush()
    return list(HoldRecord.objects.filter(**conditions).order_by("id"))


# Records.


@pytest.mark.storage
def test_an_ended_hold_has_a_record(monkeypatch):
    """A record has the key, the holder, both times and the wait.

    The times are those of the database's clock. A long holder is recorded as in the
    row. A hold is released, failed with an error, lost, or handed over.
    """
    with monkeypatch.context() as patch:
        patch.setattr(threading.current_thread(), "name", "x" * 300)
        with db_lock("stock:7", using="recorded") as hold:
            pass
    (one,) = records()
    assert (one.key_resource, one.token) == ("stock:7", hold.token)
    assert one.holder == ResourceLock.objects.get().holder
    assert len(one.holder) == 255
    found = one.owner_ip, one.scope, one.shared, one.waited
    assert found == (hold.claim.owner_ip, "L", False, 0)
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {backends['recorded'].dialect.ticks}")
        now = cursor.fetchone()[0] / 1e6
    begin, end = one.begin_time.timestamp(), one.end_time.timestamp()
    assert now - 10 < begin <= end < now + 0.1
    with pytest.raises(ZeroDivisionError), db_lock("failed", using="recorded"):
        1 / 0  # noqa: B018
    with pytest.raises(LockLost), db_lock("lost", using="recorded"):
        lose("lost", using="recorded")
    db_lock("given", using="recorded").acquire().detach()
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        with db_lock("inside", using="recorded"):
            1 / 0  # noqa: B018
    endings = {}
    for one in records():
        endings[one.key_resource] = one.get_ending_display(), one.scope
    assert endings == {
        "stock:7": ("released", "L"), "failed": ("failed", "L"), "lost": ("lost", "L"),
        "given": ("handed over", "L"), "inside": ("failed", "T"),
    }  # fmt: skip
    backends["recorded"].clear("given", rows.now("given").version)


@pytest.mark.storage
def test_shared_holds_several_keys_and_waits_are_recorded(workers, until):
    """Each shared hold and each of several keys has its own record.

    The record of a waiter has the duration of its wait.
    """
    with (
        db_rwlock("shared", using="recorded").read(),
        db_lock("a", "b", using="recorded"),
    ):
        pass
    (worker,) = workers(1)
    with db_lock("busy", using="recorded"):
        worker.start(jobs.wait_for, "busy", using="recorded")
        worker.hear()
        until(lambda: backends["recorded"].waiting("busy"))
    worker.hear()
    worker.call(jobs.flush_history)
    found = {(one.key_resource, one.shared): one.token for one in records(waited=0)}
    assert set(found) == {("shared", True), ("a", False), ("b", False), ("busy", False)}
    (waited,) = records(waited__gt=0)
    assert waited.key_resource == "busy"
    assert waited.token > found["busy", False]


# Cost.


def test_the_history_costs_the_caller_no_statement():
    """The caller sends one statement to acquire and one to release.

    This does not depend on the history. Without the option nothing is recorded, and
    re-entering adds no record.
    """
    with db_lock("stock:8"), db_lock("stock:9", using="memory"):
        pass
    lock = db_lock("stock:7", using="recorded")
    with lock, lock:
        pass
    assert [record.key_resource for record in records()] == ["stock:7"]
    with CaptureQueriesContext(connection) as queries:
        with lock:
            pass
    assert len(queries) == 2, queries.captured_queries
    with CaptureQueriesContext(connection) as queries:
        with transaction.atomic(), lock:
            pass
    assert not [query for query in queries if "holdrecord" in query["sql"]]
    assert len(records()) == 3


@pytest.mark.storage
def test_many_records_are_written_in_one_statement(monkeypatch, until):
    """They are written once, even if the reply to the statement was lost.

    The keeper writes them automatically, and closes its connection.
    """
    monkeypatch.setattr(history, "WRITE_EVERY", 3600)
    sent, remember = [], HistoryTable.remember

    def twice(self, batch, now):
        sent.append(len(batch))
        remember(self, batch, now)
        remember(self, batch, now)

    monkeypatch.setattr(HistoryTable, "remember", twice)
    for number in range(30):
        with db_lock(f"stock:{number}", using="recorded"):
            pass
    assert len(records()) == 30
    assert sent == [30]
    monkeypatch.setattr(history, "WRITE_EVERY", 0.01)
    with db_lock("stock:30", using="recorded"):
        pass
    until(HoldRecord.objects.filter(key_resource="stock:30").exists)
    until(lambda: not keeper._connected)


# Failures.


class Down:
    """A database that refuses writes while ``down`` is true."""

    def __init__(self, monkeypatch, cause):
        self.cause, self.tries, self.down = cause, 0, True
        remember = HistoryTable.remember

        def fail(backend, batch, now):
            if not self.down:
                return remember(backend, batch, now)
            self.tries += 1
            raise LockBackendError("the database is away") from self.cause

        monkeypatch.setattr(HistoryTable, "remember", fail)


@pytest.mark.storage
def test_records_wait_for_a_database_that_is_down(monkeypatch, caplog):
    """Locks work, one warning is logged, and the records are written later.

    A permanent error loses its batch and no other.
    """
    monkeypatch.setattr(history, "WRITE_EVERY", 3600)
    monkeypatch.setattr(history, "TRY_AGAIN", 3600)
    down = Down(monkeypatch, OperationalError("away"))
    for _ in range(3):
        with db_lock("stock:7", using="recorded"):
            pass
        history.flush()
    assert down.tries == 3
    assert [record.message for record in caplog.records] == [
        "The history could not be written: the database is away"
    ]
    down.down = False
    assert len(records()) == 3
    tokens = [record.token for record in records()]
    assert tokens == sorted(tokens)
    down.down, down.cause = True, DataError("refused")
    with db_lock("a", using="recorded"):
        pass
    history.flush()
    down.down = False
    with db_lock("b", using="recorded"):
        pass
    assert [record.key_resource for record in records()] == ["stock:7"] * 3 + ["b"]


def test_the_number_of_waiting_records_is_limited(monkeypatch, caplog):
    """Beyond the limit holds are not recorded, with one warning."""
    monkeypatch.setattr(history, "KEPT", 2)
    down = Down(monkeypatch, OperationalError("away"))
    for _ in range(5):
        with db_lock("stock:7", using="recorded"):
            pass
    history.flush()
    assert sorted(caplog.messages) == [
        "The history could not be written: the database is away",
        "The history of DLOCKS['recorded'] drops holds: 2 are unwritten",
    ]
    down.down = False
    assert len(records()) == 2


SCRIPT = """
import django, os, sys
django.setup()
for case in ("exit", "kill"):
    if not os.fork():
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    sys.exit()
from dlocks import db_lock, history
with db_lock(f"ended {case}", using="recorded"):
    pass
left = db_lock(f"left {case}", using="recorded").acquire()
if case == "kill":
    history.flush()
    os.kill(os.getpid(), 9)
if os.fork() == 0:
    history.flush()
    os._exit(0)
os.wait()
"""


def test_a_process_writes_its_remaining_records_at_exit():
    """At a normal exit no record is lost, not even that of the last hold.

    A fork does not write the records of its parent. A killed process loses only its
    last batch.
    """
    done = run_python(
        "-c", SCRIPT, DJANGO_SETTINGS_MODULE="tests.settings",
        warnings="ignore:This process:DeprecationWarning",
    )  # fmt: skip
    assert done.stdout.split() == ["0", "-9"]
    # The only warning is that of the hold that was left.
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("'left exit' was never released by")
    endings = [(record.key_resource, record.ending) for record in records()]
    assert endings == [("ended exit", "R"), ("left exit", "F"), ("ended kill", "R")]


def test_records_of_tests_are_not_written_to_another_database(monkeypatch):
    """A hold of the test database is not recorded in the project's database.

    The alias names that one after the tests.
    """
    monkeypatch.setattr(history, "WRITE_EVERY", 3600)
    with db_lock("stock:7", using="recorded"):
        pass
    (book,) = [book for book in history._books.values() if book._notes]
    settings = connections["default"].settings_dict
    sent = []
    with monkeypatch.context() as patch:
        patch.setattr(HistoryTable, "remember", lambda *args: sent.append(args))
        patch.setitem(settings, "NAME", "the_real_one")
        book.write()
    assert (sent, records()) == ([], [])


class InTestCase(TestCase):
    def test_a_test_case_leaves_no_records(self):
        """A TestCase rolls its holds back, so none is recorded, now or later."""
        with db_lock("stock:7", using="recorded"):
            pass
        assert not any(book._notes for book in history._books.values())


# Retention.


def ended(key, **ago):
    with db_lock(key, using="recorded"):
        pass
    history.flush()
    changed = HoldRecord.objects.filter(key_resource=key)
    end = changed.get().end_time - timedelta(**ago)
    text = end.strftime("%Y-%m-%d %H:%M:%S.%f")
    text += "+00" if connection.vendor == "postgresql" else ""
    sql = "UPDATE dlocks_holdrecord SET end_time = %s WHERE key_resource = %s"
    with connection.cursor() as cursor:
        cursor.execute(sql, [text, key])


def reap(*arguments):
    out = StringIO()
    call_command("reap_locks", *arguments, "--using", "recorded", stdout=out)
    return out.getvalue().strip()


@pytest.mark.storage
def test_old_records_are_deleted(monkeypatch):
    """``reap_locks`` deletes records after 30 days, or after a given time.

    One statement deletes at most one batch.
    """
    ended("old", days=31)
    ended("recent", days=29)
    ended("now")
    dry = "0 stale locks would be cleared, 1 record of the history would be deleted."
    assert reap("--dry-run") == dry
    assert reap() == "0 stale locks cleared, 1 record of the history deleted."
    assert [record.key_resource for record in records()] == ["recent", "now"]
    assert reap("--history-for", "12h").endswith("1 record of the history deleted.")
    assert [record.key_resource for record in records()] == ["now"]
    with pytest.raises(CommandError, match="--history-for takes a duration such as"):
        reap("--history-for", "long")
    HoldRecord.objects.all().delete()
    monkeypatch.setattr("dlocks.backends.database.history.BATCH", 2)
    for number in range(5):
        ended(str(number), days=31)
    assert list(backends["recorded"].delete_older_than(86400)) == [2, 2, 1]


@pytest.mark.storage
@for_each(
    "look",
    [
        lambda: sum(backends["recorded"].delete_older_than(86400)),
        lambda: len(HoldRecord.objects.since(60).with_times()),
    ],
)
def test_the_history_is_read_by_its_index(look):
    """An index serves the deletion of old records and the list of recent ones."""
    HoldRecord.objects.all().delete()
    ended("old", days=31)
    ended("now")
    with CaptureQueriesContext(connection) as queries:
        assert look() == 1
    look = queries[0]["sql"]
    explain = {
        "sqlite": "EXPLAIN QUERY PLAN",
        "postgresql": "EXPLAIN",
        # MySQL may prefer to scan two rows. The traditional format also names the
        # indexes that could serve.
        "mysql": "EXPLAIN FORMAT=TRADITIONAL",
    }[connection.vendor]
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SET enable_seqscan = off")
        try:
            cursor.execute(f"{explain} {look}")
            plan = str(cursor.fetchall())
        finally:
            if connection.vendor == "postgresql":
                cursor.execute("RESET enable_seqscan")
    assert "dlocks_record_end" in plan, plan
