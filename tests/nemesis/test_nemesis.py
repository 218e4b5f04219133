"""Short campaigns of the nemesis on every engine, and seeded bugs to find.

``make nemesis`` runs long campaigns with all bugs.
"""

from __future__ import annotations

import json
import os
from contextlib import nullcontext

import pytest

from tests.nemesis.__main__ import NETWORK, PROCESSES, bug_plan
from tests.nemesis.bugs import BUGS, WITHOUT_A_LOCK
from tests.nemesis.campaign import run, server_for
from tests.nemesis.checker import Held, History, Put, check
from tests.nemesis.task import Plan, keys_of
from tests.settings import ENGINE
from tests.timing import in_time
from tests.volume import volume

SECONDS = volume(5)


@pytest.fixture(scope="module")
def run_plan():
    """Return a function that runs a plan. All plans use one server."""
    with nullcontext() if ENGINE == "sqlite" else server_for(ENGINE) as server:
        plans = []

        def report(**plan):
            prepared = bool(plans) and server is not None
            plans.append(Plan(**{"engine": ENGINE, "seconds": SECONDS, **plan}))
            return run(plans[-1], server=server, prepared=prepared)

        yield report


@pytest.mark.once
@pytest.mark.engine("sqlite", "postgresql", "mysql")
def test_the_promises_hold_while_holders_are_stopped_and_killed(run_plan):
    """Six processes use four keys in all ways."""
    sessions = {} if ENGINE == "sqlite" else {"sessions": 1.0, "crash": 0.2}
    faults = PROCESSES | sessions
    seconds = volume(8)
    report = run_plan(seed=20, pause=0.25, faults=faults, seconds=seconds)
    assert report.passed, "\n".join(report.lines())
    # More than 20 grants. A machine that stalls grants fewer in the same time.
    in_time(seconds / max(1, report.counts["grants"]), seconds / 20)
    assert report.counts["faults"] > 5


@pytest.mark.once
@pytest.mark.engine("postgresql", "mariadb")
def test_every_deadlock_is_reported_and_nothing_else(run_plan):
    """Six processes nest four keys in random order, as leases or in transactions."""
    report = run_plan(
        seed=22, pause=2.0, faults=PROCESSES, keys=keys_of("alone", 4), nested=0.7
    )
    assert report.passed, "\n".join(report.lines())
    assert report.counts["refused: LockDeadlock"] > 0


@pytest.mark.once
@pytest.mark.engine("postgresql", "mariadb")
def test_the_promises_hold_while_a_network_is_cut(run_plan):
    """Three of six processes are in a network of their own."""
    if os.geteuid() != 0:
        pytest.skip("Network namespaces take root.")
    report = run_plan(seed=21, pause=0.3, **NETWORK)
    assert report.passed, "\n".join(report.lines())
    # How many there are depends on the machine: between 9 and 53 were seen on one.
    assert report.counts["grants"] > 3
    assert report.counts["faults: partition"] > 2


@pytest.mark.engine("postgresql")
@pytest.mark.timeout(400)
def test_the_nemesis_finds_seeded_bugs(run_plan):
    """The other tests depend on this. One plan has no lock at all."""
    found = set()
    for seed in range(3, 8):
        plan = {"seconds": 8, "seed": seed, "locked": False, "oddities": False}
        found |= set(run_plan(**plan).violations)
        if found >= WITHOUT_A_LOCK:
            break
    assert found >= WITHOUT_A_LOCK
    for name in ("one_permit_too_many", "released_before_the_commit"):
        shown = set()
        for seed in range(7, 9):
            shown |= set(run_plan(**vars(bug_plan(name, seed))).violations)
            if shown & set(BUGS[name].shows):
                break
        assert shown & set(BUGS[name].shows), name


# The checker itself, on short histories with a known result.


def turn(pid, got, end, token, /, *, number=1, key="k", asked=None, **values):
    times = {"until": end, "end": end, "gone": end, "answer": ""}
    return Held(
        pid,
        number,
        key=key,
        asked=got - 0.1 if asked is None else asked,
        got=got,
        token=token,
        ttl=1.5,
        **{**times, **values},
    )


# The end of a hold that the history does not tell.
UNKNOWN = {"end": 1e6, "gone": 1e6, "answer": None}


def violations(*turns, one_writer=False, **history):
    history = History(turns=list(turns), **history)
    return set(check(history, one_writer=one_writer).violations)


@pytest.mark.front
def test_the_checker_detects_overlapping_holds():
    """A hold ends when its release is invoked. Shared holds may overlap."""
    first = turn(1, 10, 11, 5)
    assert violations(first, turn(2, 11.01, 12, 6)) == set()
    assert violations(first, turn(2, 11.0001, 12, 6)) == set()
    assert "exclusion" in violations(first, turn(2, 10.9, 12, 6))
    share = {"mode": "s", "permits": 2}
    two = turn(1, 10.1, 11, 1, **share), turn(2, 10.2, 11, 2, **share)
    assert violations(*two) == set()
    assert "exclusion" in violations(*two, turn(3, 10.3, 11, 3, **share))
    assert "exclusion" in violations(turn(1, 10, 11, 5, mode="s"), turn(2, 10.1, 11, 6))


def nested(pid, first, second, refusal="LockDeadlock", lasts=1.2):
    """Return a hold of a key, and a wait for another one inside, which is refused."""
    hold = turn(pid, 1.0, 9.0, pid, number=1, key=first)
    wait = Held(
        pid, 2, key=second, asked=2.0, refused=2.0 + lasts, refusal=refusal, ttl=1.5
    )
    return hold, wait


