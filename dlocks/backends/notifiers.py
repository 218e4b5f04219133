"""How a waiter learns that its turn has come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import ClassVar

from dlocks.values import Claim, Message, Ticket

# Number of contended keys that a process remembers.
KEYS_AT_MOST = 10_000


class Notifier:
    """A connection on which a process is notified about its queued claims.

    A notifier that ``asks`` sends a query to the server. It receives messages only
    while it waits, and only about the claims that it waits for. Its connection cannot
    be used for anything else.
    """

    asks: ClassVar[bool] = False
    # The channel on which messages arrive, if it is not the requested one.
    channel: str = ""
    # Whether every grant arrives here. Otherwise the queue has to be polled as well.
    hears_all: bool = True
    # Grants a key that a message reported as free to its first waiter.
    advance: Callable[[str], object] = staticmethod(lambda key: None)
    # A second notifier, on which a thread of its own waits at the same time. If it is
    # this notifier itself, only that thread waits on it.
    beside: Notifier | None = None
    # Held by the thread that waits on this notifier or uses its connection. None if
    # there is only one such thread.
    receive_lock: threading.RLock | None = None

    def wait(self, timeout: float, claims: Sequence[Claim]) -> Sequence[Message]:
        """Wait for messages for up to ``timeout`` seconds, and return them.

        Raise LockBackendError if the connection is broken.
        """
        raise NotImplementedError

    def heartbeat(self, claims: Sequence[Claim]) -> Ticket | None:
        """Send a heartbeat for the claims; return what applies to all of them.

        That is a ``Ticket`` with ``next_check`` and ``clock``, or None if the queue has
        to be polled. It is only called if the notifier ``asks``.
        """
        return None

    def close(self) -> None:
        """Stop listening."""


class OwnThreadNotifier(Notifier):
    """The notifier of one caller's thread.

    A message says that the state of its claim may have changed. No message says that
    the claim has lost its ticket.
    """

    def __init__(self, wait: Callable[[Claim, float], bool]) -> None:
        self._wait = wait

    def wait(self, timeout: float, claims: Sequence[Claim]) -> Sequence[Message]:
        return [Message(owner=one.owner) for one in claims if self._wait(one, timeout)]


class RecentKeys(set[str]):
    """The keys that had waiters lately. This is only a hint."""

    def add(self, key: str) -> None:
        if len(self) >= KEYS_AT_MOST:
            self.clear()
        super().add(key)
