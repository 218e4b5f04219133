"""Processes of a project that are started together, are spoken with over pipes, and end with whoever started them."""

# Each process imports this module before Django is set up in it.
from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, Self

# Seconds for a process to start, and to end.
START_SECONDS = 60.0
END_SECONDS = 10.0


class CrewError(Exception):
    """A process did not start, failed, or ended by itself."""


class Desk:
    """A process's own side: what it is asked comes in here, and its answers go out."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        # Whether nobody waits for answers any more: for a look in between, in long work.
        self.closed = False
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="dlocks-crew", daemon=True).start()

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._requests.put((self._pipe.recv(),))
        self.closed = True
        self._requests.put(None)

    def __iter__(self) -> Iterator[Any]:
        while (request := self._requests.get()) is not None:
            yield request[0]

    def say(self, answer: Any) -> None:
        # Whoever started this process may have enough, or be no more.
        with suppress(OSError):
            self._pipe.send((True, answer))

    def fail(self, text: str) -> None:
        with suppress(OSError):
            self._pipe.send((False, text))


class Crew:
    """
    So many processes, for as long as the block lasts; each serves at its desk, and has its own connections.

    They are started anew, not forked: SQLite's connections must not be, and Windows cannot. So they find the settings
    by DJANGO_SETTINGS_MODULE, and ``serve`` must be a function of a module.
    """

    def __init__(self, size: int, serve: Callable[[Desk], object]) -> None:
        context = multiprocessing.get_context("spawn")
        self._ready = False
        self.pipes: list[Connection] = []
        self._theirs: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        for number in range(size):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            self._theirs.append(theirs)
            self._processes.append(
                context.Process(target=_work, args=(theirs, serve), name=f"process {number + 1}", daemon=True)
            )

    def __len__(self) -> int:
        return len(self._processes)

    def __enter__(self) -> Self:
        try:
            with _interrupts_ignored():
                for process in self._processes:
                    process.start()
            for theirs in self._theirs:
                theirs.close()
            deadline = time.monotonic() + START_SECONDS
            for number in range(len(self)):
                self.hear(number, deadline - time.monotonic())
            self._ready = True
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        # A process whose pipe is closed gives back what it holds, and ends. One that has not begun holds nothing.
        for pipe in (*self.pipes, *self._theirs):
            pipe.close()
        started = [process for process in self._processes if process.pid is not None]
        deadline = time.monotonic() + END_SECONDS
        try:
            for process in started:
                if not self._ready:
                    process.terminate()
            for process in started:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process in started:
                if process.is_alive():
                    process.kill()
                    process.join()

    def tell(self, request: Any, size: int | None = None) -> None:
        """Ask the same of all, or of the first few."""
        for number, pipe in enumerate(self.pipes[:size]):
            self._tell(number, pipe, request)

    def tell_each(self, requests: list[Any]) -> None:
        for number, (pipe, request) in enumerate(zip(self.pipes, requests, strict=True)):
            self._tell(number, pipe, request)

    def _tell(self, number: int, pipe: Connection, request: Any) -> None:
        try:
            pipe.send(request)
        except OSError:
            raise CrewError(f"{self._processes[number].name} ended by itself") from None

    def hear(self, number: int, seconds: float | None = None) -> Any:
        """Return what one of them says next, within so many seconds if that is bounded."""
        name, pipe = self._processes[number].name, self.pipes[number]
        if seconds is not None and not pipe.poll(max(0.0, seconds)):
            raise CrewError(f"{name} gave no answer in time")
        try:
            well, answer = pipe.recv()
        except (EOFError, OSError):
            raise CrewError(f"{name} ended by itself") from None
        if not well:
            raise CrewError(f"{name} failed:\n{answer}")
        return answer


def _work(pipe: Connection, serve: Callable[[Desk], object]) -> None:
    # Ctrl-C is for whoever started this process, who then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    desk = Desk(pipe)
    try:
        import django

        django.setup()
        desk.say(None)
        serve(desk)
    except Exception:  # noqa: BLE001 (told to the process that waits for an answer)
        desk.fail(traceback.format_exc())


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Start processes that leave Ctrl-C, which the terminal sends to all, to the one that started them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
