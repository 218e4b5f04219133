"""The queue of a key: order, notification and handover."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import threading
import time
import weakref
from functools import partial
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.management import call_command
from django.db import connection, connections, transaction

from dlocks import LockLost, LockStale, LockTimeout, db_lock, db_rwlock, db_semaphore
from dlocks.backends.database import (
    InsertBackend,
    OptimisticBackend,
    PessimisticBackend,
)
from dlocks.models import LockClaim
from dlocks.testing import expire
from dlocks.values import Claim
from tests import jobs
from tests.settings import ENGINE
from tests.timing import in_time
from tests.volume import volume

pytestmark = [
    pytest.mark.driver,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("no_claim_left"),
]

FAMILY = {
    "default": PessimisticBackend,
    "optimistic": OptimisticBackend,
    "insert": InsertBackend,
}
# Where the strategies have the code in common, each engine tests one of them.
ONE = {"postgresql": "default", "mariadb": "optimistic"}.get(ENGINE, "insert")
SERVERS = pytest.mark.engine("postgresql", "mariadb", "mysql")
# Python code decides the results of these tests, so one server is enough.
ONE_SERVER = pytest.mark.engine("postgresql", "sqlite")


# Order.


def test_processes_are_served_in_the_order_of_arrival(workers, in_queue):
    """Neither their strategies nor a ttl shorter than the wait make a difference."""
    crowd = workers(5)
    with db_lock("stock:7"):
        for number, worker in enumerate(crowd):
            using, ttl = list(FAMILY)[number % 3], (30.0, 1.3)[number % 2]
            policy = {"using": using, "ttl": ttl, "timeout": 30}
            worker.start(jobs.wait_quietly, "stock:7", **policy)
            in_queue(number + 1)
        time.sleep(1.5)
    tokens = [token for _, token in (worker.hear() for worker in crowd)]
    assert tokens == sorted(tokens)


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


def test_only_an_unfair_claim_passes_the_queue(doomed, in_queue, in_other_thread):
    """The first waiter cannot acquire the free key, as its process is stopped."""
    waiter = doomed()
    for using, fair in itertools.product(FAMILY, (True, False)):
        lock = db_lock("stock:7", using=using, renew=False)
        hold = in_other_thread(lock.acquire)
        waiter.start(jobs.wait_quietly, "stock:7", using=using, timeout=30)
        in_queue(1)
        waiter.stop()
        expire(hold)
        passing = db_lock("stock:7", using=using, fair=fair).try_acquire()
        assert (passing is None) is fair, using
        with pytest.raises(LockLost):
            in_other_thread(hold.release)
        if passing is not None:
            passing.release()
        waiter.resume()
        assert waiter.hear()[1] > hold.token


def test_a_release_keeps_the_queue_of_another_process(doomed, in_queue):
    """The releasing process knows of no queue, and that of the waiter is stopped."""
    waiter = doomed()
    for using in FAMILY:
        lock = db_lock("stock:7", using=using)
        hold = lock.acquire()
        waiter.start(jobs.wait_quietly, "stock:7", using=using, timeout=30)
        in_queue(1)
        waiter.stop()
        hold.release()
        assert lock.try_acquire() is None, using
        waiter.resume()
        assert waiter.hear()[1] > hold.token


@pytest.mark.engine("postgresql", "sqlite")
def test_the_key_is_handed_over_when_min_hold_ends(worker, in_queue):
    """This is so for exclusive and shared holds."""
    # The bound of the shared hold adds the grace and one poll.
    for shared, latest in (False, 1.0 + 0.7), (True, 1.0 + 0.5 + 0.7):
        hold = db_lock("stock:7", shared=shared, min_hold=1.0).acquire()
        began = time.monotonic()
        worker.start(jobs.wait_quietly, "stock:7")
        in_queue(1)
        hold.release()
        granted, _ = worker.hear()
        assert granted - began >= 0.95
        in_time(granted - began, latest)


@pytest.mark.engine("postgresql", "mariadb")
def test_the_end_of_a_transaction_wakes_its_waiters(workers, in_queue):
    """The transaction was in the queue itself. It may be rolled back."""
    holder, *waiting = workers(3)
    for using, roll_back in [*((one, False) for one in FAMILY), ("default", True)]:
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
        assert holder.go_on() == "ended"
        (_, one), (granted, other) = (worker.hear() for worker in waiting)
        assert one < other, (using, roll_back)
        assert roll_back or token < one, using
        in_time(granted - ended, 1.5)


@pytest.mark.engine("mariadb", "sqlite")
def test_a_caller_without_takeover_gets_lock_stale(doomed, worker, in_queue):
    """The caller may be a waiter or a reader. A reader may take the key over."""
    victim = doomed()
    victim.call(jobs.acquire, "stock:7", ttl=1.0)
    worker.start(jobs.acquire, "stock:7", takeover=False, timeout=20)
    in_queue(1)
    victim.kill()
    assert worker.hear() == "LockStale"
    with pytest.raises(LockStale):
        db_rwlock("stock:7", takeover=False, timeout=5).read().acquire()
    with db_rwlock("stock:7", timeout=1).read():
        # The reader has taken the key over and is its holder now.
        holder = db_lock("stock:7").holder()
        assert not holder.stale
        assert holder.holder.startswith(f"{os.uname().nodename}:{os.getpid()}")


def test_a_dead_waiter_is_skipped_within_three_seconds(doomed, in_queue):
    """A dead waiter does not block a caller that only tries either."""
    with db_lock("stock:7"):
        victim = doomed()
        victim.start(jobs.wait_quietly, "stock:7")
        in_queue(1)
        victim.kill()
        in_queue(0)
        took = time.monotonic() - victim.killed_at
    for using in FAMILY:
        for shared in False, True:
            found = db_lock("stock:7", using=using, shared=shared).try_acquire()
            assert found, (using, shared)
            found.release()
    LockClaim.objects.all().delete()
    in_time(took, 3.0)


@pytest.mark.parametrize(
    "timeout",
    [
        pytest.param(2.0, marks=pytest.mark.engine("mariadb")),
        pytest.param(None, marks=pytest.mark.engine("postgresql")),
    ],
)
def test_unresponsive_waiters_delay_the_key_only_once(timeout, worker, in_queue):
    with db_lock("stock:7"):
        worker.call(jobs.hang_in_queue, "stock:7", 3, timeout=timeout)
        in_queue(3)
    lock = db_lock("stock:7", timeout=60)
    # Each stuck caller may keep the key until it is known not to respond.
    for limit in (20, 2, 2, 2, 2, 2):
        with lock as hold:
            in_time(hold.waited, limit)
    worker.tell()
    # A late caller may find the key free.
    assert set(worker.hear()) <= ({"LockTimeout", "str"} if timeout else {"str"})


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
    until(lambda: hold.queue_length() >= number // 2)
    hold.release()
    # The waiters do not block each other either.
    assert sum(worker.hear(120) for worker in crowd) == 4 * number


@pytest.mark.psycopg3
@pytest.mark.engine("postgresql")
def test_a_waiter_on_another_host_is_notified(in_other_thread):
    """Its process is notified by the server, and does not have to poll."""
    # The name of the channel is that of another host.
    with contextlib.closing(connection.copy()) as session:
        with session.cursor() as cursor:
            cursor.execute("LISTEN elsewhere")
        for (using, kind), scope in itertools.product(
            FAMILY.items(), ("lease", "transaction")
        ):
            backend, waits = kind("default"), Claim(key="stock:7", ttl=30.0)
            block = transaction.atomic() if scope == "transaction" else db_lock("other")
            with block, db_lock("stock:7", using=using, scope=scope):
                assert in_other_thread(backend.enqueue, waits, "elsewhere").position
            # The insert strategy also notifies once it has granted the key.
            notified = list(session.connection.notifies(timeout=5.0, stop_after=1))
            assert {one.channel for one in notified} == {"elsewhere"}, (using, scope)
            backend.release(waits)
            list(session.connection.notifies(timeout=0.1))


# Shared holds.


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
        threads(partial(share, db_rwlock("stock:7", ttl=2.0).read()))
        threads(partial(share, db_semaphore("stock:8", permits=1, ttl=2.0)))
        in_queue(1)
        in_queue(1, "stock:8")
    ready.wait(30)
    # This is longer than the short lease from the queue, and longer than the ttl.
    time.sleep(2.6)
    for key, hold in holds.items():
        assert hold.token > before.token
        hold.check()
        assert is_busy(key)
    done.set()
    for key, hold in holds.items():
        with db_lock(key) as after:
            assert after.token > hold.token


def test_a_dead_reader_blocks_a_writer_only_for_its_ttl(doomed, in_queue, worker):
    """So does a dead writer."""
    for shared in (True, False):
        victim = doomed()
        victim.call(jobs.acquire, "stock:7", shared=shared, ttl=1.0)
        worker.start(jobs.wait_quietly, "stock:7")
        in_queue(1)
        victim.kill()
        in_time(worker.hear()[0] - victim.killed_at, 1.0 + 0.5 + 0.7)


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


def test_a_shared_key_is_not_purged(in_other_thread):
    for using in FAMILY:
        lock = db_rwlock(f"catalogue {using}", using=using, timeout=0)
        with lock.read() as hold:
            call_command("reap_locks", "--idle-for", "0s", using=using)
            assert in_other_thread(lock.write().try_acquire) is None, using
            hold.check()


# The waiters of a process.


@SERVERS
@pytest.mark.timeout(400)
async def test_many_waiting_tasks_use_at_most_three_connections():
    """The server counts the connections during the wait. Each task is served."""
    # A claim takes more processor time on MariaDB and MySQL.
    number = 1000 if connection.vendor == "postgresql" else volume(50)
    served, most = [], 0
    count = partial(asyncio.to_thread, sessions)
    # Connections of idle processes from other tests are not counted, and may end.
    await sync_to_async(connections.close_all)()
    await asyncio.sleep(1.2)
    others = await count()
    holder = await db_lock("stock:7").aacquire()

    async def wait():
        async with db_lock("stock:7", timeout=None) as hold:
            served.append(hold.token)

    tasks = [asyncio.create_task(wait()) for _ in range(number)]
    while await holder.aqueue_length() != number:
        most = max(most, len(await count() - others))
        await asyncio.sleep(0.5)
    await holder.arelease()
    while not all(task.done() for task in tasks):
        most = max(most, len(await count() - others))
        await asyncio.sleep(0.5)
    await asyncio.gather(*tasks)
    assert len(served) == number
    assert served == sorted(set(served)), "in the order of their tokens"
    # A pool may have opened some of them before.
    pooled = "pool" in connections.settings["default"].get("OPTIONS", {})
    assert (0 if pooled else 2) <= most <= 3


def sessions():
    """Return the ids of the sessions on the database, without the current one."""
    try:
        return jobs.other_sessions()
    finally:
        connection.close()


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


@pytest.mark.front
def test_a_task_of_a_closed_loop_blocks_no_waiter(in_queue, in_other_thread, until):
    """A caller runs a loop until one result is there and ignores other tasks."""
    left: list[weakref.ref[asyncio.Task[Any]]] = []

    def waiting():
        in_queue(1)
        connections.close_all()

    def leave_one_waiting():
        loop = asyncio.new_event_loop()
        # Otherwise Python reports the task when it is collected.
        loop.set_exception_handler(lambda *_: None)
        waits = loop.create_task(db_lock("stock:7", timeout=None).aacquire())
        loop.run_until_complete(asyncio.to_thread(waiting))
        # Close the connection of Django's thread, which ends with the loop.
        loop.run_until_complete(sync_to_async(connections.close_all)())
        loop.close()
        left.append(weakref.ref(waits))

    with db_lock("stock:7"):
        in_other_thread(leave_one_waiting)
        in_queue(0)
    # The task is removed from memory too. It cannot await anything then, which is no
    # error.
    until(lambda: gc.collect() is not None and left[0]() is None)
    began = time.monotonic()
    with db_lock("stock:7", timeout=10):
        in_time(time.monotonic() - began, 1.0)
