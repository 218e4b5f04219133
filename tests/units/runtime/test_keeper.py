"""The threads of the keeper: their starts, errors and turns."""

from __future__ import annotations

import itertools
import threading
from functools import partial

import pytest
from django.db import connections

from dlocks import LockBackendError, LockLost, db_lock, shutdown
from dlocks.testing import undo_shutdown
from tests.internals import Keeper, backends, keeper

pytest_plugins = ["tests.moments", "tests.promises.stops"]
pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]


@pytest.mark.driver
def test_the_keeper_closes_its_connection_when_unused(until):
    def opened():
        there = connections.all(initialized_only=True)
        return [one.alias for one in there if one.connection]

    with db_lock("stock:7", using="brisk"):
        until(lambda: keeper.run(opened, backends["brisk"]) == ["default"])
    until(lambda: not any(one.connected for one in keeper._workers.by_server.values()))


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


def test_a_call_without_an_answer_is_explained_outside_of_a_transaction_too():
    """A call to pass a hold on, or to change its ttl, needs no transaction."""
    go_on = threading.Event()
    try:
        with pytest.raises(LockBackendError, match="no answer within 0.1 s") as error:
            keeper.run(lambda: go_on.wait(20), backends["memory"], timeout=0.1)
    finally:
        go_on.set()
    assert "still open" not in str(error.value)


def test_renewals_and_calls_take_turns(monkeypatch, until, threads):
    """Calls from inside transactions may take seconds while a row is locked."""
    backend, done = backends["memory"], []
    renew, worker = backend.renew, keeper._workers.of(backend)
    begun, goes_on = threading.Event(), threading.Event()
    monkeypatch.setattr(
        backend, "renew", lambda claims: (done.append("renewal"), renew(claims))[1]
    )

    def slow():
        begun.set()
        goes_on.wait(30)
        done.append("question")

    def ask():
        return threads(lambda: keeper.run(slow, backend))

    callers = [ask()]
    assert begun.wait(10)
    # Its first renewal is due when the worker is busy, on a slow machine too.
    with db_lock("stock:7", using="memory", ttl=3.0):
        callers += [ask(), ask()]
        try:
            until(lambda: len(worker.jobs) == 2 and worker.renewals)
            worker.post(lambda: done.append("another renewal"), renewal=True)
        finally:
            goes_on.set()
        for caller in callers:
            caller.join(30)
    keeper.catch_up()
    assert done == ["question", "renewal", "question", "another renewal", "question"]


