"""The base class of the commands: the option --using, patterns, short errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import (
    BaseCommand,
    CommandError,
    CommandParser,
    no_translations,
)
from django.db import connections
from django.db.utils import Error

from dlocks.backends.base import Backend
from dlocks.backends.database.backend import DatabaseBackend
from dlocks.backends.database.connection import is_unmigrated
from dlocks.conf import DEFAULT_ALIAS, backends
from dlocks.exceptions import LockBackendError
from dlocks.operations import LockRow


def add_using(parser: CommandParser) -> None:
    parser.add_argument(
        "--using",
        default=DEFAULT_ALIAS,
        metavar="ALIAS",
        help="An alias of the DLOCKS setting. Default: %(default)s.",
    )


def add_flag(parser: Any, option: str, text: str) -> None:
    parser.add_argument(option, action="store_true", help=text)


class LockCommand(BaseCommand):
    """A command for the locks of one alias."""

    # Whether it works only on the rows of a database.
    needs_rows = False

    def add_arguments(self, parser: CommandParser) -> None:
        add_using(parser)

    @no_translations
    def handle(self, *args: Any, **options: Any) -> None:
        backend = self._backend(options["using"])
        try:
            _commit_each_statement(backend.database)
            self.work(backend, **options)
        except (LockBackendError, Error) as error:
            if is_unmigrated(error):
                cause = (
                    error.__cause__ if isinstance(error, LockBackendError) else error
                )
                what = str(cause).partition("\n")[0]
                raise CommandError(
                    f"Database {backend.database!r} is not migrated ({what}). Run"
                    f" 'manage.py migrate dlocks --database {backend.database}'."
                ) from error
            raise CommandError(str(error)) from error

    def work(self, backend: Any, **options: Any) -> None:
        raise NotImplementedError(
            "subclasses of LockCommand must provide a work() method"
        )

    def _backend(self, alias: str) -> Backend:
        try:
            backend = backends[alias]
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        rows = isinstance(backend, DatabaseBackend)
        why = "It has no rows in a database." if self.needs_rows else backend.unlisted
        if why and not rows:
            raise CommandError(
                f"DLOCKS[{alias!r}], a {type(backend).__name__}, does not support this"
                f" command. {why}"
            )
        return backend


def _commit_each_statement(database: str) -> None:
    """Turn autocommit on if no caller has used the connection.

    With ``"AUTOCOMMIT": False`` in DATABASES, nothing would commit what a command does.
    """
    if database and (wrapper := connections[database]).connection is None:
        wrapper.set_autocommit(True)


def plural(number: int, noun: str) -> str:
    """Return the number with the noun, in the plural unless it is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def matching(
    found: Iterable[list[LockRow]], patterns: list[str], prefix: str
) -> Iterator[list[LockRow]]:
    """Yield the locks whose keys without the prefix match a pattern."""
    for page in found:
        if mine := [
            lock
            for lock in page
            if (key := lock.pk.removeprefix(prefix)) in patterns
            or any(fnmatchcase(key, one) for one in patterns)
        ]:
            yield mine
