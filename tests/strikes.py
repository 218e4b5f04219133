"""Asynchronous exceptions, by which task queues and time limits interrupt a thread."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from typing import Self


def strike(ident: int, error: type[BaseException]) -> None:
    """Raise an error in a thread that runs, unless it is about to start another one.

    On CPython 3.11, the error may strike the new thread instead. It then ends before it
    has begun, and ``start()`` never returns, without dlocks too.
    """
    interval = sys.getswitchinterval()
    # No other thread runs between the look and the strike.
    sys.setswitchinterval(60)
    try:
        frame = sys._current_frames().get(ident)
        while frame is not None and frame.f_code is not threading.Thread.start.__code__:
            frame = frame.f_back
        if frame is None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(ident), ctypes.py_object(error)
            )
    finally:
        sys.setswitchinterval(interval)


class StruckError(Exception):
    """An exception like that of a time limit."""


class StruckExit(BaseException):
    """An exception like SystemExit."""


STRUCK = (StruckError, StruckExit)


class Strike:
    """Raise an error in this thread after some seconds, unless the block has ended."""

    def __init__(self, seconds: float, error: type[BaseException]) -> None:
        self._seconds = seconds
        self._error = error
        self._ident = threading.get_ident()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._mutex = threading.Lock()
        self._has_ended = False
        # Whether the error was raised.
        self.is_over = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with self._mutex:
            self._has_ended = True

    def _run(self) -> None:
        time.sleep(self._seconds)
        with self._mutex:
            if not self._has_ended:
                self.is_over = True
                strike(self._ident, self._error)
