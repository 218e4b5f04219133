"""A hold is kept while any caller works under it, and is lost loudly after the last."""

import asyncio
import contextlib
import logging
import time
from queue import SimpleQueue

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections

from dlocks import LockLost, db_lock, db_rwlock, db_semaphore, lock_lost
from tests.promises.ended import in_ended_thread, is_refused
from tests.promises.received import received
from tests.settings import DLOCKS

pytestmark = [pytest.mark.holds, pytest.mark.django_db(transaction=True)]

ALIASES = [
    alias
    for alias in ("default", "optimistic", "insert", "memory", "session")
    if alias in DLOCKS
]
EXCLUSIVE = {"insert", "session"}


def locks_of(alias, **options):
    """Return a lock of each kind that a backend supports."""
    options["using"] = alias
    locks = [
        db_lock(f"{alias} one", **options),
        db_lock(f"{alias} two", f"{alias} three", **options),
    ]
    if alias not in EXCLUSIVE:
        locks.append(db_rwlock(f"{alias} read", **options).read())
        locks.append(db_semaphore(f"{alias} permit", 1, **options))
    return locks


@pytest.fixture
def lost():
    """Return the keys whose loss the signal has reported, in order."""
    keys = []
    with received(lock_lost, lambda hold, **_: keys.append(hold.key)):
        yield keys


@pytest.fixture
def outlast(lost, until):
    """Return a function that waits until holds of ended threads are noticed.

    Each backend loses a decoy for this.
    """

    def wait(*aliases):
        decoys = [db_lock(f"decoy {alias}", using=alias) for alias in aliases]
        in_ended_thread(lambda: [decoy.acquire() for decoy in decoys])
        until(lambda: {decoy.key for decoy in decoys} <= {*lost})

    return wait


def is_free(lock):
    """Return whether another caller acquires a lock. For a read lock, this writes."""
    if lock.key.endswith("read"):
        lock = db_lock(lock.key, using=lock.using)
    return in_ended_thread(lambda: not is_refused(lock))


def deadline(hold):
    return time.monotonic() + hold.remaining


def work_in(*holds):
    """Return a function for ``paused()`` that works in the blocks of holds."""

    def work():
        with contextlib.ExitStack() as stack:
            for hold in holds:
                stack.enter_context(hold)
            yield
            for hold in holds:
                hold.check()

    return work


def test_the_open_block_of_another_thread_keeps_a_hold(paused, lost, outlast, until):
    """The thread that acquired it may end. The hold is renewed, and not reported.

    This holds for one key and for several, for read locks and permits, on each backend.
    """
    locks = [lock for alias in ALIASES for lock in locks_of(alias, ttl=2.0)]
    holds = in_ended_thread(lambda: [lock.acquire() for lock in locks])
    end = paused(work_in(*holds))
    first = [deadline(hold) for hold in holds]
    outlast(*ALIASES)
    for hold, lock, before in zip(holds, locks, first, strict=True):
        until(lambda hold=hold, before=before: deadline(hold) > before + 0.1)
        assert hold.held, hold
        assert not is_free(lock), hold
    end()
    for lock in locks:
        assert is_free(lock)
    assert all(key.startswith("decoy") for key in lost)


@pytest.mark.front
def test_a_hold_may_be_passed_on_repeatedly(paused, lost, outlast):
    """Each thread enters it once, and may end when the next one has entered it."""
    lock = db_lock("stock:7")
    hold = in_ended_thread(lambda: [lock.acquire(), lock.acquire()][0])
    end_first = paused(work_in(hold))
    end_second = paused(work_in(hold))
    end_first()
    outlast("default")
    assert hold.held
    assert not is_free(lock)
    end_second()
    assert is_free(lock)
    assert lost == ["decoy default"]


@pytest.mark.front
def test_a_block_keeps_a_hold_of_a_closed_event_loop(lost, outlast):
    """The hold comes from ``async_to_sync(lock.aacquire)()`` or ``asyncio.run()``.

    The block is one of this thread, or of a task of another loop.
    """
    locks = [db_lock("stock:7"), db_lock("a", "b"), db_lock("c", using="memory")]
    holds = [async_to_sync(lock.aacquire)() for lock in locks]
    locks.append(db_lock("stock:8"))

    async def acquire():
        hold = await locks[-1].aacquire()
        await sync_to_async(connections.close_all)()
        return hold

    holds.append(asyncio.run(acquire()))
    locks.append(db_lock("stock:9"))
    holds.append(async_to_sync(locks[-1].aacquire)())

    def check():
        outlast("default", "memory")
        for hold, lock in zip(holds, locks, strict=True):
            hold.check()
            assert not is_free(lock), hold

    async def work():
        async with holds[-1]:
            await sync_to_async(check)()

    with contextlib.ExitStack() as stack:
        for hold in holds[:-1]:
            stack.enter_context(hold)
        async_to_sync(work)()
    for lock in locks:
        assert is_free(lock)
    assert all(key.startswith("decoy") for key in lost)


