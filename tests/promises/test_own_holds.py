"""A caller knows its own holds, and is not refused a key because of a lost one."""

import contextlib
import itertools
import queue
import threading
from concurrent.futures import Future

import pytest

from dlocks import LockLost, LockTimeout, db_lock, db_rwlock, db_semaphore
from dlocks.testing import lose
from tests.for_each import for_each
from tests.sync_and_async import sync_and_async

pytestmark = [pytest.mark.holds, pytest.mark.django_db(transaction=True)]


@for_each("using", ["default", "memory"])
@sync_and_async
async def test_a_permit_is_known_after_another_one_was_left(do, using):
    """With ``reentrant=False`` a caller has several permits, and leaves one.

    ``held()`` stays True, and the write lock is refused instead of waited for.
    ``release()`` of the semaphore leaves them one by one.
    """
    permits = db_semaphore("stock:7", 3, reentrant=False, using=using, timeout=0)
    write = db_lock("stock:7", using=using, timeout=0)
    async with do.block(permits) as first:
        async with do.block(permits) as second:
            assert first.token < second.token
            assert permits.held()
        assert permits.held()
        with pytest.raises(RuntimeError, match="cannot be upgraded to a write lock"):
            await do.ask(write, "acquire")
        # The permits are left in another order than they were acquired.
        third = await do.ask(permits, "acquire")
        fourth = await do.ask(permits, "acquire")
        await do.ask(third, "release")
        assert permits.held()
        await do.ask(first, "release")
        assert permits.held()
        with pytest.raises(RuntimeError, match="cannot be upgraded to a write lock"):
            await do.ask(write, "acquire")
        await do.ask(fourth, "release")
        assert not permits.held()
    for _ in range(2):
        await do.ask(permits, "acquire")
    for _ in range(2):
        assert permits.held()
        await do.ask(permits, "release")
    await do.ask(await do.ask(write, "acquire"), "release")


@for_each("using", ["default", "memory"])
@sync_and_async
async def test_a_reentrant_permit_stays_the_one_that_is_entered(do, using):
    """Next to it, its caller has a permit of a lock with ``reentrant=False``."""
    one = db_semaphore("stock:7", 3, using=using, timeout=0)
    another = db_semaphore("stock:7", 3, reentrant=False, using=using, timeout=0)
    first, other = await do.ask(one, "acquire"), await do.ask(another, "acquire")
    async with do.block(one) as again:
        assert again is first
    await do.ask(first, "release")
    # The permit that is left still forbids the write lock.
    assert one.held()
    with pytest.raises(RuntimeError, match="cannot be upgraded to a write lock"):
        await do.ask(db_lock("stock:7", using=using, timeout=0), "acquire")
    await do.ask(other, "release")
    assert not one.held()


# Lost holds


LOCKS = {
    "one key": lambda **options: db_lock("stock:7", **options),
    "several keys": lambda **options: db_lock("stock:7", "stock:8", **options),
    "a write lock": lambda **options: db_rwlock("stock:7", **options).write(),
}


@for_each("using", ["default", "memory"])
@for_each("kind", LOCKS)
@sync_and_async
async def test_a_lost_hold_does_not_prevent_a_new_one(do, kind, using):
    """A job ended without ``release()``, and its hold was lost meanwhile.

    With ``reentrant=False`` the next ``acquire()`` of the same thread or task
    succeeds. While the hold is held, its key is busy.
    """
    lock = LOCKS[kind](reentrant=False, using=using)
    lost = await do.ask(lock, "acquire")
    with pytest.raises(LockTimeout, match="reentrant=False"):
        await do.ask(lock, "acquire")
    for key in lost.keys:
        await do.sync(lose, key, using=using)
    assert not lost.held
    async with do.block(lock) as hold:
        assert hold.held
        assert lock.held()
        with pytest.raises(LockTimeout, match="reentrant=False"):
            await do.ask(lock, "acquire")
        with pytest.raises(LockLost):
            await do.ask(lost, "release")
        await do.ask(hold, "check")
    assert not lock.held()


@for_each("using", ["default", "memory"])
@for_each("reentrant", [False, True])
@sync_and_async
async def test_a_lost_shared_hold_does_not_forbid_the_write_lock(do, using, reentrant):
    """Neither a read lock nor a permit does so."""
    for shared in (
        db_rwlock("stock:7", reentrant=reentrant, using=using).read(),
        db_semaphore("stock:7", 2, reentrant=reentrant, using=using),
    ):
        write = db_lock("stock:7", reentrant=reentrant, using=using, timeout=5)
        lost = await do.ask(shared, "acquire")
        with pytest.raises(RuntimeError, match="cannot be upgraded to a write lock"):
            await do.ask(write, "acquire")
        await do.sync(lose, lost)
        async with do.block(write) as hold:
            assert hold.held
            # A lost hold is not entered again.
            with pytest.raises(LockLost):
                await do.ask(lost, "release")
            await do.ask(hold, "check")


@pytest.mark.front
@for_each("reentrant", [False, True])
def test_a_lost_hold_is_forgotten_in_a_thread_that_lives_on(reentrant):
    """A reentrant one is first reported to the caller that would enter it again."""
    for _ in range(3):
        lock = db_lock("stock:7", reentrant=reentrant)
        lose(lock.acquire())
        if reentrant:
            with pytest.raises(LockLost):
                lock.acquire()
    with lock as hold:
        assert hold.held


class PausingThread(threading.Thread):
    """A caller whose holds cannot be looked up by other threads for a moment.

    ``pause`` is called at each look-up in another thread, since that needs the hash of
    the caller.
    """

    pause = None

    def __hash__(self):
        if self.pause is not None and threading.current_thread() is not self:
            self.pause()
        return super().__hash__()


@pytest.mark.front
@pytest.mark.parametrize("keys", [("stock:7",), ("stock:7", "stock:8")])
def test_a_loss_found_by_another_thread_keeps_the_next_hold(keys, threads, until):
    """A thread reports that a hold is lost, while its caller acquires the key again.

    The caller can enter its new hold, and does not wait for itself. The report is
    paused at each of its look-ups of the caller in turn, until the caller has its next
    hold, or has to wait for the report.
    """
    lock = db_lock(*keys, using="memory", timeout=2)

    def run(number):
        """Pause at one look-up, and return whether there was one."""
        # The block ends with LockLost.
        with contextlib.suppress(LockLost), lock as hold:
            was_paused = run_in_block(number, hold)
        return was_paused

    def run_in_block(number, hold):
        for key in keys:
            lose(key, using="memory")
        orders, paused, acquired = queue.SimpleQueue(), [], threading.Event()
        this = threading.current_thread()

        def pause():
            paused.append(None)
            if len(paused) == number:
                orders.put("acquire")
                acquired.wait(0.2)

        def find_the_loss():
            this.pause = pause
            try:
                with pytest.raises(LockLost):
                    hold.renew()
            finally:
                this.pause = None
                orders.put("end")

        other = threads(find_the_loss)
        if orders.get(timeout=30) == "end":
            return False
        new = None
        while new is None:
            # Each lost key is reported once.
            with contextlib.suppress(LockLost):
                new = lock.acquire()
        acquired.set()
        other.join(30)
        with lock as again:
            assert again.held
            assert again.token == new.token
        new.release()
        return True

    def work():
        numbers = itertools.count(1)
        outcome.set_result(next(number for number in numbers if not run(number)))

    outcome = Future()

    def safely():
        try:
            work()
        except BaseException as error:
            outcome.set_exception(error)

    caller = PausingThread(target=safely)
    caller.start()
    caller.join(60)
    assert outcome.result(1) > 1
