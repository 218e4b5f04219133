"""The control room: a live page of current holds and of the last hour."""

from __future__ import annotations

import html
import math
import os
import re
from copy import copy
from datetime import UTC, datetime, timedelta
from urllib.parse import urlencode

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test.utils import CaptureQueriesContext

from dlocks import LockBackendError, db_lock, db_rwlock
from dlocks.models import LockClaim, ResourceLock
from dlocks.testing import held_elsewhere
from tests import rows
from tests.promises.admin.names import FORCE, HOSTILE, LIST, LIVE, ODD_KEYS
from tests.promises.admin.pages import detail, page, person, text_of
from tests.promises.interposed import REPORTING, Reporting

pytestmark = [pytest.mark.front, pytest.mark.django_db]


def keys(markup: str) -> list[str]:
    """Return the keys of the table."""
    cell = r'<tr id="lock-[^>]*>\s*<th scope="row"><a [^>]*><bdi [^>]*>([^<]*)'
    return re.findall(cell, markup)


def row_of(markup: str, key: str) -> str:
    """Return the text of the table row of a key."""
    rows = map(text_of, re.findall(r'<tr id="lock-.*?</tr>', markup, re.DOTALL))
    (found,) = [row for row in rows if row.startswith(key)]
    return found


def queries_of(client, **query) -> int:
    with CaptureQueriesContext(connection) as queries:
        page(client.get(LIVE, query))
    return len(queries)


# Current holds.


@pytest.mark.storage
def test_held_keys_are_shown(viewer):
    """The page shows holders, ages, time left, queues and totals.

    Keys with a queue come first, and then stale locks. A free key with waiters is shown
    too. The page does not know the ttl of a lock, so it draws no share of it. Each
    shared hold has its holder, its age and its time left.
    """

    def ago(**time):
        return datetime.now(UTC) - timedelta(**time)

    rows.held("old", begin_time=ago(minutes=9))
    rows.stale("left", begin_time=ago(minutes=8))
    rows.held("new", begin_time=ago(minutes=7))
    rows.free("free")
    rows.free("shared", version=1)
    rows.stale_share("shared", 200, holder="gone:1:t")
    # The ages must be exact, so these are the last rows.
    rows.write("long", rows.P, ago(seconds=-505), begin_time=ago())
    rows.write("busy", rows.P, ago(seconds=-15), begin_time=ago(seconds=75))
    for number in range(5):
        who = {"holder": f"worker-{number}:1:t"}
        rows.waits("busy", begin_time=ago(seconds=60 - number), **who)
    for number in range(4):
        facts = {"version": 100 + number, "holder": f"web-{number}:1:t", "permits": 10}
        since = ago(seconds=75)
        rows.claim("shared", ago(seconds=-15), begin_time=since, **facts)
    text = page(viewer.get(LIVE))
    assert re.search(
        r"busy held web-1:4711:MainThread 192.0.2.7 7[5-9] s 1[0-5] s left 5"
        r" worker-0:1:t .* and 2 more",
        row_of(text, "busy"),
    )
    assert "worker-2:1:t" in text
    assert "worker-3:1:t" not in text
    assert "stale" in row_of(text, "left")
    assert row_of(text, "shared") == "shared shared (4)"
    below = text_of(text[text.index('<tr id="share-') :])
    about = r"198.51.100.8 7[5-9] s 1[0-5] s left"
    for number in range(3):
        assert re.search(rf"held shared by up to 10 web-{number}:1:t {about}", below)
    assert "web-3:1:t" not in below
    assert re.search(r"stale shared gone:1:t \S+ \d+ days expired \d+ days ago", below)
    assert "and 1 more" in below
    assert re.search(r"\d\.\d s 8 minutes left", row_of(text, "long"))
    assert "dlocks-bar" not in text
    shown = keys(text)
    assert shown[:2] == ["busy", "left"]
    assert shown.index("old") < shown.index("new") < shown.index("long")
    assert "free" not in re.findall(r'<bdi class="dlocks-key">(.*?)</bdi>', text)
    assert "4 held 1 shared 1 stale 5 waiting" in text_of(text)
    # A transaction that the page cannot see has the row locked.
    rows.waits("free")
    row = row_of(page(viewer.get(LIVE)), "free")
    assert row.startswith("free free 1 worker-1:815:MainThread")


