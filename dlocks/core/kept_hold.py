"""How the keeper checks, reports and releases a hold."""

from __future__ import annotations

import logging
import threading
import warnings

from dlocks.core.callers import Caller
from dlocks.core.lease import slow_after
from dlocks.core.release import Release
from dlocks.exceptions import LockError
from dlocks.runtime import clock
from dlocks.runtime.clock import FOREVER
from dlocks.text import duration, shown_holder

logger = logging.getLogger("dlocks")

# Seconds between two checks whether a transaction in which a lease was left has ended.
POLL_EVERY = 0.05
# Seconds between two checks whether the callers of a lease have ended. It is lost if
# two of them find none. A thread that is about to end may pass it to another one.
LOOK_EVERY = 0.4


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
        self._forget()
        try:
            self._release_lost()
        finally:
            self.report_loss()
        if self.acquired_at is not None:
            warnings.warn_explicit(
                str(self.lost_error()), ResourceWarning, *self.acquired_at
            )

    def end_at_exit(self) -> None:
        """Release the key at the end of the process, even while it is in use."""
        if self.held and self.end():
            self.failed = True
            self.try_release_claim()

    def _release_lost(self) -> None:
        """Release the key of a hold that was taken from its callers."""
        try:
            self.ask(
                self.backend.release, self.claim, failed=True, keep=self.lease.kept_for
            )
        except LockError as trouble:
            logger.warning("%s", trouble)
