"""How the keeper checks, reports and releases a hold."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable

from dlocks.core.callers import Caller, is_in_block
from dlocks.core.lease import slow_after
from dlocks.core.release import Release
from dlocks.exceptions import LockError
from dlocks.runtime import clock
from dlocks.runtime.clock import FOREVER
from dlocks.runtime.keeper import keeper
from dlocks.signals import send_ended
from dlocks.text import duration, shown_holder

logger = logging.getLogger("dlocks")

# Seconds between two checks whether a transaction in which a lease was left has ended.
POLL_EVERY = 0.05
# Seconds between two checks whether the callers of a lease have ended. It is lost if
# two of them find none. A thread that is about to end may pass it to another one.
LOOK_EVERY = 0.4

# The reason of a loss by shutdown(), or at the end of the process.
EXITED = "its process released all of its locks because it was about to end"


class KeptHold(Release):
    """A hold as the keeper sees it."""

    # When its callers were first found to have ended.
    _unused_since: float | None = None

    @property
    def due_at(self) -> float:
        """Return when the keeper should check this hold."""
        lease = self.lease
        if self.in_transactions:
            return clock.now() + POLL_EVERY
        due = lease.deadline
        if self.renewable:
            lost_at = lease.lost_at(may_be_late=self.may_be_late)
            due = min(lease.renew_at, lost_at, self._slow_at)
        if self.caller is not threading.main_thread():
            # Its caller may end without a release.
            due = min(due, clock.now() + LOOK_EVERY)
        return due

    def check_expiry(self) -> None:
        """Check whether the lease has expired, or pinning transactions have ended."""
        if self.pinned_in:
            if self.pinned:
                return
            self.unpin()
        lease = self.lease
        if not lease.is_over and clock.now() >= lease.lost_at(
            may_be_late=self.may_be_late
        ):
            self.lose(lease.why_not())

    @property
    def _slow_at(self) -> float:
        """Return when the hold is reported as not released for a long time."""
        if self.slow_reported:
            return FOREVER
        return self.lease.granted_at + slow_after(self.backend, self.claim.ttl)

    def report_slow(self) -> None:
        """Log once that the hold has not been released for a long time."""
        if self.slow_reported or clock.now() < self._slow_at or self.is_over:
            return
        self.slow_reported = True
        logger.warning(
            "%r has been held for %s by %s and was not released yet",
            self.lock.key,
            duration(self.lease.age),
            shown_holder(self.claim.holder),
        )

    def watch_callers(self) -> None:
        """Record since when all callers of an entered hold have ended."""
        if not self._has_no_caller:
            self._unused_since = None
        elif self._unused_since is None:
            self._unused_since = clock.now()

    def add_user(self, caller: Caller) -> None:
        super().add_user(caller)
        self._unused_since = None

    @property
    def _has_no_caller(self) -> bool:
        return self.count > 0 and self.held and not self.pinned_in and self.is_orphaned

    @property
    def is_abandoned(self) -> bool:
        """Return whether its threads have ended, or event loops were closed.

        A caller that is about to end may pass the hold to another thread.
        """
        since = self._unused_since
        return (
            since is not None
            and clock.now() >= since + LOOK_EVERY
            and self._has_no_caller
        )

    def end_abandoned(self) -> None:
        """Report a hold whose callers have ended as lost, and release its key."""
        callers = self.callers
        # Callers that have ended remain ended, so the mutex is not needed here.
        if not self.is_abandoned:
            return
        why = "it was never released, and "
        if len(callers) > 1:
            why += "all of its callers have ended"
        else:
            is_task = hasattr(self.caller, "get_loop")
            why += f"its {'event loop' if is_task else 'thread'} has ended"
        with self.lease.mutex:
            # Another caller may have entered or released it meanwhile.
            stays = self.count == 0 or self.pinned_in or self.callers != callers
            if stays or not self.lease.lose(why):
                return
            self.failed = True
        self.forget()
        try:
            self._release_lost()
        finally:
            self.report_loss()
        if self.acquired_at is not None:
            warnings.warn_explicit(
                str(self.lost_error()), ResourceWarning, *self.acquired_at
            )

    def end_at_exit(self) -> Callable[[], None] | None:
        """Release the key at the end of the process, even while it is in use.

        Return a function to call when all keys are released.
        """
        is_open = bool(self.users or self.prolonged) or is_in_block(self)
        with self.lease.mutex:
            if not self.held:
                return None
            was_left = self.count == 0
            if not was_left:
                self.lease.lose(EXITED)
            self.failed = True
        if was_left:
            # Only open transactions keep it, or its last entry is just being left.
            if self.end():
                self.try_release_claim()
            return None
        keeper.drop(self)
        # A transaction of hold.atomic() at work has locked the row, and a release would
        # wait for its end. The end of the block releases the key then.
        if not any(mark.stands and mark.is_elsewhere for mark in list(self.pinned_in)):
            self._release_lost()
        if is_open:
            return self.report_loss
        # Its caller may acquire the key again, in another exit handler.
        self.forget_entries()
        return self._report_unreleased

    def _release_lost(self) -> None:
        """Release the key of a hold that was taken from its callers."""
        try:
            self.ask(
                self.backend.release, self.claim, failed=True, keep=self.lease.kept_for
            )
        except LockError as trouble:
            logger.warning("%s", trouble)

    def _report_unreleased(self) -> None:
        """Log that a hold without an open block was released at the end."""
        logger.warning(
            "%r was never released by %s, whose process is about to end. It is released"
            " now, after %s.",
            self.lock.key,
            shown_holder(self.claim.holder),
            duration(self.lease.age),
        )
        send_ended(self.hold, "released")
