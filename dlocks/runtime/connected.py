"""Fast access to the database connections of this thread.

Each access to asgiref's ``Local``, where Django keeps them, checks for a running event
loop. An exception says that there is none. A few such accesses cost as much as all the
rest of a lock in Python.
"""

from __future__ import annotations

import threading
from asyncio import _get_running_loop
from collections.abc import Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

from asgiref.local import Local
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.connection import BaseConnectionHandler


def connection_of(alias: str) -> BaseDatabaseWrapper:
    """Return this thread's connection, as ``connections[alias]`` does."""
    return _here().get(alias) or connections[alias]


def in_atomic_blocks() -> Sequence[BaseDatabaseWrapper]:
    """Return the connections of this thread that are in an atomic block."""
    opened = []
    if found := _here():
        for alias, connection in list(found.items()):
            # There may also be values for event loops.
            if alias in connections.settings and connection.in_atomic_block:
                opened.append(connection)
        return opened
    return [
        connection
        for connection in connections.all(initialized_only=True)
        if connection.in_atomic_block
    ]


def _here() -> Mapping[str, Any]:
    """Return this thread's connections by alias.

    It is empty where only Django's own access is correct.
    """
    if (
        _get_running_loop() is not None
        or type(connections).__getitem__ is not _DJANGOS_OWN
    ):
        return {}
    known, storage = _known
    mine = connections._connections  # type: ignore[attr-defined]
    found: Mapping[str, Any] = vars(storage if known is mine else _storage())
    return found


def _storage() -> Any:
    """Find and remember the storage of all threads' connections.

    Return an empty object if asgiref does not store them as expected.
    """
    global _known
    kept = connections._connections  # type: ignore[attr-defined]
    storage = getattr(kept, "_storage", None) if _is_plain() else None
    _known = kept, storage if type(storage) is threading.local else SimpleNamespace()
    return _known[1]


_known: tuple[Any, Any] = None, SimpleNamespace()
_DJANGOS_OWN = BaseConnectionHandler.__getitem__


@cache
def _is_plain() -> bool:
    """Return whether asgiref uses a plain ``threading.local`` without a loop."""
    probe = Local(thread_critical=True)
    probe.value = probe
    storage = getattr(probe, "_storage", None)
    return type(storage) is threading.local and vars(storage) == {"value": probe}
