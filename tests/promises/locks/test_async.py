"""Coroutines: no blocking, no mutual blocking, clean cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from asgiref.sync import (
    SyncToAsync,
    ThreadSensitiveContext,
    async_to_sync,
    sync_to_async,
)
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connection, connections, transaction
from django.test import AsyncClient

from dlocks import LockTimeout, aresume_hold, db_lock, resume_hold
from dlocks.models import LockClaim, ResourceLock
from tests.for_each import ROWS, for_each
from tests.models import Counter
from tests.timing import eventually
from tests.volume import volume

pytestmark = [
    pytest.mark.driver,
    pytest.mark.django_db(transaction=True),
]

TWO_SERVERS = pytest.mark.engine("postgresql", "mariadb")


@pytest.mark.front
@for_each("using", ["default", "memory"])
@for_each("keys", [("stock:7",), ("stock:7", "stock:8")])
async def test_sync_methods_are_refused_in_a_coroutine(keys, using):
    """The error names the async method, even where Django would not object."""
    lock = db_lock(*keys, using=using)
    with pytest.raises(SynchronousOnlyOperation, match="async with"), lock:
        pass
    for acquire in (lock.acquire, lock.try_acquire):
        with pytest.raises(SynchronousOnlyOperation, match="aacquire"):
            acquire()
    hold = await lock.aacquire()
    for use in (
        hold.check,
        hold.renew,
        hold.release,
        lambda: hold.__enter__().__exit__(None, None, None),
    ):
        with pytest.raises(SynchronousOnlyOperation, match="await hold.arelease"):
            use()
    if len(keys) == 1:
        with pytest.raises(SynchronousOnlyOperation):
            hold.detach()
        text = await hold.adetach()
        with pytest.raises(SynchronousOnlyOperation, match="await aresume_hold"):
            resume_hold(text)
        hold = await aresume_hold(text)
    assert hold.held
    await hold.arelease()
    assert not hold.held
    assert not await lock.alocked()


# Cancellation at every await.


class Cancelling:
    """An awaitable that cancels its task at the n-th suspension of a coroutine.

    ``when`` says at which moment and how often the task is cancelled:

    * ``"begins"``: when the suspension begins.
    * ``"ends"``: when it ends, so the coroutine has just received its result.
    * ``"after"``: at this suspension and at each later one.
    * ``"all"``: together with all other tasks, as when a loop is closed.
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
    """Cancel at each suspension in turn and return how many there were.

    It stops at the first run that completes.
    """
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
        assert (
            task.cancelled()
            or isinstance(task.exception(), LockTimeout)
            or when == "ends"
        ), place
        await nothing_left(place)
    return pytest.fail("no run completed")


def left_behind(keys, using):
    """Return what a cancelled task left behind, without waiting."""
    found = []
    if using in ROWS:
        found += [
            f"in line: {claim.key_resource_id}" for claim in LockClaim.objects.all()
        ]
        found += [
            f"counted: {row.pk}"
            for row in ResourceLock.objects.exclude(waiters=0, shares=0)
        ]
    for key in keys:
        hold = db_lock(key, using=using).try_acquire()
        if hold is None:
            found.append(f"held: {key}")
        else:
            hold.release()
    return found


@pytest.fixture
def nothing_left():
    """Return a factory of checks that no hold and no claim is left."""
    # The check uses a thread of its own, because the cancelled call may have used
    # Django's. All checks of a test share its connection.
    with ThreadPoolExecutor(1) as executor:

        def make(using, *keys):
            async def check(place):
                deadline = time.monotonic() + 10
                loop = asyncio.get_running_loop()
                while found := await loop.run_in_executor(
                    executor, left_behind, keys, using
                ):
                    # The engine itself keeps the queue of sessions. A wait that is
                    # cancelled there ends a moment later.
                    assert using == "session", (found, place)
                    assert time.monotonic() < deadline, (found, place)

            return check

        yield make
        executor.submit(connections.close_all).result()


