"""System checks: what in the settings and in the database would make locks unsafe or useless."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.utils import Error

from dlocks import privacy
from dlocks.backends.session.wires import wire_class
from dlocks.conf import backends
from dlocks.exceptions import LockBackendError

if TYPE_CHECKING:
    from dlocks.backends.base import BaseBackend
    from dlocks.backends.database import DatabaseBackend
    from dlocks.backends.session import SessionBackend


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
    shown = getattr(settings, "DLOCKS_SHOW_HOLDER", True)
    # Not by equality alone: 1 is not True.
    if not isinstance(shown, bool) and shown != privacy.HASH:
        messages.append(
            checks.Error(
                f"DLOCKS_SHOW_HOLDER is {shown!r}, so holders are hidden.",
                hint=f"Set it to True, {privacy.HASH!r} or False.",
                id="dlocks.E008",
            )
        )
    try:
        aliases = list(backends)
    except ImproperlyConfigured as error:
        return [*messages, checks.Error(str(error), hint="Correct the DLOCKS setting.", id="dlocks.E002")]
    for alias in aliases:
        try:
            messages += backends[alias].check()
        except ImproperlyConfigured as error:
            messages.append(checks.Error(str(error), hint="Correct the DLOCKS setting.", id="dlocks.E002"))
    return messages


def check_database_backend(backend: DatabaseBackend) -> list[checks.CheckMessage]:
    """Check what the settings say of a backend's database, without asking it."""
    alias, database = backend.alias, backend.database
    if database not in connections.settings:
        return [_no_such_database(alias, database)]
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
    elif connection.vendor == "postgresql":
        # psycopg's numbers: read uncommitted and read committed; the server's default is the latter.
        if options.get("isolation_level") not in {None, 1, 2}:
            return [
                checks.Warning(
                    f"Transactions on database {database!r} run at an isolation level above READ COMMITTED, where a"
                    " snapshot older than the lock hides what its last holder did: locks inside transactions are"
                    " refused.",
                    hint=f"Leave out DATABASES[{database!r}]['OPTIONS']['isolation_level'].",
                    id="dlocks.W003",
                )
            ]
    else:
        return [
            checks.Error(
                f"DLOCKS[{alias!r}] is on database {database!r} of the kind {connection.vendor!r}.",
                hint="Use PostgreSQL, MariaDB, MySQL or SQLite.",
                id="dlocks.E004",
            )
        ]
    return []


def check_session_backend(backend: SessionBackend) -> list[checks.CheckMessage]:
    """Check what the settings say of a session backend's database, without asking it."""
    if backend.database not in connections.settings:
        return [_no_such_database(backend.alias, backend.database)]
    try:
        wire_class(backend.database)
    except ImproperlyConfigured as error:
        return [
            checks.Error(
                f"DLOCKS[{backend.alias!r}]: {error}",
                hint="Choose another BACKEND, or another database.",
                id="dlocks.E004",
            )
        ]
    return []


def _no_such_database(alias: str, database: str) -> checks.CheckMessage:
    return checks.Error(
        f"DLOCKS[{alias!r}] names the database {database!r}, which DATABASES does not have.",
        hint=f"Use one of {', '.join(map(repr, connections.settings))}.",
        id="dlocks.E003",
    )


@checks.register("dlocks", deploy=True)
def check_deployment(**kwargs: Any) -> list[checks.CheckMessage]:
    """Check that each alias of DLOCKS is for more than tests ('manage.py check --deploy')."""
    from dlocks.backends.dummy import DummyBackend
    from dlocks.backends.memory import MemoryBackend

    messages: list[checks.CheckMessage] = []
    for alias, backend in _made():
        if isinstance(backend, (DummyBackend, MemoryBackend)):
            whom = "nobody" if isinstance(backend, DummyBackend) else "nobody outside of the process"
            messages.append(
                checks.Warning(
                    f"The locks of DLOCKS[{alias!r}] are those of {type(backend).__name__}, and exclude {whom}.",
                    hint="It is for tests: choose another BACKEND.",
                    id="dlocks.W007",
                )
            )
    return messages


def _made() -> Iterator[tuple[str, BaseBackend]]:
    """Yield those of the backends that can be made; another check tells why the others cannot."""
    try:
        aliases = list(backends)
    except ImproperlyConfigured:
        return
    for alias in aliases:
        with suppress(ImproperlyConfigured):
            yield alias, backends[alias]


