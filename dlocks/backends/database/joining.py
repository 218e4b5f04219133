"""Joining of the queue of a key."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from dataclasses import replace

from dlocks.backends import table
from dlocks.backends.database.admission import Admission
from dlocks.backends.database.rows import MINE, LockedRow
from dlocks.values import Claim, Grant, Ticket

# Attempts to queue a claim in one round trip while other callers have locked the lock
# row.
QUEUE_TRIES = 3

# Seconds for which a thread waits while another thread of its process joins a queue.
JOINING_TIMEOUT = 1.0


class Joining(Admission):
    """The part that inserts claims into the queue of their key.

    If another transaction has locked the row, a claim joins the queue without being
    counted in ``waiters``. A later heartbeat counts it.
    """

    # The process that uses the mutex, and the mutex.
    _joining: tuple[int, threading.RLock] | None = None

    def enqueue(
        self, claim: Claim, channel: str = "", position: int | None = None
    ) -> Ticket | None:
        self._refuse_unstorable(claim.key)
        self._contended_keys.add(claim.key)
        if position is not None:
            return self._queue(claim, channel, position)
        # One thread at a time. A thousand simultaneous threads would block the row for
        # the holder that has to release it.
        mutex = self._joining_mutex()
        try:
            if not mutex.acquire(timeout=JOINING_TIMEOUT):
                # The other thread hangs, for example on a dead connection. No further
                # thread waits for it.
                self._joining = None
            return self._join(claim, channel)
        finally:
            try:  # noqa: SIM105 (a signal within suppress() would leave the mutex locked)
                mutex.release()
            except RuntimeError:
                # The RLock itself knows whether this thread holds it, even after an
                # interrupt.
                pass

    def _joining_mutex(self) -> threading.RLock:
        if (joining := self._joining) is None or joining[0] != os.getpid():
            # A thread of the parent may have held the parent's mutex during the fork.
            joining = self._joining = os.getpid(), threading.RLock()
        return joining[1]

    def _join(self, claim: Claim, channel: str) -> Ticket | None:
        ticket: Ticket | None = None
        if self.dialect.queue and not self.in_transaction():
            ticket = self._queue_at_once(claim, channel)
        if ticket is None:
            ticket = self._queue(claim, channel, None)
        if ticket is None and self.dialect.queue:
            # The claim may have been queued and granted without a known result, so it
            # retries. If it was neither, the background thread has to poll soon.
            ticket = replace(MINE, unnotified=True)
        return ticket

    def _queue_at_once(self, claim: Claim, channel: str) -> Ticket | None:
        """Queue and count a claim in one round trip, while the key is held.

        Return None if the key is free. Then the queue has to advance.
        """
        names, values, parameters = self._columns(claim, channel, None, counted=True)
        sql = self.dialect.queue.replace("{columns}", names).replace("{values}", values)
        sql = self._text(sql)
        for number_of_try in range(QUEUE_TRIES):
            rows = self._packet(sql, parameters)
            if rows is None:
                break
            if not rows or rows[0][1]:
                return None
            if (position := rows[0][0]) is not None:
                return Ticket(position=position)
            time.sleep(random.uniform(0, 0.001 * 2**number_of_try))  # noqa: S311 (jitter)
        return self._queue_uncounted(claim, channel)

    def _queue_uncounted(
        self, claim: Claim, channel: str, number: int | None = None
    ) -> Ticket | None:
        """Queue a claim without counting it. A later heartbeat counts it."""
        self._insert_claim(claim, channel, number)
        if (row := self._row_of(claim)) is None:
            return None
        position, version, left = row
        if version is not None:
            return Ticket(grant=Grant(version, left))
        return Ticket(position=position, unnotified=not self.dialect.commit_notifies)

    def _queue(self, claim: Claim, channel: str, number: int | None) -> Ticket | None:
        def step(row: LockedRow | None) -> Ticket | None:
            if row.is_held_by(claim) if row else self._holds_key(claim):
                # The claim was queued, and its turn has come.
                return MINE
            if row is None:
                return self._queue_uncounted(claim, channel, number)
            position = number or sys.maxsize
            ticket, granted = self._apply(
                row, table.enqueue, claim, position, channel=channel, number=number
            )
            if claim.owner in granted:
                return granted[claim.owner]
            mine = self._row_of(claim) if ticket.grant is None else None
            return ticket if mine is None else Ticket(position=mine[0])

        return self._step(claim.key, step, busy=lambda: None)
