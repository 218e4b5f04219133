"""The class of sessions for each engine."""

from __future__ import annotations

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from dlocks.backends.session.mysql import MySQLSession
from dlocks.backends.session.postgresql import PostgreSQLSession
from dlocks.backends.session.sessions import Session

SESSIONS: dict[str, type[Session]] = {
    "postgresql": PostgreSQLSession,
    "mysql": MySQLSession,
}


def session_class(database: str) -> type[Session]:
    """Return the class for the engine of a database.

    Raise ImproperlyConfigured if the engine has no session locks.
    """
    vendor = connections[database].vendor
    if vendor not in SESSIONS:
        raise ImproperlyConfigured(
            "Session locks need PostgreSQL, MariaDB or MySQL, but database"
            f" {database!r} is {vendor}. Use"
            " dlocks.backends.database.PessimisticBackend."
        )
    return SESSIONS[vendor]
