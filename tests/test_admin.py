"""The admin: locks to look at, to clear when stale, and to force free."""

from __future__ import annotations

import html
import re
from contextlib import contextmanager

import pytest
from django.contrib.admin import site
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.core.checks import run_checks
from django.db import connection, transaction
from django.test import Client, RequestFactory
from django.urls import reverse

from dlocks import LockLost, db_lock
from dlocks import admin as dlocks_admin
from dlocks.conf import backends
from dlocks.exceptions import LockBackendError
from dlocks.models import LockClaim, ResourceLock
from tests import rows

LIST = "/admin/dlocks/resourcelock/"
CLEAR, FORCE = "clear_stale_locks", "force_release"
ODD_KEYS = [
    "<script>alert(1)</script>", "'; DROP TABLE dlocks_resourcelock; --", "tenant/42/import", "a\nb", "a\r\nb", "a\rb",
    "emoji 🔒", "100%41", "a b ", "../..", "_0A", "add", '"quoted" & more', "\u202egnp.exe", "x" * 255,
]  # fmt: skip


def detail(key: str) -> str:
    return reverse("admin:dlocks_resourcelock_change", args=[quote(key)])


def person(name: str, *permissions: str, **fields) -> Client:
    user = User.objects.create_user(name, password="x", is_staff=True, **fields)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions, content_type__app_label="dlocks"))
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def viewer(db):
    return person("viewer", "view_resourcelock")


@pytest.fixture
def clearer(db):
    return person("clearer", "view_resourcelock", "clear_resourcelock")


@pytest.fixture
def releaser(db):
    return person("releaser", "view_resourcelock", "force_release_resourcelock")


@pytest.fixture
def boss(db):
    return person("boss", is_superuser=True)


def page(response) -> str:
    assert response.status_code == 200
    text = response.content.decode()
    assert rows.OWNER[:8] not in text, "the owner is on the page"
    return text


def act(client, action, *keys, query="", **data):
    """Choose an action for the keys as a browser would; the page that comes."""
    if "version" in data:
        data.setdefault("reason", "tests")
    data = {"action": action, "_selected_action": [dlocks_admin._to_form(key) for key in keys], **data}
    return page(client.post(LIST + query, data, follow=True))


def fields(text: str) -> dict[str, list[str]]:
    """Return the form of a confirmation page as a browser would send it."""
    sent: dict[str, list[str]] = {}
    for name, value in re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', text):
        # A browser sends each line break as CR LF.
        sent.setdefault(name, []).append(re.sub("\r\n|\r|\n", "\r\n", html.unescape(value)))
    if 'name="reason"' in text:
        sent["reason"] = ["tests"]
    return sent


def told(text: str) -> str:
    """Return the messages of a page."""
    return html.unescape(" ".join(re.findall(r'<li class="(?:success|warning|error)">(.*?)</li>', text, re.DOTALL)))


def actions(text: str) -> set[str]:
    return set(re.findall(r'<option value="(\w+)">', text))


def log() -> list[tuple[str, str, str]]:
    return [(entry.user.username, entry.object_id, entry.change_message) for entry in LogEntry.objects.order_by("pk")]


@contextmanager
def changing_hands_before_the_write(monkeypatch, **changes):
    """Change the row when the last look at it is over."""
    backend = backends["default"]
    clear = backend.clear

    def late(key, version, **options):
        ResourceLock.objects.filter(pk=key).update(**changes)
        return clear(key, version, **options)

    with monkeypatch.context() as patch:
        patch.setattr(backend, "clear", late)
        yield


