"""The list of locks in the admin: a live page of the locks in use."""

import html
import math
import os
import re
from copy import copy
from datetime import UTC, datetime, timedelta

import pytest
from django.contrib.admin import site
from django.db import connection, connections, transaction
from django.test import RequestFactory
from django.test.utils import CaptureQueriesContext

from dlocks import LockBackendError, db_lock, db_rwlock, db_semaphore
from dlocks.models import LockClaim, ResourceLock
from dlocks.testing import held_elsewhere
from tests import rows
from tests.promises.admin.names import CLEAR, FORCE, HOSTILE, LIST, ODD_KEYS
from tests.promises.admin.pages import (
    act,
    actions,
    buttons,
    confirm,
    detail,
    end,
    fields,
    log,
    page,
    person,
    table_rows,
    text_of,
    told,
)
from tests.promises.interposed import REPORTING, Reporting

pytestmark = [pytest.mark.front, pytest.mark.django_db]


def keys(markup: str) -> list[str]:
    """Return the keys of the list."""
    return re.findall(r'<bdi class="dlocks-key" id="lock-[^>]*>([^<]*)', markup)


def row_of(markup: str, key: str) -> str:
    """Return the text of the row of a key."""
    every = map(text_of, table_rows(markup))
    (found,) = [row for row in every if row.startswith(f"{key} ")]
    return found


def totals(markup: str) -> str:
    (found,) = re.findall(r'<nav class="dlocks-states".*?</nav>', markup, re.DOTALL)
    return text_of(found)


def queries_of(client, **query) -> int:
    with CaptureQueriesContext(connection) as queries:
        page(client.get(LIST, query))
    return len(queries)


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
    text = page(viewer.get(LIST))
    assert re.search(
        r"busy held Holder web-1:4711:MainThread 192.0.2.7 Held for 7[5-9] s"
        r" 1[0-5] s left Waiters 5 worker-0:1:t .* and 2 more",
        row_of(text, "busy"),
    )
    assert "worker-2:1:t" in text
    assert "worker-3:1:t" not in text
    assert "stale" in row_of(text, "left")
    shared = row_of(text, "shared")
    assert shared.startswith("shared shared (4) ")
    for number in range(3):
        about = (
            rf"web-{number}:1:t 198.51.100.8 shared by up to 10, 7[5-9] s , 1[0-5] s"
        )
        assert re.search(f"{about} left", shared)
    assert "web-3:1:t" not in shared
    about = r"gone:1:t \S+ stale shared, \d+ days , expired \d+ days ago"
    assert re.search(about, shared)
    assert "and 1 more" in shared
    assert re.search(r"\d\.\d s 8 minutes left", row_of(text, "long"))
    assert "dlocks-bar" not in text
    shown = keys(text)
    assert shown[:2] == ["busy", "left"]
    assert shown.index("old") < shown.index("new") < shown.index("long")
    assert "free" not in shown
    assert totals(text) == "6 in use 4 held 1 shared 1 stale 5 waiting free"
    # A transaction that the page cannot see has the row locked.
    rows.waits("free")
    row = row_of(page(viewer.get(LIST)), "free")
    assert "Waiters 1 worker-1:815:MainThread" in row


@pytest.mark.driver
def test_free_keys_are_under_a_filter(viewer):
    """They have their last holder, and are in no total."""
    rows.free("old", version=10**15)
    rows.held("new")
    assert keys(page(viewer.get(LIST))) == ["new"]
    text = page(viewer.get(LIST, {"state": "free"}))
    assert keys(text) == ["old"]
    assert "last holder: web-1:4711:MainThread" in text
    assert totals(text) == "1 in use 1 held 0 shared 0 stale 0 waiting free"
    text = page(viewer.get(LIST, {"q": "ol"}))
    assert keys(text) == []
    (link,) = re.findall(r'href="([^"]*)">Search free keys', text)
    assert keys(page(viewer.get(LIST + html.unescape(link)))) == ["old"]


