"""The successor of the database backends follows the rules of the table.

The same random histories as in ``test_table`` go through each of its strategies.
"""

import pytest
from hypothesis import HealthCheck, given, settings

from dlocks.backends.relational import (
    InsertBackend,
    OptimisticBackend,
    PessimisticBackend,
)
from tests.internals import Claim, MemoryBackend, helpers
from tests.settings import ENGINE
from tests.units.database import test_table as table
from tests.volume import volume

pytestmark = [
    pytest.mark.django_db(transaction=True),
    # Until the switch, all four engines are for those who work on it.
    pytest.mark.whole("sqlite", "postgresql"),
]


@pytest.mark.parametrize(
    "kind",
    [
        PessimisticBackend,
        pytest.param(OptimisticBackend, marks=pytest.mark.engine("postgresql")),
        pytest.param(
            InsertBackend, marks=pytest.mark.engine("postgresql", "mariadb", "sqlite")
        ),
    ],
)
@settings(
    max_examples=volume(20 if ENGINE == "sqlite" else 8),
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(kinds=table.CASTS, history=table.HISTORIES)
def test_the_successor_follows_the_rules_of_the_table(kind, kinds, history, long_queue):
    key = next(table.keys)
    runs = [
        table.Run(backend, key, kinds)
        for backend in (MemoryBackend("memory", grace=0), kind("default", grace=0))
    ]
    done = []
    for operation, caller in history:
        done.append((operation, caller))
        expected, found = ((run.do(operation, caller), run.state()) for run in runs)
        assert found == expected, done


def test_the_grace_applies_to_shared_holds():
    backend, key = PessimisticBackend("default", grace=10_000_000), next(table.keys)
    reader = Claim(key=key, ttl=table.LONG, shared=True)
    assert backend.acquire(reader)
    helpers._end_lease(backend, reader)
    assert backend.acquire(Claim(key=key, ttl=table.LONG)) is None


@pytest.fixture(scope="module")
def long_queue():
    """Let the leases and heartbeats of the queue outlast a test."""
    patch = pytest.MonkeyPatch()
    for module in ("table", "relational.direct"):
        patch.setattr(f"dlocks.backends.{module}.HANDOVER_LEASE", table.LONG)
    for module in (
        "table",
        "relational.direct",
        "relational.store",
        "relational.queue",
    ):
        patch.setattr(f"dlocks.backends.{module}.HEARTBEAT_TIMEOUT", table.LONG)
    yield
    patch.undo()
