"""Losses that a caller finds itself, and those that are reported meanwhile."""

import dataclasses
import threading
from contextlib import nullcontext, suppress

import pytest
from django.test import override_settings

from dlocks import LockLost, db_lock, db_rwlock, db_semaphore, lock_lost
from dlocks.testing import expire, frozen_clock, held_elsewhere, lose, override_locks
from tests.for_each import for_each
from tests.promises.locks.keys import clear
from tests.promises.received import received
from tests.sync_and_async import sync_and_async

pytest_plugins = ["tests.promises.stops"]
pytestmark = [pytest.mark.holds, pytest.mark.django_db(transaction=True)]

BACKENDS = ["default", "optimistic", "insert", "memory"]
# Locks of every kind, all of which take the key "a".
KINDS = [
    db_lock("a"),
    db_lock("a", "b"),
    db_lock("a", reentrant=False),
    db_semaphore("a", 2),
    db_rwlock("a").read(),
    db_rwlock("a").write(),
]


def changed(lock, **options):
    """Return the same lock with other options."""
    return dataclasses.replace(lock, **options)


# A loss that is found by its own caller.


def check(hold, lock=None):
    hold.check()


def renew(hold, lock=None):
    hold.renew()


def acquire(hold, lock):
    lock.acquire()


def release_inner(hold, lock):
    lock.release()


def write(hold):
    with hold.atomic():
        pytest.fail("the work of a lost hold must not begin")


@for_each("using", BACKENDS)
@for_each("kind", [kind for kind in KINDS if kind.reentrant])
@for_each("use", [check, renew, write])
def test_every_use_of_the_hold_notices_that_it_has_expired(using, kind, use):
    """``check()``, ``renew()`` and ``atomic()`` raise LockLost on every backend."""
    told = []
    lock = changed(kind, using=using, on_lost=told.append)
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


@for_each("using", [*BACKENDS, "prefixed"])
@for_each("taken", [False, True])
def test_the_end_of_a_block_notices_only_that_the_key_was_taken(
    using, taken, in_other_thread
):
    """The work was exclusive if no other caller has acquired the key since."""
    other = db_lock("a", using=using, timeout=5)
    with pytest.raises(LockLost) if taken else nullcontext():
        with db_lock("a", using=using):
            expire("a", using=using)
            if taken:
                in_other_thread(lambda: other.acquire().release())


def release(hold, lock):
    """Release a hold whose key another caller has taken over."""
    hold.release()


@for_each("kind", KINDS)
@for_each("find", [check, renew, acquire, release_inner, release])
def test_on_lost_may_acquire_again(kind, find, in_other_thread):
    """It runs in the thread of its caller, within the call that found the loss."""
    if find in {acquire, release_inner} and not kind.reentrant:
        return
    again, here = [], threading.current_thread()

    def acquire_again(lost):
        # A renewal in the background may find the loss first.
        if threading.current_thread() is here:
            again.append(changed(lock, timeout=5).acquire())

    def take_over():
        # Only the first of several keys has expired.
        other = changed(kind, timeout=5) if len(kind.keys) == 1 else db_lock("a")
        in_other_thread(lambda: other.acquire().release())

    lock = changed(kind, on_lost=acquire_again)
    for _ in range(10):
        hold = lock.acquire()
        if find is release_inner:
            lock.acquire()
        expire(hold)
        if find is release:
            take_over()
        with pytest.raises(LockLost):
            find(hold, lock)
        if again:
            break
        leave(hold)
    (new,) = again
    assert new is not hold
    assert new.held
    assert not hold.held
    new.check()
    new.release()
    assert not new.held
    if find is not release:
        with pytest.raises(LockLost):
            hold.release()
    leave(hold)


def leave(hold):
    """Leave all entries of a lost hold."""
    while hold.count:
        with suppress(LockLost):
            hold.release()


