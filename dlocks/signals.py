"""Signals about locks. The sender is the class of the ``Lock``.

``lock_acquired``, ``lock_released``, ``lock_lost`` and ``lock_detached`` carry
``hold``. ``lock_timeout`` carries ``lock``, ``holder`` and ``waited``. Entering a hold
again, and leaving that entry, sends no signal. An ``Exception`` of a receiver is logged
and does not reach the caller. One that a signal handler raises meanwhile, such as
Celery's soft time limit, does. ``lock_lost`` may be sent from a background thread.
"""

from __future__ import annotations

import inspect
import logging
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from django.dispatch import Signal

if TYPE_CHECKING:
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

    def acquired(self, hold: Any) -> None:
        pass

    def ended(self, hold: Any, how: End) -> None:
        pass

    def timed_out(self, lock: Any, holder: Holder | None, waited: float) -> None:
        pass


watchers: list[Watcher] = []


def is_interrupt(error: BaseException) -> bool:
    """Return whether a signal handler has raised an error.

    Python calls a signal handler, like a tracer, with the frame of the code that it
    interrupts. Hardly any other function has its own caller's frame as an argument.

    An error of ``PyThreadState_SetAsyncExc()`` leaves no such trace. It has the
    traceback of an error that a function in C has raised by itself.
    """
    caller, traceback = None, error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if caller is not None and _is_argument(caller, frame):
            return True
        caller, traceback = frame, traceback.tb_next
    return False


def _is_argument(value: FrameType, frame: FrameType) -> bool:
    names, varargs, _, values = inspect.getargvalues(frame)
    arguments = [values.get(name) for name in names]
    if varargs is not None:
        arguments += values.get(varargs, ())
    return any(argument is value for argument in arguments)


def _raise_interrupt(answers: Any) -> None:
    """Raise an error by which a signal handler has ended a receiver."""
    for _receiver, answer in answers:
        if isinstance(answer, Exception) and is_interrupt(answer):
            raise answer


def send_acquired(hold: Any) -> None:
    for watcher in watchers:
        try:
            watcher.acquired(hold)
        except Exception as error:
            if is_interrupt(error):
                raise
            logger.exception("%r failed", watcher)
    if answers := lock_acquired.send_robust(type(hold.lock), hold=hold):
        _raise_interrupt(answers)


def has_receivers(hold: Any, how: End) -> bool:
    """Return whether the end of a hold is signalled to code of users."""
    return bool(_ENDS[how].has_listeners(type(hold.lock)))


def send_ended(hold: Any, how: End) -> None:
    for watcher in watchers:
        try:
            watcher.ended(hold, how)
        except Exception as error:
            if is_interrupt(error):
                raise
            logger.exception("%r failed", watcher)
    if answers := _ENDS[how].send_robust(type(hold.lock), hold=hold):
        _raise_interrupt(answers)


def send_timed_out(lock: Any, holder: Holder | None, waited: float) -> None:
    for watcher in watchers:
        try:
            watcher.timed_out(lock, holder, waited)
        except Exception as error:
            if is_interrupt(error):
                raise
            logger.exception("%r failed", watcher)
    _raise_interrupt(
        lock_timeout.send_robust(type(lock), lock=lock, holder=holder, waited=waited)
    )


_ENDS = {"released": lock_released, "lost": lock_lost, "detached": lock_detached}
