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
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections, transaction
from django.db.models import F, Value
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from dlocks import (
    Holder,
    LockBackendError,
    LockLost,
    LockStale,
    LockTimeout,
    db_lock,
    db_semaphore,
    lock_acquired,
    lock_lost,
    lock_released,
    lock_timeout,
)
from tests import jobs
from tests.internals import KEY_LENGTH, LockState, ResourceLock, backends
from tests.timing import in_time

pytestmark = pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"])

FAMILY = pytest.mark.parametrize("using", ["default", "optimistic", "insert"])


def row(key):
    return ResourceLock.objects.by_clock().get(pk=key)


def expire(key):
    """Make the lease of a key expire in the past, as if its holder had crashed."""
    begin, end = ("2001-01-01 00:00:00.000000", "2001-01-01 01:00:00.000000")
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE dlocks_resourcelock SET begin_time = %s, end_time = %s WHERE"
            " key_resource = %s",
            [begin, end, key],
        )


# Keys.


@pytest.mark.front
@pytest.mark.parametrize("key", ["", "x" * (KEY_LENGTH + 1), "a\0b", "\ud800"])
def test_an_invalid_key_is_refused_before_any_query(key, django_assert_num_queries):
    with django_assert_num_queries(0), pytest.raises(ValueError, match=r"[Kk]ey"):
        db_lock(key)


@pytest.mark.front
@pytest.mark.parametrize("key", [None, 7, b"stock:7", ("stock", 7)])
def test_a_key_that_is_not_a_string_is_a_type_error(key, django_assert_num_queries):
    with (
        django_assert_num_queries(0),
        pytest.raises(TypeError, match="key must be a string"),
    ):
        db_lock(key)


@FAMILY
@pytest.mark.parametrize(
    "key",
    [
        "'; DROP TABLE dlocks_resourcelock; --",
        "\U0001f512" * KEY_LENGTH,
        "%s %(key)s %%",
        "ключ\n\t\\",
        '"quoted"',
    ],
)
def test_any_text_is_a_key_and_never_changes_the_sql(key, using, in_other_thread):
    with db_lock(key, using=using) as hold:
        assert hold.key == key
        assert in_other_thread(db_lock(key, using=using).try_acquire) is None
        assert db_lock(key, using=using).holder().key == key


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
    settings.DLOCKS = {
        "default": {
            **settings.DLOCKS["default"],
            "OPTIONS": {"prefix": lambda: found[0]},
        },
        "memory": {
            **settings.DLOCKS["memory"],
            "OPTIONS": {"prefix": lambda: found[0]},
        },
    }
    return found


@pytest.mark.front
@pytest.mark.parametrize("using", ["default", "memory"])
def test_a_prefix_can_depend_on_the_caller(using, prefix):
    """A lock uses the current tenant's key. A hold keeps its own key."""
    lock, both = db_lock("7", using=using), db_lock("8", "9", using=using)
    with lock as first:
        prefix[0] = "globex:"
        with lock as second, both as several:
            assert (first.claim.key, second.claim.key) == ("acme:7", "globex:7")
            assert [hold.claim.key for hold in several.holds] == [
                "globex:8",
                "globex:9",
            ]
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
@pytest.mark.parametrize("keys", [("7",), ("7", "8")])
def test_a_lock_does_not_touch_the_hold_of_another_tenant(keys, prefix, is_busy):
    """In a tenant, a lock neither releases nor reports what another tenant holds."""
    lock = db_lock(*keys)
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
    prefix[0] = "globex:"
    lock.release()
    assert not globex.held
    assert not is_busy("7")


@pytest.mark.front
def test_a_tenant_hears_of_its_loss_after_another_acquires(prefix):
    """The other tenant uses the same lock object."""
    lock = db_lock("7")
    acme = lock.acquire()
    backends["default"].clear("acme:7", acme.token)
    with pytest.raises(LockLost):
        acme.renew()
    prefix[0] = "globex:"
    globex = lock.acquire()
    prefix[0] = "acme:"
    with pytest.raises(LockLost):
        lock.release()
    assert globex.held
    globex.release()


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
    while not hold.backend.waiting("acme:7"):
        await asyncio.sleep(0.01)
    await asyncio.wait_for(lock.arelease(), 10)
    assert await asyncio.wait_for(waiting, 10) is False
    assert not lock.held()


