"""``list_locks`` can be read in a terminal, and every key can be copied from it."""

import io
import re
import unicodedata
from datetime import timedelta

import pytest
from django.core.management import call_command
from django.utils import timezone

from dlocks import db_lock, db_semaphore
from tests import rows
from tests.promises.commands.running import run

pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]

COLUMNS = ["KEY", "STATE", "WAITING", "AGE", "LEFT", "HOLDER"]
# A holder whose name is longer than a terminal is wide.
HOLDER = "worker-1.example.org:815:run_locked python manage.py import " + "x" * 60
KEYS = [
    "report",
    # As wide as the column of keys.
    *("x" * 24, "庫" * 12, "a" * 23 + "\u0301b"),
    *(f"orders/{'y' * length}/end" for length in range(10, 200, 9)),
    *("庫存" * length for length in (13, 30, 50)),
    "two\nlines",
    "z" * 200,
]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def shown(monkeypatch):
    """Return a function that returns the lines of the list in a terminal."""

    def read(columns, *arguments):
        monkeypatch.setenv("COLUMNS", str(columns))
        terminal = Terminal()
        call_command("list_locks", *arguments, stdout=terminal, no_color=True)
        return terminal.getvalue().splitlines()

    return read


def held(key, *, age=600, left=45 * 60):
    """Write the row of a lock."""
    now = timezone.now()
    begin, end = now - timedelta(seconds=age), now + timedelta(seconds=left)
    rows.write(key, rows.P, end, holder=HOLDER, begin_time=begin)


def width(text):
    """Return the number of columns that a terminal needs."""
    wide = sum(unicodedata.east_asian_width(one) in "WF" for one in text)
    return len(text) + wide - sum(unicodedata.combining(one) > 0 for one in text)


@pytest.mark.parametrize("columns", [80, 100])
def test_every_lock_has_one_line_and_its_whole_key(shown, columns):
    """A key that does not fit is whole on the line above its facts.

    No other line is wider than the terminal. This includes keys of wide characters and
    holders with long names. ``clear_lock`` needs the whole key.
    """
    for key in KEYS:
        held(key)
    header, *lines = shown(columns)
    assert header.split() == COLUMNS
    found = {}
    above = ""
    for line in lines:
        if line.startswith(" ") or " held " in line:
            assert width(line) <= columns, line
            words = line.split()
            key = above or words.pop(0)
            found[key], above = words, ""
        else:
            assert not above
            above = line
    assert not above
    assert sorted(found) == sorted(key.replace("\n", r"\n") for key in KEYS)
    for key, (*facts, holder) in found.items():
        assert facts[:4] == ["held", "0", "10m", "45m"], key
        assert "worker-1" in " ".join([*facts[4:], holder])
        assert holder.endswith("…")
    starts = {line.index(" held ") for line in lines if line.startswith(" ")}
    assert len(starts) == 1
    # A key of 24 columns has its facts on its own line.
    for key in ("report", "x" * 24, "庫" * 12):
        (line,) = (line for line in lines if line.startswith(f"{key} "))
        assert " held " in line


def test_short_texts_say_the_state_the_age_and_the_time_left(shown):
    """The time left is negative for a stale lock.

    A lock without an exclusive holder has dashes. Each waiter is counted.
    """
    held("report:monthly", age=3 * 86400, left=29)
    held("nightly", age=3 * 3600, left=-600)
    permits = db_semaphore("mails", permits=2)
    with permits, db_lock("free"):
        pass
    with permits:
        found = {line.split()[0]: line.split() for line in shown(80)[1:]}
    assert "free" not in found
    assert found["mails"][1:] == ["shared", "(1)", "0", "-", "-", "-"]
    assert found["report:monthly"][1:4] == ["held", "0", "3d"]
    assert re.fullmatch(r"2\ds", found["report:monthly"][4])
    assert found["nightly"][1] == "stale"
    assert found["nightly"][3:5] == ["3h", "-10m"]


def test_a_pipe_gets_one_whole_line_for_each_lock(shown, monkeypatch):
    """Without a terminal nothing is shortened.

    ``watch`` reads from a pipe and sets the width of its screen, which is respected.
    """
    for key in KEYS:
        held(key)
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = run("list_locks").splitlines()
    assert len(lines) == 1 + len(KEYS)
    assert all(HOLDER in line for line in lines[1:])
    assert sum(line.startswith("z" * 200 + " ") for line in lines) == 1
    in_terminal = shown(80)
    assert run("list_locks").splitlines() == in_terminal
