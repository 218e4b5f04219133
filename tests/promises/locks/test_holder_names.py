"""The names of holders: which process, which thread or task, and what it does."""

import asyncio
import os
import threading

import pytest

from dlocks import LockTimeout, db_lock
from tests.for_each import for_each

pytestmark = pytest.mark.django_db(transaction=True)

USING = ["default", "optimistic", "insert", "memory"]


@for_each("using", USING)
async def test_the_holder_of_a_coroutine_is_its_task(using):
    """All tasks make their requests in one thread, whose name says nothing of them."""
    lock = db_lock("stock:7", using=using, timeout=0)
    held, seen = asyncio.Event(), asyncio.Event()

    async def work():
        async with lock:
            held.set()
            await seen.wait()

    task = asyncio.create_task(work(), name="recount north")
    await held.wait()
    name = f"{os.uname().nodename}:{os.getpid()}:recount north"
    holder = await lock.aholder()
    assert holder.holder == name
    with pytest.raises(LockTimeout, match="recount north"):
        await lock.aacquire()
    seen.set()
    await task


@pytest.mark.front
def test_the_holder_in_a_thread_is_the_thread(threads):
    lock = db_lock("stock:7", timeout=0)

    def work():
        threading.current_thread().name = "recount south"
        with lock:
            return lock.holder().holder

    other = threads(work)
    other.join(30)
    assert other.results == [f"{os.uname().nodename}:{os.getpid()}:recount south"]
