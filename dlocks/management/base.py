"""What the commands have in common: the alias, and errors told in one line."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db.utils import Error

from dlocks.backends.database import DatabaseBackend
from dlocks.conf import DEFAULT_ALIAS, backends
from dlocks.exceptions import LockBackendError


class LockCommand(BaseCommand):
    """A command about the locks of one alias."""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--using", default=DEFAULT_ALIAS, metavar="ALIAS", help="Alias of the DLOCKS setting. Default: %(default)s."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            self.work(self._backend(options["using"]), **options)
        except (LockBackendError, Error) as error:
            raise CommandError(str(error)) from error

    def work(self, backend: DatabaseBackend, **options: Any) -> None:
        raise NotImplementedError("subclasses of LockCommand must provide a work() method")

    def _backend(self, alias: str) -> DatabaseBackend:
        try:
            backend = backends[alias]
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        if not backend.supports_clearing or not isinstance(backend, DatabaseBackend):
            raise CommandError(
                f"The locks of DLOCKS[{alias!r}] cannot be seen or cleared from here: {type(backend).__name__} keeps "
                "none in a database."
            )
        return backend