def test_the_keeper_drops_a_hold_whose_release_was_interrupted(monkeypatch, until):
    """The keeper drops a hold whose release was interrupted.

    A Ctrl-C is an example. The keeper once checked such a hold without end, while the
    caller kept a reference to it.
    """
    hold = db_lock("stock:7", using="memory", ttl=0.5).acquire()
    drop, interrupts = keeper.remove, [KeyboardInterrupt()]

    def interrupted(hold):
        if interrupts:
            raise interrupts.pop()
        drop(hold)

    monkeypatch.setattr(keeper, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hold.release()
    assert not hold.held
    until(lambda: hold._parts[0] not in keeper.holds)
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
        deadline = hold._parts[0].lease.deadline
        until(lambda: hold._parts[0].lease.deadline > deadline)
    assert "no idea" in caplog.text


@pytest.mark.driver
def test_an_error_between_two_jobs_stops_no_renewal(monkeypatch, until, caplog):
    """A driver fails to close a connection, while the next renewal is queued."""
    worker, close_all = keeper._workers.of(backends["default"]), connections.close_all
    failures = [OSError("cannot be closed")]

    def close():
        if worker.is_current and failures and keeper.holds:
            until(lambda: worker.renewals)
            raise failures.pop()
        close_all()

    monkeypatch.setattr(connections, "close_all", close)
    with db_lock("stock:7", ttl=3.0) as hold:
        until(lambda: not failures)
        before = hold.remaining
        until(lambda: hold.remaining > before)
    assert "cannot be closed" in caplog.text
    caplog.clear()


def test_a_finalizer_in_the_keepers_thread_wakes_it(monkeypatch, until):
    """The garbage collector may run while the keeper searches for its next deadline."""
    mine, done, looks = Keeper(), [], itertools.count()
    original = mine._next

    def collect_garbage():
        if (look := next(looks)) == 0:
            # Something is due already.
            return 0.0
        found = original()
        if look == 1:
            mine.later(partial(done.append, 1), 0.0, backends["memory"])
        return found

    monkeypatch.setattr(mine, "_next", collect_garbage)
    mine.check_soon()
    until(lambda: done)


def test_a_finalizer_in_the_keepers_thread_sends_no_request(
    monkeypatch, stops, until, is_busy
):
    """The garbage collector closes a generator there, in a block of a lock.

    A server that does not answer would keep the keeper from reporting a loss.
    """
    original, senders = keeper._next, []

    def work():
        with db_lock("stock:7", using="memory"):
            yield

    def collect_garbage():
        if generators:
            generators.pop().close()
        return original()

    def release(usual, *_):
        senders.append(threading.current_thread().name)
        return usual()

    generators = [work()]
    next(generators[0])
    stops.replace("release", release, "memory")
    monkeypatch.setattr(keeper, "_next", collect_garbage)
    keeper.check_soon()
    until(lambda: not is_busy("stock:7", "memory"))
    assert senders[0] == "dlocks-worker"


def test_only_tasks_are_run_later_if_no_worker_could_start(desks_fail, until):
    """A call is not, because its key would be acquired for a caller with an error.

    A renewal is a task.
    """
    taken, failed = [], desks_fail(1)
    with pytest.raises(RuntimeError, match="new thread"):
        keeper.run(lambda: taken.append("stock:7"), backends["memory"])
    assert failed()
    keeper.run(lambda: None, backends["memory"])
    assert not taken

    until(no_worker_runs)
    done, failed = [], desks_fail(1)

    def chore():
        done.append(1)

    keeper.later(chore, 0.0, backends["memory"])
    until(failed)
    until(lambda: done)
    until(lambda: chore not in keeper._workers.deferred)
    assert done == [1]
    until(no_worker_runs)
    with db_lock("stock:7", using="memory", ttl=2.4) as hold:
        failed, deadline = desks_fail(1), hold._parts[0].lease.deadline
        until(failed)
        until(lambda: hold._parts[0].lease.deadline > deadline)


def test_starting_the_keeper_thread_is_retried(monkeypatch, until):
    monkeypatch.setattr(keeper._thread, "thread", None)

    def fail(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            db_lock("stock:7", using="memory").acquire()
    with db_lock("stock:7", using="memory", ttl=3) as hold:
        deadline = hold._parts[0].lease.deadline
        until(lambda: hold._parts[0].lease.deadline > deadline)


def no_worker_runs():
    return all(thread.name != "dlocks-worker" for thread in threading.enumerate())


@pytest.fixture
def desks_fail(monkeypatch, until):
    """Return a function that makes the next starts of desk threads fail.

    Another call replaces the number of failures.
    """
    start, left = threading.Thread.start, 0

    def begin(thread):
        nonlocal left
        if thread.name == "dlocks-worker" and left > 0:
            left -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    def fail(times):
        nonlocal left
        left = times
        return lambda: left == 0

    until(no_worker_runs)
    monkeypatch.setattr(threading.Thread, "start", begin)
    yield fail
    left = 0


def test_a_worker_that_cannot_start_does_not_affect_others(desks_fail, until, settings):
    memory = settings.DLOCKS["memory"]
    settings.DLOCKS = {f"memory {number}": memory for number in range(6)}
    healthy = [
        db_lock("stock:7", using=using, ttl=2.4).acquire() for using in settings.DLOCKS
    ]
    began = max(hold._parts[0].lease.deadline for hold in healthy)
    until(lambda: min(hold._parts[0].lease.deadline for hold in healthy) > began)
    settings.DLOCKS = {**settings.DLOCKS, "new": memory}
    desks_fail(1000)
    with pytest.raises(LockLost), db_lock("stock:7", using="new", ttl=3) as sick:
        until(lambda: sick._parts[0].is_over)
    for hold in healthy:
        hold.release()


def test_a_function_that_a_finalizer_posts_at_any_moment_is_called(
    strike_in_dlocks, until
):
    """The garbage collector runs in the keeper's own thread, too."""
    for number in itertools.count():
        mine, done = Keeper(), []

        def run(mine=mine):
            mine._thread.thread = threading.current_thread()
            mine._jobs.append(partial(setattr, mine._thread, "thread", None))
            mine._wakeup.set()
            mine._check_deadlines(threading.current_thread())
            mine._thread.thread = threading.current_thread()

        post = partial(mine.post, partial(done.append, number), backends["memory"])
        struck = strike_in_dlocks(number, run, post, ("runtime",))
        # The next round of the keeper. The thread that a late call has started may run
        # it too.
        for job in list(mine._jobs):
            job()
        if not struck:
            break
        until(lambda done=done: done)
    assert number > 10


@pytest.mark.parametrize("struck", ["release", "on_lost"])
def test_an_interrupted_shutdown_hides_no_loss(struck, monkeypatch):
    """A signal handler raises during the first release, or the first report."""
    backend, raised, reported = backends["memory"], [], []
    release = backend.release

    def interrupt(step):
        if step == struck and not raised:
            raised.append(True)
            raise KeyboardInterrupt

    def interrupted(claim, **options):
        interrupt("release")
        return release(claim, **options)

    def on_lost(hold):
        reported.append(hold.key)
        interrupt("on_lost")

    monkeypatch.setattr(backend, "release", interrupted)
    options = {"using": "memory", "on_lost": on_lost}
    with pytest.raises(LockLost), db_lock("a", **options):
        with pytest.raises(LockLost), db_lock("b", **options) as hold:
            with pytest.raises(KeyboardInterrupt):
                shutdown()
            # The interrupted call may have left one of them.
            shutdown()
            hold.check()
    undo_shutdown()
    assert sorted(reported) == ["a", "b"]
