"""Listeners for the notifications of queued claims.

PostgreSQL notifies by LISTEN and NOTIFY. On MariaDB and MySQL, a session sleeps in the
server until another one interrupts it.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DatabaseError, Error

from dlocks.backends.base import HEARTBEAT_TIMEOUT
from dlocks.backends.database.fragments import MICROSECONDS
from dlocks.backends.database.notify.datagram import DatagramSocket
from dlocks.backends.database.statements import Statements
from dlocks.backends.notifiers import Notifier
from dlocks.exceptions import LockBackendError
from dlocks.runtime.polling import ready
from dlocks.values import Claim, Message, Ticket

# The error code of a statement that was ended by KILL QUERY.
INTERRUPTED = 1317
# The error codes of a statement that exceeded a limit of the project:
# max_statement_time or max_execution_time.
TIMED_OUT = {1969, 3024}

# The named lock of the session that sleeps. All other listening sessions wait for this
# lock.
BOLT = "dlocks_bolt"


class PostgreSQLNotifier(Notifier):
    """A listener on one PostgreSQL channel, on the connection of its thread.

    The same thread also uses the connection for statements.
    """

    def __init__(self, connection: Any, datagram_socket: DatagramSocket | None) -> None:
        from psycopg import Error as DriverError

        self._connection = connection
        self._datagram_socket = datagram_socket
        self._error = DriverError
        self.receive_lock = threading.RLock()
        self._messages: deque[str] = deque()
        # Receives the notifications that arrive while a statement runs.
        connection.add_notify_handler(
            lambda notify: self._messages.append(notify.payload)
        )

    @classmethod
    def on(
        cls,
        wrapper: BaseDatabaseWrapper,
        channel: str,
        datagram_socket: DatagramSocket | None,
        *,
        through_a_pooler: bool,
    ) -> Self | None:
        """Listen on a channel, or return None if the session is not our own.

        Behind a pooler, the next statement may run in another session.
        """
        wrapper.ensure_connection()
        connection = wrapper.connection
        if not hasattr(connection, "add_notify_handler"):
            # This is psycopg 2.
            return None
        with wrapper.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            (pid,) = cursor.fetchone()
            # A pooler reports an invented process id when the connection begins.
            if pid != connection.info.backend_pid and not through_a_pooler:
                return None
            cursor.execute(f"LISTEN {wrapper.ops.quote_name(channel)}")
        return cls(connection, datagram_socket)

    def wait(self, timeout: float, claims: Sequence[Claim]) -> Sequence[Message]:
        if not self._messages:
            pgconn = self._connection.pgconn
            try:
                # Some notifications may have arrived with the reply to the last
                # statement.
                self._drain(pgconn)
                if not self._messages and self._awaited(pgconn.socket, timeout):
                    pgconn.consume_input()
                    self._drain(pgconn)
            except self._error as error:
                # No other exception is converted. An exception from a signal handler
                # belongs to the caller, whose thread this may be.
                raise LockBackendError(
                    f"The connection for notifications was lost: {error}"
                ) from error
        messages = [_parsed(message) for message in self._messages]
        self._messages.clear()
        return messages

    def close(self) -> None:
        # A pool would hand the session to another user in its current state.
        with suppress(Exception):
            self._connection.execute("UNLISTEN *")

    def _awaited(self, socket: int, timeout: float) -> bool:
        """Wait for a datagram or for data from the server.

        Return True if only the server has sent data.
        """
        datagrams = (
            -1 if self._datagram_socket is None else self._datagram_socket.fileno()
        )
        found = ready(*{socket, datagrams} - {-1}, timeout=timeout)
        if self._datagram_socket is not None and datagrams in found:
            self._messages.extend(self._datagram_socket.read())
        return socket in found and not self._messages

    def _drain(self, pgconn: Any) -> None:
        while (notify := pgconn.notifies()) is not None:
            self._messages.append(notify.extra.decode())


def _parsed(text: str) -> Message:
    kind, _, rest = text.partition(" ")
    if kind == "free":
        return Message(free=rest)
    token, _, ends = rest.partition(" ")
    return Message(
        owner=kind,
        token=int(token) if token else None,
        ends=int(ends or 0) / MICROSECONDS,
    )


class DatagramListener(Notifier):
    """A listener for the datagrams of processes on the same host."""

    def __init__(
        self, datagram_socket: DatagramSocket, *, hears_all: bool = True
    ) -> None:
        self.hears_all = hears_all
        self.beside = self
        self._datagram_socket = datagram_socket

    def wait(self, timeout: float, claims: Sequence[Claim]) -> Sequence[Message]:
        return [_parsed(text) for text in self._datagram_socket.wait(timeout)]


class MySQLNotifier(Notifier):
    """A listener that sleeps in the server until KILL QUERY ends the sleep.

    It uses the connection of its thread. A session that hands a key over finds this
    session by the named lock that it holds. No other session's statement can be
    interrupted, and an outdated session number has no effect. If the handover is
    committed before the sleep begins, the sleeping statement sees it. A later handover
    ends the sleep. No order of the two loses a notification.

    On MariaDB, only the session that holds ``BOLT`` sleeps, and the others wait for
    that lock. All calls of SLEEP share one mutex of the server, and KILL QUERY keeps
    the interrupted session from releasing it (10.11, THD::awake_no_mutex). If two
    sessions sleep, a wake-up may take 2 seconds, during which no sleep ends.

    No important statement may run in this session. MariaDB sometimes replies to an
    interrupted statement with a wrong result instead of an error (10.11; a subquery
    became NULL).
    """

    asks = True

    def __init__(
        self, statements: Statements, datagram_socket: DatagramSocket | None
    ) -> None:
        self.beside = (
            None if datagram_socket is None else DatagramListener(datagram_socket)
        )
        self._statements = statements
        self._wrapper = statements.connection
        self._session = self._wrapper.connection
        # On MySQL every session sleeps, because GET_LOCK accepts only whole seconds.
        self._sleeps: bool = not getattr(self._wrapper, "mysql_is_mariadb", False)

    @classmethod
    def on(
        cls,
        statements: Statements,
        channel: str,
        datagram_socket: DatagramSocket | None,
    ) -> Self | None:
        """Acquire the channel's named lock, or return None.

        It is None behind a proxy that may run each statement in a different session.
        """
        wrapper = statements.connection
        wrapper.ensure_connection()
        try:
            with wrapper.cursor() as cursor:
                # A previous session may hold the lock for a moment, until the server
                # has noticed its end.
                cursor.execute("SELECT GET_LOCK(%s, 1)", [channel])
                cursor.execute("SELECT IS_USED_LOCK(%s) = CONNECTION_ID()", [channel])
                if cursor.fetchone() == (1,):
                    # Check that this user may use KILL QUERY at all.
                    cursor.execute("KILL QUERY CONNECTION_ID()")
        except DatabaseError as error:
            if error.args[:1] == (INTERRUPTED,):
                return cls(statements, datagram_socket)
            raise
        return None

    def wait(self, timeout: float, claims: Sequence[Claim]) -> Sequence[Message]:
        if timeout <= 0 or not claims:
            return ()
        keys, parameters = self._statements._one_of(
            "key_resource", sorted({claim.key for claim in claims})
        )
        owners, more = self._statements._one_of(
            "owner", [claim.owner for claim in claims]
        )
        parameters |= more | {"timeout": timeout}
        mine = f"{{locks}} WHERE {keys} AND {owners} AND end_time > {{now}}"
        share = f"{{claims}} WHERE {owners} AND version IS NOT NULL"
        shared = any(claim.shared for claim in claims)
        granted = f"EXISTS (SELECT 1 FROM {mine})" + (
            f" OR EXISTS (SELECT 1 FROM {share})" if shared else ""
        )
        rest = (
            "SLEEP(%(timeout)s)" if self._sleeps else f"GET_LOCK('{BOLT}', %(timeout)s)"
        )
        answer = self._ask(
            f"SELECT CASE WHEN {granted} THEN 2 ELSE {rest} END", parameters
        )
        if answer == ((1,),) and not self._sleeps:
            # This session now holds ``BOLT`` for as long as it lives.
            self._sleeps = True
            return ()
        if answer == ((0,),):
            return ()
        ends = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', end_time)"
        sql = (
            f"SELECT owner, CASE WHEN status = 'P' THEN version END, {ends} FROM {mine}"
        )
        if shared:
            sql += f" UNION ALL SELECT owner, version, {ends} FROM {share}"
        rows = self._ask(sql, parameters) or ()
        return [
            Message(owner=owner, token=token, ends=ends / MICROSECONDS)
            for owner, token, ends in rows
        ]

    def heartbeat(self, claims: Sequence[Claim]) -> Ticket | None:
        statements = self._statements
        owners, parameters = statements._one_of(
            "owner", [claim.owner for claim in claims]
        )
        parameters["heard"] = round(HEARTBEAT_TIMEOUT * MICROSECONDS)
        if self._ask(statements.hearing(owners), parameters) is None:
            return Ticket(next_check=0.0)
        left = statements.dialect.seconds_until("head.end_time")
        rows = self._ask(
            # Count the claims that are queued behind a live lease. Its holder notifies
            # on release, and otherwise the lease expires.
            f"SELECT COUNT(*), MIN({left}), {{ticks}} FROM {{claims}} AS mine JOIN"
            " {locks} AS head ON head.key_resource = mine.key_resource WHERE"
            f" mine.{owners} AND mine.version IS NULL AND mine.counted AND head.status"
            " = 'P' AND head.end_time > {now}",
            parameters,
        )
        if not rows:
            # The query was interrupted, because the turn of a claim has come.
            return Ticket(next_check=0.0)
        ((count, next_check, ticks),) = rows
        if count != len(claims):
            return None
        return Ticket(
            next_check=math.inf if next_check is None else float(next_check),
            clock=int(ticks) / MICROSECONDS,
        )

    def close(self) -> None:
        # Close the session as well. A late KILL QUERY would hit its next statement.
        self._wrapper.close()

    def _ask(self, sql: str, parameters: Mapping[str, Any]) -> Any:
        """Return the rows, or None if the statement was interrupted.

        A statement that was interrupted may be sent again.
        """
        if self._wrapper.connection is not self._session:
            raise LockBackendError("The connection for notifications was lost.")
        try:
            with self._wrapper.cursor() as cursor:
                cursor.execute(self._statements._text(sql), parameters)
                return cursor.fetchall()
        except Error as error:
            if error.args and error.args[0] in {INTERRUPTED, *TIMED_OUT}:
                return None
            if isinstance(
                error, DatabaseError
            ) and self._statements.dialect.is_contention(error):
                return None
            raise LockBackendError(
                f"The connection for notifications was lost: {error}"
            ) from error
