"""What coroutines are promised: nothing blocks, no two tasks block each other, and no cancellation leaves anything."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time

import pytest
from asgiref.sync import SyncToAsync, ThreadSensitiveContext, async_to_sync, sync_to_async
from django.conf import settings
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connection, connections
from django.test import AsyncClient

from dlocks import LockTimeout, aresume_hold, db_lock, db_semaphore
from dlocks.conf import backends
from dlocks.holds import holds_by_caller
from dlocks.keeper import keeper
from dlocks.models import LockClaim, ResourceLock
from dlocks.waiting import room_of
from tests.models import Counter

pytestmark = pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"])

FAMILY = ["default", "optimistic", "insert"]
SESSION = ["session"] if "session" in settings.DLOCKS else []


@pytest.fixture(autouse=True)
def made():
    # Not on the way, in the middle of what is tested.
    for alias in settings.DLOCKS:
        backends[alias]


@pytest.mark.parametrize("using", ["default", "memory"])
@pytest.mark.parametrize("keys", [("stock:7",), ("stock:7", "stock:8")])
async def test_a_lock_that_would_stop_the_loop_is_refused_with_the_way_out(keys, using):
    """Also where Django itself has nothing against it."""
    lock = db_lock(*keys, using=using)
    with pytest.raises(SynchronousOnlyOperation, match="async with"), lock:
        pass
    for acquire in (lock.acquire, lock.try_acquire):
        with pytest.raises(SynchronousOnlyOperation, match="aacquire"):
            acquire()
    async with lock as hold:
        assert hold.held


# Cancelled at every await.


class Cancelling:
    """
    Awaits a coroutine in the current task, and has the task cancelled at the n-th of its suspensions.

    ``when`` the suspension ``"begins"``; or when it ``"ends"``, so that the coroutine has just been served; at it and
    at each one ``"after"``; or, as a loop does that is closed, with ``"all"`` other tasks.
    """

    def __init__(self, coroutine, at, when):
        self.coroutine = coroutine
        self.at = at
        self.when = when
        self.where = None

    def __await__(self):
        step, value, number = self.coroutine.send, None, 0
        while True:
            try:
                future = step(value)
            except StopIteration as end:
                return end.value
            if number == self.at or (number > self.at and self.when == "after"):
                self.where = self.where or self._suspended_at()
                self._cancel(asyncio.current_task(), future)
            number += 1
            try:
                step, value = self.coroutine.send, (yield future)
            except BaseException as error:
                step, value = self.coroutine.throw, error

    def _cancel(self, task, future):
        if self.when == "ends" and future is None:
            asyncio.get_running_loop().call_soon(task.cancel)
        elif self.when == "ends":
            future.add_done_callback(lambda _: task.cancel())
        else:
            task.cancel()
        if self.when == "all":
            for other in asyncio.all_tasks() - Cancelling.spared:
                other.cancel()

    spared: frozenset = frozenset()

    def _suspended_at(self):
        places, inner = [], self.coroutine
        while (frame := getattr(inner, "cr_frame", None)) is not None:
            places.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
            inner = inner.cr_await
        return " > ".join(places)


async def cancel_everywhere(case, nothing_left, when):
    """Cancel at each suspension in turn, until one run comes through; return how many there were."""
    Cancelling.spared = frozenset(asyncio.all_tasks())
    for number in range(400):
        cancelling = Cancelling(case(), number, when)

        async def run(cancelling=cancelling):
            return await cancelling

        task = asyncio.create_task(run())
        await asyncio.wait([task])
        if cancelling.where is None:
            await task
            await nothing_left("the end")
            return number
        place = f"{cancelling.where} ({when}, suspension {number})"
        assert task.cancelled() or isinstance(task.exception(), LockTimeout) or when == "ends", place
        await nothing_left(place)
    return pytest.fail("never came through")


def left_behind(keys, using):
    """Return what a cancelled task left, at once."""
    found = [f"kept {hold}" for hold in keeper.holds]
    found += [f"entered {hold}" for hold in holds_by_caller.values() if hold.enterable]
    found += [f"in the waiting room: {owner}" for owner in room_of(backends[using])._waiters]
    if using in FAMILY:
        found += [f"in line: {claim.key_resource_id}" for claim in LockClaim.objects.all()]
        found += [f"counted: {row.pk}" for row in ResourceLock.objects.exclude(waiters=0, shares=0)]
    for key in keys:
        hold = db_lock(key, using=using).try_acquire()
        if hold is None:
            found.append(f"held: {key}")
        else:
            hold.release()
    return found


def apart(function, *args):
    """Call a function, and leave no connection behind."""
    try:
        return function(*args)
    finally:
        connections.close_all()


@pytest.fixture
def nothing_left():
    """Return what makes a check that nobody holds a key, has it in the keeper, or stands in line for it."""

    def make(using, *keys):
        async def check(place):
            # In a thread of its own, since what was cancelled may have been Django's.
            deadline = time.monotonic() + 10
            while found := await asyncio.to_thread(apart, left_behind, keys, using):
                # The engine itself has the queue of sessions: a wait that was cancelled there ends a moment later.
                assert using == "session", (found, place)
                assert time.monotonic() < deadline, (found, place)

        return check

    return make


WHEN = pytest.mark.parametrize("when", ["begins", "ends", "after", "all"])


@WHEN
@pytest.mark.parametrize("using", [*FAMILY, "memory", *SESSION])
async def test_a_task_cancelled_at_any_await_of_a_block_leaves_nothing(using, when, nothing_left):
    """… of acquiring, entering again, asking, renewing, working, and giving back."""
    lock = db_lock("stock:7", using=using)

    async def case():
        async with lock as hold:
            async with lock:
                await hold.acheck()
            await hold.arenew()
            await asyncio.sleep(0)

    assert await cancel_everywhere(case, nothing_left(using, "stock:7"), when) >= 7


@WHEN
@pytest.mark.parametrize("using", ["default", "memory", *SESSION])
async def test_a_task_cancelled_at_any_await_of_a_wait_that_comes_to_nothing_leaves_nothing(
    using, when, elsewhere, nothing_left
):
    lock = db_lock("stock:7", using=using, timeout=0.02)
    holder = await asyncio.to_thread(elsewhere, db_lock("stock:7", using=using).acquire)

    async def case():
        with contextlib.suppress(LockTimeout):
            await lock.aacquire()

    def unchanged():
        assert left_behind((), using) == [f"kept {holder}", f"entered {holder}"]

    async def check(place):
        await sync_to_async(unchanged)()

    assert await cancel_everywhere(case, check, when) >= 3
    await holder.arelease()
    await nothing_left(using, "stock:7")("the end")


@WHEN
@pytest.mark.parametrize("using", ["default", "memory", *SESSION])
async def test_a_task_cancelled_at_any_await_of_a_wait_that_ends_with_the_key_leaves_nothing(using, when, nothing_left):
    """… also when it is its turn just then."""
    lock = db_lock("stock:7", using=using, timeout=30)

    async def hold_until_somebody_waits(held, waits):
        async with lock:
            held.set()
            await waits.wait()

    async def case():
        held, waits = asyncio.Event(), asyncio.Event()
        other = asyncio.create_task(hold_until_somebody_waits(held, waits))
        try:
            await held.wait()
            asyncio.get_running_loop().call_later(0.005, waits.set)
            async with lock:
                await asyncio.sleep(0)
        finally:
            waits.set()
            # It is not this one's to be cancelled.
            while not other.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([other])

    assert await cancel_everywhere(case, nothing_left(using, "stock:7"), when) >= 5


@WHEN
@pytest.mark.parametrize("using", ["default", "memory"])
async def test_a_task_cancelled_at_any_await_leaves_none_of_several_keys(using, when, nothing_left):
    holder = db_lock("c", using=using)

    async def case():
        async with db_lock("a", "b", "c", using=using) as hold:
            await hold.acheck()
            await hold.arenew()
        async with holder:
            other = asyncio.create_task(db_lock("a", "b", "c", using=using, timeout=0.01).aacquire())
            try:
                await asyncio.wait([other])
            finally:
                other.cancel()
                while not other.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([other])
            assert other.cancelled() or isinstance(other.exception(), LockTimeout)

    assert await cancel_everywhere(case, nothing_left(using, "a", "b", "c"), when) >= 5


@WHEN
@pytest.mark.parametrize("using", [*FAMILY, "memory"])
async def test_a_task_cancelled_at_any_await_of_a_handover_leaves_nothing(using, when, nothing_left):
    """Who is cancelled while the text is made has given the key back: nobody will ever have the text."""
    texts = []

    async def case():
        async with await db_lock("stock:7", using=using).aacquire() as hold:
            texts.append(await hold.adetach())
        text = texts.pop()
        try:
            async with await aresume_hold(text) as resumed:
                await resumed.acheck()
        except asyncio.CancelledError:
            texts.append(text)
            raise

    async def check(place):
        while texts:
            # Given away for good, and taken up by nobody: it is the text's.
            with contextlib.suppress(Exception):
                await (await aresume_hold(texts.pop())).arelease()
        await nothing_left(using, "stock:7")(place)

    assert await cancel_everywhere(case, check, when) >= 4


@WHEN
async def test_what_a_cancelled_task_does_in_a_guarded_transaction_is_done_under_the_lock(when, nothing_left):
    """The function goes on to its end in its thread, and only then is the key given back."""
    running, worst = threading.Semaphore(1), []

    def work(hold):
        worst.append(running.acquire(blocking=False))
        Counter.objects.filter(name="guarded").update(value=1)
        worst.append(hold.held)
        running.release()

    async def case():
        async with db_lock("stock:7") as hold:
            await hold.aatomic(work, hold)

    await sync_to_async(Counter.objects.create)(name="guarded")
    assert await cancel_everywhere(case, nothing_left("default", "stock:7"), when) >= 2
    assert all(worst)


# No two block each other.


@pytest.fixture
def in_line():
    """Return a coroutine function that returns once so many claims stand in line, without Django's thread."""

    def count():
        try:
            return LockClaim.objects.count()
        finally:
            connections.close_all()

    async def wait(number):
        async with asyncio.timeout(30):
            while await asyncio.to_thread(count) != number:
                await asyncio.sleep(0.005)

    return wait


