"""The report: from samples to Markdown and plots.

``python -m benchmarks.report [RUN.json [DIRECTORY]]``
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.samples import jain, quantile

HERE = Path(__file__).parent


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
    """The figures of a run, by experiment and contender."""

    def __init__(self, run: dict[str, Any]) -> None:
        self.run = run
        self.series: dict[tuple[str, str], Series] = {}
        for result in run["results"]:
            place = result["experiment"], result["contender"]
            series = self.series.setdefault(place, Series())
            if "error" in result:
                series.errors.append(result["error"])
            elif not result["waits"]:
                series.errors.append("no grant in time")
            else:
                series.rounds[result["round"]] = _figures(result)

    def find(self, experiment: str, contender: str | None) -> Series | None:
        """Return the figures of a contender, or None if there are none."""
        series = self.series.get((experiment, contender or ""))
        return series if series and series.rounds else None

    def contenders(self, experiment: str) -> list[str]:
        return [name for found, name in self.series if found == experiment]

    def broken(self) -> list[str]:
        """Describe the contenders that granted a key twice at once, or failed."""
        lines = []
        for (experiment, contender), series in self.series.items():
            if lost := sum(figures["lost"] for figures in series.rounds.values()):
                lines.append(
                    f"{contender}, {experiment}: two held the lock at once; {lost:.0f}"
                    " updates lost."
                )
            lines += [
                f"{contender}, {experiment}: {error.strip().splitlines()[-1]}"
                for error in series.errors
            ]
        return lines


def _figures(result: dict[str, Any]) -> dict[str, float]:
    return {
        "rate": sum(result["grants"]) / result["seconds"],
        "wait99": quantile(sorted(result["waits"]), 0.99) / 1e3,
        "pair50": quantile(sorted(result["pairs"]), 0.5),
        "jain": jain(result["grants"]),
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
        return "yes" if reached else "no" if missed else "undecided"


def _crowd(contender: str, figure: str, peer: str | None, at_least: float) -> Target:
    return Target("contended", contender, figure, peer, at_least=at_least)


def _pair(contender: str, peer: str | None, at_most: float) -> Target:
    return Target("uncontended", contender, "pair50", peer, at_most=at_most)


TARGETS = [
    _pair("dlocks-postgresql", "raw-postgresql", 1.5),
    _pair("dlocks-postgresql", "redis-py-always", 1.1),
    _pair("dlocks-postgresql", "kazoo", 0.4),
    _pair("dlocks-postgresql", "db-mutex-postgresql", 0.4),
    _pair("dlocks-mariadb", "raw-pair-mariadb", 1.5),
    _pair("dlocks-mysql", "raw-pair-mysql", 1.5),
    _pair("dlocks-postgresql-transaction", "django-row-postgresql", 1.3),
    _pair("dlocks-mariadb-transaction", "django-row-mariadb", 1.3),
    _pair("dlocks-mysql-transaction", "django-row-mysql", 1.3),
    _pair("dlocks-sqlite", "raw-sqlite", 1.6),
    _pair("dlocks-postgresql-guard", "django-locked-postgresql", 2.0),
    _pair("dlocks-postgresql-insert", "dlocks-postgresql", 2.5),
    _pair("dlocks-postgresql-1000-keys", None, 500_000),
    _pair("dlocks-postgresql-10000-keys", None, 5_000_000),
    _crowd("dlocks-postgresql", "rate", "kazoo", 1.0),
    Target("contended", "dlocks-postgresql", "wait99", "kazoo", at_most=1.1),
    _crowd("dlocks-postgresql", "jain", None, 0.98),
    _crowd("dlocks-mariadb", "rate", "kazoo", 0.8),
    _crowd("dlocks-mariadb", "jain", None, 0.95),
    _crowd("dlocks-sqlite", "rate", "kazoo", 0.8),
    _crowd("dlocks-sqlite", "jain", None, 0.95),
    _crowd("dlocks-mysql", "rate", "kazoo", 0.4),
    _crowd("dlocks-postgresql-session", "rate", "advisory", 0.7),
]

FIGURES = {
    "rate": "grants/s",
    "wait99": "p99 of the wait",
    "jain": "Jain's index",
    "pair50": "p50 of acquire and release, µs",
}


def targets(run: Run) -> Iterable[str]:
    """Yield a line for each target that was measured."""
    for target in TARGETS:
        one = run.find(target.experiment, target.contender)
        other = run.find(target.experiment, target.peer)
        if one is None or (target.peer and other is None):
            continue
        if other is None:
            value, (low, high) = one.median(target.figure), one.spread(target.figure)
        else:
            value, low, high = ratio(one, other, target.figure)
        bound = target.at_least if target.at_most is None else target.at_most
        sign = "≥" if target.at_most is None else "≤"
        peer = f" : {label(target.peer)}" if target.peer else ""
        yield (
            f"{target.verdict(low, high):9} {spread(value, low, high)},"
            f" {sign} {bound:,}: {label(target.contender)}:"
            f" {FIGURES[target.figure]}{peer}"
        )


# Tables.


def _contended(run: Run) -> str:
    rows = []
    for name in run.contenders("contended"):
        series = run.find("contended", name)
        if series is None:
            rows.append([label(name), "failed", "", ""])
            continue
        figures = (series.median(figure) for figure in ("rate", "wait99", "jain"))
        rows.append([label(name), *map(number, figures)])
    return table(["", "grants/s", "wait p99, ms", "Jain"], rows)


# The commits that a lock needs. InnoDB cannot skip the flush of a release.
LIMITS = {
    "postgresql": "raw-postgresql",
    "mariadb": "raw-pair-mariadb",
    "mysql": "raw-pair-mysql",
    "sqlite": "raw-sqlite",
}


def _uncontended(run: Run) -> str:
    from benchmarks.contenders import CONTENDERS

    rows = []
    for name in run.contenders("uncontended"):
        series = run.find("uncontended", name)
        if series is None:
            rows.append([label(name), "failed", ""])
            continue
        limit = run.find("uncontended", LIMITS.get(_engine(name)))
        to_limit = ""
        if limit and name.startswith("dlocks") and CONTENDERS[name].waits:
            to_limit = number(ratio(series, limit, "pair50")[0], 2)
        rows.append([label(name), number(series.median("pair50"), 0), to_limit])
    return table(["", "p50, µs", ": raw limit"], rows)


# The plot.


def _plot(run: Run, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = run.contenders("uncontended")
    known = {name: one for name in names if (one := run.find("uncontended", name))}
    if not known:
        return
    known = dict(sorted(known.items(), key=lambda item: item[1].median("pair50")))
    figure, axes = plt.subplots(figsize=(9, 0.8 + 0.26 * len(known)))
    # Dots instead of bars, whose length means nothing on a logarithmic axis.
    for contender, one in known.items():
        median, (low, high) = one.median("pair50"), one.spread("pair50")
        axes.errorbar(
            [median],
            [label(contender)],
            xerr=[[median - low], [high - median]],
            fmt="o",
            color="#2f6db3" if contender.startswith("dlocks") else "#9aa0a6",
        )
    axes.invert_yaxis()
    axes.grid(True, alpha=0.3)
    axes.set(xscale="log", title="acquire and release: p50, µs (lines: all rounds)")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# The pages.


def write(raw: dict[str, Any], directory: Path) -> Path:
    """Write RESULTS.md and its plot into a directory, and return the path."""
    run = Run(raw)
    _plot(run, directory / "plots" / "uncontended.png")
    path = directory / "RESULTS.md"
    path.write_text("\n".join(_page(run)) + "\n")
    return path


def _page(run: Run) -> Iterable[str]:
    how = "`make bench ARGS=--quick`" if run.run["quick"] else "`make bench`"
    yield f"# dlocks compared with its peers\n\nThe last run of {how}.\n\n{METHOD}"
    yield "".join(
        f"* Not measured: {label(name)} ({why})\n"
        for name, why in run.run["absent"].items()
    )
    yield "".join(f"* {line}\n" for line in run.broken()) or (
        "No lock was held twice at once, and no contender failed.\n"
    )
    if run.contenders("uncontended"):
        yield "## Uncontended\n\n![Uncontended](plots/uncontended.png)\n"
        yield _uncontended(run)
    if run.contenders("contended"):
        yield "\n## Contended\n\n32 processes, one key, hold 1 ms.\n"
        yield _contended(run)
    yield "\n## The machine\n"
    facts = [[name, value] for name, value in run.run["machine"].items()]
    facts += [[name, ". ".join(what)] for name, what in run.run["servers"].items()]
    if loads := [
        one["disturbance"] for one in run.run["results"] if "disturbance" in one
    ]:
        facts.append(["other load", f"median {statistics.median(loads):.0%}"])
    yield table(["", ""], facts)


METHOD = """\
Server and processes share the machine, so compare figures of one run only. The
contenders take turns, round by round, and a figure is the median of the rounds. A wait
lasts from the request to the grant. Jain's index is 1 if all waiters had equally many
grants. Each holder adds one to an unguarded counter, so a lock that two held at once is
found. Peers are used as they document it and in their favour: their objects are reused,
and their leases are not renewed. Those of dlocks are made for each hold, and renewed.
The raw limit is what a lock has to commit, by the driver alone.
"""

# The rows of the READMEs' table, and their names there.
SPEEDS = {
    "pglock": ("django-pglock",) * 2,
    "redis-py": ("redis-py, in memory", "redis-py，内存"),
    "pgware": ("django-pgware",) * 2,
    "dlocks-sqlite": ("dlocks, SQLite", "dlocks，SQLite"),
    "dlocks-postgresql": ("dlocks, PostgreSQL", "dlocks，PostgreSQL"),
    "redis-py-always": (
        "redis-py, as durable as a database", "redis-py，与数据库同等持久",
    ),
    "dlocks-mariadb": ("dlocks, MariaDB", "dlocks，MariaDB"),
    "django-row-postgresql": (
        "Django, PostgreSQL, `select_for_update()`",
        "Django，PostgreSQL，`select_for_update()`",
    ),
    "dlocks-mysql": ("dlocks, MySQL", "dlocks，MySQL"),
    "dlocks-postgresql-transaction": (
        "dlocks, PostgreSQL, in a transaction", "dlocks，PostgreSQL，事务之内",
    ),
    "kazoo": ("kazoo (ZooKeeper)", "kazoo（ZooKeeper）"),
    "db-mutex-postgresql": (
        "django-db-mutex, PostgreSQL", "django-db-mutex，PostgreSQL",
    ),
}  # fmt: skip
BEGIN, END = "<!-- speeds: written by make bench -->\n", "<!-- end of speeds -->\n"


def speeds(results: str, language: int) -> str:
    """Return the READMEs' table, from the text of RESULTS.md, fastest first.

    ``language`` is 0 for English and 1 for Chinese.
    """
    section = results.partition("## Uncontended\n")[2].partition("\n## ")[0]
    medians = dict(re.findall(r"^\| ([^|]+?) \| ([\d,]+) \|", section, re.MULTILINE))
    rows = [
        (names[language], medians[label(contender)])
        for contender, names in SPEEDS.items()
    ]
    rows.sort(key=lambda row: int(row[1].replace(",", "")))
    lines = ["| | |", "|---|---:|", *(f"| {name} | {p50} µs |" for name, p50 in rows)]
    return "\n".join(lines) + "\n"


def write_speeds(root: Path) -> None:
    """Write the tables of speeds in the READMEs between their markers."""
    results = (root / "benchmarks" / "RESULTS.md").read_text()
    for language, name in enumerate(("README.md", "README.zh-CN.md")):
        text = (root / name).read_text()
        before, begin, rest = text.partition(BEGIN)
        _, end, after = rest.partition(END)
        table = speeds(results, language)
        (root / name).write_text(f"{before}{begin}\n{table}\n{end}{after}")


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


def spread(value: float, low: float, high: float) -> str:
    return f"{number(value)} ({number(low)}–{number(high)})"


def table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [
        head,
        ["---", *("---:" if len(head) > 2 else "---" for _ in head[1:])],
        *rows,
    ]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def main(arguments: list[str]) -> int:
    """Write the report of a run again, as from benchmarks/results/run.json."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")
    source = Path(arguments[0]) if arguments else HERE / "results" / "run.json"
    raw = json.loads(source.read_text())
    print("Written:", write(raw, Path(arguments[1]) if arguments[1:] else HERE))
    print("\n".join(targets(Run(raw))))
    if not arguments[1:]:
        write_speeds(HERE.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
