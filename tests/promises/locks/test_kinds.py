"""Read-write locks and semaphores, whose keys have several holders."""

import dataclasses
import re
from contextlib import ExitStack, suppress
from datetime import timedelta

import pytest
from django.db import connection, transaction

from dlocks import (
    LockLost,
    LockNotAwaitable,
    LockTimeout,
    db_lock,
    db_rwlock,
    db_semaphore,
)
from dlocks.models import LockClaim, ResourceLock
from dlocks.testing import expire
from tests import jobs
from tests.for_each import for_each
from tests.promises.locks.keys import queued
from tests.settings import ENGINE
from tests.sync_and_async import sync_and_async

pytest_plugins = ["tests.promises.stops"]
pytestmark = [pytest.mark.driver, pytest.mark.django_db(transaction=True)]


# MySQL has the driver of MariaDB, and shares are the same for these backends.
OTHERS = [] if ENGINE == "mysql" else ["optimistic", "insert"]
FAMILY = for_each("using", ["default", *OTHERS])


@pytest.fixture
def attempt(in_other_thread):
    """Return a function that acquires as another caller does, and releases.

    It returns the token, or None if the key is held.
    """

    def ask(lock):
        hold = lock.try_acquire()
        if hold is not None:
            hold.release()
        return hold and hold.token

    return lambda lock: in_other_thread(ask, lock)


@pytest.mark.front
def test_a_read_write_lock_needs_read_or_write():
    message = r"{}db_rwlock\(key\)\.read\(\).* or '{}db_rwlock\(key\)\.write\(\)"
    with (
        pytest.raises(TypeError, match=message.format("with ", "with ")),
        db_rwlock("catalogue"),
    ):
        pytest.fail("the block was entered")
    with pytest.raises(TypeError, match=message.format("@", "@")):
        db_rwlock("catalogue")(print)


@pytest.mark.front
def test_a_reader_cannot_become_a_writer():
    """Two readers that wait for each other's end would never become writers."""
    lock = db_rwlock("catalogue")
    with lock.read():
        with pytest.raises(
            RuntimeError, match="read lock on 'catalogue' cannot be upgraded to a write"
        ):
            lock.write().acquire()
    with lock.write():
        pass


@FAMILY
def test_a_writer_may_read_and_downgrade(using, attempt):
    lock = db_rwlock("catalogue", using=using, timeout=0)
    writing = lock.write().acquire()
    reading = lock.read().acquire()
    assert reading.token > writing.token
    assert attempt(lock.read()) is None
    writing.release()
    reading.check()
    assert attempt(lock.read())
    assert attempt(lock.write()) is None
    reading.release()
    assert attempt(lock.write())


@pytest.mark.storage
def test_a_writer_may_read_after_its_row_was_locked(worker, stops):
    """Another transaction has locked the row of the key for a while."""
    replies, row_locked = [], ExitStack()

    def unlock_after_a_reply(usual, *_):
        replies.append(usual())
        row_locked.close()
        return replies[-1]

    lock = db_rwlock("catalogue", timeout=30)
    with lock.write() as writing, row_locked:
        row_locked.enter_context(worker.doing(jobs.lock_row, "catalogue"))
        with stops.replace("acquire", unlock_after_a_reply), lock.read() as reading:
            assert reading.token > writing.token
    assert replies[0] is None, "the row was not locked"


@pytest.mark.engine("postgresql", "mariadb", "mysql")
def test_a_writer_reads_before_its_guarded_transaction_and_not_in_it():
    """The transaction keeps the row, and a read lock would wait for its end."""
    lock = db_rwlock("catalogue", timeout=30)
    with lock.write() as writing, writing.atomic():
        with pytest.raises(
            RuntimeError, match="is kept by the transaction of this thread until it"
        ):
            lock.read().acquire()
    with lock.write() as writing, lock.read() as reading, writing.atomic():
        with lock.read() as again:
            assert again is reading


def test_readers_queue_behind_a_waiting_writer(workers, until):
    writer, reader = workers(2)
    lock = db_rwlock("catalogue")
    mine = lock.read().acquire()
    writer.start(jobs.hold, "catalogue")
    until(lambda: mine.queue_length() == 1)
    assert db_rwlock("catalogue", timeout=0).read().try_acquire() is mine, (
        "its own reader enters again"
    )
    mine.release()
    reader.start(jobs.wait_quietly, "catalogue", shared=True)
    until(lambda: mine.queue_length() == 2)
    mine.release()
    written = writer.hear()
    assert not reader.pipe.poll(0.3)
    writer.go_on()
    assert reader.hear()[1] > written


