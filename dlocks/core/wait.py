"""How an acquisition waits: in the queue of the key, or between requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from dlocks.backends.base import ANY_LEASE, HANDOVER_LEASE
from dlocks.core.callers import holding_of, read_outside, run_outside
from dlocks.core.claims import Claims
from dlocks.core.holder import own_holder_name
from dlocks.core.policy import shown
from dlocks.exceptions import LockBackendError, LockDeadlock, LockTimeout
from dlocks.runtime import clock
from dlocks.runtime.clock import FOREVER
from dlocks.runtime.deadlocks import described
from dlocks.runtime.delays import FIRST_DELAY, delays
from dlocks.runtime.keeper import OUTSIDE_TIMEOUT
from dlocks.runtime.threads import PythonIsExitingError
from dlocks.runtime.waiter import Waiter
from dlocks.runtime.waiters import waiters_of
from dlocks.signals import send_timed_out
from dlocks.text import duration, permits_taken
from dlocks.values import UNLIMITED, Claim, Holder, Ticket


class Wait(Claims):
    """The wait of an acquisition, up to its timeout."""

    paused = False
    # The pauses between tries, where there is no queue.
    delays: Iterator[float] | None = None
    asked = False
    # Whether a request may have been granted unnoticed, and the error of the request.
    unknown = False
    failure: LockBackendError | None = None
    # Set while the claim is queued, and whether to retry once more after a
    # notification.
    waiter: Waiter | None = None
    asks_again = False

    def _next_pause(self) -> float | None:
        pause = min(self._pause(), self._kept_for())
        return None if pause == FOREVER else pause

    # Internal methods.

    def _pause(self) -> float:
        left = self._deadline - clock.now()
        claim = self.claim
        if claim is not None and not self.backend.can_queue(claim):
            claim = None
        if self.waiter is None and claim is not None and claim.fair and left > 0:
            self.paused = True
            if self._join_queue(claim):
                return 0.0
        if self.waiter is None:
            if self.delays is None:
                self.delays = delays(self._deadline)
            delay = next(self.delays, None)
            if delay is None and claim is not None and not self.asked:
                # It was too late to join the queue first. No reply has said yet that
                # the key is held.
                delay = 0.0
            if delay is not None:
                self.paused = True
                return delay
        elif left > 0 and not self.waiter.deadlock:
            if self.waiter.woken and not self.asks_again:
                # Its turn has come, but the row was locked, for example. That is most
                # likely brief.
                self.asks_again = True
                return min(FIRST_DELAY, left)
            if not self.waiter.is_queued or self.waiter.woken:
                # The row is still locked, or the waiter was late. It returns to its
                # position.
                self.waiter.woken = 0.0
                waiters_of(self.backend).mark_queued(self.waiter)
            self.asks_again = False
            return left
        elif left > -HANDOVER_LEASE and self._granted_on_last_poll(self.waiter):
            # Retry at once. If the row is locked then, pause first.
            self.waiter.deadlock = ()
            delay, self.asks_again = (FIRST_DELAY if self.asks_again else 0.0), True
            return delay
        raise self._refusal()

    def _refusal(self) -> LockTimeout:
        holder, who = None, ""
        with suppress(LockBackendError):
            holder, who = read_outside(
                self._current_holder, self.backend, OUTSIDE_TIMEOUT
            )
        send_timed_out(self.lock, holder, clock.now() - self.began)
        facts: Any = {"key": self.lock.key, "timeout": self.timeout, "holder": holder}
        if self.waiter is not None and self.waiter.deadlock:
            members = tuple(described(self.waiter.deadlock, self._prefix))
            keys = sorted({member.waits_for for member in members})
            error = LockDeadlock(
                f"{self.lock.key!r} could not be acquired because of a deadlock:"
                f" {'; '.join(map(str, members))}. Acquire the keys in the same order"
                f" everywhere, or together: db_lock({', '.join(map(repr, keys))}).",
                **facts,
            )
            error.members = members
            return error
        when = f"within {shown(self.timeout)} s" if self.timeout else "without waiting"
        who = who or "held by an open transaction, or just released"
        return LockTimeout(
            f"{self.lock.key!r} could not be acquired {when}: {who}", **facts
        )

    def _current_holder(self) -> tuple[Holder | None, str]:
        """Return a holder of the key, and a phrase that names all holders.

        Another caller is preferred to this one. After a wait, the phrase says what the
        holder itself waits for.
        """
        if self.lock.permits < UNLIMITED:
            sharers, waiting = self.backend.inspector.sharers(self.key)
            if sharers:
                own = own_holder_name()
                other = next((one for one in sharers if one.holder != own), sharers[0])
                return other, permits_taken(
                    self.lock.permits, sharers, waiting - (self.waiter is not None)
                )
        holder = self.backend.holder(self.key)
        if holder is None:
            return None, ""
        wait = self._wait_of(holder) if self.paused else ""
        return holder, f"held by {holder}{wait}"

    @property
    def _prefix(self) -> str:
        # This may run in another thread, where the backend's prefix is not known.
        return self.key.removesuffix(self.lock.key)

    def _wait_of(self, holder: Holder) -> str:
        """Return a phrase about what the holder waits for, or an empty one."""
        for claim in self.backend.inspector.waiting_claims():
            if claim.holder == holder.holder and any(
                held.key == self.key for held in claim.holding
            ):
                key = claim.key.removeprefix(self._prefix)
                return f", and has waited for {key!r} for {duration(claim.waited)}"
        return ""

    # The queue.

    def _should_queue(self, claim: Claim) -> bool:
        """Return whether to join the queue before the first request.

        It is better if other callers were queued a moment ago.
        """
        return (
            self.waiter is None
            and not self.paused
            and self.timeout != 0
            and claim.fair
            and claim.takeover
            and not claim.beside
            and claim.key in self.backend.contended
            # No caller can queue in the transaction of a single writer. The request
            # reports that.
            and (claim.scope == "lease" or self.backend.refusal(ANY_LEASE) is None)
            and self.backend.can_queue(claim)
        )

    def _join_queue(self, claim: Claim) -> bool:
        """Join the queue, and return whether there is something to try at once."""
        waiters = waiters_of(self.backend)
        if self.backend.deadlock_after is not None and (
            holding := holding_of(self.caller, self.backend)
        ):
            self.claim = claim = replace(claim, holding=holding)
        until = self._deadline
        self.waiter = waiter = Waiter(claim, self.wakeup.wake, self.caller, until)
        try:
            waiters.enter(waiter)
        except PythonIsExitingError:
            # Only requests of this thread find out whether the key is free.
            waiters.remove(waiter)
            self.waiter = None
            return False
        sent = clock.now()
        enqueue = partial(self.backend.enqueue, claim, waiters.channel)
        try:
            ticket = run_outside(enqueue, self.backend, self._reply_timeout)
        except LockBackendError as error:
            self.failure = error
            if error.changed_nothing:
                waiters.remove(waiter)
                self.waiter = None
            raise
        if ticket is None or (ticket.must_retry and ticket.position is None):
            # Queueing is not possible at the moment, or not necessary.
            waiters.remove(waiter)
            self.waiter, self.unknown = None, ticket is not None
            return ticket is not None
        at_once = waiter.apply(ticket, sent)
        # In any case, because the first try may fail while another session reads the
        # row.
        waiters.mark_queued(waiter)
        return at_once

    def _granted_on_last_poll(self, waiter: Waiter) -> bool:
        """Return whether the key was granted at the last moment, or can be now."""
        for _ in range(2):
            sent = clock.now()
            # Nothing else sends the heartbeat if the background thread hangs.
            late = waiter.poll_at < sent
            poll = partial(self.backend.poll, [waiter.claim], heartbeat=late)
            tickets = run_outside(poll, self.backend, OUTSIDE_TIMEOUT)
            # If the claim was deleted, the caller requests the key once more.
            gone = Ticket(must_retry=not waiter.woken, ahead=1)
            ticket = tickets.get(waiter.claim.owner, gone)
            if ticket.grant is not None or ticket.must_retry:
                return waiter.apply(ticket, sent)
            if ticket.ahead:
                break
            # This poll has handed a free key on. The next one shows to which claim.
        return False
