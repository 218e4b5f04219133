"""Read-write locks and semaphores, whose keys have several holders."""

import dataclasses
import re
import time

import pytest
from django.db import transaction

from dlocks import LockNotAwaitable, LockTimeout, db_lock, db_rwlock, db_semaphore
from tests import jobs
from tests.internals import (
    Claim,
    LockClaim,
    MemoryBackend,
    PessimisticBackend,
    ResourceLock,
    backends,
    helpers,
)
from tests.sync_and_async import sync_and_async
from tests.timing import in_time

pytestmark = pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"])


@pytest.fixture(params=["default", "optimistic", "insert"])
def using(request):
    return request.param


def test_several_callers_read_at_the_same_time(using, in_other_thread):
    lock = db_rwlock("catalogue", using=using, timeout=0)
    with lock.read() as mine:
        other = in_other_thread(lock.read().acquire)
        assert other.token > mine.token
        in_other_thread(other.release)


def test_readers_and_writers_exclude_each_other(using, in_other_thread):
    lock = db_rwlock("catalogue", using=using, timeout=0)
    with lock.read():
        assert in_other_thread(lock.write().try_acquire) is None
        assert (
            in_other_thread(db_lock("catalogue", using=using, timeout=0).try_acquire)
            is None
        )
    with lock.write() as mine:
        assert in_other_thread(lock.read().try_acquire) is None
        assert in_other_thread(lock.write().try_acquire) is None
    with lock.read() as later:
        assert later.token > mine.token


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
    with pytest.raises(
        TypeError,
        match=r"no option 'permits'\..* use db_semaphore\(key, permits\)\.$",
    ):
        db_rwlock("catalogue", permits=5)


def test_a_reader_cannot_become_a_writer(using):
    lock = db_rwlock("catalogue", using=using)
    with lock.read():
        with pytest.raises(
            RuntimeError, match="read lock on 'catalogue' cannot be upgraded to a write"
        ):
            lock.write().acquire()
    with lock.write():
        pass


def test_a_writer_may_read_and_downgrade(using, in_other_thread):
    lock = db_rwlock("catalogue", using=using, timeout=0)
    writing = lock.write().acquire()
    reading = lock.read().acquire()
    assert reading.token > writing.token
    assert in_other_thread(lock.read().try_acquire) is None
    writing.release()
    reading.check()
    other = in_other_thread(lock.read().acquire)
    assert in_other_thread(lock.write().try_acquire) is None
    in_other_thread(other.release)
    reading.release()
    assert in_other_thread(lambda: lock.write().try_acquire().release()) is None


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
    reader.start(jobs.wait_for, "catalogue", shared=True)
    assert reader.hear() == "waiting"
    until(lambda: mine.queue_length() == 2)
    mine.release()
    written = writer.hear()
    assert not reader.pipe.poll(0.3)
    writer.tell()
    assert writer.hear() == "released"
    assert reader.hear()[1] > written


def test_queued_readers_acquire_together(workers, until):
    readers = workers(3)
    with db_lock("catalogue") as mine:
        for number, reader in enumerate(readers, 1):
            reader.start(jobs.hold, "catalogue", shared=True)
            until(lambda number=number: mine.queue_length() == number)
    tokens = [reader.hear() for reader in readers]
    assert tokens == sorted(set(tokens))
    assert tokens[0] > mine.token
    for reader in readers:
        reader.tell()
        assert reader.hear() == "released"
    assert not LockClaim.objects.exists()


def test_a_semaphore_grants_no_more_than_its_permits(using, in_other_thread):
    lock = db_semaphore("api", permits=2, using=using, timeout=0)
    first, second = in_other_thread(lock.acquire), in_other_thread(lock.acquire)
    assert first.token < second.token
    with pytest.raises(LockTimeout):
        lock.acquire()
    in_other_thread(first.release)
    with lock as third:
        assert third.token > second.token
        assert in_other_thread(lock.try_acquire) is None
    in_other_thread(second.release)


