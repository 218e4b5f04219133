"""Locks that are shared: many readers or one writer, and a number of permits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Never

from dlocks.conf import DEFAULT_ALIAS
from dlocks.locks import Lock, refuse


@dataclass(frozen=True, slots=True)
class ReadWriteLock:
    """
    What ``db_rwlock()`` returns: two locks on one key, each to be used as any lock.

    The line is one for both, in the order of arrival: readers that come after a waiting writer wait behind it, so it
    is not starved. Who reads cannot go on to write without giving the key back (RuntimeError: two of them would wait
    for each other); who writes may take the read lock too, and has it still when the write lock is given back.
    """

    _writing: Lock

    @property
    def key(self) -> str:
        return self._writing.key

    def __enter__(self) -> Never:
        raise TypeError("Say which: 'with db_rwlock(key).read():' or 'with db_rwlock(key).write():'.")

    def __exit__(self, *exc: object) -> None:
        """Never called."""

    def __call__(self, function: object) -> Never:
        raise TypeError("Say which: '@db_rwlock(key).read()' or '@db_rwlock(key).write()'.")

    def read(self) -> Lock:
        """Return the lock that many may have at a time, as long as nobody writes."""
        return dataclasses.replace(self._writing, shared=True)

    def write(self) -> Lock:
        """Return the lock that one has alone."""
        return self._writing


def db_rwlock(key: str, *, using: str = DEFAULT_ALIAS, **policy: Any) -> ReadWriteLock:
    """
    Return the read-write lock on ``key``: ``with db_rwlock("catalogue").read()``; the policy is that of ``db_lock``.

    ``write()`` is ``db_lock(key)`` itself, and excludes it.
    """
    refuse("db_rwlock", policy, "shared", "permits")
    return ReadWriteLock(Lock(key=key, using=using, **policy))


def db_semaphore(key: str, permits: int, *, using: str = DEFAULT_ALIAS, **policy: Any) -> Lock:
    """
    Return a lock that up to ``permits`` callers have at a time, each with a token and a lease of its own.

    ``permits`` binds who acquires from now on, not who has the key already: when it is made smaller, nobody is
    admitted until enough have left. The policy is that of ``db_lock``; with ``reentrant=False`` a caller who acquires
    again takes another permit. ``db_lock(key)`` excludes all of them.
    """
    return Lock(key=key, using=using, shared=True, permits=permits, **policy)
