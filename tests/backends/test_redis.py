"""Locks in a real Redis: the contract, several processes, and failures."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import logging
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref

import pytest
import redis
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import transaction
from django.test import SimpleTestCase

from dlocks import (
    LockBackendError,
    LockLost,
    LockStale,
    LockTimeout,
    StaleToken,
    db_lock,
)
from dlocks.testing import BackendContract
from tests import jobs
from tests.internals import Claim, RedisBackend, backends, name_of, scripts
from tests.models import Machine
from tests.proxy import Proxy
from tests.servers import Redis
from tests.timing import in_time

BACKEND = "dlocks.backends.redis.RedisBackend"
SECRET = "open-sesame"


def url(port, secret=""):
    return f"redis://{f':{secret}@' if secret else ''}127.0.0.1:{port}/0"


def alias(port, secret="", **options):
    return {"BACKEND": BACKEND, "OPTIONS": {"url": url(port, secret), **options}}


def claim(key="key", **options):
    return Claim(key=key, **{"ttl": 30.0, "holder": "somebody", **options})


@pytest.fixture(autouse=True)
def server(request, redis_server):
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
    if request.cls is not None:
        request.cls.server = redis_server
    return redis_server


@pytest.fixture
def backend(server):
    return RedisBackend("redis", url=url(server.port), grace=0.0)


class TestRedis(BackendContract, SimpleTestCase):
    def make_backend(self, **options):
        return RedisBackend("redis", url=url(self.server.port), **options)


# The commands.


def run(*args):
    out = io.StringIO()
    call_command(*args, "--using", "redis", stdout=out, no_color=True)
    return out.getvalue()


@pytest.fixture
def holder(server, aliases):
    """Hold ``stock:7`` under a prefix in another process, and return its token."""
    process = aliases(redis=alias(server.port, prefix="a[*]}:", ttl=1))()
    process.start(jobs.hold_until_lost, "stock:7", using="redis")
    process.token = process.hear()
    return process


def test_list_locks_shows_the_holders_of_other_processes(holder, backend):
    """Odd characters in keys are shown, and keys of other prefixes are not."""
    odd = claim("a[*]}:%7D {ü}*")
    backend.acquire(odd)
    backend.acquire(claim("b:other"))
    backend.enqueue(claim(odd.key, holder="next"))
    _, first, stock = run("list_locks").splitlines()
    assert re.fullmatch(
        r"%7D \{ü\}\* +held +somebody +- +\S+ s ago +\d+ s left +1 +1 +\d+", first
    )
    assert re.search(rf"^stock:7 +held .* s left +1 +0 +{holder.token}$", stock)
    assert json.loads(run("list_locks", "stock:*", "--json"))[0]["waiting"] == 0


def test_a_cleared_lock_is_lost_and_goes_to_the_first_waiter(holder, backend):
    """Its former holder learns of it at its next renewal. Tokens still grow."""
    waits = claim("a[*]}:stock:7", holder="next")
    backend.enqueue(waits)
    with pytest.raises(CommandError, match="is held. To force its release, pass"):
        run("clear_lock", "stock:7", "--yes")
    out = run("clear_lock", "stock:7", "--yes", "--reason", "tests")
    assert re.search(r"'stock:7' was cleared. It is now held by next for .*", out)
    grant = backend.poll([waits])[waits.owner].grant
    assert grant.token > holder.token
    # The loss was reported.
    assert holder.hear()
    backend.release(waits)
    assert backend.acquire(claim(waits.key)).token > grant.token


def test_only_the_hold_that_was_shown_is_cleared(backend):
    first = claim()
    token = backend.acquire(first).token
    assert not backend.clear("key", token + 1)
    assert not backend.clear("free", token)
    backend.release(first)
    second = claim()
    backend.acquire(second)
    assert not backend.clear("key", token)
    assert backend.verify([second], 1)


def test_stale_and_kept_locks_can_be_cleared(backend):
    """A key is free although its holder crashed, or keeps it for a while."""
    crashed = claim("crashed", ttl=0.001)
    token = backend.acquire(crashed).token
    while not backend.holder("crashed").stale:
        pass
    assert backend.clear("crashed", token)
    assert backend.holder("crashed") is None
    kept = claim("kept")
    token = backend.acquire(kept).token
    backend.release(kept, keep=60.0)
    assert backend.keys() == ["kept"]
    assert backend.clear("kept", token)
    assert backend.keys() == []
    assert backend.acquire(claim("kept")).token > token


def test_clear_lock_frees_a_stale_key(server, aliases):
    """Its holder never released it, and no other caller may take it over."""
    aliases(redis=alias(server.port))
    backends["redis"].acquire(claim("crashed", ttl=0.001, takeover=False))
    while not backends["redis"].holder("crashed").stale:
        pass
    out = run("clear_lock", "crashed", "--stale-only", "--yes")
    assert "'crashed' is stale: held by somebody" in out
    assert "'crashed' was cleared and is free." in out


def test_a_server_that_is_away_is_reported_in_one_line(aliases):
    aliases(redis=alias(1))
    with pytest.raises(CommandError, match="a request to Redis at .* failed"):
        run("list_locks")


# Processes.


def counter(directory):
    path = directory / "counter"
    path.write_text("0 0")
    return path


def test_processes_lose_no_updates_of_an_unguarded_counter(server, aliases, tmp_path):
    process = aliases(redis=alias(server.port))
    path, crowd = counter(tmp_path), [process() for _ in range(4)]
    for one in crowd:
        one.start(
            jobs.count, str(path), "count", times=100, scope="lease", using="redis"
        )
    tokens = [one.hear() for one in crowd]
    assert all(mine == sorted(mine) for mine in tokens)
    assert path.read_text().split()[0] == "400"
    assert len({token for mine in tokens for token in mine}) == 400


def test_waiters_in_processes_are_served_in_order(server, aliases, until):
    process = aliases(redis=alias(server.port))
    holder, *waiting = [process() for _ in range(4)]
    holder.start(jobs.hold, "line", using="redis")
    holder.hear()
    for number, one in enumerate(waiting):
        one.start(jobs.wait_quietly, "line", using="redis", timeout=30)
        until(lambda number=number: backends["redis"].waiting("line") == number + 1)
    holder.tell()
    tokens = [one.hear()[1] for one in waiting]
    assert tokens == sorted(tokens)


def test_a_waiter_is_notified_on_its_own_channel(backend):
    notifier, other = backend.notifier("mine"), backend.notifier("another's")
    holder, waits = claim(), claim()
    backend.acquire(holder)
    backend.enqueue(waits, "mine")
    assert not notifier.wait(0.05)
    backend.release(holder)
    assert notifier.wait(10)
    assert backend.poll([waits])[waits.owner].grant
    assert not other.wait(0.05)
    notifier.close()
    other.close()


def test_a_killed_holder_blocks_others_for_ttl_and_grace(server, aliases, until):
    process = aliases(redis=alias(server.port, ttl=1.0))
    victim, waiter = process(), process()
    token = victim.call(jobs.acquire, "key", using="redis")
    waiter.start(jobs.wait_quietly, "key", using="redis", timeout=30)
    # The holder is killed only when the waiter is queued, not while it starts.
    until(lambda: backends["redis"].waiting("key") == 1, seconds=30)
    victim.kill()
    granted, later = waiter.hear()
    assert later > token
    in_time(granted - victim.killed_at, 1.0 + 0.5 + 1.0)


def test_a_stopped_holder_detects_its_lost_key(server, aliases):
    process = aliases(redis=alias(server.port, ttl=0.6))
    victim, waiter = process(), process()
    token = victim.call(jobs.acquire, "key", using="redis")
    victim.stop()
    _, later = waiter.call(jobs.wait_quietly, "key", using="redis", timeout=30, ttl=30)
    victim.resume()
    assert later > token
    assert victim.call(jobs.check) == "LockLost"
    assert victim.call(jobs.release_all) == ["LockLost"]
    assert waiter.call(jobs.try_once, "key", using="redis") > later


def test_a_long_hold_is_renewed(server, aliases, until):
    aliases(redis=alias(server.port, ttl=4.0))
    with db_lock("key", using="redis") as hold:
        first = hold._state.lease.deadline
        until(lambda: hold._state.lease.deadline > first + 4.1, 20)
        hold.check()


def test_reentering_counts_and_the_holder_is_shown(server, aliases, in_other_thread):
    aliases(redis=alias(server.port))
    with db_lock("key", using="redis"), db_lock("key", using="redis") as hold:
        holder = db_lock("key", using="redis").holder()
        assert (holder.count, holder.token, holder.stale) == (2, hold.token, False)
        with pytest.raises(
            LockTimeout,
            match=(
                r"'key' could not be acquired without waiting: held by .* s left on"
                r" its lease"
            ),
        ):
            in_other_thread(db_lock("key", using="redis", timeout=0).acquire)
    assert db_lock("key", using="redis").holder() is None


@pytest.mark.django_db(transaction=True)
def test_a_lease_left_in_a_transaction_is_released_at_its_end(
    server, aliases, is_busy, until
):
    aliases(redis=alias(server.port))
    with transaction.atomic():
        with db_lock("key", using="redis") as hold:
            assert hold.scope == "lease"
        assert is_busy("key", using="redis")
    until(lambda: not is_busy("key", using="redis"))


@pytest.mark.django_db(transaction=True)
def test_a_fenced_row_refuses_a_late_holder(server, aliases, in_other_thread, until):
    aliases(redis=alias(server.port, grace=0))
    pk = Machine.objects.create(state="new").pk
    late = db_lock("machine", using="redis", ttl=0.1, renew=False).acquire()
    row = Machine.objects.claim(pk, late)
    until(lambda: not late.held)

    def work():
        with db_lock("machine", using="redis") as hold:
            mine = Machine.objects.claim(pk, hold)
            mine.state = "new work"
            mine.save()

    in_other_thread(work)
    row.state = "old work"
    with pytest.raises(StaleToken):
        row.save()
    assert Machine.objects.get(pk=pk).state == "new work"
    with pytest.raises(LockLost):
        late.release()


async def test_waiting_tasks_are_served_in_order(server, aliases):
    aliases(redis=alias(server.port))
    served = []

    async def work(number):
        async with db_lock("key", using="redis", timeout=30) as hold:
            served.append(hold.token)

    await asyncio.gather(*(work(number) for number in range(10)))
    assert served == sorted(set(served))
    assert len(served) == 10


def test_a_hold_is_handed_over_to_another_process(server, aliases):
    process = aliases(redis=alias(server.port))
    giver, taker = process(), process()
    text = giver.call(jobs.detach, "key", using="redis")
    taker.start(jobs.resume, text)
    token = taker.hear()
    assert backends["redis"].holder("key").token == token
    taker.tell()
    assert taker.hear() == "released"
    assert backends["redis"].holder("key") is None


def test_a_stale_key_is_not_taken_over_without_takeover(backend):
    backend.acquire(claim(ttl=1.0))
    waits = claim(takeover=False)
    backend.enqueue(waits)
    while not backend.holder("key").stale:
        time.sleep(0.01)
    with pytest.raises(LockStale, match="somebody"):
        backend.acquire(claim(takeover=False))
    assert backend.poll([waits])[waits.owner].must_retry


def test_unsupported_lock_kinds_are_refused_on_redis(server, aliases):
    from dlocks import db_rwlock, db_semaphore

    aliases(redis=alias(server.port))
    for lock in (
        db_rwlock("key", using="redis").read(),
        db_semaphore("key", 3, using="redis"),
    ):
        with pytest.raises(
            RuntimeError, match="RedisBackend does not support shared locks"
        ):
            lock.acquire()
    with (
        db_lock("key", using="redis") as hold,
        pytest.raises(RuntimeError, match="RedisBackend"),
    ):
        with hold.atomic():
            pass


def test_all_names_of_a_key_are_in_one_cluster_slot():
    from redis.crc import key_slot

    for key in ("stock:7", "}", "{}", "a}b{c}", "%7D", "ß}"):
        name = name_of(key)
        assert (
            len(
                {
                    key_slot(f"{name}{rest}".encode())
                    for rest in ("", ":last", ":line", ":claims", ":gone")
                }
            )
            == 1
        )
    assert name_of("%7D") != name_of("}")


def test_a_released_key_expires_from_redis_after_a_day(server, backend):
    mine = claim()
    backend.acquire(mine)
    backend.enqueue(claim())
    backend.release(mine)
    with redis.Redis(port=server.port) as client:
        assert all(
            0 < client.ttl(name) <= 86400
            for name in client.scan_iter()
            if not name.endswith(b":last")
        )
        backend.acquire(mine)
        client.flushall()
        backend.acquire(mine)
        assert client.ttl(f"{name_of('key')}:last") == -1
        backend.release(mine)
        assert 86000 < client.ttl(f"{name_of('key')}:last") <= 86400


def test_deleting_a_redis_key_frees_it_and_its_holder_loses_it(
    server, aliases, in_other_thread
):
    aliases(redis=alias(server.port))
    hold = db_lock("stock:7", using="redis").acquire()
    with redis.Redis(port=server.port) as client:
        assert client.delete("dlocks:{stock:7}") == 1
    lock = db_lock("stock:7", using="redis", timeout=0)
    assert in_other_thread(jobs.token_of, lock) > hold.token
    with pytest.raises(LockLost):
        hold.renew()


def test_the_documented_redis_acl_is_sufficient(server, aliases, until):
    from tests.pages import DOCS

    ((rights, more),) = re.findall(
        r"An ACL needs `([^`]*)`\. Add `([^`]*)` for `settle`",
        (DOCS / "how-to/redis.md").read_text(),
    )
    with redis.Redis(port=server.port) as client:
        client.execute_command(
            "ACL SETUSER", "dlocks", "reset", "on", f">{SECRET}", *rights.split(), more
        )
        # A Redis that has just started grants nothing yet. It reports its uptime in
        # whole seconds.
        until(lambda: client.info("server")["uptime_in_seconds"] >= 1)
    aliases(
        redis={
            "BACKEND": BACKEND,
            "OPTIONS": {"url": f"redis://dlocks:{SECRET}@127.0.0.1:{server.port}/0"},
        }
    )
    backends["redis"].settle = 0.1
    lock = db_lock("key", using="redis", timeout=20)
    hold = lock.acquire()
    thread = threading.Thread(target=lambda: lock.acquire().release())
    thread.start()
    until(lambda: backends["redis"].waiting("key") == 1)
    hold.renew()
    hold.release()
    thread.join(20)
    assert not thread.is_alive()


# Failures.


def test_a_late_request_of_a_cancelled_claim_is_ignored(backend):
    late = claim()
    assert not backend.release(late)
    assert backend.acquire(late) is None
    assert backend.acquire(claim())


def test_a_cancelled_claim_cannot_join_the_queue(
    backend,
):
    other, late = claim(), claim()
    assert backend.acquire(other)
    assert not backend.release(late)
    backend.enqueue(late)
    assert backend.waiting("key") == 0
    assert backend.release(other)
    assert backend.acquire(claim())


def test_a_hold_is_not_handed_over_to_a_cancelled_claim(backend):
    one, successor = claim(), claim()
    assert backend.acquire(one)
    assert not backend.release(successor)
    assert backend.exchange(one, successor) is None
    assert one.owner in backend.renew([one])
    assert backend.release(one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"url": "redis://h:6379?db=1"}, {"url": "redis://h:6379?db=2"}),
        ({"url": "unix:///r.sock?db=1"}, {"url": "unix:///r.sock?db=2"}),
        (
            {"url": "redis://mymaster", "sentinels": ["redis://a:26379"]},
            {"url": "redis://mymaster", "sentinels": ["redis://b:26379"]},
        ),
    ],
)
def test_different_redis_servers_have_different_identities(one, other):
    """Otherwise a hold in one Redis would count as a hold in the other."""
    assert (
        RedisBackend("one", **one).identity != RedisBackend("other", **other).identity
    )
    assert RedisBackend("one", **one).identity == RedisBackend("same", **one).identity


def test_a_script_that_redis_has_flushed_is_sent_again(server, backend):
    mine = [claim(f"key {number}") for number in range(3)]
    for one in mine:
        backend.acquire(one)
    with redis.Redis(port=server.port) as client:
        client.script_flush()
        assert len(backend.renew(mine)) == 3
        client.script_flush()
    assert backend.release(mine[0])


@pytest.mark.parametrize("spoiled", ["a", "b"])
def test_an_overwritten_key_does_not_block_other_renewals(
    server, backend, spoiled, caplog
):
    claims = [claim(key) for key in "abc"]
    for each in claims:
        assert backend.acquire(each)
    with redis.Redis(port=server.port) as client:
        client.set(f"{name_of(spoiled)}:last", "something else")
    renewed = backend.renew(claims)
    # The key that could not be renewed keeps its previous lease.
    assert renewed == {
        each.owner: 0.0 if each.key == spoiled else each.ttl for each in claims
    }
    assert f"{spoiled!r} could not be renewed: WRONGTYPE" in caplog.text
    (refused,) = [each for each in claims if each.key == spoiled]
    with pytest.raises(LockBackendError, match="WRONGTYPE"):
        backend.renew([refused])


@pytest.fixture
def proxied(server):
    proxy = Proxy(server.port)
    yield proxy, RedisBackend("redis", url=url(proxy.port), grace=0.0)
    proxy.close()


def test_a_grant_is_not_doubled_when_its_reply_is_lost(proxied, backend):
    proxy, mine = proxied
    mine.release(claim())
    proxy.swallow(scripts.ACQUIRE.sha.encode())
    with redis.Redis(port=proxy._target) as client:
        client.script_load(scripts.ACQUIRE.text)
    one = claim()
    grant = mine.acquire(one)
    assert proxy.swallowed.wait(10)
    assert grant.token == backend.holder("key").token
    assert backend.acquire(claim()) is None
    assert mine.release(one)
    assert backend.acquire(claim())


def test_a_release_whose_reply_is_lost_is_a_release(proxied, backend):
    proxy, mine = proxied
    one, waits = claim(), claim()
    mine.acquire(one)
    backend.enqueue(waits)
    with redis.Redis(port=proxy._target) as client:
        client.script_load(scripts.RELEASE.text)
    proxy.swallow(scripts.RELEASE.sha.encode())
    assert mine.release(one)
    assert proxy.swallowed.wait(10)
    assert backend.poll([waits])[waits.owner].grant


def test_a_clear_whose_reply_is_lost_is_reported_as_done(proxied, backend):
    proxy, mine = proxied
    token = backend.acquire(claim()).token
    with redis.Redis(port=proxy._target) as client:
        client.script_load(scripts.RELEASE.text)
    proxy.swallow(scripts.RELEASE.sha.encode())
    assert mine.clear("key", token)
    assert proxy.swallowed.wait(10)
    assert backend.holder("key") is None


def test_a_claim_joins_the_queue_once_when_its_reply_is_lost(proxied, backend):
    proxy, mine = proxied
    backend.acquire(claim())
    mine.waiting("key")
    with redis.Redis(port=proxy._target) as client:
        client.script_load(scripts.QUEUE.text)
    proxy.swallow(scripts.QUEUE.sha.encode())
    assert mine.enqueue(claim()).position
    assert proxy.swallowed.wait(10)
    assert backend.waiting("key") == 1


def test_a_discarded_backend_closes_its_connections(server, settings, aliases):
    """A test suite changes its settings often, and leaves no open socket."""
    aliases(redis=alias(server.port))
    with db_lock("key", using="redis"):
        made = weakref.ref(backends["redis"])
        client = backends["redis"]._client
    sockets = [one._sock for one in client.connection_pool._available_connections]
    assert sockets
    settings.DLOCKS = {}
    gc.collect()
    assert made() is None
    assert [one.fileno() for one in sockets] == [-1] * len(sockets)


def test_a_silent_redis_fails_in_bounded_time(start, aliases):
    """Acquiring from a stopped Redis fails in bounded time.

    It accepts connections but does not reply. The failure is not reported as
    contention.
    """
    server = start(Redis())
    aliases(redis=alias(server.port, socket_timeout=1.0, ttl=1.0))
    lock = db_lock("key", using="redis", timeout=30)
    lock.acquire().release()
    server.process.send_signal(signal.SIGSTOP)
    try:
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(
                LockBackendError,
                match=r"DLOCKS\[.redis.\]: a request to Redis at 127.0.0.1:\d+/0 fail",
            ):
                lock.acquire()
            # One request and its cancellation.
            in_time(time.monotonic() - began, 6.0)
    finally:
        server.process.send_signal(signal.SIGCONT)
    # A claim that was sent meanwhile and could not be cancelled expires by itself.
    lock.acquire().release()


def test_a_crashed_redis_raises_an_error(start, aliases):
    server = start(Redis())
    aliases(redis=alias(server.port))
    hold = db_lock("key", using="redis").acquire()
    server.crash()
    with pytest.raises(LockBackendError, match=r"a request to Redis at .* failed"):
        db_lock("other", using="redis").acquire()
    with pytest.raises(LockBackendError):
        hold.release()


def test_a_persistent_redis_keeps_its_locks_after_a_crash(
    start, aliases, in_other_thread
):
    server = start(Redis(appendonly="yes", appendfsync="always"))
    aliases(redis=alias(server.port))
    with db_lock("key", using="redis") as hold:
        server.crash()
        server.start()
        assert in_other_thread(db_lock("key", using="redis").try_acquire) is None
        hold.check()
    lock = db_lock("key", using="redis", timeout=0)
    assert in_other_thread(jobs.token_of, lock) > hold.token


def test_a_redis_without_its_data_grants_the_key_again(start, aliases, until):
    """A Redis that loses its data grants the key again, as documented.

    Tokens still grow.
    """
    server = start(Redis())
    process = aliases(redis=alias(server.port, ttl=1.0))
    first, second = process(), process()
    token = first.call(jobs.acquire, "key", using="redis")
    server.crash()
    server.start()
    assert second.call(jobs.acquire, "key", using="redis") > token
    until(lambda: first.call(jobs.check) == "LockLost")
    assert first.call(jobs.release_all) == ["LockLost"]


def test_a_redis_without_its_data_grants_nothing_at_first(start, aliases):
    server = start(Redis())
    process = aliases(redis=alias(server.port, settle=2.0))
    holder, other = process(), process()
    for one in (holder, other):
        # Both processes connect before it matters.
        one.call(jobs.acquire, f"warm {one.process.pid}", using="redis")
    server.crash()
    server.start()
    assert other.call(jobs.acquire, "key", using="redis") == "LockBackendError"
    while (
        token := holder.call(jobs.acquire, "key", using="redis", ttl=2.0)
    ) == "LockBackendError":
        time.sleep(0.1)
    server.crash()
    crashed = time.monotonic()
    server.start()
    while (later := other.call(jobs.acquire, "key", using="redis")) in {
        "LockBackendError",
        "LockTimeout",
    }:
        time.sleep(0.1)
    assert time.monotonic() - crashed > 2.0
    assert later > token


def test_waiters_queue_again_after_redis_lost_its_data(start, aliases):
    """The waiters join the queue again, and all of them are served."""
    server = start(Redis())
    process = aliases(redis=alias(server.port))
    holder, *crowd = [process() for _ in range(4)]
    holder.start(jobs.hold, "key", using="redis")
    tokens = [holder.hear()]
    for number, one in enumerate(crowd):
        one.start(jobs.wait_quietly, "key", using="redis", timeout=60)
        while backends["redis"].waiting("key") != number + 1:
            time.sleep(0.01)
    holder.kill()
    server.crash()
    server.start()
    tokens += sorted(one.hear()[1] for one in crowd)
    assert tokens == sorted(set(tokens))


# Settings and secrets.


def test_without_redis_py_only_the_redis_alias_fails():
    code = """
