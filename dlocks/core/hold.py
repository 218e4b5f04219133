"""Holds: the object that ``with db_lock(…) as hold`` returns."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
import os
import threading
import time
import weakref
from asyncio import _get_running_loop
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from django.db import connections

from dlocks.backends.base import Backend, is_outside
from dlocks.core.guard import guarded
from dlocks.exceptions import LockBackendError, LockError, LockLost
from dlocks.runtime import clock
from dlocks.runtime.clock import FOREVER
from dlocks.runtime.connected import connection_of
from dlocks.runtime.coroutines import refuse_in_a_coroutine, run_in_sync_thread
from dlocks.runtime.greenlets import is_alive
from dlocks.runtime.jobs import GONE
from dlocks.runtime.keeper import OUTSIDE_TIMEOUT, keeper
from dlocks.runtime.process import in_child
from dlocks.signals import send_ended
from dlocks.text import shown_holder
from dlocks.transactions import TransactionMarker, open_connections
from dlocks.values import Claim, Duration, Grant

if TYPE_CHECKING:
    from dlocks.protocols import Policy

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("dlocks")

# Seconds between two checks whether a transaction in which a lease was left has ended.
POLL_EVERY = 0.05
# Seconds after which a short lease from the queue is first renewed.
RENEW_SOON = 0.1
# Minimum seconds before a failed renewal is retried.
SOONEST_RENEWAL = 0.02
# Seconds for which the end of a transaction waits while the keeper releases a lease
# left in it.
SETTLE_TIMEOUT = 5.0

# Seconds before its deadline in which a lease may expire on the way to the database.
ALMOST_OVER = 1.0
# Seconds for which an expired lease counts as not lost, after a reply that it could not
# be renewed just then.
NOT_LOST_FOR = 1.0

HANDED_OVER = "it was handed over"

Caller = threading.Thread | asyncio.Task[Any]

# Refused before anything happens, so that the asynchronous method can do it.
ensure_sync = partial(
    refuse_in_a_coroutine,
    "'async with', or the method with an 'a', as in 'await hold.arelease()'",
)

# Caller, backend, key, and whether the hold is shared.
EntryKey = tuple[Caller, str, str, bool]


def current_caller() -> Caller:
    """Return the running asyncio task, or else the thread."""
    # Usually no loop runs, and then current_task() would raise an error.
    loop = _get_running_loop()
    task = None if loop is None else asyncio.current_task(loop)
    return task or threading.current_thread()


class Hold:
    """One holding of one key, which ends by ``release()`` or is lost.

    Any thread with a reference to it may release it. ``token`` is the fencing token,
    larger than that of every earlier hold of the key. ``owner`` is the secret identity,
    never to be shown whole. ``waited`` is the seconds that the caller waited, 0 if the
    key was free. ``takeover`` says that the last holder never released the key.
    """

    # Number of 'with hold' blocks that are open.
    _blocks = 0
    _ended = False
    _lost: str | None = None
    _failed = False
    # Created by the thread that settles the hold, and set when it is done.
    _settled: threading.Event | None = None
    # When the backend last answered a renewal.
    _answered_at = 0.0
    # The transaction of the hold, and the point in it.
    _connection: Any = None
    _mark: TransactionMarker | None = None

    def __init__(
        self,
        lock: Policy,
        backend: Backend,
        claim: Claim,
        grant: Grant,
        caller: Caller,
        sent: float,
        waited: float,
    ) -> None:
        lease = claim.ttl if grant.lease is None else min(grant.lease, claim.ttl)
        self.lock = lock
        self.backend = backend
        self.claim = claim
        self.scope: str = claim.scope
        self.token = grant.token
        self.takeover = grant.takeover
        self.waited = waited
        self.caller = caller
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._count = 1
        # Whether all entries accept a release before the transaction ends.
        self.leaves_at_exit = lock.release_at == "exit"
        self._granted_at = clock.now()
        # Counted from before the request, so it always passes before the backend's
        # deadline.
        self._deadline = FOREVER if self.scope == "transaction" else sent + lease
        self._last_at = FOREVER if lock.max_hold is None else sent + lock.max_hold
        # Without renewal, a hold still lasts for its ttl if the backend grants shorter
        # leases.
        short = grant.lease is not None and backend.renew_every < FOREVER
        self._kept_until = FOREVER if lock.renew else sent + claim.ttl if short else 0.0
        # The first lease of a queued claim is short. Only a very short hold needs no
        # renewal.
        due = self._granted_at + RENEW_SOON if grant.lease else sent + lease / 3
        self.renew_at = min(due, self._granted_at + backend.renew_every)
        # Transactions in which the lease was left, and at whose end it is released.
        self._left_in: list[TransactionMarker] = []
        # Transactions of hold.atomic() that keep the key, whatever the clocks say.
        self.pinned_in: list[TransactionMarker] = []
        # Its keys in holds_by_caller.
        self.entered_as: list[EntryKey] = []
        if self.scope == "transaction":
            self._connection = connection_of(backend.database)
            self._mark = TransactionMarker.here(self._connection)
            self._mark.keys.add((backend.identity, claim.key))

    def __repr__(self) -> str:
        return (
            f"<Hold {self.key!r} token={self.token} count={self._count}"
            f" {'held' if self.held else 'ended or lost'}>"
        )

    @property
    def key(self) -> str:
        return self.lock.key

    @property
    def keys(self) -> tuple[str, ...]:
        return self.lock.keys

    @property
    def tokens(self) -> dict[str, int]:
        """Return the fencing tokens by key.

        There is one, unless several keys are held.
        """
        return {self.key: self.token}

    @property
    def owner(self) -> str:
        return self.claim.owner

    @property
    def count(self) -> int:
        """Return how often the holder has entered and not left."""
        return self._count

    @property
    def held(self) -> bool:
        """Return whether the key is certainly held. This does no I/O.

        False may mean that the state is unknown.
        """
        if self.is_over:
            return False
        if self.scope == "transaction":
            return self._mark is not None and self._mark.stands
        return clock.now() < self._deadline

    @property
    def remaining(self) -> float:
        """Return the seconds for which the key is held without a renewal.

        This is infinite in a transaction.
        """
        return max(0.0, self._deadline - clock.now()) if self.held else 0.0

    @property
    def age(self) -> float:
        """Return the seconds since the grant."""
        return clock.now() - self._granted_at

    # Methods for the holder.

    def queue_length(self) -> int:
        """Return the number of callers that are queued for the key now.

        This asks the backend. It is 0 where there is no queue.
        """
        backend = self.backend
        ask = partial(backend.waiting, self.claim.key)
        return keeper.run(ask, backend) if is_outside(backend) else ask()

    def check(self) -> None:
        """Check with the backend that the key is held, or raise LockLost."""
        ensure_sync()
        if not self._keeps or not self._confirmed(self._count):
            self.lose(self.why_gone() if self._keeps else self.why_not())
            raise self._reported_lost()

    def renew(self) -> None:
        """Extend the lease to its ttl from now, or raise LockLost.

        In a transaction there is no lease, so this only checks the hold.
        """
        ensure_sync()
        if self.scope == "transaction" or self.pinned:
            self.check()
            return
        if self._keeps:
            sent = clock.now()
            if self._kept_until:
                self._kept_until = max(self._kept_until, sent + self.claim.ttl)
            claim = self.next_claim()
            self.renewed(sent, self._ask(self.backend.renew, [claim]))
            return
        self.lose(self.why_not())
        raise self._reported_lost()

    def renewed(self, sent: float, left: Mapping[str, float]) -> None:
        """Record the reply to the caller's renewal: the seconds left, by owner."""
        if self.owner not in left:
            self.lose(self.why_gone())
            raise self._reported_lost()
        if self.backend.refusal(self.claim) is None:
            # Otherwise the caller's transaction wrote it, and may roll it back.
            self.note_answer(sent, left[self.owner])

    def release(self, *, failed: bool = False) -> None:
        """Leave the hold once. The last entry to leave releases the key.

        Releasing again does nothing. ``failed`` sets the status of the row to F instead
        of S, for people who read it. Raise LockLost if the hold was lost, because its
        work was perhaps not exclusive.
        """
        ensure_sync()
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
            # An interrupted release must not leave the key acquired.
            if count == 0:
                self._end()
                with suppress(LockError):
                    self.release_again()
            raise

    def atomic(
        self, *, using: str | None = None, **atomic: Any
    ) -> AbstractContextManager[None]:
        """Open a transaction that commits while the key is held, or not at all.

            with hold.atomic():
                ...

        However long the process is paused, no other caller acquires the key before the
        transaction ends. If the hold is lost already, raise LockLost and write nothing.
        ``using`` may be another alias of the lock's database. Other arguments are those
        of Django's ``atomic()``.
        """
        return guarded([self], using, atomic)

    async def aatomic(
        self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call a function in ``hold.atomic()``, in Django's sync thread.

        Return its result.
        """

        def call() -> R:
            with self.atomic():
                result = function(*args, **kwargs)
                if inspect.isawaitable(result):
                    if inspect.iscoroutine(result):
                        result.close()
                    raise TypeError(
                        "aatomic() calls a synchronous function in Django's sync"
                        f" thread, but {function!r} returned an awaitable. Pass its"
                        " synchronous version."
                    )
                return result

        return await run_in_sync_thread(call, in_transaction_only=True)

    def detach(self, *, within: Duration | None = None) -> str:
        """Detach the hold, and return the text by which a process resumes it.

        See ``dlocks.core.detach``.
        """
        ensure_sync()
        from dlocks.core.detach import detach

        return detach(self, within=within)

    def _leave(self, count: int) -> None:
        if self._pid != os.getpid():
            self._ended = True
            raise self.lost_error("this process is a fork of its holder")
        if not self._keeps:
            self.lose(self.why_not())
        if self._lost is not None:
            if count == 0 and self._end():
                # If no caller has acquired the key yet, the next one need not wait for
                # the grace.
                with suppress(LockError):
                    self._ask(self.backend.release, self.claim, failed=True)
            raise self.lost_error()
        if count > 0:
            if not self._is_undone and not self._confirmed(count):
                self.lose(self.why_gone())
                raise self.lost_error()
        elif not self._leave_in_transactions() and self._end():
            self.release_claim()

    # The same methods for coroutines.

    async def aqueue_length(self) -> int:
        return await self._there(self.queue_length)

    async def acheck(self) -> None:
        await self._there(self.check)

    async def arenew(self) -> None:
        await self._there(self.renew)

    async def adetach(self, *, within: Duration | None = None) -> str:
        try:
            return await self._there(partial(self.detach, within=within))
        except asyncio.CancelledError:
            # No process will ever receive the text.
            await self._there(self._release_again)
            raise

    async def arelease(self, *, failed: bool = False) -> None:
        await self._there(partial(self.release, failed=failed))

    def __enter__(self) -> Self:
        if self._blocks >= self._entries:
            raise RuntimeError(
                f"This hold of {', '.join(map(repr, self.keys))} has been released, or"
                " an outer block releases it. Acquire the lock once for each block."
            )
        self._blocks += 1
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        self._blocks = max(0, self._blocks - 1)
        self.exit(error)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        self._blocks = max(0, self._blocks - 1)
        await self.aleave(error)

    @property
    def _entries(self) -> int:
        """Return how many entries are still to be left."""
        return 0 if self._ended else self._count

    async def _there(self, function: Callable[[], R]) -> R:
        return await run_in_sync_thread(
            function, in_transaction_only=self.scope == "transaction"
        )

    async def aleave(self, error: BaseException | None) -> None:
        await self._there(partial(self.exit, error))

    def exit(self, error: BaseException | None) -> None:
        """End a block by releasing the hold.

        If the block itself failed, a failed release only adds a note to its error.
        """
        try:
            self.release(failed=error is not None)
        except LockError as trouble:
            if error is None:
                raise
            error.add_note(f"{type(trouble).__name__}: {trouble}")

    # Methods for the handover.

    def transfer(self, ttl: float) -> tuple[float, float]:
        """End the hold here, without releasing the key.

        The lease lasts for ``ttl`` more seconds. Return the seconds left of
        ``min_hold`` and ``max_hold``.
        """
        if self.scope == "transaction":
            raise RuntimeError(
                f"{self.key!r} is held by a transaction, and cannot be handed over."
                " Acquire it with scope='lease'."
            )
        if self.lock.shared:
            raise RuntimeError(
                f"The shared hold on {self.key!r} cannot be handed over."
            )
        if not self.backend.supports_handover:
            raise RuntimeError(
                f"{type(self.backend).__name__} cannot hand {self.key!r} over to"
                " another process."
            )
        if (why := self.backend.refusal(self.claim)) is not None:
            raise RuntimeError(f"{self.key!r} cannot be handed over here. {why}")
        with self._mutex:
            if self._count > 1:
                raise RuntimeError(
                    f"{self.key!r} cannot be handed over while its caller has acquired"
                    f" it {self._count} times. Release the inner holds first."
                )
            ended = self._ended or self._count == 0
        now = clock.now()
        left = (
            max(0.0, self.lock.min_hold - (now - self._granted_at)),
            self._last_at - now,
        )
        if not ended and not self.held:
            self.lose(self.why_not())
        if self._lost is not None or ended or not self._end():
            raise self.lost_error(self._lost or "it has ended")
        claim = dataclasses.replace(self.claim, ttl=min(ttl, left[1]))
        try:
            # By the keeper, so that no pending renewal comes after it.
            stands = keeper.run(partial(self._leave_lease, claim), self.backend)
        except BaseException:
            self._ended = False
            holds_by_caller.update(dict.fromkeys(self.entered_as, self))
            keeper.keep(self)
            raise
        if not stands:
            self._ended = False
            self.lose(self.why_gone())
            self._ended = True
            raise self.lost_error()
        self._lost = HANDED_OVER
        send_ended(self, "detached")
        return left

    def _release_again(self) -> None:
        if self._lost == HANDED_OVER:
            with suppress(LockError):
                self._ask(self.backend.release, self.claim, failed=True)

    def _leave_lease(self, claim: Claim) -> bool:
        for number in range(10):
            left = self.backend.renew([claim])
            if claim.owner not in left:
                return False
            if left[claim.owner] >= claim.ttl:
                return True
            # A caller that tried to acquire the key has locked the row for a moment.
            time.sleep(0.001 * 2**number)
        raise LockBackendError(
            f"The lease on {self.key!r} could not be extended: another transaction has"
            " locked its row."
        )

    # Methods for the lock.

    @property
    def enterable(self) -> bool:
        """Return whether the same caller enters this hold, and needs no new one."""
        if self._ended or self._pid != os.getpid():
            return False
        if self.scope == "transaction":
            return self.held
        # A hold left in a transaction is kept for its min_hold from all callers, even
        # this one.
        return self._count > 0 or (self.held and self.age >= self.lock.min_hold)

    @property
    def is_left(self) -> bool:
        """Return whether only open transactions keep the hold."""
        return self._count == 0 and self.in_transactions and self.held

    def enter(self, lock: Policy) -> bool:
        """Count one more entry, and check that the key is still held.

        Return False if the hold has ended. Raise LockLost if it is lost.
        """
        with self._mutex:
            # Counted first, so that no other thread releases the key meanwhile.
            if self._ended:
                return False
            if self._count == 0:
                # The hold was left in a transaction. Its earlier blocks no longer
                # count.
                self._blocks = 0
                self.leaves_at_exit = True
            self.leaves_at_exit = self.leaves_at_exit and lock.release_at == "exit"
            self._count += 1
            count = self._count
            # The earlier transactions do not matter until the hold is left again.
            left_in, self._left_in = self._left_in, []
        keeper.forget_end(self)
        try:
            if not self._keeps:
                self.lose(self.why_not())
                raise self._reported_lost()
            if not self._confirmed(count):
                self.lose(self.why_gone())
                raise self._reported_lost()
        except BaseException:
            with self._mutex:
                self._count = count - 1
                self._left_in = left_in
            if left_in:
                keeper.await_end(self)
            raise
        return True

    def prolong(self) -> None:
        """Count one more entry, so that the hold outlasts the current block."""
        with self._mutex:
            self._count += 1

    def discard(self) -> bool:
        """Discard a hold that its caller never received.

        The lock cancels its claim. Return whether its end is still to be signalled.
        """
        self._count, self._failed = 0, True
        return self._end() and self._lost is None

    def revert_entry(self, count: int) -> None:
        """Restore the count from before an entry that its caller never received."""
        self._count = min(self._count, count)
        if (
            self._count == 0
            and not self._left_in
            and not self._leave_in_transactions()
            and self._end()
        ):
            self.release_claim()

    # Methods for the keeper.

    @property
    def is_over(self) -> bool:
        """Return whether the hold has ended, is lost, or is a parent process's."""
        return self._ended or self._lost is not None or self._pid != os.getpid()

    @property
    def pinned(self) -> bool:
        """Return whether an open transaction of ``atomic()`` keeps the key."""
        return any(mark.stands for mark in list(self.pinned_in))

    @property
    def _keeps(self) -> bool:
        """Return whether the key is held, or may still be.

        A hold may still be renewed after its lease has expired.
        """
        return self.held or (not self.is_over and (self.pinned or self._may_be_late))

    @property
    def _may_be_late(self) -> bool:
        """Return whether a renewal restores an expired lease.

        It does if no other caller has acquired the key.
        """
        return self.backend.renews_late and self.scope == "lease" and self.renewable

    @property
    def _is_undone(self) -> bool:
        """Return whether work under the hold is about to be rolled back.

        Only the transactions of this thread count.
        """
        if self.scope == "transaction":
            return bool(self._connection.needs_rollback)
        return any(
            mark.stands and not mark.is_elsewhere and mark.is_undone
            for mark in list(self.pinned_in)
        )

    def _confirmed(self, count: int) -> bool:
        """Ask the backend whether the key is still held, and store the count."""
        for mark in list(self.pinned_in):
            if mark.stands:
                # Only that transaction can check the row, which it has locked. The
                # lease may have expired, but no caller takes the key before the
                # transaction ends.
                return mark.is_elsewhere or bool(
                    self.backend.pin(self.claim, mark.alias)
                )
        claim, sent = (
            self.next_claim() if self._may_be_late else self.claim,
            clock.now(),
        )
        confirmed = bool(self._ask(self.backend.verify, [claim], count))
        if confirmed and claim.late and self.backend.refusal(self.claim) is None:
            self.note_answer(sent, claim.ttl)
        return confirmed

    def unpin(self) -> None:
        """Remove the pins that have ended."""
        for mark in list(self.pinned_in):
            if not mark.stands:
                # The caller and the keeper may do this at once.
                with suppress(ValueError):
                    self.pinned_in.remove(mark)

    def committed(self, sent: float) -> None:
        """Record the commit of a transaction that pinned the key.

        The lease counts from its last statement.
        """
        self.note_answer(sent, self.claim.ttl)
        self.unpin()
        keeper.check_soon()

    @property
    def due_at(self) -> float:
        """Return when the keeper should check this hold."""
        if self.in_transactions:
            return clock.now() + POLL_EVERY
        return min(self.renew_at, self._lost_at) if self.renewable else self._deadline

    @property
    def _lost_at(self) -> float:
        """Return when the hold is lost unless it is renewed."""
        if self._may_be_late:
            return max(self._deadline, self._answered_at + NOT_LOST_FOR)
        return self._deadline

    @property
    def first_due_at(self) -> float:
        """Return ``due_at`` for a hold that was just granted to this caller."""
        return min(self.renew_at, self._deadline) if self.lock.renew else self.due_at

    @property
    def renewable(self) -> bool:
        """Return whether the keeper should renew the hold.

        Not for a caller that has died, nor beyond ``max_hold``.
        """
        if (
            self._ended
            or self._lost is not None
            or self._deadline >= min(self._last_at, self._kept_until)
        ):
            return False
        if self.pinned_in and self.pinned:
            return False
        # Some libraries replace Thread and Task, so isinstance() does not work.
        if hasattr(self.caller, "get_loop"):
            # Not the task itself. One that only acquires, as in gather(), is done at
            # once.
            return self.caller.get_loop().is_running()
        return is_alive(self.caller)

    def next_claim(self) -> Claim:
        """Return the claim for a renewal, at most until ``max_hold``.

        It is ``late`` where the lease may have expired.
        """
        now = clock.now()
        ttl = min(self.claim.ttl, min(self._last_at, self._kept_until or FOREVER) - now)
        late = self._deadline - now < ALMOST_OVER and self._may_be_late
        if ttl == self.claim.ttl and not late:
            return self.claim
        return dataclasses.replace(self.claim, ttl=max(ttl, 0.0), late=late)

    def note_answer(self, sent: float, seconds: float) -> None:
        """Record a renewal that lasts for ``seconds`` from ``sent``."""
        with self._mutex:
            self._answered_at = clock.now()
            self._deadline = max(self._deadline, min(sent + seconds, self._last_at))
            step = min(self.claim.ttl / 3, self.backend.renew_every)
            if seconds >= step:
                self.renew_at = sent + step
                return
        # The row was locked, so the lease was not fully extended. Retry soon.
        self.put_off_renewal()

    def put_off_renewal(self) -> None:
        # The first lease of a queued claim is much shorter than its ttl.
        now = clock.now()
        soon = max(
            SOONEST_RENEWAL, min(self.claim.ttl / 10, (self._deadline - now) / 4)
        )
        self.renew_at = now + min(soon, self.backend.renew_every)

    @property
    def in_transactions(self) -> bool:
        """Return whether the hold's state depends on the end of transactions."""
        return bool(self.pinned_in or self._left_in)

    @property
    def to_settle(self) -> bool:
        """Return whether the transactions in which it was left have ended."""
        left_in = self._left_in
        return bool(left_in) and not any(mark.stands for mark in left_in)

    def check_expiry(self) -> None:
        """Check whether the lease has expired, or pinning transactions have ended."""
        if self.pinned_in:
            if self.pinned:
                return
            self.unpin()
        if not self._ended and self._lost is None and clock.now() >= self._lost_at:
            self.lose(self.why_not())

    def settle(self, patience: float = SETTLE_TIMEOUT) -> None:
        """Release a lease once all transactions in which it was left have ended.

        If another thread does so, wait for it, at most ``patience`` seconds.
        """
        with self._mutex:
            stays = (
                self._count
                or self._ended
                or not self._left_in
                or any(mark.stands for mark in self._left_in)
            )
            settled = self._settled
            if not stays:
                self._left_in = []
                self._ended = True
                self._settled = settled = threading.Event()
        if settled is None:
            return
        if stays:
            # The keeper may have noticed the end of the transaction first.
            settled.wait(patience)
            return
        try:
            keeper.drop(self)
            self.release_claim()
        except LockError as trouble:
            logger.warning("%s", trouble)
        except BaseException:
            # Perhaps the release was not sent yet, and nothing else would send it.
            with suppress(LockError):
                self.release_again()
            raise
        finally:
            settled.set()

    def lose(self, why: str) -> None:
        """Mark the hold as lost, and signal the loss once."""
        with self._mutex:
            if self._ended or self._lost is not None:
                return
            self._lost = why
        keeper.drop(self)
        logger.warning("%s", self.lost_error())
        if keeper.is_current:
            # User code must not keep the keeper from the other holds.
            try:
                threading.Thread(
                    target=self._signal_and_disconnect, name="dlocks-lost", daemon=True
                ).start()
            except RuntimeError:
                # A late signal is better than none.
                logger.exception(
                    "No thread could be started, so the keeper signals the loss of %r"
                    " itself, and renews no lease meanwhile",
                    self.key,
                )
                self._signal_and_disconnect()
        else:
            self._tell()

    def _tell(self) -> None:
        send_ended(self, "lost")
        if self.lock.on_lost is not None:
            try:
                self.lock.on_lost(self)
            except Exception:
                logger.exception("on_lost of %r failed", self.key)

    def _signal_and_disconnect(self) -> None:
        try:
            self._tell()
        finally:
            connections.close_all()

    def end_at_exit(self) -> None:
        """Release the key at the end of the process, even while it is in use."""
        if self.held and self._end():
            self._failed = True
            try:
                self.release_claim()
            except LockError as trouble:
                logger.warning("%s", trouble)

    # Internal methods.

    def _ask(self, function: Any, *arguments: Any, **keywords: Any) -> Any:
        """Call the backend about the hold.

        A lease is handled outside of the caller's transaction and pool.
        """
        backend = self.backend
        if (
            self.scope == "transaction"
            and connection_of(backend.database) is not self._connection
        ):
            raise RuntimeError(
                f"{self.key!r} is held by a transaction of another thread. Only that"
                " thread can use the hold."
            )
        # Within hold.atomic() only the caller's transaction can write the row.
        if (
            self.scope == "lease"
            and is_outside(backend)
            and (not self.pinned or backend.connect_first)
        ):
            return keeper.run(partial(function, *arguments, **keywords), backend)
        return function(*arguments, **keywords)

    def _leave_in_transactions(self) -> bool:
        """Keep a lease until the open transactions end, and return whether it is.

        Their changes are not visible before. With ``release_at="exit"``, keep it only
        for those beside which it cannot be written. They have pinned it, or the
        database has a single writer.
        """
        if self.scope == "transaction":
            return False
        marks = [mark for mark in list(self.pinned_in) if mark.stands]
        if not self.leaves_at_exit:
            marks += [
                mark
                for mark in map(TransactionMarker.whole, open_connections())
                if mark not in marks
            ]
        elif not marks and self.backend.refusal(self.claim) is not None:
            # A rollback would undo a release written here.
            marks = [
                TransactionMarker.whole(one)
                for one in open_connections()
                if one.alias == self.backend.database
            ]
        for mark in marks:
            if self.settle not in mark.at_commit:
                mark.at_commit.append(self.settle)
        with self._mutex:
            self._left_in = marks
        if marks:
            # A rollback drops the on_commit() callbacks, perhaps with the last
            # reference to this hold.
            keeper.await_end(self)
        return bool(marks)

    def end_with_others(self, *, failed: bool) -> bool:
        """End the hold, except for the request to the backend.

        Return False if a release has more to do, or less.
        """
        with self._mutex:
            if self._count != 1 or not self.held or self.lock.min_hold:
                return False
            self._count, self._failed = 0, self._failed or failed
        return self._end()

    def release_claim(self, *, done: bool = False) -> None:
        """Release the key of an ended hold.

        ``done`` says that the backend has released it.
        """
        broken = self.scope == "transaction" and self._connection.needs_rollback
        try:
            released = done or self._ask(
                self.backend.release,
                self.claim,
                failed=self._failed,
                keep=self._kept_for(),
            )
        except LockBackendError as error:
            if self.scope != "transaction":
                raise
            if not broken and self._connection.needs_rollback:
                # The server has rolled it back because another node of the cluster was
                # first.
                raise self.lost_error(
                    "the server has rolled back its transaction"
                ) from error
            # The broken transaction releases the row when it ends.
            return
        if not released:
            if self.scope == "transaction":
                # The server has rolled it back, and the caller is in another
                # transaction.
                self._connection.needs_rollback = self._connection.in_atomic_block
            self._ended = False
            self.lose(self.why_gone())
            self._ended = True
            raise self.lost_error()
        send_ended(self, "released")

    def release_again(self) -> None:
        """Release the key of an ended hold, perhaps once more."""
        self._ask(self.backend.release, self.claim, failed=True, keep=self._kept_for())

    def _kept_for(self) -> float:
        """Return the seconds for which the key stays taken after its release."""
        # Counted from the reply, so it is never too short by the row's begin_time.
        return max(0.0, self.lock.min_hold - self.age) if self.lock.min_hold else 0.0

    def _end(self) -> bool:
        with self._mutex:
            if self._ended:
                return False
            self._ended = True
        keeper.drop(self)
        self._forget_entrances()
        return True

    def _forget_entrances(self) -> None:
        # Weak references would go by themselves. But Python swallows a Ctrl-C that
        # comes while one dies.
        for key in self.entered_as:
            if hold_by(key) is self:
                del holds_by_caller[key]

    def why_not(self) -> str:
        if self.scope == "transaction":
            return "its transaction has ended"
        if clock.now() >= self._last_at:
            return f"it was held for its max_hold of {self.lock.max_hold:.10g} s"
        return f"it was not renewed within its ttl of {self.claim.ttl:g} s"

    def why_gone(self) -> str:
        """Return why the key is no longer held, and who took it, if known."""
        if self.scope == "transaction" or self._lost is not None:
            return GONE
        backend = self.backend
        ask = partial(backend.inspector.taken_by, self.claim, self.token, self.age)
        try:
            outside = backend.in_transaction() and backend.refusal(self.claim) is None
            fact = (
                keeper.run(ask, backend, patience=OUTSIDE_TIMEOUT) if outside else ask()
            )
        except Exception:
            # The loss is certain, and it is what matters.
            logger.debug("The new holder of %r is not known", self.key, exc_info=True)
            fact = None
        return f"{GONE}: {fact}" if fact else GONE

    def _reported_lost(self) -> LockLost:
        """Return the error for a caller that learns of the loss by it.

        Its next acquisition makes a new hold.
        """
        self._forget_entrances()
        return self.lost_error()

    def lost_error(self, why: str | None = None) -> LockLost:
        why = why or self._lost
        who = f"{shown_holder(self.claim.holder)} (token {self.token})"
        return LockLost(
            (
                f"{self.key!r} was lost by {who}: {why}."
                if why
                else f"{self.key!r} has been released by {who}."
            ),
            key=self.key,
            token=self.token,
        )


# The holds by caller, for entering again. They are weak, so that a forgotten hold can
# end.
holds_by_caller: weakref.WeakValueDictionary[EntryKey, Hold] = (
    weakref.WeakValueDictionary()
)


def hold_by(entrance: EntryKey) -> Hold | None:
    """Return the hold of a caller, or None.

    Unlike ``get()``, this raises no internal exception in the usual case of no hold.
    """
    reference: Any = holds_by_caller.data.get(entrance)  # type: ignore[attr-defined]
    return None if reference is None else reference()


in_child(holds_by_caller.clear)
