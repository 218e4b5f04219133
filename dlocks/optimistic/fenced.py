"""Models whose rows refuse a write with an older fencing token.

A token is too old if the row has been written with a newer one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, cast

from asgiref.sync import sync_to_async
from django.core import checks
from django.db import NotSupportedError, models, router, transaction
from django.db.models.functions import Greatest
from django.utils.translation import gettext_lazy as _

from dlocks.exceptions import StaleToken
from dlocks.optimistic.checked import CheckedModel, CheckedQuerySet, M, current_rows
from dlocks.optimistic.versioned import VersionedModel, check_managers


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
    """Write the token into the rows that have no newer one.

    ``keys`` are those in the table with the fence, which may be a parent's. Return the
    number of rows.
    """
    fence = model._meta.get_field("fence")
    rows = fence.model._base_manager.using(using)
    rows = rows.filter(pk__in=keys, fence__lte=token)
    written: int = rows._update([(fence, None, token)])
    return written


class FencedQuerySet(CheckedQuerySet[M]):
    """A queryset that writes only with a token, which ``fenced(hold)`` sets."""

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
            keys = [pk] if self._key_name() == "pk" else rows._keys()
            claimed = write_token(self.model, self.db, keys, token)
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
        clone._value = token_of(hold)
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
        if self._value is None:
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
            keys = rows._keys()
            written = {f"{self._key_name()}__in": keys}
            if write_token(self.model, self.db, keys, self._value) < len(keys):
                newer = self.model._base_manager.using(self.db)
                newer = newer.filter(**written, fence__gt=self._value)
                newer = current_rows(newer.order_by("fence"))
                if found := newer.values_list("pk", "fence").last():
                    raise StaleToken(self.model, found[0], self._value, found[1])
            # The rows that were written above and are locked. Others may have begun to
            # match since, and some of these may have ceased to.
            rows = current_rows(rows.filter(**written, fence=self._value))
            updated = super(FencedQuerySet, rows).update(**kwargs)
        self._result_cache = None
        return updated

    def create(self, **kwargs: Any) -> M:
        """Insert a row, with the token if there is one.

        The ``save()`` and ``delete()`` of the instance use the token.
        """
        if self._value is None:
            return super().create(**kwargs)
        instance: Any = self.model(**kwargs)
        self._for_write = True
        instance._state.token = self._value
        instance.save(force_insert=True, using=self.db)
        return cast("M", instance)

    def delete(self) -> tuple[int, dict[str, int]]:
        """Raise NotSupportedError. Claim each row, and then ``delete()`` it."""
        raise self._unsupported("delete")

    def bulk_update(self, *args: Any, **kwargs: Any) -> int:
        """Raise NotSupportedError. Claim each row, and then ``save()`` it."""
        raise self._unsupported("bulk_update")

    def _check_insert(self, update_conflicts: bool) -> None:
        if update_conflicts or self._value is not None:
            raise self._unsupported("bulk_create")

    def _unsupported(self, name: str) -> NotSupportedError:
        return NotSupportedError(
            f"{name}() of {self.model._meta.label} cannot compare a token with each"
            " row. Use fenced(hold).update() or fenced(hold).create(), or claim each"
            " row and then save() or delete() it."
        )

    def _key_name(self) -> str:
        fence: Any = self.model._meta.get_field("fence")
        link = self.model._meta.get_ancestor_link(fence.model)
        return link.attname if link else "pk"

    def _keys(self) -> list[Any]:
        """Return the keys of the rows in the table with the fence."""
        keys = self.order_by().values_list(self._key_name(), flat=True)
        return list(dict.fromkeys(keys))


if TYPE_CHECKING:

    class _Manager(models.Manager[M]):
        """The types of what it has from the queryset, beside Django's own methods."""

        def claim(self, pk: Any, hold: HasToken | int) -> M: ...
        async def aclaim(self, pk: Any, hold: HasToken | int) -> M: ...
        def fenced(self, hold: HasToken | int) -> FencedQuerySet[M]: ...

