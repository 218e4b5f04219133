"""Locks in a real Redis: the contract, several processes, and failures."""

from __future__ import annotations

import contextlib
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
from django.test import SimpleTestCase

from dlocks import (
    LockBackendError,
    LockLost,
    LockStale,
    db_lock,
)
from tests import jobs
from tests.contract import BackendContract
from tests.internals import (
    Claim,
    RedisBackend,
    backends,
    check_settings,
    name_of,
    scripts,
)
from tests.proxy import Proxy
from tests.servers import PASSWORD, Redis, Sentinel
from tests.timing import eventually, in_time
from tests.volume import volume

BACKEND = "dlocks.backends.redis.RedisBackend"
SECRET = "open-sesame"


def url(port, secret=PASSWORD):
    return f"redis://{f':{secret}@' if secret else ''}127.0.0.1:{port}/0"


def alias(port, secret=PASSWORD, **options):
    return {"BACKEND": BACKEND, "OPTIONS": {"url": url(port, secret), **options}}


def claim(key="key", **options):
    return Claim(key=key, **{"ttl": 30.0, "holder": "somebody", **options})


@pytest.fixture(autouse=True)
def server(request, redis_server):
    with redis_server.client() as client:
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


def test_commands_list_and_clear_the_locks_of_other_processes(server, aliases, backend):
    """Odd characters in keys are shown, and keys of other prefixes are not.

    A cleared lock goes to the first waiter. Its former holder learns of it at its next
    renewal, and tokens still grow.
    """
    process = aliases(redis=alias(server.port, prefix="a[*]}:", ttl=1))()
    process.start(jobs.hold_until_lost, "stock:7", using="redis")
    token = process.hear()
    odd = claim("a[*]}:%7D {ü}*")
    backend.acquire(odd)
    backend.acquire(claim("b:other"))
    backend.enqueue(claim(odd.key, holder="next"))
    _, first, stock = run("list_locks").splitlines()
    assert re.fullmatch(r"%7D \{ü\}\* +held +1 +somebody +\d+s +\d+s", first)
    assert re.search(r"^stock:7 +held +0 +\S+ +\d+s +\ds$", stock)
    (lock,) = json.loads(run("list_locks", "stock:*", "--json"))
    assert (lock["token"], lock["waiting"]) == (token, 0)
    waits = claim("a[*]}:stock:7", holder="next")
    backend.enqueue(waits)
    with pytest.raises(CommandError, match="is held. To force its release, pass"):
        run("clear_lock", "stock:7", "--yes")
    out = run("clear_lock", "stock:7", "--yes", "--reason", "tests")
    assert re.search(r"'stock:7' was cleared. It is now held by next for .*", out)
    grant = backend.poll([waits])[waits.owner].grant
    assert grant.token > token
    # The loss was reported.
    assert process.hear()
    backend.release(waits)
    assert backend.acquire(claim(waits.key)).token > grant.token
    backends["redis"].acquire(claim("a[*]}:crashed", ttl=0.001, takeover=False))
    eventually(lambda: backend.holder("a[*]}:crashed").stale)
    out = run("clear_lock", "crashed", "--stale-only", "--yes")
    assert "'crashed' is stale: held by somebody" in out
    assert "'crashed' was cleared and is free." in out


def test_only_the_hold_that_was_shown_is_cleared(backend):
    """It may be live, or stale, or kept after its release."""
    first, second = claim(), claim()
    token = backend.acquire(first).token
    assert not backend.clear("key", token + 1)
    assert not backend.clear("free", token)
    backend.release(first)
    backend.acquire(second)
    assert not backend.clear("key", token)
    assert backend.verify([second], 1)
    token = backend.acquire(claim("crashed", ttl=0.001)).token
    eventually(lambda: backend.holder("crashed").stale)
    assert backend.clear("crashed", token)
    assert backend.holder("crashed") is None
    kept = claim("kept")
    token = backend.acquire(kept).token
    backend.release(kept, keep=60.0)
    assert sorted(backend.keys()) == ["kept", "key"]
    assert backend.clear("kept", token)
    assert backend.keys() == ["key"]
    assert backend.acquire(claim("kept")).token > token


