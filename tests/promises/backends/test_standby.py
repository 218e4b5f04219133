"""Locks in a PostgreSQL that fails over to its standby.

Processes acquire, hold and run guarded transactions during the failover.
"""

from __future__ import annotations

import contextlib
import json

import pytest

from tests import jobs
from tests.promises.backends import cluster_jobs
from tests.proxy import Proxy
from tests.servers import PostgreSQL, Standby
from tests.timing import eventually

KINDS = ["default", "optimistic"]


class Pair:
    """A primary and its standby, whose connection ``link`` can be cut."""

    def __init__(self, stack, *, synchronous):
        self.primary = stack.enter_context(PostgreSQL())
        self.link = Proxy(self.primary.port)
        stack.callback(self.link.close)
        self.standby = stack.enter_context(Standby(self.link.port))
        if synchronous:
            self.primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            self.primary.execute("SELECT pg_reload_conf()")
        self.ports = self.primary.port, self.standby.port
        state = "sync" if synchronous else "async"
        eventually(
            lambda: (
                self.primary.execute("SELECT sync_state FROM pg_stat_replication")
                == [(state,)]
            ),
            pause=0.1,
        )

    def fail_over(self):
        self.primary.crash()
        self.standby.promote()

    def rows(self):
        ((count,),) = self.standby.execute("SELECT count(*) FROM tests_counter")
        return count


@pytest.fixture
def pair():
    with contextlib.ExitStack() as stack:
        yield lambda **options: Pair(stack, **options)


@pytest.fixture
def process(doomed):
    """Return a function that starts a process which uses the writable server."""

    def start(*ports, session="read-write"):
        there = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": "postgres",
            "USER": "dlocks",
            "HOST": ",".join("127.0.0.1" for _ in ports),
            "PORT": ",".join(map(str, ports)),
            "OPTIONS": {"target_session_attrs": session},
        }
        return doomed(
            DLOCKS_TEST_ENGINE="postgresql",
            DLOCKS_TEST_DATABASES=json.dumps({"default": there}),
        )

    return start


def test_session_locks_on_a_standby_are_refused(pair, process):
    """Each server has its own advisory locks, so two callers could hold the key."""
    pair = pair(synchronous=False)
    worker = process(pair.standby.port, session="any")
    attempt = cluster_jobs.error_of_acquiring, "stock:7"
    assert "is a standby" in worker.call(*attempt, using="session")
    pair.fail_over()
    assert worker.call(*attempt, using="session") is None


def test_a_synchronous_failover_loses_nothing_confirmed(pair, process):
    """The processes lock in different ways, and exclude each other all the time."""
    pair = pair(synchronous=True)
    holder, *crowd = (process(*pair.ports) for _ in range(4))
    holder.call(cluster_jobs.prepare)
    tokens = {
        using: holder.call(jobs.acquire, f"held {using}", ttl=60, using=using)
        for using in KINDS
    }
    ways = [("guard", "default"), ("transaction", "optimistic"), ("lease", "default")]
    for worker, (how, using) in zip(crowd, ways, strict=True):
        worker.start(
            cluster_jobs.number_rows, "numbers", how, using=using, ttl=3, timeout=20
        )
    eventually(lambda: pair.rows() > 30, pause=0.1)
    pair.fail_over()
    before = pair.rows()
    eventually(lambda: pair.rows() > before + 30, pause=0.1)
    for worker in crowd:
        worker.tell()
    answers = [worker.hear()[0] for worker in crowd]
    assert all(answers), "each way has confirmed rows"
    written = sorted(one for found in answers for one in found)
    # No two transactions saw the same rows, and no confirmed row is lost.
    numbers = holder.call(cluster_jobs.numbers)
    assert numbers == list(range(len(numbers)))
    assert {number for number, _ in written} <= set(numbers)
    granted = [token for _, token in written]
    assert granted == sorted(set(granted))
    # The holds survive the failover.
    assert holder.call(jobs.check) == "held"

    def attempt(using):
        key = f"held {using}"
        return crowd[0].call(jobs.try_once, key, timeout=0, using=using)

    assert [attempt(using) for using in KINDS] == [None, None]
    assert holder.call(jobs.release_all) == ["released", "released"]
    assert all(attempt(using) > token for using, token in tokens.items())


