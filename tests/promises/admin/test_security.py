"""Permissions, reasons, and the audit log."""

from __future__ import annotations

import logging
import re

import pytest
from django.contrib.admin import ModelAdmin
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client

from dlocks.models import LockClaim, ResourceLock
from tests import rows
from tests.promises.admin.names import CLEAR, FORCE, LIST, LIVE, PURGE
from tests.promises.admin.pages import (
    act,
    actions,
    confirm,
    detail,
    fields,
    log,
    page,
    person,
    told,
)

pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]

# Characters that would end a line of a log, colour it, or reverse it.
HOSTILE = "x\r\nINFO forged\x1b[31m\x85\u2028\u202e'\""


def facts(record) -> dict[str, object]:
    names = [name for name in vars(record) if name.startswith(("audit_", "lock_"))]
    return {name: getattr(record, name) for name in names}


def test_a_forced_release_is_in_both_logs_with_its_reason(releaser, audited):
    """The admin log and one audit line record the release.

    The line names the user, the action, the lock, its token, its holder and the reason.
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


def test_a_missing_reason_shows_the_page_again(releaser, audited):
    """The page keeps its targets and input, with the error next to the field.

    A second confirmation does not release a lock that has changed hands.
    """
    for key in "acd":
        rows.held(key)
    rows.free("b")
    rows.shares("b", 1001)
    dead = rows.dead("c")
    form = fields(act(releaser, FORCE, "a", "b", "d"))
    ResourceLock.objects.filter(pk="d").update(version=1001)
    form["_selected_action"].append("c")
    form["version"].append(f"claim:{dead.pk}")
    del form["reason"]
    versions = ["1000", "share:1001", "1000", f"claim:{dead.pk}"]
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
        shown = rf'<ul class="errorlist" id="id_reason_error"><li>[^<]*{error}'
        assert re.search(shown, text), reason
        assert 'aria-describedby="id_reason_error id_reason_help"' in text
        assert "changed in the meantime" in text
        again = fields(text)
        assert again["_selected_action"] == ["a", "b", "d", "c"]
        assert again["version"] == versions
    text = page(releaser.post(LIST, {**form, "reason": '"><script>' + "x" * 200}))
    assert "<script>x" not in text
    assert "&quot;&gt;&lt;script&gt;x" in text
    assert (rows.now("a").version, LockClaim.objects.count()) == (1000, 2)
    assert (log(), audited()) == ([], [])
    text = told(page(releaser.post(LIST, again, follow=True)))
    assert "The release of 2 locks was forced: a, b" in text
    assert "1 dead claim was removed from the queue: c" in text
    assert "acquired by another holder in the meantime" in text
    assert rows.now("d").version == 1001
    done = [record.audit_action for record in audited()]
    assert done == ["force_release", "force_release", "take_out"]


def test_clearing_a_stale_lock_needs_no_reason(clearer, releaser, audited, monkeypatch):
    """A refused clearing is not audited.

    If each request is a transaction, only committed actions are audited.
    """
    rows.held("a")
    act(releaser, FORCE, "a", version="999")
    act(clearer, CLEAR, "a")
    rows.stale("b")
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    with monkeypatch.context() as patch:
        # The view fails after the lock was cleared.
        patch.setattr(ModelAdmin, "message_user", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            act(clearer, CLEAR, "b")
    assert (rows.now("b").version, log(), audited()) == (1000, [], [])
    act(clearer, CLEAR, "b")
    assert log()[0][2].endswith("Reason: stale")
    (record,) = audited()
    assert (record.audit_action, record.audit_reason) == ("clear", "stale")


def test_hostile_values_cannot_forge_an_audit_line(audited):
    """Any key, holder or user name leaves the audit on one line.

    The owner is not in the line.
    """
    rows.held(HOSTILE, holder=HOSTILE, owner=rows.OWNER)
    client = Client()
    client.force_login(User.objects.create_superuser(HOSTILE, password="x"))
    asked = fields(act(client, FORCE, HOSTILE))
    form = {**asked, "reason": "why\u202e' via admin: 'x"}
    assert "The release of 1 lock was forced" in confirm(client, form)
    (record,) = audited()
    line = record.getMessage()
    assert line.isprintable()
    assert len(line.splitlines()) == 1
    assert "\\r\\nINFO forged\\x1b" in line
    assert rows.OWNER[:8] not in line + str(facts(record))
    assert log()[0][2].isprintable()


# Roles.

ROLES = {
    "anonymous": None,
    "staff": (),
    "blind": ("clear_resourcelock", "force_release_resourcelock", "purge_resourcelock"),
    "viewer": ("view_resourcelock",),
    "clearer": ("view_resourcelock", "clear_resourcelock"),
    "releaser": ("view_resourcelock", "force_release_resourcelock"),
    "purger": ("view_resourcelock", "purge_resourcelock"),
}
MAY = {"clearer": {CLEAR}, "releaser": {FORCE}, "purger": {PURGE}}


def form_of(action):
    """Return the forged form of an action on the key that it applies to."""
    target = {CLEAR: "stale", FORCE: "held", PURGE: "unused"}[action]
    form = {"action": action, "_selected_action": [target]}
    return {**form, "version": ["1000"], "reason": "why"}


def client_with_role(role):
    return Client() if ROLES[role] is None else person(role, *ROLES[role])


@pytest.fixture
def is_untouched():
    rows.held("held")
    rows.stale("stale")
    rows.free("unused")
    before = {"held": 1000, "stale": 1000, "unused": 1000}
    return lambda: dict(ResourceLock.objects.values_list("pk", "version")) == before


@pytest.mark.parametrize("role", ROLES)
def test_each_role_sees_only_permitted_pages(role, is_untouched):
    """The view permission is required to see locks.

    An action is offered only to users with its permission. A forged form changes
    nothing for others.
    """
    client, permissions = client_with_role(role), ROLES[role]
    sees = "view_resourcelock" in (permissions or ())
    places = [LIST, detail("held"), LIVE, f"{LIVE}?part=now", f"{LIVE}?part=past"]
    pages = {address: client.get(address) for address in places}
    if permissions is None:
        assert {found.status_code for found in pages.values()} == {302}
        assert all("/login/" in found.url for found in pages.values())
    else:
        assert {found.status_code for found in pages.values()} == {200 if sees else 403}
    if sees:
        assert actions(page(pages[LIST])) == MAY.get(role, set())
        text = page(pages[detail("held")]) + page(pages[LIVE])
        assert ("Force release" in text) is (role == "releaser")
        text = page(client.get(detail("stale")))
        assert ("Clear stale locks" in text) is (role == "clearer")
    for action in {CLEAR, FORCE, PURGE} - MAY.get(role, set()):
        response = client.post(LIST, form_of(action))
        assert permissions is None or sees or response.status_code == 403
        client.post(LIST, {**form_of(action), "version": []})
        client.post(detail("held"), form_of(action))
    for address in (f"{LIST}add/", LIVE, detail("held", "delete")):
        for action in (CLEAR, FORCE, PURGE):
            client.post(address, form_of(action))
    assert is_untouched()
    assert log() == []


@pytest.mark.parametrize("role", MAY)
def test_a_change_needs_a_post_with_a_csrf_token(role, is_untouched):
    """Every request that changes something needs the site's CSRF token.

    A GET request changes nothing, even with all form fields in the address.
    """
    client, (action,) = client_with_role(role), MAY[role]
    form = form_of(action)
    client.head(LIST, form)
    for address in (LIST, detail(form["_selected_action"][0]), LIVE):
        client.get(address, form)
    headers = {"referer": "http://testserver/"}
    strict = Client(enforce_csrf_checks=True, headers=headers)
    strict.cookies = client.cookies
    for wrong in ({}, {"csrfmiddlewaretoken": "x" * 64}):
        assert strict.post(LIST, {**form, **wrong}).status_code == 403
    assert is_untouched()
    token = fields(page(strict.get(LIST)))["csrfmiddlewaretoken"][0]
    right = {**form, "csrfmiddlewaretoken": token}
    assert strict.post(LIST, right).status_code == 302
    assert len(log()) == 1
    assert not is_untouched()