@pytest.mark.front
@pytest.mark.parametrize("wrong", [None, 7, b"acme:", "a\0b", "x" * KEY_LENGTH])
def test_the_result_of_a_prefix_function_is_checked(
    wrong, prefix, django_assert_num_queries
):
    prefix[0] = wrong
    with (
        django_assert_num_queries(0),
        pytest.raises(ValueError, match=r"DLOCKS\['default'\].*'prefix'\] returned"),
    ):
        db_lock("7").acquire()


@pytest.mark.front
async def test_a_prefix_function_is_called_in_djangos_thread(settings):
    """Synchronous middleware sets the tenant there, on Django's connection."""
    threads = []
    prefix = lambda: threads.append(threading.current_thread()) or "acme:"  # noqa: E731
    settings.DLOCKS = {
        "default": {**settings.DLOCKS["memory"], "OPTIONS": {"prefix": prefix}}
    }
    async with db_lock("7") as hold:
        assert hold.claim.key == "acme:7"
        assert (await db_lock("7").aholder()).key == "acme:7"
        assert await db_lock("7").alocked()
    assert set(threads) == {await sync_to_async(threading.current_thread)()}
    assert len(threads) == 3


@pytest.mark.front
@pytest.mark.parametrize(
    ("policy", "error"),
    [
        ({"timeout": -1}, ValueError),
        ({"timeout": "10"}, TypeError),
        ({"timeout": float("nan")}, ValueError),
        ({"ttl": 0}, ValueError),
        ({"ttl": True}, TypeError),
        ({"max_hold": 0}, ValueError),
        ({"min_hold": -1}, ValueError),
        ({"scope": "session"}, ValueError),
        ({"release_at": "never"}, ValueError),
        ({"on_lost": "mail"}, TypeError),
        ({"expire": 3}, TypeError),
        ({"renew": "no"}, TypeError),
        ({"fair": 1}, TypeError),
        ({"reentrant": None}, TypeError),
        ({"takeover": 0}, TypeError),
        ({"permits": 5}, TypeError),
        ({"min_hold": 10, "max_hold": 5}, ValueError),
    ],
)
def test_an_invalid_policy_is_refused_before_any_query(
    policy, error, django_assert_num_queries
):
    with django_assert_num_queries(0), pytest.raises(error):
        db_lock("stock:7", **policy)


@pytest.mark.front
def test_a_lock_holds_nothing_and_can_be_shared():
    lock = db_lock("stock:7")
    assert lock == db_lock("stock:7")
    with pytest.raises(AttributeError):
        lock.key = "other"
    for _ in range(2):
        with lock as hold:
            assert hold.held
        assert not hold.held


@pytest.mark.front
@pytest.mark.parametrize("keys", [("stock:7",), ("stock:7", "stock:8")])
def test_checking_a_lock_instead_of_its_hold_is_explained(keys):
    lock = db_lock(*keys)
    with (
        lock.acquire(),
        pytest.raises(
            AttributeError,
            match=r"'check'\. The hold has it, which acquire\(\)",
        ),
    ):
        lock.check()
    with pytest.raises(AttributeError, match="'extend'$"):
        lock.extend(5)
    assert copy.copy(lock) == pickle.loads(pickle.dumps(lock)) == lock


# The row.


@FAMILY
def test_the_row_shows_the_holder_of_the_key(using):
    with db_lock("stock:7", using=using, ttl=20) as hold:
        it = row("stock:7")
        assert (it.status, it.hold_count, it.state) == ("P", 1, LockState.HELD)
        assert it.owner == hold.owner
        assert re.fullmatch(r"[0-9a-f]{32}", it.owner)
        assert it.holder.split(":")[1:] == [
            str(os.getpid()),
            threading.current_thread().name,
        ]
        assert it.owner_ip
        assert it.version == hold.token
        # SQLite computes it from Julian days, whose last bit is 40 µs.
        assert 18 < it.seconds_left < 20.001
        assert it.begin_time <= it.end_time
        assert abs((it.end_time - it.begin_time).total_seconds() - 20) < 0.01
    if using != "insert":
        it = row("stock:7")
        assert (it.status, it.hold_count, it.state) == ("S", 0, LockState.FREE)


