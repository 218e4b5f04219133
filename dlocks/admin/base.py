"""The base of the read-only admins, on the tables of one backend."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from dlocks.backends.database.backend import DatabaseBackend
from dlocks.conf import DEFAULT_ALIAS, backends


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """An admin whose rows change only when locks are used."""

    empty_value_display = "-"
    change_list_template = "admin/dlocks/resourcelock/change_list.html"

    class Media:
        css = {"all": ["dlocks/admin.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def backend(self) -> DatabaseBackend | None:
        backend = backends[DEFAULT_ALIAS]
        return backend if isinstance(backend, DatabaseBackend) else None

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Any:
        # PostgreSQL raises an error for a NUL in a query's parameter.
        return (
            None
            if "\0" in object_id
            else super().get_object(request, object_id, from_field)
        )
