"""The table of holds that have ended: written by batches, and forgotten by age."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dlocks.backends.database.statements import MICROSECONDS, Statements

# Rows that one statement deletes at most.
BATCH = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
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
    # The name of its database: an alias means another one when the tests are over.
    database: Any


class Records(Statements):
    # Whether holds that end are recorded.
    history: bool

    def remember(self, finished: Sequence[Finished], now: float) -> None:
        """Write holds, by what their clock says now. One that is written already is left alone."""
        from dlocks.models import After, HoldRecord

        records = [
            HoldRecord(
                key_resource=hold.key,
                token=hold.token,
                holder=hold.holder,
                owner_ip=hold.owner_ip,
                scope=hold.scope[0].upper(),
                shared=hold.shared,
                waited=hold.waited,
                begin_time=After(hold.ended_at - hold.held - now),
                end_time=After(hold.ended_at - now),
                ending=hold.ending,
            )
            for hold in finished
        ]
        rows = HoldRecord.objects.using(self.database)
        with self._briefly():
            self._run(lambda *_: rows.bulk_create(records, ignore_conflicts=True))

    def forget(self, older_than: float, *, dry_run: bool = False) -> Iterator[int]:
        """Delete the records of holds that ended so many seconds ago, batch by batch; yield the number of each."""
        mine, parameters = self._of_prefix()
        where = f"end_time <= (SELECT {self.dialect.after('old')}){mine}"
        parameters["old"] = -round(older_than * MICROSECONDS)
        if dry_run:
            yield int(self._rows(self._text(f"SELECT COUNT(*) FROM {{records}} WHERE {where}"), parameters)[0][0])
            return
        oldest = self._text(f"SELECT id FROM {{records}} WHERE {where} ORDER BY end_time LIMIT {BATCH}")
        while found := [number for (number,) in self._rows(oldest, parameters)]:
            some, numbers = self._one_of("id", found)
            yield self._count(self._text(f"DELETE FROM {{records}} WHERE {some}"), numbers)
