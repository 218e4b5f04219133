"""The protocol of leases, searched exhaustively. See tests/protocol.py."""

from __future__ import annotations

import pytest

from tests.protocol import MUTANTS, Found, Rules, search

# There is no database in it, so one run is enough.
pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.once, pytest.mark.timeout(600)]


# A lease that can be renewed late permits each step of one that cannot. These searches
# so include those of the stricter rule.
CASES = {
    "two clients, two lost replies and a death": (Rules(losses=2, deaths=1), 2),
    "three clients, a lost reply and a death": (Rules(renewed_late=True), 3),
    "a clock that steps by the grace": (Rules(steps=1, grace=1, renewed_late=True), 2),
}


@pytest.mark.parametrize("case", CASES)
def test_no_interleaving_breaks_a_promise(case):
    """The search covers every interleaving of the clients and their pauses.

    Their number and length are not limited.
    """
    assert search(*CASES[case]) > 3_000


def test_every_rule_is_needed():
    """The search finds a broken promise if a rule of the protocol is missing."""
    for shown, mutants in MUTANTS.items():
        for rules in mutants:
            with pytest.raises(Found, match=f"^{shown}"):
                search(Rules(**rules))
