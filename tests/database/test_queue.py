"""The queue of a key: waiting, notification and order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
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
from django.test.utils import CaptureQueriesContext

from dlocks import (
    LockBackendError,
    LockStale,
    LockTimeout,
    db_lock,
    db_rwlock,
    db_semaphore,
)
from tests import jobs, rows
from tests.for_each import for_each
from tests.internals import (
    HANDOVER_LEASE,
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
from tests.settings import ENGINE
from tests.timing import in_time
from tests.volume import volume

pytestmark = pytest.mark.django_db(transaction=True)

EVERY = ("default", "optimistic", "insert")
# Where the strategies have the code in common, each engine tests one of them.
ONE = {"postgresql": "default", "mariadb": "optimistic"}.get(ENGINE, "insert")
SERVERS = pytest.mark.engine("postgresql", "mariadb", "mysql")
# Python code decides the results of these tests, so one server is enough.
ONE_SERVER = pytest.mark.engine("postgresql", "sqlite")


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


def in_scope(scope):
    return transaction.atomic() if scope == "transaction" else contextlib.nullcontext()


# A hold from the queue behaves like any other.


@pytest.mark.engine("postgresql", "mariadb")
def test_a_late_release_of_a_locked_row_sends_few_statements(workers):
    """The lease has expired, and a transaction keeps its row locked."""
    backend, mine, waiter = backends["default"], claim(ttl=0.001), claim()
    (other,) = workers(1)
    assert backend.acquire(mine)
    backend.enqueue(waiter)
    other.start(jobs.lock_row, "stock:7")
    assert other.hear() == "locked"
    with CaptureQueriesContext(connection) as queries:
        assert not backend.release(mine)
    assert len(queries) < 400
    other.tell()
    assert other.hear() == "unlocked"
    for one in mine, waiter:
        backend.release(one)


@pytest.mark.engine("postgresql", "mariadb")
def test_a_renewal_of_a_locked_row_is_retried_in_time(
    in_queue, threads, monkeypatch, until
):
    """A hold from the queue starts with a lease of 1.5 s.

    This does not depend on its ttl. The lease is renewed in time.
    """
    backend, answers, holds = backends["default"], [], []
    renew, checked = backend.renew, threading.Event()

    def noted(claims):
        left = renew(claims)
        answers.extend(left.keys() - {holder.owner})
        return left

    def wait():
        with db_lock("stock:7", ttl=30) as hold:
            holds.append(hold)
            checked.wait(30)
            hold.check()
            return hold.remaining

    monkeypatch.setattr(backend, "renew", noted)
    with db_lock("stock:7") as holder:
        thread = threads(wait)
        in_queue(1)
    until(lambda: holds)
    with transaction.atomic():
        # Another transaction locks the row when the keeper first renews, unless the
        # keeper has renewed before.
        ResourceLock.objects.select_for_update().get(pk="stock:7")
        until(lambda: answers)
    until(lambda: holds[0].remaining > 15 or not holds[0].held)
    checked.set()
    thread.join(30)
    assert thread.results[0] > 15


@SERVERS
def test_a_holder_retries_until_its_locked_row_is_free(workers, monkeypatch):
    """Many claims that join the queue at once may lock the row in turn.

    The holder may be entering again, committing a guarded block, or inserting its row.
    """
    (other,) = workers(1)
    tries = []

    def lock_row(key):
        tries.append(0)
        other.start(jobs.lock_row, key)
        assert other.hear() == "locked"

    def pause(shortest, longest):
        tries[-1] += 1
        if tries[-1] == 12:
            other.tell("let go")
            assert other.hear() == "unlocked"
        return 0.01

    monkeypatch.setattr(own_row, "random", SimpleNamespace(uniform=pause))
    with db_lock("stock:7") as hold:
        lock_row("stock:7")
        with db_lock("stock:7") as again:
            assert again.token == hold.token
        lock_row("stock:7")
        with hold.atomic():
            assert hold.held
    backend = backends["insert"]
    grant = backend._grant

    def grant_late(claim):
        # Only the first time, between the two statements.
        monkeypatch.setattr(backend, "_grant", grant)
        lock_row(claim.key)
        return grant(claim)

    monkeypatch.setattr(backend, "_grant", grant_late)
    with db_lock("stock:8", using="insert") as hold:
        assert hold.held
    assert len(tries) == 3
    assert min(tries) >= 12


@pytest.mark.front
def test_a_grant_that_was_read_too_late_gives_no_hold():
    """The caller was paused after its turn had come, until its lease had ended."""
    waiter = Waiter(claim(ttl=30), lambda: None)
    attempt = Acquisition(
        db_lock("stock:7"), threading.current_thread(), ThreadWakeup(), wait=True
    )
    assert waiter.apply(Ticket(grant=Grant(17, 1.5)), clock.now() - 2.0)
    assert attempt._granted_by_notification(waiter.claim, waiter) is None
    assert not keeper.holds


@pytest.mark.driver
def test_a_dead_waiter_is_skipped_within_three_seconds(doomed, in_queue):
    """A dead waiter does not block a caller that only tries either."""
    with db_lock("stock:7"):
        victim = doomed()
        victim.start(jobs.wait_for, "stock:7")
        in_queue(1)
        victim.kill()
        in_queue(0)
        took = time.monotonic() - victim.killed_at
    for using in EVERY:
        for lock in (db_lock, lambda *args, **kw: db_rwlock(*args, **kw).read()):
            found = lock("stock:7", using=using).try_acquire()
            assert found, (using, lock)
            found.release()
    LockClaim.objects.all().delete()
    in_time(took, 3.0)


# Shared holds.


def test_a_shared_key_is_not_purged(in_other_thread):
    for using in EVERY:
        lock = db_rwlock(f"catalogue {using}", using=using, timeout=0)
        with lock.read() as hold:
            list(backends[using].purge(0))
            assert in_other_thread(lock.write().try_acquire) is None, using
            hold.check()


def test_a_key_without_waiters_costs_one_statement_again(in_queue, threads):
    from tests.database.test_cost import statements

    for using in ("default", "optimistic"):
        key = f"stock {using}"
        lock = db_lock(key, using=using)
        with lock:
            thread = threads(lambda lock=lock: lock.acquire().release())
            in_queue(1, key)
        thread.join(30)
        with lock:
            pass
        acquiring, hold = statements(lock.acquire)
        releasing, _ = statements(hold.release)
        assert [len(acquiring), len(releasing)] == [1, 1], (using, acquiring, releasing)


def test_forgotten_queue_numbers_are_not_assigned_twice():
    """A crash of the server may lose the last claims and their numbers.

    Waiters queue again with their own numbers, and new waiters and shared holds get
    others. No waiter is refused.
    """

    def forget(number):
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                sequence = "pg_get_serial_sequence('dlocks_lockclaim', 'id')"
                cursor.execute(f"SELECT setval({sequence}, %s)", [number])

    backend = backends["default"]
    holder, *olds = (claim() for _ in range(4))
    others = [claim() for _ in range(3)]
    share = claim(key="another", shared=True)
    backend.acquire(holder)
    numbers = [backend.enqueue(one).position for one in olds]
    for one in olds:
        backend.release(one)
    forget(numbers[0] - 1 or 1)
    for one, number in zip(olds, numbers, strict=True):
        assert backend.enqueue(one, "", number).position == number
    new = [backend.enqueue(one).position for one in others]
    assert new == sorted(new)
    assert not set(new) & set(numbers)
    # A number that another claim has now is replaced.
    backend.release(olds[-1])
    last = backend.enqueue(olds[-1], "", new[-1]).position
    assert last > new[-1]
    backend.release(others[-1])
    forget(last)
    assert backend.enqueue(others[-1], "", last + 1).position == last + 1
    assert backend.acquire(share)
    for one in (share, *others, *olds, holder):
        assert backend.release(one) == (one in (share, holder))


@SERVERS
@pytest.mark.timeout(400)
async def test_many_waiting_tasks_use_at_most_three_connections():
    """The server counts the connections during the wait. Each task is served."""
    # A claim takes more processor time on MariaDB and MySQL.
    number = 1000 if connection.vendor == "postgresql" else volume(50)
    served, most = [], 0
    count = partial(asyncio.to_thread, sessions, connection.settings_dict["NAME"])
    # Connections of idle processes from other tests are not counted.
    await sync_to_async(connections.close_all)()
    await asyncio.sleep(1.2)
    others = await count()
    holder = await db_lock("stock:7").aacquire()

    async def wait():
        async with db_lock("stock:7", timeout=None) as hold:
            served.append(hold.token)

    tasks = [asyncio.create_task(wait()) for _ in range(number)]
    while await holder.aqueue_length() != number:
        most = max(most, await count())
        await asyncio.sleep(0.5)
    await holder.arelease()
    while not all(task.done() for task in tasks):
        most = max(most, await count())
        await asyncio.sleep(0.5)
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
    backend, polled = backends["default"], []
    poll = backend.poll

    def noted(claims, **options):
        polled.append({claim.owner for claim in claims})
        return poll(claims, **options)

    async def wait():
        async with db_lock("stock:7", timeout=None):
            pass

    # An earlier test may have switched to polling.
    monkeypatch.setattr(waiters_of(backend)._schedule, "_frequent_until", 0.0)
    monkeypatch.setattr(backend, "poll", noted)
    async with db_lock("stock:7") as holder, asyncio.TaskGroup() as group:
        for _ in range(40):
            group.create_task(wait())
        while await holder.aqueue_length() < 40:
            await asyncio.sleep(0.02)
        polled.clear()
        await asyncio.sleep(2.5)
        # Each waiter needs a heartbeat every 2 seconds.
        assert len(set().union(*polled)) == 40
        assert len(polled) < 40
        await holder.arelease()


def sessions(database):
    """Return the number of sessions on a database, without the current one."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND pid <>"
            " pg_backend_pid() AND backend_type = 'client backend'"
            if connection.vendor == "postgresql"
            else "SELECT COUNT(*) FROM information_schema.processlist WHERE db = %s AND"
            " id <> CONNECTION_ID()",
            [database],
        )
        (found,) = cursor.fetchone()
    connection.close()
    return found


