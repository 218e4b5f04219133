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
from contextlib import ExitStack, contextmanager, suppress
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
from dlocks.testing import BackendContract
from tests import jobs, pages
from tests.backends import zookeeper_jobs
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
    text = asked(server.port, b"mntr").decode()
    return int(
        next(
            line.split()[1]
            for line in text.splitlines()
            if line.startswith("zk_watch_count")
        )
    )


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


def counter(directory, text="0 0"):
    path = directory / "counter"
    path.write_text(text)
    return path


def test_processes_lose_no_updates_of_an_unguarded_counter(process, tmp_path):
    path, crowd = counter(tmp_path), [process() for _ in range(4)]
    for one in crowd:
        one.start(
            jobs.count,
            str(path),
            "count",
            times=100,
            scope="lease",
            using="zookeeper",
            timeout=None,
        )
    tokens = [one.hear() for one in crowd]
    assert all(mine == sorted(mine) for mine in tokens)
    assert path.read_text().split()[0] == "400"
    assert len({token for mine in tokens for token in mine}) == 400


def test_threads_with_different_timeouts_lose_no_updates(process, tmp_path):
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        Path(path).write_text("0")
    crowd = [process() for _ in range(2)]
    for one in crowd:
        one.start(jobs.count_by_threads, paths, threads=5, times=30, using="zookeeper")
    done = [one.hear() for one in crowd]
    assert [int(Path(path).read_text()) for path in paths] == [
        sum(column) for column in zip(*done, strict=True)
    ]


def test_readers_never_see_a_partial_write(process, tmp_path):
    path, crowd = counter(tmp_path, "0"), [process() for _ in range(4)]
    for number, one in enumerate(crowd):
        one.start(
            zookeeper_jobs.read_or_write,
            str(path),
            "rw",
            times=60,
            write=number % 2 == 0,
            using="zookeeper",
        )
    for one in crowd:
        one.hear()
    assert path.read_text() == "240"


def test_waiters_in_processes_are_served_in_order(process, server, until):
    before = watches(server)
    holder, *waiting = [process() for _ in range(4)]
    holder.start(jobs.hold, "line", using="zookeeper")
    holder.hear()
    for number, one in enumerate(waiting):
        one.start(jobs.wait_quietly, "line", using="zookeeper", timeout=30)
        until(lambda number=number: watches(server) == before + number + 1)
    holder.tell()
    granted = [one.hear() for one in waiting]
    assert granted == sorted(granted)


