"""The backends with locks in the database, which differ in how they take a free key.

They share the table and exclude each other.
"""

from __future__ import annotations

from typing import Any, ClassVar

from dlocks.backends.database.backend import DatabaseBackend
from dlocks.values import Claim


class PessimisticBackend(DatabaseBackend):
    """A backend that locks the row, then writes it. This is the default.

    It uses ``SELECT ... FOR UPDATE SKIP LOCKED``, or on MariaDB an ``UPDATE`` that
    waits for no lock.
    """

    def take(self, claim: Claim) -> int | None:
        return self.write(claim)


class OptimisticBackend(DatabaseBackend):
    """A backend that reads the row and writes it if ``version`` is unchanged.

    The read takes no lock. A process remembers the versions that it wrote. So it need
    not read a key that no other process has acquired in the meantime. Waiting only
    reads.
    """

    REMEMBERED = 10_000

    def __init__(self, alias: str, **options: Any) -> None:
        super().__init__(alias, **options)
        self._versions: dict[str, int] = {}

    def take(self, claim: Claim) -> int | None:
        if claim.scope == "transaction":
            # At SERIALIZABLE, even a read would lock the row on InnoDB.
            return self.write(claim)
        token = None
        if (version := self._versions.pop(claim.key, None)) is not None:
            token = self.write(claim, version)
        key = self.store.peek(claim.key) if token is None else None
        if key is not None and (key.is_free or key.row.owner == claim.owner):
            token = self.write(claim, key.row.version)
        if token is not None:
            # The guess is that no other process acquires the key before this one does
            # again. A wrong guess costs a statement.
            if len(self._versions) >= self.REMEMBERED:
                self._versions.clear()
            self._versions[claim.key] = token
        return token


class InsertBackend(DatabaseBackend):
    """A backend that inserts and deletes the row; the unique key is the lock.

    The table contains only keys that are held. Between two rows of a key, tokens come
    from the clock alone. So they grow as long as the clock does not step back between
    two holds. A release needs the DELETE privilege.
    """

    supports_fencing: ClassVar[bool] = False
    deletes: ClassVar[bool] = True

    def take(self, claim: Claim) -> int | None:
        if claim.scope == "lease" and not claim.queued:
            self.store.insert(claim)
        # The token of the insert was calculated before the row existed. Another caller
        # may have held the key, with a larger token, in between. Draw it again.
        return self.write(claim)
