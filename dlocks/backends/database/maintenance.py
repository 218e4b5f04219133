"""Maintenance of stale locks, stale shared holds and dead claims in the queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from dlocks.backends import table
from dlocks.backends.database.claims import DELETE_AFTER
from dlocks.backends.database.fragments import (
    BATCH,
    CLEAR,
    ENDED_SHARE,
    IN_QUEUE,
    MICROSECONDS,
    STALE,
)
from dlocks.backends.database.queue import KeyQueue
from dlocks.backends.database.rows import LockedRow
from dlocks.exceptions import LockBackendError
from dlocks.sql.dialect import KEY
from dlocks.values import Claim

# A row is only deleted once the clock has passed its version. The version of a new row
# starts at the clock, and must be larger.
UNUSED = (
    "status <> 'P' AND end_time <= {idle} AND version < {ticks} AND waiters = 0 AND"
    " shares = 0 AND NOT EXISTS (SELECT 1 FROM {claims} WHERE {claims}.key_resource ="
    " {locks}.key_resource)"
)


class Maintenance(KeyQueue):
    """Operations on the locks, shared holds and claims of other processes.

    They are for people and for commands. The queue advances after each of them.
    """

    def clear(self, key: str, version: int, *, stale_only: bool = False) -> bool:
        """Take a key from its holder, which is fenced off.

        The key is then free, or held by the first waiter. Shared holds of the key stay.
        Return False if ``version`` is no longer current, or if the key is locked by a
        transaction. With ``stale_only``, also return False if the key is not stale.
        """

        def step(_: Any, row: LockedRow | None) -> bool:
            if row is None or (stale_only and not row.is_stale):
                return False
            return bool(self._apply(row, table.clear, version)[0])

        if stale_only and self.observations is not None:
            # No trusted clock shows that the key is stale, and this process has not
            # observed it.
            return False
        sql = f"SELECT 1 FROM {{locks}} WHERE {KEY} AND version = %(version)s"
        return self._end(step, sql, {"key": key, "version": version})

    def _end(self, step: Any, sql: str, parameters: dict[str, Any]) -> bool:
        """Run a step on the row that is found, and return whether it was ended."""
        sql = self._text(sql)
        # Read first, because a step would create a missing lock row.
        for found in self._rows(sql, parameters):
            session = self._session()
            if self._step(parameters["key"], partial(step, found), busy=lambda: False):
                return True
            # A lost reply ends the session, and the step is sent again.
            return self._session() is not session and not self._rows(sql, parameters)
        return False

    def end_share(self, key: str, token: int, *, stale_only: bool = False) -> bool:
        """End a shared hold; its holder learns of it at its next renewal.

        The queue advances. Return False if no shared hold has that token, or if a
        transaction has locked the key or guards itself by the hold. With
        ``stale_only``, also return False if its lease has not expired.
        """
        if stale_only and self.observations is not None:
            return False
        where = "version = %(token)s" + (" AND end_time <= {now}" if stale_only else "")
        return self._delete_claim(where, {"key": key, "token": token})

    def take_out(self, key: str, number: int) -> bool:
        """Remove a claim without a heartbeat, and advance the queue.

        Return False if no claim has that number, if it sent a heartbeat, or if the key
        is locked by a transaction. If a process still waits with the claim, it rejoins
        the queue at the same position.
        """
        return self._delete_claim(
            f"id = %(number)s AND {IN_QUEUE} AND end_time <= {{now}}",
            {"key": key, "number": number},
        )

    def _delete_claim(self, where: str, parameters: dict[str, Any]) -> bool:
        """Delete the one claim that matches a condition, and advance the queue."""

        def step(found: Sequence[Any], row: LockedRow | None) -> bool:
            # Select the claim by its id. With the condition alone, locked rows of other
            # claims would be waited for as well.
            mine = (
                "SELECT id FROM {claims} WHERE id = %(id)s AND"
                f" {where}{self.dialect.for_update_patiently}"
            )
            number, owner = found
            if row is None or not self._rows(
                self._text(mine), parameters | {"id": number}
            ):
                return False
            claim = Claim(key=row.key, ttl=0.0, owner=owner)
            self._apply(row, table.release, claim, recount=True)
            return True

        sql = f"SELECT id, owner FROM {{claims}} WHERE {KEY} AND {where}"
        return self._end(step, sql, parameters)

    def tidy(self, key: str) -> tuple[int, int]:
        """Delete the ended shared holds and the dead claims of a key.

        The queue advances. Return the number of shared holds and of claims that were
        deleted. Both are zero if the key is locked by a transaction.
        """

        def step(row: LockedRow | None) -> tuple[int, int]:
            if row is None:
                return 0, 0
            end = self.dialect.after("forgotten")
            dead = self._delete_claims(
                f"{KEY} AND {IN_QUEUE} AND end_time <= {end}",
                {"key": key, **self._ages()},
            )
            return self._apply(row, table.tidy, recount=True)[0], dead

        return self._step(key, step, busy=lambda: (0, 0))

    def _ages(self) -> dict[str, int]:
        return {
            "grace": self._grace,
            "forgotten": -round(max(DELETE_AFTER, self.grace) * MICROSECONDS),
        }

    # Operations on all keys, in batches.

    def reap(self, *, dry_run: bool = False) -> Iterator[int]:
        """Free stale locks as failed, end stale shared holds, delete dead claims.

        Work in batches. For each batch, yield the number of locks and shared holds that
        were freed.
        """
        for keys, parameters in self._batches("P"):
            parameters["grace"] = self._grace
            where = f"{keys} AND {STALE} AND end_time <= {{grace}}"
            sql = self._sql(self.dialect.update, CLEAR + ", version = {token}", where)
            yield self._sweep(sql, where, parameters, dry_run)
        if dry_run:
            yield self._count_ended_shares()
            return
        for untidy in self._untidy():
            yield sum(self.tidy(key)[0] for key in untidy)

    def purge(self, idle_for: float, *, dry_run: bool = False) -> Iterator[int]:
        """Delete the rows of keys that have been free for ``idle_for`` seconds.

        Work in batches, and yield the number of rows of each. A key with shared holds
        or waiters keeps its row.
        """
        for keys, parameters in self._batches("S", "F"):
            parameters["idle"] = -round(idle_for * MICROSECONDS)
            where = f"{keys} AND {UNUSED}"
            sql = self._sql(self.dialect.delete, where)
            yield self._sweep(sql, where, parameters, dry_run)

    def _batches(self, *statuses: str) -> Iterator[tuple[str, dict[str, Any]]]:
        # Read ranges of the primary key. The columns that change have no index, and
        # reading takes no row locks.
        from dlocks.models import ResourceLock

        rows = (
            ResourceLock.objects.using(self.database)
            .order_by("pk")
            .values_list("pk", "status")
        )
        for page in self._under_prefix(rows):
            if keys := [key for key, status in page if status in statuses]:
                yield self._one_of("key_resource", keys)

    def _untidy(self) -> Iterator[list[str]]:
        """Yield keys with waiters or shared holds, and keys of expired claims.

        The first ones are found by the counts in the lock rows.
        """
        from dlocks.models import LockClaim, ResourceLock

        locks = (
            ResourceLock.objects.using(self.database)
            .order_by("pk")
            .values_list("pk", "waiters", "shares")
        )
        for page in self._under_prefix(locks):
            yield [key for key, waiters, shares in page if waiters or shares]
        # The remaining claims are not counted, or have no lock row.
        claims = LockClaim.objects.using(self.database).by_clock().order_by("pk")
        for page in self._pages(
            claims.values_list("pk", "key_resource", "seconds_left"), 0
        ):
            yield sorted(
                {
                    key
                    for _, key, left in page
                    if left <= -self.grace and key.startswith(self.prefix)
                }
            )

    def _under_prefix(self, rows: Any) -> Iterator[list[Any]]:
        """Yield rows under the backend's prefix, page by page.

        The key is the first column of each row.
        """
        # Keys are ordered by their bytes, so the keys with the prefix are contiguous.
        for page in self._pages(rows.filter(pk__gte=self.prefix), ""):
            mine = [row for row in page if row[0].startswith(self.prefix)]
            yield mine
            if len(mine) < len(page):
                return

    def _pages(self, rows: Any, last: Any) -> Iterator[list[Any]]:
        while page := self._run(
            lambda *_, last=last: list(rows.filter(pk__gt=last)[:BATCH])
        ):
            yield page
            last = page[-1][0]

    def _count_ended_shares(self) -> int:
        mine, parameters = self._of_prefix()
        sql = self._text(f"SELECT id FROM {{claims}} WHERE {ENDED_SHARE}{mine}")
        return self._count_unlocked(
            self._rows(sql, self._ages() | parameters), "{claims}", "id"
        )

    def _count_unlocked(self, rows: Sequence[Any], table: str, primary: str) -> int:
        """Count the rows, given by primary key, that no transaction has locked."""
        found, locked = [row for (row,) in rows], 0
        with suppress(LockBackendError):
            for start in range(0, len(found), BATCH):
                locked += len(
                    self.in_transactions(found[start : start + BATCH], table, primary)
                )
        return len(found) - locked

    def _sweep(
        self, sql: str, where: str, parameters: dict[str, Any], dry_run: bool
    ) -> int:
        if dry_run:
            sql = self._text(f"SELECT key_resource FROM {{locks}} WHERE {where}")
            return self._count_unlocked(
                self._rows(sql, parameters), "{locks}", "key_resource"
            )
        return self._count(sql, parameters)
