"""Who may do what, what is written down of it, and what nobody is shown."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from uuid import UUID

import pytest
from django.contrib.admin.utils import quote
from django.contrib.auth.models import AnonymousUser, User
from django.core.checks import run_checks
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from dlocks import LockBackendError, LockError, LockLost, LockStale, LockTimeout, audit, db_lock, privacy, user_key
from dlocks.conf import backends
from dlocks.models import LockClaim, ResourceLock
from dlocks.testing import lose
from tests import rows
from tests.test_admin import (
    CLEAR,
    FORCE,
    LIST,
    act,
    actions,
    boss,
    clearer,
    detail,
    fields,
    log,
    page,
    person,
    releaser,
    told,
    viewer,
)
from tests.test_commands import answer, nobody_there, refused, run
from tests.test_control_room import ended

__all__ = ["answer", "boss", "clearer", "nobody_there", "releaser", "viewer"]

ROOT = Path(__file__).parent.parent

# What would end a line of a log, colour it, or turn it around.
HOSTILE = "x\r\nINFO forged\x1b[31m\x85\u2028\u202e'\""

database = pytest.mark.django_db(transaction=True)


@pytest.fixture
def audited(caplog):
    """Return a function that gives the audit's records so far."""
    caplog.set_level(logging.INFO, logger="dlocks.audit")
    return lambda: [record for record in caplog.records if record.name == "dlocks.audit"]


def facts(record) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name.startswith(("audit_", "lock_"))}


