"""Other users of the machine cannot use the servers that tests start."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from django.db import OperationalError, connection

from tests.servers import PASSWORD, PgBouncer
from tests.settings import ENGINE, PORT

pytestmark = [
    pytest.mark.engine("postgresql", "mariadb", "mysql"),
    pytest.mark.django_db,
]


def connect(port, password):
    stranger = connection.copy()
    stranger.settings_dict |= {"PASSWORD": password, "PORT": port, "OPTIONS": {}}
    stranger.ensure_connection()
    stranger.close()


def test_servers_refuse_connections_without_the_password(monkeypatch):
    """The account of the tests may run programs as that of the server."""
    ports = [PORT]
    with contextlib.ExitStack() as stack:
        if ENGINE == "postgresql":
            ports.append(stack.enter_context(PgBouncer(int(PORT))).port)
        monkeypatch.delenv("PGPASSWORD")
        monkeypatch.delenv("MYSQL_PWD")
        for port in ports:
            for password in "", "wrong":
                with pytest.raises(OperationalError, match="password|Access denied"):
                    connect(port, password)
            connect(port, PASSWORD)


def test_no_command_line_contains_the_password():
    """Every user of the machine can read the command lines of all processes."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        # The process may have ended meanwhile.
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes())
    assert any(PORT.encode() in line for line in lines)
    assert not any(PASSWORD.encode() in line for line in lines)
