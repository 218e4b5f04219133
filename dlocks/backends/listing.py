"""Locks and shared holds for people, made of the holders of a backend without rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from dlocks.backends.base import Backend
from dlocks.models import LockClaim, LockState, ResourceLock
from dlocks.values import UNLIMITED, Holder

# The number of keys in a list, at most.
LISTED = 1000


def listed(backend: Backend, keys: Iterable[str] | None = None) -> Iterator[Any]:
    """Yield the locks that are held in a backend without rows, ordered by key."""
    for key in sorted(backend.keys())[:LISTED] if keys is None else keys:
        sharers, waiting = backend.inspector.sharers(key)
        holder = None if sharers else backend.holder(key)
        if holder or sharers:
            status = ResourceLock.Status.PROCESSING if holder else ""
            lock = _row(ResourceLock, holder or sharers[0], status=status)
            if sharers:
                lock.state = LockState.SHARED
            lock.waiting, lock.sharing = waiting, len(sharers)
            lock.sharers = [
                _row(LockClaim, one, shared=True, permits=UNLIMITED) for one in sharers
            ]
            yield lock


def _row(model: Any, holder: Holder, **fields: Any) -> Any:
    since = holder.since
    row = model(
        key_resource=holder.key,
        holder=holder.holder,
        owner_ip=holder.owner_ip,
        begin_time=since,
        version=holder.token,
        hold_count=holder.count,
        **fields,
    )
    row.seconds_left = holder.remaining
    held = since and (datetime.now(UTC) - since).total_seconds()
    row.seconds_held = held and max(0.0, held)
    row.state = LockState.STALE if holder.stale else LockState.HELD
    return row
