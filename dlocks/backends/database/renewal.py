"""Renewal of leases, and verification of holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dlocks.backends.database.fragments import BATCH, MICROSECONDS
from dlocks.backends.database.own_row import OwnRow
from dlocks.sql.dialect import KEY
from dlocks.values import Claim


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
            alike = [
                claim
                for claim in claims
                if (claim.ttl, claim.shared, claim.late) == kind
            ]
            for start in range(0, len(alike), BATCH):
                left |= self._renew(alike[start : start + BATCH], *kind)
        return left

    def verify(self, claims: Sequence[Claim], count: int | None = None) -> bool:
        if count is None:
            return self._verify_all(claims)
        (claim,) = claims
        assignments = "hold_count = %(count)s" + (
            f", end_time = {self._renewed}" if claim.late else ""
        )
        parameters = {"count": count, "ttl": round(claim.ttl * MICROSECONDS)}
        if claim.shared:
            live = "version IS NOT NULL" if claim.late else self._live_share
            sql = (
                f"UPDATE {{claims}} SET {assignments} WHERE owner = %(owner)s AND"
                f" {live}"
            )
            return (
                self._count(self._text(sql), {"owner": claim.owner, **parameters}) == 1
            )
        where = f"{KEY} AND owner = %(owner)s"
        if claim.scope == "lease":
            # In transaction scope the row is already written as free. It is held as
            # long as it has this owner.
            where += " AND status = 'P'" if claim.late else f" AND {self._live}"
        return self._write(claim, assignments, where, parameters)

    def _renew(
        self, claims: Sequence[Claim], ttl: float, shared: bool, late: bool
    ) -> dict[str, float]:
        owners, owner_parameters = self._one_of(
            "owner", [claim.owner for claim in claims]
        )
        if shared:
            return self._renew_shares(claims, owners, owner_parameters, ttl, late)
        keys, key_parameters = self._one_of(
            "key_resource", [claim.key for claim in claims]
        )
        live = "status = 'P'" if late else self._live
        mine = f"{keys} AND {owners} AND {live}"
        parameters = {
            "ttl": round(ttl * MICROSECONDS),
            **key_parameters,
            **owner_parameters,
        }
        sql = self._sql(self.dialect.update, f"end_time = {self._renewed}", mine)
        with self._with_short_timeout():
            renewed = self._count(sql, parameters, locked=lambda: -1)
        if renewed == len(claims):
            return {claim.owner: ttl for claim in claims}
        if renewed < 0 and self.renews_late:
            # Another transaction writes. The rows stay unchanged until it has ended.
            return {claim.owner: 0.0 for claim in claims}
        if self.observations is not None:
            mine = f"{KEY} AND owner = %(owner)s AND {self._live}"
            return self._renew_each(claims, ttl, self.table, "key_resource", mine)
        # Some claims are lost, or their rows were locked at that moment, perhaps by a
        # transaction of this process that pins one. Leases that are still valid are
        # kept.
        left = self.dialect.seconds_until("end_time")
        sql = self._sql(
            lambda table, where: f"SELECT owner, {left} FROM {table} WHERE {where}",
            mine,
        )
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
        sql = self._text(
            self.dialect.update(table, f"end_time = {self._renewed}", mine, primary)
        )
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

    def _renew_shares(
        self,
        claims: Sequence[Claim],
        owners: str,
        parameters: Mapping[str, Any],
        ttl: float,
        late: bool,
    ) -> dict[str, float]:
        parameters = {"ttl": round(ttl * MICROSECONDS), **parameters}
        live = "version IS NOT NULL" if late else self._live_share
        with self._with_short_timeout():
            # A transaction that pins one row must not prevent the renewal of the
            # others.
            mine = f"{owners} AND {live}"
            sql = self._text(
                self.dialect.update(
                    "{claims}", f"end_time = {self._renewed}", mine, "id"
                )
            )
            renewed = self._count(sql, parameters, locked=lambda: -1)
        if renewed == len(claims):
            return {claim.owner: ttl for claim in claims}
        if renewed < 0 and self.renews_late:
            return {claim.owner: 0.0 for claim in claims}
        if self.observations is not None:
            return self._renew_each(
                claims,
                ttl,
                "{claims}",
                "id",
                f"owner = %(owner)s AND {self._live_share}",
            )
        left = self.dialect.seconds_until("end_time")
        sql = self._text(
            f"SELECT owner, {left} FROM {{claims}} WHERE {owners} AND {live}"
        )
        return {
            owner: min(float(seconds), ttl)
            for owner, seconds in self._rows(sql, parameters)
        }
