"""The line before a key: who waits, who is told, and whose turn it is."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import random
import signal
import socket
import threading
import time
import warnings
import weakref
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError, connection, connections, transaction
from django.test import TestCase

from dlocks import LockBackendError, LockStale, LockTimeout, clock, db_lock, db_rwlock, db_semaphore
from dlocks import waiting as waiting_room
from dlocks.backends import database
from dlocks.backends.base import HEARD_FOR, KEPT_FOR, Claim, Message, Place
from dlocks.backends.database import line, statements
from dlocks.conf import backends
from dlocks.keeper import keeper
from dlocks.locks import Attempt
from dlocks.models import LockClaim, ResourceLock
from dlocks.waiting import Waiter, room_of
from tests import jobs
from tests.processes import Worker
from tests.timing import in_time

pytestmark = pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"])

FAMILY = pytest.mark.parametrize("using", ["default", "optimistic", "insert"])
SERVERS = pytest.mark.engine("postgresql", "mariadb")


@pytest.fixture(autouse=True)
def no_claim_left(transactional_db, has_failed):
    """Whatever happened, nobody is left in line or among those who share, and no key says otherwise."""
    yield
    if has_failed():
        return
    assert not LockClaim.objects.values_list("key_resource", "holder", "version")
    assert not ResourceLock.objects.exclude(waiters=0, shares=0).values_list("key_resource", "waiters", "shares")


def claim(key="stock:7", **options):
    return Claim(key=key, **{"ttl": 30.0, "holder": "line", **options})


# A hold that came by the line is as good as any other.


@FAMILY
def test_a_hold_that_is_not_renewed_has_its_whole_ttl_though_it_stood_in_line(using, in_line, threads):
    holder = db_lock("stock:7", using=using).acquire()

    def wait():
        hold = db_lock("stock:7", using=using, ttl=20, renew=False).acquire()
        left = hold.remaining
        hold.release()
        return left

    thread = threads(wait)
    in_line(1)
    holder.release()
    thread.join(30)
    assert thread.results[0] > 15


@SERVERS
def test_a_renewal_that_finds_the_row_locked_is_tried_again_before_the_first_short_lease_ends(
    in_line, threads, monkeypatch, until
):
    """A hold from the line begins with a lease of 1.5 s, whatever its ttl, and is renewed within it."""
    backend, answers = backends["default"], []
    renew = backend.renew

    def noted(claims):
        left = renew(claims)
        answers.extend(left[one.owner] for one in claims if one.key == "stock:7" and one.owner in left)
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
    in_line(1)
    monkeypatch.setattr(backend, "renew", noted)
    holder.release()
    assert granted.wait(30)
    with transaction.atomic():
        # Somebody has the row, for a moment, when the keeper first renews; if that has not been before.
        ResourceLock.objects.select_for_update().get(pk="stock:7")
        until(lambda: answers)
    until(lambda: holds[0].remaining > 15 or not holds[0].held)
    checked.set()
    thread.join(30)
    assert thread.results[0] > 15


@pytest.fixture
def locked_for_twelve_tries(workers, monkeypatch):
    """Return a function that has a key's row locked by another process until this one has met it there 12 times."""
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

    monkeypatch.setattr("dlocks.backends.database.random", SimpleNamespace(uniform=pause))
    yield lock
    assert len(pauses) >= 12


@SERVERS
@FAMILY
def test_a_holder_reaches_its_row_though_a_crowd_has_it_for_a_while(using, locked_for_twelve_tries):
    """So much as many who come into line at once may have it, one after another."""
    with db_lock("stock:7", using=using) as hold:
        locked_for_twelve_tries("stock:7")
        with db_lock("stock:7", using=using) as again:
            assert again.token == hold.token


@SERVERS
@FAMILY
def test_a_hold_can_be_pinned_though_a_crowd_has_its_row_for_a_while(using, locked_for_twelve_tries):
    with db_lock("stock:7", using=using) as hold:
        locked_for_twelve_tries("stock:7")
        with hold.atomic():
            assert hold.held


@SERVERS
def test_who_has_inserted_a_row_draws_its_token_though_a_crowd_has_it_for_a_while(locked_for_twelve_tries, monkeypatch):
    backend = backends["insert"]
    grant = backend._grant

    def grant_late(claim):
        # The first time: between the two statements.
        monkeypatch.setattr(backend, "_grant", grant)
        locked_for_twelve_tries(claim.key)
        return grant(claim)

    monkeypatch.setattr(backend, "_grant", grant_late)
    with db_lock("stock:7", using="insert") as hold:
        assert hold.held


def test_a_message_that_is_read_late_gives_no_hold_that_is_not_there():
    """Though the process was told of its place again in between, by a later clock."""
    waiter = Waiter(claim(ttl=30), lambda: None)
    attempt = Attempt(db_lock("stock:7"), threading.current_thread(), lambda: None, wait=True)
    now = clock.now()
    waiter.told(Place(number=1, clock=1000.0), now - 4.0)
    waiter.heard(Message(owner=waiter.claim.owner, token=17, ends=1002.0))
    # Its turn, which ended two seconds ago, passed; it is back in line, as the room has found out.
    waiter.told(Place(number=1, clock=1003.9), now - 0.1)
    assert attempt._given(waiter.claim, waiter) is None
    assert not keeper.holds


# Who died in line.


@FAMILY
def test_who_died_in_line_is_in_nobody_s_way_for_more_than_three_seconds(using, doomed, in_line, until):
    """Not even in the way of who only tries."""
    lock = db_lock("stock:7", using=using)
    with lock:
        victim = doomed()
        victim.start(jobs.wait_for, "stock:7", using=using)
        in_line(1)
        victim.kill()
        in_line(0)
        took = time.monotonic() - victim.killed_at
    for one in (lock, db_rwlock("stock:7", using=using).read()):
        found = one.try_acquire()
        assert found
        found.release()
    LockClaim.objects.all().delete()
    in_time(took, 3.0)


# Shares.


@FAMILY
def test_a_shared_key_is_not_forgotten_by_a_purge(using, elsewhere):
    lock = db_rwlock("catalogue", using=using, timeout=0)
    with lock.read() as hold:
        list(backends[using].purge(0))
        assert elsewhere(lock.write().try_acquire) is None
        hold.check()


@FAMILY
def test_a_reader_leaves_a_run_that_never_ended_to_a_person_too(using, doomed, until):
    victim = doomed()
    assert isinstance(victim.call(jobs.acquire, "stock:7", ttl=0.2, renew=False, using=using), int)
    until(lambda: (holder := db_lock("stock:7", using=using).holder()) and holder.stale)
    time.sleep(0.6)
    with pytest.raises(LockStale):
        db_rwlock("stock:7", using=using, takeover=False, timeout=5).read().acquire()
    with db_rwlock("stock:7", using=using).read():
        # Taken over: who reads is who has it now.
        holder = db_lock("stock:7", using=using).holder()
        assert not holder.stale
        assert holder.holder.startswith(f"{os.uname().nodename}:{os.getpid()}")


def test_a_silent_holder_whose_key_was_shared_meanwhile_learns_of_it():
    backend = backends["brisk"]
    late = claim(ttl=0.05)
    backend.acquire(late)
    time.sleep(0.1)
    reader = claim(shared=True)
    assert backend.acquire(reader)
    assert not backend.release(late)
    assert backend.release(reader)


# Inside of transactions.


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize("shared", [False, True])
def test_in_a_transaction_on_sqlite_a_leased_key_is_an_error_at_once_though_others_waited_for_it(
    shared, workers, elsewhere
):
    """In line inside of the one writer's transaction, the holder could never give back."""
    (other,) = workers(1)
    with db_lock("stock:7"), pytest.raises(LockTimeout):
        elsewhere(lambda: db_lock("stock:7", timeout=0.2).acquire())
    other.start(jobs.hold, "stock:7")
    other.hear()
    started = time.monotonic()
    with pytest.raises(Exception, match="one writer"), transaction.atomic():
        db_lock("stock:7", timeout=3, shared=shared).acquire()
    in_time(time.monotonic() - started, 1.0)
    other.tell()
    assert other.hear() == "released"


