"""Permissions, the audit log, and data that must stay hidden."""

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
from django.db import connection
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from dlocks import (
    LockBackendError,
    LockError,
    LockLost,
    LockStale,
    LockTimeout,
    db_lock,
    user_key,
)
from dlocks.testing import lose
from tests import rows
from tests.admin.test_admin import (
    CLEAR,
    FORCE,
    LIST,
    act,
    actions,
    boss,
    clearer,
    confirm,
    detail,
    fields,
    log,
    page,
    person,
    releaser,
    told,
    viewer,
)
from tests.admin.test_control_room import ended
from tests.for_each import for_each
from tests.internals import (
    LockClaim,
    ResourceLock,
    ResourceLockAdmin,
    audit,
    backends,
    shown_holder,
)
from tests.management.test_commands import answer, nobody_there, refused, run

pytestmark = pytest.mark.front

__all__ = ["answer", "boss", "clearer", "nobody_there", "releaser", "viewer"]

ROOT = Path(__file__).parent.parent.parent

# Characters that would end a line of a log, colour it, or reverse it.
HOSTILE = "x\r\nINFO forged\x1b[31m\x85\u2028\u202e'\""

database = pytest.mark.django_db(transaction=True)


@pytest.fixture
def audited(caplog):
    """Return a function that returns the audit records so far."""
    caplog.set_level(logging.INFO, logger="dlocks.audit")
    return lambda: [
        record for record in caplog.records if record.name == "dlocks.audit"
    ]


def facts(record) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(record).items()
        if name.startswith(("audit_", "lock_"))
    }


