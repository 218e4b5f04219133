"""The servers of these tests.

One server of each kind serves the whole run. Tests that stop a server start their own.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import signal

import pytest

from tests import servers
from tests.promises.backends.others import client_of, quorum, redis, zookeeper


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


@pytest.fixture(scope="session")
def redises():
    """Five independent Redis servers that keep their grants."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(servers.Redis(appendonly="yes", appendfsync="always"))
            for _ in range(5)
        ]


@pytest.fixture
def five(request, redises):
    for server in redises:
        if server.process is None:
            server.start()
        with server.client() as client:
            client.flushall()
    if request.cls is not None:
        request.cls.servers = redises
    yield redises
    for server in redises:
        if server.process is not None:
            server.process.send_signal(signal.SIGCONT)


@pytest.fixture
def root():
    return f"/test-{secrets.token_hex(4)}"


@pytest.fixture
def person(zookeeper_server):
    """A plain client with which a user inspects the nodes."""
    with client_of(zookeeper_server.port) as client:
        yield client


@pytest.fixture
def nodes(person, root):
    """Return a function that returns the nodes below a key."""
    from kazoo.exceptions import NoNodeError

    def names(key="key"):
        # An empty parent is deleted.
        with contextlib.suppress(NoNodeError):
            return person.get_children(f"{root}/{key}")
        return []

    return names


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
def zookeeper_at(aliases, root):
    """Return a function that configures the alias "zookeeper" at some ports.

    It returns a function that starts processes with the same alias.
    """

    def configure(*ports, **options):
        options = {"root": root, "session_timeout": 20.0, **options}
        return aliases(zookeeper=zookeeper(*ports, **options))

    return configure


@pytest.fixture
def configured(request, aliases, zookeeper_at):
    """Return a function that configures an alias on the shared servers of its kind.

    The alias has the name of its kind. The function returns one that starts processes
    with it.
    """

    def configure(kind, **options):
        server = request.getfixturevalue({"quorum": "five"}.get(kind, f"{kind}_server"))
        if kind == "redis":
            return aliases(redis=redis(server, **options))
        if kind == "zookeeper":
            return zookeeper_at(server.port, **options)
        members = {
            f"redis{number}": redis(one, socket_timeout=5.0, grace=0)
            for number, one in enumerate(server)
        }
        # The timeout is longer than a machine stalls.
        options = {"node_timeout": 10.0, **options}
        return aliases(**members, quorum=quorum(members, **options))

    return configure