@database
class TestReason:
    def test_a_forced_release_is_in_both_logs_with_its_reason(self, releaser, audited):
        """Who, what, which version, from whom, and why: in the admin's log and in one line of the audit."""
        rows.held("stock:7")
        form = {**fields(act(releaser, FORCE, "stock:7")), "reason": "  deploy hung  "}
        page(releaser.post(LIST, form, follow=True))
        (entry,) = log()
        assert entry[:2] == ("releaser", "stock:7")
        assert entry[2].endswith("Reason: deploy hung")
        (record,) = audited()
        assert record.levelno == logging.INFO
        assert record.getMessage() == (
            "force_release lock 'stock:7', token 1000, of 'web-1:4711:MainThread' (192.0.2.7), "
            "by 'releaser' via admin: 'deploy hung'"
        )
        assert facts(record) == {
            "audit_action": "force_release",
            "audit_kind": "lock",
            "audit_by": "releaser",
            "audit_via": "admin",
            "audit_reason": "deploy hung",
            "lock_key": "stock:7",
            "lock_token": 1000,
            "lock_holder": "web-1:4711:MainThread",
            "lock_owner_ip": "192.0.2.7",
        }

    @pytest.mark.parametrize(
        ("reason", "error"),
        [(None, "Say why"), ("", "Say why"), (" \t\u00a0\u3000", "Say why"), ("\u200b\u2060", "Say why"),
         ("x" * 201, "at most 200"), ("a\nb", "one line"), ("a\u2028b", "one line"), ("a\x00b", "one line")],
    )  # fmt: skip
    def test_without_a_reason_nothing_is_changed_and_the_page_comes_again(self, releaser, audited, reason, error):
        """The same targets are on it, with the error beside the field and what was typed."""
        rows.held("a")
        rows.free("b")
        rows.shares("b", 1001)
        rows.held("c")
        dead = rows.dead("c")
        form = fields(act(releaser, FORCE, "a", "b"))
        form["_selected_action"].append("c")
        form["version"].append(f"claim:{dead.pk}")
        del form["reason"]
        text = page(releaser.post(LIST, form if reason is None else {**form, "reason": reason}))
        assert re.search(rf'<ul class="errorlist" id="id_reason_error"><li>[^<]*{error}', text)
        assert 'aria-describedby="id_reason_error id_reason_help"' in text
        again = fields(text)
        assert again["_selected_action"] == ["a", "b", "c"]
        assert again["version"] == ["1000", "share:1001", f"claim:{dead.pk}"]
        assert (rows.now("a").version, LockClaim.objects.count()) == (1000, 2)
        assert (log(), audited()) == ([], [])
        assert "3 locks were cleared" in told(page(releaser.post(LIST, again, follow=True)))
        assert [facts(record)["audit_action"] for record in audited()] == [
            "force_release", "force_release", "take_out",
        ]  # fmt: skip

    def test_the_page_that_comes_again_keeps_to_what_was_confirmed(self, releaser):
        """A lock that changed hands meanwhile is not what the second confirmation releases."""
        rows.held("a")
        form = {**fields(act(releaser, FORCE, "a")), "reason": ""}
        ResourceLock.objects.filter(pk="a").update(version=1001)
        text = page(releaser.post(LIST, form))
        assert "changed meanwhile" in text
        assert fields(text)["version"] == ["1000"]
        assert "taken by another holder meanwhile" in told(page(releaser.post(LIST, fields(text), follow=True)))
        assert rows.now("a").version == 1001

    @pytest.mark.parametrize("version", ["9" * 40, "-1", "share:" + "9" * 40, "claim:0"])
    def test_a_forged_target_comes_again_as_changed(self, releaser, version):
        rows.held("a")
        for key in ("a", "gone", "\0"):
            text = page(releaser.post(LIST, {"action": FORCE, "_selected_action": [key], "version": [version]}))
            assert "changed meanwhile" in text

    def test_what_was_typed_comes_back_as_text(self, releaser):
        rows.held("a")
        text = page(releaser.post(LIST, {**fields(act(releaser, FORCE, "a")), "reason": '"><script>' + "x" * 200}))
        assert "<script>x" not in text
        assert "&quot;&gt;&lt;script&gt;x" in text

    def test_the_reason_of_a_stale_lock_is_that_it_is_stale(self, clearer, audited):
        """Clearing it asks nobody why."""
        rows.stale("a")
        act(clearer, CLEAR, "a")
        assert log()[0][2].endswith("Reason: stale")
        assert facts(audited()[0])["audit_action"] == "clear"
        assert facts(audited()[0])["audit_reason"] == "stale"

    def test_what_is_not_cleared_is_not_audited(self, releaser, clearer, audited):
        rows.held("a")
        act(releaser, FORCE, "a", version="999")
        act(clearer, CLEAR, "a")
        assert audited() == []

    def test_the_command_wants_a_reason_for_what_is_held(self, audited):
        """Before it asks or changes anything."""
        rows.held("a")
        rows.free("b")
        rows.shares("b", 1001)
        assert "--reason TEXT" in refused("clear_lock", "a", "--yes")
        assert "--reason TEXT" in refused("clear_lock", "b", "--all-shares", "--yes")
        for reason in ("", " ", "a\nb", "x" * 201):
            assert "eason" in refused("clear_lock", "a", "--yes", "--reason", reason)
        assert (rows.now("a").version, LockClaim.objects.count(), audited()) == (1000, 1, [])
        run("clear_lock", "a", "--yes", "--reason", "deploy hung")
        run("clear_lock", "b", "--all-shares", "--yes", "--reason", "its host is gone")
        lock, share = map(facts, audited())
        assert (lock["audit_action"], lock["audit_kind"], lock["lock_token"]) == ("force_release", "lock", 1000)
        assert (share["audit_kind"], share["lock_token"]) == ("share", 1001)
        assert (lock["audit_reason"], share["audit_reason"]) == ("deploy hung", "its host is gone")
        assert lock["audit_by"] == audit.operator()
        assert lock["audit_via"] == "clear_lock"

    def test_the_command_clears_what_is_stale_as_stale(self, audited):
        rows.stale("a")
        rows.stale("b")
        run("clear_lock", "a", "--yes")
        run("clear_lock", "b", "--yes", "--reason", "seen to by hand")
        assert [facts(record)["audit_reason"] for record in audited()] == ["stale", "seen to by hand"]

    def test_a_stale_lock_that_comes_alive_while_i_am_asked_is_not_taken_without_a_reason(self, answer):
        """Its holder renewed it after all: the version is the same, but it is held."""
        rows.stale("a")
        answer("y", before=lambda: ResourceLock.objects.filter(pk="a").update(end_time=rows.FUTURE))
        assert "not stale" in refused("clear_lock", "a")
        assert rows.now("a").version == 1000

    def test_the_reaper_writes_one_line_when_it_has_done_something(self, audited):
        rows.stale("a")
        rows.stale("b")
        rows.free("old")
        run("reap_locks", "--idle-for", "1d", "--dry-run")
        assert audited() == []
        run("reap_locks", "--idle-for", "1d")
        run("reap_locks", "--idle-for", "1d")
        (record,) = audited()
        known = facts(record)
        assert (known["audit_action"], known["audit_freed"], known["audit_deleted"], known["audit_forgotten"]) == (
            "reap", 2, 1, 0,
        )  # fmt: skip
        assert record.getMessage().startswith("reap of 'default': 2 freed, 1 unused rows deleted, 0 records deleted")

    def test_the_reaper_writes_its_line_though_it_fails_later_on(self, audited, monkeypatch):
        rows.stale("a")

        def fail(*arguments, **options):
            raise LockBackendError("permission denied for table dlocks_holdrecord")
            yield

        monkeypatch.setattr(backends["default"], "forget", fail)
        assert "permission denied" in refused("reap_locks")
        (record,) = audited()
        assert facts(record)["audit_freed"] == 1

    def test_nothing_in_a_fact_can_forge_a_line(self, audited):
        """Whatever is in a key, a holder or a user's name, the audit is one line, and the owner is not in it."""
        rows.held(HOSTILE, holder=HOSTILE, owner=rows.OWNER)
        user = User.objects.create_superuser(HOSTILE, password="x")
        client = Client()
        client.force_login(user)
        form = {**fields(act(client, FORCE, HOSTILE)), "reason": "why\u202e' via admin: 'x"}
        assert "1 lock was cleared" in told(page(client.post(LIST, form, follow=True)))
        (record,) = audited()
        line = record.getMessage()
        assert line.isprintable()
        assert len(line.splitlines()) == 1
        assert "\\r\\nINFO forged\\x1b" in line
        assert rows.OWNER[:8] not in line + str(facts(record))
        assert log()[0][2].isprintable()

    def test_a_clearing_that_is_rolled_back_is_not_audited(self, clearer, audited, monkeypatch):
        """Where each request is a transaction, the audit says only what was committed."""
        from django.db import connection

        from dlocks.admin import ResourceLockAdmin

        def fail(*args, **kwargs):
            raise ZeroDivisionError

        rows.stale("a")
        monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
        with monkeypatch.context() as patch:
            patch.setattr(ResourceLockAdmin, "message_user", fail)
            with pytest.raises(ZeroDivisionError):
                act(clearer, CLEAR, "a")
        assert (rows.now("a").version, log(), audited()) == (1000, [], [])
        act(clearer, CLEAR, "a")
        assert len(audited()) == len(log()) == 1


