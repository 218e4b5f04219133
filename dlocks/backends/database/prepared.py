"""The statements that psycopg prepares on the server, for each thread its own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import Error

from dlocks.sql.engines import sqlstate_of

# The SQLSTATEs of a prepared statement that is gone (invalid_sql_statement_name), whose
# name is in use (duplicate_prepared_statement), or whose table has changed
# (feature_not_supported, "cached plan must not change result type").
UNPREPARED = frozenset({"26000", "42P05", "0A000"})


class PreparedStatements:
    """The cursors of psycopg that prepare what they execute.

    ``prepare`` is the option of the backend.
    """

    def __init__(self, prepare: bool | None) -> None:
        self.prepare = prepare
        # The connection of psycopg that this thread used last, and its cursors that
        # prepare and are not in use, or None.
        self._local = threading.local()

    def rows(
        self, connection: BaseDatabaseWrapper, sql: str, parameters: Mapping[str, Any]
    ) -> Sequence[Any] | None:
        """Return the rows of a statement, or None if Django has to execute it.

        Django's log of queries reads the text of a statement from its own cursor.
        """
        is_usual = connection.vendor == "postgresql" and not connection.queries_logged
        if not is_usual or self.prepare is False:
            return None
        known, unused = getattr(self._local, "known", (None, None))
        if known is not connection.connection or known is None:
            unused = self._cursors(connection)
        if unused is None:
            return None
        # A signal handler may need one while another one is in use.
        own = unused.pop() if unused else _preparing_cursor()(connection.connection)
        try:
            cursor = _django_cursor(connection, own)
            cursor.execute(sql, parameters)
            rows: Sequence[Any] = cursor.fetchall()
            unused.append(own)
            return rows
        except Error as error:
            if sqlstate_of(error) not in UNPREPARED:
                raise
            # Another client of the session has changed what it has prepared.
            self._local.known = connection.connection, None
            if connection.in_atomic_block:
                raise
            return None

    def _cursors(self, connection: BaseDatabaseWrapper) -> Any:
        """Return no cursor of a new connection yet, or None to use Django's own."""
        connection.ensure_connection()
        raw = connection.connection
        unused: Any = [] if self._can_prepare(connection, raw) else None
        self._local.known = raw, unused
        return unused

    def _can_prepare(self, connection: BaseDatabaseWrapper, raw: Any) -> bool:
        # psycopg 2 has no such attribute. The cursors of other code may observe.
        usual = getattr(getattr(raw, "cursor_factory", None), "__module__", "")
        is_usual = usual.startswith("django.db.backends.")
        if not hasattr(raw, "prepare_threshold") or not is_usual:
            return False
        # Behind a pooler, the next statement may run in another session.
        if not (self.prepare or is_own_session(connection)):
            return False
        if raw.prepare_threshold is None:
            # Django's None excludes even statements that ask for it. With this number,
            # no other statement is ever prepared.
            raw.prepare_threshold = sys.maxsize
        return True


@cache
def _preparing_cursor() -> Any:
    from psycopg import Cursor

    class PreparingCursor(Cursor[Any]):
        """A cursor whose statements are prepared."""

        def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
            return super().execute(query, params, prepare=True, **options)

    return PreparingCursor


def _django_cursor(connection: BaseDatabaseWrapper, own: Any) -> Any:
    """Return a cursor of Django, which others may observe, around one of psycopg."""
    raw = connection.connection
    usual, raw.cursor_factory = raw.cursor_factory, lambda *_, **__: own
    try:
        return connection.cursor()
    finally:
        raw.cursor_factory = usual


def is_own_session(connection: BaseDatabaseWrapper) -> bool:
    """Return whether no pooler is between psycopg and the server.

    A pooler reports an invented process id when a connection begins.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return bool(cursor.fetchone()[0] == connection.connection.info.backend_pid)
