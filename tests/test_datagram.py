"""Direct notification between processes of one host.

It bypasses the server and only saves time.
"""

from __future__ import annotations

import asyncio
import gc
import os
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from asgiref.sync import sync_to_async
from django.db import connection
from django.test import override_settings

from dlocks import db_lock
from tests import jobs
from tests.internals import (
    KeyQueue,
    Waiters,
    backends,
    datagram,
    notifications,
    waiters_of,
)
from tests.timing import in_time, seldom

pytestmark = [
    pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"]),
    pytest.mark.timeout(120),
]

OWNER = "0123456789abcdef" * 2


@pytest.fixture
def nearby(doomed):
    """Return a function that starts a process on this host or on another one.

    The process has not done anything yet.
    """
    return doomed


@pytest.fixture
def told(monkeypatch):
    """Return the messages sent to local processes and those sent by the server."""
    send, wake = notifications.send, KeyQueue._wake
    told = {"datagram": [], "server": []}

    def telling(channel, messages):
        if there := send(channel, messages):
            told["datagram"] += messages
        return there

    def waking(self, channel, messages, server):
        before = len(told["datagram"])
        wake(self, channel, messages, server)
        if len(told["datagram"]) == before and connection.vendor != "sqlite":
            told["server"] += messages

    monkeypatch.setattr(notifications, "send", telling)
    monkeypatch.setattr(KeyQueue, "_wake", waking)
    return told


def hand_over(to, in_queue, key="stock:7", **policy):
    """Hand the key to a waiting process and return the seconds this takes."""
    with db_lock(key) as hold:
        to.start(jobs.wait_quietly, key, timeout=20, **policy)
        in_queue(1, key)
    released = time.monotonic()
    granted, token = to.hear()
    assert token > hold.token
    return granted - released


def test_a_local_process_is_notified_without_the_server(nearby, in_queue, told):
    in_time(hand_over(nearby(), in_queue), 0.2)
    assert len(told["datagram"]) == 1
    assert told["server"] == []


def test_a_process_on_another_host_is_notified_by_the_server(nearby, in_queue, told):
    hand_over(nearby(far=True), in_queue)
    assert told["datagram"] == []
    assert len(told["server"]) == (connection.vendor == "mysql"), (
        "NOTIFY is part of the statement; SQLite has no server"
    )


@pytest.mark.engine("postgresql", "mariadb", "mysql")
def test_the_server_notifies_if_a_local_message_fails(
    nearby, in_queue, told, monkeypatch
):
    """Its socket is full, as that of a stopped process would be."""
    monkeypatch.setattr(
        datagram, "_sender", lambda: (_ for _ in ()).throw(BlockingIOError())
    )
    in_time(hand_over(nearby(), in_queue), 1.0)
    assert told["datagram"] == []
    assert len(told["server"]) == 1


def test_a_lost_local_message_costs_a_poll(nearby, in_queue, monkeypatch):
    """The releasing process may be killed just then."""
    monkeypatch.setattr(notifications, "send", lambda channel, messages: True)
    in_time(hand_over(nearby(), in_queue), 1.0)


def test_a_local_message_to_a_dead_process_is_harmless(doomed, in_queue, until):
    """Its claim is skipped in time, and the key is free again."""
    victim = doomed()
    with db_lock("stock:7"):
        victim.start(jobs.wait_quietly, "stock:7", timeout=20)
        in_queue(1)
        victim.kill()
    with db_lock("stock:7", timeout=10) as hold:
        in_time(hold.waited, 4.0)


async def test_coroutines_are_notified_locally(nearby):
    """One event loop of the process waits for three keys."""
    giver = nearby()
    keys = [f"stock:{number}" for number in range(3)]
    for key in keys:
        assert isinstance(await asyncio.to_thread(giver.call, jobs.acquire, key), int)

    async def wait(key):
        async with db_lock(key, timeout=20):
            return time.monotonic()

    waiting = [asyncio.create_task(wait(key)) for key in keys]
    while await sync_to_async(
        lambda: sum(map(backends["default"].waiting, keys))
    )() < len(keys):
        await asyncio.sleep(0.01)
    released = time.monotonic()
    await asyncio.to_thread(giver.call, jobs.release_all)
    for granted in await asyncio.gather(*waiting):
        in_time(granted - released, 0.2)


def test_threads_of_one_process_are_each_notified_locally(nearby, in_queue, threads):
    giver = nearby()
    keys = [f"stock:{number}" for number in range(4)]
    for key in keys:
        giver.call(jobs.acquire, key)

    def wait(key):
        hold = db_lock(key, timeout=20).acquire()
        granted = time.monotonic()
        hold.release()
        return granted

    waiting = [threads(lambda key=key: wait(key)) for key in keys]
    for key in keys:
        in_queue(1, key)
    released = time.monotonic()
    giver.call(jobs.release_all)
    for one in waiting:
        one.join(30)
        in_time(one.results[0] - released, 0.2)


