"""One holding of one key: its life, its lease, and the requests about it.

``Life`` decides, and this class does what it decides: it asks the backend, sends the
one release, and reports a loss. So it earns promises 2, 7 and 9 of docs/safety.md.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dlocks.backends.base import Backend
from dlocks.core import callers, explain, losses, settlement
from dlocks.core.callers import Caller, Place
from dlocks.core.confirm import verify
from dlocks.core.entry import Entry
from dlocks.core.lease import Lease
from dlocks.core.life import Effect, Life, Phase, Reason
from dlocks.core.policy import LockPolicy
from dlocks.core.settlement import is_undone, transactions_of
from dlocks.core.watch import Watch
from dlocks.exceptions import LockBackendError, LockError, LockLost
from dlocks.runtime import clock
from dlocks.runtime.clock import FOREVER
from dlocks.runtime.connected import connection_of
from dlocks.runtime.keeper import LONGEST_TIMEOUT, keeper
from dlocks.runtime.requests import refuse_nested, request
from dlocks.runtime.threads import Latch, this_thread
from dlocks.transactions import OwnTransaction, TransactionMarker, forbid_commit
from dlocks.values import Claim, Grant

logger = logging.getLogger("dlocks")


class Holding:
    """One holding of one key by this process, which any number of callers use."""

    # What a caller sees of it, until its end. No cycle remains.
    face: Any = None
    # Whether the backend has replied to the release.
    is_released = False
    # What keeps the key in transaction scope.
    transaction: OwnTransaction | None = None

    def __init__(
        self,
        entry: Entry,
        claim: Claim,
        grant: Grant,
        *,
        backend: Backend,
        place: Place,
        sent: float,
        waited: float,
        block: bool,
    ) -> None:
        self.lock: LockPolicy = entry.lock
        self.backend = backend
        self.claim = claim
        self.place = place
        self.scope: str = claim.scope
        self.token, self.takeover, self.waited = grant.token, grant.takeover, waited
        self._pid = os.getpid()
        ttl = claim.ttl if grant.lease is None else min(grant.lease, claim.ttl)
        # Counted from before the request, it always passes before the backend's one.
        deadline = FOREVER if self.scope == "transaction" else sent + ttl
        self.life = Life(entry, block=block, deadline=deadline)
        self.lease = Lease(self.lock, backend, claim, grant, sent, self.life, ttl)
        if self.lock.min_hold:
            # Counted from the reply, so it is never too short by the row's begin_time.
            entry.min_hold_until = self.lease.granted_at + self.lock.min_hold
        self.watch = Watch()
        if self.scope == "transaction":
            key = backend.identity, claim.key
            self.transaction = OwnTransaction(backend.database, key)

    # What is known without a request.

    @property
    def count(self) -> int:
        """Return how often the hold was entered and not left."""
        state = self.life.state
        # The entries of an ended hold only learn of its end.
        return 0 if state.reason is not None else len(state.entries)

    @property
    def is_lost(self) -> bool:
        """Return whether the hold was taken from the callers of its entries."""
        state = self.life.state
        return bool(state.entries) and state.is_lost

    @property
    def held(self) -> bool:
        """Return whether the key is certainly held."""
        if self.is_over:
            return False
        if self.transaction is not None:
            return self.transaction.point.stands
        return clock.now() < self.life.state.deadline

    @property
    def is_over(self) -> bool:
        """Return whether the hold has ended, is detached, or is a parent process's."""
        phase = self.life.state.phase
        return phase not in (Phase.HELD, Phase.LEFT) or self.is_forked

    @property
    def is_forked(self) -> bool:
        return self._pid != os.getpid()

    @property
    def is_left(self) -> bool:
        """Return whether only open transactions keep the hold."""
        return self.life.state.phase is Phase.LEFT and self.may_be_held

    @property
    def awaits_transactions(self) -> bool:
        """Return whether the hold's state depends on the end of transactions."""
        state = self.life.state
        return state.phase is Phase.LEFT or bool(state.pins)

    @property
    def may_be_held(self) -> bool:
        """Return whether the key is certainly held, or may still be.

        A hold may still be renewed after its lease has expired, and may go on after a
        detach that fails.
        """
        if self.is_over:
            return self.life.state.phase is Phase.DETACHING and not self.is_forked
        return not self.has_run_out() or self.life.state.is_pinned

    def has_run_out(self) -> bool:
        """Return whether its lease is over for good, or its transaction has ended."""
        if self.transaction is not None:
            return not self.transaction.point.stands
        return clock.now() >= self.life.state.deadline and not self.may_be_late

    @property
    def is_enterable(self) -> bool:
        """Return whether the same caller enters this hold, and needs no new one."""
        if self.is_over:
            return False
        if self.scope == "transaction":
            return self.held
        # A hold left in a transaction is kept for its min_hold from all callers, even
        # this one.
        left = self.life.state.phase is Phase.LEFT
        return not left or (self.may_be_held and not self.min_hold_left)

    @property
    def may_be_late(self) -> bool:
        """Return whether a renewal restores an expired lease.

        It does if no other caller has acquired the key.
        """
        return self.backend.renews_late and self.scope == "lease" and self.renewable

    @property
    def renewable(self) -> bool:
        """Return whether the keeper should renew the hold.

        Not where nothing will release it, nor beyond ``max_hold``.
        """
        is_pinned = self.life.state.is_pinned
        return not self.is_over and self.lease.can_grow and not is_pinned

    @property
    def min_hold_left(self) -> float:
        """Return the seconds for which the key stays taken after its release."""
        state = self.life.state
        until = state.min_hold_until
        for entry in state.entries:
            until = max(until, entry.min_hold_until)
        return max(0.0, until - clock.now()) if until else 0.0

    @property
    def callers(self) -> list[Caller]:
        """Return the callers of the open entries, which are threads or tasks."""
        state = self.life.state
        entries = state.entries or (state.left_by,)
        return [
            entry.caller
            for entry in entries
            if entry is not None
            and not isinstance(entry.caller, callers.PendingResponse)
        ]

    def has_open(self, entry: Entry) -> bool:
        """Return whether an entry is open, and its hold was not passed on."""
        state = self.life.state
        return entry in state.entries and state.reason is not Reason.DETACHED

    # Requests.

    def ask(self, function: Any, *arguments: Any, **keywords: Any) -> Any:
        """Call the backend about the hold.

        A lease is handled outside of the caller's transaction and pool.
        """
        if self._pid != os.getpid():
            # The key is the parent's, whatever ends this copy.
            raise self.lost_error()
        if self.scope == "transaction":
            self.refuse_other_thread()
            return request(function, *arguments, **keywords)
        ask = partial(function, *arguments, **keywords)
        return callers.run_outside(ask, self.backend, LONGEST_TIMEOUT)

    def refuse_other_thread(self) -> None:
        """Raise RuntimeError if the hold belongs to another thread's transaction."""
        own, database = self.transaction, self.backend.database
        if own is not None and connection_of(database) is not own.connection:
            raise RuntimeError(
                f"{self.lock.key!r} is held by a transaction of another thread. Only"
                " that thread can use the hold."
            )

    def next_claim(self) -> Claim:
        return self.lease.next_claim(may_be_late=self.may_be_late)

    def why_gone(self) -> str:
        return str(explain.why_gone(self))

    # Entries.

    def enter(self, entry: Entry, *, block: bool) -> bool:
        """Add an entry, and return False if the hold has ended."""
        left_by = self.life.state.left_by
        if self.life.enter(entry, block=block):
            return False
        callers.add(entry)
        if left_by is not None:
            # Its caller finds the hold by the new entry.
            callers.remove(left_by)
        keeper.remove_left(self)
        self.watch.orphaned_since = None
        return True

    def begin_block(self, new_entry: Entry, preferred: Entry | None) -> Entry | None:
        """Return the entry that a ``with hold`` block of a caller uses, or None.

        See ``Life.begin_block()``.
        """
        before = self.life.state.entries
        ended = [one.caller for one in before if callers.is_done(one.caller)]
        if self.life.begin_block(new_entry, ended, preferred):
            return None
        if new_entry.used is None:
            callers.add(new_entry)
            for one in before:
                # Perhaps this entry has taken the place of one of them.
                self.forget_entry(one)
            # Its caller may end sooner than the hold is due.
            keeper.check_soon()
        self.watch.orphaned_since = None
        return new_entry.used or new_entry

    def undo_block(self, new_entry: Entry) -> None:
        """Undo ``begin_block()`` for a block that did not begin."""
        if self.has_open(new_entry):
            self.cancel_entry(new_entry)
        elif new_entry.used is not None:
            self.life.undo_block(new_entry.used)

    def leave(
        self,
        entry: Entry,
        *,
        failed: bool = False,
        at_block_end: bool = False,
        by: object = None,
    ) -> None:
        """Leave an entry. The last one to be left releases the key.

        Raise LockLost if the hold was lost, or if a block outlived its transaction.
        """
        if entry in self.life.state.entries:
            event = partial(self.life.leave, entry, by=by, failed=failed)
            self._leave(event, entry, at_block_end=at_block_end)

    def leave_one(self, caller: Caller, *, failed: bool = False) -> None:
        """Leave the newest entry of a caller, or another one without a block."""
        if self.life.state.entries:
            event = partial(self.life.leave_one, caller, failed=failed)
            self._leave(event, None, at_block_end=False)

    def _leave(
        self, event: Callable[..., Effect], entry: Entry | None, *, at_block_end: bool
    ) -> None:
        """Leave an entry by an event of ``Life``, which may choose it."""
        refuse_nested()
        before = self.life.state.entries if entry is None else (entry,)
        # The work was committed under the lock, or undone.
        in_own = self.transaction is not None
        has_ended = in_own and self.has_ended_with_transaction()
        try:
            if has_ended and not at_block_end:
                # Nothing is to be released.
                if event(verified=True) is Effect.RELEASE:
                    self.end_silently()
                return
            if not self.held:
                self.end_if_expired()
            within = transactions_of(self)
            effect = event(within)
            if effect is Effect.VERIFY:
                leave = partial(event, within, verified=True)
                self._verify_before_leave(leave)
                effect = leave()
            if effect is Effect.NOTHING and self.life.state.reason is Reason.LOST:
                # It was lost just now, and its on_lost has left the entry.
                effect = Effect.LOST
            self.perform(effect)
        except (LockError, explain.RefusedReleaseError):
            raise
        except BaseException:
            # An interrupted release must not leave the key acquired.
            if entry is not None:
                event(transactions_of(self), failed=True, verified=True)
            self.complete_leave(None)
            raise
        finally:
            for one in before:
                self.forget_entry(one)

    def _verify_before_leave(self, leave: Callable[..., Effect]) -> None:
        """Find a loss before an entry is left, after which the key stays taken."""
        try:
            if not (is_undone(self) or verify(self, max(1, self.count - 1))):
                self.end_as_lost()
        except BaseException:
            self.perform_quietly(leave(failed=True))
            raise

    def perform(self, effect: Effect) -> None:
        """Do what an event asks for, after a caller has left."""
        if effect is Effect.RELEASE:
            self.unwatch()
            self.send_release()
            return
        self.perform_loss(effect)
        if effect & Effect.LOST:
            raise self.lost_error()
        if effect & Effect.REFUSED:
            raise explain.release_error(self)
        settlement.await_transactions(self)

    def perform_loss(self, effect: Effect) -> None:
        """Do what a loss asks for. The caller learns of no error of its release.

        An interrupt of this caller hides no loss from the others.
        """
        try:
            if effect & Effect.RELEASE:
                # If no caller has acquired the key yet, the next one need not wait for
                # the grace.
                self.unwatch()
                if keeper.is_current:
                    # The keeper's own thread sends no request.
                    keeper.post(self.release_again, self.backend)
                else:
                    self.release_again()
        finally:
            if effect & Effect.REPORT:
                self.report_loss()

    def perform_quietly(self, effect: Effect) -> None:
        """Do what the leave of an entry asks for. An error is only logged."""
        try:
            if effect & Effect.LOST:
                # The loss has been reported, or is reported here.
                self.perform_loss(effect)
            else:
                self.perform(effect)
        except (LockError, explain.RefusedReleaseError) as trouble:
            logger.warning("%s", trouble)

    def cancel_entry(self, entry: Entry) -> None:
        """Leave an entry that its caller never received. Only log an error."""
        try:
            self.perform_quietly(self.life.leave(entry, failed=True, verified=True))
        except BaseException:
            self.complete_leave(entry)
            raise
        finally:
            self.forget_entry(entry)

    def complete_leave(
        self,
        entry: Entry | None,
        within: Sequence[TransactionMarker] = (),
        *,
        by: object = None,
    ) -> None:
        """Leave an entry after an interrupt, and send a release that was due.

        ``within`` are the transactions that keep the key, since they may still commit.
        ``by`` is another caller, which leaves no entry that a block uses.
        """
        if entry is not None:
            self.life.leave(entry, within, failed=True, verified=True, by=by)
        state = self.life.state
        if state.phase is Phase.ENDED and not (state.entries or self.is_released):
            self.unwatch()
            if state.reason is not Reason.DETACHED:
                self.release_again()
        settlement.await_transactions(self)

    def has_ended_with_transaction(self) -> bool:
        """Return whether the hold has ended with its own transaction.

        It has not ended so if only a savepoint was rolled back, or if the connection
        was lost inside the transaction. Raise RuntimeError if the transaction is open
        in another thread.
        """
        if self.life.state.phase is Phase.ENDED or self.transaction is None:
            return False
        if not self.transaction.whole.has_ended:
            self.refuse_other_thread()
            return False
        return True

    def send_release(self, *, done: bool = False, report: bool = True) -> None:
        """Release the key of an ended hold.

        ``done`` says that the backend has released it, and ``report`` that a loss is
        reported here.
        """
        own = self.transaction
        was_broken = own is not None and own.connection.needs_rollback
        try:
            released = done or self.ask(
                self.backend.release,
                self.claim,
                failed=self.life.state.failed,
                rest_for=self.min_hold_left,
            )
        except LockBackendError as error:
            self.mark_released()
            if own is None:
                raise
            if own.connection.needs_rollback and not was_broken:
                # The server has rolled it back, because of this error, or because
                # another node of the cluster was first.
                raise self.lost_error(
                    "the server has rolled back its transaction"
                ) from error
            # The broken transaction releases the row when it ends.
            return
        self.mark_released()
        if not released:
            if own is not None:
                # The server has rolled it back, and the caller is in another
                # transaction.
                forbid_commit(own.connection)
            self.life.not_released(self.why_gone())
            if report:
                self.report_loss()
            raise self.lost_error()
        self.send_ended("released")

    def release_again(self) -> None:
        """Release the key once more, if the backend can be reached.

        The key of a lost hold is perhaps still there. That is not certain, so no
        warning says that it could not be released.
        """
        try:
            self.ask(
                self.backend.release,
                self.claim,
                failed=True,
                rest_for=self.min_hold_left,
            )
        except LockError as trouble:
            if self.life.state.reason is not Reason.LOST:
                logger.warning("%s", trouble)
        self.mark_released()

    def free_if_lost(self) -> None:
        """Free the key if its lease expired before the answer to a renewal.

        The renewal may have extended it. The callers may have ended, and then nothing
        else would release the key before the new ttl.
        """
        if self.is_lost:
            keeper.post(self.release_again, self.backend)

    def mark_released(self) -> None:
        """Record that the release is done, and wake the threads that wait for it."""
        self.is_released = True
        if (latch := vars(self).get("_released")) is not None:
            latch.set()

    def await_release(self, timeout: float) -> None:
        """Wait for another thread to release the key, at most ``timeout`` seconds."""
        # It is made before the look, so that a release in between finds it.
        latch: Latch = vars(self).setdefault("_released", Latch())
        if not self.is_released:
            latch.wait(timeout)

    def unwatch(self) -> None:
        """Stop watching a hold that has ended."""
        keeper.remove(self)
        if (left_by := self.life.state.left_by) is not None:
            callers.remove(left_by)

    def end_silently(self) -> None:
        """Forget a hold that has ended. Nothing is sent or reported."""
        self.face = None
        self.mark_released()
        self.unwatch()
        self.forget_entries()

    def forget_entry(self, entry: Entry) -> None:
        """Forget an entry that was left, unless a transaction still keeps the hold."""
        state = self.life.state
        if entry not in state.entries and (
            state.phase is not Phase.LEFT or entry is not state.left_by
        ):
            callers.remove(entry)

    def send_ended(self, how: Any) -> None:
        """Signal the end of the hold, unless it was signalled before."""
        face, self.face = self.face, None
        if face is not None and this_thread.is_keepers:
            losses.send_in_thread(face, how, self.life)
        elif face is not None:
            losses.send(face, how, self.life)

    # The end of transactions.

    @property
    def to_settle(self) -> bool:
        """Return whether the transactions in which it was left have ended."""
        state = self.life.state
        return state.phase is Phase.LEFT and not state.is_kept

    def settle(self, timeout: float = settlement.SETTLE_TIMEOUT) -> None:
        """Release a lease that was left, if its transactions have ended."""
        settlement.settle(self, timeout)

    # Losses.

    def lose(self, why: str) -> None:
        """End a hold because the backend has replied that the key is not held."""
        self.perform_loss(self.life.lose(why))

    def expire(self, is_due: Callable[[], bool]) -> None:
        """End a hold if ``is_due()`` finds that its lease has run out."""
        self.perform_loss(self.life.expire(self.lease.why_not(), is_due))

    def end_as_lost(self) -> LockLost:
        """End the hold, which is gone, and return the error for its caller."""
        self._end_for_caller(self.life.lose(self.why_gone()))
        return self.lost_error()

    def end_if_expired(self) -> None:
        """End a hold that cannot be held any more."""
        if self.may_be_held:
            return
        effect = Effect.NOTHING
        if not self.is_over:
            effect = self.life.expire(self.lease.why_not(), self.has_run_out)
        self._end_for_caller(effect)

    def _end_for_caller(self, effect: Effect) -> None:
        """Do what a loss asks for, of which the caller learns by an error."""
        try:
            # First, since on_lost may acquire the key again.
            if self.life.state.reason is not None:
                self.forget_entries()
        finally:
            self.perform_loss(effect)

    def forget_entries(self) -> None:
        """Let the next acquisition of each caller make a new hold.

        ``lock.release()`` still finds what ``acquire()`` returned, and that it is lost.
        """
        state = self.life.state
        for entry in state.entries:
            entry.knows_end = True
            if entry.acquired is None or state.reason is Reason.DETACHED:
                callers.remove(entry)

    def lost_error(self, why: str | None = None) -> LockLost:
        return explain.lost_error(self, why)

    def report_loss(self) -> None:
        """Log the loss, call ``on_lost``, and send ``lock_lost``."""
        try:
            self.unwatch()
            logger.warning("%s", self.lost_error())
        finally:
            self.send_ended("lost")
