"""Locks in a real Redis: the contract, several processes, and failures."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import signal
import threading
import time
import traceback

import pytest
import redis
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError
from django.test import SimpleTestCase
from django.views.debug import ExceptionReporter

from dlocks import LockBackendError, LockLost, LockStale, db_lock
from dlocks.backends.redis import RedisBackend
from tests import jobs, pages
from tests.contract import BackendContract
from tests.promises.backends.others import REDIS, claim, run
from tests.promises.backends.others import redis as alias
from tests.proxy import Proxy
from tests.servers import PASSWORD, Redis, Sentinel, free_port, redis_url
from tests.timing import eventually, in_time

SECRET = "open-sesame"


@pytest.fixture(autouse=True)
def server(request, redis_server):
    with redis_server.client() as client:
        client.flushall()
    if request.cls is not None:
        request.cls.server = redis_server
    return redis_server


@pytest.fixture
def backend(server):
    return RedisBackend("redis", url=server.url, grace=0.0)


class TestRedis(BackendContract, SimpleTestCase):
    def make_backend(self, **options):
        return RedisBackend("redis", url=self.server.url, **options)


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
    backend.release(kept, rest_for=60.0)
    assert sorted(backend.keys()) == ["kept", "key"]
    assert backend.clear("kept", token)
    assert backend.keys() == ["key"]
    assert backend.acquire(claim("kept")).token > token


def test_a_waiter_does_not_overwrite_a_key_that_never_expires(server, backend):
    """Another program, or an operator, has set it."""
    holder, waiter = claim(), claim()
    backend.acquire(holder)
    backend.enqueue(waiter)
    with server.client() as client:
        client.set("dlocks:{key}", "maintenance")
        assert backend.poll([waiter])[waiter.owner].grant is None
        assert client.get("dlocks:{key}") == b"maintenance"
        client.delete("dlocks:{key}")
    assert backend.poll([waiter])[waiter.owner].grant


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


def test_a_stale_key_is_not_taken_over_without_takeover(backend):
    backend.acquire(claim(ttl=1.0))
    waits = claim(takeover=False)
    backend.enqueue(waits)
    eventually(lambda: backend.holder("key").stale)
    # Redis expires the key up to a millisecond after the end of its lease.
    with pytest.raises(LockStale, match="somebody"):
        eventually(lambda: backend.acquire(claim(takeover=False)))
    assert backend.poll([waits])[waits.owner].must_retry


def test_a_released_key_expires_from_redis_after_a_day(server, backend):
    mine, waits = claim(), claim()
    backend.acquire(mine)
    backend.enqueue(waits)
    backend.release(mine)
    backend.release(waits)
    with server.client() as client:
        left = [client.ttl(name) for name in client.scan_iter()]
    assert left
    assert all(0 < seconds <= 86400 for seconds in left)


def test_deleting_a_redis_key_frees_it_and_its_holder_loses_it(
    server, aliases, in_other_thread
):
    aliases(redis=alias(server))
    hold = db_lock("stock:7", using="redis").acquire()
    with server.client() as client:
        assert client.delete("dlocks:{stock:7}") == 1
    lock = db_lock("stock:7", using="redis", timeout=0)
    assert in_other_thread(jobs.token_of, lock) > hold.token
    with pytest.raises(LockLost):
        hold.renew()


def test_the_documented_redis_acl_is_sufficient(server, aliases, backend, until):
    ((rights, more),) = re.findall(
        r"An ACL needs `([^`]*)`\. Add `([^`]*)` for `settle`",
        (pages.DOCS / "how-to/redis.md").read_text(),
    )
    with server.client() as client:
        client.execute_command(
            "ACL SETUSER", "dlocks", "reset", "on", f">{SECRET}", *rights.split(), more
        )
        # A Redis that has just started grants nothing yet. It reports its uptime in
        # whole seconds.
        until(lambda: client.info("server")["uptime_in_seconds"] >= 1)
    login = {"username": "dlocks", "password": SECRET}
    options = {"url": f"redis://127.0.0.1:{server.port}/0", **login, "settle": 0.1}
    aliases(redis={"BACKEND": REDIS, "OPTIONS": options})
    lock = db_lock("key", using="redis", timeout=20)
    hold = lock.acquire()
    thread = threading.Thread(target=lambda: lock.acquire().release())
    thread.start()
    until(lambda: backend.waiting("key") == 1)
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


def test_a_late_request_of_a_released_claim_is_ignored(backend):
    """No caller would renew or release what it acquires."""
    late = claim()
    assert backend.acquire(late)
    assert backend.release(late)
    assert backend.acquire(late) is None
    other = claim()
    assert backend.acquire(other)
    backend.enqueue(late)
    assert backend.waiting("key") == 0
    assert backend.release(other)


def test_a_late_request_of_a_claim_that_was_handed_over_is_ignored(backend):
    """No caller would renew or release what it acquires."""
    late, resumed = claim(), claim()
    assert backend.acquire(late)
    for _ in range(2):
        assert backend.exchange(late, resumed)
    assert backend.release(resumed)
    assert backend.acquire(late) is None
    assert backend.acquire(claim())


def test_a_key_lost_before_a_repeated_release_is_lost(
    server, aliases, backend, monkeypatch
):
    """The first request has not arrived, and the second one finds another holder."""
    aliases(redis=alias(server))
    hold = db_lock("stock:7", using="redis").acquire()
    with server.client() as client:
        client.delete("dlocks:{stock:7}")
    assert backend.acquire(claim("stock:7"))
    send, cut = redis.Connection.send_packed_command, []

    def send_later(connection, *arguments, **options):
        if not cut:
            cut.append(connection)
            connection.disconnect()
            raise redis.ConnectionError("cut")
        return send(connection, *arguments, **options)

    monkeypatch.setattr(redis.Connection, "send_packed_command", send_later)
    with pytest.raises(LockLost):
        hold.release()
    assert cut


def test_an_interrupted_request_leaves_its_reply_to_no_other(
    server, backend, monkeypatch, threads
):
    """A signal strikes before the reply is read, and the connection is used again."""
    assert backend.acquire(claim("taken"))
    proxy = Proxy(server.port)
    mine = RedisBackend("redis", url=redis_url(proxy.port, PASSWORD))
    mine.waiting("key")

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    proxy.late.set()
    with monkeypatch.context() as patched:
        patched.setattr(redis.Connection, "read_response", interrupt)
        with pytest.raises(KeyboardInterrupt):
            mine.acquire(claim("free"))
    trying = threads(lambda: mine.acquire(claim("taken")))
    trying.join(0.5)
    assert trying.is_alive()
    proxy.late.clear()
    trying.join(30)
    assert trying.results == [None]
    proxy.close()


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
            client.set(f"dlocks:{{{refused.key}}}:last", "something else")
        # The key that could not be renewed keeps its previous lease.
        assert backend.renew(claims) == {
            each.owner: 0.0 if each is refused else each.ttl for each in claims
        }
        assert f"{refused.key!r} could not be renewed: WRONGTYPE" in caplog.text
        with pytest.raises(LockBackendError, match="WRONGTYPE"):
            backend.renew([refused])


def test_a_request_whose_reply_is_lost_has_its_effect_once(server, backend):
    """It is sent again, and its reply is that of the first time."""
    proxy = Proxy(server.port)
    mine = RedisBackend("redis", url=redis_url(proxy.port, PASSWORD), grace=0.0)

    @contextlib.contextmanager
    def lost():
        mine.waiting("key")
        proxy.swallow(b"EVALSHA")
        yield
        assert proxy.swallowed.wait(10)

    # Redis knows the scripts then.
    one, waits = claim("warm"), claim("warm")
    token = mine.acquire(one).token
    mine.enqueue(waits)
    mine.clear("warm", token)
    mine.release(waits)
    one, waits = claim(), claim()
    with lost():
        grant = mine.acquire(one)
    assert grant.token == backend.holder("key").token
    assert backend.acquire(claim()) is None
    with lost():
        assert mine.enqueue(waits).position
    assert backend.waiting("key") == 1
    with lost():
        assert mine.release(one)
    grant = backend.poll([waits])[waits.owner].grant
    assert grant
    with lost():
        assert mine.clear("key", grant.token)
    assert backend.holder("key") is None
    assert backend.acquire(claim())
    proxy.close()


def test_a_discarded_backend_closes_its_connections(server, settings, aliases, until):
    """A test suite changes its settings often, and leaves no open socket."""
    aliases(redis=alias(server))
    with server.client() as client:

        def ids():
            return {one["id"] for one in client.client_list()}

        before = ids()
        with db_lock("key", using="redis"):
            opened = ids() - before
        assert opened
        settings.DLOCKS = {}
        gc.collect()
        until(lambda: not opened & ids())


def test_a_silent_redis_fails_in_bounded_time(start, aliases):
    """It accepts connections but does not reply, which is no contention."""
    server = start(Redis())
    aliases(redis=alias(server, socket_timeout=1.0, ttl=1.0))
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
    aliases(redis=alias(server))
    hold = db_lock("key", using="redis").acquire()
    server.crash()
    with pytest.raises(LockBackendError, match=r"a request to Redis at .* failed"):
        db_lock("other", using="redis").acquire()
    with pytest.raises(LockBackendError):
        hold.release()
    with pytest.raises(CommandError, match="a request to Redis at .* failed"):
        run("list_locks", using="redis")


# Restarts.


def test_a_persistent_redis_keeps_its_locks_after_a_crash(
    start, aliases, in_other_thread
):
    server = start(Redis(appendonly="yes", appendfsync="always"))
    aliases(redis=alias(server))
    with db_lock("key", using="redis") as hold:
        server.crash()
        server.start()
        assert in_other_thread(db_lock("key", using="redis").try_acquire) is None
        hold.check()
    lock = db_lock("key", using="redis", timeout=0)
    assert in_other_thread(jobs.token_of, lock) > hold.token


def test_a_redis_without_its_data_grants_the_key_again(start, aliases, until):
    """This is documented. Tokens still grow."""
    server = start(Redis())
    process = aliases(redis=alias(server, ttl=1.0))
    first, second = process(), process()
    token = first.call(jobs.acquire, "key", using="redis")
    server.crash()
    server.start()
    assert second.call(jobs.acquire, "key", using="redis") > token
    until(lambda: first.call(jobs.check) == "LockLost")
    assert first.call(jobs.release_all) == ["LockLost"]


def test_a_redis_without_its_data_grants_nothing_at_first(start, aliases):
    server = start(Redis())
    process = aliases(redis=alias(server, settle=2.0))
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


def test_waiters_queue_again_after_redis_lost_its_data(start, aliases, until):
    """All of them are served."""
    server = start(Redis())
    process = aliases(redis=alias(server))
    backend = RedisBackend("redis", url=server.url)
    holder, *crowd = [process() for _ in range(4)]
    tokens = [holder.call(jobs.hold, "key", using="redis")]
    for number, one in enumerate(crowd, 1):
        one.start(jobs.wait_quietly, "key", using="redis", timeout=60)
        until(lambda number=number: backend.waiting("key") == number, seconds=60)
    holder.kill()
    server.crash()
    server.start()
    tokens += sorted(one.hear()[1] for one in crowd)
    assert tokens == sorted(set(tokens))


# Passwords.


def test_redis_passwords_are_never_shown(start, aliases, caplog):
    """Neither a right one, nor a wrong one, nor that of the server."""
    server, told = start(Redis(requirepass=SECRET)), []
    lock = db_lock("key", using="redis")
    with caplog.at_level(logging.DEBUG):
        for wrong in (f"wrong-{SECRET}", ""):
            url = redis_url(server.port, wrong)
            aliases(redis={"BACKEND": REDIS, "OPTIONS": {"url": url}})
            with pytest.raises(
                LockBackendError, match=r"DLOCKS\['redis'\].*failed"
            ) as raised:
                lock.acquire()
            told += traceback.format_exception(raised.value)
        aliases(redis=alias(server))
        backend = RedisBackend("redis", url=server.url)
        hold = lock.acquire()
        told += [repr(hold), str(lock.holder()), repr(backend), backend.identity]
        told.append(repr(vars(backend)))
        server.crash()
        with pytest.raises(LockBackendError) as raised:
            hold.check()
        told += traceback.format_exception(raised.value)
        server.start()
        with pytest.raises(LockLost):
            hold.check()
        with pytest.raises(LockLost) as raised:
            hold.release()
        told += traceback.format_exception(raised.value)
    assert SECRET not in "".join(told) + caplog.text


def mailed(raised):
    """Return what Django's error mails contain, without the frame of the test."""
    parts = raised.type, raised.value, raised.tb.tb_next
    reporter = ExceptionReporter(None, *parts)
    return reporter.get_traceback_text() + reporter.get_traceback_html()


