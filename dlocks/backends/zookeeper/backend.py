"""Locks in a ZooKeeper ensemble, with a queue of ephemeral nodes per key.

1. A claim creates an ephemeral node under the node of its key, which it creates as
   well. The servers number these nodes in the order of arrival.
2. A claim holds the key if no earlier node excludes it. Its token is the number of the
   transaction that created its node (``czxid``).
3. A waiter watches only the last node in its way, so a release wakes one waiter.
4. A release deletes the node of the claim, and that of the key if it is empty.
5. A process has one session for all of its claims. The servers delete their nodes
   after ``session_timeout`` without a request. A lease is certain for two thirds of
   that time after a contact with the leader, which every request is.
6. Each node has a random mark in its name, by which a request whose reply was lost is
   found again. A claim that could not be cancelled is cancelled later.
7. A thread deletes the nodes of expired leases, and of waiters without a heartbeat.

The nodes of keys stay after the end of a session. ``reap()`` deletes those.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress
from queue import Empty, SimpleQueue
from typing import Any, ClassVar
from urllib.parse import unquote

from django.views.decorators.debug import sensitive_variables
from kazoo.exceptions import NoNodeError
from kazoo.hosts import collect_hosts

from dlocks.backends.base import HEARTBEAT_TIMEOUT, Backend
from dlocks.backends.local_claims import refusal_of
from dlocks.backends.notifiers import Notifier
from dlocks.backends.zookeeper.ensemble import SOON, Ensemble, end, is_unanswered
from dlocks.backends.zookeeper.nodes import (
    Entry,
    NodeClaims,
    NodeQueue,
    Nodes,
    ZooKeeperInspector,
    holder_of,
)
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.process import each_in_child
from dlocks.values import Claim, Grant, Holder, Ticket, seconds

logger = logging.getLogger("dlocks")

# Seconds for which a session without claims stays open.
IDLE_CLOSE_AFTER = 10.0
# Seconds between two passes of the maintenance thread.
MAINTAIN_EVERY = 0.5


class ZooKeeperBackend(Backend):
    """A backend that keeps locks in a ZooKeeper ensemble.

    ``hosts`` are its servers, such as ``"zk1:2181,zk2:2181,zk3:2181"``. All nodes are
    under ``root``.

    The keys of a process become free after ``session_timeout`` seconds of silence,
    which the servers may limit. A request waits ``connect_timeout`` seconds for its
    reply. ``auth`` is ``"user:password"``, and then protects the nodes. ``client`` has
    further arguments for kazoo's client.
    """

    supports_queue: ClassVar[bool] = True
    supports_sharing: ClassVar[bool] = True
    unlisted = ""

    # Errors must not show the password.
    @sensitive_variables()
    def __init__(
        self,
        alias: str,
        *,
        hosts: str | Sequence[str] = "127.0.0.1:2181",
        root: str = "/dlocks",
        session_timeout: float = 10.0,
        connect_timeout: float = 5.0,
        auth: str | None = None,
        client: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(alias, **options)
        hosts = [hosts] if isinstance(hosts, str) else hosts
        if not (isinstance(hosts, Sequence) and all(isinstance(x, str) for x in hosts)):
            raise TypeError("hosts must be a string, or a list of strings")
        hosts = ",".join(hosts)
        wrong = "hosts must be like 'zk1:2181,zk2:2181'"
        if "/" in hosts or "@" in hosts:
            raise ValueError(
                f"{wrong}. Use the option root for a path, and auth for a password"
            )
        try:
            servers, _ = collect_hosts(hosts)
        except ValueError as error:
            raise ValueError(f"{wrong}, not {hosts!r}: {error}") from None
        start, *names = root.split("/") if isinstance(root, str) else [""]
        named = all(name.strip(".") and name.isprintable() for name in names)
        if start or not named or names[:1] in ([], ["zookeeper"]):
            raise ValueError(
                "root must be a path like '/dlocks', and not '/' or below"
                f" '/zookeeper', not {root!r}"
            )
        if auth is not None and not (
            isinstance(auth, str) and all(auth.partition(":"))
        ):
            raise ValueError("auth must be like 'user:password'")
        self.root = root
        timeout = seconds("session_timeout", session_timeout, above_zero=True)
        self.renew_every = timeout / 8
        self.ensemble = Ensemble(
            alias,
            sorted(f"{host}:{port}" for host, port in servers),
            timeout,
            seconds("connect_timeout", connect_timeout, above_zero=True),
            auth,
            {} if client is None else client,
            self._session_ended,
        )
        self.nodes = Nodes(self.ensemble, root)
        self.inspector = ZooKeeperInspector(self)
        self._reset()
        all_backends.add(self)

    @property
    def identity(self) -> str:
        return f"zookeeper {','.join(self.ensemble.hosts)} {self.root}"

    def _reset(self) -> None:
        self.claims = NodeClaims("dlocks-zookeeper", self._maintain)
        self.contended = self.claims.contended
        self._turns: SimpleQueue[Entry] = SimpleQueue()

    def refusal(self, claim: Claim) -> str | None:
        return super().refusal(claim) or refusal_of(self, claim)

    # The backend interface.

    def acquire(self, claim: Claim) -> Grant | None:
        entry = self.claims.entries.get(claim.owner)
        if entry is None:
            entry = self._entry(claim)
            # Without a node of its own, as long as the key is busy.
            contended = claim.key in self.claims.contended
            if contended and self.nodes.queue_of(entry.parent).excludes(entry):
                return None
        elif entry.waiting or entry.leaving:
            return None
        if entry.token is None:
            stands = self._join(entry)
        else:
            left = self.ensemble.certain_until - clock.now()
            lease = min(claim.ttl, self.ensemble.lease)
            stands = left >= lease / 2 or self.verify([claim], entry.count)
        if not stands:
            # The session has just ended. Retry in the next one.
            return self.acquire(claim)
        if grant := self._grant(entry):
            return grant
        # The key is busy. If this fails, the node is deleted later.
        entry.leaving = True
        with suppress(LockBackendError):
            self._release_entry(entry, timeout=SOON)
        return None

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        now = clock.now()
        held = [(claim, entry) for claim in claims if (entry := self._held(claim))]
        if not held:
            return {}
        try:
            self._check([entry for _, entry in held], SOON / 2)
        except LockBackendError as error:
            # The result is unknown, but the rest of each lease is certain.
            if not is_unanswered(error) or self.ensemble.certain_until <= now:
                raise
        else:
            with self.claims.mutex:
                for claim, entry in held:
                    # A key that was released meanwhile must not rest for longer.
                    if entry.gone or entry.leaving or entry.resting:
                        continue
                    entry.ends_at = now + claim.ttl
                    self.claims.maintain_from(entry.ends_at)
        return {
            claim.owner: min(
                entry.ends_at - now, self.ensemble.certain_until - now, claim.ttl
            )
            for claim, entry in held
            if not (entry.gone or entry.leaving or entry.resting)
        }

    def verify(self, claims: Sequence[Claim], count: int | None = None) -> bool:
        entry = self._held(claims[0])
        if entry is None or count is None:
            return False
        self._check([entry])
        entry.count = count
        return not entry.gone

    def _check(self, entries: Sequence[Entry], timeout: float | None = None) -> None:
        """Forget the claims whose node was deleted."""
        requests = [("exists", entry.path) for entry in entries]
        stats = self.ensemble.ask(*requests, timeout=timeout)
        with self.claims.mutex:
            for entry, stat in zip(entries, stats, strict=True):
                # Its own release may have deleted it, which is no loss.
                if stat is not None or entry.is_deleted:
                    continue
                self.claims.forget(entry)

    def release(
        self, claim: Claim, *, failed: bool = False, rest_for: float = 0.0
    ) -> bool:
        entry = self.claims.entries.get(claim.owner)
        if entry is None:
            return False
        if rest_for and entry.token is not None:
            try:
                # Another client may have deleted its node.
                self._check([entry])
            finally:
                with self.claims.mutex:
                    if not (entry.gone or entry.expired):
                        self.claims.rest(entry, rest_for)
            return entry.resting
        timeout = SOON if entry.token is None else None
        return self._release_entry(entry, timeout=timeout) and not entry.expired

    def holder(self, key: str) -> Holder | None:
        return next(self.holders(key), None)

    def holders(self, key: str, *, shared: bool = False) -> Iterator[Holder]:
        """Yield the holders of a key, or those that share it."""
        parent = self.nodes.parent(key)
        granted = self.nodes.queue_of(parent).granted
        tickets = [ticket for ticket in granted if ticket.shared or not shared]
        found = list(self.nodes.read(parent, tickets))
        with self.claims.mutex:
            own = dict(
                (entry.ticket, entry) for entry in self.claims.all() if entry.token
            )
        for ticket, known, stat in found:
            if (entry := own.get(ticket)) is None:
                yield holder_of(key, known, stat)
            elif not entry.resting:
                yield entry.as_holder()

    def keys(self) -> list[str]:
        queues = self._queues()
        return [key for key, node_queue in queues.items() if node_queue.granted]

    def _queues(self) -> dict[str, NodeQueue]:
        """Return the queues of all keys under the prefix."""
        (names,) = self.ensemble.ask(("get_children", self.root))
        if isinstance(names, NoNodeError):
            return {}
        prefix = self.prefix
        keys = [key for key in map(unquote, names) if key.startswith(prefix)]
        parents = [*map(self.nodes.parent, keys)]
        return dict(zip(keys, self.nodes.queues_of(parents).values(), strict=True))

    def clear(self, key: str, version: int, *, stale_only: bool = False) -> bool:
        parent = self.nodes.parent(key)
        granted = self.nodes.queue_of(parent).granted
        for ticket, _, stat in self.nodes.read(parent, granted):
            if stat.czxid == version:
                return self.nodes.delete(f"{parent}/{ticket.name}")
        return False

    def reap(self, *, dry_run: bool = False) -> int:
        """Delete the nodes of keys without claims, and return their number."""
        unused = [key for key, one in self._queues().items() if not one.tickets]
        if dry_run:
            return len(unused)
        # The servers do not delete the node of a key that has a claim meanwhile.
        requests = [("delete", self.nodes.parent(key)) for key in unused]
        return self.ensemble.ask(*requests).count(True)

    # The queue.

    def enqueue(
        self, claim: Claim, channel: str = "", position: int | None = None
    ) -> Ticket | None:
        entry = self.claims.entries.get(claim.owner) or self._entry(claim, waiting=True)
        if entry.leaving:
            return None
        if entry.ticket is None:
            # Other waiters need the thread of a claim that has lost its position.
            self._join(entry, None if position is None else SOON)
        return self._ticket(entry)

    def poll(
        self, claims: Sequence[Claim], *, heartbeat: bool = True
    ) -> Mapping[str, Ticket]:
        found = map(self.claims.entries.get, [claim.owner for claim in claims])
        # One without a ticket may have a node, which it finds when it queues again.
        entries = [entry for entry in found if entry is not None and entry.ticket]
        self._update(entries)
        return {
            entry.claim.owner: self._ticket(entry)
            for entry in entries
            if not (entry.gone or entry.leaving)
        }

    def _ticket(self, entry: Entry) -> Ticket:
        if entry.token is not None:
            # Its lease begins when its caller learns of it. No later poll renews it.
            begins, entry.is_collected = not entry.is_collected, True
            # A claim without a certain lease has to retry.
            return Ticket(grant=self._grant(entry, begins=begins), must_retry=True)
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
            queues = None
            # exists() would leave a permanent watch on a node that is gone.
            reads = [
                ("get", f"{one.parent}/{one.watched}", partial(self._on_watch, one))
                for one in watching
            ]
            pending = set(watching)
            try:
                answers = self.ensemble.ask(*reads, timeout=timeout) if reads else []
                there = [not isinstance(answer, NoNodeError) for answer in answers]
                pending -= set(compress(watching, there))
            finally:
                # Their node was deleted meanwhile, or there is no answer.
                for entry in pending:
                    entry.watched = ""

    def _sees(self, entry: Entry, node_queue: NodeQueue) -> bool:
        """Update a claim, and return whether it must watch another node."""
        with self.claims.mutex:
            if entry.gone or entry.leaving:
                return False
            place = node_queue.places.get(entry.ticket.name) if entry.ticket else None
            if place is None:
                # Another client has deleted the node.
                self.claims.forget(entry)
                return False
            if entry.beside is not None and entry.beside.name not in node_queue.places:
                # That hold was deleted, and another claim may have held the key since.
                return False
            position, blocking = place
            if blocking is None:
                self.claims.granted(entry, entry.number)
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
        if not entry.gone:
            self._turns.put(entry)

    # The claims.

    def _entry(self, claim: Claim, *, waiting: bool = False) -> Entry:
        entry = Entry(claim, parent=self.nodes.parent(claim.key), waiting=waiting)
        hold = None if waiting else self.claims.entries.get(claim.beside)
        if hold is not None and hold.token is not None:
            entry.beside, entry.number = hold.ticket, hold.token
        return entry

    def _join(self, entry: Entry, timeout: float | None = None) -> bool:
        """Give a claim its node and its state; return False if it is gone."""
        with self.claims.mutex:
            self.claims.entries[entry.claim.owner] = entry
            self.claims.maintain_from()
        try:
            self.claims.start_maintenance()
            queue = self.ensemble.retry(lambda _: self.nodes.add(entry), timeout)
            self._see([entry], timeout, {entry.parent: queue} if queue else None)
        finally:
            if entry.gone:
                # The node may have been created in the next session.
                self._orphan(entry)
        if entry.token is None:
            self.claims.contended.add(entry.claim.key)
        else:
            self.claims.contended.discard(entry.claim.key)
        return not entry.gone

    def _held(self, claim: Claim) -> Entry | None:
        entry = self.claims.entries.get(claim.owner)
        return None if entry is None or entry.token is None or entry.leaving else entry

    def _grant(self, entry: Entry, *, begins: bool = True) -> Grant | None:
        """Return the grant of a claim, or None if it waits or has no lease.

        ``begins`` says that its lease begins now.
        """
        now = clock.now()
        with self.claims.mutex:
            left = self.ensemble.certain_until - now
            if not begins:
                left = min(left, entry.ends_at - now)
            if entry.token is None or entry.gone or entry.leaving or left <= 0:
                return None
            if begins:
                entry.ends_at = now + entry.claim.ttl
            self.claims.maintain_from(entry.ends_at)
        return Grant(entry.token, left if left < entry.claim.ttl else None)

    def _release_entry(self, entry: Entry, *, timeout: float | None = None) -> bool:
        """Delete the node of a claim, and return whether the claim held the key."""
        try:
            # The node of a claim that is gone ended with its session.
            return self.ensemble.retry(
                lambda left: not entry.gone and self._delete(entry, left), timeout
            )
        except BaseException:
            self._orphan(entry)
            raise
        finally:
            with self.claims.mutex:
                self.claims.forget(entry)

    def _delete(self, entry: Entry, timeout: float) -> bool:
        if entry.ticket is None or (entry.token is None and not entry.leaving):
            node_queue = self.nodes.queue_of(entry.parent, timeout)
            entry.ticket = node_queue.marked(entry.mark)
            if entry.ticket is None:
                return False
            entry.leaving = True
            if entry.ticket in node_queue.granted:
                entry.token = entry.number
        again, entry.is_deleted = entry.is_deleted, True
        had = self.nodes.delete(entry.path, timeout)
        # The previous request may have deleted it, and its reply was lost.
        return (had or again) and entry.token is not None

    def _orphan(self, entry: Entry) -> None:
        with self.claims.mutex:
            entry.ends_at = clock.now() + 2 * self.ensemble.session_timeout
            self.claims.orphans.add(entry)
            self.claims.maintain_from()
        self.claims.start_maintenance()

    # The session.

    def _session_ended(self) -> None:
        """Forget all claims. Waiters rejoin the queue."""
        with self.claims.mutex:
            entries = self.claims.all()
            for entry in entries:
                self.claims.forget(entry)
            self.claims.orphans.clear()
        held = [one for one in entries if one.token is not None and not one.resting]
        if held:
            report = "The ZooKeeper session of DLOCKS[%r] ended with %d locks"
            logger.warning(report, self.alias, len(held))
            owners = [entry.claim.owner for entry in held]
            self.runtime.on_lost(owners, "the ZooKeeper session that held it has ended")

    def _forked(self) -> None:
        self.ensemble.abandon()
        self._reset()

    # The maintenance thread.

    def _maintain(self) -> float | None:
        """Release expired claims, and return the seconds until the next pass.

        Return None if this thread has ended its work.
        """
        with self.claims.mutex:
            now = clock.now()
            entries = self.claims.all()
            orphans = list(self.claims.orphans)
            if entries or orphans:
                self.claims.used_at = now
            idle = now >= self.claims.used_at + IDLE_CLOSE_AFTER
            if idle:
                self.claims.maintainer.end()
                # A later claim opens a session of its own.
                client = self.ensemble.detach()
            if now > self.claims.maintains_at + HEARTBEAT_TIMEOUT / 2:
                # This process was stopped, so its waiters could not send heartbeats.
                for entry in entries:
                    entry.last_seen_at = max(entry.last_seen_at, now)
            over = list(entry for entry in entries if self._ends(entry) <= now)
            # The next pass detects from this time whether the process was stopped.
            soon = min([now + MAINTAIN_EVERY, *map(self._ends, entries)])
            self.claims.maintains_at = max(now, soon)
        if idle:
            end(client)
            return None
        for entry in over:
            self._end(entry)
        for entry in orphans:
            self._delete_orphan(entry)
        return self.claims.maintains_at - clock.now()

    def _ends(self, entry: Entry) -> float:
        if entry.ticket is None:
            return math.inf
        if entry.waiting:
            return entry.last_seen_at + HEARTBEAT_TIMEOUT
        return entry.ends_at if entry.resting else entry.ends_at + self.grace

    def _end(self, entry: Entry) -> None:
        with self.claims.mutex:
            if entry.gone or self._ends(entry) > clock.now():
                # It was renewed or granted meanwhile.
                return
            entry.leaving = entry.expired = True
        try:
            self._release_entry(entry, timeout=SOON)
        except LockBackendError as error:
            logger.warning(
                "A claim on %r could not be cancelled yet: %s", entry.claim.key, error
            )

    def _delete_orphan(self, entry: Entry) -> None:
        entry.ticket = None
        with suppress(LockBackendError):
            self._delete(entry, SOON)
            # If there is no node, its creation may still be on its way.
            if entry.ticket is not None or clock.now() >= entry.ends_at:
                with self.claims.mutex:
                    self.claims.orphans.discard(entry)


all_backends = each_in_child(ZooKeeperBackend._forked)


class Turns(Notifier):
    """A listener for claims whose turn has come, or that have lost their node."""

    def __init__(self, backend: ZooKeeperBackend) -> None:
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
