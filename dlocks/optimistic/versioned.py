"""Models whose rows carry a version, which is compared in the very statement that writes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from asgiref.sync import sync_to_async
from django.core import checks
from django.core.exceptions import FieldDoesNotExist
from django.db import DEFAULT_DB_ALIAS, connections, models, router, transaction
from django.db.models.functions import Greatest
from django.db.models.query_utils import DeferredAttribute
from django.utils.translation import gettext_lazy as _

from dlocks.exceptions import StaleToken, StaleVersion
from dlocks.transactions import Written


def microseconds() -> int:
    """
    Return the microseconds since 1970, to start versions with: ``VersionField(start=microseconds)``.

    A row that is made again under the key of a deleted one then does not repeat the old one's versions.
    """
    return time.time_ns() // 1000


class VersionAttribute(DeferredAttribute):
    """Reads a version that was not loaded with the instance without keeping it: it is not that of the other values."""

    def __get__(self, instance: Any, cls: Any = None) -> Any:
        if instance is None or self.field.attname in instance.__dict__:
            return super().__get__(instance, cls)
        value = super().__get__(instance, cls)
        instance.__dict__.pop(self.field.attname, None)
        return value


class VersionField(models.BigIntegerField):  # type: ignore[type-arg]
    """
    The version of a row: ``start`` when it is inserted, one more with every write; 0 until it is inserted.

    ``start`` is a number, or a function that returns one. Writes of nothing but ``ignore_fields`` neither compare nor
    count: for what may be overwritten, such as a number of views.
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
        # Rows from before the column have version 0, too.
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
        if add:
            setattr(model_instance, self.attname, self.start() if callable(self.start) else self.start)
        return getattr(model_instance, self.attname)

    def ignores(self, model: type[models.Model], names: Iterable[str]) -> bool:
        """Return whether a write of these fields of the model, by name or attname, is none of the version's."""
        written = {by_name(model, name) for name in names} - {self.name}
        return bool(written) and written <= self.ignore_fields


def by_name(model: type[models.Model], name: str) -> str:
    """Return the name of the field that may be given by its attname."""
    try:
        return model._meta.get_field(name).name
    except FieldDoesNotExist:
        # Whoever writes it will say so better.
        return name


def version_field(model: type[models.Model]) -> VersionField:
    """Return the one VersionField of the model, its own or its parents'."""
    for field in model._meta.concrete_fields:
        if isinstance(field, VersionField):
            return field
    raise FieldDoesNotExist(f"{model._meta.label} has no VersionField.")


def note_written(model: type[models.Model], instances: Iterable[models.Model], using: str) -> None:
    """Note where instances whose versions were counted up just now were written: a rollback takes that back."""
    written = Written.here(connections[using], version_field(model).model._meta.concrete_model)
    for instance in instances:
        state: Any = instance._state
        state.written = written


def is_copy(instance: models.Model, using: str) -> bool:
    """Return whether to save an instance there copies it into another database than it was read from."""
    # What was read from a replica is written to the primary.
    return instance._state.db not in {None, using} and using != router.db_for_write(type(instance), instance=instance)


def is_joined(rows: Any) -> bool:
    """
    Return whether the statements that write the rows do not look at all conditions of a queryset themselves.

    One on another table, a parent's for instance, is looked at before: and not again where the row was waited for.
    """
    if not connections[rows.db].features.has_select_for_update:
        # Whoever writes has the whole database.
        return False
    query = rows.query.chain()
    query.get_initial_alias()
    return bool(rows.model._meta.concrete_model._meta.parents) or query.count_active_tables() > 1


def among_keys(rows: Any, owner: Any) -> tuple[Any, list[Any]]:
    """Return a queryset limited to the rows that it has now, and their keys in the owner's table."""
    link = rows.model._meta.get_ancestor_link(owner) if owner is not rows.model._meta.concrete_model else None
    name = "pk" if link is None else link.attname
    keys = list(rows.order_by().values_list(name, flat=True))
    return rows.filter(**{f"{name}__in": keys}), keys