@database
class TestReason:
    def test_a_forced_release_is_in_both_logs_with_its_reason(self, releaser, audited):
        """The admin log and one audit line record the release.

        The line names the user, the action, the lock, its token, its holder and the
        reason.
        """
        rows.held("stock:7")
        form = {**fields(act(releaser, FORCE, "stock:7")), "reason": "  deploy hung  "}
        confirm(releaser, form)
        (entry,) = log()
        assert entry[:2] == ("releaser", "stock:7")
        assert entry[2].endswith("Reason: deploy hung")
        (record,) = audited()
        assert record.levelno == logging.INFO
        assert (
            record.getMessage()
            == "force_release lock 'stock:7', token 1000, of 'web-1:4711:MainThread'"
            " (192.0.2.7), by 'releaser' via admin: 'deploy hung'"
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

    def test_a_missing_reason_shows_the_page_again(self, releaser, audited):
        """The page keeps its targets and input, with the error next to the field.

        A second confirmation does not release a lock that has changed hands.
        """
        rows.held("a")
        rows.free("b")
        rows.shares("b", 1001)
        rows.held("c")
        rows.held("d")
        dead = rows.dead("c")
        form = fields(act(releaser, FORCE, "a", "b", "d"))
        ResourceLock.objects.filter(pk="d").update(version=1001)
        form["_selected_action"].append("c")
        form["version"].append(f"claim:{dead.pk}")
        del form["reason"]
        for reason, error in (
            (None, "Enter a reason"),
            ("", "Enter a reason"),
            (" \t\u00a0\u3000", "Enter a reason"),
            ("\u200b\u2060", "Enter a reason"),
            ("x" * 201, "at most 200"),
            ("a\nb", "one line"),
            ("a\u2028b", "one line"),
            ("a\x00b", "one line"),
        ):
            sent = form if reason is None else {**form, "reason": reason}
            text = page(releaser.post(LIST, sent))
            assert re.search(
                rf'<ul class="errorlist" id="id_reason_error"><li>[^<]*{error}', text
            ), reason
            assert 'aria-describedby="id_reason_error id_reason_help"' in text
            assert "changed in the meantime" in text
            again = fields(text)
            assert again["_selected_action"] == ["a", "b", "d", "c"]
            assert again["version"] == [
                "1000", "share:1001", "1000", f"claim:{dead.pk}",
            ]  # fmt: skip
        text = page(releaser.post(LIST, {**form, "reason": '"><script>' + "x" * 200}))
        assert "<script>x" not in text
        assert "&quot;&gt;&lt;script&gt;x" in text
        assert (rows.now("a").version, LockClaim.objects.count()) == (1000, 2)
        assert (log(), audited()) == ([], [])
        told_of = told(page(releaser.post(LIST, again, follow=True)))
        assert "The release of 2 locks was forced: a, b" in told_of
        assert "1 dead claim was removed from the queue: c" in told_of
        assert "acquired by another holder in the meantime" in told_of
        assert rows.now("d").version == 1001
        assert [facts(record)["audit_action"] for record in audited()] == [
            "force_release", "force_release", "take_out",
        ]  # fmt: skip

    def test_a_forged_target_is_shown_as_changed(self, releaser):
        rows.held("a")
        for version in ("9" * 40, "-1", "share:" + "9" * 40, "claim:0"):
            keys = ["a", "gone", "\0"]
            form = {"_selected_action": keys, "version": [version] * 3}
            text = page(releaser.post(LIST, {"action": FORCE, **form}))
            assert text.count("changed in the meantime") == 3, version

    def test_clearing_a_stale_lock_needs_no_reason(
        self, releaser, clearer, audited, monkeypatch
    ):
        """Neither the admin nor the command requires a reason.

        A refused clearing is not audited. If each request is a transaction, only
        committed actions are audited.
        """
        rows.held("a")
        act(releaser, FORCE, "a", version="999")
        act(clearer, CLEAR, "a")
        for key in ("b", "c", "d"):
            rows.stale(key)

        def fail(*args, **kwargs):
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
            patch.setattr(ResourceLockAdmin, "message_user", fail)
            with pytest.raises(ZeroDivisionError):
                act(clearer, CLEAR, "b")
        assert (rows.now("b").version, log(), audited()) == (1000, [], [])
        monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
        act(clearer, CLEAR, "b")
        assert log()[0][2].endswith("Reason: stale")
        run("clear_lock", "c", "--yes")
        run("clear_lock", "d", "--yes", "--reason", "seen to by hand")
        known = [facts(record) for record in audited()]
        assert known[0]["audit_action"] == "clear"
        reasons = [fact["audit_reason"] for fact in known]
        assert reasons == ["stale", "stale", "seen to by hand"]

    def test_the_command_requires_a_reason_for_live_holds(self, audited, answer):
        """It refuses before it asks for a confirmation or changes anything.

        A stale lock that is renewed meanwhile needs a reason too.
        """
        rows.held("a")
        rows.free("b")
        rows.shares("b", 1001)
        assert "--reason TEXT" in refused("clear_lock", "a", "--yes")
        assert "--reason TEXT" in refused("clear_lock", "b", "--all-shares", "--yes")
        for reason in ("", " ", "a\nb", "x" * 201):
            assert "eason" in refused("clear_lock", "a", "--yes", "--reason", reason)
        # The holder renews the stale lock while the command asks.
        rows.stale("c")
        renewed = {"end_time": rows.FUTURE}
        answer(
            "y", before=lambda: ResourceLock.objects.filter(pk="c").update(**renewed)
        )
        assert "not stale" in refused("clear_lock", "c")
        assert (rows.now("a").version, rows.now("c").version) == (1000, 1000)
        assert (LockClaim.objects.count(), audited()) == (1, [])
        run("clear_lock", "a", "--yes", "--reason", "deploy hung")
        run("clear_lock", "b", "--all-shares", "--yes", "--reason", "its host is gone")
        lock, share = map(facts, audited())
        assert (lock["audit_action"], lock["audit_kind"]) == ("force_release", "lock")
        assert (lock["lock_token"], lock["audit_reason"]) == (1000, "deploy hung")
        assert (share["audit_kind"], share["lock_token"]) == ("share", 1001)
        assert share["audit_reason"] == "its host is gone"
        assert lock["audit_by"] == audit.operator()
        assert lock["audit_via"] == "clear_lock"

    def test_the_reaper_audits_only_a_run_with_changes(self, audited, monkeypatch):
        """It audits its changes even if it fails afterwards."""
        rows.stale("a")
        rows.stale("b")
        rows.free("old")
        run("reap_locks", "--idle-for", "1d", "--dry-run")
        assert audited() == []
        run("reap_locks", "--idle-for", "1d")
        run("reap_locks", "--idle-for", "1d")
        (record,) = audited()
        known = facts(record)
        assert known["audit_action"] == "reap"
        names = ("audit_freed", "audit_deleted", "audit_forgotten")
        assert [known[name] for name in names] == [2, 1, 0]
        assert record.getMessage().startswith(
            "reap of 'default': 2 cleared, 1 unused rows deleted, 0 records deleted"
        )
        rows.stale("c")

        def fail(*arguments, **options):
            raise LockBackendError("permission denied for table dlocks_holdrecord")
            yield

        monkeypatch.setattr(backends["default"], "delete_older_than", fail)
        assert "permission denied" in refused("reap_locks")
        _, record = audited()
        assert facts(record)["audit_freed"] == 1

    def test_hostile_values_cannot_forge_an_audit_line(self, audited):
        """Any key, holder or user name leaves the audit on one line.

        The owner is not in the line.
        """
        rows.held(HOSTILE, holder=HOSTILE, owner=rows.OWNER)
        user = User.objects.create_superuser(HOSTILE, password="x")
        client = Client()
        client.force_login(user)
        form = {
            **fields(act(client, FORCE, HOSTILE)),
            "reason": "why\u202e' via admin: 'x",
        }
        assert "The release of 1 lock was forced" in confirm(client, form)
        (record,) = audited()
        line = record.getMessage()
        assert line.isprintable()
        assert len(line.splitlines()) == 1
        assert "\\r\\nINFO forged\\x1b" in line
        assert rows.OWNER[:8] not in line + str(facts(record))
        assert log()[0][2].isprintable()


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


def form_of(action):
    """Return the forged form of an action on the key that it applies to."""
    target = {CLEAR: "stale", FORCE: "held", PURGE: "unused"}[action]
    return {
        "action": action,
        "_selected_action": [target],
        "version": ["1000"],
        "reason": "why",
    }


def client_with_role(role):
    return Client() if ROLES[role] is None else person(role, *ROLES[role])


@pytest.mark.django_db
class TestRoles:
    @pytest.fixture(autouse=True)
    def table(self):
        rows.held("held")
        rows.stale("stale")
        rows.free("unused")

    def untouched(self):
        return {
            lock.pk: lock.version for lock in ResourceLock.objects.all()
        } == dict.fromkeys(("held", "stale", "unused"), 1000)

    def test_each_role_sees_only_permitted_pages(self):
        """The view permission is required to see locks.

        An action is offered only to users with its permission. A forged form changes
        nothing for others.
        """
        other = [LIST + "add/", LIVE, detail("held").replace("/change/", "/delete/")]
        for role, permissions in ROLES.items():
            client = client_with_role(role)
            sees = "view_resourcelock" in (permissions or ())
            pages = {
                address: client.get(address)
                for address in (
                    LIST,
                    detail("held"),
                    LIVE,
                    LIVE + "?part=now",
                    LIVE + "?part=past",
                )
            }
            if permissions is None:
                for found in pages.values():
                    assert found.status_code == 302
                    assert "/login/" in found.url
            else:
                expected = {200 if sees else 403}
                assert {one.status_code for one in pages.values()} == expected, role
            if sees:
                assert actions(page(pages[LIST])) == MAY.get(role, set())
                text = page(pages[detail("held")]) + page(pages[LIVE])
                assert ("Force release" in text) is (role == "releaser")
                text = page(client.get(detail("stale")))
                assert ("Clear stale locks" in text) is (role == "clearer")
            for action in {CLEAR, FORCE, PURGE} - MAY.get(role, set()):
                response = client.post(LIST, form_of(action))
                if permissions is not None and not sees:
                    assert response.status_code == 403
                client.post(LIST, {**form_of(action), "version": []})
                client.post(detail("held"), form_of(action))
            for address in other:
                client.post(address, form_of(action))
            assert self.untouched(), role
            assert log() == []

    def test_a_change_needs_a_post_with_a_csrf_token(self):
        """Every request that changes something needs the site's CSRF token.

        A GET request changes nothing, even with all form fields in the address.
        """
        for logged, (role, (action,)) in enumerate(MAY.items(), 1):
            client = client_with_role(role)
            form = form_of(action)
            client.head(LIST, form)
            for address in (LIST, detail(form["_selected_action"][0]), LIVE):
                client.get(address, form)
            strict = Client(
                enforce_csrf_checks=True, headers={"referer": "http://testserver/"}
            )
            strict.cookies = client.cookies
            for wrong in ({}, {"csrfmiddlewaretoken": "x" * 64}):
                assert strict.post(LIST, {**form, **wrong}).status_code == 403
            assert len(log()) == logged - 1
            token = fields(page(strict.get(LIST)))["csrfmiddlewaretoken"][0]
            right = {**form, "csrfmiddlewaretoken": token}
            assert strict.post(LIST, right).status_code == 302
            assert len(log()) == logged
        assert not self.untouched()


@database
class TestPurge:
    @pytest.fixture
    def purger(self, transactional_db):
        return person("purger", "view_resourcelock", "purge_resourcelock")

    @pytest.mark.storage
    def test_unused_rows_are_deleted_after_a_confirmation(self, purger, audited):
        """Only rows that have been free for a day are deleted.

        The deletion is in both logs. Any change since the page was shown counts, also
        with a forged form. The next token of the key is larger.
        """
        changes = {
            "version": {"version": 1001},
            "taken": {"status": "P"},
            "just used": {"end_time": timezone.now()},
            "waited for": {},
            "shared": {},
            "a claim uncounted": {},
        }
        for key in changes:
            rows.free(key)
        rows.free("old", version=10**15)
        rows.write("recent", rows.S, timezone.now())
        rows.held("held")
        rows.stale("stale")
        chosen = [*changes, "old"]
        text = act(purger, PURGE, *chosen, "recent", "held", "stale", "gone")
        assert "4 selected locks are in use" in text
        form = fields(text)
        assert form["_selected_action"] == chosen
        assert form["version"] == [*["1000"] * len(changes), str(10**15)]
        rows.dead("waited for")
        rows.shares("shared", 1001)
        rows.dead("a claim uncounted")
        changes["a claim uncounted"] = {"waiters": 0}
        for change, written in changes.items():
            if written:
                ResourceLock.objects.filter(pk=change).update(**written)
        text = confirm(purger, form)
        assert "1 row was deleted: old" in text
        assert "were left unchanged (" in text
        left = set(ResourceLock.objects.values_list("pk", flat=True))
        assert left == {*changes, "recent", "held", "stale"}
        assert log() == [("purger", "old", "Deleted the row of the unused key.")]
        (record,) = map(facts, audited())
        assert (record["audit_action"], record["audit_reason"]) == ("purge", "unused")
        text = confirm(purger, form)
        assert "the row no longer exists" in text
        # A key whose row was deleted is still the same key.
        with db_lock("old") as hold:
            assert hold.token > 10**15

    def test_a_forged_version_deletes_nothing(self, purger):
        """A version in the future is not deleted even if it is right."""
        rows.free("a")
        for version in ("x", "", "share:1000", "claim:1", "9" * 40, "-1"):
            act(purger, PURGE, "a", "\0", "gone", version=[version] * 3)
            assert ResourceLock.objects.exists(), version
        rows.free("b", version=2**62)
        act(purger, PURGE, "b", version=str(2**62))
        rows.held("c")
        assert "None of the selected keys has been unused" in told(
            act(purger, PURGE, "c", "\0")
        )
        assert ResourceLock.objects.count() == 3


# Values that are unlike anything else on a page.
HOST, ADDRESS = "qx7host", "203.0.113.77"
HOLDER = f"{HOST}:48151:Qx7Thread"


@pytest.fixture
def hides(settings):
    settings.DLOCKS_SHOW_HOLDER = False
    settings.DLOCKS = {**settings.DLOCKS, "default": settings.DLOCKS["recorded"]}


def topology(text) -> list[str]:
    return [part for part in (HOST, "48151", "Qx7Thread", ADDRESS) if part in text]


def every_page(client) -> dict[str, str]:
    """Return all admin pages about locks, and the result of each action."""
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
    pages = {
        address: page(client.get(address))
        for address in (LIST, LIVE, LIVE + "?part=now", LIVE + "?part=past")
    }
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
        pages[f"history of {key}"] = page(
            client.get(reverse("admin:dlocks_resourcelock_history", args=[quote(key)]))
        )
    pages["index"] = page(client.get("/admin/"))
    return pages


@pytest.mark.django_db
class TestHolders:
    @pytest.mark.usefixtures("hides")
    def test_hidden_holders_are_on_no_page_and_in_no_log(self, boss, settings):
        """Host, process, thread and IP are on no page and in no message.

        The admin's log does not contain them either. An invalid setting hides them.
        """
        settings.DLOCKS_SHOW_HOLDER = "hash"
        pages = every_page(boss)
        settings.DLOCKS_SHOW_HOLDER = "True"
        pages["invalid"] = page(boss.get(LIST))
        assert {
            name: found for name, text in pages.items() if (found := topology(text))
        } == {}
        assert topology(str(log())) == []
        assert len(log()) == 6
        assert "holder " in pages["confirm"]
        assert "a hidden holder" in pages["invalid"]

    def test_holders_are_shown_by_default(self, boss, settings):
        """This proves that the previous test checks the right places."""
        settings.DLOCKS = {**settings.DLOCKS, "default": settings.DLOCKS["recorded"]}
        pages = every_page(boss)
        unshown = {"index", "purge", "clear", "released", "taken out"}
        without = {name for name, text in pages.items() if not topology(text)}
        known = {"shared", "room of stale", "room of free", "room of shared"}
        known |= {name for name in pages if name.startswith("history of shared")}
        assert without - unshown <= known
        assert len(topology(str(log()))) == 4

    @pytest.mark.usefixtures("hides")
    def test_hidden_holders_cannot_be_searched_or_sorted(self, boss):
        """Neither a search nor the order of the rows reveals a hidden holder."""
        rows.held("a", holder="z" + HOLDER, owner_ip=ADDRESS)
        rows.held("b", holder="a" + HOLDER, owner_ip=ADDRESS)
        for words in (HOST, ADDRESS, "Qx7"):
            assert "0 results" in page(boss.get(LIST, {"q": words}))
        for order in ("3", "-3"):
            text = page(boss.get(LIST, {"o": order}))
            assert text.index(">a</bdi>") < text.index(">b</bdi>")

    def test_the_checks_report_an_invalid_show_holder_setting(self, settings):
        """They find no problem in the admin.

        The same holder has the same hash. Another secret gives another hash.
        """
        assert not [one for one in run_checks() if one.id.startswith("admin.")]
        for shown in (True, False, "hash", None, "True", 1, [], "name"):
            settings.DLOCKS_SHOW_HOLDER = shown
            found = [one.msg for one in run_checks() if one.id == "dlocks.E008"]
            valid = shown is True or shown is False or shown == "hash"
            assert len(found) == (not valid), shown
            assert all(repr(shown) in message for message in found)
        settings.DLOCKS_SHOW_HOLDER = "hash"
        one = shown_holder(HOLDER)
        assert one == shown_holder(HOLDER) != shown_holder(HOLDER + "2")
        settings.SECRET_KEY = "another"
        assert shown_holder(HOLDER) != one

    @pytest.mark.usefixtures("hides")
    def test_commands_and_the_audit_show_hidden_holders(
        self, audited, django_capture_on_commit_callbacks
    ):
        """Commands and the audit log are for operators of the site."""
        rows.held("a", holder=HOLDER, owner_ip=ADDRESS)
        assert len(topology(run("list_locks"))) == 3
        assert len(topology(run("list_locks", "--json"))) == 4
        with django_capture_on_commit_callbacks(execute=True):
            assert (
                len(topology(run("clear_lock", "a", "--yes", "--reason", "why"))) == 4
            )
        assert len(topology(audited()[0].getMessage())) == 4


@database
@for_each("shown", [True, False, "hash"])
def test_error_messages_hide_holders(settings, in_other_thread, shown):
    """The text of an error has no more than the setting allows.

    Its attributes have all values.
    """
    settings.DLOCKS_SHOW_HOLDER = shown
    with db_lock("a") as mine:
        with pytest.raises(LockTimeout) as busy:
            in_other_thread(db_lock("a", timeout=0).acquire)
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
    def test_a_user_key_is_readable(self):
        """An id is a number in the row and a string in the address.

        Both have the same key.
        """
        assert user_key("export", 7, "monthly report") == "export:7:monthly%20report"
        uuid = "00000000-0000-0000-0000-000000000007"
        assert user_key("export", UUID(int=7)) == f"export:{uuid}"
        assert user_key("n", 7) == user_key("n", "7")

    def test_user_input_cannot_leave_the_namespace(self):
        """Every key begins with the namespace and a colon.

        User input adds no other colon, and cannot be the short form of a long key.
        """
        assert user_key("export", "x:../../admin:7\r\n\0").startswith(
            "export:x%3A..%2F..%2Fadmin%3A7%0D%0A%00"
        )
        long = user_key("n", "x" * 1000)
        assert user_key("n", long.partition(":")[2]) != long
        assert len(long) == 200

    def test_an_invalid_namespace_or_part_is_refused(self):
        """The pk of an anonymous user is not a part either."""
        for namespace in ("", "a b", "a:b", "7a", "é", "x" * 101, "a\n", "{pk}"):
            with pytest.raises(ValueError, match="identifier"):
                user_key(namespace, 7)
        for part in (None, True, 1.5, b"a", ["a"], AnonymousUser()):
            with pytest.raises(TypeError, match="part 2 of a key"):
                user_key("n", 1, part)
        with pytest.raises(TypeError, match="at least one part"):
            user_key("n")
        with pytest.raises(TypeError, match="namespace"):
            user_key(7, 7)
        for part in ("x" * 1025, "é" * 513, "\ud800", 10**1025, 10**5000):
            with pytest.raises(ValueError):
                user_key("n", part)
        assert user_key("n", "é" * 512)


@pytest.mark.engine("sqlite")
class TestAudit:
    """The output of ``make audit`` for each result of pip-audit."""

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
        text = json.dumps({"dependencies": dependencies, "fixes": []})
        return f"import sys\nprint({json.dumps(text)})\n"

    def test_the_audit_fails_unless_all_packages_are_safe(self, tmp_path):
        """Unknown packages and an unreachable database are no vulnerabilities.

        An index without advisories makes all packages unknown.
        """
        name, hole = "django", {"id": "CVE-0000-1", "fix_versions": ["5.2.1"]}
        known, safe = {"name": name, "version": "5.2"}, "0 known vulnerabilities.\n"
        skipped = f"Dependency not found on PyPI and could not be audited: {name}"
        editable = {"name": "dlocks", "skip_reason": "distribution marked as editable"}
        found = self.report({**known, "vulns": [hole]}, editable) + "sys.exit(1)"
        unknown = self.report({"name": name, "skip_reason": skipped})
        hole = "django 5.2: CVE-0000-1, fixed in 5.2.1\n1 packages, "
        hole += "1 known vulnerabilities.\n"
        unreachable = "import sys\nsys.exit('no route to host')"
        for program, status, output, errors in (
            (self.report({**known, "vulns": []}), 0, f"1 packages, {safe}", []),
            (found, 1, hole, []),
            (unknown, 2, f"0 packages, {safe}", ["has no data about: django"]),
            (unreachable, 2, "", ["could not be queried", "no route to host"]),
        ):
            done = self.audit(tmp_path, program)
            assert (done.returncode, done.stdout) == (status, output)
            for error in errors:
                assert error in done.stderr