@pytest.mark.driver
async def test_threads_and_tasks_of_a_process_share_one_queue(threads):
    lock, order, callers = db_lock("stock:7"), [], []

    def by_thread(number):
        with lock:
            order.append(number)

    async def by_task(number):
        async with lock:
            order.append(number)

    async with lock as holder:
        for number in range(6):
            if number % 2:
                callers.append(asyncio.create_task(by_task(number)))
            else:
                thread = threads(partial(by_thread, number))
                callers.append(asyncio.to_thread(thread.join, 30))
            while await holder.aqueue_length() <= number:
                await asyncio.sleep(0.001)
    await asyncio.gather(*callers)
    assert order == list(range(6))


def test_a_claim_that_times_out_leaves_the_queue(in_other_thread, monkeypatch):
    """This is so even if the caller never learns the position of its claim."""
    backend = backends["default"]
    at_once = backend._queue_at_once

    def wait(scope):
        with in_scope(scope):
            db_lock("stock:7", timeout=0.3, scope=scope).acquire()

    with db_lock("stock:7") as hold:
        for scope in ("lease", "transaction", "lease"):
            with pytest.raises(LockTimeout, match="held by"):
                in_other_thread(wait, scope)
            assert hold.queue_length() == 0
            assert not LockClaim.objects.exists()
            if connection.vendor == "sqlite":
                break
            monkeypatch.setattr(
                backend, "_queue_at_once", lambda *args: at_once(*args) and None
            )
            monkeypatch.setattr(backend, "_queue", lambda *_: None)


