"""Connection pools of a process: Django's and django-db-connection-pool."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection

from dlocks import db_lock
from dlocks.models import ResourceLock
from tests import jobs
from tests.for_each import for_each
from tests.models import Counter
from tests.processes import on_database
from tests.site import Site
from tests.volume import volume

pytestmark = [
    pytest.mark.django_db(transaction=True),
    # MySQL has the pool and the driver of MariaDB.
    pytest.mark.engine("postgresql", "mariadb"),
]

# Seconds after which a pool without a free connection raises an error. This ends a
# deadlock.
POOL_TIMEOUT = 10

SUBCLASS = "tests.postgresql_subclass"


def behind_a_pool(size, engine=None):
    """Return the environment of a process that uses a connection pool.

    The connections are to this test's database.
    """
    if engine is None and connection.vendor == "mysql":
        engine = "dj_db_conn_pool.backends.mysql"
    engine = engine or connection.settings_dict["ENGINE"]
    if engine.startswith("dj_db_conn_pool."):
        limits = {"POOL_SIZE": size, "MAX_OVERFLOW": 0, "TIMEOUT": POOL_TIMEOUT}
        return on_database(ENGINE=engine, POOL_OPTIONS=limits)
    limits = {"min_size": size, "max_size": size, "timeout": POOL_TIMEOUT}
    return on_database(ENGINE=engine, OPTIONS={"pool": limits})


@pytest.fixture
def pooled(doomed):
    """Return a function that starts a process with a connection pool."""

    def start(size, engine=None, **aliases):
        return doomed(
            **behind_a_pool(size, engine), DLOCKS_TEST_ALIASES=json.dumps(aliases)
        )

    return start


# Whether a holder queries, and has a connection since before its wait.
IN_THREADS = [
    {},
    *({"kind": kind} for kind in ("unfair", "several", "semaphore")),
    *({"using": using} for using in ("optimistic", "insert", "quiet")),
    *(
        {"query_before": when, "query": True}
        for when in ("never", "always", "sometimes")
    ),
    {"query_before": "never", "query": False, "close": True},
]
IN_COROUTINES = [
    {"query_before": "sometimes", "query": True, "context": context}
    for context in (True, False)
]


def test_more_threads_than_pooled_connections_take_turns(pooled, doomed):
    """A waiter needs no more connections than it has when its wait begins.

    A holder can always query and release, with every kind of lock, in threads and in
    coroutines. It can release after a restart of the server, which ends all sessions.
    """
    killer = doomed()
    # Processes that later tests use again must keep their sessions.
    others = killer.call(jobs.other_sessions)
    quiet = {
        "BACKEND": "dlocks.backends.database.PessimisticBackend",
        "OPTIONS": {"listen": False},
    }
    process, times = pooled(3, quiet=quiet), volume(12)
    turns = [(jobs.take_turns_in_threads, options) for options in IN_THREADS]
    turns += [(jobs.take_turns_in_coroutines, options) for options in IN_COROUTINES]
    for take_turns, options in turns:
        granted, _seconds, errors = process.call(take_turns, 6, times, **options)
        # A deadlock would last until the pool's timeout, which is an error.
        assert (granted, errors) == (times, []), options
    assert process.call(jobs.acquire, "stock:7")
    assert killer.call(jobs.kill_other_sessions, but=others)
    assert process.call(jobs.release_all) == ["released"]
    assert process.call(jobs.acquire, "stock:7")
    assert process.call(jobs.release_all) == ["released"]


def test_a_lease_needs_no_second_connection_of_the_pool(pooled, in_queue):
    """Background threads have their own connections, whatever the engine's name."""
    engines = [None]
    if connection.vendor == "postgresql":
        engines += [SUBCLASS, "dj_db_conn_pool.backends.postgresql"]
    for engine in engines:
        process = pooled(1, engine)
        assert process.call(jobs.lease_in_a_transaction, "stock:7") == 1, engine
        with db_lock("stock:7"):
            process.start(jobs.wait_quietly, "stock:7")
            in_queue(1)
        assert process.hear()


def test_a_holder_releases_while_the_pool_is_exhausted(pooled):
    """Its connection was closed in the meantime.

    Transactions that wait for its key use the whole pool.
    """
    seconds, granted = pooled(2).call(
        jobs.release_while_the_pool_is_exhausted, "stock:7", 2
    )
    assert (seconds < POOL_TIMEOUT, granted) == (True, 2)


def test_a_key_is_released_at_exit_without_a_pooled_connection(pooled, is_busy):
    pooled(1).call(jobs.hold_at_exit, "stock:7")
    assert not is_busy("stock:7")


@pytest.mark.engine("postgresql")
@pytest.mark.psycopg3
@for_each("pool", [True, False])
def test_a_lease_is_renewed_with_a_new_password(pool, doomed, until):
    """The server has ended all sessions, and refuses the old password.

    The settings of the process have the new one.
    """
    options = {"pool": True} if pool else {}
    lease = {"BACKEND": "dlocks.backends.database.PessimisticBackend"}
    lease["OPTIONS"] = {"ttl": 1.2}

    def renewed():
        """Wait for the next renewal."""
        end = ResourceLock.objects.get().end_time
        until(lambda: ResourceLock.objects.get().end_time > end, 30)

    with connection.cursor() as cursor:
        cursor.execute("CREATE ROLE dlocks_rotated LOGIN SUPERUSER PASSWORD 'old'")
        try:
            process = doomed(
                DLOCKS_TEST_USER="dlocks_rotated",
                DLOCKS_TEST_PASSWORD="old",
                DLOCKS_TEST_OPTIONS=json.dumps(options),
                DLOCKS_TEST_ALIASES=json.dumps({"short": lease}),
            )
            process.call(jobs.acquire, "stock:7", using="short")
            renewed()
            cursor.execute("ALTER ROLE dlocks_rotated PASSWORD 'new'")
            process.call(jobs.change_password, "new")
            cursor.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE"
                " usename = 'dlocks_rotated'"
            )
            assert cursor.fetchall()
            renewed()
            renewed()
            process.kill()
        finally:
            cursor.execute("DROP ROLE dlocks_rotated")


GUNICORN = (
    "gunicorn --worker-class=gthread --threads=8 --bind=127.0.0.1:{port}"
    " tests.pooled_site:wsgi"
)
UVICORN = "uvicorn --host=127.0.0.1 --port={port} tests.pooled_site:asgi"


@pytest.mark.parametrize(
    ("command", "pages"),
    [
        pytest.param(GUNICORN, ["lock", "query"], marks=pytest.mark.engine("mariadb")),
        pytest.param(
            UVICORN,
            ["lock", "query", "coroutine"],
            marks=pytest.mark.engine("postgresql"),
        ),
    ],
)
def test_servers_with_more_threads_than_connections_answer(
    command, pages, until, tmp_path
):
    """No request fails, and no increment is lost."""
    Counter.objects.create(name="requests", value=0)
    pool = behind_a_pool(4)
    server = Site(command, tmp_path, DLOCKS_TEST_URLS="tests.pooled_site", **pool)
    try:
        until(server.answers, 60)
        for number, page in enumerate(pages, 1):
            with ThreadPoolExecutor(8) as clients:
                answers = list(clients.map(server.get, [f"/{page}/"] * 10))
            assert {status for status, _ in answers} == {200}
            assert Counter.objects.get(name="requests").value == 10 * number
    finally:
        server.end()
