"""Locks in a Galera cluster of three nodes, with processes that each use another node."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
from dataclasses import replace

import MySQLdb
import pytest

from tests import jobs
from tests.backends import cluster_jobs
from tests.nemesis.__main__ import galera_plan
from tests.nemesis.campaign import run
from tests.servers import Galera
from tests.timing import eventually

KINDS = ["default", "optimistic", "insert"]


@pytest.fixture(scope="module")
def cluster():
    """A cluster that nobody breaks."""
    with Galera() as cluster:
        yield cluster.nodes


@pytest.fixture
def process(doomed):
    """Return a function that starts a process which uses a node, and another one by the alias "other"."""

    def start(node, other=None, **options):
        there = {"ENGINE": "django.db.backends.mysql", "NAME": "dlocks", "USER": "root", "HOST": "127.0.0.1"}
        databases = {"other": {**there, "PORT": str(other.port), "OPTIONS": options}} if other else {}
        return doomed(**node.environment, DLOCKS_TEST_DATABASES=json.dumps(databases))

    return start


@pytest.fixture
def three(cluster, process):
    """A process at each node, and no rows of the last test."""
    found = [process(node) for node in cluster]
    prepare(found[0], cluster)
    return found


def prepare(worker, nodes):
    worker.call(cluster_jobs.prepare)
    for node in nodes:
        node.catch_up()


def crowd(workers, how, using, seconds=2.0, **policy):
    """Number rows by all of the workers; return all that was committed and what went wrong."""
    for worker in workers:
        policy |= {"seconds": seconds, "using": using, "timeout": 30, "ttl": 5}
        worker.start(cluster_jobs.number_rows, f"{how} {using} {policy}", how, **policy)
    answers = [worker.hear() for worker in workers]
    return [one for written, _ in answers for one in written], [one for _, troubles in answers for one in troubles]


# Exclusion.


# A whole suite, and perhaps the start of the cluster.
@pytest.mark.timeout(300)
def test_the_backends_keep_the_rules_of_the_waist_on_a_node(cluster, tmp_path):
    """What passes on a single server passes here too."""
    environment = {**os.environ, **cluster[0].environment, "DLOCKS_TEST_DIRECTORY": str(tmp_path)}
    suite = [
        "tests/test_contract.py",
        "-k",
        "TestPessimistic or TestOptimistic or TestInsert",
        "-p",
        "no:cacheprovider",
    ]
    command = [sys.executable, "-m", "pytest", "-q", *suite]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.parametrize("using", KINDS)
def test_a_lease_is_one_process_s_at_a_time_whatever_nodes_they_use(using, three, tmp_path):
    path = tmp_path / "counter"
    path.write_text("0 0")
    for worker in three:
        worker.start(jobs.count, str(path), f"count {using}", times=30, scope="lease", using=using, timeout=60)
    tokens = [token for worker in three for token in worker.hear()]
    assert int(path.read_text().split()[0]) == 90
    assert len(set(tokens)) == 90


@pytest.mark.parametrize(
    ("how", "policy"), [("guard", {}), ("guard", {"fair": False}), ("lease", {}), ("transaction", {})]
)
@pytest.mark.parametrize("using", KINDS)
def test_what_commits_has_seen_what_was_committed_before_it_under_the_lock(using, how, policy, cluster, three):
    """Each row has the number of those before it: two of one number were written by two who both had the lock."""
    written, troubles = crowd(three, how, using, **policy)
    assert len(written) > 3
    cluster[0].catch_up()
    # What was not confirmed may have been committed.
    numbers = three[0].call(cluster_jobs.numbers)
    assert numbers == list(range(len(numbers)))
    assert {number for number, _ in written} <= set(numbers)
    assert len(numbers) <= len(written) + len(troubles)
    if using != "insert":
        # Its tokens come from the clocks of the nodes.
        tokens = [token for _, token in sorted(written)]
        assert tokens == sorted(set(tokens))
    if policy:
        # Nobody in line writes to the row of the lock, so no guarded commit is refused.
        assert "OperationalError" not in troubles


def test_without_a_lock_they_do_not_see_each_other(three):
    """The control."""
    crowd(three, "nothing", "default", seconds=2)
    numbers = three[0].call(cluster_jobs.numbers)
    assert len(set(numbers)) < len(numbers)


# A transaction that has the row on its node is not alone: the first to commit wins.


@pytest.mark.parametrize("using", KINDS)
@pytest.mark.parametrize("wait", ["inside", "at the commit"])
def test_of_two_transactions_that_both_have_the_key_one_commits(using, wait, cluster, three):
    first, second, _ = three
    key = f"both {using} {wait}"
    first.call(jobs.try_once, key, using=using)
    for node in cluster:
        node.catch_up()
    aborted = cluster[1].status("wsrep_local_bf_aborts")
    for worker, name in ((first, "first"), (second, "second")):
        worker.start(cluster_jobs.hold_and_write, key, name, wait=wait, using=using)
        assert isinstance(worker.hear(), int), "both have the row, each on its node"
    first.tell()
    assert first.hear() == "committed"
    eventually(lambda: cluster[1].status("wsrep_local_bf_aborts") != aborted)
    second.tell()
    assert second.hear() == ("LockLost" if wait == "inside" else "OperationalError")
    names = ["first, after", "first, inside"] if wait == "inside" else ["first, inside"]
    cluster[1].catch_up()
    assert second.call(cluster_jobs.names) == names


@pytest.mark.parametrize("using", KINDS)
def test_who_goes_on_after_losing_the_lock_commits_nothing_either(using, cluster, three):
    first, second, _ = three
    key = f"on {using}"
    first.call(jobs.try_once, key, using=using)
    for node in cluster:
        node.catch_up()
    aborted = cluster[1].status("wsrep_local_bf_aborts")
    second.start(cluster_jobs.go_on_after_an_error, key, "second", using=using)
    assert second.hear() == "inside"
    first.call(cluster_jobs.write_under, key, "first", using=using)
    eventually(lambda: cluster[1].status("wsrep_local_bf_aborts") != aborted)
    second.tell()
    assert second.hear() == "TransactionManagementError"
    cluster[1].catch_up()
    assert second.call(cluster_jobs.names) == ["first"]


@pytest.mark.parametrize("using", KINDS)
def test_a_guarded_transaction_paused_past_its_lease_commits_nothing_once_another_node_has_the_key(
    using, cluster, three
):
    first, second, _ = three
    key = f"guard {using}"
    first.start(cluster_jobs.guard, key, "first", ttl=2.0, using=using)
    token = first.hear()
    assert first.hear() == "inside"
    first.stop()
    # On one server nobody would get it before that transaction has ended. Row locks do not reach the other nodes.
    second.start(cluster_jobs.guard, key, "second", timeout=30, using=using)
    assert second.hear() > token
    assert second.hear() == "inside"
    second.tell()
    assert second.hear() == "committed"
    first.resume()
    first.tell()
    assert first.hear() in {"OperationalError", "LockBackendError", "LockLost"}
    cluster[0].catch_up()
    assert first.call(cluster_jobs.names) == ["second"]


# What the next holder sees.


def test_the_next_holder_sees_what_the_last_one_committed_although_its_node_was_behind(cluster, three):
    first, second, _ = three
    behind = MySQLdb.connect(host="127.0.0.1", port=cluster[1].port, user="root")
    behind.cursor().execute("FLUSH TABLES WITH READ LOCK")
    first.call(cluster_jobs.write_under, "seen", "first")
    second.start(cluster_jobs.names_under, "seen", timeout=60)
    behind.cursor().execute("UNLOCK TABLES")
    behind.close()
    assert second.hear() == ["first"]


def test_who_reads_from_another_node_than_the_lock_s_has_to_wait_for_it(cluster, three, process):
    """Where a balancer gives each connection another node: ``wsrep_sync_wait`` makes up for that."""
    first, _, third = three
    plain = process(cluster[0], other=cluster[1])
    patient = process(cluster[0], other=cluster[1], init_command="SET wsrep_sync_wait = 7")
    for worker in (plain, patient):
        assert worker.call(cluster_jobs.names_under, "apart", using="other") == []
    behind = MySQLdb.connect(host="127.0.0.1", port=cluster[1].port, user="root")
    behind.cursor().execute("FLUSH TABLES WITH READ LOCK")
    first.call(cluster_jobs.write_under, "apart", "first")
    cluster[2].catch_up()
    assert third.call(cluster_jobs.names) == ["first"]
    assert plain.call(cluster_jobs.names_under, "apart", using="other") == [], "the control"
    patient.start(cluster_jobs.names_under, "apart", using="other", timeout=60)
    behind.cursor().execute("UNLOCK TABLES")
    behind.close()
    assert patient.hear() == ["first"]


# Nodes that are lost, or not ready.


@pytest.mark.timeout(300)
def test_when_a_node_dies_with_its_holder_the_others_go_on(start, process):
    one, two, three = start(Galera()).nodes
    holder, left, right = process(one), process(two), process(three)
    prepare(left, [one, two, three])
    held = holder.call(jobs.acquire, "key", ttl=2)
    assert left.call(jobs.try_once, "key", timeout=0) is None
    one.crash()
    tokens = [worker.call(cluster_jobs.token_of, "key", timeout=40) for worker in (left, right)]
    assert held < tokens[0] < tokens[1]
    assert holder.call(jobs.release_all) == ["LockLost"]
    assert holder.call(jobs.acquire, "key") == "LockBackendError"
    one.come_back(two, three)
    assert holder.call(jobs.try_once, "key", timeout=20) > tokens[1]
    # Without a majority nobody is told that a key is taken, or free: it cannot be asked for.
    assert left.call(jobs.acquire, "kept", ttl=60)
    one.crash()
    three.crash()
    eventually(lambda: two.status("wsrep_ready") == "OFF", 60)
    assert left.call(jobs.acquire, "kept") == "LockBackendError"
    for using in KINDS:
        assert left.call(jobs.acquire, "other", using=using) == "LockBackendError"
        assert process(two).call(jobs.acquire, "kept", using=using) == "LockBackendError"


@pytest.mark.timeout(300)
def test_the_promises_hold_while_nodes_are_killed_and_stopped_and_processes_too():
    """Three nodes, each with two of the processes: leases, guarded work, transactions, shares and permits."""
    plan = galera_plan(20)
    # In so short a time none of them might be a node's.
    report = run(replace(plan, seconds=25.0, faults={**plan.faults, "node_stop": 2.0}))
    assert report.passed, "\n".join(report.lines())
    assert report.counts["grants"] > 50
    assert report.counts["faults: down"]
    assert report.counts["faults that hit one holding"]


# Clocks: each node has its own.


def libfaketime():
    (found,) = glob.glob("/usr/lib/*/faketime/libfaketime.so.1")  # noqa: PTH207
    return found


@pytest.mark.timeout(300)
def test_nodes_whose_clocks_differ(start, process):
    """Tokens grow all the same, and guarded work is safe; leases end too soon, and what is free seems so too late."""
    late = {"LD_PRELOAD": libfaketime(), "FAKETIME": "-3s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    nodes = start(Galera({}, {}, late)).nodes
    one, other, behind = (process(node) for node in nodes)
    prepare(one, nodes)
    for using in ("default", "optimistic"):
        tokens = [one.call(cluster_jobs.token_of, using, using=using, timeout=60)]
        nodes[2].catch_up()
        assert behind.call(jobs.try_once, using, timeout=0, using=using) is None
        for worker in (behind, one, behind):
            tokens.append(worker.call(cluster_jobs.token_of, using, using=using, timeout=60))
        assert tokens == sorted(set(tokens))
    # A lease by the clock that is behind has ended for the others when it begins; a guarded transaction in it has not.
    behind.start(cluster_jobs.guard, "early", "early", ttl=2.4, timeout=60)
    token = behind.hear()
    assert behind.hear() == "inside"
    one.start(cluster_jobs.guard, "early", "second", timeout=60)
    assert one.hear() > token
    assert one.hear() == "inside"
    one.tell()
    assert one.hear() == "committed"
    behind.tell()
    assert behind.hear() in {"OperationalError", "LockBackendError", "LockLost"}
    assert other.call(cluster_jobs.token_of, "early", timeout=60) > token
    assert one.call(cluster_jobs.names) == ["second"]


# What is known to one node only.


def test_locks_of_sessions_are_refused(cluster, three):
    with pytest.raises(RuntimeError, match="GET_LOCK is known to one node only"):
        three[0].call(jobs.acquire, "key", using="session")
    assert "dlocks.E007" in three[0].call(cluster_jobs.system_check)
