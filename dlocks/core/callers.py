"""The callers that acquire, which are threads or tasks, and the holds of each."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import tracemalloc
import weakref
from asyncio import _get_running_loop
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from inspect import CO_ASYNC_GENERATOR, CO_GENERATOR
from types import CodeType, FrameType
from typing import Any, TypeVar

from dlocks.backends.base import ANY_LEASE, Backend
from dlocks.runtime.connected import connection_of
from dlocks.runtime.greenlets import is_alive
from dlocks.runtime.keeper import keeper
from dlocks.runtime.process import in_child
from dlocks.runtime.requests import refuse_nested, request
from dlocks.transactions import TransactionMarker
from dlocks.values import HeldKey

T = TypeVar("T")

Caller = threading.Thread | asyncio.Task[Any]

# Calls of ``acquire()`` between two clean-ups.
CALLS_PER_CLEANUP = 1000

# Caller, backend, key, and whether the hold is shared.
EntryKey = tuple[Caller, str, str, bool]


def current_caller() -> Caller:
    """Return the running asyncio task, or else the thread."""
    # Usually no loop runs, and then current_task() would raise an error.
    loop = _get_running_loop()
    task = None if loop is None else asyncio.current_task(loop)
    return task or threading.current_thread()


# The holds by caller, for entering again. They are weak, so that a forgotten hold can
# end.
holds_by_caller: weakref.WeakValueDictionary[EntryKey, Any] = (
    weakref.WeakValueDictionary()
)


def hold_by(entry_key: EntryKey) -> Any:
    """Return the hold of a caller, or None.

    Unlike ``get()``, this raises no internal exception in the usual case of no hold.
    """
    reference: Any = holds_by_caller.data.get(entry_key)  # type: ignore[attr-defined]
    return None if reference is None else reference()


in_child(holds_by_caller.clear)


# The other holds of the same caller and key, oldest first, as of several permits. One
# takes the place of a hold that has ended.
_further: dict[EntryKey, list[weakref.ref[Any]]] = {}


def note_hold(hold: Any, entry_key: EntryKey) -> None:
    """Note a hold as that of its caller, which enters it again.

    A hold that the caller already has and can enter again stays that hold.
    """
    hold.entered_as.append(entry_key)
    with _mutex:
        first = hold_by(entry_key)
        stays = first is not None and first.lock.reentrant and first.enterable
        if not stays:
            holds_by_caller[entry_key] = hold
        if first is not None:
            further = hold if stays else first
            _further.setdefault(entry_key, []).append(weakref.ref(further))


def forget_hold(hold: Any) -> None:
    """Let a caller not enter a hold again, but the last other one of the same key."""
    for entry_key in hold.entered_as:
        # In one section, so that the next hold of the caller stays.
        with _mutex:
            further = _further.pop(entry_key, None)
            others = _others(hold, further) if further else []
            if hold_by(entry_key) is hold:
                if others:
                    holds_by_caller[entry_key] = others.pop()
                else:
                    del holds_by_caller[entry_key]
            if others:
                _further[entry_key] = list(map(weakref.ref, others))


def _others(hold: Any, further: list[weakref.ref[Any]]) -> list[Any]:
    """Return the holds among references that are not over, without this one."""
    others = [reference() for reference in further]
    return [one for one in others if not (one is None or one is hold or one.is_over)]


# What callers have acquired by ``acquire()`` and not released: the lock and the hold,
# innermost last.
_acquired: dict[Caller, list[tuple[Any, weakref.ref[Any]]]] = {}
# The leases among them. They stay alive although their callers may have no reference.
_leases: set[Any] = set()
# Guards both, since the keeper ends holds too. A signal handler may acquire a lock.
_mutex = threading.RLock()
_counter = itertools.count(1)


def _forked() -> None:
    global _mutex
    # A thread of the parent may have held it.
    _mutex = threading.RLock()
    _acquired.clear()
    _leases.clear()
    _further.clear()


in_child(_forked)


def note_acquired(lock: Any, hold: Any) -> None:
    """Keep a hold alive that its caller has acquired by ``lock.acquire()``.

    A lease is kept until it ends, and a hold in a transaction until that ends.
    """
    if next(_counter) % CALLS_PER_CLEANUP == 0:
        _clean_up()
    with _mutex:
        entries, lost = _without_lost(lock, hold)
        _acquired[hold.caller] = [*entries, (lock, weakref.ref(hold))]
        _leases.difference_update(lost)
    if hold.scope == "transaction":
        hold.mark.holds.append(hold)
    else:
        _leases.add(hold)
    if sys.flags.dev_mode or tracemalloc.is_tracing():
        for one in hold.parts:
            one.acquired_at = _line_of_caller()


def _without_lost(lock: Any, hold: Any) -> tuple[list[Any], set[Any]]:
    """Return the entries of a caller without lost holds of a lock and a key.

    Return also the holds that have no entry any more.
    """
    key = hold.parts[0].claim.key
    entries, kept, lost = [], set(), set()
    for by, reference in _acquired.get(hold.caller, ()):
        one = reference()
        if one is None:
            continue
        # A lease that has expired may still be renewed, and is not lost then.
        if (by, one.parts[0].claim.key) != (lock, key) or all(
            part.keeps for part in one.parts
        ):
            entries.append((by, reference))
            kept.add(one)
        else:
            lost.add(one)
    return entries, lost - kept


def _line_of_caller() -> tuple[str, int]:
    """Return the file and the line outside of dlocks that called it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_globals.get("__name__", "").startswith("dlocks.")
    ):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def forget_acquired(hold: Any) -> None:
    """Stop keeping a hold that has ended."""
    if hold.scope == "lease" and hold not in _leases:
        # A block ends it.
        return
    _leases.discard(hold)
    with _mutex:
        entries = _acquired.pop(hold.caller, ())
        if left := list(entry for entry in entries if entry[1]() is not hold):
            _acquired[hold.caller] = left


