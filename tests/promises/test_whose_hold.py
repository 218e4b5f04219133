"""No caller releases the hold of another: ``release()``, ``held()`` and blocks."""

import asyncio
import contextlib
import threading
from contextlib import AsyncExitStack, ExitStack
from functools import partial

import pytest
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections

from dlocks import LockTimeout, db_lock, db_rwlock, db_semaphore
from tests.for_each import for_each
from tests.promises.yields import yielding

pytestmark = [pytest.mark.holds, pytest.mark.django_db(transaction=True)]

KEYS = ("stock:7", "stock:8")


def permits(**options):
    return db_semaphore("stock:7", 2, reentrant=False, **options)


# The locks of all kinds, as a function that makes one. The first key is always the
# same.
EXCLUSIVE = {
    "one key": lambda **options: db_lock("stock:7", **options),
    "several keys": lambda **options: db_lock(*KEYS, **options),
}
SHARED = {
    "permits": permits,
    "a reentrant permit": lambda **options: db_semaphore("stock:7", 2, **options),
    "read locks": lambda **options: db_rwlock(
        "stock:7", reentrant=False, **options
    ).read(),
    "a reentrant read lock": lambda **options: db_rwlock("stock:7", **options).read(),
}
KINDS = [*(EXCLUSIVE | SHARED).items()]


def lock_of(kind, **options):
    return kind[1](**options)


@contextlib.asynccontextmanager
async def held_by_another_task(lock):
    """Let another task hold a lock until the end of the block, undisturbed."""
    holding, over = asyncio.Event(), asyncio.Event()

    async def work():
        hold = await lock.aacquire()
        holding.set()
        await over.wait()
        await hold.acheck()
        assert lock.held()
        await lock.arelease()
        assert not lock.held()

    async with asyncio.TaskGroup() as group:
        group.create_task(work())
        await holding.wait()
        yield
        over.set()


# release() and held()


@for_each("kind", KINDS)
async def test_arelease_never_means_the_hold_of_a_running_task(kind):
    """A task whose ``aacquire()`` timed out calls ``arelease()`` in its ``finally``.

    Another task of the event loop holds the lock. ``arelease()`` raises RuntimeError,
    and ``held()`` is False.
    """
    lock = lock_of(kind)

    async def release_what_was_never_acquired():
        try:
            with contextlib.suppress(LockTimeout):
                await db_lock("stock:7", timeout=0).aacquire()
            assert not lock.held()
        finally:
            await lock.arelease()

    async with held_by_another_task(lock):
        with pytest.raises(RuntimeError, match="was not acquired by this task"):
            await asyncio.create_task(release_what_was_never_acquired())


@for_each("kind", KINDS)
async def test_arelease_means_the_hold_of_a_task_that_is_done(kind):
    """``wait_for()``, ``gather()`` and a TaskGroup acquire in such a task."""
    lock = lock_of(kind)
    hold = await asyncio.create_task(lock.aacquire())
    assert lock.held()
    await lock.arelease()
    assert not hold.held
    assert not lock.held()
    with pytest.raises(RuntimeError, match="was not acquired by this task"):
        await lock.arelease()


@pytest.mark.front
async def test_arelease_releases_all_that_done_tasks_have_acquired():
    """There is a running task with a hold of the same lock, which keeps it."""
    lock = db_semaphore("stock:7", 3)
    async with held_by_another_task(lock):
        holds = await asyncio.gather(lock.aacquire(), lock.aacquire())
        await lock.arelease()
        assert sum(hold.held for hold in holds) == 1
        await lock.arelease()
        assert not any(hold.held for hold in holds)
        with pytest.raises(RuntimeError, match="was not acquired by this task"):
            await lock.arelease()


@pytest.mark.front
@for_each("kind", KINDS)
def test_release_never_means_the_hold_of_another_thread(kind, in_other_thread):
    lock = lock_of(kind)
    hold = in_other_thread(lock.acquire)
    assert not lock.held()
    with pytest.raises(RuntimeError, match="was not acquired by this thread"):
        lock.release()
    hold.check()
    assert in_other_thread(lock.held) is False
    hold.release()


# Blocks of a shared lock object


def stream(lock):
    with lock as hold:
        yield hold


async def astream(lock):
    async with lock as hold:
        yield hold


