"""The queue of a key: waiting, notification and order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import socket
import sys
import threading
import time
import warnings
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError, connection, connections, transaction
from django.test import TestCase

from dlocks import (
    LockBackendError,
    LockStale,
    LockTimeout,
    db_lock,
    db_rwlock,
    db_semaphore,
)
from tests import jobs
from tests.internals import (
    HANDOVER_LEASE,
    HEARTBEAT_TIMEOUT,
    SQLITE_BUSY_TIMEOUT_MS,
    Acquisition,
    Claim,
    Grant,
    LockClaim,
    ResourceLock,
    ThreadWakeup,
    Ticket,
    Waiter,
    Waiters,
    backends,
    clock,
    joining,
    keeper,
    own_row,
    statements,
    waiters,
    waiters_of,
)
from tests.processes import Worker
from tests.timing import in_time

pytestmark = pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"])

FAMILY = pytest.mark.parametrize("using", ["default", "optimistic", "insert"])
SERVERS = pytest.mark.engine("postgresql", "mariadb", "mysql")


@pytest.fixture(autouse=True)
def no_claim_left(transactional_db, has_failed):
    """Check after each test that no claim is left and all counters are zero."""
    yield
    if has_failed():
        return
    assert not LockClaim.objects.values_list("key_resource", "holder", "version")
    assert not ResourceLock.objects.exclude(waiters=0, shares=0).values_list(
        "key_resource", "waiters", "shares"
    )


def claim(key="stock:7", **options):
    return Claim(key=key, **{"ttl": 30.0, "holder": "line", **options})


# A hold from the queue behaves like any other.


@FAMILY
def test_an_unrenewed_hold_from_the_queue_has_its_full_ttl(using, in_queue, threads):
    holder = db_lock("stock:7", using=using).acquire()

    def wait():
        hold = db_lock("stock:7", using=using, ttl=20, renew=False).acquire()
        left = hold.remaining
        hold.release()
        return left

    thread = threads(wait)
    in_queue(1)
    holder.release()
    thread.join(30)
    assert thread.results[0] > 15


@SERVERS
def test_a_renewal_of_a_locked_row_is_retried_in_time(
    in_queue, threads, monkeypatch, until
):
    """A hold from the queue starts with a lease of 1.5 s.

    This does not depend on its ttl. The lease is renewed in time.
    """
    backend, answers = backends["default"], []
    renew = backend.renew

    def noted(claims):
        left = renew(claims)
        answers.extend(
            left[one.owner]
            for one in claims
            if one.key == "stock:7" and one.owner in left
        )
        return left

    holder = db_lock("stock:7").acquire()
    granted, checked = threading.Event(), threading.Event()
    holds = []

    def wait():
        with db_lock("stock:7", ttl=30) as hold:
            holds.append(hold)
            granted.set()
            checked.wait(30)
            hold.check()
            return hold.remaining

    thread = threads(wait)
    in_queue(1)
    monkeypatch.setattr(backend, "renew", noted)
    holder.release()
    assert granted.wait(30)
    with transaction.atomic():
        # Another transaction locks the row when the keeper first renews, unless the
        # keeper has renewed before.
        ResourceLock.objects.select_for_update().get(pk="stock:7")
        until(lambda: answers)
    until(lambda: holds[0].remaining > 15 or not holds[0].held)
    checked.set()
    thread.join(30)
    assert thread.results[0] > 15


@pytest.fixture
def locked_for_twelve_tries(workers, monkeypatch):
    """Return a function that makes another process lock the row of a key.

    The row stays locked until this process has found it locked 12 times.
    """
    (other,) = workers(1)
    pauses = []

    def pause(shortest, longest):
        pauses.append(longest)
        if len(pauses) == 12:
            other.tell("let go")
            assert other.hear() == "unlocked"
        return 0.01

    def lock(key):
        other.start(jobs.lock_row, key)
        assert other.hear() == "locked"

    monkeypatch.setattr(own_row, "random", SimpleNamespace(uniform=pause))
    yield lock
    assert len(pauses) >= 12


@SERVERS
@FAMILY
def test_a_holder_retries_until_its_locked_row_is_free(using, locked_for_twelve_tries):
    """Many claims that join the queue at once may lock the row in turn."""
    with db_lock("stock:7", using=using) as hold:
        locked_for_twelve_tries("stock:7")
        with db_lock("stock:7", using=using) as again:
            assert again.token == hold.token


@SERVERS
@FAMILY
def test_a_guarded_commit_retries_until_its_locked_row_is_free(
    using, locked_for_twelve_tries
):
    with db_lock("stock:7", using=using) as hold:
        locked_for_twelve_tries("stock:7")
        with hold.atomic():
            assert hold.held


@SERVERS
def test_an_insert_grant_retries_until_its_locked_row_is_free(
    locked_for_twelve_tries, monkeypatch
):
    backend = backends["insert"]
    grant = backend._grant

    def grant_late(claim):
        # Only the first time, between the two statements.
        monkeypatch.setattr(backend, "_grant", grant)
        locked_for_twelve_tries(claim.key)
        return grant(claim)

    monkeypatch.setattr(backend, "_grant", grant_late)
    with db_lock("stock:7", using="insert") as hold:
        assert hold.held


def test_a_grant_that_was_read_too_late_gives_no_hold():
    """The caller was paused after its turn had come, until its lease had ended."""
    waiter = Waiter(claim(ttl=30), lambda: None)
    attempt = Acquisition(
        db_lock("stock:7"), threading.current_thread(), ThreadWakeup(), wait=True
    )
    assert waiter.apply(Ticket(grant=Grant(17, 1.5)), clock.now() - 2.0)
    assert attempt._granted_by_notification(waiter.claim, waiter) is None
    assert not keeper.holds


# Waiters that died.


@FAMILY
def test_a_dead_waiter_is_skipped_within_three_seconds(using, doomed, in_queue, until):
    """A dead waiter does not block a caller that only tries either."""
    lock = db_lock("stock:7", using=using)
    with lock:
        victim = doomed()
        victim.start(jobs.wait_for, "stock:7", using=using)
        in_queue(1)
        victim.kill()
        in_queue(0)
        took = time.monotonic() - victim.killed_at
    for one in (lock, db_rwlock("stock:7", using=using).read()):
        found = one.try_acquire()
        assert found
        found.release()
    LockClaim.objects.all().delete()
    in_time(took, 3.0)


# Shared holds.


@FAMILY
def test_a_shared_key_is_not_purged(using, in_other_thread):
    lock = db_rwlock("catalogue", using=using, timeout=0)
    with lock.read() as hold:
        list(backends[using].purge(0))
        assert in_other_thread(lock.write().try_acquire) is None
        hold.check()


@FAMILY
def test_a_reader_without_takeover_gets_lock_stale(using, doomed, until):
    victim = doomed()
    assert isinstance(
        victim.call(jobs.acquire, "stock:7", ttl=0.2, renew=False, using=using), int
    )
    until(lambda: (holder := db_lock("stock:7", using=using).holder()) and holder.stale)
    time.sleep(0.6)
    with pytest.raises(LockStale):
        db_rwlock("stock:7", using=using, takeover=False, timeout=5).read().acquire()
    with db_rwlock("stock:7", using=using).read():
        # The reader has taken the key over and is its holder now.
        holder = db_lock("stock:7", using=using).holder()
        assert not holder.stale
        assert holder.holder.startswith(f"{os.uname().nodename}:{os.getpid()}")


def test_a_stale_holder_cannot_release_a_key_that_is_now_shared():
    backend = backends["brisk"]
    late = claim(ttl=0.05)
    backend.acquire(late)
    time.sleep(0.1)
    reader = claim(shared=True)
    assert backend.acquire(reader)
    assert not backend.release(late)
    assert backend.release(reader)


# Inside transactions.


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize("shared", [False, True])
def test_a_leased_key_with_waiters_is_an_error_in_sqlite_writes(
    shared, workers, in_other_thread
):
    """A waiter in SQLite's only write transaction would block the release."""
    (other,) = workers(1)
    with db_lock("stock:7"), pytest.raises(LockTimeout):
        in_other_thread(lambda: db_lock("stock:7", timeout=0.2).acquire())
    other.start(jobs.hold, "stock:7")
    other.hear()
    started = time.monotonic()
    with pytest.raises(Exception, match="one writer"), transaction.atomic():
        db_lock("stock:7", timeout=3, shared=shared).acquire()
    in_time(time.monotonic() - started, 1.0)
    other.tell()
    assert other.hear() == "released"


# Cost.


@pytest.mark.parametrize("using", ["default", "optimistic"])
def test_a_key_without_waiters_costs_one_statement_again(using, in_queue, threads):
    from tests.database.test_cost import statements

    lock = db_lock("stock:7", using=using)
    first = lock.acquire()

    def wait():
        with lock:
            pass

    thread = threads(wait)
    in_queue(1)
    first.release()
    thread.join(30)
    with lock:
        pass
    acquiring, hold = statements(lock.acquire)
    releasing, _ = statements(hold.release)
    assert [len(acquiring), len(releasing)] == [1, 1], (acquiring, releasing)


