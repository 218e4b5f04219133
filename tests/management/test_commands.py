"""The commands list_locks, clear_lock and reap_locks."""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.utils import timezone

from dlocks import LockBackendError, LockLost, db_lock, db_rwlock
from tests import rows
from tests.for_each import for_each
from tests.internals import (
    Claim,
    Holder,
    LockClaim,
    ResourceLock,
    backends,
    dlocks_health,
    duration,
    list_locks,
    operations,
)

pytestmark = pytest.mark.front

COMMANDS = [("list_locks",), ("clear_lock", "a"), ("reap_locks",)]


def run(*args, **options) -> str:
    out = io.StringIO()
    call_command(*args, stdout=out, no_color=True, **options)
    return out.getvalue()


def lines(*args) -> list[str]:
    return [line.split()[0] for line in run(*args).splitlines()[1:]]


def refused(*args) -> str:
    with pytest.raises(CommandError) as caught:
        run(*args)
    assert "\n" not in str(caught.value).strip()
    return str(caught.value)


@pytest.fixture
def answer(monkeypatch):
    """Return a function that simulates a terminal with a given answer.

    That function returns the list of the questions.
    """

    def sit(reply, before=lambda: None):
        asked = []

        def ask(question):
            asked.append(question)
            before()
            if isinstance(reply, BaseException):
                raise reply
            return reply

        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", ask)
        return asked

    return sit


@pytest.fixture(autouse=True)
def nobody_there(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())


