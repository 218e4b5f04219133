"""Leases are renewed while they are held, or their loss is reported."""

import contextlib
import dataclasses
import logging
import os
import queue
import textwrap
import threading
import time
from functools import partial

import pytest
from django.db import connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from dlocks import (
    LockBackendError,
    LockLost,
    LockTimeout,
    db_lock,
    lock_lost,
    lock_released,
)
from dlocks.models import ResourceLock
from dlocks.testing import frozen_clock
from dlocks.values import Grant
from tests.for_each import for_each
from tests.promises.locks.keys import await_renewal, clear, row
from tests.promises.received import received
from tests.scripts import run_python, run_script
from tests.timing import in_time

pytest_plugins = ["tests.promises.stops"]
pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]


# Renewal.


@pytest.mark.driver
def test_100_holds_of_a_process_are_renewed_in_one_statement(stops, until):
    """One of them is due, and the others are renewed with it."""
    batches = []

    def counted(usual, claims):
        with CaptureQueriesContext(connection) as queries:
            left = usual()
        if len(claims) > 1:
            batches.append((len(claims), len(left), len(queries)))
        return left

    stops.replace("renew", counted)
    with contextlib.ExitStack() as stack:
        for number in range(100):
            stack.enter_context(db_lock(f"stock:{number}", using="brisk", ttl=6.0))
        until(lambda: (100, 100, 1) in batches)


@pytest.mark.storage
def test_renewal_stops_at_max_hold(until, stops):
    """A caller in an endless loop must not hold a lock forever."""
    lost, took = [], [0.0]

    def measured(usual, claims):
        began, left = time.monotonic(), usual()
        took.append(time.monotonic() - began)
        return left

    stops.replace("renew", measured)
    started = time.monotonic()
    with pytest.raises(LockLost, match="held for its max_hold of 2.5 s"):
        with db_lock("stock:7", ttl=2.0, max_hold=2.5, on_lost=lost.append):
            until(lambda: lost)
            assert time.monotonic() - started > 2.4
            in_all = time.monotonic() - started
            found = ResourceLock.objects.get(pk="stock:7")
            on_the_row = (found.end_time - found.begin_time).total_seconds()
            # The rest is counted from before the renewal. A thread may pause between.
            in_time(on_the_row, 2.5 + max(took) + 0.1)
    assert len(took) > 1
    in_time(in_all, 5)


# Loss.


def test_a_lost_hold_is_reported_in_every_way(until, caplog, signalled):
    told, seen = [], signalled(lock_lost)
    caplog.set_level(logging.WARNING, "dlocks")
    with (
        pytest.raises(LockLost) as error,
        db_lock("stock:7", using="brisk", on_lost=told.append) as hold,
    ):
        clear("stock:7", "brisk")
        until(lambda: told)
        assert not hold.held
        assert hold.remaining == 0
        with pytest.raises(LockLost):
            hold.check()
        with pytest.raises(LockLost):
            hold.renew()
    assert told == [hold]
    assert seen == [(lock_lost, hold)]
    assert (error.value.key, error.value.token) == ("stock:7", hold.token)
    levels = [one.levelname for one in caplog.records if one.name == "dlocks"]
    assert levels == ["WARNING"]
    assert "'stock:7' was lost by" in caplog.text
    assert hold.owner not in caplog.text


def test_a_renewal_error_is_no_loss_before_the_deadline(stops, until, caplog):
    def fail(*_):
        raise LockBackendError("could not ask")

    stops.replace("renew", fail)
    lost, said = [], "Could not renew the holds on 'stock:7': could not ask"
    with pytest.raises(LockLost, match="not renewed within its ttl"):
        with db_lock("stock:7", using="brisk", ttl=1.5, on_lost=lost.append) as hold:
            until(lambda: said in caplog.text)
            hold.check()
            assert not lost
            until(lambda: lost)
    assert hold.remaining == 0


@pytest.mark.engine("postgresql", "mariadb", "mysql")
def test_a_renewal_that_finds_its_own_row_locked_is_not_lost(stops, until):
    found = []
    stops.replace("renew", lambda usual, _: found.append(usual()) or found[-1])
    with db_lock("stock:7", ttl=9) as hold:
        with transaction.atomic():
            ResourceLock.objects.select_for_update().get(pk="stock:7")
            until(lambda: found)
            assert 0 < found[0][hold.owner] <= 9
        hold.renew()


