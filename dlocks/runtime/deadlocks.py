"""Detection of deadlocks, in which callers wait for each other's keys.

Each of these callers waits, so the queue alone shows the cycle. The rows of the queue
say which keys the waiting callers hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from dlocks.values import Waiter, WaitingClaim

# Seconds after which a deadlock is looked at again before it is reported. A key may be
# granted at the moment of the first look.
CONFIRM_AFTER = 0.1


class WaitGraph:
    """The graph of waiting callers that hold keys.

    A claim waits for the holders of its key. An exclusive claim, and one behind it in
    the queue, waits for all of them. A permit of a semaphore is granted when one of its
    holders is done. A holder that does not wait itself will release its key. One that
    several callers use is done when all of them are.
    """

    def __init__(self, claims: Sequence[WaitingClaim]) -> None:
        self._claims = {claim.owner: claim for claim in claims}
        # The claims of the callers that use a hold, or a key in a transaction.
        self._by_hold: defaultdict[str, set[str]] = defaultdict(set)
        self._by_kept_key: defaultdict[str, set[str]] = defaultdict(set)
        for claim in claims:
            for held in claim.holding:
                if held.owner:
                    self._by_hold[held.owner].add(claim.owner)
                if held.kept:
                    self._by_kept_key[held.key].add(claim.owner)
        groups = {claim.owner: list(self._groups(claim)) for claim in claims}
        stuck = set(groups)
        while True:
            # A claim goes on when any holder in each of its groups is not stuck.
            blocking = {
                owner: [
                    group
                    for group in groups[owner]
                    if all(not holder.isdisjoint(stuck) for holder in group)
                ]
                for owner in stuck
            }
            still = {owner for owner, ones in blocking.items() if ones}
            if still == stuck:
                break
            stuck = still
        self._waits_for = {
            owner: stuck & set[str]().union(*(one for group in ones for one in group))
            for owner, ones in blocking.items()
        }

    def victims(self) -> Mapping[str, Sequence[WaitingClaim]]:
        """Return the claims to be refused, and the members of each one's cycle.

        The youngest member of a cycle is refused.
        """
        reached = {owner: self._reached_from(owner) for owner in self._waits_for}
        victims = {}
        for owner in reached:
            cycle = [
                self._claims[other]
                for other in reached[owner]
                if owner in reached.get(other, ())
            ]
            cycle.sort(key=lambda claim: claim.position)
            if not cycle or cycle[-1].owner != owner:
                continue
            # A process that ended before the cycle was complete still seems to wait.
            since = min(claim.waited for claim in cycle)
            if all(claim.silent < since for claim in cycle):
                victims[owner] = cycle
        return victims

    def _groups(self, claim: WaitingClaim) -> Iterator[list[set[str]]]:
        """Yield lists of holders. In each, one holder at least has to be done.

        They are given by the claims for which their callers wait, if any.
        """
        if claim.held_by is not None:
            yield [self._by_hold[claim.held_by]]
        elif claim.key in self._by_kept_key:
            yield [self._by_kept_key[claim.key]]
        sharers = [self._by_hold[owner] for owner in claim.shared_by]
        if claim.needs_all:
            yield from ([sharer] for sharer in sharers)
        elif len(sharers) >= claim.permits:
            yield sharers

    def _reached_from(self, owner: str) -> set[str]:
        reached: set[str] = set()
        following = [owner]
        while following:
            for other in self._waits_for.get(following.pop(), ()):
                if other not in reached:
                    reached.add(other)
                    following.append(other)
        return reached


def described(members: Sequence[WaitingClaim], prefix: str) -> list[Waiter]:
    """Return the members of a cycle for people, with the keys that matter."""
    waited_for = {claim.key for claim in members}
    return [
        Waiter(
            holder=claim.holder,
            owner_ip=claim.owner_ip,
            holds=tuple(
                sorted(
                    {
                        held.key.removeprefix(prefix)
                        for held in claim.holding
                        if held.key in waited_for
                    }
                )
            ),
            waits_for=claim.key.removeprefix(prefix),
            waited=claim.waited,
        )
        for claim in members
    ]
