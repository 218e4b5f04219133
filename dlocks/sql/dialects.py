"""The SQL that differs between the database engines.

Engines differ in their clock, and in how a statement changes a row without waiting for
its lock. Parameters are named, since the engines need them in different orders.
``{after}`` fragments take microseconds.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError

from dlocks.exceptions import LockBackendError
from dlocks.sql.direct import Reply, by_mysqlclient, by_sqlite3
from dlocks.sql.prepared import (
    CANCEL_TIMEOUT,
    NotPreparedError,
    PreparedStatements,
    end_interrupted,
    is_under_way,
)

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.utils import Error

KEY = "key_resource = %(key)s"
AS_A_RANGE = "key_resource >= %(key)s AND key_resource <= %(key)s"


class Dialect:
    """The SQL of one engine.

    ``table`` is already quoted. ``where`` names its columns without a table.
    """

    # The database's clock: the current time, not the start of the transaction.
    now: str
    # Microseconds since 1970 by that clock.
    ticks: str
    # The function that returns the larger of two values.
    greatest = "GREATEST"
    # ``show_isolation`` is the statement that reads the isolation level without taking
    # a snapshot. It may also read whether a lock wait timeout rolls back the whole
    # transaction. ``read_committed`` is a condition for WHERE that excludes such a
    # rollback, and requires that each statement takes its own snapshot.
    show_isolation = ""
    read_committed: str | None = None
    # Whether a row that a locking statement found and rejected may stay locked until
    # the transaction ends.
    locks_in_passing = False
    # Whether rows that a transaction has written stay locked until its end, even after
    # a rollback to a savepoint.
    keeps_locks = True
    # Whether a locked row fails only the statement, and its transaction continues.
    fails_alone = False
    # How a row is inserted that may already exist: the words before INTO and at the
    # end.
    insert_or_ignore = ("INSERT", "ON CONFLICT DO NOTHING")
    # The end of an insert that does nothing if a claim was inserted with the id that
    # the engine generates. Then the next id is generated. Other engines never generate
    # an id that is smaller than an existing one.
    unless_brought_along = ""
    returning = " RETURNING version"
    # How an insert outside a transaction avoids waiting for a transaction that has
    # written the same row: words before it, and a term that adds nothing to a number in
    # it.
    at_once = ""
    at_once_term = ""
    # The end of a SELECT that locks rows, except rows that another transaction has
    # locked.
    for_update = " FOR UPDATE SKIP LOCKED"
    # The same for a caller that waits for the rows in the engine's own queue, for up to
    # a second.
    for_update_in_turn = for_update
    # The same for a caller that waits for the end of another statement or step. Where
    # the engine can limit that, it waits for up to a second.
    for_update_patiently = " FOR UPDATE"
    # The same for a statement that writes: words before it.
    patiently = ""
    # The words before a statement that joins a table to a subquery.
    unsafely = ""
    # The end of a statement that a crash of the server may lose. Such a statement need
    # not be flushed.
    forgettable = ""
    # An expression for the SELECT of a short transaction. With it the server ends the
    # transaction if the client stops responding.
    bound = ""
    # For a release within a transaction. ``count_in`` counts the waiters that joined
    # the queue while the row was locked. ``tell_first`` notifies the first of them on
    # commit.
    count_in = ""
    tell_first = ""
    # The settings that make a session read-only, and how to connect to a server that
    # accepts writes.
    read_only_settings = ""
    # ``queue`` adds claims to the queue and counts them, in one round trip. Each claim
    # is a ``queue_row``. For each claim it returns the owner, the number of its
    # position, whether the key is free, and the clock. Owner and number are NULL if
    # another transaction had locked the lock row.
    #
    # ``hand_over`` passes a key to the first waiter, if the lock row meets
    # ``{condition}``. It returns whether there was a waiter, and how many claims wait.
    # If the waiter still has to be notified, it returns the channel, the owner, the
    # token, the end of the lease, and the ``server``. Without a waiter it releases the
    # key, or with ``{if_taken}`` does nothing.
    #
    # Neither returns a row if it did nothing. ``{row_wait}`` limits the wait for the
    # lock row, where the engine supports that.
    queue = ""
    queue_row = ""
    hand_over = ""
    if_taken = ""
    # The statement that wakes the process that listens on a channel, if no other
    # statement includes the notification.
    wake = ""
    # An expression that tells servers with the same table apart, where there may be
    # several. A commit on one may not be visible on another yet.
    server = ""
    # Whether a transaction that writes has the whole database to itself.
    one_writer = False

    def typed(self, parameter: str, of: str) -> str:
        """Return a parameter with its type, if the engine needs that.

        Some engines need it where rows are combined.
        """
        return parameter

    def after(self, parameter: str) -> str:
        """Return the time that many microseconds from now."""
        raise NotImplementedError

    def after_column(self, column: str) -> str:
        """Return the time that is the column's number of microseconds from now."""
        raise NotImplementedError

    def seconds_until(self, column: str) -> str:
        """Return the seconds from now until the time in ``column``, as a float."""
        raise NotImplementedError

    def ticks_of(self, column: str) -> str:
        """Return the time in ``column`` as microseconds since 1970."""
        raise NotImplementedError

    def later_than(self, column: str) -> str:
        """Return the earliest time that is later than the one in ``column``."""
        raise NotImplementedError

    def next_version(self) -> str:
        """Return the next version: one more, or the clock if that is larger."""
        return f"{self.greatest}(version + 1, {self.ticks})"

    def token(self) -> str:
        """Return the next version, for a statement that writes and returns it."""
        return self.next_version()

    def update(
        self, table: str, assignments: str, where: str, primary: str = "key_resource"
    ) -> str:
        """Return a statement that writes the rows that it can lock at once.

        It skips rows that another transaction has locked.
        """
        raise NotImplementedError

    def update_these(
        self, table: str, assignments: str, ids: Iterable[str], where: str
    ) -> str:
        """Return a statement that writes the rows of ``ids``, and waits for them.

        ``ids`` are names of parameters.
        """
        return (
            f"UPDATE {table} SET {assignments} WHERE id IN"
            f" ({', '.join(f'%({id})s' for id in ids)}) AND {where}"
        )

    def delete(self, table: str, where: str, primary: str = "key_resource") -> str:
        """Return a statement that deletes the rows that it can lock at once.

        It skips rows that another transaction has locked.
        """
        raise NotImplementedError

    def compare_and_swap(self, table: str, assignments: str, where: str) -> str:
        """Return the cheapest statement that writes one row or fails at once.

        It is for use outside a transaction.
        """
        return self.update(table, assignments, where)

    def write_or_leave(self, table: str, assignments: str, where: str) -> str:
        """Return a statement that writes one row or fails at once.

        It is for use inside a caller's transaction. If it does not write the row, it
        leaves it unlocked. Where the engine ``locks_in_passing``, its savepoint does
        that.
        """
        return self.update(table, assignments, where)

    def send(
        self,
        connection: BaseDatabaseWrapper,
        sql: str,
        parameters: Mapping[str, Any],
        *,
        through_a_pooler: bool,
    ) -> Reply | None:
        """Execute a statement with the driver, without Django's cursor.

        The cursor must not be instrumented. Return None if the statement has to use the
        cursor.
        """
        return None

    def fitted(self, text: str, raw: Any) -> str:
        """Return a text in which unsupported characters are escaped.

        The connection ``raw`` of the driver cannot send or store them.
        """
        return _encodable(text, "utf-8")

    def granted(self, reply: Reply) -> int | None:
        """Return the token that a grant wrote, or None if it wrote nothing."""
        return int(reply.rows[0][0]) if reply.rows else None

    def is_contention(self, error: DatabaseError) -> bool:
        """Return whether the statement only lost a race, and can be sent again."""
        raise NotImplementedError

    def is_locked(self, error: DatabaseError) -> bool:
        """Return whether the statement failed because of another row lock."""
        return False

    def is_read_only(self, error: Error) -> bool:
        """Return whether the session cannot write.

        After a failover its server may have become a replica.
        """
        return False

    def is_desynchronised(self, error: Error) -> bool:
        """Return whether the connection, not the statement, is at fault.

        Such a connection cannot be used any more.
        """
        return False

    def abort_statement(self, connection: BaseDatabaseWrapper) -> None:
        """Abort an interrupted statement outside of a transaction.

        Afterwards no statement is running, and no reply is unread.
        """

    def session_of(self, raw: Any) -> Any:
        """Return a value by which other threads can identify the session."""
        return raw

    def waits_for_table(
        self, other: BaseDatabaseWrapper, session: Any, tables: Sequence[str]
    ) -> bool:
        """Return whether a session's statement waits for a lock on a table.

        ``other`` is another connection to the database, and ``tables`` are the tables
        in question.
        """
        return False

    def cancel(self, other: BaseDatabaseWrapper, session: Any) -> None:
        """Cancel the statement of a session, with another connection if needed."""

    def was_cancelled(self, error: Error) -> bool:
        """Return whether the statement was cancelled."""
        return False

    def ends_transaction(self, error: DatabaseError) -> bool:
        """Return whether the server has rolled back the whole transaction.

        The next statement would be part of a new transaction.
        """
        return False


