"""The cost of a lock: statements, query plans, and table size."""

from __future__ import annotations

import re
import time

import pytest
from django.db import connection, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from dlocks import db_lock
from dlocks.backends.database import (
    InsertBackend,
    OptimisticBackend,
    PessimisticBackend,
)
from dlocks.models import ResourceLock
from dlocks.values import Claim
from tests.rows import PAST
from tests.volume import volume

pytestmark = pytest.mark.django_db(transaction=True)

FAMILY = {
    "default": PessimisticBackend,
    "optimistic": OptimisticBackend,
    "insert": InsertBackend,
}


def statements(work):
    with CaptureQueriesContext(connection) as queries:
        result = work()
    return [query["sql"] for query in queries], result


def statements_of_a_new_process(work, settings):
    """Forget what this process knows of rows, and return the statements."""
    with override_settings(DLOCKS=dict(settings.DLOCKS)):
        return statements(work)


def test_each_operation_is_one_statement(settings):
    """Each operation on an existing key is one statement, also in a transaction.

    In a transaction, PostgreSQL adds a savepoint, because a row that another caller has
    just acquired must not stay locked. An optimistic process reads an unknown key
    first.
    """
    for using in "default", "optimistic":
        lock = db_lock("stock:7", using=using)
        with lock:
            pass
        acquiring, hold = statements(lock.acquire)
        sent = [acquiring, statements(lock.acquire)[0]]
        for work in (hold.release, hold.renew, hold.release):
            sent.append(statements(work)[0])
        assert [len(one) for one in sent] == [1] * 5, sent
        with transaction.atomic():
            acquiring, hold = statements(lock.acquire)
            releasing, _ = statements(hold.release)
        of_lock = [sql for sql in acquiring if "SAVEPOINT" not in sql]
        assert [len(of_lock), len(releasing)] == [1, 1], (acquiring, releasing)
        assert len(acquiring) == (3 if connection.vendor == "postgresql" else 1)
    acquiring, hold = statements_of_a_new_process(lock.acquire, settings)
    assert len(acquiring) == 2
    assert acquiring[0].startswith("SELECT")
    hold.release()


def test_a_key_without_waiters_costs_one_statement_again(in_queue, threads):
    for using in ("default", "optimistic"):
        key = f"stock {using}"
        lock = db_lock(key, using=using)
        with lock:
            thread = threads(lambda lock=lock: lock.acquire().release())
            in_queue(1, key)
        thread.join(30)
        with lock:
            pass
        acquiring, hold = statements(lock.acquire)
        releasing, _ = statements(hold.release)
        assert [len(acquiring), len(releasing)] == [1, 1], (using, acquiring, releasing)


def test_leases_of_any_ttl_are_renewed_in_one_statement():
    """Each lease then lasts for its own ttl."""
    locks = [db_lock(f"stock:{ttl}", ttl=ttl) for ttl in range(100, 600, 100)]
    holds = [lock.acquire() for lock in locks]
    claims = [hold.claim for hold in holds]
    backend = PessimisticBackend("default")
    sent, left = statements(lambda: backend.renew(claims))
    assert len(sent) == 1, sent
    assert left == {claim.owner: claim.ttl for claim in claims}
    for lock in locks:
        holder = lock.holder()
        assert lock.ttl - 50 < holder.remaining <= lock.ttl
    for hold in holds:
        hold.release()


def test_waiting_optimistically_only_reads(in_other_thread):
    with db_lock("stock:7", using="optimistic"):

        def wait():
            with CaptureQueriesContext(connection) as queries:
                assert db_lock("stock:7", using="optimistic").try_acquire() is None
                assert db_lock("stock:7", using="optimistic").try_acquire() is None
            return [query["sql"].split()[0] for query in queries]

        in_other_thread(lambda: db_lock("stock:7", using="optimistic").try_acquire())
        assert set(in_other_thread(wait)) == {"SELECT"}


# The table.


@pytest.fixture
def no_analysis(transactional_db, until):
    """Disable autovacuum during the test.

    Like any other old snapshot, its ANALYZE would preserve all row versions that it
    might see.
    """
    with connection.cursor() as cursor:

        def gone(what):
            sql = (
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE"
                " backend_type = %s"
            )
            cursor.execute(sql, [what])
            return not cursor.fetchall()

        cursor.execute("ALTER SYSTEM SET autovacuum = off")
        cursor.execute("SELECT pg_reload_conf()")
        # The launcher reads the new setting late and might start another worker before
        # that.
        until(lambda: gone("autovacuum launcher"))
        for _ in range(2):
            # A worker that was requested before may still be starting.
            until(lambda: gone("autovacuum worker"))
            time.sleep(0.1)
        yield
        cursor.execute("ALTER SYSTEM RESET autovacuum")
        cursor.execute("SELECT pg_reload_conf()")


@pytest.mark.engine("postgresql")
@pytest.mark.usefixtures("no_analysis")
def test_the_table_stays_small_after_100000_holds():
    """Updates reuse the space of old row versions, with both ways to acquire."""
    for using, times in (("default", 90_000), ("optimistic", 10_000)):
        lock = db_lock("stock:7", using=using)
        with lock:
            pass
        (acquire,), hold = statements(lock.acquire)
        (release,), _ = statements(hold.release)
        # These are the original statements, each committed by itself. They run on the
        # server to save time. The optimistic statement compares a version, which is
        # replaced by that of the row.
        acquire = re.sub(
            r"version = \d+",
            "version = (SELECT version FROM dlocks_resourcelock)",
            acquire,
        )
        release = re.sub(r" RETURNING .*", "", release)
        acquire = re.sub(r" RETURNING .*", "", acquire)
        sizes = []
        with connection.cursor() as cursor:
            # Repeat the measurement if an old snapshot existed all the same, because
            # the lock did not cause it.
            while len(sizes) < 3 and (not sizes or sizes[-1] >= 1_000_000):
                cursor.execute("VACUUM FULL dlocks_resourcelock")
                before = ResourceLock.objects.get().version
                cursor.execute(
                    f"DO $$ BEGIN FOR i IN 1..{times} LOOP {acquire}; COMMIT;"
                    f" {release}; COMMIT; END LOOP; END $$"
                )
                assert ResourceLock.objects.get().version >= before + times
                cursor.execute("SELECT pg_total_relation_size('dlocks_resourcelock')")
                sizes += cursor.fetchone()
        assert sizes[-1] < 1_000_000, (using, sizes)


