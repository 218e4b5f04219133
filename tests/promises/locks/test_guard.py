"""hold.atomic(): work commits under the lock, or not at all."""

import asyncio
import time
from contextlib import closing, nullcontext, suppress

import pytest
from django.db import IntegrityError, connection, transaction

from dlocks import LockBackendError, LockLost, LockTimeout, db_lock, db_rwlock
from dlocks.models import LockClaim
from dlocks.testing import expire, held_elsewhere, lose
from tests import jobs
from tests.for_each import FAMILY, for_each
from tests.models import Counter
from tests.promises.commands.running import refused, run
from tests.promises.locks.keys import await_renewal, clear
from tests.promises.locks.keys import row as row_of
from tests.timing import in_time

pytest_plugins = ["tests.promises.stops"]
pytestmark = [
    pytest.mark.driver,
    pytest.mark.django_db(transaction=True),
]
# Where a transaction of one caller does not keep all others from writing.
SERVERS = pytest.mark.engine("postgresql", "mariadb")
EVERY_SERVER = pytest.mark.engine("postgresql", "mariadb", "mysql")


@pytest.fixture
def row():
    """Return a function that returns the value of a row, or sets it first."""
    Counter.objects.create(name="stock", value=7)

    def value(new=None):
        if new is not None:
            Counter.objects.update(value=new)
        return Counter.objects.get(name="stock").value

    return value


@SERVERS
@for_each(
    "case",
    [("default", True), ("optimistic", True), ("insert", True), ("default", False)],
)
def test_a_holder_paused_past_its_ttl_commits_no_guarded_write(case, doomed, row):
    using, guard = case
    row(7)
    worker = doomed()
    policy = {"guard": guard, "ttl": 0.6, "using": using}
    token = worker.call(jobs.write_under, "stock", "stock", 1, **policy)
    worker.stop()
    with db_lock("stock", using=using, timeout=20) as hold:
        assert hold.token > token
        worker.resume()
        outcome, message = worker.go_on()
        if guard:
            assert outcome == "LockLost"
            assert "'stock' was lost" in message
            assert row() == 7
        else:
            assert outcome == "written, and lost"
            assert row() == 1, "without the guard, the write is committed"


@SERVERS
def test_a_process_paused_in_a_guard_keeps_the_key(doomed, row):
    policy = {"guard": True, "stop_inside": True, "ttl": 1.2}
    paused = {key: doomed() for key in ("default", "optimistic", "insert")}
    for key, worker in paused.items():
        Counter.objects.create(name=key, value=7)
        worker.call(jobs.write_under, key, key, 1, using=key, **policy)
        assert worker.hear() == "inside"
        worker.stop()
    # For longer than the ttl and the grace.
    time.sleep(2)
    for key, worker in paused.items():
        assert db_lock(key, using=key).try_acquire() is None
        assert Counter.objects.get(name=key).value == 7
        worker.resume()
        assert worker.go_on()[0] == "written"
        assert Counter.objects.get(name=key).value == 1
        with db_lock(key, using=key, timeout=10):
            pass


@FAMILY
def test_a_hold_is_not_lost_in_a_guard_longer_than_its_ttl(row, using, until):
    """It cannot be renewed meanwhile, and need not be. Later it is renewed."""
    lost = []
    lock = db_lock("stock", ttl=1.5, using=using, on_lost=lost.append)
    with lock as hold:
        with hold.atomic():
            until(lambda: not hold.held)
            hold.check()
            hold.renew()
            with lock as again, again.atomic():
                assert again.token == hold.token
                Counter.objects.update(value=3)
        hold.check()
        await_renewal(hold)
    assert row() == 3
    assert lost == []


