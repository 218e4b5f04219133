"""``manage.py clear_lock``: make one key free, whoever has it."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import CommandError, CommandParser

from dlocks.backends.database import DatabaseBackend
from dlocks.locks import check_key
from dlocks.management.base import LockCommand
from dlocks.models import LockState
from dlocks.oversight import NotCleared, Shown, clear, describe, printable, shown


class Command(LockCommand):
    help = "Makes one key free and fences its holder off, if the lock is still the one that was shown."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("key", metavar="KEY", help="The key, as the application names it.")
        parser.add_argument("--yes", action="store_true", help="Do not ask.")
        parser.add_argument("--stale-only", action="store_true", help="Refuse to clear a lock that is held.")

    def work(self, backend: DatabaseBackend, **options: Any) -> None:
        key = options["key"]
        try:
            check_key(key)
            check_key(backend.prefix + key)
        except (TypeError, ValueError) as error:
            raise CommandError(str(error)) from error
        name = f"'{printable(key)}'"
        lock = shown(backend, backend.prefix + key)
        if lock is None:
            raise CommandError(f"There is no lock {name} in DLOCKS[{backend.alias!r}].")
        if lock.state == LockState.FREE:
            self.stdout.write(f"{name} is free already: nothing is changed.")
            return
        self.stdout.write(f"{name} is {_state(lock)}.")
        if options["stale_only"] and lock.state != LockState.STALE:
            raise CommandError(f"{name} is not stale: nothing is changed.")
        if not options["yes"]:
            self._ask(name, lock.state)
        try:
            clear(backend, lock.pk, lock.version, stale_only=options["stale_only"])
        except NotCleared as reason:
            now = "" if reason.lock is None else f" Now it is {_state(reason.lock)}."
            raise CommandError(f"{name} is not cleared ({reason}).{now}") from None
        self.stdout.write(
            self.style.SUCCESS(f"{name} is cleared and free.")
            + " Its former holder is fenced off, and is told at its next renewal that the lock is lost."
        )

    def _ask(self, name: str, state: str) -> None:
        if not sys.stdin.isatty():
            raise CommandError(f"There is nobody to ask whether to clear {name}: pass --yes to clear it unasked.")
        warning = "Its holder may still be at work. " if state == LockState.HELD else ""
        try:
            answer = input(f"{warning}Clear {name}? [y/N] ")
        except EOFError:
            answer = ""
        if answer.strip().lower() not in {"y", "yes"}:
            raise CommandError(f"{name} is not cleared: nothing is changed.")


def _state(lock: Shown) -> str:
    return lock.state if lock.state == LockState.FREE else f"{lock.state}: {describe(lock)} (token {lock.version})"
