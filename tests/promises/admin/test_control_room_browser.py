"""The control room in a real browser.

It is used by mouse, by keyboard, and without scripts.
"""

from datetime import UTC, datetime, timedelta

import pytest

from dlocks.models import HoldRecord, LockClaim, ResourceLock
from tests import jobs, rows
from tests.browser import picture
from tests.promises.admin.names import HOSTILE, LIST
from tests.promises.admin.pages import detail

# The page behaves the same on every engine. test_control_room.py tests its content on
# each.
pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.pages]

# Milliseconds until the page refreshes the locks. More would count as the time that the
# server takes, and the next refresh would be later.
AGAIN = 2000
PHONE, DESK = {"width": 360, "height": 740}, {"width": 1120, "height": 700}


@pytest.fixture
def with_history(settings):
    settings.DLOCKS = {"default": settings.DLOCKS["recorded"]}


def row(page, key):
    return page.get_by_role("row").filter(
        has=page.get_by_role("link", name=key, exact=True)
    )


def busy_hour(every=1):
    """Write the locks and the history of a busy shop, in each or every nth minute."""
    now = datetime.now(UTC)
    kinds = [
        ("report:monthly", "jobs-1:2210:MainThread", "10.0.0.21", 812, 21.4, 4),
        ("stock:lamp-17", "web-3:1412:Thread-9", "10.0.0.13", 0.8, 29.2, 9),
        ("search-index", "jobs-2:978:MainThread", "10.0.0.22", 141, 12.8, 1),
        ("import:tenant/42", "jobs-1:2214:MainThread", "10.0.0.21", 38, 25.1, 0),
        ("payment:8812", "web-1:1398:Thread-4", "10.0.0.11", 3.1, 27.6, 0),
        ("newsletter", "jobs-2:981:MainThread", "10.0.0.22", 96, -14.0, 0),
    ]
    for key, holder, ip, age, left, waiting in kinds:
        fields = {"holder": holder, "owner_ip": ip}
        fields["begin_time"] = now - timedelta(seconds=age)
        rows.write(key, rows.P, now + timedelta(seconds=left), **fields)
        for number in range(waiting):
            since = now - timedelta(seconds=0.7 * (waiting - number))
            name = f"web-{number % 4 + 1}:14{number:02}:Thread-{number + 2}"
            rows.waits(key, holder=name, begin_time=since)
    rows.free("catalogue", version=1)
    for number in range(2):
        rows.claim(
            "catalogue",
            now + timedelta(seconds=26 - 7 * number),
            version=100 + number,
            holder=f"web-{number + 2}:1405:Thread-{number + 3}",
            begin_time=now - timedelta(seconds=4 + 5 * number),
        )
    records, jobs_1 = [], "jobs-1:2210:MainThread"

    def add(key, **fields):
        records.append(rows.record(key, **{"token": len(records) + 1, **fields}))

    for minute in range(0, 60, every):
        for number in range(2 + (minute * 7) % 5 + (9 if 20 < minute < 31 else 0)):
            times = {"ago": minute * 60 + number * 3 + 1, "held": 0.3 + number / 9}
            waited = 0.4 * number if number > 3 else 0.0
            add(f"stock:lamp-{number}", waited=waited, **times)
    long = {"invoices": 740, "search-index": 515, "import:tenant/9": 262}
    for number, (key, held) in enumerate(long.items()):
        times = {"ago": 500 * (number + 1), "held": held}
        add(key, holder=jobs_1, ending="RFL"[number], **times)
    for number in range(9):
        times = {"ago": 900 + number * 1300, "held": 600 + 160 * (number % 3)}
        add(
            "report:monthly",
            **times,
            waited=47.0 * (number % 4),
            ending="RRRRFRRLR"[number],
            token=1795258813170301 - number * 1_307_219_433,
            holder=jobs_1,
        )
    HoldRecord.objects.bulk_create(records)


def shows(page):
    """Check that nothing is wider than the page."""
    wide = page.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    assert wide <= 0, f"the page scrolls sideways by {wide}"


def stop_clock(page):
    """Let the test control the clock of the page."""
    page.clock.install(time=0)
    page.clock.pause_at(1000)


def confirm(page, browser, forced, press=lambda button: button.click()):
    """Give a reason on the page of a confirmation, and wait for the message."""
    browser.expect(page.get_by_role("heading", name="Force release")).to_be_visible()
    page.get_by_label("Reason:").fill("tests")
    press(page.get_by_role("button", name="Force release"))
    browser.expect(page.get_by_text(f"The release of {forced}")).to_be_visible()


def force_release(page, browser, key):
    row(page, key).get_by_role("button", name="Force release").click()
    confirm(page, browser, f"1 lock was forced: {key}")