def test_a_hold_whose_callers_have_ended_is_lost(lost, until, caplog):
    """The callback, the signal and a warning report it, and the key is released.

    This is so without renewals too, long before the ttl has passed. Another thread that
    still has the hold gets LockLost from it. No block begins under a lost hold.
    """
    reported = SimpleQueue()
    policy = {"on_lost": lambda hold: reported.put(hold.keys)}
    locks = [db_lock("not renewed", ttl=100, renew=False, **policy)]
    locks += [lock for alias in ALIASES for lock in locks_of(alias, **policy)]
    with caplog.at_level(logging.WARNING, "dlocks"):
        holds = in_ended_thread(lambda: [lock.acquire() for lock in locks])
        keys = {key for lock in locks for key in lock.keys}
        until(lambda: {*lost} == keys)
    assert sorted(reported.get(timeout=20) for _ in locks) == sorted(
        lock.keys for lock in locks
    )
    for key in keys:
        assert f"{key!r} was lost by" in caplog.text
    assert caplog.text.count("and its thread has ended") == len(lost) == len(keys)
    for hold, lock in zip(holds, locks, strict=True):
        assert not hold.held
        assert is_free(lock), hold
        for method in hold.check, hold.renew, hold.__enter__, hold.release:
            with pytest.raises(LockLost, match="its thread has ended"):
                method()
    assert reported.empty()


@pytest.mark.front
def test_a_thread_that_has_ended_is_noticed_soon_beside_a_hold_of_the_main_thread(
    lost, until
):
    """That hold, which is due for a renewal much later, does not put it off."""
    with db_lock("main", ttl=3_000):
        # After this, nothing else is due before the renewal.
        in_ended_thread(db_lock("first").acquire)
        until(lambda: lost == ["first"], 10)
        time.sleep(1)
        in_ended_thread(db_lock("second", ttl=3_000).acquire)
        until(lambda: lost == ["first", "second"], 10)
        time.sleep(1)
        passed_on = db_lock("third", ttl=3_000).acquire()
        in_ended_thread(passed_on.__enter__)
        passed_on.release()
        until(lambda: lost == ["first", "second", "third"], 10)


def test_a_hold_of_a_closed_event_loop_is_lost(lost, until, caplog):
    """No block was open, and no other caller has entered it."""
    lock = db_lock("stock:7")
    with caplog.at_level(logging.WARNING, "dlocks"):
        hold = async_to_sync(lock.aacquire)()
        until(lambda: lost == ["stock:7"])
    assert "its event loop has ended" in caplog.text
    with pytest.raises(LockLost):
        hold.release()
    assert is_free(lock)


@pytest.mark.front
def test_a_thread_that_ends_inside_a_block_keeps_nothing(lost, until, caplog):
    """The block of a generator is still open when the thread ends."""

    def items(hold):
        with hold:
            yield 1

    lock = db_lock("stock:7")
    hold = in_ended_thread(lock.acquire)
    generator = items(hold)
    with caplog.at_level(logging.WARNING, "dlocks"):
        in_ended_thread(lambda: next(generator))
        until(lambda: lost == ["stock:7"])
    assert "its thread has ended" in caplog.text
    assert is_free(lock)
    with pytest.raises(LockLost):
        next(generator)


@pytest.mark.front
def test_an_entry_that_no_block_leaves_is_lost(paused, lost, outlast, until):
    """An ended thread has acquired twice, and another one leaves only once."""
    lock = db_lock("stock:7")
    hold = in_ended_thread(lambda: [lock.acquire(), lock.acquire()][0])
    end = paused(work_in(hold))
    outlast("default")
    assert hold.held
    end()
    until(lambda: lost == ["decoy default", "stock:7"])
    assert is_free(lock)
    with pytest.raises(LockLost):
        hold.release()
