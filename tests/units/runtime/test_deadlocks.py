"""Which waiters are the victims of a deadlock."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.internals import (
    UNLIMITED,
    Claim,
    HeldKey,
    PessimisticBackend,
    Waiter,
    Waiters,
    WaitGraph,
    WaitingClaim,
)
from tests.volume import volume

pytestmark = [pytest.mark.front, pytest.mark.django_db]


def waits(position, own, wanted, *, waited=3.0, silent=0.1):
    """Return the claim of a caller that holds one key and waits for another."""
    return WaitingClaim(
        position=position,
        owner=f"{own} waits",
        holder=f"{own} holds",
        owner_ip=None,
        key=wanted,
        waited=waited,
        silent=silent,
        holding=(HeldKey(own, f"{own} holds"),),
        permits=UNLIMITED,
        needs_all=True,
        held_by=f"{wanted} holds",
        shared_by=(),
    )


def test_the_last_caller_behind_a_deadlock_is_not_refused():
    """It arrived before the deadlock was noticed, and will be served after it.

    A process that died is no part of it either. It seems to wait, but has sent no
    heartbeat since the cycle was complete.
    """

    def victims(*claims):
        return set(WaitGraph(claims).victims())

    first, second = waits(1, "a", "b"), waits(2, "b", "a", waited=1.5)
    assert victims(first, second, waits(3, "c", "a")) == {"b waits"}
    assert victims(waits(1, "a", "b", silent=1.0), second) == {"b waits"}
    assert victims(waits(1, "a", "b", silent=2.0), second) == set()


def test_each_caller_that_uses_a_hold_can_be_part_of_a_deadlock():
    """Here two use that of a. One of them waits for a holder that will be done."""
    claims = [
        waits(1, "a", "b"),
        replace(waits(2, "a", "c"), owner="the other waits"),
        waits(3, "b", "a"),
    ]
    for found in permutations(claims):
        victims = WaitGraph(found).victims()
        assert victims.keys() == {"b waits"}
        assert victims["b waits"] == [claims[0], claims[2]]


def test_a_deadlock_is_reported_only_if_it_lasts(monkeypatch):
    """A key may be granted while the queue is read, and the cycle is none then."""
    backend = PessimisticBackend("default")
    cycle = [waits(1, "a", "b"), waits(2, "b", "a")]
    seen = iter([cycle, [], cycle, cycle])
    monkeypatch.setattr(backend.inspector, "waiting_claims", lambda: next(seen))
    waiters, woken = Waiters(backend), []
    waiter = Waiter(Claim(key="a", ttl=30.0, owner="b waits"), lambda: woken.append(1))
    waiters._waiters[waiter.claim.owner] = waiter
    reported = []
    for _ in range(4):
        waiter.check_at = 0.0
        waiters._find_deadlocks()
        reported.append(bool(waiter.deadlock))
    assert reported == [False, False, False, True]
    assert woken == [1]


class Model:
    """A few callers and keys, whose queues are served until nothing moves."""

    def __init__(self, draw):
        self.permits = {key: draw(st.sampled_from([1, 2, UNLIMITED])) for key in "xyz"}
        callers = [f"caller {number}" for number in range(draw(st.integers(2, 5)))]
        # The holders of each key and whether it is shared, and the queue of each key.
        self.shared = {key: draw(st.booleans()) for key in "xyz"}
        self.holders, self.queues, self.positions = {}, {key: [] for key in "xyz"}, {}
        for key in "xyz":
            most = min(self.permits[key], 3) if self.shared[key] else 1
            found = draw(st.lists(st.sampled_from(callers), max_size=most))
            self.holders[key] = set(found)
        for position, caller in enumerate(draw(st.permutations(callers))):
            key, shared = draw(st.sampled_from([*"xyz", None])), draw(st.booleans())
            mine = key is not None and caller in self.holders[key]
            if key is None or (mine and not (shared and self.shared[key])):
                continue
            self.queues[key].append((caller, shared))
            self.positions[caller] = position
        self.admit()

    @property
    def waiting(self):
        return {caller for queue in self.queues.values() for caller, _ in queue}

    def admit(self):
        for key, queue in self.queues.items():
            while queue:
                caller, shared = queue[0]
                holders = self.holders[key]
                room = shared and self.shared[key] and len(holders) < self.permits[key]
                if holders and not room:
                    break
                if caller in holders:
                    # A second permit. The model counts callers.
                    holders.add(f"{caller} again")
                holders.add(caller)
                self.shared[key] = shared
                queue.pop(0)

    def finish(self, callers):
        for key in "xyz":
            self.holders[key] -= {*callers, *(f"{one} again" for one in callers)}
            queue = self.queues[key]
            self.queues[key] = [one for one in queue if one[0] not in callers]

    def run(self):
        """Let all callers that do not wait finish, until nothing moves."""
        while True:
            holders = {
                one.removesuffix(" again") for key in "xyz" for one in self.holders[key]
            }
            if not (done := holders - self.waiting):
                return
            self.finish(done)
            self.admit()

    def claims(self):
        for key, queue in self.queues.items():
            for number, (caller, shared) in enumerate(queue):
                holding = tuple(
                    HeldKey(held, f"{held} of {one}")
                    for held in "xyz"
                    for one in sorted(self.holders[held])
                    if one.removesuffix(" again") == caller
                )
                if not holding:
                    continue
                owners = tuple(f"{key} of {one}" for one in sorted(self.holders[key]))
                yield WaitingClaim(
                    position=self.positions[caller],
                    owner=caller,
                    holder=caller,
                    owner_ip=None,
                    key=key,
                    waited=1.0,
                    silent=0.5,
                    holding=holding,
                    permits=self.permits[key],
                    needs_all=not shared or any(not one for _, one in queue[:number]),
                    held_by=None if self.shared[key] else next(iter(owners), None),
                    shared_by=owners if self.shared[key] else (),
                )


@pytest.mark.once
def test_a_full_semaphore_can_be_part_of_a_deadlock():
    """Two callers hold all permits, and wait for the caller that wants one."""
    first, second, third = (f"caller {number}" for number in range(3))
    permits, shared, waits = [2, 1, 1], [True, False, False], ["y", False] * 2
    holders = [[first, second], [third], []]
    drawn = iter(
        [*permits, 3, *shared, *holders, [first, second, third], *waits, "x", True]
    )
    model = Model(lambda _: next(drawn))
    assert WaitGraph(list(model.claims())).victims().keys() == {third}


@pytest.mark.once
@settings(max_examples=volume(150), deadline=None)
@given(st.data())
def test_victims_are_found_exactly_when_nothing_moves(data):
    """Refusing the victims lets all other callers finish."""
    model = Model(data.draw)
    for _ in range(6):
        victims = WaitGraph(list(model.claims())).victims()
        note(f"{victims} in {vars(model)}")
        model.run()
        assert bool(victims) == bool(model.waiting)
        for owner, cycle in victims.items():
            members = {claim.owner for claim in cycle}
            assert members <= model.waiting
            assert cycle[-1].owner == owner
            assert cycle[-1].position == max(claim.position for claim in cycle)
        if not victims:
            break
        model.finish(set(victims))
        model.admit()
    assert not model.waiting
