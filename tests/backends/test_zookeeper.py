"""What is promised about locks in a ZooKeeper ensemble, on real servers."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import math
import os
import random
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
from django.test import SimpleTestCase
from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

from dlocks import LockBackendError, LockLost, LockTimeout, clock, db_lock, db_rwlock, db_semaphore
from dlocks.backends import zookeeper
from dlocks.backends.base import BaseBackend, Claim
from dlocks.backends.zookeeper import ZooKeeperBackend, tickets
from dlocks.checks import check_settings
from dlocks.conf import backends, options_of
from dlocks.testing import BackendContract
from tests import jobs, pages
from tests.backends import zookeeper_jobs
from tests.proxy import Proxy
from tests.servers import BRISK, ZooKeeper, ZooKeeperMember, asked, free_port
from tests.timing import in_time

BACKEND = "dlocks.backends.zookeeper.ZooKeeperBackend"
# As the protocol numbers this request.
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
    """Whatever happened, no session is left to the next test."""
    yield
    # Those too that other settings have replaced.
    for backend in list(zookeeper._backends):
        backend.disconnect()


@pytest.fixture
def configured(aliases, root):
    """Return a function that makes the alias, here and in the processes that the function it returns starts."""

    def configure(*ports, **options):
        options = {"hosts": at(*ports), "root": root, "session_timeout": 20.0, **options}
        return aliases(zookeeper={"BACKEND": BACKEND, "OPTIONS": options})

    return configure


@pytest.fixture
def process(server, configured):
    """Return a function that starts a process with the alias on the server that nobody stops."""
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
    """Somebody who looks at the nodes with a client of their own."""
    with client_of(server.port) as client:
        yield client


def nodes(person, root, key="key"):
    try:
        return person.get_children(f"{root}/{key}")
    except NoNodeError:
        return []


def end_session(backend, server):
    """End the session of this process, from the servers' side."""
    session = backend.ensemble._client.client_id
    while True:
        # Closing ends it, unless its own client has come back meanwhile.
        with client_of(server.port, client_id=session) as client:
            if client.client_id != session:
                return


def stands_in_line(backend):
    """Return whether a claim of this process waits; that it found the key taken, and went again, does not count."""
    return any(entry.watched for entry in list(backend._entries.values()))


def watches(server):
    text = asked(server.port, b"mntr").decode()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("zk_watch_count")))


@pytest.mark.usefixtures("server")
class TestZooKeeper(BackendContract, SimpleTestCase):
    def make_backend(self, **options):
        backend = ZooKeeperBackend(
            "zookeeper", hosts=at(self.server.port), root=f"/test-{secrets.token_hex(4)}", **options
        )
        self.addCleanup(backend.disconnect)
        return backend


# Processes.


def counter(directory, text="0 0"):
    path = directory / "counter"
    path.write_text(text)
    return path


def test_processes_that_count_in_an_unguarded_file_lose_nothing(process, tmp_path):
    path, crowd = counter(tmp_path), [process() for _ in range(4)]
    for one in crowd:
        one.start(jobs.count, str(path), "count", times=100, scope="lease", using="zookeeper", timeout=None)
    tokens = [one.hear() for one in crowd]
    assert all(mine == sorted(mine) for mine in tokens)
    assert path.read_text().split()[0] == "400"
    assert len({token for mine in tokens for token in mine}) == 400


def test_threads_of_processes_that_are_not_all_patient_lose_nothing(process, tmp_path):
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        Path(path).write_text("0")
    crowd = [process() for _ in range(2)]
    for one in crowd:
        one.start(jobs.count_by_threads, paths, threads=5, times=30, using="zookeeper")
    done = [one.hear() for one in crowd]
    assert [int(Path(path).read_text()) for path in paths] == [sum(column) for column in zip(*done, strict=True)]


def test_readers_never_see_a_writer_at_work(process, tmp_path):
    path, crowd = counter(tmp_path, "0"), [process() for _ in range(4)]
    for number, one in enumerate(crowd):
        one.start(zookeeper_jobs.read_or_write, str(path), "rw", times=60, write=number % 2 == 0, using="zookeeper")
    for one in crowd:
        one.hear()
    assert path.read_text() == "240"


