"""Holds: the objects that ``with db_lock(…) as hold`` and ``acquire()`` return."""

from __future__ import annotations

import inspect
import sys
from asyncio import _get_running_loop
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import chain
from operator import attrgetter
from types import FrameType
from typing import Any, ParamSpec, Self, TypeVar, cast

from django.core.exceptions import SynchronousOnlyOperation

from dlocks.backends.base import Backend
from dlocks.core import callers, confirm
from dlocks.core.callers import Block, Blocks, Caller, current_caller, frame_id_of
from dlocks.core.detach import detach, recall
from dlocks.core.entry import Entry
from dlocks.core.explain import block_error
from dlocks.core.guard import guarded
from dlocks.core.holding import Holding
from dlocks.core.policy import LockPolicy
from dlocks.core.settlement import transactions_of
from dlocks.core.together import leave_together
from dlocks.exceptions import LockError
from dlocks.runtime import clock
from dlocks.runtime.coroutines import (
    make_undoable,
    refuse_in_a_coroutine,
    run_in_sync_thread,
)
from dlocks.runtime.keeper import OUTSIDE_TIMEOUT, keeper
from dlocks.runtime.requests import is_nested
from dlocks.runtime.threads import this_thread
from dlocks.values import Claim, Duration

P = ParamSpec("P")
R = TypeVar("R")

# Refused before anything happens, so that the asynchronous method can do it.
ensure_sync = partial(
    refuse_in_a_coroutine,
    "'async with', or the method with an 'a', as in 'await hold.arelease()'",
)


