"""Statements that bypass Django's cursor, and differ only in their cost."""

from __future__ import annotations

import asyncio
import sqlite3
import sys

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

pytestmark = pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"])

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


@pytest.fixture
def by_cursor(monkeypatch):
    """Return the list of statements that went through Django's cursor."""
    backend, seen = type(backends["default"]), []
    execute = backend._by_cursor

    def look(self, connection, in_transaction, sql, parameters):
        seen.append(sql)
        return execute(self, connection, in_transaction, sql, parameters)

    monkeypatch.setattr(backend, "_by_cursor", look)
    return seen


def use(times=OFTEN, key="stock:7", using="default"):
    tokens = []
    for _ in range(times):
        with db_lock(key, using=using) as hold:
            tokens.append(hold.token)
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("using", ["default", "optimistic", "insert"])
def test_statements_bypass_an_uninstrumented_cursor(by_cursor, using):
    use(using=using)
    del by_cursor[:]
    use(using=using)
    assert not by_cursor


@pytest.mark.parametrize("key", KEYS, ids=ascii)
def test_a_key_is_the_same_with_and_without_the_cursor(key):
    """Each way finds the row and the holder that the other way wrote."""
    use(key=key)
    assert ResourceLock.objects.filter(key_resource=key).count() == 1
    assert ResourceLock.objects.count() == 1
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
    assert ResourceLock.objects.count() == 1


def test_a_busy_key_is_busy_with_and_without_the_cursor(in_other_thread):
    use()
    held = in_other_thread(db_lock("stock:7").acquire)
    for _ in range(OFTEN):
        assert db_lock("stock:7").try_acquire() is None
    with CaptureQueriesContext(connection):
        assert db_lock("stock:7").try_acquire() is None
    with pytest.raises(LockTimeout):
        db_lock("stock:7", timeout=0.01).acquire()
    in_other_thread(held.release)


def test_djangos_query_tools_see_every_statement(by_cursor):
    """Django's own tools see every statement.

    They are ``execute_wrapper()``, the query log and ``assertNumQueries()``.
    """
    use()
    seen = []

    def look(execute, sql, params, many, context):
        seen.append(sql)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(look):
        use(2)
    assert len(seen) == 4
    assert all("UPDATE" in sql for sql in seen)
    with CaptureQueriesContext(connection) as queries:
        use(1)
    assert len(queries) == 2


def test_a_patched_execute_method_sees_every_statement(monkeypatch):
    """A replaced ``CursorWrapper.execute()`` sees every statement.

    Sentry replaces it in this way for all connections.
    """
    use()
    execute, seen = CursorWrapper.execute, []

    def look(self, sql, params=None):
        seen.append(sql)
        return execute(self, sql, params)

    monkeypatch.setattr(CursorWrapper, "execute", look)
    use(2)
    assert len(seen) == 4
    monkeypatch.undo()
    use(2)
    assert len(seen) == 4


@pytest.mark.parametrize(
    "name", ["cursor", "_cursor", "_prepare_cursor", "make_cursor", "create_cursor"]
)
@pytest.mark.parametrize("how", ["another class", "another method"])
def test_custom_cursors_see_every_statement(name, how, monkeypatch):
    """Custom cursors see every statement.

    They collect metrics, or set a schema before each statement. A cursor that
    is bypassed would leave the statements with other tables.
    """
    use()
    wrapper, seen = connections["default"], []
    kind = type(wrapper)
    method = getattr(kind, name)

    def look(self, *args, **kwargs):
        seen.append(name)
        return method(self, *args, **kwargs)

    if how == "another class":
        monkeypatch.setattr(
            wrapper, "__class__", type("Watched", (kind,), {name: look})
        )
    else:
        monkeypatch.setattr(kind, name, look)
    use(2)
    assert len(seen) == 4
    monkeypatch.undo()
    use(2)
    assert len(seen) == 4