def test_a_release_wakes_only_the_next_waiter(process, server, person, root, until):
    """A release wakes only the next waiter.

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
    victim.start(zookeeper_jobs.hold_until_lost, "key", using="zookeeper")
    token = victim.hear()
    victim.stop()
    _, later = waiter.call(jobs.wait_quietly, "key", using="zookeeper", timeout=30)
    assert later > token
    victim.resume()
    assert victim.hear() == ([(token, False)], "LockLost")
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
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "DLOCKS_TEST_ALIASES": json.dumps(
            {"zookeeper": {"BACKEND": BACKEND, "OPTIONS": options}}
        ),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("True\n", "")
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
                proxy.cut_all()
                hold.check()
            assert hold.token == token


def test_repeatedly_cut_connections_lose_no_updates(server, configured, tmp_path):
    with proxied(server) as proxy:
        process = configured(proxy.port, connect_timeout=20.0)
        path, crowd = counter(tmp_path), [process() for _ in range(3)]
        for one in crowd:
            one.start(
                jobs.count,
                str(path),
                "count",
                times=60,
                scope="lease",
                using="zookeeper",
                timeout=None,
            )
        while not all(one.pipe.poll(0.15) for one in crowd):
            proxy.cut_all()
        tokens = [token for one in crowd for token in one.hear()]
    assert path.read_text().split()[0] == "180"
    assert len(set(tokens)) == 180


def test_a_waiter_queues_again_when_its_session_ends(
    server, backend, person, root, until, in_other_thread
):
    with client_of(server.port) as other:
        other.ensure_path(f"{root}/key")
        first = other.create(
            f"{root}/key/{'0' * 32}.alone..", sequence=True, ephemeral=True
        )
        found = []

        def work():
            with lock(timeout=30) as hold:
                found.append(hold.held)

        waiter = threading.Thread(target=work)
        waiter.start()
        try:
            until(lambda: is_in_queue(backend))
            (mine,) = set(nodes(person, root)) - {first.rpartition("/")[2]}
            end_session(backend, server)
            until(lambda: is_in_queue(backend) and mine not in nodes(person, root))
        finally:
            other.delete(first)
            waiter.join(30)
    assert found == [True]
    assert nodes(person, root) == []


async def test_tasks_wait_in_order_without_a_thread_each(backend):
    order = []
    before = threading.active_count()

    async def take(number):
        async with lock() as hold:
            order.append((number, hold.token))
            await asyncio.sleep(0.001)

    async with lock():
        tasks = []
        for number in range(20):
            tasks.append(asyncio.create_task(take(number)))
            while await asyncio.to_thread(backend.waiting, "key") <= number:
                await asyncio.sleep(0.005)
        threads = threading.active_count()
    await asyncio.gather(*tasks)
    assert order == sorted(order)
    assert [number for number, _ in order] == list(range(20))
    assert threads - before < 15


async def test_hundreds_of_tasks_wait_for_one_key(backend):
    done = []

    async def take(number):
        async with lock(timeout=50):
            done.append(number)

    async with lock():
        tasks = [asyncio.create_task(take(number)) for number in range(300)]
        while await asyncio.to_thread(backend.waiting, "key") < 300:
            await asyncio.sleep(0.01)
    await asyncio.gather(*tasks)
    assert len(set(done)) == 300


async def test_a_waiting_task_queues_again_when_its_session_ends(
    server, backend, person, root, until
):
    path = f"{root}/key"
    person.ensure_path(path)
    first = person.create(f"{path}/{'0' * 32}.alone..", sequence=True, ephemeral=True)
    task = asyncio.create_task(lock().aacquire())
    while not is_in_queue(backend):
        await asyncio.sleep(0.01)
    await asyncio.to_thread(end_session, backend, server)
    await asyncio.to_thread(person.delete, first)
    hold = await task
    assert hold.held
    await hold.arelease()
    assert nodes(person, root) == []


def test_a_hold_ends_before_its_session_on_the_servers(start, configured, until):
    """The hold ends before its session, although its ttl is longer.

    The servers cannot be reached any more.
    """
    server = start(ZooKeeper(**BRISK))
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


def test_the_maximum_session_timeout_of_the_server_applies(start, configured):
    server = start(ZooKeeper(**{**BRISK, "maxSessionTimeout": 1500}))
    configured(server.port, session_timeout=60.0)
    with lock(ttl=60) as hold:
        assert backends["zookeeper"].ensemble.session_timeout == 1.5
        assert hold.remaining <= 1.0


# Lost replies and cancelled claims.


class EngineSession(Proxy):
    """A proxy that can cut all connections, while clients can reconnect at once."""

    def __init__(self, port):
        self.ended = threading.Event()
        super().__init__(port)

    def _accept(self):
        super()._accept()
        self.ended.set()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        assert self.ended.wait(10)
        super().close()

    def cut_all(self):
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxied(server):
    proxy = EngineSession(server.port)
    try:
        yield proxy
    finally:
        proxy.close()


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
            proxy.cut_all()
            with silent.accept()[0]:
                proxy._target = server.port
                began = time.monotonic()
                assert backend.holder("key").token == hold.token
                in_time(time.monotonic() - began, waiters.CONNECT_TIMEOUT / 2)


def test_a_claim_is_found_again_when_its_reply_is_lost(
    server, configured, person, root
):
    with proxied(server) as proxy:
        configured(proxy.port)
        with lock("warm"):
            pass
        proxy.swallow(f"{root}/key/".encode())
        with lock() as hold:
            assert proxy.swallowed.wait(10)
            (name,) = nodes(person, root)
            _, stat = person.get(f"{root}/key/{name}")
            base, _ = person.get(root)
            assert hold.token == int(base) + stat.czxid
        assert nodes(person, root) == []


def test_a_queued_claim_is_found_again_when_its_reply_is_lost(
    server, configured, person, root, until
):
    with proxied(server) as proxy:
        configured(proxy.port)
        backend = backends["zookeeper"]
        first, second = claim(), claim()
        assert backend.acquire(first)
        proxy.swallow(b".alone..")
        backend.enqueue(second)
        assert proxy.swallowed.wait(10)
        assert len(nodes(person, root)) == 2
        assert backend.release(first)
        until(lambda: backend.poll([second])[second.owner].grant)
        assert backend.release(second)
        assert nodes(person, root) == []


def test_a_zookeeper_release_counts_when_its_reply_is_lost(
    server, configured, person, root
):
    with proxied(server) as proxy:
        configured(proxy.port)
        with lock():
            (name,) = nodes(person, root)
            proxy.swallow(
                struct.pack(">i", DELETE) + struct.pack(">i", len(f"{root}/key/{name}"))
            )
        assert proxy.swallowed.wait(10)
        assert nodes(person, root) == []


def test_a_cancelled_claim_on_silent_servers_leaves_no_node(start, configured, until):
    # It must not delete the node of the key in this moment.
    server = start(ZooKeeper(**{**BRISK, "java": ("-Xmx128m",)}))
    configured(server.port, session_timeout=20.0, connect_timeout=20.0)
    with lock():
        pass
    # The limit is set only now, because the first session of a new server takes longer.
    backends["zookeeper"].ensemble.timeout = 0.4
    server.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    try:
        for _ in range(2):
            with pytest.raises(LockBackendError, match="zookeeper"):
                lock().acquire()
        in_time(time.monotonic() - began, 6.0)
    finally:
        server.process.send_signal(signal.SIGCONT)
    with client_of(server.port) as person:
        backend = backends["zookeeper"]
        # The servers process the requests, although no caller waits for them any more.
        until(lambda: not backend._orphans)
        assert nodes(person, backend.root) == []


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


@pytest.mark.parametrize("keep", [0.0, 60.0])
def test_a_release_is_false_once_the_expired_lease_has_ended(
    backend, monkeypatch, keep
):
    """Another caller may have the key before this process has forgotten its claim."""
    mine, send = claim(ttl=0.2), backend.ensemble.send
    deleted, forgets = threading.Event(), threading.Event()

    def send_and_wait(*requests, **options):
        answers = send(*requests, **options)
        if requests[0][0] == "delete" and not deleted.is_set():
            deleted.set()
            assert forgets.wait(30)
        return answers

    assert backend.acquire(mine)
    monkeypatch.setattr(backend.ensemble, "send", send_and_wait)
    assert deleted.wait(30)
    released = backend.release(mine, keep=keep)
    forgets.set()
    assert not released


def test_a_waiter_that_times_out_leaves_the_queue(process, backend, person, root):
    holder = process()
    holder.start(jobs.hold, "key", using="zookeeper")
    holder.hear()
    for timeout in (0, 0.2):
        with pytest.raises(LockTimeout, match=rf"held by .*:{holder.process.pid}:"):
            lock(timeout=timeout).acquire()
        assert len(nodes(person, root)) == 1
    holder.tell()
    holder.hear()
    assert nodes(person, root) == []


async def test_a_cancelled_waiter_leaves_the_queue(backend, person, root):
    async with lock():
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


@pytest.mark.parametrize("recreated", [False, True])
def test_no_shared_hold_is_granted_beside_a_removed_hold(
    recreated, server, backend, person, root
):
    """No shared hold is granted beside a hold that was removed.

    Another caller may hold the key exclusively meanwhile. With ``recreated`` the
    node of the key was created again, so the numbers may repeat.
    """
    mine, theirs = claim(), claim()
    assert backend.acquire(mine)
    (name,) = nodes(person, root)
    person.delete(f"{root}/key/{name}")
    if recreated:
        # The server does this after a while, and may have done it already.
        with suppress(NoNodeError):
            person.delete(f"{root}/key")
    other = ZooKeeperBackend("other", hosts=at(server.port), root=root)
    assert other.acquire(theirs)
    share = claim(shared=True, beside=mine.owner)
    assert backend.acquire(share) is None
    assert len(nodes(person, root)) == 1
    assert other.release(theirs)
    disconnect(other)


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


@pytest.fixture
def answered_late(backend):
    """Return a context in which the session is uncertain when replies arrive."""
    send = backend.ensemble.send

    def send_slowly(*requests, **how):
        answers = send(*requests, **how)
        backend.ensemble.certain_until = clock.now()
        return answers

    @contextmanager
    def answered_late():
        backend.ensemble.send = send_slowly
        yield
        backend.ensemble.send = send

    return answered_late


def test_a_key_is_not_granted_without_a_remaining_lease(
    backend, person, root, answered_late
):
    mine = claim()
    with answered_late():
        assert backend.acquire(mine) is None
    assert nodes(person, root) == []
    assert backend.acquire(mine)
    with answered_late():
        backend.holder("key")
        assert backend.acquire(mine) is None
    assert nodes(person, root) == []


def test_a_queued_grant_without_a_lease_is_requested_again(backend, answered_late):
    mine = claim()
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


def test_holders_and_waiters_survive_a_server_restart(start, configured, tmp_path):
    server = start(ZooKeeper(**BRISK))
    process = configured(server.port, session_timeout=50.0, connect_timeout=40.0)
    path, crowd = counter(tmp_path), [process() for _ in range(3)]
    for one in crowd:
        # The limit allows for a slow start of the server.
        one.call(zookeeper_jobs.be_patient, 60.0)
        one.start(
            jobs.count_through_trouble,
            str(path),
            "count",
            times=90,
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
        for one in (leader, other):
            one.process = one._spawn(one.command())
        for one in (leader, other):
            one.wait_until_ready()
        with lock("key") as again:
            assert again.token > hold.token


def test_tokens_grow_in_a_rebuilt_ensemble(start, configured):
    tokens = []
    for _ in range(2):
        server = start(ZooKeeper(**BRISK))
        configured(server.port)
        for _ in range(3):
            with lock() as hold:
                tokens.append(hold.token)
        disconnect(backends["zookeeper"])
        server.stop()
    assert all(one < other for one, other in pairwise(tokens))


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


def test_zookeeper_holds_never_overlap_under_faults(start, configured):
    """No two callers hold the key at once, whatever fails.

    The faults are stopped holders, cut connections, expired sessions and a server that
    does not reply for a while.
    """
    server = start(ZooKeeper(**BRISK))
    chance = random.Random(20)
    with proxied(server) as proxy:
        process = configured(proxy.port, session_timeout=1.5, connect_timeout=2.0)
        crowd = [process() for _ in range(4)]
        for one in crowd:
            one.start(
                zookeeper_jobs.hold_through_trouble,
                "key",
                seconds=20,
                using="zookeeper",
                timeout=10,
            )
        end = time.monotonic() + 18
        while time.monotonic() < end:
            time.sleep(chance.uniform(0.1, 0.4))
            fault = chance.choice(
                ["cut", "stop the holder", "stop the holder", "stop the server"]
            )
            if fault == "cut":
                proxy.cut_all()
            elif fault == "stop the holder":
                # The process may have released the key by then.
                with suppress(LockBackendError):
                    holder = backends["zookeeper"].holder("key")
                    if victims := [
                        one
                        for one in crowd
                        if holder and f":{one.process.pid}:" in holder.holder
                    ]:
                        victims[0].stop()
                        time.sleep(chance.uniform(1.0, 3.0))
                        victims[0].resume()
            else:
                server.process.send_signal(signal.SIGSTOP)
                time.sleep(chance.uniform(0.1, 2.0))
                server.process.send_signal(signal.SIGCONT)
        holds = sorted(seen for one in crowd for seen in one.hear())
    assert len(holds) > 20
    assert len({token for token, _, _ in holds}) == len(holds)
    for (_, _, last), (_, first, _) in pairwise(holds):
        assert last < first


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
    with pytest.raises(
        RuntimeError, match="ZooKeeperBackend does not support semaphores"
    ):
        db_semaphore("key", 3, using="zookeeper").acquire()
    with pytest.raises(
        RuntimeError, match="ZooKeeperBackend does not support takeover=False"
    ):
        lock(takeover=False).acquire()
    with lock() as hold, pytest.raises(RuntimeError, match="ZooKeeperBackend"):
        hold.detach()
    with (
        lock() as hold,
        pytest.raises(RuntimeError, match="ZooKeeperBackend"),
        hold.atomic(),
    ):
        pass


def test_the_queue_stays_ordered_when_sequence_numbers_wrap():
    """ZooKeeper's sequence numbers are signed 32-bit integers and wrap around."""
    numbers = [2**31 - 2, 2**31 - 1, -(2**31), -(2**31) + 1]
    names = [f"{'a' * 32}.alone..{number:010d}" for number in numbers]
    line = tickets.NodeQueue([*reversed(names), "lock-0000000001", "a.b.c.d"])
    assert [ticket.number for ticket in line.tickets] == numbers
    assert line.granted == line.tickets[:1]