@pytest.mark.driver
def test_the_table_can_be_searched_and_filtered(viewer):
    """The totals are still those of all locks."""
    assert "No lock is held, and none has waiters." in page(viewer.get(LIVE))
    rows.held("stock:1")
    rows.waits("stock:1")
    rows.held("stock:2")
    rows.stale("report")
    every = ["stock:1", "report", "stock:2"]
    for query, shown in (
        ({"q": "stock"}, ["stock:1", "stock:2"]),
        ({"only": "waiting"}, ["stock:1"]),
        ({"only": "stale"}, ["report"]),
        ({"only": "stale", "q": "stock"}, []),
        ({"only": "nonsense", "q": " "}, every),
        ({"q": "nul\0"}, every),
    ):
        text = page(viewer.get(LIVE, query))
        assert keys(text) == shown, query
        assert "2 held 0 shared 1 stale 1 waiting" in text_of(text)
        assert ("No lock matches" in text) == (not shown)
    for key in ("nul\0", "x" * 256):
        # An invalid key is ignored.
        assert row_of(page(viewer.get(LIVE, {"key": key})), "report")


def test_the_links_of_the_page_keep_search_and_filter(viewer):
    """This includes the addresses from which the script refreshes the page."""
    rows.stale("b")
    for number in range(51):
        rows.stale(f"a&{number:02}")
    text = page(viewer.get(LIVE, {"q": "a&", "only": "stale"}))
    kept = "q=a%26&amp;only=stale&amp;page="
    assert f'data-part="?{kept}1&amp;part=now"' in text
    assert f'href="{LIVE}?{kept}2"' in text
    assert "1 to 50 of 51" in text_of(text)
    assert f'href="{LIVE}?q=a%26&amp;only=waiting"' in text
    assert '<input type="hidden" name="only" value="stale">' in text
    part = page(viewer.get(LIVE, {"q": "a&02", "only": "stale", "part": "now"}))
    assert keys(part) == ["a&amp;02"]
    # An invalid page number is ignored.
    for number, shown in {"x": "a&00", "0": "b", "-1": "b", "9" * 20: "b"}.items():
        assert row_of(page(viewer.get(LIVE, {"page": number})), shown)


@pytest.mark.usefixtures("with_history")
def test_odd_keys_and_holders_are_text(releaser):
    """Any key and any holder are shown as text.

    The page of a key shows only that key.
    """
    odd = {*ODD_KEYS, HOSTILE}
    for key in odd:
        rows.held(key, holder=HOSTILE[:255], begin_time=datetime.now(UTC))
        rows.waits(key, holder=HOSTILE)
        rows.ended(key, holder=HOSTILE)
    queries = [{}, *({"key": key} for key in (*ODD_KEYS[::3], HOSTILE))]
    links: set[str] = set()
    for query in queries:
        text = page(releaser.get(LIVE, query))
        assert "<img" not in text
        assert "<script>alert" not in text
        assert text.count('<tr id="lock-') == (1 if query else len(odd))
        assert HOSTILE in html.unescape(text)
        for value in re.findall(r'name="_selected_action" value="([^"]*)"', text):
            assert not set("\r\n") & set(html.unescape(value))
        found = re.findall(r'href="[^"]*live/\?([^"]*)"', text)
        links |= set(map(html.unescape, found))
    assert {urlencode({"key": key}) for key in odd} <= links


