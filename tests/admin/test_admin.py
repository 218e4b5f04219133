"""The admin: list locks, clear stale ones and force releases."""

from __future__ import annotations

import html
import re

import pytest
from django.contrib.admin import site
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.db import connection, connections, transaction
from django.test import Client, RequestFactory
from django.urls import reverse

from dlocks import LockBackendError, LockLost, db_lock
from tests import rows
from tests.internals import (
    After,
    LockClaim,
    ResourceLock,
    backends,
    confirmation,
    to_form,
)

pytestmark = pytest.mark.front

LIST = "/admin/dlocks/resourcelock/"
CLEAR, FORCE = "clear_stale_locks", "force_release"
ODD_KEYS = [
    "<script>alert(1)</script>", "'; DROP TABLE dlocks_resourcelock; --",
    "tenant/42/import", "a\nb", "a\r\nb", "a\rb",
    "emoji 🔒", "100%41", "a b ", "../..", "_0A", "add", '"quoted" & more',
    "\u202egnp.exe", "x" * 255,
]  # fmt: skip


def detail(key: str) -> str:
    return reverse("admin:dlocks_resourcelock_change", args=[quote(key)])


def person(name: str, *permissions: str, **fields) -> Client:
    user = User.objects.create_user(name, password="x", is_staff=True, **fields)
    user.user_permissions.set(
        Permission.objects.filter(
            codename__in=permissions, content_type__app_label="dlocks"
        )
    )
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
    """Run an admin action on the keys as a browser would; return the page."""
    if "version" in data:
        data.setdefault("reason", "tests")
    data = {
        "action": action,
        "_selected_action": [to_form(key) for key in keys],
        **data,
    }
    return page(client.post(LIST + query, data, follow=True))


def fields(text: str) -> dict[str, list[str]]:
    """Return the form of a confirmation page as a browser would send it."""
    sent: dict[str, list[str]] = {}
    for name, value in re.findall(
        r'<input type="hidden" name="([^"]+)" value="([^"]*)"', text
    ):
        # A browser sends each line break as CR LF.
        sent.setdefault(name, []).append(
            re.sub("\r\n|\r|\n", "\r\n", html.unescape(value))
        )
    if 'name="reason"' in text:
        sent["reason"] = ["tests"]
    return sent


def told(text: str) -> str:
    """Return the messages of a page."""
    return html.unescape(
        " ".join(
            re.findall(
                r'<li class="(?:success|warning|error)">(.*?)</li>', text, re.DOTALL
            )
        )
    )


def confirm(client: Client, form: dict) -> str:
    """Send the form of a confirmation page, and return the messages that follow."""
    return told(page(client.post(LIST, form, follow=True)))


def actions(text: str) -> set[str]:
    return set(re.findall(r'<option value="(\w+)">', text))


def buttons(text: str) -> list[tuple[str, str]]:
    """Return the classes and the words of the buttons on a page."""
    return re.findall(
        r'<(?:button|a)\b[^>]* class="(button[^"]*)"[^>]*>([^<]*)</(?:button|a)>', text
    )


def log() -> list[tuple[str, str, str]]:
    return [
        (entry.user.username, entry.object_id, entry.change_message)
        for entry in LogEntry.objects.order_by("pk")
    ]


