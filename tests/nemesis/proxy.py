"""A TCP proxy that can drop a reply, delay replies or cut connections."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable

from tests.proxy import connected


class Link:
    """One connection through the proxy."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.swallows = False
        self.marked = False
        self.late = 0.0
        self.delayed_until = 0.0

    def cut(self) -> None:
        for one in (self.client, self.server):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class Proxy:
    def __init__(
        self,
        target: int,
        is_late: Callable[[float], object],
        address: str = "127.0.0.1",
    ) -> None:
        self._target = target
        self._is_late = is_late
        self._listener = socket.create_server((address, 0))
        self.port: int = self._listener.getsockname()[1]
        self._links: list[Link] = []
        self._mutex = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def swallow_one(self, chance: random.Random) -> None:
        """Forward the next request of one connection, and cut it before the reply."""
        if (link := self._any(chance)) is not None:
            link.swallows = True

    def delay_some(self, chance: random.Random, seconds: float) -> None:
        """Delay the replies on about every second connection."""
        with self._mutex:
            for link in self._links:
                if chance.random() < 0.5:
                    link.delayed_until = time.monotonic() + seconds

    def late_some(self, chance: random.Random, seconds: float) -> None:
        """Delay the reply to the next request on about every second connection.

        ``is_late`` is called when that request is sent.
        """
        with self._mutex:
            for link in self._links:
                if chance.random() < 0.5:
                    link.late = seconds

    def cut_one(self, chance: random.Random) -> None:
        if (link := self._any(chance)) is not None:
            link.cut()

    def calm(self) -> None:
        with self._mutex:
            for link in self._links:
                link.swallows, link.late, link.delayed_until = False, 0.0, 0.0

    def close(self) -> None:
        self._listener.close()
        with self._mutex:
            for link in self._links:
                link.cut()

    def _any(self, chance: random.Random) -> Link | None:
        with self._mutex:
            return chance.choice(self._links) if self._links else None

    def _accept(self) -> None:
        for client, server in connected(self._listener, self._target):
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = Link(client, server)
            with self._mutex:
                self._links.append(link)
            for copy in (self._requests, self._replies):
                threading.Thread(target=copy, args=(link,), daemon=True).start()

    def _requests(self, link: Link) -> None:
        with contextlib.suppress(OSError):
            while data := link.client.recv(65536):
                if link.swallows:
                    link.marked = True
                if link.late:
                    self._is_late(link.late)
                    link.delayed_until, link.late = time.monotonic() + link.late, 0.0
                link.server.sendall(data)
        link.cut()

    def _replies(self, link: Link) -> None:
        with contextlib.suppress(OSError):
            while data := link.server.recv(65536):
                if link.marked:
                    # The request has been processed and committed. Its reply is
                    # dropped.
                    break
                while (left := link.delayed_until - time.monotonic()) > 0:
                    time.sleep(min(left, 0.05))
                link.client.sendall(data)
        link.cut()
        with self._mutex:
            self._links.remove(link)
        for one in (link.client, link.server):
            one.close()