class Hold:
    """One holding of a key, or of several, which ends by ``release()`` or is lost.

    Any thread with a reference to it may release it, unless only blocks of other
    callers use it. A ``with hold`` block in another thread or task is a use of its own,
    so neither frees the key under the other. A hold is lost, and its key released, soon
    after the callers of all its uses have ended. ``token`` is the fencing token, larger
    than that of every earlier hold of the key. ``owner`` is the secret identity, never
    to be shown whole. ``waited`` is the seconds that the caller waited, 0 if the key
    was free. ``takeover`` says that the last holder never released the key. It may be
    false all the same for a key from the queue.

    A hold of several keys has one of each key in ``holds``, and is held while all of
    them are. Each ``acquire()`` of several keys returns a new one, to be released once.
    ``tokens`` has the fencing token of each key, for what that key guards, and
    ``token`` is the largest. It has no single ``owner``.
    """

    def __init__(
        self, lock: LockPolicy, parts: Sequence[Holding], entries: Sequence[Entry] = ()
    ) -> None:
        first = parts[0]
        # The holding of each key, and of several keys the entries to leave.
        self._parts = tuple(parts)
        self._entries = tuple(entries)
        # Kept here, because a holding forgets the object for its callers at its end.
        self._holds: tuple[Hold, ...] = ()
        if entries:
            self._holds = tuple(part.face for part in parts)
        self.lock = lock
        self.backend: Backend = first.backend
        self.claim: Claim = first.claim
        self.scope: str = first.scope
        self.token: int = max(map(attrgetter("token"), parts))
        self.takeover: bool = any(map(attrgetter("takeover"), parts))
        self.waited: float = max(map(attrgetter("waited"), parts))

    def __repr__(self) -> str:
        keys = ", ".join(map(repr, self.keys))
        token = f" token={self.token}" if len(self.keys) == 1 else ""
        return (
            f"<{type(self).__name__} {keys}{token} count={self.count}"
            f" {'held' if self.held else 'ended or lost'}>"
        )

    @property
    def key(self) -> str:
        return self.lock.key

    @property
    def keys(self) -> tuple[str, ...]:
        return self.lock.keys

    @property
    def tokens(self) -> dict[str, int]:
        """Return the fencing tokens by key.

        There is one, unless several keys are held.
        """
        return {part.lock.key: part.token for part in self._parts}

    @property
    def holds(self) -> tuple[Hold, ...]:
        """Return the hold of each key, in the order of the keys."""
        return self._holds or (self,)

    @property
    def owner(self) -> str:
        if self._entries:
            raise AttributeError(
                "A hold of several keys has no single owner. Each hold in 'holds' has"
                " one."
            )
        return self.claim.owner

    @property
    def count(self) -> int:
        """Return how often the hold was entered and not left."""
        return min(part.count for part in self._parts)

    @property
    def held(self) -> bool:
        """Return whether each key is certainly held. This does no I/O.

        False may mean that the state is unknown.
        """
        if self._entries and not self._is_open:
            return False
        return all(part.held for part in self._parts)

    @property
    def remaining(self) -> float:
        """Return the seconds for which the key is held without a renewal.

        This is infinite in a transaction.
        """
        if not self.held:
            return 0.0
        return max(0.0, min(part.lease.deadline for part in self._parts) - clock.now())

    @property
    def age(self) -> float:
        """Return the seconds since the grant."""
        return max(part.lease.age for part in self._parts)

    def check(self) -> None:
        """Check with the backend that each key is held, or raise LockLost."""
        ensure_sync()
        first, *others = self._parts
        if others and self.held and self._is_alike:
            claims = [part.claim for part in self._parts]
            if first.ask(self.backend.verify, claims) and self.held:
                return
        for part in self._parts:
            confirm.check(part)

    def renew(
        self, *, ttl: Duration | None = None, max_hold: Duration | None = None
    ) -> None:
        """Extend the lease to its ttl from now, or raise LockLost.

        With ``ttl``, the lease lasts for that long from now. So does each later
        renewal, in place of the ttl that the hold was acquired with. A lease never
        exceeds ``max_hold``, and a new one counts from now. In a transaction there is
        no lease, so this only checks the hold.
        """
        ensure_sync()
        terms = confirm.checked_terms(ttl, max_hold, self._parts)
        is_pinned = any(part.life.state.is_pinned for part in self._parts)
        if self.held and self._is_alike and self.scope == "lease" and not is_pinned:
            confirm.renew_together(self._parts, terms)
        else:
            for part in self._parts:
                confirm.renew(part, terms)

    def release(self, *, failed: bool = False) -> None:
        """Leave the hold once. The last entry to be left releases the key.

        This leaves the newest entry of this thread or task, first one that no block
        uses. If it has none, this leaves the oldest one of another caller that no block
        uses. Releasing again does nothing, nor does releasing after the end of the
        hold's own transaction. ``failed`` sets the status of the row to F instead of S,
        for people who read it. Raise LockLost if the hold was lost, because its work
        was perhaps not exclusive. Raise RuntimeError if only blocks of other callers
        use the hold.

        Of several keys, this leaves the entries of this acquisition. Raise RuntimeError
        if a block of another caller uses them.
        """
        ensure_sync()
        self._release(current_caller(), failed=failed)

    def queue_length(self) -> int:
        """Return the number of callers that are queued for the key now.

        This asks the backend. It is 0 where there is no queue.
        """
        backend = self.backend
        return sum(
            callers.read_outside(
                partial(backend.waiting, part.claim.key), backend, OUTSIDE_TIMEOUT
            )
            for part in self._parts
        )

    def atomic(
        self, *, using: str | None = None, **atomic: Any
    ) -> AbstractContextManager[None]:
        """Open a transaction that commits while the key is held, or not at all.

            with hold.atomic():
                ...

        However long the process is paused, no other caller acquires the key before the
        transaction ends. If the hold is lost already, raise LockLost and write nothing.
        ``using`` may be another alias of the lock's database. Other arguments are those
        of Django's ``atomic()``.
        """
        return guarded(self._parts, using, atomic)

    async def aatomic(
        self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call a function in ``hold.atomic()``, in Django's sync thread.

        Return its result.
        """

        def call() -> R:
            with self.atomic():
                result = function(*args, **kwargs)
                if inspect.isawaitable(result):
                    if inspect.iscoroutine(result):
                        result.close()
                    raise TypeError(
                        "aatomic() calls a synchronous function in Django's sync"
                        f" thread, but {function!r} returned an awaitable. Pass its"
                        " synchronous version."
                    )
                return result

        return await run_in_sync_thread(call, in_transaction_only=True)

    def detach(self, *, within: Duration | None = None) -> str:
        """Detach the hold, and return the text by which a process resumes it.

        See ``dlocks.core.detach``.
        """
        ensure_sync()
        return detach(self._refuse_several(), within, object())

    # The same methods for coroutines.

    async def aqueue_length(self) -> int:
        return await self._there(self.queue_length)

    async def acheck(self) -> None:
        await self._there(self.check)

    async def arenew(
        self, *, ttl: Duration | None = None, max_hold: Duration | None = None
    ) -> None:
        await self._there(partial(self.renew, ttl=ttl, max_hold=max_hold))

    async def adetach(self, *, within: Duration | None = None) -> str:
        # If it is cancelled, no process will ever receive the text.
        offer = object()
        request = partial(detach, self._refuse_several(), within, offer)
        undo = partial(recall, self._parts[0], offer, self)
        undo_later = partial(keeper.post, undo, self.backend)
        return await make_undoable(request, undo, undo_later)

    async def arelease(self, *, failed: bool = False) -> None:
        # The task is the caller, and not the thread in which this is done.
        leave = partial(self._release, current_caller(), failed=failed)
        await self._there(leave)

    # Blocks.

    def __enter__(self) -> Self:
        ensure_sync()
        for part in self._parts:
            part.refuse_other_thread()
        self._begin_block(sys._getframe(1))
        return self

    def __exit__(self, kind: object, error: BaseException | None, *exc: object) -> None:
        block = None
        try:
            ensure_sync()
            block = self._blocks.to_end(sys._getframe(1), self.key)
            leave_block(self._blocks, block, error)
        except BaseException as trouble:
            leave_interrupted(self._blocks, block, sys._getframe(1), trouble)
            raise

    async def __aenter__(self) -> Self:
        self._begin_block(sys._getframe().f_back)
        return self

    async def __aexit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        block = self._blocks.to_end(sys._getframe().f_back, self.key)
        await aleave_block(self._blocks, block, error)

    # Internal methods.

    def response_entry(self) -> Entry:
        """Return an entry for a response that may outlive this caller."""
        return Entry(callers.PendingResponse(), self.lock, self._parts[0])

    @property
    def has_failed(self) -> bool:
        """Return whether its work has failed, as far as its callers have said."""
        return any(part.life.state.failed for part in self._parts)

    def allow_long(self) -> None:
        """Do not warn of a long hold."""
        for part in self._parts:
            part.watch.is_slow = True

    @property
    def _blocks(self) -> Blocks:
        """Return the open ``with hold`` blocks."""
        # Usually there are none. Several threads may begin the first one.
        return cast("Blocks", vars(self).setdefault("_open_blocks", Blocks()))

    @property
    def _is_open(self) -> bool:
        """Return whether an entry of this acquisition, or of a block, is open."""
        blocks = [block.entries for block in list(self._blocks.open)]
        entries = chain(self._entries, *blocks)
        return any(entry.hold.has_open(entry) for entry in entries)

    @property
    def _is_alike(self) -> bool:
        return len({part.scope for part in self._parts}) == 1

    def _release(self, caller: Caller, *, failed: bool = False) -> None:
        if self._entries:
            leave_together(self._entries, failed=failed, at_block_end=False, by=caller)
        else:
            self._parts[0].leave_one(caller, failed=failed)

    def _refuse_several(self) -> Holding:
        """Return the holding of the only key, or raise RuntimeError."""
        if self._entries:
            raise RuntimeError(
                "A hold of several keys cannot be handed over. Detach each hold in"
                " 'holds' instead."
            )
        return self._parts[0]

    def _begin_block(self, frame: FrameType | None) -> None:
        caller = current_caller()
        if hasattr(caller, "get_loop"):
            callers.record_context(caller)
        new_entries: list[Entry] = []
        entries: list[Entry] = []
        block = None
        preferred = self._entries or (None,)
        try:
            for part, own in zip(self._parts, preferred, strict=True):
                new_entry = Entry(caller, own.lock if own else self.lock, part)
                # Before its use, so that an interrupt leaves each entry.
                new_entries.append(new_entry)
                entry = part.begin_block(new_entry, own)
                if entry is None:
                    raise block_error(part)
                entries.append(entry)
            block = Block(caller, frame_id_of(frame), self, tuple(entries))
            self._blocks.open.append(block)
        except BaseException:
            if block is not None:
                self._blocks.remove(block)
            for new_entry in new_entries:
                new_entry.hold.undo_block(new_entry)
            raise

    async def _there(self, function: Callable[[], R]) -> R:
        return await run_in_sync_thread(
            function, in_transaction_only=self.scope == "transaction"
        )


def leave_interrupted(
    blocks: Blocks, block: Block | None, frame: FrameType | None, error: BaseException
) -> None:
    """Leave a block whose ``__exit__()`` an interrupt has ended.

    To leave an entry twice does nothing.
    """
    if isinstance(error, LockError):
        return
    with suppress(LockError, RuntimeError):
        block = block or blocks.to_end(frame, "")
        refused = isinstance(error, SynchronousOnlyOperation)
        if not refused or block.hold.scope == "transaction":
            leave_block(blocks, block, error)
            return
        # The garbage collector has closed a generator in the thread of an event loop,
        # where Django refuses requests.
        blocks.remove(block)
        for entry in block.entries:
            hold: Holding = entry.hold
            keeper.post(partial(hold.cancel_entry, entry), hold.backend)
            # Perhaps the entry was left already, and its release was refused.
            keeper.post(partial(hold.complete_leave, None), hold.backend)


def leave_block(blocks: Blocks, block: Block, error: BaseException | None) -> None:
    """Leave the entries of a block, which ends.

    If the block itself failed, a failed release only adds a note to its error.

    A finalizer may end it in the middle of a request of this thread, as the block of a
    generator, or in the keeper's thread, which sends no requests. Then a worker sends
    the release.
    """
    failed = error is not None
    try:
        if (is_nested() or this_thread.is_keepers) and block.hold.scope == "lease":
            for entry in block.entries:
                _leave_later(entry, failed=failed)
            return
        leave_entries(block.entries, failed=failed, block=True)
    except LockError as trouble:
        if error is None:
            raise
        error.add_note(f"{type(trouble).__name__}: {trouble}")
    finally:
        blocks.remove(block)


def _leave_later(entry: Entry, *, failed: bool) -> None:
    """Leave an entry without a request, which the keeper sends if it is due."""
    hold: Holding = entry.hold
    within = transactions_of(hold)
    try:
        effect = hold.life.leave(entry, within, failed=failed, verified=True)
        hold.forget_entry(entry)
        keeper.post(partial(hold.perform_quietly, effect), hold.backend)
    except BaseException:
        # An interrupted leave must not leave the key acquired.
        keeper.post(partial(hold.complete_leave, None), hold.backend)
        raise


async def aleave_block(
    blocks: Blocks, block: Block, error: BaseException | None
) -> None:
    """Leave the entries of a block of a coroutine."""
    leave, hold = partial(leave_block, blocks, block, error), block.hold
    leave_later = partial(keeper.post, leave, hold.backend)
    if isinstance(error, GeneratorExit) and _get_running_loop() is None:
        # The coroutine is closed outside of its loop. Nothing can be awaited.
        leave_later()
        return
    # To leave an entry twice does nothing.
    await make_undoable(
        leave, leave, leave_later, in_transaction=hold.scope == "transaction"
    )


def leave_entries(entries: Sequence[Entry], *, failed: bool, block: bool) -> None:
    """Leave the entries of one acquisition. ``block`` says that a block ends."""
    if len(entries) == 1:
        entries[0].hold.leave(entries[0], failed=failed, at_block_end=block)
    else:
        leave_together(entries, failed=failed, at_block_end=block)
