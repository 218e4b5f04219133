"""
Run the suite on real engines: ``python -m tests.run [ENGINE …] [-- PYTEST ARGUMENTS]``.

``backends``, in place of engines, runs the tests of other servers, which they start by themselves.

Starts a throwaway server for each engine, gives pytest its address by the environment, and stops it, also when
interrupted. Without engines: sqlite, postgresql and mariadb. An engine that cannot be started is a failure.

The suite waits more than it computes. So, unless there are arguments for pytest, each engine's is split into shards
with servers of their own, and all of them run side by side: eight (DLOCKS_TEST_SHARDS), of however many engines. What
has not ended by then (a driver's call that no signal interrupts, say) is aborted, and tells where its threads were.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress

from tests.servers import SERVERS

ENGINES = ("sqlite", "postgresql", "mariadb")
BACKENDS = "backends"
SHARDS_AT_ONCE = int(os.environ.get("DLOCKS_TEST_SHARDS", "8"))
# Each engine's part of them.
SHARES = {"sqlite": 2, "postgresql": 3, "mariadb": 3}
# Of the tests of other servers, which are large.
BACKENDS_SHARDS = 3
LIMIT = 40 * 60.0


def main(arguments: list[str]) -> int:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    engines, extra = arguments[:split] or list(ENGINES), arguments[split + 1 :]
    known = ENGINES if extra else (*ENGINES, BACKENDS)
    if unknown := set(engines) - set(known):
        print(f"Unknown engine {', '.join(sorted(unknown))}; there are {', '.join(known)}.", file=sys.stderr)
        return 2
    # A plain kill must stop the servers too. Who is started in the background may have been told to ignore the others,
    # and so would every process of the tests.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    statuses = {engine: _run(engine, extra) for engine in engines} if extra else _side_by_side(engines)
    for name, status in statuses.items():
        print(f"{name}: {'passed' if status == 0 else f'FAILED ({status})'}", flush=True)
    return int(any(statuses.values()))


def _side_by_side(engines: list[str]) -> dict[str, int]:
    """Run all shards of the engines at once; return how each ended. Every line of theirs gets their name."""
    began = time.monotonic()
    processes: dict[str, subprocess.Popen[str]] = {}
    counts: Counter[str] = Counter()
    failures: list[str] = []
    stops = [0.0]

    def read(name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{name} | {line.rstrip()}", flush=True)
            if line.startswith(("FAILED ", "ERROR ", "process ")):
                failures.append(f"{name} | {line.rstrip()}")
            if still := re.match(r"This machine stood still .* up to ([\d.]+) s", line):
                stops.append(float(still[1]))
            if re.search(r"\d+ \w+.* in \d+\.\d+s", line):
                counts.update({what.rstrip("s"): int(number) for number, what in re.findall(r"(\d+) ([a-z]+)", line)})

    # The longest first.
    for engine, shards in _shards(engines):
        for part in (f"{number + 1}/{shards}" for number in range(shards)):
            what = ["sqlite", "--", "tests/backends"] if engine == BACKENDS else [engine, "--"]
            command = [sys.executable, "-m", "tests.run", *what, "--shard", part]
            processes[f"{engine} {part}"] = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
    readers = [threading.Thread(target=read, args=item, daemon=True) for item in processes.items()]
    try:
        for reader in readers:
            reader.start()
        statuses = {name: process.wait() for name, process in processes.items()}
    except BaseException:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait()
        raise
    finally:
        for reader in readers:
            # A process that a test has lost may keep the pipe open.
            reader.join(30)
    print(f"{(time.monotonic() - began) / 60:.1f} minutes")
    print(*failures, sep="\n", end="\n" if failures else "")
    again = f", {counts['rerun']} came too late and ran again" if counts["rerun"] else ""
    if max(stops):
        print(f"This machine stood still for up to {max(stops):.1f} s.")
    print(f"{counts['passed']} passed, {counts['failed'] + counts['error']} failed{again}", flush=True)
    return statuses


def _shards(engines: list[str]) -> Iterator[tuple[str, int]]:
    if BACKENDS in engines:
        yield BACKENDS, BACKENDS_SHARDS
    here = [engine for engine in reversed(ENGINES) if engine in engines]
    for engine in here:
        yield engine, max(1, round(SHARDS_AT_ONCE * SHARES[engine] / sum(map(SHARES.__getitem__, here))))


def _run(engine: str, extra: list[str]) -> int:
    print(f"==> {engine}", flush=True)
    with tempfile.TemporaryDirectory(prefix="dlocks-tests-") as directory:
        server = SERVERS[engine]() if engine in SERVERS else nullcontext()
        try:
            with server:
                environment = getattr(server, "environment", {"DLOCKS_TEST_ENGINE": engine})
                environment = {**os.environ, "DLOCKS_TEST_DIRECTORY": directory, **environment}
                process = subprocess.Popen([sys.executable, "-m", "pytest", *extra], env=environment)
                try:
                    with suppress(subprocess.TimeoutExpired):
                        return process.wait(LIMIT)
                    # What has failed until then is told, and where that does not end it, the stacks of all threads are.
                    process.send_signal(signal.SIGINT)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(60)
                    process.send_signal(signal.SIGABRT)
                    process.wait()
                    print(f"FAILED {engine}: aborted, not ended after {LIMIT / 60:g} minutes", flush=True)
                    return 1
                except BaseException:
                    process.send_signal(signal.SIGINT)
                    try:
                        process.wait(20)
                    except subprocess.TimeoutExpired:
                        process.kill()
                    raise
        except KeyboardInterrupt:
            sys.exit(130)
        except (FileNotFoundError, RuntimeError) as error:
            print(f"{engine} could not be started: {error}", file=sys.stderr, flush=True)
            return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
