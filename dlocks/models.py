"""The models of locks, claims and ended holds. They contain no locking."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, Self

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Case, Exists, F, OuterRef, Q, Subquery, Value, When
from django.db.models.functions import Coalesce, Substr
from django.db.models.lookups import Exact
from django.db.models.sql import Query
from django.db.models.sql.datastructures import BaseTable
from django.utils.translation import gettext_lazy as _

from dlocks.fields import (
    ClaimOwnerField,
    ClockField,
    HoldingField,
    KeyField,
    OwnerField,
    UnicodeField,
)
from dlocks.sql.clock import After, SecondsUntil
from dlocks.sql.schemas import qualified, schema_of
from dlocks.text import HOLDER_LENGTH, printable, shown_holder
from dlocks.values import KEY_LENGTH, Kept


class LockState(models.TextChoices):
    """The state of a lock row, as shown to people.

    Changes by an open transaction are not visible. A key that it keeps is held, as far
    as that is known; see ``ClockQuerySet``.
    """

    HELD = "held", _("held")
    SHARED = "shared", _("shared")
    STALE = "stale", _("stale")
    FREE = "free", _("free")


class ClaimState(models.TextChoices):
    """The state of a claim row, as shown to people.

    A shared hold is held, or stale once its lease has expired. A queued claim is
    waiting, or dead without a heartbeat.
    """

    HELD = "held", _("held")
    STALE = "stale", _("stale")
    WAITING = "waiting", _("waiting")
    DEAD = "dead", _("dead")


class SchemaTable(BaseTable):
    """A table in FROM that is qualified by its schema."""

    def as_sql(self, compiler: Any, connection: BaseDatabaseWrapper) -> Any:
        sql, parameters = super().as_sql(compiler, connection)
        if schema := schema_of(connection):
            # Columns are still qualified by the alias or by the name of the table
            # alone.
            sql = qualified(self.table_name, connection, schema) + sql.removeprefix(
                connection.ops.quote_name(self.table_name)
            )
        return sql, parameters


class SchemaQuery(Query):
    base_table_class = SchemaTable


class SchemaQuerySet(models.QuerySet[Any]):
    """A query set on the lock tables, whatever search path the caller has set.

    See ``schemas``.
    """

    def __init__(
        self, model: Any = None, query: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        query = SchemaQuery(model) if query is None else query
        super().__init__(model, query, *args, **kwargs)


class ClockQuerySet(SchemaQuerySet):
    def by_clock(self, kept: Kept = Kept()) -> Self:  # noqa: B008 (it is immutable)
        """Add ``seconds_left``, ``seconds_held`` and ``state``.

        They are calculated by the database's clock. What a transaction keeps, as listed
        in ``kept``, is held, with no seconds left.
        """
        return self.annotate(
            seconds_left=SecondsUntil("end_time"),
            seconds_held=-SecondsUntil("begin_time"),
        ).annotate(state=self._state(kept))

    def _state(self, kept: Kept) -> Case:
        raise NotImplementedError


def under(prefix: str) -> Q:
    """Return the condition that a key starts with a prefix, byte for byte."""
    if not prefix:
        return Q()
    # On SQLite, ``startswith`` ignores case.
    return Q(Exact(Substr("key_resource", 1, len(prefix)), Value(prefix)))


class LockQuerySet(ClockQuerySet):
    def by_clock(self, kept: Kept = Kept()) -> Self:  # noqa: B008 (it is immutable)
        keys_of: dict[str, list[str]] = {}
        for key, holder in kept.transactions.items():
            since = holder.since and holder.since.timestamp()
            session = json.dumps([holder.holder, holder.owner_ip, since])
            keys_of.setdefault(session, []).append(key)
        sessions = [When(pk__in=keys, then=Value(one)) for one, keys in keys_of.items()]
        keeper = Case(*sessions, default=Value(""), output_field=models.CharField())
        return super().by_clock(kept).annotate(keeper=keeper)

    def with_queue(self, kept: Kept = Kept()) -> Self:  # noqa: B008 (it is immutable)
        """Add ``waiting`` and ``sharing``, the numbers of waiters and shared holds.

        They are counted by the database's clock. Call it after ``by_clock()``, whose
        ``state`` ignores shared holds. This method includes them.
        """
        by_row, shared = self.query.annotations["state"], Q(shares__gt=0)
        claims = LockClaim.objects.filter(key_resource=OuterRef("pk"))
        claims = claims.annotate(left=SecondsUntil("end_time")).order_by()
        shares = claims.filter(version__isnull=False)
        free = Q(seconds_left__lte=0) & ~self.model.LEFT
        live = Q(left__gt=0) | Q(pk__in=kept.shares)
        return self.annotate(
            waiting=_number_of(claims.filter(version__isnull=True, left__gt=0)),
            sharing=Case(
                When(shares=0, then=0), default=_number_of(shares.filter(live))
            ),
            state=Case(
                When(~free | ~shared, then=by_row),
                _when(Exists(shares.filter(live)), LockState.SHARED),
                _when(Exists(shares.filter(hold_count__gt=0)), LockState.STALE),
                default=by_row,
            ),
        )

    def _state(self, kept: Kept) -> Case:
        live = Q(seconds_left__gt=0) | self.model.LEFT & Q(pk__in=kept.keys)
        return Case(
            _when(live | Q(pk__in=kept.transactions), LockState.HELD),
            _when(self.model.LEFT, LockState.STALE),
            default=Value(LockState.FREE.value),
        )


class ClaimQuerySet(ClockQuerySet):
    def by_clock(self, kept: Kept = Kept()) -> Self:  # noqa: B008 (it is immutable)
        """Also leave out each shared hold that was released and whose rest has ended.

        Its row exists until the next step of its key.
        """
        ended = Q(version__isnull=False, hold_count=0, seconds_left__lte=0)
        return super().by_clock(kept).exclude(ended)

    def _state(self, kept: Kept) -> Case:
        live = Q(seconds_left__gt=0) | Q(pk__in=kept.shares)
        queued = Q(version__isnull=True)
        return Case(
            _when(queued & live, ClaimState.WAITING),
            _when(queued, ClaimState.DEAD),
            _when(live, ClaimState.HELD),
            default=Value(ClaimState.STALE.value),
        )


class RecordQuerySet(SchemaQuerySet):
    def since(self, seconds: float) -> Self:
        """Keep the holds that ended at most ``seconds`` ago."""
        return self.filter(end_time__gte=After(-seconds))

    def with_times(self) -> Self:
        """Add ``seconds_ago``, counted from the end, and ``held``, a timedelta."""
        return self.annotate(
            seconds_ago=-SecondsUntil("end_time"),
            held=models.ExpressionWrapper(
                F("end_time") - F("begin_time"), models.DurationField()
            ),
        )


def _when(condition: Any, state: models.TextChoices) -> When:
    return When(condition, then=Value(state.value))


def _number_of(claims: Any) -> Coalesce:
    by_key = claims.values("key_resource").annotate(number=models.Count("pk"))
    return Coalesce(Subquery(by_key.values("number")), 0)


class ResourceLock(models.Model):
    """One key. It is free once ``end_time`` has passed by the database's clock.

    Nothing else makes it free. ``version`` grows at every grant, takeover and clearing.
    Its value at the grant is the fencing token of the hold.
    """

    class Status(models.TextChoices):
        PROCESSING = "P", _("processing")
        SUCCEEDED = "S", _("succeeded")
        FAILED = "F", _("failed")

    # The condition that a hold was acquired and not released.
    LEFT = Q(status=Status.PROCESSING)

    key_resource = KeyField(_("key"), primary_key=True, max_length=KEY_LENGTH)
    status = models.CharField(_("status"), max_length=1, choices=Status.choices)
    owner = OwnerField(
        _("owner"),
        max_length=32,
        help_text=_("The secret, random identity of one hold."),
    )
    holder = UnicodeField(
        _("holder"),
        max_length=HOLDER_LENGTH,
        help_text=_("Host, process, thread or task, and note."),
    )
    owner_ip = models.GenericIPAddressField(_("owner IP"), null=True)
    begin_time = ClockField(_("begin time"), null=True)
    end_time = ClockField(_("end time"))
    hold_count = models.PositiveIntegerField(_("hold count"), default=0)
    version = models.BigIntegerField(_("version"))
    waiters = models.PositiveIntegerField(
        _("waiters"),
        db_default=0,
        help_text=_("The number of claims in the queue, as last counted."),
    )
    shares = models.PositiveIntegerField(
        _("shares"), db_default=0, help_text=_("The number of shared holds.")
    )

    # There is no index besides the primary key. An index on a column that changes with
    # every hold would prevent PostgreSQL's HOT updates.

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
        # The admin uses this text in titles and in its log.
        return printable(str(self.key_resource))

    @property
    def keeper(self) -> str:
        """The session whose transaction keeps the key without a lease, as JSON.

        It comes from ``by_clock()``, and replaces the last holder in this object.
        """
        return str(vars(self).get("_keeper", ""))

    @keeper.setter
    def keeper(self, session: str) -> None:
        self._keeper = session
        if session:
            self.holder, self.owner_ip, since = json.loads(session)
            self.begin_time, self.seconds_held, self.hold_count = None, None, 1
            if since is not None:
                self.begin_time = datetime.fromtimestamp(since, UTC)
                age = datetime.now(UTC) - self.begin_time
                self.seconds_held = max(0.0, age.total_seconds())


class LockClaim(models.Model):
    """A claim outside of the lock row: a waiter or a shared hold.

    A waiter has NULL as ``version``, and its heartbeat expires at ``end_time``. The
    queue is ordered by ``id``. A shared hold has its fencing token in ``version``, and
    its lease ends at ``end_time``.
    """

    id = models.BigAutoField(primary_key=True)
    key_resource = KeyField(_("key"), max_length=KEY_LENGTH)
    owner = ClaimOwnerField(_("owner"), max_length=32, unique=True)
    holder = UnicodeField(_("holder"), max_length=HOLDER_LENGTH)
    owner_ip = models.GenericIPAddressField(_("owner IP"), null=True)
    begin_time = ClockField(_("begin time"))
    end_time = ClockField(_("end time"))
    version = models.BigIntegerField(_("version"), null=True)
    hold_count = models.PositiveIntegerField(_("hold count"), default=0)
    shared = models.BooleanField(_("shared"))
    permits = models.PositiveIntegerField(
        _("permits"), help_text=_("The number of holds that may share the key.")
    )
    scope = models.CharField(
        _("scope"),
        max_length=1,
        help_text=_("The status of the lock row after the grant."),
    )
    takeover = models.BooleanField(_("takeover"))
    handover_ttl = models.BigIntegerField(
        _("handover ttl"), help_text=_("Microseconds of the lease after a handover.")
    )
    channel = models.CharField(
        _("channel"),
        max_length=63,
        blank=True,
        help_text=_("The channel for its notification."),
    )

    holding = HoldingField(
        _("holding"),
        blank=True,
        help_text=_("The keys that a waiting caller holds, as JSON."),
    )

    objects = ClaimQuerySet.as_manager()

    class Meta:
        verbose_name = _("claim")
        verbose_name_plural = _("claims")
        default_permissions = ()
        indexes = [models.Index(fields=["key_resource", "id"], name="dlocks_line")]

    def __str__(self) -> str:
        return f"{shown_holder(self.holder)} on {printable(str(self.key_resource))}"

    @property
    def held_keys(self) -> list[str]:
        """Return the keys that a waiting caller holds."""
        return sorted({key for key, *_ in json.loads(self.holding or "[]")})


class HoldRecord(models.Model):
    """An ended hold, recorded if the backend's option ``history`` is on."""

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
    holder = UnicodeField(_("holder"), max_length=HOLDER_LENGTH)
    owner_ip = models.GenericIPAddressField(_("owner IP"), null=True)
    scope = models.CharField(_("scope"), max_length=1, choices=Scope.choices)
    shared = models.BooleanField(_("shared"))
    waited = models.FloatField(
        _("waited"), help_text=_("Seconds for which the holder waited.")
    )
    begin_time = ClockField(_("begin time"))
    end_time = ClockField(_("end time"))
    ending = models.CharField(_("outcome"), max_length=1, choices=Ending.choices)

    objects = RecordQuerySet.as_manager()

    class Meta:
        verbose_name = _("ended hold")
        verbose_name_plural = _("ended holds")
        default_permissions = ("view",)
        constraints = [
            models.UniqueConstraint(
                fields=["key_resource", "token"], name="dlocks_record_once"
            )
        ]
        indexes = [models.Index(fields=["end_time"], name="dlocks_record_end")]

    def __str__(self) -> str:
        # The admin uses this text in titles, which must not reveal a hidden holder.
        return f"{printable(self.key_resource)} ({self.token})"