@pytest.mark.django_db
class TestListLocks:
    @pytest.mark.storage
    def test_held_and_stale_locks_are_listed_with_their_holders(self, settings):
        """The list shows who holds which lock, for how long, and the time left.

        ``--held``, ``--stale`` and ``--all`` filter it. No output has the secret owner.
        Times are ages in the table and UTC in JSON, whatever ``USE_TZ`` is. The time
        left is negative for a stale lock. A free lock has its last holder.
        """
        rows.free("f")
        assert run("list_locks") == "No locks.\n"
        assert json.loads(run("list_locks", "--json")) == []
        rows.held("h", begin_time=rows.PAST)
        rows.stale("s", hold_count=2)
        header, held, stale = run("list_locks").splitlines()
        assert header.split() == ["KEY", "STATE", "WAITING", "HOLDER", "AGE", "LEFT"]
        assert held.split()[:4] == ["h", "held", "0", "web-1:4711:MainThread"]
        assert re.search(r" \d+d +\d+d$", held)
        assert stale.split()[:2] == ["s", "stale"]
        assert re.search(r" \d+d +-\d+d$", stale)
        free = run("list_locks", "--all").splitlines()[1]
        assert free.split() == ["f", "free", "0", "web-1:4711:MainThread", "-", "-"]
        assert header.index("STATE") == stale.index("stale") == held.index("held")
        assert rows.OWNER[:8] not in held + stale
        assert lines("list_locks", "--held") == ["h"]
        assert lines("list_locks", "--stale") == ["s"]
        assert "not allowed with" in refused("list_locks", "--held", "--stale")
        for use_tz in (True, False):
            settings.USE_TZ = use_tz
            age = (datetime.now(UTC) - rows.PAST) // timedelta(days=1)
            shown = re.search(r" (\d+)d +\d+d$", run("list_locks", "--held").rstrip())
            assert int(shown[1]) in {age, age + 1}
            text = run("list_locks", "--json", "--all")
            assert rows.OWNER[:8] not in text
            locks = json.loads(text)
            assert [lock["key"] for lock in locks] == ["f", "h", "s"]
            assert datetime.fromisoformat(locks[1]["begin_time"]) == rows.PAST

    @pytest.mark.storage
    def test_keys_and_patterns_filter_the_list(self):
        """``--sort`` puts the longest hold, or the longest queue, first."""
        for days, key in enumerate(("stock:8", "stock:7", "report", "stock")):
            rows.held(key, begin_time=rows.PAST + timedelta(days=days))
        for key in ("stock", "report", "stock"):
            rows.waits(key)
        assert lines("list_locks", "stock:*") == ["stock:7", "stock:8"]
        assert lines("list_locks", "report", "stock:7") == ["report", "stock:7"]
        (lock,) = json.loads(run("list_locks", "--json", "*8"))
        assert lock["key"] == "stock:8"
        by_age = ["stock:8", "stock:7", "report", "stock"]
        assert lines("list_locks", "--sort", "age") == by_age
        assert lines("list_locks", "--sort", "waiting")[:2] == ["stock", "report"]
        listed = json.loads(run("list_locks", "--json", "--sort", "age", "stock:*"))
        assert [lock["key"] for lock in listed] == ["stock:8", "stock:7"]
        for options in ((), ("--sort", "age")):
            assert run("list_locks", "nothing*", *options) == "No locks.\n"

    def test_json_has_stable_names(self):
        """Monitoring can read every field by its name."""
        rows.held("a\nb")
        unknown = {"begin_time": None, "owner_ip": None}
        rows.write("never", rows.S, rows.PAST, holder="", **unknown)
        lock, never = json.loads(run("list_locks", "--json", "--all"))
        assert lock.pop("seconds_held") > 0
        assert lock.pop("seconds_left") > 0
        assert lock == {
            "key": "a\nb", "state": "held", "status": "P", "hold_count": 1,
            "holder": "web-1:4711:MainThread", "owner_ip": "192.0.2.7", "sharing": 0,
            "begin_time": "2020-01-02T02:04:05+00:00", "token": 1000, "waiting": 0,
            "end_time": "2190-01-02T03:04:05+00:00",
        }  # fmt: skip
        unknown |= {"state": "free", "seconds_held": None, "seconds_left": None}
        assert never.items() >= unknown.items()

    def test_many_locks_are_read_by_pages(
        self, monkeypatch, django_assert_max_num_queries
    ):
        """The command never has a hundred thousand rows in memory at once."""
        monkeypatch.setattr(operations, "PAGE", 3)
        sizes, pages = [], operations.pages

        def spied(*args, **options):
            for page in pages(*args, **options):
                sizes.append(len(page))
                yield page

        monkeypatch.setattr("dlocks.management.commands.list_locks.pages", spied)
        keys = [f"k{number}" for number in range(10)]
        for key in keys:
            rows.held(key)
        with django_assert_max_num_queries(6):
            assert lines("list_locks") == keys
        assert sizes == [3, 3, 3, 1]

    @pytest.mark.storage
    def test_an_alias_lists_its_own_keys_without_the_prefix(self, monkeypatch):
        """With a prefix, ``--using`` lists the keys of that prefix, without it.

        ``clear_lock`` accepts the keys in this form.
        """
        monkeypatch.setattr(operations, "PAGE", 2)
        own = ("shop:", "shop:a", "shop:b", "shop:c", "shop:ü")
        for key in ("SHOP:x", "shop", *own, "shop;", "zoo"):
            rows.held(key)
        listed = json.loads(run("list_locks", "--json", "--using", "prefixed"))
        assert [f"shop:{lock['key']}" for lock in listed] == [*own]

    def test_a_closed_pipe_ends_the_list_quietly(self, monkeypatch):
        """``list_locks | head`` ends without a traceback."""
        rows.held("a")

        class Closed(io.StringIO):
            def write(self, text):
                raise BrokenPipeError

        replaced = []
        monkeypatch.setattr(
            "dlocks.management.commands.list_locks.os.dup2",
            lambda *args: replaced.append(args),
        )
        with Path(os.devnull).open("w") as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            call_command("list_locks", stdout=Closed())
        assert replaced


