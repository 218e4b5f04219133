"""The page of the flash sale, in a real Chromium."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from example_project.shop.backstage import ONE_AT_A_TIME
from example_project.shop.sale import TITLES
from example_project.shop.services import LOCKS, NO_LOCK

PAGE = "/shop/flash-sale/"
# The directory in which "make images" replaces existing pictures of the documentation.
IMAGES = os.environ.get("DLOCKS_TEST_IMAGES")
# Milliseconds. A sale starts five processes, on a machine that may be busy.
SALE = 90_000

# A script that records the number of sold pieces, for all locks together, at each
# change.
WATCH = """() => {
    window.seen = [];
    const look = () => {
        const sold = [...document.querySelectorAll("dd.sold")];
        const pieces = sold.reduce((sum, dd) => sum + Number(dd.innerText), 0);
        if (!window.seen.includes(pieces)) window.seen.push(pieces);
    };
    const sale = document.getElementById("sale");
    new MutationObserver(look).observe(sale, {childList: true});
}"""

pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.once]


@pytest.fixture(autouse=True)
def sales_end(transactional_db, until):
    """Wait until no process of a sale works on the next test's database."""
    yield
    until(lambda: not ONE_AT_A_TIME.locked(), 60)


def picture(page, name, **options):
    """Take a picture. Keep it if the documentation has one of this name."""
    taken = page.screenshot(**options)
    if IMAGES and (kept := Path(IMAGES) / name).exists():
        kept.write_bytes(taken)
    assert len(taken) < 150_000
    return taken


def fill(page, *, stock, buyers, locks=LOCKS):
    page.get_by_label("Pieces in stock").fill(str(stock))
    page.get_by_label("Buyers").fill(str(buyers))
    for lock, title in TITLES.items():
        page.get_by_label(title, exact=True).set_checked(lock in locks)


def start(page):
    page.get_by_role("button", name="Start the sale").click()


def card(page, lock):
    return page.locator(f"section[data-lock={lock}]")


def number(page, lock, name):
    return int(card(page, lock).locator(f"dd.{name}").inner_text())


def test_the_numbers_move_and_only_no_lock_oversells(browser):
    """The chosen locks sell side by side, without a reload."""
    page = browser.page(color_scheme="light", viewport={"width": 1100, "height": 900})
    page.goto(PAGE)
    browser.expect(page.get_by_text("No sale yet")).to_be_visible()
    stock, buyers = 30, 90
    fill(page, stock=stock, buyers=buyers)
    start(page)
    browser.expect(
        page.get_by_role("heading", name=f"Running: {stock} pieces, {buyers} buyers")
    ).to_be_visible()
    browser.expect(page.get_by_role("button", name="Start the sale")).to_be_disabled()
    page.evaluate(WATCH)
    browser.expect(page.get_by_role("heading", name="Results")).to_be_visible(
        timeout=SALE
    )
    seen = page.evaluate("window.seen")
    assert len(seen) >= 4, seen
    assert seen == sorted(seen)
    for lock in LOCKS:
        sold, oversold = number(page, lock, "sold"), number(page, lock, "oversold")
        assert oversold == sold - stock
        assert sold + number(page, lock, "refused") == buyers
        if lock == NO_LOCK:
            assert oversold > 0
            browser.expect(card(page, lock)).to_contain_text("oversold")
        else:
            assert (oversold, number(page, lock, "left")) == (0, 0)
            browser.expect(card(page, lock).locator(".state")).to_have_text("exact")
            browser.expect(card(page, lock).locator(".pieces")).to_have_text(f"{stock}")
    browser.expect(page.get_by_role("button", name="Start the sale")).to_be_enabled()
    assert number(page, "pessimistic", "waits") > 0
    too_many = number(page, NO_LOCK, "oversold")
    browser.expect(
        page.get_by_text("Every lock sold exactly the stock")
    ).to_contain_text(f"{too_many} piece")
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement.blur()")
    for scheme, name in (("light", "shop.png"), ("dark", "shop-dark.png")):
        page.emulate_media(color_scheme=scheme)
        picture(page, name, full_page=True)


def test_the_page_works_on_a_phone_and_with_a_keyboard(browser):
    """It also works without JavaScript, after a reload. Only the chosen locks sell."""
    page = browser.page(
        viewport={"width": 360, "height": 740}, java_script_enabled=False
    )
    page.goto(PAGE)
    fill(page, stock=5, buyers=12, locks=["optimistic", "row"])
    page.get_by_label("Pieces in stock").focus()
    for _ in range(7):
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.innerText") == "Start the sale"
    page.keyboard.press("Enter")
    results = page.get_by_role("heading", name="Results")
    running = page.get_by_role("heading", name="5 pieces, 12 buyers")
    browser.expect(results.or_(running)).to_be_visible()
    for _ in range(120):
        if results.count():
            break
        browser.expect(running).to_be_visible()
        # If the sale is not over yet, the page has a link to reload it.
        page.wait_for_timeout(500)
        reload = page.get_by_role("link", name="Reload")
        reload.click() if reload.count() else page.reload()
    assert page.locator("section.card").count() == 2
    assert [number(page, lock, "sold") for lock in ("optimistic", "row")] == [5, 5]
    assert card(page, "optimistic").locator("polyline.sold").is_visible()
    browser.expect(
        page.get_by_text("Every lock sold exactly the stock.")
    ).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    left, right = (page.locator("section.card").nth(at).bounding_box() for at in (0, 1))
    assert left["x"] == right["x"]
    picture(page, "shop-phone.png", full_page=True)
