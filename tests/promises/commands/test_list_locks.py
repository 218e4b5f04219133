"""The command list_locks."""

import io
import json
import math
import os
import re
import subprocess
import sys
import unicodedata
from datetime import UTC, datetime, timedelta

import pytest
from django.core.management import call_command
from django.db import connection, transaction

from dlocks import LockTimeout, db_lock, db_rwlock, db_semaphore
from dlocks.models import LockClaim, ResourceLock
from dlocks.testing import abandoned
from tests import jobs, rows
from tests.for_each import for_each
from tests.promises.commands.running import lines, listed, refused, run
from tests.promises.interposed import REPORTING, Reporting

pytestmark = [pytest.mark.front, pytest.mark.django_db]


@pytest.mark.storage
def test_held_and_stale_locks_are_listed_with_their_holders(settings):
    """The list shows who holds which lock, for how long, and the time left.

    ``--held``, ``--stale`` and ``--all`` filter it. No output has the secret owner.
    Times are ages in the table and UTC in JSON, whatever ``USE_TZ`` is. The time left
    is negative for a stale lock. A free lock has its last holder.
    """
    rows.free("f")
    assert run("list_locks") == "No locks.\n"
    assert json.loads(run("list_locks", "--json")) == []
    rows.held("h", begin_time=rows.PAST)
    rows.stale("s", hold_count=2)
    header, held, stale = run("list_locks").splitlines()
    assert header.split() == ["KEY", "STATE", "WAITING", "AGE", "LEFT", "HOLDER"]
    who = "web-1:4711:MainThread"
    assert re.fullmatch(rf"h +held +0 +\d+d +\d+d +{who}", held)
    assert re.fullmatch(rf"s +stale +0 +\d+d +-\d+d +{who}", stale)
    free = run("list_locks", "--all").splitlines()[1]
    assert free.split() == ["f", "free", "0", "-", "-", who]
    assert header.index("STATE") == stale.index("stale") == held.index("held")
    assert lines("list_locks", "--held") == ["h"]
    assert lines("list_locks", "--stale") == ["s"]
    assert "not allowed with" in refused("list_locks", "--held", "--stale")
    for use_tz in (True, False):
        settings.USE_TZ = use_tz
        age = (datetime.now(UTC) - rows.PAST) // timedelta(days=1)
        shown = re.search(r" (\d+)d +\d+d ", run("list_locks", "--held"))
        assert int(shown[1]) in {age, age + 1}
        found = listed("--all")
        assert list(found) == ["f", "h", "s"]
        assert datetime.fromisoformat(found["h"]["begin_time"]) == rows.PAST
    assert rows.OWNER[:8] not in held + stale + str(found)


@pytest.mark.storage
@pytest.mark.django_db(transaction=True)
def test_a_released_key_rests_for_its_min_hold():
    """It is not held any more, and not free."""
    with db_lock("report", min_hold=600):
        assert re.search(r"^report +held ", run("list_locks"), re.MULTILINE)
    assert re.search(r"^report +resting ", run("list_locks"), re.MULTILINE)


@pytest.mark.storage
@pytest.mark.django_db(transaction=True)
def test_a_permit_that_has_rested_for_its_min_hold_is_free():
    """It was released, so it is not stale, and there is nothing to clear."""
    permit = db_semaphore("pool", 2, min_hold=600)
    with permit:
        pass
    assert listed("--waiting")["pool"]["sharing"] == 1
    LockClaim.objects.update(end_time=rows.PAST)
    assert run("list_locks", "--waiting") == "No locks.\n"
    pool = listed("--all", "--waiting")["pool"]
    assert (pool["state"], pool["sharing"], pool["shared_by"]) == ("free", 0, [])
    assert (permit.holder(), permit.holders()) == (None, [])
    assert run("dlocks_health", "--using", "default", "--max-stale", "0")
    for option in (["--dry-run"], []):
        assert run("reap_locks", *option).startswith("0 stale locks ")
    assert not LockClaim.objects.exists()


