"""Several keys as one lock: all or nothing, and without deadlocks."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, contextmanager
from threading import Event

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from dlocks import (
    LockBackendError,
    LockLost,
    LockTimeout,
    db_lock,
    lock_acquired,
    lock_lost,
    lock_released,
)
from dlocks.models import LockClaim, ResourceLock
from dlocks.testing import HOLDER, frozen_clock, held_elsewhere, lose
from tests import jobs
from tests.for_each import FAMILY, LEASES, for_each
from tests.promises.locks.keys import clear, is_taken, queued, row
from tests.promises.received import received
from tests.timing import NotYetError, TooLateError, in_time
from tests.volume import volume

pytest_plugins = ["tests.promises.stops"]
pytestmark = [pytest.mark.driver, pytest.mark.django_db(transaction=True)]

IN_ONE = for_each("using", ["default", "optimistic"])


def states():
    return {row.key_resource: row.state for row in ResourceLock.objects.by_clock()}


def statements(work):
    with CaptureQueriesContext(connection) as queries:
        result = work()
    return [
        query["sql"] for query in queries if "SAVEPOINT" not in query["sql"]
    ], result


def lend(key, using="default"):
    """Hold a key as another process does. Return a function that releases it."""
    stack = ExitStack()
    stack.enter_context(held_elsewhere(key, using=using))
    return stack.close


# The lock object.


@pytest.mark.front
def test_several_keys_are_one_lock_in_the_order_of_their_bytes():
    """The order and repetition of keys do not matter, and every method knows them."""
    assert db_lock("a").keys == ("a",)
    lock = db_lock("b", "a", "b")
    assert lock == db_lock("a", "b")
    assert lock.keys == ("a", "b")
    keys = ["\U0001f600", "ß", "a", "Z", "z", "é", "\uffff"]
    assert list(db_lock(*keys).keys) == sorted(keys, key=str.encode)
    with lock as hold:
        assert repr(hold) == "<Hold 'a', 'b' count=1 held>"
    assert repr(hold) == "<Hold 'a', 'b' count=0 ended or lost>"
    with pytest.raises(RuntimeError, match="has been released"), hold:
        pytest.fail("the block was entered")


def test_a_hold_has_the_hold_of_each_key():
    """A hold of one key, also of one that was named twice, has itself."""
    with db_lock("a", "b") as hold:
        assert [one.key for one in hold.holds] == ["a", "b"]
        assert [one.token for one in hold.holds] == list(hold.tokens.values())
    for lock in (db_lock("c"), db_lock("c", "c")):
        with lock as hold:
            assert hold.holds == (hold,)
            assert hold.owner


# Many keys.


@pytest.mark.engine("postgresql", "mariadb", "sqlite")
@IN_ONE
def test_the_statements_for_many_keys_grow_with_their_number(using):
    """Four times as many keys need four times as many statements, new or not."""
    sizes = {}
    for number in (500, 2_000):
        keys = [f"{number}:{one}" for one in range(number)]
        # A busy machine may need long for so many new rows on MariaDB. A renewal that
        # began meanwhile would lock them, and each would be released by itself.
        lock = db_lock(*keys, using=using, timeout=90, ttl=600, renew=False)
        sizes[number] = counts = []
        connection.ensure_connection()
        session = connection.connection
        for _ in ("new", "there"):
            acquiring, hold = statements(lock.acquire)
            sent = acquiring, statements(hold.renew)[0], statements(hold.release)[0]
            counts += map(len, sent)
        if connection.connection is not session:
            # PostgreSQL ends the session of a step that stalls for 2 s.
            raise TooLateError("A step stalled, and its statements were sent again.")
    pairs = list(zip(sizes[500], sizes[2_000], strict=True))
    assert all(many <= 4 * few for few, many in pairs), pairs


@pytest.mark.engine("postgresql", "mariadb", "sqlite")
@FAMILY
def test_the_timeout_counts_while_rows_of_new_keys_are_created(using):
    """No further row is created when the time is over, and no key is held."""
    inserted = []

    def create_late(execute, sql, *arguments):
        if sql.startswith("INSERT") or " INSERT INTO " in sql:
            inserted.append(sql)
            time.sleep(0.4)
        return execute(sql, *arguments)

    lock = db_lock(*(f"stock:{one}" for one in range(1_200)), using=using, timeout=0.3)
    says = "within 0.3 s: the requests for the other keys took all of this time"
    with connection.execute_wrapper(create_late):
        with pytest.raises(LockTimeout, match=says):
            lock.acquire()
    assert len(inserted) <= 1
    assert set(states().values()) <= {"free"}


# All or nothing.


@LEASES
def test_all_keys_are_held_and_released(using):
    """The hold has a token for each key, which grows from hold to hold."""
    tokens = []
    for keys in ("abc", "cb"):
        lock = db_lock(*keys, using=using, timeout=0)
        with lock as hold:
            assert hold.held
            assert 15 < hold.remaining <= 30
            assert list(hold.tokens) == sorted(keys)
            assert hold.token == max(hold.tokens.values())
            assert all(is_taken(key, using) for key in keys)
            assert lock.locked()
            assert lock.holder().key == min(keys)
            hold.check()
            hold.renew()
        assert not hold.held
        assert hold.remaining == 0
        assert not lock.locked()
        with db_lock("b", using=using, timeout=0) as single:
            tokens += [hold.tokens, single.tokens]
    assert not any(is_taken(key, using) for key in "abc")
    for key in "abc":
        of_key = [each[key] for each in tokens if key in each]
        assert of_key == sorted(set(of_key))


@LEASES
def test_after_a_timeout_no_key_is_held(using):
    """If one key is busy, none is acquired, and the error names that key."""
    for busy, timeout in (("a", 0), ("b", 0.1), ("c", 0)):
        lock = db_lock("a", "b", "c", using=using, timeout=timeout)
        release = lend(busy, using)
        assert lock.try_acquire() is None
        started = time.monotonic()
        with pytest.raises(LockTimeout) as raised:
            lock.acquire()
        took = time.monotonic() - started
        assert raised.value.key == busy
        assert repr(busy) in str(raised.value)
        assert took >= timeout
        assert [key for key in "abc" if is_taken(key, using)] == [busy]
        assert not LockClaim.objects.exists()
        release()
        in_time(took, 2.0)
    with lock:
        pass


@pytest.mark.front
def test_the_timeout_is_for_all_keys_together(stops):
    """Without a queue, the caller waits for each key separately."""
    with frozen_clock() as clock:
        returned = []
        return_a, return_b = (lend(key, "memory") for key in "ab")
        started = clock()

        def acquire_late(usual, claim):
            if clock() >= started + 0.9 and not returned:
                returned.append(clock())
                return_a()
            return usual()

        stops.replace("acquire", acquire_late)
        with pytest.raises(LockTimeout) as raised:
            db_lock("a", "b", timeout=1.2, fair=False, using="memory").acquire()
        assert clock() - started == pytest.approx(1.2)
        assert raised.value.key == "b"
        assert returned, "a could be acquired before the timeout"
        return_b()


@FAMILY
def test_a_busy_key_is_waited_for_in_its_queue(using, threads, until):
    release = lend("b", using)

    def wait():
        with db_lock("c", "b", "a", using=using, timeout=20) as hold:
            return hold.waited, hold.held

    thread = threads(wait)
    until(lambda: LockClaim.objects.filter(key_resource="b").exists())
    assert states()["a"] == "held", "what comes before in the order is held meanwhile"
    assert states().get("c") in {None, "free"}
    release()
    thread.join(20)
    ((waited, held),) = thread.results
    assert held
    assert waited > 0


# Cost.


@pytest.mark.storage
@IN_ONE
def test_the_cost_of_several_keys_does_not_grow_with_their_number(using):
    """They are acquired and released together in one short transaction.

    In a transaction of the caller, each key costs one statement.
    """
    for many in (2, 20):
        lock = db_lock(*[f"stock:{number}" for number in range(many)], using=using)
        with lock:
            pass
        acquiring, hold = statements(lock.acquire)
        checking, _ = statements(hold.check)
        renewing, _ = statements(hold.renew)
        releasing, _ = statements(hold.release)
        assert len(acquiring) <= 7, (many, acquiring)
        assert [len(checking), len(renewing)] == [1, 1], (many, checking, renewing)
        assert len(releasing) <= 7, (many, releasing)
        with transaction.atomic():
            acquiring, hold = statements(lock.acquire)
            releasing, _ = statements(hold.release)
        assert len(acquiring) == many, acquiring
        assert len(releasing) == many, releasing


# Reentrance, release and loss.


@FAMILY
def test_a_key_that_is_already_held_is_reentered(using):
    with db_lock("b", using=using) as outer:
        with db_lock("a", "b", "c", using=using, timeout=0) as hold:
            assert hold.tokens["b"] == outer.token
            assert outer.count == 2
            with db_lock("c", "a", using=using, timeout=0) as inner:
                assert inner.tokens == {key: hold.tokens[key] for key in "ac"}
            assert hold.held
        assert not hold.held
        assert outer.held
        assert outer.count == 1
        assert is_taken("b", using)
        assert not is_taken("a", using)
    assert not is_taken("b", using)


@pytest.mark.front
def test_a_second_release_does_not_end_an_outer_hold(stops):
    """A failed release and a refused entry do not affect it either."""

    def fail(usual, claims):
        assert [claim.key for claim in claims] == ["a", "c"]
        raise LockBackendError("The server is away.")

    with db_lock("b") as outer:
        hold = db_lock("a", "b").acquire()
        hold.release()
        hold.release()
        assert (outer.held, outer.count) == (True, 1)
        with pytest.raises(LockTimeout, match="reentrant=False"):
            db_lock("a", "b", reentrant=False).acquire()
        assert outer.count == 1
        assert not is_taken("a")
        hold = db_lock("a", "b", "c").acquire()
        stops.replace("release_all", fail)
        with pytest.raises(LockBackendError, match="away"):
            hold.release()
        assert outer.count == 1
        outer.check()
    assert not is_taken("b")


@FAMILY
def test_a_key_that_is_lost_loses_the_hold_and_frees_the_others(using):
    told = []
    lock = db_lock("a", "b", "c", using=using, on_lost=told.append)
    with pytest.raises(LockLost) as raised:
        with lock as hold:
            clear("b", using)
            with pytest.raises(LockLost):
                hold.check()
            assert not hold.held
    assert raised.value.key == "b"
    assert told == [hold]
    assert not is_taken("a", using)
    assert not is_taken("c", using)


def test_on_lost_is_called_for_keys_that_are_all_the_same():
    told = []
    with pytest.raises(LockLost):
        with db_lock("a", "a", using="memory", on_lost=told.append) as hold:
            lose(hold)
    assert told == [hold]


def test_min_hold_keeps_each_key(threads, is_busy, until):
    """After that, a waiter for one of the keys is served."""
    with db_lock("a", "b", "c", min_hold=2.0) as hold:
        waiter = threads(db_lock("b", timeout=20).acquire)
        until(lambda: hold.queue_length() == 1)
    assert is_busy("a")
    with db_lock("a", "c", timeout=10) as later:
        assert later.waited > 0.1
    waiter.join(20)
    (served,) = waiter.results
    assert served.token > hold.tokens["b"]
    served.release()


@pytest.mark.front
def test_every_key_is_signalled(signalled):
    """This includes a key that is released because of a timeout."""
    acquired, released = lock_acquired, lock_released
    seen = signalled(acquired, released)
    with db_lock("b", "a"):
        pass
    release = lend("b")
    with pytest.raises(LockTimeout):
        db_lock("a", "b", timeout=1).acquire()
    release()
    both = [(acquired, "a"), (acquired, "b"), (released, "a"), (released, "b")]
    assert [(signal, hold.key) for signal, hold in seen] == [
        *both,
        (acquired, "a"),
        (released, "a"),
    ]


@pytest.mark.front
def test_a_key_lost_during_the_wait_is_acquired_again(until, threads):
    """The caller holds all keys when its wait ends, or it goes on waiting."""
    release = lend("b")

    def wait():
        with db_lock("a", "b", timeout=30) as hold:
            hold.check()
            return hold.held, hold.waited > 0

    waiting = threads(wait)
    until(queued("b").exists)
    lose("a")
    release()
    waiting.join(60)
    assert waiting.results == [(True, True)]


def test_a_key_lost_during_the_wait_is_no_loss_of_the_hold(until, threads):
    """Its report may come late. ``on_lost`` concerns what the caller has received."""
    told, given, release = [], [], lend("b")
    reports, may_report, may_end = Event(), Event(), Event()

    def report_slowly(**kwargs):
        reports.set()
        assert may_report.wait(60)

    def work():
        with db_lock("a", "b", timeout=30, on_lost=told.append) as hold:
            given.append(hold)
            assert may_end.wait(60)

    worker = threads(work)
    until(queued("b").exists)
    with received(lock_lost, report_slowly):
        losing = threads(lambda: lose("a"))
        assert reports.wait(60)
        release()
        until(lambda: given)
        may_report.set()
        losing.join(60)
        assert told == []
        lose("a")
    assert told == given
    may_end.set()
    with pytest.raises(LockLost):
        worker.join(60)


@contextmanager
def filtered_log(function):
    """Call a function with each record of the log, in the thread that writes it."""
    logger = logging.getLogger("dlocks")
    logger.addFilter(function)
    try:
        yield
    finally:
        logger.removeFilter(function)


def test_a_loss_is_not_reported_for_a_hold_that_is_given_up(stops, until, threads):
    """One key was lost during the wait. The other one is about to be released."""
    told, given, release = [], [], lend("b")
    is_lost, may_report, gives_up = Event(), Event(), Event()

    def report_slowly(record):
        if "'a' was lost by" in record.getMessage():
            is_lost.set()
            assert may_report.wait(60)
        return True

    def release_slowly(usual, claim):
        if claim.key == "b" and claim.holder != HOLDER and not gives_up.is_set():
            gives_up.set()
            losing.join(60)
        return usual()

    def work():
        with db_lock("a", "b", timeout=30, on_lost=told.append) as hold:
            given.append(hold)
            hold.check()

    with filtered_log(report_slowly):
        worker = threads(work)
        until(queued("b").exists)
        losing = threads(lambda: lose("a"))
        assert is_lost.wait(60)
        stops.replace("release", release_slowly)
        release()
        assert gives_up.wait(60)
        may_report.set()
        worker.join(60)
    assert len(given) == 1
    assert told == []


def test_a_key_lost_during_the_wait_is_signalled_as_lost(until, threads, signalled):
    """Once, even if its caller leaves it before the loss is reported."""
    is_reported, may_report, release = Event(), Event(), lend("b")
    losses = []

    def report_slowly(record):
        if "'a' was lost by" in record.getMessage():
            losses.append(record)
            is_reported.set()
            assert may_report.wait(60)
        return True

    def work():
        with db_lock("a", "b", timeout=30) as hold:
            return hold.tokens["a"]

    seen = signalled(lock_released, lock_lost)
    with filtered_log(report_slowly):
        worker = threads(work)
        until(queued("b").exists)
        losing = threads(lambda: lose("a"))
        assert is_reported.wait(60)
        release()
        worker.join(60)
        may_report.set()
        losing.join(60)
        until(lambda: [hold.key for signal, hold in seen if signal is lock_lost])
    assert len(losses) == 1
    ends = [(signal, hold.token) for signal, hold in seen if hold.key == "a"]
    assert sorted(ends, key=lambda end: end[1]) == [
        (lock_lost, min(token for _, token in ends)),
        (lock_released, worker.results[0]),
    ]


@pytest.mark.front
def test_keys_held_during_a_long_wait_are_renewed(until, threads):
    release = lend("b")

    def wait():
        with db_lock("a", "b", ttl=1.5, timeout=20) as hold:
            hold.check()
            return hold.tokens

    thread = threads(wait)
    until(lambda: states().get("a") == "held")
    ends = row("a").end_time
    until(lambda: row("a").end_time > ends)
    release()
    thread.join(20)
    assert thread.results[0].keys() == {"a", "b"}


@FAMILY
def test_several_keys_can_be_held_as_shared(using, in_other_thread):
    lock = db_lock("a", "b", using=using, shared=True, timeout=0)
    other = in_other_thread(lock.acquire)
    with lock as hold:
        assert is_taken("b", using)
        hold.check()
        in_other_thread(other.release)
        assert is_taken("a", using)
    assert not any(is_taken(key, using) for key in "ab")


# Transactions.


@FAMILY
def test_in_a_transaction_all_keys_belong_to_it(using, in_other_thread):
    lock = db_lock("a", "b", "c", using=using, timeout=0)

    def attempt():
        return [db_lock(key, using=using).try_acquire() for key in lock.keys]

    with lock:
        pass
    for roll_back in (False, True):
        with transaction.atomic():
            with lock as hold:
                assert hold.scope == "transaction"
                hold.check()
                hold.renew()
            if connection.vendor != "sqlite":
                assert in_other_thread(attempt) == [None, None, None]
            transaction.set_rollback(roll_back)
        assert not any(is_taken(key, using) for key in lock.keys)
        with lock as again:
            if not roll_back:
                assert all(again.tokens[key] > hold.tokens[key] for key in lock.keys)


@pytest.mark.engine("postgresql")
@IN_ONE
def test_a_transaction_keeps_no_key_unless_it_acquires_all(using, in_other_thread):
    with db_lock("a", "b", "c", using=using):
        pass
    release = lend("b", using)
    with transaction.atomic():
        assert db_lock("b", "c", using=using).try_acquire() is None
        in_other_thread(
            lambda: db_lock("c", using=using, timeout=0).acquire().release()
        )
    release()


@FAMILY
def test_a_lease_on_several_keys_can_be_used_in_a_transaction(using, in_other_thread):
    """A renewal that is rolled back does not count."""
    with db_lock("a", "b", using=using, ttl=600, release_at="exit") as hold:
        with transaction.atomic():
            hold.check()
            hold.renew()
        with hold.atomic():
            hold.check()
            hold.renew()
        left = hold.remaining
        with pytest.raises(ZeroDivisionError), hold.atomic():
            time.sleep(0.05)
            hold.renew()
            1 / 0  # noqa: B018
        assert hold.remaining <= left - 0.05
    hold = db_lock("a", "b", using=using, release_at="exit").acquire()
    with transaction.atomic():
        hold.release()
        if connection.vendor != "sqlite":
            in_other_thread(db_lock("b", "c", using=using, timeout=0).acquire).release()
    assert not is_taken("a", using)


# Processes, keys, tenths of a second, backend and scope. On all engines the same code
# orders the keys.
RACES = [
    (4, 5, 2, "default", "lease"),
    (4, 5, 2, "optimistic", "transaction"),
    (4, 5, 2, "insert", "lease"),
    (2, 2, 4, "default", "transaction"),
    (2, 2, 4, "optimistic", "lease"),
    (2, 2, 4, "insert", "transaction"),
]


@for_each("case", RACES)
def test_overlapping_keys_in_any_order_never_deadlock(case, workers, tmp_path):
    """Each process acquires two to four keys in an order of its own."""
    processes, number, tenths, using, scope = case
    keys = [f"counter:{key}" for key in range(number)]
    crowd = workers(processes)
    for key in keys:
        (tmp_path / key).write_text("0 0")
    for number, worker in enumerate(crowd):
        worker.start(
            jobs.count_several,
            str(tmp_path),
            keys,
            seed=number,
            seconds=volume(tenths) / 10,
            timeout=None,
            using=using,
            scope=scope,
        )
    added = [worker.hear(120) for worker in crowd]
    if not all(sum(mine.values()) for mine in added):
        raise NotYetError(f"Not everybody had a turn: {added}.")
    for key in keys:
        value, last = map(int, (tmp_path / key).read_text().split())
        assert value == sum(mine.get(key, 0) for mine in added)
        assert value == 0 or last > 0
    assert not LockClaim.objects.exists()


def test_a_killed_holder_of_several_keys_frees_all_after_its_ttl(doomed):
    victim = doomed()
    victim.call(jobs.acquire, "a", "b", "c", ttl=1.0)
    assert db_lock("b", "c").try_acquire() is None
    victim.kill()
    with db_lock("c", "a", "b", timeout=20) as hold:
        assert hold.held
    in_time(time.monotonic() - victim.killed_at, 5.0)
