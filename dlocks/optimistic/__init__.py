"""Optimistic locking: models that refuse a write based on outdated data.

No lock is held while a user edits.
"""

from dlocks.exceptions import StaleToken, StaleVersion
from dlocks.optimistic.fenced import FencedManager, FencedModel, FencedQuerySet
from dlocks.optimistic.retry import retry_on_conflict
from dlocks.optimistic.trigger import AddVersionTrigger, RemoveVersionTrigger
from dlocks.optimistic.version_field import VersionField
from dlocks.optimistic.versioned import (
    VersionedManager,
    VersionedModel,
    VersionedQuerySet,
)

__all__ = [
    "AddVersionTrigger",
    "FencedManager",
    "FencedModel",
    "FencedQuerySet",
    "RemoveVersionTrigger",
    "StaleToken",
    "StaleVersion",
    "VersionField",
    "VersionedManager",
    "VersionedModel",
    "VersionedQuerySet",
    "retry_on_conflict",
]
