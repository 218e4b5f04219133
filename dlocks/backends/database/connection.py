"""The connection to one database, its loss, and the errors that are reported for it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import Error, InterfaceError, OperationalError

# This is not functools.cached_property, which holds a lock in Python 3.11. A thread
# that waits there for a connection of a pool would block the threads that have one. See
# https://docs.python.org/3/library/functools.html#functools.cached_property
from django.utils.functional import cached_property

from dlocks.exceptions import LockBackendError
from dlocks.runtime.connected import connection_of
from dlocks.sql.dialect import Dialect
from dlocks.sql.direct import connect, is_in_statement
from dlocks.sql.engines import dialect_of
from dlocks.sql.postgresql import sqlstate_of


class DatabaseConnection:
    """The part that connects to a database, and explains its errors.

    ``database`` is an alias of DATABASES. It must accept writes.
    """

    database: str

    @property
    def connection(self) -> BaseDatabaseWrapper:
        return connection_of(self.database)

    @cached_property
    def dialect(self) -> Dialect:
        connection = self.connection
        if connection.vendor == "mysql" and "mysql_server_data" not in vars(connection):
            # Django queries the server once whether it is MariaDB or MySQL. This may
            # fail like any statement.
            try:
                return dialect_of(connection)
            except Error as error:
                if (
                    connection.connection is None
                    or self.in_transaction()
                    or is_in_statement()
                ):
                    raise self._failure(error, was_sent=False) from error
                connection.close()
        try:
            return dialect_of(connection)
        except Error as error:
            raise self._failure(error, was_sent=False) from error

    def in_transaction(self, connection: BaseDatabaseWrapper | None = None) -> bool:
        connection = connection or self.connection
        if connection.in_atomic_block:
            return True
        if connection.connection is None:
            return not connection.settings_dict["AUTOCOMMIT"]
        return not connection.autocommit

    def _session(self) -> Any:
        """Return the session, which differs after a reconnection by Django."""
        connection = self.connection
        try:
            connect(connection)
        except Error as error:
            self._drop_half_made(connection)
            raise self._failure(error, was_sent=False) from error
        return connection.connection

    def _must_reconnect(self, connection: BaseDatabaseWrapper, error: Error) -> bool:
        """Return whether the session is lost, or its server became a replica."""
        if self._is_left_read_only(connection, error):
            return True
        if not isinstance(
            error, (OperationalError, InterfaceError)
        ) and not self.dialect.is_desynchronised(error):
            return False
        return not connection.is_usable()

    def _is_left_read_only(self, connection: BaseDatabaseWrapper, error: Error) -> bool:
        if not self.dialect.is_read_only(error):
            return False
        if connection.vendor == "postgresql" and connection.connection is not None:
            # A pool would keep the session and hand it out again.
            with suppress(connection.Database.Error):  # type: ignore[attr-defined]
                connection.connection.close()
        return True

    def _drop_half_made(self, connection: BaseDatabaseWrapper) -> None:
        """Close a failed connection that appears to be in a transaction.

        No transaction was open, but the connection failed before it returned to
        autocommit. Django would keep it, and treat the next atomic() as a nested one.
        If that one failed at its beginning, all later ones would fail too.
        """
        if connection.connection is not None and self.in_transaction(connection):
            connection.in_atomic_block = False
            with suppress(Error):
                connection.close()

    def _failure(self, error: Error, *, was_sent: bool = True) -> LockBackendError:
        what = (
            f"A lock request to database {self.database!r} failed:"
            f" {type(error).__name__}: {error}"
        )
        if is_unmigrated(error):
            what = f"{what.rstrip()}. {how_to_migrate(self.database)}"
        elif "dialect" in vars(self) and self.dialect.is_read_only(error):
            what = (
                f"{what.rstrip()}. The session cannot write:"
                f" {self.dialect.read_only_settings}."
            )
        failure = LockBackendError(what)
        failure.changed_nothing = not was_sent or self._is_refused(error)
        return failure

    def _is_refused(self, error: Error) -> bool:
        """Return whether the server has refused to carry out the statement."""
        return is_unmigrated(error) or (
            "dialect" in vars(self)
            and (self.dialect.is_read_only(error) or self.dialect.is_denied(error))
        )


def how_to_migrate(database: str) -> str:
    """Return what to do about a missing table."""
    name = str(connections[database].settings_dict["NAME"])
    # A test database is shared by the threads of its process.
    if name == ":memory:" or ("mode=memory" in name and "cache=shared" not in name):
        return (
            f"DATABASES[{database!r}] is in memory, where each thread has a database of"
            " its own: only the thread that ran 'migrate' finds the table. Use a"
            " database in a file."
        )
    return f"Run 'manage.py migrate dlocks --database {database}'."


def is_unmigrated(error: BaseException) -> bool:
    """Return whether the error means that a table or column of dlocks is missing."""
    if isinstance(error, LockBackendError) and error.__cause__ is not None:
        error = error.__cause__
    # These are undefined_table and undefined_column of PostgreSQL, the codes of MySQL
    # and MariaDB, and SQLite's messages.
    return (
        sqlstate_of(error) in {"42P01", "42703"}
        or error.args[:1] in {(1146,), (1054,)}
        or any(words in str(error) for words in ("no such table", "no such column"))
    )
