"""The history table: holds that have ended, written and deleted in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dlocks.backends.database.state import models
from dlocks.backends.database.store import Store
from dlocks.exceptions import LockBackendError
from dlocks.sql.clock import After

# Maximum number of records that one statement deletes.
BATCH = 1000


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


class HistoryTable:
    """The part that records ended holds."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.session = store.session

    @property
    def records(self) -> Any:
        return models().HoldRecord.objects.using(self.session.database)

    def remember(self, finished: Sequence[EndedHold], now: float) -> None:
        """Write ended holds to the history table.

        ``now`` is the current time by the clock of ``finished``. A hold that is already
        recorded is left unchanged.
        """
        records = [
            self.records.model(
                key_resource=one.key,
                token=one.token,
                holder=self.store.fitted(one.holder)[:255],
                owner_ip=one.owner_ip,
                scope=one.scope[0].upper(),
                shared=one.shared,
                waited=one.waited,
                begin_time=After(one.ended_at - one.held - now),
                end_time=After(one.ended_at - now),
                ending=one.ending,
            )
            for one in finished
        ]

        def insert() -> None:
            self.records.bulk_create(records, ignore_conflicts=True)

        self.session.unlocked(self.session.transaction, insert)

    def delete_older_than(
        self, older_than: float, *, dry_run: bool = False
    ) -> Iterator[int]:
        """Delete the records of holds that ended at least ``older_than`` seconds ago.

        Delete in batches, and yield the number of records in each batch. With
        ``dry_run``, only count them.
        """
        mine = models().under(self.store.prefix())
        old = self.records.filter(mine, end_time__lte=After(-older_than))
        if dry_run:
            yield self.session.unlocked(old.count)
            return
        oldest = old.order_by("end_time").values_list("pk", flat=True)

        def delete(ids: Sequence[int]) -> int:
            return int(self.records.filter(pk__in=ids).delete()[0])

        found: list[int]
        before: list[int] = []
        while found := self.session.unlocked(list, oldest[:BATCH]):
            if found == before:
                raise LockBackendError(
                    f"Old records of ended holds on database {self.session.database!r}"
                    " exist, but this session does not delete them. Check whether row"
                    " security or a trigger keeps them."
                )
            step = partial(delete, found)
            yield self.session.unlocked(self.session.transaction, step)
            before = found
