"""The SQL and the errors that MySQL and MariaDB share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from dlocks.sql.dialect import KEY, Dialect, escape_unencodable, statement
from dlocks.sql.direct import Reply, by_mysqlclient

_NOT_UTF8MB3 = re.compile("[^\0-\uffff]")
AS_A_RANGE = "key_resource >= %(key)s AND key_resource <= %(key)s"
# States of a session in the process list of MySQL and MariaDB.
_WAITS_FOR_TABLE = re.compile(
    "Waiting for (table metadata|table level|global read|backup|commit) lock"
)


def limit_idle(*names: str) -> tuple[str, str]:
    """Return statements that set these variables to 2 seconds, and back."""
    limit = (f"@dlocks_{name} = @@SESSION.{name}, SESSION {name} = 2" for name in names)
    back = (f"SESSION {name} = @dlocks_{name}" for name in names)
    return f"SET {', '.join(limit)}", f"SET {', '.join(back)}"


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
    locked = frozenset({1205, 3572})  # lock wait timeout, not locked at once
    lost_race = rolled_back | locked
    read_only = frozenset({1290, 1836, 1792})  # of the server, of InnoDB, the session
    denied = frozenset({1044, 1142, 1143})  # to a database, a table, a column
    # commands out of sync: an interrupt came before a reply was read
    desynchronised = frozenset({2014})
    cancelled = frozenset({1317})  # query interrupted
    read_only_settings = (
        "read_only or transaction_read_only is on, as it is on a replica"
    )
    # A duplicate changes nothing and raises nothing. Never read its row count, which is
    # 1 under Django's FOUND_ROWS.
    insert_or_ignore = ("INSERT", "ON DUPLICATE KEY UPDATE hold_count = hold_count")
    returning = ""
    queue = statement("innodb_queue")
    hand_over = statement("innodb_hand_over")
    by_driver = staticmethod(by_mysqlclient)
    if_taken = " AND @dlocks_id IS NOT NULL"
    server = "CONCAT_WS(' ', @@hostname, @@port, @@datadir)"
    # The server cannot notify a session.
    commit_notifies = False
    # How long a session may be idle within a step. MySQL cannot limit transactions.
    idle_limit, no_idle_limit = limit_idle("wait_timeout")

    def token(self) -> str:
        # The reply to the statement itself contains LAST_INSERT_ID(value).
        return f"LAST_INSERT_ID({self.next_version()})"

    def update(
        self, table: str, assignments: str, where: str, primary: str = "key_resource"
    ) -> str:
        picked = self._picked(table, where, primary)
        return f"{self.unsafely}UPDATE {picked} SET {assignments}"

    def delete(self, table: str, where: str, primary: str = "key_resource") -> str:
        picked = self._picked(table, where, primary)
        return f"{self.unsafely}DELETE {table} FROM {picked}"

    def write_or_leave(self, table: str, assignments: str, where: str) -> str:
        # SKIP LOCKED of MariaDB queues for the row before it gives up. If the row is
        # unlocked at that moment, the statement gets the lock. It then keeps the lock
        # until the transaction ends, even if the row does not match (10.11,
        # row_search_mvcc).
        return self.compare_and_swap(table, assignments, where.replace(KEY, AS_A_RANGE))

    def _picked(self, table: str, where: str, primary: str) -> str:
        # LIMIT keeps the subquery from being merged. A merged statement would write the
        # table that it reads.
        where = where.replace(KEY, AS_A_RANGE)
        index = " FORCE INDEX (PRIMARY)" if primary == "key_resource" else ""
        return (
            f"(SELECT {primary} AS picked FROM {table}{index} WHERE {where} LIMIT"
            f" 1000000 FOR UPDATE SKIP LOCKED) AS picks STRAIGHT_JOIN {table} FORCE"
            f" INDEX (PRIMARY) ON {primary} = picked"
        )

    def fitted(self, text: str, raw: Any) -> str:
        # The columns are in utf8mb4, whatever the database's character set. The session
        # has a character set of its own.
        charset = raw.character_set_name()
        if charset in {"utf8", "utf8mb3"}:
            return _NOT_UTF8MB3.sub(lambda x: escape_unencodable(x[0], "ascii"), text)
        return text if charset == "utf8mb4" else escape_unencodable(text, charset)

    def code_of(self, error: BaseException) -> object:
        return error.args[0] if error.args else None

    def granted(self, reply: Reply) -> int | None:
        return reply.last_id if reply.changed else None

    @contextmanager
    def with_idle_limit(self, connection: Any) -> Iterator[None]:
        connection.ensure_connection()
        raw = connection.connection
        cursor = raw.cursor()
        try:
            with connection.wrap_database_errors:
                cursor.execute(self.idle_limit)
            yield
        finally:
            if connection.connection is raw:
                try:
                    cursor.execute(self.no_idle_limit)
                except connection.Database.Error:
                    # The server may have ended the session.
                    connection.close()

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
                if number != session or not _WAITS_FOR_TABLE.match(state or ""):
                    continue
                return any(table in (info or "") for table in tables)
        return False

    def cancel(self, other: BaseDatabaseWrapper, session: Any) -> None:
        with other.cursor() as cursor:
            cursor.execute("KILL QUERY %s", [session])

    def abort_statement(self, connection: BaseDatabaseWrapper) -> None:
        # With mysqlclient, the reply may still be unread. The next statement would read
        # it.
        connection.close()
