"""
The SQL in which the engines differ: their clock, and how a row is changed without waiting for its lock.

Parameters are named, since the engines want them in different orders. ``{after}`` fragments take microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured

from dlocks.backends.database.direct import Reply, by_mysqlclient, by_sqlite3
from dlocks.backends.database.prepared import NotPreparedError, PreparedStatements, end_interrupted, is_under_way
from dlocks.exceptions import LockBackendError

if TYPE_CHECKING:
    from django.db import DatabaseError
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.utils import Error

KEY = "key_resource = %(key)s"
AS_A_RANGE = "key_resource >= %(key)s AND key_resource <= %(key)s"


class Dialect:
    """One engine. ``table`` is quoted already; ``where`` names its rows by columns without a table."""

    # The database's clock: the moment itself, not the start of the transaction.
    now: str
    # Microseconds since 1970 by that clock.
    ticks: str
    # The larger of two values.
    greatest = "GREATEST"
    # The statement that tells the isolation level, without taking a snapshot by it, and perhaps whether a locked row is
    # the end of a whole transaction; and the test for WHERE that it is not, and each statement takes its own snapshot.
    show_isolation = ""
    read_committed: str | None = None
    # Whether a row that a locking statement met and did not want may stay locked until the transaction ends.
    locks_in_passing = False
    # Whether rows that a transaction has written are kept from others to its end, though a savepoint was gone back to.
    keeps_locks = True
    # Whether a statement that was refused because of a locked row fails alone, and the transaction it is in goes on.
    fails_alone = False
    # How a row is inserted when it may be there already: the words before INTO and at the end.
    insert_or_ignore = ("INSERT", "ON CONFLICT DO NOTHING")
    # The end of an insert that comes to nothing where somebody has brought along the number that it draws: then another
    # one is drawn. Elsewhere the engine draws none that is less than one it has seen.
    unless_brought_along = ""
    returning = " RETURNING version"
    # How an insert, outside a transaction, is kept from waiting for a transaction that has the row it finds there:
    # words before it, and a term that adds nothing to a number in it.
    at_once = ""
    at_once_term = ""
    # The end of a SELECT that locks rows, unless another transaction has them.
    for_update = " FOR UPDATE SKIP LOCKED"
    # The same for who waits a second for them at most, in the engine's own line.
    for_update_in_turn = for_update
    # The same for who waits a second, where the engine can bound that, for another statement or step to be over.
    for_update_patiently = " FOR UPDATE"
    # The same for a statement that writes: words before it.
    patiently = ""
    # The end of a statement that a crash of the server may forget, when it need not be flushed then.
    forgettable = ""
    # What, selected in a short transaction, has the server end it when its client falls silent.
    bound = ""
    # At the release within a transaction: what counts those in line in, who came while the row was locked, and what
    # tells the first of them on commit.
    count_in = ""
    tell_first = ""
    # What in one trip puts claims into line, each a ``queue_row``, and counts them in: for each it returns the owner,
    # the place's number, whether the key is free, and the clock. Owner and number are NULL when others had the lock row
    # just then. And what hands a key to the first in line, where the lock row is as ``{condition}`` says: it returns
    # whether there was one, and how many wait; if he is still to be told, on which channel, and of what: his owner,
    # token and the end of the lease; and the ``server``. Where there is nobody the key is given back, or with
    # ``{if_taken}`` nothing is done. Neither returns a row when it was not done. ``{row_wait}`` is for how long, where
    # the engine can bound that, the lock row is waited for.
    queue = ""
    queue_row = ""
    hand_over = ""
    if_taken = ""
    # What wakes the process that listens on a channel, where telling is no part of a statement.
    wake = ""
    # What tells one server from another that has the same table, where there may be several: what one has committed
    # another may not know yet.
    server = ""
    # Whether a transaction that writes has the whole database to itself.
    one_writer = False

    def typed(self, parameter: str, of: str) -> str:
        """Return a parameter whose type the engine has to be told where rows are put together."""
        return parameter

    def after(self, parameter: str) -> str:
        """Return the moment that many microseconds from now."""
        raise NotImplementedError

    def after_column(self, column: str) -> str:
        """Return the moment that as many microseconds from now as the column has."""
        raise NotImplementedError

    def seconds_until(self, column: str) -> str:
        """Return the seconds from now until the moment in ``column``, as a float."""
        raise NotImplementedError

    def ticks_of(self, column: str) -> str:
        """Return the moment in ``column`` as microseconds since 1970."""
        raise NotImplementedError

    def later_than(self, column: str) -> str:
        """Return the earliest moment that is later than the one in ``column``."""
        raise NotImplementedError

    def next_version(self) -> str:
        """Return the next version: one more, or the clock where that is larger."""
        return f"{self.greatest}(version + 1, {self.ticks})"

    def token(self) -> str:
        """Return the next version, for a statement that writes and tells it."""
        return self.next_version()

    def update(self, table: str, assignments: str, where: str, primary: str = "key_resource") -> str:
        """Return the statement that locks the rows that are not locked by another transaction, and writes them."""
        raise NotImplementedError

    def update_these(self, table: str, assignments: str, ids: Iterable[str], where: str) -> str:
        """Return the statement that writes the rows of these ids, which are names of parameters, and waits for them."""
        return f"UPDATE {table} SET {assignments} WHERE id IN ({', '.join(f'%({id})s' for id in ids)}) AND {where}"

    def delete(self, table: str, where: str, primary: str = "key_resource") -> str:
        """Return the statement that deletes the rows that are not locked by another transaction."""
        raise NotImplementedError

    def compare_and_swap(self, table: str, assignments: str, where: str) -> str:
        """Return the cheapest statement, outside a transaction, that writes one row or at once does not."""
        return self.update(table, assignments, where)

    def write_or_leave(self, table: str, assignments: str, where: str) -> str:
        """
        Return the statement, inside a caller's transaction, that writes one row or at once does not.

        Where it does not the row is unlocked by it, or, where the engine ``locks_in_passing``, by its savepoint.
        """
        return self.update(table, assignments, where)

    def send(
        self, connection: BaseDatabaseWrapper, sql: str, parameters: Mapping[str, Any], *, through_a_pooler: bool
    ) -> Reply | None:
        """Execute a statement past Django's cursor, where nobody looks on; return None where it has to go by that."""
        return None

    def granted(self, reply: Reply) -> int | None:
        """Return the token that a granting statement wrote, or None when it wrote nothing."""
        return int(reply.rows[0][0]) if reply.rows else None

    def is_contention(self, error: DatabaseError) -> bool:
        """Tell whether the statement only lost against another one, so that it may be sent again."""
        raise NotImplementedError

    def is_locked(self, error: DatabaseError) -> bool:
        """Tell whether the statement was refused because another transaction has the row."""
        return False

    def is_out_of_step(self, error: Error) -> bool:
        """Tell whether the connection, not the statement, is in disorder, and nobody can use it any more."""
        return False

    def break_off(self, connection: BaseDatabaseWrapper) -> None:
        """Leave nothing under way, and no answer unread, of a statement outside a transaction that was interrupted."""

    def ends_transaction(self, error: DatabaseError) -> bool:
        """Tell whether the server has rolled back the whole transaction: what comes next would be in a new one."""
        return False