def test_each_hold_has_an_owner_and_a_larger_token_of_its_own():
    holds = []
    for _ in range(5):
        with db_lock("stock:7") as hold:
            holds.append(hold)
    assert len({hold.owner for hold in holds}) == 5
    tokens = [hold.token for hold in holds]
    assert tokens == sorted(set(tokens))


@pytest.mark.front
def test_the_owner_is_never_shown(caplog, in_other_thread):
    caplog.set_level("DEBUG", "dlocks")
    with db_lock("stock:7") as hold:
        shown = [
            repr(hold),
            str(hold.claim),
            repr(db_lock("stock:7").holder()),
            str(db_lock("stock:7").holder()),
        ]
        with pytest.raises(LockTimeout) as error:
            in_other_thread(db_lock("stock:7", timeout=0).acquire)
        shown.append(str(error.value))
    shown.append(caplog.text)
    assert "stock:7" in caplog.text
    assert not any(hold.owner in text for text in shown)


def test_the_status_shows_how_the_block_ended():
    with db_lock("stock:7"):
        pass
    assert row("stock:7").status == "S"
    with pytest.raises(ZeroDivisionError), db_lock("stock:7"):
        1 / 0  # noqa: B018
    assert (row("stock:7").status, row("stock:7").state) == ("F", LockState.FREE)


@override_settings(USE_TZ=False, TIME_ZONE="Asia/Tokyo")
def test_the_time_zone_of_the_settings_does_not_matter(in_other_thread):
    with db_lock("stock:7", ttl=20) as hold:
        assert hold.held
        assert 10 < row("stock:7").seconds_left < 20.001
        assert in_other_thread(db_lock("stock:7").try_acquire) is None
        since = db_lock("stock:7").holder().since
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {backends['default'].dialect.ticks}")
            ((ticks,),) = cursor.fetchall()
        assert abs(since.timestamp() - ticks / 1e6) < 15


@pytest.mark.engine("postgresql", "mariadb", "mysql")
@FAMILY
@pytest.mark.parametrize(
    ("zone", "offset"), [("Asia/Tokyo", "+09:00"), ("America/New_York", "-05:00")]
)
def test_the_time_zone_of_a_session_does_not_matter(
    using, zone, offset, in_other_thread
):
    def attempt():
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute("SELECT set_config('TimeZone', %s, false)", [zone])
            else:
                cursor.execute("SET time_zone = %s", [offset])
        return db_lock("stock:7", using=using).try_acquire()

    with db_lock("stock:7", using=using):
        assert in_other_thread(attempt) is None
    try:
        with attempt() as hold:
            assert in_other_thread(db_lock("stock:7", using=using).try_acquire) is None
            assert not in_other_thread(db_lock("stock:7", using=using).holder).stale
            assert hold.token == row("stock:7").version
            assert 20 < row("stock:7").seconds_left < 30.001
    finally:
        # The time zone of the session ends with the connection, and with its pool.
        connection.close()
        getattr(connection, "close_pool", lambda: None)()


# Waiting.


@FAMILY
def test_the_timeout_of_a_busy_key_names_its_holder(using, in_other_thread):
    with db_lock("stock:7", using=using) as hold, pytest.raises(LockTimeout) as caught:
        in_other_thread(db_lock("stock:7", using=using, timeout=0.2).acquire)
    error = caught.value
    assert isinstance(error, TimeoutError)
    assert (error.key, error.timeout, error.holder.token) == (
        "stock:7",
        0.2,
        hold.token,
    )
    assert re.fullmatch(
        r"'stock:7' could not be acquired within 0\.2 s:"
        r" held by \S+:\d+:MainThread \([0-9.:a-f]+\)"
        r" for \d\.\d s, (2\d|30) s left on its lease",
        str(error),
    )