def test_who_waits_is_served_in_the_order_of_arrival(process, server, until):
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


def test_a_release_wakes_the_next_one_alone(process, server, person, root, until):
    """Each of those who wait watches one node, and that goes for the next one only."""
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
        # Nobody else was woken, and had to watch anew.
        assert watches(server) == before + 3 - number
    waiting[-1].tell()


def test_a_killed_holder_s_key_is_free_when_its_session_has_ended(server, configured, person, root, until):
    process = configured(server.port, session_timeout=2.0)
    victim, waiter = process(), process()
    token = victim.call(jobs.acquire, "key", using="zookeeper")
    waiter.start(jobs.wait_quietly, "key", using="zookeeper", timeout=30)
    until(lambda: len(nodes(person, root)) == 2)
    victim.kill()
    granted, later = waiter.hear()
    assert later > token
    # Two seconds, and two of the server's ticks.
    in_time(granted - victim.killed_at, 2.0 + 0.4 + 1.0)


def test_a_stopped_holder_is_told_of_its_loss_when_it_goes_on(server, configured):
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


def test_a_fork_has_nothing_of_its_parent_s_and_leaves_it_alone(process, backend):
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


def test_a_process_gives_back_what_it_holds_when_it_ends(server, person, root):
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
        "DLOCKS_TEST_ALIASES": json.dumps({"zookeeper": {"BACKEND": BACKEND, "OPTIONS": options}}),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("True\n", "")
    assert nodes(person, root) == []


# Sessions.


def test_a_session_that_ends_is_told_at_once(server, configured, until):
    """Not at the next renewal, which is seconds away."""
    configured(server.port, session_timeout=60.0)
    told = threading.Event()
    hold = lock(ttl=60, on_lost=lambda hold: told.set()).acquire()
    backend = backends["zookeeper"]
    first = hold._deadline
    # The first renewal comes soon, or has come; the one after it is the one that is not waited for.
    until(lambda: hold._deadline > first, seconds=30)
    renewed = hold._deadline
    began = time.monotonic()
    end_session(backend, server)
    assert told.wait(30)
    in_time(time.monotonic() - began, backend.renew_every / 2)
    assert not hold.held
    assert hold._deadline == renewed
    with pytest.raises(LockLost, match="session with ZooKeeper has ended"):
        hold.release()
    with lock(timeout=5) as again:
        assert again.token > hold.token


def test_a_connection_that_is_lost_is_not_a_loss(server, configured):
    with proxied(server) as proxy:
        configured(proxy.port)
        with lock() as hold:
            token = hold.token
            for _ in range(3):
                proxy.cut_all()
                hold.check()
            assert hold.token == token


def test_processes_whose_connections_are_cut_again_and_again_lose_nothing(server, configured, tmp_path):
    with proxied(server) as proxy:
        process = configured(proxy.port, connect_timeout=20.0)
        path, crowd = counter(tmp_path), [process() for _ in range(3)]
        for one in crowd:
            one.start(jobs.count, str(path), "count", times=60, scope="lease", using="zookeeper", timeout=None)
        while not all(one.pipe.poll(0.15) for one in crowd):
            proxy.cut_all()
        tokens = [token for one in crowd for token in one.hear()]
    assert path.read_text().split()[0] == "180"
    assert len(set(tokens)) == 180


def test_who_waits_while_its_session_ends_stands_in_line_anew(server, backend, person, root, until, elsewhere):
    with client_of(server.port) as other:
        other.ensure_path(f"{root}/key")
        first = other.create(f"{root}/key/{'0' * 32}.alone..", sequence=True, ephemeral=True)
        found = []
        waiter = threading.Thread(target=lambda: found.append(lock(timeout=30).acquire()))
        waiter.start()
        try:
            until(lambda: stands_in_line(backend))
            (mine,) = set(nodes(person, root)) - {first.rpartition("/")[2]}
            end_session(backend, server)
            until(lambda: stands_in_line(backend) and mine not in nodes(person, root))
        finally:
            other.delete(first)
            waiter.join(30)
    assert found[0].held
    found[0].release()
    assert nodes(person, root) == []