async def test_sync_code_that_waits_in_django_s_thread_keeps_no_task_from_going_on(in_line):
    """The holder asks, takes another key and gives back, though the thread for that waits for its own key."""

    def beside():
        with db_lock("stock:7", timeout=30) as hold:
            return hold.waited

    async with db_lock("stock:7", timeout=5) as hold:
        waiting = asyncio.create_task(sync_to_async(beside)())
        await in_line(1)
        await hold.acheck()
        await hold.arenew()
        async with db_lock("another", timeout=5):
            assert await db_lock("another").alocked()
        assert await hold.awaiting() == 1
        assert not waiting.done()
    assert await waiting > 0


# The whole of the tests' project is there for a request.
@pytest.mark.django_db(transaction=True)
async def test_two_tasks_of_one_request_and_its_sync_code_do_not_block_each_other():
    """An async view that gathers two coroutines and sync code, all on one key; as Django's AsyncClient asks for it."""
    for _ in range(3):
        response = await AsyncClient().get("/gathered/")
        assert response.status_code == 200
        assert sorted(response.content.decode().split()) == ["coroutine", "coroutine", "sync", "sync"]


@pytest.mark.django_db(transaction=True)
async def test_async_views_under_a_lock_lose_nothing_and_leave_nothing(nothing_left):
    """… beside each other and, since the test's requests have one thread, after and before sync ones."""
    await sync_to_async(Counter.objects.create)(name="views")
    client = AsyncClient()
    responses = [await client.get("/increment/")]
    responses += await asyncio.gather(*(client.get("/aincrement/") for _ in range(8)))
    responses += [await client.get("/increment/")]
    assert [response.content for response in responses] == [b"lease"] * 10
    assert (await Counter.objects.aget(name="views")).value == 10
    await nothing_left("default", "counter")("the end")


