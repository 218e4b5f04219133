"""Statements past Django's cursor: their limits, errors and interrupts."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import threading
import time
from functools import partial

import pytest
from django.db import connection, transaction

from dlocks import LockBackendError, LockTimeout, db_lock
from tests.internals import (
    PREPARED_AT,
    STATEMENTS_PREPARED,
    ResourceLock,
    _with_limit,
    backends,
    by_sqlite3,
)
from tests.timing import in_time

pytestmark = pytest.mark.django_db(transaction=True)
POSTGRESQL = pytest.mark.engine("postgresql")


def use(times):
    for _ in range(times):
        with db_lock("stock:7"):
            pass


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


def prepared():
    """Return the prepared statements of this session and their execution counts."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT name, generic_plans + custom_plans FROM pg_prepared_statements"
        )
        return dict(cursor.fetchall())


@POSTGRESQL
@pytest.mark.usefixtures("new_session")
def test_frequent_statements_are_prepared_and_planned_once():
    """A request that acquires a lock once prepares nothing.

    In a transaction nothing is prepared. A statement that the session has forgotten
    raises an error, which would abort the caller's work there.
    """
    for _ in range(PREPARED_AT + 3):
        with transaction.atomic(), db_lock("stock:7"):
            pass
    use(PREPARED_AT - 1)
    assert not prepared()
    use(PREPARED_AT + 10)
    counts = prepared()
    assert len(counts) == 2, "to acquire, to release"
    assert min(counts.values()) > 10


@POSTGRESQL
@pytest.mark.usefixtures("new_session")
def test_the_number_of_prepared_statements_is_limited(monkeypatch):
    """With ``prepare=False``, no statement is prepared.

    With ``spin=0``, a caller sleeps until the server replies.
    """

    def use_often(**options):
        backend = kind("default", **options)
        for _ in range(PREPARED_AT + 3):
            assert backend.acquire(claim)
            assert backend.release(claim)

    kind = type(backends["default"])
    with db_lock("stock:7") as hold:
        claim = hold.claim
    use_often(prepare=False)
    assert not prepared()
    for wrong, error in ({"prepare": "yes"}, TypeError), ({"spin": -1}, ValueError):
        with pytest.raises(error, match=next(iter(wrong))):
            kind("default", **wrong)
    for number in range(STATEMENTS_PREPARED + 20):
        for _ in range(PREPARED_AT + 1):
            backends["default"]._rows(f"SELECT {number}", {})
    assert len(prepared()) == STATEMENTS_PREPARED
    use(5)
    connection.close()
    monkeypatch.setattr("os.sched_yield", lambda: pytest.fail("it polled"))
    use_often(spin=0, listen=False)
    assert prepared()


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


@POSTGRESQL
@pytest.mark.usefixtures("new_session")
def test_prepared_statements_raise_the_same_errors():
    """A statement that the server refuses raises the same error and code.

    It is never reported as a busy key. The same text is accepted.
    """
    use(PREPARED_AT + 3)
    backend, sql = backends["default"], "SELECT length(%(holder)s)"
    for _ in range(PREPARED_AT + 1):
        with pytest.raises(LockBackendError, match="division by zero") as error:
            backend._rows("SELECT 1 / %(number)s", {"number": 0})
        assert error.value.__cause__.__cause__.sqlstate == "22012"
        assert backend._rows(sql, {"holder": "ä'\\ €"}) == [(5,)]
    with pytest.raises(LockBackendError, match="NUL"):
        backend._rows(sql, {"holder": "a\0b"})
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
