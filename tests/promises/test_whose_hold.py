"""No caller releases the hold of another: ``release()``, ``held()`` and blocks."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from dlocks import LockTimeout, db_lock, db_rwlock, db_semaphore
from tests.for_each import for_each

pytestmark = pytest.mark.django_db(transaction=True)

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


# release() and held()


@for_each("kind", KINDS)
async def test_arelease_never_means_the_hold_of_a_running_task(kind):
    """A task whose ``aacquire()`` timed out calls ``arelease()`` in its ``finally``.

    Another task of the event loop holds the lock. ``arelease()`` raises RuntimeError,
    and ``held()`` is False.
    """
    lock = lock_of(kind)
    holding, over = asyncio.Event(), asyncio.Event()

    async def work():
        hold = await lock.aacquire()
        holding.set()
        await over.wait()
        await hold.acheck()
        assert lock.held()
        await lock.arelease()
        assert not lock.held()

    async def release_what_was_never_acquired():
        try:
            with contextlib.suppress(LockTimeout):
                await db_lock("stock:7", timeout=0).aacquire()
            assert not lock.held()
        finally:
            await lock.arelease()

    async with asyncio.TaskGroup() as group:
        group.create_task(work())
        await holding.wait()
        with pytest.raises(RuntimeError, match="was not acquired by this task"):
            await asyncio.create_task(release_what_was_never_acquired())
        over.set()


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
    lock, over = db_semaphore("stock:7", 3), asyncio.Event()
    holding = asyncio.Event()

    async def work():
        async with lock as hold:
            holding.set()
            await over.wait()
            await hold.acheck()

    task = asyncio.create_task(work())
    await holding.wait()
    holds = await asyncio.gather(lock.aacquire(), lock.aacquire())
    await lock.arelease()
    assert sum(hold.held for hold in holds) == 1
    await lock.arelease()
    assert not any(hold.held for hold in holds)
    with pytest.raises(RuntimeError, match="was not acquired by this task"):
        await lock.arelease()
    over.set()
    await task


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
