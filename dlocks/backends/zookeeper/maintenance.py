"""The thread that releases expired claims and deletes abandoned nodes."""

from __future__ import annotations

import atexit
import logging
import math
import time

from dlocks.backends.base import HEARTBEAT_TIMEOUT
from dlocks.backends.zookeeper import ensemble as zookeeper
from dlocks.backends.zookeeper import requests
from dlocks.backends.zookeeper.claims import (
    SOON,
    Entry,
)
from dlocks.backends.zookeeper.ensemble import (
    NoNodeError,
    is_unanswered,
)
from dlocks.backends.zookeeper.nodes import Nodes, checked
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.process import each_in_child
from dlocks.values import Grant

logger = logging.getLogger("dlocks")

# Seconds for which a session without claims stays open.
IDLE_CLOSE_AFTER = 10.0
# Seconds between two passes of the maintenance thread while there is work.
MAINTAIN_EVERY = 0.5


class Maintenance(Nodes):
    """The end of claims: their release, their expiry, and that of the session."""

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
            self._maintain_from(entry.ends_at)
        return Grant(entry.token, left if left < entry.claim.ttl else None)

    def _release_entry(
        self, entry: Entry, *, timeout: float | None = None, had: bool | None = None
    ) -> bool:
        """Delete the node of a claim, and return whether the claim held the key.

        If ``had`` is None, this is determined from the queue.
        """
        until = clock.real_now() + (
            self.ensemble.timeout if timeout is None else timeout
        )
        sent = False
        try:
            while not entry.gone:
                left = max(0.0, until - clock.real_now())
                try:
                    if had is None or entry.ticket is None:
                        node_queue = self._queue_of(entry.parent, left)
                        entry.ticket = node_queue.marked(entry.mark)
                        had = entry.ticket in node_queue.granted
                    if entry.ticket is None:
                        return False
                    again, sent = sent, True
                    (answer,) = self.ensemble.ask(
                        requests.delete(entry.path), timeout=left, once=True
                    )
                    if isinstance(answer, NoNodeError):
                        # The previous request may have deleted it, and its reply was
                        # lost.
                        return had and again
                    checked(answer)
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
            self._maintain_from()

    def _session_ended(self, *, notify: bool = True) -> None:
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
        if lost and notify:
            logger.warning(
                "The ZooKeeper session of DLOCKS[%r] ended with %d locks",
                self.alias,
                len(lost),
            )
            self.runtime.on_lost(lost, "the ZooKeeper session that held it has ended")

    def _maintain_from(self, due: float = math.inf) -> None:
        self._used_at = clock.now()
        if not self._exiting:
            super()._maintain_from(due)

    def _maintain(self) -> None:
        while True:
            with self._mutex:
                now = clock.now()
                maintained = [*self._entries.values(), *self._kept]
                if (
                    not maintained
                    and not self._orphans
                    and now >= self._used_at + IDLE_CLOSE_AFTER
                ):
                    self._maintainer.end()
                    # A later claim opens a session of its own.
                    client = self.ensemble.detach()
                    # The ensemble may be replaced while there is no session.
                    self._base = None
                    break
                if now > self._maintains_at + HEARTBEAT_TIMEOUT / 2:
                    # This process was stopped, so its waiters could not send
                    # heartbeats.
                    for entry in maintained:
                        entry.last_seen_at = max(entry.last_seen_at, now)
                over = [entry for entry in maintained if self._ends(entry) <= now]
                orphans = list(self._orphans)
                if not over and not orphans:
                    self._maintains_at = min(
                        [self._ends(entry) for entry in maintained],
                        default=now + IDLE_CLOSE_AFTER,
                    )
                    self._maintains_at = max(
                        now, min(self._maintains_at, now + MAINTAIN_EVERY)
                    )
                    self._changed.wait(self._maintains_at - now)
                else:
                    # The next pass detects from this time whether the process was
                    # stopped.
                    self._maintains_at = now + MAINTAIN_EVERY if orphans else now
            for entry in over:
                self._end(entry)
            for entry in orphans:
                self._delete_node(entry)
            if orphans:
                time.sleep(MAINTAIN_EVERY)
            # A reference that is kept during the pause would keep these objects alive.
            del over, orphans, maintained
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
            self._release_entry(entry, timeout=SOON, had=True)
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
                    requests.delete(f"{entry.parent}/{found.name}"), timeout=SOON
                )
        except LockBackendError:
            return
        with self._mutex:
            # If there is no node, its creation may still be on its way.
            if found is not None or clock.now() >= self._orphans.get(entry, 0.0):
                self._orphans.pop(entry, None)

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


all_backends = each_in_child(Maintenance._forked)


def _at_exit() -> None:
    for backend in list(all_backends):
        backend._at_exit()


atexit.register(_at_exit)
