"""Model fields for keys, texts and times of the database's clock."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper


class KeyField(models.CharField):  # type: ignore[type-arg]
    """A string that every database compares byte for byte.

    Case, accents and trailing spaces are significant.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("db_collation", "C")
        super().__init__(*args, **kwargs)

    def deconstruct(self) -> Any:
        name, path, args, kwargs = super().deconstruct()
        del kwargs["db_collation"]
        return name, path, args, kwargs

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        if connection.vendor == "postgresql":
            # Django adds a second index, for patterns, to a column of type ``varchar``.
            # It does not recognise the long name of the type.
            return f"character varying({self.max_length})"
        return super().db_type(connection)

    def db_parameters(self, connection: BaseDatabaseWrapper) -> dict[str, Any]:
        parameters: dict[str, Any] = {**super().db_parameters(connection)}
        if connection.vendor == "mysql":
            mariadb = getattr(connection, "mysql_is_mariadb", False)
            parameters["collation"] = (
                "utf8mb4_nopad_bin" if mariadb else "utf8mb4_0900_bin"
            )
        elif connection.vendor == "sqlite":
            parameters["collation"] = "BINARY"
        return parameters


class UnicodeField(models.CharField):  # type: ignore[type-arg]
    """A string that holds any text, whatever the database's character set.

    This matters on MySQL and MariaDB.
    """

    def db_parameters(self, connection: BaseDatabaseWrapper) -> dict[str, Any]:
        parameters: dict[str, Any] = {**super().db_parameters(connection)}
        if connection.vendor == "mysql":
            parameters["collation"] = "utf8mb4_unicode_520_ci"
        return parameters


class OwnerField(models.CharField):  # type: ignore[type-arg]
    """The secret identity of a hold, as a digest outside of the database.

    A process that knows the owner of a live hold can act as its holder. Therefore the
    serializers of Django, and ``dumpdata`` with them, write a digest. No process has it
    as an owner, so a hold that ``loaddata`` has written can only expire or be cleared.
    """

    def value_to_string(self, obj: models.Model) -> str:
        return digest(self.value_from_object(obj))


class ClaimOwnerField(OwnerField, KeyField):
    """The owner of a claim, which every database compares byte for byte."""


class HoldingField(models.TextField):  # type: ignore[type-arg]
    """What a waiting caller holds, as JSON, with digests outside of the database."""

    def value_to_string(self, obj: models.Model) -> str:
        holding = json.loads(self.value_from_object(obj) or "[]")
        held = [(key, digest(owner), *rest) for key, owner, *rest in holding]
        return json.dumps(held) if held else ""


def digest(owner: str) -> str:
    """Return a text of the length of an owner that does not reveal it."""
    if not owner:
        return owner
    return hashlib.blake2s(owner.encode(), digest_size=16, person=b"dlocks").hexdigest()


class ClockField(models.DateTimeField):  # type: ignore[type-arg]
    """A time of the database's own clock.

    It is in UTC in the table and an aware datetime here, whatever the time zones in the
    settings.
    """

    def select_format(self, compiler: Any, sql: str, params: Any) -> Any:
        if compiler.connection.vendor == "postgresql":
            # The session may have another time zone than Django has set, and assumes.
            # And a time zone repeats an hour of each year.
            sql = f"({sql}) AT TIME ZONE 'UTC'"
        return sql, params

    def from_db_value(
        self, value: datetime | None, expression: Any, connection: BaseDatabaseWrapper
    ) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC)
