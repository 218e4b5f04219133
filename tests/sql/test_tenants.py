"""A schema for each tenant on PostgreSQL.

The search path is set by django-tenants or by hand.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections, transaction

from dlocks import LockBackendError, db_lock
from tests import pages
from tests.internals import HoldRecord, LockClaim, ResourceLock, backends, schemas

ROOT = Path(__file__).parent.parent.parent

pytestmark = [
    pytest.mark.engine("postgresql"),
    pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"]),
]

TABLES = [model._meta.db_table for model in (ResourceLock, LockClaim, HoldRecord)]


class Project:
    """A process that runs tests/tenants.

    ``lists`` selects the lists of apps that contain dlocks.
    """

    def __init__(self, lists):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.tenants", lists],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def call(self, situation):
        self.process.stdin.write(f"{situation}\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def close(self):
        with self.process:
            self.process.stdin.close()


@pytest.fixture(scope="module")
def projects():
    # They run in parallel, because most of their time is for migrations.
    found = {lists: Project(lists) for lists in ("shared", "both", "tenants")}
    yield found
    for project in found.values():
        project.close()


@pytest.fixture(params=["shared", "both"])
def project(request, projects):
    yield projects[request.param]
    # The tables of the tenants stay empty, whatever was locked.
    tables = projects[request.param].call("tables")
    assert [tables["acme"], tables["globex"]] == (
        [None, None] if request.param == "shared" else [[], []]
    )


def test_a_hold_in_a_tenant_is_renewed(project):
    """It outlives its ttl.

    The background thread renews the row that the tenant's thread has written.
    """
    assert project.call("renewed_for_longer_than_its_ttl") is True


def test_a_tenants_transaction_can_lock_a_new_key(project):
    """Another connection creates its row in the schema of the transaction."""
    assert project.call("new_key_in_a_transaction") == ["transaction"] * 3


def test_every_kind_of_lock_works_in_a_tenant(project):
    assert project.call("every_kind") == [True] * 3


def test_locks_work_without_the_public_schema(project):
    assert project.call("without_the_public_schema") == ["transaction", "held"]


def test_an_alias_with_another_path_guards_the_granted_row(project):
    """It guards with the row in which the lock was granted.

    The tables that the alias would find do not matter.
    """
    assert project.call("guarded_on_another_alias") == ["stock:7", "permits"]


def test_tenants_queue_for_one_key(project):
    assert project.call("handed_over_to_another_tenant") == [
        ["acme", False, False],
        ["globex", True, False],
    ]


def test_commands_in_a_tenant_see_all_locks(project):
    assert project.call("seen_by_the_commands") == [True] * 4


def test_all_tenants_have_one_history(project):
    assert project.call("recorded") == 1


def test_a_prefix_separates_the_keys_of_tenants(project):
    """Both tenants hold the same key, and the commands show each its own."""
    keys, listed, locked, rows = project.call("keys_of_each_tenant")
    assert keys == ["acme:nightly", "globex:nightly"]
    assert listed == [1, 1, 0]
    assert (locked, rows) == (True, 2)


def test_a_prefix_separates_tenants_in_coroutines(project):
    result = project.call("keys_of_each_tenant_in_a_coroutine")
    assert result == ["acme:nightly", True, "acme:nightly"]


def test_a_hold_is_resumed_in_another_tenant(project):
    assert project.call("resumed_in_another_tenant") == "acme:handed"


def test_tables_in_tenants_alone_are_refused(projects):
    """The first acquire raises an error with instructions.

    A check reports it too, and does not stop ``migrate_schemas``.
    """
    said, checks = projects["tenants"].call("refused")
    assert len(set(said)) == 1
    for words in (
        "'acme', 'globex'",
        "SHARED_APPS",
        "migrate_schemas --shared",
        '"$user", public',
    ):
        assert words in said[0]
    assert checks == [["dlocks.W008", said[0]]]
    assert projects["tenants"].call("tables") == {
        "public": None,
        "acme": [],
        "globex": [],
    }


def test_the_documented_tenant_settings_work(settings, monkeypatch):
    page = pages.run("how-to/tenants")
    settings.DLOCKS = page.DLOCKS
    for name in ("acme", "globex"):
        monkeypatch.setattr(connections["default"], "schema_name", name, raising=False)
        page.report(lambda: page.rebuild_index(lambda: None))
    assert set(ResourceLock.objects.values_list("pk", flat=True)) == {
        "acme:nightly-report",
        "globex:nightly-report",
        "index",
    }


# A search path set by hand.


@pytest.fixture
def schema():
    """Create a schema with its own tables, in this connection's search path."""
    with connection.cursor() as cursor:
        cursor.execute('CREATE SCHEMA "its own"')
        for table in TABLES:
            cursor.execute(
                f'CREATE TABLE "its own".{table} (LIKE public.{table} INCLUDING ALL)'
            )
        cursor.execute('SET search_path TO "its own", public')
    yield "its own"
    with connection.cursor() as cursor:
        cursor.execute("RESET search_path")
        cursor.execute('DROP SCHEMA "its own" CASCADE')


