"""The queue of a key, and shared holds, for databases.

Waiters and shared holds are claims with rows of their own.
"""

from __future__ import annotations

import logging
import math
import os
import random
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DatabaseError, Error, InterfaceError, OperationalError

from dlocks.backends.base import HANDOVER_LEASE, HEARTBEAT_TIMEOUT, TableLockedError
from dlocks.backends.database.driver import (
    CLEAR,
    CONTENTION_TRIES,
    FREE_BY_CLOCK,
    IN_QUEUE,
    MICROSECONDS,
    Statements,
    T,
)
from dlocks.backends.database.expiry import Observations
from dlocks.backends.database.notify.datagram import (
    ALONE,
    TAG,
    DatagramSocket,
    is_same_host,
    tag,
    tell,
    this_host,
)
from dlocks.backends.database.notify.listeners import (
    INTERRUPTED,
    DatagramListener,
    MySQLNotifier,
    PostgreSQLNotifier,
)
from dlocks.backends.notifiers import Notifier
from dlocks.exceptions import LockBackendError, LockStale
from dlocks.runtime import clock
from dlocks.runtime.greenlets import threads_are_green
from dlocks.sql.dialect import KEY
from dlocks.sql.prepared import is_under_way
from dlocks.values import Claim, Grant, Holder, Ticket

logger = logging.getLogger("dlocks")

# Seconds without a heartbeat after which a queued claim is deleted instead of only
# skipped.
DELETE_AFTER = 10.0

# Maximum number of claims in one statement.
ROWS_PER_STATEMENT = 1000

# Maximum number of times that a step reads the queue. It reads again if the claims that
# it was about to grant have just left.
ADMISSION_TRIES = 3

# Attempts to queue a claim in one round trip while other callers have locked the lock
# row.
QUEUE_TRIES = 3

# Error codes of MariaDB and MySQL when no session could be woken: no such session or
# named lock; the calling session itself; a server that shuts down, or that has ended
# the calling session.
NO_SUCH_SESSION = {1094, 3057, INTERRUPTED, 1053, 1927}

# Seconds for which a process that was stopped in the middle of a step may keep the lock
# row locked. This is the limit of ``Dialect.bound`` and a reserve.
ROW_LOCK_LIMIT = 3.0

# Seconds for which a release is retried while its lease is live. A thousand
# simultaneous callers may keep the row locked, one after another, for longer than
# ``ROW_LOCK_LIMIT``.
RELEASE_RETRY_LIMIT = 15.0

# Maximum number of claims of a process that join the queue in one round trip.
CLAIMS_PER_ROUND_TRIP = 100

# Seconds for which a thread waits while another thread of its process joins the queue.
ENTRANCE_TIMEOUT = 1.0

# How long, on PostgreSQL, a statement waits for the lock row: to release the key, to
# advance its queue, and to advance the queues of many keys.
RELEASE_LOCK_TIMEOUT, ADVANCE_LOCK_TIMEOUT, ADVANCE_MANY_LOCK_TIMEOUT = (
    "200ms",
    "20ms",
    "1ms",
)

ENDED_SHARE = f"NOT {IN_QUEUE} AND end_time <= {{grace}}"


@dataclass(slots=True)
class LockedRow:
    """A lock row that the current step has locked and read."""

    key: str
    status: str
    owner: str
    version: int
    waiters: int
    shares: int
    free: bool
    token: int
    clock: float


# The ticket of a claim whose turn has come.
MINE = Ticket(must_retry=True, position=0)


@dataclass(frozen=True, slots=True)
class LockSnapshot:
    """A snapshot of a lock row, which may have changed since."""

    holder: str
    status: str
    version: int
    left: float
    free: bool
    clock: float
    ahead: int
    # The end of the lease in microseconds since 1970, and the monotonic time at which
    # the row was requested.
    ends: int
    asked_at: float

    @property
    def is_silent(self) -> bool:
        """Return whether the key may become free without a notification.

        It is kept for a transaction. If a notification needs a statement of its own,
        the end of the transaction sends none.
        """
        return self.status != "P" and not self.free

    @property
    def own_place(self) -> Ticket:
        """Return the ticket of the claim that holds the key.

        A lease is already granted. In transaction scope, the claim still has to acquire
        the key.
        """
        return (
            Ticket(grant=Grant(self.version, self.left))
            if self.status == "P"
            else Ticket(must_retry=True, next_check=0.1)
        )


@dataclass(frozen=True, slots=True)
class Granted:
    """A queued claim that a step has granted.

    Without a token, the key is reserved for the claim until it retries.
    """

    owner: str
    token: int | None
    lease: float

    @property
    def place(self) -> Ticket:
        return (
            MINE if self.token is None else Ticket(grant=Grant(self.token, self.lease))
        )


class QueueRequest:
    """A claim that is joining the queue, by its own thread or by another one."""

    def __init__(self, claim: Claim, channel: str) -> None:
        self.claim = claim
        self.channel = channel
        self.place: Ticket | None = None
        # The claim whose thread inserts this one into the queue. It may be this claim
        # itself.
        self.leader: QueueRequest | None = None
        # Whether only its own thread inserts it. This applies to a shared claim, which
        # may find the key free, and to a claim that was already part of a batch.
        self.alone = claim.shared
        # Whether its own thread no longer waits for the result.
        self.gone = False


