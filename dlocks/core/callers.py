"""The callers that acquire, which are threads or tasks, and the holds of each."""

from __future__ import annotations

import asyncio
import threading
import weakref
from asyncio import _get_running_loop
from collections.abc import Callable
from typing import Any, TypeVar

from dlocks.backends.base import Backend, is_outside
from dlocks.runtime.keeper import keeper
from dlocks.runtime.process import in_child

T = TypeVar("T")

Caller = threading.Thread | asyncio.Task[Any]

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


def run_outside(
    function: Callable[[], T], backend: Backend, timeout: float | None = None
) -> T:
    """Call a function outside of the caller's transaction and pool."""
    if is_outside(backend):
        return keeper.run(function, backend, timeout=timeout)
    return function()
