"""The list of locks in the admin, and the page of each lock."""

from __future__ import annotations

import html
import re
from copy import copy
from datetime import UTC, datetime, timedelta

import pytest
from django.contrib.admin import site
from django.db import connections, transaction
from django.test import RequestFactory

from dlocks import db_lock
from dlocks.models import LockClaim, ResourceLock
from tests import rows
from tests.promises.admin.names import CLEAR, FORCE, LIST, LIVE, ODD_KEYS, PURGE
from tests.promises.admin.pages import (
    act,
    actions,
    confirm,
    detail,
    fields,
    log,
    page,
    told,
)

pytestmark = [pytest.mark.front, pytest.mark.django_db]


def buttons(text: str) -> list[tuple[str, str]]:
    """Return the classes and the words of the buttons on a page."""
    button = r'<(?:button|a)\b[^>]* class="(button[^"]*)"[^>]*>([^<]*)</(?:button|a)>'
    return re.findall(button, text)


def test_rows_cannot_be_added_changed_or_deleted(boss):
    """Not even a superuser can edit rows: every field is read-only."""
    rows.held("a")
    for address, data in (
        (f"{LIST}add/", {"key_resource": "b"}),
        (detail("a", "delete"), {"post": "yes"}),
        (detail("a"), {"holder": "me"}),
    ):
        assert boss.post(address, data).status_code == 403
        assert address == detail("a") or boss.get(address).status_code == 403
    assert actions(page(boss.get(LIST))) == {CLEAR, FORCE, PURGE}
    text = page(boss.get(detail("a")))
    assert 'name="_save"' not in text
    assert 'name="holder"' not in text
    assert ResourceLock.objects.get().holder == "web-1:4711:MainThread"


@pytest.mark.storage
def test_the_list_shows_holders_and_times(viewer):
    """The list shows who holds which key, since when and for how long.

    Its columns are key, state, holder, hold count, IP, age and time left. The title of
    an age is the time. The page of a lock adds its token. The list can be filtered by
    state, and searched by key, holder and IP.
    """
    key = "stock:7 🔒 50%"
    who = {"holder": "web-9:1:t", "owner_ip": "198.51.100.4"}
    rows.held(key, begin_time=rows.PAST, hold_count=3, version=1234567, **who)
    rows.stale("report", owner_ip="2001:db8::1")
    rows.free("old")
    text = page(viewer.get(LIST, {"state": "nonsense"}))
    for shown in (
        "stock:7", *who.values(), "web-1:4711:MainThread", "2020-01-01 22:04:05", "×3",
        "dlocks/admin.css",
    ):  # fmt: skip
        assert shown in text
    assert ">1234567<" in page(viewer.get(detail(key)))
    assert re.search(r'class="field-left">\d+ days<', text)
    assert re.search(r'class="field-left">expired \d+ days ago<', text)
    assert re.search(r'class="field-begin"><time [^>]*>\d+ days ago<', text)
    for state, shown in (("held", key), ("stale", "report"), ("free", "old")):
        # A lock of years is shown as long.
        word = f'<span class="dlocks-state dlocks-{state}">{state}</span>'
        assert (word in text) == (state != "held"), state
        filtered = page(viewer.get(LIST, {"state": state}))
        assert re.findall(r'<bdi class="dlocks-key">([^<]*)<', filtered) == [shown]
    words = "stock web-9 198.51.100 🔒 50%"
    assert "1 result" in page(viewer.get(LIST, {"q": words}))
    assert "0 results" in page(viewer.get(LIST, {"q": f"{words} report"}))


@pytest.mark.driver
def test_the_list_shows_waiters_and_shared_holds(viewer):
    """A shared key has a badge with a number, and the waiters are a column.

    The list has a filter for shared keys. The page of a lock shows shared holds and
    waiters in order with host, IP, start and mode, and never an owner. It stays short
    with any number of waiters.
    """
    rows.held("busy")
    rows.waits("busy")
    rows.free("catalogue", holder="writer:1:t")
    rows.shares("catalogue", 1001, holder="web-1:<b>:t", permits=3)
    rows.shares("catalogue", 1002)
    rows.stale_share("catalogue", 1003, holder="web-2:1:t")
    text = page(viewer.get(LIST, {"o": "-6"}))
    assert '<span class="dlocks-state dlocks-shared">shared (2)</span>' in text
    assert '<td class="field-waiting">1</td>' in text
    assert "writer:1:t" not in text
    for state, shown in (("shared", ["catalogue"]), ("free", [])):
        text = page(viewer.get(LIST, {"state": state}))
        assert re.findall(r">(busy|catalogue)</bdi>", text) == shown
    rows.waits("catalogue", holder="web-3:1:t")
    rows.dead("catalogue", holder="web-4:1:t", shared=True)
    text = page(viewer.get(detail("catalogue")))
    shared, line = text.split('id="dlocks-queue"')
    for shown in (
        "web-1:&lt;b&gt;:t", "198.51.100.8", "shared by up to 3", "1001",
        "dlocks-stale", "expired",
    ):  # fmt: skip
        assert shown in shared
    for shown in (
        "web-3:1:t", "waiting", "exclusive", "web-4:1:t", "no heartbeat for",
        'title="2020-01-01 22:04:05"', 'data-label="Position">1</td>',
    ):  # fmt: skip
        assert shown in line
    assert FORCE not in text
    assert CLEAR not in text
    claim, more = rows.waits("busy"), []
    for number in range(101):
        claim.id, claim.owner = None, f"{number:032}"
        more.append(copy(claim))
    LockClaim.objects.bulk_create(more)
    text = page(viewer.get(detail("busy")))
    assert "And 3 more." in text
    assert text.count("worker-1:815:MainThread") == 100


