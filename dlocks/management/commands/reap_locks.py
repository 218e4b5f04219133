"""``manage.py reap_locks``: clear stale locks and old records, for cron."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from dlocks import audit
from dlocks.backends.database.backend import DatabaseBackend
from dlocks.management.base import LockCommand, add_duration, add_flag, seconds_of


class Command(LockCommand):
    needs = "reap"
    help = (
        "Clears stale locks and shared holds. Deletes dead claims, old records of the"
        " history and, with --idle-for, the rows of unused keys. In ZooKeeper, deletes"
        " the nodes of unused keys."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_duration(
            parser,
            "--idle-for",
            "Also delete rows that have been free for this time, such as 12h or 30d.",
        )
        add_duration(
            parser,
            "--history-for",
            "Delete the records of holds that ended longer ago. Default: %(default)s.",
            default="30d",
        )
        add_flag(parser, "--dry-run", "Only count, and change nothing.")

    def work(self, backend: Any, **options: Any) -> None:
        idle_for, dry_run = options["idle_for"], options["dry_run"]
        if not isinstance(backend, DatabaseBackend):
            if idle_for is not None:
                raise CommandError("--idle-for is only for rows in a database.")
            nodes = backend.reap(dry_run=dry_run)
            will = "would be " if dry_run else ""
            self.stdout.write(f"{_plural(nodes, 'unused node')} {will}deleted.")
            return
        history_for = seconds_of("--history-for", options["history_for"])
        will = "would be " if dry_run else ""
        idle = None if idle_for is None else seconds_of("--idle-for", idle_for)
        results = []
        freed = deleted = forgotten = 0
        try:
            # Deletion comes first, so that a dry run counts the same rows. Each batch
            # is its own committed transaction.
            if idle is not None:
                for number in backend.maintenance.purge(idle, dry_run=dry_run):
                    deleted += number
                results.append(f"{_plural(deleted, 'unused row')} {will}deleted")
            for number in backend.maintenance.reap(dry_run=dry_run):
                freed += number
            results.insert(0, f"{_plural(freed, 'stale lock')} {will}cleared")
            for number in backend.records.delete_older_than(
                history_for, dry_run=dry_run
            ):
                forgotten += number
            if forgotten or backend.history:
                records = _plural(forgotten, "record")
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


def _plural(number: int, noun: str) -> str:
    """Return the number with the noun, in the plural unless it is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
