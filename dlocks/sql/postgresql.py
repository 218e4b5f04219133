"""The SQL and the errors of PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from django.db import DatabaseError

from dlocks.sql.dialect import Dialect, escape_unencodable, statement
from dlocks.sql.direct import Reply
from dlocks.sql.prepared import (
    CANCEL_TIMEOUT,
    NotPreparedError,
    PreparedStatements,
    end_interrupted,
    is_in_progress,
)

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


class PostgreSQL(Dialect):
    """The SQL of PostgreSQL."""

    unless_brought_along = "ON CONFLICT (id) DO NOTHING"
    now = "clock_timestamp()"
    ticks = "(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000)::bigint"
    microseconds_from_now = "(clock_timestamp() + {} * interval '1 microsecond')"
    seconds_until_time = "EXTRACT(EPOCH FROM {} - clock_timestamp())::double precision"
    microseconds_since_1970 = "(EXTRACT(EPOCH FROM {}) * 1000000)::bigint"
    next_time = "({} + interval '1 microsecond')"
    # serialization_failure, deadlock_detected
    lost_race = frozenset({"40001", "40P01"})
    # lock_not_available
    locked = frozenset({"55P03"})
    # read_only_sql_transaction
    read_only = frozenset({"25006"})
    # insufficient_privilege
    denied = frozenset({"42501"})
    # query_canceled
    cancelled = frozenset({"57014"})
    show_isolation = "SHOW transaction_isolation"
    read_only_settings = (
        "default_transaction_read_only is on, or the server is a standby (connect with"
        " target_session_attrs=read-write)"
    )
    keeps_locks = False
    # A row that matches in the snapshot, but no longer matches once it is locked, stays
    # locked (EvalPlanQual).
    locks_in_passing = True
    read_committed = (
        "current_setting('transaction_isolation') IN ('read committed', 'read"
        " uncommitted')"
    )

    # An insert that meets a row of an open transaction waits for that transaction, even
    # with ON CONFLICT.
    at_once_term = " + 0 * length(set_config('lock_timeout', '50ms', true))"
    count_in = (
        ", waiters = waiters + (SELECT COUNT(*) FROM {claims} AS alone WHERE"
        " alone.key_resource = %(key)s AND alone.version IS NULL AND NOT alone.counted"
        " AND alone.end_time > {now})"
    )
    tell_first = (
        " RETURNING (SELECT pg_notify(channel, '') FROM (SELECT channel"
        " FROM {claims} AS first WHERE first.key_resource = %(key)s AND first.version"
        " IS NULL AND first.end_time > {now} AND channel <> ''"
        " ORDER BY id LIMIT 1) AS told)"
    )
    queue = statement("postgresql_queue")
    hand_over = statement("postgresql_hand_over")
    without_flush = " RETURNING set_config('synchronous_commit', 'off', true)"
    if_taken = " AND taken.owner IS NOT NULL"
    bound = (
        "set_config('idle_in_transaction_session_timeout', '2000', true),"
        " set_config('lock_timeout', '1s', true)"
    )

    def typed(self, parameter: str, of: str) -> str:
        return f"{parameter}::{of}"

    def _picked(self, table: str, where: str, primary: str) -> str:
        # An array keeps the plan on the primary key, for one row and for many.
        return (
            f"{primary} = ANY (ARRAY(SELECT {primary} FROM {table} WHERE {where} FOR"
            " UPDATE SKIP LOCKED))"
        )

    def send(
        self,
        connection: BaseDatabaseWrapper,
        sql: str,
        parameters: Mapping[str, Any],
        *,
        through_a_pooler: bool,
        spin: float,
    ) -> Reply | None:
        statements = PreparedStatements.of(connection, through_a_pooler, spin)
        if statements is None:
            return None
        try:
            return statements.execute(sql, parameters)
        except NotPreparedError:
            return None

    def fitted(self, text: str, raw: Any) -> str:
        # The server sends the encoding of the database when a session begins, so
        # reading it needs no statement.
        encoding = raw.info.parameter_status("server_encoding") or "UTF8"
        # SQL_ASCII stores the bytes as they are, and the session sends UTF-8.
        if encoding in {"UTF8", "SQL_ASCII"}:
            return text
        return escape_unencodable(text, encoding)

    def code_of(self, error: BaseException) -> object:
        return sqlstate_of(error)

    def waits_for_table(
        self, other: BaseDatabaseWrapper, session: Any, tables: Sequence[str]
    ) -> bool:
        # ``pg_locks`` is not used, since behind a pooler the number of the session is
        # not known. This is the lock that each statement of ours takes. The transaction
        # ends with the connection.
        other.set_autocommit(False)
        try:
            with other.cursor() as cursor:
                cursor.execute(
                    f"LOCK TABLE {', '.join(tables)} IN ROW EXCLUSIVE MODE NOWAIT"
                )
        except DatabaseError as error:
            if self.is_locked(error):
                return True
            raise
        return False

    def cancel(self, other: BaseDatabaseWrapper, session: Any) -> None:
        if hasattr(session, "cancel_safe"):
            session.cancel_safe(timeout=CANCEL_TIMEOUT)
        else:
            # psycopg 2
            session.cancel()

    def is_busy(self, raw: Any) -> bool:
        # A cursor of psycopg 3 would wait for this lock, which its own thread has.
        lock = getattr(raw, "lock", None)
        return lock is not None and (lock.locked() or is_in_progress(raw))

    def abort_statement(self, connection: BaseDatabaseWrapper) -> None:
        if is_in_progress(connection.connection):
            try:
                end_interrupted(connection.connection)
            finally:
                # The next statement then connects again.
                connection.close()


def sqlstate_of(error: BaseException) -> str | None:
    """Return PostgreSQL's SQLSTATE of an error, or None without one.

    There is none if the server did not send the error.
    """
    cause = error.__cause__
    # psycopg 3 and psycopg 2 name the attribute differently.
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
