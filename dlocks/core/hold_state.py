"""The state of a hold: how it is checked and renewed, and how its loss is reported."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from django.db import connections

from dlocks.backends.base import Backend
from dlocks.core.callers import (
    Caller,
    EntryKey,
    forget_acquired,
    forget_hold,
    has_ended,
    is_outside,
)
from dlocks.core.lease import Lease
from dlocks.exceptions import LockLost
from dlocks.runtime import clock
from dlocks.runtime.connected import connection_of
from dlocks.runtime.jobs import GONE
from dlocks.runtime.keeper import OUTSIDE_TIMEOUT, keeper
from dlocks.runtime.requests import refuse_nested, request
from dlocks.signals import is_interrupt, send_ended
from dlocks.text import shown_holder
from dlocks.transactions import TransactionMarker, in_testcase, standing
from dlocks.values import Claim, Grant

if TYPE_CHECKING:
    from dlocks.protocols import Policy

logger = logging.getLogger("dlocks")


class HoldState:
    """What this process knows of one holding of one key, and asks about it.

    It consists of the caller's entries, a lease, and the transactions on which the hold
    depends.
    """

    # Number of 'with hold' blocks that are open.
    blocks = 0
    # Set by the thread that detaches the hold, which counts as ended meanwhile.
    offer: object | None = None
    # Number of responses that end it, perhaps after the event loop of their view.
    prolonged = 0
    failed = False
    # The file and the line that acquired it, where Python reports unclosed resources.
    acquired_at: tuple[str, int] | None = None
    # Whether it was reported as not released for a long time, or need not be.
    slow_reported = False
    # The transaction of the hold, and the point in it.
    connection: Any = None
    mark: TransactionMarker | None = None
    # The outermost transaction around that point.
    whole: TransactionMarker | None = None
    # Its public face, until it is released. No cycle remains.
    hold: Any = None

    def __init__(
        self,
        lock: Policy,
        backend: Backend,
        claim: Claim,
        grant: Grant,
        caller: Caller,
        sent: float,
        waited: float,
    ) -> None:
        self.lock = lock
        self.backend = backend
        self.claim = claim
        self.lease = Lease(lock, backend, claim, grant, sent)
        self.scope: str = claim.scope
        self.token = grant.token
        self.takeover = grant.takeover
        self.waited = waited
        self.caller = caller
        self._pid = os.getpid()
        # One object per entry that was not left, the oldest first. An entry has an
        # identity, so that the end of an acquisition leaves its own one, and once.
        self.open_entries: list[object] = [object()]
        # The lock of each entry, newest last, until when the key was to stay taken
        # before that entry, and the entry if its acquisition may still be cancelled.
        # The last entry that is left stays here, since its transactions may not have
        # ended.
        self.entered_by: list[tuple[Policy, float, object]] = [(lock, 0.0, None)]
        # The callers of the open 'with hold' blocks. They need not be the one that
        # acquired it.
        self.users: list[Caller] = []
        # Whether all entries accept a release before the transaction ends.
        self.leaves_at_exit = lock.release_at == "exit"
        # Transactions in which the lease was left, and at whose end it is released.
        self.left_in: list[TransactionMarker] = []
        # Those in which it was left before it was entered again. They may still be
        # open in other threads.
        self.left_before: list[TransactionMarker] = []
        # Transactions of hold.atomic() that keep the key, whatever the clocks say.
        self.pinned_in: list[TransactionMarker] = []
        # Its keys in holds_by_caller.
        self.entered_as: list[EntryKey] = []
        if self.scope == "transaction":
            self.connection = connection_of(backend.database)
            self.mark = TransactionMarker.here(self.connection)
            self.mark.keys[backend.identity, claim.key] = None
            # A TestCase never commits, and its users count the on_commit() callbacks.
            self.whole = (
                self.mark
                if in_testcase(self.connection)
                else TransactionMarker.whole(self.connection)
            )

    @property
    def held(self) -> bool:
        """Return whether the key is certainly held, without I/O."""
        if self.is_over:
            return False
        if self.scope == "transaction":
            return self.mark is not None and self.mark.stands
        return self.lease.is_live

    @property
    def is_over(self) -> bool:
        """Return whether the hold has ended, is lost, or is a parent process's."""
        lease = self.lease
        return lease.ended or lease.lost is not None or self.is_forked

    @property
    def is_forked(self) -> bool:
        return self._pid != os.getpid()

    @property
    def count(self) -> int:
        """Return how often the hold was entered and not left."""
        return len(self.open_entries)

    @property
    def entries(self) -> int:
        return 0 if self.lease.ended else self.count

    @property
    def parts(self) -> list[Self]:
        return [self]

    @property
    def remaining(self) -> float:
        return max(0.0, self.lease.deadline - clock.now()) if self.held else 0.0

    @property
    def age(self) -> float:
        return self.lease.age

    @property
    def pinned(self) -> bool:
        """Return whether an open transaction of ``atomic()`` keeps the key."""
        return any(mark.stands for mark in list(self.pinned_in))

    @property
    def in_transactions(self) -> bool:
        """Return whether the hold's state depends on the end of transactions."""
        return bool(self.pinned_in or self.left_in)

    @property
    def keeps(self) -> bool:
        """Return whether the key is held, or may still be.

        A hold may still be renewed after its lease has expired.
        """
        return self.held or (not self.is_over and (self.pinned or self.may_be_late))

    @property
    def may_be_late(self) -> bool:
        """Return whether a renewal restores an expired lease.

        It does if no other caller has acquired the key.
        """
        return self.backend.renews_late and self.scope == "lease" and self.renewable

    @property
    def renewable(self) -> bool:
        """Return whether the keeper should renew the hold.

        Not where nothing will release it, nor beyond ``max_hold``.
        """
        lease = self.lease
        if lease.is_over or not lease.can_grow or self.pinned:
            return False
        # The keeper ends an orphaned hold with entries. Until then, another caller may
        # enter it.
        return self.count > 0 or not self.is_orphaned

    @property
    def callers(self) -> list[Caller]:
        """Return the caller that acquired it, and those of its open blocks."""
        return [self.caller, *self.users]

    @property
    def is_orphaned(self) -> bool:
        """Return whether its callers have ended, and nothing else will release it."""
        if self.prolonged or self.left_in or standing(self.left_before):
            return False
        return all(map(has_ended, self.callers))

    def add_user(self, caller: Caller) -> None:
        """Record the caller of a block that begins, or raise LockLost."""
        # In one section with the check, since the keeper ends an orphaned hold, and
        # another thread may detach it.
        with self.lease.mutex:
            over, lost = self.lease.is_over, self.lease.lost
            if not over:
                self.users.append(caller)
        if lost is not None:
            raise self.loss(lost)
        if over:
            raise self.lost_error(
                None if self.offer is None else "it is being handed over"
            )

    @property
    def mutex(self) -> threading.RLock:
        return self.lease.mutex

    def end_block(self) -> None:
        """Count one 'with hold' block less, if a new entry has not begun to count."""
        with self.mutex:
            self.blocks = max(0, self.blocks - 1)

    def remove_user(self, caller: Caller) -> None:
        """Forget the caller of a block that has ended."""
        with self.lease.mutex:
            if caller in self.users:
                self.users.remove(caller)
            elif self.users:
                # The block ends in another caller than it began.
                self.users.pop()

    def ask(self, function: Any, *arguments: Any, **keywords: Any) -> Any:
        """Call the backend about the hold.

        A lease is handled outside of the caller's transaction and pool.
        """
        backend = self.backend
        if self.scope == "transaction":
            self.refuse_other_thread()
        # Within hold.atomic() only the caller's transaction can write the row.
        if (
            self.scope == "lease"
            and is_outside(backend)
            and (not self.pinned or backend.connect_first)
        ):
            refuse_nested()
            ask = partial(request, function, *arguments, **keywords)
            return keeper.run(ask, backend)
        return request(function, *arguments, **keywords)

    def refuse_other_thread(self) -> None:
        """Raise RuntimeError if the hold belongs to another thread's transaction."""
        if (
            self.scope == "transaction"
            and connection_of(self.backend.database) is not self.connection
        ):
            raise RuntimeError(
                f"{self.lock.key!r} is held by a transaction of another thread. Only"
                " that thread can use the hold."
            )

    def check(self) -> None:
        """Check with the backend that the key is held, or raise LockLost."""
        if not self.keeps or not self.confirmed(self.count):
            raise self.loss(self.why_gone() if self.keeps else self.lease.why_not())
        self.refuse_ended()

    def renew(self) -> None:
        """Extend the lease to its ttl from now, or raise LockLost."""
        if self.scope == "transaction" or self.pinned:
            self.check()
            return
        if not self.keeps:
            raise self.loss(self.lease.why_not())
        sent, lease = clock.now(), self.lease
        if lease.kept_until:
            lease.kept_until = max(lease.kept_until, sent + self.claim.ttl)
        self.renewed(sent, self.ask(self.backend.renew, [self.next_claim()]))

    def renewed(self, sent: float, left: Mapping[str, float]) -> None:
        """Record the reply to the caller's renewal: the seconds left, by owner."""
        if self.claim.owner not in left:
            raise self.loss(self.why_gone())
        if self.backend.refusal(self.claim) is None:
            # Otherwise the caller's transaction wrote it, and may roll it back.
            self.lease.note_answer(sent, left[self.claim.owner])
        self.refuse_ended()

    def add_entry(self, lock: Policy, entry: object) -> None:
        """Add the lock of one more entry, or raise LockLost if the hold has ended.

        Its ``on_lost`` is called from now on, and its ``min_hold`` counts from now.
        """
        lease = self.lease
        with lease.mutex:
            if not self.is_over:
                self.entered_by.append((lock, lease.taken_until, entry))
                lease.keep_taken(lock.min_hold)
                return
        raise self.loss(lease.why_not())

    def remove_entry(self) -> float:
        """Remove the newest entry.

        Return until when the key was to stay taken before it.
        """
        if len(self.entered_by) == 1:
            return self.lease.taken_until
        return self.entered_by.pop()[1]

    def revert_lock(self, entry: object) -> None:
        """Remove the lock of an entry that its caller never received, if it is there.

        Its owner holds the mutex.
        """
        if self.entered_by[-1][2] is entry:
            self.lease.taken_until = self.remove_entry()

    def refuse_ended(self) -> None:
        """Raise LockLost if the hold ended while the backend was asked about it."""
        if self.is_over:
            raise self.loss(self.lease.why_not())

    def next_claim(self) -> Claim:
        return self.lease.next_claim(may_be_late=self.may_be_late)

    def confirmed(self, count: int) -> bool:
        """Ask the backend whether the key is still held, and store the count."""
        for mark in list(self.pinned_in):
            if mark.stands:
                # Only that transaction can check the row, which it has locked. The
                # lease may have expired, but no caller takes the key before the
                # transaction ends.
                return mark.is_elsewhere or bool(
                    request(
                        self.backend.pin, replace(self.claim, late=True), mark.alias
                    )
                )
        claim, sent = self.next_claim() if self.may_be_late else self.claim, clock.now()
        confirmed = bool(self.ask(self.backend.verify, [claim], count))
        if confirmed and claim.late and self.backend.refusal(self.claim) is None:
            self.lease.note_answer(sent, claim.ttl)
        return confirmed

    def unpin(self) -> None:
        for mark in list(self.pinned_in):
            if not mark.stands:
                # The keeper may do so too.
                with suppress(ValueError):
                    self.pinned_in.remove(mark)

    def committed(self, sent: float) -> None:
        """Record the commit of a transaction that pinned the key.

        The lease counts from its last statement.
        """
        self.lease.note_answer(sent, self.claim.ttl)
        self.unpin()
        keeper.check_soon()

    def lose(self, why: str) -> None:
        if self.lease.lose(why):
            self.report_loss()

    def report_loss(self) -> None:
        keeper.drop(self)
        if self.count == 0 or has_ended(self.caller):
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
                    "No thread could be started, so the keeper signals the loss of %r",
                    self.lock.key,
                )
                self._signal_and_disconnect()
        else:
            self._signal()

    def _signal(self) -> None:
        hold = self.hold
        if hold is None:
            # It was released meanwhile.
            return
        send_ended(hold, "lost")
        callbacks: list[Callable[[Any], object]] = []
        for lock, *_ in list(self.entered_by):
            if lock.on_lost is not None and lock.on_lost not in callbacks:
                callbacks.append(lock.on_lost)
        for on_lost in callbacks:
            try:
                on_lost(hold)
            except Exception as error:
                if is_interrupt(error):
                    raise
                logger.exception("on_lost of %r failed", self.lock.key)

    def _signal_and_disconnect(self) -> None:
        try:
            self._signal()
        finally:
            connections.close_all()

    def why_gone(self) -> str:
        """Return why the key is no longer held, and who took it, if known."""
        if self.scope == "transaction" or self.lease.lost is not None:
            return GONE
        backend, age = self.backend, self.lease.age
        ask = partial(request, backend.inspector.taken_by, self.claim, self.token, age)
        try:
            outside = backend.in_transaction() and backend.refusal(self.claim) is None
            fact = (
                keeper.run(ask, backend, timeout=OUTSIDE_TIMEOUT) if outside else ask()
            )
        except Exception as error:
            if is_interrupt(error):
                raise
            # The loss is certain, and it is what matters.
            logger.debug(
                "The new holder of %r is not known", self.lock.key, exc_info=True
            )
            fact = None
        return f"{GONE}: {fact}" if fact else GONE

    def loss(self, why: str) -> LockLost:
        """Mark the hold as lost, and return the error for its caller.

        Its next acquisition makes a new hold, even one by ``on_lost``.
        """
        if self.offer is None:
            # A detach that fails continues the hold.
            self.forget_entries()
        self.lose(why)
        return self.lost_error()

    def lost_error(self, why: str | None = None) -> LockLost:
        why = why or self.lease.lost
        who = f"{shown_holder(self.claim.holder)} (token {self.token})"
        return LockLost(
            (
                f"{self.lock.key!r} was lost by {who}: {why}."
                if why
                else f"{self.lock.key!r} has been released by {who}."
            ),
            key=self.lock.key,
            token=self.token,
        )

    def forget_entries(self) -> None:
        # Weak references would go by themselves, but Python swallows a Ctrl-C then.
        forget_hold(self)
