"""Read-write locks and semaphores: many who share a key."""

import time

import pytest
from django.db import transaction

from dlocks import LockTimeout, db_lock, db_rwlock, db_semaphore
from dlocks.models import LockClaim, ResourceLock
from tests import jobs
from tests.timing import in_time

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(params=["default", "optimistic", "insert"])
def using(request):
    return request.param


def test_many_read_at_a_time(using, elsewhere):
    lock = db_rwlock("catalogue", using=using, timeout=0)
    with lock.read() as mine:
        other = elsewhere(lock.read().acquire)
        assert other.token > mine.token
        elsewhere(other.release)


def test_nobody_writes_while_somebody_reads_nor_reads_while_somebody_writes(using, elsewhere):
    lock = db_rwlock("catalogue", using=using, timeout=0)
    with lock.read():
        assert elsewhere(lock.write().try_acquire) is None
        assert elsewhere(db_lock("catalogue", using=using, timeout=0).try_acquire) is None
    with lock.write() as mine:
        assert elsewhere(lock.read().try_acquire) is None
        assert elsewhere(lock.write().try_acquire) is None
    with lock.read() as later:
        assert later.token > mine.token


def test_whoever_does_not_say_whether_he_reads_or_writes_is_asked():
    with pytest.raises(TypeError, match="Say which"), db_rwlock("catalogue"):
        pytest.fail("the block was entered")
    with pytest.raises(TypeError, match="Say which"):
        db_rwlock("catalogue")(print)
    with pytest.raises(TypeError, match=r"takes no 'permits': db_semaphore"):
        db_rwlock("catalogue", permits=5)


def test_a_reader_cannot_become_a_writer(using):
    lock = db_rwlock("catalogue", using=using)
    with lock.read():
        with pytest.raises(RuntimeError, match="shared by this caller"):
            lock.write().acquire()
    with lock.write():
        pass


def test_a_writer_may_read_and_downgrade(using, elsewhere):
    lock = db_rwlock("catalogue", using=using, timeout=0)
    writing = lock.write().acquire()
    reading = lock.read().acquire()
    assert reading.token > writing.token
    assert elsewhere(lock.read().try_acquire) is None
    writing.release()
    reading.check()
    other = elsewhere(lock.read().acquire)
    assert elsewhere(lock.write().try_acquire) is None
    elsewhere(other.release)
    reading.release()
    assert elsewhere(lambda: lock.write().try_acquire().release()) is None


def test_readers_who_come_after_a_waiting_writer_wait_behind_it(workers, until):
    writer, reader = workers(2)
    lock = db_rwlock("catalogue")
    mine = lock.read().acquire()
    writer.start(jobs.hold, "catalogue")
    until(lambda: mine.waiting == 1)
    assert db_rwlock("catalogue", timeout=0).read().try_acquire() is mine, "its own reader enters again"
    mine.release()
    reader.start(jobs.wait_for, "catalogue", shared=True)
    assert reader.hear() == "waiting"
    until(lambda: mine.waiting == 2)
    mine.release()
    written = writer.hear()
    assert not reader.pipe.poll(0.3)
    writer.tell()
    assert writer.hear() == "released"
    assert reader.hear()[1] > written


def test_readers_in_line_are_let_in_together(workers, until):
    readers = workers(3)
    with db_lock("catalogue") as mine:
        for number, reader in enumerate(readers, 1):
            reader.start(jobs.hold, "catalogue", shared=True)
            until(lambda number=number: mine.waiting == number)
    tokens = [reader.hear() for reader in readers]
    assert tokens == sorted(set(tokens))
    assert tokens[0] > mine.token
    for reader in readers:
        reader.tell()
        assert reader.hear() == "released"
    assert not LockClaim.objects.exists()


def test_so_many_permits_and_no_more(using, elsewhere):
    lock = db_semaphore("api", permits=2, using=using, timeout=0)
    first, second = elsewhere(lock.acquire), elsewhere(lock.acquire)
    assert first.token < second.token
    with pytest.raises(LockTimeout):
        lock.acquire()
    elsewhere(first.release)
    with lock as third:
        assert third.token > second.token
        assert elsewhere(lock.try_acquire) is None
    elsewhere(second.release)


def test_changed_permits_bind_new_holders_at_once(elsewhere):
    holds = [elsewhere(db_semaphore("api", permits=3, timeout=0).acquire) for _ in range(3)]
    assert elsewhere(db_semaphore("api", permits=2, timeout=0).try_acquire) is None
    elsewhere(holds.pop().release)
    assert elsewhere(db_semaphore("api", permits=2, timeout=0).try_acquire) is None
    more = elsewhere(db_semaphore("api", permits=4, timeout=0).acquire)
    for hold in [*holds, more]:
        elsewhere(hold.release)


def test_who_enters_again_takes_no_further_permit_unless_it_wants_one():
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


def test_a_permit_taken_beside_it_leaves_the_first_one_to_be_entered_again(elsewhere):
    mine, another = db_semaphore("pool", 2, timeout=0), db_semaphore("pool", 2, timeout=0, reentrant=False)
    with mine as hold:
        with another as second:
            assert second is not hold
            with mine as again:
                assert again is hold
        other = elsewhere(db_semaphore("pool", 2, timeout=0).acquire)
        with mine as again:
            assert again is hold
        other.release()
    with another, mine as hold, mine as again:
        assert again is hold


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


def test_a_permit_is_renewed(elsewhere):
    lock = db_semaphore("api", permits=1, ttl=3, timeout=0)
    with lock as hold:
        time.sleep(4.5)
        hold.check()
        assert elsewhere(lock.try_acquire) is None


@pytest.mark.engine("postgresql", "mariadb")
def test_a_share_taken_in_a_transaction_is_kept_until_it_ends(elsewhere, until):
    lock = db_rwlock("catalogue", timeout=0)
    with transaction.atomic():
        with lock.read():
            pass
        assert elsewhere(lock.write().try_acquire) is None
    until(lambda: (hold := elsewhere(lock.write().try_acquire)) and (elsewhere(hold.release) or True))


@pytest.mark.engine("sqlite")
def test_a_share_in_a_transaction_on_sqlite_belongs_to_it(elsewhere):
    lock = db_rwlock("catalogue", timeout=0)
    with transaction.atomic(), lock.read() as hold:
        assert hold.scope == "transaction"
    elsewhere(lambda: lock.write().acquire().release())
