"""Notifications by PostgreSQL's LISTEN and NOTIFY."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Self

from django.db.backends.base.base import BaseDatabaseWrapper

from dlocks.backends.database.notify.datagram import DatagramSocket
from dlocks.backends.notifiers import Notifier
from dlocks.exceptions import LockBackendError
from dlocks.runtime.polling import ready


class PostgreSQLNotifier(Notifier):
    """A listener on one PostgreSQL channel, on the connection of its thread.

    The same thread also uses the connection for statements.
    """

    def __init__(self, connection: Any, datagram_socket: DatagramSocket | None) -> None:
        from psycopg import Error as DriverError

        self._connection = connection
        self._datagram_socket = datagram_socket
        self._error = DriverError
        self._notified = False
        # Called for the notifications that arrive while a statement runs.
        connection.add_notify_handler(self._on_notify)

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

    def wait(self, timeout: float) -> bool:
        pgconn = self._connection.pgconn
        try:
            # Some notifications may have arrived with the reply to the last statement.
            self._read(pgconn)
            if not self._notified and self._server_has_sent(pgconn.socket, timeout):
                pgconn.consume_input()
                self._read(pgconn)
        except self._error as error:
            raise LockBackendError(
                f"The connection for notifications was lost: {error}"
            ) from error
        notified, self._notified = self._notified, False
        return notified

    def close(self) -> None:
        # A pool would hand the session to another user in its current state.
        with suppress(Exception):
            self._connection.execute("UNLISTEN *")

    def _on_notify(self, notify: Any) -> None:
        self._notified = True

    def _server_has_sent(self, server: int, timeout: float) -> bool:
        """Wait for a datagram or for data from the server.

        Return whether the server has sent data.
        """
        datagrams = (
            -1 if self._datagram_socket is None else self._datagram_socket.fileno()
        )
        found = ready(*{server, datagrams} - {-1}, timeout=timeout)
        if self._datagram_socket is not None and datagrams in found:
            self._notified = self._datagram_socket.read(self)
        return server in found

    def _read(self, pgconn: Any) -> None:
        while pgconn.notifies() is not None:
            self._notified = True
