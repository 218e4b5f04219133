"""Session locks that belong to the caller's transaction, on PostgreSQL."""

from __future__ import annotations

from typing import Any

from dlocks.backends.session.claims import Claims
from dlocks.values import Claim, Grant


class TransactionLocks(Claims):
    """Locks that the server releases when the caller's transaction ends."""

    def in_transaction(self, connection: Any = None) -> bool:
        # Only on PostgreSQL can a lock be part of a transaction.
        return self._kind.in_transactions and super().in_transaction(connection)

    def _acquire_in_transaction(self, claim: Claim) -> Grant | None:
        ticks = self.dialect.ticks
        committed = (
            "current_setting('transaction_isolation') IN ('read committed', 'read"
            " uncommitted')"
        )
        sql = (
            f"SELECT CASE WHEN NOT {committed} THEN -1 WHEN"
            f" pg_try_advisory_xact_lock(%(name)s) THEN {ticks} END"
        )
        ((token,),) = self._rows(sql, {"name": self._name(claim.key)})
        if token == -1:
            raise RuntimeError(
                f"{claim.key!r} cannot be locked in this transaction, which runs above"
                f" READ COMMITTED on database {self.database!r}. Its snapshot may be"
                " older than the lock and hide the last holder's changes. Acquire the"
                " lock before the transaction begins, or run it at READ COMMITTED."
            )
        return None if token is None else Grant(token)

    def _held_by_transaction(self, claim: Claim) -> tuple[str, dict[str, Any]]:
        sql = (
            "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND"
            " granted AND pid = pg_backend_pid() AND (classid::bigint << 32 |"
            " objid::bigint) = %(name)s"
        )
        return sql, {"name": self._name(claim.key)}
