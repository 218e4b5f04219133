"""Redis on several servers: a cluster, and failover by Sentinels."""

from __future__ import annotations

import contextlib
import signal
import time
import traceback
from functools import partial

import pytest
import redis
from django.test import SimpleTestCase
from redis.crc import key_slot

from dlocks import LockBackendError, db_lock
from dlocks.backends.redis import RedisBackend
from tests import jobs, timing
from tests.contract import BackendContract
from tests.promises.backends.others import REDIS, claim
from tests.servers import PASSWORD, Redis, Sentinel, free_port
from tests.timing import in_time

SECRET = "open-sesame"
# The slots of a cluster of three.
SLOTS = [range(16384 * one // 3, 16384 * (one + 1) // 3) for one in range(3)]

eventually = partial(timing.eventually, but=(redis.RedisError, LockBackendError))


@pytest.fixture(scope="module")
def cluster():
    with contextlib.ExitStack() as stack:
        options = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": 5000,
            "cluster-require-full-coverage": "no",
        }
        # By default the port of the bus is 10,000 above that of the node, which may not
        # exist.
        buses = [free_port() for _ in range(3)]
        nodes = [
            stack.enter_context(Redis(**options, **{"cluster-port": bus}))
            for bus in buses
        ]
        for node, slots in zip(nodes, SLOTS, strict=True):
            with node.client() as client:
                client.execute_command("CLUSTER ADDSLOTSRANGE", slots[0], slots[-1])
                for other, bus in zip(nodes, buses, strict=True):
                    client.execute_command("CLUSTER MEET", "127.0.0.1", other.port, bus)
        wait_until_whole(nodes)
        yield nodes


def wait_until_whole(nodes):
    parts = ("cluster_state", "cluster_slots_ok", "cluster_known_nodes")
    for node in nodes:
        with node.client(decode_responses=True) as client:
            eventually(
                lambda client=client: (
                    [client.cluster("info")[part] for part in parts]
                    == ["ok", "16384", "3"]
                )
            )


@pytest.fixture
def empty(request, cluster):
    for node in cluster:
        with node.client() as client:
            client.flushall()
    if request.cls is not None:
        request.cls.nodes = cluster
    return cluster


def cluster_of(nodes, **options):
    return {"url": nodes[0].url, "cluster": True, **options}


@pytest.fixture
def backend(empty):
    return RedisBackend("cluster", **cluster_of(empty))


def claims_of(backend, number):
    claims = [claim(f"key {one}") for one in range(number)]
    for one in claims:
        assert backend.acquire(one)
    return claims


@contextlib.contextmanager
def silent(nodes, *stopped):
    """Stop nodes of the cluster, and wait at the end until all work together again."""
    for node in stopped:
        node.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for node in stopped:
            node.process.send_signal(signal.SIGCONT)
    wait_until_whole(nodes)


@pytest.mark.usefixtures("empty")
class TestCluster(BackendContract, SimpleTestCase):
    def make_backend(self, **options):
        return RedisBackend("cluster", **cluster_of(self.nodes, **options))


def test_a_cluster_spreads_keys_and_queues_over_its_nodes(
    empty, aliases, backend, until
):
    """All that belongs to one key is on one node, whatever the key's characters."""
    process = aliases(cluster={"BACKEND": REDIS, "OPTIONS": cluster_of(empty)})
    holder, waiter = process(), process()
    for key in ("1", "2", "3", "4", "}", "{}", "a}b{c}", "%7D", "ß}"):
        with holder.doing(jobs.hold, key, using="cluster") as token:
            waiter.start(jobs.wait_quietly, key, using="cluster", timeout=30)
            until(lambda key=key: backend.waiting(key) == 1)
        assert waiter.hear()[1] > token
    for node in empty:
        with node.client() as client:
            assert client.dbsize()
    assert backend.acquire(claim("%7D"))
    assert backend.acquire(claim("}"))


def test_the_locks_of_all_nodes_of_a_cluster_are_listed(backend):
    """They can also be cleared."""
    claims = claims_of(backend, 20)
    assert sorted(backend.keys()) == sorted(one.key for one in claims)
    for one in claims:
        assert backend.clear(one.key, backend.holder(one.key).token)
    assert backend.keys() == []
    assert backend.renew(claims) == {}


def test_a_silent_cluster_node_fails_only_its_own_keys(empty, aliases):
    options = cluster_of(empty, socket_timeout=0.3)
    aliases(cluster={"BACKEND": REDIS, "OPTIONS": options})
    tried = [
        db_lock(f"key {number}", using="cluster", timeout=0, ttl=1.0)
        for number in range(6)
    ]
    for lock in tried:
        lock.acquire().release()
    with silent(empty, empty[2]):
        granted, failed = 0, 0
        for lock in tried:
            began = time.monotonic()
            try:
                lock.acquire().release()
                granted += 1
            except LockBackendError:
                failed += 1
            in_time(time.monotonic() - began, 10.0)
        assert granted
        assert failed
    eventually(lambda: not any(lock.locked() for lock in tried))


def test_a_silent_cluster_node_does_not_block_other_renewals(empty):
    """A silent cluster fails in bounded time."""
    backend = RedisBackend("cluster", **cluster_of(empty, socket_timeout=0.3))
    claims = claims_of(backend, 12)
    with silent(empty, empty[2]):
        began = time.monotonic()
        left = backend.renew(claims)
        in_time(time.monotonic() - began, 10.0)
        assert {one.owner for one in claims} == left.keys(), "none is known to be lost"
        assert set(left.values()) == {0.0, 30.0}
    eventually(lambda: set(backend.renew(claims).values()) == {30.0})
    with silent(empty, *empty):
        began = time.monotonic()
        with pytest.raises(LockBackendError):
            backend.renew(claims)
        in_time(time.monotonic() - began, 20.0)
    eventually(lambda: all(map(backend.release, claims)))


def test_a_cluster_release_whose_reply_is_lost_is_a_release(backend, monkeypatch):
    """The request is sent again, and no other caller has acquired the key."""
    first, mine = claim(), claim()
    # The script is loaded, so the next reply is that to the release.
    assert backend.acquire(first)
    assert backend.release(first)
    assert backend.acquire(mine)
    read, lost = redis.Connection.read_response, []

    def lose(*arguments, **options):
        reply = read(*arguments, **options)
        if not lost:
            lost.append(reply)
            raise redis.ConnectionError("lost")
        return reply

    monkeypatch.setattr(redis.Connection, "read_response", lose)
    assert backend.release(mine)
    assert lost[0][1] == 1
    assert backend.holder("key") is None


def test_a_migrating_slot_does_not_delay_other_renewals(backend, empty):
    claims = claims_of(backend, 12)
    moving, *others = claims
    slot = key_slot(f"dlocks:{{{moving.key}}}".encode())
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(node.client(decode_responses=True)) for node in empty
        ]
        source = nodes.pop(next(i for i in range(3) if slot in SLOTS[i]))
        target, _ = nodes
        # The node then replies that the request must be retried, since it has only some
        # of the names of this key.
        target.execute_command(
            "CLUSTER SETSLOT", slot, "IMPORTING", source.cluster("myid")
        )
        source.execute_command(
            "CLUSTER SETSLOT", slot, "MIGRATING", target.cluster("myid")
        )
        try:
            left = backend.renew(claims)
        finally:
            for node in (source, target):
                node.execute_command("CLUSTER SETSLOT", slot, "STABLE")
        assert left.pop(moving.owner) == 0.0
        assert left == {one.owner: 30.0 for one in others}
    assert set(backend.renew(claims).values()) == {30.0}
    for one in claims:
        assert backend.release(one)


