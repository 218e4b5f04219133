"""``hold.detach()`` while other threads enter, use or leave the hold."""

import asyncio
import threading
import time

import pytest
from asgiref.sync import sync_to_async

from dlocks import LockBackendError, LockLost, aresume_hold, db_lock, resume_hold
from tests.for_each import for_each
from tests.promises.yields import yielding

pytest_plugins = ["tests.promises.stops"]
pytestmark = [pytest.mark.holds, pytest.mark.django_db(transaction=True)]

EVERY = for_each(
    "using",
    [f"stopping {name}" for name in ("pessimistic", "optimistic", "insert", "memory")],
)
SERVERS = pytest.mark.engine("postgresql", "mariadb")


@pytest.fixture
def in_block(paused):
    """Return a function that opens a block in another thread until it is called."""

    def begin(block):
        holds = []

        def work():
            with block as hold:
                holds.append(hold)
                yield

        finish = paused(work)
        return holds[0], finish

    return begin


# A text is never resumed while a block of the hold runs.


@EVERY
def test_a_hold_is_not_detached_under_the_block_of_another_thread(
    using, stops, in_block, is_busy
):
    """The block goes on, and the key is free at its end.

    The block is one of the lock, or of the hold that was passed to the thread.
    """
    lock = db_lock("export:7", using=using)
    for begin in (lambda: lock, lock.acquire):
        hold, finish = in_block(begin())
        with pytest.raises(RuntimeError, match="another thread or task is in a block"):
            hold.detach()
        hold.check()
        finish()
        # The thread that has acquired it keeps it after the block of another one.
        hold.release()
        assert not is_busy("export:7", using)


@pytest.mark.parametrize("using", ["default", "memory"])
async def test_a_hold_is_not_detached_under_the_block_of_another_task(using):
    """The block goes on. It is one of the lock, or of the hold that was passed on.

    The task of the block may detach it, also by the tasks and threads that it starts.
    """
    lock = db_lock("export:7", using=using)
    found = []

    async def work(block, detach, entered, end):
        async with block as hold:
            found.append(hold)
            entered.set()
            await end.wait()
            resumed = await aresume_hold(await detach(hold))
            await resumed.arelease()

    async def give_lock():
        return lock

    for begin in give_lock, lock.aacquire:
        for detach in (
            lambda hold: hold.adetach(),
            lambda hold: asyncio.wait_for(hold.adetach(), 20),
            lambda hold: sync_to_async(hold.detach)(),
        ):
            entered, end = asyncio.Event(), asyncio.Event()
            # The task that acquires is done when another one uses the hold.
            block = await asyncio.create_task(begin())
            task = asyncio.create_task(work(block, detach, entered, end))
            await entered.wait()
            with pytest.raises(RuntimeError, match="another thread or task is in a"):
                await found[-1].adetach()
            await found[-1].acheck()
            end.set()
            await task
            assert not await lock.alocked()


@EVERY
def test_a_block_of_another_thread_is_refused_while_a_hold_is_detached(
    using, stops, threads, in_other_thread
):
    """Neither the hold itself nor its lock lets another thread in."""
    lock = db_lock("export:7", using=using)
    hold = lock.acquire()
    detaching = stops.at("renew")
    thread = threads(hold.detach)
    detaching.wait()
    assert not hold.held
    with pytest.raises(RuntimeError, match="has been released"), hold:
        pytest.fail("a block began")
    assert lock.try_acquire() is None
    assert in_other_thread(lock.try_acquire) is None
    detaching.go_on()
    thread.join(20)
    resume_hold(thread.results[0]).release()


@pytest.mark.front
def test_a_block_that_begins_while_a_hold_is_detached_is_told(threads):
    """Two threads use one hold. One enters it again, and the other one detaches it.

    Either detach() is refused, or the block waits for the key like any other caller, or
    it ends with LockLost. The threads yield at random moments.
    """
    lock = db_lock("export:7", using="memory", timeout=0)
    outcomes = set()
    for number in range(60):
        hold = lock.acquire()
        start = threading.Barrier(2)

        def detach(hold=hold, start=start, number=number):
            start.wait(20)
            with yielding(number):
                try:
                    return hold.detach()
                except (RuntimeError, LockLost):
                    return None

        thread = threads(detach)
        start.wait(20)
        entered = told = None
        with yielding(-number):
            try:
                with lock as entered:
                    thread.join(20)
            except LockLost:
                told = True
            except TimeoutError:
                pass
        thread.join(20)
        text = thread.results[0]
        outcomes.add((entered is not None, text is not None))
        assert not (entered is hold and text is not None) or told, number
        if text is None:
            hold.release()
        else:
            resume_hold(text).release()
    assert len(outcomes) > 1, outcomes


@EVERY
def test_two_threads_that_detach_a_hold_get_one_text(using, stops, threads, is_busy):
    """The other one gets LockLost, and its error does not release the key."""
    hold = db_lock("export:7", using=using).acquire()
    late = stops.at("refusal")
    thread = threads(hold.detach)
    late.wait()
    text = hold.detach()
    late.go_on()
    with pytest.raises(LockLost):
        thread.join(20)
    assert is_busy("export:7", using)
    resume_hold(text).release()