# Settings.


@pytest.mark.parametrize(
    ("options", "message"),
    [
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
    ],
)
def test_wrong_zookeeper_settings_are_named(aliases, options, message):
    aliases(zookeeper={"BACKEND": BACKEND, "OPTIONS": options})
    with pytest.raises(ImproperlyConfigured, match=message) as caught:
        backends["zookeeper"]
    assert "'zookeeper'" in str(caught.value)
    assert "open-sesame" not in str(caught.value)
    assert any("zookeeper" in str(one) for one in check_settings())


def test_missing_servers_are_reported_in_bounded_time(configured):
    configured(free_port(), connect_timeout=0.5)
    for ask in (lock().acquire, lock().holder):
        began = time.monotonic()
        with pytest.raises(
            LockBackendError,
            match=r"ZooKeeper of DLOCKS\['zookeeper'\] \(127.0.0.1:\d+\) did not",
        ):
            ask()
        in_time(time.monotonic() - began, 3.0)


async def test_missing_servers_are_reported_to_a_task(configured):
    configured(free_port(), connect_timeout=0.5)
    with pytest.raises(LockBackendError, match="zookeeper"):
        await lock().aacquire()


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
    person.create(root, b"settings")
    configured(server.port)
    with pytest.raises(LockBackendError, match=f"has other data in {root}"):
        lock().acquire()


