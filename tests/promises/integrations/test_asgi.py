"""Locks under uvicorn, an ASGI server in its own process.

The clients run in other processes.
"""

from __future__ import annotations

import http.client
import threading

import pytest

from dlocks import db_lock
from dlocks.models import LockClaim, ResourceLock
from tests.site import Site
from tests.volume import volume

pytestmark = [
    pytest.mark.engine("postgresql"),
    pytest.mark.django_db(transaction=True),
]


def visit(pipe, port, addresses, each):
    """Request each address repeatedly, with one client per address in parallel.

    Return the responses.
    """
    answers, mutex = [], threading.Lock()

    def client(address):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        for _ in range(each):
            connection.request("GET", address)
            answer = connection.getresponse().read().decode()
            with mutex:
                answers.append(int(answer))
        connection.close()

    clients = [threading.Thread(target=client, args=[address]) for address in addresses]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    return answers


COMMAND = (
    "uvicorn tests.asgi:application --host 127.0.0.1 --port {port} --lifespan on"
    " --timeout-graceful-shutdown 1"
)


def is_held(key):
    return db_lock(key).locked()


def in_queue():
    return LockClaim.objects.count()


def test_concurrent_requests_lose_no_update(workers, until, tmp_path):
    """Only the lock guards the counter of sync and async views, and no update is lost.

    Views that do not wait still answer while twenty requests wait for a key. A client
    that disconnects while it waits leaves the queue, and one that disconnects while its
    view holds the key releases it.

    A server that shuts down releases every hold, and no claim remains. This includes
    holds that belong to no request. No other caller has to wait until a lease expires.
    The work of an election ends before its lead, so that the next leader starts the
    work when it no longer runs in this process. Threads of ``asyncio.to_thread()``,
    which outlast their requests, are no obstacle.
    """
    counter = tmp_path / "counter"
    counter.write_text("0")
    options = {"DLOCKS_TEST_URLS": "tests.asgi", "DLOCKS_TEST_COUNTER": str(counter)}
    uvicorn = Site(COMMAND, tmp_path, **options)
    try:
        until(uvicorn.answers, 60)
        crowd = workers(3)
        each = volume(3)
        for worker in crowd:
            views = ["/sync/", "/async/", "/decorated/"]
            worker.start(visit, uvicorn.port, views, each)
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
        assert uvicorn.get("/lead/") == (200, "elected")
        assert uvicorn.get("/fill/") == (200, "full")
    finally:
        uvicorn.end()
    assert counter.read_text() == "True"
    assert not in_queue()
    assert not any(map(is_held, ("held", "kept", "leader:scheduler")))
    assert not ResourceLock.objects.exclude(waiters=0, shares=0).exists()
    holder.close()
    waiting.close()
