"""Prepared statements on PostgreSQL, for the few statements of a lock.

They are planned once instead of each time.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dlocks.runtime import clock
from dlocks.runtime.polling import readable, ready
from dlocks.sql.direct import TEXT_AT_MOST, Reply, names_in

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn, PGresult

logger = logging.getLogger("dlocks")

# A statement is prepared when a session sends it for the fifth time. Most sessions of a
# web site are shorter.
PREPARED_AT = 5

# The number of statements that a session keeps prepared. A statement with a list is
# another statement for each length of the list.
STATEMENTS_PREPARED = 100

# Seconds to wait for the end of an interrupted statement, and within them for its
# cancellation.
REPLY_TIMEOUT = 5.0
CANCEL_TIMEOUT = 2.0

# The OIDs of types in PostgreSQL's catalogue.
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


class _Statement:
    """A prepared statement.

    It has its name on the server, the names of its parameters and, once known, the
    functions that read its columns.
    """

    __slots__ = ("name", "names", "readers")

    def __init__(self, name: bytes, names: Sequence[str]) -> None:
        self.name = name
        self.names = names
        self.readers: list[Callable[[bytes], Any]] | None = None


class PreparedStatements:
    """The prepared statements of one session.

    The statements go to libpq directly, which halves the cost of a lock. Django's
    cursor writes the parameters into the text and can prepare nothing. It must not be
    instrumented, see ``is_instrumented()``.
    """

    def __init__(self, connection: Any, spin: float) -> None:
        from psycopg import pq

        # These are numbers, since a lookup in a set of enum members costs more than the
        # rest of reading a reply.
        self._tuples_ok = int(pq.ExecStatus.TUPLES_OK)
        self._command_ok = int(pq.ExecStatus.COMMAND_OK)
        self._pgconn: PGconn = connection.pgconn
        self._await_answer = readable(self._pgconn.socket, spin)
        self._backend_pid: int = connection.info.backend_pid
        # Whether the session belongs to this process alone. None if that is not known
        # yet.
        self._own: bool | None = None
        self._uses: dict[str, int] = {}
        self._statements: dict[str, _Statement] = {}

    @classmethod
    def of(
        cls, wrapper: Any, through_a_pooler: bool, spin: float
    ) -> PreparedStatements | None:
        """Return the prepared statements of an open connection, or None.

        None means that statements have to use Django's cursor.
        """
        connection = wrapper.connection
        found = _of_connection.get(connection)
        if found is None:
            # psycopg 2 has no ``pgconn``.
            if not hasattr(connection, "pgconn"):
                return None
            found = _of_connection[connection] = cls(connection, spin)
            found._own = through_a_pooler or None
        return found if found._own is not False else None

    def execute(self, sql: str, parameters: Mapping[str, Any]) -> Reply | None:
        """Execute a statement, or return None if it has to use the cursor."""
        statement = self._statements.get(sql)
        if statement is None and (statement := self._prepare(sql, parameters)) is None:
            return None
        values = [
            None if (value := parameters[name]) is None else str(value).encode()
            for name in statement.names
        ]
        if b"\0" in b"".join(filter(None, values)):
            return None
        result = self._ask(self._pgconn.send_query_prepared, statement.name, values)
        if result.status != self._tuples_ok:
            return Reply([], result.command_tuples or 0)
        if (readers := statement.readers) is None:
            readers = statement.readers = _readers(result)
        rows = [_row(result, row, readers) for row in range(result.ntuples)]
        return Reply(rows, len(rows))

    def _prepare(self, sql: str, parameters: Mapping[str, Any]) -> _Statement | None:
        if len(sql) > TEXT_AT_MOST:
            return None
        uses = self._uses[sql] = self._uses.get(sql, 0) + 1
        if uses < PREPARED_AT:
            if len(self._uses) > 10 * STATEMENTS_PREPARED:
                self._uses.clear()
            return None
        if len(self._statements) >= STATEMENTS_PREPARED:
            return None
        if self._own is None:
            result = self._ask(self._pgconn.send_query, b"SELECT pg_backend_pid()")
            (pid,) = _row(result, 0, _readers(result))
            # A pooler invents the process id that it reports when a connection begins,
            # and the next statement may run in another session.
            self._own = pid == self._backend_pid
            if not self._own:
                return None
        names = names_in(sql)
        places = {name: f"${number}" for number, name in enumerate(names, 1)}
        text = (sql % places).encode()
        types = [
            _COLUMN_TYPES.get(name) or _TYPES[type(parameters[name])] for name in names
        ]
        # The name is a hash of the statement, so it is never the name of another one.
        name = (
            b"dlocks_"
            + hashlib.sha256(text + repr(types).encode()).hexdigest()[:32].encode()
        )
        self._ask(self._pgconn.send_prepare, name, text, types)
        statement = self._statements[sql] = _Statement(name, names)
        return statement

    def _ask(self, send: Callable[..., None], *arguments: Any) -> PGresult:
        """Send a request, wait for the reply, and return it.

        Raise the driver's error if the request failed.
        """
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
    return [
        _READ.get(result.ftype(column), bytes.decode)
        for column in range(result.nfields)
    ]


def _row(
    result: PGresult, row: int, readers: list[Callable[[bytes], Any]]
) -> tuple[Any, ...]:
    value = result.get_value
    return tuple(
        [
            None if (one := value(row, column)) is None else read(one)
            for column, read in enumerate(readers)
        ]
    )


class NotPreparedError(Exception):
    """A statement that is not prepared in the session, and was not executed.

    The session has lost it, or has another statement of this name.
    """


# invalid_sql_statement_name, duplicate_prepared_statement, feature_not_supported (a
# plan whose result has changed)
_FORGOTTEN = {"26000", "42P05", "0A000"}

_of_connection: weakref.WeakKeyDictionary[Any, PreparedStatements] = (
    weakref.WeakKeyDictionary()
)


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
