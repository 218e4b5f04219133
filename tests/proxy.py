"""A TCP proxy on loopback that can drop a reply or hold back all traffic.

Dropping a reply also cuts the connection.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator


class Proxy:
    """A proxy in front of ``port``.

    ``swallow()`` makes it forward one more request and drop the reply.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._armed = threading.Event()
        self.swallowed = threading.Event()
        # While set, the server's replies are delayed. They are forwarded afterwards.
        self.late = threading.Event()
        # While set, nothing passes in either direction and no error is raised.
        # Connections that were used meanwhile are closed afterwards.
        self.cut = threading.Event()
        self._closed = False
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
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

    def disconnect(self) -> None:
        """End all connections. The server completes what it executes."""
        _end(*self._open)

    def close(self) -> None:
        self._closed = True
        # close() would not wake up a thread in accept().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(10)
        _end(*self._open)
        for thread in self._threads:
            thread.join(10)
        for one in [self._listener, *self._open]:
            one.close()

    def _accept(self) -> None:
        for client, server in connected(self._listener, self._target):
            self._open += [client, server]
            marked = threading.Event()
            for copy, sockets in (
                (self._requests, (client, server)),
                (self._replies, (server, client)),
            ):
                self._threads.append(
                    threading.Thread(target=copy, args=(*sockets, marked), daemon=True)
                )
                self._threads[-1].start()

    def _requests(
        self, client: socket.socket, server: socket.socket, marked: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if self._armed.is_set() and self._text in data:
                    self._times -= 1
                    if self._times <= 0:
                        self._armed.clear()
                    marked.set()
                if self._withheld():
                    break
                server.sendall(data)
        _end(client, server)

    def _replies(
        self, server: socket.socket, client: socket.socket, marked: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if marked.is_set():
                    # The statement has been run and committed. Its reply is dropped.
                    self.swallowed.set()
                    if self._until is not None:
                        self._until.wait(60)
                    break
                while self.late.is_set() and not self._closed:
                    time.sleep(0.01)
                if self._withheld():
                    break
                client.sendall(data)
        _end(client, server)

    def _withheld(self) -> bool:
        """Wait for the end of a cut, and return whether there was one."""
        was_cut = self.cut.is_set()
        while self.cut.is_set() and not self._closed:
            time.sleep(0.01)
        return was_cut


def _end(*sockets: socket.socket) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def connected(
    listener: socket.socket, target: int
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield each client together with a connection to its server, until the end."""
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            try:
                server = socket.create_connection(("127.0.0.1", target))
            except OSError:
                # The server is not running at the moment.
                client.close()
                continue
            yield client, server
