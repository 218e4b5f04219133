"""The callers of this process that wait in the queue of a key, and their thread."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from dlocks.backends.base import HANDOVER_LEASE, Backend
from dlocks.backends.notifiers import Notifier
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.deadlocks import CONFIRM_AFTER, WaitGraph
from dlocks.runtime.delays import (
    HEARTBEAT_EVERY,
    LONGEST_POLL_DELAY,
    SHORTEST_POLL_DELAY,
    PollSchedule,
)
from dlocks.runtime.keeper import OUTSIDE_TIMEOUT
from dlocks.runtime.pools import use_private_connections
from dlocks.runtime.process import each_in_child
from dlocks.runtime.requests import request
from dlocks.runtime.threads import BackgroundThread, Flag, Latch, Mutex, new_mutex
from dlocks.runtime.workers import IDLE_CLOSE_AFTER
from dlocks.values import Claim, Grant, Ticket, WaitingClaim

logger = logging.getLogger("dlocks")

# Seconds for which waiters get no error if the database is unreachable. A restart is
# quicker.
CONNECT_TIMEOUT = 10.0

# Seconds after its timeout from which a waiter gets no more heartbeats, and is skipped.
OVERDUE = 1.0


@dataclass(eq=False)
class Waiter:
    """One caller whose claim is in the queue."""

    claim: Claim
    # Called in another thread when the caller has something to do.
    wake: Callable[[], object]
    caller: object = None
    # When its timeout ends. Other waiters do not wait for it much beyond that.
    until: float = math.inf
    # A grant, and when the request was sent from which its lease counts.
    given: tuple[Grant, float] | None = None
    error: LockBackendError | None = None
    position: int | None = None
    # Held while the claim rejoins the queue. Reentrant, so that a second removal
    # completes one that was interrupted.
    mutex: Mutex = field(default_factory=threading.RLock)
    is_queued: bool = False
    # When to poll for it next, at the latest.
    poll_at: float = 0.0
    # When it was woken, unless it waits again.
    woken: float = 0.0
    # Whether the key may become free without a notification.
    unnotified: bool = False
    # Whether its coroutine was closed, so that no caller waits any more.
    closed: bool = False
    # When to look for a deadlock next, the one seen at the last look, and the one that
    # is certain.
    check_at: float = math.inf
    suspected: Sequence[str] = ()
    deadlock: Sequence[WaitingClaim] = ()

    @property
    def is_abandoned(self) -> bool:
        """Return whether the coroutine or its event loop was closed."""
        return self.closed or (
            isinstance(self.caller, asyncio.Task) and self.caller.get_loop().is_closed()
        )

    def apply(self, ticket: Ticket, sent: float) -> bool:
        """Record the reply to a request that was sent at ``sent``.

        Return whether the caller has to be woken.
        """
        self.position = ticket.position or self.position
        self.unnotified = ticket.unnotified
        if ticket.grant is not None:
            self.given = ticket.grant, sent
        must_wake = ticket.grant is not None or ticket.must_retry
        if must_wake:
            self.woken = clock.now()
        return must_wake


def foremost(queued: Iterable[Waiter]) -> Iterator[Waiter]:
    """Yield the waiters that may be granted next.

    These are the first waiter of each key that takes part in every grant, and those in
    front of it: shared claims, and claims that take nothing over.
    """
    by_key: defaultdict[str, list[Waiter]] = defaultdict(list)
    for waiter in queued:
        if not waiter.woken:
            by_key[waiter.claim.key].append(waiter)
    for waiters in by_key.values():
        for waiter in sorted(waiters, key=lambda one: one.position or 0):
            yield waiter
            if waiter.claim.takeover and not waiter.claim.shared:
                break


class Waiters:
    """The callers of this process that are queued for keys of one backend.

    One daemon thread serves all of them, so thousands of waiting tasks cost one
    connection and an occasional request. It waits for notifications, polls the claims
    and sends their heartbeats.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._reset()
        _all_waiters.add(self)

    def _reset(self) -> None:
        self._mutex = new_mutex()
        # Wakes the thread where nothing is notified.
        self._wakeup = Flag()
        # The waiters by the owner of their claim.
        self._waiters: dict[str, Waiter] = {}
        self._thread = BackgroundThread("dlocks-waiting", self._serve)
        # Set once the backend was asked for a notifier.
        self._ready = Latch()
        self._schedule = PollSchedule()
        # When to poll for grants that are not notified.
        self._poll_at = clock.FOREVER
        # When a waiter was last removed.
        self._removed_at = 0.0
        self._name = f"dlocks_{secrets.token_hex(8)}"
        # Where the claims of this process are notified. Empty if they have to be
        # polled.
        self.channel = ""

    def enter(self, waiter: Waiter) -> None:
        """Add a waiter, and return once it can be notified of a grant."""
        with self._mutex:
            self._waiters[waiter.claim.owner] = waiter
            if not self._thread.is_running and self._ready.is_set():
                self._ready = Latch()
            ready = self._ready
        self._thread.start()
        if not ready.is_set():
            ready.wait(min(1.0, waiter.until - clock.now()))

    def mark_queued(self, waiter: Waiter) -> None:
        """Poll for a waiter's claim in time, now that it is queued."""
        with self._mutex:
            waiter.is_queued = True
            # Most turns come before a poll is needed.
            waiter.poll_at = clock.now() + HEARTBEAT_EVERY / 2
            if waiter.claim.holding and waiter.check_at == math.inf:
                waiter.check_at = clock.now() + self._deadlock_after
            if waiter.unnotified:
                self._schedule.missed()
            if self._schedule.is_frequent:
                self._poll_at = min(self._poll_at, clock.now() + SHORTEST_POLL_DELAY)
                self._wakeup.set()

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter. From now on nothing returns its claim to the queue."""
        with self._mutex:
            self._waiters.pop(waiter.claim.owner, None)
            self._removed_at = clock.now()
        # A request to return it may hang. That claim is soon skipped.
        if waiter.mutex.acquire(timeout=OUTSIDE_TIMEOUT):
            waiter.mutex.release()

    def poll_now(self) -> None:
        """Poll in the caller's thread, after a test has moved a frozen clock."""
        self._poll(notified=True)

    # The thread.

    def _serve(self) -> None:
        notifier: Notifier | None = None
        try:
            if not self._is_needed():
                return
            use_private_connections()
            notifier = self._connect()
            can_notify = notifier is not None
            failing_since: float | None = None
            while True:
                if not self._is_needed():
                    break
                try:
                    notified = self._rest(notifier)
                    request(self._poll, notified=notified)
                    request(self._find_deadlocks)
                    failing_since = None
                    if can_notify and notifier is None:
                        notifier = self._connect()
                        # A grant since the last poll was not notified.
                        request(self._poll, notified=True)
                except LockBackendError as error:
                    if failing_since is None:
                        failing_since = clock.now()
                        logger.warning(
                            "The waiting callers could not be served. Retrying: %s",
                            error,
                        )
                    if clock.now() - failing_since >= CONNECT_TIMEOUT:
                        self._fail(error)
                    notifier = None
                    self._notify_through(None)
                    self.backend.close()
                    time.sleep(LONGEST_POLL_DELAY)
        except BaseException as error:
            logger.exception("The thread that serves waiting callers failed")
            self._fail(
                LockBackendError(f"Waiting callers could not be served: {error}"),
                ends=True,
            )
        finally:
            if notifier is not None:
                with suppress(LockBackendError):
                    notifier.close()
            self.backend.close()

    def _is_needed(self) -> bool:
        """Return whether this thread has waiters, or had some a moment ago."""
        with self._mutex:
            if not self._thread.is_current:
                # Another thread has begun to work first.
                return False
            # A test may have turned the clock back.
            self._removed_at = min(self._removed_at, clock.now())
            if self._waiters or clock.now() < self._removed_at + IDLE_CLOSE_AFTER:
                return True
            self._thread.end()
            return False

    def _connect(self) -> Notifier | None:
        notifier: Notifier | None = None
        try:
            notifier = self.backend.notifier(self._name)
        except LockBackendError as error:
            # Polling finds out whether the backend is reachable again.
            logger.warning("%s", error)
        self._notify_through(notifier)
        if notifier is not None:
            notifier.on_grant = self._on_grant
        self._ready.set()
        return notifier

    def _on_grant(self, owner: str, grant: Grant, sent: float) -> None:
        with self._mutex:
            waiter = self._waiters.get(owner)
        if waiter is not None and waiter.apply(Ticket(grant=grant), sent):
            waiter.wake()
            # The caller goes on first. Otherwise it waits until this thread sleeps.
            time.sleep(0)

    def _notify_through(self, notifier: Notifier | None) -> None:
        with self._mutex:
            self.channel = "" if notifier is None else notifier.channel or self._name
            self._schedule.is_notified = notifier is not None
            self._schedule.is_complete = notifier is not None and notifier.is_complete
            self._poll_at = 0.0

    def _queued(self) -> list[Waiter]:
        """Return the waiters to poll for. The caller holds the mutex."""
        now = clock.now()
        return [
            one
            for one in self._waiters.values()
            if one.is_queued and now <= one.until + OVERDUE
        ]

    def _rest(self, notifier: Notifier | None) -> bool:
        """Sleep until a poll is due, and return whether a notification came."""
        with self._mutex:
            queued = self._queued()
            due = [min(one.poll_at, one.check_at) for one in queued]
            # A waiter may be queued during the sleep.
            longest = (
                LONGEST_POLL_DELAY if self._schedule.is_needed else HEARTBEAT_EVERY / 2
            )
            if notifier is None and not queued:
                longest = IDLE_CLOSE_AFTER
            if queued:
                longest = min(longest, min(*due, self._poll_at) - clock.now())
        pause = max(0.0, longest)
        if notifier is not None:
            return notifier.wait(pause)
        self._wakeup.wait(pause)
        return False

    def _poll(self, *, notified: bool) -> None:
        """Poll the claims that are due, and those that a notification may be about."""
        sent = clock.now()
        with self._mutex:
            queued = self._queued()
            due = []
            if min([one.poll_at for one in queued], default=clock.FOREVER) <= sent:
                # Include those that are due soon. They came one by one, and would
                # always be polled one by one.
                due = list(
                    one for one in queued if one.poll_at <= sent + HEARTBEAT_EVERY / 2
                )
            for waiter in due:
                waiter.poll_at = sent + HEARTBEAT_EVERY * 0.9
            polled = {waiter.claim.owner: waiter for waiter in due}
            if notified or self._poll_at <= sent:
                polled |= {one.claim.owner: one for one in foremost(queued)}
        self._cancel_abandoned()
        ahead = self._apply(polled, sent, heartbeat=bool(due), notified=notified)
        with self._mutex:
            self._poll_at = clock.now() + self._schedule.delay(ahead)

    def _apply(
        self, polled: dict[str, Waiter], sent: float, *, heartbeat: bool, notified: bool
    ) -> int:
        """Poll claims, and wake the callers whose turn has come.

        Return the smallest number of claims ahead of one that still waits.
        """
        if not polled:
            return 1
        tickets = self.backend.poll(
            [waiter.claim for waiter in polled.values()], heartbeat=heartbeat
        )
        answered = clock.now()
        nearest, woken = sys.maxsize, False
        for owner, waiter in polled.items():
            if (ticket := tickets.get(owner)) is None:
                sent_again = clock.now()
                if (again := self._rejoin(waiter)) is not None and waiter.apply(
                    again, sent_again
                ):
                    waiter.wake()
                continue
            age = _age_of_grant(waiter, ticket, sent, answered)
            if not notified and age > self._schedule.notified_within:
                self._schedule.missed()
            if waiter.apply(ticket, sent):
                waiter.wake()
                woken = True
            else:
                waiter.poll_at = min(waiter.poll_at, sent + ticket.next_check)
                nearest = min(nearest, ticket.ahead)
        if woken:
            # The caller goes on first. Otherwise it waits until this thread sleeps.
            time.sleep(0)
        return 0 if nearest == sys.maxsize else nearest

    @property
    def _deadlock_after(self) -> float:
        """Return the seconds between two looks, each of which sends a query."""
        return max(CONFIRM_AFTER, self.backend.deadlock_after or 0.0)

    def _find_deadlocks(self) -> None:
        """Wake the callers whose claims close a cycle of waiting callers."""
        now = clock.now()
        with self._mutex:
            due = list(one for one in self._waiters.values() if one.check_at <= now)
        if not due:
            return
        victims = WaitGraph(self.backend.inspector.waiting_claims()).victims()
        for waiter in due:
            cycle = victims.get(waiter.claim.owner, ())
            suspected = [claim.owner for claim in cycle]
            waiter.check_at = clock.now() + (
                CONFIRM_AFTER if cycle else self._deadlock_after
            )
            if cycle and suspected == waiter.suspected:
                waiter.deadlock = cycle
                waiter.wake()
            waiter.suspected = suspected

    def _rejoin(self, waiter: Waiter) -> Ticket | None:
        """Return a claim to its position, which it lost for missing heartbeats."""
        # A woken waiter has had its turn, and returns only when it goes on.
        if waiter.woken or not waiter.mutex.acquire(blocking=False):
            return None
        try:
            with self._mutex:
                has_left = waiter.claim.owner not in self._waiters
            if has_left:
                return None
            return self.backend.enqueue(
                waiter.claim, self.channel, waiter.position
            ) or Ticket(next_check=0.0)
        finally:
            waiter.mutex.release()

    def _cancel_abandoned(self) -> None:
        """Cancel claims that no caller waits for.

        Not before they are queued. A claim that joined after that would stay.
        """
        with self._mutex:
            abandoned = list(
                one
                for one in self._waiters.values()
                if one.is_queued and one.is_abandoned
            )
        for waiter in abandoned:
            self.remove(waiter)
            self.backend.release(waiter.claim, failed=True)

    def _fail(self, error: LockBackendError, *, ends: bool = False) -> None:
        with self._mutex:
            if ends and self._thread.is_current:
                # The next waiter needs a new thread.
                self._thread.end()
            waiters = list(self._waiters.values())
            self._waiters.clear()
        for waiter in waiters:
            waiter.error = error
            waiter.wake()


def _age_of_grant(
    waiter: Waiter, ticket: Ticket, sent: float, answered: float
) -> float:
    """Return the seconds between a grant and the poll that found it, at the least.

    The result is infinite if the turn will come without a notification.
    """
    if ticket.grant is None or ticket.grant.lease is None or waiter.woken:
        return clock.FOREVER if ticket.unnotified else 0.0
    # The latest possible time of the grant.
    granted_at = answered + ticket.grant.lease - min(waiter.claim.ttl, HANDOVER_LEASE)
    return sent - granted_at


_all_waiters = each_in_child(Waiters._reset)


def waiters_of(backend: Backend) -> Waiters:
    """Return the waiters of a backend in this process."""
    if backend.waiters is None:
        # They have the same lifetime. Another thread may create some too.
        vars(backend).setdefault("waiters", Waiters(backend))
    return cast("Waiters", backend.waiters)
