"""How a process learns that the queue of one of its claims has changed."""

from __future__ import annotations

from collections.abc import Callable

from dlocks.values import Grant

# Number of contended keys that a process remembers.
KEYS_AT_MOST = 10_000


class Notifier:
    """A connection on which a process is notified.

    A notification says that a claim of this process may have been granted. The process
    then polls its claims. A notifier that knows the grant itself saves the poll.
    """

    # The channel that claims of this process name, if it is not the requested one.
    channel: str = ""
    # Whether every grant is notified here. Otherwise the queue is polled as well.
    is_complete: bool = True
    # Called with the owner of a claim, its grant, and when the lease began, at the
    # latest.
    on_grant: Callable[[str, Grant, float], object]

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds, and return whether to poll.

        Raise LockBackendError if the connection is broken.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Stop listening."""


class RecentKeys(set[str]):
    """The keys that had waiters lately. This is only a hint."""

    def add(self, key: str) -> None:
        if len(self) >= KEYS_AT_MOST:
            self.clear()
        super().add(key)
