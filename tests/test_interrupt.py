"""An interrupt at any point of acquiring leaves nothing held."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import linecache
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from django.db import connection, connections, transaction

import dlocks
from dlocks import LockError, LockLost, LockTimeout, db_lock, resume_hold
from dlocks.conf import backends
from dlocks.holds import holds_by_caller
from dlocks.keeper import keeper
from dlocks.models import LockClaim, ResourceLock
from dlocks.waiting import room_of

pytestmark = pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"])

PACKAGE = str(Path(dlocks.__file__).parent)


@pytest.fixture(autouse=True)
def connection_of_its_own(transactional_db):
    """On SQLite an interrupt may leave the connection with the patience of a moment: it is not for the next test."""
    yield
    connection.close()


# On a server one of a few lines, another one in each run: the connection of who looks afterwards is dear there.
STEP = 1 if connection.vendor == "sqlite" else 5


def lines(step):
    return range(random.randrange(step), 3000, step)


class Interrupter:
    """Raises KeyboardInterrupt, or another, at the n-th line of the package that this thread comes to."""

    def __init__(self, at, kind=KeyboardInterrupt):
        self.left = at
        self.kind = kind
        self.where = None
        self.seen = set()

    def __enter__(self):
        sys.settrace(self)
        return self

    def __exit__(self, *exc):
        sys.settrace(None)

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line" and self.where is None and not self._leaves_a_with(frame):
            if self.left == 0:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise self.kind
            self.left -= 1
        return self

    def _leaves_a_with(self, frame):
        """Between a with block and its __exit__ there is a line for tracers, but never a signal: no place to test."""
        place = (id(frame), frame.f_lineno)
        again = place in self.seen
        self.seen.add(place)
        return again and linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")


def leaves_no_handler(function):
    """
    Call a function where it leaves nothing behind of an exception that was being handled.

    CPython 3.11 does not leave an except clause when a tracer raises at its end, where no signal ever comes; and in
    the middle of one, a call with an argument twice is a KeyError. A generator has a place of its own for it.
    """

    @functools.wraps(function)
    def call(*args, **kwargs):
        (result,) = (function(*args, **kwargs) for _ in range(1))
        return result

    return call


@leaves_no_handler
def interrupt_everywhere(enter, is_free, *, step=1, kind=KeyboardInterrupt):
    """Interrupt at each line in turn, until one run comes through; return how many lines there were."""
    for number in lines(step):
        with Interrupter(number, kind) as interrupter, contextlib.suppress(kind):
            enter()
        if interrupter.where is None:
            return number
        assert is_free(), f"held after an interrupt at {interrupter.where}, line {number}"
        assert not keeper.holds, interrupter.where
        assert not [hold for hold in holds_by_caller.values() if hold.enterable], interrupter.where
    pytest.fail("never came through")


@pytest.fixture
def is_free(elsewhere):
    def ask(using="default"):
        def attempt():
            # A statement that was interrupted may be on its way out of the server still.
            with db_lock("stock:7", using=using, timeout=5):
                return True

        try:
            return elsewhere(attempt)
        except LockError:
            return False

    return ask


class AlarmError(RuntimeError):
    """As a handler of SIGALRM raises it, or Celery at a soft time limit; a RuntimeError is what a refusal is too."""


@pytest.mark.parametrize(
    ("using", "kind"),
    [("memory", KeyboardInterrupt), ("memory", AlarmError), ("default", KeyboardInterrupt), ("default", AlarmError),
     ("optimistic", KeyboardInterrupt), ("insert", AlarmError)],
)  # fmt: skip
def test_an_interrupt_at_any_line_of_acquire_leaves_nothing(using, kind, is_free):
    lock = db_lock("stock:7", using=using)
    holds = []

    def nothing_is_left():
        if holds:
            # It came where a signal is received: what is raised there Django logs, and the caller has the hold.
            assert kind is AlarmError
            holds.pop().release()
        return is_free(using)

    number = interrupt_everywhere(lambda: holds.append(lock.acquire()), nothing_is_left, step=STEP, kind=kind)
    assert number > 50
    holds.pop().release()


@pytest.mark.parametrize("using", ["memory", "default"])
def test_an_interrupt_at_any_line_of_entering_a_block_leaves_nothing(using, is_free):
    lock = db_lock("stock:7", using=using)
    entered = []

    def enter():
        entered.append(lock.__enter__())

    number = interrupt_everywhere(enter, lambda: is_free(using), step=STEP)
    assert number > 50
    assert len(entered) == 1
    lock.__exit__(None, None, None)
    assert is_free(using)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ZeroDivisionError])
@leaves_no_handler
def test_an_interrupt_of_an_inner_block_s_end_takes_nothing_from_the_outer_one(kind):
    lock = db_lock("stock:7", using="memory")
    for number in range(300):
        with lock as hold:
            lock.__enter__()
            with Interrupter(number, kind) as interrupter, contextlib.suppress(kind):
                lock.__exit__(None, None, None)
            if interrupter.where is not None and hold.count == 2:
                # For tracers only, see below.
                lock.__exit__(None, None, None)
            assert hold.held, interrupter.where
            assert hold.count == 1, interrupter.where
        if interrupter.where is None:
            break
    assert number > 10


@pytest.mark.parametrize("kind", [KeyboardInterrupt, AlarmError])
@pytest.mark.parametrize("using", ["memory", "default", "insert"])
@leaves_no_handler
def test_an_interrupt_at_any_line_of_leaving_a_block_gives_the_key_back(using, kind, is_free):
    lock = db_lock("stock:7", using=using)
    # The line before the first call in the function: for tracers only, no signal is handled there.
    _, first = inspect.getsourcelines(type(lock).__exit__)
    before_leaving = {f"locks.py:{first + 1}", f"locks.py:{first + 2}"}
    for number in lines(STEP):
        lock.__enter__()
        with Interrupter(number, kind) as interrupter, contextlib.suppress(kind):
            lock.__exit__(None, None, None)
        if interrupter.where is None:
            assert number > 10
            break
        if interrupter.where in before_leaving:
            lock.__exit__(None, None, None)
        assert is_free(using), f"held after an interrupt at {interrupter.where}, line {number}"
    else:
        pytest.fail("never came through")


@leaves_no_handler
def test_an_interrupt_while_entering_again_leaves_the_count_as_it_was(is_free):
    lock = db_lock("stock:7", using="memory")
    for number in range(200):
        with lock as hold:
            with Interrupter(number) as interrupter, contextlib.suppress(KeyboardInterrupt):
                lock.__enter__()
            if interrupter.where is None:
                lock.__exit__(None, None, None)
            assert hold.count == 1, f"{interrupter.where}, line {number}"
        assert not hold.held
        if interrupter.where is None:
            break
    else:
        pytest.fail("never came through")
    assert is_free("memory")


@pytest.mark.engine("postgresql", "mariadb")
def test_an_interrupt_inside_a_transaction_is_undone_by_its_rollback(is_free):
    def enter():
        with transaction.atomic():
            db_lock("stock:7").acquire()
            transaction.set_rollback(True)

    assert interrupt_everywhere(enter, is_free, step=7) > 30


@pytest.mark.engine("postgresql", "mariadb")
def test_a_real_ctrl_c_while_waiting_leaves_nothing(workers, is_free):
    """A signal, at random moments of waiting and of statements on their way."""
    lock = db_lock("stock:7", timeout=None)
    main = threading.main_thread().ident
    for number in range(30):
        timer = threading.Timer(0.001 + number * 0.0005, signal.pthread_kill, [main, signal.SIGINT])
        hold = None
        try:
            timer.start()
            # And a little longer: the signal is handled after the timer has sent it.
            more = 3
            while timer.is_alive() or more:
                more -= not timer.is_alive()
                hold = lock.acquire()
                hold.release()
                hold = None
        except KeyboardInterrupt:
            pass
        finally:
            timer.join()
        if hold is not None:
            hold.release()
        assert is_free()


class Alarm:
    """A signal that raises an error, at an odd moment soon; not once it is disarmed."""

    class TimeIsUpError(BaseException):
        pass

    def __init__(self):
        self._armed = False

    def arm(self):
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.000_001, 0.000_060))

    def disarm(self):
        # The system may have sent it already, to another thread even, and Python calls the handler later on.
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def __call__(self, *_):
        if self._armed:
            self._armed = False
            raise self.TimeIsUpError


@pytest.fixture
def alarm():
    alarm = Alarm()
    # What is raised while garbage is collected goes nowhere, and Hypothesis has Python code called then.
    gc.disable()
    before = signal.signal(signal.SIGALRM, alarm)
    yield alarm
    alarm.disarm()
    signal.signal(signal.SIGALRM, before)
    gc.enable()


@pytest.mark.engine("sqlite")
def test_a_signal_at_any_moment_of_acquire_leaves_nothing(alarm):
    """Between the lines too, where Python looks for signals: as a function returns, say."""
    lock, backend = db_lock("stock:7", using="memory"), backends["memory"]
    # What a process finds out once, with a socket that would be left to the collector of garbage.
    lock.acquire().release()
    interrupts, end = 0, time.monotonic() + 4
    while time.monotonic() < end:
        hold = None
        try:
            alarm.arm()
            hold = lock.acquire()
            alarm.disarm()
        except alarm.TimeIsUpError:
            interrupts += 1
        if hold is not None:
            hold.release()
        assert backend.holder("stock:7") is None, f"after {interrupts} interrupts"
    assert interrupts > 500


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize(
    ("setting", "usual", "meanwhile"), [("busy_timeout", 60_000, "_briefly"), ("synchronous", 2, "_forgettably")]
)
def test_a_signal_at_any_moment_leaves_a_connection_as_it_was(alarm, setting, usual, meanwhile):
    """A lock waits shortly for SQLite's one writer, and for no flush where it gives back; the project's own do."""
    backend = backends["default"]
    raw = backend._session()
    ((before,),) = raw.execute(f"PRAGMA {setting}").fetchall()
    raw.execute(f"PRAGMA {setting} = {usual}")
    interrupts, end = 0, time.monotonic() + 4
    while time.monotonic() < end:
        try:
            alarm.arm()
            with getattr(backend, meanwhile)():
                pass
            alarm.disarm()
        except alarm.TimeIsUpError:
            interrupts += 1
        assert raw.execute(f"PRAGMA {setting}").fetchall() == [(usual,)], f"after {interrupts} interrupts"
    raw.execute(f"PRAGMA {setting} = {before}")
    assert interrupts > 500


class TimeLimitExceededError(Exception):
    """As Celery's handler of SIGUSR1 raises its own."""