def _clean_up() -> None:
    """Stop keeping lost leases of ended callers, and callers without holds."""
    for hold in list(_leases):
        if hold.is_over and has_ended(hold.caller):
            forget_acquired(hold)
    with _mutex:
        blocks = list(itertools.chain(*_blocks.values()))
    for block in blocks:
        # Only a generator may still end it.
        if (
            block[2]._state.is_over
            and has_ended(block[0])
            and not _ends_by_itself(block, None)
        ):
            forget_block(block)
    with _mutex:
        for caller, entries in list(_acquired.items()):
            if any(reference() is not None for _, reference in entries):
                continue
            del _acquired[caller]
        unused = set(_further) - set(holds_by_caller)
        for entry_key in unused:
            del _further[entry_key]


def has_ended(caller: Caller) -> bool:
    """Return whether a thread has ended, or the event loop of a task was closed.

    The main thread ends with the process. Exit handlers run in it, and other threads
    may still work, when its ``is_alive()`` returns False already.
    """
    # Some libraries replace Thread and Task, so isinstance() does not work.
    if hasattr(caller, "get_loop"):
        return caller.get_loop().is_closed()
    return caller is not threading.main_thread() and not is_alive(caller)


def last_acquired(lock: Any, caller: Caller, *, take: bool = False) -> Any:
    """Return the hold that a caller acquired last by a lock, or None.

    If the caller has none, return that of a task of the same event loop that is done. A
    task that only acquires, as in ``asyncio.wait_for()``, is another caller. With
    ``take``, the caller is about to release it.
    """
    key = lock._key_of_tenant()
    with _mutex:
        found = _find_acquired(lock, key, caller)
        if found is None:
            return None
        entries, number, hold = found
        if take:
            del entries[number]
    return hold


# This and other loops are functions of their own, because CPython 3.13 loses the
# handlers around some loops.
def _find_acquired(
    lock: Any, key: str | None, caller: Caller
) -> tuple[list[Any], int, Any] | None:
    """Return the entries of a caller, or one that is done, and the last one's place."""
    callers = [caller]
    if hasattr(caller, "get_loop"):
        loop = caller.get_loop()
        callers += [
            other for other in reversed(list(_acquired)) if _is_done_in(other, loop)
        ]
    for one in callers:
        entries = _acquired.get(one, [])
        for number in reversed(range(len(entries))):
            by, reference = entries[number]
            hold = reference() if by == lock else None
            if hold is not None and key in {None, hold.parts[0].claim.key}:
                return entries, number, hold
    return None


def _is_done_in(caller: Any, loop: Any) -> bool:
    """Return whether a caller is a task of an event loop, and is done."""
    return hasattr(caller, "get_loop") and caller.get_loop() is loop and caller.done()


# The identity of the frame that entered a block, and its code. A frame that has ended
# may share its identity with a later one.
Place = tuple[int, CodeType | None]
# The blocks that callers are in, innermost last: the caller, the lock, the hold and the
# place.
Block = tuple[Caller, Any, Any, Place]
_blocks: dict[Caller, list[Block]] = {}


def place_of(frame: FrameType | None) -> Place:
    return id(frame), None if frame is None else frame.f_code


# The tasks of which this context is: the task itself, and those that have started it
# within a block. They are weak, because a context may outlive its tasks.
_tasks: ContextVar[frozenset[weakref.ref[Any]]] = ContextVar(
    "dlocks_tasks", default=frozenset()
)


def note_context(task: Any) -> None:
    """Note that this context, and those that are copied from it, are of a task."""
    others = [one for one in _tasks.get() if not _is_done(one())]
    _tasks.set(frozenset([*others, weakref.ref(task)]))


def _is_done(task: Any) -> bool:
    return task is None or task.done()