def test_the_totals_and_the_rows_are_of_one_reading(viewer, monkeypatch):
    """What changes between two statements of a page contradicts nothing on it."""
    rows.held("a")
    rows.waits("a")
    rows.free("b")
    rows.shares("b", 7)

    def change(execute, sql, parameters, many, context):
        found = execute(sql, parameters, many, context)
        if "ORDER BY" in sql and "dlocks_resourcelock" in sql:
            # All of it ends after the statement that reads the locks.
            with connection.cursor() as cursor:
                cursor.execute("DELETE FROM dlocks_lockclaim")
                cursor.execute("UPDATE dlocks_resourcelock SET hold_count = 0")
        return found

    with connection.execute_wrapper(change):
        text = page(viewer.get(LIST))
    assert totals(text) == "2 in use 1 held 1 shared 0 stale 1 waiting free"
    assert row_of(text, "a").endswith("Waiters 1")
    assert row_of(text, "b") == "b shared (1)"
    rows.waits("a", holder="late:1:t")
    ResourceLock.objects.update(waiters=0)

    def add(execute, sql, parameters, many, context):
        found = execute(sql, parameters, many, context)
        if "ORDER BY" in sql and "dlocks_resourcelock" in sql:
            LockClaim.objects.filter(holder="late:1:t").update(end_time=rows.FUTURE)
        return found

    LockClaim.objects.update(end_time=rows.PAST)
    rows.waits("a", holder="first:1:t")
    with connection.execute_wrapper(add):
        text = row_of(page(viewer.get(LIST)), "a")
    assert "Waiters 1" in text
    assert text.count(":1:t") == 1


@pytest.mark.driver
def test_the_list_can_be_searched_and_filtered(viewer):
    """The totals are those of the search, whatever the filter."""
    assert "No lock is held, and none has waiters." in page(viewer.get(LIST))
    rows.held("stock:1", holder="web-9:1:t", owner_ip="198.51.100.4")
    rows.waits("stock:1")
    rows.held("stock:2")
    rows.stale("report")
    rows.free("catalogue")
    rows.shares("catalogue", 7)
    every = ["stock:1", "report", "catalogue", "stock:2"]
    for query, shown, counts in (
        ({}, every, "4 in use 2 held 1 shared 1 stale 1 waiting free"),
        ({"q": "stock"}, ["stock:1", "stock:2"], "2 in use 2 held 0 shared 0 stale 1"),
        ({"q": "198.51.100 web-9"}, ["stock:1"], "1 in use 1 held"),
        ({"state": "waiting"}, ["stock:1"], "4 in use 2 held 1 shared 1 stale 1"),
        ({"state": "stale"}, ["report"], "4 in use"),
        ({"state": "held"}, ["stock:1", "stock:2"], "4 in use"),
        ({"state": "shared"}, ["catalogue"], "4 in use"),
        ({"state": "stale", "q": "stock"}, [], "2 in use 2 held 0 shared 0 stale"),
        ({"state": "nonsense", "q": " "}, every, "4 in use"),
    ):
        text = page(viewer.get(LIST, query))
        assert sorted(keys(text)) == sorted(shown), query
        assert totals(text).startswith(counts), query
        assert ("No lock matches" in text) == (not shown)
    ResourceLock.objects.filter(pk="report").delete()
    assert "No lock is stale." in page(viewer.get(LIST, {"state": "stale"}))


def test_the_links_of_the_list_keep_search_and_filter(viewer):
    """This includes the addresses from which the script refreshes the page."""
    rows.stale("b")
    for number in range(51):
        rows.stale(f"a&{number:02}")
    text = page(viewer.get(LIST, {"q": "a&", "state": "stale"}))
    kept = "q=a%26&amp;state=stale"
    assert f'data-part="?{kept}&amp;part=now"' in text
    assert '<input type="hidden" name="state" value="stale">' in text
    part = page(viewer.get(LIST, {"q": "a&", "state": "stale", "part": "now"}))
    assert len(keys(part)) == 50
    (last,) = re.findall(r'href="([^"]*)"[^>]*>2</a>', part)
    assert "part" not in last
    assert len(keys(page(viewer.get(LIST + html.unescape(last))))) == 1
    # A page number that is too large, or is none, is ignored.
    for number, shown in {"x": 50, "0": 50, "-1": 50, "9": 2}.items():
        assert len(keys(page(viewer.get(LIST, {"p": number})))) == shown, number


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
    text = page(viewer.get(LIST))
    assert len(keys(text)) == 50
    assert "1001 locks" in text_of(text)
    assert len(keys(page(viewer.get(LIST, {"p": 21})))) == 1


def test_a_part_of_the_list_is_rendered_alone(releaser):
    """The script fetches only the part that it refreshes.

    The page has no inline script or style. So the strictest content security policy can
    forbid them. Without the history the page says how to enable it.
    """
    rows.held("a")
    part = page(releaser.get(LIST, {"part": "now"}))
    assert row_of(part, "a")
    assert "<html" not in part
    text = page(releaser.get(LIST))
    assert "The history is off" in text
    assert '"OPTIONS": {"history": True}' in html.unescape(text)
    assert "dlocks-chart" not in text
    assert "history is off" in page(releaser.get(LIST, {"part": "past"}))
    inline = r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=|javascript:"
    assert not re.search(inline, text)
    assert not re.search(r"\s(src|href)=\"(https?:)?//", text)


