"""How the keeper checks a hold: its deadline, its callers, and the process's end."""

from __future__ import annotations

import logging
import threading
import warnings
from typing import Any

from dlocks.core import callers, explain
from dlocks.core.lease import Lease, slow_after
from dlocks.core.life import Effect, Reason
from dlocks.runtime import clock
from dlocks.runtime.clock import FOREVER
from dlocks.runtime.keeper import LOOK_EVERY, keeper
from dlocks.text import duration, shown_holder

logger = logging.getLogger("dlocks")

# Seconds between two checks whether a transaction in which a lease was left has ended.
POLL_EVERY = 0.05


class Watch:
    """What the keeper knows of a hold, and does about it."""

    # When its callers were first found to have ended.
    orphaned_since: float | None = None
    # Whether it was reported as not released for a long time, or need not be.
    is_slow = False
    # The file and the line that acquired it, where Python reports unclosed resources.
    acquired_at: tuple[str, int] | None = None

    def due_at(self, hold: Any) -> float:
        """Return when the keeper should check this hold."""
        lease: Lease = hold.lease
        if hold.is_over:
            # It may go on after a detach that fails.
            return clock.now() + LOOK_EVERY
        if hold.awaits_transactions:
            return clock.now() + POLL_EVERY
        due = lease.deadline
        if hold.renewable:
            lost_at = lease.lost_at(may_be_late=hold.may_be_late)
            due = min(lease.renew_at, lost_at, self._slow_at(hold))
        if any(one is not threading.main_thread() for one in hold.callers):
            # A caller may end without a release.
            due = min(due, clock.now() + LOOK_EVERY)
        return due

    def check_expiry(self, hold: Any) -> None:
        """Check whether the lease has expired, unless a transaction keeps the key."""

        def is_due() -> bool:
            lost_at = hold.lease.lost_at(may_be_late=hold.may_be_late)
            return bool(clock.now() >= lost_at)

        # Usually it has not, and this is the only cost.
        if not hold.is_over and is_due():
            hold.expire(is_due)

    def _slow_at(self, hold: Any) -> float:
        """Return when the hold is reported as not released for a long time."""
        if self.is_slow:
            return FOREVER
        lease: Lease = hold.lease
        return lease.granted_at + slow_after(hold.backend, lease.claim.ttl)

    def report_slow(self, hold: Any) -> None:
        """Log once that the hold has not been released for a long time."""
        if self.is_slow or clock.now() < self._slow_at(hold) or hold.is_over:
            return
        self.is_slow = True
        logger.warning(
            "%r has been held for %s by %s and was not released yet",
            hold.lock.key,
            duration(hold.lease.age),
            shown_holder(hold.claim.holder),
        )

    def watch_callers(self, hold: Any) -> None:
        """Record since when all callers of the open entries have ended."""
        entries = hold.life.state.entries
        if not (entries and all(callers.has_ended(one.caller) for one in entries)):
            self.orphaned_since = None
        elif self.orphaned_since is None:
            self.orphaned_since = clock.now()

    def is_orphaned(self, hold: Any) -> bool:
        """Return whether its threads have ended, or event loops were closed.

        A caller that is about to end may pass the hold to another thread.
        """
        since = self.orphaned_since
        return (
            since is not None
            and clock.now() >= since + LOOK_EVERY
            and hold.held
            and not hold.life.state.is_kept
        )

    def end_orphaned(self, hold: Any) -> None:
        """Report a hold whose callers have ended as lost, and release its key."""
        entries = hold.life.state.entries
        ended = [one.caller for one in entries if callers.has_ended(one.caller)]
        effect = hold.life.orphan(ended, explain.why_orphaned(entries))
        if not effect & Effect.RELEASE:
            # Another caller has entered or released it meanwhile.
            return
        hold.forget_entries()
        try:
            hold.release_again()
        finally:
            hold.report_loss()
        if self.acquired_at is not None:
            warnings.warn_explicit(
                str(hold.lost_error()), ResourceWarning, *self.acquired_at
            )

    def end_at_exit(self, hold: Any) -> None:
        """Release the key at the end of the process, even while it is in use.

        ``report_exit()`` is called when all keys are released.
        """
        try:
            if not hold.life.exit(explain.EXITED) & Effect.RELEASE:
                return
            if hold.life.state.reason is Reason.RELEASED:
                # Only open transactions kept it.
                hold.perform_quietly(Effect.RELEASE)
                return
            keeper.remove(hold)
            # A caller may acquire the key again, in another exit handler.
            hold.forget_entries()
            hold.release_again()
        except BaseException:
            if hold.life.state.reason is Reason.EXIT and not hold.is_released:
                # Interrupted, and nothing else would send the release.
                hold.release_again()
            raise

    def report_exit(self, hold: Any) -> None:
        """Report the end of a hold at the end of the process, unless it was reported.

        That of an open block is a loss.
        """
        state = hold.life.state
        if state.reason is not Reason.EXIT or hold.face is None:
            return
        if state.blocks:
            hold.report_loss()
            return
        logger.warning(
            "%r was never released by %s, whose process is about to end. It is released"
            " now, after %s.",
            hold.lock.key,
            shown_holder(hold.claim.holder),
            duration(hold.lease.age),
        )
        hold.send_ended("released")
