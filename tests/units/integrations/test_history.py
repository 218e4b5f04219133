"""How records are buffered, written and read."""

from __future__ import annotations

import pytest
from django.db import connection, connections
from django.db.utils import DataError, OperationalError
from django.test import TestCase
from django.test.utils import CaptureQueriesContext

from dlocks import LockBackendError, db_lock, shutdown
from dlocks.testing import undo_shutdown
from tests import rows
from tests.for_each import for_each
from tests.internals import (
    HistoryTable,
    HoldRecord,
    backends,
    history,
    keeper,
    requests,
)
from tests.written import nothing_is_left, records

__all__ = ["nothing_is_left"]

pytestmark = [
    pytest.mark.front,
    pytest.mark.django_db(transaction=True),
]


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
    until(lambda: not any(one.connected for one in keeper._workers.by_server.values()))


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
    monkeypatch.setattr(history, "RETRY_AFTER", 3600)
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


def test_a_shutdown_within_a_shutdown_loses_no_record(monkeypatch, threads):
    """A signal handler may call it during a write, as at a second SIGTERM."""
    monkeypatch.setattr(history, "WRITE_EVERY", 3600)
    remember, handled = HistoryTable.remember, []

    def interrupted(*arguments):
        if not handled:
            handled.append(True)
            shutdown()
        return remember(*arguments)

    def work():
        shutdown()
        connections.close_all()

    monkeypatch.setattr(HistoryTable, "remember", interrupted)
    for key in ("a", "b"):
        with db_lock(key, using="recorded"):
            pass
    thread = threads(work)
    thread.join(10)
    undo_shutdown()
    assert not thread.is_alive()
    assert [record.key_resource for record in records()] == ["a", "b"]


def test_a_shutdown_within_a_request_loses_no_record(monkeypatch):
    """Nothing can be sent there. The records stay for a later write."""
    monkeypatch.setattr(history, "WRITE_EVERY", 3600)
    with db_lock("a", using="recorded"):
        pass
    requests.request(shutdown)
    undo_shutdown()
    history.flush()
    assert len(records()) == 1


def test_the_number_of_waiting_records_is_limited(monkeypatch, caplog):
    """Beyond the limit holds are not recorded, with one warning."""
    monkeypatch.setattr(history, "MAX_BUFFERED", 2)
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


def test_records_of_tests_are_not_written_to_another_database(monkeypatch):
    """A hold of the test database is not recorded in the project's database.

    The alias names that one after the tests.
    """
    monkeypatch.setattr(history, "WRITE_EVERY", 3600)
    with db_lock("stock:7", using="recorded"):
        pass
    (buffer,) = [buffer for buffer in history._buffers.values() if buffer._records]
    settings = connections["default"].settings_dict
    sent = []
    with monkeypatch.context() as patch:
        patch.setattr(HistoryTable, "remember", lambda *args: sent.append(args))
        patch.setitem(settings, "NAME", "the_real_one")
        buffer.write()
    assert (sent, records()) == ([], [])


class InTestCase(TestCase):
    def test_a_test_case_leaves_no_records(self):
        """A TestCase rolls its holds back, so none is recorded, now or later."""
        with db_lock("stock:7", using="recorded"):
            pass
        assert not any(buffer._records for buffer in history._buffers.values())


@pytest.mark.storage
def test_old_records_are_deleted_in_batches(monkeypatch):
    """One statement deletes at most one batch."""
    monkeypatch.setattr("dlocks.backends.database.history.BATCH", 2)
    for number in range(5):
        rows.ended(str(number), ago=31 * 86400)
    assert list(backends["recorded"].records.delete_older_than(86400)) == [2, 2, 1]


@pytest.mark.storage
@for_each(
    "look",
    [
        lambda: sum(backends["recorded"].records.delete_older_than(86400)),
        lambda: len(HoldRecord.objects.since(60).with_times()),
    ],
)
def test_the_history_is_read_by_its_index(look):
    """An index serves the deletion of old records and the list of recent ones."""
    HoldRecord.objects.all().delete()
    rows.ended("old", ago=31 * 86400)
    rows.ended("now", ago=1)
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
