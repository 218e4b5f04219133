"""The rules of the queue that only internal names reach: numbers, late replies."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest
from django.db import connection, transaction

from dlocks import LockTimeout, db_lock
from tests import jobs
from tests.for_each import for_each
from tests.internals import (
    Acquisition,
    Attempt,
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
    keeper,
    queue,
    waiters_of,
)

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("no_claim_left"),
]


def claim(key="stock:7", **options):
    return Claim(key=key, **{"ttl": 30.0, "holder": "line", **options})


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


@pytest.mark.engine("postgresql", "mariadb", "mysql")
def test_a_share_is_kept_if_its_claim_is_queued_again(workers):
    """The reply to the claim was lost, it was granted, and the row is locked now."""
    (other,), backend = workers(1), backends["default"]
    writer, reader = claim(), claim(shared=True)
    assert backend.acquire(writer)
    assert backend.enqueue(reader).position
    assert backend.release(writer)
    other.start(jobs.lock_row, "stock:7")
    assert other.hear() == "locked"
    assert backend.enqueue(reader).grant
    other.tell()
    assert other.hear() == "unlocked"
    assert backend.verify([reader], 1)
    assert backend.release(reader)


@pytest.mark.front
def test_a_grant_that_was_read_too_late_gives_no_hold():
    """The caller was paused after its turn had come, until its lease had ended."""
    waiter = Waiter(claim(ttl=30), lambda: None)
    (attempt,) = Acquisition(
        db_lock("stock:7"), threading.current_thread(), ThreadWakeup()
    ).attempts
    assert waiter.apply(Ticket(grant=Grant(17, 1.5)), clock.now() - 2.0)
    assert not attempt._accept_notified(waiter.claim, waiter)
    assert not attempt.is_granted
    assert not keeper.holds


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


@pytest.mark.engine("postgresql", "sqlite")
@pytest.mark.parametrize("late", ["poll", "enqueue"])
def test_a_late_poll_does_not_queue_a_claim_again(late, in_queue, threads, monkeypatch):
    """A caller times out while a request for its claim has no reply yet.

    The background thread polls, or returns a claim that was deleted to the queue.
    """
    backend, apply = backends["default"], Waiters._apply
    request = getattr(backend, late)
    hangs, go_on, is_applied = (threading.Event() for _ in range(3))

    def hang(*arguments, **options):
        if threading.current_thread().name == "dlocks-waiting":
            hangs.set()
            assert go_on.wait(60)
        return request(*arguments, **options)

    def note(waiters, *arguments, **options):
        ahead = apply(waiters, *arguments, **options)
        if go_on.is_set():
            is_applied.set()
        return ahead

    monkeypatch.setattr(backend, late, hang)
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


@pytest.mark.front
def test_a_key_is_tried_before_it_is_reported_as_busy(monkeypatch):
    """The key was contended a moment ago, so the caller queues at once.

    Its timeout passes before it has queued. It still tries to acquire the key.
    """
    backends["default"].contended.add("stock:7")
    should_queue, hints = Attempt._should_queue, []

    def slow(self, claim):
        hints.append(should_queue(self, claim))
        time.sleep(0.25 if hints[-1] else 0.0)
        return hints[-1]

    monkeypatch.setattr(Attempt, "_should_queue", slow)
    with db_lock("stock:7", timeout=0.2) as hold:
        assert hold.waited >= 0.2
    assert hints == [True, False]


@pytest.mark.engine("postgresql", "mariadb")
def test_a_claim_cancelled_just_before_its_grant_is_skipped(
    monkeypatch, in_other_thread, is_busy
):
    """A step has read the claim, which leaves the queue without locking the key."""
    backend = backends["default"]
    mine, lock = claim(), backend.store._lock

    def leaves(*args, **kwargs):
        locked = lock(*args, **kwargs)
        monkeypatch.setattr(backend.store, "_lock", lock)
        assert in_other_thread(backend.release, mine, failed=True) is False
        return locked

    hold = db_lock("stock:7").acquire()
    assert backend.enqueue(mine).position
    monkeypatch.setattr(backend.queue, "hand_over", lambda *args: None)
    monkeypatch.setattr(backend.store, "_lock", leaves)
    hold.release()
    monkeypatch.undo()
    assert not is_busy()


@pytest.mark.engine("mariadb", "mysql")
def test_a_claim_granted_while_it_queues_is_not_queued_again(
    monkeypatch, threads, in_queue
):
    backend = backends["default"]
    text = queue.JOIN["mysql"]
    pause = " COMMIT; DO GET_LOCK('test', 30); DO RELEASE_LOCK('test'); SELECT"
    paused = text.replace(" COMMIT; SELECT", pause)
    assert paused != text
    monkeypatch.setitem(queue.JOIN, "mysql", paused)
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
    ticket = waiting.results[0]
    assert ticket.must_retry or ticket.grant
    assert not LockClaim.objects.exists()
    assert backend.acquire(waits)
    assert backend.release(waits)


@pytest.mark.engine("mariadb", "mysql")
def test_a_handover_beside_a_heartbeat_fails_no_statement(
    threads, in_queue, monkeypatch
):
    """It would keep the key locked until the process rolls it back."""
    backend, outcomes = backends["default"], []
    hold = db_lock("stock:7").acquire()
    waiting = threads(lambda: jobs.token_of(db_lock("stock:7", timeout=30)))
    in_queue(1)
    packet = backend.session.packet
    beat, over = threading.Event(), threading.Event()

    def watch(*args, **options):
        outcome = "failed"
        try:
            result = packet(*args, **options)
            outcome = "executed"
        finally:
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
    monkeypatch.setattr(backend.session, "packet", watch)
    hold.release()
    other.join(30)
    waiting.join(30)
    assert set(outcomes) == {"executed"}
    assert waiting.results[0] > hold.token


@pytest.mark.engine("postgresql", "mariadb", "mysql")
@for_each("using", ["default", "optimistic", "insert"])
@for_each("row", ["unlocked", "deleted"])
def test_a_claim_that_asks_for_a_free_key_leaves_the_queue(using, row, in_queue):
    """It joined while the row was locked, so the row does not count it."""
    backend, mine = backends[using], claim(owner="mine")
    jobs.token_of(db_lock("stock:7"))
    with transaction.atomic():
        rows = ResourceLock.objects.select_for_update().filter(pk="stock:7")
        assert rows.get()
        assert keeper.run(lambda: backend.enqueue(mine)).ahead == 0
        in_queue(1)
        if row == "deleted":
            rows.delete()
    assert backend.acquire(replace(mine, queued=True))
    assert not LockClaim.objects.exists()
    assert backend.release(mine)


@pytest.mark.engine("postgresql", "mariadb", "mysql")
@for_each("moment", [2, 3])
def test_a_claim_that_is_granted_while_it_is_cancelled_is_released(
    moment, workers, monkeypatch
):
    """Its key's row is locked when it is cancelled, so the cancellation looks at rows.

    Between two of its looks the holder hands the key over to it.
    """
    (other,), backend = workers(1), backends["default"]
    holder, waiting = claim(), claim()
    assert backend.acquire(holder)
    assert backend.enqueue(waiting).position
    other.start(jobs.lock_row, "stock:7")
    assert other.hear() == "locked"
    looks = []

    def hand_over_before(usual):
        def look(*args, **options):
            looks.append(usual)
            if len(looks) == moment:
                other.tell()
                assert other.hear() == "unlocked"
                assert backend.release(holder)
            return usual(*args, **options)

        return look

    with monkeypatch.context() as patch:
        for part, name in (
            (backend.queue, "row_of"),
            (backend.queue, "delete"),
            (backend.store, "peek"),
        ):
            patch.setattr(part, name, hand_over_before(getattr(part, name)))
        backend.release(waiting, failed=True)
    if len(looks) < moment:
        other.tell()
        assert other.hear() == "unlocked"
        assert backend.release(holder)
    successor = claim()
    assert backend.acquire(successor)
    assert backend.release(successor)


@pytest.mark.engine("mariadb", "mysql")
@for_each("level", ["REPEATABLE READ", "READ COMMITTED"])
def test_a_release_by_force_admits_no_writer_beside_a_later_reader(
    level, in_other_thread
):
    """The transaction of the operator's request may not show that reader."""
    backend = backends["default"]
    first, writer = claim(shared=True), claim()
    later = claim(shared=True, fair=False)
    token = backend.acquire(first).token
    assert backend.enqueue(writer).position
    with jobs.isolated(level), transaction.atomic():
        assert LockClaim.objects.count() == 2
        assert in_other_thread(backend.acquire, later)
        ended = backend.maintenance.end_share("stock:7", token)
    assert ended == (level == "READ COMMITTED")
    assert backend.renew([later])
    assert not backend.poll([writer])[writer.owner].grant
    assert backend.release(first) == (not ended)
    assert backend.release(later)
    assert backend.poll([writer])[writer.owner].grant
    assert backend.release(writer)