def on(engine, using, *moments):
    mark = pytest.mark.engine(*engine.split())
    return [pytest.param(using, when, marks=mark) for when in moments]


def cancelled(*cases):
    return pytest.mark.parametrize(
        ("using", "when"), [case for some in cases for case in some]
    )


# The code that cancels is the same on every engine and for every backend of the
# database. So each moment is tested on one of the engines, with each kind of backend.
DEFAULT = [
    *on("postgresql", "default", "begins", "all"),
    *on("mariadb", "default", "ends", "after"),
]
MEMORY = on("sqlite", "memory", "begins", "ends")
SESSION = [
    *on("postgresql", "session", "begins", "all"),
    *on("mariadb", "session", "ends", "after"),
]


@cancelled(
    DEFAULT,
    on("sqlite", "memory", "after", "all"),
    on("sqlite", "optimistic", "begins", "after"),
    on("sqlite", "insert", "ends", "all"),
    MEMORY,
    SESSION,
)
async def test_a_task_cancelled_during_a_block_leaves_nothing(
    using, when, nothing_left
):
    """Cancellation while a block acquires, re-enters, checks, renews or releases."""
    lock = db_lock("stock:7", using=using)

    async def case():
        async with lock as hold:
            async with lock:
                await hold.acheck()
            await hold.arenew()
            await asyncio.sleep(0)

    assert await cancel_everywhere(case, nothing_left(using, "stock:7"), when) >= 7


@cancelled(DEFAULT, MEMORY)
async def test_a_task_cancelled_during_a_timeout_leaves_nothing(
    using, when, in_other_thread, nothing_left
):
    lock = db_lock("stock:7", using=using, timeout=0.02)
    holder = await asyncio.to_thread(
        in_other_thread, db_lock("stock:7", using=using).acquire
    )

    async def case():
        with contextlib.suppress(LockTimeout):
            await lock.aacquire()

    assert await cancel_everywhere(case, nothing_left(using), when) >= 3
    assert holder.held
    await holder.arelease()
    await nothing_left(using, "stock:7")("the end")


@cancelled(DEFAULT, MEMORY, SESSION)
async def test_a_task_cancelled_during_a_grant_leaves_nothing(
    using, when, nothing_left
):
    """This includes cancellation at the moment of the grant."""
    lock = db_lock("stock:7", using=using, timeout=30)

    async def hold_until_a_task_waits(held, waits):
        async with lock:
            held.set()
            await waits.wait()

    async def case():
        held, waits = asyncio.Event(), asyncio.Event()
        other = asyncio.create_task(hold_until_a_task_waits(held, waits))
        try:
            await held.wait()
            asyncio.get_running_loop().call_later(0.005, waits.set)
            async with lock:
                await asyncio.sleep(0)
        finally:
            waits.set()
            # The other task must not be cancelled.
            while not other.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([other])

    assert await cancel_everywhere(case, nothing_left(using, "stock:7"), when) >= 5


@cancelled(DEFAULT, MEMORY)
async def test_a_task_cancelled_with_several_keys_leaves_nothing(
    using, when, nothing_left
):
    holder = db_lock("c", using=using)

    async def case():
        async with db_lock("a", "b", "c", using=using) as hold:
            await hold.acheck()
            await hold.arenew()
        async with holder:
            other = asyncio.create_task(
                db_lock("a", "b", "c", using=using, timeout=0.01).aacquire()
            )
            try:
                await asyncio.wait([other])
            finally:
                other.cancel()
                while not other.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([other])
            assert other.cancelled() or isinstance(other.exception(), LockTimeout)

    assert await cancel_everywhere(case, nothing_left(using, "a", "b", "c"), when) >= 5


@cancelled(DEFAULT, MEMORY)
async def test_a_task_cancelled_during_a_handover_leaves_nothing(
    using, when, nothing_left
):
    """Without ``adetach()``'s text, which no caller receives, the key is released."""
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
            # The hold is detached and was never resumed, so the text owns it.
            with contextlib.suppress(Exception):
                await (await aresume_hold(texts.pop())).arelease()
        await nothing_left(using, "stock:7")(place)

    assert await cancel_everywhere(case, check, when) >= 4