def test_a_timeout_of_zero_tries_once(in_other_thread):
    with db_lock("stock:7"):
        with pytest.raises(LockTimeout, match="could not be acquired without waiting"):
            in_other_thread(db_lock("stock:7", timeout=0).acquire)
        assert in_other_thread(db_lock("stock:7").try_acquire) is None


@FAMILY
def test_a_waiter_acquires_the_key_when_it_is_released(using, workers):
    first, second = workers(2)
    token = (first.start(jobs.hold, "stock:7", using=using), first.hear())[1]
    second.start(jobs.wait_for, "stock:7", using=using, timeout=None)
    assert second.hear() == "waiting"
    first.tell()
    assert first.hear() == "released"
    _, later = second.hear()
    assert later > token


@pytest.mark.front
def test_a_hold_has_the_duration_of_its_wait(workers, until):
    (worker,) = workers(1)
    assert db_lock("other").acquire().release() is None
    worker.start(jobs.hold, "stock:7")
    worker.hear()

    def have_it_given_back():
        until(lambda: backends["default"].waiting("stock:7") == 1)
        connections.close_all()
        time.sleep(0.2)
        worker.tell()

    other = threading.Thread(target=have_it_given_back)
    other.start()
    with db_lock("stock:7") as hold:
        assert hold.waited > 0.2
        in_time(hold.waited, 5)
    assert worker.hear() == "released"
    other.join()


def test_locked_and_holder_do_not_acquire(in_other_thread):
    lock = db_lock("stock:7")
    assert not lock.locked()
    assert lock.holder() is None
    with lock as hold:
        assert in_other_thread(lock.locked)
        assert in_other_thread(lock.holder).token == hold.token
    assert not lock.locked()


@pytest.mark.front
def test_a_hold_of_try_acquire_ends_with_a_block_or_by_hand(in_other_thread):
    with db_lock("stock:7").try_acquire() as hold:
        assert in_other_thread(db_lock("stock:7").try_acquire) is None
    assert not hold.held
    hold = db_lock("stock:7").try_acquire()
    in_other_thread(hold.release)
    assert not hold.held
    hold.release()
    assert in_other_thread(lambda: db_lock("stock:7").try_acquire().release()) is None


# Reentrance.


@FAMILY
def test_a_nested_entry_is_counted_in_the_row(using, in_other_thread):
    lock = db_lock("stock:7", using=using)
    with lock as outer:
        with lock as inner:
            assert inner is outer
            assert (inner.count, row("stock:7").hold_count) == (2, 2)
            with db_lock("stock:7", using=using, ttl=5):
                assert row("stock:7").hold_count == 3
        assert (outer.count, row("stock:7").hold_count) == (1, 1)
        assert in_other_thread(lock.try_acquire) is None
    assert in_other_thread(lambda: lock.try_acquire().release()) is None


@FAMILY
def test_reentering_a_lost_lease_raises_lock_lost(using):
    lock = db_lock("stock:7", using=using, renew=False)
    with pytest.raises(LockLost) as lost, lock as hold:
        ResourceLock.objects.filter(pk="stock:7").update(
            owner="somebody else", version=F("version") + Value(1)
        )
        with pytest.raises(LockLost), lock:
            pytest.fail("entered")
        assert not hold.held
    assert (lost.value.key, lost.value.token) == ("stock:7", hold.token)
    ResourceLock.objects.all().delete()


@pytest.mark.front
def test_not_reentrant_refuses_a_second_entry_at_once(django_assert_num_queries):
    with db_lock("stock:7", reentrant=False) as hold:
        with (
            django_assert_num_queries(0),
            pytest.raises(RuntimeError, match="reentrant=False"),
        ):
            db_lock("stock:7").acquire()
        assert hold.count == 1
    with db_lock("stock:7"), pytest.raises(RuntimeError, match="reentrant=False"):
        db_lock("stock:7", reentrant=False).acquire()


