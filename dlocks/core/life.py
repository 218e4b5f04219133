"""The life of a hold: one state machine, without I/O.

It earns three promises of docs/safety.md: a hold that several callers use is released
once, by the last of them; no block loses its key in silence; and work in a transaction
commits under the lock or not at all.

The table in docs/architecture.md has every state and every event.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol

from dlocks.core.entry import Entry
from dlocks.runtime.threads import new_mutex

P = ParamSpec("P")


class Phase(enum.Enum):
    """Where a hold is in its life."""

    # At least one entry is open.
    HELD = "held"
    # All entries were left, and a transaction still keeps the key.
    LEFT = "left"
    # The request that passes the hold to another process is under way.
    DETACHING = "detaching"
    ENDED = "ended"


class Reason(enum.Enum):
    """Why a hold has ended."""

    RELEASED = "released"
    DETACHED = "detached"
    # Its lease has expired, or another caller has the key.
    LOST = "lost"
    # All callers that had entered it have ended.
    ORPHANED = "orphaned"
    # The process has ended, or ``shutdown()`` was called.
    EXIT = "exit"
    # Its handover was interrupted, and no process will receive the text.
    RECALLED = "recalled"


class Effect(enum.Flag):
    """What the caller of an event does after it, in this order."""

    NOTHING = 0
    # Nothing was left yet. Ask the backend whether the key is still held, and leave
    # again with ``verified``.
    VERIFY = enum.auto()
    # Send the one release of this hold.
    RELEASE = enum.auto()
    # Log the loss, call ``on_lost``, and send the signal.
    REPORT = enum.auto()
    # Raise LockLost, because the work of this caller was perhaps not exclusive.
    LOST = enum.auto()
    # Raise RuntimeError, because only a block that uses the hold may leave it.
    REFUSED = enum.auto()


class Transaction(Protocol):
    """An open transaction, or one that has ended."""

    @property
    def stands(self) -> bool: ...


class State(NamedTuple):
    """All that is known of a hold's life. The next state replaces it."""

    phase: Phase
    # The open entries, newest last, and those among them that a ``with`` block uses.
    entries: tuple[Entry, ...]
    blocks: tuple[Entry, ...] = ()
    # Those that were added for a caller that has not received the hold yet.
    arriving: tuple[Entry, ...] = ()
    # Transactions of ``hold.atomic()``, which keep the key whatever the clocks say.
    pins: tuple[Transaction, ...] = ()
    # How many of these transactions have begun so far.
    guards: int = 0
    # Transactions in which a lease was left, and at whose end it is released.
    marks: tuple[Transaction, ...] = ()
    # The identity of the call that has offered the hold to another process.
    offer: object = None
    # The last entry that was left, if a transaction has kept the key after it.
    left_by: Entry | None = None
    # The locks that learn of a loss: those of the entries that were open then, or that
    # of the last one that was left.
    locks: tuple[Any, ...] = ()
    # Whether an entry was left because its work has failed.
    failed: bool = False
    # Until when its lease lasts, and until when the key stays taken because of a
    # ``min_hold`` of an entry that was left, by the clock of this process.
    deadline: float = math.inf
    min_hold_until: float = 0.0
    reason: Reason | None = None
    # Why it was lost, for people.
    why: str = ""

    @property
    def is_lost(self) -> bool:
        """Return whether the hold was taken from its callers.

        The only entry of a hold that is passed on has offered it.
        """
        return self.reason not in (None, Reason.RELEASED, Reason.DETACHED)

    @property
    def is_kept(self) -> bool:
        """Return whether an open transaction keeps the key."""
        if not (self.pins or self.marks):
            # Usually there are none, and this is the only cost.
            return False
        return bool(_standing(self.pins) or _standing(self.marks))

    @property
    def is_pinned(self) -> bool:
        """Return whether an open transaction of ``hold.atomic()`` keeps the key."""
        return bool(self.pins and _standing(self.pins))


Next = tuple[State, Effect]


def event(
    rule: Callable[Concatenate[Life, State, P], Next],
) -> Callable[Concatenate[Life, P], Effect]:
    """Make a rule an event of ``Life``: one critical section.

    The rule receives the state as ``old``. The event replaces it by the next state, and
    returns what its caller does afterwards, outside of the mutex.
    """

    @wraps(rule)
    def apply(self: Life, /, *args: P.args, **kwargs: P.kwargs) -> Effect:
        with self._mutex:
            while True:
                old = self.state
                new, effect = rule(self, old, *args, **kwargs)
                if self.state is not old:
                    # A signal handler of this thread has changed it meanwhile.
                    continue
                # No call lies between the comparison and this assignment, so no
                # handler can strike there.
                self.state = new
                return effect

    return apply