@cancelled(DEFAULT)
async def test_guarded_writes_of_a_cancelled_task_are_under_the_lock(
    using, when, nothing_left
):
    """The function runs to its end in its thread. Only then the key is released."""
    running, worst = threading.Semaphore(1), []

    def work(hold):
        worst.append(running.acquire(blocking=False))
        Counter.objects.filter(name="guarded").update(value=1)
        worst.append(hold.held)
        running.release()

    async def case():
        async with db_lock("stock:7", using=using) as hold:
            await hold.aatomic(work, hold)

    await sync_to_async(Counter.objects.create)(name="guarded")
    assert await cancel_everywhere(case, nothing_left(using, "stock:7"), when) >= 2
    assert all(worst)


# Tasks do not block each other.


def wait(using):
    with db_lock("stock:7", using=using, timeout=20) as hold:
        return hold.waited


def wait_in_a_transaction(using):
    with transaction.atomic():
        return wait(using)


def wait_in_nested_async_code(using):
    async def nested():
        async with db_lock("stock:7", using=using, timeout=20) as hold:
            return hold.waited

    with transaction.atomic():
        return async_to_sync(nested)()


@pytest.mark.front
@for_each(
    "case",
    [
        ("default", wait),
        ("memory", wait_in_a_transaction),
        ("memory", wait_in_nested_async_code),
    ],
)
async def test_sync_code_waiting_in_djangos_thread_blocks_no_task(case):
    """The holder checks, acquires another key and releases meanwhile."""
    using, waiter = case
    async with asyncio.timeout(20):
        async with db_lock("stock:7", using=using) as hold:
            waiting = asyncio.create_task(sync_to_async(waiter)(using))
            while await hold.aqueue_length() != 1:
                await asyncio.sleep(0.005)
            await hold.acheck()
            await hold.arenew()
            async with db_lock("another", using=using, timeout=5):
                assert await db_lock("another", using=using).alocked()
            assert not waiting.done()
        assert await waiting > 0


@pytest.fixture(params=["busy", "waiting"])
def while_busy(request, threads, in_other_thread):
    """Return a coroutine function that awaits another one beside a busy thread.

    A sibling task occupies Django's thread for 0.3 s, or until the call has ended. It
    may wait for a lock there. Meanwhile another thread waits for that lock.
    """
    go_on = threading.Event()
    lock = db_lock("another", using="memory", timeout=60)
    hold = in_other_thread(lock.acquire)

    async def call(step):
        begun = threading.Event()
        sibling = asyncio.create_task(
            sync_to_async(
                (lambda: lock.acquire().release())
                if request.param == "waiting"
                else (lambda: (begun.set(), go_on.wait(30)))
            )()
        )
        while not begun.is_set():
            if request.param == "waiting" and hold.queue_length() == 2:
                break
            await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(0.3, go_on.set)
        try:
            return await step()
        finally:
            go_on.set()
            await sibling

    others = [
        threads(lambda: lock.acquire().release()),
        threads(lambda: (go_on.wait(60), hold.release())),
    ]
    eventually(hold.queue_length)
    yield call
    go_on.set()
    for thread in others:
        thread.join(30)


@pytest.mark.front
def test_async_code_keeps_a_lease_until_the_commit(while_busy):
    """The transaction is that of the sync code that runs the async code."""
    lock = db_lock("stock:7", using="memory", scope="lease")

    async def work():
        hold = await lock.aacquire()
        await while_busy(hold.arelease)

    with transaction.atomic():
        async_to_sync(work)()
        assert lock.locked()
    assert not lock.locked()


@pytest.mark.front
def test_async_code_acquires_in_the_transaction_of_its_caller(while_busy):
    """A lock without a scope belongs to the transaction of the sync code."""

    async def work():
        hold = await while_busy(db_lock("stock:7").aacquire)
        return hold.scope

    with transaction.atomic():
        assert async_to_sync(work)() == "transaction"