def test_keys_and_patterns_filter_the_list():
    for key in ("stock:8", "stock:7", "report", "stock"):
        rows.held(key)
    for arguments, keys in (
        (["stock:*"], ["stock:7", "stock:8"]),
        (["report", "stock:7"], ["report", "stock:7"]),
        (["*8"], ["stock:8"]),
    ):
        assert lines("list_locks", *arguments) == keys
        assert list(listed(*arguments)) == keys
    assert run("list_locks", "nothing*") == "No locks.\n"


def test_json_has_stable_names():
    rows.held("a\nb")
    unknown = {"begin_time": None, "owner_ip": None}
    rows.write("never", rows.S, rows.PAST, holder="", **unknown)
    lock, never = listed("--all").values()
    assert lock.pop("seconds_held") > 0
    assert lock.pop("seconds_left") > 0
    assert lock == {
        "key": "a\nb", "state": "held", "hold_count": 1,
        "holder": "web-1:4711:MainThread", "owner_ip": "192.0.2.7", "sharing": 0,
        "begin_time": "2020-01-02T02:04:05+00:00", "token": 1000, "waiting": 0,
        "end_time": "2190-01-02T03:04:05+00:00",
    }  # fmt: skip
    unknown |= {"state": "free", "seconds_held": None, "seconds_left": None}
    assert never.items() >= unknown.items()


@pytest.mark.storage
def test_an_alias_lists_its_own_keys_without_the_prefix():
    """With a prefix, ``--using`` lists the keys of that prefix, without it.

    ``clear_lock`` accepts the keys in this form.
    """
    own = ("shop:", "shop:a", "shop:b", "shop:c", "shop:ü")
    for key in ("SHOP:x", "shop", *own, "shop;", "zoo"):
        rows.held(key)
    assert [f"shop:{key}" for key in listed("--using", "prefixed")] == [*own]


@pytest.mark.engine("sqlite")
@pytest.mark.django_db(transaction=True)
def test_a_closed_pipe_ends_the_list_quietly():
    """``list_locks | head`` ends without a traceback."""
    rows.held("a")
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "django", "list_locks"],
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(writing)
    assert done.stderr == b""


# Queues and shared holds.


def test_the_list_shows_shared_holds_and_waiters():
    """A shared key has the number of its shared holds, and no exclusive holder.

    It is stale if none of its holders is alive. A claim without a heartbeat does not
    count as a waiter. ``--waiting`` also shows the queue of a free key.
    """
    for key in ("catalogue", "left", "stuck", "unused"):
        rows.free(key, holder="writer:1:t")
    rows.shares("catalogue", 1001)
    rows.shares("catalogue", 1002)
    rows.stale_share("catalogue", 900)
    rows.stale_share("left", 901)
    rows.held("busy")
    rows.waits("busy")
    rows.waits("busy")
    rows.dead("busy")
    rows.waits("stuck")
    header, *shown = run("list_locks").splitlines()
    busy, catalogue, _ = sorted(shown)
    assert catalogue.startswith("catalogue")
    assert "shared (2)" in catalogue
    assert "writer:1:t" not in catalogue
    assert busy[: header.index("WAITING") + len("WAITING")].split()[-1] == "2"
    found = listed()
    assert sorted(found) == ["busy", "catalogue", "left"]
    assert found["busy"]["waiting"] == 2
    assert "queue" not in found["busy"]
    assert sorted(listed("--waiting")) == ["busy", "catalogue", "left", "stuck"]
    lock = listed("--held")["catalogue"]
    shown = [lock[name] for name in ("state", "sharing", "holder", "seconds_left")]
    assert shown == ["shared", 2, "", None]
    (left,) = listed("--stale").values()
    assert (left["key"], left["state"]) == ("left", "stale")


