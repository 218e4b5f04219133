"""What the pages about other locks claim, with the real packages beside dlocks.

The rows of their tables are quoted in the comments. ``make nightly`` installs the
packages, which are those of the group "bench".
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError, connection, transaction
from django.test import modify_settings, override_settings
from django.utils import timezone

from dlocks import (
    LockStale,
    LockTimeout,
    db_lock,
    db_rwlock,
    run_once,
)
from dlocks.testing import abandoned, frozen_clock, override_locks
from tests import servers

pytestmark = [
    pytest.mark.once,
    pytest.mark.nightly,
    pytest.mark.engine("postgresql"),
    pytest.mark.django_db(transaction=True),
]

# redis-py


@pytest.fixture(scope="module")
def redis_server():
    pytest.importorskip("redis")
    with servers.Redis() as server:
        yield server


@pytest.fixture
def client(redis_server):
    with redis_server.client() as client:
        yield client
        client.flushall()


def test_a_lease_of_redis_py_ends_in_its_block(client, until):
    """``timeout`` | ``ttl``, renewed while the block runs."""
    from redis.exceptions import LockNotOwnedError

    with db_lock("stock:7", ttl=0.4) as hold:
        # LockNotOwnedError | LockLost
        with pytest.raises(LockNotOwnedError), client.lock("stock:7", timeout=0.4):
            until(lambda: not client.exists("stock:7"))
        hold.check()
        assert hold.held
    # timeout=None | takeover=False, or a long ttl
    with client.lock("stock:7", timeout=None):
        assert client.pttl("stock:7") == -1


def test_redis_py_waits_as_dlocks_does(client, in_other_thread):
    from redis.exceptions import LockError

    with client.lock("stock:7") as lock, db_lock("stock:7") as hold:
        # blocking_timeout | timeout; LockError when busy | LockTimeout
        with pytest.raises(LockError), client.lock("stock:7", blocking_timeout=0.1):
            raise AssertionError
        with pytest.raises(LockTimeout):
            in_other_thread(db_lock("stock:7", timeout=0.1).acquire)
        # blocking_timeout=None, its default | timeout=None
        assert client.lock("stock:7").blocking_timeout is None
        # blocking=False | try_acquire(timeout=…) returns None
        assert client.lock("stock:7").acquire(blocking=False) is False
        assert client.lock("stock:7").acquire(blocking_timeout=0.1) is False
        assert in_other_thread(db_lock("stock:7").try_acquire) is None
        later = partial(db_lock("stock:7").try_acquire, timeout=0.1)
        assert in_other_thread(later) is None
        # owned() | hold.held, or hold.check(); locked() | lock.locked(), lock.holder()
        assert lock.owned()
        assert lock.locked()
        assert hold.held
        assert db_lock("stock:7").locked()
        assert db_lock("stock:7").holder().token == hold.token
        # local.token | hold.owner; hold.token is a growing number
        before, token = lock.local.token, hold.token
    with client.lock("stock:7") as lock, db_lock("stock:7") as hold:
        assert lock.local.token != before
        assert hold.token > token


def test_redis_py_extends_a_lease_by_hand(client):
    """``extend()``, ``reacquire()`` | automatic; ``hold.renew(ttl=…)``."""
    with client.lock("stock:7", timeout=5) as lock, db_lock("stock:7", ttl=5) as hold:
        lock.extend(50, replace_ttl=True)
        hold.renew(ttl=50)
        assert client.pttl("stock:7") > 40_000
        assert hold.remaining > 40
        lock.reacquire()
        assert client.pttl("stock:7") <= 5000


def test_a_nested_lock_of_redis_py_is_busy(client):
    """There it is busy, and here entered, unless ``reentrant=False``."""
    with client.lock("stock:7"), db_lock("stock:7"):
        assert not client.lock("stock:7").acquire(blocking=False)
        with db_lock("stock:7", timeout=0) as hold:
            assert hold.count == 2
    with db_lock("stock:8", reentrant=False):
        assert db_lock("stock:8", reentrant=False).try_acquire() is None


def test_the_expiry_of_redis_py_is_a_pause(client, until):
    """A lock that expires without a release | ``min_hold``, or ``run_once()``."""

    def taken():
        return client.lock("mail", timeout=1).acquire(blocking=False)

    def entered():
        with contextlib.suppress(LockTimeout), db_lock("mail", min_hold=60, timeout=0):
            return True
        return False

    got = [taken(), taken()]
    until(lambda: not client.exists("mail"))
    assert [*got, taken(), taken()] == [True, False, True, False]
    job = run_once("job", min_hold=60)(lambda: True)
    with override_locks(), frozen_clock() as clock:
        assert [entered(), entered(), job(), job()] == [True, False, True, None]
        clock.tick(61)
        assert [entered(), entered(), job(), job()] == [True, False, True, None]
    # The idiom itself is another here: the hold is renewed, and entered again.
    held = [db_lock("key").try_acquire() for _ in range(3)]
    assert [hold.held for hold in held] == [True] * 3
    for hold in held:
        hold.release()


def test_other_threads_release_locks_of_redis_py(client, in_other_thread):
    """``thread_local=False`` | always: ``hold.release()`` in any thread."""
    lock = client.lock("stock:7")
    assert lock.acquire()
    # That thread has no token.
    with pytest.raises(AttributeError):
        in_other_thread(lock.release)
    lock.release()
    lock = client.lock("stock:7", thread_local=False)
    assert lock.acquire()
    in_other_thread(lock.release)
    in_other_thread(db_lock("stock:7").acquire().release)
    assert not client.exists("stock:7")
    assert not db_lock("stock:7").locked()


async def test_coroutines_lock_with_redis_py(redis_server):
    """``redis.asyncio.lock.Lock`` | ``async with``."""
    from redis.asyncio import Redis

    async with Redis.from_url(redis_server.url) as client, client.lock("stock:7"):
        async with db_lock("stock:7") as hold:
            assert hold.held


# kazoo


@pytest.fixture(scope="module")
def zookeeper():
    client = pytest.importorskip("kazoo.client")
    with servers.ZooKeeper(**servers.BRISK) as server:
        client = client.KazooClient(f"127.0.0.1:{server.port}")
        client.start()
        yield client
        client.stop()
        client.close()


def test_a_nested_lock_of_kazoo_is_busy(zookeeper, threads, until):
    """Its ``contenders()`` are ``lock.holders()`` and ``lock.waiters()``."""
    from kazoo.exceptions import LockTimeout as KazooTimeout

    with zookeeper.Lock("/stock:7", "web-1"), db_lock("stock:7"):
        again = zookeeper.Lock("/stock:7", "web-2")
        with pytest.raises(KazooTimeout):
            again.acquire(timeout=0.1)
        assert again.acquire(blocking=False) is False
        with db_lock("stock:7", timeout=0) as hold:
            assert hold.count == 2
        assert again.contenders() == ["web-1"]
        waits = threads(lambda: db_lock("stock:7").acquire().release())
        until(db_lock("stock:7").waiters)
        assert len(db_lock("stock:7").holders()) == 1
    waits.join(30)


# django-db-mutex


@pytest.fixture
def mutex():
    pytest.importorskip("db_mutex")
    with modify_settings(INSTALLED_APPS={"append": "db_mutex"}):
        from db_mutex.db_mutex import db_mutex
        from db_mutex.models import DBMutex

        with connection.schema_editor() as editor:
            editor.create_model(DBMutex)
        yield db_mutex
        with connection.schema_editor() as editor:
            editor.delete_model(DBMutex)


def make_older(seconds):
    from db_mutex.models import DBMutex

    DBMutex.objects.update(creation_time=timezone.now() - timedelta(seconds=seconds))


def test_a_busy_db_mutex_does_not_wait(mutex, in_other_thread, caplog):
    """``db_mutex(key)`` does not wait | ``timeout=0``."""
    from db_mutex.exceptions import DBMutexError

    with mutex("report"), db_lock("report"):
        # A nested call is busy | it enters, unless reentrant=False
        with pytest.raises(DBMutexError):
            mutex("report").start()
        with db_lock("report", timeout=0):
            pass
        with pytest.raises(LockTimeout):
            in_other_thread(db_lock("report", timeout=0).acquire)
        # suppress_acquisition_exceptions=True | @db_lock(key, timeout=0, busy="skip")
        skips = mutex("report", suppress_acquisition_exceptions=True)(lambda: "built")
        assert skips() is None
        skips = db_lock("report", timeout=0, busy="skip")(lambda: "built")
        assert in_other_thread(skips) is None
    # start(), stop() | lock.acquire(), hold.release()
    one = mutex("report")
    one.start()
    one.stop()
    db_lock("report").acquire().release()
    assert "Could not acquire lock" in caplog.text


def test_the_ttl_of_db_mutex_limits_the_work(mutex):
    """``DB_MUTEX_TTL_SECONDS`` (30 minutes) | ``ttl`` is renewed."""
    from db_mutex.exceptions import DBMutexError, DBMutexTimeoutError

    assert mutex("report").get_mutex_ttl_seconds() == 30 * 60
    with pytest.raises(DBMutexTimeoutError), mutex("report"):
        make_older(31 * 60)
        with mutex("report"):
            pass
    # Expiry without stop() is a pause | min_hold, or run_once()
    got = []
    for age in (0, 0, 31 * 60, 0):
        make_older(age)
        try:
            mutex("report").start()
            got.append(True)
        except DBMutexError:
            got.append(False)
    assert got == [True, False, True, False]
    # DB_MUTEX_TTL_SECONDS = None | takeover=False: LockStale after a crash
    with override_settings(DB_MUTEX_TTL_SECONDS=None):
        make_older(10**6)
        with pytest.raises(DBMutexError):
            mutex("report").start()
    abandoned("report")
    with pytest.raises(LockStale):
        db_lock("report", takeover=False, timeout=0).acquire()


def test_db_mutex_uses_the_clock_of_its_host(mutex, monkeypatch):
    """Hosts' clocks | the database's clock."""
    from db_mutex.exceptions import DBMutexTimeoutError

    late = timezone.now() + timedelta(hours=1)
    with (
        db_lock("report", timeout=0) as hold,
        pytest.raises(DBMutexTimeoutError),
        mutex("report"),
    ):
        monkeypatch.setattr(timezone, "now", lambda: late)
        with mutex("report"):
            pass
        hold.check()


# django-pglock, and django-pgware, the successor of django-pglocks


@pytest.fixture
def pglock():
    return pytest.importorskip("pglock")


@pytest.fixture
def advisory_lock():
    return pytest.importorskip("django_pg_utils.locks").advisory_lock


def test_a_busy_advisory_lock_is_not_acquired(pglock, in_other_thread):
    """``as acquired`` | ``try_acquire()``, which returns a hold or ``None``."""

    def acquired():
        with pglock.advisory("import", timeout=0) as acquired:
            return acquired

    def refused():
        with pglock.advisory("import", timeout=0, side_effect=pglock.Raise):
            raise AssertionError

    skips = pglock.advisory("import", timeout=0, side_effect=pglock.Skip)(lambda: "ran")
    skips_here = db_lock("import", timeout=0, busy="skip")(lambda: "ran")
    # The two do not exclude each other, so old and new code acquire both.
    with pglock.advisory("import"), db_lock("import"):
        assert in_other_thread(acquired) is False
        assert in_other_thread(db_lock("import").try_acquire) is None
        # side_effect=pglock.Raise: OperationalError | LockTimeout
        with pytest.raises(OperationalError):
            in_other_thread(refused)
        with pytest.raises(LockTimeout):
            in_other_thread(db_lock("import", timeout=0).acquire)
        assert in_other_thread(skips) is in_other_thread(skips_here) is None
        # Both are reentrant.
        assert acquired()
        with db_lock("import", timeout=0) as hold:
            assert hold.count == 2
    # no ID, or numbers | a string
    assert pglock.advisory()(lambda: "ran")() == "ran"
    with pytest.raises(TypeError, match="must be a string"):
        db_lock(7)
    for name in ("model", "timeout", "prioritize"):
        assert hasattr(pglock, name)


def test_an_advisory_lock_waits_without_limit(pglock, advisory_lock, threads, until):
    """The default is ``timeout=None`` there, and 10 seconds here."""

    def wait(lock):
        with lock:
            return time.monotonic()

    for lock in (pglock.advisory, advisory_lock):
        with lock("import"), db_lock("import"):
            waiting = threads(lambda lock=lock: wait(lock("import")))
            until(lambda: waits_in_postgresql() == 1)
            released = time.monotonic()
        waiting.join(30)
        assert waiting.results[0] >= released
    with db_lock("import"):
        limited = threads(lambda: wait(db_lock("import")))
        with pytest.raises(LockTimeout) as caught:
            limited.join(30)
    assert caught.value.timeout == 10


def waits_in_postgresql():
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        )
        return cursor.fetchone()[0]


def test_an_advisory_lock_in_a_transaction(pglock, in_other_thread):
    """``xact=True`` | a lock inside ``atomic()``.

    Inside an outer ``atomic()``, ``db_lock`` keeps its key until the commit.
    ``pglock.advisory`` without ``xact=True`` does not.
    """

    def is_free(**options):
        with pglock.advisory("import", timeout=0) as acquired:
            return acquired

    def is_free_here():
        hold = db_lock("import").try_acquire()
        if hold is not None:
            hold.release()
        return hold is not None

    with transaction.atomic():
        with pglock.advisory("import"), db_lock("import"):
            pass
        assert in_other_thread(is_free)
        assert not in_other_thread(is_free_here)
    assert in_other_thread(is_free_here)
    with transaction.atomic():
        pglock.advisory("import", xact=True).acquire()
        assert not in_other_thread(is_free)
    assert in_other_thread(is_free)


def test_a_session_shares_an_advisory_lock_with_itself(pglock, in_other_thread):
    """Shared, then exclusive in one session | ``RuntimeError``.

    ``shared=True`` | ``db_rwlock(key).read()``
    """

    def shared():
        with (
            pglock.advisory("import", shared=True, timeout=0) as there,
            db_rwlock("import").read() as here,
        ):
            return there and here.held

    with pglock.advisory("import", shared=True), db_rwlock("import").read():
        assert in_other_thread(shared)
        with pglock.advisory("import", timeout=0) as acquired:
            assert acquired
        with pytest.raises(RuntimeError, match="cannot be upgraded"):
            db_rwlock("import").write().try_acquire()


def test_an_advisory_lock_ends_with_its_connection(pglock, in_other_thread, until):
    """After a crash, a lease is free after its ttl, not with its connection."""

    def is_free():
        with pglock.advisory("import", timeout=0) as acquired:
            return acquired

    lock = pglock.advisory("import")
    lock.acquire()
    with db_lock("import") as hold:
        assert not in_other_thread(is_free)
        connection.close()
        until(lambda: in_other_thread(is_free))
        hold.check()
        assert in_other_thread(db_lock("import").try_acquire) is None


async def test_the_advisory_lock_of_pgware(advisory_lock):
    """``wait=False``, ``as acquired`` | ``try_acquire()``.

    Numbers | a string; ``async_advisory_lock`` | ``async with``
    """
    from django_pg_utils.locks import async_advisory_lock

    def in_threads():
        def acquired():
            try:
                with advisory_lock((1, 2), wait=False) as acquired:
                    return acquired
            finally:
                connection.close()

        answers = []
        with advisory_lock((1, 2)), db_lock("1:2"):
            thread = threading.Thread(target=lambda: answers.append(acquired()))
            thread.start()
            thread.join(30)
        return answers

    assert await sync_to_async(in_threads)() == [False]
    async with async_advisory_lock("import") as acquired, db_lock("import") as hold:
        assert acquired
        assert hold.held
        other = asyncio.create_task(db_lock("import").atry_acquire())
        assert await other is None
