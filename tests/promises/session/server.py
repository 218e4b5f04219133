"""Session locks of the tests, and the sessions of the server."""

import pytest
from django.db import connection

from dlocks import db_lock

POSTGRESQL = pytest.mark.engine("postgresql")
SERVERS = pytest.mark.engine("postgresql", "mariadb", "mysql")


def lock(key="stock:7", **policy):
    return db_lock(key, using="session", **policy)


def query(postgresql, mysql, *values):
    """Run the statement of this engine, and return the rows."""
    sql = postgresql if connection.vendor == "postgresql" else mysql
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        return cursor.fetchall() if cursor.description else []


def clients():
    """Return the ids of all clients' sessions of the server."""
    rows = query(
        "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'",
        "SELECT id FROM information_schema.processlist",
    )
    return {pid for (pid,) in rows}


def end_session(pid):
    query("SELECT pg_terminate_backend(%s)", "KILL %s", pid)
