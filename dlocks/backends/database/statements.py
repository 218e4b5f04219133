"""The texts of statements: the engine's SQL and the names of the tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.utils.functional import cached_property

from dlocks.backends.base import HEARTBEAT_TIMEOUT, UnstorableKeyError
from dlocks.backends.database.connection import how_to_migrate
from dlocks.backends.database.expiry import Observations
from dlocks.backends.database.fragments import (
    FREE_BY_CLOCK,
    IN_QUEUE,
    MICROSECONDS,
    SHARE,
)
from dlocks.backends.database.sending import Sender
from dlocks.backends.database.sqlite import SQLiteLimits
from dlocks.exceptions import LockBackendError
from dlocks.sql.direct import TEXT_AT_MOST, TEXTS_AT_MOST
from dlocks.sql.schemas import find_tables, qualified, schema_of

# Ten years in seconds. No clock is ever stepped back that far.
NEVER = 10 * 365 * 86_400.0


class Statements(Sender, SQLiteLimits):
    """The part that composes statements on the tables of one database."""

    grace: float
    prefix: str

    # Detects dead holders if no clock is trusted. None if the database clock is
    # trusted.
    observations: Observations | None = None

    # Statements with the engine's SQL and the table names inserted, by template. The
    # same templates occur again and again.
    _texts: dict[str, str]

    @property
    def _live(self) -> str:
        """Return the condition that the caller's own lease is live.

        If no clock is trusted, the lease is live for as long as the row is the
        caller's.
        """
        return "status = 'P'" + (
            " AND end_time > {now}" if self.observations is None else ""
        )

    @property
    def _live_share(self) -> str:
        return SHARE + (" AND end_time > {now}" if self.observations is None else "")

    @property
    def _renewed(self) -> str:
        """Return the SQL of the new end of a lease.

        If other processes observe the row, the new end always differs from the old one.
        """
        if self.observations is None:
            return "{end}"
        return (
            f"{self.dialect.greatest}({{end}}, {self.dialect.later_than('end_time')})"
        )

    def _renewal(self, table: str, mine: str, primary: str) -> str:
        assignment = f"end_time = {self._renewed}"
        return self._text(self.dialect.update(table, assignment, mine, primary))

    @property
    def _grace(self) -> int:
        """Return the offset from now, in microseconds, to the latest expired end.

        It is negative. A lease that ended before that time may be taken over by the
        clock.
        """
        return -round(
            (self.grace if self.observations is None else NEVER) * MICROSECONDS
        )

    def _times(self) -> dict[str, int]:
        return {"grace": self._grace, "heard": round(HEARTBEAT_TIMEOUT * MICROSECONDS)}

    @property
    def table(self) -> str:
        """Return the quoted name of the table of the lock rows."""
        return self._tables[0]

    @cached_property
    def _tables(self) -> list[str]:
        try:
            from dlocks.models import HoldRecord, LockClaim, ResourceLock
        except RuntimeError as error:
            raise ImproperlyConfigured(
                "Add 'dlocks' to INSTALLED_APPS, and run 'manage.py migrate'."
            ) from error
        connection = self.connection
        schema = schema_of(connection, self._rows)
        if connection.vendor == "postgresql" and not schema:
            if (
                refusal := find_tables(connection, self._rows).refusal(self.database)
            ) is not None:
                raise ImproperlyConfigured(refusal)
            failure = LockBackendError(
                f"Database {self.database!r} is not migrated (no schema of its search"
                f" path has {ResourceLock._meta.db_table!r})."
                f" {how_to_migrate(self.database)}"
            )
            failure.changed_nothing = True
            raise failure
        return [
            qualified(model._meta.db_table, connection, schema)
            for model in (ResourceLock, LockClaim, HoldRecord)
        ]

    def _sql(self, statement: Callable[..., str], *pieces: str) -> str:
        return self._text(statement(self.table, *pieces))

    def _text(self, sql: str) -> str:
        """Return a statement with the engine's SQL inserted for its placeholders."""
        if (text := self._texts.get(sql)) is not None:
            return text
        dialect = self.dialect
        locks, claims, records = self._tables
        fragments = {
            "{locks}": locks,
            # FOR UPDATE OF requires the name of a table without its schema.
            "{of_locks}": locks.rpartition(".")[2],
            "{claims}": claims,
            "{records}": records,
            "{free_by_clock}": FREE_BY_CLOCK,
            "{now}": dialect.now,
            "{ticks}": dialect.ticks,
            "{server}": dialect.server,
            "{at_once_term}": dialect.at_once_term,
            "{token}": dialect.token(),
            "{next_version}": dialect.next_version(),
            "{end}": dialect.after("ttl"),
            "{grace}": dialect.after("grace"),
            "{idle}": dialect.after("idle"),
            "{heard}": dialect.after("heard"),
            "{ends}": dialect.ticks_of("end_time"),
            "{left}": dialect.seconds_until("end_time"),
        }
        text = sql
        for name, fragment in fragments.items():
            text = text.replace(name, fragment)
        if len(text) <= TEXT_AT_MOST:
            if len(self._texts) >= TEXTS_AT_MOST:
                self._texts.clear()
            self._texts[sql] = text
        return text

    def hearing(self, owners: str) -> str:
        """Return the statement that sends a heartbeat for queued claims.

        It skips claims that another transaction is granting at the moment.
        """
        return self._text(
            self.dialect.update(
                "{claims}", "end_time = {heard}", f"{owners} AND {IN_QUEUE}", "id"
            )
        )

    def _fitted(self, text: str) -> str:
        """Return a text with the characters escaped that the database cannot store."""
        return text if text.isascii() else self.dialect.fitted(text, self._session())

    def _refuse_unstorable(self, key: str) -> None:
        if (fitted := self._fitted(key)) != key:
            raise UnstorableKeyError(
                f"The key {key!r} cannot be stored on database {self.database!r}. Its"
                " encoding, or the charset of the connection, lacks some characters"
                f" ({fitted}). Use user_key(), which makes keys of ASCII characters."
            )

    def _of_prefix(self) -> tuple[str, dict[str, Any]]:
        """Return SQL that limits a condition to keys under the backend's prefix.

        It is returned with its parameters.
        """
        if not self.prefix:
            return "", {}
        of_prefix = " AND SUBSTR(key_resource, 1, %(length)s) = %(prefix)s"
        return of_prefix, {"prefix": self.prefix, "length": len(self.prefix)}

    def _one_of(self, column: str, values: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        names = {f"{column}_{number}": value for number, value in enumerate(values)}
        return f"{column} IN ({', '.join(f'%({name})s' for name in names)})", names
