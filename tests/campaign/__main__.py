"""Run random rounds of callers that share holds, and report the findings.

    python -m tests.campaign [--seed 1] [--rounds 100 | --minutes 5]
        [--kind threads tasks keys generators] [--backend memory|sqlite|postgresql]
        [--shrink 3] [--plan FILE] [--json FILE]

Each kind gets the same number of rounds. A finding is printed with the seed and the
plan of its round. ``--shrink`` searches for the smallest plans of that many findings,
and ``--plan`` executes a stored plan again and again. The order in which threads run is
not part of a plan, so a finding may need several attempts. ``--without`` leaves steps
out, such as those of a known fault.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BACKENDS = {
    "memory": "tests.campaign.backends.SlowMemoryBackend",
    "sqlite": "tests.campaign.backends.SlowDatabaseBackend",
    "postgresql": "tests.campaign.backends.SlowDatabaseBackend",
}
# Seconds between two switches of threads. Python's default is 0.005.
SWITCH_EVERY = 0.0001
# Executions of a smaller plan that show no finding, after which it is given up.
ATTEMPTS = 16
# Seconds for the search for one smallest plan.
SHRINK_FOR = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaign", description=__doc__
    )
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--rounds", type=int, default=100, help="of each kind")
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument("--kind", nargs="*", default=None)
    parser.add_argument("--backend", choices=list(BACKENDS), default="memory")
    parser.add_argument("--parallel", type=int, default=8, help="rounds side by side")
    parser.add_argument("--shrink", type=int, default=0, metavar="FINDINGS")
    parser.add_argument("--quiet", action="store_true", help="print only figures")
    parser.add_argument("--only", nargs="*", help="kinds of findings to print")
    parser.add_argument("--without", nargs="*", default=[], help="steps by their word")
    parser.add_argument("--plan", type=Path, help="a plan that --shrink has stored")
    parser.add_argument("--out", type=Path, default=Path("campaign"))
    parser.add_argument("--json", type=Path, help="where to write the counts")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        prepare(options.backend, stack)
        return campaign(options)


def prepare(backend: str, stack: contextlib.ExitStack) -> None:
    """Set Django up, with a server and tables where the backend needs them."""
    alias = {"BACKEND": BACKENDS[backend], "OPTIONS": {"timeout": 3.0}}
    os.environ["DLOCKS_TEST_ALIASES"] = json.dumps({"campaign": alias})
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    if backend != "memory":
        from tests.run import keep_databases_in_memory

        keep_databases_in_memory()
        os.environ["DLOCKS_TEST_ENGINE"] = backend
        if backend == "sqlite":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            os.environ["DLOCKS_TEST_NAME"] = f"{folder}/campaign.sqlite3"
        else:
            from tests.nemesis import database
            from tests.nemesis.campaign import server_for

            server = stack.enter_context(server_for(backend))
            database.create(server)
            os.environ.update(server.environment)
            os.environ["DLOCKS_TEST_NAME"] = database.NAME
    import django

    django.setup()
    if backend != "memory":
        from django.core.management import call_command

        call_command("migrate", verbosity=0)


class Collected(logging.Handler):
    """Errors that no caller sees: those of background threads and finalizers."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.texts: list[str] = []
        threading.excepthook = self._of_thread
        sys.unraisablehook = self._unraisable

    def emit(self, record):
        text = record.getMessage()
        # A step closes event loops that have pending tasks.
        if not text.startswith("Task was destroyed but it is pending!"):
            error = record.exc_info and record.exc_info[1]
            self.texts.append(f"{text}: {error!r}")

    def _of_thread(self, info):
        self.texts.append(f"thread {info.thread}: {info.exc_value!r}")

    def _unraisable(self, info):
        self.texts.append(f"{info.err_msg or 'ignored'}: {info.exc_value!r}")