# What it costs.


@pytest.mark.parametrize("using", ["default", "optimistic"])
def test_once_nobody_waits_any_more_a_key_costs_a_statement_again(using, in_line, threads):
    from tests.test_cost import statements

    lock = db_lock("stock:7", using=using)
    first = lock.acquire()

    def wait():
        with lock:
            pass

    thread = threads(wait)
    in_line(1)
    first.release()
    thread.join(30)
    with lock:
        pass
    acquiring, hold = statements(lock.acquire)
    releasing, _ = statements(hold.release)
    assert [len(acquiring), len(releasing)] == [1, 1], (acquiring, releasing)


# Its own place.


def test_a_place_whose_number_was_given_away_again_is_a_new_one(elsewhere):
    """A crash of the server may forget who came last, and the number."""
    backend = backends["default"]
    holder, first, second = claim(), claim(), claim()
    backend.acquire(holder)
    number = backend.queue(first).number
    assert backend.queue(second, "", number).number > number
    for one in (second, first, holder):
        backend.release(one)


@pytest.fixture
def forgetful():
    """Return a function that has the server forget the numbers that it has given away, as a crash may."""

    def forget(number):
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute("SELECT setval(pg_get_serial_sequence('dlocks_lockclaim', 'id'), %s)", [number])

    return forget


def test_places_that_the_server_forgot_are_nobody_else_s(forgetful):
    """They are brought along, by number; who comes new is given others, and is not refused."""
    backend = backends["default"]
    holder, *olds = (claim() for _ in range(4))
    others = [claim() for _ in range(3)]
    backend.acquire(holder)
    numbers = [backend.queue(one).number for one in olds]
    for one in olds:
        backend.release(one)
    forgetful(numbers[0] - 1 or 1)
    for one, number in zip(olds, numbers, strict=True):
        assert backend.queue(one, "", number).number == number
    new = [backend.queue(one).number for one in others]
    assert new == sorted(new)
    assert not set(new) & set(numbers)
    for one in (*others, *olds, holder):
        backend.release(one)


def test_a_share_is_had_though_its_number_was_brought_along(forgetful):
    backend = backends["default"]
    holder, waiting, share = claim(), claim(), claim(key="another", shared=True)
    backend.acquire(holder)
    number = backend.queue(waiting).number
    backend.release(waiting)
    forgetful(number)
    assert backend.queue(waiting, "", number + 1).number == number + 1
    assert backend.acquire(share)
    for one in (share, waiting, holder):
        assert backend.release(one) == (one is not waiting)


def test_threads_that_come_together_have_places_though_numbers_were_brought_along(
    forgetful, threads, in_line, monkeypatch
):
    """They go into line in one statement."""
    # Nobody looks after a claim that was put there by hand.
    monkeypatch.setattr(line, "HEARD_FOR", 30.0)
    backend = backends["default"]
    with db_lock("stock:7") as hold:
        waiting = claim()
        number = backend.queue(waiting).number
        backend.release(waiting)
        forgetful(number)
        assert backend.queue(waiting, "", number + 1).number == number + 1
        had = []

        def take():
            with db_lock("stock:7", timeout=30) as mine:
                had.append(mine.token)

        crowd = [threads(take) for _ in range(6)]
        in_line(7)
        backend.release(waiting)
    for one in crowd:
        one.join(30)
    assert len(had) == 6
    assert all(token > hold.token for token in had)


# Those who wait in one process.


@SERVERS
@pytest.mark.timeout(200)
async def test_a_thousand_tasks_that_wait_cost_three_connections_at_most(until):
    """Counted by the server while they wait; each of them is served."""
    number, served, most = 1000, [], 0
    # The idle processes of other tests are not of this one.
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
        before = await holder.awaiting()
        most = max(most, await asyncio.to_thread(sessions))
        await asyncio.sleep(0.02)
    await holder.arelease()
    while not all(task.done() for task in tasks):
        most = max(most, await asyncio.to_thread(sessions))
        await asyncio.sleep(0.2)
    await asyncio.gather(*tasks)
    assert len(served) == number
    assert served == sorted(set(served)), "in the order of their tokens"
    assert 2 <= most - others <= 3


@pytest.mark.engine("postgresql")
async def test_those_who_came_one_by_one_are_looked_at_together(monkeypatch):
    """Where one is told of one's turn, waiters cost a look now and then, and not one each."""
    backend, looks = backends["default"], []
    # Another test may have had reason to look.
    monkeypatch.setattr(room_of(backend), "_looks_until", 0.0)
    kind = type(backend)
    monkeypatch.setattr(kind, "look", lambda *args, look=kind.look, **kw: looks.append(args[1:]) or look(*args, **kw))
    holder = await db_lock("stock:7").aacquire()

    async def wait():
        async with db_lock("stock:7", timeout=None):
            pass

    tasks = []
    for _ in range(40):
        tasks.append(asyncio.create_task(wait()))
        await asyncio.sleep(0.02)
    while await holder.awaiting() < 40:
        await asyncio.sleep(0.02)
    looks.clear()
    await asyncio.sleep(2.5)
    # Each of them has to be heard of every 2 seconds.
    assert len({claim.owner for claims, *_ in looks for claim in claims}) == 40
    assert len(looks) < 40
    await holder.arelease()
    await asyncio.gather(*tasks)


