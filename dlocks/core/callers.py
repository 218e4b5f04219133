"""The callers of this process, which are threads or tasks, and what each of them holds.

It earns promise 9 of docs/safety.md: ``lock.release()``, ``lock.held()`` and the end of
a block mean what their own caller has entered, and never what another one has.

An entry stays here until it is left. If its hold has ended, it stays until its caller
acquires the next lock, or has ended.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from asyncio import _get_running_loop
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from inspect import CO_ASYNC_GENERATOR, CO_GENERATOR
from itertools import count
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

from dlocks.backends.base import ANY_LEASE, Backend
from dlocks.core.entry import Entry
from dlocks.runtime.connected import connection_of
from dlocks.runtime.greenlets import is_alive
from dlocks.runtime.keeper import keeper
from dlocks.runtime.process import in_child
from dlocks.runtime.requests import refuse_nested, request
from dlocks.runtime.threads import new_mutex
from dlocks.transactions import TransactionMarker
from dlocks.values import HeldKey

T = TypeVar("T")

Caller = threading.Thread | asyncio.Task[Any]

# The identity of a backend, a key, and whether the hold is shared.
Place = tuple[str, str, bool]

# The smallest number of entries of one caller at which ended ones are forgotten.
FEW = 16
# New callers between two searches for callers that have ended.
CALLERS_PER_CLEANUP = 200


def current_caller() -> Caller:
    """Return the running asyncio task, or else the thread.

    Tasks that call ``sync_to_async()`` share its thread, so each of them enters what
    another one holds. A ContextVar would tell them apart. It would also forbid a view
    what a receiver of ``request_started`` has acquired, and a task what it acquired by
    ``asyncio.gather()``, ``wait_for()`` or ``to_thread()``: they change only a copy of
    its context. So the pages on coroutines and Channels name ``reentrant=False``.
    """
    # Usually no loop runs, and then current_task() would raise an error.
    loop = _get_running_loop()
    task = None if loop is None else asyncio.current_task(loop)
    return task or threading.current_thread()


class PendingResponse:
    """A caller that is no thread or task: a response that is still being produced.

    The end of the response leaves its entry, in any thread.
    """


class Acquired(NamedTuple):
    """What ``acquire()`` has returned, until ``lock.release()`` leaves it."""

    # The order of acquisition.
    number: int
    lock: Any
    hold: Any
    entries: tuple[Entry, ...]

    @property
    def is_open(self) -> bool:
        return any(entry.hold.has_open(entry) for entry in self.entries)

    @property
    def is_in_block(self) -> bool:
        entry = self.entries[0]
        return entry in entry.hold.life.state.blocks


@dataclass(slots=True)
class OfCaller:
    """The entries of one caller."""

    # Newest last.
    entries: dict[Place, list[Entry]] = field(default_factory=dict)
    # How many were added since the last search for ended holds, and at which number the
    # next one comes.
    added: int = 0
    clean_at: int = FEW


# The one mutex of this module. It is a leaf, and a signal handler may acquire a lock.
# At its release, the handler forgets a list that is still empty here.
_mutex = new_mutex()
_by_caller: dict[Any, OfCaller] = {}
_numbers = count(1)
_clean_at = CALLERS_PER_CLEANUP


def reset() -> None:
    """Forget all callers, in a forked child or between two tests."""
    global _mutex
    # A thread of the parent may have held it, and the mutexes of the holds.
    _mutex = new_mutex()
    for own in list(_by_caller.values()):
        for entry in _entries_of(own):
            entry.hold.life.replace_mutex()
    _by_caller.clear()


in_child(reset)


def _entries_of(own: OfCaller) -> list[Entry]:
    return [entry for entries in own.entries.values() for entry in entries]


def add(entry: Entry) -> None:
    """Record the use of a hold, which stays alive meanwhile."""
    caller, place = entry.caller, entry.hold.place
    with _mutex:
        while True:
            own = _by_caller.get(caller) or _add_caller(caller)
            entries = own.entries.setdefault(place, [])
            _forget_ended(entries)
            entries.append(entry)
            now = _by_caller.get(caller)
            if now is None or entry not in now.entries.get(place, ()):
                continue
            own.added += 1
            if own.added > own.clean_at:
                _clean_up(own)
            return


def remove(entry: Entry) -> None:
    """Forget an entry that was left, and what ``acquire()`` has returned with it."""
    # No cycle remains.
    entry.acquired = None
    with _mutex:
        own = _by_caller.get(entry.caller)
        if own is None:
            return
        place = entry.hold.place
        entries = own.entries.get(place, [])
        if entry in entries:
            entries.remove(entry)
        # No call lies between a look and what follows, so no handler can strike there.
        if place in own.entries and not own.entries[place]:
            own.entries.pop(place, None)
        if entry.caller in _by_caller and not _by_caller[entry.caller].entries:
            _by_caller.pop(entry.caller, None)


def _add_caller(caller: Caller) -> OfCaller:
    global _clean_at
    if len(_by_caller) >= _clean_at:
        for other, own in list(_by_caller.items()):
            if is_done(other):
                _clean_up(own)
                if not own.entries:
                    _by_caller.pop(other, None)
        _clean_at = len(_by_caller) + CALLERS_PER_CLEANUP
    return _by_caller.setdefault(caller, OfCaller())


def _clean_up(own: OfCaller) -> None:
    """Forget the entries of a caller whose holds have ended.

    Their number can double before the next search, so this costs little.
    """
    for place, entries in list(own.entries.items()):
        _forget_ended(entries)
        if place in own.entries and not own.entries[place]:
            own.entries.pop(place, None)
    own.added, own.clean_at = 0, max(FEW, len(_entries_of(own)))


def _forget_ended(entries: list[Entry]) -> None:
    """Forget the entries of ended holds.

    They are removed one by one, because a signal handler may add others meanwhile.
    """
    for one in tuple(entries):
        if not one.hold.may_be_held and one in entries:
            entries.remove(one)


def _current(entries: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.hold.may_be_held]


def places_of(caller: Any) -> dict[Place, list[Entry]]:
    """Return the entries of a caller by place. They change as they are left."""
    own = _by_caller.get(caller)
    return {} if own is None else own.entries


def entries_at(caller: Any, place: Place) -> tuple[Entry, ...]:
    """Return the entries of a caller at a place, newest last."""
    # Without the mutex, because each change of a list is one step.
    return tuple(places_of(caller).get(place, ()))


def holds_any(caller: Any) -> bool:
    """Return whether a caller holds any lock."""
    with _mutex:
        own = _by_caller.get(caller)
        rest = [] if own is None else _current(_entries_of(own))
    return bool(rest)


def holds() -> list[Any]:
    """Return the holds that any caller has entered."""
    with _mutex:
        entries = list(map(_entries_of, _by_caller.values()))
    return [entry.hold for of_caller in entries for entry in of_caller]


def add_acquired(lock: Any, hold: Any, entries: tuple[Entry, ...]) -> None:
    """Record what ``acquire()`` returns, for ``lock.release()``."""
    acquired = Acquired(next(_numbers), lock, hold, entries)
    for entry in entries:
        entry.acquired = acquired


def last_acquired(lock: Any, caller: Any) -> Acquired | None:
    """Return what a caller acquired last by a lock and has not released, or None.

    What a ``with hold`` block uses comes last, since the block leaves it.

    If the caller has none, return that of a task of the same event loop that is done. A
    task that only acquires, as in ``asyncio.wait_for()``, is another caller.
    """
    found = _newest(lock, caller)
    if found is None and hasattr(caller, "get_loop"):
        loop = caller.get_loop()
        for other in reversed(list(_by_caller)):
            if hasattr(other, "get_loop") and other.get_loop() is loop and other.done():
                found = found or _newest(lock, other)
    return found


def _newest(lock: Any, caller: Any) -> Acquired | None:
    entries = [
        entry
        for one in lock._each
        for place in one._places_of(caller)
        for entry in entries_at(caller, place)
    ]
    # Each once, because the comparison of two locks on many keys takes long.
    by_number = {one.number: one for entry in entries if (one := entry.acquired)}
    ordered = [by_number[number] for number in sorted(by_number)]
    found = [one for one in ordered if one.lock == lock and one.is_open]
    free = [one for one in found if not one.is_in_block]
    return next(reversed(free or found), None)


def has_ended(caller: Any) -> bool:
    """Return whether a thread has ended, or the event loop of a task was closed.

    The main thread ends with the process. Exit handlers run in it, and other threads
    may still work, when its ``is_alive()`` returns False already.
    """
    # Some libraries replace Thread and Task, so isinstance() does not work.
    if hasattr(caller, "get_loop"):
        return bool(caller.get_loop().is_closed())
    if isinstance(caller, PendingResponse):
        return False
    return caller is not threading.main_thread() and not is_alive(caller)


def is_done(caller: Any) -> bool:
    """Return whether a caller has ended, or is a task that is done."""
    return has_ended(caller) or (hasattr(caller, "get_loop") and caller.done())


# Blocks: ``with lock`` and ``with hold``.

# The identity of the frame that has entered a block, and its code. A frame that has
# ended may share its identity with a later one.
FrameId = tuple[int, CodeType | None]


def frame_id_of(frame: FrameType | None) -> FrameId:
    return id(frame), None if frame is None else frame.f_code


class Block(NamedTuple):
    """An open block: who has entered it, where, and what it leaves at its end."""

    caller: Caller
    frame_id: FrameId
    hold: Any
    entries: tuple[Entry, ...]


class Blocks:
    """The open blocks of a lock or of a hold, which many callers may share."""

    __slots__ = ("open",)

    def __init__(self) -> None:
        # Oldest first. To append a block is atomic.
        self.open: list[Block] = []

    def remove(self, block: Block) -> None:
        with _mutex:
            if block in self.open:
                self.open.remove(block)

    def to_end(self, frame: FrameType | None, key: str) -> Block:
        """Return the block that ends in a frame, or raise RuntimeError.

        A ``with`` statement ends in the frame in which it began, newest first. Other
        code, such as an ExitStack, ends the newest block of the same caller, or of one
        that has ended, that no ``with`` statement can end. If it is not certain which
        block is meant, none of them ends.
        """
        caller, frame_id = current_caller(), (id(frame), frame and frame.f_code)
        # A copy, which is made at once.
        blocks = self.open[::-1]
        for block in blocks:
            # Usually it is the block that began last.
            if block.caller is caller and block.frame_id == frame_id:
                return block
        for block in blocks:
            if block.frame_id == frame_id:
                return block
        others = [block for block in blocks if not _ends_by_itself(block, frame)]
        for block in others:
            if block.caller is caller:
                return block
        for block in others:
            if is_done(block.caller):
                return block
        if len(blocks) == 1 or (
            blocks and all(block.caller is caller for block in blocks)
        ):
            return blocks[0]
        raise RuntimeError(
            f"The 'with' block of {key!r} must end in the thread or task in which it"
            " began. A generator, or another task, needs a 'with db_lock(…)' of its"
            " own."
        )


def _ends_by_itself(block: Block, frame: FrameType | None) -> bool:
    """Return whether a block was entered in a frame that may still end it.

    This is one of the frames that call this one, or that of a generator.
    """
    code = block.frame_id[1]
    if code is not None and code.co_flags & (CO_GENERATOR | CO_ASYNC_GENERATOR):
        return True
    while frame is not None and frame_id_of(frame) != block.frame_id:
        frame = frame.f_back
    return frame is not None


# The tasks of which this context is: the task itself, and those that have started it
# within a block. They are weak, because a context may outlive its tasks.
_tasks: ContextVar[frozenset[weakref.ref[Any]]] = ContextVar(
    "dlocks_tasks", default=frozenset()
)


def record_context(task: Any) -> None:
    """Record that this context, and those that are copied from it, are of a task."""
    running = [one for one in _tasks.get() if (other := one()) and not is_done(other)]
    _tasks.set(frozenset([*running, weakref.ref(task)]))


def acts_for(caller: Any) -> bool:
    """Return whether this is one of a caller's own calls, or that caller is done.

    The calls of a task run in any thread, as by ``sync_to_async()``, and in tasks that
    it starts, as by ``asyncio.wait_for()``. Both have a copy of its context.
    """
    if is_done(caller):
        return True
    return caller is threading.current_thread() or weakref.ref(caller) in _tasks.get()


# Requests of a caller, outside of its transaction and pool.


def holding_of(caller: Caller, backend: Backend) -> tuple[HeldKey, ...]:
    """Return what a caller holds in a backend, as others can see it."""
    held = [
        HeldKey(hold.claim.key, hold.claim.owner, hold.awaits_transactions)
        for hold in keeper.holds
        if caller in hold.callers
        and hold.backend.identity == backend.identity
        and not hold.is_over
    ]
    if backend.in_transaction():
        kept = TransactionMarker.keys_of(connection_of(backend.database))
        held += [
            HeldKey(key, "", kept=True)
            for identity, key in kept
            if identity == backend.identity
        ]
    return tuple(held)


def read_outside(function: Callable[[], T], backend: Backend, timeout: float) -> T:
    """Call a function that reads, outside of the caller's transaction and pool.

    It is called inside if no other session can see all of the keys.
    """
    if backend.reads_inside:
        return request(function)
    return run_outside(function, backend, timeout)


def run_outside(function: Callable[[], T], backend: Backend, timeout: float) -> T:
    """Call a function outside of the caller's transaction and pool."""
    is_inside = backend.in_transaction() and backend.refusal(ANY_LEASE) is None
    if is_inside or backend.connect_first is not None:
        refuse_nested()
        return keeper.run(partial(request, function), backend, timeout=timeout)
    return request(function)
