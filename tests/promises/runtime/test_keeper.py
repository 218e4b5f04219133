"""Leases are renewed while they are held, or their loss is reported."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import textwrap
import threading
import time
from datetime import timedelta

import pytest
from django.db import connection, connections, transaction

from dlocks import LockBackendError, LockLost, LockTimeout, db_lock, lock_lost
from tests import jobs
from tests.for_each import for_each
from tests.internals import (
    REPLY_TIMEOUT,
    Grant,
    Keeper,
    KeptHold,
    LockState,
    ResourceLock,
    backends,
    clock,
    keeper,
)
from tests.scripts import run_python
from tests.timing import eventually, in_time

pytestmark = [
    pytest.mark.front,
    pytest.mark.django_db(transaction=True),
]


def state(key="stock:7"):
    return ResourceLock.objects.by_clock().get(pk=key).state


@pytest.fixture
def turned_clock(monkeypatch):
    """A manual clock for locks and for the memory backend.

    The keeper still waits in real time.
    """

    class Clock:
        time = 1000.0

        def __call__(self):
            return self.time

        def turn(self, seconds):
            self.time += seconds

    turned = Clock()
    backends.reset()
    with monkeypatch.context() as patch:
        patch.setattr(clock, "now", turned)
        patch.setattr(backends["memory"], "time", turned)
        patch.setattr(keeper, "keep", lambda hold: None)
        yield turned
    # A backend that was created meanwhile would keep that clock, and its waiters would
    # never see a lease expire.
    backends.reset()
    # The keeper may sleep until a time of that clock.
    keeper.check_soon()


# Renewal.


@pytest.mark.engine("postgresql", "mariadb")
def test_a_lease_is_renewed_while_the_block_runs(in_other_thread):
    with db_lock("stock:7", using="brisk") as hold:
        later = ResourceLock.objects.get(pk="stock:7").end_time + timedelta(seconds=2.1)
        renewed = ResourceLock.objects.filter(pk="stock:7", end_time__gt=later)
        eventually(renewed.exists, pause=0.1)
        hold.check()
        assert hold.remaining > 0
        assert in_other_thread(db_lock("stock:7", using="brisk").try_acquire) is None
    assert state() == LockState.FREE


@pytest.mark.driver
def test_100_holds_of_a_process_are_renewed_in_one_statement(
    monkeypatch, until, django_assert_num_queries
):
    backend, batches = backends["brisk"], []
    renew = backend.renew

    def counted(claims):
        batches.append(len(claims))
        return renew(claims)

    with contextlib.ExitStack() as stack:
        holds = [
            stack.enter_context(db_lock(f"stock:{number}", using="brisk", ttl=60))
            for number in range(100)
        ]
        with django_assert_num_queries(1):
            assert len(backend.renew([hold.claim for hold in holds])) == 100
        monkeypatch.setattr(backend, "renew", counted)
        # One of them is due, and the others are renewed with it.
        holds[0]._state.lease.renew_at = 0.0
        keeper.check_soon()
        until(lambda: batches)
        assert batches[0] == 100


@pytest.mark.driver
def test_the_keeper_closes_its_connection_when_unused(until):
    def opened():
        there = connections.all(initialized_only=True)
        return [one.alias for one in there if one.connection]

    with db_lock("stock:7", using="brisk"):
        until(lambda: keeper.run(opened, backends["brisk"]) == ["default"])
    until(lambda: not keeper._connected)


@pytest.mark.storage
def test_renewal_stops_at_max_hold(until, monkeypatch):
    """A caller in an endless loop must not hold a lock forever."""
    lost, began, took = [], [], [0.0]
    next_claim, renew = KeptHold.next_claim, backends["default"].renew

    def measured(claims):
        left = renew(claims)
        took.append(time.monotonic() - began[-1])
        return left

    monkeypatch.setattr(
        KeptHold,
        "next_claim",
        lambda hold: (began.append(time.monotonic()), next_claim(hold))[1],
    )
    monkeypatch.setattr(backends["default"], "renew", measured)
    started = time.monotonic()
    with pytest.raises(LockLost, match="held for its max_hold of 2.5 s"):
        with db_lock("stock:7", ttl=2.0, max_hold=2.5, on_lost=lost.append):
            until(lambda: lost)
            assert time.monotonic() - started > 2.4
            in_all = time.monotonic() - started
            row = ResourceLock.objects.get(pk="stock:7")
            # The rest is counted from before the renewal. SQLite's clock has a
            # resolution of one millisecond.
            assert (row.end_time - row.begin_time).total_seconds() <= 2.5 + max(
                took
            ) + 0.002
    assert len(took) > 1
    in_time(in_all, 5)


# Loss.


def test_a_lost_hold_is_reported_in_every_way(until, caplog):
    told, signalled = [], []

    def receive(hold, **kwargs):
        signalled.append(hold)

    lock_lost.connect(receive)
    caplog.set_level(logging.WARNING, "dlocks")
    try:
        with (
            pytest.raises(LockLost) as error,
            db_lock("stock:7", using="brisk", on_lost=told.append) as hold,
        ):
            backends["brisk"].clear("stock:7", hold.token)
            until(lambda: told)
            assert not hold.held
            assert hold.remaining == 0
            with pytest.raises(LockLost):
                hold.check()
            with pytest.raises(LockLost):
                hold.renew()
    finally:
        lock_lost.disconnect(receive)
    assert told == signalled == [hold]
    assert (error.value.key, error.value.token) == ("stock:7", hold.token)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "'stock:7' was lost by" in caplog.text
    assert hold.owner not in caplog.text
    # An error of the body has a note about the loss, and one of on_lost is logged.
    caplog.clear()

    def fail(hold):
        raise ValueError("on_lost")

    with (
        pytest.raises(ZeroDivisionError) as error,
        db_lock("stock:7", using="brisk", on_lost=fail) as hold,
    ):
        backends["brisk"].clear("stock:7", hold.token)
        until(lambda: "on_lost of 'stock:7' failed" in caplog.text)
        1 / 0  # noqa: B018
    assert any("LockLost: 'stock:7' was lost" in note for note in error.value.__notes__)


def test_a_renewal_error_is_no_loss_before_the_deadline(monkeypatch, until, caplog):
    def fail(claims):
        raise LockBackendError("could not ask")

    monkeypatch.setattr(backends["brisk"], "renew", fail)
    lost, said = [], "Could not renew the holds on 'stock:7': could not ask"
    with pytest.raises(LockLost, match="not renewed within its ttl"):
        with db_lock("stock:7", using="brisk", ttl=1.5, on_lost=lost.append) as hold:
            until(lambda: said in caplog.text)
            hold.check()
            assert not lost
            until(lambda: lost)
    assert hold.remaining == 0


@pytest.mark.engine("postgresql", "mariadb", "mysql")
def test_a_renewal_that_finds_its_own_row_locked_is_not_lost(workers):
    with db_lock("stock:7") as hold:
        with transaction.atomic():
            ResourceLock.objects.select_for_update().get(pk="stock:7")
            left = keeper.run(
                lambda: backends["default"].renew([hold.claim]), backends["default"]
            )
            assert 0 < left[hold.owner] <= 30
        hold.renew()


# The local deadline.


def test_the_deadline_counts_from_before_the_request_was_sent(
    monkeypatch, turned_clock
):
    backend = backends["memory"]
    acquire = backend.acquire

    def slowly(claim):
        grant = acquire(claim)
        turned_clock.turn(4)
        return grant

    monkeypatch.setattr(backend, "acquire", slowly)
    hold = db_lock("stock:7", using="memory", ttl=10).acquire()
    assert hold.remaining == pytest.approx(6)
    turned_clock.turn(5.9)
    assert hold.held
    turned_clock.turn(0.2)
    assert not hold.held
    with pytest.raises(LockLost):
        hold.release()


@for_each("lease", [None, 2])
def test_a_grant_that_arrives_after_its_lease_is_retried(
    lease, monkeypatch, turned_clock
):
    """The lease may be shorter than the ttl."""
    backend = backends["memory"]
    acquire, late = type(backend).acquire, [(lease or 10) + 1, 0]

    def late_once(claim):
        grant = acquire(backend, claim)
        turned_clock.turn(late.pop(0))
        return dataclasses.replace(grant, lease=lease)

    monkeypatch.setattr(backend, "acquire", late_once)
    with db_lock("stock:7", using="memory", ttl=10, timeout=30) as hold:
        assert hold.remaining == pytest.approx(lease or 10)
    assert late == []


def test_a_last_try_is_made_at_the_deadline_without_a_queue(monkeypatch, turned_clock):
    """The timeout is counted from the start. The pauses between tries are random.

    Without a timeout, the tries go on.
    """
    tries, answers, took = [], [None] * 500 + [Grant(7)], [0.0]

    def busy(claim):
        tries.append(turned_clock.time)
        turned_clock.turn(*took)

    memory, started = backends["memory"], turned_clock.time
    monkeypatch.setattr(clock, "rest", lambda bell, seconds: turned_clock.turn(seconds))
    monkeypatch.setattr(memory, "acquire", busy)
    with pytest.raises(LockTimeout):
        db_lock("stock:7", using="memory", timeout=3, fair=False).acquire()
    assert tries[0] == started
    assert tries[-1] == pytest.approx(started + 3)
    pauses = [later - sooner for sooner, later in zip(tries, tries[1:], strict=False)]
    assert all(0 < pause <= 0.25 + 1e-6 for pause in pauses)
    assert len(set(pauses)) > len(pauses) // 2
    took[0], started = 0.8, turned_clock.time
    with pytest.raises(LockTimeout):
        db_lock("stock:7", using="memory", timeout=1.0).acquire()
    assert tries[-1] <= started + 1.0
    monkeypatch.setattr(memory, "acquire", lambda claim: answers.pop(0))
    monkeypatch.setattr(memory, "release", lambda claim, **kwargs: True)
    with db_lock("stock:7", using="memory", timeout=None, fair=False) as hold:
        assert hold.token == 7
        assert hold.waited > 60


def test_a_renewal_is_due_after_a_third_of_the_ttl():
    """Two renewals of a lease may fail, and the next one is still in time."""
    with db_lock("stock:7", ttl=9) as hold:
        lease = hold._state.lease
        assert lease.deadline - lease.renew_at == pytest.approx(6)
        lease.renew_at = 0.0
        keeper._renew(hold._state.backend, [hold._state])
        # The keeper may have renewed it at the same moment.
        assert lease.deadline - lease.renew_at == pytest.approx(6, abs=0.5)


@for_each("by", ["caller", "keeper"])
def test_a_slow_renewal_counts_from_its_request(by, monkeypatch, turned_clock):
    """A renewal whose reply takes 4 s is 4 s shorter for its holder."""
    backend = backends["memory"]
    renew = type(backend).renew

    def slowly(claims):
        left = renew(backend, claims)
        turned_clock.turn(4)
        return left

    monkeypatch.setattr(backend, "renew", slowly)
    hold = db_lock("stock:7", using="memory", ttl=10).acquire()
    turned_clock.turn(5)
    assert hold.remaining == pytest.approx(5)
    if by == "caller":
        hold.renew()
    else:
        keeper._renew(hold._state.backend, [hold._state])
    assert hold.remaining == pytest.approx(6)
    hold.release()


def test_a_key_is_free_after_max_hold_whatever_its_ttl(turned_clock, in_other_thread):
    """A holder that hangs keeps its key for max_hold, even if the ttl is longer."""

    def is_free():
        with db_lock("stock:7", using="memory", timeout=0) as hold:
            return hold.takeover

    hold = db_lock("stock:7", using="memory", ttl=30, max_hold=2).acquire()
    turned_clock.turn(2 + backends["memory"].grace)
    assert in_other_thread(is_free)
    with pytest.raises(LockLost):
        hold.release()


# The end of a process.


def run_script(script, *, before=""):
    """Run a user's script in its own process, on this test's database.

    ``before`` is code that runs before the setup of Django.
    """
    setup = "\nimport django; django.setup()\n"
    code = textwrap.dedent(before) + setup + textwrap.dedent(script)
    return run_python("-c", code, DJANGO_SETTINGS_MODULE="tests.settings")


@pytest.mark.engine("sqlite")
def test_locks_need_nothing_that_windows_lacks():
    done = run_script(
        before="""
        import asyncio, concurrent.futures, logging, os, select, selectors, socket
        import sys, threading, time, unittest
        import django.core.handlers.asgi, django.db.backends.sqlite3.base, django.test
        sys.platform = "win32"
        for module, names in {
            os: "fork getuid register_at_fork sched_yield",
            select: "poll epoll",
            socket: "AF_UNIX",
            time: "clock_gettime CLOCK_BOOTTIME CLOCK_MONOTONIC CLOCK_REALTIME",
        }.items():
            for name in names.split():
                delattr(module, name)
        """,
        script="""
        from django.db import connections
        from dlocks import db_lock
        from dlocks.backends.database.notify import datagram, notifications
        # There is no /proc.
        datagram.this_host = notifications.this_host = lambda: ""
        def wait():
            with db_lock("stock:7", timeout=20) as hold:
                tokens.append(hold.token)
            connections.close_all()
        tokens = []
        with db_lock("stock:7", ttl=1.5) as hold:
            thread = threading.Thread(target=wait)
            thread.start()
            time.sleep(2)
            hold.check()
        thread.join()
        print(tokens[0] > hold.token)
        """,
    )
    assert done.stdout == "True\n", done.stderr
    # Python 3.13 warns of unclosed connections, so stderr need not be empty.
    assert "Traceback" not in done.stderr


def test_holds_are_released_at_exit():
    """A signal handler ends a process by SystemExit, as servers do.

    A warning names the holds that no block releases.
    """
    done = run_script("""
        import os, signal, sys
        from dlocks import db_lock
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        for ending in "end", "exit", "signal":
            if child := os.fork():
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                print(ending, status, flush=True)
                continue
            if ending == "signal":
                with db_lock(ending):
                    os.kill(os.getpid(), signal.SIGTERM)
                    signal.pause()
            hold = db_lock(ending).acquire()
            print("held", hold.held)
            if ending == "exit":
                sys.exit(3)
            break
        """)
    assert done.stdout == "held True\nend 0\nheld True\nexit 3\nsignal 0\n"
    assert [line.partition(" by ")[0] for line in done.stderr.splitlines()] == [
        "'end' was never released",
        "'exit' was never released",
    ]
    for key in "end", "exit", "signal":
        row = ResourceLock.objects.by_clock().get(pk=key)
        assert (row.state, row.status, row.hold_count) == (LockState.FREE, "F", 0)


def hold_in_parent_and_child(pipe):
    """Fork while a lease is held, and hold another one in the child.

    Return the status of the child.
    """
    with db_lock("parent", using="brisk") as hold:
        while not keeper._connected:
            time.sleep(0.01)
        if (child := os.fork()) == 0:
            try:
                with db_lock("child", using="brisk", ttl=1.2) as mine:
                    time.sleep(1.5)
                    mine.check()
                os._exit(0)
            finally:
                os._exit(1)
        time.sleep(1.0)
        status = os.waitpid(child, 0)[1]
        hold.check()
    return status


@pytest.mark.engine("postgresql", "mariadb")
def test_a_forked_child_renews_only_its_own_holds(doomed):
    assert doomed().call(hold_in_parent_and_child) == 0


def leave_a_block_in_a_child(pipe):
    """Fork in a block while a thread renews its lease.

    Return the status of the child, which is 7 for LockLost.
    """
    parent, begun, done = os.getpid(), threading.Event(), threading.Event()

    def work(lease):
        with lease.mutex:
            begun.set()
            done.wait()

    status = 1
    try:
        with db_lock("stock:7") as hold:
            thread = threading.Thread(target=work, args=[hold._state.lease])
            thread.start()
            begun.wait()
            if child := os.fork():
                done.set()
                thread.join()
                return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except LockLost:
        status = 7
    finally:
        if os.getpid() != parent:
            os._exit(status)


def test_a_forked_child_leaves_a_block_during_a_renewal(doomed):
    """The block raises LockLost there, also if a thread of the parent works on it."""
    assert doomed().call(leave_a_block_in_a_child) == 7


USERS_FILES = {
    "usersettings.py": """
        from tests.settings import DATABASES, SECRET_KEY
        DATABASES["default"]["TEST"] = {"NAME": "test_of_a_user"}
        INSTALLED_APPS = ["dlocks"]
        """,
    "usertests.py": """
        import time
        from django.db import transaction
        from django.test import TestCase, TransactionTestCase
        from dlocks import db_lock
        from dlocks.runtime.keeper import keeper

        class Plain(TestCase):
            def test_lock(self):
                with db_lock("plain"), db_lock("plain"), transaction.atomic():
                    pass

            def test_lease(self):
                with db_lock("forced", scope="lease"):
                    pass

        class Leases(TransactionTestCase):
            def test_renewed_to_the_last_moment(self):
                with db_lock("leased", ttl=3):
                    while not keeper._connected:
                        time.sleep(0.01)
                self.left = db_lock("left", ttl=30).acquire()
        """,
}


@pytest.mark.engine("postgresql")
def test_a_user_s_test_run_can_drop_its_database(tmp_path):
    """A remaining connection of dlocks would make DROP DATABASE fail."""
    for name, text in USERS_FILES.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    django_test = "django", "test", "usertests", "--settings", "usersettings"
    done = run_python("-m", *django_test, cwd=tmp_path, DLOCKS_TEST_NAME="dlocks")
    assert done.returncode == 0, done.stderr
    assert "Ran 3 tests" in done.stderr
    assert "accessed by other users" not in done.stderr
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_database WHERE datname = 'test_of_a_user'"
        )
        assert cursor.fetchone() == (0,)


@pytest.mark.engine("postgresql", "mariadb")
def test_a_paused_holder_knows_its_loss_when_it_continues(doomed):
    """A process pauses for longer than its ttl, and another one acquires the key.

    The first process knows this when it continues.
    """
    victim = doomed()
    victim.start(jobs.hold, "stock:7", using="brisk")
    first = victim.hear()
    victim.stop()
    with db_lock("stock:7", using="brisk", ttl=30, timeout=20) as hold:
        assert hold.token > first
        victim.resume()
        victim.tell()
        with pytest.raises(RuntimeError, match="LockLost"):
            victim.hear()
        hold.check()


def test_an_interrupt_while_the_keeper_starts_leaves_one_keeper(monkeypatch):
    """Two keepers would let a delayed renewal overwrite a later one."""

    def named(name):
        return {thread for thread in threading.enumerate() if thread.name == name}

    mine = Keeper()
    before = named("dlocks-keeper"), named("dlocks-worker")
    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        if thread.name in {"dlocks-keeper", "dlocks-worker"}:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mine.check_soon()
        with pytest.raises(KeyboardInterrupt):
            mine.run(lambda: None)
    mine.catch_up()
    asks = mine.run(threading.current_thread)
    assert asks is mine.run(threading.current_thread)
    assert named("dlocks-keeper") - before[0] == {mine._thread.thread}
    assert named("dlocks-worker") - before[1] == {asks}


@pytest.fixture
def silence(monkeypatch):
    """A backend whose server does not reply to renewals for a while."""
    answer, asked = threading.Event(), threading.Event()
    renew = backends["brisk"].renew

    def wait(claims):
        asked.at = time.monotonic()
        asked.set()
        answer.wait(30)
        return renew(claims)

    monkeypatch.setattr(backends["brisk"], "renew", wait)
    yield asked
    answer.set()
    keeper.catch_up()


def test_a_loss_is_reported_in_time_if_the_server_is_silent(silence):
    told, told_at = threading.Event(), []

    def tell(hold):
        told_at.append(time.monotonic())
        told.set()

    with pytest.raises(LockLost, match="not renewed within its ttl"):
        with db_lock("stock:7", using="brisk", ttl=3.0, on_lost=tell) as hold:
            deadline = hold._state.lease.deadline
            assert silence.wait(10)
            hold.check()
            assert told.wait(10)
            # The keeper waits ``REPLY_TIMEOUT`` seconds for the reply to the renewal.
            in_time(told_at[0] - max(deadline, silence.at + REPLY_TIMEOUT), 1.0)


def test_a_loss_is_reported_while_other_renewals_are_running(monkeypatch, until):
    """The next renewal is due as soon as the last one ends."""
    renew = backends["brisk"].renew
    monkeypatch.setattr(
        backends["brisk"], "renew", lambda claims: (time.sleep(1.1), renew(claims))[1]
    )
    told = []
    with db_lock("busy", using="brisk", ttl=3.0) as busy:
        with pytest.raises(LockLost, match="max_hold"):
            with db_lock(
                "stock:7", using="brisk", ttl=3.0, max_hold=1.5, on_lost=told.append
            ):
                until(lambda: told)
        busy.check()


def test_a_call_in_one_worker_may_call_another_worker(threads):
    """Receivers of ``lock_released`` may do this without a deadlock."""
    inside, (one, other) = (
        threading.Barrier(2),
        (backends["default"], backends["memory"]),
    )

    def ask(here, there):
        def meet():
            inside.wait(10)
            return keeper.run(lambda: 7, there)

        return keeper.run(meet, here)

    asking = [threads(lambda: ask(one, other)), threads(lambda: ask(other, one))]
    for thread in asking:
        thread.join(30)
    assert [thread.results for thread in asking] == [[7], [7]]


def test_a_silent_server_does_not_stop_renewals_on_another(silence, until):
    with db_lock("stock:7", using="memory", ttl=3.0) as other:
        with pytest.raises(LockLost), db_lock("stock:7", using="brisk") as hold:
            assert silence.wait(10)
            deadline = other._state.lease.deadline
            until(lambda: other._state.lease.deadline > deadline + 0.5)
            # A call from inside a transaction to the other server is not delayed
            # either.
            assert keeper.run(lambda: 7, backends["memory"]) == 7
            until(lambda: hold._state.is_over)
        other.check()


def test_renewals_and_calls_take_turns(monkeypatch, until, threads):
    """Calls from inside transactions may take seconds while a row is locked."""
    backend, done = backends["memory"], []
    renew, worker = backend.renew, keeper._worker(backend)
    begun, goes_on = threading.Event(), threading.Event()
    monkeypatch.setattr(
        backend, "renew", lambda claims: (done.append("renewal"), renew(claims))[1]
    )

    def slow():
        begun.set()
        goes_on.wait(30)
        done.append("question")

    with db_lock("stock:7", using="memory", ttl=3.0):
        callers = [threads(lambda: keeper.run(slow, backend)) for _ in range(3)]
        try:
            assert begun.wait(10)
            until(lambda: len(worker.jobs) == 2 and worker.renewals)
            worker.post(lambda: done.append("another renewal"), renewal=True)
        finally:
            goes_on.set()
        for caller in callers:
            caller.join(30)
    keeper.catch_up()
    assert done == ["question", "renewal", "question", "another renewal", "question"]


def test_a_loss_is_reported_if_no_thread_can_be_started(monkeypatch, until):
    """A lease with ``renew=False`` expires."""
    told, start = [], threading.Thread.start

    def tell(hold):
        with connection.cursor():
            told.append((hold, connections.all(initialized_only=True)))

    def refuse(thread):
        if thread.name == "dlocks-lost":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    lock = db_lock("stock:7", using="memory", ttl=0.2, renew=False, on_lost=tell)
    with pytest.raises(LockLost, match="not renewed within its ttl of 0.2 s"):
        with lock as hold:
            until(lambda: told)
            assert not hold.held
            assert hold.remaining == 0
    ((lost, connected),) = told
    assert lost is hold
    # The connection that was opened for it in a permanent thread is closed.
    until(lambda: not any(one.connection for one in connected))


def test_a_lost_hold_raises_once_and_is_then_acquired_again():
    """A loop that acquires by hand gets a new hold after LockLost."""
    lock = db_lock("stock:7", renew=False, ttl=600)
    with pytest.raises(LockLost), lock as outer:
        backends["default"].clear("stock:7", outer.token)
        with pytest.raises(LockLost):
            lock.acquire()
        with lock as inner:
            assert inner.token > outer.token
    first = lock.acquire()
    backends["default"].clear("stock:7", first.token)
    with pytest.raises(LockLost):
        first.check()
    with lock as second:
        assert second.token > first.token
    # The release of the first hold still raises LockLost.
    with pytest.raises(LockLost):
        first.release()


def test_the_keeper_drops_a_hold_whose_release_was_interrupted(monkeypatch, until):
    """The keeper drops a hold whose release was interrupted.

    A Ctrl-C is an example. The keeper once checked such a hold without end, while the
    caller kept a reference to it.
    """
    hold = db_lock("stock:7", using="memory", ttl=0.5).acquire()
    drop, interrupts = keeper.drop, [KeyboardInterrupt()]

    def interrupted(hold):
        if interrupts:
            raise interrupts.pop()
        drop(hold)

    monkeypatch.setattr(keeper, "drop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hold.release()
    assert not hold.held
    until(lambda: hold._state not in keeper.holds)
    with db_lock("stock:7", using="memory", timeout=0):
        pass


def test_the_keeper_survives_an_error_in_its_schedule(monkeypatch, until, caplog):
    """A caller can be an object from users or a thread library, and may fail."""
    original, failures = keeper._next, iter([ValueError("no idea")])

    def fail_once():
        if error := next(failures, None):
            raise error
        return original()

    monkeypatch.setattr(keeper, "_next", fail_once)
    keeper.check_soon()
    with db_lock("stock:7", ttl=6.0) as hold:
        deadline = hold._state.lease.deadline
        until(lambda: hold._state.lease.deadline > deadline)
    assert "no idea" in caplog.text
