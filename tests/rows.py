"""Rows of locks, claims and records, written directly for tests."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from django.db import connection, models

from dlocks.models import HoldRecord, LockClaim, ResourceLock
from dlocks.values import UNLIMITED
from tests.internals import After

OWNER = "0123456789abcdef0123456789abcdef"
PAST = datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC)
FUTURE = datetime(2190, 1, 2, 3, 4, 5, tzinfo=UTC)

P, S, F = (
    ResourceLock.Status.PROCESSING,
    ResourceLock.Status.SUCCEEDED,
    ResourceLock.Status.FAILED,
)


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
    return ResourceLock.objects.create(
        key_resource=key, status=status, end_time=end, **values
    )


def held(key: str, **fields: object) -> ResourceLock:
    return write(key, P, FUTURE, **fields)


def stale(key: str, **fields: object) -> ResourceLock:
    return write(key, P, PAST, **fields)


def free(key: str, **fields: object) -> ResourceLock:
    return write(key, S, PAST, **fields)


def now(key: str) -> ResourceLock:
    """Return the current row, with its state by the database's clock."""
    return ResourceLock.objects.by_clock().get(pk=key)


def claim(key: str, end: datetime, **fields: object) -> LockClaim:
    """Write a claim on a key that has a row, and count it there.

    Without ``version`` it is a waiter. With it, it is a shared hold or a permit.
    """
    version = fields.get("version")
    values = {
        "owner": OWNER[:16] + secrets.token_hex(8),
        "holder": "worker-1:815:MainThread",
        "owner_ip": "198.51.100.8",
        "begin_time": PAST,
        "hold_count": 0 if version is None else 1,
        "shared": version is not None,
        "permits": UNLIMITED,
        "scope": P,
        "takeover": True,
        "handover_ttl": 1_500_000,
        **fields,
    }
    counter = "waiters" if version is None else "shares"
    ResourceLock.objects.filter(pk=key).update(**{counter: models.F(counter) + 1})
    return LockClaim.objects.create(key_resource=key, end_time=end, **values)


def waits(key: str, **fields: object) -> LockClaim:
    return claim(key, FUTURE, **fields)


def dead(key: str, **fields: object) -> LockClaim:
    return claim(key, PAST, **fields)


def shares(key: str, token: int, **fields: object) -> LockClaim:
    return claim(key, FUTURE, version=token, **fields)


def stale_share(key: str, token: int, **fields: object) -> LockClaim:
    return claim(key, PAST, version=token, **fields)


def record(
    key: str, token: int, *, ago: float = 60.0, held: float = 1.0, **fields: object
) -> HoldRecord:
    """Return the record of a hold that ended ``ago`` seconds ago."""
    values = {
        "holder": "web-1:4711:MainThread",
        "owner_ip": "192.0.2.7",
        "scope": "L",
        "shared": False,
        "waited": 0.0,
        "ending": "R",
        "begin_time": After(-ago - held),
        "end_time": After(-ago),
        **fields,
    }
    return HoldRecord(key_resource=key, token=token, **values)


def ended(key: str, *, token: int | None = None, **fields: object) -> HoldRecord:
    """Write the record of a hold that has ended."""
    token = HoldRecord.objects.count() + 1 if token is None else token
    written = record(key, token, **fields)
    written.save()
    return written


FUNCTION = "CREATE FUNCTION of_a_test() RETURNS trigger LANGUAGE plpgsql AS $$ {} $$"


@contextmanager
def trigger(moment: str, model: type[models.Model], **bodies: str) -> Iterator[None]:
    """Create a trigger for each row of a table, with the body for this vendor."""
    body, drop = bodies[connection.vendor], "DROP TRIGGER of_a_test"
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(FUNCTION.format(body))
            body = "FOR EACH ROW EXECUTE FUNCTION of_a_test()"
            drop = "DROP FUNCTION of_a_test CASCADE"
        table = model._meta.db_table
        cursor.execute(f"CREATE TRIGGER of_a_test {moment} ON {table} {body}")
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute(drop)


@contextmanager
def without_table(model: type[models.Model]) -> Iterator[None]:
    """Rename the table of a model during a block, as if it were missing."""
    table = model._meta.db_table
    with connection.schema_editor() as editor:
        editor.alter_db_table(model, table, f"{table}_elsewhere")
    try:
        yield
    finally:
        with connection.schema_editor() as editor:
            editor.alter_db_table(model, f"{table}_elsewhere", table)
