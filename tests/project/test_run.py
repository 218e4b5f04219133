"""The summary of ``make test``."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.run import run_shards

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


def test_late_in_a_shard():
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


def test_the_summary_says_what_was_skipped_and_what_ran_again(
    tmp_path, monkeypatch, capfd
):
    """It counts skipped tests by reason, and names each test that was too late.

    Failures come last.
    """
    pytest_of = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
    options = " ".join(pytest_of["ini_options"]["addopts"])
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naddopts = {options}\n")
    (tmp_path / "test_it.py").write_text(SUITE)
    (tmp_path / "test_wrong.py").write_text(WRONG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shards = {
        "sqlite 1/2": (["sqlite", "--", "test_it.py"], {}),
        "sqlite 2/2": (["sqlite", "--", "test_wrong.py"], {}),
    }
    assert run_shards(shards, ["mysql: NOT RUN: no network"]) == 1
    out = capfd.readouterr().out
    _, summary = re.split(r"^[\d.]+ minutes$", out, flags=re.MULTILINE)
    assert summary.strip().splitlines() == [
        "2 passed, 1 failed, 4 skipped, 2 were too late and ran again",
        "1 skipped: needs gevent",
        "3 skipped: no browser: install one",
        # The last time is after all shards.
        "sqlite 1/2 | test_it.py::test_late_in_a_shard was too late and ran 4 times",
        "sqlite 1/2 | test_it.py::test_late_once was too late and ran 2 times",
        "mysql: NOT RUN: no network",
        "sqlite 1/2: passed",
        "sqlite 2/2: FAILED (1)",
        "sqlite 1/2 again: passed",
        "sqlite 2/2 | FAILED test_wrong.py::test_sum - assert (1 + 1) == 3",
    ]