def test_error_mails_contain_neither_passwords_nor_owners(start, aliases):
    """The frames of an error are those of dlocks and of redis-py.

    The option ``password`` is hidden in the settings as well, and a URL is not.
    """
    server, mails = start(Redis(requirepass=SECRET)), []
    lock, mine = db_lock("key", using="redis"), claim("other")

    def configure(password):
        options = {"url": f"redis://127.0.0.1:{server.port}", "password": password}
        aliases(redis={"BACKEND": REDIS, "OPTIONS": options})
        return RedisBackend("redis", **options)

    with pytest.raises(ValueError, match="not a URL of Redis") as raised:
        RedisBackend("redis", url=f"redis://:{SECRET}@host/shop")
    mails.append(mailed(raised))
    configure(f"wrong-{SECRET}")
    with pytest.raises(LockBackendError) as raised:
        lock.acquire()
    mails.append(mailed(raised))
    backend = configure(SECRET)
    assert backend.acquire(mine)
    hold = lock.acquire()
    server.crash()
    for ask in (
        hold.check,
        lambda: backend.acquire(mine),
        lambda: backend.renew([mine]),
        lambda: backend.release(mine),
        lambda: backend.clear("other", 1),
        lambda: backend.enqueue(mine),
        lambda: backend.poll([mine]),
    ):
        with pytest.raises(LockBackendError) as raised:
            ask()
        mails.append(mailed(raised))
    for mail in mails:
        assert "dlocks/backends/redis/" in mail
        assert SECRET not in mail
        assert mine.owner not in mail
    server.start()
    with pytest.raises(LockLost):
        hold.release()