@pytest.mark.driver
def test_the_waiting_option_shows_queues_and_shared_holds():
    """``--waiting`` shows the position, holder, start and mode of each claim.

    A shared hold has its holder, start, remaining time and token. The names in the JSON
    are stable. The secret owner is in no output.
    """
    rows.free("catalogue")
    rows.shares("catalogue", 1001, permits=3)
    rows.held("stock:7")
    rows.waits("stock:7", holder="web-2:1:t", owner_ip=None)
    rows.dead("stock:7", holder="web-3:1:t")
    rows.waits("stock:7", holder="web-4:1:\x1b[31m", shared=True, permits=5)
    rows.held("zoo")
    output = run("list_locks", "--waiting")
    ip, days = r"\(198\.51\.100\.8\)", r"for \d+ days"
    starts = [
        r"KEY ",
        r"catalogue +shared \(1\)",
        (
            rf"    held by worker-1:815:MainThread {ip} {days},"
            r" \d+ days left, shared by up to 3 \(token 1001\)$"
        ),
        r"stock:7",
        rf"    1\. web-2:1:t, waiting {days}, exclusive$",
        rf"    -\. web-3:1:t {ip}, waiting {days}, no heartbeat {days}, exclusive$",
        rf"    2\. web-4:1:\\x1b\[31m {ip}, waiting {days}, shared by up to 5$",
        r"zoo",
    ]
    for line, start in zip(output.splitlines(), starts, strict=True):
        assert re.match(start, line), (start, line)
    found = listed("--waiting")
    assert rows.OWNER[:8] not in output + str(found)
    (share,) = found["catalogue"]["shared_by"]
    assert share.pop("seconds_held") > 0
    assert share.pop("seconds_left") > 0
    common = {
        "holder": "worker-1:815:MainThread",
        "owner_ip": "198.51.100.8",
        "begin_time": "2020-01-02T03:04:05+00:00",
    }
    assert share == {
        **common, "state": "held", "mode": "shared", "permits": 3,
        "end_time": "2190-01-02T03:04:05+00:00", "hold_count": 1, "token": 1001,
    }  # fmt: skip
    first, dead, second = found["stock:7"]["queue"]
    assert first.pop("seconds_waited") > 0
    assert first == {
        **common, "holder": "web-2:1:t", "owner_ip": None, "position": 1,
        "state": "waiting", "mode": "exclusive", "permits": None, "holds": [],
    }  # fmt: skip
    assert (dead["position"], dead["state"]) == (None, "dead")
    shown = [second[name] for name in ("position", "state", "mode", "permits")]
    assert shown == [2, "waiting", "shared", 5]


@pytest.mark.django_db(transaction=True)
def test_a_shared_key_shows_a_live_holder():
    """The holder of a shared key is a live one rather than a dead one."""
    with db_rwlock("catalogue", timeout=0).read() as hold:
        dead = rows.stale_share("catalogue", 900, holder="gone:1:t", id=-1)
        holder = db_lock("catalogue").holder()
        assert (holder.token, holder.stale) == (hold.token, False)
    dead.delete()
    assert db_lock("catalogue").holder() is None


@pytest.mark.engine("postgresql", "mariadb", "mysql")
@pytest.mark.django_db(transaction=True)
def test_commands_do_not_wait_for_a_row_locked_by_a_transaction(in_other_thread):
    """``clear_lock`` says so, ``list_locks`` lists it, and ``reap_locks`` skips it."""
    rows.stale("a")
    rows.stale("b")
    rows.free("api")
    rows.stale_share("api", 1001)
    with transaction.atomic():
        list(ResourceLock.objects.select_for_update().exclude(pk="b"))
        for arguments in (["a"], ["api", "--share", "1001"]):
            message = in_other_thread(refused, "clear_lock", *arguments, "--yes")
            assert "held by an open transaction" in message
        assert in_other_thread(lines, "list_locks") == ["a", "api", "b"]
        assert in_other_thread(run, "reap_locks") == "1 stale lock cleared.\n"
    assert (rows.now("a").version, rows.now("b").state) == (1000, "free")
    assert run("reap_locks") == "2 stale locks cleared.\n"


# Other backends list the locks that they report, in the same form.


@pytest.fixture
def held(settings, in_other_thread, threads):
    """Return a function that holds a lock in another thread."""
    memory = {**settings.DLOCKS["memory"], "OPTIONS": {"prefix": "a:"}}
    settings.DLOCKS = {**settings.DLOCKS, "memory": memory}
    holds = []

    def hold(lock):
        holds.append(in_other_thread(lock.acquire))
        return holds[-1]

    yield hold
    for one in holds:
        one.release()


