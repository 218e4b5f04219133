"""Waiting for sockets and the like: by poll(); where there is none, as on Windows and under Eventlet, by select()."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from functools import partial
from time import perf_counter
from types import BuiltinFunctionType

# For so many seconds an answer is looked for before its reader sleeps: to be woken often takes as long as the answer.
LOOKS_FOR = 0.000_25

# After so many answers in a row that took longer, their reader sleeps at once, until one does not.
LATE_AT_MOST = 3


def readable(file: int) -> Callable[..., object]:
    """
    Return what waits until this file has something to read, or was closed; for who waits for short answers often.

    It takes a ``timeout`` in seconds, and tells whether there is something. Where answers come soon it does not sleep
    at once, but looks again and again, as mutexes do, and gives way meanwhile to whoever else wants the processor.
    """
    if not isinstance(getattr(select, "poll", None), BuiltinFunctionType) or not hasattr(os, "sched_yield"):
        # There is none, or it is gevent's, which belongs to the thread that has made it.
        return partial(ready, file)
    poll = select.poll()
    poll.register(file, select.POLLIN)
    look, give_way, late = poll.poll, os.sched_yield, 0

    def wait(timeout: float | None = None) -> bool:
        nonlocal late
        if timeout == 0:
            return bool(look(0))
        began = perf_counter()
        if late < LATE_AT_MOST:
            while perf_counter() - began < LOOKS_FOR:
                if look(0):
                    late = 0
                    return True
                give_way()
        # By another poll(): a signal's handler, which runs in the middle of this, may wait for the same file.
        found = ready(file, timeout=timeout)
        late = 0 if perf_counter() - began < LOOKS_FOR else late + 1
        return bool(found)

    return wait


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
