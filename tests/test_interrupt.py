"""An interrupt at any point of acquiring leaves nothing acquired."""

from __future__ import annotations

import contextlib
import functools
import gc
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
from tests.internals import (
    LockClaim,
    ResourceLock,
    backends,
    holds_by_caller,
    keeper,
    waiters_of,
)

pytestmark = pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"])

PACKAGE = str(Path(dlocks.__file__).parent)


@pytest.fixture(autouse=True)
def connection_of_its_own(transactional_db):
    """Close the connection after each test.

    On SQLite an interrupt may leave a short ``busy_timeout`` on it.
    """
    yield
    connection.close()


# On a server only one of several lines is tested, and different ones in each run. The
# check afterwards needs a new connection, which is slow there.
STEP = 1 if connection.vendor == "sqlite" else 5


# More lines than any of these operations has. A timeout on PostgreSQL has 3,700.
LINES_AT_MOST = 20_000


def lines(step):
    return range(random.randrange(step), LINES_AT_MOST, step)


class Interrupter:
    """A tracer that raises an error at the n-th line of dlocks in this thread."""

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
        """Return whether a with statement is about to call ``__exit__``.

        Tracers see a line there, but no signal is handled at this point.
        """
        place = (id(frame), frame.f_lineno)
        again = place in self.seen
        self.seen.add(place)
        return again and linecache.getline(
            frame.f_code.co_filename, frame.f_lineno
        ).lstrip().startswith("with ")


def first_line(function):
    """Return the number of the first line of a function's body."""
    code = function.__code__
    numbers = {number for _, _, number in code.co_lines() if number is not None}
    return min(numbers - {code.co_firstlineno})


def leaves_no_handler(function):
    """Decorate a function to run with an exception state of its own.

    CPython 3.11 does not leave an except clause if a tracer raises at its end, where no
    signal is ever handled. Inside such a clause, a call with a duplicate argument is a
    KeyError. A generator has its own exception state.
    """

    @functools.wraps(function)
    def call(*args, **kwargs):
        (result,) = (function(*args, **kwargs) for _ in range(1))
        return result

    return call


@leaves_no_handler
def interrupt_everywhere(enter, is_free, *, step=1, kind=KeyboardInterrupt):
    """Interrupt at each line in turn and return the number of lines.

    It stops at the first run that completes.
    """
    for number in lines(step):
        with Interrupter(number, kind) as interrupter, contextlib.suppress(kind):
            enter()
        if interrupter.where is None:
            return number
        assert is_free(), (
            f"held after an interrupt at {interrupter.where}, line {number}"
        )
        assert not keeper.holds, interrupter.where
        assert not [hold for hold in holds_by_caller.values() if hold.enterable], (
            interrupter.where
        )
    pytest.fail("no run completed")


@pytest.fixture
def is_free(in_other_thread):
    def ask(using="default"):
        def attempt():
            # An interrupted statement may still be running on the server.
            with db_lock("stock:7", using=using, timeout=5):
                return True

        try:
            return in_other_thread(attempt)
        except LockError:
            return False

    return ask


class AlarmError(RuntimeError):
    """An error as raised by a SIGALRM handler or Celery's soft time limit.

    It is a RuntimeError, because refusals are RuntimeErrors too.
    """


@pytest.mark.parametrize(
    ("using", "kind"),
    [("memory", KeyboardInterrupt), ("memory", AlarmError), ("default",
    KeyboardInterrupt), ("default", AlarmError),
     ("optimistic", KeyboardInterrupt), ("insert", AlarmError)],
)  # fmt: skip
def test_an_interrupt_at_any_line_of_acquire_leaves_nothing(using, kind, is_free):
    lock = db_lock("stock:7", using=using)
    holds = []

    def nothing_is_left():
        if holds:
            # The interrupt came in a signal receiver. Django logs the error, and the
            # caller has the hold.
            assert kind is AlarmError
            holds.pop().release()
        return is_free(using)

    number = interrupt_everywhere(
        lambda: holds.append(lock.acquire()), nothing_is_left, step=STEP, kind=kind
    )
    assert number > 50
    holds.pop().release()