def test_many_locks_are_shown_by_pages(viewer):
    """The number of queries does not depend on the number of locks and waiters."""
    rows.held("first")
    rows.waits("first")
    few = queries_of(viewer)
    lock, claim = rows.held("lock"), rows.waits("lock")
    locks, claims = [], []
    for number in range(1, 1000):
        lock.key_resource = claim.key_resource = f"lock-{number:03}"
        claim.id, claim.owner = None, f"{number:032}"
        locks.append(copy(lock))
        claims.append(copy(claim))
    ResourceLock.objects.bulk_create(locks)
    LockClaim.objects.bulk_create(claims)
    assert queries_of(viewer) == few
    for part in ("hour", "now", "past"):
        assert queries_of(viewer, part=part) <= 8
    text = page(viewer.get(LIVE))
    assert text.count('<tr id="lock-') == 50
    assert "1 to 50 of 1001" in text_of(text)
    last = page(viewer.get(LIVE, {"page": 21}))
    assert last.count('<tr id="lock-') == 1
    assert "Next" not in text_of(last)
    assert f'href="{LIVE}?page=20"' in last


def test_a_part_of_the_page_is_rendered_alone(releaser, historian, settings):
    """The script fetches only the part that it refreshes.

    The page has no inline script or style. So the strictest content security policy can
    forbid them. Without the history the page says how to enable it. A key without a row
    is shown with its history.
    """
    rows.held("a")
    part = page(releaser.get(LIVE, {"part": "now"}))
    assert row_of(part, "a")
    assert "<html" not in part
    text = page(releaser.get(LIVE))
    assert "The history is off" in text
    assert '"OPTIONS": {"history": True}' in html.unescape(text)
    assert "dlocks-chart" not in text
    assert "history is off" in page(releaser.get(LIVE, {"part": "past"}))
    settings.DLOCKS = {**settings.DLOCKS, "default": settings.DLOCKS["recorded"]}
    rows.ended("a")
    text = page(releaser.get(LIVE, {"key": "a"}))
    inline = r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=|javascript:"
    assert not re.search(inline, text)
    assert not re.search(r"\s(src|href)=\"(https?:)?//", text)
    # The row was purged, or its backend deletes the row at the release.
    rows.ended("gone")
    text = text_of(page(historian.get(LIVE, {"key": "gone"})))
    assert "This key is free and has no waiters." in text
    assert "Timeline of this key" in text
    assert queries_of(releaser, part="past", key="gone") <= 8


# The last hour.


@pytest.mark.storage
@pytest.mark.usefixtures("with_history")
def test_the_chart_shows_the_contention_of_the_last_hour(historian):
    """The chart counts holds and waits per minute, for the last hour only.

    The longest holds of this hour come first, with links to their keys.
    """
    for number in range(7):
        rows.ended(f"key-{number}", ago=90, held=number + 1)
    rows.ended("key-7", ago=90, held=8, waited=2.5)
    rows.ended("b", ago=3500)
    rows.ended("b", ago=3700, held=100, waited=9)
    text = page(historian.get(LIVE))
    assert text.index("dlocks-chart") < text.index("dlocks-counts")
    said = "Locks released: 9. Acquired after a wait: 1 (11 %). Longest wait: 2.5 s."
    assert said in text_of(text)
    titles = re.findall(r"<g><title>(.*?)</title>", text)
    assert titles == ["1 min ago: 8 (1 had waited)", "58 min ago: 1 (0 had waited)"]
    assert "released per minute (highest: 8)" in text
    link = r'<li>\s*<a href="([^"]*)"><bdi class="dlocks-key">([^<]*)'
    shown = re.findall(link, text)
    assert [key for _, key in shown] == [f"key-{number}" for number in range(7, 1, -1)]
    about = text_of(page(historian.get(shown[1][0])))
    assert "Locks released: 1, all acquired without a wait." in about


