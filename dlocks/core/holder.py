"""The name and the address of the holders in this process, as other people see them."""

from __future__ import annotations

import functools
import os
import socket
import threading
from contextlib import suppress

from dlocks.text import printable


def own_holder_name() -> str:
    return _holder_name(os.getpid(), threading.current_thread().name)


@functools.lru_cache(1000)
def _holder_name(process: int, thread: str) -> str:
    # A thread's name may come from a command line, or from anywhere. Its line breaks
    # would forge lines of logs, and not every database can store NUL or half a
    # character.
    return printable(f"{_hostname()}:{process}:{thread}")


@functools.cache
def _hostname() -> str:
    return socket.gethostname()


@functools.cache
def own_ip() -> str | None:
    """Return the IP address from which this host sends, without sending."""
    for family, anywhere in (
        (socket.AF_INET, "192.0.2.1"),
        (socket.AF_INET6, "2001:db8::1"),
    ):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((anywhere, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"
