"""Locks inside transactions, and leases that meet a transaction."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import DatabaseError, IntegrityError, connection, transaction
from django.test import Client, TestCase, override_settings
from django.test.utils import CaptureQueriesContext

from dlocks import (
    LockBackendError,
    LockError,
    LockLost,
    LockNotAwaitable,
    LockTimeout,
    db_lock,
    db_rwlock,
    db_semaphore,
    locked_view,
)
from dlocks.models import ResourceLock
from tests import jobs, rows
from tests.for_each import FAMILY, ROWS, for_each
from tests.models import Counter
from tests.settings import ENGINE
from tests.timing import eventually, in_time
from tests.volume import volume

pytest_plugins = ["tests.promises.stops"]
pytestmark = pytest.mark.django_db(transaction=True)

SERVERS = pytest.mark.engine("postgresql", "mariadb", "mysql")
# For what happens in this process. Its statements are those of other tests.
TWO_SERVERS = pytest.mark.engine("postgresql", "mariadb")


# Inside a transaction.


@pytest.mark.driver
@FAMILY
def test_a_lock_in_a_transaction_lasts_until_its_outermost_end(using, is_busy):
    """Holds can be nested or follow each other, and later ones have larger tokens."""
    lock = db_lock("stock:7", using=using)
    with lock as before:
        pass
    with transaction.atomic():
        with transaction.atomic():
            with lock as outer:
                assert (outer.scope, outer.held) == ("transaction", True)
                assert outer.remaining == float("inf")
                with lock as inner:
                    assert inner is outer
                    row = ResourceLock.objects.get()
                    assert (inner.count, row.hold_count) == (2, 2)
                row = ResourceLock.objects.get()
                assert (outer.count, row.hold_count) == (1, 1)
                outer.check()
                outer.renew()
                assert is_busy(using=using)
            assert is_busy(using=using)
        with pytest.raises(ZeroDivisionError), lock as second:
            1 / 0  # noqa: B018
        row = ResourceLock.objects.get()
        assert (row.status, row.hold_count) == ("F", 0)
        assert is_busy(using=using)
        assert not outer.held
    assert not is_busy(using=using)
    with lock as after:
        assert before.token < outer.token < second.token < after.token


@pytest.mark.driver
@FAMILY
def test_a_rollback_leaves_no_trace(using, is_busy):
    with db_lock("stock:7") as before:
        pass
    for kind in (using, using):
        with (
            pytest.raises(ZeroDivisionError),
            transaction.atomic(),
            db_lock("stock:7", using=kind),
        ):
            1 / 0  # noqa: B018
    row = ResourceLock.objects.by_clock().get()
    assert (row.version, row.status, row.state) == (before.token, "S", "free")
    assert not is_busy(using=using)


@FAMILY
def test_tokens_grow_although_transactions_are_rolled_back(using):
    """Several of them may take a token within a millisecond."""
    lock, tokens = db_lock("stock:7", using=using), []
    for number in range(300):
        if number % 10 == 9:
            with lock as hold:
                tokens.append(hold.token)
        with pytest.raises(ZeroDivisionError), transaction.atomic(), lock as hold:
            tokens.append(hold.token)
            1 / 0  # noqa: B018
    assert tokens == sorted(set(tokens))


@pytest.mark.driver
@FAMILY
def test_the_rollback_of_an_inner_block_ends_its_lock(using, in_other_thread):
    """On PostgreSQL the row is free then. On InnoDB it stays locked."""
    lock = db_lock("stock:7", using=using)
    with lock:
        pass
    with transaction.atomic():
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            hold = lock.acquire()
            1 / 0  # noqa: B018
        assert not hold.held
        with lock as again:
            assert again is not hold
            assert again.held
            assert in_other_thread(lock.try_acquire) is None


@pytest.mark.front
def test_reentering_a_rolled_back_lock_raises_lock_lost(is_busy):
    """A nested block may end in a transaction that will be rolled back."""
    with db_lock("stock:7"):
        pass
    with pytest.raises(LockLost), transaction.atomic():
        sid = connection.savepoint()
        hold = db_lock("stock:7").acquire()
        connection.savepoint_rollback(sid)
        with db_lock("stock:7"):
            pytest.fail("entered")
    assert not hold.held
    with transaction.atomic():
        with db_lock("stock:7"), db_lock("stock:7"):
            Counter.objects.create(name="undone")
            transaction.set_rollback(True)
    assert not Counter.objects.exists()
    assert not is_busy()
    # A backend without transactions releases at the commit.
    with transaction.atomic():
        with db_lock("stock:7", using="memory") as hold:
            assert hold.scope == "lease"
        assert is_busy(using="memory")
    assert not is_busy(using="memory")


@pytest.mark.driver
def test_a_database_error_in_the_block_is_raised_unchanged(is_busy):
    Counter.objects.create(name="one")
    with pytest.raises(IntegrityError), transaction.atomic(), db_lock("stock:7"):
        Counter.objects.create(name="one")
    assert not is_busy()
    # PostgreSQL has aborted the transaction, but no error was raised. The end of the
    # block must not hide that.
    with pytest.raises(DatabaseError), transaction.atomic():
        with (
            db_lock("stock:7"),
            pytest.raises(DatabaseError),
            connection.cursor() as cursor,
        ):
            cursor.execute("SELECT no_such_column FROM no_such_table")
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        raise DatabaseError("the others go on")
    assert not is_busy()


# On SQLite this rolls back the transaction, as a full disk does.
REFUSE_RELEASES = {
    "postgresql": """