def sessions():
    """Return how many sessions this process has on its database, without the one that asks."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                " AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )
        else:
            cursor.execute(
                "SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()"
            )
        (found,) = cursor.fetchone()
    connection.close()
    return found


async def test_who_is_cancelled_in_line_leaves_no_place_behind(elsewhere):
    """… whether the task was just about to ask, was waiting, or had its turn."""
    holder = await db_lock("stock:7").aacquire()
    for pause in (0, 0, 0.001, 0.003, 0.01, 0.02, 0.05, 0.1):
        tasks = [asyncio.create_task(db_lock("stock:7").aacquire()) for _ in range(3)]
        await asyncio.sleep(pause)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        assert await holder.awaiting() == 0
    await holder.arelease()
    for pause in (0, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015):
        holder = await db_lock("stock:7").aacquire()
        task = asyncio.create_task(db_lock("stock:7").aacquire())
        while not await holder.awaiting():
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
        # For so long it would be kept for one who has gone.
        in_time(mine.waited, KEPT_FOR)


async def test_a_task_that_is_cancelled_twice_leaves_no_place_behind():
    holder = await db_lock("stock:7").aacquire()
    for pause in (0, 0.001, 0.002, 0.005, 0.01, 0.05):
        task = asyncio.create_task(db_lock("stock:7").aacquire())
        await asyncio.sleep(pause)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(result, asyncio.CancelledError)
    while await holder.awaiting():
        await asyncio.sleep(0.001)
    await holder.arelease()
    async with db_lock("stock:7", timeout=10) as mine:
        # So long a place counts of which nothing is heard.
        in_time(mine.waited, HEARD_FOR)


async def test_threads_and_tasks_of_one_process_stand_in_one_line(in_line):
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
        while await holder.awaiting() <= number:
            await asyncio.sleep(0.001)
    await holder.arelease()
    await asyncio.gather(*tasks)
    assert [name for name, _ in order] == list(range(6))


def test_who_times_out_in_line_leaves_no_place_behind(in_line, elsewhere):
    with db_lock("stock:7") as hold:
        with pytest.raises(LockTimeout, match="held by"):
            elsewhere(db_lock("stock:7", timeout=0.1).acquire)
        assert hold.waiting == 0
        assert not LockClaim.objects.exists()


@pytest.fixture
def turn_comes_on_the_way(monkeypatch, elsewhere):
    """Return a function that has a hold given back when a claim is in line, and its thread does not know that yet."""
    backend = backends["default"]
    together, rows = backend._queue_together, backend._rows

    def arrange(held):
        def queue_together(batch):
            monkeypatch.setattr(backend, "_queue_together", together)
            # As where others have the lock row at that moment.
            monkeypatch.setattr(backend, "_queue_counted", lambda *_: None)
            monkeypatch.setattr(backend, "_rows", rows_after)
            together(batch)

        def rows_after(sql, parameters):
            if sql.startswith("SELECT owner, id FROM"):
                monkeypatch.setattr(backend, "_rows", rows)
                elsewhere(held.release)
            return rows(sql, parameters)

        monkeypatch.setattr(backend, "_queue_together", queue_together)

    return arrange


@pytest.fixture
def row_is_locked(workers, monkeypatch):
    """Return a function that has another process keep the lock row while a method of the backend is called next."""
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
def test_who_has_the_key_does_not_stand_in_line_too(
    scope, method, turn_comes_on_the_way, row_is_locked, threads, elsewhere
):
    """Though others had the lock row when it asked what became of its place, or for the key."""
    turn_comes_on_the_way(elsewhere(db_lock("stock:7").acquire))
    row_is_locked(method)

    def wait():
        with transaction.atomic() if scope == "transaction" else contextlib.nullcontext():
            with db_lock("stock:7", timeout=30, scope=scope):
                return LockClaim.objects.count()

    thread = threads(wait)
    thread.join(60)
    assert thread.results == [0]


@SERVERS
@pytest.mark.parametrize("scope", ["lease", "transaction"])
def test_who_was_put_into_line_and_never_told_so_leaves_no_place(scope, monkeypatch, elsewhere, threads):
    """Where nobody could look what became of it, say, and so at the end of its time."""
    backend = backends["default"]
    together = backend._queue_together
    held = elsewhere(db_lock("stock:7").acquire)

    def put(batch):
        together(batch)
        batch[0].place = None

    def wait():
        with pytest.raises(LockTimeout), transaction.atomic() if scope == "transaction" else contextlib.nullcontext():
            db_lock("stock:7", timeout=0.3, scope=scope).acquire()
        return LockClaim.objects.count()

    monkeypatch.setattr(backend, "_queue_together", put)
    monkeypatch.setattr(backend, "_queue", lambda *_: None)
    thread = threads(wait)
    thread.join(60)
    elsewhere(held.release)
    assert thread.results == [0]


@pytest.mark.engine("sqlite")
def test_who_gives_up_behind_the_one_writer_of_sqlite_waits_for_it_no_longer(threads):
    """There it could not stand in line, so it has nothing to give back, for which it would have to wait."""
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
@pytest.mark.parametrize("lock", [db_lock, partial(db_semaphore, permits=1)], ids=["lock", "semaphore"])
def test_who_gives_up_a_place_behind_the_one_writer_of_sqlite_waits_for_it_no_longer(
    using, lock, in_line, elsewhere, threads
):
    """The place cannot be given up then; nobody hears of it any more, and so it is passed over soon."""
    held = elsewhere(lock("stock:7", ttl=60, using=using).acquire)

    def wait():
        began = time.monotonic()
        with pytest.raises(LockTimeout):
            lock("stock:7", timeout=1.5, using=using).acquire()
        return time.monotonic() - began

    thread = threads(wait)
    in_line(1)
    with transaction.atomic():
        ResourceLock.objects.filter(pk="other").update(version=1)
        thread.join(60)
    elsewhere(held.release)
    # Long forgotten, or passed over: whichever it is, it is in nobody's way.
    with db_lock("stock:7", timeout=30, using=using):
        pass
    LockClaim.objects.all().delete()
    in_time(thread.results[0], 1.5 + 2.0)


@FAMILY
@pytest.mark.engine("sqlite")
@pytest.mark.parametrize("lock", [db_lock, partial(db_semaphore, permits=1)], ids=["lock", "semaphore"])
def test_a_key_is_given_back_behind_the_one_writer_of_sqlite_also_by_a_block_that_failed(using, lock, threads):
    """It was held, and so the writer is waited for."""
    taken, begun = threading.Event(), threading.Event()

    def fail():
        hold = lock("stock:7", ttl=60, using=using).acquire()
        taken.set()
        assert begun.wait(60)
        hold.release(failed=True)
        return hold.waiting, backends["default"].holder("stock:7")

    thread = threads(fail)
    assert taken.wait(60)
    with transaction.atomic():
        ResourceLock.objects.filter(pk="other").update(version=1)
        begun.set()
        # For longer than one who gives up waits.
        thread.join(1.5)
        assert thread.is_alive()
    thread.join(60)
    assert thread.results == [(0, None)]


@pytest.fixture
def lost_on_the_way(monkeypatch):
    """Return a function by which the next so many connections are lost on their way to autocommit."""
    connection.close()
    kind, losses = type(connections["default"]), []
    to_autocommit = kind._set_autocommit

    def lose(self, autocommit):
        if autocommit and losses:
            losses.pop()
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as line_to_server:
                line_to_server.shutdown(socket.SHUT_RDWR)
        return to_autocommit(self, autocommit)

    monkeypatch.setattr(kind, "_set_autocommit", lose)
    yield lambda number: losses.extend([None] * number)
    connection.close()


@SERVERS
@pytest.mark.parametrize("lock", [db_lock, partial(db_semaphore, permits=1)], ids=["lock", "semaphore"])
@pytest.mark.parametrize("losses", [1, 2, 20])
def test_a_connection_that_is_lost_on_its_way_to_autocommit_leaves_nothing_behind(lost_on_the_way, lock, losses):
    """Django keeps it, as one in a transaction; what comes after it would fail for that."""
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
@pytest.mark.engine("mariadb")
def test_a_lease_is_given_back_though_the_connection_is_lost_on_the_way_out_of_its_transaction(
    using, lost_on_the_way, elsewhere
):
    """Django keeps what was to be done on commit, and the connection, as in a transaction that never ends."""
    hold = db_lock("stock:7", using=using).acquire()
    with pytest.raises(OperationalError), hold.atomic():
        lost_on_the_way(1)
    assert hold.held
    hold.check()
    hold.renew()
    hold.release()
    elsewhere(lambda: db_lock("stock:7", using=using, timeout=0).acquire().release())


@pytest.mark.engine("mariadb")
def test_a_connection_that_was_lost_on_the_way_out_of_a_transaction_is_told_of(lost_on_the_way):
    """As any statement on it would; and a lease needs no connection of the caller's."""
    with pytest.raises(OperationalError), transaction.atomic():
        hold = db_lock("stock:7").acquire()
        lost_on_the_way(1)
    assert not hold.held
    with pytest.raises(LockBackendError, match="lost on the way out"):
        db_lock("stock:8").acquire()
    with db_lock("stock:8", scope="lease") as lease:
        with pytest.raises(LockBackendError, match="lost on the way out"), lease.atomic():
            pass
    connection.close()
    with db_lock("stock:7", timeout=0), db_lock("stock:8", timeout=0):
        pass


@SERVERS
def test_who_takes_a_key_at_the_end_of_its_time_leaves_no_place_in_line(threads, in_line, monkeypatch):
    """Or else its release would hand the key to that place, where nobody is."""
    monkeypatch.setattr(waiting_room.WaitingRoom, "_look", lambda *_, **__: (math.inf, 0))
    monkeypatch.setattr(line, "HEARD_FOR", 30.0)

    def wait():
        with db_lock("stock:7", timeout=3) as hold:
            return hold.waiting

    with transaction.atomic():
        db_lock("stock:7").acquire()
        thread = threads(wait)
        in_line(1)
        transaction.set_rollback(True)
    thread.join(60)
    assert thread.results == [0]
    with db_lock("stock:7", timeout=0):
        pass


