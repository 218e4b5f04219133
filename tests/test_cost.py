"""What a lock costs, as counts: statements, plans, and the size of the table."""

from __future__ import annotations

import re
import sys
import time

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from dlocks import db_lock, signals
from dlocks.backends.base import Claim
from dlocks.conf import backends
from dlocks.history import History
from dlocks.models import ResourceLock
from dlocks.telemetry import Log

pytestmark = pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"])


def statements(work):
    with CaptureQueriesContext(connection) as queries:
        result = work()
    return [query["sql"] for query in queries], result


@pytest.mark.parametrize("using", ["default", "optimistic"])
def test_one_statement_to_acquire_to_enter_again_to_renew_and_to_release(using):
    """On a key that exists, and with no transaction around any of them but the statement's own."""
    lock = db_lock("stock:7", using=using)
    with lock:
        pass
    acquiring, hold = statements(lock.acquire)
    entering, _ = statements(lock.acquire)
    leaving, _ = statements(hold.release)
    renewing, _ = statements(hold.renew)
    releasing, _ = statements(hold.release)
    counts = [len(sent) for sent in (acquiring, entering, leaving, renewing, releasing)]
    assert counts == [1, 1, 1, 1, 1], (acquiring, entering, leaving, renewing, releasing)


@pytest.mark.engine("sqlite")
def test_a_lock_in_memory_is_a_hundred_calls_in_python_and_no_exception(monkeypatch):
    """Beside a server each costs several times as much, since the processor has forgotten it meanwhile."""
    # OpenTelemetry, where it is there, is beside that.
    monkeypatch.setattr(signals, "watchers", [one for one in signals.watchers if isinstance(one, (Log, History))])
    lock = db_lock("stock:7", using="memory")
    with lock:
        pass
    calls, errors = [], []

    def watch(frame, event, argument):
        frame.f_trace_lines = False
        if event == "call":
            calls.append(frame.f_code.co_qualname)
        elif event == "exception":
            errors.append((frame.f_code.co_qualname, argument[0]))
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        with lock:
            pass
    finally:
        sys.settrace(before)
    assert not errors
    assert len(calls) <= 125, calls


@pytest.mark.parametrize("using", ["default", "optimistic"])
def test_one_statement_each_in_a_transaction_too(using):
    """On PostgreSQL within a savepoint: a row that was just taken by somebody else must not stay locked."""
    lock = db_lock("stock:7", using=using)
    with lock:
        pass
    with transaction.atomic():
        acquiring, hold = statements(lock.acquire)
        releasing, _ = statements(hold.release)
    of_lock = [sql for sql in acquiring if "SAVEPOINT" not in sql]
    assert [len(of_lock), len(releasing)] == [1, 1], (acquiring, releasing)
    assert len(acquiring) == (3 if connection.vendor == "postgresql" else 1)


def test_an_optimistic_process_that_has_not_seen_the_key_reads_it_first():
    with db_lock("stock:7"):
        pass
    backends["optimistic"]._versions.clear()
    acquiring, hold = statements(db_lock("stock:7", using="optimistic").acquire)
    assert len(acquiring) == 2
    assert acquiring[0].startswith("SELECT")
    hold.release()


def test_waiting_optimistically_only_reads(elsewhere):
    with db_lock("stock:7", using="optimistic"):

        def wait():
            with CaptureQueriesContext(connection) as queries:
                assert db_lock("stock:7", using="optimistic").try_acquire() is None
                assert db_lock("stock:7", using="optimistic").try_acquire() is None
            return [query["sql"].split()[0] for query in queries]

        elsewhere(lambda: db_lock("stock:7", using="optimistic").try_acquire())
        assert set(elsewhere(wait)) == {"SELECT"}


def test_a_hundred_claims_are_renewed_in_one_statement(django_assert_num_queries):
    backend = backends["default"]
    claims = [Claim(key=f"stock:{number}", ttl=30) for number in range(100)]
    for claim in claims:
        assert backend.acquire(claim)
    with django_assert_num_queries(1):
        assert len(backend.renew(claims)) == 100
    for claim in claims:
        backend.release(claim)


@pytest.fixture
def no_analysis(transactional_db, until):
    """No ANALYZE of the server's own: as any other old snapshot it would keep what it might see, all row versions."""
    with connection.cursor() as cursor:

        def gone(what):
            sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = %s"
            cursor.execute(sql, [what])
            return not cursor.fetchall()

        cursor.execute("ALTER SYSTEM SET autovacuum = off")
        cursor.execute("SELECT pg_reload_conf()")
        # It reads that when it comes to it, and might start another worker until then.
        until(lambda: gone("autovacuum launcher"))
        for _ in range(2):
            # One that was asked for before may be on its way.
            until(lambda: gone("autovacuum worker"))
            time.sleep(0.1)
        yield
        cursor.execute("ALTER SYSTEM RESET autovacuum")
        cursor.execute("SELECT pg_reload_conf()")


