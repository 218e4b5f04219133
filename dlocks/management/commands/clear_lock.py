"""``manage.py clear_lock``: clear a stale lock, or force its release."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import CommandError, CommandParser

from dlocks import audit
from dlocks.backends.base import Backend
from dlocks.core.policy import check_key
from dlocks.management.base import LockCommand, add_flag, matching, plural
from dlocks.models import ClaimState, LockState
from dlocks.operations import (
    LockRow,
    NotCleared,
    clear,
    describe,
    end_share,
    in_row,
    in_transaction,
    is_kept,
    pages,
    shares,
    shown,
    state_of,
)
from dlocks.text import printable

# Shared holds that are shown.
SHOWN = 100

FENCED_OFF = "is fenced off: its next renewal reports the loss"


class Command(LockCommand):
    help = (
        "Clears a stale lock, or forces the release of a held one, if it still has the"
        " holder that was shown. The first waiter then acquires the key."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "keys",
            nargs="+",
            metavar="KEY",
            help=(
                "Keys without the prefix of the alias, or patterns such as 'stock:*'"
                " for all held and stale locks that match."
            ),
        )
        shares = parser.add_mutually_exclusive_group()
        shares.add_argument(
            "--share",
            type=int,
            metavar="TOKEN",
            help="End the shared hold that has this token.",
        )
        add_flag(shares, "--all-shares", "End all current shared holds.")
        add_flag(parser, "--dry-run", "Only show the locks, and change nothing.")
        add_flag(parser, "--yes", "Do not confirm.")
        add_flag(
            parser, "--stale-only", "Clear only stale locks, and refuse held ones."
        )
        parser.add_argument(
            "--reason",
            metavar="TEXT",
            help="The reason, for the log. Required if the lock is held.",
        )

    def work(self, backend: Backend, **options: Any) -> None:
        keys = options["keys"]
        try:
            for key in keys:
                check_key(key)
                check_key(backend.prefix + key)
            if options["reason"] is not None:
                options["reason"] = audit.reason_of(options["reason"])
        except (TypeError, ValueError) as error:
            raise CommandError(str(error)) from error
        locks, patterns = self._chosen(backend, keys, options["stale_only"])
        several = bool(patterns) or len(locks) > 1
        if several and options["share"] is not None:
            raise CommandError("--share ends a shared hold of one key.")
        if several or options["dry_run"]:
            for lock in locks:
                self.stdout.write(f"{_name(backend, lock)} is {_state(lock)}.")
        if options["dry_run"]:
            self.stdout.write("Nothing was changed.")
            return
        if several and not options["yes"]:
            held = any(lock.state != LockState.STALE for lock in locks)
            self._ask(f"Clear {plural(len(locks), 'lock')}?", held=held)
            options["yes"] = True
        failed = 0
        for lock in locks:
            try:
                self._clear(backend, lock, several, **options)
            except CommandError as error:
                if not several:
                    raise
                failed += 1
                self.stderr.write(str(error))
        if failed:
            raise CommandError(f"{failed} of {len(locks)} locks were not cleared.")

    def _chosen(
        self, backend: Backend, keys: list[str], stale_only: bool
    ) -> tuple[list[LockRow], list[str]]:
        """Return the locks of the keys and patterns, and the patterns."""
        locks: dict[str, LockRow] = {}
        patterns = []
        for key in keys:
            if (lock := shown(backend, backend.prefix + key)) is not None:
                locks[lock.pk] = lock
            elif set(key) & set("*?["):
                patterns.append(key)
            else:
                raise CommandError(
                    f"DLOCKS[{backend.alias!r}] has no lock '{printable(key)}'."
                )
        states = [LockState.STALE]
        if not stale_only:
            states += [LockState.HELD, LockState.SHARED]
        if patterns:
            for page in matching(pages(backend, states), patterns, backend.prefix):
                locks |= {lock.pk: lock for lock in page}
        if not locks:
            which = "stale lock" if stale_only else "held or stale lock"
            raise CommandError(
                f"DLOCKS[{backend.alias!r}] has no {which} that matches"
                f" '{printable(' '.join(patterns))}'."
            )
        return [locks[key] for key in sorted(locks)], patterns

    def _clear(
        self, backend: Backend, lock: LockRow, several: bool, **options: Any
    ) -> None:
        name = _name(backend, lock)
        if options["share"] is not None or options["all_shares"]:
            self._end_shares(backend, lock, name, **options)
            return
        if lock.state == LockState.FREE:
            self.stdout.write(f"{name} is already free. Nothing was changed.")
            return
        if not in_row(lock):
            self._write_shares(name, shares(backend, [lock.pk])[:SHOWN])
            raise CommandError(
                f"{name} is shared. Pass --share TOKEN to end one shared hold, or"
                " --all-shares to end all. Nothing was changed."
            )
        if not several:
            self.stdout.write(f"{name} is {_state(lock)}.")
        if is_kept(lock):
            raise CommandError(f"{name} was not cleared ({in_transaction()}).")
        if options["stale_only"] and lock.state != LockState.STALE:
            raise CommandError(f"{name} is not stale. Nothing was changed.")
        held = lock.state == LockState.HELD
        self._confirm(name, f"Clear {name}?", held, **options)
        try:
            # A lock that became held during the confirmation is not cleared without a
            # reason.
            lost = clear(
                backend,
                lock.pk,
                lock.version,
                stale_only=options["stale_only"] or options["reason"] is None,
            )
        except NotCleared as why:
            now = "" if why.lock is None else f" It is now {_state(why.lock)}."
            raise CommandError(f"{name} was not cleared ({why}).{now}") from None
        self._audit(backend, "lock", lock.pk, lost, options["reason"])
        self.stdout.write(
            self._now(backend, lock.pk, name) + f" Its former holder {FENCED_OFF}."
        )

    def _end_shares(
        self, backend: Backend, lock: LockRow, name: str, **options: Any
    ) -> None:
        token = options["share"]
        # Only the shared holds that are shown are ended.
        chosen = [
            share
            for share in shares(backend, [lock.pk], token)
            if not options["stale_only"] or share.state == ClaimState.STALE
        ]
        if not chosen:
            which = "stale shared hold" if options["stale_only"] else "shared hold"
            with_token = "" if token is None else f" with token {token}"
            raise CommandError(
                f"{name} has no {which}{with_token}. Nothing was changed."
            )
        self._write_shares(name, chosen)
        held = any(
            share.state == ClaimState.HELD and not is_kept(share) for share in chosen
        )
        number = plural(len(chosen), "shared hold")
        self._confirm(name, f"End {number} of {name}?", held, **options)
        refused = []
        stale_only = options["stale_only"] or options["reason"] is None
        for share in chosen:
            try:
                lost = end_share(backend, lock.pk, share.version, stale_only=stale_only)
            except NotCleared as why:
                refused.append(f"token {share.version} was not ended ({why})")
            else:
                self._audit(backend, "share", lock.pk, lost, options["reason"])
        if ended := len(chosen) - len(refused):
            if ended == 1:
                done, whose = "1 shared hold was", f"Its former holder {FENCED_OFF}"
            else:
                done = f"{ended} shared holds were"
                whose = "Their former holders are fenced off"
            self.stdout.write(self.style.SUCCESS(f"{done} ended.") + f" {whose}.")
        if refused:
            raise CommandError(f"{name}: {'; '.join(refused)}.")

    def _confirm(self, name: str, question: str, held: bool, **options: Any) -> None:
        if held and options["reason"] is None:
            raise CommandError(
                f"{name} is held. To force its release, pass --reason TEXT for the log."
                " Nothing was changed."
            )
        if not options["yes"]:
            self._ask(question, held=held)

    def _audit(
        self, backend: Backend, kind: str, key: str, lost: LockRow, reason: str | None
    ) -> None:
        stale = lost.state in {LockState.STALE, ClaimState.STALE}
        audit.taken(
            "clear" if stale else "force_release",
            kind=kind,
            key=key,
            number=lost.version,
            lost=lost,
            reason=reason or audit.STALE,
            by=audit.operator(),
            via="clear_lock",
            database=backend.database,
        )

    def _write_shares(self, name: str, found: Any) -> None:
        self.stdout.write(f"{name} is shared:")
        for share in found:
            self.stdout.write(f"    {_held_by(share)}")

    def _now(self, backend: Backend, key: str, name: str) -> str:
        lock = shown(backend, key)
        if lock is None or lock.state == LockState.FREE:
            return self.style.SUCCESS(f"{name} was cleared and is free.")
        return (
            self.style.SUCCESS(f"{name} was cleared.") + f" It is now {_state(lock)}."
        )

    def _ask(self, question: str, *, held: bool) -> None:
        if not sys.stdin.isatty():
            raise CommandError(
                "The confirmation needs a terminal. Pass --yes to clear without it."
                " Nothing was changed."
            )
        warning = "A holder may still be working. " if held else ""
        try:
            answer = input(f"{warning}{question} [y/N] ")
        except EOFError:
            answer = ""
        if answer.strip().lower() not in {"y", "yes"}:
            raise CommandError("Not confirmed. Nothing was changed.")


def _name(backend: Backend, lock: LockRow) -> str:
    return f"'{printable(lock.pk.removeprefix(backend.prefix))}'"


def _state(lock: LockRow) -> str:
    if lock.state == LockState.FREE or not in_row(lock):
        return state_of(lock)
    return _held_by(lock)


def _held_by(lock: LockRow) -> str:
    stale = "" if lock.state == LockState.HELD else f"{lock.state}: "
    return f"{stale}held by {describe(lock)} (token {lock.version})"