def test_an_asynchronous_failover_loses_leases_and_data_together(pair, process):
    pair = pair(synchronous=False)
    holder, other = process(*pair.ports), process(*pair.ports)
    holder.call(cluster_jobs.prepare)
    policies = {
        using: {"using": using, "ttl": 2, "timeout": 30, "key": f"data {using}"}
        for using in KINDS
    }

    def acquire(state):
        for using, policy in policies.items():
            for number in range(3):
                key = f"{state} {using} {number}"
                tokens[key, using] = holder.call(jobs.acquire, key, ttl=60, using=using)
            data[using] = other.call(
                cluster_jobs.write_under, name=f"{state} {using}", **policy
            )

    tokens, data = {}, {}
    acquire("reached")
    eventually(lambda: pair.rows() == len(KINDS), pause=0.1)
    pair.link.cut.set()
    acquire("lost")
    pair.fail_over()
    # A holder that can reach the new server learns of the loss at its next request or
    # renewal.
    assert holder.call(jobs.checks) == [
        "held" if key.startswith("reached") else "LockLost" for key, _ in tokens
    ]
    reached = [f"reached {using}" for using in KINDS]
    assert other.call(cluster_jobs.names) == reached
    for (key, using), before in tokens.items():
        if key.startswith("reached"):
            assert other.call(jobs.try_once, key, timeout=0, using=using) is None
        else:
            assert other.call(jobs.try_once, key, timeout=20, using=using) > before
    # Its lease may have to expire first, because the failover may have lost the release
    # too.
    for using, policy in policies.items():
        token = other.call(cluster_jobs.write_under, name=f"again {using}", **policy)
        assert token > data[using]
    again = [f"again {using}" for using in KINDS]
    assert other.call(cluster_jobs.names) == [*again, *reached]


def test_a_guard_on_a_lease_lost_in_failover_cannot_commit(pair, process):
    pair = pair(synchronous=False)
    other, *holders = (process(*pair.ports) for _ in range(3))
    other.call(cluster_jobs.prepare)
    # All tables must have been replicated, including those of dlocks.
    ((written,),) = pair.primary.execute("SELECT pg_current_wal_lsn()")
    eventually(
        lambda: (
            pair.standby.execute(f"SELECT pg_last_wal_replay_lsn() >= '{written}'")
            == [(True,)]
        )
    )
    pair.link.cut.set()
    tokens = []
    for using, holder in zip(KINDS, holders, strict=True):
        policy = {"ttl": 60, "using": using, "when_told": True}
        tokens.append(holder.call(cluster_jobs.guard, using, "first", **policy))
    pair.fail_over()
    for using, holder, token in zip(KINDS, holders, tokens, strict=True):
        other.start(cluster_jobs.guard, using, using, timeout=20, using=using)
        cluster_jobs.check_takeover(other, token)
        assert holder.go_on() == "LockLost"
    assert other.call(cluster_jobs.names) == KINDS


def test_a_primary_without_its_sync_standby_grants_nothing(pair, process):
    """One that is cut off after a failover grants a key to no second holder."""
    pair = pair(synchronous=True)
    holder, other = process(*pair.ports), process(*pair.ports)
    holder.call(cluster_jobs.prepare)
    holder.call(jobs.acquire, "held", ttl=60)
    token = holder.call(jobs.try_once, "key")
    pair.link.cut.set()
    # A release does not wait for replication. If the release is lost, the lease
    # expires.
    assert holder.call(jobs.release_all) == ["released"]
    other.start(jobs.try_once, "key")
    eventually(
        lambda: pair.primary.execute(
            "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        ),
        pause=0.1,
    )
    # No other connection sees it either.
    assert pair.primary.execute(
        "SELECT version FROM dlocks_resourcelock WHERE key_resource = 'key'"
    ) == [(token,)]
    with pytest.raises(TimeoutError):
        other.hear(1.0)
    pair.link.cut.clear()
    assert other.hear() > token
