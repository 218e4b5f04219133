"""Distributed locks for Django, on the database that the project already uses."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlocks.api import db_lock as db_lock
    from dlocks.api import db_rwlock as db_rwlock
    from dlocks.api import db_semaphore as db_semaphore
    from dlocks.core.handover import aresume_hold as aresume_hold
    from dlocks.core.handover import resume_hold as resume_hold
    from dlocks.core.hold import Hold as Hold
    from dlocks.core.lock import Lock as Lock
    from dlocks.core.shared import ReadWriteLock as ReadWriteLock
    from dlocks.decorators import current_hold as current_hold
    from dlocks.decorators import locked_view as locked_view
    from dlocks.election import LeaderElection as LeaderElection
    from dlocks.exceptions import LockBackendError as LockBackendError
    from dlocks.exceptions import LockDeadlock as LockDeadlock
    from dlocks.exceptions import LockError as LockError
    from dlocks.exceptions import LockLost as LockLost
    from dlocks.exceptions import LockNotAwaitable as LockNotAwaitable
    from dlocks.exceptions import LockShutDown as LockShutDown
    from dlocks.exceptions import LockStale as LockStale
    from dlocks.exceptions import LockTimeout as LockTimeout
    from dlocks.exceptions import StaleToken as StaleToken
    from dlocks.exceptions import StaleVersion as StaleVersion
    from dlocks.keys import user_key as user_key
    from dlocks.runtime.keeper import shutdown as shutdown
    from dlocks.schedules import SingleInstance as SingleInstance
    from dlocks.schedules import run_once as run_once
    from dlocks.signals import lock_acquired as lock_acquired
    from dlocks.signals import lock_detached as lock_detached
    from dlocks.signals import lock_lost as lock_lost
    from dlocks.signals import lock_released as lock_released
    from dlocks.signals import lock_timeout as lock_timeout
    from dlocks.values import Holder as Holder
    from dlocks.values import Waiter as Waiter
    from dlocks.version import __version__ as __version__

# Modules are imported at the first access. pytest imports this package for its plugin
# even in projects that do not use it.
_MODULES = {
    "api": ["db_lock", "db_rwlock", "db_semaphore"],
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
    "core.lock": ["Lock"],
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
    __all__ = sorted(_HOMES)

    def __getattr__(name: str) -> Any:
        home = "dlocks.version" if name == "__version__" else _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'dlocks' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(home), name)
        return value
