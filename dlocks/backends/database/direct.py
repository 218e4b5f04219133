"""The busiest steps of a contended key, in one round trip each.

They follow the rules for one case: a live holder, and a first waiter that wants the key
alone. In every other case they return None, and a step decides. On SQLite they are a
few statements in one ``BEGIN IMMEDIATE``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dlocks.backends.base import HANDOVER_LEASE, HEARTBEAT_TIMEOUT
from dlocks.backends.database import notify
from dlocks.backends.database.session import RowLockedError
from dlocks.backends.database.store import Store
from dlocks.runtime import clock
from dlocks.sql.clock import LATER, ticks
from dlocks.values import Claim, Ticket

# Tries on InnoDB, where a statement skips a row that another one has locked.
TRIES = 4

COLUMNS = (
    "key_resource, owner, holder, owner_ip, begin_time, end_time, hold_count, shared,"
    " permits, scope, takeover, handover_ttl, channel, holding"
)
VALUES = (
    "%(key)s, %(owner)s, %(holder)s, {owner_ip}, {now}, {after:heard}, 0, %(shared)s,"
    " %(permits)s, %(scope)s, %(takeover)s, %(handover_ttl)s, %(channel)s, %(holding)s"
)
# The lease of a new holder, in microseconds. MIN() of SQLite is NULL without a waiter.
LEASE = "COALESCE(MIN(first.handover_ttl, %(lease)s), 0)"


def _statement(name: str) -> dict[str, str]:
    found = {}
    for vendor in ("postgresql", "mysql", "sqlite"):
        path = Path(__file__).with_name(f"{vendor}_{name}.sql")
        lines = [one.partition("--")[0] for one in path.read_text().splitlines()]
        text = " ".join(" ".join(lines).split())
        text = text.replace("{columns}", COLUMNS).replace("{values}", VALUES)
        found[vendor] = text.replace("{after_lease}", LATER[vendor].format(LEASE))
    return found


HAND_OVER, JOIN = _statement("hand_over"), _statement("join")


class Direct:
    """The part that hands keys over and queues claims in one round trip."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.session = store.session

    def hand_over(self, claim: Claim, status: str) -> int | None:
        """Release a key to its first waiter. Return the number of those left."""
        parameters = {
            "key": claim.key,
            "owner": claim.owner,
            "status": status,
            "lease": ticks(HANDOVER_LEASE),
            "near": notify.this_host() or "-",
        }
        text = HAND_OVER[self.session.engine.vendor]
        rows: Sequence[Any] = ()
        with suppress(RowLockedError):
            rows = self._packet(text, parameters)
        if not rows:
            return None
        # On SQLite, the channel comes from a second statement.
        taken, waiters, *_ = rows[0]
        if taken:
            notify.send({rows[0][2] if rows[0][2:] else rows[1][0]})
        elif waiters:
            # The waiters want shared holds, or joined after this had begun.
            self.store.advance(claim.key)
        return int(waiters)

    def join(self, claim: Claim, channel: str) -> Ticket | None:
        """Queue a claim for a key with a live holder.

        Return None if the key is free, or reserved for the claim. Raise RowLockedError
        if its row is locked.
        """
        parameters = self.store.columns(claim, channel) | {
            "key": claim.key,
            "heard": ticks(HEARTBEAT_TIMEOUT),
        }
        text = JOIN[self.session.engine.vendor]
        rows = self._packet(text, parameters, flush=False)
        return Ticket(position=rows[0][0]) if rows else None

    def _packet(
        self, text: str, parameters: dict[str, Any], *, flush: bool = True
    ) -> Sequence[Any]:
        """Send a request, on InnoDB again if it has skipped the row, which is locked.

        It is a transaction of its own. Raise RowLockedError within another one, and if
        the row stays locked.
        """
        for number in range(TRIES):
            if self.session.in_transaction:
                break
            rows = self.session.packet(text, parameters, flush=flush)
            if not rows or rows[0][0] is not None:
                return rows
            clock.back_off(0.0005 * 2**number)
        raise RowLockedError
