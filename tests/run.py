"""Run the suite on real engines.

    python -m tests.run [ENGINE ...] [-- PYTEST ARGUMENTS]

The engines are sqlite, postgresql, mariadb and mysql, and all of them are the default.
Two other words may stand in place of engines:

* ``backends`` runs the tests of other servers, which start their own servers.
* ``newest`` runs the tests of storage, transactions, faults and guarded commits on the
  newest PostgreSQL and MariaDB (scripts/fetch_server.sh).

Each process that runs tests has a throwaway server of the engine (tests/plugin.py). An
engine that cannot be started is a failure. So is a MySQL that could not be fetched, if
CI is set and DLOCKS_TEST_WITHOUT_MYSQL is not 1. Otherwise MySQL is skipped, and a line
says why.

All temporary files are in one directory, which is removed at the end, also after an
interrupt. It is in /dev/shm if that is large enough and TMPDIR is not set. On one disk,
each flush of a server would delay all others.

Without arguments for pytest, tests of the front run on SQLite alone (CONTRIBUTING.md).
The engines run side by side, each with several workers of pytest-xdist, which keeps two
cores busy. DLOCKS_TEST_WORKERS is the number of all workers.
The summary counts the skipped tests by reason, and names the tests that ran again.
A run that takes longer than 40 minutes is aborted, and prints the stacks of its
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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.servers import FETCHED, fetched

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
# The workers of all engines, and the part of them that each engine gets.
WORKERS = int(os.environ.get("DLOCKS_TEST_WORKERS", "10"))
SHARES = {"sqlite": 3, "postgresql": 4, "mariadb": 2, "mysql": 1}
# Workers for the tests of other servers, and for each engine of the newest servers.
BACKENDS_WORKERS = 3
NEWEST_WORKERS = 2
# Seconds after which a run is aborted.
LIMIT = 40 * 60.0
# Seconds in which the processes of an aborted run write their stacks. The machine may
# stall for more than one second.
STACKS_WITHIN = 6.0
# The length of a line of the summary, in characters.
LINE = 300
# pytest lists failures, errors, reruns and skips at its end.
LISTED = "-rfERs"
# The end of the name of a run that repeats the late tests of another.
AGAIN = " again"
PYTEST = [sys.executable, "-m", "pytest", "-p", "tests.plugin"]
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
    # This program may be run by a test.
    os.environ.pop("PYTEST_XDIST_WORKER", None)
    # The servers must also be stopped after a plain kill. A process that was started in
    # the background may ignore SIGINT, and the processes of the tests would inherit
    # that.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with temporary_files():
            if not extra:
                return run_side_by_side(dict(_runs(engines)), left_out)
            statuses = {engine: _run(engine, extra) for engine in engines}
    except KeyboardInterrupt:
        return 130
    _report(statuses)
    return int(any(statuses.values()))


def keep_databases_in_memory() -> None:
    """Let temporary files be in memory, if it is large enough and TMPDIR is not set."""
    with suppress(OSError):
        if shutil.disk_usage(MEMORY).free > MEMORY_BYTES:
            os.environ.setdefault("TMPDIR", MEMORY)


@contextmanager
def temporary_files() -> Iterator[None]:
    """Keep the temporary files of all processes in one directory, and remove it."""
    directory = Path(tempfile.mkdtemp(prefix="dlocks-"))
    # Servers run under an account of their own.
    directory.chmod(0o711)
    before, tempfile.tempdir = os.environ.get("TMPDIR"), None
    os.environ["TMPDIR"] = str(directory)
    try:
        yield
    finally:
        tempfile.tempdir = None
        del os.environ["TMPDIR"]
        if before is not None:
            os.environ["TMPDIR"] = before
        # A server ends together with the process that started it, and may still write.
        while directory.exists():
            shutil.rmtree(directory, ignore_errors=True)


def _report(statuses: dict[str, int]) -> None:
    for name, status in statuses.items():
        print(
            f"{name}: {'passed' if status == 0 else f'FAILED ({status})'}", flush=True
        )


class Summary:
    """What the runs have reported in the output of pytest."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        # The number of skipped tests by reason.
        self.skipped: Counter[str] = Counter()
        # The number of reruns by test, with the name of its run.
        self.reruns: Counter[str] = Counter()
        # The lines of the failed tests by run and test.
        self.failures: dict[str, dict[str, str]] = defaultdict(dict)
        # The stalls of this machine, in seconds.
        self.stalls = [0.0]

    def read(self, run: str, line: str) -> None:
        """Read a line of the output of a run."""
        found = re.match(r"(?:FAILED|ERROR) (.+?)( - .*)?$", line)
        # The list of reruns names it again, without the reason.
        if found and (found[2] or found[1] not in self.failures[run]):
            self.failures[run][found[1]] = line.rstrip()
        if rerun := re.match(r"RERUN (\S+::.+)", line):
            self.runs_again(run, rerun[1])
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

    def runs_again(self, run: str, *tests: str) -> None:
        run = run.removesuffix(AGAIN)
        self.reruns.update(f"{run} | {test}" for test in tests)

    def lines(self) -> Iterator[str]:
        if max(self.stalls):
            yield f"This machine stalled for up to {max(self.stalls):.1f} s."
        passed, skipped = self.counts["passed"], self.counts["skipped"]
        failed = sum(map(len, self.failures.values()))
        yield (
            f"{passed} passed, {failed} failed, {skipped} skipped,"
            f" {len(self.reruns)} were too late and ran again"
        )
        for reason, number in sorted(self.skipped.items()):
            yield f"{number} skipped: {reason}"
        for test, times in sorted(self.reruns.items()):
            yield f"{test} was too late and ran {1 + times} times"


