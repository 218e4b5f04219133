"""Run random rounds of callers that share holds, and report the findings.

    python -m tests.campaign [--seed 1] [--rounds 100 | --minutes 5]
        [--kind threads tasks keys generators] [--backend memory|sqlite|postgresql]

Each kind gets the same number of rounds. A finding is printed with the seed and the
plan of its round. The order in which threads run is not part of a plan, so a finding
may need several attempts with its seed. The status is 1 if there are findings.
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

BACKENDS = {
    "memory": "tests.campaign.backends.SlowMemoryBackend",
    "sqlite": "tests.campaign.backends.SlowDatabaseBackend",
    "postgresql": "tests.campaign.backends.SlowDatabaseBackend",
}
# Seconds between two switches of threads. Python's default is 0.005.
SWITCH_EVERY = 0.0001
# After more rounds that hang, the campaign ends.
HANGS = 2


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
    from tests.campaign.plans import KINDS, plan_of
    from tests.campaign.rounds import Round
    from tests.timing import witness

    witness.start()
    sys.setswitchinterval(SWITCH_EVERY)
    collected = Collected()
    for name in ("dlocks", "asyncio"):
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.addHandler(collected)
    seeds, until = itertools.count(options.seed), float("inf")
    if options.minutes is None:
        seeds = itertools.islice(seeds, options.rounds)
    else:
        until = time.monotonic() + 60 * options.minutes
    # No itertools.product(): it would collect all of the seeds first.
    work = ((seed, kind) for seed in seeds for kind in options.kind or KINDS)
    rounds: Counter[str] = Counter()
    labels: Counter[tuple[str, str]] = Counter()
    lock = threading.Lock()

    def worker():
        while time.monotonic() < until:
            with lock:
                seed, kind = next(work, (None, ""))
                hangs = sum(labels[one] for one in labels if one[0] == "hang")
            if seed is None or hangs > HANGS:
                return
            found = Round(plan_of(seed, kind)).run()
            with lock:
                rounds[kind] += 1
                for finding in found:
                    labels[finding.kind, finding.label] += 1
                    print("\n".join(finding.lines()), flush=True)

    with ThreadPoolExecutor(options.parallel) as pool:
        for future in [pool.submit(worker) for _ in range(options.parallel)]:
            future.result()
    print(f"{rounds.total()} rounds: {dict(rounds)}")
    for (kind, label), number in labels.most_common():
        print(f"{number:6d} {kind}: {label}")
    for text, number in Counter(collected.texts).most_common(10):
        print(f"{number:6d} in the background: {text}")
    # The keeper and other threads log what would be lost otherwise.
    status = int(
        bool(labels) or any("A background job" in text for text in collected.texts)
    )
    if any(kind == "hang" for kind, _ in labels):
        # Some threads may never end, and the interpreter would wait for them.
        sys.stdout.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