PURGE = "delete_unused_rows"

ROLES = {
    "nobody": None,
    "staff": (),
    "blind": ("clear_resourcelock", "force_release_resourcelock", "purge_resourcelock"),
    "viewer": ("view_resourcelock",),
    "clearer": ("view_resourcelock", "clear_resourcelock"),
    "releaser": ("view_resourcelock", "force_release_resourcelock"),
    "purger": ("view_resourcelock", "purge_resourcelock"),
}
MAY = {"clearer": {CLEAR}, "releaser": {FORCE}, "purger": {PURGE}}
LIVE = LIST + "live/"


def somebody(role):
    return Client() if ROLES[role] is None else person(role, *ROLES[role])


@pytest.mark.django_db
class TestRoles:
    @pytest.fixture(autouse=True)
    def table(self):
        rows.held("held")
        rows.stale("stale")
        rows.free("unused")

    def untouched(self):
        return {lock.pk: lock.version for lock in ResourceLock.objects.all()} == dict.fromkeys(
            ("held", "stale", "unused"), 1000
        )

    @pytest.mark.parametrize("role", ROLES)
    def test_each_sees_what_it_may(self, role):
        """To see takes the permission to view; an action is offered to whom it is given, and to nobody else."""
        client = somebody(role)
        sees = "view_resourcelock" in (ROLES[role] or ())
        for address in (LIST, detail("held"), LIVE, LIVE + "?part=now", LIVE + "?part=past"):
            response = client.get(address)
            if ROLES[role] is None:
                assert (response.status_code, "/login/" in response.url) == (302, True)
            else:
                assert response.status_code == (200 if sees else 403)
        if sees:
            assert actions(page(client.get(LIST))) == MAY.get(role, set())
            text = page(client.get(detail("held"))) + page(client.get(LIVE))
            assert ("Force release" in text) is (role == "releaser")
            assert ("Clear what is stale" in page(client.get(detail("stale")))) is (role == "clearer")

    @pytest.mark.parametrize("role", ROLES)
    @pytest.mark.parametrize("action", [CLEAR, FORCE, PURGE])
    def test_a_forged_request_does_no_more_than_the_buttons(self, role, action):
        """Whoever may not do it changes nothing by sending the form of somebody who may."""
        client = somebody(role)
        allowed = action in MAY.get(role, set())
        target = {CLEAR: "stale", FORCE: "held", PURGE: "unused"}[action]
        form = {"action": action, "_selected_action": [target], "version": ["1000"], "reason": "why"}
        client.post(LIST, form)
        for address in (detail("held"), LIST + "add/", LIVE, detail("held").replace("/change/", "/delete/")):
            client.post(address, form)
        assert self.untouched() is not allowed
        assert len(log()) == allowed

    @pytest.mark.parametrize("role", [role for role in ROLES if role in MAY])
    def test_a_form_from_elsewhere_does_nothing(self, role):
        """Every request that changes something needs the token of this site's own form."""
        client = somebody(role)
        strict = Client(enforce_csrf_checks=True, headers={"referer": "http://testserver/"})
        strict.cookies = client.cookies
        (action,) = MAY[role]
        target = {CLEAR: "stale", FORCE: "held", PURGE: "unused"}[action]
        form = {"action": action, "_selected_action": [target], "version": ["1000"], "reason": "why"}
        assert strict.post(LIST, form).status_code == 403
        assert strict.post(LIST, {**form, "csrfmiddlewaretoken": "x" * 64}).status_code == 403
        assert self.untouched()
        token = fields(page(strict.get(LIST)))["csrfmiddlewaretoken"][0]
        assert strict.post(LIST, {**form, "csrfmiddlewaretoken": token}).status_code == 302
        assert not self.untouched()

    @pytest.mark.parametrize("action", [CLEAR, FORCE, PURGE])
    def test_to_get_a_page_changes_nothing(self, boss, action):
        """Not with all fields of the form in the address."""
        target = {CLEAR: "stale", FORCE: "held", PURGE: "unused"}[action]
        form = {"action": action, "_selected_action": target, "version": "1000", "reason": "why"}
        for address in (LIST, detail(target), LIVE):
            for method in (boss.get, boss.head):
                method(address, form)
        assert self.untouched()
        assert log() == []