else:
    _Manager = models.Manager.from_queryset(FencedQuerySet)


class FencedManager(_Manager[M]):
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


class FencedModel(CheckedModel):
    """An abstract model whose rows are written only with a fencing token.

    A row refuses a token that is older than its own. Under a lock, ``claim()`` the row
    with the hold, which also reads it, then change it and ``save()``. A holder that was
    paused and has lost the lock gets StaleToken, and does not overwrite its
    successor's work. All writers of a row use the tokens of one lock.
    """

    fence = TokenField(_("fence"), default=0, editable=False)

    objects: ClassVar[FencedManager[Self]] = FencedManager()
    _stale = StaleToken

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
        with self._with_token(token):
            super().save(*args, **kwargs)

    def claim(self, hold: HasToken | int, using: str | None = None) -> None:
        """Write the hold's token into the row, and read it into this instance.

        Raise StaleToken if the row has a newer token, and DoesNotExist if it is gone.
        """
        token, state = token_of(hold), cast("Any", self._state)
        using = using or router.db_for_write(type(self), instance=self)
        current = current_rows(type(self)._base_manager.using(using))
        if not write_token(type(self), using, [self._checked_key()], token):
            newer = current.get(pk=self.pk, fence__gt=token)
            raise self._error(token, newer.fence)
        self.refresh_from_db(from_queryset=current)
        state.token, state.inserted = token, None

    async def aclaim(self, hold: HasToken | int, using: str | None = None) -> None:
        await sync_to_async(self.claim)(hold, using=using)

    async def asave(
        self, *args: Any, token: HasToken | int | None = None, **kwargs: Any
    ) -> None:
        await sync_to_async(self.save)(*args, token=token, **kwargs)

    def delete(
        self, *args: Any, token: HasToken | int | None = None, **kwargs: Any
    ) -> tuple[int, dict[str, int]]:
        with self._with_token(token):
            return super().delete(*args, **kwargs)

    async def adelete(
        self, *args: Any, token: HasToken | int | None = None, **kwargs: Any
    ) -> tuple[int, dict[str, int]]:
        return await sync_to_async(self.delete)(*args, token=token, **kwargs)

    @classmethod
    def _checked_field(cls) -> Any:
        return cls._meta.get_field("fence")

    def _condition(self, held: int) -> dict[str, Any]:
        # The claim has written its token. A row without it lost the claim in a
        # rollback, and another holder may have written it since.
        is_given = getattr(self._state, "is_given", False)
        return {"fence__lte" if is_given else "fence": held}

    def _advance(self, held: int) -> int:
        return held

    def _value_of_fixture(self) -> Any:
        # It never lowers the fence.
        return Greatest(models.F("fence"), models.Value(self.fence))

    def _held(self) -> int:
        token: int | None = getattr(self._state, "token", None)
        if token is None:
            raise RuntimeError(
                f"{self._meta.label} {self.pk!r} can only be written with a token. Call"
                " claim(hold) first, which also reads the row again, and then save()."
                " For values that were not derived from the row, use save(token=hold)."
            )
        return token

    @contextmanager
    def _with_token(self, token: HasToken | int | None) -> Iterator[None]:
        """Let the instance have a token for a single call."""
        state: Any = self._state
        before = getattr(state, "token", None), getattr(state, "is_given", False)
        if token is not None:
            state.token, state.is_given = token_of(token), True
        try:
            yield
        finally:
            state.token, state.is_given = before

    @classmethod
    def check(cls, **kwargs: Any) -> list[checks.CheckMessage]:
        messages = super().check(**kwargs)
        kind: Any = cls
        if issubclass(kind, VersionedModel):
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
        why = "so its update() would not require a token"
        return [
            *messages,
            *check_managers(cls, (), FencedQuerySet, why, "dlocks.E024"),
        ]
