"""Locks in a ZooKeeper ensemble, on real servers."""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import json
import math
import os
import random
import re
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.test import SimpleTestCase
from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionLoss, NoNodeError

from dlocks import (
    LockBackendError,
    LockLost,
    LockTimeout,
    db_lock,
    db_rwlock,
    db_semaphore,
)
from tests import jobs, pages
from tests.backends import cluster_jobs
from tests.backends.test_nemesis import Crowd, holds, overlaps
from tests.contract import BackendContract
from tests.internals import (
    Backend,
    Claim,
    ZooKeeperBackend,
    backends,
    check_settings,
    clock,
    disconnect,
    options_of,
    tickets,
    waiters,
    zookeeper,
    zookeeper_maintenance,
    zookeeper_waiting,
)
from tests.proxy import Proxy
from tests.servers import BRISK, ZooKeeper, ZooKeeperMember, asked, free_port
from tests.timing import in_time
from tests.volume import volume

BACKEND = "dlocks.backends.zookeeper.ZooKeeperBackend"
# The number of this request in ZooKeeper's protocol.
DELETE = 2


def at(*ports):
    return ",".join(f"127.0.0.1:{port}" for port in ports)


def claim(key="key", **options):
    return Claim(key=key, **{"ttl": 30.0, "holder": "somebody", **options})


def lock(key="key", **policy):
    return db_lock(key, using="zookeeper", **{"timeout": 20, **policy})


@pytest.fixture
def server(request, zookeeper_server):
    if request.cls is not None:
        request.cls.server = zookeeper_server
    return zookeeper_server


@pytest.fixture
def root():
    return f"/test-{secrets.token_hex(4)}"


@pytest.fixture(autouse=True)
def sessions_closed():
    """Close all sessions at the end of each test."""
    yield
    # This includes backends that other settings have replaced.
    for backend in list(zookeeper_maintenance.all_backends):
        disconnect(backend)


@pytest.fixture
def configured(aliases, root):
    """Return a function that configures the alias here.

    It returns a function that starts processes with the same alias.
    """

    def configure(*ports, **options):
        options = {
            "hosts": at(*ports),
            "root": root,
            "session_timeout": 20.0,
            **options,
        }
        return aliases(zookeeper={"BACKEND": BACKEND, "OPTIONS": options})

    return configure


@pytest.fixture
def process(server, configured):
    """Return a function that starts a process with the alias on the shared server."""
    return configured(server.port)


@pytest.fixture
def backend(process):
    return backends["zookeeper"]


@contextmanager
def client_of(port, **options):
    client = KazooClient(at(port), **options)
    client.start()
    try:
        yield client
    finally:
        client.stop()
        client.close()


@pytest.fixture
def person(server):
    """A plain client with which a user inspects the nodes."""
    with client_of(server.port) as client:
        yield client


def nodes(person, root, key="key"):
    try:
        return person.get_children(f"{root}/{key}")
    except NoNodeError:
        return []


def end_session(backend, server):
    """End the session of this process from the servers' side."""
    session = backend.ensemble._client.client_id
    while True:
        # Closing the client ends the session, unless the process has reconnected
        # meanwhile.
        with client_of(server.port, client_id=session) as client:
            if client.client_id != session:
                return


def is_in_queue(backend):
    """Return whether a claim of this process waits in the queue.

    A claim that found the key held and left again does not count.
    """
    return any(entry.watched for entry in list(backend._entries.values()))


def watches(server):
    return int(re.search(rb"zk_watch_count\s+(\d+)", asked(server.port, b"mntr"))[1])


@pytest.mark.usefixtures("server")
class TestZooKeeper(BackendContract, SimpleTestCase):
    def make_backend(self, **options):
        backend = ZooKeeperBackend(
            "zookeeper",
            hosts=at(self.server.port),
            root=f"/test-{secrets.token_hex(4)}",
            **options,
        )
        self.addCleanup(disconnect, backend)
        return backend


# Processes.


def test_processes_lose_no_updates_of_an_unguarded_counter(process, count_together):
    crowd = [process() for _ in range(4)]
    count_together(crowd, volume(30), using="zookeeper", timeout=None)


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


