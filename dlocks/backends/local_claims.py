"""The claims of one process on keys whose queue is kept by another server."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Generic, TypeVar

from dlocks.backends.base import Backend
from dlocks.backends.notifiers import RecentKeys
from dlocks.runtime import clock
from dlocks.runtime.requests import request
from dlocks.runtime.threads import (
    BackgroundThread,
    Flag,
    PythonIsExitingError,
    new_mutex,
)
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
    resting: bool = False
    # Being released or cancelled. No later reply revives it.
    leaving: bool = False
    # Being ended because its lease has expired. Neither a renewal nor a release by its
    # holder counts from here on, since the key may have the next holder already.
    expired: bool = False
    # Removed from all tables.
    gone: bool = False

    def as_holder(self) -> Holder:
        remaining = self.ends_at - clock.now()
        return Holder(
            key=self.claim.key,
            holder=self.claim.holder,
            owner_ip=self.claim.owner_ip,
            since=datetime.fromtimestamp(self.since, UTC),
            remaining=remaining,
            token=self.token or 0,
            count=self.count,
            stale=remaining <= 0,
        )


E = TypeVar("E", bound=LocalEntry)


class LocalClaims(Generic[E]):
    """The tables of these claims, the mutex that guards them, and their maintenance.

    The thread that ``start_maintenance()`` starts calls ``maintain``, which returns the
    seconds until the next pass, or None at the end.
    """

    def __init__(self, thread: str, maintain: Callable[[], float | None]) -> None:
        self.mutex = new_mutex()
        # Wakes the maintenance thread.
        self.wakeup = Flag()
        # By owner, and those released whose key stays taken until ``ends_at``.
        self.entries: dict[str, E] = {}
        self.resting: set[E] = set()
        # Keys that another claim held at the last attempt.
        self.contended = RecentKeys()
        self._maintain = maintain
        self.maintainer = BackgroundThread(thread, self._maintain_on)
        self.maintains_at = 0.0

    def _maintain_on(self) -> None:
        # No reference of a pass keeps an object alive in the pause. A finalizer that
        # strikes in a pass finds the tables half changed, so its requests are refused.
        while (
            # Another thread may have begun to work first.
            self.maintainer.is_current
            and (pause := request(self._maintain)) is not None
        ):
            self.wakeup.wait(pause)

    def start_maintenance(self) -> None:
        """Ensure that the maintenance thread runs. The caller holds no mutex."""
        with suppress(PythonIsExitingError):
            self.maintainer.start()

    # The caller of these methods holds the mutex. Python handles signals after calls.
    # So the assignments that belong together follow the last call.

    def all(self) -> list[E]:
        return [*self.entries.values(), *self.resting]

    def granted(self, entry: E, token: int) -> None:
        """Record a grant, which has to be collected or renewed within its ttl."""
        entry.ends_at = clock.now() + entry.claim.ttl
        entry.token, entry.waiting, entry.since = token, False, time.time()
        self.maintain_from(entry.ends_at)

    def rest(self, entry: E, rest_for: float) -> None:
        """Release an entry, but keep its key taken."""
        self.resting.add(entry)
        entry.resting, entry.ends_at = True, clock.now() + rest_for
        del self.entries[entry.claim.owner]
        self.maintain_from(entry.ends_at)

    def forget(self, entry: E) -> None:
        owner = entry.claim.owner
        self.resting.discard(entry)
        if self.entries.get(owner) is entry:
            del self.entries[owner]
        entry.gone, entry.waiting = True, False

    def maintain_from(self, due: float = math.inf) -> None:
        """Let the maintenance thread check its work when it is due."""
        if due < self.maintains_at:
            self.wakeup.set()


def refusal_of(backend: Backend, claim: Claim) -> str | None:
    """Return why a backend with local claims refuses a claim, or None."""
    kind = type(backend).__name__
    if claim.shared and claim.permits < UNLIMITED:
        return f"{kind} does not support semaphores."
    if not claim.takeover:
        return (
            f"{kind} does not support takeover=False, because it does not record"
            " whether the last holder released the key."
        )
    return None
