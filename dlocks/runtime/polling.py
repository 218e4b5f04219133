"""Waiting until sockets are readable.

``poll()`` is used where it exists. ``select()`` is used elsewhere, as on Windows and
under Eventlet.
"""

from __future__ import annotations

import select


def ready(*files: int, timeout: float | None = None) -> set[int]:
    """Wait until a file is readable or closed, and return the ready files.

    ``timeout`` is in seconds, and None waits without a limit.
    """
    if not hasattr(select, "poll"):
        try:
            return {*select.select(files, (), (), timeout)[0]}
        except (OSError, ValueError):
            # A file was closed, or select() does not support its number. Reading from
            # it shows which.
            return set(files)
    poll = select.poll()
    for number in files:
        poll.register(number, select.POLLIN)
    return {
        number for number, _ in poll.poll(None if timeout is None else timeout * 1000)
    }