@pytest.fixture
def hang_in_background(monkeypatch):
    """Return a function that makes the background thread hang in a method.

    It returns two events. The thread sets the first one and waits for the second one.
    """
    go_on = threading.Event()

    def hang(owner, name):
        method, hangs = getattr(owner, name), threading.Event()

        def call(*arguments, **options):
            if threading.current_thread().name == "dlocks-waiting":
                hangs.set()
                assert go_on.wait(60)
            return method(*arguments, **options)

        monkeypatch.setattr(owner, name, call)
        return hangs, go_on

    yield hang
    go_on.set()


@ONE_SERVER
@pytest.mark.parametrize("late", ["poll", "enqueue"])
def test_a_late_poll_does_not_queue_a_claim_again(
    late, in_queue, threads, monkeypatch, hang_in_background
):
    """A caller times out while a request for its claim has no reply yet.

    The background thread polls, or returns a claim that was deleted to the queue.
    """
    backend, apply = backends["default"], Waiters._apply
    hangs, go_on = hang_in_background(backend, late)
    is_applied = threading.Event()

    def note(waiters, *arguments, **options):
        ahead = apply(waiters, *arguments, **options)
        if go_on.is_set():
            is_applied.set()
        return ahead

    monkeypatch.setattr(Waiters, "_apply", note)
    with db_lock("stock:7"):
        waits = threads(db_lock("stock:7", timeout=2).acquire)
        in_queue(1)
        if late == "enqueue":
            LockClaim.objects.all().delete()
        assert hangs.wait(30)
        # The timeout has passed by then. The caller may be waiting for the reply.
        threading.Timer(2.5, go_on.set).start()
        with pytest.raises(LockTimeout):
            waits.join(30)
        assert is_applied.wait(30)
        assert backend.waiting("stock:7") == 0


@pytest.mark.engine("postgresql")
def test_a_free_key_is_acquired_although_a_poll_hangs(
    in_queue, threads, hang_in_background
):
    """The background thread hangs in a poll, for example on a dead connection.

    It sends no heartbeats, so a waiter is skipped, and deleted later. At its timeout,
    the caller still acquires the free key, and then leaves no claim.
    """
    hangs, _ = hang_in_background(Waiters, "_apply")
    locks = [db_lock(key, timeout=3) for key in ("skipped", "deleted")]
    with db_lock("skipped"), db_lock("deleted"):
        waits = [threads(partial(jobs.token_of, lock)) for lock in locks]
        for key in ("skipped", "deleted"):
            in_queue(1, key)
        assert hangs.wait(30)
        LockClaim.objects.filter(key_resource="skipped").update(end_time=rows.PAST)
        LockClaim.objects.filter(key_resource="deleted").delete()
    for thread in waits:
        thread.join(30)
        assert thread.results
    assert not any(lock.locked() for lock in locks)


@pytest.mark.engine("postgresql")
def test_a_wait_ends_although_a_return_to_the_queue_hangs(
    in_queue, threads, monkeypatch, hang_in_background
):
    """A caller times out while the server does not answer the background thread."""
    hangs, _ = hang_in_background(backends["default"], "enqueue")
    monkeypatch.setattr(waiters, "OUTSIDE_TIMEOUT", 0.1, raising=False)
    with db_lock("stock:7"):
        waits = threads(db_lock("stock:7", timeout=3).acquire)
        in_queue(1)
        LockClaim.objects.all().delete()
        assert hangs.wait(30)
        with pytest.raises(LockTimeout):
            waits.join(15)


@pytest.mark.engine("postgresql", "mariadb")
@for_each("case", [*itertools.product(("lease", "transaction"), ("_queue", "acquire"))])
def test_a_granted_claim_leaves_the_queue(case, monkeypatch, threads, workers):
    """Its turn comes before its thread knows that the claim is in the queue.

    The row may be locked by others while the caller queues or acquires.
    """
    (scope, method), (other, holder) = case, workers(2)
    backend = backends["default"]
    at_once, select = backend._queue_at_once, backend._rows
    next_step = getattr(backend, method)

    def queue_at_once(claim, channel):
        monkeypatch.setattr(backend, "_queue_at_once", at_once)
        monkeypatch.setattr(backend, "_rows", select_late)
        # Act as if other transactions keep the lock row locked at that moment.
        return backend._queue_uncounted(claim, channel)

    def select_late(sql, parameters):
        if sql.startswith("SELECT id, version,"):
            monkeypatch.setattr(backend, "_rows", select)
            holder.call(jobs.release_all)
        return select(sql, parameters)

    def while_locked(*arguments):
        monkeypatch.setattr(backend, method, next_step)
        other.start(jobs.lock_row, "stock:7")
        assert other.hear() == "locked"
        try:
            return next_step(*arguments)
        finally:
            other.tell()
            assert other.hear() == "unlocked"

    def wait():
        with in_scope(scope), db_lock("stock:7", timeout=30, scope=scope):
            return LockClaim.objects.count()

    assert holder.call(jobs.acquire, "stock:7")
    monkeypatch.setattr(backend, "_queue_at_once", queue_at_once)
    monkeypatch.setattr(backend, method, while_locked)
    thread = threads(wait)
    thread.join(60)
    assert thread.results == [0]