@pytest.mark.engine("mariadb")
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, TimeLimitExceededError])
@pytest.mark.parametrize("using", ["default", "optimistic", "insert"])
@pytest.mark.parametrize("prepare", [None, False], ids=["directly", "by the cursor"])
def test_a_signal_before_the_answer_was_read_leaves_nothing_taken_and_no_answer_to_the_next(
    using, prepare, interrupt, monkeypatch, is_free
):
    """mysqlclient sees the signal when the statement is done, and its answer is still on the wire."""
    from MySQLdb.connections import Connection

    monkeypatch.setattr(backends[using], "prepare", prepare)
    lock = db_lock("stock:7", using=using)
    with lock:
        pass
    caller, read, number = threading.current_thread(), Connection.store_result, 0
    for number in range(20):
        left = number

        def interrupted(session):
            nonlocal left
            if threading.current_thread() is not caller:
                # A room that the last test has left listens for a moment yet.
                return read(session)
            left -= 1
            if left < 0:
                monkeypatch.setattr(Connection, "store_result", read)
                raise interrupt
            return read(session)

        monkeypatch.setattr(Connection, "store_result", interrupted)
        try:
            with lock:
                pass
        except interrupt:
            assert is_free(using)
        else:
            monkeypatch.setattr(Connection, "store_result", read)
            break
    assert number >= 2


