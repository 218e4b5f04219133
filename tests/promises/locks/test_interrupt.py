"""An interrupt while dlocks asks, waits or releases leaves nothing acquired."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from django.db import connection, transaction

from dlocks import (
    Lock,
    LockError,
    LockLost,
    db_lock,
    db_semaphore,
    resume_hold,
)
from dlocks.models import LockClaim, ResourceLock
from dlocks.testing import held_elsewhere
from tests.for_each import for_each
from tests.volume import volume

pytest_plugins = ["tests.alarms", "tests.promises.stops"]
pytestmark = [
    pytest.mark.driver,
    pytest.mark.django_db(transaction=True),
]


@pytest.fixture(autouse=True)
def connection_of_its_own(transactional_db):
    """On SQLite an interrupt may leave a short ``busy_timeout`` on a connection."""
    yield
    connection.close()


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


# Chosen points: before a request is sent, and after it was answered.

KINDS = (KeyboardInterrupt, AlarmError)
WHEN = ("before", "after")
USING = ("default", "optimistic", "insert", "memory")


@pytest.fixture
def interrupt(stops):
    """Return a context manager in which a request of this thread is interrupted.

    The error is raised by the first call of a method of the backend, before or after it
    does its work.
    """

    @contextlib.contextmanager
    def during(using, name, when, kind):
        caller, done = threading.current_thread(), []

        def interrupted(usual, *args):
            if done or threading.current_thread() is not caller:
                return usual()
            done.append(True)
            if when == "after":
                usual()
            raise kind

        with stops.replace(name, interrupted, using), pytest.raises(kind):
            yield
        assert done, f"{name} was not called"

    return during


@pytest.mark.parametrize("name", ["acquire", "release"])
def test_an_interrupt_of_a_request_leaves_nothing(name, interrupt, is_free):
    """After the request, the reply is lost. The key may have been granted."""
    for case in itertools.product(USING, WHEN, KINDS):
        using, when, kind = case
        lock = db_lock("stock:7", using=using)
        with interrupt(using, name, when, kind), lock:
            pass
        assert not lock.held(), case
        assert is_free(using), case


def test_an_interrupt_while_entering_again_keeps_the_count(interrupt, is_free):
    for case in itertools.product(USING, WHEN):
        using, when = case
        lock = db_lock("stock:7", using=using)
        with lock as hold:
            with interrupt(using, "verify", when, KeyboardInterrupt):
                lock.acquire()
            assert hold.count == 1, case
            with interrupt(using, "verify", when, KeyboardInterrupt), lock:
                pass
            assert hold.count == 1, case
            hold.check()
        assert is_free(using), case


def test_an_interrupt_of_several_keys_leaves_none(interrupt, is_free):
    for case in itertools.product(("acquire_all", "acquire", "release_all"), WHEN):
        name, when = case
        both = db_lock("stock:7", "stock:8")
        other = db_lock("stock:8") if name == "acquire" else contextlib.nullcontext()
        with other, interrupt("default", name, when, KeyboardInterrupt), both:
            pass
        assert is_free(), case
        assert not db_lock("stock:8").locked(), case


def test_an_interrupted_release_takes_no_key_from_a_block(stops):
    """Another thread has acquired two keys, and begins a block of one of them.

    The release of the other one is then interrupted.
    """
    with ThreadPoolExecutor(1) as thread:
        # They are released one by one.
        lock = db_lock("rested:a", "rested:b", using="memory", min_hold=60)
        hold = thread.submit(lock.acquire).result(20)
        second = hold.holds[1]

        def begin_and_strike():
            thread.submit(second.__enter__).result(20)
            raise KeyboardInterrupt

        stops.call("release", begin_and_strike, "memory")
        with pytest.raises(KeyboardInterrupt):
            hold.release()
        assert second.held
        thread.submit(second.__exit__, None, None, None).result(20)
        assert not second.held


def test_an_interrupt_is_raised_although_the_release_is_refused(stops):
    """Another thread has acquired twice, and begins two blocks during the check."""
    with ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as blocks:
        lock = db_lock("stock:7", using="memory")
        for _ in range(2):
            hold = thread.submit(lock.acquire).result(20)

        def begin_and_strike():
            for _ in range(2):
                thread.submit(hold.__enter__).result(20)
                end = partial(thread.submit, hold.__exit__, None, None, None)
                blocks.callback(lambda end=end: end().result(20))
            raise KeyboardInterrupt

        stops.call("verify", begin_and_strike, "memory")
        with pytest.raises(KeyboardInterrupt):
            hold.release()
        assert hold.count == 2


@pytest.mark.engine("postgresql", "mariadb")
def test_an_interrupt_inside_a_transaction_leaves_nothing(interrupt, is_free):
    for case in itertools.product(("acquire", "release"), WHEN):
        with interrupt("default", *case, KeyboardInterrupt), transaction.atomic():
            with db_lock("stock:7"):
                pass
        assert is_free(), case


def test_an_interrupt_of_a_wait_leaves_no_claim(interrupt, until):
    """It may come while the caller joins the queue, leaves it, or reads the holder."""
    exclusive = partial(db_lock, "stock:7")
    shared = partial(db_semaphore, "stock:7", 2)
    cases = [
        *itertools.product([exclusive], ["enqueue", "release", "holder"], WHEN),
        *itertools.product([shared], ["enqueue", "release", "waiting"], WHEN),
    ]
    # A caller that is late does not join the queue, so it has nothing to leave.
    timeouts = {"enqueue": 10, "release": 2}
    with held_elsewhere("stock:7"):
        for lock, name, when in cases:
            with interrupt("default", name, when, KeyboardInterrupt):
                lock(timeout=timeouts.get(name, 0.3)).acquire()
            leaves_no_claim(until)


def test_an_interrupt_of_a_detach_leaves_nothing(stops, is_free):
    """No process receives the text. A handler may raise any error, as RuntimeError."""
    for case in itertools.product(("default", "memory"), WHEN, KINDS):
        using, when, kind = case

        def interrupted(usual, *args, when=when, kind=kind):
            if when == "after":
                usual()
            raise kind

        hold = db_lock("stock:7", using=using).acquire()
        with stops.replace("renew", interrupted, using), pytest.raises(kind):
            hold.detach()
        assert is_free(using), case


def test_an_interrupt_of_a_resumption_leaves_the_key_usable(interrupt, is_free):
    for when in WHEN:
        text = db_lock("stock:7").acquire().detach(within=60)
        with interrupt("default", "exchange", when, KeyboardInterrupt):
            resume_hold(text)
        with contextlib.suppress(LockLost):
            resume_hold(text).release()
        assert is_free(), when


# Real signals.


# A signal may strike within a finalizer of Django 6.1. Python then only reports it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@for_each(
    "case",
    [("default", False, 4000), ("default", True, 150), ("memory", False, 1000)],
)
def test_random_signals_leave_no_key_taken(case, alarm, is_free, until, threads):
    """Nor for longer than its ttl. Up to 4,000 acquisitions are interrupted."""
    using, contended, number = case
    lock = db_lock("stock:7", using=using, ttl=1, timeout=5, reentrant=False)
    with lock:
        pass
    over = threading.Event()

    def compete():
        while not over.is_set():
            with db_lock("stock:7", using=using, timeout=30):
                over.wait(0.0005)

    if contended:
        competitor = threads(compete)
    began = time.monotonic()
    for _ in range(20):
        with lock:
            pass
    usual = (time.monotonic() - began) / 20
    # A server has to be connected to again after most interrupts. A contended
    # acquisition waits in the queue.
    slow = using == "default" and connection.vendor != "sqlite"
    number = volume(min(number, 500) if slow else number)
    interrupts = 0
    for _ in range(number):
        try:
            alarm.arm(usual * (8 if slow else 2))
            began = time.monotonic()
            with lock:
                pass
            alarm.disarm()
            # The machine may be busy at the beginning and idle later.
            usual += (time.monotonic() - began - usual) / 20
        except alarm.TimeIsUpError as error:
            interrupts += 1
            if is_before_exit(error):
                lock.__exit__(None, None, None)
        except LockError:
            # The connection was replaced after an interrupt.
            alarm.disarm()
    over.set()
    if contended:
        competitor.join(60)
    assert interrupts > number / 100
    assert is_free(using)
    leaves_no_claim(until)


def is_before_exit(error):
    """Return whether a signal was handled when ``__exit__`` was called.

    Python does that before the first line of a function. No lock that is written in
    Python can release itself then.
    """
    last = error.__traceback__
    while last.tb_next is not None and last.tb_frame.f_code is not EXIT:
        last = last.tb_next
    return last.tb_frame.f_code is EXIT and last.tb_lineno == EXIT.co_firstlineno


EXIT = Lock.__exit__.__code__


def leaves_no_claim(until):
    until(lambda: not LockClaim.objects.exists())
    assert not ResourceLock.objects.exclude(waiters=0, shares=0).exists()


@pytest.mark.engine("mariadb")
@for_each("using", ["default", "optimistic", "insert"])
def test_a_signal_before_the_reply_was_read_leaves_nothing(
    using, monkeypatch, is_free, settings
):
    """The statement is done then. It is sent directly, or by the cursor."""
    from MySQLdb.connections import Connection

    lock = db_lock("stock:7", using=using)
    caller, read = threading.current_thread(), Connection.store_result
    for case in itertools.product(({}, {"prepare": False}), KINDS):
        options, interrupt = case
        settings.DLOCKS = {
            **settings.DLOCKS,
            using: {**settings.DLOCKS[using], "OPTIONS": options},
        }
        with lock:
            pass
        number = 0
        for number in range(20):
            left = number

            def interrupted(session, interrupt=interrupt):
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
                assert is_free(using), case
            else:
                monkeypatch.setattr(Connection, "store_result", read)
                break
        assert number >= 2, case


@pytest.mark.engine("mariadb")
def test_a_desynchronised_connection_is_replaced():
    """A statement of the application was interrupted before its reply was read."""
    with db_lock("stock:7"):
        pass
    connection.connection.query("SELECT 1")
    with db_lock("stock:7") as hold:
        assert hold.held