def test_a_patched_ensure_connection_is_called_for_every_use(monkeypatch):
    """A replaced ``ensure_connection()`` is called for each use of a connection.

    Some libraries use it to reconnect. pytest-django uses it to block the database in
    tests that may not use it.
    """
    use()
    seen = []
    ensure_connection = BaseDatabaseWrapper.ensure_connection
    monkeypatch.setattr(
        BaseDatabaseWrapper,
        "ensure_connection",
        lambda self: (seen.append(self.alias), ensure_connection(self))[1],
    )
    use(2)
    assert seen.count("default") >= 4


def test_a_lock_in_a_test_without_a_database_is_refused(django_db_blocker):
    use()
    rows = list(ResourceLock.objects.values_list())
    with django_db_blocker.block(), pytest.raises(RuntimeError, match="not allowed"):
        use(1)
    assert list(ResourceLock.objects.values_list()) == rows


@pytest.mark.engine("mariadb", "mysql", "sqlite")
def test_a_proxy_of_the_connection_sees_every_statement(by_cursor):
    """Tracers use such a proxy."""
    use()

    class Proxy:
        def __init__(self, wrapped):
            self.wrapped = wrapped

        def __getattr__(self, name):
            return getattr(self.wrapped, name)

    del by_cursor[:]
    own = connection.connection
    connection.connection = Proxy(own)
    try:
        use(2)
    finally:
        connection.connection = own
    assert len(by_cursor) == 4


@pytest.mark.engine("mariadb", "mysql")
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


def test_statements_in_a_transaction_use_the_cursor(by_cursor):
    use()
    del by_cursor[:]
    with transaction.atomic():
        use(1)
    assert by_cursor


def test_the_bypass_of_the_cursor_can_be_switched_off(by_cursor):
    use()
    with db_lock("stock:7") as hold:
        claim = hold.claim
    backend = type(backends["default"])("default", prepare=False)
    del by_cursor[:]
    for _ in range(OFTEN):
        assert backend.acquire(claim)
        assert backend.release(claim)
    assert len(by_cursor) == 2 * OFTEN


def test_a_very_long_statement_uses_the_cursor(by_cursor):
    """The text is not cached, because the same number of claims is rare."""
    with db_lock("stock:7") as hold:
        for _ in range(OFTEN):
            assert backends["default"].renew([hold.claim] * 1000)
    assert len(max(by_cursor, key=len)) > TEXT_AT_MOST


TYPES = {int: "bigint", str: "text", bool: "boolean"}


@pytest.mark.parametrize("value", [0, -1, 2**62, True, False, "", "x" * 255])
def test_parameters_round_trip_unchanged(value):
    """Values of every type come back unchanged, as through Django's cursor."""
    the_same_by_either_way(
        value,
        (
            f"%(value)s::{TYPES[type(value)]}"
            if connection.vendor == "postgresql"
            else None
        ),
    )


@pytest.mark.engine("mariadb", "mysql", "sqlite")
@pytest.mark.parametrize("value", [None, 0.5])
def test_none_and_floats_round_trip_unchanged(value):
    """PostgreSQL needs the types, and statements of a lock use no other ones."""
    the_same_by_either_way(value)


def the_same_by_either_way(value, place=None):
    backend, sql = (
        backends["default"],
        f"SELECT {place or '%(value)s'}, 1 AS number, '%%' AS percent",
    )
    replies = [
        tuple(map(tuple, backend._rows(sql, {"value": value}))) for _ in range(OFTEN)
    ]
    with CaptureQueriesContext(connection):
        replies.append(tuple(map(tuple, backend._rows(sql, {"value": value}))))
    assert set(replies) == {((value, 1, "%"),)}


def test_a_statement_in_an_event_loop_is_refused():
    use()

    async def ask():
        backends["default"]._rows("SELECT 1", {})

    with pytest.raises(SynchronousOnlyOperation):
        asyncio.run(ask())


