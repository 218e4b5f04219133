"""Statements, which other code may observe. On PostgreSQL, psycopg prepares them."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing

import pytest
from django.apps import apps
from django.core.exceptions import SynchronousOnlyOperation
from django.db import OperationalError, connection, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from django.test.utils import CaptureQueriesContext

from dlocks import LockTimeout, db_lock
from dlocks.backends.database import PessimisticBackend
from dlocks.models import ResourceLock

pytestmark = [
    pytest.mark.driver,
    pytest.mark.django_db(transaction=True),
]

# Uses after which a statement is frequent.
OFTEN = 20


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


def use(times=OFTEN, key="stock:7"):
    tokens = []
    for _ in range(times):
        with db_lock(key) as hold:
            tokens.append(hold.token)
    assert tokens == sorted(set(tokens))


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
        assert db_lock(key).holder().token == hold.token
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


def test_tools_see_every_statement(monkeypatch):
    """``execute_wrapper()``, the query log, tracers and custom cursors do.

    Sentry replaces ``CursorWrapper.execute()`` for all connections. Custom cursors
    collect metrics, or set a schema before each statement. A replaced
    ``ensure_connection()`` is called for each use of a connection.
    """
    seen, wrapper, here = [], connections["default"], threading.get_ident()
    use()

    def watched(method):
        def watch(*args, **kwargs):
            # The threads of dlocks may still poll.
            if threading.get_ident() == here:
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
    assert all("stock:7" in query["sql"] for query in queries)
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


def test_a_statement_is_refused_where_django_refuses_it(django_db_blocker, monkeypatch):
    """Without a database, in a coroutine, and with a warning while apps start."""
    use()
    backend = PessimisticBackend("default")
    rows = list(ResourceLock.objects.values_list())
    with django_db_blocker.block(), pytest.raises(RuntimeError, match="not allowed"):
        use(1)
    assert list(ResourceLock.objects.values_list()) == rows

    async def ask():
        backend.waiting("stock:7")

    with pytest.raises(SynchronousOnlyOperation):
        asyncio.run(ask())
    monkeypatch.setattr(apps, "ready", False)
    monkeypatch.setattr(apps, "stored_app_configs", [])
    with pytest.warns(RuntimeWarning, match="during app initialization"):
        backend.waiting("stock:7")


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


def run(sql, parameters=None):
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)


@pytest.mark.engine("postgresql")
def test_a_changed_session_does_not_break_prepared_statements(in_other_thread):
    """A pool may clean up a session between two clients.

    A name that exists already is not used, and a table may be altered. A session that
    was killed is replaced, also if a statement of the application fails before this
    thread's first lock.
    """
    alter = "ALTER TABLE dlocks_resourcelock ALTER COLUMN version TYPE"
    kill = "SELECT pg_terminate_backend(%s, 5000)"
    connection.close()
    use()
    with connection.cursor() as cursor:
        cursor.execute("SELECT name FROM pg_prepared_statements LIMIT 1")
        (first,) = cursor.fetchone()
    for sql in "DISCARD ALL", "DEALLOCATE ALL":
        run(sql)
        use()
    try:
        run(f"{alter} numeric")
        use(5)
    finally:
        run(f"{alter} bigint")
    use(5)
    connection.close()
    run(f"PREPARE {first} AS SELECT 1")
    use()
    pid = connection.connection.info.backend_pid
    in_other_thread(run, kill, [pid])
    use()
    assert connection.connection.info.backend_pid != pid
    connection.close()
    connection.ensure_connection()
    in_other_thread(run, kill, [connection.connection.info.backend_pid])
    with pytest.raises(OperationalError):
        run("SELECT 1")
    use(1)
    connection.close()
