"""hold.atomic(): what commits was done under the lock, or it does not commit."""

import threading
import time
from datetime import timedelta

import pytest
from django.db import IntegrityError, connection, connections, transaction
from django.utils import timezone

from dlocks import LockBackendError, LockLost, LockTimeout, db_lock, db_rwlock
from dlocks.conf import backends
from dlocks.models import LockClaim, ResourceLock
from tests import jobs, rows
from tests.models import Counter
from tests.timing import in_time

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(params=["default", "optimistic", "insert"])
def using(request):
    return request.param


@pytest.fixture
def row():
    Counter.objects.create(name="stock", value=7)
    return lambda: Counter.objects.get(name="stock").value


@pytest.mark.engine("postgresql", "mariadb")
@pytest.mark.parametrize("guard", [True, False])
def test_a_holder_that_was_stopped_past_its_ttl_writes_nothing_that_is_guarded(guard, doomed, row, using):
    worker = doomed()
    worker.start(jobs.write_under, "stock", "stock", 1, guard=guard, ttl=0.6, using=using)
    token = worker.hear()
    worker.stop()
    with db_lock("stock", using=using, timeout=20) as hold:
        assert hold.token > token
        worker.resume()
        worker.tell()
        outcome, message = worker.hear()
        if guard:
            assert outcome == "LockLost"
            assert "'stock' was lost" in message
            assert row() == 7
        else:
            assert outcome == "written, and lost"
            assert row() == 1, "the control shows that the guard is what protects"


@pytest.mark.engine("postgresql", "mariadb")
def test_a_process_that_is_stopped_inside_keeps_everybody_out_until_it_commits(doomed, row, elsewhere, using):
    worker = doomed()
    worker.start(jobs.write_under, "stock", "stock", 1, guard=True, stop_inside=True, ttl=2.0, using=using)
    worker.hear()
    assert worker.hear() == "inside"
    worker.stop()
    time.sleep(3)
    assert db_lock("stock", using=using).try_acquire() is None
    assert row() == 7
    worker.resume()
    worker.tell()
    assert worker.hear()[0] == "written"
    assert row() == 1
    with db_lock("stock", using=using, timeout=10):
        pass


def test_renewal_meanwhile_is_neither_blocked_nor_taken_for_a_loss(row, using):
    lost = []
    with db_lock("stock", ttl=1.5, using=using, on_lost=lost.append) as hold:
        with hold.atomic():
            Counter.objects.update(value=2)
            time.sleep(2.0)
        hold.check()
        time.sleep(1.8)
        hold.check()
    assert row() == 2
    assert lost == []


def test_the_transaction_is_rolled_back_as_usual_and_the_hold_goes_on(row, using):
    with db_lock("stock", using=using) as hold:
        with pytest.raises(ZeroDivisionError), hold.atomic():
            Counter.objects.update(value=2)
            raise ZeroDivisionError
        assert row() == 7
        with hold.atomic():
            Counter.objects.update(value=3)
        hold.check()
    assert row() == 3


def test_what_was_lost_before_is_refused_and_the_caller_s_connection_is_usable(row, using, elsewhere):
    hold = db_lock("stock", using=using, renew=False).acquire()
    ResourceLock.objects.filter(pk="stock").update(owner="another", version=hold.token + 1)
    with pytest.raises(LockLost), hold.atomic():
        Counter.objects.update(value=2)
    assert row() == 7
    assert not hold.held


def test_savepoints_and_durable_are_those_of_django(row, using):
    with db_lock("stock", using=using) as hold:
        with hold.atomic(durable=True):
            with pytest.raises(IntegrityError), transaction.atomic():
                Counter.objects.create(name="stock")
            Counter.objects.update(value=4)
        assert row() == 4
        with transaction.atomic():
            with pytest.raises(RuntimeError, match="durable"), hold.atomic(durable=True):
                pass
            with hold.atomic():
                Counter.objects.update(value=5)
        assert row() == 5


@pytest.mark.parametrize("savepoint", [True, False])
def test_a_hold_goes_on_in_the_transaction_around_a_guarded_part_that_is_rolled_back(row, using, savepoint):
    lost = []
    with db_lock("stock", using=using, on_lost=lost.append) as hold:
        with transaction.atomic():
            with pytest.raises(ZeroDivisionError), transaction.atomic(), hold.atomic(savepoint=savepoint):
                Counter.objects.update(value=2)
                raise ZeroDivisionError
            began = time.monotonic()
            hold.check()
            # Its own transaction still has the row, on some engines.
            in_time(time.monotonic() - began, 5.0)
            with hold.atomic():
                Counter.objects.update(value=3)
        hold.check()
    assert row() == 3
    assert lost == []


