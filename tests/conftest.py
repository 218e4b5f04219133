from __future__ import annotations

import contextlib
import inspect
import os
import re
import secrets
import threading
import zlib

import pytest
from asgiref.sync import async_to_sync
from django.db import OperationalError, connection, connections

from dlocks.backends.database import DatabaseBackend
from dlocks.conf import backends
from dlocks.holds import holds_by_caller
from dlocks.keeper import keeper
from tests import browser as chromium
from tests.processes import Worker, whereabouts
from tests.timing import TooLateError, eventually, witness


def pytest_configure(config):
    # Where the package is not installed, nobody has loaded its plugin.
    if not config.pluginmanager.has_plugin("dlocks"):
        config.pluginmanager.import_plugin("dlocks.pytest_plugin")
    witness.start()


def pytest_addoption(parser):
    parser.addoption("--shard", default="1/1", help="run one part of the tests only, as in 2/3: the second of three")


def pytest_collection_modifyitems(config, items):
    """Leave out, visibly, the tests that are about another engine, or in another shard."""
    engine = connection.settings_dict["ENGINE"].rsplit(".", 1)[-1]
    vendor = {"sqlite3": "sqlite", "mysql": "mariadb"}.get(engine, engine)
    shard, shards = map(int, config.getoption("shard").split("/"))
    keep, leave = [], []
    for item in items:
        marker = item.get_closest_marker("engine")
        engines = set(marker.args) if marker else {"sqlite", "postgresql", "mariadb"}
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(isinstance(value, str) and value in ("memory", "dummy") for value in parameters):
            # No database has a part in it.
            engines &= {"sqlite"}
        here = zlib.crc32(item.nodeid.encode()) % shards == shard - 1
        (keep if here and vendor in engines else leave).append(item)
    if leave:
        config.hook.pytest_deselected(items=leave)
        items[:] = keep


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run coroutine tests as Django does, each in a new loop: sync code of theirs runs in this thread."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    async_to_sync(pyfuncitem.obj, force_new_loop=True)(**arguments)
    return True


# How a program that does nothing wrong ends on a machine that stood still.
LATE = {"LockLost", "LockTimeout", "NotYetError", "TimeoutError", "TimeoutExpired"}
failed = pytest.StashKey[bool]()


def error_of(excinfo):
    """Return the name of an error and what it says; of a process's, which comes as its traceback, the last line."""
    if excinfo.type is RuntimeError:
        name, _, said = str(excinfo.value).rstrip().rpartition("\n")[2].partition(": ")
        return name.rpartition(".")[2], said
    return excinfo.typename.rpartition(".")[2], str(excinfo.value)


@pytest.hookimpl(specname="pytest_runtest_makereport")
def pytest_call_it_too_late(item, call):
    """Call a failure late that looks like one, if the machine has been seen to stand still meanwhile."""
    if call.when == "call":
        item.stash[failed] = call.excinfo is not None
        if call.excinfo is not None and (still := witness.longest(call.duration)):
            name, said = error_of(call.excinfo)
            if name in LATE:
                error = TooLateError(f"The machine stood still for {still:.1f} s: {name}: {said}")
                call.excinfo = pytest.ExceptionInfo.from_exception(error.with_traceback(call.excinfo.tb))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Say of a test that failed where the processes were that it has talked to."""
    report = yield
    if report.when == "call" and report.failed and (lines := [*whereabouts(), *open_transactions()]):
        report.sections.append(("Processes at work", "\n".join(lines)))
        _seen.extend(lines)
    return report


def open_transactions():
    """Return a line for each transaction that is open on MariaDB, with what it has locked."""
    lines = []
    # Of no use to a test that failed for another reason: a server that is down, say.
    with contextlib.suppress(Exception):
        if connection.vendor == "mysql":
            import MySQLdb

            there = connection.settings_dict
            server = MySQLdb.connect(host=there["HOST"], port=int(there["PORT"]), user=there["USER"], connect_timeout=5)
            with contextlib.closing(server), server.cursor() as cursor:
                cursor.execute(
                    "SELECT trx_mysql_thread_id, trx_started, trx_state, trx_rows_locked, trx_rows_modified, command,"
                    " time, info FROM information_schema.innodb_trx LEFT JOIN information_schema.processlist"
                    " ON id = trx_mysql_thread_id"
                )
                lines = [f"process of the server, in a transaction: {row}" for row in cursor.fetchall()]
    return lines


def pytest_terminal_summary(terminalreporter):
    if witness.stops:
        longest = max(late for _ended, late in witness.stops)
        terminalreporter.write_line(f"This machine stood still {len(witness.stops)} times, for up to {longest:.1f} s.")
    for line in _seen:
        terminalreporter.write_line(line)


_seen: list[str] = []


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup):
    # The processes that tests start use this test database.
    os.environ["DLOCKS_TEST_NAME"] = str(connection.settings_dict["NAME"])
    return django_db_setup


# TRUNCATE makes new files for a table and each of its indexes, DELETE costs nothing where there is hardly a row.
FLUSH = """
DO $$
DECLARE name text;
BEGIN
    SET LOCAL session_replication_role = replica;
    -- As TRUNCATE would, it waits for who is still writing.
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