@pytest.mark.engine("postgresql", "mariadb", "mysql")
@for_each("use", ["", "renew", "check"])
def test_a_request_that_comes_late_into_a_guard_is_no_loss(use, stops, threads, until):
    """It finds the row locked, with the lease from before the guard, which has run out.

    It is a renewal in the background, or a request of another thread. The commit renews
    the lease.
    """
    lost = []
    policy = {"ttl": 0.8 if use else 1.5, "renew": not use, "on_lost": lost.append}
    with db_lock("stock:7", **policy) as hold:
        late = stops.at("verify" if use == "check" else "renew")
        other = threads(getattr(hold, use)) if use else None
        late.wait()
        with hold.atomic():
            until(lambda: row("stock:7").seconds_left < 0)
            late.go_on()
            if other is None:
                time.sleep(0.5)
            else:
                other.join(20)
        hold.check()
    assert lost == []


# The local deadline.


@pytest.mark.driver
def test_a_late_renewal_by_another_thread_does_not_end_a_longer_lease(stops, threads):
    """It has the earlier ttl, and its reply is lost."""
    hold = db_lock("stock:7").acquire()
    begun, goes_on, pending = threading.Event(), threading.Event(), [True]

    def answer(usual, claims):
        if not pending:
            return usual()
        pending.pop()
        begun.set()
        assert goes_on.wait(20)
        usual()
        raise LockBackendError("the reply was lost")

    stops.replace("renew", answer)
    late = threads(hold.renew)
    assert begun.wait(20)
    longer = threads(partial(hold.renew, ttl=300))
    # It waits for the first one, or is done without it.
    longer.done.wait(1)
    goes_on.set()
    with pytest.raises(LockBackendError, match="the reply was lost"):
        late.join(20)
    longer.join(20)
    assert hold.remaining < row("stock:7").seconds_left + 1
    hold.release()


@pytest.fixture
def stopped_clock(stops):
    """Stop the clock of locks and of the memory backend."""
    with frozen_clock() as clock:
        yield clock


def test_the_deadline_counts_from_before_the_request_was_sent(stops, stopped_clock):
    stops.replace("acquire", slow(stopped_clock.tick, 4))
    hold = db_lock("stock:7", using="memory", ttl=10, renew=False).acquire()
    assert hold.remaining == pytest.approx(6)
    stopped_clock.tick(5.9)
    assert hold.held
    stopped_clock.tick(0.2)
    assert not hold.held
    with pytest.raises(LockLost):
        hold.release()


@for_each("lease", [None, 2])
def test_a_grant_that_arrives_after_its_lease_is_retried(lease, stops, stopped_clock):
    """The lease may be shorter than the ttl."""
    late = [(lease or 10) + 1, 0]

    def late_once(usual, claim):
        grant = usual()
        stopped_clock.tick(late.pop(0))
        return dataclasses.replace(grant, lease=lease)

    with stops.replace("acquire", late_once):
        with db_lock("stock:7", using="memory", ttl=10, timeout=30) as hold:
            assert hold.remaining == pytest.approx(lease or 10)
    assert late == []


def test_a_last_try_is_made_at_the_deadline_without_a_queue(stops, stopped_clock):
    """The timeout is counted from the start. The pauses between tries are random.

    Without a timeout, the tries go on.
    """
    tries, answers, took = [], [None] * 500 + [Grant(7)], 0.0

    def busy(usual, claim):
        tries.append(stopped_clock())
        stopped_clock.tick(took)

    started = stopped_clock()
    with stops.replace("acquire", busy), pytest.raises(LockTimeout):
        db_lock("stock:7", using="memory", timeout=3, fair=False).acquire()
    assert tries[0] == started
    assert tries[-1] == pytest.approx(started + 3)
    pauses = [later - sooner for sooner, later in zip(tries, tries[1:], strict=False)]
    assert all(0 < pause <= 0.25 + 1e-6 for pause in pauses)
    assert len(set(pauses)) > len(pauses) // 2
    took, started = 0.8, stopped_clock()
    with stops.replace("acquire", busy), pytest.raises(LockTimeout):
        db_lock("stock:7", using="memory", timeout=1.0, fair=False).acquire()
    assert tries[-1] <= started + 1.0
    stops.replace("acquire", lambda usual, claim: answers.pop(0))
    stops.replace("release", lambda usual, claim: True)
    lock = db_lock("stock:7", using="memory", timeout=None, fair=False, renew=False)
    with lock as hold:
        assert hold.token == 7
        assert hold.waited > 60


