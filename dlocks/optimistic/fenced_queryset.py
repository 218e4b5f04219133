"""Querysets that write rows only with a fencing token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from asgiref.sync import sync_to_async
from django.db import models, transaction

from dlocks.exceptions import StaleToken
from dlocks.optimistic.versioned_queryset import among_keys, current_rows, is_joined


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
        rows = current_rows(self.using(self.db).filter(pk=pk))
        if not rows._fence(token):
            # A row that was inserted since is not claimed.
            rows = rows.filter(fence__gt=token)
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
            if rows.query.select_for_update:
                # Django would read an old snapshot.
                rows = rows._by_key(self.model)
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
            rows = super().bulk_create(objs, batch_size, ignore_conflicts)
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
            rows = self._by_key(owner)
        rows = rows.filter(fence__lte=token).order_by()
        written: int = rows._update([(field, None, token)])
        return written

    def _by_key(self, model: Any) -> Any:
        """Return the rows that match now, by their keys in the model's table."""
        keys = among_keys(self, model)[1]
        return type(self)(model, using=self.db).filter(pk__in=keys)

    @contextmanager
    def _fenced(self) -> Iterator[Any]:
        """Write the token into all rows first, in a transaction.

        Raise StaleToken if a row has a newer token.
        """
        token = self._need_token()
        self._for_write = True
        rows: Any = self.using(self.db)
        with transaction.atomic(using=self.db):
            if rows.query.is_sliced or rows.query.combinator:
                raise TypeError(
                    "A slice or a combination of querysets cannot be written with a"
                    " token."
                )
            if is_joined(rows):
                rows = current_rows(among_keys(rows, rows.model)[0])
            written = rows._fence(token)
            seen = rows.aggregate(
                models.Count("pk", distinct=True), models.Max("fence")
            )
            if [*seen.values()] != [written, token if written else None]:
                newer = rows.filter(fence__gt=token).order_by("fence")
                newer = newer.values_list("pk", "fence")
                # An old snapshot hides later writes. A locking read waits even for rows
                # that the filter leaves out, so it is not used otherwise.
                if found := newer.last() or current_rows(newer).last():
                    raise StaleToken(rows.model, found[0], token, found[1])
                rows = current_rows(rows)
            # Only the rows that were written above and are locked. Other rows may have
            # begun to match since.
            yield rows.filter(fence=token)

    def _clone(self) -> Any:
        clone = super()._clone()  # type: ignore[misc]
        clone._token = self._token
        return clone