# Processes.


def test_processes_lose_no_updates_of_an_unguarded_counter(
    server, aliases, count_together
):
    process = aliases(redis=alias(server.port))
    count_together([process() for _ in range(4)], volume(30), using="redis")


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


def test_a_stale_key_is_not_taken_over_without_takeover(backend):
    backend.acquire(claim(ttl=1.0))
    waits = claim(takeover=False)
    backend.enqueue(waits)
    eventually(lambda: backend.holder("key").stale)
    with pytest.raises(LockStale, match="somebody"):
        backend.acquire(claim(takeover=False))
    assert backend.poll([waits])[waits.owner].must_retry


def test_all_names_of_a_key_are_in_one_cluster_slot():
    from redis.crc import key_slot

    for key in ("stock:7", "}", "{}", "a}b{c}", "%7D", "ß}"):
        names = [
            name_of(key) + more for more in ("", ":last", ":line", ":claims", ":gone")
        ]
        assert len({key_slot(name.encode()) for name in names}) == 1
    assert name_of("%7D") != name_of("}")


def test_a_released_key_expires_from_redis_after_a_day(server, backend):
    mine = claim()
    backend.acquire(mine)
    backend.enqueue(claim())
    backend.release(mine)
    with server.client() as client:
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


def test_an_open_block_keeps_a_hold_whose_thread_has_ended(
    server, aliases, threads, until
):
    """After the block, nothing uses the other hold of that thread, and it is lost."""
    aliases(redis=alias(server.port))
    used, unused = (db_lock(key, using="redis") for key in ("used", "unused"))
    acquired = threads(lambda: [used.acquire(), unused.acquire()])
    acquired.join(20)
    hold, orphan = acquired.results[0]
    with hold:
        until(lambda: not unused.locked())
        hold.check()
        assert used.locked()
        with pytest.raises(LockLost, match="its thread has ended"):
            orphan.release()
    assert not used.locked()


def test_deleting_a_redis_key_frees_it_and_its_holder_loses_it(
    server, aliases, in_other_thread
):
    aliases(redis=alias(server.port))
    hold = db_lock("stock:7", using="redis").acquire()
    with server.client() as client:
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
    with server.client() as client:
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
    """It neither acquires the key, nor joins the queue, nor receives a hold."""
    late, other = claim(), claim()
    assert not backend.release(late)
    assert backend.acquire(late) is None
    assert backend.acquire(other)
    backend.enqueue(late)
    assert backend.waiting("key") == 0
    assert backend.exchange(other, late) is None
    assert other.owner in backend.renew([other])
    assert backend.release(other)
    assert backend.acquire(claim())


def test_different_redis_servers_have_different_identities():
    """Otherwise a hold in one Redis would count as a hold in the other."""
    for options in [
        ({"url": f"redis://h:6379?db={number}"} for number in "12"),
        ({"url": f"unix:///r.sock?db={number}"} for number in "12"),
        ({"url": "redis://m", "sentinels": [f"redis://{name}:1"]} for name in "ab"),
    ]:
        one, other = options
        mine = RedisBackend("one", **one).identity
        assert mine != RedisBackend("other", **other).identity
        assert mine == RedisBackend("same", **one).identity


def test_a_script_that_redis_has_flushed_is_sent_again(server, backend):
    mine = [claim(f"key {number}") for number in range(3)]
    for one in mine:
        backend.acquire(one)
    with server.client() as client:
        client.script_flush()
        assert len(backend.renew(mine)) == 3
        client.script_flush()
    assert backend.release(mine[0])


