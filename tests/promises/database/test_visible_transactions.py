"""Keys that a transaction holds are visible, and a list blocks no caller."""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import contextmanager, nullcontext

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from dlocks import LockTimeout, db_lock
from dlocks.models import ResourceLock
from tests import jobs, rows
from tests.for_each import FAMILY, for_each
from tests.promises.admin.names import LIST
from tests.promises.admin.pages import detail, page, person, text_of
from tests.promises.commands.running import listed, run
from tests.settings import ENGINE
from tests.timing import eventually
from tests.volume import volume

pytestmark = pytest.mark.django_db(transaction=True)

POSTGRESQL = pytest.mark.engine("postgresql")
INNODB = pytest.mark.engine("mariadb", "mysql")
# Statements that make sure that a row is not locked for a moment only.
MOST_PER_PROBE = 4
IN_TRANSACTION = "held, in a transaction"


def session_id() -> int:
    ask = "pg_backend_pid()" if ENGINE == "postgresql" else "CONNECTION_ID()"
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {ask}")
        return cursor.fetchone()[0]


def keep(pipe, key, how, using="default"):
    """Keep the row of a key in a transaction until notified, and say the session."""
    with transaction.atomic():
        lock = ResourceLock.objects.filter(pk=key)
        if how == "lock":
            with db_lock(key, using=using):
                pipe.pause(session_id())
            return
        if how == "select":
            lock.select_for_update().get()
        elif how == "update":
            lock.update(hold_count=0)
        else:
            with transaction.atomic():
                lock.update(hold_count=0)
                if how == "in savepoint":
                    pipe.pause(session_id())
                    return
        pipe.pause(session_id())


def with_sessions(*keys):
    """Create the rows of keys, which were released."""
    for key in keys:
        db_lock(key).acquire().release()


@pytest.fixture
def boss(transactional_db):
    return person("boss", is_superuser=True)


def check_that_a_session_holds(name, boss):
    """Check that a session is shown as the holder of stock:7, which is none's lease."""
    lock = db_lock("stock:7")
    holder = lock.holder()
    assert (holder.holder, holder.in_transaction) == (name, True)
    assert (holder.owner_ip, holder.token, holder.stale) == ("127.0.0.1", 0, False)
    said = rf"{re.escape(name)} \(127\.0\.0\.1\) for .*s, in a transaction"
    assert re.fullmatch(said, str(holder))
    assert lock.locked()
    assert [one.holder for one in lock.holders()] == [name]
    with pytest.raises(LockTimeout, match="held by shop .* in a transaction") as caught:
        db_lock("stock:7", timeout=0).acquire()
    assert caught.value.holder.in_transaction
    ((key, told),) = listed().items()
    assert told["seconds_held"] >= 0
    known = "state", "token", "seconds_left", "holder", "owner_ip"
    shown = (key, *map(told.get, known))
    assert shown == ("stock:7", "held", None, None, name, "127.0.0.1")
    line = run("list_locks").splitlines()[1]
    assert "transaction" in line
    assert name in line
    for address in LIST, detail("stock:7"):
        text = text_of(page(boss.get(address)))
        assert IN_TRANSACTION in text
        assert f"{name} 127.0.0.1" in text
    # The totals under a filter are those of all keys.
    for state, keys in ("free", {"other"}), ("held", {"stock:7"}):
        text = page(boss.get(LIST, {"state": state}))
        assert "1 in use 1 held" in text_of(text)
        assert {*re.findall('"dlocks-key" id="lock-[^>]*>([^<]*)', text)} == keys
    assert "This key is free and has no waiters." in page(boss.get(detail("other")))


@POSTGRESQL
@for_each("how", ["lock", "select", "update", "in savepoint", "after savepoint"])
def test_the_session_of_a_transaction_is_the_holder(how, doomed, boss):
    """It is so without waiters, and until the end of the transaction."""
    worker = doomed(DLOCKS_TEST_OPTIONS=json.dumps({"application_name": "shop"}))
    with_sessions("stock:7", "other")
    with worker.doing(keep, "stock:7", how) as session:
        check_that_a_session_holds(f"shop (session {session})", boss)
    assert db_lock("stock:7").holder() is None
    assert listed() == {}


@POSTGRESQL
def test_no_other_session_is_named(workers):
    """Of several earlier writers, none is named as the owner of a savepoint."""
    first, second = workers(2)
    with_sessions("a", "b")
    with first.doing(keep, "a", "select") as session, second.doing(keep, "b", "lock"):
        assert db_lock("a").holder().holder == f"session {session}"
        holder = db_lock("b").holder()
        assert holder.in_transaction
        assert holder.holder == ""
        assert str(holder) == "an open transaction"
    assert db_lock("b").holder() is None


@POSTGRESQL
def test_a_hidden_session_is_not_named_on_pages(worker, boss, settings):
    settings.DLOCKS_SHOW_HOLDER = False
    with_sessions("stock:7")
    with worker.doing(keep, "stock:7", "lock") as session:
        for address in LIST, detail("stock:7"):
            text = page(boss.get(address))
            assert IN_TRANSACTION in text
            assert f"session {session}" not in text
        assert str(db_lock("stock:7").holder()).startswith("a hidden holder for")


@pytest.fixture
def waited_for(workers):
    """Return a context manager in which a transaction keeps a key with a waiter.

    It yields the session of the transaction.
    """

    @contextmanager
    def keeping(key, using="default"):
        keeper, waiter = workers(2)
        with keeper.doing(keep, key, "lock", using) as session:
            waiter.start(jobs.wait_quietly, key, using=using, timeout=300)
            yield session
        waiter.hear()

    return keeping