@pytest.mark.front
def test_another_thread_and_a_pool_thread_are_not_the_holder(in_other_thread):
    with db_lock("stock:7"):
        assert in_other_thread(db_lock("stock:7").try_acquire) is None
        with ThreadPoolExecutor(1) as pool:

            def attempt():
                try:
                    return db_lock("stock:7").try_acquire()
                finally:
                    connections.close_all()

            assert pool.submit(attempt).result() is None


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
async def test_tasks_exclude_each_other_and_none_blocks_the_loop():
    inside, worst, beats = 0, 0, 0

    async def work():
        nonlocal inside, worst
        async with db_lock("stock:7"):
            inside += 1
            worst = max(worst, inside)
            await asyncio.sleep(0.005)
            inside -= 1

    async def beat():
        nonlocal beats
        while True:
            await asyncio.sleep(0.001)
            beats += 1

    pulse = asyncio.create_task(beat())
    await asyncio.gather(*(work() for _ in range(8)))
    pulse.cancel()
    assert worst == 1
    assert beats > 10


@pytest.mark.driver
async def test_a_cancelled_waiter_leaves_nothing():
    async with db_lock("stock:7"):
        waiter = asyncio.create_task(db_lock("stock:7").aacquire())
        await asyncio.sleep(0.05)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
    hold = await asyncio.create_task(db_lock("stock:7").atry_acquire())
    await hold.acheck()
    await hold.arenew()
    await hold.arelease()
    assert not await db_lock("stock:7").alocked()
    assert await db_lock("stock:7").aholder() is None


@pytest.mark.driver
async def test_a_cancelled_holder_releases_the_key():
    entered = asyncio.Event()

    async def work():
        async with db_lock("stock:7"):
            entered.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await sync_to_async(row)("stock:7")).state == LockState.FREE


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
                # The child must not use the parent's connection, and has none of its
                # own yet.
                inherited, connections["default"].connection = (
                    connection.connection,
                    None,
                )
                assert inherited is not None
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
@pytest.mark.parametrize("in_block", [False, True])
def test_a_block_never_releases_another_caller_s_hold(in_block, threads):
    """The block has released its own hold early, and another thread has the next one.

    Both use the same lock object.
    """
    lock, held, over = db_lock("stock:7"), threading.Event(), threading.Event()

    def work():
        hold = lock.__enter__() if in_block else lock.acquire()
        held.set()
        over.wait(30)
        still = hold.held
        lock.__exit__(None, None, None) if in_block else hold.release()
        return still

    with lock as hold:
        hold.release()
        other = threads(work)
        assert held.wait(30)
    over.set()
    other.join(30)
    assert other.results == [True]


@pytest.mark.front
def test_an_ambiguous_exit_in_another_thread_raises(
    in_other_thread,
):
    lock = db_semaphore("stock:7", 2, reentrant=False)
    holds = [lock.__enter__(), lock.__enter__()]
    with pytest.raises(RuntimeError, match="in the thread or task in which it began"):
        in_other_thread(lock.__exit__, None, None, None)
    lock.__exit__(None, None, None)
    lock.__exit__(None, None, None)
    assert not any(hold.held for hold in holds)


# Stale keys.


@FAMILY
def test_a_stale_key_is_taken_over_by_exactly_one_of_many(using, workers, doomed):
    victim = doomed()
    token = victim.call(jobs.acquire, "stock:7", using=using)
    victim.kill()
    expire("stock:7")
    assert row("stock:7").state == LockState.STALE
    crowd = workers(4)
    for worker in crowd:
        worker.start(jobs.acquire, "stock:7", using=using, timeout=0)
    answers = [worker.hear() for worker in crowd]
    winners = [answer for answer in answers if isinstance(answer, int)]
    # A loser that meets the winner's statement also finds the key busy.
    assert len(winners) == 1, answers
    assert winners[0] > token
    assert set(answers) - set(winners) <= {"LockTimeout"}
    for worker in crowd:
        worker.call(jobs.forget)


