"""What people and commands do with the locks of other processes, and what they see."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from django.db.models import Exists, OuterRef, Q

from dlocks.backends import table as rules
from dlocks.backends.database.keepers import PAGE, Keepers
from dlocks.backends.database.session import RowLockedError
from dlocks.backends.database.state import Key
from dlocks.backends.database.store import Store
from dlocks.backends.table import KeyState, Moment
from dlocks.exceptions import LockBackendError
from dlocks.sql.clock import After, Ticks, ticks
from dlocks.values import Holder


class Maintenance:
    """Operations on the locks, shared holds and claims of other processes.

    The queue advances after each of them.
    """

    def __init__(self, store: Store, keepers: Keepers) -> None:
        self.store = store
        self.keepers = keepers
        self.session = store.session

    # Ending holds and claims.

    def clear(self, key: str, version: int, *, stale_only: bool = False) -> bool:
        """Take a key from its holder, which is fenced off.

        The key is then free, or held by the first waiter. Shared holds of the key stay.
        Return False if ``version`` is no longer current, if the key is free, or if it
        is locked by a transaction. With ``stale_only``, also return False if the key is
        not stale, or if its grace has not passed.
        """

        def rule(state: KeyState, at: Moment) -> tuple[KeyState, bool]:
            if stale_only and not (state.is_held and state.expires_in(at) <= 0):
                return state, False
            return rules.clear(state, version, at)

        return self._end(
            key, rule, lambda now: now.state.version == version, stale_only
        )

    def end_share(self, key: str, token: int, *, stale_only: bool = False) -> bool:
        """End a shared hold; its holder learns of it at its next renewal.

        Return False if no shared hold has that token, or if a transaction has locked
        the key or guards itself by the hold. With ``stale_only``, also return False if
        its lease has not expired, or its grace has not passed.
        """

        def rule(state: KeyState, at: Moment) -> tuple[KeyState, bool]:
            for share in state.shares:
                live = share.expires_in(at) > 0
                if share.token == token and not (stale_only and live):
                    return rules.release(state, share.claim, at)[0], True
            return state, False

        def exists(now: Key) -> bool:
            return any(one.version == token for one in now.claims)

        return self._end(key, rule, exists, stale_only)

    def take_out(self, key: str, number: int) -> bool:
        """Remove a claim without a heartbeat, and advance the queue.

        Return False if no claim has that number, if it sent a heartbeat, or if the key
        is locked by a transaction. If a process still waits with the claim, it rejoins
        the queue at the same position.
        """

        def rule(state: KeyState, at: Moment) -> tuple[KeyState, bool]:
            for one in state.queue:
                if one.position == number and one.end <= at.now:
                    return rules.release(state, one.claim, at)[0], True
            return state, False

        if self.store.peek(key) is None:
            # The last holder has deleted the lock row, which did not count the claim.
            self.store.create([key])
        return self._end(
            key, rule, lambda now: number in {one.pk for one in now.claims}
        )

    def _end(
        self,
        key: str,
        rule: Callable[[KeyState, Moment], tuple[KeyState, bool]],
        exists: Callable[[Key], bool],
        stale_only: bool = False,
    ) -> bool:
        """Apply a rule to what exists, and return whether it was ended."""
        if stale_only and self.store.observed:
            # No trusted clock shows that it is stale, and this process has not observed
            # it.
            return False
        # Read first, because a step would create a missing lock row.
        before = self.store.read([key]).get(key)
        if before is None or not exists(before):
            return False
        session = self.session.raw
        with suppress(RowLockedError):
            if self.store.step(key, rule)[0]:
                return True
        if self.session.raw is session:
            return False
        # A lost reply ends the session, and the step is sent again.
        after = self.store.read([key]).get(key)
        return after is None or not exists(after)

    def tidy(self, key: str) -> int:
        """Delete the ended shared holds and the dead claims of a key.

        The queue advances. Return the number of shared holds that were never released,
        which is zero if the key is locked by a transaction.
        """
        with suppress(RowLockedError):
            return self.store.step(key, rules.tidy)[0]
        return 0

    # Operations on all keys, in batches.

    def reap(self, *, dry_run: bool = False) -> Iterator[int]:
        """Free stale locks as failed, end stale shared holds, delete dead claims.

        Work in batches. Yield the number of locks and shared holds that were freed,
        after each step, so that an error hides none of the earlier ones.
        """
        expired = {"end_time__lte": After(-self.store.reader.grace)}
        stale = self.store.locks.filter(status="P", **expired)
        if not self.store.observed:
            for page in self._under_prefix(stale.values_list("pk", "version")):
                if dry_run:
                    yield self._count_unlocked([key for key, _ in page])
                else:
                    yield from (self.clear(*one, stale_only=True) for one in page)
        claims = self.store.claims.values_list("pk", "key_resource")
        shares = claims.filter(version__isnull=False, hold_count__gt=0, **expired)
        if dry_run:
            # Where no clock is trusted, none of them is known to be stale.
            for page in () if self.store.observed else self._pages(shares):
                mine = [pk for pk, key in page if key.startswith(self.store.prefix())]
                yield self._count_unlocked(mine, shares=True)
            return
        counted = self.store.locks.filter(Q(waiters__gt=0) | Q(shares__gt=0))
        for page in self._under_prefix(counted.values_list("pk")):
            yield from (self.tidy(key) for (key,) in page)
        # The remaining claims are not counted, or have no lock row.
        for page in self._pages(claims.filter(**expired)):
            keys = {key for _, key in page if key.startswith(self.store.prefix())}
            yield from map(self.tidy, sorted(keys))

    def purge(self, idle_for: float, *, dry_run: bool = False) -> Iterator[int]:
        """Delete the rows of keys that have been free for ``idle_for`` seconds.

        Work in batches, and yield the number of rows of each. A key with shared holds
        or waiters keeps its row.
        """
        claims = self.store.claims.filter(key_resource=OuterRef("pk"))
        unused = self.store.locks.filter(
            ~Exists(claims), end_time__lte=After(-idle_for), waiters=0, shares=0
        )
        # A row is only deleted once the clock has passed its version. The version of a
        # new row starts at the clock, and must be larger. It also tells when a share
        # was granted last, which does not change the time in the row.
        unused = unused.filter(version__lt=Ticks() - ticks(idle_for))
        unused = unused.exclude(status="P")
        for page in self._under_prefix(unused.values_list("pk")):
            keys = [key for (key,) in page]
            yield self._count_unlocked(keys) if dry_run else self._purge(unused, keys)

    def _purge(self, unused: Any, keys: Sequence[str]) -> int:
        def work() -> int:
            rows = unused.filter(pk__in=keys).order_by("pk")
            rows = rows.annotate(**self.store.limits())
            rows = rows.select_for_update(skip_locked=True)
            found = [row.pk for row in rows]
            if not found:
                return 0
            return self.store.delete("{locks}", "key_resource", found)

        with suppress(RowLockedError):
            return self.session.run(partial(self.session.transaction, work))
        return 0

    def _under_prefix(self, rows: Any) -> Iterator[list[Any]]:
        """Yield rows under the backend's prefix, page by page.

        The key is the first column of each row.
        """
        # Keys are ordered by their bytes, so the keys with the prefix are contiguous.
        prefix = self.store.prefix()
        for page in self._pages(rows.filter(pk__gte=prefix)):
            mine = [row for row in page if row[0].startswith(prefix)]
            if mine:
                yield mine
            if len(mine) < len(page):
                return

    def _pages(self, rows: Any) -> Iterator[list[Any]]:
        rows, last = rows.order_by("pk"), None
        while True:
            more = rows if last is None else rows.filter(pk__gt=last)
            page: list[Any] = self.session.unlocked(list, more[:PAGE])
            if not page:
                return
            yield page
            last = page[-1][0]

    def _count_unlocked(self, rows: Sequence[Any], *, shares: bool = False) -> int:
        """Count the rows, given by primary key, that no transaction has locked."""
        with suppress(LockBackendError):
            return len(rows) - len(self.keepers.in_transactions(rows, shares=shares))
        return len(rows)

    # What people see.

    def holder(self, key: str) -> Holder | None:
        """Return the holder of a key, which may be stale, or a transaction's session.

        Return None if the key is free, or if an open transaction keeps it unseen.
        """
        found = self.store.read([key], by_clock=True).get(key)
        if found is None:
            return None
        if (holder := rules.holder(found.state, key, found.at)) is None:
            return self.keepers.of(found)
        return self._kept_holder(found, holder)

    def sharers(self, key: str) -> Sequence[Holder]:
        """Return the holders that share a key. Live ones come first."""
        found = self.store.read([key], by_clock=True).get(key)
        if found is None:
            return ()
        holders = [
            self._kept_holder(found, rules.holder_of(one, key, found.at))
            for one in rules.sharers(found.state, found.at)
        ]
        return sorted(holders, key=lambda one: one.stale)

    def _kept_holder(self, key: Key, holder: Holder) -> Holder:
        """Return a holder as one in a transaction, if one keeps its expired lease."""
        if not holder.stale:
            return holder
        # A writer that also reads has the token of its read lock.
        mine = holder.token, holder.since
        ids = [one.pk for one in key.claims if (one.version, one.begin_time) == mine]
        with suppress(LockBackendError):
            if self.keepers.in_transactions(ids or [key.row.pk], shares=bool(ids)):
                return replace(
                    holder, remaining=math.inf, stale=False, in_transaction=True
                )
        return holder