@FAMILY
def test_a_guarded_transaction_rolls_back_and_the_hold_remains(row, using):
    """It is rolled back by an error or by ``set_rollback()``.

    The lock can be entered again inside. Savepoints and ``durable`` work as in Django,
    also in a transaction that ends the hold.
    """
    row(7)
    lock = db_lock("stock", using=using)
    with lock as hold:
        with pytest.raises(ZeroDivisionError), hold.atomic():
            Counter.objects.update(value=2)
            raise ZeroDivisionError
        for inner in (nullcontext(), lock):
            with hold.atomic(), inner:
                Counter.objects.update(value=3)
                transaction.set_rollback(True)
        assert row() == 7
        hold.check()
        with hold.atomic(), lock as again:
            assert again is hold
            Counter.objects.update(value=5)
        assert hold.count == 1
        hold.check()
        assert row() == 5
        with hold.atomic(durable=True):
            with pytest.raises(IntegrityError), transaction.atomic():
                Counter.objects.create(name="stock")
            Counter.objects.update(value=4)
        assert row() == 4
        with transaction.atomic():
            with pytest.raises(RuntimeError, match="durable"):
                hold.atomic(durable=True).__enter__()
            with hold.atomic():
                Counter.objects.update(value=6)
        assert row() == 6
    with transaction.atomic(), lock as hold:
        assert hold.scope == "transaction"
        with hold.atomic():
            Counter.objects.update(value=8)
    assert row() == 8


@FAMILY
def test_a_lost_hold_cannot_guard_a_transaction(row, using, until):
    """Its key may be held by another caller, or be free."""
    row(7)
    hold = db_lock("stock", using=using, renew=False).acquire()
    expire(hold)
    lost = []
    reported = db_lock(
        "price", using=using, ttl=0.4, renew=False, on_lost=lost.append
    ).acquire()
    until(lambda: lost)
    with held_elsewhere("stock", using=using):
        for over in (hold, reported):
            with pytest.raises(LockLost), over.atomic():
                Counter.objects.update(value=2)
            assert row() == 7
            assert not over.held
            with pytest.raises(LockLost):
                over.release()


@FAMILY
def test_a_hold_survives_the_rollback_of_an_inner_guard(row, using):
    lost = []
    for savepoint in (True, False):
        with db_lock("stock", using=using, on_lost=lost.append) as hold:
            with transaction.atomic():
                with (
                    pytest.raises(ZeroDivisionError),
                    transaction.atomic(),
                    hold.atomic(savepoint=savepoint),
                ):
                    Counter.objects.update(value=2)
                    raise ZeroDivisionError
                began = time.monotonic()
                hold.check()
                # On some engines its own transaction still has the row locked.
                in_time(time.monotonic() - began, 5.0)
                with hold.atomic():
                    Counter.objects.update(value=3 + savepoint)
            hold.check()
        assert row() == 3 + savepoint
    assert lost == []


@FAMILY
def test_a_guard_that_is_rolled_back_extends_no_lease(row, using):
    with db_lock("stock", using=using, ttl=5.0, renew=False) as hold:
        with transaction.atomic():
            with pytest.raises(ZeroDivisionError), transaction.atomic():
                with hold.atomic():
                    time.sleep(0.3)
                raise ZeroDivisionError
        on_the_row = row_of("stock").seconds_left
        # SQLite's clock has a resolution of one millisecond.
        assert hold.remaining <= on_the_row + 0.001


@pytest.mark.front
def test_a_guard_extends_no_lease_beyond_max_hold(row):
    """The commit renews the lease, but only until max_hold has passed."""
    with db_lock("stock", ttl=5.0, max_hold=5.0) as hold:
        time.sleep(0.1)
        began = hold.age
        with hold.atomic():
            hold.check()
        took = hold.age - began
        assert hold.age + hold.remaining <= 5.0
        # The lease in the row counts from the arrival of the request, and SQLite's
        # clock has a resolution of one millisecond.
        assert hold.age + row_of("stock").seconds_left <= 5.001 + took


