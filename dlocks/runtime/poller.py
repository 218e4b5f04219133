"""Polling the claims of this process that are queued, and their heartbeats."""

from __future__ import annotations

import sys
import threading

from dlocks.backends.base import HANDOVER_LEASE, Backend
from dlocks.backends.notifiers import Notifier
from dlocks.runtime import clock
from dlocks.runtime.delays import HEARTBEAT_EVERY
from dlocks.runtime.waiter import Waiter
from dlocks.values import Ticket

# Age in seconds from which a grant found by polling counts as not notified.
NOTIFIED_WITHIN = 0.1
# Seconds of polling after that, as without notifications. It covers holders that do not
# notify.
POLLING_SECONDS = 10.0


class Poller:
    """The part of ``Waiters`` that polls their claims and sends their heartbeats."""

    backend: Backend
    # Where the claims of this process are notified. Empty if they have to be polled.
    channel: str
    _mutex: threading.RLock
    # The waiters by the owner of their claim.
    _waiters: dict[str, Waiter]
    _listener: Notifier | None
    # When the listener last received all messages.
    _received_at: float
    # Whether the next poll is for all waiters, because one was queued since the last.
    _poll_all: bool
    # Until when to poll even though the backend notifies.
    _poll_until: float

    @property
    def _must_poll(self) -> bool:
        """Return whether to poll in spite of a listener."""
        listener = self._listener
        return clock.now() < self._poll_until or (
            listener is not None and not listener.hears_all
        )

    def _heartbeat(self, listener: Notifier | None) -> float | None:
        """Send heartbeats, and return the seconds until the next poll.

        Return None if a poll is due now.
        """
        if listener is None or not listener.asks or self._must_poll:
            return None
        sent = clock.now()
        with self._mutex:
            # A waiter that was woken just now is about to leave.
            waiters = [
                waiter
                for waiter in self._waiters.values()
                if waiter.is_queued
                and waiter.woken <= sent - HEARTBEAT_EVERY
                and not waiter.is_overdue
            ]
        if not waiters:
            return float("inf")
        ticket = listener.heartbeat([waiter.claim for waiter in waiters])
        if ticket is None:
            return None
        if ticket.clock:
            for waiter in waiters:
                waiter.apply(ticket, sent)
        return ticket.next_check

    def _poll(self, *, heartbeat: bool) -> tuple[float, int]:
        """Poll the claims.

        Return the seconds until the next poll, and how many claims are ahead.
        """
        sent = clock.now()
        with self._mutex:
            # With notifications, poll only claims that are due: for a heartbeat, or to
            # find an expired lease. Include those that are due soon. They came one by
            # one, and would always be polled one by one.
            poll_all = self._poll_all or self._must_poll or not self.channel
            self._poll_all = False
            queued = {
                owner: waiter
                for owner, waiter in self._waiters.items()
                if waiter.is_queued and not waiter.is_overdue
            }
            due = any(waiter.poll_at <= sent for waiter in queued.values())
            waiters = {
                owner: waiter
                for owner, waiter in queued.items()
                if poll_all or (due and waiter.poll_at <= sent + HEARTBEAT_EVERY / 2)
            }
            for waiter in waiters.values():
                waiter.poll_at = sent + HEARTBEAT_EVERY * 0.9
        if not waiters:
            return self._seconds_to_poll(), 0
        tickets = self.backend.poll(
            [waiter.claim for waiter in waiters.values()], heartbeat=heartbeat
        )
        answered = clock.now()
        nearest = sys.maxsize
        for owner, waiter in waiters.items():
            ticket = tickets.get(owner)
            if ticket is not None and self._missed_notification(
                waiter, ticket, answered
            ):
                self._poll_until = clock.now() + POLLING_SECONDS
            if ticket is None:
                # It was skipped and removed for missing heartbeats. Return it to its
                # position.
                with waiter.mutex:
                    if waiter.has_left or waiter.woken:
                        # A woken waiter has had its turn, and returns only when it goes
                        # on.
                        continue
                    sent_again = clock.now()
                    ticket = self.backend.enqueue(
                        waiter.claim, self.channel, waiter.position
                    ) or Ticket(next_check=0.0)
                    if waiter.apply(ticket, sent_again):
                        waiter.wake()
                    continue
            if waiter.apply(ticket, sent):
                waiter.wake()
            else:
                waiter.poll_at = min(waiter.poll_at, sent + ticket.next_check)
                nearest = min(nearest, ticket.ahead)
        return self._seconds_to_poll(), 0 if nearest == sys.maxsize else nearest

    def _seconds_to_poll(self) -> float:
        """Return the seconds until the first waiter has to be polled."""
        with self._mutex:
            poll_at = [
                waiter.poll_at
                for waiter in self._waiters.values()
                if waiter.is_queued and not waiter.is_overdue
            ]
        return min(poll_at, default=float("inf")) - clock.now()

    def _missed_notification(
        self, waiter: Waiter, ticket: Ticket, answered: float
    ) -> bool:
        """Return whether a claim's turn came, or will come, without a message."""
        if ticket.grant is None or ticket.grant.lease is None or waiter.woken:
            return ticket.unnotified
        # The latest possible time of the grant.
        granted_at = (
            answered + ticket.grant.lease - min(waiter.claim.ttl, HANDOVER_LEASE)
        )
        # A second thread that does nothing else has received all messages.
        receives_all = (
            self._listener is not None and self._listener.beside is self._listener
        )
        return granted_at + NOTIFIED_WITHIN < (
            answered if receives_all else self._received_at
        )
