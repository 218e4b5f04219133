"""Notifications of granted claims, and the choice of a notifier for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import transaction
from django.db.utils import Error

from dlocks.backends.database.fragments import MICROSECONDS
from dlocks.backends.database.notify.datagram import (
    DatagramNotifier,
    DatagramSocket,
    grant_message,
    is_same_host,
    is_same_server,
    send,
    tag,
    this_host,
)
from dlocks.backends.database.notify.postgresql import PostgreSQLNotifier
from dlocks.backends.database.statements import Statements
from dlocks.backends.notifiers import Notifier
from dlocks.runtime import clock
from dlocks.values import Grant


class Notifications(Statements):
    """The part that notifies granted claims, on this host or through the server."""

    listening: bool | None = None

    # The socket on which processes on the same host notify this process of its grants.
    _datagram_socket: DatagramSocket | None = None

    def notifier(self, channel: str) -> Notifier | None:
        if self.listening is False:
            return None
        channel = this_host() + channel
        if (
            self._datagram_socket is None
            or self._datagram_socket.channel != channel
            or not self._datagram_socket.is_open
        ):
            self._datagram_socket = DatagramSocket.open(channel)
        notifier: Notifier | None = None
        if self.connection.vendor == "postgresql":
            try:
                notifier = PostgreSQLNotifier.on(
                    self.connection,
                    channel,
                    self._datagram_socket,
                    through_a_pooler=self.listening is True,
                )
            except Error as error:
                raise self._failure(error) from error
        if notifier is None and self._datagram_socket is not None:
            notifier = DatagramNotifier(
                self._datagram_socket, is_complete=self.dialect.one_writer
            )
        if notifier is not None:
            notifier.channel = channel + tag(self._server())
        return notifier

    def _server(self) -> str:
        """Return the identity of the server, or nothing if there can be only one."""
        if not self.dialect.server:
            return ""
        return str(self._rows(f"SELECT {self.dialect.server}", {})[0][0])

    def _was_handed_over(
        self, sql: str, parameters: Mapping[str, Any]
    ) -> list[tuple[Any, Any]]:
        """Hand a key over, and notify its new holder.

        Return whether it has a new holder, and the number of waiters.
        """
        began = clock.now()
        rows = (
            self._packet(
                sql, {**parameters, **self._times(), "near": this_host() or "-"}
            )
            or ()
        )
        for _, _, channel, owner, token, lease, server, *_ in rows:
            if channel and is_same_host(channel):
                # A claim for a transaction still has to acquire the key. On another
                # node of a Galera cluster the grant may not be visible yet.
                datagram = b""
                if token is not None and is_same_server(channel, server):
                    grant = Grant(token, lease / MICROSECONDS)
                    datagram = grant_message(owner, grant, began)
                send(channel, datagram)
        return [row[:2] for row in rows]

    def _notify_on_commit(self, channel: str) -> None:
        """Notify the process that listens on a channel when this step commits."""
        if is_same_host(channel):

            def notify() -> None:
                # This is not a partial(), which has no name. Django logs the name of a
                # callback that fails after a commit.
                send(channel)

            transaction.on_commit(notify, using=self.database, robust=True)
        elif channel and self.connection.vendor == "postgresql":
            # PostgreSQL sends the notification with the commit.
            self._run(
                self._by_cursor,
                "SELECT pg_notify(%(channel)s, '')",
                {"channel": channel},
            )
