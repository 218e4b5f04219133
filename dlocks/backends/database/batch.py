"""Operations on several keys: one statement changes all rows, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from dlocks.backends.database.acquisition import Acquisition, Take
from dlocks.backends.database.fragments import GRANT, RELEASED
from dlocks.backends.database.watchdog import table_watchdog
from dlocks.runtime import clock
from dlocks.sql.innodb import InnoDB
from dlocks.values import Claim, Grant

# The requested rows are first selected and counted, in the order of their keys. Rows
# that another transaction has locked are skipped. The rows are only written if none is
# missing. All of them get the same token, which is larger than the token of each of
# them was.
PICKED = "COUNT(*) AS found, {greatest}(MAX(version) + 1, {ticks}) AS next_token"
POSTGRESQL = (
    "WITH picks AS MATERIALIZED (SELECT key_resource, version FROM {locks} WHERE {keys}"
    " AND {wanted} ORDER BY key_resource FOR UPDATE SKIP LOCKED), found AS MATERIALIZED"
    " (SELECT {picked} FROM picks) UPDATE {locks} SET {assignments} FROM found WHERE"
    " {keys} AND found = %(many)s"
)
MYSQL = (
    "UPDATE (SELECT {picked} FROM {locks} FORCE INDEX (PRIMARY) WHERE {keys} AND"
    " {wanted} FOR UPDATE SKIP LOCKED) AS picks STRAIGHT_JOIN {locks} FORCE INDEX"
    " (PRIMARY) ON {keys} AND found = %(many)s SET {assignments}"
)
SQLITE = (
    "UPDATE {locks} SET {assignments} FROM (SELECT {picked} FROM {locks} WHERE {keys}"
    " AND {wanted}) AS picks WHERE {keys} AND found = %(many)s"
)


class Batch(Acquisition):
    """The operations on several keys, for backends that write rows in place."""

    def acquire_all(self, claims: Sequence[Claim]) -> Sequence[Grant] | None:
        first = claims[0]
        for claim in claims:
            self._refuse_unstorable(claim.key)
        in_transaction = first.scope == "transaction"
        if any(claim.shared for claim in claims):
            return None
        if in_transaction and isinstance(self.dialect, InnoDB):
            # InnoDB keeps a row locked until the transaction ends, even if it was
            # selected and not needed after all. A key late in the order would then be
            # locked before an early one.
            return None
        # A stale row is taken over by a statement of its own, so that the takeover is
        # recognized as one.
        wanted = f"({self._free(first, RELEASED)})"
        if in_transaction and self.dialect.read_committed:
            wanted += f" AND {self.dialect.read_committed}"
        token = (
            "LAST_INSERT_ID(next_token)"
            if isinstance(self.dialect, InnoDB)
            else "next_token"
        )
        sql, parameters = self._all_or_none(
            claims, GRANT.replace("{token}", token), wanted
        )
        sql += self.dialect.returning
        parameters = self._parameters(first) | parameters

        def grant() -> tuple[int | None, None]:
            return self._granted(sql, parameters), None

        take: Take = grant
        if in_transaction and self.dialect.locks_in_passing:
            take = partial(self._or_undo, grant)
        granted, _ = take()
        if granted is None and (absent := self._absent(claims)):
            for key in absent:
                self._create(key)
            granted, _ = take()
        return None if granted is None else [Grant(granted)] * len(claims)

    def _verify_all(self, claims: Sequence[Claim]) -> bool:
        wanted = "owner = %(owner)s"
        if claims[0].scope == "lease":
            wanted += f" AND {self._live}"
        sql, parameters = self._all_or_none(claims, "hold_count = hold_count", wanted)
        return self._changes_all(claims, sql, parameters)

    def release_all(self, claims: Sequence[Claim], *, failed: bool = False) -> bool:
        dialect = self.dialect
        session, began = self._session(), clock.now()
        assignments = (
            f"status = %(status)s, hold_count = 0, end_time = {dialect.after('keep')}"
        )
        wanted, returning = "owner = %(owner)s", ""
        if claims[0].scope == "transaction":
            assignments += dialect.count_in.replace("%(key)s", "{locks}.key_resource")
            returning = dialect.tell_first.replace("%(key)s", "{locks}.key_resource")
        else:
            wanted += " AND waiters = 0"
            if self.connection.vendor == "postgresql" and not self.in_transaction():
                # A crash of the server may lose the release of a lease. The lease then
                # expires, with no other effect.
                returning = self.dialect.without_flush
        sql, parameters = self._all_or_none(claims, assignments, wanted)
        parameters |= {"status": "F" if failed else "S", "keep": 0}
        with self._without_flush(), table_watchdog.waiting_allowed():
            released = self._changes_all(
                claims, sql + self._text(returning), parameters
            )
        return released or self._was_released(claims, session, began)

    def _changes_all(
        self, claims: Sequence[Claim], sql: str, parameters: Mapping[str, Any]
    ) -> bool:
        if any(claim.shared for claim in claims):
            return False
        with self._with_short_timeout():
            return self._count(sql, parameters, locked=lambda: 0) == len(claims)

    def _all_or_none(
        self, claims: Sequence[Claim], assignments: str, wanted: str
    ) -> tuple[str, dict[str, Any]]:
        """Return a statement that writes the rows of all claims, and its parameters.

        It writes none of them unless all rows match ``wanted``.
        """
        keys, parameters = self._one_of("key_resource", [claim.key for claim in claims])
        owners = {f"owner_{number}": claim.owner for number, claim in enumerate(claims)}
        cases = " ".join(
            f"WHEN %(key_resource_{number})s THEN %(owner_{number})s"
            for number in range(len(claims))
        )
        template = {"postgresql": POSTGRESQL, "mysql": MYSQL, "sqlite": SQLITE}[
            self.connection.vendor
        ]
        sql = (
            template.replace(
                "{picked}", PICKED.replace("{greatest}", self.dialect.greatest)
            )
            .replace("{assignments}", assignments)
            .replace("{wanted}", wanted)
            .replace("{keys}", keys)
            # Each row is compared with, or set to, the owner of its own claim.
            .replace("%(owner)s", f"CASE key_resource {cases} END")
        )
        return self.dialect.unsafely + self._text(sql), {
            "many": len(claims),
            **parameters,
            **owners,
        }

    def _absent(self, claims: Sequence[Claim]) -> list[str]:
        keys, parameters = self._one_of("key_resource", [claim.key for claim in claims])
        sql = self._text(f"SELECT key_resource FROM {{locks}} WHERE {keys}")
        there = {key for (key,) in self._rows(sql, parameters)}
        return [claim.key for claim in claims if claim.key not in there]