@pytest.mark.engine("sqlite")
def test_a_waiter_times_out_despite_sqlites_writer(in_queue, threads):
    """The claim of a waiter cannot be removed then.

    It has no heartbeat any more and is soon skipped. A caller that could not join the
    queue does not wait for the writer either.
    """

    def wait(lock, timeout):
        began = time.monotonic()
        with pytest.raises(LockTimeout):
            lock(timeout=timeout).acquire()
        return time.monotonic() - began

    lock, other = partial(db_lock, "stock:7"), partial(db_lock, "stock:9")
    permit = partial(db_semaphore, "stock:8", permits=1)
    with lock(ttl=60), permit(ttl=60), other(ttl=60):
        late = [threads(partial(wait, one, timeout=1.5)) for one in (lock, permit)]
        in_queue(1)
        in_queue(1, "stock:8")
        with transaction.atomic():
            ResourceLock.objects.filter(pk="other").update(version=1)
            early = threads(partial(wait, other, timeout=0.5))
            for thread in (early, *late):
                thread.join(60)
    # The claim has been removed or is skipped. It blocks no other caller.
    with lock(timeout=30), permit(timeout=30):
        pass
    LockClaim.objects.all().delete()
    in_time(early.results[0], 3.0)
    for thread in late:
        in_time(thread.results[0], 1.5 + 2.0)


@pytest.mark.engine("sqlite")
def test_the_release_of_a_failed_block_waits_for_sqlites_writer(threads):
    """The key was held, so the release waits for the writer."""
    cases = [
        db_lock("a", ttl=60),
        db_lock("b", ttl=60, using="insert"),
        db_semaphore("c", permits=1, ttl=60),
    ]
    taken, begun = threading.Barrier(4), threading.Event()

    def fail(lock):
        hold = lock.acquire()
        taken.wait(60)
        assert begun.wait(60)
        hold.release(failed=True)
        return hold.queue_length(), backends["default"].holder(hold.key)

    failing = [threads(partial(fail, lock)) for lock in cases]
    taken.wait(60)
    with transaction.atomic():
        ResourceLock.objects.filter(pk="other").update(version=1)
        begun.set()
        # This is longer than a waiter that times out would wait.
        time.sleep(1.5)
        assert all(thread.is_alive() for thread in failing)
    for thread in failing:
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
            server = os.dup(self.connection.fileno())
            with contextlib.suppress(OSError), socket.socket(fileno=server) as line:
                line.shutdown(socket.SHUT_RDWR)
        return to_autocommit(self, autocommit)

    def arrange(number):
        losses[:] = [None] * number

    monkeypatch.setattr(kind, "_set_autocommit", lose)
    yield arrange
    connection.close()


@SERVERS
def test_a_connection_lost_before_autocommit_leaves_nothing(lost_on_the_way):
    """Django keeps the broken connection as if it were in a transaction.

    Later statements would fail for this reason.
    """
    locks = db_lock("stock:7", timeout=0), db_semaphore("stock:8", 1, timeout=0)
    for lock, losses in itertools.product(locks, (1, 2, 20)):
        lost_on_the_way(losses)
        hold = None
        while hold is None:
            try:
                hold = lock.acquire()
            except LockBackendError:
                assert not connection.in_atomic_block
                assert not backends["default"].in_transaction()
        with transaction.atomic():
            assert ResourceLock.objects.filter(pk=hold.key).exists()
        hold.release()
        connection.close()


@pytest.mark.engine("mariadb", "mysql")
def test_a_lease_is_released_after_a_failed_commit(lost_on_the_way, is_busy):
    """Django keeps the on-commit callbacks and the broken connection.

    It behaves as if the transaction never ended.
    """
    for using in EVERY:
        hold = db_lock("stock:7", using=using).acquire()
        with pytest.raises(OperationalError), hold.atomic():
            lost_on_the_way(1)
        assert hold.held
        hold.check()
        hold.renew()
        hold.release()
        assert not is_busy("stock:7", using)
        connection.close()


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


@pytest.mark.engine("postgresql", "mariadb")
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


@pytest.mark.engine("postgresql", "mariadb")
def test_an_interrupted_grant_is_released_in_its_transaction(workers, monkeypatch):
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
    with transaction.atomic():
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            db_lock("stock:7", timeout=30, scope="transaction").acquire()
        taken = time.monotonic() - began
        assert ResourceLock.objects.get(pk="stock:7").status == "F"
    in_time(taken, 2.0)


@pytest.mark.driver
def test_timeouts_during_a_handover_lose_no_waiter(threads):
    """Each waiter is served or times out, and the key is free in the end."""

    def wait(timeout):
        try:
            with db_lock("stock:7", timeout=timeout):
                return "served"
        except LockTimeout:
            return "timeout"

    rounds = volume(4)
    for number in range(rounds):
        held = db_lock("stock:7").acquire()
        waiting = [threads(partial(wait, 0.05 + 0.002 * one)) for one in range(4)]
        time.sleep(0.045 + 0.024 * number / rounds)
        held.release()
        for thread in waiting:
            thread.join(30)
        assert all(thread.results[0] in {"served", "timeout"} for thread in waiting)
        with db_lock("stock:7", timeout=0.5):
            pass


