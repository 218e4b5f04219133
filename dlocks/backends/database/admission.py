"""Granting of a key to its next waiters, and its handover by a release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlocks.backends.database.fragments import IN_QUEUE, MICROSECONDS
from dlocks.backends.database.rows import Granted, LockedRow
from dlocks.backends.database.sending import CONTENTION_TRIES
from dlocks.backends.database.sharing import Sharing
from dlocks.sql.dialect import KEY
from dlocks.values import Claim

# Maximum number of claims in one statement.
ROWS_PER_STATEMENT = 1000

# Maximum number of times that a step reads the queue. It reads again if the claims that
# it was about to grant have just left.
ADMISSION_TRIES = 3

# How long, on PostgreSQL, a statement waits for the lock row: to release the key, to
# advance its queue, and to advance the queues of many keys.
RELEASE_LOCK_TIMEOUT, ADVANCE_LOCK_TIMEOUT, ADVANCE_MANY_LOCK_TIMEOUT = (
    "200ms",
    "20ms",
    "1ms",
)


class Admission(Sharing):
    """The part that advances the queue of a key, in a step or in one statement."""

    # Keys that had waiters when this process last used them. An operation on such a key
    # starts with the statement for a key with a queue. This is only a hint.
    _contended_keys: set[str]

    def _admit(self, head: LockedRow) -> list[Granted]:
        """Grant the key to the first waiter, or shared holds to the first waiters.

        They are notified on commit.
        """
        # A claim may have left the queue since it was read. The queue is then read
        # again.
        for _ in range(ADMISSION_TRIES if head.free else 0):
            shares = self._shares(head)
            live = self._queued(head.key)
            if not live:
                if head.waiters:
                    self._recount_waiters(head)
                return []
            if live[0]["shared"]:
                granted = self._grant_shares(head, live, shares)
            else:
                willing = (
                    [claim for claim in live if claim["takeover"]]
                    if head.status == "P"
                    else live
                )
                if shares or not willing or willing[0]["shared"]:
                    return []
                granted = self._grant_key(head, willing[0])
            if granted is not None:
                return granted
        return []

    def _queued(self, key: str) -> list[dict[str, Any]]:
        """Return the waiters with a recent heartbeat, in the order of the queue.

        The list includes all waiters that could be granted together with the first, up
        to ``ROWS_PER_STATEMENT``.
        """
        columns = (
            "id, owner, shared, permits, scope, takeover, counted, handover_ttl,"
            " channel"
        )
        names = columns.split(", ")
        sql = self._text(
            f"SELECT {columns} FROM {{claims}} WHERE {KEY} AND {IN_QUEUE} AND"
            " end_time > {now} ORDER BY id LIMIT %(limit)s"
        )
        live: list[dict[str, Any]] = []
        for limit in (8, ROWS_PER_STATEMENT):
            live = [
                dict(zip(names, row, strict=True))
                for row in self._rows(sql, {"key": key, "limit": limit})
            ]
            if len(live) < limit or (not live[0]["shared"] and live[0]["takeover"]):
                break
        return live

    def _grant_key(
        self, head: LockedRow, claim: Mapping[str, Any]
    ) -> list[Granted] | None:
        """Grant the key to a waiter, or return None if it has just left."""
        locking = self.dialect.for_update_patiently
        mine = f"id = %(id)s AND {IN_QUEUE} AND end_time > {{now}}{locking}"
        rows = self._rows(
            self._text(f"SELECT holder, owner_ip FROM {{claims}} WHERE {mine}"),
            {"id": claim["id"]},
        )
        if not rows:
            return None
        ((holder, ip),) = rows
        sql = self._text(
            "UPDATE {locks} SET status = %(status)s, owner = %(owner)s, holder ="
            " %(holder)s, owner_ip = %(ip)s, begin_time = {now}, end_time ="
            f" {self.dialect.after('handover_ttl')}, hold_count = 1, version ="
            f" %(token)s, waiters = %(waiters)s, shares = 0 WHERE {KEY}"
        )
        head.waiters = max(0, head.waiters - bool(claim["counted"]))
        parameters = {
            "key": head.key,
            "status": claim["scope"],
            "owner": claim["owner"],
            "holder": holder,
            "ip": ip,
            "handover_ttl": claim["handover_ttl"],
            "token": head.token,
            "waiters": head.waiters,
        }
        self._count(sql, parameters)
        self._count(
            self._text("DELETE FROM {claims} WHERE id = %(id)s"), {"id": claim["id"]}
        )
        head.free, head.owner, head.status, head.version = (
            False,
            claim["owner"],
            claim["scope"],
            head.token,
        )
        self._notify_on_commit(claim["channel"])
        token = head.token if claim["scope"] == "P" else None
        return [Granted(claim["owner"], token, claim["handover_ttl"] / MICROSECONDS)]

    def _is_first(self, head: LockedRow, claim: Claim) -> bool:
        """Advance the queue; return whether the claim could acquire the key."""
        self._admit(head)
        return (
            head.free
            and not head.waiters
            and self._shares(head) < (claim.permits if claim.shared else 1)
        )

    def move_on(self, key: str) -> bool:
        """Grant the key to its first waiter if it is free.

        Return True if no holder or waiter is in the way any more.
        """
        if self._advance(key):
            return False

        def step(head: LockedRow | None) -> bool:
            if head is None:
                return False
            self._admit(head)
            return head.free and not head.waiters and not head.shares

        return bool(self._step(key, step, busy=lambda: False))

    def _advanced(self, key: str, *, in_passing: bool = False) -> list[Granted] | None:
        """Advance the queue, and return the granted claims.

        Return None if a transaction has locked the row.
        """
        if self._advance(
            key,
            row_wait=ADVANCE_MANY_LOCK_TIMEOUT if in_passing else ADVANCE_LOCK_TIMEOUT,
        ):
            # The next poll shows which claim was granted.
            return []
        tries_if_locked = 0 if in_passing else CONTENTION_TRIES
        return self._step(
            key,
            lambda head: self._admit(head) if head else None,
            busy=list,
            tries_if_locked=tries_if_locked,
        )

    def _advance(self, key: str, *, row_wait: str = ADVANCE_LOCK_TIMEOUT) -> bool:
        """Grant a released key to the first waiter, in one round trip.

        Return False if this was not possible.
        """
        if not self.dialect.hand_over or self.in_transaction():
            return False
        parameters = {"key": key, "owner": "", "status": "S"}
        free = "status <> 'P' AND end_time <= {now}"
        sql = self._handing_over(free, self.dialect.if_taken, row_wait=row_wait)
        return any(taken for taken, _ in self._was_handed_over(sql, parameters))

    def _hand_over(self, claim: Claim, *, failed: bool) -> bool:
        """Release the key and grant it to the first waiter, in one statement.

        Return False if this was not possible.
        """
        if not self.dialect.hand_over or self.in_transaction():
            # The statement is a transaction of its own.
            return False
        parameters = {
            "key": claim.key,
            "owner": claim.owner,
            "status": "F" if failed else "S",
        }
        sql = self._handing_over(
            "owner = %(owner)s AND status = 'P'", row_wait=RELEASE_LOCK_TIMEOUT
        )
        for taken, waiters in self._was_handed_over(sql, parameters):
            if not waiters:
                self._contended_keys.discard(claim.key)
            elif not taken:
                # The waiters joined after this statement had begun, want shared holds,
                # or have sent no heartbeat.
                self._advanced(claim.key)
            return True
        return False

    def _handing_over(
        self, condition: str, if_taken: str = "", *, row_wait: str
    ) -> str:
        dialect = self.dialect
        text = dialect.hand_over.replace("{row_wait}", row_wait)
        return self._text(
            text.replace("{condition}", condition).replace("{if_taken}", if_taken)
        )
