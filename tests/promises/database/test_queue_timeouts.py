"""Waits that end while a request of theirs is on its way.

The server answers late, or not at all. No claim is left behind, and no grant is lost.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from functools import partial

import pytest
from django.db import transaction

from dlocks import LockTimeout, db_lock, db_semaphore
from dlocks.models import LockClaim
from dlocks.values import Ticket
from tests import jobs, rows
from tests.for_each import ROWS, for_each
from tests.models import Counter
from tests.settings import ENGINE
from tests.timing import in_time
from tests.volume import volume

pytest_plugins = ["tests.promises.stops"]
pytestmark = [
    pytest.mark.driver,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("no_claim_left"),
]

TWO_SERVERS = pytest.mark.engine("postgresql", "mariadb")


def test_a_claim_that_times_out_leaves_the_queue(in_other_thread):
    def wait(scope):
        block = transaction.atomic() if scope == "transaction" else db_lock("other")
        with block, pytest.raises(LockTimeout, match="held by"):
            db_lock("stock:7", timeout=0.3, scope=scope).acquire()

    for scope in ("lease",) if ENGINE == "sqlite" else ("lease", "transaction"):
        with db_lock("stock:7") as hold:
            in_other_thread(wait, scope)
            assert hold.queue_length() == 0
            assert not LockClaim.objects.exists()


@TWO_SERVERS
@for_each(
    "case", [*itertools.product(("lease", "transaction"), ("enqueue", "acquire"))]
)
def test_a_claim_that_is_granted_while_it_queues_leaves_the_queue(
    case, stops, threads, workers
):
    """Others may lock the row while the caller queues or acquires."""
    (scope, locked), (other, holder) = case, workers(2)
    queued = []

    def row_locked(condition):
        held = other.doing(jobs.lock_row, "stock:7")
        return held if condition else contextlib.nullcontext()

    def enqueue(usual, *_):
        with row_locked(locked == "enqueue"):
            ticket = usual()
        queued.append(ticket)
        holder.call(jobs.release_all)
        return ticket

    def acquire(usual, *_):
        is_next = locked == "acquire" and len(queued) == 1
        if is_next:
            queued.append(None)
        with row_locked(is_next):
            return usual()

    def wait():
        block = transaction.atomic() if scope == "transaction" else db_lock("other")
        with block, db_lock("stock:7", timeout=30, scope=scope):
            return LockClaim.objects.filter(key_resource="stock:7").count()

    assert holder.call(jobs.acquire, "stock:7")
    stops.replace("enqueue", enqueue)
    stops.replace("acquire", acquire)
    thread = threads(wait)
    thread.join(60)
    assert thread.results == [0]
    assert queued


@TWO_SERVERS
def test_a_key_acquired_at_the_timeout_leaves_no_claim(stops, threads, in_queue):
    """Otherwise its release would hand the key to an abandoned claim."""
    ended = threading.Event()

    def wait():
        with db_lock("stock:7", timeout=2) as hold:
            return hold.queue_length()

    def poll(usual, claims):
        if is_background():
            # The turn of the claim has not come yet.
            return {claim.owner: Ticket(ahead=1) for claim in claims}
        # This is the last poll, at the timeout. Nothing else has sent a heartbeat.
        assert ended.wait(60)
        return usual(heartbeat=True)

    stops.replace("poll", poll)
    with transaction.atomic():
        db_lock("stock:7").acquire()
        thread = threads(wait)
        in_queue(1)
        transaction.set_rollback(True)
    ended.set()
    thread.join(60)
    assert thread.results == [0]
    with db_lock("stock:7", timeout=0):
        pass


def is_background():
    """Return whether a thread of dlocks polls here, instead of the caller itself."""
    return threading.current_thread().name.startswith("dlocks")


@pytest.fixture
def hang(stops):
    """Return a function that makes the background thread hang in a method.

    It hangs after the request, as for a reply that does not arrive. The result of the
    function is an event that the thread sets.
    """
    hangs, go_on = threading.Event(), threading.Event()

    def call(usual, *_):
        answer = usual()
        if is_background():
            hangs.set()
            assert go_on.wait(60)
        return answer

    def hang(name):
        stops.replace(name, call)
        return hangs

    yield hang
    go_on.set()


@pytest.mark.engine("postgresql")
def test_a_free_key_is_acquired_although_a_poll_hangs(in_queue, threads, hang):
    """It sends no heartbeats, so a waiter is skipped, and deleted later."""
    hangs = hang("poll")
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
def test_a_wait_ends_although_a_return_to_the_queue_hangs(in_queue, threads, hang):
    """The claim was deleted, as that of a process that was stopped for a while."""
    hangs = hang("enqueue")
    with db_lock("stock:7"):
        waits = threads(db_lock("stock:7", timeout=3).acquire)
        in_queue(1)
        LockClaim.objects.all().delete()
        assert hangs.wait(30)
        with pytest.raises(LockTimeout):
            waits.join(15)
    LockClaim.objects.all().delete()


@TWO_SERVERS
def test_an_interrupted_grant_is_released_in_its_transaction(worker, stops):
    """A release outside the transaction would wait for the transaction's end."""
    assert worker.call(jobs.acquire, "stock:7")

    def acquire(usual, *_):
        if usual() is not None:
            raise KeyboardInterrupt

    stops.call("enqueue", lambda: worker.call(jobs.release_all))
    stops.replace("acquire", acquire)
    with transaction.atomic():
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            db_lock("stock:7", timeout=30, scope="transaction").acquire()
        taken = time.monotonic() - began
        kept_by = db_lock("stock:7").holder()
        # PostgreSQL shows that this transaction still has the row.
        assert kept_by is None or kept_by.in_transaction
    in_time(taken, 2.0)


