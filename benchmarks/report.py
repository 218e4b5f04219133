"""The report: from samples to Markdown and plots.

``python -m benchmarks.report [RUN.json [DIRECTORY]]``
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.samples import jain, quantile

HERE = Path(__file__).parent

PLACE = ("processes", "threads", "keys", "hold", "held", "rows")


@dataclass
class Series:
    """The figures of one contender in one cell, by round."""

    rounds: dict[int, dict[str, Any]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def each(self, name: str) -> dict[int, float]:
        return {number: figures[name] for number, figures in self.rounds.items()}

    def median(self, name: str) -> float:
        return statistics.median(self.each(name).values())

    def spread(self, name: str) -> tuple[float, float]:
        values = self.each(name).values()
        return min(values), max(values)


class Run:
    """The figures of a run, by experiment, contender and cell."""

    def __init__(self, run: dict[str, Any]) -> None:
        self.run = run
        self.series: dict[tuple[str, str, tuple[Any, ...]], Series] = {}
        for result in run["results"]:
            place = (
                result["experiment"],
                result["contender"],
                tuple(result[name] for name in PLACE),
            )
            series = self.series.setdefault(place, Series())
            if "error" in result:
                series.errors.append(result["error"])
            elif not result["waits"]:
                series.errors.append("no grant in time")
            else:
                series.rounds[result["round"]] = _figures(result)

    def find(self, experiment: str, contender: str, **cell: Any) -> Series | None:
        """Return the first series whose cell has these values, or None."""
        for (found, name, place), series in self.series.items():
            values = dict(zip(PLACE, place, strict=True))
            if (
                (found, name) == (experiment, contender)
                and cell.items() <= values.items()
                and series.rounds
            ):
                return series
        return None

    def contenders(self, experiment: str) -> list[str]:
        return list(
            dict.fromkeys(name for found, name, _ in self.series if found == experiment)
        )

    def values(self, experiment: str, name: str) -> list[Any]:
        """Return the sorted values of a field of the cells, without duplicates."""
        place = PLACE.index(name)
        return sorted(
            {cell[place] for found, _, cell in self.series if found == experiment}
        )

    def broken(self) -> list[str]:
        """Describe the contenders that granted a key twice at once, or failed."""
        lines = []
        for (experiment, contender, place), series in self.series.items():
            cell = ", ".join(
                f"{name} {value}" for name, value in zip(PLACE, place, strict=True)
            )
            if lost := sum(figures["lost"] for figures in series.rounds.values()):
                lines.append(
                    f"{contender}, {experiment} ({cell}): two held the lock at once;"
                    f" {lost:.0f} updates lost."
                )
            lines += [
                f"{contender}, {experiment} ({cell}): {error.strip().splitlines()[-1]}"
                for error in series.errors
            ]
        return lines


def _figures(result: dict[str, Any]) -> dict[str, float]:
    waits, pairs, grants = (
        sorted(result["waits"]),
        sorted(result["pairs"]),
        result["grants"],
    )
    return {
        "rate": sum(grants) / result["seconds"],
        "wait50": quantile(waits, 0.5) / 1e3,
        "wait99": quantile(waits, 0.99) / 1e3,
        "wait_max": waits[-1] / 1e3,
        "pair50": quantile(pairs, 0.5),
        "pair95": quantile(pairs, 0.95),
        "jain": jain(grants),
        # There may have been no handover, depending on the timing of the requests.
        "handover50": (
            quantile(sorted(result["handovers"]), 0.5) / 1e3
            if result.get("handovers")
            else math.nan
        ),
        "lost": result["lost_updates"],
    }


def ratio(one: Series, other: Series, name: str) -> tuple[float, float, float]:
    """Return the median, least and largest ratio of two contenders.

    Both figures of a ratio are from the same round, so that a drift affects both.
    """
    numbers = sorted(one.rounds.keys() & other.rounds.keys())
    ratios = [
        one.rounds[number][name] / max(other.rounds[number][name], 1e-9)
        for number in numbers
    ]
    return statistics.median(ratios), min(ratios), max(ratios)


# Targets.


@dataclass(frozen=True)
class Target:
    experiment: str
    contender: str
    figure: str
    # The target is a ratio to this contender's figure, or for None the figure itself.
    peer: str | None
    at_most: float | None = None
    at_least: float | None = None

    def verdict(self, low: float, high: float) -> str:
        """Return whether the target is reached, provided that all rounds agree."""
        if self.at_most is not None:
            reached, missed = high <= self.at_most, low > self.at_most
        else:
            reached, missed = low >= (self.at_least or 0), high < (self.at_least or 0)
        return "yes" if reached else "**no**" if missed else "undecided"


def _contended(
    contender: str, figure: str, peer: str | None, at_least: float
) -> Target:
    return Target("contended", contender, figure, peer, at_least=at_least)


def _pair(contender: str, peer: str, at_most: float) -> Target:
    return Target("uncontended", contender, "pair50", peer, at_most=at_most)


TARGETS = [
    _contended("dlocks-postgresql", "rate", "kazoo", 1.1),
    Target("contended", "dlocks-postgresql", "wait99", "kazoo", at_most=1.0),
    _contended("dlocks-postgresql", "jain", None, 0.99),
    _contended("dlocks-postgresql-session", "rate", "advisory", 0.9),
    _contended("dlocks-mariadb", "rate", "kazoo", 1.0),
    _contended("dlocks-mariadb", "jain", None, 0.95),
    _contended("dlocks-mysql", "rate", "kazoo", 1.0),
    _contended("dlocks-mysql", "jain", None, 0.95),
    _contended("dlocks-mysql-no-binlog", "rate", "kazoo", 1.0),
    _contended("dlocks-sqlite", "rate", "kazoo", 1.0),
    _contended("dlocks-sqlite", "jain", None, 0.95),
    _pair("dlocks-postgresql", "raw-postgresql", 1.5),
    _pair("dlocks-postgresql", "redis-py-always", 0.9),
    _pair("dlocks-postgresql", "kazoo", 0.3),
    _pair("dlocks-postgresql", "db-mutex-postgresql", 0.3),
    _pair("dlocks-mariadb", "raw-pair-mariadb", 1.4),
    _pair("dlocks-mysql", "raw-pair-mysql", 1.4),
    _pair("dlocks-postgresql-transaction", "django-row-postgresql", 1.3),
    _pair("dlocks-mariadb-transaction", "django-row-mariadb", 1.3),
    _pair("dlocks-mysql-transaction", "django-row-mysql", 1.3),
    _pair("dlocks-sqlite", "raw-sqlite", 1.5),
]

FIGURES = {
    "rate": "grants/s",
    "wait99": "p99 of the wait",
    "jain": "Jain's index",
    "pair50": "p50 of acquire and release",
}


def _targets(run: Run) -> str:
    from benchmarks.experiments import TARGET

    rows = []
    for target in TARGETS:
        cell = TARGET if target.experiment == "contended" else {}
        one = run.find(target.experiment, target.contender, **cell)
        other = (
            run.find(target.experiment, target.peer, **cell) if target.peer else None
        )
        goal = (
            f"≤ {target.at_most:g}"
            if target.at_most is not None
            else f"≥ {target.at_least:g}"
        )
        what = FIGURES[target.figure] + (
            f" : {label(target.peer)}" if target.peer else ""
        )
        if one is None or (target.peer and other is None):
            rows.append([label(target.contender), what, goal, "not measured", ""])
            continue
        if other is not None:
            value, low, high = ratio(one, other, target.figure)
        else:
            value, (low, high) = one.median(target.figure), one.spread(target.figure)
        rows.append(
            [
                label(target.contender),
                what,
                goal,
                spread(value, low, high, 2),
                target.verdict(low, high),
            ]
        )
    return table(["", "figure", "target", "measured", "reached"], rows)


# Tables.


def _contended(run: Run) -> Iterable[str]:
    from benchmarks.experiments import TARGET

    places = {
        (
            place[PLACE.index("processes")],
            place[PLACE.index("hold")],
            place[PLACE.index("keys")],
        )
        for experiment, _, place in run.series
        if experiment == "contended"
    }
    target = (TARGET["processes"], TARGET["hold"], TARGET["keys"])
    for processes, hold, keys in sorted(
        places, key=lambda place: (place != target, *place)
    ):
        which = "one key" if keys == 1 else f"one of {keys:,} keys"
        yield (
            f"\n#### {processes} {'process' if processes == 1 else 'processes'}, hold"
            f" {hold * 1000:.0f} ms, {which}\n"
        )
        rows = []
        for name in run.contenders("contended"):
            series = run.find(
                "contended", name, processes=processes, hold=hold, keys=keys
            )
            if series is None:
                rows.append([label(name), "failed", "", "", "", ""])
                continue
            rows.append(
                [
                    label(name),
                    spread(series.median("rate"), *series.spread("rate"), 0),
                    number(series.median("wait50"), 2),
                    spread(series.median("wait99"), *series.spread("wait99"), 1),
                    number(series.spread("wait_max")[1], 1),
                    f"{series.median('jain'):.3f}",
                ]
            )
        yield table(
            [
                "",
                "grants/s",
                "wait p50, ms",
                "wait p99, ms",
                "longest wait, ms",
                "Jain",
            ],
            rows,
        )


def _uncontended(run: Run) -> str:
    # The commits that a lock needs. InnoDB cannot skip the flush of a release.
    limits = {
        "postgresql": "raw-postgresql",
        "mariadb": "raw-pair-mariadb",
        "mysql": "raw-pair-mysql",
        "sqlite": "raw-sqlite",
    }
    rows = []
    for name in run.contenders("uncontended"):
        series = run.find("uncontended", name)
        if series is None:
            rows.append([label(name), "failed", "", "", ""])
            continue
        limit = run.find("uncontended", limits.get(_engine(name), ""))
        rows.append(
            [
                label(name),
                spread(series.median("pair50"), *series.spread("pair50"), 0),
                spread(series.median("pair95"), *series.spread("pair95"), 0),
                "" if limit is None else spread(*ratio(series, limit, "pair50"), 2),
                _against(run, series, "redis-py"),
            ]
        )
    return table(["", "p50, µs", "p95, µs", "p50 : raw limit", "p50 : redis-py"], rows)


def _against(run: Run, series: Series, peer: str) -> str:
    other = run.find("uncontended", peer)
    return "" if other is None else number(ratio(series, other, "pair50")[0], 2)


@dataclass(frozen=True)
class Growth:
    experiment: str
    axis: str
    title: str
    figures: tuple[tuple[str, str], ...]
    file: str


RATE, WAIT, PAIR, JAIN = (
    ("rate", "grants/s"),
    ("wait99", "wait p99, ms"),
    ("pair50", "acquire and release, p50, µs"),
    ("jain", "Jain's index"),
)
GROWTHS = [
    Growth("waiters", "waiters",
        "Waiters for one key, hold 1 ms (up to 50 threads in a process)",
           (RATE, WAIT, JAIN), "waiters"),
    Growth("processes, one key", "processes", "Processes with one key, hold 1 ms",
        (RATE, WAIT, JAIN),
           "processes-one-key"),
    Growth("processes, own keys", "processes",
        "Processes with their own keys, hold 0 ms",
        (RATE, PAIR), "processes"),
    Growth("keys", "keys",
        "Keys chosen at random by 8 processes, hold 0 ms", (RATE, WAIT),
        "keys"),
    Growth("rows", "rows", "Rows in the table, one process with random keys", (PAIR,),
        "rows"),
    Growth("held", "held", "Leases held by one process, including the measured one",
        (PAIR,), "held"),
]  # fmt: skip


def _points(run: Run, growth: Growth, contender: str) -> dict[int, Series]:
    points = {}
    for (experiment, name, place), series in run.series.items():
        if (experiment, name) == (growth.experiment, contender) and series.rounds:
            cell = dict(zip(PLACE, place, strict=True))
            cell["waiters"] = cell["processes"] * cell["threads"]
            cell["held"] += 1
            points[cell[growth.axis]] = series
    return dict(sorted(points.items()))


def _growth(run: Run, growth: Growth) -> str:
    lines = {
        name: _points(run, growth, name) for name in run.contenders(growth.experiment)
    }
    axis = sorted({x for points in lines.values() for x in points})
    rows = [
        [
            label(name),
            title,
            *(
                number(points[x].median(figure)) if x in points else "failed"
                for x in axis
            ),
        ]
        for figure, title in growth.figures
        for name, points in lines.items()
    ]
    return table(["", growth.axis, *(f"{x:,}" for x in axis)], rows)


# Plots.


def _plots(run: Run, directory: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "savefig.dpi": 110,
        }
    )
    directory.mkdir(exist_ok=True)
    _plot_contended(run, plt, directory)
    _plot_uncontended(run, plt, directory)
    for growth in GROWTHS:
        lines = {
            name: _points(run, growth, name)
            for name in run.contenders(growth.experiment)
        }
        if not lines:
            continue
        figure, all_axes = plt.subplots(
            1, len(growth.figures), figsize=(max(5.6, 4.6 * len(growth.figures)), 3.8)
        )
        for axes, (name, title) in zip(_listed(all_axes), growth.figures, strict=True):
            for contender, points in lines.items():
                _line(axes, contender, points, name)
            axes.set(xscale="log", xlabel=growth.axis, title=title)
            plain(axes.xaxis, steps=(1.0,))
            if name in {"jain", "pair50"}:
                # Start at zero, so that a flat line looks flat.
                axes.set_ylim(bottom=0)
            else:
                axes.set_yscale("log")
                plain(axes.yaxis)
            axes.grid(True, which="major", alpha=0.3)
        handles, labels = _listed(all_axes)[0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="lower center",
            ncols=2 if len(growth.figures) < 2 else 5,
            frameon=False,
        )
        figure.suptitle(growth.title, fontsize=10)
        figure.tight_layout(rect=(0, 0.06 if len(growth.figures) > 1 else 0.12, 1, 1))
        figure.savefig(directory / f"{growth.file}.png")
        plt.close(figure)


def _line(axes: Any, contender: str, points: dict[int, Series], name: str) -> None:
    medians = [series.median(name) for series in points.values()]
    (line,) = axes.plot(
        list(points),
        medians,
        label=label(contender),
        color=_color(contender),
        marker="o",
        markersize=4,
    )
    low, high = (
        zip(*(series.spread(name) for series in points.values()), strict=True)
        if points
        else ((), ())
    )
    axes.fill_between(
        list(points), low, high, color=line.get_color(), alpha=0.15, linewidth=0
    )


def _plot_contended(run: Run, plt: Any, directory: Path) -> None:
    from benchmarks.experiments import TARGET

    series = {
        name: run.find("contended", name, **TARGET)
        for name in run.contenders("contended")
    }
    known = {name: one for name, one in series.items() if one is not None}
    if not known:
        return
    figure, all_axes = plt.subplots(
        1, 3, figsize=(12, 0.8 + 0.4 * len(known)), sharey=True
    )
    for axes, (name, title, scale) in zip(
        all_axes,
        (
            ("rate", "grants/s", "linear"),
            ("wait99", "wait p99, ms", "log"),
            ("jain", "Jain's index", "linear"),
        ),
        strict=True,
    ):
        dots(axes, known, name)
        axes.set(xscale=scale, title=title)
        if scale == "log":
            plain(axes.xaxis)
        else:
            axes.set_xlim(left=0)
    figure.suptitle(
        "32 processes, one key, hold 1 ms (dots: the median of the rounds; lines: the"
        " least and largest)"
    )
    figure.tight_layout()
    figure.savefig(directory / "contended.png")
    plt.close(figure)


def _plot_uncontended(run: Run, plt: Any, directory: Path) -> None:
    series = {
        name: run.find("uncontended", name) for name in run.contenders("uncontended")
    }
    known = {name: one for name, one in series.items() if one is not None}
    if not known:
        return
    known = dict(sorted(known.items(), key=lambda item: item[1].median("pair50")))
    figure, axes = plt.subplots(figsize=(9, 0.8 + 0.26 * len(known)))
    dots(axes, known, "pair50")
    axes.set(xscale="log", title="acquire and release, uncontended: p50, µs")
    plain(axes.xaxis)
    figure.tight_layout()
    figure.savefig(directory / "uncontended.png")
    plt.close(figure)


def dots(axes: Any, known: dict[str, Series], name: str) -> None:
    # Dots instead of bars, whose length means nothing on a logarithmic axis.
    for contender, one in known.items():
        median, (low, high) = one.median(name), one.spread(name)
        axes.errorbar(
            [median],
            [label(contender)],
            xerr=[[median - low], [high - median]],
            fmt="o",
            color=_color(contender),
        )
    axes.invert_yaxis()
    axes.grid(True, alpha=0.3)


def plain(axis: Any, steps: tuple[float, ...] | None = None) -> None:
    """Write the numbers of a logarithmic axis in full."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    if steps is None:
        steps = (1.0,) if high / max(low, 1e-9) > 300 else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=steps, numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


