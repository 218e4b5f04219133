"""The protocol of the leases, searched exhaustively; see tests/protocol.py."""

from __future__ import annotations

import pytest

from tests.protocol import MUTANTS, Found, Rules, search

# There is no database in it: once is enough.
pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.once, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("rules", "clients"),
    [
        pytest.param(Rules(losses=2, deaths=1), 2, id="two clients, two lost replies and a death"),
        pytest.param(Rules(), 3, id="three clients, a lost reply and a death"),
        pytest.param(Rules(steps=1, grace=1), 2, id="a clock that steps by the grace"),
    ],
)
def test_no_way_leads_to_a_broken_promise(rules, clients):
    """Every interleaving of the clients with their pauses, however long it goes on."""
    assert search(rules, clients) > 3_000


@pytest.mark.parametrize("name", MUTANTS)
def test_every_rule_is_needed(name):
    """The search finds the way to a broken promise where one rule of the protocol is missing."""
    rules, shown = MUTANTS[name]
    with pytest.raises(Found) as caught:
        search(rules)
    assert str(caught.value).startswith(shown)