@pytest.mark.driver
@pytest.mark.usefixtures("with_history")
def test_the_timeline_shows_every_hold_of_a_key(historian):
    """The timeline shows every hold of a key.

    Simultaneous holds are drawn in lanes. A current hold extends to the end.
    """
    rows.ended("a", ago=90, held=10, token=1)
    rows.ended("a", ago=50, held=30, token=2, shared=True, ending="F")
    rows.ended("a", ago=40, held=30, token=3, shared=True, ending="L")
    rows.ended("b", ago=5, held=1)
    rows.held("a", begin_time=datetime.now(UTC) - timedelta(seconds=20))
    text = page(historian.get(LIVE, {"key": "a"}))
    bar = r'<rect class="dlocks-end-(\w+)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"'
    bars = re.findall(bar, text.split("dlocks-timeline")[1])
    assert [ending for ending, *_ in bars] == ["R", "F", "L", "now"]
    assert [float(y) for _, _, y, _ in bars] == [2, 2, 16, 2]
    starts = [float(x) for _, x, _, _ in bars]
    assert starts == sorted(starts)
    assert starts[0] == 0
    assert float(bars[-1][1]) + float(bars[-1][3]) == pytest.approx(1000, abs=1)
    # The hold began 80 seconds ago and ended 50 seconds ago, on a scale of 100 seconds.
    assert starts[1] == pytest.approx(200, abs=20)
    cells = map(text_of, re.findall(r"<tr>.*?</tr>", text, re.DOTALL))
    shown = [" ".join(cell.split()[-2:]) for cell in cells if "web-1" in cell]
    assert shown == ["lost 3", "failed 2", "released 1"]


# Releases.


def test_the_release_button_needs_its_permission(viewer, releaser):
    """The view permission does not include the release of locks.

    Each shared hold has the button that it has on the page of its lock.
    """
    rows.held("a")
    rows.stale("b")
    rows.free("c")
    rows.waits("c")
    rows.free("d")
    rows.shares("d", 7)
    rows.shares("d", 8)
    assert "Force release" not in page(viewer.get(LIVE))
    assert "<button" not in page(viewer.get(LIVE, {"part": "now"}))
    text = page(releaser.get(LIVE))
    assert text.count("Force release</button>") == 4
    only = re.findall(r'name="only" value="(share:\d)"', text)
    assert only == ["share:7", "share:8"]
    sent = {"action": FORCE, "_selected_action": ["d"], "live": ""}
    assert "shared" in page(releaser.post(LIST, {**sent, "only": "share:8"}))
    releaser.post(LIST, {**sent, "version": ["share:8"], "reason": "tests"})
    assert [claim.version for claim in LockClaim.objects.filter(shared=True)] == [7]


def test_a_release_returns_to_the_control_room(releaser):
    """After a confirmation the control room is shown again, with the message.

    This also applies if the lock was no longer held.
    """
    rows.held("a")
    action = {"action": FORCE, "_selected_action": ["a"]}
    action["live"] = "key=a&page=1&next=//evil"
    sent = {**action, "only": "1000"}
    assert f'href="{LIVE}?key=a&amp;page=1"' in page(releaser.post(LIST, sent))
    confirmed = {**action, "version": ["1000"], "reason": "tests"}
    response = releaser.post(LIST, confirmed)
    assert (response.status_code, response.url) == (302, f"{LIVE}?key=a&page=1")
    assert "The release of 1 lock was forced: a" in page(releaser.get(response.url))
    assert rows.now("a").state == "free"
    assert LogEntry.objects.get().object_id == "a"
    late = releaser.post(LIST, sent)
    assert (late.status_code, late.url) == (302, f"{LIVE}?key=a&page=1")


def test_the_admin_links_to_the_control_room(viewer):
    """The index, the sidebar, the list and the page of a lock have a link.

    There is no other page at its address.
    """
    rows.held("a&b")
    entry = "/admin/dlocks/controlroom/"
    for address in ("/admin/", "/admin/dlocks/", LIST):
        assert f'<a href="{entry}"' in page(viewer.get(address))
    assert "Control room" in page(viewer.get(entry, follow=True))
    for address in ("add/", "a/change/", "a/history/", "a/delete/"):
        assert viewer.get(entry + address).status_code == 404
    assert entry not in page(person("other", "clear_resourcelock").get("/admin/"))
    assert f'href="{LIVE}"' in page(viewer.get(LIST))
    assert f'href="{LIVE}?key=a%26b"' in page(viewer.get(detail("a&b")))


