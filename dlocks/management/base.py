"""The base class of the commands: the option --using, durations, short errors."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import (
    BaseCommand,
    CommandError,
    CommandParser,
    no_translations,
)
from django.db import connections, transaction
from django.db.utils import Error

from dlocks.backends.base import Backend
from dlocks.backends.database.backend import DatabaseBackend
from dlocks.backends.database.failures import how_to_migrate, is_unmigrated
from dlocks.conf import DEFAULT_ALIAS, backends
from dlocks.exceptions import LockBackendError
from dlocks.values import check_prefix, seconds

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_using(parser: CommandParser) -> None:
    parser.add_argument(
        "--using",
        default=DEFAULT_ALIAS,
        metavar="ALIAS",
        help="An alias of the DLOCKS setting. Default: %(default)s.",
    )


def add_flag(parser: Any, option: str, text: str) -> None:
    parser.add_argument(option, action="store_true", help=text)


def add_duration(parser: CommandParser, option: str, text: str, **kwargs: Any) -> None:
    parser.add_argument(option, metavar="DURATION", help=text, **kwargs)


def seconds_of(option: str, duration: Any) -> float:
    """Return the seconds of a duration such as ``90s``, or raise CommandError.

    ``call_command()`` may pass a number of seconds or a ``timedelta``.
    """
    if isinstance(duration, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", duration, re.ASCII)
        if match is None:
            raise CommandError(
                f"{option} takes a duration such as 0.5s, 90s, 15m, 12h or 30d, not"
                f" {duration!r}."
            )
        duration = float(match[1]) * UNITS[match[2]]
    try:
        return seconds(option, duration)
    except (TypeError, ValueError) as error:
        raise CommandError(f"{error}.") from error


class LockCommand(BaseCommand):
    """A command for the locks of one alias."""

    # The method that a backend needs, if it need not be able to list its locks.
    needs = ""

    def add_arguments(self, parser: CommandParser) -> None:
        add_using(parser)

    @no_translations
    def handle(self, *args: Any, **options: Any) -> None:
        backend = self._backend(options["using"])
        database = backend.database
        savepoint: Any = nullcontext()
        try:
            if database and connections[database].in_atomic_block:
                # No error must abort the caller's transaction.
                savepoint = transaction.atomic(using=database)
            elif database and connections[database].connection is None:
                # No caller has used the connection. With ``"AUTOCOMMIT": False`` in
                # DATABASES, nothing would commit what a command does.
                connections[database].set_autocommit(True)
            with savepoint:
                self.work(backend, **options)
        except (LockBackendError, Error) as error:
            if is_unmigrated(error):
                cause = (
                    error.__cause__ if isinstance(error, LockBackendError) else error
                )
                what = str(cause).partition("\n")[0]
                raise CommandError(
                    f"Database {database!r} is not migrated ({what})."
                    f" {how_to_migrate(database)}"
                ) from error
            raise CommandError(str(error)) from error

    def work(self, backend: Any, **options: Any) -> None:
        raise NotImplementedError(
            "subclasses of LockCommand must provide a work() method"
        )

    def _backend(self, alias: str) -> Backend:
        try:
            backend = backends[alias]
            # A function may return it, and no tenant is chosen here, for example.
            check_prefix(backend.prefix)
        except (ImproperlyConfigured, ValueError) as error:
            raise CommandError(str(error)) from error
        why = backend.unlisted
        if self.needs:
            why = "" if hasattr(backend, self.needs) else "It leaves no rows behind."
        if why and not isinstance(backend, DatabaseBackend):
            raise CommandError(
                f"DLOCKS[{alias!r}], a {type(backend).__name__}, does not support this"
                f" command. {why}"
            )
        return backend
