"""The promises of a lock to its caller, outside of transactions."""

from __future__ import annotations

import asyncio
import copy
import math
import os
import pickle
import re
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection, transaction
from django.db.models import signals
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from dlocks import (
    Holder,
    LockBackendError,
    LockError,
    LockLost,
    LockStale,
    LockTimeout,
    db_lock,
    db_rwlock,
    db_semaphore,
    lock_acquired,
    lock_lost,
    lock_released,
    lock_timeout,
)
from dlocks.models import LockClaim, ResourceLock
from dlocks.testing import abandoned
from dlocks.values import KEY_LENGTH
from tests import rows
from tests.for_each import FAMILY, for_each
from tests.promises.commands.running import run
from tests.promises.locks.keys import clear, is_taken, row

pytestmark = pytest.mark.django_db(transaction=True)

# Keys.


@pytest.mark.front
def test_an_invalid_key_is_refused_before_any_query(django_assert_num_queries):
    with django_assert_num_queries(0):
        for key in ("", "x" * (KEY_LENGTH + 1), "a\0b", "\ud800"):
            with pytest.raises(ValueError, match=r"[Kk]ey"):
                db_lock(key)
            with pytest.raises(ValueError, match=r"[Kk]ey"):
                db_lock("a", key)
        for key in (None, 7, b"stock:7", ("stock", 7)):
            for keys in ((key,), ("a", key)):
                with pytest.raises(TypeError, match="key must be a string"):
                    db_lock(*keys)
        with pytest.raises(TypeError):
            db_lock()


@FAMILY
def test_any_text_is_a_key_and_never_changes_the_sql(using):
    for key in (
        "'; DROP TABLE dlocks_resourcelock; --",
        "\U0001f512" * KEY_LENGTH,
        "%s %(key)s %%",
        "ключ\n\t\\",
        '"quoted"',
    ):
        lock = db_lock(key, using=using)
        with lock as hold:
            assert hold.key == key
            assert is_taken(key, using)
            assert lock.locked()
            assert lock.holder().key == key
        assert not lock.locked()


@pytest.mark.front
def test_the_prefix_counts_towards_the_length_of_the_key(django_assert_num_queries):
    with db_lock("7", using="prefixed") as hold:
        assert hold.key == "7"
        assert row("shop:7").status == "P"
    with django_assert_num_queries(0), pytest.raises(ValueError, match="prefix"):
        db_lock("x" * KEY_LENGTH, using="prefixed").acquire()


@pytest.fixture
def prefix(settings):
    """Return a list with the prefix of the aliases ``default`` and ``memory``."""
    found = ["acme:"]
    options = {"OPTIONS": {"prefix": lambda: found[0]}}
    settings.DLOCKS = {
        alias: settings.DLOCKS[alias] | options for alias in ("default", "memory")
    }
    return found


@pytest.mark.front
@for_each("using", ["default", "memory"])
def test_a_prefix_can_depend_on_the_caller(using, prefix):
    """A lock uses the current tenant's key. A hold keeps its own key."""
    lock, both = db_lock("7", using=using), db_lock("8", "9", using=using)
    with lock as first:
        assert lock.holder().key == "acme:7"
        prefix[0] = "globex:"
        with lock as second, both:
            assert lock.holder().key == "globex:7"
            assert both.holder().key == "globex:8"
            assert (first.count, second.count) == (1, 1)
            prefix[0] = "acme:"
            assert lock.acquire() is first
            first.release()
            assert not both.locked()
            first.renew()
            first.check()
        prefix[0] = "globex:"
        assert not lock.locked()
    prefix[0] = "acme:"
    assert not lock.locked()


@pytest.mark.front
@for_each("keys", [("7",), ("7", "8")])
def test_a_lock_does_not_touch_the_hold_of_another_tenant(keys, prefix, is_busy):
    """It neither releases nor reports it. Each tenant hears of its own loss."""
    lock, prefix[0] = db_lock(*keys), "acme:"
    acme = lock.acquire()
    prefix[0] = "globex:"
    assert not lock.held()
    with pytest.raises(RuntimeError, match="was not acquired by this thread"):
        lock.release()
    globex = lock.acquire()
    prefix[0] = "acme:"
    assert lock.held()
    lock.release()
    assert (acme.held, globex.held) == (False, True)
    assert not lock.held()
    with pytest.raises(RuntimeError, match="was not acquired by this thread"):
        lock.release()
    acme = lock.acquire()
    clear("7")
    with pytest.raises(LockLost):
        acme.renew()
    prefix[0] = "globex:"
    lock.release()
    globex = lock.acquire()
    prefix[0] = "acme:"
    with pytest.raises(LockLost):
        lock.release()
    assert globex.held
    globex.release()
    prefix[0] = "globex:"
    assert not is_busy("7")


