"""The control room: a live page of current holds and of the last hour."""

from __future__ import annotations

import html
import math
import re
from copy import copy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from urllib.parse import urlencode

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from dlocks import LockBackendError
from tests import rows
from tests.admin.test_admin import LIST, ODD_KEYS, page, person
from tests.internals import (
    After,
    Claim,
    HoldRecord,
    LockClaim,
    ResourceLock,
    backends,
    control_room,
)

pytestmark = pytest.mark.front

LIVE = "/admin/dlocks/resourcelock/live/"
HOSTILE = "<img src=x onerror=alert(1)>\"'><script>alert(2)</script>"


@pytest.fixture
def viewer(db):
    return person("viewer", "view_resourcelock")


@pytest.fixture
def historian(db):
    return person("historian", "view_resourcelock", "view_holdrecord")


@pytest.fixture
def releaser(db):
    return person("releaser", "view_resourcelock", "force_release_resourcelock")


@pytest.fixture
def with_history(settings):
    settings.DLOCKS = {**settings.DLOCKS, "default": settings.DLOCKS["recorded"]}


@pytest.fixture
def in_memory(db, settings, in_other_thread):
    """Hold a key with a waiter, and share another, in a backend without rows."""
    memory = "dlocks.backends.memory.MemoryBackend"
    settings.DLOCKS = {**settings.DLOCKS, "other": {"BACKEND": memory}}
    backend = backends["other"]
    facts = {"ttl": 30.0, "holder": "web-1:4711:MainThread", "owner_ip": "192.0.2.7"}
    backend.acquire(Claim(key=HOSTILE, **facts))
    backend.enqueue(Claim(key=HOSTILE, ttl=30.0))
    for _ in range(2):
        backend.acquire(Claim(key="shared", shared=True, **facts))
    return backend


def record(key, token, *, ago=60.0, held=1.0, waited=0.0, ending="R", **fields):
    """Return the record of a hold that ended ``ago`` seconds ago."""
    values = {
        "holder": "web-1:4711:MainThread",
        "owner_ip": "192.0.2.7",
        "scope": "L",
        "shared": False,
        **fields,
    }
    times = {"begin_time": After(-ago - held), "end_time": After(-ago)}
    return HoldRecord(
        key_resource=key, token=token, waited=waited, ending=ending, **times, **values
    )


def ended(key, *, token=None, **fields):
    """Write the record of a hold that has ended."""
    token = HoldRecord.objects.count() + 1 if token is None else token
    written = record(key, token, **fields)
    written.save()
    return written


