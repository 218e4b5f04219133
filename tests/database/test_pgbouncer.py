"""PgBouncer with transaction pooling: nothing depends on the session."""

from __future__ import annotations

import os
import time

import pytest
from django.db import connection

from dlocks import db_lock
from tests import jobs
from tests.internals import backends
from tests.servers import PgBouncer
from tests.settings import PORT
from tests.timing import in_time

pytestmark = [
    pytest.mark.engine("postgresql"),
    pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"]),
]

FAMILY = pytest.mark.parametrize("using", ["default", "optimistic", "insert"])


@pytest.fixture(scope="module")
def bouncer():
    with PgBouncer(int(PORT)) as started:
        yield started


@pytest.fixture
def pooled(bouncer, doomed, django_db_setup):
    """Return a function that starts a process behind the pooler.

    At the end, check that the sessions of the pooler are unchanged.
    """

    def get():
        return doomed(**bouncer.environment)

    yield get
    inspect(bouncer)


def inspect(bouncer):
    """Check that no session of the pooler has changed.

    A session has no changed setting, channel, prepared statement, cursor or advisory
    lock.
    """
    import psycopg

    clients = []
    try:
        fresh = settings(psycopg.connect(dbname=os.environ["DLOCKS_TEST_NAME"],
        host="127.0.0.1", port=PORT,
                                         user="dlocks",
                                             options="-c TimeZone=UTC"))  # fmt: skip
        seen = set()
        for _ in range(bouncer.sessions):
            client = psycopg.connect(
                host="127.0.0.1", port=bouncer.port, user="dlocks",
                    dbname=os.environ["DLOCKS_TEST_NAME"],
                prepare_threshold=None,
            )  # fmt: skip
            clients.append(client)
            # Each client is in its own transaction, and so has its own session.
            (pid,) = client.execute("SELECT pg_backend_pid()").fetchone()
            seen.add(pid)
            client.execute("SET LOCAL TimeZone = 'UTC'")
            assert settings(client, keep=True) == fresh
            for what in (
                "pg_listening_channels()",
                "pg_prepared_statements",
                "pg_cursors",
            ):
                assert client.execute(f"SELECT * FROM {what}").fetchall() == []
            assert client.execute(
                "SELECT * FROM pg_locks WHERE locktype = 'advisory'"
                " AND pid = pg_backend_pid()"
            ).fetchall() == []  # fmt: skip
        assert len(seen) == bouncer.sessions
    finally:
        for client in clients:
            client.close()


def settings(client, *, keep=False):
    names = ("lock_timeout", "statement_timeout", "synchronous_commit",
        "idle_in_transaction_session_timeout",
             "search_path", "default_transaction_isolation", "session_replication_role",
             "role")  # fmt: skip
    found = [client.execute(f"SHOW {name}").fetchone()[0] for name in names]
    if not keep:
        client.close()
    return found


def test_the_tests_connect_through_the_pooler(bouncer):
    import psycopg

    with psycopg.connect(
        host="127.0.0.1", port=bouncer.port, user="dlocks", dbname="postgres"
    ) as client:
        (pid,) = client.execute("SELECT pg_backend_pid()").fetchone()
        assert pid != client.info.backend_pid


def test_processes_listen_only_without_the_pooler(pooled, workers):
    assert pooled().call(jobs.listens) is False
    (direct,) = workers(1)
    assert direct.call(jobs.listens) is True
    assert direct.call(jobs.listens, listening=False) is False


def test_the_option_says_whether_to_listen(channel):
    backend = backends["default"]
    assert type(backend)("default", listen=False).notifier(channel) is None
    assert type(backend)("default", listen=True).notifier(channel) is not None
    connection.close()
    with pytest.raises(TypeError, match="listen"):
        type(backend)("default", listen="yes")


@FAMILY
@pytest.mark.parametrize("scope", ["lease", "transaction"])
def test_no_increment_is_lost_behind_the_pooler(using, scope, pooled, tmp_path):
    path = tmp_path / "counter"
    path.write_text("0 0")
    crowd = [pooled() for _ in range(5)]
    for worker in crowd:
        worker.start(
            jobs.count,
            str(path),
            "counter",
            times=20,
            scope=scope,
            using=using,
            timeout=None,
        )
    tokens = sorted(token for worker in crowd for token in worker.hear(120))
    assert path.read_text() == f"100 {tokens[-1]}"
    assert len(set(tokens)) == 100


@FAMILY
def test_the_queue_keeps_its_order_behind_the_pooler(using, pooled, until):
    crowd = [pooled() for _ in range(4)]
    for worker in crowd:
        # The process has started when it replies.
        worker.call(jobs.threads)
    with db_lock("stock:7", using=using) as hold:
        for number, worker in enumerate(crowd):
            worker.start(jobs.wait_quietly, "stock:7", using=using, timeout=30)
            until(lambda number=number: hold.queue_length() == number + 1)
    released = time.monotonic()
    answers = [worker.hear() for worker in crowd]
    assert answers == sorted(answers, key=lambda answer: answer[1])
    in_time(answers[-1][0] - released, 2.0)


def test_the_end_of_a_transaction_hands_over_behind_the_pooler(pooled, until):
    holder, waiting = pooled(), pooled()
    for roll_back in (False, True):
        holder.start(jobs.hold_in_transaction, "stock:7", roll_back=roll_back)
        holder.hear()
        waiting.start(jobs.wait_quietly, "stock:7", timeout=30)
        until(lambda: backends["default"].waiting("stock:7") == 1)
        ended = time.monotonic()
        holder.tell()
        assert holder.hear() == "ended"
        in_time(waiting.hear()[0] - ended, 1.5)


def test_a_dead_holders_key_is_handed_over_behind_the_pooler(pooled, until):
    holder, waiting = pooled(), pooled()
    holder.start(jobs.hold, "stock:7", ttl=1.0)
    holder.hear()
    waiting.start(jobs.wait_quietly, "stock:7", timeout=30)
    until(lambda: backends["default"].waiting("stock:7") == 1)
    holder.kill()
    in_time(waiting.hear()[0] - holder.killed_at, 1.0 + 0.5 + 0.7)


def test_waiters_time_out_when_the_pooler_is_exhausted(doomed, until):
    """No waiter can get a connection outside its transaction.

    Each of them raises an error soon after its timeout.
    """
    with PgBouncer(int(PORT), sessions=2) as narrow, db_lock("stock:7", ttl=60):
        crowd = [doomed(**narrow.environment) for _ in range(2)]
        for worker in crowd:
            worker.start(jobs.wait_in_an_open_transaction, "stock:7", timeout=1.0)
        for worker in crowd:
            assert worker.hear() == "open"
        for worker in crowd:
            worker.tell()
        for worker in crowd:
            error, took = worker.hear(60)
            assert error in {"LockBackendError", "LockTimeout"}
            in_time(took, 1.0 + 2 * 5.0 + 3.0)
    until(lambda: backends["default"].waiting("stock:7") == 0)