@pytest.mark.front
@FAMILY
def test_a_hold_whose_row_could_not_be_locked_is_still_renewed(using, stops):
    """The error is reported."""
    hold = db_lock("stock", using=using, ttl=1.5).acquire()

    def fail(usual, claim, database):
        raise LockBackendError("The connection was lost.")

    for block in (transaction.atomic, nullcontext):
        with stops.replace("pin", fail), block():
            with pytest.raises(LockBackendError, match="was lost"), hold.atomic():
                pass
    await_renewal(hold)
    hold.release()


@FAMILY
def test_a_slow_callback_of_a_guarded_block_causes_no_loss(row, using):
    """Nor does one before that of the guard, when nothing marks the transaction."""
    lost = []
    with db_lock(
        "stock", using=using, ttl=1.5, renew=False, on_lost=lost.append
    ) as hold:
        with transaction.atomic():
            transaction.on_commit(lambda: time.sleep(0.3))
            with hold.atomic():
                Counter.objects.update(value=2)
        hold.check()
        with transaction.atomic(), hold.atomic():
            transaction.on_commit(lambda: time.sleep(0.3))
            time.sleep(1.8)
        hold.check()
    assert row() == 2
    assert lost == []


@FAMILY
def test_a_callback_from_before_a_guard_finds_its_lease_renewed(using):
    """The guard has taken longer than the ttl, and its commit has renewed the lease."""
    lost, checked = [], []

    def check():
        hold.check()
        checked.append(hold.held)

    with db_lock("stock", using=using, ttl=0.5, on_lost=lost.append) as hold:
        with transaction.atomic():
            transaction.on_commit(check)
            with hold.atomic():
                time.sleep(0.6)
    assert checked == [True]
    assert lost == []


@SERVERS
def test_a_renewal_of_other_holds_during_a_guard_is_no_loss(stops, until):
    """Its reply comes between the commit and its record."""
    lost = []
    with db_lock("other", ttl=1.5) as other:
        late = stops.at("renew")
        with db_lock("stock", ttl=0.5, on_lost=lost.append) as hold:
            with hold.atomic():
                late.wait()
                time.sleep(0.6)
                before = other.remaining

                def reply():
                    late.go_on()
                    until(lambda: other.remaining > before)
                    time.sleep(0.2)

                # Before all others, as nothing marks the transaction then.
                connection.run_on_commit.insert(0, (set(), reply, False))
            hold.check()
    assert lost == []


@SERVERS
@FAMILY
def test_a_guard_is_refused_without_autocommit(using, in_other_thread):
    hold = db_lock("stock", using=using).acquire()
    connection.set_autocommit(False)
    try:
        with transaction.atomic():
            with pytest.raises(RuntimeError, match="[Aa]utocommit is off"):
                hold.atomic().__enter__()
            hold.release()
        in_other_thread(db_lock("stock", using=using, timeout=5).acquire).release()
    finally:
        connection.rollback()
        connection.set_autocommit(True)


@EVERY_SERVER
def test_a_guarded_shared_hold_delays_no_operation_on_its_key(worker, until):
    """The guard takes longer than the ttl and the grace, and no writer gets the key."""
    with worker.doing(jobs.share_under_guard, "stock", ttl=1.5) as token:
        began = time.monotonic()
        with pytest.raises(LockTimeout):
            db_lock("stock", timeout=1.0).acquire()
        claims = LockClaim.objects.by_clock()
        until(lambda: claims.get(version=token).seconds_left < -0.5)
        refused("clear_lock", "stock", "--share", f"{token}", "--yes")
        run("reap_locks")
        assert claims.filter(version=token).exists()
        # The guarded claim now looks like that of a waiter that died long ago.
        with pytest.raises(LockTimeout):
            db_lock("stock", timeout=0.2).acquire()
        took = time.monotonic() - began
    in_time(took, 15)
    db_lock("stock", timeout=5).acquire().release()


