"""The holding of a lock: what ``with db_lock(…) as hold`` gives."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import threading
import weakref
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from asgiref.sync import sync_to_async
from django.db import connections

from dlocks import clock
from dlocks.backends.base import BaseBackend, Claim, Grant
from dlocks.exceptions import LockBackendError, LockError, LockLost
from dlocks.keeper import FOREVER, keeper
from dlocks.signals import lock_lost, lock_released
from dlocks.transactions import Mark, open_connections

if TYPE_CHECKING:
    from dlocks.locks import Lock

logger = logging.getLogger("dlocks")

# How often the keeper looks whether a transaction in which a lease was left has ended.
LOOK_EVERY = 0.05

Caller = threading.Thread | asyncio.Task[Any]


def current_caller() -> Caller:
    """Return who holds what is acquired here: the running asyncio task, or else the thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return task or threading.current_thread()


class Hold:
    """
    One holding of one key. It ends by ``release()``, or is lost.

    Ownership is the hold itself: any thread that has it may release it. ``token`` is the fencing token: larger than
    that of every earlier hold of the key. ``owner`` is the capability behind the hold, never to be shown whole.
    ``waited`` says how many seconds the caller waited for it: 0 when the key was free.
    """

    def __init__(
        self, lock: Lock, backend: BaseBackend, claim: Claim, grant: Grant, caller: Caller, sent: float, waited: float
    ) -> None:
        self.lock = lock
        self.backend = backend
        self.claim = claim
        self.token = grant.token
        self.waited = waited
        self._caller = caller
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._count = 1
        self._ended = False
        self._lost: str | None = None
        self._failed = False
        self._granted_at = clock.now()
        # Counted from before the request was sent, so this clock always runs out before the backend's.
        self._deadline = FOREVER if self.scope == "transaction" else sent + claim.ttl
        self._last_at = FOREVER if lock.max_hold is None else sent + lock.max_hold
        self.renew_at = sent + claim.ttl / 3
        # The open transactions in which the lease was left, and at the end of which it is given back.
        self._left_in: list[Mark] = []
        # Its places in holds_by_caller.
        self.entered_as: list[tuple[Caller, str, str]] = []
        # The transaction that the hold belongs to, and where in it.
        self._connection: Any = None
        self._mark: Mark | None = None
        if self.scope == "transaction":
            self._connection = connections[backend.database]  # type: ignore[attr-defined]
            self._mark = Mark.here(self._connection)

    def __repr__(self) -> str:
        return f"<Hold {self.key!r} token={self.token} count={self._count} {'held' if self.held else 'ended or lost'}>"

    # What it is.

    @property
    def key(self) -> str:
        return self.lock.key

    @property
    def owner(self) -> str:
        return self.claim.owner

    @property
    def scope(self) -> str:
        return self.claim.scope

    @property
    def count(self) -> int:
        """How often the holder has entered and not left."""
        return self._count

    @property
    def held(self) -> bool:
        """Whether the key is this hold's for certain. No I/O: False may mean that it is merely not known."""
        if self._ended or self._lost is not None or self._pid != os.getpid():
            return False
        if self.scope == "transaction":
            return self._mark is not None and self._mark.stands
        return clock.now() < self._deadline

    @property
    def remaining(self) -> float:
        """Seconds for which the key is this hold's even if nothing renews it; infinite in a transaction."""
        return max(0.0, self._deadline - clock.now()) if self.held else 0.0

    # What its holder can do.

    def check(self) -> None:
        """Ask the backend whether the key is still this hold's; raise LockLost when not."""
        if not self.held or not self._ask(self.backend.recount, self.claim, self._count):
            self.lose("the backend says it is no longer this hold's" if self.held else self._why_not())
            raise self._lost_error()

    def renew(self) -> None:
        """Extend the lease to its ttl from now; raise LockLost when it is gone. In a transaction there is no lease."""
        if self.scope == "transaction":
            self.check()
            return
        if self.held:
            sent = clock.now()
            claim = self.next_claim()
            left = self._ask(self.backend.renew, [claim])
            if claim.owner in left:
                if self.backend.lease_refused() is None:
                    # Otherwise it was written by the caller's transaction, which may take it back.
                    self.extend(sent, left[claim.owner])
                return
        self.lose(self._why_not() if not self.held else "the backend says it is no longer this hold's")
        raise self._lost_error()

    def release(self, *, failed: bool = False) -> None:
        """
        Leave once; the last to leave gives the key back. To leave again does nothing.

        ``failed`` is for people who look at the row: its status becomes F instead of S. Raise LockLost when the hold
        was lost before: what was done under it was perhaps not done alone.
        """
        count = None
        try:
            with self._mutex:
                if self._ended or self._count == 0:
                    return
                count = self._count - 1
                self._count = count
                self._failed = self._failed or failed
            self._leave(count)
        except LockError:
            raise
        except BaseException:
            # Interrupted on the way: the key must not stay taken for that.
            if count == 0:
                self._end()
                with suppress(LockError):
                    self._ask(self.backend.release, self.claim, failed=True)
            raise

    def _leave(self, count: int) -> None:
        if self._pid != os.getpid():
            self._ended = True
            raise self._lost_error("this process is a fork of the one that holds it")
        if not self.held:
            self.lose(self._why_not())
        if self._lost is not None:
            if count == 0 and self._end():
                # Nobody may have taken it yet; then it need not wait for the grace of a crash.
                with suppress(LockError):
                    self._ask(self.backend.release, self.claim, failed=True)
            raise self._lost_error()
        if count > 0:
            if not self._ask(self.backend.recount, self.claim, count):
                self.lose("the backend says it is no longer this hold's")
                raise self._lost_error()
        elif not self._leave_in_transactions() and self._end():
            self._give_back()

    # The same for coroutines.

    async def acheck(self) -> None:
        await sync_to_async(self.check)()

    async def arenew(self) -> None:
        await sync_to_async(self.renew)()

    async def arelease(self, *, failed: bool = False) -> None:
        # Shielded: a cancelled holder still gives back.
        await asyncio.shield(asyncio.ensure_future(sync_to_async(self.release)(failed=failed)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.leave(error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await asyncio.shield(asyncio.ensure_future(sync_to_async(self.leave)(error)))

    def leave(self, error: BaseException | None) -> None:
        """End a block: release, but let the block's own error pass, with a note about what went wrong besides."""
        try:
            self.release(failed=error is not None)
        except LockError as trouble:
            if error is None:
                raise
            error.add_note(f"{type(trouble).__name__}: {trouble}")

    # For the lock.

    @property
    def enterable(self) -> bool:
        """Whether the same caller, entering again, is in this hold rather than in need of a new one."""
        if self._ended or self._pid != os.getpid():
            return False
        if self.scope == "transaction":
            return self.held
        return self._count > 0 or self.held

    def enter(self) -> bool:
        """Count one entry more, and ask whether the key is still this hold's; return False when it has ended."""
        with self._mutex:
            # Counted before asking: from here on nobody gives the key back behind this caller's back.
            if self._ended:
                return False
            self._count += 1
            count = self._count
            # What it was left in before is of no account until it is left again.
            left_in, self._left_in = self._left_in, []
        try:
            if not self.held:
                self.lose(self._why_not())
                raise self._lost_error()
            if not self._ask(self.backend.recount, self.claim, count):
                self.lose("the backend says it is no longer this hold's")
                raise self._lost_error()
        except BaseException:
            with self._mutex:
                self._count = count - 1
                self._left_in = left_in
            raise
        return True

    def abandon(self) -> None:
        """Forget a hold that its caller never learned of; the claim behind it is given up by the lock."""
        self._count = 0
        self._end()

    def undo_entry(self, count: int) -> None:
        """Go back to the count from before an entry that its caller never learned of."""
        self._count = min(self._count, count)
        if self._count == 0 and not self._left_in and not self._leave_in_transactions() and self._end():
            self._give_back()

    # For the keeper.

    @property
    def due_at(self) -> float:
        """When the keeper should look at this hold."""
        if self._left_in:
            return clock.now() + LOOK_EVERY
        return min(self.renew_at, self._deadline) if self.renewable else self._deadline

    @property
    def renewable(self) -> bool:
        """Whether the keeper should renew: not for a caller that has died, nor beyond max_hold."""
        if not self.lock.renew or self._ended or self._lost is not None or self._deadline >= self._last_at:
            return False
        if isinstance(self._caller, threading.Thread):
            return self._caller.is_alive()
        # Not the task itself: one that only acquires, as gather() makes them, is done at once.
        return self._caller.get_loop().is_running()

    def next_claim(self) -> Claim:
        """Return the claim to renew by: for its ttl, but not beyond max_hold."""
        ttl = min(self.claim.ttl, self._last_at - clock.now())
        return self.claim if ttl == self.claim.ttl else dataclasses.replace(self.claim, ttl=max(ttl, 0.0))

    def extend(self, sent: float, seconds: float) -> None:
        """Note what a renewal answered: so many seconds from when it was sent."""
        with self._mutex:
            self._deadline = max(self._deadline, min(sent + seconds, self._last_at))
            step = self.claim.ttl / 3
            # Not in full when the row was locked just then: soon again.
            self.renew_at = sent + (step if seconds >= step else step / 3)

    def put_off_renewal(self) -> None:
        self.renew_at = clock.now() + self.claim.ttl / 10

    def look(self) -> None:
        """See whether the lease ran out, or the transactions in which it was left have ended."""
        if self._left_in:
            self.settle()
        if not self._ended and self._lost is None and clock.now() >= self._deadline:
            self.lose(self._why_not())

    def settle(self) -> None:
        """Give back a lease that was left in transactions, once all of them have ended."""
        with self._mutex:
            if self._count or self._ended or not self._left_in or any(mark.stands for mark in self._left_in):
                return
            self._left_in = []
            self._ended = True
        keeper.drop(self)
        try:
            self._give_back()
        except LockError as trouble:
            logger.warning("%s", trouble)

    def lose(self, why: str) -> None:
        """Mark the hold as lost and tell so, once."""
        with self._mutex:
            if self._ended or self._lost is not None:
                return
            self._lost = why
        keeper.drop(self)
        logger.warning("%s", self._lost_error())
        if keeper.is_current:
            # What users do there must not keep the keeper from the other holds.
            threading.Thread(target=self._tell_and_disconnect, name="dlocks-lost", daemon=True).start()
        else:
            self._tell()

    def _tell(self) -> None:
        lock_lost.send_robust(type(self.lock), hold=self)
        if self.lock.on_lost is not None:
            try:
                self.lock.on_lost(self)
            except Exception:
                logger.exception("on_lost of %r failed", self.key)

    def _tell_and_disconnect(self) -> None:
        try:
            self._tell()
        finally:
            connections.close_all()

    def end_at_exit(self) -> None:
        """Give the key back when the process ends, whatever was going on under it."""
        if self.held and self._end():
            self._failed = True
            try:
                self._give_back()
            except LockError as trouble:
                logger.warning("%s", trouble)

    # Inside.

    def _ask(self, function: Any, *arguments: Any, **keywords: Any) -> Any:
        """Ask the backend about the hold; about a lease, from outside of the caller's transaction."""
        backend = self.backend
        if self.scope == "transaction" and connections[backend.database] is not self._connection:  # type: ignore[attr-defined]
            raise RuntimeError(
                f"{self.key!r} belongs to a transaction of another thread: only that one can use the hold."
            )
        if self.scope == "lease" and backend.in_transaction() and backend.lease_refused() is None:
            return keeper.run(partial(function, *arguments, **keywords))
        return function(*arguments, **keywords)

    def _leave_in_transactions(self) -> bool:
        """Keep a lease until the open transactions have ended, since what they do is not seen before."""
        if self.scope == "transaction" or self.lock.release == "exit":
            return False
        marks = [Mark.whole(connection) for connection in open_connections()]
        for mark in marks:
            if self.settle not in mark.at_commit:
                mark.at_commit.append(self.settle)
        with self._mutex:
            self._left_in = marks
        if marks:
            keeper.look()
        return bool(marks)

    def _give_back(self) -> None:
        """Tell the backend that the hold, ended already, is given back."""
        # Counted from the reply to the acquisition, so not a moment short of the row's begin_time.
        keep = max(0.0, self.lock.at_least - (clock.now() - self._granted_at)) if self.lock.at_least else 0.0
        try:
            released = self._ask(self.backend.release, self.claim, failed=self._failed, keep=keep)
        except LockBackendError:
            if self.scope == "transaction":
                # The caller's transaction is broken, and the row goes with it.
                return
            raise
        if not released and self.scope == "lease":
            self._ended = False
            self.lose("the backend says it is no longer this hold's")
            self._ended = True
            raise self._lost_error()
        lock_released.send_robust(type(self.lock), hold=self)
        logger.debug("%r released by %s", self.key, self.claim.holder)

    def _end(self) -> bool:
        with self._mutex:
            if self._ended:
                return False
            self._ended = True
        keeper.drop(self)
        # By hand, though it would go by itself: Python swallows a Ctrl-C that comes while a weak reference dies.
        for key in self.entered_as:
            if holds_by_caller.get(key) is self:
                del holds_by_caller[key]
        return True

    def _why_not(self) -> str:
        if self.scope == "transaction":
            return "its transaction has ended"
        if clock.now() >= self._last_at:
            return f"it was held for its max_hold of {self.lock.max_hold} s"
        return f"it was not renewed within its ttl of {self.claim.ttl:g} s"

    def _lost_error(self, why: str | None = None) -> LockLost:
        return LockLost(
            f"{self.key!r} was lost by {self.claim.holder} (token {self.token}): {why or self._lost}.",
            key=self.key,
            token=self.token,
        )


# Who is in which hold: for entering again. Weak: a hold that nobody has is in nobody's way.
holds_by_caller: weakref.WeakValueDictionary[tuple[Caller, str, str], Hold] = weakref.WeakValueDictionary()
os.register_at_fork(after_in_child=holds_by_caller.clear)