def test_the_holder_of_a_free_key_is_its_last_one(viewer):
    """The page of a held lock has no outcome, since the hold has none yet."""
    rows.free("old")
    rows.held("new")
    assert "last holder: web-1:4711:MainThread" in page(viewer.get(LIST))
    text = page(viewer.get(detail("old")))
    for label in ("Last holder:", "Last outcome:"):
        assert label in text
        assert label not in page(viewer.get(detail("new")))
    assert "Holder:" not in text
    assert "succeeded" in text


def test_each_action_has_the_same_words_and_style_on_every_page(boss):
    """On the page of a lock, its actions come before the button that closes it."""
    rows.stale("a")
    rows.shares("a", 7)
    dead = rows.dead("a")
    rows.free("b")
    release = ("button dlocks-force", "Force release")
    remove = ("button dlocks-force", "Remove from the queue")
    assert buttons(page(boss.get(LIVE))).count(release) == 2
    clear, close = ("button", "Clear stale locks"), ("button", "Close")
    found = buttons(page(boss.get(detail("a"))))
    assert found == [release, clear, close, release, remove]

    def asked(action, key, **fields):
        form = {"action": action, "_selected_action": [key], **fields}
        return page(boss.post(LIST, form))

    cancel = ("button cancel-link", "No, take me back")
    assert buttons(asked(FORCE, "a")) == [release, cancel]
    text = asked(FORCE, "a", only=f"claim:{dead.pk}")
    assert buttons(text)[0] == remove
    assert "Force release" not in text
    text = asked(PURGE, "b")
    assert buttons(text)[0] == ("button dlocks-force", "Delete unused rows")


def test_odd_query_strings_are_harmless(viewer, boss):
    """Any query string returns the list or is rejected.

    The list does not reveal the owner letter by letter through filters.
    """
    rows.held("a")
    for query in (
        {"q": "'; DROP TABLE x; --"}, {"q": "a\0b"}, {"p": "9999"},
        {"o": "1.-2.3.4.5.6.7.8.9"}, {"all": ""},
    ):  # fmt: skip
        page(viewer.get(LIST, query, follow=True))
    for lookup in ("owner", "owner__startswith", "owner__regex", "owner__in", "holder"):
        assert boss.get(LIST, {lookup: "0\0"}).status_code == 400, lookup


def test_the_list_is_paginated(viewer):
    """A long list is split into pages."""
    for number in range(150):
        rows.free(f"key:{number:03}")
    first, second = page(viewer.get(LIST)), page(viewer.get(LIST, {"p": 2}))
    assert len(re.findall(r">key:\d+<", first)) == 100
    assert len(re.findall(r">key:\d+<", second)) == 50


def test_odd_keys_are_escaped_and_reachable(boss):
    """Any key is displayed safely, and its page and history can be opened.

    A key passes through the forms unchanged: it is cleared or released, and no other
    key.
    """
    for key in (*ODD_KEYS, "ab"):
        rows.held(key)
    count = len(ODD_KEYS)
    texts = [page(boss.get(LIST))]
    links = re.findall(r'href="([^"]+/change/[^"]*)"', texts[0])
    links = set(map(html.unescape, links))
    assert len(links) == count + 1
    texts += [page(boss.get(link)) for link in links]
    assert all("web-1:4711:MainThread" in text for text in texts)
    for missing in ("nope/change/", "a%00b/change/", "nope/history/"):
        # It redirects to the list with a message.
        assert boss.get(LIST + missing).status_code == 302, missing
    texts.append(act(boss, FORCE, *ODD_KEYS))
    texts.append(page(boss.post(LIST, fields(texts[-1]), follow=True)))
    assert f"The release of {count} locks was forced" in told(texts[-1])
    assert {rows.now(key).state for key in ODD_KEYS} == {"free"}
    texts += [page(boss.get(detail(key, "history"))) for key in ODD_KEYS[::3]]
    ResourceLock.objects.update(status=rows.P, end_time=rows.PAST)
    texts.append(page(boss.get(LIST)))
    checkbox = r'type="checkbox" name="_selected_action" value="([^"]*)"'
    values = map(html.unescape, re.findall(checkbox, texts[-1]))
    chosen = [value for value in values if value != "ab"]
    assert len(chosen) == count
    assert not set("\r\n") & set("".join(chosen))
    data = {"action": CLEAR, "_selected_action": chosen}
    texts.append(page(boss.post(LIST, data, follow=True)))
    assert f"{count} stale locks were cleared" in told(texts[-1])
    assert {rows.now(key).state for key in ODD_KEYS} == {"free"}
    assert rows.now("ab").state == "stale"
    assert {key for _, key, _ in log()} == set(ODD_KEYS)
    for text in texts:
        assert "<script>alert" not in text
        assert "\u202e" not in re.sub("<input[^>]*>", "", text)


