"""The tests of CPython's own locks, run with the locks of dlocks.

The tests come with the interpreter, in its package ``test``. Some distributions leave
the package out, and then these tests are skipped. The classes of ``threading`` and
``asyncio`` that the tests use are replaced by classes with the same methods, which
acquire and release locks of dlocks.
"""

import asyncio
import functools
import inspect
import threading
import unittest
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from asgiref.sync import async_to_sync
from django.db import connections

from tests.promises import asyncio_locks, threading_locks

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.engine("sqlite", "postgresql"),
]

WITHOUT = "this Python comes without its package 'test'"
lock_tests = pytest.importorskip("test.lock_tests", reason=WITHOUT)
test_locks = pytest.importorskip("test.test_asyncio.test_locks", reason=WITHOUT)

# The tests that dlocks does not pass: the errors by which they fail, and the reasons.
BOUNDED = "permits are a limit, so a release without an acquisition is refused"
PRIVATE = "a private method of threading's locks, by which a child unlocks its copy"
STEPS = "counts waiters between two steps of the event loop, and a grant takes more"
DIFFERENCES = {
    "threading.Semaphore.test_release_unacquired": (ValueError, BOUNDED),
    "threading.Semaphore.test_repr": (ValueError, BOUNDED),
    "threading.Lock.test_at_fork_reinit": (AttributeError, PRIVATE),
    "asyncio.Semaphore.test_acquire_fifo_order_4": (AssertionError, STEPS),
}


def for_tests_of(library, **classes):
    """Run a test for each of CPython's tests of the classes of a library."""
    found = []
    for title, (base, attributes) in classes.items():
        case = type(base.__name__, (base,), attributes)
        for name in unittest.defaultTestLoader.getTestCaseNames(case):
            label = f"{library}.{title}.{name}"
            marks = []
            if label in DIFFERENCES:
                error, reason = DIFFERENCES[label]
                marks.append(pytest.mark.xfail(raises=error, reason=reason))
            found.append(pytest.param(case, name, id=label, marks=marks))
    return pytest.mark.parametrize(("case", "name"), found)


class Outcome(unittest.TestResult):
    """The outcome of one test, which raises the error of the test."""

    error = None

    def addError(self, test, error):  # noqa: N802 (as in unittest)
        self.error = self.error or error[1]

    addFailure = addError  # noqa: N815

    def addSkip(self, test, reason):  # noqa: N802
        self.error = unittest.SkipTest(reason)


def run(test):
    """Run a test, its clean-up too, and raise its error."""
    outcome = Outcome()
    test.run(outcome)
    if outcome.error is not None:
        raise outcome.error


class Threads:
    """The threads that a test of CPython starts.

    Each of them lives until the end of the test, because its holds end with it. It
    closes its connections as soon as its function returns.
    """

    def __init__(self):
        self._started, self._over = [], threading.Event()

    def start_new_thread(self, function, arguments):
        is_done = threading.Event()

        def run():
            try:
                function(*arguments)
            finally:
                connections.close_all()
                is_done.set()
            self._over.wait()

        thread = threading.Thread(target=run, daemon=True)
        self._started.append((thread, is_done))
        thread.start()

    @contextmanager
    def wait_threads_exit(self, timeout=None):
        yield
        for _, is_done in list(self._started):
            assert is_done.wait(30), "a function did not end"

    def threading_setup(self):
        return ()

    def threading_cleanup(self):
        """Leave the threads alive, until this test has released what they hold."""

    def end(self):
        self._over.set()
        for thread, _ in self._started:
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture
def threading_on_dlocks(monkeypatch, using):
    """Let the tests of ``threading`` use dlocks, and release what they leave."""
    holds, threads = [], Threads()
    monkeypatch.setattr(threading_locks.Primitive, "using", using)
    monkeypatch.setattr(threading_locks.Primitive, "holds", holds)
    monkeypatch.setattr(lock_tests, "start_new_thread", threads.start_new_thread)
    monkeypatch.setattr(lock_tests, "threading_helper", threads)
    monkeypatch.setattr(lock_tests, "TIMEOUT_MAX", threading_locks.TIMEOUT_MAX)
    replaced = {**vars(threading), "Lock": threading_locks.Lock}
    monkeypatch.setattr(lock_tests, "threading", SimpleNamespace(**replaced))
    # The pauses between two looks at a condition, which would double up to a second.
    patient = lock_tests.support.sleeping_retry
    hurried = functools.partial(patient, init_delay=0.001, max_delay=0.01)
    monkeypatch.setattr(lock_tests.support, "sleeping_retry", hurried)
    yield
    for hold in holds:
        while hold.held and hold.count:
            hold.release()
    threads.end()


@pytest.mark.parametrize("using", ["default", "memory"])
@for_tests_of(
    "threading",
    Lock=(lock_tests.LockTests, {"locktype": threading_locks.Lock}),
    RLock=(lock_tests.RLockTests, {"locktype": threading_locks.RLock}),
    Semaphore=(lock_tests.SemaphoreTests, {"semtype": threading_locks.Semaphore}),
    BoundedSemaphore=(
        lock_tests.BoundedSemaphoreTests,
        {"semtype": threading_locks.BoundedSemaphore},
    ),
    Condition=(
        lock_tests.ConditionTests,
        {"condtype": staticmethod(threading_locks.Condition)},
    ),
)
@pytest.mark.usefixtures("threading_on_dlocks")
def test_the_locks_pass_the_tests_of_threading(case, name):
    run(case(name))


@pytest.fixture
def asyncio_on_dlocks(monkeypatch, using):
    """Let the tests of ``asyncio`` use dlocks, and release what they leave."""
    made, primitive = [], asyncio_locks.Primitive
    monkeypatch.setattr(primitive, "using", using)
    monkeypatch.setattr(primitive, "made", made)
    names = ("Lock", "Semaphore", "BoundedSemaphore", "sleep")
    replaced = {name: getattr(asyncio_locks, name) for name in names}
    replaced = SimpleNamespace(**{**vars(asyncio), **replaced})
    monkeypatch.setattr(test_locks, "asyncio", replaced)
    with ThreadPoolExecutor(1) as primitive.thread:
        yield
        for one in made:
            one.end()
        primitive.thread.submit(connections.close_all)


@pytest.mark.parametrize("using", ["default", "memory"])
@for_tests_of(
    "asyncio",
    Lock=(test_locks.LockTests, {}),
    Semaphore=(test_locks.SemaphoreTests, {}),
)
@pytest.mark.usefixtures("asyncio_on_dlocks")
def test_the_locks_pass_the_tests_of_asyncio(case, name):
    test = case(name)
    if inspect.iscoroutinefunction(getattr(test, name)):
        # As Django runs a coroutine, with its sync code in this thread.
        setattr(test, name, async_to_sync(getattr(test, name)))
    run(test)