@pytest.mark.django_db
class TestPermissions:
    def test_anonymous_people_see_nothing(self, client):
        """Whoever is not logged in is sent to the login, from every page and action."""
        rows.held("a")
        for response in (client.get(LIST), client.get(detail("a")), client.post(LIST, {"action": FORCE})):
            assert response.status_code == 302
            assert "/login/" in response.url

    def test_staff_without_the_view_permission_see_nothing(self):
        """Staff need the permission to view; to clear or force alone is not enough."""
        rows.stale("a")
        for client in (person("staff"), person("blind", "clear_resourcelock", "force_release_resourcelock")):
            assert client.get(LIST).status_code == 403
            assert client.get(detail("a")).status_code == 403
            for action in (CLEAR, FORCE):
                data = {"action": action, "_selected_action": ["a"], "version": ["1000"]}
                assert client.post(LIST, data).status_code == 403
        assert rows.now("a").version == 1000

    @pytest.mark.parametrize(
        ("name", "offered"),
        [
            ("viewer", set()),
            ("clearer", {CLEAR}),
            ("releaser", {FORCE}),
            ("boss", {CLEAR, FORCE, "delete_unused_rows"}),
        ],
    )
    def test_actions_are_offered_to_those_who_may(self, request, name, offered):
        """Each sees the actions that it has the permission for, and never Django's delete."""
        rows.held("a")
        text = page(request.getfixturevalue(name).get(LIST))
        assert actions(text) == offered

    @pytest.mark.parametrize(
        ("name", "action"), [("viewer", CLEAR), ("viewer", FORCE), ("clearer", FORCE), ("releaser", CLEAR)]
    )
    def test_actions_are_refused_to_those_who_may_not(self, request, name, action):
        """A forged request does no more than the buttons: nothing is changed."""
        rows.stale("a")
        client = request.getfixturevalue(name)
        for data in ({}, {"version": "1000"}):
            client.post(LIST, {"action": action, "_selected_action": ["a"], **data})
        assert rows.now("a").version == 1000
        assert not log()

    def test_nobody_can_add_change_or_delete(self, boss):
        """Not even a superuser edits rows: what is shown is read-only."""
        rows.held("a")
        assert boss.get(LIST + "add/").status_code == 403
        assert boss.post(LIST + "add/", {"key_resource": "b"}).status_code == 403
        assert boss.get(reverse("admin:dlocks_resourcelock_delete", args=["a"])).status_code == 403
        assert boss.post(reverse("admin:dlocks_resourcelock_delete", args=["a"]), {"post": "yes"}).status_code == 403
        text = page(boss.get(detail("a")))
        assert 'name="_save"' not in text
        assert 'name="holder"' not in text
        assert boss.post(detail("a"), {"holder": "me"}).status_code == 403
        assert (rows.now("a").holder, ResourceLock.objects.count()) == ("web-1:4711:MainThread", 1)

    def test_csrf_is_enforced(self, boss):
        """A form from elsewhere does nothing."""
        rows.stale("a")
        strict = Client(enforce_csrf_checks=True)
        strict.force_login(User.objects.get(username="boss"))
        for data in ({"action": CLEAR}, {"action": FORCE}, {"action": FORCE, "version": "1000"}):
            assert strict.post(LIST, {"_selected_action": ["a"], **data}).status_code == 403
        assert rows.now("a").version == 1000
        token = fields(page(strict.get(LIST)))["csrfmiddlewaretoken"][0]
        data = {"_selected_action": ["a"], "action": FORCE, "csrfmiddlewaretoken": token}
        confirmation = fields(page(strict.post(LIST, data)))
        strict.post(LIST, confirmation)
        assert rows.now("a").state == "free"