@pytest.mark.django_db
class TestClearLock:
    @pytest.mark.storage
    def test_clear_lock_names_the_holder_and_clears_the_lock(self):
        """``clear_lock --yes`` names the holder and frees the key.

        It also says what happens to the holder.
        """
        rows.held("stock:7", begin_time=rows.PAST)
        out = run("clear_lock", "stock:7", "--yes", "--reason", "tests")
        assert re.search(
            r"'stock:7' is held by web-1:4711:MainThread \(192\.0\.2\.7\) for"
            r" \d+ days, \d+ days left \(token 1000\)\.",
            out,
        )
        assert "fenced off: its next renewal reports the loss" in out
        assert rows.OWNER[:8] not in out
        lock = rows.now("stock:7")
        assert (lock.state, lock.status, lock.owner) == ("free", "F", "")
        assert lock.version > 1000

    def test_clear_lock_asks_for_confirmation(self, answer):
        """Only "y" and "yes" clear the lock. Return, "n" or Ctrl-D change nothing.

        One question names the number of several locks. Without a terminal, as in cron,
        the command refuses and names ``--yes``.
        """
        rows.stale("a")
        rows.stale("b")
        assert "--yes" in refused("clear_lock", "a")
        for reply in ("", "n", "no", "yep", EOFError()):
            answer(reply)
            assert "Nothing was changed" in refused("clear_lock", "a")
        asked = answer("no")
        refused("clear_lock", "a", "b")
        assert {rows.now(key).version for key in "ab"} == {1000}
        answer("y")
        run("clear_lock", "a", "b")
        assert asked == ["Clear 2 locks? [y/N] "]
        assert (rows.now("a").state, rows.now("b").state) == ("free", "free")
        rows.stale("c1")
        asked = answer("y")
        run("clear_lock", "c*")
        assert asked == ["Clear 1 lock? [y/N] "]
        for key, reply in (("d", "y"), ("e", " Yes ")):
            rows.held(key)
            asked = answer(reply)
            run("clear_lock", key, "--reason", "tests")
            holds = f"A holder may still be working. Clear {key!r}? [y/N] "
            assert asked == [holds]
            assert rows.now(key).state == "free"

    def test_an_invalid_or_unknown_key_is_an_error(self):
        """The error has one line. A free key is reported as free and is not changed.

        The prefix counts towards the length of the key.
        """
        for key in ("", "x" * 256, "a\0b", "\udce9"):
            assert "key" in refused("clear_lock", key, "--yes").lower()
        assert "255" in refused("clear_lock", "x" * 253, "--yes", "--using", "prefixed")
        assert "'nope'" in refused("clear_lock", "nope", "--yes")
        rows.free("a")
        assert "'a' is already free" in run("clear_lock", "a")
        assert rows.now("a").version == 1000

    def test_stale_only_keeps_live_holds(self):
        """``--stale-only`` never clears a live hold.

        With a prefix, ``--using`` clears the key of that prefix.
        """
        rows.held("a")
        rows.stale("b")
        rows.stale("shop:b")
        run("clear_lock", "b", "--yes", "--using", "prefixed")
        assert (rows.now("b").state, rows.now("shop:b").state) == ("stale", "free")
        assert "not stale" in refused(
            "clear_lock", "a", "--yes", "--stale-only", "--reason", "tests"
        )
        run("clear_lock", "b", "--yes", "--stale-only", "--reason", "tests")
        assert (rows.now("a").version, rows.now("b").state) == (1000, "free")

    def test_a_lock_that_changed_hands_during_the_question_is_kept(self, answer):
        """The command clears only the hold that it showed.

        If another holder took the key over meanwhile, the message names it. A lock that
        was released or deleted meanwhile is not cleared.
        """
        rows.stale("a")
        row, changed = ResourceLock.objects.filter(pk="a"), {"version": 1001}
        changed |= {"holder": "web-2:5:MainThread", "end_time": rows.FUTURE}
        answer("y", before=lambda: row.update(**changed))
        message = refused("clear_lock", "a", "--reason", "tests")
        assert "acquired by another holder in the meantime" in message
        assert "web-2:5:MainThread" in message
        assert rows.now("a").state == "held"
        rows.held("b")
        row = ResourceLock.objects.filter(pk="b")
        for change, why in (
            (lambda: row.update(status="S", end_time=rows.PAST), "already free"),
            (row.delete, "the row no longer exists"),
        ):
            row.update(status="P", end_time=rows.FUTURE)
            answer("y", before=change)
            assert why in refused("clear_lock", "b", "--reason", "tests")

    @pytest.mark.storage
    def test_a_change_before_the_write_is_detected(self, monkeypatch):
        """A change between the last read and the write is detected by the version."""
        rows.stale("a")
        backend, row = backends["default"], ResourceLock.objects.filter(pk="a")
        clear = backend.clear

        def late(*args, **options):
            row.update(version=1001, end_time=rows.FUTURE)
            return clear(*args, **options)

        monkeypatch.setattr(backend, "clear", late)
        message = refused("clear_lock", "a", "--yes", "--reason", "tests")
        assert "acquired by another holder in the meantime" in message
        assert rows.now("a").state == "held"

    @pytest.mark.storage
    def test_a_pattern_clears_all_locks_that_match(self, capsys):
        """``clear_lock 'stock:*'`` clears the held and the stale locks that match.

        Held locks need a reason. An existing key ``a*`` is cleared alone. A token
        belongs to one key, so ``--share`` refuses a pattern.
        """
        for key in ("stock:7", "stock:8"):
            rows.stale(key)
        rows.held("stock:9")
        rows.free("stock:10")
        rows.stale("report")
        assert "one key" in refused("clear_lock", "stock:*", "--share", "7", "--yes")
        out = run("clear_lock", "stock:*", "--yes", "--reason", "tests")
        cleared = ["stock:7", "stock:8", "stock:9"]
        assert re.findall(r"'([^']+)' was cleared", out) == cleared
        assert rows.now("stock:9").state == "free"
        assert rows.now("stock:10").version == 1000
        assert rows.now("report").state == "stale"
        assert "no held or stale lock that matches 'stock:*'" in refused(
            "clear_lock", "stock:*", "--yes"
        )
        rows.held("a1")
        rows.stale("a2")
        assert refused("clear_lock", "a*", "--yes") == "1 of 2 locks were not cleared."
        assert "'a1' is held. To force its release" in capsys.readouterr().err
        assert (rows.now("a1").version, rows.now("a2").state) == (1000, "free")
        rows.stale("a*")
        run("clear_lock", "a*", "--yes")
        assert (rows.now("a*").state, rows.now("a1").version) == ("free", 1000)

    def test_dry_run_only_shows_the_locks(self):
        rows.stale("stock:7")
        rows.held("stock:8")
        out = run("clear_lock", "stock:?", "--dry-run")
        assert "'stock:7' is stale" in out
        assert "'stock:8' is held by" in out
        assert out.endswith("Nothing was changed.\n")
        assert "'stock:8'" not in run(
            "clear_lock", "stock:?", "--dry-run", "--stale-only"
        )
        run("clear_lock", "stock:7", "--dry-run")
        assert {rows.now(f"stock:{number}").version for number in (7, 8)} == {1000}

    def test_odd_keys_are_cleared_and_printed_with_escapes(self):
        """Quotes, line breaks and emoji are allowed in a key."""
        for key in ("'; DROP TABLE x; --", "a\n\x1b[31m", "🔒", "100%", "a/b"):
            rows.stale(key)
            assert "\x1b" not in run("clear_lock", key, "--yes")
            assert rows.now(key).state == "free"


