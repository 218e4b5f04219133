"""The dialect of a Django connection, and a check that the connection is not lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.core.exceptions import ImproperlyConfigured

from dlocks.exceptions import LockBackendError
from dlocks.sql.mariadb import MariaDB
from dlocks.sql.mysql import MySQL
from dlocks.sql.postgresql import PostgreSQL
from dlocks.sql.sqlite import SQLite

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from dlocks.sql.dialect import Dialect


def dialect_of(connection: BaseDatabaseWrapper) -> Dialect:
    """Return the dialect of a Django connection."""
    vendor = connection.vendor
    if vendor == "mysql" and getattr(connection, "mysql_is_mariadb", False):
        vendor = "mariadb"
    try:
        return _DIALECTS[vendor]
    except KeyError:
        raise ImproperlyConfigured(
            f"dlocks has no database backend for {connection.vendor!r}. Use PostgreSQL,"
            " MariaDB, MySQL or SQLite."
        ) from None


_DIALECTS: dict[str, Dialect] = {
    "postgresql": PostgreSQL(),
    "mysql": MySQL(),
    "mariadb": MariaDB(),
    "sqlite": SQLite(),
}


def refuse_lost(connection: BaseDatabaseWrapper) -> None:
    """Raise LockBackendError if only a lost connection turned autocommit off."""
    # On other engines, autocommit is a matter of the client alone.
    if (
        connection.vendor == "mysql"
        and connection.connection is not None
        and not connection.is_usable()
    ):
        raise LockBackendError(
            f"The connection to database {connection.alias!r} was lost while a"
            " transaction ended. Close it with 'connection.close()', as Django does at"
            " the end of a request."
        )
