"""``manage.py clear_lock``: clear a stale lock, or force its release."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import CommandError, CommandParser

from dlocks import audit
from dlocks.backends.base import Backend
from dlocks.core.policy import check_key
from dlocks.management.base import LockCommand, add_flag
from dlocks.models import LockState
from dlocks.operations import (
    LockRow,
    NotCleared,
    describe,
    end,
    is_exclusive,
    is_kept,
    is_resting,
    kept_by_transaction,
    shares,
    shown,
    state_of,
    time_left,
)
from dlocks.text import printable

# Shared holds that are shown.
SHOWN = 100


class Command(LockCommand):
    help = (
        "Clears a stale lock, or forces the release of a held one, if it still has the"
        " holder that was shown. The first waiter then acquires the key."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "key", metavar="KEY", help="The key without the prefix of the alias."
        )
        parser.add_argument(
            "--share",
            type=int,
            metavar="TOKEN",
            help="End the shared hold that has this token.",
        )
        parser.add_argument(
            "--reason",
            metavar="TEXT",
            help="The reason, for the log. Required if the lock is held.",
        )
        add_flag(parser, "--yes", "Do not confirm.")
        add_flag(parser, "--stale-only", "Clear only a stale lock, and refuse others.")

    def work(self, backend: Backend, **options: Any) -> None:
        key, token, reason = options["key"], options["share"], options["reason"]
        try:
            check_key(key)
            check_key(backend.prefix + key)
            if reason is not None:
                reason = audit.reason_of(reason)
        except (TypeError, ValueError) as error:
            raise CommandError(str(error)) from error
        name, key = f"'{printable(key)}'", backend.prefix + key
        hold = self._chosen(backend, key, name, token)
        if hold is None:
            self.stdout.write(f"{name} is already free. Nothing was changed.")
            return
        self.stdout.write(f"{name} is {_held_by(hold)}.")
        is_stale = hold.state == LockState.STALE
        if is_kept(hold):
            raise CommandError(f"{name} was not cleared ({kept_by_transaction()}).")
        if not is_stale and options["stale_only"]:
            raise CommandError(f"{name} is not stale. Nothing was changed.")
        if not is_stale and reason is None:
            state = "resting" if is_resting(hold) else "held"
            raise CommandError(
                f"{name} is {state}. To force its release, pass --reason TEXT for the"
                " log. Nothing was changed."
            )
        if not options["yes"]:
            what = f"Clear {name}" if token is None else f"End a shared hold of {name}"
            self._ask(what, is_stale=is_stale)
        try:
            # A lock that became held during the confirmation is not cleared without a
            # reason.
            end(
                backend,
                "lock" if token is None else "share",
                key,
                hold.version,
                reason=reason,
                by=audit.operator(),
                via="clear_lock",
                stale_only=options["stale_only"],
            )
        except NotCleared as why:
            now = ""
            if why.lock is not None and token is None:
                now = f" It is now {_state(why.lock)}."
            raise CommandError(f"{name} was not cleared ({why}).{now}") from None
        now = ""
        if token is not None:
            done = f"1 shared hold of {name} was ended."
        elif (lock := shown(backend, key)) is None or lock.state == LockState.FREE:
            done = f"{name} was cleared and is free."
        else:
            done, now = f"{name} was cleared.", f" It is now {_state(lock)}."
        if not is_resting(hold):
            now += (
                " Its former holder is fenced off: its next renewal reports the loss."
            )
        self.stdout.write(f"{self.style.SUCCESS(done)}{now}")

    def _chosen(
        self, backend: Backend, key: str, name: str, token: int | None
    ) -> LockRow | None:
        """Return the lock or the shared hold that is meant, or None if it is free."""
        lock = shown(backend, key)
        if lock is None:
            raise CommandError(f"DLOCKS[{backend.alias!r}] has no lock {name}.")
        if token is not None:
            for share in shares(backend, [key], token):
                return share
            raise CommandError(
                f"{name} has no shared hold with token {token}. Nothing was changed."
            )
        if lock.state == LockState.FREE:
            return None
        if not is_exclusive(lock):
            self.stdout.write(f"{name} is shared:")
            for share in shares(backend, [key])[:SHOWN]:
                self.stdout.write(f"    {_held_by(share)}")
            raise CommandError(
                f"{name} is shared. Pass --share TOKEN to end one shared hold. Nothing"
                " was changed."
            )
        return lock

    def _ask(self, what: str, *, is_stale: bool) -> None:
        if not sys.stdin.isatty():
            raise CommandError(
                "The confirmation needs a terminal. Pass --yes to clear without it."
                " Nothing was changed."
            )
        warning = "" if is_stale else "A holder may still be working. "
        try:
            answer = input(f"{warning}{what}? [y/N] ")
        except EOFError:
            answer = ""
        if answer.strip().lower() not in {"y", "yes"}:
            raise CommandError("Not confirmed. Nothing was changed.")


def _state(lock: LockRow) -> str:
    return _held_by(lock) if is_exclusive(lock) else state_of(lock)


def _held_by(hold: LockRow) -> str:
    if is_resting(hold):
        who = printable(hold.holder)
        return f"resting, {time_left(hold)}: released by {who} (token {hold.version})"
    stale = "" if hold.state == LockState.HELD else f"{hold.state}: "
    return f"{stale}held by {describe(hold)} (token {hold.version})"