BEGIN
  IF NEW.hold_count = 0 THEN RAISE 'refused by a test'; END IF;
  RETURN NEW;
END
""",
    "sqlite": """
WHEN NEW.hold_count = 0 BEGIN SELECT RAISE(ROLLBACK, 'refused by a test'); END
""",
}


@pytest.mark.driver
@pytest.mark.engine("postgresql", "sqlite")
@for_each("keys", [("stock:7",), ("stock:7", "stock:8")])
def test_a_release_that_fails_in_a_transaction_hides_no_rollback(keys):
    """The COMMIT after it would write nothing, and raise no error."""
    for key in keys:
        db_lock(key).acquire().release()
    with rows.trigger("BEFORE UPDATE", ResourceLock, **REFUSE_RELEASES):
        with pytest.raises(LockLost, match="the server has rolled back its trans"):
            with transaction.atomic(), db_lock(*keys):
                Counter.objects.create(name="undone")
    assert not Counter.objects.exists()
    with db_lock(*keys, timeout=0):
        pass


@SERVERS
@FAMILY
def test_contention_does_not_break_the_callers_transaction(using, worker):
    """The caller does not block the holder, and acquires the key after its release."""
    with transaction.atomic():
        with worker.doing(jobs.hold, "stock:7", using=using) as first:
            Counter.objects.create(name="mine")
            with pytest.raises(LockTimeout):
                db_lock("stock:7", using=using, timeout=0.1).acquire()
            assert db_lock("stock:7", using=using).try_acquire() is None
            Counter.objects.create(name="mine too")
        with db_lock("stock:7", using=using) as hold:
            assert hold.scope == "transaction"
            assert hold.token > first
    assert Counter.objects.all().delete()[0] == 2


@for_each(
    "case",
    [("default", True), ("default", False), ("optimistic", True), ("insert", False)],
)
def test_a_waiter_acquires_the_key_when_the_transaction_ends(case, workers):
    using, roll_back = case
    holder, waiter = workers(2)
    policy = {"using": using, "roll_back": roll_back}
    with holder.doing(jobs.hold_in_transaction, "stock:7", **policy) as first:
        waiter.start(jobs.wait_quietly, "stock:7", using=using, timeout=30)
        assert db_lock("stock:7", using=using).try_acquire() is None
        keeper = {
            "postgresql": "session .* in a transaction",
            # Between two looks a second apart, it may not be known.
            "mysql": "(session .* in a transaction|an open transaction)",
        }.get(ENGINE, "an open transaction")
        with pytest.raises(LockTimeout, match=f"held by {keeper}"):
            db_lock("stock:7", using=using, timeout=0.1).acquire()
    _, token = waiter.hear()
    assert roll_back or token > first


@SERVERS
@FAMILY
def test_a_transaction_acquires_its_key_again_before_others(using, worker, in_queue):
    """The transaction keeps the key. Behind the waiters, it would wait for itself."""
    lock = db_lock("stock:7", using=using, timeout=5)
    with transaction.atomic():
        with lock:
            worker.start(jobs.wait_quietly, "stock:7", using=using, timeout=30)
            in_queue(1)
        with lock as again:
            assert again.held
    _, token = worker.hear()
    assert token > again.token


@SERVERS
def test_a_key_is_acquired_again_after_the_rollback_of_an_inner_block(
    workers, threads, in_queue
):
    """On InnoDB, the transaction still keeps the key from those who wait."""
    holder, waiter = workers(2)
    lock = db_lock("stock:7", timeout=8)

    def acquire_twice():
        with transaction.atomic():
            with pytest.raises(ZeroDivisionError), transaction.atomic(), lock:
                1 / 0  # noqa: B018
            with lock as again:
                return again.held

    with holder.doing(jobs.hold, "stock:7"):
        thread = threads(acquire_twice)
        in_queue(1)
        waiter.start(jobs.wait_quietly, "stock:7", timeout=30)
        in_queue(2)
    thread.join(60)
    assert thread.results == [True]
    waiter.hear()


@TWO_SERVERS
@FAMILY
def test_the_timeout_limits_the_wait_for_a_transaction(using, worker):
    holding = worker.doing(jobs.hold_in_transaction, "stock:7", using=using)
    with holding, transaction.atomic():
        started = time.monotonic()
        with pytest.raises(LockTimeout):
            db_lock("stock:7", using=using, timeout=0.3).acquire()
        took = time.monotonic() - started
    assert took >= 0.3
    in_time(took, 5)


@TWO_SERVERS
def test_a_transaction_asks_once_for_a_key_that_others_read(in_other_thread):
    in_other_thread(db_rwlock("stock:7").read().acquire)
    with transaction.atomic(), CaptureQueriesContext(connection) as queries:
        assert db_lock("stock:7").try_acquire() is None
    asked = [one["sql"] for one in queries if "UPDATE" in one["sql"]]
    assert len(asked) == 1


@TWO_SERVERS
@FAMILY
def test_a_new_key_in_a_transaction_does_not_block_others(using, is_busy):
    """The row is created outside the transaction."""
    with transaction.atomic(), db_lock("new", using=using):
        started = time.monotonic()
        assert is_busy("new", using=using)
        took = time.monotonic() - started
    assert not is_busy("new", using=using)
    in_time(took, 3)


@pytest.mark.driver
def test_a_lease_may_contain_a_transaction(is_busy):
    with db_lock("stock:7") as hold:
        with transaction.atomic():
            with db_lock("stock:7") as inner:
                assert inner is hold
                assert hold.count == 2
            with pytest.raises(RuntimeError, match=r"hold.atomic\(\)"):
                db_lock("stock:7", scope="transaction").acquire()
            hold.check()
        assert hold.scope == "lease"
        assert hold.held
        assert is_busy()
    assert not is_busy()


@pytest.mark.front
def test_transaction_scope_without_a_transaction_is_refused(django_assert_num_queries):
    with (
        django_assert_num_queries(0),
        pytest.raises(RuntimeError, match=r"atomic\(using='default'\)"),
    ):
        db_lock("stock:7", scope="transaction").acquire()
    with transaction.atomic(), pytest.raises(RuntimeError, match="MemoryBackend"):
        db_lock("stock:7", using="memory", scope="transaction").acquire()


@pytest.mark.driver
def test_a_lock_with_autocommit_switched_off_is_refused(is_busy):
    """Django does not report when such a transaction ends."""
    connection.ensure_connection()
    transaction.set_autocommit(False)
    try:
        with pytest.raises(RuntimeError, match=r"Autocommit is off.*atomic\(\)"):
            db_lock("stock:7").acquire()
        with transaction.atomic(), db_lock("stock:7") as hold:
            assert hold.scope == "transaction"
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert not is_busy()


# Isolation.


@SERVERS
@FAMILY
@for_each("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_lock_with_an_old_snapshot_is_refused(using, level, is_busy):
    with db_lock("stock:7"):
        pass
    for key in ("stock:7", "new"):
        with jobs.isolated(level), transaction.atomic():
            Counter.objects.count()
            with pytest.raises(
                RuntimeError, match=f"runs at {level}.*Acquire the lock before"
            ):
                db_lock(key, using=using).acquire()
            # Nothing was locked, and nothing was aborted.
            assert not is_busy(using=using)
            Counter.objects.create(name=key)
    assert Counter.objects.all().delete()[0] == 2


@pytest.mark.engine("mariadb", "mysql")
@FAMILY
def test_a_free_key_at_read_uncommitted_is_refused_and_not_busy(using, is_busy):
    """Its lease can guard such a transaction."""
    with jobs.isolated("READ UNCOMMITTED"):
        for _ in range(2):
            with db_lock("stock:7", using=using) as hold, hold.atomic():
                hold.check()
        with transaction.atomic():
            with pytest.raises(RuntimeError, match="runs at READ UNCOMMITTED"):
                db_lock("stock:7", using=using).acquire()
            assert not is_busy(using=using)


@TWO_SERVERS
@for_each(
    "case",
    [
        ("default", "SERIALIZABLE"),
        ("optimistic", "REPEATABLE READ"),
        ("insert", "REPEATABLE READ"),
    ],
)
def test_a_lease_may_precede_a_snapshot_transaction(case, is_busy):
    """Inside such a transaction, a lease causes a warning."""
    using, level = case
    lock = db_lock("stock:7", using=using, scope="lease")
    message = rf"at {level}\. Its snapshot may be older"
    with jobs.isolated(level):
        for _ in range(2):
            with lock as hold, transaction.atomic():
                Counter.objects.count()
                hold.check()
                assert is_busy(using=using)
        assert not is_busy(using=using)
        with transaction.atomic(), pytest.warns(RuntimeWarning, match=message):
            with lock as hold:
                assert hold.held


@SERVERS
@FAMILY
@for_each("there", [True, False])
def test_a_busy_key_does_not_block_adjacent_keys(using, there, workers):
    keys = ("stock:6", "stock:7", "stock:8")
    for key in keys if there else keys[::2]:
        with db_lock(key):
            pass
    one, other = (
        worker.doing(jobs.hold_in_transaction, key, using=using)
        for key, worker in zip(keys[::2], workers(2), strict=True)
    )
    with transaction.atomic():
        Counter.objects.create(name="before")
        with one, other:
            for key in keys[::2]:
                assert db_lock(key, using=using).try_acquire() is None
            hold = db_lock("stock:7", using=using).try_acquire()
            assert hold.scope == "transaction"
            Counter.objects.create(name="after")
    assert set(Counter.objects.values_list("name", flat=True)) == {"before", "after"}
    Counter.objects.all().delete()


# A lease inside a transaction.


@pytest.mark.engine("postgresql")
@FAMILY
def test_a_lease_in_a_transaction_starts_when_it_is_acquired(using):
    """``now()`` is when the transaction began, so the lease would end too soon."""
    with transaction.atomic():
        Counter.objects.count()
        with (
            db_lock("stock:7", using=using, scope="lease"),
            connection.cursor() as cursor,
        ):
            cursor.execute(
                "SELECT begin_time > now() AND end_time > now() + '30 s' FROM"
                " dlocks_resourcelock"
            )
            assert cursor.fetchall() == [(True,)]


@SERVERS
@FAMILY
@for_each("keys", [("stock:7",), ("stock:7", "stock:8")])
def test_a_lease_in_a_transaction_is_released_after_the_commit(using, keys, is_busy):
    """The same thread can enter it again until then."""
    lock = db_lock(*keys, using=using, scope="lease", timeout=0)
    with transaction.atomic():
        with lock as hold:
            assert hold.scope == "lease"
            assert is_busy(using=using)
            with lock as inner:
                assert inner.tokens == hold.tokens
        assert all(is_busy(key, using) for key in keys)
        # A hold of several keys is a new one each time.
        assert hold.held or len(keys) > 1
        with lock as again:
            assert again.held
            assert (again.tokens, again.count) == (hold.tokens, 1)
        assert is_busy(using=using)
    assert not any(is_busy(key, using) for key in keys)
    assert not hold.held


@TWO_SERVERS
def test_a_lease_is_released_when_the_atomic_block_has_ended(is_busy, stops):
    """A thread of dlocks may see the end of the transaction first.

    This happens if another on-commit callback takes long. An interrupted release is
    repeated. If the release fails, other callbacks are called, and the block ends as
    committed.
    """
    begun, asked, called = threading.Event(), [], []

    def slow(usual, *_):
        begun.set()
        time.sleep(0.3)
        return usual()

    def interrupted(usual, *arguments):
        asked.append(arguments)
        if len(asked) == 1:
            raise KeyboardInterrupt
        return usual()

    def fail(*_):
        raise LockBackendError("The server is gone.")

    stops.replace("release", slow)
    with transaction.atomic():
        transaction.on_commit(lambda: begun.wait(30))
        with db_lock("stock:7", scope="lease"):
            pass
    assert not is_busy()
    stops.replace("release", interrupted)
    with pytest.raises(KeyboardInterrupt), transaction.atomic():
        with db_lock("stock:7", scope="lease"):
            pass
    assert not is_busy()
    stops.replace("release", fail)
    with transaction.atomic():
        with db_lock("stock:8", scope="lease"):
            pass
        transaction.on_commit(lambda: called.append(True))
    assert called == [True]


@TWO_SERVERS
def test_a_lease_in_a_transaction_is_released_after_a_rollback(is_busy, until):
    """A rollback makes Django forget its on-commit callbacks.

    A garbage collection may come before the keeper checks.
    """
    with transaction.atomic():
        with transaction.atomic():
            with db_lock("stock:7", scope="lease") as hold:
                pass
            transaction.set_rollback(True)
        assert hold.held
        assert is_busy()
        transaction.set_rollback(True)
        del hold
    gc.collect()
    until(lambda: not is_busy())


@pytest.mark.driver
@for_each("keys", [("stock:7",), ("stock:7", "stock:8")])
@for_each("roll_back", [False, True])
def test_a_lease_released_in_a_transaction_becomes_free(
    keys, roll_back, is_busy, until
):
    """SQLite has one writer, so the release cannot use another connection."""
    hold = db_lock(*keys, release_at="exit").acquire()
    with transaction.atomic():
        Counter.objects.create(name="stock", value=7)
        hold.release()
        transaction.set_rollback(roll_back)
    until(lambda: not any(map(is_busy, keys)))
    Counter.objects.all().delete()


@TWO_SERVERS
def test_a_lease_survives_the_rollback_of_its_transaction(is_busy):
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        hold = db_lock("stock:7", scope="lease").acquire()
        1 / 0  # noqa: B018
    hold.check()
    assert is_busy()
    hold.release()
    assert not is_busy()


@pytest.mark.engine("sqlite")
@FAMILY
def test_on_sqlite_a_lease_inside_a_transaction_is_refused(using):
    for keys in ("stock:7",), ("stock:7", "stock:8"):
        with (
            transaction.atomic(),
            pytest.raises(RuntimeError, match="SQLite has one writer"),
        ):
            db_lock(*keys, using=using, scope="lease").acquire()


@pytest.mark.engine("sqlite")
@FAMILY
def test_on_sqlite_a_transaction_that_cannot_write_any_more_gets_an_error(
    using, monkeypatch, in_other_thread
):
    """The key is free. To report it as busy would skip the work in silence."""

    def write():
        db_lock("stock:8", using=using).acquire().release()

    db_lock("stock:7", using=using).acquire().release()
    connection.close()
    monkeypatch.setitem(connection.settings_dict["OPTIONS"], "transaction_mode", None)
    try:
        with transaction.atomic():
            assert not Counter.objects.exists()
            in_other_thread(write)
            with pytest.raises(LockBackendError, match="began as a reader") as caught:
                db_lock("stock:7", using=using).try_acquire()
            assert not hasattr(caught.value, "__notes__")
    finally:
        connection.close()


@pytest.mark.engine("sqlite")
@FAMILY
def test_on_sqlite_a_transaction_cannot_wait_for_a_lease(using, worker):
    """A single attempt and a decorator find the key busy, without such an error."""

    def whose(error, *args):
        return type(error), error.key, error.holder.holder

    def decorated(**options):
        return db_lock("stock:7", using=using, **options)(lambda: "done")()

    worker.call(jobs.hold, "stock:7", using=using)
    lock, pid = db_lock("stock:7", using=using, timeout=30), str(worker.process.pid)
    with transaction.atomic():
        started = time.monotonic()
        with pytest.raises(
            LockError, match="cannot be waited for inside a transaction"
        ) as caught:
            lock.acquire()
        took = time.monotonic() - started
        assert not isinstance(caught.value, (LockTimeout, LockBackendError))
        assert caught.value.key == "stock:7"
        assert pid in caught.value.holder.holder
        assert lock.try_acquire() is None
        assert db_lock("stock:7", "stock:8", using=using).try_acquire() is None
        with pytest.raises(LockTimeout):
            db_lock("stock:7", using=using, timeout=0).acquire()
        assert decorated(timeout=0, busy="skip") is None
        assert decorated(timeout=3, busy="skip") is None
        kind, key, who = decorated(timeout=3, busy=whose)
        assert (kind, key) == (LockTimeout, "stock:7")
        assert pid in who
        view = locked_view("stock:7", using=using, timeout=3)(lambda request: "done")
        assert view(None).status_code == 409
        with pytest.raises(LockNotAwaitable):
            decorated(timeout=3, busy="raise")
        with pytest.raises(LockNotAwaitable):
            db_rwlock("stock:7", using=using, timeout=20).read().acquire()
    # Now this process knows that the key has a queue.
    with pytest.raises(LockTimeout):
        db_lock("stock:7", using=using, timeout=0.1).acquire()
    started = time.monotonic()
    with transaction.atomic(), pytest.raises(LockNotAwaitable):
        lock.acquire()
    took += time.monotonic() - started
    worker.go_on()
    in_time(took, 5)


@TWO_SERVERS
def test_an_entry_released_at_commit_keeps_the_lease(is_busy, until):
    for keys in (("stock:7",), ("stock:7", "stock:8")):
        with transaction.atomic():
            with db_lock(*keys, scope="lease", release_at="exit"), db_lock(*keys):
                pass
            assert is_busy("stock:7")
        until(lambda: not is_busy("stock:7"))
        with transaction.atomic():
            with (
                db_lock(*keys, scope="lease", release_at="exit"),
                db_lock(*keys, release_at="exit"),
            ):
                pass
            assert not is_busy("stock:7")


@TWO_SERVERS
def test_a_lock_that_would_wait_for_its_own_caller_is_refused(is_busy, until):
    catalogue, policy = db_rwlock("catalogue", timeout=None), {"timeout": None}
    with transaction.atomic(), db_lock("stock:7"):
        with pytest.raises(
            RuntimeError, match="held by the transaction of this thread"
        ):
            db_lock("stock:7", scope="lease").acquire()
    for first, second in (
        (catalogue.read(), catalogue.write()),
        (catalogue.write(), catalogue.read()),
        (db_lock("stock:7", **policy), db_lock("stock:7", scope="lease", **policy)),
        (db_lock("stock:7", **policy), db_semaphore("stock:7", 3, **policy)),
    ):
        message = "have to wait|cannot be upgraded|already"
        with transaction.atomic(), pytest.raises(RuntimeError, match=message):
            with first:
                pass
            with second:
                pass
        until(lambda key=first.key: not is_busy(key))
        with first:
            pass
        with second:
            pass
        with transaction.atomic(), pytest.raises(RuntimeError, match=message):
            with first, second:
                pass
        until(lambda key=first.key: not is_busy(key))
    # PostgreSQL does not keep a lock that was rolled back.
    with transaction.atomic():
        with pytest.raises(ZeroDivisionError), transaction.atomic(), db_lock("stock:9"):
            raise ZeroDivisionError
        lease = db_lock("stock:9", scope="lease", **policy)
        if connection.vendor == "postgresql":
            with lease:
                pass
        else:
            # InnoDB keeps the row locked.
            with pytest.raises(RuntimeError, match="have to wait"):
                lease.acquire()
    until(lambda: not is_busy("stock:9"))


@TWO_SERVERS
def test_a_lease_can_be_reentered_after_its_min_hold(is_busy, until):
    with transaction.atomic():
        with db_lock("stock:7", scope="lease", min_hold=1) as hold:
            pass
        with pytest.raises(LockTimeout):
            db_lock("stock:7", scope="lease", timeout=0).acquire()
        with db_lock("stock:7", scope="lease", timeout=30) as again:
            assert again is hold
            assert hold.age >= 1
        with db_lock("stock:8", scope="lease", min_hold=1) as hold:
            pass
        with db_lock("stock:7", "stock:8", scope="lease", timeout=None) as both:
            assert hold in both.holds
            assert hold.age >= 1
    until(lambda: not is_busy("stock:8"))


@SERVERS
def test_locks_do_not_change_the_settings_of_the_session():
    """This includes the limits that a step sets for itself."""
    names = ["innodb_lock_wait_timeout", "tx_isolation", "autocommit", "sql_mode"]
    query = "SHOW SESSION VARIABLES WHERE variable_name IN %s"
    if connection.vendor == "postgresql":
        names = ["synchronous_commit", "lock_timeout", "statement_timeout"]
        names.append("transaction_isolation")
        query = "SELECT name, setting FROM pg_settings WHERE name = ANY(%s) ORDER BY 1"
    else:
        limits = ["wait_timeout"]
        if connection.mysql_is_mariadb:
            kinds = "", "readonly_", "write_"
            limits += [f"idle_{kind}transaction_timeout" for kind in kinds]
        names += limits
        with connection.cursor() as cursor:
            for name in limits:
                cursor.execute(f"SET SESSION {name} = 1234")

    def session():
        with connection.cursor() as cursor:
            cursor.execute(query, [names])
            return cursor.fetchall()

    for lock in (
        *(db_lock("stock:7", using=using) for using in ROWS),
        db_rwlock("catalogue").read(),
    ):
        before = session()
        with lock:
            assert session() == before
        assert session() == before
        with transaction.atomic():
            before = session()
            with lock, db_lock("new"):
                pass
            assert session() == before
    connection.close()


# Views and test cases.


@TWO_SERVERS
def test_a_view_with_atomic_requests_loses_no_update(threads):
    """The lock ends with the request's commit, and not with the block."""
    Counter.objects.create(name="views")
    requests = volume(5)

    def visit():
        connection.settings_dict["ATOMIC_REQUESTS"] = True
        return {Client().post("/increment/").content for _ in range(requests)}

    with override_settings(
        DLOCKS={"default": {"BACKEND": "dlocks.backends.database.PessimisticBackend"}}
    ):
        visitors = [threads(visit) for _ in range(4)]
        try:
            for visitor in visitors:
                visitor.join(60)
        finally:
            connection.settings_dict["ATOMIC_REQUESTS"] = False
    assert [visitor.results for visitor in visitors] == [[{b"transaction"}]] * 4
    assert Counter.objects.get(name="views").value == 4 * requests


