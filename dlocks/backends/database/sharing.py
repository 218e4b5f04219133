"""Shared holds: read locks and the permits of semaphores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from dlocks.backends.database.claims import ClaimRows
from dlocks.backends.database.expiry import Observations
from dlocks.backends.database.fragments import ENDED_SHARE, IN_QUEUE, MICROSECONDS
from dlocks.backends.database.holders import Holders
from dlocks.backends.database.notify.notifications import Notifications
from dlocks.backends.database.rows import Granted, LockedRow
from dlocks.backends.database.steps import StepError
from dlocks.exceptions import LockStale
from dlocks.runtime import clock
from dlocks.sql.dialect import KEY
from dlocks.values import Claim, Grant


class Sharing(ClaimRows, Notifications, Holders):
    """The part that grants shared holds, and ends those that have expired."""

    supports_sharing: ClassVar[bool] = True

    _admit: Callable[[LockedRow], list[Granted]]

    def _share(self, claim: Claim) -> Grant | None:
        """Grant a shared claim if the key permits it and no waiter is ahead."""

        def step(head: LockedRow | None) -> Grant | None:
            row = self._row_of(claim)
            if row is not None and row[1] is not None:
                if not self._extend(claim):
                    return None
                return Grant(row[1])
            if head is None:
                return None
            if claim.beside and head.owner == claim.beside and head.status == "P":
                # The caller itself holds the key exclusively, and will share it later.
                return self._insert_share(head, claim)
            if not head.free:
                return None
            if head.status == "P" and not claim.takeover:
                raise _StaleError
            if row is not None or (claim.fair and head.waiters):
                self._admit(head)
                row = self._row_of(claim)
                if row is not None:
                    return None if row[1] is None else Grant(row[1], row[2])
            if (
                (claim.fair and head.waiters)
                or self._shares(head) >= claim.permits
                or not head.free
            ):
                return None
            return self._insert_share(head, claim)

        try:
            return self._step(claim.key, step, busy=lambda: None)
        except _StaleError:
            raise LockStale(key=claim.key, holder=self.holder(claim.key)) from None

    def _insert_share(self, head: LockedRow, claim: Claim) -> Grant:
        self._take_from_stale_holder(head)
        self._insert_waiter(claim, "", None, counted=False, version=head.token)
        self._change(head, shares=head.shares + 1, version=head.token)
        return Grant(head.token)

    def _extend(self, claim: Claim) -> bool:
        mine = (
            f"UPDATE {{claims}} SET end_time = {self._renewed} WHERE owner = %(owner)s"
            f" AND NOT {IN_QUEUE}"
        )
        mine = self.dialect.patiently + mine
        parameters = {"owner": claim.owner, "ttl": round(claim.ttl * MICROSECONDS)}
        return self._count(self._text(mine), parameters) == 1

    def _grant_shares(
        self, head: LockedRow, live: Sequence[Mapping[str, Any]], shares: int
    ) -> list[Granted] | None:
        """Grant shared holds to the first waiters, up to the number of permits.

        Return None if these waiters have just left the queue.
        """
        admitted: list[Mapping[str, Any]] = []
        for claim in live:
            if not claim["shared"] or shares + len(admitted) >= claim["permits"]:
                break
            if claim["takeover"] or head.status != "P":
                admitted.append(claim)
        if not admitted:
            return []
        self._take_from_stale_holder(head)
        first, last = admitted[0]["id"], admitted[-1]["id"]
        ids, parameters = self._one_of("id", [claim["id"] for claim in admitted])
        # The tokens are in the order of the queue.
        assignments = (
            "version = %(token)s + id - %(first)s, begin_time = {now}, hold_count ="
            f" 1, end_time = {self.dialect.after_column('handover_ttl')}"
        )
        sql = self.dialect.update_these(
            "{claims}", assignments, parameters, "end_time > {now}"
        )
        numbered = parameters | {"token": head.token, "first": first}
        if self._count(self._text(self.dialect.patiently + sql), numbered) != len(
            admitted
        ):
            # Some of the claims have just left the queue.
            there = self._rows(
                self._text(f"SELECT id FROM {{claims}} WHERE {ids} AND NOT {IN_QUEUE}"),
                parameters,
            )
            admitted = [claim for claim in admitted if (claim["id"],) in there]
            if not admitted:
                return None
        self._change(
            head,
            shares=shares + len(admitted),
            waiters=max(
                0, head.waiters - sum(bool(claim["counted"]) for claim in admitted)
            ),
            version=head.token + last - first,
        )
        granted = [
            Granted(
                claim["owner"],
                head.token + claim["id"] - first,
                claim["handover_ttl"] / MICROSECONDS,
            )
            for claim in admitted
        ]
        head.token = head.version + 1
        for channel in {claim["channel"] for claim in admitted}:
            self._notify_on_commit(channel)
        return granted

    def _take_from_stale_holder(self, head: LockedRow) -> None:
        """Take the key from a stale holder, before shared holds are granted."""
        if head.free and head.status == "P":
            sql = (
                "UPDATE {locks} SET status = 'F', owner = '', hold_count = 0 WHERE"
                f" {KEY}"
            )
            self._count(self._text(sql), {"key": head.key})
            head.status, head.owner = "F", ""

    def _shares(self, head: LockedRow) -> int:
        """Delete the ended shared holds, and return the number of the others."""
        if not head.shares:
            return 0
        parameters = {"key": head.key} | self._times()
        self._delete_claims(f"{KEY} AND {ENDED_SHARE}", parameters)
        if self.observations is not None:
            self._expire_observed_shares(head.key, self.observations)
        sql = self._text(
            f"SELECT COUNT(*) FROM {{claims}} WHERE {KEY} AND NOT {IN_QUEUE}"
        )
        shares = int(self._rows(sql, parameters)[0][0])
        if shares != head.shares:
            self._change(head, shares=shares)
        return shares

    def _expire_observed_shares(self, key: str, observations: Observations) -> None:
        asked_at = clock.now()
        ends = self.dialect.ticks_of("end_time")
        sql = (
            f"SELECT id, version, {ends} FROM {{claims}} WHERE {KEY} AND NOT"
            f" {IN_QUEUE}{self.dialect.for_update}"
        )
        for number, *state in self._rows(self._text(sql), {"key": key}):
            if observations.note((key, number), tuple(state), asked_at) <= 0:
                self._count(
                    self._text("DELETE FROM {claims} WHERE id = %(id)s"), {"id": number}
                )


class _StaleError(StepError):
    """A stale key whose claim must not take it over."""
