"""Locks in a ZooKeeper ensemble, with a queue of ephemeral nodes per key.

Every claim is a node under the node of its key. The servers number these nodes in the
order of arrival, and the first one holds the key. A waiter watches only one node, the
last one in its way, so that a release wakes one waiter. The name of a node identifies
its claim. If the reply to its creation is lost, the claim finds its node again by this
name.

A process has one session for all of its claims. The servers end it if they have
received nothing from the process for ``session_timeout``. The lease of a hold is that
of the session, and is counted here from the last contact with the leader of the
ensemble. A lost reply says nothing about the session. Only the servers can report its
end, and then all of its holds are lost at once.

A token is the number of the transaction that created the node (``czxid``). It is
counted from the transaction that created the root, and starts at the time of that
transaction in microseconds. Tokens therefore also grow when an ensemble is set up
again, as long as its leader changes less often than every hour and a quarter on
average. Each change of the leader increases the number by that much.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar

from dlocks.backends.base import HEARTBEAT_TIMEOUT, Backend, refusal_without_rows
from dlocks.backends.notifiers import Notifier, OwnThreadNotifier, RecentKeys
from dlocks.backends.zookeeper import ensemble as zookeeper
from dlocks.backends.zookeeper.ensemble import (
    BadVersionError,
    Ensemble,
    NodeExistsError,
    NoNodeError,
    ZookeeperError,
    collect_hosts,
    is_unanswered,
)
from dlocks.backends.zookeeper.queue import NodeQueue, QueueNode, name_for, node_of
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.process import in_child
from dlocks.values import Claim, Grant, Holder, Message, Ticket, seconds

logger = logging.getLogger("dlocks")

# Seconds for which the keeper and the waiters wait for a reply before they check for
# other work.
SOON = 1.0
# Seconds without a reply of the ensemble after which waiters report the error.
REPLY_TIMEOUT = 10.0
# Seconds for which a thread waits for its turn before it polls.
POLL_EVERY = 5.0
# Fraction of the session timeout after which the session is checked again.
ASKED_AGAIN = 1 / 8
# Seconds for which a session without claims stays open.
IDLE_CLOSE_AFTER = 10.0
# Seconds between two passes of the maintenance thread while there is work.
TEND_EVERY = 0.5


@dataclass(slots=True, eq=False)
class Entry:
    """A claim that has a node, or may have one."""

    claim: Claim
    # The path of its key's node.
    parent: str
    # The token of the hold to which it is added, and the identity of that hold's
    # ticket.
    beside: tuple[int, tuple[int, str]] | None = None
    # Identifies its node. The owner is a secret that proves the hold, so a client that
    # can read the nodes must not see it.
    mark: str = field(default_factory=lambda: secrets.token_hex(16))
    ticket: QueueNode | None = None
    # The token that it gets with its grant.
    number: int = 0
    token: int | None = None
    waiting: bool = False
    # Whether the listening thread reports its turn.
    told: bool = False
    # Released, but its key stays taken until ``ends_at``.
    kept: bool = False
    # It is being released because its time is over. A later reply does not revive it.
    ending: bool = False
    # Removed from all tables. Its node is deleted, or will be.
    gone: bool = False
    count: int = 1
    since: float = 0.0
    ends_at: float = math.inf
    last_seen_at: float = 0.0
    ahead: int = 0
    # The node that it watches, and the event that is set when that node changes.
    watched: str = ""
    stirred: threading.Event = field(default_factory=threading.Event)
    failing_since: float | None = None

    @property
    def path(self) -> str:
        return f"{self.parent}/{self.ticket.name}" if self.ticket else ""


class ZooKeeperBackend(Backend):
    """A backend that keeps locks in a ZooKeeper ensemble.

    ``hosts`` are its servers, such as ``"zk1:2181,zk2:2181,zk3:2181"``. All nodes are
    under ``root``.

    After ``session_timeout`` seconds of silence, the servers end the session of a
    process and its keys become free. The servers may limit this value. A request waits
    for its reply for ``connect_timeout`` seconds, and then raises LockBackendError.
    ``auth`` is ``"user:password"``. With it, only clients with these credentials may
    access the nodes. ``client`` contains further keyword arguments for kazoo's client,
    for example for TLS.
    """

    supports_queue: ClassVar[bool] = True
    supports_sharing: ClassVar[bool] = True

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
        if not isinstance(hosts, str):
            if not isinstance(hosts, Sequence) or not all(
                isinstance(host, str) for host in hosts
            ):
                raise TypeError("hosts must be a string, or a list of strings")
            hosts = ",".join(hosts)
        if "/" in hosts or "@" in hosts:
            raise ValueError(
                "hosts must be like 'zk1:2181,zk2:2181'. Use the option root for a"
                " path, and auth for a password"
            )
        try:
            collect_hosts(hosts)
        except ValueError as error:
            raise ValueError(
                f"hosts must be like 'zk1:2181,zk2:2181', not {hosts!r}: {error}"
            ) from None
        if not isinstance(root, str) or not _is_path(root):
            raise ValueError(
                "root must be a path like '/dlocks', and not '/' or below"
                f" '/zookeeper', not {root!r}"
            )
        if auth is not None and (
            not isinstance(auth, str) or not all(auth.partition(":"))
        ):
            raise ValueError("auth must be like 'user:password'")
        if client is not None and not isinstance(client, Mapping):
            raise TypeError("client must be a dictionary of keywords for KazooClient")
        if unknown := set(client or {}) - zookeeper.KEYWORDS:
            raise ValueError(
                f"client has unknown options {', '.join(sorted(map(str, unknown)))}; it"
                f" accepts {', '.join(sorted(zookeeper.KEYWORDS))}"
            )
        self.root = root
        self.ensemble = Ensemble(
            alias,
            hosts,
            session_timeout=seconds(
                "session_timeout", session_timeout, above_zero=True
            ),
            patience=seconds("connect_timeout", connect_timeout, above_zero=True),
            auth=auth,
            client=dict(client or {}),
            on_lost=self._session_ended,
        )
        self._reset()
        _backends.add(self)

    def _reset(self) -> None:
        # Guards these attributes. It is never held during a request. Code enters this
        # mutex instead of the condition: it is implemented in C, so a signal cannot
        # leave it locked.
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        self._entries: dict[str, Entry] = {}
        self._kept: list[Entry] = []
        # Unwanted claims whose node may still exist or may still be created, and until
        # when.
        self._orphans: dict[Entry, float] = {}
        self._turns: queue.SimpleQueue[Entry] = queue.SimpleQueue()
        # The offset of the tokens.
        self._base: int | None = None
        # Keys that another claim held at the last attempt.
        self.contended: RecentKeys = RecentKeys()
        self._tender: threading.Thread | None = None
        self._tends_at = 0.0
        self._used_at = 0.0
        self._exiting = False

    @property
    def identity(self) -> str:
        return f"zookeeper {','.join(self.ensemble.hosts)} {self.root}"

    @property
    def renew_every(self) -> float:  # type: ignore[override]
        return self.ensemble.session_timeout * ASKED_AGAIN

    # The backend interface.

    def refusal(self, claim: Claim) -> str | None:
        return super().refusal(claim) or refusal_without_rows(self, claim)

    def acquire(self, claim: Claim) -> Grant | None:
        entry = self._entries.get(claim.owner)
        if entry is not None and (entry.waiting or entry.ending):
            return None
        if entry is not None and entry.token is not None:
            certain = (
                self.ensemble.certain_until - clock.now() >= self._lease(claim) / 2
            )
            if not certain and not self.verify([claim], entry.count):
                return self.acquire(claim)
        else:
            if entry is None:
                entry = self._entry(claim)
                if claim.key in self.contended and self._is_busy(entry):
                    return None
            if not self._join(entry):
                # The session has just ended. Retry in the next one.
                return self.acquire(claim)
            if entry.token is not None:
                self.contended.discard(claim.key)
        if (grant := self._grant(entry)) is not None:
            return grant
        self.contended.add(claim.key)
        try:
            self._release_entry(entry, patience=SOON, had=False)
        except LockBackendError as error:
            # The key is known to be busy. The node is deleted later.
            if not is_unanswered(error):
                raise
        return None

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        now = clock.now()
        with self._mutex:
            held = {
                claim.owner: (claim, entry)
                for claim in claims
                if (entry := self._held(claim)) is not None
            }
        if not held:
            return {}
        asked = list(held.values())
        try:
            stats = self.ensemble.ask(
                *(zookeeper.exists(entry.path) for _, entry in asked), patience=SOON / 2
            )
        except LockBackendError as error:
            # The result is unknown, but the rest of each lease is certain.
            if not is_unanswered(error) or self.ensemble.certain_until <= now:
                raise
        else:
            with self._mutex:
                for (claim, entry), stat in zip(asked, stats, strict=True):
                    if stat is None or isinstance(stat, ZookeeperError):
                        self._forget(entry)
                    elif not entry.ending:
                        entry.ends_at = now + claim.ttl
                        self._tend_from(entry)
        return {
            owner: min(entry.ends_at, self.ensemble.certain_until) - now
            for owner, (_, entry) in held.items()
            if not (entry.gone or entry.ending)
        }

    def verify(self, claims: Sequence[Claim], count: int | None = None) -> bool:
        entry = self._held(claims[0])
        if entry is None or count is None:
            return False
        (stat,) = self.ensemble.ask(zookeeper.exists(entry.path))
        if stat is None or entry.gone:
            with self._mutex:
                self._forget(entry)
            return False
        entry.count = count
        return True

    def release(self, claim: Claim, *, failed: bool = False, keep: float = 0.0) -> bool:
        with self._mutex:
            entry = self._entries.get(claim.owner)
            if entry is None:
                return False
            if keep and entry.token is not None:
                del self._entries[claim.owner]
                entry.kept, entry.ends_at = True, clock.now() + keep
                self._kept.append(entry)
                self._tend_from(entry)
                return True
        freed = (
            self._release_entry(entry, had=True)
            if entry.token is not None
            else self._release_entry(entry, patience=SOON)
        )
        self._close_at_exit()
        return freed

    def holder(self, key: str) -> Holder | None:
        for ticket in self._queue_of(self._parent(key)).granted:
            for entry in list(self._entries.values()):
                if entry.ticket == ticket and entry.token is not None:
                    return self._own_holder(entry)
            if any(entry.ticket == ticket for entry in list(self._kept)):
                continue
            (answer,) = self.ensemble.ask(
                zookeeper.read(f"{self._parent(key)}/{ticket.name}")
            )
            if not isinstance(answer, ZookeeperError):
                data, stat = answer
                return self._holder(key, data, stat)
        return None

    def _own_holder(self, entry: Entry) -> Holder:
        remaining = entry.ends_at - clock.now()
        return Holder(
            key=entry.claim.key,
            holder=entry.claim.holder,
            owner_ip=entry.claim.owner_ip,
            since=datetime.fromtimestamp(entry.since, UTC),
            remaining=remaining,
            token=entry.token or 0,
            count=entry.count,
            stale=remaining <= 0,
        )

    def _holder(self, key: str, data: bytes, stat: Any) -> Holder:
        try:
            known = dict(json.loads(data))
        except ValueError:
            known = {}
        waited = known.get("waited", True)
        return Holder(
            key=key,
            holder=str(known.get("holder") or ""),
            owner_ip=known.get("ip"),
            since=None if waited else datetime.fromtimestamp(stat.ctime / 1000, UTC),
            remaining=math.inf,
            token=self._token(stat.czxid),
            count=1,
            stale=False,
        )

    def disconnect(self) -> None:
        """Close the session of this process.

        This releases its holds and cancels its waiters.
        """
        self._session_ended(tell=False)
        self.ensemble.close()
        # Another thread may meanwhile have read it in the session that has ended.
        self._base = None

    # Claims and their nodes.

    def _parent(self, key: str) -> str:
        return f"{self.root}/{node_of(key)}"

    def _entry(self, claim: Claim, *, waiting: bool = False) -> Entry:
        entry = Entry(
            claim, self._parent(claim.key), waiting=waiting, last_seen_at=clock.now()
        )
        beside = (
            self._entries.get(claim.beside) if claim.beside and not waiting else None
        )
        if (
            beside is not None
            and beside.ticket is not None
            and beside.token is not None
        ):
            entry.beside = beside.token, beside.ticket.identity
        return entry

    def _held(self, claim: Claim) -> Entry | None:
        entry = self._entries.get(claim.owner)
        return None if entry is None or entry.token is None or entry.ending else entry

    def _grant(self, entry: Entry) -> Grant | None:
        """Return the grant of a claim, or None if it has no lease.

        It may still be waiting, or its lease may have ended.
        """
        now = clock.now()
        with self._mutex:
            left = self.ensemble.certain_until - now
            if entry.token is None or entry.gone or entry.ending or left <= 0:
                return None
            entry.ends_at = now + entry.claim.ttl
            self._tend_from(entry)
        return Grant(entry.token, left if left < entry.claim.ttl else None)

    def _lease(self, claim: Claim) -> float:
        return min(claim.ttl, self.ensemble.session_timeout * zookeeper.CERTAIN)

    def _queue_of(self, parent: str, patience: float | None = None) -> NodeQueue:
        (names,) = self.ensemble.ask(zookeeper.children(parent), patience=patience)
        return _queue_of(names)

    def _is_busy(self, entry: Entry) -> bool:
        """Return whether other claims are in the way, without creating a node."""
        tickets = self._queue_of(entry.parent).tickets
        if entry.beside is not None:
            return not any(ticket.identity == entry.beside[1] for ticket in tickets)
        return any(not (ticket.shared and entry.claim.shared) for ticket in tickets)

    def _join(self, entry: Entry, patience: float | None = None) -> bool:
        """Create the node of a claim, or find it, and update the claim's state.

        Return False if it is gone.
        """
        with self._mutex:
            # The node was requested before, and the reply was not read.
            unsure = self._entries.get(entry.claim.owner) is entry
            self._entries[entry.claim.owner] = entry
            self._tend_from(entry)
        until = clock.real_now() + (
            self.ensemble.patience if patience is None else patience
        )
        line: NodeQueue | None = None
        while entry.ticket is None and not entry.gone:
            try:
                if self._base is None:
                    self._base = self._find_base()
                if unsure:
                    self._find(entry)
                    unsure = False
                else:
                    unsure = True
                    line = self._make(entry)
                    unsure = False
            except LockBackendError as error:
                if not is_unanswered(error) or clock.real_now() >= until:
                    raise
        self._see([entry], patience, {} if line is None else {entry.parent: line})
        if entry.gone:
            # The node may have been created in the next session.
            self._orphan(entry)
        return not entry.gone

    def _make(self, entry: Entry) -> NodeQueue | None:
        """Create the node of a claim, and return the queue that contains it.

        Return None if only the node of its key was created.
        """
        claim = entry.claim
        name = name_for(
            entry.mark, shared=claim.shared, beside=entry.beside and entry.beside[1]
        )
        data = json.dumps(
            {"holder": claim.holder, "ip": claim.owner_ip, "waited": entry.waiting}
        )
        request = zookeeper.create(
            f"{entry.parent}/{name}", data.encode(), self.ensemble.acl, in_line=True
        )
        answer, names, root = self.ensemble.ask(
            request,
            zookeeper.children(entry.parent),
            zookeeper.read(self.root),
            once=True,
        )
        if isinstance(answer, NoNodeError):
            self._make_parent(entry.parent, claim.key)
            return None
        path, stat = _ok(answer)
        self._note(entry, path.rpartition("/")[2], stat, root)
        return _queue_of(names)

    def _find(self, entry: Entry) -> None:
        """Find the node of a claim if the reply to its creation was lost."""
        if (ticket := self._queue_of(entry.parent).marked(entry.mark)) is not None:
            stat, root = self.ensemble.ask(
                zookeeper.exists(f"{entry.parent}/{ticket.name}"),
                zookeeper.read(self.root),
            )
            if stat is not None:
                self._note(entry, ticket.name, stat, root)

    def _note(self, entry: Entry, name: str, stat: Any, root: Any) -> None:
        if isinstance(root, ZookeeperError) or root[0] != str(self._base).encode():
            # The root was deleted, and another process has created it again.
            self._base = None
        entry.number = self._token(stat.czxid)
        (entry.ticket,) = NodeQueue([name]).tickets

    def _make_parent(self, parent: str, key: str) -> None:
        """Create the node of a key.

        The servers delete it some time after its last use.
        """
        (answer,) = self.ensemble.ask(
            zookeeper.create_container(parent, key.encode(), self.ensemble.acl)
        )
        if isinstance(answer, NoNodeError):
            self._base = self._find_base()
        elif not isinstance(answer, NodeExistsError):
            _ok(answer)

    def _find_base(self) -> int:
        """Return the number that turns a transaction number into a token.

        The token of the transaction that created the root is the time of that
        transaction.
        """
        for number in range(2, self.root.count("/") + 1):
            above = "/".join(self.root.split("/")[:number])
            self.ensemble.ask(zookeeper.create(above, b"", zookeeper.OPEN_ACL_UNSAFE))
        self.ensemble.ask(zookeeper.create(self.root, b"", self.ensemble.acl))
        while True:
            (answer,) = self.ensemble.ask(zookeeper.read(self.root))
            data, stat = _ok(answer)
            if data:
                break
            # After a deletion of the root, this process still knows the earlier tokens.
            base = max(time.time_ns() // 1000 - stat.czxid, self._base or 0)
            (answer,) = self.ensemble.ask(
                zookeeper.write(self.root, str(base).encode(), stat.version)
            )
            if not isinstance(answer, BadVersionError):
                _ok(answer)
        if not data.isdigit():
            raise LockBackendError(
                f"{self.ensemble} has other data in {self.root}. Choose another 'root'."
            )
        return int(data)

    def _token(self, zxid: int) -> int:
        # Another thread may reset it meanwhile.
        if (base := self._base) is None:
            base = self._base = self._find_base()
        return base + zxid

    def _release_entry(
        self, entry: Entry, *, patience: float | None = None, had: bool | None = None
    ) -> bool:
        """Delete the node of a claim, and return whether the claim held the key.

        If ``had`` is None, this is determined from the queue.
        """
        until = clock.real_now() + (
            self.ensemble.patience if patience is None else patience
        )
        sent = False
        try:
            while not entry.gone:
                left = max(0.0, until - clock.real_now())
                try:
                    if had is None or entry.ticket is None:
                        line = self._queue_of(entry.parent, left)
                        entry.ticket = line.marked(entry.mark)
                        had = entry.ticket in line.granted
                    if entry.ticket is None:
                        return False
                    again, sent = sent, True
                    (answer,) = self.ensemble.ask(
                        zookeeper.delete(entry.path), patience=left, once=True
                    )
                    if isinstance(answer, NoNodeError):
                        # The previous request may have deleted it, and its reply was
                        # lost.
                        return had and again
                    _ok(answer)
                    return had
                except LockBackendError as error:
                    if not is_unanswered(error) or clock.real_now() >= until:
                        raise
            # The session has ended, and with it the node.
            return False
        except BaseException:
            self._orphan(entry)
            raise
        finally:
            with self._mutex:
                self._forget(entry)

    def _orphan(self, entry: Entry) -> None:
        with self._mutex:
            self._orphans[entry] = clock.now() + 2 * self.ensemble.session_timeout
            self._tend_from(entry)

    def _forget(self, entry: Entry) -> None:
        """Remove a claim from all tables; the caller holds the mutex."""
        if self._entries.get(entry.claim.owner) is entry:
            del self._entries[entry.claim.owner]
        if entry in self._kept:
            self._kept.remove(entry)
        entry.gone, entry.waiting = True, False
        entry.stirred.set()
        self._used_at = clock.now()

    # Waiting in the queue.

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
        entry.told = entry.told or bool(channel)
        if entry.ticket is None:
            # A claim that has lost its position is not alone in its thread. The other
            # waiters need their heartbeats meanwhile.
            self._join(entry, None if position is None else SOON)
        if entry.token is not None:
            if position is None:
                self.contended.discard(claim.key)
            return Ticket(
                grant=self._grant(entry), must_retry=True, own_thread=not channel
            )
        self.contended.add(claim.key)
        return Ticket(
            must_retry=entry.gone,
            ahead=entry.ahead,
            position=None if entry.gone else 1,
            own_thread=not channel,
        )

    def wait(self, claim: Claim, timeout: float) -> bool:
        """Wait in this thread; return False if the claim has lost its ticket."""
        entry = self._entries.get(claim.owner)
        if entry is None:
            return False
        entry.last_seen_at = math.inf
        try:
            entry.stirred.wait(min(timeout, POLL_EVERY))
            if entry.gone:
                return False
            try:
                self._see([entry], SOON)
                entry.failing_since = None
            except LockBackendError as error:
                # An unknown state is not a loss. The claim keeps its position while the
                # session may exist.
                entry.stirred.set()
                entry.failing_since = entry.failing_since or clock.now()
                if (
                    not is_unanswered(error)
                    or clock.now() - entry.failing_since >= REPLY_TIMEOUT
                ):
                    raise
            return not entry.gone
        finally:
            entry.last_seen_at = clock.now()

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
                Ticket(position=1, ahead=entry.ahead)
                if entry.token is None
                else Ticket(grant=self._grant(entry), must_retry=True)
            )
            for entry in entries
            if not (entry.gone or entry.ending)
        }

    def waiting(self, key: str) -> int:
        line = self._queue_of(self._parent(key))
        return len(line.tickets) - len(line.granted)

    def notifier(self, channel: str) -> Notifier:
        return Turns(self) if channel else OwnThreadNotifier(self.wait)

    def turns(self, timeout: float) -> list[Message]:
        """Wait up to ``timeout`` seconds for events of waiters with a channel.

        Return a message for each claim that was granted.
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
        return [
            Message(owner=entry.claim.owner)
            for entry in entries
            if entry.token is not None
        ]

    def _see(
        self,
        entries: Iterable[Entry],
        patience: float | None = None,
        known: Mapping[str, NodeQueue] | None = None,
    ) -> None:
        """Update the state of claims that were not granted yet.

        Each of them then watches the last node in its way.
        """
        pending = {entry for entry in entries if entry.token is None and not entry.gone}
        while pending:
            for entry in pending:
                entry.stirred.clear()
            lines, known = dict(known or {}), None
            if parents := list({entry.parent for entry in pending} - lines.keys()):
                answers = self.ensemble.ask(
                    *map(zookeeper.children, parents), patience=patience
                )
                lines |= {
                    parent: _queue_of(names)
                    for parent, names in zip(parents, answers, strict=True)
                }
            watching = [
                entry for entry in pending if self._enqueue(entry, lines[entry.parent])
            ]
            if not watching:
                return
            reads = [
                zookeeper.read(
                    f"{one.parent}/{one.watched}", partial(self._on_watch, one)
                )
                for one in watching
            ]
            try:
                answers = self.ensemble.ask(*reads, patience=patience)
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

    def _enqueue(self, entry: Entry, line: NodeQueue) -> bool:
        """Update a claim from its queue; return whether it must watch another node."""
        with self._mutex:
            if entry.gone or entry.ending:
                return False
            place = line.place(entry.ticket)
            if entry.ticket is None or place is None:
                # Another client has deleted the node.
                self._forget(entry)
                return False
            in_the_way = line.in_the_way(entry.ticket)
            if entry.beside is not None and all(
                ticket.identity != entry.beside[1] for ticket in line.tickets
            ):
                # The hold to which it is added was deleted, and another claim may have
                # held the key since.
                return False
            if in_the_way is None:
                # A claim that is added to a hold of the same caller gets that hold's
                # token, since other claims may have arrived in between.
                entry.token = entry.number if entry.beside is None else entry.beside[0]
                entry.waiting, entry.since, entry.watched = False, time.time(), ""
                entry.ends_at = clock.now() + entry.claim.ttl
                self._tend_from(entry)
                return False
            entry.ahead = place - len(line.granted)
            if not entry.waiting or entry.watched == in_the_way.name:
                return False
            entry.watched = in_the_way.name
            return True

    def _on_watch(self, entry: Entry, event: Any) -> None:
        # This runs in kazoo's own thread, when the watched node or the connection is
        # gone.
        if entry.gone:
            return
        entry.watched = ""
        entry.stirred.set()
        if entry.told:
            self._turns.put(entry)

    def _session_ended(self, *, tell: bool = True) -> None:
        """Forget all claims of the session.

        Its holds are lost, and its waiters rejoin the queue.
        """
        with self._mutex:
            entries = [*self._entries.values(), *self._kept]
            lost = [
                entry.claim.owner
                for entry in entries
                if entry.token is not None and not entry.kept
            ]
            for entry in entries:
                self._forget(entry)
            self._orphans.clear()
            self._base = None
        if lost and tell:
            logger.warning(
                "The ZooKeeper session of DLOCKS[%r] ended with %d locks",
                self.alias,
                len(lost),
            )
            self.runtime.on_lost(lost, "the ZooKeeper session that held it has ended")

    # Background maintenance.

    def _tend_from(self, entry: Entry) -> None:
        """Ensure that the maintenance thread releases an entry at its end.

        The caller holds the mutex.
        """
        self._used_at = clock.now()
        if self._exiting:
            return
        if self._tender is None or not self._tender.is_alive():
            self._tender = threading.Thread(
                target=self._tend, name="dlocks-zookeeper", daemon=True
            )
            self._tender.start()
        elif entry.ends_at < self._tends_at:
            self._changed.notify()

    def _tend(self) -> None:
        while True:
            with self._mutex:
                now = clock.now()
                tended = [*self._entries.values(), *self._kept]
                if (
                    not tended
                    and not self._orphans
                    and now >= self._used_at + IDLE_CLOSE_AFTER
                ):
                    self._tender = None
                    # A later claim opens a session of its own.
                    client = self.ensemble.detach()
                    # The ensemble may be replaced while there is no session.
                    self._base = None
                    break
                if now > self._tends_at + HEARTBEAT_TIMEOUT / 2:
                    # This process was stopped, so its waiters could not send
                    # heartbeats.
                    for entry in tended:
                        entry.last_seen_at = max(entry.last_seen_at, now)
                over = [entry for entry in tended if self._ends(entry) <= now]
                orphans = list(self._orphans)
                if not over and not orphans:
                    self._tends_at = min(
                        [self._ends(entry) for entry in tended],
                        default=now + IDLE_CLOSE_AFTER,
                    )
                    self._tends_at = max(now, min(self._tends_at, now + TEND_EVERY))
                    self._changed.wait(self._tends_at - now)
                else:
                    # The next pass detects from this time whether the process was
                    # stopped.
                    self._tends_at = now + TEND_EVERY if orphans else now
            for entry in over:
                self._end(entry)
            for entry in orphans:
                self._delete_node(entry)
            if orphans:
                time.sleep(TEND_EVERY)
            # A reference that is kept during the pause would keep these objects alive.
            del over, orphans, tended
            entry = None  # type: ignore[assignment]
        zookeeper.end(client)

    def _ends(self, entry: Entry) -> float:
        if entry.ticket is None:
            return math.inf
        if entry.waiting:
            return entry.last_seen_at + HEARTBEAT_TIMEOUT
        if entry.kept:
            return entry.ends_at
        return entry.ends_at + self.grace if entry.token is not None else math.inf

    def _end(self, entry: Entry) -> None:
        with self._mutex:
            if entry.gone or self._ends(entry) > clock.now():
                # It was renewed or granted meanwhile, since the process has continued
                # after a stop.
                return
            entry.ending = True
        try:
            self._release_entry(entry, patience=SOON, had=True)
        except LockBackendError as error:
            logger.warning(
                "A claim on %r could not be cancelled yet: %s", entry.claim.key, error
            )

    def _delete_node(self, entry: Entry) -> None:
        """Delete the node that a claim may have left behind."""
        try:
            if (
                found := self._queue_of(entry.parent, SOON).marked(entry.mark)
            ) is not None:
                self.ensemble.ask(
                    zookeeper.delete(f"{entry.parent}/{found.name}"), patience=SOON
                )
        except LockBackendError:
            return
        with self._mutex:
            # If there is no node, its creation may still be on its way.
            if found is not None or clock.now() >= self._orphans.get(entry, 0.0):
                self._orphans.pop(entry, None)

    # The end of the process, and forks.

    def _at_exit(self) -> None:
        # The keeper releases the remaining holds.
        self._exiting = True
        self._close_at_exit()

    def _close_at_exit(self) -> None:
        if self._exiting and not self._entries:
            self.ensemble.close()

    def _forked(self) -> None:
        self.ensemble.abandon()
        self._reset()


class Turns(Notifier):
    """A listener for claims whose turn has come."""

    def __init__(self, backend: ZooKeeperBackend) -> None:
        self._backend = backend

    def wait(self, timeout: float, claims: Sequence[Claim]) -> Sequence[Message]:
        return self._backend.turns(timeout)

    def close(self) -> None:
        """Do nothing, since the session belongs to the backend."""


def _queue_of(names: Any) -> NodeQueue:
    return NodeQueue() if isinstance(names, NoNodeError) else NodeQueue(_ok(names))


def _ok(answer: Any) -> Any:
    if isinstance(answer, ZookeeperError):
        raise LockBackendError(
            f"ZooKeeper rejected a lock request: {type(answer).__name__}."
        ) from answer
    return answer


def _is_path(root: str) -> bool:
    names = root.split("/")[1:]
    return (
        root.startswith("/")
        and all(name.strip(".") and name.isprintable() for name in names)
        and names[0] != "zookeeper"
    )


_backends: weakref.WeakSet[ZooKeeperBackend] = weakref.WeakSet()


def _at_exit() -> None:
    for backend in list(_backends):
        backend._at_exit()


atexit.register(_at_exit)


def _forked() -> None:
    for backend in list(_backends):
        backend._forked()


in_child(_forked)
