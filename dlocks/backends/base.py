"""The interface of a backend. ``dlocks.values`` has what it takes and returns.

A backend is the source of truth about locks. These rules bind every backend, and
``tests/contract/`` in a checkout tests them:

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
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

from django.utils.translation import gettext_lazy

from dlocks.backends.notifiers import Notifier
from dlocks.exceptions import LockBackendError
from dlocks.runtime.clock import FOREVER
from dlocks.runtime.connected import connection_of
from dlocks.transactions import how_to_autocommit
from dlocks.values import (
    LONGEST_WAIT,
    Claim,
    Grant,
    Holder,
    Ticket,
    Waiter,
    WaitingClaim,
    check_prefix,
    seconds,
)

T = TypeVar("T")

# A claim by which to ask whether a lease is possible here at all.
ANY_LEASE = Claim(key="*", ttl=0.0, owner="")
# Seconds without a heartbeat after which a waiter is skipped.
HEARTBEAT_TIMEOUT = 2.0
# Seconds for which a key is reserved for the waiter whose turn it is.
HANDOVER_LEASE = 1.5


class UnstorableKeyError(ValueError):
    """A key that the backend cannot store. No request was sent."""


class TableLockedError(LockBackendError):
    """A statement that was cancelled because another session locked a table.

    A release would wait for the table too.
    """

    changed_nothing = True


class Inspector:
    """What error messages say about a key, beyond its holder."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def taken_by(self, claim: Claim, token: int, age: float) -> str | None:
        """Return a phrase about the caller that took the key from a lost claim.

        None means that it is not known. ``token`` and ``age`` are those of the lost
        hold.
        """
        holder = None if claim.shared else self.backend.holder(claim.key)
        if holder is None or holder.token == token:
            return None
        return f"it is now held by {holder}"

    def sharers(self, key: str) -> tuple[Sequence[Holder], int]:
        """Return the holders that share a key, and the number of its waiters."""
        return (), self.backend.waiting(key)

    def holders(self, key: str) -> Sequence[Holder]:
        """Return all holders of a key, which may be stale, in the order of grants."""
        holder, (sharers, _) = self.backend.holder(key), self.sharers(key)
        every = (holder, *sharers)
        # A database shows a writer that also reads with the token of its read lock.
        found = {(one.token, one.since): one for one in every if one is not None}
        return sorted(found.values(), key=lambda one: one.token)

    def waiters(self, key: str, prefix: str) -> Sequence[Waiter]:
        """Return the queued callers in their order, with keys without the prefix."""
        return ()

    def waiting_claims(self) -> Sequence[WaitingClaim]:
        """Return the queued claims of all callers that hold other keys."""
        return ()

    def waits_of(self, locks: Sequence[Any]) -> dict[str, list[WaitingClaim]]:
        """Return the claims of the holders of locks that wait, by key."""
        waits: dict[str, list[WaitingClaim]] = {lock.pk: [] for lock in locks}
        for claim in self.waiting_claims():
            for key in {held.key for held in claim.holding} & waits.keys():
                waits[key].append(claim)
        return waits


class Runtime:
    """What a backend needs of its process: other threads, and the holds.

    The backends of the DLOCKS setting get the runtime of ``dlocks.conf``, which uses
    the keeper. This one serves a backend that is used alone.
    """

    def __init__(self, backend: Backend) -> None:
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

    def backend_of(self, alias: str) -> Backend:
        """Return the backend of another alias."""
        raise NotImplementedError


