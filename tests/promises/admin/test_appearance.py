"""Every page of the admin and the shop in every state, at four widths, in both themes.

With DLOCKS_TEST_PICTURES, pictures of the pages are written to that directory.
"""

import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import axe_playwright_python
import pytest
from django.template.loader import render_to_string

from dlocks.backends.memory import MemoryBackend
from dlocks.models import HoldRecord, LockClaim, ResourceLock
from dlocks.values import Claim
from example_project.shop.models import Product
from tests import rows
from tests.models import Article, Comment
from tests.promises.admin.names import LIST, RECORDS
from tests.promises.admin.pages import detail
from tests.promises.admin.test_control_room_browser import busy_hour

pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.pages]

PICTURES = os.environ.get("DLOCKS_TEST_PICTURES")
# Every page is checked at each width and in each theme. The themes differ only in their
# colours, and the colours do not depend on the width.
VIEWS = [("dark", 1280), ("light", 1024), ("dark", 768), ("light", 390)]
ALL = [(theme, width) for theme in ("light", "dark") for _, width in VIEWS]

# The script of axe-core. Python has no other package with a recent one.
AXE = Path(axe_playwright_python.__file__).parent / "axe.min.js"
# The rules that depend on the theme, and those that depend on the width. The contrast
# takes most of the time of axe-core.
COLOURS = ["color-contrast", "link-in-text-block"]
OTHERS = {"rules": {"color-contrast": {"enabled": False}}}
PHONE = {"runOnly": [*COLOURS, "scrollable-region-focusable"]}
# Return the faults of a part of a page. A transition of Django's buttons takes a
# moment. An element whose content is wider than it is cut off or covers something else.
# On a phone Django's lists can be scrolled in their frame.
CHECK = """async ([theme, part, phone, scope, options]) => {
    await Promise.all(document.getAnimations()
        .filter(one => one instanceof CSSTransition).map(one => one.finished));
    const found = [...document.querySelectorAll(part + ' *')].filter(e =>
        e.clientWidth > 1 && e.scrollWidth > e.clientWidth + 1
        && !e.matches(phone ? '.visually-hidden, .results' : '.visually-hidden')
    ).map(e => `${e.tagName}.${e.className}: ${e.scrollWidth} > ${e.clientWidth}`);
    if (document.documentElement.scrollWidth > innerWidth)
        found.push('the page is too wide');
    if (!matchMedia(`(prefers-color-scheme: ${theme})`).matches)
        found.push('the theme is another one');
    if (options) found.push(...(await axe.run(scope, {
        preload: false, selectors: false, resultTypes: ['violations'], ...options
    })).violations.map(
        one => `${one.id}: ${one.nodes.map(node => node.html).slice(0, 5).join(' ')}`
    ));
    return found;
}"""


def busy():
    """Write few records. The time of axe-core depends on the number of elements."""
    busy_hour(every=60)


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


def at(address, *setups, history=False):
    """Return the state of a page at an address, after some rows have been written."""

    def state(page, settings):
        if history:
            recorded = settings.DLOCKS["recorded"]
            settings.DLOCKS = {**settings.DLOCKS, "default": recorded}
        for setup in setups:
            setup()
        page.goto(address)

    return state


def free_key():
    rows.free("cache:warm-up")


def resting_key():
    rows.write("nightly", rows.S, rows.FUTURE, begin_time=datetime.now(UTC))


def long_keys():
    """Write keys that differ only at their ends, with holders and waiters."""
    now = datetime.now(UTC)
    for number in range(3):
        key = f"tenant:{number}:" + "catalogue:report/" * 11 + str(number)
        holder = (
            f"worker-{number}.europe-west1.example.com:27630:ThreadPoolExecutor-0_1"
        )
        who = {"holder": holder, "owner_ip": "2001:db8:85a3::8a2e:370:7334"}
        left = timedelta(seconds=20 - 15 * number)
        rows.write(key, rows.P, now + left, begin_time=now - timedelta(days=3), **who)
        for _ in range(2):
            rows.waits(key, begin_time=now, **who)


def stale_key():
    rows.stale("newsletter", begin_time=datetime.now(UTC))


def confirmation(page, settings):
    busy()
    rows.shares("catalogue", 104)
    page.goto(LIST)
    page.locator("#action-toggle").check()
    page.get_by_label("Action:").select_option(label="Force release")
    page.locator("[name=index]").click()
    page.get_by_label("Reason:").wait_for()


def confirmation_of_one(page, settings):
    """Ask for the release of a long key, without a reason."""
    rows.held("catalogue:" + "entry-" * 40, begin_time=datetime.now(UTC))
    page.goto(LIST)
    page.get_by_role("button", name="Force release").click()
    page.get_by_label("Reason:").fill(" ")
    page.get_by_role("button", name="Force release").click()
    page.get_by_text("Enter a reason").wait_for()


def list_selecting(page, settings):
    busy()
    page.goto(LIST)
    page.get_by_role("checkbox").nth(2).check()
    page.get_by_text("is not refreshed").wait_for()


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


def busy_view(page, settings):
    text = "This is in use at the moment. Try again later."
    page.set_content(render_to_string("dlocks/busy.html", {"text": text}))