def test_a_guarded_part_that_is_to_be_rolled_back_is_so_and_the_hold_goes_on(row, using):
    with db_lock("stock", using=using) as hold:
        with hold.atomic():
            Counter.objects.update(value=5)
            transaction.set_rollback(True)
        assert row() == 7
        with hold.atomic(), db_lock("stock", using=using):
            Counter.objects.update(value=6)
            transaction.set_rollback(True)
        assert row() == 7
        hold.check()
        with hold.atomic():
            Counter.objects.update(value=8)
    assert row() == 8


def test_a_guarded_part_that_is_rolled_back_lengthens_no_lease(row, using):
    with db_lock("stock", using=using, ttl=5.0, renew=False) as hold:
        with transaction.atomic():
            with pytest.raises(ZeroDivisionError), transaction.atomic():
                with hold.atomic():
                    time.sleep(0.3)
                raise ZeroDivisionError
        on_the_row = ResourceLock.objects.by_clock().get(pk="stock").seconds_left
        # SQLite's clock ticks in milliseconds.
        assert hold.remaining <= on_the_row + 0.001


def test_a_row_that_could_not_be_locked_is_renewed_as_before(row, using, monkeypatch):
    backend = backends[using]

    def fail(claim, database):
        raise LockBackendError("Somebody else has had the row for too long.")

    hold = db_lock("stock", using=using).acquire()
    with transaction.atomic():
        with monkeypatch.context() as patched:
            patched.setattr(backend, "pin", fail)
            with pytest.raises(LockBackendError), hold.atomic():
                pass
        assert not hold.pinned
    hold.release()


def test_that_the_database_could_not_be_asked_is_told_though_the_keeper_saw_the_pin_end_first(row, monkeypatch):
    with db_lock("stock") as hold:

        def fail(claim, database):
            hold.pinned_in.clear()
            raise LockBackendError("The connection was lost.")

        with monkeypatch.context() as patched:
            patched.setattr(backends["default"], "pin", fail)
            with pytest.raises(LockBackendError, match="was lost"), hold.atomic():
                pass


def test_a_slow_callback_that_the_block_has_registered_makes_no_loss_of_the_hold(row, using):
    lost = []
    with db_lock("stock", using=using, ttl=1.5, renew=False, on_lost=lost.append) as hold:
        with transaction.atomic(), hold.atomic():
            transaction.on_commit(lambda: time.sleep(0.3))
            time.sleep(1.8)
        hold.check()
    assert lost == []


def test_a_hold_that_was_told_to_be_lost_guards_nothing_though_nobody_has_the_key(row, using, until):
    lost = []
    hold = db_lock("stock", using=using, ttl=0.4, renew=False, on_lost=lost.append).acquire()
    until(lambda: lost)
    with pytest.raises(LockLost), hold.atomic():
        Counter.objects.update(value=2)
    assert row() == 7


@pytest.mark.engine("postgresql", "mariadb")
def test_where_autocommit_is_off_nothing_is_guarded_or_kept_for_an_end_that_django_does_not_tell(row, using, elsewhere):
    hold = db_lock("stock", using=using).acquire()
    connection.set_autocommit(False)
    try:
        with transaction.atomic():
            with pytest.raises(RuntimeError, match="[Aa]utocommit is switched off"), hold.atomic():
                pass
            hold.release()
        elsewhere(db_lock("stock", using=using, timeout=5).acquire).release()
    finally:
        connection.rollback()
        connection.set_autocommit(True)


def test_who_enters_the_lock_again_inside_has_it(row, using):
    lock = db_lock("stock", using=using)
    with lock as hold:
        with hold.atomic(), lock as again:
            assert again is hold
            Counter.objects.update(value=6)
        assert hold.count == 1
        hold.check()
    assert row() == 6


def test_within_a_transaction_the_hold_belongs_to_it_already(row, using):
    with transaction.atomic(), db_lock("stock", using=using) as hold:
        assert hold.scope == "transaction"
        with hold.atomic():
            Counter.objects.update(value=8)
    assert row() == 8