@pytest.mark.front
async def test_the_first_task_that_needs_djangos_thread_gets_a_thread(in_other_thread):
    """Sync code waits there for a key that only the task can release."""
    hold = await asyncio.to_thread(
        in_other_thread, db_lock("stock:7", using="memory").acquire
    )
    waiting = asyncio.create_task(
        sync_to_async(lambda: db_lock("stock:7", using="memory").acquire().release())()
    )
    while not hold.queue_length():
        await asyncio.sleep(0.01)
    async with asyncio.timeout(5):
        async with db_lock("report", using="memory"):
            pass
    await asyncio.to_thread(in_other_thread, hold.release)
    await waiting


@pytest.mark.front
async def test_a_task_releases_after_a_transaction_of_several_calls():
    """Sync code waits for the task's key in the thread that had the transaction."""
    block = transaction.atomic()
    hold = await db_lock("stock:7", using="memory").aacquire()
    await sync_to_async(block.__enter__)()
    await db_lock("another", using="memory").alocked()
    await sync_to_async(block.__exit__)(None, None, None)
    waiting = asyncio.create_task(sync_to_async(wait)("memory"))
    while not hold.queue_length():
        await asyncio.sleep(0.01)
    await hold.arelease()
    assert await waiting > 0


@pytest.mark.front
async def test_tasks_and_sync_code_of_a_request_do_not_deadlock():
    """An async view gathers two coroutines and two sync calls on one key."""
    for _ in range(3):
        response = await AsyncClient().get("/gathered/")
        assert response.status_code == 200
        assert sorted(response.content.decode().split()) == [
            "coroutine",
            "coroutine",
            "sync",
            "sync",
        ]


@TWO_SERVERS
async def test_waiting_tasks_block_neither_the_loop_nor_djangos_thread():
    """The event loop goes on, and the ORM answers."""

    async def work():
        async with db_lock("stock:7", timeout=30):
            pass

    async with asyncio.TaskGroup() as group:
        async with db_lock("stock:7") as hold:
            for _ in range(5):
                group.create_task(work())
            async with asyncio.timeout(30):
                while await hold.aqueue_length() != 5:
                    await asyncio.sleep(0.005)
            for _ in range(20):
                assert await LockClaim.objects.acount() == 5
                await asyncio.sleep(0)
    assert await LockClaim.objects.acount() == 0


# Tasks that outlive the context they started in.


@pytest.fixture
def own_thread():
    """Close the connections of Django's thread for loops without a sync parent."""
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


@pytest.mark.front
@pytest.mark.usefixtures("own_thread")
@pytest.mark.parametrize(
    "run",
    [
        lambda function: asyncio.run(function()),
        lambda function: async_to_sync(function)(),
    ],
)
def test_the_end_of_an_event_loop_releases_its_holds(run, caplog):
    """``asyncio.run()`` and ``async_to_sync()`` leave nothing acquired.

    They cancel the remaining tasks and wait until those have released their holds. No
    suspended coroutine is left either, which the garbage collector would end in an
    arbitrary thread.
    """
    for _ in range(volume(2)):
        run(leave_tasks_behind)
        assert not left_behind(["stock:7"], "default")
        gc.collect()
        assert not caplog.messages
    connection.close()


@pytest.mark.front
def test_a_task_that_outlives_its_request_releases():
    """Django's thread for the request has ended before the task checks its hold."""
    over = asyncio.Event()

    async def work(entered):
        async with db_lock("stock:7") as hold:
            entered.set()
            await over.wait()
            await hold.acheck()
            async with db_lock("another"):
                pass
        # This closes the connections of the thread that such a task creates for itself.
        await sync_to_async(connections.close_all)()
        return hold.token

    async def serve():
        async with ThreadSensitiveContext():
            entered = asyncio.Event()
            task = asyncio.create_task(work(entered))
            await entered.wait()
            # Django does the same at the end of a request.
            await sync_to_async(connections.close_all)()
        over.set()
        return await task

    assert asyncio.run(serve()) > 0
    assert not left_behind(["stock:7", "another"], "default")
