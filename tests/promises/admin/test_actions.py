"""The actions of the admin: clear stale locks, and force releases."""

import re

import pytest
from django.contrib.admin import site
from django.contrib.admin.models import LogEntry
from django.db import connection

from dlocks import LockBackendError, LockLost, db_lock, db_semaphore
from dlocks.models import LockClaim, ResourceLock
from tests import jobs, rows
from tests.promises.admin.names import CLEAR, END, FORCE, LIST
from tests.promises.admin.pages import (
    act,
    buttons,
    confirm,
    counters,
    detail,
    end,
    fields,
    log,
    page,
    tokens,
    told,
)
from tests.promises.interposed import before_clear

pytestmark = [pytest.mark.front, pytest.mark.django_db]


def fail(*args):
    raise ZeroDivisionError


# Clear stale locks.


@pytest.mark.parametrize("address", [LIST, detail("a")], ids=["list", "key"])
def test_the_button_clears_only_the_hold_it_was_beside(clearer, address):
    rows.held("b")
    rows.free("a")
    assert buttons(page(clearer.get(address))) == []
    ResourceLock.objects.filter(pk="a").delete()
    rows.stale("a", version=1000)
    (button,) = buttons(page(clearer.get(address)))
    ResourceLock.objects.filter(pk="a").delete()
    rows.stale("a", version=2000)
    assert "acquired by another holder" in told(end(clearer, button))
    assert rows.now("a").status == rows.P
    (button,) = buttons(page(clearer.get(address)))
    response = clearer.post(END, {**button, "back": address})
    assert (response.status_code, response.url) == (302, address)
    assert "1 stale lock was cleared: a" in told(page(clearer.get(address)))
    assert rows.now("a").status == rows.F
    rows.stale_share("a", 1001)
    (button,) = buttons(page(clearer.get(address)))
    assert "1 stale lock was cleared: a" in told(end(clearer, button))
    assert not LockClaim.objects.exists()
    assert "(not stale): b" in told(end(clearer, {"clear": "lock 1000 b"}))


@pytest.mark.driver
@pytest.mark.parametrize("kind", ["lock", "share", "claim"])
def test_a_key_that_no_row_can_have_is_left_unchanged(clearer, kind):
    """A key with a NUL, which PostgreSQL refuses, is reported and is no error."""
    text = told(end(clearer, {"clear": f"{kind} 1 nul\0"}))
    assert "1 lock was left unchanged" in text


@pytest.mark.driver
def test_stale_locks_are_cleared_and_logged(clearer):
    """Stale locks become free; the message names them, the log names the user.

    A held lock is never cleared. The message names it, and locks that are already free
    or no longer exist. A lock that has left the filter since the list was shown is
    reported too.
    """
    for key in "abc":
        rows.stale(key)
    rows.held("alive")
    rows.free("free")
    act(clearer, CLEAR, "alive", force_release="lock 1000 alive", post="yes")
    keys = ("a", "b", "alive", "free", "gone", "nul\0")
    text = told(act(clearer, CLEAR, *keys, query="?state=stale"))
    for shown in (
        "2 stale locks were cleared: a, b",
        "1 lock was left unchanged (not stale): alive",
        "1 lock was left unchanged (already free): free",
        "2 locks were left unchanged (the row no longer exists): gone",
    ):
        assert shown in text
    assert [rows.now(key).state for key in "abc"] == ["free", "free", "stale"]
    assert (rows.now("alive").version, rows.now("free").version) == (1000, 1000)
    assert rows.now("a").status == "F"
    assert [entry[:2] for entry in log()] == [("clearer", "a"), ("clearer", "b")]
    said = "Cleared the stale lock held by web-1:4711:MainThread (192.0.2.7)"
    assert log()[0][2].startswith(said)
    entry = LogEntry.objects.get(object_id="a")
    assert (entry.is_change(), str(entry.get_edited_object())) == (True, "a")