# A detach() that fails.


def fail_to_detach(hold, stops, meanwhile=lambda: None, error=LockBackendError):
    """Let ``detach()`` fail, after a function was called in the middle of it."""

    def fail():
        meanwhile()
        raise error("The server does not respond.")

    stops.call("renew", fail)
    with pytest.raises(error):
        hold.detach()


@EVERY
def test_a_release_during_a_failed_detach_is_not_forgotten(
    using, stops, threads, is_busy, until
):
    """The key is free when detach() has failed, since the last caller has left."""
    hold = db_lock("export:7", using=using).acquire()
    fail_to_detach(hold, stops, lambda: threads(hold.release).join(20))
    assert not hold.held
    assert hold.count == 0
    until(lambda: not is_busy("export:7", using), 1.0)


@EVERY
def test_a_hold_that_was_not_left_continues_after_a_failed_detach(
    using, stops, is_busy, in_other_thread
):
    """The caller enters it again, and its release frees the key."""
    lock = db_lock("export:7", using=using)
    with lock as hold:
        fail_to_detach(hold, stops)
        assert hold.held
        assert lock.held()
        with lock as inner:
            assert inner is hold
        text = hold.detach()
    resume_hold(text).release()
    hold = lock.acquire()
    in_other_thread(fail_to_detach, hold, stops)
    lock.release()
    assert not is_busy("export:7", using)


@pytest.mark.parametrize(
    "using",
    [
        pytest.param("stopping pessimistic", marks=SERVERS),
        pytest.param("stopping memory", marks=pytest.mark.front),
    ],
)
@for_each("error", [None, LockBackendError, KeyboardInterrupt])
def test_a_detach_frees_no_key_before_the_transaction_ends(
    using, error, stops, leave_in_transaction, is_busy, until
):
    """Another thread leaves the hold in its transaction while the request is under way.

    The detach is then refused, even if its request succeeds.
    """
    hold = db_lock("export:7", using=using, scope="lease").acquire()
    ends = []

    def leave():
        ends.append(leave_in_transaction(hold))

    if error is None:
        stops.call("renew", leave)
        with pytest.raises(RuntimeError, match="before the end of a transaction"):
            hold.detach()
    else:
        fail_to_detach(hold, stops, leave, error)
    assert is_busy("export:7", using)
    ends[0]()
    until(lambda: not is_busy("export:7", using), 1.0)


@EVERY
def test_a_check_during_a_failed_detach_forgets_no_hold(using, stops, threads, is_busy):
    """Another thread learns that the hold is being handed over, which then fails."""
    lock = db_lock("export:7", using=using)
    hold = lock.acquire()

    def check():
        with pytest.raises(LockLost, match="being handed over"):
            threads(hold.check).join(20)

    fail_to_detach(hold, stops, check)
    with lock as again:
        assert again is hold
    lock.release()
    assert not is_busy("export:7", using)


@EVERY
def test_a_caller_of_many_locks_forgets_no_hold_whose_detach_fails(
    using, stops, threads, is_busy
):
    """Another thread detaches the hold, and its caller uses other keys meanwhile."""
    lock = db_lock("export:7", using=using)
    hold = lock.acquire()
    begun, over = threading.Event(), threading.Event()

    def wait():
        begun.set()
        assert over.wait(20)

    thread = threads(lambda: fail_to_detach(hold, stops, wait))
    assert begun.wait(20)
    for number in range(20):
        with db_lock(f"export:{number + 8}", using=using):
            pass
    over.set()
    thread.join(20)
    assert lock.held()
    lock.release()
    assert not is_busy("export:7", using)


@SERVERS
def test_a_hold_is_not_detached_inside_its_guarded_transaction():
    """The error is the same after the end of its lease, and the hold goes on."""
    lock = db_lock("export:7", ttl=0.5)
    hold = lock.acquire()
    with hold.atomic():
        for pause in 0, 0.6:
            time.sleep(pause)
            with pytest.raises(RuntimeError, match=r"inside hold\.atomic"):
                hold.detach()
    assert lock.held()
    lock.release()


@pytest.mark.parametrize("using", ["default", "memory"])
async def test_a_cancelled_second_detach_keeps_the_text_of_the_first(using):
    lock = db_lock("export:7", using=using)
    hold = await lock.aacquire()
    text = await hold.adetach()
    second = asyncio.create_task(hold.adetach())
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    assert await lock.alocked()
    resumed = await aresume_hold(text)
    await resumed.arelease()


@pytest.mark.parametrize("using", ["default", "memory"])
async def test_a_cancelled_detach_is_a_loss_of_which_on_lost_learns(using):
    """The block goes on, although its key is free."""
    lost = []
    with pytest.raises(LockLost, match="was interrupted"):
        async with db_lock("export:7", using=using, on_lost=lost.append) as hold:
            detaching = asyncio.create_task(hold.adetach())
            await asyncio.sleep(0)
            detaching.cancel()
            await asyncio.wait([detaching])
            assert lost == [hold]
