"""A shutdown releases all keys, and no block whose key it took ends in silence."""

import asyncio
import logging
import threading
import time
from queue import SimpleQueue

import pytest
from asgiref.sync import async_to_sync
from django.db import connection

from dlocks import (
    LockLost,
    db_lock,
    db_rwlock,
    db_semaphore,
    lock_lost,
    lock_released,
    shutdown,
)
from tests.scripts import run_python

pytestmark = [pytest.mark.holds, pytest.mark.django_db(transaction=True)]

WHY = "its process released all of its locks"


@pytest.fixture
def ends(signalled):
    """Return the signals of the ends of holds, with the holds."""
    return signalled(lock_lost, lock_released)


@pytest.fixture
def at_work(threads):
    """Return a function that starts a thread in a block of a lock.

    It returns a function that lets the block end, and returns its error.
    """

    def start(lock, block=None):
        entered, leave = threading.Event(), threading.Event()

        def pause():
            entered.set()
            assert leave.wait(30)

        def run():
            try:
                (block or in_lock)(lock, pause)
            except LockLost as error:
                return error

        thread = threads(run)
        assert entered.wait(20)

        def end():
            leave.set()
            thread.join(30)
            return thread.results[0]

        return end

    return start


def in_lock(lock, pause):
    with lock:
        pause()


def in_hold(lock, pause):
    with lock.acquire():
        pause()


def in_function(lock, pause):
    lock(pause)()


def in_task(lock, pause):
    async def block():
        async with lock:
            await asyncio.to_thread(pause)

    async_to_sync(block)()


def blocks(**options):
    """Return the arguments of ``at_work()`` for blocks of each kind."""
    return [
        (db_lock("with lock", **options),),
        (db_lock("with hold", **options), in_hold),
        (db_lock("function", **options), in_function),
        (db_lock("task", **options), in_task),
        (db_lock("one", "two", **options),),
        (db_rwlock("read", **options).read(),),
        (db_semaphore("permit", 2, **options),),
    ]


KEYS = {"with lock", "with hold", "function", "task", "one", "two", "read", "permit"}


@pytest.mark.parametrize("using", ["default", "memory"])
def test_blocks_whose_keys_a_shutdown_released_end_with_lock_lost(
    using, at_work, ends, is_busy, caplog
):
    """The threads are still at work. The callback, the signal and a log report it."""
    reported = SimpleQueue()
    options = {"using": using, "on_lost": lambda hold: reported.put(hold.keys)}
    works = [at_work(*block) for block in blocks(**options)]
    with caplog.at_level(logging.WARNING, "dlocks"):
        shutdown()
    assert {signal for signal, _ in ends} == {lock_lost}
    assert sorted(hold.key for _, hold in ends) == sorted(KEYS)
    assert not any(is_busy(key, using) for key in KEYS)
    for end in works:
        error = end()
        assert isinstance(error, LockLost)
        assert WHY in str(error)
    assert {reported.get(timeout=20) for _ in works} == {
        *((key,) for key in KEYS - {"one", "two"}),
        ("one", "two"),
    }
    assert reported.empty()
    for key in KEYS:
        assert f"{key!r} was lost by" in caplog.text


@pytest.mark.engine("postgresql", "mariadb")
def test_blocks_of_session_locks_end_with_lock_lost(at_work, is_busy):
    """The lock of the server's session is released, too."""
    end = at_work(db_lock("stock:7", using="session"))
    shutdown()
    assert not is_busy(using="session")
    assert isinstance(end(), LockLost)


def test_a_shutdown_does_not_wait_for_a_guarded_transaction(at_work, is_busy):
    """The transaction commits under the lock, which its block keeps until its end.

    Until then, no other caller acquires the key.
    """
    ended = threading.Event()

    def work(lock, pause):
        with lock as hold:
            with hold.atomic():
                pause()
            ended.set()

    end = at_work(db_lock("stock:7"), work)
    began = time.monotonic()
    shutdown()
    assert time.monotonic() < began + 5
    assert connection.vendor == "sqlite" or is_busy()
    assert end() is None
    assert ended.is_set()
    assert not is_busy()


@pytest.mark.front
def test_the_block_itself_may_shut_down():
    """The caller of ``shutdown()`` is in a block, which ends with LockLost."""
    with pytest.raises(LockLost, match=WHY), db_lock("stock:7") as hold:
        shutdown()
        assert not hold.held
        for method in hold.check, hold.renew:
            with pytest.raises(LockLost, match=WHY):
                method()
        assert db_lock("stock:7").acquire().release() is None


@pytest.mark.front
def test_a_hold_without_a_block_is_released_with_a_warning(ends, is_busy, caplog):
    """No signal says that it is lost. Its own release does, and so does a check."""
    lock = db_lock("stock:7")
    hold = lock.acquire()
    with caplog.at_level(logging.WARNING, "dlocks"):
        shutdown()
    assert "'stock:7' was never released by" in caplog.text
    assert ends == [(lock_released, hold)]
    assert not is_busy()
    ends.clear()
    assert not hold.held
    with pytest.raises(LockLost, match=WHY):
        hold.check()
    with pytest.raises(LockLost, match=WHY):
        lock.release()
    assert ends == []


@pytest.mark.front
def test_a_shutdown_in_a_coroutine_releases_all_keys(is_busy):
    async def main():
        hold = await db_lock("a").aacquire()
        shutdown()
        assert not hold.held
        return await asyncio.to_thread(is_busy, "a")

    assert not async_to_sync(main)()


@pytest.mark.front
def test_an_exit_ends_the_block_of_a_daemon_thread_with_lock_lost():
    """The process releases the key at its exit while the thread still works."""
    done = run_python("-c", """
import atexit, threading
entered, leave = threading.Event(), threading.Event()

def work():
    try:
        with db_lock("stock:7", on_lost=lambda hold: print("on_lost", hold.key)):
            entered.set()
            leave.wait()
    except LockLost as error:
        print(type(error).__name__)

thread = threading.Thread(target=work, daemon=True)

@atexit.register
def wait():
    # This was registered before dlocks, and runs after its exit.
    leave.set()
    thread.join()

import django; django.setup()
from dlocks import LockLost, db_lock
thread.start()
entered.wait()
""", DJANGO_SETTINGS_MODULE="tests.settings")  # fmt: skip
    assert done.stdout == "on_lost stock:7\nLockLost\n", done.stderr
    assert "'stock:7' was lost by" in done.stderr
