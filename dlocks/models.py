"""The tables of locks: the schema, and nothing that locks."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Self
from zoneinfo import ZoneInfo

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.functions import Coalesce, Substr
from django.db.models.lookups import Exact
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


class After(models.Expression):
    """The moment so many seconds from now by the database's clock; below zero, one that has passed."""

    output_field = ClockField()

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.microseconds = round(seconds * 1_000_000)

    def as_sql(self, compiler: Any, connection: BaseDatabaseWrapper) -> Any:
        # Asked for once, so that an index on the column that it is compared with can be used.
        return f"(SELECT {dialect_of(connection).after_column('%s')})", [self.microseconds]


class LockState(models.TextChoices):
    """What a lock row says to a person; a row inside a transaction that has not ended is still seen as it was."""

    HELD = "held", _("held")
    SHARED = "shared", _("shared")
    STALE = "stale", _("stale")
    FREE = "free", _("free")


class ClaimState(models.TextChoices):
    """What a claim's row says to a person: it shares the key, or did until its lease ran out; it waits, or is dead."""

    HELD = "held", _("held")
    STALE = "stale", _("stale")
    WAITING = "waiting", _("waiting")
    DEAD = "dead", _("silent")


class ClockQuerySet(models.QuerySet[Any]):
    def by_clock(self) -> Self:
        """Add ``seconds_left``, ``seconds_held`` and ``state``, by the database's clock."""
        return self.annotate(
            seconds_left=SecondsUntil("end_time"),
            seconds_held=-SecondsUntil("begin_time"),
        ).annotate(state=self._state())

    def _state(self) -> models.Case:
        raise NotImplementedError


def under(prefix: str) -> models.Q:
    """Return the condition that a key begins with a prefix, byte for byte."""
    if not prefix:
        return models.Q()
    # Not startswith, for which SQLite does not tell capitals from small letters.
    return models.Q(Exact(Substr("key_resource", 1, len(prefix)), models.Value(prefix)))


class LockQuerySet(ClockQuerySet):
    def with_line(self) -> Self:
        """
        Add ``waiting`` and ``sharing``: how many wait for the key, and how many share it, by the clock.

        After ``by_clock()``, whose ``state`` knows nothing of those who share a key; then it does.
        """
        by_row, shared = self.query.annotations["state"], models.Q(shares__gt=0)
        free = models.Q(seconds_left__lte=0) & ~self.model.LEFT
        return self.annotate(
            waiting=_number_of(version__isnull=True, left__gt=0),
            sharing=models.Case(models.When(shares=0, then=0), default=_number_of(version__isnull=False, left__gt=0)),
            state=models.Case(
                models.When(~free | ~shared, then=by_row),
                models.When(_any_of(version__isnull=False, left__gt=0), then=models.Value(LockState.SHARED.value)),
                models.When(_any_of(version__isnull=False), then=models.Value(LockState.STALE.value)),
                default=by_row,
            ),
        )

    def _state(self) -> models.Case:
        return models.Case(
            models.When(seconds_left__gt=0, then=models.Value(LockState.HELD.value)),
            models.When(self.model.LEFT, then=models.Value(LockState.STALE.value)),
            default=models.Value(LockState.FREE.value),
        )


class ClaimQuerySet(ClockQuerySet):
    def _state(self) -> models.Case:
        live = models.Q(seconds_left__gt=0)
        in_line = models.Q(version__isnull=True)
        return models.Case(
            models.When(in_line & live, then=models.Value(ClaimState.WAITING.value)),
            models.When(in_line, then=models.Value(ClaimState.DEAD.value)),
            models.When(live, then=models.Value(ClaimState.HELD.value)),
            default=models.Value(ClaimState.STALE.value),
        )


class RecordQuerySet(models.QuerySet[Any]):
    def since(self, seconds: float) -> Self:
        """Keep the holds that ended at most so many seconds ago."""
        return self.filter(end_time__gte=After(-seconds))

    def with_times(self) -> Self:
        """Add ``seconds_ago``, since when it has ended, and ``held``, a timedelta."""
        return self.annotate(
            seconds_ago=-SecondsUntil("end_time"),
            held=models.ExpressionWrapper(models.F("end_time") - models.F("begin_time"), models.DurationField()),
        )


def _claims(**conditions: Any) -> Any:
    claims = LockClaim.objects.filter(key_resource=models.OuterRef("pk"))
    return claims.annotate(left=SecondsUntil("end_time")).filter(**conditions).order_by()


def _any_of(**conditions: Any) -> models.Exists:
    return models.Exists(_claims(**conditions))


def _number_of(**conditions: Any) -> Coalesce:
    number = _claims(**conditions).values("key_resource").annotate(number=models.Count("pk")).values("number")
    return Coalesce(models.Subquery(number), 0)