@pytest.mark.driver
def test_the_stale_action_ends_stale_holds_and_dead_claims(clearer):
    """Live holds and claims are unchanged."""
    rows.free("catalogue")
    rows.shares("catalogue", 1001)
    rows.stale_share("catalogue", 1002)
    rows.held("busy")
    rows.dead("busy")
    rows.stale("stale")
    rows.stale_share("other", 1003)
    text = told(act(clearer, CLEAR, "catalogue", "busy", "stale"))
    assert "2 stale locks were cleared: catalogue, stale" in text
    assert "1 dead claim was removed from the queue: busy" in text
    assert "left unchanged" not in text
    assert tokens() == [1001, 1003]
    assert (counters("catalogue"), counters("busy")) == ((0, 1), (0, 0))
    assert rows.now("busy").version == 1000
    found = {key: re.split(" held by |: ", said)[0] for _, key, said in log()}
    assert found == {
        "catalogue": "Cleared the stale shared lock",
        "busy": "Removed a dead claim from the queue",
        "stale": "Cleared the stale lock",
    }


@pytest.mark.storage
def test_a_lock_that_is_renewed_before_the_write_is_not_cleared(boss, settings):
    """Nor is one that is acquired then, and one that changes hands is not released."""
    rows.stale("a")
    rows.stale("b")
    rows.held("c")
    versions = {"a": 1000, "b": 1001, "c": 1001}

    def renew(key):
        changes = {"end_time": rows.FUTURE, "version": versions[key]}
        ResourceLock.objects.filter(pk=key).update(**changes)

    before_clear(settings, renew)
    form = fields(act(boss, FORCE, "c"))
    text = told(act(boss, CLEAR, "a", "b"))
    assert "(not stale): a" in text
    assert "(acquired by another holder in the meantime): b" in text
    assert "acquired by another holder in the meantime" in confirm(boss, form)
    found = {key: rows.now(key) for key in versions}
    assert {lock.state for lock in found.values()} == {"held"}
    assert {key: lock.version for key, lock in found.items()} == versions
    assert not log()


def test_a_lock_that_its_holder_releases_just_before_is_not_forced(
    releaser, settings, audited
):
    """Its row is left as the holder wrote it, and no log names a forced release."""
    rows.held("a")

    def release(key):
        changes = {"end_time": rows.PAST, "status": rows.S, "hold_count": 0}
        ResourceLock.objects.filter(pk=key).update(**changes)

    form = fields(act(releaser, FORCE, "a"))
    before_clear(settings, release)
    assert "1 lock was left unchanged (already free): a" in confirm(releaser, form)
    assert (rows.now("a").status, rows.now("a").version) == (rows.S, 1000)
    assert not log()
    assert not audited()


@pytest.mark.django_db(transaction=True)
def test_a_failing_admin_log_leaves_the_audit(releaser, audited, monkeypatch):
    """The hold has ended already, so its end is in one of the logs."""
    rows.held("a")
    form = fields(act(releaser, FORCE, "a"))
    monkeypatch.setattr(site.get_model_admin(ResourceLock), "log_change", fail)
    with pytest.raises(ZeroDivisionError):
        releaser.post(END, form)
    assert rows.now("a").state == "free"
    (record,) = audited()
    assert record.lock_key == "a"


def test_select_all_covers_only_the_filtered_locks(boss):
    """ "Select all" clears every stale lock of the list, and no other.

    Under a filter it covers only the locks that the filter shows. A selection too large
    for Django's form limit is refused.
    """
    rows.held("h")
    rows.stale("s0")
    rows.stale("s1")
    rows.free("f")
    every = {"select_across": "1"}
    for query, shown in (("?state=stale", ["s0", "s1"]), ("", ["h", "s0", "s1"])):
        text = act(boss, FORCE, "s0", query=query, **every)
        assert fields(text)["force_release"] == [f"lock 1000 {key}" for key in shown]
    text = told(act(boss, CLEAR, "h", **every))
    assert "2 stale locks were cleared: s0, s1" in text
    assert rows.now("h").version == 1000
    assert "None of the selected locks is stale" in told(act(boss, CLEAR, "h", **every))
    lock = rows.stale("t")
    facts = {name: getattr(lock, name) for name in ("status", "begin_time", "end_time")}
    ResourceLock.objects.bulk_create(
        ResourceLock(key_resource=f"t{number}", version=1000, **facts)
        for number in range(400)
    )
    for action in (CLEAR, FORCE):
        assert "At most 400 locks" in told(act(boss, action, "h", **every))
    assert rows.now("t0").state == "stale"