@pytest.mark.engine("mariadb")
def test_a_connection_that_somebody_else_has_left_out_of_step_is_made_anew():
    """A statement of the application's own was interrupted before its answer was read."""
    with db_lock("stock:7"):
        pass
    connection.connection.query("SELECT 1")
    with db_lock("stock:7") as hold:
        assert hold.held


# In line.


@pytest.fixture
def held_elsewhere():
    """Return a context manager within which another thread has the key."""

    @contextlib.contextmanager
    def hold(using="default"):
        taken, done = threading.Event(), threading.Event()

        def run():
            try:
                with db_lock("stock:7", using=using, timeout=30):
                    taken.set()
                    done.wait(60)
            finally:
                connections.close_all()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert taken.wait(30)
        try:
            yield done.set
        finally:
            done.set()
            thread.join(30)

    return hold


def leaves_no_claim(where, until):
    until(lambda: not LockClaim.objects.exists())
    assert not list(room_of(backends["default"])._waiters), where
    assert not ResourceLock.objects.exclude(waiters=0, shares=0).exists(), where


@pytest.mark.timeout(280)
@pytest.mark.parametrize("scope", ["lease", "shared"])
@leaves_no_handler
def test_an_interrupt_at_any_line_of_a_wait_that_comes_to_nothing_leaves_no_place_in_line(scope, held_elsewhere, until):
    """Also while the attempt is being given up."""
    lock = db_lock("stock:7", timeout=0.02, shared=scope == "shared")
    with held_elsewhere():
        for number in lines(9 if STEP > 1 else 3):
            with Interrupter(number) as interrupter, contextlib.suppress(KeyboardInterrupt, LockTimeout):
                lock.acquire()
            if interrupter.where is None:
                break
            leaves_no_claim(f"{interrupter.where}, line {number}", until)
        else:
            pytest.fail("never came through")
    assert number > 50