def test_an_overwritten_key_does_not_block_other_renewals(server, backend, caplog):
    for spoiled in (0, 1):
        claims = [claim(f"{spoiled} {number}") for number in range(3)]
        for each in claims:
            assert backend.acquire(each)
        refused = claims[spoiled]
        with server.client() as client:
            client.set(f"{name_of(refused.key)}:last", "something else")
        # The key that could not be renewed keeps its previous lease.
        assert backend.renew(claims) == {
            each.owner: 0.0 if each is refused else each.ttl for each in claims
        }
        assert f"{refused.key!r} could not be renewed: WRONGTYPE" in caplog.text
        with pytest.raises(LockBackendError, match="WRONGTYPE"):
            backend.renew([refused])


@pytest.fixture
def proxied(server):
    proxy = Proxy(server.port)
    yield proxy, RedisBackend("redis", url=url(proxy.port), grace=0.0)
    proxy.close()


def test_a_request_whose_reply_is_lost_has_its_effect_once(server, proxied, backend):
    """It is sent again, and its reply is that of the first time."""
    proxy, mine = proxied
    client = server.client()

    @contextlib.contextmanager
    def lost(script):
        mine.waiting("key")
        client.script_load(script.text)
        proxy.swallow(script.sha.encode())
        yield
        assert proxy.swallowed.wait(10)

    one, waits = claim(), claim()
    with client:
        with lost(scripts.ACQUIRE):
            grant = mine.acquire(one)
        assert grant.token == backend.holder("key").token
        assert backend.acquire(claim()) is None
        with lost(scripts.QUEUE):
            assert mine.enqueue(waits).position
        assert backend.waiting("key") == 1
        with lost(scripts.RELEASE):
            assert mine.release(one)
        grant = backend.poll([waits])[waits.owner].grant
        assert grant
        with lost(scripts.RELEASE):
            assert mine.clear("key", grant.token)
        assert backend.holder("key") is None
        assert backend.acquire(claim())


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
    with pytest.raises(CommandError, match="a request to Redis at .* failed"):
        run("list_locks")


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


WRONG = [
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
]


def test_wrong_redis_settings_name_the_alias_and_no_secret(settings):
    for options, message in WRONG:
        settings.DLOCKS = {"redis": {"BACKEND": BACKEND, "OPTIONS": options}}
        with pytest.raises(ImproperlyConfigured, match=message) as raised:
            backends["redis"]
        told = "".join(traceback.format_exception(raised.value))
        assert "DLOCKS['redis']" in told
        (check,) = [one for one in check_settings() if one.id == "dlocks.E002"]
        assert "redis" in check.msg
        assert SECRET not in f"{told}{check}{check.msg}{check.hint}", options


def test_redis_passwords_are_never_shown(start, aliases, caplog):
    """Neither a right one, nor a wrong one, nor that of the server."""
    server, told = start(Redis(requirepass=SECRET)), []
    with caplog.at_level(logging.DEBUG):
        for wrong in ("wrong", ""):
            aliases(redis=alias(server.port, wrong and f"{wrong}-{SECRET}"))
            with pytest.raises(
                LockBackendError, match=r"DLOCKS\['redis'\].*failed"
            ) as raised:
                db_lock("key", using="redis").acquire()
            told += traceback.format_exception(raised.value)
        aliases(redis=alias(server.port, SECRET))
        with db_lock("key", using="redis") as hold:
            backend = backends["redis"]
            told += [repr(hold), repr(backend), backend.identity, repr(vars(backend))]
            told += [repr(backend._connected().get_connection_kwargs())]
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


def test_servers_refuse_requests_without_the_password(server, start):
    """Other users of the machine cannot use a Redis or a Sentinel of the tests."""
    for each in server, start(Sentinel(server.port)):
        for password in None, "wrong":
            with redis.Redis(port=each.port, password=password) as client:
                with pytest.raises(redis.AuthenticationError):
                    client.ping()
        with each.client() as client:
            assert client.ping()
