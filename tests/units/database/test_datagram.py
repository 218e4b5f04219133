"""Datagrams between processes of one host."""

from __future__ import annotations

import gc
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from django.db import connection
from django.test import override_settings

from tests.internals import (
    Grant,
    LockClaim,
    Waiters,
    backends,
    clock,
    datagram,
    notifications,
    waiters_of,
)
from tests.promises.database.test_notifications import hand_over
from tests.timing import in_time

pytestmark = [pytest.mark.django_db(transaction=True)]


@pytest.mark.driver
def test_only_a_process_on_this_host_gets_a_datagram(workers, in_queue, monkeypatch):
    """A lost datagram costs a poll: the releasing process may be killed just then."""
    near, far = workers(2)
    sent = []
    monkeypatch.setattr(notifications, "send", lambda *args: sent.append(args))
    in_time(hand_over(near, in_queue), 1.0)
    assert len(sent) == 1
    in_time(hand_over(far, in_queue), 1.0)
    assert len(sent) == 1


class Received(datagram.DatagramNotifier):
    """A notifier that records the grants that it receives."""

    def __init__(self, channel):
        self.socket = datagram.DatagramSocket.open(channel)
        super().__init__(self.socket, is_complete=True)
        self.grants = []

    def on_grant(self, owner, grant, sent):
        self.grants.append((owner, grant, sent))


@pytest.mark.front
def test_a_datagram_contains_the_grant(channel):
    """A grant from another clock costs a poll, as it would begin in the future."""
    receiver, began = Received(channel), clock.now()
    for moment, must_poll in ((began, False), (began + 60, True)):
        message = datagram.grant_message("owner", Grant(17, 1.5), moment)
        datagram.send(channel, message)
        assert bool(receiver.wait(5)) is must_poll
        assert receiver.grants == [("owner", Grant(17, 1.5), began)]


@pytest.mark.front
def test_a_full_socket_does_not_block_the_sender(channel):
    """The system buffers some datagrams for a process that does not read.

    It refuses the next one at once.
    """
    receiver, began = Received(channel), time.monotonic()
    for _ in range(1000):
        datagram.send(channel)
    in_time(time.monotonic() - began, 5)
    assert receiver.wait(0)
    assert not receiver.wait(0)


@pytest.mark.front
def test_the_same_host_means_the_same_network_namespace():
    """A grant goes only to a process on the same database server.

    A commit on one node of a cluster may not be visible on another yet.
    """
    name = datagram.this_host() + "dlocks_test_who"
    channel = name + datagram.tag("db1 3306 /data")
    assert datagram.is_same_host(name)
    assert datagram.is_same_host(channel)
    for other in "00000000_dlocks_test_who", "dlocks_test_who", "":
        assert not datagram.is_same_host(other)
    assert datagram.is_same_server(channel, "db1 3306 /data")
    assert not datagram.is_same_server(channel, "db2 3306 /data")
    assert datagram.is_same_server(name, ""), "PostgreSQL has one server"
    if os.getuid() == 0:
        module = "dlocks.backends.database.notify.datagram"
        code = f"from {module} import this_host; print(this_host())"
        other = subprocess.run(
            ["unshare", "--net", sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"DJANGO_SETTINGS_MODULE": "tests.settings"},
        ).stdout.strip()
        assert len(other) == len(datagram.this_host())
        assert other != datagram.this_host()


@pytest.mark.front
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
    assert not datagram.is_same_host("dlocks_test_none")


@pytest.mark.front
def test_a_fork_does_not_keep_the_socket_of_its_parent(channel):
    """Otherwise a parent that has ended would still seem to exist."""
    receiver = Received(channel)
    number = receiver.socket.fileno()
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
    datagram.send(channel)
    assert receiver.wait(0)


@pytest.mark.front
def test_a_removed_alias_has_no_socket(settings, until):
    """For example, a test with its own settings removes an alias."""

    def listen():
        backend = backends["default"]
        backend.notifier(waiters_of(backend)._name)
        backend.close()
        return backend._datagram_socket.channel

    with override_settings(DLOCKS=dict(settings.DLOCKS)):
        channel = listen()
        assert f"@{channel}" in Path("/proc/net/unix").read_text()

    def is_gone():
        gc.collect()
        return f"@{channel}" not in Path("/proc/net/unix").read_text()

    until(is_gone)


def test_a_closed_socket_is_replaced_by_the_next_notifier():
    """Daemons close it, which causes no busy loop.

    Its number may belong to another file by then.
    """
    backend = backends["default"]
    name = Waiters(backend)._name
    notifier = backend.notifier(name)
    assert len(notifier.channel) <= LockClaim._meta.get_field("channel").max_length
    os.close(backend._datagram_socket.fileno())
    notifier.wait(5)
    began = time.monotonic()
    assert not notifier.wait(0.05)
    assert time.monotonic() >= began + 0.05
    notifier.close()
    notifier = backend.notifier(name)
    datagram.send(notifier.channel)
    assert notifier.wait(5)
    notifier.close()
    connection.close()
