"""
Locks on which a majority of other backends agree: Redlock, where those are Redises that know nothing of each other.

Two majorities have a member in common, and that one grants a key to one claim at a time. So a key has one holder as
long as the members keep what they have granted, their clocks run equally fast within ``drift``, and the holder looks
at its own. Nothing here makes a holder stop that was paused for longer than its lease.

There is no fencing token (``supports_fencing`` is False), though each member may give one. The largest of a majority's
need not be larger than the last holder's: members whose tokens for a key are 100, 1 and 1 grant it with 100 and 2, then
with 2 and 2. To make it grow, a grant would have to write its token back to its majority before it counts.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from django.core.exceptions import ImproperlyConfigured

from dlocks import clock
from dlocks.backends.base import BaseBackend, Claim, Grant, Holder, new_owner, seconds
from dlocks.exceptions import LockBackendError, LockStale
from dlocks.forks import in_child

T = TypeVar("T")

# Threads in which this process asks one member, at most: so many questions to one that gives no answer.
THREADS = 8
# Questions that wait for one of those; the oldest is dropped, which nobody waits for any more.
QUESTIONS = 1000
# How long a thread without a question keeps its connections: less than a DROP DATABASE waits for them to go.
LINGER = 0.5
# What clocks differ by in any case.
TICK = 0.002
# Holds that were dropped are forgotten when there are so many.
TERMS = 1000


class Member:
    """One of the backends, asked in threads of its own: one that gives no answer keeps nobody else waiting."""

    def __init__(self, alias: str, backend: BaseBackend) -> None:
        self.alias = alias
        self.backend = backend
        # Whether it owes an answer, and is not waited for where the others suffice.
        self.silent = False
        self._reset()
        _members.add(self)

    def _reset(self) -> None:
        # Entered in the condition's place: in C, so that a signal in the middle of it leaves nothing taken.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque(maxlen=QUESTIONS)
        self._threads = self._idle = 0

    def ask(self, question: Callable[[Member], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._mutex:
            self._jobs.append((future, lambda: question(self)))
            if len(self._jobs) > self._idle and self._threads < THREADS:
                threading.Thread(target=self._loop, name=f"dlocks-quorum-{self.alias}", daemon=True).start()
                self._threads += 1
            self._changed.notify()
        return future

    def _loop(self) -> None:
        try:
            while True:
                with self._mutex:
                    self._idle += 1
                    there = self._changed.wait_for(lambda: self._jobs, LINGER)
                    self._idle -= 1
                    if not there:
                        return
                    future, work = self._jobs.popleft()
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(work())
                        self.silent = False
                    except BaseException as error:  # noqa: BLE001 (it is the asker's)
                        future.set_exception(error)
                del future, work
        finally:
            with self._mutex:
                self._threads -= 1
            self.backend.close()


_members: weakref.WeakSet[Member] = weakref.WeakSet()


def _forked() -> None:
    for member in list(_members):
        member._reset()


in_child(_forked)


@dataclass(slots=True)
class Term:
    """
    One attempt to have a key, under an owner of its own: what was sent for an earlier one cannot end it.

    Once it is ``over``, a member that grants it late has it taken back.
    """

    owner: str = field(default_factory=new_owner, repr=False)
    ends: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Answers:
    """What the members said by alias, and why the others did not."""

    said: dict[str, Any]
    failed: dict[str, BaseException]

    def yes(self) -> int:
        return sum(bool(answer) for answer in self.said.values())

    def no(self) -> int:
        return len(self.said) - self.yes()


class QuorumBackend(BaseBackend):
    """
    Grants a key when a majority of the aliases ``of`` grant it. Their number is odd, and they fail independently.

    They are asked side by side, each waited for ``node_timeout`` seconds at most. ``drift`` is by what part of a second
    a member's clock may run faster than the holder's in a second: by so much a member keeps a key longer.
    """

    supports_fencing: ClassVar[bool] = False

    def __init__(
        self, alias: str, *, of: Sequence[str], node_timeout: float = 0.5, drift: float = 0.01, **options: Any
    ) -> None:
        super().__init__(alias, **options)
        if isinstance(of, str) or not isinstance(of, Sequence) or not all(isinstance(name, str) for name in of):
            raise TypeError("of must be a list of aliases of DLOCKS")
        if len(of) % 2 == 0:
            raise ValueError(
                f"of must name an odd number of aliases, not {len(of)}: of an even number, one more is needed for a "
                "majority, and no more can be lost"
            )
        if len(set(of)) < len(of):
            raise ValueError("of names an alias twice, which has one vote")
        if alias in of:
            raise ValueError(f"of names {alias!r} itself")
        self.of = tuple(of)
        self.majority = len(of) // 2 + 1
        self.node_timeout = seconds("node_timeout", node_timeout, above_zero=True)
        self.drift = seconds("drift", drift)
        self._terms: dict[str, Term] = {}
        self._found: list[Member] = []
        self._finding = threading.Lock()
        self._pid = os.getpid()

    @property
    def renew_every(self) -> float:  # type: ignore[override]
        return min(member.backend.renew_every for member in self.members())

    # The waist.

    def acquire(self, claim: Claim) -> Grant | None:
        members = self.members()
        self._forget()
        term = self._terms.setdefault(claim.owner, Term())
        sent = clock.now()
        answers = self._ask(members, lambda member: self._take(member, claim, term), self._suffices)
        grants = [grant for grant in answers.said.values() if grant is not None]
        if len(grants) >= self.majority:
            # For the ttl from when it was sent, or for what a majority answers for at a time. Whoever asked gives it up
            # where that is over.
            leases = sorted((self._lease(grant, claim) for grant in grants), reverse=True)
            lease = self._shorter(leases[self.majority - 1])
            term.ends = sent + min(lease, claim.ttl)
            # Of a majority that the last holder had, at least so many are among these. Fewer are members that have
            # not heard yet of a later one's release.
            enough = max(1, len(grants) + self.majority - len(self.of))
            takeover = sum(grant.takeover for grant in grants) >= enough
            token = max(grant.token for grant in grants)
            # But for how floats are rounded the ttl comes back as it went.
            return Grant(token, takeover=takeover, lease=lease if lease < claim.ttl * 0.999 else None)
        self._end(claim, term)
        if answers.no() <= len(self.of) - self.majority:
            if any(isinstance(error, LockStale) for error in answers.failed.values()):
                raise LockStale(key=claim.key, holder=self.holder(claim.key))
            self._enough(answers)
        return None

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        terms = {claim.owner: self._terms[claim.owner] for claim in claims if claim.owner in self._terms}
        mine = [claim for claim in claims if claim.owner in terms]
        if not mine:
            return {}
        sent = clock.now()

        def extend(member: Member) -> Mapping[str, float]:
            asked = {claim.owner: self._at(member, claim, terms[claim.owner]) for claim in mine}
            left = member.backend.renew(list(asked.values()))
            return {owner: left[one.owner] for owner, one in asked.items() if one.owner in left}

        answers = self._ask(self.members(), extend, self._suffices)
        self._enough(answers)
        result: dict[str, float] = {}
        for claim in mine:
            term = terms[claim.owner]
            left = sorted((said[claim.owner] for said in answers.said.values() if claim.owner in said), reverse=True)
            if len(left) >= self.majority:
                result[claim.owner] = min(claim.ttl, self._shorter(left[self.majority - 1]))
                term.ends = sent + result[claim.owner]
                self._win_back(claim, term, [alias for alias, said in answers.said.items() if claim.owner not in said])
            elif len(answers.said) - len(left) > len(self.of) - self.majority:
                self._end(claim, term)
            else:
                result[claim.owner] = max(0.0, term.ends - clock.now())
        return result

    def recount(self, claim: Claim, count: int) -> bool:
        if (term := self._terms.get(claim.owner)) is None:
            return False
        return self._agreed(lambda member: member.backend.recount(self._at(member, claim, term), count))

    def release(self, claim: Claim, *, failed: bool = False, keep: float = 0.0) -> bool:
        if (term := self._terms.get(claim.owner)) is None:
            return False
        answers = self._end(claim, term, self._decided, failed=failed, keep=keep)
        return self._counted(answers)

    def holder(self, key: str) -> Holder | None:
        answers = self._ask(
            self.members(), lambda member: member.backend.holder(member.backend.prefix + key), self._decided
        )
        self._enough(answers)
        if answers.no() >= self.majority:
            return None
        holders = [holder for holder in answers.said.values() if holder is not None]
        ((who, _),) = Counter((holder.holder, holder.owner_ip) for holder in holders).most_common(1)
        same = [holder for holder in holders if (holder.holder, holder.owner_ip) == who]
        last: Holder = min(same, key=lambda holder: holder.remaining)
        return replace(
            last, key=key, token=max(holder.token for holder in same), remaining=self._shorter(last.remaining)
        )

    def lease_refused(self) -> str | None:
        refusals = [why for member in self.members() if (why := member.backend.lease_refused()) is not None]
        return refusals[0] if len(refusals) > len(self.of) - self.majority else None

    def ttl_refused(self, ttl: float) -> str | None:
        refusals = (member.backend.ttl_refused(ttl) for member in self.members())
        return next((why for why in refusals if why is not None), None)

    def check(self) -> list[Any]:
        self.members()
        return []

    # The members.

    def members(self) -> list[Member]:
        """Return the members, or say by name which of them cannot be one."""
        from dlocks.conf import backends

        if self._found:
            return self._found
        if self._pid != os.getpid():
            # In a fork, of whose parent another thread may have it.
            self._pid, self._finding = os.getpid(), threading.Lock()
        with self._finding:
            if not self._found:
                places: dict[str, str] = {}
                found = []
                for alias in self.of:
                    try:
                        backend = backends[alias]
                    except ImproperlyConfigured as error:
                        raise self._impossible(f"{alias!r} cannot be a member: {error}") from error
                    if isinstance(backend, QuorumBackend) or not backend.exclusive:
                        raise self._impossible(f"{alias!r} cannot be a member: it is a {type(backend).__name__}.")
                    if (other := places.setdefault(backend.identity, alias)) != alias:
                        raise self._impossible(
                            f"{other!r} and {alias!r} keep their locks in the same place, which has one vote."
                        )
                    found.append(Member(alias, backend))
                self._found = found
            return self._found

    def _impossible(self, why: str) -> ImproperlyConfigured:
        return ImproperlyConfigured(f"DLOCKS[{self.alias!r}]['OPTIONS']['of']: {why}")

    def _at(self, member: Member, claim: Claim, term: Term) -> Claim:
        """Return what a member is asked for."""
        return replace(claim, key=member.backend.prefix + claim.key, owner=term.owner, ttl=self._longer(claim.ttl))

    def _longer(self, ttl: float) -> float:
        return ttl * (1 + self.drift) + TICK

    def _lease(self, grant: Grant, claim: Claim) -> float:
        """Return for how many seconds a member answers for its grant, on its own clock."""
        ttl = self._longer(claim.ttl)
        return ttl if grant.lease is None else min(grant.lease, ttl)

    def _shorter(self, left: float) -> float:
        return (left - TICK) / (1 + self.drift)

    def _take(self, member: Member, claim: Claim, term: Term) -> Grant | None:
        if term.over.is_set():
            return None
        grant = member.backend.acquire(self._at(member, claim, term))
        if grant is not None and term.over.is_set():
            # Too late, and perhaps it was told so before it had granted it.
            self._leave(member, claim, term)
            return None
        return grant

    def _leave(self, member: Member, claim: Claim, term: Term, *, failed: bool = True, keep: float = 0.0) -> bool:
        return member.backend.release(self._at(member, claim, term), failed=failed, keep=keep)

    def _win_back(self, claim: Claim, term: Term, aliases: Sequence[str]) -> None:
        """Ask members that do not have what a majority has: they were away, and have forgotten it or never knew."""
        for member in self.members():
            if member.alias in aliases:
                member.ask(lambda member: self._take(member, claim, term))

    def _end(
        self,
        claim: Claim,
        term: Term,
        decided: Callable[[Answers], bool] | None = None,
        *,
        failed: bool = True,
        keep: float = 0.0,
    ) -> Answers:
        """Give up everywhere, also where no answer came from."""
        term.over.set()
        answers = self._ask(
            self.members(),
            lambda member: self._leave(member, claim, term, failed=failed, keep=keep),
            decided or self._suffices,
            cancel=False,
        )
        self._terms.pop(claim.owner, None)
        return answers

    def _forget(self) -> None:
        if len(self._terms) >= TERMS:
            now = clock.now()
            for owner, term in list(self._terms.items()):
                if 0 < term.ends < now:
                    with suppress(KeyError):
                        del self._terms[owner]

    # Asking.

    def _ask(
        self,
        members: Sequence[Member],
        question: Callable[[Member], Any],
        decided: Callable[[Answers], bool],
        *,
        cancel: bool = True,
    ) -> Answers:
        """Ask all side by side; return what was said in time. Who was silent before is not waited for needlessly."""
        futures = {member.ask(question): member for member in members}
        pending = set(futures)
        answers = Answers({}, {})
        deadline = time.monotonic() + self.node_timeout
        while pending and not (decided(answers) and all(futures[future].silent for future in pending)):
            done, pending = wait(pending, max(0.0, deadline - time.monotonic()), FIRST_COMPLETED)
            if not done:
                for future in pending:
                    futures[future].silent = True
                    answers.failed[futures[future].alias] = TimeoutError(f"no answer in {self.node_timeout:g} s")
                break
            for future in done:
                if (error := future.exception()) is None:
                    answers.said[futures[future].alias] = future.result()
                else:
                    answers.failed[futures[future].alias] = error
        if cancel:
            # What nobody has begun to ask.
            for future in pending:
                future.cancel()
        return answers

    def _agreed(self, question: Callable[[Member], bool]) -> bool:
        return self._counted(self._ask(self.members(), question, self._decided))

    def _counted(self, answers: Answers) -> bool:
        if not self._decided(answers):
            raise self._failure(answers)
        return answers.yes() >= self.majority

    def _decided(self, answers: Answers) -> bool:
        return answers.yes() >= self.majority or answers.no() > len(self.of) - self.majority

    def _suffices(self, answers: Answers) -> bool:
        """
        Whether to do without those who owe an answer.

        Also where their votes would decide: a vote that is split is given up at once, so that the next one may win.
        """
        return len(answers.said) >= self.majority

    def _enough(self, answers: Answers) -> None:
        """Raise LockBackendError unless so many could be asked that they could have agreed."""
        if len(answers.said) < self.majority:
            raise self._failure(answers)

    def _failure(self, answers: Answers) -> LockBackendError:
        failed = "; ".join(f"{alias}: {error}" for alias, error in sorted(answers.failed.items()))
        trouble = LockBackendError(
            f"DLOCKS[{self.alias!r}]: {len(answers.said)} of {len(self.of)} members could be asked, and "
            f"{self.majority} have to agree. {failed}"
        )
        trouble.__cause__ = next(iter(answers.failed.values()), None)
        return trouble
