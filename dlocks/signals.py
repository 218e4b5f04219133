"""
Signals about locks. The sender is the ``Lock``'s class.

``lock_acquired``, ``lock_released``, ``lock_lost`` and ``lock_detached`` carry ``hold``; ``lock_timeout`` carries
``lock``, ``holder`` and ``waited``. A nested entry and its end are not signalled. What a receiver raises is
logged, and does not reach the caller. ``lock_lost`` may be sent from the keeper's thread.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

from django.dispatch import Signal

if TYPE_CHECKING:
    from dlocks.backends.base import Holder
    from dlocks.holds import Hold
    from dlocks.locks import Lock

logger = logging.getLogger("dlocks")

lock_acquired = Signal(use_caching=True)
lock_released = Signal(use_caching=True)
lock_lost = Signal()
lock_detached = Signal()
lock_timeout = Signal()

End = Literal["released", "lost", "detached"]


class Watcher:
    """One of our own that is told of locks, without a signal: that costs more than most of them do with it."""

    def acquired(self, hold: Hold) -> None:
        pass

    def ended(self, hold: Hold, how: End) -> None:
        pass

    def timed_out(self, lock: Lock, holder: Holder | None, waited: float) -> None:
        pass


watchers: list[Watcher] = []


def tell_acquired(hold: Hold) -> None:
    for watcher in watchers:
        try:
            watcher.acquired(hold)
        except Exception:
            logger.exception("%r failed", watcher)
    lock_acquired.send_robust(type(hold.lock), hold=hold)


def tell_ended(hold: Hold, how: End) -> None:
    for watcher in watchers:
        try:
            watcher.ended(hold, how)
        except Exception:
            logger.exception("%r failed", watcher)
    _ENDS[how].send_robust(type(hold.lock), hold=hold)


def tell_timed_out(lock: Lock, holder: Holder | None, waited: float) -> None:
    for watcher in watchers:
        try:
            watcher.timed_out(lock, holder, waited)
        except Exception:
            logger.exception("%r failed", watcher)
    lock_timeout.send_robust(type(lock), lock=lock, holder=holder, waited=waited)


_ENDS = {"released": lock_released, "lost": lock_lost, "detached": lock_detached}
