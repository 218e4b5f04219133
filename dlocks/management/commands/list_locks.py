"""``manage.py list_locks``: list the locks and their holders."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from django.core.management.base import CommandParser

from dlocks.backends.base import Backend
from dlocks.management.base import LockCommand, add_flag
from dlocks.models import LockState
from dlocks.operations import (
    LockRow,
    describe,
    in_row,
    is_exclusive,
    is_kept,
    is_resting,
    is_session,
    mode,
    pages,
    state_of,
    with_claims,
    with_positions,
)
from dlocks.text import duration, printable, short_duration
from dlocks.values import UNLIMITED, WaitingClaim

# The columns after the key. A long holder has the rest of the 80 columns.
FACTS = "  {:<10} {:>7}  {:>4}  {:>5}  "
# A longer key is on a line of its own, whole, since ``clear_lock`` needs all of it.
KEY_WIDTH = 24

# A lock, the claims on it, and what its holders wait for.
Row = tuple[LockRow, list[LockRow], Sequence[WaitingClaim]]


class Command(LockCommand):
    help = (
        "Lists the locks that are held, shared or stale, with their holders. AGE is how"
        " long a key has been held. LEFT is the time left on its lease, or negative"
        " since the lease has expired. Both are by the database's clock. A key that an"
        " open transaction holds may look free. --json has more."
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
        add_flag(parser, "--json", "A JSON array, with UTC times, and ages in seconds.")

    def work(self, backend: Backend, **options: Any) -> None:
        states = [LockState.HELD, LockState.SHARED, LockState.STALE]
        if options["held"]:
            states.remove(LockState.STALE)
        elif options["stale"]:
            states = [LockState.STALE]
        elif options["all"]:
            states.append(LockState.FREE)
        chosen = options["held"] or options["stale"]
        waiting, patterns = options["waiting"], options["keys"]
        rows = _rows(backend, states, patterns, waiting, waiting and not chosen)
        try:
            if options["json"]:
                self._write_json(rows, backend.prefix, waiting)
            else:
                self._write_table(rows, backend.prefix)
        except BrokenPipeError:
            # The reader, for example ``head``, has closed the pipe. Redirect stdout, so
            # that the interpreter does not flush into it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def _write_table(self, rows: Iterator[Row], prefix: str) -> None:
        # A pipe gets one whole line for each lock, unless its reader has said, as
        # watch does, how wide its screen is.
        fits = self.stdout.isatty() or "COLUMNS" in os.environ
        limit = shutil.get_terminal_size().columns if fits else math.inf
        is_first = True
        for lock, claims, waits in rows:
            if is_first:
                header = FACTS.format("STATE", "WAITING", "AGE", "LEFT")
                self.stdout.write(f"{'KEY':<{KEY_WIDTH}}{header}HOLDER")
            is_first = False
            style = self.style.WARNING if lock.state == LockState.STALE else str
            for line in _lines(lock, prefix, limit):
                self.stdout.write(style(line))
            for line in (*_waits(waits, prefix), *_claims(claims, prefix)):
                self.stdout.write(f"    {line}")
        if is_first:
            self.stdout.write("No locks.")

    def _write_json(self, rows: Iterator[Row], prefix: str, waiting: bool) -> None:
        before = "["
        for lock, claims, waits in rows:
            fields = _lock_fields(lock, prefix)
            if waiting:
                fields["shared_by"] = [
                    {**_who_fields(share), **_mode_fields(share), **_hold_fields(share)}
                    for share in claims
                    if share.version is not None
                ]
                fields["queue"] = [
                    _queue_fields(position, claim, prefix)
                    for position, claim in with_positions(claims)
                ]
                fields["holders_wait_for"] = [
                    claim.key.removeprefix(prefix) for claim in waits
                ]
            text = json.dumps(fields, default=datetime.isoformat)
            self.stdout.write(before + text, ending="")
            before = ",\n "
        self.stdout.write("[]" if before == "[" else "]")


def _rows(
    backend: Backend,
    states: list[LockState],
    patterns: list[str],
    waiting: bool,
    waited_for: bool,
) -> Iterator[Row]:
    """Yield the locks in these states whose keys match a pattern, if there are any.

    With ``waiting``, add their claims and waits. With ``waited_for``, include locks in
    other states that have waiters.
    """
    for page in pages(backend, states, waited_for=waited_for):
        locks = [
            lock
            for lock in page
            if not patterns
            or (key := lock.pk.removeprefix(backend.prefix)) in patterns
            or any(fnmatchcase(key, pattern) for pattern in patterns)
        ]
        if not waiting:
            yield from ((lock, [], ()) for lock in locks)
        elif locks:
            waits = backend.inspector.waits_of(locks)
            for lock, claims in with_claims(backend, locks):
                yield lock, claims, waits.get(lock.pk, ())


# The table.


def _lines(lock: LockRow, prefix: str, limit: float) -> Iterator[str]:
    """Yield the line of a lock, after one with its key if the key is too long."""
    # The row of a shared key describes only its last exclusive holder.
    alone, taken, kept = in_row(lock), is_exclusive(lock), is_kept(lock)
    facts = FACTS.format(
        _state(lock),
        lock.waiting,
        _short(lock.seconds_held if taken else None),
        "transaction" if kept else _short(lock.seconds_left if taken else None),
    )
    key = printable(lock.pk.removeprefix(prefix))
    if _width(key) > KEY_WIDTH and limit < math.inf:
        yield key
        key = ""
    before = key + " " * (KEY_WIDTH - _width(key)) + facts
    yield before + _cut(
        (alone and printable(lock.holder)) or "-", limit - _width(before)
    )


def _state(lock: LockRow) -> str:
    if is_resting(lock):
        return "resting"
    return str(LockState.HELD.label) if is_kept(lock) else state_of(lock)


def _waits(waits: Sequence[WaitingClaim], prefix: str) -> Iterator[str]:
    for claim in waits:
        key = printable(claim.key.removeprefix(prefix))
        yield (
            f"its holder {printable(claim.holder)} has waited for {key!r} for"
            f" {duration(claim.waited)}"
        )


def _claims(claims: list[LockRow], prefix: str) -> Iterator[str]:
    for share in claims:
        if share.version is not None:
            yield f"held by {describe(share)}, {mode(share)} (token {share.version})"
    for position, claim in with_positions(claims):
        number = "-" if position is None else position
        held = [printable(key.removeprefix(prefix)) for key in claim.held_keys]
        holds = f", holds {', '.join(map(repr, held))}" if held else ""
        yield f"{number}. {describe(claim)}, {mode(claim)}{holds}"


def _short(seconds: float | None) -> str:
    return "-" if seconds in {None, math.inf} else short_duration(seconds)


def _cut(text: str, limit: float) -> str:
    """Return a text, or the beginning of one that is too wide."""
    if _width(text) <= limit:
        return text
    while text and _width(text) >= limit:
        text = text[:-1]
    return f"{text}…"


def _width(text: str) -> int:
    """Return the number of terminal columns that the text occupies."""
    wide = sum(unicodedata.east_asian_width(one) in {"W", "F"} for one in text)
    none = sum(unicodedata.category(one) in {"Mn", "Me", "Cf"} for one in text)
    return len(text) + wide - none


# The fields in JSON.


def _lock_fields(lock: LockRow, prefix: str) -> dict[str, Any]:
    return {
        "key": lock.pk.removeprefix(prefix),
        **_who_fields(lock, known=in_row(lock)),
        **_hold_fields(lock, known=is_exclusive(lock)),
        "waiting": lock.waiting,
        "sharing": lock.sharing,
    }


def _queue_fields(position: int | None, claim: LockRow, prefix: str) -> dict[str, Any]:
    return {
        "position": position,
        **_who_fields(claim),
        **_mode_fields(claim),
        "holds": [key.removeprefix(prefix) for key in claim.held_keys],
        "seconds_waited": round(claim.seconds_held, 3),
    }


def _who_fields(row: LockRow, *, known: bool = True) -> dict[str, Any]:
    return {
        "state": row.state,
        "holder": row.holder if known else "",
        "owner_ip": row.owner_ip if known else None,
        "begin_time": row.begin_time if known else None,
    }


def _hold_fields(hold: LockRow, *, known: bool = True) -> dict[str, Any]:
    limited = known and not is_kept(hold)
    return {
        "end_time": hold.end_time,
        "seconds_held": _rounded(hold.seconds_held) if known else None,
        "seconds_left": _rounded(hold.seconds_left) if limited else None,
        "hold_count": hold.hold_count,
        "token": None if is_session(hold) else hold.version,
    }


def _mode_fields(claim: LockRow) -> dict[str, Any]:
    limited = claim.shared and claim.permits != UNLIMITED
    return {
        "mode": "shared" if claim.shared else "exclusive",
        "permits": claim.permits if limited else None,
    }


def _rounded(value: float | None) -> float | None:
    return None if value in {None, math.inf} else round(value, 3)
