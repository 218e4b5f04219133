"""Connection pools of a process: Django's and django-db-connection-pool."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection

from dlocks import db_lock
from tests import jobs
from tests.internals import backends
from tests.models import Counter
from tests.servers import free_port, release_port

pytestmark = [
    pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"]),
    pytest.mark.engine("postgresql", "mariadb", "mysql"),
]

# Seconds after which a pool without a free connection raises an error. This ends a
# deadlock.
POOL_TIMEOUT = 10

SUBCLASS = "tests.postgresql_subclass"


def behind_a_pool(size, engine=None):
    """Return the environment of a process that uses a connection pool.

    The connections are to this test's database.
    """
    there = {
        name: str(connection.settings_dict[name])
        for name in ("ENGINE", "NAME", "USER", "HOST", "PORT")
    }
    if engine is not None or connection.vendor == "mysql":
        there["ENGINE"] = engine or "dj_db_conn_pool.backends.mysql"
    if there["ENGINE"].startswith("dj_db_conn_pool."):
        there["POOL_OPTIONS"] = {
            "POOL_SIZE": size,
            "MAX_OVERFLOW": 0,
            "TIMEOUT": POOL_TIMEOUT,
        }
    else:
        there["OPTIONS"] = {
            "pool": {"min_size": size, "max_size": size, "timeout": POOL_TIMEOUT}
        }
    return {"DLOCKS_TEST_DATABASES": json.dumps({"default": there})}


@pytest.fixture
def pooled(doomed):
    """Return a function that starts a process with a connection pool."""

    def start(size, engine=None, **aliases):
        return doomed(
            **behind_a_pool(size, engine), DLOCKS_TEST_ALIASES=json.dumps(aliases)
        )

    return start


@pytest.fixture
def serve(transactional_db, until, tmp_path):
    """Return a function that starts a server of tests/pooled_site.py.

    The function returns the port.
    """
    port = free_port()
    processes = []

    def start(*arguments):
        environment = {
            **os.environ,
            **behind_a_pool(4),
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "DLOCKS_TEST_URLS": "tests.pooled_site",
        }
        command = [
            sys.executable,
            "-m",
            *(argument.format(port=port) for argument in arguments),
        ]
        log = tmp_path / "server.log"
        with log.open("wb") as output:
            processes.append(
                subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            )

        def answers():
            assert processes[0].poll() is None, log.read_text()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        until(answers, 60)
        return port

    yield start
    for process in processes:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    release_port(port)


POOLS = [
    pytest.param(None, id="default"),
    pytest.param(SUBCLASS, id="subclass", marks=pytest.mark.engine("postgresql")),
    pytest.param(
        "dj_db_conn_pool.backends.postgresql",
        id="sqlalchemy",
        marks=pytest.mark.engine("postgresql"),
    ),
]


def check(outcome):
    turns, _seconds, errors = outcome
    # A deadlock would last until the pool's timeout, which is an error.
    assert (turns, errors) == (32, [])


@pytest.mark.parametrize("engine", POOLS)
def test_more_threads_than_pooled_connections_take_turns(engine, pooled):
    """A waiter needs no more connections than it has when its wait begins.

    A holder can always release.
    """
    check(pooled(4, engine).call(jobs.take_turns_in_threads, 8, 32))


@pytest.mark.parametrize("engine", POOLS)
def test_a_hold_is_released_although_all_sessions_were_lost(engine, pooled, doomed):
    """A restart of the server ends every session of a pool."""
    killer = doomed()
    # Processes that later tests use again must keep their sessions.
    others = killer.call(jobs.other_sessions)
    holder = pooled(4, engine)
    check(holder.call(jobs.take_turns_in_threads, 8, 32))
    assert holder.call(jobs.acquire, "stock:7")
    assert killer.call(jobs.kill_other_sessions, but=others)
    assert holder.call(jobs.release_all) == ["released"]
    assert holder.call(jobs.acquire, "stock:7")
    assert holder.call(jobs.release_all) == ["released"]


@pytest.mark.parametrize("using", ["optimistic", "insert", "quiet"])
def test_threads_take_turns_with_every_row_backend(using, pooled):
    quiet = {
        "BACKEND": "dlocks.backends.database.PessimisticBackend",
        "OPTIONS": {"listen": False},
    }
    check(pooled(4, quiet=quiet).call(jobs.take_turns_in_threads, 8, 32, using=using))


@pytest.mark.parametrize("kind", ["unfair", "several", "semaphore"])
def test_threads_take_turns_with_every_kind_of_lock(kind, pooled):
    check(pooled(4).call(jobs.take_turns_in_threads, 8, 32, kind))


@pytest.mark.parametrize(
    ("query_before", "close"),
    [("never", False), ("always", False), ("sometimes", False), ("never", True)],
)
def test_a_holder_can_query_and_release_while_others_wait(query_before, close, pooled):
    """The holder has had a connection since before it waited.

    Without a connection, it can still release.
    """
    policy = {"query_before": query_before, "query": not close, "close": close}
    check(pooled(4).call(jobs.take_turns_in_threads, 8, 32, **policy))


@pytest.mark.parametrize(
    "context", [True, False], ids=["requests", "thread_sensitive=False"]
)
def test_more_coroutines_than_pooled_connections_take_turns(context, pooled):
    check(
        pooled(4).call(
            jobs.take_turns_in_coroutines,
            8,
            32,
            query_before="sometimes",
            query=True,
            context=context,
        )
    )


@pytest.mark.parametrize("engine", POOLS)
def test_a_lease_needs_no_second_connection_of_the_pool(engine, pooled, until):
    """Background threads have their own connections, whatever the engine's name."""
    process = pooled(1, engine)
    assert process.call(jobs.lease_in_a_transaction, "stock:7") == 1
    with db_lock("stock:7"):
        process.start(jobs.wait_quietly, "stock:7")
        until(lambda: backends["default"].waiting("stock:7") == 1)
    assert process.hear()


