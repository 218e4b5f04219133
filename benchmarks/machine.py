"""The machine of the measurements."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import subprocess
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = [
    "Django", "psycopg", "mysqlclient", "redis", "python-redis-lock", "kazoo",
    "django-db-mutex", "django-pglock",
    "django-pgware",
]  # fmt: skip


def describe(directory: Path) -> dict[str, Any]:
    """Return a description of the machine.

    ``directory`` is on the disk to which the servers write.
    """
    import dlocks

    pages = os.sysconf("SC_PHYS_PAGES")
    return {
        "when": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "dlocks": f"{dlocks.__version__}, commit {_commit()}",
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{pages * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, {_distribution()}",
        "python": platform.python_version(),
        "packages": ", ".join(f"{name} {version(name)}" for name in PACKAGES),
        "flush": f"{_flush(directory) * 1e6:.0f} µs",
        "load before": f"{os.getloadavg()[0]:.2f}",
    }


class Calm:
    """A pause until other programs leave the machine idle.

    All pauses together take at most ``patience`` seconds.
    """

    ENOUGH = 0.25

    def __init__(self, patience: float) -> None:
        self.left = patience

    def wait(self) -> float:
        """Return the share of the processor that other programs use.

        Wait while it is more than ``ENOUGH``. The benchmarks themselves must be idle.
        """
        while True:
            began = time.monotonic()
            idle, total = _idle_and_total()
            time.sleep(0.1)
            idle_then, total_then = _idle_and_total()
            share = 1 - (idle_then - idle) / max(1, total_then - total)
            if share <= self.ENOUGH or self.left <= 0:
                return share
            self.left -= time.monotonic() - began


def _idle_and_total() -> tuple[int, int]:
    numbers = [
        int(number)
        for number in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]
    ]
    # Idle, and waiting for the disk.
    return numbers[3] + numbers[4], sum(numbers)


def _flush(directory: Path) -> float:
    """Return the median seconds of writing 8 KiB and flushing them to the disk."""
    seconds = []
    file = os.open(directory / "flush", os.O_WRONLY | os.O_CREAT)
    try:
        os.write(file, bytes(1 << 20))
        os.fsync(file)
        for _ in range(200):
            began = time.perf_counter()
            os.pwrite(file, bytes(8192), 0)
            os.fdatasync(file)
            seconds.append(time.perf_counter() - began)
    finally:
        os.close(file)
    return statistics.median(seconds)


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return git("log", "-1", "--format=%h", "--", "dlocks") + (
            ", changed" if git("status", "--porcelain", "dlocks") else ""
        )
    return "unknown"


def _distribution() -> str:
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    return "unknown distribution"


def _field(path: str, name: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""
