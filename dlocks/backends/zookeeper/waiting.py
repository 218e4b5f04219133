"""How waiters watch the node in their way, and learn of their turn."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from dlocks.backends.notifiers import Notifier
from dlocks.backends.zookeeper import requests
from dlocks.backends.zookeeper.claims import SOON, Entry
from dlocks.backends.zookeeper.ensemble import (
    ZookeeperError,
    is_unanswered,
)
from dlocks.backends.zookeeper.maintenance import Maintenance
from dlocks.backends.zookeeper.nodes import queue_of_names
from dlocks.backends.zookeeper.queue import NodeQueue
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.values import Claim, Ticket


class Waiting(Maintenance):
    """The queue of a key, as a waiter sees it."""

    def _join(self, entry: Entry, timeout: float | None = None) -> bool:
        """Create the node of a claim, or find it, and update the claim's state.

        Return False if it is gone.
        """
        with self._mutex:
            # The node was requested before, and the reply was not read.
            unsure = self._entries.get(entry.claim.owner) is entry
            self._entries[entry.claim.owner] = entry
            self._maintain_from()
        until = clock.real_now() + (
            self.ensemble.timeout if timeout is None else timeout
        )
        node_queue: NodeQueue | None = None
        while entry.ticket is None and not entry.gone:
            try:
                if self._base is None:
                    self._base = self._find_base()
                if unsure:
                    self._find(entry)
                    unsure = False
                else:
                    unsure = True
                    node_queue = self._make(entry)
                    unsure = False
            except LockBackendError as error:
                if not is_unanswered(error) or clock.real_now() >= until:
                    raise
        self._see(
            [entry], timeout, {} if node_queue is None else {entry.parent: node_queue}
        )
        if entry.gone:
            # The node may have been created in the next session.
            self._orphan(entry)
        return not entry.gone

    def enqueue(
        self, claim: Claim, channel: str = "", position: int | None = None
    ) -> Ticket | None:
        if claim.scope != "lease":
            return None
        entry = self._entries.get(claim.owner)
        if entry is not None and entry.ending:
            return None
        if entry is None:
            entry = self._entry(claim, waiting=True)
        entry.is_notified = entry.is_notified or bool(channel)
        if entry.ticket is None:
            # A claim that has lost its position is not alone in its thread. The other
            # waiters need their heartbeats meanwhile.
            self._join(entry, None if position is None else SOON)
        if entry.token is not None:
            if position is None:
                self.contended.discard(claim.key)
            return Ticket(grant=self._grant(entry), must_retry=True)
        self.contended.add(claim.key)
        return Ticket(
            must_retry=entry.gone,
            ahead=entry.ahead,
            position=None if entry.gone else entry.number,
        )

    def poll(
        self, claims: Sequence[Claim], *, heartbeat: bool = True
    ) -> Mapping[str, Ticket]:
        entries = [
            entry
            for claim in claims
            if (entry := self._entries.get(claim.owner)) is not None
        ]
        for entry in entries:
            entry.last_seen_at = clock.now()
        self._see(entries, SOON)
        return {
            # A claim without a certain lease has to retry.
            entry.claim.owner: (
                Ticket(position=entry.number, ahead=entry.ahead)
                if entry.token is None
                else Ticket(grant=self._grant(entry), must_retry=True)
            )
            for entry in entries
            if not (entry.gone or entry.ending)
        }

    def waiting(self, key: str) -> int:
        node_queue = self._queue_of(self._parent(key))
        return len(node_queue.tickets) - len(node_queue.granted)

    def notifier(self, channel: str) -> Notifier:
        return Turns(self)

    def turns(self, timeout: float) -> Sequence[Entry]:
        """Wait up to ``timeout`` seconds for events of waiters with a channel.

        Return the claims that were granted, or have lost their node.
        """
        entries = []
        try:
            entries.append(self._turns.get(timeout=timeout))
            while True:
                entries.append(self._turns.get_nowait())
        except queue.Empty:
            pass
        for entry in entries:
            entry.last_seen_at = clock.now()
        self._see(entries, SOON)
        return [entry for entry in entries if entry.token is not None or entry.gone]

    def _see(
        self,
        entries: Iterable[Entry],
        timeout: float | None = None,
        known: Mapping[str, NodeQueue] | None = None,
    ) -> None:
        """Update the state of claims that were not granted yet.

        Each of them then watches the last node in its way.
        """
        pending = {entry for entry in entries if entry.token is None and not entry.gone}
        while pending:
            node_queues, known = dict(known or {}), None
            if parents := list(
                {entry.parent for entry in pending} - node_queues.keys()
            ):
                answers = self.ensemble.ask(
                    *map(requests.children, parents), timeout=timeout
                )
                node_queues |= {
                    parent: queue_of_names(names)
                    for parent, names in zip(parents, answers, strict=True)
                }
            watching = [
                entry
                for entry in pending
                if self._enqueue(entry, node_queues[entry.parent])
            ]
            if not watching:
                return
            reads = [
                requests.read(
                    f"{one.parent}/{one.watched}", partial(self._on_watch, one)
                )
                for one in watching
            ]
            try:
                answers = self.ensemble.ask(*reads, timeout=timeout)
            except BaseException:
                for entry in watching:
                    entry.watched = ""
                raise
            pending = set()
            for entry, answer in zip(watching, answers, strict=True):
                if isinstance(answer, ZookeeperError):
                    # The node was deleted meanwhile.
                    entry.watched = ""
                    pending.add(entry)

    def _enqueue(self, entry: Entry, node_queue: NodeQueue) -> bool:
        """Update a claim from its queue; return whether it must watch another node."""
        with self._mutex:
            if entry.gone or entry.ending:
                return False
            position = node_queue.position(entry.ticket)
            if entry.ticket is None or position is None:
                # Another client has deleted the node.
                self._forget(entry)
                return False
            blocking = node_queue.blocking(entry.ticket)
            if entry.beside is not None and all(
                ticket.identity != entry.beside[1] for ticket in node_queue.tickets
            ):
                # The hold to which it is added was deleted, and another claim may have
                # held the key since.
                return False
            if blocking is None:
                # A claim that is added to a hold of the same caller gets that hold's
                # token, since other claims may have arrived in between.
                self._granted(entry, entry.beside[0] if entry.beside else entry.number)
                entry.watched = ""
                return False
            entry.ahead = position - len(node_queue.granted)
            if not entry.waiting or entry.watched == blocking.name:
                return False
            entry.watched = blocking.name
            return True

    def _on_watch(self, entry: Entry, event: Any) -> None:
        # This runs in kazoo's own thread, when the watched node or the connection is
        # gone.
        if entry.gone:
            return
        entry.watched = ""
        if entry.is_notified:
            self._turns.put(entry)


class Turns(Notifier):
    """A listener for claims whose turn has come."""

    def __init__(self, backend: Waiting) -> None:
        self._backend = backend

    def wait(self, timeout: float) -> bool:
        # The poll sends no request for claims that were granted.
        return bool(self._backend.turns(timeout))

    def close(self) -> None:
        """Do nothing, since the session belongs to the backend."""
