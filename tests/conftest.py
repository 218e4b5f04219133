from __future__ import annotations

import contextlib
import fcntl
import gc
import inspect
import os
import queue
import re
import secrets
import tempfile
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
from asgiref.sync import async_to_sync
from django.core.management.color import no_style
from django.core.signals import setting_changed
from django.db import OperationalError, connection, connections
from django.dispatch import receiver
from django.test import TransactionTestCase

from dlocks.testing import undo_shutdown
from tests import browser as chromium
from tests.internals import (
    DatabaseBackend,
    backends,
    callers,
    history_buffers,
    keeper,
    notify,
)
from tests.processes import Worker, disconnect, stack_dumps
from tests.settings import ENGINE
from tests.timing import NotYetError, TooLateError, eventually, witness


def pytest_configure(config):
    # pytest loads the plugin by itself only where the package is installed.
    if not config.pluginmanager.has_plugin("dlocks"):
        config.pluginmanager.import_plugin("dlocks.pytest_plugin")
    witness.start()


@receiver(setting_changed)
def _open_new_pools(*, setting, **_):
    """Close the pools, whose sessions keep the time zone of their beginning."""
    if setting not in {"USE_TZ", "TIME_ZONE"}:
        return
    for wrapper in connections.all(initialized_only=True):
        if "pool" in wrapper.settings_dict["OPTIONS"] and not wrapper.in_atomic_block:
            wrapper.close()
            wrapper.close_pool()


def pytest_addoption(parser):
    parser.addoption(
        "--whole",
        action="store_true",
        help="leave out what the whole suite leaves to other engines or tasks",
    )


ENGINES = frozenset({"sqlite", "postgresql", "mariadb", "mysql"})


def engines_of(item, whole):
    """Return the engines of a test. The closest marker says which.

    A test without a marker runs on every engine. So does a test of the front, or of a
    driver, if it is asked for by the arguments of tests/run.py.
    """
    for marker in item.iter_markers():
        if marker.name == "engine":
            return frozenset(marker.args)
        if marker.name == "front" and whole:
            return frozenset({"sqlite"})
        if marker.name == "driver" and whole:
            return ENGINES - {"mysql"}
        if marker.name == "holds" and whole:
            return frozenset({"sqlite", "postgresql"})
        if marker.name == "whole" and whole:
            return frozenset(marker.args)
        if marker.name in {"front", "driver", "holds", "whole", "storage"}:
            break
    return ENGINES


def pytest_collection_modifyitems(config, items):
    """Deselect the tests that do not run on this engine, or not in the whole suite."""
    whole = config.getoption("whole")
    keep, leave = [], []
    for item in items:
        engines = engines_of(item, whole)
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(
            isinstance(value, str) and value in ("memory", "dummy")
            for value in parameters
        ):
            # These backends use no database, so one engine is enough.
            engines &= {"sqlite"}
        if item.get_closest_marker("psycopg3") and find_spec("psycopg") is None:
            engines = engines - {"postgresql"}
        left_out = whole and (
            item.get_closest_marker("nightly")
            or (
                item.get_closest_marker("pages")
                and not item.get_closest_marker("smoke")
            )
        )
        (keep if ENGINE in engines and not left_out else leave).append(item)
    if leave:
        config.hook.pytest_deselected(items=leave)
        items[:] = keep


def pytest_ignore_collect(collection_path):
    """Do not import a file if all of its tests are for other engines."""
    if collection_path.suffix == ".py":
        text = collection_path.read_text()
        marker = re.search(r"^pytestmark = .*engine\((.*)\)", text, re.MULTILINE)
        return True if marker and f'"{ENGINE}"' not in marker[1] else None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Let one process of a run collect before all others.

    In a fresh clone it compiles the tests, and the others use the result.
    """
    path = Path(tempfile.gettempdir(), f"dlocks-collected-{os.getuid()}")
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if file.seek(0, os.SEEK_END):
            fcntl.flock(file, fcntl.LOCK_UN)
        result = yield
        if session.testscollected:
            file.write("yes")
        return result


def pytest_collection_finish():
    """Exempt the objects of the collection from garbage collection.

    Many tests call ``gc.collect()``, which would visit thousands of tests each time.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a coroutine test as Django does, in a new event loop.

    The test's sync code runs in this thread.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {
        name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames
    }
    async_to_sync(pyfuncitem.obj, force_new_loop=True)(**arguments)
    return True


# Errors by which a correct program may end if the machine stops for a while.
LATE = {"LockLost", "LockTimeout", "NotYetError", "TimeoutError", "TimeoutExpired"}
failed = pytest.StashKey[bool]()