@pytest.mark.django_db
class TestPages:
    def test_the_list_tells_what_there_is_to_know(self, viewer):
        """The list has key, state, holder, hold count, IP, begin, age and time left; the page of a lock its version."""
        rows.held("stock:7", begin_time=rows.PAST, hold_count=3, version=1234567)
        rows.stale("report")
        rows.free("old")
        text = page(viewer.get(LIST))
        for shown in ("stock:7", "web-1:4711:MainThread", "192.0.2.7", "2020-01-01 22:04:05", "×3"):
            assert shown in text
        assert ">1234567<" in page(viewer.get(detail("stock:7")))
        assert re.search(r'class="field-left">\d+d\d\dh<', text)
        assert re.search(r'class="field-left">ran out \d+d\d\dh ago<', text)
        assert re.search(r'class="field-begin">.*<small>\d+d\d\dh ago<', text)

    def test_states_are_words_and_colours(self, viewer):
        """Each state is a word with a class of its own, in a style sheet for light and dark."""
        rows.held("h")
        rows.stale("s")
        rows.free("f")
        text = page(viewer.get(LIST))
        for state in ("held", "stale", "free"):
            assert f'<span class="dlocks-state dlocks-{state}">{state}</span>' in text
        assert "dlocks/admin.css" in text

    @pytest.mark.parametrize("state", ["held", "stale", "free"])
    def test_filter_by_state(self, viewer, state):
        """I can look at only the held, the stale, or the free."""
        for make in (rows.held, rows.stale, rows.free):
            make(f"key:{make.__name__}")
        text = page(viewer.get(LIST, {"state": state}))
        assert re.findall(r">key:(\w+)<", text) == [state]
        assert len(re.findall(r">key:(\w+)<", page(viewer.get(LIST, {"state": "nonsense"})))) == 3

    @pytest.mark.parametrize("words", ["stock", "web-9", "198.51.100", "stock web-9", "🔒", "50%"])
    def test_search(self, viewer, words):
        """I find locks by key, holder and IP."""
        rows.held("stock:7 🔒 50%", holder="web-9:1:t", owner_ip="198.51.100.4")
        rows.held("other", owner_ip="2001:db8::1")
        text = page(viewer.get(LIST, {"q": words}))
        assert "1 result" in text
        assert "stock:7" in text

    @pytest.mark.parametrize(
        "query", [{"q": "'; DROP TABLE x; --"}, {"q": "a\0b"}, {"p": "9999"}, {"o": "1.-2.3.4.5.6.7.8.9"}, {"all": ""}]
    )
    def test_odd_queries_do_no_harm(self, viewer, query):
        """Whatever stands in the address, the list comes, or is refused."""
        rows.held("a")
        page(viewer.get(LIST, query, follow=True))

    @pytest.mark.parametrize("lookup", ["owner", "owner__startswith", "owner__regex", "owner__in", "holder"])
    def test_the_owner_cannot_be_guessed_by_filters(self, boss, lookup):
        """Nobody can ask the list for the owner letter by letter."""
        rows.held("a")
        assert boss.get(LIST, {lookup: "0\0"}).status_code == 400

    def test_the_list_is_paginated(self, viewer):
        """Many locks come page by page, by a fixed number of queries."""
        for number in range(150):
            rows.free(f"key:{number:03}")
        first, second = page(viewer.get(LIST)), page(viewer.get(LIST, {"p": 2}))
        assert len(re.findall(r">key:\d+<", first)) == 100
        assert len(re.findall(r">key:\d+<", second)) == 50

    @pytest.mark.parametrize("key", ODD_KEYS, ids=ascii)
    def test_odd_keys_are_escaped_and_reachable(self, boss, key):
        """Whatever is in a key, it is shown harmless, its page opens from the list, and its history too."""
        rows.held(key)
        text = page(boss.get(LIST))
        assert "<script>alert" not in text
        assert "\u202e" not in re.sub("<input[^>]*>", "", text)
        link = html.unescape(re.search(r'<a href="([^"]+/change/[^"]*)"', text)[1])
        text = page(boss.get(link))
        assert "<script>alert" not in text
        assert "\u202e" not in re.sub("<input[^>]*>", "", text)
        assert "web-1:4711:MainThread" in text
        act(boss, FORCE, key)
        text = page(boss.get(reverse("admin:dlocks_resourcelock_history", args=[quote(key)])))
        assert "\u202e" not in re.sub("<input[^>]*>", "", text)

    @pytest.mark.parametrize("address", ["nope/change/", "a%00b/change/", "nope/history/"])
    def test_a_lock_that_is_not_there(self, viewer, address):
        """A page of a lock that is gone leads back, with a word."""
        response = viewer.get(LIST + address)
        assert response.status_code == 302

    def test_the_owner_is_on_no_page(self, boss):
        """The capability of a hold never leaves the server: not by list, detail, history or confirmation."""
        rows.held("a")
        for response in (
            boss.get(LIST), boss.get(detail("a")), boss.get(detail("a") + "?_popup=1"),
            boss.post(LIST, {"action": FORCE, "_selected_action": ["a"]}),
        ):  # fmt: skip
            assert ">owner<" not in page(response).lower()
        assert "0 results" in boss.get(LIST, {"q": rows.OWNER}).content.decode()
        act(boss, FORCE, "a", version="1000")
        page(boss.get(reverse("admin:dlocks_resourcelock_history", args=["a"])))
        page(boss.get("/admin/"))
        assert rows.OWNER[:8] not in str(log())

    @pytest.mark.parametrize("use_tz", [True, False])
    def test_with_and_without_time_zones(self, settings, boss, use_tz):
        """Whatever USE_TZ is, times are in my zone, and everything works."""
        rows.stale("a", begin_time=rows.PAST)
        settings.USE_TZ = use_tz
        for text in (page(boss.get(LIST)), page(boss.get(detail("a"))), act(boss, FORCE, "a")):
            assert '<time datetime="2020-01-02T03:04:05+00:00">2020-01-01 22:04:05</time>' in text
        assert "1 lock was cleared: a" in told(act(boss, CLEAR, "a"))

    def test_another_database(self, settings):
        """The list reads the database that the default alias locks on."""
        settings.DLOCKS = {
            "default": {"BACKEND": "dlocks.backends.database.InsertBackend", "OPTIONS": {"database": "x"}}
        }
        request = RequestFactory().get(LIST)
        assert site.get_model_admin(ResourceLock).get_queryset(request).db == "x"

    def test_without_a_database_backend(self, settings, boss):
        """Where the default alias keeps no rows, the list is still there, without actions."""
        rows.stale("a")
        settings.DLOCKS = {"default": {"BACKEND": "dlocks.backends.memory.MemoryBackend"}}
        assert not actions(page(boss.get(LIST)))
        act(boss, CLEAR, "a")
        assert rows.now("a").version == 1000

    def test_the_admin_passes_djangos_checks(self):
        """Django finds nothing wrong with it."""
        assert not [message for message in run_checks() if message.id.startswith("admin.")]


