"""The interface of a backend. ``dlocks.values`` has what it takes and returns.

A backend is the source of truth about locks. These rules bind every backend, and
``dlocks.testing.BackendContract`` tests them:

1. ``acquire()`` never waits for another holder.
2. A key has at most one live hold.
3. Acquiring again with the same claim succeeds again, so a lost reply is harmless. So
   is releasing twice.
4. ``None`` means that another claim holds the key. Every other problem raises.
5. ``renew()``, ``verify()``, ``release()`` and ``exchange()`` act only for the owner
   that they are given. Otherwise they change nothing and report it.
6. A claim that is abandoned with an unknown result is always cancelled by
   ``release()``.
7. A claim that was not renewed for its ttl, by the backend's own clock, is free, and
   never sooner. Every change is committed when the caller learns of it. In transaction
   scope it is committed with the caller's transaction.
8. Tokens of one key always increase, without exception.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

from dlocks.connected import connection_of
from dlocks.exceptions import LockBackendError
from dlocks.values import (
    KEY_LENGTH,
    Claim,
    Grant,
    Holder,
    Message,
    Ticket,
    seconds,
)

T = TypeVar("T")

# A claim by which to ask whether a lease is possible here at all.
ANY_LEASE = Claim(key="*", ttl=0.0, owner="")

# Why some backends refuse a claim with ``takeover=False``.
NO_TAKEOVERS = (
    "{} does not support takeover=False, because it does not record whether the last"
    " holder released the key."
)
# Seconds without a heartbeat after which a waiter is skipped.
HEARD_FOR = 2.0
# Seconds for which a key is reserved for the waiter whose turn it is.
KEPT_FOR = 1.5


class UnstorableKeyError(ValueError):
    """A key that the backend cannot store. No request was sent."""


class TableLockedError(LockBackendError):
    """A statement that was cancelled because another session locked a table.

    The statement changed nothing.
    """


class Notifier:
    """A connection on which a process is notified about its queued claims.

    A listener that ``asks`` sends a query to the server. It receives messages only
    while it waits, and only about the claims that it waits for. Its connection cannot
    be used for anything else.
    """

    asks: ClassVar[bool] = False
    # The channel on which messages arrive, if it is not the requested one.
    channel: str = ""
    # Whether every grant arrives here. Otherwise the queue has to be polled as well.
    hears_all: bool = True
    # A second listener, on which a thread of its own waits at the same time. If it is
    # this listener itself, only that thread waits on it.
    beside: Notifier | None = None
    # Held by the thread that waits on this listener or uses its connection. None if
    # there is only one such thread.
    ears: threading.RLock | None = None

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


class Runtime:
    """What a backend needs of its process: other threads, and the holds.

    The backends of the DLOCKS setting get the runtime of ``dlocks.conf``, which uses
    the keeper. This one serves a backend that is used alone.
    """

    def __init__(self, backend: BaseBackend) -> None:
        self.backend = backend

    def run(self, function: Callable[[], T]) -> T:
        """Call a function where the caller has no open transaction.

        Return its result.
        """
        with ThreadPoolExecutor(1) as pool:
            try:
                return pool.submit(function).result()
            finally:
                pool.submit(self.backend.close).result()

    def call_later(self, function: Callable[[], None], seconds: float) -> None:
        """Call a function after ``seconds``. Requests before that are merged.

        Here it is called at once.
        """
        self.run(function)

    def on_lost(self, owners: Collection[str], why: str) -> None:
        """Report to the holds of these owners that they are lost, and why."""

    def backend_of(self, alias: str) -> BaseBackend:
        """Return the backend of another alias."""
        raise NotImplementedError


class BaseBackend:
    """The base class of all backends.

    The keyword arguments of the constructor are ``DLOCKS[alias]["OPTIONS"]``.

    ``prefix`` precedes every key. It may be a function without arguments, which can
    give each tenant its own keys. It is called for each attempt to acquire, in the
    caller's thread (for a coroutine, in the thread of ``sync_to_async()``).

    ``ttl``, ``timeout`` and ``grace`` are in seconds. A lease outlives its last renewal
    by ``ttl``. A caller waits for ``timeout`` by default, and without limit if it is
    ``None``. An expired lease is not taken over before ``grace`` has passed, to
    tolerate clock steps. A wait of at least ``slow_wait`` seconds, or a hold of at
    least ``slow_hold`` seconds, is logged as a warning.
    """

    # Whether two claims of one key exclude each other.
    exclusive: ClassVar[bool] = True
    # Whether a hold can belong to the caller's transaction and end with it.
    supports_transactions: ClassVar[bool] = False
    # Whether claims can queue, and are granted in turn.
    supports_queue: ClassVar[bool] = False
    # Whether a waiting thread can receive its own notification. That saves waking
    # another thread first.
    tells_here: ClassVar[bool] = False
    # Whether a notified grant is valid for the lease that it states. Otherwise the
    # claim is acquired again.
    tells_leases: ClassVar[bool] = True
    # Whether several claims can share a key.
    supports_sharing: ClassVar[bool] = False
    # Whether tokens grow even if the backend's clock steps back.
    supports_fencing: ClassVar[bool] = True
    # Whether people can list and clear holds.
    supports_clearing: ClassVar[bool] = False
    # Whether ``pin()`` can keep a key for a hold until a transaction in ``database``
    # has ended.
    supports_guard: ClassVar[bool] = False
    # The alias of the database that contains the locks, if there is one.
    database: str = ""
    # Whether ``exchange()`` can replace a held claim with another.
    supports_handover: ClassVar[bool] = False
    # The ``WaitingRoom`` of this process. It is created for the first waiter.
    room: Any = None
    # The longest time in seconds between renewals, if it is shorter than a third of the
    # ttl.
    renew_every: float = math.inf

    def __init__(
        self,
        alias: str,
        *,
        prefix: str | Callable[[], str] = "",
        ttl: float = 30.0,
        timeout: float | None = 10.0,
        grace: float = 0.5,
        slow_wait: float | None = None,
        slow_hold: float | None = None,
    ) -> None:
        if not callable(prefix):
            check_prefix(prefix)
        self.alias = alias
        self.runtime = Runtime(self)
        self._prefix = prefix
        self.ttl = seconds("ttl", ttl, above_zero=True)
        self.timeout = None if timeout is None else seconds("timeout", timeout)
        self.grace = seconds("grace", grace)
        self.slow_wait = None if slow_wait is None else seconds("slow_wait", slow_wait)
        self.slow_hold = None if slow_hold is None else seconds("slow_hold", slow_hold)

    @property
    def prefix(self) -> str:
        """The text before each key, for the calling thread."""
        if isinstance(self._prefix, str):
            return self._prefix
        prefix = self._prefix()
        try:
            check_prefix(prefix)
        except ValueError as error:
            raise ValueError(
                f"DLOCKS[{self.alias!r}]['OPTIONS']['prefix'] returned {prefix!r}:"
                f" {error}"
            ) from None
        return prefix

    @property
    def has_fixed_prefix(self) -> bool:
        return isinstance(self._prefix, str)

    @property
    def identity(self) -> str:
        """Return a value that is equal for aliases with the same keys."""
        return self.alias

    @property
    def renews_late(self) -> bool:
        """Return whether an open transaction blocks all other writes.

        If so, ``renew()`` respects ``Claim.late``. An expired lease is only lost once
        another caller has acquired the key.
        """
        return False

    def refusal(self, claim: Claim) -> str | None:
        """Return why the claim cannot be made here, as a sentence, or None.

        No query is sent. A refused claim must not be passed to ``acquire()``.
        """
        kind = type(self).__name__
        if claim.shared and not self.supports_sharing:
            return f"{kind} does not support shared locks."
        if claim.scope == "lease":
            return None
        if not self.supports_transactions:
            return f"{kind} does not support scope='transaction'."
        database = self.database
        if not self.in_transaction():
            return (
                "scope='transaction' requires an open transaction. Enter 'with"
                f" atomic(using={database!r})' first."
            )
        if not connection_of(database).in_atomic_block:
            return (
                f"Autocommit is switched off on {database!r}, and Django does not"
                " report when such a transaction ends. Use 'with atomic()', or"
                " scope='lease'."
            )
        return None

    def acquire(self, claim: Claim) -> Grant | None:
        """Grant the claim, or return None if its key is held; never wait."""
        raise NotImplementedError

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        """Extend the lease of each claim to its full ttl from now.

        Return the seconds left by owner, counted from the time of this call. An owner
        that is missing has lost its hold. If a claim could not be extended at the
        moment, its remaining lease is returned.

        An expired lease is only extended for a claim that is ``late``, by a backend
        that ``renews_late``.
        """
        raise NotImplementedError

    def verify(self, claim: Claim, count: int) -> bool:
        """Write the hold count, and return whether the claim is still held.

        This also renews a claim that is ``late``.
        """
        raise NotImplementedError

    def release(self, claim: Claim, *, failed: bool = False, keep: float = 0.0) -> bool:
        """Release the key, or cancel a claim that may be granted or queued.

        The key stays taken for another ``keep`` seconds. Return False if the claim no
        longer held the key.
        """
        raise NotImplementedError

    def pin(self, claim: Claim, database: str) -> bool:
        """Renew a lease within the open transaction of ``database``.

        No other claim can acquire the key until that transaction has ended. Return
        False if the claim no longer holds the key.
        """
        raise NotImplementedError

    def exchange(self, claim: Claim, successor: Claim) -> Grant | None:
        """Replace ``claim`` with ``successor`` in one step.

        The successor gets its ttl from now and a larger token. Return None, and change
        nothing, if the claim no longer holds the key. A repeated call succeeds again.
        """
        raise NotImplementedError

    # Operations on several keys in one step, where that is possible. A negative result
    # means that nothing was done. The caller then handles each key by itself.

    def acquire_all(self, claims: Sequence[Claim]) -> Sequence[Grant] | None:
        """Grant all of the claims in one step, or return None; never wait.

        None means that no claim was granted. The claims differ only in key and owner,
        and are sorted by key.
        """
        return None

    def check_all(self, claims: Sequence[Claim]) -> bool:
        """Return whether all claims are certainly held, as read in one step."""
        return False

    def release_all(self, claims: Sequence[Claim], *, failed: bool = False) -> bool:
        """Release the keys of all claims in one step, or return False.

        False means that no key was released.
        """
        return False

    def holder(self, key: str) -> Holder | None:
        """Return the holder of a key, which may be stale, or None if it is free.

        ``key`` includes the prefix.
        """
        raise NotImplementedError

    def taken_by(self, claim: Claim, token: int, age: float) -> str | None:
        """Return a phrase about the caller that took the key from a lost claim.

        The phrase is part of an error message. None means that the caller is not known.
        ``token`` and ``age``, in seconds, are those of the lost hold.
        """
        holder = None if claim.shared else self.holder(claim.key)
        return (
            None
            if holder is None or holder.token == token
            else f"it is held by {holder}"
        )

    def sharers(self, key: str) -> tuple[Sequence[Holder], int]:
        """Return the holders that share a key, and the number of its waiters.

        ``key`` includes the prefix.
        """
        return (), 0

    def crowded(self, key: str) -> bool:
        """Return whether the key is known to have waiters, without a request."""
        return False

    def enqueue(
        self, claim: Claim, channel: str = "", position: int | None = None
    ) -> Ticket | None:
        """Add the claim to the queue, and return its ticket.

        Return None if queueing is not possible at the moment. A ticket that
        ``must_retry`` but has no position means that the claim was not queued, since
        the key is free.
        Position 0 means that the key is reserved for the claim. Acquiring it may still
        fail, for example while another transaction has locked a row.

        ``position`` is an earlier one of the claim, which it gets again. A grant is
        notified on ``channel``. Without a channel, a backend that ``tells_here``
        returns a ticket of the ``own_thread``.
        """
        raise NotImplementedError

    def poll(
        self, claims: Sequence[Claim], *, heartbeat: bool = True
    ) -> Mapping[str, Ticket]:
        """Return the tickets of queued claims by owner, and advance the queue.

        ``heartbeat`` sends a heartbeat for the claims, since a claim without one is
        skipped. An owner that is missing is not in the queue any more.
        """
        raise NotImplementedError

    def wait(self, claim: Claim, timeout: float | None) -> bool:
        """Wait in this thread until the state of a claim may have changed.

        The claim has a ticket of the ``own_thread``. ``timeout`` is in seconds. Return
        False at once if the claim no longer has such a ticket.
        """
        raise NotImplementedError

    def move_on(self, key: str) -> bool:
        """Grant the key to the first waiter if it is free.

        Return True if no holder or waiter is in the way any more.
        """
        raise NotImplementedError

    def waiting(self, key: str) -> int:
        """Return the number of claims that are queued for the key."""
        return 0

    def notifier(self, channel: str) -> Notifier | None:
        """Listen on a channel with this thread's connection.

        Return None if the backend has to be polled instead.
        """
        return None

    def in_transaction(self) -> bool:
        """Return whether a statement would now be part of a caller's transaction."""
        return False

    def lacks_connection(self) -> bool:
        """Return whether a statement would now first take a pooled connection."""
        return False

    def connect(self) -> None:
        """Open the connection of this thread, if the backend uses one."""

    def must_ask_outside(self) -> bool:
        """Return whether lease requests must not use the caller's connection.

        They use a connection of the process instead.
        """
        return (
            self.in_transaction() and self.refusal(ANY_LEASE) is None
        ) or self.lacks_connection()

    def close(self) -> None:
        """Close the resources that this thread has open for the backend."""

    def check(self) -> list[Any]:
        """Return Django's check messages about this alias."""
        return []


def check_prefix(prefix: object) -> None:
    """Raise ValueError if keys cannot start with this prefix."""
    if not isinstance(prefix, str) or "\0" in prefix or len(prefix) >= KEY_LENGTH:
        raise ValueError(
            f"prefix must be a string of fewer than {KEY_LENGTH} characters without NUL"
        )
