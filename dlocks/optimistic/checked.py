"""The base of models whose writes are refused if they are based on outdated data."""

from __future__ import annotations

from typing import Any

from django.db import models, router, transaction

from dlocks.exceptions import StaleToken, StaleVersion
from dlocks.optimistic.version_field import is_copy
from dlocks.optimistic.versioned_queryset import current_rows, refusable


class CheckedModel(models.Model):
    """An abstract model with a field that each write compares and advances.

    The comparison is part of the statement that writes. A new instance is always
    inserted, and never overwrites a row.
    """

    class Meta:
        abstract = True

    _stale: type[StaleVersion | StaleToken]

    @classmethod
    def _checked_field(cls) -> Any:
        """Return the field that is compared. It may be in a parent's table."""
        raise NotImplementedError

    def _held(self) -> int:
        """Return the value that this instance may write with, or raise an error."""
        raise NotImplementedError

    def condition(self, held: int) -> dict[str, Any]:
        """Return the filter that the row must match."""
        raise NotImplementedError

    def advance(self, held: int) -> int:
        """Return the field's value after the write."""
        raise NotImplementedError

    def _value_of_fixture(self, field: Any) -> Any:
        """Return the field's value after a fixture has overwritten the row."""
        raise NotImplementedError

    def _ignores(self, update_fields: Any) -> bool:
        """Return whether a write of these fields compares nothing."""
        return False

    def stale_error(self, held: int, found: int | None) -> StaleVersion | StaleToken:
        """Return the error for a row with another value, or None without a row."""
        return self._stale(type(self), self.pk, held, found)

    def delete(
        self, using: str | None = None, keep_parents: bool = False
    ) -> tuple[int, dict[str, int]]:
        if not self._is_pk_set():  # type: ignore[attr-defined]
            return super().delete(using=using, keep_parents=keep_parents)
        held, field, state = self._held(), self._checked_field(), self._state
        using = using or router.db_for_write(type(self), instance=self)
        with transaction.atomic(using=using):
            # The row is written, and not only locked. On every engine, no other
            # transaction can then write it until the commit.
            rows: Any = field.model._base_manager.using(using).filter(
                pk=self._get_pk_val(field.model._meta), **self.condition(held)
            )
            after = self.advance(held)
            if not rows._update([(field, None, after)]):
                raise self.stale_error(held, self._found(using))
            before = getattr(self, field.attname), getattr(state, "written", None)
            # Receivers of pre_delete may use the instance.
            setattr(self, field.attname, after)
            try:
                return super().delete(using=using, keep_parents=keep_parents)
            finally:
                setattr(self, field.attname, before[0])
                state.written = before[1]  # type: ignore[attr-defined]

    def save_base(
        self,
        raw: bool = False,
        force_insert: Any = False,
        force_update: bool = False,
        using: str | None = None,
        update_fields: Any = None,
    ) -> None:
        using = using or router.db_for_write(type(self), instance=self)
        state: Any = self._state
        is_update = (
            self._is_pk_set()  # type: ignore[attr-defined]
            and not (raw or force_insert)
            and bool(not state.adding or force_update or update_fields)
        )
        if is_update and not self._ignores(update_fields):
            self._held()
        # A row that was read either exists or has been deleted. It must not be inserted
        # again.
        state.was_read = (
            is_update
            and not state.adding
            and not is_copy(self, using)
            and self._was_written()
        )
        try:
            with refusable(self, using, self._stale):
                super().save_base(raw, force_insert, force_update, using, update_fields)
        finally:
            state.was_read = False

    def _was_written(self) -> bool:
        """Return whether the instance's value comes from a row."""
        return True

    def _save_table(
        self,
        raw: bool = False,
        cls: Any = None,
        force_insert: Any = False,
        force_update: bool = False,
        using: str | None = None,
        update_fields: Any = None,
    ) -> Any:
        state: Any = self._state
        if self._is_checked(cls):
            if state.adding and not (raw or force_update or update_fields):
                # Prevent Django's UPDATE of an existing row with this key, which was
                # not read.
                force_insert = True
            if force_insert and getattr(state, "was_read", False):
                # Its parent was missing, and has just been inserted.
                raise self.stale_error(self._held(), None)
        state.is_raw = raw
        try:
            return super()._save_table(  # type: ignore[misc]
                raw, cls, force_insert, force_update, using, update_fields
            )
        finally:
            state.is_raw = False

    def _do_update(  # type: ignore[override]
        self,
        base_qs: Any,
        using: str,
        pk_val: Any,
        values: Any,
        update_fields: Any,
        *others: Any,
    ) -> Any:
        """Write the row of one table, and compare the field in the WHERE clause."""
        field = self._checked_field()
        is_raw, held, after = getattr(self._state, "is_raw", False), 0, None
        if self._is_checked(base_qs.model):
            values = [value for value in values if value[0] != field]
            if self._ignores(update_fields):
                pass
            elif is_raw:
                values.append((field, None, self._value_of_fixture(field)))
            else:
                held = self._held()
                after = self.advance(held)
                values.append((field, None, after))
                base_qs = base_qs.filter(**self.condition(held))
        updated = super()._do_update(
            base_qs, using, pk_val, values, update_fields, *others
        )
        if after is None:
            return updated
        if updated:
            setattr(self, field.attname, after)
            return updated
        found = self._found(using)
        if found is None and is_copy(self, using):
            # A copy into another database that does not have the row yet.
            return updated
        raise self.stale_error(held, found)

    def _is_checked(self, model: type[models.Model]) -> bool:
        """Return whether this model's table contains the field.

        In multi-table inheritance, the parents and the child have separate tables.
        """
        owner = self._checked_field().model._meta.concrete_model
        return owner is model._meta.concrete_model

    def _found(self, using: str, lock: bool = False) -> int | None:
        """Return the value in the row, or None if the row is gone."""
        field = self._checked_field()
        rows = current_rows(field.model._base_manager.using(using), lock)
        rows = rows.filter(pk=self._get_pk_val(field.model._meta))
        found: int | None = rows.values_list(field.attname, flat=True).first()
        return found