def text_of(markup: str) -> str:
    """Return the text of a page without its markup."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def keys(markup: str) -> list[str]:
    """Return the keys of the table."""
    return re.findall(
        r'<tr id="lock-[^>]*>\s*<th scope="row"><a [^>]*><bdi [^>]*>([^<]*)', markup
    )


def row_of(markup: str, key: str) -> str:
    """Return the text of the table row of a key."""
    found = [
        row
        for row in re.findall(r'<tr id="lock-.*?</tr>', markup, re.DOTALL)
        if text_of(row).startswith(key)
    ]
    assert len(found) == 1, found
    return text_of(found[0])


@pytest.mark.django_db
class TestPage:
    @pytest.mark.storage
    def test_held_keys_are_shown(self, viewer):
        """The page shows holders, ages, time left, queues and totals.

        Keys with a queue come first, and then stale locks. A free key with waiters is
        shown too. The page does not know the ttl of a lock, so it draws no share of it.
        Each shared hold has its holder, its age and its time left.
        """
        now = datetime.now(UTC)
        rows.held("old", begin_time=now - timedelta(minutes=9))
        rows.stale("left", begin_time=now - timedelta(minutes=8))
        rows.held("new", begin_time=now - timedelta(minutes=7))
        rows.free("free")
        rows.free("shared", version=1)
        rows.stale_share("shared", 200, holder="gone:1:t")
        # The ages must be exact, so these are the last rows.
        now = datetime.now(UTC)
        rows.write("long", rows.P, now + timedelta(seconds=505), begin_time=now)
        rows.write(
            "busy",
            rows.P,
            now + timedelta(seconds=15),
            begin_time=now - timedelta(seconds=75),
        )
        for number in range(5):
            rows.waits(
                "busy",
                holder=f"worker-{number}:1:t",
                begin_time=now - timedelta(seconds=60 - number),
            )
        for number in range(4):
            rows.claim(
                "shared",
                now + timedelta(seconds=15),
                version=100 + number,
                holder=f"web-{number}:1:t",
                begin_time=now - timedelta(seconds=75),
                permits=10,
            )
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
        for number in range(3):
            assert re.search(
                rf"held shared by up to 10 web-{number}:1:t 198.51.100.8 7[5-9] s"
                r" 1[0-5] s left",
                below,
            )
        assert "web-3:1:t" not in below
        assert re.search(
            r"stale shared gone:1:t \S+ \d+ days expired \d+ days ago", below
        )
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
        assert row_of(page(viewer.get(LIVE)), "free").startswith(
            "free free 1 worker-1:815:MainThread"
        )

    @pytest.mark.driver
    def test_the_table_can_be_searched_and_filtered(self, viewer):
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
        assert row_of(page(viewer.get(LIVE, {"key": "nul\0"})), "report")

    def test_the_links_of_the_page_keep_search_and_filter(self, viewer, monkeypatch):
        """This includes the addresses from which the script refreshes the page."""
        monkeypatch.setattr(control_room, "LOCKS", 1)
        for key in ("a&1", "a&2", "b"):
            rows.stale(key)
        text = page(viewer.get(LIVE, {"q": "a&", "only": "stale"}))
        kept = "q=a%26&amp;only=stale&amp;page="
        assert f'data-part="?{kept}1&amp;part=now"' in text
        assert f'href="{LIVE}?{kept}2"' in text
        assert "1 to 1 of 2" in text_of(text)
        assert f'href="{LIVE}?q=a%26&amp;only=waiting"' in text
        assert '<input type="hidden" name="only" value="stale">' in text
        part = page(viewer.get(LIVE, {"q": "a&2", "only": "stale", "part": "now"}))
        assert keys(part) == ["a&amp;2"]
        # An invalid key or page number is ignored.
        assert row_of(page(viewer.get(LIVE, {"key": "x" * 256})), "a&1")
        for number, shown in {"x": "a&1", "0": "b", "-1": "b", "9" * 20: "b"}.items():
            assert row_of(page(viewer.get(LIVE, {"page": number})), shown)

    @pytest.mark.usefixtures("with_history")
    def test_odd_keys_and_holders_are_text(self, releaser):
        """Any key and any holder are shown as text.

        The page of a key shows only that key.
        """
        odd = {*ODD_KEYS, HOSTILE}
        for key in odd:
            rows.held(key, holder=HOSTILE[:255], begin_time=datetime.now(UTC))
            rows.waits(key, holder=HOSTILE)
            ended(key, holder=HOSTILE)
        some = (*ODD_KEYS[::3], HOSTILE)
        addresses = {LIVE: len(odd)} | {
            f"{LIVE}?{urlencode({'key': key})}": 1 for key in some
        }
        links: set[str] = set()
        for address, shown in addresses.items():
            text = page(releaser.get(address))
            assert "<img" not in text
            assert "<script>alert" not in text
            assert text.count('<tr id="lock-') == shown
            assert HOSTILE in html.unescape(text)
            for value in re.findall(r'name="_selected_action" value="([^"]*)"', text):
                assert not set("\r\n") & set(html.unescape(value))
            links |= set(
                map(html.unescape, re.findall(r'href="([^"]*live/[^"]*)"', text))
            )
        queries = {urlencode({"key": key}) for key in odd}
        assert queries <= {address.partition("?")[2] for address in links}

    def test_many_locks_are_shown_by_pages(self, viewer):
        """The number of queries does not depend on the number of locks and waiters."""
        rows.held("first")
        rows.waits("first")
        with CaptureQueriesContext(connection) as few:
            viewer.get(LIVE)
        lock, claim = rows.held("lock"), rows.waits("lock")
        locks, claims = [], []
        for number in range(1, 1000):
            lock.key_resource = claim.key_resource = f"lock-{number:03}"
            claim.id, claim.owner = None, f"{number:032}"
            locks.append(copy(lock))
            claims.append(copy(claim))
        ResourceLock.objects.bulk_create(locks)
        LockClaim.objects.bulk_create(claims)
        with CaptureQueriesContext(connection) as queries:
            text = page(viewer.get(LIVE))
        assert len(queries) == len(few)
        assert text.count('<tr id="lock-') == control_room.LOCKS
        assert "1 to 50 of 1001" in text_of(text)
        for part in control_room.EVERY:
            with CaptureQueriesContext(connection) as queries:
                page(viewer.get(LIVE, {"part": part}))
            assert len(queries) <= 8
        last = page(viewer.get(LIVE, {"page": 21}))
        assert last.count('<tr id="lock-') == 1
        assert "Next" not in text_of(last)
        assert 'href="/admin/dlocks/resourcelock/live/?page=20"' in last

    def test_a_part_of_the_page_is_rendered_alone(self, releaser, historian, settings):
        """The script fetches only the part that it refreshes.

        The page has no inline script or style. So the strictest content security policy
        can forbid them. Without the history the page says how to enable it. A key
        without a row is shown with its history.
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
        ended("a")
        text = page(releaser.get(LIVE, {"key": "a"}))
        assert not re.search(
            r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=|javascript:", text
        )
        assert not re.search(r"\s(src|href)=\"(https?:)?//", text)
        # The row was purged, or its backend deletes the row at the release.
        ended("gone")
        text = text_of(page(historian.get(LIVE, {"key": "gone"})))
        assert "This key is free and has no waiters." in text
        assert "Timeline of this key" in text
        with CaptureQueriesContext(connection) as queries:
            page(releaser.get(LIVE, {"part": "past", "key": "gone"}))
        assert len(queries) <= 8


