"""``manage.py list_locks``: list the locks and their holders."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from itertools import chain
from typing import Any

from django.core.management.base import CommandParser

from dlocks.backends.base import Backend
from dlocks.management.base import LockCommand, add_flag, matching
from dlocks.models import LockState
from dlocks.operations import (
    PAGE,
    LockRow,
    describe,
    in_row,
    is_kept,
    mode,
    pages,
    state_of,
    with_claims,
    with_positions,
)
from dlocks.text import duration, printable, short_duration
from dlocks.values import UNLIMITED, WaitingClaim

COLUMNS = ("KEY", "STATE", "WAITING", "HOLDER", "AGE", "LEFT")
KEY, HOLDER = COLUMNS.index("KEY"), COLUMNS.index("HOLDER")
NUMBERS = {"WAITING", "AGE", "LEFT"}
# Widths in columns of a terminal. A key is at least this wide. A longer one that does
# not fit is whole on a line of its own, since ``clear_lock`` needs all of it. A holder
# that does not fit loses its middle. Keys leave it this width, or the second in a
# narrow terminal.
KEY_WIDTH = 24
HOLDER_WIDTH = 20
NARROWEST_HOLDER = 8
# The widest key and holder that are aligned without a terminal.
WIDEST = 60
SORTED_BY: dict[str, Callable[[LockRow], float]] = {
    "age": lambda lock: -(lock.seconds_held or 0.0),
    "waiting": lambda lock: -lock.waiting,
}


class Command(LockCommand):
    help = (
        "Lists the locks that are held, shared or stale, with their holders. AGE is how"
        " long a key has been held. LEFT is the time left on its lease, or negative"
        " since the lease has expired. Both are by the database's clock. --json has"
        " more."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "keys",
            nargs="*",
            metavar="KEY",
            help="Keys, or patterns such as 'stock:*'.",
        )
        states = parser.add_mutually_exclusive_group()
        add_flag(states, "--held", "Only locks that are held or shared.")
        add_flag(
            states, "--stale", "Only locks whose lease has expired without a release."
        )
        add_flag(states, "--all", "Also free locks, with their last holders.")
        add_flag(
            parser,
            "--waiting",
            (
                "Also the shared holds and waiters of each lock, what they wait for,"
                " and free locks with waiters."
            ),
        )
        parser.add_argument(
            "--sort",
            choices=SORTED_BY,
            help="Order by the time held or by the number of waiters, largest first.",
        )
        add_flag(parser, "--wide", "Do not fit the list into the terminal.")
        output = parser.add_mutually_exclusive_group()
        add_flag(output, "--json", "A JSON array, with UTC times, and ages in seconds.")
        output.add_argument(
            "--watch",
            nargs="?",
            type=float,
            const=2.0,
            metavar="SECONDS",
            help="List again at this interval, 2 seconds by default, until Ctrl-C.",
        )

    def work(self, backend: Backend, **options: Any) -> None:
        if (seconds := options["watch"]) is None:
            self._list(backend, **options)
            return
        with suppress(KeyboardInterrupt):
            while True:
                if self.stdout.isatty():
                    # Clear the terminal, and begin at its top.
                    self.stdout.write("\x1b[2J\x1b[H", ending="")
                self._list(backend, **options)
                self.stdout.flush()
                time.sleep(max(0.1, seconds))

    def _list(self, backend: Backend, **options: Any) -> None:
        states = [LockState.HELD, LockState.SHARED, LockState.STALE]
        if options["held"]:
            states.remove(LockState.STALE)
        elif options["stale"]:
            states = [LockState.STALE]
        elif options["all"]:
            states.append(LockState.FREE)
        waiting = options["waiting"]
        self._limit = (
            shutil.get_terminal_size().columns
            if self.stdout.isatty() and not options["wide"]
            else None
        )
        write = self._write_json if options["json"] else self._write_table
        chosen = options["held"] or options["stale"]
        found = pages(backend, states, waited_for=waiting and not chosen)
        if options["keys"]:
            found = matching(found, options["keys"], backend.prefix)
        if options["sort"]:
            rows = sorted(chain.from_iterable(found), key=SORTED_BY[options["sort"]])
            found = (rows[start : start + PAGE] for start in range(0, len(rows), PAGE))
        try:
            write(backend, found, waiting)
        except BrokenPipeError:
            # The reader, for example ``head``, has closed the pipe. Redirect stdout, so
            # that the interpreter does not flush into it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def _write_table(
        self, backend: Backend, locks: Iterable[list[LockRow]], waiting: bool
    ) -> None:
        widths: list[int] = []
        for page in locks:
            rows = [self._cells(lock, backend.prefix) for lock in page]
            first = not widths
            widths = self._widths(rows, widths or [*map(len, COLUMNS)])
            if first:
                self._write_row(COLUMNS, widths)
            found = _with_queue(backend, page, waiting)
            for row, (lock, claims, waits) in zip(rows, found, strict=True):
                stale = lock.state == LockState.STALE
                self._write_row(row, widths, self.style.WARNING if stale else str)
                self._write_waits(waits, backend.prefix)
                self._write_claims(claims, backend.prefix)
        if not widths:
            self.stdout.write("No locks.")

    def _widths(self, rows: list[tuple[str, ...]], before: list[int]) -> list[int]:
        """Return the widths of the columns, at least those of earlier rows.

        They fit into the terminal, if there is one.
        """
        cells = [list(map(_width, column)) for column in zip(*rows, strict=True)]
        widths = [
            max(width, *column) for width, column in zip(before, cells, strict=True)
        ]
        if self._limit is None:
            both, room = 2 * WIDEST, WIDEST
            widths[HOLDER] = min(WIDEST, widths[HOLDER])
        else:
            others = sum(widths) - widths[KEY] - widths[HOLDER]
            both = self._limit - others - 2 * (len(COLUMNS) - 1)
            # The holder gets what the keys leave, but the keys leave it some.
            holder = min(widths[HOLDER], HOLDER_WIDTH, both - KEY_WIDTH)
            room = both - max(NARROWEST_HOLDER, holder)
        keys = [width for width in cells[KEY] if width <= room]
        widths[KEY] = max(KEY_WIDTH, min(before[KEY], room), *keys)
        widths[HOLDER] = min(widths[HOLDER], max(NARROWEST_HOLDER, both - widths[KEY]))
        return widths

    def _write_row(
        self, row: tuple[str, ...], widths: list[int], style: Callable[[str], str] = str
    ) -> None:
        if self._limit is not None:
            key, *facts = row
            if _width(key) > widths[KEY]:
                self.stdout.write(style(key))
                key = ""
            facts[HOLDER - 1] = _cut(row[HOLDER], widths[HOLDER])
            row = (key, *facts)
        self.stdout.write(
            style("  ".join(map(_aligned, COLUMNS, row, widths)).rstrip())
        )

    def _write_waits(self, waits: Iterable[WaitingClaim], prefix: str) -> None:
        for claim in waits:
            key = printable(claim.key.removeprefix(prefix))
            self.stdout.write(
                f"    its holder {printable(claim.holder)} has waited for {key!r} for"
                f" {duration(claim.waited)}"
            )

    def _write_claims(self, claims: list[LockRow], prefix: str) -> None:
        for share in claims:
            if share.version is not None:
                self.stdout.write(
                    f"    held by {describe(share)}, {mode(share)} (token"
                    f" {share.version})"
                )
        for position, claim in with_positions(claims):
            number = "-" if position is None else position
            held = [printable(key.removeprefix(prefix)) for key in claim.held_keys]
            holds = f", holds {', '.join(map(repr, held))}" if held else ""
            self.stdout.write(f"    {number}. {describe(claim)}, {mode(claim)}{holds}")

    def _cells(self, lock: LockRow, prefix: str) -> tuple[str, ...]:
        # The row of a shared key describes only its last exclusive holder.
        alone = in_row(lock)
        taken = alone and lock.state != LockState.FREE
        kept = is_kept(lock)
        return (
            printable(lock.pk.removeprefix(prefix)),
            str(LockState.HELD.label) if kept else state_of(lock),
            str(lock.waiting),
            (alone and printable(lock.holder)) or "-",
            _short(lock.seconds_held if taken else None),
            "transaction" if kept else _short(lock.seconds_left if taken else None),
        )

    def _write_json(
        self, backend: Backend, locks: Iterable[list[LockRow]], waiting: bool
    ) -> None:
        before = "["
        for page in locks:
            for lock, claims, waits in _with_queue(backend, page, waiting):
                fields = self._fields(lock, backend.prefix)
                if waiting:
                    fields["shared_by"] = [
                        _share_fields(share)
                        for share in claims
                        if share.version is not None
                    ]
                    fields["queue"] = [
                        _queue_fields(position, claim, backend.prefix)
                        for position, claim in with_positions(claims)
                    ]
                    fields["holders_wait_for"] = [
                        claim.key.removeprefix(backend.prefix) for claim in waits
                    ]
                self.stdout.write(before + json.dumps(fields), ending="")
                before = ",\n "
        self.stdout.write("[]" if before == "[" else "]")

    def _fields(self, lock: LockRow, prefix: str) -> dict[str, Any]:
        alone = in_row(lock)
        taken = alone and lock.state != LockState.FREE
        return {
            "key": lock.pk.removeprefix(prefix),
            "state": lock.state,
            "status": lock.status,
            "holder": lock.holder if alone else "",
            "owner_ip": lock.owner_ip if alone else None,
            "begin_time": _iso(lock.begin_time) if alone else None,
            "end_time": _iso(lock.end_time),
            "seconds_held": _rounded(lock.seconds_held) if taken else None,
            "seconds_left": (
                _rounded(lock.seconds_left) if taken and not is_kept(lock) else None
            ),
            "hold_count": lock.hold_count,
            "waiting": lock.waiting,
            "sharing": lock.sharing,
            "token": lock.version,
        }


def _with_queue(
    backend: Backend, locks: list[LockRow], waiting: bool
) -> Iterator[tuple[LockRow, list[LockRow], Iterable[WaitingClaim]]]:
    """Yield each lock with its claims and its holders' waits, if ``waiting``."""
    waits = backend.inspector.waits_of(locks) if waiting else {}
    for lock, claims in (
        with_claims(backend, locks) if waiting else ((lock, []) for lock in locks)
    ):
        yield lock, claims, waits.get(lock.pk, ())


