"""The state of a key, read from the database and saved after a change.

A step applies a function of ``dlocks.backends.table`` to it. The rules are there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dlocks.backends.database.claims import ClaimRows
from dlocks.backends.database.fragments import CLEAR, GRANT, IN_QUEUE, MICROSECONDS
from dlocks.backends.database.notify.notifications import Notifications
from dlocks.backends.database.rows import MINE, LockedRow
from dlocks.backends.table import Held, KeyState, Waiting
from dlocks.runtime import clock
from dlocks.sql.dialect import KEY
from dlocks.values import Claim, Ticket

# How much of the queue is read. The second number is for waiters that may be granted
# together. MariaDB handles longer lists of numbers like subqueries.
QUEUE_LIMITS = 8, 900
# Seconds left of a shared hold that certainly has not ended.
MOMENT = 0.001

COLUMNS = (
    "id, owner, version, {left}, {ends}, shared, permits, scope, takeover, counted,"
    " handover_ttl, channel, holder, owner_ip"
)
CLAIMS = (
    f"SELECT {COLUMNS} FROM {{claims}} WHERE owner = %(owner)s UNION ALL SELECT * FROM"
    f" (SELECT {COLUMNS} FROM {{claims}} WHERE {KEY} AND {IN_QUEUE} AND end_time >"
    " {now} ORDER BY id LIMIT %(limit)s) AS head"
)
SHARES = f" UNION ALL SELECT {COLUMNS} FROM {{claims}} WHERE {KEY} AND NOT {IN_QUEUE}"


class ClaimRow(NamedTuple):
    """A row of a claim, as a step reads it."""

    id: int
    owner: str
    version: int | None
    left: float
    ends: int
    shared: bool
    permits: int
    scope: str
    takeover: bool
    counted: bool
    handover_ttl: int
    channel: str
    holder: str
    owner_ip: str | None

    def claim(self, key: str) -> Claim:
        return Claim(
            key=key,
            ttl=self.handover_ttl / MICROSECONDS,
            scope="lease" if self.scope == "P" else "transaction",
            takeover=bool(self.takeover),
            shared=bool(self.shared),
            permits=self.permits,
            holder=self.holder,
            owner_ip=self.owner_ip,
            owner=self.owner,
        )


class Store(ClaimRows, Notifications):
    """The part that applies the rules to a key whose lock row a step has locked."""

    # Keys that had waiters when this process last used them. An operation on such a key
    # starts with the statement for a key with a queue. This is only a hint.
    _contended_keys: set[str]

    def _apply(
        self,
        row: LockedRow,
        function: Callable[..., tuple[KeyState, Any]],
        *arguments: Any,
        recount: bool = False,
        **saving: Any,
    ) -> tuple[Any, dict[str, Ticket]]:
        """Apply a function of ``dlocks.backends.table``, and save what it changes.

        Return its result, and the tickets of the claims that it granted, by owner.
        ``recount`` corrects the numbers of claims in the lock row.
        """
        owner = next((one.owner for one in arguments if isinstance(one, Claim)), "")
        left: set[int] = set()
        while True:
            before, claims, waiters = self._load(row, owner, left, recount=recount)
            after, result = function(before, *arguments, at=row.at)
            gone = self._save(row, before, after, claims, waiters, **saving)
            if not gone:
                break
            # These claims left the queue in between, without locking the lock row.
            left |= gone
        if not row.waiters:
            self._contended_keys.discard(row.key)
        return result, {
            held.claim.owner: MINE
            if held is after.held and held.claim.scope == "transaction"
            else Ticket(grant=held.grant(row.at))
            for held in (after.held, *after.shares)
            if held is not None and held.token > before.version
        }

    def _load(
        self, row: LockedRow, owner: str, left: set[int], *, recount: bool
    ) -> tuple[KeyState, dict[str, ClaimRow], int]:
        """Return the state of a key, its rows by owner, and the number of waiters.

        The state has all shared holds, but only the head of the queue, and the claim
        of ``owner``.
        """
        waiters = self._recount_waiters(row.key) if recount else row.waiters
        sql = self._text(CLAIMS + (SHARES if row.shares or recount else ""))
        asked_at = clock.now()
        for limit in QUEUE_LIMITS:
            parameters = {"key": row.key, "owner": owner, "limit": limit}
            rows = {one[0]: ClaimRow(*one) for one in self._rows(sql, parameters)}
            found = [rows[number] for number in sorted(rows.keys() - left)]
            live = [one for one in found if one.version is None and one.left > 0]
            if len(live) < limit or (
                live[0].permits <= limit if live[0].shared else live[0].takeover
            ):
                break
        if waiters and not live:
            waiters = self._recount_waiters(row.key)
        # If no clock is trusted, or with a single writer, an expired shared hold whose
        # row still exists belonged to its claim all the time.
        unclocked = self.observations is not None or self.dialect.one_writer
        shares = [one for one in found if one.version is not None]
        ended = {one.id for one in shares if self._has_ended(row.key, one, asked_at)}
        kept: frozenset[int] = frozenset()
        if ended:
            # A transaction keeps the shared hold that guards it.
            kept = self._find_transaction_locks(sorted(ended), "{claims}", "id")
        held = []
        for one in shares:
            mine = unclocked and one.owner == owner
            end = one.left
            if one.id in ended and one.id not in kept and not mine:
                end = -math.inf
            elif unclocked or one.id in kept:
                end = max(end, MOMENT)
            held.append(Held(one.claim(row.key), one.version or 0, row.at.date, end))
        state = replace(
            row.state,
            shares=tuple(held),
            queue=tuple(
                Waiting(one.claim(row.key), one.id, one.left)
                for one in found
                if one.version is None
            ),
        )
        return state, {one.owner: one for one in found}, waiters

    def _has_ended(self, key: str, share: ClaimRow, asked_at: float) -> bool:
        if self.observations is None:
            return share.left <= -self.grace
        seen = share.version, share.ends
        return self.observations.note((key, share.id), seen, asked_at) <= 0

    def _save(
        self,
        row: LockedRow,
        before: KeyState,
        after: KeyState,
        claims: dict[str, ClaimRow],
        waiters: int,
        *,
        status: str = "S",
        channel: str = "",
        number: int | None = None,
    ) -> set[int]:
        """Write the difference between two states, and notify the granted claims.

        Return the ids of rows that do not exist any more. Then nothing was written.
        ``status`` is that of a released key. ``channel`` and ``number`` are those of a
        claim that joins the queue.
        """
        old = {held.claim.owner: held for held in before.shares}
        shares = {held.claim.owner: held for held in after.shares}
        queued = {waiting.claim.owner: waiting for waiting in after.queue}
        changed = {
            owner: held for owner, held in shares.items() if held is not old.get(owner)
        }
        gone = [
            one
            for owner, one in claims.items()
            if owner not in shares and owner not in queued
        ]
        written = [one for owner, one in claims.items() if owner in changed]
        if missing := self._lock_claims([one.id for one in (*gone, *written)]):
            return missing
        if gone:
            self._delete_claims(*self._one_of("id", [one.id for one in gone]))
        self._write_shares(before, [(one, changed[one.owner]) for one in written])
        for owner, held in changed.items():
            if owner not in claims:
                self._insert_claim(held.claim, version=held.token)
        for owner, waiting in queued.items():
            if owner not in claims:
                self._insert_claim(waiting.claim, channel, number, counted=True)
                waiters += 1
        left = [one for one in (*gone, *written) if one.version is None]
        waiters = max(0, waiters - sum(bool(one.counted) for one in left))
        if waiters and not queued:
            # A commit has counted claims whose rows do not say so.
            waiters = self._recount_waiters(row.key)
        self._write_lock(row, before, after, waiters, status)
        holder = after.held.claim.owner if after.held else ""
        for channel in {
            one.channel for one in left if one.owner in changed or one.owner == holder
        }:
            self._notify_on_commit(channel)
        return set()

    def _lock_claims(self, ids: list[int]) -> set[int]:
        """Lock rows of claims, and return the ids of those that do not exist."""
        if not ids or self.dialect.one_writer:
            return set()
        # Wait for one row at a time. For a list, InnoDB reads a small table from end to
        # end, and would wait for every locked row.
        sql = self._text(
            f"SELECT id FROM {{claims}} WHERE id = %(id)s"
            f"{self.dialect.for_update_patiently}"
        )
        return {
            number
            for number in self._find_transaction_locks(ids, "{claims}", "id")
            if not self._rows(sql, {"id": number})
        }

    def _write_shares(
        self, before: KeyState, written: Sequence[tuple[ClaimRow, Held]]
    ) -> None:
        """Write shared holds that were extended, kept or granted."""
        alike: dict[tuple[float, bool, int], dict[int, int]] = {}
        for one, held in written:
            shape = held.end, held.token > before.version, held.count
            alike.setdefault(shape, {})[one.id] = held.token
        for (end, is_new, count), tokens in alike.items():
            ids, parameters = self._one_of("id", list(tokens))
            assignments = f"end_time = {self._renewed}"
            if is_new or not count:
                assignments += f", hold_count = {count}"
            if is_new:
                cases = " ".join(
                    f"WHEN %({one})s THEN %(token_{one})s" for one in parameters
                )
                assignments += f", version = CASE id {cases} END, begin_time = {{now}}"
                parameters |= {
                    f"token_{one}": tokens[parameters[one]] for one in parameters
                }
            sql = self.dialect.update("{claims}", assignments, ids, "id")
            parameters["ttl"] = round(end * MICROSECONDS)
            self._count(self._text(sql), parameters)

    def _write_lock(
        self,
        row: LockedRow,
        before: KeyState,
        after: KeyState,
        waiters: int,
        status: str,
    ) -> None:
        assignments, held = [], after.held
        parameters: dict[str, Any] = {"key": row.key, "status": status}
        if held is None:
            assignments += [CLEAR] if before.held else []
        elif held is not before.held:
            parameters["ttl"] = round(held.end * MICROSECONDS)
            if held.token > before.version:
                assignments.append(GRANT.partition(", version")[0])
                parameters |= {
                    "status": "P" if held.claim.scope == "lease" else "S",
                    "owner": held.claim.owner,
                    "holder": self._fitted(held.claim.holder)[:255],
                    "owner_ip": held.claim.owner_ip,
                }
            else:
                assignments.append(
                    "status = %(status)s, hold_count = 0, end_time = {end}"
                )
        for name, was, now in (
            ("version", before.version, after.version),
            ("waiters", row.waiters, waiters),
            ("shares", row.shares, len(after.shares)),
        ):
            if now != was:
                assignments.append(f"{name} = %({name})s")
                parameters[name] = now
        if assignments:
            sql = f"UPDATE {{locks}} SET {', '.join(assignments)} WHERE {KEY}"
            self._count(self._text(sql), parameters)
        row.state, row.waiters, row.shares = after, waiters, len(after.shares)