@pytest.mark.engine("postgresql", "mariadb")
def test_a_share_is_guarded_too(row, elsewhere):
    lock = db_rwlock("stock", ttl=1.5, timeout=0)
    with lock.read() as hold:
        with hold.atomic():
            # Longer than its ttl and the grace.
            time.sleep(2.5)
            assert elsewhere(lock.write().try_acquire) is None
        assert elsewhere(lock.write().try_acquire) is None
        hold.check()


@pytest.mark.engine("postgresql", "mariadb")
def test_a_guarded_share_keeps_nobody_waiting_who_does_not_want_its_key(row, workers, until):
    (holder,) = workers(1)
    holder.start(jobs.share_under_guard, "stock", ttl=1.5)
    token = holder.hear()
    began = time.monotonic()
    backend = backends["default"]
    with pytest.raises(LockTimeout):
        db_lock("stock", timeout=1.0).acquire()
    until(lambda: LockClaim.objects.by_clock().get(version=token).seconds_left < -backend.grace)
    assert backend.tidy("stock") == (0, 0)
    assert backend.end_share("stock", token) is False
    assert sum(backend.reap()) == 0
    # As one who died in line, and of whom nothing was heard for long.
    with pytest.raises(LockTimeout):
        db_lock("stock", timeout=0.2).acquire()
    took = time.monotonic() - began
    holder.tell()
    assert holder.hear() == "ended"
    in_time(took, 15)
    db_lock("stock", timeout=5).acquire().release()


@pytest.fixture(params=["READ COMMITTED", "REPEATABLE READ"])
def guard_share(request, row, workers):
    """
    Return a function that has a transaction of another process keep a share of "stock"; it returns the token.

    Once at each of the levels that a project may run its database at.
    """
    (holder,) = workers(1)

    def keep():
        holder.start(jobs.share_under_guard, "stock", level=request.param)
        return holder.hear()

    with jobs.isolated(request.param):
        if connection.vendor == "mysql":
            with connection.cursor() as cursor:
                # A statement that waits at all is one too many, and 50 seconds are longer than a test.
                cursor.execute("SET innodb_lock_wait_timeout = 5")
        yield keep
    holder.tell()
    assert holder.hear() == "ended"


@pytest.mark.engine("postgresql", "mariadb")
def test_a_guarded_share_keeps_nobody_from_a_key_whose_readers_have_died(guard_share):
    rows.free("price")
    for number in range(3):
        rows.stale_share("price", 1001 + number)
    guard_share()
    began = time.monotonic()
    db_lock("price", timeout=4).acquire().release()
    in_time(time.monotonic() - began, 4.0)


@pytest.mark.engine("postgresql", "mariadb")
def test_a_guarded_share_keeps_no_reader_of_another_key_in_line(guard_share):
    rows.free("price")
    waiting = [rows.waits("price", shared=True).pk for _ in range(3)]
    guard_share()
    # The last one before the share's in the order of the owners, which are drawn by lot.
    waiting.append(rows.waits("price", shared=True, owner=rows.OWNER[:16] + "f" * 16).pk)
    backends["default"].move_on("price")
    admitted = LockClaim.objects.filter(pk__in=waiting, version__gt=1000).order_by("pk")
    tokens = list(admitted.values_list("version", flat=True))
    assert len(tokens) == 4
    assert tokens == sorted(set(tokens)), "in the order of the line"
    assert ResourceLock.objects.filter(pk="price", shares=4, waiters=0, version=tokens[-1]).exists()


@pytest.mark.engine("postgresql", "mariadb")
def test_a_guarded_share_keeps_no_claim_of_another_key_from_being_counted_or_forgotten(guard_share):
    rows.held("price")
    for _ in range(3):
        rows.waits("price", counted=False)
        rows.dead("price")
    ResourceLock.objects.filter(pk="price").update(waiters=0)
    guard_share()
    assert backends["default"].tidy("price") == (0, 3)
    assert rows.now("price").waiters == 3
    assert LockClaim.objects.filter(key_resource="price", counted=True).count() == 3


@pytest.mark.engine("postgresql", "mariadb")
def test_a_person_can_end_shares_and_take_out_claims_beside_a_share_that_is_guarded(guard_share):
    rows.free("stock")
    tokens = [rows.shares("stock", 1001 + number).version for number in range(3)]
    # Not heard of, but not for so long that they are forgotten by themselves.
    places = [rows.claim("stock", timezone.now() - timedelta(seconds=1)).pk for _ in range(3)]
    guarded = guard_share()
    backend = backends["default"]
    assert [backend.end_share("stock", token) for token in tokens] == [True] * 3
    assert [backend.take_out("stock", place) for place in places] == [True] * 3
    assert not backend.end_share("stock", guarded)