def run_side_by_side(
    runs: Mapping[str, tuple[str, list[str], dict[str, str]]],
    left_out: Iterable[str] = (),
) -> int:
    """Run pytest several times at once, print a summary, and return an exit status.

    A run has an engine, arguments of pytest, and variables of its environment. Every
    line of output is prefixed with the name of its run. If all failures of a run are
    tests that were too late, these run once more after all runs. The summary ends with
    the lines ``left_out`` and the failures, because the last lines of the output are
    all that a CI may keep.
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

    def start(
        name: str, engine: str, arguments: list[str], environment: dict[str, str]
    ) -> None:
        processes[name] = process = subprocess.Popen(
            [*PYTEST, *arguments, LISTED],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A narrow terminal would cut the reason of a failure.
            env={**_environment(engine), "COLUMNS": "500", **environment},
            # Ctrl-C in a terminal interrupts this process alone. It ends the others.
            start_new_session=True,
        )
        readers[name] = threading.Thread(target=read, args=[name, process], daemon=True)
        readers[name].start()

    def wait(names: list[str]) -> dict[str, int]:
        now = time.monotonic()
        try:
            statuses = {name: _wait(name, processes[name], now) for name in names}
        except BaseException:
            for name in names:
                _signal(processes[name], signal.SIGINT)
            for name in names:
                _stop(processes[name])
            raise
        finally:
            for name in names:
                # A process that a test has lost may keep the pipe open.
                readers[name].join(30)
        return statuses

    for name, run in runs.items():
        start(name, *run)
    statuses = wait(list(processes))
    for name, status in list(statuses.items()):
        # A status of 1 says that tests have failed, and nothing else.
        late = _late(summary.failures[name].values()) if status == 1 else []
        if not late:
            continue
        engine, _arguments, environment = runs[name]
        summary.runs_again(name, *late)
        start(f"{name}{AGAIN}", engine, late, environment)
        again = wait([f"{name}{AGAIN}"])
        statuses |= again
        if not any(again.values()):
            statuses[name] = 0
            # The tests have passed after all runs.
            del summary.failures[name]
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


def _runs(
    engines: list[str],
) -> Iterator[tuple[str, tuple[str, list[str], dict[str, str]]]]:
    """Yield the name, the engine, the arguments and the environment of each run."""
    if BACKENDS in engines:
        # Tests of other servers share them within a file.
        distribution = workers(BACKENDS_WORKERS, "loadfile")
        yield BACKENDS, ("sqlite", ["--whole", *distribution, *BACKENDS_TESTS], {})
    if NEWEST in engines:
        for engine in NEWEST_ENGINES:
            arguments = ["--whole", *workers(NEWEST_WORKERS), *NEWEST_TESTS]
            environment = {"DLOCKS_TEST_SERVERS": NEWEST}
            yield f"{NEWEST} {engine}", (engine, arguments, environment)
    here = [engine for engine in reversed(ENGINES) if engine in engines]
    for engine in here:
        share = WORKERS * SHARES[engine] / sum(map(SHARES.__getitem__, here))
        yield engine, (engine, ["--whole", *workers(max(1, round(share)))], {})


def workers(number: int, distribution: str = "worksteal") -> list[str]:
    """Return the arguments of pytest-xdist. A worker that crashes is not replaced."""
    crash = "--max-worker-restart=0"
    return ["-n", str(number), "--dist", distribution, crash]


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
    process = subprocess.Popen([*PYTEST, *extra], env=_environment(engine))
    try:
        return _wait(engine, process, time.monotonic())
    except BaseException:
        _signal(process, signal.SIGINT)
        _stop(process)
        raise


def _environment(engine: str) -> dict[str, str]:
    return {**os.environ, "DLOCKS_TEST_ENGINE": engine}


def _wait(name: str, process: subprocess.Popen[Any], began: float) -> int:
    """Return the exit status of pytest, or 124 if it was aborted."""
    while time.monotonic() - began < LIMIT:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(1)
    # The processes of the tests write their stacks (tests/plugin.py), also in a call
    # that no other signal interrupts.
    _signal(process, signal.SIGUSR2)
    time.sleep(STACKS_WITHIN)
    for line in _stacks():
        print(f"{name} | {line}", flush=True)
    # pytest reports the failures so far.
    _signal(process, signal.SIGINT)
    _stop(process)
    print(f"FAILED {name}: aborted, not ended after {LIMIT / 60:g} minutes", flush=True)
    return 124


def stacks_file(pid: int | str) -> Path:
    """Return the file to which a process of the tests writes the stacks."""
    return Path(tempfile.gettempdir(), f"stacks-{pid}")


def _stacks() -> Iterator[str]:
    """Yield the lines of all stacks that were written since the last call."""
    every = stacks_file("*")
    for path in sorted(every.parent.glob(every.name)):
        if stacks := path.read_text():
            path.unlink()
            yield f"Stacks of process {path.name.rpartition('-')[2]}:"
            yield from stacks.splitlines()


def _signal(process: subprocess.Popen[Any], number: int) -> None:
    """Send a signal to a process, and to its group unless this process is in it."""
    with suppress(ProcessLookupError):
        leads = os.getpgid(process.pid) == process.pid
        (os.killpg if leads else os.kill)(process.pid, number)


def _stop(process: subprocess.Popen[Any]) -> None:
    """Wait for the end of an interrupted process, but not forever."""
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
