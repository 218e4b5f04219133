"""
This thread's connections, as ``django.db.connections`` has them, for where they are looked at again and again.

Django keeps them in a ``Local`` of asgiref's, which asks at every look whether an event loop runs, and is told so by an
exception: a few of them cost as much as all the rest of a lock does in Python.
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
    """Return those of this thread's connections that are in an atomic block."""
    opened = []
    if found := _here():
        for alias, connection in list(found.items()):
            # There may be values for event loops beside them.
            if alias in connections.settings and connection.in_atomic_block:
                opened.append(connection)
        return opened
    return [connection for connection in connections.all(initialized_only=True) if connection.in_atomic_block]


def _here() -> Mapping[str, Any]:
    """Return this thread's connections by alias; nothing where they have to be asked for in Django's own way."""
    if _get_running_loop() is not None or type(connections).__getitem__ is not _DJANGOS_OWN:
        return {}
    known, storage = _known
    found: Mapping[str, Any] = vars(storage if known is connections._connections else _storage())  # type: ignore[attr-defined]
    return found


def _storage() -> Any:
    """Return where the connections of all threads are kept, and know it from now on; or what is empty."""
    global _known
    kept = connections._connections  # type: ignore[attr-defined]
    storage = getattr(kept, "_storage", None) if _is_plain() else None
    _known = kept, storage if type(storage) is threading.local else SimpleNamespace()
    return _known[1]


_known: tuple[Any, Any] = None, SimpleNamespace()
_DJANGOS_OWN = BaseConnectionHandler.__getitem__


@cache
def _is_plain() -> bool:
    """Try whether asgiref keeps what belongs to a thread, where no loop runs, in a plain ``threading.local``."""
    probe = Local(thread_critical=True)
    probe.value = probe
    storage = getattr(probe, "_storage", None)
    return type(storage) is threading.local and vars(storage) == {"value": probe}
