"""The system check of the database of an alias."""

from __future__ import annotations

from typing import Any

from django.core import checks
from django.db import connections

from dlocks.transactions import how_to_autocommit


def check_database(alias: str, database: str) -> list[checks.CheckMessage]:
    """Check the settings of a backend's database, without a query."""
    connection = connections[database]
    message = _check_engine(alias, database, connection)
    messages = [] if message is None else [message]
    if not connection.settings_dict["AUTOCOMMIT"]:
        messages.append(
            checks.Warning(
                f"Database {database!r} has 'AUTOCOMMIT': False, so Django does not"
                " report when its transactions end. Locks outside of 'with atomic()'"
                " are refused without scope='lease', and so is hold.atomic().",
                hint=f"{how_to_autocommit(database)}.",
                id="dlocks.W009",
            )
        )
    return messages


def _check_engine(
    alias: str, database: str, connection: Any
) -> checks.CheckMessage | None:
    vendor, options = connection.vendor, connection.settings_dict["OPTIONS"]
    if vendor not in {"sqlite", "mysql", "postgresql"}:
        return checks.Error(
            f"DLOCKS[{alias!r}] uses database {database!r}, whose engine {vendor!r} is"
            " not supported.",
            hint="Use PostgreSQL, MariaDB, MySQL or SQLite.",
            id="dlocks.E004",
        )
    if vendor == "sqlite":
        if connection.is_in_memory_db():
            return checks.Warning(
                f"The locks of DLOCKS[{alias!r}] are in an in-memory SQLite database."
                " Each connection has its own, so the locks do not exclude callers in"
                " other threads and processes.",
                hint=(
                    "Use a database in a file, or dlocks.backends.memory.MemoryBackend"
                    " in tests."
                ),
                id="dlocks.W001",
            )
        mode = str(options.get("transaction_mode", "")).upper()
        if mode not in {"IMMEDIATE", "EXCLUSIVE"}:
            return checks.Warning(
                f"Transactions on the SQLite database {database!r} begin as readers."
                " They fail with 'database is locked' when they start to write, for"
                " example to acquire a lock.",
                hint=(
                    f"Set DATABASES[{database!r}]['OPTIONS']['transaction_mode'] ="
                    " 'IMMEDIATE'."
                ),
                id="dlocks.W002",
            )
        return None
    level = options.get("isolation_level", "read committed")
    setting = f"DATABASES[{database!r}]['OPTIONS']['isolation_level']"
    if vendor == "mysql":
        if str(level).lower() == "read committed":
            return None
        runs, hint = level or "the server default", f"Set {setting} = 'read committed'."
    else:
        # Its driver may not be installed. The numbers depend on the driver.
        from django.db.backends.postgresql.psycopg_any import IsolationLevel as Level

        # The server's default is READ COMMITTED.
        if level in {
            "read committed",
            None,
            Level.READ_UNCOMMITTED,
            Level.READ_COMMITTED,
        }:
            return None
        runs, hint = "an isolation level above READ COMMITTED", f"Remove {setting}."
    return checks.Warning(
        f"Transactions on database {database!r} run at {runs}. A snapshot older than"
        " the lock hides the last holder's changes, so locks inside transactions are"
        " refused.",
        hint=hint,
        id="dlocks.W003",
    )
