"""Distributed locks for Django, on the database that the project already runs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlocks.backends.base import Holder
    from dlocks.decorators import locked_view
    from dlocks.election import LeaderElection
    from dlocks.exceptions import (
        LockBackendError,
        LockError,
        LockLost,
        LockNotAwaitable,
        LockStale,
        LockTimeout,
        StaleToken,
        StaleVersion,
    )
    from dlocks.handover import aresume_hold, resume_hold
    from dlocks.holds import Hold
    from dlocks.keys import user_key
    from dlocks.kinds import ReadWriteLock, db_rwlock, db_semaphore
    from dlocks.locks import Lock, db_lock
    from dlocks.multi import MultiHold, MultiLock
    from dlocks.schedules import SingleInstance, run_once
    from dlocks.signals import lock_acquired, lock_detached, lock_lost, lock_released, lock_timeout

__all__ = [
    "Hold",
    "Holder",
    "LeaderElection",
    "Lock",
    "LockBackendError",
    "LockError",
    "LockLost",
    "LockNotAwaitable",
    "LockStale",
    "LockTimeout",
    "MultiHold",
    "MultiLock",
    "ReadWriteLock",
    "SingleInstance",
    "StaleToken",
    "StaleVersion",
    "aresume_hold",
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
    "user_key",
]

__version__ = "0.1.0"

# Loaded when first asked for: pytest loads the plugin of every package there is, wanted or not.
_MODULES = {
    "backends.base": ["Holder"],
    "decorators": ["locked_view"],
    "election": ["LeaderElection"],
    "exceptions": [
        "LockBackendError",
        "LockError",
        "LockLost",
        "LockNotAwaitable",
        "LockStale",
        "LockTimeout",
        "StaleToken",
        "StaleVersion",
    ],
    "handover": ["aresume_hold", "resume_hold"],
    "holds": ["Hold"],
    "keys": ["user_key"],
    "kinds": ["ReadWriteLock", "db_rwlock", "db_semaphore"],
    "locks": ["Lock", "db_lock"],
    "multi": ["MultiHold", "MultiLock"],
    "schedules": ["SingleInstance", "run_once"],
    "signals": ["lock_acquired", "lock_detached", "lock_lost", "lock_released", "lock_timeout"],
}
_HOMES = {name: f"dlocks.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dlocks' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