def test_a_release_wakes_only_the_next_waiter(process, server, person, root, until):
    """Waiters are served in order, and a release wakes only the next one.

    Each waiter watches one node, whose removal concerns only that waiter.
    """
    before = watches(server)
    holder, *waiting = [process() for _ in range(5)]
    holder.start(jobs.hold, "herd", using="zookeeper")
    holder.hear()
    for number, one in enumerate(waiting):
        one.start(jobs.hold, "herd", using="zookeeper", timeout=30)
        until(lambda number=number: watches(server) == before + number + 1)
    for number, one in enumerate(waiting):
        (holder if number == 0 else waiting[number - 1]).tell()
        one.hear()
        # No other waiter was woken and had to watch again.
        assert watches(server) == before + 3 - number
    waiting[-1].tell()


def test_the_key_of_a_killed_holder_is_free_after_its_session(
    server, configured, person, root, until
):
    process = configured(server.port, session_timeout=2.0)
    victim, waiter = process(), process()
    token = victim.call(jobs.acquire, "key", using="zookeeper")
    waiter.start(jobs.wait_quietly, "key", using="zookeeper", timeout=30)
    until(lambda: len(nodes(person, root)) == 2)
    victim.kill()
    granted, later = waiter.hear()
    assert later > token
    # Two seconds, and two ticks of the server.
    in_time(granted - victim.killed_at, 2.0 + 0.4 + 1.0)


def test_a_resumed_holder_is_notified_of_its_loss(server, configured):
    process = configured(server.port, session_timeout=2.0)
    victim, waiter = process(), process()
    victim.start(jobs.hold_until_lost, "key", using="zookeeper")
    token = victim.hear()
    victim.stop()
    policy = {"using": "zookeeper", "timeout": 30}
    granted, later = waiter.call(jobs.wait_quietly, "key", **policy)
    assert later > token
    victim.resume()
    assert victim.hear() < granted, "it is not held any more"
    assert waiter.call(jobs.try_once, "key", using="zookeeper") > later


def test_a_fork_neither_shares_nor_ends_holds_of_its_parent(process, backend):
    parent = process()
    parent.start(jobs.hold_and_fork, "key", using="zookeeper", timeout=5)
    child, found, held_there = parent.hear()
    try:
        assert found is None
        assert not held_there
        assert backend.holder("key").holder.split(":")[1] == str(parent.process.pid)
        os.kill(child, signal.SIGKILL)
        assert backend.acquire(claim()) is None
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        parent.tell()
        parent.hear()


