"""The claims of one process on keys whose queue is kept by another server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, ClassVar

from dlocks.backends.base import Backend
from dlocks.backends.notifiers import RecentKeys
from dlocks.runtime import clock
from dlocks.runtime.threads import BackgroundThread
from dlocks.values import Holder


class LocalClaims(Backend):
    """The tables of these claims, and the mutex that guards them."""

    maintainer_name: ClassVar[str]
    _maintain: Callable[[], None]
    _maintain_from: Callable[[Any], None]
    # By owner, and those released whose key stays taken until ``ends_at``.
    _entries: dict[str, Any]
    _kept: list[Any]

    def _reset(self) -> None:
        # It is never held during a request. Code enters this mutex instead of the
        # condition: it is implemented in C, so a signal cannot leave it locked.
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        self._entries = {}
        self._kept = []
        # Keys that another claim held at the last attempt.
        self.contended: RecentKeys = RecentKeys()
        self._maintainer = BackgroundThread(self.maintainer_name, self._maintain)
        self._maintains_at = 0.0

    def _keep(self, entry: Any, keep: float) -> None:
        """Release an entry, but keep its key taken. The caller holds the mutex."""
        del self._entries[entry.claim.owner]
        entry.kept, entry.ends_at = True, clock.now() + keep
        self._kept.append(entry)
        self._maintain_from(entry)

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
