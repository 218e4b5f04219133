"""Holds of several keys."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dlocks.core.callers import Caller, forget_acquired
from dlocks.core.hold import Hold
from dlocks.exceptions import LockBackendError, LockError
from dlocks.runtime import clock
from dlocks.runtime.requests import refuse_nested
from dlocks.transactions import open_connections
from dlocks.values import Duration

if TYPE_CHECKING:
    from dlocks.core.kept_hold import KeptHold
    from dlocks.protocols import Policy


class MultiState:
    """The state of a hold of several keys. ``parts`` are the states of the keys.

    They count, renew and report losses.
    """

    blocks = 0
    claim = None
    hold: Any = None

    def __init__(self, lock: Policy, parts: Sequence[KeptHold]) -> None:
        first = parts[0]
        self.lock = lock
        self.parts = list(parts)
        self.backend, self.scope, self.caller = first.backend, first.scope, first.caller
        self.mark = first.mark
        self.token = max(part.token for part in parts)
        self.takeover = any(part.takeover for part in parts)
        self.waited = max(part.waited for part in parts)
        # Those that are still to be released, each with its count inside.
        self._inside = [(part, part.count) for part in parts]

    @property
    def mutex(self) -> threading.RLock:
        # That of a key, which a forked child replaces.
        return self.parts[0].mutex

    @property
    def entries(self) -> int:
        return 1 if self._inside else 0

    @property
    def count(self) -> int:
        return min(part.count for part in self.parts)

    @property
    def held(self) -> bool:
        return bool(self._inside) and all(part.held for part in self.parts)

    @property
    def is_over(self) -> bool:
        return not self._inside or any(part.is_over for part in self.parts)

    @property
    def remaining(self) -> float:
        return min(part.remaining for part in self.parts) if self._inside else 0.0

    @property
    def age(self) -> float:
        return max(part.age for part in self.parts)

    @property
    def pinned(self) -> bool:
        return any(part.pinned for part in self.parts)

    def add_user(self, caller: Caller) -> None:
        """Record the caller of a block that begins, or raise LockLost."""
        added: list[KeptHold] = []
        try:
            for part in self.parts:
                part.add_user(caller)
                added.append(part)
        except BaseException:
            for part in added:
                part.remove_user(caller)
            raise

    def end_block(self) -> None:
        """Count one 'with hold' block less."""
        with self.mutex:
            self.blocks = max(0, self.blocks - 1)

    def remove_user(self, caller: Caller) -> None:
        """Forget the caller of a block that has ended."""
        for part in self.parts:
            part.remove_user(caller)

    def check(self) -> None:
        claims = [part.claim for part in self.parts]
        if not (
            self.held
            and self._is_alike
            and self.parts[0].ask(self.backend.verify, claims)
            and self.held
        ):
            for part in self.parts:
                part.check()

    def renew(self) -> None:
        """Extend all leases to their ttl from now, or raise LockLost."""
        if self.held and self._is_alike and self.scope == "lease" and not self.pinned:
            sent = clock.now()
            claims = [part.next_claim() for part in self.parts]
            left = self.parts[0].ask(self.backend.renew, claims)
            for part in self.parts:
                part.renewed(sent, left)
        else:
            for part in self.parts:
                part.renew()

    def release(
        self,
        *,
        failed: bool = False,
        at_block_end: bool = False,
        ends_block: bool = False,
    ) -> None:
        """Release each key once, even if the release of another fails."""
        try:
            self._release_once(failed=failed, at_block_end=at_block_end)
        finally:
            # Afterwards, so that no other block begins with the entry.
            if ends_block:
                self.end_block()

    # Internal methods.

    def _release_once(self, *, failed: bool, at_block_end: bool) -> None:
        refuse_nested()
        inside = self._inside
        for part, _ in inside:
            part.outlives_transaction()
        # Outside of the block, because an exception of a tracer in an inlined
        # comprehension bypasses the handlers (CPython 3.12).
        parts = [part for part, _ in inside]
        try:
            with self.mutex:
                if self._inside is not inside:
                    return
                self._inside = []
            forget_acquired(self)
            self.hold = None
            self._release(parts, failed=failed, at_block_end=at_block_end)
        except LockError:
            raise
        except BaseException:
            # An interrupted release must leave no key acquired.
            self._inside = []
            for part, count in inside:
                with suppress(LockError):
                    if part.count >= count:
                        part.release(failed=True)
                    elif count == 1:
                        part.resume_release()
            raise

    @property
    def _is_alike(self) -> bool:
        return len({part.scope for part in self.parts}) == 1

    def _leaves_nothing(self, parts: Sequence[KeptHold]) -> bool:
        """Return whether no open transaction needs the leases."""
        if self.pinned or self.backend.refusal(self.parts[0].claim):
            return False
        return all(part.leaves_at_exit for part in parts) or not open_connections()

    def _release(
        self, parts: Sequence[KeptHold], *, failed: bool, at_block_end: bool
    ) -> None:
        together: list[KeptHold] = []
        if self._is_alike and (
            self.scope == "transaction" or self._leaves_nothing(parts)
        ):
            together = [part for part in parts if part.end_with_others(failed=failed)]
        done = False
        trouble: LockError | None = None
        if len(together) > 1:
            try:
                done = self.parts[0].ask(
                    self.backend.release_all,
                    [part.claim for part in together],
                    failed=failed,
                )
            except LockBackendError as error:
                # In a transaction, which is broken now, each hold handles this itself.
                if self.scope == "lease":
                    trouble = error
                    parts = list(part for part in parts if part not in together)
        for part in parts:
            try:
                if part in together:
                    part.release_claim(done=done, report=False)
                else:
                    part.release(failed=failed, at_block_end=at_block_end)
            except LockError as error:
                trouble = trouble or error
        for part in together:
            # Only now, since on_lost may acquire all of the keys again.
            if part.lease.lost is not None:
                part.report_loss()
        if trouble is not None:
            raise trouble


class MultiHold(Hold):
    """The holding of several keys, with one hold per key in ``holds``.

    It is held while all of them are. ``tokens`` has the fencing token of each key, for
    what that key guards. ``token`` is the largest. Each ``acquire()`` returns a new
    object, to be released once.
    """

    def __init__(self, lock: Policy, holds: Sequence[Hold]) -> None:
        self.holds = tuple(holds)
        super().__init__(MultiState(lock, [hold._state for hold in holds]))

    @property
    def owner(self) -> str:
        raise AttributeError(
            "A hold of several keys has no single owner. Each hold in 'holds' has one."
        )

    def detach(self, *, within: Duration | None = None) -> str:
        raise RuntimeError(
            "A hold of several keys cannot be handed over. Detach each hold in 'holds'"
            " instead."
        )


class LossOfMember:
    """A callback that reports the loss of a hold of several keys only once."""

    def __init__(self, on_lost: Callable[[Hold], object]) -> None:
        self.on_lost = on_lost
        # Weak, as the hold refers to it. None until the caller has the hold.
        self.hold: Callable[[], Hold | None] | None = None
        self._mutex = threading.RLock()

    def __call__(self, lost: Hold) -> None:
        with self._mutex:
            hold, self.hold = self.hold and self.hold(), None
        if hold is not None:
            self.on_lost(hold)
