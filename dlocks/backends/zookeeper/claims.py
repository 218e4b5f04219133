"""The claims of this process that have a node, or may have one."""

from __future__ import annotations

import queue
import secrets
from dataclasses import dataclass, field

from dlocks.backends.local_claims import LocalClaims, LocalEntry
from dlocks.backends.zookeeper import ensemble as zookeeper
from dlocks.backends.zookeeper.ensemble import Ensemble
from dlocks.backends.zookeeper.queue import QueueNode, node_of
from dlocks.runtime import clock
from dlocks.values import Claim

# Seconds for which the keeper and the waiters wait for a reply before they check for
# other work.
SOON = 1.0


@dataclass(slots=True, eq=False)
class Entry(LocalEntry):
    """A claim that has a node, or may have one."""

    # The path of its key's node.
    parent: str = field(kw_only=True)
    # The token of the hold to which it is added, and the identity of that hold's
    # ticket.
    beside: tuple[int, tuple[int, str]] | None = None
    # Identifies its node. The owner is a secret that proves the hold, so a client that
    # can read the nodes must not see it.
    mark: str = field(default_factory=lambda: secrets.token_hex(16))
    ticket: QueueNode | None = None
    # The token that it gets with its grant.
    number: int = 0
    # Whether the listening thread reports its turn.
    is_notified: bool = False
    # It is being released because its time is over. A later reply does not revive it.
    ending: bool = False
    last_seen_at: float = 0.0
    ahead: int = 0
    # The node that it watches.
    watched: str = ""

    @property
    def path(self) -> str:
        return f"{self.parent}/{self.ticket.name}" if self.ticket else ""


class ClaimTables(LocalClaims):
    """The tables of claims, which one mutex guards."""

    root: str
    ensemble: Ensemble
    maintainer_name = "dlocks-zookeeper"
    _entries: dict[str, Entry]
    _kept: list[Entry]

    def _reset(self) -> None:
        super()._reset()
        # Unwanted claims whose node may still exist or may still be created, and until
        # when.
        self._orphans: dict[Entry, float] = {}
        self._turns: queue.SimpleQueue[Entry] = queue.SimpleQueue()
        # The offset of the tokens.
        self._base: int | None = None
        self._used_at = 0.0
        self._exiting = False

    def _parent(self, key: str) -> str:
        return f"{self.root}/{node_of(key)}"

    def _entry(self, claim: Claim, *, waiting: bool = False) -> Entry:
        entry = Entry(
            claim,
            parent=self._parent(claim.key),
            waiting=waiting,
            last_seen_at=clock.now(),
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

    def _lease(self, claim: Claim) -> float:
        return min(claim.ttl, self.ensemble.session_timeout * zookeeper.CERTAIN)

    def _forget(self, entry: Entry) -> None:
        super()._forget(entry)
        self._used_at = clock.now()