@pytest.mark.engine("sqlite")
def test_an_interrupt_leaves_the_patience_of_sqlite_as_it_was(monkeypatch):
    """The project's own statements wait for the writer as they did."""
    with db_lock("stock:7"):
        pass
    raw = connection.connection
    ((usual,),) = raw.execute("PRAGMA busy_timeout").fetchall()

    class Interrupted:
        """Interrupted as soon as the shorter patience is set."""

        def execute(self, sql):
            done = raw.execute(sql)
            if sql == f"PRAGMA busy_timeout = {statements.SQLITE_PATIENCE_MS}":
                raise KeyboardInterrupt
            return done

    backend = backends["default"]
    monkeypatch.setattr(backend, "_session", Interrupted)
    with pytest.raises(KeyboardInterrupt), backend._briefly():
        pass
    assert raw.execute("PRAGMA busy_timeout").fetchall() == [(usual,)]


@SERVERS
def test_an_interrupt_right_after_a_grant_in_a_transaction_gives_it_back_there(threads, elsewhere, monkeypatch):
    """Outside of it one could only wait for its end."""
    held = elsewhere(db_lock("stock:7").acquire)
    backend = backends["default"]
    hold = Attempt._hold

    def interrupted(self, *arguments):
        if self.claim.scope == "transaction":
            raise KeyboardInterrupt
        return hold(self, *arguments)

    def queue(*arguments):
        monkeypatch.undo()
        monkeypatch.setattr(Attempt, "_hold", interrupted)
        elsewhere(held.release)
        return backend.queue(*arguments)

    monkeypatch.setattr(backend, "queue", queue)

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


def test_timeouts_at_the_moment_of_the_hand_over_lose_nobody_and_leave_nothing(threads):
    """Each of them is served or told that its time is over, and the key is free in the end."""
    for number in range(12):
        held, served = db_lock("stock:7").acquire(), []

        def wait(timeout, served=served):
            try:
                with db_lock("stock:7", timeout=timeout) as hold:
                    served.append(hold.token)
                return "served"
            except LockTimeout:
                return "timeout"

        waiting = [threads(lambda timeout=0.05 + 0.002 * one: wait(timeout)) for one in range(4)]
        time.sleep(0.045 + 0.002 * number)
        held.release()
        for thread in waiting:
            thread.join(30)
        assert all(thread.results[0] in {"served", "timeout"} for thread in waiting)
        with db_lock("stock:7", timeout=0.5):
            pass


@pytest.mark.engine("postgresql")
def test_a_slow_answer_is_no_sign_that_nobody_tells(in_line, threads, monkeypatch):
    """The key moves on while the question is on its way: nothing was there to hear when last the room listened."""
    backend, asked, go_on = backends["default"], threading.Event(), threading.Event()
    monkeypatch.setattr(room_of(backend), "_looks_until", 0.0)
    look = type(backend).look

    def slow(self, claims, *, heard=True):
        asked.set()
        go_on.wait(30)
        return look(self, claims, heard=heard)

    hold = db_lock("stock:7").acquire()
    waits = threads(lambda: db_lock("stock:7").acquire().release())
    in_line(1)
    monkeypatch.setattr(type(backend), "look", slow)
    assert asked.wait(30)
    hold.release()
    time.sleep(0.3)
    go_on.set()
    waits.join(30)
    assert room_of(backend)._looks_until == 0.0


def test_no_key_is_said_to_be_busy_that_was_not_asked_for(monkeypatch):
    """Others waited for it a moment ago, so one stands in line at once; and comes too late for that."""
    backends["default"]._crowded.add("stock:7")
    better_in_line, hints = Attempt._better_in_line, []

    def slow(self, claim):
        hints.append(better_in_line(self, claim))
        time.sleep(0.25 if hints[-1] else 0.0)
        return hints[-1]

    monkeypatch.setattr(Attempt, "_better_in_line", slow)
    with db_lock("stock:7", timeout=0.2) as hold:
        assert hold.waited >= 0.2
    assert hints == [True, False]


# The order.


@FAMILY
def test_the_first_to_come_is_the_first_to_be_served_across_processes(using, workers, in_line):
    crowd = workers(5)
    with db_lock("stock:7", using=using):
        for number, worker in enumerate(crowd):
            worker.start(jobs.wait_for, "stock:7", using=using, timeout=30)
            in_line(number + 1)
    answers = [worker.hear() and worker.hear() for worker in crowd]
    tokens = [token for _, token in answers]
    assert tokens == sorted(tokens)


@FAMILY
def test_nobody_overtakes_the_line_unless_it_is_not_fair(using, workers, in_line, elsewhere):
    """Who gives the key back and wants it again at once stands behind those who wait."""
    first, second = workers(2)
    hold = db_lock("stock:7", using=using).acquire()
    first.start(jobs.hold, "stock:7", using=using)
    in_line(1)
    second.start(jobs.wait_for, "stock:7", using=using)
    in_line(2)
    hold.release()
    again = db_lock("stock:7", using=using, timeout=0)
    assert again.try_acquire() is None
    token = first.hear()
    first.tell()
    assert first.hear() == "released"
    assert second.hear() == "waiting"
    assert second.hear()[1] > token
    # Somebody was in line, and had no chance: the holder has it twice in a row.
    backend, waits = backends[using], claim()
    mine, barging = claim(), claim(fair=False)
    assert backend.acquire(mine)
    ResourceLock.objects.filter(pk="stock:7").update(waiters=1)
    LockClaim.objects.create(
        key_resource="stock:7", owner=waits.owner, holder="", begin_time="2020-01-01T00:00Z",
        end_time="2190-01-01T00:00Z", shared=False, permits=1, scope="P", takeover=True, counted=True, patience=10**6,
    )  # fmt: skip
    ResourceLock.objects.filter(pk="stock:7").update(status="S", end_time="2020-01-01T00:00Z")
    assert backend.acquire(claim()) is None
    backend.release(waits)
    assert backend.acquire(barging)
    backend.release(barging)


def test_who_is_not_fair_goes_before_those_who_wait(in_line, workers, until):
    def goes_before():
        # Given back, and not handed over: as by a transaction that is rolled back.
        ResourceLock.objects.filter(pk="stock:7").update(status="S", end_time="2020-01-01T00:00Z")
        return db_lock("stock:7", fair=False).try_acquire()

    (other,) = workers(1)
    backend = backends["default"]
    holder = claim()
    backend.acquire(holder)
    other.start(jobs.wait_for, "stock:7")
    in_line(1)
    other.stop()
    try:
        # What the other one had sent by then may still be at work, and have the key for it.
        until(goes_before).release()
    finally:
        other.resume()
    assert other.hear() == "waiting"
    assert other.hear()


# Ends of other kinds than a release.


def test_the_key_moves_on_when_at_least_ends(workers, in_line):
    (other,) = workers(1)
    hold = db_lock("stock:7", at_least=1.0).acquire()
    began = time.monotonic()
    other.start(jobs.wait_for, "stock:7")
    in_line(1)
    hold.release()
    assert other.hear() == "waiting"
    granted, _ = other.hear()
    assert granted - began >= 0.95
    in_time(granted - began, 1.0 + 0.7)


def test_a_holder_that_dies_hands_over_when_its_lease_ends(workers, doomed, in_line):
    (other,) = workers(1)
    victim = doomed()
    victim.start(jobs.hold, "stock:7", ttl=1.0)
    victim.hear()
    other.start(jobs.wait_for, "stock:7")
    in_line(1)
    victim.kill()
    assert other.hear() == "waiting"
    granted, _ = other.hear()
    in_time(granted - victim.killed_at, 1.0 + 0.5 + 0.7)


@SERVERS
@FAMILY
@pytest.mark.parametrize("roll_back", [False, True])
def test_the_end_of_a_transaction_wakes_the_line(using, roll_back, workers, in_line):
    holder, *waiting = workers(3)
    holder.start(jobs.hold_in_transaction, "stock:7", using=using, roll_back=roll_back)
    holder.hear()
    for number, worker in enumerate(waiting):
        worker.start(jobs.wait_for, "stock:7", using=using)
        in_line(number + 1)
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
def test_transactions_wait_in_line_too(workers, in_line):
    first, second = workers(2)
    hold = db_lock("stock:7").acquire()
    first.start(jobs.hold_in_transaction, "stock:7")
    in_line(1)
    second.start(jobs.wait_for, "stock:7")
    in_line(2)
    hold.release()
    token = first.hear()
    assert not second.pipe.poll(0.2) or second.hear() == "waiting"
    first.tell()
    assert first.hear() == "ended"
    while not isinstance(answer := second.hear(), tuple):
        pass
    assert answer[1] > token