async def test_while_tasks_wait_neither_the_loop_nor_django_s_thread_does(in_line):
    """The loop beats, and the ORM answers."""
    async with db_lock("stock:7"):
        waiting = [asyncio.create_task(db_lock("stock:7", timeout=30).aacquire()) for _ in range(5)]
        await in_line(5)
        for _ in range(20):
            assert await LockClaim.objects.acount() == 5
            await asyncio.sleep(0)
    while waiting:
        done, _pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            waiting.remove(task)
            await task.result().arelease()
    assert await LockClaim.objects.acount() == 0


# A task that outlives what it began in.


@pytest.fixture
def own_thread():
    """Close what Django's thread of loops that have no sync parent has connected."""
    yield
    SyncToAsync.single_thread_executor.submit(connections.close_all).result()


async def hold_for_ever(entered):
    async with db_lock("stock:7"):
        entered.set()
        await asyncio.Event().wait()


async def wait_for_ever():
    async with db_lock("stock:7", timeout=None):
        pytest.fail("it was held")


async def leave_tasks_behind():
    """Return while one task holds a key and two wait for it."""
    entered = asyncio.Event()
    tasks = [asyncio.create_task(hold_for_ever(entered))]
    await entered.wait()
    tasks += [asyncio.create_task(wait_for_ever()) for _ in range(2)]
    while (waiting := await LockClaim.objects.acount()) != 2:
        assert waiting < 2
        await asyncio.sleep(0.005)
    return tasks


