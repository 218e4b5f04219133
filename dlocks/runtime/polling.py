"""Waiting until sockets are readable.

``poll()`` is used where it exists. ``select()`` is used elsewhere, as on Windows and
under Eventlet.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType

from dlocks.runtime import clock

# Seconds for which a reader polls before it sleeps, unless the option ``spin`` says
# otherwise. Waking a thread often takes as long as the reply.
SPIN_SECONDS = 0.000_25

# Number of slower replies in a row after which a reader sleeps at once, until a reply
# is quick again.
LATE_REPLIES_LIMIT = 3


def readable(file: int, spin: float = SPIN_SECONDS) -> Callable[..., object]:
    """Return a function that waits until a file is readable or closed.

    It is meant for frequent waits for short replies. The function takes a ``timeout``
    in seconds and returns whether the file is ready. While replies arrive quickly, it
    polls for ``spin`` seconds before it sleeps, as mutexes do. Between two polls it
    yields the processor.
    """
    # gevent's poll() belongs to the thread that created it.
    is_own = isinstance(getattr(select, "poll", None), BuiltinFunctionType)
    if not spin or not is_own or not hasattr(os, "sched_yield"):
        return partial(ready, file)
    poll = select.poll()
    poll.register(file, select.POLLIN)
    look, give_way, late = poll.poll, os.sched_yield, 0

    def wait(timeout: float | None = None) -> bool:
        nonlocal late
        if timeout == 0:
            return bool(look(0))
        began = clock.real_now()
        if late < LATE_REPLIES_LIMIT:
            while clock.real_now() - began < spin:
                if look(0):
                    late = 0
                    return True
                give_way()
        # Use another poll object. A signal handler that runs in the middle of this wait
        # may wait for the same file.
        found = ready(file, timeout=timeout)
        late = 0 if clock.real_now() - began < spin else late + 1
        return bool(found)

    return wait


def ready(
    *files: int, timeout: float | None = None, or_writable: bool = False
) -> set[int]:
    """Wait until a file is readable or closed, and return the ready files.

    ``timeout`` is in seconds, and None waits without a limit. With ``or_writable``, a
    writable file counts as ready too.
    """
    if not hasattr(select, "poll"):
        try:
            readable, writable, _ = select.select(
                files, files if or_writable else (), (), timeout
            )
        except (OSError, ValueError):
            # A file was closed, or select() does not support its number. Reading from
            # it shows which.
            return set(files)
        return {*readable, *writable}
    poll = select.poll()
    for number in files:
        poll.register(
            number, select.POLLIN | select.POLLOUT if or_writable else select.POLLIN
        )
    return {
        number for number, _ in poll.poll(None if timeout is None else timeout * 1000)
    }