def test_a_lock_that_does_not_take_over_is_told_in_line_that_its_holder_never_came_back(doomed, workers, in_line):
    (patient,) = workers(1)
    victim = doomed()
    victim.start(jobs.hold, "stock:7", ttl=1.0)
    victim.hear()
    patient.start(jobs.acquire, "stock:7", takeover=False, timeout=20)
    in_line(1)
    victim.kill()
    assert patient.hear() == "LockStale"
    with db_lock("stock:7", timeout=1):
        pass


def test_a_ttl_shorter_than_a_turn(workers, in_line):
    crowd = workers(4)
    with db_lock("stock:7"):
        for number, worker in enumerate(crowd):
            worker.start(jobs.wait_for, "stock:7", ttl=1.3)
            in_line(number + 1)
        time.sleep(1.5)
    for worker in crowd:
        assert worker.hear() == "waiting"
        # It had the key, and gave it back in time.
        assert worker.hear()


@SERVERS
def test_autocommit_switched_off_by_hand_waits_in_line_for_a_lease(workers, in_line):
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


# The room.


@SERVERS
def test_the_connection_of_those_who_waited_is_gone_within_a_second(workers, in_line, until):
    """Or a DROP DATABASE at the end of the tests of a project would fail."""
    waiting, _asking = workers(2)
    with db_lock("stock:7"):
        waiting.start(jobs.wait_for, "stock:7")
        in_line(1)
        assert waiting.hear() == "waiting"
    assert waiting.hear()
    waiting.call(jobs.close_connections)
    left = time.monotonic()
    mine = len(waiting.call(jobs.threads))
    until(lambda: "dlocks-waiting" not in waiting.call(jobs.threads))
    in_time(time.monotonic() - left, 1.0)
    assert mine


def test_a_waiter_that_comes_when_its_room_is_about_to_close_is_looked_after(elsewhere, threads, until):
    """A few milliseconds before and after nobody was there for half a second."""
    for number in range(6):
        hold = db_lock("stock:7").acquire()
        with contextlib.suppress(LockTimeout):
            elsewhere(db_lock("stock:7", timeout=0.05).acquire)
        time.sleep(0.47 + 0.02 * number)
        thread = threads(lambda: db_lock("stock:7").acquire().release() or time.monotonic())
        until(lambda hold=hold: hold.waiting == 1)
        hold.release()
        released = time.monotonic()
        thread.join(30)
        in_time(thread.results[0] - released, 0.7)


@pytest.fixture
def outside_sqlite(monkeypatch):
    """
    Return a context manager within which no other thread is inside of SQLite, where this is the engine.

    A process that is forked meanwhile would have a mutex of SQLite's locked for ever.
    """
    backend = backends["default"]

    @contextlib.contextmanager
    def keep_out():
        if connection.vendor != "sqlite":
            yield
            return
        is_out, gate = threading.Event(), threading.Lock()

        def look(*args, look=backend.look, **options):
            is_out.set()
            with gate:
                return look(*args, **options)

        with monkeypatch.context() as patch, gate:
            patch.setattr(backend, "look", look)
            assert is_out.wait(10)
            yield

    return keep_out


def test_who_forks_while_others_wait_disturbs_nobody(threads, in_line, outside_sqlite):
    hold = db_lock("stock:7").acquire()
    thread = threads(lambda: db_lock("stock:7").acquire().release() or time.monotonic())
    in_line(1)
    connection.close()
    with warnings.catch_warnings(), outside_sqlite():
        # Python 3.12 and newer warn of it.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            assert not room_of(backends["default"])._waiters
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
    in_line(1)
    hold.release()
    released = time.monotonic()
    thread.join(30)
    in_time(thread.results[0] - released, 0.7)


# Those who share.


@FAMILY
@pytest.mark.parametrize("kind", ["reader", "permit"])
def test_a_share_from_the_line_is_entered_again_renewed_and_fenced_as_any_hold(
    using, kind, in_line, threads, elsewhere
):
    policy = {"using": using, "ttl": 4.0}
    lock = db_semaphore("stock:7", permits=1, **policy) if kind == "permit" else db_rwlock("stock:7", **policy).read()
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
    in_line(1)
    before.release()
    assert ready.wait(30)
    assert holds[0].token > before.token
    # Longer than the short lease from the line, and than the ttl.
    time.sleep(4.5)
    holds[0].check()
    assert elsewhere(db_lock("stock:7", using=using, timeout=0).try_acquire) is None
    done.set()
    with db_lock("stock:7", using=using) as after:
        assert after.token > holds[0].token


def test_a_share_that_is_lost_is_told(until):
    told = []
    lock = db_semaphore("api", permits=2, ttl=1.0, on_lost=told.append)
    hold = lock.acquire()
    LockClaim.objects.all().delete()
    ResourceLock.objects.update(shares=0)
    until(lambda: told == [hold])
    with pytest.raises(Exception, match="lost"):
        hold.release()


def test_readers_leave_the_line_with_their_process(doomed, in_line, workers):
    """A reader that dies with its share keeps a writer in line for its ttl, and no longer."""
    (writer,) = workers(1)
    reader = doomed()
    reader.start(jobs.hold, "stock:7", shared=True, ttl=1.0)
    reader.hear()
    writer.start(jobs.wait_quietly, "stock:7")
    in_line(1)
    reader.kill()
    in_time(writer.hear()[0] - reader.killed_at, 1.0 + 0.5 + 0.7)


def test_a_share_that_is_kept_for_at_least_a_while_moves_on_then(workers, in_line):
    (writer,) = workers(1)
    hold = db_lock("stock:7", shared=True, at_least=1.0).acquire()
    began = time.monotonic()
    writer.start(jobs.wait_quietly, "stock:7")
    in_line(1)
    hold.release()
    granted, _ = writer.hear()
    # Its grace and one look on top.
    assert granted - began >= 0.95
    in_time(granted - began, 1.0 + 0.5 + 0.7)


def test_many_readers_and_writers_of_several_processes_never_meet(workers, tmp_path):
    """An odd number says that a writer is at work; readers and writers look at it."""
    path = tmp_path / "value"
    path.write_text("0")
    crowd = workers(5)
    for number, worker in enumerate(crowd):
        worker.start(jobs.read_or_write, str(path), "stock:7", times=40, write=number < 2)
    for worker in crowd:
        worker.hear()
    assert path.read_text() == "160"


# Tests of those who use it.


class InATestCase(TestCase):
    """What a project's own TestCase does with locks that others wait for."""

    def test_a_lock_is_entered_left_and_entered_again(self):
        for _ in range(3):
            with db_lock("stock:7") as hold, db_lock("stock:7"):
                assert hold.waiting == 0
            with db_rwlock("catalogue", scope=None).read():
                pass
        self.assertTrue(ResourceLock.objects.filter(pk="stock:7").exists())

    def test_a_share_is_the_test_s_own_and_leaves_nothing_behind(self):
        def committed():
            try:
                return ResourceLock.objects.filter(pk="catalogue").exists()
            finally:
                connection.close()

        with db_rwlock("catalogue").read() as hold:
            self.assertEqual(hold.scope, "transaction")
        if connection.vendor != "sqlite":
            self.assertFalse(keeper.run(committed))

    def test_nothing_of_it_stays(self):
        with db_lock("stock:7", timeout=0):
            pass


