"""Models whose rows have a version, which every write compares and replaces.

The comparison is part of the statement that writes.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Self

from asgiref.sync import sync_to_async
from django.core import checks
from django.db import models, router
from django.db.models.signals import class_prepared, pre_delete
from django.utils.translation import gettext_lazy as _

from dlocks.exceptions import StaleVersion
from dlocks.optimistic.checked import CheckedModel
from dlocks.optimistic.checks import check_versioned
from dlocks.optimistic.version_field import VersionField, new_version, version_field
from dlocks.optimistic.versioned_queryset import VersionedManager, VersionedQuerySet


class VersionedModel(CheckedModel):
    """An abstract model whose rows refuse a write based on an outdated version.

    ``save()`` and ``delete()`` compare the version of the instance with that of the
    row, in the statement that writes, and raise StaleVersion. A new instance is always
    inserted, and never overwrites a row. To rename the version, set ``version = None``
    and add a VersionField with another name.
    """

    version = VersionField(_("version"))

    objects: ClassVar[VersionedManager[Self]] = VersionedManager()
    _stale = StaleVersion
    # Django's internal updates, such as on_delete=SET_NULL, replace the version too.
    _versioned: ClassVar[VersionedManager[Self]] = VersionedManager()

    class Meta:
        abstract = True
        base_manager_name = "_versioned"

    def touch(self, using: str | None = None) -> None:
        """Replace the version and write nothing else.

        Use it for a row with parts in other tables that have changed.
        """
        self.save(using=using, update_fields=[version_field(type(self)).name])

    def is_stale(self, using: str | None = None) -> bool:
        """Return whether the row has changed since it was read, or is gone."""
        held = self._held()
        using = using or router.db_for_write(type(self), instance=self)
        return self._found(using) != held

    def check_version(self, using: str | None = None) -> None:
        """Raise StaleVersion if the row has changed since it was read.

        In a transaction, the row is locked, so it stays unchanged until the end.
        """
        held = self._held()
        using = using or router.db_for_write(type(self), instance=self)
        found = self._found(using, lock=True)
        if found != held:
            raise self._error(held, found)

    def refresh_from_db(
        self, using: str | None = None, fields: Any = None, from_queryset: Any = None
    ) -> None:
        """Read the row again.

        If only a part of it is read without the version, the instance keeps the version
        of its other values.
        """
        field = version_field(type(self))
        if fields is not None:
            fields = list(fields)
            is_part = {field.name, field.attname}.isdisjoint(fields)
        else:
            names, deferring = (
                (frozenset(), True)
                if from_queryset is None
                else from_queryset.query.deferred_loading
            )
            is_part = not deferring or bool(names - self.get_deferred_fields())
        held = self.__dict__.get(field.attname)
        super().refresh_from_db(using, fields, from_queryset)
        if not is_part:
            state: Any = self._state
            state.inserted = None
        elif held is None:
            self.__dict__.pop(field.attname, None)
        else:
            self.__dict__[field.attname] = held

    async def atouch(self, using: str | None = None) -> None:
        await sync_to_async(self.touch)(using=using)

    async def ais_stale(self, using: str | None = None) -> bool:
        return await sync_to_async(self.is_stale)(using=using)

    async def acheck_version(self, using: str | None = None) -> None:
        await sync_to_async(self.check_version)(using=using)

    @classmethod
    def _checked_field(cls) -> VersionField:
        return version_field(cls)

    def _advance(self, held: int) -> int:
        return new_version(held)

    def _value_of_fixture(self) -> int:
        # It must not repeat an earlier version.
        return new_version(getattr(self, version_field(type(self)).attname))

    def _ignores(self, update_fields: Any) -> bool:
        return bool(update_fields) and version_field(type(self)).ignores(
            type(self), update_fields
        )

    def _held(self) -> int:
        """Return the version with which the instance was read."""
        field = version_field(type(self))
        held = int(field.to_python(getattr(self, field.attname)))
        if self._state.adding and held == field.get_default():
            raise ValueError(
                f"{self._meta.label} {self.pk!r} was not read from the database and has"
                f" no {field.name}. Read it, or set the {field.name} that it was read"
                " with."
            )
        return held

    @classmethod
    def check(cls, **kwargs: Any) -> list[checks.CheckMessage]:
        return [*super().check(**kwargs), *check_versioned(cls)]


def _count_before(
    field: Any, *, instance: models.Model, using: str, **kwargs: Any
) -> None:
    rows: Any = VersionedQuerySet(field.model, using=using)
    rows.filter(**{field.name: instance})._count()


def _watch_handlers(*, sender: Any, **kwargs: Any) -> None:
    """Replace the versions of rows that a custom on_delete handler may write.

    Django evaluates the rows for such a handler, and then writes them without their
    queryset. The handlers of Django itself use the queryset, or do not write.
    """
    if not issubclass(sender, VersionedModel) or sender._meta.abstract:
        return
    for field in sender._meta.local_fields:
        handler = getattr(field.remote_field, "on_delete", None)
        if handler and getattr(handler, "__module__", "") != models.CASCADE.__module__:
            target = field.remote_field.model
            if target == "self":
                target = sender
            elif isinstance(target, str) and "." not in target:
                target = f"{sender._meta.app_label}.{target}"
            uid = f"dlocks.optimistic {field}"
            watch = partial(_count_before, field)
            pre_delete.connect(watch, target, weak=False, dispatch_uid=uid)


class_prepared.connect(_watch_handlers)
