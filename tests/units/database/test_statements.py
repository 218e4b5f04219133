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

from dlocks import LockTimeout, db_lock
from tests.internals import (
    PREPARED_AT,
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
