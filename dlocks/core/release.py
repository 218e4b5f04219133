"""How the caller of a hold enters and leaves it, and how it ends."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from dlocks.core.callers import forget_acquired
from dlocks.core.hold_state import HoldState
from dlocks.exceptions import LockBackendError, LockError
from dlocks.runtime.keeper import keeper
from dlocks.runtime.requests import refuse_nested
from dlocks.runtime.threads import Latch
from dlocks.signals import send_ended
from dlocks.transactions import TransactionMarker, open_connections, standing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper

    from dlocks.protocols import Policy

logger = logging.getLogger("dlocks")

# Seconds for which the end of a transaction waits while the keeper releases a lease
# left in it.
SETTLE_TIMEOUT = 5.0


class Release(HoldState):
    """The entries of a hold, and its end."""

    # Created by the thread that settles the hold, and set when it is done.
    _settled: Latch | None = None

    @property
    def enterable(self) -> bool:
        """Return whether the same caller enters this hold, and needs no new one."""
        if self.lease.ended or self.is_forked:
            return False
        if self.scope == "transaction":
            return self.held
        # A hold left in a transaction is kept for its min_hold from all callers, even
        # this one.
        return self.count > 0 or (self.held and not self.lease.kept_for)

    @property
    def is_left(self) -> bool:
        """Return whether only open transactions keep the hold."""
        return self.count == 0 and self.in_transactions and self.held

    def enter(self, lock: Policy, entry: object) -> bool:
        """Add an entry, and check that the key is still held.

        Return False if the hold has ended. Raise LockLost if it is lost. After any
        error, ``revert_entry()`` has to follow.
        """
        with self.lease.mutex:
            # Added first, so that no other thread releases the key meanwhile.
            if self.lease.ended or not (self.count or self.left_in):
                # Another thread is just releasing it.
                return False
            if self.count == 0:
                # It was left in a transaction. Its earlier blocks no longer count.
                self.blocks = 0
                self.leaves_at_exit = True
            self.leaves_at_exit = self.leaves_at_exit and lock.release_at == "exit"
            self.open_entries.append(entry)
            count = self.count
            # Other threads may still be in these transactions when it is left again.
            self.left_before = standing(self.left_before, self.left_in)
            self.left_in = []
        keeper.forget_end(self)
        if not self.keeps:
            raise self.loss(self.lease.why_not())
        if not self.confirmed(count):
            raise self.loss(self.why_gone())
        self.add_entry(lock, entry)
        return True

    def prolong(self) -> None:
        """Count one more entry, so that the hold outlasts the current block."""
        with self.lease.mutex:
            self.open_entries.append(object())
            self.prolonged += 1
            self.entered_by.append(self.entered_by[-1])

    def revert_entry(self, entry: object) -> None:
        """Leave an entry that its caller never received, unless it was left.

        Like any other entry, the last one to be left releases the key.
        """
        last = False
        try:
            with self.lease.mutex:
                ended = self.lease.ended
                if entry not in self.open_entries or (ended and self.offer is None):
                    return
                # While it is detached, only the end of that request ends the hold.
                last = self.count == 1 and not ended
                self.open_entries.remove(entry)
                self.revert_lock(entry)
            if last and (self.is_over or not self._leave_in_transactions()):
                self._end_unreceived()
        except BaseException:
            if last:
                self.resume_release(entry)
            raise

    def _end_unreceived(self) -> None:
        is_lost = self.lease.lost is not None
        if not self.end():
            return
        if is_lost:
            self.release_again()
        else:
            self.try_release_claim()

    def release(
        self,
        *,
        failed: bool = False,
        at_block_end: bool = False,
        ends_block: bool = False,
    ) -> None:
        """Leave the hold once. The last entry to leave releases the key.

        ``ends_block`` says that a 'with hold' block ends. Raise LockLost if the hold
        was lost, or if a block outlived its transaction.
        """
        try:
            refuse_nested()
            ended = self.scope == "transaction" and self.outlives_transaction()
        except BaseException:
            if ends_block:
                self.end_block()
            raise
        count = entry = None
        try:
            with self.lease.mutex:
                entries = self.open_entries
                if ends_block:
                    # With its entry, so that no other block begins with that.
                    self.blocks = max(0, self.blocks - 1)
                if not entries or (self.lease.ended and self.offer is None):
                    return
                # Written before the entry is gone, for an interrupt.
                count = len(entries) - 1
                # The newest may be one that its caller has not received yet.
                entry = entries[0]
                del entries[0]
                self.failed = self.failed or failed
                if count:
                    self.remove_entry()
                if self.scope == "lease" and (count or self.lease.ended):
                    # The last one to leave may be in no transaction, or in another one.
                    here = self._marks_in(open_connections())
                    self.left_before = standing(self.left_before, here)
                if self.lease.ended:
                    # Another thread is detaching it. If that fails, the hold ends.
                    count = None
                    return
            if ended and not at_block_end:
                # The work was committed under the lock, or undone.
                if count == 0 and self.end():
                    self.hold = None
                return
            self._leave(count)
        except LockError:
            raise
        except BaseException:
            # An interrupted release must not leave the key acquired.
            if count == 0:
                self.resume_release(entry)
            raise

    def outlives_transaction(self) -> bool:
        """Return whether the hold has ended with its own transaction.

        It has not ended so if only a savepoint was rolled back, or if the connection
        was lost inside the transaction. Raise RuntimeError if the transaction is open
        in another thread.
        """
        if self.lease.ended or self.is_forked or self.whole is None:
            return False
        ended = self.whole.has_ended
        if not ended:
            self.refuse_other_thread()
        return ended and self.lease.lost is None

    def _leave(self, count: int) -> None:
        if self.is_forked:
            self.lease.ended = True
            raise self.lost_error("this process is a fork of its holder")
        if not self.keeps:
            self.loss(self.lease.why_not())
        if self.lease.lost is not None:
            if count == 0 and self.end():
                # If no caller has acquired the key yet, the next one need not wait for
                # the grace.
                with suppress(LockError):
                    self.ask(self.backend.release, self.claim, failed=True)
            raise self.lost_error()
        if count > 0:
            # Other threads may meanwhile have left it too.
            if not (self._is_undone or self.confirmed(count) or self.lease.ended):
                raise self.loss(self.why_gone())
            if self.lease.lost is not None:
                # It was reported during that request.
                raise self.loss(self.lease.lost)
        elif not self._leave_in_transactions() and self.end():
            self.release_claim()

    def discard(self) -> bool:
        """Discard a hold that its caller never received.

        The lock cancels its claim. Return whether its end is still to be signalled.
        """
        self.open_entries.clear()
        self.failed = True
        return self.end() and self.lease.lost is None

    def release_claim(self, *, done: bool = False, report: bool = True) -> None:
        """Release the key of an ended hold.

        ``done`` says that the backend has released it, and ``report`` that a loss is
        reported here.
        """
        broken = self.scope == "transaction" and self.connection.needs_rollback
        try:
            released = done or self.ask(
                self.backend.release,
                self.claim,
                failed=self.failed,
                keep=self.lease.kept_for,
            )
        except LockBackendError as error:
            if self.scope != "transaction":
                raise
            if not broken and self.connection.needs_rollback:
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
                self.connection.needs_rollback = self.connection.in_atomic_block
            self.lease.lost = self.why_gone()
            if report:
                self.report_loss()
            raise self.lost_error()
        send_ended(self.hold, "released")
        self.hold = None

    def try_release_claim(self) -> None:
        """Release the key of an ended hold, and only log an error."""
        try:
            self.release_claim()
        except LockError as trouble:
            logger.warning("%s", trouble)

    def resume_release(self, entry: object = None) -> None:
        """Release the key after an interrupt, or at the end of open transactions.

        ``entry`` is the one that was being left.
        """
        with self.lease.mutex:
            if entry in self.open_entries:
                self.open_entries.remove(entry)
            if self.open_entries:
                # It was kept by a transaction, and another caller has entered it.
                return
        if self.lease.is_over or not self._leave_in_transactions():
            if not self.end():
                self.forget()
            self.release_again()

    def release_again(self) -> None:
        """Release the key once more, if the backend can be reached."""
        with suppress(LockError):
            self.ask(
                self.backend.release, self.claim, failed=True, keep=self.lease.kept_for
            )

    def end(self) -> bool:
        """End the hold, except for the request to the backend.

        Return whether it had not ended before.
        """
        if not self.lease.end():
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """Stop watching and finding a hold that has ended."""
        keeper.drop(self)
        self.forget_entries()
        forget_acquired(self)

    def end_with_others(self, *, failed: bool) -> bool:
        """End the hold like ``end()``, together with those of other keys.

        Return False if a release has more to do, or less.
        """
        with self.lease.mutex:
            if (
                self.count != 1
                or not self.held
                or self.lease.kept_for
                or standing(self.pinned_in, self.left_before)
            ):
                return False
            self.open_entries.clear()
            self.failed = self.failed or failed
        return self.end()

    # The offer of a hold to another process.

    def withdraw_offer(self) -> bool:
        """Continue a hold that could not be detached, or end it if it was left.

        Return whether the keeper has to watch it again.
        """
        with self.lease.mutex:
            self.offer = None
            self.lease.ended = False
            continues = self.count > 0
        if continues or self._leave_in_transactions():
            return True
        if self.end():
            self.try_release_claim()
        return False

    # The release of a lease that was left in open transactions, at their end.

    def _leave_in_transactions(self) -> bool:
        """Keep a lease until the open transactions end, and return whether it is.

        Their changes are not visible before. With ``release_at="exit"``, keep it only
        for those beside which it cannot be written. They have pinned it, or the
        database has a single writer. Transactions of other threads in which it was left
        before count too.
        """
        if self.scope == "transaction":
            return False
        opened = open_connections()
        # The last entry was left, and no guard begins from then on.
        marked = self.pinned_in or self.left_before or self.left_in
        if not (opened or marked or self.leaves_at_exit):
            # Usually there is no transaction, and this is the only cost.
            return False
        marks = standing(self.pinned_in, self.left_before, self.left_in)
        marks = standing(marks, self._marks_in(opened))
        for mark in marks:
            if self.settle not in mark.at_commit:
                mark.at_commit.append(self.settle)
        with self.lease.mutex:
            self.left_in = marks
        if marks:
            # A rollback drops the on_commit() callbacks, perhaps with the last
            # reference to this hold.
            keeper.await_end(self)
        return bool(marks)

    def _marks_in(
        self, opened: Sequence[BaseDatabaseWrapper]
    ) -> list[TransactionMarker]:
        """Return the marks of those open transactions that have to end first."""
        if self.leaves_at_exit:
            # A rollback would undo a release written beside the only writer.
            beside = self.backend.refusal(self.claim) is not None
            database = self.backend.database
            opened = [one for one in opened if beside and one.alias == database]
        return [TransactionMarker.whole(one) for one in opened]

    @property
    def to_settle(self) -> bool:
        """Return whether the transactions in which it was left have ended.

        Those that pinned it meanwhile count too.
        """
        left_in = self.left_in
        return bool(left_in) and not standing(left_in, self.pinned_in)

    def settle(self, timeout: float = SETTLE_TIMEOUT) -> None:
        """Release a lease once all transactions in which it was left have ended.

        If another thread does so, wait for it, at most ``timeout`` seconds.
        """
        with self.lease.mutex:
            stays = self.count or self.lease.ended or not self.to_settle
            settled = self._settled
            if not stays:
                self.left_in = []
                self.lease.ended = True
                self._settled = settled = Latch()
        if settled is None:
            return
        if stays:
            # The keeper may have noticed the end of the transaction first.
            settled.wait(timeout)
            return
        try:
            keeper.drop(self)
            forget_acquired(self)
            self.try_release_claim()
        except BaseException:
            # Perhaps the release was not sent yet, and nothing else would send it.
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
            return bool(self.connection.needs_rollback)
        return any(
            mark.stands and not mark.is_elsewhere and mark.is_undone
            for mark in list(self.pinned_in)
        )
