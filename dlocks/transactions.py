"""Markers that show how the open transactions of a thread end."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import set_rollback
from django.db.utils import Error

from dlocks.runtime.connected import connection_of, in_atomic_blocks
from dlocks.sql.engines import engine_of


class TransactionMarker:
    """A marker in a connection's transaction, which shows how the transaction ends.

    It is set in the connection's thread, and read from any. Django shows a rollback
    only in its list of ``on_commit()`` callbacks, so the marker is an entry there.
    Django empties the list after a commit, a rollback and a close, and removes what the
    rollback of a savepoint undid. (An ``Atomic`` cannot serve, because a decorator has
    one for all its calls.) With ``first``, it is called before all other callbacks.
    """

    def __init__(
        self,
        connection: BaseDatabaseWrapper,
        savepoints: set[str],
        block: Any = None,
        *,
        first: bool = False,
    ) -> None:
        # Weak, because model instances keep their marker.
        self._reference = weakref.ref(connection)
        self.alias = connection.alias
        self._savepoints = savepoints
        self._block = block
        self._first = first
        self.committed = False
        self.at_commit: list[Callable[[], object]] = []
        # The keys that are locked here, in order.
        self.keys: dict[Any, None] = {}
        # The owners of the leases whose rows are locked here.
        self.leases: set[str] = set()
        # Django's name for a callback that fails after a commit.
        self.__qualname__ = type(self).__name__
        callbacks = connection.run_on_commit
        entry = cast("Any", (savepoints, self, True))
        callbacks.insert(0 if first else len(callbacks), entry)

    def __call__(self) -> None:
        self.committed = True
        for callback in self.at_commit:
            callback()

    @classmethod
    def here(cls, connection: BaseDatabaseWrapper) -> Self:
        """Return a marker of this point, until its rollback or the final commit."""
        return cls._at(connection, _savepoints_of(connection))

    @classmethod
    def whole(cls, connection: BaseDatabaseWrapper) -> Self:
        """Return a marker of the whole transaction, whatever is rolled back inside.

        In a TestCase, this is the outermost block that is not the TestCase's own.
        """
        return cls._at(connection, set(), cls._block_of_test(connection))

    @classmethod
    def of_lock(cls, connection: BaseDatabaseWrapper) -> Self:
        """Return a marker of the lock on a row that is written here.

        It stands while the database keeps other sessions from the row.
        """
        if not engine_of(connection).unlocks:
            return cls.whole(connection)
        block = cls._block_of_test(connection)
        return cls._at(connection, _savepoints_of(connection), block)

    @classmethod
    def before_callbacks(cls, connection: BaseDatabaseWrapper) -> Self | None:
        """Return a marker of this point that sees the commit before other callbacks.

        Another callback can raise out of ``atomic()``, as a conflict does, after the
        commit. Return None if no rollback can come, if Django would not report it, or
        in a TestCase, which never commits, and whose callbacks users count.
        """
        if why_end_is_unknown(connection) is not None or in_testcase(connection):
            return None
        savepoints = _savepoints_of(connection)
        # A transaction may have a callback for each of its rows.
        for found, marker, *_ in connection.run_on_commit[:1]:
            if isinstance(marker, cls) and marker._first and found == savepoints:
                return marker
        return cls(connection, savepoints, first=True)

    @staticmethod
    def _block_of_test(connection: BaseDatabaseWrapper) -> Any:
        """Return a TestCase's transaction: the outermost block not its own.

        Return None outside of a TestCase.
        """
        return _own_blocks(connection)[0] if in_testcase(connection) else None

    @classmethod
    def _at(
        cls,
        connection: BaseDatabaseWrapper,
        savepoints: set[str],
        block: Any = None,
    ) -> Self:
        """Return the marker that is there already, or a new one."""
        for found, marker, *_ in reversed(connection.run_on_commit):
            if (
                isinstance(marker, cls)
                and not marker._first
                and found == savepoints
                and marker._block is block
            ):
                return marker
        return cls(connection, savepoints, block)

    def keep(self, key: Any, whole: TransactionMarker) -> None:
        """Record a key whose row is locked from this point of the whole transaction on.

        On InnoDB, the row stays locked after the rollback of a savepoint.
        """
        unlocks = engine_of(connection_of(self.alias)).unlocks
        (self if unlocks else whole).keys[key] = None

    @property
    def stands(self) -> bool:
        connection = self._reference()
        if (
            connection is None
            or connection.connection is None
            or connection.closed_in_transaction
        ):
            return False
        if not connection.in_atomic_block and not self.is_elsewhere:
            # The connection was lost before autocommit, so the list was not emptied. Or
            # autocommit is off, and Django does not report when the caller commits.
            # For another thread, the transaction may be about to commit.
            return False
        return self._is_listed(connection) and (
            self._block is None or self._block in connection.atomic_blocks
        )

    @property
    def was_rolled_back(self) -> bool:
        connection = self._reference()
        return not self.committed and (
            connection is None or not self._is_listed(connection)
        )

    @property
    def has_ended(self) -> bool:
        """Return whether its transaction was committed or rolled back, not just lost.

        A lost connection only counts once Django has opened a new one.
        """
        connection = self._reference()
        return connection is None or not (
            self._is_listed(connection) or connection.closed_in_transaction
        )

    def _is_listed(self, connection: BaseDatabaseWrapper) -> bool:
        # Not the entry: the rollback of a savepoint re-creates all others.
        return any(entry[1] is self for entry in connection.run_on_commit)

    @property
    def is_undone(self) -> bool:
        """Return whether the transaction is broken and must be rolled back."""
        connection = self._reference()
        return connection is None or connection.needs_rollback

    @classmethod
    def keys_of(cls, connection: BaseDatabaseWrapper) -> list[Any]:
        """Return the keys that are locked in the transaction, maybe by ended holds."""
        return [
            key
            for _, marker, *_ in connection.run_on_commit
            if isinstance(marker, cls)
            for key in marker.keys
        ]

    @property
    def is_elsewhere(self) -> bool:
        """Return whether the transaction belongs to another thread."""
        return connection_of(self.alias) is not self._reference()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        # A pickle has no connection.
        return type(None), ()


class OwnTransaction:
    """The transaction of this thread that keeps a key.

    It has the point at which the row was locked, and the outermost transaction around
    that point.
    """

    def __init__(self, database: str, key: Any) -> None:
        self.connection = connection_of(database)
        self.point = TransactionMarker.here(self.connection)
        # A TestCase never commits, and its users count the on_commit() callbacks.
        whole = self.point if in_testcase(self.connection) else None
        self.whole = whole or TransactionMarker.whole(self.connection)
        self.point.keep(key, self.whole)


def _savepoints_of(connection: BaseDatabaseWrapper) -> set[str]:
    return set(connection.savepoint_ids) - {None}


def forbid_commit(connection: BaseDatabaseWrapper) -> None:
    """Let the open transaction of this thread, if there is one, end in a rollback."""
    if connection.in_atomic_block:
        set_rollback(True, using=connection.alias)


def in_testcase(connection: BaseDatabaseWrapper) -> bool:
    """Return whether one of the atomic blocks is a TestCase's own."""
    return len(_own_blocks(connection)) < len(connection.atomic_blocks)