@pytest.mark.django_db
class TestPages:
    def test_rows_cannot_be_added_changed_or_deleted(self, boss):
        """Not even a superuser can edit rows: every field is read-only."""
        rows.held("a")
        assert boss.get(LIST + "add/").status_code == 403
        assert boss.post(LIST + "add/", {"key_resource": "b"}).status_code == 403
        delete = reverse("admin:dlocks_resourcelock_delete", args=["a"])
        assert boss.get(delete).status_code == 403
        assert boss.post(delete, {"post": "yes"}).status_code == 403
        assert actions(page(boss.get(LIST))) == {CLEAR, FORCE, "delete_unused_rows"}
        text = page(boss.get(detail("a")))
        assert 'name="_save"' not in text
        assert 'name="holder"' not in text
        assert boss.post(detail("a"), {"holder": "me"}).status_code == 403
        assert rows.now("a").holder == "web-1:4711:MainThread"
        assert ResourceLock.objects.count() == 1

    @pytest.mark.storage
    def test_the_list_shows_holders_and_times(self, viewer):
        """The list shows who holds which key, since when and for how long.

        Its columns are key, state, holder, hold count, IP, age and time left. The title
        of an age is the time. The page of a lock adds its token. The list can be
        filtered by state, and searched by key, holder and IP.
        """
        rows.held(
            "stock:7 🔒 50%",
            begin_time=rows.PAST,
            hold_count=3,
            version=1234567,
            holder="web-9:1:t",
            owner_ip="198.51.100.4",
        )
        rows.stale("report", owner_ip="2001:db8::1")
        rows.free("old")
        text = page(viewer.get(LIST, {"state": "nonsense"}))
        for shown in (
            "stock:7",
            "web-9:1:t",
            "198.51.100.4",
            "web-1:4711:MainThread",
            "2020-01-01 22:04:05",
            "×3",
        ):
            assert shown in text
        assert ">1234567<" in page(viewer.get(detail("stock:7 🔒 50%")))
        assert re.search(r'class="field-left">\d+ days<', text)
        assert re.search(r'class="field-left">expired \d+ days ago<', text)
        assert re.search(r'class="field-begin"><time [^>]*>\d+ days ago<', text)
        for state in ("held", "stale", "free"):
            # A lock of years is shown as long.
            word = f'<span class="dlocks-state dlocks-{state}">{state}</span>'
            assert (word in text) == (state != "held"), state
        assert "dlocks/admin.css" in text
        for state, key in (
            ("held", "stock:7 🔒 50%"),
            ("stale", "report"),
            ("free", "old"),
        ):
            shown = page(viewer.get(LIST, {"state": state}))
            found = re.findall(r'<bdi class="dlocks-key">([^<]*)<', shown)
            assert found == [key], state
        words = "stock web-9 198.51.100 🔒 50%"
        assert "1 result" in page(viewer.get(LIST, {"q": words}))
        assert "0 results" in page(viewer.get(LIST, {"q": f"{words} report"}))

    def test_the_holder_of_a_free_key_is_its_last_one(self, viewer):
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

    def test_each_action_has_the_same_words_and_style_on_every_page(self, boss):
        """On the page of a lock, its actions come before the button that closes it."""
        rows.stale("a")
        rows.shares("a", 7)
        rows.dead("a")
        rows.free("b")
        live = page(boss.get(f"{LIST}live/"))
        text = page(boss.get(detail("a")))
        asked = page(boss.post(LIST, {"action": FORCE, "_selected_action": ["a"]}))
        confirm = [("button dlocks-force", "Force release")]
        assert buttons(live).count(confirm[0]) == 2
        assert buttons(text) == [
            *confirm,
            ("button", "Clear stale locks"),
            ("button", "Close"),
            *confirm,
            ("button dlocks-force", "Remove from the queue"),
        ]
        assert buttons(asked) == [*confirm, ("button cancel-link", "No, take me back")]
        claim = LockClaim.objects.get(version=None)
        form = {"action": FORCE, "_selected_action": ["a"], "only": f"claim:{claim.pk}"}
        asked = page(boss.post(LIST, form))
        assert buttons(asked)[0] == ("button dlocks-force", "Remove from the queue")
        assert "Force release" not in asked
        ResourceLock.objects.filter(pk="b").update(end_time=rows.PAST)
        form = {"action": "delete_unused_rows", "_selected_action": ["b"]}
        assert buttons(page(boss.post(LIST, form)))[0] == (
            "button dlocks-force",
            "Delete unused rows",
        )

    def test_odd_query_strings_are_harmless(self, viewer, boss):
        """Any query string returns the list or is rejected.

        The list does not reveal the owner letter by letter through filters.
        """
        rows.held("a")
        for query in (
            {"q": "'; DROP TABLE x; --"},
            {"q": "a\0b"},
            {"p": "9999"},
            {"o": "1.-2.3.4.5.6.7.8.9"},
            {"all": ""},
        ):
            page(viewer.get(LIST, query, follow=True))
        for lookup in ("", "__startswith", "__regex", "__in"):
            assert boss.get(LIST, {f"owner{lookup}": "0\0"}).status_code == 400, lookup
        assert boss.get(LIST, {"holder": "0\0"}).status_code == 400

    def test_the_list_is_paginated(self, viewer):
        """A long list is split into pages."""
        for number in range(150):
            rows.free(f"key:{number:03}")
        first, second = page(viewer.get(LIST)), page(viewer.get(LIST, {"p": 2}))
        assert len(re.findall(r">key:\d+<", first)) == 100
        assert len(re.findall(r">key:\d+<", second)) == 50

    def test_odd_keys_are_escaped_and_reachable(self, boss):
        """Any key is displayed safely, and its page and history can be opened.

        A key passes through the forms unchanged: it is cleared or released, and no
        other key.
        """
        for key in (*ODD_KEYS, "ab"):
            rows.held(key)
        texts = [page(boss.get(LIST))]
        links = set(
            map(html.unescape, re.findall(r'href="([^"]+/change/[^"]*)"', texts[0]))
        )
        assert len(links) == len(ODD_KEYS) + 1
        texts += [page(boss.get(link)) for link in links]
        for missing in ("nope/change/", "a%00b/change/", "nope/history/"):
            # It redirects to the list with a message.
            assert boss.get(LIST + missing).status_code == 302, missing
        assert all("web-1:4711:MainThread" in text for text in texts)
        texts.append(act(boss, FORCE, *ODD_KEYS))
        texts.append(page(boss.post(LIST, fields(texts[-1]), follow=True)))
        count = len(ODD_KEYS)
        assert f"The release of {count} locks was forced" in told(texts[-1])
        assert {rows.now(key).state for key in ODD_KEYS} == {"free"}
        for key in ODD_KEYS[::3]:
            address = reverse("admin:dlocks_resourcelock_history", args=[quote(key)])
            texts.append(page(boss.get(address)))
        ResourceLock.objects.update(status=rows.P, end_time=rows.PAST)
        texts.append(page(boss.get(LIST)))
        values = re.findall(
            r'type="checkbox" name="_selected_action" value="([^"]*)"', texts[-1]
        )
        chosen = [html.unescape(value) for value in values if value != "ab"]
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

    def test_the_owner_is_on_no_page(self, boss):
        """No page reveals the owner: not the list, detail, history or confirmation."""
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

    @pytest.mark.driver
    def test_times_are_in_the_current_time_zone(self, settings, boss):
        """Times are in the current time zone whatever ``USE_TZ`` is."""
        rows.stale("a", begin_time=rows.PAST)
        for use_tz in (True, False):
            settings.USE_TZ = use_tz
            for text in (
                page(boss.get(LIST)),
                page(boss.get(detail("a"))),
                act(boss, FORCE, "a"),
            ):
                assert re.search(
                    '<time datetime="2020-01-02T03:04:05\\+00:00" title="2020-01-01'
                    r' 22:04:05">\d+ days ago</time>',
                    text,
                ), use_tz
        assert "1 stale lock was cleared: a" in told(act(boss, CLEAR, "a"))

    def test_the_list_reads_the_database_of_the_locks(self, settings, monkeypatch):
        """The list reads the database that the default alias uses for its locks."""
        monkeypatch.setitem(connections.settings, "x", connections.settings["default"])
        settings.DLOCKS = {
            "default": {
                "BACKEND": "dlocks.backends.database.InsertBackend",
                "OPTIONS": {"database": "x"},
            }
        }
        request = RequestFactory().get(LIST)
        assert site.get_model_admin(ResourceLock).get_queryset(request).db == "x"

    def test_the_list_opens_without_a_database_backend(self, settings, boss):
        """Without a database backend the list still opens, but offers no actions."""
        rows.stale("a")
        settings.DLOCKS = {
            "default": {"BACKEND": "dlocks.backends.memory.MemoryBackend"}
        }
        assert not actions(page(boss.get(LIST)))
        act(boss, CLEAR, "a")
        assert rows.now("a").version == 1000


