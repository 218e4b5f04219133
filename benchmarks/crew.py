"""Worker processes that contend for a lock, and their samples."""

from __future__ import annotations

import multiprocessing
import random
import signal
import threading
import time
import traceback
from array import array
from collections.abc import Callable
from ctypes import c_int64
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawArray
from typing import Any

from benchmarks.contenders import CONTENDERS, Contender
from benchmarks.samples import (
    ASKED,
    FIELDS,
    GRANTED,
    RELEASED,
    durations,
    grants,
    handovers,
)

# Workers are forked, so that they start at once. The parent imports everything, but
# connects to nothing.
PROCESSES = multiprocessing.get_context("fork")

# Seconds for the workers to connect, and to finish their last waits after the end.
PATIENCE = 60.0


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The parameters of one measurement. Times are in seconds.

    Each waiter acquires a key again and again.
    """

    experiment: str
    contender: str
    processes: int = 1
    threads: int = 1
    # The number of keys from which one is drawn each time. With 0, each waiter has its
    # own key.
    keys: int = 1
    hold: float = 0.0
    # The number of other keys that each waiter holds meanwhile.
    held: int = 0
    # The number of rows in the tables.
    rows: int = 1000
    seconds: float = 1.0
    warm_up: float = 0.3

    @property
    def waiters(self) -> int:
        return self.processes * self.threads


def measure(cell: Cell) -> dict[str, Any]:
    """Measure once.

    All waiters begin together, and only the time after the warm-up counts.

    A grant counts if it came within that time. A wait counts if it began before the end
    and ended after the warm-up. Waits that last beyond the end are completed, so that
    no longest wait is lost. Each holder adds one to an unguarded counter, which it
    reads at the beginning of the hold and writes at the end. If the sum is not the
    number of grants, two holders held the key at once.
    """
    counters = RawArray(c_int64, max(cell.keys, cell.waiters))
    workers, pipes = [], []
    for number in range(cell.processes):
        here, there = PROCESSES.Pipe()
        worker = PROCESSES.Process(
            target=_work, args=(cell, number, counters, there), daemon=True
        )
        worker.start()
        there.close()
        workers.append(worker)
        pipes.append(here)
    result: dict[str, Any] = asdict(cell)
    finished = False
    try:
        for pipe in pipes:
            _receive(pipe, time.monotonic() + PATIENCE)
        begin = time.monotonic() + cell.warm_up
        end = begin + cell.seconds
        for pipe in pipes:
            pipe.send(end)
        logs = [log for pipe in pipes for log in _receive(pipe, end + PATIENCE)]
        for pipe in pipes:
            pipe.send(None)
        finished = True
    except WorkerError as error:
        return {**result, "error": str(error)}
    finally:
        for worker in workers:
            if not finished:
                worker.kill()
        for worker in workers:
            worker.join(10)
            if worker.is_alive():
                worker.kill()
                worker.join(10)
    samples = [array("d", log) for log in logs]
    return {
        **result,
        "lost_updates": sum(map(len, samples)) // FIELDS - sum(counters),
        "grants": grants(samples, begin, end),
        "waits": _microseconds(durations(samples, ASKED, GRANTED, begin, end)),
        "pairs": _microseconds(durations(samples, ASKED, RELEASED, begin, end)),
        "handovers": _microseconds(handovers(samples, begin, end))
        if cell.keys == 1
        else [],
    }


class WorkerError(Exception):
    """The error for a worker that failed or did not finish."""


def in_child(function: Callable[..., object], *arguments: object) -> None:
    """Call a function in a child process.

    Its connections do not get into this process.
    """
    child = PROCESSES.Process(target=function, args=arguments, daemon=True)
    child.start()
    child.join()
    if child.exitcode != 0:
        raise WorkerError(f"{function.__name__} ended with {child.exitcode}")


def _microseconds(seconds: list[float]) -> list[int]:
    return [round(each * 1e6) for each in seconds]


def _receive(pipe: Connection, deadline: float) -> Any:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        raise WorkerError("did not end in time")
    try:
        answer = pipe.recv()
    except EOFError:
        raise WorkerError("a worker died") from None
    if isinstance(answer, str):
        raise WorkerError(answer)
    return answer


def _work(cell: Cell, number: int, counters: Any, pipe: Connection) -> None:
    # Ctrl-C is for the parent, which ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        contender = CONTENDERS[cell.contender]
        contender.start()
        waiters = [
            Waiter(cell, contender, number * cell.threads + n, counters)
            for n in range(cell.threads)
        ]
        if cell.threads == 1:
            waiters[0].prepare()
            pipe.send(None)
            waiters[0].wait_again_and_again(pipe.recv())
        else:
            _in_threads(waiters, pipe)
        for waiter in waiters:
            if waiter.error is not None:
                raise waiter.error
        pipe.send([waiter.samples.tobytes() for waiter in waiters])
        # The cost of ending a process must not affect the waiters that are still
        # queued.
        pipe.recv()
    except BaseException:
        pipe.send(traceback.format_exc())


def _in_threads(waiters: list[Waiter], pipe: Connection) -> None:
    ready, go = threading.Barrier(len(waiters) + 1), threading.Event()
    ends: list[float] = []

    def wait(waiter: Waiter) -> None:
        try:
            waiter.prepare()
        except BaseException as error:
            waiter.error = error
        ready.wait()
        go.wait()
        if waiter.error is None:
            waiter.wait_again_and_again(ends[0])

    threads = [
        threading.Thread(target=wait, args=(waiter,), daemon=True) for waiter in waiters
    ]
    for thread in threads:
        thread.start()
    ready.wait()
    pipe.send(None)
    ends.append(pipe.recv())
    go.set()
    for thread in threads:
        thread.join()


class Waiter:
    """A thread that acquires, holds and releases the lock again and again."""

    def __init__(
        self, cell: Cell, contender: Contender, number: int, counters: Any
    ) -> None:
        self.cell = cell
        self.contender = contender
        self.number = number
        self.counters = counters
        self.samples = array("d")
        self.error: BaseException | None = None

    def prepare(self) -> None:
        """Connect, by acquiring a key of its own.

        Also acquire the keys that are held all the time.
        """
        with self.contender.hold(f"key-{self.number}"):
            pass
        self.standing = [
            self.contender.hold(f"held-{self.number}-{n}")
            for n in range(self.cell.held)
        ]
        for hold in self.standing:
            hold.__enter__()

    def wait_again_and_again(self, end: float) -> None:
        try:
            self._wait_again_and_again(end)
            for hold in self.standing:
                hold.__exit__(None, None, None)
        except BaseException as error:
            self.error = error

    def _wait_again_and_again(self, end: float) -> None:
        cell, contender, counters, samples = (
            self.cell,
            self.contender,
            self.counters,
            self.samples,
        )
        draw = random.Random(self.number).randrange
        monotonic, sleep = time.monotonic, time.sleep
        asked = monotonic()
        while asked < end:
            number = draw(cell.keys) if cell.keys else self.number
            with contender.hold(f"key-{number}"):
                granted = monotonic()
                count = counters[number]
                if cell.hold:
                    sleep(cell.hold)
                counters[number] = count + 1
                leaving = monotonic()
            released = monotonic()
            samples.extend((asked, granted, leaving, released))
            asked = released