class VersionedQuerySet(models.QuerySet[Any]):
    """A queryset whose writes are seen by whoever has read the rows before."""

    # Whether the versions of the rows have been counted up already.
    _counted = False

    def update(self, **kwargs: Any) -> int:
        """
        Update all rows, and count up their versions. It compares nothing; ``filter(version=…)`` does.

        Raise ValueError for a version among the values: it is counted by the database.
        """
        if self._counted or not kwargs:
            return super().update(**kwargs)
        field = version_field(self.model)
        if field.name in kwargs:
            raise ValueError(f"{self.model._meta.label}.{field.name} counts itself, and cannot be updated to a value.")
        if field.ignores(self.model, kwargs):
            return super().update(**kwargs)
        self._for_write = True
        # The version may be in a parent's table: two statements.
        with transaction.atomic(using=self.db, savepoint=False):
            # Who reads the rows after this, in the same transaction, has what a rollback takes back.
            note_written(self.model, [], self.db)
            rows = self._locked(field.model._meta.concrete_model)
            updated = super(VersionedQuerySet, rows).update(**kwargs, **{field.name: models.F(field.name) + 1})
        # As Django does: what was read before is older now.
        self._result_cache = None
        return updated

    def _locked(self, owner: Any) -> Any:
        """Return the rows, locked where the statement that writes them does not look at all conditions itself."""
        query = self.query
        if query.is_sliced or query.combinator or query.distinct_fields or not is_joined(self):
            return self
        rows, keys = among_keys(self.using(self.db), owner)
        # Looked at once more by what comes next, when nobody can write them any more. In one order, without a deadlock.
        locked = owner._base_manager.using(self.db).filter(pk__in=keys).order_by("pk").select_for_update()
        list(locked.values_list("pk"))
        return rows

    def bulk_update(self, objs: Iterable[Any], fields: Iterable[str], batch_size: int | None = None) -> int:
        """
        Update the fields of all instances, whose versions are compared and counted up.

        Raise StaleVersion, which names all that are stale, when one of them is; then nothing is written.
        """
        objs, fields = tuple(objs), tuple(fields)
        field = version_field(self.model)
        if field.name in fields:
            raise ValueError(f"{self.model._meta.label}.{field.name} counts itself, and cannot be updated to a value.")
        if not objs or not fields or field.ignores(self.model, fields) or not all(obj._is_pk_set() for obj in objs):
            return super().bulk_update(objs, fields, batch_size)
        # By the key in the table that has the version, which may be a parent's.
        model: Any = field.model._meta.concrete_model
        held = {obj._get_pk_val(model._meta): obj._held_version() for obj in objs}
        if len(held) < len(objs):
            raise ValueError("bulk_update() was given two instances of the same row, of which one would be lost.")
        self._for_write = True
        most = connections[self.db].ops.bulk_batch_size(["pk", "version"], objs)
        size = min(batch_size, most) if batch_size and batch_size > 0 else most
        pks = list(held)
        counted: Any = self._chain()  # type: ignore[attr-defined]
        counted._counted = True
        try:
            with transaction.atomic(using=self.db):
                for start in range(0, len(pks), size):
                    count_up(model, self.db, {pk: held[pk] for pk in pks[start : start + size]})
                updated = super(VersionedQuerySet, counted).bulk_update(objs, fields, batch_size)
        except _SomeAreStale as some:
            # Looked up when what had been counted is rolled back.
            found = dict(rows_as_they_are(model, self.db).filter(pk__in=some.pks).values_list("pk", field.attname))
            stale = [pk for pk in some.pks if found.get(pk) != held[pk]] or some.pks
            raise StaleVersion(self.model, stale[0], held[stale[0]], found.get(stale[0]), stale) from None
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
        """
        Insert the instances. Raise ValueError for ``update_conflicts``: such an update could not compare.

        With ``ignore_conflicts`` the instances have no version: the row of any of them may be somebody else's.
        """
        if update_conflicts:
            raise ValueError(
                "bulk_create(update_conflicts=True) would write over rows without comparing or counting up their "
                "versions: insert with ignore_conflicts=True, then read what was there, and bulk_update() that."
            )
        objs = super().bulk_create(objs, batch_size, ignore_conflicts, update_conflicts, update_fields, unique_fields)
        if ignore_conflicts:
            field = version_field(self.model)
            for obj in objs:
                if obj._is_pk_set():
                    obj.__dict__.pop(field.attname, None)
                else:
                    # Django does not tell which row it is.
                    setattr(obj, field.attname, field.get_default())
        else:
            note_written(self.model, objs, self.db)
        return objs

    def only(self, *fields: Any) -> Any:
        """Load only these fields, and the version, without which the instances could not be saved."""
        if fields and fields != (None,):
            fields = (*fields, version_field(self.model).name)
        return super().only(*fields)

    def _clone(self) -> Any:
        clone = super()._clone()  # type: ignore[misc]
        clone._counted = self._counted
        return clone


