"""The tests with the successor of the database backends in their place.

It applies if DLOCKS_TEST_SUCCESSOR is set, and is removed with the backends that it
replaces.
"""

from __future__ import annotations

import os
from typing import Any

from tests.internals import database, database_backend, relational, strategies

# What commands and the admin ask of the backend itself, and its part that has it.
PARTS = {
    "maintenance": (
        "end_share", "take_out", "purge_one", "tidy", "move_on", "reap", "purge",
        "kept", "row_of", "shares_of", "in_transactions",
    ),
    "session": ("_run",),
}  # fmt: skip


def _part(part: str, name: str) -> property:
    return property(lambda self: getattr(getattr(self, part), name.strip("_")))


def install() -> None:
    for name in relational.__all__:
        for module in (database, database_backend, strategies):
            if hasattr(module, name):
                setattr(module, name, getattr(relational, name))
    for part, names in PARTS.items():
        for name in names:
            setattr(relational.DatabaseBackend, name, _part(part, name))

    backend_class = relational.DatabaseBackend
    backend_class._contended_keys = property(lambda self: self.contended)

    if os.environ.get("DLOCKS_TEST_PREPARE") == "0":
        # A proxy finds the texts of statements only if psycopg sends them.
        defaults = backend_class.__init__.__kwdefaults__
        defaults["prepare"] = False

    def delete_older_than(self: Any, older_than: float, **options: Any) -> Any:
        return self.records.delete_older_than(older_than, self.prefix, **options)

    backend_class.delete_older_than = delete_older_than
    backend_class.remember = property(lambda self: self.records.remember)
