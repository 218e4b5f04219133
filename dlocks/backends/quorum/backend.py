"""Locks that a majority of other backends grants, as in Redlock.

1. A claim is sent to all members in parallel, with an owner that is used once. Each
   member grants the key as for any claim, but for a ttl that is longer by ``drift``.
2. The claim holds the key if a majority grants it, for the time that a majority
   guarantees, counted from before the requests. Otherwise it is released everywhere,
   also at members that did not reply, and the caller retries.
3. A renewal is sent to all members. The hold is lost once so many have lost it that no
   majority is left. Members that have lost it get the claim again.
4. A release is sent to all members. A grant that arrives after it is released as well.

Two majorities have a member in common, which grants a key to one claim at a time. So a
key has one holder under three conditions. The members keep what they have granted,
their clocks run at the same rate within ``drift``, and the holder checks its own clock.
Nothing here stops a holder that was paused for longer than its lease.

There is no fencing token (``supports_fencing`` is False), even if each member returns
one. The largest token of a majority may be smaller than the token of the last holder.
For example, members whose tokens for a key are 100, 1 and 1 grant it with 100 and 2,
then with 2 and 2. For increasing tokens, a grant would have to write its token back to
its majority before it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from queue import Empty, SimpleQueue
from statistics import mode
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext_lazy
from django.views.decorators.debug import sensitive_variables

from dlocks.backends.base import Backend
from dlocks.backends.quorum.members import Answers, Member, Reply
from dlocks.exceptions import LockBackendError, LockStale
from dlocks.runtime import clock
from dlocks.values import Claim, Grant, Holder, new_owner, seconds

# Seconds by which clocks differ in any case.
TICK = 0.002
# Number of attempts in memory at which the expired ones are deleted.
TERMS = 1000


@dataclass(slots=True)
class Term:
    """One attempt to acquire a key, with an owner of its own.

    A late request of an earlier attempt has another owner and cannot end it. Once it is
    ``over``, a late grant by a member is released. ``ends`` is the end of the lease on
    this process's clock.
    """

    owner: str = field(default_factory=new_owner, repr=False)
    ends: float = 0.0
    over: bool = False


class QuorumBackend(Backend):
    """A backend that grants a key if a majority of the aliases ``of`` does.

    Their number is odd, and they have to fail independently. Requests are sent to all
    members in parallel, and a reply may take ``node_timeout`` seconds. ``drift`` is the
    fraction by which a member's clock may run faster than the holder's. A member keeps
    a key longer by that fraction.
    """

    supports_fencing: ClassVar[bool] = False
    unlisted = gettext_lazy("Its members keep its locks. List each member instead.")

    def __init__(
        self,
        alias: str,
        *,
        of: Sequence[str],
        node_timeout: float = 0.5,
        drift: float = 0.01,
        **options: Any,
    ) -> None:
        super().__init__(alias, **options)
        if (
            isinstance(of, str)
            or not isinstance(of, Sequence)
            or not all(isinstance(name, str) for name in of)
        ):
            raise TypeError("of must be a list of aliases of DLOCKS")
        if len(of) % 2 == 0:
            raise ValueError(
                f"of must name an odd number of aliases, not {len(of)}: an even number"
                " tolerates no more failures than one alias less"
            )
        if len(set(of)) < len(of):
            raise ValueError("of names an alias twice, but it has only one vote")
        if alias in of:
            raise ValueError(f"of names {alias!r} itself")
        self.of = tuple(of)
        self.majority = len(of) // 2 + 1
        self.node_timeout = seconds("node_timeout", node_timeout, above_zero=True)
        self.drift = seconds("drift", drift)
        self._terms: dict[str, Term] = {}
        self._members: Sequence[Member] = ()

    @property
    def renew_every(self) -> float:  # type: ignore[override]
        return min(member.backend.renew_every for member in self.members())

    # The interface of a backend.

    def acquire(self, claim: Claim) -> Grant | None:
        self._forget()
        term = self._terms.setdefault(claim.owner, Term())
        sent = clock.now()
        answers = self._ask(partial(self._take, claim=claim, term=term))
        if answers.yes() >= self.majority:
            return self._granted(claim, term, sent, answers.said.values())
        self._end(claim, term)
        # If a majority has voted, the vote is split. A member that calls the key stale
        # may then have missed the release.
        if not answers.suffices():
            if any(isinstance(error, LockStale) for error in answers.failed.values()):
                raise LockStale(key=claim.key, holder=self.holder(claim.key))
            raise self._failure(answers)
        return None

    def _granted(
        self, claim: Claim, term: Term, sent: float, said: Iterable[Grant | None]
    ) -> Grant:
        grants = [grant for grant in said if grant is not None]
        # The lease starts when the request was sent. It lasts for the ttl, or for the
        # time that a majority guarantees if that is shorter. A caller that finds it
        # over cancels the claim.
        ttl = self._longer(claim.ttl)
        lease = self._guaranteed(
            ttl if grant.lease is None else min(grant.lease, ttl) for grant in grants
        )
        term.ends = sent + min(lease, claim.ttl)
        # If the last holder had a majority, at least ``enough`` members of it are among
        # these. A smaller number are members that have not yet received a later
        # holder's release.
        enough = max(1, len(grants) + self.majority - len(self.of))
        return Grant(
            max(grant.token for grant in grants),
            takeover=sum(grant.takeover for grant in grants) >= enough,
            # Apart from the rounding of floats, the result for the full ttl is the ttl.
            lease=lease if lease < claim.ttl * 0.999 else None,
        )

    # The replies contain owners.
    @sensitive_variables()
    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        terms = self._terms
        mine = [(one, terms[one.owner]) for one in claims if one.owner in terms]
        if not mine:
            return {}
        sent = clock.now()
        for claim, term in mine:
            # A member may have a shorter ttl even if it does not reply.
            term.ends = min(term.ends, sent + claim.ttl)
        # Members return the time left by the owner of a term.
        answers = self._ask(
            lambda member: member.backend.renew(
                [self._at(member, claim, term) for claim, term in mine]
            )
        )
        self._enough(answers)
        result: dict[str, float] = {}
        for claim, term in mine:
            left = {
                alias: said[term.owner]
                for alias, said in answers.said.items()
                if term.owner in said
            }
            if len(left) >= self.majority:
                result[claim.owner] = min(claim.ttl, self._guaranteed(left.values()))
                # A member that could not renew it just then keeps what it granted.
                term.ends = max(term.ends, sent + result[claim.owner])
                take = partial(self._take, claim=claim, term=term)
                # The others have lost the grant, or never received the request.
                for member in self.members():
                    if member.alias in answers.said.keys() - left.keys():
                        member.ask(take, SimpleQueue())
            elif len(answers.said) - len(left) >= self.majority:
                self._end(claim, term)
            else:
                result[claim.owner] = max(0.0, term.ends - clock.now())
        return result

    def verify(self, claims: Sequence[Claim], count: int | None = None) -> bool:
        claim = claims[0]
        if count is None or (term := self._terms.get(claim.owner)) is None:
            return False
        return self._counted(
            self._ask(
                lambda member: member.backend.verify(
                    [self._at(member, claim, term)], count
                ),
                Answers.is_decided,
            )
        )

    def release(
        self, claim: Claim, *, failed: bool = False, rest_for: float = 0.0
    ) -> bool:
        if (term := self._terms.get(claim.owner)) is None:
            return False
        return self._counted(
            self._end(claim, term, Answers.is_decided, failed=failed, rest_for=rest_for)
        )

    def holder(self, key: str) -> Holder | None:
        answers = self._ask(
            lambda member: member.backend.holder(member.backend.prefix + key),
            Answers.is_decided,
        )
        self._enough(answers)
        if answers.is_refused():
            return None
        holders = [holder for holder in answers.said.values() if holder is not None]
        who = attrgetter("holder", "owner_ip")
        most = mode(map(who, holders))
        same = [holder for holder in holders if who(holder) == most]
        last: Holder = min(same, key=attrgetter("remaining"))
        return replace(
            last,
            key=key,
            token=max(holder.token for holder in same),
            remaining=self._shorter(last.remaining),
        )

    def refusal(self, claim: Claim) -> str | None:
        if (why := super().refusal(claim)) is not None:
            return why
        ask = [member.backend.refusal for member in self.members()]
        # A majority has to accept leases, and each of those members the ttl. Each also
        # has to know whether the last holder released the key.
        answers = [one(replace(claim, ttl=0.0, takeover=True)) for one in ask]
        if answers.count(None) < self.majority:
            return next(filter(None, answers))
        return next((why for one in ask if (why := one(claim)) not in answers), None)

    def check(self) -> list[Any]:
        self.members()
        return []

    # The members.

    def members(self) -> Sequence[Member]:
        """Return the members, or raise an error that names an unsuitable one."""
        if not self._members:
            backends: dict[str, Backend] = {}
            for alias in self.of:
                if (why := self._unsuitable(alias, backends)) is not None:
                    raise ImproperlyConfigured(
                        f"DLOCKS[{self.alias!r}]['OPTIONS']['of']: {why}"
                    )
            # Two threads may both get here. A request is correct with either list.
            self._members = [Member(*one) for one in backends.items()]
        return self._members

    def _unsuitable(self, alias: str, others: dict[str, Backend]) -> str | None:
        """Add the backend of an alias to others, or return why it is unsuitable."""
        no = f"{alias!r} cannot be a member:"
        try:
            backend = self.runtime.backend_of(alias)
        except ImproperlyConfigured as error:
            return f"{no} {error}"
        if isinstance(backend, QuorumBackend) or not backend.exclusive:
            return f"{no} it is a {type(backend).__name__}."
        if not backend.has_fixed_prefix:
            # Requests run in threads of the members, which do not know the caller's
            # tenant.
            return (
                f"{no} its prefix is a function. Set the prefix on {self.alias!r}"
                " instead."
            )
        for other, known in others.items():
            if known.identity == backend.identity:
                return (
                    f"{other!r} and {alias!r} keep their locks in the same place, which"
                    " has only one vote."
                )
        others[alias] = backend
        return None

    def _ask(
        self,
        question: Callable[[Member], Any],
        is_enough: Callable[[Answers], bool] = Answers.suffices,
        *,
        cancel: bool = True,
    ) -> Answers:
        """Send a request to all members in parallel, and return the replies.

        The wait ends after ``node_timeout`` seconds. Members with an overdue reply are
        not waited for if the other replies are enough. ``cancel`` withdraws requests
        that no thread has begun.
        """
        replies: SimpleQueue[Reply] = SimpleQueue()
        pending = {member: member.ask(question, replies) for member in self.members()}
        answers = Answers(self.majority)
        deadline = clock.real_now() + self.node_timeout
        while pending and not (
            is_enough(answers) and all(member.silent for member in pending)
        ):
            try:
                member, said, error = replies.get(
                    timeout=max(0.0, deadline - clock.real_now())
                )
            except Empty:
                late = TimeoutError(f"no answer within {self.node_timeout:g} s")
                for member in pending:
                    member.silent = True
                    answers.failed[member.alias] = late
                break
            del pending[member]
            if error is None:
                answers.said[member.alias] = said
            else:
                answers.failed[member.alias] = error
        if cancel:
            for asked in pending.values():
                asked.is_withdrawn = True
        return answers

    def _counted(self, answers: Answers) -> bool:
        if not answers.is_decided():
            raise self._failure(answers)
        return answers.yes() >= self.majority

    def _enough(self, answers: Answers) -> None:
        """Raise LockBackendError unless enough members for a majority replied."""
        if not answers.suffices():
            raise self._failure(answers)

    def _failure(self, answers: Answers) -> LockBackendError:
        failed = "; ".join(
            f"{alias}: {error}" for alias, error in sorted(answers.failed.items())
        )
        trouble = LockBackendError(
            f"DLOCKS[{self.alias!r}]: {len(answers.said)} of {len(self.of)} members"
            f" answered, and {self.majority} must agree. {failed}"
        )
        trouble.__cause__ = next(iter(answers.failed.values()), None)
        return trouble

    def _at(self, member: Member, claim: Claim, term: Term) -> Claim:
        """Return the claim that is sent to a member."""
        return replace(
            claim,
            key=member.backend.prefix + claim.key,
            owner=term.owner,
            ttl=self._longer(claim.ttl),
        )

    def _longer(self, ttl: float) -> float:
        return ttl * (1 + self.drift) + TICK

    def _shorter(self, left: float) -> float:
        return (left - TICK) / (1 + self.drift)

    def _guaranteed(self, leases: Iterable[float]) -> float:
        """Return the time that a majority of these leases lasts."""
        return self._shorter(sorted(leases, reverse=True)[self.majority - 1])

    def _take(self, member: Member, claim: Claim, term: Term) -> Grant | None:
        claim = self._at(member, claim, term)
        grant = None if term.over else member.backend.acquire(claim)
        if grant is not None and term.over:
            # The grant is too late. The release may have reached the member before it.
            member.backend.release(claim, failed=True)
            return None
        return grant

    def _end(
        self,
        claim: Claim,
        term: Term,
        is_enough: Callable[[Answers], bool] = Answers.suffices,
        *,
        failed: bool = True,
        rest_for: float = 0.0,
    ) -> Answers:
        """Release the claim at all members, also at those that did not reply."""
        term.over = True
        answers = self._ask(
            lambda member: member.backend.release(
                self._at(member, claim, term), failed=failed, rest_for=rest_for
            ),
            is_enough,
            cancel=False,
        )
        self._terms.pop(claim.owner, None)
        return answers

    def _forget(self) -> None:
        if len(self._terms) >= TERMS:
            now = clock.now()
            for owner, term in list(self._terms.items()):
                if 0 < term.ends < now:
                    self._terms.pop(owner, None)