import sys
sys.modules["redis"] = None
import django
from django.conf import settings
settings.configure(DLOCKS={
    "redis": {"BACKEND": "dlocks.backends.redis.RedisBackend"},
    "default": {"BACKEND": "dlocks.backends.memory.MemoryBackend"},
})
django.setup()
import dlocks.backends.quorum
from dlocks.conf import backends
print(backends["default"])
backends["redis"]
"""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "MemoryBackend" in ended.stdout
    (last,) = ended.stderr.strip().splitlines()[-1:]
    assert "DLOCKS['redis']" in last
    assert "pip install 'dlocks[redis]'" in last


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": f"http://:{SECRET}@host"}, "url is not a URL of Redis"),
        ({"url": f"redis://:{SECRET}/rest@host:1/0"}, "percent-encoded"),
        ({"url": f"redis://:{SECRET}@host:1/shop"}, "url is not a URL of Redis"),
        ({"url": f"redis://:{SECRET}@host:99999"}, "url is not a URL of Redis"),
        ({"url": 6379}, "url must be a string"),
        ({"sentinels": f"redis://:{SECRET}@host"}, "sentinels must be a list"),
        ({"sentinels": [f"{SECRET}@host"]}, "sentinels is not a URL"),
        ({"cluster": 1}, "cluster must be True or False"),
        ({"cluster": True, "url": f"redis://:{SECRET}@host/3"}, "only database 0"),
        (
            {"cluster": True, "sentinels": [f"redis://:{SECRET}@host"]},
            "cannot be combined",
        ),
        ({"socket_timeout": 0}, "socket_timeout must be above 0"),
        ({"secret": SECRET}, "unknown option 'secret'"),
    ],
)
def test_wrong_redis_settings_name_the_alias_and_no_secret(options, message, settings):
    from django.core.checks import run_checks

    settings.DLOCKS = {"redis": {"BACKEND": BACKEND, "OPTIONS": options}}
    with pytest.raises(ImproperlyConfigured, match=message) as raised:
        backends["redis"]
    told = "".join(traceback.format_exception(raised.value))
    assert "DLOCKS['redis']" in told
    assert SECRET not in told
    (check,) = [one for one in run_checks(tags=["dlocks"]) if one.id == "dlocks.E002"]
    assert "redis" in check.msg
    assert SECRET not in f"{check}{check.msg}{check.hint}"


@pytest.mark.parametrize("secret", [SECRET, ""])
def test_wrong_redis_credentials_name_the_alias_and_no_secret(
    secret, start, aliases, caplog
):
    server = start(Redis(requirepass="something else"))
    aliases(redis=alias(server.port, secret))
    with (
        caplog.at_level(logging.DEBUG),
        pytest.raises(LockBackendError, match=r"DLOCKS\['redis'\].*failed") as raised,
    ):
        db_lock("key", using="redis").acquire()
    told = "".join(traceback.format_exception(raised.value)) + caplog.text
    assert SECRET not in told
    assert "something else" not in told


def test_the_redis_password_is_never_shown(start, aliases, caplog):
    server = start(Redis(requirepass=SECRET))
    aliases(redis=alias(server.port, SECRET))
    with caplog.at_level(logging.DEBUG):
        with db_lock("key", using="redis") as hold:
            told = [
                repr(hold),
                repr(backends["redis"]),
                backends["redis"].identity,
                repr(vars(backends["redis"])),
            ]
            told += [repr(backends["redis"]._connected().get_connection_kwargs())]
            told += [str(db_lock("key", using="redis").holder())]
            server.crash()
            with pytest.raises(LockBackendError) as raised:
                hold.check()
            server.start()
            with pytest.raises(LockLost):
                hold.check()
            hold._state.lose("for the test")
            told += traceback.format_exception(raised.value)
            hold._state.lease.ended = True
    assert SECRET not in "".join(told) + caplog.text