@pytest.mark.parametrize("using", ["memory", "default"])
def test_an_interrupt_at_any_line_of_enter_leaves_nothing(using, is_free):
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
def test_an_interrupt_of_an_inner_exit_keeps_the_outer_hold(kind):
    lock = db_lock("stock:7", using="memory")
    for number in range(300):
        with lock as hold:
            lock.__enter__()
            with Interrupter(number, kind) as interrupter, contextlib.suppress(kind):
                lock.__exit__(None, None, None)
            if interrupter.where is not None and hold.count == 2:
                # This point exists for tracers only, as explained in the next test.
                lock.__exit__(None, None, None)
            assert hold.held, interrupter.where
            assert hold.count == 1, interrupter.where
        if interrupter.where is None:
            break
    assert number > 10


@pytest.mark.parametrize("kind", [KeyboardInterrupt, AlarmError])
@pytest.mark.parametrize("using", ["memory", "default", "insert"])
@leaves_no_handler
def test_an_interrupt_at_any_line_of_exit_releases_the_key(using, kind, is_free):
    lock = db_lock("stock:7", using=using)
    # Tracers see the line before the first call of the function, but no signal is
    # handled there.
    first = first_line(type(lock).__exit__)
    before_leaving = {f"lock.py:{first}", f"lock.py:{first + 1}"}
    for number in lines(STEP):
        lock.__enter__()
        with Interrupter(number, kind) as interrupter, contextlib.suppress(kind):
            lock.__exit__(None, None, None)
        if interrupter.where is None:
            assert number > 10
            break
        if interrupter.where in before_leaving:
            lock.__exit__(None, None, None)
        assert is_free(using), (
            f"held after an interrupt at {interrupter.where}, line {number}"
        )
    else:
        pytest.fail("no run completed")


@leaves_no_handler
def test_an_interrupt_while_reentering_does_not_change_the_count(is_free):
    lock = db_lock("stock:7", using="memory")
    for number in range(200):
        with lock as hold:
            with (
                Interrupter(number) as interrupter,
                contextlib.suppress(KeyboardInterrupt),
            ):
                lock.__enter__()
            if interrupter.where is None:
                lock.__exit__(None, None, None)
            assert hold.count == 1, f"{interrupter.where}, line {number}"
        assert not hold.held
        if interrupter.where is None:
            break
    else:
        pytest.fail("no run completed")
    assert is_free("memory")


@pytest.mark.engine("postgresql", "mariadb", "mysql")
def test_an_interrupt_inside_a_transaction_leaves_nothing(is_free):
    def enter():
        with transaction.atomic():
            db_lock("stock:7").acquire()
            transaction.set_rollback(True)

    assert interrupt_everywhere(enter, is_free, step=7) > 30


@pytest.mark.engine("postgresql", "mariadb", "mysql")
def test_a_real_ctrl_c_while_waiting_leaves_nothing(workers, is_free):
    """A signal arrives at random moments of waiting and of statements."""
    lock = db_lock("stock:7", timeout=None)
    main = threading.main_thread().ident
    for number in range(30):
        timer = threading.Timer(
            0.001 + number * 0.0005, signal.pthread_kill, [main, signal.SIGINT]
        )
        hold = None
        try:
            timer.start()
            # Continue a little longer, because the signal is handled after the timer
            # has sent it.
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
    """A signal handler that raises an error at a random moment while armed."""

    class TimeIsUpError(BaseException):
        pass

    def __init__(self):
        self._armed = False

    def arm(self):
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.000_001, 0.000_060))

    def disarm(self):
        # The system may have sent the signal already, even to another thread. Python
        # calls the handler later.
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def __call__(self, *_):
        if self._armed:
            self._armed = False
            raise self.TimeIsUpError


@pytest.fixture
def alarm():
    alarm = Alarm()
    # An error that is raised during garbage collection is ignored. Hypothesis runs
    # Python code at that time.
    gc.disable()
    before = signal.signal(signal.SIGALRM, alarm)
    yield alarm
    alarm.disarm()
    signal.signal(signal.SIGALRM, before)
    gc.enable()


