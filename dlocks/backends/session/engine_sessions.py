"""Database sessions that send a statement and read its reply later.

The drivers are used below Django's cursors, since a missing reply must not block a
thread. A statement that waits in the engine's own queue is sent, and its socket becomes
readable when the reply arrives.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import Error

from dlocks.exceptions import LockBackendError
from dlocks.runtime.polling import readable, ready
from dlocks.runtime.pools import unpooled

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
    told: int

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
        """Set ``pid`` and ``told`` without changing the session.

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


class PostgreSQLEngineSession(EngineSession):
    shares = True
    in_transactions = True

    _TICKS = "(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000)::bigint"
    _IDENTITY = "concat(pid, ' ', extract(epoch FROM backend_start))"
    _THIS = (
        "locktype = 'advisory' AND objsubid = 1 AND database = (SELECT oid FROM"
        " pg_database WHERE datname = current_database()) AND (classid::bigint << 32 |"
        " objid::bigint) = $1::bigint"
    )

    statements = {
        "try": f"SELECT CASE WHEN pg_try_advisory_lock($1::bigint) THEN {_TICKS} END",
        "try shared": (
            "SELECT CASE WHEN pg_try_advisory_lock_shared($1::bigint) THEN"
            f" {_TICKS} END"
        ),
        # CASE evaluates in order, so the clock is read after the grant.
        "wait": (
            "SELECT CASE WHEN pg_advisory_lock($1::bigint) IS NOT NULL THEN"
            f" {_TICKS} END"
        ),
        "wait shared": (
            "SELECT CASE WHEN pg_advisory_lock_shared($1::bigint) IS NOT NULL THEN"
            f" {_TICKS} END"
        ),
        "join": (
            "SELECT CASE WHEN NOT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND"
            f" {_THIS}) AND EXISTS (SELECT FROM pg_locks WHERE granted AND pid ="
            f" pg_backend_pid() AND {_THIS}) THEN {_TICKS} END"
        ),
        "free": "SELECT pg_advisory_unlock($1::bigint)::int",
        "free shared": "SELECT pg_advisory_unlock_shared($1::bigint)::int",
        "cancel": (
            "SELECT COUNT(pg_cancel_backend(pid)) FROM"
            f" pg_stat_get_activity(split_part($1, ' ', 1)::int) WHERE {_IDENTITY} = $1"
            " AND backend_start IS NOT NULL"
        ),
        "ping": "SELECT pg_backend_pid() + 0 * $1::bigint",
        "idle": "SELECT set_config('idle_session_timeout', $1::bigint::text, false)",
        "holder": (
            "SELECT application_name, host(client_addr), pid FROM pg_locks JOIN"
            f" pg_stat_activity USING (pid) WHERE granted AND {_THIS} ORDER BY mode,"
            " pid LIMIT 1"
        ),
        "waiting": f"SELECT count(*) FROM pg_locks WHERE NOT granted AND {_THIS}",
    }

    def identify(self) -> None:
        if not hasattr(self.raw, "pgconn"):
            raise ImproperlyConfigured(
                "Session locks on PostgreSQL need psycopg 3: install"
                " dlocks[postgresql]."
            )
        from psycopg import pq

        # Integers, because finding an enum member in a set takes longer than reading
        # the rest of a reply.
        self._failures = (
            int(pq.ExecStatus.FATAL_ERROR),
            int(pq.ExecStatus.BAD_RESPONSE),
        )
        self.pgconn = self.raw.pgconn
        self.pid, self.identity = self.first_row(
            f"SELECT pg_backend_pid() + 0, (SELECT {self._IDENTITY} FROM"
            " pg_stat_get_activity(pg_backend_pid()))"
        )
        self.told = int(self.pgconn.backend_pid)

    def begin(self, name: str) -> None:
        # All statements in one round trip, since later no thread may block on a reply.
        prepare = "; ".join(
            f'PREPARE "{name}" (text) AS {sql}' for name, sql in self.statements.items()
        )
        try:
            self._check(self.pgconn.exec_(prepare.encode()))
        except (self.raw_errors, SessionDiedError) as error:
            raise LockBackendError(
                f"No session for locks on database {self.wrapper.alias!r}:"
                f" {str(error).strip()}"
            ) from error
        if self.first_row("SELECT pg_is_in_recovery()")[0]:
            # This may be temporary, as after a failover.
            raise LockBackendError(
                f"The server of database {self.wrapper.alias!r} is a standby, where"
                " other callers do not see session locks. Connect this alias of"
                " DATABASES to the primary (target_session_attrs=read-write)."
            )
        # The project's timeouts are meant for its own statements. The server checks
        # whether the client of a waiting statement is still connected. Otherwise a dead
        # client would keep its position until its turn comes.
        self.first_row(
            "SELECT set_config('application_name', %s, false),"
            " set_config('statement_timeout', '0', false), set_config('lock_timeout',"
            " '0', false), set_config('client_connection_check_interval', '1000',"
            " false), set_config('idle_session_timeout', %s, false)",
            name[:63],
            str(self.idle_setting(self.idle)),
        )

    @staticmethod
    def idle_setting(seconds: float) -> int:
        return math.ceil(min(seconds, LONGEST_IDLE) * 1000)

    def fileno(self) -> int:
        return int(self.pgconn.socket)

    def send(self, statement: str, value: Any) -> None:
        self._results: list[Any] = []
        try:
            self.pgconn.send_query_prepared(statement.encode(), [str(value).encode()])
            while self.pgconn.flush():
                ready(self.fileno(), or_writable=True)
                self.pgconn.consume_input()
        except self.raw_errors as error:
            raise SessionDiedError(str(error).strip()) from error

    def answered(self) -> bool:
        pgconn = self.pgconn
        try:
            pgconn.consume_input()
            while not pgconn.is_busy():
                result = pgconn.get_result()
                if result is None:
                    return True
                self._results.append(result)
        except self.raw_errors as error:
            raise SessionDiedError(self._last_words() or str(error).strip()) from error
        return False

    def answer(self) -> Row | None:
        if not self._results:
            raise SessionDiedError("the server gave no answer")
        result = self._results[-1]
        if self._check(result) is None or not result.ntuples:
            return None
        values = [result.get_value(0, column) for column in range(result.nfields)]
        return [None if value is None else value.decode() for value in values]

    def _check(self, result: Any) -> Any:
        """Return the result, None if the statement was cancelled, or raise."""
        if result.status not in self._failures:
            return result
        from psycopg import pq

        state = result.error_field(pq.DiagnosticField.SQLSTATE)
        if state == b"57014":
            return None
        message = result.error_message.decode(errors="replace").strip()
        if (
            self.pgconn.status != pq.ConnStatus.OK
            or state is None
            or state.startswith((b"57P", b"08", b"26"))
        ):
            raise SessionDiedError(message)
        raise LockBackendError(
            f"Database {self.wrapper.alias!r} rejected a lock statement: {message}"
        )

    def _last_words(self) -> str:
        return " ".join(
            result.error_message.decode(errors="replace").strip()
            for result in self._results
        )

    @property
    def raw_errors(self) -> Any:
        import psycopg

        return psycopg.Error