def _claim_fields(claim: LockRow) -> dict[str, Any]:
    return {
        "state": claim.state,
        "holder": claim.holder,
        "owner_ip": claim.owner_ip,
        "begin_time": _iso(claim.begin_time),
        "mode": "shared" if claim.shared else "exclusive",
        "permits": (
            claim.permits if claim.shared and claim.permits != UNLIMITED else None
        ),
    }


def _share_fields(share: LockRow) -> dict[str, Any]:
    return {
        **_claim_fields(share),
        "end_time": _iso(share.end_time),
        "seconds_held": _rounded(share.seconds_held),
        "seconds_left": None if is_kept(share) else _rounded(share.seconds_left),
        "hold_count": share.hold_count,
        "token": share.version,
    }


def _queue_fields(position: int | None, claim: LockRow, prefix: str) -> dict[str, Any]:
    return {
        "position": position,
        **_claim_fields(claim),
        "holds": [key.removeprefix(prefix) for key in claim.held_keys],
        "seconds_waited": round(claim.seconds_held, 3),
    }


def _iso(value: datetime | None) -> str | None:
    return value.isoformat() if value else None


def _rounded(value: float | None) -> float | None:
    return None if value in {None, math.inf} else round(value, 3)


def _short(seconds: float | None) -> str:
    return "-" if seconds in {None, math.inf} else short_duration(seconds)


def _cut(cell: str, width: int) -> str:
    """Return a text without its middle, if it is wider."""
    half, cut = width // 2, cell
    while _width(cut) > width and half:
        cut, half = f"{cell[:half]}…{cell[-half:]}", half - 1
    return cut


def _aligned(column: str, cell: str, width: int) -> str:
    space = " " * (width - _width(cell))
    return space + cell if column in NUMBERS else cell + space


def _width(text: str) -> int:
    """Return the number of terminal columns that the text occupies."""
    return sum(
        (
            0
            if unicodedata.category(character) in {"Mn", "Me", "Cf"}
            else 2
            if unicodedata.east_asian_width(character) in {"W", "F"}
            else 1
        )
        for character in text
    )
