"""The holding of a lock: what ``with db_lock(…) as hold`` gives."""

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

from dlocks import clock, privacy
from dlocks.backends.base import BaseBackend, Claim, Grant
from dlocks.connected import connection_of
from dlocks.coroutines import in_django_thread, refuse_in_a_coroutine
from dlocks.exceptions import LockBackendError, LockError, LockLost
from dlocks.forks import in_child
from dlocks.greenlets import is_alive
from dlocks.guard import guarded
from dlocks.keeper import FOREVER, keeper
from dlocks.signals import tell_ended
from dlocks.transactions import Mark, open_connections

if TYPE_CHECKING:
    from dlocks.locks import Lock

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("dlocks")

# How often the keeper looks whether a transaction in which a lease was left has ended.
LOOK_EVERY = 0.05

# How soon a hold that came from the line, with a short lease, is renewed.
RENEW_SOON = 0.1
# How soon a renewal that came to nothing is tried again at the earliest.
SOONEST_RENEWAL = 0.02

# How long the end of a transaction waits for the keeper, where that gives a lease back which was left in it.
SETTLING_PATIENCE = 5.0

HANDED_OVER = "it was handed over"

Caller = threading.Thread | asyncio.Task[Any]

# Refused before anything is done, so that the other verb can do it.
not_in_a_coroutine = partial(
    refuse_in_a_coroutine, "'async with', or a verb with an 'a', as in 'await hold.arelease()'"
)

# Whose hold, of which backend, on which key, and whether it is shared.
Entrance = tuple[Caller, str, str, bool]


def current_caller() -> Caller:
    """Return who holds what is acquired here: the running asyncio task, or else the thread."""
    # Rather than to ask for a task and to catch the error where no loop runs, as is the rule.
    loop = _get_running_loop()
    task = None if loop is None else asyncio.current_task(loop)
    return task or threading.current_thread()


