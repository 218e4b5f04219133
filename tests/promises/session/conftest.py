"""What the tests of session locks need to see and to break on the server."""

import gc

import pytest
from django.db import connection

from dlocks.backends.session import SessionBackend
from tests import jobs
from tests.promises.session.server import clients, lock
from tests.proxy import Proxy
from tests.settings import PORT


@pytest.fixture(autouse=True)
def sessions_closed(settings):
    """Close the lock sessions of this process before and after each test."""
    settings.DLOCKS = dict(settings.DLOCKS)
    gc.collect()
    yield
    gc.collect()


@pytest.fixture
def observer(transactional_db):
    """Another backend on the same server, whose session began before the test."""
    backend = SessionBackend("observer", linger=60)
    backend.waiting("stock:7")
    yield backend
    # PostgreSQL waits 5 s for the last sessions before it drops a database.
    for session in backend.sessions.all():
        backend.sessions.close_if_idle(session, 0.0)


@pytest.fixture
def sessions(observer):
    """Return a function that returns the ids of the sessions that began in the test."""
    before = clients()
    return lambda: clients() - before


@pytest.fixture
def proxy(observer, monkeypatch):
    """Return a proxy between the lock sessions of this process and the server.

    The test's own connection is direct.
    """
    connection.ensure_connection()
    proxy = Proxy(int(PORT))
    monkeypatch.setitem(connection.settings_dict, "PORT", str(proxy.port))
    yield proxy
    proxy.close()


@pytest.fixture
def in_queue(observer, until):
    """Return a function that waits until a key has a number of waiters."""

    def wait(number, key="stock:7"):
        until(lambda: observer.waiting(key) == number)

    return wait


@pytest.fixture
def elsewhere(workers):
    """Another process, whose lock sessions do not pass the proxy."""
    return workers(1)[0]


@pytest.fixture
def held_elsewhere(elsewhere):
    """Return a function that lets another process hold a key.

    It returns a function that lets the process release the key.
    """

    def hold(key="stock:7"):
        elsewhere.start(jobs.hold, key, using="session")
        elsewhere.hear()

        def release():
            elsewhere.tell()
            assert elsewhere.hear() == "released"

        return release

    return hold


@pytest.fixture
def waiter(threads, in_queue):
    """Return a function that lets a thread wait in the queue of the engine."""

    def start(one=None):
        thread = threads(lambda: (one or lock(timeout=60)).acquire().release())
        in_queue(1)
        return thread

    return start


@pytest.fixture
def from_queue(held_elsewhere, threads, in_queue):
    """Return a function that acquires "stock:7" from the queue of the engine.

    Such a hold has a connection of its own.
    """

    def acquire(**policy):
        release = held_elsewhere()
        releasing = threads(lambda: (in_queue(1), release()))
        hold = lock(**policy).acquire()
        releasing.join(30)
        return hold

    return acquire