@INNODB
@FAMILY
def test_a_key_with_waiters_is_held_in_a_transaction(
    using, worker, waited_for, boss, until
):
    """Where the user may read the locks of rows (MySQL), the session is named.

    Each backend has a key of its own, since an answer may be a second old.
    """
    key = f"stock:{using}"
    lock = db_lock(key, using=using)
    with worker.doing(keep, key, "lock", using):
        # Without waiters, no probe may be in the way.
        assert lock.holder() is None
        assert key not in listed("--using", using)
    with waited_for(key, using) as session:
        until(lambda: lock.holder() is not None, 30)
        until(lambda: listed("--using", using).get(key), 30)
        holder = lock.holder()
        name = f"session {session}" if ENGINE == "mysql" else ""
        assert (holder.in_transaction, holder.holder) == (True, name)
        kept = "in a transaction|by an open transaction"
        with pytest.raises(LockTimeout, match=kept):
            db_lock(key, using=using, timeout=0.1).acquire()
        if using == "default":
            for address in LIST, detail(key):
                assert IN_TRANSACTION in text_of(page(boss.get(address)))
    assert lock.holder() is None


def lock_the_gap(pipe, missing):
    """Lock the gap in which a missing key would be, until notified."""
    with connection.cursor() as cursor:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    with transaction.atomic():
        assert not ResourceLock.objects.select_for_update().filter(pk=missing)
        pipe.pause("locked")
    connection.close()


@pytest.mark.engine("mysql")
def test_a_session_that_locks_only_a_gap_is_not_the_holder(workers, until):
    """InnoDB lists the lock of a gap under the key that follows it."""
    earlier, keeper, later, waiter = workers(4)
    with_sessions("gap:7")
    with (
        earlier.doing(lock_the_gap, "gap:6"),
        keeper.doing(keep, "gap:7", "lock") as session,
        later.doing(lock_the_gap, "gap:6"),
    ):
        waiter.start(jobs.wait_quietly, "gap:7", timeout=60)
        lock = db_lock("gap:7")
        until(lambda: lock.holder() is not None, 30)
        assert lock.holder().holder == f"session {session}"
    waiter.hear()


@INNODB
def test_probes_are_rare(waited_for, in_queue):
    """A process looks at most once in a second, and never on a replica.

    Some statements make sure that it was not a short step. One more looks at expired
    leases, and one at expired shares.
    """

    def probes(asks: int) -> int:
        with CaptureQueriesContext(connection) as queries:
            for _ in range(asks):
                run("list_locks")
                db_lock("stock:7").holder()
                db_lock("stock:8").holder()
        sent = [one["sql"] for one in queries]
        return sum("SKIP LOCKED" in one or "data_locks" in one for one in sent)

    rows.stale("old")
    rows.stale_share("catalogue", 1)
    with_sessions("stock:7", "stock:8")
    with waited_for("stock:7"), connection.cursor() as cursor:
        in_queue(1)
        cursor.execute("SET GLOBAL read_only = ON")
        try:
            assert probes(20) == 0
        finally:
            cursor.execute("SET GLOBAL read_only = OFF")
        began = time.monotonic()
        sent = probes(20)
        assert sent <= (MOST_PER_PROBE + 2) * (time.monotonic() - began + 1)


@pytest.fixture
def unprivileged(doomed):
    """Return a process whose user may use the tables, and see no other session."""
    name = "dlocks_least"
    password = connection.settings_dict["PASSWORD"]
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE USER {name} IDENTIFIED BY '{password}'")
        cursor.execute(f"GRANT ALL ON {connection.settings_dict['NAME']}.* TO {name}")
    worker = doomed(DLOCKS_TEST_USER=name)
    yield worker
    worker.kill()
    with connection.cursor() as cursor:
        cursor.execute(f"DROP USER {name}")


def holder_of(pipe, key):
    """Return the holder of a key as text, once there is one."""
    lock = db_lock(key)
    eventually(lambda: lock.holder() is not None, 30)
    return str(lock.holder())


@INNODB
def test_without_rights_the_session_is_not_known(unprivileged, waited_for):
    with waited_for("stock:7"):
        assert unprivileged.call(holder_of, "stock:7") == "an open transaction"


@pytest.mark.engine("sqlite", "mariadb", "mysql")
def test_a_page_says_that_a_free_key_may_be_in_a_transaction(boss):
    with_sessions("stock:7")
    text = page(boss.get(detail("stock:7")))
    assert "This key is free, or in a transaction." in text


def test_a_polling_control_room_makes_no_key_busy(boss, waited_for, threads, in_queue):
    """No acquire of a free key fails, though each page looks for transactions."""
    polled, over = threading.Semaphore(0), threading.Event()

    def poll():
        while not over.is_set():
            page(boss.get(LIST))
            page(boss.get(detail("stock:0")))
            db_lock("stock:0").holder()
            polled.release()

    servers = ENGINE != "sqlite"
    with waited_for("busy") if servers else nullcontext():
        if servers:
            in_queue(1, "busy")
        poller = threads(poll)
        try:
            assert polled.acquire(timeout=60)
            refused = 0
            for number in range(volume(350)):
                hold = db_lock(f"stock:{number % 10}").try_acquire()
                refused += hold is None
                if hold is not None:
                    hold.release()
            # The pages were read meanwhile.
            assert polled.acquire(timeout=60)
            assert refused == 0
        finally:
            over.set()
            poller.join(60)
