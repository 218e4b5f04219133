"""System checks: what in the settings and in the database would make locks unsafe or useless."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.utils import Error

from dlocks.conf import backends

if TYPE_CHECKING:
    from dlocks.backends.database import DatabaseBackend


@checks.register("dlocks")
def check_settings(**kwargs: Any) -> list[checks.CheckMessage]:
    """Check that the app is installed, and each alias of DLOCKS."""
    messages: list[checks.CheckMessage] = []
    if not apps.is_installed("dlocks"):
        messages.append(
            checks.Error(
                "dlocks is used, but is not installed as an app.",
                hint="Add 'dlocks' to INSTALLED_APPS, then run 'manage.py migrate'.",
                id="dlocks.E001",
            )
        )
    for alias in backends:
        try:
            messages += backends[alias].check()
        except ImproperlyConfigured as error:
            messages.append(checks.Error(str(error), hint="Correct the DLOCKS setting.", id="dlocks.E002"))
    return messages


def check_database_backend(backend: DatabaseBackend) -> list[checks.CheckMessage]:
    """Check what the settings say of a backend's database, without asking it."""
    alias, database = backend.alias, backend.database
    if database not in connections.settings:
        return [
            checks.Error(
                f"DLOCKS[{alias!r}] names the database {database!r}, which DATABASES does not have.",
                hint=f"Use one of {', '.join(map(repr, connections.settings))}.",
                id="dlocks.E003",
            )
        ]
    connection = connections[database]
    options = connection.settings_dict["OPTIONS"]
    if connection.vendor == "sqlite":
        if connection.is_in_memory_db():  # type: ignore[attr-defined]
            return [
                checks.Warning(
                    f"The locks of DLOCKS[{alias!r}] are in an in-memory SQLite database, which each connection and "
                    "process has for itself: they exclude nobody outside of the thread.",
                    hint="Use a database in a file, or dlocks.backends.memory.MemoryBackend in tests.",
                    id="dlocks.W001",
                )
            ]
        if str(options.get("transaction_mode", "")).upper() not in {"IMMEDIATE", "EXCLUSIVE"}:
            return [
                checks.Warning(
                    f"Transactions on the SQLite database {database!r} begin as readers, and fail at once with "
                    "'database is locked' when they come to write, as a lock inside of them does.",
                    hint=f"Set DATABASES[{database!r}]['OPTIONS']['transaction_mode'] = 'IMMEDIATE'.",
                    id="dlocks.W002",
                )
            ]
    elif connection.vendor == "mysql":
        level = options.get("isolation_level", "read committed")
        if str(level).lower() != "read committed":
            return [
                checks.Warning(
                    f"Transactions on database {database!r} run at {level or 'the server default'}, where a snapshot "
                    "older than the lock hides what its last holder did: locks inside transactions are refused.",
                    hint=f"Set DATABASES[{database!r}]['OPTIONS']['isolation_level'] = 'read committed'.",
                    id="dlocks.W003",
                )
            ]
    elif connection.vendor != "postgresql":
        return [
            checks.Error(
                f"DLOCKS[{alias!r}] is on database {database!r} of the kind {connection.vendor!r}.",
                hint="Use PostgreSQL, MariaDB, MySQL or SQLite.",
                id="dlocks.E004",
            )
        ]
    return []


@checks.register("dlocks", checks.Tags.database)
def check_tables(databases: Sequence[str] | None = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check the tables themselves, where the databases are asked ('manage.py check --database default')."""
    from dlocks.backends.database import DatabaseBackend

    messages: list[checks.CheckMessage] = []
    seen = set()
    for alias in backends:
        try:
            backend = backends[alias]
        except ImproperlyConfigured:
            continue
        if not isinstance(backend, DatabaseBackend) or backend.database not in (databases or []):
            continue
        if backend.database not in seen and backend.connection.vendor == "mysql":
            messages += _check_innodb(backend)
        seen.add(backend.database)
    return messages


def _check_innodb(backend: DatabaseBackend) -> list[checks.CheckMessage]:
    from dlocks.models import ResourceLock

    table = ResourceLock._meta.db_table
    messages: list[checks.CheckMessage] = []
    try:
        with backend.connection.cursor() as cursor:
            cursor.execute(
                "SELECT engine FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = %s",
                [table],
            )
            rows = cursor.fetchall()
            cursor.execute(backend.dialect.show_isolation)
            ((level,),) = cursor.fetchall()
    except Error as error:
        return [checks.Warning(f"The tables of dlocks could not be looked at: {error}", id="dlocks.W005")]
    if rows and rows[0][0] != "InnoDB":
        messages.append(
            checks.Error(
                f"The table {table} on database {backend.database!r} is {rows[0][0]}, which has neither transactions "
                "nor row locks: its locks are not safe.",
                hint=f"ALTER TABLE {table} ENGINE = InnoDB;",
                id="dlocks.E005",
            )
        )
    if level.upper() != "READ-COMMITTED":
        messages.append(
            checks.Warning(
                f"Sessions on database {backend.database!r} run at {level}: locks inside transactions are refused.",
                hint=f"Set DATABASES[{backend.database!r}]['OPTIONS']['isolation_level'] = 'read committed'.",
                id="dlocks.W004",
            )
        )
    return messages