def campaign(options: argparse.Namespace) -> int:
    from tests.campaign.plans import KINDS, from_json, plan_of, without
    from tests.campaign.rounds import execute
    from tests.timing import witness

    witness.start()
    sys.setswitchinterval(SWITCH_EVERY)
    collected = Collected()
    for name in ("dlocks", "asyncio"):
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.addHandler(collected)
    kinds = options.kind or KINDS
    if options.plan:
        plan = from_json(options.plan.read_text())
        work = ((plan, attempt) for attempt in range(options.rounds))
    elif options.minutes is not None:
        seeds = itertools.count(options.seed)
        work = ((plan_of(seed, kind), 0) for seed in seeds for kind in kinds)
    else:
        seeds = range(options.seed, options.seed + options.rounds)
        work = ((plan_of(seed, kind), 0) for seed in seeds for kind in kinds)
    until = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    work = ((without(plan, options.without), attempt) for plan, attempt in work)
    report = Report(options.only, quiet=options.quiet)
    lock = threading.Lock()

    def worker():
        while until is None or time.monotonic() < until:
            with lock:
                plan, attempt = next(work, (None, 0))
            if plan is None or report.counts["hang"] > 2:
                return
            found = execute(plan, attempt=attempt)
            with lock:
                report.add(plan, found)

    with ThreadPoolExecutor(options.parallel) as pool:
        for future in [pool.submit(worker) for _ in range(options.parallel)]:
            future.result()
    for number, finding in enumerate(report.first(options.shrink)):
        shrink(finding, options, number)
    report.print(collected.texts)
    if options.json:
        options.json.write_text(json.dumps(report.data(collected.texts)))
    status = 1 if report.counts else 0
    if report.counts["hang"]:
        # Some threads may never end, and the interpreter would wait for them.
        sys.stdout.flush()
        os._exit(status)
    return status


class Report:
    def __init__(self, only, *, quiet):
        self.only, self.quiet = only, quiet
        self.rounds: Counter[str] = Counter()
        # Rounds with a finding of a kind, and findings by kind and label.
        self.counts: Counter[str] = Counter()
        self.by_kind: Counter[tuple[str, str]] = Counter()
        self.labels: Counter[tuple[str, str]] = Counter()
        self.findings: list = []

    def add(self, plan, found):
        self.rounds[plan.kind] += 1
        for kind in {finding.kind for finding in found}:
            self.counts[kind] += 1
            self.by_kind[plan.kind, kind] += 1
        for finding in found:
            self.labels[finding.kind, finding.label] += 1
            self.findings.append(finding)
            if not self.quiet and (not self.only or finding.kind in self.only):
                print("\n".join(finding.lines()), flush=True)

    def first(self, number: int) -> list:
        """Return one finding of each of the most frequent labels."""
        by_label: dict = {}
        for finding in self.findings:
            if not self.only or finding.kind in self.only:
                by_label.setdefault((finding.kind, finding.label), finding)
        return [
            by_label[label]
            for label, _ in self.labels.most_common()
            if label in by_label
        ][:number]

    def print(self, collected):
        print(f"{self.rounds.total()} rounds: {dict(self.rounds)}")
        for kind, number in self.counts.most_common():
            parts = ", ".join(
                f"{of} {count}"
                for (of, found), count in sorted(self.by_kind.items())
                if found == kind
            )
            print(f"{number:6d} rounds with {kind} ({parts})")
        for (kind, label), number in self.labels.most_common():
            print(f"{number:10d} {kind}: {label}")
        for text, number in Counter(collected).most_common(10):
            print(f"{number:6d} in the background: {text}")

    def data(self, collected):
        return {
            "rounds": self.rounds.total(),
            "counts": dict(self.counts),
            "by kind": [[*names, number] for names, number in self.by_kind.items()],
            "labels": [[*names, number] for names, number in self.labels.items()],
            "findings": ["\n".join(finding.lines()) for finding in self.findings],
            "background": collected,
        }


def shrink(finding, options: argparse.Namespace, number: int) -> None:
    """Search for a smaller plan with the same finding, and print and store it."""
    from tests.campaign.plans import smaller
    from tests.campaign.rounds import execute

    def shown(plan):
        """Return the finding if one of several executions shows it."""
        for _ in range(ATTEMPTS // options.parallel):
            if time.monotonic() > until:
                return None
            attempts = range(shown.attempt, shown.attempt + options.parallel)
            shown.attempt += options.parallel
            for found in pool.map(lambda at: execute(plan, attempt=at), attempts):
                for one in found:
                    if one.kind == finding.kind and (
                        one.kind != "refused" or one.label == finding.label
                    ):
                        return one
        return None

    shown.attempt = 0
    best, until = finding, time.monotonic() + SHRINK_FOR
    with ThreadPoolExecutor(options.parallel) as pool:
        progress = True
        while progress:
            progress = False
            for plan in smaller(best.plan):
                if (found := shown(plan)) is not None:
                    best, progress = found, True
                    break
    options.out.mkdir(exist_ok=True)
    path = options.out / f"{best.kind}-{number}.json"
    path.write_text(best.plan.to_json())
    print(f"Smallest plan ({path}):")
    print("\n".join(best.lines()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
