"""Locks in a ZooKeeper ensemble, on real servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import socket
import struct
import threading
import time
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path

import pytest
from django.core.management import CommandError
from django.test import SimpleTestCase

from dlocks import (
    LockBackendError,
    LockLost,
    LockTimeout,
    db_lock,
    db_rwlock,
    db_semaphore,
)
from dlocks.backends.zookeeper import ZooKeeperBackend
from tests import jobs
from tests.contract import BackendContract
from tests.promises.backends.others import at, claim, run, zookeeper
from tests.proxy import Proxy
from tests.scripts import run_python
from tests.servers import ZooKeeperMember, asked, free_port
from tests.timing import eventually, in_time
from tests.volume import volume

# The number of this request in ZooKeeper's protocol.
DELETE = 2


def lock(key="key", **policy):
    return db_lock(key, using="zookeeper", **{"timeout": 20, **policy})


@pytest.fixture
def server(request, zookeeper_server):
    if request.cls is not None:
        request.cls.server = zookeeper_server
    return zookeeper_server


@pytest.fixture
def process(server, zookeeper_at):
    """Return a function that starts a process with the alias on the shared server."""
    return zookeeper_at(server.port)


@pytest.fixture
def backend(server, root):
    """A backend beside that of the alias, with a session of its own."""
    return ZooKeeperBackend("other", hosts=at(server.port), root=root)


@pytest.fixture
def proxy(server):
    with closing(Proxy(server.port)) as proxy:
        yield proxy


def watches(server):
    return int(re.search(rb"zk_watch_count\s+(\d+)", asked(server.port, b"mntr"))[1])


@pytest.mark.usefixtures("server")
class TestZooKeeper(BackendContract, SimpleTestCase):
    def make_backend(self, **options):
        return ZooKeeperBackend(
            "zookeeper",
            hosts=at(self.server.port),
            root=f"/test-{secrets.token_hex(4)}",
            **options,
        )


# Processes.


def test_threads_with_different_timeouts_lose_no_updates(process, tmp_path):
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        Path(path).write_text("0")
    crowd = [process() for _ in range(2)]
    for one in crowd:
        one.start(
            jobs.count_by_threads, paths, threads=5, times=volume(10), using="zookeeper"
        )
    done = [one.hear() for one in crowd]
    assert [int(Path(path).read_text()) for path in paths] == [
        sum(column) for column in zip(*done, strict=True)
    ]


def test_readers_never_see_a_partial_write(process, tmp_path):
    path, crowd, times = tmp_path / "rw", [process() for _ in range(4)], volume(20)
    path.write_text("0")
    for number, one in enumerate(crowd):
        one.start(
            jobs.read_or_write,
            str(path),
            "rw",
            times=times,
            write=number % 2 == 0,
            using="zookeeper",
        )
    for one in crowd:
        one.hear()
    assert path.read_text() == f"{4 * times}"


def test_a_release_wakes_only_the_next_waiter(process, server, until):
    """Each waiter watches one node, whose removal concerns only that waiter."""
    before = watches(server)
    holder, *waiting = [process() for _ in range(5)]
    holder.call(jobs.hold, "herd", using="zookeeper")
    for number, one in enumerate(waiting, 1):
        one.start(jobs.hold, "herd", using="zookeeper", timeout=30)
        until(lambda number=number: watches(server) == before + number)
    for number, one in enumerate(waiting):
        (holder if number == 0 else waiting[number - 1]).tell()
        one.hear()
        # No other waiter was woken and had to watch again.
        assert watches(server) == before + 3 - number
    waiting[-1].tell()


def test_a_resumed_holder_is_notified_of_its_loss(server, zookeeper_at):
    process = zookeeper_at(server.port, session_timeout=2.0)
    victim, waiter = process(), process()
    token = victim.call(jobs.hold_until_lost, "key", using="zookeeper")
    victim.stop()
    policy = {"using": "zookeeper", "timeout": 30}
    granted, later = waiter.call(jobs.wait_quietly, "key", **policy)
    assert later > token
    victim.resume()
    assert victim.hear() < granted, "it is not held any more"
    assert waiter.call(jobs.try_once, "key", using="zookeeper") > later


def test_a_fork_neither_shares_nor_ends_holds_of_its_parent(process, backend):
    parent = process()
    child, found, held_there = parent.call(
        jobs.hold_and_fork, "key", using="zookeeper", timeout=5
    )
    try:
        assert found is None
        assert not held_there
        assert backend.holder("key").holder.split(":")[1] == str(parent.process.pid)
        os.kill(child, signal.SIGKILL)
        assert backend.acquire(claim()) is None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        parent.go_on()


def test_a_process_releases_its_holds_when_it_exits(server, root, nodes):
    program = (
        "import django; django.setup()\n"
        "from dlocks import db_lock\n"
        "hold = db_lock('key', using='zookeeper', ttl=60).acquire()\n"
        "print(hold.held)"
    )
    aliases = {"zookeeper": zookeeper(server.port, root=root, session_timeout=60.0)}
    done = run_python(
        *("-c", program),
        DJANGO_SETTINGS_MODULE="tests.settings",
        DLOCKS_TEST_ALIASES=json.dumps(aliases),
    )
    assert done.stdout == "True\n"
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("'key' was never released by")
    assert nodes() == []


# Connections and sessions.


def test_a_hold_survives_a_lost_connection(proxy, zookeeper_at):
    zookeeper_at(proxy.port)
    with lock() as hold:
        token = hold.token
        for _ in range(3):
            proxy.disconnect()
            hold.check()
        assert hold.token == token


def test_repeatedly_cut_connections_lose_no_updates(
    proxy, zookeeper_at, count_together
):
    process = zookeeper_at(proxy.port, connect_timeout=20.0)
    crowd = [process() for _ in range(3)]
    policy = {"using": "zookeeper", "timeout": None}
    count_together(crowd, volume(30), proxy.disconnect, **policy)


@pytest.mark.usefixtures("process")
async def test_hundreds_of_tasks_wait_in_order_without_a_thread_each(backend):
    """The first tasks queue one after the other, and the others together."""
    order, tasks = [], []
    before = threading.active_count()

    async def take(number):
        async with lock(timeout=50) as hold:
            order.append((number, hold.token))

    async def begin(number):
        tasks.extend(asyncio.create_task(take(len(tasks) + i)) for i in range(number))
        while await asyncio.to_thread(backend.waiting, "key") < len(tasks):
            await asyncio.sleep(0.02)

    async with lock():
        for _ in range(20):
            await begin(1)
        await begin(180)
        threads = threading.active_count()
    await asyncio.gather(*tasks)
    assert order[:20] == sorted(order[:20])
    assert {number for number, _ in order[:20]} == set(range(20))
    assert len({number for number, _ in order}) == 200
    tokens = [token for _, token in order]
    assert tokens == sorted(set(tokens))
    assert threads - before < 15


def test_a_hold_ends_before_its_session_on_the_servers(server, zookeeper_at, until):
    """Its ttl is longer. The servers cannot be reached any more."""
    zookeeper_at(server.port, session_timeout=3.0)
    hold = lock(ttl=60).acquire()
    server.process.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        until(lambda: not hold.held)
        in_time(time.monotonic() - stopped, 3.0)
        with pytest.raises(LockLost):
            hold.check()
    finally:
        server.process.send_signal(signal.SIGCONT)
    with pytest.raises(LockLost):
        hold.release()


def test_an_unrenewed_hold_lasts_for_its_ttl(server, zookeeper_at, backend):
    """Its session is shorter."""
    zookeeper_at(server.port, session_timeout=2.0)
    lock("warm").acquire().release()
    began = time.monotonic()
    hold = lock(ttl=4.0, renew=False).acquire()
    acquired = time.monotonic()
    while True:
        other, now = backend.acquire(claim()), time.monotonic()
        if not hold.held:
            break
        assert other is None
        assert now < acquired + 4.1
        time.sleep(0.05)
    assert time.monotonic() > began + 3.9
    with pytest.raises(LockLost):
        hold.release()


def test_a_lease_lasts_for_two_thirds_of_the_session_at_most(server, zookeeper_at):
    zookeeper_at(server.port, session_timeout=30.0)
    with lock(ttl=90) as hold:
        assert 10 < hold.remaining <= 30.0 * 2 / 3
    with lock(ttl=9) as hold:
        assert hold.remaining <= 9


def test_a_silent_server_is_skipped_for_another_one(server, zookeeper_at):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = [at(silent.getsockname()[1]), f"localhost:{server.port}"]
        options = {"connect_timeout": 6.0, "client": {"randomize_hosts": False}}
        zookeeper_at(hosts=hosts, **options)
        with lock() as hold:
            hold.check()


def test_a_claim_is_found_again_when_its_reply_is_lost(proxy, root, nodes, until):
    """This is true for a grant and for a queued claim. A release also counts."""
    backend = ZooKeeperBackend("proxied", hosts=at(proxy.port), root=root)
    warm = claim("warm")
    backend.acquire(warm)
    backend.release(warm)
    proxy.swallow(f"{root}/key/".encode())
    first, second = claim(), claim()
    token = backend.acquire(first).token
    assert proxy.swallowed.wait(10)
    (name,) = nodes()
    assert backend.holder("key").token == token
    proxy.swallow(b".alone..")
    backend.enqueue(second)
    assert proxy.swallowed.wait(10)
    assert len(nodes()) == 2
    proxy.swallow(struct.pack(">ii", DELETE, len(f"{root}/key/{name}")))
    assert backend.release(first)
    assert proxy.swallowed.wait(10)
    until(lambda: backend.poll([second])[second.owner].grant)
    assert backend.release(second)
    assert nodes() == []


@pytest.mark.usefixtures("process")
async def test_a_waiter_that_gives_up_leaves_the_queue(backend, nodes):
    """It has timed out, or was cancelled."""
    async with lock():
        for timeout in (0, 0.2):
            with pytest.raises(LockTimeout, match=rf"held by .*:{os.getpid()}:"):
                await asyncio.create_task(lock(timeout=timeout).aacquire())
            assert len(nodes()) == 1
        task = asyncio.create_task(lock(timeout=None).aacquire())
        while not await asyncio.to_thread(backend.waiting, "key"):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(nodes()) == 1
    assert nodes() == []


def test_a_dead_waiter_does_not_block_the_queue(server, zookeeper_at, backend, until):
    process = zookeeper_at(server.port, session_timeout=2.0)
    holder, victim, waiter = process(), process(), process()
    with holder.doing(jobs.hold, "key", using="zookeeper"):
        victim.start(jobs.hold, "key", using="zookeeper", timeout=60)
        until(lambda: backend.waiting("key") == 1)
        waiter.start(jobs.wait_quietly, "key", using="zookeeper", timeout=30)
        until(lambda: backend.waiting("key") == 2)
        victim.kill()
        until(lambda: backend.waiting("key") == 1)
        assert backend.acquire(claim()) is None
    waiter.hear()


# Nodes.


@pytest.mark.usefixtures("process")
def test_deleting_the_node_of_a_hold_ends_it(person, root, nodes, until):
    with pytest.raises(LockLost), lock() as hold:
        (name,) = nodes()
        person.delete(f"{root}/key/{name}")
        until(lambda: not hold.held)


def test_a_kept_key_that_was_cleared_is_lost(process, backend):
    """Another caller may have had it since."""
    hold = lock(min_hold=60).acquire()
    assert backend.clear("key", hold.token)
    other = claim()
    assert backend.acquire(other)
    with pytest.raises(LockLost):
        hold.release()
    assert backend.release(other)


def test_no_shared_hold_is_granted_beside_a_removed_hold(
    server, backend, person, root, nodes
):
    """Another caller may hold the key exclusively meanwhile."""
    other = ZooKeeperBackend("third", hosts=at(server.port), root=root)
    for recreated in (False, True):
        mine, theirs = claim(), claim()
        assert backend.acquire(mine)
        (name,) = nodes()
        person.delete(f"{root}/key/{name}")
        if recreated:
            # The node of the key is created again, so the numbers may repeat.
            person.delete(f"{root}/key")
        assert other.acquire(theirs)
        share = claim(shared=True, beside=mine.owner)
        assert backend.acquire(share) is None, recreated
        assert len(nodes()) == 1
        assert other.release(theirs)


@pytest.mark.usefixtures("process")
def test_a_key_can_be_read_in_its_node_until_it_is_unused(person, root):
    keys = ["stock:7", "a/b", ".", "..", "ä %", "x" * 255, "\U0001f600" * 255]
    with ExitStack() as holds:
        for key in keys:
            holds.enter_context(lock(key))
        read = [
            person.get(f"{root}/{node}")[0].decode()
            for node in person.get_children(root)
        ]
    assert sorted(read) == sorted(keys)
    assert person.get_children(root) == []
    with lock("stock:7"):
        pass


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("data", [b"4711", b"null", b"[1]", b"", b"host-1", b"\xff"])
def test_a_key_whose_node_was_overwritten_can_be_cleared(data, backend, person, root):
    """Another program may have written into the nodes, which then name no holder."""
    mine, waiting = claim(), claim()
    assert backend.acquire(mine)
    backend.enqueue(waiting)
    for node in person.get_children(f"{root}/key"):
        person.set(f"{root}/key/{node}", data)
    holder = lock().holder()
    assert (holder.holder, holder.owner_ip) == ("", None)
    assert "\nkey " in run("list_locks", "--waiting", using="zookeeper")
    cleared = run("clear_lock", "key", "--yes", "--reason", "tests", using="zookeeper")
    assert "was cleared" in cleared
    assert not backend.renew([mine])
    assert backend.release(waiting)


def test_the_reaper_deletes_the_nodes_of_unused_keys(
    server, zookeeper_at, person, root
):
    """A crash leaves them. A key that is held or waited for is not touched."""
    backend = ZooKeeperBackend("other", hosts=at(server.port), root=root)
    process = zookeeper_at(server.port, session_timeout=2.0, prefix="shop-")()
    mine = claim("shop-held")
    assert backend.acquire(mine)
    assert process.call(jobs.acquire, "crashed", using="zookeeper")
    process.kill()
    person.create(f"{root}/other")
    eventually(lambda: backend.keys() == ["shop-held"])
    out = "1 unused node would be deleted.\n"
    assert run("reap_locks", "--dry-run", using="zookeeper") == out
    assert len(person.get_children(root)) == 3
    assert run("reap_locks", using="zookeeper") == out.replace("would be ", "")
    assert run("reap_locks", using="zookeeper") == "0 unused nodes deleted.\n"
    assert sorted(person.get_children(root)) == ["other", "shop-held"]
    assert backend.release(mine)
    assert person.get_children(root) == ["other"]


# Servers that restart.


def test_holders_and_waiters_survive_a_server_restart(server, zookeeper_at, tmp_path):
    process = zookeeper_at(server.port, session_timeout=50.0, connect_timeout=40.0)
    path, crowd = tmp_path / "counter", [process() for _ in range(3)]
    path.write_text("0 0")
    for one in crowd:
        # The limit allows for a slow start of the server.
        one.call(jobs.be_patient, 60.0)
        one.start(
            jobs.count_through_trouble,
            str(path),
            "count",
            times=volume(30),
            using="zookeeper",
            timeout=60,
        )
    for one in crowd:
        assert one.hear() == "a third"
    server.restart()
    outcomes = []
    for one in crowd:
        assert one.hear() == "two thirds"
        outcomes.append(one.hear())
    assert int(path.read_text().split()[0]) == sum(done for done, _ in outcomes)
    assert [troubles for _, troubles in outcomes] == [0, 0, 0]


def test_an_ensemble_of_three_works_without_one_but_not_two(zookeeper_at):
    with ZooKeeperMember.ensemble() as members:
        process = zookeeper_at(
            *(member.port for member in members), connect_timeout=10.0
        )
        worker = process()
        with lock(ttl=20) as hold:
            leader = next(
                one for one in members if b"Mode: leader" in asked(one.port, b"srvr")
            )
            leader.crash()
            assert worker.call(jobs.try_once, "key", using="zookeeper") is None
            hold.check()
        assert worker.call(jobs.try_once, "key", using="zookeeper") > hold.token
        other = next(one for one in members if one is not leader)
        other.crash()
        began = time.monotonic()
        for ask in (lock("other").acquire, lock("other").holder):
            with pytest.raises(
                LockBackendError, match=r"DLOCKS\['zookeeper'\].*did not answer"
            ):
                ask()
        in_time(time.monotonic() - began, 30.0)
        other.start()
        with lock("key") as again:
            assert again.token > hold.token


@pytest.mark.usefixtures("process")
def test_tokens_grow_after_the_root_is_deleted(backend, person, root):
    with lock() as hold:
        tokens = [hold.token]
    person.delete(root, recursive=True)
    # Another process creates the root and the node of the key again.
    one = claim()
    tokens.append(backend.acquire(one).token)
    backend.release(one)
    for _ in range(2):
        with lock() as hold:
            tokens.append(hold.token)
        person.delete(root, recursive=True)
    assert all(one < other for one, other in pairwise(tokens))


# Reading and writing.


@pytest.mark.usefixtures("process")
def test_a_writer_may_read_while_another_writer_waits(
    backend, in_other_thread, threads, until
):
    """The next writer has a larger token."""
    both = db_rwlock("key", using="zookeeper", timeout=20)
    writing = both.write().acquire()
    waiter = threads(lambda: jobs.token_of(both.write()))
    until(lambda: backend.waiting("key") == 1)
    reading = both.read().acquire()
    writing.release()
    assert in_other_thread(both.read().try_acquire) is None
    assert not waiter.results
    assert backend.waiting("key") == 1
    reading.release()
    waiter.join(30)
    assert waiter.results[0] > reading.token >= writing.token


@pytest.mark.usefixtures("process")
def test_unsupported_lock_kinds_are_refused_on_zookeeper():
    for other in (db_semaphore("key", 3, using="zookeeper"), lock(takeover=False)):
        with pytest.raises(RuntimeError, match="ZooKeeperBackend does not support"):
            other.acquire()
    with lock() as hold:
        with pytest.raises(RuntimeError, match="ZooKeeperBackend"):
            hold.atomic().__enter__()
        with pytest.raises(RuntimeError, match="ZooKeeperBackend"):
            hold.detach()


# Servers that are missing or refuse.


async def test_missing_servers_are_reported_in_bounded_time(zookeeper_at):
    zookeeper_at(free_port(), connect_timeout=0.5)
    wrong = lock()
    for ask in (
        lambda: asyncio.to_thread(wrong.acquire),
        lambda: asyncio.to_thread(wrong.holder),
        wrong.aacquire,
    ):
        began = time.monotonic()
        with pytest.raises(
            LockBackendError,
            match=r"ZooKeeper of DLOCKS\['zookeeper'\] \(127.0.0.1:\d+\) did not",
        ):
            await ask()
        in_time(time.monotonic() - began, 3.0)


def test_wrong_zookeeper_credentials_are_refused_and_never_shown(
    server, zookeeper_at, root, caplog
):
    caplog.set_level(1)
    auth = "owner:open-sesame"
    zookeeper_at(server.port, auth=auth)
    with lock():
        pass
    backend = ZooKeeperBackend("other", hosts=at(server.port), root=root, auth=auth)
    shown = [repr(backend), str(vars(backend))]
    for auth in ("owner:wrong-sesame", None):
        zookeeper_at(server.port, auth=auth)
        with pytest.raises(
            LockBackendError,
            match=r"DLOCKS\['zookeeper'\].* denies these credentials access",
        ) as error:
            lock().acquire()
        shown += [str(error.value), repr(error.value), repr(error.value.__cause__)]
    assert any("kazoo" in record.name for record in caplog.records)
    assert "sesame" not in "".join([*shown, caplog.text])


@pytest.mark.usefixtures("process")
def test_one_of_several_shared_holds_can_be_ended(backend):
    readers = [claim(shared=True) for _ in range(2)]
    first, second = [backend.acquire(reader).token for reader in readers]
    table = run("list_locks", "--waiting", using="zookeeper")
    assert re.search(r"^key +shared \(2\) ", table, re.MULTILINE)
    assert f"(token {first})" in table

    def clear(*options):
        reason = ("--yes", "--reason", "tests")
        return run("clear_lock", "key", *options, *reason, using="zookeeper")

    with pytest.raises(CommandError, match="Pass --share TOKEN"):
        clear()
    assert "1 shared hold of 'key' was ended." in clear("--share", f"{first}")
    assert [*backend.renew(readers)] == [*backend.renew(readers[1:])]
    with pytest.raises(CommandError, match="has no shared hold with token"):
        clear("--share", f"{first}")
    clear("--share", f"{second}")
    assert backend.keys() == []
    assert not backend.renew(readers)