def test_messages_name_at_most_ten_locks(clearer):
    keys = ["<script>alert(1)</script>", *(f"k{number:02}" for number in range(11))]
    for key in keys:
        rows.stale(key)
    text = act(clearer, CLEAR, *keys)
    named = ", ".join(keys[:10])
    assert told(text).endswith(f"12 stale locks were cleared: {named} and 2 more")
    assert "<script>alert" not in text


def test_a_failing_database_is_reported_by_the_admin(clearer, settings):
    """If the database fails half-way, the message names the locks and the error."""
    rows.stale("a")
    rows.stale("b")

    def fail(key):
        if key == "b":
            raise LockBackendError("the database is away")

    before_clear(settings, fail)
    text = told(act(clearer, CLEAR, "a", "b"))
    assert "1 stale lock was cleared: a" in text
    assert "he database is away" in text
    assert [entry[1] for entry in log()] == ["a"]


# Force release.


def test_a_forced_release_needs_a_confirmation(releaser):
    """The confirmation page lists locks, holders and effects, and changes none.

    With one lock, its title names the key.
    """
    rows.held("a", begin_time=rows.PAST)
    rows.stale("b", holder="worker:<b>:t")
    rows.free("c")
    text = act(releaser, FORCE, "a", "b", "c")
    for shown in (
        "web-1:4711:MainThread", "192.0.2.7", "2020-01-01 22:04:05", "is not stopped",
        "worker:&lt;b&gt;:t", "fenced off",
        "One selected lock is already free and is left out.",
    ):  # fmt: skip
        assert shown in text
    assert fields(text)["force_release"] == ["lock 1000 a", "lock 1000 b"]
    one = act(releaser, FORCE, "b")
    assert one.count("Force release: b") == 3  # title, breadcrumb, heading
    assert "Force release:" not in text
    assert [rows.now(key).version for key in "abc"] == [1000, 1000, 1000]
    assert not log()


def test_a_lock_that_changed_hands_since_the_page_is_kept(releaser):
    """The message names it."""
    rows.held("a")
    rows.held("b")
    form = fields(act(releaser, FORCE, "a", "b"))
    ResourceLock.objects.filter(pk="a").update(version=1001, holder="web-2:1:t")
    text = confirm(releaser, form)
    assert "The release of 1 lock was forced: b" in text
    assert "left unchanged (acquired by another holder in the meantime): a" in text
    assert (rows.now("a").state, rows.now("a").version) == ("held", 1001)
    assert [entry[1] for entry in log()] == ["b"]


def test_a_forged_confirmation_changes_nothing(releaser, viewer, clearer):
    """Without the right version, token or permission nothing is released.

    If all selected locks are free, there is nothing to confirm. The version of a shared
    key does not release it as a whole. A page shows a forged target as changed.
    """
    rows.held("a")
    rows.free("b")
    text = told(act(releaser, FORCE, "b", "gone", "\0"))
    assert "None of the selected locks is still held" in text

    def force(client, *fields):
        return client.post(END, {"force_release": fields, "reason": "tests"})

    force(releaser, "lock 1000 \0")
    rows.shares("b", 1001)
    for wrong in ("x", f"lock {'9' * 5000} a", "lock  a", "share x b", "x 1 b"):
        response = force(releaser, "lock 1000 a", wrong)
        assert "Nothing was changed" in told(page(releaser.get(response.url)))
    wrong = ["lock -1", "lock 0", "lock 999", "claim 1001", "claim -1", "share 1000"]
    wrong += [f"{kind} {'9' * 40}" for kind in ("lock", "share")]
    for number, target in enumerate(wrong):
        rows.held(f"held {number}")
        rows.shares(f"held {number}", 1002)
        force(releaser, f"{target} held {number}")
    rows.free("shared")
    rows.shares("shared", 1002)
    force(releaser, "lock 1000 shared")
    for client in (viewer, clearer):
        assert not buttons(page(client.get(detail("b"))))
        assert force(client, "share 1001 b").status_code == 403
        confirmation = client.post(END, {"force_release": "share 1001 b"})
        assert confirmation.status_code == 403
    assert {lock.version for lock in ResourceLock.objects.all()} == {1000}
    assert tokens() == [1001] + [1002] * (len(wrong) + 1)
    assert not log()
    asked = [f"lock 999 {key}" for key in ("a", "gone", "\0")]
    text = page(releaser.post(END, {"force_release": asked}))
    assert text.count("changed in the meantime") == 3


