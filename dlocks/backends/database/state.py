"""The state of a key as it was read, and the values between it and the rows."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from django.db.models import BigIntegerField, BooleanField
from django.db.models.expressions import RawSQL

from dlocks.backends import table as rules
from dlocks.backends.database.failures import not_installed
from dlocks.backends.database.session import Session
from dlocks.backends.table import Held, KeyState, Moment, Waiting
from dlocks.runtime import clock
from dlocks.sql.clock import ticks_at
from dlocks.values import Claim, Ticket

T = TypeVar("T")

# The maximum size in bytes of what a caller holds, as text. MySQL allows twice that.
LONGEST_HOLDING = 32_000
# Seconds that make no difference to a lease.
MOMENT = 0.001
# Character sets without a name in Python. SQL_ASCII stores bytes as they are sent.
SENT_AS_UTF8 = {"SQL_ASCII": "utf-8", "utf8mb4": "utf-8"}
# Maximum number of rows that one statement reads or writes.
BATCH = 500
# Rows that a process remembers. A forgotten row is observed from the start again.
REMEMBERED = 10_000
# ``xmax`` of a row on PostgreSQL is the transaction that has locked, updated or deleted
# it. It is read without a lock. If several have locked it, ``xmax`` is the number of a
# MultiXact, which no public function looks up. Such a row counts as unlocked.
# The 64 bits of a transaction whose number has 32, next to the current one.
_NOW = "pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
_WHOLE = (
    f"GREATEST(3, {_NOW} + ((xmax::text::bigint - {_NOW} + 2147483648) & 4294967295) -"
    " 2147483648)"
)
# Whether a transaction that is in progress has locked the row. pg_xact_status() raises
# an error for a number that was not assigned yet, as that of a MultiXact may be.
IN_TRANSACTION = (
    "CASE WHEN xmax <> '0' AND age(xmax) > 0 THEN"
    f" COALESCE(pg_xact_status({_WHOLE}::text::xid8) = 'in progress', FALSE) ELSE FALSE"
    " END"
)
# The same as an expression, and the transaction that has locked the row.
IS_IN_TRANSACTION = RawSQL(IN_TRANSACTION, (), BooleanField())  # noqa: S611 (a constant)
LOCKED_BY = RawSQL("xmax::text::bigint", (), BigIntegerField())
# The ticket of a claim whose turn has come, in a transaction that it has to begin.
RESERVED = Ticket(must_retry=True, position=0, next_check=0.1)


@dataclass(slots=True)
class Key:
    """A key as it was read from its row and its claims.

    ``at`` is a reading of the database's clock, in seconds since 1970. ``notified`` are
    the channels of the claims that a step has granted.
    """

    row: Any
    claims: Sequence[Any]
    state: KeyState
    at: Moment
    notified: Collection[str] = ()

    @property
    def is_free(self) -> bool:
        """Return whether the key is free of exclusive holds, or stale."""
        return self.state.expires_in(self.at) <= 0

    @property
    def waiting(self) -> list[Any]:
        """The rows of the queued claims with a recent heartbeat, in their order."""
        rows = (row for row in self.claims if row.version is None)
        return [row for row in rows if row.end_time.timestamp() > self.at.now]

    def is_reserved_for(self, claim: Claim) -> bool:
        """Return whether the key waits for the transaction of this claim."""
        held = self.state.held
        mine = bool(held and held.claim.owner == claim.owner)
        return mine and claim.scope == "transaction" and not self.is_free

    def ticket(self, claim: Claim) -> Ticket | None:
        if self.is_reserved_for(claim):
            return RESERVED
        return rules.ticket(self.state, claim, self.at)


def models() -> Any:
    """Return the module of the models, or raise ImproperlyConfigured."""
    try:
        from dlocks import models
    except RuntimeError as error:
        raise not_installed() from error
    return models


def batches(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield what one statement reads or writes at a time."""
    for start in range(0, len(values), BATCH):
        yield values[start : start + BATCH]


def is_unused(state: KeyState, at: Moment) -> bool:
    # A new row could get the same token, until the clock has passed it.
    return (
        state.is_released
        and state.expires_in(at) <= 0
        and not state.queue
        and not state.shares
        and state.version < at.ticks
    )


def claim_of(row: Any) -> Claim:
    """Return the claim of a row of LockClaim."""
    return Claim(
        key=row.key_resource,
        ttl=row.handover_ttl / 1_000_000,
        scope="lease" if row.scope == "P" else "transaction",
        takeover=row.takeover,
        shared=row.shared,
        permits=row.permits,
        holder=row.holder,
        owner_ip=row.owner_ip,
        owner=row.owner,
    )


