"""Run the suite on real engines.

    python -m tests.run [ENGINE ...] [-- PYTEST ARGUMENTS]

The engines are sqlite, postgresql, mariadb and mysql, and all of them are the default.
Two other words may stand in place of engines:

* ``backends`` runs the tests of other servers, which start their own servers.
* ``newest`` runs the tests of storage, transactions, faults and guarded commits on the
  newest PostgreSQL and MariaDB (scripts/fetch_server.sh).

Each engine gets a throwaway server, whose address is passed to pytest in the
environment. The server is stopped at the end, also after an interrupt. An engine that
cannot be started is a failure. So is a MySQL that could not be fetched, if CI is set
and DLOCKS_TEST_WITHOUT_MYSQL is not 1. Otherwise MySQL is skipped, and a line says why.

Databases are kept in /dev/shm if it is large enough and TMPDIR is not set. On one disk,
each flush of a server would delay all others.

Without arguments for pytest, tests of the front run on SQLite alone (CONTRIBUTING.md).
The suite is split into ten shards (DLOCKS_TEST_SHARDS), shared among the engines. Each
shard has its own server, and all of them run side by side, which keeps two cores busy.
The summary counts the skipped tests by reason, and names the tests that ran again.
A shard that takes longer than 40 minutes is aborted and prints the stacks of its
threads. A driver's call that no signal interrupts can cause this.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress

from tests.servers import FETCHED, SERVERS, fetched

ENGINES = ("sqlite", "postgresql", "mariadb", "mysql")
BACKENDS = "backends"
BACKENDS_TESTS = ["tests/promises/backends", "tests/units/backends"]
NEWEST = "newest"
NEWEST_ENGINES = ("postgresql", "mariadb")
# The contract and the random histories of tests/units/database contain each of
# our statements. The other files contain errors of locked rows and of lost sessions.
NEWEST_TESTS = [
    "tests/testing/test_contract.py",
    "tests/units/database/test_table.py",
    "tests/promises/database/test_table_locks.py",
    "tests/promises/database/test_faults.py",
    "tests/promises/database/test_transactions.py",
    "tests/promises/locks/test_guard.py",
    "tests/promises/locks/test_guard_isolation.py",
    "tests/units/database/test_guards.py",
    # The longest tests show nothing that depends on the version of a server.
    "-k",
    "not (clock or crashing or restart or server_is_down or busy_queue)",
]
SHARDS_AT_ONCE = int(os.environ.get("DLOCKS_TEST_SHARDS", "10"))
# The part of the shards that each engine gets.
SHARES = {"sqlite": 3, "postgresql": 4, "mariadb": 2, "mysql": 1}
# Shards for the tests of other servers, and for each engine of the newest servers.
BACKENDS_SHARDS = 3
NEWEST_SHARDS = 2
LIMIT = 40 * 60.0
# The length of a line of the summary, in characters.
LINE = 300
# pytest lists failures, errors, reruns and skips at its end.
LISTED = "-rfERs"
# The end of the name of a shard whose late tests run once more.
AGAIN = " again"
# A file system in memory, and the bytes that the suite may need there.
MEMORY, MEMORY_BYTES = "/dev/shm", 6 * 2**30


def main(arguments: list[str]) -> int:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    engines, extra = arguments[:split] or list(ENGINES), arguments[split + 1 :]
    left_out = []
    if "mysql" in engines and (why := _why_no_mysql()) is not None:
        left_out = [f"mysql: NOT RUN: {why}"]
        print(*left_out, flush=True)
        if "CI" in os.environ and os.environ.get("DLOCKS_TEST_WITHOUT_MYSQL") != "1":
            return 1
        engines.remove("mysql")
    known = ENGINES if extra else (*ENGINES, BACKENDS, NEWEST)
    if unknown := set(engines) - set(known):
        print(
            f"Unknown engine {', '.join(sorted(unknown))}; there are"
            f" {', '.join(known)}.",
            file=sys.stderr,
        )
        return 2
    keep_databases_in_memory()
    # Hundreds of processes import the same modules.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # The servers must also be stopped after a plain kill. A process that was started in
    # the background may ignore SIGINT, and the processes of the tests would inherit
    # that.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not extra:
        return run_shards(dict(_shards(engines)), left_out)
    statuses = {engine: _run(engine, extra) for engine in engines}
    _report(statuses)
    return int(any(statuses.values()))


def keep_databases_in_memory() -> None:
    """Let temporary files be in memory, if it is large enough and TMPDIR is not set."""
    with suppress(OSError):
        if shutil.disk_usage(MEMORY).free > MEMORY_BYTES:
            os.environ.setdefault("TMPDIR", MEMORY)


def _report(statuses: dict[str, int]) -> None:
    for name, status in statuses.items():
        print(
            f"{name}: {'passed' if status == 0 else f'FAILED ({status})'}", flush=True
        )


class Summary:
    """What the shards have reported in the output of pytest."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        # The number of skipped tests by reason.
        self.skipped: Counter[str] = Counter()
        # The number of reruns by test, with the name of its shard.
        self.reruns: Counter[str] = Counter()
        # The lines of the failed tests by shard and test.
        self.failures: dict[str, dict[str, str]] = defaultdict(dict)
        # The stalls of this machine, in seconds.
        self.stalls = [0.0]

    def read(self, shard: str, line: str) -> None:
        """Read a line of the output of a shard."""
        found = re.match(r"(?:FAILED|ERROR) (.+?)( - .*)?$", line)
        # The list of reruns names it again, without the reason.
        if found and (found[2] or found[1] not in self.failures[shard]):
            self.failures[shard][found[1]] = line.rstrip()
        if rerun := re.match(r"RERUN (\S+::.+)", line):
            self.runs_again(shard, rerun[1])
        if skip := re.match(r"SKIPPED \[(\d+)\] [^:]+:(?:\d+:)? (.*)", line):
            self.skipped[skip[2]] += int(skip[1])
        if stall := re.match(r"This machine stalled .* up to ([\d.]+) s", line):
            self.stalls.append(float(stall[1]))
        if re.search(r"\d+ \w+.* in \d+\.\d+s", line):
            self.counts.update(
                {
                    what.rstrip("s"): int(number)
                    for number, what in re.findall(r"(\d+) ([a-z]+)", line)
                }
            )

    def runs_again(self, shard: str, *tests: str) -> None:
        shard = shard.removesuffix(AGAIN)
        self.reruns.update(f"{shard} | {test}" for test in tests)

    def forgive(self, shard: str) -> None:
        """Forget the failures of a shard, whose tests have passed after all shards."""
        self.counts.subtract(failed=len(self.failures.pop(shard)))

    def lines(self) -> Iterator[str]:
        if max(self.stalls):
            yield f"This machine stalled for up to {max(self.stalls):.1f} s."
        passed, skipped = self.counts["passed"], self.counts["skipped"]
        failed = self.counts["failed"] + self.counts["error"]
        yield (
            f"{passed} passed, {failed} failed, {skipped} skipped,"
            f" {len(self.reruns)} were too late and ran again"
        )
        for reason, number in sorted(self.skipped.items()):
            yield f"{number} skipped: {reason}"
        for test, times in sorted(self.reruns.items()):
            yield f"{test} was too late and ran {1 + times} times"


