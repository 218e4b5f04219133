"""The rules of a key as pure functions, and the backends that follow them.

The same random history of operations goes through ``dlocks.backends.table``, which the
memory backend uses, and through a database backend.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dlocks import LockStale
from tests.internals import (
    Backend,
    Claim,
    InsertBackend,
    MemoryBackend,
    OptimisticBackend,
    PessimisticBackend,
    helpers,
)
from tests.settings import ENGINE
from tests.volume import volume

pytestmark = pytest.mark.django_db(transaction=True)

# Longer than a test, so that only ``expire`` and ``silence`` end something.
LONG = 600.0
KINDS = {
    "writer": {},
    "reader": {"shared": True},
    "permit": {"shared": True, "permits": 2},
    "cautious": {"takeover": False},
    "unfair": {"fair": False},
}
CALLERS = range(4)
OPERATIONS = ("acquire", "enqueue", "release", "renew", "count", "exchange", "expire")
keys = (f"table:{number}" for number in itertools.count())

HISTORIES = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.sampled_from(CALLERS)),
    min_size=3,
    max_size=16,
)
CASTS = st.lists(st.sampled_from(list(KINDS)), min_size=4, max_size=4)


@dataclass
class Run:
    """One backend that a history goes through."""

    backend: Backend
    key: str
    kinds: list[str]
    claims: dict[int, Claim] = field(default_factory=dict)
    queued: set[int] = field(default_factory=set)
    # The callers in the order of their tokens.
    tokens: dict[int, int] = field(default_factory=dict)
    # The owners of claims that were granted.
    owners: set[str] = field(default_factory=set)

    def claim(self, caller: int) -> Claim:
        if caller not in self.claims:
            self.claims[caller] = Claim(
                key=self.key,
                ttl=LONG,
                holder=f"caller {caller}",
                **KINDS[self.kinds[caller]],
            )
        return self.claims[caller]

    def do(self, operation: str, caller: int) -> object:
        """Do an operation, and return what its caller learns from it."""
        claim, backend = self.claim(caller), self.backend
        match operation:
            case "acquire":
                try:
                    grant = backend.acquire(claim)
                except LockStale:
                    return "stale"
                self.granted(caller, grant)
                return "granted" if grant else "busy"
            case "enqueue":
                # A caller does not queue a claim that was granted.
                if claim.owner not in self.owners and backend.enqueue(claim).position:
                    self.queued.add(caller)
                return None
            case "release":
                self.queued.discard(caller)
                held = self.holds(claim)
                backend.release(claim)
                del self.claims[caller]
                return held
            case "renew":
                return list(backend.renew([claim])) == [claim.owner]
            case "count":
                return backend.verify([claim], 2)
            case "exchange":
                if claim.shared:
                    return None
                successor = replace(claim, owner=f"{self.key} {time.time_ns()}")
                grant = backend.exchange(claim, successor)
                if grant is not None:
                    self.claims[caller] = successor
                    self.granted(caller, grant)
                return grant is not None
            case "expire":
                if self.holds(claim):
                    helpers._end_lease(backend, claim)
                return None
        raise AssertionError(operation)

    def holds(self, claim: Claim) -> bool:
        return bool(self.backend.renew([claim]))

    def granted(self, caller: int, grant: object) -> None:
        if grant is not None:
            self.tokens[caller] = grant.token
            self.owners.add(self.claim(caller).owner)

    def state(self) -> object:
        """Return what all callers see, once the queue has advanced."""
        waiting = [self.claim(caller) for caller in sorted(self.queued)]
        tickets: list[object] = []
        for _ in range(2):
            # One by one, since a ticket tells the place of the first polled claim.
            tickets = [self.backend.poll([claim]).get(claim.owner) for claim in waiting]
        places = {}
        for caller, ticket in zip(sorted(self.queued), tickets, strict=True):
            if ticket is None:
                places[caller] = "gone"
            elif ticket.grant is not None:
                self.granted(caller, ticket.grant)
                places[caller] = "granted"
            else:
                places[caller] = f"{ticket.ahead} ahead, retry: {ticket.must_retry}"
        self.queued -= {one for one, place in places.items() if place == "granted"}
        holder = self.backend.holder(self.key)
        return (
            places,
            self.backend.waiting(self.key),
            sorted(self.tokens, key=self.tokens.__getitem__),
            holder and (holder.holder, holder.stale, holder.count),
        )


# The strategies share the queue. They differ in the first grant and in the release.
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            PessimisticBackend,
            marks=pytest.mark.engine("sqlite", "postgresql", "mariadb", "mysql"),
        ),
        pytest.param(OptimisticBackend, marks=pytest.mark.engine("postgresql")),
        pytest.param(InsertBackend, marks=pytest.mark.engine("mariadb")),
    ],
)
@settings(
    # The servers take longer.
    max_examples=volume(20 if ENGINE == "sqlite" else 8),
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(kinds=CASTS, history=HISTORIES)
@example(
    kinds=["writer", "permit", "permit", "writer"],
    history=[
        ("acquire", 0), ("enqueue", 1), ("enqueue", 2), ("enqueue", 3),
        ("expire", 0), ("release", 1), ("release", 2),
    ],
)  # fmt: skip
@example(
    kinds=["writer", "cautious", "reader", "writer"],
    history=[
        ("acquire", 0), ("enqueue", 1), ("enqueue", 2), ("expire", 0),
        ("acquire", 1), ("release", 2), ("acquire", 3),
    ],
)  # fmt: skip
@example(
    kinds=["writer", "reader", "permit", "writer"],
    history=[
        *(("acquire", 0), ("expire", 0), ("renew", 0), ("count", 0), ("exchange", 0)),
        *(("acquire", 1), ("release", 0), ("expire", 1), ("renew", 1), ("count", 1)),
    ],
)
def test_the_database_follows_the_rules_of_the_table(kind, kinds, history, long_queue):
    """A database grants, queues and refuses as the pure functions do.

    After each operation of a random history, all callers see the same. Tokens are
    compared by their order.
    """
    key = next(keys)
    runs = [
        Run(backend, key, kinds)
        for backend in (MemoryBackend("memory", grace=0), kind("default", grace=0))
    ]
    done = []
    for operation, caller in history:
        done.append((operation, caller))
        expected, found = ((run.do(operation, caller), run.state()) for run in runs)
        assert found == expected, done


def test_an_expired_hold_is_not_exchanged():
    """No other caller has taken the key over yet."""
    for kind in MemoryBackend, PessimisticBackend:
        backend, key = kind("default", grace=10_000_000), next(keys)
        claim, successor = (Claim(key=key, ttl=LONG) for _ in range(2))
        assert backend.acquire(claim)
        helpers._end_lease(backend, claim)
        assert backend.exchange(claim, successor) is None, kind


@pytest.fixture(scope="module")
def long_queue():
    """Let the leases and heartbeats of the queue outlast a test."""
    patch = pytest.MonkeyPatch()
    for module in ("table", "database.queue"):
        patch.setattr(f"dlocks.backends.{module}.HANDOVER_LEASE", LONG)
    for module in ("table", "database.store", "database.queue"):
        patch.setattr(f"dlocks.backends.{module}.HEARTBEAT_TIMEOUT", LONG)
    yield
    patch.undo()
