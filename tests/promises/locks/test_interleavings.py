"""Interleavings in which a lock once broke its promises."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest
from django.db import connection, transaction

from dlocks import LockLost, db_lock
from tests import jobs
from tests.for_each import FAMILY, for_each
from tests.promises.locks.keys import await_renewal, queued
from tests.timing import in_time
from tests.volume import volume

pytest_plugins = ["tests.promises.stops"]
pytestmark = [
    pytest.mark.driver,
    pytest.mark.django_db(transaction=True),
]

SERVERS = pytest.mark.engine("postgresql", "mariadb")


@SERVERS
@FAMILY
def test_waiters_in_transactions_do_not_lock_the_holders_row(using, workers):
    """It can meet the row just when another caller acquires it."""
    crowd, policy = workers(6), {"using": using, "seconds": volume(5) / 10}
    for holder, waiter in zip(crowd[::2], crowd[1::2], strict=True):
        holder.start(jobs.hold_and_time_releases, "stock:7", **policy)
        waiter.start(jobs.wait_in_transactions, "stock:7", timeout=0.05, **policy)
    in_time(max(worker.hear() or 0 for worker in crowd), 2.0)


@SERVERS
def test_an_inner_rollback_does_not_release_an_exited_lease(is_busy):
    with transaction.atomic():
        with db_lock("stock:7", scope="lease", ttl=1.5) as hold:
            pass
        with contextlib.suppress(ZeroDivisionError), transaction.atomic():
            1 / 0  # noqa: B018
        # The background thread has looked at the hold, which it renews.
        await_renewal(hold)
        assert is_busy()
        assert hold.held
    assert not is_busy()


@pytest.mark.engine("postgresql", "mariadb", "mysql")
@FAMILY
def test_a_lost_holder_does_not_wait_for_its_successor(using, worker, until):
    """The successor has taken the key over in a transaction that goes on."""
    hold = db_lock("stock:7", using=using, ttl=0.2, renew=False).acquire()
    until(lambda: not hold.held)
    policy = {"using": using, "timeout": 20}
    with worker.doing(jobs.hold_in_transaction, "stock:7", **policy):
        started = time.monotonic()
        with pytest.raises(LockLost):
            hold.release()
        took = time.monotonic() - started
        assert not worker.pipe.poll()
    in_time(took, 5)


@SERVERS
def test_deleting_a_row_after_the_commit_does_not_wait(worker):
    """The key has a successor already, which holds it in a transaction."""
    holding = worker.doing(jobs.hold_in_transaction, "stock:7", using="insert")
    with contextlib.ExitStack() as stack:
        with transaction.atomic():
            transaction.on_commit(lambda: stack.enter_context(holding))
            with db_lock("stock:7", using="insert"):
                pass
        assert not worker.pipe.poll()


@SERVERS
def test_releasing_a_lost_hold_in_a_transaction_does_not_block(
    in_other_thread, threads
):
    """The keeper must not wait for a row that its own caller has locked."""
    hold = in_other_thread(db_lock("stock:7", ttl=0.2, renew=False).acquire)

    def work():
        with transaction.atomic(), db_lock("stock:7", timeout=20):
            with contextlib.suppress(LockLost):
                hold.release()
            return True

    thread = threads(work)
    thread.join(40)
    assert thread.results == [True]


@pytest.mark.engine("postgresql")
def test_a_lease_taken_first_in_a_transaction_takes_no_snapshot():
    with (
        transaction.atomic(),
        db_lock("stock:7", scope="lease"),
        connection.cursor() as cursor,
    ):
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")


@pytest.mark.front
def test_two_aliases_on_one_database_are_one_lock_to_a_caller():
    for block in (contextlib.nullcontext, transaction.atomic):
        with (
            block(),
            db_lock("stock:7") as hold,
            db_lock("stock:7", using="optimistic") as inner,
        ):
            assert inner is hold
            assert hold.count == 2


@pytest.mark.front
@for_each("using", ["default", "memory"])
def test_reentrant_false_allows_consecutive_holds(using):
    lock = db_lock("stock:7", using=using, reentrant=False)
    with transaction.atomic():
        for _ in range(2):
            with lock:
                pass


@FAMILY
def test_an_unrenewed_lease_has_its_whole_ttl_after_a_wait(using, worker, until):
    """It is not limited to the short lease that a release grants to a waiter."""
    policy = {"using": using, "ttl": 20, "renew": False, "timeout": 30}
    with db_lock("stock:7", using=using) as first:
        worker.start(jobs.hold, "stock:7", **policy)
        until(queued("stock:7").exists)
    assert worker.hear() > first.token
    assert 15 < db_lock("stock:7", using=using).holder().remaining <= 20
    worker.go_on()


@pytest.mark.engine("postgresql")
async def test_a_waiter_that_misses_its_turn_does_not_hold_the_key(
    stops, workers, in_other_thread, until
):
    """The process is notified, and pauses until another process holds the key."""
    first, second = workers(2)
    going, waiting = threading.Event(), queued("stock:7")

    def poll_in_time(usual, *_):
        going.wait(30)
        return usual()

    going.set()
    stops.replace("poll", poll_in_time)
    with first.doing(jobs.hold, "stock:7"):
        task = asyncio.ensure_future(db_lock("stock:7", timeout=30).aacquire())
        while not in_other_thread(waiting.count):
            await asyncio.sleep(0.01)
        second.start(jobs.hold, "stock:7", timeout=30)
        until(lambda: in_other_thread(waiting.count) == 2)
        # From here on the event loop is blocked. The thread that polls has been
        # notified and is paused.
        going.clear()
    token = second.hear()
    going.set()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.5):
            await asyncio.shield(task)
    assert not task.done(), "two callers hold the key"
    # When the process continues, it gets its position back.
    while not in_other_thread(waiting.count):
        await asyncio.sleep(0.01)
    second.go_on()
    hold = await task
    assert hold.token > token
    await hold.arelease()


# Renewals.


@pytest.mark.front
def test_a_slow_on_lost_callback_does_not_delay_other_renewals():
    entered, leave = threading.Event(), threading.Event()

    def slow(hold):
        entered.set()
        leave.wait(30)

    policy = {"using": "memory", "ttl": 0.2, "renew": False}
    first = db_lock("first", on_lost=slow, **policy).acquire()
    with db_lock("second", using="memory", ttl=3) as second:
        assert entered.wait(10)
        await_renewal(second)
        await_renewal(second)
        leave.set()
    assert not first.held


@pytest.mark.front
def test_an_error_of_one_backend_does_not_stop_other_renewals(stops, until):
    tries = []

    def fail(usual, claims):
        tries.append(claims)
        raise ZeroDivisionError

    stops.replace("renew", fail, "optimistic")
    with db_lock("second", using="memory", ttl=3) as second, pytest.raises(LockLost):
        with db_lock("first", using="optimistic", ttl=1.0) as first:
            until(lambda: not first.held)
            await_renewal(second)
            second.check()
    assert len(tries) < 20
