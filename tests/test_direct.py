"""What is promised where the statements of a lock go past Django's cursor: nothing but that they cost less."""

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
from dlocks.backends.database.direct import TEXT_AT_MOST, by_sqlite3
from dlocks.backends.database.prepared import PREPARED_AT
from dlocks.backends.database.statements import _at_most
from dlocks.conf import backends
from dlocks.models import ResourceLock

pytestmark = pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"])

# Past the number from which PostgreSQL's go to the driver.
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
    """Return the statements that went by Django's cursor."""
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
def test_they_do_where_nobody_looks_on(by_cursor, using):
    use(using=using)
    del by_cursor[:]
    use(using=using)
    assert not by_cursor


@pytest.mark.parametrize("key", KEYS, ids=ascii)
def test_what_a_key_says_is_the_same_by_either_way(key):
    """Each way finds the row, and the holder, that the other has written."""
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


def test_a_busy_key_is_busy_by_either_way(elsewhere):
    use()
    held = elsewhere(db_lock("stock:7").acquire)
    for _ in range(OFTEN):
        assert db_lock("stock:7").try_acquire() is None
    with CaptureQueriesContext(connection):
        assert db_lock("stock:7").try_acquire() is None
    with pytest.raises(LockTimeout):
        db_lock("stock:7", timeout=0.01).acquire()
    elsewhere(held.release)


def test_who_looks_at_statements_sees_them(by_cursor):
    """By Django's own means: execute_wrapper(), its log, assertNumQueries()."""
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


def test_who_puts_his_own_method_into_djangos_cursor_sees_them(monkeypatch):
    """As Sentry does, for all connections."""
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


@pytest.mark.parametrize("name", ["cursor", "_cursor", "_prepare_cursor", "make_cursor", "create_cursor"])
@pytest.mark.parametrize("how", ["another class", "another method"])
def test_who_gives_connections_other_cursors_sees_them(name, how, monkeypatch):
    """As for metrics, or to set a session's schema before each statement: other tables, that would be."""
    use()
    wrapper, seen = connections["default"], []
    kind = type(wrapper)
    method = getattr(kind, name)

    def look(self, *args, **kwargs):
        seen.append(name)
        return method(self, *args, **kwargs)

    if how == "another class":
        monkeypatch.setattr(wrapper, "__class__", type("Watched", (kind,), {name: look}))
    else:
        monkeypatch.setattr(kind, name, look)
    use(2)
    assert len(seen) == 4
    monkeypatch.undo()
    use(2)
    assert len(seen) == 4


def test_who_looks_whether_there_is_a_connection_sees_each_use_of_it(monkeypatch):
    """As those do who make a lost one anew; and pytest-django, which refuses it in a test that has no database."""
    use()
    seen = []
    ensure_connection = BaseDatabaseWrapper.ensure_connection
    monkeypatch.setattr(
        BaseDatabaseWrapper, "ensure_connection", lambda self: (seen.append(self.alias), ensure_connection(self))[1]
    )
    use(2)
    assert seen.count("default") >= 4


def test_a_lock_in_a_test_without_a_database_is_refused(django_db_blocker):
    use()
    rows = list(ResourceLock.objects.values_list())
    with django_db_blocker.block(), pytest.raises(RuntimeError, match="not allowed"):
        use(1)
    assert list(ResourceLock.objects.values_list()) == rows


@pytest.mark.engine("mariadb", "sqlite")
def test_who_puts_his_own_connection_before_the_drivers_sees_them(by_cursor):
    """As tracers do."""
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


@pytest.mark.engine("mariadb")
def test_results_that_somebody_has_left_unread_are_no_trouble():
    """Nor are they with Django's cursor, and what his session has besides is still there."""
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
def test_an_interrupt_at_any_line_leaves_no_statement_unfinished(elsewhere):
    """Somebody may keep the exception, and with it all that was going on: the write lock must not stay with that."""
    backend, code, kept = backends["default"], by_sqlite3.__code__, []
    with db_lock("stock:7"):
        pass
    sql = backend._text("UPDATE {locks} SET holder = 'me' WHERE key_resource = %(key)s RETURNING version")

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
        elsewhere(ResourceLock.objects.filter(pk="stock:7").update, holder="another")
    assert len(kept) > 3


def test_in_a_transaction_all_go_by_the_cursor(by_cursor):
    use()
    del by_cursor[:]
    with transaction.atomic():
        use(1)
    assert by_cursor


def test_it_can_be_switched_off(by_cursor):
    use()
    with db_lock("stock:7") as hold:
        claim = hold.claim
    backend = type(backends["default"])("default", prepare=False)
    del by_cursor[:]
    for _ in range(OFTEN):
        assert backend.acquire(claim)
        assert backend.release(claim)
    assert len(by_cursor) == 2 * OFTEN


