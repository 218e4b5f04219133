"""The system checks of versioned and fenced models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.core import checks
from django.db import models

from dlocks.optimistic.version_field import VersionField
from dlocks.optimistic.versioned_queryset import VersionedQuerySet


def check_versioned(model: type[models.Model]) -> list[checks.CheckMessage]:
    """Return the errors in a model's version field and managers."""
    columns = model._meta.concrete_fields
    fields = [field for field in columns if isinstance(field, VersionField)]
    if len(fields) != 1:
        return [
            checks.Error(
                f"{model._meta.label} has {len(fields)} version fields, but needs"
                " exactly one.",
                hint=(
                    "Use the field of VersionedModel, or set version = None and add a"
                    " VersionField of your own."
                ),
                obj=model,
                id="dlocks.E020",
            )
        ]
    unknown = fields[0].ignore_fields - {field.name for field in columns}
    return [
        *check_managers(
            model,
            [model._base_manager],
            VersionedQuerySet,
            "so its update() would not replace the version",
            "dlocks.E021",
        ),
        *(
            checks.Error(
                f"{model._meta.label} has no field {name!r} to ignore.",
                hint=f"Correct the ignore_fields of {fields[0].name}.",
                obj=model,
                id="dlocks.E022",
            )
            for name in sorted(unknown)
        ),
    ]


def check_managers(
    model: type[models.Model],
    others: Iterable[Any],
    queryset: type[models.QuerySet[Any]],
    why: str,
    identifier: str,
) -> list[checks.CheckMessage]:
    """Return an error for each manager with another queryset."""
    name = queryset.__name__.replace("QuerySet", "")
    managers: set[Any] = {model._default_manager, *model._meta.managers, *others}
    return [
        checks.Error(
            f"{model._meta.label}.{manager.name} is not a {name}Manager, {why}.",
            hint=(
                f"Derive the manager from dlocks.optimistic.{name}Manager and its"
                f" queryset from {name}QuerySet. Make {name}Model the first base of the"
                " model."
            ),
            obj=model,
            id=identifier,
        )
        for manager in managers
        if not issubclass(manager._queryset_class, queryset)
    ]
