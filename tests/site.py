"""A web server of a test site, in its own process."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys

from tests.servers import free_port, release_port

HOST = "127.0.0.1"


class Site:
    """A server process on a free port. It is ready when the port answers.

    ``command`` is that of a module of Python, with ``{port}`` in it. The log of the
    server is written into ``directory``.
    """

    def __init__(self, command, directory, **environment):
        self.port = free_port()
        self.log = directory / "server.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command.format(port=self.port).split()],
                env={
                    **os.environ,
                    "DJANGO_SETTINGS_MODULE": "tests.settings",
                    **environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def answers(self):
        assert self.process.poll() is None, self.log.read_text()
        with socket.socket() as probe:
            return probe.connect_ex((HOST, self.port)) == 0

    def request(self, address):
        """Send a request and return the connection, without reading the response."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=60)
        connection.request("GET", address)
        return connection

    def get(self, address):
        """Return the status and the text of the response."""
        connection = self.request(address)
        try:
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
            release_port(self.port)
