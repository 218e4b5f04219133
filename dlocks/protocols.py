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
    from dlocks.exceptions import LockLost
    from dlocks.transactions import TransactionMarker
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
    _failed: bool

    @property
    def key(self) -> str: ...
    @property
    def age(self) -> float: ...


class OwnHold(ObservedHold, Protocol):
    """A ``Hold`` for the modules that change it."""

    @property
    def is_over(self) -> bool: ...
    def lose(self, why: str) -> None: ...
    def why_gone(self) -> str: ...


class KeptHold(OwnHold, Protocol):
    """A ``Hold`` for the keeper."""

    caller: threading.Thread | asyncio.Task[Any]
    renew_at: float
    _deadline: float

    @property
    def first_due_at(self) -> float: ...
    @property
    def due_at(self) -> float: ...
    @property
    def renewable(self) -> bool: ...
    @property
    def in_transactions(self) -> bool: ...
    @property
    def to_settle(self) -> bool: ...
    def next_claim(self) -> Claim: ...
    def note_answer(self, sent: float, seconds: float) -> None: ...
    def put_off_renewal(self) -> None: ...
    def check_expiry(self) -> None: ...
    def settle(self, timeout: float = ...) -> None: ...
    def end_at_exit(self) -> None: ...


class GuardedHold(OwnHold, Protocol):
    """A ``Hold`` for ``hold.atomic()``."""

    pinned_in: list[TransactionMarker]
    _connection: Any

    def check(self) -> None: ...
    def committed(self, sent: float) -> None: ...
    def unpin(self) -> None: ...
    def lost_error(self) -> LockLost: ...
    def _reported_lost(self) -> LockLost: ...


class DetachedHold(OwnHold, Protocol):
    """A ``Hold`` for ``hold.detach()``."""

    @property
    def owner(self) -> str: ...
    def transfer(self, ttl: float) -> tuple[float, float]: ...
    def release_again(self) -> None: ...