@pytest.mark.django_db
class TestClear:
    def test_the_page_of_a_lock_clears_only_the_hold_it_showed(self, clearer):
        """A form clears only the hold that its page showed, not a later stale hold."""

        def shown():
            text = page(clearer.get(detail("a")))
            return list(
                map(html.unescape, re.findall(r'name="shown" value="([^"]+)"', text))
            )

        rows.stale("a", version=1000)
        form = {"action": CLEAR, "_selected_action": ["a"], "shown": shown()}
        assert len(form["shown"]) == 1
        ResourceLock.objects.filter(pk="a").delete()
        rows.stale("a", version=2000)
        assert "no longer stale" in confirm(clearer, form)
        assert rows.now("a").status == rows.P
        text = page(clearer.post(LIST, {**form, "shown": shown()}, follow=True))
        assert "1 stale lock was cleared: a" in text
        assert rows.now("a").status == rows.F

    @pytest.mark.driver
    def test_stale_locks_are_cleared_and_logged(self, clearer):
        """Stale locks become free; the message names them, the log names the user.

        A held lock is never cleared, also with the fields of a confirmation form. The
        message names it, and locks that are already free or no longer exist. A lock
        that has left the filter since the list was shown is reported too.
        """
        for key in "abc":
            rows.stale(key)
        rows.held("alive")
        rows.free("free")
        act(clearer, CLEAR, "alive", version="1000", post="yes")
        keys = ("a", "b", "alive", "free", "gone", "nul\0")
        text = told(act(clearer, CLEAR, *keys, query="?state=stale"))
        assert "2 stale locks were cleared: a, b" in text
        assert "1 lock was left unchanged (not stale): alive" in text
        assert "1 lock was left unchanged (already free): free" in text
        assert "2 locks were left unchanged (the row no longer exists): gone" in text
        assert [rows.now(key).state for key in "abc"] == ["free", "free", "stale"]
        assert (rows.now("alive").version, rows.now("free").version) == (1000, 1000)
        assert rows.now("a").status == "F"
        assert [entry[:2] for entry in log()] == [("clearer", "a"), ("clearer", "b")]
        assert log()[0][2].startswith(
            "Cleared the stale lock held by web-1:4711:MainThread (192.0.2.7)"
        )
        entry = LogEntry.objects.get(object_id="a")
        assert (entry.is_change(), str(entry.get_edited_object())) == (True, "a")

    @pytest.mark.driver
    def test_a_lock_that_is_renewed_before_the_write_is_not_cleared(
        self, boss, monkeypatch
    ):
        """A lock that is renewed or acquired just before the write is not cleared.

        A lock that changes hands then is not released either.
        """
        rows.stale("a")
        rows.stale("b")
        rows.held("c")
        form = fields(act(boss, FORCE, "c"))
        backend, versions = backends["default"], {"a": 1000, "b": 1001, "c": 1001}
        clear = backend.clear

        def late(key, version, **options):
            changes = {"end_time": rows.FUTURE, "version": versions[key]}
            ResourceLock.objects.filter(pk=key).update(**changes)
            return clear(key, version, **options)

        monkeypatch.setattr(backend, "clear", late)
        text = told(act(boss, CLEAR, "a", "b"))
        assert "(not stale): a" in text
        assert "(acquired by another holder in the meantime): b" in text
        text = confirm(boss, form)
        assert "acquired by another holder in the meantime" in text
        found = {key: rows.now(key) for key in versions}
        assert {lock.state for lock in found.values()} == {"held"}
        assert {key: lock.version for key, lock in found.items()} == versions
        assert not log()

    def test_select_all_clears_every_stale_lock_of_the_list(self, clearer, monkeypatch):
        """ "Select all" clears every stale lock of the list, up to a limit."""
        monkeypatch.setattr(confirmation, "ROWS_PER_STATEMENT", 3)
        for number in range(3):
            rows.stale(f"s{number}")
            rows.held(f"h{number}")
        text = told(act(clearer, CLEAR, "h0", select_across="1"))
        assert "3 stale locks were cleared: s0, s1, s2" in text
        assert {
            lock.version for lock in ResourceLock.objects.filter(pk__startswith="h")
        } == {1000}
        assert "None of the selected locks is stale" in told(
            act(clearer, CLEAR, "h0", select_across="1")
        )
        for number in range(4):
            rows.stale(f"t{number}")
        assert "At most 3 locks" in told(act(clearer, CLEAR, "h0", select_across="1"))
        assert rows.now("t0").state == "stale"

    def test_messages_name_at_most_ten_locks(self, clearer):
        """A message about many locks names only ten of them, as text."""
        keys = ["<script>alert(1)</script>", *(f"k{number:02}" for number in range(11))]
        for key in keys:
            rows.stale(key)
        text = act(clearer, CLEAR, *keys)
        assert told(text).endswith(
            "12 stale locks were cleared: " + ", ".join(keys[:10]) + " and 2 more"
        )
        assert "<script>alert" not in text

    def test_a_failing_database_is_reported_by_the_admin(self, clearer, monkeypatch):
        """If the database fails half-way, the message names the locks and the error."""
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
        assert "1 stale lock was cleared: a" in text
        assert "he database is away" in text
        assert [entry[1] for entry in log()] == ["a"]