@pytest.mark.engine("postgresql", "mariadb")
def test_two_threads_that_guard_by_the_same_share_wait_for_each_other_but_not_without_a_bound(row, monkeypatch):
    """As by a lock that is not shared."""
    monkeypatch.setattr("dlocks.backends.database.PERSISTENT_FOR", 0.5)
    hold = db_rwlock("stock").read().acquire()
    inside, leave = threading.Event(), threading.Event()

    def guard():
        try:
            with hold.atomic():
                inside.set()
                leave.wait(20)
        finally:
            connections.close_all()

    thread = threading.Thread(target=guard)
    thread.start()
    assert inside.wait(20)
    try:
        with pytest.raises(LockBackendError, match="'stock' .* is locked by another transaction"), hold.atomic():
            pass
        monkeypatch.setattr("dlocks.backends.database.PERSISTENT_FOR", 20)
        timer = threading.Timer(0.5, leave.set)
        timer.start()
        with hold.atomic():
            Counter.objects.update(value=8)
        assert row() == 8
        timer.join()
    finally:
        leave.set()
        thread.join(30)
        hold.release()


def test_a_lock_that_is_not_in_the_database_cannot_guard_it():
    with db_lock("stock", using="memory") as hold:
        with pytest.raises(RuntimeError, match="MemoryBackend cannot guard a transaction"), hold.atomic():
            pass


def test_two_statements_more_than_the_transaction_itself(row, django_assert_num_queries):
    with db_lock("stock") as hold:
        # BEGIN and COMMIT are counted.
        with django_assert_num_queries(5), hold.atomic():
            Counter.objects.update(value=2)


@pytest.mark.engine("postgresql", "mariadb")
def test_a_second_alias_of_the_same_database_is_guarded_and_another_database_is_refused(row, workers):
    (worker,) = workers(1)
    worker.start(jobs.write_by_second_alias, "stock", ttl=1.5)
    assert worker.hear() == "inside"
    # Longer than its ttl and the grace.
    time.sleep(2.5)
    assert db_lock("stock").try_acquire() is None
    worker.tell()
    another, of_a_transaction = worker.hear()
    assert "'elsewhere' is another one" in another
    assert "cannot guard another one on 'second'" in of_a_transaction
    assert row() == 3


@pytest.mark.engine("postgresql", "mariadb")
@pytest.mark.parametrize("keys", [("stock",), ("stock", "price")], ids=["one key", "several"])
@pytest.mark.parametrize("release_at", ["exit", "transaction"])
def test_a_key_that_a_second_alias_keeps_goes_with_the_transaction_there(row, keys, release_at, using, workers):
    (worker,) = workers(1)
    worker.start(jobs.leave_by_second_alias, *keys, using=using, release_at=release_at)
    # At once: it does not wait for a row that it has locked itself.
    assert worker.hear(10) == "left"
    assert db_lock(keys[-1], using=using).try_acquire() is None
    worker.tell()
    assert worker.hear() == "ended"
    db_lock(*keys, using=using, timeout=5).acquire().release()


def test_in_a_transaction_longer_than_the_ttl_the_hold_is_not_lost(row, until):
    """It cannot be renewed meanwhile, and need not be: nobody takes the key before that transaction has ended."""
    lock = db_lock("stock", ttl=1.5)
    with lock as hold:
        with hold.atomic():
            until(lambda: not hold.held)
            hold.check()
            hold.renew()
            with lock as again, again.atomic():
                assert again.token == hold.token
                Counter.objects.update(value=3)
        hold.check()
        hold.check()
    assert row() == 3


def test_a_hold_that_is_released_in_its_own_transaction_after_the_ttl_goes_with_the_commit(row, until):
    hold = db_lock("stock", ttl=1.5).acquire()
    with hold.atomic():
        Counter.objects.update(value=3)
        until(lambda: not hold.held)
        hold.release()
    assert row() == 3
    with db_lock("stock").try_acquire() as other:
        assert other.token > hold.token


