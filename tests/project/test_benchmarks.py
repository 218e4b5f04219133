"""The benchmark harness: its figures, and the detection of a broken lock."""

import json
from array import array

import pytest

from benchmarks import samples
from benchmarks.report import Run, Target, write
from tests.scripts import run_python

pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.once]

MEASURE = """
import contextlib, fcntl, json, sys
import django
django.setup()
from benchmarks import crew
from benchmarks.contenders import CONTENDERS, Contender

class NoLock(Contender):
    name = "none"
    def hold(self, key):
        return contextlib.nullcontext()

class File(Contender):
    name = "file"
    @contextlib.contextmanager
    def hold(self, key):
        with open(sys.argv[1] + key, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

class Failing(Contender):
    name = "failing"
    def start(self):
        raise RuntimeError("no server there")

CONTENDERS.update({lock.name: lock for lock in (NoLock(), File(), Failing())})
print(json.dumps([
    crew.measure(crew.Cell(
        experiment="contended", contender=name, processes=3, hold=0.001,
        seconds=1.0, warm_up=0.05,
    ))
    for name in ("none", "file", "failing")
]))
"""


def test_a_lock_that_does_not_exclude_is_detected(tmp_path):
    """A failing contender is reported, and the run goes on."""
    done = run_python("-c", MEASURE, f"{tmp_path}/", warnings="ignore")
    none, file, failing = json.loads(done.stdout)
    assert none["lost_updates"] > 0
    assert file["lost_updates"] == 0
    assert len(file["grants"]) == 3
    assert sum(file["grants"]) > 0
    assert "no server there" in failing["error"]


def test_figures_are_computed_from_samples():
    # Each group of four times is requested, granted, release begins, released. The
    # second waiter waits for the first one, which returns to the queue. Then nothing
    # happens for a while.
    one = array("d", [0, 1, 3, 4, 4, 7, 8, 9])
    other = array("d", [2, 5, 6, 7, 20, 21, 22, 23])
    both, what = [one, other], (samples.ASKED, samples.GRANTED)
    assert samples.durations(both, *what, 0, 30) == [1, 1, 3, 3]
    assert samples.durations(both, *what, 6, 15) == [3]
    assert samples.grants(both, 0, 10) == [2, 1]
    assert samples.jain([5, 5, 5, 5]) == 1
    assert samples.jain([20, 0, 0, 0]) == 0.25
    assert samples.jain([0, 0]) == 0


def _result(contender, number, **changed):
    return {
        "experiment": "contended", "contender": contender, "round": number,
        "processes": 32, "hold": 0.001, "seconds": 2.0, "grants": [10, 30],
        "waits": [1000, 3000], "pairs": [2000, 4000], "lost_updates": 0, **changed,
    }  # fmt: skip


def test_a_figure_is_the_median_of_the_rounds_with_its_range():
    rounds = [
        _result("kazoo", number, grants=[count, count])
        for number, count in enumerate((10, 40, 20))
    ]
    series = Run({"results": rounds}).find("contended", "kazoo")
    assert series.median("rate") == 20
    assert series.spread("rate") == (10, 40)
    assert series.median("jain") == 1
    # A monopoly.
    monopoly = Run({"results": [_result("kazoo", 0, grants=[40, 0, 0, 0])]})
    assert monopoly.find("contended", "kazoo").median("jain") == 0.25


def test_a_target_is_reached_only_where_all_rounds_agree():
    target = Target("contended", "a", "rate", "b", at_least=1.2)
    assert target.verdict(1.2, 2) == "yes"
    assert target.verdict(0.5, 1.1) == "no"
    assert target.verdict(1.1, 1.3) == "undecided"


def test_the_report_names_locks_that_lost_updates(tmp_path, monkeypatch):
    # The tests do not depend on matplotlib.
    monkeypatch.setattr("benchmarks.report._plot", lambda run, path: None)
    results = [_result("redis-py", 0, lost_updates=3), _result("kazoo", 0)]
    run = {"quick": True, "machine": {"cores": 2}, "servers": {}, "absent": {}}
    page = write({**run, "results": results}, tmp_path).read_text()
    assert "redis-py, contended" in page
    assert "two held the lock at once; 3 updates lost" in page
