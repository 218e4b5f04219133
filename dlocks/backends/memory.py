"""Locks in the memory of one process, for tests without a server.

They follow the same rules as the other backends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

from dlocks.backends.base import Backend
from dlocks.exceptions import LockStale
from dlocks.runtime import clock
from dlocks.values import Claim, Grant, Holder


@dataclass(slots=True)
class _Entry:
    claim: Claim
    ends_at: float
    since: datetime
    token: int
    count: int = 1
    processing: bool = True


class MemoryBackend(Backend):
    """A backend that excludes the threads and tasks of one process.

    Replace ``time`` to control the clock.
    """

    supports_handover: ClassVar[bool] = True

    def __init__(self, alias: str, **options: Any) -> None:
        super().__init__(alias, **options)
        self.time: Callable[[], float] = clock.now
        self._entries: dict[str, _Entry] = {}
        self._mutex = threading.Lock()

    def acquire(self, claim: Claim) -> Grant | None:
        with self._mutex:
            entry = self._entries.get(claim.key)
            token, takeover = time.time_ns() // 1000, False
            if entry is not None:
                if entry.processing and entry.claim.owner == claim.owner:
                    return Grant(entry.token)
                if not self._free(entry, claim):
                    return None
                token, takeover = max(token, entry.token + 1), entry.processing
            self._entries[claim.key] = _Entry(
                claim, self.time() + claim.ttl, datetime.now(UTC), token
            )
            return Grant(token, takeover=takeover)

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        with self._mutex:
            left = {}
            for claim in claims:
                if (entry := self._live(claim)) is not None:
                    entry.ends_at = self.time() + claim.ttl
                    left[claim.owner] = claim.ttl
            return left

    def verify(self, claims: Sequence[Claim], count: int | None = None) -> bool:
        with self._mutex:
            entry = self._live(claims[0])
            if entry is None or count is None:
                return False
            entry.count = count
            return True

    def release(self, claim: Claim, *, failed: bool = False, keep: float = 0.0) -> bool:
        with self._mutex:
            entry = self._entries.get(claim.key)
            if entry is None or entry.claim.owner != claim.owner:
                return False
            entry.processing, entry.count = False, 0
            entry.ends_at = self.time() + keep
            return True

    def exchange(self, claim: Claim, successor: Claim) -> Grant | None:
        with self._mutex:
            entry = self._live(claim) or self._live(successor)
            if entry is None:
                return None
            entry.claim, entry.ends_at, entry.count = (
                successor,
                self.time() + successor.ttl,
                1,
            )
            entry.since, entry.token = (
                datetime.now(UTC),
                max(time.time_ns() // 1000, entry.token + 1),
            )
            return Grant(entry.token)

    def holder(self, key: str) -> Holder | None:
        with self._mutex:
            entry = self._entries.get(key)
            remaining = 0.0 if entry is None else entry.ends_at - self.time()
            if entry is None or (remaining <= 0 and not entry.processing):
                return None
            return Holder(
                key=key,
                holder=entry.claim.holder,
                owner_ip=entry.claim.owner_ip,
                since=entry.since,
                remaining=remaining,
                token=entry.token,
                count=entry.count,
                stale=remaining <= 0,
            )

    def _free(self, entry: _Entry, claim: Claim) -> bool:
        if not entry.processing:
            return entry.ends_at <= self.time()
        if entry.ends_at + self.grace > self.time():
            return False
        if not claim.takeover:
            raise LockStale(key=claim.key, holder=None)
        return True

    def _live(self, claim: Claim) -> _Entry | None:
        entry = self._entries.get(claim.key)
        if (
            entry is None
            or entry.claim.owner != claim.owner
            or not entry.processing
            or entry.ends_at <= self.time()
        ):
            return None
        return entry
