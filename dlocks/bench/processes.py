"""The processes of a measurement."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

# Seconds for a process to start, and to end.
START_SECONDS = 60.0
END_SECONDS = 10.0

# In such a process: whether it is to end, and the barrier of all processes.
stop: Any = None
_all: Any = None


class Processes(ProcessPoolExecutor):
    """Processes that run for the length of a ``with`` block, and measure together.

    They are spawned, not forked, because SQLite connections must not be forked and
    Windows cannot fork. They therefore find the settings by DJANGO_SETTINGS_MODULE.
    """

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.size = size
        self._stop = context.Event()
        self._others = multiprocessing.active_children()
        super().__init__(size, context, _begin, (self._stop, context.Barrier(size)))

    def ask(
        self, size: int, seconds: float, function: Callable[..., Any], *arguments: Any
    ) -> list[Any]:
        """Call a function in one process or in all, and return the results.

        Raise TimeoutError after ``seconds``, and BrokenExecutor if a process ended.
        """
        everywhere = size == self.size
        deadline = time.monotonic() + seconds
        with _interrupts_ignored():
            calls = [
                self.submit(_call, everywhere, function, *arguments)
                for _ in range(size)
            ]
        return [call.result(max(0.0, deadline - time.monotonic())) for call in calls]

    def __exit__(self, *exc: object) -> None:
        # Each process releases what it holds before it ends.
        self._stop.set()
        self.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + END_SECONDS
        for process in multiprocessing.active_children():
            left = max(0.0, deadline - time.monotonic())
            # Not join(), which the executor's own thread calls.
            if process not in self._others and not wait([process.sentinel], left):
                process.kill()


def _begin(*shared: Any) -> None:
    global stop, _all
    stop, _all = shared
    # Ctrl-C is for the parent, which then ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import django

    django.setup()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()  # type: ignore[union-attr]
    os._exit(1)


def _call(everywhere: bool, function: Callable[..., Any], *arguments: Any) -> Any:
    if everywhere:
        # No process makes two of the calls.
        _all.wait(START_SECONDS)
    return function(*arguments)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore Ctrl-C while processes are started, which the terminal sends to all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