@pytest.mark.timeout(280)
@leaves_no_handler
def test_an_interrupt_at_any_line_of_a_wait_that_ends_with_the_key_leaves_nothing(held_elsewhere, until, is_free):
    lock = db_lock("stock:7", timeout=30)
    for number in lines(15 if STEP > 1 else 5):
        hold = None
        with held_elsewhere() as let_go:
            timer = threading.Timer(0.01, let_go)
            timer.start()
            with Interrupter(number) as interrupter, contextlib.suppress(KeyboardInterrupt):
                hold = lock.acquire()
            timer.join()
        if interrupter.where is None:
            hold.release()
            break
        leaves_no_claim(f"{interrupter.where}, line {number}", until)
        assert not keeper.holds, interrupter.where
        assert is_free()
    else:
        pytest.fail("never came through")
    assert number > 50


@leaves_no_handler
def test_an_interrupt_at_any_line_of_resuming_a_hold_leaves_it_to_be_resumed_or_free(is_free):
    for number in lines(9 if STEP > 1 else 3):
        text, resumed = db_lock("stock:7").acquire().detach(within=60), []
        with Interrupter(number) as interrupter, contextlib.suppress(KeyboardInterrupt):
            resumed.append(resume_hold(text))
        if interrupter.where is None:
            resumed.pop().release()
            break
        assert not resumed
        with contextlib.suppress(LockLost):
            resume_hold(text).release()
        assert is_free(), interrupter.where
    else:
        pytest.fail("never came through")
    assert number > 30