@pytest.mark.front
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


def test_processes_are_served_in_the_order_of_arrival(workers, in_queue):
    """This is so whatever strategies they use.

    A ttl that is shorter than the wait makes no difference.
    """
    crowd = workers(5)
    with db_lock("stock:7"):
        for number, worker in enumerate(crowd):
            using, ttl = EVERY[number % 3], (30.0, 1.3)[number % 2]
            worker.start(jobs.wait_for, "stock:7", using=using, ttl=ttl, timeout=30)
            in_queue(number + 1)
        time.sleep(1.5)
    answers = [worker.hear() and worker.hear() for worker in crowd]
    tokens = [token for _, token in answers]
    assert tokens == sorted(tokens)


def test_a_waiter_that_returns_is_ahead_of_later_ones():
    """A process that was stopped is skipped, and gets its old position again."""
    for using in ("default", "memory"):
        backend, holder, stopped, later = backends[using], claim(), claim(), claim()
        assert backend.acquire(holder)
        position = backend.enqueue(stopped).position
        backend.enqueue(later)
        # As if its heartbeat was missing for long enough to be deleted.
        backend.release(stopped)
        assert backend.enqueue(stopped, position=position).ahead == 0, using
        assert backend.poll([later])[later.owner].ahead == 1, using
        for one, following in ((holder, stopped), (stopped, later)):
            assert backend.release(one)
            assert backend.poll([following])[following.owner].grant, using
        assert backend.release(later)


def test_only_an_unfair_claim_passes_the_queue():
    """The first claim in the queue never acquires, as if its process were stopped."""
    for using in EVERY:
        backend, waits = backends[using], claim()
        mine, barging = claim(), claim(fair=False)
        assert backend.acquire(mine)
        rows.claim("stock:7", rows.FUTURE, owner=waits.owner)
        # The key is released but not handed over, as after the rollback of a
        # transaction.
        ResourceLock.objects.filter(pk="stock:7").update(
            status="S", end_time="2020-01-01T00:00Z"
        )
        assert backend.acquire(claim()) is None, using
        backend.release(waits)
        assert backend.acquire(barging), using
        backend.release(barging)


@pytest.mark.engine("postgresql", "sqlite")
def test_the_key_is_handed_over_when_min_hold_ends(workers, in_queue):
    """This is so for exclusive and shared holds."""
    (other,) = workers(1)
    # The bound of the shared hold adds the grace and one poll.
    for shared, latest in (False, 1.0 + 0.7), (True, 1.0 + 0.5 + 0.7):
        hold = db_lock("stock:7", shared=shared, min_hold=1.0).acquire()
        began = time.monotonic()
        other.start(jobs.wait_quietly, "stock:7")
        in_queue(1)
        hold.release()
        granted, _ = other.hear()
        assert granted - began >= 0.95
        in_time(granted - began, latest)


@pytest.mark.engine("postgresql", "mariadb")
def test_the_end_of_a_transaction_wakes_its_waiters(workers, in_queue):
    """The transaction was in the queue itself. It may be rolled back."""
    holder, *waiting = workers(3)
    for using, roll_back in [*((one, False) for one in EVERY), ("default", True)]:
        policy = {"using": using, "timeout": 60}
        with db_lock("stock:7", using=using):
            holder.start(
                jobs.hold_in_transaction, "stock:7", roll_back=roll_back, **policy
            )
            in_queue(1)
            for number, worker in enumerate(waiting, 2):
                worker.start(jobs.wait_quietly, "stock:7", **policy)
                in_queue(number)
        token = holder.hear()
        assert not waiting[0].pipe.poll(0.2)
        ended = time.monotonic()
        holder.tell()
        assert holder.hear() == "ended"
        (_, one), (granted, other) = (worker.hear() for worker in waiting)
        assert one < other, (using, roll_back)
        assert roll_back or token < one, using
        in_time(granted - ended, 1.5)


@pytest.mark.engine("mariadb", "sqlite")
def test_a_caller_without_takeover_gets_lock_stale(doomed, workers, in_queue):
    """The caller may be a waiter or a reader. A reader may take the key over."""
    (patient,) = workers(1)
    victim = doomed()
    victim.start(jobs.hold, "stock:7", ttl=1.0)
    victim.hear()
    patient.start(jobs.acquire, "stock:7", takeover=False, timeout=20)
    in_queue(1)
    victim.kill()
    assert patient.hear() == "LockStale"
    with pytest.raises(LockStale):
        db_rwlock("stock:7", takeover=False, timeout=5).read().acquire()
    with db_rwlock("stock:7", timeout=1).read():
        # The reader has taken the key over and is its holder now.
        holder = db_lock("stock:7").holder()
        assert not holder.stale
        assert holder.holder.startswith(f"{os.uname().nodename}:{os.getpid()}")


