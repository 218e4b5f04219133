"""Samples of the measured holds, and the figures computed from them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

# The times of a hold: requested, granted, about to be released, and released. All
# processes of the machine share the clock.
FIELDS = 4
ASKED, GRANTED, LEAVING, RELEASED = range(FIELDS)

# The holds of each waiter, one after the other.
Samples = Sequence["array[float]"]


def durations(
    samples: Samples, first: int, last: int, begin: float, end: float
) -> list[float]:
    """Return the sorted durations between two moments of each hold.

    A hold counts if it was requested before ``end`` and granted after ``begin``. A wait
    that lasts beyond ``end`` counts too, so that no longest wait is lost.
    """
    return sorted(
        sample[place + last] - sample[place + first]
        for sample in samples
        for place in range(0, len(sample), FIELDS)
        if sample[place] < end and sample[place + GRANTED] >= begin
    )


def grants(samples: Samples, begin: float, end: float) -> list[int]:
    """Return the number of grants of each waiter in that time."""
    return [
        sum(begin <= granted < end for granted in sample[GRANTED::FIELDS])
        for sample in samples
    ]


def quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def jain(counts: Sequence[float]) -> float:
    """Return Jain's fairness index of the counts.

    It is 1 if all are equal, and 1/n if one of n has everything.
    """
    squares = sum(count * count for count in counts)
    return sum(counts) ** 2 / (len(counts) * squares) if squares else 0.0
