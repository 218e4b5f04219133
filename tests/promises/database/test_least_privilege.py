"""The database rights in SECURITY.md are sufficient and minimal for each role."""

from __future__ import annotations

import re
import time

import pytest
from django.db import connection

from dlocks import LockBackendError, db_lock
from dlocks.models import HoldRecord, ResourceLock
from tests import jobs, pages, rows
from tests.models import Counter
from tests.timing import in_time

pytestmark = [
    pytest.mark.engine("postgresql"),
    pytest.mark.django_db(transaction=True),
]

TABLES = ("dlocks_resourcelock", "dlocks_lockclaim", "dlocks_holdrecord")
APPLICATION, INSERTING = "The application", "The application, with `InsertBackend`"


def told() -> dict[str, dict[str, set[str]]]:
    """Return the rights that the table in SECURITY.md lists for each role."""
    _, _, table = (pages.DOCS.parent / "SECURITY.md").read_text().partition("| Role |")
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in table.partition("\n\n")[0].splitlines()[2:]
    ]
    return {
        role: {
            table: set(re.findall(r"[A-Z]+", right))
            for table, right in zip(TABLES, rights, strict=True)
        }
        for role, *rights in cells
    }


@pytest.fixture
def process(doomed):
    """Return a function that starts a process with the database rights of a role.

    ``less`` names a right that is left out.
    """
    made, workers = [], []

    def get(role, *, less=None):
        name = f"dlocks_least_{len(made)}"
        with connection.cursor() as cursor:
            # The process logs in with the password of the tests.
            password = connection.settings_dict["PASSWORD"]
            cursor.execute(
                f"CREATE ROLE {name} LOGIN NOSUPERUSER PASSWORD '{password}'"
            )
            made.append(name)
            for table, granted in told()[role].items():
                for right in granted:
                    if (table, right) != less:
                        cursor.execute(f"GRANT {right} ON {table} TO {name}")
        workers.append(doomed(DLOCKS_TEST_USER=name))
        workers[-1].role = name
        return workers[-1]

    yield get
    for worker in workers:
        worker.kill()
    with connection.cursor() as cursor:
        for name in made:
            cursor.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE"
                " usename = %s",
                [name],
            )
            cursor.execute(f"DROP OWNED BY {name}")
            cursor.execute(f"DROP ROLE {name}")


def test_the_page_on_deployment_grants_these_rights():
    (lines,) = pages.blocks("how-to/deployment", "sql")
    granted = {
        table: set(rights.split(", "))
        for rights, table in re.findall(r"GRANT ([A-Z, ]+) ON (\w+) TO shop;", lines)
    }
    assert granted == told()[APPLICATION]


DONE = {"waited", "transaction", "several", "shared", "guarded"}


def test_the_application_rights_are_sufficient(process):
    """Leases, queues, transactions, shared holds and guarded commits work.

    Several keys, handovers and the history work too. Purging is refused, and no row is
    deleted. The insert backend needs another right.
    """
    worker = process(APPLICATION)
    for alias in ("default", "optimistic", "recorded"):
        assert set(worker.call(jobs.whole_cycle, alias)) == DONE
    assert HoldRecord.objects.exists()
    rows.free("old")
    for what in ("purge", "forget"):
        assert worker.call(jobs.rights, what).startswith("LockBackendError: ")
    assert ResourceLock.objects.filter(pk="old").exists()
    assert set(process(INSERTING).call(jobs.whole_cycle, "insert")) == DONE


def test_the_application_rights_are_minimal(process):
    """A missing right is never reported as a busy key."""
    unneeded = []
    for role, alias in ((APPLICATION, "default"), (INSERTING, "insert")):
        for table in TABLES[:2]:
            for right in sorted(told()[role][table]):
                worker = process(role, less=(table, right))
                try:
                    worker.call(jobs.whole_cycle, alias)
                except RuntimeError as error:
                    refused = (
                        r"LockBackendError[^\n]*permission denied[^\n]*(?:\n.*)*"
                        r"\. Grant the rights"
                    )
                    assert re.search(refused, str(error)), (role, table, right)
                else:
                    unneeded.append((role, table, right))
    assert unneeded == []


def test_the_rights_of_operators_are_sufficient(process):
    """The reaper and the admin can clear. A read-only role can only list."""
    rows.stale("stale")
    rows.free("shared")
    rows.stale_share("shared", 1001)
    rows.free("old")
    worker = process("`reap_locks`")
    assert worker.call(jobs.rights, "reap") == 2
    assert worker.call(jobs.rights, "purge") >= 1
    assert worker.call(jobs.rights, "forget") == 0
    ResourceLock.objects.all().delete()
    rows.held("held")
    rows.free("old")
    # The role below cannot find out whether a transaction keeps this row.
    rows.stale("stale")
    worker = process("`list_locks`")
    assert worker.call(jobs.rights, "look") == 1
    for what in ("clear", "purge", "reap"):
        assert worker.call(jobs.rights, what).startswith("LockBackendError: ")
    rows.waits("held")
    rows.free("shared")
    rows.shares("shared", 1001)
    worker = process("The admin, and `clear_lock`")
    assert worker.call(jobs.rights, "look") == 1
    assert worker.call(jobs.rights, "clear") == "held"
    assert worker.call(jobs.rights, "end_share") == 1001


def test_a_read_without_the_right_aborts_no_transaction(process):
    """The caller writes and commits after it."""
    Counter.objects.create(name="stock")
    worker = process(APPLICATION, less=("dlocks_lockclaim", "SELECT"))
    with connection.cursor() as cursor:
        cursor.execute(f"GRANT SELECT, UPDATE ON tests_counter TO {worker.role}")
    errors = worker.call(jobs.write_after_reads, "stock:7")
    assert len(errors) == 5
    assert all("permission denied" in error for error in errors), errors
    assert Counter.objects.get().value == 6


def error_of_a_try(pipe, key):
    try:
        return f"{db_lock(key, timeout=0).try_acquire()}"
    except LockBackendError as error:
        return f"LockBackendError: {error}"


# What hides each key, and what lets no role delete a claim whose turn has come.
POLICIES = {
    "dlocks_resourcelock": ["USING (owner = 'x') WITH CHECK (true)"],
    "dlocks_lockclaim": [
        "FOR SELECT USING (true)",
        "FOR INSERT WITH CHECK (true)",
        "FOR UPDATE USING (true)",
    ],
}


@pytest.mark.parametrize("table", POLICIES)
def test_a_row_that_row_security_hides_or_keeps_is_an_error(table, process):
    """The caller does not try forever, and does not take it for a busy key."""
    rows.free("stock:7", version=1000)
    if table == "dlocks_lockclaim":
        rows.waits("stock:7")
    worker = process(APPLICATION)
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        for number, policy in enumerate(POLICIES[table]):
            cursor.execute(f"CREATE POLICY of_a_test_{number} ON {table} {policy}")
        try:
            began = time.monotonic()
            error = worker.call(error_of_a_try, "stock:7")
            in_time(time.monotonic() - began, 8.0)
        finally:
            for number, _ in enumerate(POLICIES[table]):
                cursor.execute(f"DROP POLICY of_a_test_{number} ON {table}")
            cursor.execute(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
    assert re.match(r"LockBackendError: .*'stock:7'.* row security", error)