class Life:
    """The life of one hold, from its grant to its end. Any thread may call it.

    The mutex is a leaf: nothing is called under it but the properties of transactions
    and the rules of the lease, which do no I/O. It is reentrant, because a signal
    handler or a finalizer may strike within a section of its own thread. Then the
    section of the handler comes first, and the interrupted one decides again.
    """

    def __init__(
        self, entry: Entry, *, block: bool = False, deadline: float = math.inf
    ) -> None:
        self._mutex = new_mutex()
        blocks = (entry,) if block else ()
        # Only events write it. Reading it is atomic.
        self.state = State(Phase.HELD, (entry,), blocks, deadline=deadline)

    def replace_mutex(self) -> None:
        """Make a new mutex in a forked child. A thread of the parent may have it."""
        self._mutex = new_mutex()

    @event
    def enter(self, old: State, entry: Entry, *, block: bool = False) -> Next:
        """Add an entry, or return LOST if the caller makes a claim instead.

        The marks stay, because another thread may be in their transactions. Until
        ``receive()``, only its own caller leaves the entry.
        """
        if old.phase not in (Phase.HELD, Phase.LEFT):
            return old, Effect.LOST
        return old._replace(
            phase=Phase.HELD,
            entries=(*old.entries, entry),
            left_by=None,
            blocks=(*old.blocks, entry) if block else old.blocks,
            arriving=(*old.arriving, entry),
        ), Effect.NOTHING

    @event
    def receive(self, old: State, entry: Entry) -> Next:
        """Let the caller of an entry have the hold, which was verified."""
        arriving = _without(old.arriving, (entry,))
        return old._replace(arriving=arriving), Effect.NOTHING

    @event
    def begin_block(
        self,
        old: State,
        new_entry: Entry,
        ended: Collection[object] = (),
        preferred: Entry | None = None,
    ) -> Next:
        """Choose the entry that a ``with hold`` block uses, or return LOST.

        It is ``preferred``, or the newest entry, among those of the same caller that no
        block uses yet: ``new_entry.used``. Members of several keys come last. Another
        thread uses its new entry, in the place of one that a caller in ``ended`` has
        left behind. So neither frees the key under the other. LOST means that the hold
        has ended, or that a block uses each entry of this caller.
        """
        new_entry.used = None
        if old.phase is not Phase.HELD:
            return old, Effect.LOST
        mine = [new_entry.caller]
        free = _without(old.entries, (*old.blocks, *old.arriving))
        new = old
        if own := _of_callers(free, mine):
            entry = preferred if preferred in own else (_alone(own) or own)[-1]
            new_entry.used = entry
        elif _of_callers(old.entries, mine):
            return old, Effect.LOST
        else:
            entry = new_entry
            if behind := _of_callers(free, ended)[-1:]:
                new = old._replace(entries=_without(old.entries, behind))
                entry.lock = behind[0].lock
                entry.min_hold_until = behind[0].min_hold_until
            new = new._replace(entries=(*new.entries, entry))
        return new._replace(blocks=(*new.blocks, entry)), Effect.NOTHING

    @event
    def undo_block(self, old: State, entry: Entry) -> Next:
        """Undo ``begin_block()`` if the block did not begin. The entry stays open."""
        return old._replace(blocks=_without(old.blocks, [entry])), Effect.NOTHING

    @event
    def leave(
        self,
        old: State,
        entry: Entry,
        within: Sequence[Transaction] = (),
        *,
        failed: bool = False,
        verified: bool = False,
        by: object = None,
    ) -> Next:
        """Leave an entry. To leave it again does nothing.

        ``by`` is another caller that leaves it. It leaves no entry that a block uses.

        ``within`` are the transactions of the leaving thread that keep the key until
        they end. If the key stays, the first call returns VERIFY. The entry is open
        during that request, so no other caller releases the key, and a key that is gone
        is a loss. A leave that releases the key needs no such request, because the
        reply to the release says the same.
        """
        if by not in (None, entry.caller) and entry in old.blocks:
            return old, Effect.REFUSED
        return _leave(old, entry, within, failed=failed, verified=verified)

    @event
    def leave_one(
        self,
        old: State,
        caller: object,
        within: Sequence[Transaction] = (),
        *,
        failed: bool = False,
        verified: bool = False,
    ) -> Next:
        """Leave the newest entry of a caller, or the oldest one that no block uses.

        Entries that no block uses come first, also among the caller's own ones, and
        members of several keys come last, because their own hold leaves them. A
        thread may release the hold that another thread has acquired, but not from under
        a block. Then the effect is REFUSED.
        """
        received = _without(old.entries, old.arriving)
        free = _without(received, old.blocks)
        # Its own block ends early only if the caller has no other entry. A member
        # of several keys is left only if there is no other entry.
        own, mine = _of_callers(free, (caller,)), _of_callers(received, (caller,))
        if mine:
            entry = (_alone(own) or _alone(mine) or own or mine)[-1]
        elif free:
            entry = (_alone(free) or free)[0]
        else:
            return old, Effect.REFUSED if old.entries else Effect.NOTHING
        return _leave(old, entry, within, failed=failed, verified=verified)

    @event
    def pin(self, old: State, transaction: Transaction) -> Next:
        """Let a transaction keep the key from now on, or return LOST."""
        if old.phase not in (Phase.HELD, Phase.LEFT):
            return old, Effect.LOST
        pins = (*_standing(old.pins), transaction)
        return old._replace(pins=pins, guards=old.guards + 1), Effect.NOTHING

    @event
    def unpin(self, old: State, transaction: Transaction | None = None) -> Next:
        """Forget the pins that do not stand, and one whose request has failed.

        The thread of a transaction calls it, because it alone knows of a connection
        that was lost.
        """
        pins = list(_standing(old.pins))
        if transaction in pins:
            pins.remove(transaction)
        return old._replace(pins=tuple(pins)), Effect.NOTHING

    @event
    def settle(self, old: State) -> Next:
        """End a hold that was left, if no transaction keeps it any more.

        The end of each transaction calls it, and so does the timer, since a rollback
        calls nothing.
        """
        return _settled(old) if old.phase is Phase.LEFT else (old, Effect.NOTHING)

    @event
    def set_deadline(self, old: State, rule_of_lease: Callable[[float], float]) -> Next:
        """Replace the deadline of the lease by what a rule makes of it."""
        return old._replace(deadline=rule_of_lease(old.deadline)), Effect.NOTHING

    @event
    def expire(self, old: State, why: str, is_due: Callable[[], bool]) -> Next:
        """End a hold whose lease has run out, unless a transaction keeps the key.

        ``is_due()`` looks at the deadline in the same section. So a renewal comes
        before the look, or after the end.
        """
        if old.phase is not Phase.ENDED and (_standing(old.pins) or not is_due()):
            return old, Effect.NOTHING
        return _lose(old, why)

    @event
    def lose(self, old: State, why: str) -> Next:
        """End a hold because the backend has replied that the key is not held.

        No pin is an objection: its transaction has not locked the row yet, and will
        find the same. Return LOST also if the hold was lost before.
        """
        return _lose(old, why)

    @event
    def not_released(self, old: State, why: str) -> Next:
        """Record the reply to the release: the key was already gone."""
        if old.reason is not Reason.RELEASED:
            return old, Effect.NOTHING
        new = old._replace(reason=Reason.LOST, why=why)
        return new, Effect.REPORT | Effect.LOST

    @event
    def orphan(self, old: State, ended: Collection[object], why: str = "") -> Next:
        """End a hold if the callers of all its entries are in ``ended``.

        It stays while a transaction keeps it, whose thread is at work.
        """
        if (
            old.phase is not Phase.HELD
            or old.is_kept
            or len(_of_callers(old.entries, ended)) < len(old.entries)
        ):
            return old, Effect.NOTHING
        return _end(old, Reason.ORPHANED, why), Effect.RELEASE | Effect.REPORT

    @event
    def exit(self, old: State, why: str = "") -> Next:
        """End a hold because its process ends. An open block gets LockLost at its end.

        A hold that a transaction keeps stays with it. The process ends both.
        """
        if old.phase is Phase.LEFT:
            return _settled(old)
        if old.phase is Phase.ENDED or old.is_kept:
            return old, Effect.NOTHING
        report = Effect.REPORT if old.blocks else Effect.NOTHING
        return _end(old, Reason.EXIT, why), Effect.RELEASE | report

    # To pass a hold to another process.

    @event
    def offer(self, old: State, callers: Collection[object], offer: object) -> Next:
        """Begin to pass the hold to another process, or return LOST.

        It needs one entry, and no transaction that keeps the key. If a block uses the
        entry, it is a block of one of these callers. ``recall()`` names the offer.
        """
        if (
            old.phase is not Phase.HELD
            or len(old.entries) != 1
            or (old.blocks and old.blocks[0].caller not in callers)
            or old.is_kept
        ):
            return old, Effect.LOST
        return old._replace(phase=Phase.DETACHING, offer=offer), Effect.NOTHING

    @event
    def detach(self, old: State) -> Next:
        """End the hold, because its lease now waits for the other process.

        Return LOST if it has ended meanwhile, or was left in a transaction, before
        whose end no other process may begin. Then the text is worth nothing.
        """
        if old.phase is not Phase.DETACHING or old.is_kept:
            return old, Effect.LOST
        return _end(old, Reason.DETACHED), Effect.NOTHING

    @event
    def withdraw(self, old: State) -> Next:
        """Continue after a request that could not pass the hold on.

        If its entry was left meanwhile, this is its last leave.
        """
        if old.phase is not Phase.DETACHING:
            return old, Effect.NOTHING
        held = old._replace(phase=Phase.HELD, offer=None)
        return (held, Effect.NOTHING) if old.entries else _settled(held)

    @event
    def recall(self, old: State, why: str, offer: object) -> Next:
        """End a hold that is being detached, or was, because the text is lost.

        A block of its entry may go on after the interrupt, and learns of the loss. The
        text of another offer stays valid.
        """
        if old.offer is not offer:
            return old, Effect.NOTHING
        if old.phase is not Phase.DETACHING and old.reason is not Reason.DETACHED:
            return old, Effect.NOTHING
        if not old.entries:
            return _settled(old)
        return _end(old, Reason.RECALLED, why), Effect.RELEASE | Effect.REPORT


