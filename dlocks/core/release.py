"""How a hold ends: it is released, also after transactions, or transferred."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
import warnings
from contextlib import suppress
from functools import partial

from dlocks.core.callers import (
    forget_acquired,
    has_ended,
    holds_by_caller,
    note_acquired,
)
from dlocks.core.hold_state import ensure_sync
from dlocks.core.lease import Lease
from dlocks.exceptions import LockBackendError, LockError
from dlocks.runtime import clock
from dlocks.runtime.keeper import keeper
from dlocks.signals import send_ended
from dlocks.text import duration, shown_holder
from dlocks.transactions import TransactionMarker, open_connections
from dlocks.values import Claim

logger = logging.getLogger("dlocks")

# Seconds for which the end of a transaction waits while the keeper releases a lease
# left in it.
SETTLE_TIMEOUT = 5.0

HANDED_OVER = "it was handed over"


class Release(Lease):
    """The end of a hold, by a release or by a transfer to another process."""

    def release(self, *, failed: bool = False) -> None:
        """Leave the hold once. The last entry to leave releases the key.

        Releasing again does nothing. ``failed`` sets the status of the row to F instead
        of S, for people who read it. Raise LockLost if the hold was lost, because its
        work was perhaps not exclusive.
        """
        ensure_sync()
        count = None
        try:
            with self._mutex:
                if self._ended or self._count == 0:
                    return
                count = self._count - 1
                self._count = count
                self._failed = self._failed or failed
            self._leave(count)
        except LockError:
            raise
        except BaseException:
            # An interrupted release must not leave the key acquired.
            if count == 0:
                if not self._end():
                    self._forget()
                with suppress(LockError):
                    self.release_again()
            raise

    def _leave(self, count: int) -> None:
        if self._pid != os.getpid():
            self._ended = True
            raise self.lost_error("this process is a fork of its holder")
        if not self._keeps:
            self.lose(self.why_not())
        if self._lost is not None:
            if count == 0 and self._end():
                # If no caller has acquired the key yet, the next one need not wait for
                # the grace.
                with suppress(LockError):
                    self._ask(self.backend.release, self.claim, failed=True)
            raise self.lost_error()
        if count > 0:
            if not self._is_undone and not self._confirmed(count):
                self.lose(self.why_gone())
                raise self.lost_error()
        elif not self._leave_in_transactions() and self._end():
            self.release_claim()

    def discard(self) -> bool:
        """Discard a hold that its caller never received.

        The lock cancels its claim. Return whether its end is still to be signalled.
        """
        self._count, self._failed = 0, True
        return self._end() and self._lost is None

    def release_claim(self, *, done: bool = False) -> None:
        """Release the key of an ended hold.

        ``done`` says that the backend has released it.
        """
        broken = self.scope == "transaction" and self._connection.needs_rollback
        try:
            released = done or self._ask(
                self.backend.release,
                self.claim,
                failed=self._failed,
                keep=self._kept_for(),
            )
        except LockBackendError as error:
            if self.scope != "transaction":
                raise
            if not broken and self._connection.needs_rollback:
                # The server has rolled it back because another node of the cluster was
                # first.
                raise self.lost_error(
                    "the server has rolled back its transaction"
                ) from error
            # The broken transaction releases the row when it ends.
            return
        if not released:
            if self.scope == "transaction":
                # The server has rolled it back, and the caller is in another
                # transaction.
                self._connection.needs_rollback = self._connection.in_atomic_block
            self._ended = False
            self.lose(self.why_gone())
            self._ended = True
            raise self.lost_error()
        send_ended(self, "released")

    def release_again(self) -> None:
        """Release the key of an ended hold, perhaps once more."""
        self._ask(self.backend.release, self.claim, failed=True, keep=self._kept_for())

    def _kept_for(self) -> float:
        """Return the seconds for which the key stays taken after its release."""
        # Counted from the reply, so it is never too short by the row's begin_time.
        return max(0.0, self.lock.min_hold - self.age) if self.lock.min_hold else 0.0

    def _end(self) -> bool:
        with self._mutex:
            if self._ended:
                return False
            self._ended = True
        self._forget()
        return True

    def _forget(self) -> None:
        """Remove an ended hold from where holds are kept."""
        keeper.drop(self)
        self._forget_entries()
        forget_acquired(self)

    def end_with_others(self, *, failed: bool) -> bool:
        """End the hold, except for the request to the backend.

        Return False if a release has more to do, or less.
        """
        with self._mutex:
            if self._count != 1 or not self.held or self.lock.min_hold:
                return False
            self._count, self._failed = 0, self._failed or failed
        return self._end()

    @property
    def is_abandoned(self) -> bool:
        """Return whether its thread has ended, or its event loop was closed."""
        return (
            self._count > 0
            and self.held
            and not self.in_transactions
            and has_ended(self.caller)
        )

    def end_abandoned(self) -> None:
        """Release a hold whose caller has ended without releasing it."""
        if not self.held or not self._end():
            return
        self._count, self._failed = 0, True
        what = "event loop" if hasattr(self.caller, "get_loop") else "thread"
        who = shown_holder(self.claim.holder)
        message = (
            f"{self.key!r} was never released by {who}, whose {what} has ended. It is"
            f" released now, after {duration(self.age)}."
        )
        logger.warning("%s", message)
        try:
            self.release_claim()
        except LockError as trouble:
            logger.warning("%s", trouble)
        if self.acquired_at is not None:
            warnings.warn_explicit(message, ResourceWarning, *self.acquired_at)

    def end_at_exit(self) -> None:
        """Release the key at the end of the process, even while it is in use."""
        if self.held and self._end():
            self._failed = True
            try:
                self.release_claim()
            except LockError as trouble:
                logger.warning("%s", trouble)

    # The release of a lease that was left in open transactions, at their end.

    def _leave_in_transactions(self) -> bool:
        """Keep a lease until the open transactions end, and return whether it is.

        Their changes are not visible before. With ``release_at="exit"``, keep it only
        for those beside which it cannot be written. They have pinned it, or the
        database has a single writer.
        """
        if self.scope == "transaction":
            return False
        marks = [mark for mark in list(self.pinned_in) if mark.stands]
        if not self.leaves_at_exit:
            marks += [
                mark
                for mark in map(TransactionMarker.whole, open_connections())
                if mark not in marks
            ]
        elif not marks and self.backend.refusal(self.claim) is not None:
            # A rollback would undo a release written here.
            marks = [
                TransactionMarker.whole(one)
                for one in open_connections()
                if one.alias == self.backend.database
            ]
        for mark in marks:
            if self.settle not in mark.at_commit:
                mark.at_commit.append(self.settle)
        with self._mutex:
            self._left_in = marks
        if marks:
            # A rollback drops the on_commit() callbacks, perhaps with the last
            # reference to this hold.
            keeper.await_end(self)
        return bool(marks)

    @property
    def to_settle(self) -> bool:
        """Return whether the transactions in which it was left have ended."""
        left_in = self._left_in
        return bool(left_in) and not any(mark.stands for mark in left_in)

    def settle(self, timeout: float = SETTLE_TIMEOUT) -> None:
        """Release a lease once all transactions in which it was left have ended.

        If another thread does so, wait for it, at most ``timeout`` seconds.
        """
        with self._mutex:
            stays = (
                self._count
                or self._ended
                or not self._left_in
                or any(mark.stands for mark in self._left_in)
            )
            settled = self._settled
            if not stays:
                self._left_in = []
                self._ended = True
                self._settled = settled = threading.Event()
        if settled is None:
            return
        if stays:
            # The keeper may have noticed the end of the transaction first.
            settled.wait(timeout)
            return
        try:
            keeper.drop(self)
            forget_acquired(self)
            self.release_claim()
        except LockError as trouble:
            logger.warning("%s", trouble)
        except BaseException:
            # Perhaps the release was not sent yet, and nothing else would send it.
            with suppress(LockError):
                self.release_again()
            raise
        finally:
            settled.set()

    @property
    def _is_undone(self) -> bool:
        """Return whether work under the hold is about to be rolled back.

        Only the transactions of this thread count.
        """
        if self.scope == "transaction":
            return bool(self._connection.needs_rollback)
        return any(
            mark.stands and not mark.is_elsewhere and mark.is_undone
            for mark in list(self.pinned_in)
        )

    # The transfer to another process.

    def transfer(self, ttl: float) -> tuple[float, float]:
        """End the hold here, without releasing the key.

        The lease lasts for ``ttl`` more seconds. Return the seconds left of
        ``min_hold`` and ``max_hold``.
        """
        if self.scope == "transaction":
            raise RuntimeError(
                f"{self.key!r} is held by a transaction, and cannot be handed over."
                " Acquire it with scope='lease'."
            )
        if self.lock.shared:
            raise RuntimeError(
                f"The shared hold on {self.key!r} cannot be handed over."
            )
        if not self.backend.supports_handover:
            raise RuntimeError(
                f"{type(self.backend).__name__} cannot hand {self.key!r} over to"
                " another process."
            )
        if (why := self.backend.refusal(self.claim)) is not None:
            raise RuntimeError(f"{self.key!r} cannot be handed over here. {why}")
        with self._mutex:
            if self._count > 1:
                raise RuntimeError(
                    f"{self.key!r} cannot be handed over while its caller has acquired"
                    f" it {self._count} times. Release the inner holds first."
                )
            ended = self._ended or self._count == 0
        now = clock.now()
        left = (
            max(0.0, self.lock.min_hold - (now - self._granted_at)),
            self._last_at - now,
        )
        if not ended and not self.held:
            self.lose(self.why_not())
        if self._lost is not None or ended or not self._end():
            raise self.lost_error(self._lost or "it has ended")
        claim = dataclasses.replace(self.claim, ttl=min(ttl, left[1]))
        try:
            # By the keeper, so that no pending renewal comes after it.
            stands = keeper.run(partial(self._leave_lease, claim), self.backend)
        except BaseException:
            self._ended = False
            holds_by_caller.update(dict.fromkeys(self.entered_as, self))
            note_acquired(self.lock, self)
            keeper.keep(self)
            raise
        if not stands:
            self._ended = False
            self.lose(self.why_gone())
            self._ended = True
            raise self.lost_error()
        self._lost = HANDED_OVER
        send_ended(self, "detached")
        return left

    def _release_again(self) -> None:
        if self._lost == HANDED_OVER:
            with suppress(LockError):
                self._ask(self.backend.release, self.claim, failed=True)

    def _leave_lease(self, claim: Claim) -> bool:
        for number in range(10):
            left = self.backend.renew([claim])
            if claim.owner not in left:
                return False
            if left[claim.owner] >= claim.ttl:
                return True
            # A caller that tried to acquire the key has locked the row for a moment.
            time.sleep(0.001 * 2**number)
        raise LockBackendError(
            f"The lease on {self.key!r} could not be extended: another transaction has"
            " locked its row."
        )
