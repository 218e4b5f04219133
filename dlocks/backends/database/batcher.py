"""The order in which the threads of a process join the queues."""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress

from dlocks.values import Claim, Ticket

# Maximum number of claims of a process that join the queue in one round trip.
CLAIMS_PER_ROUND_TRIP = 100


class QueueRequest:
    """A claim that is joining the queue, by its own thread or by another one."""

    def __init__(self, claim: Claim, channel: str) -> None:
        self.claim = claim
        self.channel = channel
        self.ticket: Ticket | None = None
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
