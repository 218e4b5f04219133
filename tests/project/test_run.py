"""``make test`` says what happened, and leaves nothing behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests import run

pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.once]

ROOT = Path(__file__).parent.parent.parent

SUITE = """
import pathlib

import pytest

from tests.timing import TooLateError

RUNS = pathlib.Path(__file__).with_suffix(".runs")


def late(times):
    with RUNS.open("a") as file:
        file.write(f"{times} ")
    if RUNS.read_text().split().count(f"{times}") <= times:
        raise TooLateError("It took 3 s instead of less than 2 s.")


def test_late_once():
    late(1)


def test_late_in_a_worker():
    late(3)


@pytest.mark.parametrize("number", range(2))
@pytest.mark.skip(reason="no browser: install one")
def test_page(number):
    pass


def test_link():
    pytest.skip("no browser: install one")


def test_gevent():
    pytest.importorskip("no_such_module", reason="needs gevent")
"""


WRONG = """
def test_sum():
    assert 1 + 1 == 3
"""

CRASHING = """
import os


def test_crash():
    os.abort()
"""

HANGING = """
import os
import pathlib
import time


def test_that_never_ends():
    pathlib.Path("written").write_text(os.environ["TMPDIR"])
    # A test that finds the file can read all of it.
    pathlib.Path("written").rename("files")
    time.sleep(600)
"""


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Return a function that writes a file of tests, with the options of this suite."""
    pytest_of = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
    options = " ".join(pytest_of["ini_options"]["addopts"])
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naddopts = {options}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return lambda name, text: (tmp_path / name).write_text(text)


def test_the_summary_says_what_was_skipped_and_what_ran_again(suite, capfd):
    """Failures come last."""
    suite("test_it.py", SUITE)
    suite("test_wrong.py", WRONG)
    runs = {
        "postgresql": ("sqlite", [*run.workers(1), "test_it.py"], {}),
        "sqlite": ("sqlite", [*run.workers(1), "test_wrong.py"], {}),
    }
    assert run.run_side_by_side(runs, ["mysql: NOT RUN: no network"]) == 1
    out = capfd.readouterr().out
    _, summary = re.split(r"^[\d.]+ minutes$", out, flags=re.MULTILINE)
    assert summary.strip().splitlines() == [
        "2 passed, 1 failed, 4 skipped, 2 were too late and ran again",
        "1 skipped: needs gevent",
        "3 skipped: no browser: install one",
        # The last time is after all runs.
        "postgresql | test_it.py::test_late_in_a_worker was too late and ran 4 times",
        "postgresql | test_it.py::test_late_once was too late and ran 2 times",
        "mysql: NOT RUN: no network",
        "postgresql: passed",
        "sqlite: FAILED (1)",
        "postgresql again: passed",
        "sqlite | FAILED test_wrong.py::test_sum - assert (1 + 1) == 3",
    ]


def test_the_crash_of_a_worker_is_a_failure(suite, capfd):
    """The test that crashed is named, and does not run again."""
    suite("test_it.py", CRASHING)
    runs = {"sqlite": ("sqlite", [*run.workers(2), "test_it.py"], {})}
    assert run.run_side_by_side(runs) == 1
    out = capfd.readouterr().out
    assert "sqlite: FAILED (1)" in out
    assert re.search(
        "^sqlite . FAILED test_it.py::test_crash - .* crashed", out, re.MULTILINE
    )
    assert len(re.findall(r"line \d+ in test_crash$", out, re.MULTILINE)) == 1


@pytest.mark.nightly
def test_a_run_that_never_ends_is_aborted_and_shows_its_stacks(
    suite, tmp_path, monkeypatch, until, threads, capfd
):
    suite("test_it.py", HANGING)

    def hang():
        until((tmp_path / "files").exists, 60)
        monkeypatch.setattr(run, "LIMIT", 0.0)

    threads(hang)
    runs = {"sqlite": ("sqlite", [*run.workers(1), "test_it.py"], {})}
    assert run.run_side_by_side(runs) == 1
    out = capfd.readouterr().out
    assert "sqlite: FAILED (124)" in out
    assert re.search(r"line \d+ in test_that_never_ends$", out, re.MULTILINE)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_files(suite, tmp_path, number, until):
    """The servers and their files are gone when the program ends."""
    suite("test_it.py", HANGING)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.run", "postgresql", "--", "test_it.py"]
    )
    try:
        until((tmp_path / "files").exists, 60)
        directory = Path((tmp_path / "files").read_text())
        assert list(directory.glob("dlocks-postgresql-*"))
    finally:
        process.send_signal(number)
        status = process.wait(60)
    assert status == 128 + number
    assert not directory.exists()