@pytest.mark.django_db
class TestClear:
    def test_the_page_of_a_lock_clears_what_it_showed_and_no_other_hold(self, clearer):
        """Who took the key since and never came back is another one, at whom nobody has looked."""
        rows.stale("a", version=1000)
        text = page(clearer.get(detail("a")))
        shown = re.findall(r'name="shown" value="([^"]+)"', text)
        assert len(shown) == 1
        ResourceLock.objects.filter(pk="a").delete()
        rows.stale("a", version=2000)
        form = {"action": CLEAR, "_selected_action": ["a"], "shown": [html.unescape(one) for one in shown]}
        assert "not stale any more" in page(clearer.post(LIST, form, follow=True))
        assert rows.now("a").status == rows.P
        shown = re.findall(r'name="shown" value="([^"]+)"', page(clearer.get(detail("a"))))
        form["shown"] = [html.unescape(one) for one in shown]
        assert "1 lock was cleared: a" in page(clearer.post(LIST, form, follow=True))
        assert rows.now("a").status == rows.F

    def test_stale_locks_are_cleared_and_logged(self, clearer):
        """Stale locks that I choose become free, I am told which, and it is in the log who did it."""
        rows.stale("a")
        rows.stale("b")
        rows.stale("c")
        text = act(clearer, CLEAR, "a", "b")
        assert "2 locks were cleared: a, b" in told(text)
        assert [rows.now(key).state for key in "abc"] == ["free", "free", "stale"]
        assert rows.now("a").status == "F"
        assert [entry[:2] for entry in log()] == [("clearer", "a"), ("clearer", "b")]
        assert log()[0][2].startswith("Cleared the stale lock of web-1:4711:MainThread (192.0.2.7)")
        entry = LogEntry.objects.get(object_id="a")
        assert (entry.is_change(), str(entry.get_edited_object())) == (True, "a")

    def test_nothing_live_is_cleared(self, clearer):
        """A held lock stays held, whatever I choose, and I am told that it is not stale; so with free and lost ones."""
        rows.held("alive")
        rows.free("free")
        text = told(act(clearer, CLEAR, "alive", "free", "gone", "nul\0"))
        assert "1 lock was not cleared (not stale): alive" in text
        assert "1 lock was not cleared (free already): free" in text
        assert "2 locks were not cleared (not there any more): gone" in text
        assert (rows.now("alive").version, rows.now("free").version) == (1000, 1000)
        assert not log()

    @pytest.mark.parametrize("version", [1000, 1001])
    def test_a_lock_that_came_alive_at_the_last_moment_is_not_cleared(self, clearer, monkeypatch, version):
        """Renewed or taken between the look and the write: it is not cleared."""
        rows.stale("a")
        with changing_hands_before_the_write(monkeypatch, end_time=rows.FUTURE, version=version):
            text = told(act(clearer, CLEAR, "a"))
        assert "1 lock was not cleared (" in text
        assert (rows.now("a").state, rows.now("a").version) == ("held", version)
        assert not log()

    def test_a_forged_version_clears_nothing_live(self, clearer):
        """The confirmation's fields mean nothing to this action."""
        rows.held("a")
        act(clearer, CLEAR, "a", version="1000", post="yes")
        assert rows.now("a").version == 1000

    def test_a_lock_that_left_the_filter_is_told_of(self, clearer):
        """When the list showed stale ones only, and one is free since, I am told."""
        rows.free("a")
        assert "(free already): a" in told(act(clearer, CLEAR, "a", query="?state=stale"))

    def test_all_that_match_can_be_chosen(self, clearer, monkeypatch):
        """'Select all' clears the stale ones of the whole list, of which there may be only so many."""
        monkeypatch.setattr(dlocks_admin, "AT_ONCE", 3)
        for number in range(3):
            rows.stale(f"s{number}")
            rows.held(f"h{number}")
        text = told(act(clearer, CLEAR, "h0", select_across="1"))
        assert "3 locks were cleared: s0, s1, s2" in text
        assert {lock.version for lock in ResourceLock.objects.filter(pk__startswith="h")} == {1000}
        assert "None of the selected locks is stale" in told(act(clearer, CLEAR, "h0", select_across="1"))
        for number in range(4):
            rows.stale(f"t{number}")
        assert "At most 3 locks" in told(act(clearer, CLEAR, "h0", select_across="1"))
        assert rows.now("t0").state == "stale"

    @pytest.mark.parametrize("key", ODD_KEYS, ids=ascii)
    def test_odd_keys_can_be_cleared(self, clearer, key):
        """A key that a form could garble is cleared, and no other."""
        rows.stale(key)
        rows.stale("ab")
        values = re.findall(r'type="checkbox" name="_selected_action" value="([^"]*)"', page(clearer.get(LIST)))
        assert len(values) == 2
        chosen = [html.unescape(value) for value in values if value != "ab"]
        assert not set("\r\n") & set(chosen[0])
        text = page(clearer.post(LIST, {"action": CLEAR, "_selected_action": chosen}, follow=True))
        assert "1 lock was cleared" in told(text)
        assert (rows.now(key).state, rows.now("ab").state) == ("free", "stale")
        assert log()[0][1] == key

    def test_messages_name_only_some(self, clearer):
        """Of many locks the message names ten."""
        keys = [f"k{number:02}" for number in range(12)]
        for key in keys:
            rows.stale(key)
        assert told(act(clearer, CLEAR, *keys)).endswith(
            "12 locks were cleared: " + ", ".join(keys[:10]) + " and 2 more"
        )

    def test_a_database_that_fails_is_told_of(self, clearer, monkeypatch):
        """When the database fails half-way, I am told what was done and that it failed."""
        rows.stale("a")
        rows.stale("b")
        backend = backends["default"]
        clear = backend.clear

        def fail(key, version, **options):
            if key == "b":
                raise LockBackendError("the database is away")
            return clear(key, version, **options)

        monkeypatch.setattr(backend, "clear", fail)
        text = told(act(clearer, CLEAR, "a", "b"))
        assert "1 lock was cleared: a" in text
        assert "he database is away" in text
        assert [entry[1] for entry in log()] == ["a"]

    def test_markup_in_messages_is_escaped(self, clearer):
        """A key is not markup in a message either."""
        rows.stale("<script>alert(1)</script>")
        text = act(clearer, CLEAR, "<script>alert(1)</script>")
        assert "<script>alert" in told(text)
        assert "<script>alert" not in text


