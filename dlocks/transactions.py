"""What the transactions open in this thread mean for a lease that is taken or left inside them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import Error

from dlocks.backends.database.dialects import dialect_of


class OpenTransaction:
    """One transaction, and whether it is over; to be made in its own thread, to be asked from any."""

    def __init__(self, connection: BaseDatabaseWrapper, at_commit: Callable[[], object]) -> None:
        self._connection = connection
        own = list(_own_blocks(connection))
        self._in_testcase = len(own) < len(connection.atomic_blocks)
        self._block = own[0] if own else None
        # Django empties this list after the commit and after the rollback, and has no other sign of a rollback. The
        # empty set of savepoints keeps the entry when an inner block is rolled back.
        self._entry = cast("Any", (set(), at_commit, True))
        connection.run_on_commit.append(self._entry)

    @property
    def over(self) -> bool:
        """Whether the outermost block was committed or rolled back; a TestCase's own does not count."""
        if not any(entry is self._entry for entry in self._connection.run_on_commit):
            return True
        return self._in_testcase and not any(block is self._block for block in self._connection.atomic_blocks)


def _own_blocks(connection: BaseDatabaseWrapper) -> Iterator[Any]:
    """Yield the atomic blocks, outermost first, that are not a TestCase's own."""
    return (block for block in connection.atomic_blocks if not getattr(block, "_from_testcase", False))


def open_connections() -> Iterator[BaseDatabaseWrapper]:
    """Yield this thread's connections that are in a transaction, other than a TestCase's own."""
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block:
            if any(_own_blocks(connection)):
                yield connection
        elif connection.connection is not None and not connection.autocommit:
            yield connection


def warn_of_old_snapshots(key: str) -> None:
    """Warn when a lease is taken in a transaction that may not see what the last holder did."""
    for connection in open_connections():
        if connection.vendor not in {"postgresql", "mysql"}:
            continue
        try:
            with connection.cursor() as cursor:
                cursor.execute(f"SELECT {dialect_of(connection).isolation}")
                level = cursor.fetchone()[0].upper().replace("-", " ")
        except Error:
            # The transaction is broken; nothing will come of it.
            continue
        if level not in {"READ COMMITTED", "READ UNCOMMITTED"}:
            warnings.warn(
                f"The lease on {key!r} is taken inside a transaction on {connection.alias!r} at {level}, whose "
                "snapshot may be older than the lock and would not show what the last holder did. Take the lock "
                "before the transaction begins, or run it at READ COMMITTED.",
                RuntimeWarning,
                stacklevel=5,
            )