@database
class TestPurge:
    @pytest.fixture
    def purger(self, transactional_db):
        return person("purger", "view_resourcelock", "purge_resourcelock")

    def test_unused_rows_are_deleted_after_a_page_that_asks(self, purger, audited):
        """What has been free for a day, and nothing else; it is in both logs."""
        rows.free("old")
        rows.write("recent", rows.S, timezone.now())
        rows.held("held")
        rows.stale("stale")
        text = act(purger, PURGE, "old", "recent", "held", "stale", "gone")
        assert "4 selected locks are in use" in text
        form = fields(text)
        assert (form["_selected_action"], form["version"]) == (["old"], ["1000"])
        assert ResourceLock.objects.count() == 4
        assert "1 row was deleted: old" in told(page(purger.post(LIST, form, follow=True)))
        assert sorted(ResourceLock.objects.values_list("pk", flat=True)) == ["held", "recent", "stale"]
        assert log() == [("purger", "old", "Deleted the row of the unused key.")]
        assert facts(audited()[0])["audit_action"] == "purge"
        assert facts(audited()[0])["audit_reason"] == "unused"
        assert "not there any more" in told(page(purger.post(LIST, form, follow=True)))

    @pytest.mark.parametrize("change", ["version", "taken", "waited for", "shared", "just used", "a claim uncounted"])
    def test_a_row_in_use_is_not_deleted(self, purger, change):
        """Whatever became of it since the page; by a forged form, too."""
        rows.free("a")
        form = fields(act(purger, PURGE, "a"))
        if change == "waited for":
            rows.dead("a")
        elif change == "shared":
            rows.shares("a", 1001)
        elif change == "a claim uncounted":
            rows.dead("a")
            ResourceLock.objects.update(waiters=0)
        else:
            changed = {
                "version": {"version": 1001},
                "taken": {"status": "P"},
                "just used": {"end_time": timezone.now()},
            }
            ResourceLock.objects.update(**changed[change])
        text = told(page(purger.post(LIST, form, follow=True)))
        assert "1 row was not deleted (" in text
        assert ResourceLock.objects.exists()
        assert not log()

    @pytest.mark.parametrize("version", ["x", "", "share:1000", "claim:1", "9" * 40, "-1"])
    def test_a_forged_version(self, purger, version):
        rows.free("a")
        for key in ("a", "\0", "gone"):
            act(purger, PURGE, key, version=version)
        assert ResourceLock.objects.exists()

    def test_the_next_token_is_larger(self, purger, elsewhere):
        """A key whose row is deleted is the same key."""
        rows.free("a", version=10**15)
        page(purger.post(LIST, fields(act(purger, PURGE, "a")), follow=True))
        assert not ResourceLock.objects.exists()
        with db_lock("a") as hold:
            assert hold.token > 10**15

    def test_a_version_that_the_clock_has_not_passed_keeps_its_row(self, purger):
        rows.free("a", version=2**62)
        act(purger, PURGE, "a", version=str(2**62))
        assert ResourceLock.objects.exists()

    def test_nothing_to_delete(self, purger):
        rows.held("a")
        assert "None of the selected keys has been unused" in told(act(purger, PURGE, "a", "\0"))


