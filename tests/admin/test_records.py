"""The admin of ended holds: the history, read-only."""

from __future__ import annotations

import html
import re

import pytest
from django.urls import reverse

from tests.admin.test_admin import ODD_KEYS, page, person
from tests.admin.test_control_room import HOSTILE, LIVE, ended
from tests.internals import HoldRecord

pytestmark = pytest.mark.front

RECORDS = "/admin/dlocks/holdrecord/"


@pytest.fixture
def viewer(db):
    return person("viewer", "view_holdrecord")


def detail(record) -> str:
    return reverse("admin:dlocks_holdrecord_change", args=[record.pk])


def keys(text: str) -> list[str]:
    return [
        html.unescape(key)
        for key in re.findall(r'<a href="[^"]*/change/[^"]*"><bdi [^>]*>([^<]*)', text)
    ]


@pytest.mark.django_db
class TestRecords:
    def test_records_cannot_be_changed(self, client):
        """Not even a superuser can add, change or delete one.

        The permission to view locks is not enough to view the records.
        """
        boss, record = person("boss", is_superuser=True), ended("a")
        for other in (client, person("other", "view_resourcelock")):
            for address in (RECORDS, detail(record)):
                assert other.get(address).status_code in (302, 403)
        assert 'name="action"' not in page(boss.get(RECORDS))
        assert 'name="_save"' not in page(boss.get(detail(record)))
        delete = reverse("admin:dlocks_holdrecord_delete", args=[record.pk])
        for address in (RECORDS + "add/", detail(record), delete):
            assert boss.post(address, {"post": "yes"}).status_code == 403
        assert HoldRecord.objects.count() == 1

    @pytest.mark.driver
    def test_the_list_shows_the_last_holds_first(self, viewer, settings):
        """It shows how each hold ended, its holder, its times.

        It can be filtered, searched and sorted, whatever ``USE_TZ`` is.
        """
        ended("new", ago=60, held=1)
        ended("lost", ago=7200, held=90, waited=3.5, token=7, ending="L")
        ended("old", ago=400_000, held=95, holder="web-9:1:t")
        text = page(viewer.get(RECORDS, {"ended": "nonsense"}))
        assert keys(text) == ["new", "lost", "old"]
        shown = " ".join(re.sub("<[^>]*>", " ", text).split())
        assert re.search(
            r"lost lost web-1:4711:MainThread 192.0.2.7 2 hours ago 90 s 3.5 s ", shown
        )
        for query, shown in (
            ({"ending__exact": "L"}, ["lost"]),
            ({"ended": "3600"}, ["new"]),
            ({"ended": "86400"}, ["new", "lost"]),
            ({"q": "old web-9"}, ["old"]),
            ({"o": "0"}, ["lost", "new", "old"]),
            ({"o": "4"}, ["new", "lost", "old"]),
        ):
            assert keys(page(viewer.get(RECORDS, query))) == shown, query
        settings.USE_TZ = not settings.USE_TZ
        record = ended("next", ago=60)
        assert re.search(r"\b6\d s ago", page(viewer.get(detail(record))))
        assert keys(page(viewer.get(RECORDS, {"ended": "3600"}))) == ["next", "new"]

    def test_a_hidden_holder_stays_hidden(self, viewer, settings):
        """It can neither be read, nor searched, nor guessed by a lookup or a sort."""
        record = ended("a")
        for show in ("hash", False):
            settings.DLOCKS_SHOW_HOLDER = show
            for text in (page(viewer.get(RECORDS)), page(viewer.get(detail(record)))):
                assert "web-1" not in text
                assert "192.0.2.7" not in text
            assert "0 results" in page(viewer.get(RECORDS, {"q": "web-1"}))
        settings.DLOCKS_SHOW_HOLDER = True
        for lookup in ("holder", "holder__startswith", "owner_ip"):
            assert viewer.get(RECORDS, {lookup: "web"}).status_code == 400, lookup

    def test_odd_keys_and_holders_are_text(self, viewer):
        records = [ended(key, holder=HOSTILE) for key in (*ODD_KEYS, HOSTILE)]
        for address in (RECORDS, *map(detail, records[::3])):
            text = page(viewer.get(address))
            assert "<img src=x" not in text
            assert "<script>alert" not in text
            assert "\u202e" not in text

    def test_records_of_other_prefixes_are_not_shown(self, viewer, settings):
        settings.DLOCKS = {
            "default": {**settings.DLOCKS["default"], "OPTIONS": {"prefix": "shop:"}}
        }
        ended("shop:1")
        other = ended("bank:1")
        assert keys(page(viewer.get(RECORDS))) == ["shop:1"]
        assert viewer.get(detail(other)).status_code == 302

    def test_the_control_room_links_to_the_records(self, viewer, settings):
        """Users who may not view the records do not get the link."""
        settings.DLOCKS = {"default": settings.DLOCKS["recorded"]}
        ended("a&b")
        both = person("both", "view_resourcelock", "view_holdrecord")
        assert f'href="{RECORDS}?q=a%26b"' in page(both.get(LIVE, {"key": "a&b"}))
        assert keys(page(both.get(RECORDS, {"q": "a&b"}))) == ["a&b"]
        assert f'href="{LIVE}"' in page(both.get(RECORDS))
        text = page(both.get(detail(HoldRecord.objects.get())))
        assert f'href="{LIVE}?key=a%26b"' in text
        assert ">1<" in text
        other = person("other", "view_resourcelock")
        assert RECORDS not in page(other.get(LIVE))
        assert LIVE not in page(viewer.get(RECORDS))
