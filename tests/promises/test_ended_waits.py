"""A shutdown ends the waits of its process, and lets no further one begin."""

import asyncio
import pickle
import signal
import threading
from functools import partial

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, connections, transaction

from dlocks import (
    LeaderElection,
    LockBackendError,
    LockError,
    LockLost,
    LockShutDown,
    LockTimeout,
    db_lock,
    db_rwlock,
    db_semaphore,
    shutdown,
)
from dlocks.asgi import release_at_shutdown
from dlocks.testing import held_elsewhere, undo_shutdown
from tests.promises.test_forks import in_child
from tests.timing import eventually

pytestmark = [pytest.mark.holds, pytest.mark.django_db(transaction=True)]

WHY = r"dlocks\.shutdown\(\) has ended all waits of this process"


def in_block(lock):
    with lock:
        pytest.fail("the key is held elsewhere")


def in_function(lock):
    lock(pytest.fail)("the key is held elsewhere")


def in_task(lock):
    async def block():
        async with lock:
            pytest.fail("the key is held elsewhere")

    async_to_sync(block)()


def in_try(lock):
    lock.try_acquire(timeout=None)


def in_acquire(lock):
    lock.acquire()


def error_of(work, lock):
    """Return the error with which a wait ends."""
    with pytest.raises(LockError) as raised:
        work(lock)
    return raised.value


@pytest.mark.parametrize("using", ["default", "memory"])
def test_a_shutdown_ends_the_waits_of_all_threads_and_tasks(using, threads):
    """Each gets an error of its own, and leaves nothing acquired or queued."""
    options = {"using": using, "timeout": None}
    key = db_lock("stock:7", **options)
    works = [(work, key) for work in (in_block, in_function, in_task, in_try)]
    works += [
        (in_acquire, db_lock("free", "stock:7", **options)),
        (in_acquire, db_rwlock("stock:7", **options).read()),
        (in_acquire, db_lock("stock:7", fair=False, **options)),
        # A callable or "skip" is for a busy key alone.
        (in_function, db_lock("stock:7", busy="skip", **options)),
    ]
    with held_elsewhere("stock:7", using=using):
        waiting = [
            threads(lambda work=work, lock=lock: error_of(work, lock))
            for work, lock in works
        ]
        # All but the one that is not fair. Its wait ends, or does not begin.
        eventually(lambda: len(key.waiters()) == len(works) - 1)
        shutdown()
        for thread in waiting:
            thread.join(30)
        errors = [thread.results[0] for thread in waiting]
        assert {type(error) for error in errors} == {LockShutDown}
        assert {error.key for error in errors} == {"stock:7"}
        # On SQLite, a busy writer may refuse to cancel. Such a claim ends by itself.
        eventually(lambda: not key.waiters())
        assert not db_lock("free", using=using).locked()
    assert not key.locked()


@pytest.mark.parametrize(
    ("kind", "using"),
    [
        (db_lock, "default"),
        (partial(db_semaphore, permits=1), "default"),
        # In the queue of the engine.
        pytest.param(
            db_lock, "session", marks=pytest.mark.engine("postgresql", "mariadb")
        ),
    ],
    ids=["key", "permit", "session"],
)
def test_a_wait_does_not_acquire_what_the_shutdown_releases(
    kind, using, threads, is_busy
):
    """The key was held by another thread of the same process."""
    hold = kind("stock:7", using=using).acquire()
    lock = kind("stock:7", using=using, timeout=None)
    thread = threads(lambda: error_of(in_block, lock))
    eventually(hold.queue_length)
    shutdown()
    thread.join(30)
    assert type(thread.results[0]) is LockShutDown
    # The server may have granted the lock as the wait ended.
    eventually(lambda: not is_busy("stock:7", using))


@pytest.mark.skipif(
    connection.vendor == "sqlite", reason="no wait in a transaction on SQLite"
)
def test_a_wait_in_a_transaction_ends(threads):
    lock = db_lock("stock:7", timeout=None)
    work = transaction.atomic(partial(error_of, in_block, lock))
    with held_elsewhere("stock:7"):
        thread = threads(work)
        eventually(lock.waiters)
        shutdown()
        thread.join(30)
        assert type(thread.results[0]) is LockShutDown
        eventually(lambda: not lock.waiters())


@pytest.mark.front
@pytest.mark.parametrize("work", [in_block, in_function, in_task, in_acquire])
def test_no_wait_begins_after_a_shutdown(work):
    """A free key is acquired, and a busy one is found busy, as without a wait."""
    shutdown()
    with held_elsewhere("stock:7"):
        with pytest.raises(LockShutDown, match=f"^'stock:7' .*: {WHY}"):
            work(db_lock("stock:7", timeout=60))
        assert db_lock("stock:7").try_acquire() is None
        with pytest.raises(LockTimeout):
            db_lock("stock:7", timeout=0).acquire()
        assert not db_lock("stock:7").waiters()
    with db_lock("stock:7") as hold:
        assert hold.held
    # A test of the application may go on.
    undo_shutdown()
    with held_elsewhere("stock:7"), pytest.raises(LockTimeout):
        work(db_lock("stock:7", timeout=0.1))


