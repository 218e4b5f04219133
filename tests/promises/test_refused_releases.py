"""Releases that are refused, and those after the end of the hold's transaction."""

import gc
from contextlib import ExitStack, nullcontext, suppress

import pytest
from django.db import connection, transaction

from dlocks import LockLost, db_lock, lock_lost
from tests.for_each import for_each

pytestmark = [pytest.mark.driver, pytest.mark.django_db(transaction=True)]

KEYS = for_each("keys", [("stock:7",), ("stock:7", "stock:8")])


class UndoneError(Exception):
    """The error by which a test rolls a transaction back."""


@pytest.fixture
def reported(signalled):
    """Return a list of each hold that ``lock_lost`` reports, with the signal."""
    return signalled(lock_lost)


@KEYS
@for_each("entries", [1, 2])
def test_a_refused_release_changes_nothing(keys, entries, in_other_thread, reported):
    """Another thread cannot release or check a hold of this thread's transaction.

    Nor can it use the hold in a block. The attempt raises RuntimeError. The hold stays
    as it was, however often it was entered, and its own thread still checks and
    releases it.
    """

    def use_in_block():
        with hold:
            pass

    lock = db_lock(*keys)
    with transaction.atomic():
        for _ in range(entries):
            hold = lock.acquire()
        for use in (hold.release, hold.check, use_in_block, hold.release):
            with pytest.raises(RuntimeError, match="Only that thread can use the hold"):
                in_other_thread(use)
        assert hold.held
        assert hold.count == entries
        hold.check()
        for _ in range(entries):
            assert lock.held()
            lock.release()
        assert not lock.held()
        with pytest.raises(RuntimeError, match="was not acquired by this thread"):
            lock.release()
    assert not reported


@KEYS
@for_each("end", ["commit", "rollback"])
def test_a_release_after_the_transaction_does_nothing(
    keys, end, in_other_thread, reported
):
    """The work was committed under the lock, or it was undone.

    So ``release()`` neither raises LockLost nor reports a loss. It may be called more
    than once and from any thread, in a callback of ``on_commit()``, and inside the next
    transaction.
    """
    for later in ("on_commit", "in the next transaction", "in another thread"):
        told = []
        with suppress(UndoneError), transaction.atomic(), transaction.atomic():
            hold = db_lock(*keys, on_lost=told.append).acquire()
            if later == "on_commit":
                transaction.on_commit(hold.release)
            if end == "rollback":
                raise UndoneError
        assert not hold.held
        if later == "in another thread":
            in_other_thread(hold.release)
        elif later == "in the next transaction":
            transaction.atomic(hold.release)()
        hold.release()
        hold.release()
        assert not hold.held
        assert not told
    assert not reported
    with db_lock(*keys, timeout=0):
        pass


@for_each("end", ["savepoint", "connection"])
def test_a_release_after_an_early_end_of_its_transaction_raises(end, reported):
    """The savepoint was rolled back, or the connection was lost.

    The outer block goes on, and its work is no longer under the lock.
    """
    reported.clear()
    with transaction.atomic():
        inner = transaction.atomic() if end == "savepoint" else nullcontext()
        with suppress(UndoneError), inner:
            hold = db_lock("stock:7").acquire()
            if end == "savepoint":
                raise UndoneError
            connection.close()
        assert not hold.held
        with pytest.raises(LockLost, match="its transaction has ended"):
            hold.release()
        assert reported == [(lock_lost, hold)]


@for_each("of", ["lock", "hold"])
def test_a_block_that_outlives_its_transaction_raises(of, reported):
    """A part of the block was not under the lock, and ends with LockLost."""
    reported.clear()
    with ExitStack() as block:
        with transaction.atomic():
            lock = db_lock("stock:7")
            hold = block.enter_context(lock if of == "lock" else lock.acquire())
        with pytest.raises(LockLost, match="its transaction has ended"):
            block.close()
        assert reported == [(lock_lost, hold)]


def test_a_lock_is_released_after_the_transaction_without_its_hold():
    """``lock.release()`` does nothing either, although no hold was kept.

    The transaction needs no reference to the hold.
    """
    lock = db_lock("stock:7")
    with transaction.atomic():
        lock.acquire()
        gc.collect()
        assert lock.held()
    assert not lock.held()
    gc.collect()
    lock.release()
