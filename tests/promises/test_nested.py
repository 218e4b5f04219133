"""A request that strikes in the middle of another one of its thread is refused.

It comes from a signal handler, or from a ``__del__()`` called by the garbage collector.
"""

import random
import signal
import threading
import time
from functools import partial

import pytest
from django.db import connection

from dlocks import LockBackendError, db_lock, db_semaphore
from tests.finalizers import by_finalizer
from tests.for_each import for_each
from tests.promises.locks.keys import await_renewal
from tests.volume import volume

pytest_plugins = ["tests.promises.stops"]
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.driver]


# The requests in which a function strikes.
STRUCK = ["acquire", "acquire_all", "verify", "renew", "release", "holder"]
USING = for_each("using", ["stopping pessimistic", "stopping memory"])


@pytest.fixture
def interrupted(stops):
    """Return a function that lets another one strike in the next request of an alias.

    It strikes before the backend does its work, and after it.
    """

    def strike(function, using):
        pending = [function]

        def struck(usual, *_):
            if not pending:
                return usual()
            pending.clear()
            function()
            result = usual()
            function()
            return result

        for name in STRUCK:
            stops.replace(name, struck, using)

    return strike


@pytest.fixture
def by_signal(handled):
    """Return a function that makes a function the handler of a signal, and sends it."""

    def by(function):
        handled(signal.SIGUSR1, lambda *_: function())
        return partial(signal.raise_signal, signal.SIGUSR1)

    return by


def is_free(*keys, using):
    with db_lock(*keys, using=using, timeout=5):
        return True


def acquire(lock):
    lock.acquire().release()


def enter_again(lock):
    with lock as hold, lock as again:
        assert again is hold


def renew(lock):
    with lock as hold:
        hold.renew()


OUTER = [
    acquire,
    lambda lock: acquire(db_lock("a", "b", using=lock.using)),
    lambda lock: acquire(db_semaphore("c", 2, using=lock.using)),
    enter_again,
    renew,
    lambda lock: lock.locked(),
]


@USING
@for_each("kind", ["signal", "finalizer"])
@for_each("outer", OUTER)
def test_an_inner_request_is_refused_and_the_outer_one_goes_on(
    outer, kind, using, interrupted, by_signal, in_other_thread
):
    """Else each reads the reply to the other, or waits for it without end."""
    answers = []
    other = db_lock("other", using=using)

    def inner():
        for attempt in (other.try_acquire, other.acquire, other.locked):
            try:
                answers.append(attempt())
            except LockBackendError as error:
                answers.append("signal handler" in str(error))

    interrupted((by_signal if kind == "signal" else by_finalizer)(inner), using)
    outer(db_lock("stock:7", using=using))
    assert answers == [True] * 6
    assert in_other_thread(is_free, "stock:7", "other", using=using)
    with other as hold:
        assert hold.held


@USING
@for_each("by", ["hold", "lock"])
def test_an_inner_release_is_refused_and_the_hold_goes_on(
    using, by, interrupted, by_signal, in_other_thread
):
    """It can be released later, and is renewed until then.

    ``lock.release()`` in a signal handler does not forget the hold.
    """
    errors, lock = [], db_lock("stock:7", using=using)
    hold = lock.acquire()
    release = hold.release if by == "hold" else lock.release

    def inner():
        try:
            release()
        except LockBackendError as error:
            errors.append(error)

    interrupted(by_signal(inner), using)
    with db_lock("stock:8", using=using):
        assert len(errors) == 2
        assert hold.held
        assert lock.held()
        hold.check()
    release()
    assert in_other_thread(is_free, "stock:7", using=using)


@USING
def test_a_block_that_a_finalizer_ends_in_a_request_frees_its_key(
    using, interrupted, until, is_busy
):
    """The garbage collector closes a generator in the middle of a request.

    Its block cannot be left later.
    """

    def work():
        with db_lock("stock:7", using=using):
            yield

    steps = [work()]
    next(steps[0])
    interrupted(by_finalizer(steps.clear), using)
    with db_lock("stock:8", using=using):
        pass
    assert steps == []
    until(lambda: not is_busy("stock:7", using), 5)


@pytest.mark.front
def test_a_finalizer_in_a_renewal_does_not_stop_renewals(interrupted, until):
    """The garbage collector may run in the background threads of dlocks."""
    errors, using = [], "stopping pessimistic"

    def inner():
        try:
            db_lock("other", using=using).acquire()
        except LockBackendError:
            errors.append(threading.current_thread().name)

    with db_lock("stock:7", using=using, ttl=0.9) as hold:
        interrupted(by_finalizer(inner), using)
        until(lambda: len(errors) == 2)
        await_renewal(hold)
        hold.check()
    assert "MainThread" not in errors


@for_each("using", ["default", "optimistic", "insert", "memory"])
def test_a_lock_in_a_signal_handler_harms_no_lock_that_it_interrupts(
    using, handled, in_other_thread
):
    """Signals arrive at random moments. The inner lock works, or is refused."""
    outcomes, at_work = [], []
    other, lock = db_lock("other", using=using), db_lock("stock:7", using=using)

    def handler(*_):
        # The next signal must not acquire the key in the middle of this acquisition. If
        # it were blocked in this thread alone, another thread would receive it, and
        # Python would call the handler here all the same.
        if not at_work:
            at_work.append(True)
            use_other()
            at_work.clear()

    def use_other():
        try:
            found = other.try_acquire()
            outcomes.append(found is not None)
            if found is not None:
                found.release()
        except LockBackendError as error:
            assert "signal handler" in str(error), error
            outcomes.append("refused")

    with lock:
        pass
    began = time.monotonic()
    with lock:
        pass
    usual = time.monotonic() - began
    handled(signal.SIGALRM, handler)
    try:
        for _ in range(volume(150)):
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, usual))
            with lock as hold:
                hold.check()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    # A caller cannot be refused the key by itself.
    assert False not in outcomes
    assert {True, "refused"} & set(outcomes)
    assert in_other_thread(is_free, "stock:7", "other", using=using)


@pytest.mark.engine("postgresql", "mariadb", "mysql")
def test_a_lock_in_a_signal_handler_harms_no_query_that_it_interrupts(handled):
    """The query gets its own reply, and the connection stays open."""
    outcomes = []
    sleep = "pg_sleep" if connection.vendor == "postgresql" else "SLEEP"

    def handler(*_):
        try:
            with db_lock("other"):
                outcomes.append("granted")
        except LockBackendError as error:
            outcomes.append(str(error))

    with db_lock("other"):
        pass
    session = connection.connection
    handled(signal.SIGALRM, handler)
    try:
        for number in range(10):
            signal.setitimer(signal.ITIMER_REAL, 0.005)
            with connection.cursor() as cursor:
                cursor.execute(f"SELECT {number}, {sleep}(0.02)")
                assert cursor.fetchone()[0] == number
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert connection.connection is session
    assert len(outcomes) == 10
    with db_lock("other"):
        pass
