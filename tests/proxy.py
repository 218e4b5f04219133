"""A TCP proxy on loopback that can swallow the server's next reply and cut the connection."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Forwards to ``port``; ``swallow()`` arms it to let one more request through and keep the reply to itself."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._armed = threading.Event()
        self.swallowed = threading.Event()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def swallow(self, text: bytes) -> None:
        """Swallow the reply to the next request that has this text in it."""
        self._text = text
        self.swallowed.clear()
        self._armed.set()

    def close(self) -> None:
        self._listener.close()
        for one in self._open:
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._open += [client, server]
                marked = threading.Event()
                threading.Thread(target=self._requests, args=(client, server, marked), daemon=True).start()
                threading.Thread(target=self._replies, args=(server, client, marked), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, marked: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if self._armed.is_set() and self._text in data:
                    self._armed.clear()
                    marked.set()
                server.sendall(data)
        _end(client, server)

    def _replies(self, server: socket.socket, client: socket.socket, marked: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if marked.is_set():
                    # The statement is done, and committed: its reply goes no further.
                    self.swallowed.set()
                    break
                client.sendall(data)
        _end(client, server)


def _end(*sockets: socket.socket) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
