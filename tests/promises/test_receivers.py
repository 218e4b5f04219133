"""Errors in the receivers of signals, and soft time limits that strike there."""

import asyncio
import ctypes
import os
import signal
import threading
import time
from contextlib import nullcontext, suppress
from functools import partial

import pytest

from dlocks import (
    LockLost,
    LockTimeout,
    db_lock,
    lock_acquired,
    lock_detached,
    lock_lost,
    lock_released,
    lock_timeout,
    resume_hold,
)
from dlocks.testing import expire, lose
from tests.for_each import for_each
from tests.promises.received import received
from tests.sync_and_async import sync_and_async

pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]

ALIASES = for_each("using", ["default", "memory"])
KEYS = for_each("keys", [("a",), ("a", "b")])


class SoftLimitError(Exception):
    """A time limit like Celery's SoftTimeLimitExceeded, also an Exception."""


def limit(signum, frame):
    raise SoftLimitError


def limit_of_any_arguments(*arguments):
    raise SoftLimitError


class Limit:
    """A handler like that of RQ's death penalty, a method."""

    def handle(self, signum, frame):
        self.fail()

    def fail(self):
        raise SoftLimitError


HANDLERS = for_each("handler", [limit, limit_of_any_arguments, Limit().handle])


@pytest.fixture
def handled_by(handled):
    """Return a function that sets the handler of the signal of time limits."""
    return partial(handled, signal.SIGUSR1)


def wait_for_strike():
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        pass
    pytest.fail("the time limit did not strike")


def strike(**_):
    """Let the time limit strike here, as the parent process of a worker does."""
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_for_strike()


def acquire(lock):
    lock.acquire()


def release(lock):
    lock.acquire().release()


def find_loss(lock):
    hold = lock.acquire()
    try:
        expire(hold)
        hold.check()
    finally:
        with suppress(LockLost):
            hold.release()


def detach(lock):
    lock.acquire().detach()


def resume(lock):
    text = lock.acquire().detach()
    with received(lock_acquired, strike):
        resume_hold(text)


OF_EVERY_SIGNAL = for_each(
    "sent",
    [
        (lock_acquired, acquire),
        (lock_released, release),
        (lock_lost, find_loss),
        (lock_detached, detach),
        (lock_detached, resume),
    ],
)


@ALIASES
@KEYS
@HANDLERS
@OF_EVERY_SIGNAL
def test_a_time_limit_in_a_receiver_reaches_the_caller(
    using, keys, handler, sent, handled_by, is_busy
):
    """The task ends by its time limit, wherever it strikes, and leaves no key taken."""
    dispatcher, use = sent
    if use in {detach, resume} and len(keys) > 1:
        return
    lock = db_lock(*keys, using=using)
    handled_by(handler)
    strikes = nullcontext() if use is resume else received(dispatcher, strike)
    with pytest.raises(SoftLimitError), strikes:
        use(lock)
    assert not lock.held()
    assert not any(is_busy(key, using) for key in keys)


@ALIASES
def test_a_time_limit_in_a_receiver_of_lock_timeout_reaches_the_caller(
    using, handled_by, in_other_thread
):
    """It is raised instead of LockTimeout, and no claim stays in the queue."""
    hold = in_other_thread(db_lock("a", using=using).acquire)
    handled_by(limit)
    with pytest.raises(SoftLimitError), received(lock_timeout, strike):
        db_lock("a", using=using, timeout=0.01).acquire()
    assert hold.queue_length() == 0
    with pytest.raises(LockTimeout):
        db_lock("a", using=using, timeout=0).acquire()
    hold.release()


@ALIASES
def test_a_time_limit_in_on_lost_reaches_the_caller(using, handled_by):
    """``on_lost`` runs in the thread of the call that finds the loss."""
    lock = db_lock("a", using=using, on_lost=lambda hold: strike())
    handled_by(limit)
    with pytest.raises(SoftLimitError):
        find_loss(lock)
    assert not lock.held()


@ALIASES
@for_each("struck", ["receiver", "first on_lost"])
def test_every_on_lost_is_called_after_a_time_limit(using, struck, handled_by):
    """The hold may be that of another thread, too, which was not struck."""
    told = []

    def on_lost(hold):
        if struck == "first on_lost":
            strike()

    first = db_lock("a", using=using, on_lost=on_lost)
    other = db_lock("a", using=using, on_lost=told.append)
    handled_by(limit)
    receiver = received(lock_lost, strike) if struck == "receiver" else nullcontext()
    with pytest.raises(LockLost), receiver, first as hold, other:
        expire(hold)
        with pytest.raises(SoftLimitError):
            hold.check()
    assert told == [hold]


