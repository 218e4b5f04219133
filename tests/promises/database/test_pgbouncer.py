"""PgBouncer with transaction pooling: nothing depends on the session."""

from __future__ import annotations

import contextlib
import os
import time

import pytest

from dlocks import db_lock
from dlocks.backends.database import PessimisticBackend
from tests import jobs
from tests.for_each import ROWS
from tests.servers import PgBouncer
from tests.settings import PORT
from tests.timing import in_time
from tests.volume import volume

pytestmark = [
    pytest.mark.engine("postgresql"),
    pytest.mark.django_db(transaction=True),
]


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

    there = {
        "host": "127.0.0.1",
        "user": "dlocks",
        "dbname": os.environ["DLOCKS_TEST_NAME"],
    }
    with contextlib.ExitStack() as stack:
        direct = psycopg.connect(port=PORT, options="-c TimeZone=UTC", **there)
        fresh = settings(stack.enter_context(contextlib.closing(direct)))
        seen = set()
        for _ in range(bouncer.sessions):
            client = psycopg.connect(port=bouncer.port, prepare_threshold=None, **there)
            stack.enter_context(contextlib.closing(client))
            # Each client is in its own transaction, and so has its own session.
            (pid,) = client.execute("SELECT pg_backend_pid()").fetchone()
            assert pid != client.info.backend_pid, "not behind the pooler"
            seen.add(pid)
            client.execute("SET LOCAL TimeZone = 'UTC'")
            assert settings(client) == fresh
            for what in (
                "pg_listening_channels()",
                "pg_prepared_statements",
                "pg_cursors",
                "pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()",
            ):
                assert client.execute(f"SELECT * FROM {what}").fetchall() == []
        assert len(seen) == bouncer.sessions


def settings(client):
    names = (
        "lock_timeout, statement_timeout, synchronous_commit, search_path, role,"
        " idle_in_transaction_session_timeout, default_transaction_isolation,"
        " session_replication_role"
    )
    return [client.execute(f"SHOW {name}").fetchone() for name in names.split(", ")]


def listens(pipe, **options):
    """Return whether waiters of this process are notified by the server."""
    backend = PessimisticBackend("default", **options)
    listener = backend.notifier(f"dlocks_test_{os.getpid()}")
    backend.close()
    return listener is not None and listener.is_complete


def test_processes_listen_only_without_the_pooler(pooled, workers):
    assert pooled().call(listens) is False
    (direct,) = workers(1)
    assert direct.call(listens) is True
    assert direct.call(listens, listen=False) is False


def test_no_increment_is_lost_behind_the_pooler(pooled, count_together):
    """Leases and locks in transactions exclude each other without a session."""
    crowd, times = [pooled() for _ in range(3)], volume(7)
    for using, scope in (
        ("default", "lease"),
        ("default", "transaction"),
        ("optimistic", "transaction"),
        ("insert", "lease"),
    ):
        count_together(crowd, times, using=using, scope=scope, timeout=None)


def test_the_queue_keeps_its_order_behind_the_pooler(pooled, in_queue):
    """A release, the end of a transaction and an expired lease hand over the key."""
    crowd = [pooled() for _ in range(3)]
    for worker in crowd:
        # The process has started when it replies.
        worker.call(jobs.threads)
    for using in ROWS:
        with db_lock("stock:7", using=using):
            for number, worker in enumerate(crowd):
                worker.start(jobs.wait_quietly, "stock:7", using=using, timeout=30)
                in_queue(number + 1)
        released = time.monotonic()
        answers = [worker.hear() for worker in crowd]
        assert answers == sorted(answers, key=lambda answer: answer[1])
        in_time(answers[-1][0] - released, 2.0)
    holder, waiting, *_ = crowd

    def wait():
        holder.hear()
        waiting.start(jobs.wait_quietly, "stock:7", timeout=30)
        in_queue(1)

    for roll_back in (False, True):
        holder.start(jobs.hold_in_transaction, "stock:7", roll_back=roll_back)
        wait()
        ended = time.monotonic()
        assert holder.go_on() == "ended"
        in_time(waiting.hear()[0] - ended, 1.5)
    holder.start(jobs.hold, "stock:7", ttl=1.0)
    wait()
    holder.kill()
    in_time(waiting.hear()[0] - holder.killed_at, 1.0 + 0.5 + 0.7)