async def test_tasks_wait_without_a_thread_each_and_are_served_in_turn(backend):
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


async def test_tasks_that_wait_while_their_session_ends_stand_in_line_anew(server, backend, person, root, until):
    path = f"{root}/key"
    person.ensure_path(path)
    first = person.create(f"{path}/{'0' * 32}.alone..", sequence=True, ephemeral=True)
    task = asyncio.create_task(lock().aacquire())
    while not stands_in_line(backend):
        await asyncio.sleep(0.01)
    await asyncio.to_thread(end_session, backend, server)
    await asyncio.to_thread(person.delete, first)
    hold = await task
    assert hold.held
    await hold.arelease()
    assert nodes(person, root) == []


def test_a_hold_is_not_held_for_longer_than_the_servers_keep_its_session(start, configured, until):
    """… though its ttl is longer, when they can not be asked any more."""
    server = start(ZooKeeper(**BRISK))
    configured(server.port, session_timeout=3.0, connect_timeout=20.0)
    hold = lock(ttl=60).acquire()
    backends["zookeeper"].ensemble.patience = 0.5
    server.process.send_signal(signal.SIGSTOP)
    stopped = clock.now()
    try:
        until(lambda: not hold.held)
        assert hold._deadline < stopped + 3.0
        with pytest.raises(LockLost):
            hold.check()
    finally:
        server.process.send_signal(signal.SIGCONT)
    with pytest.raises(LockLost):
        hold.release()


def test_a_hold_that_is_not_renewed_lasts_for_its_ttl(server, configured):
    """… though the session answers for less at a time."""
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
    assert began + 3.9 < hold._deadline < acquired + 4.1
    with pytest.raises(LockLost):
        hold.release()


def test_the_server_s_bound_to_the_session_counts(start, configured):
    server = start(ZooKeeper(**{**BRISK, "maxSessionTimeout": 1500}))
    configured(server.port, session_timeout=60.0)
    with lock(ttl=60) as hold:
        assert backends["zookeeper"].ensemble.session_timeout == 1.5
        assert hold.remaining <= 1.0


# Replies that are lost, and other ends.


class Wire(Proxy):
    """A proxy that can cut all connections, to clients that connect again at once."""

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
    proxy = Wire(server.port)
    try:
        yield proxy
    finally:
        proxy.close()


def test_a_server_that_takes_the_connection_and_says_nothing_is_passed_by(server, configured):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = [*at(silent.getsockname()[1]).split(","), f"localhost:{server.port}"]
        configured(hosts=hosts, connect_timeout=6.0, client={"randomize_hosts": False})
        with lock() as hold:
            hold.check()


def test_a_connection_on_which_a_server_that_starts_never_says_anything_is_given_up_soon(server, configured):
    """… before those who wait are told that it cannot be asked, however long a session lasts."""
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
                in_time(time.monotonic() - began, zookeeper.PATIENCE / 2)


def test_a_claim_of_which_the_reply_was_lost_is_found_again(server, configured, person, root):
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


def test_a_place_in_line_of_which_the_reply_was_lost_is_found_again(server, configured, person, root, until):
    with proxied(server) as proxy:
        configured(proxy.port)
        backend = backends["zookeeper"]
        first, second = claim(), claim()
        assert backend.acquire(first)
        proxy.swallow(b".alone..")
        backend.queue(second)
        assert proxy.swallowed.wait(10)
        assert len(nodes(person, root)) == 2
        assert backend.release(first)
        until(lambda: backend.look([second])[second.owner].grant)
        assert backend.release(second)
        assert nodes(person, root) == []


def test_a_release_of_which_the_reply_was_lost_is_one(server, configured, person, root):
    with proxied(server) as proxy:
        configured(proxy.port)
        with lock():
            (name,) = nodes(person, root)
            proxy.swallow(struct.pack(">i", DELETE) + struct.pack(">i", len(f"{root}/key/{name}")))
        assert proxy.swallowed.wait(10)
        assert nodes(person, root) == []