@pytest.mark.front
async def test_a_task_does_not_release_the_hold_of_another_tenant(prefix):
    """Also not that of another task, which ``wait_for()`` has started."""
    lock = db_lock("7", using="memory")
    acme = await asyncio.wait_for(lock.aacquire(), 5)
    prefix[0] = "globex:"
    with pytest.raises(RuntimeError, match="was not acquired by this task"):
        await lock.arelease()
    globex = await lock.aacquire()
    prefix[0] = "acme:"
    await lock.arelease()
    assert (acme.held, globex.held) == (False, True)
    prefix[0] = "globex:"
    await lock.arelease()
    assert not globex.held


@pytest.mark.front
@pytest.mark.usefixtures("memory_locks")
async def test_a_task_releases_while_djangos_thread_waits(settings):
    """A tenant is set in Django's thread, which may wait for the lock itself."""
    django_thread = await sync_to_async(threading.current_thread)()

    def prefix():
        there = threading.current_thread() is django_thread
        return "acme:" if there else "public:"

    settings.DLOCKS = {
        "default": {**settings.DLOCKS["default"], "OPTIONS": {"prefix": prefix}}
    }
    lock = db_lock("7", timeout=None)
    hold = await lock.aacquire()
    assert lock.held()

    def wait():
        with lock:
            return hold.held

    waiting = asyncio.create_task(sync_to_async(wait)())
    while not await hold.aqueue_length():
        await asyncio.sleep(0.01)
    async with asyncio.timeout(10):
        await lock.arelease()
    assert await asyncio.wait_for(waiting, 10) is False
    assert not lock.held()


@pytest.mark.front
def test_the_result_of_a_prefix_function_is_checked(prefix, django_assert_num_queries):
    message = r"DLOCKS\['default'\].*'prefix'\] returned"
    with django_assert_num_queries(0):
        for prefix[0] in (None, 7, b"acme:", "a\0b", "x" * KEY_LENGTH):
            with pytest.raises(ValueError, match=message):
                db_lock("7").acquire()


@pytest.mark.front
@for_each("keys", [("7",), ("7", "8")])
async def test_a_prefix_function_is_called_in_djangos_thread(keys, settings):
    """Synchronous middleware sets the tenant there, on Django's connection."""
    threads, before = [], settings.DLOCKS
    prefix = lambda: threads.append(threading.current_thread()) or "acme:"  # noqa: E731
    settings.DLOCKS = {"default": {**before["memory"], "OPTIONS": {"prefix": prefix}}}
    async with db_lock(*keys):
        assert db_lock(*keys).held()
        assert not db_lock("9").held()
        assert (await db_lock(*keys).aholder()).key == "acme:7"
        assert await db_lock(*keys).alocked()
    assert not db_lock(*keys).held()
    assert set(threads) == {await sync_to_async(threading.current_thread)()}
    settings.DLOCKS = before


@pytest.mark.front
def test_an_invalid_policy_is_refused_before_any_query(django_assert_num_queries):
    with django_assert_num_queries(0):
        for error, policy in (
            (ValueError, {"timeout": -1}),
            (TypeError, {"timeout": "10"}),
            (ValueError, {"timeout": float("nan")}),
            (ValueError, {"ttl": 0}),
            (TypeError, {"ttl": True}),
            (ValueError, {"max_hold": 0}),
            (ValueError, {"min_hold": -1}),
            (ValueError, {"scope": "session"}),
            (ValueError, {"release_at": "never"}),
            (TypeError, {"on_lost": "mail"}),
            (TypeError, {"expire": 3}),
            (TypeError, {"renew": "no"}),
            (TypeError, {"fair": 1}),
            (TypeError, {"reentrant": None}),
            (TypeError, {"takeover": 0}),
            (TypeError, {"permits": 5}),
            (ValueError, {"min_hold": 10, "max_hold": 5}),
        ):
            for keys in (("stock:7",), ("stock:7", "stock:8")):
                with pytest.raises(error):
                    pytest.fail(f"{policy}: {db_lock(*keys, **policy)}")


