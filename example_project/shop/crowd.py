"""The crowd: processes that buy at the same moment, each with a database connection of its own."""

# Each process imports this module before Django is set up in it, so nothing of Django is imported up here.
from __future__ import annotations

import multiprocessing
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Barrier
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from example_project.shop.services import Purchase

# Seconds for a process to start, and to end.
START_SECONDS = 60.0
END_SECONDS = 10.0


class CrowdError(Exception):
    """A process of the crowd failed."""


class Crowd:
    """So many processes, for as long as the block lasts."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._barrier = context.Barrier(size + 1)
        self._ready = False
        self._ends: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._theirs: list[Connection] = []
        for number in range(size):
            ours, theirs = context.Pipe()
            self._ends.append(ours)
            self._theirs.append(theirs)
            self._processes.append(
                context.Process(target=_work, args=(theirs, self._barrier), name=f"buyers-{number + 1}", daemon=True)
            )

    def __enter__(self) -> Self:
        try:
            with _interrupts_ignored():
                for process in self._processes:
                    process.start()
            for theirs in self._theirs:
                theirs.close()
            for number, end in enumerate(self._ends):
                if not end.poll(START_SECONDS):
                    raise CrowdError(f"Process {self._processes[number].name} did not start.")
                self._receive(end)
            self._ready = True
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        # A process whose pipe is closed finishes the purchase it is in, gives its lock back, and ends. One that has not
        # begun holds nothing.
        self._barrier.abort()
        for end in (*self._ends, *self._theirs):
            end.close()
        started = [process for process in self._processes if process.pid is not None]
        try:
            if not self._ready:
                for process in started:
                    process.terminate()
            for process in started:
                process.join(END_SECONDS)
        finally:
            for process in started:
                if process.is_alive():
                    process.kill()
                    process.join()

    def buy(self, product_id: int, lock: str, buyers: list[str]) -> Iterator[Purchase | None]:
        """
        Let everybody buy one piece at the same moment; yield each purchase as it comes.

        Before them comes a None: the start.
        """
        size = len(self._ends)
        for number, end in enumerate(self._ends):
            end.send((product_id, lock, buyers[number::size]))
        for end in self._ends:
            self._receive(end)
        self._barrier.wait()
        yield None
        buying = list(self._ends)
        while buying:
            for end in wait(buying):
                purchase = self._receive(end)
                if purchase is None:
                    buying.remove(end)
                else:
                    yield purchase

    def _receive(self, end: Connection) -> Purchase | None:
        try:
            message = end.recv()
        except (EOFError, OSError):
            raise CrowdError(f"Process {self._processes[self._ends.index(end)].name} ended by itself.") from None
        if isinstance(message, str):
            raise CrowdError(message)
        return message


def _work(end: Connection, barrier: Barrier) -> None:
    """Do what one process of the crowd does, until its pipe is closed."""
    try:
        import django

        django.setup()
        from django.db import connection

        from example_project.shop.services import buy

        connection.ensure_connection()
        end.send(None)
        while True:
            product_id, lock, buyers = end.recv()
            end.send(None)
            barrier.wait(START_SECONDS)
            for buyer in buyers:
                end.send(buy(product_id, buyer, lock))
            end.send(None)
    except (EOFError, BrokenPipeError, ConnectionResetError, threading.BrokenBarrierError):
        # Whoever started this process has enough, or is no more.
        pass
    except Exception:  # noqa: BLE001 (told to the process that waits for an answer)
        with suppress(OSError):
            end.send(traceback.format_exc())


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
