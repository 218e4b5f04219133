"""How a process learns of a grant: through PostgreSQL, or on the same host by datagram.

A notification only says "poll now". A lost one costs a little time, and a forged one a
poll. A datagram does not pass through the server, and wakes exactly one thread. Through
PostgreSQL a wake-up costs more, since it wakes all listeners. MySQL, MariaDB and SQLite
cannot notify.
"""

from __future__ import annotations

import atexit
import os
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from django.db import transaction
from django.db.utils import Error

from dlocks.backends.database.prepared import is_own_session
from dlocks.backends.database.session import Session
from dlocks.backends.notifiers import Notifier
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.polling import ready
from dlocks.runtime.process import each_in_child

# Seconds between two polls that datagrams can cause. Any user of the host can send
# them.
PAUSE = 0.0005
# Datagrams that are read at a time.
MOST_DATAGRAMS = 100


@cache
def this_host() -> str:
    """Return the nine characters with which channels on this host begin.

    They are equal for processes in the same network namespace, even for different
    users. Linux has sockets in this namespace whose names are not files. The result is
    empty if this process cannot send datagrams.
    """
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()
        machine += str(Path("/proc/self/ns/net").stat().st_ino)
    except OSError:
        return ""
    return sha256(machine.encode()).hexdigest()[:8] + "_"


def is_same_host(channel: str) -> bool:
    """Return whether the process that listens on a channel is on this host."""
    return bool(this_host()) and channel.startswith(this_host())


def send(channels: Collection[str]) -> None:
    """Notify the processes that listen on these channels, if they are on this host.

    Do nothing if a process does not listen, or has not read for a long time.
    """
    for channel in channels:
        if is_same_host(channel):
            with suppress(OSError):
                _sender().sendto(b"", f"\0{channel}")
            # The kernel places the receiver on this processor, as if this thread were
            # about to sleep. Without the yield, it would wait until this thread sleeps.
            os.sched_yield()


@cache
def _sender() -> socket.socket:
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.setblocking(False)
    atexit.register(sender.close)
    return sender


class Notifications:
    """The part that notifies granted claims.

    ``listen`` is the option of the backend.
    """

    def __init__(self, session: Session, *, listen: bool | None) -> None:
        self.session = session
        self.listen = listen
        self._socket: DatagramSocket | None = None

    def notify(self, channels: Collection[str]) -> None:
        """Let PostgreSQL notify processes on other hosts with the next commit."""
        if self.session.engine.vendor == "postgresql":
            for channel in channels:
                if not is_same_host(channel):
                    sql = "SELECT pg_notify(%(channel)s, '')"
                    self.session.execute(sql, {"channel": channel})

    def send(self, channels: Collection[str]) -> None:
        """Notify processes on this host, after the caller's transaction if one is open.

        Django logs the name of a callback that fails, and a partial() has none.
        """

        def notify() -> None:
            send(channels)

        if not self.session.connection.in_atomic_block:
            notify()
        elif any(map(is_same_host, channels)):
            transaction.on_commit(notify, using=self.session.database, robust=True)

    def listener(self, channel: str) -> Notifier | None:
        """Listen with this thread's connection, or return None to poll instead."""
        if self.listen is False:
            return None
        channel = this_host() + channel
        known = self._socket
        if known is None or known.channel != channel or not known.is_open:
            self._socket = DatagramSocket.open(channel)
        raw = None
        if self.session.engine.vendor == "postgresql":
            try:
                raw = self._listen(channel)
            except Error as error:
                raise LockBackendError(
                    f"Database {self.session.database!r} did not accept LISTEN:"
                    f" {type(error).__name__}: {error}"
                ) from error
        if raw is None and self._socket is None:
            return None
        complete = raw is not None or self.session.engine.one_writer
        return Listener(channel, self._socket, raw, complete=complete)

    def _listen(self, channel: str) -> Any:
        """Listen on PostgreSQL, and return psycopg's connection.

        Return None behind a pooler, where the next statement may run in another
        session, and with psycopg 2.
        """
        connection = self.session.connection
        connection.ensure_connection()
        raw = connection.connection
        if not hasattr(raw, "notifies") or not hasattr(raw, "add_notify_handler"):
            return None
        if not (self.listen or is_own_session(connection)):
            return None
        with connection.cursor() as cursor:
            cursor.execute(f"LISTEN {connection.ops.quote_name(channel)}")
        return raw


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

    def read(self) -> bool:
        """Read the datagrams, and return whether there were any.

        A flood of them must not keep the thread. The rest is read at the next time.
        """
        received = False
        with suppress(OSError):
            for _ in range(MOST_DATAGRAMS):
                if not self.is_open:
                    break
                os.read(self._number, 1)
                received = True
        return received

    def close(self) -> None:
        if self.is_open:
            number, self._number = self._number, -1
            with suppress(OSError):
                os.close(number)

    __del__ = close


# The sockets belong to the parent. Through a child's copies, they would still accept
# datagrams after the parent has ended.
_sockets = each_in_child(DatagramSocket.close)


class Listener(Notifier):
    """A listener on one channel, with the connection and the thread of the waiters."""

    def __init__(
        self,
        channel: str,
        datagrams: DatagramSocket | None,
        raw: Any,
        *,
        complete: bool,
    ) -> None:
        self.channel = channel
        self.is_complete = complete
        self._datagrams = datagrams
        self._raw = raw
        self._notified = False
        self._polled_at = 0.0
        if raw is not None:
            # Called for the notifications that arrive while a statement runs.
            raw.add_notify_handler(self._on_notify)

    def _on_notify(self, _: Any) -> None:
        self._notified = True

    def wait(self, timeout: float) -> bool:
        if not self._notified:
            self._wait(timeout)
        notified, self._notified = self._notified, False
        if notified:
            # A flood of datagrams must not be a flood of polls. Even a sleep of zero
            # seconds would delay a grant.
            if (pause := self._polled_at + PAUSE - clock.real_now()) > 0:
                time.sleep(min(PAUSE, pause))
            self._polled_at = clock.real_now()
        return notified

    def _wait(self, timeout: float) -> None:
        numbers = []
        if self._datagrams is not None and self._datagrams.is_open:
            numbers.append(self._datagrams.fileno())
        server = -1
        if self._raw is not None:
            try:
                server = self._raw.fileno()
            except Exception as error:
                raise _lost(error) from error
            numbers.append(server)
        if not numbers:
            time.sleep(timeout)
            return
        found = ready(*numbers, timeout=timeout)
        if self._datagrams is not None and self._datagrams.fileno() in found:
            self._notified = self._datagrams.read()
        if server in found:
            self._read()

    def _read(self) -> None:
        # psycopg warns of handlers beside ``notifies()``.
        self._raw.remove_notify_handler(self._on_notify)
        try:
            for _ in self._raw.notifies(timeout=0):
                self._notified = True
        except Exception as error:
            raise _lost(error) from error
        finally:
            self._raw.add_notify_handler(self._on_notify)

    def close(self) -> None:
        # A pool would hand the session to another user in its current state.
        if self._raw is not None:
            with suppress(Exception):
                self._raw.remove_notify_handler(self._on_notify)
                self._raw.execute("UNLISTEN *")


def _lost(error: Exception) -> LockBackendError:
    return LockBackendError(f"The connection for notifications was lost: {error}")