@pytest.mark.django_db
class TestForceRelease:
    def test_a_forced_release_needs_a_confirmation(self, releaser):
        """The confirmation page lists locks, holders and effects, and changes none."""
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
        assert "One selected lock is already free and is left out." in text
        assert fields(text)["version"] == ["1000", "1000"]
        assert fields(text)["_selected_action"] == ["a", "b"]
        assert [rows.now(key).version for key in "abc"] == [1000, 1000, 1000]
        assert not log()

    def test_a_lock_that_changed_hands_since_the_page_is_kept(self, releaser):
        """A lock that changed hands after the confirmation page is not released.

        The message names it.
        """
        rows.held("a")
        rows.held("b")
        form = fields(act(releaser, FORCE, "a", "b"))
        ResourceLock.objects.filter(pk="a").update(version=1001, holder="web-2:1:t")
        text = confirm(releaser, form)
        assert "The release of 1 lock was forced: b" in text
        assert (
            "1 lock was left unchanged (acquired by another holder in the meantime): a"
            in text
        )
        assert (rows.now("a").state, rows.now("a").version) == ("held", 1001)
        assert [entry[1] for entry in log()] == ["b"]

    def test_a_forged_confirmation_changes_nothing(self, releaser):
        """Without the right version nothing is released.

        If all selected locks are free, there is nothing to confirm.
        """
        rows.held("a")
        rows.free("b")
        text = told(act(releaser, FORCE, "b", "gone", "\0"))
        assert "None of the selected locks is still held" in text
        text = told(act(releaser, FORCE, "\0", version="1000"))
        assert "the row no longer exists" in text
        for versions in (["x"], ["1000", "1000"], ["9" * 5000], [""]):
            text = told(act(releaser, FORCE, "a", version=versions))
            assert "Nothing was changed" in text, versions
        guesses = ["-1", "0", "999", "9" * 40]
        for version in guesses:
            rows.held(version)
        act(releaser, FORCE, *guesses, version=guesses)
        assert [rows.now(key).version for key in ("a", *guesses)] == [1000] * 5

    def test_select_all_releases_only_the_filtered_locks(self, releaser, monkeypatch):
        """ "Select all" under a filter covers only the locks that the filter shows.

        A selection too large for Django's form limit is refused.
        """
        rows.held("h")
        rows.stale("s")
        rows.free("f")
        for query, shown in (("?state=stale", ["s"]), ("", ["h", "s"])):
            text = act(releaser, FORCE, "s", query=query, select_across="1")
            assert fields(text)["_selected_action"] == shown
        rows.held("i")
        monkeypatch.setattr(confirmation, "ROWS_PER_STATEMENT", 2)
        assert "At most 2 locks" in told(act(releaser, FORCE, "h", select_across="1"))


