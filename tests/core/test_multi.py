"""Several keys as one lock: all or nothing, and without deadlocks."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from dlocks import (
    Lock,
    LockBackendError,
    LockLost,
    LockTimeout,
    MultiLock,
    db_lock,
    db_rwlock,
    lock_acquired,
    lock_released,
)
from dlocks.testing import frozen_clock, override_locks
from tests import jobs
from tests.internals import LockClaim, LockState, ResourceLock, backends, clock, keeper
from tests.timing import NotYetError, in_time

pytestmark = pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"])

FAMILY = pytest.mark.parametrize("using", ["default", "optimistic", "insert"])
IN_ONE = pytest.mark.parametrize("using", ["default", "optimistic"])
ALL = pytest.mark.parametrize("using", ["default", "optimistic", "insert", "memory"])


def states():
    return {row.key_resource: row.state for row in ResourceLock.objects.by_clock()}


def statements(work):
    with CaptureQueriesContext(connection) as queries:
        result = work()
    return [
        query["sql"] for query in queries if "SAVEPOINT" not in query["sql"]
    ], result


def lend(key, in_other_thread, **policy):
    """Acquire a key in another thread. Return a function that releases it."""
    hold = in_other_thread(db_lock(key, timeout=0, **policy).acquire)
    # Its thread has ended. The hold is not renewed, but lasts for its ttl.
    return lambda: in_other_thread(hold.release)


# The lock object.


@pytest.mark.front
def test_one_key_is_a_lock_and_several_are_a_multi_lock():
    assert type(db_lock("a")) is Lock
    lock = db_lock("b", "a", "b")
    assert isinstance(lock, MultiLock)
    assert lock == db_lock("a", "b")
    assert lock.keys == ("a", "b")
    assert db_lock("a").keys == ("a",)


@pytest.mark.front
def test_keys_are_acquired_in_the_order_of_their_bytes():
    keys = ["\U0001f600", "ß", "a", "Z", "z", "é", "\uffff"]
    assert list(db_lock(*keys).keys) == sorted(keys, key=str.encode)


@pytest.mark.front
@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ((), TypeError),
        (("a", ""), ValueError),
        (("a", 7), TypeError),
        (("a", "x" * 256), ValueError),
    ],
)
def test_wrong_keys_are_refused_before_any_query(
    keys, error, django_assert_num_queries
):
    with django_assert_num_queries(0), pytest.raises(error):
        db_lock(*keys)


@pytest.mark.front
def test_a_wrong_policy_is_refused_before_any_query(django_assert_num_queries):
    with django_assert_num_queries(0), pytest.raises(ValueError, match="ttl"):
        db_lock("a", "b", ttl=0)


@pytest.mark.front
def test_a_hold_of_several_keys_has_a_repr_and_can_be_released():
    with db_lock("a", "b") as hold:
        assert repr(hold) == "<MultiHold 'a', 'b' count=1 held>"
    assert repr(hold) == "<MultiHold 'a', 'b' count=0 ended or lost>"
    with pytest.raises(RuntimeError, match="has been released"), hold:
        pytest.fail("the block was entered")


# All or nothing.


@ALL
def test_all_keys_are_held_and_released(using, in_other_thread):
    lock = db_lock("a", "b", "c", using=using, timeout=0)
    for _ in range(2):
        began = clock.now()
        with lock as hold:
            assert hold.held
            left, since = hold.remaining, clock.now() - began
            assert 30 - since <= left <= 30
            assert list(hold.tokens) == ["a", "b", "c"]
            assert hold.token == max(hold.tokens.values())
            for key in lock.keys:
                assert in_other_thread(db_lock(key, using=using).try_acquire) is None
            assert lock.locked()
            assert lock.holder().key == "a"
            hold.check()
            hold.renew()
        assert not hold.held
        assert hold.remaining == 0
        assert not lock.locked()
    for key in lock.keys:
        in_other_thread(
            lambda key=key: db_lock(key, using=using, timeout=0).acquire().release()
        )


@FAMILY
def test_tokens_of_each_key_grow_from_hold_to_hold(using):
    tokens = []
    for keys in [("a", "b"), ("b", "c"), ("c", "b", "a"), ("a", "b")]:
        with db_lock(*keys, using=using) as hold:
            tokens.append(hold.tokens)
        with db_lock("b", using=using) as single:
            tokens.append(single.tokens)
    for key in "abc":
        of_key = [each[key] for each in tokens if key in each]
        assert of_key == sorted(set(of_key))


@ALL
@pytest.mark.parametrize("busy", ["a", "b", "c"])
def test_if_one_key_is_busy_none_is_acquired(using, busy, in_other_thread):
    release = lend(busy, in_other_thread, using=using)
    lock = db_lock("a", "b", "c", using=using, timeout=0)
    assert lock.try_acquire() is None
    with pytest.raises(LockTimeout) as raised:
        lock.acquire()
    assert raised.value.key == busy
    assert repr(busy) in str(raised.value)
    for key in {"a", "b", "c"} - {busy}:
        in_other_thread(
            lambda key=key: db_lock(key, using=using, timeout=0).acquire().release()
        )
    release()
    with lock:
        pass


@ALL
def test_after_a_timeout_no_key_is_held(using, in_other_thread):
    release = lend("b", in_other_thread, using=using)
    started = time.monotonic()
    with pytest.raises(LockTimeout):
        db_lock("a", "b", "c", using=using, timeout=0.3).acquire()
    took = time.monotonic() - started
    assert took >= 0.3
    for key in "ac":
        in_other_thread(
            lambda key=key: db_lock(key, using=using, timeout=0).acquire().release()
        )
    assert not LockClaim.objects.exists()
    release()
    in_time(took, 2.0)


@pytest.mark.front
def test_the_timeout_is_for_all_keys_together(in_other_thread, monkeypatch):
    """Without a queue, the caller waits for each key separately."""
    with override_locks("memory"), frozen_clock():
        backend, returned = backends["default"], []
        acquire = backend.acquire
        give_back_a, give_back_b = (lend(key, in_other_thread) for key in "ab")
        started = clock.now()

        def acquire_late(claim):
            if clock.now() >= started + 0.9 and not returned:
                returned.append(clock.now())
                give_back_a()
            return acquire(claim)

        monkeypatch.setattr(backend, "acquire", acquire_late)
        with pytest.raises(LockTimeout) as raised:
            db_lock("a", "b", timeout=1.2, fair=False).acquire()
        assert clock.now() - started == pytest.approx(1.2)
        assert raised.value.key == "b"
        assert returned, "a could be acquired before the timeout"
        give_back_b()


@FAMILY
def test_a_busy_key_is_waited_for_in_its_queue(using, workers, until):
    (other,) = workers(1)
    other.start(jobs.hold, "b", using=using)
    other.hear()
    got = []

    def wait():
        try:
            with db_lock("c", "b", "a", using=using, timeout=20) as hold:
                got.append((hold.waited, hold.held))
        finally:
            connection.close()

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: LockClaim.objects.filter(key_resource="b").exists())
    assert states()["a"] == LockState.HELD, (
        "what comes before in the order is held meanwhile"
    )
    assert states().get("c") in {None, LockState.FREE}
    other.tell()
    assert other.hear() == "released"
    thread.join(20)
    ((waited, held),) = got
    assert held
    assert waited > 0


# Cost.


@IN_ONE
@pytest.mark.parametrize("many", [2, 20])
def test_several_keys_cost_one_statement_for_each_operation(using, many):
    lock = db_lock(*[f"stock:{number}" for number in range(many)], using=using)
    with lock:
        pass
    acquiring, hold = statements(lock.acquire)
    checking, _ = statements(hold.check)
    renewing, _ = statements(hold.renew)
    releasing, _ = statements(hold.release)
    counts = [len(sent) for sent in (acquiring, checking, renewing, releasing)]
    assert counts == [1, 1, 1, 1], (acquiring, checking, renewing, releasing)


@pytest.mark.engine("postgresql", "sqlite")
@IN_ONE
def test_several_keys_in_a_transaction_cost_one_statement(using):
    """On MariaDB, rows that are not needed after all would stay locked."""
    lock = db_lock("a", "b", "c", using=using)
    with lock:
        pass
    with transaction.atomic():
        acquiring, hold = statements(lock.acquire)
        releasing, _ = statements(hold.release)
    assert [len(acquiring), len(releasing)] == [1, 1], (acquiring, releasing)


def test_the_keeper_renews_all_in_one_statement(monkeypatch, until):
    from tests.internals import backends

    sizes = []
    renew = backends["default"].renew

    def counted(claims):
        sizes.append(len(claims))
        return renew(claims)

    monkeypatch.setattr(backends["default"], "renew", counted)
    with db_lock("a", "b", "c", ttl=3) as hold:
        until(lambda: len(sizes) >= 2)
        hold.check()
    assert set(sizes) == {3}


# Reentrance, release and loss.


@FAMILY
def test_a_key_that_is_already_held_is_reentered(using, is_busy):
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
        assert is_busy("b", using)
        assert not is_busy("a", using)
    assert not is_busy("b", using)


@pytest.mark.front
def test_a_second_release_does_not_end_an_outer_hold():
    with db_lock("b") as outer:
        hold = db_lock("a", "b").acquire()
        hold.release()
        hold.release()
        assert outer.held
        assert outer.count == 1
        outer.check()


@pytest.mark.front
def test_reentrant_false_refuses_and_leaves_nothing(is_busy):
    with db_lock("b") as outer:
        with pytest.raises(RuntimeError, match="reentrant=False"):
            db_lock("a", "b", reentrant=False).acquire()
        assert outer.count == 1
        assert not is_busy("a")


@FAMILY
def test_a_key_that_is_lost_loses_the_hold_and_frees_the_others(using, is_busy):
    told = []
    lock = db_lock("a", "b", "c", using=using, on_lost=told.append)
    with pytest.raises(LockLost) as raised:
        with lock as hold:
            ResourceLock.objects.filter(pk="b").update(
                owner="somebody else", version=9 * 10**15
            )
            with pytest.raises(LockLost):
                hold.check()
            assert not hold.held
    assert raised.value.key == "b"
    assert told == [hold]
    assert not is_busy("a", using)
    assert not is_busy("c", using)


@pytest.mark.front
def test_a_failed_release_does_not_affect_an_outer_hold(monkeypatch, is_busy):
    backend = backends["default"]
    with db_lock("b") as outer:
        hold = db_lock("a", "b", "c").acquire()

        def fail(claims, **options):
            assert [claim.key for claim in claims] == ["a", "c"]
            raise LockBackendError("The server is away.")

        monkeypatch.setattr(backend, "release_all", fail)
        with pytest.raises(LockBackendError, match="away"):
            hold.release()
        assert outer.count == 1
        outer.check()
    assert not is_busy("b")


@pytest.mark.front
def test_on_lost_is_called_once_for_several_lost_keys(until):
    told = []
    lock = db_lock("a", "b", "c", ttl=0.6, on_lost=told.append)
    hold = lock.acquire()
    ResourceLock.objects.update(owner="somebody else")
    until(lambda: told)
    with pytest.raises(LockLost):
        hold.release()
    assert told == [hold]
    assert not keeper.holds


def test_a_waiter_for_one_of_the_keys_is_served(workers, until):
    (waiter,) = workers(1)
    with db_lock("a", "b", "c") as hold:
        waiter.start(jobs.wait_for, "b", timeout=20)
        assert waiter.hear() == "waiting"
        until(lambda: hold.queue_length() == 1)
    _, token = waiter.hear()
    assert token > hold.tokens["b"]


def test_min_hold_keeps_each_key(in_other_thread):
    with db_lock("a", "b", min_hold=3.0):
        pass
    assert in_other_thread(db_lock("a").try_acquire) is None
    with db_lock("a", "b", timeout=10) as hold:
        assert hold.waited > 0.1


@pytest.mark.front
def test_every_key_is_signalled():
    heard = []

    def acquired(hold, **_):
        heard.append(("acquired", hold.key))

    def released(hold, **_):
        heard.append(("released", hold.key))

    lock_acquired.connect(acquired)
    lock_released.connect(released)
    try:
        with db_lock("b", "a"):
            pass
    finally:
        lock_acquired.disconnect(acquired)
        lock_released.disconnect(released)
    assert heard == [
        ("acquired", "a"),
        ("acquired", "b"),
        ("released", "a"),
        ("released", "b"),
    ]


@pytest.mark.front
def test_a_key_released_by_a_timeout_is_signalled(in_other_thread):
    heard = []

    def acquired(hold, **_):
        heard.append(("acquired", hold.key))

    def released(hold, **_):
        heard.append(("released", hold.key))

    release = lend("b", in_other_thread, ttl=20)
    lock_acquired.connect(acquired)
    lock_released.connect(released)
    try:
        with pytest.raises(LockTimeout):
            db_lock("a", "b", timeout=0.2).acquire()
    finally:
        lock_acquired.disconnect(acquired)
        lock_released.disconnect(released)
    release()
    assert heard == [("acquired", "a"), ("released", "a")]


@pytest.mark.front
def test_a_key_lost_during_the_wait_is_acquired_again(in_other_thread, until, threads):
    """The caller holds all keys when its wait ends, or it goes on waiting."""
    release = lend("b", in_other_thread, ttl=20)

    def wait():
        with db_lock("a", "b", timeout=30) as hold:
            hold.check()
            return hold.held

    waiting = threads(wait)
    until(lambda: backends["default"].waiting("b") == 1)
    (first,) = (one for one in keeper.holds if one.claim.key == "a")
    backends["default"].clear("a", first.token)
    first.lose("an administrator has cleared it")
    release()
    waiting.join(60)
    assert waiting.results == [True]


@pytest.mark.front
def test_keys_held_during_a_long_wait_are_renewed(in_other_thread, until, threads):
    release = lend("b", in_other_thread, ttl=20)

    def wait():
        with db_lock("a", "b", ttl=2.4, timeout=20) as hold:
            hold.check()
            return hold.tokens

    thread = threads(wait)
    until(lambda: states().get("a") == LockState.HELD)
    time.sleep(4)
    assert states()["a"] == LockState.HELD
    release()
    thread.join(20)
    assert thread.results[0].keys() == {"a", "b"}


@FAMILY
def test_several_keys_can_be_held_as_shared(using, in_other_thread):
    readers = db_lock("a", "b", using=using, shared=True, timeout=0)
    with readers as hold:
        other = in_other_thread(readers.acquire)
        assert (
            in_other_thread(db_rwlock("b", using=using, timeout=0).write().try_acquire)
            is None
        )
        hold.check()
        in_other_thread(other.release)
    in_other_thread(
        lambda: db_lock("a", "b", using=using, timeout=0).acquire().release()
    )


# Coroutines.


@ALL
async def test_coroutines_can_hold_several_keys(using):
    lock = db_lock("a", "b", using=using, timeout=0)
    async with lock as hold:
        assert hold.held
        await hold.acheck()
        await hold.arenew()
        assert await lock.alocked()
        assert (await asyncio.create_task(lock.atry_acquire())) is None
    assert not hold.held
    hold = await lock.aacquire()
    await hold.arelease()
    assert not await lock.alocked()


@pytest.mark.front
async def test_a_cancelled_wait_for_several_keys_leaves_nothing():
    holding, waiting = db_lock("b"), db_lock("a", "b", timeout=20)

    async with holding:
        task = asyncio.create_task(waiting.aacquire())
        while not await db_lock("a").alocked():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not await db_lock("a").alocked()
    async with waiting:
        pass


# Transactions.


@FAMILY
@pytest.mark.parametrize("roll_back", [False, True])
def test_in_a_transaction_all_keys_belong_to_it(
    using, roll_back, in_other_thread, request
):
    lock = db_lock("a", "b", "c", using=using, timeout=0)
    with lock:
        pass
    with transaction.atomic():
        with lock as hold:
            assert hold.scope == "transaction"
            hold.check()
            hold.renew()
        if connection.vendor != "sqlite":
            for key in lock.keys:
                assert (
                    in_other_thread(db_lock(key, using=using, timeout=0).try_acquire)
                    is None
                ), "not before the commit"
        transaction.set_rollback(roll_back)
    with in_other_thread(lock.acquire) as again:
        if not roll_back:
            assert all(again.tokens[key] > hold.tokens[key] for key in lock.keys)


@pytest.mark.engine("postgresql")
@IN_ONE
def test_a_transaction_keeps_no_key_unless_it_acquires_all(using, in_other_thread):
    with db_lock("a", "b", "c", using=using):
        pass
    release = lend("b", in_other_thread, using=using)
    with transaction.atomic():
        assert db_lock("b", "c", using=using).try_acquire() is None
        in_other_thread(
            lambda: db_lock("c", using=using, timeout=0).acquire().release()
        )
    release()


@FAMILY
def test_a_lease_on_several_keys_lasts_to_the_transactions_end(
    using, in_other_thread, until
):
    if connection.vendor == "sqlite":
        lock = db_lock("a", "b", using=using)
        with transaction.atomic(), pytest.raises(RuntimeError, match="one writer"):
            db_lock("a", "b", using=using, scope="lease").acquire()
        with lock:
            pass
        return
    lock = db_lock("a", "b", using=using, scope="lease", timeout=0)
    with transaction.atomic():
        with lock:
            pass
        assert in_other_thread(lock.try_acquire) is None
        with lock as hold:
            assert hold.held
    until(
        lambda: (
            (hold := in_other_thread(lock.try_acquire))
            and (in_other_thread(hold.release) or True)
        )
    )


@FAMILY
def test_a_lease_on_several_keys_can_be_used_in_a_transaction(using, in_other_thread):
    with db_lock("a", "b", using=using, release_at="exit") as hold:
        with transaction.atomic():
            hold.check()
            hold.renew()
        with hold.atomic():
            hold.check()
            hold.renew()
    hold = db_lock("a", "b", using=using, release_at="exit").acquire()
    with transaction.atomic():
        hold.release()
        if connection.vendor != "sqlite":
            in_other_thread(db_lock("b", "c", using=using, timeout=0).acquire).release()
    in_other_thread(db_lock("a", "b", using=using, timeout=0).acquire).release()


@FAMILY
def test_a_renewal_that_is_rolled_back_does_not_count(using):
    with db_lock("a", "b", using=using, ttl=600) as hold:
        ends = [one._state.lease.deadline for one in hold.holds]
        with pytest.raises(ZeroDivisionError), hold.atomic():
            time.sleep(0.05)
            hold.renew()
            1 / 0  # noqa: B018
        assert [one._state.lease.deadline for one in hold.holds] == ends


# Races.


@FAMILY
@pytest.mark.parametrize("scope", ["lease", "transaction"])
def test_overlapping_keys_in_any_order_never_deadlock(using, scope, workers, tmp_path):
    """Each key has an unguarded counter.

    Each process acquires two to four keys in an order of its own.
    """
    race(
        workers(8),
        [f"counter:{number}" for number in range(5)],
        tmp_path,
        using=using,
        scope=scope,
    )


@FAMILY
@pytest.mark.parametrize("scope", ["lease", "transaction"])
def test_two_processes_with_reversed_keys_never_deadlock(
    using, scope, workers, tmp_path
):
    race(workers(2), ["counter:1", "counter:2"], tmp_path, using=using, scope=scope)


def race(crowd, keys, tmp_path, **policy):
    for key in keys:
        (tmp_path / key).write_text("0 0")
    for number, worker in enumerate(crowd):
        worker.start(
            jobs.count_several,
            str(tmp_path),
            keys,
            seed=number,
            seconds=0.6,
            timeout=None,
            **policy,
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
    victim.call(jobs.acquire_several, ["a", "b", "c"], ttl=1.0)
    assert db_lock("b", "c").try_acquire() is None
    victim.kill()
    with db_lock("c", "a", "b", timeout=20) as hold:
        assert hold.held
    in_time(time.monotonic() - victim.killed_at, 5.0)
