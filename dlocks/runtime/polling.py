"""Waiting until sockets are readable.

``poll()`` is used where it exists. ``select()`` is used elsewhere, as on Windows and
under Eventlet.
"""

from __future__ import annotations

import select


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
