"""The errors of a database: what they mean, and what remains after one."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import Error, IntegrityError

from dlocks.exceptions import LockBackendError
from dlocks.sql.engines import Engine, sqlstate_of

# The status of a connection of psycopg while a statement is running.
ACTIVE = 1
# Its status after a statement has failed in a transaction.
INERROR = 3
# The SQLSTATE of each later statement of that transaction (in_failed_sql_transaction).
IN_FAILED_TRANSACTION = "25P02"
# The code of MySQL and MariaDB for a request that comes before a reply was read.
OUT_OF_SYNC = 2014
# The functions of Django's cursor that call the driver.
STATEMENTS = {
    ("django.db.backends.utils", "_execute"),
    ("django.db.backends.utils", "_executemany"),
}


def failure_of(
    error: Error, database: str, engine: Engine | None, *, was_sent: bool = True
) -> LockBackendError:
    """Return the error of a request that failed, with the way out.

    ``engine`` is None if it is not known yet.
    """
    what = (
        f"A lock request to database {database!r} failed:"
        f" {type(error).__name__}: {error}"
    )
    code = None if engine is None else engine.code_of(error)
    # The server has refused to carry out the statement, for a reason with a way out.
    advice = ""
    if is_unmigrated(error):
        advice = how_to_migrate(database)
    elif engine is not None and code in engine.read_only:
        advice = f"The session cannot write: {engine.read_only_settings}."
    elif engine is not None and code in engine.denied:
        advice = engine.denied_advice
    failure = LockBackendError(f"{what.rstrip()}. {advice}" if advice else what)
    failure.changed_nothing = bool(advice) or not was_sent
    return failure


def how_to_migrate(database: str) -> str:
    """Return a sentence about how to create the tables."""
    name = str(connections[database].settings_dict["NAME"])
    # A test database is shared by the threads of its process.
    if name == ":memory:" or ("mode=memory" in name and "cache=shared" not in name):
        return (
            f"DATABASES[{database!r}] is in memory, where each thread has a database of"
            " its own: only the thread that ran 'migrate' finds the table. Use a"
            " database in a file."
        )
    return f"Run 'manage.py migrate dlocks --database {database}'."


def interrupt_in(
    connection: Any, error: BaseException | None, handled: BaseException | None
) -> BaseException | None:
    """Return the exception that interrupted what failed, or None.

    Django and the driver clean up after it. If this fails, the error hides the
    interrupt. ``handled`` is the exception that the caller was already handling. It is
    in the context of every error.

    What is no Exception is an interrupt. An Exception may be the driver's own, unless a
    statement is still running, as after an interrupted COMMIT.
    """
    raw = connection.connection
    if connection.vendor == "mysql":
        is_running = error is not None and error.args[:1] == (OUT_OF_SYNC,)
    else:
        is_running = (
            connection.vendor == "postgresql"
            and raw is not None
            and not raw.closed
            and raw.info.transaction_status == ACTIVE
        )
    while error is not None and error is not handled:
        is_failure = isinstance(error, (Error, connection.Database.Error))
        if not isinstance(error, Exception) or (is_running and not is_failure):
            return error
        error = error.__context__
    return None


def has_aborted(connection: Any, code: object) -> bool:
    """Return whether the error with this code has aborted the caller's transaction.

    On PostgreSQL any error does, and on SQLite that of a full disk. Its COMMIT would
    then write nothing, and raise no error.
    """
    raw = connection.connection
    if raw is None or connection.vendor == "mysql":
        return False
    if connection.vendor == "sqlite":
        return not raw.in_transaction
    # An earlier error of the caller has aborted it if this statement was refused.
    return (
        not raw.closed
        and raw.info.transaction_status == INERROR
        and code != IN_FAILED_TRANSACTION
    )


def is_refused(error: LockBackendError) -> bool:
    """Return whether a constraint, or a trigger, has refused what a request writes.

    Perhaps another row has the same number already.
    """
    return isinstance(error.__cause__, IntegrityError)


def is_in_statement() -> bool:
    """Return whether this thread is in a statement of Django's cursor.

    Then a signal handler or the garbage collector has called this.
    """
    frame = inspect.currentframe()
    while frame is not None:
        module, name = frame.f_globals.get("__name__"), frame.f_code.co_name
        if (module, name) in STATEMENTS:
            return True
        frame = frame.f_back
    return False


def not_installed() -> ImproperlyConfigured:
    return ImproperlyConfigured(
        "Add 'dlocks' to INSTALLED_APPS, and run 'manage.py migrate'."
    )


def unusable(key: str, database: str) -> LockBackendError:
    return LockBackendError(
        f"The row of {key!r} on database {database!r}, or one of its claims, exists,"
        " but this session does not find or change it. Check whether row security"
        " hides it, or a trigger keeps it ('manage.py check --database' reports that as"
        " dlocks.W010 or dlocks.W011)."
    )


def is_unmigrated(error: BaseException) -> bool:
    """Return whether the error means that a table or column of dlocks is missing."""
    if isinstance(error, LockBackendError) and error.__cause__ is not None:
        error = error.__cause__
    # These are undefined_table and undefined_column of PostgreSQL, the codes of MySQL
    # and MariaDB, and SQLite's messages.
    return (
        sqlstate_of(error) in {"42P01", "42703"}
        or error.args[:1] in {(1146,), (1054,)}
        or any(words in str(error) for words in ("no such table", "no such column"))
    )


def abandon(connection: BaseDatabaseWrapper) -> None:
    """Roll back and close a connection that was interrupted, perhaps at its COMMIT.

    No transaction of the caller is open. Django does not know whether one of ours is,
    and would treat the next one as nested.
    """
    connection.in_atomic_block = connection.needs_rollback = False
    connection.savepoint_ids, connection.atomic_blocks = [], []
    connection.run_on_commit = []
    connection.closed_in_transaction = False
    raw = connection.connection
    if connection.vendor == "postgresql" and raw is not None:
        # A rollback would wait for the statement that is still running.
        with suppress(Exception):
            raw.close()
    elif raw is not None:
        # Django does not close a database in memory.
        with suppress(Exception):
            raw.rollback()
        connection.autocommit = True
    with suppress(Exception):
        connection.close()
