"""Querysets whose writes replace the versions of rows."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Self, TypeVar

from django.core.exceptions import FieldDoesNotExist
from django.db import connections, models, transaction
from django.db.models.constants import LOOKUP_SEP
from django.db.models.functions import Greatest

from dlocks.exceptions import StaleVersion
from dlocks.optimistic.checked import current_rows, note_inserted
from dlocks.optimistic.version_field import (
    VersionField,
    new_version,
    step,
    version_field,
)

M = TypeVar("M", bound=models.Model, covariant=True)


class VersionedQuerySet(models.QuerySet[M]):
    """A queryset whose writes invalidate the versions that were read before."""

    # The new version of rows that bulk_update() has compared.
    _version: int | None = None

    def update(self, **kwargs: Any) -> int:
        """Update all rows, and replace their versions.

        No versions are compared. Use ``filter(version=…)`` for that. Raise ValueError
        for a version among the values, since each update sets it.
        """
        field = version_field(self.model)
        if self._version is not None:
            return super().update(**kwargs, **{field.name: self._version})
        if not kwargs or field.ignores(self.model, kwargs):
            return super().update(**kwargs)
        self._refuse_version(kwargs)
        return self._count(**kwargs)

    def _count(self, **kwargs: Any) -> int:
        """Replace the versions of all rows, and update other fields, if any."""
        name, parents = version_field(self.model).name, self.model._meta.all_parents
        self._for_write = True
        # The version may be in a parent's table, which takes two statements.
        with (
            transaction.atomic(using=self.db, savepoint=False)
            if parents
            else nullcontext()
        ):
            after = Greatest(models.F(name) + step(), models.Value(new_version()))
            updated = super().update(**kwargs, **{name: after})
        # As in Django, earlier results are outdated.
        self._result_cache = None
        return updated

    def _refuse_version(self, names: Container[str]) -> None:
        name = version_field(self.model).name
        if name in names:
            raise ValueError(
                f"{self.model._meta.label}.{name} is replaced by each update, and"
                " cannot be set to a value."
            )

    def bulk_update(
        self, objs: Iterable[Any], fields: Iterable[str], batch_size: int | None = None
    ) -> int:
        """Update the fields of all instances; compare and replace their versions.

        Raise StaleVersion with all stale instances if there are any. Nothing is written
        then.
        """
        objs, fields = tuple(objs), tuple(fields)
        field = version_field(self.model)
        self._refuse_version(fields)
        if (
            not objs
            or not fields
            or field.ignores(self.model, fields)
            or not all(obj._is_pk_set() for obj in objs)
            # Django's set_x_order() has read no rows. Its update() sets their versions.
            or (self.model._meta.order_with_respect_to and fields == ("_order",))
        ):
            return super().bulk_update(objs, fields, batch_size)
        # The key in the table that contains the version, which may be a parent's.
        model: Any = field.model._meta.concrete_model
        rows = {obj._get_pk_val(model._meta): obj for obj in objs}
        held = {pk: obj._held() for pk, obj in rows.items()}
        if len(held) < len(objs):
            raise ValueError(
                "bulk_update() received two instances of the same row, and one of them"
                " would be lost."
            )
        self._for_write = True
        # Two values, since a trigger would replace one that stays.
        between = new_version(max(held.values()))
        after = new_version(between)
        compared: Any = self._chain()  # type: ignore[attr-defined]
        compared._version = after
        with transaction.atomic(using=self.db):
            rest = model, self.db, batch_size
            is_stale = replace_versions(held, between, *rest) < len(objs)
            if is_stale:
                transaction.set_rollback(True, using=self.db)
            else:
                updated = super(VersionedQuerySet, compared).bulk_update(
                    objs, fields, batch_size
                )
                if updated < len(objs):
                    # The queryset excludes rows, which Django does not write.
                    replace_versions(dict.fromkeys(held, between), after, *rest)
        if is_stale:
            raise self._stale_error(model, rows, held)
        for obj in objs:
            setattr(obj, field.attname, after)
        return updated

    def _stale_error(
        self, model: Any, rows: dict[Any, Any], held: dict[Any, int]
    ) -> StaleVersion:
        # Read after the new versions are rolled back.
        current = model._base_manager.using(self.db).filter(pk__in=[*held])
        attname = version_field(model).attname
        found = dict(current_rows(current).values_list("pk", attname))
        stale = [pk for pk in held if found.get(pk) != held[pk]] or list(held)
        pk = stale[0]
        error = StaleVersion(self.model, pk, held[pk], found.get(pk), stale)
        error.instance = rows[pk]
        return error

    def bulk_create(
        self,
        objs: Iterable[Any],
        batch_size: int | None = None,
        ignore_conflicts: bool = False,
        update_conflicts: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> list[M]:
        """Insert the instances.

        Raise ValueError for ``update_conflicts``, since such an update could not
        compare versions. With ``ignore_conflicts``, an instance whose row another
        writer has inserted is stale.
        """
        if update_conflicts:
            raise ValueError(
                "bulk_create(update_conflicts=True) would overwrite rows without"
                " comparing their versions. Insert with ignore_conflicts=True, then"
                " read the existing rows, and use bulk_update() on them."
            )
        objs = super().bulk_create(objs, batch_size, ignore_conflicts)
        note_inserted(objs, self.db)
        return objs

    def only(self, *fields: Any) -> Self:
        """Load only these fields, and the versions that a save requires."""
        if fields and None not in fields:
            versions = dict.fromkeys(
                version for name in fields for version in versions_of(self.model, name)
            )
            fields = (*fields, *versions)
        return super().only(*fields)

    def _clone(self) -> Self:
        clone: Self = super()._clone()  # type: ignore[misc]
        clone._version = self._version
        return clone


def versions_of(model: Any, path: str) -> Iterator[str]:
    """Yield the versions of the rows that a path of names leads through."""
    before = ""
    for name in path.split(LOOKUP_SEP):
        for field in model._meta.concrete_fields:
            if isinstance(field, VersionField):
                yield before + field.name
        try:
            model = model._meta.get_field(name).related_model
        except FieldDoesNotExist:
            # Django's own error names the path.
            return
        if model is None:
            return
        before += name + LOOKUP_SEP


def replace_versions(
    held: dict[Any, int], after: int, model: Any, using: str, batch_size: int | None
) -> int:
    """Set the versions of rows that still have the expected one.

    Return their number.
    """
    field, written = version_field(model), 0
    pks = list(held)
    most = connections[using].ops.bulk_batch_size(["pk", "pk", "version"], pks)
    size = min(batch_size, most) if batch_size and batch_size > 0 else most
    for start in range(0, len(pks), size):
        batch = pks[start : start + size]
        expected = models.Case(
            *(models.When(pk=pk, then=models.Value(held[pk])) for pk in batch),
            output_field=models.BigIntegerField(),
        )
        rows = model._base_manager.using(using).filter(pk__in=batch)
        rows = rows.filter(**{field.attname: expected})
        written += rows._update([(field, None, after)])
    return written


if TYPE_CHECKING:
    # Its other methods, which it has from the queryset, have the types of Django's own.
    _Manager = models.Manager
else:
    _Manager = models.Manager.from_queryset(VersionedQuerySet)


class VersionedManager(_Manager[M]):
    """The manager of a VersionedModel.

    Derive your manager from it, or create it with ``from_queryset()`` of a
    VersionedQuerySet.
    """