class PostgreSQL(Dialect):
    unless_brought_along = "ON CONFLICT (id) DO NOTHING"
    now = "clock_timestamp()"
    ticks = "(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000)::bigint"
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
        " RETURNING (SELECT pg_notify(channel, 'free ' || %(key)s) FROM (SELECT channel"
        " FROM {claims} AS first WHERE first.key_resource = %(key)s AND first.version"
        " IS NULL AND first.end_time > {now} AND right(channel, 1) NOT IN ('', '-')"
        " ORDER BY id LIMIT 1) AS told)"
    )
    # It waits a moment for the lock row, since other sessions lock it only to count
    # claims.
    queue = (
        "WITH bound AS MATERIALIZED (SELECT set_config('lock_timeout', '5ms', true),"
        " set_config('synchronous_commit', 'off', true)), head AS MATERIALIZED (SELECT"
        " key_resource, CASE WHEN {free_by_clock} THEN 1 ELSE 0 END AS free FROM bound,"
        " {locks} WHERE key_resource = %(key)s AND (owner NOT IN ({owners}) OR"
        " {free_by_clock}) FOR UPDATE OF {of_locks}), mine AS (INSERT INTO {claims}"
        " ({columns}) {rows} ON CONFLICT DO NOTHING RETURNING owner, id), counted AS"
        " (UPDATE {locks} SET waiters = waiters + (SELECT COUNT(*) FROM mine) FROM head"
        " WHERE {locks}.key_resource = head.key_resource AND EXISTS (SELECT 1 FROM"
        " mine)) SELECT owner, id, 0, {ticks} FROM mine"
    )
    queue_row = "SELECT {values} FROM head WHERE free = 0"
    hand_over = (
        "WITH bound AS MATERIALIZED (SELECT set_config('lock_timeout', '{row_wait}',"
        " true)),"
        " head AS MATERIALIZED (SELECT key_resource FROM bound, {locks} WHERE"
        " key_resource = %(key)s"
        " AND {condition} AND shares = 0 FOR UPDATE OF {of_locks}),"
        " first AS MATERIALIZED (SELECT id, shared FROM {claims} WHERE key_resource ="
        " (SELECT key_resource FROM head)"
        " AND version IS NULL AND end_time > {now} ORDER BY id LIMIT 1),"
        # The statement may have waited for the lock row. The first waiter may have left
        # the queue since.
        " taken AS (DELETE FROM {claims} WHERE id = (SELECT id FROM first WHERE NOT"
        " shared)"
        " AND version IS NULL AND end_time > {now}"
        " RETURNING owner, holder, owner_ip, scope, counted, handover_ttl, channel)"
        " UPDATE {locks} SET status = COALESCE(taken.scope, %(status)s), owner ="
        " COALESCE(taken.owner, {locks}.owner),"
        " holder = COALESCE(taken.holder, {locks}.holder),"
        " owner_ip = CASE WHEN taken.owner IS NULL THEN {locks}.owner_ip ELSE"
        " taken.owner_ip END,"
        " begin_time = CASE WHEN taken.owner IS NULL THEN begin_time ELSE {now} END,"
        " end_time = {now} + COALESCE(taken.handover_ttl, 0) * interval '1"
        " microsecond',"
        " hold_count = CASE WHEN taken.owner IS NULL THEN 0 ELSE 1 END,"
        " version = CASE WHEN taken.owner IS NULL THEN version ELSE {next_version} END,"
        " waiters = GREATEST(waiters - CASE WHEN taken.counted THEN 1 ELSE 0 END, 0)"
        " FROM head LEFT JOIN taken ON TRUE WHERE {locks}.key_resource ="
        " head.key_resource{if_taken}"
        " RETURNING taken.owner IS NOT NULL, waiters, CASE WHEN left(channel, 9) ="
        " %(near)s THEN channel END,"
        " taken.owner, CASE WHEN taken.scope = 'P' THEN version END, {ends}, '',"
        " CASE WHEN right(channel, 1) NOT IN ('', '-') AND left(channel, 9) <> %(near)s"
        " THEN"
        " pg_notify(channel, taken.owner"
        " || CASE WHEN taken.scope = 'P' THEN ' ' || version || ' ' || {ends} ELSE ''"
        " END) END"
    )
    forgettable = " RETURNING set_config('synchronous_commit', 'off', true)"
    if_taken = " AND taken.owner IS NOT NULL"
    bound = (
        "set_config('idle_in_transaction_session_timeout', '2000', true),"
        " set_config('lock_timeout', '1s', true)"
    )

    def typed(self, parameter: str, of: str) -> str:
        return f"{parameter}::{of}"

    def after(self, parameter: str) -> str:
        return f"(clock_timestamp() + %({parameter})s * interval '1 microsecond')"

    def after_column(self, column: str) -> str:
        return f"(clock_timestamp() + {column} * interval '1 microsecond')"

    def seconds_until(self, column: str) -> str:
        return f"EXTRACT(EPOCH FROM {column} - clock_timestamp())::double precision"

    def ticks_of(self, column: str) -> str:
        return f"(EXTRACT(EPOCH FROM {column}) * 1000000)::bigint"

    def later_than(self, column: str) -> str:
        return f"({column} + interval '1 microsecond')"

    def update(
        self, table: str, assignments: str, where: str, primary: str = "key_resource"
    ) -> str:
        return (
            f"UPDATE {table} SET {assignments} WHERE"
            f" {self._picked(table, where, primary)}"
        )

    def delete(self, table: str, where: str, primary: str = "key_resource") -> str:
        return f"DELETE FROM {table} WHERE {self._picked(table, where, primary)}"

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
    ) -> Reply | None:
        statements = PreparedStatements.of(
            connection, through_a_pooler=through_a_pooler
        )
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
        return text if encoding in {"UTF8", "SQL_ASCII"} else _encodable(text, encoding)

    def is_contention(self, error: DatabaseError) -> bool:
        # serialization_failure, deadlock_detected
        return sqlstate_of(error) in {"40001", "40P01"}

    def is_locked(self, error: DatabaseError) -> bool:
        # lock_not_available
        return sqlstate_of(error) == "55P03"

    def is_read_only(self, error: Error) -> bool:
        # read_only_sql_transaction
        return sqlstate_of(error) == "25006"

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

    def was_cancelled(self, error: Error) -> bool:
        # query_canceled
        return sqlstate_of(error) == "57014"

    def abort_statement(self, connection: BaseDatabaseWrapper) -> None:
        if is_under_way(connection.connection):
            try:
                end_interrupted(connection.connection)
            finally:
                # The next statement then connects again.
                connection.close()


