"""Distributed locks for Django, on the database that the project already runs."""

from dlocks.backends.base import Holder
from dlocks.exceptions import LockBackendError, LockError, LockLost, LockStale, LockTimeout
from dlocks.holds import Hold
from dlocks.locks import Lock, db_lock
from dlocks.signals import lock_acquired, lock_lost, lock_released, lock_timeout

__all__ = [
    "Hold",
    "Holder",
    "Lock",
    "LockBackendError",
    "LockError",
    "LockLost",
    "LockStale",
    "LockTimeout",
    "db_lock",
    "lock_acquired",
    "lock_lost",
    "lock_released",
    "lock_timeout",
]

__version__ = "0.1.0"
