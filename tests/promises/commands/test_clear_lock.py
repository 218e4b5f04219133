"""The command clear_lock."""

import re

import pytest
from django.core.management import CommandError, call_command
from django.db import transaction

from dlocks import LockLost, db_lock
from dlocks.models import LockClaim, ResourceLock
from tests import jobs, rows
from tests.promises.admin.pages import tokens
from tests.promises.commands.running import refused, run

pytestmark = [pytest.mark.front, pytest.mark.django_db]

YES = ("--yes", "--reason", "tests")


@pytest.mark.storage
@pytest.mark.django_db(transaction=True)
def test_clear_lock_names_the_holder_and_clears_the_lock(in_other_thread):
    """``clear_lock --yes`` names the holder and frees the key.

    The former holder can neither renew nor release, and raises ``LockLost``. The
    command says that, too.
    """
    rows.held("stock:7", begin_time=rows.PAST)
    out = run("clear_lock", "stock:7", *YES)
    said = r"'stock:7' is held by web-1:4711:MainThread \(192\.0\.2\.7\) for \d+ days"
    assert re.search(rf"{said}, \d+ days left \(token 1000\)\.", out)
    assert "fenced off: its next renewal reports the loss" in out
    assert rows.OWNER[:8] not in out
    lock = rows.now("stock:7")
    assert (lock.state, lock.status, lock.owner) == ("free", "F", "")
    assert lock.version > 1000
    hold = db_lock("a", renew=False).acquire()
    run("clear_lock", "a", *YES)
    version = rows.now("a").version
    assert version > hold.token
    with pytest.raises(LockLost):
        hold.renew()
    assert in_other_thread(jobs.token_of, db_lock("a", timeout=0)) > version


def test_clear_lock_asks_for_confirmation(answer):
    """Only "y" and "yes" clear the lock. Return, "n" or Ctrl-D change nothing.

    Without a terminal, as in cron, the command refuses and names ``--yes``.
    """
    rows.stale("a")
    assert "--yes" in refused("clear_lock", "a")
    for reply in ("", "n", "no", "yep", EOFError()):
        answer(reply)
        assert "Nothing was changed" in refused("clear_lock", "a")
    assert rows.now("a").version == 1000
    rows.held("d")
    rows.held("e")
    live = "A holder may still be working. Clear {!r}? [y/N] "
    for key, reply, question in (
        ("a", "y", "Clear 'a'? [y/N] "),
        ("d", "y", live.format("d")),
        ("e", " Yes ", live.format("e")),
    ):
        asked = answer(reply)
        run("clear_lock", key, "--reason", "tests")
        assert asked == [question]
        assert rows.now(key).state == "free"


def test_an_invalid_or_unknown_key_is_an_error():
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


def test_stale_only_keeps_live_holds():
    """With a prefix, ``--using`` clears the key of that prefix."""
    rows.held("a")
    rows.stale("b")
    rows.stale("shop:b")
    run("clear_lock", "b", "--yes", "--using", "prefixed")
    assert (rows.now("b").state, rows.now("shop:b").state) == ("stale", "free")
    assert "not stale" in refused("clear_lock", "a", "--stale-only", *YES)
    run("clear_lock", "b", "--stale-only", *YES)
    assert (rows.now("a").version, rows.now("b").state) == (1000, "free")


