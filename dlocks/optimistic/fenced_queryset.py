"""Querysets that write rows only with a fencing token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, Self, cast

from asgiref.sync import sync_to_async
from django.db import NotSupportedError, models, transaction

from dlocks.exceptions import StaleToken
from dlocks.optimistic.checked import current_rows
from dlocks.optimistic.versioned_queryset import M


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


def write_token(model: Any, using: str, keys: Iterable[Any], token: int) -> int:
    """Write the token into the rows with these keys that have no newer one.

    ``model`` has the fence in its own table. Return the number of rows.
    """
    rows = model._base_manager.using(using).filter(pk__in=keys, fence__lte=token)
    written: int = rows._update([(model._meta.get_field("fence"), None, token)])
    return written


class FencedQuerySet(models.QuerySet[M]):
    """A queryset that writes only with a token, which ``fenced(hold)`` sets."""

    _token: int | None = None

    def claim(self, pk: Any, hold: HasToken | int) -> M:
        """Write the hold's token into the row, and read the row afterwards.

        From then on no older token can write the row. The returned instance has the
        values of the last writer, and its ``save()`` and ``delete()`` use the token.
        Raise StaleToken if the row has a newer token, and DoesNotExist if there is no
        such row.
        """
        token = token_of(hold)
        self._for_write = True
        with transaction.atomic(using=self.db):
            rows = self.using(self.db).filter(pk=pk)
            owner, keys = self._owner(), [pk]
            if owner is not self.model._meta.concrete_model:
                keys = rows._keys()
            claimed = write_token(owner, self.db, keys, token)
            rows = current_rows(rows)
            # A row that was inserted since is not claimed.
            instance = rows.get() if claimed else rows.filter(fence__gt=token).get()
        if not claimed:
            raise StaleToken(self.model, pk, token, instance.fence)
        instance._state.token = token
        return cast("M", instance)

    async def aclaim(self, pk: Any, hold: HasToken | int) -> M:
        return await sync_to_async(self.claim)(pk, hold)

    def fenced(self, hold: HasToken | int) -> Self:
        """Return this queryset with a token for ``update()`` and ``create()``."""
        clone: Self = self._chain()  # type: ignore[attr-defined]
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
        if self._token is None:
            raise RuntimeError(
                f"{self.model._meta.label} can only be written with a token. Use"
                " objects.fenced(hold).update(…), or objects.claim(pk, hold) and then"
                " save()."
            )
        if self.query.is_sliced or self.query.combinator:
            raise TypeError(
                "A slice or a combination of querysets cannot be written with a token."
            )
        self._for_write = True
        with transaction.atomic(using=self.db):
            rows: Any = self.using(self.db)
            owner, keys = self._owner(), rows._keys()
            if write_token(owner, self.db, keys, self._token) < len(keys):
                newer = owner._base_manager.using(self.db)
                newer = newer.filter(pk__in=keys, fence__gt=self._token)
                newer = current_rows(newer.order_by("fence"))
                if found := newer.values_list("pk", "fence").last():
                    raise StaleToken(self.model, found[0], self._token, found[1])
            # The rows that were written above and are locked. Others may have begun to
            # match since, and some of these may have ceased to.
            written = {f"{self._key_name()}__in": keys, "fence": self._token}
            rows = current_rows(rows.filter(**written))
            updated = super(FencedQuerySet, rows).update(**kwargs)
        self._result_cache = None
        return updated

    def create(self, **kwargs: Any) -> M:
        """Insert a row, with the token if there is one.

        The ``save()`` and ``delete()`` of the instance use the token.
        """
        if self._token is None:
            return super().create(**kwargs)
        instance: Any = self.model(**kwargs)
        self._for_write = True
        instance._state.token = self._token
        instance.save(force_insert=True, using=self.db)
        return cast("M", instance)

    def delete(self) -> tuple[int, dict[str, int]]:
        """Raise NotSupportedError. Claim each row, and then ``delete()`` it."""
        raise self._unsupported("delete")

    def bulk_update(self, *args: Any, **kwargs: Any) -> int:
        """Raise NotSupportedError. Claim each row, and then ``save()`` it."""
        raise self._unsupported("bulk_update")

    def bulk_create(
        self,
        objs: Iterable[Any],
        batch_size: int | None = None,
        ignore_conflicts: bool = False,
        update_conflicts: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> list[M]:
        """Insert the instances without a token.

        Raise NotSupportedError with a token, or for ``update_conflicts``, since such an
        update could not check tokens.
        """
        if update_conflicts or self._token is not None:
            raise self._unsupported("bulk_create")
        return super().bulk_create(objs, batch_size, ignore_conflicts)

    def _unsupported(self, name: str) -> NotSupportedError:
        return NotSupportedError(
            f"{name}() of {self.model._meta.label} cannot compare a token with each"
            " row. Use fenced(hold).update() or fenced(hold).create(), or claim each"
            " row and then save() or delete() it."
        )

    def _owner(self) -> Any:
        """Return the model whose table contains the fence."""
        return self.model._meta.get_field("fence").model._meta.concrete_model

    def _key_name(self) -> str:
        link = self.model._meta.get_ancestor_link(self._owner())
        return link.attname if link else "pk"

    def _keys(self) -> list[Any]:
        """Return the keys of the rows in the table with the fence."""
        keys = self.order_by().values_list(self._key_name(), flat=True)
        return list(dict.fromkeys(keys))

    def _clone(self) -> Self:
        clone: Self = super()._clone()  # type: ignore[misc]
        clone._token = self._token
        return clone