@pytest.mark.front
def test_the_memory_backend_simulates_a_guard():
    """It succeeds, or finds a loss. Other locks beside the database refuse it."""
    with db_lock("stock", using="memory") as hold, hold.atomic():
        assert hold.held
    with pytest.raises(LockLost), db_lock("stock", using="memory") as hold:
        lose(hold)
        with hold.atomic():
            raise AssertionError("the guard has begun without the lock")
    with pytest.raises(LockLost), db_lock("stock", using="memory") as hold:
        with hold.atomic():
            expire(hold)
    no_guard = pytest.raises(RuntimeError, match="DummyBackend cannot guard a transact")
    with db_lock("stock", using="dummy") as hold, no_guard, hold.atomic():
        pass


def test_two_statements_more_than_the_transaction_itself(
    row, django_assert_num_queries
):
    with db_lock("stock") as hold:
        # The queries include BEGIN and COMMIT.
        with django_assert_num_queries(5), hold.atomic():
            Counter.objects.update(value=2)


@SERVERS
@for_each("level", ["READ COMMITTED", "REPEATABLE READ"])
def test_a_second_alias_of_the_same_database_can_be_guarded(row, worker, level, until):
    row(7)
    worker.call(jobs.write_by_second_alias, "stock", level=level, ttl=1.0)
    # The ttl and the grace have passed.
    until(lambda: row_of("stock").seconds_left < -0.5)
    assert db_lock("stock").try_acquire() is None
    another, of_a_transaction = worker.go_on()
    assert "on the other database 'elsewhere'" in another
    assert "cannot guard another one on 'second'" in of_a_transaction
    assert row() == 3


@SERVERS
@for_each(
    "case",
    [
        ("default", ("stock",), "exit"),
        ("default", ("stock", "price"), "transaction"),
        ("optimistic", ("stock",), "transaction"),
        ("optimistic", ("stock", "price"), "exit"),
        ("insert", ("stock",), "exit"),
        ("insert", ("stock", "price"), "transaction"),
    ],
)
def test_a_key_guarded_on_a_second_alias_ends_with_its_commit(case, worker):
    """The exit does not wait for a row that its own process has locked."""
    using, keys, release_at = case
    began, policy = time.monotonic(), {"using": using, "release_at": release_at}
    with worker.doing(jobs.leave_by_second_alias, *keys, **policy):
        in_time(time.monotonic() - began, 10)
        assert db_lock(keys[-1], using=using).try_acquire() is None
    db_lock(*keys, using=using, timeout=5).acquire().release()


def test_a_release_in_its_own_guard_after_the_ttl_is_committed(row, until):
    hold = db_lock("stock", ttl=1.5).acquire()
    with hold.atomic():
        Counter.objects.update(value=3)
        until(lambda: not hold.held)
        hold.release()
    assert row() == 3
    with db_lock("stock").try_acquire() as other:
        assert other.token > hold.token


def test_a_hold_is_entered_again_in_its_guard_after_the_ttl(row, until):
    lock = db_lock("stock", ttl=1.5)
    hold = lock.acquire()
    with hold.atomic():
        Counter.objects.update(value=3)
        until(lambda: not hold.held)
        hold.release()
        with lock as again:
            assert again is hold
    assert row() == 3


@SERVERS
@for_each(
    "case",
    [
        ("default", db_lock, False),
        ("default", lambda key, **policy: db_rwlock(key, **policy).read(), True),
        ("optimistic", db_lock, False),
        ("insert", db_lock, True),
    ],
)
def test_a_release_with_waiters_does_not_change_the_guard(case, row, workers, until):
    """The first waiter times out before that transaction has ended."""
    using, lock, roll_back = case
    row(7)
    impatient, patient = workers(2)
    with transaction.atomic():
        with lock("stock", using=using, scope="lease", release_at="exit") as hold:
            impatient.start(jobs.acquire, "stock", using=using, timeout=2.0)
            until(lambda: hold.queue_length() == 1)
            patient.start(jobs.wait_quietly, "stock", using=using, timeout=30)
            until(lambda: hold.queue_length() == 2)
            with hold.atomic():
                Counter.objects.update(value=3)
        assert as_ever()
        assert impatient.hear(20) == "LockTimeout"
        transaction.set_rollback(roll_back)
    assert row() == (7 if roll_back else 3)
    _, token = patient.hear()
    assert token > hold.token


