"""What is different where gevent has put greenlets in the place of threads."""

from __future__ import annotations

import sys
import threading


def threads_are_green() -> bool:
    """Tell whether it has: then a call into C that waits keeps all of them waiting."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def is_alive(thread: threading.Thread) -> bool:
    """Tell whether a thread goes on, or a greenlet: is_alive() of its stand-in says so for ever, or raises an error."""
    return thread in threading.enumerate() if threads_are_green() else thread.is_alive()
