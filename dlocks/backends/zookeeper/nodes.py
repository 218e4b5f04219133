"""The nodes of claims and keys: creation, search and tokens."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from kazoo.exceptions import NoNodeError

from dlocks.backends.local_claims import LocalEntry
from dlocks.backends.zookeeper.ensemble import Ensemble, Request
from dlocks.backends.zookeeper.queue import (
    NodeQueue,
    QueueNode,
    name_for,
    node_of,
    parse_name,
)
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock


@dataclass(slots=True, eq=False)
class Entry(LocalEntry):
    """A claim that has a node, or may have one."""

    # The path of its key's node.
    parent: str = field(kw_only=True)
    # The ticket of the same caller's hold to which it is added.
    beside: QueueNode | None = None
    # Identifies its node. The owner is a secret that proves the hold, so a client that
    # can read the nodes must not see it.
    mark: str = field(default_factory=lambda: secrets.token_hex(16))
    # Whether its node was requested, and the reply was not read.
    is_requested: bool = False
    ticket: QueueNode | None = None
    # The token that it gets with its grant. A claim that is added to a hold gets that
    # hold's token, since other claims may have arrived in between.
    number: int = 0
    # Whether the listening thread reports its turn.
    is_notified: bool = False
    last_seen_at: float = field(default_factory=clock.now)
    ahead: int = 0
    # The node that it watches.
    watched: str = ""

    @property
    def path(self) -> str:
        return f"{self.parent}/{self.ticket.name}" if self.ticket else ""


# The queue of a key, a ticket in it, the state of that node and what the root has.
Found = tuple[NodeQueue, QueueNode | None, Any, Any]


class Nodes:
    """The nodes under the root, and the tokens that belong to their transactions."""

    def __init__(self, ensemble: Ensemble, root: str) -> None:
        self.ensemble = ensemble
        self.root = root

    def parent(self, key: str) -> str:
        return f"{self.root}/{node_of(key)}"

    def queue_of(self, parent: str, timeout: float | None = None) -> NodeQueue:
        return self.queues_of([parent], timeout)[parent]

    def queues_of(
        self, parents: Collection[str], timeout: float | None = None
    ) -> dict[str, NodeQueue]:
        """Return the queues of several keys, by the paths of their nodes."""
        answers = self.ensemble.ask(
            *(("get_children", parent) for parent in parents), timeout=timeout
        )
        return dict(zip(parents, map(_queue, answers), strict=True))

    def add(self, entry: Entry) -> NodeQueue | None:
        """Create the node of a claim, and return the queue that contains it.

        If the reply to its creation was lost, find the node. Return None if the node
        has to be created again.
        """
        if self.ensemble.base is None:
            self.find_base()
        found = self._find(entry) if entry.is_requested else self._create(entry)
        if found is not None:
            ticket, stat, root = found[1:]
            if (
                isinstance(root, NoNodeError)
                or root[0] != str(self.ensemble.base).encode()
            ):
                # The root was deleted, and another process has created it again.
                self.ensemble.base = None
            if entry.beside is None:
                entry.number = self.token(stat.czxid)
            entry.ticket = ticket
        entry.is_requested = False
        return None if found is None else found[0]

    def _create(self, entry: Entry) -> Found | None:
        claim = entry.claim
        path = (
            entry.parent
            + "/"
            + name_for(entry.mark, shared=claim.shared, beside=entry.beside)
        )
        data = {"holder": claim.holder, "ip": claim.owner_ip, "waited": entry.waiting}
        entry.is_requested = True
        answer, names, root = self.ensemble.ask(
            ("create_ticket", path, json.dumps(data).encode(), self.ensemble.acl),
            ("get_children", entry.parent),
            ("get", self.root),
            once=True,
        )
        if not isinstance(answer, NoNodeError):
            path, stat = answer
            return _queue(names), parse_name(path.rpartition("/")[2]), stat, root
        # The servers delete the node of a key some time after its last use.
        (answer,) = self.ensemble.ask(
            ("create_container", entry.parent, claim.key.encode(), self.ensemble.acl)
        )
        if isinstance(answer, NoNodeError):
            self.find_base()
        return None

    def _find(self, entry: Entry) -> Found | None:
        queue = self.queue_of(entry.parent)
        if (ticket := queue.marked(entry.mark)) is None:
            return None
        stat, root = self.ensemble.ask(
            ("exists", f"{entry.parent}/{ticket.name}"), ("get", self.root)
        )
        return None if stat is None else (queue, ticket, stat, root)

    def token(self, zxid: int) -> int:
        # Another thread may reset it meanwhile.
        base = self.ensemble.base
        return zxid + (self.find_base() if base is None else base)

    def find_base(self) -> int:
        """Read ``base`` in the root, which is created if necessary, and return it.

        The token of the transaction that created the root is the time of that
        transaction.
        """
        names = self.root.split("/")
        above = ["/".join(names[:length]) for length in range(2, len(names))]
        creations: list[Request] = [("create", path) for path in above]
        creations.append(("create", self.root, b"", self.ensemble.acl))
        while True:
            *_, answer = self.ensemble.ask(*creations, ("get", self.root))
            if isinstance(answer, NoNodeError):
                continue
            data, stat = answer
            if data:
                break
            # After a deletion of the root, this process still knows the earlier tokens.
            base = max(time.time_ns() // 1000 - stat.czxid, self.ensemble.base or 0)
            self.ensemble.ask(("set", self.root, str(base).encode(), stat.version))
        if not data.isdigit():
            raise LockBackendError(
                f"{self.ensemble} has other data in {self.root}. Choose another 'root'."
            )
        self.ensemble.base = int(data)
        return self.ensemble.base


def _queue(names: Any) -> NodeQueue:
    return NodeQueue() if isinstance(names, NoNodeError) else NodeQueue(names)