def client_of_a_project(**keywords):
    return redis.Redis(password=PASSWORD, **keywords, **client_of_a_project.where)


def test_a_project_can_make_its_own_client(server, settings):
    path, lock = f"{__name__}.client_of_a_project", db_lock("key", using="redis")
    settings.DLOCKS = {"redis": {"BACKEND": REDIS, "OPTIONS": {"client": path}}}
    client_of_a_project.where = {"port": server.port}
    with lock as hold:
        assert RedisBackend("redis", url=server.url).holder("key").token == hold.token
    settings.DLOCKS = dict(settings.DLOCKS)
    client_of_a_project.where = {"port": free_port()}
    with pytest.raises(LockBackendError, match=f"Redis of {path} failed"):
        lock.acquire()
    settings.DLOCKS = {
        "redis": {"BACKEND": REDIS, "OPTIONS": {"client": "collections.Counter"}}
    }
    with pytest.raises(ImproperlyConfigured, match=r"Counter must return a redis\.Red"):
        lock.acquire()


def test_servers_refuse_requests_without_the_password(server, start):
    """Other users of the machine cannot use a Redis or a Sentinel of the tests."""
    for each in server, start(Sentinel(server.port)):
        for password in None, "wrong":
            with redis.Redis(port=each.port, password=password) as client:
                with pytest.raises(redis.AuthenticationError):
                    client.ping()
        with each.client() as client:
            assert client.ping()
