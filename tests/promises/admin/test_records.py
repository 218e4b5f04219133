"""The admin of ended holds: the history, read-only."""

import html
import re

import pytest
from django.urls import reverse

from dlocks.models import HoldRecord
from tests import rows
from tests.promises.admin.names import HOSTILE, LIST, ODD_KEYS, RECORDS
from tests.promises.admin.pages import detail as key_page
from tests.promises.admin.pages import page, person, text_of

pytestmark = [pytest.mark.front, pytest.mark.django_db]


@pytest.fixture
def reader(db):
    return person("reader", "view_holdrecord")


def detail(record, name="change") -> str:
    return reverse(f"admin:dlocks_holdrecord_{name}", args=[record.pk])


def keys(text: str) -> list[str]:
    found = re.findall(r'<a href="[^"]*/change/[^"]*"><bdi [^>]*>([^<]*)', text)
    return list(map(html.unescape, found))


def test_records_cannot_be_changed(client, boss, viewer):
    """Not even a superuser can add, change or delete one.

    The permission to view locks is not enough to view the records.
    """
    record = rows.ended("a")
    for other in (client, viewer):
        for address in (RECORDS, detail(record)):
            assert other.get(address).status_code in (302, 403)
    assert 'name="action"' not in page(boss.get(RECORDS))
    assert 'name="_save"' not in page(boss.get(detail(record)))
    for address in (f"{RECORDS}add/", detail(record), detail(record, "delete")):
        assert boss.post(address, {"post": "yes"}).status_code == 403
    assert HoldRecord.objects.count() == 1


@pytest.mark.driver
def test_the_list_shows_the_last_holds_first(reader, settings):
    """It shows how each hold ended, its holder, its times.

    It can be filtered, searched and sorted, whatever ``USE_TZ`` is.
    """
    rows.ended("new", ago=60, held=1)
    rows.ended("lost", ago=7200, held=90, waited=3.5, token=7, ending="L")
    rows.ended("old", ago=400_000, held=95, holder="web-9:1:t")
    text = page(reader.get(RECORDS, {"ended": "nonsense"}))
    assert keys(text) == ["new", "lost", "old"]
    who = "web-1:4711:MainThread 192.0.2.7"
    assert re.search(
        rf"lost lost Holder {who} Ended 2 hours ago Held for 90 s Waited 3.5 s ",
        text_of(text),
    )
    for query, shown in (
        ({"ending__exact": "L"}, ["lost"]),
        ({"ended": "3600"}, ["new"]),
        ({"ended": "86400"}, ["new", "lost"]),
        ({"q": "old web-9"}, ["old"]),
        ({"o": "0"}, ["lost", "new", "old"]),
        ({"o": "4"}, ["new", "lost", "old"]),
    ):
        assert keys(page(reader.get(RECORDS, query))) == shown, query
    settings.USE_TZ = not settings.USE_TZ
    record = rows.ended("next", ago=60)
    assert re.search(r"\b6\d s ago", page(reader.get(detail(record))))
    assert keys(page(reader.get(RECORDS, {"ended": "3600"}))) == ["next", "new"]


def test_a_hidden_holder_stays_hidden(reader, settings):
    """It can neither be read, nor searched, nor guessed by a lookup or a sort."""
    record = rows.ended("a")
    for show in ("name", False):
        settings.DLOCKS_SHOW_HOLDER = show
        for address in (RECORDS, detail(record)):
            text = page(reader.get(address))
            assert "web-1" not in text
            assert "192.0.2.7" not in text
        assert "0 results" in page(reader.get(RECORDS, {"q": "web-1"}))
    settings.DLOCKS_SHOW_HOLDER = True
    for lookup in ("holder", "holder__startswith", "owner_ip"):
        assert reader.get(RECORDS, {lookup: "web"}).status_code == 400, lookup


def test_odd_keys_and_holders_are_text(reader):
    records = [rows.ended(key, holder=HOSTILE) for key in (*ODD_KEYS, HOSTILE)]
    for address in (RECORDS, *map(detail, records[::3])):
        text = page(reader.get(address))
        for markup in ("<img src=x", "<script>alert", "\u202e"):
            assert markup not in text


def test_the_page_of_a_key_links_to_its_records(reader, viewer, historian, settings):
    """Users who may not view the records do not get the link."""
    settings.DLOCKS = {"default": settings.DLOCKS["recorded"]}
    record = rows.ended("a&b")
    assert f'href="{RECORDS}?q=a%26b"' in page(historian.get(key_page("a&b")))
    assert keys(page(historian.get(RECORDS, {"q": "a&b"}))) == ["a&b"]
    assert f'href="{LIST}"' in page(historian.get(RECORDS))
    text = page(historian.get(detail(record)))
    assert f'href="{key_page("a&b")}"' in text
    assert ">1<" in text
    assert RECORDS not in page(viewer.get(LIST))
    assert LIST not in page(reader.get(RECORDS))


def test_a_nul_in_a_filter_is_harmless(reader):
    """PostgreSQL raises an error for it in a parameter of a query."""
    for query in ({"ending__exact": "\0"}, {"ended": "\0"}, {"q": "\0"}):
        page(reader.get(RECORDS, query, follow=True))


@pytest.mark.usefixtures("with_history")
def test_the_control_room_shows_the_history_only_with_its_permission(viewer, historian):
    """``view_resourcelock`` shows the locks, and ``view_holdrecord`` ended holds.

    This applies to the page, to the page of one key, and to each part that its script
    requests.
    """
    rows.ended("stock:7")
    queries = [
        (address, part)
        for address in (LIST, key_page("stock:7"))
        for part in ({}, {"part": "now"}, {"part": "hour"}, {"part": "past"})
    ]

    def texts(client):
        return [page(client.get(address, part)) for address, part in queries]

    assert sum("MainThread" in text for text in texts(historian)) >= 3
    for (_, query), text in zip(queries, texts(viewer), strict=True):
        assert "MainThread" not in text, query
        assert "Locks released" not in text, query
        assert "part=past" not in text, query
        assert "part=hour" not in text, query
        assert "part" in query or "part=now" in text
