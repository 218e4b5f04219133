"""``lock.holders()`` and ``lock.waiters()``: all of them, in order."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from functools import partial

import pytest
from django.db import connection

from dlocks import Holder, LockLost, Waiter, db_lock, db_rwlock, db_semaphore
from dlocks.testing import abandoned
from tests import jobs
from tests.for_each import EVERY, ROWS, for_each
from tests.sync_and_async import sync_and_async

pytestmark = [pytest.mark.driver, pytest.mark.django_db(transaction=True)]

SHARED = for_each(
    "using",
    ["default", "memory"]
    if connection.vendor == "sqlite"
    else ["default", "session"]
    if connection.vendor == "postgresql"
    else ["default"],
)


@pytest.fixture
def crowd(threads, until, waiting):
    """Return a context manager that lets threads acquire locks, one after the other.

    Those that get their lock hold it until the end of the block.
    """

    @contextmanager
    def enter(*crowd):
        over, started = threading.Event(), []

        def work(name, lock, held):
            threading.current_thread().name = name
            with lock:
                held.set()
                assert over.wait(60)

        def start(name, lock):
            held, before = threading.Event(), waiting(lock.key, lock.using)
            started.append(threads(partial(work, name, lock, held)))
            until(lambda: held.is_set() or waiting(lock.key, lock.using) > before, 30)

        for name, lock in crowd:
            start(name, lock)
        try:
            yield
        finally:
            over.set()
            for thread in started:
                thread.join(60)

    return enter


def names_of(found):
    return [one.holder.rpartition(":")[2] for one in found]


@EVERY
def test_waiters_are_listed_in_the_order_of_the_queue(using, crowd):
    """No caller is listed before the first one acquires, nor after the last one."""
    lock = db_lock("stock:7", using=using, timeout=60)
    assert lock.holders() == lock.waiters() == []
    with crowd(("first", lock), ("second", lock), ("third", lock)):
        (holder,) = lock.holders()
        assert isinstance(holder, Holder)
        assert names_of([holder]) == ["first"]
        assert holder.token == lock.holder().token
        waiters = lock.waiters()
        assert names_of(waiters) == ["second", "third"]
        for waiter in waiters:
            assert isinstance(waiter, Waiter)
            assert (waiter.waits_for, waiter.holds) == ("stock:7", ())
            assert 0 <= waiter.waited < 60
            assert "has waited for 'stock:7' for" in str(waiter)
    assert lock.holders() == lock.waiters() == []


@EVERY
@sync_and_async
async def test_other_processes_see_holders_and_waiters(do, using, workers):
    """A session lock only knows their sessions."""
    if using == "memory":
        return
    lock = db_lock("stock:7", using=using)
    first, second = await do.sync(workers, 2)
    with first.doing(jobs.hold, "stock:7", using=using):
        second.start(jobs.wait_quietly, "stock:7", using=using, timeout=60)
        while not (found := await do.ask(lock, "waiters")):
            pass
        (holder,) = await do.ask(lock, "holders")
    second.hear()
    (waiter,) = found
    if using == "session":
        assert "session" in waiter.holder
    else:
        assert f":{first.process.pid}:" in holder.holder
        assert f":{second.process.pid}:" in waiter.holder


@SHARED
def test_all_holders_of_a_shared_key_are_listed(using, crowd):
    """They are in the order of their grants. A writer and a reader wait."""
    lock = db_rwlock("catalogue", using=using, timeout=60)
    read, write = lock.read(), lock.write()
    with crowd(("one", read), ("two", read), ("writer", write), ("reader", read)):
        assert names_of(read.holders()) == ["one", "two"]
        assert names_of(write.holders()) == ["one", "two"]
        waiters = read.waiters()
        assert names_of(waiters) == ["writer", "reader"]
        assert [waiter.shared for waiter in waiters] == [False, True]


@SHARED
def test_a_writer_that_also_reads_is_listed_for_both(using):
    lock = db_rwlock("catalogue", using=using)
    writing = lock.write().acquire()
    with lock.read() as reading:
        tokens = [one.token for one in lock.read().holders()]
        assert len(tokens) == 2
        assert tokens[1] == reading.token
        writing.release()
        assert [one.token for one in lock.write().holders()] == [reading.token]
    assert lock.write().holders() == []


@pytest.mark.engine("postgresql", "mariadb", "mysql")
def test_a_writer_that_also_reads_is_shown_in_its_transaction(in_other_thread, until):
    """The transaction keeps the key although both leases have expired."""
    lock = db_rwlock("catalogue", ttl=1.5, renew=False)
    writing, reading = lock.write().acquire(), lock.read().acquire()
    with writing.atomic():
        in_other_thread(until, lambda: lock.write().holder().in_transaction)
    for hold in writing, reading:
        with suppress(LockLost):
            hold.release()


@pytest.mark.front
@for_each("using", ["default", "memory"])
def test_each_permit_of_a_semaphore_has_a_holder(using, crowd):
    pool = db_semaphore("pool", 2, using=using, timeout=60)
    with crowd(("one", pool), ("two", pool), ("three", pool)):
        assert names_of(pool.holders()) == ["one", "two"]
        assert names_of(pool.waiters()) == ["three"]


@pytest.mark.front
def test_a_waiter_shows_what_it_holds(crowd, threads, in_queue):
    """The keys are without the prefix. Their owners are secret."""

    def work():
        first = db_lock("a", using="prefixed")
        with first, db_lock("b", using="prefixed", timeout=60):
            pass

    with crowd(("first", db_lock("b", using="prefixed"))):
        nested = threads(work)
        in_queue(1, "shop:b")
        (waiter,) = db_lock("b", using="prefixed").waiters()
        assert (waiter.holds, waiter.waits_for) == (("a",), "b")
        assert "holds 'a' and has waited for 'b' for" in str(waiter)
        assert [one.key for one in db_lock("b", using="prefixed").holders()] == [
            "shop:b"
        ]
        assert db_lock("b").holders() == []
    nested.join(60)


@pytest.mark.front
def test_several_keys_list_the_holders_of_each(crowd):
    both = db_lock("b", "a")
    with crowd(
        ("one", db_lock("a")),
        ("two", db_lock("b")),
        ("three", db_lock("b", timeout=60)),
    ):
        assert names_of(both.holders()) == ["one", "two"]
        assert names_of(both.waiters()) == ["three"]


@pytest.mark.front
@for_each("using", [*ROWS, "memory"])
def test_a_stale_holder_is_listed(using):
    """As by ``holder()``, since no caller has released the key."""
    abandoned("abandoned", using=using)
    (holder,) = db_lock("abandoned", using=using).holders()
    assert holder.stale