# The rules that several events share.


def _leave(
    old: State,
    entry: Entry,
    within: Sequence[Transaction],
    *,
    failed: bool,
    verified: bool,
) -> Next:
    if entry not in old.entries:
        return old, Effect.NOTHING
    failed = failed or old.failed
    until = max(old.min_hold_until, entry.min_hold_until)
    if old.phase is Phase.ENDED:
        rest = _without(old.entries, (entry,))
        new = old._replace(entries=rest, failed=failed, min_hold_until=until)
        return new, _effect_after_end(new)
    is_last = len(old.entries) == 1
    marks = old.marks
    if within or marks:
        # Kept also if entries remain: the last one to leave may be in no transaction.
        # Each once, since a transaction may have any number of blocks.
        marks = _standing(dict.fromkeys((*marks, *within)))
    is_kept = bool(marks or (old.pins and _standing(old.pins)))
    phase: Phase = old.phase
    if (is_kept or not is_last) and not (verified or phase is Phase.DETACHING):
        return old, Effect.VERIFY
    reason, effect = old.reason, Effect.NOTHING
    # The last entry decides, or else detach() and withdraw().
    if is_last and phase is not Phase.DETACHING:
        phase = Phase.LEFT
        if not is_kept:
            phase, reason, effect = Phase.ENDED, Reason.RELEASED, Effect.RELEASE
    return old._replace(
        phase=phase,
        entries=() if is_last else _without(old.entries, (entry,)),
        blocks=() if is_last else _without(old.blocks, (entry,)),
        arriving=() if is_last else _without(old.arriving, (entry,)),
        pins=old.pins if is_kept else (),
        marks=marks,
        left_by=entry if is_kept else None,
        locks=(entry.lock,),
        failed=failed,
        min_hold_until=until,
        reason=reason,
    ), effect


