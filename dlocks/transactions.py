"""What the transactions open in this thread mean for a lease that is taken or left inside them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import Error

from dlocks.backends.database.dialects import dialect_of


class Mark:
    """
    A mark set in a connection's transaction, and whether it still stands; set in its own thread, asked from any.

    Django has no sign of a rollback but the list of what to do on commit, so the mark is an entry there: the list is
    emptied after the commit, after the rollback and at a close, and rid of what a savepoint's rollback undid. (The
    identity of an ``Atomic`` says nothing: a decorator has one for all its calls.)
    """

    def __init__(self, connection: BaseDatabaseWrapper, savepoints: set[str], block: Any = None) -> None:
        self._connection = connection
        self._savepoints = savepoints
        self._block = block
        self.at_commit: list[Callable[[], object]] = []
        # Django names by it what fails after a commit.
        self.__qualname__ = type(self).__name__
        connection.run_on_commit.append(cast("Any", (savepoints, self, True)))

    def __call__(self) -> None:
        for callback in self.at_commit:
            callback()

    @classmethod
    def here(cls, connection: BaseDatabaseWrapper) -> Mark:
        """Mark where the caller stands: it stands until that is rolled back, or committed for good."""
        savepoints = {sid for sid in connection.savepoint_ids if sid is not None}
        return cls._standing(connection, savepoints, None) or cls(connection, savepoints)

    @classmethod
    def whole(cls, connection: BaseDatabaseWrapper) -> Mark:
        """Mark the transaction as a whole, whatever is rolled back inside; in a TestCase, its outermost own block."""
        own = list(_own_blocks(connection))
        block = own[0] if len(own) < len(connection.atomic_blocks) else None
        return cls._standing(connection, set(), block) or cls(connection, set(), block)

    @classmethod
    def _standing(cls, connection: BaseDatabaseWrapper, savepoints: set[str], block: Any) -> Mark | None:
        for found, mark, *_ in reversed(connection.run_on_commit):
            if isinstance(mark, cls) and found == savepoints and mark._block is block:
                return mark
        return None

    @property
    def stands(self) -> bool:
        connection = self._connection
        if connection.connection is None or connection.closed_in_transaction:
            return False
        # The set, not the entry: a savepoint's rollback makes the others' entries anew.
        if not any(entry[0] is self._savepoints for entry in connection.run_on_commit):
            return False
        return self._block is None or any(block is self._block for block in connection.atomic_blocks)

    @property
    def alias(self) -> str:
        return self._connection.alias

    @property
    def is_elsewhere(self) -> bool:
        """Whether the transaction is of another thread."""
        return connections[self.alias] is not self._connection


def _own_blocks(connection: BaseDatabaseWrapper) -> Iterator[Any]:
    """Yield the atomic blocks, outermost first, that are not a TestCase's own."""
    return (block for block in connection.atomic_blocks if not getattr(block, "_from_testcase", False))


def open_connections() -> Iterator[BaseDatabaseWrapper]:
    """
    Yield this thread's connections that are in an atomic block, other than a TestCase's own.

    Autocommit switched off by hand does not count: Django does not tell when such a transaction ends.
    """
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block and not connection.closed_in_transaction and any(_own_blocks(connection)):
            yield connection


def warn_of_old_snapshots(key: str) -> None:
    """Warn when a lease is taken in a transaction that may not see what the last holder did."""
    for connection in open_connections():
        if connection.vendor not in {"postgresql", "mysql"}:
            continue
        try:
            with connection.cursor() as cursor:
                cursor.execute(dialect_of(connection).show_isolation)
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