def test_a_process_releases_its_holds_when_it_exits(server, person, root):
    program = (
        "import django; django.setup()\n"
        "from dlocks import db_lock\n"
        "hold = db_lock('key', using='zookeeper', ttl=60).acquire()\n"
        "print(hold.held)"
    )
    options = {"hosts": at(server.port), "root": root, "session_timeout": 60.0}
    aliases = {"zookeeper": {"BACKEND": BACKEND, "OPTIONS": options}}
    environment = {
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "DLOCKS_TEST_ALIASES": json.dumps(aliases),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == "True\n"
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("'key' was never released by")
    assert nodes(person, root) == []


# Sessions.


def test_the_end_of_a_session_is_reported_at_once(server, configured, until):
    """The loss of a session is reported at once, not at the next renewal."""
    configured(server.port, session_timeout=60.0)
    told = threading.Event()
    hold = lock(ttl=60, on_lost=lambda hold: told.set()).acquire()
    backend = backends["zookeeper"]
    first = hold._state.lease.deadline
    # The first renewal may be due soon. The loss must be reported before the second.
    until(lambda: hold._state.lease.deadline > first, seconds=30)
    renewed = hold._state.lease.deadline
    began = time.monotonic()
    end_session(backend, server)
    assert told.wait(30)
    in_time(time.monotonic() - began, backend.renew_every / 2)
    assert not hold.held
    assert hold._state.lease.deadline == renewed
    with pytest.raises(LockLost, match="ZooKeeper session that held it has ended"):
        hold.release()
    with lock(timeout=5) as again:
        assert again.token > hold.token


def test_a_hold_survives_a_lost_connection(server, configured):
    with proxied(server) as proxy:
        configured(proxy.port)
        with lock() as hold:
            token = hold.token
            for _ in range(3):
                proxy.disconnect()
                hold.check()
            assert hold.token == token


def test_repeatedly_cut_connections_lose_no_updates(server, configured, count_together):
    with proxied(server) as proxy:
        process = configured(proxy.port, connect_timeout=20.0)
        crowd = [process() for _ in range(3)]
        policy = {"using": "zookeeper", "timeout": None}
        count_together(crowd, volume(30), proxy.disconnect, **policy)


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


async def test_waiters_queue_again_when_their_session_ends(
    server, backend, person, root
):
    """One of them is a thread, and the other one is a task."""
    path = f"{root}/key"
    person.ensure_path(path)
    first = person.create(f"{path}/{'0' * 32}.alone..", sequence=True, ephemeral=True)

    def work():
        with lock(timeout=30) as hold:
            return hold.held

    async def until_queued(*, without):
        while not (
            len(found := set(nodes(person, root)) - without) == 2
            and sum(bool(one.watched) for one in list(backend._entries.values())) == 2
        ):
            await asyncio.sleep(0.01)
        return found

    thread = asyncio.create_task(asyncio.to_thread(work))
    task = asyncio.create_task(lock().aacquire())
    foreign = {first.rpartition("/")[2]}
    ended = await until_queued(without=foreign)
    await asyncio.to_thread(end_session, backend, server)
    await until_queued(without=foreign | ended)
    await asyncio.to_thread(person.delete, first)
    hold = await task
    assert hold.held
    await hold.arelease()
    assert await thread
    assert nodes(person, root) == []


def test_a_hold_ends_before_its_session_on_the_servers(server, configured, until):
    """The hold ends before its session, although its ttl is longer.

    The servers cannot be reached any more.
    """
    configured(server.port, session_timeout=3.0, connect_timeout=20.0)
    hold = lock(ttl=60).acquire()
    backends["zookeeper"].ensemble.timeout = 0.5
    server.process.send_signal(signal.SIGSTOP)
    stopped = clock.now()
    try:
        until(lambda: not hold.held)
        assert hold._state.lease.deadline < stopped + 3.0
        with pytest.raises(LockLost):
            hold.check()
    finally:
        server.process.send_signal(signal.SIGCONT)
    with pytest.raises(LockLost):
        hold.release()


def test_an_unrenewed_hold_lasts_for_its_ttl(server, configured):
    """A hold without renewal lasts for its ttl, although the session is shorter."""
    configured(server.port, session_timeout=2.0)
    backend = backends["zookeeper"]
    assert backend.acquire(claim("warm"))
    assert backend.ensemble.session_timeout == 2.0
    began = clock.now()
    hold = lock(ttl=4.0, renew=False).acquire()
    acquired = clock.now()
    while True:
        other = backend.acquire(claim())
        if not hold.held:
            break
        assert other is None
        time.sleep(0.05)
    assert began + 3.9 < hold._state.lease.deadline < acquired + 4.1
    with pytest.raises(LockLost):
        hold.release()


def test_the_maximum_session_timeout_of_the_server_applies(server, configured):
    configured(server.port, session_timeout=90.0)
    with lock(ttl=90) as hold:
        longest = BRISK["maxSessionTimeout"] / 1000
        assert backends["zookeeper"].ensemble.session_timeout == longest
        assert hold.remaining <= longest * 2 / 3


# Lost replies and cancelled claims.


def proxied(server):
    return closing(Proxy(server.port))


def test_a_silent_server_is_skipped_for_another_one(server, configured):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = [*at(silent.getsockname()[1]).split(","), f"localhost:{server.port}"]
        configured(hosts=hosts, connect_timeout=6.0, client={"randomize_hosts": False})
        with lock() as hold:
            hold.check()


def test_a_connection_without_a_reply_is_closed_early(server, configured):
    """A connection without a reply is closed before waiters raise an error.

    The length of the session does not matter.
    """
    with proxied(server) as proxy, socket.create_server(("127.0.0.1", 0)) as silent:
        configured(proxy.port, session_timeout=50.0, connect_timeout=40.0)
        backend = backends["zookeeper"]
        with lock() as hold:
            proxy._target = silent.getsockname()[1]
            proxy.disconnect()
            with silent.accept()[0]:
                proxy._target = server.port
                began = time.monotonic()
                assert backend.holder("key").token == hold.token
                in_time(time.monotonic() - began, waiters.CONNECT_TIMEOUT / 2)


def test_a_claim_is_found_again_when_its_reply_is_lost(
    server, configured, person, root, until
):
    """This is true for a grant and for a queued claim. A release also counts."""
    with proxied(server) as proxy:
        configured(proxy.port)
        backend = backends["zookeeper"]
        with lock("warm"):
            pass
        proxy.swallow(f"{root}/key/".encode())
        first, second = claim(), claim()
        token = backend.acquire(first).token
        assert proxy.swallowed.wait(10)
        (name,) = nodes(person, root)
        _, stat = person.get(f"{root}/key/{name}")
        base, _ = person.get(root)
        assert token == int(base) + stat.czxid
        proxy.swallow(b".alone..")
        backend.enqueue(second)
        assert proxy.swallowed.wait(10)
        assert len(nodes(person, root)) == 2
        proxy.swallow(struct.pack(">ii", DELETE, len(f"{root}/key/{name}")))
        assert backend.release(first)
        assert proxy.swallowed.wait(10)
        until(lambda: backend.poll([second])[second.owner].grant)
        assert backend.release(second)
        assert nodes(person, root) == []


def test_a_cancelled_claim_on_silent_servers_leaves_no_node(
    server, configured, person, root, until
):
    configured(server.port, session_timeout=20.0, connect_timeout=20.0)
    with lock():
        # The server does not delete the node of the key while it has a child.
        person.create(f"{root}/key/other", ephemeral=True)
    backend = backends["zookeeper"]
    backend.ensemble.timeout = 0.4
    server.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    try:
        for _ in range(2):
            with pytest.raises(LockBackendError, match="zookeeper"):
                lock().acquire()
        in_time(time.monotonic() - began, 6.0)
    finally:
        server.process.send_signal(signal.SIGCONT)
    # The server processes the requests, although no caller waits for them any more.
    until(lambda: not backend._orphans)
    assert nodes(person, root) == ["other"]


def test_a_silent_claim_is_skipped_beside_an_orphaned_node(server, configured, until):
    """An orphaned node is searched for twice the length of the session.

    It might appear for that long. Meanwhile a silent claim is still skipped.
    """
    with proxied(server) as proxy:
        configured(proxy.port, session_timeout=40.0, connect_timeout=20.0)
        backend = backends["zookeeper"]
        holder, silent, waits = claim(), claim(), claim()
        assert backend.acquire(holder)
        backend.ensemble.timeout = 0.5
        proxy.cut.set()
        with pytest.raises(LockBackendError):
            lock("another").acquire()
        proxy.cut.clear()
        backend.ensemble.timeout = 20.0
        for one in (silent, waits):
            assert backend.enqueue(one).position
        until(lambda: backend.poll([waits]) and backend.waiting("key") == 1, seconds=20)
        assert backend._orphans
        assert backend.release(holder)
        until(lambda: backend.poll([waits])[waits.owner].grant)
        assert backend.release(waits)


def test_a_busy_key_is_no_error_when_the_server_then_leaves(
    backend, person, root, until, monkeypatch
):
    """The caller knows that the key is busy, and waits. Its node is deleted later."""
    holder, send = claim(), backend.ensemble.send
    assert backend.acquire(holder)

    def unreachable(*requests, **options):
        if requests[0][0] == "delete":
            raise backend.ensemble._unanswered(None) from ConnectionLoss()
        return send(*requests, **options)

    with monkeypatch.context() as patched:
        patched.setattr(zookeeper, "SOON", 0.05)
        patched.setattr(backend.ensemble, "send", unreachable)
        assert backend.acquire(claim()) is None
    until(lambda: len(nodes(person, root)) == 1)
    assert backend.release(holder)


def test_a_release_is_false_once_the_expired_lease_has_ended(backend, monkeypatch):
    """Another caller may have the key before this process has forgotten its claim."""
    send = backend.ensemble.send
    for keep in (0.0, 60.0):
        deleted, forgets = threading.Event(), threading.Event()

        def send_and_wait(*requests, deleted=deleted, forgets=forgets, **options):
            answers = send(*requests, **options)
            if requests[0][0] == "delete" and not deleted.is_set():
                deleted.set()
                assert forgets.wait(30)
            return answers

        mine = claim(f"key {keep}", ttl=0.2)
        assert backend.acquire(mine)
        monkeypatch.setattr(backend.ensemble, "send", send_and_wait)
        assert deleted.wait(30)
        released = backend.release(mine, keep=keep)
        forgets.set()
        monkeypatch.setattr(backend.ensemble, "send", send)
        assert not released, keep


async def test_a_waiter_that_gives_up_leaves_the_queue(backend, person, root):
    """It has timed out, or was cancelled."""
    async with lock():
        for timeout in (0, 0.2):
            with pytest.raises(LockTimeout, match=rf"held by .*:{os.getpid()}:"):
                await asyncio.create_task(lock(timeout=timeout).aacquire())
            assert len(nodes(person, root)) == 1
        task = asyncio.create_task(lock(timeout=None).aacquire())
        while not await asyncio.to_thread(backend.waiting, "key"):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(nodes(person, root)) == 1
    assert nodes(person, root) == []


def test_a_dead_waiter_does_not_block_the_queue(server, configured, until):
    process, backend = (
        configured(server.port, session_timeout=2.0),
        backends["zookeeper"],
    )
    before = watches(server)
    holder, victim, waiter = process(), process(), process()
    holder.start(jobs.hold, "key", using="zookeeper")
    holder.hear()
    victim.start(jobs.hold, "key", using="zookeeper", timeout=60)
    until(lambda: watches(server) == before + 1)
    waiter.start(jobs.wait_quietly, "key", using="zookeeper", timeout=30)
    until(lambda: watches(server) == before + 2)
    victim.kill()
    until(lambda: backend.waiting("key") == 1)
    assert backend.acquire(claim()) is None
    holder.tell()
    waiter.hear()


def test_deleting_the_node_of_a_hold_ends_it(backend, person, root, until):
    with pytest.raises(LockLost), lock() as hold:
        (name,) = nodes(person, root)
        person.delete(f"{root}/key/{name}")
        until(lambda: not hold.held)


def test_no_shared_hold_is_granted_beside_a_removed_hold(server, backend, person, root):
    """Another caller may hold the key exclusively meanwhile."""
    other = ZooKeeperBackend("other", hosts=at(server.port), root=root)
    for recreated in (False, True):
        mine, theirs = claim(), claim()
        assert backend.acquire(mine)
        (name,) = nodes(person, root)
        person.delete(f"{root}/key/{name}")
        if recreated:
            # The node of the key is created again, so the numbers may repeat. The
            # server does this after a while, and may have done it already.
            with suppress(NoNodeError):
                person.delete(f"{root}/key")
        assert other.acquire(theirs)
        share = claim(shared=True, beside=mine.owner)
        assert backend.acquire(share) is None, recreated
        assert len(nodes(person, root)) == 1
        assert other.release(theirs)


def test_a_late_renewal_and_a_takeover_exclude_each_other(
    server, person, root, monkeypatch
):
    """A renewal and a takeover that coincide after a pause exclude each other."""
    # The request gets its reply, however long the server takes.
    for module in (zookeeper, zookeeper_maintenance, zookeeper_waiting):
        monkeypatch.setattr(module, "SOON", 20.0)
    late = ZooKeeperBackend("late", hosts=at(server.port), root=root, grace=0.0)
    other = ZooKeeperBackend("other", hosts=at(server.port), root=root)
    mine, left, done = claim(ttl=2.0), {}, threading.Event()
    end = late._end

    def end_after_a_renewal(entry):
        left.update(late.renew([mine]))
        end(entry)
        done.set()

    late._end = end_after_a_renewal
    assert other.acquire(claim("warm"))
    assert late.acquire(mine)
    assert done.wait(10)
    assert left[mine.owner] > 0
    assert other.acquire(claim()) is None
    late._end = end
    disconnect(late)
    disconnect(other)


@pytest.mark.parametrize("certain", [True, False])
def test_a_claim_that_is_being_cancelled_is_not_granted(server, root, until, certain):
    """A claim that is being cancelled is not granted.

    The process goes on after a pause in which its lease from the queue has expired.
    """
    late = ZooKeeperBackend("late", hosts=at(server.port), root=root, grace=0.0)
    mine, begun, go_on = claim(ttl=2.0), threading.Event(), threading.Event()
    leave = late._release_entry

    def leave_slowly(entry, **how):
        begun.set()
        assert go_on.wait(30)
        return leave(entry, **how)

    assert late.acquire(mine)
    late._release_entry = leave_slowly
    try:
        assert begun.wait(10)
        if not certain:
            late.ensemble.certain_until = -math.inf
        assert late.acquire(mine) is None
        assert late.enqueue(mine) is None
        assert late.poll([mine]) == {}
    finally:
        go_on.set()
    until(lambda: mine.owner not in late._entries)
    assert late.acquire(mine)
    assert late.release(mine)
    disconnect(late)


def test_a_key_is_not_granted_without_a_remaining_lease(backend, person, root):
    """The session is uncertain when the replies arrive."""
    mine, send = claim(), backend.ensemble.send

    def send_slowly(*requests, **how):
        answers = send(*requests, **how)
        backend.ensemble.certain_until = clock.now()
        return answers

    @contextmanager
    def answered_late():
        backend.ensemble.send = send_slowly
        yield
        backend.ensemble.send = send

    with answered_late():
        assert backend.acquire(mine) is None
    assert nodes(person, root) == []
    assert backend.acquire(mine)
    with answered_late():
        backend.holder("key")
        assert backend.acquire(mine) is None
    assert nodes(person, root) == []
    # A grant from the queue is requested again.
    with answered_late():
        place = backend.enqueue(mine)
        assert (place.grant, place.must_retry) == (None, True)
        place = backend.poll([mine])[mine.owner]
        assert (place.grant, place.must_retry) == (None, True)
    assert backend.acquire(mine).lease > 0
    assert backend.release(mine)


def test_nodes_of_unused_keys_are_deleted(backend, person, root, until):
    with ExitStack() as holds:
        for number in range(5):
            holds.enter_context(lock(f"once:{number}"))
        assert len(person.get_children(root)) == 5
    until(lambda: not person.get_children(root), seconds=30)
    with lock("once:0"):
        pass


def test_a_key_can_be_read_in_its_node(backend, person, root):
    keys = ["stock:7", "a/b", ".", "..", "ä %", "x" * 255, "\U0001f600" * 255]
    with ExitStack() as holds:
        for key in keys:
            holds.enter_context(lock(key))
        read = [
            person.get(f"{root}/{node}")[0].decode()
            for node in person.get_children(root)
        ]
    assert sorted(read) == sorted(keys)


# Servers that restart.


def test_holders_and_waiters_survive_a_server_restart(server, configured, tmp_path):
    process = configured(server.port, session_timeout=50.0, connect_timeout=40.0)
    path, crowd = tmp_path / "counter", [process() for _ in range(3)]
    path.write_text("0 0")
    for one in crowd:
        # The limit allows for a slow start of the server.
        one.call(cluster_jobs.be_patient, 60.0)
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


def test_an_ensemble_of_three_works_without_one_but_not_two(configured, until):
    with ZooKeeperMember.ensemble() as members:
        process = configured(
            *(member.port for member in members),
            session_timeout=20.0,
            connect_timeout=10.0,
        )
        backend = backends["zookeeper"]
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
        for ask in (lock("other").acquire, lambda: backend.holder("other")):
            with pytest.raises(
                LockBackendError, match=r"DLOCKS\['zookeeper'\].*did not answer"
            ):
                ask()
        in_time(time.monotonic() - began, 30.0)
        other.start()
        with lock("key") as again:
            assert again.token > hold.token


def test_tokens_grow_for_an_idle_process_of_a_rebuilt_ensemble(
    start, configured, root, monkeypatch, until
):
    """The process has no session through which it would learn of it."""
    monkeypatch.setattr(zookeeper_maintenance, "IDLE_CLOSE_AFTER", 0.2)
    server = start(ZooKeeper(**BRISK))
    configured(server.port)
    with lock() as hold:
        before = hold.token
    until(lambda: not backends["zookeeper"].ensemble._client)
    server.stop()
    shutil.rmtree(server.data / "version-2")
    server.start()
    # Another process comes first and creates the root.
    other = ZooKeeperBackend("other", hosts=at(server.port), root=root)
    one = claim()
    between = other.acquire(one).token
    disconnect(other)
    with lock() as hold:
        assert before < between < hold.token


def test_tokens_grow_after_the_root_is_deleted(backend, server, person, root):
    with lock() as hold:
        tokens = [hold.token]
    person.delete(root, recursive=True)
    # Another process creates the root and the node of the key again.
    other = ZooKeeperBackend("other", hosts=at(server.port), root=root)
    one = claim()
    tokens.append(other.acquire(one).token)
    other.release(one)
    for _ in range(2):
        with lock() as hold:
            tokens.append(hold.token)
        person.delete(root, recursive=True)
    assert all(one < other for one, other in pairwise(tokens))


def test_zookeeper_holds_never_overlap_under_faults(server, configured, tmp_path):
    """No two callers hold the key at once, whatever fails.

    The faults are stopped holders, cut connections, expired sessions and a server that
    does not reply for a while.
    """
    chance = random.Random(20)
    with proxied(server) as proxy:
        process = configured(proxy.port, session_timeout=1.5, connect_timeout=2.0)
        crowd = Crowd(process, tmp_path / "notes", "zookeeper", ttl=30, timeout=10)
        end = time.monotonic() + volume(11)
        while time.monotonic() < end:
            time.sleep(chance.uniform(0.1, 0.4))
            fault = chance.choice(["cut", "holder", "holder", "server"])
            if fault == "cut":
                proxy.disconnect()
            elif fault == "holder":
                # The process may have released the key by then.
                with suppress(LockBackendError):
                    holder = backends["zookeeper"].holder("key")
                    for one in crowd.workers:
                        if holder and f":{one.process.pid}:" in holder.holder:
                            crowd.pause(one, chance.uniform(1.0, 3.0))
            else:
                server.process.send_signal(signal.SIGSTOP)
                time.sleep(chance.uniform(0.1, 2.0))
                server.process.send_signal(signal.SIGCONT)
        crowd.end()
    found = holds(crowd.path)
    assert len(found) > 20
    assert len({token for _, _, token in found}) == len(found)
    assert overlaps(found) == []


# Reading and writing.


def test_a_writer_may_read_while_another_writer_waits(backend, in_other_thread, until):
    """A writer may read, and the next writer has a larger token."""
    both = db_rwlock("key", using="zookeeper", timeout=20)
    writing = both.write().acquire()
    found = []
    waiter = threading.Thread(target=lambda: found.append(jobs.token_of(both.write())))
    waiter.start()
    try:
        until(lambda: is_in_queue(backend))
        reading = both.read().acquire()
        writing.release()
        assert in_other_thread(both.read().try_acquire) is None
        assert not found
        assert backend.waiting("key") == 1
        reading.release()
    finally:
        waiter.join(30)
    assert found[0] > reading.token >= writing.token


def test_unsupported_lock_kinds_are_refused_on_zookeeper(backend):
    for other in (db_semaphore("key", 3, using="zookeeper"), lock(takeover=False)):
        with pytest.raises(RuntimeError, match="ZooKeeperBackend does not support"):
            other.acquire()
    with lock() as hold:
        with pytest.raises(RuntimeError, match="ZooKeeperBackend"):
            hold.atomic().__enter__()
        with pytest.raises(RuntimeError, match="ZooKeeperBackend"):
            hold.detach()


def test_the_queue_stays_ordered_when_sequence_numbers_wrap():
    """ZooKeeper's sequence numbers are signed 32-bit integers and wrap around."""
    numbers = [2**31 - 2, 2**31 - 1, -(2**31), -(2**31) + 1]
    names = [f"{'a' * 32}.alone..{number:010d}" for number in numbers]
    line = tickets.NodeQueue([*reversed(names), "lock-0000000001", "a.b.c.d"])
    assert [ticket.number for ticket in line.tickets] == numbers
    assert line.granted == line.tickets[:1]


# Settings.


WRONG = [
    ({"hosts": "zk1:2181/locks"}, "hosts must be like"),
    ({"hosts": "zk1:port"}, "hosts must be like"),
    ({"hosts": ""}, "hosts must be like"),
    ({"hosts": ["zk1", 7]}, "a list of strings"),
    ({"root": "locks"}, "root must be a path"),
    ({"root": "/"}, "root must be a path"),
    ({"root": "/zookeeper/locks"}, "root must be a path"),
    ({"root": "/a/../b"}, "root must be a path"),
    ({"session_timeout": 0}, "session_timeout must be above 0"),
    ({"connect_timeout": "5"}, "connect_timeout must be a number"),
    ({"auth": "open-sesame"}, "auth must be like 'user:password'"),
    ({"client": {"hosts": "x"}}, "client has unknown options hosts"),
    (
        {"client": {"ues_ssl": True}},
        "client has unknown options ues_ssl; it accepts .*use_ssl",
    ),
    ({"client": "tls"}, "client must be a dictionary"),
    ({"port": 2181}, "unknown option 'port'"),
]


def test_wrong_zookeeper_settings_are_named(aliases):
    for options, message in WRONG:
        aliases(zookeeper={"BACKEND": BACKEND, "OPTIONS": options})
        with pytest.raises(ImproperlyConfigured, match=message) as caught:
            backends["zookeeper"]
        assert "'zookeeper'" in str(caught.value)
        assert "open-sesame" not in str(caught.value)
        assert any("zookeeper" in str(one) for one in check_settings()), options


async def test_missing_servers_are_reported_in_bounded_time(configured):
    configured(free_port(), connect_timeout=0.5)
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
    server, configured, caplog
):
    caplog.set_level(1)
    configured(server.port, auth="owner:open-sesame")
    with lock():
        pass
    backend = backends["zookeeper"]
    shown = [
        repr(backend),
        str(vars(backend)),
        str(vars(backend.ensemble)),
        str(backend.ensemble),
    ]
    disconnect(backend)
    for auth in ("owner:wrong-sesame", None):
        configured(server.port, auth=auth)
        with pytest.raises(
            LockBackendError,
            match=r"DLOCKS\['zookeeper'\].* denies these credentials access",
        ) as error:
            lock().acquire()
        shown += [str(error.value), repr(error.value), repr(error.value.__cause__)]
        disconnect(backends["zookeeper"])
    assert any("kazoo" in record.name for record in caplog.records)
    assert "sesame" not in "".join([*shown, caplog.text])