@pytest.mark.driver
def test_the_longest_timeout_of_threading_is_a_wait(threads, until):
    """Code for ``threading.Lock`` may pass it. A longer one is refused."""
    longest = threading.TIMEOUT_MAX
    lock = db_lock("stock:7", timeout=longest)

    def take():
        with lock as hold:
            return hold.token

    async def atake():
        async with lock as hold:
            return hold.token

    with lock as mine:
        waiters = [threads(take), threads(async_to_sync(atake))]
        until(lambda: mine.queue_length() == 2)
    for waiter in waiters:
        waiter.join()
        assert waiter.results[0] > mine.token
    lock.try_acquire(timeout=longest).release()
    with pytest.raises(ValueError, match="timeout must be 0 or more and at most"):
        db_lock("stock:7", timeout=2 * longest)


@pytest.mark.front
def test_a_lock_holds_nothing_and_can_be_shared():
    """It is immutable, can be copied and pickled, and has no methods of a hold."""
    for keys in (("stock:7",), ("stock:7", "stock:8")):
        lock = db_lock(*keys)
        assert copy.copy(lock) == pickle.loads(pickle.dumps(lock)) == db_lock(*keys)
        with pytest.raises(AttributeError):
            lock.key = "other"
        for _ in range(2):
            with lock as hold:
                assert hold.held
                with pytest.raises(
                    AttributeError,
                    match=r"'check'\. The hold has it, which acquire\(\)",
                ):
                    lock.check()
            assert not hold.held
        with pytest.raises(AttributeError, match="'expand'$"):
            lock.expand(5)


# The row.


@pytest.mark.driver
@FAMILY
def test_the_row_shows_the_holder_of_the_key(using):
    """Each hold has another owner."""
    owners = set()
    for _ in range(2):
        with db_lock("stock:7", using=using, ttl=20) as hold:
            it = row("stock:7")
            assert (it.status, it.hold_count, it.state) == ("P", 1, "held")
            assert it.owner == hold.owner
            assert re.fullmatch(r"[0-9a-f]{32}", it.owner)
            thread = threading.current_thread().name
            assert it.holder.split(":")[1:] == [str(os.getpid()), thread]
            assert it.owner_ip
            assert it.version == hold.token
            # SQLite computes it from Julian days, whose last bit is 40 µs.
            assert 18 < it.seconds_left < 20.001
            assert it.begin_time <= it.end_time
            assert abs((it.end_time - it.begin_time).total_seconds() - 20) < 0.01
            owners.add(it.owner)
        if using != "insert":
            it = row("stock:7")
            assert (it.hold_count, it.state) == (0, "free")
    assert len(owners) == 2


@pytest.mark.front
def test_the_owner_is_never_shown(caplog, in_other_thread):
    caplog.set_level("DEBUG", "dlocks")
    with db_lock("stock:7") as hold:
        shown = [
            repr(hold),
            repr(db_lock("stock:7").holder()),
            str(db_lock("stock:7").holder()),
        ]
        with pytest.raises(LockTimeout) as error:
            in_other_thread(db_lock("stock:7", timeout=0).acquire)
        shown.append(str(error.value))
    shown.append(caplog.text)
    assert "stock:7" in caplog.text
    assert not any(hold.owner in text for text in shown)


@pytest.mark.driver
@for_each("use_tz", [True, False])
def test_the_time_zone_of_the_settings_does_not_matter(
    use_tz, settings, in_other_thread
):
    """An error shows the age of a hold, so the time zone of a request is irrelevant."""
    settings.USE_TZ = use_tz
    settings.TIME_ZONE = "Asia/Tokyo"
    lock = db_lock("stock:7", timeout=0)
    hold = in_other_thread(lock.acquire)
    assert hold.held
    assert 20 < row("stock:7").seconds_left < 30.001
    with timezone.override("America/New_York"), pytest.raises(LockTimeout) as busy:
        lock.acquire()
    assert re.search(r"\) for \d\.\d s, (2\d|30) s left", str(busy.value))
    assert abs(lock.holder().since.timestamp() - time.time()) < 15
    in_other_thread(hold.release)


