"""The servers of these tests.

One server of each kind serves the whole run. Tests that stop a server start their own.
"""

from __future__ import annotations

import contextlib
import json

import pytest

from tests import jobs, servers


@pytest.fixture(scope="session")
def redis_server():
    """A Redis that is never stopped. Each test uses its own keys."""
    with servers.Redis() as server:
        yield server


@pytest.fixture(scope="session")
def zookeeper_server():
    """A ZooKeeper. A test may stop it for seconds, and uses its own root."""
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


@pytest.fixture
def count_together(tmp_path):
    """Return a function that counts in several processes under a lock.

    No increment may be lost, and ``jobs.count()`` checks that tokens grow.
    """

    def count(crowd, times, meanwhile=None, **policy):
        path = tmp_path / "counter"
        path.write_text("0 0")
        policy = {"times": times, "scope": "lease", "timeout": 60, **policy}
        for one in crowd:
            # It begins only when all have started and are connected.
            one.call(jobs.try_once, "warm", using=policy["using"])
        for one in crowd:
            one.start(jobs.count, str(path), "count", **policy)
        while meanwhile and not all(one.pipe.poll(0.15) for one in crowd):
            meanwhile()
        for one in crowd:
            one.hear()
        assert path.read_text().split()[0] == f"{times * len(crowd)}"

    return count
