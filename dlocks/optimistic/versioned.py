"""Models whose rows have a version, which every write compares and increments.

The comparison is part of the statement that writes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from asgiref.sync import sync_to_async
from django.core import checks
from django.db import DEFAULT_DB_ALIAS, connections, models, router
from django.db.models.functions import Greatest
from django.utils.translation import gettext_lazy as _

from dlocks.exceptions import StaleVersion
from dlocks.optimistic.checked import CheckedModel
from dlocks.optimistic.checks import check_versioned
from dlocks.optimistic.version_field import VersionField, note_written, version_field
from dlocks.optimistic.versioned_queryset import VersionedManager
from dlocks.transactions import TransactionMarker


class VersionedModel(CheckedModel):
    """An abstract model whose rows refuse a write based on an outdated version.

    ``save()`` and ``delete()`` compare the version of the instance with that of the
    row, in the statement that writes, and raise StaleVersion. A new instance is always
    inserted, and never overwrites a row. To rename the version, set ``version = None``
    and add a VersionField with another name.
    """

    version = VersionField(_("version"))

    objects = VersionedManager()
    _stale = StaleVersion
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
        held = self._held()
        using = using or router.db_for_write(type(self), instance=self)
        found = self._found(using, lock=True)
        if found != held:
            raise self.stale_error(held, found)

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
            TransactionMarker.of_write(connection, owner)
            if connection.run_on_commit
            else None
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

    @classmethod
    def _checked_field(cls) -> VersionField:
        return version_field(cls)

    def condition(self, held: int) -> dict[str, Any]:
        return {version_field(type(self)).attname: held}

    def advance(self, held: int) -> int:
        return held + 1

    def _value_of_fixture(self, field: Any) -> Any:
        # It must not repeat an earlier version.
        return Greatest(
            models.F(field.attname) + 1, models.Value(getattr(self, field.attname))
        )

    def _ignores(self, update_fields: Any) -> bool:
        return bool(update_fields) and version_field(type(self)).ignores(
            type(self), update_fields
        )

    def _was_written(self) -> bool:
        field = version_field(type(self))
        return bool(self.__dict__.get(field.attname) != field.get_default())

    def _save_table(
        self,
        raw: bool = False,
        cls: Any = None,
        force_insert: Any = False,
        force_update: bool = False,
        using: str | None = None,
        update_fields: Any = None,
    ) -> Any:
        """Write one table, and restore the version if that fails."""
        state: Any = self._state
        attname = version_field(type(self)).attname
        if self._is_checked(cls):
            state.version_before = (
                self.__dict__.get(attname),
                getattr(state, "written", None),
            )
        try:
            updated = super()._save_table(
                raw, cls, force_insert, force_update, using, update_fields
            )
        except BaseException:
            # The values that this save has set are rolled back, for this table or a
            # parent's.
            if before := state.__dict__.pop("version_before", None):
                state.written = before[1]
                if before[0] is not None:
                    setattr(self, attname, before[0])
            raise
        if raw and updated and self._is_checked(cls):
            # The row has another version than the fixture.
            self.__dict__.pop(attname, None)
        if self._is_checked(cls) and not (
            updated and self.__dict__.get(attname) == state.version_before[0]
        ):
            note_written(type(self), [self], using)  # type: ignore[arg-type]
        if cls is self._meta.concrete_model:
            state.__dict__.pop("version_before", None)
        return updated

    def _held(self) -> int:
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
        if written is not None and written.was_rolled_back:
            # Another transaction may have written the same version since.
            using = router.db_for_write(type(self), instance=self)
            raise self.stale_error(held, self._found(using))
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
