"""This thread's connection to one database: statements, transactions and errors."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import (
    DatabaseError,
    Error,
    InterfaceError,
    OperationalError,
)

# functools has a mutex in Python 3.11. A thread that waits there for a connection of a
# pool would block the threads that have one.
from django.utils.functional import cached_property

from dlocks.backends.base import TableLockedError
from dlocks.backends.database.failures import (
    abandon,
    failure_of,
    has_aborted,
    how_to_migrate,
    interrupt_in,
    is_in_statement,
    not_installed,
)
from dlocks.backends.database.limits import call_as_writer
from dlocks.backends.database.prepared import PreparedStatements
from dlocks.exceptions import LockBackendError, LockError
from dlocks.runtime import clock
from dlocks.runtime.connected import connection_of
from dlocks.runtime.pools import close_lost
from dlocks.runtime.requests import nested_request
from dlocks.sql.engines import Engine, engine_of
from dlocks.sql.schemas import TABLES, find_tables, qualified, schema_of
from dlocks.transactions import in_testcase

T = TypeVar("T")

# Retries after lost races, and the longest delay before one, in seconds. The nodes of a
# Galera cluster, and sessions at SERIALIZABLE, lose races for as long as they write
# concurrently.
CONFLICTS, CONFLICT_DELAY = 40, 0.1
# Maximum number of texts that are kept. The longest have several kilobytes.
TEXTS = 256


class StepError(Exception):
    """A step, or a statement, that changed nothing and may be tried again."""


class RowLockedError(StepError):
    """Another transaction has locked what a statement needs. Nothing was changed."""


class Reply(NamedTuple):
    """The rows that a statement returned, and the number of those that it changed.

    ``insert_id`` is what MySQL or MariaDB calls the last insert id.
    """

    rows: Sequence[Any]
    changed: int
    insert_id: int = 0


class Session:
    """The connection to a database, for each thread its own.

    ``prepare`` says whether psycopg prepares our statements. By default it does if no
    pooler is between it and the server.
    """

    def __init__(self, database: str, *, prepare: bool | None = None) -> None:
        self.database = database
        self.prepare = prepare
        # Composed texts: statements with the names of the tables, and fast statements.
        self.sql = lru_cache(TEXTS)(self._sql)
        self.statement = lru_cache(TEXTS)(self._statement)
        self._prepared = PreparedStatements(prepare)
        # The connection of the driver that this thread used last, and whether its
        # transactions begin above READ COMMITTED.
        self._local = threading.local()

    def of_alias(self, database: str) -> Session:
        """Return the session of another alias of the same database."""
        there = Session(database, prepare=self.prepare)
        vars(there).update(engine=self.engine, schema=self.schema)
        return there

    @property
    def connection(self) -> BaseDatabaseWrapper:
        return connection_of(self.database)

    @cached_property
    def engine(self) -> Engine:
        if not apps.is_installed("dlocks"):
            raise not_installed()
        connection = self.connection
        if connection.vendor == "mysql":
            # Django queries the server for which one it is when it connects.
            self._connect(connection)
        return engine_of(connection)

    @property
    def in_transaction(self) -> bool:
        return in_transaction(self.connection)

    @property
    def is_nested(self) -> bool:
        """Return whether the open block is a savepoint of a caller's transaction."""
        return bool(self.connection.savepoint_ids)

    @property
    def is_alone(self) -> bool:
        """Return whether no other caller can exist beside the open transaction.

        In a TestCase no other caller can wait, and a committed row would remain for the
        next test.
        """
        return self.in_transaction and (
            self.engine.one_writer or in_testcase(self.connection)
        )

    @property
    def begins_as_reader(self) -> bool:
        """Return whether a step has to ask for SQLite's single writer."""
        options = self.connection.settings_dict["OPTIONS"]
        mode = str(options.get("transaction_mode") or "DEFERRED").upper()
        return self.engine.one_writer and not self.is_nested and mode == "DEFERRED"

    @property
    def raw(self) -> Any:
        """The connection of the driver, which differs after a reconnection."""
        connection = self.connection
        self._connect(connection)
        return connection.connection

    # The names of the tables.

    @cached_property
    def schema(self) -> str:
        """The schema of the tables on PostgreSQL. See ``dlocks.sql.schemas``."""
        connection = self.connection
        if connection.vendor != "postgresql":
            return ""
        if schema := self.unlocked(schema_of, connection):
            return schema
        tables = self.unlocked(find_tables, connection)
        if refusal := tables.refusal(self.database):
            raise ImproperlyConfigured(refusal)
        failure = LockBackendError(
            f"Database {self.database!r} is not migrated (no schema of its search path"
            f" has 'dlocks_resourcelock'). {how_to_migrate(self.database)}"
        )
        failure.changed_nothing = True
        raise failure

    def _sql(self, text: str) -> str:
        """Return a statement with the names of the tables, and the engine's SQL."""
        found = self.engine.fill(text)
        for name, table in TABLES.items():
            quoted = qualified(table, self.connection, self.schema)
            # FOR UPDATE OF requires the name of a table without its schema.
            found = found.replace(f"{{of_{name}}}", quoted.rpartition(".")[2])
            found = found.replace(f"{{{name}}}", quoted)
        return found

    def _statement(self, name: str, **options: Any) -> str:
        """Return the text that the method of the engine with this name composes."""
        return self._sql(getattr(self.engine, name)(**options))

    def one_of(
        self, column: str, values: Sequence[Any], name: str
    ) -> tuple[str, dict[str, Any]]:
        """Return the condition that a column has one of the values, with parameters."""
        if len(values) == 1:
            return f"{column} = %({name})s", {name: values[0]}
        if self.connection.vendor == "postgresql":
            # One text, and one prepared statement, for any number of values.
            return f"{column} = ANY (%({name})s)", {name: list(values)}
        names = {f"{name}{number}": value for number, value in enumerate(values)}
        return f"{column} IN ({', '.join(f'%({name})s' for name in names)})", names

    # Statements.

    def rows(self, text: str, parameters: Mapping[str, Any]) -> Sequence[Any]:
        """Return the rows of a statement that locks nothing."""
        return self.unlocked(self.execute, self.sql(text), parameters).rows

    def unlocked(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call ``work``, which no row lock of another transaction can hold up.

        If it is held up all the same, a table is locked. Raise TableLockedError.
        """
        try:
            return self.run(work, *arguments, writes=False)
        except RowLockedError as error:
            why = (
                "A table of dlocks is locked as a whole by a migration, a backup,"
                " VACUUM FULL or LOCK TABLE. Wait for its end, or end the session that"
                " locks it."
            )
            if self.engine.one_writer:
                why = "Another transaction writes to the database. Wait for its end."
            raise TableLockedError(
                f"A lock request to database {self.database!r} was cancelled:"
                f" {error.__cause__}. {why}"
            ) from error.__cause__

    def ask(
        self, text: str, parameters: Mapping[str, Any], *, flush: bool = True
    ) -> Reply:
        """Execute one of our statements.

        Raise RowLockedError if another transaction has locked what it needs.
        Without ``flush``, a crash of the machine may lose the change (on SQLite).
        """
        return self.run(self.prepared, self.sql(text), parameters, flush=flush)

    def send(
        self, name: str, parameters: Mapping[str, Any], flush: bool, **options: Any
    ) -> Reply:
        """Execute a fast statement of the engine, as ``ask()`` does."""
        sql = self.statement(name, **options)
        return self.run(self.prepared, sql, parameters, flush=flush)

    def execute(self, sql: str, parameters: Mapping[str, Any]) -> Reply:
        """Execute a statement with Django's cursor."""
        connection = self.connection
        with connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            # Fetch all rows, because an unfinished statement keeps SQLite's write lock.
            rows: Sequence[Any] = cursor.fetchall() if cursor.description else ()
            # A text without a semicolon has one result. To ask for another takes time.
            while True:
                if ";" not in sql or not cursor.nextset():
                    break
                rows = cursor.fetchall() if cursor.description else rows
            insert_id = cursor.lastrowid if connection.vendor == "mysql" else 0
            return Reply(rows, cursor.rowcount, insert_id)

    def prepared(self, sql: str, parameters: Mapping[str, Any]) -> Reply:
        """Execute a statement that returns rows, prepared by psycopg if it can be."""
        rows = self._prepared.rows(self.connection, sql, parameters)
        return self.execute(sql, parameters) if rows is None else Reply(rows, len(rows))

    def packet(
        self, text: str, parameters: Mapping[str, Any], *, flush: bool = True
    ) -> Sequence[Any]:
        """Execute a request that is a short transaction of its own.

        It is one statement on PostgreSQL, several in one packet on InnoDB, and several
        of which each may return rows on SQLite.
        """
        return self.run(self._packet, self.sql(text), parameters, flush=flush)

    def _packet(self, sql: str, parameters: Mapping[str, Any]) -> Sequence[Any]:
        engine = self.engine
        if engine.vendor == "postgresql":
            return self.prepared(sql, parameters).rows
        statements = [engine.packet(sql)]
        if engine.one_writer:
            # No other process is between them.
            statements = ["BEGIN IMMEDIATE", *sql.split(";"), "COMMIT"]
        rows: list[Any] = []
        try:
            for one in statements:
                rows += self.execute(one, parameters).rows
        except DatabaseError:
            # The failed request may have begun a transaction.
            with suppress(Error), self.connection.cursor() as cursor:
                cursor.execute("ROLLBACK")
            raise
        return rows

    # Transactions.

    def transaction(self, work: Callable[[], T]) -> T:
        """Call ``work`` in a short transaction, a step.

        The server ends it if this process stops. In a TestCase it is a savepoint of the
        test's transaction.

        This is no context manager. An interrupt at the edge of its block would leave it
        suspended. The garbage collector would end it later, and a transaction of the
        caller that is open by then.
        """
        inside = self.in_transaction
        raised: BaseException | None = None

        def attempt() -> T:
            nonlocal raised
            try:
                if not inside and self.connection.vendor == "postgresql":
                    self._lower_isolation()
                return self._call_qualified(work)
            except BaseException as error:
                raised = error
                raise

        step = partial(self.call_in_atomic, attempt)
        try:
            return step() if inside else self._call_limited(step)
        except Error:
            # The rollback may fail too. Its error must not hide an interrupt.
            if raised is None or isinstance(raised, (Error, StepError, LockError)):
                raise
            raise raised from None
        finally:
            # Otherwise the error and the frames of its traceback would be a cycle.
            raised = None

    def call_in_atomic(self, work: Callable[[], T]) -> T:
        """Call ``work`` in a transaction, or in a savepoint of the caller's.

        An interrupt at the edge of the block would leave the block in Django's lists.
        Django would then take the end of the caller's transaction for that of the
        savepoint, and would never commit it.
        """
        here = self.connection
        blocks, savepoints = len(here.atomic_blocks), len(here.savepoint_ids)
        try:
            with transaction.atomic(using=self.database):
                return work()
        finally:
            del here.atomic_blocks[blocks:]
            del here.savepoint_ids[savepoints:]

    def _lower_isolation(self) -> None:
        """Let a transaction of dlocks that has just begun run at READ COMMITTED.

        Above that, it would fail each time another one was faster. At SERIALIZABLE,
        transactions of callers would fail because of it. A row lock and one snapshot
        for each statement are all that a step needs.
        """
        raw = self.connection.connection
        known, is_above = getattr(self._local, "isolation", (None, False))
        if known is not raw:
            ((level,),) = self.execute("SHOW transaction_isolation", {}).rows
            is_above = not level.startswith("read ")
            self._local.isolation = raw, is_above
        if is_above:
            self.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED", {})

    def _call_qualified(self, work: Callable[[], T]) -> T:
        """Call ``work``, in which the ORM names the schema of our tables."""
        connection = self.connection
        if connection.vendor != "postgresql":
            return work()
        usual = connection.execute_wrappers
        try:
            # An interrupt in execute_wrapper() could remove a wrapper of the caller.
            connection.execute_wrappers = [*usual, self._qualify]
            return work()
        finally:
            connection.execute_wrappers = usual

    def _qualify(self, execute: Any, sql: Any, *arguments: Any) -> Any:
        """Name the schema of our tables in what the ORM writes.

        The ORM itself qualifies the tables in SELECT alone, see ``dlocks.models``.
        """
        for verb in ("INSERT INTO ", "UPDATE ", "DELETE FROM "):
            ours = tuple(f'{verb}"{table}"' for table in TABLES.values())
            if isinstance(sql, str) and sql.startswith(ours):
                schema = self.connection.ops.quote_name(self.schema)
                sql = f"{verb}{schema}.{sql.removeprefix(verb)}"
        return execute(sql, *arguments)

    def _call_limited(self, work: Callable[[], T]) -> T:
        """Call ``work``, and let the server end the session if it idles for 2 s."""
        connection, names = self.connection, self.engine.idle
        if not names:
            # On PostgreSQL, the statement that locks the row sets this.
            return work()
        limits = [
            f"@dlocks_{one} = @@SESSION.{one}, SESSION {one} = 2" for one in names
        ]
        usual = (f"SESSION {one} = @dlocks_{one}" for one in names)
        self.execute(f"SET {', '.join([self.engine.plain_reads, *limits])}", {})
        session = connection.connection
        try:
            return work()
        finally:
            if connection.connection is session:
                try:
                    self.execute(f"SET {', '.join(usual)}", {})
                except Error:  # The server may have ended the session.
                    connection.close()

    # Errors.

    def run(
        self,
        work: Callable[..., T],
        *arguments: Any,
        flush: bool = True,
        writes: bool = True,
    ) -> T:
        """Call ``work``, and retry it after lost races and lost connections.

        It is one statement or one transaction, and may be executed twice. Raise
        RowLockedError if another transaction has locked a row, and LockBackendError for
        other errors.

        On SQLite, what only reads waits for as long as its connection says, usually
        5 s. It has to wait only while the writer commits, and has no other way to go
        on.
        """
        connection = self.connection
        inside = in_transaction(connection)
        self._connect(connection)
        handled = sys.exc_info()[1]
        tries, reconnected, may_have_run = 0, False, False
        while True:
            session = connection.connection
            try:
                # The ORM closes cursors without wrapping errors.
                with connection.wrap_database_errors:
                    if self.engine.one_writer and writes and not inside:
                        call = partial(work, *arguments)
                        return call_as_writer(connection, call, flush=flush)
                    return work(*arguments)
            except Error as error:
                interrupt = interrupt_in(connection, error, handled)
                if interrupt is not None:
                    # The cleaning up after it has failed too.
                    if not inside:
                        abandon(connection)
                    raise interrupt from None
                code = self.engine.code_of(error)
                ends = inside and code in self.engine.read_only
                if code in self.engine.locked and not ends:
                    raise RowLockedError from error
                if inside:
                    rolled_back = code in self.engine.rolled_back
                    ended = rolled_back or has_aborted(connection, code)
                    if ended and connection.in_atomic_block:
                        # The server has. Django would commit the later writes of the
                        # caller without the earlier ones.
                        transaction.set_rollback(True, using=self.database)
                    raise self.failure(error) from error
                if code in self.engine.lost_race and tries < CONFLICTS:
                    clock.back_off(min(0.004 * 2**tries, CONFLICT_DELAY))
                    tries += 1
                elif not reconnected and self._is_lost(connection, session, error):
                    reconnected = True
                    # The server may have carried it out before the loss.
                    may_have_run = not self.failure(error).changed_nothing
                else:
                    self._drop_half_made(connection)
                    failure = self.failure(error)
                    failure.changed_nothing &= not may_have_run
                    raise failure from error
            except (StepError, LockError):
                raise
            except BaseException:
                # A signal, which can raise anything, has interrupted a statement. It
                # may still run, or its reply be unread.
                if not inside:
                    abandon(connection)
                raise

    def _connect(self, connection: BaseDatabaseWrapper) -> None:
        raw = connection.connection
        if raw is None:
            inside = connection.in_atomic_block
            try:
                connection.ensure_connection()
            except Error as error:
                self._drop_half_made(connection)
                raise self.failure(error, was_sent=False) from error
            except BaseException:
                # A signal has interrupted it. Django would keep the connection without
                # its settings and functions.
                if not inside:
                    abandon(connection)
                raise
        elif (lock := getattr(raw, "lock", None)) is not None and lock.locked():
            # A signal handler has struck within a statement. A cursor of psycopg would
            # wait for this lock, which its own thread has.
            raise nested_request()

    def _is_lost(
        self, connection: BaseDatabaseWrapper, session: Any, error: Error
    ) -> bool:
        """Return whether the session is lost, and close a lost connection."""
        code = self.engine.code_of(error)
        if code in self.engine.read_only:
            # The server became a replica. A pool would hand the session out again.
            if connection.vendor == "postgresql" and connection.connection is not None:
                with suppress(Exception):
                    connection.connection.close()
            close_lost(connection)
            return True
        if code in self.engine.desynchronised and is_in_statement():
            # To close the connection would end the outer statement.
            raise nested_request() from error
        self._drop_half_made(connection)
        if connection.connection is not session:
            # PostgreSQL ends a session that idled in a step with an InternalError.
            return True
        if isinstance(error, (OperationalError, InterfaceError)) or (
            code is None or code in self.engine.desynchronised
        ):
            if connection.is_usable():
                return False
            close_lost(connection)
            return True
        return False

    def _drop_half_made(self, connection: BaseDatabaseWrapper) -> None:
        """Close a failed connection that appears to be in a transaction.

        No transaction was open, but the connection failed before it returned to
        autocommit. Django would keep it, and treat the next atomic() as a nested one.
        """
        if connection.connection is not None and self.in_transaction:
            abandon(connection)

    def failure(self, error: Error, *, was_sent: bool = True) -> LockBackendError:
        """Return the error of a request that failed, with the way out."""
        engine = vars(self).get("engine")
        return failure_of(error, self.database, engine, was_sent=was_sent)


def in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the next statement is not committed by itself."""
    if connection.in_atomic_block:
        return True
    if connection.connection is None:
        return not connection.settings_dict["AUTOCOMMIT"]
    return not connection.autocommit
