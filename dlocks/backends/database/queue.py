"""The queue of a key: heartbeats and polls of its waiters, and their positions."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from dlocks.backends import table
from dlocks.backends.database.fragments import FREE_BY_CLOCK, IN_QUEUE
from dlocks.backends.database.joining import Joining
from dlocks.backends.database.rows import LockedRow, LockSnapshot
from dlocks.runtime import clock
from dlocks.sql.dialect import KEY
from dlocks.values import Claim, Grant, Ticket

logger = logging.getLogger("dlocks")


class KeyQueue(Joining):
    """The part that keeps the waiters of a backend in the queue until their turn."""

    supports_queue: ClassVar[bool] = True

    def poll(
        self, claims: Sequence[Claim], *, heartbeat: bool = True
    ) -> Mapping[str, Ticket]:
        if not heartbeat and not any(claim.shared for claim in claims):
            return self._poll(claims)
        tickets: dict[str, Ticket] = {}
        by_owner = {claim.owner: claim for claim in claims}
        owners, parameters = self._one_of("owner", list(by_owner))
        if heartbeat:
            with self._with_short_timeout():
                self._count(
                    self.hearing(owners), parameters | self._times(), locked=lambda: 0
                )
        # Read the claims with rows of their own first. A claim that is granted in
        # between is then found in the lock row.
        numbers: dict[str, int] = {}
        alone: set[str] = set()
        sql = "SELECT owner, id, version, {left}, counted FROM {claims} WHERE "
        sql = self._text(sql + owners)
        for owner, number, version, seconds, counted in self._rows(sql, parameters):
            if version is None:
                numbers[owner] = number
                if not counted:
                    alone.add(by_owner[owner].key)
            elif seconds > 0:
                tickets[owner] = Ticket(grant=Grant(version, float(seconds)))
        heads = self._heads(claims)
        for owner, claim in by_owner.items():
            head = heads.get(claim.key)
            if owner in tickets:
                continue
            if head is not None and head.holder == owner and head.left > 0:
                tickets[owner] = head.own_ticket
            elif owner in numbers:
                tickets[owner] = self._ticket(claim, head, numbers[owner])
        self._advance_free_keys([by_owner[owner] for owner in numbers], heads, tickets)
        self._await_transactions(claims, heads, tickets)
        for key in alone:
            self._step(
                key,
                lambda row: row and self._apply(row, table.tidy, recount=True),
                busy=lambda: None,
                tries_if_locked=0,
            )
        return tickets

    def _poll(self, claims: Sequence[Claim]) -> dict[str, Ticket]:
        """Poll only the lock rows, in one statement."""
        heads = self._heads(claims)
        tickets: dict[str, Ticket] = {}
        for claim in claims:
            head = heads.get(claim.key)
            if head is not None and head.holder == claim.owner and head.left > 0:
                tickets[claim.owner] = head.own_ticket
            else:
                tickets[claim.owner] = self._ticket(claim, head, None)
        self._advance_free_keys(claims, heads, tickets)
        self._await_transactions(claims, heads, tickets)
        return tickets

    def _heads(self, claims: Sequence[Claim]) -> dict[str, LockSnapshot]:
        """Return snapshots of the lock rows by key.

        Each snapshot has the number of waiters ahead of the first of these claims.
        """
        keys, parameters = self._one_of(
            "key_resource", sorted({claim.key for claim in claims})
        )
        owners, owner_parameters = self._one_of(
            "owner", [claim.owner for claim in claims]
        )
        # The queue is not read if one of the claims holds the key.
        before = (
            f"CASE WHEN {owners} THEN 0 ELSE (SELECT COUNT(*) FROM {{claims}} AS others"
            " WHERE others.key_resource = {locks}.key_resource AND others.version IS"
            " NULL AND others.end_time > {now} AND others.id < (SELECT MIN(id) FROM"
            f" {{claims}} AS mine WHERE mine.{owners} AND mine.key_resource ="
            " {locks}.key_resource)) END"
        )
        sql = self._text(
            "SELECT key_resource, owner, status, version, {left}, CASE WHEN"
            f" {FREE_BY_CLOCK} THEN 1 ELSE 0 END, {before}, {{ends}} FROM {{locks}}"
            f" WHERE {keys}"
        )
        asked_at = clock.now()
        return {
            key: LockSnapshot(
                holder,
                status,
                version,
                float(left),
                bool(free),
                int(ahead),
                int(ends),
                asked_at,
            )
            for key, holder, status, version, left, free, ahead, ends in (
                self._rows(sql, parameters | owner_parameters | self._times())
            )
        }

    def _ticket(
        self, claim: Claim, head: LockSnapshot | None, number: int | None
    ) -> Ticket:
        if head is None:
            return Ticket(position=number)
        expires_in = head.left + (self.grace if head.status == "P" else 0.0)
        if self.observations is not None and head.status == "P":
            expires_in = self.observations.note(
                claim.key, (head.version, head.ends), head.asked_at
            )
        return Ticket(
            ahead=head.ahead,
            position=number,
            # If a lease has expired and the claim must not take it over, a retry raises
            # the error.
            must_retry=(head.free or expires_in <= 0)
            and head.status == "P"
            and not claim.takeover,
            next_check=expires_in if expires_in > 0 else math.inf,
        )

    def _await_transactions(
        self,
        claims: Sequence[Claim],
        heads: Mapping[str, LockSnapshot],
        tickets: dict[str, Ticket],
    ) -> None:
        """Let claims without ``takeover`` wait for transactions that keep leases.

        They keep waiting for an expired lease that a transaction keeps.
        """
        asking = {
            claim.owner: claim.key
            for claim in claims
            if not claim.takeover
            and (ticket := tickets.get(claim.owner)) is not None
            and (ticket.must_retry and ticket.grant is None)
            and (head := heads.get(claim.key)) is not None
            and head.status == "P"
        }
        kept = self.in_transactions(sorted(set(asking.values())))
        tickets |= {
            owner: replace(tickets[owner], must_retry=False)
            for owner, key in asking.items()
            if key in kept
        }

    def _advance_free_keys(
        self,
        claims: Sequence[Claim],
        heads: Mapping[str, LockSnapshot],
        tickets: dict[str, Ticket],
    ) -> None:
        """Advance the queues of keys that became free without a release.

        The holder died, its transaction ended, or there never was a holder.
        """
        for key in {claim.key for claim in claims}:
            head = heads.get(key)
            silent = head is not None and head.is_silent
            if head is not None and self._is_gone(
                head, [claim for claim in claims if claim.key == key]
            ):
                self._expire_observed(key, head.version, head.ends)
            elif head is None or head.free:
                # Wait only briefly for the row. Meanwhile no notification is received,
                # and transactions may have locked many keys.
                granted = self._advanced(key, in_passing=True)
                silent = granted is None
                tickets |= {
                    owner: ticket
                    for owner, ticket in (granted or {}).items()
                    if owner in tickets
                }
            if silent and not self.dialect.commit_notifies:
                owners = [claim.owner for claim in claims if claim.key == key]
                tickets |= {
                    owner: replace(tickets[owner], unnotified=True) for owner in owners
                }

    def _is_gone(self, head: LockSnapshot, claims: Sequence[Claim]) -> bool:
        """Return whether the holder is dead and a claim may take over.

        A holder is dead if its row was observed unchanged for long enough.
        """
        if (
            self.observations is None
            or head.status != "P"
            or not any(claim.takeover for claim in claims)
        ):
            return False
        return (
            self.observations.note(
                claims[0].key, (head.version, head.ends), head.asked_at
            )
            <= 0
        )

    def _expire_observed(self, key: str, version: int, ends: int) -> bool:
        """Take a key from a holder that was observed for long enough.

        Return False if its row has changed since it was observed.
        """

        def step(row: LockedRow | None) -> bool:
            if row is None or row.ends != ends or not row.state.is_held:
                return False
            return bool(self._apply(row, table.clear, version)[0])

        if not self._step(key, step, busy=lambda: False):
            return False
        logger.warning(
            "The lease on %r has expired: no renewal was observed for its ttl and the"
            " grace.",
            key,
        )
        return True

    def waiting(self, key: str) -> int:
        sql = self._text(
            f"SELECT COUNT(*) FROM {{claims}} WHERE {KEY} AND {IN_QUEUE} AND end_time >"
            " {now}"
        )
        return int(self._rows(sql, {"key": key})[0][0])
