"""Querysets whose writes increment the versions of rows."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections, models, transaction

from dlocks.exceptions import StaleToken, StaleVersion
from dlocks.optimistic.version_field import note_written, version_field


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
    link = rows.model._meta.get_ancestor_link(owner)
    name = link.attname if link else "pk"
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
        self._refuse_version(kwargs)
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

    def _refuse_version(self, names: Container[str]) -> None:
        name = version_field(self.model).name
        if name in names:
            raise ValueError(
                f"{self.model._meta.label}.{name} is incremented by each update,"
                " and cannot be set to a value."
            )

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
        locked = owner._base_manager.using(self.db).filter(pk__in=keys)
        list(locked.order_by("pk").select_for_update().values_list("pk"))
        return current_rows(rows)

    def bulk_update(
        self, objs: Iterable[Any], fields: Iterable[str], batch_size: int | None = None
    ) -> int:
        """Update the fields of all instances; compare and increment their versions.

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
        ):
            return super().bulk_update(objs, fields, batch_size)
        # The key in the table that contains the version, which may be a parent's.
        model: Any = field.model._meta.concrete_model
        held = {obj._get_pk_val(model._meta): obj._held() for obj in objs}
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
                    batch = {pk: held[pk] for pk in pks[start : start + size]}
                    count_up(model, self.db, batch)
                updated = super(VersionedQuerySet, counted).bulk_update(
                    objs, fields, batch_size
                )
        except _SomeAreStale as some:
            (keys,) = some.args
            # Read after the increments are rolled back.
            rows = current_rows(model._base_manager.using(self.db))
            found = dict(rows.filter(pk__in=keys).values_list("pk", field.attname))
            stale = list(pk for pk in keys if found.get(pk) != held[pk]) or keys
            pk = stale[0]
            raise StaleVersion(self.model, pk, held[pk], found.get(pk), stale) from None
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
        objs = super().bulk_create(objs, batch_size, ignore_conflicts)
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
    """Some rows were not incremented, so roll back the others."""


def current_rows(rows: Any, lock: bool = False) -> Any:
    """Return the current rows, even in a transaction with an older snapshot.

    PostgreSQL and SQLite refuse a write there. ``lock`` locks rows on PostgreSQL too.
    """
    connection = connections[rows.db]
    lock = (lock or connection.vendor == "mysql") and not connection.get_autocommit()
    return rows.select_for_update() if lock else rows


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