@pytest.mark.django_db
class TestForceRelease:
    def test_it_asks_first(self, releaser):
        """A page lists the locks with their holders and says what it means; nothing is changed by it."""
        rows.held("a", begin_time=rows.PAST)
        rows.stale("b", holder="worker:<b>:t")
        rows.free("c")
        text = act(releaser, FORCE, "a", "b", "c")
        for shown in (
            "web-1:4711:MainThread",
            "192.0.2.7",
            "2020-01-01 22:04:05",
            "worker:&lt;b&gt;:t",
            "fenced off",
            "is not stopped",
        ):
            assert shown in text
        assert "One selected lock is free already and is left out." in text
        assert fields(text)["version"] == ["1000", "1000"]
        assert fields(text)["_selected_action"] == ["a", "b"]
        assert [rows.now(key).version for key in "abc"] == [1000, 1000, 1000]
        assert not log()

    def test_confirmed_it_releases_and_logs(self, releaser):
        """After the confirmation the locks are free, their holders fenced off, and it is in the log who did it."""
        rows.held("a")
        rows.stale("b")
        text = page(releaser.post(LIST, fields(act(releaser, FORCE, "a", "b")), follow=True))
        assert "2 locks were cleared: a, b" in told(text)
        lock = rows.now("a")
        assert (lock.state, lock.owner, lock.status) == ("free", "", "F")
        assert lock.version > 1000
        assert [entry[:2] for entry in log()] == [("releaser", "a"), ("releaser", "b")]
        assert log()[0][2].startswith("Forced the release of the lock of web-1:4711:MainThread (192.0.2.7)")

    def test_a_lock_taken_by_another_since_the_page_is_left_alone(self, releaser):
        """What I confirmed is what the page showed: a lock that changed hands since is not released, and I am told."""
        rows.held("a")
        rows.held("b")
        form = fields(act(releaser, FORCE, "a", "b"))
        ResourceLock.objects.filter(pk="a").update(version=1001, holder="web-2:1:t")
        text = told(page(releaser.post(LIST, form, follow=True)))
        assert "1 lock was cleared: b" in text
        assert "1 lock was not cleared (taken by another holder meanwhile): a" in text
        assert (rows.now("a").state, rows.now("a").version) == ("held", 1001)
        assert [entry[1] for entry in log()] == ["b"]

    def test_taken_by_another_at_the_last_moment(self, releaser, monkeypatch):
        """Even between the look and the write."""
        rows.held("a")
        form = fields(act(releaser, FORCE, "a"))
        with changing_hands_before_the_write(monkeypatch, version=1001):
            text = told(page(releaser.post(LIST, form, follow=True)))
        assert "taken by another holder meanwhile" in text
        assert rows.now("a").version == 1001

    def test_an_old_page_sent_twice(self, releaser):
        """The same confirmation again, from the browser's history, does nothing more."""
        rows.held("a")
        form = fields(act(releaser, FORCE, "a"))
        releaser.post(LIST, form)
        version = rows.now("a").version
        assert "(free already): a" in told(page(releaser.post(LIST, form, follow=True)))
        assert rows.now("a").version == version
        assert len(log()) == 1

    @pytest.mark.parametrize("versions", [["x"], ["1000", "1000"], ["9" * 5000], [""]])
    def test_a_mangled_confirmation(self, releaser, versions):
        """A confirmation that does not fit together changes nothing."""
        rows.held("a")
        assert "nothing is changed" in told(act(releaser, FORCE, "a", version=versions))
        assert rows.now("a").version == 1000

    @pytest.mark.parametrize("version", ["-1", "0", "999", "9" * 40])
    def test_a_guessed_version(self, releaser, version):
        """Without the version there is no release."""
        rows.held("a")
        act(releaser, FORCE, "a", version=version)
        assert rows.now("a").version == 1000

    def test_nothing_to_release(self, releaser):
        """When all that I chose is free, there is nothing to confirm."""
        rows.free("a")
        assert "None of the selected locks is held any more" in told(act(releaser, FORCE, "a", "gone", "\0"))
        assert "not there any more" in told(act(releaser, FORCE, "\0", version="1000"))

    def test_too_many_at_once(self, releaser, monkeypatch):
        """A form larger than Django takes is not offered."""
        monkeypatch.setattr(dlocks_admin, "AT_ONCE", 3)
        for number in range(4):
            rows.held(f"k{number}")
        assert "At most 3 locks" in told(act(releaser, FORCE, "k0", select_across="1"))

    def test_all_that_match_can_be_chosen(self, releaser):
        """'Select all' under a filter asks about what the filter shows."""
        rows.held("h")
        rows.stale("s")
        rows.free("f")
        assert fields(act(releaser, FORCE, "s", query="?state=stale", select_across="1"))["_selected_action"] == ["s"]
        assert fields(act(releaser, FORCE, "s", select_across="1"))["_selected_action"] == ["h", "s"]

    @pytest.mark.parametrize("key", ODD_KEYS, ids=ascii)
    def test_odd_keys_can_be_released(self, releaser, key):
        """A key goes through the confirmation's form unharmed."""
        rows.held(key)
        rows.held("ab")
        text = act(releaser, FORCE, key)
        assert "<script>alert" not in text
        assert "1 lock was cleared" in told(page(releaser.post(LIST, fields(text), follow=True)))
        assert (rows.now(key).state, rows.now("ab").state) == ("free", "held")


