"""What waiters saw, hold by hold, and the figures that come of it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise

# Of each hold: when it was asked for, granted, about to be given back, and given back; by a clock that all processes
# of the machine have in common.
FIELDS = 4
ASKED, GRANTED, LEAVING, RELEASED = range(FIELDS)

# One waiter's holds, one after the other.
Samples = Sequence["array[float]"]


def durations(samples: Samples, first: int, last: int, begin: float, end: float) -> list[float]:
    """
    Return in order how long it was from one moment of a hold to another.

    A hold counts that was asked for before the end and granted after the beginning: what is waited for beyond the end
    counts too, so that nobody's longest wait goes missing.
    """
    return sorted(
        sample[place + last] - sample[place + first]
        for sample in samples
        for place in range(0, len(sample), FIELDS)
        if sample[place] < end and sample[place + GRANTED] >= begin
    )


def grants(samples: Samples, begin: float, end: float) -> list[int]:
    """Return how many grants each waiter got in that time."""
    return [sum(begin <= granted < end for granted in sample[GRANTED::FIELDS]) for sample in samples]


def handovers(samples: Samples, begin: float, end: float) -> list[float]:
    """Return in order how long the key lay idle between one holder and the next, who waited for it already."""
    return sorted(
        after[GRANTED] - before[LEAVING]
        for before, after in pairwise(_by_grant(samples))
        if begin <= after[GRANTED] < end and after[ASKED] <= before[LEAVING] and before[FIELDS] != after[FIELDS]
    )


def overlaps(samples: Samples) -> int:
    """Return how often the key was granted to one while another was still inside."""
    found, latest = 0, float("-inf")
    for hold in _by_grant(samples):
        found += hold[GRANTED] < latest
        latest = max(latest, hold[LEAVING])
    return found


def _by_grant(samples: Samples) -> list[tuple[float, ...]]:
    holds = [
        (*sample[place : place + FIELDS], number)
        for number, sample in enumerate(samples)
        for place in range(0, len(sample), FIELDS)
    ]
    return sorted(holds, key=lambda hold: hold[GRANTED])


def quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def jain(counts: Iterable[float]) -> float:
    """Return Jain's index: 1 when all got equally many, and 1/n when one of n got all."""
    counts = list(counts)
    squares = sum(count * count for count in counts)
    return sum(counts) ** 2 / (len(counts) * squares) if squares else 0.0