@pytest.mark.django_db(transaction=True)
def test_a_hold_of_ten_ttls_is_shown_in_amber(viewer):
    """Its release may be missing."""
    state = '<span class="dlocks-state dlocks-'
    with db_lock("stock:7"), db_lock("stock:8"):
        ResourceLock.objects.filter(pk="stock:7").update(begin_time=After(-301))
        for url in (LIST, f"{LIST}live/"):
            text = viewer.get(url).content.decode()
            assert text.count(f'{state}long">held for 5 minutes<') == 1, url
            assert text.count(f'{state}held">held</span>') == 1, url


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
    assert entries[1][2].startswith(
        "Forced the release of the lock held by web-1:4711:MainThread (192.0.2.7)"
    )
    text = confirm(releaser, form)
    assert "(already free): b, c" in text
    assert (rows.now("b").version, log()) == (lock.version, entries)


@pytest.mark.engine("postgresql", "mariadb", "mysql")
@pytest.mark.django_db(transaction=True)
def test_a_row_locked_by_a_transaction_blocks_no_page_or_action(boss, in_other_thread):
    """Pages and actions answer at once while a transaction has the row locked.

    The message says why the lock was not cleared.
    """
    rows.stale("a")
    rows.stale("b")
    with transaction.atomic():
        ResourceLock.objects.select_for_update().get(pk="a")
        # The row counts as held, whatever its lease says.
        for address in (detail("a"), LIST + "?state=held&q=a"):
            assert "a</bdi>" in page(in_other_thread(boss.get, address))
        assert "a</bdi>" not in page(
            in_other_thread(boss.get, LIST + "?state=stale&q=a")
        )
        text = told(in_other_thread(act, boss, CLEAR, "a", "b"))
        assert "1 stale lock was cleared: b" in text
        assert "1 lock was left unchanged (held by an open transaction" in text
        form = fields(in_other_thread(act, boss, FORCE, "a"))
        text = told(page(in_other_thread(boss.post, LIST, form, follow=True)))
        assert "(held by an open transaction" in text
    assert rows.now("a").version == 1000
    assert "The release of 1 lock was forced: a" in confirm(boss, form)


@pytest.mark.driver
@pytest.mark.django_db
def test_keys_of_other_prefixes_are_not_shown_or_released(boss, settings):
    """Two projects share a database and separate their keys by a prefix."""
    settings.DLOCKS = {"default": settings.DLOCKS["prefixed"]}
    for key in ("shop:1", "SHOP:2", "bank:3"):
        rows.held(key)
    text = page(boss.get(LIST))
    assert "shop:1" in text
    assert "SHOP:2" not in text
    assert "bank:3" not in text
    assert "bank:3" not in page(boss.get(f"{LIST}live/"))
    assert boss.get(detail("bank:3")).status_code == 302
    assert page(boss.get(detail("shop:1")))
    rows.claim("bank:3", rows.FUTURE, version=1000)
    for version in ("1000", "share:1000"):
        act(boss, FORCE, "bank:3", version=[version], confirmed="yes")
    assert rows.now("bank:3").status == rows.P
    assert LockClaim.objects.count() == 1
