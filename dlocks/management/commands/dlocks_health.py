"""``manage.py dlocks_health``: check whether locks work, for probes and for people."""

from __future__ import annotations

import json
import time
from typing import Any

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db.utils import Error

from dlocks.api import db_lock
from dlocks.backends.database.backend import DatabaseBackend
from dlocks.checks import check_alias
from dlocks.conf import backends
from dlocks.exceptions import LockError
from dlocks.management.base import add_duration, add_flag, seconds_of
from dlocks.models import LockState
from dlocks.operations import pages

# The key that each check acquires and releases.
KEY = "dlocks_health"
# Warnings of the system check that mean that locks fail.
BROKEN = {"dlocks.W005", "dlocks.W006", "dlocks.W008"}
# The numbers that an option limits.
COUNTED = {"stale": "stale locks", "waiting": "waiters"}


class Command(BaseCommand):
    help = (
        "Checks the settings and the tables, acquires and releases a lock of each"
        " alias, and counts its locks. The exit status is 1 if something is wrong."
    )
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--using",
            metavar="ALIAS",
            help="An alias of the DLOCKS setting. Default: all.",
        )
        add_duration(
            parser,
            "--max-clock-skew",
            (
                "Report a longer time between the clocks of the database and of this"
                " host as a problem, such as 0.5s."
            ),
        )
        for figure, what in COUNTED.items():
            parser.add_argument(
                f"--max-{figure}",
                type=int,
                metavar="NUMBER",
                help=f"Report more than this number of {what} as a problem.",
            )
        add_flag(parser, "--json", "A JSON object by alias.")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            aliases = [options["using"]] if options["using"] else list(backends)
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        reports = {alias: self._report(alias, options) for alias in aliases}
        if options["json"]:
            self.stdout.write(json.dumps(reports, indent=1))
        else:
            written: dict[str, str] = {}
            for alias, report in reports.items():
                self._write(alias, report, written)
        if wrong := [alias for alias in aliases if reports[alias]["problems"]]:
            raise CommandError(f"Not healthy: {', '.join(wrong)}.")

    def _report(self, alias: str, options: dict[str, Any]) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        problems: list[str] = []
        try:
            backend = backends[alias]
            failed = _failed_checks(backend)
            problems += [
                " ".join(filter(None, (message.msg, message.hint)))
                for message in failed
            ]
            # Otherwise the lock would only report the same again.
            if BROKEN.isdisjoint([message.id for message in failed]):
                figures |= _lock_once(alias)
                if isinstance(backend, DatabaseBackend):
                    figures |= _figures(backend)
        except (
            ImproperlyConfigured, LockError, RuntimeError, ValueError, Error
        ) as error:  # fmt: skip
            problems.append(str(error))
        if (limit := options["max_clock_skew"]) is not None:
            most = seconds_of("--max-clock-skew", limit)
            if (skew := abs(figures.get("clock_skew_s", 0))) > most:
                problems.append(f"clocks {skew:g} s apart, more than {most:g} s")
        problems += [
            f"{figures[figure]} {what}, more than {most}"
            for figure, what in COUNTED.items()
            if (most := options[f"max_{figure}"]) is not None
            and figures.get(figure, 0) > most
        ]
        return {"healthy": not problems, **figures, "problems": problems}

    def _write(
        self, alias: str, report: dict[str, Any], written: dict[str, str]
    ) -> None:
        """Write the report of an alias.

        ``written`` has each problem that was written, with the alias that had it first.
        """
        style = self.style.ERROR if report["problems"] else self.style.SUCCESS
        state = "not healthy" if report["problems"] else "healthy"
        self.stdout.write(f"{alias}: {style(state)}")
        if "round_trip_ms" in report:
            line = f"acquired and released in {report['round_trip_ms']} ms"
            if "clock_skew_s" in report:
                line += f", clocks {abs(report['clock_skew_s']):.3f} s apart"
            self.stdout.write(f"  {line}")
        if "held" in report:
            states = ("held", "shared", "stale", "waiting")
            counts = ", ".join(f"{report[state]} {state}" for state in states)
            self.stdout.write(f"  {counts}")
        for problem in report["problems"]:
            first = written.setdefault(problem, alias)
            self.stdout.write(
                f"  {problem.rstrip()}" if first == alias else f"  the same as {first}"
            )


def _lock_once(alias: str) -> dict[str, Any]:
    """Acquire and release a lock, and return the time that it took."""
    began = time.perf_counter()
    hold = db_lock(KEY, using=alias, reentrant=False).try_acquire()
    # If another check holds the key, the reply shows as much.
    if hold is not None:
        hold.release()
    return {"round_trip_ms": round((time.perf_counter() - began) * 1000, 1)}


def _failed_checks(backend: Any) -> list[checks.CheckMessage]:
    """Return the messages of the system check that mean that locks fail."""
    return [
        message
        for message in [*backend.check(), *check_alias(backend)]
        if message.is_serious(checks.ERROR) or message.id in BROKEN
    ]


def _figures(backend: DatabaseBackend) -> dict[str, Any]:
    states = [LockState.HELD, LockState.SHARED, LockState.STALE]
    figures: dict[str, Any] = {
        "clock_skew_s": round(_clock_skew(backend), 4),
        **dict.fromkeys(map(str, states), 0),
        "waiting": 0,
    }
    for page in pages(backend, states, waited_for=True):
        for lock in page:
            figures["waiting"] += lock.waiting
            if lock.state in figures:
                figures[lock.state] += 1
    return figures


def _clock_skew(backend: DatabaseBackend) -> float:
    """Return by how many seconds the database's clock is ahead of this host's."""
    before = time.time()
    ((ticks,),) = backend.session.ask("SELECT {ticks}", {}).rows
    return float(int(ticks) / 1e6 - (before + time.time()) / 2)
