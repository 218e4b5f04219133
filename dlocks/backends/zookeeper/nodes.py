"""The nodes of claims and keys, and what people read in them."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import takewhile
from typing import Any
from urllib.parse import quote

from kazoo.exceptions import NoNodeError
from kazoo.security import OPEN_ACL_UNSAFE

from dlocks.backends.base import Inspector
from dlocks.backends.local_claims import LocalClaims, LocalEntry
from dlocks.backends.zookeeper.ensemble import Ensemble
from dlocks.runtime import clock
from dlocks.values import Holder, Waiter

# The arguments of create_async() for an ephemeral node that the server numbers: acl,
# ephemeral, sequence, makepath, and include_data, which returns the czxid.
NUMBERED = (None, True, True, False, True)


@dataclass(frozen=True, slots=True)
class QueueNode:
    """A node in the queue, in the order of ``place``.

    The server assigns ``number`` in the order of arrival. Its counter starts again if
    the node of the key was deleted. ``beside`` is the identity of the same caller's
    exclusive ticket, if this one is directly behind it.
    """

    name: str
    mark: str
    shared: bool
    number: int
    beside: str
    place: tuple[int, int]

    @property
    def identity(self) -> str:
        return f"{self.number}-{self.mark}"


def parse_name(name: str) -> QueueNode | None:
    """Return the ticket with this name, or None."""
    try:
        mark, kind, beside, digits = name.split(".")
        number = int(digits)
        place = int(beside.rpartition("-")[0]) if beside else number, number
        shared = ("alone", "shared").index(kind) == 1
    except ValueError:
        return None
    return QueueNode(name, mark, shared, number, beside, place)


class NodeQueue:
    """The tickets of one key, in the order of the queue.

    Nodes that are not tickets are ignored.
    """

    def __init__(self, names: Iterable[str] | NoNodeError) -> None:
        names = () if isinstance(names, NoNodeError) else names
        tickets = [ticket for name in names if (ticket := parse_name(name))]
        first = tickets[0].place[0] if tickets else 0
        # The server's counter has 32 bits, and wraps around to negative numbers.
        self.tickets = sorted(
            tickets,
            key=lambda ticket: [
                (number - first + 2**31) % 2**32 for number in ticket.place
            ],
        )
        # The position of each ticket, and the last earlier one that excludes it.
        self.places: dict[str, tuple[int, QueueNode | None]] = {}
        before: QueueNode | None = None
        alone: QueueNode | None = None
        for position, ticket in enumerate(self.tickets):
            blocking = alone if ticket.shared else before
            if blocking is not None and blocking.identity == ticket.beside:
                blocking = None
            self.places[ticket.name] = position, blocking
            before, alone = ticket, alone if ticket.shared else ticket
        # Those at the front, which hold the key.
        self.granted = list(
            takewhile(lambda one: self.places[one.name][1] is None, self.tickets)
        )

    def excludes(self, entry: Entry) -> bool:
        """Return whether a claim would have to wait."""
        if entry.beside is not None:
            return entry.beside.name not in self.places
        return not all(one.shared and entry.claim.shared for one in self.tickets)

    def marked(self, mark: str) -> QueueNode | None:
        """Return the ticket with this mark, or None."""
        return next((ticket for ticket in self.tickets if ticket.mark == mark), None)


@dataclass(slots=True, eq=False)
class Entry(LocalEntry):
    """A claim that has a node, or may have one."""

    # The path of its key's node.
    parent: str = field(kw_only=True)
    # The ticket of the same caller's hold to which it is added.
    beside: QueueNode | None = None
    # Identifies its node. The owner is a secret that proves the hold.
    mark: str = field(default_factory=lambda: secrets.token_hex(16))
    # Whether its node was requested, and the reply was not read.
    is_requested: bool = False
    # Whether the deletion of its node was requested.
    is_deleted: bool = False
    ticket: QueueNode | None = None
    # The token that it gets with its grant. Beside a hold, it is that hold's token,
    # since other claims may have arrived in between.
    number: int = 0
    # Whether its caller has learned of the grant.
    is_collected: bool = False
    last_seen_at: float = field(default_factory=clock.now)
    ahead: int = 0
    # The node that it watches.
    watched: str = ""

    @property
    def path(self) -> str:
        return f"{self.parent}/{self.ticket.name}" if self.ticket else ""


class NodeClaims(LocalClaims[Entry]):
    """The claims of one process in the ensemble."""

    def __init__(self, thread: str, maintain: Callable[[], float | None]) -> None:
        super().__init__(thread, maintain)
        # Unwanted claims whose node may appear until ``ends_at``.
        self.orphans: set[Entry] = set()
        # When there was a claim at last.
        self.used_at = 0.0

    def maintain_from(self, due: float = math.inf) -> None:
        self.used_at = clock.now()
        super().maintain_from(due)


@dataclass(frozen=True)
class Nodes:
    """The nodes under the root."""

    ensemble: Ensemble
    root: str

    def parent(self, key: str) -> str:
        """Return the path of a key's node, whose name is unique and readable."""
        # A name of dots would be a relative path.
        name = quote(key, safe="") if key.strip(".") else key.replace(".", "%2E")
        return f"{self.root}/{name}"

    def queue_of(self, parent: str, timeout: float | None = None) -> NodeQueue:
        return self.queues_of([parent], timeout)[parent]

    def queues_of(
        self, parents: Collection[str], timeout: float | None = None
    ) -> dict[str, NodeQueue]:
        """Return the queues of several keys, by the paths of their nodes."""
        answers = self.ensemble.ask(
            *(("get_children", parent) for parent in parents), timeout=timeout
        )
        return dict(zip(parents, map(NodeQueue, answers), strict=True))

    def read(
        self, parent: str, tickets: Sequence[QueueNode]
    ) -> Iterator[tuple[QueueNode, dict[str, Any], Any]]:
        """Yield the tickets that have a node, what it says of its claim, and its stat.

        Another program may have written something else into it.
        """
        reads = [("get", f"{parent}/{ticket.name}") for ticket in tickets]
        answers = self.ensemble.ask(*reads) if reads else []
        for ticket, answer in zip(tickets, answers, strict=True):
            if not isinstance(answer, NoNodeError):
                data, stat = answer
                known: dict[str, Any] = {}
                with suppress(TypeError, ValueError):
                    known = dict(json.loads(data))
                yield ticket, known, stat

    def add(self, entry: Entry) -> NodeQueue | None:
        """Create the node of a claim, or find it if the reply was lost.

        Return its queue, or None if the claim has a node already, or is gone.
        """
        while entry.ticket is None and not entry.gone:
            add = self._find if entry.is_requested else self._create
            if node_queue := add(entry):
                return node_queue
            entry.is_requested = False
        return None

    def _create(self, entry: Entry) -> NodeQueue | None:
        claim = entry.claim
        kind = "shared" if claim.shared else "alone"
        beside = entry.beside.identity if entry.beside else ""
        # The server adds the number.
        path = f"{entry.parent}/{entry.mark}.{kind}.{beside}."
        data = {"holder": claim.holder, "ip": claim.owner_ip, "waited": entry.waiting}
        entry.is_requested = True
        _, answer, names = self.ensemble.send(
            ("create", entry.parent, claim.key.encode()),
            ("create", path, json.dumps(data).encode(), *NUMBERED),
            ("get_children", entry.parent),
            timeout=self.ensemble.timeout,
        )
        if isinstance(answer, NoNodeError):
            # The root is missing, or another process has just released the key.
            above = self.root.rpartition("/")[0] or "/"
            self.ensemble.ask(
                ("ensure_path", above, OPEN_ACL_UNSAFE), ("create", self.root)
            )
            return None
        return self._note(entry, NodeQueue(names), answer[1].czxid)

    def _find(self, entry: Entry) -> NodeQueue | None:
        node_queue = self.queue_of(entry.parent)
        if (ticket := node_queue.marked(entry.mark)) is None:
            return None
        (stat,) = self.ensemble.ask(("exists", f"{entry.parent}/{ticket.name}"))
        return None if stat is None else self._note(entry, node_queue, stat.czxid)

    @staticmethod
    def _note(entry: Entry, node_queue: NodeQueue, token: int) -> NodeQueue:
        if entry.beside is None:
            entry.number = token
        entry.ticket, entry.is_requested = node_queue.marked(entry.mark), False
        return node_queue

    def delete(self, path: str, timeout: float | None = None) -> bool:
        """Delete a node, and return whether there was one.

        The node of its key is deleted as well, if no other claim has a node under it.
        """
        answers = self.ensemble.send(
            ("delete", path),
            ("delete", path.rpartition("/")[0]),
            timeout=self.ensemble.timeout if timeout is None else timeout,
        )
        return answers[0] is True


def holder_of(key: str, known: Mapping[str, Any], stat: Any) -> Holder:
    """Return the holder that created a node, from what the node says."""
    created = datetime.fromtimestamp(stat.ctime / 1000, UTC)
    return Holder(
        key=key,
        holder=str(known.get("holder") or ""),
        owner_ip=known.get("ip"),
        since=None if known.get("waited", True) else created,
        token=stat.czxid,
    )


class ZooKeeperInspector(Inspector):
    backend: Any

    def sharers(self, key: str) -> tuple[Sequence[Holder], int]:
        return [*self.backend.holders(key, shared=True)], self.backend.waiting(key)

    def waiters(self, key: str, prefix: str) -> Sequence[Waiter]:
        nodes, parent = self.backend.nodes, self.backend.nodes.parent(key)
        queue = nodes.queue_of(parent)
        waiting = [one for one in queue.tickets if one not in queue.granted]
        return [
            Waiter(
                holder=str(known.get("holder") or ""),
                owner_ip=known.get("ip"),
                waits_for=key.removeprefix(prefix),
                waited=max(0.0, time.time() - stat.ctime / 1000),
                shared=ticket.shared,
            )
            for ticket, known, stat in nodes.read(parent, waiting)
        ]
