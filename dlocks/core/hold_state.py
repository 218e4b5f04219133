"""The state of a hold: its grant, its deadline, and the entries of its caller."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from dlocks.backends.base import Backend
from dlocks.core.callers import Caller, EntryKey, hold_by, holds_by_caller, is_outside
from dlocks.runtime import clock
from dlocks.runtime.clock import FOREVER
from dlocks.runtime.connected import connection_of
from dlocks.runtime.coroutines import refuse_in_a_coroutine
from dlocks.runtime.keeper import keeper
from dlocks.transactions import TransactionMarker
from dlocks.values import Claim, Grant

if TYPE_CHECKING:
    from dlocks.protocols import Policy

# Seconds after which a short lease from the queue is first renewed.
RENEW_SOON = 0.1

# Refused before anything happens, so that the asynchronous method can do it.
ensure_sync = partial(
    refuse_in_a_coroutine,
    "'async with', or the method with an 'a', as in 'await hold.arelease()'",
)


class HoldState:
    """What this process knows of a hold without asking the backend."""

    # Number of 'with hold' blocks that are open.
    _blocks = 0
    _ended = False
    _lost: str | None = None
    _failed = False
    # Created by the thread that settles the hold, and set when it is done.
    _settled: threading.Event | None = None
    # The file and the line that acquired it, where Python reports unclosed resources.
    acquired_at: tuple[str, int] | None = None
    # Whether it was reported as not released for a long time, or need not be.
    slow_reported = False
    # When the backend last answered a renewal.
    _answered_at = 0.0
    # The transaction of the hold, and the point in it.
    _connection: Any = None
    _mark: TransactionMarker | None = None

    def __init__(
        self,
        lock: Policy,
        backend: Backend,
        claim: Claim,
        grant: Grant,
        caller: Caller,
        sent: float,
        waited: float,
    ) -> None:
        lease = claim.ttl if grant.lease is None else min(grant.lease, claim.ttl)
        self.lock = lock
        self.backend = backend
        self.claim = claim
        self.scope: str = claim.scope
        self.token = grant.token
        self.takeover = grant.takeover
        self.waited = waited
        self.caller = caller
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._count = 1
        # Whether all entries accept a release before the transaction ends.
        self.leaves_at_exit = lock.release_at == "exit"
        self._granted_at = clock.now()
        # Counted from before the request, so it always passes before the backend's
        # deadline.
        self._deadline = FOREVER if self.scope == "transaction" else sent + lease
        self._last_at = FOREVER if lock.max_hold is None else sent + lock.max_hold
        # Without renewal, a hold still lasts for its ttl if the backend grants shorter
        # leases.
        short = grant.lease is not None and backend.renew_every < FOREVER
        self._kept_until = FOREVER if lock.renew else sent + claim.ttl if short else 0.0
        # The first lease of a queued claim is short. Only a very short hold needs no
        # renewal.
        due = self._granted_at + RENEW_SOON if grant.lease else sent + lease / 3
        self.renew_at = min(due, self._granted_at + backend.renew_every)
        # Transactions in which the lease was left, and at whose end it is released.
        self._left_in: list[TransactionMarker] = []
        # Transactions of hold.atomic() that keep the key, whatever the clocks say.
        self.pinned_in: list[TransactionMarker] = []
        # Its keys in holds_by_caller.
        self.entered_as: list[EntryKey] = []
        if self.scope == "transaction":
            self._connection = connection_of(backend.database)
            self._mark = TransactionMarker.here(self._connection)
            self._mark.keys.add((backend.identity, claim.key))

    def __repr__(self) -> str:
        return (
            f"<Hold {self.key!r} token={self.token} count={self._count}"
            f" {'held' if self.held else 'ended or lost'}>"
        )

    @property
    def key(self) -> str:
        return self.lock.key

    @property
    def keys(self) -> tuple[str, ...]:
        return self.lock.keys

    @property
    def tokens(self) -> dict[str, int]:
        """Return the fencing tokens by key.

        There is one, unless several keys are held.
        """
        return {self.key: self.token}

    @property
    def owner(self) -> str:
        return self.claim.owner

    @property
    def count(self) -> int:
        """Return how often the holder has entered and not left."""
        return self._count

    @property
    def held(self) -> bool:
        """Return whether the key is certainly held. This does no I/O.

        False may mean that the state is unknown.
        """
        if self.is_over:
            return False
        if self.scope == "transaction":
            return self._mark is not None and self._mark.stands
        return clock.now() < self._deadline

    @property
    def remaining(self) -> float:
        """Return the seconds for which the key is held without a renewal.

        This is infinite in a transaction.
        """
        return max(0.0, self._deadline - clock.now()) if self.held else 0.0

    @property
    def age(self) -> float:
        """Return the seconds since the grant."""
        return clock.now() - self._granted_at

    @property
    def is_over(self) -> bool:
        """Return whether the hold has ended, is lost, or is a parent process's."""
        return self._ended or self._lost is not None or self._pid != os.getpid()

    @property
    def pinned(self) -> bool:
        """Return whether an open transaction of ``atomic()`` keeps the key."""
        return any(mark.stands for mark in list(self.pinned_in))

    @property
    def mark(self) -> TransactionMarker | None:
        """Return the marker of the transaction to which the hold belongs."""
        return self._mark

    @property
    def in_transactions(self) -> bool:
        """Return whether the hold's state depends on the end of transactions."""
        return bool(self.pinned_in or self._left_in)

    # Internal methods.

    def _ask(self, function: Any, *arguments: Any, **keywords: Any) -> Any:
        """Call the backend about the hold.

        A lease is handled outside of the caller's transaction and pool.
        """
        backend = self.backend
        if (
            self.scope == "transaction"
            and connection_of(backend.database) is not self._connection
        ):
            raise RuntimeError(
                f"{self.key!r} is held by a transaction of another thread. Only that"
                " thread can use the hold."
            )
        # Within hold.atomic() only the caller's transaction can write the row.
        if (
            self.scope == "lease"
            and is_outside(backend)
            and (not self.pinned or backend.connect_first)
        ):
            return keeper.run(partial(function, *arguments, **keywords), backend)
        return function(*arguments, **keywords)

    def _forget_entries(self) -> None:
        # Weak references would go by themselves. But Python swallows a Ctrl-C that
        # comes while one dies.
        for key in self.entered_as:
            if hold_by(key) is self:
                del holds_by_caller[key]