@pytest.mark.psycopg3
@pytest.mark.engine("postgresql")
def test_a_waiter_on_another_host_is_notified(in_other_thread):
    """Its process is notified by the server, and does not have to poll."""
    # The name of the channel is that of another host.
    with contextlib.closing(connection.copy()) as session:
        with session.cursor() as cursor:
            cursor.execute("LISTEN elsewhere")
        for using, end in itertools.product(EVERY, ("release", "commit")):
            backend, waits = backends[using], claim()
            scope = in_scope("transaction" if end == "commit" else "lease")
            with scope, db_lock("stock:7", using=using):
                assert in_other_thread(backend.enqueue, waits, "elsewhere").position
            (notification,) = session.connection.notifies(timeout=5.0, stop_after=1)
            assert notification.channel == "elsewhere", (using, end)
            backend.release(waits)


@pytest.mark.engine("postgresql", "mariadb")
def test_a_lease_waits_in_the_queue_without_autocommit(workers):
    (holder,) = workers(1)
    holder.start(jobs.hold, "stock:7")
    token = holder.hear()
    transaction.set_autocommit(False)
    try:
        lock = partial(db_lock, "stock:7", scope="lease", release_at="exit")
        with pytest.raises(LockTimeout):
            lock(timeout=0.2).acquire()
        holder.tell()
        assert holder.hear() == "released"
        with lock() as hold:
            assert hold.token > token
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


# The waiters of a process.


@ONE_SERVER
def test_a_waiter_that_arrives_during_the_idle_close_is_served(
    in_other_thread, threads, in_queue
):
    """The waiter comes shortly before or after half a second without waiters."""
    for number in range(4):
        hold = db_lock("stock:7").acquire()
        with contextlib.suppress(LockTimeout):
            in_other_thread(db_lock("stock:7", timeout=0.05).acquire)
        time.sleep(0.47 + 0.03 * number)
        thread = threads(
            lambda: db_lock("stock:7").acquire().release() or time.monotonic()
        )
        in_queue(1)
        hold.release()
        released = time.monotonic()
        thread.join(30)
        in_time(thread.results[0] - released, 0.7)


@pytest.mark.engine("postgresql", "mariadb")
def test_a_fork_does_not_disturb_waiters(threads, in_queue):
    hold = db_lock("stock:7").acquire()
    thread = threads(lambda: db_lock("stock:7").acquire().release() or time.monotonic())
    in_queue(1)
    connection.close()
    with warnings.catch_warnings():
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


@ONE_SERVER
def test_a_shared_hold_from_the_queue_works_like_any_other(in_queue, threads, is_busy):
    """This is so for a reader and for a permit."""
    ready, done, holds = threading.Barrier(3), threading.Event(), {}

    def share(lock):
        with lock as hold, lock as again:
            assert again is hold
            assert hold.count == 2
            holds[hold.key] = hold
            ready.wait(30)
            done.wait(30)
            hold.check()

    with db_lock("stock:7") as before, db_lock("stock:8"):
        threads(partial(share, db_rwlock("stock:7", ttl=4.0).read()))
        threads(partial(share, db_semaphore("stock:8", permits=1, ttl=4.0)))
        in_queue(1)
        in_queue(1, "stock:8")
    ready.wait(30)
    # This is longer than the short lease from the queue, and longer than the ttl.
    time.sleep(4.5)
    for key, hold in holds.items():
        assert hold.token > before.token
        hold.check()
        assert is_busy(key)
    done.set()
    for key, hold in holds.items():
        with db_lock(key) as after:
            assert after.token > hold.token


@pytest.mark.driver
def test_a_dead_reader_blocks_a_writer_only_for_its_ttl(doomed, in_queue, workers):
    """A reader or writer that dies with its hold blocks a waiter for its ttl only."""
    (writer,) = workers(1)
    for shared in (True, False):
        victim = doomed()
        victim.start(jobs.hold, "stock:7", shared=shared, ttl=1.0)
        victim.hear()
        writer.start(jobs.wait_quietly, "stock:7")
        in_queue(1)
        victim.kill()
        in_time(writer.hear()[0] - victim.killed_at, 1.0 + 0.5 + 0.7)


@pytest.mark.driver
def test_readers_and_writers_in_processes_exclude_each_other(workers, tmp_path):
    """An odd number means that a writer is active. Readers and writers check it."""
    path, times = tmp_path / "value", volume(8)
    path.write_text("0")
    crowd = workers(5)
    for number, worker in enumerate(crowd):
        worker.start(
            jobs.read_or_write, str(path), "stock:7", times=times, write=number < 2
        )
    for worker in crowd:
        worker.hear()
    assert path.read_text() == f"{4 * times}"


class InATestCase(TestCase):
    def test_a_lock_can_be_used_repeatedly_in_a_testcase(self):
        """A project's own ``TestCase`` leaves no row."""

        def committed():
            try:
                return ResourceLock.objects.exists()
            finally:
                connection.close()

        for _ in range(3):
            with db_lock("stock:7", timeout=0) as hold, db_lock("stock:7"):
                assert hold.queue_length() == 0
            with db_rwlock("catalogue", scope=None, timeout=0).read() as hold:
                assert hold.scope == "transaction"
        assert ResourceLock.objects.count() == 2
        if connection.vendor != "sqlite":
            assert not keeper.run(committed)


@pytest.mark.engine("postgresql")
def test_a_database_can_be_dropped_half_a_second_after_a_wait(until, doomed):
    """A test runner does this at its end, while the waiting process still runs."""
    name = connection.ops.quote_name("dropped")
    with connection.cursor() as cursor:
        cursor.execute(f"DROP DATABASE IF EXISTS {name}")
        cursor.execute(f"CREATE DATABASE {name}")
    holder = doomed(DLOCKS_TEST_NAME="dropped")
    holder.call(jobs.migrate_databases, "default")
    assert holder.call(jobs.wait_and_time_out, "stock:7") == "LockTimeout"
    left = time.monotonic()
    until(lambda: sessions("dropped") == 0)
    took = time.monotonic() - left
    with connection.cursor() as cursor:
        cursor.execute(f"DROP DATABASE {name}")
    in_time(took, 0.6)


