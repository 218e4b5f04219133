"""The schema of the tables of locks, with a search path that is set by hand."""

from __future__ import annotations

import pytest
from django.db import connection, transaction

from dlocks import db_lock
from tests.internals import HoldRecord, LockClaim, ResourceLock, backends, schemas

pytestmark = [
    pytest.mark.engine("postgresql"),
    pytest.mark.django_db(transaction=True),
]

TABLES = [model._meta.db_table for model in (ResourceLock, LockClaim, HoldRecord)]


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