@pytest.mark.front
def test_the_error_is_neither_contention_nor_a_failure():
    shutdown()
    with held_elsewhere("stock:7"):
        error = error_of(in_block, db_lock("stock:7", timeout=None))
    assert not isinstance(error, (LockTimeout, LockBackendError, TimeoutError))
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.key) == (LockShutDown, str(error), "stock:7")


def wait_in_parent_and_child(pipe):
    """Return how a wait ends after a shutdown, and in a child that is forked then."""

    def wait():
        return type(error_of(in_acquire, db_lock("stock:7", timeout=0.1))).__name__

    shutdown()
    with held_elsewhere("stock:7"):
        return wait(), in_child(wait)


@pytest.mark.front
def test_a_fork_may_wait_again(doomed):
    outcomes = doomed().call(wait_in_parent_and_child)
    assert outcomes == ("LockShutDown", "LockTimeout")


@pytest.mark.front
def test_a_signal_handler_ends_the_wait_of_its_own_thread(handled, threads):
    """The usual handler of SIGTERM, in a process that waits without an end."""
    lock, main = db_lock("stock:7", timeout=None), threading.get_ident()
    handled(signal.SIGTERM, lambda *_: shutdown())

    def send():
        eventually(lock.waiters)
        signal.pthread_kill(main, signal.SIGTERM)

    with held_elsewhere("stock:7"):
        threads(send)
        with pytest.raises(LockShutDown):
            lock.acquire()
        assert lock.waiters() == []


@pytest.mark.front
def test_a_shutdown_ends_candidates_of_an_election(threads):
    """``run()`` returns as after ``stop()``. A new election does not begin."""
    first, second = LeaderElection("x"), LeaderElection("x")
    with held_elsewhere(first.key):
        runs = threads(first.run), threads(async_to_sync(second.arun))
        eventually(lambda: len(db_lock(first.key).waiters()) == 2)
        shutdown()
        for thread in runs:
            thread.join(30)
            assert thread.results == [None]
        assert not db_lock(first.key).waiters()
    for begin in LeaderElection.run, LeaderElection.start:
        with pytest.raises(LockShutDown, match=WHY):
            begin(LeaderElection("x"))
    with pytest.raises(LockShutDown, match=WHY):
        asyncio.run(LeaderElection("x").arun())


@pytest.mark.front
def test_the_shutdown_of_an_asgi_server_ends_the_waits_of_threads(threads, paused):
    """It ends blocks with LockLost, such as those of requests of synchronous views.

    The next server of the process, for example in a test, lets waits begin again.
    """
    lock, sent = db_lock("stock:7", timeout=None), []

    def work():
        with db_lock("report"):
            yield

    def call(step):
        step()
        connections.close_all()

    async def serve(*steps):
        messages = [{"type": f"lifespan.{name}"} for name in ("startup", "shutdown")]

        async def receive():
            await asyncio.to_thread(call, steps[2 - len(messages)])
            return messages.pop(0)

        async def send(message):
            sent.append(message["type"])

        await release_at_shutdown(None)({"type": "lifespan"}, receive, send)

    def timed_out():
        with pytest.raises(LockTimeout):
            db_lock("stock:7", timeout=0.1).acquire()

    with held_elsewhere("stock:7"):
        thread, end = threads(lambda: error_of(in_block, lock)), paused(work)
        asyncio.run(serve(int, lambda: eventually(lock.waiters)))
        assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
        assert not db_lock("report").locked()
        with pytest.raises(LockLost, match="its process released all of its locks"):
            end()
        thread.join(30)
        assert type(thread.results[0]) is LockShutDown
        with pytest.raises(LockShutDown):
            lock.acquire()
        asyncio.run(serve(int, timed_out))


@pytest.mark.front
def test_a_loss_is_reported_before_an_asgi_server_has_shut_down(paused):
    """The server may end its process at once, and with it all daemon threads."""
    told, reported = threading.Event(), []
    messages = [{"type": f"lifespan.{name}"} for name in ("startup", "shutdown")]

    def work():
        with db_lock("report", on_lost=lambda hold: reported.append(told.wait(0.5))):
            yield

    async def receive():
        return messages.pop(0)

    async def send(message):
        if message["type"] == "lifespan.shutdown.complete":
            told.set()

    end = paused(work)
    asyncio.run(release_at_shutdown(None)({"type": "lifespan"}, receive, send))
    with pytest.raises(LockLost):
        end()
    assert reported == [False]
