"""Locks inside the caller's transaction, and rows that other transactions keep."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from django.db.utils import DatabaseError

from dlocks.backends.base import Runtime
from dlocks.backends.database.fragments import MICROSECONDS, SHARE
from dlocks.backends.database.own_row import OwnRow
from dlocks.backends.database.renewal import TAKEN
from dlocks.backends.database.sending import T
from dlocks.exceptions import LockBackendError
from dlocks.sql.dialect import KEY
from dlocks.sql.innodb import InnoDB
from dlocks.transactions import in_testcase
from dlocks.values import Claim

# Reads that find a row locked before a transaction is assumed to keep it.
LOCKED_TRIES = 4

# The isolation levels at which each statement takes its own snapshot.
STATEMENT_SNAPSHOTS = {"READ COMMITTED", "READ UNCOMMITTED"}


class TransactionLocks(OwnRow):
    """The part that keeps rows for a transaction, and finds those that others keep."""

    runtime: Runtime

    def keeps_shares(self) -> bool:
        """Return whether no other caller can exist beside the open transaction.

        Then even a shared hold can belong to it. In a TestCase no other caller can
        wait, and a committed row would remain for the next test.
        """
        return self.in_transaction() and (
            self.dialect.one_writer or in_testcase(self.connection)
        )

    def _run_outside(self, function: Callable[[], T]) -> T:
        """Call a function outside of the caller's transaction, where that can be."""
        if self.in_transaction() and not self.dialect.one_writer:
            return self.runtime.run(function)
        return function()

    def in_transactions(
        self, rows: Sequence[Any], table: str = "{locks}", primary: str = "key_resource"
    ) -> frozenset[Any]:
        """Return the rows that an open transaction has locked.

        ``rows`` are primary keys. On SQLite all of them are returned while another
        transaction writes, since that locks the whole database. None are returned where
        no other transaction can have locked them, as within a transaction on SQLite or
        in a TestCase.
        """
        if not rows or self.keeps_shares():
            return frozenset()
        if self.dialect.one_writer:
            sql = self._text(
                f"UPDATE {table} SET version = version WHERE {primary} IS NULL"
            )
            with self._with_short_timeout():
                return (
                    frozenset(rows)
                    if self._count(sql, {}, locked=lambda: -1) < 0
                    else frozenset()
                )
        # In a caller's transaction, a row locked by this read would stay locked until
        # the end.
        return self._run_outside(
            partial(self._find_transaction_locks, rows, table, primary)
        )

    def _find_transaction_locks(
        self, rows: Sequence[Any], table: str, primary: str
    ) -> frozenset[Any]:
        locked = frozenset(rows)
        index = " FORCE INDEX (PRIMARY)" if self.connection.vendor == "mysql" else ""
        for number in range(LOCKED_TRIES):
            if number:
                # Most statements lock a row for a moment only.
                time.sleep(random.uniform(0, 0.002 * 2**number))  # noqa: S311 (jitter)
            where, parameters = self._one_of(primary, list(locked))
            sql = (
                f"SELECT {primary} FROM {table}{index} WHERE"
                f" {where}{self.dialect.for_update}"
            )
            locked -= {row for (row,) in self._rows(self._text(sql), parameters)}
            if not locked:
                break
        return locked

    def _refuse_unfit_transaction(self, claim: Claim) -> None:
        # A snapshot that is older than the lock would not show the changes of the last
        # holder. A transaction that ends when it meets a locked row could not try at
        # all.
        dialect = self.dialect
        if claim.scope != "transaction" or dialect.read_committed is None:
            return
        level, all_or_nothing = self._isolation()
        if level not in STATEMENT_SNAPSHOTS:
            raise RuntimeError(
                f"{claim.key!r} cannot be locked in this transaction, which runs at"
                f" {level} on database {self.database!r}. Its snapshot may be older"
                " than the lock and hide the last holder's changes. Acquire the lock"
                " before the transaction begins, or run it at READ COMMITTED."
            )
        if all_or_nothing:
            raise RuntimeError(
                f"{claim.key!r} cannot be locked in this transaction. The server of"
                f" database {self.database!r} runs with innodb_rollback_on_timeout=ON,"
                " so a busy key would roll back the whole transaction. Acquire the lock"
                " before the transaction begins, or with scope='lease'."
            )

    def _isolation(self) -> tuple[str, bool]:
        """Return the isolation level, and the effect of a lock wait timeout.

        The second value is true if the timeout rolls back the whole transaction.
        """
        level, *all_or_nothing = self._rows(self.dialect.show_isolation, {})[0]
        return level.upper().replace("-", " "), any(all_or_nothing)

    def _release_on_commit(self, claim: Claim, *, failed: bool, keep: float) -> bool:
        dialect = self.dialect
        assignments = (
            "status = %(status)s, hold_count = 0, end_time ="
            f" {dialect.after('keep')}{dialect.count_in}"
        )
        parameters = {
            "status": "F" if failed else "S",
            "keep": round(keep * MICROSECONDS),
        }
        return self._write(
            claim,
            assignments,
            f"{KEY} AND owner = %(owner)s",
            parameters,
            dialect.tell_first,
        )

    def pin(self, claim: Claim, database: str) -> bool:
        if database == self.database:
            return self._pin(claim, self)
        there = copy.copy(self)
        # The schema in which the hold was granted. Sessions of the other alias may
        # begin with another search path.
        there._tables = self._tables
        there.database = database
        return there._pin(claim, self)

    def _pin(self, claim: Claim, own: TransactionLocks) -> bool:
        # The row is written, not only locked, because the other nodes of a Galera
        # cluster do not see row locks.
        parameters: dict[str, Any] = {
            "key": claim.key,
            "owner": claim.owner,
            "ttl": round(claim.ttl * MICROSECONDS),
        }
        if claim.shared:
            # The search for expired shared holds skips rows that are locked.
            live = SHARE if claim.late else self._live_share
            mine = f"owner = %(owner)s AND {live}"
            table, primary = "{claims}", "id"
        else:
            live = TAKEN if claim.late else self._live
            mine = f"{KEY} AND owner = %(owner)s AND {live}"
            table, primary = "{locks}", "key_resource"
        row = mine, parameters, table, primary
        read, write = partial(self._own_row, *row), partial(self._renew_picked, *row)
        if isinstance(self.dialect, InnoDB):
            # One statement at READ COMMITTED. At another level it finds and locks
            # nothing.
            if self._renew_picked(
                f"{mine} AND {self.dialect.read_committed}", parameters, table, primary
            ):
                return True
            level, rolls_back = self._isolation()
            if level not in STATEMENT_SNAPSHOTS:
                # A plain SELECT would take the transaction's snapshot. MariaDB then
                # refuses to lock a row that changed since (innodb_snapshot_isolation,
                # 11.6). The rows of a TestCase cannot be seen from outside.
                if not self.keeps_shares():
                    read = partial(own.runtime.run, partial(own._own_row, *row))
                if claim.shared:
                    if not (rows := read()):
                        return False
                    parameters["id"] = rows[0][1]
                write = partial(self._renew_by_primary_key, *row, rolls_back=rolls_back)
        return bool(self._retry_release(write, claim.key, read))

    def _renew_picked(
        self, mine: str, parameters: Mapping[str, Any], table: str, primary: str
    ) -> int:
        return self._count(self._renewal(table, mine, primary), parameters)

    def _renew_by_primary_key(
        self,
        mine: str,
        parameters: Mapping[str, Any],
        table: str,
        primary: str,
        *,
        rolls_back: bool,
    ) -> int:
        """Lock and write a row in an InnoDB transaction above READ COMMITTED.

        Return 0 if the row is locked. At that level a search by another index, or one
        that skips a locked row, also locks the gap beside the row until the transaction
        ends. Then no session can insert a row there. A search by the whole primary key
        does not lock the gap.
        """
        row = KEY if primary == "key_resource" else "id = %(id)s"
        indexed = f"{table} FORCE INDEX (PRIMARY)"
        try:
            self._rows(
                self._text(f"SELECT 1 FROM {indexed} WHERE {row} FOR UPDATE NOWAIT"),
                parameters,
            )
        except LockBackendError as error:
            if rolls_back or not (
                isinstance(error.__cause__, DatabaseError)
                and self.dialect.is_locked(error.__cause__)
            ):
                raise
            return 0
        writing = (
            f"UPDATE {indexed} SET end_time = {self._renewed} WHERE {row} AND {mine}"
        )
        return self._count(self._text(writing), parameters)