class Backend:
    """The base class of all backends.

    The keyword arguments of the constructor are ``DLOCKS[alias]["OPTIONS"]``.

    ``prefix`` precedes every key. It may be a function without arguments, which can
    give each tenant its own keys. It is called for each attempt to acquire, in the
    caller's thread (for a coroutine, in the thread of ``sync_to_async()``).

    ``ttl``, ``timeout`` and ``grace`` are in seconds. A lease outlives its last renewal
    by ``ttl``. A caller waits for ``timeout`` by default, and without limit if it is
    ``None``. An expired lease is not taken over before ``grace`` has passed, to
    tolerate clock steps. A wait of at least ``slow_wait`` seconds, or a hold of at
    least ``slow_hold`` seconds, is logged as a warning. A hold that is not released is
    reported while it lasts, without ``slow_hold`` after ten times its ttl.
    """

    # Whether two claims of one key exclude each other.
    exclusive: ClassVar[bool] = True
    # Whether a hold can belong to the caller's transaction and end with it.
    supports_transactions: ClassVar[bool] = False
    # Whether claims can queue, and are granted in turn.
    supports_queue: ClassVar[bool] = False
    # Whether a grant of the queue is valid for the lease that it states. Otherwise the
    # claim is acquired again.
    grants_in_queue: ClassVar[bool] = True
    # Whether a claim occupies a connection while it queues. An election, whose wait may
    # last for weeks, then polls instead.
    waits_in_statement: ClassVar[bool] = False
    # Whether several claims can share a key.
    supports_sharing: ClassVar[bool] = False
    # Whether tokens grow even if the backend's clock steps back.
    supports_fencing: ClassVar[bool] = True
    # Whether ``pin()`` can keep a key for a hold until a transaction in ``database``
    # has ended.
    supports_guard: ClassVar[bool] = False
    # Why ``keys()`` is not possible, as a sentence. Empty if it is.
    unlisted: ClassVar[Any] = gettext_lazy("This backend cannot list its locks.")
    # The alias of the database that contains the locks, if there is one.
    database: str = ""
    # Whether ``exchange()`` can replace a held claim with another.
    supports_handover: ClassVar[bool] = False
    # The keys that are known to have waiters. Their claims queue before a request.
    contended: Container[str] = frozenset()
    # The ``Waiters`` of this process. It is created for the first waiter.
    waiters: Any = None
    # The function of the setting HOLDER. It returns a text about the caller.
    describe_caller: Callable[[], object] | None = None
    # The seconds of waiting after which to look for a deadlock, or None.
    deadlock_after: float | None = None
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
        self.inspector = Inspector(self)
        self._prefix = prefix
        self.ttl = seconds("ttl", ttl, above_zero=True)
        if timeout is not None:
            timeout = seconds("timeout", timeout, longest=LONGEST_WAIT)
        self.timeout = timeout
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
    def connect_first(self) -> Callable[[], object] | None:
        """Return what connects, if a statement would first need a pool's connection."""
        return None

    @property
    def renews_late(self) -> bool:
        """Return whether an open transaction blocks all other writes.

        If so, ``renew()`` respects ``Claim.late``. An expired lease is only lost once
        another caller has acquired the key.
        """
        return False

    @property
    def reads_inside(self) -> bool:
        """Return whether only the caller's transaction sees all of the keys."""
        return False

    def can_queue(self, claim: Claim) -> bool:
        """Return whether a claim can join the queue here. No query is sent."""
        return self.supports_queue

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
                f"Autocommit is off on {database!r}, so Django does not report when"
                " this transaction ends. Use 'with atomic()' or scope='lease'."
                f" {how_to_autocommit(database)}."
            )
        return None

    def acquire(self, claim: Claim) -> Grant | None:
        """Grant the claim, or return None if its key is held; never wait."""
        raise NotImplementedError

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        """Extend the lease of each claim to its full ttl from now.

        Return the seconds left by owner, counted from the time of this call. An owner
        that is missing has lost its hold. If a row is locked at the moment, its
        remaining lease is returned. If that is longer than the ttl, less than the ttl
        is returned instead, because the lease could not be shortened.

        An expired lease is only extended for a claim that is ``late``, by a backend
        that ``renews_late``.
        """
        raise NotImplementedError

    def verify(self, claims: Sequence[Claim], count: int | None = None) -> bool:
        """Write the hold count of one claim, and return whether it is still held.

        This also renews a claim that is ``late``. Without a count, return whether
        several claims are all certainly held, as read in one step. False then only
        means that each has to be verified.
        """
        raise NotImplementedError

    def release(
        self, claim: Claim, *, failed: bool = False, rest_for: float = 0.0
    ) -> bool:
        """Release the key, or cancel a claim that may be granted or queued.

        The key stays taken for another ``rest_for`` seconds. Return False if the claim
        no longer held the key.
        """
        raise NotImplementedError

    def pin(self, claim: Claim, database: str) -> bool:
        """Renew a lease within the open transaction of ``database``.

        No other claim can acquire the key until that transaction has ended. Return
        False if the claim no longer holds the key, or if its lease has expired and the
        claim is not ``late``.
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

    def acquire_all(
        self, claims: Sequence[Claim], *, until: float = FOREVER
    ) -> Sequence[Grant] | None:
        """Grant all of the claims in one step, or return None; never wait.

        None means that no claim was granted. The claims differ only in key and owner,
        and are sorted by key. Preparations that take long, as for many new keys, end
        at ``until``, a time of ``dlocks.runtime.clock.now()``.
        """
        return None

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

    def keys(self) -> Sequence[str]:
        """Return the keys under the prefix that are held."""
        raise NotImplementedError

    def clear(self, key: str, version: int, *, stale_only: bool = False) -> bool:
        """End the hold with this token, and return whether there was one."""
        raise LockBackendError(f"{type(self).__name__} cannot clear locks.")

    def enqueue(
        self, claim: Claim, channel: str = "", position: int | None = None
    ) -> Ticket | None:
        """Add the claim to the queue, and return its ticket.

        Return None if queueing is not possible at the moment. A ticket that
        ``must_retry`` but has no position means that the claim was not queued, since
        the key is free. Position 0 means that the key is reserved for the claim.
        Acquiring it may still fail, for example while another transaction has locked a
        row.

        ``position`` is an earlier one of the claim, which it gets again. A grant is
        notified on ``channel``, if it is not empty.
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

    def close(self) -> None:
        """Close the resources that this thread has open for the backend."""

    def check(self) -> list[Any]:
        """Return Django's check messages about this alias."""
        return []
