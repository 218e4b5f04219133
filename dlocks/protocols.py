"""What other modules use of a lock and of a hold.

The modules below ``locks`` and ``holds`` work with these types, so they do not import
the classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import asyncio
    import threading

    from dlocks.backends.base import Backend
    from dlocks.values import Claim


class Policy(Protocol):
    """The part of a ``Lock`` that applies to its holds."""

    @property
    def key(self) -> str: ...
    @property
    def keys(self) -> tuple[str, ...]: ...
    @property
    def using(self) -> str: ...
    @property
    def renew(self) -> bool: ...
    @property
    def reentrant(self) -> bool: ...
    @property
    def shared(self) -> bool: ...
    @property
    def permits(self) -> int: ...
    @property
    def min_hold(self) -> float: ...
    @property
    def max_hold(self) -> float | None: ...
    @property
    def release_at(self) -> Literal["transaction", "exit"]: ...
    @property
    def on_lost(self) -> Callable[[Any], object] | None: ...


class ObservedHold(Protocol):
    """A ``Hold`` for signals and watchers."""

    lock: Policy
    backend: Backend
    claim: Claim
    scope: str
    token: int
    takeover: bool
    waited: float
    _state: Any

    @property
    def key(self) -> str: ...
    @property
    def age(self) -> float: ...


class WatchedHold(Protocol):
    """The state of a hold for the keeper."""

    backend: Backend
    claim: Claim
    caller: threading.Thread | asyncio.Task[Any]
    hold: Any
    lease: Any

    @property
    def is_over(self) -> bool: ...
    @property
    def due_at(self) -> float: ...
    @property
    def renewable(self) -> bool: ...
    @property
    def in_transactions(self) -> bool: ...
    @property
    def to_settle(self) -> bool: ...
    @property
    def is_abandoned(self) -> bool: ...
    def next_claim(self) -> Claim: ...
    def check_expiry(self) -> None: ...
    def lose(self, why: str) -> None: ...
    def why_gone(self) -> str: ...
    def settle(self, timeout: float = ...) -> None: ...
    def end_abandoned(self) -> None: ...
    def report_slow(self) -> None: ...
    def end_at_exit(self) -> None: ...