class PostgreSQL(Dialect):
    unless_brought_along = "ON CONFLICT (id) DO NOTHING"
    now = "clock_timestamp()"
    ticks = "(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000)::bigint"
    show_isolation = "SHOW transaction_isolation"
    keeps_locks = False
    # A row that was free for the snapshot and is not for the lock stays locked (EvalPlanQual).
    locks_in_passing = True
    read_committed = "current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')"

    # An insert that meets a row which an open transaction has written waits for that transaction, ON CONFLICT or not.
    at_once_term = " + 0 * length(set_config('lock_timeout', '50ms', true))"
    count_in = (
        ", waiters = waiters + (SELECT COUNT(*) FROM {claims} AS alone"
        " WHERE alone.key_resource = %(key)s AND alone.version IS NULL AND NOT alone.counted"
        " AND alone.end_time > {now})"
    )
    tell_first = (
        " RETURNING (SELECT pg_notify(channel, 'free ' || %(key)s) FROM (SELECT channel FROM {claims} AS first"
        " WHERE first.key_resource = %(key)s AND first.version IS NULL AND first.end_time > {now}"
        " AND right(channel, 1) NOT IN ('', '-') ORDER BY id LIMIT 1) AS told)"
    )
    # The lock row is waited for a moment, since others only count themselves in.
    queue = (
        "WITH bound AS MATERIALIZED (SELECT set_config('lock_timeout', '5ms', true),"
        " set_config('synchronous_commit', 'off', true)),"
        " head AS MATERIALIZED (SELECT key_resource, CASE WHEN {free_by_clock} THEN 1 ELSE 0 END AS free"
        " FROM bound, {locks} WHERE key_resource = %(key)s AND (owner NOT IN ({owners}) OR {free_by_clock})"
        " FOR UPDATE OF {locks}),"
        " mine AS (INSERT INTO {claims} ({columns}) {rows} ON CONFLICT DO NOTHING RETURNING owner, id),"
        " counted AS (UPDATE {locks} SET waiters = waiters + (SELECT COUNT(*) FROM mine) FROM head"
        " WHERE {locks}.key_resource = head.key_resource AND EXISTS (SELECT 1 FROM mine))"
        " SELECT owner, id, 0, {ticks} FROM mine"
    )
    queue_row = "SELECT {values} FROM head WHERE free = 0"
    hand_over = (
        "WITH bound AS MATERIALIZED (SELECT set_config('lock_timeout', '{row_wait}', true)),"
        " head AS MATERIALIZED (SELECT key_resource FROM bound, {locks} WHERE key_resource = %(key)s"
        " AND {condition} AND shares = 0 FOR UPDATE OF {locks}),"
        " first AS MATERIALIZED (SELECT id, shared FROM {claims} WHERE key_resource = (SELECT key_resource FROM head)"
        " AND version IS NULL AND end_time > {now} ORDER BY id LIMIT 1),"
        # It may have waited for the lock row, and who was first then may have left the line since.
        " taken AS (DELETE FROM {claims} WHERE id = (SELECT id FROM first WHERE NOT shared)"
        " AND version IS NULL AND end_time > {now}"
        " RETURNING owner, holder, owner_ip, scope, counted, patience, channel)"
        " UPDATE {locks} SET status = COALESCE(taken.scope, %(status)s), owner = COALESCE(taken.owner, {locks}.owner),"
        " holder = COALESCE(taken.holder, {locks}.holder),"
        " owner_ip = CASE WHEN taken.owner IS NULL THEN {locks}.owner_ip ELSE taken.owner_ip END,"
        " begin_time = CASE WHEN taken.owner IS NULL THEN begin_time ELSE {now} END,"
        " end_time = {now} + COALESCE(taken.patience, 0) * interval '1 microsecond',"
        " hold_count = CASE WHEN taken.owner IS NULL THEN 0 ELSE 1 END,"
        " version = CASE WHEN taken.owner IS NULL THEN version ELSE {next_version} END,"
        " waiters = GREATEST(waiters - CASE WHEN taken.counted THEN 1 ELSE 0 END, 0)"
        " FROM head LEFT JOIN taken ON TRUE WHERE {locks}.key_resource = head.key_resource{if_taken}"
        " RETURNING taken.owner IS NOT NULL, waiters, CASE WHEN left(channel, 9) = %(near)s THEN channel END,"
        " taken.owner, CASE WHEN taken.scope = 'P' THEN version END, {ends}, '',"
        " CASE WHEN right(channel, 1) NOT IN ('', '-') AND left(channel, 9) <> %(near)s THEN"
        " pg_notify(channel, taken.owner"
        " || CASE WHEN taken.scope = 'P' THEN ' ' || version || ' ' || {ends} ELSE '' END) END"
    )
    forgettable = " RETURNING set_config('synchronous_commit', 'off', true)"
    if_taken = " AND taken.owner IS NOT NULL"
    bound = "set_config('idle_in_transaction_session_timeout', '2000', true), set_config('lock_timeout', '1s', true)"

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

    def update(self, table: str, assignments: str, where: str, primary: str = "key_resource") -> str:
        return f"UPDATE {table} SET {assignments} WHERE {self._picked(table, where, primary)}"

    def delete(self, table: str, where: str, primary: str = "key_resource") -> str:
        return f"DELETE FROM {table} WHERE {self._picked(table, where, primary)}"

    def _picked(self, table: str, where: str, primary: str) -> str:
        # An array keeps the plan on the primary key, for one row and for many.
        return f"{primary} = ANY (ARRAY(SELECT {primary} FROM {table} WHERE {where} FOR UPDATE SKIP LOCKED))"

    def send(
        self, connection: BaseDatabaseWrapper, sql: str, parameters: Mapping[str, Any], *, through_a_pooler: bool
    ) -> Reply | None:
        statements = PreparedStatements.of(connection, through_a_pooler=through_a_pooler)
        if statements is None:
            return None
        try:
            return statements.execute(sql, parameters)
        except NotPreparedError:
            return None

    def is_contention(self, error: DatabaseError) -> bool:
        # serialization_failure, deadlock_detected
        return getattr(error.__cause__, "sqlstate", None) in {"40001", "40P01"}

    def is_locked(self, error: DatabaseError) -> bool:
        # lock_not_available
        return getattr(error.__cause__, "sqlstate", None) == "55P03"

    def break_off(self, connection: BaseDatabaseWrapper) -> None:
        if is_under_way(connection.connection):
            try:
                end_interrupted(connection.connection)
            finally:
                # So that the next statement connects anew.
                connection.close()


