"""The claims of one process on keys whose queue is kept by another server."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

from dlocks.backends.base import Backend
from dlocks.backends.notifiers import RecentKeys
from dlocks.runtime import clock
from dlocks.runtime.threads import BackgroundThread, PythonIsExitingError
from dlocks.values import UNLIMITED, Claim, Holder


@dataclass(slots=True, eq=False)
class LocalEntry:
    """A claim that holds a key, requests it or waits for it."""

    claim: Claim
    token: int | None = None
    waiting: bool = False
    count: int = 1
    # The time of day of the grant.
    since: float = 0.0
    # When it is released if it is not renewed.
    ends_at: float = math.inf
    # Released, but its key stays taken until ``ends_at``.
    kept: bool = False
    # Being released or cancelled. No later reply revives it.
    leaving: bool = False
    # Being ended because its lease has expired. Neither a renewal nor a release by its
    # holder counts from here on, since the key may have the next holder already.
    expired: bool = False
    # Removed from all tables.
    gone: bool = False


class LocalClaims(Backend):
    """The tables of these claims, and the mutex that guards them."""

    maintainer_name: ClassVar[str]
    _maintain: Callable[[], None]
    # By owner, and those released whose key stays taken until ``ends_at``.
    _entries: dict[str, Any]
    _kept: set[Any]

    def _reset(self) -> None:
        # It is never held during a request. Code enters this mutex instead of the
        # condition: it is implemented in C, so a signal cannot leave it locked.
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        self._entries = {}
        self._kept = set()
        # Keys that another claim held at the last attempt.
        self.contended: RecentKeys = RecentKeys()
        self._maintainer = BackgroundThread(self.maintainer_name, self._maintain)
        self._maintains_at = 0.0

    def refusal(self, claim: Claim) -> str | None:
        if (why := super().refusal(claim)) is not None:
            return why
        kind = type(self).__name__
        if claim.shared and claim.permits < UNLIMITED:
            return f"{kind} does not support semaphores."
        if not claim.takeover:
            return (
                f"{kind} does not support takeover=False, because it does not record"
                " whether the last holder released the key."
            )
        return None

    # The caller of these methods holds the mutex. Python handles signals after calls.
    # So the assignments that belong together follow the last call.

    def _granted(self, entry: Any, token: int) -> None:
        """Record a grant, which has to be collected or renewed within its ttl."""
        entry.ends_at = clock.now() + entry.claim.ttl
        entry.token, entry.waiting, entry.since = token, False, time.time()
        self._maintain_from(entry.ends_at)

    def _keep(self, entry: Any, keep: float) -> None:
        """Release an entry, but keep its key taken."""
        self._kept.add(entry)
        entry.kept, entry.ends_at = True, clock.now() + keep
        del self._entries[entry.claim.owner]
        self._maintain_from(entry.ends_at)

    def _forget(self, entry: Any) -> None:
        owner: str = entry.claim.owner
        self._kept.discard(entry)
        if self._entries.get(owner) is entry:
            del self._entries[owner]
        entry.gone, entry.waiting = True, False

    def _maintain_from(self, due: float = math.inf) -> None:
        """Ensure that the maintenance thread runs, and checks its work when due."""
        with suppress(PythonIsExitingError):
            if not self._maintainer.start() and due < self._maintains_at:
                self._changed.notify()

    @staticmethod
    def _own_holder(entry: Any) -> Holder:
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
