"""The end of claims: their release, their expiry, and that of the session."""

from __future__ import annotations

import atexit
import logging
import math
from contextlib import suppress
from queue import SimpleQueue

from kazoo.exceptions import NoNodeError

from dlocks.backends.base import HEARTBEAT_TIMEOUT
from dlocks.backends.local_claims import LocalClaims
from dlocks.backends.zookeeper.ensemble import SOON, Ensemble, end
from dlocks.backends.zookeeper.nodes import Entry, Nodes
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.process import each_in_child
from dlocks.values import Claim, Grant

logger = logging.getLogger("dlocks")

# Seconds for which a session without claims stays open.
IDLE_CLOSE_AFTER = 10.0
# Seconds between two passes of the maintenance thread.
MAINTAIN_EVERY = 0.5


class Claims(LocalClaims):
    """The claims of this process, and the thread that ends them."""

    ensemble: Ensemble
    nodes: Nodes
    maintainer_name = "dlocks-zookeeper"
    _entries: dict[str, Entry]
    _kept: list[Entry]

    def _reset(self) -> None:
        super()._reset()
        # Unwanted claims whose node may appear until ``ends_at``.
        self._orphans: set[Entry] = set()
        self._turns: SimpleQueue[Entry] = SimpleQueue()
        self._used_at = 0.0
        self._exiting = False

    def _all(self) -> list[Entry]:
        return [*self._entries.values(), *self._kept]

    def _held(self, claim: Claim) -> Entry | None:
        entry = self._entries.get(claim.owner)
        return None if entry is None or entry.token is None or entry.leaving else entry

    def _grant(self, entry: Entry) -> Grant | None:
        """Return the grant of a claim, or None if it waits or has no lease."""
        now = clock.now()
        with self._mutex:
            left = self.ensemble.certain_until - now
            if entry.token is None or entry.gone or entry.leaving or left <= 0:
                return None
            entry.ends_at = now + entry.claim.ttl
            self._maintain_from(entry.ends_at)
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
            with self._mutex:
                self._forget(entry)

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
        (answer,) = self.ensemble.send(("delete", entry.path), timeout=timeout)
        # The previous request may have deleted it, and its reply was lost.
        had = again or not isinstance(answer, NoNodeError)
        return had and entry.token is not None

    def _orphan(self, entry: Entry) -> None:
        with self._mutex:
            entry.ends_at = clock.now() + 2 * self.ensemble.session_timeout
            self._orphans.add(entry)
            self._maintain_from()

    # The session.

    def _session_ended(self) -> None:
        """Forget all claims. Waiters rejoin the queue."""
        with self._mutex:
            entries = self._all()
            for entry in entries:
                self._forget(entry)
            self._orphans.clear()
        held = [one for one in entries if one.token is not None and not one.kept]
        if held:
            report = "The ZooKeeper session of DLOCKS[%r] ended with %d locks"
            logger.warning(report, self.alias, len(held))
            owners = [entry.claim.owner for entry in held]
            self.runtime.on_lost(owners, "the ZooKeeper session that held it has ended")

    def _forked(self) -> None:
        self.ensemble.abandon()
        self._reset()

    def _close_at_exit(self) -> None:
        if self._exiting and not self._entries:
            self.ensemble.close()

    # The maintenance thread.

    def _maintain_from(self, due: float = math.inf) -> None:
        self._used_at = clock.now()
        if not self._exiting:
            super()._maintain_from(due)

    def _maintain(self) -> None:
        # No reference of a pass keeps an object alive.
        while self._maintain_once():
            pass

    def _maintain_once(self) -> bool:
        """Release expired claims, or wait. Return whether there are more."""
        with self._mutex:
            now = clock.now()
            entries = self._all()
            orphans = list(self._orphans)
            if entries or orphans:
                self._used_at = now
            idle = now >= self._used_at + IDLE_CLOSE_AFTER
            if idle:
                self._maintainer.end()
                # A later claim opens a session of its own.
                client = self.ensemble.detach()
            if now > self._maintains_at + HEARTBEAT_TIMEOUT / 2:
                # This process was stopped, so its waiters could not send heartbeats.
                for entry in entries:
                    entry.last_seen_at = max(entry.last_seen_at, now)
            over = list(entry for entry in entries if self._ends(entry) <= now)
            # The next pass detects from this time whether the process was stopped.
            soon = min([now + MAINTAIN_EVERY, *map(self._ends, entries)])
            self._maintains_at = max(now, soon)
            if not idle and not over:
                self._changed.wait(self._maintains_at - now)
        if idle:
            end(client)
            return False
        for entry in over:
            self._end(entry)
        for entry in orphans:
            self._delete_orphan(entry)
        return True

    def _ends(self, entry: Entry) -> float:
        if entry.ticket is None:
            return math.inf
        if entry.waiting:
            return entry.last_seen_at + HEARTBEAT_TIMEOUT
        return entry.ends_at if entry.kept else entry.ends_at + self.grace

    def _end(self, entry: Entry) -> None:
        with self._mutex:
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
                with self._mutex:
                    self._orphans.discard(entry)


all_backends = each_in_child(Claims._forked)


def _at_exit() -> None:
    for backend in list(all_backends):
        # The keeper releases the remaining holds.
        backend._exiting = True
        backend._close_at_exit()


atexit.register(_at_exit)
