"""``manage.py lock_bench``: compare the cost of all DLOCKS aliases.

It measures them on this project's own servers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import sys
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import django
from django.conf import ENVIRONMENT_VARIABLE
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db.utils import Error

import dlocks
from dlocks.bench.measurement import (
    WARM_UP,
    NotMeasured,
    Plan,
    alone,
    purge,
    together,
    why_not_together,
)
from dlocks.bench.processes import Processes
from dlocks.bench.samples import number_of
from dlocks.conf import backends
from dlocks.exceptions import LockBackendError
from dlocks.text import duration

COLUMNS = [
    # Two header lines, and the part and the name of the figure.
    ("ACQUIRE", "p50 µs", "alone", "take_p50_us"),
    ("", "p95 µs", "alone", "take_p95_us"),
    ("RELEASE", "p50 µs", "alone", "give_p50_us"),
    ("", "p95 µs", "alone", "give_p95_us"),
    ("GRANTS", "per s", "together", "grants_per_s"),
    ("WAIT", "p50 ms", "together", "wait_p50_ms"),
    ("", "p99 ms", "together", "wait_p99_ms"),
    ("", "max ms", "together", "wait_max_ms"),
    ("FAIRNESS", "Jain", "together", "jain"),
    ("HANDOVER", "p50 ms", "together", "handover_p50_ms"),
    ("", "p99 ms", "together", "handover_p99_ms"),
]
# The figures of each alias, and its note or error.
Results = dict[str, dict[str, Any]]


class Command(BaseCommand):
    help = (
        "Measures the locks of all aliases of DLOCKS, or of those named, on their own"
        " servers: acquire and release without contention, and with several processes"
        " that compete for one key. It uses keys of its own."
    )
    # A misconfigured alias is reported, and the others are measured.
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--using",
            nargs="+",
            action="extend",
            metavar="ALIAS",
            help="Aliases of the DLOCKS setting. Default: all.",
        )
        parser.add_argument(
            "--seconds",
            type=partial(_number, float, 0.1, 3600),
            default=3.0,
            help="How long each measurement takes. Default: %(default)g.",
        )
        parser.add_argument(
            "--processes",
            type=partial(_number, int, 2, 256),
            default=8,
            help="How many processes compete for the key. Default: %(default)d.",
        )
        parser.add_argument(
            "--hold-ms",
            type=partial(_number, float, 0, 60_000),
            default=1.0,
            help="How long each holds it, in milliseconds. Default: %(default)g.",
        )
        parser.add_argument("--json", metavar="FILE", help="Write all figures as JSON.")

    def handle(self, *args: Any, **options: Any) -> None:
        aliases = list(dict.fromkeys(options["using"] or backends))
        if unknown := [alias for alias in aliases if alias not in list(backends)]:
            raise CommandError(
                f"DLOCKS has no alias {unknown[0]!r}. It has"
                f" {', '.join(map(repr, backends))}. Nothing was measured."
            )
        if not os.environ.get(ENVIRONMENT_VARIABLE):
            raise CommandError(
                "lock_bench starts processes, which find the settings by"
                f" {ENVIRONMENT_VARIABLE}. Set it, or pass --settings."
            )
        if options["json"] is not None:
            _check_writable(options["json"])
        results: Results = {alias: {} for alias in aliases}
        keys = {alias: f"dlocks-bench:{secrets.token_hex(8)}" for alias in aliases}
        try:
            self._measure(results, keys, options)
        except BrokenExecutor as error:
            raise CommandError(f"The measurement was aborted: {error}") from error
        except TimeoutError as error:
            raise CommandError(
                "The measurement was aborted: a process did not reply in time."
            ) from error
        except KeyboardInterrupt:
            self.stderr.write("Interrupted. The measurement was aborted.")
            sys.exit(130)
        finally:
            self._purge(keys)
        self._write_table(results)
        if options["json"]:
            Path(options["json"]).write_text(
                json.dumps(_described(results, options), indent=1) + "\n",
                encoding="utf-8",
            )
        self._tell_what_is_wrong(results)

    def _measure(
        self, results: Results, keys: dict[str, str], options: dict[str, Any]
    ) -> None:
        for alias, result in results.items():
            try:
                backend = type(backends[alias])
                result["backend"] = f"{backend.__module__}.{backend.__name__}"
            except ImproperlyConfigured as error:
                result["error"] = str(error)
        steps = [
            (alias, name)
            for name in ("alone", "together")
            for alias in results
            if "error" not in results[alias]
        ]
        if not steps:
            return
        seconds, processes = options["seconds"], options["processes"]
        self._progress(
            options,
            f"Starting {processes} processes. The measurement takes about"
            f" {duration(len(steps) * (seconds + WARM_UP))} …",
        )
        with Processes(processes) as crew:
            for done, (alias, name) in enumerate(steps):
                result = results[alias]
                if "error" in result:
                    continue
                what = "one process" if name == "alone" else f"{processes} processes"
                step = f"[{done + 1}/{len(steps)}] {alias}, {what}"
                try:
                    if name == "alone":
                        plan = Plan(alias, keys[alias], 0.0)
                        result[name] = alone(crew, plan, seconds)
                        text = f"{number_of(result[name]['pair_p50_us'])} µs"
                    elif (why := why_not_together(backends[alias])) is not None:
                        result["note"] = why
                        text = f"not measured, since it {why}"
                    else:
                        plan = Plan(alias, keys[alias], options["hold_ms"] / 1000)
                        result[name] = together(crew, plan, seconds)
                        text = f"{number_of(result[name]['grants_per_s'])} grants/s"
                except NotMeasured as error:
                    result["error"] = text = str(error)
                self._progress(options, f"{step}: {text}")

    def _progress(self, options: dict[str, Any], text: str) -> None:
        if options["verbosity"] > 0:
            self.stdout.write(text)
            self.stdout.flush()

    def _purge(self, keys: dict[str, str]) -> None:
        for alias, key in keys.items():
            try:
                purge(backends[alias], key)
            except ImproperlyConfigured:
                # A misconfigured alias has no rows, and its error has been reported.
                pass
            except (Error, LockBackendError) as error:
                self.stderr.write(
                    f"{alias}: the rows of {key!r} could not be deleted:"
                    f" {' '.join(str(error).split())}"
                )

    def _write_table(self, results: Results) -> None:
        lines = [
            ["ALIAS", *(head for head, *_ in COLUMNS)],
            ["", *(unit for _, unit, *_ in COLUMNS)],
        ]
        for alias, result in results.items():
            cells = [result.get(part, {}).get(figure) for *_, part, figure in COLUMNS]
            lines.append(
                [alias, *("–" if cell is None else number_of(cell) for cell in cells)]
            )
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        self.stdout.write()
        for line in lines:
            first, *others = (
                cell.rjust(width) if place else cell.ljust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            self.stdout.write("  ".join([first, *others]).rstrip())
        self.stdout.write()

    def _tell_what_is_wrong(self, results: Results) -> None:
        wrong = 0
        for alias, result in results.items():
            if overlaps := result.get("together", {}).get("overlaps"):
                wrong += 1
                self.stderr.write(
                    f"{alias}: a key was granted {overlaps} times while another process"
                    " held it."
                )
            if "note" in result:
                self.stdout.write(f"{alias}: {result['note']}.")
            if "error" in result:
                wrong += 1
                self.stderr.write(f"{alias}: {result['error']}")
        if wrong:
            raise CommandError(f"{wrong} of {len(results)} aliases failed. See above.")


def _described(results: Results, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "when": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        "dlocks": dlocks.__version__,
        "django": django.get_version(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": os.cpu_count(),
        "seconds": options["seconds"],
        "processes": options["processes"],
        "hold_ms": options["hold_ms"],
        "aliases": results,
    }


def _number(kind: Callable[[str], Any], least: float, most: float, text: str) -> Any:
    """Return an argument as a number within limits, or raise ArgumentTypeError."""
    try:
        value = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a {'whole number' if kind is int else 'number'}."
        ) from None
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(
            f"{text} is not between {least:g} and {most:g}."
        )
    return value


def _check_writable(name: str) -> None:
    path = Path(name)
    try:
        # Fail now instead of after minutes of measuring.
        is_new = not path.exists()
        with path.open("a"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise CommandError(
            f"--json: {name!r} cannot be written: {error.strerror}."
        ) from error
