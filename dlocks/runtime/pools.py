"""Connection pools within the process.

These are Django's own pool for psycopg and the pools of django-db-connection-pool.
"""

from __future__ import annotations

import copy
from contextlib import suppress

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper


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


def leave_pools() -> None:
    """Let the current thread connect to the servers without a pool.

    A caller may hold a pooled connection while it waits for dlocks. dlocks must
    therefore not need another connection from that pool.
    """
    for alias in connections:
        # A database that cannot be used raises its error when it is used.
        with suppress(Exception):
            wrapper = connections[alias]
            if wrapper.connection is None and is_pooled(wrapper):
                connections[alias] = unpooled(wrapper)


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
