"""Datagrams between processes of one host."""

from __future__ import annotations

import gc
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from django.db import connection
from django.test import override_settings

from tests.internals import (
    LockClaim,
    Waiters,
    backends,
    notify,
    waiters_of,
)
from tests.promises.database.test_notifications import hand_over
from tests.timing import in_time

pytestmark = [pytest.mark.django_db(transaction=True)]


@pytest.fixture
def listener(channel):
    """Return a listener on a socket alone."""
    sockets = notify.DatagramSocket.open(channel)
    return notify.Listener(channel, sockets, None, complete=True)


@pytest.mark.driver
def test_only_a_process_on_this_host_gets_a_datagram(workers, in_queue, monkeypatch):
    """A lost datagram costs a poll: the releasing process may be killed just then."""
    near, far = workers(2)
    sent = []
    monkeypatch.setattr(notify, "_sender", lambda: sender)
    sender = SimpleNamespace(sendto=lambda *args: sent.append(args))
    in_time(hand_over(near, in_queue), 1.0)
    assert len(sent) == 1
    in_time(hand_over(far, in_queue), 1.0)
    assert len(sent) == 1


@pytest.mark.front
def test_a_full_socket_does_not_block_the_sender(listener):
    """The system buffers some datagrams for a process that does not read.

    It refuses the next one at once.
    """
    began = time.monotonic()
    for _ in range(1000):
        notify.send([listener.channel])
    in_time(time.monotonic() - began, 5)
    assert listener.wait(0)
    assert not listener.wait(0)


@pytest.mark.front
@pytest.mark.skipif(os.getuid() != 0, reason="only root can leave the namespace")
def test_the_same_host_means_the_same_network_namespace():
    """The datagrams of two containers on one machine do not reach each other."""
    module = "dlocks.backends.database.notify"
    code = f"from {module} import this_host; print(this_host())"
    other = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"DJANGO_SETTINGS_MODULE": "tests.settings"},
    ).stdout.strip()
    assert len(other) == len(notify.this_host())
    assert not notify.is_same_host(f"{other}dlocks_test_who")
    assert not notify.is_same_host("")


@pytest.mark.front
def test_without_proc_no_process_is_on_the_same_host(monkeypatch):
    """macOS and Windows have no /proc."""

    def missing(self):
        raise FileNotFoundError(self)

    this_host = notify.this_host.__wrapped__
    assert this_host() == notify.this_host()
    monkeypatch.setattr(Path, "read_text", missing)
    assert this_host() == ""
    monkeypatch.setattr(notify, "this_host", this_host)
    assert notify.DatagramSocket.open("dlocks_test_none") is None
    assert not notify.is_same_host("dlocks_test_none")


@pytest.mark.front
def test_a_fork_does_not_keep_the_socket_of_its_parent(listener):
    """Otherwise a parent that has ended would still seem to exist."""
    number = listener._datagrams.fileno()
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
    notify.send([listener.channel])
    assert listener.wait(0)


@pytest.mark.front
def test_a_removed_alias_has_no_socket(settings, until):
    """For example, a test with its own settings removes an alias."""

    def listen():
        backend = backends["default"]
        # As the waiting thread does. psycopg's connection refers to an open one, and
        # may itself live on in an idle thread of dlocks.
        backend.notifier(waiters_of(backend)._name).close()
        backend.close()
        return backend.notifications._socket.channel

    with override_settings(DLOCKS=dict(settings.DLOCKS)):
        channel = listen()
        assert f"@{channel}" in Path("/proc/net/unix").read_text()

    def is_gone():
        gc.collect()
        return f"@{channel}" not in Path("/proc/net/unix").read_text()

    until(is_gone)


@pytest.mark.driver
def test_a_closed_socket_is_replaced_by_the_next_notifier():
    """Daemons close it, which causes no busy loop.

    Its number may belong to another file by then.
    """
    backend = backends["default"]
    name = Waiters(backend)._name
    notifier = backend.notifier(name)
    assert len(notifier.channel) <= LockClaim._meta.get_field("channel").max_length
    os.close(backend.notifications._socket.fileno())
    notifier.wait(5)
    began = time.monotonic()
    assert not notifier.wait(0.05)
    assert time.monotonic() >= began + 0.05
    notifier.close()
    notifier = backend.notifier(name)
    notify.send([notifier.channel])
    assert notifier.wait(5)
    notifier.close()
    connection.close()
