"""
How a process whose claims stand in line is told: PostgreSQL's LISTEN; on MariaDB and MySQL a sleep in the server.
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

from dlocks.backends.base import HEARD_FOR, Claim, Listener, Message, Place
from dlocks.backends.database.neighbours import Door
from dlocks.backends.database.statements import MICROSECONDS, Statements
from dlocks.exceptions import LockBackendError
from dlocks.polling import ready

# The statement was ended by KILL QUERY, ...
INTERRUPTED = 1317
# ... or by a bound that the project has set for its statements: max_statement_time, max_execution_time.
TIMED_OUT = {1969, 3024}

# A named lock that one of those who wait has, and the others wait for.
BOLT = "dlocks_bolt"


class PostgreSQLListener(Listener):
    """Hears what is told on one channel, on a connection that its thread uses for statements too."""

    def __init__(self, connection: Any, door: Door | None) -> None:
        from psycopg import Error as DriverError

        self._connection = connection
        self._door = door
        self._error = DriverError
        self.ears = threading.RLock()
        self._messages: deque[str] = deque()
        # What arrives while a statement runs.
        connection.add_notify_handler(lambda notify: self._messages.append(notify.payload))

    @classmethod
    def on(
        cls, wrapper: BaseDatabaseWrapper, channel: str, door: Door | None, *, through_a_pooler: bool
    ) -> Self | None:
        """Listen; return None behind a pooler, where the next statement may run in another session."""
        wrapper.ensure_connection()
        connection = wrapper.connection
        if not hasattr(connection, "add_notify_handler"):
            # psycopg 2
            return None
        with wrapper.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            (pid,) = cursor.fetchone()
            # A pooler makes up the process id that it tells at the start.
            if pid != connection.info.backend_pid and not through_a_pooler:
                return None
            cursor.execute(f"LISTEN {wrapper.ops.quote_name(channel)}")
        return cls(connection, door)

    def wait(self, timeout: float, claims: Sequence[Claim]) -> Sequence[Message]:
        if not self._messages:
            pgconn = self._connection.pgconn
            try:
                # Some may have come with the answer to the last statement.
                self._drain(pgconn)
                if not self._messages and self._awaited(pgconn.socket, timeout):
                    pgconn.consume_input()
                    self._drain(pgconn)
            except self._error as error:
                # Nothing else: what a signal's handler raises is for the caller whose thread this may be.
                raise LockBackendError(f"The connection that listens was lost: {error}") from error
        messages = [_parsed(message) for message in self._messages]
        self._messages.clear()
        return messages

    def close(self) -> None:
        # A pool would give the session to somebody else as it is.
        with suppress(Exception):
            self._connection.execute("UNLISTEN *")

    def _awaited(self, socket: int, timeout: float) -> bool:
        """Wait for a neighbour to tell something, or the server; return whether only the server has."""
        door = -1 if self._door is None else self._door.fileno()
        found = ready(*{socket, door} - {-1}, timeout=timeout)
        if self._door is not None and door in found:
            self._messages.extend(self._door.read())
        return socket in found and not self._messages

    def _drain(self, pgconn: Any) -> None:
        while (notify := pgconn.notifies()) is not None:
            self._messages.append(notify.extra.decode())


def _parsed(text: str) -> Message:
    kind, _, rest = text.partition(" ")
    if kind == "free":
        return Message(free=rest)
    token, _, ends = rest.partition(" ")
    return Message(owner=kind, token=int(token) if token else None, ends=int(ends or 0) / MICROSECONDS)


class Neighbours(Listener):
    """Hears what the processes on the same machine tell."""

    def __init__(self, door: Door, *, hears_all: bool = True) -> None:
        self.hears_all = hears_all
        self.beside = self
        self._door = door

    def wait(self, timeout: float, claims: Sequence[Claim]) -> Sequence[Message]:
        return [_parsed(text) for text in self._door.wait(timeout)]


class MySQLListener(Listener):
    """
    Sleeps in the server until somebody ends the sleep by KILL QUERY, on its thread's connection.

    Whoever hands over finds the session by the named lock that it has: nobody else's statement can be hit, and an old
    number of a session means nothing. A hand-over that is committed before the sleep begins is seen by the statement
    that sleeps, and one that comes later ends it; so no order of the two is a loss.

    On MariaDB only the session that has the ``BOLT`` sleeps, and the others wait for that lock. All SLEEPs go through
    one mutex of the server, and KILL QUERY keeps what its victim needs to let go of it (10.11, THD::awake_no_mutex):
    where two sleep, a wake-up may take 2 seconds, in which no sleep at all ends.

    Nothing that matters may run in this session: MariaDB now and then answers a statement that was interrupted with a
    wrong result instead of an error (10.11; a subquery became NULL).
    """

    asks = True

    def __init__(self, statements: Statements, door: Door | None) -> None:
        self.beside = None if door is None else Neighbours(door)
        self._statements = statements
        self._wrapper = statements.connection
        self._session = self._wrapper.connection
        # MySQL's GET_LOCK waits for whole seconds only.
        self._sleeps: bool = not getattr(self._wrapper, "mysql_is_mariadb", False)

    @classmethod
    def on(cls, statements: Statements, channel: str, door: Door | None) -> Self | None:
        """Take the channel's named lock; return None behind a proxy that gives each statement any session."""
        wrapper = statements.connection
        wrapper.ensure_connection()
        try:
            with wrapper.cursor() as cursor:
                # A session of before, which the server has not seen end, may have it for a moment.
                cursor.execute("SELECT GET_LOCK(%s, 1)", [channel])
                cursor.execute("SELECT IS_USED_LOCK(%s) = CONNECTION_ID()", [channel])
                if cursor.fetchone() == (1,):
                    # Whether that may be done at all.
                    cursor.execute("KILL QUERY CONNECTION_ID()")
        except DatabaseError as error:
            if error.args[:1] == (INTERRUPTED,):
                return cls(statements, door)
            raise
        return None

    def wait(self, timeout: float, claims: Sequence[Claim]) -> Sequence[Message]:
        if timeout <= 0 or not claims:
            return ()
        keys, parameters = self._statements._one_of("key_resource", sorted({claim.key for claim in claims}))
        owners, more = self._statements._one_of("owner", [claim.owner for claim in claims])
        parameters |= more | {"timeout": timeout}
        mine = f"{{locks}} WHERE {keys} AND {owners} AND end_time > {{now}}"
        share = f"{{claims}} WHERE {owners} AND version IS NOT NULL"
        shared = any(claim.shared for claim in claims)
        granted = f"EXISTS (SELECT 1 FROM {mine})" + (f" OR EXISTS (SELECT 1 FROM {share})" if shared else "")
        rest = "SLEEP(%(timeout)s)" if self._sleeps else f"GET_LOCK('{BOLT}', %(timeout)s)"
        answer = self._ask(f"SELECT CASE WHEN {granted} THEN 2 ELSE {rest} END", parameters)
        if answer == ((1,),) and not self._sleeps:
            # It is this session's, for as long as it is there.
            self._sleeps = True
            return ()
        if answer == ((0,),):
            return ()
        ends = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', end_time)"
        sql = f"SELECT owner, CASE WHEN status = 'P' THEN version END, {ends} FROM {mine}"
        if shared:
            sql += f" UNION ALL SELECT owner, version, {ends} FROM {share}"
        rows = self._ask(sql, parameters) or ()
        return [Message(owner=owner, token=token, ends=ends / MICROSECONDS) for owner, token, ends in rows]

    def calm(self, claims: Sequence[Claim]) -> Place | None:
        statements = self._statements
        owners, parameters = statements._one_of("owner", [claim.owner for claim in claims])
        parameters["heard"] = round(HEARD_FOR * MICROSECONDS)
        if self._ask(statements.hearing(owners), parameters) is None:
            return Place(soon=0.0)
        left = statements.dialect.seconds_until("head.end_time")
        rows = self._ask(
            # They are in line, and somebody has the key who will tell when he gives it back, or when his lease ends.
            f"SELECT COUNT(*), MIN({left}), {{ticks}} FROM {{claims}} AS mine JOIN {{locks}} AS head"
            f" ON head.key_resource = mine.key_resource WHERE mine.{owners} AND mine.version IS NULL AND mine.counted"
            " AND head.status = 'P' AND head.end_time > {now}",
            parameters,
        )
        if not rows:
            # Interrupted: somebody's turn has come.
            return Place(soon=0.0)
        ((count, soon, ticks),) = rows
        if count != len(claims):
            return None
        return Place(soon=math.inf if soon is None else float(soon), clock=int(ticks) / MICROSECONDS)

    def close(self) -> None:
        # The session goes too: an interruption that is on its way would hit whatever is asked next.
        self._wrapper.close()

    def _ask(self, sql: str, parameters: Mapping[str, Any]) -> Any:
        """Return the rows, or None where the statement was ended before it was done, and may be sent again."""
        if self._wrapper.connection is not self._session:
            raise LockBackendError("The session that listens was lost.")
        try:
            with self._wrapper.cursor() as cursor:
                cursor.execute(self._statements._text(sql), parameters)
                return cursor.fetchall()
        except Error as error:
            if error.args and error.args[0] in {INTERRUPTED, *TIMED_OUT}:
                return None
            if isinstance(error, DatabaseError) and self._statements.dialect.is_contention(error):
                return None
            raise LockBackendError(f"The session that listens was lost: {error}") from error