def count_up(model: Any, using: str, held: dict[Any, int]) -> None:
    """Count up the versions of the rows that still have the version held; raise unless all of them do."""
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
    """Some of these rows were not counted up, and the others are to be rolled back."""

    def __init__(self, pks: list[Any]) -> None:
        self.pks = pks


def rows_as_they_are(model: Any, using: str) -> Any:
    """Return the rows as they are now, also in a transaction that began with them as they were."""
    rows = model._base_manager.using(using)
    return rows.select_for_update() if connections[using].in_atomic_block else rows


@contextmanager
def refusable(instance: models.Model, using: str, refusal: type[StaleVersion | StaleToken]) -> Iterator[None]:
    """Let the caller's transaction go on after a save that was refused: nothing of it was written."""
    if instance._meta.concrete_model._meta.parents:  # type: ignore[union-attr]
        # Perhaps after another table was written.
        with transaction.atomic(using=using):
            yield
        return
    try:
        yield
    except refusal as error:
        if (error.model, error.pk) == (type(instance), instance.pk) and connections[using].in_atomic_block:
            # Django marks it as broken by any error in save().
            transaction.set_rollback(False, using=using)
        raise


class VersionedManager(models.Manager.from_queryset(VersionedQuerySet)):  # type: ignore[misc]
    """The manager of a VersionedModel; derive yours from it, or make it ``from_queryset`` of a VersionedQuerySet."""