@EVERY_SERVER
@for_each(
    "case",
    [
        ("default", ("stock",)),
        ("default", ("stock", "price")),
        ("optimistic", ("stock",)),
        ("insert", ("stock", "price")),
    ],
)
def test_a_release_in_a_guard_does_not_change_its_commit(case, row, in_other_thread):
    using, keys = case
    row(7)
    with transaction.atomic():
        with (
            db_lock(*keys, using=using, scope="lease", release_at="exit") as hold,
            hold.atomic(),
        ):
            Counter.objects.update(value=3)
        assert as_ever()
        assert in_other_thread(db_lock(keys[-1], using=using).try_acquire) is None
    assert row() == 3
    in_other_thread(db_lock(*keys, using=using, timeout=0).acquire).release()


def as_ever():
    """Return whether this transaction commits with the default settings."""
    if connection.vendor != "postgresql":
        return True
    names = "current_setting('lock_timeout'), current_setting('synchronous_commit')"
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {names}")
        return cursor.fetchone() == ("0", "on")


def test_several_keys_guard_together(row):
    with db_lock("stock", "price") as hold:
        with hold.atomic(durable=True):
            Counter.objects.update(value=3)
        hold.check()
        clear("stock")
        with pytest.raises(LockLost), hold.atomic():
            Counter.objects.update(value=4)
        with pytest.raises(LockLost):
            hold.release()
    assert row() == 3


@pytest.mark.front
async def test_a_coroutine_calls_a_guarded_function(row):
    """A coroutine function is refused."""
    counter = await Counter.objects.aget(name="stock")
    counter.value = 5
    async with db_lock("stock") as hold:
        stock = Counter.objects.filter(name="stock")
        assert await hold.aatomic(stock.update, value=9) == 1
        assert (await stock.aget()).value == 9
        with pytest.raises(TypeError, match="Pass its synchronous version"):
            await hold.aatomic(counter.asave)
        await hold.aatomic(counter.save)
    assert (await stock.aget()).value == 5


@pytest.mark.front
def test_a_guarded_function_that_finds_nothing_ends_its_block(is_busy):
    """It raises StopIteration, which some versions of Python pass on to no task."""

    async def work():
        async with db_lock("stock", using="memory") as hold:
            await hold.aatomic(next, iter([]))

    with closing(asyncio.new_event_loop()) as loop:
        task = loop.create_task(work())
        loop.run_until_complete(asyncio.wait([task], timeout=5))
        with pytest.raises(RuntimeError, match="StopIteration"):
            task.result()
        assert not is_busy("stock", using="memory")


def test_an_error_of_a_guard_propagates_without_a_connection(row):
    with db_lock("stock") as hold:
        with pytest.raises(ZeroDivisionError), hold.atomic():
            connection.close()
            # The end of the transaction is noticed in the background.
            time.sleep(0.3)
            1 / 0  # noqa: B018
        assert hold.held


@EVERY_SERVER
def test_an_interrupted_guard_does_not_outlive_its_hold(stops, in_other_thread):
    """The outer transaction goes on, and the key may be lost in the meantime."""

    def interrupt(*_):
        raise KeyboardInterrupt

    hold = db_lock("stock:7", ttl=30).acquire()
    with transaction.atomic():
        with stops.replace("pin", interrupt), suppress(KeyboardInterrupt):
            with hold.atomic():
                pytest.fail("entered")
        in_other_thread(lambda: clear("stock:7"))
        with pytest.raises(LockLost):
            in_other_thread(hold.check)
