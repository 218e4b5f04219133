"""PostgreSQL's prepared statements, for the few statements that a lock is made of: planned once, not each time."""

from __future__ import annotations

import hashlib
import logging
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dlocks.backends.database.direct import TEXT_AT_MOST, Reply
from dlocks.polling import readable, ready

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn, PGresult

logger = logging.getLogger("dlocks")

# A statement is prepared when a session sends it for the fifth time: most sessions of a web site are shorter.
PREPARED_AT = 5

# How many statements a session keeps prepared. Those with lists in them are as many as the lists are long.
PREPARED_AT_MOST = 100

# For how many seconds a statement that was interrupted is waited for, and within them the cancelling of it.
PATIENCE = 5.0
CANCEL_PATIENCE = 2.0

# The types of PostgreSQL, by their numbers in its catalogue.
BOOLEAN, BIGINT, SMALLINT, INTEGER, TEXT, DOUBLE, INET = 16, 20, 21, 23, 25, 701, 869
_READ: dict[int, Callable[[bytes], Any]] = {
    BOOLEAN: b"t".__eq__,
    BIGINT: int,
    SMALLINT: int,
    INTEGER: int,
    DOUBLE: float,
}
_TYPES = {str: TEXT, int: BIGINT, bool: BOOLEAN}
_COLUMN_TYPES = {"owner_ip": INET, "ip": INET, "version": BIGINT, "number": BIGINT}


class _Places(dict[str, str]):
    """Numbers the parameters of a statement in the order in which they come up."""

    def __missing__(self, name: str) -> str:
        self[name] = f"${len(self) + 1}"
        return self[name]


class _Statement:
    """A statement by its name at the server, the names of its parameters, and how the columns are read, once known."""

    __slots__ = ("name", "names", "readers")

    def __init__(self, name: bytes, names: tuple[str, ...]) -> None:
        self.name = name
        self.names = names
        self.readers: list[Callable[[bytes], Any]] | None = None


class PreparedStatements:
    """
    What is prepared in one session.

    The statements go to libpq as they are, past Django's cursor, which writes the parameters into the text and can
    prepare nothing: half the cost of a lock. So this is for where nobody looks on: see ``of()``.
    """

    def __init__(self, connection: Any) -> None:
        from psycopg import pq

        # As numbers: to look for one in a set of those costs more than all else that is read of an answer.
        self._tuples_ok, self._command_ok = int(pq.ExecStatus.TUPLES_OK), int(pq.ExecStatus.COMMAND_OK)
        self._pgconn: PGconn = connection.pgconn
        self._await_answer = readable(self._pgconn.socket)
        self._backend_pid: int = connection.info.backend_pid
        # Whether the session is this process's own; None while that is not known.
        self._own: bool | None = None
        self._uses: dict[str, int] = {}
        self._statements: dict[str, _Statement] = {}

    @classmethod
    def of(cls, wrapper: Any, *, through_a_pooler: bool) -> PreparedStatements | None:
        """Return those of an open connection, or None where statements go by Django's cursor."""
        connection = wrapper.connection
        found = _of_connection.get(connection)
        if found is None:
            # psycopg 2 has no such thing.
            if not hasattr(connection, "pgconn"):
                return None
            found = _of_connection[connection] = cls(connection)
            found._own = through_a_pooler or None
        return found if found._own is not False else None

    def execute(self, sql: str, parameters: Mapping[str, Any]) -> Reply | None:
        """Execute a statement, and return None where it has to be sent by the cursor instead."""
        statement = self._statements.get(sql)
        if statement is None and (statement := self._prepare(sql, parameters)) is None:
            return None
        values = [None if (value := parameters[name]) is None else str(value).encode() for name in statement.names]
        if b"\0" in b"".join(filter(None, values)):
            return None
        result = self._ask(self._pgconn.send_query_prepared, statement.name, values)
        if result.status != self._tuples_ok:
            return Reply([], result.command_tuples or 0)
        number = result.ntuples
        if not number:
            return Reply([], 0)
        if (readers := statement.readers) is None:
            readers = statement.readers = _readers(result)
        rows = [_row(result, 0, readers)] if number == 1 else [_row(result, row, readers) for row in range(number)]
        return Reply(rows, number)

    def _prepare(self, sql: str, parameters: Mapping[str, Any]) -> _Statement | None:
        if len(sql) > TEXT_AT_MOST:
            return None
        uses = self._uses[sql] = self._uses.get(sql, 0) + 1
        if uses < PREPARED_AT:
            if len(self._uses) > 10 * PREPARED_AT_MOST:
                self._uses.clear()
            return None
        if len(self._statements) >= PREPARED_AT_MOST:
            return None
        if self._own is None:
            result = self._ask(self._pgconn.send_query, b"SELECT pg_backend_pid()")
            (pid,) = _row(result, 0, _readers(result))
            # A pooler makes up the process id that it tells at the start, and the next statement may run elsewhere.
            self._own = pid == self._backend_pid
            if not self._own:
                return None
        places = _Places()
        text = (sql % places).encode()
        types = [_COLUMN_TYPES.get(name) or _TYPES[type(parameters[name])] for name in places]
        # Named by what it says, so that the same name is nowhere another statement.
        name = b"dlocks_" + hashlib.sha256(text + repr(types).encode()).hexdigest()[:32].encode()
        self._ask(self._pgconn.send_prepare, name, text, types)
        statement = self._statements[sql] = _Statement(name, tuple(places))
        return statement

    def _ask(self, send: Callable[..., None], *arguments: Any) -> PGresult:
        """Send something, wait for the answer, and return it; raise the driver's error."""
        pgconn = self._pgconn
        send(*arguments)
        while pgconn.flush():
            ready(pgconn.socket, or_writable=True)
            pgconn.consume_input()
        result: Any = None
        while True:
            while pgconn.is_busy():
                self._await_answer()
                pgconn.consume_input()
            if (more := pgconn.get_result()) is None:
                break
            result = more
        if result.status not in (self._tuples_ok, self._command_ok):
            self._raise(result)
        return result  # type: ignore[no-any-return]

    def _raise(self, result: PGresult) -> None:
        from psycopg import OperationalError, errors, pq

        state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
        message = result.error_message.decode(errors="replace").strip()
        try:
            error = errors.lookup(state)(message)
        except KeyError:
            raise OperationalError(message) from None
        if state in _FORGOTTEN:
            self._own = False
            raise NotPreparedError from error
        raise error