def _own_blocks(connection: BaseDatabaseWrapper) -> list[Any]:
    """Return the atomic blocks that are not a TestCase's own, outermost first."""
    return [
        block
        for block in connection.atomic_blocks
        if not getattr(block, "_from_testcase", False)
    ]


def open_connections() -> Sequence[BaseDatabaseWrapper]:
    """Return this thread's connections in an atomic block.

    A TestCase's own blocks do not count, nor do transactions whose end Django does not
    report.
    """
    opened = _in_own_blocks()
    return opened and [one for one in opened if why_end_is_unknown(one) is None]


def _in_own_blocks() -> Sequence[BaseDatabaseWrapper]:
    # Usually there is none, and this is the only cost.
    opened = in_atomic_blocks()
    return opened and [
        one for one in opened if not one.closed_in_transaction and _own_blocks(one)
    ]


def why_end_is_unknown(connection: BaseDatabaseWrapper) -> str | None:
    """Return why Django does not report a transaction's end, or None."""
    # An atomic block leaves a manual transaction open, and runs no callbacks.
    if connection.in_atomic_block and connection.commit_on_exit:
        return None
    return (
        f"Autocommit is off on {connection.alias!r}, so Django does not report when"
        f" this transaction ends. {how_to_autocommit(connection.alias)}"
    )


def how_to_autocommit(database: str) -> str:
    """Return a sentence about how to turn autocommit on."""
    return (
        f"Remove 'AUTOCOMMIT' from DATABASES[{database!r}], or commit and call"
        f" transaction.set_autocommit(True, using={database!r}) first"
    )


def warn_of_old_snapshots(key: str) -> None:
    """Warn when a lease is acquired in a transaction with an old snapshot.

    Such a transaction may not see the changes of the last holder.
    """
    for connection in _in_own_blocks():
        if connection.vendor not in {"postgresql", "mysql"}:
            continue
        try:
            with connection.cursor() as cursor:
                cursor.execute(engine_of(connection).isolation)
                level = cursor.fetchone()[0].upper().replace("-", " ")
        except Error:
            # The transaction is broken.
            continue
        if level not in {"READ COMMITTED", "READ UNCOMMITTED"}:
            warnings.warn(
                f"The lease on {key!r} is acquired inside a transaction on"
                f" {connection.alias!r} at {level}. Its snapshot may be older than the"
                " lock and hide the last holder's changes. Acquire the lock before the"
                " transaction begins, or run it at READ COMMITTED.",
                RuntimeWarning,
                stacklevel=5,
            )
