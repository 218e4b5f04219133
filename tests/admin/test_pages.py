"""Every page of the admin and the shop in every state, at three widths, in both themes.

With DLOCKS_TEST_PICTURES, pictures of the pages are written to that directory.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import axe_playwright_python
import pytest
from django.template.loader import render_to_string

from example_project.shop.models import Product
from tests import rows
from tests.admin.test_admin import LIST, detail, person
from tests.admin.test_control_room import LIVE
from tests.admin.test_control_room_browser import busy_hour
from tests.admin.test_records import RECORDS
from tests.internals import Claim, HoldRecord, backends
from tests.models import Article, Comment

pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.pages]

PICTURES = os.environ.get("DLOCKS_TEST_PICTURES")
WIDTHS = (1280, 1024, 390)

# The script of axe-core. Python has no other package with a recent one.
AXE = Path(axe_playwright_python.__file__).parent / "axe.min.js"
# Where axe-core runs, and with which options. The dark theme changes only colours, a
# phone has the colours of a screen, and a tablet has its elements.
RULES = {
    ("light", WIDTHS[0]): {},
    ("light", WIDTHS[-1]): {"rules": {"color-contrast": {"enabled": False}}},
    ("dark", WIDTHS[0]): {"runOnly": ["color-contrast", "link-in-text-block"]},
}
VIOLATIONS = """async ([part, options]) => (
    await axe.run(part || document, {preload: false, ...options})
).violations.map(
    one => `${one.id}: ${one.nodes.map(node => node.html).slice(0, 5).join(' ')}`
)"""
# Django's buttons change their colour within a moment.
SETTLED = """() => Promise.all(
    document.getAnimations()
        .filter(one => one instanceof CSSTransition).map(one => one.finished)
)"""
THEME = "matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light'"
# The elements whose content is wider than they are, so that it is cut off or covers
# something else. On a phone Django's lists can be scrolled in their frame.
CUT = """([phone, part]) => [
    ...document.querySelectorAll((part || '#content') + ' *')
].filter(e =>
    e.clientWidth > 1 && e.scrollWidth > e.clientWidth + 1
    && !e.matches(phone ? '.visually-hidden, .results' : '.visually-hidden')
).map(e => `${e.tagName}.${e.className}: ${e.scrollWidth} > ${e.clientWidth}`)"""


@pytest.fixture
def boss(transactional_db):
    return person("boss", is_superuser=True)


def with_history(settings):
    settings.DLOCKS = {**settings.DLOCKS, "default": settings.DLOCKS["recorded"]}


def shared_key():
    now = datetime.now(UTC)
    rows.free("catalogue", version=1)
    for number in range(4):
        rows.claim(
            "catalogue",
            now + timedelta(seconds=8.0 - 6 * number),
            version=100 + number,
            holder=f"web-{number}:14{number:02}:Thread-{number + 2}",
            begin_time=now - timedelta(seconds=30 * number + 4),
            permits=10,
        )
    rows.waits("catalogue", holder="jobs-1:2210:MainThread", begin_time=now)
    rows.dead("catalogue", holder="jobs-2:978:MainThread")


def open_confirmation(page, name="Force release"):
    page.get_by_role("checkbox").nth(0).check()
    page.get_by_label("Action:").select_option(label=name)
    page.get_by_role("button", name="Run").or_(
        page.get_by_role("button", name="Go")
    ).click()
    page.get_by_label("Reason:").wait_for()


def list_empty(page, settings):
    page.goto(LIST)


def list_busy(page, settings):
    busy_hour()
    rows.free("cache:warm-up")
    page.goto(LIST)


def lock_held(page, settings):
    busy_hour()
    page.goto(detail("report:monthly"))


def lock_stale(page, settings):
    busy_hour()
    page.goto(detail("newsletter"))


def lock_free(page, settings):
    rows.free("cache:warm-up")
    page.goto(detail("cache:warm-up"))


def lock_shared(page, settings):
    shared_key()
    page.goto(detail("catalogue"))


def confirmation(page, settings):
    busy_hour()
    rows.shares("catalogue", 104)
    page.goto(LIST)
    open_confirmation(page)


def purge_confirmation(page, settings):
    rows.free("cache:warm-up")
    page.goto(LIST + "?state=free")
    page.get_by_role("checkbox").nth(0).check()
    page.locator("[name=action]").select_option("delete_unused_rows")
    page.locator("[name=index]").click()
    page.get_by_role("button", name="Delete").wait_for()


def removal_confirmation(page, settings):
    lock_shared(page, settings)
    page.get_by_role("button", name="Remove from the queue").click()
    page.get_by_label("Reason:").wait_for()


def index(page, settings):
    page.goto("/admin/")


def conflict_in_a_form(page, settings):
    article = Article.objects.create(title="first", body="text", views=3)
    Comment.objects.create(article=article, text="old")
    page.goto(f"/admin/tests/article/{article.pk}/change/")
    page.locator("[name=title]").fill("yours")
    page.locator("[name=comments-0-text]").fill("yours")
    Article.objects.update(title="theirs", views=4)
    Comment.objects.update(text="theirs")
    page.locator("[name=_save]").click()
    page.get_by_role("button", name="Use theirs: Title").wait_for()


def conflict_in_a_list(page, settings):
    Article.objects.create(title="first", body="text", views=3)
    page.goto("/admin/tests/article/")
    page.locator("[name=form-0-title]").fill("yours")
    Article.objects.update(title="theirs")
    page.locator("[name=_save]").click()
    page.get_by_role("button", name="Use theirs: Title").wait_for()


def shop(page, settings):
    Product.objects.create(name="Lamp", stock=3)
    page.goto("/shop/")


def shop_flash_sale(page, settings):
    page.goto("/shop/flash-sale/")


def busy_view(page, settings):
    text = "This is in use at the moment. Try again later."
    page.set_content(render_to_string("dlocks/busy.html", {"text": text}))


def room_empty(page, settings):
    page.goto(LIVE)


def room_quiet_hour(page, settings):
    with_history(settings)
    page.goto(LIVE)


def room_busy(page, settings):
    with_history(settings)
    busy_hour()
    page.goto(LIVE)


def room_key(page, settings):
    with_history(settings)
    busy_hour()
    page.goto(f"{LIVE}?key=report:monthly")


def room_shared(page, settings):
    shared_key()
    rows.stale("newsletter", begin_time=datetime.now(UTC))
    page.goto(LIVE)


def room_listed(page, settings):
    memory = "dlocks.backends.memory.MemoryBackend"
    dummy = "dlocks.backends.dummy.DummyBackend"
    settings.DLOCKS = {
        **settings.DLOCKS,
        "redis": {"BACKEND": memory, "OPTIONS": {"prefix": "shop:"}},
        "off": {"BACKEND": dummy},
    }
    backend = backends["redis"]
    for number, key in enumerate(["stock:7", "report:monthly:" + "x" * 60, "free"]):
        holder = f"web-{number}.example.com:1412:Thread-{number}"
        claim = Claim(
            key=f"shop:{key}", ttl=30.0, holder=holder, owner_ip="2001:db8::7"
        )
        backend.acquire(claim)
        backend.enqueue(replace(claim, owner=f"other {key}"))
    backend.expire(claim, 60.0)
    for _ in range(2):
        backend.acquire(Claim(key="shop:catalogue", ttl=30.0, shared=True))
    page.goto(f"{LIVE}?alias=redis")
    page.get_by_text("Aliases that are not listed").click()


def room_logged_out(page, settings):
    room_busy(page, settings)
    page.context.clear_cookies()
    page.get_by_role("link", name="Refresh").click()
    page.get_by_role("link", name="Log in").wait_for()


def room_server_away(page, settings):
    room_shared(page, settings)
    page.evaluate("() => { window.fetch = () => Promise.reject(new Error()); }")
    page.get_by_role("link", name="Refresh").click()
    page.get_by_text("the server does not respond").wait_for()


def records_empty(page, settings):
    page.goto(RECORDS)


def records_busy(page, settings):
    busy_hour()
    # Twelve records are enough. axe-core needs ten seconds for a hundred of them.
    HoldRecord.objects.filter(key_resource__startswith="stock").delete()
    page.goto(RECORDS)


def record(page, settings):
    busy_hour()
    page.goto(f"{RECORDS}?ending__exact=L")
    page.get_by_role("link", name="report:monthly").click()
    page.get_by_role("heading", name="View ended hold").wait_for()


STATES = [
    list_empty,
    list_busy,
    lock_held,
    lock_stale,
    lock_free,
    lock_shared,
    confirmation,
    purge_confirmation,
    removal_confirmation,
    index,
    conflict_in_a_form,
    conflict_in_a_list,
    shop,
    shop_flash_sale,
    busy_view,
    room_empty,
    room_quiet_hour,
    room_busy,
    room_key,
    room_shared,
    room_listed,
    room_logged_out,
    room_server_away,
    records_empty,
    records_busy,
    record,
]


# The part of a page that is ours, where the rest is Django's. Its forms in lists have
# no labels, and its inline rows are wider than their frame.
PARTS = {
    conflict_in_a_form: ".dlocks-conflict",
    conflict_in_a_list: ".dlocks-conflict",
}


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_pages_fit_and_have_no_barriers(browser, boss, settings, state):
    """Nothing is cut off on a screen or a phone, and axe-core finds no barrier.

    This holds for every page of the admin, in every state and in both themes.
    """
    page = browser.page(
        boss,
        viewport={"width": WIDTHS[0], "height": 800},
        # axe measures with styles of its own.
        bypass_csp=True,
    )
    state(page, settings)
    page.evaluate(AXE.read_text(encoding="utf-8"))
    troubles = {}
    for theme, width in itertools.product(("light", "dark"), WIDTHS):
        page.emulate_media(color_scheme=theme)
        page.evaluate(SETTLED)
        page.set_viewport_size({"width": width, "height": 800})
        name = f"{state.__name__}-{width}-{theme}"
        if PICTURES:
            page.screenshot(path=Path(PICTURES) / f"{name}.png", full_page=True)
        part = PARTS.get(state)
        found = page.evaluate(CUT, [width == WIDTHS[-1], part])
        if (theme, width) in RULES:
            found += page.evaluate(VIOLATIONS, [part, RULES[theme, width]])
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            found.append("the page is too wide")
        assert page.evaluate(THEME) == theme
        if found:
            troubles[name] = found
    assert troubles == {}