def enter_block(block: Block) -> None:
    """Note that a caller has entered a block."""
    if hasattr(block[0], "get_loop"):
        note_context(block[0])
    if next(_counter) % CALLS_PER_CLEANUP == 0:
        _clean_up()
    with _mutex:
        _blocks.setdefault(block[0], []).append(block)


def innermost_block(lock: Any, frame: FrameType | None) -> Block:
    """Return the innermost block of a lock that ends in a frame.

    A ``with`` statement ends in the frame in which it began, also if that belongs to a
    generator that another caller closes. Other code, such as an ExitStack, ends the
    caller's innermost block that no ``with`` statement can end, or that of a caller
    that has ended. Raise RuntimeError if it is not certain which block is meant.
    """
    caller = current_caller()
    place = id(frame), frame and frame.f_code
    with _mutex:
        blocks = _blocks.get(caller)
        if blocks and blocks[-1][1] is lock and blocks[-1][3] == place:
            # Usually it is the block that began last.
            return blocks[-1]
        found = _block_to_end(lock, frame, caller)
        if found is not None and found[0] is not caller:
            # It is this caller's now. No other one ends it too.
            forget_block(found)
            found = caller, *found[1:]
            _blocks.setdefault(caller, []).append(found)
    if found is None:
        raise RuntimeError(
            f"The 'with' block of {lock.key!r} must end in the thread or task in which"
            " it began. A generator, or another task, needs a 'with db_lock(…)' of its"
            " own."
        )
    return found


def _block_to_end(lock: Any, frame: FrameType | None, caller: Caller) -> Block | None:
    """Return the block of a lock that ends in a frame, or None if it is not certain."""
    place = place_of(frame)
    for block in reversed(_blocks.get(caller, [])):
        if block[1] is lock and block[3] == place:
            return block
    blocks = [block for block in itertools.chain(*_blocks.values()) if block[1] is lock]
    if began := [block for block in blocks if block[3] == place]:
        return began[-1]
    others = [block for block in blocks if not _ends_by_itself(block, frame)]
    if own := [block for block in others if block[0] is caller]:
        return own[-1]
    if over := [block for block in others if _is_over(block[0])]:
        return over[-1]
    if len(blocks) == 1 or all(block[0] is caller for block in blocks):
        return blocks[-1] if blocks else None
    return None


def _ends_by_itself(block: Block, frame: FrameType | None) -> bool:
    """Return whether a block was entered in a frame that may still end it.

    This is one of the frames that call this one, or that of a generator.
    """
    place = block[3]
    code = place[1]
    if code is not None and code.co_flags & (CO_GENERATOR | CO_ASYNC_GENERATOR):
        return True
    while frame is not None and place_of(frame) != place:
        frame = frame.f_back
    return frame is not None


def forget_block(block: Block) -> None:
    """Forget a block that has ended."""
    with _mutex:
        blocks = _blocks.get(block[0], [])
        if blocks and blocks[-1] is block:
            # Usually it is the innermost one.
            del blocks[-1]
        else:
            blocks[:] = list(one for one in blocks if one is not block)
        if not blocks:
            _blocks.pop(block[0], None)


def is_in_block(state: Any) -> bool:
    """Return whether a ``with lock`` block that holds a key is open."""
    with _mutex:
        holds = [block[2] for blocks in _blocks.values() for block in blocks]
    return any(state in hold._state.parts for hold in holds)


def is_used_elsewhere(hold: Any) -> bool:
    """Return whether another caller is in a block of a lock with the hold."""
    with _mutex:
        blocks = list(itertools.chain.from_iterable(_blocks.values()))
    return any(
        is_elsewhere(block[0]) and hold in block[2]._state.parts for block in blocks
    )


def is_elsewhere(caller: Caller) -> bool:
    """Return whether a caller is at work, and this is not one of its own calls.

    The calls of a task run in any thread, as by ``sync_to_async()``, and in tasks that
    it starts, as by ``asyncio.wait_for()``. Both have a copy of its context.
    """
    if hasattr(caller, "get_loop"):
        return not (
            _is_over(caller) or has_ended(caller) or weakref.ref(caller) in _tasks.get()
        )
    return caller is not threading.current_thread() and is_alive(caller)


def _is_over(caller: Caller) -> bool:
    if isinstance(caller, threading.Thread):
        return not is_alive(caller)
    return caller.done()


def is_outside(backend: Backend) -> bool:
    """Return whether leases are requested on another connection than the caller's."""
    inside = backend.in_transaction() and backend.refusal(ANY_LEASE) is None
    return inside or backend.connect_first is not None


def holding_of(caller: Caller, backend: Backend) -> tuple[HeldKey, ...]:
    """Return what a caller holds in a backend, as others can see it."""
    held = [
        HeldKey(hold.claim.key, hold.claim.owner, hold.in_transactions)
        for hold in keeper.holds
        if hold.caller is caller
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
    if is_outside(backend):
        refuse_nested()
        return keeper.run(partial(request, function), backend, timeout=timeout)
    return request(function)