# As unlike anything else on a page as can be.
HOST, ADDRESS = "qx7host", "203.0.113.77"
HOLDER = f"{HOST}:48151:Qx7Thread"


@pytest.fixture
def hides(settings):
    settings.DLOCKS_SHOW_HOLDER = False
    settings.DLOCKS = {**settings.DLOCKS, "default": settings.DLOCKS["recorded"]}


def topology(text) -> list[str]:
    return [part for part in (HOST, "48151", "Qx7Thread", ADDRESS) if part in text]


def every_page(client) -> dict[str, str]:
    """Return every page of the admin about locks, and what is left of acting on each kind of thing."""
    who = {"holder": HOLDER, "owner_ip": ADDRESS}
    for key in ("held", "held too", "waited for"):
        rows.held(key, **who)
    rows.stale("stale", **who)
    rows.free("free", **who)
    for key in ("shared", "shared too"):
        rows.free(key, **who)
    tokens = {"shared": 1001, "shared too": 1002}
    for key, token in tokens.items():
        rows.shares(key, token, **who)
    rows.stale_share("shared", 1003, **who)
    rows.waits("waited for", **who)
    dead = rows.dead("waited for", **who)
    ended("held", **who)
    pages = {address: page(client.get(address)) for address in (LIST, LIVE, LIVE + "?part=now", LIVE + "?part=past")}
    for key in ("held", "stale", "free", "shared", "waited for"):
        pages[key] = page(client.get(detail(key)))
        pages[f"room of {key}"] = page(client.get(LIVE, {"key": key}))
    pages["purge"] = act(client, PURGE, "free")
    pages["clear"] = act(client, CLEAR, "stale", "held too", "shared")
    asked = pages["confirm"] = act(client, FORCE, "held", "held too", "shared too")
    pages["without a reason"] = page(client.post(LIST, {**fields(asked), "reason": ""}))
    pages["released"] = page(client.post(LIST, fields(asked), follow=True))
    pages["taken out"] = act(client, FORCE, "waited for", version=f"claim:{dead.pk}")
    for key in ("held", "stale", "waited for", "shared"):
        pages[f"history of {key}"] = page(client.get(reverse("admin:dlocks_resourcelock_history", args=[quote(key)])))
    pages["index"] = page(client.get("/admin/"))
    return pages