@pytest.fixture(scope="session", autouse=True)
def flush_tries_again():
    """
    Empty the tables again where that met a process which had still been looking after its line.

    It takes the tables in an order of its own, and a step of the line takes two of them: the server ends one of the
    two, as servers do, and says which.
    """
    kind = type(connection.ops)
    flush = kind.execute_sql_flush

    def patiently(self, sql_list):
        if connection.vendor == "postgresql":
            names = re.findall(r'"\w+"', " ".join(sql_list))
            texts = ", ".join(f"'{name}'" for name in names)
            sql_list = [FLUSH.format(tables=", ".join(names), names=texts)]
        for _ in range(4):
            try:
                return flush(self, sql_list)
            except OperationalError as error:
                if "deadlock" not in str(error).lower():
                    raise
        return flush(self, sql_list)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "execute_sql_flush", patiently)
        yield


@pytest.fixture
def has_failed(request):
    """Return a function that tells whether the test has failed: what it left behind says nothing more then."""
    return lambda: request.node.stash.get(failed, False)


@pytest.fixture(autouse=True)
def nothing_left_behind(has_failed):
    """Every test leaves the keeper without holds, and what it has seen of crowds is no hint to the next."""
    yield
    for backend in backends._backends.values():
        if isinstance(backend, DatabaseBackend):
            backend._crowded.clear()
    left = keeper.holds
    # They are told of once.
    keeper._kept.clear()
    keeper._left.clear()
    # A test that failed keeps its own by its traceback, and the next, or it once more, would enter them.
    holds_by_caller.clear()
    assert not left or has_failed(), "a hold was left"


@pytest.fixture(scope="session")
def _pool(django_db_setup):
    workers: list[Worker] = []
    yield workers
    for worker in workers:
        worker.close()


@pytest.fixture
def workers(_pool, transactional_db):
    """
    Return a function that gives so many processes, on this test's database, kept for the next test.

    Every second one is as if it were on another machine.
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
        return _pool[:number]

    yield get
    # One that a failed test has left in a transaction would keep the tables from being emptied.
    bury()


@pytest.fixture
def doomed(transactional_db):
    """Return a function that gives a process to kill or stop."""
    started: list[Worker] = []

    def get(*, far: bool = False, **environment: str) -> Worker:
        started.append(Worker(far=far, **environment))
        return started[-1]

    yield get
    for worker in started:
        worker.kill()


@pytest.fixture
def elsewhere():
    """Return a function that calls another one in a thread of its own, with its own connection; its result."""

    def call(function, *args, **kwargs):
        outcome = []

        def run():
            try:
                outcome.append((function(*args, **kwargs), None))
            except BaseException as error:
                outcome.append((None, error))
            finally:
                connections.close_all()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(60)
        assert outcome, "the thread did not end"
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    return call


@pytest.fixture
def until():
    """Return a function that waits for a state, not for a time."""
    return lambda condition, seconds=10.0: eventually(condition, seconds)


@pytest.fixture
def in_line(until):
    """Return a function that waits until so many stand in line for a key."""

    def wait(number, key="stock:7"):
        until(lambda: backends["default"].waiting(key) == number)

    return wait


@pytest.fixture
def channel():
    """Return a channel's name that no other suite has: those of all engines run on one machine, side by side."""
    return f"dlocks_test_{secrets.token_hex(8)}"


@pytest.fixture
def threads(has_failed):
    """
    Return a function that starts a thread with its own connection, joined at the end; its result is appended.

    Who joins a thread gets its error.
    """
    started = []

    class Thread(threading.Thread):
        def __init__(self, function):
            super().__init__(daemon=True)
            self.results, self._function, self._error = [], function, None

        def run(self):
            try:
                self.results.append(self._function())
            except BaseException as error:
                self._error = error
            finally:
                connections.close_all()

        def join(self, timeout=None):
            super().join(timeout)
            error, self._error = self._error, None
            if error is not None:
                raise error

    def start(function):
        started.append(Thread(function))
        started[-1].start()
        return started[-1]

    yield start
    errors = []
    for thread in started:
        try:
            thread.join(60)
        except BaseException as error:
            errors.append(error)
        assert not thread.is_alive()
    # It is the test's own failure that is of interest, where it failed.
    if errors and not has_failed():
        raise errors[0]


@pytest.fixture(scope="session")
def _chromium():
    yield
    chromium.stop()


@pytest.fixture
def browser(_chromium, live_server):
    """Return a browser that visits this test's server: ``browser.page(client)``, ``browser.expect(…)``."""
    with chromium.Browser(live_server.url) as browser:
        yield browser


@pytest.fixture
def is_busy(elsewhere):
    """Return a function that tells whether somebody else cannot have the key now."""

    from dlocks import db_lock

    def attempt(key, using):
        found = db_lock(key, using=using).try_acquire()
        if found is not None:
            found.release()
        return found is None

    def ask(key="stock:7", using="default"):
        return elsewhere(attempt, key, using)

    return ask