def test_who_gives_up_while_the_servers_are_silent_leaves_nothing_behind(start, configured, until):
    # It may not delete the node of the key just then.
    server = start(ZooKeeper(**{**BRISK, "java": ("-Xmx128m",)}))
    configured(server.port, session_timeout=20.0, connect_timeout=20.0)
    with lock():
        pass
    # Not before: a server that has just started takes its time for the first session.
    backends["zookeeper"].ensemble.patience = 0.4
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
        # The servers do what they were asked for, though nobody waits for it any more.
        until(lambda: not backend._orphans)
        assert nodes(person, backend.root) == []


def test_a_claim_that_is_not_heard_of_is_passed_over_though_another_one_may_have_left_a_node(server, configured, until):
    """… which is looked for as long as it may come to be: twice as long as the session lasts."""
    with proxied(server) as proxy:
        configured(proxy.port, session_timeout=40.0, connect_timeout=20.0)
        backend = backends["zookeeper"]
        holder, silent, waits = claim(), claim(), claim()
        assert backend.acquire(holder)
        backend.ensemble.patience = 0.5
        proxy.cut.set()
        with pytest.raises(LockBackendError):
            lock("another").acquire()
        proxy.cut.clear()
        backend.ensemble.patience = 20.0
        for one in (silent, waits):
            assert backend.queue(one).number
        until(lambda: backend.look([waits]) and backend.waiting("key") == 1, seconds=20)
        assert backend._orphans
        assert backend.release(holder)
        until(lambda: backend.look([waits])[waits.owner].grant)
        assert backend.release(waits)


def test_who_runs_out_of_time_leaves_the_line(process, backend, person, root):
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


async def test_who_is_cancelled_leaves_the_line(backend, person, root):
    async with lock():
        task = asyncio.create_task(lock(timeout=None).aacquire())
        while not await asyncio.to_thread(backend.waiting, "key"):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(nodes(person, root)) == 1
    assert nodes(person, root) == []


def test_who_died_in_line_lets_the_others_pass(server, configured, until):
    process, backend = configured(server.port, session_timeout=2.0), backends["zookeeper"]
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


def test_a_person_can_take_a_key_away(backend, person, root, until):
    with pytest.raises(LockLost), lock() as hold:
        (name,) = nodes(person, root)
        person.delete(f"{root}/key/{name}")
        until(lambda: not hold.held)


@pytest.mark.parametrize("anew", [False, True])
def test_no_share_is_had_beside_a_hold_that_was_taken_away(anew, server, backend, person, root):
    """Somebody else may have come since, and has the key alone; where the key's node was made anew, by one's number."""
    mine, theirs = claim(), claim()
    assert backend.acquire(mine)
    (name,) = nodes(person, root)
    person.delete(f"{root}/key/{name}")
    if anew:
        # As the server does after a while, and may have done already.
        with suppress(NoNodeError):
            person.delete(f"{root}/key")
    other = ZooKeeperBackend("other", hosts=at(server.port), root=root)
    assert other.acquire(theirs)
    share = claim(shared=True, beside=mine.owner)
    assert backend.acquire(share) is None
    assert len(nodes(person, root)) == 1
    assert other.release(theirs)
    other.disconnect()


def test_what_is_renewed_when_its_time_is_over_is_not_taken_away_and_what_is_taken_away_not_renewed(
    server, person, root, monkeypatch
):
    """As by a process that goes on after a pause, where the two come at once."""
    # The question is answered, however long the server takes.
    monkeypatch.setattr(zookeeper, "SOON", 20.0)
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
    late.disconnect()
    other.disconnect()


