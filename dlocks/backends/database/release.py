"""Release of a key, a shared hold or a position in the queue."""

from __future__ import annotations

import random
import time
from contextlib import nullcontext, suppress
from functools import partial

from dlocks.backends import table
from dlocks.backends.database.admission import Admission
from dlocks.backends.database.fragments import MICROSECONDS
from dlocks.backends.database.own_row import RELEASE_RETRY_LIMIT, ROW_LOCK_LIMIT
from dlocks.backends.database.rows import LockedRow
from dlocks.backends.database.watchdog import table_watchdog
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.sql.dialect import KEY
from dlocks.values import Claim


class Release(Admission):
    """The part that releases claims, and lets the queue advance."""

    _releases: dict[bool, str]

    def release(self, claim: Claim, *, failed: bool = False, keep: float = 0.0) -> bool:
        if claim.scope == "transaction" and not claim.shared and self.in_transaction():
            if self.connection.needs_rollback:
                # The rollback releases it.
                return True
            return self._release_on_commit(claim, failed=failed, keep=keep)
        session, began = self._session(), clock.now()
        if failed:
            # The caller may have timed out as a waiter. Then it has no time left.
            with self._with_short_timeout():
                released = self._release(claim, failed=failed, keep=keep)
        else:
            with table_watchdog.waiting_allowed():
                released = self._release(claim, failed=failed, keep=keep)
        if released:
            return True
        return not claim.shared and self._was_released([claim], session, began)

    def _release(self, claim: Claim, *, failed: bool, keep: float) -> bool:
        if not claim.shared:
            contended = not keep and claim.key in self._contended_keys
            if contended and self._hand_over(claim, failed=failed):
                return True
            if self._release_at_once(claim, failed=failed, keep=keep):
                self._contended_keys.discard(claim.key)
                return True
            # The key has waiters, or the claim has something else to release.
            if not keep and not contended and self._hand_over(claim, failed=failed):
                return True
        return self._release_queued(claim, failed=failed, keep=keep)

    def _release_at_once(self, claim: Claim, *, failed: bool, keep: float) -> bool:
        """Release the key in one statement if it has no waiters."""
        # A crash of the server may lose the release of a lease. Then the lease expires,
        # and there is no other harm.
        without_flush = not keep and not self.in_transaction()
        if (sql := self._releases.get(without_flush)) is None:
            assignments = (
                "status = %(status)s, hold_count = 0, end_time ="
                f" {self.dialect.after('keep')}"
            )
            where = f"{KEY} AND owner = %(owner)s AND waiters = 0"
            sql = self._sql(self.dialect.release, assignments, where)
            sql = self._releases[without_flush] = sql + (
                self.dialect.without_flush if without_flush else ""
            )
        parameters = {
            "status": "F" if failed else "S",
            "keep": round(keep * MICROSECONDS),
            "key": claim.key,
            "after_key": claim.key + "\0",
            "owner": claim.owner,
        }
        with self._without_flush() if without_flush else nullcontext():
            return self._count(sql, parameters, locked=lambda: 0) == 1

    def _release_queued(self, claim: Claim, *, failed: bool, keep: float) -> bool:
        """Release the key, the shared hold or the queue position of a claim.

        The queue advances.
        """
        # Seconds left of its lease if another transaction has locked the lock row. None
        # if the row could not be read.
        left: float | None = None
        released = False

        def step(row: LockedRow | None) -> bool | None:
            nonlocal left, released
            if row is not None:
                end = partial(table.release, keep=keep)
                status = "F" if failed else "S"
                ended, _ = self._apply(row, end, claim, status=status)
                # The claim may have been released before, and the reply was lost.
                released = released or ended
                return released
            # The lock row is locked by another transaction.
            if (mine := self._row_of(claim)) is not None:
                number, version, seconds = mine
                if keep or self._lock_claims([number]):
                    return None
                # The next step that locks the lock row counts the remaining claims.
                self._delete_claims("id = %(id)s", {"id": number})
                unclocked = self.observations is not None
                released = version is not None and (seconds > 0 or unclocked)
                return released
            # It may be the claim's.
            sql = f"SELECT {{left}} FROM {{locks}} WHERE {KEY} AND owner = %(owner)s"
            rows = self._rows(self._text(sql), {"key": claim.key, "owner": claim.owner})
            left = float(rows[0][0]) if rows else 0.0
            return None if rows else released

        def busy() -> bool | None:
            # While SQLite's writer is busy, a claim that holds nothing need not leave.
            # It is skipped soon in any case.
            if self.dialect.one_writer and failed and self._only_waits(claim):
                raise LockBackendError(
                    f"The single writer of database {self.database!r} is busy."
                )
            return None

        began = clock.real_now()
        while clock.real_now() < began + (
            ROW_LOCK_LIMIT if left is not None and left <= 0 else RELEASE_RETRY_LIMIT
        ):
            waits = left is not None and left > 0
            if (
                result := self._step(claim.key, step, busy=busy, waits=waits)
            ) is not None:
                return result
            if left is None or left <= 0:
                # Without jitter, a whole crowd would collide again at once.
                time.sleep(random.uniform(0, 0.01 if left is None else 0.5))  # noqa: S311
            # On PostgreSQL this statement waits for the row. On MariaDB the next step
            # waits.
            elif not keep and self._hand_over(claim, failed=failed):
                return True
        if left is not None and left <= 0:
            # The lease has expired, and a transaction that is still open is taking the
            # key over.
            return False
        raise LockBackendError(
            f"The lock row of {claim.key!r} on database {self.database!r} is locked by"
            " another transaction."
        )

    def _only_waits(self, claim: Claim) -> bool:
        """Return whether a claim holds nothing and is at most queued.

        Return False if this could not be read.
        """
        with suppress(LockBackendError):
            row = self._row_of(claim)
            return not self._holds_key(claim) if row is None else row[1] is None
        return False
