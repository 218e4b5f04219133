"""
The PostgreSQL schema that the tables of dlocks are in.

A caller may change its search path, as django-tenants does for each tenant. Background
threads have connections of their own. Therefore every statement names the schema. It is
the schema in which a new session finds the table, whatever the current session has set,
so all processes agree on it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from django.apps import apps
from django.db.backends.base.base import BaseDatabaseWrapper

# Our tables by the names of their placeholders. An application may have others whose
# names begin alike.
TABLES = {
    "locks": "dlocks_resourcelock",
    "claims": "dlocks_lockclaim",
    "records": "dlocks_holdrecord",
}
# The number of schemas that a message names.
NAMED = 3

# reset_val is the value that the session began with: from the server's configuration,
# the database, the role or the options of the connection. See
# https://www.postgresql.org/docs/current/view-pg-settings.html
FIND = (
    "SELECT path.reset_val, session_user, schemas.nspname FROM pg_catalog.pg_settings"
    " AS path LEFT JOIN (pg_catalog.pg_class AS tables JOIN pg_catalog.pg_namespace AS"
    " schemas ON schemas.oid = tables.relnamespace AND"
    " pg_catalog.has_schema_privilege(schemas.oid, 'USAGE')) ON tables.relname ="
    " %(table)s WHERE path.name = 'search_path'"
)
# A quoted name, or a plain one, of a search path.
NAME = re.compile(r'"((?:[^"]|"")*)"|([^\s,"]+)')

_schemas: dict[tuple[str, str], str] = {}


@dataclass(frozen=True, slots=True)
class Tables:
    """The schemas that have the tables.

    ``schema`` is the first of ``schemas`` on ``search_path``, or empty if none is on
    it.
    """

    schema: str
    search_path: str
    schemas: Sequence[str]

    def refusal(self, database: str) -> str | None:
        """Return why locks are impossible and what to do, or None.

        None means that locks are possible, or that no schema has the tables.
        """
        if self.schema or not self.schemas:
            return None
        named = ", ".join(map(repr, self.schemas[:NAMED])) + (
            ", …" if len(self.schemas) > NAMED else ""
        )
        return (
            f"Database {database!r} has the tables of dlocks in {named}, but the search"
            " path of its sessions does not include that schema:"
            f" {self.search_path or 'it is empty'}. All callers share the locks in one"
            " schema. For a schema per tenant, add 'dlocks' to SHARED_APPS and run"
            " 'manage.py migrate_schemas --shared --fake dlocks zero', then 'manage.py"
            " migrate_schemas --shared'. Otherwise set"
            f" DATABASES[{database!r}]['OPTIONS']['options'] = '-c"
            f" search_path={self.schemas[0]}'."
        )


def schema_of(connection: BaseDatabaseWrapper) -> str:
    """Return the schema of the tables, or an empty string.

    It is empty on other engines, and before the tables exist. Only the first call of a
    process queries the database.
    """
    if connection.vendor != "postgresql":
        return ""
    # A test database has the same alias under another name.
    database = connection.alias, str(connection.settings_dict["NAME"])
    if database not in _schemas:
        schema = find_tables(connection).schema
        if not schema:
            # Not cached: the first migrate may be running.
            return ""
        _schemas[database] = schema
    return _schemas[database]


def find_tables(connection: BaseDatabaseWrapper) -> Tables:
    """Return the schemas with the tables, and a new session's search path."""
    locks = apps.get_registered_model("dlocks", "ResourceLock")
    with connection.cursor() as cursor:
        cursor.execute(FIND, {"table": locks._meta.db_table})
        rows = cursor.fetchall()
    search_path, user, _ = rows[0]
    schemas = sorted(schema for *_, schema in rows if schema is not None)
    # Django sets this role when it connects. A role that the caller sets later does not
    # count.
    user = connection.settings_dict["OPTIONS"].get("assume_role") or user
    names = [
        quoted.replace('""', '"') or plain.lower()
        for quoted, plain in NAME.findall(search_path)
    ]
    path = [user if name == "$user" else name for name in names]
    return Tables(
        next((name for name in path if name in schemas), ""), search_path, schemas
    )


def qualified(table: str, connection: BaseDatabaseWrapper, schema: str) -> str:
    """Return the quoted name of a table, with its schema if there is one."""
    quote = connection.ops.quote_name
    return f"{quote(schema)}.{quote(table)}" if schema else str(quote(table))