@pytest.mark.usefixtures("with_history")
def test_each_key_shows_its_last_hour(historian, viewer):
    """A small chart has the releases of each minute, and those after a wait.

    Only a user who may see ended holds sees it.
    """
    for key in ("busy", "quiet"):
        rows.held(key)
    for ago, waited in ((90.0, 0.0), (100.0, 2.0), (1830.0, 0.0), (4000.0, 1.0)):
        rows.ended("busy", ago=ago, waited=waited)

    def bars(client, key):
        every = table_rows(page(client.get(LIST)))
        (drawn,) = [one for one in every if f">{key}</bdi>" in one]
        found = re.findall(r'class="dlocks-(\w+)" x="(\d+)" [^>]*height="(\d+)"', drawn)
        return [one for one in found if one[2] != "0"]

    recent = [("all", "58", "100"), ("waited", "58", "50")]
    assert bars(historian, "busy") == [*recent, ("all", "29", "50")]
    assert bars(historian, "quiet") == []
    assert bars(viewer, "busy") == []


def test_rows_cannot_be_added_changed_or_deleted(boss):
    """Not even by a superuser."""
    rows.held("a")
    for address, data in (
        (f"{LIST}add/", {"key_resource": "b"}),
        (detail("a", "delete"), {"post": "yes"}),
        (detail("a"), {"holder": "me"}),
    ):
        assert boss.post(address, data).status_code == 403
        assert address == detail("a") or boss.get(address).status_code == 403
    assert actions(page(boss.get(LIST))) == {CLEAR, FORCE}
    text = page(boss.get(detail("a")))
    assert 'name="_save"' not in text
    assert 'name="holder"' not in text
    assert ResourceLock.objects.get().holder == "web-1:4711:MainThread"


def test_odd_query_strings_are_harmless(viewer, boss):
    """Any query string returns the list or is rejected.

    The list does not reveal the owner letter by letter through filters.
    """
    rows.held("a")
    for query in (
        {"q": "'; DROP TABLE x; --"}, {"q": "a\0b"}, {"p": "9999"},
        {"o": "1.-2.3.4.5.6.7.8.9"}, {"all": ""}, {"state": "\0"}, {"part": "\0"},
        {"alias": "\0"},
    ):  # fmt: skip
        page(viewer.get(LIST, query, follow=True))
    for lookup in ("owner", "owner__startswith", "owner__regex", "owner__in", "holder"):
        assert boss.get(LIST, {lookup: "0"}).status_code == 400, lookup


@pytest.mark.usefixtures("with_history")
def test_odd_keys_are_escaped_and_reachable(boss):
    """Any key and holder are shown as text, and the pages of a key can be opened.

    The page of a key shows only that key. A key passes through the forms unchanged: it
    is cleared or released, and no other key.
    """
    every, count = {*ODD_KEYS, HOSTILE, "ab"}, len(ODD_KEYS)
    for key in every:
        rows.held(key, holder=HOSTILE, begin_time=datetime.now(UTC))
        rows.ended(key, holder=HOSTILE)
    rows.waits(HOSTILE, holder=HOSTILE)
    texts = [page(boss.get(LIST))]
    links = re.findall(r'href="([^"]+/change/[^"]*)"><bdi', texts[0])
    links = set(map(html.unescape, links))
    assert links == set(map(detail, every))
    texts += [page(boss.get(link)) for link in links]
    for text in texts:
        assert HOSTILE in html.unescape(text)
        sent = [form["force_release"] for form in buttons(text)]
        assert len(sent) == (len(every) if text is texts[0] else 1)
        assert not set("\r\n") & set("".join(sent))
    for missing in ("a%00b/change/", f"{'x' * 256}/change/", "a%00b/history/"):
        # It redirects to the list with a message.
        assert boss.get(LIST + missing).status_code == 302, missing
    texts.append(act(boss, FORCE, *ODD_KEYS))
    texts.append(end(boss, fields(texts[-1])))
    assert f"The release of {count} locks was forced" in told(texts[-1])
    assert {rows.now(key).state for key in ODD_KEYS} == {"free"}
    texts += [page(boss.get(detail(key, "history"))) for key in ODD_KEYS[::3]]
    ResourceLock.objects.update(status=rows.P, end_time=rows.PAST)
    texts.append(page(boss.get(LIST)))
    checkbox = r'type="checkbox" name="_selected_action" value="([^"]*)"'
    values = map(html.unescape, re.findall(checkbox, texts[-1]))
    chosen = [value for value in values if value not in {"ab", HOSTILE}]
    assert len(chosen) == count
    assert not set("\r\n") & set("".join(chosen))
    data = {"action": CLEAR, "_selected_action": chosen}
    texts.append(page(boss.post(LIST, data, follow=True)))
    assert f"{count} stale locks were cleared" in told(texts[-1])
    assert {rows.now(key).state for key in ODD_KEYS} == {"free"}
    assert rows.now("ab").state == "stale"
    assert {key for _, key, _ in log()} == set(ODD_KEYS)
    for text in texts:
        assert "<img" not in text
        assert "<script>alert" not in text
        assert "\u202e" not in re.sub("<(?:input|button)[^>]*>", "", text)