# States of a session in the process list of MySQL and MariaDB.
_WAITS_FOR_TABLE = re.compile(
    "Waiting for (table metadata|table level|global read|backup|commit) lock"
)


class MySQL(Dialect):
    """The SQL of MySQL and MariaDB on InnoDB.

    UTC_TIMESTAMP is used, since NOW() is in the session's time zone. The row is
    addressed by a range rather than by ``=``. A const lookup locks the row before it
    evaluates the rest of WHERE, and keeps it locked if that fails. So a waiter in a
    transaction would keep the real holder out (MariaDB 10.11). At READ COMMITTED, a
    range scan unlocks rows that do not match.
    """

    now = "UTC_TIMESTAMP(6)"
    ticks = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    show_isolation = "SELECT @@transaction_isolation"
    read_only_settings = (
        "read_only or transaction_read_only is on, as it is on a replica"
    )
    read_committed = "@@transaction_isolation = 'READ-COMMITTED'"
    # A duplicate changes nothing and raises nothing. Never read its row count, which is
    # 1 under Django's FOUND_ROWS.
    insert_or_ignore = ("INSERT", "ON DUPLICATE KEY UPDATE hold_count = hold_count")
    returning = ""

    def after(self, parameter: str) -> str:
        return f"(UTC_TIMESTAMP(6) + INTERVAL %({parameter})s MICROSECOND)"

    def after_column(self, column: str) -> str:
        return f"(UTC_TIMESTAMP(6) + INTERVAL {column} MICROSECOND)"

    def seconds_until(self, column: str) -> str:
        return f"TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), {column}) / 1e6"

    def ticks_of(self, column: str) -> str:
        return f"TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {column})"

    def later_than(self, column: str) -> str:
        return f"({column} + INTERVAL 1 MICROSECOND)"

    def token(self) -> str:
        # The reply to the statement itself contains LAST_INSERT_ID(value).
        return f"LAST_INSERT_ID({self.next_version()})"

    def update(
        self, table: str, assignments: str, where: str, primary: str = "key_resource"
    ) -> str:
        return f"UPDATE {self._picked(table, where, primary)} SET {assignments}"

    def update_these(
        self, table: str, assignments: str, ids: Iterable[str], where: str
    ) -> str:
        # It is a join, since a small table is read from end to end for a list in WHERE.
        # The statement would wait for every locked row.
        picks = " UNION ALL ".join(f"SELECT %({id})s AS picked" for id in ids)
        return (
            f"UPDATE ({picks}) AS picks {self._joined(table, 'id')} SET {assignments}"
            f" WHERE {where}"
        )

    def delete(self, table: str, where: str, primary: str = "key_resource") -> str:
        return f"DELETE {table} FROM {self._picked(table, where, primary)}"

    def _picked(self, table: str, where: str, primary: str) -> str:
        # LIMIT keeps the subquery from being merged. A merged statement would write the
        # table that it reads.
        where = where.replace(KEY, AS_A_RANGE)
        index = " FORCE INDEX (PRIMARY)" if primary == "key_resource" else ""
        return (
            f"(SELECT {primary} AS picked FROM {table}{index} WHERE {where} LIMIT"
            f" 1000000 FOR UPDATE SKIP LOCKED) AS picks {self._joined(table, primary)}"
        )

    def compare_and_swap(self, table: str, assignments: str, where: str) -> str:
        # An UPDATE of one table takes two thirds of the time of an UPDATE with a join.
        # The optimizer evaluates the subquery before the UPDATE locks a row, so a
        # locked row is skipped here too. LIMIT keeps the subquery from being merged,
        # which would read the table that is written (error 1093).
        return (
            f"UPDATE {table} FORCE INDEX (PRIMARY) SET {assignments} WHERE key_resource"
            f" = (SELECT picked FROM (SELECT key_resource AS picked FROM {table} FORCE"
            f" INDEX (PRIMARY) WHERE {where} LIMIT 1 FOR UPDATE SKIP LOCKED) AS picks)"
        )

    def _joined(self, table: str, primary: str) -> str:
        return f"STRAIGHT_JOIN {table} FORCE INDEX (PRIMARY) ON {primary} = picked"

    # A short transaction, sent as one packet. A client that is stopped in the middle of
    # it cannot keep the key. An UPDATE of joined tables would use a temporary table, at
    # five times the cost.
    queue = (
        "START TRANSACTION;"
        " SELECT COUNT(*) INTO @dlocks_done FROM {locks} FORCE INDEX (PRIMARY) WHERE"
        " key_resource >= %(key)s"
        " AND key_resource <= %(key)s AND NOT {free_by_clock} AND owner NOT IN"
        " ({owners}) FOR UPDATE SKIP LOCKED;"
        " INSERT IGNORE INTO {claims} ({columns}) {rows};"
        # It is in a variable, since a log of statements contains the value of a
        # variable.
        " SET @dlocks_count = ROW_COUNT();"
        " UPDATE {locks} SET waiters = waiters + @dlocks_count WHERE key_resource ="
        " %(key)s AND @dlocks_done = 1;"
        " COMMIT;"
        # No row is returned if the turn of one of these claims has come in the
        # meantime, and no other of them is in the queue.
        " SELECT mine.owner, mine.id, head.free, {ticks}"
        " FROM (SELECT owner, CASE WHEN {free_by_clock} THEN 1 ELSE 0 END AS free FROM"
        " {locks}"
        " WHERE key_resource = %(key)s) AS head LEFT JOIN {claims} AS mine ON"
        " mine.owner IN ({owners})"
        " WHERE mine.id IS NOT NULL OR head.owner NOT IN ({owners})"
    )
    queue_row = "SELECT {values} FROM DUAL WHERE @dlocks_done = 1"
    hand_over = (
        "START TRANSACTION;"
        " SELECT COUNT(*), MAX(waiters), MAX({next_version}) INTO @dlocks_done,"
        " @dlocks_waiters, @dlocks_version"
        " FROM {locks} FORCE INDEX (PRIMARY) WHERE key_resource >= %(key)s AND"
        " key_resource <= %(key)s"
        " AND {condition} AND shares = 0 FOR UPDATE SKIP LOCKED;"
        # Aggregates are NULL if there is no waiter.
        " SELECT MAX(id), MAX(owner), MAX(holder), MAX(owner_ip), MAX(scope),"
        " MAX(channel), MAX(handover_ttl),"
        " IF(MAX(counted), GREATEST(@dlocks_waiters, 1) - 1, @dlocks_waiters)"
        " INTO @dlocks_id, @dlocks_owner, @dlocks_holder, @dlocks_ip, @dlocks_scope,"
        " @dlocks_channel, @dlocks_handover_ttl,"
        " @dlocks_waiters FROM {claims} WHERE @dlocks_done = 1 AND NOT shared AND id ="
        " (SELECT"
        " MIN(first.id) FROM {claims} AS first WHERE first.key_resource = %(key)s AND"
        " first.version IS NULL"
        " AND first.end_time > {now}) AND version IS NULL AND end_time > {now} FOR"
        " UPDATE NOWAIT;"
        " DELETE FROM {claims} WHERE id = @dlocks_id;"
        # The value that is written is also the value that is sent.
        " SET @dlocks_end = {now} + INTERVAL COALESCE(@dlocks_handover_ttl, 0)"
        " MICROSECOND;"
        " UPDATE {locks} SET status = COALESCE(@dlocks_scope, %(status)s), owner ="
        " COALESCE(@dlocks_owner, owner),"
        " holder = COALESCE(@dlocks_holder, holder),"
        " owner_ip = IF(@dlocks_id IS NULL, owner_ip, @dlocks_ip),"
        " begin_time = IF(@dlocks_id IS NULL, begin_time, {now}),"
        " end_time = @dlocks_end,"
        " hold_count = IF(@dlocks_id IS NULL, 0, 1),"
        " version = IF(@dlocks_id IS NULL, version, @dlocks_version),"
        " waiters = @dlocks_waiters"
        " WHERE key_resource = %(key)s AND @dlocks_done = 1{if_taken};"
        " COMMIT;"
        # Building the message on the server would cost more than building it here.
        " SELECT @dlocks_id IS NOT NULL, @dlocks_waiters, @dlocks_channel,"
        " @dlocks_owner,"
        " IF(@dlocks_scope = 'P', @dlocks_version, NULL), TIMESTAMPDIFF(MICROSECOND,"
        " '1970-01-01', @dlocks_end),"
        " {server} FROM DUAL WHERE @dlocks_done = 1{if_taken}"
    )
    if_taken = " AND @dlocks_id IS NOT NULL"
    server = "CONCAT_WS(' ', @@hostname, @@port, @@datadir)"
    # A waiting process sleeps in the server, in the session that holds the named lock
    # of its channel. So the statement interrupts that session and never another. Error
    # 1094 or 3057 means that there is no such session.
    wake = "KILL QUERY IS_USED_LOCK(%(channel)s)"

    # MySQL cannot limit the lock wait of one statement.
    for_update_patiently = " FOR UPDATE NOWAIT"

    def is_locked(self, error: DatabaseError) -> bool:
        # lock wait timeout, not locked at once
        return bool(error.args) and error.args[0] in {1205, 3572}

    def send(
        self,
        connection: BaseDatabaseWrapper,
        sql: str,
        parameters: Mapping[str, Any],
        *,
        through_a_pooler: bool,
    ) -> Reply | None:
        return by_mysqlclient(connection.connection, sql, parameters)

    def fitted(self, text: str, raw: Any) -> str:
        # The columns are in utf8mb4, whatever the database's character set. The session
        # has a character set of its own.
        charset = raw.character_set_name()
        if charset == "utf8mb4":
            return text
        if charset in {"utf8", "utf8mb3"}:
            return re.sub(
                "[^\0-\uffff]", lambda found: _encodable(found[0], "ascii"), text
            )
        return _encodable(text, charset)

    def granted(self, reply: Reply) -> int | None:
        return reply.last_id if reply.changed else None

    def is_contention(self, error: DatabaseError) -> bool:
        # lock wait timeout, not locked at once
        return self.ends_transaction(error) or (
            bool(error.args) and error.args[0] in {1205, 3572}
        )

    def is_read_only(self, error: Error) -> bool:
        # read_only of the server, of InnoDB, of the session
        return error.args[:1] in {(1290,), (1836,), (1792,)}

    def is_desynchronised(self, error: Error) -> bool:
        # commands out of sync: an interrupt came before a reply was read
        return error.args[:1] == (2014,)

    def session_of(self, raw: Any) -> Any:
        # mysqlclient refuses calls from another thread while a statement is running.
        return raw.thread_id()

    def waits_for_table(
        self, other: BaseDatabaseWrapper, session: Any, tables: Sequence[str]
    ) -> bool:
        with other.cursor() as cursor:
            cursor.execute("SHOW FULL PROCESSLIST")
            for (
                number,
                _user,
                _host,
                _database,
                _command,
                _time,
                state,
                info,
                *_,
            ) in cursor.fetchall():
                # Behind a proxy the number may be that of another session. So the text
                # has to name the table too.
                if number == session and _WAITS_FOR_TABLE.match(state or ""):
                    return any(table in (info or "") for table in tables)
        return False

    def cancel(self, other: BaseDatabaseWrapper, session: Any) -> None:
        with other.cursor() as cursor:
            cursor.execute("KILL QUERY %s", [session])

    def was_cancelled(self, error: Error) -> bool:
        # query interrupted
        return error.args[:1] == (1317,)

    def abort_statement(self, connection: BaseDatabaseWrapper) -> None:
        # With mysqlclient, the reply may still be unread. The next statement would read
        # it.
        connection.close()

    def ends_transaction(self, error: DatabaseError) -> bool:
        # 1213 is a deadlock. 1180 is an error during commit, from a node of a Galera
        # cluster if another node has committed first. 1020 is a row that changed since
        # the snapshot. MariaDB 11.6 and newer roll back the transaction then.
        return bool(error.args) and error.args[0] in {1213, 1180, 1020}


