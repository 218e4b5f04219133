"""Hooks for the start and the end of child processes."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

# It drops connections before the other hooks forget the objects that use them.
from dlocks.runtime import inherited  # noqa: F401

T = TypeVar("T")

# Priority among the finalizers of multiprocessing and billiard: after the queues (-5),
# and after the children were joined.
AFTER_ALL_OTHERS = -100


def in_child(forget: Callable[[], object]) -> None:
    """Call a function in each forked child of this process, if there is fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget)


def each_in_child(forget: Callable[[T], object]) -> weakref.WeakSet[T]:
    """Return a set whose objects are passed to a function in each forked child."""
    objects: weakref.WeakSet[T] = weakref.WeakSet()
    in_child(lambda: [forget(one) for one in list(objects)])
    return objects


def at_child_exit(function: Callable[[], object]) -> None:
    """Call a function at the end of a child that exits by ``os._exit()``.

    Such children of multiprocessing, billiard and Celery skip ``atexit``. They have
    imported their library already, so no other module is checked.
    """
    for library in ("multiprocessing", "billiard"):
        current_process = _imported(f"{library}.process", "current_process")
        finalize = _imported(f"{library}.util", "Finalize")
        # The main process has no such parent, but it has atexit.
        if (
            current_process is not None
            and finalize is not None
            and current_process()._parent_pid is not None
        ):
            # The libraries clear their registries in a new child, and ignore entries of
            # another process.
            finalize(None, function, exitpriority=AFTER_ALL_OTHERS)
    if (shutdown := _imported("celery.signals", "worker_process_shutdown")) is not None:
        # A prefork worker of Celery is a billiard process that skips the finalizers
        # too. It sends this signal.
        def at_shutdown(**kwargs: Any) -> None:
            function()

        shutdown.connect(at_shutdown, weak=False, dispatch_uid="dlocks")


def _imported(module: str, name: str) -> Any:
    """Return an attribute of a module that is imported, at least partly."""
    return getattr(sys.modules.get(module), name, None)
