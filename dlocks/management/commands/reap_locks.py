"""``manage.py reap_locks``: clear stale locks and old records, for cron."""

from __future__ import annotations

import re
from typing import Any

from django.core.management.base import CommandError, CommandParser

from dlocks import audit
from dlocks.backends.database.backend import DatabaseBackend
from dlocks.management.base import LockCommand, add_flag, plural
from dlocks.values import seconds

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Command(LockCommand):
    needs_rows = True
    help = (
        "Clears stale locks and shared holds. Deletes dead claims, old records of the"
        " history and, with --idle-for, the rows of unused keys."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--idle-for",
            metavar="DURATION",
            help=(
                "Also delete rows that have been free for this time, such as 90s, 15m,"
                " 12h or 30d."
            ),
        )
        parser.add_argument(
            "--history-for",
            metavar="DURATION",
            default="30d",
            help=(
                "Delete the records of holds that ended longer ago than this. Default:"
                " %(default)s."
            ),
        )
        add_flag(parser, "--dry-run", "Only count, and change nothing.")

    def work(self, backend: DatabaseBackend, **options: Any) -> None:
        idle_for, dry_run = options["idle_for"], options["dry_run"]
        history_for = _seconds("--history-for", options["history_for"])
        will = "would be " if dry_run else ""
        idle = None if idle_for is None else _seconds("--idle-for", idle_for)
        results = []
        freed = deleted = forgotten = 0
        try:
            # Deletion comes first, so that a dry run counts the same rows. Each batch
            # is its own committed transaction.
            if idle is not None:
                for number in backend.purge(idle, dry_run=dry_run):
                    deleted += number
                results.append(f"{plural(deleted, 'unused row')} {will}deleted")
            for number in backend.reap(dry_run=dry_run):
                freed += number
            results.insert(0, f"{plural(freed, 'stale lock')} {will}cleared")
            for number in backend.delete_older_than(history_for, dry_run=dry_run):
                forgotten += number
            if forgotten or backend.history:
                records = plural(forgotten, "record")
                results.append(f"{records} of the history {will}deleted")
        finally:
            # The log also records what was done before an error.
            if (freed or deleted or forgotten) and not dry_run:
                audit.reaped(
                    freed=freed,
                    deleted=deleted,
                    forgotten=forgotten,
                    by=audit.operator(),
                    via="reap_locks",
                    alias=backend.alias,
                    database=backend.database,
                )
        self.stdout.write(", ".join(results) + ".")


def _seconds(option: str, duration: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", str(duration), re.ASCII)
    if match is None:
        raise CommandError(
            f"{option} takes a duration such as 90s, 15m, 12h or 30d, not {duration!r}."
        )
    try:
        return seconds(option, float(match[1]) * UNITS[match[2]])
    except ValueError as error:
        raise CommandError(f"{error}.") from error
