"""Holds of several keys."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any

from dlocks.core.callers import Caller, forget_acquired
from dlocks.core.guard import guarded
from dlocks.core.hold import Hold
from dlocks.core.hold_state import ensure_sync
from dlocks.exceptions import LockBackendError, LockError
from dlocks.runtime import clock
from dlocks.transactions import TransactionMarker, open_connections
from dlocks.values import Duration

if TYPE_CHECKING:
    from dlocks.protocols import Policy


class MultiHold(Hold):
    """The holding of several keys, with one hold per key in ``holds``.

    It is held while all of them are. ``tokens`` has the fencing token of each key, for
    what that key guards. ``token`` is the largest. Each ``acquire()`` returns a new
    object, to be released once.
    """

    def __init__(self, lock: Policy, holds: Sequence[Hold]) -> None:
        # The holds of the keys count, renew and report losses.
        self.lock = lock
        self.holds = tuple(holds)
        self.backend = holds[0].backend
        self.scope = holds[0].scope
        self.token = max(hold.token for hold in holds)
        self.waited = max(hold.waited for hold in holds)
        self._connection = holds[0]._connection
        self._mutex = threading.Lock()
        # Holds that are still to be released, each with its count inside.
        self._inside = [(hold, hold.count) for hold in holds]

    def __repr__(self) -> str:
        keys = ", ".join(map(repr, self.keys))
        return (
            f"<MultiHold {keys} count={self.count}"
            f" {'held' if self.held else 'ended or lost'}>"
        )

    @property
    def _entries(self) -> int:
        return 1 if self._inside else 0

    @property
    def tokens(self) -> dict[str, int]:
        return {hold.key: hold.token for hold in self.holds}

    @property
    def owner(self) -> str:
        raise AttributeError(
            "A hold of several keys has no single owner. Each hold in 'holds' has one."
        )

    @property
    def caller(self) -> Caller:  # type: ignore[override]
        return self.holds[0].caller

    @property
    def is_over(self) -> bool:
        return not self._inside or any(hold.is_over for hold in self.holds)

    @property
    def mark(self) -> TransactionMarker | None:
        return self.holds[0].mark

    @property
    def pinned(self) -> bool:
        return any(hold.pinned for hold in self.holds)

    @property
    def takeover(self) -> bool:  # type: ignore[override]
        return any(hold.takeover for hold in self.holds)

    @property
    def age(self) -> float:
        return max(hold.age for hold in self.holds)

    def atomic(
        self, *, using: str | None = None, **atomic: Any
    ) -> AbstractContextManager[None]:
        return guarded(self.holds, using, atomic)

    def detach(self, *, within: Duration | None = None) -> str:
        raise RuntimeError(
            "A hold of several keys cannot be handed over. Detach each hold in 'holds'"
            " instead."
        )

    @property
    def count(self) -> int:
        return min(hold.count for hold in self.holds)

    @property
    def held(self) -> bool:
        return bool(self._inside) and all(hold.held for hold in self.holds)

    @property
    def remaining(self) -> float:
        return min(hold.remaining for hold in self.holds) if self._inside else 0.0

    def queue_length(self) -> int:
        """Return the number of callers that are queued for the keys now."""
        return sum(hold.queue_length() for hold in self.holds)

    def check(self) -> None:
        """Check with the backend that all keys are held, or raise LockLost."""
        ensure_sync()
        if not (
            self.held
            and self._is_alike
            and self._ask(self.backend.verify, self._claims)
        ):
            for hold in self.holds:
                hold.check()

    def renew(self) -> None:
        """Extend all leases to their ttl from now, or raise LockLost."""
        ensure_sync()
        if self.held and self._is_alike and self.scope == "lease" and not self.pinned:
            sent = clock.now()
            left = self._ask(
                self.backend.renew, [hold.next_claim() for hold in self.holds]
            )
            for hold in self.holds:
                hold.renewed(sent, left)
        else:
            for hold in self.holds:
                hold.renew()

    def release(self, *, failed: bool = False) -> None:
        """Release each key once, even if the release of another fails."""
        ensure_sync()
        inside = self._inside
        # Outside of the block, because an exception of a tracer in an inlined
        # comprehension bypasses the handlers (CPython 3.12).
        holds = [hold for hold, _ in inside]
        try:
            with self._mutex:
                if self._inside is not inside:
                    return
                self._inside = []
            forget_acquired(self)
            self._release(holds, failed=failed)
        except LockError:
            raise
        except BaseException:
            # An interrupted release must leave no key acquired.
            self._inside = []
            for hold, count in inside:
                with suppress(LockError):
                    if hold.count >= count:
                        hold.release(failed=True)
                    elif count == 1:
                        hold.discard()
                        hold.release_again()
            raise

    # Internal methods.

    @property
    def _is_alike(self) -> bool:
        """Return whether one request can cover all keys."""
        return len({hold.scope for hold in self.holds}) == 1

    @property
    def _claims(self) -> list[Any]:
        return [hold.claim for hold in self.holds]

    def _leaves_nothing(self, holds: Sequence[Hold]) -> bool:
        """Return whether no open transaction needs the leases."""
        if self.pinned or self.backend.refusal(self.holds[0].claim):
            return False
        return all(hold.leaves_at_exit for hold in holds) or not open_connections()

    def _release(self, holds: Sequence[Hold], *, failed: bool) -> None:
        together: list[Hold] = []
        if self._is_alike and (
            self.scope == "transaction" or self._leaves_nothing(holds)
        ):
            together = [hold for hold in holds if hold.end_with_others(failed=failed)]
        done = False
        trouble: LockError | None = None
        if len(together) > 1:
            try:
                done = self._ask(
                    self.backend.release_all,
                    [hold.claim for hold in together],
                    failed=failed,
                )
            except LockBackendError as error:
                # In a transaction, which is broken now, each hold handles this itself.
                if self.scope == "lease":
                    trouble = error
                    holds = [hold for hold in holds if hold not in together]
        for hold in holds:
            try:
                if hold in together:
                    hold.release_claim(done=done)
                else:
                    hold.release(failed=failed)
            except LockError as error:
                trouble = trouble or error
        if trouble is not None:
            raise trouble


class LossOfMember:
    """A callback that reports the loss of a hold of several keys only once."""

    def __init__(self, on_lost: Callable[[Hold], object]) -> None:
        self.on_lost = on_lost
        # Weak, so that a forgotten hold can end. None until the caller has the hold.
        self.hold: Callable[[], Hold | None] | None = None
        self._mutex = threading.Lock()

    def __call__(self, lost: Hold) -> None:
        with self._mutex:
            hold, self.hold = self.hold and self.hold(), None
        if hold is not None:
            self.on_lost(hold)