def test_a_renewal_is_due_after_a_third_of_the_ttl():
    """Two renewals of a lease may fail, and the next one is still in time."""
    with db_lock("stock:7", ttl=6) as hold:
        for _ in range(2):
            # The renewal is one second late at most.
            in_time(4 - await_renewal(hold), 1.0)


def slow(pause, seconds):
    """Return a request whose reply takes some seconds."""

    def request(usual, *_):
        answer = usual()
        pause(seconds)
        return answer

    return request


def test_a_slow_renewal_counts_from_its_request(stops, stopped_clock):
    """A renewal whose reply takes 4 s is 4 s shorter for its holder."""
    lock = db_lock("stock:7", using="memory", ttl=10, renew=False)
    with lock as hold, stops.replace("renew", slow(stopped_clock.tick, 4)):
        stopped_clock.tick(5)
        assert hold.remaining == pytest.approx(5)
        hold.renew()
        assert hold.remaining == pytest.approx(6)


def test_a_slow_renewal_in_the_background_counts_from_its_request(stops):
    stops.replace("renew", slow(time.sleep, 0.6))
    with db_lock("stock:7", using="memory", ttl=3.0) as hold:
        await_renewal(hold)
        assert hold.remaining <= 2.4


def test_a_key_is_free_after_max_hold_whatever_its_ttl(stopped_clock, in_other_thread):
    """A holder that hangs keeps its key for max_hold, even if the ttl is longer."""

    def is_free():
        with db_lock("stock:7", using="memory", timeout=0) as hold:
            return hold.takeover

    hold = db_lock("stock:7", using="memory", ttl=30, max_hold=2).acquire()
    # The grace of the alias is half a second.
    stopped_clock.tick(2.5)
    assert in_other_thread(is_free)
    with pytest.raises(LockLost):
        hold.release()


# The end of a process.


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
        it = row(key)
        assert (it.state, it.status, it.hold_count) == ("free", "F", 0)


def hold_in_parent_and_child(pipe):
    """Fork while a lease is held, and hold another one in the child.

    Return the status of the child.
    """
    with db_lock("parent", using="brisk") as hold:
        await_renewal(hold)
        if (child := os.fork()) == 0:
            try:
                with db_lock("child", using="brisk", ttl=1.2) as mine:
                    await_renewal(mine)
                    await_renewal(mine)
                os._exit(0)
            finally:
                os._exit(1)
        await_renewal(hold)
        return os.waitpid(child, 0)[1]


