"""The SQL and the errors that MySQL and MariaDB share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dlocks.sql.dialect import KEY, Dialect, escape_unencodable
from dlocks.sql.direct import Reply, by_mysqlclient

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

AS_A_RANGE = "key_resource >= %(key)s AND key_resource <= %(key)s"
# States of a session in the process list of MySQL and MariaDB.
_WAITS_FOR_TABLE = re.compile(
    "Waiting for (table metadata|table level|global read|backup|commit) lock"
)


class InnoDB(Dialect):
    """The SQL of MySQL and MariaDB on InnoDB.

    UTC_TIMESTAMP is used, since NOW() is in the session's time zone. The row is
    addressed by a range rather than by ``=``. A const lookup locks the row before it
    evaluates the rest of WHERE, and keeps it locked if that fails. So a waiter in a
    transaction would keep the real holder out (MariaDB 10.11). At READ COMMITTED, a
    range scan unlocks rows that do not match.
    """

    now = "UTC_TIMESTAMP(6)"
    ticks = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    microseconds_from_now = "(UTC_TIMESTAMP(6) + INTERVAL {} MICROSECOND)"
    seconds_until_time = "TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), {}) / 1e6"
    microseconds_since_1970 = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {})"
    next_time = "({} + INTERVAL 1 MICROSECOND)"
    # 1213 is a deadlock. 1180 is an error during commit, from a node of a Galera
    # cluster if another node has committed first. 1020 is a row that changed since the
    # snapshot. MariaDB 11.6 and newer roll back the transaction then.
    rolled_back = frozenset({1213, 1180, 1020})
    # lock wait timeout, not locked at once
    locked = frozenset({1205, 3572})
    lost_race = rolled_back | locked
    # read_only of the server, of InnoDB, of the session
    read_only = frozenset({1290, 1836, 1792})
    # commands out of sync: an interrupt came before a reply was read
    desynchronised = frozenset({2014})
    # query interrupted
    cancelled = frozenset({1317})
    read_only_settings = (
        "read_only or transaction_read_only is on, as it is on a replica"
    )
    # A duplicate changes nothing and raises nothing. Never read its row count, which is
    # 1 under Django's FOUND_ROWS.
    insert_or_ignore = ("INSERT", "ON DUPLICATE KEY UPDATE hold_count = hold_count")
    returning = ""
    # A short transaction, sent as one packet. A client that is stopped in the middle of
    # it cannot keep the key. An UPDATE of joined tables would use a temporary table, at
    # five times the cost.
    queue = (
        "START TRANSACTION;"
        " SELECT COUNT(*) INTO @dlocks_done FROM {locks} FORCE INDEX (PRIMARY) WHERE"
        " key_resource >= %(key)s"
        " AND key_resource <= %(key)s AND NOT {free_by_clock} AND owner <>"
        " %(owner)s FOR UPDATE SKIP LOCKED;"
        " INSERT IGNORE INTO {claims} ({columns}) SELECT {values} FROM DUAL WHERE"
        " @dlocks_done = 1;"
        # It is in a variable, since a log of statements contains the value of a
        # variable.
        " SET @dlocks_count = ROW_COUNT();"
        " UPDATE {locks} SET waiters = waiters + @dlocks_count WHERE key_resource ="
        " %(key)s AND @dlocks_done = 1;"
        " COMMIT;"
        # No row is returned if the turn of the claim has come in the meantime.
        " SELECT mine.id, head.free"
        " FROM (SELECT owner, CASE WHEN {free_by_clock} THEN 1 ELSE 0 END AS free FROM"
        " {locks}"
        " WHERE key_resource = %(key)s) AS head LEFT JOIN {claims} AS mine ON"
        " mine.owner = %(owner)s"
        " WHERE mine.id IS NOT NULL OR head.owner <> %(owner)s"
    )
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
        " UPDATE {locks} SET status = COALESCE(@dlocks_scope, %(status)s), owner ="
        " COALESCE(@dlocks_owner, owner),"
        " holder = COALESCE(@dlocks_holder, holder),"
        " owner_ip = IF(@dlocks_id IS NULL, owner_ip, @dlocks_ip),"
        " begin_time = IF(@dlocks_id IS NULL, begin_time, {now}),"
        " end_time = {now} + INTERVAL COALESCE(@dlocks_handover_ttl, 0) MICROSECOND,"
        " hold_count = IF(@dlocks_id IS NULL, 0, 1),"
        " version = IF(@dlocks_id IS NULL, version, @dlocks_version),"
        " waiters = @dlocks_waiters"
        " WHERE key_resource = %(key)s AND @dlocks_done = 1{if_taken};"
        " COMMIT;"
        " SELECT @dlocks_id IS NOT NULL, @dlocks_waiters, @dlocks_channel,"
        " @dlocks_owner, IF(@dlocks_scope = 'P', @dlocks_version, NULL),"
        " @dlocks_handover_ttl, {server} FROM DUAL WHERE @dlocks_done = 1{if_taken}"
    )
    by_driver = staticmethod(by_mysqlclient)
    if_taken = " AND @dlocks_id IS NOT NULL"
    server = "CONCAT_WS(' ', @@hostname, @@port, @@datadir)"
    # The server cannot notify a session.
    commit_notifies = False

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

    def _joined(self, table: str, primary: str) -> str:
        return f"STRAIGHT_JOIN {table} FORCE INDEX (PRIMARY) ON {primary} = picked"

    def fitted(self, text: str, raw: Any) -> str:
        # The columns are in utf8mb4, whatever the database's character set. The session
        # has a character set of its own.
        charset = raw.character_set_name()
        if charset == "utf8mb4":
            return text
        if charset in {"utf8", "utf8mb3"}:
            return re.sub(
                "[^\0-\uffff]",
                lambda found: escape_unencodable(found[0], "ascii"),
                text,
            )
        return escape_unencodable(text, charset)

    def code_of(self, error: BaseException) -> object:
        return error.args[0] if error.args else None

    def granted(self, reply: Reply) -> int | None:
        return reply.last_id if reply.changed else None

    def session_of(self, raw: Any) -> Any:
        # mysqlclient refuses calls from another thread while a statement is running.
        return raw.thread_id()

    def waits_for_table(
        self, other: BaseDatabaseWrapper, session: Any, tables: Sequence[str]
    ) -> bool:
        with other.cursor() as cursor:
            cursor.execute("SHOW FULL PROCESSLIST")
            for number, *_, state, info in (row[:8] for row in cursor.fetchall()):
                # Behind a proxy the number may be that of another session. So the text
                # has to name the table too.
                if number == session and _WAITS_FOR_TABLE.match(state or ""):
                    return any(table in (info or "") for table in tables)
        return False

    def cancel(self, other: BaseDatabaseWrapper, session: Any) -> None:
        with other.cursor() as cursor:
            cursor.execute("KILL QUERY %s", [session])

    def abort_statement(self, connection: BaseDatabaseWrapper) -> None:
        # With mysqlclient, the reply may still be unread. The next statement would read
        # it.
        connection.close()