def _readers(result: PGresult) -> list[Callable[[bytes], Any]]:
    return [_READ.get(result.ftype(column), bytes.decode) for column in range(result.nfields)]


def _row(result: PGresult, row: int, readers: list[Callable[[bytes], Any]]) -> tuple[Any, ...]:
    value = result.get_value
    return tuple([None if (one := value(row, column)) is None else read(one) for column, read in enumerate(readers)])


class NotPreparedError(Exception):
    """The session has forgotten the statement, or has another of its name: it has not been executed."""


# invalid_sql_statement_name, duplicate_prepared_statement, feature_not_supported (a plan whose result has changed)
_FORGOTTEN = {"26000", "42P05", "0A000"}

_of_connection: weakref.WeakKeyDictionary[Any, PreparedStatements] = weakref.WeakKeyDictionary()


def is_under_way(connection: Any) -> bool:
    """Tell whether a connection of the driver's waits for the answer to a statement."""
    # psycopg 2, which has no such thing, comes back from libpq only with the answer.
    if (pgconn := getattr(connection, "pgconn", None)) is None:
        return False
    from psycopg import pq

    return bool(pgconn.transaction_status == pq.TransactionStatus.ACTIVE)


def end_interrupted(connection: Any) -> None:
    """
    End a statement that was interrupted, and its session, with which nobody could go on.

    A server that finds its client gone has executed what it was sent: a grant could be made after it was taken back in
    another session. So the statement is cancelled, where that is possible in time, and its end waited for, whichever it
    is, for ``PATIENCE`` at most. Another interrupt ends that at once. psycopg does so itself, but at a Ctrl-C only, and
    for its own cursors.
    """
    from psycopg import Error, capabilities

    pgconn = connection.pgconn
    deadline = time.monotonic() + PATIENCE
    try:
        with suppress(Error):
            # Of what was not sent to its end, the server commits nothing.
            if not pgconn.flush():
                # A server that has not read the statement yet takes no notice; it will answer all the same. What libpq
                # had for this before 17 knows no bound, and lets no other thread go on.
                if capabilities.has_cancel_safe():
                    with suppress(Error):
                        connection.cancel_safe(timeout=CANCEL_PATIENCE)
                _await_end(pgconn, deadline)
    finally:
        pgconn.finish()


def _await_end(pgconn: PGconn, deadline: float) -> None:
    while True:
        while pgconn.is_busy():
            left = deadline - time.monotonic()
            if left <= 0:
                logger.warning(
                    "PostgreSQL has not ended a statement %g s after it was interrupted. A key that it takes yet"
                    " is free again when the lease is over.",
                    PATIENCE,
                )
                return
            ready(pgconn.socket, timeout=left)
            pgconn.consume_input()
        if pgconn.get_result() is None:
            return