@pytest.mark.parametrize("engine", POOLS)
def test_a_holder_releases_while_the_pool_is_exhausted(engine, pooled):
    """Its connection was closed in the meantime.

    Transactions that wait for its key use the whole pool.
    """
    seconds, granted = pooled(2, engine).call(
        jobs.release_while_the_pool_is_exhausted, "stock:7", 2
    )
    assert (seconds < POOL_TIMEOUT, granted) == (True, 2)


def test_a_key_is_released_at_exit_without_a_pooled_connection(pooled, is_busy):
    pooled(1).call(jobs.hold_at_exit, "stock:7")
    assert not is_busy("stock:7")


GUNICORN = (
    "gunicorn",
    "--worker-class=gthread",
    "--threads=8",
    "--bind=127.0.0.1:{port}",
    "tests.pooled_site:wsgi",
)
UVICORN = ("uvicorn", "--host=127.0.0.1", "--port={port}", "tests.pooled_site:asgi")


@pytest.mark.parametrize(
    ("server", "pages"),
    [
        pytest.param(GUNICORN, ["/lock/", "/query/"], id="gunicorn"),
        pytest.param(UVICORN, ["/lock/", "/query/", "/coroutine/"], id="uvicorn"),
    ],
)
def test_servers_with_more_threads_than_connections_answer(server, pages, serve):
    """No request fails, and no increment is lost."""
    Counter.objects.create(name="requests", value=0)
    port = serve(*server)

    def get(page):
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            client.request("GET", page)
            return client.getresponse().status
        finally:
            client.close()

    for number, page in enumerate(pages, 1):
        with ThreadPoolExecutor(8) as clients:
            assert set(clients.map(get, [page] * 16)) == {200}
        assert Counter.objects.get(name="requests").value == 16 * number