@pytest.mark.engine("postgresql")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("using", ["default", "optimistic"])
@pytest.mark.usefixtures("no_analysis")
def test_a_hundred_thousand_holds_of_one_key_leave_the_table_under_a_megabyte(using):
    lock = db_lock("stock:7", using=using)
    with lock:
        pass
    (acquire,), hold = statements(lock.acquire)
    (release,), _ = statements(hold.release)
    # The statements just as they were sent, each committed by itself, on the server's side to save the time. The
    # optimistic one compares a version: the row's own.
    acquire = re.sub(r"version = \d+", "version = (SELECT version FROM dlocks_resourcelock)", acquire)
    release = re.sub(r" RETURNING .*", "", release)
    acquire = re.sub(r" RETURNING .*", "", acquire)
    sizes = []
    with connection.cursor() as cursor:
        # Again where an old snapshot was there all the same: that is not of the lock's making.
        while len(sizes) < 3 and (not sizes or sizes[-1] >= 1_000_000):
            cursor.execute("VACUUM FULL dlocks_resourcelock")
            before = ResourceLock.objects.get().version
            cursor.execute(
                f"DO $$ BEGIN FOR i IN 1..100000 LOOP {acquire}; COMMIT; {release}; COMMIT; END LOOP; END $$"
            )
            assert ResourceLock.objects.get().version >= before + 100_000
            cursor.execute("SELECT pg_total_relation_size('dlocks_resourcelock')")
            sizes += cursor.fetchone()
    assert sizes[-1] < 1_000_000, sizes


@pytest.mark.timeout(300)
def test_a_million_other_rows_change_nothing_in_any_plan(million_rows):
    """EXPLAIN names the primary key for every statement, and nothing else is ever scanned."""
    for using in ("default", "optimistic", "insert"):
        sent = statements_of_one_key(using)
        assert len(sent) >= 8
        for sql in sent:
            plan = explain(sql)
            assert scans_only_by_primary_key(plan), f"{sql}\n{plan}"
    sent = statements_of_several_keys()
    assert len(sent) == 4
    for sql in sent:
        plan = explain(sql)
        if connection.vendor == "sqlite":
            assert not [row for row in plan if row[3].startswith("SCAN dlocks")], f"{sql}\n{plan}"
        else:
            assert scans_only_by_primary_key(plan), f"{sql}\n{plan}"


def statements_of_one_key(using):
    lock = db_lock("stock:7", using=using)
    with lock:
        pass
    with CaptureQueriesContext(connection) as queries:
        with lock as hold, lock:
            hold.renew()
            lock.holder()
        if using == "optimistic":
            backends[using]._versions.clear()
        with transaction.atomic(), lock:
            pass
        backends[using].clear("stock:7", 1)
        backends[using].renew([Claim(key=f"number:{number}", ttl=1) for number in range(100)])
    sent = [query["sql"] for query in queries]
    return [sql for sql in sent if "INSERT" not in sql and "dlocks" in sql]


def statements_of_several_keys():
    lock = db_lock("a", "b", "c")
    with lock:
        pass
    sent, hold = statements(lock.acquire)
    for work in (hold.check, hold.renew, hold.release):
        sent += statements(work)[0]
    return [sql for sql in sent if "SAVEPOINT" not in sql]


@pytest.fixture
def million_rows(transactional_db):
    columns = "key_resource, status, owner, holder, hold_count, version, end_time"
    values = "'S', '', '', 0, 1"
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                f"INSERT INTO dlocks_resourcelock ({columns}) SELECT 'number:' || n, {values}, clock_timestamp()"
                " FROM generate_series(1, 1000000) n"
            )
            cursor.execute(
                "INSERT INTO dlocks_lockclaim (key_resource, owner, holder, begin_time, end_time, hold_count, shared,"
                " permits, scope, takeover, counted, patience, channel) SELECT 'number:' || n, md5(n::text), '',"
                " clock_timestamp(), clock_timestamp(), 0, false, 1, 'P', true, true, 0, ''"
                " FROM generate_series(1, 10000) n"
            )
            cursor.execute("ANALYZE dlocks_resourcelock, dlocks_lockclaim")
        elif connection.vendor == "mysql":
            cursor.execute(
                f"INSERT INTO dlocks_resourcelock ({columns}) SELECT CONCAT('number:', seq), {values},"
                " UTC_TIMESTAMP(6) FROM seq_1_to_1000000"
            )
            cursor.execute("ANALYZE TABLE dlocks_resourcelock")
            cursor.fetchall()
        else:
            cursor.execute(
                "WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 1000000)"
                f" INSERT INTO dlocks_resourcelock ({columns}) SELECT 'number:' || n, {values}, '2001-01-01 00:00:00'"
                " FROM numbers"
            )
            cursor.execute("ANALYZE")


def explain(sql):
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute(f"EXPLAIN QUERY PLAN {sql}")
        elif " FOR UPDATE " in sql and sql.startswith("SET STATEMENT"):
            cursor.execute("EXPLAIN UPDATE" + sql.split(" FOR UPDATE", 1)[1])
        else:
            cursor.execute(f"EXPLAIN {sql}")
        return cursor.fetchall()


def scans_only_by_primary_key(plan):
    if connection.vendor == "postgresql":
        text = "\n".join(line for (line,) in plan)
        return "dlocks_resourcelock_pkey" in text and "Seq Scan" not in text
    if connection.vendor == "sqlite":
        details = [row[3] for row in plan]
        used = [detail for detail in details if detail.startswith(("SEARCH", "SCAN"))]
        return all("USING INDEX sqlite_autoindex_dlocks_resourcelock_1" in detail for detail in used) and used
    # id, select_type, table, type, possible_keys, key, …: by the primary key, or from what was picked by it, or a
    # row that was looked up by it while planning.
    kinds = {row[2]: (row[3], row[5], row[-1]) for row in plan}
    return all(
        key == "PRIMARY" or (table or "<").startswith("<") or "const table" in (extra or "")
        for table, (_, key, extra) in kinds.items()
    )
