"""Waiting for sockets and the like: by poll(); where there is none, as on Windows and under Eventlet, by select()."""

from __future__ import annotations

import select
import sys
import threading


def threads_are_green() -> bool:
    """Tell whether gevent has put greenlets in the place of threads: a call into C that waits keeps all waiting."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def is_alive(thread: threading.Thread) -> bool:
    """Tell whether a thread goes on, or a greenlet: is_alive() of its stand-in says so for ever, or raises an error."""
    return thread in threading.enumerate() if threads_are_green() else thread.is_alive()


def ready(*files: int, timeout: float | None = None, or_writable: bool = False) -> set[int]:
    """
    Wait until one of these files has something to read, or was closed; return which.

    For so many seconds at most, or without a limit. With ``or_writable`` one that can be written to counts too.
    """
    if not hasattr(select, "poll"):
        try:
            readable, writable, _ = select.select(files, files if or_writable else (), (), timeout)
        except (OSError, ValueError):
            # One was closed, or has a number that select() does not know: to read it says what there is.
            return set(files)
        return {*readable, *writable}
    poll = select.poll()
    for number in files:
        poll.register(number, select.POLLIN | select.POLLOUT if or_writable else select.POLLIN)
    return {number for number, _ in poll.poll(None if timeout is None else timeout * 1000)}
