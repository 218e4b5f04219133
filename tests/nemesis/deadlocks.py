"""Check a history for deadlocks: which ones were reported, and how soon.

Only exclusive keys are checked. A worker has one thread, so it is one caller.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.nemesis.checker import Held, Interval

# Seconds within which a cycle is reported, and for a machine that is busy.
REPORTED_WITHIN = 3.0
SLACK = 1.0


def false_refusals(turns: Iterable[Held]) -> Iterator[str]:
    """Yield the waits that were refused although they were not part of a cycle."""
    graph = Graph(turns)
    for turn in graph.turns:
        if turn.refusal == "LockDeadlock" and not any(graph.cycles(turn)):
            yield f"refused without a deadlock: {turn}"


def late_reports(
    turns: Iterable[Held],
    quiet: Mapping[int, Sequence[Interval]],
    unwritable: Sequence[Interval],
) -> Iterator[str]:
    """Yield the cycles that lasted too long.

    ``quiet`` has the periods in which each process was stopped or cut off. A cycle with
    such a process is not checked. ``unwritable`` has the periods in which no process
    could write. They are subtracted from the duration of a cycle.
    """
    graph = Graph(turns)
    for turn in graph.turns:
        for members, (begin, end) in graph.cycles(turn):
            blocked = sum(
                max(0.0, min(end, until) - max(begin, since))
                for since, until in unwritable
            )
            if end - begin - blocked <= REPORTED_WITHIN + SLACK:
                continue
            if not any(
                since < end and until > begin
                for member in members
                for since, until in quiet.get(member.pid, ())
            ):
                named = ", ".join(map(str, members))
                yield f"not reported for {end - begin:.3f} s: {named}"


class Graph:
    """Which waits were for keys that other waiting callers held, and when."""

    def __init__(self, turns: Iterable[Held]) -> None:
        self.turns = [turn for turn in turns if turn.mode == "x"]
        self._holds: dict[str, list[Held]] = defaultdict(list)
        self._waits: dict[int, list[Held]] = defaultdict(list)
        for turn in self.turns:
            if turn.got is not None:
                self._holds[turn.key].append(turn)
            if turn.timeout != 0:
                self._waits[turn.pid].append(turn)

    def cycles(self, wait: Held) -> Iterator[tuple[list[Held], Interval]]:
        """Yield the cycles of a wait, with the interval in which each existed."""
        if wait.timeout != 0:
            yield from self._extend([wait], wait.waits)

    def _extend(
        self, path: list[Held], interval: Interval
    ) -> Iterator[tuple[list[Held], Interval]]:
        for hold in self._holds[path[-1].key]:
            during = _common(interval, self._held(hold))
            if during is None:
                continue
            if hold.pid == path[0].pid:
                if len(path) > 1:
                    yield path, during
                continue
            if any(hold.pid == member.pid for member in path):
                continue
            for following in self._waits[hold.pid]:
                if (both := _common(during, following.waits)) is not None:
                    yield from self._extend([*path, following], both)

    def _held(self, hold: Held) -> Interval:
        # The lease of a waiting worker is renewed, although the worker does not record
        # it. A worker that was stopped may learn late that another one has the key.
        end = hold.gone if hold.scope == "transaction" else min(hold.end, hold.lost)
        taken = [
            other.got
            for other in self._holds[hold.key]
            if other.got is not None and other.token > hold.token
        ]
        return hold.got or 0.0, min(end, hold.died, *taken)


def _common(one: Interval, other: Interval) -> Interval | None:
    begin, end = max(one[0], other[0]), min(one[1], other[1])
    return (begin, end) if begin < end else None