class QueueBatcher:
    """A mutex through which the threads of a process join the queues of keys.

    One thread joins at a time, and inserts the claims of waiting threads as well.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.turn = threading.RLock()
        self.waiting: deque[QueueRequest] = deque()

    def with_others(self, mine: QueueRequest) -> list[QueueRequest]:
        """Return the batch of claims that join the queue together with this one.

        They have the same key and are in their order of arrival. They are removed from
        ``waiting``.
        """
        mine.leader = mine
        if mine.alone:
            self.forget(mine)
            return [mine]
        # The copy is made in one operation, because other threads may append at the
        # same time.
        batch = [
            one
            for one in list(self.waiting)
            if one is mine
            or (one.claim.key == mine.claim.key and not one.alone and not one.gone)
        ]
        if mine not in batch[:CLAIMS_PER_ROUND_TRIP]:
            batch.insert(0, mine)
        batch = batch[:CLAIMS_PER_ROUND_TRIP]
        for one in batch:
            self.forget(one)
            one.leader = mine
        return batch

    def forget(self, one: QueueRequest) -> None:
        with suppress(ValueError):
            self.waiting.remove(one)


class KeyQueue(Statements):
    """The queue and the shared holds of a database backend.

    Every step locks the lock row first, so that the steps of one key are serialized. A
    step is a short transaction of its own. It never waits for the lock row. If another
    transaction has locked the row, a claim joins the queue without being counted in
    ``waiters``. A later heartbeat counts it.
    """

    supports_queue: ClassVar[bool] = True
    supports_sharing: ClassVar[bool] = True

    listening: bool | None = None

    # Whether the refusal of KILL QUERY was already logged.
    _refused = False

    _batcher: QueueBatcher

    # The socket on which processes on the same host notify this process of its grants.
    _door: DatagramSocket | None = None

    # Keys that had waiters when this process last used them. An operation on such a key
    # starts with the statement for a key with a queue. This is only a hint.
    _crowded: set[str]

    # Keys that a thread of this process is trying to acquire exclusively at this
    # moment. Further callers need not send the same request, as a crowd would.
    _asked: set[str]

    def enqueue(
        self, claim: Claim, channel: str = "", position: int | None = None
    ) -> Ticket | None:
        self._refuse_unstorable(claim.key)
        self._crowded.add(claim.key)
        if position is not None:
            return self._queue(claim, channel, position)
        mine, entrance = QueueRequest(claim, channel), self._batcher_here()
        try:
            # One thread at a time. A thousand simultaneous threads would block the row
            # for the holder that has to release it.
            entrance.waiting.append(mine)
            if not entrance.turn.acquire(timeout=ENTRANCE_TIMEOUT):
                # The other thread hangs, for example on a dead connection. Or it was
                # interrupted before it released the mutex.
                if self._batcher is entrance:
                    self._batcher = QueueBatcher()
                entrance.forget(mine)
                entrance = self._batcher
                entrance.waiting.append(mine)
                entrance.turn.acquire(timeout=ENTRANCE_TIMEOUT)
            if mine.place is None:
                batch = entrance.with_others(mine)
                if self.dialect.queue and not self.in_transaction():
                    self._queue_together(batch)
            if mine.place is None:
                mine.place = self._queue(claim, channel, None)
            if mine.place is None and self.dialect.queue:
                # The claim may have been queued and granted without a known result, so
                # it retries. If it was neither, ``silent`` makes the background thread
                # poll soon.
                mine.place = replace(MINE, unnotified=True)
            return mine.place
        except BaseException:
            entrance.forget(mine)
            raise
        finally:
            mine.gone = True
            try:  # noqa: SIM105 (a signal within suppress() would leave the mutex locked)
                entrance.turn.release()
            except RuntimeError:
                # The RLock itself knows whether this thread holds it, even after an
                # interrupt.
                pass

    def _batcher_here(self) -> QueueBatcher:
        if self._batcher.pid != os.getpid():
            # A forked child needs its own. A thread of the parent may have held the
            # parent's one during the fork.
            self._batcher = QueueBatcher()
        return self._batcher

    def _queue_together(self, batch: Sequence[QueueRequest]) -> None:
        """Queue claims on one key in this order and in one round trip.

        This is only done while the key is held. If the key is free, the queue has to
        advance. Each claim does that by itself.
        """
        leader = batch[0].leader
        names, rows_of_values, owners = "", [], []
        parameters: dict[str, Any] = {}
        for number, one in enumerate(batch):
            suffix = f"_{number}" if number else ""
            names, values, its_own = self._columns(
                one.claim, one.channel, None, counted=True
            )
            rows_of_values.append(re.sub(r"%\((\w+)\)s", rf"%(\1{suffix})s", values))
            parameters |= {name + suffix: value for name, value in its_own.items()}
            owners.append(f"%(owner{suffix})s")
        all_owners = ", ".join(owners)
        if (
            rows := self._queue_counted(names, rows_of_values, all_owners, parameters)
        ) is None:
            rows = self._queue_uncounted(names, rows_of_values, all_owners, parameters)
        places = dict(rows)
        for one in batch:
            place = places.get(one.claim.owner)
            if one.leader is leader and not one.gone:
                one.place = place
                one.alone = True
            elif place is not None and (
                one.place is None or one.place.position != place.position
            ):
                # This took so long that the thread has joined the queue by itself, or
                # it was interrupted. No caller waits at this position.
                self._take_out(one.claim.key, place)

    def _queue_counted(
        self,
        names: str,
        rows_of_values: Sequence[str],
        owners: str,
        parameters: dict[str, Any],
    ) -> list[tuple[str, Ticket]] | None:
        """Queue and count the claims; return their tickets by owner.

        The result is empty if the key is free, and None if other callers have locked
        the lock row.
        """
        rows_of_values = [
            self.dialect.queue_row.replace("{values}", values)
            for values in rows_of_values
        ]
        sql = self.dialect.queue.replace("{rows}", " UNION ALL ".join(rows_of_values))
        sql = self._text(sql.replace("{columns}", names).replace("{owners}", owners))
        for number_of_try in range(QUEUE_TRIES):
            rows = self._packet(sql, parameters, often=len(rows_of_values) == 1)
            if rows is None:
                return None
            if not rows or rows[0][2]:
                return []
            if rows[0][0] is not None:
                return [
                    (owner, Ticket(position=place, clock=int(ticks) / MICROSECONDS))
                    for owner, place, _, ticks in rows
                ]
            time.sleep(random.uniform(0, 0.001 * 2**number_of_try))  # noqa: S311 (jitter)
        return None

    def _queue_uncounted(
        self,
        names: str,
        rows_of_values: Sequence[str],
        owners: str,
        parameters: dict[str, Any],
    ) -> list[tuple[str, Ticket]]:
        """Queue the claims without counting them; return their tickets by owner.

        A later heartbeat counts them.
        """
        before, after = self.dialect.insert_or_ignore
        values = ", ".join(f"({values})" for values in rows_of_values)
        parameters |= {name: False for name in parameters if name.startswith("counted")}
        sql = self._text(f"{before} INTO {{claims}} ({names}) VALUES {values} {after}")
        self._run(self._by_cursor, sql, parameters)
        sql = self._text(
            f"SELECT owner, id FROM {{claims}} WHERE owner IN ({owners}) AND {IN_QUEUE}"
        )
        silent = bool(self.dialect.wake)
        return [
            (owner, Ticket(position=number, unnotified=silent))
            for owner, number in self._rows(sql, parameters)
        ]

    def _take_out(self, key: str, place: Ticket) -> None:
        def step(head: LockedRow | None) -> None:
            sql = self._text(
                f"{self.dialect.patiently}DELETE FROM {{claims}} WHERE id = %(number)s"
                f" AND {IN_QUEUE}"
            )
            self._count(sql, {"number": place.position})
            self._recount_waiters(head)

        # If this fails, the position is skipped because it gets no heartbeat.
        with suppress(LockBackendError):
            self._step(key, step, busy=lambda: None)

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
                self._crowded.discard(claim.key)
            elif not taken:
                # The waiters joined after this statement had begun, want shared holds,
                # or have sent no heartbeat.
                self._advanced(claim.key)
            return True
        return False

    def _queue(self, claim: Claim, channel: str, number: int | None) -> Ticket | None:
        def step(head: LockedRow | None) -> tuple[Ticket, list[Granted]]:
            if head is not None and head.owner == claim.owner and not head.free:
                # The claim was queued, and its turn has come.
                return MINE, []
            row = self._row_of(claim)
            if row is None and head is not None and self._is_first(head, claim):
                self._crowded.discard(claim.key)
                return Ticket(must_retry=True), []
            if row is None and head is None and self._holds_key(claim):
                # The key was granted to the claim while it was joining the queue.
                return MINE, []
            if row is None:
                taken = number is not None and self._rows(
                    self._text("SELECT 1 FROM {claims} WHERE id = %(number)s"),
                    {"number": number},
                )
                # A crash of the server may lose a position, and assign its number
                # again.
                self._insert_waiter(
                    claim, channel, None if taken else number, counted=head is not None
                )
                if head is not None:
                    self._change(head, waiters=head.waiters + 1)
                row = self._row_of(claim)
            if row is None:
                raise LockBackendError(
                    f"The claim on {claim.key!r} could not join the queue."
                )
            place, version, left = row
            if version is not None:
                return Ticket(grant=Grant(version, left)), []
            if head is None:
                return Ticket(position=place, unnotified=bool(self.dialect.wake)), []
            return Ticket(position=place, clock=head.clock), self._admit(head)

        result = self._step(claim.key, step, busy=lambda: None)
        if result is None:
            return None
        place, granted = result
        return next(
            (
                replace(one.place, position=place.position)
                for one in granted
                if one.owner == claim.owner
            ),
            place,
        )

    def poll(
        self, claims: Sequence[Claim], *, heartbeat: bool = True
    ) -> Mapping[str, Ticket]:
        if not heartbeat and not any(claim.shared for claim in claims):
            return self._poll(claims)
        places: dict[str, Ticket] = {}
        by_owner = {claim.owner: claim for claim in claims}
        owners, parameters = self._one_of("owner", list(by_owner))
        if heartbeat:
            with self._briefly():
                self._count(
                    self.hearing(owners), parameters | self._times(), locked=lambda: 0
                )
        left = self.dialect.seconds_until("end_time")
        # Read the claims with rows of their own first. A claim that is granted in
        # between is then found in the lock row.
        numbers: dict[str, int] = {}
        alone: set[str] = set()
        sql = self._text(
            f"SELECT owner, id, version, {left}, counted FROM {{claims}} WHERE {owners}"
        )
        for owner, number, version, seconds, counted in self._rows(sql, parameters):
            if version is None:
                numbers[owner] = number
                if not counted:
                    alone.add(by_owner[owner].key)
            elif seconds > 0:
                places[owner] = Ticket(grant=Grant(version, float(seconds)))
        heads = self._heads(claims)
        for owner, claim in by_owner.items():
            head = heads.get(claim.key)
            if owner in places:
                continue
            if head is not None and head.holder == owner and head.left > 0:
                places[owner] = head.own_place
            elif owner in numbers:
                places[owner] = self._place(claim, head, numbers[owner])
        self._advance_free_keys([by_owner[owner] for owner in numbers], heads, places)
        self._await_transactions(claims, heads, places)
        for key in alone:
            self._step(key, self._recount_waiters, busy=lambda: None, looks=0)
        return places

    def _poll(self, claims: Sequence[Claim]) -> dict[str, Ticket]:
        """Poll only the lock rows, in one statement."""
        heads = self._heads(claims)
        places: dict[str, Ticket] = {}
        for claim in claims:
            head = heads.get(claim.key)
            if head is not None and head.holder == claim.owner and head.left > 0:
                places[claim.owner] = head.own_place
            else:
                places[claim.owner] = self._place(claim, head, None)
        self._advance_free_keys(claims, heads, places)
        self._await_transactions(claims, heads, places)
        return places

    def _await_transactions(
        self,
        claims: Sequence[Claim],
        heads: Mapping[str, LockSnapshot],
        places: dict[str, Ticket],
    ) -> None:
        """Let claims without ``takeover`` wait for transactions that keep leases.

        They keep waiting for an expired lease that a transaction keeps.
        """
        asking = {
            claim.owner: claim.key
            for claim in claims
            if not claim.takeover
            and (place := places.get(claim.owner)) is not None
            and (place.must_retry and place.grant is None)
            and (head := heads.get(claim.key)) is not None
            and head.status == "P"
        }
        kept = self.in_transactions(sorted(set(asking.values())))
        places |= {
            owner: replace(places[owner], must_retry=False)
            for owner, key in asking.items()
            if key in kept
        }

    def _advance_free_keys(
        self,
        claims: Sequence[Claim],
        heads: Mapping[str, LockSnapshot],
        places: dict[str, Ticket],
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
                places |= {
                    one.owner: one.place for one in granted or () if one.owner in places
                }
            if silent and self.dialect.wake:
                owners = [claim.owner for claim in claims if claim.key == key]
                places |= {
                    owner: replace(places[owner], unnotified=True) for owner in owners
                }

    def _place(
        self, claim: Claim, head: LockSnapshot | None, number: int | None
    ) -> Ticket:
        if head is None:
            return Ticket(position=number)
        soon = head.left + (self.grace if head.status == "P" else 0.0)
        if self.observations is not None and head.status == "P":
            soon = self.observations.note(
                claim.key, (head.version, head.ends), head.asked_at
            )
        return Ticket(
            ahead=head.ahead,
            position=number,
            # If a lease has expired and the claim must not take it over, a retry raises
            # the error.
            must_retry=(head.free or soon <= 0)
            and head.status == "P"
            and not claim.takeover,
            next_check=soon if soon > 0 else math.inf,
            clock=head.clock,
        )

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

        def step(head: LockedRow | None) -> bool:
            if head is None:
                return False
            where = (
                f"{KEY} AND status = 'P' AND version = %(version)s AND"
                f" {self.dialect.ticks_of('end_time')} = %(ends)s"
            )
            sql = f"UPDATE {{locks}} SET {CLEAR}, version = %(token)s WHERE {where}"
            parameters = {
                "key": key,
                "version": version,
                "ends": ends,
                "token": head.token,
            }
            if self._count(self._text(sql), parameters) != 1:
                return False
            head.status, head.owner, head.free, head.version = "F", "", True, head.token
            head.token += 1
            self._admit(head)
            return True

        if not self._step(key, step, busy=lambda: False):
            return False
        logger.warning(
            "The lease on %r has expired: no renewal was observed for its ttl and the"
            " grace.",
            key,
        )
        return True

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
        left = self.dialect.seconds_until("end_time")
        before = (
            "SELECT COUNT(*) FROM {claims} AS others WHERE others.key_resource ="
            " {locks}.key_resource AND others.version IS NULL AND others.end_time >"
            " {now} AND others.id < (SELECT MIN(id) FROM {claims} AS mine WHERE"
            f" mine.{owners} AND mine.key_resource = {{locks}}.key_resource)"
        )
        sql = self._text(
            f"SELECT key_resource, owner, status, version, {left}, CASE WHEN"
            f" {FREE_BY_CLOCK} THEN 1 ELSE 0 END, {{ticks}}, ({before}),"
            f" {self.dialect.ticks_of('end_time')} FROM {{locks}} WHERE {keys}"
        )
        asked_at = clock.now()
        return {
            key: LockSnapshot(
                holder,
                status,
                version,
                float(left),
                bool(free),
                int(now) / MICROSECONDS,
                int(ahead),
                int(ends),
                asked_at,
            )
            for key, holder, status, version, left, free, now, ahead, ends in (
                self._rows(sql, parameters | owner_parameters | self._times())
            )
        }

    def _handing_over(
        self, condition: str, if_taken: str = "", *, row_wait: str
    ) -> str:
        dialect = self.dialect
        text = dialect.hand_over.replace("{row_wait}", row_wait)
        return self._text(
            text.replace("{condition}", condition).replace("{if_taken}", if_taken)
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

    def _was_handed_over(
        self, sql: str, parameters: Mapping[str, Any]
    ) -> list[tuple[Any, Any]]:
        """Hand a key over, and notify its new holder.

        Return whether it has a new holder, and the number of waiters.
        """
        rows = (
            self._packet(
                sql, {**parameters, **self._times(), "near": this_host() or "-"}
            )
            or ()
        )
        for _, _, channel, owner, token, ends, server, *_ in rows:
            if channel:
                self._wake(channel, [_message(owner, token, ends)], server)
        return [row[:2] for row in rows]

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

    def waiting(self, key: str) -> int:
        sql = self._text(
            f"SELECT COUNT(*) FROM {{claims}} WHERE {KEY} AND {IN_QUEUE} AND end_time >"
            " {now}"
        )
        return int(self._rows(sql, {"key": key})[0][0])

    def notifier(self, channel: str) -> Notifier | None:
        if self.listening is False or not channel:
            return None
        if (
            self._door is None
            or self._door.channel != channel
            or not self._door.is_open
        ):
            self._door = DatagramSocket.open(channel)
        door = self._door
        if door is not None:
            server = (
                self._rows(f"SELECT {self.dialect.server}", {})[0][0]
                if self.dialect.server
                else ""
            )
            channel = this_host() + channel + TAG + tag(server)
        listener = self._listen_to_the_server(channel, door)
        if listener is None and door is not None:
            listener, channel = (
                DatagramListener(door, hears_all=self.dialect.one_writer),
                channel + ALONE,
            )
        if listener is not None:
            listener.channel, listener.advance = channel, self.move_on
        return listener

    def _listen_to_the_server(
        self, channel: str, door: DatagramSocket | None
    ) -> Notifier | None:
        try:
            if self.connection.vendor == "postgresql":
                pooled = self.listening is True
                return PostgreSQLNotifier.on(
                    self.connection, channel, door, through_a_pooler=pooled
                )
            if self.connection.vendor == "mysql" and not threads_are_green():
                return MySQLNotifier.on(self, channel, door)
        except Error as error:
            if (
                self.connection.vendor == "mysql"
                and self.connection.connection
                and self.connection.is_usable()
            ):
                self._unnotified(error)
                return None
            raise self._failure(error) from error
        return None

    # Shared holds.

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

    def _is_first(self, head: LockedRow, claim: Claim) -> bool:
        """Advance the queue; return whether the claim could acquire the key."""
        self._admit(head)
        return (
            head.free
            and not head.waiters
            and self._shares(head) < (claim.permits if claim.shared else 1)
        )

    def _take_from_stale_holder(self, head: LockedRow) -> None:
        """Take the key from a stale holder, before shared holds are granted."""
        if head.free and head.status == "P":
            sql = (
                "UPDATE {locks} SET status = 'F', owner = '', hold_count = 0 WHERE"
                f" {KEY}"
            )
            self._count(self._text(sql), {"key": head.key})
            head.status, head.owner = "F", ""

    def _extend(self, claim: Claim) -> bool:
        mine = (
            f"UPDATE {{claims}} SET end_time = {self._renewed} WHERE owner = %(owner)s"
            f" AND NOT {IN_QUEUE}"
        )
        mine = self.dialect.patiently + mine
        parameters = {"owner": claim.owner, "ttl": round(claim.ttl * MICROSECONDS)}
        return self._count(self._text(mine), parameters) == 1

    def _release_queued(self, claim: Claim, *, failed: bool, keep: float) -> bool:
        """Release the key, the shared hold or the queue position of a claim.

        The queue advances.
        """
        # Seconds left of its lease if another transaction has locked the lock row. None
        # if the row could not be read.
        left: float | None = None
        given_back = False

        def step(head: LockedRow | None) -> bool | None:
            nonlocal left, given_back
            if (
                head is not None
                and head.owner == claim.owner
                and (head.status == "P" or not head.free)
            ):
                given_back = True
                self._release_row(head, failed=failed, keep=keep)
                self._admit(head)
                return True
            row = self._row_of(claim)
            if row is not None:
                # With a single writer, an expired shared hold whose row still exists
                # belonged to the claim all the time.
                unclocked = self.observations is not None or self.dialect.one_writer
                given_back = row[1] is not None and (row[2] > 0 or unclocked)
                if not self._release_row_lock(head, claim, keep=keep):
                    # The claim was granted at this moment.
                    return None
                if head is not None and not head.waiters:
                    self._crowded.discard(claim.key)
                return given_back
            if head is not None:
                # The key may have been released before, and the reply was lost.
                return head.owner == claim.owner or given_back
            # The row is locked by another transaction, and may be this claim's.
            sql = (
                f"SELECT {self.dialect.seconds_until('end_time')} FROM {{locks}} WHERE"
                f" {KEY} AND owner = %(owner)s"
            )
            rows = self._rows(self._text(sql), {"key": claim.key, "owner": claim.owner})
            left = float(rows[0][0]) if rows else 0.0
            return None if rows else given_back

        def busy() -> bool | None:
            # While SQLite's writer is busy, a claim that holds nothing need not leave.
            # It is skipped soon in any case.
            if self.dialect.one_writer and failed and self._only_waits(claim):
                raise LockBackendError(
                    f"The single writer of database {self.database!r} is busy."
                )
            return None

        began = clock.real_now()
        while clock.real_now() < began + (
            ROW_LOCK_LIMIT if left is not None and left <= 0 else RELEASE_RETRY_LIMIT
        ):
            waits = left is not None and left > 0
            if (
                result := self._step(claim.key, step, busy=busy, waits=waits)
            ) is not None:
                return result
            if left is None:
                # Without jitter, a whole crowd would collide again at once.
                time.sleep(random.uniform(0, 0.01))  # noqa: S311 (jitter)
            # On PostgreSQL this statement waits for the row. On MariaDB the next step
            # waits.
            if (
                left is not None
                and left > 0
                and not keep
                and self._hand_over(claim, failed=failed)
            ):
                return True
        if left is not None and left <= 0:
            # The lease has expired, and a transaction that is still open is taking the
            # key over.
            return False
        raise LockBackendError(
            f"The lock row of {claim.key!r} on database {self.database!r} is locked by"
            " another transaction."
        )

    def _only_waits(self, claim: Claim) -> bool:
        """Return whether a claim holds nothing and is at most queued.

        Return False if this could not be read.
        """
        with suppress(LockBackendError):
            row = self._row_of(claim)
            return not self._holds_key(claim) if row is None else row[1] is None
        return False

    def _release_row_lock(
        self, head: LockedRow | None, claim: Claim, *, keep: float
    ) -> bool:
        """Release a claim with a row of its own.

        With ``keep``, the row stays for that many seconds. Return False if the claim
        has no such row any more.
        """
        if keep:
            keeping = (
                f"UPDATE {{claims}} SET end_time = {self.dialect.after('keep')} WHERE"
                " owner = %(owner)s"
            )
            self._count(
                self._text(self.dialect.patiently + keeping),
                {"owner": claim.owner, "keep": round(keep * MICROSECONDS)},
            )
            return True
        there = self._forget(head, claim.owner)
        if head is not None:
            self._admit(head)
        return there or head is not None

    # Parts of a step.

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
        looks = 0 if in_passing else CONTENTION_TRIES
        return self._step(
            key,
            lambda head: self._admit(head) if head else None,
            busy=list,
            looks=looks,
        )

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
        self._notify_claims(
            f"locks}} WHERE {KEY}",
            {"key": head.key},
            claim["channel"],
            reserved=claim["scope"] != "P",
        )
        token = head.token if claim["scope"] == "P" else None
        return [Granted(claim["owner"], token, claim["handover_ttl"] / MICROSECONDS)]

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
            self._notify_claims(
                f"claims}} WHERE {ids} AND channel = %(channel)s", parameters, channel
            )
        return granted

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

    def _delete_claims(self, where: str, parameters: Mapping[str, Any]) -> int:
        """Delete matching claims that no other transaction has locked.

        Return their number. A locked claim is just being written, or is a shared hold
        that ``hold.atomic()`` keeps.
        """
        return self._count(
            self._text(self.dialect.delete("{claims}", where, "id")), parameters
        )

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

    def _recount_waiters(self, head: LockedRow | None) -> None:
        """Delete waiters that have been silent for long, and count the live ones."""
        if head is None:
            return
        parameters = {
            "key": head.key,
            "forgotten": -round(DELETE_AFTER * MICROSECONDS),
        }
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
        count = self._rows(
            self._text(f"SELECT COUNT(*) FROM {{claims}} WHERE {of_key} AND counted"),
            parameters,
        )
        self._change(head, waiters=int(count[0][0]))

    def _forget(self, head: LockedRow | None, owner: str) -> bool:
        """Delete a claim, and subtract it from the counts in the lock row.

        If the lock row is not locked here, the next step that locks it counts the
        remaining claims.
        """
        locking = self.dialect.for_update_patiently
        sql = self._text(
            "SELECT id, version, counted FROM {claims} WHERE owner ="
            f" %(owner)s{locking}"
        )
        for number, version, counted in self._rows(sql, {"owner": owner}):
            self._count(
                self._text("DELETE FROM {claims} WHERE id = %(id)s"), {"id": number}
            )
            if head is not None and version is not None:
                self._change(head, shares=max(0, head.shares - 1))
            elif head is not None and counted:
                self._change(head, waiters=max(0, head.waiters - 1))
            return True
        return False

    def _release_row(self, head: LockedRow, *, failed: bool, keep: float) -> None:
        status = "F" if failed else "S"
        sql = (
            "UPDATE {locks} SET status = %(status)s, hold_count = 0, end_time ="
            f" {self.dialect.after('keep')} WHERE {KEY}"
        )
        parameters = {
            "key": head.key,
            "status": status,
            "keep": round(keep * MICROSECONDS),
        }
        self._count(self._text(sql), parameters)
        head.status, head.free = status, not keep

    def _change(self, head: LockedRow, **columns: int) -> None:
        assignments = ", ".join(f"{name} = %({name})s" for name in columns)
        self._count(
            self._text(f"UPDATE {{locks}} SET {assignments} WHERE {KEY}"),
            {"key": head.key, **columns},
        )
        for name, value in columns.items():
            setattr(head, name, value)

    def _insert_waiter(
        self,
        claim: Claim,
        channel: str,
        number: int | None,
        *,
        counted: bool,
        version: int | None = None,
    ) -> None:
        while True:
            names, values, parameters = self._columns(
                claim, channel, number, counted=counted, version=version
            )
            # A queued claim may already be there, inserted by the thread that batched
            # it.
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
            "ttl": round(claim.ttl * MICROSECONDS),
        }
        return (
            ", ".join(expressions),
            ", ".join(expressions.values()),
            parameters | self._times(),
        )

    def _row_of(self, claim: Claim) -> tuple[int, int | None, float] | None:
        """Return the number, token and seconds left of a claim's own row.

        Return None if it has none.
        """
        left = self.dialect.seconds_until("end_time")
        sql = self._text(
            f"SELECT id, version, {left} FROM {{claims}} WHERE owner = %(owner)s"
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

    def _notify_claims(
        self,
        rows: str,
        parameters: Mapping[str, Any],
        channel: str,
        *,
        reserved: bool = False,
    ) -> None:
        """Notify the processes of granted claims when this step commits."""
        if not channel:
            return
        server = self.dialect.server or "''"
        # A grant in the caller's transaction may still be undone, so the claim has to
        # retry.
        reserved = reserved or bool(self.connection.savepoint_ids)
        sql = self._text(
            f"SELECT owner, {'NULL' if reserved else 'version'}, {{ends}}, {server}"
            f" FROM {{{rows}"
        )
        granted = self._rows(sql, {**parameters, "channel": channel})
        messages = [_message(owner, token, ends) for owner, token, ends, _ in granted]
        if self.connection.vendor == "postgresql" and not is_same_host(channel, ""):
            # PostgreSQL sends the notification with the commit.
            self._notify(channel, messages)
        elif granted:
            wake = partial(self._wake, channel, messages, granted[0][3])
            transaction.on_commit(wake, using=self.database, robust=True)

    def _notify(self, channel: str, messages: Sequence[str]) -> None:
        if messages and not channel.endswith(ALONE):
            sql = (
                "SELECT pg_notify(%(channel)s, message) FROM"
                " unnest(%(messages)s::text[]) AS message"
            )
            self._run(
                self._by_cursor, sql, {"channel": channel, "messages": list(messages)}
            )

    def _wake(self, channel: str, messages: Sequence[str], server: str) -> None:
        """Notify a process of its granted claims.

        If the notification is lost, the process polls some time later.
        """
        if (
            is_same_host(channel, server) and tell(channel, messages)
        ) or channel.endswith(ALONE):
            return
        if not self.dialect.wake:
            with suppress(LockBackendError):
                self._notify(channel, messages)
            return
        try:
            with self.connection.cursor() as cursor:
                cursor.execute(self.dialect.wake, {"channel": channel})
        except Error as error:
            self._unnotified(error)

    def _unnotified(self, error: Error) -> None:
        (number,) = error.args[:1] or (0,)
        # A lost connection is found by the next statement.
        refused = number not in NO_SUCH_SESSION and number < 2000
        if refused and not self._refused:
            self._refused = True
            logger.warning(
                "Waiting callers have to poll, because database %r refuses KILL QUERY,"
                " which notifies them: %s",
                self.database,
                error,
            )

    # Steps.

    def _packet(
        self, sql: str, parameters: Mapping[str, Any], *, often: bool = True
    ) -> Any:
        """Send a step in one round trip.

        ``often`` says whether to prepare the statement on engines that do so. Return
        the rows of the last result, or None if the row is locked.
        """

        def send(connection: BaseDatabaseWrapper, in_transaction: bool) -> Any:
            execute = self._execute if often else self._by_cursor
            try:
                try:
                    return execute(connection, in_transaction, sql, parameters).rows
                except DatabaseError:
                    if connection.vendor == "mysql":
                        # The failed statement may have begun a transaction.
                        with connection.cursor() as cursor:
                            cursor.execute("ROLLBACK")
                    raise
            except Error:
                raise
            except BaseException:
                # The statement was interrupted, perhaps before the rollback.
                if not in_transaction:
                    self.dialect.abort_statement(connection)
                raise

        return self._run(send, locked=lambda: None)

    def _times(self) -> dict[str, int]:
        return {"grace": self._grace, "heard": round(HEARTBEAT_TIMEOUT * MICROSECONDS)}

    def _step(
        self,
        key: str,
        work: Callable[[LockedRow | None], T],
        *,
        busy: Callable[[], T],
        waits: bool = False,
        looks: int = CONTENTION_TRIES,
    ) -> T:
        """Execute a step: lock a key's row and call ``work``, in a transaction.

        ``work`` receives the locked row. It receives None if another transaction has
        locked the row, and still had after ``looks`` attempts. With ``waits``, the step
        first waits in the engine's own queue of the row, if the engine can limit that
        time.

        ``busy`` provides the result if that time has passed, or if SQLite's single
        writer stays busy. It also does so if another transaction has locked a claim
        that the step writes.
        """
        connection = self.connection
        ours = not self.in_transaction()
        tries, looked, reconnected = 0, 0, False
        handled = sys.exc_info()[1]
        while True:
            session = connection.connection
            try:
                with self._briefly(), transaction.atomic(using=self.database):
                    locking = (
                        self.dialect.for_update_in_turn
                        if waits
                        else self.dialect.for_update
                    )
                    return work(
                        self._lock(key, locking, patiently=looked < looks, bounded=ours)
                    )
            except _AbsentError:
                self._create(key)
            except _LockedError:
                looked += 2
                time.sleep(random.uniform(0, 0.0005 * looked**2))  # noqa: S311 (jitter)
            except TableLockedError:
                raise
            except (Error, LockBackendError) as trouble:
                error = (
                    trouble.__cause__
                    if isinstance(trouble, LockBackendError)
                    else trouble
                )
                if not ours or not isinstance(error, (DatabaseError, InterfaceError)):
                    raise
                if is_under_way(connection.connection) and (
                    interrupt := self._find_interrupt(error, handled)
                ):
                    self.dialect.abort_statement(connection)
                    raise interrupt from None
                if isinstance(error, DatabaseError):
                    if self.dialect.is_locked(error):
                        # The statement has already waited for the lock.
                        return busy()
                    if self._again(error, tries):
                        tries += 1
                        continue
                if not reconnected and self._is_left_read_only(connection, error):
                    connection.close()
                    reconnected = True
                    continue
                # If a session was idle in a transaction for too long, PostgreSQL ends
                # it with an InternalError.
                lost = isinstance(error, (OperationalError, InterfaceError))
                self._drop_half_made(connection)
                if not reconnected and (
                    lost
                    or (
                        connection.connection is not None and not connection.is_usable()
                    )
                ):
                    # If the connection was lost within a transaction, Django has
                    # already reconnected.
                    anew = session is None or connection.connection is not session
                    if anew or not connection.is_usable():
                        if not anew:
                            connection.close()
                        reconnected = True
                        continue
                raise self._failure(error) from error

    def _find_interrupt(
        self, error: BaseException | None, handled: BaseException | None
    ) -> BaseException | None:
        """Return the exception that interrupted a COMMIT, or None.

        Django cleans up while the COMMIT is still running. This fails with an error of
        its own, which hides the interrupt. ``handled`` is the exception that the caller
        was already handling. It is in the context of every error.
        """
        connection: Any = self.connection
        while error is not None and error is not handled:
            if not isinstance(error, (Error, connection.Database.Error)):
                return error
            error = error.__context__
        return None

    def _lock(
        self, key: str, locking: str, *, patiently: bool, bounded: bool
    ) -> LockedRow | None:
        dialect = self.dialect
        parameters = {"key": key, **self._times()}
        if dialect.one_writer:
            # The first statement writes, because a transaction that has only read
            # cannot always continue with a write.
            self._count(
                self._text(f"UPDATE {{locks}} SET waiters = waiters WHERE {KEY}"),
                parameters,
            )
        # A process that is stopped in the middle of a step must not keep the key for
        # long. Neither must a process that waits for the row.
        bound = f", {dialect.bound}" if bounded and dialect.bound else ""
        sql = (
            f"SELECT status, owner, version, waiters, shares, CASE WHEN {FREE_BY_CLOCK}"
            f" THEN 1 ELSE 0 END, {dialect.next_version()}, {dialect.ticks}{bound} FROM"
            f" {{locks}} WHERE {KEY}{locking}"
        )
        for (
            status,
            owner,
            version,
            waiters,
            shares,
            free,
            token,
            ticks,
            *_,
        ) in self._rows(self._text(sql), parameters):
            return LockedRow(
                key,
                status,
                owner,
                version,
                waiters,
                shares,
                bool(free),
                int(token),
                int(ticks) / MICROSECONDS,
            )
        if not self._rows(
            self._text(f"SELECT 1{bound} FROM {{locks}} WHERE {KEY}"), parameters
        ):
            raise _AbsentError
        if patiently:
            raise _LockedError
        return None

    def _create(self, key: str) -> None:
        raise NotImplementedError

    def in_transactions(
        self, rows: Sequence[Any], table: str = "{locks}", primary: str = "key_resource"
    ) -> frozenset[Any]:
        raise NotImplementedError

    def holder(self, key: str) -> Holder | None:
        raise NotImplementedError


def _message(owner: str, token: int | None, ends: int) -> str:
    """Return the text of a notification of a grant.

    Without a token, the claim has to retry.
    """
    return owner if token is None else f"{owner} {token} {ends}"


class _LockedError(Exception):
    """A lock row that another transaction has locked at this moment."""


class _StaleError(Exception):
    """A stale key whose claim must not take it over."""


class _AbsentError(Exception):
    """A key without a lock row."""