@pytest.mark.front
@for_each("using", ["default", "memory"])
@for_each("by", ["on_lost", "a receiver"])
@sync_and_async
async def test_a_callback_or_receiver_may_acquire_again(do, using, by):
    """The sync methods of a lock work there, also if a task found the loss."""
    again = []

    def acquire_again(hold, **kwargs):
        if not again:
            again.append(db_lock("a", using=using, timeout=5).acquire())

    lock = db_lock("a", using=using, on_lost=acquire_again if by == "on_lost" else None)
    hold = await do.ask(lock, "acquire")
    await do.sync(expire, hold)
    with received(lock_lost, acquire_again), pytest.raises(LockLost):
        await do.ask(hold, "check")
    (new,) = again
    assert new.held
    await do.ask(new, "release")


@pytest.mark.parametrize(
    "using",
    [
        # SQLite's holders keep an expired lease that no other caller has taken.
        pytest.param(
            "default", marks=pytest.mark.engine("postgresql", "mariadb", "mysql")
        ),
        pytest.param("memory", marks=pytest.mark.front),
    ],
)
def test_a_block_ends_with_an_error_if_on_lost_releases_the_hold(using):
    """``on_lost`` runs in the thread of the block, whose end finds the loss."""
    here, told = threading.current_thread(), []

    def release(hold):
        if threading.current_thread() is here:
            told.append(hold)
            hold.release()

    lock = db_lock("a", using=using, on_lost=release)
    for _ in range(10):
        # The outer block keeps the key, so the end of the inner one finds the loss.
        with pytest.raises(LockLost), lock as hold, pytest.raises(LockLost), lock:
            expire(hold)
        if told:
            break
    assert told


# A loss that is reported while the backend is asked about the hold.


EVERY_BACKEND = for_each("backend", ["stopping pessimistic", "stopping memory"])


def meanwhile(stops, function):
    """Call a function once, when the backend has answered a renewal or a check."""
    pending = [function]

    def answer(usual, *_):
        found = usual()
        if pending:
            pending.pop()()
        return found

    for name in ("renew", "verify", "pin"):
        stops.replace(name, answer)


def using_backend(settings, backend):
    return override_settings(DLOCKS={"default": settings.DLOCKS[backend]})


@EVERY_BACKEND
@for_each("kind", KINDS)
@for_each("use", [renew, check, acquire, release_inner])
def test_a_loss_during_a_request_is_not_overlooked(
    backend, kind, use, stops, settings, signalled
):
    """A hold that was reported lost during the request raises LockLost at its end.

    It does so even if the backend's answer, which is older, was that it is held.
    """
    if use in {acquire, release_inner} and not kind.reentrant:
        return
    reported = signalled(lock_lost)
    with using_backend(settings, backend):
        hold = kind.acquire()
        if use is release_inner:
            kind.acquire()
        meanwhile(stops, lambda: lose(hold))
        with pytest.raises(LockLost):
            use(hold, kind)
        assert not hold.held
        assert len(reported) == 1
        with pytest.raises(LockLost):
            hold.release()
        assert len(reported) == 1


@EVERY_BACKEND
def test_a_release_during_a_renewal_ends_it_with_an_error(
    backend, in_other_thread, stops, settings
):
    """``renew()`` does not return for a hold that another thread has released."""
    with using_backend(settings, backend):
        hold = db_lock("a").acquire()
        meanwhile(stops, lambda: in_other_thread(hold.release))
        with pytest.raises(LockLost, match="has been released"):
            hold.renew()
        hold.release()


# What an inner lock asks of the hold that it enters.


@for_each("using", ["default", "memory"])
@for_each("keys", [("a",), ("a", "b")])
def test_a_loss_calls_on_lost_of_every_lock_that_entered(using, keys):
    """Each caller of ``acquire()`` learns of a loss by its own ``on_lost``, once.

    It does not concern inner blocks that have ended, whose work was under the lock.
    """
    told = []

    def lock(name):
        return db_lock(*keys, using=using, on_lost=lambda hold: told.append(name))

    outer, inner, silent = lock("outer"), lock("inner"), db_lock(*keys, using=using)
    with pytest.raises(LockLost), outer:
        for number in range(3):
            with lock(f"ended {number}"):
                pass
        with pytest.raises(LockLost), silent:
            with pytest.raises(LockLost), inner:
                lose("a", using=using)
            assert sorted(told) == ["inner", "outer"]
    assert sorted(told) == ["inner", "outer"]


