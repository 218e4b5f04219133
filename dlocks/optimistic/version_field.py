"""The field with the version of a row, and the clock that versions come from."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterable
from typing import Any

from django.apps import apps
from django.core.exceptions import FieldDoesNotExist
from django.db import models
from django.db.models.query_utils import DeferredAttribute

from dlocks.runtime.process import in_child
from dlocks.runtime.threads import new_mutex

# The last version that this process has read from its clock.
_last = 0
# A leaf. A signal handler may write rows.
_mutex = new_mutex()

# The most by which a version exceeds that of a row whose clock was ahead of ours.
STEPS = 2**16


def new_version(held: int = 0) -> int:
    """Return a version above ``held`` that no other write has had.

    It is the time of this process in microseconds since 1970, and never the same twice.
    So a write that was rolled back, and a row that was deleted, have versions that no
    later row has. If ``held`` is the version of a faster clock, the step above it is
    random, since another process may be doing the same.
    """
    global _last
    with _mutex:
        _last = now = max(_last + 1, time.time_ns() // 1000)
    return now if now > held else held + step()


def step() -> int:
    """Return a random number from 1 to STEPS."""
    return random.randint(1, STEPS)  # noqa: S311


def _reset() -> None:
    global _last, _mutex
    # Another thread of the parent may have held it.
    _mutex = new_mutex()
    # While the clock is behind it, all children would count on from the same version.
    _last = 0


in_child(_reset)


class VersionAttribute(DeferredAttribute):
    """An attribute that cannot be loaded later than the values it belongs to."""

    def __get__(self, instance: Any, cls: Any = None) -> Any:
        if instance is not None and self.field.attname not in instance.__dict__:
            raise RuntimeError(
                f"{instance._meta.label} {instance.pk!r} was loaded without its"
                f" {self.field.name}, so a change of the row since then cannot be"
                f" detected. Load the field with the instance. To overwrite the row"
                f" anyway, call refresh_from_db(fields=[{self.field.name!r}]) first."
            )
        return super().__get__(instance, cls)


class VersionField(models.BigIntegerField):  # type: ignore[type-arg]
    """The version of a row, which every write replaces by a greater one.

    It is 0 before the insert, and the time in microseconds afterwards. Writes of
    ``ignore_fields`` alone neither compare nor replace the version. Use them for values
    that may be overwritten, such as a number of views.
    """

    descriptor_class = VersionAttribute

    def __init__(
        self, *args: Any, ignore_fields: Collection[str] = (), **kwargs: Any
    ) -> None:
        self.ignore_fields = frozenset(ignore_fields)
        # Rows that are older than the column have version 0 as well.
        kwargs.setdefault("default", 0)
        kwargs.setdefault("editable", False)
        super().__init__(*args, **kwargs)

    def deconstruct(self) -> Any:
        name, _path, args, kwargs = super().deconstruct()
        if self.ignore_fields:
            kwargs["ignore_fields"] = sorted(self.ignore_fields)
        return name, "dlocks.optimistic.VersionField", args, kwargs

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        if add and self._is_new(model_instance):
            setattr(model_instance, self.attname, new_version())
        return getattr(model_instance, self.attname)

    def _is_new(self, instance: models.Model) -> bool:
        """Return whether an insert sets the version.

        Otherwise the row is a copy. For example, django-simple-history records the
        versions of a row.
        """
        # A VersionedModel, whose module imports this one.
        if hasattr(type(instance), "check_version"):
            return not getattr(instance._state, "is_copy", False)
        # A data migration inserts a row. Its models derive from models.Model.
        value = getattr(instance, self.attname)
        return instance._meta.apps is not apps and bool(value == self.get_default())

    def ignores(self, model: type[models.Model], names: Iterable[str]) -> bool:
        """Return whether a write of these fields does not concern the version.

        ``names`` contains names or attnames.
        """
        if not self.ignore_fields:
            return False
        fields = [model._meta.get_field(name) for name in self.ignore_fields]
        ignored = {name for one in fields for name in (one.name, one.attname)}  # type: ignore[union-attr]
        written = {*names} - {self.name}
        return bool(written) and written <= ignored


def version_field(model: type[models.Model]) -> VersionField:
    """Return the only VersionField of the model, its own or its parents'."""
    for field in model._meta.concrete_fields:
        if isinstance(field, VersionField):
            return field
    raise FieldDoesNotExist(f"{model._meta.label} has no VersionField.")


def version_of(instance: models.Model) -> int:
    version: int = getattr(instance, version_field(type(instance)).attname)
    return version
