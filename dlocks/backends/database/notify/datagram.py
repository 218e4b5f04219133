"""Notifications between processes on one host, sent as datagrams.

A datagram does not pass through the server, and wakes exactly one thread. Through the
server a wake-up costs more. PostgreSQL wakes all listeners whenever one of them is
notified. MariaDB receives another query from the process that was woken. SQLite is a
file and cannot notify.

A datagram has the same content as a NOTIFY, and is sent after the commit. Any user of
the host can send one, so it must be signed with the project's SECRET_KEY. A lost
datagram costs one poll, like a lost NOTIFY.
"""

from __future__ import annotations

import atexit
import hashlib
import hmac
import os
import socket
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.encoding import force_bytes

from dlocks.runtime.polling import ready
from dlocks.runtime.process import in_child

# Precedes the tag of the server in the name of a channel.
TAG = "@"
# The end of a channel that can only be notified by datagrams.
ALONE = "-"

# Maximum number of messages per datagram, of bytes per datagram, and of datagrams per
# read. The system queues about ten datagrams for a process that does not read.
# Simultaneous messages are therefore sent in one datagram.
TOGETHER = 500
LONGEST = 65_536
MESSAGES_PER_DATAGRAM = 100


@cache
def this_host() -> str:
    """Return the nine characters with which channels on this host begin.

    They are equal for processes with the same SECRET_KEY and the same network
    namespace, even for different users. Linux has sockets in this namespace whose names
    are not files. The result is empty if this process cannot send datagrams.
    """
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = Path("/proc/self/ns/net").stat().st_ino
        key = _key()
    except (OSError, ImproperlyConfigured):
        return ""
    return (
        hashlib.blake2b(f"{machine} {namespace}".encode(), key=key).hexdigest()[:8]
        + "_"
    )


@cache
def _key() -> bytes:
    return hashlib.sha256(
        b"dlocks.datagrams" + force_bytes(settings.SECRET_KEY)
    ).digest()


def _signed(messages: Sequence[str]) -> bytes:
    text = "\n".join(messages)
    return f"{_signature(text)}\n{text}".encode()


def _signature(text: str) -> str:
    return hashlib.blake2b(text.encode(), key=_key(), digest_size=16).hexdigest()


@lru_cache
def tag(server: str) -> str:
    """Return the tag that identifies a server among several with the same table.

    It is empty if there can be only one.
    """
    return hashlib.sha256(server.encode()).hexdigest()[:8] if server else ""


def is_same_host(channel: str, server: str) -> bool:
    """Return whether a channel is on the same host and uses the same server."""
    return (
        bool(this_host())
        and channel.startswith(this_host())
        and channel.partition(TAG)[2].rstrip(ALONE) == tag(server)
    )


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
        if this_host():
            with (
                suppress(OSError),
                socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound,
            ):
                bound.setblocking(False)
                bound.bind(f"\0{this_host()}{channel}")
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

    def wait(self, timeout: float) -> list[str]:
        if self._number < 0:
            time.sleep(timeout)
            return []
        return self.read() if ready(self._number, timeout=timeout) else []

    def read(self) -> list[str]:
        """Return the messages that have arrived since the last call."""
        messages: list[str] = []
        if not self.is_open:
            return messages
        with suppress(OSError):
            for _ in range(MESSAGES_PER_DATAGRAM):
                signature, _, text = (
                    os.read(self._number, LONGEST)
                    .decode("ascii", "replace")
                    .partition("\n")
                )
                if hmac.compare_digest(signature.encode(), _signature(text).encode()):
                    messages += text.split("\n")
        return messages

    def close(self) -> None:
        if self.is_open:
            number, self._number = self._number, -1
            with suppress(OSError):
                os.close(number)

    __del__ = close


def send(channel: str, messages: Sequence[str]) -> bool:
    """Send messages to a process on the same host, on its channel.

    Return False if no process listens, or if it has not read for a long time.
    """
    try:
        for start in range(0, len(messages), TOGETHER):
            datagram = _signed(messages[start : start + TOGETHER])
            _sender().sendto(datagram, "\0" + channel.partition(TAG)[0])
        # The kernel places the receiver on this processor, as if this thread were about
        # to sleep. Without the yield, the receiver would wait until this thread sleeps.
        os.sched_yield()
    except OSError:
        return False
    return True


@cache
def _sender() -> socket.socket:
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.setblocking(False)
    atexit.register(sender.close)
    return sender


_sockets: weakref.WeakSet[DatagramSocket] = weakref.WeakSet()


def _forked() -> None:
    # The sockets belong to the parent. Through a child's copies, they would still
    # accept datagrams after the parent has ended.
    for one in list(_sockets):
        one.close()


in_child(_forked)
