"""Statements that psycopg's own cursor executes on PostgreSQL.

Django's cursor writes the parameters into the text and prepares nothing. psycopg's own
prepares the statements that a session sends often, so they are planned only once.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dlocks.runtime import clock
from dlocks.runtime.polling import ready
from dlocks.sql.direct import TEXT_AT_MOST, Reply

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn

logger = logging.getLogger("dlocks")

# A statement is prepared when a session sends it for the fifth time. Most sessions of a
# web site are shorter.
PREPARED_AT = 5

# Seconds to wait for the end of an interrupted statement, and within them for its
# cancellation.
REPLY_TIMEOUT = 5.0
CANCEL_TIMEOUT = 2.0


class _Session:
    """How many statements a session has sent, and whether it may prepare any."""

    __slots__ = ("may_prepare", "statements")

    def __init__(self, connection: Any) -> None:
        self.statements = 0
        # psycopg 2 has no ``pgconn``. Any other class of cursors is instrumented, or
        # would prepare the statements of the project, too.
        self.may_prepare = hasattr(connection, "pgconn") and (
            connection.cursor_factory is _djangos_cursor()
        )


_sessions: weakref.WeakKeyDictionary[Any, _Session] = weakref.WeakKeyDictionary()


def _djangos_cursor() -> Any:
    from django.db.backends.postgresql.base import Cursor

    return Cursor


def by_psycopg(
    connection: Any,
    sql: str,
    parameters: Mapping[str, Any],
    *,
    through_a_pooler: bool,
) -> Reply | None:
    """Execute one statement with psycopg's own cursor, on an open connection.

    Return None if the statement has to use Django's cursor.
    """
    if (session := _sessions.get(connection)) is None:
        session = _sessions[connection] = _Session(connection)
    if not session.may_prepare or len(sql) > TEXT_AT_MOST:
        return None
    from psycopg import Cursor, errors

    cursor = Cursor(connection)
    session.statements += 1
    try:
        if session.statements == PREPARED_AT and connection.prepare_threshold is None:
            if not through_a_pooler and not _is_own(cursor, connection):
                session.may_prepare = False
                return None
            # The number of times that a statement is sent before it is prepared.
            connection.prepare_threshold = PREPARED_AT - 1
        cursor.execute(sql, parameters)
    except (
        errors.InvalidSqlStatementName,
        errors.DuplicatePreparedStatement,
        errors.FeatureNotSupported,
    ):
        # The session has lost its prepared statements, has another one of this name, or
        # has a plan whose result has changed. The statement was not executed.
        session.may_prepare = False
        connection.prepare_threshold = None
        return None
    return Reply(cursor.fetchall() if cursor.description else [], cursor.rowcount)


def _is_own(cursor: Any, connection: Any) -> bool:
    """Return whether the session belongs to this process alone.

    A pooler invents the process id that it reports when a connection begins, and the
    next statement may run in another session.
    """
    ((pid,),) = cursor.execute("SELECT pg_backend_pid()").fetchall()
    return bool(pid == connection.info.backend_pid)


def is_in_progress(connection: Any) -> bool:
    """Return whether a connection of the driver waits for a reply."""
    # psycopg 2 has no ``pgconn``. It returns from libpq only with the reply.
    if (pgconn := getattr(connection, "pgconn", None)) is None:
        return False
    from psycopg import pq

    return bool(pgconn.transaction_status == pq.TransactionStatus.ACTIVE)


def end_interrupted(connection: Any) -> None:
    """End an interrupted statement and its session, which is unusable.

    A server whose client is gone still executes what it has received. So it could grant
    a key after another session has released the claim. Therefore the statement is
    cancelled, if that is possible in time. Its end is awaited in either case, for up to
    ``REPLY_TIMEOUT`` seconds. Another interrupt ends the wait at once. psycopg does
    this itself, but only at a Ctrl-C, and only for its own cursors.
    """
    from psycopg import Error, capabilities

    pgconn = connection.pgconn
    deadline = clock.real_now() + REPLY_TIMEOUT
    try:
        with suppress(Error):
            # The server commits nothing of a request that was not sent completely.
            if not pgconn.flush():
                # A server that has not read the statement yet ignores the cancellation,
                # and replies all the same. Before version 17, libpq can only cancel
                # without a timeout, and blocks all other threads during that.
                if capabilities.has_cancel_safe():
                    with suppress(Error):
                        connection.cancel_safe(timeout=CANCEL_TIMEOUT)
                _await_end(pgconn, deadline)
    finally:
        pgconn.finish()


def _await_end(pgconn: PGconn, deadline: float) -> None:
    while True:
        while pgconn.is_busy():
            left = deadline - clock.real_now()
            if left <= 0:
                logger.warning(
                    "PostgreSQL did not end a statement within %g s of its"
                    " interruption. If the statement acquires a key, the key is free"
                    " again after its ttl.",
                    REPLY_TIMEOUT,
                )
                return
            ready(pgconn.socket, timeout=left)
            pgconn.consume_input()
        if pgconn.get_result() is None:
            return