def message_of(error):
    """Return the message of a LockTimeout without times and addresses."""
    return re.sub(
        r" \([^()]*\) for [\d.]+ s, \d+ s left on its lease",
        "",
        str(error).split(": ", 1)[1],
    )


@sync_and_async
async def test_a_full_semaphore_names_all_of_its_holders(
    do, in_other_thread, threads, until
):
    """One of them is the caller itself. The waiters are counted."""
    lock = db_semaphore("api", permits=2, reentrant=False, timeout=0)
    mine = await do.ask(lock, "acquire")
    first = (await do.ask(lock, "holder")).holder
    other = in_other_thread(lock.acquire)
    shares = LockClaim.objects.filter(version=other.token)
    second = (await do.sync(shares.get)).holder
    names = f"{first} and {second}"
    waiting = []

    def use_later():
        with dataclasses.replace(lock, timeout=30):
            pass

    for number, phrase in enumerate(
        ("", "; 1 caller is waiting", "; 2 callers are waiting")
    ):
        if number:
            waiting.append(threads(use_later))
        await do.sync(until, lambda number=number: queued("api").count() == number)
        for timeout in (0, 0.1):
            with pytest.raises(LockTimeout) as full:
                await do.ask(dataclasses.replace(lock, timeout=timeout), "acquire")
            assert (
                message_of(full.value) == f"all 2 permits are held by {names}{phrase}"
            )
            assert full.value.holder.holder == second
    await do.ask(mine, "release")
    in_other_thread(other.release)
    for thread in waiting:
        thread.join(30)


@pytest.mark.front
def test_a_full_semaphore_names_at_most_ten_holders(in_other_thread, settings):
    """``DLOCKS_SHOW_HOLDER`` applies to every holder."""
    lock = db_semaphore("api", permits=1, timeout=0)
    with lock:
        me = lock.holder().holder
        with pytest.raises(
            LockTimeout, match=rf": the only permit is held by {re.escape(me)}"
        ):
            in_other_thread(lock.acquire)
        settings.DLOCKS_SHOW_HOLDER = False
        with pytest.raises(LockTimeout, match="held by a hidden holder for") as full:
            in_other_thread(lock.acquire)
        assert me not in str(full.value)
    settings.DLOCKS_SHOW_HOLDER = True
    many = [
        db_semaphore("api", permits=12, reentrant=False).acquire() for _ in range(12)
    ]
    with pytest.raises(
        LockTimeout, match=r": all 12 permits are held by .* and 2 more$"
    ) as full:
        in_other_thread(db_semaphore("api", permits=12, timeout=0).acquire)
    assert str(full.value).count(me) == 10
    for hold in many:
        hold.release()


@pytest.mark.engine("sqlite")
def test_a_full_semaphore_in_a_transaction_names_its_holders(in_other_thread):
    """On SQLite the error is the same inside a transaction, without a wait."""
    lock = db_semaphore("api", permits=2)
    holds = [in_other_thread(lock.acquire) for _ in range(2)]
    with (
        transaction.atomic(),
        pytest.raises(
            LockNotAwaitable,
            match="inside a transaction: all 2 permits are held by .* and ",
        ),
    ):
        lock.acquire()
    for hold in holds:
        in_other_thread(hold.release)


@pytest.mark.parametrize("ends_by", ["commit", "rollback"])
def test_a_share_that_outlives_its_transaction_is_free(ends_by, in_other_thread):
    """Its caller leaves a permit or a read lock after the transaction, or never."""
    for lock in db_semaphore("api", 1), db_rwlock("page").read():
        with transaction.atomic():
            hold = lock.acquire()
            transaction.set_rollback(ends_by == "rollback")
        hold.release()
        writer = db_lock(lock.key, timeout=0)
        in_other_thread(writer.acquire).release()


