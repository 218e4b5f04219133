"""What a trigger on the tables of dlocks changes."""

from functools import partial

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from dlocks import LockBackendError, db_lock, db_rwlock, history
from dlocks.models import HoldRecord
from tests import rows


@pytest.mark.engine("mariadb", "mysql")
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "trigger",
    [
        "BEFORE UPDATE ON dlocks_resourcelock FOR EACH ROW SET @x = 1",
        "AFTER UPDATE ON dlocks_resourcelock FOR EACH ROW SET @x = LAST_INSERT_ID(42)",
    ],
)
def test_tokens_grow_in_spite_of_a_trigger(trigger):
    """The insert id of a reply is 0 as soon as a trigger runs.

    The history, whose records have the token, keeps each hold.
    """
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE TRIGGER of_a_test {trigger}")
    try:
        for using in "default", "optimistic", "insert":
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
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP TRIGGER of_a_test")


# Delays the insert of a long lease for as long as a session has the lock 7. The row has
# its values already.
DELAY = """
CREATE FUNCTION delay_of_a_test() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  WHILE NEW.end_time > NEW.begin_time + interval '1 minute'
    AND EXISTS (SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = 7)
  LOOP
    PERFORM pg_sleep(0.01);
  END LOOP;
  RETURN NEW;
END $$;
CREATE TRIGGER of_a_test BEFORE INSERT ON dlocks_resourcelock FOR EACH ROW
  EXECUTE FUNCTION delay_of_a_test()
"""


def is_delayed(cursor):
    cursor.execute("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'PgSleep'")
    return cursor.fetchone() is not None


@pytest.mark.engine("postgresql")
@pytest.mark.django_db(transaction=True)
def test_tokens_grow_although_an_insert_is_delayed(threads, until):
    """Another caller has the key after the insert has begun, and before it ends."""
    with connection.cursor() as cursor:
        cursor.execute(DELAY)
        cursor.execute("SELECT pg_advisory_lock(7)")
        try:
            late = threads(db_lock("stock:7", using="insert", ttl=90).acquire)
            until(partial(is_delayed, cursor))
            with db_lock("stock:7", using="insert") as hold:
                pass
        finally:
            cursor.execute("SELECT pg_advisory_unlock(7)")
            late.join(30)
            cursor.execute("DROP FUNCTION delay_of_a_test CASCADE")
    assert late.results[0].token > hold.token
    late.results[0].release()


# What refuses each claim that is inserted, and what drops that again.
REFUSE = {
    "postgresql": (
        """
        CREATE FUNCTION refusal_of_a_test() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
          RAISE EXCEPTION 'refused by a test' USING ERRCODE = 'check_violation';
        END $$;
        CREATE TRIGGER of_a_test BEFORE INSERT ON dlocks_lockclaim FOR EACH ROW
          EXECUTE FUNCTION refusal_of_a_test()
        """,
        "DROP FUNCTION refusal_of_a_test CASCADE",
    ),
    "sqlite": (
        """
        CREATE TRIGGER of_a_test BEFORE INSERT ON dlocks_lockclaim
        BEGIN SELECT RAISE(ABORT, 'refused by a test'); END
        """,
        "DROP TRIGGER of_a_test",
    ),
}


@pytest.mark.engine("postgresql", "sqlite")
@pytest.mark.django_db(transaction=True)
def test_a_claim_that_a_trigger_refuses_is_an_error(in_other_thread):
    """It is no contention, and is not requested forever."""
    create, drop = REFUSE[connection.vendor]
    busy, shared = db_lock("stock:7", timeout=20), db_rwlock("stock:8").read()
    with connection.cursor() as cursor:
        cursor.execute(create)
    try:
        with busy, pytest.raises(LockBackendError, match="refused by a test"):
            in_other_thread(busy.acquire)
        with pytest.raises(LockBackendError, match="refused by a test"):
            shared.acquire()
    finally:
        with connection.cursor() as cursor:
            cursor.execute(drop)


# What skips each change of a lock row, and what drops that again.
SKIP = {
    "postgresql": (
        """
        CREATE FUNCTION skip_of_a_test() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
          RETURN NULL;
        END $$;
        CREATE TRIGGER of_a_test BEFORE UPDATE ON dlocks_resourcelock FOR EACH ROW
          EXECUTE FUNCTION skip_of_a_test()
        """,
        "DROP FUNCTION skip_of_a_test CASCADE",
    ),
    "sqlite": (
        """
        CREATE TRIGGER of_a_test BEFORE UPDATE ON dlocks_resourcelock
        BEGIN SELECT RAISE(IGNORE); END
        """,
        "DROP TRIGGER of_a_test",
    ),
}


@pytest.mark.engine("postgresql", "sqlite")
@pytest.mark.django_db(transaction=True)
def test_a_row_that_a_trigger_keeps_unchanged_grants_nothing():
    """Otherwise a second caller would find it free as well."""
    create, drop = SKIP[connection.vendor]
    locks = db_lock("stock:7"), db_rwlock("stock:7").read(), db_lock("a", "b")
    for key in "stock:7", "a", "b":
        db_lock(key).acquire().release()
    with connection.cursor() as cursor:
        cursor.execute(create)
    try:
        for lock in locks:
            with pytest.raises(LockBackendError, match="trigger"):
                lock.try_acquire()
    finally:
        with connection.cursor() as cursor:
            cursor.execute(drop)


@pytest.mark.engine("postgresql", "sqlite")
@pytest.mark.django_db(transaction=True)
def test_a_trigger_that_keeps_old_records_is_an_error():
    """The command would find the same records again and again."""
    create, drop = SKIP[connection.vendor]
    create = create.replace(
        "UPDATE ON dlocks_resourcelock", "DELETE ON dlocks_holdrecord"
    )
    rows.ended("stock:7", ago=31 * 86400)
    with connection.cursor() as cursor:
        cursor.execute(create)
    try:
        with pytest.raises(CommandError, match="trigger"):
            call_command("reap_locks")
    finally:
        with connection.cursor() as cursor:
            cursor.execute(drop)
    call_command("reap_locks")
    assert not HoldRecord.objects.exists()