def message_of(error):
    """Return the message of a LockTimeout without times and addresses."""
    return re.sub(
        r" \([^()]*\) for [\d.]+ s, \d+ s left on its lease",
        "",
        str(error).split(": ", 1)[1],
    )


@sync_and_async
async def test_a_full_semaphore_names_all_of_its_holders(
    do, using, in_other_thread, threads, until
):
    """LockTimeout names the holders of all permits and counts the waiters.

    This includes a permit of the caller itself.
    """
    lock = db_semaphore("api", permits=2, using=using, reentrant=False, timeout=0)
    mine, other = await do.ask(lock, "acquire"), in_other_thread(lock.acquire)
    names = f"{mine.claim.holder} and {other.claim.holder}"
    for timeout in (0, 0.1):
        with pytest.raises(LockTimeout) as full:
            await do.ask(dataclasses.replace(lock, timeout=timeout), "acquire")
        assert message_of(full.value) == f"all 2 permits are held by {names}"
        assert full.value.holder.holder == other.claim.holder
    waiting = []
    for number, phrase in ((1, "1 caller is waiting"), (2, "2 callers are waiting")):
        waiting.append(threads(dataclasses.replace(lock, timeout=30).acquire))
        await do.sync(
            until, lambda number=number: backends[using].waiting("api") == number
        )
        for timeout in (0, 0.1):
            with pytest.raises(LockTimeout) as full:
                await do.ask(dataclasses.replace(lock, timeout=timeout), "acquire")
            assert (
                message_of(full.value) == f"all 2 permits are held by {names}; {phrase}"
            )
    await do.ask(mine, "release")
    in_other_thread(other.release)
    for thread in waiting:
        thread.join(30)
        in_other_thread(thread.results[0].release)


@pytest.mark.front
def test_a_full_semaphore_names_at_most_ten_holders(in_other_thread):
    """The message for one permit says "only", and at most ten holders are named."""
    with db_semaphore("api", permits=1, timeout=0) as hold:
        with pytest.raises(
            LockTimeout,
            match=rf": the only permit is held by {re.escape(hold.claim.holder)}",
        ):
            in_other_thread(db_semaphore("api", permits=1, timeout=0).acquire)
    many = [
        db_semaphore("api", permits=12, reentrant=False).acquire() for _ in range(12)
    ]
    with pytest.raises(
        LockTimeout, match=r": all 12 permits are held by .* and 2 more$"
    ) as full:
        in_other_thread(db_semaphore("api", permits=12, timeout=0).acquire)
    assert str(full.value).count(many[0].claim.holder) == 10
    for hold in many:
        hold.release()


def test_a_semaphore_names_its_exclusive_holder(in_other_thread):
    """An exclusive holder is named as for any lock."""
    with db_lock("api") as hold:
        with pytest.raises(
            LockTimeout, match=f": held by {re.escape(hold.claim.holder)}"
        ):
            in_other_thread(db_semaphore("api", permits=2, timeout=0).acquire)


@pytest.mark.front
def test_a_hidden_holder_of_a_permit_is_not_named(in_other_thread, settings):
    """``DLOCKS_SHOW_HOLDER`` applies to every holder."""
    settings.DLOCKS_SHOW_HOLDER = False
    with db_semaphore("api", permits=1, timeout=0) as hold:
        with pytest.raises(LockTimeout, match="held by a hidden holder for") as full:
            in_other_thread(db_semaphore("api", permits=1, timeout=0).acquire)
        assert hold.claim.holder not in str(full.value)


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


@pytest.mark.front
def test_the_holders_of_permits_are_read_only_for_errors(monkeypatch):
    """The holders are read only for an error.

    A free permit costs no additional statement.
    """
    monkeypatch.setattr(
        backends["default"].inspector,
        "sharers",
        lambda *args: pytest.fail("read the holders"),
    )
    with (
        db_semaphore("api", permits=2),
        db_semaphore("api", permits=2, reentrant=False),
    ):
        pass


