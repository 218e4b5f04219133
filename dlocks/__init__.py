"""Distributed locks for Django, on the database that the project already uses."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlocks.api import db_lock, db_rwlock, db_semaphore
    from dlocks.core.handover import aresume_hold, resume_hold
    from dlocks.core.hold import Hold
    from dlocks.core.lock import Lock
    from dlocks.core.shared import ReadWriteLock
    from dlocks.decorators import current_hold, locked_view
    from dlocks.election import LeaderElection
    from dlocks.exceptions import (
        LockBackendError,
        LockDeadlock,
        LockError,
        LockLost,
        LockNotAwaitable,
        LockShutDown,
        LockStale,
        LockTimeout,
        StaleToken,
        StaleVersion,
    )
    from dlocks.keys import user_key
    from dlocks.runtime.keeper import shutdown
    from dlocks.schedules import SingleInstance, run_once
    from dlocks.signals import (
        lock_acquired,
        lock_detached,
        lock_lost,
        lock_released,
        lock_timeout,
    )
    from dlocks.values import Holder, Waiter
    from dlocks.version import __version__ as __version__

__all__ = [
    "Hold",
    "Holder",
    "LeaderElection",
    "Lock",
    "LockBackendError",
    "LockDeadlock",
    "LockError",
    "LockLost",
    "LockNotAwaitable",
    "LockShutDown",
    "LockStale",
    "LockTimeout",
    "ReadWriteLock",
    "SingleInstance",
    "StaleToken",
    "StaleVersion",
    "Waiter",
    "aresume_hold",
    "current_hold",
    "db_lock",
    "db_rwlock",
    "db_semaphore",
    "lock_acquired",
    "lock_detached",
    "lock_lost",
    "lock_released",
    "lock_timeout",
    "locked_view",
    "resume_hold",
    "run_once",
    "shutdown",
    "user_key",
]

# Modules are imported at the first access. pytest imports this package for its plugin
# even in projects that do not use it.
_MODULES = {
    "api": ["Lock", "db_lock", "db_rwlock", "db_semaphore"],
    "decorators": ["current_hold", "locked_view"],
    "election": ["LeaderElection"],
    "exceptions": [
        "LockBackendError",
        "LockDeadlock",
        "LockError",
        "LockLost",
        "LockNotAwaitable",
        "LockShutDown",
        "LockStale",
        "LockTimeout",
        "StaleToken",
        "StaleVersion",
    ],
    "core.handover": ["aresume_hold", "resume_hold"],
    "core.hold": ["Hold"],
    "runtime.keeper": ["shutdown"],
    "keys": ["user_key"],
    "core.shared": ["ReadWriteLock"],
    "schedules": ["SingleInstance", "run_once"],
    "signals": [
        "lock_acquired",
        "lock_detached",
        "lock_lost",
        "lock_released",
        "lock_timeout",
    ],
    "values": ["Holder", "Waiter"],
}
_HOMES = {
    name: f"dlocks.{module}" for module, names in _MODULES.items() for name in names
}


# A type checker that saw the function would accept a misspelt name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        home = "dlocks.version" if name == "__version__" else _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'dlocks' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(home), name)
        return value
