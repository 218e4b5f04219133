"""What the transactions open in this thread mean for a lease that is taken or left inside them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, cast

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import Error

from dlocks.backends.database.dialects import dialect_of
from dlocks.connected import connection_of, in_atomic_blocks


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
        # What is locked here, as ``keeps()`` asks for it.
        self.keys: set[Any] = set()
        # Django names by it what fails after a commit.
        self.__qualname__ = type(self).__name__
        connection.run_on_commit.append(cast("Any", (savepoints, self, True)))

    def __call__(self) -> None:
        for callback in self.at_commit:
            callback()

    @classmethod
    def here(cls, connection: BaseDatabaseWrapper) -> Self:
        """Mark where the caller stands: it stands until that is rolled back, or committed for good."""
        savepoints = {sid for sid in connection.savepoint_ids if sid is not None}
        return cls._standing(connection, savepoints, None) or cls(connection, savepoints)

    @classmethod
    def whole(cls, connection: BaseDatabaseWrapper) -> Self:
        """Mark the transaction as a whole, whatever is rolled back inside; in a TestCase, its outermost own block."""
        block = cls._block_of_test(connection)
        return cls._standing(connection, set(), block) or cls(connection, set(), block)

    @classmethod
    def of_lock(cls, connection: BaseDatabaseWrapper) -> Self:
        """Mark the lock on a row that is written here: it stands as long as others are kept from the row."""
        if dialect_of(connection).keeps_locks:
            return cls.whole(connection)
        block = cls._block_of_test(connection)
        savepoints = {sid for sid in connection.savepoint_ids if sid is not None}
        return cls._standing(connection, savepoints, block) or cls(connection, savepoints, block)

    @staticmethod
    def _block_of_test(connection: BaseDatabaseWrapper) -> Any:
        """Return the outermost own block of a TestCase, which is its transaction; None elsewhere."""
        own = list(_own_blocks(connection))
        return own[0] if len(own) < len(connection.atomic_blocks) else None

    @classmethod
    def _standing(cls, connection: BaseDatabaseWrapper, savepoints: set[str], block: Any) -> Self | None:
        for found, mark, *_ in reversed(connection.run_on_commit):
            if isinstance(mark, cls) and found == savepoints and mark._block is block:
                return mark
        return None

    @property
    def stands(self) -> bool:
        connection = self._connection
        if connection.connection is None or connection.closed_in_transaction:
            return False
        if not connection.in_atomic_block and connection.commit_on_exit and not self.is_elsewhere:
            # The connection was lost between the end of the transaction and autocommit, and the list is as it was.
            # Seen from another thread, it may just be about to commit.
            return False
        # The set, not the entry: a savepoint's rollback makes the others' entries anew.
        if not any(entry[0] is self._savepoints for entry in connection.run_on_commit):
            return False
        return self._block is None or any(block is self._block for block in connection.atomic_blocks)

    @property
    def alias(self) -> str:
        return self._connection.alias

    @property
    def is_undone(self) -> bool:
        """Whether the transaction is to be rolled back, and nothing can be asked in it any more."""
        return self._connection.needs_rollback

    @classmethod
    def keeps(cls, connection: BaseDatabaseWrapper, key: Any) -> bool:
        """Return whether something is locked in the connection's transaction, by a hold that may have ended."""
        return any(isinstance(mark, cls) and key in mark.keys for _, mark, *_ in connection.run_on_commit)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the transaction is of another thread."""
        return connection_of(self.alias) is not self._connection


class Commit:
    """
    Whether a transaction was committed, by ``done``.

    A callback of ``on_commit()`` raises out of ``atomic()`` as a conflict does, and yet all is written.
    """

    def __init__(self, using: str | None) -> None:
        self._using = using
        self.done = False
        # Django names by it what fails after a commit.
        self.__qualname__ = type(self).__name__

    def watch(self) -> None:
        """Look at the transaction that is open, if there is one, before it has any callbacks."""
        connection = transaction.get_connection(self._using)
        # That of a TestCase is never committed, and its callbacks are counted by users.
        if connection.in_atomic_block and len(list(_own_blocks(connection))) == len(connection.atomic_blocks):
            transaction.on_commit(self, using=self._using)

    def __call__(self) -> None:
        self.done = True


class Written:
    """
    What was written in a connection's transaction, by ``models``, and whether that has taken it back.

    It is an entry among what is to be done on commit, as a ``Mark`` is; the first, so that the others find it done.
    """

    def __init__(self, connection: BaseDatabaseWrapper, savepoints: set[str]) -> None:
        self._connection = weakref.ref(connection)
        self._committed = False
        self.models: set[Any] = set()
        self.__qualname__ = type(self).__name__
        connection.run_on_commit.insert(0, cast("Any", (savepoints, self, True)))

    def __call__(self) -> None:
        self._committed = True

    @classmethod
    def here(cls, connection: BaseDatabaseWrapper, model: Any) -> Self | None:
        """Note a write; return None where no rollback can come, or Django would not tell of it, or nobody is left."""
        if why_untold(connection) is not None or len(list(_own_blocks(connection))) < len(connection.atomic_blocks):
            return None
        savepoints = {sid for sid in connection.savepoint_ids if sid is not None}
        for found, written, *_ in connection.run_on_commit[:1]:
            if isinstance(written, cls) and found == savepoints:
                break
        else:
            written = cls(connection, savepoints)
        written.models.add(model)
        return written

    @classmethod
    def around(cls, connection: BaseDatabaseWrapper, model: Any) -> Self | None:
        """Return the last write to a model that what is read here may show, and a rollback would take back."""
        for _savepoints, written, *_ in connection.run_on_commit:
            if isinstance(written, cls) and model in written.models:
                return written
        return None

    @property
    def was_undone(self) -> bool:
        if self._committed:
            return False
        connection = self._connection()
        return connection is None or not any(entry[1] is self for entry in connection.run_on_commit)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        # What is pickled knows nothing of a connection.
        return type(None), ()


def _own_blocks(connection: BaseDatabaseWrapper) -> Iterator[Any]:
    """Yield the atomic blocks, outermost first, that are not a TestCase's own."""
    return (block for block in connection.atomic_blocks if not getattr(block, "_from_testcase", False))


def open_connections() -> Sequence[BaseDatabaseWrapper]:
    """
    Return this thread's connections that are in an atomic block, other than a TestCase's own.

    Those whose end Django does not tell do not count.
    """
    opened = _in_own_blocks()
    return opened and [connection for connection in opened if why_untold(connection) is None]


def _in_own_blocks() -> Sequence[BaseDatabaseWrapper]:
    # Mostly there is none, and then no more is done than to look.
    opened = in_atomic_blocks()
    return opened and [one for one in opened if not one.closed_in_transaction and any(_own_blocks(one))]


def why_untold(connection: BaseDatabaseWrapper) -> str | None:
    """Return why Django will not tell when the transaction of a connection ends, or None when it will."""
    # An atomic block leaves what was begun by hand open, and runs no callbacks.
    if connection.in_atomic_block and connection.commit_on_exit:
        return None
    return (
        f"Autocommit is switched off on {connection.alias!r}, and Django does not tell when such a transaction ends."
        " Use 'with atomic()' where it is on"
    )


def warn_of_old_snapshots(key: str) -> None:
    """Warn when a lease is taken in a transaction that may not see what the last holder did."""
    for connection in _in_own_blocks():
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
