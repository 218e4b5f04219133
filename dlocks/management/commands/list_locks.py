"""``manage.py list_locks``: who has which lock."""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from collections.abc import Iterable
from typing import Any

from django.core.management.base import CommandParser

from dlocks.backends.database import DatabaseBackend
from dlocks.management.base import LockCommand
from dlocks.models import LockState
from dlocks.oversight import Shown, duration, moment, pages, printable

COLUMNS = ("KEY", "STATE", "HOLDER", "IP", "BEGIN", "AGE", "LEFT", "COUNT", "TOKEN")
NUMBERS = {"AGE", "LEFT", "COUNT", "TOKEN"}
# What is longer than this is not cut off, but does not widen its column either.
WIDEST = 60


class Command(LockCommand):
    help = "Lists the locks that are held or stale, by the database's clock, with their holders."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        states = parser.add_mutually_exclusive_group()
        states.add_argument("--held", action="store_true", help="Only locks that are held.")
        states.add_argument("--stale", action="store_true", help="Only locks whose holder never came back.")
        states.add_argument("--all", action="store_true", help="Free ones too, with their last holder.")
        parser.add_argument("--json", action="store_true", help="A JSON array, with seconds and UTC times.")

    def work(self, backend: DatabaseBackend, **options: Any) -> None:
        states = [LockState.HELD, LockState.STALE]
        if options["held"]:
            states.remove(LockState.STALE)
        elif options["stale"]:
            states.remove(LockState.HELD)
        elif options["all"]:
            states.append(LockState.FREE)
        write = self._write_json if options["json"] else self._write_table
        try:
            write(backend, pages(backend, states))
        except BrokenPipeError:
            # "| head" has seen enough; nothing is left for the interpreter to flush into the closed pipe.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def _write_table(self, backend: DatabaseBackend, locks: Iterable[list[Shown]]) -> None:
        widths: list[int] = []
        for page in locks:
            rows = [self._cells(lock, backend.prefix) for lock in page]
            if not widths:
                widths = [0] * len(COLUMNS)
                rows.insert(0, COLUMNS)
            widths = [
                max(width, *(min(_width(cell), WIDEST) for cell in cells))
                for width, cells in zip(widths, zip(*rows, strict=True), strict=True)
            ]
            for row in rows:
                self.stdout.write("  ".join(map(_aligned, COLUMNS, row, widths)).rstrip())
        if not widths:
            self.stdout.write("No locks.")

    def _cells(self, lock: Shown, prefix: str) -> tuple[str, ...]:
        free = lock.state == LockState.FREE
        return (
            printable(lock.pk.removeprefix(prefix)),
            lock.state,
            printable(lock.holder) or "-",
            lock.owner_ip or "-",
            "-" if lock.begin_time is None else moment(lock.begin_time),
            "-" if free or lock.seconds_held is None else duration(lock.seconds_held),
            "-" if free else duration(lock.seconds_left),
            str(lock.hold_count),
            str(lock.version),
        )

    def _write_json(self, backend: DatabaseBackend, locks: Iterable[list[Shown]]) -> None:
        before = "["
        for page in locks:
            for lock in page:
                self.stdout.write(before + json.dumps(self._fields(lock, backend.prefix)), ending="")
                before = ",\n "
        self.stdout.write("[]" if before == "[" else "]")

    def _fields(self, lock: Shown, prefix: str) -> dict[str, Any]:
        free = lock.state == LockState.FREE
        return {
            "key": lock.pk.removeprefix(prefix),
            "state": lock.state,
            "status": lock.status,
            "holder": lock.holder,
            "owner_ip": lock.owner_ip,
            "begin_time": None if lock.begin_time is None else lock.begin_time.isoformat(),
            "end_time": lock.end_time.isoformat(),
            "seconds_held": None if free or lock.seconds_held is None else round(lock.seconds_held, 3),
            "seconds_left": None if free else round(lock.seconds_left, 3),
            "hold_count": lock.hold_count,
            "token": lock.version,
        }


def _aligned(column: str, cell: str, width: int) -> str:
    space = " " * (width - _width(cell))
    return space + cell if column in NUMBERS else cell + space


def _width(text: str) -> int:
    """Return how many columns of a terminal the text takes."""
    return sum(
        0
        if unicodedata.category(character) in {"Mn", "Me", "Cf"}
        else 2
        if unicodedata.east_asian_width(character) in {"W", "F"}
        else 1
        for character in text
    )