# Positions in the queue.


def test_a_reused_queue_number_is_replaced(in_other_thread):
    """A crash of the server may lose the last claim and its number."""
    backend = backends["default"]
    holder, first, second = claim(), claim(), claim()
    backend.acquire(holder)
    number = backend.enqueue(first).position
    assert backend.enqueue(second, "", number).position > number
    for one in (second, first, holder):
        backend.release(one)


@pytest.fixture
def forgetful():
    """Return a function that makes the server forget the numbers it assigned.

    A crash may have this effect.
    """

    def forget(number):
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT setval(pg_get_serial_sequence('dlocks_lockclaim',"
                    " 'id'), %s)",
                    [number],
                )

    return forget


def test_forgotten_queue_numbers_are_not_assigned_twice(forgetful):
    """Waiters queue again with their own numbers, and new waiters get others.

    No waiter is refused.
    """
    backend = backends["default"]
    holder, *olds = (claim() for _ in range(4))
    others = [claim() for _ in range(3)]
    backend.acquire(holder)
    numbers = [backend.enqueue(one).position for one in olds]
    for one in olds:
        backend.release(one)
    forgetful(numbers[0] - 1 or 1)
    for one, number in zip(olds, numbers, strict=True):
        assert backend.enqueue(one, "", number).position == number
    new = [backend.enqueue(one).position for one in others]
    assert new == sorted(new)
    assert not set(new) & set(numbers)
    for one in (*others, *olds, holder):
        backend.release(one)


def test_a_shared_hold_is_granted_despite_a_restored_number(forgetful):
    backend = backends["default"]
    holder, waiting, share = claim(), claim(), claim(key="another", shared=True)
    backend.acquire(holder)
    number = backend.enqueue(waiting).position
    backend.release(waiting)
    forgetful(number)
    assert backend.enqueue(waiting, "", number + 1).position == number + 1
    assert backend.acquire(share)
    for one in (share, waiting, holder):
        assert backend.release(one) == (one is not waiting)


def test_concurrent_threads_queue_despite_a_restored_number(
    forgetful, threads, in_queue, monkeypatch
):
    """The threads join the queue in one statement."""
    # A claim that is queued by hand has no heartbeat.
    monkeypatch.setattr(statements, "HEARTBEAT_TIMEOUT", 30.0)
    backend = backends["default"]
    with db_lock("stock:7") as hold:
        waiting = claim()
        number = backend.enqueue(waiting).position
        backend.release(waiting)
        forgetful(number)
        assert backend.enqueue(waiting, "", number + 1).position == number + 1
        had = []

        def take():
            with db_lock("stock:7", timeout=30) as mine:
                had.append(mine.token)

        crowd = [threads(take) for _ in range(6)]
        in_queue(7)
        backend.release(waiting)
    for one in crowd:
        one.join(30)
    assert len(had) == 6
    assert all(token > hold.token for token in had)


# Waiters of one process.


@SERVERS
@pytest.mark.alone
@pytest.mark.timeout(400)
async def test_many_waiting_tasks_use_at_most_three_connections(until):
    """The server counts the connections during the wait. Each task is served."""
    # A claim takes more processor time on MariaDB and MySQL.
    number = 1000 if connection.vendor == "postgresql" else 200
    served, most = [], 0
    # Connections of idle processes from other tests are not counted.
    await sync_to_async(connections.close_all)()
    await asyncio.sleep(1.2)
    others = await asyncio.to_thread(sessions)
    holder = await db_lock("stock:7").aacquire()

    async def wait():
        async with db_lock("stock:7", timeout=None) as hold:
            served.append(hold.token)

    tasks = [asyncio.create_task(wait()) for _ in range(number)]
    before = None
    while before != number:
        before = await holder.aqueue_length()
        most = max(most, await asyncio.to_thread(sessions))
        await asyncio.sleep(0.02)
    await holder.arelease()
    while not all(task.done() for task in tasks):
        most = max(most, await asyncio.to_thread(sessions))
        await asyncio.sleep(0.2)
    await asyncio.gather(*tasks)
    assert len(served) == number
    assert served == sorted(set(served)), "in the order of their tokens"
    # A pool may have opened some of them before.
    pooled = "pool" in connections.settings["default"].get("OPTIONS", {})
    assert (0 if pooled else 2) <= most - others <= 3


@pytest.mark.psycopg3
@pytest.mark.engine("postgresql")
async def test_waiters_of_one_process_are_polled_together(monkeypatch):
    """Waiters that are notified need only an occasional poll for all of them."""
    backend, looks = backends["default"], []
    # An earlier test may have switched to polling.
    monkeypatch.setattr(waiters_of(backend)._schedule, "_frequent_until", 0.0)
    kind = type(backend)
    monkeypatch.setattr(
        kind,
        "poll",
        lambda *args, look=kind.poll, **kw: looks.append(args[1:]) or look(*args, **kw),
    )
    holder = await db_lock("stock:7").aacquire()

    async def wait():
        async with db_lock("stock:7", timeout=None):
            pass

    tasks = []
    for _ in range(40):
        tasks.append(asyncio.create_task(wait()))
        await asyncio.sleep(0.02)
    while await holder.aqueue_length() < 40:
        await asyncio.sleep(0.02)
    looks.clear()
    await asyncio.sleep(2.5)
    # Each waiter needs a heartbeat every 2 seconds.
    assert len({claim.owner for claims, *_ in looks for claim in claims}) == 40
    assert len(looks) < 40
    await holder.arelease()
    await asyncio.gather(*tasks)


def sessions():
    """Return the number of sessions on this database, without the current one."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname ="
                " current_database() AND pid <> pg_backend_pid() AND backend_type ="
                " 'client backend'"
            )
        else:
            cursor.execute(
                "SELECT COUNT(*) FROM information_schema.processlist WHERE db ="
                " DATABASE() AND id <> CONNECTION_ID()"
            )
        (found,) = cursor.fetchone()
    connection.close()
    return found


async def test_a_task_cancelled_at_any_point_leaves_the_queue(in_other_thread):
    """The task may be about to queue, waiting, or just granted the key."""
    holder = await db_lock("stock:7").aacquire()
    for pause in (0, 0, 0.001, 0.003, 0.01, 0.02, 0.05, 0.1):
        tasks = [asyncio.create_task(db_lock("stock:7").aacquire()) for _ in range(3)]
        await asyncio.sleep(pause)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        assert await holder.aqueue_length() == 0
    await holder.arelease()
    for pause in (0, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015):
        holder = await db_lock("stock:7").aacquire()
        task = asyncio.create_task(db_lock("stock:7").aacquire())
        while not await holder.aqueue_length():
            await asyncio.sleep(0)
        releasing = asyncio.create_task(holder.arelease())
        await asyncio.sleep(pause)
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if not isinstance(result, asyncio.CancelledError):
            await result.arelease()
        await releasing
        mine = await db_lock("stock:7", timeout=10).aacquire()
        await mine.arelease()
        # The key would be reserved for this long for a waiter that has left.
        in_time(mine.waited, HANDOVER_LEASE)


async def test_a_task_that_is_cancelled_twice_leaves_the_queue():
    holder = await db_lock("stock:7").aacquire()
    for pause in (0, 0.001, 0.002, 0.005, 0.01, 0.05):
        task = asyncio.create_task(db_lock("stock:7").aacquire())
        await asyncio.sleep(pause)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(result, asyncio.CancelledError)
    while await holder.aqueue_length():
        await asyncio.sleep(0.001)
    await holder.arelease()
    async with db_lock("stock:7", timeout=10) as mine:
        # A claim without a heartbeat keeps its position for this long.
        in_time(mine.waited, HEARTBEAT_TIMEOUT)


async def test_threads_and_tasks_of_a_process_share_one_queue(in_queue):
    order = []
    holder = await db_lock("stock:7").aacquire()

    def by_thread(name):
        try:
            with db_lock("stock:7") as hold:
                order.append((name, hold.token))
        finally:
            connections.close_all()

    async def by_task(name):
        async with db_lock("stock:7") as hold:
            order.append((name, hold.token))

    tasks = []
    for number in range(6):
        work = by_task(number) if number % 2 else asyncio.to_thread(by_thread, number)
        tasks.append(asyncio.create_task(work))
        while await holder.aqueue_length() <= number:
            await asyncio.sleep(0.001)
    await holder.arelease()
    await asyncio.gather(*tasks)
    assert [name for name, _ in order] == list(range(6))


def test_a_claim_that_times_out_leaves_the_queue(in_queue, in_other_thread):
    with db_lock("stock:7") as hold:
        with pytest.raises(LockTimeout, match="held by"):
            in_other_thread(db_lock("stock:7", timeout=0.1).acquire)
        assert hold.queue_length() == 0
        assert not LockClaim.objects.exists()


def test_a_late_poll_does_not_queue_a_claim_again(in_other_thread, monkeypatch):
    """A caller times out while the poll for its claim has no reply yet."""
    backend = backends["default"]
    poll, apply = backend.poll, Waiters._apply
    has_timed_out, is_applied = threading.Event(), threading.Event()

    def poll_late(claims, *, heartbeat=True):
        if threading.current_thread().name == "dlocks-waiting":
            assert has_timed_out.wait(30)
        return poll(claims, heartbeat=heartbeat)

    def note(waiters, *arguments, **options):
        ahead = apply(waiters, *arguments, **options)
        if has_timed_out.is_set():
            is_applied.set()
        return ahead

    monkeypatch.setattr(backend, "poll", poll_late)
    monkeypatch.setattr(Waiters, "_apply", note)
    with db_lock("stock:7"):
        with pytest.raises(LockTimeout):
            in_other_thread(db_lock("stock:7", timeout=2).acquire)
        has_timed_out.set()
        assert is_applied.wait(30)
        assert backend.waiting("stock:7") == 0


@pytest.mark.parametrize("end", ["skipped", "deleted"])
def test_a_free_key_is_acquired_although_a_poll_hangs(
    end, in_queue, threads, monkeypatch
):
    """The background thread hangs in a poll, for example on a dead connection.

    It sends no heartbeats, so the waiter is skipped, and deleted later. At its timeout,
    the caller still acquires the free key, and then leaves no claim.
    """
    apply, hangs, go_on = Waiters._apply, threading.Event(), threading.Event()

    def hang(*arguments, **options):
        hangs.set()
        assert go_on.wait(60)
        return apply(*arguments, **options)

    monkeypatch.setattr(Waiters, "_apply", hang)
    held = db_lock("stock:7").acquire()
    waits = threads(lambda: db_lock("stock:7", timeout=3).acquire().release())
    in_queue(1)
    assert hangs.wait(30)
    if end == "skipped":
        LockClaim.objects.update(end_time="2020-01-01T00:00Z")
    else:
        LockClaim.objects.all().delete()
    held.release()
    try:
        waits.join(30)
    finally:
        go_on.set()
    assert not db_lock("stock:7").locked()


def test_a_wait_ends_although_a_return_to_the_queue_hangs(
    in_queue, threads, monkeypatch
):
    """A caller times out while the server does not answer the background thread."""
    backend = backends["default"]
    enqueue, hangs, go_on = backend.enqueue, threading.Event(), threading.Event()

    def hang(*arguments):
        if threading.current_thread().name == "dlocks-waiting":
            hangs.set()
            assert go_on.wait(60)
        return enqueue(*arguments)

    monkeypatch.setattr(backend, "enqueue", hang)
    monkeypatch.setattr(waiters, "OUTSIDE_TIMEOUT", 0.1, raising=False)
    with db_lock("stock:7"):
        waits = threads(db_lock("stock:7", timeout=3).acquire)
        in_queue(1)
        LockClaim.objects.all().delete()
        assert hangs.wait(30)
        try:
            with pytest.raises(LockTimeout):
                waits.join(15)
        finally:
            go_on.set()


@pytest.fixture
def turn_comes_on_the_way(monkeypatch):
    """Return a function that calls another one just after a claim has queued.

    The thread of the claim does not know yet that the claim is in the queue.
    """
    backend = backends["default"]
    at_once, rows = backend._queue_at_once, backend._rows

    def arrange(release):
        def queue_at_once(claim, channel):
            monkeypatch.setattr(backend, "_queue_at_once", at_once)
            monkeypatch.setattr(backend, "_rows", rows_after)
            # Act as if other transactions keep the lock row locked at that moment.
            return backend._queue_uncounted(claim, channel)

        def rows_after(sql, parameters):
            if sql.startswith("SELECT id, version,"):
                monkeypatch.setattr(backend, "_rows", rows)
                release()
            return rows(sql, parameters)

        monkeypatch.setattr(backend, "_queue_at_once", queue_at_once)

    return arrange


@pytest.fixture
def row_is_locked(workers, monkeypatch):
    """Return a function that has the lock row locked by another process.

    The row stays locked during the next call of the named backend method.
    """
    backend, (other,) = backends["default"], workers(1)

    def during(name):
        method = getattr(backend, name)

        def call(*arguments):
            monkeypatch.setattr(backend, name, method)
            other.start(jobs.lock_row, "stock:7")
            assert other.hear() == "locked"
            try:
                return method(*arguments)
            finally:
                other.tell()
                assert other.hear() == "unlocked"

        monkeypatch.setattr(backend, name, call)

    return during


@SERVERS
@pytest.mark.parametrize("method", ["_queue", "acquire"])
@pytest.mark.parametrize("scope", ["lease", "transaction"])
def test_a_granted_claim_leaves_the_queue(
    scope, method, turn_comes_on_the_way, row_is_locked, threads, workers
):
    """The row may be locked by others while the caller queues or acquires."""
    _, holder = workers(2)
    assert holder.call(jobs.acquire, "stock:7")
    turn_comes_on_the_way(lambda: holder.call(jobs.release_all))
    row_is_locked(method)

    def wait():
        with (
            transaction.atomic() if scope == "transaction" else contextlib.nullcontext()
        ):
            with db_lock("stock:7", timeout=30, scope=scope):
                return LockClaim.objects.count()

    thread = threads(wait)
    thread.join(60)
    assert thread.results == [0]


@SERVERS
@pytest.mark.parametrize("scope", ["lease", "transaction"])
def test_a_claim_of_unknown_position_leaves_the_queue(
    scope, monkeypatch, in_other_thread, threads
):
    """The caller never learns its position, and leaves the queue at its timeout."""
    backend = backends["default"]
    at_once = backend._queue_at_once
    held = in_other_thread(db_lock("stock:7").acquire)

    def put(claim, channel):
        at_once(claim, channel)
        return

    def wait():
        with (
            pytest.raises(LockTimeout),
            (
                transaction.atomic()
                if scope == "transaction"
                else contextlib.nullcontext()
            ),
        ):
            db_lock("stock:7", timeout=0.3, scope=scope).acquire()
        return LockClaim.objects.count()

    monkeypatch.setattr(backend, "_queue_at_once", put)
    monkeypatch.setattr(backend, "_queue", lambda *_: None)
    thread = threads(wait)
    thread.join(60)
    in_other_thread(held.release)
    assert thread.results == [0]


@pytest.mark.engine("sqlite")
def test_a_timeout_does_not_wait_for_sqlites_writer(threads):
    """The claim could not join the queue, so nothing has to be removed.

    The caller does not wait for the writer.
    """
    with db_lock("stock:7"):
        pass

    def wait():
        began = time.monotonic()
        with pytest.raises(LockTimeout):
            db_lock("stock:7", timeout=0.5).acquire()
        return time.monotonic() - began

    with transaction.atomic():
        ResourceLock.objects.filter(pk="other").update(version=1)
        thread = threads(wait)
        thread.join(60)
    in_time(thread.results[0], 3.0)


@FAMILY
@pytest.mark.engine("sqlite")
@pytest.mark.parametrize(
    "lock", [db_lock, partial(db_semaphore, permits=1)], ids=["lock", "semaphore"]
)
def test_a_waiter_times_out_despite_sqlites_writer(
    using, lock, in_queue, in_other_thread, threads
):
    """The claim cannot be removed then.

    It has no heartbeat any more and is soon skipped.
    """
    held = in_other_thread(lock("stock:7", ttl=60, using=using).acquire)

    def wait():
        began = time.monotonic()
        with pytest.raises(LockTimeout):
            lock("stock:7", timeout=1.5, using=using).acquire()
        return time.monotonic() - began

    thread = threads(wait)
    in_queue(1)
    with transaction.atomic():
        ResourceLock.objects.filter(pk="other").update(version=1)
        thread.join(60)
    in_other_thread(held.release)
    # The claim has been removed or is skipped. It blocks no other caller.
    with db_lock("stock:7", timeout=30, using=using):
        pass
    LockClaim.objects.all().delete()
    in_time(thread.results[0], 1.5 + 2.0)


@FAMILY
@pytest.mark.engine("sqlite")
@pytest.mark.parametrize(
    "lock", [db_lock, partial(db_semaphore, permits=1)], ids=["lock", "semaphore"]
)
def test_the_release_of_a_failed_block_waits_for_sqlites_writer(using, lock, threads):
    """The key was held, so the release waits for the writer."""
    taken, begun = threading.Event(), threading.Event()

    def fail():
        hold = lock("stock:7", ttl=60, using=using).acquire()
        taken.set()
        assert begun.wait(60)
        hold.release(failed=True)
        return hold.queue_length(), backends["default"].holder("stock:7")

    thread = threads(fail)
    assert taken.wait(60)
    with transaction.atomic():
        ResourceLock.objects.filter(pk="other").update(version=1)
        begun.set()
        # This is longer than a waiter that times out would wait.
        thread.join(1.5)
        assert thread.is_alive()
    thread.join(60)
    assert thread.results == [(0, None)]


@pytest.fixture
def lost_on_the_way(monkeypatch):
    """Return a function that breaks connections on their return to autocommit.

    Its argument is the number of connections to break.
    """
    connection.close()
    kind, losses = type(connections["default"]), []
    to_autocommit, caller = kind._set_autocommit, threading.get_ident()

    def lose(self, autocommit):
        if autocommit and losses and threading.get_ident() == caller:
            losses.pop()
            with (
                contextlib.suppress(OSError),
                socket.socket(
                    fileno=os.dup(self.connection.fileno())
                ) as line_to_server,
            ):
                line_to_server.shutdown(socket.SHUT_RDWR)
        return to_autocommit(self, autocommit)

    monkeypatch.setattr(kind, "_set_autocommit", lose)
    yield lambda number: losses.extend([None] * number)
    connection.close()


@SERVERS
@pytest.mark.parametrize(
    "lock", [db_lock, partial(db_semaphore, permits=1)], ids=["lock", "semaphore"]
)
@pytest.mark.parametrize("losses", [1, 2, 20])
def test_a_connection_lost_before_autocommit_leaves_nothing(
    lost_on_the_way, lock, losses
):
    """Django keeps the broken connection as if it were in a transaction.

    Later statements would fail for this reason.
    """
    lost_on_the_way(losses)
    hold = None
    while hold is None:
        try:
            hold = lock("stock:7", timeout=0).acquire()
        except LockBackendError:
            assert not connection.in_atomic_block
            assert not backends["default"].in_transaction()
    with transaction.atomic():
        assert ResourceLock.objects.filter(pk="stock:7").exists()
    hold.release()


@FAMILY
@pytest.mark.engine("mariadb", "mysql")
def test_a_lease_is_released_after_a_failed_commit(
    using, lost_on_the_way, in_other_thread
):
    """Django keeps the on-commit callbacks and the broken connection.

    It behaves as if the transaction never ended.
    """
    hold = db_lock("stock:7", using=using).acquire()
    with pytest.raises(OperationalError), hold.atomic():
        lost_on_the_way(1)
    assert hold.held
    hold.check()
    hold.renew()
    hold.release()
    in_other_thread(
        lambda: db_lock("stock:7", using=using, timeout=0).acquire().release()
    )


@pytest.mark.engine("mariadb", "mysql")
def test_a_connection_lost_at_the_end_of_a_transaction_raises(
    lost_on_the_way,
):
    """The broken connection raises, as it would for any statement.

    A lease needs no connection of the caller.
    """
    with pytest.raises(OperationalError), transaction.atomic():
        hold = db_lock("stock:7").acquire()
        lost_on_the_way(1)
    assert not hold.held
    with pytest.raises(LockBackendError, match="lost while a transaction ended"):
        db_lock("stock:8").acquire()
    with db_lock("stock:8", scope="lease") as lease:
        with (
            pytest.raises(LockBackendError, match="lost while a transaction ended"),
            lease.atomic(),
        ):
            pass
    connection.close()
    with db_lock("stock:7", timeout=0), db_lock("stock:8", timeout=0):
        pass


@SERVERS
def test_a_key_acquired_at_the_timeout_leaves_no_claim(threads, in_queue, monkeypatch):
    """Otherwise its release would hand the key to an abandoned claim."""
    monkeypatch.setattr(Waiters, "_poll", lambda *_, **__: time.sleep(0.05))
    monkeypatch.setattr(statements, "HEARTBEAT_TIMEOUT", 30.0)

    def wait():
        with db_lock("stock:7", timeout=3) as hold:
            return hold.queue_length()

    with transaction.atomic():
        db_lock("stock:7").acquire()
        thread = threads(wait)
        in_queue(1)
        transaction.set_rollback(True)
    thread.join(60)
    assert thread.results == [0]
    with db_lock("stock:7", timeout=0):
        pass


@pytest.mark.engine("sqlite")
def test_an_interrupt_restores_the_busy_timeout_of_sqlite(monkeypatch):
    """The project's own statements wait for the writer as long as before."""
    with db_lock("stock:7"):
        pass
    raw = connection.connection
    ((usual,),) = raw.execute("PRAGMA busy_timeout").fetchall()

    class Interrupted:
        """A session that is interrupted as soon as the shorter timeout is set."""

        def execute(self, sql):
            done = raw.execute(sql)
            if sql == f"PRAGMA busy_timeout = {SQLITE_BUSY_TIMEOUT_MS}":
                raise KeyboardInterrupt
            return done

    backend = backends["default"]
    monkeypatch.setattr(backend, "_session", Interrupted)
    with pytest.raises(KeyboardInterrupt), backend._with_short_timeout():
        pass
    assert raw.execute("PRAGMA busy_timeout").fetchall() == [(usual,)]


@SERVERS
def test_an_interrupted_grant_is_released_in_its_transaction(
    threads, workers, monkeypatch
):
    """A release outside the transaction would wait for the transaction's end."""
    (holder,) = workers(1)
    assert holder.call(jobs.acquire, "stock:7")
    backend = backends["default"]
    hold = Acquisition._hold

    def interrupted(self, *arguments):
        if self.claim.scope == "transaction":
            raise KeyboardInterrupt
        return hold(self, *arguments)

    def queue(*arguments):
        monkeypatch.undo()
        monkeypatch.setattr(Acquisition, "_hold", interrupted)
        holder.call(jobs.release_all)
        return backend.enqueue(*arguments)

    monkeypatch.setattr(backend, "enqueue", queue)

    def wait():
        with transaction.atomic():
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                db_lock("stock:7", timeout=30, scope="transaction").acquire()
            taken = time.monotonic() - began
        return taken, ResourceLock.objects.get(pk="stock:7").status

    thread = threads(wait)
    thread.join(60)
    taken, status = thread.results[0]
    assert status == "F"
    in_time(taken, 2.0)


def test_timeouts_during_a_handover_lose_no_waiter(threads):
    """Each waiter is served or times out, and the key is free in the end."""
    for number in range(12):
        held, served = db_lock("stock:7").acquire(), []

        def wait(timeout, served=served):
            try:
                with db_lock("stock:7", timeout=timeout) as hold:
                    served.append(hold.token)
                return "served"
            except LockTimeout:
                return "timeout"

        waiting = [
            threads(lambda timeout=0.05 + 0.002 * one: wait(timeout))
            for one in range(4)
        ]
        time.sleep(0.045 + 0.002 * number)
        held.release()
        for thread in waiting:
            thread.join(30)
        assert all(thread.results[0] in {"served", "timeout"} for thread in waiting)
        with db_lock("stock:7", timeout=0.5):
            pass


@pytest.mark.engine("postgresql")
def test_a_slow_poll_does_not_switch_to_polling(in_queue, threads, monkeypatch):
    """The key is handed over while a poll is under way.

    No message was there when this process last listened.
    """
    backend, asked, go_on = backends["default"], threading.Event(), threading.Event()
    monkeypatch.setattr(waiters_of(backend)._schedule, "_frequent_until", 0.0)
    look = type(backend).poll

    def slow(self, claims, *, heartbeat=True):
        asked.set()
        go_on.wait(30)
        return look(self, claims, heartbeat=heartbeat)

    hold = db_lock("stock:7").acquire()
    waits = threads(lambda: db_lock("stock:7").acquire().release())
    in_queue(1)
    monkeypatch.setattr(type(backend), "poll", slow)
    assert asked.wait(30)
    hold.release()
    time.sleep(0.3)
    go_on.set()
    waits.join(30)
    assert waiters_of(backend)._schedule._frequent_until == 0.0


def test_a_key_is_tried_before_it_is_reported_as_busy(monkeypatch):
    """The key was contended a moment ago, so the caller queues at once.

    Its timeout passes before it has queued. It still tries to acquire the key.
    """
    backends["default"]._contended_keys.add("stock:7")
    should_queue, hints = Acquisition._should_queue, []

    def slow(self, claim):
        hints.append(should_queue(self, claim))
        time.sleep(0.25 if hints[-1] else 0.0)
        return hints[-1]

    monkeypatch.setattr(Acquisition, "_should_queue", slow)
    with db_lock("stock:7", timeout=0.2) as hold:
        assert hold.waited >= 0.2
    assert hints == [True, False]


# Order.


@FAMILY
def test_processes_are_served_in_the_order_of_arrival(using, workers, in_queue):
    crowd = workers(5)
    with db_lock("stock:7", using=using):
        for number, worker in enumerate(crowd):
            worker.start(jobs.wait_for, "stock:7", using=using, timeout=30)
            in_queue(number + 1)
    answers = [worker.hear() and worker.hear() for worker in crowd]
    tokens = [token for _, token in answers]
    assert tokens == sorted(tokens)


@pytest.mark.parametrize("using", ["default", "memory"])
def test_a_waiter_that_returns_is_ahead_of_later_ones(using):
    """A process that was stopped is skipped, and gets its old position again."""
    backend = backends[using]
    holder, stopped, later = claim(), claim(), claim()
    assert backend.acquire(holder)
    position = backend.enqueue(stopped).position
    backend.enqueue(later)
    # As if its heartbeat was missing for long enough to be deleted.
    backend.release(stopped)
    assert backend.enqueue(stopped, position=position).ahead == 0
    assert backend.poll([later])[later.owner].ahead == 1
    for one, following in ((holder, stopped), (stopped, later)):
        assert backend.release(one)
        assert backend.poll([following])[following.owner].grant
    assert backend.release(later)


@FAMILY
def test_only_an_unfair_claim_passes_the_queue(
    using, workers, in_queue, in_other_thread
):
    """A holder that releases and reacquires the key queues behind the waiters."""
    first, second = workers(2)
    hold = db_lock("stock:7", using=using).acquire()
    first.start(jobs.hold, "stock:7", using=using)
    in_queue(1)
    second.start(jobs.wait_for, "stock:7", using=using)
    in_queue(2)
    hold.release()
    again = db_lock("stock:7", using=using, timeout=0)
    assert again.try_acquire() is None
    token = first.hear()
    first.tell()
    assert first.hear() == "released"
    assert second.hear() == "waiting"
    assert second.hear()[1] > token
    # This queued claim never acquires the key. A fair claim does not overtake it.
    backend, waits = backends[using], claim()
    mine, barging = claim(), claim(fair=False)
    assert backend.acquire(mine)
    ResourceLock.objects.filter(pk="stock:7").update(waiters=1)
    LockClaim.objects.create(
        key_resource="stock:7", owner=waits.owner, holder="",
            begin_time="2020-01-01T00:00Z",
        end_time="2190-01-01T00:00Z", shared=False, permits=1, scope="P", takeover=True,
            counted=True, handover_ttl=10**6,
    )  # fmt: skip
    ResourceLock.objects.filter(pk="stock:7").update(
        status="S", end_time="2020-01-01T00:00Z"
    )
    assert backend.acquire(claim()) is None
    backend.release(waits)
    assert backend.acquire(barging)
    backend.release(barging)


def test_an_unfair_claim_passes_a_stopped_waiter(in_queue, workers, until):
    def goes_before():
        # The key is released but not handed over, as after the rollback of a
        # transaction.
        ResourceLock.objects.filter(pk="stock:7").update(
            status="S", end_time="2020-01-01T00:00Z"
        )
        return db_lock("stock:7", fair=False).try_acquire()

    (other,) = workers(1)
    backend = backends["default"]
    holder = claim()
    backend.acquire(holder)
    other.start(jobs.wait_for, "stock:7")
    in_queue(1)
    other.stop()
    try:
        # A statement that the stopped process has sent may still run and acquire the
        # key.
        until(goes_before).release()
    finally:
        other.resume()
    assert other.hear() == "waiting"
    assert other.hear()


# Endings other than a release.


def test_the_key_is_handed_over_when_min_hold_ends(workers, in_queue):
    (other,) = workers(1)
    hold = db_lock("stock:7", min_hold=1.0).acquire()
    began = time.monotonic()
    other.start(jobs.wait_for, "stock:7")
    in_queue(1)
    hold.release()
    assert other.hear() == "waiting"
    granted, _ = other.hear()
    assert granted - began >= 0.95
    in_time(granted - began, 1.0 + 0.7)


def test_a_dead_holders_key_is_handed_over_when_its_lease_ends(
    workers, doomed, in_queue
):
    (other,) = workers(1)
    victim = doomed()
    victim.start(jobs.hold, "stock:7", ttl=1.0)
    victim.hear()
    other.start(jobs.wait_for, "stock:7")
    in_queue(1)
    victim.kill()
    assert other.hear() == "waiting"
    granted, _ = other.hear()
    in_time(granted - victim.killed_at, 1.0 + 0.5 + 0.7)


@pytest.fixture
def notifications():
    """Return a function that returns the notifications of a channel that have come.

    It waits for the first one. The name of the channel is that of another host.
    """
    session = connection.copy()
    with session.cursor() as cursor:
        cursor.execute("LISTEN elsewhere")
    yield lambda: [
        one.channel for one in session.connection.notifies(timeout=5.0, stop_after=1)
    ]
    session.close()


@pytest.mark.psycopg3
@pytest.mark.engine("postgresql")
@FAMILY
@pytest.mark.parametrize("end", ["release", "commit"])
def test_a_waiter_on_another_host_is_notified(
    using, end, notifications, in_other_thread
):
    """Its process is notified by the server, and does not have to poll."""
    backend, waits = backends[using], claim()
    scope = transaction.atomic() if end == "commit" else contextlib.nullcontext()
    with scope, db_lock("stock:7", using=using):
        assert in_other_thread(backend.enqueue, waits, "elsewhere").position
    assert notifications() == ["elsewhere"]
    backend.release(waits)


@SERVERS
@FAMILY
@pytest.mark.parametrize("roll_back", [False, True])
def test_the_end_of_a_transaction_wakes_its_waiters(
    using, roll_back, workers, in_queue
):
    holder, *waiting = workers(3)
    holder.start(jobs.hold_in_transaction, "stock:7", using=using, roll_back=roll_back)
    holder.hear()
    for number, worker in enumerate(waiting):
        worker.start(jobs.wait_for, "stock:7", using=using)
        in_queue(number + 1)
    ended = time.monotonic()
    holder.tell()
    assert holder.hear() == "ended"
    tokens = []
    for worker in waiting:
        assert worker.hear() == "waiting"
        granted, token = worker.hear()
        tokens.append(token)
    assert tokens == sorted(tokens)
    in_time(granted - ended, 1.5)


@SERVERS
def test_transactions_join_the_queue(workers, in_queue):
    first, second = workers(2)
    hold = db_lock("stock:7").acquire()
    first.start(jobs.hold_in_transaction, "stock:7")
    in_queue(1)
    second.start(jobs.wait_for, "stock:7")
    in_queue(2)
    hold.release()
    token = first.hear()
    assert not second.pipe.poll(0.2) or second.hear() == "waiting"
    first.tell()
    assert first.hear() == "ended"
    while not isinstance(answer := second.hear(), tuple):
        pass
    assert answer[1] > token


def test_a_waiter_without_takeover_gets_lock_stale(doomed, workers, in_queue):
    (patient,) = workers(1)
    victim = doomed()
    victim.start(jobs.hold, "stock:7", ttl=1.0)
    victim.hear()
    patient.start(jobs.acquire, "stock:7", takeover=False, timeout=20)
    in_queue(1)
    victim.kill()
    assert patient.hear() == "LockStale"
    with db_lock("stock:7", timeout=1):
        pass


def test_waiters_with_a_short_ttl_are_served(workers, in_queue):
    crowd = workers(4)
    with db_lock("stock:7"):
        for number, worker in enumerate(crowd):
            worker.start(jobs.wait_for, "stock:7", ttl=1.3)
            in_queue(number + 1)
        time.sleep(1.5)
    for worker in crowd:
        assert worker.hear() == "waiting"
        # It acquired the key and released it in time.
        assert worker.hear()


@SERVERS
def test_a_lease_waits_in_the_queue_without_autocommit(workers, in_queue):
    (holder,) = workers(1)
    holder.start(jobs.hold, "stock:7")
    token = holder.hear()
    transaction.set_autocommit(False)
    try:
        lock = db_lock("stock:7", scope="lease", release_at="exit", timeout=0.2)
        with pytest.raises(LockTimeout):
            lock.acquire()
        holder.tell()
        assert holder.hear() == "released"
        with db_lock("stock:7", scope="lease", release_at="exit") as hold:
            assert hold.token > token
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


# The waiters of a process.


@SERVERS
def test_the_connection_for_waiting_closes_within_a_second(workers, in_queue, until):
    """Otherwise DROP DATABASE at the end of a project's tests would fail."""
    waiting, _asking = workers(2)
    with db_lock("stock:7"):
        waiting.start(jobs.wait_for, "stock:7")
        in_queue(1)
        assert waiting.hear() == "waiting"
    assert waiting.hear()
    waiting.call(jobs.close_connections)
    left = time.monotonic()
    mine = len(waiting.call(jobs.threads))
    until(lambda: "dlocks-waiting" not in waiting.call(jobs.threads))
    in_time(time.monotonic() - left, 1.0)
    assert mine


def test_a_waiter_that_arrives_during_the_idle_close_is_served(
    in_other_thread, threads, until
):
    """The waiter comes shortly before or after half a second without waiters."""
    for number in range(6):
        hold = db_lock("stock:7").acquire()
        with contextlib.suppress(LockTimeout):
            in_other_thread(db_lock("stock:7", timeout=0.05).acquire)
        time.sleep(0.47 + 0.02 * number)
        thread = threads(
            lambda: db_lock("stock:7").acquire().release() or time.monotonic()
        )
        until(lambda hold=hold: hold.queue_length() == 1)
        hold.release()
        released = time.monotonic()
        thread.join(30)
        in_time(thread.results[0] - released, 0.7)


@pytest.fixture
def outside_sqlite(monkeypatch):
    """Return a context manager that keeps other threads out of SQLite.

    A process that is forked meanwhile would inherit a locked mutex of SQLite. On other
    engines the context manager does nothing.
    """
    backend = backends["default"]

    @contextlib.contextmanager
    def keep_out():
        if connection.vendor != "sqlite":
            yield
            return
        is_out, gate = threading.Event(), threading.Lock()

        def look(*args, look=backend.poll, **options):
            is_out.set()
            with gate:
                return look(*args, **options)

        with monkeypatch.context() as patch, gate:
            patch.setattr(backend, "poll", look)
            assert is_out.wait(10)
            yield

    return keep_out


def test_a_fork_does_not_disturb_waiters(threads, in_queue, outside_sqlite):
    hold = db_lock("stock:7").acquire()
    thread = threads(lambda: db_lock("stock:7").acquire().release() or time.monotonic())
    in_queue(1)
    connection.close()
    with warnings.catch_warnings(), outside_sqlite():
        # Python 3.12 and newer warn about forking a process with threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            assert not waiters_of(backends["default"])._waiters
            assert db_lock("stock:7", timeout=0.3).try_acquire() is None
            with contextlib.suppress(LockTimeout):
                db_lock("stock:7", timeout=0.3).acquire()
            with db_lock("stock:8"):
                status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    time.sleep(2.5)
    in_queue(1)
    hold.release()
    released = time.monotonic()
    thread.join(30)
    in_time(thread.results[0] - released, 0.7)


# Shared holds from the queue.


@FAMILY
@pytest.mark.parametrize("kind", ["reader", "permit"])
def test_a_shared_hold_from_the_queue_works_like_any_other(
    using, kind, in_queue, threads, in_other_thread
):
    policy = {"using": using, "ttl": 4.0}
    lock = (
        db_semaphore("stock:7", permits=1, **policy)
        if kind == "permit"
        else db_rwlock("stock:7", **policy).read()
    )
    before = db_lock("stock:7", using=using).acquire()
    ready, done, holds = threading.Event(), threading.Event(), []

    def share():
        with lock as hold, lock as again:
            assert again is hold
            assert hold.count == 2
            holds.append(hold)
            ready.set()
            done.wait(30)
            hold.check()

    threads(share)
    in_queue(1)
    before.release()
    assert ready.wait(30)
    assert holds[0].token > before.token
    # This is longer than the short lease from the queue, and longer than the ttl.
    time.sleep(4.5)
    holds[0].check()
    assert (
        in_other_thread(db_lock("stock:7", using=using, timeout=0).try_acquire) is None
    )
    done.set()
    with db_lock("stock:7", using=using) as after:
        assert after.token > holds[0].token


def test_a_lost_shared_hold_is_reported(until):
    told = []
    lock = db_semaphore("api", permits=2, ttl=1.0, on_lost=told.append)
    hold = lock.acquire()
    LockClaim.objects.all().delete()
    ResourceLock.objects.update(shares=0)
    until(lambda: told == [hold])
    with pytest.raises(Exception, match="lost"):
        hold.release()


def test_a_dead_reader_blocks_a_writer_only_for_its_ttl(doomed, in_queue, workers):
    """A reader that dies with its shared hold blocks a writer for its ttl only."""
    (writer,) = workers(1)
    reader = doomed()
    reader.start(jobs.hold, "stock:7", shared=True, ttl=1.0)
    reader.hear()
    writer.start(jobs.wait_quietly, "stock:7")
    in_queue(1)
    reader.kill()
    in_time(writer.hear()[0] - reader.killed_at, 1.0 + 0.5 + 0.7)


def test_a_shared_hold_is_handed_over_after_min_hold(workers, in_queue):
    (writer,) = workers(1)
    hold = db_lock("stock:7", shared=True, min_hold=1.0).acquire()
    began = time.monotonic()
    writer.start(jobs.wait_quietly, "stock:7")
    in_queue(1)
    hold.release()
    granted, _ = writer.hear()
    # The bound adds the grace and one poll.
    assert granted - began >= 0.95
    in_time(granted - began, 1.0 + 0.5 + 0.7)


def test_readers_and_writers_in_processes_exclude_each_other(workers, tmp_path):
    """An odd number means that a writer is active. Readers and writers check it."""
    path = tmp_path / "value"
    path.write_text("0")
    crowd = workers(5)
    for number, worker in enumerate(crowd):
        worker.start(
            jobs.read_or_write, str(path), "stock:7", times=40, write=number < 2
        )
    for worker in crowd:
        worker.hear()
    assert path.read_text() == "160"


# Tests of projects that use dlocks.


class InATestCase(TestCase):
    """A project's own ``TestCase`` that uses locks."""

    def test_a_lock_can_be_used_repeatedly_in_a_testcase(self):
        for _ in range(3):
            with db_lock("stock:7") as hold, db_lock("stock:7"):
                assert hold.queue_length() == 0
            with db_rwlock("catalogue", scope=None).read():
                pass
        self.assertTrue(ResourceLock.objects.filter(pk="stock:7").exists())

    def test_a_shared_hold_in_a_testcase_leaves_nothing(self):
        def committed():
            try:
                return ResourceLock.objects.filter(pk="catalogue").exists()
            finally:
                connection.close()

        with db_rwlock("catalogue").read() as hold:
            self.assertEqual(hold.scope, "transaction")
        if connection.vendor != "sqlite":
            self.assertFalse(keeper.run(committed))

    def test_the_next_test_finds_the_key_free(self):
        with db_lock("stock:7", timeout=0):
            pass


@SERVERS
def test_a_database_can_be_dropped_half_a_second_after_a_wait(until):
    """A test runner does this at its end, while the waiting process still runs."""
    name = connection.ops.quote_name("dropped")
    with connection.cursor() as cursor:
        cursor.execute(f"DROP DATABASE IF EXISTS {name}")
        cursor.execute(f"CREATE DATABASE {name}")
    original = connections["default"].settings_dict["NAME"]
    (holder,) = [Worker(DLOCKS_TEST_NAME="dropped")]
    try:
        holder.call(jobs.migrate_only)
        answer = holder.call(jobs.wait_and_time_out, "stock:7")
        left = time.monotonic()
        assert answer == "LockTimeout"
        with connection.cursor() as cursor:

            def is_unused():
                if connection.vendor == "postgresql":
                    cursor.execute(
                        "SELECT count(*) FROM pg_stat_activity"
                        " WHERE datname = 'dropped' AND backend_type = 'client backend'"
                    )
                else:
                    cursor.execute(
                        "SELECT COUNT(*) FROM information_schema.processlist WHERE db ="
                        " 'dropped'"
                    )
                return cursor.fetchone() == (0,)

            until(is_unused)
            took = time.monotonic() - left
            cursor.execute(f"DROP DATABASE {name}")
        in_time(took, 0.6)
    finally:
        holder.kill()
    assert connections["default"].settings_dict["NAME"] == original


# Stopped processes.


@SERVERS
@FAMILY
def test_a_process_stopped_at_any_point_blocks_others_briefly(using, doomed, workers):
    """It may be stopped in a queue transaction, with the lock row locked."""
    crowd = workers(2)
    victim = doomed()
    victim.start(jobs.enter_and_leave, "stock:7", seconds=5, using=using, ttl=1.0)
    for worker in crowd:
        worker.start(jobs.longest_wait, "stock:7", seconds=4, using=using, ttl=1.0)
    time.sleep(random.uniform(0.1, 0.3))
    victim.stop()
    time.sleep(2.7)
    victim.resume()
    longest = max(worker.hear() for worker in crowd)
    # The victim was not ended while it was in the queue.
    victim.hear()
    # The sum of its lease, its grace, its turn and the limit of a transaction.
    in_time(longest, 4.0)


@SERVERS
@FAMILY
def test_a_process_that_hangs_in_a_step_blocks_others_briefly(using, doomed, workers):
    """Its session is ended, and the process begins again when it continues."""
    (worker,) = workers(1)
    victim = doomed()
    victim.start(jobs.stop_within_a_step, "stock:7", using=using)
    assert victim.hear() == "locked"
    worker.start(jobs.read, "stock:7", using=using, timeout=20)
    began = time.monotonic()
    token = worker.hear()
    in_time(time.monotonic() - began, 4.0)
    worker.tell()
    assert worker.hear() == "released"
    victim.tell()
    assert victim.hear() > token


# Variables of MariaDB that limit how long a transaction may be idle.
IDLE_KINDS = ("", "readonly_", "write_")


@pytest.mark.engine("mariadb")
def test_a_server_that_lets_transactions_idle_changes_nothing(doomed, workers):
    """The operator allows all transactions to be idle for a long time."""
    names = [f"idle_{kind}transaction_timeout" for kind in IDLE_KINDS]
    with connection.cursor() as cursor:
        for name in names:
            cursor.execute(f"SET GLOBAL {name} = 600")
        try:
            test_a_process_that_hangs_in_a_step_blocks_others_briefly(
                "default", doomed, workers
            )
        finally:
            for name in names:
                cursor.execute(f"SET GLOBAL {name} = DEFAULT")


@pytest.mark.engine("mariadb", "mysql")
def test_a_handover_beside_a_heartbeat_fails_no_statement(threads, until, monkeypatch):
    """It would keep the key locked until the process rolls it back."""
    backend, outcomes = backends["default"], []
    hold = db_lock("stock:7").acquire()
    waiting = threads(lambda: jobs.token_of(db_lock("stock:7", timeout=30)))
    until(lambda: backend.waiting("stock:7") == 1)
    execute = backend._execute

    def watch(connection, in_transaction, sql, parameters):
        # Another thread may grant the key to the waiter in the same way.
        outcome = "failed"
        try:
            result = execute(connection, in_transaction, sql, parameters)
            outcome = "executed"
        finally:
            if "START TRANSACTION" in sql:
                outcomes.append(outcome)
                over.set()
        return result

    beat, over = threading.Event(), threading.Event()

    def heartbeat():
        with transaction.atomic():
            LockClaim.objects.select_for_update().get()
            beat.set()
            over.wait(30)

    other = threads(heartbeat)
    assert beat.wait(30)
    monkeypatch.setattr(backend, "_execute", watch)
    hold.release()
    other.join(30)
    waiting.join(30)
    assert set(outcomes) == {"executed"}
    assert waiting.results[0] > hold.token


@pytest.mark.engine("mariadb", "mysql")
def test_a_step_leaves_no_limit_in_the_callers_session():
    """The caller's session may be idle for as long as before."""
    names = ["wait_timeout"]
    if connection.mysql_is_mariadb:
        names += [f"idle_{kind}transaction_timeout" for kind in IDLE_KINDS]
    read = f"SELECT {', '.join(f'@@SESSION.{name}' for name in names)}"
    with connection.cursor() as cursor:
        for name in names:
            cursor.execute(f"SET SESSION {name} = 1234")
        with db_rwlock("stock:7").read():
            cursor.execute(read)
            assert set(cursor.fetchone()) == {1234}
        cursor.execute(read)
        assert set(cursor.fetchone()) == {1234}


@pytest.mark.engine("mariadb", "mysql")
def test_a_signal_at_the_end_of_a_step_is_not_swallowed(monkeypatch, is_busy):
    """A task queue ends a task that takes too long by an exception of its own."""

    def end(*_):
        raise RuntimeError("the task took too long")

    dialect = type(backends["default"].dialect)
    slow = f"{dialect.no_idle_limit} + SLEEP(0.6)"
    monkeypatch.setattr(dialect, "no_idle_limit", slow)
    former = signal.signal(signal.SIGALRM, end)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(RuntimeError, match="took too long"):
            db_rwlock("stock:7").read().acquire()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    monkeypatch.undo()
    assert not is_busy("stock:7", "default")
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@SESSION.wait_timeout")
        assert cursor.fetchone()[0] > 2


@SERVERS
def test_an_interrupt_during_an_outage_is_not_swallowed(monkeypatch):
    """Ctrl-C comes when the session ends, and Django cannot open another one."""

    def connect():
        raise OperationalError("the server is down")

    def end_session(*_, **__):
        connection.connection.close()
        monkeypatch.setattr(connection, "connect", connect)
        raise KeyboardInterrupt

    monkeypatch.setattr(backends["default"], "_load", end_session)
    with pytest.raises(KeyboardInterrupt):
        db_rwlock("stock:7").read().acquire()
    monkeypatch.undo()
    assert db_rwlock("stock:7").read().acquire().release() is None


def test_a_thread_that_hangs_while_queueing_blocks_no_other(
    threads, in_queue, monkeypatch
):
    """Its connection may be dead while its driver still waits."""
    entered, leave = threading.Event(), threading.Event()
    monkeypatch.setattr(backends["default"], "_joining", None)

    def hang():
        with backends["default"]._joining_mutex():
            entered.set()
            leave.wait(30)

    def take():
        with db_lock("stock:7", timeout=30) as hold:
            return hold.held

    with db_lock("stock:7"):
        threads(hang)
        assert entered.wait(10)
        waiting = threads(take)
        try:
            in_queue(1)
        finally:
            leave.set()
    waiting.join(30)
    assert waiting.results == [True]


def test_waiting_costs_hardly_any_processor_time(in_queue, threads):
    """No thread polls in a loop, neither during the wait nor after it."""
    with db_lock("stock:7"):
        waiting = threads(lambda: db_lock("stock:7", timeout=30).acquire().release())
        in_queue(1)
        began = time.process_time()
        time.sleep(0.4)
        assert time.process_time() - began < 0.25
    waiting.join(30)
    began = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - began < 0.25


# The notifications of a process.


@pytest.mark.engine("postgresql")
@pytest.mark.parametrize("kind", [TimeoutError, RuntimeError, KeyboardInterrupt])
def test_an_error_raised_by_a_signal_handler_ends_the_wait(kind, workers, in_queue):
    """A task queue ends a task that takes too long in this way."""
    (worker,) = workers(1)
    with db_lock("stock:7"):
        worker.start(jobs.wait_until_a_signal, "stock:7", kind, timeout=30)
        assert worker.hear() == "waiting"
        in_queue(1)
        os.kill(worker.process.pid, signal.SIGUSR1)
        assert worker.hear(15) == kind.__name__
        in_queue(0)


@pytest.mark.engine("postgresql")
async def test_threads_and_tasks_of_a_process_are_notified(in_queue, threads):
    held = [await db_lock(key).aacquire() for key in ("stock:7", "stock:8")]
    listening = threads(lambda: db_lock("stock:7", timeout=30).acquire().release())
    await sync_to_async(in_queue)(1)
    task = asyncio.create_task(db_lock("stock:8", timeout=30).aacquire())
    # The task needs Django's thread too.
    while not await sync_to_async(backends["default"].waiting)("stock:8"):
        await asyncio.sleep(0.01)
    await held[1].arelease()
    hold = await task
    await hold.arelease()
    await held[0].arelease()
    await asyncio.to_thread(listening.join, 30)
    assert listening.results == [None]
    in_time(hold.waited, 10)


# Timeouts while a transaction has the row.


@SERVERS
@FAMILY
def test_a_timeout_behind_a_transaction_is_not_granted_later(using, workers):
    """A poll that waited for the row still sees the claim in the queue."""
    (holder,) = workers(1)
    with db_lock("stock:7", using=using):
        pass
    for _ in range(5):
        holder.start(jobs.hold_in_transaction, "stock:7", using=using)
        holder.hear()
        with pytest.raises(LockTimeout):
            db_lock("stock:7", using=using, timeout=0.25).acquire()
        holder.tell()
        assert holder.hear() == "ended"
        with db_lock("stock:7", using=using) as hold:
            in_time(hold.waited, HANDOVER_LEASE)
        assert not LockClaim.objects.exists()


@SERVERS
def test_a_claim_cancelled_just_before_its_grant_is_skipped(
    monkeypatch, in_other_thread, is_busy
):
    backend = backends["default"]
    mine = claim()
    load = backend._load

    def leaves(*args, **kwargs):
        loaded = load(*args, **kwargs)
        monkeypatch.setattr(backend, "_load", load)
        # This step has locked the row, as another process could have.
        assert in_other_thread(backend.release, mine, failed=True) is False
        return loaded

    hold = db_lock("stock:7").acquire()
    assert backend.enqueue(mine).position
    monkeypatch.setattr(backend, "_advance", lambda key: False)
    monkeypatch.setattr(backend, "_hand_over", lambda claim, failed: False)
    monkeypatch.setattr(backend, "_load", leaves)
    hold.release()
    monkeypatch.undo()
    assert not is_busy()


# Many claims at once.


def test_threads_of_a_process_join_the_queue_one_at_a_time(
    monkeypatch, in_queue, threads
):
    """Otherwise they would lock the key's row in turn and keep out its holder."""
    backend = backends["default"]
    at_it, together = set(), []

    def noted(step):
        def run(*args, **kwargs):
            this = threading.get_ident()
            at_it.add(this)
            together.append(len(at_it))
            try:
                return step(*args, **kwargs)
            finally:
                at_it.discard(this)

        return run

    # Otherwise a thread that waits too long would pass the slow one.
    monkeypatch.setattr(joining, "JOINING_TIMEOUT", 60.0)
    for step in ("_queue", "_queue_at_once"):
        monkeypatch.setattr(backend, step, noted(getattr(backend, step)))
    with db_lock("stock:7"):
        gate = threading.Barrier(10)

        def take():
            gate.wait(30)
            with db_lock("stock:7", timeout=60) as hold:
                return hold.held

        crowd = [threads(take) for _ in range(10)]
        in_queue(10)
    for thread in crowd:
        thread.join(60)
    assert [thread.results for thread in crowd] == [[True]] * 10
    assert set(together) == {1}


@SERVERS
@FAMILY
def test_a_holder_does_not_join_the_queue(using):
    """Its turn came while it was joining the queue, or before a lost reply."""
    backend = backends[using]
    holder = Claim(key="stock:7", ttl=30)
    assert backend.acquire(holder)
    place = backend.enqueue(holder)
    assert place.must_retry
    assert backend._queue_at_once(holder, "") is None
    assert not LockClaim.objects.filter(owner=holder.owner).exists()
    assert backend.release(holder)
    LockClaim.objects.all().delete()


@pytest.mark.engine("mariadb", "mysql")
def test_a_claim_granted_while_it_queues_is_not_queued_again(
    monkeypatch, threads, in_queue
):
    backend = backends["default"]
    paused = backend.dialect.queue.replace(
        " COMMIT; SELECT",
        " COMMIT; DO GET_LOCK('dlocks_tests', 30); DO RELEASE_LOCK('dlocks_tests');"
        " SELECT",
    )
    assert paused != backend.dialect.queue
    monkeypatch.setattr(type(backend.dialect), "queue", paused)
    holder, claim = (Claim(key="stock:7", ttl=30) for _ in range(2))
    assert backend.acquire(holder)
    with connection.cursor() as cursor:
        cursor.execute("SELECT GET_LOCK('dlocks_tests', 30)")
        waiting = threads(lambda: backend.enqueue(claim))
        in_queue(1)
        assert backend.release(holder)
        in_queue(0)
        cursor.execute("SELECT RELEASE_LOCK('dlocks_tests')")
    waiting.join(30)
    assert waiting.results[0].must_retry
    assert not LockClaim.objects.exists()
    assert backend.acquire(claim)
    assert backend.release(claim)


@SERVERS
@FAMILY
def test_many_new_waiters_do_not_block_the_release(using, workers, until):
    crowd = workers(4)
    hold = db_lock("stock:7", using=using, ttl=60).acquire()
    for worker in crowd:
        worker.start(jobs.come_at_once, "stock:7", threads=25, using=using, timeout=60)
    for worker in crowd:
        assert worker.hear() == "here"
    for worker in crowd:
        worker.tell()
    # The key is released while claims are still joining the queue.
    until(lambda: backends["default"].waiting("stock:7") >= 10)
    hold.release()
    # The waiters do not block each other either.
    assert sum(worker.hear(120) for worker in crowd) == 100


@SERVERS
def test_a_key_is_released_after_its_row_was_locked_for_seconds(workers, is_busy):
    (other,) = workers(1)
    hold = db_lock("stock:7").acquire()
    other.start(jobs.lock_row, "stock:7")
    assert other.hear() == "locked"
    timer = threading.Timer(5.0, other.tell)
    timer.start()
    try:
        hold.release()
    finally:
        timer.join()
    assert other.hear() == "unlocked"
    assert not is_busy("stock:7")


async def test_a_coroutine_closed_while_it_waits_blocks_no_waiter(in_queue):
    """Its event loop takes no part, so nothing can be awaited."""
    held = await sync_to_async(db_lock("stock:7").acquire)()
    room = waiters_of(backends["default"])

    class Closed:
        def __await__(self):
            steps = db_lock("stock:7", timeout=None).aacquire().__await__()
            while not any(waiter.is_queued for waiter in list(room._waiters.values())):
                yield next(steps)
            steps.close()

    await Closed()
    await sync_to_async(in_queue)(0)
    await sync_to_async(held.release)()


def test_a_task_of_a_closed_loop_blocks_no_waiter(in_queue, in_other_thread, until):
    """A caller runs a loop until one result is there and ignores other tasks."""

    def leave_one_waiting():
        loop = asyncio.new_event_loop()
        waits = loop.create_task(db_lock("stock:7", timeout=None).aacquire())
        loop.run_until_complete(wait_for_it())
        # Close the connection of Django's thread, which ends with the loop.
        loop.run_until_complete(sync_to_async(connections.close_all)())
        loop.close()
        # Otherwise Python reports the task when it is collected.
        waits._log_destroy_pending = False
        left.append(weakref.ref(waits))

    def waiting():
        try:
            return backends["default"].waiting("stock:7")
        finally:
            connections.close_all()

    async def wait_for_it():
        while not await asyncio.to_thread(waiting):
            await asyncio.sleep(0.01)

    left: list[weakref.ref[asyncio.Task[Any]]] = []
    with db_lock("stock:7"):
        in_other_thread(leave_one_waiting)
        in_queue(0)
    # The task is removed from memory too. It cannot await anything then, which is no
    # error.
    until(lambda: gc.collect() is not None and left[0]() is None)
    began = time.monotonic()
    with db_lock("stock:7", timeout=10):
        in_time(time.monotonic() - began, 1.0)


@SERVERS
@FAMILY
def test_a_claim_whose_row_is_locked_is_skipped(using, workers, in_queue):
    first, second, other = workers(3)
    hold = db_lock("stock:7", using=using).acquire()
    first.start(jobs.wait_for, "stock:7", using=using, timeout=60)
    in_queue(1)
    second.start(jobs.wait_for, "stock:7", using=using, timeout=60)
    in_queue(2)
    other.start(jobs.lock_first_claim, "stock:7")
    assert other.hear() == "locked"
    released_at = time.monotonic()
    hold.release()
    assert [first.hear(), second.hear()] == ["waiting"] * 2
    second_at, _ = second.hear(20)
    other.tell()
    assert other.hear() == "unlocked"
    first_at, _ = first.hear(20)
    assert first_at > second_at
    # After 3 seconds without a heartbeat, the claim no longer blocks others.
    in_time(second_at - released_at, 8.0)


@SERVERS
@FAMILY
def test_the_first_lease_starts_at_the_delayed_grant(
    using, workers, until, monkeypatch
):
    """The claim's row is locked for 0.8 s when its turn comes."""
    monkeypatch.setattr(statements, "HEARTBEAT_TIMEOUT", 30.0)
    (other,) = workers(1)
    backend, first, second = backends[using], claim(), claim()
    assert backend.acquire(first) is not None
    assert backend.enqueue(second, "nobody") is not None
    other.start(jobs.lock_first_claim, "stock:7")
    assert other.hear() == "locked"
    threading.Timer(0.8, other.tell).start()
    assert backend.release(first)
    left = until(
        lambda: backend.poll([second], heartbeat=False)[second.owner].grant
    ).lease
    assert other.hear() == "unlocked"
    assert backend.release(second)
    in_time(HANDOVER_LEASE - left, 0.5)


@SERVERS
def test_a_notified_claim_retries_until_it_acquires(monkeypatch, threads):
    """The row may be locked for a moment when the notified claim acquires."""
    backend = backends["default"]
    acquire, queue = backend.acquire, backend.enqueue
    asked = []

    def late(claim, channel="", number=None):
        queue(claim, channel, number)
        return Ticket(must_retry=True)

    def busy(claim):
        asked.append(claim)
        return None if len(asked) <= 2 else acquire(claim)

    monkeypatch.setattr(backend, "enqueue", late)
    monkeypatch.setattr(backend, "acquire", busy)
    with db_lock("stock:7", timeout=5) as hold:
        in_time(hold.waited, 2)


@pytest.mark.parametrize("timeout", [2.0, None])
def test_unresponsive_waiters_delay_the_key_only_once(timeout, workers, until):
    (stuck,) = workers(1)
    with db_lock("stock:7") as hold:
        stuck.start(jobs.hang_in_queue, "stock:7", 3, timeout=timeout)
        assert stuck.hear() == "waiting"
        until(lambda: hold.queue_length() == 3)
    lock = db_lock("stock:7", timeout=60)
    with lock as hold:
        # Each stuck caller may keep the key until it is known not to respond.
        in_time(hold.waited, 20)
    for _ in range(5):
        with lock as hold:
            in_time(hold.waited, 2)
    stuck.tell()
    # A late caller may find the key free.
    assert set(stuck.hear()) <= ({"LockTimeout", "str"} if timeout else {"str"})


@SERVERS
def test_polling_keys_locked_by_transactions_does_not_wait(workers, monkeypatch):
    """There may be many such keys, and no message is received meanwhile."""
    keys = ["stock:7", "stock:8"]
    holders = workers(len(keys))
    for holder, key in zip(holders, keys, strict=True):
        holder.start(jobs.hold_in_transaction, key)
        holder.hear()
    backend, claims = backends["default"], [claim(key) for key in keys]
    for one in claims:
        backend.enqueue(one)
    without_sleep = SimpleNamespace(
        sleep=lambda seconds: pytest.fail("it waits"), monotonic=time.monotonic
    )
    with monkeypatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("dlocks.backends.database.") and hasattr(module, "time"):
                patch.setattr(module, "time", without_sleep)
        for heard in (True, False):
            places = backend.poll(claims, heartbeat=heard)
            assert [places[one.owner].grant for one in claims] == [None, None]
    for one in claims:
        backend.release(one)
    for holder in holders:
        holder.tell()
        holder.hear()


@SERVERS
def test_a_briefly_locked_row_is_contention(in_queue, threads, monkeypatch):
    """A release that finds the row locked retries, with any driver."""
    backend, locked, leave = backends["default"], threading.Event(), threading.Event()
    hand_over = backend._hand_over

    def hand_over_once(*args, **kwargs):
        try:
            return hand_over(*args, **kwargs)
        finally:
            leave.set()

    def keep():
        with transaction.atomic():
            ResourceLock.objects.select_for_update().get(pk="stock:7")
            locked.set()
            leave.wait(30)

    hold = db_lock("stock:7").acquire()
    waiter = threads(lambda: db_lock("stock:7").acquire().release())
    in_queue(1)
    threads(keep)
    assert locked.wait(10)
    monkeypatch.setattr(backend, "_hand_over", hand_over_once)
    hold.release()
    waiter.join(30)
    assert waiter.results == [None]