def test_a_very_long_statement_goes_by_the_cursor(by_cursor):
    """Its text would be kept for little: there are rarely as many claims again."""
    with db_lock("stock:7") as hold:
        for _ in range(OFTEN):
            assert backends["default"].renew([hold.claim] * 1000)
    assert len(max(by_cursor, key=len)) > TEXT_AT_MOST


TYPES = {int: "bigint", str: "text", bool: "boolean"}


@pytest.mark.parametrize("value", [0, -1, 2**62, True, False, "", "x" * 255])
def test_what_is_asked_is_what_is_answered(value):
    """Of whatever type, as by the cursor."""
    the_same_by_either_way(value, f"%(value)s::{TYPES[type(value)]}" if connection.vendor == "postgresql" else None)


@pytest.mark.engine("mariadb", "sqlite")
@pytest.mark.parametrize("value", [None, 0.5])
def test_what_has_no_type_or_is_a_float_too(value):
    """PostgreSQL is told the types, of which statements of a lock have no other ones."""
    the_same_by_either_way(value)


def the_same_by_either_way(value, place=None):
    backend, sql = backends["default"], f"SELECT {place or '%(value)s'}, 1 AS number, '%%' AS percent"
    replies = [tuple(map(tuple, backend._rows(sql, {"value": value}))) for _ in range(OFTEN)]
    with CaptureQueriesContext(connection):
        replies.append(tuple(map(tuple, backend._rows(sql, {"value": value}))))
    assert set(replies) == {((value, 1, "%"),)}


def test_in_an_event_loop_it_is_refused_as_django_refuses_it():
    use()

    async def ask():
        backends["default"]._rows("SELECT 1", {})

    with pytest.raises(SynchronousOnlyOperation):
        asyncio.run(ask())


def test_while_django_starts_it_warns_as_ever(monkeypatch):
    """Of who asks the database in AppConfig.ready(), say."""
    use()
    monkeypatch.setattr(apps, "ready", False)
    monkeypatch.setattr(apps, "stored_app_configs", [])
    with pytest.warns(RuntimeWarning, match="during app initialization"):
        backends["default"]._rows("SELECT 1", {})


@pytest.fixture
def flushed():
    """The connection of a project that has its commits flushed; put back as it was afterwards."""
    connection.ensure_connection()
    raw = connection.connection
    ((level,),) = raw.execute("PRAGMA synchronous").fetchall()
    raw.execute("PRAGMA synchronous = FULL")
    yield raw
    raw.set_trace_callback(None)
    raw.execute(f"PRAGMA synchronous = {level}")


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize("keys", [["stock:7"], ["stock:7", "stock:8"]], ids=["one key", "two keys"])
def test_a_grant_is_flushed_and_a_release_is_not_where_that_is_all_that_a_crash_could_forget(flushed, keys):
    """In WAL mode a commit that is not flushed can be lost, and nothing else."""
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
def test_with_a_journal_that_is_rolled_back_a_release_is_flushed_too(tmp_path):
    """The file could break with the machine: it depends on the order of what is flushed."""
    raw = sqlite3.connect(tmp_path / "of_its_own.sqlite3", isolation_level=None)
    raw.execute("PRAGMA journal_mode = delete")
    raw.execute("PRAGMA synchronous = FULL")
    with _at_most(raw, "synchronous", 1, unless=sqlite3.Error):
        assert raw.execute("PRAGMA synchronous").fetchall() == [(2,)]
    raw.close()


@pytest.mark.engine("sqlite")
def test_a_file_that_cannot_be_read_is_told_by_the_statement_and_not_by_what_is_set_before_it(tmp_path):
    """A caller sees an error of the lock's, and the statement is what is tried again."""
    path = tmp_path / "broken.sqlite3"
    path.write_bytes(b"no database " * 1000)
    raw = sqlite3.connect(path, isolation_level=None)
    with _at_most(raw, "synchronous", 1, unless=sqlite3.Error), pytest.raises(sqlite3.DatabaseError, match="not a"):
        raw.execute("SELECT * FROM sqlite_master")
    raw.close()


@pytest.mark.engine("sqlite")
def test_a_release_does_not_have_more_flushed_than_the_project_asks_for(flushed):
    flushed.execute("PRAGMA synchronous = OFF")
    sent = []
    flushed.set_trace_callback(sent.append)
    with db_lock("stock:7"):
        pass
    assert not [sql for sql in sent if sql.startswith("PRAGMA synchronous =")]


@pytest.mark.engine("sqlite")
def test_a_key_that_stays_taken_after_its_release_is_flushed(flushed):
    """A crash must not forget for how long: that is what at_least is for."""
    sent = []
    hold = db_lock("stock:7", at_least=0.2).acquire()
    flushed.set_trace_callback(sent.append)
    hold.release()
    assert not [sql for sql in sent if sql.startswith("PRAGMA synchronous =")]
