"""dlocks' own connections commit, and getting one has a deadline."""

import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from asgiref.sync import async_to_sync
from django.apps import apps
from django.core.management import call_command
from django.db import connection, connections, transaction
from django.db.backends.signals import connection_created
from django.test import TestCase

from dlocks import LockError, LockTimeout, db_lock, db_rwlock, db_semaphore
from dlocks.testing import abandoned, held_elsewhere
from tests import jobs
from tests.processes import on_database
from tests.promises.received import received
from tests.servers import PgBouncer
from tests.settings import PORT
from tests.sync_and_async import Async, Sync
from tests.timing import in_time

pytestmark = [pytest.mark.driver, pytest.mark.django_db(transaction=True)]

SERVERS = pytest.mark.engine("postgresql", "mariadb")


# Without autocommit, as by "AUTOCOMMIT": False in DATABASES.


@pytest.fixture
def manual(doomed):
    """Return a process whose own connections never commit by themselves."""
    return doomed(
        **on_database(AUTOCOMMIT=False, OPTIONS=connection.settings_dict["OPTIONS"])
    )


def leases(**policy):
    """Return leases of every kind, by a name."""
    policy["scope"] = "lease"
    return {
        "one": db_lock("stock:1", **policy),
        "several": db_lock("stock:2", "stock:3", **policy),
        "permit": db_semaphore("stock:4", 1, **policy),
        "write": db_rwlock("stock:5", **policy).write(),
    }


def hold_leases(pipe, do):
    """Acquire all leases, hold them for as long as the test says, and release them."""
    held = []

    async def cycle():
        holds = [await do.ask(lock, "acquire") for lock in leases().values()]
        pipe.pause("held")
        held.extend(hold.held for hold in holds)
        for hold in holds:
            await do.ask(hold, "release")

    do.run(cycle())
    return held


@SERVERS
@pytest.mark.parametrize("do", [Sync(), Async()], ids=["sync", "async"])
def test_a_lease_survives_its_session_without_autocommit(do, manual, doomed):
    """No second caller gets a key while ``held`` is true.

    The sessions of dlocks commit each change, so the server undoes none of them when it
    ends a session. A release is visible to others at once.
    """
    before = doomed().call(jobs.other_sessions)
    manual.start(hold_leases, do)
    assert manual.hear() == "held"
    killer = doomed()
    assert killer.call(jobs.kill_other_sessions, but=before)
    for name, lock in leases(timeout=0).items():
        assert lock.try_acquire() is None, name
    manual.tell()
    assert manual.hear() == [True] * len(leases())
    for lock in leases(timeout=0).values():
        lock.acquire().release()


@SERVERS
def test_a_waiter_is_served_in_its_turn_without_autocommit(manual, until):
    """The queue of a key shows the waiter, and the release hands the key over."""
    with db_lock("stock:7") as hold:
        manual.start(jobs.wait_quietly, "stock:7", scope="lease", timeout=30)
        until(lambda: hold.queue_length() == 1)
    _, token = manual.hear()
    assert token > hold.token
    db_lock("stock:7", timeout=0).acquire().release()


def follow_the_advice(pipe):
    """Do what the errors advise, and return the errors."""
    errors = []

    def refused(action):
        try:
            action()
        except RuntimeError as error:
            errors.append(str(error))

    is_server = connection.vendor != "sqlite"
    lock = db_lock("stock:7", timeout=0)
    refused(lock.acquire)
    with transaction.atomic(), lock as hold:
        assert hold.scope == "transaction"
    transaction.commit()
    if is_server:
        with db_lock("stock:8", scope="lease", timeout=0) as hold:
            refused(hold.atomic().__enter__)
    else:
        refused(db_lock("stock:7", scope="lease", timeout=0).acquire)
    transaction.commit()
    transaction.set_autocommit(True)
    with lock as hold:
        assert hold.scope == "lease"
        with hold.atomic():
            pass
    return errors


def test_the_advice_about_autocommit_works(manual):
    """An error names what the caller can do, and each of that works."""
    errors = manual.call(follow_the_advice)
    assert len(errors) == 2
    for error in errors:
        assert "Remove 'AUTOCOMMIT' from DATABASES['default']" in error
        assert "transaction.set_autocommit(True, using='default')" in error
    assert "'with atomic()' or scope='lease'" in errors[0]


def leave_the_block(pipe):
    """Return whether a hold of an atomic block is held after it and after a commit."""
    with transaction.atomic():
        hold = db_lock("stock:7").acquire()
        inside = hold.held
    after = hold.held
    transaction.commit()
    return inside, after, hold.held


def test_a_hold_of_an_atomic_block_ends_with_it_without_autocommit(manual, is_busy):
    """Django does not report the commit, so nothing says that the key is held then."""
    assert manual.call(leave_the_block) == (True, False, False)
    assert not is_busy()


def check_and_clear(pipe):
    """Return what the check says, and whether ``clear_lock`` took effect."""
    errors = io.StringIO()
    call_command("check", stderr=errors)
    call_command("clear_lock", "stock:7", "--yes", stdout=io.StringIO())
    return errors.getvalue()


def test_a_check_and_the_commands_know_about_autocommit(manual):
    """``check`` warns, and ``clear_lock`` commits what it says that it did."""
    abandoned("stock:7")
    assert db_lock("stock:7").holder().stale
    said = manual.call(check_and_clear)
    assert said.count("(dlocks.W009) Database 'default' has 'AUTOCOMMIT': False") == 1
    assert db_lock("stock:7").holder() is None


