"""Locks in a PostgreSQL that fails over to its standby.

Processes acquire, hold and run guarded transactions during the failover.
"""

from __future__ import annotations

import contextlib
import json

import pytest

from tests import jobs
from tests.backends import cluster_jobs
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
        state = "sync" if synchronous else "async"
        eventually(
            lambda: (
                self.primary.execute("SELECT sync_state FROM pg_stat_replication")
                == [(state,)]
            )
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

    def start(pair):
        there = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": "postgres",
            "USER": "dlocks",
            "HOST": "127.0.0.1,127.0.0.1",
            "PORT": f"{pair.primary.port},{pair.standby.port}",
            "OPTIONS": {"target_session_attrs": "read-write"},
        }
        return doomed(
            DLOCKS_TEST_ENGINE="postgresql",
            DLOCKS_TEST_DATABASES=json.dumps({"default": there}),
        )

    return start


def test_session_locks_on_a_standby_are_refused(pair, doomed):
    """Session locks on a standby are refused.

    Each server has its own advisory locks, so two callers could hold the same key.
    """
    pair = pair(synchronous=False)
    there = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "postgres",
        "USER": "dlocks",
        "HOST": "127.0.0.1",
        "PORT": str(pair.standby.port),
    }
    worker = doomed(
        DLOCKS_TEST_ENGINE="postgresql",
        DLOCKS_TEST_DATABASES=json.dumps({"default": there}),
    )
    assert "is a standby" in worker.call(
        cluster_jobs.error_of_acquiring, "stock:7", using="session"
    )
    pair.fail_over()
    assert (
        worker.call(cluster_jobs.error_of_acquiring, "stock:7", using="session") is None
    )


@pytest.mark.parametrize(
    ("how", "using"),
    [("guard", "default"), ("transaction", "optimistic"), ("lease", "default")],
)
def test_a_synchronous_failover_loses_nothing_confirmed(using, how, pair, process):
    pair = pair(synchronous=True)
    holder, *crowd = (process(pair) for _ in range(4))
    holder.call(cluster_jobs.prepare)
    held = holder.call(jobs.acquire, "held", ttl=60, using=using)
    for worker in crowd:
        worker.start(
            cluster_jobs.number_rows, "numbers", how, using=using, ttl=3, timeout=20
        )
    eventually(lambda: pair.rows() > 30)
    pair.fail_over()
    before = pair.rows()
    eventually(lambda: pair.rows() > before + 30)
    for worker in crowd:
        worker.tell()
    answers = [worker.hear() for worker in crowd]
    written = sorted(one for found, _ in answers for one in found)
    # No two transactions saw the same rows, and no confirmed row is lost.
    numbers = holder.call(cluster_jobs.numbers)
    assert numbers == list(range(len(numbers)))
    assert {number for number, _ in written} <= set(numbers)
    tokens = [token for _, token in written]
    assert tokens == sorted(set(tokens))
    # The hold survives the failover.
    assert holder.call(jobs.check) == "held"
    assert crowd[0].call(jobs.try_once, "held", timeout=0, using=using) is None
    assert holder.call(jobs.release_all) == ["released"]
    assert crowd[0].call(jobs.try_once, "held", timeout=0, using=using) > held


@pytest.mark.parametrize("using", KINDS)
def test_an_asynchronous_failover_loses_leases_and_data_together(using, pair, process):
    pair = pair(synchronous=False)
    holder, other = process(pair), process(pair)
    holder.call(cluster_jobs.prepare)
    reached = {f"reached {number}": None for number in range(3)}
    lost = {f"lost {number}": None for number in range(4)}
    for key in reached:
        reached[key] = holder.call(jobs.acquire, key, ttl=60, using=using)
    policy = {"using": using, "ttl": 2, "timeout": 30}
    other.call(cluster_jobs.write_under, "data", "reached", **policy)
    eventually(lambda: pair.rows() == 1)
    pair.link.cut.set()
    for key in lost:
        lost[key] = holder.call(jobs.acquire, key, ttl=60, using=using)
    token = other.call(cluster_jobs.write_under, "data", "lost", **policy)
    pair.fail_over()
    # A holder that can reach the new server learns of the loss at its next request or
    # renewal.
    assert holder.call(cluster_jobs.still_held) == {
        **dict.fromkeys(reached, True),
        **dict.fromkeys(lost, False),
    }
    assert other.call(cluster_jobs.names) == ["reached"]
    for key in reached:
        assert other.call(jobs.try_once, key, timeout=0, using=using) is None
    for key, before in lost.items():
        assert other.call(jobs.try_once, key, timeout=20, using=using) > before
    # Its lease may have to expire first, because the failover may have lost the release
    # too.
    assert other.call(cluster_jobs.write_under, "data", "again", **policy) > token
    assert other.call(cluster_jobs.names) == ["again", "reached"]


@pytest.mark.parametrize("using", KINDS)
def test_a_guard_on_a_lease_lost_in_failover_cannot_commit(using, pair, process):
    pair = pair(synchronous=False)
    holder, other = process(pair), process(pair)
    holder.call(cluster_jobs.prepare)
    # All tables must have been replicated, including those of dlocks.
    ((written,),) = pair.primary.execute("SELECT pg_current_wal_lsn()")
    eventually(
        lambda: (
            pair.standby.execute(f"SELECT pg_last_wal_replay_lsn() >= '{written}'")
            == [(True,)]
        )
    )
    pair.link.cut.set()
    holder.start(cluster_jobs.guard_when_told, "key", "first", ttl=60, using=using)
    token = holder.hear()
    pair.fail_over()
    other.start(cluster_jobs.guard, "key", "second", timeout=20, using=using)
    assert other.hear() > token
    assert other.hear() == "inside"
    other.tell()
    assert other.hear() == "committed"
    holder.tell()
    assert holder.hear() == "LockLost"
    assert other.call(cluster_jobs.names) == ["second"]


def test_a_primary_without_its_sync_standby_grants_nothing(pair, process):
    """A primary without its synchronous standby grants nothing.

    A primary that is cut off after a failover therefore cannot grant a key to a second
    holder.
    """
    pair = pair(synchronous=True)
    holder, other = process(pair), process(pair)
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
        )
    )
    # No other connection sees it either.
    assert pair.primary.execute(
        "SELECT version FROM dlocks_resourcelock WHERE key_resource = 'key'"
    ) == [(token,)]
    with pytest.raises(TimeoutError):
        other.hear(1.0)
    pair.link.cut.clear()
    assert other.hear() > token
