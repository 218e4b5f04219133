"""What a caller does first: it enters the hold that it has, or makes a claim."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from dlocks.conf import backends
from dlocks.core.callers import Caller, hold_by
from dlocks.core.hold import Hold
from dlocks.core.holder import own_holder_name, own_ip
from dlocks.core.kept_hold import KeptHold
from dlocks.core.policy import FromSettings, LockPolicy
from dlocks.runtime import clock
from dlocks.runtime.clock import FOREVER
from dlocks.runtime.connected import connection_of
from dlocks.runtime.keeper import LONGEST_TIMEOUT, OUTSIDE_TIMEOUT, keeper
from dlocks.runtime.requests import refuse_nested, request
from dlocks.transactions import TransactionMarker, warn_of_old_snapshots
from dlocks.values import UNLIMITED, Claim


class Wakeup(Protocol):
    """What wakes a waiting caller."""

    def arm(self) -> None: ...
    def wake(self) -> None: ...


class Claims:
    """The first step of an acquisition: to enter a hold, or to make a claim."""

    claim: Claim | None = None
    # The hold that is entered again.
    entering: KeptHold | None = None

    def __init__(
        self,
        lock: LockPolicy,
        caller: Caller,
        wakeup: Wakeup,
        *,
        wait: bool,
        keep: bool = False,
    ) -> None:
        self.lock = lock
        # Whether the hold is kept alive until it ends.
        self.keep = keep
        self.caller = caller
        self.wakeup = wakeup
        self.backend = backends[lock.using]
        timeout = (
            self.backend.timeout
            if isinstance(lock.timeout, FromSettings)
            else lock.timeout
        )
        self.timeout = timeout if wait else 0.0
        self.key = lock._full_key(self.backend)
        self._entry_key = caller, self.backend.identity, self.key, lock.shared
        self.began = clock.now()
        # The entry of this acquisition in a hold that is entered again.
        self.entry = object()

    @property
    def in_transaction(self) -> bool:
        """Return whether the claim is to be part of the caller's transaction."""
        return self.lock.scope == "transaction" or (
            self.claim is not None and self.claim.scope == "transaction"
        )

    def begin(self) -> Hold | None:
        """Enter and return the hold that the caller has, or else make the claim."""
        refuse_nested()
        mine = self._own_hold()
        if mine is not None and self._enter(mine):
            return mine.hold  # type: ignore[no-any-return]
        self.claim = self._claim()
        connect = self.backend.connect_first
        if connect is not None and not keeper.keeps_for(self.caller):
            # Connect before waiting. Otherwise the callers behind this one may use up
            # the pool before its turn. A caller that holds a lock must not wait for the
            # pool, because waiters for that lock may have used it up.
            request(connect)
        return None

    # Internal methods.

    def _own_hold(self) -> KeptHold | None:
        """Return the hold of the same caller to enter, or None."""
        mine: KeptHold | None = hold_by(self._entry_key)
        if mine is None or not mine.enterable:
            return None
        reentrant = self.lock.reentrant and mine.lock.reentrant
        if mine.count and not reentrant and (self.lock.shared or _is_lost(mine)):
            return None
        return mine

    def _kept_for(self) -> float:
        """Return the seconds for which the caller's own left hold keeps the key.

        This is infinite if the caller has left no hold in a transaction.
        """
        mine: KeptHold | None = hold_by(self._entry_key)
        return FOREVER if mine is None or not mine.is_left else mine.lease.kept_for

    def _enter(self, hold: KeptHold) -> bool:
        if hold.count and not (self.lock.reentrant and hold.lock.reentrant):
            raise RuntimeError(
                f"{self.lock.key!r} is already held by this"
                f" {'task' if hasattr(self.caller, 'get_loop') else 'thread'}, which"
                " cannot acquire it again because of reentrant=False."
            )
        if hold.scope == "transaction" and self.lock.scope == "lease":
            raise RuntimeError(
                f"{self.lock.key!r} is already held by the transaction of this thread."
                " A lease would have to wait for the end of that transaction. Leave out"
                " scope='lease' to use the transaction's hold."
            )
        if hold.scope == "lease" and self.lock.scope == "transaction":
            raise RuntimeError(
                f"{self.lock.key!r} is already held by this caller as a lease, which is"
                " not part of the transaction. Begin the transaction with 'with"
                " hold.atomic()' of the lease, or leave out scope='transaction'."
            )
        # First, so that an interrupt cannot leave an entry behind.
        self.entering = hold
        if not hold.enter(self.lock, self.entry):
            self.entering = None
        return self.entering is not None

    def _claim(self) -> Claim:
        lock, backend = self.lock, self.backend
        other: KeptHold | None = hold_by(
            (self.caller, backend.identity, self.key, not lock.shared)
        )
        if other is not None and not (
            other.is_left or (other.enterable and other.count and not _is_lost(other))
        ):
            other = None
        if other is not None and not lock.shared:
            what = "permit" if other.lock.permits < UNLIMITED else "read lock"
            kept = " It is kept until the transaction ends." if other.is_left else ""
            raise RuntimeError(
                f"The {what} on {lock.key!r} cannot be upgraded to a write lock: two"
                f" callers doing this would deadlock. Release the {what} first, or take"
                f" the write lock from the start.{kept}"
            )
        in_transaction = backend.in_transaction()
        ttl = backend.ttl if isinstance(lock.ttl, FromSettings) else float(lock.ttl)
        if lock.max_hold is not None:
            ttl = min(ttl, lock.max_hold)
        belongs = in_transaction and backend.supports_transactions
        claim = Claim(
            key=self.key,
            ttl=ttl,
            scope=lock.scope or ("transaction" if belongs else "lease"),
            takeover=lock.takeover,
            fair=lock.fair,
            shared=lock.shared,
            permits=lock.permits,
            beside=other.claim.owner if other is not None else "",
            holder=own_holder_name(),
            owner_ip=own_ip(),
        )
        why = backend.refusal(claim)
        if why and lock.shared and lock.scope is None and belongs:
            claim = replace(claim, scope="lease")
            why = backend.refusal(claim)
        if why is not None:
            text = f"{lock.key!r} cannot be acquired here. {why}"
            # A claim that is only refused for its ttl has a wrong argument.
            if backend.refusal(replace(claim, ttl=0.0)) is None:
                raise ValueError(text)
            raise RuntimeError(text)
        if claim.scope == "lease":
            locked: Collection[Any] = ()
            if in_transaction:
                locked = TransactionMarker.keys_of(connection_of(backend.database))
            if (backend.identity, self.key) in locked:
                raise RuntimeError(
                    f"{lock.key!r} is kept by the transaction of this thread until it"
                    " ends. A lease or a shared hold would have to wait for that."
                )
            warn_of_old_snapshots(lock.key)
        return claim

    @property
    def _deadline(self) -> float:
        return FOREVER if self.timeout is None else self.began + self.timeout

    @property
    def _reply_timeout(self) -> float:
        """Return the seconds in which a request outside must be answered."""
        if self.timeout is None:
            return LONGEST_TIMEOUT
        return max(0.0, self._deadline - clock.now()) + OUTSIDE_TIMEOUT

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the backend.

        A lease is requested outside of the caller's transaction and pool.
        """
        lease = self.claim is not None and self.claim.scope == "lease"
        ask = partial(request, function, *arguments)
        if lease and (self.backend.in_transaction() or self.backend.connect_first):
            refuse_nested()
            return keeper.run(ask, self.backend, timeout=self._reply_timeout)
        return ask()


def _is_lost(hold: KeptHold) -> bool:
    """Return whether a hold is lost. Its caller forgets it then."""
    if hold.keeps:
        return False
    hold.loss(hold.lease.why_not())
    return True