def _compound(statements: str) -> str:
    """Return statements combined into one compound statement.

    The server reads and answers it once. In total it takes a seventh less time.
    """
    return f"BEGIN NOT ATOMIC {statements}; END"


class MariaDB(MySQL):
    for_update_in_turn = for_update_patiently = " FOR UPDATE WAIT 1"
    patiently = "SET STATEMENT innodb_lock_wait_timeout = 1, sql_safe_updates = 0 FOR "
    # With sql_safe_updates the server refuses to write a table that is joined to a
    # subquery (error 1175). It does so even if the rows are found by the primary key.
    unsafely = "SET STATEMENT sql_safe_updates = 0 FOR "
    show_isolation = "SELECT @@tx_isolation, @@innodb_rollback_on_timeout"
    read_committed = (
        "@@tx_isolation = 'READ-COMMITTED' AND @@innodb_rollback_on_timeout = 0"
    )
    fails_alone = True
    at_once = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR "
    queue = _compound(MySQL.queue)
    # A compound statement cannot contain NOWAIT. If the first waiter's row is locked, a
    # step follows that waits for it.
    hand_over = _compound(MySQL.hand_over.replace("NOWAIT", "SKIP LOCKED"))

    def update(
        self, table: str, assignments: str, where: str, primary: str = "key_resource"
    ) -> str:
        return self.unsafely + super().update(table, assignments, where, primary)

    def delete(self, table: str, where: str, primary: str = "key_resource") -> str:
        return self.unsafely + super().delete(table, where, primary)

    def compare_and_swap(self, table: str, assignments: str, where: str) -> str:
        # This costs half as much as the locking subquery. A locked row is error 1205.
        # The primary key is forced in any case, since a full scan of a small table
        # would meet locked rows of other keys.
        return (
            f"{self.at_once}UPDATE {table} FORCE INDEX (PRIMARY) SET {assignments}"
            f" WHERE {where}"
        )

    def write_or_leave(self, table: str, assignments: str, where: str) -> str:
        # SKIP LOCKED queues for the row before it gives up. If the row is unlocked at
        # that moment, the statement gets the lock. It then keeps the lock until the
        # transaction ends, even if the row does not match (10.11, row_search_mvcc).
        return self.compare_and_swap(table, assignments, where.replace(KEY, AS_A_RANGE))


