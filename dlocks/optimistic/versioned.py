"""Models whose rows have a version, which every write compares and replaces."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from asgiref.sync import sync_to_async
from django.core import checks
from django.core.exceptions import FieldDoesNotExist
from django.db import connections, models, router, transaction
from django.db.models.constants import LOOKUP_SEP
from django.db.models.functions import Greatest
from django.db.models.signals import class_prepared, pre_delete
from django.utils.translation import gettext_lazy as _

from dlocks.exceptions import StaleVersion
from dlocks.optimistic.checked import CheckedModel, CheckedQuerySet, M, current_rows
from dlocks.optimistic.version_field import (
    VersionField,
    new_version,
    step,
    version_field,
    version_of,
)


class VersionedQuerySet(CheckedQuerySet[M]):
    """A queryset whose writes invalidate the versions that were read before."""

    def update(self, **kwargs: Any) -> int:
        """Update all rows, and replace their versions.

        No versions are compared. Use ``filter(version=…)`` for that. Raise ValueError
        for a version among the values, since each update sets it.
        """
        field = version_field(self.model)
        if self._value is not None:
            # bulk_update() has compared the rows.
            return super().update(**kwargs, **{field.name: self._value})
        self._refuse_version(kwargs)
        if not kwargs or field.ignores(self.model, kwargs):
            return super().update(**kwargs)
        return self._count(**kwargs)

    def _count(self, **kwargs: Any) -> int:
        """Replace the versions of all rows, and update other fields, if any."""
        field, meta = version_field(self.model), self.model._meta
        self._for_write = True
        # The version may be in a parent's table, which takes two statements.
        with (
            transaction.atomic(using=self.db, savepoint=False)
            if meta.all_parents
            else nullcontext()
        ):
            if link := meta.get_ancestor_link(field.model):
                # A save writes that table first. In another order, the two would wait
                # for each other.
                keys = list(self.order_by().values_list(link.attname, flat=True))
                rows = field.model._base_manager.using(self.db).filter(pk__in=keys)
                list(rows.order_by("pk").select_for_update().values_list("pk"))
            after = Greatest(models.F(field.name) + step(), models.Value(new_version()))
            updated = super().update(**kwargs, **{field.name: after})
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
            or (fields == ("_order",) and all(obj._state.adding for obj in objs))
        ):
            return super().bulk_update(objs, fields, batch_size)
        model: Any = field.model
        rows = {obj._checked_key(): obj for obj in objs}
        held = {pk: obj._held() for pk, obj in rows.items()}
        if len(held) < len(objs):
            raise ValueError(
                "bulk_update() received two instances of the same row, and one of them"
                " would be lost."
            )
        self._for_write = True
        # The statements have one parameter more than those of Django: the version.
        names = ["pk", "pk", *fields, field.name]
        most = connections[self.db].ops.bulk_batch_size(names, objs)
        if batch_size is None or batch_size > most:
            batch_size = most
        # Two values, since a trigger would replace one that stays.
        between = new_version(max(held.values()))
        after = new_version(between)
        compared: Any = self._chain()  # type: ignore[attr-defined]
        compared._value = after
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

    def _check_insert(self, update_conflicts: bool) -> None:
        if update_conflicts:
            raise ValueError(
                "bulk_create(update_conflicts=True) would overwrite rows without"
                " comparing their versions. Insert with ignore_conflicts=True, then"
                " read the existing rows, and use bulk_update() on them."
            )

    def only(self, *fields: Any) -> Self:
        """Load only these fields, and the versions that a save requires."""
        if fields and None not in fields:
            versions = dict.fromkeys(
                version for name in fields for version in versions_of(self.model, name)
            )
            fields = (*fields, *versions)
        return super().only(*fields)


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
    held: dict[Any, int], after: int, model: Any, using: str, batch_size: int
) -> int:
    """Set the versions of rows that still have the expected one.

    Return their number.
    """
    field, written = version_field(model), 0
    pks = list(held)
    # Django refuses a size below 1 afterwards.
    size = max(1, batch_size)
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
        return new_version(version_of(self))

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


def check_versioned(model: type[models.Model]) -> list[checks.CheckMessage]:
    """Return the errors in a model's version field and managers."""
    columns = model._meta.concrete_fields
    fields = [field for field in columns if isinstance(field, VersionField)]
    if len(fields) != 1:
        return [
            checks.Error(
                f"{model._meta.label} has {len(fields)} version fields, but needs"
                " exactly one.",
                hint=(
                    "Use the field of VersionedModel, or set version = None and add a"
                    " VersionField of your own."
                ),
                obj=model,
                id="dlocks.E020",
            )
        ]
    unknown = fields[0].ignore_fields - {field.name for field in columns}
    return [
        *check_managers(
            model,
            [model._base_manager],
            VersionedQuerySet,
            "so its update() would not replace the version",
            "dlocks.E021",
        ),
        *(
            checks.Error(
                f"{model._meta.label} has no field {name!r} to ignore.",
                hint=f"Correct the ignore_fields of {fields[0].name}.",
                obj=model,
                id="dlocks.E022",
            )
            for name in sorted(unknown)
        ),
    ]


def check_managers(
    model: type[models.Model],
    others: Iterable[Any],
    queryset: type[models.QuerySet[Any]],
    why: str,
    identifier: str,
) -> list[checks.CheckMessage]:
    """Return an error for each manager with another queryset."""
    name = queryset.__name__.replace("QuerySet", "")
    managers: set[Any] = {model._default_manager, *model._meta.managers, *others}
    return [
        checks.Error(
            f"{model._meta.label}.{manager.name} is not a {name}Manager, {why}.",
            hint=(
                f"Derive the manager from dlocks.optimistic.{name}Manager and its"
                f" queryset from {name}QuerySet. Make {name}Model the first base of the"
                " model."
            ),
            obj=model,
            id=identifier,
        )
        for manager in managers
        if not issubclass(manager._queryset_class, queryset)
    ]
