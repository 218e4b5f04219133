"""What can go wrong with a lock: busy, lost, stale, or could not ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlocks.backends.base import Holder


class LockError(Exception):
    """Base class of every error of dlocks."""


class LockTimeout(LockError, TimeoutError):
    """Somebody else has the lock, and still had it when the time to wait was over."""

    def __init__(self, message: str, *, key: str, timeout: float | None, holder: Holder | None) -> None:
        super().__init__(message)
        self.key = key
        self.timeout = timeout
        self.holder = holder


class LockLost(LockError):
    """The hold ended before its holder ended it: exclusion is no longer given."""

    def __init__(self, message: str, *, key: str, token: int) -> None:
        super().__init__(message)
        self.key = key
        self.token = token


class LockStale(LockError):
    """The last holder never came back, and this lock was told not to take over from it."""

    def __init__(self, *, key: str, holder: Holder | None) -> None:
        super().__init__(
            f"{key!r} was never given back by {holder or 'its holder'}. takeover=False leaves it to a person: see what "
            "became of that run, then clear the key with 'manage.py clear_lock' or in the admin."
        )
        self.key = key
        self.holder = holder


class LockBackendError(LockError):
    """The backend could not be asked, or did not answer; its own error is the ``__cause__``."""
