"""The database's clock, as SQL and as expressions of Django's ORM.

It shows the current time, and not the time at which the transaction began. PostgreSQL's
``now()`` does not advance within a transaction. ``NOW()`` of MySQL and MariaDB is in
the session's time zone. SQLite's ``unixepoch('subsec')`` is NULL before 3.42.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import partial
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from django.db.models import BigIntegerField, Expression, FloatField, Func

from dlocks.fields import ClockField

# The current time, in the format of a ClockField.
NOW = {
    "postgresql": "clock_timestamp()",
    "mysql": "UTC_TIMESTAMP(6)",
    "sqlite": "(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now') || '000')",
}
# The time that is a number of microseconds later.
LATER = {
    "postgresql": "(clock_timestamp() + {} * interval '1 microsecond')",
    "mysql": "(UTC_TIMESTAMP(6) + INTERVAL {} MICROSECOND)",
    "sqlite": (
        "(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%+.3f seconds', {} /"
        " 1e6)) || '000')"
    ),
}
_MILLISECONDS = (
    "CAST((julianday('now') - 2440587.5) * 86400000 + 0.5 AS INTEGER) * 1000"
)
# Microseconds since 1970. The clock of SQLite has a resolution of milliseconds. A grant
# that is rolled back within one leaves no trace, and the next token has to be larger.
# So a function of the driver adds microseconds of the same clock.
TICKS = {
    "postgresql": "(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000)::bigint",
    "mysql": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
    "sqlite": (
        f"({_MILLISECONDS} + MAX(0, MIN(999, dlocks_nanoseconds() / 1000 -"
        f" {_MILLISECONDS})))"
    ),
}
# The seconds from now until a time.
SECONDS = {
    "postgresql": "EXTRACT(EPOCH FROM {} - clock_timestamp())::double precision",
    "mysql": "TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), {}) / 1e6",
    "sqlite": "((julianday({}) - julianday('now')) * 86400.0)",
}
# The earliest time that is later than another one.
NEXT = {
    "postgresql": "({} + interval '1 microsecond')",
    "mysql": "({} + INTERVAL 1 MICROSECOND)",
    "sqlite": "(strftime('%%Y-%%m-%%d %%H:%%M:%%f', {}, '+0.001 seconds') || '000')",
}


class Now(Expression):
    """The current time."""

    output_field = ClockField()

    def as_sql(self, compiler: Any, connection: BaseDatabaseWrapper) -> Any:
        return NOW[connection.vendor], []


class Ticks(Expression):
    """Microseconds since 1970, the unit of tokens."""

    output_field = BigIntegerField()

    def as_sql(self, compiler: Any, connection: BaseDatabaseWrapper) -> Any:
        return f"({TICKS[connection.vendor]})", []


class After(Expression):
    """The time that is ``seconds`` from now. They may be negative.

    It is evaluated once, so an index on a column that is compared with it can be used.
    """

    output_field = ClockField()

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.ticks = ticks(seconds)

    def as_sql(self, compiler: Any, connection: BaseDatabaseWrapper) -> Any:
        return f"(SELECT {LATER[connection.vendor].format('%s')})", [self.ticks]


class At(Expression):
    """A time that was read from the database, in seconds since 1970."""

    output_field = ClockField()

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def as_sql(self, compiler: Any, connection: BaseDatabaseWrapper) -> Any:
        if connection.vendor == "postgresql":
            return "to_timestamp(%s)", [self.seconds]
        date = datetime.fromtimestamp(self.seconds, UTC).replace(tzinfo=None)
        return "%s", [date.isoformat(" ", "microseconds")]


class SecondsUntil(Func):
    """Seconds from now, by the database's clock, until the time in a column.

    They are negative if that time has passed.
    """

    output_field = FloatField()
    arity = 1

    def as_sql(  # type: ignore[override]
        self, compiler: Any, connection: BaseDatabaseWrapper, **extra: Any
    ) -> Any:
        column, parameters = compiler.compile(self.source_expressions[0])
        return SECONDS[connection.vendor].format(column), parameters


# Without Python code, in which a signal could be handled. SQLite would lose its error.
# In this form, freezegun does not stop it.
_nanoseconds = partial(time.time_ns)


def _add_function(*, connection: Any, **_: Any) -> None:
    if connection.vendor == "sqlite":
        connection.connection.create_function("dlocks_nanoseconds", 0, _nanoseconds)


connection_created.connect(_add_function, dispatch_uid="dlocks.sql.clock")


def ticks_at(now: float, vendor: str) -> int:
    """Return a time that was just read from the database, as TICKS does."""
    at = ticks(now)
    if vendor == "sqlite":
        at += max(0, min(999, _nanoseconds() // 1000 - at))
    return at


def ticks(seconds: float) -> int:
    """Return a number of seconds in microseconds, the unit of tokens."""
    return round(seconds * 1_000_000)
