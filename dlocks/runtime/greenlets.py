"""Helpers for processes in which gevent replaces threads by greenlets."""

from __future__ import annotations

import sys
import threading


def threads_are_green() -> bool:
    """Return whether gevent has replaced the threads.

    A blocking call into C then stops all greenlets.
    """
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def is_alive(thread: threading.Thread) -> bool:
    """Return whether a thread or greenlet is still running.

    ``is_alive()`` of gevent's stand-in for a thread stays true after its end, or raises
    an error.
    """
    return thread in threading.enumerate() if threads_are_green() else thread.is_alive()
