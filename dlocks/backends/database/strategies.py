"""The backends with locks in the database, which differ in how they acquire a row.

They share the table and exclude each other.

* ``PessimisticBackend`` locks the row without waiting, and writes it, in one statement.
  It uses ``SELECT ... FOR UPDATE SKIP LOCKED``, or on MariaDB an ``UPDATE`` that waits
  for no lock.
* ``OptimisticBackend`` reads the row without a lock, and writes it if ``version`` is
  unchanged.
* ``InsertBackend`` inserts and deletes the row. The unique key itself is the lock.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from django.db import transaction

from dlocks.backends.base import Backend
from dlocks.backends.database.backend import DatabaseBackend
from dlocks.backends.database.rows import Row
from dlocks.sql.dialect import KEY
from dlocks.values import Claim


class PessimisticBackend(DatabaseBackend):
    """A backend that locks the row, then writes it. This is the default."""

    def _take(self, claim: Claim) -> tuple[int | None, Row | None]:
        return self._grant_or_take_over(claim)


class OptimisticBackend(DatabaseBackend):
    """A backend that reads the row and writes it if ``version`` is unchanged.

    The read takes no lock. A process remembers the versions that it wrote. So it need
    not read a key that no other process has acquired in the meantime. Waiting only
    reads.
    """

    _REMEMBERED = 10_000

    def __init__(self, alias: str, **options: Any) -> None:
        super().__init__(alias, **options)
        self._versions: dict[str, int] = {}

    def _take(self, claim: Claim) -> tuple[int | None, Row | None]:
        version = self._versions.pop(claim.key, None)
        if version is not None:
            token = self._swap(claim, version)
            if token is not None:
                return token, None
        row = self._look(claim)
        if row is None or not row.free:
            return None, row
        return self._swap(claim, row.version, stale=row.stale), row

    def _swap(self, claim: Claim, version: int, *, stale: bool = False) -> int | None:
        token = self._grant(
            claim, "version = %(version)s", stale=stale, version=version
        )
        if token is not None:
            # The guess is that no other process acquires the key before this one does
            # again. A wrong guess costs a read.
            if len(self._versions) >= self._REMEMBERED:
                self._versions.clear()
            self._versions[claim.key] = token
        return token


class InsertBackend(DatabaseBackend):
    """A backend that inserts and deletes the row; the unique key is the lock.

    The table contains only keys that are held. Between two rows of a key, tokens come
    from the clock alone. So they grow as long as the clock does not step back between
    two holds. A release needs the DELETE privilege.
    """

    # Its rows are inserted and deleted one by one.
    acquire_all = Backend.acquire_all
    release_all = Backend.release_all
    supports_fencing: ClassVar[bool] = False

    def _take(self, claim: Claim) -> tuple[int | None, Row | None]:
        if claim.scope == "lease":
            # On other engines, an insert could wait for a transaction that has locked
            # the row.
            row = None if self.connection.vendor == "sqlite" else self._look(claim)
            if row is None and (token := self._insert(claim)) is not None:
                # The token was calculated before the row existed. Another caller may
                # have held the key, with a larger token, in between. On SQLite it was
                # calculated under the lock of the one writer.
                return (
                    token
                    if self.connection.vendor == "sqlite"
                    else self._draw_again(claim)
                ), None
        return self._grant_or_take_over(claim)

    def _draw_again(self, claim: Claim) -> int | None:
        """Return a new token for this claim's row, or None if the row is lost."""
        read = partial(
            self._own_row,
            f"{KEY} AND owner = %(owner)s",
            {"key": claim.key, "owner": claim.owner},
        )
        return self._retry_release(lambda: self._grant(claim), claim.key, read)

    def _insert(self, claim: Claim) -> int | None:
        if self.connection.vendor == "mysql":
            before, after, first = "INSERT IGNORE", "", "LAST_INSERT_ID({ticks})"
        else:
            before, after, first = "INSERT", "ON CONFLICT DO NOTHING", "{ticks}"
        values = (
            "%(key)s, %(status)s, %(owner)s, %(holder)s, %(owner_ip)s, {now}, {end},"
            " 1{at_once_term}, " + first
        )
        sql = self._sql(
            self._insertion,
            self.dialect.at_once + before,
            values,
            after + self.dialect.returning,
        )
        return self._granted(sql, self._parameters(claim))

    def release(self, claim: Claim, *, failed: bool = False, keep: float = 0.0) -> bool:
        # A row deleted by an open transaction would make all inserts wait. So it is
        # deleted after the commit.
        if (
            claim.scope == "transaction"
            and self.connection.in_atomic_block
            and not keep
        ):

            def delete() -> None:
                # This is not a partial(), which has no name. Django logs the name of a
                # callback that fails after a commit.
                self._delete(claim)

            transaction.on_commit(delete, using=self.database, robust=True)
        return super().release(claim, failed=failed, keep=keep)

    def _release(self, claim: Claim, *, failed: bool, keep: float) -> bool:
        if claim.scope == "lease" and not keep and self._delete(claim):
            self._contended_keys.discard(claim.key)
            return True
        return super()._release(claim, failed=failed, keep=keep)

    def _delete(self, claim: Claim) -> bool:
        # Only once the clock has passed the token. Otherwise the next row could get the
        # same token.
        sql = self._sql(
            self.dialect.delete,
            f"{KEY} AND owner = %(owner)s AND version < {{ticks}} AND waiters = 0 AND"
            " shares = 0",
        )
        return (
            self._count(sql, {"key": claim.key, "owner": claim.owner}, locked=lambda: 0)
            == 1
        )