@pytest.mark.storage
@pytest.mark.django_db(transaction=True)
def test_the_former_holder_is_fenced_off(in_other_thread):
    """The former holder can neither renew nor release, and raises ``LockLost``."""
    lock = db_lock("a", renew=False)
    hold = lock.acquire()
    run("clear_lock", "a", "--yes", "--reason", "tests")
    version = rows.now("a").version
    assert version > hold.token
    with pytest.raises(LockLost):
        hold.renew()

    def next_token():
        with db_lock("a", timeout=0) as next_hold:
            return next_hold.token

    assert in_other_thread(next_token) > version


@pytest.mark.engine("postgresql", "mariadb", "mysql")
@pytest.mark.django_db(transaction=True)
def test_commands_do_not_wait_for_a_row_locked_by_a_transaction(in_other_thread):
    """The commands never wait for a transaction that has the row locked.

    ``clear_lock`` says so, ``list_locks`` still lists the row, and ``reap_locks`` skips
    it.
    """
    rows.stale("a")
    rows.stale("b")
    with transaction.atomic():
        ResourceLock.objects.select_for_update().get(pk="a")
        message = in_other_thread(refused, "clear_lock", "a", "--yes")
        assert "held by an open transaction" in message
        assert in_other_thread(lines, "list_locks") == ["a", "b"]
        assert in_other_thread(run, "reap_locks") == "1 stale lock cleared.\n"
    assert (rows.now("a").version, rows.now("b").state) == (1000, "free")


