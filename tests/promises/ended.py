"""Callers of other threads, which may have ended."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django.db import connections


def in_ended_thread(function: Callable[[], Any]) -> Any:
    """Return the result of a function in a thread that has ended."""

    def run() -> Any:
        try:
            return function()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1, "ended") as pool:
        return pool.submit(run).result()


def is_refused(lock: Any) -> bool:
    """Return whether this caller cannot acquire a lock."""
    hold = lock.try_acquire()
    if hold is not None:
        hold.release()
    return hold is None