@SERVERS
def test_a_database_can_be_dropped_half_a_second_after_somebody_waited(until):
    """As a test runner does at its end; the one who waited is alive still."""
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
                    cursor.execute("SELECT COUNT(*) FROM information_schema.processlist WHERE db = 'dropped'")
                return cursor.fetchone() == (0,)

            until(is_unused)
            took = time.monotonic() - left
            cursor.execute(f"DROP DATABASE {name}")
        in_time(took, 0.6)
    finally:
        holder.kill()
    assert connections["default"].settings_dict["NAME"] == original


# Whoever is stopped.


@SERVERS
@FAMILY
def test_who_is_stopped_anywhere_on_its_way_through_the_line_keeps_nobody_else_for_long(using, doomed, workers):
    """Also in the middle of a transaction of the line's own, with the lock row locked."""
    crowd = workers(2)
    victim = doomed()
    victim.start(jobs.enter_and_leave, "stock:7", seconds=8, using=using, ttl=1.0)
    for worker in crowd:
        worker.start(jobs.longest_wait, "stock:7", seconds=7, using=using, ttl=1.0)
    for _ in range(2):
        time.sleep(random.uniform(0.1, 0.3))
        victim.stop()
        time.sleep(2.7)
        victim.resume()
    longest = max(worker.hear() for worker in crowd)
    # Not killed in line.
    victim.hear()
    # Its lease, its grace, the turn that it was given, and the bound of a transaction.
    in_time(longest, 4.0)


def test_a_thread_that_hangs_on_its_way_into_line_keeps_no_other_out(threads, in_line, monkeypatch):
    """Its connection may be dead, and its driver patient."""
    entered, leave = threading.Event(), threading.Event()
    monkeypatch.setattr(backends["default"], "_entrance", line.Entrance())

    def hang():
        with backends["default"]._entrance_here().turn:
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
            in_line(1)
        finally:
            leave.set()
    waiting.join(30)
    assert waiting.results == [True]


def test_to_wait_and_to_have_waited_costs_hardly_any_processor(in_line, threads):
    """Nobody asks again and again whether there is somebody to ask for."""
    with db_lock("stock:7"):
        waiting = threads(lambda: db_lock("stock:7", timeout=30).acquire().release())
        in_line(1)
        began = time.process_time()
        time.sleep(0.4)
        assert time.process_time() - began < 0.25
    waiting.join(30)
    began = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - began < 0.25


# Who listens: on PostgreSQL a thread that waits can do so itself.


@pytest.mark.engine("postgresql")
def test_a_thread_that_waits_alone_hears_of_its_turn_itself(in_line, threads, monkeypatch):
    room, heard_by = room_of(backends["default"]), []
    # Another test may have had reason to look.
    monkeypatch.setattr(room, "_looks_until", 0.0)
    take = room._take

    def noting(messages):
        heard_by.extend(threading.current_thread() for _ in messages)
        take(messages)

    monkeypatch.setattr(room, "_take", noting)
    hold = db_lock("stock:7").acquire()
    waiting = threads(lambda: db_lock("stock:7").acquire().release())
    in_line(1)
    hold.release()
    waiting.join(30)
    assert set(heard_by) <= {waiting, room._thread}
    # Not where the room had to look just then.
    for _ in range(20):
        if waiting in heard_by:
            break
        hold = db_lock("stock:7").acquire()
        waiting = threads(lambda: db_lock("stock:7").acquire().release())
        in_line(1)
        hold.release()
        waiting.join(30)
    assert waiting in heard_by


@pytest.mark.engine("postgresql")
def test_a_thread_that_was_interrupted_while_it_listened_keeps_nobody_waiting_for_ever(
    in_line, threads, monkeypatch, until
):
    """Between the moment in which it has ears and the one in which it knows: nothing gives them back."""
    monkeypatch.setattr(waiting_room, "EARS_PATIENCE", 0.5)
    room = room_of(backends["default"])
    has, leave = threading.Event(), threading.Event()

    def interrupted(ears):
        with ears:
            has.set()
            leave.wait(60)

    try:
        with db_lock("stock:7"):
            waiting = threads(lambda: db_lock("stock:7", timeout=30).acquire().release())
            in_line(1)
            listener = until(lambda: room._listener)
            threads(lambda: interrupted(listener.ears))
            assert has.wait(10)
            until(lambda: room._listener not in {listener, None})
        waiting.join(30)
        assert waiting.results == [None]
    finally:
        leave.set()


@pytest.mark.engine("postgresql")
@pytest.mark.parametrize("kind", [TimeoutError, RuntimeError, KeyboardInterrupt])
def test_what_a_signal_s_handler_raises_ends_the_wait_and_is_not_lost(kind, workers, in_line):
    """A task queue ends a task that takes too long so."""
    (worker,) = workers(1)
    with db_lock("stock:7"):
        worker.start(jobs.wait_until_a_signal, "stock:7", kind, timeout=30)
        assert worker.hear() == "waiting"
        in_line(1)
        os.kill(worker.process.pid, signal.SIGUSR1)
        assert worker.hear(15) == kind.__name__
        in_line(0)


@pytest.mark.engine("postgresql")
async def test_a_thread_that_listens_hears_for_the_tasks_of_its_process_too(in_line, threads):
    held = [await db_lock(key).aacquire() for key in ("stock:7", "stock:8")]
    listening = threads(lambda: db_lock("stock:7", timeout=30).acquire().release())
    await sync_to_async(in_line)(1)
    task = asyncio.create_task(db_lock("stock:8", timeout=30).aacquire())
    await sync_to_async(in_line)(1, "stock:8")
    await held[1].arelease()
    hold = await task
    await hold.arelease()
    await held[0].arelease()
    await asyncio.to_thread(listening.join, 30)
    assert listening.results == [None]
    in_time(hold.waited, 10)


# Who gives up while a transaction has the row.


@SERVERS
@FAMILY
def test_who_gives_up_behind_a_transaction_is_not_given_the_key_when_that_ends(using, workers):
    """A look that waited for the row has seen a line in which the claim still stood."""
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
            in_time(hold.waited, KEPT_FOR)
        assert not LockClaim.objects.exists()


@SERVERS
def test_who_leaves_between_the_look_at_the_line_and_the_grant_is_passed_over(monkeypatch, elsewhere, is_busy):
    backend = backends["default"]
    mine = claim()
    in_line = backend._in_line

    def leaves(key):
        live = in_line(key)
        # As where the row is locked by somebody else: by this step.
        assert elsewhere(backend.release, mine, failed=True) is False
        return live

    hold = db_lock("stock:7").acquire()
    assert backend.queue(mine).number
    monkeypatch.setattr(backend, "_hand_on", lambda key: False)
    monkeypatch.setattr(backend, "_hand_over", lambda claim, failed: False)
    monkeypatch.setattr(backend, "_in_line", leaves)
    hold.release()
    monkeypatch.undo()
    assert not is_busy()


# A crowd that comes at once.


def test_the_threads_of_a_process_go_into_line_one_at_a_time(monkeypatch, in_line, threads):
    """Else the row of the key would go from one to the next of them, and never to its holder."""
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

    # Or whoever waits for longer at the entrance goes in beside the one who hangs there.
    monkeypatch.setattr(line, "ENTRANCE_PATIENCE", 60.0)
    for step in ("_queue", "_queue_together"):
        monkeypatch.setattr(backend, step, noted(getattr(backend, step)))
    with db_lock("stock:7"):
        gate = threading.Barrier(10)

        def take():
            gate.wait(30)
            with db_lock("stock:7", timeout=60) as hold:
                return hold.held

        crowd = [threads(take) for _ in range(10)]
        in_line(10)
    for thread in crowd:
        thread.join(60)
    assert [thread.results for thread in crowd] == [[True]] * 10
    assert set(together) == {1}