def states():
    rows_now = ResourceLock.objects.by_clock()
    return {lock.pk: (lock.state, lock.status) for lock in rows_now}


@pytest.mark.django_db
class TestReapLocks:
    @pytest.fixture(autouse=True)
    def table(self):
        rows.held("held")
        rows.stale("stale:1")
        rows.stale("stale:2")
        rows.free("old")
        rows.write("recent", rows.S, timezone.now())

    @pytest.mark.storage
    def test_reap_locks_changes_only_keys_under_the_prefix(self):
        """With a prefix, ``--using`` changes nothing of another project.

        This includes its locks, shared holds, rows and records.
        """
        rows.stale("shop:1")
        rows.free("shop:old")
        rows.stale("shopping")
        dry = run("reap_locks", "--using", "prefixed", "--idle-for", "30d", "--dry-run")
        out = run("reap_locks", "--using", "prefixed", "--idle-for", "30d")
        assert out == "1 stale lock cleared, 1 unused row deleted.\n"
        assert dry == out.replace("cleared", "would be cleared").replace(
            "deleted", "would be deleted"
        )
        stale = [key for key, (state, _) in states().items() if state == "stale"]
        assert sorted(stale) == ["shopping", "stale:1", "stale:2"]
        assert ResourceLock.objects.filter(pk="old").exists()

    @pytest.mark.storage
    def test_dry_run_counts_what_a_run_would_do(self):
        """``--dry-run`` changes nothing and reports the numbers of the next run.

        Stale locks become free and failed, and no other row changes.
        ``--idle-for`` deletes rows that were unused for that long. It never deletes a
        row that is held or was just freed.
        """
        before = list(ResourceLock.objects.order_by("pk").values())
        out = run("reap_locks", "--idle-for", "12h", "--dry-run")
        assert out == "2 stale locks would be cleared, 1 unused row would be deleted.\n"
        assert list(ResourceLock.objects.order_by("pk").values()) == before
        assert run("reap_locks", "--idle-for", "12h") == out.replace("would be ", "")
        assert states() == {
            "held": ("held", "P"),
            "stale:1": ("free", "F"),
            "stale:2": ("free", "F"),
            "recent": ("free", "S"),
        }
        rows.free("old")
        assert run("reap_locks") == "0 stale locks cleared.\n"
        assert ResourceLock.objects.filter(pk="old").exists()

    def test_nothing_is_cleared_within_the_grace(self, settings):
        """A lock and a shared hold that have just ended are kept and not counted."""
        just = timezone.now() - timedelta(seconds=5)
        rows.write("late", rows.P, just)
        rows.free("shared", version=1)
        rows.claim("shared", just, version=100)
        patient = {**settings.DLOCKS["default"], "OPTIONS": {"grace": 60}}
        settings.DLOCKS = {**settings.DLOCKS, "patient": patient}
        dry = run("reap_locks", "--using", "patient", "--dry-run")
        assert dry == "2 stale locks would be cleared.\n"
        assert run("reap_locks", "--using", "patient") == dry.replace("would be ", "")
        assert LockClaim.objects.filter(key_resource="shared").exists()
        assert rows.now("late").status == rows.P
        dry = run("reap_locks", "--dry-run")
        assert dry == "2 stale locks would be cleared.\n"
        assert run("reap_locks") == dry.replace("would be ", "")

    def test_durations_have_units(self):
        """They are seconds, minutes, hours or days. An error changes nothing."""
        many = "9" * 400 + "d"
        wrong = ["", "30", "d", "-5d", "1w", "1 d", "x", "1e3s", "٣d", many, "4000d"]
        for text in wrong:
            assert "--idle-for" in refused("reap_locks", f"--idle-for={text}")
            assert rows.now("stale:1").state == "stale"
        for text in ("90s", "15m", "12h", "30d", "1.5h", "0s"):
            out = run("reap_locks", "--idle-for", text, "--dry-run")
            assert "2 stale locks would be cleared" in out, text


