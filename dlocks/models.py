"""The lock row: the schema, and nothing that locks."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from dlocks.backends.base import KEY_LENGTH
from dlocks.backends.database.dialects import dialect_of


class KeyField(models.CharField):  # type: ignore[type-arg]
    """A string that every database compares byte for byte: case, accents and trailing spaces tell keys apart."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("db_collation", "C")
        super().__init__(*args, **kwargs)

    def deconstruct(self) -> Any:
        name, path, args, kwargs = super().deconstruct()
        del kwargs["db_collation"]
        return name, path, args, kwargs

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        if connection.vendor == "postgresql":
            # Under its long name, for which Django does not add an index for patterns: one more to be kept.
            return f"character varying({self.max_length})"
        return super().db_type(connection)

    def db_parameters(self, connection: BaseDatabaseWrapper) -> dict[str, Any]:
        parameters: dict[str, Any] = {**super().db_parameters(connection)}
        if connection.vendor == "mysql":
            mariadb = getattr(connection, "mysql_is_mariadb", False)
            parameters["collation"] = "utf8mb4_nopad_bin" if mariadb else "utf8mb4_0900_bin"
        elif connection.vendor == "sqlite":
            parameters["collation"] = "BINARY"
        return parameters


class ClockField(models.DateTimeField):  # type: ignore[type-arg]
    """A moment by the database's own clock: UTC in the table and aware here, whatever the zones in the settings."""

    def from_db_value(
        self, value: datetime | None, expression: Any, connection: BaseDatabaseWrapper
    ) -> datetime | None:
        if value is None:
            return None
        if connection.vendor != "postgresql":
            return value.replace(tzinfo=UTC)
        if timezone.is_naive(value):
            value = value.replace(tzinfo=ZoneInfo(connection.timezone_name))
        return value.astimezone(UTC)


class SecondsUntil(models.Func):
    """Seconds from the database's clock to a moment in a column; below zero when it has passed."""

    output_field = models.FloatField()
    arity = 1

    def as_sql(self, compiler: Any, connection: BaseDatabaseWrapper, **extra: Any) -> Any:  # type: ignore[override]
        column, parameters = compiler.compile(self.source_expressions[0])
        return dialect_of(connection).seconds_until(column), parameters


class LockState(models.TextChoices):
    """What a lock row says to a person; a row inside a transaction that has not ended is still seen as it was."""

    HELD = "held", _("held")
    STALE = "stale", _("stale")
    FREE = "free", _("free")


class LockQuerySet(models.QuerySet["ResourceLock"]):
    def by_clock(self) -> LockQuerySet:
        """Add ``seconds_left``, ``seconds_held`` and ``state``, by the database's clock."""
        taken = models.Q(seconds_left__gt=0)
        return self.annotate(
            seconds_left=SecondsUntil("end_time"),
            seconds_held=-SecondsUntil("begin_time"),
            state=models.Case(
                models.When(taken, then=models.Value(LockState.HELD.value)),
                models.When(status=ResourceLock.Status.PROCESSING, then=models.Value(LockState.STALE.value)),
                default=models.Value(LockState.FREE.value),
            ),
        )


class ResourceLock(models.Model):
    """
    One key. It is free when ``end_time`` has passed by the database's clock, and nothing else makes it so.

    ``version`` grows at every grant, takeover and clearing: its value at the grant is the fencing token of the hold.
    """

    class Status(models.TextChoices):
        PROCESSING = "P", _("processing")
        SUCCEEDED = "S", _("succeeded")
        FAILED = "F", _("failed")

    key_resource = KeyField(_("key"), primary_key=True, max_length=KEY_LENGTH)
    status = models.CharField(_("status"), max_length=1, choices=Status.choices)
    owner = models.CharField(_("owner"), max_length=32, help_text=_("The capability of one hold."))
    holder = models.CharField(_("holder"), max_length=255, help_text=_("Host, process and thread."))
    owner_ip = models.GenericIPAddressField(_("owner IP"), null=True)
    begin_time = ClockField(_("begin time"), null=True)
    end_time = ClockField(_("end time"))
    hold_count = models.PositiveIntegerField(_("hold count"), default=0)
    version = models.BigIntegerField(_("version"))

    # No index beyond the primary key: one on a column that changes with every hold would end PostgreSQL's HOT updates.

    objects = LockQuerySet.as_manager()

    class Meta:
        verbose_name = _("lock")
        verbose_name_plural = _("locks")
        default_permissions = ("view",)
        permissions = (
            ("clear_resourcelock", _("Can clear stale locks")),
            ("force_release_resourcelock", _("Can force the release of a held lock")),
        )

    def __str__(self) -> str:
        return str(self.key_resource)