@pytest.mark.driver
@pytest.mark.django_db(transaction=True)
def test_a_confirmed_release_frees_the_locks_and_is_logged(releaser):
    """After confirmation the locks are free and their holders are fenced off.

    The admin log says which user did it. With ``ATOMIC_REQUESTS`` both commit together.
    Sending the same confirmation again changes nothing.
    """
    hold = db_lock("a", renew=False).acquire()
    rows.held("b")
    rows.stale("c")
    for keys, atomic in ((["a"], True), (["b", "c"], False)):
        form = fields(act(releaser, FORCE, *keys))
        connection.settings_dict["ATOMIC_REQUESTS"] = atomic
        try:
            text = confirm(releaser, form)
        finally:
            connection.settings_dict["ATOMIC_REQUESTS"] = False
        assert f"forced: {', '.join(keys)}" in text
    with pytest.raises(LockLost):
        hold.renew()
    lock = rows.now("b")
    assert (lock.state, lock.owner, lock.status) == ("free", "", "F")
    assert lock.version > 1000
    entries = log()
    assert [entry[:2] for entry in entries] == [("releaser", key) for key in "abc"]
    said = "Forced the release of the lock held by web-1:4711:MainThread (192.0.2.7)"
    assert entries[1][2].startswith(said)
    assert "(already free): b, c" in confirm(releaser, form)
    assert (rows.now("b").version, log()) == (lock.version, entries)


# Shared holds and waiters.


@pytest.mark.driver
def test_one_shared_hold_or_dead_claim_can_be_ended(releaser, clearer):
    """The button of a shared hold requires a confirmation, and ends that hold.

    The log names the user. The button next to a claim without a heartbeat removes the
    claim. A live claim has no button and stays.
    """
    key = "cat\nalogue"
    rows.free(key)
    rows.shares(key, 1001, holder="web-1:1:t")
    rows.shares(key, 1002)
    first, _ = buttons(page(releaser.get(detail(key))))
    text = page(releaser.post(END, first))
    for shown in (
        "web-1:1:t",
        "is not stopped",
        "Other shared holds of the key are no",
    ):
        assert shown in text
    assert tokens() == [1001, 1002]
    form = fields(text)
    assert form["force_release"] == ["share 1001 cat%0Aalogue"]
    assert "The release of 1 lock was forced" in confirm(releaser, form)
    assert tokens() == [1002]
    who = "held by web-1:1:t (198.51.100.8) for "
    assert log()[0][2].startswith(f"Forced the release of the shared lock {who}")
    assert "the shared hold with this token has ended" in confirm(releaser, form)
    assert len(log()) == 1

    rows.held("busy")
    live = rows.waits("busy")
    dead = rows.dead("busy", holder="web-9:1:t")
    (button,) = buttons(page(clearer.get(detail("busy"))))
    assert button == {"clear": f"claim {dead.pk} busy"}
    confirm(releaser, {"force_release": button["clear"], "reason": "tests"})
    assert "1 dead claim was removed" in told(end(clearer, button))
    assert LockClaim.objects.get(key_resource="busy") == live
    said = "Removed a dead claim from the queue: web-9:1:t (198.51.100.8), waiting for "
    assert log()[1][2].startswith(said)
    text = told(end(clearer, {"clear": f"claim {live.pk} busy"}))
    assert "its heartbeat has resumed" in text
    assert counters("busy") == (1, 0)


