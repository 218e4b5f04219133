"""Sessions of PostgreSQL, whose locks are ``pg_advisory_lock``."""

from __future__ import annotations

import math
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from dlocks.backends.session.engine_sessions import (
    LONGEST_IDLE,
    EngineSession,
    Row,
    SessionDiedError,
)
from dlocks.exceptions import LockBackendError
from dlocks.runtime.polling import ready


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
        self.reported_pid = int(self.pgconn.backend_pid)

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
