"""Notifications between processes on one host, sent as datagrams.

A datagram does not pass through the server, and wakes exactly one thread. Through
PostgreSQL a wake-up costs more, since it wakes all listeners whenever one of them is
notified. MySQL, MariaDB and SQLite cannot notify.

A datagram is sent after the commit. An empty one means that a claim of the process may
have been granted. Another one contains the grant, so the process need not read it from
the database. It is signed with the project's SECRET_KEY, because any user of the host
can send datagrams. Its lease counts from a time on the clock that all processes of a
host share. A lost or forged datagram costs one poll.
"""

from __future__ import annotations

import atexit
import hashlib
import hmac
import os
import socket
import time
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path

from django.conf import settings
from django.utils.encoding import force_bytes

from dlocks.backends.notifiers import Notifier
from dlocks.runtime import clock
from dlocks.runtime.polling import ready
from dlocks.runtime.process import each_in_child
from dlocks.values import Grant

# Precedes the tag of a server in the name of a channel.
TAG = "@"
# Maximum number of bytes in a datagram.
LONGEST = 256


@cache
def this_host() -> str:
    """Return the nine characters with which channels on this host begin.

    They are equal for processes in the same network namespace and on the same clock,
    even for different users. Linux has sockets in this namespace whose names are not
    files. The result is empty if this process cannot send datagrams.
    """
    try:
        machine = [Path("/proc/sys/kernel/random/boot_id").read_text()]
        machine.append(str(Path("/proc/self/ns/net").stat().st_ino))
        with suppress(FileNotFoundError):
            # Older kernels have one clock for all.
            machine.append(str(Path("/proc/self/ns/time").stat().st_ino))
    except OSError:
        return ""
    return hashlib.sha256(" ".join(machine).encode()).hexdigest()[:8] + "_"


@cache
def _key() -> bytes:
    return hashlib.sha256(
        b"dlocks.datagrams" + force_bytes(settings.SECRET_KEY)
    ).digest()


def _signature(text: bytes) -> bytes:
    return hashlib.blake2b(text, key=_key(), digest_size=16).hexdigest().encode()


@lru_cache
def tag(server: str) -> str:
    """Return the tag that identifies a server among several with the same table.

    It is empty if there can be only one.
    """
    return TAG + hashlib.sha256(server.encode()).hexdigest()[:8] if server else ""


def is_same_server(channel: str, server: str) -> bool:
    """Return whether the process that listens on a channel uses this server."""
    return channel.endswith(tag(server))


def is_same_host(channel: str) -> bool:
    """Return whether the process that listens on a channel is on this host."""
    return bool(this_host()) and channel.startswith(this_host())


class DatagramSocket:
    """The socket on which this process receives datagrams for one channel."""

    def __init__(self, channel: str, bound: socket.socket) -> None:
        self.channel = channel
        # Only the file descriptor is kept, so that a process that ends with an open
        # socket gets no ResourceWarning.
        self._number = bound.detach()
        self._identity = self._identified()
        _sockets.add(self)

    @classmethod
    def open(cls, channel: str) -> DatagramSocket | None:
        """Open the socket of a channel, or return None if that is not possible."""
        if is_same_host(channel):
            with (
                suppress(OSError),
                socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound,
            ):
                bound.setblocking(False)
                bound.bind(f"\0{channel}")
                return cls(channel, bound)
        return None

    def fileno(self) -> int:
        """Return the file descriptor, or -1 if it is closed."""
        return self._number

    @property
    def is_open(self) -> bool:
        """Return whether the socket is still open.

        A process that closes all its files, as daemons do, may reuse the descriptor for
        another file.
        """
        with suppress(OSError):
            if self._number >= 0 and self._identified() == self._identity:
                return True
        self._number = -1
        return False

    def _identified(self) -> tuple[int, int]:
        state = os.fstat(self._number)
        return state.st_dev, state.st_ino

    def read(self, notifier: Notifier) -> bool:
        """Read all datagrams, and return whether to poll.

        Call ``notifier.on_grant()`` for each grant.
        """
        must_poll = False
        with suppress(OSError):
            while True:
                if not self.is_open:
                    break
                datagram = os.read(self._number, LONGEST)
                must_poll |= not _deliver(datagram, notifier)
        return must_poll

    def close(self) -> None:
        if self.is_open:
            number, self._number = self._number, -1
            with suppress(OSError):
                os.close(number)

    __del__ = close


def _deliver(datagram: bytes, notifier: Notifier) -> bool:
    """Deliver the grant in a datagram, and return whether there was a valid one."""
    signature, _, text = datagram.partition(b" ")
    if not hmac.compare_digest(signature, _signature(text)):
        return False
    owner, token, lease, began = text.decode().split()
    if (sent := float(began)) > clock.now():
        # A test has changed the clock of one of the processes.
        return False
    notifier.on_grant(owner, Grant(int(token), float(lease)), sent)
    return True


class DatagramNotifier(Notifier):
    """A listener for the datagrams of processes on the same host."""

    def __init__(self, datagram_socket: DatagramSocket, *, is_complete: bool) -> None:
        self.is_complete = is_complete
        self._datagram_socket = datagram_socket

    def wait(self, timeout: float) -> bool:
        number = self._datagram_socket.fileno()
        if number < 0:
            time.sleep(timeout)
            return False
        return bool(ready(number, timeout=timeout)) and self._datagram_socket.read(self)


def grant_message(owner: str, grant: Grant, began: float) -> bytes:
    """Return the datagram of a grant whose lease began at ``began`` or later."""
    text = f"{owner} {grant.token} {grant.lease} {began}".encode()
    return _signature(text) + b" " + text


def send(channel: str, datagram: bytes = b"") -> None:
    """Send a datagram to the process that listens on a channel of this host.

    Do nothing if no process listens, or if it has not read for a long time.
    """
    with suppress(OSError):
        _sender().sendto(datagram, "\0" + channel.partition(TAG)[0])
        # The kernel places the receiver on this processor, as if this thread were about
        # to sleep. Without the yield, the receiver would wait until this thread sleeps.
        os.sched_yield()


@cache
def _sender() -> socket.socket:
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.setblocking(False)
    atexit.register(sender.close)
    return sender


# The sockets belong to the parent. Through a child's copies, they would still accept
# datagrams after the parent has ended.
_sockets = each_in_child(DatagramSocket.close)