@pytest.mark.storage
def test_a_dead_claim_without_a_lock_row_can_be_removed(clearer):
    """InsertBackend deletes the row of a free key, and may leave such a claim."""
    dead = rows.dead("gone")
    (button,) = buttons(page(clearer.get(detail("gone"))))
    text = told(end(clearer, button))
    assert text == "1 dead claim was removed from the queue: gone"
    assert not LockClaim.objects.filter(pk=dead.pk).exists()
    # A forged number creates no row.
    end(clearer, {"clear": "claim 1 nowhere"})
    assert not ResourceLock.objects.filter(pk="nowhere").exists()


def test_a_selected_shared_key_is_force_released_completely(releaser):
    """Force release of a shared key ends the shared holds that it listed."""
    rows.free("catalogue")
    for token in (1001, 1002):
        rows.shares("catalogue", token)
    rows.held("stock:7")
    form = fields(act(releaser, FORCE, "catalogue", "stock:7"))
    shares = [f"share {token} catalogue" for token in (1001, 1002)]
    assert form["force_release"] == [*shares, "lock 1000 stock:7"]
    rows.shares("catalogue", 1003)
    confirm(releaser, form)
    assert tokens() == [1003]
    assert rows.now("stock:7").state == "free"
    assert len(log()) == 3


@pytest.mark.driver
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("using", ["default", "optimistic", "insert"])
def test_a_forced_release_admits_the_first_waiter(using, releaser, workers, until):
    """A waiter acquires the key or permit as soon as a release is forced.

    It does not wait for the end of the lease. The previous holder gets an error.
    """
    (waiter,) = workers(1)
    policy = {"using": using, "renew": False, "ttl": 600}
    for lock, name, kind in (
        (db_lock("stock:7", **policy), "stock:7", "lock"),
        (db_semaphore("api", permits=1, **policy), ("api", 1), "share"),
    ):
        mine = lock.acquire()
        waiter.start(jobs.hold, name, using=using, timeout=60)
        until(lambda mine=mine: mine.queue_length() == 1)
        logged = len(log())
        target = f"{kind} {mine.token} {lock.key}"
        confirm(releaser, {"force_release": target, "reason": "tests"})
        assert waiter.hear(10) > mine.token
        assert (counters(lock.key), len(log())) == ((0, kind == "share"), logged + 1)
        with pytest.raises(LockLost):
            mine.release()
        waiter.tell()
        assert waiter.hear() == "released"


@pytest.mark.engine("postgresql", "mariadb")
@pytest.mark.django_db(transaction=True)
def test_a_removed_claim_admits_the_next_waiter(
    doomed, workers, until, clearer, in_other_thread
):
    """The claim of a stopped process is removed.

    When the process continues, it queues again and waits for its turn.
    """
    (second,) = workers(1)
    first = doomed()
    with db_lock("stock:7") as mine:
        for waiter, number in ((first, 1), (second, 2)):
            waiter.start(jobs.hold, "stock:7", timeout=60)
            until(lambda number=number: mine.queue_length() == number)
        first.stop()
        until(lambda: mine.queue_length() == 1)
        (dead,) = LockClaim.objects.by_clock().filter(state="dead")
        in_other_thread(end, clearer, {"clear": f"claim {dead.pk} stock:7"})
        assert counters("stock:7") == (1, 0)
        first.resume()
        until(lambda: mine.queue_length() == 2)
        assert LockClaim.objects.filter(pk=dead.pk).exists()
    token = first.hear()
    first.tell()
    assert second.hear() > token
    second.tell()
    assert (first.hear(), second.hear()) == ("released", "released")
    until(lambda: counters("stock:7") == (0, 0))
