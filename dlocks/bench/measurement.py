"""The measurements of one alias of DLOCKS, and their figures."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dlocks.api import db_lock
from dlocks.backends.base import Backend
from dlocks.backends.database.backend import DatabaseBackend
from dlocks.backends.memory import MemoryBackend
from dlocks.backends.quorum import QuorumBackend
from dlocks.bench import processes
from dlocks.bench.processes import START_SECONDS, Processes
from dlocks.bench.samples import (
    ASKED,
    GRANTED,
    LEAVING,
    RELEASED,
    durations,
    grants,
    handovers,
    jain,
    overlaps,
    quantile,
)

# Seconds for which a process waits for the key, and which a reply may take in addition.
REPLY_TIMEOUT = 30.0
# Seconds before the measurement begins. A new connection is slower, and the processes
# do not all start at once.
WARM_UP = 0.3


class NotMeasured(Exception):  # noqa: N818 (a reason, not always an error)
    """The error for an alias that was not measured. The message is the reason."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A measurement: acquire a key repeatedly, and hold it for ``hold`` seconds."""

    alias: str
    key: str
    hold: float


def _lock(plan: Plan) -> Any:
    return db_lock(plan.key, using=plan.alias, timeout=REPLY_TIMEOUT)


def _try(function: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
    """Call a function. Return whether it succeeded, and its result or the error."""
    try:
        return True, function(*arguments)
    except Exception as error:  # noqa: BLE001 (it concerns one alias only)
        return False, f"{type(error).__name__}: {' '.join(str(error).split())}"


def _connect(plan: Plan) -> None:
    with _lock(plan):
        pass


def _take_again_and_again(plan: Plan, end: float) -> bytes:
    """Acquire the key until the end, and return the times."""
    samples = array("d")
    # The finest clock that all processes of a machine share.
    clock, sleep, is_over = time.perf_counter, time.sleep, processes.stop.is_set
    while not is_over() and (asked := clock()) < end:
        with _lock(plan):
            granted = clock()
            if plan.hold:
                sleep(plan.hold)
            leaving = clock()
        samples.extend((asked, granted, leaving, clock()))
    return samples.tobytes()


def alone(crew: Processes, plan: Plan, seconds: float) -> dict[str, float]:
    """Measure acquiring and releasing by one process without contention.

    Times are in microseconds.
    """
    samples, begin, end = _measure(crew, plan, seconds, 1)
    figures = {}
    for name, first, last in (
        ("take", ASKED, GRANTED),
        ("give", LEAVING, RELEASED),
        ("pair", ASKED, RELEASED),
    ):
        times = durations(samples, first, last, begin, end)
        for percent in (50, 95):
            figure = quantile(times, percent / 100) * 1e6
            figures[f"{name}_p{percent}_us"] = round(figure, 1)
    return figures


def together(crew: Processes, plan: Plan, seconds: float) -> dict[str, float | None]:
    """Measure contention of all processes for one key. Times are in milliseconds."""
    samples, begin, end = _measure(crew, plan, seconds, crew.size)
    waits = [wait * 1e3 for wait in durations(samples, ASKED, GRANTED, begin, end)]
    counts = grants(samples, begin, end)
    idle = [gap * 1e3 for gap in handovers(samples, begin, end)]
    return {
        "grants_per_s": round(sum(counts) / seconds, 1),
        "wait_p50_ms": round(quantile(waits, 0.5), 3),
        "wait_p99_ms": round(quantile(waits, 0.99), 3),
        "wait_max_ms": round(waits[-1], 3),
        "jain": round(jain(counts), 4),
        # If one process reacquired the key again and again before the others came, no
        # process was waiting at a release.
        "handover_p50_ms": round(quantile(idle, 0.5), 3) if idle else None,
        "handover_p99_ms": round(quantile(idle, 0.99), 3) if idle else None,
        "overlaps": overlaps(samples),
    }


def _measure(
    crew: Processes, plan: Plan, seconds: float, size: int
) -> tuple[list[array[float]], float, float]:
    _answers(crew, size, START_SECONDS + REPLY_TIMEOUT, _connect, plan)
    begin = time.perf_counter() + WARM_UP
    end = begin + seconds
    limit = WARM_UP + seconds + 2 * REPLY_TIMEOUT
    samples = [
        array("d", answer)
        for answer in _answers(crew, size, limit, _take_again_and_again, plan, end)
    ]
    if not any(grants(samples, begin, end)):
        raise NotMeasured(f"no process acquired the key in {seconds:g} s")
    return samples, begin, end


def _answers(crew: Processes, size: int, limit: float, *call: Any) -> list[Any]:
    replies = crew.ask(size, limit, _try, *call)
    for well, answer in replies:
        if not well:
            raise NotMeasured(answer)
    return [answer for _, answer in replies]


def why_not_together(backend: Backend) -> str | None:
    """Return why this backend cannot be measured under contention, or None."""
    if not backend.exclusive:
        return "excludes no other caller"
    if isinstance(backend, MemoryBackend):
        return "excludes callers in the same process only"
    return None


def purge(backend: Backend, key: str) -> None:
    """Delete the rows of an unused key, if it has any."""
    if isinstance(backend, QuorumBackend):
        for member in backend.members():
            purge(member.backend, backend.prefix + key)
    elif isinstance(backend, DatabaseBackend):
        for table in (
            "{claims}",
            "{locks}",
            *(["{records}"] if backend.history else []),
        ):
            sql = f"DELETE FROM {table} WHERE key_resource = %(key)s"
            backend._count(backend._text(sql), {"key": backend.prefix + key})
