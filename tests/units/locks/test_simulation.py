"""The lock API keeps its promises in every schedule that Hypothesis finds.

See simulation.py.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from tests.internals import Grant, Holding, Waiter, clock
from tests.units.locks.simulation import Simulation
from tests.volume import volume

# There is no database in it, so one run is enough.
pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.timeout(600)]

SCHEDULES = st.binary(min_size=20, max_size=120)
BUSY = {
    "max_examples": volume(2_500),
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


@pytest.fixture(autouse=True)
def quiet():
    logger = logging.getLogger("dlocks")
    logger.disabled = True
    yield
    logger.disabled = False


def simulate(schedule):
    simulation = Simulation(schedule)
    try:
        simulation.run()
    finally:
        note("\n".join(simulation.log))


@settings(**BUSY)
@given(SCHEDULES)
def test_no_schedule_breaks_a_promise(schedule):
    """Schedules with pauses, lost messages, deaths and clock steps.

    Requests and replies may be lost. A clock step is less than the grace.
    """
    simulate(schedule)


def never(hold):
    return not hold.is_over


def believed(waiter, ticket, sent):
    if ticket.grant is not None:
        ticket = replace(ticket, grant=Grant(ticket.grant.token, waiter.claim.ttl))
    return apply(waiter, ticket, sent)


def from_the_response(hold, entry, claim, grant, **others):
    original(hold, entry, claim, Grant(grant.token), **{**others, "sent": clock.now()})


original, apply = Holding.__init__, Waiter.apply

MUTANTS = {
    "a hold after its own deadline": (Holding, "held", property(never)),
    "a queue's lease that counts as a ttl": (Waiter, "apply", believed),
    "deadline from the response": (Holding, "__init__", from_the_response),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_simulation_finds_seeded_bugs(name, monkeypatch):
    monkeypatch.setattr(*MUTANTS[name])

    # Some seeds need a hundred times as many schedules.
    @seed(3)
    @settings(**{**BUSY, "max_examples": 20_000}, phases=[Phase.generate])
    @given(SCHEDULES)
    def search(schedule):
        simulate(schedule)

    with pytest.raises(AssertionError):
        search()