@pytest.mark.engine("postgresql", "mariadb", "mysql")
def test_a_timeout_behind_a_transaction_is_not_granted_later(worker):
    """A poll that waited for the row still sees the claim in the queue."""
    with db_lock("stock:7"):
        pass
    for using in ROWS * volume(1):
        with worker.doing(jobs.hold_in_transaction, "stock:7", using=using):
            with pytest.raises(LockTimeout):
                db_lock("stock:7", using=using, timeout=0.25).acquire()
        with db_lock("stock:7", using=using) as hold:
            in_time(hold.waited, 1.5)
        assert not LockClaim.objects.exists()


# SQLite's single writer.


@pytest.mark.engine("sqlite")
@for_each("using", ["default", "optimistic", "insert"])
def test_a_transaction_that_writes_may_hold_any_key_on_sqlite(
    using, in_other_thread, threads
):
    """Others cannot see which keys it has acquired, nor whether they exist."""
    began, wrote, acquired = threading.Event(), threading.Event(), []
    lock = db_lock(using, using=using)

    def wait():
        began.set()
        with db_lock(using, using=using, timeout=60):
            acquired.append(wrote.is_set())

    with transaction.atomic():
        Counter.objects.create(name=using)
        assert in_other_thread(lock.try_acquire) is None
        with pytest.raises(LockTimeout, match="held by an open transaction"):
            in_other_thread(db_lock(using, using=using, timeout=0).acquire)
        waiter = threads(wait)
        assert began.wait(60)
        wrote.set()
    waiter.join(60)
    assert acquired == [True]
    with lock:
        pass


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
            Counter.objects.create(name="other")
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
        return hold.queue_length(), db_lock(hold.key).holder()

    failing = [threads(partial(fail, lock)) for lock in cases]
    taken.wait(60)
    with transaction.atomic():
        Counter.objects.create(name="other")
        begun.set()
        # This is longer than a waiter that times out would wait.
        time.sleep(1.5)
        assert all(thread.is_alive() for thread in failing)
    for thread in failing:
        thread.join(60)
        assert thread.results == [(0, None)]