@pytest.mark.django_db(transaction=True)
def test_a_hold_is_lost_by_a_forced_release(releaser):
    """A real holder whose lock I force free learns of it."""
    hold = db_lock("a", renew=False).acquire()
    releaser.post(LIST, fields(act(releaser, FORCE, "a")))
    with pytest.raises(LockLost):
        hold.renew()


@pytest.mark.django_db(transaction=True)
def test_with_atomic_requests(releaser, settings):
    """Where each request is a transaction, the release and its log entry are committed together."""
    rows.held("a")
    form = fields(act(releaser, FORCE, "a"))
    connection.settings_dict["ATOMIC_REQUESTS"] = True
    try:
        text = told(page(releaser.post(LIST, form, follow=True)))
    finally:
        connection.settings_dict["ATOMIC_REQUESTS"] = False
    assert "1 lock was cleared: a" in text
    assert rows.now("a").state == "free"
    assert len(log()) == 1


@pytest.mark.engine("postgresql", "mariadb")
@pytest.mark.django_db(transaction=True)
def test_a_row_that_a_transaction_has_blocks_no_page_and_no_action(boss, elsewhere):
    """While somebody's transaction has a row locked, every page and action answers, and says why it is not cleared."""
    rows.stale("a")
    rows.stale("b")
    with transaction.atomic():
        ResourceLock.objects.select_for_update().get(pk="a")
        for address in (LIST, detail("a"), LIST + "?state=stale&q=a"):
            assert "a</bdi>" in page(elsewhere(boss.get, address))
        text = told(elsewhere(act, boss, CLEAR, "a", "b"))
        assert "1 lock was cleared: b" in text
        assert "1 lock was not cleared (in a transaction at this moment" in text
        form = fields(elsewhere(act, boss, FORCE, "a"))
        text = told(page(elsewhere(boss.post, LIST, form, follow=True)))
        assert "(in a transaction at this moment" in text
    assert rows.now("a").version == 1000
    assert "1 lock was cleared: a" in told(page(boss.post(LIST, form, follow=True)))