def error_of(excinfo):
    """Return the name and the message of an error.

    An error from a process arrives as its traceback. Its last line has both.
    """
    if excinfo.type is RuntimeError:
        name, _, said = str(excinfo.value).rstrip().rpartition("\n")[2].partition(": ")
        return name.rpartition(".")[2], said
    return excinfo.typename.rpartition(".")[2], str(excinfo.value)


@pytest.hookimpl(specname="pytest_runtest_makereport")
def pytest_call_it_too_late(item, call):
    """Turn a timing failure into TooLateError if the machine stalled."""
    if call.when == "call":
        item.stash[failed] = call.excinfo is not None
        if call.excinfo is not None and (still := witness.longest(call.duration)):
            name, said = error_of(call.excinfo)
            if name in LATE:
                error = TooLateError(
                    f"The machine stalled for {still:.1f} s: {name}: {said}"
                )
                call.excinfo = pytest.ExceptionInfo.from_exception(
                    error.with_traceback(call.excinfo.tb)
                )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Add the stacks of the processes to the report of a failed test."""
    report = yield
    if (
        report.when == "call"
        and report.failed
        and (lines := [*stack_dumps(), *open_transactions()])
    ):
        report.sections.append(("Processes at work", "\n".join(lines)))
        _seen.extend(lines)
    return report


def open_transactions():
    """Return one line per open transaction on MariaDB or MySQL.

    Each line includes the number of its row locks.
    """
    lines = []
    # The query fails if the server is down, and the test failed for another reason.
    with contextlib.suppress(Exception):
        if connection.vendor == "mysql":
            import MySQLdb

            there = connection.settings_dict
            server = MySQLdb.connect(
                host=there["HOST"],
                port=int(there["PORT"]),
                user=there["USER"],
                connect_timeout=5,
            )
            with contextlib.closing(server), server.cursor() as cursor:
                cursor.execute(
                    "SELECT trx_mysql_thread_id, trx_started, trx_state,"
                    " trx_rows_locked, trx_rows_modified, command, time, info FROM"
                    " information_schema.innodb_trx LEFT JOIN"
                    " information_schema.processlist ON id = trx_mysql_thread_id"
                )
                lines = [
                    f"process of the server, in a transaction: {row}"
                    for row in cursor.fetchall()
                ]
    return lines


def pytest_sessionfinish(session):
    """Pass what the summary says from a worker of pytest-xdist to its controller."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["stalls"] = [late for _ended, late in witness.stops]
        session.config.workeroutput["processes"] = _seen


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    # A worker that crashed has no output.
    output = getattr(node, "workeroutput", {})
    _stalls.extend(output.get("stalls", []))
    _seen.extend(output.get("processes", []))


def pytest_terminal_summary(terminalreporter):
    stalls = [*_stalls, *(late for _ended, late in witness.stops)]
    if stalls:
        terminalreporter.write_line(
            f"This machine stalled {len(stalls)} times, for up to {max(stalls):.1f} s."
        )
    for line in _seen:
        terminalreporter.write_line(line)


# What the workers of pytest-xdist have reported: the duration of each stall in seconds,
# and the stacks of processes.
_stalls: list[float] = []
_seen: list[str] = []


@pytest.fixture(scope="session", autouse=True)
def without_width():
    """Remove the width of the terminal, which pytest-xdist sets.

    Commands cut their lines to it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)
        yield


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup):
    # Processes that are started by tests use this test database.
    os.environ["DLOCKS_TEST_NAME"] = str(connection.settings_dict["NAME"])
    return django_db_setup


# TRUNCATE creates new files for a table and each of its indexes. DELETE is cheap for a
# table with few rows.
FLUSH = """
DO $$
DECLARE name text;
BEGIN
    SET LOCAL session_replication_role = replica;
    -- Like TRUNCATE, it waits for transactions that are still writing.
    LOCK TABLE {tables} IN SHARE ROW EXCLUSIVE MODE;
    FOREACH name IN ARRAY ARRAY[{names}] LOOP
        IF pg_relation_size(name::regclass) > 200000 THEN
            EXECUTE 'TRUNCATE ' || name || ' CASCADE';
        ELSE
            EXECUTE 'DELETE FROM ' || name;
        END IF;
    END LOOP;
