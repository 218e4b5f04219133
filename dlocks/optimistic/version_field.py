"""The field with the version of a row, and what a rollback does to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from django.apps import apps
from django.core.exceptions import FieldDoesNotExist
from django.db import connections, models, router
from django.db.models.query_utils import DeferredAttribute

from dlocks.transactions import TransactionMarker


def microseconds() -> int:
    """Return the microseconds since 1970, as the first version of a row.

    Use it as ``VersionField(start=microseconds)``. A row that is created again under
    the key of a deleted row then does not repeat that row's versions.
    """
    return time.time_ns() // 1000


class VersionAttribute(DeferredAttribute):
    """An attribute that does not keep a version that was loaded later.

    Such a version does not belong to the other values of the instance.
    """

    def __get__(self, instance: Any, cls: Any = None) -> Any:
        if instance is None or self.field.attname in instance.__dict__:
            return super().__get__(instance, cls)
        value = super().__get__(instance, cls)
        instance.__dict__.pop(self.field.attname, None)
        return value


class VersionField(models.BigIntegerField):  # type: ignore[type-arg]
    """The version of a row, which every write increments.

    It is 0 before the insert, and ``start`` afterwards. ``start`` is a number, or a
    function that returns one. Writes of ``ignore_fields`` alone neither compare nor
    increment the version. Use them for values that may be overwritten, such as a number
    of views.
    """

    descriptor_class = VersionAttribute

    def __init__(
        self,
        *args: Any,
        start: int | Callable[[], int] = 1,
        ignore_fields: Collection[str] = (),
        **kwargs: Any,
    ) -> None:
        self.start = start
        self.ignore_fields = frozenset(ignore_fields)
        # Rows that are older than the column have version 0 as well.
        kwargs.setdefault("default", 0)
        kwargs.setdefault("editable", False)
        super().__init__(*args, **kwargs)

    def deconstruct(self) -> Any:
        name, _path, args, kwargs = super().deconstruct()
        if self.start != 1:
            kwargs["start"] = self.start
        if self.ignore_fields:
            kwargs["ignore_fields"] = sorted(self.ignore_fields)
        return name, "dlocks.optimistic.VersionField", args, kwargs

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        if add and self._starts(model_instance):
            setattr(
                model_instance,
                self.attname,
                self.start() if callable(self.start) else self.start,
            )
        return getattr(model_instance, self.attname)

    def _starts(self, instance: models.Model) -> bool:
        """Return whether an insert uses the first version.

        Otherwise it uses the instance's value. A model that only copies the field keeps
        its values. For example, django-simple-history records the versions of a row.
        """
        if (
            instance._meta.apps is not apps
            and getattr(instance, self.attname) == self.get_default()
        ):
            # A data migration inserts a row. Its models derive from models.Model.
            return True
        # A VersionedModel, whose module imports this one.
        return hasattr(type(instance), "check_version")

    def ignores(self, model: type[models.Model], names: Iterable[str]) -> bool:
        """Return whether a write of these fields does not concern the version.

        ``names`` contains names or attnames.
        """
        written = {by_name(model, name) for name in names} - {self.name}
        return bool(written) and written <= self.ignore_fields


def by_name(model: type[models.Model], name: str) -> str:
    """Return the name of a field, whose attname may be passed as well."""
    try:
        return model._meta.get_field(name).name
    except FieldDoesNotExist:
        # The code that writes the field raises a better error.
        return name


def version_field(model: type[models.Model]) -> VersionField:
    """Return the only VersionField of the model, its own or its parents'."""
    for field in model._meta.concrete_fields:
        if isinstance(field, VersionField):
            return field
    raise FieldDoesNotExist(f"{model._meta.label} has no VersionField.")


def note_written(
    model: type[models.Model], instances: Iterable[models.Model], using: str
) -> None:
    """Record the transaction that has just incremented the instances' versions.

    A rollback reverts these versions.
    """
    written = TransactionMarker.before_callbacks(connections[using])
    if written is not None:
        written.models.add(version_field(model).model._meta.concrete_model)
    for instance in instances:
        state: Any = instance._state
        state.written = written


def is_copy(instance: models.Model, using: str) -> bool:
    """Return whether saving there copies the instance into another database."""
    # Values that were read from a replica are written to the primary.
    return instance._state.db not in {None, using} and using != router.db_for_write(
        type(instance), instance=instance
    )
