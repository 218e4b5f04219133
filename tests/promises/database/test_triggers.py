"""What a trigger on the tables of dlocks changes."""

from functools import partial

import pytest
from django.db import connection

from dlocks import LockBackendError, db_lock, db_rwlock, history
from dlocks.models import HoldRecord, LockClaim, ResourceLock
from tests import rows
from tests.for_each import ROWS
from tests.promises.commands.running import refused, run

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.engine("mariadb", "mysql")
@pytest.mark.parametrize(
    ("moment", "value"), [("BEFORE", "1"), ("AFTER", "LAST_INSERT_ID(42)")]
)
def test_tokens_grow_in_spite_of_a_trigger(moment, value):
    """The insert id of a reply is 0 as soon as a trigger runs.

    The history, whose records have the token, keeps each hold.
    """
    body = f"FOR EACH ROW SET @x = {value}"
    with rows.trigger(f"{moment} UPDATE", ResourceLock, mysql=body):
        for using in ROWS:
            tokens = []
            for _ in range(3):
                with db_lock(f"stock:7 {using}", using=using) as hold:
                    tokens.append(hold.token)
            assert tokens == sorted({*tokens} - {0}), using
        for _ in range(10):
            with db_lock("stock:7", using="recorded"):
                pass
        history.flush()
        assert HoldRecord.objects.filter(key_resource="stock:7").count() == 10


# Delays the insert of a long lease for as long as a session has the lock 7. The row has
# its values already.
DELAY = """
BEGIN
  WHILE NEW.end_time > NEW.begin_time + interval '1 minute'
    AND EXISTS (SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = 7)
  LOOP
    PERFORM pg_sleep(0.01);
  END LOOP;
  RETURN NEW;
END
"""


def is_delayed(cursor):
    cursor.execute("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'PgSleep'")
    return cursor.fetchone() is not None


@pytest.mark.engine("postgresql")
def test_tokens_grow_although_an_insert_is_delayed(threads, until):
    """Another caller has the key after the insert has begun, and before it ends."""
    with (
        rows.trigger("BEFORE INSERT", ResourceLock, postgresql=DELAY),
        connection.cursor() as cursor,
    ):
        cursor.execute("SELECT pg_advisory_lock(7)")
        try:
            late = threads(db_lock("stock:7", using="insert", ttl=90).acquire)
            until(partial(is_delayed, cursor))
            with db_lock("stock:7", using="insert") as hold:
                pass
        finally:
            cursor.execute("SELECT pg_advisory_unlock(7)")
            late.join(30)
    assert late.results[0].token > hold.token
    late.results[0].release()


REFUSE = {
    "postgresql": "BEGIN RAISE 'refused by a test' USING ERRCODE = '23514'; END",
    "sqlite": "BEGIN SELECT RAISE(ABORT, 'refused by a test'); END",
}
SKIP = {
    "postgresql": "BEGIN RETURN NULL; END",
    "sqlite": "BEGIN SELECT RAISE(IGNORE); END",
}


@pytest.mark.engine("postgresql", "sqlite")
def test_a_claim_that_a_trigger_refuses_is_an_error(in_other_thread):
    """It is no contention, and is not requested forever."""
    busy, shared = db_lock("stock:7", timeout=20), db_rwlock("stock:8").read()
    with rows.trigger("BEFORE INSERT", LockClaim, **REFUSE):
        with busy, pytest.raises(LockBackendError, match="refused by a test"):
            in_other_thread(busy.acquire)
        with pytest.raises(LockBackendError, match="refused by a test"):
            shared.acquire()


@pytest.mark.engine("postgresql", "sqlite")
def test_each_request_that_a_trigger_refuses_is_an_error_of_the_backend():
    """Code that handles the errors of locks handles it."""
    for key in "a", "b":
        db_lock(key).acquire().release()
    several, hold = db_lock("a", "b"), db_lock("stock:7").acquire()
    with rows.trigger("BEFORE UPDATE", ResourceLock, **REFUSE):
        for request in hold.check, hold.renew, several.try_acquire, hold.release:
            with pytest.raises(LockBackendError, match="refused by a test"):
                request()


@pytest.mark.engine("postgresql", "sqlite")
def test_a_row_that_a_trigger_keeps_unchanged_grants_nothing():
    """Otherwise a second caller would find it free as well."""
    locks = db_lock("stock:7"), db_rwlock("stock:7").read(), db_lock("a", "b")
    for key in "stock:7", "a", "b":
        db_lock(key).acquire().release()
    with rows.trigger("BEFORE UPDATE", ResourceLock, **SKIP):
        for lock in locks:
            with pytest.raises(LockBackendError, match="trigger"):
                lock.try_acquire()


@pytest.mark.engine("postgresql", "sqlite")
def test_a_trigger_that_keeps_old_records_is_an_error():
    """The command would find the same records again and again."""
    rows.ended("stock:7", ago=31 * 86400)
    with rows.trigger("BEFORE DELETE", HoldRecord, **SKIP):
        assert "trigger" in refused("reap_locks")
    run("reap_locks")
    assert not HoldRecord.objects.exists()
