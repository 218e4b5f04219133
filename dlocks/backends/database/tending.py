"""Seeing to what was left behind: locks and shares whose holders never came back, and dead claims in line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from dlocks.backends.database.dialects import KEY
from dlocks.backends.database.line import ENDED_SHARE, FORGOTTEN_AFTER, Head, Line
from dlocks.backends.database.statements import CLEAR, IN_LINE, MICROSECONDS

# Rows that one statement of reaping, purging or renewing touches at most.
BATCH = 1000

STALE = "status = 'P' AND end_time <= {now}"
# Only once the clock has passed the version: the next row's begins at the clock and must be larger.
UNUSED = (
    "status <> 'P' AND end_time <= {idle} AND version < {ticks} AND waiters = 0 AND shares = 0"
    " AND NOT EXISTS (SELECT 1 FROM {claims} WHERE {claims}.key_resource = {locks}.key_resource)"
)
DEAD_CLAIM = f"{IN_LINE} AND end_time <= {{forgotten}}"


class Tending(Line):
    """What people and the commands do to locks, shares and claims that are not theirs. The line then moves on."""

    supports_clearing: ClassVar[bool] = True

    def clear(self, key: str, version: int, *, stale_only: bool = False) -> bool:
        """
        Take a key from its holder, and fence the holder off, if the version is still the one that was seen.

        The key is free then, or has gone to the first in line. Those who share it keep it. Return False when the
        version is another, when the key is locked by a transaction, or with ``stale_only`` not stale.
        """

        def step(head: Head | None) -> bool:
            if head is None:
                return False
            where = f"{KEY} AND version = %(version)s" + (f" AND {STALE}" if stale_only else "")
            sql = self._text(f"UPDATE {{locks}} SET {CLEAR}, version = %(token)s WHERE {where}")
            if self._count(sql, {"key": key, "version": version, "token": head.token}) != 1:
                return False
            head.status, head.owner, head.free, head.version = "F", "", True, head.token
            head.token += 1
            self._admit(head)
            return True

        if stale_only and self.observations is not None:
            # No clock says so, and nobody has watched it.
            return False
        # First a look, since a step would make a row that is not there.
        now = self._rows(self._text(f"SELECT version FROM {{locks}} WHERE {KEY}"), {"key": key})
        if not now or now[0][0] != version:
            return False
        return self._step(key, step, busy=lambda: False)

    def end_share(self, key: str, token: int, *, stale_only: bool = False) -> bool:
        """
        Take a share from its holder, who is told at the next renewal; the line moves on.

        Return False when there is no share with that token, when a transaction has locked the key or guards itself by
        the share, or with ``stale_only`` when the share's lease has not run out.
        """
        if stale_only and self.observations is not None:
            return False
        where = "version = %(token)s" + (" AND end_time <= {now}" if stale_only else "")
        return self._take_away(key, where, {"token": token})

    def take_out(self, key: str, number: int) -> bool:
        """
        Take a claim out of line of which nothing is heard any more; the line moves on.

        Return False when there is none with that number, when it was heard of, or when the key is locked by a
        transaction. Whoever waits with it after all comes back to the same place.
        """
        return self._take_away(key, f"id = %(number)s AND {IN_LINE} AND end_time <= {{now}}", {"number": number})

    def _take_away(self, key: str, where: str, parameters: dict[str, int]) -> bool:
        """Delete the one claim of a condition."""

        def step(head: Head | None) -> bool:
            # By its id: by the condition others would be waited for on the way to it.
            mine = f"SELECT id FROM {{claims}} WHERE id = %(id)s AND {where}{self.dialect.for_update_patiently}"
            if head is None or not self._rows(self._text(mine), found):
                return False
            self._count(self._text("DELETE FROM {claims} WHERE id = %(id)s"), found)
            self._count_rows(head)
            self._admit(head)
            return True

        # First a look, since a step would make a lock row that is not there.
        sql = self._text(f"SELECT id FROM {{claims}} WHERE {KEY} AND {where}")
        for (number,) in self._rows(sql, {"key": key, **parameters}):
            found = {"id": number, **parameters}
            return self._step(key, step, busy=lambda: False)
        return False

    def purge_one(self, key: str, version: int, idle_for: float) -> bool:
        """
        Delete the row of one key as ``purge()`` would, if the version is still the one that was seen.

        Return False when it is another, when the row is in use, or locked by a transaction.
        """
        sql = self._sql(self.dialect.delete, f"{KEY} AND version = %(version)s AND {UNUSED}")
        parameters = {"key": key, "version": version, "idle": -round(idle_for * MICROSECONDS)}
        return self._count(sql, parameters) == 1

    def tidy(self, key: str) -> tuple[int, int]:
        """
        Forget the shares of a key that ended, and its claims of which nothing was heard for long; the line moves on.

        Return how many of each; none where the key is locked by a transaction.
        """

        def step(head: Head | None) -> tuple[int, int]:
            if head is None:
                return 0, 0
            parameters = {"key": key, **self._ages()}
            shares = self._delete_claims(f"{KEY} AND {ENDED_SHARE}", parameters)
            claims = self._delete_claims(f"{KEY} AND {self._old(DEAD_CLAIM)}", parameters)
            self._count_rows(head)
            self._admit(head)
            return shares, claims

        return self._step(key, step, busy=lambda: (0, 0))

    def _count_rows(self, head: Head) -> None:
        """Write into the lock row how many wait and how many share the key, as the rows of the claims say."""
        sql = self._text(f"SELECT COUNT(*), COUNT(version) FROM {{claims}} WHERE {KEY}")
        ((rows, shares),) = self._rows(sql, {"key": head.key})
        if (rows - shares, shares) != (head.waiters, head.shares):
            self._count_in(head)
            self._change(head, shares=shares)

    def _old(self, condition: str) -> str:
        return condition.replace("{forgotten}", self.dialect.after("forgotten"))

    def _ages(self) -> dict[str, int]:
        return {
            "grace": self._grace,
            "forgotten": -round(max(FORGOTTEN_AFTER, self.grace) * MICROSECONDS),
        }

    # Everything, by batches.

    def reap(self, *, dry_run: bool = False) -> Iterator[int]:
        """
        Make stale locks free, as failed, end stale shares, and forget dead claims in line, batch by batch.

        Yield for each batch how many locks and shares were freed.
        """
        where = f"{STALE} AND end_time <= {{grace}}"
        for keys, parameters in self._batches("P"):
            parameters["grace"] = self._grace
            assignments = CLEAR + ", version = {token}"
            yield self._sweep(self.dialect.update, assignments, f"{keys} AND {where}", parameters, dry_run)
        if dry_run:
            yield self._count_ended_shares()
            return
        for untidy in self._untidy():
            yield sum(self.tidy(key)[0] for key in untidy)

    def purge(self, idle_for: float, *, dry_run: bool = False) -> Iterator[int]:
        """
        Delete rows that have been free for so many seconds, batch by batch; yield the number of each batch.

        A key that is shared, or that somebody waits for, keeps its row.
        """
        for keys, parameters in self._batches("S", "F"):
            parameters["idle"] = -round(idle_for * MICROSECONDS)
            yield self._sweep(self.dialect.delete, "", f"{keys} AND {UNUSED}", parameters, dry_run)

    def _batches(self, *statuses: str) -> Iterator[tuple[str, dict[str, Any]]]:
        # By ranges of the primary key: there is no index on what changes, and no lock is taken to look.
        from dlocks.models import ResourceLock

        rows = ResourceLock.objects.using(self.database).order_by("pk").values_list("pk", "status")
        for page in self._under_prefix(rows):
            if keys := [key for key, status in page if status in statuses]:
                yield self._one_of("key_resource", keys)

    def _untidy(self) -> Iterator[list[str]]:
        """Yield the keys whose rows say that somebody waits or shares, and those of claims that ended."""
        from dlocks.models import LockClaim, ResourceLock

        locks = ResourceLock.objects.using(self.database).order_by("pk").values_list("pk", "waiters", "shares")
        for page in self._under_prefix(locks):
            yield [key for key, waiters, shares in page if waiters or shares]
        # What is left is not counted in, or has no lock row.
        claims = LockClaim.objects.using(self.database).by_clock().order_by("pk")
        for page in self._pages(claims.values_list("pk", "key_resource", "seconds_left"), 0):
            yield sorted({key for _, key, left in page if left <= -self.grace and key.startswith(self.prefix)})

    def _under_prefix(self, rows: Any) -> Iterator[list[Any]]:
        """Yield rows by their keys, which come first, page by page: those under the backend's prefix."""
        # Keys are ordered byte for byte, so these follow each other.
        for page in self._pages(rows.filter(pk__gte=self.prefix), ""):
            mine = [row for row in page if row[0].startswith(self.prefix)]
            yield mine
            if len(mine) < len(page):
                return

    def _pages(self, rows: Any, last: Any) -> Iterator[list[Any]]:
        while page := self._run(lambda *_, last=last: list(rows.filter(pk__gt=last)[:BATCH])):
            yield page
            last = page[-1][0]

    def _count_ended_shares(self) -> int:
        mine, parameters = self._of_prefix()
        sql = self._text(f"SELECT COUNT(*) FROM {{claims}} WHERE {ENDED_SHARE}{mine}")
        return int(self._rows(sql, self._ages() | parameters)[0][0])

    def _sweep(
        self, statement: Callable[..., str], assignments: str, where: str, parameters: dict[str, Any], dry_run: bool
    ) -> int:
        if dry_run:
            sql = self._sql(lambda table, where: f"SELECT COUNT(*) FROM {table} WHERE {where}", where)
            return int(self._rows(sql, parameters)[0][0])
        pieces = (assignments, where) if assignments else (where,)
        return self._count(self._sql(statement, *pieces), parameters)