class VersionedModel(models.Model):
    """
    An abstract model whose rows refuse a write that has not seen the last one.

    ``save()`` and ``delete()`` compare the version that the instance was read with to that of the row, in the
    statement that writes, and raise StaleVersion. A new instance is always inserted, never written over a row.
    To call the version otherwise, set ``version = None`` and have a VersionField of another name.
    """

    version = VersionField(_("version"))

    objects = VersionedManager()
    # Also what Django does behind the scenes, as on_delete=SET_NULL, has to count.
    _versioned = VersionedManager()

    class Meta:
        abstract = True
        base_manager_name = "_versioned"

    def touch(self, using: str | None = None) -> None:
        """Count up the version and write nothing else: for a row whose parts, in other tables, have changed."""
        self.save(using=using, update_fields=[version_field(type(self)).name])

    def check_version(self, using: str | None = None) -> None:
        """
        Raise StaleVersion unless the row is still as it was read.

        In a transaction the row is locked, so that it stays so until the end.
        """
        held = self._held_version()
        using = using or router.db_for_write(type(self), instance=self)
        found = self._found_version(using)
        if found != held:
            raise StaleVersion(type(self), self.pk, held, found)

    def refresh_from_db(self, using: str | None = None, fields: Any = None, from_queryset: Any = None) -> None:
        """Read the row anew; where that is a part of it, without its version, the version stays that of the rest."""
        field = version_field(type(self))
        attname = field.attname
        fields = None if fields is None else list(fields)
        if self._is_read_whole(from_queryset) if fields is None else not {field.name, attname}.isdisjoint(fields):
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
        """Return whether all that the instance has loaded is read anew from a queryset, as Django does that."""
        names, deferring = (frozenset(), True) if from_queryset is None else from_queryset.query.deferred_loading
        if not self.get_deferred_fields():
            return deferring and not names
        loaded = {name for field in self._meta.concrete_fields for name in (field.name, field.attname)}
        return not deferring or not names & (loaded - self.get_deferred_fields())

    def _note_read(self) -> None:
        """Note whether what has just been read may have been written in the same transaction, which may be undone."""
        state: Any = self._state
        connection = connections[state.db]
        owner = version_field(type(self)).model._meta.concrete_model
        state.written = Written.around(connection, owner) if connection.run_on_commit else None

    @classmethod
    def from_db(cls, db: str | None, *args: Any, **kwargs: Any) -> Any:
        instance: Any = super().from_db(db, *args, **kwargs)
        if connections[db or DEFAULT_DB_ALIAS].run_on_commit:
            instance._note_read()
        return instance

    def clean_fields(self, exclude: Collection[str] | None = None) -> None:
        field = version_field(type(self))
        if field.attname not in self.__dict__:
            # It would be read, and kept as if it were that of the other values.
            exclude = {*(exclude or ()), field.name}
        super().clean_fields(exclude)

    async def atouch(self, using: str | None = None) -> None:
        await sync_to_async(self.touch)(using=using)

    async def acheck_version(self, using: str | None = None) -> None:
        await sync_to_async(self.check_version)(using=using)

    def delete(self, using: str | None = None, keep_parents: bool = False) -> tuple[int, dict[str, int]]:
        if not self._is_pk_set():  # type: ignore[attr-defined]
            return super().delete(using=using, keep_parents=keep_parents)
        held = self._held_version()
        using = using or router.db_for_write(type(self), instance=self)
        field = version_field(type(self))
        with transaction.atomic(using=using):
            # Written, not only locked: nobody else can write it from here to the commit, on every engine.
            rows: Any = field.model._base_manager.using(using).filter(pk=self._get_pk_val(field.model._meta))
            if not rows.filter(**{field.attname: held})._update([(field, None, held + 1)]):
                raise StaleVersion(type(self), self.pk, held, self._found_version(using))
            state: Any = self._state
            written = getattr(state, "written", None)
            # For what receivers of pre_delete do with it.
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
        is_update = is_update and bool(not state.adding or force_update or update_fields)
        if is_update and not (update_fields and field.ignores(type(self), update_fields)):
            self._held_version()
        # A row that was read is there, or has been deleted; it is not to be inserted again.
        was_written = self.__dict__.get(field.attname) != field.get_default()
        state.was_read = is_update and not state.adding and not is_copy(self, using) and was_written
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
        if not raw and self._state.adding and not force_update and not update_fields and self._is_versioned(cls):
            # Never Django's UPDATE of whatever has the key, of which no version was read.
            force_insert = True
        state: Any = self._state
        attname = version_field(type(self)).attname
        if self._is_versioned(cls):
            state.version_before = self.__dict__.get(attname), getattr(state, "written", None)
            if force_insert and getattr(state, "was_read", False):
                # Its parent was gone, and has just been inserted.
                raise StaleVersion(type(self), self.pk, self._held_version(), None)
        state.is_raw = raw
        try:
            updated = super()._save_table(raw, cls, force_insert, force_update, using, update_fields)  # type: ignore[misc]
        except BaseException:
            # What this save has set, for this table or a parent's, is rolled back.
            before = state.__dict__.pop("version_before", None)
            if before is not None and before[0] is not None:
                setattr(self, attname, before[0])
            if before is not None:
                state.written = before[1]
            raise
        finally:
            state.is_raw = False
        if self._is_versioned(cls) and not (updated and self.__dict__.get(attname) == state.version_before[0]):
            note_written(type(self), [self], using)  # type: ignore[arg-type]
        if cls is self._meta.concrete_model:
            state.__dict__.pop("version_before", None)
        return updated

    def _do_update(  # type: ignore[override]
        self, base_qs: Any, using: str, pk_val: Any, values: Any, update_fields: Any, *others: Any
    ) -> Any:
        """Write one table's row; what is compared is in the WHERE of the statement."""
        field = version_field(type(self))
        if not self._is_versioned(base_qs.model):
            return super()._do_update(base_qs, using, pk_val, values, update_fields, *others)
        values = [value for value in values if value[0] != field]
        if update_fields and field.ignores(type(self), update_fields):
            return super()._do_update(base_qs, using, pk_val, values, update_fields, *others)
        if getattr(self._state, "is_raw", False):
            # A fixture is loaded over whatever is there, but never so that its version looks like an earlier one.
            newer = Greatest(models.F(field.attname) + 1, models.Value(getattr(self, field.attname)))
            values.append((field, None, newer))
            updated = super()._do_update(base_qs, using, pk_val, values, update_fields, *others)
            if updated:
                self.__dict__.pop(field.attname, None)
            return updated
        held = self._held_version()
        values.append((field, None, held + 1))
        same = base_qs.filter(**{field.attname: held})
        updated = super()._do_update(same, using, pk_val, values, update_fields, *others)
        if updated:
            setattr(self, field.attname, held + 1)
            return updated
        found = self._found_version(using)
        if found is None and is_copy(self, using):
            # A copy into another database, which does not have the row yet.
            return updated
        raise StaleVersion(type(self), self.pk, held, found)

    def _is_versioned(self, model: type[models.Model]) -> bool:
        """Return whether the version is in the table of this model, out of the parents and the child."""
        return version_field(type(self)).model._meta.concrete_model is model._meta.concrete_model

    def _held_version(self) -> int:
        """Return the version that the instance was read with."""
        field = version_field(type(self))
        held = self.__dict__.get(field.attname)
        if held is None:
            raise RuntimeError(
                f"{self._meta.label} {self.pk!r} was loaded without its {field.name}, so nothing tells whether the row "
                f"has changed since. Load it with the instance, or, to write over whatever is there, call "
                f"refresh_from_db(fields=[{field.name!r}]) first."
            )
        held = int(field.to_python(held))
        written = getattr(self._state, "written", None)
        if written is not None and written.was_undone:
            # Somebody else may have made the same version since.
            raise StaleVersion(
                type(self), self.pk, held, self._found_version(router.db_for_write(type(self), instance=self))
            )
        if self._state.adding and held == field.get_default():
            raise ValueError(
                f"{self._meta.label} {self.pk!r} was not read from the database and has no {field.name}: give it the "
                f"one that it was read with, or read it."
            )
        return held

    def _found_version(self, using: str) -> int | None:
        field = version_field(type(self))
        rows = rows_as_they_are(field.model, using).filter(pk=self._get_pk_val(field.model._meta))
        found: int | None = rows.values_list(field.attname, flat=True).first()
        return found

    @classmethod
    def check(cls, **kwargs: Any) -> list[checks.CheckMessage]:
        messages = super().check(**kwargs)
        fields = [field for field in cls._meta.concrete_fields if isinstance(field, VersionField)]
        if len(fields) != 1:
            messages.append(
                checks.Error(
                    f"{cls._meta.label} has {len(fields)} version fields; it needs one.",
                    hint="Use the one of VersionedModel, or set version = None beside a VersionField of your own.",
                    obj=cls,
                    id="dlocks.E020",
                )
            )
            return messages
        managers: set[Any] = {cls._default_manager, cls._base_manager, *cls._meta.managers}
        for manager in managers:
            if not issubclass(manager._queryset_class, VersionedQuerySet):
                messages.append(
                    checks.Error(
                        f"{cls._meta.label}.{manager.name} is not a VersionedManager: its update() would not be seen "
                        "by whoever has read the row before.",
                        hint="Derive the manager from dlocks.optimistic.VersionedManager, its queryset from "
                        "VersionedQuerySet, and let VersionedModel be the first of the model's bases.",
                        obj=cls,
                        id="dlocks.E021",
                    )
                )
        for name in sorted(fields[0].ignore_fields):
            if not any(field.name == name for field in cls._meta.concrete_fields):
                messages.append(
                    checks.Error(
                        f"{cls._meta.label} has no field {name!r} to ignore.",
                        hint=f"Correct ignore_fields of {fields[0].name}.",
                        obj=cls,
                        id="dlocks.E022",
                    )
                )
        return messages