class ResourceLock(models.Model):
    """
    One key. It is free when ``end_time`` has passed by the database's clock, and nothing else makes it so.

    ``version`` grows at every grant, takeover and clearing: its value at the grant is the fencing token of the hold.
    """

    class Status(models.TextChoices):
        PROCESSING = "P", _("processing")
        SUCCEEDED = "S", _("succeeded")
        FAILED = "F", _("failed")

    # Taken, and not given back.
    LEFT = models.Q(status=Status.PROCESSING)

    key_resource = KeyField(_("key"), primary_key=True, max_length=KEY_LENGTH)
    status = models.CharField(_("status"), max_length=1, choices=Status.choices)
    owner = models.CharField(_("owner"), max_length=32, help_text=_("The capability of one hold."))
    holder = models.CharField(_("holder"), max_length=255, help_text=_("Host, process and thread."))
    owner_ip = models.GenericIPAddressField(_("owner IP"), null=True)
    begin_time = ClockField(_("begin time"), null=True)
    end_time = ClockField(_("end time"))
    hold_count = models.PositiveIntegerField(_("hold count"), default=0)
    version = models.BigIntegerField(_("version"))
    waiters = models.PositiveIntegerField(
        _("waiters"), db_default=0, help_text=_("Not fewer than the claims in line that were counted in.")
    )
    shares = models.PositiveIntegerField(_("shares"), db_default=0, help_text=_("How many share the key."))

    # No index beyond the primary key: one on a column that changes with every hold would end PostgreSQL's HOT updates.

    objects = LockQuerySet.as_manager()

    class Meta:
        verbose_name = _("lock")
        verbose_name_plural = _("locks")
        default_permissions = ("view",)
        permissions = (
            ("clear_resourcelock", _("Can clear stale locks")),
            ("force_release_resourcelock", _("Can force the release of a held lock")),
            ("purge_resourcelock", _("Can delete the rows of unused keys")),
        )

    def __str__(self) -> str:
        # For the admin, which puts it into titles and its log.
        from dlocks.oversight import printable

        return printable(str(self.key_resource))


class LockClaim(models.Model):
    """
    A claim that is not in the lock row itself: it stands in line, or shares the key with others.

    In line ``version`` is NULL, and ``end_time`` is until when the claim counts without being heard from; the line is
    in the order of ``id``. A share has its fencing token in ``version``, and ``end_time`` is the end of its lease.
    """

    id = models.BigAutoField(primary_key=True)
    key_resource = KeyField(_("key"), max_length=KEY_LENGTH)
    owner = KeyField(_("owner"), max_length=32, unique=True)
    holder = models.CharField(_("holder"), max_length=255)
    owner_ip = models.GenericIPAddressField(_("owner IP"), null=True)
    begin_time = ClockField(_("begin time"))
    end_time = ClockField(_("end time"))
    version = models.BigIntegerField(_("version"), null=True)
    hold_count = models.PositiveIntegerField(_("hold count"), default=0)
    shared = models.BooleanField(_("shared"))
    permits = models.PositiveIntegerField(_("permits"), help_text=_("How many may share the key, this one counted."))
    scope = models.CharField(_("scope"), max_length=1, help_text=_("The status of the lock row once it is granted."))
    takeover = models.BooleanField(_("takeover"))
    counted = models.BooleanField(_("counted"), help_text=_("Whether the waiters of the lock row include it."))
    patience = models.BigIntegerField(_("patience"), help_text=_("Microseconds for which it is granted unasked."))
    channel = models.CharField(_("channel"), max_length=63, blank=True, help_text=_("Where it is told."))

    objects = ClaimQuerySet.as_manager()

    class Meta:
        verbose_name = _("claim")
        verbose_name_plural = _("claims")
        default_permissions = ()
        indexes = [models.Index(fields=["key_resource", "id"], name="dlocks_line")]

    def __str__(self) -> str:
        return f"{self.holder} on {self.key_resource}"


class HoldRecord(models.Model):
    """A hold that has ended, where the backend's option ``history`` is on."""

    class Scope(models.TextChoices):
        LEASE = "L", _("lease")
        TRANSACTION = "T", _("transaction")

    class Ending(models.TextChoices):
        RELEASED = "R", _("released")
        FAILED = "F", _("failed")
        LOST = "L", _("lost")
        DETACHED = "D", _("handed over")

    id = models.BigAutoField(primary_key=True)
    key_resource = KeyField(_("key"), max_length=KEY_LENGTH)
    token = models.BigIntegerField(_("token"))
    holder = models.CharField(_("holder"), max_length=255)
    owner_ip = models.GenericIPAddressField(_("owner IP"), null=True)
    scope = models.CharField(_("scope"), max_length=1, choices=Scope.choices)
    shared = models.BooleanField(_("shared"))
    waited = models.FloatField(_("waited"), help_text=_("Seconds for which its holder waited for it."))
    begin_time = ClockField(_("begin time"))
    end_time = ClockField(_("end time"))
    ending = models.CharField(_("ending"), max_length=1, choices=Ending.choices)

    objects = RecordQuerySet.as_manager()

    class Meta:
        verbose_name = _("finished hold")
        verbose_name_plural = _("finished holds")
        default_permissions = ()
        constraints = [models.UniqueConstraint(fields=["key_resource", "token"], name="dlocks_record_once")]
        indexes = [models.Index(fields=["end_time"], name="dlocks_record_end")]

    def __str__(self) -> str:
        return f"{self.key_resource} by {self.holder}"
