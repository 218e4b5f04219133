"""The tables of the benchmarks, and their rows."""

from __future__ import annotations

from collections.abc import Mapping

from django.core.management import call_command
from django.db import connections

from benchmarks.contenders import TABLE

_NUMBERS = {
    # The source of the numbers from {first} to {last}, and the key for a number.
    "postgresql": ("generate_series({first}, {last}) AS number", "'key-' || number"),
    "mariadb": ("seq_{first}_to_{last}", "CONCAT('key-', seq)"),
    "mysql": ("numbers", "CONCAT('key-', number)"),
    "sqlite": ("numbers", "'key-' || number"),
}
_EPOCH = {
    "postgresql": "timestamptz '2020-01-01'",
    "mariadb": "'2020-01-01'",
    "mysql": "'2020-01-01'",
    "sqlite": "'2020-01-01 00:00:00.000000'",
}


def create(databases: list[str], ports: Mapping[str, int]) -> None:
    """Create the tables, with the rows that every contender needs."""
    for database in databases:
        engine = database.partition("-")[0]
        if engine in {"mariadb", "mysql"}:
            import MySQLdb

            MySQLdb.connect(host="127.0.0.1", port=ports[database], user="root").query(
                "CREATE DATABASE dlocks CHARACTER SET utf8mb4"
            )
        for app in ("dlocks", "db_mutex"):
            call_command("migrate", app, database=database, verbosity=0)
        moment, options = {
            "postgresql": ("timestamptz", " WITH (fillfactor = 50)"),
            "mariadb": ("datetime(6)", ""),
            "mysql": ("datetime(6)", ""),
            "sqlite": ("text", ""),
        }[engine]
        with connections[database].cursor() as cursor:
            cursor.execute(
                f"CREATE TABLE {TABLE} (name varchar(255) PRIMARY KEY, version bigint"
                f" NOT NULL, owner varchar(64) NOT NULL, end_time {moment} NOT"
                f" NULL){options}"
            )
    fill(databases, 1000)


def fill(databases: list[str], rows: int) -> None:
    """Add rows to the tables until each has ``rows``."""
    for database in databases:
        engine = database.partition("-")[0]
        with connections[database].cursor() as cursor:
            for table, columns, values in (
                (
                    TABLE,
                    "name, version, owner, end_time",
                    f"{{key}}, 0, '', {_EPOCH[engine]}",
                ),
                (
                    "dlocks_resourcelock",
                    (
                        "key_resource, status, owner, holder, end_time, hold_count,"
                        " version"
                    ),
                    f"{{key}}, 'S', '', '', {_EPOCH[engine]}, 0, 1",
                ),
            ):
                cursor.execute(
                    f"SELECT COUNT(*) FROM {table} WHERE {columns.partition(',')[0]}"
                    " LIKE 'key-%%'",
                    [],
                )
                first = cursor.fetchone()[0]
                if first < rows:
                    cursor.execute(
                        _insert(engine, table, columns, values, first, rows - 1)
                    )
                    word = "TABLE " if engine in {"mariadb", "mysql"} else ""
                    cursor.execute(f"ANALYZE {word}{table}")


def _insert(
    engine: str, table: str, columns: str, values: str, first: int, last: int
) -> str:
    source, key = _NUMBERS[engine]
    generated = hint = ""
    if source == "numbers":
        generated = (
            f"WITH RECURSIVE numbers (number) AS (SELECT {first} UNION ALL SELECT"
            f" number + 1 FROM numbers WHERE number < {last}) "
        )
    if engine == "mysql":
        # By default, MySQL aborts a recursion after 1,000 rows.
        hint = f" /*+ SET_VAR(cte_max_recursion_depth = {last + 1}) */"
    source, values = source.format(first=first, last=last), values.format(key=key)
    ignore = {
        "postgresql": ("", " ON CONFLICT DO NOTHING"),
        "sqlite": (" OR IGNORE", ""),
    }
    before, after = ignore.get(engine, (" IGNORE", ""))
    return (
        f"INSERT{hint}{before} INTO {table} ({columns}) {generated}SELECT {values} FROM"
        f" {source}{after}"
    )
