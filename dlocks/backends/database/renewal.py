"""Renewal of leases, and verification of holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dlocks.backends.database.fragments import BATCH, MICROSECONDS, SHARE
from dlocks.backends.database.own_row import OwnRow
from dlocks.sql.dialect import KEY
from dlocks.values import Claim

# The condition that a lease is not released, although it may have expired.
TAKEN = "status = 'P'"


class Renewal(OwnRow):
    """The part that renews the leases of many claims in one statement."""

    _verify_all: Callable[[Sequence[Claim]], bool]

    @property
    def renews_late(self) -> bool:
        # While a transaction writes to SQLite, no lease can be renewed and no other
        # caller can acquire a key.
        return self.dialect.one_writer

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        left: dict[str, float] = {}
        for kind in {(claim.ttl, claim.shared, claim.late) for claim in claims}:
            alike = [one for one in claims if (one.ttl, one.shared, one.late) == kind]
            for start in range(0, len(alike), BATCH):
                left |= self._renew(alike[start : start + BATCH], *kind)
        return left

    def verify(self, claims: Sequence[Claim], count: int | None = None) -> bool:
        if count is None:
            return self._verify_all(claims)
        (claim,) = claims
        assignments = "hold_count = %(count)s"
        if claim.late:
            assignments += f", end_time = {self._renewed}"
        parameters = {"count": count, "ttl": round(claim.ttl * MICROSECONDS)}
        if claim.shared:
            sql = f"UPDATE {{claims}} SET {assignments} WHERE owner = %(owner)s AND "
            sql += SHARE if claim.late else self._live_share
            owner = {"owner": claim.owner}
            return self._count(self._text(sql), owner | parameters) == 1
        where = f"{KEY} AND owner = %(owner)s"
        if claim.scope == "lease":
            # In transaction scope the row is already written as free. It is held as
            # long as it has this owner.
            where += f" AND {TAKEN}" if claim.late else f" AND {self._live}"
        return self._write(claim, assignments, where, parameters)

    def _renew(
        self, claims: Sequence[Claim], ttl: float, shared: bool, late: bool
    ) -> dict[str, float]:
        mine, parameters = self._one_of("owner", [claim.owner for claim in claims])
        one = "owner = %(owner)s"
        if shared:
            table, primary, live = "{claims}", "id", self._live_share
            mine += f" AND {SHARE if late else live}"
        else:
            table, primary, live = self.table, "key_resource", self._live
            names = [claim.key for claim in claims]
            keys, more = self._one_of("key_resource", names)
            mine = f"{keys} AND {mine} AND {TAKEN if late else live}"
            one = f"{KEY} AND {one}"
            parameters |= more
        parameters["ttl"] = round(ttl * MICROSECONDS)
        sql = self._renewal(table, mine, primary)
        # A transaction that pins one row must not prevent the renewal of the others.
        with self._with_short_timeout():
            renewed = self._count(sql, parameters, locked=lambda: -1)
        if renewed == len(claims):
            return {claim.owner: ttl for claim in claims}
        if renewed < 0 and self.renews_late:
            # Another transaction writes. The rows stay unchanged until it has ended.
            return {claim.owner: 0.0 for claim in claims}
        if self.observations is not None:
            return self._renew_each(claims, ttl, table, primary, f"{one} AND {live}")
        # Some claims are lost, or their rows were locked, perhaps by a transaction of
        # this process that pins one. Valid leases are kept.
        left = self.dialect.seconds_until("end_time")
        sql = self._text(f"SELECT owner, {left} FROM {table} WHERE {mine}")
        return {
            owner: min(float(seconds), ttl)
            for owner, seconds in self._rows(sql, parameters)
        }

    def _renew_each(
        self, claims: Sequence[Claim], ttl: float, table: str, primary: str, mine: str
    ) -> dict[str, float]:
        """Renew the claims one by one, without relying on a clock.

        A claim whose row is locked keeps its previous lease.
        """
        left: dict[str, float] = {}
        sql = self._renewal(table, mine, primary)
        for claim in claims:
            parameters = {
                "key": claim.key,
                "owner": claim.owner,
                "ttl": round(ttl * MICROSECONDS),
            }
            with self._with_short_timeout():
                if self._count(sql, parameters, locked=lambda: 0) == 1:
                    left[claim.owner] = ttl
                    continue
            if self._rows(
                self._text(f"SELECT 1 FROM {table} WHERE {mine}"), parameters
            ):
                left[claim.owner] = 0.0
        return left
