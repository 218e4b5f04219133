"""Rows that refuse a write which has not seen the last one; no lock is held while somebody thinks."""

from dlocks.exceptions import StaleToken, StaleVersion
from dlocks.optimistic.fenced import FencedManager, FencedModel, FencedQuerySet
from dlocks.optimistic.retry import retry_on_conflict
from dlocks.optimistic.versioned import (
    VersionedManager,
    VersionedModel,
    VersionedQuerySet,
    VersionField,
    microseconds,
)

__all__ = [
    "FencedManager",
    "FencedModel",
    "FencedQuerySet",
    "StaleToken",
    "StaleVersion",
    "VersionField",
    "VersionedManager",
    "VersionedModel",
    "VersionedQuerySet",
    "microseconds",
    "retry_on_conflict",
]
