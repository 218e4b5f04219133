"""Granting of a key to its next waiters, and its handover by a release."""

from __future__ import annotations

from dlocks.backends import table
from dlocks.backends.database.rows import LockedRow
from dlocks.backends.database.sending import CONTENTION_TRIES
from dlocks.backends.database.store import Store
from dlocks.values import Claim, Ticket

# How long, on PostgreSQL, a statement waits for the lock row: to release the key, to
# advance its queue, and to advance the queues of many keys.
RELEASE_LOCK_TIMEOUT, ADVANCE_LOCK_TIMEOUT, ADVANCE_MANY_LOCK_TIMEOUT = (
    "200ms",
    "20ms",
    "1ms",
)


class Admission(Store):
    """The part that advances the queue of a key, in a step or in one statement."""

    def move_on(self, key: str) -> bool:
        """Grant the key to its first waiter if it is free.

        Return True if no holder or waiter is in the way any more.
        """
        if self._advance(key):
            return False

        def step(row: LockedRow | None) -> bool:
            if row is None:
                return False
            self._apply(row, table.tidy)
            return row.is_free and not row.waiters and not row.shares

        return self._step(key, step, busy=lambda: False)

    def _advanced(
        self, key: str, *, in_passing: bool = False
    ) -> dict[str, Ticket] | None:
        """Advance the queue, and return the tickets of the granted claims by owner.

        Return None if a transaction has locked the row.
        """
        if self._advance(
            key,
            row_wait=ADVANCE_MANY_LOCK_TIMEOUT if in_passing else ADVANCE_LOCK_TIMEOUT,
        ):
            # The next poll shows which claim was granted.
            return {}
        tries_if_locked = 0 if in_passing else CONTENTION_TRIES
        return self._step(
            key,
            lambda row: self._apply(row, table.tidy)[1] if row else None,
            busy=dict,
            tries_if_locked=tries_if_locked,
        )

    def _advance(self, key: str, *, row_wait: str = ADVANCE_LOCK_TIMEOUT) -> bool:
        """Grant a released key to the first waiter, in one round trip.

        Return False if this was not possible.
        """
        if not self.dialect.hand_over or self.in_transaction():
            return False
        parameters = {"key": key, "owner": "", "status": "S"}
        free = "status <> 'P' AND end_time <= {now}"
        sql = self._handing_over(free, self.dialect.if_taken, row_wait=row_wait)
        return any(taken for taken, _ in self._was_handed_over(sql, parameters))

    def _hand_over(self, claim: Claim, *, failed: bool) -> bool:
        """Release the key and grant it to the first waiter, in one statement.

        Return False if this was not possible.
        """
        if not self.dialect.hand_over or self.in_transaction():
            # The statement is a transaction of its own.
            return False
        parameters = {
            "key": claim.key,
            "owner": claim.owner,
            "status": "F" if failed else "S",
        }
        sql = self._handing_over(
            "owner = %(owner)s AND status = 'P'", row_wait=RELEASE_LOCK_TIMEOUT
        )
        for taken, waiters in self._was_handed_over(sql, parameters):
            if not waiters:
                self._contended_keys.discard(claim.key)
            elif not taken:
                # The waiters joined after this statement had begun, want shared holds,
                # or have sent no heartbeat.
                self._advanced(claim.key)
            return True
        return False

    def _handing_over(
        self, condition: str, if_taken: str = "", *, row_wait: str
    ) -> str:
        dialect = self.dialect
        text = dialect.hand_over.replace("{row_wait}", row_wait)
        return self._text(
            text.replace("{condition}", condition).replace("{if_taken}", if_taken)
        )