@pytest.mark.django_db(transaction=True)
def test_a_lock_that_changed_hands_during_the_question_is_kept(answer):
    """The command clears only the hold that it showed.

    If another holder took the key over meanwhile, the message names it. A lock that was
    released or deleted meanwhile is not cleared.
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


@pytest.mark.django_db(transaction=True)
def test_a_key_that_rests_after_its_release_is_not_held():
    """The key has no holder, so no loss is announced."""
    with db_lock("report", min_hold=600):
        pass
    assert "'report' is resting. To force" in refused("clear_lock", "report")
    out = run("clear_lock", "report", *YES)
    said = r"^'report' is resting, \d+ minutes left: released by .* \(token \d+\)\.$"
    assert re.search(said, out, re.MULTILINE)
    assert out.endswith("'report' was cleared and is free.\n")


def test_one_key_is_cleared_at_a_time():
    """A key with a star is that key, and no pattern. A second key is refused."""
    for key in ("a*", "ab"):
        rows.stale(key)
    assert "unrecognized arguments: ab" in refused("clear_lock", "a*", "ab", "--yes")
    assert {rows.now(key).version for key in ("a*", "ab")} == {1000}
    run("clear_lock", "a*", "--yes")
    assert (rows.now("a*").state, rows.now("ab").version) == ("free", 1000)


def test_odd_keys_are_cleared_and_printed_with_escapes():
    """Quotes, line breaks and emoji are allowed in a key."""
    for key in ("'; DROP TABLE x; --", "a\n\x1b[31m", "🔒", "100%", "a/b"):
        rows.stale(key)
        assert "\x1b" not in run("clear_lock", key, "--yes")
        assert rows.now(key).state == "free"


# Shared holds and waiters.


def test_one_shared_hold_is_ended_by_its_token():
    """The others are unchanged, and ``--stale-only`` ends none of a live holder."""
    rows.free("catalogue")
    rows.shares("catalogue", 1001, holder="web-1:1:t")
    rows.shares("catalogue", 1002, holder="web-2:1:t")
    rows.stale_share("catalogue", 1003)
    one = ("clear_lock", "catalogue", "--share", "1001")
    assert "not stale" in refused(*one, "--stale-only", *YES)
    stale = ("clear_lock", "catalogue", "--share", "1003", "--stale-only", *YES)
    assert "1 shared hold of 'catalogue' was ended." in run(*stale)
    assert tokens() == [1001, 1002]
    out = run(*one, *YES)
    assert re.search(r"held by web-1:1:t \(198\.51\.100\.8\) for \d+ days, ", out)
    assert "1 shared hold of 'catalogue' was ended." in out
    assert "fenced off" in out
    assert tokens() == [1002]
    lock = ResourceLock.objects.get()
    assert (lock.waiters, lock.shares) == (0, 1)
    assert "with token 1001" in refused(*one, *YES)
    assert "with token" in refused(*one[:3], str(10**30), "--yes")


def test_a_shared_key_is_not_cleared_without_a_token(answer, capsys):
    """``clear_lock`` shows the shared holds and how to end one.

    It asks for a confirmation. A shared hold that has ended meanwhile is reported, as
    an error.
    """
    rows.free("catalogue")
    for token in (1001, 1002):
        rows.shares("catalogue", token, holder=f"web-{token}:1:t")
    with pytest.raises(CommandError, match="Pass --share TOKEN"):
        call_command("clear_lock", "catalogue", "--yes", no_color=True)
    first, *shown = capsys.readouterr().out.splitlines()
    assert first == "'catalogue' is shared:"
    for token, line in zip((1001, 1002), shown, strict=True):
        assert re.fullmatch(rf"    held by web-{token}:1:t .* \(token {token}\)", line)
    one = ("clear_lock", "catalogue", "--reason", "tests", "--share")
    asked = answer("n")
    assert "Nothing was changed" in refused(*one, "1001")
    question = "A holder may still be working. End a shared hold of 'catalogue'? "
    assert asked == [f"{question}[y/N] "]
    assert tokens() == [1001, 1002]
    answer("y", before=LockClaim.objects.all().delete)
    ended = refused(*one, "1001")
    assert "the shared hold with this token has ended" in ended


@pytest.mark.driver
def test_a_cleared_key_names_its_next_holder():
    """A cleared key goes to its first live waiter, whom the output names."""
    rows.held("stock:7")
    rows.dead("stock:7", holder="gone:1:t")
    rows.waits("stock:7", holder="web-2:1:t")
    out = run("clear_lock", "stock:7", *YES)
    assert "'stock:7' was cleared. It is now held by web-2:1:t" in out
    # The dead waiter does not count.
    lock = rows.now("stock:7")
    assert (lock.state, lock.holder, lock.waiters) == ("held", "web-2:1:t", 0)
    assert lock.version > 1001


@pytest.mark.engine("postgresql", "mariadb")
@pytest.mark.django_db(transaction=True)
def test_a_waiter_is_notified_when_the_clearing_commits(workers, until):
    """In a transaction, the first waiter acquires the key at the commit."""
    (waiter,) = workers(1)
    mine = db_lock("stock:7", renew=False, ttl=600).acquire()
    waiter.start(jobs.hold, "stock:7", timeout=60)
    until(lambda: mine.queue_length() == 1)
    with transaction.atomic():
        run("clear_lock", "stock:7", *YES)
        assert not waiter.pipe.poll(0.5)
    assert waiter.hear(10) > mine.token
    with pytest.raises(LockLost):
        mine.release()
    waiter.tell()
    assert waiter.hear() == "released"


# Reasons and the audit log.


@pytest.mark.django_db(transaction=True)
def test_the_command_requires_a_reason_for_live_holds(audited, answer):
    """It refuses before it asks for a confirmation or changes anything.

    A stale lock that is renewed meanwhile needs a reason too. Otherwise a stale lock
    needs none. The audit log has the reason, and the operator's name.
    """
    rows.held("a")
    rows.free("b")
    rows.shares("b", 1001)
    assert "--reason TEXT" in refused("clear_lock", "a", "--yes")
    share = ("clear_lock", "b", "--share", "1001", "--yes")
    assert "--reason TEXT" in refused(*share)
    for reason in ("", " ", "a\nb", "x" * 201):
        assert "eason" in refused("clear_lock", "a", "--yes", "--reason", reason)
    # The holder renews the stale lock while the command asks.
    rows.stale("c")
    row = ResourceLock.objects.filter(pk="c")
    answer("y", before=lambda: row.update(end_time=rows.FUTURE))
    assert "not stale" in refused("clear_lock", "c")
    assert (rows.now("a").version, rows.now("c").version) == (1000, 1000)
    assert (LockClaim.objects.count(), audited()) == (1, [])
    run("clear_lock", "a", "--yes", "--reason", "deploy hung")
    run(*share, "--reason", "its host is gone")
    rows.stale("d")
    run("clear_lock", "d", "--yes")
    rows.stale("e")
    run("clear_lock", "e", "--yes", "--reason", "seen to by hand")
    names = ("audit_action", "audit_kind", "lock_token", "audit_reason")
    known = [tuple(getattr(one, name) for name in names) for one in audited()]
    assert known[0] == ("force_release", "lock", 1000, "deploy hung")
    assert known[1][1:] == ("share", 1001, "its host is gone")
    assert known[2] == ("clear", "lock", 1000, "stale")
    assert known[3] == ("clear", "lock", 1000, "seen to by hand")
    (operator,) = {one.audit_by for one in audited()}
    assert operator
    assert {one.audit_via for one in audited()} == {"clear_lock"}
