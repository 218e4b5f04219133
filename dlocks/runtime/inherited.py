"""Database connections that a forked child inherits from its parent.

Parent and child would read each other's replies, and a COMMIT of the child would end
the parent's transaction. So a child drops all of them, and connects again.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from django.conf import settings
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

# The wrappers that have connected, of all threads. This is a plain set, since WeakSet
# is written in Python.
_wrappers: set[weakref.ref[BaseDatabaseWrapper]] = set()

Open = list[tuple[BaseDatabaseWrapper, Any]]

# What is open during a fork. In the child, Python collects what belongs to other
# threads before it calls the hooks.
_at_fork: list[Open] = []
# The parent's connections and pools, which must not be collected in a child.
_kept: list[object] = []


def _connected(*, connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
    _wrappers.add(weakref.ref(connection, _wrappers.discard))


def _open() -> Open:
    """Return the wrappers that are connected, with the driver's connections."""
    found = {wrapper for one in list(_wrappers) if (wrapper := one()) is not None}
    # Some may have connected before this module was imported.
    found.update(_own())
    return [
        (wrapper, wrapper.connection)
        for wrapper in found
        if wrapper.connection is not None and not _is_in_memory(wrapper)
    ]


def _own() -> Sequence[BaseDatabaseWrapper]:
    return connections.all(initialized_only=True) if settings.configured else []


def _is_in_memory(wrapper: Any) -> bool:
    """Return whether a database exists in this process alone, and is copied by a fork.

    The parallel test runner relies on the copy.
    """
    return wrapper.vendor == "sqlite" and bool(wrapper.is_in_memory_db())


def _in_child() -> None:
    # uWSGI forks without the first hook.
    inherited = [*_open(), *(one for found in _at_fork for one in found)]
    _at_fork.clear()
    _kept.append(inherited)
    own = _own()
    for wrapper, connection in inherited:
        if wrapper.vendor == "sqlite" and wrapper in own:
            _close_sqlite(connection)
        _drop(wrapper, connection)


def _close_sqlite(connection: Any) -> None:
    """Close a connection of sqlite3, unless it is in a transaction.

    With a write-ahead log, SQLite would assume that the locks of this connection are
    those of the child, although a child inherits none. Then the parent deletes the log
    when it closes its connection, with what the child writes. A rollback would destroy
    the transaction of the parent, and another thread may have been using a connection.
    """
    with suppress(Exception):
        if not connection.in_transaction:
            connection.close()


def _drop(wrapper: Any, connection: Any) -> None:
    """Drop an inherited connection, and send nothing to the server.

    An open atomic block ends like one whose connection was closed: further statements
    raise an error, and nothing is committed.
    """
    with suppress(Exception):
        # A driver that closes it, even at the end of the process, must not end the
        # parent's session. SQLite has no such file.
        nowhere = os.open(os.devnull, os.O_RDWR)
        try:
            os.dup2(nowhere, connection.fileno())
        finally:
            os.close(nowhere)
        if hasattr(connection, "pgconn"):
            # psycopg 3 warns of a connection that is collected without this. psycopg 2
            # would wait for a thread of the parent that uses it.
            connection.close()
    if wrapper.in_atomic_block:
        wrapper.closed_in_transaction = wrapper.needs_rollback = True
    wrapper.run_on_commit = []
    wrapper.connection = None
    # The idle connections of Django's own pool are inherited too, and its threads do
    # not run here.
    pools = getattr(type(wrapper), "_connection_pools", {})
    if wrapper.alias in pools:
        _kept.append(pools.pop(wrapper.alias))


connection_created.connect(_connected, weak=False, dispatch_uid="dlocks.inherited")
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _at_fork.append(_open()),
        after_in_parent=_at_fork.pop,
        after_in_child=_in_child,
    )