@pytest.mark.engine("postgresql", "mariadb")
@pytest.mark.parametrize("roll_back", [False, True])
def test_to_give_back_in_a_guarded_transaction_while_others_wait_neither_ends_nor_changes_it(
    row, using, roll_back, workers, until
):
    (waiter,) = workers(1)
    with transaction.atomic():
        with db_lock("stock", using=using, scope="lease", release_at="exit") as hold:
            waiter.start(jobs.wait_for, "stock", using=using, timeout=30)
            assert waiter.hear() == "waiting"
            until(lambda: hold.waiting == 1)
            with hold.atomic():
                Counter.objects.update(value=3)
        assert as_ever()
        transaction.set_rollback(roll_back)
    assert row() == (7 if roll_back else 3)
    _, token = waiter.hear()
    assert token > hold.token


@pytest.mark.engine("postgresql", "mariadb")
@pytest.mark.parametrize("lock", [db_lock, lambda key, **policy: db_rwlock(key, **policy).read()], ids=["key", "share"])
def test_to_give_back_in_a_guarded_transaction_keeps_nobody_from_leaving_the_line(row, using, lock, workers, until):
    """… who does not want to wait for the end of that transaction."""
    (waiter,) = workers(1)
    with transaction.atomic():
        with lock("stock", using=using, scope="lease", release_at="exit") as hold:
            waiter.start(jobs.acquire, "stock", using=using, timeout=2.0)
            until(lambda: hold.waiting == 1)
            with hold.atomic():
                Counter.objects.update(value=3)
        assert waiter.hear(20) == "LockTimeout"
    assert row() == 3
    assert isinstance(waiter.call(jobs.acquire, "stock", using=using, timeout=10), int)
    waiter.call(jobs.release_all)


@pytest.mark.engine("postgresql", "mariadb")
@pytest.mark.parametrize("keys", [("stock",), ("stock", "price")], ids=["one key", "several"])
def test_to_give_back_in_a_guarded_transaction_changes_nothing_of_how_that_commits(row, using, keys, elsewhere):
    with transaction.atomic():
        with db_lock(*keys, using=using, scope="lease", release_at="exit") as hold, hold.atomic():
            Counter.objects.update(value=3)
        assert as_ever()
        assert elsewhere(db_lock(keys[-1], using=using).try_acquire) is None
    assert row() == 3
    elsewhere(db_lock(*keys, using=using, timeout=0).acquire).release()


def as_ever():
    """Whether this transaction commits as any does."""
    names = {"postgresql": ("lock_timeout", "synchronous_commit"), "mysql": ()}[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1" + "".join(f", current_setting('{name}')" for name in names))
        return cursor.fetchone() == (1, "0", "on")[: 1 + len(names)]


def test_several_keys_guard_together(row):
    with db_lock("stock", "price") as hold:
        with hold.atomic(durable=True):
            Counter.objects.update(value=3)
        hold.check()
        ResourceLock.objects.filter(pk="stock").update(owner="another")
        with pytest.raises(LockLost), hold.atomic():
            Counter.objects.update(value=4)
        with pytest.raises(LockLost):
            hold.release()
    assert row() == 3


async def test_a_coroutine_calls_a_function_in_it(row):
    from asgiref.sync import sync_to_async

    async with db_lock("stock") as hold:
        assert await hold.aatomic(Counter.objects.filter(name="stock").update, value=9) == 1
    assert await sync_to_async(row)() == 9


def test_a_slow_callback_of_the_same_commit_does_not_make_an_error_of_it(row):
    """It comes before the guard's own, when the transaction is committed and nothing marks it any more."""
    with db_lock("stock", ttl=1.5) as hold:
        with transaction.atomic():
            transaction.on_commit(lambda: time.sleep(0.3))
            with hold.atomic():
                Counter.objects.update(value=2)
        hold.check()
        assert not hold.pinned_in
    assert row() == 2


def test_the_block_s_own_error_passes_when_the_connection_is_gone(row):
    with db_lock("stock") as hold:
        with pytest.raises(ZeroDivisionError), hold.atomic():
            connection.close()
            # The keeper finds that the transaction has ended.
            time.sleep(0.3)
            1 / 0  # noqa: B018
        assert hold.held


async def test_a_coroutine_function_is_refused_and_not_silently_never_awaited(row):
    counter = await Counter.objects.aget(name="stock")
    counter.value = 5
    async with db_lock("stock") as hold:
        with pytest.raises(TypeError, match="give it the synchronous twin"):
            await hold.aatomic(counter.asave)
        await hold.aatomic(counter.save)
    assert (await Counter.objects.aget(name="stock")).value == 5
