"""Notifications of granted claims, and the choice of a listener for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from django.db import transaction
from django.db.utils import Error

from dlocks.backends.database.notify.datagram import (
    ALONE,
    TAG,
    DatagramSocket,
    is_same_host,
    send,
    tag,
    this_host,
)
from dlocks.backends.database.notify.listeners import (
    INTERRUPTED,
    DatagramListener,
    MySQLNotifier,
    PostgreSQLNotifier,
)
from dlocks.backends.database.statements import Statements
from dlocks.backends.notifiers import Notifier
from dlocks.exceptions import LockBackendError
from dlocks.runtime.greenlets import threads_are_green

logger = logging.getLogger("dlocks")

# Error codes of MariaDB and MySQL when no session could be woken: no such session or
# named lock; the calling session itself; a server that shuts down, or that has ended
# the calling session.
NO_SUCH_SESSION = {1094, 3057, INTERRUPTED, 1053, 1927}


class Notifications(Statements):
    """The part that notifies granted claims, on this host or through the server."""

    listening: bool | None = None

    # Whether the refusal of KILL QUERY was already logged.
    _refused = False

    # The socket on which processes on the same host notify this process of its grants.
    _datagram_socket: DatagramSocket | None = None

    move_on: Callable[[str], bool]

    def notifier(self, channel: str) -> Notifier | None:
        if self.listening is False or not channel:
            return None
        if (
            self._datagram_socket is None
            or self._datagram_socket.channel != channel
            or not self._datagram_socket.is_open
        ):
            self._datagram_socket = DatagramSocket.open(channel)
        datagram_socket = self._datagram_socket
        if datagram_socket is not None:
            server = (
                self._rows(f"SELECT {self.dialect.server}", {})[0][0]
                if self.dialect.server
                else ""
            )
            channel = this_host() + channel + TAG + tag(server)
        listener = self._listen_to_the_server(channel, datagram_socket)
        if listener is None and datagram_socket is not None:
            listener, channel = (
                DatagramListener(datagram_socket, hears_all=self.dialect.one_writer),
                channel + ALONE,
            )
        if listener is not None:
            listener.channel, listener.advance = channel, self.move_on
        return listener

    def _listen_to_the_server(
        self, channel: str, datagram_socket: DatagramSocket | None
    ) -> Notifier | None:
        try:
            if self.connection.vendor == "postgresql":
                pooled = self.listening is True
                return PostgreSQLNotifier.on(
                    self.connection, channel, datagram_socket, through_a_pooler=pooled
                )
            if self.connection.vendor == "mysql" and not threads_are_green():
                return MySQLNotifier.on(self, channel, datagram_socket)
        except Error as error:
            if (
                self.connection.vendor == "mysql"
                and self.connection.connection
                and self.connection.is_usable()
            ):
                self._unnotified(error)
                return None
            raise self._failure(error) from error
        return None

    def _was_handed_over(
        self, sql: str, parameters: Mapping[str, Any]
    ) -> list[tuple[Any, Any]]:
        """Hand a key over, and notify its new holder.

        Return whether it has a new holder, and the number of waiters.
        """
        rows = (
            self._packet(
                sql, {**parameters, **self._times(), "near": this_host() or "-"}
            )
            or ()
        )
        for _, _, channel, owner, token, ends, server, *_ in rows:
            if channel:
                self._wake(channel, [_message(owner, token, ends)], server)
        return [row[:2] for row in rows]

    def _notify_claims(
        self,
        rows: str,
        parameters: Mapping[str, Any],
        channel: str,
        *,
        reserved: bool = False,
    ) -> None:
        """Notify the processes of granted claims when this step commits."""
        if not channel:
            return
        server = self.dialect.server or "''"
        # A grant in the caller's transaction may still be undone, so the claim has to
        # retry.
        reserved = reserved or bool(self.connection.savepoint_ids)
        sql = self._text(
            f"SELECT owner, {'NULL' if reserved else 'version'}, {{ends}}, {server}"
            f" FROM {{{rows}"
        )
        granted = self._rows(sql, {**parameters, "channel": channel})
        messages = [_message(owner, token, ends) for owner, token, ends, _ in granted]
        if self.connection.vendor == "postgresql" and not is_same_host(channel, ""):
            # PostgreSQL sends the notification with the commit.
            self._notify(channel, messages)
        elif granted:
            wake = partial(self._wake, channel, messages, granted[0][3])
            transaction.on_commit(wake, using=self.database, robust=True)

    def _notify(self, channel: str, messages: Sequence[str]) -> None:
        if messages and not channel.endswith(ALONE):
            sql = (
                "SELECT pg_notify(%(channel)s, message) FROM"
                " unnest(%(messages)s::text[]) AS message"
            )
            self._run(
                self._by_cursor, sql, {"channel": channel, "messages": list(messages)}
            )

    def _wake(self, channel: str, messages: Sequence[str], server: str) -> None:
        """Notify a process of its granted claims.

        If the notification is lost, the process polls some time later.
        """
        if (
            is_same_host(channel, server) and send(channel, messages)
        ) or channel.endswith(ALONE):
            return
        if not self.dialect.wake:
            with suppress(LockBackendError):
                self._notify(channel, messages)
            return
        try:
            with self.connection.cursor() as cursor:
                cursor.execute(self.dialect.wake, {"channel": channel})
        except Error as error:
            self._unnotified(error)

    def _unnotified(self, error: Error) -> None:
        (number,) = error.args[:1] or (0,)
        # A lost connection is found by the next statement.
        refused = number not in NO_SUCH_SESSION and number < 2000
        if refused and not self._refused:
            self._refused = True
            logger.warning(
                "Waiting callers have to poll, because database %r refuses KILL QUERY,"
                " which notifies them: %s",
                self.database,
                error,
            )


def _message(owner: str, token: int | None, ends: int) -> str:
    """Return the text of a notification of a grant.

    Without a token, the claim has to retry.
    """
    return owner if token is None else f"{owner} {token} {ends}"