# Error codes of a cancelled statement, and of a session that the server has ended in
# any way.
INTERRUPTED = 1317
ENDED = {1053, 1927, 3169, 4031}


# The table exists since MySQL 8.0.22, and is empty if the performance schema is off.
_HAS_PROCESSLIST = (
    "SELECT @@performance_schema AND EXISTS (SELECT 1 FROM information_schema.tables"
    " WHERE table_schema = 'performance_schema' AND table_name = 'processlist')"
)


class MySQLEngineSession(EngineSession):
    shares = False
    in_transactions = False

    # SYSDATE() is the current time. UTC_TIMESTAMP() would be the time at which the wait
    # began.
    _TICKS = "CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS UNSIGNED)"

    statements = {
        "try": f"SELECT IF(GET_LOCK('{{0}}', 0) = 1, {_TICKS}, NULL)",
        # One year in seconds. MariaDB does not support an unlimited wait.
        "wait": f"SELECT IF(GET_LOCK('{{0}}', 31536000) = 1, {_TICKS}, NULL)",
        "free": "SELECT RELEASE_LOCK('{0}')",
        # No session is interrupted if the lock is unknown.
        "cancel": "KILL QUERY IS_USED_LOCK('{0}')",
        "ping": "SELECT CONNECTION_ID() + 0",
        "idle": "SET SESSION wait_timeout = {0}",
        "holder": (
            "SELECT CONCAT('session ', id, ' of ', user), host, id FROM"
            " information_schema.processlist WHERE id = IS_USED_LOCK('{0}')"
        ),
        "waiting": (
            "SELECT COUNT(*) FROM information_schema.processlist WHERE state = 'User"
            " lock' AND info LIKE 'SELECT IF(GET_LOCK(\\'{0}\\', 3%'"
        ),
    }

    def identify(self) -> None:
        (self.pid,) = self.first_row("SELECT CONNECTION_ID() + 0")
        self.told = int(self.raw.thread_id())

    def begin(self, name: str) -> None:
        version, before, _, after = self.first_row(
            "SELECT VERSION(), SYSDATE(6), SLEEP(0.001), SYSDATE(6)"
        )
        if before == after:
            raise ImproperlyConfigured(
                f"The server of database {self.wrapper.alias!r} runs with"
                " sysdate-is-now. The token of a lock that was waited for would be"
                " older than its grant. Turn that option off, or use"
                " dlocks.backends.database.PessimisticBackend."
            )
        with self.wrapper.cursor() as cursor:
            # This query also works on servers without the variable.
            cursor.execute(
                "SHOW VARIABLES WHERE Variable_name = 'wsrep_on' AND Value = 'ON'"
            )
            replicated = cursor.fetchall()
        if replicated:
            raise ImproperlyConfigured(
                f"The server of database {self.wrapper.alias!r} is a node of a Galera"
                " cluster, and GET_LOCK is known to one node only. Two nodes would"
                " grant the same lock to two callers. Use"
                " dlocks.backends.database.PessimisticBackend."
            )
        is_mariadb = "mariadb" in version.lower()
        if not is_mariadb and self.first_row(_HAS_PROCESSLIST) == [1]:
            # MySQL will remove the table from information_schema, and warns of each use
            # (error 1287).
            self.statements = {
                name: statement.replace(
                    "information_schema.processlist", "performance_schema.processlist"
                )
                for name, statement in self.statements.items()
            }
        endless = "max_statement_time" if is_mariadb else "max_execution_time"
        self.identity = f"dlocks session {secrets.token_hex(8)}"
        self.first_row("SELECT GET_LOCK(%s, 0)", self.identity)
        with self.wrapper.cursor() as cursor:
            cursor.execute(
                f"SET SESSION time_zone = '+00:00', {endless} = 0, wait_timeout ="
                f" {self.idle_setting(self.idle)}"
            )

    @staticmethod
    def idle_setting(seconds: float) -> int:
        return math.ceil(min(seconds, LONGEST_IDLE))

    def fileno(self) -> int:
        return int(self.raw.fileno())

    def send(self, statement: str, value: Any) -> None:
        try:
            self.raw.send_query(
                self.statements[statement].replace("{0}", str(value)).encode()
            )
        except self.raw_errors as error:
            raise SessionDiedError(str(error)) from error

    def answered(self) -> bool:
        # A reply is a single packet.
        return True

    def answer(self) -> Row | None:
        try:
            self.raw.read_query_result()
            result = self.raw.store_result()
        except self.raw_errors as error:
            number = error.args[0] if error.args else 0
            if number == INTERRUPTED:
                return None
            if 2000 <= number < 3000 or number in ENDED:
                raise SessionDiedError(str(error)) from error
            raise LockBackendError(
                f"Database {self.wrapper.alias!r} rejected a lock statement: {error}"
            ) from error
        if result is None:
            return None
        row = next(iter(result.fetch_row(1, 0)), None)
        return (
            None
            if row is None
            else [
                value.decode() if isinstance(value, bytes) else value for value in row
            ]
        )

    @property
    def raw_errors(self) -> Any:
        import MySQLdb  # type: ignore[import-untyped]

        return MySQLdb.Error