@checks.register("dlocks", checks.Tags.database)
def check_tables(databases: Sequence[str] | None = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check the tables themselves, where the databases are asked ('manage.py check --database default')."""
    from dlocks.backends.database import DatabaseBackend
    from dlocks.backends.session import SessionBackend

    messages: list[checks.CheckMessage] = []
    seen = set()
    for _, backend in _made():
        if getattr(backend, "database", None) not in (databases or []):
            continue
        if isinstance(backend, SessionBackend):
            messages += _check_session(backend)
        if not isinstance(backend, DatabaseBackend):
            continue
        if backend.database not in seen:
            messages += _check_migrated(backend)
            if backend.connection.vendor == "mysql":
                messages += _check_innodb(backend)
        seen.add(backend.database)
    return messages


def _check_session(backend: SessionBackend) -> list[checks.CheckMessage]:
    try:
        backend.try_session()
    except ImproperlyConfigured as error:
        return [checks.Error(str(error), hint="See docs/how-to/session-locks.md.", id="dlocks.E007")]
    except LockBackendError as error:
        return [checks.Warning(str(error), id="dlocks.W005")]
    return []


def _check_migrated(backend: DatabaseBackend) -> list[checks.CheckMessage]:
    from dlocks.models import HoldRecord, LockClaim, ResourceLock

    locks, claims = ResourceLock._meta.db_table, LockClaim._meta.db_table
    needed = {claims: "whoever has to wait for a lock fails", HoldRecord._meta.db_table: "no hold is recorded"}
    try:
        with backend.connection.cursor() as cursor:
            tables = backend.connection.introspection.table_names(cursor)
    except Error as error:
        return [checks.Warning(f"The tables of dlocks could not be looked at: {error}", id="dlocks.W005")]
    # Neither is there before the first migrate, which runs this check and must not be in its own way.
    return [
        checks.Warning(
            f"Database {backend.database!r} has the table {locks} but not {table}: it is at an older version of "
            f"dlocks, and {consequence}.",
            hint=f"Run 'manage.py migrate dlocks --database {backend.database}'.",
            id="dlocks.W006",
        )
        for table, consequence in needed.items()
        if locks in tables and table not in tables
    ]


def _check_innodb(backend: DatabaseBackend) -> list[checks.CheckMessage]:
    from dlocks.models import KeyField, LockClaim, ResourceLock

    fields = [
        field
        for model in (ResourceLock, LockClaim)
        for field in model._meta.concrete_fields
        if isinstance(field, KeyField)
    ]
    messages: list[checks.CheckMessage] = []
    try:
        with backend.connection.cursor() as cursor:
            cursor.execute(
                "SELECT table_name, engine FROM information_schema.tables"
                " WHERE table_schema = DATABASE() AND table_name IN (%s, %s)",
                [ResourceLock._meta.db_table, LockClaim._meta.db_table],
            )
            engines = sorted(cursor.fetchall())
            cursor.execute(
                "SELECT table_name, column_name, collation_name FROM information_schema.columns"
                " WHERE table_schema = DATABASE() AND table_name IN (%s, %s)",
                [ResourceLock._meta.db_table, LockClaim._meta.db_table],
            )
            collations = {(table, column): collation for table, column, collation in cursor.fetchall()}
            cursor.execute(backend.dialect.show_isolation)
            level, *all_or_nothing = cursor.fetchone()
    except Error as error:
        return [checks.Warning(f"The tables of dlocks could not be looked at: {error}", id="dlocks.W005")]
    messages += [
        checks.Error(
            f"The table {table} on database {backend.database!r} is {engine}, which has neither transactions "
            "nor row locks: its locks are not safe.",
            hint=f"ALTER TABLE {table} ENGINE = InnoDB;",
            id="dlocks.E005",
        )
        for table, engine in engines
        if engine != "InnoDB"
    ]
    for field in fields:
        table, column = field.model._meta.db_table, field.column
        wanted = field.db_parameters(backend.connection)["collation"]
        if (found := collations.get((table, column), wanted)) != wanted:
            definition = f"{field.db_type(backend.connection)} COLLATE {wanted} NOT NULL"
            messages.append(
                checks.Error(
                    f"{table}.{column} on database {backend.database!r} has the collation {found}, by which keys that "
                    "differ may be the same lock.",
                    hint=f"ALTER TABLE {table} MODIFY {column} {definition};",
                    id="dlocks.E006",
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
    if any(all_or_nothing):
        messages.append(
            checks.Warning(
                f"The server of database {backend.database!r} runs with innodb_rollback_on_timeout=ON, and a key that "
                "is busy would take back a whole transaction: locks inside transactions are refused.",
                hint="Switch it off in the configuration of the server, or lock with scope='lease'.",
                id="dlocks.W004",
            )
        )
    return messages