class MySQL(Dialect):
    """
    MySQL and MariaDB on InnoDB.

    UTC_TIMESTAMP, since NOW() is in the session's zone. The row is addressed by a range rather than by ``=``: a
    const look-up locks the row before the rest of WHERE is judged and keeps it locked when that fails, so a waiter
    in a transaction would keep the real holder out (MariaDB 10.11); at READ COMMITTED a range unlocks what does
    not match.
    """

    now = "UTC_TIMESTAMP(6)"
    ticks = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    show_isolation = "SELECT @@transaction_isolation"
    read_committed = "@@transaction_isolation = 'READ-COMMITTED'"
    # A duplicate changes nothing and raises nothing. Its row count says 1 under Django's FOUND_ROWS: never read it.
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
        # LAST_INSERT_ID(value) comes back in the reply to the statement itself.
        return f"LAST_INSERT_ID({self.next_version()})"

    def update(self, table: str, assignments: str, where: str, primary: str = "key_resource") -> str:
        return f"UPDATE {self._picked(table, where, primary)} SET {assignments}"

    def update_these(self, table: str, assignments: str, ids: Iterable[str], where: str) -> str:
        # Joined: for a list in WHERE a small table is read from end to end, and every locked row of it is waited for.
        picks = " UNION ALL ".join(f"SELECT %({id})s AS picked" for id in ids)
        return f"UPDATE ({picks}) AS picks {self._joined(table, 'id')} SET {assignments} WHERE {where}"

    def delete(self, table: str, where: str, primary: str = "key_resource") -> str:
        return f"DELETE {table} FROM {self._picked(table, where, primary)}"

    def _picked(self, table: str, where: str, primary: str) -> str:
        # LIMIT keeps the subquery from being merged, which would change the table that it reads.
        where = where.replace(KEY, AS_A_RANGE)
        index = " FORCE INDEX (PRIMARY)" if primary == "key_resource" else ""
        return (
            f"(SELECT {primary} AS picked FROM {table}{index} WHERE {where} LIMIT 1000000"
            f" FOR UPDATE SKIP LOCKED) AS picks {self._joined(table, primary)}"
        )

    def _joined(self, table: str, primary: str) -> str:
        return f"STRAIGHT_JOIN {table} FORCE INDEX (PRIMARY) ON {primary} = picked"

    # A short transaction sent as one packet: a client that is stopped in the middle of it cannot keep the key. An
    # UPDATE of joined tables would write them by way of a temporary one, at five times the cost.
    queue = (
        "START TRANSACTION;"
        " SELECT COUNT(*) INTO @dlocks_done FROM {locks} FORCE INDEX (PRIMARY) WHERE key_resource >= %(key)s"
        " AND key_resource <= %(key)s AND NOT {free_by_clock} AND owner NOT IN ({owners}) FOR UPDATE SKIP LOCKED;"
        " INSERT IGNORE INTO {claims} ({columns}) {rows};"
        # In a variable, which a log of statements has the value of.
        " SET @dlocks_count = ROW_COUNT();"
        " UPDATE {locks} SET waiters = waiters + @dlocks_count WHERE key_resource = %(key)s AND @dlocks_done = 1;"
        " COMMIT;"
        # No row where the turn of one of them has come meanwhile, and no other is there.
        " SELECT mine.owner, mine.id, head.free, {ticks}"
        " FROM (SELECT owner, CASE WHEN {free_by_clock} THEN 1 ELSE 0 END AS free FROM {locks}"
        " WHERE key_resource = %(key)s) AS head LEFT JOIN {claims} AS mine ON mine.owner IN ({owners})"
        " WHERE mine.id IS NOT NULL OR head.owner NOT IN ({owners})"
    )
    queue_row = "SELECT {values} FROM DUAL WHERE @dlocks_done = 1"
    hand_over = (
        "START TRANSACTION;"
        " SELECT COUNT(*), MAX(waiters), MAX({next_version}) INTO @dlocks_done, @dlocks_waiters, @dlocks_version"
        " FROM {locks} FORCE INDEX (PRIMARY) WHERE key_resource >= %(key)s AND key_resource <= %(key)s"
        " AND {condition} AND shares = 0 FOR UPDATE SKIP LOCKED;"
        # Of aggregates, so that they are NULL where there is none.
        " SELECT MAX(id), MAX(owner), MAX(holder), MAX(owner_ip), MAX(scope), MAX(channel), MAX(patience),"
        " IF(MAX(counted), GREATEST(@dlocks_waiters, 1) - 1, @dlocks_waiters)"
        " INTO @dlocks_id, @dlocks_owner, @dlocks_holder, @dlocks_ip, @dlocks_scope, @dlocks_channel, @dlocks_patience,"
        " @dlocks_waiters FROM {claims} WHERE @dlocks_done = 1 AND NOT shared AND id = (SELECT"
        " MIN(first.id) FROM {claims} AS first WHERE first.key_resource = %(key)s AND first.version IS NULL"
        " AND first.end_time > {now}) AND version IS NULL AND end_time > {now} FOR UPDATE NOWAIT;"
        " DELETE FROM {claims} WHERE id = @dlocks_id;"
        # What is written is told as well.
        " SET @dlocks_end = {now} + INTERVAL COALESCE(@dlocks_patience, 0) MICROSECOND;"
        " UPDATE {locks} SET status = COALESCE(@dlocks_scope, %(status)s), owner = COALESCE(@dlocks_owner, owner),"
        " holder = COALESCE(@dlocks_holder, holder),"
        " owner_ip = IF(@dlocks_id IS NULL, owner_ip, @dlocks_ip),"
        " begin_time = IF(@dlocks_id IS NULL, begin_time, {now}),"
        " end_time = @dlocks_end,"
        " hold_count = IF(@dlocks_id IS NULL, 0, 1),"
        " version = IF(@dlocks_id IS NULL, version, @dlocks_version),"
        " waiters = @dlocks_waiters"
        " WHERE key_resource = %(key)s AND @dlocks_done = 1{if_taken};"
        " COMMIT;"
        # What is put together by the server costs more than what is put together here.
        " SELECT @dlocks_id IS NOT NULL, @dlocks_waiters, @dlocks_channel, @dlocks_owner,"
        " IF(@dlocks_scope = 'P', @dlocks_version, NULL), TIMESTAMPDIFF(MICROSECOND, '1970-01-01', @dlocks_end),"
        " {server} FROM DUAL WHERE @dlocks_done = 1{if_taken}"
    )
    if_taken = " AND @dlocks_id IS NOT NULL"
    server = "CONCAT_WS(' ', @@hostname, @@port, @@datadir)"
    # A process that waits sleeps in the server, in the session that has the named lock which is its channel: so the
    # one that is interrupted is that session and never another, and error 1094 or 3057 says that there is none.
    wake = "KILL QUERY IS_USED_LOCK(%(channel)s)"

    # It cannot bound for how long a lock is waited for by one statement.
    for_update_patiently = " FOR UPDATE NOWAIT"

    def is_locked(self, error: DatabaseError) -> bool:
        # lock wait timeout, not locked at once
        return bool(error.args) and error.args[0] in {1205, 3572}

    def send(
        self, connection: BaseDatabaseWrapper, sql: str, parameters: Mapping[str, Any], *, through_a_pooler: bool
    ) -> Reply | None:
        return by_mysqlclient(connection.connection, sql, parameters)

    def granted(self, reply: Reply) -> int | None:
        return reply.last_id if reply.changed else None

    def is_contention(self, error: DatabaseError) -> bool:
        # lock wait timeout, record changed since the snapshot, not locked at once
        return self.ends_transaction(error) or (bool(error.args) and error.args[0] in {1205, 1020, 3572})

    def is_out_of_step(self, error: Error) -> bool:
        # commands out of sync: somebody was interrupted before he had read an answer
        return error.args[:1] == (2014,)

    def break_off(self, connection: BaseDatabaseWrapper) -> None:
        # With mysqlclient perhaps before the answer was read: the next statement would find it.
        connection.close()

    def ends_transaction(self, error: DatabaseError) -> bool:
        # deadlock, and, from a node of a Galera cluster where another one's commit came first, error during commit
        return bool(error.args) and error.args[0] in {1213, 1180}