class Busy(MemoryBackend):
    """A backend that has holds, waiters and a stale lock from the beginning."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        keys = ["shop:stock:7", "shop:report:monthly:" + "x" * 60, "shop:free"]
        for number, key in enumerate(keys):
            holder = f"web-{number}.example.com:1412:Thread-{number}"
            who = {"holder": holder, "owner_ip": "2001:db8::7"}
            claim = Claim(key=key, ttl=30.0, **who)
            self.acquire(claim)
            self.enqueue(replace(claim, owner=f"other {key}"))
        self.expire(claim, 60.0)
        for _ in range(2):
            self.acquire(Claim(key="shop:catalogue", ttl=30.0, shared=True))


def room_listed(page, settings):
    dummy = "dlocks.backends.dummy.DummyBackend"
    settings.DLOCKS = {
        **settings.DLOCKS,
        "redis": {"BACKEND": f"{__name__}.Busy", "OPTIONS": {"prefix": "shop:"}},
        "off": {"BACKEND": dummy},
    }
    page.goto(f"{LIST}?alias=redis")
    page.get_by_text("Other aliases").click()


def room_logged_out(page, settings):
    page.goto(LIST)
    page.context.clear_cookies()
    page.get_by_role("link", name="Refresh").click()
    page.get_by_role("link", name="Log in").wait_for()


def room_server_away(page, settings):
    page.goto(LIST)
    page.evaluate("() => { window.fetch = () => Promise.reject(new Error()); }")
    page.get_by_role("link", name="Refresh").click()
    page.get_by_text("the server does not respond").wait_for()


def record(page, settings):
    busy()
    page.goto(f"{RECORDS}?ending__exact=L")
    page.get_by_role("link", name="report:monthly").click()
    page.get_by_role("heading", name="View ended hold").wait_for()


# Each group of states shares a browser window. A state that logs out is the last one.
STATES = {
    "locks": {
        "list empty": at(LIST),
        "list quiet hour": at(LIST, history=True),
        "list busy": at(LIST, busy, history=True),
        "list long keys": at(LIST, long_keys),
        "list shared": at(LIST, shared_key, stale_key),
        "list free": at(f"{LIST}?state=free", free_key),
        "list nothing found": at(f"{LIST}?q=x", free_key),
        "list selecting": list_selecting,
    },
    "keys": {
        "key held": at(detail("report:monthly"), busy, history=True),
        "key stale": at(detail("newsletter"), busy),
        "key free": at(detail("cache:warm-up"), free_key),
        "key shared": at(detail("catalogue"), shared_key),
        "key resting": at(detail("nightly"), resting_key),
        "confirmation": confirmation,
        "confirmation of one": confirmation_of_one,
    },
    "forms": {
        "index": at("/admin/"),
        "history": at(detail("a", "history")),
        "conflict in a form": conflict_in_a_form,
        "conflict in a list": conflict_in_a_list,
        "shop": at("/shop/", lambda: Product.objects.create(name="Lamp", stock=3)),
        "shop flash sale": at("/shop/flash-sale/"),
        "busy view": busy_view,
    },
    "troubles": {
        "list of another backend": room_listed,
        "server away": room_server_away,
        "logged out": room_logged_out,
    },
    "records": {
        "records empty": at(RECORDS),
        "records busy": at(RECORDS, busy),
        "record": record,
    },
}
# The parts of pages to check. Django's forms in lists have no labels, and its inline
# rows are wider than their frame. The rest of a message's page is that of other states.
PARTS = {
    "conflict in a form": ".dlocks-conflict",
    "conflict in a list": ".dlocks-conflict",
    "logged out": "#dlocks-trouble",
    "server away": "#dlocks-trouble",
}
# States with all elements of their page. Their colours are checked in both themes, and
# they are checked at all widths. The elements of the others are in one of these too.
COMPLETE = {"list busy", "list long keys", "list shared", "key held", "key shared"}
COMPLETE |= {"confirmation", "index", "conflict in a form", "shop", "shop flash sale"}
COMPLETE |= {"busy view", "list of another backend", "server away", "logged out"}
COMPLETE |= {"records busy", "record"}
# Pages that are checked with their header and sidebar, which the others have too.
WHOLE = {"list busy", "index", "shop", "shop flash sale", "busy view", "key held"}


@pytest.mark.parametrize("states", STATES.values(), ids=STATES)
def test_pages_fit_and_have_no_barriers(browser, boss, settings, states):
    """Nothing is cut off on a screen or a phone, and axe-core finds no barrier.

    This holds for every page of the admin, in every state and in both themes.
    """
    # axe-core measures with styles of its own.
    page = browser.page(boss, bypass_csp=True)
    settings.STATICFILES_DIRS = [AXE.parent]
    initial, troubles = settings.DLOCKS, {}
    for title, state in states.items():
        settings.DLOCKS = initial
        for model in (ResourceLock, LockClaim, HoldRecord, Article, Comment, Product):
            model.objects.all().delete()
        state(page, settings)
        page.add_script_tag(url="/static/axe.min.js")
        part, is_complete = PARTS.get(title, "#content"), title in COMPLETE
        rules = {1280: {}, 390: PHONE} if is_complete else {1280: OTHERS}
        views = VIEWS if is_complete else VIEWS[::3]
        for theme, width in ALL if PICTURES else views:
            page.emulate_media(color_scheme=theme)
            page.set_viewport_size({"width": width, "height": 800})
            name = f"{title}-{width}-{theme}"
            if PICTURES:
                page.screenshot(path=Path(PICTURES) / f"{name}.png", full_page=True)
            scope = "html" if title in WHOLE else part
            asked = [theme, part, width == 390, scope, rules.get(width)]
            if found := page.evaluate(CHECK, asked):
                troubles[name] = found
    assert troubles == {}