class TestAliasWithoutRows:
    """Other backends list the locks that they report, in the same form."""

    @pytest.fixture(autouse=True)
    def aliases(self, db, settings):
        memory = "dlocks.backends.memory.MemoryBackend"
        settings.DLOCKS = {
            **settings.DLOCKS,
            "memory": {"BACKEND": memory, "OPTIONS": {"prefix": "a:"}},
        }

    @pytest.fixture
    def held(self, in_other_thread):
        """Return a function that holds a lock in another thread."""
        holds = []

        def hold(lock):
            holds.append(in_other_thread(lock.acquire))
            return holds[-1]

        yield hold
        for one in holds:
            in_other_thread(one.release)

    def test_its_locks_are_listed_in_the_same_table(self, held):
        """The key, the waiters, the holder, its age and the time left are listed."""
        held(db_lock("stock:7", using="memory"))
        held(db_lock("report", using="memory"))
        backend = backends["memory"]
        backend.enqueue(Claim(key="a:stock:7", ttl=30.0))
        backend.acquire(Claim(key="b:other prefix", ttl=30.0))
        header, report, stock = run("list_locks", "--using", "memory").splitlines()
        assert header.split()[0] == "KEY"
        assert report.split()[:2] == ["report", "held"]
        assert stock.split()[:2] == ["stock:7", "held"]
        assert re.search(r" held +1 +\S+:\d+:.* \d+s +\d+s$", stock)
        assert lines("list_locks", "stock:*", "--using", "memory") == ["stock:7"]
        assert lines("list_locks", "--sort", "waiting", "--using", "memory") == [
            "stock:7",
            "report",
        ]
        (lock,) = json.loads(
            run("list_locks", "report", "--json", "--waiting", "--using", "memory")
        )
        assert (lock["key"], lock["state"], lock["waiting"]) == ("report", "held", 0)
        assert 0 <= lock["seconds_held"] < 30 < lock["seconds_left"] + 30
        assert lock["queue"] == lock["shared_by"] == lock["holders_wait_for"] == []

    def test_shared_holds_are_listed_with_their_tokens(self, held):
        holds = [held(db_rwlock("doc", using="memory").read()) for _ in range(2)]
        table = run("list_locks", "--waiting", "--using", "memory")
        assert re.search(r"^doc +shared \(2\) +0 +- ", table, re.MULTILINE)
        for hold in holds:
            assert f", shared (token {hold.token})" in table
        (lock,) = json.loads(
            run("list_locks", "--json", "--waiting", "--using", "memory")
        )
        assert [share["token"] for share in lock["shared_by"]] == [
            hold.token for hold in holds
        ]
        assert "Pass --share TOKEN" in refused("clear_lock", "doc", "--using", "memory")

    def test_unknown_values_stay_empty(self, monkeypatch):
        """A backend need not know the lease or the age of a hold.

        Stale locks are listed as stale. The list has at most a thousand keys.
        """
        monkeypatch.setattr("dlocks.backends.listing.LISTED", 2)
        backend = backends["memory"]
        for key in "cab":
            backend.acquire(Claim(key=f"a:{key}", ttl=30.0))
        assert lines("list_locks", "--using", "memory") == ["a", "b"]
        claim = Claim(key="a:0", ttl=30.0)
        backend.acquire(claim)
        backend.expire(claim, 5.0)
        assert lines("list_locks", "--stale", "--using", "memory") == ["0"]
        assert "0" not in lines("list_locks", "--held", "--using", "memory")
        table = run("list_locks", "--using", "memory")
        assert re.search(r"^0 +stale .* -5s$", table, re.MULTILINE)
        holder = Holder(
            key="a:x", holder="", owner_ip=None, since=None, remaining=math.inf,
            token=7, count=1, stale=False,
        )  # fmt: skip
        monkeypatch.setattr(backend, "keys", lambda: ["a:x"])
        monkeypatch.setattr(backend, "holder", lambda key: holder)
        _, row = run("list_locks", "--using", "memory").splitlines()
        assert row.split() == ["x", "held", "0", "-", "-", "-"]
        (lock,) = json.loads(run("list_locks", "--json", "--using", "memory"))
        for name in ("begin_time", "end_time", "seconds_held", "seconds_left"):
            assert lock[name] is None

    def test_a_backend_that_cannot_clear_says_so(self, held):
        held(db_lock("x", using="memory"))
        command = "clear_lock", "x", "--using", "memory", "--yes"
        assert "is held. To force its release" in refused(*command)
        message = refused(*command, "--reason", "tests")
        assert message == "MemoryBackend cannot clear locks."
        assert "has no lock 'y'" in refused("clear_lock", "y", "--using", "memory")


