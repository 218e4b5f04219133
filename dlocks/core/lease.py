"""How a hold is checked and renewed, and how its loss is reported."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from django.db import connections

from dlocks.backends.base import Backend
from dlocks.core.callers import forget_acquired, has_ended
from dlocks.core.hold_state import HoldState, ensure_sync
from dlocks.exceptions import LockLost
from dlocks.runtime import clock
from dlocks.runtime.clock import FOREVER
from dlocks.runtime.jobs import GONE
from dlocks.runtime.keeper import OUTSIDE_TIMEOUT, keeper
from dlocks.signals import send_ended
from dlocks.text import duration, shown_holder
from dlocks.values import Claim

logger = logging.getLogger("dlocks")

# Seconds between two checks whether a transaction in which a lease was left has ended.
POLL_EVERY = 0.05
# Seconds between two checks whether the caller of a lease has ended.
LOOK_EVERY = 1.0
# Minimum seconds before a failed renewal is retried.
SOONEST_RENEWAL = 0.02
# Seconds before its deadline in which a lease may expire on the way to the database.
ALMOST_OVER = 1.0
# Seconds for which an expired lease counts as not lost, after a reply that it could not
# be renewed just then.
NOT_LOST_FOR = 1.0
# The ttls after which a hold that was not released is reported, without ``slow_hold``.
SLOW_TTLS = 10

_main_thread = threading.main_thread()


class Lease(HoldState):
    """The checks, the renewals and the loss of a hold."""

    if TYPE_CHECKING:
        # The keeper calls them.
        @property
        def to_settle(self) -> bool: ...

        def settle(self, timeout: float = ...) -> None: ...
        @property
        def is_abandoned(self) -> bool: ...
        def end_abandoned(self) -> None: ...
        def end_at_exit(self) -> None: ...

    def check(self) -> None:
        """Check with the backend that the key is held, or raise LockLost."""
        ensure_sync()
        if not self._keeps or not self._confirmed(self._count):
            self.lose(self.why_gone() if self._keeps else self.why_not())
            raise self._reported_lost()

    def renew(self) -> None:
        """Extend the lease to its ttl from now, or raise LockLost.

        In a transaction there is no lease, so this only checks the hold.
        """
        ensure_sync()
        if self.scope == "transaction" or self.pinned:
            self.check()
            return
        if self._keeps:
            sent = clock.now()
            if self._kept_until:
                self._kept_until = max(self._kept_until, sent + self.claim.ttl)
            claim = self.next_claim()
            self.renewed(sent, self._ask(self.backend.renew, [claim]))
            return
        self.lose(self.why_not())
        raise self._reported_lost()

    def renewed(self, sent: float, left: Mapping[str, float]) -> None:
        """Record the reply to the caller's renewal: the seconds left, by owner."""
        if self.owner not in left:
            self.lose(self.why_gone())
            raise self._reported_lost()
        if self.backend.refusal(self.claim) is None:
            # Otherwise the caller's transaction wrote it, and may roll it back.
            self.note_answer(sent, left[self.owner])

    # Methods for the keeper.

    @property
    def slow_at(self) -> float:
        """Return when the hold is reported as not released for a long time."""
        if self.slow_reported:
            return FOREVER
        return self._granted_at + slow_after(self.backend, self.claim.ttl)

    def report_slow(self) -> None:
        """Log once that the hold has not been released for a long time."""
        if self.slow_reported or clock.now() < self.slow_at or self.is_over:
            return
        self.slow_reported = True
        logger.warning(
            "%r has been held for %s by %s and was not released yet",
            self.key,
            duration(self.age),
            shown_holder(self.claim.holder),
        )

    @property
    def due_at(self) -> float:
        """Return when the keeper should check this hold."""
        if self.in_transactions:
            return clock.now() + POLL_EVERY
        if not self.renewable:
            return self._deadline
        due = min(self.renew_at, self._lost_at, self.slow_at)
        if self.caller is not _main_thread:
            # Its caller may end without a release.
            due = min(due, clock.now() + LOOK_EVERY)
        return due

    @property
    def _lost_at(self) -> float:
        """Return when the hold is lost unless it is renewed."""
        if self._may_be_late:
            return max(self._deadline, self._answered_at + NOT_LOST_FOR)
        return self._deadline

    @property
    def first_due_at(self) -> float:
        """Return ``due_at`` for a hold that was just granted to this caller."""
        return min(self.renew_at, self._deadline) if self.lock.renew else self.due_at

    @property
    def renewable(self) -> bool:
        """Return whether the keeper should renew the hold.

        Not for a caller that has died, nor beyond ``max_hold``.
        """
        if (
            self._ended
            or self._lost is not None
            or self._deadline >= min(self._last_at, self._kept_until)
        ):
            return False
        if self.pinned_in and self.pinned:
            return False
        return not has_ended(self.caller)

    def next_claim(self) -> Claim:
        """Return the claim for a renewal, at most until ``max_hold``.

        It is ``late`` where the lease may have expired.
        """
        now = clock.now()
        ttl = min(self.claim.ttl, min(self._last_at, self._kept_until or FOREVER) - now)
        late = self._deadline - now < ALMOST_OVER and self._may_be_late
        if ttl == self.claim.ttl and not late:
            return self.claim
        return dataclasses.replace(self.claim, ttl=max(ttl, 0.0), late=late)

    def note_answer(self, sent: float, seconds: float) -> None:
        """Record a renewal that lasts for ``seconds`` from ``sent``."""
        with self._mutex:
            self._answered_at = clock.now()
            self._deadline = max(self._deadline, min(sent + seconds, self._last_at))
            step = min(self.claim.ttl / 3, self.backend.renew_every)
            if seconds >= step:
                self.renew_at = sent + step
                return
        # The row was locked, so the lease was not fully extended. Retry soon.
        self.put_off_renewal()

    def put_off_renewal(self) -> None:
        # The first lease of a queued claim is much shorter than its ttl.
        now = clock.now()
        delay = max(
            SOONEST_RENEWAL, min(self.claim.ttl / 10, (self._deadline - now) / 4)
        )
        self.renew_at = now + min(delay, self.backend.renew_every)

    def check_expiry(self) -> None:
        """Check whether the lease has expired, or pinning transactions have ended."""
        if self.pinned_in:
            if self.pinned:
                return
            self.unpin()
        if not self._ended and self._lost is None and clock.now() >= self._lost_at:
            self.lose(self.why_not())

    # Pinned by the transactions of ``hold.atomic()``.

    def unpin(self) -> None:
        """Remove the pins that have ended."""
        for mark in list(self.pinned_in):
            if not mark.stands:
                # The caller and the keeper may do this at once.
                with suppress(ValueError):
                    self.pinned_in.remove(mark)

    def committed(self, sent: float) -> None:
        """Record the commit of a transaction that pinned the key.

        The lease counts from its last statement.
        """
        self.note_answer(sent, self.claim.ttl)
        self.unpin()
        keeper.check_soon()

    # The loss.

    def lose(self, why: str) -> None:
        """Mark the hold as lost, and signal the loss once."""
        with self._mutex:
            if self._ended or self._lost is not None:
                return
            self._lost = why
        keeper.drop(self)
        if self._count == 0 or has_ended(self.caller):
            # It was left in a transaction, or nothing will release it.
            forget_acquired(self)
        logger.warning("%s", self.lost_error())
        if keeper.is_current:
            # User code must not keep the keeper from the other holds.
            try:
                threading.Thread(
                    target=self._signal_and_disconnect, name="dlocks-lost", daemon=True
                ).start()
            except RuntimeError:
                # A late signal is better than none.
                logger.exception(
                    "No thread could be started, so the keeper signals the loss of %r"
                    " itself, and renews no lease meanwhile",
                    self.key,
                )
                self._signal_and_disconnect()
        else:
            self._tell()

    def _tell(self) -> None:
        send_ended(self, "lost")
        if self.lock.on_lost is not None:
            try:
                self.lock.on_lost(self)
            except Exception:
                logger.exception("on_lost of %r failed", self.key)

    def _signal_and_disconnect(self) -> None:
        try:
            self._tell()
        finally:
            connections.close_all()

    def why_not(self) -> str:
        if self.scope == "transaction":
            return "its transaction has ended"
        if clock.now() >= self._last_at:
            return f"it was held for its max_hold of {self.lock.max_hold:.10g} s"
        return f"it was not renewed within its ttl of {self.claim.ttl:g} s"

    def why_gone(self) -> str:
        """Return why the key is no longer held, and who took it, if known."""
        if self.scope == "transaction" or self._lost is not None:
            return GONE
        backend = self.backend
        ask = partial(backend.inspector.taken_by, self.claim, self.token, self.age)
        try:
            outside = backend.in_transaction() and backend.refusal(self.claim) is None
            fact = (
                keeper.run(ask, backend, timeout=OUTSIDE_TIMEOUT) if outside else ask()
            )
        except Exception:
            # The loss is certain, and it is what matters.
            logger.debug("The new holder of %r is not known", self.key, exc_info=True)
            fact = None
        return f"{GONE}: {fact}" if fact else GONE

    def _reported_lost(self) -> LockLost:
        """Return the error for a caller that learns of the loss by it.

        Its next acquisition makes a new hold.
        """
        self._forget_entries()
        return self.lost_error()

    def lost_error(self, why: str | None = None) -> LockLost:
        why = why or self._lost
        who = f"{shown_holder(self.claim.holder)} (token {self.token})"
        return LockLost(
            (
                f"{self.key!r} was lost by {who}: {why}."
                if why
                else f"{self.key!r} has been released by {who}."
            ),
            key=self.key,
            token=self.token,
        )

    # Internal methods.

    @property
    def _keeps(self) -> bool:
        """Return whether the key is held, or may still be.

        A hold may still be renewed after its lease has expired.
        """
        return self.held or (not self.is_over and (self.pinned or self._may_be_late))

    @property
    def _may_be_late(self) -> bool:
        """Return whether a renewal restores an expired lease.

        It does if no other caller has acquired the key.
        """
        return self.backend.renews_late and self.scope == "lease" and self.renewable

    def _confirmed(self, count: int) -> bool:
        """Ask the backend whether the key is still held, and store the count."""
        for mark in list(self.pinned_in):
            if mark.stands:
                # Only that transaction can check the row, which it has locked. The
                # lease may have expired, but no caller takes the key before the
                # transaction ends.
                return mark.is_elsewhere or bool(
                    self.backend.pin(self.claim, mark.alias)
                )
        claim, sent = (
            self.next_claim() if self._may_be_late else self.claim,
            clock.now(),
        )
        confirmed = bool(self._ask(self.backend.verify, [claim], count))
        if confirmed and claim.late and self.backend.refusal(self.claim) is None:
            self.note_answer(sent, claim.ttl)
        return confirmed


def slow_after(backend: Backend, ttl: float) -> float:
    """Return the seconds after which a hold that was not released is reported."""
    return SLOW_TTLS * ttl if backend.slow_hold is None else backend.slow_hold