@pytest.mark.driver
def test_an_hour_that_the_time_zone_repeats_is_read_as_it_was_written(settings):
    """Otherwise a lease that began in it would end an hour early or late."""
    moments = [datetime(2025, 10, 26, hour, 30, tzinfo=UTC) for hour in (0, 1)]
    for number, moment in enumerate(moments):
        rows.held(f"stock:{number}", begin_time=moment)
    # It is half past two for both.
    settings.USE_TZ, settings.TIME_ZONE = False, "Europe/Berlin"
    for number, moment in enumerate(moments):
        assert db_lock(f"stock:{number}").holder().since == moment


OFFSETS = {"Asia/Tokyo": "+09:00", "America/New_York": "-05:00"}


@contextmanager
def session_in(zone):
    """Set the time zone of the session, which ends with its connection and pool."""
    try:
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute("SELECT set_config('TimeZone', %s, false)", [zone])
            else:
                cursor.execute("SET time_zone = %s", [OFFSETS[zone]])
        yield
    finally:
        connection.close()
        getattr(connection, "close_pool", lambda: None)()


@pytest.mark.engine("postgresql", "mariadb", "mysql")
@for_each(
    "case",
    [
        ("default", "Asia/Tokyo"),
        ("default", "America/New_York"),
        ("optimistic", "America/New_York"),
        ("insert", "Asia/Tokyo"),
    ],
)
def test_the_time_zone_of_a_session_does_not_matter(case, in_other_thread):
    using, zone = case
    lock = db_lock("stock:7", using=using)

    def attempt():
        with session_in(zone):
            return lock.try_acquire()

    with lock:
        assert in_other_thread(attempt) is None
    with session_in(zone), lock.try_acquire() as hold:
        found = in_other_thread(lambda: (lock.try_acquire(), lock.holder().stale))
        assert found == (None, False)
        assert hold.token == row("stock:7").version
        assert 20 < row("stock:7").seconds_left < 30.001


@pytest.mark.engine("postgresql", "mariadb", "mysql")
@for_each("zone", OFFSETS)
@for_each("use_tz", [True, False])
def test_a_permit_lasts_for_its_ttl_in_any_time_zone(zone, use_tz, settings):
    """Its end is calculated from a time that was read in the session's time zone."""
    settings.USE_TZ = use_tz
    with session_in(zone), db_semaphore("stock:7", permits=2) as hold:
        hold.check()
        assert abs(hold.token / 1e6 - time.time()) < 3600
        (share,) = LockClaim.objects.by_clock()
        assert 20 < share.seconds_left < 30.001


# Reentrance.


@pytest.mark.driver
@FAMILY
def test_a_nested_entry_is_counted_in_the_row(using):
    lock = db_lock("stock:7", using=using)
    with lock as outer:
        with lock as inner:
            assert inner is outer
            assert (inner.count, row("stock:7").hold_count) == (2, 2)
            with db_lock("stock:7", using=using, ttl=5):
                assert row("stock:7").hold_count == 3
        assert (outer.count, row("stock:7").hold_count) == (1, 1)
        assert is_taken("stock:7", using)
    assert not is_taken("stock:7", using)


@pytest.mark.driver
@FAMILY
def test_reentering_a_lost_lease_raises_lock_lost(using):
    lock = db_lock("stock:7", using=using, renew=False)
    with pytest.raises(LockLost) as lost, lock as hold:
        clear("stock:7", using)
        with pytest.raises(LockLost), lock:
            pytest.fail("entered")
        assert not hold.held
    assert (lost.value.key, lost.value.token) == ("stock:7", hold.token)


@pytest.mark.front
async def test_another_task_and_a_child_task_are_not_the_holder():
    lock = db_lock("stock:7")

    async def attempt():
        return await lock.atry_acquire()

    async with lock as hold:
        async with lock:
            assert hold.count == 2
        assert await asyncio.create_task(attempt()) is None
        async with asyncio.TaskGroup() as group:
            children = [group.create_task(attempt()) for _ in range(2)]
        assert [child.result() for child in children] == [None, None]
    assert not hold.held
    other = await asyncio.create_task(attempt())
    await other.arelease()