ENGINE_SESSIONS: dict[str, type[EngineSession]] = {
    "postgresql": PostgreSQLEngineSession,
    "mysql": MySQLEngineSession,
}


def engine_session_class(database: str) -> type[EngineSession]:
    """Return the class for the engine of a database.

    Raise ImproperlyConfigured if the engine has no session locks.
    """
    vendor = connections[database].vendor
    if vendor not in ENGINE_SESSIONS:
        raise ImproperlyConfigured(
            "Session locks need PostgreSQL, MariaDB or MySQL, but database"
            f" {database!r} is {vendor}. Use"
            " dlocks.backends.database.PessimisticBackend."
        )
    return ENGINE_SESSIONS[vendor]


def connect(database: str, name: str, idle: float, *, pooled: bool) -> EngineSession:
    """Open a session that no other thread and no pool uses.

    ``pooled`` states that a pooler in between keeps sessions. This is tested. Every
    other pooler is refused.
    """
    wire = _engine_session(database, idle)
    try:
        if wire.pid != wire.told:
            _refuse_pooler(database, wire, pooled=pooled)
        wire.begin(name)
    except Error as error:
        wire.close()
        raise LockBackendError(
            f"No session for locks on database {database!r}: {error}"
        ) from error
    except BaseException:
        wire.close()
        raise
    return wire


def _engine_session(database: str, idle: float) -> EngineSession:
    kind = engine_session_class(database)
    wrapper = unpooled(connections[database])
    wrapper.inc_thread_sharing()
    try:
        wrapper.ensure_connection()
        return kind(wrapper, idle)
    except Error as error:
        wrapper.close()
        raise LockBackendError(
            f"No session for locks on database {database!r}: {error}"
        ) from error
    except BaseException:
        wrapper.close()
        raise


def _refuse_pooler(database: str, wire: EngineSession, *, pooled: bool) -> None:
    """Raise ImproperlyConfigured unless the pooler keeps sessions.

    ``pooled`` must state this, and a second connection must get another session.
    """
    if not pooled:
        raise ImproperlyConfigured(
            f"Database {database!r} is behind a pooler (the session is {wire.pid}, and"
            f" the connection reports {wire.told}). A session lock needs its own"
            " session while it is held. A pooler that assigns sessions per transaction"
            " or statement would grant one lock to several callers. Connect this alias"
            " of DATABASES to the server itself, or use"
            " dlocks.backends.database.PessimisticBackend. If the pooler keeps sessions"
            " (pool_mode = session), set OPTIONS['session_pooling'] = True."
        )
    other = _engine_session(database, wire.idle)
    other.close()
    if other.pid == wire.pid:
        raise ImproperlyConfigured(
            "OPTIONS['session_pooling'] states that the pooler of database"
            f" {database!r} keeps sessions, but it assigned session {wire.pid} to two"
            " connections at a time. Set its pool_mode to session, connect this alias"
            " of DATABASES to the server itself, or use"
            " dlocks.backends.database.PessimisticBackend."
        )