COLORS: dict[str, str] = {
    "dlocks-postgresql": "#2f6db3",
    "dlocks-mariadb": "#2a9d8f",
    "dlocks-mysql": "#5b8c5a",
    "dlocks-sqlite": "#7a5195",
    "redis-py": "#d1495b",
    "kazoo": "#edae49",
    "dlocks-redis": "#e07a5f",
    "dlocks-zookeeper": "#b8860b",
}


def _color(contender: str) -> str:
    return next(
        (color for name, color in COLORS.items() if contender.startswith(name)),
        "#9aa0a6",
    )


def _listed(axes: Any) -> list[Any]:
    return list(axes) if hasattr(axes, "__len__") else [axes]


# The page.


def write(raw: dict[str, Any], directory: Path) -> Path:
    """Write RESULTS.md and its plots into a directory, and return the path."""
    run = Run(raw)
    _plots(run, directory / "plots")
    path = directory / "RESULTS.md"
    path.write_text("\n".join(_page(run)) + "\n")
    return path


def _page(run: Run) -> Iterable[str]:
    machine = run.run["machine"]
    how = "`make bench ARGS=--quick`" if run.run["quick"] else "`make bench`"
    yield "# dlocks compared with its peers\n"
    yield f"Written by {how} from its samples. The notes come from NOTES.md.\n"
    if (HERE / "NOTES.md").exists():
        yield (HERE / "NOTES.md").read_text()
    yield "## The machine\n"
    rows = [[name, value] for name, value in machine.items()]
    if any("disturbance" in result for result in run.run["results"]):
        rows.append(busy(run.run))
    rows += [[name, ". ".join(facts)] for name, facts in run.run["servers"].items()]
    yield table(["", ""], rows)
    yield f"\n{_EXPLANATION}"
    if run.run["absent"]:
        yield (
            "Not measured: "
            + "; ".join(
                f"{label(name)} ({why})" for name, why in run.run["absent"].items()
            )
            + ".\n"
        )
    broken = run.broken()
    if broken:
        yield "### Failures\n"
        yield "".join(f"* {line}\n" for line in broken)
    else:
        yield "No lock was held twice at once, and no contender failed.\n"
    if {"contended", "uncontended"} <= {experiment for experiment, _, _ in run.series}:
        yield "## Targets\n"
        yield _ABOUT_TARGETS
        yield _targets(run)
    if run.contenders("contended"):
        yield "\n## Contended\n"
        yield "![Contended](plots/contended.png)"
        yield from _contended(run)
    if run.contenders("uncontended"):
        yield "\n## Uncontended\n"
        yield "Acquire and release by one process with one key, without any work.\n"
        yield "![Uncontended](plots/uncontended.png)\n"
        yield _uncontended(run)
    if any(run.contenders(growth.experiment) for growth in GROWTHS):
        yield "\n## Scaling"
    for growth in GROWTHS:
        if run.contenders(growth.experiment):
            yield f"\n### {growth.title}\n"
            yield f"![{growth.title}](plots/{growth.file}.png)\n"
            yield _growth(run, growth)


