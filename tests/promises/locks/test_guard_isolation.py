"""Guarded transactions at READ COMMITTED and REPEATABLE READ.

The key has a busy queue, and other keys are in use.
"""

import threading
import unittest
from contextlib import contextmanager, suppress

import pytest
from django.db import DatabaseError, connection, transaction
from django.test import TestCase

from dlocks import LockBackendError, LockTimeout, db_lock, db_rwlock, db_semaphore
from dlocks.models import LockClaim
from tests import jobs
from tests.for_each import for_each
from tests.models import Counter
from tests.promises.locks.keys import await_renewal
from tests.timing import in_time
from tests.volume import volume

pytest_plugins = ["tests.promises.stops"]
pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.engine("postgresql", "mariadb", "mysql"),
]

LOCKS = {
    "lease": db_lock,
    "read lock": lambda key: db_rwlock(key).read(),
    "permit": lambda key: db_semaphore(key, 2),
    "two leases": lambda key: db_lock(key, f"{key}:1"),
}


@contextmanager
def repeatable_read(*, refuse_changes=False):
    """Run the transactions of this thread at REPEATABLE READ.

    With ``refuse_changes``, MariaDB behaves as MariaDB 11.6 does by default.
    """
    with jobs.isolated("REPEATABLE READ"), connection.cursor() as cursor:
        if refuse_changes and connection.display_name == "MariaDB":
            cursor.execute("SET innodb_snapshot_isolation = ON")
        yield


def refuses_changes():
    """Return whether the server refuses to lock a row changed since the snapshot."""
    return connection.vendor == "postgresql" or connection.mysql_is_mariadb


@pytest.fixture
def brisk(settings):
    """Let leases be renewed every 0.8 s."""
    default = settings.DLOCKS["default"]
    settings.DLOCKS = {
        **settings.DLOCKS,
        "default": {**default, "OPTIONS": {"ttl": 2.4}},
    }


@pytest.fixture
def stock():
    return Counter.objects.create(name="stock", value=7)


# MariaDB behaves as older versions do in the last case, in which it refuses no changes.
@for_each("case", [*((kind, True) for kind in LOCKS), ("lease", False)])
def test_no_guard_fails_next_to_a_busy_queue(case, stock, threads):
    """Six threads join the queue of the key and time out, at REPEATABLE READ."""
    kind, refuse_changes = case
    stop = threading.Event()

    def join_and_leave():
        while not stop.is_set():
            with pytest.raises(LockTimeout):
                db_lock("stock", timeout=0.02).acquire()

    with repeatable_read(refuse_changes=refuse_changes), LOCKS[kind]("stock") as hold:
        waiters = [threads(join_and_leave) for _ in range(6)]
        try:
            for number in range(volume(8)):
                with hold.atomic():
                    Counter.objects.filter(pk=stock.pk).update(value=number)
        finally:
            stop.set()
        for waiter in waiters:
            waiter.join()
        hold.check()


@for_each("level", ["READ COMMITTED", "REPEATABLE READ"])
@for_each("kind", ["lease", "read lock"])
def test_a_guard_that_waits_for_its_row_delays_no_other_key(
    kind, level, workers, threads, in_other_thread
):
    """Another session locks that row for 0.3 s. The other keys are its neighbours."""
    locker, other = workers(2)
    for key in ("stoca", "stocz"):
        db_lock(key).acquire().release()
    inside, leave = threading.Event(), threading.Event()
    hold = in_other_thread(LOCKS[kind]("stock").acquire)

    def guard():
        with hold, jobs.isolated(level), hold.atomic():
            inside.set()
            assert leave.wait(60)

    row = (jobs.lock_row, "stock") if kind == "lease" else (jobs.lock_claim,)
    which = {} if kind == "lease" else {"version": hold.token}
    with locker.doing(*row, **which):
        guarding = threads(guard)
        assert not inside.wait(0.3)
    try:
        assert inside.wait(20)
        other.start(jobs.use_keys, "stoca", "stocz", "stocj", "stocl", timeout=2.0)
        # A wait for a gap lock would take 50 s.
        took = other.hear(40)
        in_time(max(took.values()), 2.0)
    finally:
        leave.set()
    guarding.join()
    in_other_thread(hold.release)
    assert not LockClaim.objects.exists()


@for_each("kind", ["lease", "two leases"])
def test_an_outermost_guard_restarts_after_a_conflict(kind, stock, stops, brisk):
    """A row that changes after the snapshot costs a BEGIN. The block runs once."""
    pinned, ran = [], []
    sent, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def renew_late(usual, claims):
        sent.set()
        go_on.wait(20)
        try:
            return usual()
        finally:
            done.set()

    def change_first(usual, claim, database):
        pinned.append(claim)
        if len(pinned) == 1:
            Counter.objects.get()
            # The renewal was sent before the guard began.
            go_on.set()
            assert done.wait(20)
        return usual()

    stops.replace("renew", renew_late)
    with repeatable_read(refuse_changes=True), LOCKS[kind]("stock") as hold:
        assert sent.wait(20)
        with stops.replace("pin", change_first), hold.atomic():
            ran.append(Counter.objects.update(value=8))
        assert ran == [1]
        times = 2 * len(getattr(hold, "holds", [hold]))
        assert len(pinned) == times + refuses_changes()
        hold.check()
    assert Counter.objects.get().value == 8


def test_an_inner_guard_asks_to_retry_the_transaction(stock, brisk):
    """It cannot restart a transaction with a snapshot. Nothing is committed."""
    with repeatable_read(refuse_changes=True), db_lock("stock") as hold:

        def write():
            with transaction.atomic():
                assert Counter.objects.get().value == 7
                Counter.objects.update(value=8)
                await_renewal(hold)
                with hold.atomic():
                    Counter.objects.update(value=9)

        if refuses_changes():
            with pytest.raises(
                LockBackendError, match="'stock' cannot guard .* Retry the transaction"
            ):
                write()
            assert Counter.objects.get().value == 7
        else:
            write()
            assert Counter.objects.get().value == 9
        with hold.atomic():
            Counter.objects.update(value=10)
        hold.check()
    assert Counter.objects.get().value == 10


def test_no_write_after_a_conflict_is_committed_alone(stock, brisk):
    """After an ignored conflict the transaction commits completely or not at all."""
    with repeatable_read(refuse_changes=True), db_lock("stock") as hold:
        with transaction.atomic():
            assert Counter.objects.get().value == 7
            Counter.objects.update(value=11)
            await_renewal(hold)
            with suppress(LockBackendError), hold.atomic():
                pass
            with suppress(DatabaseError):
                Counter.objects.create(name="price", value=22)
    whole = Counter.objects.filter(name="price").exists()
    assert Counter.objects.get(name="stock").value == (11 if whole else 7)
    assert whole or refuses_changes()


def test_a_shared_hold_guards_within_a_test_case():
    """The rows of a TestCase are in one transaction, invisible to others."""

    class Guarded(TestCase):
        def test_guard(self):
            with db_rwlock("stock").read() as hold:
                with hold.atomic():
                    Counter.objects.create(name="stock", value=8)
                hold.check()

    result = unittest.TestResult()
    with repeatable_read(refuse_changes=True):
        unittest.TestSuite([Guarded("test_guard")]).run(result)
    assert result.testsRun == 1
    assert not result.errors, result.errors[0][1]
