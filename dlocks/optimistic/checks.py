"""The system check of versioned models."""

from __future__ import annotations

from typing import Any

from django.core import checks
from django.db import models

from dlocks.optimistic.version_field import VersionField
from dlocks.optimistic.versioned_queryset import VersionedQuerySet


def check_versioned(model: type[models.Model]) -> list[checks.CheckMessage]:
    """Return the errors in a model's version field and managers."""
    fields = [
        field
        for field in model._meta.concrete_fields
        if isinstance(field, VersionField)
    ]
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
    managers: set[Any] = {
        model._default_manager,
        model._base_manager,
        *model._meta.managers,
    }
    names = {field.name for field in model._meta.concrete_fields}
    return [
        *(
            checks.Error(
                f"{model._meta.label}.{manager.name} is not a VersionedManager, so its"
                " update() would not increment the version.",
                hint=(
                    "Derive the manager from dlocks.optimistic.VersionedManager and its"
                    " queryset from VersionedQuerySet. Make VersionedModel the first"
                    " base of the model."
                ),
                obj=model,
                id="dlocks.E021",
            )
            for manager in managers
            if not issubclass(manager._queryset_class, VersionedQuerySet)
        ),
        *(
            checks.Error(
                f"{model._meta.label} has no field {name!r} to ignore.",
                hint=f"Correct the ignore_fields of {fields[0].name}.",
                obj=model,
                id="dlocks.E022",
            )
            for name in sorted(fields[0].ignore_fields - names)
        ),
    ]