@pytest.fixture
def slow_entrance(monkeypatch, until):
    """
    Have the first who goes into line wait for ``leave`` on the way.

    Return the events ``entered`` and ``leave``, the sizes of all batches, and a function that waits until so many
    others are at the entrance.
    """
    backend = backends["default"]
    entered, leave, sizes = threading.Event(), threading.Event(), []
    together = backend._queue_together

    def slowly(batch):
        sizes.append(len(batch))
        if len(sizes) == 1:
            entered.set()
            leave.wait(30)
        together(batch)

    monkeypatch.setattr(line, "ENTRANCE_PATIENCE", 60.0)
    monkeypatch.setattr(backend, "_queue_together", slowly)
    yield entered, leave, sizes, lambda number: until(lambda: len(backend._entrance.waiting) == number)
    leave.set()


@SERVERS
def test_those_who_come_while_one_goes_into_line_go_together_and_in_their_order(slow_entrance, in_line, threads):
    entered, leave, sizes, at_entrance = slow_entrance
    order = []

    def take(number):
        with db_lock("stock:7", timeout=60):
            order.append(number)

    with db_lock("stock:7") as hold:
        crowd = [threads(lambda: take(0))]
        assert entered.wait(10)
        for number in range(1, 30):
            crowd.append(threads(lambda number=number: take(number)))
            at_entrance(number)
        leave.set()
        in_line(30)
        assert hold.waiting == 30
        assert ResourceLock.objects.get(pk="stock:7").waiters == 30
    for thread in crowd:
        thread.join(60)
    assert sizes[:2] == [1, 29]
    assert order == list(range(30))
    assert ResourceLock.objects.get(pk="stock:7").waiters == 0
    assert not LockClaim.objects.exists()


@SERVERS
def test_who_waits_for_another_key_is_not_taken_along(slow_entrance, in_line, threads):
    entered, leave, sizes, at_entrance = slow_entrance

    def take(key):
        with db_lock(key, timeout=60) as hold:
            return hold.held

    with db_lock("stock:7"), db_lock("stock:8"):
        crowd = [threads(lambda: take("stock:7"))]
        assert entered.wait(10)
        for number, key in enumerate(("stock:8", "stock:7", "stock:8")):
            crowd.append(threads(lambda key=key: take(key)))
            at_entrance(number + 1)
        leave.set()
        in_line(2, "stock:7")
        in_line(2, "stock:8")
    for thread in crowd:
        thread.join(60)
    assert [thread.results for thread in crowd] == [[True]] * 4
    assert sorted(sizes) == [1, 1, 2]


@SERVERS
def test_who_was_to_be_taken_along_by_one_that_failed_goes_alone(slow_entrance, monkeypatch, in_line, threads):
    entered, leave, _, at_entrance = slow_entrance
    backend = backends["default"]
    together, failed = backend._queue_together, []

    def fail_with_others(batch):
        if len(batch) > 1 and not failed:
            failed.append(len(batch))
            raise LockBackendError("The connection of this one is dead.")
        together(batch)

    monkeypatch.setattr(backend, "_queue_together", fail_with_others)

    def take():
        try:
            with db_lock("stock:7", timeout=60) as hold:
                return hold.held
        except LockBackendError as error:
            return str(error)

    with db_lock("stock:7"):
        crowd = [threads(take)]
        assert entered.wait(10)
        for number in range(1, 6):
            crowd.append(threads(take))
            at_entrance(number)
        leave.set()
        in_line(5)
    for thread in crowd:
        thread.join(60)
    assert failed == [5]
    assert Counter(thread.results[0] for thread in crowd) == {True: 5, "The connection of this one is dead.": 1}


@SERVERS
def test_who_is_interrupted_while_another_one_takes_it_along_leaves_no_place_behind(slow_entrance, threads):
    entered, leave, sizes, at_entrance = slow_entrance
    backend = backends["default"]
    waits, taken = threading.Event(), threading.Event()

    class Interrupted:
        """A turn that is interrupted while one waits for it, once another one has taken the claim along."""

        def acquire(self, timeout):
            waits.set()
            taken.wait(30)
            raise KeyboardInterrupt

        def release(self):
            raise RuntimeError("cannot release un-acquired lock")

    turn, with_others = backend._entrance.turn, backend._entrance.with_others

    def take_along(mine):
        batch = with_others(mine)
        if len(batch) > 1:
            taken.set()
            # Its thread has gone, and taken back what was not there yet.
            interrupted.join(30)
        return batch

    claims = [Claim(key="stock:7", ttl=30) for _ in range(3)]

    def be_interrupted():
        with pytest.raises(KeyboardInterrupt):
            backend.queue(claims[1])
        backend.release(claims[1])

    backend._entrance.with_others = take_along
    with db_lock("stock:7") as hold:
        first = threads(lambda: backend.queue(claims[0]))
        assert entered.wait(10)
        backend._entrance.turn = Interrupted()
        interrupted = threads(be_interrupted)
        assert waits.wait(10)
        backend._entrance.turn = turn
        last = threads(lambda: backend.queue(claims[2]))
        at_entrance(2)
        leave.set()
        for thread in (first, interrupted, last):
            thread.join(30)
        assert sizes == [1, 2]
        assert hold.waiting == 2
        assert set(LockClaim.objects.values_list("owner", flat=True)) == {claims[0].owner, claims[2].owner}
        assert ResourceLock.objects.get(pk="stock:7").waiters == 2
        for claim in (claims[0], claims[2]):
            backend.release(claim)


@pytest.fixture
def hung():
    """A claim that holds the key; and a thread on its way into line, that took another one along and hangs there."""
    backend = backends["default"]
    holder, *claims = (Claim(key="stock:7", ttl=30) for _ in range(3))
    assert backend.acquire(holder)
    entrance = line.Entrance()
    leader, follower = (line.Entering(claim, "") for claim in claims)
    entrance.waiting.extend([leader, follower])
    batch = entrance.with_others(leader)
    assert batch == [leader, follower]
    # The other one is tired of waiting for that, and goes by itself.
    backend._queue_together(entrance.with_others(follower))
    assert follower.place.number
    return backend, holder, leader, follower, lambda: backend._queue_together(batch)


@SERVERS
def test_who_was_to_be_taken_along_and_has_had_its_turn_is_not_put_into_line_again(hung):
    backend, holder, leader, follower, go_on = hung
    assert backend.release(holder)
    assert backend.look([follower.claim])[follower.claim.owner].grant
    follower.gone = True
    assert backend.release(follower.claim)
    assert backend.acquire(holder)
    go_on()
    assert leader.place.number
    assert list(LockClaim.objects.values_list("owner", "id")) == [(leader.claim.owner, leader.place.number)]
    assert ResourceLock.objects.get(pk="stock:7").waiters == 1
    assert backend.release(holder)
    assert backend.look([leader.claim])[leader.claim.owner].grant


@SERVERS
def test_who_was_to_be_taken_along_and_stands_in_line_by_itself_keeps_its_place(hung):
    backend, holder, leader, follower, go_on = hung
    go_on()
    assert list(LockClaim.objects.order_by("id").values_list("owner", "id")) == [
        (one.claim.owner, one.place.number) for one in (follower, leader)
    ]
    assert ResourceLock.objects.get(pk="stock:7").waiters == 2
    assert backend.release(holder)
    for one in (follower, leader):
        assert backend.look([one.claim])[one.claim.owner].grant
        assert backend.release(one.claim)


@SERVERS
@FAMILY
def test_who_has_the_key_does_not_go_into_line_beside_it(using):
    """Its turn came while it stood up, or before a reply that was lost."""
    backend = backends[using]
    holder, other = (Claim(key="stock:7", ttl=30) for _ in range(2))
    assert backend.acquire(holder)
    place = backend.queue(holder)
    assert place.ask
    batch = [line.Entering(claim, "") for claim in (holder, other)]
    backend._queue_together(batch)
    assert batch[0].place is None
    assert not LockClaim.objects.filter(owner=holder.owner).exists()
    assert backend.release(holder)
    LockClaim.objects.all().delete()


