"""The step: a short transaction that locks the row of a key."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from typing import Any

from django.db import transaction
from django.db.utils import DatabaseError, Error, InterfaceError, OperationalError

from dlocks.backends.base import TableLockedError
from dlocks.backends.database.in_transaction import TransactionLocks
from dlocks.backends.database.rows import LockedRow
from dlocks.backends.database.sending import CONTENTION_TRIES, T
from dlocks.backends.database.statements import NEVER
from dlocks.backends.table import Held, KeyState, Moment
from dlocks.exceptions import LockBackendError
from dlocks.runtime.pools import close_lost
from dlocks.sql.dialect import KEY
from dlocks.sql.prepared import is_in_progress
from dlocks.values import Claim

# Attempts to create the row of a key, per step.
CREATION_TRIES = 3


class Steps(TransactionLocks):
    """The part that executes steps, which lock the lock row first.

    So the steps of one key are serialized. A step is a short transaction of its own. It
    never waits for the lock row.
    """

    def _step(
        self,
        key: str,
        work: Callable[[LockedRow | None], T],
        *,
        busy: Callable[[], T],
        waits: bool = False,
        tries_if_locked: int = CONTENTION_TRIES,
    ) -> T:
        """Execute a step: lock a key's row and call ``work``, in a transaction.

        ``work`` receives the locked row. It receives None if another transaction has
        locked the row, and still had after ``tries_if_locked`` attempts. With
        ``waits``, the step first waits in the engine's own queue of the row, if the
        engine can limit that time.

        ``busy`` provides the result if that time has passed, or if SQLite's single
        writer stays busy. It also does so if another transaction has locked a claim
        that the step writes.
        """
        connection = self.connection
        ours = not self.in_transaction()
        tries, lock_tries, creations, reconnected = 0, 0, 0, False
        handled = sys.exc_info()[1]
        dialect = self.dialect
        locking = dialect.for_update_in_turn if waits else dialect.for_update
        limited = dialect.with_idle_limit if ours else nullcontext
        # If this fails, the error says that nothing was sent.
        self._session()
        while True:
            session = connection.connection
            raised: BaseException | None = None
            patiently = lock_tries < tries_if_locked
            try:
                block = transaction.atomic(using=self.database)
                with self._with_short_timeout(), limited(connection), block:
                    try:
                        row = self._lock(
                            key,
                            locking,
                            patiently=patiently,
                            bounded=ours,
                            creates=creations < CREATION_TRIES,
                        )
                        return work(row)
                    except BaseException as cause:
                        raised = cause
                        raise
            except _AbsentError:
                creations += 1
                self._create(key)
            except _LockedError:
                lock_tries += 2
                time.sleep(random.uniform(0, 0.0005 * lock_tries**2))  # noqa: S311 (jitter)
            except TableLockedError:
                raise
            except (Error, LockBackendError) as trouble:
                error = (
                    trouble.__cause__
                    if isinstance(trouble, LockBackendError)
                    else trouble
                )
                if not ours or not isinstance(error, (DatabaseError, InterfaceError)):
                    raise
                if is_in_progress(connection.connection):
                    raised = self._find_interrupt(error, handled)
                if raised and not isinstance(raised, (Error, LockBackendError)):
                    # The rollback has failed too.
                    self._end_interrupted(connection)
                    raise raised from None
                if isinstance(error, DatabaseError):
                    if dialect.is_locked(error):
                        # The statement has already waited for the lock.
                        return busy()
                    if self._again(error, tries):
                        tries += 1
                        continue
                if not reconnected and self._is_lost(connection, session, error):
                    reconnected = True
                    continue
                self._drop_half_made(connection)
                failure = self._failure(error)
                # The first session may have committed before it was lost.
                failure.changed_nothing = failure.changed_nothing and not reconnected
                raise failure from error
            except BaseException:
                if ours:
                    self._end_interrupted(connection)
                raise

    def _is_lost(self, connection: Any, session: Any, error: Error) -> bool:
        """Return whether a step failed with its session, and close that."""
        if self._is_left_read_only(connection, error):
            close_lost(connection)
            return True
        self._drop_half_made(connection)
        if session is None:
            if isinstance(error, (OperationalError, InterfaceError)):
                return True
        elif connection.connection is not session:
            # Django has reconnected. PostgreSQL ends a session that was idle in a
            # transaction for too long with an InternalError.
            return True
        if connection.connection is None or connection.is_usable():
            return False
        close_lost(connection)
        return True

    def _end_interrupted(self, connection: Any) -> None:
        """Roll back a step that was interrupted, perhaps at its BEGIN or COMMIT.

        Django does not know then whether a transaction is open. On SQLite, it would
        keep all other callers from writing.
        """
        connection.in_atomic_block = connection.needs_rollback = False
        connection.savepoint_ids, connection.atomic_blocks = [], []
        connection.run_on_commit = []
        connection.closed_in_transaction = False
        self.dialect.abort_statement(connection)
        if connection.connection is not None:
            # Django does not close a database in memory.
            with suppress(connection.Database.Error):
                connection.connection.rollback()
            connection.autocommit = True
        connection.close()

    def _find_interrupt(
        self, error: BaseException | None, handled: BaseException | None
    ) -> BaseException | None:
        """Return the exception that interrupted a COMMIT, or None.

        Django cleans up while the COMMIT is still running. This fails with an error of
        its own, which hides the interrupt. ``handled`` is the exception that the caller
        was already handling. It is in the context of every error.
        """
        connection: Any = self.connection
        while error is not None and error is not handled:
            if not isinstance(error, (Error, connection.Database.Error)):
                return error
            error = error.__context__
        return None

    def _lock(
        self, key: str, locking: str, *, patiently: bool, bounded: bool, creates: bool
    ) -> LockedRow | None:
        dialect = self.dialect
        parameters = {"key": key}
        if dialect.one_writer:
            # The first statement writes, because a transaction that has only read
            # cannot always continue with a write.
            self._count(
                self._text(f"UPDATE {{locks}} SET waiters = waiters WHERE {KEY}"),
                parameters,
            )
        # A process that is stopped in the middle of a step must not keep the key for
        # long. Neither must a process that waits for the row.
        bound = f", {dialect.bound}" if bounded and dialect.bound else ""
        sql = (
            "SELECT status, owner, version, waiters, shares, {left}, {ticks},"
            f" {{ends}}{bound} FROM {{locks}} WHERE {KEY}{locking}"
        )
        for found in self._rows(self._text(sql), parameters):
            status, owner, version, waiters, shares, left, ticks, ends = found[:8]
            grace = self.grace if self.observations is None else NEVER
            at = Moment(0.0, grace, int(ticks), datetime.now(UTC))
            held = Held(Claim(key=key, ttl=0.0, owner=owner), version, at.date, left)
            state = KeyState(version, held, status != "P")
            return LockedRow(key, state, at, waiters, shares, int(ends))
        # A transaction that does not end, such as that of a TestCase, may have created
        # the row. Then it is locked, although it cannot be seen.
        if creates and not self._rows(
            self._text(f"SELECT 1{bound} FROM {{locks}} WHERE {KEY}"), parameters
        ):
            raise _AbsentError
        if patiently:
            raise _LockedError
        return None

    def _create(self, key: str) -> None:
        """Create the row as free, in a statement that is committed by itself.

        An uncommitted insert would make all other callers wait.
        """
        inside = self.keeps_shares()
        at_once, term = ("", "") if inside else (self.dialect.at_once, "{at_once_term}")
        before, after = self.dialect.insert_or_ignore
        sql = self._sql(
            self._insertion,
            at_once + before,
            f"%(key)s, 'S', '', '', NULL, NULL, {{now}}, 0{term}, {{ticks}}",
            after,
        )

        def create() -> int:
            with self._with_short_timeout():
                return self._count(sql, {"key": key}, locked=lambda: 0)

        if self.in_transaction() and not inside:
            self.runtime.run(create)
        else:
            create()

    def _insertion(self, table: str, before: str, values: str, after: str) -> str:
        return (
            f"{before} INTO {table} (key_resource, status, owner, holder, owner_ip,"
            " begin_time, end_time, hold_count, version)"
            f" {self.dialect.new_row(table, values)} {after}"
        )


class _LockedError(Error):
    """A lock row that another transaction has locked at this moment."""


class _AbsentError(Error):
    """A key without a lock row."""