@pytest.mark.driver
def test_a_forked_child_holds_nothing(in_other_thread):
    """It does not hold the lock, does not renew it, and cannot release it."""
    connection.ensure_connection()
    with db_lock("stock:7") as hold:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            answer = b"?"
            try:
                answer = b"held" if hold.held else b"not held"
                try:
                    hold.release()
                except LockLost:
                    answer += b", lost"
                if db_lock("stock:7").try_acquire() is None:
                    answer += b", busy"
            finally:
                os.write(writer, answer)
                os._exit(0)
        os.waitpid(child, 0)
        os.close(writer)
        assert os.read(reader, 100) == b"not held, lost, busy"
        os.close(reader)
        hold.check()


@pytest.mark.front
def test_a_block_that_ends_in_another_thread_releases(in_other_thread, is_busy):
    """The block of a generator ends where the generator is closed or collected."""
    lock = db_lock("stock:7")
    hold = lock.__enter__()
    in_other_thread(lock.__exit__, None, None, None)
    assert not hold.held
    assert not is_busy()


@pytest.mark.front
@for_each("in_block", [False, True])
def test_a_block_never_releases_another_caller_s_hold(in_block, paused):
    """The block has released its own hold early. Both use one lock object."""
    lock = db_lock("stock:7")

    def work():
        hold = lock.__enter__() if in_block else lock.acquire()
        yield
        assert hold.held
        lock.__exit__(None, None, None) if in_block else hold.release()

    with lock as hold:
        hold.release()
        end = paused(work)
    end()


@pytest.mark.driver
def test_min_hold_keeps_the_key_after_the_block():
    """This is so for a block that ends alone, and for one in a transaction."""
    ended = {}
    for using in ("default", "optimistic", "insert"):
        began = time.monotonic()
        with db_lock(using, using=using, min_hold=2.0) as hold:
            pass
        ended[using] = time.monotonic() - began
        assert not hold.held
        assert is_taken(using, using)
        assert db_lock(using, using=using).locked()
    with transaction.atomic(), db_lock("job", min_hold=2.0):
        pass
    assert is_taken("job")
    for using, took in ended.items():
        it = row(using)
        # SQLite's clock has a resolution of one millisecond.
        assert (
            2.0 - 0.001
            <= (it.end_time - it.begin_time).total_seconds()
            <= 2.0 + took + 0.002
        )
    for key, using in (*zip(ended, ended, strict=True), ("job", "default")):
        db_lock(key, using=using, timeout=10).acquire().release()


@FAMILY
def test_tokens_grow_although_the_clock_has_stepped_back(using):
    """The row has the largest token, even if the clock is behind it."""
    with db_lock("stock:7", using=using) as hold:
        ahead = hold.token + 10**9
        ResourceLock.objects.filter(pk="stock:7").update(version=ahead)
    tokens = []
    for _ in range(3):
        with db_lock("stock:7", using=using) as hold:
            tokens.append(hold.token - ahead)
    assert tokens == [1, 2, 3]


# Purging.


def purge(using):
    """Delete the rows of free keys, as an operator does."""
    run("reap_locks", idle_for="0s", using=using)


def test_tokens_grow_across_purging_and_recreating_the_row(until):
    with db_lock("stock:7") as first:
        pass
    until(lambda: purge("default") or not ResourceLock.objects.exists())
    with db_lock("stock:7") as second:
        assert second.token > first.token


def test_a_row_whose_token_is_ahead_of_the_clock_is_not_purged():
    """The next row would begin at the clock."""
    with db_lock("stock:7") as hold:
        ahead = hold.token + 10**9
        ResourceLock.objects.filter(pk="stock:7").update(version=ahead)
    purge("default")
    with db_lock("stock:7") as hold:
        assert hold.token > ahead


# Signals.


@pytest.mark.front
def test_signals_report_each_event(in_other_thread, signalled):
    """A receiver that fails does not reach the caller."""
    events = lock_acquired, lock_released, lock_lost, lock_timeout
    told = signalled(*events, error=ValueError("receiver"))
    lock = db_lock("stock:7", timeout=0)
    with lock as hold:
        with lock:
            pass
        in_other_thread(lock.try_acquire)
    with pytest.raises(LockLost), lock as second:
        clear("stock:7")
    assert told == [
        (lock_acquired, hold),
        (lock_timeout, lock),
        (lock_released, hold),
        (lock_acquired, second),
        (lock_lost, second),
    ]


