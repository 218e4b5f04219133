"""A coroutine that is closed leaves nothing acquired.

``close()`` raises GeneratorExit where the coroutine is suspended, and nothing can be
awaited any more. So does the garbage collector, for a task whose loop was closed.
"""

import asyncio
import contextlib
import gc
import threading
import weakref

import pytest
from asgiref.sync import sync_to_async

from dlocks import aresume_hold, db_lock, db_rwlock, db_semaphore
from dlocks.testing import held_elsewhere
from tests.for_each import for_each

pytest_plugins = ["tests.promises.stops"]
pytestmark = [pytest.mark.holds, pytest.mark.django_db(transaction=True)]


@contextlib.asynccontextmanager
async def held(key, using):
    block = held_elsewhere(key, using=using)
    await sync_to_async(block.__enter__)()
    try:
        yield
    finally:
        await sync_to_async(block.__exit__)(None, None, None)


def close(task):
    """Close the coroutine of a suspended task."""
    with contextlib.suppress(RuntimeError):
        # It awaits something at the end of its blocks.
        task.get_coro().close()


async def end(task):
    """End a task, which cannot go on with a coroutine that was closed."""
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() or isinstance(task.exception(), RuntimeError)


async def acquire_both(**options):
    await db_lock("a", "b", timeout=30, **options).aacquire()


async def enter_both(**options):
    async with db_lock("a", "b", timeout=30, **options):
        pytest.fail("entered")


async def enter_one_after_the_other(**options):
    async with db_lock("a", **options), db_lock("b", timeout=30, **options):
        pytest.fail("entered")


async def enter_a_permit_first(**options):
    async with db_semaphore("a", 2, **options), db_lock("b", timeout=30, **options):
        pytest.fail("entered")


WORK = [acquire_both, enter_both, enter_one_after_the_other, enter_a_permit_first]


@for_each("work", WORK)
@for_each("using", ["default", "memory"])
@for_each("fair", [True, False])
async def test_a_coroutine_closed_in_a_wait_leaves_its_first_key(
    work, using, fair, until, is_busy
):
    """It waits for its second key. Both keys are free long before their ttl."""

    def is_held(key):
        return is_busy(key, using=using)

    async with held("b", using):
        task = asyncio.create_task(work(using=using, fair=fair))
        await asyncio.to_thread(until, lambda: is_held("a"))
        close(task)
        await asyncio.to_thread(until, lambda: not is_held("a"), 5)
        assert await asyncio.to_thread(is_held, "b")
    await asyncio.to_thread(until, lambda: not is_held("b"), 5)
    await end(task)


@for_each("using", ["default", "memory"])
async def test_a_coroutine_closed_in_a_wait_keeps_what_its_task_held(
    using, until, is_busy
):
    """Its task holds one of the keys already, and goes on."""
    lock = db_lock("a", using=using)

    class Closing:
        """Await a coroutine until a condition is true, and close it then."""

        def __init__(self, coroutine, is_time):
            self.coroutine, self.is_time = coroutine, is_time

        def __await__(self):
            while not self.is_time():
                future = self.coroutine.send(None)
                if self.is_time():
                    break
                yield future
            self.coroutine.close()

    def waits():
        return hold.count == 2

    async with lock as hold:
        async with held("b", using):
            await Closing(acquire_both(using=using), waits)
            await asyncio.to_thread(until, lambda: hold.count == 1)
            await hold.acheck()
    await asyncio.to_thread(until, lambda: not is_busy("a", using=using), 5)


LOCKS = {
    "one key": lambda **options: db_lock("a", **options),
    "several keys": lambda **options: db_lock("a", "b", **options),
    "a read lock": lambda **options: db_rwlock("a", **options).read(),
    "a permit": lambda **options: db_semaphore("a", 2, **options),
}


@for_each("using", ["stopping pessimistic", "stopping memory"])
@for_each("lock_of", LOCKS.values())
@for_each("as_block", [False, True])
async def test_a_coroutine_closed_in_a_request_leaves_nothing(
    using, lock_of, as_block, stops, until, is_busy
):
    """The backend grants the lock, and the reply comes after the end."""
    granted, arrives, lock = threading.Event(), threading.Event(), lock_of(using=using)

    def arrive(usual, *_):
        answer = usual()
        granted.set()
        arrives.wait(30)
        return answer

    for name in ("acquire", "acquire_all"):
        stops.replace(name, arrive)

    async def work():
        if as_block:
            async with lock:
                pytest.fail("entered")
        await lock.aacquire()

    task = asyncio.create_task(work())
    assert await asyncio.to_thread(granted.wait, 30)
    close(task)
    arrives.set()
    await asyncio.to_thread(until, lambda: not is_busy("a", using=using), 5)
    await asyncio.to_thread(until, lambda: not is_busy("b", using=using), 5)
    await end(task)


