"""The database of a campaign: tables, audit of grants, sessions and clocks."""

from __future__ import annotations

import random
import re
from contextlib import suppress
from typing import Any

from tests.servers import MariaDB, PostgreSQL, Server

NAME = "nemesis"


def create(server: Server) -> None:
    """Drop the database and create it again."""
    # Sessions of killed processes may not have ended yet.
    force = " WITH (FORCE)" if isinstance(server, PostgreSQL) else ""
    server.execute(f"DROP DATABASE IF EXISTS {NAME}{force}")
    server.execute(f"CREATE DATABASE {NAME}")


def sessions(server: Server) -> str:
    """Return the sessions of the server as text, and what each of them waits for."""
    query = "SHOW FULL PROCESSLIST"
    if isinstance(server, PostgreSQL):
        query = (
            "SELECT pid, pg_blocking_pids(pid), state, now() - xact_start, client_addr,"
            " client_port, wait_event, query FROM pg_stat_activity"
        )
    return "\n".join(map(str, server.execute(query)))


def prepare(pipe: Any, keys: list[str]) -> None:
    """Create the tables, the registers, and the triggers that audit tokens.

    The triggers record every token that was ever committed.
    """
    from django.core.management import call_command
    from django.db import connection

    call_command("migrate", verbosity=0, run_syncdb=True)
    with connection.cursor() as cursor:
        for statement in _AUDIT[connection.vendor]:
            cursor.execute(statement)
    _registers(keys)


def reset(pipe: Any, keys: list[str]) -> None:
    """Empty the tables for the next campaign. The tokens still grow."""
    from tests.internals import LockClaim, ResourceLock
    from tests.models import Counter, Machine

    for model in (LockClaim, ResourceLock, Counter, Machine):
        model._base_manager.all()._raw_delete(using="default")
    _registers(keys)


def _registers(keys: list[str]) -> None:
    from tests.models import Counter, Machine

    names = [
        f"{kind} {key}"
        for key in keys
        for kind in ("transaction", "unfenced", "guarded")
    ]
    Counter.objects.bulk_create([Counter(name=name) for name in names])
    for number, _ in enumerate(keys, 1):
        machine = Machine(pk=number)
        Machine.objects.bulk_create([machine])


def final(pipe: Any) -> dict[str, Any]:
    """Return the final registers, and all grants that were ever in the database."""
    from django.db import connection

    from tests.models import Counter

    connection.close()
    granted: list[list[Any]] = []
    if connection.vendor != "mysql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT DISTINCT key_resource, version FROM nemesis_audit")
            granted = [list(row) for row in cursor.fetchall()]
    return {
        "registers": dict(Counter.objects.values_list("name", "value")),
        "granted": granted,
    }


_TABLE = (
    "CREATE TABLE nemesis_audit (key_resource varchar(255) NOT NULL, version bigint NOT"
    " NULL)"
)
_INSERT = "INSERT INTO nemesis_audit VALUES (NEW.key_resource, NEW.version)"
_NOTED = f"IF NEW.version IS NOT NULL THEN {_INSERT}; END IF;"
_TABLES = ("dlocks_resourcelock", "dlocks_lockclaim")
_AUDIT = {
    "postgresql": [
        _TABLE,
        (
            "CREATE FUNCTION nemesis_note() RETURNS trigger LANGUAGE plpgsql AS $$"
            f" BEGIN {_NOTED} RETURN NEW; END $$"
        ),
        *(
            f"CREATE TRIGGER nemesis_note AFTER INSERT OR UPDATE OF version ON {table}"
            " FOR EACH ROW EXECUTE FUNCTION nemesis_note()"
            for table in _TABLES
        ),
    ],
    # The binary log is read instead.
    "mysql": [],
    "sqlite": [
        _TABLE,
        *(
            f"CREATE TRIGGER nemesis_{table}_{verb.split()[0]} AFTER {verb} ON {table}"
            f" WHEN NEW.version IS NOT NULL BEGIN {_INSERT}; END"
            for table in _TABLES
            for verb in ("INSERT", "UPDATE OF version")
        ),
    ],
}


BINARY_LOG = (
    "--log-bin=changes",
    "--binlog-format=ROW",
    "--server-id=1",
    "--sync-binlog=0",
)


def logged(server: MariaDB) -> list[list[Any]]:
    """Return the grants in the binary log of MariaDB or MySQL."""
    places: dict[str, dict[str, int]] = {}
    for table, column, position in server.execute(
        "SELECT table_name, column_name, ordinal_position FROM"
        f" information_schema.columns WHERE table_schema = '{NAME}' AND column_name IN"
        " ('key_resource', 'version')",
    ):
        places.setdefault(table, {})[column] = int(position)
    text = server.read_binary_log(
        *sorted(str(path) for path in server.data.glob("changes.[0-9]*"))
    )
    granted: set[tuple[str, int]] = set()
    wanted: dict[str, int] = {}
    row: dict[int, str] = {}

    def note() -> None:
        if wanted and row:
            key, version = (
                row.get(wanted["key_resource"], ""),
                row.get(wanted["version"], "NULL"),
            )
            if version != "NULL":
                granted.add((key.strip("'"), int(version.split()[0])))
        row.clear()

    for line in text.splitlines():
        if match := re.match(
            r"### (?:INSERT INTO|UPDATE|DELETE FROM) `\w+`\.`(\w+)`", line
        ):
            note()
            wanted = places.get(match[1], {})
        elif line in {"### SET", "### WHERE"}:
            note()
        elif match := re.match(r"###   @(\d+)=(.*)", line):
            row[int(match[1])] = match[2]
    note()
    return [list(one) for one in granted]


def end_sessions(server: Server, chance: random.Random, *, everybody: bool) -> int:
    """End sessions on the database from the server's side. Return their number."""
    if server.engine == "postgresql":
        asked = f"SELECT pid FROM pg_stat_activity WHERE datname = '{NAME}'"
        statement = "SELECT pg_terminate_backend({})"
    else:
        asked = f"SELECT id FROM information_schema.processlist WHERE db = '{NAME}'"
        statement = "KILL {}"
    ended = 0
    for (session,) in server.execute(asked):
        if everybody or chance.random() < 0.5:
            # The session may have ended by itself meanwhile.
            with suppress(Exception):
                server.execute(statement.format(session))
                ended += 1
    return ended
