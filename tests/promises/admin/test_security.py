"""Permissions, reasons, and the audit log."""

import logging
import re

import pytest
from django.contrib.admin import ModelAdmin
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client

from dlocks.models import LockClaim, ResourceLock
from tests import rows
from tests.promises.admin.names import CLEAR, END, FORCE, LIST
from tests.promises.admin.pages import (
    act,
    actions,
    confirm,
    detail,
    fields,
    log,
    page,
    person,
)

pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]

# Characters that would end a line of a log, colour it, or reverse it.
HOSTILE = "x\r\nINFO forged\x1b[31m\x85\u2028\u202e'\""


def facts(record) -> dict[str, object]:
    names = [name for name in vars(record) if name.startswith(("audit_", "lock_"))]
    return {name: getattr(record, name) for name in names}


def test_a_forced_release_is_in_both_logs_with_its_reason(releaser, audited):
    """The audit names the user, the action, the lock, its token and its holder."""
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
    for key in "ad":
        rows.held(key)
    rows.free("b")
    rows.shares("b", 1001)
    form = fields(act(releaser, FORCE, "a", "b", "d"))
    ResourceLock.objects.filter(pk="d").update(version=1001)
    del form["reason"]
    targets = ["lock 1000 a", "share 1001 b", "lock 1000 d"]
    for reason, error in (
        ("", "Enter a reason"),
        (" \t\u00a0\u3000", "Enter a reason"),
        ("\u200b\u2060", "Enter a reason"),
        ("x" * 201, "at most 200"),
        ("a\nb", "one line"),
        ("a\u2028b", "one line"),
        ("a\x00b", "one line"),
    ):
        text = page(releaser.post(END, {**form, "reason": reason}))
        shown = rf'<ul class="errorlist" id="id_reason_error"><li>[^<]*{error}'
        assert re.search(shown, text), reason
        assert 'aria-describedby="id_reason_error id_reason_help"' in text
        assert "changed in the meantime" in text
        again = fields(text)
        assert again["force_release"] == targets
    text = page(releaser.post(END, {**form, "reason": '"><script>' + "x" * 200}))
    assert "<script>x" not in text
    assert "&quot;&gt;&lt;script&gt;x" in text
    assert (rows.now("a").version, LockClaim.objects.count()) == (1000, 1)
    assert (log(), audited()) == ([], [])
    text = confirm(releaser, again)
    assert "The release of 2 locks was forced: a, b" in text
    assert "acquired by another holder in the meantime" in text
    assert rows.now("d").version == 1001
    done = [record.audit_action for record in audited()]
    assert done == ["force_release", "force_release"]


def test_clearing_a_stale_lock_needs_no_reason(clearer, releaser, audited, monkeypatch):
    """A refused clearing is not audited.

    If each request is a transaction, only committed actions are audited.
    """
    rows.held("a")
    confirm(releaser, {"force_release": "lock 999 a", "reason": "tests"})
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
    "blind": ("clear_resourcelock", "force_release_resourcelock"),
    "viewer": ("view_resourcelock",),
    "clearer": ("view_resourcelock", "clear_resourcelock"),
    "releaser": ("view_resourcelock", "force_release_resourcelock"),
}
MAY = {"clearer": {CLEAR}, "releaser": {FORCE}}
TARGETS = {CLEAR: "stale", FORCE: "held"}


def forms_of(action):
    """Return the forged forms of an action on the key that it applies to."""
    selected = {"action": action, "_selected_action": [TARGETS[action]]}
    name = "clear" if action == CLEAR else "force_release"
    target = {name: f"lock 1000 {TARGETS[action]}", "reason": "why"}
    return selected, target


def client_with_role(role):
    return Client() if ROLES[role] is None else person(role, *ROLES[role])


@pytest.fixture
def is_untouched():
    rows.held("held")
    rows.stale("stale")
    before = {"held": 1000, "stale": 1000}
    return lambda: dict(ResourceLock.objects.values_list("pk", "version")) == before


@pytest.mark.parametrize("role", ROLES)
def test_each_role_sees_only_permitted_pages(role, is_untouched):
    """The view permission is required to see locks.

    An action is offered only to users with its permission. A forged form changes
    nothing for others.
    """
    client, permissions = client_with_role(role), ROLES[role]
    sees = "view_resourcelock" in (permissions or ())
    places = [LIST, detail("held"), f"{LIST}?part=now", f"{LIST}?part=past"]
    pages = {address: client.get(address) for address in places}
    if permissions is None:
        assert {found.status_code for found in pages.values()} == {302}
        assert all("/login/" in found.url for found in pages.values())
    else:
        assert {found.status_code for found in pages.values()} == {200 if sees else 403}
    if sees:
        assert actions(page(pages[LIST])) == MAY.get(role, set())
        for text in (page(pages[LIST]), page(pages[detail("held")])):
            assert ("Force release</button>" in text) is (role == "releaser")
        for address in (LIST, detail("stale")):
            text = page(client.get(address))
            assert ("Clear</button>" in text) is (role == "clearer")
    for action in TARGETS.keys() - MAY.get(role, set()):
        selected, target = forms_of(action)
        response = client.post(LIST, selected)
        assert permissions is None or sees or response.status_code == 403
        assert client.post(END, target).status_code in (302, 403)
        for address in (f"{LIST}add/", detail("held"), detail("held", "delete")):
            client.post(address, {**selected, **target})
    assert client.get(END).status_code in (302, 403)
    assert is_untouched()
    assert log() == []


@pytest.mark.parametrize("role", MAY)
def test_a_change_needs_a_post_with_a_csrf_token(role, is_untouched):
    """A GET request changes nothing, even with all form fields in the address."""
    client, (action,) = client_with_role(role), MAY[role]
    selected, target = forms_of(action)
    for address in (LIST, END, detail(TARGETS[action])):
        client.get(address, {**selected, **target})
        client.head(address, {**selected, **target})
    headers = {"referer": "http://testserver/"}
    strict = Client(enforce_csrf_checks=True, headers=headers)
    strict.cookies = client.cookies
    for wrong in ({}, {"csrfmiddlewaretoken": "x" * 64}):
        assert strict.post(LIST, {**selected, **wrong}).status_code == 403
        assert strict.post(END, {**target, **wrong}).status_code == 403
    assert is_untouched()
    token = fields(page(strict.get(LIST)))["csrfmiddlewaretoken"][0]
    right = {**target, "csrfmiddlewaretoken": token}
    assert strict.post(END, right).status_code == 302
    assert len(log()) == 1
    assert not is_untouched()


def test_a_change_returns_to_the_page_of_its_button(releaser):
    """It never leads to another site. Without an address it leads to the list."""
    for back, target in (
        (f"{LIST}?state=held&p=2", f"{LIST}?state=held&p=2"),
        (detail("a"), detail("a")),
        ("", LIST),
        ("https://evil.example/", LIST),
        ("//evil.example" + LIST, LIST),
    ):
        form = {"force_release": "lock 1000 a", "back": back}
        text = page(releaser.post(END, form))
        assert f'href="{target}"' in text.replace("&amp;", "&")
        response = releaser.post(END, {**form, "reason": "tests"})
        assert (response.status_code, response.url) == (302, target)
