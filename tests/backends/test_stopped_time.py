"""Locks on the other servers use the real clock, also under freezegun."""

from __future__ import annotations

import asyncio

import pytest

from dlocks import LockTimeout, db_lock
from tests.promises.runtime.test_stopped_time import freeze, lasting

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def using(redis_server, zookeeper_server, settings):
    """The aliases of the other servers."""
    memory = {"BACKEND": "dlocks.backends.memory.MemoryBackend"}
    kinds = {
        "redis.Redis": {
            "url": redis_server.url,
            "prefix": "stopped:",
        },
        "zookeeper.ZooKeeper": {
            "hosts": f"127.0.0.1:{zookeeper_server.port}",
            "root": "/stopped",
        },
        "quorum.Quorum": {"of": ["redis", "other", "third"]},
    }
    aliases = {
        kind.partition(".")[0]: {
            "BACKEND": f"dlocks.backends.{kind}Backend",
            "OPTIONS": options,
        }
        for kind, options in kinds.items()
    }
    settings.DLOCKS = {**settings.DLOCKS, **aliases, "other": memory, "third": memory}
    return list(aliases)


def test_a_busy_key_times_out_and_a_hold_is_renewed(using, threads):
    """``timeout`` is real time, and renewing works while the clock is stopped."""
    for alias in using:
        waiting = db_lock("stock:7", using=alias, timeout=0.3)

        def wait(waiting=waiting):
            with pytest.raises(LockTimeout):
                waiting.acquire()

        with freeze(), db_lock("stock:7", using=alias, ttl=6.0) as hold:
            with lasting(0.3):
                threads(wait).join()
            hold.renew()
            hold.check()


async def test_a_busy_key_times_out_in_a_coroutine(using):
    """``timeout`` is real time, although freezegun stops the event loop's clock."""
    for alias in using:
        hold = await asyncio.create_task(db_lock("stock:7", using=alias).aacquire())
        with freeze(), lasting(0.3), pytest.raises(LockTimeout):
            await db_lock("stock:7", using=alias, timeout=0.3).aacquire()
        await hold.arelease()
