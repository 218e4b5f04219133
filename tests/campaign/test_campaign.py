"""A short campaign of callers that share holds, and its checker.

``python -m tests.campaign`` runs long ones.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dlocks.testing import held_elsewhere
from tests.campaign import rounds
from tests.campaign.backends import freed, tick
from tests.campaign.callers import Entry
from tests.campaign.checker import check
from tests.campaign.plans import KINDS, Caller, Plan, Step
from tests.scripts import run_python
from tests.volume import volume

# The rounds use the memory backend.
pytestmark = pytest.mark.engine("sqlite")

# Rounds of each kind.
ROUNDS = volume(8)
# Seconds after which the process of the campaign counts as hanging.
LIMIT = 200


def campaign(*options):
    """Run a campaign in a process of its own. Return what it prints."""
    module = "-m", "tests.campaign"
    done = run_python(*module, *options, warnings="default", timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_callers_that_share_holds_leave_every_key_free():
    """Callers pass holds on, time out, are cancelled, and end without a release."""
    said = campaign("--seed=1", f"--rounds={ROUNDS}", "--parallel=20")
    assert f"{len(KINDS) * ROUNDS} rounds: " in said


def test_a_campaign_by_time_begins_with_the_first_seed():
    """It ends after the rounds that have begun, and collects no seeds."""
    said = campaign("--kind=keys", "--minutes=0.005", "--parallel=2")
    assert " rounds: {'keys': " in said


# The checker itself, on records with a known result.


def plan(*steps, mode="lock"):
    return Plan(0, "threads", (mode,), (Caller("t0", steps=steps),))


class Record:
    """The entries of a round on one key, in the order of their events."""

    def __init__(self, mode="lock"):
        self.plan, self.entries, self.suspects = plan(mode=mode), [], []
        self.names = ["key:a"]
        self.lock = SimpleNamespace(shared=mode != "lock")

    def enter(self, owner):
        hold = SimpleNamespace(key="key:a", owner=owner, token=1, lock=self.lock)
        caller = SimpleNamespace(round=self, ended_at=None, name=owner)
        self.entries.append(Entry(caller, "with", hold))
        return self.entries[-1]

    def found(self):
        return {kind for kind, _, _ in check(self)}


@pytest.fixture
def free():
    """Return a function that records that the key of an owner was freed."""
    yield lambda owner: freed.setdefault(owner, tick())
    freed.clear()


@pytest.mark.parametrize("mode", ["lock", "permits"])
def test_the_checker_detects_two_holders(mode):
    """There are two permits, so two holders of them are none too many."""
    record = Record(mode)
    entries = [record.enter(str(number)) for number in range(3)]
    assert record.found() == set()
    for entry in entries:
        entry.end()
    assert record.found() == {"overlap"}
    del record.entries[0]
    assert record.found() == ({"overlap"} if mode == "lock" else set())
    del record.entries[0]
    assert record.found() == set()


def test_the_checker_detects_a_key_that_was_freed_under_work(free):
    """An end with LockLost is a finding only if the hold had no reason to end."""
    record = Record()
    record.enter("before").end()
    free("before")
    entry = record.enter("a")
    free("a")
    entry.end()
    assert record.found() == {"freed"}
    entry.outcome = "lost"
    assert record.found() == {"lost"}
    entry.excuse = "its caller may end"
    assert record.found() == set()


def test_the_checker_detects_a_refusal_of_an_own_key(free):
    """Another finding explains the refusal if the key was freed before."""
    record = Record()
    entry = record.enter("a")
    record.suspects.append((tick(), [entry], "with", "refused"))
    assert record.found() == {"refused"}
    free("a")
    record.suspects[:] = [(tick(), [entry], "with", "refused")]
    assert record.found() == set()


def test_a_round_detects_a_key_that_stays_taken(monkeypatch):
    monkeypatch.setattr(rounds, "FREE_AFTER", 0)
    one = rounds.Round(plan(Step("pause", ms=1)), alias="memory")
    with held_elsewhere(one.names[0], using="memory"):
        assert "leak" in {finding.kind for finding in one.run()}
    assert rounds.Round(plan(Step("with", keys=(0,))), alias="memory").run() == []


def test_a_round_detects_callers_that_do_not_end(monkeypatch):
    monkeypatch.setattr(rounds, "LIMIT", 0.01)
    (found,) = rounds.Round(plan(Step("pause", ms=200)), alias="memory").run()
    assert (found.kind, found.label) == ("hang", "in pause")
    assert "do_pause" in found.text