@pytest.mark.parametrize("certain", [True, False])
def test_who_asks_for_a_claim_that_is_just_being_taken_back_is_granted_nothing_and_asks_again(
    server, root, until, certain
):
    """As a process that goes on after a pause, when the time of what it was granted in line is over."""
    late = ZooKeeperBackend("late", hosts=at(server.port), root=root, grace=0.0)
    mine, begun, go_on = claim(ttl=2.0), threading.Event(), threading.Event()
    leave = late._leave

    def leave_slowly(entry, **how):
        begun.set()
        assert go_on.wait(30)
        return leave(entry, **how)

    assert late.acquire(mine)
    late._leave = leave_slowly
    try:
        assert begun.wait(10)
        if not certain:
            late.ensemble.certain_until = -math.inf
        assert late.acquire(mine) is None
        assert late.queue(mine) is None
        assert late.look([mine]) == {}
    finally:
        go_on.set()
    until(lambda: mine.owner not in late._entries)
    assert late.acquire(mine)
    assert late.release(mine)
    late.disconnect()


@pytest.fixture
def answered_late(backend):
    """Return a context in which the session is not certain any more when the answers come."""
    ask = backend.ensemble.ask

    def ask_slowly(*requests, **how):
        answers = ask(*requests, **how)
        backend.ensemble.certain_until = clock.now()
        return answers

    @contextmanager
    def answered_late():
        backend.ensemble.ask = ask_slowly
        yield
        backend.ensemble.ask = ask

    return answered_late


def test_a_key_is_not_granted_for_no_time_at_all(backend, person, root, answered_late):
    mine = claim()
    with answered_late():
        assert backend.acquire(mine) is None
    assert nodes(person, root) == []
    assert backend.acquire(mine)
    with answered_late():
        backend.holder("key")
        assert backend.acquire(mine) is None
    assert nodes(person, root) == []


def test_who_has_the_key_by_the_line_for_no_time_at_all_asks_for_it(backend, answered_late):
    mine = claim()
    with answered_late():
        place = backend.queue(mine)
        assert (place.grant, place.ask) == (None, True)
        place = backend.look([mine])[mine.owner]
        assert (place.grant, place.ask) == (None, True)
    assert backend.acquire(mine).lease > 0
    assert backend.release(mine)


def test_nodes_of_keys_that_nobody_wants_any_more_go(backend, person, root, until):
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
        read = [person.get(f"{root}/{node}")[0].decode() for node in person.get_children(root)]
    assert sorted(read) == sorted(keys)


# Servers that come and go.


@pytest.mark.timeout(200)
def test_holders_and_waiters_outlive_a_restart_of_the_server(start, configured, tmp_path):
    server = start(ZooKeeper(**BRISK))
    process = configured(server.port, session_timeout=50.0, connect_timeout=40.0)
    path, crowd = counter(tmp_path), [process() for _ in range(3)]
    for one in crowd:
        # However long the server takes to start.
        one.call(zookeeper_jobs.be_patient, 60.0)
        one.start(jobs.count_through_trouble, str(path), "count", times=90, using="zookeeper", timeout=60)
    for one in crowd:
        assert one.hear() == "a third"
    server.restart()
    outcomes = []
    for one in crowd:
        assert one.hear() == "two thirds"
        outcomes.append(one.hear())
    assert int(path.read_text().split()[0]) == sum(done for done, _ in outcomes)
    assert [troubles for _, troubles in outcomes] == [0, 0, 0]


@pytest.mark.timeout(200)
def test_three_servers_do_without_one_and_not_without_two(configured, until):
    with ZooKeeperMember.ensemble() as members:
        process = configured(*(member.port for member in members), session_timeout=20.0, connect_timeout=10.0)
        backend = backends["zookeeper"]
        worker = process()
        with lock(ttl=20) as hold:
            leader = next(one for one in members if b"Mode: leader" in asked(one.port, b"srvr"))
            leader.crash()
            assert worker.call(jobs.try_once, "key", using="zookeeper") is None
            hold.check()
        assert worker.call(jobs.try_once, "key", using="zookeeper") > hold.token
        other = next(one for one in members if one is not leader)
        other.crash()
        began = time.monotonic()
        for ask in (lock("other").acquire, lambda: backend.holder("other")):
            with pytest.raises(LockBackendError, match=r"DLOCKS\['zookeeper'\].*could not be asked"):
                ask()
        in_time(time.monotonic() - began, 30.0)
        for one in (leader, other):
            one.process = one._spawn(one.command())
        for one in (leader, other):
            one.wait_until_ready()
        with lock("key") as again:
            assert again.token > hold.token


