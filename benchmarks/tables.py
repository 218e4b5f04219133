"""The tables that the benchmarks need, and rows in them."""

from __future__ import annotations

from django.core.management import call_command
from django.db import connections

from benchmarks.contenders import TABLE

_NUMBERS = {
    # Where the numbers from {first} to {last} come from, and the key of each.
    "postgresql": ("generate_series({first}, {last}) AS number", "'key-' || number"),
    "mariadb": ("seq_{first}_to_{last}", "CONCAT('key-', seq)"),
    "sqlite": ("generated", "'key-' || number"),
}
_EPOCH = {"postgresql": "timestamptz '2020-01-01'", "mariadb": "'2020-01-01'", "sqlite": "'2020-01-01 00:00:00.000000'"}


def create(databases: list[str], mariadb_port: int | None) -> None:
    """Make the tables, with the rows that every contender needs."""
    if mariadb_port is not None:
        import MySQLdb

        MySQLdb.connect(host="127.0.0.1", port=mariadb_port, user="root").query(
            "CREATE DATABASE dlocks CHARACTER SET utf8mb4"
        )
    for database in databases:
        for app in ("dlocks", "db_mutex"):
            call_command("migrate", app, database=database, verbosity=0)
        moment, options = {
            "postgresql": ("timestamptz", " WITH (fillfactor = 50)"),
            "mariadb": ("datetime(6)", ""),
            "sqlite": ("text", ""),
        }[database]
        with connections[database].cursor() as cursor:
            cursor.execute(
                f"CREATE TABLE {TABLE} (name varchar(255) PRIMARY KEY, version bigint NOT NULL,"
                f" owner varchar(64) NOT NULL, end_time {moment} NOT NULL){options}"
            )
    fill(databases, 1000)


def fill(databases: list[str], rows: int) -> None:
    """Bring the tables to so many rows."""
    for database in databases:
        with connections[database].cursor() as cursor:
            for table, columns, values in (
                (TABLE, "name, version, owner, end_time", f"{{key}}, 0, '', {_EPOCH[database]}"),
                (
                    "dlocks_resourcelock",
                    "key_resource, status, owner, holder, end_time, hold_count, version",
                    f"{{key}}, 'S', '', '', {_EPOCH[database]}, 0, 1",
                ),
            ):
                cursor.execute(f"SELECT COUNT(*) FROM {table} WHERE {columns.partition(',')[0]} LIKE 'key-%%'", [])
                first = cursor.fetchone()[0]
                if first < rows:
                    cursor.execute(_insert(database, table, columns, values, first, rows - 1))
                    cursor.execute(f"ANALYZE {'TABLE ' if database == 'mariadb' else ''}{table}")


def _insert(database: str, table: str, columns: str, values: str, first: int, last: int) -> str:
    source, key = _NUMBERS[database]
    generated = ""
    if database == "sqlite":
        generated = (
            f"WITH RECURSIVE generated (number) AS (VALUES ({first}) UNION ALL SELECT number + 1 FROM generated"
            f" WHERE number < {last}) "
        )
    source, values = source.format(first=first, last=last), values.format(key=key)
    ignore = {"postgresql": ("", " ON CONFLICT DO NOTHING"), "mariadb": (" IGNORE", ""), "sqlite": (" OR IGNORE", "")}
    before, after = ignore[database]
    return f"INSERT{before} INTO {table} ({columns}) {generated}SELECT {values} FROM {source}{after}"