# An alias whose locks are not rows is shown as well, read-only.


@pytest.fixture
def in_memory(settings, in_other_thread, threads, until):
    """Hold a key with a waiter, and share another, in a backend without rows."""
    settings.DLOCKS = {**settings.DLOCKS, "other": REPORTING}
    lock = db_lock(HOSTILE, using="other", timeout=60)
    hold = in_other_thread(lock.acquire)
    threads(lambda: lock.acquire().release())
    until(lambda: hold.queue_length() == 1)
    reader = db_rwlock("shared", using="other").read()
    holds = [hold, *(in_other_thread(reader.acquire) for _ in range(2))]
    yield hold
    for one in holds:
        in_other_thread(one.release)


def test_holds_without_rows_are_listed(releaser, in_memory):
    """Key, state, holder, IP, age, time left, waiters and token are shown.

    The script fetches only the table, less often than that of rows.
    """
    text = page(releaser.get(LIVE, {"alias": "other"}))
    table = text[text.index('class="dlocks-locks') :]
    found = re.findall(r"<tr>.*?</tr>", table, re.DOTALL)[1:]
    first, *shares = map(text_of, found)
    about = rf"192\.0\.2\.7 \S+ s ago \d+ s 1 {in_memory.token}"
    who = "held exclusive web-1:4711:MainThread"
    assert re.fullmatch(rf"{re.escape(HOSTILE)} {who} {about}", first)
    assert [row.split()[:3] for row in shares] == [["shared", "held", "shared"]] * 2
    assert "Force release" not in text
    assert "history is off" not in text_of(text)
    assert "<script>alert" not in text
    parts = re.findall('data-part="([^"]*)" data-every="([^"]*)"', text)
    assert parts == [("?alias=other&amp;part=now", "10")]
    part = page(releaser.get(LIVE, {"alias": "other", "part": "now"}))
    assert "<html" not in part
    assert "4711" in part
    for name in ("hour", "past"):
        part = page(releaser.get(LIVE, {"alias": "other", "part": name}))
        assert text_of(part) == ""


def test_a_backend_without_holds_or_answer_is_reported(
    viewer, in_memory, monkeypatch, settings
):
    """The page shows the error instead of the table. A hidden holder is hidden.

    A backend need not know the lease or the age of a hold. A site without locks in its
    database begins with the other alias.
    """

    def shown(**query):
        return text_of(page(viewer.get(LIVE, {"alias": "other", **query})))

    def fail(backend):
        raise LockBackendError("Redis is away")

    settings.DLOCKS_SHOW_HOLDER = False
    text = shown()
    for fact in ("4711", f":{os.getpid()}:", "192.0.2.7"):
        assert fact not in text
    assert "a hidden holder" in text
    settings.DLOCKS_SHOW_HOLDER = True
    monkeypatch.setattr(Reporting, "reported", lambda backend: [HOSTILE])
    with monkeypatch.context() as patch:
        unknown = {"since": None, "remaining": math.inf, "owner_ip": None}
        patch.setattr(Reporting, "known", {**Reporting.known, **unknown})
        assert f"web-1:4711:MainThread 1 {in_memory.token} " in shown()
    monkeypatch.setattr(Reporting, "reported", lambda backend: [])
    assert "No lock is held" in shown(key="x")
    monkeypatch.setattr(Reporting, "reported", fail)
    text = shown()
    assert "Redis is away" in text
    assert "No lock is held" not in text
    monkeypatch.undo()
    settings.DLOCKS = {"default": settings.DLOCKS["other"]}
    with held_elsewhere("mine"):
        assert "mine" in page(viewer.get(LIVE))