def test_tokens_grow_in_an_ensemble_that_is_built_anew(start, configured):
    tokens = []
    for _ in range(2):
        server = start(ZooKeeper(**BRISK))
        configured(server.port)
        for _ in range(3):
            with lock() as hold:
                tokens.append(hold.token)
        backends["zookeeper"].disconnect()
        server.stop()
    assert all(one < other for one, other in pairwise(tokens))


def test_tokens_grow_for_a_process_that_was_idle_while_its_ensemble_was_built_anew(
    start, configured, root, monkeypatch, until
):
    """It has no session then that would tell it so."""
    monkeypatch.setattr(zookeeper, "LINGER", 0.2)
    server = start(ZooKeeper(**BRISK))
    configured(server.port)
    with lock() as hold:
        before = hold.token
    until(lambda: not backends["zookeeper"].ensemble.is_open)
    server.stop()
    shutil.rmtree(server.data / "version-2")
    server.start()
    # Somebody else comes first, and makes the root.
    other = ZooKeeperBackend("other", hosts=at(server.port), root=root)
    one = claim()
    between = other.acquire(one).token
    other.disconnect()
    with lock() as hold:
        assert before < between < hold.token


def test_tokens_grow_though_somebody_deletes_the_root(backend, server, person, root):
    with lock() as hold:
        tokens = [hold.token]
    person.delete(root, recursive=True)
    # Another process makes it anew, and the key's node.
    other = ZooKeeperBackend("other", hosts=at(server.port), root=root)
    one = claim()
    tokens.append(other.acquire(one).token)
    other.release(one)
    for _ in range(2):
        with lock() as hold:
            tokens.append(hold.token)
        person.delete(root, recursive=True)
    assert all(one < other for one, other in pairwise(tokens))


@pytest.mark.timeout(150)
def test_no_two_hold_at_a_time_whatever_fails(start, configured):
    """Stopped holders, connections that are cut, sessions that end, a server that gives no answer for a while."""
    server = start(ZooKeeper(**BRISK))
    chance = random.Random(20)
    with proxied(server) as proxy:
        process = configured(proxy.port, session_timeout=1.5, connect_timeout=2.0)
        crowd = [process() for _ in range(4)]
        for one in crowd:
            one.start(zookeeper_jobs.hold_through_trouble, "key", seconds=20, using="zookeeper", timeout=10)
        end = time.monotonic() + 18
        while time.monotonic() < end:
            time.sleep(chance.uniform(0.1, 0.4))
            fault = chance.choice(["cut", "stop the holder", "stop the holder", "stop the server"])
            if fault == "cut":
                proxy.cut_all()
            elif fault == "stop the holder":
                # If it still is it by then.
                with suppress(LockBackendError):
                    holder = backends["zookeeper"].holder("key")
                    if victims := [one for one in crowd if holder and f":{one.process.pid}:" in holder.holder]:
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


def test_who_writes_may_read_and_still_reads_when_a_writer_waits(backend, elsewhere, until):
    """… and whoever comes next has a larger token."""
    both = db_rwlock("key", using="zookeeper", timeout=20)
    writing = both.write().acquire()
    found = []
    waiter = threading.Thread(target=lambda: found.append(both.write().acquire()))
    waiter.start()
    try:
        until(lambda: stands_in_line(backend))
        reading = both.read().acquire()
        writing.release()
        assert elsewhere(both.read().try_acquire) is None
        assert not found
        assert backend.waiting("key") == 1
        reading.release()
    finally:
        waiter.join(30)
    assert found[0].token > reading.token >= writing.token
    found[0].release()


def test_what_it_cannot_do_is_refused_by_name(backend):
    with pytest.raises(RuntimeError, match="ZooKeeperBackend cannot bound how many"):
        db_semaphore("key", 3, using="zookeeper").acquire()
    with pytest.raises(RuntimeError, match="takeover=False is not possible with ZooKeeperBackend"):
        lock(takeover=False).acquire()
    with lock() as hold, pytest.raises(RuntimeError, match="ZooKeeperBackend"):
        hold.detach()
    with lock() as hold, pytest.raises(RuntimeError, match="ZooKeeperBackend"), hold.atomic():
        pass


