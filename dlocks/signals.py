"""Signals about locks. The sender is the class of the ``Lock``.

``lock_acquired``, ``lock_released``, ``lock_lost`` and ``lock_detached`` carry
``hold``. ``lock_timeout`` carries ``lock``, ``holder`` and ``waited``. Entering a hold
again, and leaving that entry, sends no signal. An exception of a receiver is logged and
does not reach the caller. ``lock_lost`` may be sent from a background thread.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

from django.dispatch import Signal

if TYPE_CHECKING:
    from dlocks.protocols import ObservedHold, Policy
    from dlocks.values import Holder

logger = logging.getLogger("dlocks")

lock_acquired = Signal(use_caching=True)
lock_released = Signal(use_caching=True)
lock_lost = Signal()
lock_detached = Signal()
lock_timeout = Signal()

End = Literal["released", "lost", "detached"]


class Watcher:
    """An observer of locks within dlocks.

    It is called directly. Sending a signal costs more than most observers do.
    """

    def acquired(self, hold: ObservedHold) -> None:
        pass

    def ended(self, hold: ObservedHold, how: End) -> None:
        pass

    def timed_out(self, lock: Policy, holder: Holder | None, waited: float) -> None:
        pass


watchers: list[Watcher] = []


def send_acquired(hold: ObservedHold) -> None:
    for watcher in watchers:
        try:
            watcher.acquired(hold)
        except Exception:
            logger.exception("%r failed", watcher)
    lock_acquired.send_robust(type(hold.lock), hold=hold)


def send_ended(hold: ObservedHold, how: End) -> None:
    for watcher in watchers:
        try:
            watcher.ended(hold, how)
        except Exception:
            logger.exception("%r failed", watcher)
    _ENDS[how].send_robust(type(hold.lock), hold=hold)


def send_timed_out(lock: Policy, holder: Holder | None, waited: float) -> None:
    for watcher in watchers:
        try:
            watcher.timed_out(lock, holder, waited)
        except Exception:
            logger.exception("%r failed", watcher)
    lock_timeout.send_robust(type(lock), lock=lock, holder=holder, waited=waited)


_ENDS = {"released": lock_released, "lost": lock_lost, "detached": lock_detached}
