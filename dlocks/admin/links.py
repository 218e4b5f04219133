"""The addresses of the live page, for an admin of a site."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.utils import quote
from django.http import QueryDict
from django.urls import reverse
from django.utils.http import urlencode


def url(admin: Any, **query: str | int) -> str:
    """Return the address of the live page."""
    address = reverse(
        "admin:dlocks_resourcelock_live", current_app=admin.admin_site.name
    )
    query = {**admin.query, **query}
    return f"{address}?{urlencode(query)}" if query else address


def lock_url(admin: Any, key: str) -> str:
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


def back_to(admin: Any, query: str) -> str:
    """Return the address of the page that had this ``Room.query``."""
    return url(
        admin,
        **{
            name: str(value)
            for name, value in QueryDict(query).items()
            if name in {"key", "q", "only", "page"}
        },
    )
