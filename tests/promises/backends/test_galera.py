"""Locks in a Galera cluster of three nodes.

Each process uses another node.
"""

from __future__ import annotations

import json
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from tests import jobs
from tests.clocks import faketime
from tests.for_each import ROWS
from tests.nemesis.__main__ import galera_plan
from tests.nemesis.campaign import run
from tests.promises.backends import cluster_jobs
from tests.promises.backends.cluster_jobs import check_takeover
from tests.scripts import run_python
from tests.servers import Galera
from tests.timing import eventually
from tests.volume import volume

# How the lock protects a transaction. Unfair waiters differ in the queue, which is the
# same for each kind.
WAYS = [("guard", {}), ("lease", {}), ("transaction", {}), ("guard", {"fair": False})]
# The rows that each process inserts in each way.
NUMBER = volume(15)
WRITTEN = ["first, after", "first, inside"]


@pytest.fixture(scope="module")
def cluster():
    """A cluster that is never broken."""
    with Galera() as cluster:
        yield cluster.nodes


@pytest.fixture
def process(doomed):
    """Return a function that starts a process which uses a node.

    The process can use a second node through the alias "other".
    """

    def start(node, other=None, **options):
        there = {
            "ENGINE": "django.db.backends.mysql",
            "NAME": "dlocks",
            "USER": "root",
            "HOST": "127.0.0.1",
        }
        databases = (
            {"other": {**there, "PORT": str(other.port), "OPTIONS": options}}
            if other
            else {}
        )
        return doomed(**node.environment, DLOCKS_TEST_DATABASES=json.dumps(databases))

    return start


@pytest.fixture
def three(cluster, process):
    """One process at each node, without rows of earlier tests."""
    found = [process(node) for node in cluster]
    prepare(found[0], cluster)
    return found


def prepare(worker, nodes):
    worker.call(cluster_jobs.prepare)
    for node in nodes:
        node.catch_up()


def crowd(workers, how, using, **policy):
    """Insert numbered rows from all workers.

    Return the committed rows, and the names of the errors.
    """
    policy |= {"rows": NUMBER, "using": using, "timeout": 30, "ttl": 5}
    for worker in workers:
        worker.start(cluster_jobs.number_rows, f"{how} {using} {policy}", how, **policy)
    answers = [worker.hear() for worker in workers]
    return [one for written, _ in answers for one in written], [
        one for _, troubles in answers for one in troubles
    ]


# Exclusion.


def test_database_backends_keep_the_contract_on_a_galera_node(cluster, tmp_path):
    """The contract of a single server holds on a cluster too."""
    kinds = ["TestLeastPrivilege", "TestInsert"]
    suite = [f"tests/testing/test_contract.py::{kind}" for kind in kinds]
    done = run_python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", *suite),
        warnings="default",
        timeout=200,
        **cluster[0].environment,
        DLOCKS_TEST_DIRECTORY=str(tmp_path),
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.parametrize("using", ROWS)
def test_a_commit_has_seen_all_earlier_commits_under_the_lock(using, cluster, three):
    """Each row has the number of the rows before it, so no two have the same."""
    before = 0
    for how, policy in WAYS:
        if policy and using != "default":
            continue
        written, troubles = crowd(three, how, using, **policy)
        cluster[0].catch_up()
        # A transaction without a confirmation may have been committed.
        numbers = three[0].call(cluster_jobs.numbers)
        assert numbers == list(range(len(numbers))), (how, policy)
        assert {number for number, _ in written} <= set(numbers)
        assert len(written) <= len(numbers) - before <= len(written) + len(troubles)
        before = len(numbers)
        tokens = [token for _, token in sorted(written)]
        assert len(set(tokens)) == len(tokens)
        # The tokens of the insert backend come from the clocks of the nodes.
        assert using == "insert" or tokens == sorted(tokens)
        if policy:
            # Unfair waiters do not write to the lock row, so no guarded commit is
            # refused.
            assert "OperationalError" not in troubles


def test_galera_transactions_overlap_without_a_lock(three):
    """The control: without a lock, transactions overlap."""
    crowd(three, "nothing", "default")
    numbers = three[0].call(cluster_jobs.numbers)
    assert len(set(numbers)) < len(numbers)


# A transaction on one node does not lock the row on the others. The first commit wins.


@contextmanager
def one_abort(node):
    """Wait at the end until the node has aborted a transaction."""
    before = node.status("wsrep_local_bf_aborts")
    yield
    eventually(lambda: node.status("wsrep_local_bf_aborts") != before, pause=0.05)


@pytest.mark.parametrize("wait", ["inside", "at the commit"])
def test_one_of_two_transactions_with_the_same_key_commits(wait, cluster, three):
    first, second, _ = three
    for using in ROWS:
        key = f"both {using}"
        first.call(jobs.try_once, key, using=using)
        prepare(first, cluster)
        for worker, name in ((first, "first"), (second, "second")):
            worker.start(cluster_jobs.hold_and_write, key, name, wait=wait, using=using)
            assert isinstance(worker.hear(), int), "both lock the row, each on its node"
        with one_abort(cluster[1]):
            assert first.go_on() == "committed"
        lost = "LockLost" if wait == "inside" else "OperationalError"
        assert second.go_on() == lost
        cluster[1].catch_up()
        names = ["first, inside"] if wait != "inside" else WRITTEN
        assert second.call(cluster_jobs.names) == names, using


def test_a_transaction_that_ignores_its_lost_lock_cannot_commit(cluster, three):
    first, second, _ = three
    for using in ROWS:
        key = f"on {using}"
        first.call(jobs.try_once, key, using=using)
        prepare(first, cluster)
        policy = {"careless": True, "using": using}
        second.start(cluster_jobs.hold_and_write, key, "second", **policy)
        assert isinstance(second.hear(), int)
        with one_abort(cluster[1]):
            first.call(cluster_jobs.write_under, key, "first", using=using)
        assert second.go_on() == "TransactionManagementError"
        cluster[1].catch_up()
        assert second.call(cluster_jobs.names) == ["first"], using