def test_a_root_with_other_content_is_refused(server, configured, person, root):
    """A root that exists and is empty is accepted."""
    person.create(root)
    configured(server.port)
    with lock() as hold:
        assert hold.token > int(person.get(root)[0])
    configured(server.port, root=f"{root}-settings")
    person.create(f"{root}-settings", b"settings")
    with pytest.raises(LockBackendError, match=f"has other data in {root}"):
        lock().acquire()


def test_the_examples_on_zookeeper(server, settings, root):
    """The example in the documentation works with the address of this server."""
    written = ast.literal_eval(
        pages.blocks("how-to/zookeeper")[0].removeprefix("DLOCKS = ")
    )
    options = written["default"]["OPTIONS"]
    assert (
        options["root"]
        == inspect.signature(ZooKeeperBackend).parameters["root"].default
    )
    settings.DLOCKS = {
        "default": {
            **written["default"],
            "OPTIONS": {**options, "hosts": [at(server.port)], "root": root},
        }
    }
    assert pages.run("how-to/zookeeper").build("north").startswith("north with token ")
    text = (pages.DOCS / "how-to/zookeeper.md").read_text()
    assert all(
        f"`{option}`" in text
        for option in options_of(ZooKeeperBackend) - options_of(Backend)
    )


# The commands.


