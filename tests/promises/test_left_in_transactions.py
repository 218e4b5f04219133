"""A lease that is left in an open transaction, and entered again meanwhile."""

import time

import pytest
from django.db import transaction

from dlocks import db_lock, db_rwlock, db_semaphore, resume_hold
from tests.for_each import for_each
from tests.promises.ended import is_refused

pytestmark = [pytest.mark.driver, pytest.mark.django_db(transaction=True)]

# On SQLite, no other caller writes its lease while a transaction is open. The leases
# of the memory backend need no database.
SERVERS = pytest.mark.engine("postgresql", "mariadb")
USING = [
    pytest.param("default", marks=SERVERS),
    pytest.param("optimistic", marks=SERVERS),
    pytest.param("insert", marks=SERVERS),
    "memory",
]
LOCKS = {
    "one key": lambda **options: db_lock("stock:7", **options),
    "two keys": lambda **options: db_lock("stock:7", "stock:8", **options),
    "read lock": lambda **options: db_rwlock("stock:7", **options).read(),
    "permit": lambda **options: db_semaphore("stock:7", permits=1, **options),
}


def lock_of(kind, using, **options):
    return LOCKS[kind](using=using, scope="lease", **options)


@pytest.fixture
def is_kept(in_other_thread):
    """Return a function that returns whether other callers are kept from the key."""

    def ask(kind, using):
        # A reader keeps writers out.
        kind = "one key" if kind == "read lock" else kind
        return in_other_thread(is_refused, lock_of(kind, using))

    return ask


@pytest.mark.parametrize("using", USING)
@for_each("release_at", ["transaction", "exit"])
@for_each("kind", LOCKS)
def test_entering_again_frees_no_key_before_the_transaction_ends(
    using, kind, release_at, leave_in_transaction, is_kept, until
):
    """No caller acquires a key before the writes under it are committed.

    A thread leaves the hold in its transaction. The thread that acquired it enters it
    again and leaves it, and a lock that asks for no such delay changes nothing.
    """
    lock = lock_of(kind, using)
    commit = leave_in_transaction(lock.acquire())
    for _ in range(2):
        with lock_of(kind, using, release_at=release_at):
            assert is_kept(kind, using)
        assert is_kept(kind, using)
    commit()
    until(lambda: not is_kept(kind, using))


@pytest.mark.parametrize("using", USING)
@for_each("kind", LOCKS)
def test_a_hold_that_is_entered_again_outlasts_the_transaction(
    using, kind, leave_in_transaction, is_kept
):
    """The end of the transaction does not free a key whose block is open.

    The end of that block does, at once. This holds for a rollback too.
    """
    lock = lock_of(kind, using)
    for rollback in (False, True):
        finish = leave_in_transaction(lock.acquire(), rollback=rollback)
        with lock as hold:
            finish()
            hold.check()
            assert is_kept(kind, using)
        assert not is_kept(kind, using)


@pytest.mark.parametrize("using", USING)
@for_each("release_at", ["transaction", "exit"])
@for_each("kind", LOCKS)
def test_a_leave_that_is_not_the_last_keeps_the_key_for_its_transaction(
    using, kind, release_at, leave_in_transaction, is_kept, until
):
    """The last caller leaves outside of transactions, before another one's commit."""
    lock = lock_of(kind, using)
    with lock_of(kind, using, release_at=release_at):
        commit = leave_in_transaction(lock.acquire())
    assert is_kept(kind, using)
    commit()
    until(lambda: not is_kept(kind, using))


@pytest.mark.parametrize("using", USING)
@for_each("has_ended", [True, False])
def test_a_thread_does_not_wait_for_its_own_transaction(
    using, has_ended, paused, is_kept, until
):
    """It has released the hold there, and the block of another thread uses it."""
    lock = lock_of("one key", using, timeout=5)
    with transaction.atomic():
        hold = lock.acquire()

        def use():
            with hold:
                yield

        end = paused(use)
        hold.release()
        if has_ended:
            end()
        with pytest.raises(RuntimeError, match="is kept by the transaction of this"):
            lock.acquire()
    end()
    until(lambda: not is_kept("one key", using))


@pytest.mark.parametrize("using", USING)
def test_a_failed_second_acquisition_frees_no_key_before_the_commit(
    using, leave_in_transaction, is_kept, in_other_thread, until
):
    """The caller enters the hold again together with a key that is busy."""
    options = {"using": using, "scope": "lease"}
    other = in_other_thread(db_lock("stock:9", **options).acquire)
    commit = leave_in_transaction(lock_of("one key", using).acquire())
    assert db_lock("stock:7", "stock:9", **options).try_acquire(timeout=0.1) is None
    assert is_kept("one key", using)
    commit()
    until(lambda: not is_kept("one key", using))
    other.release()


@pytest.mark.parametrize("using", USING)
@for_each("kind", LOCKS)
def test_a_check_of_a_left_hold_does_not_end_its_renewals(
    using, kind, leave_in_transaction, is_kept, until
):
    """No caller uses the hold any more, but the transaction still needs the key."""
    hold = lock_of(kind, using).acquire()
    commit = leave_in_transaction(hold)
    hold.check()
    hold.renew()
    assert is_kept(kind, using)
    commit()
    until(lambda: not is_kept(kind, using))


@pytest.mark.parametrize("using", [USING[0], "memory"])
def test_a_hold_is_not_detached_before_the_commit(using, leave_in_transaction):
    """The process that resumes it could release the key before the commit."""
    lock = lock_of("one key", using)
    with lock as hold:
        commit = leave_in_transaction(lock.acquire())
        with pytest.raises(RuntimeError, match="before the end of a transaction"):
            hold.detach()
        commit()
        resume_hold(hold.detach()).release()


@pytest.mark.parametrize("using", [USING[0], "memory"])
def test_the_end_of_a_thread_frees_no_key_before_the_commit(
    using, leave_in_transaction, paused, is_kept, until
):
    """The thread that acquired the hold enters it again, and ends without a release."""
    lock, holds = lock_of("one key", using), []

    def acquire_twice():
        holds.append(lock.acquire())
        yield
        lock.acquire()

    end = paused(acquire_twice)
    commit = leave_in_transaction(holds[0])
    end()
    # The end of a thread is noticed within a second.
    deadline = time.monotonic() + 1.3
    while time.monotonic() < deadline:
        assert is_kept("one key", using)
        time.sleep(0.05)
    commit()
    until(lambda: not is_kept("one key", using))


def test_a_commit_does_not_wait_for_a_hold_that_was_lost(until):
    """A lease that was left in the transaction ends before it, since nobody renews it.

    Nothing is to be released at the commit, which takes no longer than usual.
    """
    lock = lock_of("one key", "memory", ttl=1, renew=False)
    with transaction.atomic():
        with lock as hold:
            pass
        assert hold.held
        until(lambda: not hold.held)
        time.sleep(0.3)
        began = time.monotonic()
    assert time.monotonic() < began + 1