@pytest.mark.django_db
class TestHolders:
    @pytest.mark.usefixtures("hides")
    @pytest.mark.parametrize("shown", [False, "hash", None, "True", 1])
    def test_what_hides_is_on_no_page_and_in_no_entry_of_the_log(self, boss, settings, shown):
        """Host, process, thread and IP: not on any page, in any message, nor in the admin's log."""
        settings.DLOCKS_SHOW_HOLDER = shown
        pages = every_page(boss)
        assert {name: found for name, text in pages.items() if (found := topology(text))} == {}
        assert topology(str(log())) == []
        assert len(log()) == 6
        assert ("holder " if shown == "hash" else "a hidden holder") in pages["confirm"]

    def test_by_default_it_is_shown(self, boss, settings):
        """The test before looks at the right places."""
        settings.DLOCKS = {**settings.DLOCKS, "default": settings.DLOCKS["recorded"]}
        pages = every_page(boss)
        unshown = {"index", "purge", "clear", "released", "taken out"}
        assert {name for name, text in pages.items() if not topology(text)} - unshown <= {
            "shared", "room of stale", "room of free", "room of shared",
        } | {name for name in pages if name.startswith("history of shared")}  # fmt: skip
        assert len(topology(str(log()))) == 4

    @pytest.mark.usefixtures("hides")
    def test_what_is_hidden_is_not_found_and_not_sorted_by(self, boss):
        """Nobody can ask for it letter by letter, nor by the order of the rows."""
        rows.held("a", holder="z" + HOLDER, owner_ip=ADDRESS)
        rows.held("b", holder="a" + HOLDER, owner_ip=ADDRESS)
        for words in (HOST, ADDRESS, "Qx7"):
            assert "0 results" in page(boss.get(LIST, {"q": words}))
        for order in ("3", "-3"):
            text = page(boss.get(LIST, {"o": order}))
            assert text.index(">a</bdi>") < text.index(">b</bdi>")

    def test_a_hash_tells_holders_apart_and_is_keyed(self, settings):
        """The same holder has the same one; another site's secret makes another of it."""
        settings.DLOCKS_SHOW_HOLDER = "hash"
        one = privacy.holder(HOLDER)
        assert one == privacy.holder(HOLDER) != privacy.holder(HOLDER + "2")
        settings.SECRET_KEY = "another"
        assert privacy.holder(HOLDER) != one

    @pytest.mark.parametrize("shown", [True, False, "hash"])
    def test_a_setting_that_can_be(self, settings, shown):
        settings.DLOCKS_SHOW_HOLDER = shown
        assert not [message for message in run_checks() if message.id == "dlocks.E008"]

    @pytest.mark.parametrize("shown", [None, "True", 1, [], "name"])
    def test_a_setting_that_cannot_be_is_found_by_the_checks(self, settings, shown):
        settings.DLOCKS_SHOW_HOLDER = shown
        assert [repr(shown) in message.msg for message in run_checks() if message.id == "dlocks.E008"] == [True]

    @pytest.mark.usefixtures("hides")
    def test_commands_and_the_audit_show_it(self, audited, django_capture_on_commit_callbacks):
        """They are for those who run the site."""
        rows.held("a", holder=HOLDER, owner_ip=ADDRESS)
        assert len(topology(run("list_locks"))) == 4
        with django_capture_on_commit_callbacks(execute=True):
            assert len(topology(run("clear_lock", "a", "--yes", "--reason", "why"))) == 4
        assert len(topology(audited()[0].getMessage())) == 4


@database
class TestErrors:
    @pytest.mark.parametrize("shown", [True, False, "hash"])
    def test_errors_can_be_shown_to_anybody(self, settings, elsewhere, shown):
        """What an application may print has no more than the setting allows; the attributes have all."""
        settings.DLOCKS_SHOW_HOLDER = shown
        with db_lock("a") as mine:
            with pytest.raises(LockTimeout) as busy:
                elsewhere(db_lock("a", timeout=0).acquire)
            with pytest.raises(LockLost) as lost:
                lose("a")
                mine.check()
            me = mine.claim.holder
            rows.stale("left", holder=me)
            with pytest.raises(LockStale) as stale:
                db_lock("left", timeout=0, takeover=False).acquire()
            with suppress(LockError):
                mine.release()
        assert busy.value.holder.holder == stale.value.holder.holder == me
        assert busy.value.holder.owner_ip
        for error in (busy.value, lost.value, stale.value, busy.value.holder):
            assert (me in str(error)) is (shown is True)
            assert (socket.gethostname() in str(error)) is (shown is True)
            if isinstance(error, Exception):
                assert (me in repr(error)) is (shown is True)
                assert str(pickle.loads(pickle.dumps(error))) == str(error)
        assert str(busy.value.holder.owner_ip) not in str(busy.value) or shown is True