def test_the_owner_is_on_no_page(boss):
    """Each test looks for it on its pages, by ``page()``. A search does not find it."""
    rows.held("a")
    form = fields(act(boss, FORCE, "a"))
    assert keys(boss.get(LIST, {"q": rows.OWNER}).content.decode()) == []
    confirm(boss, form)
    for address in (LIST, detail("a"), detail("a", "history"), "/admin/"):
        assert ">owner<" not in page(boss.get(address)).lower()
    assert rows.OWNER[:8] not in str(log())


@pytest.mark.driver
@pytest.mark.parametrize("use_tz", [True, False])
def test_times_are_in_the_current_time_zone(use_tz, settings, boss):
    rows.stale("a", begin_time=rows.PAST)
    settings.USE_TZ = use_tz
    shown = r'<time title="2020-01-01 22:04:05">\d+ days</time>'
    for text in (
        page(boss.get(LIST)),
        page(boss.get(detail("a"))),
        act(boss, FORCE, "a"),
    ):
        assert re.search(shown, text)
    assert "1 stale lock was cleared: a" in told(act(boss, CLEAR, "a"))


def test_the_list_reads_the_database_of_the_locks(settings, monkeypatch):
    monkeypatch.setitem(connections.settings, "x", connections.settings["default"])
    backend = "dlocks.backends.database.InsertBackend"
    options = {"OPTIONS": {"database": "x"}}
    settings.DLOCKS = {"default": {"BACKEND": backend, **options}}
    request = RequestFactory().get(LIST)
    assert site.get_model_admin(ResourceLock).get_queryset(request).db == "x"


def test_a_hold_of_ten_of_its_ttls_is_in_amber(viewer, settings):
    """Its release may be missing. A row says only how much is left of the ttl.

    The option ``slow_hold`` sets another limit. A leader leads for as long as it lives.
    """
    now = datetime.now(UTC)
    for key, age, left in (
        ("slow", 451, 29.9), ("own ttl", 451, 500), ("new", 9, 29),
        ("leader:scheduler", 9999, 29),
    ):  # fmt: skip
        since, until = now - timedelta(seconds=age), now + timedelta(seconds=left)
        rows.write(key, rows.P, until, begin_time=since)
    rows.stale("stale", begin_time=now - timedelta(days=1))

    def amber():
        found = [row for row in table_rows(page(viewer.get(LIST))) if "-long" in row]
        return set(keys("".join(found)))

    assert amber() == {"slow"}
    default = {**settings.DLOCKS["default"], "OPTIONS": {"slow_hold": 5}}
    settings.DLOCKS = {**settings.DLOCKS, "default": default}
    assert amber() == {"slow", "own ttl", "new"}


@pytest.mark.django_db(transaction=True)
def test_a_released_key_rests_for_its_min_hold(viewer):
    """It is not held any more, and not free."""
    with db_lock("report", min_hold=600):
        assert "resting" not in row_of(page(viewer.get(LIST)), "report")
    assert "report resting (min_hold) " in row_of(page(viewer.get(LIST)), "report")
    assert "resting (min_hold)" in text_of(page(viewer.get(detail("report"))))


@pytest.mark.django_db(transaction=True)
def test_a_released_permit_rests_but_a_reserved_key_does_not(viewer):
    """A key is reserved for a while for the transaction of the next waiter."""
    with db_semaphore("pool", 2, min_hold=600):
        assert "resting" not in text_of(page(viewer.get(detail("pool"))))
    assert "resting (min_hold)" in text_of(page(viewer.get(detail("pool"))))
    rows.write("report", rows.S, rows.FUTURE, hold_count=1)
    assert "report held " in row_of(page(viewer.get(LIST)), "report")