def _compound(statements: str) -> str:
    """Return statements as one: the server reads and answers it once, and takes a seventh less time for all of it."""
    return f"BEGIN NOT ATOMIC {statements}; END"


class MariaDB(MySQL):
    for_update_in_turn = for_update_patiently = " FOR UPDATE WAIT 1"
    patiently = "SET STATEMENT innodb_lock_wait_timeout = 1 FOR "
    show_isolation = "SELECT @@tx_isolation, @@innodb_rollback_on_timeout"
    read_committed = "@@tx_isolation = 'READ-COMMITTED' AND @@innodb_rollback_on_timeout = 0"
    fails_alone = True
    at_once = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR "
    queue = _compound(MySQL.queue)
    # There is no NOWAIT in a compound statement. Where the first in line is locked, a step follows that waits for him.
    hand_over = _compound(MySQL.hand_over.replace("NOWAIT", "SKIP LOCKED"))

    def compare_and_swap(self, table: str, assignments: str, where: str) -> str:
        # Half the cost of the locking subquery; a locked row is error 1205. By the key in any case: who reads a small
        # table from end to end meets the rows of others.
        return f"{self.at_once}UPDATE {table} FORCE INDEX (PRIMARY) SET {assignments} WHERE {where}"

    def write_or_leave(self, table: str, assignments: str, where: str) -> str:
        # SKIP LOCKED stands in line for the row before it gives up. If the row is unlocked in that moment the lock is
        # its own, and stays for as long as the transaction, though the row is not wanted (10.11, row_search_mvcc).
        return self.compare_and_swap(table, assignments, where.replace(KEY, AS_A_RANGE))


