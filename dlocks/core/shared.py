"""Read-write locks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Never

from dlocks.core.lock import Lock
from dlocks.core.options import no_attribute
from dlocks.core.policy import changed_options


@dataclass(frozen=True, slots=True)
class ReadWriteLock:
    """The result of ``db_rwlock()``: a read lock and a write lock on one key.

    Both are used like any other lock.

    Readers and writers wait in one queue, in the order of arrival. A reader that
    arrives after a waiting writer waits behind it, so writers are not starved. A read
    lock cannot be upgraded to a write lock, since two callers doing so would deadlock.
    The attempt raises RuntimeError. The holder of the write lock may also acquire the
    read lock, and keeps it when it releases the write lock.
    """

    _writing: Lock

    def __repr__(self) -> str:
        return f"<ReadWriteLock {self.key!r}{changed_options(self._writing)}>"

    @property
    def key(self) -> str:
        return self._writing.key

    def __enter__(self) -> Never:
        raise TypeError(
            "A read-write lock cannot be entered itself. Use 'with"
            " db_rwlock(key).read():' or 'with db_rwlock(key).write():'."
        )

    def __exit__(self, *exc: object) -> None:
        """Do nothing: ``__enter__`` always raises."""

    if not TYPE_CHECKING:
        __aenter__, __aexit__ = __enter__, __exit__

        def __getattr__(self, name: str) -> Never:
            hint = None
            if hasattr(Lock, name):
                hint = f"Use read().{name} or write().{name}, of one of its two locks."
            raise no_attribute(self, name, hint)

    def __call__(self, function: object) -> Never:
        raise TypeError(
            "A read-write lock cannot be a decorator itself. Use"
            " '@db_rwlock(key).read()' or '@db_rwlock(key).write()'."
        )

    def read(self) -> Lock:
        """Return the read lock, which any number of readers can hold together.

        It excludes writers.
        """
        return dataclasses.replace(self._writing, shared=True)

    def write(self) -> Lock:
        """Return the write lock, which has one holder and excludes readers."""
        return self._writing
