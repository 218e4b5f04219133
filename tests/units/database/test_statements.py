"""Statements and requests that only internal names reach: costs, errors, interrupts."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import sys
import threading
import time
import unittest
from functools import partial

import pytest
from django.db import connection, connections, transaction
from django.test import SimpleTestCase

from dlocks import LockTimeout, db_lock
from tests import rows
from tests.internals import (
    PREPARED_AT,
    History,
    LockClaim,
    Log,
    ResourceLock,
    _with_limit,
    backends,
    by_sqlite3,
    is_instrumented,
    keeper,
    signals,
)
from tests.models import Counter
from tests.timing import in_time

pytestmark = pytest.mark.django_db(transaction=True)
POSTGRESQL = pytest.mark.engine("postgresql")


def use(times):
    for _ in range(times):
        with db_lock("stock:7"):
            pass


def test_a_test_case_of_django_does_not_count_as_an_instrument():
    """A SimpleTestCase leaves the connection with a method that it does not need."""
    case = type("Case", (SimpleTestCase,), {"test": lambda self: None})("test")
    outcome = unittest.TestResult()
    unittest.TestSuite([case]).run(outcome)
    assert outcome.wasSuccessful()
    assert "cursor" in vars(connections["default"])
    assert not is_instrumented(connections["default"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections["default"], "cursor", lambda: None)
        assert is_instrumented(connections["default"])


@POSTGRESQL
def test_a_lost_race_in_a_transaction_locks_no_row(threads, until, monkeypatch):
    """The winner renews and releases its lease while the loser's transaction goes on.

    The loser's statement begins first. It locks the row, and then finds it changed.
    """
    with db_lock("stock:7"):
        pass
    backend, refused, over = backends["default"], threading.Event(), threading.Event()

    def write_late(self, table, assignments, where):
        return self.update(
            table, assignments, f"{where} AND pg_advisory_xact_lock(7) IS NOT NULL"
        )

    monkeypatch.setattr(type(backend.dialect), "write_or_leave", write_late)
    monkeypatch.setattr(backend, "_grants", {})

    @transaction.atomic
    def lose():
        with pytest.raises(LockTimeout):
            db_lock("stock:7", timeout=0).acquire()
        refused.set()
        assert over.wait(30)

    with connection.cursor() as cursor:

        def waits():
            cursor.execute(
                "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            )
            return cursor.rowcount

        cursor.execute("SELECT pg_advisory_lock(7)")
        threads(lose)
        until(waits)
        hold = db_lock("stock:7").acquire()
        cursor.execute("SELECT pg_advisory_unlock(7)")
    assert refused.wait(30)
    hold.renew()
    hold.release()
    over.set()


@pytest.fixture
def new_session():
    use(1)
    connection.close()
    yield
    connection.close()


@POSTGRESQL
@pytest.mark.usefixtures("new_session")
def test_an_interrupt_does_not_wait_for_a_silent_server(monkeypatch, until):
    """The wait for the server is limited, and another Ctrl-C ends it too."""
    backend, main = backends["default"], threading.main_thread().ident
    ctrl_c = partial(signal.pthread_kill, main, signal.SIGINT)
    for patience, again in ((0.5, False), (60.0, True)):
        monkeypatch.setattr("dlocks.sql.prepared.REPLY_TIMEOUT", patience)
        for _ in range(PREPARED_AT):
            backend._rows("SELECT 1", {})
        pgconn, server = connection.connection.pgconn, connection.connection.info
        pid = server.backend_pid

        def interrupt(pgconn=pgconn, again=again):
            until(lambda: pgconn.transaction_status == 1)
            time.sleep(0.05)
            ctrl_c()
            time.sleep(0.5)
            if again:
                ctrl_c()

        os.kill(pid, signal.SIGSTOP)
        thread = threading.Thread(target=interrupt)
        thread.start()
        began = time.monotonic()
        try:
            with pytest.raises(KeyboardInterrupt):
                backend._rows("SELECT 1", {})
        finally:
            thread.join()
            os.kill(pid, signal.SIGCONT)
        in_time(time.monotonic() - began, 10.0)
        use(1)


@pytest.mark.engine("sqlite")
def test_an_interrupt_leaves_no_unfinished_statement(in_other_thread):
    """An interrupt does not leave the write lock of SQLite behind.

    A caller may keep the exception, and with it the frames and their cursors.
    """
    backend, code, kept = backends["default"], by_sqlite3.__code__, []
    with db_lock("stock:7"):
        pass
    sql = backend._text(
        "UPDATE {locks} SET holder = 'me' WHERE key_resource = %(key)s RETURNING"
        " version"
    )

    def interrupt_at(number):
        def trace(frame, event, arg):
            nonlocal number
            if frame.f_code is not code:
                return None
            number -= event == "line"
            if number < 0:
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            backend._rows(sql, {"key": "stock:7"})
        except KeyboardInterrupt as interrupt:
            kept.append(interrupt)
            return True
        finally:
            sys.settrace(None)
        return False

    while interrupt_at(len(kept)):
        in_other_thread(
            ResourceLock.objects.filter(pk="stock:7").update, holder="another"
        )
    assert len(kept) > 3


@pytest.mark.engine("sqlite")
def test_a_release_is_flushed_with_a_rollback_journal(tmp_path):
    """With a rollback journal the database file could be corrupted by a crash.

    Its integrity depends on the order of the flushes. A file that cannot be read is
    reported by the statement itself, which is retried.
    """
    raw = sqlite3.connect(tmp_path / "of_its_own.sqlite3", isolation_level=None)
    raw.execute("PRAGMA journal_mode = delete")
    raw.execute("PRAGMA synchronous = FULL")
    with _with_limit(raw, "synchronous", 1, unless=sqlite3.Error):
        assert raw.execute("PRAGMA synchronous").fetchall() == [(2,)]
    raw.close()
    path = tmp_path / "broken.sqlite3"
    path.write_bytes(b"no database " * 1000)
    raw = sqlite3.connect(path, isolation_level=None)
    with (
        _with_limit(raw, "synchronous", 1, unless=sqlite3.Error),
        pytest.raises(sqlite3.DatabaseError, match="not a"),
    ):
        raw.execute("SELECT * FROM sqlite_master")
    raw.close()


def test_a_lease_that_cannot_be_written_is_not_prolonged(monkeypatch):
    """Other processes see the row unchanged, and count from then."""
    backend = backends["watching"]
    for shared in False, True:
        lock = db_lock("stock:7", using="watching", shared=shared)
        with lock as hold, monkeypatch.context() as patch:
            patch.setattr(backend, "_count", lambda *args, locked=None: locked())
            left = backend.renew([hold.claim])
            patch.undo()
            assert left == {hold.claim.owner: 0.0}


@pytest.mark.engine("postgresql", "mariadb", "mysql")
def test_a_statement_that_is_only_slow_is_not_cancelled(monkeypatch):
    """A commit may wait for a standby.

    Only a statement that waits for a locked table is cancelled.
    """
    monkeypatch.setattr("dlocks.backends.database.watchdog.LOCK_WAIT_LIMIT", 0.05)
    sleep = "pg_sleep(0.6)" if connection.vendor == "postgresql" else "SLEEP(0.6)"
    found = backends["default"]._rows(f"SELECT {sleep}, 'dlocks_resourcelock'", {})
    assert len(found) == 1


@pytest.mark.engine("postgresql", "sqlite")
def test_a_lease_that_the_commit_renews_is_not_stale(threads, until, monkeypatch):
    """With ``takeover=False``, a transaction that ends just now is no stale holder."""
    inside, end = threading.Event(), threading.Event()
    kind = type(backends["brisk"])
    find = kind.in_transactions

    def hold():
        with db_lock("stock:7", using="brisk", ttl=0.3) as held, held.atomic():
            inside.set()
            assert end.wait(60)

    def find_after_the_end(backend, rows, *others):
        end.set()
        thread.join(60)
        return find(backend, rows, *others)

    thread = threads(hold)
    assert inside.wait(30)
    until(lambda: ResourceLock.objects.by_clock().get().seconds_left < 0)
    monkeypatch.setattr(kind, "in_transactions", find_after_the_end)
    lock = db_lock("stock:7", using="brisk", takeover=False, timeout=30)
    with lock as next_hold:
        assert not next_hold.takeover


@pytest.mark.engine("mariadb")
def test_a_step_that_the_server_rolls_back_runs_again(threads, until):
    """A deadlock of row locks costs a retry, and is no error.

    The step has locked the key and waits for a claim. A transaction does the opposite.
    """
    rows.held("stock:7")
    dead = rows.claim("stock:7", rows.PAST)
    with transaction.atomic(), connection.cursor() as cursor:
        # The server rolls back the transaction that has changed fewer rows.
        Counter.objects.bulk_create(Counter(name=f"{one}") for one in range(100))
        LockClaim.objects.select_for_update().get(pk=dead.pk)
        removal = threads(lambda: backends["default"].take_out("stock:7", dead.pk))

        def waits():
            cursor.execute(
                "SELECT COUNT(*) FROM information_schema.processlist WHERE id <>"
                " CONNECTION_ID() AND info LIKE '%FOR UPDATE WAIT%'"
            )
            return cursor.fetchone()[0]

        until(waits)
        ResourceLock.objects.select_for_update().get(pk="stock:7")
    removal.join(30)
    assert removal.results == [True]
    assert not LockClaim.objects.exists()


@pytest.mark.engine("sqlite")
def test_a_lock_costs_about_a_hundred_python_calls(monkeypatch):
    """A lock costs about a hundred Python calls, without those of its backend.

    It raises no exception of its own. The access to Django's connections is not
    counted: it depends on their number, and asgiref raises an exception for each.

    With a server, each call costs several times as much, because the processor caches
    are cold after the wait.
    """
    # OpenTelemetry is not counted, if it is installed.
    monkeypatch.setattr(
        signals,
        "watchers",
        [one for one in signals.watchers if isinstance(one, (Log, History))],
    )
    lock = db_lock("stock:7", using="dummy")
    with lock:
        pass
    # The keeper waits for an earlier renewal, so the lock need not wake it.
    earlier = db_lock("earlier", using="dummy").acquire()
    keeper.catch_up()
    calls, errors = [], []

    def watch(frame, event, argument):
        frame.f_trace_lines = False
        if re.search("asgiref|django/utils/connection", frame.f_code.co_filename):
            return watch
        if event == "call":
            calls.append(frame.f_code.co_qualname)
        elif event == "exception":
            errors.append((frame.f_code.co_qualname, argument[0]))
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        with lock:
            pass
    finally:
        sys.settrace(before)
        earlier.release()
    assert not errors
    assert len(calls) <= 110, (len(calls), calls)