@FAMILY
def test_without_takeover_a_stale_key_must_be_cleared(using, doomed):
    victim = doomed()
    victim.call(jobs.acquire, "stock:7", using=using)
    victim.kill()
    expire("stock:7")
    with pytest.raises(LockStale, match=r"is stale: held by .*clear_lock") as error:
        db_lock("stock:7", using=using, takeover=False).acquire()
    assert error.value.holder.stale
    backend = backends[using]
    assert backend.clear("stock:7", row("stock:7").version)
    with db_lock("stock:7", using=using, takeover=False):
        pass


@FAMILY
def test_min_hold_keeps_the_key_after_the_block(using, in_other_thread, until):
    began = time.monotonic()
    with db_lock("job", using=using, min_hold=2.0) as hold:
        pass
    took = time.monotonic() - began
    assert not hold.held
    assert in_other_thread(db_lock("job", using=using).try_acquire) is None
    assert db_lock("job", using=using).locked()
    it = row("job")
    # SQLite's clock has a resolution of one millisecond.
    assert (
        2.0 - 0.001
        <= (it.end_time - it.begin_time).total_seconds()
        <= 2.0 + took + 0.002
    )
    until(lambda: not db_lock("job", using=using).locked())
    in_other_thread(lambda: db_lock("job", using=using).try_acquire().release())


# Purging.


def test_tokens_grow_across_purging_and_recreating_the_row(until):
    with db_lock("stock:7") as first:
        pass
    until(lambda: sum(backends["default"].purge(0)) == 1)
    assert not ResourceLock.objects.exists()
    with db_lock("stock:7") as second:
        assert second.token > first.token


def test_clearing_fences_off_and_notifies_the_holder():
    lost = []
    with pytest.raises(LockLost), db_lock("stock:7", on_lost=lost.append) as hold:
        assert backends["default"].clear("stock:7", hold.token)
        assert row("stock:7").version > hold.token
        assert (row("stock:7").status, row("stock:7").owner) == ("F", "")
        with pytest.raises(LockLost):
            hold.check()
        assert lost == [hold]


# Signals.


@pytest.mark.front
def test_signals_report_each_event(in_other_thread):
    told = []

    def listen(name, signal):
        def receive(**kwargs):
            told.append((name, kwargs.get("hold") or kwargs["lock"]))

        signal.connect(receive, weak=False)
        return signal, receive

    listening = [
        listen("acquired", lock_acquired),
        listen("released", lock_released),
        listen("lost", lock_lost),
        listen("timeout", lock_timeout),
    ]
    try:
        lock = db_lock("stock:7", timeout=0)
        with lock as hold:
            with lock:
                pass
            in_other_thread(lock.try_acquire)
        with pytest.raises(LockLost), lock as second:
            backends["default"].clear("stock:7", second.token)
    finally:
        for signal, receive in listening:
            signal.disconnect(receive)
    assert told == [
        ("acquired", hold),
        ("timeout", lock),
        ("released", hold),
        ("acquired", second),
        ("lost", second),
    ]


@pytest.mark.front
def test_a_failing_receiver_does_not_reach_the_caller():
    def fail(**kwargs):
        raise ValueError("receiver")

    lock_acquired.connect(fail)
    try:
        with db_lock("stock:7") as hold:
            assert hold.held
    finally:
        lock_acquired.disconnect(fail)


# Database routing.


class ToNowhere:
    """A router that sends reads and writes to a database that does not exist."""

    def db_for_read(self, model, **hints):
        return "replica"

    def db_for_write(self, model, **hints):
        return "nowhere"