@pytest.mark.front
def test_a_loss_calls_one_on_lost_once_for_one_hold():
    """A recursive function enters the same hold by the same lock."""
    told = []
    lock = db_lock("a", on_lost=told.append)
    with pytest.raises(LockLost), lock as hold, lock, lock:
        lose("a")
    assert told == [hold]


@for_each("using", ["default", "memory"])
def test_an_error_in_one_on_lost_does_not_stop_the_next(using, caplog):
    """It is logged."""
    told = []

    def fail(hold):
        raise ZeroDivisionError

    with pytest.raises(LockLost), db_lock("a", using=using, on_lost=fail):
        with pytest.raises(LockLost), db_lock("a", using=using, on_lost=told.append):
            lose("a", using=using)
    assert len(told) == 1
    (record,) = (one for one in caplog.records if one.exc_info)
    assert record.exc_info[0] is ZeroDivisionError
    assert "on_lost of 'a' failed" in record.getMessage()
    caplog.clear()


@pytest.mark.front
def test_a_loss_concerns_the_lock_that_was_not_released():
    """The order in which two locks of one hold are released does not matter."""
    told = []
    first = db_lock("a", on_lost=lambda hold: told.append("first"))
    second = db_lock("a", on_lost=lambda hold: told.append("second"))
    first.acquire()
    second.acquire()
    first.release()
    lose("a")
    with pytest.raises(LockLost):
        second.release()
    assert told == ["second"]


@pytest.mark.front
def test_a_failed_acquisition_adds_neither_on_lost_nor_min_hold(is_busy):
    """Its caller never had the lock."""
    told = []
    both = db_lock("a", "b", min_hold=60, on_lost=lambda hold: told.append("both"))
    with override_locks(), held_elsewhere("b"):
        with pytest.raises(LockLost), db_lock("a", on_lost=told.append) as hold:
            assert both.try_acquire() is None
            assert hold.count == 1
            lose("a")
        assert told == [hold]
        with db_lock("a"):
            assert both.try_acquire() is None
        assert not is_busy("a")


@pytest.mark.front
@for_each("keys", [("a",), ("a", "b")])
def test_the_longest_min_hold_of_all_entries_counts(keys, is_busy):
    """The key stays taken until the ``min_hold`` of each entry has passed.

    Each of them counts from its own acquisition.
    """
    with override_locks(ttl=1000, grace=0), frozen_clock() as clock:
        for outer, inner, pause in [
            (0, 60, 0),
            (0, 60, 30),
            (100, 60, 0),
            (100, 60, 70),
        ]:
            began = clock()
            with db_lock(*keys, min_hold=outer):
                clock.tick(pause)
                with db_lock(*keys, min_hold=inner):
                    pass
                clock.tick(1)
            end = max(began + outer, began + pause + inner)
            clock.tick(end - clock() - 1)
            assert is_busy("a"), (outer, inner, pause)
            clock.tick(2)
            assert not is_busy("a"), (outer, inner, pause)


def test_an_inner_min_hold_keeps_the_key_taken(is_busy):
    """It does so in a database too, for one key and for several."""
    for keys in ("a",), ("b", "c"):
        with db_lock(*keys), db_lock(*keys, min_hold=30):
            pass
        assert all(map(is_busy, keys)), keys


def test_on_lost_may_be_any_callable():
    """It need not have a hash, like an instance of a dataclass."""

    @dataclasses.dataclass
    class Losses:
        keys: list

        def __call__(self, hold):
            self.keys.append(hold.key)

    losses = Losses([])
    with pytest.raises(LockLost), db_lock("stock:7", on_lost=losses) as hold:
        clear("stock:7")
        hold.check()
    assert losses.keys == ["stock:7"]
