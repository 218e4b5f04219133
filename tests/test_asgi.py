"""Locks under uvicorn, an ASGI server in its own process.

The clients run in other processes.
"""

from __future__ import annotations

import pytest

from dlocks import db_lock
from tests import jobs
from tests.internals import LockClaim, ResourceLock
from tests.site import Site

pytestmark = [
    pytest.mark.engine("postgresql", "mariadb"),
    pytest.mark.django_db(transaction=True),
]


@pytest.fixture
def counter(tmp_path):
    file = tmp_path / "counter"
    file.write_text("0")
    return file


COMMAND = (
    "uvicorn tests.asgi:application --host 127.0.0.1 --port {port} --lifespan on"
    " --timeout-graceful-shutdown 1"
)


@pytest.fixture
def uvicorn(counter, transactional_db, until):
    options = {"DLOCKS_TEST_URLS": "tests.asgi", "DLOCKS_TEST_COUNTER": str(counter)}
    server = Site(COMMAND, counter.parent, **options)
    try:
        until(server.answers, 60)
        yield server
    finally:
        server.end()


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