@pytest.mark.engine("postgresql", "mariadb", "mysql")
@pytest.mark.django_db(transaction=True)
def test_a_row_locked_by_a_transaction_blocks_no_page_or_action(
    boss, in_other_thread, until
):
    """Pages and actions answer at once while a transaction has the row locked.

    The message says why the lock was not cleared, released or removed.
    """
    for key in "ab":
        rows.stale(key)
    rows.stale_share("a", 1001)
    dead = rows.dead("a")
    with transaction.atomic():
        ResourceLock.objects.select_for_update().get(pk="a")
        # The row counts as held, whatever its lease says. A process looks once a
        # second, and a page of another test may have done so just before.
        one = detail("a")
        until(lambda: "held, in a transaction" in page(in_other_thread(boss.get, one)))
        for address, is_shown in (
            (one, True),
            (LIST, True),
            (f"{LIST}?state=held&q=a", True),
            (f"{LIST}?state=stale&q=a", False),
        ):
            text = page(in_other_thread(boss.get, address))
            assert ("a</bdi>" in text) is is_shown
            assert ("held, in a transaction" in text) is is_shown
        text = told(in_other_thread(act, boss, CLEAR, "a", "b"))
        assert "1 stale lock was cleared: b" in text
        assert "left unchanged (held by an open transaction" in text
        for name, target in (
            ("force_release", "lock 1000"),
            ("force_release", "share 1001"),
            ("clear", f"claim {dead.pk}"),
        ):
            form = {name: f"{target} a", "reason": "tests"}
            text = in_other_thread(confirm, boss, form)
            assert "(held by an open transaction" in text
    assert (rows.now("a").version, LockClaim.objects.count()) == (1000, 2)
    form = fields(act(boss, FORCE, "a"))
    assert "forced: a" in confirm(boss, form)


def test_a_subclass_of_the_admin_may_add_to_each_page(rf, admin_user):
    rows.held("stock:7")
    locks, more = site.get_model_admin(ResourceLock), {"title": "Ours"}
    for alias, view, key in (
        ("default", locks.changelist_view, []),
        ("memory", locks.changelist_view, []),
        ("default", locks.change_view, ["stock:7"]),
    ):
        request = rf.get(LIST, {"alias": alias})
        request.user = admin_user
        response = view(request, *key, extra_context=more)
        assert "Ours" in text_of(response.render().content.decode())


def test_the_index_and_the_sidebar_lead_to_the_list(viewer):
    """It is the only page of locks in them."""
    for address in ("/admin/", "/admin/dlocks/", LIST):
        assert f'<a href="{LIST}"' in page(viewer.get(address))
    assert LIST not in page(person("other", "clear_resourcelock").get("/admin/"))


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
        one.release()


def test_holds_without_rows_are_listed(releaser, in_memory):
    """Key, state, holder, IP, age, time left, waiters and token are shown.

    The script fetches only the table, less often than that of rows.
    """
    text = page(releaser.get(LIST, {"alias": "other"}))
    table = text[text.index('id="dlocks-holds"') :]
    _, first, *shares = map(text_of, table_rows(table))
    about = rf"192\.0\.2\.7 \S+ s \d+ s left 1 {in_memory.token}"
    who = "held exclusive web-1:4711:MainThread"
    assert re.fullmatch(rf"{re.escape(HOSTILE)} {who} {about}", first)
    assert [row.split()[:3] for row in shares] == [["shared", "held", "shared"]] * 2
    assert "Force release" not in text
    assert "history is off" not in text_of(text)
    assert "<script>alert" not in text
    parts = re.findall('data-part="([^"]*)" data-every="([^"]*)"', text)
    assert parts == [("?alias=other&amp;part=now", "10")]
    part = page(releaser.get(LIST, {"alias": "other", "part": "now"}))
    assert "<html" not in part
    assert "4711" in part


def test_a_backend_without_holds_or_answer_is_reported(
    viewer, in_memory, monkeypatch, settings
):
    """The page shows the error instead of the table. A hidden holder is hidden.

    A backend need not know the lease or the age of a hold. A site without locks in its
    database begins with the other alias.
    """

    def shown(**query):
        return text_of(page(viewer.get(LIST, {"alias": "other", **query})))

    def fail(backend):
        raise LockBackendError("Redis is away")

    settings.DLOCKS_SHOW_HOLDER = False
    text = shown()
    for fact in ("web-1", ":4711:", f":{os.getpid()}:", "192.0.2.7"):
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
        assert "mine" in page(viewer.get(LIST))
