"""The schema of the tables of locks, with a search path that is set by hand."""

from __future__ import annotations

from functools import partial

import pytest
from django.db import connection
from django.db.transaction import atomic

from dlocks import db_semaphore
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


def test_a_step_names_the_schema_and_leaves_the_search_path(schema):
    def path():
        with connection.cursor() as cursor:
            cursor.execute("SHOW search_path")
            return cursor.fetchone()[0]

    backend = backends["default"]
    backend.store.create(["stock:7"])
    row = ResourceLock.objects.filter(pk="stock:7")
    with atomic():
        before = path()
        assert row.update(waiters=0) == 0
        assert backend.session.transaction(path) == before
        assert backend.session.transaction(partial(row.update, waiters=0)) == 1
        assert path() == before


def test_a_table_of_the_application_keeps_its_schema(schema):
    """A wrapper of the application writes within a step, to a table of its own."""

    def note(execute, sql, *arguments):
        if "the_log" not in sql:
            with connection.cursor() as cursor:
                cursor.execute('INSERT INTO "dlocks_the_log" VALUES (1)')
        return execute(sql, *arguments)

    with connection.cursor() as cursor:
        cursor.execute('CREATE TABLE "its own".dlocks_the_log (number int)')
    with connection.execute_wrapper(note), db_semaphore("stock:7", permits=2) as hold:
        hold.check()