@pytest.mark.django_db
class TestPast:
    @pytest.mark.storage
    @pytest.mark.usefixtures("with_history")
    def test_the_chart_shows_the_contention_of_the_last_hour(self, historian):
        """The chart counts holds and waits per minute, for the last hour only.

        The longest holds of this hour come first, with links to their keys.
        """
        for number in range(7):
            ended(f"key-{number}", ago=90, held=number + 1)
        ended("key-7", ago=90, held=8, waited=2.5)
        ended("b", ago=3500)
        ended("b", ago=3700, held=100, waited=9)
        text = page(historian.get(LIVE))
        assert text.index("dlocks-chart") < text.index("dlocks-counts")
        told = (
            "Locks released: 9. Acquired after a wait: 1 (11 %). Longest wait: 2.5 s."
        )
        assert told in text_of(text)
        titles = re.findall(r"<g><title>(.*?)</title>", text)
        assert titles == ["1 min ago: 8 (1 had waited)", "58 min ago: 1 (0 had waited)"]
        assert "released per minute (highest: 8)" in text
        shown = re.findall(
            r'<li>\s*<a href="([^"]*)"><bdi class="dlocks-key">([^<]*)', text
        )
        assert [key for _, key in shown] == [
            f"key-{number}" for number in range(7, 1, -1)
        ]
        about = text_of(page(historian.get(shown[1][0])))
        assert "Locks released: 1, all acquired without a wait." in about

    @pytest.mark.driver
    @pytest.mark.usefixtures("with_history")
    def test_the_timeline_shows_every_hold_of_a_key(self, historian):
        """The timeline shows every hold of a key.

        Simultaneous holds are drawn in lanes. A current hold extends to the end.
        """
        ended("a", ago=90, held=10, token=1)
        ended("a", ago=50, held=30, token=2, shared=True, ending="F")
        ended("a", ago=40, held=30, token=3, shared=True, ending="L")
        ended("b", ago=5, held=1)
        rows.held("a", begin_time=datetime.now(UTC) - timedelta(seconds=20))
        text = page(historian.get(LIVE, {"key": "a"}))
        bars = re.findall(
            r'<rect class="dlocks-end-(\w+)" x="([\d.]+)" y="([\d.]+)"'
            r' width="([\d.]+)"',
            text.split("dlocks-timeline")[1],
        )
        assert [ending for ending, *_ in bars] == ["R", "F", "L", "now"]
        assert [float(y) for _, _, y, _ in bars] == [2, 2, 16, 2]
        starts = [float(x) for _, x, _, _ in bars]
        assert starts == sorted(starts)
        assert starts[0] == 0
        assert float(bars[-1][1]) + float(bars[-1][3]) == pytest.approx(1000, abs=1)
        # The hold began 80 seconds ago and ended 50 seconds ago, on a scale of 100
        # seconds.
        assert starts[1] == pytest.approx(200, abs=20)
        cells = [
            text_of(row)
            for row in re.findall(r"<tr>.*?</tr>", text, re.DOTALL)
            if "web-1" in row
        ]
        assert [cell.split()[-2:] for cell in cells] == [
            ["lost", "3"],
            ["failed", "2"],
            ["released", "1"],
        ]