# Deadlines.


def take_leases_in_transactions(pipe):
    """Acquire leases in transactions, which use all sessions of the pooler.

    Return the name of each error, and the duration in seconds.
    """
    policy = {"scope": "lease", "timeout": 0.5}
    one = db_lock("stock:1", **policy)
    attempts = [
        one.acquire,
        async_to_sync(one.aacquire),
        db_lock("stock:2", "stock:3", **policy).acquire,
        db_semaphore("stock:4", 2, **policy).acquire,
    ]
    barrier = threading.Barrier(len(attempts))

    def attempt(acquire):
        try:
            with transaction.atomic():
                with connection.cursor() as cursor:
                    cursor.execute("SELECT 1")
                barrier.wait(60)
                began = time.monotonic()
                try:
                    acquire()
                except LockError as error:
                    return type(error).__name__, time.monotonic() - began
                finally:
                    barrier.wait(60)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(attempts)) as pool:
        return list(pool.map(attempt, attempts))


@pytest.mark.engine("postgresql")
def test_an_exhausted_pooler_is_an_error_soon_after_the_timeout(doomed, until):
    """A lease needs a second session, which the open transactions keep from it.

    No caller waits for as long as the pooler would let it. The requests that are still
    on their way leave nothing acquired.
    """
    with PgBouncer(int(PORT), sessions=4) as narrow:
        worker = doomed(**narrow.environment)
        results = worker.call(take_leases_in_transactions)
        # The pooler has sessions again, and the requests end.
        keys = [db_lock(f"stock:{number}", timeout=0) for number in range(1, 5)]
        for lock in keys:
            until(lambda lock=lock: (hold := lock.try_acquire()) and not hold.release())
        worker.kill()
    for name, seconds in results:
        assert name == "LockBackendError"
        in_time(seconds, 0.5 + 5.0 + 1.5)


LIMIT = {
    "postgresql": ("SELECT current_setting('lock_timeout')", "5s", "0"),
    "mysql": ("SELECT @@SESSION.lock_wait_timeout", "5", None),
}


def settings_of_sessions(pipe):
    """Return the limit of the wait for a lock, by the kind of thread that connects."""
    found = {}

    def read(*, connection, **_):
        with connection.cursor() as cursor:
            cursor.execute(LIMIT[connection.vendor][0])
            name = threading.current_thread().name
            found[name] = str(cursor.fetchone()[0])

    connection.close()
    with received(connection_created, read):
        with transaction.atomic(), db_lock("stock:7", scope="lease", release_at="exit"):
            pass
        with ThreadPoolExecutor(1, "other") as pool:
            with suppress(LockTimeout):
                pool.submit(db_lock("stock:8", timeout=0.2).acquire).result()
    return found


@SERVERS
def test_only_the_sessions_of_dlocks_limit_the_wait_for_a_lock(doomed):
    """A table that a migration has locked stops no renewal for longer than 5 s.

    The caller's own sessions are as Django made them.
    """
    with db_lock("stock:8"):
        found = doomed().call(settings_of_sessions)
    _, limit, own = LIMIT[connection.vendor]
    own = own or found["MainThread"]
    assert own != limit
    kinds = {"dlocks-worker": limit, "dlocks-waiting": limit, "MainThread": own}
    assert found.items() >= kinds.items()
    assert found["other_0"] == own


@pytest.mark.engine("postgresql")
def test_nothing_is_set_for_the_sessions_of_a_pooler(doomed):
    """The next client of such a session would inherit the setting."""
    with PgBouncer(int(PORT)) as pooler, db_lock("stock:8"):
        worker = doomed(**pooler.environment)
        found = worker.call(settings_of_sessions)
        worker.kill()
    assert set(found.values()) == {"0"}
    assert "dlocks-worker" in found


# The transaction of a TestCase, which other sessions cannot see.


class TestInATestCase(TestCase):
    """``held_elsewhere()`` writes in the test's own transaction."""

    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        # Leases of other keys are committed on purpose.
        apps.get_model("dlocks", "ResourceLock").objects.all().delete()

    def refuse(self, lock, timeout=0.1):
        began = time.monotonic()
        with pytest.raises(LockTimeout) as caught:
            lock.acquire()
        assert "held by web-2:77:x" in str(caught.value)
        in_time(time.monotonic() - began, timeout + 1.5)

    @SERVERS
    def test_a_busy_key_is_a_timeout(self):
        """It is one after ``timeout``, and its message names the holder.

        That is so for locks in the transaction and leases, one key and several, permits
        and coroutines, whether the key has been used before or not.
        """
        policy = {"timeout": 0.1}
        for number, more in enumerate([{}, {"scope": "lease"}]):
            for kind in (
                db_lock(f"stock:{number}", **policy, **more),
                db_lock(f"stock:{number}", f"other:{number}", **policy, **more),
                db_semaphore(f"stock:{number}", 2, **policy),
            ):
                with held_elsewhere(f"stock:{number}", holder="web-2:77:x"):
                    assert db_lock(f"stock:{number}").locked()
                    self.refuse(kind)
                assert not db_lock(f"stock:{number}").locked()
        with held_elsewhere("stock:7", holder="web-2:77:x"):
            self.refuse(db_lock("stock:7", timeout=0), 0.0)
            with pytest.raises(LockTimeout, match="held by web-2:77:x"):
                async_to_sync(db_lock("stock:7", **policy).aacquire)()
        with db_lock("stock:7", timeout=0) as hold:
            assert hold.held
