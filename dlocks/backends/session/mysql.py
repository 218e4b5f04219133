"""Sessions of MariaDB and MySQL, whose locks are ``GET_LOCK``."""

from __future__ import annotations

import math
import secrets
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from dlocks.backends.session.engine_sessions import (
    LONGEST_IDLE,
    EngineSession,
    Row,
    SessionDiedError,
)
from dlocks.exceptions import LockBackendError

# Error codes of a cancelled statement, and of a session that the server has ended in
# any way.
INTERRUPTED = 1317
ENDED = {1053, 1927, 3169, 4031}


# The table exists since MySQL 8.0.22, and is empty if the performance schema is off.
_HAS_PROCESSLIST = (
    "SELECT @@performance_schema AND EXISTS (SELECT 1 FROM information_schema.tables"
    " WHERE table_schema = 'performance_schema' AND table_name = 'processlist')"
)


class MySQLEngineSession(EngineSession):
    shares = False
    in_transactions = False

    # SYSDATE() is the current time. UTC_TIMESTAMP() would be the time at which the wait
    # began.
    _TICKS = "CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS UNSIGNED)"

    statements = {
        "try": f"SELECT IF(GET_LOCK('{{0}}', 0) = 1, {_TICKS}, NULL)",
        # One year in seconds. MariaDB does not support an unlimited wait.
        "wait": f"SELECT IF(GET_LOCK('{{0}}', 31536000) = 1, {_TICKS}, NULL)",
        "free": "SELECT RELEASE_LOCK('{0}')",
        # No session is interrupted if the lock is unknown.
        "cancel": "KILL QUERY IS_USED_LOCK('{0}')",
        "ping": "SELECT CONNECTION_ID() + 0",
        "idle": "SET SESSION wait_timeout = {0}",
        "holder": (
            "SELECT CONCAT('session ', id, ' of ', user), host, id FROM"
            " information_schema.processlist WHERE id = IS_USED_LOCK('{0}')"
        ),
        "waiting": (
            "SELECT COUNT(*) FROM information_schema.processlist WHERE state = 'User"
            " lock' AND info LIKE 'SELECT IF(GET_LOCK(\\'{0}\\', 3%'"
        ),
    }

    def identify(self) -> None:
        (self.pid,) = self.first_row("SELECT CONNECTION_ID() + 0")
        self.reported_pid = int(self.raw.thread_id())

    def begin(self, name: str) -> None:
        version, before, _, after = self.first_row(
            "SELECT VERSION(), SYSDATE(6), SLEEP(0.001), SYSDATE(6)"
        )
        if before == after:
            raise ImproperlyConfigured(
                f"The server of database {self.wrapper.alias!r} runs with"
                " sysdate-is-now. The token of a lock that was waited for would be"
                " older than its grant. Turn that option off, or use"
                " dlocks.backends.database.PessimisticBackend."
            )
        with self.wrapper.cursor() as cursor:
            # This query also works on servers without the variable.
            cursor.execute(
                "SHOW VARIABLES WHERE Variable_name = 'wsrep_on' AND Value = 'ON'"
            )
            replicated = cursor.fetchall()
        if replicated:
            raise ImproperlyConfigured(
                f"The server of database {self.wrapper.alias!r} is a node of a Galera"
                " cluster, and GET_LOCK is known to one node only. Two nodes would"
                " grant the same lock to two callers. Use"
                " dlocks.backends.database.PessimisticBackend."
            )
        is_mariadb = "mariadb" in version.lower()
        if not is_mariadb and self.first_row(_HAS_PROCESSLIST) == [1]:
            # MySQL will remove the table from information_schema, and warns of each use
            # (error 1287).
            self.statements = {
                name: statement.replace(
                    "information_schema.processlist", "performance_schema.processlist"
                )
                for name, statement in self.statements.items()
            }
        endless = "max_statement_time" if is_mariadb else "max_execution_time"
        self.identity = f"dlocks session {secrets.token_hex(8)}"
        self.first_row("SELECT GET_LOCK(%s, 0)", self.identity)
        with self.wrapper.cursor() as cursor:
            cursor.execute(
                f"SET SESSION time_zone = '+00:00', {endless} = 0, wait_timeout ="
                f" {self.idle_setting(self.idle)}"
            )

    @staticmethod
    def idle_setting(seconds: float) -> int:
        return math.ceil(min(seconds, LONGEST_IDLE))

    def fileno(self) -> int:
        return int(self.raw.fileno())

    def send(self, statement: str, value: Any) -> None:
        try:
            self.raw.send_query(
                self.statements[statement].replace("{0}", str(value)).encode()
            )
        except self.raw_errors as error:
            raise SessionDiedError(str(error)) from error

    def answered(self) -> bool:
        # A reply is a single packet.
        return True

    def answer(self) -> Row | None:
        try:
            self.raw.read_query_result()
            result = self.raw.store_result()
        except self.raw_errors as error:
            number = error.args[0] if error.args else 0
            if number == INTERRUPTED:
                return None
            if 2000 <= number < 3000 or number in ENDED:
                raise SessionDiedError(str(error)) from error
            raise LockBackendError(
                f"Database {self.wrapper.alias!r} rejected a lock statement: {error}"
            ) from error
        if result is None:
            return None
        row = next(iter(result.fetch_row(1, 0)), None)
        return (
            None
            if row is None
            else [
                value.decode() if isinstance(value, bytes) else value for value in row
            ]
        )

    @property
    def raw_errors(self) -> Any:
        import MySQLdb  # type: ignore[import-untyped]

        return MySQLdb.Error
