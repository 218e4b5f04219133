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
from django.db import connection, connections, transaction

from dlocks import db_lock
from tests import pages
from tests.internals import HoldRecord, LockClaim, ResourceLock, backends, schemas

ROOT = Path(__file__).parent.parent.parent

pytestmark = [
    pytest.mark.engine("postgresql"),
    pytest.mark.django_db(transaction=True),
]

TABLES = [model._meta.db_table for model in (ResourceLock, LockClaim, HoldRecord)]


@pytest.fixture
def project():
    """Return a function that runs a scenario of tests/tenants in its process."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.tenants"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def call(situation):
            process.stdin.write(f"{situation}\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            assert "error" not in answer, answer["error"]
            return answer["result"]

        yield call
        process.stdin.close()


# What a tenant does, and what it finds with its search path.
SITUATIONS = {
    # The background thread renews the row that the tenant's thread has written.
    "renewed_for_longer_than_its_ttl": True,
    # Another connection creates its row in the schema of the transaction.
    "new_key_in_a_transaction": ["transaction"] * 3,
    "every_kind": [True] * 3,
    "without_the_public_schema": ["transaction", "held"],
    # The row in which a lock was granted guards. The tables that another alias would
    # find do not matter.
    "guarded_on_another_alias": ["stock:7", "permits"],
    "handed_over_to_another_tenant": [["acme", False, False], ["globex", True, False]],
    "seen_by_the_commands": [True] * 4,
    "recorded": 1,
    # Both tenants hold the same key, and the commands show each its own. A key is
    # locked, and there are two rows.
    "keys_of_each_tenant": [["acme:nightly", "globex:nightly"], [1, 1, 0], True, 2],
    "keys_of_each_tenant_in_a_coroutine": ["acme:nightly", True, "acme:nightly"],
    "resumed_in_another_tenant": "acme:handed",
}


def test_all_tenants_share_the_public_locks(project):
    """Every kind of lock, the commands and the history use the same tables.

    Without tables in the public schema, the first acquire raises an error with
    instructions. A check reports it too, and does not stop ``migrate_schemas``. After
    that, a prefix separates the keys of tenants. The tables of the tenants stay empty,
    whatever was locked, and may be missing.
    """
    said, checks = project("refused")
    assert len(set(said)) == 1
    for words in (
        "'acme', 'globex'",
        "SHARED_APPS",
        "migrate_schemas --shared --fake dlocks zero'",
        "migrate_schemas --shared'",
        '"$user", public',
    ):
        assert words in said[0]
    assert checks == [["dlocks.W008", said[0]]]
    assert project("tables") == {"public": None, "acme": [], "globex": []}
    for change, of_tenant in ("share", []), ("share_alone", None):
        project(change)
        for situation, expected in SITUATIONS.items():
            assert project(situation) == expected, (change, situation)
            tables = project("tables")
            found = [tables["acme"], tables["globex"]]
            assert found == [of_tenant] * 2, (change, situation)


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


def is_empty(schema):
    with connection.cursor() as cursor:
        cursor.execute(
            " UNION ALL ".join(f'SELECT 1 FROM "{schema}".{table}' for table in TABLES)
        )
        return not cursor.fetchall()


def test_a_search_path_set_by_hand_changes_nothing(
    schema, monkeypatch, django_assert_num_queries
):
    """The first lock of the process is acquired with this search path.

    Callers without this search path use the same lock. Prepared statements keep their
    schema. Only the first lock of a process queries the schema.
    """
    monkeypatch.setattr(schemas, "_schemas", {})

    def run(sql):
        with connection.cursor() as cursor:
            cursor.execute(sql)

    for using in "default", "optimistic", "insert", "brisk":
        key, new = f"{using} 7", f"{using} 8"
        schemas._schemas.clear()
        backends.reset()
        run('SET search_path TO "its own", public')
        with db_lock(key, using=using) as hold:
            assert db_lock(key, using=using).locked()
            run("RESET search_path")
            hold.renew()
            assert ResourceLock.objects.filter(pk=key).exists()
            with hold.atomic():
                run('SET LOCAL search_path TO "its own"')
                hold.check()
                shown = ResourceLock.objects.filter(pk=key).by_clock().with_queue()
                assert shown.get().state == "held"
        with transaction.atomic():
            run('SET LOCAL search_path TO "its own"')
            with db_lock(new, using=using) as hold:
                assert hold.scope == "transaction"
        assert is_empty(schema), using
    for path in ('"its own", public', "public", '"its own"'):
        run(f"SET search_path TO {path}")
        for _ in range(6):
            with db_lock("stock:7"):
                pass
    assert is_empty(schema)
    backends.reset()
    for using in "default", "optimistic":
        db_lock(key, using=using).acquire().release()
        with django_assert_num_queries(2), db_lock(key, using=using):
            pass


PATHS = {
    '"$user", public': "public",
    '"its own", public': "its own",
    "Public": "public",
    'nowhere,"a ""quoted"", one", public': "public",
    '"$user"': "",
    "": "",
}


def test_the_schema_is_that_of_a_new_session(schema):
    """It is the first schema with the table in a new session's search path.

    Options of the connection are applied.
    """
    options = connection.settings_dict["OPTIONS"]
    try:
        for path, found in PATHS.items():
            connection.close()
            option = "-c search_path=" + path.replace(" ", "\\ ")
            connection.settings_dict["OPTIONS"] = {**options, "options": option}
            tables = schemas.find_tables(connection)
            assert tables.schema == found, path
            assert list(tables.schemas) == ["its own", "public"], path
            assert bool(tables.refusal("default")) is not bool(found), path
    finally:
        connection.close()
        connection.settings_dict["OPTIONS"] = options