def to_text(holding: Iterable[Any]) -> str:
    """Return the keys that a caller holds as JSON, or an empty text for none."""
    holding = list(holding)
    while len(text := json.dumps(holding)) > LONGEST_HOLDING:
        # The deadlock may then stay unnoticed, and end by a timeout.
        holding = holding[: len(holding) // 2]
    return text if holding else ""


def fitted(text: str, connection: Any) -> str:
    """Return a text with the characters escaped that the connection cannot send."""
    raw, charset = connection.connection, "utf-8"
    if connection.vendor == "postgresql":
        # The server sends the encoding of the database when a session begins.
        charset = raw.info.parameter_status("server_encoding") or charset
    elif connection.vendor == "mysql":
        # The columns are in utf8mb4, but the session has a character set of its own.
        charset = raw.character_set_name()
        if charset in {"utf8", "utf8mb3"}:
            return "".join(
                one if ord(one) <= 0xFFFF else escaped(one, "ascii") for one in text
            )
    return escaped(text, SENT_AS_UTF8.get(charset, charset))


def escaped(text: str, charset: str) -> str:
    """Return a text in which characters outside a character set are escaped."""
    # For some encodings, Python has other names than PostgreSQL.
    name = re.sub("(?i)^win(?=[0-9])", "cp", charset)
    name = re.sub("(?i)^koi8(?=[ru]$)", "koi8-", name)
    try:
        codec = codecs.lookup(name).name
    except LookupError:
        codec = "ascii"
    return text.encode(codec, "backslashreplace").decode(codec)


class Reader:
    """What turns the rows of a key into its state.

    ``observed_for`` is None if the database's clock says when a lease ends. Otherwise
    it is the number of seconds for which a row has to be unchanged by this process's
    monotonic clock. A holder changes its row at each renewal, and trusts its lease for
    the ttl, counted from before it sent the renewal. So a row that is unchanged for
    longer has no live holder, whatever the clocks show, if they run at the same rate.
    """

    def __init__(
        self, session: Session, grace: float, observed_for: float | None
    ) -> None:
        self.session = session
        self.grace = grace
        self.observed_for = observed_for
        # The last state of each row, and when it was first read.
        self._seen: dict[Hashable, tuple[Hashable, float]] = {}

    def key(
        self,
        row: Any,
        claims: Sequence[Any],
        asked_at: float | None,
        mine: str = "",
    ) -> Key:
        """Return a key as it was read, for the owner ``mine`` if it was locked.

        If ``asked_at`` is None, its leases end by the database's clock.
        """
        # The row was read before or after the claims.
        date = max(one.now for one in (row, *claims))
        now = date.timestamp()
        # On SQLite, and if no clock is trusted, an expired share that still exists
        # belonged to its claim all the time.
        unclocked = self.observed_for is not None or self.session.engine.one_writer
        at = Moment(now, self.grace, ticks_at(now, self.session.engine.vendor), date)
        shares, queue = [], []
        for one in claims:
            end = self._end(one, now, asked_at)
            if one.version is None:
                queue.append(Waiting(claim_of(one), one.pk, end))
            else:
                if unclocked and one.owner == mine:
                    end = max(end, now + MOMENT)
                since, count = one.begin_time, one.hold_count
                shares.append(Held(claim_of(one), one.version, since, end, count))
        last = Claim(
            key=row.pk,
            ttl=0.0,
            owner=row.owner,
            holder=row.holder,
            owner_ip=row.owner_ip,
        )
        end = self._end(row, now, asked_at)
        held = Held(last, row.version, row.begin_time or date, end, row.hold_count)
        state = KeyState(
            row.version, held, row.status != "P", tuple(shares), tuple(queue)
        )
        return Key(row, claims, state, at)

    def _end(self, row: Any, now: float, asked_at: float | None) -> float:
        """Return when a lease ends, by the database's clock or by observation."""
        end = float(row.end_time.timestamp())
        # It waits, or has been released.
        is_lease = getattr(row, "status", "P" if row.hold_count else "S") == "P"
        if self.observed_for is None or asked_at is None or not is_lease:
            return end
        state = row.version, end
        known, since = self._seen.get(row.pk, (None, 0.0))
        if known != state:
            if len(self._seen) >= REMEMBERED:
                self._seen.clear()
            # The row may have been written a moment before the reply arrived.
            since = clock.now()
            self._seen[row.pk] = state, since
        left = since + self.observed_for - asked_at
        return now + left - self.grace