@pytest.fixture
def afresh(monkeypatch):
    """Reset the caches, as in a process that has not acquired a lock yet."""
    monkeypatch.setattr(schemas, "_schemas", {})
    backends.reset()
    yield
    backends.reset()


def is_empty(schema):
    with connection.cursor() as cursor:
        cursor.execute(
            " UNION ALL ".join(f'SELECT 1 FROM "{schema}".{table}' for table in TABLES)
        )
        return not cursor.fetchall()


@pytest.mark.parametrize("using", ["default", "optimistic", "insert", "brisk"])
@pytest.mark.usefixtures("afresh")
def test_a_search_path_set_by_hand_changes_nothing(schema, using):
    """The first lock of the process is acquired with this search path.

    Callers without this search path use the same lock.
    """
    with db_lock("stock:7", using=using) as hold:
        assert db_lock("stock:7", using=using).locked()
        with connection.cursor() as cursor:
            cursor.execute("RESET search_path")
        hold.renew()
        assert ResourceLock.objects.filter(pk="stock:7").exists()
        with hold.atomic(), connection.cursor() as cursor:
            cursor.execute('SET LOCAL search_path TO "its own"')
            hold.check()
            assert (
                ResourceLock.objects.filter(pk="stock:7")
                .by_clock()
                .with_queue()
                .get()
                .state
                == "held"
            )
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute('SET LOCAL search_path TO "its own"')
        with db_lock("stock:8", using=using) as hold:
            assert hold.scope == "transaction"
    assert is_empty(schema)


@pytest.mark.usefixtures("afresh")
def test_prepared_statements_keep_their_schema(schema):
    for path in ('"its own", public', "public", '"its own"'):
        with connection.cursor() as cursor:
            cursor.execute(f"SET search_path TO {path}")
        for _ in range(6):
            with db_lock("stock:7"):
                pass
    assert is_empty(schema)


@pytest.mark.usefixtures("afresh")
def test_the_schema_is_queried_once(django_assert_num_queries):
    """Only the first lock of a process queries the schema.

    After that, a lock is one statement to acquire and one to release.
    """
    with db_lock("stock:7"):
        pass
    backends.reset()
    for using in ("default", "optimistic"):
        with db_lock("stock:7", using=using):
            pass
        with django_assert_num_queries(2), db_lock("stock:7", using=using):
            pass


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ('"$user", public', "public"),
        ('"its own", public', "its own"),
        ("Public", "public"),
        ('nowhere,"a ""quoted"", one", public', "public"),
        ('"$user"', ""),
        ("", ""),
    ],
)
def test_the_schema_is_that_of_a_new_session(schema, path, found):
    """It is the first schema with the table in a new session's search path.

    Options of the connection are applied.
    """
    connection.close()
    options = connection.settings_dict["OPTIONS"]
    connection.settings_dict["OPTIONS"] = {
        **options,
        "options": "-c search_path=" + path.replace(" ", "\\ "),
    }
    try:
        tables = schemas.find_tables(connection)
        assert (tables.schema, list(tables.schemas)) == (found, ["its own", "public"])
        assert bool(tables.refusal("default")) is not bool(found)
    finally:
        connection.close()
        connection.settings_dict["OPTIONS"] = options


@pytest.mark.usefixtures("afresh")
def test_tables_that_no_new_session_finds_are_refused(schema):
    """Otherwise every process would lock in the schema of its search path."""
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE public.dlocks_resourcelock RENAME TO elsewhere")
    try:
        with pytest.raises(
            ImproperlyConfigured,
            match=r"in 'its own', but the search path .*: \"\$user\", public\.",
        ):
            db_lock("stock:7").acquire()
        with connection.cursor() as cursor:
            cursor.execute('DROP SCHEMA "its own" CASCADE')
            cursor.execute('CREATE SCHEMA "its own"')
        with pytest.raises(
            LockBackendError, match="no tables of dlocks. Run 'manage.py migrate dlocks"
        ):
            db_lock("stock:7").acquire()
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE public.elsewhere RENAME TO dlocks_resourcelock")
    with db_lock("stock:7") as hold:
        assert hold.held
