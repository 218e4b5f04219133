"""The addresses of the live page, and what it needs of the admin."""

from __future__ import annotations

from typing import Any, Protocol

from django.contrib.admin.utils import quote
from django.http import HttpRequest, QueryDict
from django.urls import reverse
from django.utils.http import urlencode

from dlocks.backends.database.backend import DatabaseBackend
from dlocks.operations import LockRow
from dlocks.values import Kept


class OnSite(Protocol):
    """What has pages on an admin site."""

    admin_site: Any

    @property
    def query(self) -> dict[str, str]: ...


class LockAdmin(OnSite, Protocol):
    """The part of the admin of locks that the page uses."""

    opts: Any

    @property
    def alias_context(self) -> dict[str, Any]: ...
    @property
    def media(self) -> Any: ...
    def has_view_permission(self, request: HttpRequest) -> bool: ...
    def has_force_release_permission(self, request: HttpRequest) -> bool: ...
    def backend(self) -> DatabaseBackend | None: ...
    def locks(self, request: HttpRequest, kept: Kept) -> Any: ...
    def form_of(self, shown: LockRow) -> dict[str, str]: ...


def url(admin: OnSite, **query: str | int) -> str:
    """Return the address of the live page."""
    address = reverse(
        "admin:dlocks_resourcelock_live", current_app=admin.admin_site.name
    )
    query = {**admin.query, **query}
    return f"{address}?{urlencode(query)}" if query else address


def lock_url(admin: OnSite, key: str) -> str:
    """Return the address of a lock's page."""
    address = reverse(
        "admin:dlocks_resourcelock_change",
        args=[quote(key)],
        current_app=admin.admin_site.name,
    )
    if not admin.query:
        return address
    # Django's links from that page keep this parameter.
    kept = urlencode({"_changelist_filters": urlencode(admin.query)})
    return f"{address}?{kept}"


def back_to(admin: OnSite, query: str) -> str:
    """Return the address of the page that had this ``Room.query``."""
    return url(
        admin,
        **{
            name: str(value)
            for name, value in QueryDict(query).items()
            if name in {"key", "q", "only", "page"}
        },
    )
