"""Statements that bypass Django's cursor, and differ only in their cost."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from contextlib import closing

import pytest
from django.apps import apps
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connection, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from django.test.utils import CaptureQueriesContext

from dlocks import LockTimeout, db_lock
from tests.internals import (
    PREPARED_AT,
    TEXT_AT_MOST,
    ResourceLock,
    _with_limit,
    backends,
    by_sqlite3,
)

pytestmark = [
    pytest.mark.driver,
    pytest.mark.django_db(transaction=True),
]

# Uses after which PostgreSQL's statements go directly to the driver.
OFTEN = PREPARED_AT + 3

KEYS = [
    "stock:7",
    "it's",
    'a "quoted" one',
    "back\\slash \\' \\",
    "100 %s of %(key)s at 5 % and %%",
    ":key ?1 $1 @a --",
    "línea 日本 🔒",
    "\N{RIGHT-TO-LEFT MARK}\t\n\r\x1a\x01",
]


def use(times=OFTEN, key="stock:7", using="default"):
    tokens = []
    for _ in range(times):
        with db_lock(key, using=using) as hold:
            tokens.append(hold.token)
    assert tokens == sorted(set(tokens))


def test_frequent_statements_bypass_the_cursor(monkeypatch):
    """Statements of a lock go directly to the driver, unless ``prepare`` is False.

    A very long text is not cached, because the same number of claims is rare.
    """
    by_cursor, kind = [], type(backends["default"])
    execute = kind._by_cursor

    def look(*args):
        by_cursor.append(args[3])
        return execute(*args)

    monkeypatch.setattr(kind, "_by_cursor", look)
    for using in "default", "optimistic", "insert":
        use(using=using)
        del by_cursor[:]
        use(using=using)
        assert not by_cursor, using
    with transaction.atomic():
        use(1)
    assert by_cursor
    with db_lock("stock:7") as hold:
        claim = hold.claim
        for _ in range(OFTEN):
            assert backends["default"].renew([claim] * 1000)
    assert len(max(by_cursor, key=len)) > TEXT_AT_MOST
    backend = kind("default", prepare=False)
    del by_cursor[:]
    for _ in range(OFTEN):
        assert backend.acquire(claim)
        assert backend.release(claim)
    assert len(by_cursor) == 2 * OFTEN


def test_a_key_is_the_same_with_and_without_the_cursor(in_other_thread):
    """Each way finds the row and the holder that the other way wrote."""
    for number, key in enumerate(KEYS, 1):
        use(key=key)
        assert ResourceLock.objects.filter(key_resource=key).count() == 1, key
        with db_lock(key) as hold, CaptureQueriesContext(connection) as queries:
            hold.check()
            assert db_lock(key).holder().key == key
            hold.renew()
        assert len(queries) >= 3
        with CaptureQueriesContext(connection):
            hold = db_lock(key).acquire()
        assert db_lock(key).holder().holder == hold.claim.holder
        hold.check()
        hold.release()
        assert ResourceLock.objects.count() == number, key
    held = in_other_thread(db_lock("stock:7").acquire)
    for _ in range(OFTEN):
        assert db_lock("stock:7").try_acquire() is None
    with CaptureQueriesContext(connection):
        assert db_lock("stock:7").try_acquire() is None
    with pytest.raises(LockTimeout):
        db_lock("stock:7", timeout=0.01).acquire()
    in_other_thread(held.release)


class Proxy:
    """A connection as tracers replace it."""

    def __init__(self, wrapped):
        self.wrapped = wrapped

    def __getattr__(self, name):
        return getattr(self.wrapped, name)


def test_tools_see_every_statement(monkeypatch):
    """``execute_wrapper()``, the query log, tracers and custom cursors do.

    Sentry replaces ``CursorWrapper.execute()`` for all connections. Custom cursors
    collect metrics, or set a schema before each statement. A replaced
    ``ensure_connection()`` is called for each use of a connection.
    """
    seen, wrapper = [], connections["default"]
    use()

    def watched(method):
        def watch(*args, **kwargs):
            seen.append(method)
            return method(*args, **kwargs)

        return watch

    with connection.execute_wrapper(
        lambda execute, *args: (seen.append(args[0]), execute(*args))[1]
    ):
        use(2)
    assert len(seen) == 4
    assert all("UPDATE" in sql for sql in seen)
    with CaptureQueriesContext(connection) as queries:
        use(1)
    assert len(queries) == 2
    kind, patches = type(wrapper), []
    for name in "cursor", "_cursor", "_prepare_cursor", "make_cursor", "create_cursor":
        method = watched(getattr(kind, name))
        patches.append((kind, name, method))
        patches.append((wrapper, "__class__", type("Watched", (kind,), {name: method})))
    for owner, name in (
        (CursorWrapper, "execute"),
        (BaseDatabaseWrapper, "ensure_connection"),
    ):
        patches.append((owner, name, watched(getattr(owner, name))))
    for owner, name, value in patches:
        del seen[:]
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            use(2)
        use(2)
        assert len(seen) == 4 or (len(seen) > 4 and name == "ensure_connection"), name
    if connection.vendor != "postgresql":
        kind = type(backends["default"])
        monkeypatch.setattr(kind, "_by_cursor", watched(kind._by_cursor))
        monkeypatch.setattr(wrapper, "connection", Proxy(wrapper.connection))
        del seen[:]
        use(2)
        assert len(seen) == 4


def test_a_statement_is_refused_where_django_refuses_it(django_db_blocker, monkeypatch):
    """A test without a database, and a coroutine, cannot use a lock.

    A query in ``AppConfig.ready()`` warns.
    """
    use()
    rows = list(ResourceLock.objects.values_list())
    with django_db_blocker.block(), pytest.raises(RuntimeError, match="not allowed"):
        use(1)
    assert list(ResourceLock.objects.values_list()) == rows

    async def ask():
        backends["default"]._rows("SELECT 1", {})

    with pytest.raises(SynchronousOnlyOperation):
        asyncio.run(ask())
    monkeypatch.setattr(apps, "ready", False)
    monkeypatch.setattr(apps, "stored_app_configs", [])
    with pytest.warns(RuntimeWarning, match="during app initialization"):
        backends["default"]._rows("SELECT 1", {})


@pytest.mark.engine("mariadb")
def test_unread_results_do_not_disturb_a_lock():
    """The lock works and the session survives, as with Django's cursor."""
    use()
    cursor = connection.cursor()
    cursor.execute("SET @mine = 7; SELECT 1; SELECT 2")
    session = connection.connection
    with db_lock("stock:7") as hold:
        hold.check()
    assert connection.connection is session
    with connection.cursor() as another:
        another.execute("SELECT @mine")
        assert another.fetchone() == (7,)
    cursor.close()


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
def test_a_grant_is_flushed_and_a_release_is_not():
    """In WAL mode a commit that is not flushed can be lost, with no other harm.

    A release that keeps the key for ``min_hold`` is raw. Nothing is flushed more
    than the project wants.
    """
    level, seen, pragmas = 2, [], []
    connection.ensure_connection()
    raw = connection.connection
    raw.execute("PRAGMA synchronous = FULL")
    assert raw.execute("PRAGMA journal_mode").fetchall() == [("wal",)]

    def note(sql):
        nonlocal level
        name, _, value = sql.partition(" = ")
        if name == "PRAGMA synchronous" and value:
            level = int(value)
            pragmas.append(sql)
        if sql.startswith(("UPDATE", "INSERT", "WITH")):
            seen.append(level)

    with closing(connection):
        for keys in ["stock:7"], ["stock:7", "stock:8"]:
            lock = db_lock(*keys)
            lock.acquire().release()
            raw.set_trace_callback(note)
            hold = lock.acquire()
            granted = list(seen)
            seen.clear()
            hold.release()
            raw.set_trace_callback(None)
            assert set(granted) == {2}
            assert seen == [1]
            seen.clear()
            assert raw.execute("PRAGMA synchronous").fetchall() == [(2,)]
        assert pragmas
        pragmas.clear()
        hold = db_lock("stock:7", min_hold=0.2).acquire()
        raw.set_trace_callback(note)
        hold.release()
        raw.set_trace_callback(None)
        raw.execute("PRAGMA synchronous = OFF")
        raw.set_trace_callback(note)
        with db_lock("stock:8"):
            pass
        assert not pragmas


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
