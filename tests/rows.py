"""Lock rows as tests need them: written by themselves, without a holder."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from dlocks.models import ResourceLock

OWNER = "0123456789abcdef0123456789abcdef"
PAST = datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC)
FUTURE = datetime(2190, 1, 2, 3, 4, 5, tzinfo=UTC)

P, S, F = ResourceLock.Status.PROCESSING, ResourceLock.Status.SUCCEEDED, ResourceLock.Status.FAILED


def write(key: str, status: str, end: datetime, **fields: object) -> ResourceLock:
    values = {
        "owner": OWNER,
        "holder": "web-1:4711:MainThread",
        "owner_ip": "192.0.2.7",
        "begin_time": PAST - timedelta(hours=1),
        "hold_count": 1 if status == P else 0,
        "version": 1000,
        **fields,
    }
    return ResourceLock.objects.create(key_resource=key, status=status, end_time=end, **values)


def held(key: str, **fields: object) -> ResourceLock:
    return write(key, P, FUTURE, **fields)


def stale(key: str, **fields: object) -> ResourceLock:
    return write(key, P, PAST, **fields)


def free(key: str, **fields: object) -> ResourceLock:
    return write(key, S, PAST, **fields)


def now(key: str) -> ResourceLock:
    """Return what the row has become, with its state by the clock."""
    return ResourceLock.objects.by_clock().get(pk=key)