@ALIASES
def test_every_receiver_is_called_after_a_time_limit(using, handled_by, signalled):
    """The other receivers learn of the event too."""
    handled_by(limit)
    with pytest.raises(SoftLimitError), received(lock_released, strike):
        told = signalled(lock_released)
        release(db_lock("a", using=using))
    assert told


def fail(**_):
    raise ZeroDivisionError


def fail_later(**_):
    """Fail after a signal handler that returned."""
    os.kill(os.getpid(), signal.SIGUSR1)
    raise ZeroDivisionError


def fail_on_purpose(**_):
    """Fail in a function that is called like a signal handler, but not by Python."""
    limit(signal.SIGUSR1, None)


@ALIASES
@for_each("error", [fail, fail_later, fail_on_purpose])
def test_an_error_of_a_receiver_itself_is_only_logged(using, error, handled_by, caplog):
    """It does not reach the caller, whose key is acquired and released."""
    lock = db_lock("a", using=using)
    handled_by(lambda *_: None)
    with received(lock_acquired, error), received(lock_released, error):
        with lock as hold:
            assert hold.held
    assert not lock.held()
    assert len([one for one in caplog.records if one.exc_info]) == 2
    caplog.clear()


class TimeLimit(BaseException):
    """A time limit like dramatiq's TimeLimitExceeded, no Exception."""


def strike_asynchronously(error):
    """Let an error strike this thread, as a timer in another thread does."""
    thread = ctypes.c_ulong(threading.get_ident())
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(error))
    wait_for_strike()


@for_each("dispatcher", [lock_acquired, lock_released])
@ALIASES
@KEYS
def test_an_asynchronous_time_limit_in_a_receiver_reaches_the_caller(
    using, keys, dispatcher, threads, is_busy
):
    """It also strikes threads in which no signal handler runs, and no key stays taken.

    A ``BaseException`` is never an error of a receiver.
    """
    lock = db_lock(*keys, using=using)

    def work():
        with received(dispatcher, lambda **_: strike_asynchronously(TimeLimit)):
            with pytest.raises(TimeLimit), lock:
                assert dispatcher is lock_released

    threads(work).join()
    for key in keys:
        assert not is_busy(key, using)


@ALIASES
def test_an_asynchronous_exception_in_a_receiver_is_logged_like_its_own(
    using, threads, is_busy, caplog
):
    """The caller continues under its lock, since Python shows no difference.

    See the next test.
    """

    def work():
        with received(lock_acquired, lambda **_: strike_asynchronously(SoftLimitError)):
            with db_lock("a", using=using) as hold:
                assert hold.held

    threads(work).join()
    assert not is_busy("a", using)
    (record,) = [one for one in caplog.records if one.exc_info]
    assert record.exc_info[0] is SoftLimitError
    caplog.clear()


def test_python_shows_no_difference_between_an_asynchronous_error_and_another():
    """Both are raised at the end of a function in C: by itself, or for another thread.

    Where this fails, dlocks may learn to tell the two, as it does after a signal.
    """

    def facts(function):
        try:
            function()
        except SoftLimitError as error:
            traceback = error.__traceback__
            place = traceback.tb_frame.f_code, traceback.tb_lasti, traceback.tb_next
            return place, type(error), error.args, vars(error), error.__context__

    loop = asyncio.new_event_loop()
    failed = loop.create_future()
    failed.set_exception(SoftLimitError())
    loop.close()
    thread = ctypes.c_ulong(threading.get_ident())
    set_error = ctypes.pythonapi.PyThreadState_SetAsyncExc
    arm = partial(set_error, thread, ctypes.py_object(SoftLimitError))
    assert facts(failed.result) == facts(arm)


@ALIASES
@sync_and_async
async def test_a_hold_that_is_lost_before_its_caller_has_it_is_returned(do, using):
    """The block learns of the loss at its end."""

    def receive(hold, **_):
        lose(hold)

    with pytest.raises(LockLost), received(lock_acquired, receive):
        async with do.block(db_lock("a", using=using)) as hold:
            assert not hold.held
