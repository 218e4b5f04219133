"""Models whose rows refuse a write with an older fencing token.

A token is too old if the row has been written with a newer one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, cast

from asgiref.sync import sync_to_async
from django.core import checks
from django.db import connections, models, router, transaction
from django.db.models.functions import Greatest
from django.utils.translation import gettext_lazy as _

from dlocks.exceptions import StaleToken
from dlocks.optimistic.versioned import (
    VersionedModel,
    among_keys,
    is_copy,
    is_joined,
    refusable,
)


class HasToken(Protocol):
    """A hold, as far as this module needs it."""

    @property
    def token(self) -> int: ...


def token_of(hold: HasToken | int) -> int:
    """Return the fencing token of a hold, or the token itself."""
    token = hold if isinstance(hold, int) else getattr(hold, "token", None)
    if isinstance(token, bool) or not isinstance(token, int):
        raise TypeError(f"Pass a hold or its token, not {type(hold).__name__}.")
    if token < 1:
        raise ValueError(f"A token must be 1 or more, not {token}.")
    return token


class FencedQuerySet(models.QuerySet[Any]):
    """A queryset that writes only with a token, which ``fenced(hold)`` sets."""

    _token: int | None = None

    def claim(self, pk: Any, hold: HasToken | int) -> Any:
        """Write the hold's token into the row, and read the row afterwards.

        From then on no older token can write the row. The returned instance has the
        values of the last writer, and its ``save()`` and ``delete()`` use the token.
        Raise StaleToken if the row has a newer token, and DoesNotExist if there is no
        such row.
        """
        token = token_of(hold)
        self._for_write = True
        rows = self.using(self.db).filter(pk=pk)
        rows._fence(token)
        instance = rows.get()
        if instance.fence > token:
            raise StaleToken(self.model, pk, token, instance.fence)
        instance._state.token = token
        return instance

    async def aclaim(self, pk: Any, hold: HasToken | int) -> Any:
        return await sync_to_async(self.claim)(pk, hold)

    def fenced(self, hold: HasToken | int) -> Any:
        """Return this queryset with a token for its updates, deletions and inserts."""
        clone: Any = self._chain()  # type: ignore[attr-defined]
        clone._token = token_of(hold)
        return clone

    def update(self, **kwargs: Any) -> int:
        """Update all rows.

        Raise StaleToken, and write nothing, if a row has a newer token.
        """
        if "fence" in kwargs:
            raise ValueError(
                "fence cannot be set to a value. fenced(hold).update() writes the token"
                " of the hold."
            )
        with self._fenced() as rows:
            updated = super(FencedQuerySet, rows).update(**kwargs)
        self._result_cache = None
        return updated

    def delete(self) -> tuple[int, dict[str, int]]:
        """Delete all rows.

        Raise StaleToken, and delete nothing, if a row has a newer token.
        """
        with self._fenced() as rows:
            deleted = super(FencedQuerySet, rows).delete()
        self._result_cache = None
        return deleted

    def create(self, **kwargs: Any) -> Any:
        """Insert a row, with the token if there is one.

        The ``save()`` and ``delete()`` of the instance use the token.
        """
        # Django's method rejects the reverse names of a OneToOneField.
        if (
            self._token is None
            or not self.model._meta._reverse_one_to_one_field_names.isdisjoint(kwargs)
        ):
            return super().create(**kwargs)
        instance = self.model(**kwargs)
        if hasattr(self, "_fetch_mode"):
            # Django 6.1 and later.
            instance._state.fetch_mode = self._fetch_mode
        instance._state.token = self._token
        self._for_write = True
        instance.save(force_insert=True, using=self.db)
        return instance

    def bulk_update(
        self, objs: Iterable[Any], fields: Iterable[str], batch_size: int | None = None
    ) -> int:
        """Update the fields of all instances with the token; see update()."""
        self._need_token()
        self._for_write = True
        with transaction.atomic(using=self.db):
            return super().bulk_update(objs, fields, batch_size)

    def bulk_create(
        self,
        objs: Iterable[Any],
        batch_size: int | None = None,
        ignore_conflicts: bool = False,
        update_conflicts: bool = False,
        update_fields: Any = None,
        unique_fields: Any = None,
    ) -> list[Any]:
        """Insert the instances, with the token if there is one; see create().

        Raise ValueError for ``update_conflicts``, since such an update could not check
        tokens.
        """
        if update_conflicts:
            raise ValueError(
                "bulk_create(update_conflicts=True) would overwrite rows without"
                " comparing tokens."
            )
        objs = list(objs)
        before = [
            (getattr(instance._state, "token", None), instance.fence)
            for instance in objs
        ]
        if self._token is not None:
            for instance in objs:
                instance._state.token = self._token
        created = False
        try:
            rows = super().bulk_create(
                objs,
                batch_size,
                ignore_conflicts,
                update_conflicts,
                update_fields,
                unique_fields,
            )
            created = not ignore_conflicts
        finally:
            if not created:
                # It is unknown which of the rows belong to these instances.
                for instance, (token, fence) in zip(objs, before, strict=True):
                    instance._state.token, instance.fence = token, fence
        return rows

    def _need_token(self) -> int:
        if self._token is None:
            raise RuntimeError(
                f"{self.model._meta.label} can only be written with a token. Use"
                " objects.fenced(hold).update(…), or objects.claim(pk, hold) and then"
                " save()."
            )
        return self._token

    def _fence(self, token: int) -> int:
        """Write the token into rows without a newer one; return their number."""
        field = self.model._meta.get_field("fence")
        rows: Any = self
        owner: Any = field.model._meta.concrete_model
        if owner is not self.model._meta.concrete_model or is_joined(self):
            # Otherwise the statement would not check the fence again after it has
            # waited for a row.
            rows = FencedQuerySet(owner, using=self.db).filter(
                pk__in=among_keys(self, owner)[1]
            )
        rows = rows.filter(fence__lte=token).order_by()
        written: int = rows._update([(field, None, token)])
        return written

    def _fenced(self) -> Any:
        """Return a context in which all rows have this token.

        Entering it raises StaleToken if a row has a newer token.
        """
        return _Fenced(self, self._need_token())

    def _clone(self) -> Any:
        clone = super()._clone()  # type: ignore[misc]
        clone._token = self._token
        return clone


class _Fenced:
    """A transaction that first writes the token into all rows of a queryset."""

    def __init__(self, rows: FencedQuerySet, token: int) -> None:
        rows._for_write = True
        self.rows = rows.using(rows.db)
        self.token = token
        self.atomic = transaction.atomic(using=rows.db)

    def __enter__(self) -> Any:
        self.atomic.__enter__()
        try:
            if self.rows.query.is_sliced or self.rows.query.combinator:
                raise TypeError(
                    "A slice or a combination of querysets cannot be written with a"
                    " token."
                )
            owner = self.rows.model._meta.get_field("fence").model._meta.concrete_model
            if is_joined(self.rows):
                self.rows, _ = among_keys(self.rows, owner)
            self.rows._fence(self.token)
            newer = (
                self.rows.filter(fence__gt=self.token)
                .order_by("fence")
                .values_list("pk", "fence")
                .last()
            )
            if newer is not None:
                raise StaleToken(self.rows.model, newer[0], self.token, newer[1])
        except BaseException as error:
            self.atomic.__exit__(type(error), error, error.__traceback__)
            raise
        # Only the rows that were written above and are locked. Other rows may have
        # begun to match since.
        return self.rows.filter(fence=self.token)

    def __exit__(self, *error: object) -> None:
        self.atomic.__exit__(*cast("Any", error))


class FencedManager(models.Manager.from_queryset(FencedQuerySet)):  # type: ignore[misc]
    """The manager of a FencedModel.

    Derive your manager from it, or create it with ``from_queryset()`` of a
    FencedQuerySet.
    """


class TokenField(models.BigIntegerField):  # type: ignore[type-arg]
    """The token of the last write."""

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        token = getattr(model_instance._state, "token", None)
        if add and token is not None:
            setattr(model_instance, self.attname, token)
        return getattr(model_instance, self.attname)

    def deconstruct(self) -> Any:
        name, _path, args, kwargs = super().deconstruct()
        return name, "dlocks.optimistic.fenced.TokenField", args, kwargs


class FencedModel(models.Model):
    """An abstract model whose rows are written only with a fencing token.

    A row refuses a token that is older than its own. Under a lock, ``claim()`` the row
    with the hold, which also reads it, then change it and ``save()``. A holder that was
    paused and has lost the lock gets StaleToken, and does not overwrite its
    successor's work. All writers of a row use the tokens of one lock.
    """

    fence = TokenField(_("fence"), default=0, editable=False)

    objects = FencedManager()

    class Meta:
        abstract = True

    def save(
        self, *args: Any, token: HasToken | int | None = None, **kwargs: Any
    ) -> None:
        """Save with the token of the claim, or with ``token``, a hold or a number.

        Pass ``token`` only for values that were not derived from the row. The row was
        read before the token was written into it, so an older holder may have written
        it since.
        """
        with _Token(self, token):
            super().save(*args, **kwargs)

    def claim(self, hold: HasToken | int, using: str | None = None) -> None:
        """Write the hold's token into the row, and read it into this instance.

        Raise StaleToken if the row has a newer token, and DoesNotExist if it is gone.
        """
        token = token_of(hold)
        using = using or router.db_for_write(type(self), instance=self)
        self._rows(using)._fence(token)
        self.refresh_from_db(using=using)
        if self.fence > token:
            raise StaleToken(type(self), self.pk, token, self.fence)
        state: Any = self._state
        state.token = token

    async def aclaim(self, hold: HasToken | int, using: str | None = None) -> None:
        await sync_to_async(self.claim)(hold, using=using)

    async def asave(
        self, *args: Any, token: HasToken | int | None = None, **kwargs: Any
    ) -> None:
        await sync_to_async(self.save)(*args, token=token, **kwargs)

    def delete(
        self,
        using: str | None = None,
        keep_parents: bool = False,
        *,
        token: HasToken | int | None = None,
    ) -> tuple[int, dict[str, int]]:
        if not self._is_pk_set():  # type: ignore[attr-defined]
            return super().delete(using=using, keep_parents=keep_parents)
        using = using or router.db_for_write(type(self), instance=self)
        with _Token(self, token):
            held = self._need_token()
        with transaction.atomic(using=using):
            if not self._rows(using)._fence(held):
                raise StaleToken(type(self), self.pk, held, self._found(using))
            return super().delete(using=using, keep_parents=keep_parents)

    async def adelete(
        self,
        using: str | None = None,
        keep_parents: bool = False,
        *,
        token: HasToken | int | None = None,
    ) -> tuple[int, dict[str, int]]:
        return await sync_to_async(self.delete)(
            using=using, keep_parents=keep_parents, token=token
        )

    def save_base(
        self,
        raw: bool = False,
        force_insert: Any = False,
        force_update: bool = False,
        using: str | None = None,
        update_fields: Any = None,
    ) -> None:
        using = using or router.db_for_write(type(self), instance=self)
        is_update = self._is_pk_set() and not (raw or force_insert)  # type: ignore[attr-defined]
        state: Any = self._state
        if is_update and (not state.adding or force_update or update_fields):
            self._need_token()
        # A row that was read either exists or has been deleted. It must not be inserted
        # again.
        state.was_read = is_update and not state.adding and not is_copy(self, using)
        try:
            with refusable(self, using, StaleToken):
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
            and self._is_fenced(cls)
        ):
            # Prevent Django's UPDATE of an existing row with this key.
            force_insert = True
        state: Any = self._state
        if force_insert and self._is_fenced(cls) and getattr(state, "was_read", False):
            # Its parent was missing, and has just been inserted.
            raise StaleToken(type(self), self.pk, self._need_token(), None)
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
        """Write the row of one table, and compare the fence in the WHERE clause."""
        if not self._is_fenced(base_qs.model):
            return super()._do_update(
                base_qs, using, pk_val, values, update_fields, *others
            )
        field = self._meta.get_field("fence")
        values = [value for value in values if value[0] != field]
        if getattr(self._state, "is_raw", False):
            # A fixture overwrites the row, but never lowers its fence.
            values.append(
                (field, None, Greatest(models.F("fence"), models.Value(self.fence)))
            )
            return super()._do_update(
                base_qs, using, pk_val, values, update_fields, *others
            )
        token = self._need_token()
        values.append((field, None, token))
        rows = base_qs.filter(fence__lte=token)
        updated = super()._do_update(
            rows, using, pk_val, values, update_fields, *others
        )
        if updated:
            self.fence = token
            return updated
        found = self._found(using)
        if found is None and is_copy(self, using):
            # A copy into another database that does not have the row yet.
            return updated
        raise StaleToken(type(self), self.pk, token, found)

    def _need_token(self) -> int:
        token: int | None = getattr(self._state, "token", None)
        if token is None:
            raise RuntimeError(
                f"{self._meta.label} {self.pk!r} can only be written with a token. Call"
                " claim(hold) first, which also reads the row again, and then save()."
                " For values that were not derived from the row, use save(token=hold)."
            )
        return token

    def _is_fenced(self, model: type[models.Model]) -> bool:
        """Return whether this model's table contains the fence.

        In multi-table inheritance, the parents and the child have separate tables.
        """
        return (
            self._meta.get_field("fence").model._meta.concrete_model
            is model._meta.concrete_model
        )

    def _rows(self, using: str) -> Any:
        """Return a queryset with the row that contains the fence."""
        model: Any = self._meta.get_field("fence").model
        return FencedQuerySet(model, using=using).filter(
            pk=self._get_pk_val(model._meta)
        )

    def _found(self, using: str) -> int | None:
        row = self._rows(using)
        if connections[using].in_atomic_block:
            row = row.select_for_update()
        found: int | None = row.values_list("fence", flat=True).first()
        return found

    @classmethod
    def check(cls, **kwargs: Any) -> list[checks.CheckMessage]:
        messages = super().check(**kwargs)
        if issubclass(cls, VersionedModel):
            messages.append(
                checks.Error(
                    f"{cls._meta.label} is both a VersionedModel and a FencedModel.",
                    hint=(
                        "Choose one of them: a version for rows that users edit, or a"
                        " fence for rows that are written under a lock."
                    ),
                    obj=cls,
                    id="dlocks.E023",
                )
            )
        managers: set[Any] = {cls._default_manager, *cls._meta.managers}
        for manager in managers:
            if not issubclass(manager._queryset_class, FencedQuerySet):
                messages.append(
                    checks.Error(
                        f"{cls._meta.label}.{manager.name} is not a FencedManager, so"
                        " its update() would not require a token.",
                        hint=(
                            "Derive the manager from dlocks.optimistic.FencedManager,"
                            " and its queryset from FencedQuerySet."
                        ),
                        obj=cls,
                        id="dlocks.E024",
                    )
                )
        return messages


class _Token:
    """A context in which an instance has the token of a single call."""

    def __init__(self, instance: FencedModel, token: HasToken | int | None) -> None:
        self.state: Any = instance._state
        self.token = None if token is None else token_of(token)

    def __enter__(self) -> None:
        self.claimed = getattr(self.state, "token", None)
        if self.token is not None:
            self.state.token = self.token

    def __exit__(self, *error: object) -> None:
        self.state.token = self.claimed