@SERVERS
def test_a_process_stopped_at_any_point_blocks_others_briefly(doomed, workers):
    """It may be stopped in a queue transaction, with the lock row locked."""
    crowd, victim = workers(2), doomed()
    victim.start(jobs.enter_and_leave, "stock:7", seconds=0.8, using=ONE, ttl=1.0)
    for worker in crowd:
        worker.start(jobs.longest_wait, "stock:7", seconds=0.8, using=ONE, ttl=1.0)
    time.sleep(random.uniform(0.1, 0.3))
    victim.stop()
    stopped = time.monotonic()
    longest = max(worker.hear() for worker in crowd)
    # The server ends a transaction in which it was stopped for that long.
    time.sleep(max(0.0, stopped + 2.7 - time.monotonic()))
    victim.resume()
    # The victim was not ended while it was in the queue.
    victim.hear()
    # The sum of its lease, its grace, its turn and the limit of a transaction.
    in_time(longest, 4.0)


@SERVERS
def test_a_process_that_hangs_in_a_step_blocks_others_briefly(doomed, workers):
    """Its session is ended, and the process begins again when it continues."""
    (worker,) = workers(1)
    victim = doomed()
    victim.start(jobs.stop_within_a_step, "stock:7")
    assert victim.hear() == "locked"
    worker.start(jobs.hold, ("stock:7", "read"), timeout=20)
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
            test_a_process_that_hangs_in_a_step_blocks_others_briefly(doomed, workers)
        finally:
            for name in names:
                cursor.execute(f"SET GLOBAL {name} = DEFAULT")


@pytest.mark.engine("mariadb", "mysql")
def test_a_handover_beside_a_heartbeat_fails_no_statement(
    threads, in_queue, monkeypatch
):
    """It would keep the key locked until the process rolls it back."""
    backend, outcomes = backends["default"], []
    hold = db_lock("stock:7").acquire()
    waiting = threads(lambda: jobs.token_of(db_lock("stock:7", timeout=30)))
    in_queue(1)
    execute = backend._execute
    beat, over = threading.Event(), threading.Event()

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


@contextlib.contextmanager
def ended_by_a_signal(kind):
    """Raise an error in a signal handler, as task queues do at a time limit."""

    def end(*_):
        raise kind("the task took too long")

    former = signal.signal(signal.SIGALRM, end)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(kind, match="took too long"):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


@pytest.mark.engine("mariadb", "mysql")
def test_a_signal_at_the_end_of_a_step_is_not_swallowed(monkeypatch, is_busy):
    dialect = type(backends["default"].dialect)
    slow = f"{dialect.no_idle_limit} + SLEEP(0.6)"
    monkeypatch.setattr(dialect, "no_idle_limit", slow)
    with ended_by_a_signal(RuntimeError):
        db_rwlock("stock:7").read().acquire()
    monkeypatch.undo()
    assert not is_busy("stock:7", "default")
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@SESSION.wait_timeout")
        assert cursor.fetchone()[0] > 2


@pytest.mark.engine("postgresql", "mariadb")
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


@pytest.mark.front
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

    with db_lock("stock:7"):
        threads(hang)
        assert entered.wait(10)
        waiting = threads(lambda: jobs.token_of(db_lock("stock:7", timeout=30)))
        try:
            in_queue(1)
        finally:
            leave.set()
    waiting.join(30)
    assert waiting.results


@ONE_SERVER
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


@pytest.mark.engine("postgresql")
def test_an_error_raised_by_a_signal_handler_ends_the_wait(workers, in_queue):
    (holder,) = workers(1)
    assert holder.call(jobs.acquire, "stock:7")
    for kind in (TimeoutError, RuntimeError, KeyboardInterrupt):
        with ended_by_a_signal(kind):
            db_lock("stock:7", timeout=30).acquire()
        in_queue(0)
    assert holder.call(jobs.release_all) == ["released"]


# Timeouts while a transaction has the row.


@SERVERS
def test_a_timeout_behind_a_transaction_is_not_granted_later(workers):
    """A poll that waited for the row still sees the claim in the queue."""
    (holder,) = workers(1)
    with db_lock("stock:7"):
        pass
    for using in EVERY * volume(1):
        holder.start(jobs.hold_in_transaction, "stock:7", using=using)
        holder.hear()
        with pytest.raises(LockTimeout):
            db_lock("stock:7", using=using, timeout=0.25).acquire()
        holder.tell()
        assert holder.hear() == "ended"
        with db_lock("stock:7", using=using) as hold:
            in_time(hold.waited, HANDOVER_LEASE)
        assert not LockClaim.objects.exists()


@pytest.mark.engine("postgresql", "mariadb")
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


