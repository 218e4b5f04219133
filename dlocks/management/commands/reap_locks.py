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
        will = "would be " if dry_run else ""
        if not isinstance(backend, DatabaseBackend):
            if idle_for is not None:
                raise CommandError("--idle-for is only for rows in a database.")
            nodes = backend.reap(dry_run=dry_run)
            self.stdout.write(f"{_plural(nodes, 'unused node')} {will}deleted.")
            return
        history_for = seconds_of("--history-for", options["history_for"])
        counts = {"freed": 0, "deleted": 0, "forgotten": 0}
        # Deletion comes first, so that a dry run counts the same rows. Each batch is
        # its own committed transaction.
        batches = {}
        if idle_for is not None:
            idle = seconds_of("--idle-for", idle_for)
            batches["deleted"] = backend.maintenance.purge(idle, dry_run=dry_run)
        batches["freed"] = backend.maintenance.reap(dry_run=dry_run)
        batches["forgotten"] = backend.records.delete_older_than(
            history_for, dry_run=dry_run
        )
        try:
            for name, numbers in batches.items():
                for number in numbers:
                    counts[name] += number
        finally:
            # The log also records what was done before an error.
            if any(counts.values()) and not dry_run:
                by = audit.operator()
                facts = {f"audit_{name}": count for name, count in counts.items()}
                audit.write(
                    backend.database,
                    "reap of %r: %d cleared, %d unused rows deleted, %d records"
                    " deleted, by %r via reap_locks",
                    (backend.alias, *counts.values(), by),
                    {
                        "audit_action": "reap",
                        "audit_by": by,
                        "audit_via": "reap_locks",
                        **facts,
                    },
                )
        results = [f"{_plural(counts['freed'], 'stale lock')} {will}cleared"]
        if idle_for is not None:
            results.append(f"{_plural(counts['deleted'], 'unused row')} {will}deleted")
        if counts["forgotten"] or backend.history:
            records = _plural(counts["forgotten"], "record")
            results.append(f"{records} of the history {will}deleted")
        self.stdout.write(", ".join(results) + ".")


def _plural(number: int, noun: str) -> str:
    """Return the number with the noun, in the plural unless it is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