MEMORY = ("--using", "memory")


def test_locks_without_rows_are_listed_in_the_same_table(held, threads, until):
    """The key, the waiters, the holder, its age and the time left are listed."""
    lock = db_lock("stock:7", using="memory", timeout=60)
    hold = held(lock)
    held(db_lock("report", using="memory"))
    threads(lambda: lock.acquire().release())
    until(lambda: hold.queue_length() == 1)
    header, report, stock = run("list_locks", *MEMORY).splitlines()
    assert header.split()[0] == "KEY"
    assert report.split()[:2] == ["report", "held"]
    assert stock.split()[:2] == ["stock:7", "held"]
    assert re.search(r" held +1 +\d+s +\d+s +\S+:\d+:", stock)
    assert lines("list_locks", "stock:*", *MEMORY) == ["stock:7"]
    (lock,) = listed("report", "--waiting", *MEMORY).values()
    assert (lock["key"], lock["state"], lock["waiting"]) == ("report", "held", 0)
    assert 0 <= lock["seconds_held"] < 30 < lock["seconds_left"] + 30
    assert lock["queue"] == lock["shared_by"] == lock["holders_wait_for"] == []


def test_shared_holds_without_rows_are_listed_with_their_tokens(held):
    holds = [held(db_rwlock("doc", using="memory").read()) for _ in range(2)]
    table = run("list_locks", "--waiting", *MEMORY)
    assert re.search(r"^doc +shared \(2\) +0 +- ", table, re.MULTILINE)
    for hold in holds:
        assert f", shared (token {hold.token})" in table
    (lock,) = listed("--waiting", *MEMORY).values()
    tokens = [share["token"] for share in lock["shared_by"]]
    assert tokens == [hold.token for hold in holds]
    assert "Pass --share TOKEN" in refused("clear_lock", "doc", *MEMORY)


def test_unknown_values_stay_empty(settings, monkeypatch):
    """A backend need not know the lease or the age of a hold.

    Stale locks are listed as stale.
    """
    settings.DLOCKS = {**settings.DLOCKS, "other": REPORTING}
    abandoned("0", using="other")
    with db_lock("1", using="other"):
        assert lines("list_locks", "--stale", "--using", "other") == ["0"]
        assert lines("list_locks", "--held", "--using", "other") == ["1"]
        table = run("list_locks", "--using", "other")
        assert re.search(r"^0 +stale .* -\d+m ", table, re.MULTILINE)
        monkeypatch.setattr(Reporting, "reported", lambda backend: ["1"])
        unknown = {"holder": "", "owner_ip": None, "since": None, "remaining": math.inf}
        monkeypatch.setattr(Reporting, "known", unknown)
        _, row = run("list_locks", "--using", "other").splitlines()
        assert row.split() == ["1", "held", "0", "-", "-", "-"]
        lock = listed("--using", "other")["1"]
        for name in ("begin_time", "end_time", "seconds_held", "seconds_left"):
            assert lock[name] is None


def test_a_backend_that_cannot_clear_says_so(held):
    held(db_lock("x", using="memory"))
    command = "clear_lock", "x", *MEMORY, "--yes"
    assert "is held. To force its release" in refused(*command)
    message = refused(*command, "--reason", "tests")
    assert message == "MemoryBackend cannot clear locks."
    assert "has no lock 'y'" in refused("clear_lock", "y", *MEMORY)


