"""Signal handlers that use locks, at each moment of another use in their thread."""

from __future__ import annotations

import itertools
import threading
from contextlib import suppress

import pytest

from dlocks import LockBackendError, LockTimeout, db_lock
from tests.internals import callers

pytest_plugins = ["tests.moments"]
pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]

LOCK = db_lock("stock:7", using="memory", timeout=0)
# What a thread remembers of its holds, and the states of these.
WITHIN = "core/callers", "core/life"


def by_a_block(lock):
    with lock:
        pass


def by_a_release(lock):
    lock.acquire()
    lock.release()


@pytest.mark.parametrize("key", ["stock:7", "other"])
@pytest.mark.parametrize("use", [by_a_block, by_a_release])
def test_a_handler_that_uses_a_lock_disturbs_no_other_use(
    key, use, strike_in_dlocks, is_busy
):
    """It may be a lock on the same key. It works, or it is refused."""

    def handle():
        with suppress(LockTimeout, LockBackendError):
            use(db_lock(key, using="memory", timeout=0))

    def work():
        hold = LOCK.acquire()
        assert LOCK.held()
        with LOCK as again:
            assert again is hold
        LOCK.release()
        with LOCK:
            pass

    wrong = {}
    for number in itertools.count():
        try:
            struck = strike_in_dlocks(number, work, handle, WITHIN)
        except Exception as error:
            wrong[number], struck = repr(error), True
        if is_busy("stock:7", "memory") or is_busy("other", "memory"):
            wrong[number] = "a key is taken"
        if threading.current_thread() in callers._by_caller:
            wrong[number] = "an entry is left"
            callers.reset()
        if not struck:
            break
    assert number > 100
    assert wrong == {}


def by_an_acquisition(lock):
    lock.acquire()


def by_a_later_acquisition(lock):
    by_a_release(lock)
    lock.acquire()


@pytest.mark.parametrize("key", ["stock:7", "other"])
@pytest.mark.parametrize("use", [by_an_acquisition, by_a_later_acquisition])
def test_what_a_handler_has_acquired_stays_known(key, use, strike_in_dlocks, is_busy):
    """Its thread releases it later. It may be a lock on the same key."""
    theirs = db_lock(key, using="memory", timeout=0)

    def work():
        # The handler may have been faster.
        with suppress(LockTimeout), LOCK, LOCK:
            pass

    wrong = {}
    for number in itertools.count():
        kept = []

        def handle(kept=kept):
            with suppress(LockTimeout, LockBackendError):
                use(theirs)
                kept.append(theirs)

        try:
            struck = strike_in_dlocks(number, work, handle, WITHIN)
            for lock in kept:
                lock.release()
        except Exception as error:
            wrong[number], struck = repr(error), True
        if is_busy("stock:7", "memory") or is_busy("other", "memory"):
            wrong[number] = "a key is taken"
            break
        if threading.current_thread() in callers._by_caller:
            wrong[number] = "an entry is left"
            callers.reset()
        if not struck:
            break
    assert wrong == {}
    assert number > 100
