"""Compare dlocks with its peers in one run.

``python -m benchmarks [--quick] [--only …] [--contenders …]``

It starts temporary servers, measures, saves every sample in benchmarks/results/ and
prints which targets are reached. A complete run, with all experiments and contenders,
also writes benchmarks/RESULTS.md and the table of speeds in the READMEs. A partial run
writes benchmarks/results/RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    # A plain ``kill`` must also stop the servers.
    signal.signal(signal.SIGTERM, _end)
    os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
    with (
        tempfile.TemporaryDirectory(prefix="dlocks-benchmarks-") as directory,
        ExitStack() as stack,
    ):
        os.environ["BENCHMARKS_DIRECTORY"] = directory
        try:
            run = _run(options, Path(directory), stack)
        except (FileNotFoundError, RuntimeError) as error:
            print(f"The benchmarks could not start: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    RESULTS.mkdir(exist_ok=True)
    whole = not (options.only or options.contenders or options.quick)
    path = RESULTS / ("run.json" if whole else "part.json")
    path.write_text(json.dumps(run, separators=(",", ":")))
    from benchmarks.report import Run, targets, write, write_speeds

    print("\n".join(targets(Run(run))))
    print("Written:", write(run, HERE if whole else RESULTS), flush=True)
    if whole:
        write_speeds(HERE.parent)
    return 1 if any("error" in result for result in run["results"]) else 0


_ended: list[int] = []


def _end(number: int, frame: object) -> None:
    # Record the signal as well: Python swallows an exception that is raised while it
    # forks.
    _ended.append(number)
    sys.exit(128 + number)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer cells and rounds: about 3 minutes"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=("contended", "uncontended"),
        default=[],
    )
    parser.add_argument(
        "--contenders", default="", help="names, separated by commas; --list shows them"
    )
    parser.add_argument(
        "--list", action="store_true", help="list the contenders and exit"
    )
    options = parser.parse_args(arguments)
    options.contenders = [name for name in options.contenders.split(",") if name]
    return options


def _run(
    options: argparse.Namespace, directory: Path, stack: ExitStack
) -> dict[str, Any]:
    from benchmarks.servers import start

    chosen = _chosen(options)
    needed = {server for names in chosen.values() for server in _servers(names)}
    servers = start(needed, stack)
    ports = {name: server.port for name, server in servers.items()}

    import django

    django.setup()
    from benchmarks import crew, machine, tables
    from benchmarks.contenders import CONTENDERS
    from benchmarks.experiments import EXPERIMENTS

    absent = {}
    for names in chosen.values():
        for name in list(names):
            if why := CONTENDERS[name].missing():
                absent[name] = why
                names.remove(name)
    databases = [
        name
        for name in ("postgresql", "mariadb", "mysql", "mysql-no-binlog")
        if name in servers
    ] + ["sqlite"]
    crew.in_child(tables.create, databases, ports)
    run: dict[str, Any] = {
        "quick": options.quick,
        "machine": machine.describe(directory),
        "servers": {
            name: [server.version(), server.durability]
            for name, server in servers.items()
        },
        "absent": absent,
        "results": [],
    }
    began = time.monotonic()
    steps = [
        step
        for name, names in chosen.items()
        if names
        for step in EXPERIMENTS[name](names, options.quick)
    ]
    total, done = sum(map(len, steps)), 0
    if "zookeeper" in servers:
        # Java compiles code that runs often. A server that has been up for long has
        # done so already.
        crew.measure(
            crew.Cell(
                experiment="",
                contender="kazoo",
                processes=8,
                seconds=8.0 if options.quick else 20.0,
            )
        )
    calm = machine.Calm(10.0 if options.quick else 60.0)
    for step in steps:
        for number, cell in step:
            result = {"round": number, "disturbance": calm.wait(), **crew.measure(cell)}
            if _ended:
                sys.exit(128 + _ended[0])
            run["results"].append(result)
            done += 1
            outcome = (
                result.get("error") or f"{sum(result['grants']) / cell.seconds:.0f}/s"
            )
            minutes = (time.monotonic() - began) / 60
            print(
                f"{minutes:5.1f} min {done:4}/{total} {cell.experiment},"
                f" {cell.contender}: {outcome}",
                flush=True,
            )
    run["machine"]["load after"] = f"{os.getloadavg()[0]:.2f}"
    run["machine"]["minutes"] = f"{(time.monotonic() - began) / 60:.1f}"
    return run


def _chosen(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the contenders of each experiment."""
    from django.conf import settings  # noqa: F401 (contenders import it)

    from benchmarks.contenders import CONTENDERS
    from benchmarks.experiments import DEFAULT

    if options.list:
        print(
            "\n".join(
                f"{name:32}{contender.label}" for name, contender in CONTENDERS.items()
            )
        )
        sys.exit(0)
    if unknown := set(options.contenders) - set(CONTENDERS):
        print(
            f"Unknown contender {', '.join(sorted(unknown))}. --list shows all.",
            file=sys.stderr,
        )
        sys.exit(2)
    experiments = options.only or list(DEFAULT)
    chosen = {}
    for experiment in experiments:
        names = list(options.contenders or DEFAULT[experiment])
        if experiment != "uncontended":
            names = [name for name in names if CONTENDERS[name].waits]
        chosen[experiment] = names
    return chosen


def _servers(names: list[str]) -> set[str]:
    from benchmarks.contenders import CONTENDERS

    return {server for name in names if (server := CONTENDERS[name].server)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
