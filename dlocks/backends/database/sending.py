"""Sending of statements, with retries after lost races and connections."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DatabaseError, Error, InterfaceError

from dlocks.backends.base import TableLockedError
from dlocks.backends.database.connection import DatabaseConnection
from dlocks.backends.database.watchdog import table_watchdog
from dlocks.runtime.pools import close_lost
from dlocks.runtime.requests import nested_request
from dlocks.sql.direct import Reply, is_in_statement, is_instrumented

T = TypeVar("T")

# Number of retries of a statement that lost against a concurrent one.
CONTENTION_TRIES = 8
# The same if the server has rolled back the transaction. The nodes of a Galera cluster
# do so for as long as they write concurrently. The longest delay is in seconds.
CONFLICT_TRIES = 40
LONGEST_CONFLICT_DELAY = 0.1


class Sender(DatabaseConnection):
    """The part that sends statements, past Django's cursor where that is possible."""

    # Whether statements may bypass Django's cursor. PostgreSQL prepares them. ``None``
    # means that on PostgreSQL they do so only if the session is the process's own.
    prepare: bool | None = None
    spin: float

    def _rows(self, sql: str, parameters: Mapping[str, Any]) -> Any:
        return self._ask(sql, parameters).rows

    def _count(
        self,
        sql: str,
        parameters: Mapping[str, Any],
        *,
        locked: Callable[[], int] | None = None,
    ) -> int:
        """Return the number of rows that the statement changed."""
        reply = self._ask(
            sql,
            parameters,
            locked=None if locked is None else lambda: Reply([], locked()),
        )
        return reply.changed

    def _ask(
        self,
        sql: str,
        parameters: Mapping[str, Any],
        *,
        locked: Callable[[], Reply] | None = None,
    ) -> Reply:
        return self._run(self._execute, sql, parameters, locked=locked)

    def _execute(
        self,
        connection: BaseDatabaseWrapper,
        in_transaction: bool,
        sql: str,
        parameters: Mapping[str, Any],
    ) -> Reply:
        if (
            not in_transaction
            and self.prepare is not False
            and not is_instrumented(connection)
        ):
            try:
                # This may detect that the connection was lost in an earlier statement,
                # which was not ours.
                reply = self.dialect.send(
                    connection,
                    sql,
                    parameters,
                    through_a_pooler=self.prepare is True,
                    spin=self.spin,
                )
            except Exception:
                # Convert the driver's errors to Django's. This is done only after an
                # error, because the context manager takes time.
                with connection.wrap_database_errors:
                    raise
            if reply is not None:
                return reply
        return self._by_cursor(connection, in_transaction, sql, parameters)

    def _by_cursor(
        self,
        connection: BaseDatabaseWrapper,
        _in_transaction: bool,
        sql: str,
        parameters: Mapping[str, Any],
    ) -> Reply:
        with connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            # Fetch all rows, because an unfinished statement keeps SQLite's write lock.
            rows = cursor.fetchall() if cursor.description else []
            while True:
                if connection.vendor != "mysql" or not cursor.nextset():
                    break
                rows = cursor.fetchall() if cursor.description else rows
            return Reply(
                rows,
                int(cursor.rowcount),
                cursor.lastrowid if connection.vendor == "mysql" else 0,
            )

    def _packet(self, sql: str, parameters: Mapping[str, Any]) -> Any:
        """Send a step in one round trip.

        Return the rows of the last result, or None if the row is locked.
        """

        def send(connection: BaseDatabaseWrapper, in_transaction: bool) -> Any:
            try:
                return self._execute(connection, in_transaction, sql, parameters).rows
            except DatabaseError:
                if connection.vendor == "mysql":
                    # The failed statement may have begun a transaction.
                    with connection.cursor() as cursor:
                        cursor.execute("ROLLBACK")
                raise

        return self._run(send, locked=lambda: None)

    def _run(
        self,
        work: Callable[..., T],
        *arguments: Any,
        locked: Callable[[], T] | None = None,
    ) -> T:
        """Execute one statement, and retry it after lost races and connections.

        It is only retried outside a transaction. ``work`` is called with the
        connection, whether it is in a transaction, and ``arguments``. If another
        transaction has locked the row, the result of ``locked()`` is returned. Every
        statement of this package may be sent twice.
        """
        connection = self.connection
        in_transaction = self.in_transaction(connection)
        raw = connection.connection
        if raw is not None and self.dialect.is_busy(raw):
            raise nested_request()
        tries, reconnected, may_have_run = 0, False, False
        while True:
            watched = None
            try:
                # The statement that finds the tables is not watched.
                watched = table_watchdog.begin(
                    connection, self.dialect, vars(self).get("_tables", [])[:2]
                )
                return work(connection, in_transaction, *arguments)
            except Error as error:
                if (
                    watched
                    and watched.was_cancelled
                    and self.dialect.was_cancelled(error)
                ):
                    raise TableLockedError(
                        f"A lock request to database {self.database!r} was cancelled. A"
                        " table of dlocks is locked as a whole by a migration, a"
                        " backup, VACUUM FULL or LOCK TABLE. Wait for its end, or end"
                        " the session that locks it."
                    ) from error
                if (
                    locked is not None
                    and isinstance(error, DatabaseError)
                    and (self.dialect.fails_alone or not in_transaction)
                    and self.dialect.is_locked(error)
                ):
                    return locked()
                if in_transaction or not isinstance(
                    error, (DatabaseError, InterfaceError)
                ):
                    if (
                        in_transaction
                        and isinstance(error, DatabaseError)
                        and self.dialect.ends_transaction(error)
                    ):
                        # Otherwise the later writes of the caller would be committed
                        # without the earlier ones.
                        connection.needs_rollback = connection.in_atomic_block
                    raise self._failure(error) from error
                if self.dialect.is_desynchronised(error) and is_in_statement():
                    # To close the connection would end the outer statement.
                    raise nested_request() from error
                if isinstance(error, DatabaseError) and self._again(error, tries):
                    tries += 1
                    continue
                if (
                    connection.connection is not None
                    and not reconnected
                    and self._must_reconnect(connection, error)
                ):
                    # The server may have carried the statement out before the loss.
                    may_have_run = not self._is_refused(error)
                    close_lost(connection)
                    reconnected = True
                    continue
                was_sent = connection.connection is not None
                self._drop_half_made(connection)
                failure = self._failure(error, was_sent=was_sent)
                failure.changed_nothing = failure.changed_nothing and not may_have_run
                raise failure from error
            except BaseException:
                # The statement was interrupted, by Ctrl-C or by an exception from a
                # signal handler.
                if not in_transaction:
                    self.dialect.abort_statement(connection)
                raise
            finally:
                table_watchdog.end(watched)

    def _again(self, error: DatabaseError, tries: int) -> bool:
        """Wait, and return whether to retry after this number of ``tries``.

        The wait grows with each try. Return False without waiting if the error is not a
        lost race, or after too many tries.
        """
        if not self.dialect.is_contention(error):
            return False
        delay = 0.004 * 2**tries
        if self.dialect.ends_transaction(error):
            delay, at_most = min(delay, LONGEST_CONFLICT_DELAY), CONFLICT_TRIES
        else:
            at_most = CONTENTION_TRIES
        if tries >= at_most:
            return False
        time.sleep(random.uniform(0, delay))  # noqa: S311 (jitter)
        return True