def busy(run: dict[str, Any]) -> list[str]:
    """Return the row about other load on the machine."""
    disturbances = sorted(
        result["disturbance"] for result in run["results"] if "disturbance" in result
    )
    shares = ", ".join(
        f"{name} {quantile(disturbances, share):.0%}" for name, share in _SHARES.items()
    )
    return [
        "other load",
        f"{shares} (of the processor, just before each measurement)",
    ]


_SHARES = {"median": 0.5, "p90": 0.9, "most": 1.0}

_ABOUT_TARGETS = """\
Targets for grants, waits and Jain's index apply to 32 processes, one key and a hold of
1 ms. The others apply without contention. A ratio is of two figures of the same round.
The median is shown, with the least and the largest in brackets. A target is reached or
missed if all rounds agree, and otherwise undecided.
"""

_EXPLANATION = """\
The servers and all processes share the cores of this machine with everything else that
runs on it. Compare only figures of one run. The contenders take turns, round by round.
A figure is the median of the rounds, with the least and the largest in brackets.
`flush` is the duration of a write of 8 KiB and its fdatasync. A hold is a sleep, so it
costs no processor time. A wait lasts from the request to the grant. Jain's index of
the waiters' grants is 1 if all had equally many, and 1/n if one had all of them. A
wait that began before the end of the time is completed, and counts. Each holder adds
one to an unguarded counter, which it reads at the beginning of the hold and writes at
the end. So a lock that two held at once is detected. Peers are used as they document
it, and in their favour: their objects are reused, and their leases are not renewed.
Those of dlocks are created for each hold, and renewed.
"""


def label(contender: str | None) -> str:
    from benchmarks.contenders import CONTENDERS

    return CONTENDERS[contender].label if contender in CONTENDERS else str(contender)


def _engine(contender: str) -> str:
    from benchmarks.contenders import CONTENDERS

    return CONTENDERS[contender].server or "sqlite"


def number(value: float, digits: int | None = None) -> str:
    if digits is None:
        digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def spread(value: float, low: float, high: float, digits: int) -> str:
    write: Callable[[float], str] = lambda figure: number(figure, digits)  # noqa: E731
    return (
        write(value) if low == high else f"{write(value)} ({write(low)}–{write(high)})"
    )


def table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [
        head,
        ["---", *("---:" if len(head) > 2 else "---" for _ in head[1:])],
        *rows,
    ]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def main(arguments: list[str]) -> int:
    from django.conf import settings

    if not settings.configured:
        import os

        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")
    source = Path(arguments[0]) if arguments else HERE / "results" / "run.json"
    directory = Path(arguments[1]) if len(arguments) > 1 else HERE
    print("Written:", write(json.loads(source.read_text()), directory))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