@pytest.mark.django_db
class TestPrefix:
    """Two projects in one database: each has its own keys, by a prefix."""

    @pytest.fixture(autouse=True)
    def prefix(self, settings):
        settings.DLOCKS = {"default": {**settings.DLOCKS["default"], "OPTIONS": {"prefix": "shop:"}}}

    def test_the_keys_of_others_are_not_shown(self, boss):
        for key in ("shop:1", "SHOP:2", "bank:3"):
            rows.held(key)
        text = page(boss.get(LIST))
        assert "shop:1" in text
        assert "SHOP:2" not in text
        assert "bank:3" not in text
        assert "bank:3" not in page(boss.get(f"{LIST}live/"))
        assert boss.get(detail("bank:3")).status_code == 302
        assert page(boss.get(detail("shop:1")))

    def test_the_keys_of_others_are_not_taken(self, boss):
        rows.held("bank:3")
        rows.claim("bank:3", rows.FUTURE, version=1000)
        for version in ("1000", "share:1000"):
            data = {"action": FORCE, "_selected_action": [dlocks_admin._to_form("bank:3")], "version": [version]}
            boss.post(LIST, {**data, "reason": "tests", "confirmed": "yes"}, follow=True)
        assert rows.now("bank:3").status == rows.P
        assert LockClaim.objects.count() == 1