class SQLite(Dialect):
    """The SQL of SQLite, where a writing statement has the database to itself.

    Its clock has a resolution of milliseconds. It is read by strftime with ``now``,
    since unixepoch('subsec') is NULL before 3.42.
    """

    now = "(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now') || '000')"
    ticks = "(CAST((julianday('now') - 2440587.5) * 86400000 + 0.5 AS INTEGER) * 1000)"
    greatest = "MAX"
    for_update = for_update_in_turn = for_update_patiently = ""
    one_writer = True

    def after(self, parameter: str) -> str:
        return self.after_column(f"%({parameter})s")

    def after_column(self, column: str) -> str:
        offset = f"printf('%%+.3f seconds', {column} / 1e6)"
        return f"(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', {offset}) || '000')"

    def seconds_until(self, column: str) -> str:
        return f"((julianday({column}) - julianday('now')) * 86400.0)"

    def ticks_of(self, column: str) -> str:
        return (
            f"(CAST((julianday({column}) - 2440587.5) * 86400000 + 0.5 AS INTEGER) *"
            " 1000)"
        )

    def later_than(self, column: str) -> str:
        return (
            f"(strftime('%%Y-%%m-%%d %%H:%%M:%%f', {column}, '+0.001 seconds') ||"
            " '000')"
        )

    def update(
        self, table: str, assignments: str, where: str, primary: str = "key_resource"
    ) -> str:
        return f"UPDATE {table} SET {assignments} WHERE {where}"

    def delete(self, table: str, where: str, primary: str = "key_resource") -> str:
        return f"DELETE FROM {table} WHERE {where}"

    def send(
        self,
        connection: BaseDatabaseWrapper,
        sql: str,
        parameters: Mapping[str, Any],
        *,
        through_a_pooler: bool,
    ) -> Reply | None:
        return by_sqlite3(connection.connection, sql, parameters)

    def is_contention(self, error: DatabaseError) -> bool:
        return "is locked" in str(error)

    def is_locked(self, error: DatabaseError) -> bool:
        return "is locked" in str(error)


