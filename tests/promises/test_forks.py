"""A process never uses a connection that another process opened."""

import gc
import json
import os
import queue
import signal
import threading
import time
import traceback
import warnings
from contextlib import nullcontext

import pytest
from django.db import Error, connection, transaction
from django.utils.module_loading import import_string

from dlocks import LockBackendError, db_lock, lock_acquired
from tests.for_each import for_each
from tests.models import Counter
from tests.promises.received import received
from tests.scripts import run_python, run_script

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.driver]


def forked():
    with warnings.catch_warnings():
        # Python 3.12 and newer warn about forking a process with threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def in_child(function):
    """Call a function in a forked child, and return the text that it returned."""
    reading, writing = os.pipe()
    if (child := forked()) == 0:
        answer = ""
        try:
            answer = str(function())
        except BaseException:
            answer = traceback.format_exc()
        finally:
            os.write(writing, answer.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


def session():
    """Return the server's number of this session, or that of an SQLite connection."""
    if connection.vendor == "sqlite":
        connection.ensure_connection()
        return str(id(connection.connection))
    name = "pg_backend_pid" if connection.vendor == "postgresql" else "CONNECTION_ID"
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {name}()")
        return str(cursor.fetchone()[0])


def request_in_child(pipe):
    """Return the sessions before the fork, in the child, and after it."""

    def child():
        # The first request after the fork is one of dlocks.
        with db_lock("child", timeout=5), db_lock("other"):
            assert db_lock("stock:7").try_acquire() is None
            return session()

    with db_lock("parent") as hold:
        before = session()
        found = in_child(child)
        hold.renew()
        return before, found, session()


def test_a_child_asks_on_a_connection_of_its_own(doomed, in_other_thread):
    """Parent and child would read each other's replies, and be granted a held key.

    The parent keeps its session.
    """
    hold = in_other_thread(db_lock("stock:7", ttl=60).acquire)
    before, child, after = doomed().call(request_in_child)
    in_other_thread(hold.release)
    assert child.isdigit(), child
    assert child != before == after


@pytest.mark.psycopg3
@pytest.mark.engine("postgresql")
def test_a_child_takes_no_connection_from_the_pool_of_its_parent(
    doomed, in_other_thread
):
    """The idle connections of the pool are inherited as well."""
    hold = in_other_thread(db_lock("stock:7", ttl=60).acquire)
    process = doomed(DLOCKS_TEST_OPTIONS='{"pool": true}')
    idle, before, child, after = process.call(return_to_pool_and_fork)
    in_other_thread(hold.release)
    assert child.isdigit(), child
    assert child not in {idle, before, after}


def return_to_pool_and_fork(pipe):
    """Return the sessions, and that of an idle connection, which is first."""
    idle = queue.SimpleQueue()

    def use_a_second():
        idle.put(session())
        connection.close()

    connection.ensure_connection()
    assert connection.pool is not None
    thread = threading.Thread(target=use_a_second)
    thread.start()
    thread.join(30)
    return idle.get(timeout=30), *request_in_child(pipe)


def write_in_child(pipe):
    """Fork in a transaction that the parent rolls back, and leave it in the child."""

    def child():
        outcomes = []
        for attempt in (
            Counter.objects.create,
            db_lock("child").acquire,
            db_lock("parent").acquire,
        ):
            try:
                attempt()
            except (Error, LockBackendError) as error:
                outcomes.append(type(error).__name__)
        return outcomes

    answer = None
    parent = os.getpid()
    reading, writing = os.pipe()
    try:
        with transaction.atomic():
            lock = db_lock("parent")
            lock.acquire()
            Counter.objects.create()
            if (pid := forked()) == 0:
                answer = child()
            else:
                os.waitpid(pid, 0)
                transaction.set_rollback(True)
        if os.getpid() != parent:
            # It has left the block without an error, and goes on outside of it.
            answer = f"{answer} {Counter.objects.count()}"
    except BaseException:
        answer = traceback.format_exc()
    finally:
        if os.getpid() != parent:
            os.write(writing, str(answer).encode())
            os._exit(0)
    return os.read(reading, 10_000).decode(), Counter.objects.count()


def test_a_child_cannot_commit_the_transaction_of_its_parent(doomed):
    """A statement in the block raises an error, and its end sends nothing.

    Afterwards the child uses a connection of its own.
    """
    answer, written = doomed().call(write_in_child)
    assert answer == "['ProgrammingError', 'LockBackendError', 'LockBackendError'] 0"
    assert written == 0


def wait_in_threads(pipe):
    """Fork while a thread waits, another one has a connection, and one renews.

    Return the child's answer, and the sessions of the idle thread before and after.
    """
    outcomes, has_forked = queue.SimpleQueue(), threading.Event()

    def idle():
        outcomes.put(session())
        has_forked.wait(60)
        outcomes.put(session())
        connection.close()

    def wait():
        with db_lock("parent", timeout=60):
            outcomes.put("granted")
        connection.close()

    def child():
        # A wrapper of Django is part of a reference cycle.
        gc.collect()
        with db_lock("child", timeout=5):
            return db_lock("parent", timeout=0.3).try_acquire()

    with db_lock("parent", using="brisk") as hold:
        with transaction.atomic(), db_lock("leased", scope="lease"):
            pass
        others = [threading.Thread(target=one) for one in (idle, wait)]
        for one in others:
            one.start()
        before = outcomes.get(timeout=30)
        while not hold.queue_length():
            time.sleep(0.01)
        answer = in_child(child)
        has_forked.set()
        after = outcomes.get(timeout=30)
        hold.renew()
    granted = outcomes.get(timeout=30)
    for one in others:
        one.join(30)
    return answer, before, after, granted


@pytest.mark.engine("postgresql", "mariadb", "mysql")
def test_a_child_ends_no_session_of_other_threads_of_its_parent(doomed):
    """This includes the sessions on which dlocks waits and renews.

    Python collects the connections of other threads in a child, and MySQL's driver
    then ends their sessions.
    """
    answer, before, after, granted = doomed().call(wait_in_threads)
    assert (answer, before, granted) == ("None", after, "granted")


class SlowBackend(import_string("dlocks.backends.memory.MemoryBackend")):
    """A backend whose first use, or change of a key, takes until the fork.

    This is so in the thread "slow" of the parent.
    """

    begun = threading.Event()
    forked = threading.Event()

    def __init__(self, alias, **options):
        super().__init__(alias, **options)
        usual = self.time
        self.wait_for_fork()
        self.time = lambda: self.wait_for_fork() or usual()

    def wait_for_fork(self):
        if threading.current_thread().name == "slow":
            self.begun.set()
            self.forked.wait(60)


def fork_beside_a_slow_thread(pipe, using, is_used_before):
    """Return what a child sees, and whether the thread of its parent had the key."""
    granted = queue.SimpleQueue()

    def take():
        with db_lock("stock:7", using="slow") as hold:
            granted.put(hold.held)

    def child():
        # A child that hangs would make the parent wait.
        signal.alarm(20)
        with db_lock("stock:7", using=using) as hold:
            return hold.held, db_lock("held", using=using).locked()

    with db_lock("held", using="slow") if is_used_before else nullcontext():
        thread = threading.Thread(target=take, name="slow")
        thread.start()
        assert SlowBackend.begun.wait(30)
        answer = in_child(child)
        SlowBackend.forked.set()
        thread.join(30)
    return answer, granted.get(timeout=30)


@pytest.mark.front
@for_each(
    "case", [("slow", False), ("memory", False), ("default", False), ("slow", True)]
)
def test_a_child_has_locks_in_memory_of_its_own(case, doomed):
    """They exclude the threads and tasks of one process.

    A thread of the parent uses the alias for the first time during the fork, or changes
    a key. The child may use the same alias or another one.
    """
    aliases = {"slow": {"BACKEND": "tests.promises.test_forks.SlowBackend"}}
    process = doomed(DLOCKS_TEST_ALIASES=json.dumps(aliases))
    found = process.call(fork_beside_a_slow_thread, *case)
    assert found == ("(True, False)", True)


ENDINGS = """
import os, sys
from django.db import connection
from dlocks import db_lock
from tests.promises.test_forks import session

with db_lock("parent"):
    before = session()
if os.fork() == 0:
    with db_lock("child", timeout=5):
        sys.exit(int(before == session()))
status = os.waitstatus_to_exitcode(os.wait()[1])
with db_lock("parent"):
    print(status, before == session())
"""


def test_the_ordinary_end_of_a_child_does_not_end_the_session_of_its_parent():
    """The drivers close all connections when Python ends."""
    done = run_script(ENDINGS)
    assert done.stdout == "0 True\n", done.stderr
    # Python 3.13 warns of unclosed connections, so stderr need not be empty.
    assert "Traceback" not in done.stderr


LOG = """
import os
from django.conf import settings
settings.configure(
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": "log.sqlite3",
            "OPTIONS": {"init_command": "PRAGMA journal_mode=WAL"},
        }
    },
    INSTALLED_APPS=["dlocks"],
)
import django
django.setup()
from django.core.management import call_command
from django.db import connection
from dlocks import db_lock

call_command("migrate", verbosity=0)
to_child, to_parent = os.pipe(), os.pipe()
if os.fork() == 0:
    db_lock("first").acquire()
    os.write(to_parent[1], b"1")
    os.read(to_child[0], 1)
    db_lock("second").acquire()
    os.write(to_parent[1], b"2")
    os.read(to_child[0], 1)
    os._exit(0)
os.read(to_parent[0], 1)
connection.close()
os.write(to_child[1], b"1")
os.read(to_parent[0], 1)
print(db_lock("first").locked(), db_lock("second").locked())
os.write(to_child[1], b"2")
os.wait()
"""


@pytest.mark.engine("sqlite")
def test_a_child_loses_no_key_when_its_parent_closes_an_sqlite_database(tmp_path):
    """SQLite deletes the write-ahead log at the last close that it knows of."""
    done = run_python("-c", LOG, cwd=tmp_path)
    assert done.stdout == "True True\n", done.stderr


@pytest.mark.front
@for_each("using", ["default", "memory"])
def test_a_child_that_leaves_the_acquisition_of_its_parent_frees_nothing(using):
    """A receiver forks, and an exception ends its child."""
    parent = os.getpid()

    def fork(**kwargs):
        if (child := forked()) == 0:
            raise SystemExit
        os.waitpid(child, 0)

    try:
        with received(lock_acquired, fork):
            hold = db_lock("stock:7", using=using).acquire()
    finally:
        if os.getpid() != parent:
            os._exit(0)
    hold.check()
    hold.release()
