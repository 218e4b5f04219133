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
from typing import Any, TypeVar

from dlocks.backends.base import ANY_LEASE, Backend
from dlocks.runtime.connected import connection_of
from dlocks.runtime.greenlets import is_alive
from dlocks.runtime.keeper import keeper
from dlocks.runtime.process import in_child
from dlocks.transactions import TransactionMarker
from dlocks.values import HeldKey

T = TypeVar("T")

Caller = threading.Thread | asyncio.Task[Any]

# Calls of ``acquire()`` between two clean-ups.
CALLS_PER_CLEANUP = 1000

# The number of holds that a caller may lose and not release before they are forgotten.
ENTRIES = 100

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
    # A thread of the parent may have held it. The holds remain, because the blocks of
    # the child report that the parent holds the keys.
    _mutex = threading.RLock()


in_child(_forked)


def note_acquired(lock: Any, hold: Any) -> None:
    """Keep a hold alive that its caller has acquired by ``lock.acquire()``.

    A lease is kept until it ends, and a hold in a transaction until that ends.
    """
    if next(_counter) % CALLS_PER_CLEANUP == 0:
        _clean_up()
    with _mutex:
        if len(entries := _acquired.get(hold.caller, ())) > ENTRIES:
            # Its caller does not release what it has lost.
            for one in {reference() for _, reference in entries}:
                if one is not None and not one.held:
                    forget_acquired(one)
        _acquired.setdefault(hold.caller, []).append((lock, weakref.ref(hold)))
    if hold.scope == "transaction":
        hold.mark.holds.add(hold)
    else:
        _leases.add(hold)
    if sys.flags.dev_mode or tracemalloc.is_tracing():
        for one in getattr(hold, "holds", [hold]):
            one.acquired_at = _line_of_caller()


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
    if hold.scope == "transaction":
        hold.mark.holds.discard(hold)
    _leases.discard(hold)
    with _mutex:
        entries = _acquired.pop(hold.caller, ())
        if left := [entry for entry in entries if entry[1]() is not hold]:
            _acquired[hold.caller] = left


def _clean_up() -> None:
    """Stop keeping lost leases of ended callers, and callers without holds."""
    for hold in list(_leases):
        if hold.is_over and has_ended(hold.caller):
            forget_acquired(hold)
    with _mutex:
        for caller, entries in list(_acquired.items()):
            if all(reference() is None for _, reference in entries):
                del _acquired[caller]


def has_ended(caller: Caller) -> bool:
    """Return whether a thread has ended, or the event loop of a task was closed."""
    # Some libraries replace Thread and Task, so isinstance() does not work.
    if hasattr(caller, "get_loop"):
        return caller.get_loop().is_closed()
    return not is_alive(caller)


def last_acquired(lock: Any, *, in_block: bool = False) -> Any:
    """Return the hold that the caller acquired last by a lock, or None.

    If the caller has none, return the only one in the same event loop. A task that only
    acquires, as in ``asyncio.wait_for()``, is another caller. The block of a generator
    may end in any caller (``in_block``). Then a caller that has ended comes first.
    """
    caller = current_caller()
    with _mutex:
        if mine := _holds_by(lock, caller):
            return mine[-1]
        others = [
            (other, hold)
            for other in _acquired
            if in_block or _shares_loop(other, caller)
            for hold in _holds_by(lock, other)
        ]
    over = [hold for other, hold in others if in_block and _is_over(other)]
    holds = over[-1:] or list({id(hold): hold for _, hold in others}.values())
    if in_block and len(holds) > 1:
        raise RuntimeError(
            f"The 'with' block of {lock.key!r} must end in the thread or task in which"
            " it began."
        )
    return holds[0] if len(holds) == 1 else None


def _holds_by(lock: Any, caller: Caller) -> list[Any]:
    return [
        hold
        for by, reference in _acquired.get(caller, ())
        if by == lock and (hold := reference()) is not None
    ]


def _shares_loop(one: Caller, other: Caller) -> bool:
    return (
        hasattr(one, "get_loop")
        and hasattr(other, "get_loop")
        and one.get_loop() is other.get_loop()
    )


def _is_over(caller: Caller) -> bool:
    return caller.done() if hasattr(caller, "done") else not is_alive(caller)


def forget_entry(hold: Any) -> None:
    """Forget the last time that the caller entered a hold, which it has now left.

    A lock on several keys may have entered the hold too, and has no entry for it.
    """
    with _mutex:
        entries = _acquired.get(hold.caller, [])
        mine = [number for number, one in enumerate(entries) if one[1]() is hold]
        if len(mine) > hold.count:
            del entries[mine[-1]]


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


def run_outside(
    function: Callable[[], T], backend: Backend, timeout: float | None = None
) -> T:
    """Call a function outside of the caller's transaction and pool."""
    if is_outside(backend):
        return keeper.run(function, backend, timeout=timeout)
    return function()
