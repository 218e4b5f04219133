"""Joining of the queue, alone or together with other threads."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from dlocks.backends.database.admission import Admission
from dlocks.backends.database.batcher import QueueBatcher, QueueRequest
from dlocks.backends.database.fragments import IN_QUEUE
from dlocks.backends.database.rows import MINE, Granted, LockedRow
from dlocks.exceptions import LockBackendError
from dlocks.values import Claim, Grant, Ticket

# Attempts to queue a claim in one round trip while other callers have locked the lock
# row.
QUEUE_TRIES = 3

# Seconds for which a thread waits while another thread of its process joins the queue.
BATCHER_TIMEOUT = 1.0


class Joining(Admission):
    """The part that inserts claims into the queue of their key.

    If another transaction has locked the row, a claim joins the queue without being
    counted in ``waiters``. A later heartbeat counts it.
    """

    _batcher: QueueBatcher

    def enqueue(
        self, claim: Claim, channel: str = "", position: int | None = None
    ) -> Ticket | None:
        self._refuse_unstorable(claim.key)
        self._contended_keys.add(claim.key)
        if position is not None:
            return self._queue(claim, channel, position)
        mine, batcher = QueueRequest(claim, channel), self._batcher_here()
        try:
            # One thread at a time. A thousand simultaneous threads would block the row
            # for the holder that has to release it.
            batcher.waiting.append(mine)
            if not batcher.turn.acquire(timeout=BATCHER_TIMEOUT):
                # The other thread hangs, for example on a dead connection. Or it was
                # interrupted before it released the mutex.
                if self._batcher is batcher:
                    self._batcher = QueueBatcher()
                batcher.forget(mine)
                batcher = self._batcher
                batcher.waiting.append(mine)
                batcher.turn.acquire(timeout=BATCHER_TIMEOUT)
            if mine.ticket is None:
                batch = batcher.with_others(mine)
                if self.dialect.queue and not self.in_transaction():
                    self._queue_together(batch)
            if mine.ticket is None:
                mine.ticket = self._queue(claim, channel, None)
            if mine.ticket is None and self.dialect.queue:
                # The claim may have been queued and granted without a known result, so
                # it retries. If it was neither, ``silent`` makes the background thread
                # poll soon.
                mine.ticket = replace(MINE, unnotified=True)
            return mine.ticket
        except BaseException:
            batcher.forget(mine)
            raise
        finally:
            mine.gone = True
            try:  # noqa: SIM105 (a signal within suppress() would leave the mutex locked)
                batcher.turn.release()
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
        tickets = dict(rows)
        for one in batch:
            ticket = tickets.get(one.claim.owner)
            if one.leader is leader and not one.gone:
                one.ticket = ticket
                one.alone = True
            elif ticket is not None and (
                one.ticket is None or one.ticket.position != ticket.position
            ):
                # This took so long that the thread has joined the queue by itself, or
                # it was interrupted. No caller waits at this position.
                self._take_out(one.claim.key, ticket)

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
                    (owner, Ticket(position=position)) for owner, position, _ in rows
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
        silent = not self.dialect.commit_notifies
        return [
            (owner, Ticket(position=number, unnotified=silent))
            for owner, number in self._rows(sql, parameters)
        ]

    def _take_out(self, key: str, ticket: Ticket) -> None:
        def step(head: LockedRow | None) -> None:
            sql = self._text(
                f"{self.dialect.patiently}DELETE FROM {{claims}} WHERE id = %(number)s"
                f" AND {IN_QUEUE}"
            )
            self._count(sql, {"number": ticket.position})
            self._recount_waiters(head)

        # If this fails, the position is skipped because it gets no heartbeat.
        with suppress(LockBackendError):
            self._step(key, step, busy=lambda: None)

    def _queue(self, claim: Claim, channel: str, number: int | None) -> Ticket | None:
        def step(head: LockedRow | None) -> tuple[Ticket, list[Granted]]:
            if head is not None and head.owner == claim.owner and not head.free:
                # The claim was queued, and its turn has come.
                return MINE, []
            row = self._row_of(claim)
            if row is None and head is not None and self._is_first(head, claim):
                self._contended_keys.discard(claim.key)
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
            position, version, left = row
            if version is not None:
                return Ticket(grant=Grant(version, left)), []
            if head is None:
                return Ticket(
                    position=position, unnotified=not self.dialect.commit_notifies
                ), []
            return Ticket(position=position), self._admit(head)

        result = self._step(claim.key, step, busy=lambda: None)
        if result is None:
            return None
        ticket, granted = result
        return next(
            (
                replace(one.ticket, position=ticket.position)
                for one in granted
                if one.owner == claim.owner
            ),
            ticket,
        )