def run_shards(
    shards: Mapping[str, tuple[list[str], dict[str, str]]], left_out: Iterable[str] = ()
) -> int:
    """Run all shards at once, print a summary, and return an exit status.

    A shard has the arguments of this program, and variables of its environment. Every
    line of output is prefixed with the name of its shard. If all failures of a shard
    are tests that were too late, these run once more after all shards. The summary
    ends with the lines ``left_out`` and the failures, because the last lines of the
    output are all that a CI may keep.
    """
    began = time.monotonic()
    processes: dict[str, subprocess.Popen[str]] = {}
    readers: dict[str, threading.Thread] = {}
    summary, lock = Summary(), threading.Lock()

    def read(name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                with lock:
                    print(f"{name} | {line.rstrip()}", flush=True)
                    summary.read(name, line)

    def start(name: str, arguments: list[str], environment: dict[str, str]) -> None:
        processes[name] = process = subprocess.Popen(
            [sys.executable, "-m", "tests.run", *arguments, LISTED],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A narrow terminal would cut the reason of a failure.
            env={**os.environ, "COLUMNS": "500", **environment},
        )
        readers[name] = threading.Thread(target=read, args=[name, process], daemon=True)
        readers[name].start()

    def wait(names: list[str]) -> dict[str, int]:
        try:
            statuses = {name: processes[name].wait() for name in names}
        except BaseException:
            for name in names:
                processes[name].terminate()
            for name in names:
                processes[name].wait()
            raise
        finally:
            for name in names:
                # A process that a test has lost may keep the pipe open.
                readers[name].join(30)
        return statuses

    for name, (arguments, environment) in shards.items():
        start(name, arguments, environment)
    statuses = wait(list(processes))
    for name, status in list(statuses.items()):
        # A status of 1 says that tests have failed, and nothing else.
        late = _late(summary.failures[name].values()) if status == 1 else []
        if not late:
            continue
        (engine, *_), environment = shards[name]
        summary.runs_again(name, *late)
        start(f"{name}{AGAIN}", [engine, "--", *late], environment)
        again = wait([f"{name}{AGAIN}"])
        statuses |= again
        if not any(again.values()):
            statuses[name] = 0
            summary.forgive(name)
    print(f"{(time.monotonic() - began) / 60:.1f} minutes")
    for line in (*summary.lines(), *left_out):
        print(line[:LINE], flush=True)
    _report(statuses)
    for name, lines in summary.failures.items():
        for line in lines.values():
            print(f"{name} | {line[:LINE]}", flush=True)
    return int(any(statuses.values()))


def _late(lines: Iterable[str]) -> list[str]:
    """Return the tests that were too late, or none if one failed for another reason."""
    tests = []
    for line in lines:
        found = re.fullmatch(
            r"FAILED (\S+::.*?) - tests\.timing\.TooLateError: .*", line
        )
        if found is None:
            return []
        tests.append(found[1])
    return tests


def _shards(
    engines: list[str],
) -> Iterator[tuple[str, tuple[list[str], dict[str, str]]]]:
    """Yield the name, the arguments and the environment of each shard.

    Those that take longest come first.
    """
    for engine, shards in _parts(engines):
        what, environment = [engine, "--"], {}
        if engine == BACKENDS:
            what = ["sqlite", "--", *BACKENDS_TESTS]
        elif engine.startswith(NEWEST):
            what = [engine.removeprefix(f"{NEWEST} "), "--", *NEWEST_TESTS]
            environment["DLOCKS_TEST_SERVERS"] = NEWEST
        for part in (f"{number + 1}/{shards}" for number in range(shards)):
            yield f"{engine} {part}", ([*what, "--shard", part], environment)


def _parts(engines: list[str]) -> Iterator[tuple[str, int]]:
    if BACKENDS in engines:
        yield BACKENDS, BACKENDS_SHARDS
    if NEWEST in engines:
        for engine in NEWEST_ENGINES:
            yield f"{NEWEST} {engine}", NEWEST_SHARDS
    here = [engine for engine in reversed(ENGINES) if engine in engines]
    for engine in here:
        yield (
            engine,
            max(
                1,
                round(
                    SHARDS_AT_ONCE * SHARES[engine] / sum(map(SHARES.__getitem__, here))
                ),
            ),
        )


def _why_no_mysql() -> str | None:
    """Return why MySQL cannot run here, or None if it can."""
    try:
        fetched("mysql", "mysqld")
    except FileNotFoundError as error:
        reason = FETCHED / "mysql.error"
        return reason.read_text().strip() if reason.exists() else str(error)
    return None


def _run(engine: str, extra: list[str]) -> int:
    print(f"==> {engine}", flush=True)
    with tempfile.TemporaryDirectory(prefix="dlocks-tests-") as directory:
        server = SERVERS[engine]() if engine in SERVERS else nullcontext()
        try:
            with server:
                environment = getattr(
                    server, "environment", {"DLOCKS_TEST_ENGINE": engine}
                )
                environment = {
                    **os.environ,
                    "DLOCKS_TEST_DIRECTORY": directory,
                    **environment,
                }
                process = subprocess.Popen(
                    [sys.executable, "-m", "pytest", *extra], env=environment
                )
                try:
                    with suppress(subprocess.TimeoutExpired):
                        return process.wait(LIMIT)
                    # SIGINT makes pytest report the failures so far. If that does not
                    # end it, SIGABRT prints the stacks of all threads.
                    process.send_signal(signal.SIGINT)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(60)
                    process.send_signal(signal.SIGABRT)
                    process.wait()
                    print(
                        f"FAILED {engine}: aborted, not ended after {LIMIT / 60:g}"
                        " minutes",
                        flush=True,
                    )
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
            print(
                f"{engine} could not be started: {error}", file=sys.stderr, flush=True
            )
            return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
