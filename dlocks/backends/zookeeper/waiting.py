"""How waiters watch the node in their way, and learn of their turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty
from typing import Any

from kazoo.exceptions import NoNodeError

from dlocks.backends.notifiers import Notifier
from dlocks.backends.zookeeper.claims import Claims
from dlocks.backends.zookeeper.ensemble import SOON
from dlocks.backends.zookeeper.nodes import Entry, NodeQueue
from dlocks.runtime import clock
from dlocks.values import Claim, Ticket


class Waiting(Claims):
    """The queue of a key, as a waiter sees it."""

    def _entry(self, claim: Claim, *, waiting: bool = False) -> Entry:
        entry = Entry(claim, parent=self.nodes.parent(claim.key), waiting=waiting)
        hold = None if waiting else self._entries.get(claim.beside)
        if hold is not None and hold.token is not None:
            entry.beside, entry.number = hold.ticket, hold.token
        return entry

    def _join(self, entry: Entry, timeout: float | None = None) -> bool:
        """Give a claim its node and its state; return False if it is gone."""
        with self._mutex:
            self._entries[entry.claim.owner] = entry
            self._maintain_from()
        node_queue = self.ensemble.retry(lambda _: self.nodes.add(entry), timeout)
        self._see([entry], timeout, {entry.parent: node_queue} if node_queue else None)
        if entry.token is None:
            self.contended.add(entry.claim.key)
        else:
            self.contended.discard(entry.claim.key)
        if entry.gone:
            # The node may have been created in the next session.
            self._orphan(entry)
        return not entry.gone

    def enqueue(
        self, claim: Claim, channel: str = "", position: int | None = None
    ) -> Ticket | None:
        entry = self._entries.get(claim.owner) or self._entry(claim, waiting=True)
        if entry.leaving:
            return None
        entry.is_notified |= bool(channel)
        if entry.ticket is None:
            # Other waiters need the thread of a claim that has lost its position.
            self._join(entry, None if position is None else SOON)
        return self._ticket(entry)

    def poll(
        self, claims: Sequence[Claim], *, heartbeat: bool = True
    ) -> Mapping[str, Ticket]:
        entries = [
            entry for claim in claims if (entry := self._entries.get(claim.owner))
        ]
        self._update(entries)
        return {
            entry.claim.owner: self._ticket(entry)
            for entry in entries
            if not (entry.gone or entry.leaving)
        }

    def _ticket(self, entry: Entry) -> Ticket:
        if entry.token is not None:
            # A claim without a certain lease has to retry.
            return Ticket(grant=self._grant(entry), must_retry=True)
        return Ticket(
            must_retry=entry.gone,
            ahead=entry.ahead,
            position=None if entry.gone else entry.number,
        )

    def waiting(self, key: str) -> int:
        node_queue = self.nodes.queue_of(self.nodes.parent(key))
        return len(node_queue.tickets) - len(node_queue.granted)

    def notifier(self, channel: str) -> Notifier:
        return Turns(self)

    def _update(self, entries: Sequence[Entry]) -> None:
        """Send a heartbeat for waiters, and update their state."""
        for entry in entries:
            entry.last_seen_at = clock.now()
        self._see(entries, SOON)

    def _see(
        self,
        entries: Iterable[Entry],
        timeout: float | None = None,
        queues: Mapping[str, NodeQueue] | None = None,
    ) -> None:
        """Update claims without a grant, which then watch the last node in the way."""
        pending = {entry for entry in entries if entry.token is None and not entry.gone}
        while pending:
            queues = queues or self.nodes.queues_of(
                {entry.parent for entry in pending}, timeout
            )
            watching = [one for one in pending if self._sees(one, queues[one.parent])]
            queues, pending = None, set(watching)
            # exists() would leave a permanent watch on a node that is gone.
            reads = [
                ("get", f"{one.parent}/{one.watched}", partial(self._on_watch, one))
                for one in watching
            ]
            try:
                answers = self.ensemble.ask(*reads, timeout=timeout) if reads else []
                for entry, answer in zip(watching, answers, strict=True):
                    if isinstance(answer, NoNodeError):
                        continue
                    pending.remove(entry)
            finally:
                # Their node was deleted meanwhile, or there is no answer.
                for entry in pending:
                    entry.watched = ""

    def _sees(self, entry: Entry, node_queue: NodeQueue) -> bool:
        """Update a claim, and return whether it must watch another node."""
        with self._mutex:
            if entry.gone or entry.leaving:
                return False
            place = node_queue.places.get(entry.ticket.name) if entry.ticket else None
            if place is None:
                # Another client has deleted the node.
                self._forget(entry)
                return False
            if entry.beside is not None and entry.beside.name not in node_queue.places:
                # That hold was deleted, and another claim may have held the key since.
                return False
            position, blocking = place
            if blocking is None:
                self._granted(entry, entry.number)
                entry.watched = ""
                return False
            entry.ahead = position - len(node_queue.granted)
            if not entry.waiting or entry.watched == blocking.name:
                return False
            entry.watched = blocking.name
            return True

    def _on_watch(self, entry: Entry, event: Any) -> None:
        # In kazoo's own thread, when the watched node or the connection is gone.
        entry.watched = ""
        if entry.is_notified and not entry.gone:
            self._turns.put(entry)


class Turns(Notifier):
    """A listener for claims whose turn has come, or that have lost their node."""

    def __init__(self, backend: Waiting) -> None:
        self._backend = backend

    def wait(self, timeout: float) -> bool:
        turns, entries = self._backend._turns, []
        with suppress(Empty):
            entries.append(turns.get(timeout=timeout))
            while True:
                entries.append(turns.get_nowait())
        # The poll sends no request for claims that were granted.
        self._backend._update(entries)
        return any(entry.token is not None or entry.gone for entry in entries)
