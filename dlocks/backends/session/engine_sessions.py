"""Database sessions that send a statement and read its reply later.

The drivers are used below Django's cursors, since a missing reply must not block a
thread. A statement that waits in the engine's own queue is sent, and its socket becomes
readable when the reply arrives.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

from django.db.backends.base.base import BaseDatabaseWrapper

from dlocks.runtime.polling import readable

# The first row of a reply.
Row = list[Any]

# Maximum idle timeout of a session in seconds. Larger values exceed the range of the
# servers' settings.
LONGEST_IDLE = 86400 * 20


class SessionDiedError(Exception):
    """A session that has ended, and its locks with it."""


class EngineSession:
    """A server session of one engine.

    ``name`` is shown in the server's list of sessions, if that list has a place for it.
    After ``idle`` seconds without a statement, the server ends the session and frees
    its locks.
    """

    # Whether locks can be shared, and whether a lock can belong to a transaction.
    shares: ClassVar[bool]
    in_transactions: ClassVar[bool]
    # The SQL by name, each with one parameter. The statements that try, wait or join
    # return the token, which is drawn after the grant.
    statements: Mapping[str, str]
    # The number of the session on the server.
    pid: int

    # The number that was reported when the connection was opened. A pooler invents one.
    reported_pid: int

    # The value with which another session cancels its statement. The number alone is
    # ambiguous, since another server may use it, and so may this one after a restart.
    # The reply 0 means that the server does not know the session.
    identity: str

    def __init__(self, wrapper: BaseDatabaseWrapper, idle: float) -> None:
        self.wrapper = wrapper
        self.raw: Any = wrapper.connection
        self.idle = idle
        # A proxy may answer queries by itself that it knows literally, so this query
        # contains a sum.
        self.identify()
        # The driver does not return it any more after the connection is lost.
        self.number = self.fileno()
        self._await = readable(self.number)

    def identify(self) -> None:
        """Set ``pid`` and ``reported_pid`` without changing the session.

        Behind a pooler, another client may use the session next.
        """
        raise NotImplementedError

    def begin(self, name: str) -> None:
        """Configure the session for locks."""
        raise NotImplementedError

    def fileno(self) -> int:
        raise NotImplementedError

    def send(self, statement: str, value: Any) -> None:
        """Send a statement, or raise SessionDiedError if that is not possible."""
        raise NotImplementedError

    def answered(self) -> bool:
        """Return whether the complete reply has arrived, without waiting.

        It is called after some data has arrived.
        """
        raise NotImplementedError

    def answer(self) -> Row | None:
        """Return the first row, or None if the statement was cancelled."""
        raise NotImplementedError

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds, and return whether the reply is there."""
        while self._await(timeout=timeout):
            if self.answered():
                return True
        return False

    def close(self) -> None:
        with suppress(Exception):
            self.wrapper.close()

    def abandon(self) -> None:
        """Detach from the parent's session in a child process.

        The file descriptor stays open, so that its number is not used again.
        """
        with suppress(Exception):
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)

    def first_row(self, sql: str, *values: Any) -> Row:
        with self.wrapper.cursor() as cursor:
            cursor.execute(sql, values)
            return list(cursor.fetchone())