def in_other_session(function):
    """Call a function in a thread with a connection of its own."""

    def call():
        try:
            return function()
        finally:
            connection.close()

    with ThreadPoolExecutor() as pool:
        return pool.submit(call).result()


class TestInsideATestCase(TestCase):
    """A TestCase, which is one transaction that is never committed.

    Locks work in it and leave nothing behind.
    """

    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        # A lease is committed on purpose.
        left = in_other_session(lambda: {row.pk for row in ResourceLock.objects.all()})
        in_other_session(ResourceLock.objects.all().delete)
        assert left <= {"leased"}

    @pytest.mark.driver
    def test_locks_work_in_a_testcase(self):
        """They can be nested with atomic blocks in both ways."""
        with db_lock("stock:7", timeout=0) as hold:
            assert hold.scope == "transaction"
            assert hold.queue_length() == 0
            with db_lock("stock:7") as inner:
                assert inner is hold
        with db_lock("stock:7") as again:
            assert again.token > hold.token
        with db_rwlock("catalogue", scope=None, timeout=0).read() as shared:
            assert shared.scope == "transaction"
        for _ in range(2):
            with transaction.atomic(), db_lock("stock:7"):
                Counter.objects.create(name=f"c{Counter.objects.count()}")
            with db_lock("stock:7"), transaction.atomic():
                pass
        with pytest.raises(ZeroDivisionError), transaction.atomic(), db_lock("stock:7"):
            1 / 0  # noqa: B018

    @pytest.mark.engine("postgresql", "mariadb", "mysql")
    def test_a_lease_ignores_the_testcases_own_transaction(self):
        with db_lock("leased", scope="lease") as hold:
            assert hold.held
        assert not hold.held
        with transaction.atomic():
            with db_lock("leased", scope="lease") as hold:
                pass
            assert hold.held
        eventually(lambda: not hold.held)