def test_the_owner_is_on_no_page(boss):
    """No page reveals the owner: not the list, detail, history or confirmation."""
    rows.held("a")
    pages = [boss.get(LIST), boss.get(detail("a")), boss.get(f"{detail('a')}?_popup=1")]
    pages.append(boss.post(LIST, {"action": FORCE, "_selected_action": ["a"]}))
    for response in pages:
        assert ">owner<" not in page(response).lower()
    assert "0 results" in boss.get(LIST, {"q": rows.OWNER}).content.decode()
    act(boss, FORCE, "a", version="1000")
    page(boss.get(detail("a", "history")))
    page(boss.get("/admin/"))
    assert rows.OWNER[:8] not in str(log())


@pytest.mark.driver
@pytest.mark.parametrize("use_tz", [True, False])
def test_times_are_in_the_current_time_zone(use_tz, settings, boss):
    """Times are in the current time zone whatever ``USE_TZ`` is."""
    rows.stale("a", begin_time=rows.PAST)
    settings.USE_TZ = use_tz
    shown = (
        '<time datetime="2020-01-02T03:04:05\\+00:00" title="2020-01-01 22:04:05">'
        r"\d+ days ago</time>"
    )
    for text in (
        page(boss.get(LIST)),
        page(boss.get(detail("a"))),
        act(boss, FORCE, "a"),
    ):
        assert re.search(shown, text)
    assert "1 stale lock was cleared: a" in told(act(boss, CLEAR, "a"))


def test_the_list_opens_without_a_database_backend(settings, boss):
    """Without a database backend the list still opens, but offers no actions."""
    rows.stale("a")
    settings.DLOCKS = {"default": {"BACKEND": "dlocks.backends.memory.MemoryBackend"}}
    assert not actions(page(boss.get(LIST)))
    act(boss, CLEAR, "a")
    assert rows.now("a").version == 1000


def test_the_list_reads_the_database_of_the_locks(settings, monkeypatch):
    """The list reads the database that the default alias uses for its locks."""
    monkeypatch.setitem(connections.settings, "x", connections.settings["default"])
    backend = "dlocks.backends.database.InsertBackend"
    options = {"OPTIONS": {"database": "x"}}
    settings.DLOCKS = {"default": {"BACKEND": backend, **options}}
    request = RequestFactory().get(LIST)
    assert site.get_model_admin(ResourceLock).get_queryset(request).db == "x"


@pytest.mark.django_db(transaction=True)
def test_a_hold_of_ten_ttls_is_shown_in_amber(viewer):
    """Its release may be missing."""
    state = '<span class="dlocks-state dlocks-'
    with db_lock("stock:7"), db_lock("stock:8"):
        since = datetime.now(UTC) - timedelta(seconds=301)
        ResourceLock.objects.filter(pk="stock:7").update(begin_time=since)
        for url in (LIST, LIVE):
            text = viewer.get(url).content.decode()
            assert text.count(f'{state}long">held for 5 minutes<') == 1, url
            assert text.count(f'{state}held">held</span>') == 1, url


@pytest.mark.engine("postgresql", "mariadb", "mysql")
@pytest.mark.django_db(transaction=True)
def test_a_row_locked_by_a_transaction_blocks_no_page_or_action(boss, in_other_thread):
    """Pages and actions answer at once while a transaction has the row locked.

    The message says why the lock was not cleared, released or removed.
    """
    for key in "ab":
        rows.stale(key)
    rows.stale_share("a", 1001)
    dead = rows.dead("a")
    with transaction.atomic():
        ResourceLock.objects.select_for_update().get(pk="a")
        # The row counts as held, whatever its lease says.
        for address, is_shown in (
            (detail("a"), True),
            (f"{LIST}?state=held&q=a", True),
            (f"{LIST}?state=stale&q=a", False),
        ):
            text = page(in_other_thread(boss.get, address))
            assert ("a</bdi>" in text) is is_shown
        text = told(in_other_thread(act, boss, CLEAR, "a", "b"))
        assert "1 stale lock was cleared: b" in text
        assert "left unchanged (held by an open transaction" in text
        for version in ("1000", "share:1001", f"claim:{dead.pk}"):
            text = told(in_other_thread(act, boss, FORCE, "a", version=version))
            assert "(held by an open transaction" in text
    assert (rows.now("a").version, LockClaim.objects.count()) == (1000, 2)
    form = fields(act(boss, FORCE, "a"))
    assert "forced: a" in confirm(boss, form)
