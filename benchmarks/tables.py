"""The tables of the benchmarks, and their rows."""

from __future__ import annotations

from collections.abc import Mapping

from django.core.management import call_command
from django.db import connections

from benchmarks.contenders import EPOCH, TABLE

ROWS = 1000


def create(databases: list[str], ports: Mapping[str, int]) -> None:
    """Create the tables, with rows of keys."""
    from dlocks.models import ResourceLock

    for database in databases:
        engine = database.partition("-")[0]
        if engine in {"mariadb", "mysql"}:
            import MySQLdb

            MySQLdb.connect(host="127.0.0.1", port=ports[database], user="root").query(
                "CREATE DATABASE dlocks CHARACTER SET utf8mb4"
            )
        for app in ("dlocks", "db_mutex"):
            call_command("migrate", app, database=database, verbosity=0)
        keys = [f"key-{number}" for number in range(ROWS)]
        ResourceLock.objects.using(database).bulk_create(
            ResourceLock(pk=key, status="S", end_time=EPOCH, hold_count=0, version=1)
            for key in keys
        )
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
            cursor.executemany(
                f"INSERT INTO {TABLE} VALUES (%s, 0, '', '2020-01-01 00:00:00')",
                [(key,) for key in keys],
            )
            for table in (TABLE, "dlocks_resourcelock"):
                word = "TABLE " if engine in {"mariadb", "mysql"} else ""
                cursor.execute(f"ANALYZE {word}{table}")
