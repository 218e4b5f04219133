"""Models whose rows have a version, which every write compares and increments.

The comparison is part of the statement that writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from asgiref.sync import sync_to_async
from django.apps import apps
from django.core import checks
from django.core.exceptions import FieldDoesNotExist
from django.db import DEFAULT_DB_ALIAS, connections, models, router, transaction
from django.db.models.functions import Greatest
from django.db.models.query_utils import DeferredAttribute
from django.utils.translation import gettext_lazy as _

from dlocks.exceptions import StaleToken, StaleVersion
from dlocks.transactions import Written


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
        return isinstance(instance, VersionedModel)

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
    written = Written.here(
        connections[using], version_field(model).model._meta.concrete_model
    )
    for instance in instances:
        state: Any = instance._state
        state.written = written


def is_copy(instance: models.Model, using: str) -> bool:
    """Return whether saving there copies the instance into another database."""
    # Values that were read from a replica are written to the primary.
    return instance._state.db not in {None, using} and using != router.db_for_write(
        type(instance), instance=instance
    )


def is_joined(rows: Any) -> bool:
    """Return whether write statements do not check all of a queryset's conditions.

    A condition on another table, for example a parent's, is checked before the write.
    It is not checked again for a row that the statement had to wait for.
    """
    if not connections[rows.db].features.has_select_for_update:
        # A writer locks the whole database.
        return False
    query = rows.query.chain()
    query.get_initial_alias()
    return (
        bool(rows.model._meta.concrete_model._meta.parents)
        or query.count_active_tables() > 1
    )


def among_keys(rows: Any, owner: Any) -> tuple[Any, list[Any]]:
    """Return a queryset limited to its current rows, and their keys.

    The keys are those in the owner's table.
    """
    link = (
        rows.model._meta.get_ancestor_link(owner)
        if owner is not rows.model._meta.concrete_model
        else None
    )
    name = "pk" if link is None else link.attname
    keys = list(rows.order_by().values_list(name, flat=True))
    return rows.filter(**{f"{name}__in": keys}), keys


class VersionedQuerySet(models.QuerySet[Any]):
    """A queryset whose writes invalidate the versions that were read before."""

    # Whether the versions of the rows have already been incremented.
    _counted = False

    def update(self, **kwargs: Any) -> int:
        """Update all rows, and increment their versions.

        No versions are compared. Use ``filter(version=…)`` for that. Raise ValueError
        for a version among the values, since the database increments it.
        """
        if self._counted or not kwargs:
            return super().update(**kwargs)
        field = version_field(self.model)
        if field.name in kwargs:
            raise ValueError(
                f"{self.model._meta.label}.{field.name} is incremented by each update,"
                " and cannot be set to a value."
            )
        if field.ignores(self.model, kwargs):
            return super().update(**kwargs)
        self._for_write = True
        # The version may be in a parent's table, which takes two statements.
        with transaction.atomic(using=self.db, savepoint=False):
            # If the rows are read later in the same transaction, a rollback reverts
            # their versions.
            note_written(self.model, [], self.db)
            rows = self._locked(field.model._meta.concrete_model)
            updated = super(VersionedQuerySet, rows).update(
                **kwargs, **{field.name: models.F(field.name) + 1}
            )
        # As in Django, earlier results are outdated.
        self._result_cache = None
        return updated

    def _locked(self, owner: Any) -> Any:
        """Return the rows, locked if the write does not check all conditions itself."""
        query = self.query
        if (
            query.is_sliced
            or query.combinator
            or query.distinct_fields
            or not is_joined(self)
        ):
            return self
        rows, keys = among_keys(self.using(self.db), owner)
        # The next statement checks the conditions again, when no other transaction can
        # write the rows. One order avoids deadlocks.
        locked = (
            owner._base_manager.using(self.db)
            .filter(pk__in=keys)
            .order_by("pk")
            .select_for_update()
        )
        list(locked.values_list("pk"))
        return rows

    def bulk_update(
        self, objs: Iterable[Any], fields: Iterable[str], batch_size: int | None = None
    ) -> int:
        """Update the fields of all instances; compare and increment their versions.

        Raise StaleVersion with all stale instances if there are any. Nothing is written
        then.
        """
        objs, fields = tuple(objs), tuple(fields)
        field = version_field(self.model)
        if field.name in fields:
            raise ValueError(
                f"{self.model._meta.label}.{field.name} is incremented by each update,"
                " and cannot be set to a value."
            )
        if (
            not objs
            or not fields
            or field.ignores(self.model, fields)
            or not all(obj._is_pk_set() for obj in objs)
        ):
            return super().bulk_update(objs, fields, batch_size)
        # The key in the table that contains the version, which may be a parent's.
        model: Any = field.model._meta.concrete_model
        held = {obj._get_pk_val(model._meta): obj._held_version() for obj in objs}
        if len(held) < len(objs):
            raise ValueError(
                "bulk_update() received two instances of the same row, and one of them"
                " would be lost."
            )
        self._for_write = True
        most = connections[self.db].ops.bulk_batch_size(["pk", "version"], objs)
        size = min(batch_size, most) if batch_size and batch_size > 0 else most
        pks = list(held)
        counted: Any = self._chain()  # type: ignore[attr-defined]
        counted._counted = True
        try:
            with transaction.atomic(using=self.db):
                for start in range(0, len(pks), size):
                    count_up(
                        model,
                        self.db,
                        {pk: held[pk] for pk in pks[start : start + size]},
                    )
                updated = super(VersionedQuerySet, counted).bulk_update(
                    objs, fields, batch_size
                )
        except _SomeAreStale as some:
            # Read after the increments are rolled back.
            found = dict(
                rows_as_they_are(model, self.db)
                .filter(pk__in=some.pks)
                .values_list("pk", field.attname)
            )
            stale = [pk for pk in some.pks if found.get(pk) != held[pk]] or some.pks
            raise StaleVersion(
                self.model, stale[0], held[stale[0]], found.get(stale[0]), stale
            ) from None
        for obj in objs:
            setattr(obj, field.attname, held[obj._get_pk_val(model._meta)] + 1)
        note_written(self.model, objs, self.db)
        return updated

    def bulk_create(
        self,
        objs: Iterable[Any],
        batch_size: int | None = None,
        ignore_conflicts: bool = False,
        update_conflicts: bool = False,
        update_fields: Any = None,
        unique_fields: Any = None,
    ) -> list[Any]:
        """Insert the instances.

        Raise ValueError for ``update_conflicts``, since such an update could not
        compare versions. With ``ignore_conflicts``, the instances have no version,
        because any row may have been inserted by another writer.
        """
        if update_conflicts:
            raise ValueError(
                "bulk_create(update_conflicts=True) would overwrite rows without"
                " comparing or incrementing their versions. Insert with"
                " ignore_conflicts=True, then read the existing rows, and use"
                " bulk_update() on them."
            )
        objs = super().bulk_create(
            objs,
            batch_size,
            ignore_conflicts,
            update_conflicts,
            update_fields,
            unique_fields,
        )
        if ignore_conflicts:
            field = version_field(self.model)
            for obj in objs:
                if obj._is_pk_set():
                    obj.__dict__.pop(field.attname, None)
                else:
                    # Django does not report which row it is.
                    setattr(obj, field.attname, field.get_default())
        else:
            note_written(self.model, objs, self.db)
        return objs

    def only(self, *fields: Any) -> Any:
        """Load only these fields, and the version that a save requires."""
        if fields and fields != (None,):
            fields = (*fields, version_field(self.model).name)
        return super().only(*fields)

    def _clone(self) -> Any:
        clone = super()._clone()  # type: ignore[misc]
        clone._counted = self._counted
        return clone


def count_up(model: Any, using: str, held: dict[Any, int]) -> None:
    """Increment the versions of rows that still have the expected version.

    Raise _SomeAreStale if any row does not have it.
    """
    field = version_field(model)
    pks: dict[int, list[Any]] = {}
    for pk, version in held.items():
        pks.setdefault(version, []).append(pk)
    same = models.Q()
    for version, group in pks.items():
        same |= models.Q(pk__in=group, **{field.attname: version})
    rows = model._base_manager.using(using).filter(same)
    if rows._update([(field, None, models.F(field.attname) + 1)]) < len(held):
        raise _SomeAreStale(list(held))


class _SomeAreStale(Exception):  # noqa: N818
    """Some rows were not incremented, so the others must be rolled back."""

    def __init__(self, pks: list[Any]) -> None:
        self.pks = pks


def rows_as_they_are(model: Any, using: str) -> Any:
    """Return the current rows, even in a transaction with an older snapshot."""
    rows = model._base_manager.using(using)
    return rows.select_for_update() if connections[using].in_atomic_block else rows


@contextmanager
def refusable(
    instance: models.Model, using: str, refusal: type[StaleVersion | StaleToken]
) -> Iterator[None]:
    """Keep the caller's transaction usable after a refused save.

    The refused save has written nothing.
    """
    if instance._meta.concrete_model._meta.parents:  # type: ignore[union-attr]
        # Another table may have been written before.
        with transaction.atomic(using=using):
            yield
        return
    try:
        yield
    except refusal as error:
        if (error.model, error.pk) == (type(instance), instance.pk) and connections[
            using
        ].in_atomic_block:
            # Django marks the transaction as broken after any error in save().
            transaction.set_rollback(False, using=using)
        raise


class VersionedManager(models.Manager.from_queryset(VersionedQuerySet)):  # type: ignore[misc]
    """The manager of a VersionedModel.

    Derive your manager from it, or create it with ``from_queryset()`` of a
    VersionedQuerySet.
    """


class VersionedModel(models.Model):
    """An abstract model whose rows refuse a write based on an outdated version.

    ``save()`` and ``delete()`` compare the version of the instance with that of the
    row, in the statement that writes, and raise StaleVersion. A new instance is always
    inserted, and never overwrites a row. To rename the version, set ``version = None``
    and add a VersionField with another name.
    """

    version = VersionField(_("version"))

    objects = VersionedManager()
    # Django's internal updates, such as on_delete=SET_NULL, increment the version as
    # well.
    _versioned = VersionedManager()

    class Meta:
        abstract = True
        base_manager_name = "_versioned"

    def touch(self, using: str | None = None) -> None:
        """Increment the version and write nothing else.

        Use it for a row with parts in other tables that have changed.
        """
        self.save(using=using, update_fields=[version_field(type(self)).name])

    def check_version(self, using: str | None = None) -> None:
        """Raise StaleVersion if the row has changed since it was read.

        In a transaction, the row is locked, so it stays unchanged until the end.
        """
        held = self._held_version()
        using = using or router.db_for_write(type(self), instance=self)
        found = self._found_version(using)
        if found != held:
            raise StaleVersion(type(self), self.pk, held, found)

    def refresh_from_db(
        self, using: str | None = None, fields: Any = None, from_queryset: Any = None
    ) -> None:
        """Read the row again.

        If only a part of it is read without the version, the instance keeps the version
        of its other values.
        """
        field = version_field(type(self))
        attname = field.attname
        fields = None if fields is None else list(fields)
        if (
            self._is_read_whole(from_queryset)
            if fields is None
            else not {field.name, attname}.isdisjoint(fields)
        ):
            super().refresh_from_db(using, fields, from_queryset)
            self._note_read()
            return
        held = self.__dict__.get(attname)
        try:
            super().refresh_from_db(using, fields, from_queryset)
        finally:
            self.__dict__.pop(attname, None)
            if held is not None:
                self.__dict__[attname] = held

    def _is_read_whole(self, from_queryset: Any) -> bool:
        """Return whether a queryset reads every loaded field again, as in Django."""
        names, deferring = (
            (frozenset(), True)
            if from_queryset is None
            else from_queryset.query.deferred_loading
        )
        if not self.get_deferred_fields():
            return deferring and not names
        loaded = {
            name
            for field in self._meta.concrete_fields
            for name in (field.name, field.attname)
        }
        return not deferring or not names & (loaded - self.get_deferred_fields())

    def _note_read(self) -> None:
        """Record whether the values may have been written in this transaction.

        A rollback would revert them.
        """
        state: Any = self._state
        connection = connections[state.db]
        owner = version_field(type(self)).model._meta.concrete_model
        state.written = (
            Written.around(connection, owner) if connection.run_on_commit else None
        )

    @classmethod
    def from_db(cls, db: str | None, *args: Any, **kwargs: Any) -> Any:
        instance: Any = super().from_db(db, *args, **kwargs)
        if connections[db or DEFAULT_DB_ALIAS].run_on_commit:
            instance._note_read()
        return instance

    def clean_fields(self, exclude: Collection[str] | None = None) -> None:
        field = version_field(type(self))
        if field.attname not in self.__dict__:
            # It would be read now, and treated as the version of the other values.
            exclude = {*(exclude or ()), field.name}
        super().clean_fields(exclude)

    async def atouch(self, using: str | None = None) -> None:
        await sync_to_async(self.touch)(using=using)

    async def acheck_version(self, using: str | None = None) -> None:
        await sync_to_async(self.check_version)(using=using)

    def delete(
        self, using: str | None = None, keep_parents: bool = False
    ) -> tuple[int, dict[str, int]]:
        if not self._is_pk_set():  # type: ignore[attr-defined]
            return super().delete(using=using, keep_parents=keep_parents)
        held = self._held_version()
        using = using or router.db_for_write(type(self), instance=self)
        field = version_field(type(self))
        with transaction.atomic(using=using):
            # The row is written, and not only locked. On every engine, no other
            # transaction can then write it until the commit.
            rows: Any = field.model._base_manager.using(using).filter(
                pk=self._get_pk_val(field.model._meta)
            )
            if not rows.filter(**{field.attname: held})._update(
                [(field, None, held + 1)]
            ):
                raise StaleVersion(
                    type(self), self.pk, held, self._found_version(using)
                )
            state: Any = self._state
            written = getattr(state, "written", None)
            # Receivers of pre_delete may use the instance.
            setattr(self, field.attname, held + 1)
            try:
                return super().delete(using=using, keep_parents=keep_parents)
            finally:
                setattr(self, field.attname, held)
                state.written = written

    def save_base(
        self,
        raw: bool = False,
        force_insert: Any = False,
        force_update: bool = False,
        using: str | None = None,
        update_fields: Any = None,
    ) -> None:
        using = using or router.db_for_write(type(self), instance=self)
        field = version_field(type(self))
        state: Any = self._state
        is_update = self._is_pk_set() and not (raw or force_insert)  # type: ignore[attr-defined]
        is_update = is_update and bool(
            not state.adding or force_update or update_fields
        )
        if is_update and not (
            update_fields and field.ignores(type(self), update_fields)
        ):
            self._held_version()
        # A row that was read either exists or has been deleted. It must not be inserted
        # again.
        was_written = self.__dict__.get(field.attname) != field.get_default()
        state.was_read = (
            is_update and not state.adding and not is_copy(self, using) and was_written
        )
        try:
            with refusable(self, using, StaleVersion):
                super().save_base(raw, force_insert, force_update, using, update_fields)
        finally:
            state.was_read = False

    def _save_table(
        self,
        raw: bool = False,
        cls: Any = None,
        force_insert: Any = False,
        force_update: bool = False,
        using: str | None = None,
        update_fields: Any = None,
    ) -> Any:
        if (
            not raw
            and self._state.adding
            and not force_update
            and not update_fields
            and self._is_versioned(cls)
        ):
            # Prevent Django's UPDATE of an existing row with this key, whose version
            # was not read.
            force_insert = True
        state: Any = self._state
        attname = version_field(type(self)).attname
        if self._is_versioned(cls):
            state.version_before = (
                self.__dict__.get(attname),
                getattr(state, "written", None),
            )
            if force_insert and getattr(state, "was_read", False):
                # Its parent was missing, and has just been inserted.
                raise StaleVersion(type(self), self.pk, self._held_version(), None)
        state.is_raw = raw
        try:
            updated = super()._save_table(  # type: ignore[misc]
                raw, cls, force_insert, force_update, using, update_fields
            )
        except BaseException:
            # The values that this save has set are rolled back, for this table or a
            # parent's.
            before = state.__dict__.pop("version_before", None)
            if before is not None and before[0] is not None:
                setattr(self, attname, before[0])
            if before is not None:
                state.written = before[1]
            raise
        finally:
            state.is_raw = False
        if self._is_versioned(cls) and not (
            updated and self.__dict__.get(attname) == state.version_before[0]
        ):
            note_written(type(self), [self], using)  # type: ignore[arg-type]
        if cls is self._meta.concrete_model:
            state.__dict__.pop("version_before", None)
        return updated

    def _do_update(  # type: ignore[override]
        self,
        base_qs: Any,
        using: str,
        pk_val: Any,
        values: Any,
        update_fields: Any,
        *others: Any,
    ) -> Any:
        """Write the row of one table, and compare the version in the WHERE clause."""
        field = version_field(type(self))
        if not self._is_versioned(base_qs.model):
            return super()._do_update(
                base_qs, using, pk_val, values, update_fields, *others
            )
        values = [value for value in values if value[0] != field]
        if update_fields and field.ignores(type(self), update_fields):
            return super()._do_update(
                base_qs, using, pk_val, values, update_fields, *others
            )
        if getattr(self._state, "is_raw", False):
            # A fixture overwrites the row, but its version must not repeat an earlier
            # one.
            newer = Greatest(
                models.F(field.attname) + 1, models.Value(getattr(self, field.attname))
            )
            values.append((field, None, newer))
            updated = super()._do_update(
                base_qs, using, pk_val, values, update_fields, *others
            )
            if updated:
                self.__dict__.pop(field.attname, None)
            return updated
        held = self._held_version()
        values.append((field, None, held + 1))
        same = base_qs.filter(**{field.attname: held})
        updated = super()._do_update(
            same, using, pk_val, values, update_fields, *others
        )
        if updated:
            setattr(self, field.attname, held + 1)
            return updated
        found = self._found_version(using)
        if found is None and is_copy(self, using):
            # A copy into another database that does not have the row yet.
            return updated
        raise StaleVersion(type(self), self.pk, held, found)

    def _is_versioned(self, model: type[models.Model]) -> bool:
        """Return whether this model's table contains the version.

        In multi-table inheritance, the parents and the child have separate tables.
        """
        return (
            version_field(type(self)).model._meta.concrete_model
            is model._meta.concrete_model
        )

    def _held_version(self) -> int:
        """Return the version with which the instance was read."""
        field = version_field(type(self))
        held = self.__dict__.get(field.attname)
        if held is None:
            raise RuntimeError(
                f"{self._meta.label} {self.pk!r} was loaded without its {field.name},"
                " so a change of the row since then cannot be detected. Load the field"
                " with the instance. To overwrite the row anyway, call"
                f" refresh_from_db(fields=[{field.name!r}]) first."
            )
        held = int(field.to_python(held))
        written = getattr(self._state, "written", None)
        if written is not None and written.was_undone:
            # Another transaction may have written the same version since.
            raise StaleVersion(
                type(self),
                self.pk,
                held,
                self._found_version(router.db_for_write(type(self), instance=self)),
            )
        if self._state.adding and held == field.get_default():
            raise ValueError(
                f"{self._meta.label} {self.pk!r} was not read from the database and has"
                f" no {field.name}. Read it, or set the {field.name} that it was read"
                " with."
            )
        return held

    def _found_version(self, using: str) -> int | None:
        field = version_field(type(self))
        rows = rows_as_they_are(field.model, using).filter(
            pk=self._get_pk_val(field.model._meta)
        )
        found: int | None = rows.values_list(field.attname, flat=True).first()
        return found

    @classmethod
    def check(cls, **kwargs: Any) -> list[checks.CheckMessage]:
        messages = super().check(**kwargs)
        fields = [
            field
            for field in cls._meta.concrete_fields
            if isinstance(field, VersionField)
        ]
        if len(fields) != 1:
            messages.append(
                checks.Error(
                    f"{cls._meta.label} has {len(fields)} version fields, but needs"
                    " exactly one.",
                    hint=(
                        "Use the field of VersionedModel, or set version = None and add"
                        " a VersionField of your own."
                    ),
                    obj=cls,
                    id="dlocks.E020",
                )
            )
            return messages
        managers: set[Any] = {
            cls._default_manager,
            cls._base_manager,
            *cls._meta.managers,
        }
        for manager in managers:
            if not issubclass(manager._queryset_class, VersionedQuerySet):
                messages.append(
                    checks.Error(
                        f"{cls._meta.label}.{manager.name} is not a VersionedManager,"
                        " so its update() would not increment the version.",
                        hint=(
                            "Derive the manager from"
                            " dlocks.optimistic.VersionedManager and its queryset from"
                            " VersionedQuerySet. Make VersionedModel the first base of"
                            " the model."
                        ),
                        obj=cls,
                        id="dlocks.E021",
                    )
                )
        for name in sorted(fields[0].ignore_fields):
            if not any(field.name == name for field in cls._meta.concrete_fields):
                messages.append(
                    checks.Error(
                        f"{cls._meta.label} has no field {name!r} to ignore.",
                        hint=f"Correct the ignore_fields of {fields[0].name}.",
                        obj=cls,
                        id="dlocks.E022",
                    )
                )
        return messages
