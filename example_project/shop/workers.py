"""Worker processes that communicate over pipes.

They start together, and end when their parent ends.
"""

# Each worker imports this module before Django is set up in it.
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


class WorkerError(Exception):
    """The error for a process that did not start, failed, or ended unexpectedly."""


class Worker:
    """The worker's end of the pipe: it receives requests and sends replies."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        # Whether the parent has closed the pipe. Long work can check this.
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
        # The parent may have closed the pipe or ended.
        with suppress(OSError):
            self._pipe.send((True, answer))

    def fail(self, text: str) -> None:
        with suppress(OSError):
            self._pipe.send((False, text))


class WorkerPool:
    """Worker processes that run for the length of a ``with`` block.

    Each of the ``size`` processes calls ``serve`` and has its own connections.

    They are spawned, not forked, because SQLite connections must not be forked and
    Windows cannot fork. They therefore find the settings by DJANGO_SETTINGS_MODULE, and
    ``serve`` must be a module-level function.
    """

    def __init__(self, size: int, serve: Callable[[Worker], object]) -> None:
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
                context.Process(
                    target=_work,
                    args=(theirs, serve),
                    name=f"process {number + 1}",
                    daemon=True,
                )
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
        # A worker whose pipe is closed releases its holds and ends. One that has not
        # begun holds nothing.
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
        """Send the same request to all workers, or to the first ``size``."""
        for number, pipe in enumerate(self.pipes[:size]):
            self._tell(number, pipe, request)

    def tell_each(self, requests: list[Any]) -> None:
        for number, (pipe, request) in enumerate(
            zip(self.pipes, requests, strict=True)
        ):
            self._tell(number, pipe, request)

    def _tell(self, number: int, pipe: Connection, request: Any) -> None:
        try:
            pipe.send(request)
        except OSError:
            raise WorkerError(
                f"{self._processes[number].name} ended unexpectedly"
            ) from None

    def hear(self, number: int, seconds: float | None = None) -> Any:
        """Return the next reply of a worker.

        Wait at most ``seconds``, or without a limit for None.
        """
        name, pipe = self._processes[number].name, self.pipes[number]
        if seconds is not None and not pipe.poll(max(0.0, seconds)):
            raise WorkerError(f"{name} did not reply in time")
        try:
            well, answer = pipe.recv()
        except (EOFError, OSError):
            raise WorkerError(f"{name} ended unexpectedly") from None
        if not well:
            raise WorkerError(f"{name} failed:\n{answer}")
        return answer


def _work(pipe: Connection, serve: Callable[[Worker], object]) -> None:
    # Ctrl-C is for the parent, which then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = Worker(pipe)
    try:
        import django

        django.setup()
        worker.say(None)
        serve(worker)
    except Exception:  # noqa: BLE001 (sent to the parent process)
        worker.fail(traceback.format_exc())


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore Ctrl-C while processes are started.

    The terminal sends it to all of them, but only the parent handles it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
