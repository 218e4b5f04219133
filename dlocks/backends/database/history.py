"""The history table: holds that have ended, written and deleted in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dlocks.backends.database.fragments import MICROSECONDS
from dlocks.backends.database.statements import Statements

# Maximum number of rows that one statement deletes.
BATCH = 1000

# Maximum number of parameters of a statement, if the engine has no smaller limit.
MOST_PARAMETERS = 10_000

COLUMNS = (
    "key_resource",
    "token",
    "holder",
    "owner_ip",
    "scope",
    "shared",
    "waited",
    "begin_time",
    "end_time",
    "ending",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedHold:
    """A hold that has ended, with times by this process's clock."""

    key: str
    token: int
    holder: str
    owner_ip: str | None
    scope: str
    shared: bool
    waited: float
    held: float
    ended_at: float
    ending: str
    # The name of its database. After the tests, the alias refers to another database.
    database: Any


class HistoryTable(Statements):
    # Whether ended holds are recorded.
    history: bool

    def remember(self, finished: Sequence[EndedHold], now: float) -> None:
        """Write ended holds to the history table.

        ``now`` is the current time by the clock of ``finished``. A hold that is already
        recorded is left unchanged.
        """
        at_most = self.connection.features.max_query_params or MOST_PARAMETERS
        size = at_most // len(COLUMNS)
        for start in range(0, len(finished), size):
            self._insert_records(finished[start : start + size], now)

    def _insert_records(self, finished: Sequence[EndedHold], now: float) -> None:
        rows = []
        parameters: dict[str, Any] = {}
        for number, hold in enumerate(finished):
            record = {
                "key_resource": hold.key,
                "token": hold.token,
                "holder": self._fitted(hold.holder)[:255],
                "owner_ip": hold.owner_ip,
                "scope": hold.scope[0].upper(),
                "shared": hold.shared,
                "waited": hold.waited,
                "begin_time": round((hold.ended_at - hold.held - now) * MICROSECONDS),
                "end_time": round((hold.ended_at - now) * MICROSECONDS),
                "ending": hold.ending,
            }
            parameters |= {f"{name}_{number}": value for name, value in record.items()}
            rows.append(
                ", ".join(self._value(name, f"{name}_{number}") for name in COLUMNS)
            )
        values = ", ".join(f"({row})" for row in rows)
        insert, on_conflict = "INSERT", "ON CONFLICT DO NOTHING"
        if self.connection.vendor == "mysql":
            insert, on_conflict = "INSERT IGNORE", ""
        sql = self._text(
            f"{insert} INTO {{records}} ({', '.join(COLUMNS)}) VALUES {values}"
            f" {on_conflict}"
        )
        with self._with_short_timeout():
            self._run(self._by_cursor, sql, parameters)

    def _value(self, column: str, parameter: str) -> str:
        if column in {"begin_time", "end_time"}:
            return self.dialect.after(parameter)
        return (
            self.dialect.typed(f"%({parameter})s", "inet")
            if column == "owner_ip"
            else f"%({parameter})s"
        )

    def delete_older_than(
        self, older_than: float, *, dry_run: bool = False
    ) -> Iterator[int]:
        """Delete the records of holds that ended at least ``older_than`` seconds ago.

        Delete in batches, and yield the number of records in each batch. With
        ``dry_run``, only count them.
        """
        mine, parameters = self._of_prefix()
        where = f"end_time <= (SELECT {self.dialect.after('old')}){mine}"
        parameters["old"] = -round(older_than * MICROSECONDS)
        if dry_run:
            yield int(
                self._rows(
                    self._text(f"SELECT COUNT(*) FROM {{records}} WHERE {where}"),
                    parameters,
                )[0][0]
            )
            return
        oldest = self._text(
            f"SELECT id FROM {{records}} WHERE {where} ORDER BY end_time LIMIT {BATCH}"
        )
        while found := [number for (number,) in self._rows(oldest, parameters)]:
            some, numbers = self._one_of("id", found)
            yield self._count(
                self._text(f"DELETE FROM {{records}} WHERE {some}"), numbers
            )