@pytest.mark.front
@pytest.mark.parametrize("alias", ["default", "insert"])
def test_locks_send_no_signals_of_models(alias, signalled):
    """A receiver for all models, as an audit log, may itself acquire a lock."""
    seen = signalled(
        signals.pre_save, signals.post_save, signals.pre_delete, signals.post_delete
    )
    with db_lock("stock:7", using=alias), db_rwlock("price:7", using=alias).read():
        db_lock("stock:8", "stock:9", using=alias).acquire().release()
    with db_semaphore("stock:10", 2, using=alias):
        pass
    run("reap_locks", "--idle-for", "0s", using=alias)
    assert seen == []


# Database routing.


class ToNowhere:
    """A router that sends reads and writes to a database that does not exist."""

    def db_for_read(self, model, **hints):
        return "replica"

    def db_for_write(self, model, **hints):
        return "nowhere"


@pytest.mark.driver
@override_settings(DATABASE_ROUTERS=[f"{__name__}.ToNowhere"])
@FAMILY
def test_statements_go_to_the_writer_with_any_router(using):
    lock = db_lock("stock:7", using=using)
    with lock as hold, lock:
        assert lock.holder().token == hold.token
        hold.check()
        hold.renew()
        assert is_taken("stock:7", using)
    purge(using)
    abandoned("stock:7", using=using)
    clear("stock:7", using)


@FAMILY
def test_keys_are_sent_only_as_parameters(using):
    with CaptureQueriesContext(connection) as queries, db_lock("k'ey", using=using):
        pass
    assert queries
    assert not any(
        "k'ey" in query["sql"].replace("k''ey", "").replace("k\\'ey", "")
        for query in queries
    )


@pytest.mark.front
def test_errors_can_be_sent_between_processes():
    """Task queues and process pools pickle errors with their attributes."""
    for error in (
        LockTimeout("busy", key="stock:7", timeout=3.0, holder=None),
        LockLost("lost", key="stock:7", token=7),
        LockStale(key="stock:7", holder=None),
        LockBackendError("could not ask"),
        LockError("wrong"),
    ):
        sent = pickle.loads(pickle.dumps(error))
        assert type(sent) is type(error)
        assert (str(sent), vars(sent)) == (str(error), vars(error))


# Mistakes.


@pytest.mark.front
def test_a_hold_can_be_entered_once_for_each_acquire():
    """After its release it can be neither entered nor checked nor renewed."""
    hold = db_lock("stock:7").acquire()
    with hold:
        with pytest.raises(RuntimeError, match="an outer block"), hold:
            pytest.fail("the block was entered")
        assert hold.held
        with db_lock("stock:7").acquire() as again:
            assert again is hold
        assert hold.held
    assert not hold.held
    with (
        pytest.raises(
            RuntimeError,
            match=r"has been released.*Acquire the lock once for each block",
        ),
        hold,
    ):
        pytest.fail("the block was entered")
    for use in (hold.check, hold.renew):
        with pytest.raises(LockLost, match=r"'stock:7' has been released by "):
            use()


def test_a_missing_table_is_reported_with_a_hint():
    says = "Run 'manage.py migrate dlocks --database default'"
    with rows.without_table(ResourceLock), pytest.raises(LockBackendError, match=says):
        db_lock("stock:7").acquire()


@pytest.mark.front
def test_the_text_of_a_holder():
    """A holder is named with the age of its hold and the rest of its lease."""
    known = {
        "key": "stock:7",
        "holder": "web-3:1412",
        "owner_ip": "10.0.0.7",
        "since": timezone.now() - timedelta(seconds=42),
        "remaining": 12.0,
        "token": 1,
        "count": 1,
        "stale": False,
    }
    age = "web-3:1412 (10.0.0.7) for 42 s"
    expired = {"remaining": -3 * 86400.0, "stale": True}
    unknown = {"holder": "", "owner_ip": None, "since": None}
    for values, text in (
        ({}, f"{age}, 12 s left on its lease"),
        (expired, f"{age}, its lease expired 3 days ago"),
        ({"remaining": math.inf, "in_transaction": True}, f"{age}, in a transaction"),
        ({"remaining": math.inf}, age),
        (unknown, "an unknown holder, 12 s left on its lease"),
    ):
        assert str(Holder(**known | values)) == text