@pytest.mark.driver
def test_threads_of_a_process_join_the_queue_one_at_a_time(
    monkeypatch, in_queue, threads
):
    """Otherwise they would lock the key's row in turn and keep out its holder."""
    backend, inside = backends["default"], threading.RLock()

    def alone(step):
        def run(*args, **kwargs):
            assert inside.acquire(blocking=False), "another thread is joining"
            try:
                return step(*args, **kwargs)
            finally:
                inside.release()

        return run

    # Otherwise a thread that waits too long would pass the slow one.
    monkeypatch.setattr(joining, "JOINING_TIMEOUT", 60.0)
    for step in ("_queue", "_queue_at_once"):
        monkeypatch.setattr(backend, step, alone(getattr(backend, step)))
    gate = threading.Barrier(10)

    def take():
        gate.wait(30)
        return jobs.token_of(db_lock("stock:7", timeout=60))

    with db_lock("stock:7"):
        crowd = [threads(take) for _ in range(10)]
        in_queue(10)
    for thread in crowd:
        thread.join(60)
    assert all(thread.results for thread in crowd)


@pytest.mark.engine("mariadb", "mysql")
def test_a_claim_granted_while_it_queues_is_not_queued_again(
    monkeypatch, threads, in_queue
):
    backend = backends["default"]
    pause = " COMMIT; DO GET_LOCK('test', 30); DO RELEASE_LOCK('test'); SELECT"
    paused = backend.dialect.queue.replace(" COMMIT; SELECT", pause)
    assert paused != backend.dialect.queue
    monkeypatch.setattr(type(backend.dialect), "queue", paused)
    holder, waits = claim(), claim()
    assert backend.acquire(holder)
    with connection.cursor() as cursor:
        cursor.execute("SELECT GET_LOCK('test', 30)")
        waiting = threads(lambda: backend.enqueue(waits))
        in_queue(1)
        assert backend.release(holder)
        in_queue(0)
        cursor.execute("SELECT RELEASE_LOCK('test')")
    waiting.join(30)
    assert waiting.results[0].must_retry
    assert not LockClaim.objects.exists()
    assert backend.acquire(waits)
    assert backend.release(waits)


@SERVERS
def test_many_new_waiters_do_not_block_the_release(workers, until):
    crowd, number = workers(4), volume(8)
    hold = db_lock("stock:7", using=ONE, ttl=60).acquire()
    for worker in crowd:
        worker.start(
            jobs.come_at_once, "stock:7", threads=number, using=ONE, timeout=60
        )
    for worker in crowd:
        assert worker.hear() == "here"
    for worker in crowd:
        worker.tell()
    # The key is released while claims are still joining the queue.
    until(lambda: backends["default"].waiting("stock:7") >= number // 2)
    hold.release()
    # The waiters do not block each other either.
    assert sum(worker.hear(120) for worker in crowd) == 4 * number


@pytest.mark.engine("postgresql", "mysql")
def test_a_key_is_released_after_its_row_was_locked_for_seconds(
    workers, in_queue, threads, is_busy
):
    """This is so with and without a waiter."""
    (other,) = workers(1)
    for key, seconds in ("stock:7", 5.0), ("stock:8", 0.5):
        hold = db_lock(key).acquire()
        if key == "stock:8":
            waiter = threads(lambda: jobs.token_of(db_lock("stock:8")))
            in_queue(1, key)
        other.start(jobs.lock_row, key)
        assert other.hear() == "locked"
        timer = threading.Timer(seconds, other.tell)
        timer.start()
        try:
            hold.release()
        finally:
            timer.join()
        assert other.hear() == "unlocked"
    waiter.join(30)
    assert waiter.results[0] > hold.token
    assert not is_busy("stock:7")


@pytest.mark.front
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


@pytest.mark.front
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


@pytest.mark.engine("postgresql", "mysql")
def test_a_claim_whose_row_is_locked_is_skipped(workers, in_queue):
    first, second, other = workers(3)
    hold = db_lock("stock:7").acquire()
    first.start(jobs.wait_for, "stock:7", timeout=60)
    in_queue(1)
    second.start(jobs.wait_for, "stock:7", timeout=60)
    in_queue(2)
    other.start(jobs.lock_claim, key_resource="stock:7", version=None)
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


@pytest.mark.engine("postgresql", "mysql")
def test_the_first_lease_starts_at_the_delayed_grant(workers, until, monkeypatch):
    """The claim's row is locked for 0.8 s when its turn comes."""
    monkeypatch.setattr(statements, "HEARTBEAT_TIMEOUT", 30.0)
    (other,) = workers(1)
    backend, first, second = backends["default"], claim(), claim()
    assert backend.acquire(first) is not None
    assert backend.enqueue(second, "nobody") is not None
    other.start(jobs.lock_claim, key_resource="stock:7", version=None)
    assert other.hear() == "locked"
    threading.Timer(0.8, other.tell).start()
    assert backend.release(first)
    left = until(
        lambda: backend.poll([second], heartbeat=False)[second.owner].grant
    ).lease
    assert other.hear() == "unlocked"
    assert backend.release(second)
    in_time(HANDOVER_LEASE - left, 0.5)


@pytest.mark.parametrize(
    "timeout",
    [
        pytest.param(2.0, marks=pytest.mark.engine("mariadb")),
        pytest.param(None, marks=pytest.mark.engine("postgresql")),
    ],
)
def test_unresponsive_waiters_delay_the_key_only_once(timeout, workers, in_queue):
    (stuck,) = workers(1)
    with db_lock("stock:7"):
        stuck.start(jobs.hang_in_queue, "stock:7", 3, timeout=timeout)
        assert stuck.hear() == "waiting"
        in_queue(3)
    lock = db_lock("stock:7", timeout=60)
    # Each stuck caller may keep the key until it is known not to respond.
    for limit in (20, 2, 2, 2, 2, 2):
        with lock as hold:
            in_time(hold.waited, limit)
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
