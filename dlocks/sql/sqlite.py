"""The SQL and the errors of SQLite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from django.db import DatabaseError

from dlocks.sql.dialect import Dialect
from dlocks.sql.direct import Reply, by_sqlite3

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


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