@override_settings(DATABASE_ROUTERS=["tests.core.test_locks.ToNowhere"])
@FAMILY
def test_statements_go_to_the_writer_with_any_router(using, in_other_thread):
    lock = db_lock("stock:7", using=using)
    with lock as hold, lock:
        assert lock.holder().token == hold.token
        hold.check()
        hold.renew()
        assert in_other_thread(lock.try_acquire) is None
    backend = backends[using]
    list(backend.reap())
    list(backend.purge(0))
    assert not backend.clear("no such key", 1)


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
    import pickle

    from dlocks import LockBackendError, LockError

    for error in (
        LockTimeout("busy", key="stock:7", timeout=3.0, holder=None),
        LockLost("lost", key="stock:7", token=7),
        LockStale(key="stock:7", holder=None),
        LockBackendError("could not ask"),
        LockError("wrong"),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (
            type(error),
            str(error),
            vars(error),
        )


# Mistakes.


@pytest.mark.front
def test_a_released_hold_cannot_be_entered():
    hold = db_lock("stock:7").acquire()
    with hold:
        pass
    with (
        pytest.raises(
            RuntimeError,
            match=r"has been released.*Acquire the lock once for each block",
        ),
        hold,
    ):
        pytest.fail("the block was entered")


@pytest.mark.front
def test_a_hold_can_be_entered_once_for_each_acquire():
    hold = db_lock("stock:7").acquire()
    with hold:
        with pytest.raises(RuntimeError, match="an outer block"), hold:
            pytest.fail("the block was entered")
        assert hold.held
        with db_lock("stock:7").acquire() as again:
            assert again is hold
        assert hold.held
    assert not hold.held


@pytest.mark.engine("postgresql", "mariadb", "mysql")
def test_a_released_lease_can_be_reentered_in_its_transaction():
    lock = db_lock("stock:7", scope="lease")
    with transaction.atomic():
        with lock.acquire() as first:
            first.release()
            with lock.acquire() as again:
                assert again is first
                assert again.held


@pytest.mark.front
async def test_a_coroutine_cannot_enter_a_released_hold():
    async with db_lock("stock:7") as hold:
        assert hold.held
    with pytest.raises(RuntimeError, match="has been released"):
        async with hold:
            pytest.fail("the block was entered")


@pytest.mark.front
@pytest.mark.parametrize("ask", ["check", "renew"])
def test_checking_a_released_hold_raises_lock_lost(ask):
    with db_lock("stock:7") as hold:
        pass
    with pytest.raises(LockLost, match=r"'stock:7' has been released by "):
        getattr(hold, ask)()


def test_a_missing_table_is_reported_with_a_hint():
    with connection.schema_editor() as editor:
        editor.alter_db_table(ResourceLock, "dlocks_resourcelock", "elsewhere")
    try:
        with pytest.raises(
            LockBackendError, match="Run 'manage.py migrate dlocks --database default'"
        ):
            db_lock("stock:7").acquire()
    finally:
        with connection.schema_editor() as editor:
            editor.alter_db_table(ResourceLock, "elsewhere", "dlocks_resourcelock")


@pytest.mark.parametrize("use_tz", [True, False])
def test_a_timeout_shows_an_age_in_any_time_zone(doomed, settings, use_tz):
    settings.USE_TZ = use_tz
    settings.TIME_ZONE = "Asia/Tokyo"
    holder = doomed()
    holder.start(jobs.hold, "stock:7")
    holder.hear()
    with timezone.override("America/New_York"):
        with pytest.raises(LockTimeout) as busy:
            db_lock("stock:7", timeout=0).acquire()
    assert re.search(r"\) for \d\.\d s, (2\d|30) s left", str(busy.value))
    holder.tell()
    assert holder.hear() == "released"


@pytest.mark.front
@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "web-3:1412 (10.0.0.7) for 42 s, 12 s left on its lease"),
        (
            {"remaining": -3 * 86400.0, "stale": True},
            "web-3:1412 (10.0.0.7) for 42 s, its lease expired 3 days ago",
        ),
        (
            {"remaining": math.inf, "in_transaction": True},
            "web-3:1412 (10.0.0.7) for 42 s, in a transaction",
        ),
        ({"remaining": math.inf}, "web-3:1412 (10.0.0.7) for 42 s"),
        (
            {"holder": "", "owner_ip": None, "since": None},
            "an unknown holder, 12 s left on its lease",
        ),
    ],
)
def test_the_text_of_a_holder(values, text):
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
    assert str(Holder(**known | values)) == text
