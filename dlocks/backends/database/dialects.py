"""
The SQL in which the engines differ: their clock, and how a row is changed without waiting for its lock.

Parameters are named, since the engines want them in different orders. ``{after}`` fragments take microseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured

if TYPE_CHECKING:
    from django.db import DatabaseError
    from django.db.backends.base.base import BaseDatabaseWrapper

KEY = "key_resource = %(key)s"


class Dialect:
    """One engine. ``table`` is quoted already; ``where`` names its rows by columns without a table."""

    # The database's clock: the moment itself, not the start of the transaction.
    now: str
    # Microseconds since 1970 by that clock.
    ticks: str
    # The larger of two values.
    greatest = "GREATEST"
    # The statement that tells the isolation level, without taking a snapshot by it, and the test for WHERE that one is
    # taken for each statement.
    show_isolation = ""
    read_committed: str | None = None
    # Whether a row that a locking statement met and did not want may stay locked until the transaction ends.
    locks_in_passing = False
    # How a row is inserted when it may be there already: the words before INTO and at the end.
    insert_or_ignore = ("INSERT", "ON CONFLICT DO NOTHING")
    returning = " RETURNING version"
    # How an insert, outside a transaction, is kept from waiting for a transaction that has the row it finds there:
    # words before it, and a term that adds nothing to a number in it.
    at_once = ""
    at_once_term = ""

    def after(self, parameter: str) -> str:
        """Return the moment that many microseconds from now."""
        raise NotImplementedError

    def seconds_until(self, column: str) -> str:
        """Return the seconds from now until the moment in ``column``, as a float."""
        raise NotImplementedError

    def token(self) -> str:
        """Return the next version: one more, or the clock where that is larger."""
        return f"{self.greatest}(version + 1, {self.ticks})"

    def update(self, table: str, assignments: str, where: str) -> str:
        """Return the statement that locks the rows that are not locked by another transaction, and writes them."""
        raise NotImplementedError

    def delete(self, table: str, where: str) -> str:
        """Return the statement that deletes the rows that are not locked by another transaction."""
        raise NotImplementedError

    def compare_and_swap(self, table: str, assignments: str, where: str) -> str:
        """Return the cheapest statement, outside a transaction, that writes one row or at once does not."""
        return self.update(table, assignments, where)

    def granted(self, cursor: Any) -> int | None:
        """Return the token that a granting statement wrote, or None when it wrote nothing."""
        # All rows: a statement that is not finished keeps SQLite's write lock.
        rows = cursor.fetchall()
        return int(rows[0][0]) if rows else None

    def is_contention(self, error: DatabaseError) -> bool:
        """Tell whether the statement only lost against another one, so that it may be sent again."""
        raise NotImplementedError

    def is_locked(self, error: DatabaseError) -> bool:
        """Tell whether the statement was refused because another transaction has the row."""
        return False


class PostgreSQL(Dialect):
    now = "clock_timestamp()"
    ticks = "(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000)::bigint"
    show_isolation = "SHOW transaction_isolation"
    # A row that was free for the snapshot and is not for the lock stays locked (EvalPlanQual).
    locks_in_passing = True
    read_committed = "current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')"

    # An insert that meets a row which an open transaction has written waits for that transaction, ON CONFLICT or not.
    at_once_term = " + 0 * length(set_config('lock_timeout', '50ms', true))"

    def after(self, parameter: str) -> str:
        return f"(clock_timestamp() + %({parameter})s * interval '1 microsecond')"

    def seconds_until(self, column: str) -> str:
        return f"EXTRACT(EPOCH FROM {column} - clock_timestamp())::double precision"

    def update(self, table: str, assignments: str, where: str) -> str:
        return f"UPDATE {table} SET {assignments} WHERE {self._picked(table, where)}"

    def delete(self, table: str, where: str) -> str:
        return f"DELETE FROM {table} WHERE {self._picked(table, where)}"

    def _picked(self, table: str, where: str) -> str:
        # An array keeps the plan on the primary key, for one row and for many.
        return f"key_resource = ANY (ARRAY(SELECT key_resource FROM {table} WHERE {where} FOR UPDATE SKIP LOCKED))"

    def is_contention(self, error: DatabaseError) -> bool:
        # serialization_failure, deadlock_detected
        return getattr(error.__cause__, "sqlstate", None) in {"40001", "40P01"}

    def is_locked(self, error: DatabaseError) -> bool:
        # lock_not_available
        return getattr(error.__cause__, "sqlstate", None) == "55P03"


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

    def seconds_until(self, column: str) -> str:
        return f"TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), {column}) / 1e6"

    def token(self) -> str:
        # LAST_INSERT_ID(value) comes back in the reply to the statement itself.
        return f"LAST_INSERT_ID({super().token()})"

    def update(self, table: str, assignments: str, where: str) -> str:
        return f"UPDATE {self._picked(table, where)} SET {assignments}"

    def delete(self, table: str, where: str) -> str:
        return f"DELETE {table} FROM {self._picked(table, where)}"

    def _picked(self, table: str, where: str) -> str:
        # LIMIT keeps the subquery from being merged, which would change the table that it reads.
        where = where.replace(KEY, "key_resource >= %(key)s AND key_resource <= %(key)s")
        return (
            f"(SELECT key_resource AS picked FROM {table} FORCE INDEX (PRIMARY) WHERE {where} LIMIT 1000000"
            f" FOR UPDATE SKIP LOCKED) AS picks STRAIGHT_JOIN {table} FORCE INDEX (PRIMARY) ON key_resource = picked"
        )

    def granted(self, cursor: Any) -> int | None:
        return int(cursor.lastrowid) if cursor.rowcount else None

    def is_contention(self, error: DatabaseError) -> bool:
        # lock wait timeout, deadlock, record changed since the snapshot, not locked at once
        return bool(error.args) and error.args[0] in {1205, 1213, 1020, 3572}


class MariaDB(MySQL):
    show_isolation = "SELECT @@tx_isolation"
    read_committed = "@@tx_isolation = 'READ-COMMITTED'"
    at_once = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR "

    def compare_and_swap(self, table: str, assignments: str, where: str) -> str:
        # Half the cost of the locking subquery; a locked row is error 1205.
        return f"{self.at_once}UPDATE {table} SET {assignments} WHERE {where}"

    def is_locked(self, error: DatabaseError) -> bool:
        return bool(error.args) and error.args[0] == 1205


class SQLite(Dialect):
    """
    SQLite: one writer, so a statement that writes has the whole database to itself.

    Its clock ticks in milliseconds. strftime with ``now``, not unixepoch('subsec'), which is NULL before 3.42.
    """

    now = "(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now') || '000')"
    ticks = "(CAST((julianday('now') - 2440587.5) * 86400000 + 0.5 AS INTEGER) * 1000)"
    greatest = "MAX"

    def after(self, parameter: str) -> str:
        offset = f"printf('%%+.3f seconds', %({parameter})s / 1e6)"
        return f"(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', {offset}) || '000')"

    def seconds_until(self, column: str) -> str:
        return f"((julianday({column}) - julianday('now')) * 86400.0)"

    def update(self, table: str, assignments: str, where: str) -> str:
        return f"UPDATE {table} SET {assignments} WHERE {where}"

    def delete(self, table: str, where: str) -> str:
        return f"DELETE FROM {table} WHERE {where}"

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
