"""Locks on the other servers use the real clock, also under freezegun."""

from __future__ import annotations

import asyncio

import pytest

from dlocks import LockTimeout, db_lock
from tests.runtime.test_stopped_time import freeze, lasting

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=["redis", "zookeeper", "quorum"])
def using(request, redis_server, zookeeper_server, settings):
    redis = {
        "BACKEND": "dlocks.backends.redis.RedisBackend",
        "OPTIONS": {
            "url": f"redis://127.0.0.1:{redis_server.port}",
            "prefix": "stopped:",
        },
    }
    settings.DLOCKS = {
        **settings.DLOCKS,
        "redis": redis,
        "zookeeper": {
            "BACKEND": "dlocks.backends.zookeeper.ZooKeeperBackend",
            "OPTIONS": {
                "hosts": f"127.0.0.1:{zookeeper_server.port}",
                "root": "/stopped",
            },
        },
        "quorum": {
            "BACKEND": "dlocks.backends.quorum.QuorumBackend",
            "OPTIONS": {"of": ["redis", "other", "third"]},
        },
        "other": {"BACKEND": "dlocks.backends.memory.MemoryBackend"},
        "third": {"BACKEND": "dlocks.backends.memory.MemoryBackend"},
    }
    return request.param


def test_a_busy_key_times_out(using, threads):
    """``timeout`` is real time."""

    def wait():
        with pytest.raises(LockTimeout):
            db_lock("stock:7", using=using, timeout=0.3).acquire()

    with db_lock("stock:7", using=using), freeze(), lasting(0.3):
        threads(wait).join()


async def test_a_busy_key_times_out_in_a_coroutine(using):
    """``timeout`` is real time, although freezegun stops the event loop's clock."""
    hold = await asyncio.create_task(db_lock("stock:7", using=using).aacquire())
    with freeze(), lasting(0.3), pytest.raises(LockTimeout):
        await db_lock("stock:7", using=using, timeout=0.3).aacquire()
    await hold.arelease()


def test_a_hold_is_renewed_while_time_stands_still(using):
    """Connecting and renewing work as usual while the clock is stopped."""
    with freeze(), db_lock("stock:7", using=using, ttl=6.0) as hold:
        hold.renew()
        hold.check()