@for_each("kind", KINDS)
def test_a_generator_s_end_keeps_the_block_around_it(kind, threads, until, is_busy):
    """A generator's ``with`` ends inside the thread's own ``with`` of the same object.

    The generator's block began first. The thread keeps its own hold. At the latest,
    what the generator held ends with the thread.
    """

    def work(lock):
        generator = stream(lock)
        next(generator)
        with lock as mine:
            with contextlib.suppress(RuntimeError):
                generator.close()
            mine.check()
            assert mine.held

    lock = lock_of(kind)
    threads(lambda: work(lock)).join(30)
    until(lambda: not is_busy())


@for_each("kind", KINDS)
async def test_an_async_generator_s_end_keeps_the_block_around_it(kind, until, is_busy):
    """It is the same with ``async with``, also where another task closes it."""
    lock = lock_of(kind)
    for closing_by in (lambda closing: closing, asyncio.create_task):
        generator = astream(lock)
        hold = await anext(generator)
        async with lock as mine:
            with contextlib.suppress(RuntimeError):
                await closing_by(generator.aclose())
            await mine.acheck()
            assert mine.held
        assert not hold.held
    await asyncio.to_thread(until, lambda: not is_busy())


@for_each("kind", KINDS)
async def test_abandoned_async_generators_leave_nothing(kind, until, is_busy):
    """asyncio closes each in a task of its own, which has entered no block."""
    lock = lock_of(kind)
    generators = [astream(lock) for _ in range(2)]
    for generator in generators:
        await anext(generator)
    del generator
    generators.clear()
    await asyncio.to_thread(until, lambda: not is_busy())


@pytest.mark.parametrize("using", ["default", "memory"])
@for_each("keys", [KEYS[:1], KEYS])
@for_each("of_hold", [False, True])
async def test_a_generator_that_ends_in_an_event_loop_leaves_nothing(
    using, keys, of_hold, until, is_busy
):
    """The garbage collector may end it there, where no request can be sent."""
    lock = db_lock(*keys, using=using)

    def begin():
        generator = stream(lock.acquire() if of_hold else lock)
        next(generator)
        connections.close_all()
        return generator

    generator = await asyncio.to_thread(begin)
    with contextlib.suppress(SynchronousOnlyOperation):
        generator.close()
    for key in keys:
        await asyncio.to_thread(until, lambda key=key: not is_busy(key, using), 5)


def run_and_close(coroutine):
    """Run a coroutine in an event loop whose end closes no generator."""
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(coroutine)


@pytest.mark.front
@for_each("kind", KINDS)
@for_each("case", [(asyncio.run, False), (asyncio.run, True), (run_and_close, False)])
def test_generators_that_outlast_their_loop_leave_nothing(kind, case, until, is_busy):
    """``asyncio.run()`` closes them at its end, or nothing closes them.

    They share a lock object, or each has its own.
    """
    (run, own), kept = case, []
    shared = lock_of(kind, using="memory")

    async def main():
        for _ in range(2):
            generator = astream(lock_of(kind, using="memory") if own else shared)
            await anext(generator)
            kept.append(generator)

    run(main())
    until(lambda: not is_busy(using="memory"))


@pytest.mark.front
@for_each("kind", [*SHARED.items()])
def test_a_generator_closed_by_another_thread_keeps_that_thread_s_block(
    kind, paused, until, is_busy
):
    """The thread that began it is still in a block of the same object."""
    lock, generators = lock_of(kind), []

    def begin():
        generators.append(stream(lock))
        next(generators[0])
        yield

    def close():
        with lock as mine:
            with contextlib.suppress(RuntimeError):
                generators.pop().close()
            mine.check()
            assert mine.held
            yield
            mine.check()

    for end in [paused(begin), paused(close)]:
        end()
    until(lambda: not is_busy())


@pytest.mark.front
@for_each("kind", [*SHARED.items()])
def test_an_exit_stack_ends_no_other_block_of_its_thread(kind, threads, until, is_busy):
    """It is closed inside a block that its thread entered later."""

    def work(lock):
        with ExitStack() as stack:
            hold = stack.enter_context(lock)
            with lock as mine:
                stack.close()
                mine.check()
                assert mine.held
                assert mine.count == 1
            assert not hold.held

    lock = lock_of(kind)
    threads(lambda: work(lock)).join(30)
    until(lambda: not is_busy())