def run(*args):
    out = io.StringIO()
    call_command(*args, "--using", "zookeeper", stdout=out, no_color=True)
    return out.getvalue()


def test_commands_list_and_clear_the_locks_of_other_processes(server, configured):
    """Keys of other prefixes and keys without a holder are not shown.

    A cleared lock goes to the first waiter. Its former holder learns of it at its next
    renewal, and tokens still grow.
    """
    start = configured(server.port, prefix="a:")
    assert run("list_locks") == "No locks.\n"
    process, backend = start(), backends["zookeeper"]
    process.start(jobs.hold_until_lost, "stock:7", using="zookeeper", timeout=20)
    token = process.hear()
    odd, waits = claim("a:%2F / {ü}"), claim("a:stock:7", holder="next")
    backend.acquire(odd)
    backend.acquire(claim("b:other"))
    backend.enqueue(waits)
    _, first, stock = run("list_locks").splitlines()
    assert re.fullmatch(r"%2F / \{ü\} +held +0 +somebody +\d+s +\d+s", first)
    assert re.search(r"^stock:7 +held +1 +\S+ +\d+s +-$", stock)
    (lock,) = json.loads(run("list_locks", "stock:*", "--json"))
    assert (lock["token"], lock["seconds_left"], lock["waiting"]) == (token, None, 1)
    backend.release(odd)
    assert len(run("list_locks").splitlines()) == 2
    assert not backend.clear(waits.key, token + 1)
    # A waiter without a heartbeat for seconds would be skipped.
    backend.poll([waits])
    out = run("clear_lock", "stock:7", "--yes", "--reason", "tests")
    assert re.search(r"'stock:7' was cleared. It is now held by next", out)
    grant = backend.poll([waits])[waits.owner].grant
    assert grant.token > token
    # The loss was reported.
    assert process.hear()
    backend.release(waits)
    assert backend.acquire(claim(waits.key)).token > grant.token


def test_one_of_several_shared_holds_can_be_ended(server, configured):
    configured(server.port)
    backend = backends["zookeeper"]
    readers = [claim(shared=True) for _ in range(2)]
    first, _ = [backend.acquire(reader).token for reader in readers]
    table = run("list_locks", "--waiting")
    assert re.search(r"^key +shared \(2\) ", table, re.MULTILINE)
    assert f"(token {first})" in table
    with pytest.raises(CommandError, match="Pass --share TOKEN"):
        run("clear_lock", "key", "--yes", "--reason", "tests")
    out = run("clear_lock", "key", "--share", f"{first}", "--yes", "--reason", "tests")
    assert "1 shared hold was ended." in out
    assert [*backend.renew(readers)] == [*backend.renew(readers[1:])]
    with pytest.raises(CommandError, match="has no shared hold with token"):
        run("clear_lock", "key", "--share", f"{first}", "--yes", "--reason", "tests")
    run("clear_lock", "key", "--all-shares", "--yes", "--reason", "tests")
    assert backend.keys() == []
    assert not backend.renew(readers)