def test_changed_permits_bind_new_holders_at_once(in_other_thread):
    holds = [
        in_other_thread(db_semaphore("api", permits=3, timeout=0).acquire)
        for _ in range(3)
    ]
    assert (
        in_other_thread(db_semaphore("api", permits=2, timeout=0).try_acquire) is None
    )
    in_other_thread(holds.pop().release)
    assert (
        in_other_thread(db_semaphore("api", permits=2, timeout=0).try_acquire) is None
    )
    more = in_other_thread(db_semaphore("api", permits=4, timeout=0).acquire)
    for hold in [*holds, more]:
        in_other_thread(hold.release)


def test_reentering_takes_no_further_permit():
    lock = db_semaphore("api", permits=2, timeout=0)
    with lock as hold, lock as again:
        assert again is hold
        assert hold.count == 2
        assert ResourceLock.objects.get(pk="api").shares == 1
    one = db_semaphore("api", permits=2, timeout=0, reentrant=False)
    first, second = one.acquire(), one.acquire()
    assert first is not second
    assert one.try_acquire() is None
    first.release()
    second.release()


def test_a_permit_can_be_reentered_next_to_another_one(in_other_thread):
    mine, another = (
        db_semaphore("pool", 2, timeout=0),
        db_semaphore("pool", 2, timeout=0, reentrant=False),
    )
    with mine as hold:
        with another as second:
            assert second is not hold
            with mine as again:
                assert again is hold
        other = in_other_thread(db_semaphore("pool", 2, timeout=0).acquire)
        with mine as again:
            assert again is hold
        other.release()
    with another, mine as hold, mine as again:
        assert again is hold


@pytest.mark.front
def test_permits_must_be_a_number_above_zero():
    for wrong in (0, -1, True, 2.5, "3", 2**31):
        with pytest.raises((ValueError, TypeError)):
            db_semaphore("api", permits=wrong)


def test_a_permit_whose_holder_died_is_free_after_its_ttl(doomed, until):
    worker = doomed()
    worker.start(jobs.hold_permit, "api", permits=1, ttl=1.0)
    worker.hear()
    assert db_semaphore("api", permits=1, timeout=0).try_acquire() is None
    worker.kill()
    with db_semaphore("api", permits=1, timeout=15) as hold:
        in_time(hold.waited, 5)


@pytest.mark.parametrize("kind", [PessimisticBackend, MemoryBackend])
def test_an_expired_reader_excludes_for_the_grace(kind):
    """A writer waits for the grace of a shared hold, as for that of any other."""
    for hours, is_free in ((2, False), (0.5, True)):
        backend = kind("default", grace=hours * 3600)
        reader = Claim(key=f"catalogue:{hours}", ttl=30.0, shared=True)
        writer = Claim(key=reader.key, ttl=30.0)
        assert backend.acquire(reader)
        # An hour ago.
        helpers._end_lease(backend, reader)
        assert (backend.acquire(writer) is not None) == is_free
        backend.release(reader)
        backend.release(writer)


def test_a_permit_is_renewed(in_other_thread):
    lock = db_semaphore("api", permits=1, ttl=3, timeout=0)
    with lock as hold:
        time.sleep(4.5)
        hold.check()
        assert in_other_thread(lock.try_acquire) is None


@pytest.mark.engine("postgresql", "mariadb", "mysql")
def test_a_shared_hold_in_a_transaction_lasts_until_its_end(in_other_thread, until):
    lock = db_rwlock("catalogue", timeout=0)
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


@pytest.mark.engine("sqlite")
def test_a_shared_hold_on_sqlite_belongs_to_its_transaction(in_other_thread):
    lock = db_rwlock("catalogue", timeout=0)
    with transaction.atomic(), lock.read() as hold:
        assert hold.scope == "transaction"
    in_other_thread(lambda: lock.write().acquire().release())