def test_query_plans_use_the_primary_key_among_a_million_rows(million_rows, settings):
    """EXPLAIN names the primary key for every lock row, and shows no other scan.

    Claims are found by the index of their key.

    The table has a million rows on PostgreSQL, whose plans depend on the size most, and
    thousands of rows elsewhere.
    """
    for using in FAMILY:
        sent = statements_of_one_key(using, settings)
        assert len(sent) >= 8
        for sql in sent:
            plan = explain(sql)
            assert scans_only_by_index(plan), f"{sql}\n{plan}"
    for sql in statements_of_several_keys():
        plan = explain(sql)
        if connection.vendor == "sqlite":
            scans = [row for row in plan if row[3].startswith("SCAN dlocks")]
            assert not scans, f"{sql}\n{plan}"
        else:
            assert scans_only_by_index(plan), f"{sql}\n{plan}"


def statements_of_one_key(using, settings):
    lock = db_lock("stock:7", using=using)

    def work():
        with lock as hold, lock:
            hold.renew()
            lock.holder()
        with transaction.atomic(), lock:
            pass

    with lock:
        pass
    sent, _ = statements_of_a_new_process(work, settings)
    backend = FAMILY[using]("default")
    claims = [Claim(key=f"number:{number}", ttl=1) for number in range(100)]
    sent += statements(lambda: backend.clear("stock:7", 1))[0]
    sent += statements(lambda: backend.renew(claims))[0]
    return [sql for sql in on_tables(sent) if "INSERT" not in sql]


def on_tables(requests):
    """Return the statements of requests, since EXPLAIN takes one at a time."""
    return [
        sql
        for one in requests
        for sql in one.removeprefix("BEGIN NOT ATOMIC ").split("; ")
        if re.search("dlocks_(resourcelock|lockclaim)", sql)
    ]


def statements_of_several_keys():
    lock = db_lock("a", "b", "c")
    with lock:
        pass
    sent, hold = statements(lock.acquire)
    for work in (hold.check, hold.renew, hold.release):
        sent += statements(work)[0]
    return on_tables(sent)


@pytest.fixture
def million_rows(transactional_db):
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            # An index is built faster from sorted keys.
            cursor.execute(
                "INSERT INTO dlocks_resourcelock (key_resource, status, owner, holder,"
                " hold_count, version, end_time) SELECT 'number:' || lpad(n::text, 7,"
                " '0'), 'S', '', '', 0, 1, now() FROM generate_series(1, 1000000) n"
            )
            cursor.execute(
                "INSERT INTO dlocks_lockclaim (key_resource, owner, holder, begin_time,"
                " end_time, hold_count, shared, permits, scope, takeover,"
                " handover_ttl, channel, holding) SELECT 'number:' || n, md5(n::text),"
                " '', now(), now(), 0, false, 1, 'P', true, 0, '', ''"
                " FROM generate_series(1, 10000) n"
            )
            cursor.execute("ANALYZE dlocks_resourcelock, dlocks_lockclaim")
            return
        ResourceLock.objects.bulk_create(
            ResourceLock(key_resource=f"number:{n}", version=1, end_time=PAST)
            for n in range(volume(2_000))
        )
        analyze = {"sqlite": "ANALYZE", "mysql": "ANALYZE TABLE dlocks_resourcelock"}
        cursor.execute(analyze[connection.vendor])
        cursor.fetchall()


def explain(sql):
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute(f"EXPLAIN QUERY PLAN {sql}")
        elif connection.vendor == "postgresql":
            cursor.execute(f"EXPLAIN {sql}")
        else:
            if sql.startswith("SET STATEMENT"):
                sql = sql.split(" FOR ", 1)[1]
            # MySQL's default format is a tree as text.
            cursor.execute(f"EXPLAIN FORMAT=TRADITIONAL {sql}")
            columns = [column[0] for column in cursor.description]
            return [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]
        return cursor.fetchall()


def scans_only_by_index(plan):
    """Return whether lock rows are found by their primary key, claims by an index."""
    if connection.vendor == "postgresql":
        text = "\n".join(line for (line,) in plan)
        by_key = "dlocks_resourcelock_pkey" in text
        return (by_key or "dlocks_line" in text) and "Seq Scan" not in text
    if connection.vendor == "sqlite":
        details = [row[3] for row in plan]
        used = [detail for detail in details if detail.startswith(("SEARCH", "SCAN"))]
        known = (
            "USING INDEX sqlite_autoindex_dlocks_resourcelock_1",
            "USING INDEX dlocks_line",
            "USING COVERING INDEX dlocks_line",
        )
        return used and all(any(one in detail for one in known) for detail in used)
    # Accept a lookup by primary key, a derived result of one, and a row that was read
    # while planning.
    return all(
        row["key"] in ("PRIMARY", "dlocks_line")
        or (row["table"] or "<").startswith("<")
        or "const table" in (row["Extra"] or "")
        for row in plan
    )
