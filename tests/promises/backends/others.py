"""The settings of the backends on other servers, and claims on them."""

from __future__ import annotations

import io
from contextlib import contextmanager

from django.core.checks import run_checks
from django.core.management import call_command
from kazoo.client import KazooClient

from dlocks.values import Claim

REDIS = "dlocks.backends.redis.RedisBackend"
QUORUM = "dlocks.backends.quorum.QuorumBackend"
ZOOKEEPER = "dlocks.backends.zookeeper.ZooKeeperBackend"
MEMORY = "dlocks.backends.memory.MemoryBackend"


def at(*ports):
    return ",".join(f"127.0.0.1:{port}" for port in ports)


def redis(server, **options):
    return {"BACKEND": REDIS, "OPTIONS": {"url": server.url, **options}}


def zookeeper(*ports, **options):
    options = {"hosts": at(*ports), **options}
    return {"BACKEND": ZOOKEEPER, "OPTIONS": options}


def quorum(members, **options):
    return {"BACKEND": QUORUM, "OPTIONS": {"of": list(members), **options}}


def claim(key="key", **options):
    return Claim(key=key, **{"ttl": 30.0, "holder": "somebody", **options})


@contextmanager
def client_of(port, **options):
    """Connect a plain client of ZooKeeper."""
    client = KazooClient(at(port), **options)
    client.start()
    try:
        yield client
    finally:
        client.stop()
        client.close()


def run(name, *arguments, using):
    """Run a command, and return what it prints."""
    out = io.StringIO()
    call_command(name, *arguments, "--using", using, stdout=out, no_color=True)
    return out.getvalue()


def reported(alias):
    """Return the messages of the system check about an alias."""
    return [one for one in run_checks(databases=[]) if f"DLOCKS[{alias!r}]" in str(one)]