@pytest.mark.smoke
@pytest.mark.usefixtures("with_history")
def test_locks_appear_and_disappear_without_a_reload(browser, boss, workers, in_queue):
    """A lock appears on an open page at its acquisition, and leaves at its release.

    A forced release takes two clicks. Then the first waiter acquires the key at once,
    and the page shows it. The page says if the server does not respond, until it
    responds again. Markup in a key or a holder is not executed.
    """
    page = browser.page(boss)
    stop_clock(page)
    page.goto(LIST)
    browser.expect(page.get_by_text("No lock is held")).to_be_visible()
    page.evaluate("window.stayed = true")
    holder, waiter = workers(2)
    holder.start(jobs.hold, "stock:7", ttl=600)
    token = holder.hear()
    page.clock.run_for(AGAIN)
    lock = row(page, "stock:7")
    browser.expect(lock).to_contain_text("MainThread")
    waiter.start(jobs.hold, "stock:7", timeout=60)
    in_queue(1)
    page.clock.run_for(AGAIN)
    browser.expect(lock.get_by_role("listitem")).to_have_count(1)
    assert page.evaluate("window.stayed")
    force_release(page, browser, "stock:7")
    assert waiter.hear() > token
    browser.expect(page).to_have_title("Locks | Django site admin")
    browser.expect(lock.get_by_role("listitem")).to_have_count(0)
    name = f":{waiter.process.pid}:"
    browser.expect(lock.locator(".field-who")).to_contain_text(name)
    waiter.tell()
    assert waiter.hear() == "released"
    holder.tell()
    with pytest.raises(RuntimeError, match="LockLost"):
        holder.hear()
    page.evaluate(
        "() => { window.real = window.fetch;"
        " window.fetch = () => Promise.reject(new Error()); }"
    )
    page.clock.run_for(AGAIN)
    shown = page.get_by_role("status").locator("p:visible")
    browser.expect(shown).to_contain_text("the server does not respond")
    page.evaluate("() => { window.fetch = window.real; }")
    rows.held(HOSTILE, holder=HOSTILE)
    rows.waits(HOSTILE, holder=HOSTILE)
    rows.ended(HOSTILE, holder=HOSTILE)
    ran = []
    page.on("dialog", lambda dialog: ran.append(dialog.message) or dialog.dismiss())
    page.get_by_role("link", name="Refresh").click()
    browser.expect(shown).to_have_count(0)
    browser.expect(lock).to_have_count(0)
    browser.expect(row(page, HOSTILE)).to_be_visible()
    page.goto(detail(HOSTILE))
    timeline = page.get_by_role("heading", name="Timeline of this key")
    browser.expect(timeline).to_be_visible()
    markup = page.locator(".dlocks-room img, .dlocks-room script")
    browser.expect(markup).to_have_count(0)
    assert not ran


def search(page, browser):
    """Search and filter the locks ``stock:7`` and ``report``."""
    rows.held("stock:7")
    rows.held("report")
    page.goto(LIST)
    browser.expect(page.locator("#dlocks-trouble p:visible")).to_have_count(0)
    page.locator("#searchbar").fill("stock")
    page.locator("#searchbar").press("Enter")
    browser.expect(row(page, "stock:7")).to_be_visible()
    browser.expect(row(page, "report")).to_have_count(0)
    page.get_by_role("link", name="waiting").click()
    browser.expect(page.get_by_text("No lock matches")).to_be_visible()
    rows.waits("stock:7")
    rows.waits("report")


def test_the_page_works_without_scripts(browser, boss):
    """Without scripts the page refreshes itself, and a lock can be released.

    A search and a filter still apply after a refresh.
    """
    page = browser.page(boss, java_script_enabled=False)
    search(page, browser)
    browser.expect(page.get_by_role("button", name="Pause")).to_have_count(0)
    assert page.locator("meta[http-equiv=refresh]").get_attribute("content") == "10"
    page.get_by_role("link", name="Refresh").click()
    browser.expect(row(page, "stock:7")).to_be_visible()
    browser.expect(row(page, "report")).to_have_count(0)
    LockClaim.objects.all().delete()
    force_release(page, browser, "stock:7")
    browser.expect(row(page, "stock:7")).to_have_count(0)


def test_an_outdated_page_says_so(browser, boss):
    """After a logout the page says that it is outdated, and offers to log in.

    A search and a filter still apply after the page has refreshed itself, and after the
    login.
    """
    page = browser.page(boss)
    search(page, browser)
    browser.expect(row(page, "stock:7")).to_be_visible()
    browser.expect(row(page, "report")).to_have_count(0)
    page.context.clear_cookies()
    shown = page.get_by_role("status").locator("p:visible")
    browser.expect(shown).to_contain_text("your session has ended")
    browser.expect(shown).to_have_count(1)
    browser.expect(row(page, "stock:7")).to_be_visible()
    page.get_by_role("link", name="Log in").click()
    page.get_by_label("Username:").fill("boss")
    page.get_by_label("Password:").fill("x")
    page.get_by_role("button", name="Log in").click()
    browser.expect(row(page, "stock:7")).to_be_visible()
    assert page.url.endswith(f"{LIST}?q=stock&state=waiting")