@pytest.mark.engine("mariadb")
def test_whose_turn_comes_in_the_middle_of_its_own_packet_does_not_go_into_line_again(monkeypatch, threads, in_line):
    backend = backends["default"]
    paused = backend.dialect.queue.replace(
        " COMMIT; SELECT", " COMMIT; DO GET_LOCK('dlocks_tests', 30); DO RELEASE_LOCK('dlocks_tests'); SELECT"
    )
    assert paused != backend.dialect.queue
    monkeypatch.setattr(type(backend.dialect), "queue", paused)
    holder, claim = (Claim(key="stock:7", ttl=30) for _ in range(2))
    assert backend.acquire(holder)
    with connection.cursor() as cursor:
        cursor.execute("SELECT GET_LOCK('dlocks_tests', 30)")
        waiting = threads(lambda: backend.queue(claim))
        in_line(1)
        assert backend.release(holder)
        in_line(0)
        cursor.execute("SELECT RELEASE_LOCK('dlocks_tests')")
    waiting.join(30)
    assert waiting.results[0].ask
    assert not LockClaim.objects.exists()
    assert backend.acquire(claim)
    assert backend.release(claim)


@pytest.mark.engine("postgresql")
def test_statements_for_many_claims_are_not_prepared():
    """There would be one for each number of them, with a plan of a megabyte."""
    backend = backends["default"]
    holder = Claim(key="stock:7", ttl=30)
    assert backend.acquire(holder)
    for number in range(24):
        backend._queue_together([line.Entering(Claim(key="stock:7", ttl=30), "") for _ in range(1 + number % 3)])
    with connection.cursor() as cursor:
        cursor.execute("SELECT statement FROM pg_prepared_statements WHERE statement LIKE '%INSERT INTO%'")
        prepared = [statement for (statement,) in cursor.fetchall()]
    assert prepared
    assert not [statement for statement in prepared if "UNION ALL" in statement]
    LockClaim.objects.all().delete()
    ResourceLock.objects.all().delete()


@SERVERS
@FAMILY
def test_a_crowd_that_comes_at_once_keeps_nobody_from_giving_back(using, workers, until):
    crowd = workers(4)
    hold = db_lock("stock:7", using=using, ttl=60).acquire()
    for worker in crowd:
        worker.start(jobs.come_at_once, "stock:7", threads=25, using=using, timeout=60)
    for worker in crowd:
        assert worker.hear() == "here"
    for worker in crowd:
        worker.tell()
    # In the middle of their coming.
    until(lambda: backends["default"].waiting("stock:7") >= 10)
    hold.release()
    # Nor does it keep any of its own.
    assert sum(worker.hear(120) for worker in crowd) == 100


@SERVERS
def test_a_key_whose_row_is_kept_by_others_for_seconds_is_given_back_all_the_same(workers, is_busy):
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


async def test_a_coroutine_that_is_closed_in_the_middle_is_in_nobody_s_way(in_line):
    """Without its loop's doing, so that nothing can be waited for."""
    held = await sync_to_async(db_lock("stock:7").acquire)()
    room = room_of(backends["default"])

    class Closed:
        def __await__(self):
            steps = db_lock("stock:7", timeout=None).aacquire().__await__()
            while not any(waiter.seated for waiter in list(room._waiters.values())):
                yield next(steps)
            steps.close()

    await Closed()
    await sync_to_async(in_line)(0)
    await sync_to_async(held.release)()


def test_a_task_whose_loop_was_closed_is_in_nobody_s_way(in_line, elsewhere, until):
    """As by who runs a loop until something is done, and does not look what else goes on in it."""

    def leave_one_waiting():
        loop = asyncio.new_event_loop()
        waits = loop.create_task(db_lock("stock:7", timeout=None).aacquire())
        loop.run_until_complete(wait_for_it())
        # That of Django's thread, which ends with the loop.
        loop.run_until_complete(sync_to_async(connections.close_all)())
        loop.close()
        # Or Python tells of it as it is collected.
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
        elsewhere(leave_one_waiting)
        in_line(0)
    # Nor in that of this process's memory; that it cannot wait for anything as it goes is no error.
    until(lambda: gc.collect() is not None and left[0]() is None)
    began = time.monotonic()
    with db_lock("stock:7", timeout=10):
        in_time(time.monotonic() - began, 1.0)


@SERVERS
@FAMILY
def test_a_claim_whose_row_is_kept_by_others_is_passed_over_and_keeps_nobody_waiting(using, workers, in_line):
    first, second, other = workers(3)
    hold = db_lock("stock:7", using=using).acquire()
    first.start(jobs.wait_for, "stock:7", using=using, timeout=60)
    in_line(1)
    second.start(jobs.wait_for, "stock:7", using=using, timeout=60)
    in_line(2)
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
    # It is not heard of for 3 seconds, and then in nobody's way.
    in_time(second_at - released_at, 8.0)


@SERVERS
@FAMILY
def test_what_the_line_gives_lasts_from_when_it_is_given_though_that_had_to_wait(using, workers, until, monkeypatch):
    """Somebody has the row of the claim for most of a second, when its turn comes."""
    monkeypatch.setattr(line, "HEARD_FOR", 30.0)
    (other,) = workers(1)
    backend, first, second = backends[using], claim(), claim()
    assert backend.acquire(first) is not None
    assert backend.queue(second, "nobody") is not None
    other.start(jobs.lock_first_claim, "stock:7")
    assert other.hear() == "locked"
    threading.Timer(0.8, other.tell).start()
    assert backend.release(first)
    left = until(lambda: backend.look([second], heard=False)[second.owner].grant).lease
    assert other.hear() == "unlocked"
    assert backend.release(second)
    in_time(KEPT_FOR - left, 0.5)


@SERVERS
def test_a_turn_that_comes_to_nothing_at_first_is_not_lost(monkeypatch, threads):
    """The row may be locked, for a moment, when the claim asks for what it was told it has."""
    backend = backends["default"]
    acquire, queue = backend.acquire, backend.queue
    asked = []

    def late(claim, channel="", number=None):
        queue(claim, channel, number)
        return Place(ask=True)

    def busy(claim):
        asked.append(claim)
        return None if len(asked) <= 2 else acquire(claim)

    monkeypatch.setattr(backend, "queue", late)
    monkeypatch.setattr(backend, "acquire", busy)
    with db_lock("stock:7", timeout=5) as hold:
        in_time(hold.waited, 2)


@pytest.mark.parametrize("timeout", [2.0, None])
def test_callers_who_do_not_react_keep_the_key_from_others_once_and_not_for_ever(timeout, workers, until):
    (stuck,) = workers(1)
    with db_lock("stock:7") as hold:
        stuck.start(jobs.hang_in_line, "stock:7", 3, timeout=timeout)
        assert stuck.hear() == "waiting"
        until(lambda: hold.waiting == 3)
    lock = db_lock("stock:7", timeout=60)
    with lock as hold:
        # Each of them may keep it until it is known that he does not come for it.
        in_time(hold.waited, 20)
    for _ in range(5):
        with lock as hold:
            in_time(hold.waited, 2)
    stuck.tell()
    # Who comes late may find it free.
    assert set(stuck.hear()) <= ({"LockTimeout", "str"} if timeout else {"str"})


@SERVERS
def test_who_looks_after_keys_that_transactions_have_waits_for_none_of_them(workers, monkeypatch):
    """There may be many, and nobody listens meanwhile."""
    keys = ["stock:7", "stock:8"]
    holders = workers(len(keys))
    for holder, key in zip(holders, keys, strict=True):
        holder.start(jobs.hold_in_transaction, key)
        holder.hear()
    backend, claims = backends["default"], [claim(key) for key in keys]
    for one in claims:
        backend.queue(one)
    without_sleep = SimpleNamespace(sleep=lambda seconds: pytest.fail("it waits"), monotonic=time.monotonic)
    with monkeypatch.context() as patch:
        for module in (database, line, statements):
            patch.setattr(module, "time", without_sleep)
        for heard in (True, False):
            places = backend.look(claims, heard=heard)
            assert [places[one.owner].grant for one in claims] == [None, None]
    for one in claims:
        backend.release(one)
    for holder in holders:
        holder.tell()
        holder.hear()
