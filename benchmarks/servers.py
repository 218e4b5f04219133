"""Temporary servers for the benchmarks, with their default durability."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from contextlib import ExitStack
from typing import ClassVar

from tests import servers as tested
from tests.servers import Server

# Enough for a thousand waiters with a connection each.
CONNECTIONS = 1200


class PostgreSQL(tested.PostgreSQL):
    durability = "fsync and synchronous_commit on (its defaults)"

    def command(self) -> list[str]:
        return [
            *super().command(),
            "-c",
            "fsync=on",
            "-c",
            f"max_connections={CONNECTIONS}",
        ]

    def version(self) -> str:
        return _first_line([str(self._tool("postgres")), "--version"])


class MariaDB(tested.MariaDB):
    durability = "innodb_flush_log_at_trx_commit=1 (its default), no binary log"

    def command(self) -> list[str]:
        return [
            *super().command(),
            "--innodb-flush-log-at-trx-commit=1",
            f"--max-connections={CONNECTIONS}",
        ]

    def version(self) -> str:
        return _first_line([self.command()[0], "--version"])


class MySQL(tested.MySQL):
    durability = (
        "innodb_flush_log_at_trx_commit=1 and sync_binlog=1, binary log on (its"
        " defaults)"
    )

    def command(self) -> list[str]:
        options = [
            "--innodb-flush-log-at-trx-commit=1",
            "--sync-binlog=1",
            f"--max-connections={CONNECTIONS}",
        ]
        return [*super().command(), *options]

    def version(self) -> str:
        return _first_line([self.command()[0], "--version"]).replace(
            f"{self.unpacked}/", ""
        )


class MySQLWithoutBinaryLog(MySQL):
    """MySQL with one flushed log per commit, as MariaDB and ZooKeeper have."""

    engine = "mysql-no-binlog"
    durability = "innodb_flush_log_at_trx_commit=1 (its default), binary log off"

    def command(self) -> list[str]:
        return [*super().command(), "--skip-log-bin"]


class Redis(tested.Redis):
    durability = (
        "none: in memory only (its default snapshots switched off, so that they do not"
        " disturb)"
    )

    def version(self) -> str:
        return _first_line([self.server, "--version"])


class DurableRedis(Redis):
    engine = "redis-always"
    durability = (
        "appendonly with appendfsync=always: the promise that the databases make by"
        " default"
    )
    settings: ClassVar[dict[str, str]] = {"appendonly": "yes", "appendfsync": "always"}


class ZooKeeper(tested.ZooKeeper):
    durability = "forceSync=yes (its default), one server"

    def version(self) -> str:
        return (
            tested.asked(self.port, b"srvr")
            .decode()
            .partition("\n")[0]
            .partition("-")[0]
            .replace(" version:", "")
        )


SERVERS: dict[str, type[Server]] = {
    server.engine: server
    for server in (
        PostgreSQL,
        MariaDB,
        MySQL,
        MySQLWithoutBinaryLog,
        Redis,
        DurableRedis,
        ZooKeeper,
    )
}


def start(names: Iterable[str], stack: ExitStack) -> dict[str, Server]:
    """Start servers, and pass their ports to the settings by the environment."""
    started = {name: stack.enter_context(SERVERS[name]()) for name in sorted(names)}
    for name, server in started.items():
        os.environ[f"BENCHMARKS_{name.upper().replace('-', '_')}"] = str(server.port)
    return started


def _first_line(command: list[str]) -> str:
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
    output = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment
    ).stdout
    return output.strip().partition("\n")[0]
