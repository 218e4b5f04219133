"""Locks in the memory of one process, for tests without a server.

They follow the rules of ``dlocks.backends.table``, as the database backends do.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, ClassVar, TypeVar

from dlocks.backends import table
from dlocks.backends.base import Backend, Inspector
from dlocks.backends.notifiers import Notifier
from dlocks.backends.table import KeyState, Moment
from dlocks.runtime import clock
from dlocks.runtime.process import each_in_child
from dlocks.runtime.threads import Flag, new_mutex
from dlocks.values import Claim, Grant, Holder, Ticket, Waiter

T = TypeVar("T")


class MemoryBackend(Backend):
    """A backend that excludes the threads and tasks of one process.

    A guarded transaction is simulated: the key is checked at its beginning and end.
    Replace ``time`` to control the clock.
    """

    supports_queue: ClassVar[bool] = True
    supports_sharing: ClassVar[bool] = True
    supports_handover: ClassVar[bool] = True
    supports_guard: ClassVar[bool] = True
    unlisted = ""

    def __init__(self, alias: str, **options: Any) -> None:
        super().__init__(alias, **options)
        self.time: Callable[[], float] = clock.now
        self.inspector = MemoryInspector(self)
        self._positions = itertools.count(1)
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        self._states: dict[str, KeyState] = {}
        self._mutex = new_mutex()
        self._changed = Flag()

    def acquire(self, claim: Claim) -> Grant | None:
        return self._step(claim.key, table.acquire, claim)

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        return {
            claim.owner: claim.ttl
            for claim in claims
            if self._step(claim.key, table.renew, claim)
        }

    def verify(self, claims: Sequence[Claim], count: int | None = None) -> bool:
        return count is not None and self._step(
            claims[0].key, table.recount, claims[0], count=count
        )

    def release(
        self, claim: Claim, *, failed: bool = False, rest_for: float = 0.0
    ) -> bool:
        return self._step(claim.key, table.release, claim, rest_for=rest_for)

    def pin(self, claim: Claim, database: str) -> bool:
        return self._step(claim.key, table.renew, claim)

    def exchange(self, claim: Claim, successor: Claim) -> Grant | None:
        return self._step(claim.key, table.exchange, claim, successor)

    def holder(self, key: str) -> Holder | None:
        return table.holder(self._state(key), key, self._moment())

    def keys(self) -> list[str]:
        prefix, keys = self.prefix, list(self._states)
        return [key for key in keys if key.startswith(prefix) and self.holder(key)]

    def enqueue(
        self, claim: Claim, channel: str = "", position: int | None = None
    ) -> Ticket:
        position = position or next(self._positions)
        return self._step(claim.key, table.enqueue, claim, position)

    def poll(
        self, claims: Sequence[Claim], *, heartbeat: bool = True
    ) -> Mapping[str, Ticket]:
        tickets = {
            claim.owner: self._step(claim.key, table.poll, claim) for claim in claims
        }
        return {owner: ticket for owner, ticket in tickets.items() if ticket}

    def waiting(self, key: str) -> int:
        return len(self._state(key).live(self._moment()))

    def notifier(self, channel: str) -> Notifier:
        return MemoryNotifier(self._changed)

    def expire(self, claim: Claim, ago: float) -> None:
        """Let the lease of a claim end ``ago`` seconds ago, for a test."""
        self._step(claim.key, table.renew, replace(claim, ttl=-ago))

    def _state(self, key: str) -> KeyState:
        return self._states.get(key, KeyState())

    def _moment(self) -> Moment:
        ticks = time.time_ns() // 1000
        return Moment(self.time(), self.grace, ticks, datetime.now(UTC))

    def _step(
        self,
        key: str,
        function: Callable[..., tuple[KeyState, T]],
        *args: Any,
        **kwargs: Any,
    ) -> T:
        """Apply a function of ``dlocks.backends.table`` to the state of a key."""
        with self._mutex:
            before = self._state(key)
            after, result = function(before, *args, at=self._moment(), **kwargs)
            self._states[key] = after
        if len(after.queue) < len(before.queue):
            self._changed.set()
        return result


# The locks of a child are its own, and a thread of the parent may have held the mutex.
_all = each_in_child(MemoryBackend._reset)


class MemoryNotifier(Notifier):
    """A listener that is notified of every grant in this process."""

    def __init__(self, changed: Flag) -> None:
        self._changed = changed

    def wait(self, timeout: float) -> bool:
        return self._changed.wait(timeout)


class MemoryInspector(Inspector):
    backend: MemoryBackend

    def sharers(self, key: str) -> tuple[Sequence[Holder], int]:
        at, state = self.backend._moment(), self.backend._state(key)
        live = [share for share in state.shares if share.end > at.now]
        return [table.holder_of(share, key, at) for share in live], len(state.live(at))

    def waiters(self, key: str, prefix: str) -> Sequence[Waiter]:
        at = self.backend._moment()
        return [
            Waiter(
                holder=one.claim.holder,
                owner_ip=one.claim.owner_ip,
                holds=tuple(
                    held.key.removeprefix(prefix) for held in one.claim.holding
                ),
                waits_for=key.removeprefix(prefix),
                waited=max(0.0, at.now - one.since),
                shared=one.claim.shared,
            )
            for one in self.backend._state(key).live(at)
        ]
