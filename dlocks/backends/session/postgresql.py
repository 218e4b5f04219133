"""Sessions of PostgreSQL, whose locks are ``pg_advisory_lock``."""

from __future__ import annotations

import math
import os
import socket
from contextlib import suppress
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db.utils import Error

from dlocks.backends.session.session import Session
from dlocks.exceptions import LockBackendError
from dlocks.runtime.polling import ready
from dlocks.sql.clock import TICKS
from dlocks.sql.engines import sqlstate_of

_NAME = "%(value)s::bigint"
_IDENTITY = "concat(pid, ' ', extract(epoch FROM backend_start))"
_THIS = (
    "locktype = 'advisory' AND objsubid = 1 AND database = (SELECT oid FROM pg_database"
    " WHERE datname = current_database()) AND (classid::bigint << 32 | objid::bigint) ="
    f" {_NAME}"
)


def _granted(condition: str) -> str:
    # CASE evaluates in order, so the clock is read after the grant.
    return f"SELECT CASE WHEN {condition} THEN {TICKS['postgresql']} END"


def _slice(function: str) -> str:
    """Return statements that wait for a lock, as one transaction.

    Its snapshot holds back VACUUM and CREATE INDEX CONCURRENTLY, so it must be short.
    The token is 0 if the lock was not granted. Without the block, the server would
    log an error for each slice. It may grant the lock at the moment of the timeout, and
    keeps it then.
    """
    record = f"PERFORM set_config('dlocks.token', ({TICKS['postgresql']})::text, true)"
    return (
        "SET LOCAL lock_timeout = %(slice)s;"
        f" DO $$ BEGIN PERFORM {function}(%(value)s); {record};"
        f" EXCEPTION WHEN lock_not_available THEN {record} FROM pg_locks WHERE granted"
        f" AND pid = pg_backend_pid() AND {_THIS}; END $$; SELECT"
        " coalesce(nullif(current_setting('dlocks.token', true), ''), '0')::bigint"
    )


