"""Connection pools within the process, and the connections of dlocks' own threads.

The pools are Django's own for psycopg, and those of django-db-connection-pool.
"""

from __future__ import annotations

import copy
import weakref
from collections import ChainMap
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from django.db.utils import Error

# Seconds for which the server may take to accept a private connection.
CONNECT_TIMEOUT = 5

# The statements that limit the wait for a lock on a private connection to 5 seconds. A
# shorter limit of the project stays. Behind a pooler nothing is set, because the next
# client would inherit it. A pooler reports an invented process id when a connection
# begins.
LIMIT_LOCK_WAIT = {
    "postgresql": (
        "SELECT set_config('lock_timeout', '5s', false) WHERE pg_backend_pid() ="
        " %(pid)s AND current_setting('lock_timeout') = '0'"
    ),
    # MySQL refuses the type of LEAST() itself.
    "mysql": (
        "SET SESSION lock_wait_timeout = CAST(LEAST(@@SESSION.lock_wait_timeout, 5) AS"
        " UNSIGNED)"
    ),
}

_private: weakref.WeakSet[BaseDatabaseWrapper] = weakref.WeakSet()


def is_pooled(wrapper: BaseDatabaseWrapper) -> bool:
    """Return whether a wrapper takes its connections from a pool."""
    return _has_django_pool(wrapper) or _class_without_pool(type(wrapper)) is not type(
        wrapper
    )


def unpooled(wrapper: BaseDatabaseWrapper) -> BaseDatabaseWrapper:
    """Return a new wrapper of the same database that uses no pool."""
    settings = copy.deepcopy(wrapper.settings_dict)
    if _has_django_pool(wrapper):
        del settings["OPTIONS"]["pool"]
    return _class_without_pool(type(wrapper))(settings, wrapper.alias)


def close_lost(wrapper: BaseDatabaseWrapper) -> None:
    """Close a lost connection, and the others of its pool that are lost as well.

    A restart of the server ends all of them, and a retry would take the next one.
    """
    wrapper.close()
    if _has_django_pool(wrapper):
        wrapper.pool.check()  # type: ignore[attr-defined]


def use_private_connections() -> None:
    """Let the current thread, which is one of dlocks, connect in its own way.

    A private connection uses no pool: a caller may hold a pooled connection while it
    waits for dlocks. It commits each statement, even with ``"AUTOCOMMIT": False`` in
    DATABASES, where only the caller would know when to commit. It waits for the server,
    and for a locked table, for a few seconds only.
    """
    for alias in connections:
        # A database that cannot be used raises its error when it is used.
        with suppress(Exception):
            if connections[alias].connection is None:
                connections[alias] = _new_private(alias)


def call_privately(function: Callable[[], object]) -> None:
    """Call a function on private connections, which are closed at its end."""
    try:
        use_private_connections()
        function()
    finally:
        connections.close_all()


def leave_pools() -> None:
    """Let the current thread, which is about to end, connect without a pool."""
    for alias in connections:
        with suppress(Exception):
            wrapper = connections[alias]
            if wrapper.connection is None and is_pooled(wrapper):
                connections[alias] = unpooled(wrapper)


def _new_private(alias: str) -> BaseDatabaseWrapper:
    usual = connections.create_connection(alias)
    own = unpooled(usual)
    options = own.settings_dict["OPTIONS"]
    if own.vendor in LIMIT_LOCK_WAIT:
        options.setdefault("connect_timeout", CONNECT_TIMEOUT)
    # Like the connections of Django, it reads address and password from DATABASES each
    # time it connects. A password may have been changed since.
    settings: Any = ChainMap(
        {"AUTOCOMMIT": True, "OPTIONS": options}, usual.settings_dict
    )
    wrapper = type(own)(settings, alias)
    _private.add(wrapper)
    return wrapper


def _limit_lock_wait(*, connection: Any, **_: Any) -> None:
    """Limit the waits of a private connection that was just made."""
    sql = LIMIT_LOCK_WAIT.get(connection.vendor)
    if sql is None or connection not in _private:
        return
    pid = 0
    if connection.vendor == "postgresql":
        pid = connection.connection.info.backend_pid
    # If the session has ended, the next statement reports it.
    with suppress(Error), connection.cursor() as cursor:
        cursor.execute(sql, {"pid": pid})


connection_created.connect(_limit_lock_wait, dispatch_uid="dlocks.pools")


def _has_django_pool(wrapper: BaseDatabaseWrapper) -> bool:
    # Only Django's wrappers with a pool have this property, and subclasses inherit it.
    # Reading it would create the pool.
    return hasattr(type(wrapper), "pool") and bool(
        wrapper.settings_dict["OPTIONS"].get("pool")
    )


def _class_without_pool(kind: type[BaseDatabaseWrapper]) -> type[BaseDatabaseWrapper]:
    """Return the wrapper class without django-db-connection-pool's additions.

    Other classes are returned unchanged.
    """
    bases = kind.__mro__
    for base in reversed(bases):
        if base.__module__.startswith(
            "dj_db_conn_pool."
        ) and "get_new_connection" in vars(base):
            following = bases[bases.index(base) + 1 :]
            return next(
                one for one in following if issubclass(one, BaseDatabaseWrapper)
            )
    return kind
