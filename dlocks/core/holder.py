"""The name and the address of the holders in this process, as other people see them."""

from __future__ import annotations

import functools
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dlocks.signals import is_interrupt
from dlocks.text import HOLDER_LENGTH, printable, with_note

logger = logging.getLogger("dlocks")


def holder_name(caller: Any) -> str:
    """Return the name of a caller as holder: host, process, and thread or task."""
    # A task's requests are made in threads that it shares with other tasks.
    name = caller.get_name() if hasattr(caller, "get_loop") else caller.name
    return _holder_name(os.getpid(), name)


@functools.lru_cache(1000)
def _holder_name(process: int, name: str) -> str:
    # A thread's name may come from a command line, or from anywhere. Its line breaks
    # would forge lines of logs, and not every database can store NUL or half a
    # character.
    return printable(f"{_hostname()}:{process}:{name}")[:HOLDER_LENGTH]


def noted(name: str, describe: Callable[[], object] | None, note: str) -> str:
    """Return a holder's name with the text of the function of HOLDER, and a note."""
    texts = [note] if note else []
    try:
        if describe is not None and (about := describe()):
            texts.insert(0, str(about))
    except Exception as error:
        if is_interrupt(error):
            raise
        # A lock must not depend on a text for people.
        logger.exception("The function of the setting HOLDER failed")
    return with_note(name, "; ".join(texts))


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
