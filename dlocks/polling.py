"""Waiting for sockets and the like: by poll(); where there is none, as on Windows and under Eventlet, by select()."""

from __future__ import annotations

import select
from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType


def readable(file: int) -> Callable[[], object]:
    """Return what waits until this file has something to read, or was closed; for who waits for it often."""
    if not isinstance(getattr(select, "poll", None), BuiltinFunctionType):
        # There is none, or it is gevent's, which belongs to the thread that has made it.
        return partial(ready, file)
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return poll.poll


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
