"""The command lock_bench: its figures, its cleanup and its error messages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from array import array
from concurrent.futures import BrokenExecutor
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import ProgrammingError, connections

from tests.internals import (
    HoldRecord,
    LockClaim,
    Processes,
    ResourceLock,
    backends,
    lock_bench,
    samples,
)
from tests.processes import living, state_of
from tests.scripts import ROOT
from tests.timing import eventually

# The command measures through the common interface and has no SQL of its own.
pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.once]

BRIEF = ("--seconds", "0.5", "--processes", "2")

FIGURES = {
    "alone": {"take_p50_us", "take_p95_us", "give_p50_us", "give_p95_us", "pair_p50_us",
    "pair_p95_us"},
    "together": {
        "grants_per_s", "wait_p50_ms", "wait_p99_ms", "wait_max_ms", "jain",
        "handover_p50_ms", "handover_p99_ms",
        "overlaps",
    },
}  # fmt: skip


def keys_left():
    return [
        row
        for model in (ResourceLock, LockClaim, HoldRecord)
        for row in model.objects.filter(key_resource__contains="dlocks-bench:")
    ]


def test_the_aliases_are_measured_side_by_side(
    transactional_db, settings, monkeypatch, tmp_path
):
    """The command compares several aliases and leaves no rows in the tables.

    The progress and the result are shown on the terminal. The result is also written
    as JSON. One unreachable server does not spoil the comparison of the others. Rows
    that cannot be deleted are reported. Backends for tests are not compared across
    processes.
    """
    out, errors, file = StringIO(), StringIO(), tmp_path / "bench.json"
    name = str(tmp_path / "no" / "such.sqlite3")
    gone = {**connections.databases["default"], "NAME": name}
    monkeypatch.setitem(connections.databases, "gone", gone)
    there = {"ENGINE": gone["ENGINE"], "NAME": name}
    pessimistic = "dlocks.backends.database.PessimisticBackend"
    failing = {
        "away": {"BACKEND": pessimistic, "OPTIONS": {"database": "gone"}},
        "wrong": {"BACKEND": pessimistic, "OPTIONS": {"speed": 11}},
    }
    settings.DLOCKS = {**settings.DLOCKS, **failing}
    # The processes of the benchmark read the environment.
    monkeypatch.setenv("DLOCKS_TEST_DATABASES", json.dumps({"gone": there}))
    monkeypatch.setenv("DLOCKS_TEST_ALIASES", json.dumps(failing))
    purge = lock_bench.purge

    def refused(backend, key):
        if backend is backends["away"]:
            raise ProgrammingError("permission denied for table dlocks_resourcelock\n")
        purge(backend, key)

    monkeypatch.setattr(lock_bench, "purge", refused)
    options = {"stdout": out, "stderr": errors, "json": str(file)}
    aliases = ["away", "wrong", "memory", "dummy", "default", "recorded"]
    with pytest.raises(CommandError, match=r"^2 of 6 aliases failed\. See above\.$"):
        call_command("lock_bench", *BRIEF, using=aliases, **options)
    kept, away, wrong = errors.getvalue().splitlines()
    rows = r"away: the rows of 'dlocks-bench:\w+' could not be deleted: permission"
    assert re.match(rows, kept)
    assert re.match("away: .*unable to open database file", away)
    assert re.match("wrong: .*unknown option 'speed'", wrong)
    text = out.getvalue()
    assert "memory: excludes callers in the same process only." in text
    assert "dummy: excludes no other caller." in text
    run = json.loads(file.read_text())
    assert list(run["aliases"]) == aliases
    assert (run["seconds"], run["processes"], run["hold_ms"]) == (0.5, 2, 1.0)
    for alias in aliases[-2:]:
        result = run["aliases"][alias]
        for part, figures in FIGURES.items():
            assert result[part].keys() == figures
        assert result["alone"]["take_p50_us"] <= result["alone"]["take_p95_us"]
        assert result["together"]["grants_per_s"] > 0
        assert 0.5 <= result["together"]["jain"] <= 1
        assert result["together"]["overlaps"] == 0
    assert "[4/10] default, one process: " in text
    assert "[10/10] recorded, 2 processes: " in text
    rows = [line.split() for line in text.splitlines()]
    assert [row[0] for row in rows if len(row) == 12 and row[0][0] != "["] == aliases
    assert keys_left() == []


def test_figures_are_computed_from_samples():
    # Each group of four times is requested, granted, release begins, released. The
    # second waiter waits for the first one, which returns to the queue. Then nothing
    # happens for a while.
    one = array("d", [0, 1, 3, 4, 4, 7, 8, 9])
    other = array("d", [2, 5, 6, 7, 20, 21, 22, 23])
    both, what = [one, other], (samples.ASKED, samples.GRANTED)
    assert samples.durations(both, *what, 0, 30) == [1, 1, 3, 3]
    assert samples.durations(both, *what, 6, 15) == [3]
    assert samples.grants([one, other], 0, 10) == [2, 1]
    # The handovers are from 3 to 5 and from 6 to 7. The claim at 20 waits for no other
    # holder.
    assert samples.handovers([one, other], 0, 30) == [1, 2]
    assert samples.overlaps([one, other]) == 0
    assert samples.jain([5, 5, 5, 5]) == 1
    assert samples.jain([20, 0, 0, 0]) == 0.25
    assert samples.jain([0, 0]) == 0
    # A lock that does not exclude is detected.
    long, within = array("d", [0, 1, 9, 9]), array("d", [0, 2, 3, 3])
    after = array("d", [0, 4, 5, 5])
    assert samples.overlaps([long]) == 0
    assert samples.overlaps([long, within, after]) == 2


def test_an_invalid_argument_is_reported_before_the_benchmark(monkeypatch):
    for arguments, complaint in (
        ("--using default nope", "DLOCKS has no alias 'nope'. It has 'default', "),
        ("--seconds 0", "0 is not between 0.1 and 3600"),
        ("--seconds nan", "nan is not between"),
        ("--seconds soon", "'soon' is not a number"),
        ("--processes 1", "1 is not between 2 and 256"),
        ("--processes 2.5", "'2.5' is not a whole number"),
        ("--hold-ms -1", "-1 is not between 0 and 60000"),
        ("--json /no/such/place", "'/no/such/place' cannot be written: No such file"),
        ("--json /", "'/' cannot be written: Is a directory"),
    ):
        out = StringIO()
        with pytest.raises(CommandError) as caught:
            call_command("lock_bench", *arguments.split(), stdout=out)
        assert complaint in str(caught.value)
        assert "\n" not in str(caught.value).strip(), arguments
        assert out.getvalue() == "", arguments
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE")
    with pytest.raises(CommandError, match="Set it, or pass --settings"):
        call_command("lock_bench")


def test_ctrl_c_leaves_no_process_and_no_row_behind(transactional_db, until):
    """Without verbosity it shows no progress."""
    options = "--using default --seconds 300 --processes 2 --verbosity 0"
    command = f"-m django lock_bench {options}"
    running = subprocess.Popen(
        [sys.executable, *command.split()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # The signal reaches all processes of the command, as Ctrl-C does, but none of
        # the tests. The default handler is restored, because the tests may ignore the
        # signal.
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        eventually(keys_left, 60, pause=0.1)
        os.killpg(running.pid, signal.SIGINT)
        printed, errors = running.communicate(timeout=60)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
    assert running.returncode == 130, errors
    assert (printed, "Interrupted" in errors) == ("", True)
    assert "Traceback" not in errors
    until(lambda: not living(running.pid))
    assert keys_left() == []


def test_each_process_makes_one_call_and_ends_with_the_block(until, monkeypatch):
    """A call without a reply times out. A killed process aborts the measurement."""
    # The processes start sooner without the apps.
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "django.conf.global_settings")
    with Processes(2) as processes:
        numbers = processes.ask(2, 60, os.getpid)
        assert len(set(numbers)) == 2
        assert processes.ask(1, 60, os.getpid)[0] in numbers
        with pytest.raises(TimeoutError):
            processes.ask(1, 0.1, time.sleep, 1)
    until(lambda: {state_of(number) for number in numbers} == {"Z"})
    with Processes(1) as processes:
        (number,) = processes.ask(1, 60, os.getpid)
        os.kill(number, signal.SIGKILL)
        with pytest.raises(BrokenExecutor, match="terminated abruptly"):
            processes.ask(1, 60, os.getpid)
