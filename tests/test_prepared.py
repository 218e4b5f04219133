"""What is promised where PostgreSQL prepares the statements of a lock: nothing but that they cost less."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from dlocks import LockBackendError, db_lock
from dlocks.backends.database.prepared import PREPARED_AT, PREPARED_AT_MOST, PreparedStatements
from dlocks.conf import backends

pytestmark = [
    pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"]),
    pytest.mark.engine("postgresql"),
]


def prepared():
    """Return the names of what the server has prepared in this session, and how often each was executed."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT name, generic_plans + custom_plans FROM pg_prepared_statements")
        return dict(cursor.fetchall())


@pytest.fixture(autouse=True)
def new_session():
    with db_lock("stock:7"):
        # So that the row is there.
        pass
    connection.close()
    yield
    connection.close()


def use(times, lock=None):
    lock = lock or db_lock("stock:7")
    tokens = []
    for _ in range(times):
        with lock as hold:
            tokens.append(hold.token)
    assert tokens == sorted(set(tokens))


def test_what_is_sent_often_is_prepared_and_planned_once():
    use(PREPARED_AT - 1)
    assert not prepared()
    use(PREPARED_AT + 10)
    counts = prepared()
    assert len(counts) == 2, "to acquire, to release"
    assert min(counts.values()) > 10


def test_a_short_session_prepares_nothing():
    """A request that takes a lock once sends what it always did."""
    with CaptureQueriesContext(connection) as queries:
        use(1)
    assert not [query for query in queries if "pg_backend_pid" in query["sql"]]
    assert not prepared()


def test_who_looks_at_statements_sees_them():
    """An instrument that wraps Django's cursor, and assertNumQueries, see what is sent, also after it was prepared."""
    use(PREPARED_AT + 3)
    seen = []

    def look(execute, sql, params, many, context):
        seen.append(sql)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(look):
        use(2)
    assert [sql.split()[0] for sql in seen] == ["UPDATE"] * 4
    with CaptureQueriesContext(connection) as queries:
        use(1)
    assert len(queries) == 2


def test_in_a_transaction_nothing_is_prepared():
    """An error there, of a statement that the session has forgotten, would be the end of the caller's transaction."""
    for _ in range(PREPARED_AT + 3):
        with transaction.atomic(), db_lock("stock:7"):
            pass
    assert not prepared()


@pytest.mark.parametrize("forget", ["DISCARD ALL", "DEALLOCATE ALL"])
def test_a_session_that_has_forgotten_them_goes_on(forget):
    """A pool may clean a session up between two of its users."""
    use(PREPARED_AT + 3)
    with connection.cursor() as cursor:
        cursor.execute(forget)
    use(20)


def test_a_name_that_is_taken_is_left_alone():
    use(PREPARED_AT + 3)
    (first, *_) = prepared()
    connection.close()
    with connection.cursor() as cursor:
        cursor.execute(f"PREPARE {first} AS SELECT 1")
    use(20)
    assert prepared()[first] == 0


def test_a_table_that_was_changed_meanwhile_is_no_trouble():
    use(PREPARED_AT + 3)
    try:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE dlocks_resourcelock ALTER COLUMN version TYPE numeric")
        use(5)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE dlocks_resourcelock ALTER COLUMN version TYPE bigint")
    use(5)


def test_a_session_keeps_a_bounded_number_of_them():
    with db_lock("stock:7", using="default") as hold:
        backend = backends["default"]
        for length in range(1, PREPARED_AT_MOST + 20):
            claims = [hold.claim] * length
            for _ in range(PREPARED_AT + 1):
                backend.renew(claims)
    assert len(prepared()) <= PREPARED_AT_MOST
    use(5)


def test_it_can_be_switched_off():
    backend = type(backends["default"])("default", prepare=False)
    claims = backends["default"]
    for _ in range(PREPARED_AT + 3):
        with db_lock("stock:7") as hold:
            claim = hold.claim
    assert len(prepared()) == 2
    connection.close()
    for _ in range(PREPARED_AT + 3):
        assert backend.acquire(claim)
        assert backend.release(claim)
    assert not prepared()
    assert claims.prepare is None
    with pytest.raises(TypeError, match="prepare"):
        type(backend)("default", prepare="yes")


def test_a_session_that_was_killed_is_replaced():
    """By another, and the lock is had, as before."""
    use(PREPARED_AT + 3)
    pid = connection.connection.info.backend_pid
    killer = threading.Thread(target=kill, args=[pid])
    killer.start()
    killer.join()
    use(PREPARED_AT + 3)
    assert connection.connection.info.backend_pid != pid


def kill(pid):
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
    connection.close()


def test_an_interrupt_on_the_way_leaves_nothing_half_said():
    """A Ctrl-C while the answer is waited for: the session is given up, and the next statement has its own answer."""
    use(PREPARED_AT + 3)
    statements = PreparedStatements.of(connection, through_a_pooler=False)
    sql = "SELECT pg_sleep(%(seconds)s)::text, 5"
    for _ in range(PREPARED_AT):
        statements.execute(sql, {"seconds": 0})
    timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        statements.execute(sql, {"seconds": 30})
    timer.join()
    assert not connection.is_usable()
    connection.close()
    use(3)


def test_an_error_is_the_one_that_the_cursor_gives():
    """Refused by the server: the same error with the same code, and could not ask is never busy."""
    use(PREPARED_AT + 3)
    backend = backends["default"]
    for _ in range(PREPARED_AT + 1):
        with pytest.raises(LockBackendError, match="division by zero") as error:
            backend._rows("SELECT 1 / %(number)s", {"number": 0})
        assert error.value.__cause__.__cause__.sqlstate == "22012"
    use(1)


def test_text_arrives_as_it_is_and_what_no_text_can_be_is_refused_as_before():
    use(PREPARED_AT + 3)
    backend = backends["default"]
    sql = "SELECT length(%(holder)s)"
    for _ in range(PREPARED_AT + 1):
        assert backend._rows(sql, {"holder": "ä'\\ €"}) == [(5,)]
    with pytest.raises(LockBackendError, match="NUL"):
        backend._rows(sql, {"holder": "a\0b"})


def test_in_an_event_loop_it_is_refused_as_django_refuses_it():
    async def ask():
        PreparedStatements.of(connection, through_a_pooler=False)

    with pytest.raises(SynchronousOnlyOperation):
        asyncio.run(ask())
