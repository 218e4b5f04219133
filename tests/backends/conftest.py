"""The servers of these tests: one of each kind for the whole run, and more for a test that stops them."""

from __future__ import annotations

import contextlib
import json

import pytest

from tests import servers


@pytest.fixture(scope="session")
def redis_server():
    """A Redis that nobody stops; each test has keys of its own."""
    with servers.Redis() as server:
        yield server


@pytest.fixture(scope="session")
def zookeeper_server():
    """A ZooKeeper that nobody stops; each test has a root of its own."""
    with servers.ZooKeeper(**servers.BRISK) as server:
        yield server


@pytest.fixture
def start():
    """Return a function that starts a server for this test alone, to stop and to break."""
    with contextlib.ExitStack() as stack:
        yield lambda server: stack.enter_context(server)


@pytest.fixture
def aliases(settings, doomed):
    """Return a function that adds aliases to DLOCKS, here and in the processes that the function it returns starts."""

    def add(**added):
        settings.DLOCKS = {**settings.DLOCKS, **added}
        return lambda **environment: doomed(DLOCKS_TEST_ALIASES=json.dumps(added), **environment)

    return add