def test_an_existing_empty_root_is_accepted(server, configured, person, root):
    person.create(root)
    configured(server.port)
    with lock() as hold:
        assert hold.token > int(person.get(root)[0])


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


def test_list_locks_shows_the_holders_of_other_processes(server, configured):
    """Keys of other prefixes and keys without a holder are not shown."""
    process = configured(server.port, prefix="a:")()
    process.start(jobs.hold_until_lost, "stock:7", using="zookeeper", timeout=20)
    token = process.hear()
    backend = backends["zookeeper"]
    odd = claim("a:%2F / {ü}")
    backend.acquire(odd)
    backend.acquire(claim("b:other"))
    backend.enqueue(claim("a:stock:7", holder="next"))
    _, first, stock = run("list_locks").splitlines()
    assert re.fullmatch(
        r"%2F / \{ü\} +held +somebody +- +\S+ s ago +\d+ s left +1 +0 +\d+", first
    )
    assert re.search(rf"^stock:7 +held +\S+ .* - +1 +1 +{token}$", stock)
    (lock,) = json.loads(run("list_locks", "stock:*", "--json"))
    assert (lock["token"], lock["seconds_left"], lock["waiting"]) == (token, None, 1)
    backend.release(odd)
    assert len(run("list_locks").splitlines()) == 2


def test_an_empty_root_has_no_locks(server, configured):
    configured(server.port)
    assert run("list_locks") == "No locks.\n"


def test_a_cleared_lock_is_lost_and_goes_to_the_first_waiter(server, configured):
    """Its former holder learns of it at its next renewal. Tokens still grow."""
    process = configured(server.port)()
    process.start(jobs.hold_until_lost, "stock:7", using="zookeeper", timeout=20)
    token = process.hear()
    backend, waits = backends["zookeeper"], claim("stock:7", holder="next")
    backend.enqueue(waits)
    assert not backend.clear("stock:7", token + 1)
    out = run("clear_lock", "stock:7", "--yes", "--reason", "tests")
    assert re.search(r"'stock:7' was cleared. It is now held by next", out)
    grant = backend.poll([waits])[waits.owner].grant
    assert grant.token > token
    # The loss was reported.
    assert process.hear()
    backend.release(waits)
    assert backend.acquire(claim("stock:7")).token > grant.token


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