class TestUserKey:
    def test_it_reads_well(self):
        assert user_key("export", 7, "monthly report") == "export:7:monthly%20report"
        assert user_key("export", UUID(int=7)) == "export:00000000-0000-0000-0000-000000000007"

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (("a", "b"), ("a:b",)),
            (("a", ""), ("a",)),
            (("", "a"), ("a", "")),
            (("a%3Ab",), ("a:b",)),
            (("é",), ("e\u0301",)),
            (("A",), ("a",)),
            (("a ",), ("a",)),
            (("x" * 1000,), ("x" * 999 + "y",)),
            (("x" * 500, "x" * 500), ("x" * 501, "x" * 499)),
        ],
    )
    def test_different_parts_have_different_keys(self, one, other):
        assert user_key("n", *one) != user_key("n", *other)

    def test_nobody_leaves_the_namespace(self):
        """Whatever a user writes, the key begins with the namespace and a colon, and holds no other colon of theirs."""
        assert user_key("export", "x:../../admin:7\r\n\0").startswith("export:x%3A..%2F..%2Fadmin%3A7%0D%0A%00")

    def test_a_user_cannot_write_the_key_of_a_long_one(self):
        """What stands for too long a key cannot be written as a part."""
        long = user_key("n", "x" * 1000)
        assert user_key("n", long.partition(":")[2]) != long
        assert len(long) == 200

    def test_a_number_is_as_it_is_written(self):
        """An id comes as a number from the row, and as a string from the address."""
        assert user_key("n", 7) == user_key("n", "7")

    @pytest.mark.parametrize(
        "namespace", ["", "a b", "a:b", "7a", "é", "x" * 101, "a\n", "{pk}"],
    )  # fmt: skip
    def test_a_namespace_that_is_none(self, namespace):
        with pytest.raises(ValueError, match="identifier"):
            user_key(namespace, 7)

    @pytest.mark.parametrize("part", [None, True, 1.5, b"a", ["a"], AnonymousUser()])
    def test_what_is_no_part(self, part):
        """Nor the pk of somebody who is not logged in."""
        with pytest.raises(TypeError, match="part 2 of a key"):
            user_key("n", 1, part)
        with pytest.raises(TypeError, match="at least one part"):
            user_key("n")
        with pytest.raises(TypeError, match="namespace"):
            user_key(7, 7)

    @pytest.mark.parametrize("part", ["x" * 1025, "é" * 513, "\ud800", 10**1025, 10**5000], ids=range(5))
    def test_what_cannot_be_a_part(self, part):
        with pytest.raises(ValueError):
            user_key("n", part)
        assert user_key("n", "é" * 512)


@pytest.mark.engine("sqlite")
class TestAudit:
    """``make audit``: what it says of each answer of pip-audit."""

    def audit(self, tmp_path, program):
        (tmp_path / "pip_audit.py").write_text(program)
        return subprocess.run(
            [sys.executable, str(ROOT / "scripts/audit.py")],
            env={"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            check=False,
        )

    def report(self, *dependencies):
        return f"import sys\nprint({json.dumps(json.dumps({'dependencies': dependencies, 'fixes': []}))})\n"

    def test_nothing_found(self, tmp_path):
        done = self.audit(tmp_path, self.report({"name": "django", "version": "5.2", "vulns": []}))
        assert (done.returncode, done.stdout) == (0, "1 packages, 0 known vulnerabilities.\n")

    def test_what_is_found_is_told_and_fails(self, tmp_path):
        hole = {"id": "CVE-0000-1", "fix_versions": ["5.2.1"]}
        dependencies = [
            {"name": "django", "version": "5.2", "vulns": [hole]},
            {"name": "dlocks", "skip_reason": "distribution marked as editable"},
        ]
        done = self.audit(tmp_path, self.report(*dependencies) + "sys.exit(1)")
        assert done.returncode == 1
        assert done.stdout.splitlines() == [
            "django 5.2: CVE-0000-1, fixed in 5.2.1", "1 packages, 1 known vulnerabilities.",
        ]  # fmt: skip

    def test_packages_that_nothing_is_known_of_are_told_and_fail(self, tmp_path):
        """As behind an index that has no advisories."""
        skipped = {"name": "django", "skip_reason": "Dependency not found on PyPI and could not be audited: django"}
        done = self.audit(tmp_path, self.report(skipped))
        assert (done.returncode, done.stdout) == (2, "0 packages, 0 known vulnerabilities.\n")
        assert "could not be asked about: django" in done.stderr

    def test_a_database_that_cannot_be_asked_is_not_nothing_found(self, tmp_path):
        """And is not taken for a vulnerability either."""
        done = self.audit(tmp_path, "import sys\nsys.exit('no route to host')")
        assert (done.returncode, done.stdout) == (2, "")
        assert "could not be asked" in done.stderr
        assert "no route to host" in done.stderr