# Failovers.


@pytest.fixture
def watched(start):
    """A master, its replica, and a Sentinel that knows both."""
    # By default the first copy is delayed by 5 s, since more replicas might join.
    master = start(Redis(**{"repl-diskless-sync-delay": 0}))
    replica = start(Redis(replicaof=f"127.0.0.1 {master.port}"))
    sentinel = start(Sentinel(master.port))
    with sentinel.client(decode_responses=True) as client:
        eventually(lambda: client.sentinel_slaves("dlocks"))
    with replica.client(decode_responses=True) as client:
        eventually(lambda: client.info("replication")["master_link_status"] == "up")
    return master, replica, sentinel


def test_locks_survive_a_sentinel_failover(watched, aliases, in_other_thread):
    master, _, sentinel = watched
    options = {"url": f"redis://:{PASSWORD}@dlocks/0", "sentinels": [sentinel.url]}
    aliases(redis={"BACKEND": REDIS, "OPTIONS": options})
    lock = db_lock("key", using="redis", ttl=60)
    hold = lock.acquire()
    with master.client() as client:
        # A grant does not wait for replication. A failover would lose a grant that has
        # not been replicated.
        assert client.wait(1, 10_000) == 1
    master.crash()
    eventually(lambda: lock.holder() is not None)
    assert in_other_thread(lock.try_acquire) is None
    hold.check()
    hold.release()
    assert in_other_thread(jobs.token_of, lock) > hold.token


def test_a_failover_loses_a_grant_that_was_not_replicated(watched):
    """The key is granted a second time with a larger token, as documented."""
    master, replica, sentinel = watched
    backend = RedisBackend(
        "redis", url=f"redis://:{PASSWORD}@dlocks/0", sentinels=[sentinel.url]
    )
    with replica.client() as client:
        client.config_set("masterauth", "cut off")
        client.client_kill_filter(_type="master")
    one, other, second = claim(), claim(), []
    first = backend.acquire(one)
    master.crash()
    eventually(lambda: backend.holder("key") is None)
    eventually(lambda: second.append(backend.acquire(other)) or second[-1])
    assert second[-1].token > first.token
    assert one.owner not in backend.renew([one])


def test_cluster_and_sentinel_passwords_are_never_shown(start):
    """An unknown master is an error that names the alias."""
    options = {"requirepass": SECRET, "masterauth": SECRET}
    master = start(Redis(**options))
    sentinel = start(Sentinel(master.port, requirepass=SECRET))
    with sentinel.client() as client:
        client.sentinel_set("dlocks", "auth-pass", SECRET)
    unknown = RedisBackend("redis", url="redis://nobody/0", sentinels=[sentinel.url])
    watched = RedisBackend(
        "redis", url=f"redis://:{SECRET}@dlocks/0", sentinels=[sentinel.url]
    )
    alone = start(
        Redis(**options, **{"cluster-enabled": "yes", "cluster-port": free_port()})
    )
    with alone.client() as client:
        client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        eventually(lambda: client.cluster("info")["cluster_state"] == "ok")
    clustered = RedisBackend("redis", url=alone.url, cluster=True)
    for backend in (watched, clustered):
        eventually(lambda backend=backend: backend.acquire(claim()))
    for server in (master, alone):
        server.crash()
    for backend, place in (
        (unknown, "Redis at 'nobody' of the Sentinels"),
        (watched, "Redis at 'dlocks' of the Sentinels"),
        (clustered, "the Redis cluster at 127.0.0.1"),
    ):
        message = rf"DLOCKS\['redis'\]: a request to {place}"
        with pytest.raises(LockBackendError, match=message) as raised:
            backend.acquire(claim())
        told = "".join(traceback.format_exception(raised.value))
        assert SECRET not in f"{told}{backend!r}{vars(backend)}"
