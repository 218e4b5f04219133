"""The nodes of claims and keys: creation, search, deletion and tokens."""

from __future__ import annotations

import json
import time
from typing import Any

from dlocks.backends.zookeeper import ensemble as zookeeper
from dlocks.backends.zookeeper import requests
from dlocks.backends.zookeeper.claims import ClaimTables, Entry
from dlocks.backends.zookeeper.ensemble import (
    BadVersionError,
    NodeExistsError,
    NoNodeError,
    ZookeeperError,
)
from dlocks.backends.zookeeper.queue import NodeQueue, name_for
from dlocks.exceptions import LockBackendError


class Nodes(ClaimTables):
    """The requests about nodes."""

    def _queue_of(self, parent: str, timeout: float | None = None) -> NodeQueue:
        (names,) = self.ensemble.ask(requests.children(parent), timeout=timeout)
        return queue_of_names(names)

    def _is_busy(self, entry: Entry) -> bool:
        """Return whether other claims are in the way, without creating a node."""
        tickets = self._queue_of(entry.parent).tickets
        if entry.beside is not None:
            return not any(ticket.identity == entry.beside[1] for ticket in tickets)
        return any(not (ticket.shared and entry.claim.shared) for ticket in tickets)

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
        request = requests.create(
            f"{entry.parent}/{name}", data.encode(), self.ensemble.acl, in_queue=True
        )
        answer, names, root = self.ensemble.ask(
            request,
            requests.children(entry.parent),
            requests.read(self.root),
            once=True,
        )
        if isinstance(answer, NoNodeError):
            self._make_parent(entry.parent, claim.key)
            return None
        path, stat = checked(answer)
        self._note(entry, path.rpartition("/")[2], stat, root)
        return queue_of_names(names)

    def _find(self, entry: Entry) -> None:
        """Find the node of a claim if the reply to its creation was lost."""
        if (ticket := self._queue_of(entry.parent).marked(entry.mark)) is not None:
            stat, root = self.ensemble.ask(
                requests.exists(f"{entry.parent}/{ticket.name}"),
                requests.read(self.root),
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
            checked(answer)

    def _find_base(self) -> int:
        """Return the number that turns a transaction number into a token.

        The token of the transaction that created the root is the time of that
        transaction.
        """
        for number in range(2, self.root.count("/") + 1):
            above = "/".join(self.root.split("/")[:number])
            self.ensemble.ask(requests.create(above, b"", zookeeper.OPEN_ACL_UNSAFE))
        self.ensemble.ask(requests.create(self.root, b"", self.ensemble.acl))
        while True:
            (answer,) = self.ensemble.ask(requests.read(self.root))
            data, stat = checked(answer)
            if data:
                break
            # After a deletion of the root, this process still knows the earlier tokens.
            base = max(time.time_ns() // 1000 - stat.czxid, self._base or 0)
            (answer,) = self.ensemble.ask(
                requests.write(self.root, str(base).encode(), stat.version)
            )
            if not isinstance(answer, BadVersionError):
                checked(answer)
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


def queue_of_names(names: Any) -> NodeQueue:
    return NodeQueue() if isinstance(names, NoNodeError) else NodeQueue(checked(names))


def checked(answer: Any) -> Any:
    if isinstance(answer, ZookeeperError):
        raise LockBackendError(
            f"ZooKeeper rejected a lock request: {type(answer).__name__}."
        ) from answer
    return answer