def _effect_after_end(new: State) -> Effect:
    """Return what the leave of an entry means after the end of its hold."""
    if not new.is_lost:
        return Effect.NOTHING
    if new.reason is Reason.LOST and not new.entries:
        # No caller has released the row, which is perhaps still there.
        return Effect.LOST | Effect.RELEASE
    return Effect.LOST


def _settled(old: State) -> Next:
    """Return the state of a hold without entries, kept by a transaction or ended."""
    if old.is_kept:
        return old._replace(phase=Phase.LEFT), Effect.NOTHING
    return _end(old, Reason.RELEASED), Effect.RELEASE


def _lose(old: State, why: str) -> Next:
    if old.phase is Phase.ENDED:
        return old, Effect.LOST if old.is_lost else Effect.NOTHING
    effect = Effect.REPORT | Effect.LOST
    if not old.entries:
        # No entry is left to release the row, which is perhaps still there.
        effect |= Effect.RELEASE
    return _end(old, Reason.LOST, why), effect


def _end(old: State, reason: Reason, why: str = "") -> State:
    return old._replace(
        phase=Phase.ENDED,
        pins=(),
        marks=(),
        locks=tuple([entry.lock for entry in old.entries]) or old.locks,
        failed=old.failed or reason in (Reason.ORPHANED, Reason.EXIT),
        reason=reason,
        why=why,
    )


def _standing(transactions: Iterable[Transaction]) -> tuple[Transaction, ...]:
    return tuple([one for one in transactions if one.stands])


def _without(entries: Iterable[Entry], others: Collection[Any]) -> tuple[Entry, ...]:
    return tuple([entry for entry in entries if entry not in others])


def _alone(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Return the entries that are no members of a hold of several keys.

    That hold leaves its own entries itself.
    """
    return tuple([entry for entry in entries if not entry.is_member])


def _of_callers(
    entries: Iterable[Entry], callers: Collection[object]
) -> tuple[Entry, ...]:
    return tuple([entry for entry in entries if entry.caller in callers])
