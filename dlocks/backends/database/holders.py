"""Reading of the holders of a key, for messages, commands and the admin."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from dlocks.backends.database.fragments import BATCH, IN_QUEUE
from dlocks.backends.database.in_transaction import TransactionLocks
from dlocks.backends.database.inspector import holder_of
from dlocks.exceptions import LockBackendError
from dlocks.values import Holder, Kept


class Holders(TransactionLocks):
    """The part that reads holders, and the expired leases that transactions keep."""

    def kept(self, keys: Sequence[str] | None = None) -> Kept:
        """Return which expired leases are kept by open transactions.

        ``None`` covers all keys under the prefix. At most one batch is checked,
        starting with the leases that expired last. The result is empty if the database
        user may not lock rows.
        """
        of_keys, parameters = (
            self._of_prefix()
            if keys is None
            else self._one_of("key_resource", list(keys) or [""])
        )
        of_keys = of_keys if keys is None else f" AND {of_keys}"
        expired = f"end_time <= {{now}}{of_keys} ORDER BY end_time DESC LIMIT {BATCH}"
        sql = self._text(
            "SELECT key_resource, id FROM (SELECT key_resource, 0 AS id FROM {locks}"
            f" WHERE status = 'P' AND {expired}) AS alone UNION ALL SELECT"
            " key_resource, id FROM (SELECT key_resource, id FROM {claims} WHERE NOT"
            f" {IN_QUEUE} AND {expired}) AS shared"
        )
        found = self._rows(sql, parameters)
        with suppress(LockBackendError):
            return Kept(
                self.in_transactions(list(key for key, number in found if not number)),
                self.in_transactions(
                    list(number for _, number in found if number), "{claims}", "id"
                ),
            )
        return Kept()

    def holder(self, key: str) -> Holder | None:
        from dlocks.models import LockState

        row = self._holder_row(key, Kept())
        if (
            row is not None
            and row["state"] == LockState.STALE
            and (kept := self.kept([key])) != Kept()
        ):
            row = self._holder_row(key, kept)
        if row is None or row["state"] == LockState.FREE:
            return None
        return holder_of(row)

    def row_of(self, key: str, kept: Kept = Kept()) -> Any:  # noqa: B008 (immutable)
        from dlocks.models import ResourceLock

        rows = ResourceLock.objects.using(self.database).by_clock(kept)
        return self._run(lambda *_: rows.filter(pk=key).values().first())

    def _holder_row(self, key: str, kept: Kept) -> Any:
        from dlocks.models import LockState

        row = self.row_of(key, kept)
        if row is None or row["state"] != LockState.FREE or not row["shares"]:
            return row
        # A live hold comes before a stale one.
        return self._run(lambda *_: self.shares_of(key, kept).first())

    def shares_of(self, key: str, kept: Kept) -> Any:
        from dlocks.models import LockClaim

        shares = (
            LockClaim.objects.using(self.database)
            .by_clock(kept)
            .filter(key_resource=key, version__isnull=False)
        )
        return shares.order_by("state", "id").values()