def test_a_statement_during_app_initialization_warns(monkeypatch):
    """Django warns of database queries in ``AppConfig.ready()``, for example."""
    use()
    monkeypatch.setattr(apps, "ready", False)
    monkeypatch.setattr(apps, "stored_app_configs", [])
    with pytest.warns(RuntimeWarning, match="during app initialization"):
        backends["default"]._rows("SELECT 1", {})


@pytest.fixture
def flushed():
    """Return the connection of a project that flushes its commits.

    The fixture restores the setting afterwards.
    """
    connection.ensure_connection()
    raw = connection.connection
    ((level,),) = raw.execute("PRAGMA synchronous").fetchall()
    raw.execute("PRAGMA synchronous = FULL")
    yield raw
    raw.set_trace_callback(None)
    raw.execute(f"PRAGMA synchronous = {level}")


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize(
    "keys", [["stock:7"], ["stock:7", "stock:8"]], ids=["one key", "two keys"]
)
def test_a_grant_is_flushed_and_a_release_is_not(flushed, keys):
    """In WAL mode a commit that is not flushed can be lost, with no other harm."""
    level, seen = 2, []
    assert flushed.execute("PRAGMA journal_mode").fetchall() == [("wal",)]

    def note(sql):
        nonlocal level
        name, _, value = sql.partition(" = ")
        if name == "PRAGMA synchronous" and value:
            level = int(value)
        if sql.startswith(("UPDATE", "INSERT", "WITH")):
            seen.append(level)

    lock = db_lock(*keys)
    lock.acquire().release()
    flushed.set_trace_callback(note)
    hold = lock.acquire()
    granted = list(seen)
    seen.clear()
    hold.release()
    flushed.set_trace_callback(None)
    assert set(granted) == {2}
    assert seen == [1]
    assert flushed.execute("PRAGMA synchronous").fetchall() == [(2,)]


@pytest.mark.engine("sqlite")
def test_a_release_is_flushed_with_a_rollback_journal(tmp_path):
    """With a rollback journal the database file could be corrupted by a crash.

    Its integrity depends on the order of the flushes.
    """
    raw = sqlite3.connect(tmp_path / "of_its_own.sqlite3", isolation_level=None)
    raw.execute("PRAGMA journal_mode = delete")
    raw.execute("PRAGMA synchronous = FULL")
    with _with_limit(raw, "synchronous", 1, unless=sqlite3.Error):
        assert raw.execute("PRAGMA synchronous").fetchall() == [(2,)]
    raw.close()


@pytest.mark.engine("sqlite")
def test_an_unreadable_file_is_reported_by_the_statement_itself(
    tmp_path,
):
    """The statement is retried, and the caller receives an error of dlocks."""
    path = tmp_path / "broken.sqlite3"
    path.write_bytes(b"no database " * 1000)
    raw = sqlite3.connect(path, isolation_level=None)
    with (
        _with_limit(raw, "synchronous", 1, unless=sqlite3.Error),
        pytest.raises(sqlite3.DatabaseError, match="not a"),
    ):
        raw.execute("SELECT * FROM sqlite_master")
    raw.close()


@pytest.mark.engine("sqlite")
def test_a_release_is_not_flushed_more_than_the_project_wants(flushed):
    flushed.execute("PRAGMA synchronous = OFF")
    sent = []
    flushed.set_trace_callback(sent.append)
    with db_lock("stock:7"):
        pass
    assert not [sql for sql in sent if sql.startswith("PRAGMA synchronous =")]


@pytest.mark.engine("sqlite")
def test_a_release_that_keeps_the_key_is_flushed(flushed):
    """A crash must not lose the end of ``min_hold``, which is its purpose."""
    sent = []
    hold = db_lock("stock:7", min_hold=0.2).acquire()
    flushed.set_trace_callback(sent.append)
    hold.release()
    assert not [sql for sql in sent if sql.startswith("PRAGMA synchronous =")]
