"""How the keeper checks, reports and releases a hold."""

from __future__ import annotations

import logging
import threading
import warnings

from dlocks.core.lease import slow_after
from dlocks.core.release import Release
from dlocks.runtime import clock
from dlocks.runtime.clock import FOREVER
from dlocks.text import duration, shown_holder

logger = logging.getLogger("dlocks")

# Seconds between two checks whether a transaction in which a lease was left has ended.
POLL_EVERY = 0.05
# Seconds between two checks whether the caller of a lease has ended.
LOOK_EVERY = 1.0

_main_thread = threading.main_thread()


class KeptHold(Release):
    """A hold as the keeper sees it."""

    @property
    def due_at(self) -> float:
        """Return when the keeper should check this hold."""
        lease = self.lease
        if self.in_transactions:
            return clock.now() + POLL_EVERY
        if not self.renewable:
            return lease.deadline
        lost_at = lease.lost_at(may_be_late=self.may_be_late)
        due = min(lease.renew_at, lost_at, self._slow_at)
        if self.caller is not _main_thread:
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

    @property
    def is_abandoned(self) -> bool:
        """Return whether its thread has ended, or its event loop was closed."""
        return self.count > 0 and self.held and not self.pinned_in and self.is_orphaned

    def end_abandoned(self) -> None:
        """Release a hold whose caller has ended without releasing it."""
        if not self.held or not self.end():
            return
        self.count, self.failed = 0, True
        what = "event loop" if hasattr(self.caller, "get_loop") else "thread"
        who = shown_holder(self.claim.holder)
        message = (
            f"{self.lock.key!r} was never released by {who}, whose {what} has ended. It"
            f" is released now, after {duration(self.lease.age)}."
        )
        logger.warning("%s", message)
        self.try_release_claim()
        if self.acquired_at is not None:
            warnings.warn_explicit(message, ResourceWarning, *self.acquired_at)

    def end_at_exit(self) -> None:
        """Release the key at the end of the process, even while it is in use."""
        if self.held and self.end():
            self.failed = True
            self.try_release_claim()
