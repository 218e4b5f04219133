"""The rows of claims, which are waiters or shared holds, and their counts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dlocks.backends.base import HANDOVER_LEASE
from dlocks.backends.database.fragments import FREE_BY_CLOCK, IN_QUEUE, MICROSECONDS
from dlocks.backends.database.steps import Steps
from dlocks.sql.dialect import KEY
from dlocks.values import Claim, HeldKey

# The maximum size in bytes of what a caller holds, as text. MySQL allows twice that.
LONGEST_HOLDING = 32_000

# Seconds without a heartbeat after which a queued claim is deleted instead of only
# skipped.
DELETE_AFTER = 10.0


class ClaimRows(Steps):
    """The part that inserts, reads, counts and deletes the rows of claims.

    The numbers of waiters and of shared holds are stored in the lock row.
    """

    def _row_of(self, claim: Claim) -> tuple[int, int | None, float] | None:
        """Return the number, token and seconds left of a claim's own row.

        Return None if it has none.
        """
        sql = self._text(
            "SELECT id, version, {left} FROM {claims} WHERE owner = %(owner)s"
        )
        for number, version, seconds in self._rows(sql, {"owner": claim.owner}):
            return number, version, float(seconds)
        return None

    def _holds_key(self, claim: Claim) -> bool:
        """Return whether a claim was granted the key.

        This also works while another transaction has locked the lock row.
        """
        sql = self._text(
            f"SELECT 1 FROM {{locks}} WHERE {KEY} AND owner = %(owner)s AND NOT"
            f" {FREE_BY_CLOCK}"
        )
        return bool(
            self._rows(sql, {"key": claim.key, "owner": claim.owner, **self._times()})
        )

    def _insert_claim(
        self,
        claim: Claim,
        channel: str = "",
        number: int | None = None,
        *,
        counted: bool = False,
        version: int | None = None,
    ) -> None:
        while True:
            names, values, parameters = self._columns(
                claim, channel, number, counted=counted, version=version
            )
            # A queued claim may already be there, if the reply to its insert was lost.
            before, after = self.dialect.insert_or_ignore
            if version is not None:
                before, after = "INSERT", self.dialect.unless_brought_along
            written = self._count(
                self._text(
                    f"{before} INTO {{claims}} ({names}) VALUES ({values}) {after}"
                ),
                parameters,
            )
            surely = written or not self.dialect.unless_brought_along
            if (surely and number is None) or self._row_of(claim) is not None:
                return
            # Each try draws another number. Only waiters that rejoined with an old
            # number can conflict with it, so the tries are limited by the length of the
            # queue.
            number = None

    def _columns(
        self,
        claim: Claim,
        channel: str,
        number: int | None,
        *,
        counted: bool,
        version: int | None = None,
    ) -> tuple[str, str, dict[str, Any]]:
        """Return columns, SQL expressions and parameters for a claim's row."""
        expressions = {
            "key_resource": "%(key)s",
            "owner": "%(owner)s",
            "holder": "%(holder)s",
            "owner_ip": self.dialect.typed("%(owner_ip)s", "inet"),
            "begin_time": "{now}",
            "end_time": "{heard}" if version is None else "{end}",
            "version": self.dialect.typed("%(version)s", "bigint"),
            "hold_count": "%(hold_count)s",
            "shared": "%(shared)s",
            "permits": "%(permits)s",
            "scope": "%(scope)s",
            "takeover": "%(takeover)s",
            "counted": "%(counted)s",
            "handover_ttl": "%(handover_ttl)s",
            "channel": "%(channel)s",
            "holding": "%(holding)s",
        }
        if number is not None:
            expressions["id"] = "%(number)s"
        parameters = {
            "number": number,
            "key": claim.key,
            "owner": claim.owner,
            "holder": self._fitted(claim.holder)[:255],
            "owner_ip": claim.owner_ip,
            "version": version,
            "hold_count": 0 if version is None else 1,
            "shared": claim.shared,
            "permits": claim.permits,
            "scope": "P" if claim.scope == "lease" else "S",
            "takeover": claim.takeover,
            "counted": counted,
            "handover_ttl": round(min(claim.ttl, HANDOVER_LEASE) * MICROSECONDS),
            "channel": channel,
            "holding": to_text(claim.holding),
            "ttl": round(claim.ttl * MICROSECONDS),
        }
        return (
            ", ".join(expressions),
            ", ".join(expressions.values()),
            parameters | self._times(),
        )

    def _delete_claims(self, where: str, parameters: Mapping[str, Any]) -> int:
        """Delete matching claims that no other transaction has locked.

        Return their number. A locked claim is just being written, or is a shared hold
        that ``hold.atomic()`` keeps.
        """
        return self._count(
            self._text(self.dialect.delete("{claims}", where, "id")), parameters
        )

    def _recount_waiters(self, key: str) -> int:
        """Delete waiters that have been silent for long, and count the live ones."""
        parameters = {"key": key, "forgotten": -round(DELETE_AFTER * MICROSECONDS)}
        of_key = f"{KEY} AND {IN_QUEUE}"
        self._delete_claims(
            f"{of_key} AND end_time <= {self.dialect.after('forgotten')}", parameters
        )
        # A waiter without a heartbeat delays no other waiter. After its next heartbeat
        # it counts again.
        heard = "(end_time > {now})"
        sql = self.dialect.update(
            "{claims}", f"counted = {heard}", f"{of_key} AND counted <> {heard}", "id"
        )
        self._count(self._text(sql), parameters)
        sql = f"SELECT COUNT(*) FROM {{claims}} WHERE {of_key} AND counted"
        return int(self._rows(self._text(sql), parameters)[0][0])


def to_text(holding: Sequence[HeldKey]) -> str:
    """Return the keys that a caller holds as JSON, or an empty text for none."""
    while len(text := json.dumps(holding)) > LONGEST_HOLDING:
        # The deadlock may then stay unnoticed, and end by a timeout.
        holding = holding[: len(holding) // 2]
    return text if holding else ""
