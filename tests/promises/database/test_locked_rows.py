"""Rows that another transaction has locked, and processes that stop inside one."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, nullcontext, suppress

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from dlocks import (
    LockBackendError,
    LockLost,
    LockTimeout,
    db_lock,
    db_rwlock,
    db_semaphore,
    resume_hold,
)
from dlocks.backends.database import PessimisticBackend
from dlocks.models import LockClaim, ResourceLock
from dlocks.values import Claim
from tests import jobs
from tests.for_each import for_each
from tests.promises.locks.keys import unlocked_after
from tests.scripts import run_python
from tests.timing import TooLateError, in_time

pytest_plugins = ["tests.promises.stops"]
pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("no_claim_left"),
]

SERVERS = pytest.mark.engine("postgresql", "mariadb", "mysql")
# A project with Django's defaults, whose file no other connection can read meanwhile.
UNREADABLE = """
import sqlite3, threading
from django.conf import settings
file = {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.sqlite3"}
settings.configure(DATABASES={"default": file}, INSTALLED_APPS=["dlocks"])
import django
django.setup()
from django.core.management import call_command
from dlocks import db_semaphore

call_command("migrate", verbosity=0)
other = sqlite3.connect(
    "shop.sqlite3", isolation_level=None, check_same_thread=False
)

def for_a_second(work):
    other.execute("BEGIN EXCLUSIVE")
    timer = threading.Timer(1.0, other.execute, ["COMMIT"])
    timer.start()
    result = work()
    timer.join()
    return result

permit = db_semaphore("stock:7", 1, timeout=30)
hold = for_a_second(permit.acquire)
for_a_second(hold.release)
print(permit.locked())
"""
# Seconds of the first lease of a waiter.
HANDOVER_LEASE = 1.5


def claim(key="stock:7", **options):
    return Claim(key=key, **{"ttl": 30.0, "holder": "line", **options})


@pytest.mark.engine("postgresql", "mariadb")
def test_a_key_from_the_queue_is_renewed_while_others_lock_its_row_in_turn(
    in_queue, threads, until, stops
):
    """A renewal that skips a locked row never finds this one unlocked."""
    holds, begin, locked, end = [], *(threading.Event() for _ in range(3))

    def wait():
        with db_lock("stock:7", ttl=30) as hold:
            holds.append(hold)
            assert end.wait(30)
            hold.check()

    def lock_again_and_again():
        connection.ensure_connection()
        assert begin.wait(30)
        while not end.is_set():
            with transaction.atomic():
                ResourceLock.objects.select_for_update().get(pk="stock:7")
                locked.set()
                end.wait(0.02)

    with db_lock("stock:7"):
        waiter = threads(wait)
        in_queue(1)
        others = [threads(lock_again_and_again) for _ in range(3)]
        renewal = stops.at("renew")
    try:
        renewal.wait()
        begin.set()
        assert locked.wait(30)
        renewal.go_on()
        until(lambda: holds[0].remaining > 15 or not holds[0].held)
    finally:
        end.set()
    for thread in waiter, *others:
        thread.join(30)


def was_renewed(hold):
    """Check a hold with a short lease. A busy server may be late for it, too."""
    try:
        hold.check()
    except LockLost as error:
        raise TooLateError(str(error)) from error


@SERVERS
def test_a_locked_row_of_a_short_lease_delays_no_other_renewal(worker, until):
    """One thread renews all leases of a server."""
    # A busy machine may stall for more than a second.
    other = db_lock("stock:8", ttl=2.5).acquire()
    hold = db_lock("stock:7", ttl=3.0).acquire()
    with worker.doing(jobs.lock_row, "stock:7"):
        until(lambda: not hold.held)
        left = other.remaining
        until(lambda: other.remaining > left or not other.held)
        was_renewed(other)
    other.release()
    with suppress(LockLost):
        hold.release()


@SERVERS
def test_a_handover_of_a_locked_row_delays_no_renewal(worker):
    """Within a transaction, the thread that renews also sends its request."""
    other = db_lock("stock:8", ttl=1.5).acquire()
    text = db_lock("stock:7").acquire().detach()
    with worker.doing(jobs.lock_row, "stock:7"):
        with transaction.atomic(), pytest.raises(LockBackendError, match="is locked"):
            resume_hold(text)
        was_renewed(other)
    other.release()


@SERVERS
def test_a_holder_retries_until_its_locked_row_is_free(worker):
    """Many claims that join the queue at once may lock the row in turn.

    The holder may be entering again, or committing a guarded block.
    """
    with db_lock("stock:7") as hold:
        with unlocked_after(0.3, worker, jobs.lock_row, "stock:7"):
            with db_lock("stock:7") as again:
                assert again.token == hold.token
        with unlocked_after(0.3, worker, jobs.lock_row, "stock:7"):
            with hold.atomic():
                assert hold.held


@pytest.mark.engine("postgresql", "mariadb")
def test_a_late_release_of_a_locked_row_sends_few_statements(worker):
    """The lease has expired, and a transaction keeps its row locked."""
    backend, mine, waiter = PessimisticBackend("default"), claim(ttl=0.001), claim()
    assert backend.acquire(mine)
    backend.enqueue(waiter)
    with worker.doing(jobs.lock_row, "stock:7"):
        with CaptureQueriesContext(connection) as queries:
            assert not backend.release(mine)
        assert len(queries) < 400
    for one in mine, waiter:
        backend.release(one)


@pytest.mark.engine("postgresql", "mysql")
def test_a_key_is_released_after_its_row_was_locked_for_seconds(
    worker, in_queue, threads, is_busy
):
    """This is so with and without a waiter."""
    for key, seconds in ("stock:7", 5.0), ("stock:8", 0.5):
        hold = db_lock(key).acquire()
        if key == "stock:8":
            waiter = threads(lambda: jobs.token_of(db_lock("stock:8")))
            in_queue(1, key)
        with unlocked_after(seconds, worker, jobs.lock_row, key):
            hold.release()
    waiter.join(30)
    assert waiter.results[0] > hold.token
    assert not is_busy("stock:7")


@pytest.mark.engine("postgresql", "mysql")
def test_a_claim_whose_row_is_locked_is_skipped(workers, in_queue):
    first, second, other = workers(3)
    hold = db_lock("stock:7").acquire()
    for number, waiter in enumerate((first, second), 1):
        waiter.start(jobs.wait_quietly, "stock:7", timeout=60)
        in_queue(number)
    with other.doing(jobs.lock_claim, key_resource="stock:7", version=None):
        released_at = time.monotonic()
        hold.release()
        second_at, _ = second.hear(20)
    first_at, _ = first.hear(20)
    assert first_at > second_at
    # After 3 seconds without a heartbeat, the claim no longer blocks others.
    in_time(second_at - released_at, 8.0)


@pytest.mark.engine("postgresql", "mysql")
def test_the_first_lease_starts_at_the_delayed_grant(worker, until):
    """The claim's row is locked for 0.8 s when its turn comes."""
    backend, first, second = PessimisticBackend("default"), claim(), claim()
    which = {"key_resource": "stock:7", "version": None}
    assert backend.acquire(first) is not None
    assert backend.enqueue(second, "nobody") is not None
    with unlocked_after(0.8, worker, jobs.lock_claim, **which):
        assert backend.release(first)
        left = until(
            lambda: backend.poll([second], heartbeat=False)[second.owner].grant
        ).lease
    assert backend.release(second)
    in_time(HANDOVER_LEASE - left, 0.5)


@SERVERS
def test_a_turn_in_a_transaction_is_no_grant_while_the_row_is_locked(worker, until):
    """The row names the claim, but the transaction has not locked it."""
    backend, first = PessimisticBackend("default"), claim()
    second = claim(scope="transaction")
    assert backend.acquire(first) is not None
    assert backend.enqueue(second) is not None
    assert backend.release(first)
    with worker.doing(jobs.lock_row, "stock:7"), transaction.atomic():
        assert backend.acquire(second) is None
    with transaction.atomic():
        assert until(lambda: backend.acquire(second)).token
        assert backend.release(second)


@SERVERS
def test_polling_keys_locked_by_transactions_does_not_wait(workers):
    """There may be many such keys, and no message is received meanwhile."""
    keys = [f"stock:{number}" for number in range(6)]
    backend, claims = PessimisticBackend("default"), [claim(key) for key in keys]
    with ExitStack() as stack:
        for holder, key in zip(workers(len(keys)), keys, strict=True):
            stack.enter_context(holder.doing(jobs.hold_in_transaction, key))
        for one in claims:
            backend.enqueue(one)
        for heard in (True, False):
            began = time.monotonic()
            places = backend.poll(claims, heartbeat=heard)
            assert [places[one.owner].grant for one in claims] == [None] * len(keys)
            in_time(time.monotonic() - began, 1.0)
        for one in claims:
            backend.release(one)


# Processes that stop.


def stop_within_a_step(pipe, key):
    """Acquire a read lock, and stop until notified once the lock row is locked."""
    stopped = []

    def stop(execute, sql, *arguments):
        result = execute(sql, *arguments)
        if "FOR UPDATE" in sql and not stopped:
            stopped.append(sql)
            pipe.pause("locked")
        return result

    with connection.execute_wrapper(stop), db_rwlock(key).read() as held:
        return held.token


@SERVERS
def test_a_process_that_hangs_in_a_step_blocks_others_briefly(doomed, worker):
    """Its session is ended, and the process begins again when it continues."""
    victim = doomed()
    with db_lock("stock:7"):
        # This creates the row that a step locks.
        pass
    assert victim.call(stop_within_a_step, "stock:7") == "locked"
    began = time.monotonic()
    with worker.doing(jobs.hold, ("stock:7", "read"), timeout=20) as token:
        in_time(time.monotonic() - began, 4.0)
    assert victim.go_on() > token


# Variables of MariaDB that limit how long a transaction may be idle.
IDLE_KINDS = ("", "readonly_", "write_")


@pytest.mark.engine("mariadb")
def test_a_server_that_lets_transactions_idle_changes_nothing(doomed, worker):
    """The operator allows all transactions to be idle for a long time."""
    names = [f"idle_{kind}transaction_timeout" for kind in IDLE_KINDS]
    with connection.cursor() as cursor:
        for name in names:
            cursor.execute(f"SET GLOBAL {name} = 600")
        try:
            test_a_process_that_hangs_in_a_step_blocks_others_briefly(doomed, worker)
        finally:
            for name in names:
                cursor.execute(f"SET GLOBAL {name} = DEFAULT")


@pytest.mark.engine("postgresql")
def test_a_thread_that_hangs_while_queueing_blocks_no_other(threads, in_queue):
    """Its connection may be dead while its driver still waits."""
    entered, leave = threading.Event(), threading.Event()

    def hang(execute, sql, *arguments):
        if "lockclaim" in sql and not entered.is_set():
            entered.set()
            leave.wait(30)
        return execute(sql, *arguments)

    def hang_in_queue():
        with connection.execute_wrapper(hang):
            return jobs.token_of(db_lock("stock:7", timeout=30))

    with db_lock("stock:7"):
        hanging = threads(hang_in_queue)
        assert entered.wait(10)
        waiting = threads(lambda: jobs.token_of(db_lock("stock:7", timeout=30)))
        try:
            in_queue(1)
        finally:
            leave.set()
    for thread in hanging, waiting:
        thread.join(30)
        assert thread.results


@SERVERS
@for_each("scope", ["lease", "transaction"])
def test_a_waiter_of_a_deleted_row_leaves_no_place_in_the_queue(
    scope, in_queue, threads
):
    """A dead place would get the key after the waiter, for its first lease."""

    def acquire():
        with transaction.atomic() if scope == "transaction" else nullcontext():
            return jobs.token_of(db_lock("stock:7", scope=scope, timeout=20))

    jobs.token_of(db_lock("stock:7"))
    with transaction.atomic():
        # A locked row cannot count the claim that joins.
        ResourceLock.objects.select_for_update().get(pk="stock:7")
        waiter = threads(acquire)
        in_queue(1)
        ResourceLock.objects.filter(pk="stock:7").delete()
    waiter.join(30)
    assert waiter.results[0]
    assert not LockClaim.objects.exists()


@SERVERS
@for_each("using", ["default", "optimistic", "insert"])
def test_a_waiter_that_joins_during_a_guarded_transaction_is_next(
    using, worker, in_queue
):
    """The row is locked then, so it does not count the waiter."""
    lock = db_lock("stock:7", using=using, timeout=0)
    with lock as hold, hold.atomic():
        worker.start(jobs.hold, "stock:7", using=using, timeout=20)
        in_queue(1)
    with pytest.raises(LockTimeout):
        lock.acquire().release()
    assert worker.hear() > hold.token
    worker.go_on()


@pytest.mark.engine("sqlite")
def test_a_key_is_acquired_and_released_while_its_file_is_unreadable(tmp_path):
    """With a rollback journal, each commit keeps readers away for a moment."""
    done = run_python("-c", UNREADABLE, cwd=tmp_path)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.engine("sqlite")
def test_a_permit_is_released_after_a_long_write_of_another_program(worker):
    """The permit is neither lost nor kept from others until its lease ends."""
    permit = db_semaphore("stock:7", 1, timeout=0)
    jobs.token_of(db_lock("stock:8"))
    held = permit.acquire()
    with unlocked_after(4.0, worker, jobs.lock_row, "stock:8"):
        held.release()
    with permit as hold:
        assert not hold.takeover
