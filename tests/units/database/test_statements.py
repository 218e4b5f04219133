"""Statements and steps that only internal names reach: errors, interrupts, settings."""

from __future__ import annotations

import gc
import re
import sqlite3
import sys
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from django.db import OperationalError, connection, transaction

from dlocks import LockTimeout, db_lock
from tests.internals import (
    History,
    Log,
    ResourceLock,
    RowLockedError,
    Session,
    backends,
    call_as_writer,
    keeper,
    signals,
)

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.engine("postgresql")
def test_a_lost_race_in_a_transaction_locks_no_row(threads, until, monkeypatch):
    """The winner renews and releases its lease while the loser's transaction goes on.

    The loser's statement begins first. It locks the row, and then finds it changed.
    """
    with db_lock("stock:7"):
        pass
    session, refused = backends["default"].session, threading.Event()
    over, engine = threading.Event(), session.engine
    late = engine.update.replace(
        "{condition} FOR UPDATE",
        "{condition} AND pg_advisory_xact_lock(7) IS NOT NULL FOR UPDATE",
    )
    assert late != engine.update

    @transaction.atomic
    def lose():
        with pytest.raises(LockTimeout):
            db_lock("stock:7", timeout=0).acquire()
        refused.set()
        assert over.wait(30)

    with connection.cursor() as cursor, monkeypatch.context() as patch:

        def waits():
            cursor.execute(
                "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            )
            return cursor.rowcount

        cursor.execute("SELECT pg_advisory_lock(7)")
        patch.setitem(vars(session), "engine", replace(engine, update=late))
        session.statement.cache_clear()
        threads(lose)
        until(waits)
        patch.undo()
        session.statement.cache_clear()
        hold = db_lock("stock:7").acquire()
        cursor.execute("SELECT pg_advisory_unlock(7)")
    assert refused.wait(30)
    hold.renew()
    hold.release()
    over.set()


@pytest.mark.engine("sqlite")
def test_an_interrupt_leaves_no_unfinished_statement(in_other_thread):
    """An interrupt does not leave the write lock of SQLite behind.

    A caller may keep the exception, and with it the frames and their cursors.
    """
    session, code, kept = backends["default"].session, Session.execute.__code__, []
    with db_lock("stock:7"):
        pass
    text = (
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
            session.ask(text, {"key": "stock:7"})
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
    path = tmp_path / "of_its_own.sqlite3"
    raw = sqlite3.connect(path, isolation_level=None)
    raw.execute("PRAGMA journal_mode = delete")
    raw.execute("PRAGMA synchronous = FULL")
    here = SimpleNamespace(alias="it", connection=raw, Database=sqlite3)
    ask = partial(raw.execute, "PRAGMA synchronous")
    assert call_as_writer(here, ask, flush=False).fetchall() == [(2,)]
    raw.close()
    path = tmp_path / "broken.sqlite3"
    path.write_bytes(b"no database " * 1000)
    raw = sqlite3.connect(path, isolation_level=None)
    here = SimpleNamespace(alias="it", connection=raw, Database=sqlite3)
    ask = partial(raw.execute, "SELECT * FROM sqlite_master")
    with pytest.raises(sqlite3.DatabaseError, match="not a"):
        call_as_writer(here, ask, flush=False)
    raw.close()


@pytest.mark.engine("sqlite")
def test_the_threads_of_a_process_take_turns_to_write(in_other_thread):
    """A thread that waits for its turn needs no processor time. It waits briefly."""

    def write():
        connection.ensure_connection()
        return call_as_writer(connection, lambda: "written")

    def write_twice():
        # A signal handler may write within a write of its thread.
        assert write() == "written"
        with pytest.raises(sqlite3.OperationalError, match="is locked"):
            in_other_thread(write)

    connection.ensure_connection()
    call_as_writer(connection, write_twice)
    assert in_other_thread(write) == "written"


@pytest.mark.engine("sqlite")
def test_a_step_is_the_writer_from_its_beginning(monkeypatch):
    """A transaction that has only read cannot continue if another one has written.

    The other one is of another program, since threads of this one take turns.
    """
    # To insert the row would be a write.
    db_lock("stock:7").acquire().release()
    connection.close()
    monkeypatch.delitem(connection.settings_dict["OPTIONS"], "transaction_mode")
    other = sqlite3.connect(connection.settings_dict["NAME"], timeout=0)

    def rule(state, *, at):
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("UPDATE dlocks_resourcelock SET waiters = 0")
        return state, "done"

    assert backends["default"].store.step("stock:7", rule)[0] == "done"
    other.close()
    connection.close()


def test_a_lease_that_cannot_be_written_is_not_prolonged(monkeypatch):
    """Other processes see the row unchanged, and count from then."""
    backend = backends["watching"]

    def locked(*args, **options):
        raise RowLockedError

    for shared in False, True:
        lock = db_lock("stock:7", using="watching", shared=shared)
        with lock as hold, monkeypatch.context() as patch:
            patch.setattr(backend.session, "prepared", locked)
            left = backend.renew([hold.claim])
            patch.undo()
            assert left == {hold.claim.owner: 0.0}


@pytest.mark.engine("postgresql", "sqlite")
def test_a_lease_that_the_commit_renews_is_not_stale(threads, until, monkeypatch):
    """With ``takeover=False``, a transaction that ends just now is no stale holder."""
    inside, end = threading.Event(), threading.Event()
    keepers = backends["brisk"].keepers
    find = keepers.in_transactions

    def hold():
        with db_lock("stock:7", using="brisk", ttl=0.3) as held, held.atomic():
            inside.set()
            assert end.wait(60)

    def find_after_the_end(rows, **options):
        end.set()
        thread.join(60)
        return find(rows, **options)

    thread = threads(hold)
    assert inside.wait(30)
    until(lambda: ResourceLock.objects.by_clock().get().seconds_left < 0)
    monkeypatch.setattr(keepers, "in_transactions", find_after_the_end)
    lock = db_lock("stock:7", using="brisk", takeover=False, timeout=30)
    with lock as next_hold:
        assert not next_hold.takeover


@pytest.mark.engine("mariadb", "mysql")
def test_a_step_that_the_server_rolls_back_runs_again():
    """A deadlock of row locks costs a retry, and is no error."""
    tries = []

    def rule(state, *, at):
        tries.append(state)
        if len(tries) < 3:
            raise OperationalError(1213, "Deadlock found when trying to get lock")
        return state, "done"

    assert backends["default"].store.step("stock:7", rule)[0] == "done"
    assert len(tries) == 3


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
    # A finalizer of other tests would count.
    gc.collect()
    gc.disable()
    sys.settrace(watch)
    try:
        with lock:
            pass
    finally:
        sys.settrace(before)
        gc.enable()
        earlier.release()
    assert not errors
    assert len(calls) <= 110, (len(calls), calls)
