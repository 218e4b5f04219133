"""The admin of several aliases: each database and prefix can be chosen."""

import html
import itertools
import re

import pytest

from dlocks.models import LockClaim
from tests import rows
from tests.promises.admin.names import END, FORCE, LIST, RECORDS
from tests.promises.admin.pages import (
    buttons,
    detail,
    end,
    fields,
    page,
    person,
    text_of,
    told,
)
from tests.settings import PESSIMISTIC

pytestmark = [pytest.mark.front, pytest.mark.django_db]

PAGES = (LIST, RECORDS)
OTHER = "alias=b+%26+c"


@pytest.fixture
def boss(db, settings):
    def alias(**options):
        return {"BACKEND": PESSIMISTIC, "OPTIONS": {"history": True, **options}}

    settings.DLOCKS = {
        "default": alias(prefix="a:"),
        "same": alias(prefix="a:", ttl=7),
        "b & c": alias(prefix="b:"),
        "memory": {"BACKEND": "dlocks.backends.memory.MemoryBackend"},
        "dummy": {"BACKEND": "dlocks.backends.dummy.DummyBackend"},
        "broken": {"BACKEND": "nowhere.Backend"},
        "tenants": alias(prefix=lambda: None),
    }
    return person("boss", is_superuser=True)


def keys(text: str) -> set[str]:
    return set(re.findall(r'<bdi class="dlocks-key">([abAB]:[^<]*)</bdi>', text))


def links(text: str) -> list[str]:
    """Return the addresses of all links and forms in the content of a page."""
    content = text[text.index('id="content"') :]
    return list(map(html.unescape, re.findall(r'(?:href|action)="([^"#]*)"', content)))


def test_each_alias_with_a_list_is_offered_once(boss, settings):
    """Other aliases are named with the reason why they are not listed.

    Only the list of locks has those that are not rows. A single alias needs no choice.
    """
    for address in PAGES:
        text = page(boss.get(address))
        offered = re.findall(r'href="([^"]*)\?alias=([^"]*)"', text)
        assert offered == [("", "default"), ("", "b+%26+c"), (LIST, "memory")]
        for reason in (
            "same : has the same rows as default",
            "dummy : It grants every claim, so there are no locks.",
            "broken : its settings have an error",
            "tenants : its settings have an error",
        ):
            assert reason in text_of(text), address
    settings.DLOCKS = {"default": settings.DLOCKS["default"]}
    for address in PAGES:
        assert "dlocks-aliases" not in page(boss.get(address)), address


@pytest.mark.driver
def test_the_address_chooses_the_alias(boss):
    """Two projects share a database and separate their keys by a prefix.

    A key of another prefix is on no page.
    """
    records = {}
    for key in ("a:1", "A:2", "b:1"):
        rows.held(key)
        records[key] = rows.ended(key)
    for address, (query, shown) in itertools.product(
        PAGES,
        [
            ({}, "a:1"),
            ({"alias": "dummy"}, "a:1"),
            ({"alias": "nul\0"}, "a:1"),
            ({"alias": "b & c", "q": "1"}, "b:1"),
        ],
    ):
        found = keys(page(boss.get(address, query)))
        assert found == {shown}, (address, query)
    for address in (detail("b:1"), f"{RECORDS}{records['b:1'].pk}/change/"):
        assert boss.get(address).status_code == 302


def test_every_link_of_a_page_keeps_the_alias(boss):
    """No link or form leads to the rows of another alias by surprise."""
    rows.held("b:1")
    rows.ended("b:1")
    todo, seen = [f"{address}?{OTHER}" for address in PAGES], set()
    while todo:
        here = todo.pop(0)
        # One address of each page with each set of parameters is enough.
        if (kind := re.sub("=[^&]*", "", here)) in seen:
            continue
        seen.add(kind)
        text = page(boss.get(here, follow=True))
        assert not {key for key in keys(text) if key.startswith("a:")}
        for link in links(text):
            if re.fullmatch(r"\?(_facets.*)?", link):
                # Django's links that reset all parameters of a list.
                continue
            if link.startswith("?"):
                link = here.partition("?")[0] + link
            if (
                not link.startswith("/admin/dlocks/")
                or link.startswith(END)
                or link in (LIST, RECORDS)
            ):
                # Breadcrumbs lead to the first alias.
                continue
            if "alias=default" not in link and "alias=memory" not in link:
                assert "b+%26+c" in link or "b%2B%2526%2Bc" in link, (here, link)
                if len(seen) < 18:
                    todo.append(link)
    assert len(seen) >= 12


@pytest.mark.driver
def test_every_column_sorts_the_rows_of_the_alias(boss):
    """This also holds for a search, and with the counts of the filters."""
    rows.held("b:1")
    rows.ended("b:1")
    query = {"alias": "b & c", "q": "1", "_facets": "True"}
    query["o"] = ".".join(f"-{column}" for column in range(1, 8))
    for address in (LIST, RECORDS):
        shown = page(boss.get(address, query, follow=True))
        assert keys(shown) == {"b:1"}, address


@pytest.mark.driver
def test_an_action_applies_to_the_chosen_alias(boss):
    """Its confirmation names the alias, and its end returns to it.

    A forged form cannot name the key of another alias.
    """
    rows.held("a:1")
    rows.held("b:1")
    address, query = f"{LIST}?{OTHER}", f"?{OTHER}"
    form = {"action": FORCE, "_selected_action": ["b:1"]}
    text = page(boss.post(address, form))
    assert "<strong>b &amp; c</strong>" in text
    form = fields(text)
    assert end(boss, form).count("left unchanged") == 1
    text = end(boss, form, query)
    assert "The release of 1 lock was forced: b:1" in told(text)
    assert "a:1" not in keys(text)
    assert rows.now("b:1").state == "free"
    rows.claim("a:1", rows.FUTURE, version=7)
    for target in ("lock 1000 a:1", "share 7 a:1"):
        end(boss, {"force_release": target, "reason": "x"}, query)
    assert rows.now("a:1").version == 1000
    assert LockClaim.objects.count() == 1


def test_the_pages_of_an_alias_act_on_its_locks(boss):
    """The page of a key clears the lock of its alias, and is shown again."""
    rows.stale("b:1")
    text = page(boss.get(f"{LIST}?{OTHER}"))
    (address,) = {link for link in links(text) if "/change/" in link}
    text = page(boss.get(address))
    assert "<strong>b &amp; c</strong>" in text
    assert f"{END}?{OTHER}" in links(text)
    (button,) = buttons(text, "clear")
    form = {**fields(text), **button}
    response = boss.post(f"{END}?{OTHER}", form)
    assert (response.status_code, response.url) == (302, address)
    assert "1 stale lock was cleared: b:1" in told(page(boss.get(address)))
