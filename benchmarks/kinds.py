"""Compare locks in databases, Redis and ZooKeeper.

``python -m benchmarks.kinds [--quick]``

It starts temporary servers, and measures their speed and their behaviour under faults
in one run. It saves the samples as benchmarks/results/kinds.json, and writes
benchmarks/KINDS.md and benchmarks/plots/kinds.png. With --quick it writes them into
benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.__main__ import HERE, RESULTS, _end, _ended
from benchmarks.report import Run, busy, dots, label, number, plain, spread, table

NAMES = [
    "dlocks-postgresql",
    "dlocks-postgresql-session",
    "dlocks-mariadb",
    "dlocks-sqlite",
    "dlocks-redis",
    "dlocks-redis-always",
    "dlocks-redlock",
    "dlocks-zookeeper",
    "redis-py",
    "redis-py-always",
    "kazoo",
]
# Contenders whose grants survive a power cut of the machine.
DURABLE = {"dlocks-postgresql", "dlocks-mariadb", "dlocks-sqlite",
    "dlocks-redis-always", "dlocks-zookeeper",
           "redis-py-always", "kazoo"}  # fmt: skip

MS = 0.001


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kinds", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one short round of each, to see that it runs",
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _end)
    os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
    with (
        tempfile.TemporaryDirectory(prefix="dlocks-benchmarks-") as directory,
        ExitStack() as stack,
    ):
        os.environ["BENCHMARKS_DIRECTORY"] = directory
        try:
            run = _run(options.quick, Path(directory), stack)
        except (FileNotFoundError, RuntimeError) as error:
            print(f"Could not begin: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "kinds.json").write_text(json.dumps(run, separators=(",", ":")))
    print("Written:", write(run, RESULTS if options.quick else HERE), flush=True)
    return 1 if Run(run).broken() else 0


def _run(quick: bool, directory: Path, stack: ExitStack) -> dict[str, Any]:
    from benchmarks.contenders import CONTENDERS
    from benchmarks.servers import start

    servers = start(
        {server for name in NAMES for server in CONTENDERS[name].servers()}, stack
    )

    import django

    django.setup()
    from benchmarks import crew, faults, machine, tables

    databases = ["postgresql", "mariadb", "sqlite"]
    crew.in_child(
        tables.create,
        databases,
        {name: server.port for name, server in servers.items()},
    )
    crew.in_child(faults.make_table, databases, NAMES)
    run: dict[str, Any] = {
        "quick": quick,
        "machine": machine.describe(directory),
        "servers": {
            name: [server.version(), server.durability]
            for name, server in servers.items()
            if not name.startswith("redis-") or name == "redis-always"
        },
        "ttl": faults.TTL,
        "results": [],
    }
    began = time.monotonic()
    # Java compiles code that runs often. A server that has been up for long has done so
    # already.
    crew.measure(
        crew.Cell(
            experiment="",
            contender="kazoo",
            processes=8,
            seconds=2.0 if quick else 15.0,
        )
    )
    calm = machine.Calm(5.0 if quick else 30.0)

    def tell(text: str) -> None:
        if _ended:
            sys.exit(128 + _ended[0])
        print(f"{(time.monotonic() - began) / 60:5.1f} min {text}", flush=True)

    for number_of_round, cell in _cells(crew.Cell, quick):
        result = {
            "round": number_of_round,
            "disturbance": calm.wait(),
            **crew.measure(cell),
        }
        run["results"].append(result)
        tell(
            f"{cell.experiment}, {cell.contender}: "
            + (result.get("error") or f"{sum(result['grants']) / cell.seconds:.0f}/s")
        )
    run["kill"] = faults.kill(NAMES)
    tell(f"kill: {run['kill']}")
    run["pause"] = {}
    for work in faults.WORK:
        run["pause"][work] = faults.pause(NAMES, work)
        tell(f"pause, {work}: {run['pause'][work]}")
    run["restart"] = {}
    for name in NAMES:
        mine = [servers[server] for server in CONTENDERS[name].servers()]
        # Of several servers, crash first one, then a majority.
        sizes = sorted({1, len(mine) // 2 + 1}) if mine else []
        run["restart"][name] = [
            [size, len(mine), faults.restart(name, mine[:size])] for size in sizes
        ]
        tell(f"restart, {name}: {run['restart'][name]}")
    run["machine"]["load after"] = f"{os.getloadavg()[0]:.2f}"
    run["machine"]["minutes"] = f"{(time.monotonic() - began) / 60:.1f}"
    return run


def _cells(cell: Any, quick: bool) -> Iterator[tuple[int, Any]]:
    # The contenders take turns, so that other load on the machine affects all of them.
    for turn in range(1 if quick else 12):
        for name in NAMES:
            yield (
                turn,
                cell(
                    experiment="uncontended", contender=name, seconds=0.35, warm_up=0.1
                ),
            )
    for turn in range(1 if quick else 3):
        for name in NAMES:
            yield (
                turn,
                cell(
                    experiment="contended", contender=name, processes=8, hold=MS,
                    seconds=0.7 if quick else 2.0, warm_up=0.4,
                ),
            )  # fmt: skip


def write(raw: dict[str, Any], directory: Path) -> Path:
    """Write KINDS.md and its plot into a directory, and return the path."""
    run = Run(raw)
    _plot(run, directory / "plots")
    path = directory / "KINDS.md"
    path.write_text("\n".join(_page(run)) + "\n")
    return path


def _plot(run: Run, directory: Path) -> None:
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
    figure, all_axes = plt.subplots(
        1, 3, figsize=(13, 0.9 + 0.36 * len(NAMES)), sharey=True
    )
    for axes, (experiment, name, title) in zip(
        all_axes,
        (
            ("uncontended", "pair50", "acquire and release, alone: p50, µs"),
            ("contended", "rate", "8 processes, one key: grants/s"),
            ("contended", "wait99", "8 processes, one key: wait p99, ms"),
        ),
        strict=True,
    ):
        series = {each: run.find(experiment, each) for each in NAMES}
        dots(axes, {each: one for each, one in series.items() if one is not None}, name)
        axes.set(title=title)
        if name == "rate":
            axes.set_xlim(left=0)
        else:
            axes.set_xscale("log")
            plain(axes.xaxis)
    figure.suptitle(
        "Locks in databases, Redis and ZooKeeper (dots: the median of the rounds;"
        " lines: least and largest)"
    )
    figure.tight_layout()
    figure.savefig(directory / "kinds.png")
    plt.close(figure)


def _page(run: Run) -> Iterable[str]:
    raw = run.run
    yield "# Locks in a database, in Redis and in ZooKeeper\n"
    yield (
        "Written by `make kinds` from its measurements. The text comes from"
        " KINDS_NOTES.md.\n"
    )
    if (HERE / "KINDS_NOTES.md").exists():
        yield (HERE / "KINDS_NOTES.md").read_text()
    yield "## The machine\n"
    rows = [[name, value] for name, value in raw["machine"].items()]
    rows.append(busy(raw))
    rows += [[name, ". ".join(facts)] for name, facts in raw["servers"].items()]
    rows.append(
        ["sqlite", "WAL, synchronous=FULL: each commit is flushed, as the servers do"]
    )
    rows.append(["redlock", "five servers like `redis`, on one machine"])
    yield table(["", ""], rows)
    if broken := run.broken():
        yield "\n### Failures\n"
        yield "".join(f"* {line}\n" for line in broken)
    yield "\n## Speed\n"
    yield "![Speed](plots/kinds.png)\n"
    yield (
        "Compare only figures of one run. A figure is the median of the rounds, with"
        " the least and the largest in"
    )
    yield (
        "brackets. *Durable*: a grant is on the disk before its caller receives it."
        " Alone: one process, one key. The"
    )
    yield (
        "other columns: 8 processes that want one key and hold it for 1 ms. Handover:"
        " from the release of a holder to"
    )
    yield (
        "the start of the next one. Jain's index is 1 if all waiters had equally many"
        " grants.\n"
    )
    yield table(
        [
            "",
            "durable",
            "alone, p50, µs",
            "p95, µs",
            "grants/s",
            "wait p99, ms",
            "handover p50, ms",
            "Jain",
        ],
        [_speed(run, name) for name in NAMES],
    )
    yield (
        "\nThe locks whose grants survive a power cut, the best first, by their"
        " medians:\n"
    )
    for title, experiment, name, sign in _RANKINGS:
        ranked = map(label, _ranked(run, experiment, name, sign))
        yield f"* **{title}**: {'; '.join(ranked)}"
    yield ""
    yield "## Reliability under faults\n"
    yield (
        f"Leases and sessions last {raw['ttl']} s. *Killed*: seconds from `kill -9` of"
        " the holder until a waiter has the"
    )
    yield (
        "lock. *Paused*: the holder reads a number, is stopped for longer than its"
        " lease, and then writes that number"
    )
    yield (
        "plus one. Meanwhile the next holder has done the same. *Restarted*: `kill -9`"
        " of the server while a lock with"
    )
    yield (
        "a lease of 30 s is held, and a new start. The column says whether another"
        " caller acquired the lock as well, and"
    )
    yield "for how long the first holder did not know.\n"
    yield table(
        [
            "",
            "killed, s",
            "paused: plain write",
            "… compared by token",
            "… guarded commit",
            "server restarted",
        ],
        [_reliability(raw, name) for name in NAMES],
    )
    yield (
        "\nTokens of Redis and of a majority grow with the servers' clocks while the"
        " servers keep their data. For these,"
    )
    yield (
        '"refused" is no promise. A guarded commit needs the lock in the database of'
        " the data.\n"
    )
    yield "## Ease and moving parts\n"
    yield (
        "In addition to a Django project on PostgreSQL, MariaDB or SQLite. These"
        " numbers are counted, not measured. The"
    )
    yield "second number of servers is for availability after the loss of one.\n"
    yield table(
        [
            "",
            "further servers",
            "further packages",
            "aliases in the settings",
            "can be part of the transaction",
        ],
        _PARTS,
    )


def _speed(run: Run, name: str) -> list[str]:
    one, many = run.find("uncontended", name), run.find("contended", name)
    durable = (
        "yes" if name in DURABLE else "no lease" if name.endswith("session") else "no"
    )
    alone = ["failed", ""] if one is None else [
        spread(one.median("pair50"), *one.spread("pair50"), 0),
            number(one.median("pair95"), 0),
    ]  # fmt: skip
    if many is None:
        return [label(name), durable, *alone, "failed", "", "", ""]
    gap = many.median("handover50")
    return [
        label(name),
        durable,
        *alone,
        spread(many.median("rate"), *many.spread("rate"), 0),
        spread(many.median("wait99"), *many.spread("wait99"), 0),
        "no waits" if math.isnan(gap) else number(gap, 2),
        f"{many.median('jain'):.2f}",
    ]


_RANKINGS = [
    ("alone", "uncontended", "pair50", 1),
    ("grants/s", "contended", "rate", -1),
    ("wait p99", "contended", "wait99", 1),
]


def _ranked(run: Run, experiment: str, figure: str, sign: int) -> list[str]:
    known = {
        name: one
        for name in NAMES
        if name in DURABLE and (one := run.find(experiment, name)) is not None
    }
    return sorted(known, key=lambda name: sign * known[name].median(figure))


def _reliability(raw: dict[str, Any], name: str) -> list[str]:
    seconds = raw["kill"][name]
    restarts = [
        outcome if of == 1 else f"{crashed} of {of}: {outcome}"
        for crashed, of, outcome in raw["restart"][name]
    ]
    return [
        label(name),
        "not within 12" if seconds is None else number(seconds, 1),
        *(outcomes[name] for outcomes in raw["pause"].values()),
        "; ".join(restarts) or "no server",
    ]


_PARTS = [
    ["dlocks, database", "none", "none", "none", "yes"],
    ["dlocks, session locks of the database", "none", "none", "1", "no"],
    ["dlocks, Redis", "1, or 5 with a replica and Sentinels", "1", "1", "no"],
    ["dlocks, Redlock", "5", "1", "6", "no"],
    ["dlocks, ZooKeeper", "1, or 3; and Java", "1", "1", "no"],
    ["redis-py", "1, or 5 with a replica and Sentinels", "1", "–", "no"],
    ["kazoo", "1, or 3; and Java", "1", "–", "no"],
]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
