"""The acquisition of a lock: the requests, the grants and the cancellation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from dlocks.backends.base import HANDOVER_LEASE, TableLockedError, UnstorableKeyError
from dlocks.core.callers import note_acquired, note_hold, run_outside
from dlocks.core.hold import Hold
from dlocks.core.kept_hold import KeptHold
from dlocks.core.wait import Wait
from dlocks.exceptions import LockBackendError, LockError, LockNotAwaitable
from dlocks.runtime import clock
from dlocks.runtime.connected import connection_of
from dlocks.runtime.keeper import OUTSIDE_TIMEOUT, keeper
from dlocks.runtime.waiter import Waiter
from dlocks.runtime.waiters import waiters_of
from dlocks.signals import send_acquired, send_ended
from dlocks.values import Claim, Grant

A = TypeVar("A")
T = TypeVar("T")

logger = logging.getLogger("dlocks")

CANNOT_CANCEL = "The claim on %r could not be cancelled, and expires by itself: %s"
# What an error says if a reply was lost and the cancellation failed too.
NOTE = "If the key was acquired all the same, it is free again when its ttl has passed."


class Acquisition(Wait):
    """The acquisition of a lock by one caller.

    It enters the caller's hold, or claims the key and waits for it. A driver runs its
    steps (see ``dlocks.core.drive``). ``wakeup.wake()`` is called, in any thread, when
    a retry before the end of a pause is worthwhile.
    """

    hold: Hold | None = None
    # Whether the last request was granted.
    granted = False

    def steps(self) -> Iterator[float | None]:
        """Request the key until it is granted, and set ``hold``.

        Yield the seconds until the next request, or None for no limit. Raise
        LockTimeout when ``timeout`` has passed.
        """
        while (hold := self._once()) is None:
            self.wakeup.arm()
            yield self._next_pause()
        self.hold = hold
        if self.keep:
            note_acquired(self.lock, hold._state)

    def _once(self) -> Hold | None:
        """Request the key once, and return the hold or None."""
        if self.claim is not None and self._kept_for() == 0:
            # The caller can now enter the hold that it left. Waiting would be in vain.
            self.cancel()
            self.claim = None
        if self.claim is None and (mine := self.begin()) is not None:
            return mine
        claim = self.claim or self._claim()
        if (
            self.waiter is not None
            and (hold := self._granted_by_notification(claim, self.waiter)) is not None
        ):
            return hold
        if self._should_queue(claim) or (
            self.waiter is not None and self.waiter.is_queued and not self.waiter.woken
        ):
            # A grant by the queue also ends the claim's position. A direct request
            # would leave it behind.
            return None
        sent = clock.now()
        grant = self.ask_for([self], self.backend.acquire, claim)
        return None if grant is None else self.accept(grant, sent)

    @staticmethod
    def ask_for(
        acquisitions: Sequence[Acquisition],
        acquire: Callable[[A], T | None],
        claimed: A,
    ) -> T | None:
        """Request the claims, and record whether they may have been granted."""
        for one in acquisitions:
            one.asked = one.unknown = True
            one.granted = False
        answer: T | None = None
        try:
            answer = acquisitions[0]._ask(acquire, claimed)
        except TableLockedError:
            for one in acquisitions:
                # A release would wait for the table too, and end the caller's
                # transaction.
                one.unknown = not one.in_transaction
            raise
        except LockBackendError as error:
            for one in acquisitions:
                one.failure = error
                one.unknown = not error.changed_nothing
            raise
        except (LockError, RuntimeError, UnstorableKeyError) as refusal:
            # A refused request has granted nothing to release. For a lease, a
            # RuntimeError is no refusal. A signal handler has raised it.
            for one in acquisitions:
                one.unknown = (
                    isinstance(refusal, RuntimeError) and not one.in_transaction
                )
            if not (
                isinstance(refusal, LockNotAwaitable)
                and all(one.timeout == 0 for one in acquisitions)
            ):
                raise
        for one in acquisitions:
            one.unknown = one.granted = answer is not None
        return answer

    def accept(self, grant: Grant, sent: float) -> Hold | None:
        """Return the granted hold, or None if it expired before the reply came."""
        claim = self.claim or self._claim()
        lease = claim.ttl if grant.lease is None else min(grant.lease, claim.ttl)
        if claim.scope == "lease" and clock.now() >= sent + lease:
            self.cancel()
            self.claim = self._claim()
            return None
        return self._hold(claim, grant, sent)

    def cancel(self) -> None:
        """Cancel the claim, and leave nothing acquired or queued."""
        if self.entering is not None:
            self.entering.revert_entry(self.entry)
        waiter = self.waiter
        if waiter is not None:
            waiters_of(self.backend).remove(waiter)
        if self.claim is None or not (self.unknown or waiter is not None):
            return
        ended = self.hold is not None and self.hold._state.discard()
        release = partial(self.backend.release, self.claim, failed=True)
        try:
            if self.failure is not None and self.failure.is_pending:
                # The worker is still busy with the request, and has to answer it first.
                keeper.post(partial(self._cancel_later, release), self.backend)
            elif waiter is None:
                self._ask(release)
            elif not self._release_inside(release):
                run_outside(release, self.backend, OUTSIDE_TIMEOUT)
        except LockError as trouble:
            if self.failure is None:
                logger.warning(CANNOT_CANCEL, self.lock.key, trouble)
            elif NOTE not in getattr(self.failure, "__notes__", ()):
                # The caller is about to get the error of the claim itself.
                self.failure.add_note(NOTE)
        self.unknown, self.waiter = False, None
        if ended and self.hold is not None:
            send_ended(self.hold, "released")

    def abandon(self) -> None:
        """Let the background threads cancel the acquisition of a closed coroutine."""
        if self.waiter is not None:
            self.waiter.closed = True
        # What is part of a transaction ends with it.
        if not self.in_transaction:
            keeper.post(self.cancel, self.backend)

    # Internal methods.

    def _cancel_later(self, release: Callable[[], bool]) -> None:
        try:
            release()
        except LockError as trouble:
            logger.warning(CANNOT_CANCEL, self.lock.key, trouble)

    def _granted_by_notification(self, claim: Claim, waiter: Waiter) -> Hold | None:
        """Return the hold granted by the queue, or None if it must be requested."""
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
            return None
        grant, sent = given
        if (
            grant.lease is None
            or sent + grant.lease - clock.now() < min(claim.ttl, HANDOVER_LEASE) / 3
        ):
            # Too little of the lease is left. A new request starts a new one.
            return None
        return self._hold(claim, grant, sent)

    def _hold(self, claim: Claim, grant: Grant, sent: float) -> Hold:
        self.unknown = True
        waited = clock.now() - self.began if self.paused else 0.0
        state = KeptHold(
            self.lock, self.backend, claim, grant, self.caller, sent, waited
        )
        self.hold = Hold(state)
        note_hold(state, self._entry_key)
        if claim.scope == "lease":
            keeper.keep(state)
        if self.waiter is not None:
            waiters_of(self.backend).remove(self.waiter)
            self.waiter = None
        send_acquired(self.hold)
        return self.hold

    def _release_inside(self, release: Callable[[], bool]) -> bool:
        """Release the grant inside the caller's transaction.

        A release from outside would wait for its end. Return whether it succeeded.
        """
        if self.claim is None or self.claim.scope != "transaction" or not self.granted:
            return False
        if connection_of(self.backend.database).needs_rollback:
            return False
        with suppress(LockError):
            return release()
        return False