def dialect_of(connection: BaseDatabaseWrapper) -> Dialect:
    """Return the dialect of a Django connection."""
    vendor = connection.vendor
    if vendor == "mysql" and getattr(connection, "mysql_is_mariadb", False):
        vendor = "mariadb"
    try:
        return _DIALECTS[vendor]
    except KeyError:
        raise ImproperlyConfigured(
            f"dlocks has no database backend for {connection.vendor!r}. Use PostgreSQL,"
            " MariaDB, MySQL or SQLite."
        ) from None


_DIALECTS: dict[str, Dialect] = {
    "postgresql": PostgreSQL(),
    "mysql": MySQL(),
    "mariadb": MariaDB(),
    "sqlite": SQLite(),
}


def _encodable(text: str, charset: str) -> str:
    # For some encodings, Python has other names than PostgreSQL.
    name = re.sub("(?i)^win(?=[0-9])", "cp", charset)
    name = re.sub("(?i)^koi8(?=[ru]$)", "koi8-", name)
    try:
        codec = codecs.lookup(name).name
    except LookupError:
        codec = "ascii"
    return text.encode(codec, "backslashreplace").decode(codec)


def sqlstate_of(error: BaseException) -> str | None:
    """Return PostgreSQL's SQLSTATE of an error, or None without one.

    There is none if the server did not send the error.
    """
    cause = error.__cause__
    # psycopg 3 and psycopg 2 name the attribute differently.
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)


def refuse_lost(connection: BaseDatabaseWrapper) -> None:
    """Raise LockBackendError if only a lost connection turned autocommit off."""
    # On other engines, autocommit is a matter of the client alone.
    if (
        connection.vendor == "mysql"
        and connection.connection is not None
        and not connection.is_usable()
    ):
        raise LockBackendError(
            f"The connection to database {connection.alias!r} was lost while a"
            " transaction ended. Close it with 'connection.close()', as Django does at"
            " the end of a request."
        )
