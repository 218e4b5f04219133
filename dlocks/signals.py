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
from typing import Any, Literal

from django.dispatch import Signal

logger = logging.getLogger("dlocks")

lock_acquired = Signal(use_caching=True)
lock_released = Signal(use_caching=True)
lock_lost = Signal()
lock_detached = Signal()
lock_timeout = Signal()

Event = Literal["acquired", "released", "lost", "detached", "timed_out"]

_SIGNALS: dict[Event, Signal] = {
    "acquired": lock_acquired,
    "released": lock_released,
    "lost": lock_lost,
    "detached": lock_detached,
    "timed_out": lock_timeout,
}

# The observers of locks within dlocks. They have a method for each event that they
# observe, with the event and the arguments of its signal. It is called directly,
# because sending a signal costs more than most observers do.
watchers: list[Any] = []


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


def send_event(event: Event, lock: Any, /, **facts: Any) -> None:
    """Call the watchers of an event, and then the receivers of its signal."""
    for watcher in watchers:
        watch = getattr(watcher, event, None)
        if watch is None:
            continue
        try:
            watch(event, **facts)
        except Exception as error:
            if is_interrupt(error):
                raise
            logger.exception("%r failed", watcher)
    for _receiver, answer in _SIGNALS[event].send_robust(type(lock), **facts):
        # A signal handler may have ended a receiver.
        if isinstance(answer, Exception) and is_interrupt(answer):
            raise answer


def has_receivers(hold: Any, event: Event) -> bool:
    """Return whether the end of a hold is signalled to code of users."""
    return bool(_SIGNALS[event].has_listeners(type(hold.lock)))
