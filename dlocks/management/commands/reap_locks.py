"""``manage.py reap_locks``: see to what was left behind, for cron."""

from __future__ import annotations

import re
from typing import Any

from django.core.management.base import CommandError, CommandParser

from dlocks.backends.base import seconds
from dlocks.backends.database import DatabaseBackend
from dlocks.management.base import LockCommand

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Command(LockCommand):
    help = "Makes stale locks free, as failed, and with --idle-for deletes the rows of keys that are not used any more."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--idle-for", metavar="DURATION", help="Also delete rows that have been free so long: 90s, 15m, 12h, 30d."
        )
        parser.add_argument("--dry-run", action="store_true", help="Only count.")

    def work(self, backend: DatabaseBackend, **options: Any) -> None:
        idle_for, dry_run = options["idle_for"], options["dry_run"]
        will = "would be " if dry_run else ""
        told = []
        # Deleting comes first, so that a dry run counts the same rows.
        if idle_for is not None:
            deleted = sum(backend.purge(_seconds(idle_for), dry_run=dry_run))
            told.append(f"{deleted} unused row{'' if deleted == 1 else 's'} {will}deleted")
        freed = sum(backend.reap(dry_run=dry_run))
        told.insert(0, f"{freed} stale lock{'' if freed == 1 else 's'} {will}made free")
        self.stdout.write(", ".join(told) + ".")


def _seconds(duration: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", str(duration), re.ASCII)
    if match is None:
        raise CommandError(f"--idle-for takes a duration such as 90s, 15m, 12h or 30d, not {duration!r}.")
    try:
        return seconds("--idle-for", float(match[1]) * UNITS[match[2]])
    except ValueError as error:
        raise CommandError(f"{error}.") from error