def test_the_line_is_in_order_when_the_server_s_numbers_begin_anew():
    """They are 32 bits, with a sign."""
    numbers = [2**31 - 2, 2**31 - 1, -(2**31), -(2**31) + 1]
    names = [f"{'a' * 32}.alone..{number:010d}" for number in numbers]
    line = tickets.Line([*reversed(names), "lock-0000000001", "a.b.c.d"])
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
        ({"client": {"hosts": "x"}}, "client has unknown hosts"),
        ({"client": {"ues_ssl": True}}, "client has unknown ues_ssl; it takes .*use_ssl"),
        ({"client": "tls"}, "client must be a dictionary"),
        ({"port": 2181}, "unknown option 'port'"),
    ],
)
def test_wrong_settings_are_named(aliases, options, message):
    aliases(zookeeper={"BACKEND": BACKEND, "OPTIONS": options})
    with pytest.raises(ImproperlyConfigured, match=message) as caught:
        backends["zookeeper"]
    assert "'zookeeper'" in str(caught.value)
    assert "open-sesame" not in str(caught.value)
    assert any("zookeeper" in str(one) for one in check_settings())


def test_servers_that_are_not_there_are_told_in_bounded_time(configured):
    configured(free_port(), connect_timeout=0.5)
    for ask in (lock().acquire, lock().holder):
        began = time.monotonic()
        with pytest.raises(LockBackendError, match=r"ZooKeeper of DLOCKS\['zookeeper'\] \(127.0.0.1:\d+\) could not"):
            ask()
        in_time(time.monotonic() - began, 3.0)


async def test_a_task_is_told_of_servers_that_are_not_there(configured):
    configured(free_port(), connect_timeout=0.5)
    with pytest.raises(LockBackendError, match="zookeeper"):
        await lock().aacquire()


def test_wrong_credentials_are_refused_by_name_and_never_shown(server, configured, caplog):
    caplog.set_level(1)
    configured(server.port, auth="owner:open-sesame")
    with lock():
        pass
    backend = backends["zookeeper"]
    shown = [repr(backend), str(vars(backend)), str(vars(backend.ensemble)), str(backend.ensemble)]
    backend.disconnect()
    for auth in ("owner:wrong-sesame", None):
        configured(server.port, auth=auth)
        with pytest.raises(
            LockBackendError, match=r"DLOCKS\['zookeeper'\].* refuses a lock to these credentials"
        ) as error:
            lock().acquire()
        shown += [str(error.value), repr(error.value), repr(error.value.__cause__)]
        backends["zookeeper"].disconnect()
    assert any("kazoo" in record.name for record in caplog.records)
    assert "sesame" not in "".join([*shown, caplog.text])


def test_a_root_that_is_something_else_is_refused(server, configured, person, root):
    person.create(root, b"settings")
    configured(server.port)
    with pytest.raises(LockBackendError, match=f"has something else in {root}"):
        lock().acquire()


def test_a_root_that_a_person_has_made_will_do(server, configured, person, root):
    person.create(root)
    configured(server.port)
    with lock() as hold:
        assert hold.token > int(person.get(root)[0])


def test_the_page(server, settings, root):
    """… of the documentation, with the address of this server for that of the ensemble."""
    written = ast.literal_eval(pages.blocks("how-to/zookeeper")[0].removeprefix("DLOCKS = "))
    options = written["default"]["OPTIONS"]
    assert options["root"] == inspect.signature(ZooKeeperBackend).parameters["root"].default
    settings.DLOCKS = {
        "default": {**written["default"], "OPTIONS": {**options, "hosts": [at(server.port)], "root": root}}
    }
    assert pages.run("how-to/zookeeper").build("north").startswith("north with token ")
    text = (pages.DOCS / "how-to/zookeeper.md").read_text()
    assert all(f"`{option}`" in text for option in options_of(ZooKeeperBackend) - options_of(BaseBackend))
