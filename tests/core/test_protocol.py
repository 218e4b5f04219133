"""The protocol of leases, searched exhaustively. See tests/protocol.py."""

from __future__ import annotations

import pytest

from tests.protocol import MUTANTS, Found, Rules, search

# There is no database in it, so one run is enough.
pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.once, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("rules", "clients"),
    [
        pytest.param(
            Rules(losses=2, deaths=1), 2, id="two clients, two lost replies and a death"
        ),
        pytest.param(Rules(), 3, id="three clients, a lost reply and a death"),
        pytest.param(
            Rules(renewed_late=True),
            3,
            id="three clients, and renewals of expired leases",
        ),
        pytest.param(
            Rules(steps=1, grace=1, renewed_late=True),
            2,
            id="the same, and a clock that steps",
        ),
        pytest.param(Rules(steps=1, grace=1), 2, id="a clock that steps by the grace"),
    ],
)
def test_no_interleaving_breaks_a_promise(rules, clients):
    """The search covers every interleaving of the clients and their pauses.

    Their number and length are not limited.
    """
    assert search(rules, clients) > 3_000


@pytest.mark.parametrize(
    ("shown", "rules"),
    [(shown, rules) for shown, mutants in MUTANTS.items() for rules in mutants],
    ids=str,
)
def test_every_rule_is_needed(shown, rules):
    """The search finds a broken promise if a rule of the protocol is missing."""
    with pytest.raises(Found) as caught:
        search(Rules(**rules))
    assert str(caught.value).startswith(shown)
