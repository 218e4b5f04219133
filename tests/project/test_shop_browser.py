"""The page of the flash sale, in a real Chromium."""

from __future__ import annotations

import pytest

from example_project.shop.backstage import ONE_AT_A_TIME
from example_project.shop.sale import TITLES
from example_project.shop.services import LOCKS, NO_LOCK
from tests.browser import IMAGES, picture

PAGE = "/shop/flash-sale/"
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

pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.once, pytest.mark.nightly]


@pytest.fixture(autouse=True)
def sales_end(transactional_db, until):
    """Wait until no process of a sale works on the next test's database."""
    yield
    until(lambda: not ONE_AT_A_TIME.locked(), 60)


def card(page, lock):
    return page.locator(f"section[data-lock={lock}]")


def number(page, lock, name):
    return int(card(page, lock).locator(f"dd.{name}").inner_text())


def test_the_numbers_move_and_only_no_lock_oversells(browser):
    """The chosen locks sell side by side, and the page shows it without a reload.

    It also works on a phone, with a keyboard and without JavaScript. Only the chosen
    locks sell.
    """
    # The documentation has a picture of all locks.
    chosen = LOCKS if IMAGES else [NO_LOCK, "pessimistic", "optimistic"]
    # Enough for several polls of the page during the sale.
    stock, buyers = 30, 90
    phone = browser.page(
        viewport={"width": 360, "height": 740}, java_script_enabled=False
    )
    phone.goto(PAGE)
    browser.expect(phone.get_by_text("No sale yet")).to_be_visible()
    phone.get_by_label("Pieces in stock").fill(str(stock))
    phone.get_by_label("Buyers").fill(str(buyers))
    for lock, title in TITLES.items():
        phone.get_by_label(title, exact=True).set_checked(lock in chosen)
    phone.get_by_label("Pieces in stock").focus()
    for _ in range(2 + len(LOCKS)):
        phone.keyboard.press("Tab")
    assert phone.evaluate("document.activeElement.innerText") == "Start the sale"
    phone.keyboard.press("Enter")
    running = f"Running: {stock} pieces, {buyers} buyers"
    browser.expect(phone.get_by_role("heading", name=running)).to_be_visible()

    page = browser.page(color_scheme="light", viewport={"width": 1100, "height": 900})
    page.goto(PAGE)
    button = page.get_by_role("button", name="Start the sale")
    browser.expect(page.get_by_role("heading", name=running)).to_be_visible()
    browser.expect(button).to_be_disabled()
    page.evaluate(WATCH)
    results = page.get_by_role("heading", name="Results")
    browser.expect(results).to_be_visible(timeout=SALE)
    seen = page.evaluate("window.seen")
    # At least once between the beginning and the end. A busy machine polls less often.
    assert len(seen) > 2, seen
    assert seen == sorted(seen)
    assert page.locator("section.card").count() == len(chosen)
    for lock in chosen:
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
    browser.expect(button).to_be_enabled()
    assert number(page, "pessimistic", "waits") > 0
    exact = page.get_by_text("Every lock sold exactly the stock")
    browser.expect(exact).to_contain_text(f"{number(page, NO_LOCK, 'oversold')} piece")
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement.blur()")
    picture(page, "shop.png", full_page=True)

    phone.get_by_role("link", name="Reload").click()
    browser.expect(phone.get_by_role("heading", name="Results")).to_be_visible()
    assert number(phone, "optimistic", "sold") == stock
    assert card(phone, "optimistic").locator("polyline.sold").is_visible()
    assert phone.evaluate("document.documentElement.scrollWidth") <= 360
    cards = phone.locator("section.card")
    left, right = (cards.nth(place).bounding_box() for place in (0, 1))
    assert left["x"] == right["x"]
