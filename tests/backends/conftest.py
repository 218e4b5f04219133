"""The servers of these tests.

One server of each kind serves the whole run. Tests that stop a server start their own.
"""

from __future__ import annotations

import contextlib
import json

import pytest

from tests import servers


@pytest.fixture(scope="session")
def redis_server():
    """A Redis that is never stopped. Each test uses its own keys."""
    with servers.Redis() as server:
        yield server


@pytest.fixture(scope="session")
def zookeeper_server():
    """A ZooKeeper that is never stopped. Each test uses its own root."""
    with servers.ZooKeeper(**servers.BRISK) as server:
        yield server


@pytest.fixture
def start():
    """Return a function that starts a server for this test, which may break it."""
    with contextlib.ExitStack() as stack:
        yield lambda server: stack.enter_context(server)


@pytest.fixture
def aliases(settings, doomed):
    """Return a function that adds aliases to DLOCKS.

    It returns a function that starts processes with the same aliases.
    """

    def add(**added):
        settings.DLOCKS = {**settings.DLOCKS, **added}
        return lambda **environment: doomed(
            DLOCKS_TEST_ALIASES=json.dumps(added), **environment
        )

    return add