@pytest.mark.engine("sqlite")
def test_a_signal_at_any_moment_of_acquire_leaves_nothing(alarm):
    """Python also handles signals between lines, such as when a function returns."""
    lock, backend = db_lock("stock:7", using="memory"), backends["memory"]
    # The first use opens a socket once per process. An interrupt would leave it to the
    # garbage collector.
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
    ("setting", "usual", "meanwhile"),
    [
        ("busy_timeout", 60_000, "_with_short_timeout"),
        ("synchronous", 2, "_without_flush"),
    ],
)
def test_a_signal_at_any_moment_keeps_the_connection_settings(
    alarm, setting, usual, meanwhile
):
    """A lock shortens ``busy_timeout`` and relaxes ``synchronous`` for itself.

    Statements of the project keep their own settings.
    """
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
        assert raw.execute(f"PRAGMA {setting}").fetchall() == [(usual,)], (
            f"after {interrupts} interrupts"
        )
    raw.execute(f"PRAGMA {setting} = {before}")
    assert interrupts > 500


class TimeLimitExceededError(Exception):
    """An error like the one that Celery's SIGUSR1 handler raises."""


@pytest.mark.engine("mariadb", "mysql")
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, TimeLimitExceededError])
@pytest.mark.parametrize("using", ["default", "optimistic", "insert"])
@pytest.mark.parametrize("prepare", [None, False], ids=["directly", "by the cursor"])
def test_a_signal_before_the_reply_was_read_leaves_nothing(
    using, prepare, interrupt, monkeypatch, is_free
):
    """mysqlclient handles the signal when the reply has not been read yet.

    The statement is done at this moment.
    """
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
                # The queue thread of the last test may still be listening.
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


@pytest.mark.engine("mariadb", "mysql")
def test_a_desynchronised_connection_is_replaced():
    """A statement of the application was interrupted before its reply was read."""
    with db_lock("stock:7"):
        pass
    connection.connection.query("SELECT 1")
    with db_lock("stock:7") as hold:
        assert hold.held


# The queue.


@pytest.fixture
def held_elsewhere():
    """Return a context manager in which another thread holds the key."""

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
    assert not list(waiters_of(backends["default"])._waiters), where
    assert not ResourceLock.objects.exclude(waiters=0, shares=0).exists(), where


@pytest.mark.timeout(280)
@pytest.mark.parametrize("scope", ["lease", "shared"])
@leaves_no_handler
def test_an_interrupt_at_any_line_of_a_timeout_leaves_no_claim(
    scope, held_elsewhere, until
):
    """This includes the cancellation of the attempt."""
    lock = db_lock("stock:7", timeout=0.02, shared=scope == "shared")
    with held_elsewhere():
        for number in lines(9 if STEP > 1 else 3):
            with (
                Interrupter(number) as interrupter,
                contextlib.suppress(KeyboardInterrupt, LockTimeout),
            ):
                lock.acquire()
            if interrupter.where is None:
                break
            leaves_no_claim(f"{interrupter.where}, line {number}", until)
        else:
            pytest.fail("no run completed")
    assert number > 50


@pytest.mark.timeout(280)
@leaves_no_handler
def test_an_interrupt_at_any_line_of_a_wait_leaves_nothing(
    held_elsewhere, until, is_free
):
    lock = db_lock("stock:7", timeout=30)
    for number in lines(15 if STEP > 1 else 5):
        hold = None
        with held_elsewhere() as let_go:
            timer = threading.Timer(0.01, let_go)
            timer.start()
            with (
                Interrupter(number) as interrupter,
                contextlib.suppress(KeyboardInterrupt),
            ):
                hold = lock.acquire()
            timer.join()
        if interrupter.where is None:
            hold.release()
            break
        leaves_no_claim(f"{interrupter.where}, line {number}", until)
        assert not keeper.holds, interrupter.where
        assert is_free()
    else:
        pytest.fail("no run completed")
    assert number > 50


@leaves_no_handler
def test_an_interrupt_of_a_resumption_leaves_the_key_usable(
    is_free,
):
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
        pytest.fail("no run completed")
    assert number > 30
