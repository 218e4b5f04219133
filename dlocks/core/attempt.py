"""The attempt to acquire one key: the requests, the wait, and its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from dlocks.backends.base import (
    ANY_LEASE,
    HANDOVER_LEASE,
    Backend,
    UnstorableKeyError,
)
from dlocks.core import callers, confirm, explain
from dlocks.core.callers import Caller
from dlocks.core.claims import (
    claim_for,
    own_hold,
    refuse_own_wait,
    until_reentry,
)
from dlocks.core.entry import Entry
from dlocks.core.hold import Hold
from dlocks.core.holding import Holding
from dlocks.core.policy import LockPolicy
from dlocks.exceptions import LockBackendError, LockError, LockNotAwaitable
from dlocks.runtime import clock
from dlocks.runtime.clock import FOREVER
from dlocks.runtime.connected import connection_of
from dlocks.runtime.delays import FIRST_DELAY, delays
from dlocks.runtime.keeper import LONGEST_TIMEOUT, OUTSIDE_TIMEOUT, keeper
from dlocks.runtime.requests import refuse_nested, request
from dlocks.runtime.threads import PythonIsExitingError
from dlocks.runtime.waiters import Waiter, waiters_of
from dlocks.signals import send_event
from dlocks.values import Claim, Grant, Ticket

A = TypeVar("A")
T = TypeVar("T")

logger = logging.getLogger("dlocks")

CANNOT_CANCEL = (
    "The request for %r could not be cancelled. The key is free again after its ttl at"
    " the latest: %s"
)
# What an error says if a reply was lost and the cancellation failed too.
NOTE = "If the key was acquired all the same, it is free again when its ttl has passed."

# The end of the requests of an acquisition.
DONE = object()


class Wakeup(Protocol):
    """What wakes a waiting caller."""

    def wake(self) -> None: ...
    def rest(self, seconds: float | None) -> Any: ...


class Attempt:
    """The attempt of a caller to acquire one key.

    It enters the hold that the caller has, or claims the key and waits in its queue.
    """

    claim: Claim | None = None
    # The entry by which the key is acquired, once it is.
    is_granted = has_entered = False
    # The hold for its caller, even if it is lost before that has it.
    face: Hold | None = None
    # The pauses between tries, where there is no queue.
    delays: Iterator[float] | None = None
    paused = asked = False
    # Whether a request may have been granted although no reply says so, and whether the
    # last one was granted.
    may_be_granted = was_granted = False
    failure: LockBackendError | None = None
    # Set while the claim is queued, and whether to retry once more after a
    # notification.
    waiter: Waiter | None = None
    asks_again = False

    def __init__(
        self,
        lock: LockPolicy,
        key: str,
        *,
        backend: Backend,
        caller: Caller,
        wakeup: Wakeup,
        timeout: float | None,
        began: float,
        block: bool,
    ) -> None:
        self.caller, self.wakeup = caller, wakeup
        self.timeout, self.began, self.block = timeout, began, block
        self.deadline = FOREVER if timeout is None else began + timeout
        self.lock = lock
        self.backend = backend
        self.key = key
        self.place = self.backend.identity, key, lock.shared
        # Made before it is added to a hold, so that it can always be left.
        self.entry = Entry(self.caller, lock)

    # To begin.

    def begin(self) -> None:
        """Enter the hold that the caller has, or else make a claim."""
        refuse_nested()
        caller = self.caller
        if self.place in callers.places_of(caller):
            # Usually it is not there, and this is the only cost.
            hold = own_hold(self)
            if hold is not None and self._enter(hold):
                return
        self.claim = claim_for(caller, self.place, self.lock, self.backend)
        connect = self.backend.connect_first
        if connect is not None and not callers.holds_any(caller):
            # Connect before waiting. Otherwise the callers behind this one may use up
            # the pool before its turn. A caller that holds a lock must not wait for the
            # pool, because waiters for that lock may have used it up.
            request(connect)

    def _enter(self, hold: Holding) -> bool:
        self.entry.hold = hold
        if not hold.enter(self.entry, block=self.block):
            return False
        self.face = hold.face
        confirm.check(hold)
        self.is_granted = self.has_entered = True
        return True

    # To request.

    def step(self) -> float | object | None:
        """Request the key once. Return DONE, or the seconds until the next request."""
        self._request()
        if self.is_granted:
            return DONE
        left_for = until_reentry(self.caller, self.place)
        pause = min(self._pause(), left_for)
        return None if pause == FOREVER else pause

    def _request(self) -> None:
        caller = self.caller
        if self.claim is not None and until_reentry(caller, self.place) == 0:
            # The caller can now enter the hold that it left. Waiting would be in vain.
            self.cancel()
            self.claim = None
        if self.claim is None:
            self.begin()
            if self.is_granted:
                return
        claim = self.claim or self.ensure_claim()
        if self.waiter is not None and self._accept_notified(claim, self.waiter):
            return
        if self._should_queue(claim) or (
            self.waiter is not None and self.waiter.is_queued and not self.waiter.woken
        ):
            # A grant by the queue also ends the claim's position. A direct request
            # would leave it behind.
            return
        sent = clock.now()
        grant = ask_for([self], self.backend.acquire, claim)
        if grant is not None:
            self.accept(grant, sent)

    def ensure_claim(self) -> Claim:
        if self.claim is None:
            self.claim = claim_for(self.caller, self.place, self.lock, self.backend)
        return self.claim

    @property
    def has_transaction_scope(self) -> bool:
        """Return whether the claim is to be part of the caller's transaction."""
        return self.lock.scope == "transaction" or (
            self.claim is not None and self.claim.scope == "transaction"
        )

    @property
    def reply_timeout(self) -> float:
        """Return the seconds in which a request outside must be answered."""
        if self.timeout is None:
            return LONGEST_TIMEOUT
        return max(0.0, self.deadline - clock.now()) + OUTSIDE_TIMEOUT

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the backend, for a lease outside of the transaction and the pool."""
        if (
            self.claim is not None
            and self.claim.scope == "lease"
            and (self.backend.in_transaction() or self.backend.connect_first)
        ):
            refuse_nested()
            ask = partial(request, function, *arguments)
            return keeper.run(ask, self.backend, timeout=self.reply_timeout)
        return request(function, *arguments)

    def accept(self, grant: Grant, sent: float) -> None:
        """Hold the key, unless its lease has expired before the reply came."""
        claim = self.claim or self.ensure_claim()
        lease = claim.ttl if grant.lease is None else min(grant.lease, claim.ttl)
        if claim.scope == "lease" and clock.now() >= sent + lease:
            self.cancel()
            self.claim = claim_for(self.caller, self.place, self.lock, self.backend)
        else:
            self.begin_hold(grant, sent)

    def _accept_notified(self, claim: Claim, waiter: Waiter) -> bool:
        """Hold a key that the queue has granted, and return False if it has not."""
        if waiter.error is not None:
            raise waiter.error
        given, waiter.given = waiter.given, None
        if (
            given is None
            or claim.scope != "lease"
            or not self.lock.renew
            or not self.backend.grants_in_queue
        ):
            # The queue grants a short lease, which the keeper has to renew.
            return False
        grant, sent = given
        if (
            grant.lease is None
            or sent + grant.lease - clock.now() < min(claim.ttl, HANDOVER_LEASE) / 3
        ):
            # Too little of the lease is left. A new request starts a new one.
            return False
        self.begin_hold(grant, sent)
        return True

    def begin_hold(self, grant: Grant, sent: float) -> Hold:
        """Hold a granted key."""
        self.may_be_granted = True
        hold = Holding(
            self.entry,
            self.claim or self.ensure_claim(),
            grant,
            backend=self.backend,
            place=self.place,
            sent=sent,
            waited=clock.now() - self.began if self.paused else 0.0,
            block=self.block,
        )
        hold.face = self.face = face = Hold(self.lock, [hold])
        self.entry.hold = hold
        callers.add(self.entry)
        if hold.scope == "lease":
            keeper.add(hold)
        if self.waiter is not None:
            waiters_of(self.backend).remove(self.waiter)
            self.waiter = None
        self.is_granted = True
        send_event("acquired", face.lock, hold=face)
        return face

    def receive(self) -> None:
        """Let the caller have the hold that it entered again.

        The ``min_hold`` of the entry counts from now on.
        """
        self.entry.hold.life.receive(self.entry)
        if self.lock.min_hold:
            self.entry.min_hold_until = clock.now() + self.lock.min_hold

    # To wait.

    def _pause(self) -> float:
        refuse_own_wait(self.caller, self.place, self.lock)
        left = self.deadline - clock.now()
        claim = self.claim
        if claim is not None and (claim.beside or not self.backend.can_queue(claim)):
            # Beside its own exclusive hold, a claim would queue behind itself.
            claim = None
        if self.waiter is None and claim is not None and claim.fair and left > 0:
            self.paused = True
            if self._join_queue(claim):
                return 0.0
        if self.waiter is None:
            if self.delays is None:
                self.delays = delays(self.deadline)
            delay = next(self.delays, None)
            if delay is None and claim is not None and not self.asked:
                # It was too late to join the queue first. No reply has said yet that
                # the key is held.
                delay = 0.0
            if delay is not None:
                self.paused = True
                return delay
        elif left > 0 and not self.waiter.deadlock:
            if self.waiter.woken and not self.asks_again:
                # Its turn has come, but the row was locked, for example. That is most
                # likely brief.
                self.asks_again = True
                return min(FIRST_DELAY, left)
            if not self.waiter.is_queued or self.waiter.woken:
                # The row is still locked, or the waiter was late. It returns to its
                # position.
                self.waiter.woken = 0.0
                waiters_of(self.backend).mark_queued(self.waiter)
            self.asks_again = False
            return left
        elif left > -HANDOVER_LEASE and self._granted_on_last_poll(self.waiter):
            # Retry at once. If the row is locked then, pause first.
            self.waiter.deadlock = ()
            delay, self.asks_again = (FIRST_DELAY if self.asks_again else 0.0), True
            return delay
        raise explain.timeout_error(self)

    def _should_queue(self, claim: Claim) -> bool:
        """Return whether to join the queue before the first request.

        It is better if other callers were queued a moment ago.
        """
        return (
            self.waiter is None
            and not self.paused
            and self.timeout != 0
            and claim.fair
            and claim.takeover
            and not claim.beside
            and claim.key in self.backend.contended
            # No caller can queue in the transaction of a single writer. The request
            # reports that.
            and (claim.scope == "lease" or self.backend.refusal(ANY_LEASE) is None)
            and self.backend.can_queue(claim)
        )

    def _join_queue(self, claim: Claim) -> bool:
        """Join the queue, and return whether there is something to try at once."""
        waiters = waiters_of(self.backend)
        caller, looks = self.caller, self.backend.deadlock_after is not None
        holding = callers.holding_of(caller, self.backend) if looks else ()
        self.claim = claim = replace(claim, queued=True, holding=holding)
        wake, until = self.wakeup.wake, self.deadline
        self.waiter = waiter = Waiter(claim, wake, caller, until)
        try:
            waiters.enter(waiter)
        except PythonIsExitingError:
            # Only requests of this thread find out whether the key is free.
            waiters.remove(waiter)
            self.waiter = None
            return False
        sent = clock.now()
        enqueue = partial(self.backend.enqueue, claim, waiters.channel)
        try:
            ticket = callers.run_outside(enqueue, self.backend, self.reply_timeout)
        except LockBackendError as error:
            self.failure = error
            if error.changed_nothing:
                waiters.remove(waiter)
                self.waiter = None
            raise
        if ticket is None or (ticket.must_retry and ticket.position is None):
            # Queueing is not possible at the moment, or not necessary.
            waiters.remove(waiter)
            self.waiter, self.may_be_granted = None, ticket is not None
            self.claim = replace(claim, queued=False)
            return ticket is not None
        at_once = waiter.apply(ticket, sent)
        # In any case, because the first try may fail while another session reads the
        # row.
        waiters.mark_queued(waiter)
        return at_once

    def _granted_on_last_poll(self, waiter: Waiter) -> bool:
        """Return whether the key was granted at the last moment, or can be now."""
        for _ in range(2):
            sent = clock.now()
            # Nothing else sends the heartbeat if the background thread hangs.
            late = waiter.poll_at < sent
            poll = partial(self.backend.poll, [waiter.claim], heartbeat=late)
            tickets = callers.run_outside(poll, self.backend, OUTSIDE_TIMEOUT)
            # If the claim was deleted, the caller requests the key once more.
            gone = Ticket(must_retry=not waiter.woken, ahead=1)
            ticket = tickets.get(waiter.claim.owner, gone)
            if ticket.grant is not None or ticket.must_retry:
                return waiter.apply(ticket, sent)
            if ticket.ahead:
                break
            # This poll has handed a free key on. The next one shows to which claim.
        return False

    # To end without the key.

    def cancel(self) -> None:
        """Leave the entry, cancel the claim, and leave nothing acquired or queued."""
        if self.entry.hold is not None:
            self.entry.min_hold_until = 0.0
            self.entry.hold.cancel_entry(self.entry)
            self.is_granted = False
            if self.entry.hold.claim is self.claim:
                # The last one to leave the hold has released it.
                self.may_be_granted = False
        if self.waiter is not None:
            waiters_of(self.backend).remove(self.waiter)
        if self.claim is not None and (self.may_be_granted or self.waiter is not None):
            self._release(self.claim)
        self.may_be_granted, self.waiter = False, None

    def _release(self, claim: Claim) -> None:
        release = partial(self.backend.release, claim, failed=True)
        try:
            if self.failure is not None and self.failure.is_pending:
                # The worker is still busy with the request, and has to answer it first.
                keeper.post(partial(self._release_later, release), self.backend)
            elif self.waiter is None:
                self.ask(release)
            elif not self._release_inside(release):
                callers.run_outside(release, self.backend, OUTSIDE_TIMEOUT)
        except LockError as trouble:
            if self.failure is None:
                logger.warning(CANNOT_CANCEL, self.lock.key, trouble)
            elif NOTE not in getattr(self.failure, "__notes__", ()):
                # The caller is about to get the error of the claim itself.
                self.failure.add_note(NOTE)

    def _release_later(self, release: Callable[[], bool]) -> None:
        try:
            release()
        except LockError as trouble:
            logger.warning(CANNOT_CANCEL, self.lock.key, trouble)

    def _release_inside(self, release: Callable[[], bool]) -> bool:
        """Release the grant inside the caller's transaction.

        A release from outside would wait for its end. Return whether it succeeded.
        """
        if not self.has_transaction_scope or not self.was_granted:
            return False
        if connection_of(self.backend.database).needs_rollback:
            return False
        with suppress(LockError):
            return release()
        return False


def ask_for(
    attempts: Sequence[Attempt], acquire: Callable[[A], T | None], claimed: A
) -> T | None:
    """Request the claims of attempts, and note whether they may be granted."""
    for one in attempts:
        one.asked = one.may_be_granted = True
        one.was_granted = False
    answer: T | None = None
    try:
        answer = attempts[0].ask(acquire, claimed)
    except LockBackendError as error:
        for one in attempts:
            one.failure = error
            one.may_be_granted = not error.changed_nothing
        raise
    except (LockError, RuntimeError, UnstorableKeyError) as refusal:
        # A refused request has granted nothing to release. For a lease, a RuntimeError
        # is no refusal. A signal handler has raised it.
        for one in attempts:
            one.may_be_granted = (
                isinstance(refusal, RuntimeError) and not one.has_transaction_scope
            )
        if not (isinstance(refusal, LockNotAwaitable) and attempts[0].timeout == 0):
            raise
    for one in attempts:
        one.may_be_granted = one.was_granted = answer is not None
    return answer
