"""Writing of the lock row by its own holder, while others may lock it for moments."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dlocks.backends.database.fragments import MICROSECONDS
from dlocks.backends.database.statements import Statements
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.values import Claim

# Seconds for which a process that was stopped in the middle of a step may keep the lock
# row locked. This is the limit of ``Dialect.bound`` and a reserve.
ROW_LOCK_LIMIT = 3.0

# Seconds for which a release is retried while its lease is live. A thousand
# simultaneous callers may keep the row locked, one after another, for longer than
# ``ROW_LOCK_LIMIT``.
RELEASE_RETRY_LIMIT = 15.0


class OwnRow(Statements):
    """The part that reads and writes a holder's row, without waiting for its lock."""

    def _own_row(
        self,
        mine: str,
        parameters: Mapping[str, Any],
        table: str = "{locks}",
        column: str = "version",
    ) -> Any:
        """Return the seconds left of a lease, and the value of a column.

        ``mine`` is the condition for the row.
        """
        sql = self._text(f"SELECT {{left}}, {column} FROM {table} WHERE {mine}")
        return self._rows(sql, parameters)

    def _write(
        self,
        claim: Claim,
        assignments: str,
        where: str,
        parameters: Mapping[str, Any],
        returning: str = "",
    ) -> bool:
        """Write the holder's own row, without waiting for its lock.

        Return False if it no longer belongs to the holder.
        """
        parameters = {"key": claim.key, "owner": claim.owner, **parameters}
        if claim.scope == "transaction":
            # This transaction has locked the row already, unless the server has rolled
            # it back in the meantime.
            sql = self._sql(
                self.dialect.write_or_leave, assignments, where
            ) + self._text(returning)
            return self._count(sql, parameters, locked=lambda: 0) == 1
        sql = self._sql(self.dialect.compare_and_swap, assignments, where)
        write = partial(self._count, sql, parameters, locked=lambda: 0)
        return bool(
            self._retry_release(
                write,
                claim.key,
                partial(self._own_row, where, parameters),
                taken_over=True,
            )
        )

    def _retry_release(
        self,
        write: Callable[[], int | None],
        key: str,
        read: Callable[[], Any],
        *,
        taken_over: bool = False,
    ) -> int | None:
        """Retry to write the holder's own row, which others lock for moments.

        Return None if it no longer belongs to the holder. ``read`` returns the row,
        beginning with the seconds left of its lease, or nothing.
        """
        began = clock.real_now()
        for number in itertools.count():
            if written := write():
                return written
            # The row is missing or locked. A renewal, a poll or a step of the queue
            # locks it for a moment, and an open transaction for longer.
            left = read()
            if not left:
                return None
            if clock.real_now() > began + (
                RELEASE_RETRY_LIMIT if float(left[0][0]) > 0 else ROW_LOCK_LIMIT
            ):
                break
            time.sleep(random.uniform(0, 0.002 * 2 ** min(number, 5)))  # noqa: S311 (jitter)
        by_clock = self.observations is None and not self.dialect.one_writer
        if taken_over and by_clock and float(left[0][0]) <= 0:
            # The lease has expired, and an open transaction is taking it over.
            return None
        raise LockBackendError(
            f"The lock row of {key!r} on database {self.database!r} is locked by"
            " another transaction."
        )

    def _was_released(
        self, claims: Sequence[Claim], session: Any, began: float
    ) -> bool:
        """Return whether a failed release already released the keys before.

        The reply may be lost together with the session. The statements were then sent
        again, and it is unknown whether the first ones were executed. This is only
        possible if the release ``began`` in another session.

        Every grant, and every clearing by a person, takes its version from the clock.
        If the version is older than the release, the key was taken from the claim
        before, and its work may have overlapped with another holder's. If the version
        is newer, the claim held the key until the release began. Its work was then
        exclusive, no matter which of the two ended the hold.
        """
        if self._session() is session:
            return False
        owners = {claim.key: claim.owner for claim in claims}
        keys, parameters = self._one_of("key_resource", list(owners))
        sql = (
            "SELECT key_resource, owner, status, {ticks} - version FROM {locks}"
            f" WHERE {keys}"
        )
        rows = self._rows(self._text(sql), parameters)
        # The time is read after the reply, so every grant since the beginning is
        # younger than this.
        since = (clock.now() - began) * MICROSECONDS
        # A missing row has no version. It only shows that no caller holds the key. This
        # release may be the reason.
        return all(
            status != "P" if owner == owners[key] else age <= since
            for key, owner, status, age in rows
        )
