"""
How a process is told of its turn by another one on its machine: by a datagram, past the server.

A datagram wakes one thread. The server wakes all that listen whenever one of them is meant (PostgreSQL), or is asked
once more by who was woken (MariaDB), or is a file (SQLite). What is told is what a NOTIFY says, once it is committed.
Any user of the machine can send one; what counts is signed with the project's SECRET_KEY. One that is lost costs a
look, as a NOTIFY does.
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

from dlocks.forks import in_child
from dlocks.polling import ready

# Stands in a channel's name before what tells the server, ...
TAG = "@"
# ... and at the end of one on which nobody else tells.
ALONE = "-"

# How many messages one datagram has at most: the system keeps some ten datagrams for who does not read, so what is told
# at the same time is told together. How many bytes they are, and how many datagrams are read in one go.
TOGETHER = 500
LONGEST = 65_536
AT_ONCE = 100


@cache
def near() -> str:
    """
    Return the nine characters with which the channels of all begin that this process can tell; nothing where it cannot.

    They have the same SECRET_KEY and the same network namespace, whoever their user is: on Linux it has sockets that
    are names without files.
    """
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = Path("/proc/self/ns/net").stat().st_ino
        key = _key()
    except (OSError, ImproperlyConfigured):
        return ""
    return hashlib.blake2b(f"{machine} {namespace}".encode(), key=key).hexdigest()[:8] + "_"


@cache
def _key() -> bytes:
    return hashlib.sha256(b"dlocks.neighbours" + force_bytes(settings.SECRET_KEY)).digest()


def _signed(messages: Sequence[str]) -> bytes:
    text = "\n".join(messages)
    return f"{_signature(text)}\n{text}".encode()


def _signature(text: str) -> str:
    return hashlib.blake2b(text.encode(), key=_key(), digest_size=16).hexdigest()


@lru_cache
def tag(server: str) -> str:
    """Return what tells those who ask one server, where there may be several for the same table."""
    return hashlib.sha256(server.encode()).hexdigest()[:8] if server else ""


def is_near(channel: str, server: str) -> bool:
    """Tell whether a channel is that of a neighbour who asks the same server."""
    return bool(near()) and channel.startswith(near()) and channel.partition(TAG)[2].rstrip(ALONE) == tag(server)


class Door:
    """Where this process is told by its neighbours, on one channel."""

    def __init__(self, channel: str, bound: socket.socket) -> None:
        self.channel = channel
        # The bare number: who ends while it is open is not warned.
        self._number = bound.detach()
        self._identity = self._identified()
        _doors.add(self)

    @classmethod
    def open(cls, channel: str) -> Door | None:
        """Return the door of a channel; None where there is no telling."""
        if near():
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
                bound.setblocking(False)
                bound.bind(f"\0{near()}{channel}")
                return cls(channel, bound)
        return None

    def fileno(self) -> int:
        """Return its number; -1 when it is closed."""
        return self._number

    @property
    def is_open(self) -> bool:
        """Whether it is still there: who closes all there is, as daemons do, leaves its number to another file."""
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
        """Return what was told since the last time."""
        told: list[str] = []
        if not self.is_open:
            return told
        with suppress(OSError):
            for _ in range(AT_ONCE):
                signature, _, text = os.read(self._number, LONGEST).decode("ascii", "replace").partition("\n")
                if hmac.compare_digest(signature.encode(), _signature(text).encode()):
                    told += text.split("\n")
        return told

    def close(self) -> None:
        if self.is_open:
            number, self._number = self._number, -1
            with suppress(OSError):
                os.close(number)

    __del__ = close


def tell(channel: str, messages: Sequence[str]) -> bool:
    """Tell a neighbour, on its channel; return False where nobody is there, or has not listened for long."""
    try:
        for start in range(0, len(messages), TOGETHER):
            datagram = _signed(messages[start : start + TOGETHER])
            _sender().sendto(datagram, "\0" + channel.partition(TAG)[0])
        # Who is told is woken on this processor, as if this thread went to sleep now: it would wait until it does.
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


_doors: weakref.WeakSet[Door] = weakref.WeakSet()


def _forked() -> None:
    # They are the parent's: nobody should be told by them when that has ended.
    for one in list(_doors):
        one.close()


in_child(_forked)
