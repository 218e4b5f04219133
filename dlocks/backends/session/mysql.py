"""Sessions of MariaDB and MySQL, whose locks are ``GET_LOCK``."""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db.utils import Error

from dlocks.backends.session.session import Session, SessionDiedError
from dlocks.runtime.greenlets import threads_are_green
from dlocks.runtime.polling import ready

# SYSDATE() is the current time. UTC_TIMESTAMP() would be the time at which the wait
# began.
_TICKS = "CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS UNSIGNED)"
# The table exists since MySQL 8.0.22, and is empty if the performance schema is off.
_HAS_PROCESSLIST = (
    "SELECT @@performance_schema AND EXISTS (SELECT 1 FROM information_schema.tables"
    " WHERE table_schema = 'performance_schema' AND table_name = 'processlist')"
)


class MySQLSession(Session):
    shares = False
    idle_unit = 1
    cancelled = "1317"
    # 0 is the driver's error for a closed connection, and 2000 to 2999 are the client's
    # errors.
    ended = ("1053", "1927", "3169", "4031", "2", "0")

    statements = {
        "try": f"SELECT IF(GET_LOCK(%(value)s, 0) = 1, {_TICKS}, NULL)",
        # One year in seconds. MariaDB does not support an unlimited wait. Unlike on
        # PostgreSQL, a wait is no transaction.
        "wait": f"SELECT IF(GET_LOCK(%(value)s, 31536000) = 1, {_TICKS}, NULL)",
        "free": "SELECT RELEASE_LOCK(%(value)s)",
        # No session is interrupted if the lock is unknown.
        "cancel": "KILL QUERY IS_USED_LOCK(%(value)s)",
        "ping": "SELECT CONNECTION_ID() + 0",
        "idle": "SET SESSION wait_timeout = %(value)s",
        "comments": (
            "SELECT JSON_ARRAYAGG(info) FROM information_schema.processlist WHERE"
            " state = 'User lock' AND info LIKE '%%/*dlocks %%*/%%'"
        ),
        # A host is shown with its port.
        "sessions": (
            "SELECT JSON_ARRAYAGG(JSON_ARRAY(id = IS_USED_LOCK(%(value)s),"
            " CONCAT('session ', id, ' of ', user), IF(host LIKE '%%:%%:%%', host,"
            " SUBSTRING_INDEX(host, ':', 1)), id, time)) FROM"
            " information_schema.processlist WHERE id = IS_USED_LOCK(%(value)s) OR"
            " (state = 'User lock' AND info LIKE CONCAT('%%SELECT IF(GET_LOCK(''',"
            " %(value)s, ''', 3%%'))"
        ),
    }

    def identify(self) -> None:
        raw: Any = self.wrapper.connection
        if threads_are_green():
            # The driver's own wait would stop all greenlets.
            def query(sql: bytes) -> None:
                raw.send_query(bytes(sql))
                ready(raw.fileno())
                raw.read_query_result()

            raw.query = query
        (self.pid,) = self.first_row("SELECT CONNECTION_ID() + 0")
        self.reported_pid = int(raw.thread_id())

    def begin(self) -> None:
        version, before, _, after = self.first_row(
            "SELECT VERSION(), SYSDATE(6), SLEEP(0.001), SYSDATE(6)"
        )
        refusal = ""
        if before == after:
            refusal = (
                "runs with sysdate-is-now. The token of a lock that was waited for"
                " would be older than its grant. Turn that option off, or use"
            )
        # This query also works on servers without the variable.
        if self.first_row(
            "SHOW VARIABLES WHERE Variable_name = 'wsrep_on' AND Value = 'ON'"
        ):
            refusal = (
                "is a node of a Galera cluster, and GET_LOCK is known to one node only."
                " Use"
            )
        if refusal:
            raise ImproperlyConfigured(
                f"The server of database {self.database!r} {refusal}"
                " dlocks.backends.database.PessimisticBackend."
            )
        is_mariadb = "mariadb" in version.lower()
        if not is_mariadb and self.first_row(_HAS_PROCESSLIST) == (1,):
            # MySQL will remove the table from information_schema, and warns of each use
            # (error 1287).
            self.statements = {
                name: sql.replace(
                    "information_schema.processlist", "performance_schema.processlist"
                )
                for name, sql in self.statements.items()
            }
        endless = "max_statement_time" if is_mariadb else "max_execution_time"
        self.identity = f"dlocks session {secrets.token_hex(8)}"
        self.first_row("SELECT GET_LOCK(%s, 0)", (self.identity,))
        self.first_row(
            f"SET SESSION time_zone = '+00:00', {endless} = 0, wait_timeout = %s",
            (self.idle_setting(self.idle),),
        )

    def read_rest(self) -> None:
        if threads_are_green():
            raise SessionDiedError("a greenlet was killed during a request")
        # An error says that there is nothing to read.
        with suppress(Error), self.wrapper.wrap_database_errors:
            self.wrapper.connection.store_result()

    def code(self, error: Error) -> str:
        return str((*error.args, 0)[0])