@pytest.mark.engine("sqlite")
def test_on_sqlite_local_processes_do_not_poll(workers):
    """Four processes take thirty turns each, while three wait at any time.

    There are fewer polls than turns.
    """
    crowd, turns = workers(8)[::2], 30
    for worker in crowd:
        worker.start(jobs.take_turns, "stock:7", times=turns)
    looks = sum(worker.hear() for worker in crowd)
    seldom(looks, len(crowd) * turns)


@pytest.mark.engine("sqlite")
def test_on_sqlite_a_process_without_messages_polls(workers):
    """Two processes that cannot notify each other, for example in containers.

    After the first turns, no handover takes long.
    """
    crowd = [worker for worker in workers(4) if worker.far]
    waits = []
    for number in range(8):
        holder, waiting = crowd[number % 2], crowd[1 - number % 2]
        holder.call(jobs.acquire, "stock:7")
        waiting.start(jobs.wait_quietly, "stock:7", timeout=20)
        while not backends["default"].waiting("stock:7"):
            time.sleep(0.005)
        released = time.monotonic()
        holder.call(jobs.release_all)
        waits.append(waiting.hear()[0] - released)
    in_time(max(waits), 1.0)
    in_time(sorted(waits)[3], 0.12)


# Messages from any program on the host.


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\n",
        b"free stock:7",
        b"\xff\xfe" * 100,
        b"x" * 10_000,
        OWNER.encode(),
        f"{OWNER} 17 18".encode(),
        f"{'0' * 32}\n{OWNER} 17 18".encode(),
        f"{'é' * 16}\n{OWNER} 17 18".encode(),
    ],
)
def test_unsigned_messages_are_ignored(message, channel):
    """A sender that has read the table still lacks the SECRET_KEY."""
    door = datagram.DatagramSocket.open(channel)
    channel = datagram.this_host() + channel
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(message, f"\0{channel}")
    assert datagram.send(channel, [f"{OWNER} 17 18", OWNER])
    assert door.wait(5) == [f"{OWNER} 17 18", OWNER]


def test_a_full_socket_does_not_block_the_sender(channel):
    """The system buffers some messages for a process that does not read.

    It refuses the next message at once.
    """
    door = datagram.DatagramSocket.open(channel)
    channel = datagram.this_host() + channel
    began = time.monotonic()
    while datagram.send(channel, [OWNER]):
        assert time.monotonic() < began + 10
    assert not datagram.send(channel, [OWNER])
    assert OWNER in door.read()


def test_a_thousand_messages_fit_into_one_send(channel):
    """For example, a thousand waiters are notified of their shared holds."""
    door = datagram.DatagramSocket.open(channel)
    messages = [f"{number:032x} {2**62} {2**62}" for number in range(1000)]
    assert datagram.send(datagram.this_host() + channel, messages)
    assert door.wait(5) == messages


# Detection of the same host.


def test_messages_go_only_to_the_same_host_and_server():
    mine = datagram.this_host() + "dlocks_test_who"
    one, another = "db1 3306 /data", "db2 3306 /data"
    assert datagram.is_same_host(f"{mine}@", "")
    assert datagram.is_same_host(f"{mine}@-", "")
    assert datagram.is_same_host(f"{mine}@{datagram.tag(one)}", one)
    assert datagram.is_same_host(f"{mine}@{datagram.tag(one)}-", one)
    assert not datagram.is_same_host(f"{mine}@{datagram.tag(one)}", another)
    assert not datagram.is_same_host(f"{mine}@{datagram.tag(one)}", "")
    assert not datagram.is_same_host(f"{mine}@", one)
    assert not datagram.is_same_host("00000000_dlocks_test_who@", "")
    assert not datagram.is_same_host("dlocks_test_who", "")
    assert not datagram.is_same_host("", "")
    assert not datagram.send(f"{mine}@", [OWNER]), "there is no receiver"


def test_a_channel_name_fits_its_column():
    from tests.internals import LockClaim

    listener = backends["default"].notifier(Waiters(backends["default"])._name)
    assert listener.channel.startswith(datagram.this_host())
    assert len(listener.channel) <= LockClaim._meta.get_field("channel").max_length
    connection.close()


