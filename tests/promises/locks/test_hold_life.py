"""The life of a hold whose caller has no reference to it."""

import asyncio
import gc
import logging
import random
import signal
import threading
import time
import weakref
from contextlib import suppress

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction

from dlocks import LockError, LockLost, db_lock
from tests.promises.yields import yielding
from tests.scripts import run_python
from tests.volume import volume

pytest_plugins = ["tests.promises.stops"]
pytestmark = [
    pytest.mark.front,
    pytest.mark.django_db(transaction=True),
]

# Seconds for which a lease lasts without a renewal.
TTL = 1.5
BRISK = {"ttl": TTL}


def outlive_the_ttl():
    gc.collect()
    time.sleep(2 * TTL)


def test_the_idioms_of_threading_lock_and_redis_lock_work(is_busy):
    """They work for one key and for several. The hold needs no reference."""
    lock, both = db_lock("stock:7", timeout=5, **BRISK), db_lock("a", "b", **BRISK)
    both.acquire()
    try:
        if lock.acquire():
            outlive_the_ttl()
            assert lock.held()
            assert lock.locked()
            assert both.held()
            assert all(is_busy(key) for key in ("stock:7", "a", "b"))
            lock.release()
    finally:
        both.release()
    assert not lock.held()
    assert not both.held()
    assert not any(is_busy(key) for key in ("stock:7", "a", "b"))


async def test_the_idiom_of_asyncio_lock_works():
    """A task that only acquires may end, as one of ``wait_for()`` or a TaskGroup."""
    locks = [db_lock(f"stock:{number}", **BRISK) for number in range(5)]
    await locks[4].aacquire()
    await asyncio.wait_for(locks[0].aacquire(), 5)
    await asyncio.gather(locks[1].aacquire(), locks[2].aacquire())
    async with asyncio.TaskGroup() as group:
        group.create_task(locks[3].aacquire())
    await asyncio.to_thread(outlive_the_ttl)
    for lock in locks:
        assert lock.held()
        assert await lock.alocked()
        await lock.arelease()
        assert not lock.held()
        assert not await lock.alocked()


def test_a_hold_that_ends_just_then_is_not_entered_again(threads, is_busy):
    """Another thread releases the hold while its own thread enters it again."""
    lock = db_lock("stock:7", using="memory", timeout=20)
    for seed in range(volume(60)):
        hold, begin = lock.acquire(), threading.Barrier(2)

        def leave(hold=hold, begin=begin, seed=seed):
            begin.wait(20)
            with yielding(seed):
                hold.release()

        other = threads(leave)
        begin.wait(20)
        with yielding(seed + 1000):
            again = lock.acquire()
        with again:
            other.join(30)
            again.check()
            assert is_busy(using="memory")
        assert not is_busy(using="memory")


def test_threads_that_leave_a_hold_together_lose_nothing(stops, threads, is_busy):
    """Two threads release once each. The one that began later ends first."""
    lock = db_lock("stock:7")
    hold = lock.acquire()
    lock.acquire()
    stops.call("verify", lambda: threads(hold.release).join(30))
    hold.release()
    assert not is_busy()


def test_a_signal_handler_can_release_a_hold_at_any_moment(is_busy):
    """The handler runs while its thread checks or renews the hold."""
    lock = db_lock("stock:7", using="memory")

    def release(*_):
        # It is refused in the middle of a request. The timer strikes again.
        with suppress(RuntimeError, LockError):
            hold.release()

    before = signal.signal(signal.SIGALRM, release)
    try:
        for _ in range(volume(100)):
            hold = lock.acquire()
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 2e-4), 1e-3)
            with suppress(LockLost):
                while hold.held:
                    hold.check()
                    hold.renew()
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert not is_busy(using="memory")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.engine("postgresql")
def test_a_lease_of_async_work_lasts_for_the_transaction(is_busy):
    """The event loop of the work is closed, and the ttl has passed, at the commit."""

    async def work():
        async with db_lock("stock:7", scope="lease", using="brisk"):
            pass

    with transaction.atomic():
        async_to_sync(work)()
        outlive_the_ttl()
        assert is_busy(using="brisk")
    assert not is_busy(using="brisk")


def test_a_long_hold_is_reported_once(caplog, frozen_lock_clock):
    """By default after ten times its ttl."""
    # A key of its own, since the clock goes back after the test.
    lock = db_lock("a long hold", ttl=30, using="memory")
    lock.acquire()
    with caplog.at_level(logging.WARNING, "dlocks"):
        for _ in range(35):
            frozen_lock_clock.tick(9.9)
    lock.release()
    (record,) = caplog.records
    assert "'a long hold' has been held for" in record.getMessage()


def test_a_resource_warning_names_the_line(tmp_path):
    """Python in its development mode reports what a thread never released."""
    script = tmp_path / "forgetful.py"
    script.write_text(
        "import django, threading, time\n"
        "from django.conf import settings\n"
        "memory = {'BACKEND': 'dlocks.backends.memory.MemoryBackend'}\n"
        "settings.configure(DLOCKS={'default': memory}); django.setup()\n"
        "from dlocks import db_lock\n"
        "def forget():\n"
        "    db_lock('stock:7').acquire()\n"
        "thread = threading.Thread(target=forget)\n"
        "thread.start(); thread.join()\n"
        "time.sleep(3)\n"
    )
    ended = run_python("-X", "dev", str(script), warnings="default")
    assert "forgetful.py:7: ResourceWarning: 'stock:7' was lost by" in (ended.stderr)


def test_a_released_hold_needs_no_garbage_collection():
    """Processes that switch the collector off do not grow with each hold."""
    gc.collect()
    gc.disable()
    try:
        for keys in ("a", "ab"):
            hold = db_lock(*keys, scope="lease", on_lost=print).acquire()
            left = weakref.ref(hold)
            hold.release()
            del hold
            assert left() is None, keys
    finally:
        gc.enable()
