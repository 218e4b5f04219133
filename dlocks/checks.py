"""System checks for settings and databases that make locks unsafe."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import django
from django.apps import apps
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db.utils import Error

from dlocks.conf import UnknownDatabaseError, backends
from dlocks.exceptions import LockBackendError
from dlocks.sql.schemas import find_tables, qualified, schema_of

if TYPE_CHECKING:
    from dlocks.backends.base import Backend
    from dlocks.backends.database.backend import DatabaseBackend
    from dlocks.backends.session.backend import SessionBackend


Messages = list[checks.CheckMessage]
Found = Iterator[checks.CheckMessage]

# The newest version of Django that the tests run with.
NEWEST_DJANGO = 6, 1

# The triggers of two tables, each with the name of its table.
TRIGGERS = {
    "postgresql": (
        "SELECT relname, tgname FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid"
        " WHERE tgrelid IN (to_regclass(%s), to_regclass(%s)) AND NOT tgisinternal AND"
        " tgenabled <> 'D' ORDER BY relname, tgname"
    ),
    "mysql": (
        "SELECT event_object_table, trigger_name FROM information_schema.triggers WHERE"
        " event_object_schema = DATABASE() AND event_object_table IN (%s, %s) ORDER BY"
        " event_object_table, trigger_name"
    ),
    "sqlite": (
        "SELECT tbl_name, name FROM sqlite_master WHERE type = 'trigger' AND tbl_name"
        " IN (%s, %s) ORDER BY tbl_name, name"
    ),
}
# Those of two tables that have row security.
ROW_SECURITY = (
    "SELECT relname FROM pg_class WHERE oid IN (to_regclass(%s), to_regclass(%s)) AND"
    " relrowsecurity ORDER BY relname"
)


@checks.register("dlocks")
def check_settings(**kwargs: Any) -> Messages:
    """Check that the app is installed, and check each alias of DLOCKS."""
    messages: Messages = []
    if not apps.is_installed("dlocks"):
        messages.append(
            checks.Error(
                "dlocks is used, but is not in INSTALLED_APPS.",
                hint="Add 'dlocks' to INSTALLED_APPS, then run 'manage.py migrate'.",
                id="dlocks.E001",
            )
        )
    shown = getattr(settings, "DLOCKS_SHOW_HOLDER", True)
    # The type is checked too, since 1 equals True.
    if not isinstance(shown, bool):
        messages.append(
            checks.Error(
                f"DLOCKS_SHOW_HOLDER has the invalid value {shown!r}, so holders are"
                " hidden.",
                hint="Set it to True or False.",
                id="dlocks.E008",
            )
        )
    try:
        aliases = list(backends)
    except ImproperlyConfigured as error:
        return [*messages, _incorrect(error)]
    for alias in aliases:
        try:
            found = backends[alias].check()
        except ImproperlyConfigured as error:
            found = [_incorrect(error)]
        if len(aliases) > 1 and alias not in getattr(settings, "DLOCKS", {}):
            # A project may only use the aliases that it has set. Its default database
            # may then be of another engine, or none.
            found = [message for message in found if message.id != "dlocks.E004"]
        # Several aliases may share a database. Its settings are reported once.
        messages += [message for message in found if message not in messages]
    return messages


def _incorrect(error: ImproperlyConfigured) -> checks.Error:
    unknown = isinstance(error, UnknownDatabaseError)
    return checks.Error(
        str(error),
        hint="Correct the DLOCKS setting.",
        id="dlocks.E003" if unknown else "dlocks.E002",
    )


@checks.register("dlocks")
def check_django(**kwargs: Any) -> Messages:
    """Check that dlocks was tested with this version of Django."""
    if django.VERSION[:2] <= NEWEST_DJANGO:
        return []
    newest = ".".join(map(str, NEWEST_DJANGO))
    return [
        checks.Warning(
            f"This version of dlocks was tested up to Django {newest}, and this is"
            f" {django.get_version()}.",
            hint="Update dlocks, or run the tests of your project and silence this.",
            id="dlocks.W012",
        )
    ]


@checks.register("dlocks", deploy=True)
def check_deployment(**kwargs: Any) -> Messages:
    """Check that no alias of DLOCKS has a backend for tests.

    It is run by 'manage.py check --deploy'.
    """
    from dlocks.backends.dummy import DummyBackend
    from dlocks.backends.memory import MemoryBackend

    return [
        checks.Warning(
            f"DLOCKS[{alias!r}] uses {type(backend).__name__}, whose locks exclude"
            f" {whom}.",
            hint="This backend is for tests. Choose another BACKEND.",
            id="dlocks.W007",
        )
        for alias, backend in _made()
        for kind, whom in (
            (DummyBackend, "no other caller"),
            (MemoryBackend, "no caller in another process"),
        )
        if isinstance(backend, kind)
    ]


def _made() -> Iterator[tuple[str, Backend]]:
    """Yield the backends that can be created. Another check reports the others."""
    try:
        aliases = list(backends)
    except ImproperlyConfigured:
        return
    for alias in aliases:
        with suppress(ImproperlyConfigured):
            yield alias, backends[alias]


@checks.register("dlocks", checks.Tags.database)
def check_tables(databases: Sequence[str] | None = None, **kwargs: Any) -> Messages:
    """Check the tables in the databases.

    It is run by 'manage.py check --database default'.
    """
    if not apps.is_installed("dlocks"):
        return []
    found: dict[str, Messages] = {alias: [] for alias in databases or []}
    for _, backend in _made():
        messages = found.get(getattr(backend, "database", ""))
        if messages is None or any(one.id == "dlocks.W005" for one in messages):
            # Each alias would report that the database cannot be reached.
            continue
        # Aliases may share a database.
        messages += [one for one in check_alias(backend) if one not in messages]
    return [message for messages in found.values() for message in messages]


def check_alias(backend: Backend) -> Messages:
    """Check the tables or the sessions of one alias, if it has any."""
    from dlocks.backends.database.backend import DatabaseBackend
    from dlocks.backends.session.backend import SessionBackend

    if isinstance(backend, SessionBackend):
        return _check_session(backend)
    if not isinstance(backend, DatabaseBackend):
        return []
    messages: Messages = []
    try:
        messages.extend(_check_database(backend))
    except Error as error:
        what = f"The tables of dlocks could not be checked: {error}"
        messages.append(checks.Warning(what, id="dlocks.W005"))
    return messages


def _check_database(backend: DatabaseBackend) -> Found:
    vendor = backend.connection.vendor
    refusal = None
    if vendor == "postgresql":
        refusal = find_tables(backend.connection).refusal(backend.database)
    if refusal is None:
        yield from _check_migrated(backend)
    else:
        # A session does not find tables in another schema, so they would be reported as
        # missing. An error would stop the migrate that solves the problem.
        yield checks.Warning(refusal, id="dlocks.W008")
    yield from _check_interference(backend)
    if vendor == "mysql":
        yield from _check_innodb(backend)
    if vendor != "sqlite":
        yield from _check_isolation(backend)


def _tables() -> list[str]:
    """Return the names of the tables of locks and claims."""
    from dlocks.models import LockClaim, ResourceLock

    return [ResourceLock._meta.db_table, LockClaim._meta.db_table]


def _check_session(backend: SessionBackend) -> Messages:
    try:
        backend.try_session()
    except ImproperlyConfigured as error:
        return [
            checks.Error(
                str(error), hint="See docs/how-to/session-locks.md.", id="dlocks.E007"
            )
        ]
    except LockBackendError as error:
        return [checks.Warning(str(error), id="dlocks.W005")]
    return []


def _check_migrated(backend: DatabaseBackend) -> Found:
    from dlocks.models import HoldRecord

    locks, claims = _tables()
    needed = {
        claims: "waiting for a lock fails",
        HoldRecord._meta.db_table: "no hold is recorded",
    }
    with backend.connection.cursor() as cursor:
        tables = backend.connection.introspection.table_names(cursor)
    hint = f"Run 'manage.py migrate dlocks --database {backend.database}'."
    if locks not in tables:
        # The first 'manage.py migrate' runs this check before it creates the table.
        if sys.argv[1:2] != ["migrate"]:
            yield checks.Warning(
                f"Database {backend.database!r} does not have the table {locks}, so"
                " every lock on it fails.",
                hint=hint,
                id="dlocks.W006",
            )
        return
    for table, consequence in needed.items():
        if table not in tables:
            yield checks.Warning(
                f"Database {backend.database!r} has the table {locks} but not {table}."
                " Its tables are of an older version of dlocks, and"
                f" {consequence}.",
                hint=hint,
                id="dlocks.W006",
            )


def _check_interference(backend: DatabaseBackend) -> Found:
    """Check that no policy hides rows, and that no trigger changes them."""
    connection, tables = backend.connection, _tables()
    vendor, schema = connection.vendor, schema_of(connection)
    if vendor == "postgresql":
        tables = [qualified(table, connection, schema) for table in tables]
    hiding: Sequence[Any] = ()
    with connection.cursor() as cursor:
        cursor.execute(TRIGGERS[vendor], tables)
        triggers = cursor.fetchall()
        if vendor == "postgresql":
            cursor.execute(ROW_SECURITY, tables)
            hiding = cursor.fetchall()
    for (table,) in hiding:
        yield checks.Warning(
            f"The table {table} on database {backend.database!r} has row security. A"
            " role from which a policy hides rows cannot acquire their locks, or does"
            " not see that they are held.",
            hint=f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY;",
            id="dlocks.W010",
        )
    for table, trigger in triggers:
        yield checks.Warning(
            f"The table {table} on database {backend.database!r} has the trigger"
            f" {trigger!r}. It runs with every lock, which fails or is granted wrongly"
            " if the trigger fails or changes a row.",
            hint="Drop the trigger, or silence this warning if it does neither.",
            id="dlocks.W011",
        )


def _check_innodb(backend: DatabaseBackend) -> Found:
    from dlocks.fields import KeyField
    from dlocks.models import LockClaim, ResourceLock

    ours, names = "table_schema = DATABASE() AND table_name IN (%s, %s)", _tables()
    with backend.connection.cursor() as cursor:
        cursor.execute(
            f"SELECT table_name, engine FROM information_schema.tables WHERE {ours}",
            names,
        )
        engines = sorted(cursor.fetchall())
        cursor.execute(
            "SELECT table_name, column_name, collation_name FROM"
            f" information_schema.columns WHERE {ours}",
            names,
        )
        collations = {
            (table, column): collation for table, column, collation in cursor.fetchall()
        }
    for table, engine in engines:
        if engine != "InnoDB":
            yield checks.Error(
                f"The table {table} on database {backend.database!r} uses {engine},"
                " which has neither transactions nor row locks, so its locks are not"
                " safe.",
                hint=f"ALTER TABLE {table} ENGINE = InnoDB;",
                id="dlocks.E005",
            )
    for field in (
        *ResourceLock._meta.concrete_fields,
        *LockClaim._meta.concrete_fields,
    ):
        if not isinstance(field, KeyField):
            continue
        table, column = field.model._meta.db_table, field.column
        wanted = field.db_parameters(backend.connection)["collation"]
        if (found := collations.get((table, column), wanted)) != wanted:
            definition = (
                f"{field.db_type(backend.connection)} COLLATE {wanted} NOT NULL"
            )
            yield checks.Error(
                f"{table}.{column} on database {backend.database!r} has the collation"
                f" {found}, which treats some different keys as equal.",
                hint=f"ALTER TABLE {table} MODIFY {column} {definition};",
                id="dlocks.E006",
            )


def _check_isolation(backend: DatabaseBackend) -> Found:
    """Check the isolation level of a session.

    It may be a default of the server, the database or the role.
    """
    connection = backend.connection
    options = connection.settings_dict["OPTIONS"]
    if connection.vendor == "postgresql" and options.get("isolation_level") is not None:
        # The driver sets it at each BEGIN, and another check has examined it.
        return
    with connection.cursor() as cursor:
        cursor.execute(backend.session.engine.isolation)
        level, *all_or_nothing = cursor.fetchone()
    if level.upper().replace("-", " ") not in backend.session.engine.levels:
        how = (
            "'read committed'"
            if connection.vendor == "mysql"
            else "IsolationLevel.READ_COMMITTED, or change"
            " default_transaction_isolation on the server"
        )
        yield checks.Warning(
            f"Sessions on database {backend.database!r} run at {level}, so locks inside"
            " transactions are refused.",
            hint=(
                f"Set DATABASES[{backend.database!r}]['OPTIONS']['isolation_level'] ="
                f" {how}."
            ),
            id="dlocks.W004",
        )
    if any(all_or_nothing):
        yield checks.Warning(
            f"The server of database {backend.database!r} runs with"
            " innodb_rollback_on_timeout=ON, so a busy key would roll back a whole"
            " transaction. Locks inside transactions are refused.",
            hint=(
                "Switch it off in the configuration of the server, or use locks with"
                " scope='lease'."
            ),
            id="dlocks.W004",
        )