class SQLite(Dialect):
    """
    SQLite: one writer, so a statement that writes has the whole database to itself.

    Its clock ticks in milliseconds. strftime with ``now``, not unixepoch('subsec'), which is NULL before 3.42.
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
        return f"(CAST((julianday({column}) - 2440587.5) * 86400000 + 0.5 AS INTEGER) * 1000)"

    def later_than(self, column: str) -> str:
        return f"(strftime('%%Y-%%m-%%d %%H:%%M:%%f', {column}, '+0.001 seconds') || '000')"

    def update(self, table: str, assignments: str, where: str, primary: str = "key_resource") -> str:
        return f"UPDATE {table} SET {assignments} WHERE {where}"

    def delete(self, table: str, where: str, primary: str = "key_resource") -> str:
        return f"DELETE FROM {table} WHERE {where}"

    def send(
        self, connection: BaseDatabaseWrapper, sql: str, parameters: Mapping[str, Any], *, through_a_pooler: bool
    ) -> Reply | None:
        return by_sqlite3(connection.connection, sql, parameters)

    def is_contention(self, error: DatabaseError) -> bool:
        return "is locked" in str(error)

    def is_locked(self, error: DatabaseError) -> bool:
        return "is locked" in str(error)


def dialect_of(connection: BaseDatabaseWrapper) -> Dialect:
    """Return the dialect that a Django connection speaks."""
    vendor = connection.vendor
    if vendor == "mysql" and getattr(connection, "mysql_is_mariadb", False):
        vendor = "mariadb"
    try:
        return _DIALECTS[vendor]
    except KeyError:
        raise ImproperlyConfigured(
            f"dlocks has no database backend for {connection.vendor!r}: use PostgreSQL, MariaDB, MySQL or SQLite"
        ) from None


_DIALECTS: dict[str, Dialect] = {
    "postgresql": PostgreSQL(),
    "mysql": MySQL(),
    "mariadb": MariaDB(),
    "sqlite": SQLite(),
}


def refuse_lost(connection: BaseDatabaseWrapper) -> None:
    """Raise LockBackendError where autocommit is off for no other reason than that the connection was lost."""
    # Elsewhere it is a matter of the client alone.
    if connection.vendor == "mysql" and connection.connection is not None and not connection.is_usable():
        raise LockBackendError(
            f"The connection to database {connection.alias!r} was lost on the way out of a transaction. Close it, as"
            " Django does at the end of a request: 'connection.close()'."
        )
