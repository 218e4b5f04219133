"""How a loss is reported: a log, ``on_lost``, and the signal ``lock_lost``."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from django.db import connections

from dlocks.core.life import Life
from dlocks.signals import Event, has_receivers, is_interrupt, send_event

logger = logging.getLogger("dlocks")

OnLost = Callable[[Any], object]


class LossOfMember:
    """In a lock of one of several keys, the callback of the lock of all of them.

    It reports the loss of their hold once, whichever key is lost first.
    """

    def __init__(self, of_lock: OnLost) -> None:
        self.of_lock = of_lock
        # The hold of all keys, once its caller has it. It refers to this object.
        self.holds: list[weakref.ref[Any]] = []

    def __call__(self, hold: Any) -> None:
        """Do nothing. ``Holding`` calls what it stands for."""

    def take(self) -> Any:
        """Return the hold, the first time."""
        # To take it from the list is atomic.
        with suppress(IndexError):
            return self.holds.pop()()
        return None


def send_in_thread(face: Any, how: Event, life: Life) -> None:
    """Let another thread signal the end of a hold, if it calls code of users.

    That code must not keep the keeper from the other holds.
    """

    def send_and_disconnect() -> None:
        try:
            send(face, how, life)
        finally:
            connections.close_all()

    if how != "lost" and not has_receivers(face, how):
        send(face, how, life)
        return
    try:
        threading.Thread(
            target=send_and_disconnect, name="dlocks-ended", daemon=True
        ).start()
    except RuntimeError:
        # A late signal is better than none.
        logger.exception(
            "No thread could be started, so the keeper signals the end of %r", face.key
        )
        send_and_disconnect()


def send(face: Any, how: Event, life: Life) -> None:
    """Signal the end of a hold. Call ``on_lost`` if it is lost."""
    if how != "lost":
        send_event(how, face.lock, hold=face)
        return
    with ExitStack() as reports:
        # An interrupt in one of them keeps none of the others from their callers.
        for on_lost, hold in reversed(_callbacks(face, life)):
            reports.callback(_report_to, on_lost, hold, face.key)
        send_event(how, face.lock, hold=face)


def _report_to(on_lost: OnLost, hold: Any, key: str) -> None:
    try:
        on_lost(hold)
    except Exception as error:
        if is_interrupt(error):
            raise
        logger.exception("on_lost of %r failed", key)


def _callbacks(face: Any, life: Life) -> list[tuple[OnLost, Any]]:
    """Return the ``on_lost`` of each open entry, and what to call it with, once."""
    # No dictionary, since a callable need not have a hash.
    found: list[tuple[OnLost, Any]] = []
    for lock in life.state.locks:
        on_lost: Any = lock.on_lost
        hold = face
        if isinstance(on_lost, LossOfMember):
            on_lost, hold = on_lost.of_lock, on_lost.take()
        if on_lost is None or hold is None:
            continue
        if on_lost not in [other for other, _ in found]:
            found.append((on_lost, hold))
    return found