@pytest.mark.front
@for_each("work", WORK)
@for_each("ending", ["closed", "collected", "closed after its loop"])
def test_a_wait_that_lost_its_loop_leaves_its_first_key(
    work, ending, until, is_busy, in_other_thread
):
    """The loop was stopped. The coroutine is closed, or its task becomes garbage."""
    hold = in_other_thread(db_lock("b", using="memory").acquire)

    async def main():
        task = asyncio.create_task(work(using="memory"))
        await asyncio.to_thread(until, lambda: hold.queue_length() == 1)
        # No request is on its way. These are the two tasks here.
        while len(asyncio.all_tasks()) > 2:
            await asyncio.sleep(0.001)
        return task

    loop = asyncio.new_event_loop()
    task = loop.run_until_complete(main())
    assert is_busy("a", using="memory")
    loop.run_until_complete(loop.shutdown_default_executor())
    # That its tasks are destroyed is no news here.
    loop.set_exception_handler(lambda *_: None)
    if ending == "closed":
        close(task)
        until(lambda: not is_busy("a", using="memory"), 5)
    loop.close()
    if ending == "closed after its loop":
        close(task)
    reference = weakref.ref(task)
    del task
    gc.collect()
    until(lambda: not is_busy("a", using="memory"), 5)
    if (task := reference()) is not None:
        # Its open block has kept it.
        close(task)
    hold.release()
    until(lambda: not is_busy("b", using="memory"), 5)


@contextlib.contextmanager
def new_loop():
    """Return a loop, in which a destroyed task is no news."""
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        loop.set_exception_handler(lambda *_: None)
        yield loop


@pytest.mark.front
@for_each("case", ["block of a lock", "block of a hold", "block that ends"])
def test_a_block_that_is_closed_outside_of_its_loop_frees_its_key(case, until, is_busy):
    """The loop stays open, and nothing in it runs.

    It may have stopped before the release at the end of the block was sent.
    """
    lock = db_lock("a", using="memory")

    async def work(entered, leave):
        async with await lock.aacquire() if case == "block of a hold" else lock:
            entered.set()
            await leave.wait()

    async def main():
        entered, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(work(entered, leave))
        await entered.wait()
        if case == "block that ends":
            leave.set()
        return task

    with new_loop() as loop:
        close(loop.run_until_complete(main()))
        until(lambda: not is_busy("a", using="memory"), 5)


async def detach(lock, text):
    await (await lock.aacquire()).adetach(within=60)


async def resume(lock, text):
    await aresume_hold(text)


@pytest.mark.front
@for_each("request_name", ["renew", "exchange"])
@for_each("ending", ["closed", "closed after its loop"])
def test_a_handover_that_is_closed_in_its_request_frees_the_key(
    request_name, ending, stops, until, is_busy
):
    """No caller receives the text or the hold."""
    lock, text = db_lock("a", using="memory", ttl=1), ""
    if request_name == "exchange":
        text = lock.acquire().detach(within=60)
    stop = stops.at(request_name, "memory")
    work = resume if text else detach

    async def main():
        task = asyncio.create_task(work(lock, text))
        await asyncio.to_thread(stop.wait)
        return task

    with new_loop() as loop:
        task = loop.run_until_complete(main())
        if ending == "closed":
            close(task)
        stop.go_on()
        if ending != "closed":
            loop.close()
            close(task)
        until(lambda: not is_busy("a", using="memory"), 5)


def test_a_claim_that_joins_after_the_end_of_its_loop_is_cancelled(
    stops, until, threads, in_other_thread
):
    """The task still exists, so that nothing closes its coroutine."""
    using, polls = "stopping memory", []
    asked, joins, joined = threading.Event(), threading.Event(), threading.Event()

    def join(usual, claim, *_):
        if claim.key != "a":
            return usual()
        asked.set()
        joins.wait(30)
        ticket = usual()
        joined.set()
        return ticket

    stops.replace("enqueue", join, using)
    stops.replace("poll", lambda usual, *_: polls.append(None) or usual(), using)
    one, other = (db_lock(key, using=using, timeout=60) for key in "ab")
    hold, another = in_other_thread(one.acquire), in_other_thread(other.acquire)
    waiter = threads(lambda: other.acquire().release())
    loop = asyncio.new_event_loop()
    # That its task is destroyed is no news here, nor in a later test.
    loop.set_exception_handler(lambda *_: None)
    task = loop.create_task(one.aacquire())
    while not asked.is_set():
        loop.run_until_complete(asyncio.sleep(0.001))
    loop.close()
    # The thread that serves the waiters has looked since.
    seen = len(polls)
    until(lambda: len(polls) > seen + 1)
    joins.set()
    assert joined.wait(30)
    hold.release()
    with one as following:
        # Its claim was cancelled, and is no lease that had to expire.
        assert not following.takeover
    another.release()
    waiter.join(30)
    close(task)