END $$
"""


# Rows that migrations create. Django's flush would delete them and create them again,
# which takes longer than most tests.
OF_MIGRATIONS = {"django_content_type", "auth_permission"}


def flush(test):
    """Delete the rows that a test has written, as Django does after it.

    The flush and a step of the queue lock some tables in different orders. The server
    then ends one of the two transactions and reports a deadlock. So the flush is
    repeated.
    """
    for alias in test._databases_names(include_mirrors=False):
        wrapper = connections[alias]
        tables = wrapper.introspection.django_table_names(
            only_existing=True, include_views=False
        )
        tables = [name for name in tables if name not in OF_MIGRATIONS]
        if wrapper.vendor == "postgresql":
            names = [wrapper.ops.quote_name(name) for name in tables]
            texts = ", ".join(f"'{name}'" for name in names)
            statements = [FLUSH.format(tables=", ".join(names), names=texts)]
        else:
            statements = wrapper.ops.sql_flush(no_style(), tables)
        for tries_left in reversed(range(5)):
            try:
                wrapper.ops.execute_sql_flush(statements)
                break
            except OperationalError as error:
                if not tries_left or "deadlock" not in str(error).lower():
                    raise


@pytest.fixture(scope="session", autouse=True)
def flush_quickly():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransactionTestCase, "_fixture_teardown", flush)
        # A new session on a server takes longer than many tests. SQLite has none.
        patch.setattr(
            TransactionTestCase,
            "_should_reload_connections",
            lambda test: ENGINE == "sqlite",
        )
        yield


@pytest.fixture
def has_failed(request):
    """Return a function that returns whether the test has failed.

    After a failure, the holds that the test left behind mean nothing.
    """
    return lambda: request.node.stash.get(failed, False)


@pytest.fixture(autouse=True)
def nothing_left_behind(has_failed):
    """Check that each test leaves no holds, and reset the hints about contention."""
    yield
    for backend in backends._backends.values():
        if isinstance(backend, DatabaseBackend):
            backend.contended.clear()
    for buffer in history_buffers.values():
        # They would be written during the next test.
        buffer._records.clear()
    for one in connections.all(initialized_only=True):
        # A SimpleTestCase leaves Django's own method in the connection, where it hides
        # the method of a class that a later test replaces.
        if getattr(vars(one).get("cursor"), "__self__", None) is one:
            del one.cursor
    undo_shutdown()
    if keeper.holds and not has_failed():
        # A thread of dlocks that has released a key may not have forgotten its hold.
        with contextlib.suppress(NotYetError):
            eventually(lambda: not keeper.holds, 2)
    left = keeper.holds
    # A hold that was left is reported only once.
    keeper._holds.clear()
    keeper._left.clear()
    # The traceback of a failed test keeps its holds alive. The next test, or a rerun of
    # this one, would otherwise reenter them.
    callers.reset()
    assert not left or has_failed(), "a hold was left"


@pytest.fixture(scope="session")
def _pool(django_db_setup):
    workers: list[Worker] = []
    yield workers
    for worker in workers:
        worker.close()


@pytest.fixture
def workers(_pool, transactional_db):
    """Return a function that returns a number of processes on the test database.

    The processes are reused by later tests. Every second one behaves as if it were on
    another host.
    """

    def bury() -> None:
        for place, worker in enumerate(_pool):
            if not (worker.is_idle and worker.process.is_alive()):
                worker.kill()
                _pool[place] = Worker(far=place % 2 == 1)

    def get(number: int) -> list[Worker]:
        bury()
        while len(_pool) < number:
            _pool.append(Worker(far=len(_pool) % 2 == 1))
        chosen = _pool[:number]
        for worker in chosen:
            worker.start(disconnect)
        for worker in chosen:
            worker.hear()
        return chosen

    yield get
    # A process that a failed test has left in a transaction would block the flush of
    # the tables.
    bury()


@pytest.fixture
def worker(workers):
    """Return one of these processes."""
    return workers(1)[0]


@pytest.fixture
def doomed(transactional_db):
    """Return a function that starts a process which the test may kill or stop."""
    started: list[Worker] = []

    def get(*, far: bool = False, **environment: str) -> Worker:
        started.append(Worker(far=far, **environment))
        return started[-1]

    yield get
    for worker in started:
        worker.kill()


@pytest.fixture
def count_together(tmp_path):
    """Return a function that counts in several processes under a lock.

    No increment may be lost, and tokens must grow. It returns those of each process,
    and calls another function every few moments.
    """

    def count(crowd, times, meanwhile=None, every=0.15, **policy):
        from tests import jobs

        path = tmp_path / "counter"
        path.write_text("0 0")
        policy = {"times": times, "scope": "lease", "timeout": 60, **policy}
        for one in crowd:
            # It begins only when all have started and are connected.
            one.call(jobs.try_once, "warm", using=policy["using"])
        for one in crowd:
            one.start(jobs.count, str(path), "count", **policy)
        while meanwhile and not all(one.pipe.poll(every) for one in crowd):
            meanwhile()
        tokens = [one.hear() for one in crowd]
        every = [token for mine in tokens for token in mine]
        assert path.read_text() == f"{times * len(crowd)} {max(every)}"
        assert len(set(every)) == len(every)
        return tokens

    return count


@pytest.fixture
def in_other_thread():
    """Return a function that calls another one in a new thread.

    The thread has its own connection. The function returns the result of the call or
    raises its error. The thread lives until the end of the test, because its holds end
    with it.
    """
    over = threading.Event()

    def call(function, *args, **kwargs):
        outcomes = queue.SimpleQueue()

        def run():
            try:
                outcome = function(*args, **kwargs), None
            except BaseException as error:
                outcome = None, error
            finally:
                connections.close_all()
            outcomes.put(outcome)
            del outcome
            over.wait()

        threading.Thread(target=run, daemon=True).start()
        result, error = outcomes.get(timeout=60)
        if error is not None:
            raise error
        return result

    yield call
    over.set()


@pytest.fixture
def until():
    """Return a function that waits for a condition instead of a fixed time."""
    return lambda condition, seconds=10.0: eventually(condition, seconds)


@pytest.fixture
def waiting():
    """Return a function that returns the number of waiters of a key."""
    return lambda key, using="default": backends[using].waiting(key)


@pytest.fixture
def all_released(until):
    """Return a function that waits until this process holds nothing any more."""
    return lambda: until(lambda: not keeper.holds)


@pytest.fixture
def in_queue(until, waiting):
    """Return a function that waits until a key has that number of waiters."""

    def wait(number, key="stock:7"):
        until(lambda: waiting(key) == number)

    return wait


@pytest.fixture
def channel():
    """Return a channel name that is unique among suites.

    The suites of all engines run side by side on one machine.
    """
    return f"{notify.this_host()}dlocks_test_{secrets.token_hex(8)}"


@pytest.fixture
def threads(has_failed):
    """Return a function that starts a thread with its own connection.

    The result of the thread is appended to its ``results``. ``join()`` raises the error
    of the thread. At the end of the test all threads are joined.
    """
    started = []

    class Thread(threading.Thread):
        def __init__(self, function):
            super().__init__(daemon=True)
            self.results, self._function, self._error = [], function, None
            self.done = threading.Event()

        def run(self):
            try:
                self.results.append(self._function())
            except BaseException as error:
                self._error = error
            finally:
                self.done.set()
                connections.close_all()

        def join(self, timeout=None):
            super().join(timeout)
            error, self._error = self._error, None
            if error is not None:
                raise error

    def start(function):
        # The thread may start another one at once.
        thread = Thread(function)
        started.append(thread)
        thread.start()
        return thread

    yield start
    errors = []
    for thread in started:
        try:
            thread.join(60)
        except BaseException as error:
            errors.append(error)
        assert not thread.is_alive()
    # If the test itself has failed, its own error is the useful one.
    if errors and not has_failed():
        raise errors[0]


@pytest.fixture
def paused(threads):
    """Return a function that runs a generator function in a thread up to its ``yield``.

    It returns a function that lets the thread go on and waits for its end. At the
    latest, the thread goes on at the end of the test.
    """
    ends = []

    def start(steps):
        reached, end = threading.Event(), threading.Event()
        ends.append(end)

        def run():
            for _ in steps():
                reached.set()
                assert end.wait(60)

        thread = threads(run)
        while not reached.wait(0.01):
            if thread.done.is_set():
                thread.join()
                raise AssertionError("the thread has ended without a pause")

        def go_on():
            end.set()
            thread.join(30)

        return go_on

    yield start
    for end in ends:
        end.set()


@pytest.fixture(scope="session")
def _chromium():
    yield
    chromium.stop()


@pytest.fixture
def browser(_chromium, live_server):
    """Return a browser for this test's live server.

    Use ``browser.page(client)`` and ``browser.expect(locator)``.
    """
    with chromium.Browser(live_server.url) as browser:
        yield browser


@pytest.fixture
def is_busy(in_other_thread):
    """Return a function that returns whether another caller finds the key held."""

    from dlocks import db_lock

    def attempt(key, using):
        found = db_lock(key, using=using).try_acquire()
        if found is not None:
            found.release()
        return found is None

    def ask(key="stock:7", using="default"):
        return in_other_thread(attempt, key, using)

    return ask


@pytest.fixture
def signalled():
    """Return a function that collects what some signals report.

    It returns a list of each signal with its hold or lock. Its receiver may fail.
    """
    connected = []

    def collect(*dispatchers, error=None):
        seen = []

        def receive(signal, **kwargs):
            seen.append((signal, kwargs.get("hold") or kwargs.get("lock")))
            if error is not None:
                raise error

        for dispatcher in dispatchers:
            dispatcher.connect(receive)
            connected.append((dispatcher, receive))
        return seen

    yield collect
    for dispatcher, receive in connected:
        dispatcher.disconnect(receive)