@pytest.mark.django_db
class TestRelease:
    def test_the_release_button_needs_its_permission(self, viewer, releaser):
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
        text = page(viewer.get(LIVE))
        assert "Force release" not in text
        assert "<button" not in page(viewer.get(LIVE, {"part": "now"}))
        text = page(releaser.get(LIVE))
        assert text.count("Force release</button>") == 4
        only = re.findall(r'name="only" value="(share:\d)"', text)
        assert only == ["share:7", "share:8"]
        sent = {"action": "force_release", "_selected_action": ["d"], "live": ""}
        assert "shared" in page(releaser.post(LIST, {**sent, "only": "share:8"}))
        releaser.post(LIST, {**sent, "version": ["share:8"], "reason": "tests"})
        assert [claim.version for claim in LockClaim.objects.filter(shared=True)] == [7]

    def test_a_release_returns_to_the_control_room(self, releaser):
        """After a confirmation the control room is shown again, with the message.

        This also applies if the lock was no longer held.
        """
        rows.held("a")
        action = {"action": "force_release", "_selected_action": ["a"]}
        action["live"] = "key=a&page=1&next=//evil"
        sent = {**action, "only": "1000"}
        asked = page(releaser.post(LIST, sent))
        assert 'href="/admin/dlocks/resourcelock/live/?key=a&amp;page=1"' in asked
        confirmed = {**action, "version": ["1000"], "reason": "tests"}
        response = releaser.post(LIST, confirmed)
        assert (response.status_code, response.url) == (302, LIVE + "?key=a&page=1")
        assert "The release of 1 lock was forced: a" in page(releaser.get(response.url))
        assert rows.now("a").state == "free"
        assert LogEntry.objects.get().object_id == "a"
        late = releaser.post(LIST, sent)
        assert (late.status_code, late.url) == (302, LIVE + "?key=a&page=1")

    def test_the_admin_links_to_the_control_room(self, viewer):
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
        detail = reverse("admin:dlocks_resourcelock_change", args=["a&b"])
        assert f'href="{LIVE}?key=a%26b"' in page(viewer.get(detail))


class TestAliasWithoutRows:
    """An alias whose locks are not rows is shown as well, read-only."""

    def test_its_holds_are_listed(self, releaser, in_memory):
        """Key, state, holder, IP, age, time left, waiters and token are shown.

        The script fetches only the table, less often than that of rows.
        """
        text = page(releaser.get(LIVE, {"alias": "other"}))
        table = text[text.index('class="dlocks-locks') :]
        first, *shares = [
            text_of(row) for row in re.findall(r"<tr>.*?</tr>", table, re.DOTALL)[1:]
        ]
        token = in_memory.holder(HOSTILE).token
        assert re.fullmatch(
            rf"{re.escape(HOSTILE)} held exclusive web-1:4711:MainThread 192\.0\.2\.7"
            rf" \S+ s ago \d+ s 1 {token}",
            first,
        )
        assert [row.split()[:3] for row in shares] == [["shared", "held", "shared"]] * 2
        assert "Force release" not in text
        assert "history is off" not in text_of(text)
        assert "<script>alert" not in text
        assert re.findall('data-part="([^"]*)" data-every="([^"]*)"', text) == [
            ("?alias=other&amp;part=now", "10")
        ]
        part = page(releaser.get(LIVE, {"alias": "other", "part": "now"}))
        assert "<html" not in part
        assert "4711" in part
        for name in ("hour", "past"):
            part = page(releaser.get(LIVE, {"alias": "other", "part": name}))
            assert text_of(part) == ""

    def test_a_backend_without_holds_or_answer_is_reported(
        self, viewer, in_memory, monkeypatch, settings
    ):
        """The page shows the error instead of the table. A hidden holder is hidden.

        A backend need not know the lease or the age of a hold. A site without locks in
        its database begins with the other alias.
        """

        def shown(**query):
            return text_of(page(viewer.get(LIVE, {"alias": "other", **query})))

        settings.DLOCKS_SHOW_HOLDER = False
        text = shown()
        assert "4711" not in text
        assert "192.0.2.7" not in text
        assert "a hidden holder" in text
        settings.DLOCKS_SHOW_HOLDER = True
        known = in_memory.holder(HOSTILE)
        holder = replace(known, since=None, remaining=math.inf, owner_ip=None)
        monkeypatch.setattr(in_memory, "keys", lambda: [HOSTILE])
        with monkeypatch.context() as patch:
            patch.setattr(in_memory, "holder", lambda key: holder)
            assert f"web-1:4711:MainThread 1 {holder.token} " in shown()
        monkeypatch.setattr(in_memory, "keys", list)
        assert "No lock is held" in shown(key="x")

        def fail():
            raise LockBackendError("Redis is away")

        monkeypatch.setattr(in_memory, "keys", fail)
        text = shown()
        assert "Redis is away" in text
        assert "No lock is held" not in text
        settings.DLOCKS = {"default": settings.DLOCKS["other"]}
        backends["default"].acquire(Claim(key="mine", ttl=30.0))
        assert "mine" in page(viewer.get(LIVE))