class PostgreSQLSession(Session):
    shares = True
    idle_unit = 1000
    cancelled = "57014"
    ended = ("57P", "08")

    statements = {
        "try": _granted(f"pg_try_advisory_lock({_NAME})"),
        "try shared": _granted(f"pg_try_advisory_lock_shared({_NAME})"),
        # The session has this lock already. Others may wait for its release.
        "try shared again": _granted(
            f"NOT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND {_THIS})"
        ),
        "wait": _slice("pg_advisory_lock"),
        "wait shared": _slice("pg_advisory_lock_shared"),
        "free": f"SELECT pg_advisory_unlock({_NAME})",
        "free shared": f"SELECT pg_advisory_unlock_shared({_NAME})",
        "cancel": (
            "SELECT COUNT(pg_cancel_backend(pid)) FROM"
            " pg_stat_get_activity(split_part(%(value)s, ' ', 1)::int) WHERE"
            f" {_IDENTITY} = %(value)s AND backend_start IS NOT NULL"
        ),
        "ping": f"SELECT pg_backend_pid() + 0 * {_NAME}",
        "idle": f"SELECT set_config('idle_session_timeout', {_NAME}::text, false)",
        # In the caller's transaction. Its snapshot must not be older than the lock.
        "try in transaction": (
            "SELECT CASE WHEN current_setting('transaction_isolation') NOT LIKE 'read"
            f" %%committed' THEN -1 WHEN pg_try_advisory_xact_lock({_NAME}) THEN"
            f" {TICKS['postgresql']} END"
        ),
        "check in transaction": (
            "SELECT 1 FROM pg_locks WHERE granted AND pid = pg_backend_pid() AND"
            f" {_THIS}"
        ),
        "comments": (
            "SELECT json_agg(query)::text FROM pg_stat_activity WHERE datname ="
            " current_database() AND wait_event = 'advisory' AND query LIKE"
            " '%%/*dlocks %%*/%%'"
        ),
        # Each slice of a wait has a ``waitstart``.
        "sessions": (
            "SELECT json_agg(json_build_array(granted, concat(coalesce("
            "nullif(application_name, ''), 'a session'), ' (session ', pid, ')'),"
            " host(client_addr), pid, extract(epoch FROM clock_timestamp()) -"
            " coalesce(substring(query FROM 'since ([0-9]+)')::numeric / 1000000,"
            " extract(epoch FROM waitstart))) ORDER BY waitstart, mode, pid)::text FROM"
            f" pg_locks JOIN pg_stat_activity USING (pid) WHERE {_THIS}"
        ),
    }

    def options(self) -> dict[str, Any]:
        # A request must not wait for hours for a host that has vanished.
        seconds = math.ceil(self.idle)
        return {
            "keepalives_idle": seconds,
            "tcp_user_timeout": seconds * 1000,
            # The number of times before psycopg prepares a statement. A pooler might
            # leave what this session prepares to the next client.
            "prepare_threshold": None if self.pooled else 5,
        }

    def identify(self) -> None:
        raw = self.wrapper.connection
        if not hasattr(raw, "pgconn"):
            raise ImproperlyConfigured(
                "Session locks on PostgreSQL need psycopg 3: install"
                " dlocks[postgresql]."
            )
        self.pid, self.identity = self.first_row(
            f"SELECT pg_backend_pid() + 0, (SELECT {_IDENTITY} FROM"
            " pg_stat_get_activity(pg_backend_pid()))"
        )
        self.reported_pid = int(raw.pgconn.backend_pid)

    def begin(self) -> None:
        if self.first_row("SELECT pg_is_in_recovery()") == (True,):
            # This may be temporary, as after a failover.
            raise LockBackendError(
                f"The server of database {self.database!r} is a standby, whose session"
                " locks exclude no other callers. Connect this alias of DATABASES to"
                " the primary (target_session_attrs=read-write)."
            )
        # The project's timeouts are meant for its own statements. The server checks
        # whether the client of a waiting statement is still connected. Otherwise a dead
        # client would keep its position until its turn comes.
        self.first_row(
            "SELECT set_config('application_name', %s, false),"
            " set_config('client_connection_check_interval', '1000', false),"
            " set_config('idle_session_timeout', %s, false), (SELECT"
            " count(set_config(name, '0', false)) FROM pg_settings WHERE name IN"
            " ('statement_timeout', 'lock_timeout', 'transaction_timeout'))",
            (
                f"dlocks {socket.gethostname()}:{os.getpid()}"[:63],
                str(self.idle_setting(self.idle)),
            ),
        )

    def first_row(self, sql: str, values: Any = None) -> Any:
        from psycopg import ClientCursor, Cursor

        # Unlike Django's cursor, psycopg's own prepares a statement that is repeated.
        with self.wrapper.wrap_database_errors:
            connection = self.wrapper.connection
            if "DO $$" not in sql:
                cursor = Cursor(connection)
                cursor.execute(sql, values)
                return cursor.fetchone() if cursor.description else ()
            # The server takes no parameters here. The third statement has a row.
            values = {**values, "slice": round(self.slice * 1000)}
            block = ClientCursor(connection).execute(sql, values)
            block.nextset()
            block.nextset()
            return block.fetchone()

    def read_rest(self) -> None:
        # psycopg itself does this after a KeyboardInterrupt only. If the session has
        # ended, the next statement finds out.
        with suppress(Error), self.wrapper.wrap_database_errors:
            _read_results(self.wrapper.connection.pgconn)

    def code(self, error: Error) -> str:
        # Without a state, the error is not the server's.
        return sqlstate_of(error) or "08"


def _read_results(pgconn: Any) -> None:
    """Read all results of the last statement.

    ``get_result()`` must not wait for the server itself, because it would stop all
    threads of the process meanwhile.
    """
    is_complete = False
    while not is_complete:
        while pgconn.is_busy():
            # Now and then, because consume_input() also sends.
            ready(pgconn.socket, timeout=1.0)
            pgconn.consume_input()
        is_complete = pgconn.get_result() is None
