"""The queue of a key: claims join, send heartbeats, poll, and are handed the key.

The busiest steps of a contended key, to join and to hand over, are one round trip each.
They follow the rules for one case: a live holder, and a first waiter that wants the key
alone. In every other case they change nothing, and a step decides. On SQLite they are a
few statements in one ``BEGIN IMMEDIATE``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dlocks.backends import table as rules
from dlocks.backends.base import HANDOVER_LEASE, HEARTBEAT_TIMEOUT
from dlocks.backends.database import notify
from dlocks.backends.database.failures import is_refused
from dlocks.backends.database.session import RowLockedError
from dlocks.backends.database.state import RESERVED, Key
from dlocks.backends.database.store import Store
from dlocks.backends.notifiers import RecentKeys
from dlocks.backends.table import KeyState, Moment
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.sql.clock import LATER, Now, ticks
from dlocks.values import Claim, Grant, Ticket

logger = logging.getLogger("dlocks")

# Seconds for which a poll waits for the row of a key that became free. Meanwhile no
# notification is received, and transactions may have locked many keys.
POLL_WAIT = 0.005
# Seconds for which a claim that joins waits for the row. Others join at the same time.
JOIN_WAIT = 0.2
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


class Queue:
    """The part that keeps waiters in the queue until their turn."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.session = store.session
        # The keys that had waiters when this process last used them. This is only a
        # hint.
        self.contended = RecentKeys()

    # Joining.

    def join(self, claim: Claim, channel: str, position: int | None) -> Ticket | None:
        self.store.refuse_unstorable(claim.key)
        self.contended.add(claim.key)
        try:
            if position is None and (number := self._join_at_once(claim, channel)):
                return Ticket(position=number)
            return self._join_by_step(claim, channel, position)
        except LockBackendError as error:
            if position is None or not is_refused(error):
                raise
            # Another claim has this position.
            return self.join(claim, channel, None)
        except RowLockedError:
            return self._join_locked(claim, channel, position)

    def _join_at_once(self, claim: Claim, channel: str) -> int | None:
        """Queue a claim for a key with a live holder, and return its position.

        Return None if the key is free, or reserved for the claim.
        """
        parameters = self.store.columns(claim, channel) | {
            "key": claim.key,
            "heard": ticks(HEARTBEAT_TIMEOUT),
        }
        rows = self._packet(JOIN, parameters, flush=False)
        return rows[0][0] if rows else None

    def _join_by_step(self, claim: Claim, channel: str, position: int | None) -> Ticket:
        ticket, key = self.store.step(
            claim.key,
            _enqueue,
            claim,
            position or sys.maxsize,
            wait=JOIN_WAIT,
            channel=channel,
            position=position,
        )
        if not key.state.queue:
            self.contended.discard(claim.key)
        return RESERVED if key.is_reserved_for(claim) else ticket

    def _join_locked(
        self, claim: Claim, channel: str, position: int | None
    ) -> Ticket | None:
        """Join the queue of a key whose row another transaction has locked.

        The row does not count the claim. The next step on the key does.
        """
        silent = not self.session.engine.commit_notifies
        try:
            insert = partial(self.store.insert_claim, claim, channel, position)
            self.session.run(self.session.transaction, insert)
        except LockBackendError as error:
            if not is_refused(error):
                raise
            if position is not None and self.row_of(claim) is None:
                return self._join_locked(claim, channel, None)
        except RowLockedError:
            if self.session.engine.one_writer:
                return None
            # It may have been queued and granted without a known result.
            return replace(RESERVED, unnotified=True)
        try:
            key = self.store.read([claim.key]).get(claim.key)
            ticket = None if key is None else key.ticket(claim)
            if ticket is not None and ticket.grant is not None and not claim.shared:
                # It was granted without a known result. The row of a share is its hold.
                self.delete(claim)
        except LockBackendError as error:
            # The claim is in the queue.
            error.changed_nothing = False
            raise
        if key is not None and key.state.is_held:
            # A lease is released by a statement that notifies.
            silent = False
        return replace(ticket or RESERVED, unnotified=silent)

    # Leaving.

    def hand_over(self, claim: Claim, status: str) -> bool:
        """Release a key to its first waiter, and return whether that was possible."""
        parameters = {
            "key": claim.key,
            "owner": claim.owner,
            "status": status,
            "lease": ticks(HANDOVER_LEASE),
            "near": notify.this_host() or "-",
        }
        rows: Sequence[Any] = ()
        with suppress(RowLockedError):
            rows = self._packet(HAND_OVER, parameters)
        if not rows:
            return False
        taken, waiters, channel, *_ = rows[0]
        if taken:
            notify.send({channel})
        elif waiters:
            # The waiters want shared holds, or joined after this had begun.
            self.store.advance(claim.key)
        if not waiters:
            self.contended.discard(claim.key)
        return True

    def _packet(
        self, texts: dict[str, str], parameters: dict[str, Any], *, flush: bool = True
    ) -> Sequence[Any]:
        """Send a request, on InnoDB again if it has skipped the row, which is locked.

        It is a transaction of its own. Raise RowLockedError within another one, and if
        the row stays locked.
        """
        text = texts[self.session.engine.vendor]
        for number in range(TRIES):
            if self.session.in_transaction:
                break
            rows = self.session.packet(text, parameters, flush=flush)
            if not rows or rows[0][0] is not None:
                return rows
            clock.back_off(0.0005 * 2**number)
        raise RowLockedError

    def row_of(self, claim: Claim) -> Any:
        """Return the row of a queued claim or a shared hold, or None."""
        rows = self.store.claims.filter(owner=claim.owner).annotate(now=Now())
        return self.session.unlocked(rows.first)

    def delete(self, claim: Claim) -> bool:
        """Delete the row of a claim, unless another transaction has locked it."""
        sql = self.session.engine.many("{claims}", "", "owner = %(owner)s")
        with suppress(RowLockedError):
            return self.session.ask(sql, {"owner": claim.owner}).changed == 1
        return False

    # Waiting.

    def poll(self, claims: Sequence[Claim], *, heartbeat: bool) -> Mapping[str, Ticket]:
        """Return the tickets of claims by owner. Free keys go to their next waiters.

        A heartbeat also counts claims that joined while the row was locked.
        """
        tickets: dict[str, Ticket] = {}
        heard = self._hear([claim.owner for claim in claims]) if heartbeat else None
        open_claims = self._turns(claims, tickets, heard)
        by_key: dict[str, list[Claim]] = {}
        for claim in open_claims:
            by_key.setdefault(claim.key, []).append(claim)
        found = self.store.read(list(by_key)) if by_key else {}
        for name, mine in by_key.items():
            tickets |= self._tickets(name, found.get(name), mine, heartbeat)
        return tickets

    def _hear(self, owners: Sequence[str]) -> int:
        """Record a heartbeat of claims, except those that a step is granting.

        Return the number of those in the queue.
        """
        mine, parameters = self.session.one_of("owner", owners, "owner")
        sql = self.session.engine.many(
            "{claims}", "end_time = {after:heard}", f"{mine} AND version IS NULL"
        )
        with suppress(RowLockedError):
            heard = {"heard": ticks(HEARTBEAT_TIMEOUT)}
            return self.session.ask(sql, parameters | heard, flush=False).changed
        return 0

    def _turns(
        self, claims: Sequence[Claim], tickets: dict[str, Ticket], heard: int | None
    ) -> Sequence[Claim]:
        """Add the tickets of claims whose key has a live exclusive holder.

        Return the other claims. This is the usual answer to a notification and to a
        heartbeat, and costs one plain statement. A heartbeat has found ``heard`` of the
        claims in the queue.
        """
        if self.store.observed:
            return claims
        session = self.session
        # Two claims of one process seldom wait for the same key.
        names = list(dict.fromkeys(claim.key for claim in claims))
        keys, parameters = session.one_of("key_resource", names, "key")
        owners, more = session.one_of("owner", [one.owner for one in claims], "owner")
        sql = session.sql(session.engine.turns(keys, owners))
        found = session.unlocked(session.prepared, sql, parameters | more)
        heads = {key: head for key, *head in found.rows}
        owned = sum(heads.get(one.key, [""])[0] == one.owner for one in claims)
        # Otherwise some have left the queue, or other transactions have locked them.
        all_wait = heard is None or heard + owned >= len(claims)
        rest = []
        for claim in claims:
            owner, token, left, ahead, uncounted = heads.get(
                claim.key, ("", 0, 0.0, 0, 0)
            )
            if owner == claim.owner:
                tickets[owner] = Ticket(grant=Grant(token, float(left)))
            elif not owner or not all_wait or (heard is not None and uncounted):
                rest.append(claim)
            else:
                next_check = float(left) + self.store.reader.grace
                tickets[claim.owner] = Ticket(ahead=int(ahead), next_check=next_check)
        return rest

    def _tickets(
        self, name: str, key: Key | None, mine: Sequence[Claim], heartbeat: bool
    ) -> dict[str, Ticket]:
        key, is_locked = self._advanced(name, key, mine, heartbeat)
        if key is None:
            return {}
        # A live lease is released by a statement that notifies. The end of a
        # transaction that keeps the key, or for which it is reserved, may not.
        leased = key.state.is_held and not key.is_free
        silent = not (leased or self.session.engine.commit_notifies)
        unnotified = silent and (is_locked or not key.is_free)
        tickets: dict[str, Ticket] = {}
        for claim in mine:
            if (ticket := key.ticket(claim)) is not None:
                # A claim without ``takeover`` waits for the transaction too.
                retry = ticket.must_retry and not is_locked
                ticket = replace(ticket, unnotified=unnotified, must_retry=retry)
                tickets[claim.owner] = ticket
        return tickets

    def _advanced(
        self, name: str, key: Key | None, mine: Sequence[Claim], heartbeat: bool
    ) -> tuple[Key | None, bool]:
        """Return a key after a step, if it needs one, and whether its row is locked."""
        if key is not None:
            advances = rules.admit(key.state, key.at).version > key.state.version
            tickets = filter(None, map(key.ticket, mine))
            retry = any(one.must_retry and one is not RESERVED for one in tickets)
            uncounted = heartbeat and len(key.state.live(key.at)) > key.row.waiters
            if not (advances or retry or uncounted):
                return key, False
        # Its holder may have died. Or a transaction keeps its expired lease.
        try:
            after = self.store.step(name, rules.tidy, wait=POLL_WAIT)[1]
        except RowLockedError:
            return key, True
        if self.store.observed and key is not None:
            _log_expiry(key, after)
        return after, False


def _log_expiry(before: Key, after: Key) -> None:
    held = after.state.held
    has_ended = before.state.is_held and held is not before.state.held
    if has_ended and (held is None or held.takeover):
        logger.warning(
            "The lease on %r has expired: no renewal was observed for its ttl and the"
            " grace.",
            before.row.pk,
        )


def _enqueue(
    state: KeyState, claim: Claim, position: int, at: Moment
) -> tuple[KeyState, Ticket]:
    """Queue a claim, unless the key is already reserved for its transaction."""
    held = state.held
    mine = held is not None and held.claim.owner == claim.owner
    if mine and state.is_released and state.expires_in(at) > 0:
        return state, RESERVED
    return rules.enqueue(state, claim, position, at)
