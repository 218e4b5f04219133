"""Run fault campaigns against locks, and report the promises that broke.

    python -m tests.nemesis [--minutes 5] [--engine postgresql ...] [--seed 1]
        [--busy] [--bugs] [--peers] [--out DIRECTORY]

Campaigns run one after another until the time is over, each with its own seed. Their
histories are kept in nemesis/ENGINE-SEED/. With ``--bugs`` it checks instead that every
seeded bug is found, and that running without a lock breaks everything. With ``--peers``
it runs the same faults against other locks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.nemesis.bugs import BUGS, WITHOUT_A_LOCK
from tests.nemesis.campaign import run, server_for
from tests.nemesis.peers import PEERS
from tests.nemesis.task import Plan, keys_of, keys_of_each
from tests.run import keep_databases_in_memory
from tests.servers import Redis

ENGINES = ("postgresql", "mariadb", "mysql", "sqlite")
MORE = ("galera",)
# Seconds of a campaign with few holds between two faults, and of one with many.
CROWDED, BUSY = 30.0, 90.0

PROCESSES = {"stop": 4.0, "kill": 3.0}
SERVER = {"sessions": 1.0, "restart": 0.1, "crash": 0.15}
KEPT = ("default", "optimistic")
NETWORK: dict[str, Any] = {
    "faults": {**PROCESSES, "partition": 3.0},
    "through": "network",
    "ttl": 2.0,
}
REPLIES = {"swallow": 2.0, "delay": 1.0, "late": 1.0, "cut": 1.0}


def plans(engine: str, seed: int, *, busy_only: bool = False) -> Iterator[Plan]:
    """Yield the plans for an engine, or only those with many operations.

    Later calls use other seeds.
    """
    if engine == "galera":
        yield galera_plan(seed)
        return
    for plan in _plans(engine, seed):
        if busy_only and plan.nested:
            # Its callers wait most of the time.
            continue
        if not busy_only:
            yield plan
        yield replace(
            plan,
            seed=plan.seed + 50,
            seconds=BUSY,
            workers=8,
            keys=keys_of("alone", 12) if plan.nested else keys_of_each(6),
            pause=0.8,
            think=0.002,
            odd=0.005,
        )


def _plans(engine: str, seed: int) -> Iterator[Plan]:
    plan = Plan(engine=engine, seconds=CROWDED, seed=seed, pause=0.5)
    nested = replace(
        plan,
        seed=seed + 6,
        keys=keys_of("alone", 4),
        faults=PROCESSES,
        pause=3.0,
        nested=0.7,
    )
    if engine == "sqlite":
        # Inside a transaction, no key can be waited for.
        yield replace(nested, transactions=False)
        yield replace(plan, faults=PROCESSES)
        yield replace(plan, seed=seed + 1, faults=PROCESSES, transactions=False)
        return
    yield nested
    yield replace(plan, faults=PROCESSES | SERVER)
    yield replace(plan, seed=seed + 1, faults=PROCESSES | REPLIES, through="proxy")
    # The insert backend is left out. It deletes rows, so its tokens grow only while the
    # clock does not step back, as the README says.
    clocks = {"kill": 3.0, "clock": 3.0, "sessions": 1.0}
    if engine != "mysql":
        # Under libfaketime, MySQL's server hangs after some steps of its clock.
        yield replace(
            plan, seed=seed + 2, faults=clocks, clock=True, skew=5.0, aliases=KEPT
        )
    yield replace(plan, seed=seed + 3, faults={**PROCESSES, "crash": 0.6})
    yield replace(plan, seed=seed + 5, **NETWORK)
    if engine == "postgresql":
        yield replace(plan, seed=seed + 4, faults=PROCESSES, through="pgbouncer")


def galera_plan(seed: int) -> Plan:
    """Return a plan for a cluster of three nodes.

    Pessimistic locks meet many more conflicts there, so it uses optimistic ones.
    """
    faults = {**PROCESSES, "node_crash": 0.3, "node_stop": 0.6}
    return Plan(
        engine="galera",
        seconds=BUSY,
        seed=seed,
        ttl=3.0,
        aliases=("optimistic",),
        faults=faults,
        pause=0.5,
    )


def bug_plan(name: str, seed: int = 7) -> Plan:
    """Return the plan that shows a bug. By default it has one exclusive key.

    The campaign ends when the bug is found.
    """
    bug = BUGS[name]
    plan = Plan(
        engine="postgresql",
        seconds=60.0,
        seed=seed,
        pause=0.25,
        keys=("alone",),
        faults=bug.faults,
        bug=name,
    )
    return replace(plan, **bug.plan)


def peer_plan(peer: str, seed: int, seconds: float) -> Plan:
    """Return the same plan for each peer.

    It has two exclusive keys and leases only. Holders are stopped, killed or cut off.
    """
    through = PEERS[peer].through if peer else "direct"
    return Plan(
        engine="postgresql", seconds=seconds, seed=seed, peer=peer, through=through,
            keys=("alone", "either"),
        faults={**PROCESSES, "crash": 0.3}, pause=0.5, aliases=("default",),
        transactions=False, oddities=False,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.nemesis", description=__doc__
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument(
        "--engine", nargs="*", choices=ENGINES + MORE, default=list(ENGINES)
    )
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--out", type=Path, default=Path("nemesis"))
    parser.add_argument("--bugs", nargs="*", choices=list(BUGS), default=None)
    parser.add_argument(
        "--busy",
        action="store_true",
        help="only campaigns with many operations between two faults",
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="dlocks and other locks under the same faults",
    )
    options = parser.parse_args()
    # A disk that stalls would delay the commits, and so break the limits of waits.
    keep_databases_in_memory()
    if options.peers:
        return compare(options.seed, 60 * options.minutes, options.out)
    if options.bugs is not None:
        return find_bugs(options.bugs or list(BUGS), options.seed, options.out)
    return campaigns(options)


def campaigns(options: argparse.Namespace) -> int:
    began, seed, failed = time.monotonic(), options.seed, 0
    counts: Counter[str] = Counter()
    while True:
        for engine in options.engine:
            for plan in plans(engine, seed, busy_only=options.busy):
                left = began + 60 * options.minutes - time.monotonic()
                if left <= 0:
                    return report(counts, failed)
                plan = replace(plan, seconds=min(plan.seconds, max(left, 10.0)))
                where = options.out / f"{engine}-{plan.seed}"
                found = run(
                    plan,
                    where,
                    lambda text, name=where.name: print(f"{name}: {text}", flush=True),
                )
                (where / "report.txt").write_text("\n".join(found.lines()) + "\n")
                counts.update(found.counts)
                failed += not found.passed
                what = " · ".join(
                    f"{name} {weight:g}" for name, weight in plan.faults.items()
                )
                print(
                    f"{where}: {'nothing broken' if found.passed else 'BROKEN'}"
                    f" ({plan.through}; {what})"
                )
                if not found.passed:
                    print("\n".join(f"  {line}" for line in found.lines()), flush=True)
        seed += 100


def report(counts: Counter[str], failed: int) -> int:
    for name, number in sorted(counts.items()):
        print(f"{number:8d} {name}")
    print(f"{failed} campaigns broke a promise" if failed else "No promise was broken.")
    return 1 if failed else 0


def compare(seed: int, seconds: float, out: Path) -> int:
    """Run the same schedule of faults under each lock, and print a table."""
    os.environ["DLOCKS_TEST_APPS"] = "db_mutex"
    columns = (
        "grants",
        "faults",
        "faults that hit one holding",
        "updates without a fence that were lost",
    )
    print(
        "| | "
        + " | ".join(
            (*columns, "two held at once", "guarded updates lost", "longest gap, s")
        )
        + " |"
    )
    print("|---|" + "---:|" * (len(columns) + 3))
    status = 0
    for peer in ("", *PEERS):
        with contextlib.ExitStack() as stack:
            locks = stack.enter_context(Redis()) if peer and PEERS[peer].redis else None
            found = run(
                peer_plan(peer, seed, seconds),
                out / f"peer-{peer or 'dlocks'}-{seed}",
                locks=locks,
            )
        (out / f"peer-{peer or 'dlocks'}-{seed}" / "report.txt").write_text(
            "\n".join(found.lines()) + "\n"
        )
        violations = {name: len(some) for name, some in found.violations.items()}
        guarded = "none is offered" if peer else violations.get("updates", 0)
        cells = [found.counts[name] for name in columns]
        cells += [violations.get("exclusion", 0), guarded, f"{found.longest_gap:.1f}"]
        label = PEERS[peer].label if peer else "dlocks"
        print(f"| {label} | {' | '.join(map(str, cells))} |", flush=True)
        status |= bool(violations) and not peer
    return status


def find_bugs(names: list[str], seed: int, out: Path) -> int:
    missed = []
    with server_for("postgresql", clock=True) as server:
        nothing = Plan(
            engine="postgresql", seconds=20, seed=seed, locked=False, oddities=False
        )
        found = run(nothing, out / "no-lock", server=server)
        broken = (f"{name} {len(some)}" for name, some in found.violations.items())
        print(f"no lock at all: {', '.join(broken)}")
        if not set(found.violations) >= WITHOUT_A_LOCK:
            missed.append("no lock at all")
        for name in names:
            began = time.monotonic()
            found = run(
                bug_plan(name, seed), out / f"bug-{name}", server=server, prepared=True
            )
            shown = set(found.violations) & set(BUGS[name].shows)
            if not shown:
                missed.append(name)
            print(
                f"{'caught' if shown else 'MISSED'} in {time.monotonic() - began:4.1f}"
                f" s: {name} {sorted(shown)}",
                flush=True,
            )
    print(
        f"{len(names) + 1 - len(missed)} of {len(names) + 1} caught"
        + (f"; missed: {', '.join(missed)}" if missed else "")
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
