"""The progress of a round as the points of a small chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from example_project.shop.sale import Round

WIDTH, HEIGHT = 240, 120


@dataclass(frozen=True)
class Plot:
    """The points of an SVG chart.

    They show the pieces sold and left over time, the stock, and the oversold area above
    the stock.
    """

    sold: str
    left: str
    oversold: str
    stock: float
    # The end of the time axis.
    seconds: float

    @property
    def top(self) -> float:
        """The height of the stock, in percent from the top."""
        return round(100 * self.stock / HEIGHT, 1)


def _above(one: Round) -> list[tuple[float, float]]:
    """Return the corners of the area above the stock.

    The number of sold pieces never falls, so there is at most one such area.
    """
    corners: list[tuple[float, float]] = []
    before = (0.0, 0)
    for seconds, sold, _ in one.course:
        if sold > one.stock:
            if not corners:
                share = (one.stock - before[1]) / (sold - before[1])
                corners.append((before[0] + share * (seconds - before[0]), one.stock))
            corners.append((seconds, sold))
        before = (seconds, sold)
    return [*corners, (before[0], one.stock)] if corners else []


def plots(rounds: Sequence[Round]) -> list[Plot]:
    """Return the charts of all rounds, at one scale for comparison."""
    longest = max((one.seconds for one in rounds), default=0) or 1.0
    highest = max((max(one.stock, one.sold) for one in rounds), default=1) * 1.06

    def at(seconds: float, pieces: float) -> str:
        return (
            f"{seconds / longest * WIDTH:.1f},{HEIGHT - pieces / highest * HEIGHT:.1f}"
        )

    return [
        Plot(
            sold=" ".join(at(seconds, sold) for seconds, sold, _ in one.course),
            left=" ".join(at(seconds, left) for seconds, _, left in one.course),
            oversold=" ".join(at(*corner) for corner in _above(one)),
            stock=round(HEIGHT - one.stock / highest * HEIGHT, 1),
            seconds=longest,
        )
        for one in rounds
    ]
