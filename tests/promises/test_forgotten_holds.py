"""A hold that has ended needs no memory, however it was left."""

import asyncio
import gc
import itertools
import sys
import weakref

import pytest
from django.db import transaction
from django.http import StreamingHttpResponse

from dlocks import db_lock, locked_view
from dlocks.testing import lose
from tests.for_each import for_each
from tests.promises.ended import in_ended_thread

pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]

# How many holds end one after the other, and how many may be remembered.
HOLDS, FEW = 60, 20
RESPONSES = 2000
IN_MEMORY = {"using": "memory"}


def remembered(references):
    gc.collect()
    return sum(one() is not None for one in references)


def by_a_block(key):
    hold = db_lock(key, **IN_MEMORY).acquire()
    with hold:
        return weakref.ref(hold)


def by_the_block_of_another_thread(key):
    hold = in_ended_thread(db_lock(key, **IN_MEMORY).acquire)
    with hold:
        return weakref.ref(hold)


def by_the_holds_of_each_key(key):
    hold = db_lock(f"{key} a", f"{key} b", **IN_MEMORY).acquire()
    for one in hold.holds:
        one.release()
    return weakref.ref(hold)


def by_a_loss(key, *more):
    """Lose the hold of a job that is repeated, and ends without ``release()``."""
    hold = db_lock("job", *more, reentrant=False, **IN_MEMORY).acquire()
    for key in hold.keys:
        lose(key, **IN_MEMORY)
    return weakref.ref(hold)


def by_a_loss_of_each_key(key):
    return by_a_loss(key, "next job")


def by_a_detach(key):
    hold = db_lock(key).acquire()
    hold.detach()
    return weakref.ref(hold)


@for_each(
    "end",
    [
        by_a_block,
        by_the_block_of_another_thread,
        by_the_holds_of_each_key,
        by_a_loss,
        by_a_loss_of_each_key,
        by_a_detach,
    ],
)
def test_what_acquire_has_returned_is_forgotten_after_its_end(end):
    """A caller that acquires ever new keys by ``acquire()`` needs no more memory.

    It need not leave each hold by ``release()``.
    """
    assert remembered([end(f"stock:{number}") for number in range(HOLDS)]) <= FEW


async def test_what_a_task_that_is_done_has_acquired_is_forgotten_after_its_end():
    """A task acquires the lock for another one, which uses it in a block.

    The event loop runs on, and neither the task nor the hold stays in memory.
    """

    async def use(key):
        task = asyncio.create_task(db_lock(key, **IN_MEMORY).aacquire())
        hold = await task
        async with hold:
            return weakref.ref(hold), weakref.ref(task)

    references = [await use(f"stock:{number}") for number in range(HOLDS)]
    assert remembered([hold for hold, _ in references]) <= FEW
    assert remembered([task for _, task in references]) <= FEW


def test_responses_that_the_garbage_collector_finds_do_not_stop_the_renewals(until):
    """It runs in any thread, such as the one that looks after all holds."""
    before = gc.get_threshold()

    def answer(number):
        response = StreamingHttpResponse(iter(["text"]))
        # Only the garbage collector finds it.
        response.itself = response
        locked_view(f"stock:{number}", **IN_MEMORY)(lambda request: response)(None)

    try:
        gc.set_threshold(50, 2, 2)
        for number in range(RESPONSES):
            answer(number)
    finally:
        gc.set_threshold(*before)
    locks = [db_lock(f"stock:{number}", **IN_MEMORY) for number in range(RESPONSES)]

    def are_released():
        # It does nothing while another thread collects, so once is not enough.
        gc.collect()
        return not any(lock.locked() for lock in locks)

    until(are_released)


def test_a_hold_that_is_entered_often_in_a_transaction_is_forgotten_after_it():
    """Each block in a transaction enters the hold that the last one has left.

    The transaction may have any number of them. The last ones take no longer than the
    first ones, and the hold is forgotten at the end.
    """
    lock = db_lock("stock:7", scope="lease", **IN_MEMORY)

    def calls_of_blocks(number):
        """Return how many functions of Python are called."""
        calls = itertools.count()
        sys.setprofile(lambda frame, event, _: event == "call" and next(calls))
        try:
            for _ in range(number):
                with lock:
                    pass
        finally:
            sys.setprofile(None)
        return next(calls)

    with transaction.atomic():
        calls_of_blocks(2)
        first = calls_of_blocks(10)
        calls_of_blocks(HOLDS)
        assert calls_of_blocks(10) < 2 * first
        with lock as hold:
            reference = weakref.ref(hold)
        del hold
    assert not remembered([reference])