def test_the_same_host_means_the_same_network_namespace():
    module = "dlocks.backends.database.notify.datagram"
    code = f"from {module} import this_host; print(this_host())"

    def near_of(*before):
        command = [*before, sys.executable, "-c", code]
        environment = os.environ | {"DJANGO_SETTINGS_MODULE": "tests.settings"}
        process = subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
        )
        return process.stdout.strip()

    assert near_of() == datagram.this_host()
    if os.getuid() == 0:
        in_other_namespace = near_of("unshare", "--net")
        assert len(in_other_namespace) == len(datagram.this_host())
        assert in_other_namespace != datagram.this_host()


def test_without_proc_no_process_is_on_the_same_host(monkeypatch):
    """macOS and Windows have no /proc."""

    def missing(self):
        raise FileNotFoundError(self)

    this_host = datagram.this_host.__wrapped__
    assert this_host() == datagram.this_host()
    monkeypatch.setattr(Path, "read_text", missing)
    assert this_host() == ""
    monkeypatch.setattr(datagram, "this_host", this_host)
    assert datagram.DatagramSocket.open("dlocks_test_none") is None
    assert not datagram.is_same_host("dlocks_test_none", "")


def test_a_fork_does_not_keep_the_socket_of_its_parent(channel):
    """Otherwise a parent that has ended would still seem to exist."""
    door = datagram.DatagramSocket.open(channel)
    number = door.fileno()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.fstat(number)
            os.write(writing, b"open")
        except OSError:
            os.write(writing, b"closed")
        finally:
            os._exit(0)
    os.close(writing)
    assert select.select([reading], [], [], 30)[0]
    assert os.read(reading, 100) == b"closed"
    os.close(reading)
    os.waitpid(pid, 0)
    assert datagram.send(datagram.this_host() + channel, [OWNER])
    assert door.wait(5) == [OWNER]


def test_a_removed_alias_has_no_socket(settings):
    """For example, a test with its own settings removes an alias."""

    def listen():
        backend = backends["default"]
        backend.notifier(waiters_of(backend)._name)
        backend.close()
        return backend._datagram_socket.channel

    with override_settings(DLOCKS=dict(settings.DLOCKS)):
        channel = datagram.this_host() + listen()
        assert datagram.send(channel, [OWNER])
    gc.collect()
    assert not datagram.send(channel, [OWNER])


def test_a_closed_file_descriptor_causes_no_busy_loop(channel):
    """Daemons do this, and the number may belong to another file by then."""
    door = datagram.DatagramSocket.open(channel)
    os.close(door.fileno())
    assert door.wait(5) == []
    began = time.monotonic()
    assert door.wait(0.05) == []
    assert time.monotonic() >= began + 0.05


def test_a_closed_socket_is_replaced_by_the_next_listener(channel):
    backend = backends["default"]
    listener = backend.notifier(channel)
    hears = listener.beside or listener
    os.close(backend._datagram_socket.fileno())
    hears.wait(5, ())
    began = time.monotonic()
    assert list(hears.wait(0.05, ())) == []
    assert time.monotonic() >= began + 0.05
    listener.close()
    hears = (listener := backend.notifier(channel)).beside or listener
    assert datagram.send(listener.channel, [OWNER])
    assert [message.owner for message in hears.wait(5, ())] == [OWNER]
    listener.close()


def test_local_messages_arrive_without_select_poll(
    nearby, in_queue, threads, until, monkeypatch
):
    """This is so on Windows and under Eventlet."""
    giver = nearby()
    giver.call(jobs.acquire, "stock:7")
    monkeypatch.delattr(select, "poll")

    def wait():
        with db_lock("stock:7", timeout=20):
            return time.monotonic()

    waiter = threads(wait)
    in_queue(1)
    released = time.monotonic()
    giver.call(jobs.release_all)
    in_time(until(lambda: waiter.results)[0] - released, 0.2)
    # This is often enough for statements to be prepared.
    for _ in range(20):
        with db_lock("stock:7"):
            pass


def test_a_waiter_polls_if_no_thread_can_be_started(nearby, in_queue, monkeypatch):
    start = threading.Thread.start

    def refuse(self):
        if self.name == "dlocks-hearing":
            raise RuntimeError("can't start new thread")
        start(self)

    room = Waiters(backends["default"])
    monkeypatch.setattr(backends["default"], "waiters", room)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    giver = nearby()
    giver.call(jobs.acquire, "stock:7")
    release = threading.Timer(0.5, giver.call, [jobs.release_all])
    release.start()
    with db_lock("stock:7", timeout=20):
        pass
    release.join()


def test_with_listen_false_there_is_no_listener(channel):
    backend = backends["default"]
    assert type(backend)("default", listen=False).notifier(channel) is None
