"""The base of models whose writes are refused if they are based on outdated data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self, TypeVar, cast

from django.db import connections, models, router, transaction

from dlocks.exceptions import StaleToken, StaleVersion
from dlocks.transactions import TransactionMarker

M = TypeVar("M", bound=models.Model, covariant=True)


class CheckedQuerySet(models.QuerySet[M]):
    """A queryset that inserts rows, and overwrites none that it did not compare."""

    # What the rows get that it writes, if it is known before: a version or a token.
    _value: int | None = None

    def bulk_create(
        self,
        objs: Iterable[Any],
        batch_size: int | None = None,
        ignore_conflicts: bool = False,
        update_conflicts: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> list[M]:
        """Insert the instances, or raise an error for ``update_conflicts``.

        Such an update could compare nothing. With ``ignore_conflicts``, an instance
        whose row another writer has inserted is stale.
        """
        self._check_insert(update_conflicts)
        objs = super().bulk_create(objs, batch_size, ignore_conflicts)
        note_inserted(objs, self.db)
        return objs

    def _check_insert(self, update_conflicts: bool) -> None:
        raise NotImplementedError

    def _clone(self) -> Self:
        clone: Self = super()._clone()  # type: ignore[misc]
        clone._value = self._value
        return clone


class CheckedModel(models.Model):
    """An abstract model with a field that each write compares and replaces.

    The comparison is part of the statement that writes. A model with several tables
    compares first, in a statement of its own, so a refused save has written nothing. A
    new instance is always inserted, and never overwrites a row.
    """

    class Meta:
        abstract = True

    _stale: type[StaleVersion | StaleToken]

    @classmethod
    def _checked_field(cls) -> Any:
        """Return the field that is compared.

        Its ``model`` may be a parent, which has a table of its own.
        """
        raise NotImplementedError

    def _held(self) -> int:
        """Return the value that this instance may write with, or raise an error."""
        raise NotImplementedError

    def _condition(self, held: int) -> dict[str, Any]:
        """Return the filter that the row must match."""
        return {self._checked_field().attname: held}

    def _advance(self, held: int) -> int:
        """Return the field's value after the write."""
        raise NotImplementedError

    def _value_of_fixture(self) -> Any:
        """Return the field's value after a fixture has overwritten the row."""
        raise NotImplementedError

    def _ignores(self, update_fields: Any) -> bool:
        """Return whether a write of these fields compares nothing."""
        return False

    def delete(
        self, using: str | None = None, keep_parents: bool = False
    ) -> tuple[int, dict[str, int]]:
        if not self._is_pk_set():  # type: ignore[attr-defined]
            return super().delete(using=using, keep_parents=keep_parents)
        attname, held = self._checked_field().attname, self._held()
        using = using or router.db_for_write(type(self), instance=self)
        with transaction.atomic(using=using):
            before = getattr(self, attname)
            # The row is written, and not only locked. On every engine, no other
            # transaction can then write it until the commit. Receivers of pre_delete
            # may use the instance.
            if not self._advance_row(using, held):
                raise self._error(held, self._found(using))
            try:
                return super().delete(using=using, keep_parents=keep_parents)
            finally:
                setattr(self, attname, before)

    def save_base(
        self,
        raw: bool = False,
        force_insert: Any = False,
        force_update: bool = False,
        using: str | None = None,
        update_fields: Any = None,
    ) -> None:
        using = using or router.db_for_write(type(self), instance=self)
        if self._compares(raw or force_insert, force_update, update_fields):
            # Raise the errors of wrong uses before any query.
            self._held()
        state: Any = self._state
        # A receiver of pre_save may save the instance meanwhile.
        before, state.is_forced = getattr(state, "is_forced", False), force_update
        try:
            super().save_base(raw, force_insert, force_update, using, update_fields)
        except self._stale as error:
            # Django marks the transaction as broken after any error in save(). One that
            # was refused has written nothing, unless it had to insert a parent.
            is_intact = error.instance is self and not force_insert
            if is_intact and connections[using].in_atomic_block:
                transaction.set_rollback(False, using=using)
            raise
        finally:
            state.is_forced = before

    def _compares(self, inserts: Any, force_update: bool, update_fields: Any) -> bool:
        """Return whether a save is of a row that exists, and compares the field."""
        is_update = not self._state.adding or force_update or bool(update_fields)
        is_update = is_update and self._is_pk_set()  # type: ignore[attr-defined]
        return is_update and not (inserts or self._ignores(update_fields))

    def _save_parents(
        self, cls: Any, using: str, update_fields: Any, force_insert: Any, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        concrete: Any = self._meta.concrete_model
        if cls is concrete:
            # The beginning of a save, after the receivers of pre_save.
            state: Any = self._state
            state.before = self.__dict__.get(self._checked_field().attname)
            state.is_compared = False
            # Whether this copies the instance into another database. Values that were
            # read from a replica are written to the primary.
            state.is_copy = state.db not in {None, using} and (
                using != router.db_for_write(type(self), instance=self)
            )
            if concrete._meta.parents and self._compares(
                force_insert, state.is_forced, update_fields
            ):
                held = self._held()
                state.is_compared = bool(self._advance_row(using, held))
                if not state.is_compared:
                    self._check_refusal(using, held)
        return super()._save_parents(  # type: ignore[misc]
            cls, using, update_fields, force_insert, *args, **kwargs
        )

    def _save_table(
        self,
        raw: bool = False,
        cls: Any = None,
        force_insert: Any = False,
        force_update: bool = False,
        using: str | None = None,
        update_fields: Any = None,
    ) -> Any:
        """Write one table, and restore the field if that fails."""
        state: Any = self._state
        state.is_raw = raw
        if (
            cls is self._checked_field().model
            and (state.adding or not self._is_pk_set(cls._meta))  # type: ignore[attr-defined]
            and not (raw or force_update or update_fields or state.is_compared)
        ):
            # Prevent Django's UPDATE of an existing row with this key, which was not
            # read. An instance without a key is new, though its key may have a default.
            force_insert = True
        try:
            updated = super()._save_table(  # type: ignore[misc]
                raw, cls, force_insert, force_update, using, update_fields
            )
        except BaseException:
            if not raw and state.before is not None:
                setattr(self, self._checked_field().attname, state.before)
            raise
        if not updated and cls is self._checked_field().model:
            note_inserted([self], using)
        return updated

    def _do_update(  # type: ignore[override]
        self,
        base_qs: Any,
        using: str,
        pk_val: Any,
        values: Any,
        update_fields: Any,
        forced_update: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Write the row of one table, and compare the field in the WHERE clause."""
        field, held, after = self._checked_field(), None, None
        if base_qs.model is field.model:
            state: Any = self._state
            values = [value for value in values if value[0] != field]
            if state.is_raw:
                after = self._value_of_fixture()
            elif state.is_compared and values:
                # Another value, since a trigger would replace the one that stays.
                after = self._advance(self._held())
            elif not (state.is_compared or self._ignores(update_fields)):
                held = self._held()
                after = self._advance(held)
                base_qs = base_qs.filter(**self._condition(held))
            if after is not None:
                values.append((field, None, after))
        # With select_on_save, a row of an old snapshot would count as written.
        forced_update = forced_update or held is not None
        updated = super()._do_update(
            base_qs, using, pk_val, values, update_fields, forced_update, *args,
            **kwargs,
        )  # fmt: skip
        if updated and isinstance(after, int):
            setattr(self, field.attname, after)
        elif not updated and held is not None:
            self._check_refusal(using, held)
        return updated

    def _advance_row(self, using: str, held: int) -> int:
        """Compare and replace the field alone; return the number of rows."""
        field, after = self._checked_field(), self._advance(held)
        rows = self._rows(using).filter(**self._condition(held))
        written: int = rows._update([(field, None, after)])
        if written:
            setattr(self, field.attname, after)
        return written

    def _check_refusal(self, using: str, held: int) -> None:
        """Raise the error of a write that matched no row, if it was the comparison."""
        state, found = cast("Any", self._state), self._found(using)
        inserted = getattr(state, "inserted", None)
        if found is None and (
            state.is_copy or (inserted is not None and inserted.was_rolled_back)
        ):
            # The row has never been there.
            state.adding = True
        elif found != held:
            raise self._error(held, found)

    def _error(self, held: int, found: int | None) -> StaleVersion | StaleToken:
        """Return the error for a row with another value, or None without a row."""
        error = self._stale(type(self), self.pk, held, found)
        error.instance = self
        return error

    def _rows(self, using: str) -> Any:
        """Return this instance's row in the table with the field."""
        rows = self._checked_field().model._base_manager.using(using)
        return rows.filter(pk=self._checked_key())

    def _checked_key(self) -> Any:
        """Return the key in the table with the field, which may be a parent's.

        Django copies the key of an instance that was not read when it saves the parent.
        """
        model = self._checked_field().model
        link: Any = self._meta.get_ancestor_link(model)
        key: Any = self._get_pk_val(model._meta)
        return getattr(self, link.attname) if key is None and link else key

    def _found(self, using: str, lock: bool = False) -> int | None:
        """Return the value in the row, or None if the row is gone."""
        rows = current_rows(self._rows(using), lock)
        found: int | None = rows.values_list(
            self._checked_field().attname, flat=True
        ).first()
        return found


def note_inserted(instances: Any, using: str | None) -> None:
    """Record the transaction of an insert.

    Django's ``save()`` inserts an instance again if its insert was rolled back. Without
    this, it would look like the instance of a row that was deleted.
    """
    marker = TransactionMarker.before_callbacks(connections[using])  # type: ignore[index]
    for instance in instances:
        instance._state.inserted = marker


def current_rows(rows: Any, lock: bool = False) -> Any:
    """Return the current rows, even in a transaction with an older snapshot.

    PostgreSQL and SQLite refuse a write there. ``lock`` locks rows on PostgreSQL too.
    """
    connection = connections[rows.db]
    lock = (lock or connection.vendor == "mysql") and not connection.get_autocommit()
    return rows.select_for_update() if lock else rows
