"""Leases that a test lets expire with ``dlocks.testing.expire()``."""

import dataclasses

import pytest

from dlocks import LockLost, db_lock, db_rwlock, db_semaphore
from dlocks.testing import expire
from tests.for_each import for_each

pytestmark = [pytest.mark.holds, pytest.mark.django_db(transaction=True)]

KINDS = [
    db_lock("a"),
    db_lock("a", "b"),
    db_semaphore("a", 2),
    db_rwlock("a").read(),
    db_rwlock("a").write(),
]


def check(hold):
    hold.check()


def renew(hold):
    hold.renew()


def write(hold):
    with hold.atomic():
        pytest.fail("the work of a lost hold must not begin")


@for_each("using", ["default", "optimistic", "insert", "memory"])
@for_each("kind", KINDS)
@for_each("use", [check, renew, write])
def test_every_use_of_the_hold_notices_that_it_has_expired(using, kind, use):
    """``check()``, ``renew()`` and ``atomic()`` raise LockLost on every backend."""
    told = []
    lock = dataclasses.replace(kind, using=using, on_lost=told.append)
    if hasattr(lock, "locks"):
        lock = db_lock(*lock.keys, using=using, on_lost=told.append)
    hold = lock.acquire()
    expire(hold)
    assert not told
    assert hold.held
    with pytest.raises(LockLost):
        use(hold)
    assert told == [hold]
    assert not hold.held
    with pytest.raises(LockLost):
        hold.release()


@for_each("using", ["default", "optimistic", "insert", "memory", "prefixed"])
@for_each("taken", [False, True])
def test_the_end_of_a_block_notices_only_that_the_key_was_taken(
    using, taken, in_other_thread
):
    """The work was exclusive if no other caller has acquired the key since."""

    def work():
        with db_lock("a", using=using):
            expire("a", using=using)
            if taken:
                in_other_thread(
                    lambda: db_lock("a", using=using, timeout=5).acquire().release()
                )

    if taken:
        with pytest.raises(LockLost):
            work()
    else:
        work()
