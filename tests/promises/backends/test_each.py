"""What every backend on another server promises."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from django.core.management import CommandError
from freezegun import freeze_time

from dlocks import LockTimeout, db_lock
from dlocks.backends.redis import RedisBackend
from dlocks.backends.zookeeper import ZooKeeperBackend
from tests import jobs
from tests.promises.backends.others import claim, run
from tests.promises.locks.keys import await_renewal
from tests.timing import eventually, in_time
from tests.volume import volume

KINDS = ["redis", "zookeeper", "quorum"]


@pytest.mark.parametrize("using", KINDS)
def test_processes_lose_no_updates_of_an_unguarded_counter(
    using, configured, count_together
):
    process = configured(using)
    count_together([process() for _ in range(4)], volume(30), using=using)


@pytest.mark.parametrize("using", KINDS)
def test_a_lease_lasts_for_a_new_ttl_from_now(using, configured):
    """That of ZooKeeper cannot be longer than its session."""
    configured(using)
    with db_lock("a", "b", using=using, ttl=20) as hold:
        hold.renew(ttl=600)
        hold.check()
        assert 5 < hold.remaining <= 600
        assert hold.remaining > 595 or using == "zookeeper"
        hold.renew(ttl=3)
        assert hold.remaining <= 3
        left = db_lock("a", using=using).holder().remaining
        assert left <= 3.2
        for _ in range(2):
            await_renewal(hold)
        assert 0 < hold.remaining <= 3


@pytest.mark.parametrize("using", KINDS)
def test_holders_and_waiters_of_other_processes_are_listed(using, configured, until):
    """A quorum has no queue."""
    process = configured(using)
    lock, (one, other) = db_lock("listed", using=using), (process(), process())
    assert lock.holders() == lock.waiters() == []
    with one.doing(jobs.hold, "listed", using=using):
        other.start(jobs.wait_quietly, "listed", using=using, timeout=60)
        if using != "quorum":
            (waiter,) = until(lock.waiters, 30)
            assert f":{other.process.pid}:" in waiter.holder
            assert waiter.waits_for == "listed"
            assert 0 <= waiter.waited < 30
        else:
            assert lock.waiters() == []
        (holder,) = lock.holders()
        assert f":{one.process.pid}:" in holder.holder
    other.hear()


@pytest.fixture
def backend_of(configured, settings):
    """Return a function that configures an alias.

    It returns a backend beside that of the alias, and the function that starts
    processes.
    """

    def make(kind, **options):
        process = configured(kind, **options)
        cls = {"redis": RedisBackend, "zookeeper": ZooKeeperBackend}[kind]
        options = {**settings.DLOCKS[kind]["OPTIONS"], "prefix": ""}
        return cls(kind, **options), process

    return make


@pytest.mark.parametrize(
    ("using", "options", "limit"),
    [
        # The ttl and the grace.
        ("redis", {"ttl": 1.0}, 1.0 + 0.5),
        # The session, and two ticks of the server.
        ("zookeeper", {"session_timeout": 2.0}, 2.0 + 0.4),
    ],
)
def test_a_killed_holder_blocks_others_for_its_lease(
    using, options, limit, backend_of, until
):
    backend, process = backend_of(using, **options)
    victim, waiter = process(), process()
    token = victim.call(jobs.acquire, "killed", using=using)
    waiter.start(jobs.wait_quietly, "killed", using=using, timeout=30)
    # The holder is killed only when the waiter is queued, not while it starts.
    until(lambda: backend.waiting("killed") == 1, seconds=30)
    victim.kill()
    granted, later = waiter.hear()
    assert later > token
    in_time(granted - victim.killed_at, limit + 1.0)


@pytest.mark.parametrize("using", ["redis", "zookeeper"])
def test_commands_list_and_clear_the_locks_of_other_processes(using, backend_of):
    """Odd characters in keys are shown, and keys of other prefixes are not.

    A cleared lock goes to the first waiter. Its former holder learns of it at its next
    renewal, and tokens still grow.
    """
    backend, start = backend_of(using, prefix="a[*]}:")
    assert run("list_locks", using=using) == "No locks.\n"
    process = start()
    process.start(jobs.hold_until_lost, "stock:7", using=using, timeout=20, ttl=1)
    token = process.hear()
    odd = claim("a[*]}:%7D / {ü}*")
    backend.acquire(odd)
    backend.acquire(claim("b:other"))
    waits = claim("a[*]}:stock:7", holder="next")
    backend.enqueue(waits)
    _, first, stock = run("list_locks", using=using).splitlines()
    # ZooKeeper does not know the leases of other processes.
    left = r"\d+s" if using == "redis" else "-"
    assert re.fullmatch(rf"%7D / \{{ü\}}\* +held +0 +\d+s +{left} +somebody", first)
    assert re.search(rf"^stock:7 +held +1 +\d+s +{left} +\S+", stock)
    (lock,) = json.loads(run("list_locks", "stock:*", "--json", using=using))
    assert (lock["token"], lock["waiting"]) == (token, 1)
    backend.release(odd)
    assert len(run("list_locks", using=using).splitlines()) == 2
    assert not backend.clear(waits.key, token + 1)
    with pytest.raises(CommandError, match="is held. To force its release, pass"):
        run("clear_lock", "stock:7", "--yes", using=using)
    # A waiter without a heartbeat for seconds would be skipped.
    backend.poll([waits])
    out = run("clear_lock", "stock:7", "--yes", "--reason", "tests", using=using)
    assert re.search(r"'stock:7' was cleared. It is now held by next", out)
    grant = backend.poll([waits])[waits.owner].grant
    assert grant.token > token
    # The loss was reported.
    assert process.hear()
    backend.release(waits)
    assert backend.acquire(claim(waits.key)).token > grant.token


def test_a_stale_hold_in_redis_is_cleared_by_its_key(backend_of):
    backend, _ = backend_of("redis", prefix="a:")
    backend.acquire(claim("a:crashed", ttl=0.001, takeover=False))
    # Its grace has passed too.
    eventually(lambda: backend.holder("a:crashed").remaining <= -backend.grace)
    out = run("clear_lock", "crashed", "--stale-only", "--yes", using="redis")
    assert "'crashed' is stale: held by somebody" in out
    assert "'crashed' was cleared and is free." in out


# With freezegun, waits and leases are real time.


@pytest.mark.parametrize("using", KINDS)
@pytest.mark.usefixtures("redis_server", "zookeeper_server", "five")
async def test_locks_use_the_real_clock_under_freezegun(using, configured, threads):
    """``timeout`` is real time, and renewing works while the clock is stopped."""
    configured(using)
    waiting = db_lock("stock:7", using=using, timeout=0.3)

    def wait():
        with pytest.raises(LockTimeout):
            waiting.acquire()

    hold = await asyncio.create_task(db_lock("stock:7", using=using, ttl=6).aacquire())
    with freeze_time("2030-01-01", real_asyncio=True):
        await asyncio.to_thread(lambda: threads(wait).join(30))
        with pytest.raises(LockTimeout):
            await waiting.aacquire()
        await hold.arenew()
        await hold.acheck()
    await hold.arelease()
