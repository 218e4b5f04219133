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

from tests.internals import HoldRecord, LockClaim, Processes, ResourceLock, samples
from tests.processes import living, state_of
from tests.scripts import ROOT, run_python

# The command measures through the common interface and has no SQL of its own.
pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.once]

BRIEF = ("--seconds", "0.5", "--processes", "2")

COMMAND = ("-m", "django", "lock_bench")

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


def test_the_aliases_are_measured_side_by_side(transactional_db, tmp_path):
    """The command compares several aliases and leaves no rows in the tables.

    The progress and the result are shown on the terminal. The result is also written
    as JSON.
    """
    out = StringIO()
    aliases = ["default", "recorded"]
    file = tmp_path / "bench.json"
    call_command("lock_bench", *BRIEF, using=aliases, stdout=out, json=str(file))
    run = json.loads(file.read_text())
    assert list(run["aliases"]) == aliases
    assert (run["seconds"], run["processes"], run["hold_ms"]) == (0.5, 2, 1.0)
    for result in run["aliases"].values():
        for part, figures in FIGURES.items():
            assert result[part].keys() == figures
        assert result["alone"]["take_p50_us"] <= result["alone"]["take_p95_us"]
        assert result["together"]["grants_per_s"] > 0
        assert 0.5 <= result["together"]["jain"] <= 1
        assert result["together"]["overlaps"] == 0
    assert "[1/4] default, one process: " in out.getvalue()
    assert "[4/4] recorded, 2 processes: " in out.getvalue()
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert [row[0] for row in rows if len(row) == 12] == aliases
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


def test_a_failing_alias_does_not_stop_the_benchmark(transactional_db, tmp_path):
    """One unreachable server does not spoil the comparison of the others.

    Rows that cannot be deleted are reported. Backends for tests are not compared across
    processes. Without verbosity only the result is shown.
    """
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "no/x")}
    pessimistic = "dlocks.backends.database.PessimisticBackend"
    aliases = {
        "away": {"BACKEND": pessimistic, "OPTIONS": {"database": "gone"}},
        "wrong": {"BACKEND": pessimistic, "OPTIONS": {"speed": 11}},
    }
    finished = run_python(
        *COMMAND, *BRIEF, "-v0",
        "--using", "away", "wrong", "memory", "dummy", "default", warnings="default",
        DLOCKS_TEST_DATABASES=json.dumps({"gone": database}),
        DLOCKS_TEST_ALIASES=json.dumps(aliases),
    )  # fmt: skip
    assert finished.returncode == 1
    kept, away, wrong, last = finished.stderr.splitlines()[-4:]
    assert re.match(
        r"away: the rows of 'dlocks-bench:\w+' could not be deleted: ", kept
    )
    assert re.match("away: .*unable to open database file", away)
    assert re.match("wrong: .*unknown option 'speed'", wrong)
    assert last == "CommandError: 2 of 5 aliases failed. See above."
    assert finished.stdout.split()[0] == "ALIAS"
    assert re.search(r"^default .*\d$", finished.stdout, re.MULTILINE)
    assert "memory: excludes callers in the same process only." in finished.stdout
    assert "dummy: excludes no other caller." in finished.stdout
    assert "Traceback" not in finished.stderr
    assert keys_left() == []


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
    running = subprocess.Popen(
        [
            sys.executable,
            *COMMAND,
            *["--using", "default", "--seconds", "300"],
            *BRIEF[2:],
        ],
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
        until(keys_left, 60)
        os.killpg(running.pid, signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
    assert running.returncode == 130, errors
    assert "Interrupted" in errors
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
