"""The system check of an alias with session locks."""

from __future__ import annotations

from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from dlocks.backends.session.connect import engine_session_class


def check_session(alias: str, database: str) -> list[checks.CheckMessage]:
    """Check the settings of a session backend's database, without a query."""
    try:
        engine_session_class(database)
    except ImproperlyConfigured as error:
        return [
            checks.Error(
                f"DLOCKS[{alias!r}]: {error}",
                hint="Choose another BACKEND, or another database.",
                id="dlocks.E004",
            )
        ]
    return []