@pytest.mark.engine("postgresql", "mariadb")
def test_a_forked_child_renews_only_its_own_holds(doomed):
    assert doomed().call(hold_in_parent_and_child) == 0


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

        class Plain(TestCase):
            def test_lock(self):
                with db_lock("plain"), db_lock("plain"), transaction.atomic():
                    pass

            def test_lease(self):
                with db_lock("forced", scope="lease"):
                    pass

        class Leases(TransactionTestCase):
            def test_renewed_to_the_last_moment(self):
                with db_lock("leased", ttl=3) as hold:
                    while hold.remaining > 2.2:
                        time.sleep(0.01)
                    while hold.remaining < 2.2:
                        time.sleep(0.01)
                self.left = db_lock("left", ttl=30).acquire()
                # Nothing refers to this one.
                db_lock("forgotten", ttl=3).acquire()
                self.assertTrue(db_lock("forgotten").locked())
        """,
}


@pytest.mark.engine("postgresql")
def test_a_user_s_test_run_can_drop_its_database(tmp_path):
    """A remaining connection of dlocks would make DROP DATABASE fail.

    The tests have left holds, which are released when the process ends.
    """
    for name, text in USERS_FILES.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    django_test = "django", "test", "usertests", "--settings", "usersettings"
    done = run_python("-m", *django_test, cwd=tmp_path, DLOCKS_TEST_NAME="dlocks")
    assert done.returncode == 0, done.stderr
    assert "Ran 3 tests" in done.stderr
    assert "accessed by other users" not in done.stderr
    assert "Traceback" not in done.stderr
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_database WHERE datname = 'test_of_a_user'"
        )
        assert cursor.fetchone() == (0,)


@pytest.fixture
def silence(stops, until):
    """A backend whose server does not reply to renewals for a while."""
    answer, asked, replies = threading.Event(), threading.Event(), []

    def wait(usual, claims):
        asked.at = time.monotonic()
        asked.set()
        answer.wait(30)
        replies.append(usual())
        return replies[-1]

    stops.replace("renew", wait, "brisk")
    yield asked
    answer.set()
    until(lambda: replies)


def test_a_loss_is_reported_in_time_if_the_server_is_silent(silence):
    told = queue.SimpleQueue()
    policy = {"ttl": 3.0, "on_lost": lambda hold: told.put(time.monotonic())}
    with pytest.raises(LockLost, match="not renewed within its ttl"):
        with db_lock("stock:7", using="brisk", **policy) as hold:
            deadline = time.monotonic() + hold.remaining
            assert silence.wait(10)
            hold.check()
            # A reply to the renewal is waited for for a second.
            in_time(told.get(timeout=10) - max(deadline, silence.at + 1.0), 1.0)


def test_a_hold_ends_at_its_deadline_before_its_loss_is_reported(silence, until):
    """The reply to a renewal is awaited for a second, and nothing is certain then."""
    lock = db_lock("stock:7", using="brisk", ttl=0.6)
    # The key is released, unless the loss was reported meanwhile.
    with contextlib.suppress(LockLost), lock as hold:
        deadline = time.monotonic() + hold.remaining
        assert silence.wait(10)
        until(lambda: time.monotonic() > deadline)
        assert not hold.held


def test_a_loss_is_reported_while_other_renewals_are_running(stops, until):
    """The next renewal is due as soon as the last one ends."""
    stops.replace("renew", lambda usual, _: (time.sleep(1.1), usual())[1])
    told, policy = [], {"using": "brisk", "ttl": 3.0}
    bounded = db_lock("stock:7", max_hold=1.5, on_lost=told.append, **policy)
    with db_lock("busy", **policy) as busy:
        with pytest.raises(LockLost, match="max_hold"), bounded:
            until(lambda: told)
        busy.check()


def test_a_silent_server_does_not_stop_renewals_on_another(silence):
    told = queue.SimpleQueue()
    silent = db_lock("stock:7", using="brisk", on_lost=told.put)
    with db_lock("stock:7", using="memory", ttl=3.0) as other:
        with pytest.raises(LockLost), silent as hold:
            assert silence.wait(10)
            await_renewal(other)
            # A call from inside a transaction to the other server is not delayed
            # either.
            with transaction.atomic():
                with db_lock("another", using="memory", scope="lease"):
                    assert told.empty()
            # The deadline comes first, and a release may still succeed then.
            told.get(timeout=10)
            assert not hold.held
        other.check()


def test_a_loss_is_reported_if_no_thread_can_be_started(monkeypatch, until):
    """A lease with ``renew=False`` expires."""
    told = []

    def tell(hold):
        with connection.cursor():
            told.append((hold, connections.all(initialized_only=True)))

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    lock = db_lock("stock:7", using="memory", ttl=0.5, renew=False, on_lost=tell)
    with pytest.raises(LockLost, match="not renewed within its ttl of 0.5 s"):
        with lock as hold:
            monkeypatch.setattr(threading.Thread, "start", refuse)
            until(lambda: told)
            assert not hold.held
            assert hold.remaining == 0
    ((lost, connected),) = told
    assert lost is hold
    # The connection that was opened for it in a permanent thread is closed.
    until(lambda: not any(one.connection for one in connected))


def late(answer, go_on):
    """Return a renewal that succeeds, and whose answer comes late."""

    def renew(usual, _):
        reply = usual()
        assert go_on.wait(20)
        if answer == "error":
            raise LockBackendError("the reply was lost")
        return reply

    return renew


@for_each("answer", ["reply", "error"])
def test_a_renewal_that_comes_too_late_keeps_no_key(answer, stops, threads, until):
    """The first lease from the queue is short. It has expired before the answer.

    The caller has ended without a release, so nothing else would free the key before
    the ttl that the renewal has granted.
    """
    go_on, lost = threading.Event(), queue.SimpleQueue()
    lock = db_lock("stock:7", using="memory", ttl=1_000)
    waiter = db_lock("stock:7", using="memory", ttl=1_000, on_lost=lost.put)
    with lock:
        waiting = threads(waiter.acquire)
        until(lock.waiters)
        stops.replace("renew", late(answer, go_on))
    waiting.join()
    lost.get(timeout=20)
    go_on.set()
    until(lambda: not lock.locked(), 20)


@for_each("answer", ["reply", "error"])
def test_a_renewal_by_the_caller_that_comes_too_late_keeps_no_key(
    answer, stops, threads, until
):
    """The caller learns of the loss, and ends without a release.

    The error does not name the new ttl, which the lease never had.
    """
    go_on, lost = threading.Event(), queue.SimpleQueue()
    options = {"using": "memory", "ttl": 0.5, "renew": False, "on_lost": lost.put}
    lock = db_lock("stock:7", **options)

    def work():
        hold = lock.acquire()
        stops.replace("renew", late(answer, go_on))
        hold.renew(ttl=1_000)

    caller = threads(work)
    lost.get(timeout=20)
    go_on.set()
    error, said = LockBackendError, "the reply was lost"
    if answer == "reply":
        error, said = LockLost, "not renewed within its first lease of 0.5 s"
    with pytest.raises(error, match=said):
        caller.join()
    until(lambda: not lock.locked(), 20)


# What delays no renewal and no loss of another hold.


def test_a_slow_release_of_a_lost_hold_delays_no_other_loss(stops, in_other_thread):
    """A lease that was left in a transaction has reached its ``max_hold``."""
    lost = queue.SimpleQueue()
    other = db_lock("other", using="memory", max_hold=1.5, on_lost=lost.put)
    in_other_thread(other.acquire)
    with transaction.atomic():
        with db_lock("stock:7", using="memory", max_hold=1):
            stop = stops.at("release", "memory")
        stop.wait()
        lost.get(timeout=20)
        stop.go_on()


def test_a_slow_receiver_delays_no_renewal(in_other_thread):
    """A lease that was left in a transaction is released after its rollback."""
    begun, end = threading.Event(), threading.Event()

    def receive(hold, **kwargs):
        if hold.key == "stock:7":
            begun.set()
            end.wait(20)

    other = in_other_thread(db_lock("other", using="memory", ttl=1).acquire)
    with received(lock_released, receive), contextlib.ExitStack() as stack:
        stack.callback(end.set)
        with transaction.atomic():
            with db_lock("stock:7", using="memory"):
                pass
            transaction.set_rollback(True)
        assert begun.wait(20)
        # For longer than its ttl.
        for _ in range(4):
            await_renewal(other)
        assert other.held
    in_other_thread(other.release)


@pytest.mark.engine("postgresql", "mariadb", "mysql")
def test_a_release_that_waits_for_its_row_delays_no_renewal(threads, paused):
    """A caller in a transaction releases a key whose row a session keeps locked."""

    def lock_row():
        with transaction.atomic():
            ResourceLock.objects.select_for_update().get(pk="stock:7")
            yield

    with db_lock("other", ttl=2) as other:
        hold = db_lock("stock:7", release_at="exit").acquire()
        end = paused(lock_row)
        release = threads(transaction.atomic(hold.release))
        # For longer than its ttl.
        for _ in range(5):
            await_renewal(other)
        assert release.is_alive()
        end()
        release.join(20)
        other.check()
    assert not db_lock("stock:7").locked()
