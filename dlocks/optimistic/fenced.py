"""Models whose rows refuse a write with an older fencing token.

A token is too old if the row has been written with a newer one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from asgiref.sync import sync_to_async
from django.core import checks
from django.db import models, router
from django.db.models.functions import Greatest
from django.utils.translation import gettext_lazy as _

from dlocks.exceptions import StaleToken
from dlocks.optimistic.checked import CheckedModel, current_rows
from dlocks.optimistic.checks import check_managers
from dlocks.optimistic.fenced_queryset import (
    FencedQuerySet,
    HasToken,
    token_of,
    write_token,
)
from dlocks.optimistic.versioned import VersionedModel
from dlocks.optimistic.versioned_queryset import M

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
        model: Any = self._checked_field().model._meta.concrete_model
        current = current_rows(type(self)._base_manager.using(using))
        keys = [self._get_pk_val(model._meta)]
        if not write_token(model, using, keys, token):
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

    def _matches(self, found: int, held: int) -> bool:
        return found == held or (found < held and "fence" not in self._condition(held))

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