# The text of the focused element, after the key of its row.
FOCUSED = """(e => (e.hasAttribute('aria-describedby') ?
    e.closest('tr').querySelector('a').textContent + ' ' : ''
) + (e.textContent.trim() || e.type))(document.activeElement)"""


def test_the_focus_stays_in_place_during_a_refresh(browser, boss):
    """The focus stays in place while the page refreshes itself.

    If its lock disappears, the focus moves to the section of current locks. The
    automatic refresh can be paused and resumed.
    """
    page = browser.page(boss)
    stop_clock(page)
    page.goto(LIST)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    for key in ("a", "b", "c"):
        rows.held(key)
    page.get_by_role("button", name="Pause").click()
    browser.expect(page.get_by_role("button", name="Pause")).to_have_count(0)
    page.clock.run_for(60_000)
    # A page sends its events in order. An automatic request would come before this one.
    page.evaluate("fetch('?q=mine').then(() => null)")
    assert [url.partition("?")[2] for url in asked] == ["q=mine"]
    browser.expect(row(page, "a")).to_have_count(0)
    page.get_by_role("button", name="Resume").click()
    browser.expect(row(page, "a")).to_be_visible()
    browser.expect(page.get_by_role("button", name="Pause")).to_be_visible()

    page.get_by_role("link", name="Refresh").focus()
    pressed = []
    while not pressed or pressed[-1] != "c Force release":
        page.keyboard.press("Tab")
        pressed.append(page.evaluate(FOCUSED))
        assert len(pressed) < 40, pressed
    every = [one for key in "abc" for one in ("checkbox", key, f"{key} Force release")]
    assert pressed[-9:] == every
    # Rows appear and disappear before it. It is still the same button.
    page.evaluate("window.mine = document.activeElement")
    rows.held("0")
    ResourceLock.objects.filter(pk="a").delete()
    page.clock.run_for(AGAIN)
    browser.expect(row(page, "0")).to_be_visible()
    browser.expect(row(page, "a")).to_have_count(0)
    assert page.evaluate("window.mine === document.activeElement")
    ResourceLock.objects.filter(pk="c").delete()
    page.clock.run_for(AGAIN)
    browser.expect(row(page, "c")).to_have_count(0)
    assert page.evaluate("document.activeElement.id") == "dlocks-now"
    while page.evaluate(FOCUSED) != "0 Force release":
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    by_keyboard = lambda button: button.press("Enter")  # noqa: E731
    confirm(page, browser, "1 lock was forced: 0", by_keyboard)


def test_nothing_is_refreshed_while_locks_are_selected(browser, boss):
    """So a selection does not change. Django's script counts locks that appear later.

    The selected locks are released together.
    """
    page = browser.page(boss)
    stop_clock(page)
    page.goto(LIST)
    rows.held("a")
    page.clock.run_for(AGAIN)
    browser.expect(row(page, "a")).to_be_visible()
    rows.held("b")
    page.clock.run_for(AGAIN)
    row(page, "b").get_by_role("checkbox").check()
    browser.expect(page.get_by_text("1 of 2 selected")).to_be_visible()
    browser.expect(page.get_by_text("is not refreshed")).to_be_visible()
    rows.held("c")
    page.clock.run_for(5 * AGAIN)
    browser.expect(row(page, "c")).to_have_count(0)
    page.locator("#action-toggle").check()
    browser.expect(page.get_by_text("2 of 2 selected")).to_be_visible()
    page.locator("#action-toggle").uncheck()
    page.clock.run_for(AGAIN)
    browser.expect(row(page, "c")).to_be_visible()
    for key in ("a", "c"):
        row(page, key).get_by_role("checkbox").check()
    page.get_by_label("Action:").select_option(label="Force release")
    page.locator("[name=index]").click()
    confirm(page, browser, "2 locks was forced: a, c")


@pytest.mark.usefixtures("with_history")
def test_screenshots_do_not_scroll_sideways(browser, boss):
    """Nothing is wider than the page, on a desktop and on a phone."""
    busy_hour()
    page = browser.page(boss, color_scheme="light", viewport=DESK)
    page.goto(LIST)
    shows(page)
    # The sidebar is closed to leave more space for the page.
    page.get_by_role("button", name="Toggle navigation").click()
    page.evaluate("scrollTo(0, 0)")
    # As far as the end of the table.
    table = {"x": 0, "y": 0, "width": DESK["width"], "height": 1400}
    picture(page, "control-room-light.png", full_page=True, clip=table)
    page.goto(detail("report:monthly"))
    shows(page)
    picture(page.locator("#dlocks-hour"), "timeline-light.png")
    page.set_viewport_size(PHONE)
    shows(page)
    for address in (detail("x" * 255), LIST):
        page.goto(address)
        shows(page)
