"""Locks under uvicorn, an ASGI server in its own process.

The clients run in other processes.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys

import pytest

from dlocks import db_lock
from tests import jobs
from tests.internals import LockClaim, ResourceLock
from tests.servers import free_port, release_port

pytestmark = [
    pytest.mark.engine("postgresql", "mariadb"),
    pytest.mark.django_db(transaction=True),
]

HOST = "127.0.0.1"
START_SECONDS = 60.0


class Uvicorn:
    """A server process on a free port. It is ready when the port answers."""

    def __init__(self, counter):
        self.port = free_port()
        environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "DLOCKS_TEST_URLS": "tests.asgi",
            "DLOCKS_TEST_COUNTER": str(counter),
        }
        arguments = [
            "tests.asgi:application",
            "--host",
            HOST,
            "--port",
            str(self.port),
            "--lifespan",
            "on",
        ]
        self.log = counter.with_name("uvicorn.log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "uvicorn",
                    *arguments,
                    "--timeout-graceful-shutdown",
                    "1",
                ],
                env=environment,
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
        connection = self.request(address)
        try:
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        finally:
            release_port(self.port)


@pytest.fixture
def counter(tmp_path):
    file = tmp_path / "counter"
    file.write_text("0")
    return file


@pytest.fixture
def uvicorn(counter, transactional_db, until):
    server = Uvicorn(counter)
    try:
        until(server.answers, START_SECONDS)
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def is_held(key):
    return db_lock(key).locked()


def in_queue():
    return LockClaim.objects.count()


def test_concurrent_requests_lose_no_update(uvicorn, counter, workers, until):
    """Only the lock guards the counter of sync and async views, and no update is lost.

    Views that do not wait still answer while twenty requests wait for a key. A client
    that disconnects while it waits leaves the queue, and one that disconnects while its
    view holds the key releases it.

    A server that shuts down releases every hold, and no claim remains. This includes
    holds that belong to no request. No other caller has to wait until a lease expires.
    """
    crowd = workers(3)
    each = 6
    for worker in crowd:
        worker.start(
            jobs.visit, uvicorn.port, ["/sync/", "/async/", "/decorated/"], each
        )
    answers = [answer for worker in crowd for answer in worker.hear()]
    assert sorted(answers) == list(range(1, 3 * len(crowd) * each + 1))
    assert int(counter.read_text()) == len(answers)
    assert not in_queue()
    assert not is_held("counter")

    holder = uvicorn.request("/hold/")
    until(lambda: is_held("held"))
    waiting = [uvicorn.request("/wait/") for _ in range(20)]
    until(lambda: in_queue() == 20, 60)
    assert uvicorn.get("/beat/") == (200, "True")
    assert uvicorn.get("/busy/") == (409, "busy")
    for connection in waiting[:2]:
        connection.close()
    until(lambda: in_queue() == 18)
    holder.close()
    for connection in waiting[2:]:
        assert connection.getresponse().read() == b"it was free"
        connection.close()
    until(lambda: not in_queue())
    until(lambda: not is_held("held"))
    assert not ResourceLock.objects.exclude(waiters=0, shares=0).exists()

    uvicorn.get("/keep/")
    assert is_held("kept")
    holder = uvicorn.request("/hold/")
    until(lambda: is_held("held"))
    waiting = uvicorn.request("/wait/")
    until(lambda: in_queue() == 1)
    uvicorn.end()
    assert not in_queue()
    assert not is_held("held")
    assert not is_held("kept")
    assert not ResourceLock.objects.exclude(waiters=0, shares=0).exists()
    holder.close()
    waiting.close()


@pytest.mark.front
def test_an_elections_work_ends_before_its_lead_at_shutdown(uvicorn, counter):
    """The next leader starts the work when it no longer runs in this process.

    Threads of ``asyncio.to_thread()``, which outlast their requests, are no obstacle.
    """
    assert uvicorn.get("/lead/") == (200, "elected")
    uvicorn.get("/keep/")
    assert uvicorn.get("/fill/") == (200, "full")
    uvicorn.end()
    assert counter.read_text() == "True"
    assert not is_held("leader:scheduler")
    assert not is_held("kept")