@pytest.mark.django_db
@for_each("command", COMMANDS)
def test_an_alias_without_a_list_says_why(command, settings):
    """The error names the alias, its backend, the reason and what to do.

    A misspelt alias is an error too. The backends of the database family share
    their rows.
    """
    assert "'nope'" in refused(*command, "--using", "nope")
    plain = {**settings.DLOCKS}
    for backend, why in (
        ("dummy.DummyBackend", "It grants every claim"),
        ("session.SessionBackend", "Call holder() of a lock instead."),
        ("quorum.QuorumBackend", "List each member instead."),
    ):
        members = {"of": ["default", "memory", "insert"]}
        other = {
            "BACKEND": f"dlocks.backends.{backend}",
            "OPTIONS": members if "quorum" in backend else {},
        }
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


@pytest.mark.django_db
def test_a_database_failure_is_reported_in_one_line(monkeypatch):
    rows.stale("a")

    def fail(*args, **kwargs):
        raise LockBackendError("the database is away")

    monkeypatch.setattr("dlocks.management.commands.list_locks.pages", fail)
    monkeypatch.setattr(backends["default"], "clear", fail)
    monkeypatch.setattr(backends["default"], "reap", fail)
    for command in ("list_locks",), ("clear_lock", "a", "--yes"), ("reap_locks",):
        assert refused(*command) == "the database is away"


@pytest.mark.storage
@pytest.mark.django_db(transaction=True)
def test_a_missing_table_is_an_error(caplog):
    """Before ``migrate`` every command says once, in one line, what to run."""
    renamed = "dlocks_elsewhere"
    table = ResourceLock._meta.db_table
    fix = "Run 'manage.py migrate dlocks --database default'."
    with connection.schema_editor() as editor:
        editor.alter_db_table(ResourceLock, table, renamed)
    try:
        for command in COMMANDS:
            with pytest.raises(CommandError, match=table) as caught:
                run(*command)
            start = "Database 'default' is not migrated ("
            assert str(caught.value).startswith(start), command
            assert str(caught.value).endswith(f"). {fix}"), command
            assert "\n" not in str(caught.value), command
        caplog.clear()
        with pytest.raises(CommandError, match=fix):
            call_command("run_locked", "backup", command=["true"])
        assert caplog.messages == []
        out = io.StringIO()
        with pytest.raises(CommandError, match="Not healthy: default"):
            call_command("dlocks_health", "--using", "default", stdout=out)
        assert "manage.py migrate dlocks --database default" in out.getvalue()
    finally:
        with connection.schema_editor() as editor:
            editor.alter_db_table(ResourceLock, renamed, table)