@pytest.mark.front
@for_each("kind", [*SHARED.items()])
def test_an_exit_stack_of_another_thread_is_refused(
    kind, paused, threads, until, is_busy
):
    """It is not certain which block of the lock object is meant, so none ends.

    The key is free once both threads have ended.
    """
    lock, stack = lock_of(kind), ExitStack()

    def begin():
        stack.enter_context(lock)
        yield

    def close():
        with lock as mine:
            with pytest.raises(RuntimeError, match="in which it began"):
                stack.close()
            mine.check()

    end = paused(begin)
    threads(close).join(30)
    end()
    until(lambda: not is_busy())


@pytest.mark.front
@for_each("kind", KINDS)
async def test_a_stack_may_enter_in_a_task_that_is_done(kind, until, is_busy):
    """``asyncio.wait_for()`` runs it as a task before Python 3.12.

    A task that holds the same lock keeps its hold.
    """
    lock = lock_of(kind)
    is_shared = kind[0] in SHARED
    async with held_by_another_task(lock) if is_shared else contextlib.nullcontext():
        async with AsyncExitStack() as stack:
            hold = await asyncio.create_task(stack.enter_async_context(lock))
            assert hold.held
        assert not hold.held
    await asyncio.to_thread(until, lambda: not is_busy())


# ``with hold`` in several threads


@pytest.mark.front
@pytest.mark.parametrize("keys", [KEYS[:1], KEYS])
def test_each_block_of_a_hold_keeps_the_key_for_itself(keys, threads, is_busy):
    """Several threads use a hold that another one has acquired, and releases.

    Whoever is last releases the key: no block loses it to the end of another one, or to
    the release. The threads yield at random moments.
    """
    lock = db_lock(*keys, using="memory")
    for number in range(40):
        hold = lock.acquire()
        start = threading.Barrier(3)

        def use(seed, hold=hold, start=start):
            start.wait(20)
            with yielding(seed, often=0.2):
                try:
                    with hold:
                        hold.check()
                        return True
                except RuntimeError as error:
                    # The hold was released before the block began.
                    assert "has been released" in str(error)
                    return None

        users = [threads(partial(use, 2 * number + one)) for one in range(2)]
        start.wait(20)
        with yielding(-number, often=0.2):
            hold.release()
        for one in users:
            one.join(20)
        assert not hold.held
        assert not any(is_busy(key, "memory") for key in keys), number


@pytest.mark.front
@pytest.mark.parametrize("keys", [KEYS[:1], KEYS])
def test_the_release_of_its_caller_takes_no_hold_from_a_block(
    keys, paused, in_other_thread, is_busy
):
    """A thread acquires, and passes the hold to a thread that uses it in a block.

    Only the end of that block frees the key, and no third thread releases it before.
    """
    hold = db_lock(*keys, using="memory").acquire()

    def use():
        with hold:
            yield
            hold.check()

    end = paused(use)
    hold.release()
    assert hold.held
    if len(keys) == 1:
        with pytest.raises(RuntimeError, match="in a block that holds it"):
            in_other_thread(hold.release)
    assert all(is_busy(key, "memory") for key in keys)
    end()
    assert not any(is_busy(key, "memory") for key in keys)


@pytest.mark.parametrize("using", ["default", "memory"])
@for_each("keys", [KEYS[:1], KEYS])
def test_no_other_thread_releases_a_lock_under_its_block(
    using, keys, in_other_thread, is_busy
):
    """The hold of a ``with db_lock(…)`` block is refused to other threads."""
    with db_lock(*keys, using=using) as hold:
        with pytest.raises(RuntimeError, match="thread or task is in a block that hol"):
            in_other_thread(hold.release)
        hold.check()
        assert all(is_busy(key, using) for key in keys)
    assert not any(is_busy(key, using) for key in keys)


@pytest.mark.front
def test_a_release_keeps_the_blocks_of_its_thread(is_busy):
    """A hold that was acquired is released while a generator of the thread uses it.

    The generator keeps the key until its own end.
    """
    hold = db_lock("stock:7", using="memory").acquire()
    generator = stream(db_lock("stock:7", using="memory"))
    assert next(generator) is hold
    hold.release()
    assert hold.count == 1
    hold.check()
    generator.close()
    assert not is_busy("stock:7", "memory")