async def test_a_generator_that_is_left_in_the_middle_gives_back():
    """Its end runs in a task of asyncio's own."""

    async def rows():
        async with db_lock("stock:7", using="memory"):
            yield 1
            yield 2

    async for _ in rows():
        break
    deadline = time.monotonic() + 5
    while await db_lock("stock:7", using="memory").alocked() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert not await db_lock("stock:7", using="memory").alocked()


async def test_a_generator_that_is_left_gives_back_though_others_are_in_a_block_of_the_same_lock():
    permits = db_semaphore("downloads", 2, timeout=5)
    entered, go = asyncio.Event(), asyncio.Event()

    async def stream():
        async with permits:
            yield 1
            yield 2

    async def client():
        async for _ in stream():
            break

    async def other():
        async with permits as hold:
            entered.set()
            await go.wait()
            await hold.acheck()

    task = asyncio.create_task(other())
    await entered.wait()
    await asyncio.create_task(client())
    # The one that was left is free again.
    async with permits:
        pass
    go.set()
    await task


async def test_of_two_generators_each_ends_its_own_block():
    permits = db_semaphore("downloads", 5, reentrant=False)

    async def stream():
        async with permits as hold:
            yield hold
            await hold.acheck()

    first, second = stream(), stream()
    holds = [await anext(first), await anext(second)]
    await first.aclose()
    assert [hold.held for hold in holds] == [False, True]
    async for _ in second:
        pytest.fail("there is only one")
    assert not holds[1].held


def test_generators_begun_in_several_threads_end_their_own_blocks(elsewhere):
    permits = db_semaphore("downloads", 5, reentrant=False)

    def rows():
        with permits as hold:
            yield hold

    begun = [rows() for _ in range(3)]
    holds = [elsewhere(next, one) for one in begun]
    for number, one in enumerate(begun):
        one.close()
        assert [hold.held for hold in holds] == [other > number for other in range(3)]


@pytest.mark.parametrize("using", ["default", "memory"])
@pytest.mark.parametrize("keys", [("stock:7",), ("stock:7", "stock:8")])
async def test_a_verb_for_threads_is_refused_in_a_coroutine_and_the_other_one_does_it(using, keys):
    hold = await db_lock(*keys, using=using).aacquire()
    for use in (hold.check, hold.renew, hold.release, lambda: hold.__enter__().__exit__(None, None, None)):
        with pytest.raises(SynchronousOnlyOperation, match="await hold.arelease"):
            use()
    if len(keys) == 1:
        with pytest.raises(SynchronousOnlyOperation):
            hold.detach()
    assert hold.held
    await hold.arelease()
    assert not hold.held
    assert not await db_lock("stock:7", using=using).alocked()


def test_a_generator_that_another_thread_closes_gives_back(elsewhere):
    def rows():
        with db_lock("stock:7", using="memory"):
            yield 1
            yield 2

    left = rows()
    next(left)
    elsewhere(left.close)
    assert not db_lock("stock:7", using="memory").locked()


@pytest.mark.usefixtures("own_thread")
@pytest.mark.parametrize("run", [lambda function: asyncio.run(function()), lambda function: async_to_sync(function)()])
def test_a_loop_that_ends_gives_back_what_its_tasks_hold(run, caplog):
    """
    asyncio.run() and async_to_sync() cancel the tasks that are left, and are there until those have given back.

    No coroutine is left in the middle either, for the garbage collector to end in whatever thread it happens to run.
    """
    for _ in range(5):
        run(leave_tasks_behind)
        assert not left_behind(["stock:7"], "default")
        gc.collect()
        assert not caplog.messages
    connection.close()


def test_a_task_that_outlives_its_request_gives_back():
    """Django's thread for the request has ended before it asks again."""
    over = asyncio.Event()

    async def work(entered):
        async with db_lock("stock:7") as hold:
            entered.set()
            await over.wait()
            await hold.acheck()
            async with db_lock("another"):
                pass
        # In the thread that such a task has made to itself.
        await sync_to_async(connections.close_all)()
        return hold.token

    async def serve():
        async with ThreadSensitiveContext():
            entered = asyncio.Event()
            task = asyncio.create_task(work(entered))
            await entered.wait()
            # As at the end of a request.
            await sync_to_async(connections.close_all)()
        over.set()
        return await task

    assert asyncio.run(serve()) > 0
    assert not left_behind(["stock:7", "another"], "default")