def test_a_duration_is_shown_in_its_largest_unit():
    """It is the largest unit of which there are at least two."""
    shown = {
        0.04: "0.0 s", 0.4: "0.4 s", -3: "-3.0 s", 42: "42 s", 119: "119 s",
        180: "3 minutes", 7199: "120 minutes", -5 * 3600: "-5 hours",
        90000: "25 hours", 86400 * 3: "3 days",
    }  # fmt: skip
    assert {seconds: duration(seconds) for seconds in shown} == shown


@pytest.mark.django_db(transaction=True)
class TestHealth:
    @pytest.mark.storage
    def test_a_working_alias_is_healthy(self, in_other_thread, monkeypatch):
        """A probe gets exit status 0, and figures as JSON.

        A limit that is exceeded and a clock that differs are problems. The lock of
        another check is none.
        """
        rows.held("stock:7")
        rows.stale("report")
        rows.waits("stock:7")
        using = "dlocks_health", "--using", "default"
        report = json.loads(run(*using, "--json"))["default"]
        assert report["healthy"]
        assert report["problems"] == []
        assert report["round_trip_ms"] > 0
        assert abs(report["clock_skew_s"]) < 5
        counts = {"held": 1, "shared": 0, "stale": 1, "waiting": 1}
        assert report.items() >= counts.items()
        (state, figures, counted) = run(*using).splitlines()
        assert state == "default: healthy"
        assert re.match(r"  acquired and released in [\d.]+ ms, clocks ", figures)
        assert counted == "  1 held, 0 shared, 1 stale, 1 waiting"
        assert not db_lock("dlocks_health").locked()
        held = in_other_thread(db_lock("dlocks_health").acquire)
        for option, problem in (
            ("--max-stale", "1 stale locks, more than 0"),
            ("--max-waiting", "1 waiters, more than 0"),
        ):
            out = io.StringIO()
            call_command(*using, option, "1", stdout=out)
            with pytest.raises(CommandError, match=r"^Not healthy: default\.$"):
                call_command(*using, option, "0", stdout=out)
            assert problem in out.getvalue()
        in_other_thread(held.release)
        clock = SimpleNamespace(time=float, perf_counter=float)
        monkeypatch.setattr(dlocks_health, "time", clock)
        with pytest.raises(CommandError, match="Not healthy"):
            run(*using, "--max-clock-skew", "60")

    def test_each_alias_is_reported(self, settings):
        """One alias that fails does not hide the others."""
        settings.DLOCKS = {
            "default": {},
            "typo": {"OPTIONS": {"tll": 5}},
            "memory": {"BACKEND": "dlocks.backends.memory.MemoryBackend"},
        }
        out = io.StringIO()
        with pytest.raises(CommandError, match=r"^Not healthy: typo\.$"):
            call_command("dlocks_health", "--json", stdout=out)
        reports = json.loads(out.getvalue())
        assert "'tll'" in reports["typo"]["problems"][0]
        assert list(reports["memory"]) == ["healthy", "round_trip_ms", "problems"]
        with pytest.raises(CommandError, match="Not healthy: nonsense"):
            run("dlocks_health", "--using", "nonsense")


@pytest.mark.django_db
def test_watch_lists_again_until_ctrl_c(monkeypatch):
    """``--watch`` shows the locks again and again in a terminal."""
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 2:
            raise KeyboardInterrupt
        rows.held(f"stock:{seconds}")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(list_locks, "time", SimpleNamespace(sleep=sleep))
    call_command("list_locks", "--watch", stdout=terminal, no_color=True)
    _, first, second = terminal.getvalue().split("\x1b[2J\x1b[H")
    assert first == "No locks.\n"
    assert "stock:2.0" in second
    assert slept == [2.0, 2.0]
    slept.clear()
    assert "\x1b" not in run("list_locks", "--watch", "0.5")
    assert slept == [0.5, 0.5]
    assert "not allowed with" in refused("list_locks", "--watch", "--json")
