"""Worker processes that contend for a lock, and their samples."""

from __future__ import annotations

import multiprocessing
import signal
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
)

# Workers are forked, so that they start at once. The parent imports everything, but
# connects to nothing.
PROCESSES = multiprocessing.get_context("fork")

# Seconds for the workers to connect, and to finish their last waits after the end.
PATIENCE = 60.0


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The parameters of one measurement. Times are in seconds.

    Each process acquires the same key again and again.
    """

    experiment: str
    contender: str
    processes: int = 1
    hold: float = 0.0
    seconds: float = 1.0
    warm_up: float = 0.3


def measure(cell: Cell) -> dict[str, Any]:
    """Measure once.

    All waiters begin together, and only the time after the warm-up counts.

    A grant counts if it came within that time. A wait counts if it began before the end
    and ended after the warm-up. Waits that last beyond the end are completed, so that
    no longest wait is lost. Each holder adds one to an unguarded counter, which it
    reads at the beginning of the hold and writes at the end. If the sum is not the
    number of grants, two holders held the key at once.
    """
    counter = RawArray(c_int64, 1)
    workers, pipes = [], []
    for number in range(cell.processes):
        here, there = PROCESSES.Pipe()
        worker = PROCESSES.Process(
            target=_work, args=(cell, number, counter, there), daemon=True
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
        logs = [_receive(pipe, end + PATIENCE) for pipe in pipes]
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
        "lost_updates": sum(map(len, samples)) // FIELDS - counter[0],
        "grants": grants(samples, begin, end),
        "waits": _microseconds(durations(samples, ASKED, GRANTED, begin, end)),
        "pairs": _microseconds(durations(samples, ASKED, RELEASED, begin, end)),
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


def _work(cell: Cell, number: int, counter: Any, pipe: Connection) -> None:
    # Ctrl-C is for the parent, which ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        contender = CONTENDERS[cell.contender]
        contender.start()
        # Connect, by acquiring a key of its own.
        with contender.hold(f"key-{number}"):
            pass
        pipe.send(None)
        samples = _hold_again_and_again(cell, contender, counter, pipe.recv())
        contender.stop()
        pipe.send(samples.tobytes())
        # The cost of ending a process must not affect the waiters that are still
        # queued.
        pipe.recv()
    except BaseException:
        pipe.send(traceback.format_exc())


def _hold_again_and_again(
    cell: Cell, contender: Contender, counter: Any, end: float
) -> array[float]:
    """Acquire, hold and release the key until ``end``, and return the times."""
    samples = array("d")
    monotonic, sleep = time.monotonic, time.sleep
    asked = monotonic()
    while asked < end:
        with contender.hold("key-0"):
            granted = monotonic()
            count = counter[0]
            if cell.hold:
                sleep(cell.hold)
            counter[0] = count + 1
            leaving = monotonic()
        released = monotonic()
        samples.extend((asked, granted, leaving, released))
        asked = released
    return samples