@pytest.mark.front
def test_the_checker_detects_a_deadlock_that_is_not_reported():
    """It also detects a refusal without a deadlock.

    No deadlock can be noticed while a stopped process keeps all from writing on SQLite.
    """
    assert not violations(*nested(1, "a", "b", ""), *nested(2, "b", "a"))
    assert "refused" in violations(*nested(1, "a", "b"), *nested(2, "b", "c"))
    first, waits = nested(1, "a", "b", "", lasts=6)
    second = nested(2, "b", "a", "", lasts=6)
    assert violations(first, waits, *second) == {"deadlocks"}
    events = [["stop", 2.5, 3, "asking", "c"], ["cont", 6.0, 3]]
    for one_writer, found in ((True, set()), (False, {"deadlocks"})):
        turns = first, waits, *second
        assert violations(*turns, events=events, one_writer=one_writer) == found
    # Another worker got the key, and its last holder did not know of that yet.
    first.until = 2.5
    assert not violations(first, waits, *second, turn(3, 2.6, 9.0, 3, key="a"))


@pytest.mark.front
@pytest.mark.parametrize(
    ("then", "found"),
    [(["held", 1, 4.1, 1.4], False), (["end", 1, 4.1], True)],
    ids=["renewed late", "lost for good"],
)
def test_a_lease_that_was_renewed_late_is_part_of_a_deadlock(tmp_path, then, found):
    """Its process was stopped, and asks for a key before the renewal."""
    policy = ["x", "lease", 0, 1.5, "default", 15.0]
    stopped = [["ask", 1, 1.0, "a", *policy], ["got", 1, 1.1, 1, 1.4]]
    stopped += [["lost", 1, 2.9], ["ask", 2, 3.0, "b", *policy]]
    stopped += [["no", 2, 4.0, "LockDeadlock"], then]
    other = [["ask", 1, 1.2, "b", *policy], ["got", 1, 1.3, 2, 9.0]]
    other += [["ask", 2, 1.4, "a", *policy]]
    for pid, events in enumerate((stopped, other)):
        lines = map(json.dumps, events)
        (tmp_path / f"worker-{pid}-{pid}.history").write_text("\n".join(lines))
    (tmp_path / "campaign.history").touch()
    assert ("refused" in violations(*History.read(tmp_path).turns)) is found


@pytest.mark.front
def test_the_checker_detects_a_token_that_does_not_grow():
    """It also detects a grant that the database does not know, and lost updates."""
    first = turn(1, 10, 11, 5)
    for token in (5, 4):
        assert "tokens" in violations(first, turn(2, 11.5, 12, token))
    assert violations(first, granted={("k", 4)}) == {"phantoms"}
    assert violations(first, granted={("k", 5)}) == set()
    puts = [Put("fenced k", 10.0 + number, 7, "", str(number)) for number in (1, 2)]
    assert violations(puts=puts) == {"updates"}
    assert violations(puts=puts[:1], registers={"fenced k": 7}) == {"updates"}
    assert violations(puts=puts[:1], registers={"fenced k": 8}) == set()


@pytest.mark.front
def test_the_checker_detects_a_key_that_is_not_granted():
    """A dead holder keeps others out for its ttl, the grace and a poll, and no longer.

    A process that is cut off waits until its messages have come through. The server
    does not notice a death behind a partition, but a lease expires.
    """
    late = turn(2, 20, 21, 6, asked=10.5)
    assert violations(turn(1, 10, 11, 5), late) == {"releases"}
    forgotten = turn(1, 10, 11, 5, gone=1e6, answer=None)
    assert not violations(forgotten, turn(2, 11.9, 14, 6, asked=10.5))
    assert violations(forgotten, turn(2, 13, 14, 6, asked=10.5)) == {"stuck"}
    killed = turn(1, 10, 11, 5, died=11, **UNKNOWN)
    events = [["kill", 11, 1, "holding", "k"]]
    assert violations(killed, late, events=events) == {"stuck"}
    assert not violations(killed, turn(2, 13, 14, 6, asked=10.5), events=events)

    events = [["partition", 10.5, 1, "holding", "k"], ["heal", 14.5, 1]]
    cut_off, ended = turn(1, 10, 11, 5, **UNKNOWN), turn(2, 10, 10.4, 5)
    for first, pid, got, found in (
        (cut_off, 2, 14, set()),
        (cut_off, 2, 30, {"stuck"}),
        (ended, 1, 18, set()),
        (ended, 1, 30, {"stuck"}),
    ):
        other = turn(pid, got, got + 1, 6, asked=10.6)
        assert violations(first, other, events=events) == found, (pid, got)

    for scope, healed, found in (
        ("transaction", 15, set()),
        ("transaction", 11, {"stuck"}),
        ("lease", 15, {"stuck"}),
    ):
        dead = turn(1, 10, 12, 5, scope=scope, died=12, **UNKNOWN)
        events = [
            ["partition", 10.5, 1, "holding", "k"],
            ["heal", healed, 3],
            ["kill", 12, 1, "holding", "k"],
        ]
        events.sort(key=lambda event: event[1])
        late = turn(2, 40, 41, 6, asked=10.6)
        assert violations(dead, late, events=events) == found, (scope, healed)