class Hold:
    """
    One holding of one key. It ends by ``release()``, or is lost.

    Ownership is the hold itself: any thread that has it may release it. ``token`` is the fencing token: larger than
    that of every earlier hold of the key. ``owner`` is the capability behind the hold, never to be shown whole.
    ``waited`` says how many seconds the caller waited for it: 0 when the key was free. ``takeover`` says that its last
    holder never came back.
    """

    # How many blocks of its own it is in: 'with hold'.
    _blocks = 0
    _ended = False
    _lost: str | None = None
    _failed = False
    # Set when it has been settled, by the thread that came first to it.
    _settled: threading.Event | None = None
    # The transaction that the hold belongs to, and where in it.
    _connection: Any = None
    _mark: Mark | None = None

    def __init__(
        self, lock: Lock, backend: BaseBackend, claim: Claim, grant: Grant, caller: Caller, sent: float, waited: float
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
        # Whether all of its entries are content that it is left at their end, and not with the transaction.
        self.leaves_at_exit = lock.release_at == "exit"
        self._granted_at = clock.now()
        # Counted from before the request was sent, so this clock always runs out before the backend's.
        self._deadline = FOREVER if self.scope == "transaction" else sent + lease
        self._last_at = FOREVER if lock.max_hold is None else sent + lock.max_hold
        # One that is not to be renewed lasts for its ttl all the same where the backend answers for less at a time.
        short = grant.lease is not None and backend.renew_every < FOREVER
        self._kept_until = FOREVER if lock.renew else sent + claim.ttl if short else 0.0
        # The first lease of a claim that stood in line is a short one: only what is over at once is not renewed.
        due = self._granted_at + RENEW_SOON if grant.lease else sent + lease / 3
        self.renew_at = min(due, self._granted_at + backend.renew_every)
        # The open transactions in which the lease was left, and at the end of which it is given back.
        self._left_in: list[Mark] = []
        # The transactions of hold.atomic() that keep the key, whatever the clocks say.
        self.pinned_in: list[Mark] = []
        # Its places in holds_by_caller.
        self.entered_as: list[Entrance] = []
        if self.scope == "transaction":
            self._connection = connection_of(backend.database)
            self._mark = Mark.here(self._connection)
            self._mark.keys.add((backend.identity, claim.key))

    def __repr__(self) -> str:
        return f"<Hold {self.key!r} token={self.token} count={self._count} {'held' if self.held else 'ended or lost'}>"

    # What it is.

    @property
    def key(self) -> str:
        return self.lock.key

    @property
    def keys(self) -> tuple[str, ...]:
        return self.lock.keys

    @property
    def tokens(self) -> dict[str, int]:
        """The fencing tokens by key: one, unless several keys are held."""
        return {self.key: self.token}

    @property
    def owner(self) -> str:
        return self.claim.owner

    @property
    def count(self) -> int:
        """How often the holder has entered and not left."""
        return self._count

    @property
    def held(self) -> bool:
        """Whether the key is this hold's for certain. No I/O: False may mean that it is merely not known."""
        if self.is_over:
            return False
        if self.scope == "transaction":
            return self._mark is not None and self._mark.stands
        return clock.now() < self._deadline

    @property
    def remaining(self) -> float:
        """Seconds for which the key is this hold's even if nothing renews it; infinite in a transaction."""
        return max(0.0, self._deadline - clock.now()) if self.held else 0.0

    @property
    def waiting(self) -> int:
        """How many callers stand in line for the key now. Asks the backend; 0 where it has no line."""
        backend = self.backend
        if backend.in_transaction() and backend.lease_refused() is None:
            return keeper.run(partial(backend.waiting, self.claim.key), backend)
        return backend.waiting(self.claim.key)

    async def awaiting(self) -> int:
        return await self._there(lambda: self.waiting)

    @property
    def age(self) -> float:
        """Seconds since it was granted."""
        return clock.now() - self._granted_at

    # What its holder can do.

    def check(self) -> None:
        """Ask the backend whether the key is still this hold's; raise LockLost when not."""
        not_in_a_coroutine()
        if not self._keeps or not self._confirmed(self._count):
            self.lose("the backend says it is no longer this hold's" if self._keeps else self.why_not())
            raise self._told_lost()

    def renew(self) -> None:
        """Extend the lease to its ttl from now; raise LockLost when it is gone. In a transaction there is no lease."""
        not_in_a_coroutine()
        if self.scope == "transaction" or self.pinned:
            self.check()
            return
        if self.held:
            sent = clock.now()
            if self._kept_until:
                self._kept_until = max(self._kept_until, sent + self.claim.ttl)
            claim = self.next_claim()
            self.renewed(sent, self._ask(self.backend.renew, [claim]))
            return
        self.lose(self.why_not())
        raise self._told_lost()

    def renewed(self, sent: float, left: Mapping[str, float]) -> None:
        """Note what the backend answered, by owner, to a renewal that the caller asked for."""
        if self.owner not in left:
            self.lose("the backend says it is no longer this hold's")
            raise self._told_lost()
        if self.backend.lease_refused() is None:
            # Otherwise it was written by the caller's transaction, which may take it back.
            self.note_answer(sent, left[self.owner])

    def release(self, *, failed: bool = False) -> None:
        """
        Leave once; the last to leave gives the key back. To leave again does nothing.

        ``failed`` is for people who look at the row: its status becomes F instead of S. Raise LockLost when the hold
        was lost before: what was done under it was perhaps not done alone.
        """
        not_in_a_coroutine()
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
                    self.take_back()
            raise

    def atomic(self, *, using: str | None = None, **atomic: Any) -> AbstractContextManager[None]:
        """
        Open a transaction that commits while the key is this hold's, or does not commit: ``with hold.atomic():``.

        However long the process is paused in it, nobody takes the key before it has ended. Raise LockLost, with
        nothing written, when the hold is lost already. The other arguments are those of Django's ``atomic()``;
        ``using`` may be another alias of the database that the lock is in.
        """
        return guarded(self, using, atomic)

    async def aatomic(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function in ``hold.atomic()``, in Django's own thread; return its result."""

        def call() -> R:
            with self.atomic():
                result = function(*args, **kwargs)
                if inspect.isawaitable(result):
                    if inspect.iscoroutine(result):
                        result.close()
                    raise TypeError(
                        f"aatomic() calls a function in Django's own thread, where nobody awaits what {function!r} "
                        "returns: give it the synchronous twin."
                    )
                return result

        return await in_django_thread(call, only_there=True)

    def detach(self, *, within: float | None = None) -> str:
        """Give the hold away, to the process that resumes it by the text returned; see ``dlocks.handover``."""
        not_in_a_coroutine()
        from dlocks.handover import detach

        return detach(self, within=within)

    def _leave(self, count: int) -> None:
        if self._pid != os.getpid():
            self._ended = True
            raise self.lost_error("this process is a fork of the one that holds it")
        if not self._keeps:
            self.lose(self.why_not())
        if self._lost is not None:
            if count == 0 and self._end():
                # Nobody may have taken it yet; then it need not wait for the grace of a crash.
                with suppress(LockError):
                    self._ask(self.backend.release, self.claim, failed=True)
            raise self.lost_error()
        if count > 0:
            if not self._is_undone and not self._confirmed(count):
                self.lose("the backend says it is no longer this hold's")
                raise self.lost_error()
        elif not self._leave_in_transactions() and self._end():
            self.give_back()

    # The same for coroutines.

    async def acheck(self) -> None:
        await self._there(self.check)

    async def arenew(self) -> None:
        await self._there(self.renew)

    async def adetach(self, *, within: float | None = None) -> str:
        try:
            return await self._there(partial(self.detach, within=within))
        except asyncio.CancelledError:
            # Nobody will ever have the text.
            await self._there(self._take_back)
            raise

    async def arelease(self, *, failed: bool = False) -> None:
        await self._there(partial(self.release, failed=failed))

    def __enter__(self) -> Self:
        if self._blocks >= self._entries:
            raise RuntimeError(
                f"This hold of {', '.join(map(repr, self.keys))} was given back already, or is by a block around "
                "this one: acquire the lock once more for each block."
            )
        self._blocks += 1
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._blocks = max(0, self._blocks - 1)
        self.leave(error)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._blocks = max(0, self._blocks - 1)
        await self.aleave(error)

    @property
    def _entries(self) -> int:
        """How often it is still to be left."""
        return 0 if self._ended else self._count

    async def _there(self, function: Callable[[], R]) -> R:
        return await in_django_thread(function, only_there=self.scope == "transaction")

    async def aleave(self, error: BaseException | None) -> None:
        await self._there(partial(self.leave, error))

    def leave(self, error: BaseException | None) -> None:
        """End a block: release, but let the block's own error pass, with a note about what went wrong besides."""
        try:
            self.release(failed=error is not None)
        except LockError as trouble:
            if error is None:
                raise
            error.add_note(f"{type(trouble).__name__}: {trouble}")

    # For the handover.

    def give_away(self, ttl: float) -> tuple[float, float]:
        """
        End the hold here, without giving the key back, and leave it a lease of ``ttl`` seconds.

        Return what is left of its at_least and max_hold.
        """
        if self.scope == "transaction":
            raise RuntimeError(
                f"{self.key!r} belongs to a transaction, which cannot be handed over: take it with scope='lease'."
            )
        if self.lock.shared:
            raise RuntimeError(f"{self.key!r} is shared, and a share cannot be handed over.")
        if not self.backend.supports_handover:
            raise RuntimeError(f"{type(self.backend).__name__} cannot hand {self.key!r} over to another process.")
        if (why := self.backend.lease_refused()) is not None:
            raise RuntimeError(f"{self.key!r} cannot be handed over here. {why}")
        with self._mutex:
            if self._count > 1:
                raise RuntimeError(f"{self.key!r} was entered {self._count} times: only a single entry is handed over.")
            ended = self._ended or self._count == 0
        now = clock.now()
        left = max(0.0, self.lock.at_least - (now - self._granted_at)), self._last_at - now
        if not ended and not self.held:
            self.lose(self.why_not())
        if self._lost is not None or ended or not self._end():
            raise self.lost_error(self._lost or "it has ended")
        claim = dataclasses.replace(self.claim, ttl=min(ttl, left[1]))
        try:
            # By the keeper, so that no renewal which is on its way comes after this one.
            stands = keeper.run(partial(self._leave_lease, claim), self.backend)
        except BaseException:
            self._ended = False
            holds_by_caller.update(dict.fromkeys(self.entered_as, self))
            keeper.keep(self)
            raise
        if not stands:
            self._ended = False
            self.lose("the backend says it is no longer this hold's")
            self._ended = True
            raise self.lost_error()
        self._lost = HANDED_OVER
        tell_ended(self, "detached")
        return left

    def _take_back(self) -> None:
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
            # Locked just then, by somebody who tried to take it.
            time.sleep(0.001 * 2**number)
        raise LockBackendError(f"The lease on {self.key!r} could not be extended: it is locked by another transaction.")

    # For the lock.

    @property
    def enterable(self) -> bool:
        """Whether the same caller, entering again, is in this hold rather than in need of a new one."""
        if self._ended or self._pid != os.getpid():
            return False
        if self.scope == "transaction":
            return self.held
        # One that is left, in a transaction, is kept for its at_least from whoever comes, also from this caller.
        return self._count > 0 or (self.held and self.age >= self.lock.at_least)

    @property
    def is_left(self) -> bool:
        """Whether it is kept, to the end of transactions, for nobody who is inside of it."""
        return self._count == 0 and self.in_transactions and self.held

    def enter(self, lock: Lock) -> bool:
        """Count one entry more, and ask whether the key is still this hold's; return False when it has ended."""
        with self._mutex:
            # Counted before asking: from here on nobody gives the key back behind this caller's back.
            if self._ended:
                return False
            if self._count == 0:
                # Left in a transaction, and entered anew: the blocks of before are of no account.
                self._blocks = 0
                self.leaves_at_exit = True
            self.leaves_at_exit = self.leaves_at_exit and lock.release_at == "exit"
            self._count += 1
            count = self._count
            # What it was left in before is of no account until it is left again.
            left_in, self._left_in = self._left_in, []
        keeper.forget_end(self)
        try:
            if not self._keeps:
                self.lose(self.why_not())
                raise self._told_lost()
            if not self._confirmed(count):
                self.lose("the backend says it is no longer this hold's")
                raise self._told_lost()
        except BaseException:
            with self._mutex:
                self._count = count - 1
                self._left_in = left_in
            if left_in:
                keeper.await_end(self)
            raise
        return True

    def abandon(self) -> bool:
        """
        Forget a hold that its caller never learned of; the claim behind it is given up by the lock.

        Return whether its end is still to be told.
        """
        self._count, self._failed = 0, True
        return self._end() and self._lost is None

    def undo_entry(self, count: int) -> None:
        """Go back to the count from before an entry that its caller never learned of."""
        self._count = min(self._count, count)
        if self._count == 0 and not self._left_in and not self._leave_in_transactions() and self._end():
            self.give_back()

    # For the keeper.

    @property
    def is_over(self) -> bool:
        """Whether it has ended, was lost, or is that of the process that this one is a fork of."""
        return self._ended or self._lost is not None or self._pid != os.getpid()

    @property
    def pinned(self) -> bool:
        """Whether a transaction that has not ended keeps the key."""
        return any(mark.stands for mark in list(self.pinned_in))

    @property
    def _keeps(self) -> bool:
        """Whether to ask the backend at all: it is held, or a transaction keeps it though its lease is over."""
        return self.held or (not self.is_over and self.pinned)

    @property
    def _is_undone(self) -> bool:
        """Whether what has been done under it, in this thread's transaction, is about to be rolled back."""
        if self.scope == "transaction":
            return bool(self._connection.needs_rollback)
        return any(mark.stands and not mark.is_elsewhere and mark.is_undone for mark in list(self.pinned_in))

    def _confirmed(self, count: int) -> bool:
        """Ask the backend whether the key is still this hold's, and have it note the count."""
        for mark in list(self.pinned_in):
            if mark.stands:
                # The row is locked by that transaction, and only there can it be asked for; its lease may be over, and
                # nobody takes it before the end of that.
                return mark.is_elsewhere or bool(self.backend.pin(self.claim, mark.alias))
        return bool(self._ask(self.backend.recount, self.claim, count))

    def unpin(self) -> None:
        """Forget the pins that have ended."""
        for mark in list(self.pinned_in):
            if not mark.stands:
                # The caller and the keeper may do it at once.
                with suppress(ValueError):
                    self.pinned_in.remove(mark)

    def committed(self, sent: float) -> None:
        """Note that a transaction which pinned the key is committed: the lease is whole since its last statement."""
        self.note_answer(sent, self.claim.ttl)
        self.unpin()
        keeper.look()

    @property
    def due_at(self) -> float:
        """When the keeper should look at this hold."""
        if self.in_transactions:
            return clock.now() + LOOK_EVERY
        return min(self.renew_at, self._deadline) if self.renewable else self._deadline

    @property
    def first_due_at(self) -> float:
        """The same, of a hold that was granted just now to who asks."""
        return min(self.renew_at, self._deadline) if self.lock.renew else self.due_at

    @property
    def renewable(self) -> bool:
        """Whether the keeper should renew: not for a caller that has died, nor beyond max_hold."""
        if self._ended or self._lost is not None or self._deadline >= min(self._last_at, self._kept_until):
            return False
        if self.pinned_in and self.pinned:
            return False
        # No isinstance(): there are those who put classes of their own in the place of Thread and Task.
        if hasattr(self.caller, "get_loop"):
            # Not the task itself: one that only acquires, as gather() makes them, is done at once.
            return self.caller.get_loop().is_running()
        return is_alive(self.caller)

    def next_claim(self) -> Claim:
        """Return the claim to renew by: for its ttl, but not beyond max_hold."""
        ttl = min(self.claim.ttl, min(self._last_at, self._kept_until or FOREVER) - clock.now())
        return self.claim if ttl == self.claim.ttl else dataclasses.replace(self.claim, ttl=max(ttl, 0.0))

    def note_answer(self, sent: float, seconds: float) -> None:
        """Note what a renewal answered: so many seconds from when it was sent."""
        with self._mutex:
            self._deadline = max(self._deadline, min(sent + seconds, self._last_at))
            step = min(self.claim.ttl / 3, self.backend.renew_every)
            if seconds >= step:
                self.renew_at = sent + step
                return
        # Not in full when the row was locked just then: soon again.
        self.put_off_renewal()

    def put_off_renewal(self) -> None:
        # The first lease of a claim that stood in line is much shorter than its ttl.
        now = clock.now()
        soon = max(SOONEST_RENEWAL, min(self.claim.ttl / 10, (self._deadline - now) / 4))
        self.renew_at = now + min(soon, self.backend.renew_every)

    @property
    def in_transactions(self) -> bool:
        """Whether transactions have to end before anything can be said of it."""
        return bool(self.pinned_in or self._left_in)

    @property
    def to_settle(self) -> bool:
        """Whether the transactions in which it was left have ended."""
        left_in = self._left_in
        return bool(left_in) and not any(mark.stands for mark in left_in)

    def look(self) -> None:
        """See whether the lease ran out, or the transactions that pinned the key have ended."""
        if self.pinned_in:
            if self.pinned:
                return
            self.unpin()
        if not self._ended and self._lost is None and clock.now() >= self._deadline:
            self.lose(self.why_not())

    def settle(self, patience: float = SETTLING_PATIENCE) -> None:
        """Give back a lease that was left in transactions, once all of them have ended; or wait for who is about it."""
        with self._mutex:
            stays = self._count or self._ended or not self._left_in or any(mark.stands for mark in self._left_in)
            settled = self._settled
            if not stays:
                self._left_in = []
                self._ended = True
                self._settled = settled = threading.Event()
        if settled is None:
            return
        if stays:
            # The keeper may have seen the end of the transaction first.
            settled.wait(patience)
            return
        try:
            keeper.drop(self)
            self.give_back()
        except LockError as trouble:
            logger.warning("%s", trouble)
        except BaseException:
            # Interrupted, perhaps before the release was sent: nobody else would do it.
            with suppress(LockError):
                self.take_back()
            raise
        finally:
            settled.set()

    def lose(self, why: str) -> None:
        """Mark the hold as lost and tell so, once."""
        with self._mutex:
            if self._ended or self._lost is not None:
                return
            self._lost = why
        keeper.drop(self)
        logger.warning("%s", self.lost_error())
        if keeper.is_current:
            # What users do there must not keep the keeper from the other holds.
            try:
                threading.Thread(target=self._tell_and_disconnect, name="dlocks-lost", daemon=True).start()
            except RuntimeError:
                # There can be no more threads: late is better than never.
                logger.exception("The loss of %r is told by the keeper, who does nothing else meanwhile", self.key)
                self._tell_and_disconnect()
        else:
            self._tell()

    def _tell(self) -> None:
        tell_ended(self, "lost")
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
                self.give_back()
            except LockError as trouble:
                logger.warning("%s", trouble)

    # Inside.

    def _ask(self, function: Any, *arguments: Any, **keywords: Any) -> Any:
        """Ask the backend about the hold; about a lease, from outside of the caller's transaction."""
        backend = self.backend
        if self.scope == "transaction" and connection_of(backend.database) is not self._connection:
            raise RuntimeError(
                f"{self.key!r} belongs to a transaction of another thread: only that one can use the hold."
            )
        outside = self.scope == "lease" and backend.in_transaction() and backend.lease_refused() is None
        # Within hold.atomic() nobody else can write the row.
        if outside and not self.pinned:
            return keeper.run(partial(function, *arguments, **keywords), backend)
        return function(*arguments, **keywords)

    def _leave_in_transactions(self) -> bool:
        """
        Keep a lease until the open transactions have ended, since what they do is not seen before.

        With ``release_at="exit"`` only until those have beside which the lease cannot be written: they have it pinned,
        or the database has one writer.
        """
        if self.scope == "transaction":
            return False
        marks = [mark for mark in list(self.pinned_in) if mark.stands]
        if not self.leaves_at_exit:
            marks += [mark for mark in map(Mark.whole, open_connections()) if mark not in marks]
        elif not marks and self.backend.lease_refused() is not None:
            # What is written here its rollback would take back.
            marks = [Mark.whole(one) for one in open_connections() if one.alias == self.backend.database]
        for mark in marks:
            if self.settle not in mark.at_commit:
                mark.at_commit.append(self.settle)
        with self._mutex:
            self._left_in = marks
        if marks:
            # Django drops what is to be done on commit by a rollback, and with that perhaps the last who knows of it.
            keeper.await_end(self)
        return bool(marks)

    def end_with_others(self, *, failed: bool) -> bool:
        """End, but for the backend's being told; or return False where there is more, or less, to do than that."""
        with self._mutex:
            if self._count != 1 or not self.held or self.lock.at_least:
                return False
            self._count, self._failed = 0, self._failed or failed
        return self._end()

    def give_back(self, *, done: bool = False) -> None:
        """Tell the backend, unless that is done, that the hold, ended already, is given back."""
        broken = self.scope == "transaction" and self._connection.needs_rollback
        try:
            released = done or self._ask(self.backend.release, self.claim, failed=self._failed, keep=self._kept_for())
        except LockBackendError as error:
            if self.scope != "transaction":
                raise
            if not broken and self._connection.needs_rollback:
                # Told only now: the server has rolled it back, since another node of the cluster was first.
                raise self.lost_error("the server has rolled back its transaction") from error
            # The caller's transaction is broken, and the row goes with it.
            return
        if not released:
            if self.scope == "transaction":
                # The server has rolled it back, and the caller goes on in another one.
                self._connection.needs_rollback = self._connection.in_atomic_block
            self._ended = False
            self.lose("the backend says it is no longer this hold's")
            self._ended = True
            raise self.lost_error()
        tell_ended(self, "released")

    def take_back(self) -> None:
        """Tell the backend, perhaps once more, that the hold, ended already, is given back."""
        self._ask(self.backend.release, self.claim, failed=True, keep=self._kept_for())

    def _kept_for(self) -> float:
        """Return for how many seconds the key stays taken though it is given back."""
        # Counted from the reply to the acquisition, so not a moment short of the row's begin_time.
        return max(0.0, self.lock.at_least - self.age) if self.lock.at_least else 0.0

    def _end(self) -> bool:
        with self._mutex:
            if self._ended:
                return False
            self._ended = True
        keeper.drop(self)
        self._forget_entrances()
        return True

    def _forget_entrances(self) -> None:
        # By hand, though it would go by itself: Python swallows a Ctrl-C that comes while a weak reference dies.
        for key in self.entered_as:
            if hold_by(key) is self:
                del holds_by_caller[key]

    def why_not(self) -> str:
        if self.scope == "transaction":
            return "its transaction has ended"
        if clock.now() >= self._last_at:
            return f"it was held for its max_hold of {self.lock.max_hold} s"
        return f"it was not renewed within its ttl of {self.claim.ttl:g} s"

    def _told_lost(self) -> LockLost:
        """Return the error for a caller who learns by it of the loss: to acquire after it is to start anew."""
        self._forget_entrances()
        return self.lost_error()

    def lost_error(self, why: str | None = None) -> LockLost:
        why = why or self._lost
        who = f"{privacy.holder(self.claim.holder)} (token {self.token})"
        return LockLost(
            f"{self.key!r} was lost by {who}: {why}."
            if why
            else f"{self.key!r} was given back by {who}, and has ended.",
            key=self.key,
            token=self.token,
        )


# Who is in which hold: for entering again. Weak: a hold that nobody has is in nobody's way.
holds_by_caller: weakref.WeakValueDictionary[Entrance, Hold] = weakref.WeakValueDictionary()


def hold_by(entrance: Entrance) -> Hold | None:
    """Return who is in there, past ``get()``: that learns by an exception that nobody is, as is the rule."""
    reference: Any = holds_by_caller.data.get(entrance)  # type: ignore[attr-defined]
    return None if reference is None else reference()


in_child(holds_by_caller.clear)