@pytest.mark.parametrize(
    "command", [("list_locks",), ("clear_lock", "a"), ("reap_locks",)]
)
def test_an_alias_without_a_list_says_why(command, settings):
    """The error names the alias, its backend, the reason and what to do.

    A misspelt alias is an error too. The backends of the database family share their
    rows.
    """
    assert "'nope'" in refused(*command, "--using", "nope")
    plain = {**settings.DLOCKS}
    members = {"of": ["default", "memory", "insert"]}
    for backend, options, why in (
        ("dummy.DummyBackend", {}, "It grants every claim"),
        ("session.SessionBackend", {}, "Call holder() of a lock instead."),
        ("quorum.QuorumBackend", members, "List each member instead."),
    ):
        other = {"BACKEND": f"dlocks.backends.{backend}", "OPTIONS": options}
        settings.DLOCKS = {**plain, "other": other}
        message = refused(*command, "--using", "other")
        assert "'other'" in message
        assert backend.partition(".")[2] in message
        assert ("no rows" if command[0] == "reap_locks" else why) in message
    for alias in ("optimistic", "insert", "brisk"):
        rows.held("a")
        yes = ["--yes", "--reason", "tests"] * (command[0] == "clear_lock")
        run(*command, "--using", alias, *yes)
        ResourceLock.objects.all().delete()


@pytest.mark.engine("postgresql", "mariadb", "mysql")
@pytest.mark.django_db(transaction=True)
@for_each("moment", ["SAVEPOINT", "SELECT"])
def test_a_command_reports_that_the_transaction_of_its_caller_is_lost(moment, workers):
    """The session is lost before the command's savepoint, or after it."""
    (other,) = workers(1)
    killed = []

    def kill(execute, sql, *arguments):
        if not killed and sql.startswith(moment):
            killed.append(other.call(jobs.kill_other_sessions))
        return execute(sql, *arguments)

    with transaction.atomic():
        assert not ResourceLock.objects.exists()
        with connection.execute_wrapper(kill):
            refused("list_locks")
        assert killed
        transaction.set_rollback(True)


@pytest.mark.driver
@pytest.mark.django_db(transaction=True)
def test_a_key_that_a_transaction_holds_looks_free_until_its_commit(paused):
    """The page on troubleshooting says so, and quotes the error of another caller.

    Without waiters, only PostgreSQL finds the transaction.
    """
    with db_lock("stock:7"):
        pass

    def work():
        with transaction.atomic(), db_lock("stock:7"):
            yield

    end = paused(work)
    is_found = connection.vendor == "postgresql"
    try:
        assert (run("list_locks") != "No locks.\n") is is_found
        state = "held" if is_found else "free"
        assert listed("--all")["stock:7"]["state"] == state
        assert db_lock("stock:7").locked() is is_found
        assert (db_lock("stock:7").holder() is not None) is is_found
        by = "session .*, in a transaction" if is_found else "an open transaction"
        with pytest.raises(LockTimeout, match=f"held by {by}"):
            db_lock("stock:7", timeout=0).acquire()
    finally:
        end()


# The form of the list in a terminal and in a pipe.


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


@pytest.fixture
def odd_keys(db):
    """Write rows of locks that have been held for 10 minutes."""
    now = datetime.now(UTC)
    begin, end = now - timedelta(minutes=10), now + timedelta(minutes=45)
    for key in KEYS:
        rows.write(key, rows.P, end, holder=HOLDER, begin_time=begin)


def width(text):
    """Return the number of columns that a terminal needs."""
    wide = sum(unicodedata.east_asian_width(one) in "WF" for one in text)
    return len(text) + wide - sum(unicodedata.combining(one) > 0 for one in text)


@pytest.mark.usefixtures("odd_keys")
@pytest.mark.parametrize("columns", [80, 100])
def test_every_lock_has_one_line_and_its_whole_key(shown, columns):
    """A key that does not fit is whole on the line above its facts.

    No other line is wider than the terminal. This includes keys of wide characters and
    holders with long names. ``clear_lock`` needs the whole key.
    """
    _, *lines = shown(columns)
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


@pytest.mark.usefixtures("odd_keys")
def test_a_pipe_gets_one_whole_line_for_each_lock(shown):
    """Without a terminal nothing is shortened.

    ``watch`` reads from a pipe and sets the width of its screen, which is respected.
    """
    lines = run("list_locks").splitlines()
    assert len(lines) == 1 + len(KEYS)
    assert all(HOLDER in line for line in lines[1:])
    assert sum(line.startswith("z" * 200 + " ") for line in lines) == 1
    in_terminal = shown(80)
    assert run("list_locks").splitlines() == in_terminal
