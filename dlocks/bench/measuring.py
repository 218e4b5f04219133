"""One alias of DLOCKS measured: what its processes are asked to do, and what is made of their answers."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from typing import Any

from dlocks.backends.base import BaseBackend
from dlocks.backends.database import DatabaseBackend
from dlocks.backends.memory import MemoryBackend
from dlocks.backends.quorum import QuorumBackend
from dlocks.bench.crew import Crew, Desk
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
from dlocks.locks import db_lock

# How long a key is waited for at most, and how much longer an answer is.
PATIENCE = 30.0
# Before it counts: who has just connected is slower, and not all of them begin at once.
WARM_UP = 0.3


class NotMeasured(Exception):  # noqa: N818 (not always an error: the answer that there is no figure, and why)
    """An alias could not be measured, for the reason given."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: take a key again and again, and hold it for so many seconds."""

    alias: str
    key: str
    hold: float


def serve(desk: Desk) -> None:
    """Do what one process does: connect to an alias, and take and give back its key until the time is over."""
    plan: Plan | None = None
    for request in desk:
        try:
            if isinstance(request, Plan):
                plan = request
                with _lock(plan):
                    pass
                desk.say((True, None))
            elif plan is not None:
                desk.say((True, _take_again_and_again(desk, plan, request).tobytes()))
        except Exception as error:  # noqa: BLE001 (of that alias; the others go on)
            desk.say((False, _line(error)))


def _lock(plan: Plan) -> Any:
    return db_lock(plan.key, using=plan.alias, timeout=PATIENCE)


def _take_again_and_again(desk: Desk, plan: Plan, end: float) -> array[float]:
    samples = array("d")
    # Of all clocks the finest that the processes of one machine have in common.
    clock, sleep = time.perf_counter, time.sleep
    asked = clock()
    while asked < end and not desk.closed:
        with _lock(plan):
            granted = clock()
            if plan.hold:
                sleep(plan.hold)
            leaving = clock()
        released = clock()
        samples.extend((asked, granted, leaving, released))
        asked = released
    return samples


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def alone(crew: Crew, plan: Plan, seconds: float) -> dict[str, float]:
    """Measure what taking and giving back costs one process that has the key to itself. Times are microseconds."""
    samples, begin, end = _measure(crew, plan, seconds, 1)
    takes, gives, pairs = (
        [duration * 1e6 for duration in durations(samples, *moments, begin, end)]
        for moments in ((ASKED, GRANTED), (LEAVING, RELEASED), (ASKED, RELEASED))
    )
    return {
        "take_p50_us": round(quantile(takes, 0.5), 1),
        "take_p95_us": round(quantile(takes, 0.95), 1),
        "give_p50_us": round(quantile(gives, 0.5), 1),
        "give_p95_us": round(quantile(gives, 0.95), 1),
        "pair_p50_us": round(quantile(pairs, 0.5), 1),
        "pair_p95_us": round(quantile(pairs, 0.95), 1),
    }


def together(crew: Crew, plan: Plan, seconds: float) -> dict[str, float | None]:
    """Measure who gets the key when all processes want it. Times are milliseconds."""
    samples, begin, end = _measure(crew, plan, seconds, len(crew))
    waits = [wait * 1e3 for wait in durations(samples, ASKED, GRANTED, begin, end)]
    counts = grants(samples, begin, end)
    idle = [gap * 1e3 for gap in handovers(samples, begin, end)]
    return {
        "grants_per_s": round(sum(counts) / seconds, 1),
        "wait_p50_ms": round(quantile(waits, 0.5), 3),
        "wait_p99_ms": round(quantile(waits, 0.99), 3),
        "wait_max_ms": round(waits[-1], 3),
        "jain": round(jain(counts), 4),
        # Nobody waited when it was given back, where one took it again and again before the others came.
        "handover_p50_ms": round(quantile(idle, 0.5), 3) if idle else None,
        "handover_p99_ms": round(quantile(idle, 0.99), 3) if idle else None,
        "overlaps": overlaps(samples),
    }


def _measure(crew: Crew, plan: Plan, seconds: float, size: int) -> tuple[list[array[float]], float, float]:
    crew.tell(plan, size)
    _answers(crew, size, PATIENCE)
    begin = time.perf_counter() + WARM_UP
    end = begin + seconds
    crew.tell(end, size)
    samples = [array("d", answer) for answer in _answers(crew, size, WARM_UP + seconds + PATIENCE)]
    if not any(grants(samples, begin, end)):
        raise NotMeasured(f"nobody was granted the key in {seconds:g} s")
    return samples, begin, end


def _answers(crew: Crew, size: int, seconds: float) -> list[Any]:
    # All of them first: an answer that is left would be taken for the next one's.
    deadline = time.monotonic() + seconds + PATIENCE
    answers = [crew.hear(number, deadline - time.monotonic()) for number in range(size)]
    for well, answer in answers:
        if not well:
            raise NotMeasured(answer)
    return [answer for _, answer in answers]


def why_not_together(backend: BaseBackend) -> str | None:
    """Return why it makes no sense to let several processes want a key of this backend, or None."""
    if not backend.exclusive:
        return "excludes nobody"
    if isinstance(backend, MemoryBackend):
        return "excludes within one process only"
    return None


def purge(backend: BaseBackend, key: str) -> None:
    """Delete the rows of a key that nobody uses any more, if it has any."""
    if isinstance(backend, QuorumBackend):
        for member in backend.members():
            purge(member.backend, backend.prefix + key)
    elif isinstance(backend, DatabaseBackend):
        from dlocks.models import HoldRecord, LockClaim, ResourceLock

        for model in (LockClaim, ResourceLock, *([HoldRecord] if backend.history else [])):
            model._default_manager.using(backend.database).filter(key_resource=backend.prefix + key).delete()