def test_changed_permits_bind_new_holders_at_once(in_other_thread):
    """Permits are a number above zero, and each call of one key may name another."""

    def permits(number):
        return db_semaphore("api", permits=number, timeout=0, reentrant=False)

    holds = [permits(3).acquire() for _ in range(3)]
    assert permits(2).try_acquire() is None
    holds.pop().release()
    assert permits(2).try_acquire() is None
    for hold in [*holds, permits(4).acquire()]:
        hold.release()
    with db_lock("api"):
        me = db_lock("api").holder().holder
        with pytest.raises(LockTimeout, match=f": held by {re.escape(me)}"):
            in_other_thread(permits(2).acquire)
    for wrong in (0, -1, True, 2.5, "3", 2**31):
        with pytest.raises((ValueError, TypeError)):
            permits(wrong)


def test_reentering_takes_no_further_permit(in_other_thread):
    """A permit can be entered again next to another one of the same caller."""
    mine = db_semaphore("api", permits=2, timeout=0)
    another = db_semaphore("api", permits=2, timeout=0, reentrant=False)
    with mine as hold, mine as again:
        assert again is hold
        assert hold.count == 2
        assert ResourceLock.objects.get(pk="api").shares == 1
        with another as second:
            assert second is not hold
            with mine as again:
                assert again is hold
        other = in_other_thread(mine.acquire)
        with mine as again:
            assert again is hold
        other.release()
    with another, mine as hold, mine as again:
        assert again is hold
    with another as first, another as second:
        assert first is not second
        assert another.try_acquire() is None


@for_each("using", ["default", "memory"])
def test_the_holder_of_the_key_gets_no_more_permits_than_allowed(using, attempt):
    """It keeps them when it releases the key, as a writer keeps its read lock."""
    options = {"using": using, "timeout": 0, "reentrant": False}
    permit = db_semaphore("api", permits=2, **options)
    alone = db_lock("api", using=using).acquire()
    holds = [permit.acquire(), permit.acquire()]
    with pytest.raises(LockTimeout, match="all 2 permits are held by"):
        permit.acquire()
    alone.release()
    assert attempt(permit) is None
    holds.pop().release()
    assert attempt(permit)
    holds.pop().release()


@for_each("using", ["default", "memory"])
def test_an_expired_reader_excludes_for_the_grace(using, settings, attempt):
    """A writer waits for the grace of a shared hold, as for that of any other."""
    before = settings.DLOCKS
    for hours, is_free in ((2, False), (0.5, True)):
        options = {"OPTIONS": {"grace": timedelta(hours=hours)}}
        settings.DLOCKS = {**before, using: {**before[using], **options}}
        lock = db_rwlock(f"catalogue:{hours}", using=using)
        reader = lock.read().acquire()
        # An hour ago.
        expire(reader)
        assert (attempt(lock.write()) is not None) == is_free, hours
        with suppress(LockLost):
            reader.release()
    settings.DLOCKS = before


@for_each("using", ["default", "watching", "memory"])
def test_a_released_permit_is_kept_for_its_min_hold_and_no_longer(
    using, settings, attempt, in_other_thread
):
    """The grace is for a holder that is gone, and not for one that has released."""
    before = settings.DLOCKS
    options = {**before[using].get("OPTIONS", {}), "grace": timedelta(hours=1)}
    settings.DLOCKS = {**before, using: {**before[using], "OPTIONS": options}}
    permit = db_semaphore(f"api:{using}", 1, using=using, min_hold=timedelta(hours=1))
    permit.acquire().release()
    assert attempt(permit) is None
    db_semaphore(f"mail:{using}", 1, using=using, min_hold=0.2).acquire().release()
    permit = db_semaphore(f"mail:{using}", 1, using=using, timeout=10)
    in_other_thread(lambda: permit.acquire().release())
    settings.DLOCKS = before


def test_a_shared_hold_in_a_transaction_lasts_until_its_end(in_other_thread, until):
    """On SQLite it belongs to its transaction."""
    lock = db_rwlock("catalogue", timeout=0)
    if connection.vendor == "sqlite":
        with transaction.atomic(), lock.read() as hold:
            assert hold.scope == "transaction"
        in_other_thread(lambda: lock.write().acquire().release())
        return
    with transaction.atomic():
        with lock.read():
            pass
        assert in_other_thread(lock.write().try_acquire) is None
    until(
        lambda: (
            (hold := in_other_thread(lock.write().try_acquire))
            and (in_other_thread(hold.release) or True)
        )
    )