def test_a_paused_guard_cannot_commit_after_a_takeover_on_a_node(cluster, three):
    first, second, _ = three
    for using in ROWS:
        token = first.call(cluster_jobs.guard, using, "first", ttl=2.0, using=using)
        assert first.hear() == "inside"
        first.stop()
        # On a single server, no other process would acquire the key before the end of
        # that transaction. Row locks do not reach other nodes.
        second.start(cluster_jobs.guard, using, using, timeout=30, using=using)
        check_takeover(second, token)
        first.resume()
        assert first.go_on() in {"OperationalError", "LockBackendError", "LockLost"}
    cluster[0].catch_up()
    assert first.call(cluster_jobs.names) == sorted(ROWS)


# Visibility of earlier commits.


def test_the_next_holder_on_a_lagging_node_sees_earlier_commits(
    cluster, three, process
):
    """Reads from another node than the lock's need ``wsrep_sync_wait``."""
    first, second, third = three
    plain = process(cluster[0], other=cluster[1])
    patient = process(
        cluster[0], other=cluster[1], init_command="SET wsrep_sync_wait = 7"
    )
    apart = cluster_jobs.names_under, "apart", "other"
    for worker in (plain, patient):
        assert worker.call(*apart) == []
    with closing(cluster[1].connect()) as behind:
        behind.query("FLUSH TABLES WITH READ LOCK")
        for key in ("seen", "apart"):
            first.call(cluster_jobs.write_under, key, key)
        cluster[2].catch_up()
        assert third.call(cluster_jobs.names) == ["apart", "seen"]
        assert plain.call(*apart) == [], "the control"
        patient.start(*apart, timeout=60)
        second.start(cluster_jobs.names_under, "seen", timeout=60)
    assert patient.hear() == ["apart", "seen"]
    assert second.hear() == ["apart", "seen"]


# Nodes that are lost or not ready.


def check_tokens_on_different_clocks(nodes, process):
    """Tokens still grow and guarded transactions are safe.

    Leases may expire too early, and free keys may seem held for too long.
    """
    one, other, behind = (process(node) for node in nodes)
    prepare(one, nodes)
    for using in ("default", "optimistic"):
        policy = {"using": using, "timeout": 60}
        tokens = [one.call(cluster_jobs.token_of, using, **policy)]
        nodes[2].catch_up()
        assert behind.call(jobs.try_once, using, timeout=0, using=using) is None
        tokens += [
            worker.call(cluster_jobs.token_of, using, **policy)
            for worker in (behind, one, behind)
        ]
        assert tokens == sorted(set(tokens))
    # A lease by the slow clock has expired for the other nodes when it begins. A
    # guarded transaction in it has not ended.
    token = behind.call(cluster_jobs.guard, "early", "early", ttl=2.4, timeout=60)
    assert behind.hear() == "inside"
    one.start(cluster_jobs.guard, "early", "second", timeout=60)
    check_takeover(one, token)
    assert behind.go_on() in {"OperationalError", "LockBackendError", "LockLost"}
    assert other.call(cluster_jobs.token_of, "early", timeout=60) > token
    assert one.call(cluster_jobs.names) == ["second"]


def test_other_nodes_grant_the_key_after_a_node_died(start, process):
    """Tokens grow, although the clock of one node is behind."""
    one, two, three = nodes = start(Galera({}, {}, faketime(-3))).nodes
    check_tokens_on_different_clocks(nodes, process)
    holder, left, right = (process(node) for node in nodes)
    held = holder.call(jobs.acquire, "key", ttl=2)
    assert left.call(jobs.try_once, "key", timeout=0) is None
    one.crash()
    tokens = [
        worker.call(cluster_jobs.token_of, "key", timeout=40)
        for worker in (left, right)
    ]
    assert held < tokens[0] < tokens[1]
    assert holder.call(jobs.release_all) == ["LockLost"]
    assert holder.call(jobs.acquire, "key") == "LockBackendError"
    one.come_back(two, three)
    assert holder.call(jobs.try_once, "key", timeout=20) > tokens[1]
    # Without a majority, a node does not report a key as held or free. The request
    # fails.
    assert left.call(jobs.acquire, "kept", ttl=60)
    one.crash()
    three.crash()
    eventually(lambda: two.status("wsrep_ready") == "OFF", 60)
    assert left.call(jobs.acquire, "kept") == "LockBackendError"
    for using in ROWS:
        assert left.call(jobs.acquire, "other", using=using) == "LockBackendError"
        assert (
            process(two).call(jobs.acquire, "kept", using=using) == "LockBackendError"
        )


def test_a_galera_campaign_breaks_no_promise():
    """Two processes use each of the three nodes."""
    plan = galera_plan(20)
    # The default rates could leave so short a run without a fault of a node.
    faults = {**plan.faults, "node_stop": 4.0}
    report = run(replace(plan, seconds=float(volume(12)), faults=faults))
    assert report.passed, "\n".join(report.lines())
    # How many there are depends on the machine: between 43 and 186 were seen on one.
    assert report.counts["grants"] > 10
    assert report.counts["faults: down"]
    assert report.counts["faults that hit one holding"]


# Features that only one node knows of.


def test_session_locks_are_refused_on_galera(cluster, three):
    with pytest.raises(RuntimeError, match="GET_LOCK is known to one node only"):
        three[0].call(jobs.acquire, "key", using="session")
    assert "dlocks.E007" in three[0].call(cluster_jobs.system_check)
