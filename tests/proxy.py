"""A TCP proxy that can drop replies, delay traffic and cut connections.

Dropping a reply also cuts the connection.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable


class Link:
    """One connection through the proxy."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        self.threads: list[threading.Thread] = []
        # Whether the reply to the next request, or the next reply, is dropped.
        self.swallows = self.marked = False
        # Seconds by which the reply to the next request is delayed, and the time until
        # which replies are delayed.
        self.late = self.delayed_until = 0.0

    def cut(self) -> None:
        for one in (self.client, self.server):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class Proxy:
    """A proxy in front of ``port``.

    ``swallow()`` makes it forward one more request and drop the reply. ``is_late`` is
    called with the seconds when a request is sent whose reply will be late.
    """

    def __init__(
        self,
        port: int,
        address: str = "127.0.0.1",
        is_late: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        self._target, self._is_late = port, is_late
        self._listener = socket.create_server((address, 0))
        self.port: int = self._listener.getsockname()[1]
        self._armed = threading.Event()
        self._until: threading.Event | None = None
        self.swallowed = threading.Event()
        # While set, the server's replies are delayed. They are forwarded afterwards.
        self.late = threading.Event()
        # While set, nothing passes in either direction and no error is raised.
        # Connections that were used meanwhile are closed afterwards.
        self.cut = threading.Event()
        self._closed = False
        self._links: list[Link] = []
        self._mutex = threading.Lock()
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def swallow(
        self, text: bytes, until: threading.Event | None = None, times: int = 1
    ) -> None:
        """Drop the reply to the next requests that contain this text.

        The sender receives nothing until the event ``until`` is set.
        """
        self._text, self._times = text, times
        self._until = until
        self.swallowed.clear()
        self._armed.set()

    def links(self) -> list[Link]:
        with self._mutex:
            return list(self._links)

    def some(self, chance: random.Random) -> list[Link]:
        """Return about every second connection."""
        return [link for link in self.links() if chance.random() < 0.5]

    def one(self, chance: random.Random) -> list[Link]:
        """Return any connection, if there is one."""
        links = self.links()
        return [chance.choice(links)] if links else []

    def disconnect(self) -> None:
        """End all connections. The server completes what it executes."""
        for link in self.links():
            link.cut()

    def close(self) -> None:
        self._closed = True
        # close() would not wake up a thread in accept().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(10)
        self._listener.close()
        for link in self.links():
            link.cut()
            for thread in link.threads:
                thread.join(10)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    # The server is not running at the moment.
                    client.close()
                    continue
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link = Link(client, server)
                link.threads = [
                    threading.Thread(target=copy, args=(link,), daemon=True)
                    for copy in (self._requests, self._replies)
                ]
                with self._mutex:
                    self._links.append(link)
                for thread in link.threads:
                    thread.start()

    def _requests(self, link: Link) -> None:
        with contextlib.suppress(OSError):
            while data := link.client.recv(65536):
                if self._armed.is_set() and self._text in data:
                    self._times -= 1
                    if self._times <= 0:
                        self._armed.clear()
                    link.marked = True
                link.marked |= link.swallows
                if link.late:
                    self._is_late(link.late)
                    link.delayed_until, link.late = time.monotonic() + link.late, 0.0
                if self._withheld():
                    break
                link.server.sendall(data)
        link.cut()

    def _replies(self, link: Link) -> None:
        with contextlib.suppress(OSError):
            while data := link.server.recv(65536):
                if link.marked:
                    # The statement has been run and committed. Its reply is dropped.
                    self.swallowed.set()
                    if self._until is not None:
                        self._until.wait(60)
                    break
                while (
                    self.late.is_set() or link.delayed_until > time.monotonic()
                ) and not self._closed:
                    time.sleep(0.01)
                if self._withheld():
                    break
                link.client.sendall(data)
        link.cut()
        with self._mutex:
            self._links.remove(link)
        # The other thread ends as soon as it notices.
        link.threads[0].join(10)
        for end in (link.client, link.server):
            end.close()

    def _withheld(self) -> bool:
        """Wait for the end of a cut, and return whether there was one."""
        was_cut = self.cut.is_set()
        while self.cut.is_set() and not self._closed:
            time.sleep(0.01)
        return was_cut
