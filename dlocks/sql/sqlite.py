"""The SQL and the errors of SQLite."""

from __future__ import annotations

from dlocks.sql.dialect import Dialect
from dlocks.sql.direct import by_sqlite3


class SQLite(Dialect):
    """The SQL of SQLite, where a writing statement has the database to itself.

    Its clock has a resolution of milliseconds. It is read by strftime with ``now``,
    since unixepoch('subsec') is NULL before 3.42.
    """

    now = "(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now') || '000')"
    ticks = "(CAST((julianday('now') - 2440587.5) * 86400000 + 0.5 AS INTEGER) * 1000)"
    microseconds_from_now = (
        "(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%+.3f seconds', {} /"
        " 1e6)) || '000')"
    )
    seconds_until_time = "((julianday({}) - julianday('now')) * 86400.0)"
    microseconds_since_1970 = (
        "(CAST((julianday({}) - 2440587.5) * 86400000 + 0.5 AS INTEGER) * 1000)"
    )
    next_time = "(strftime('%%Y-%%m-%%d %%H:%%M:%%f', {}, '+0.001 seconds') || '000')"
    lost_race = locked = frozenset({"locked"})
    denied = frozenset({"readonly"})
    greatest = "MAX"
    for_update = for_update_in_turn = for_update_patiently = ""
    one_writer = True
    by_driver = staticmethod(by_sqlite3)

    def code_of(self, error: BaseException) -> object:
        # sqlite3 has error codes only since Python 3.11.
        said = str(error)
        if "is locked" in said:
            return "locked"
        return "readonly" if "readonly database" in said else None
