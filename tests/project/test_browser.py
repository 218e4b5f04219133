"""The real browser of the tests, which reports the errors of a page."""

from __future__ import annotations

import shutil

import pytest

from tests import browser as chromium
from tests import rows
from tests.admin.test_admin import person

pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.pages]


@pytest.fixture
def client(transactional_db):
    return person("boss", is_superuser=True)


def test_the_list_of_locks_is_not_clipped(browser, client):
    """All columns are visible at the usual widths of a screen.

    The page has its styles, and the browser is logged in as the test client.
    """
    rows.held("stock:7")
    rows.stale("report:monthly:2026-11")
    page = browser.page(client)
    page.goto("/admin/dlocks/resourcelock/")
    browser.expect(page.get_by_role("link", name="stock:7")).to_be_visible()
    header = "getComputedStyle(document.querySelector('#header')).display"
    assert page.evaluate(header) == "flex"
    for width in (1024, 1280, 1600):
        page.set_viewport_size({"width": width, "height": 900})
        hidden = page.evaluate(
            "(() => { const list = document.querySelector('.results');"
            " return list.scrollWidth - list.clientWidth; })()"
        )
        assert hidden <= 0


@pytest.mark.usefixtures("_chromium")
def test_an_error_in_a_page_fails_the_test(live_server):
    """A script error or a console error fails the test."""
    for script, told in (
        ("throw new Error('oh no')", "oh no"),
        ("console.error('and more')", "and more"),
    ):
        with pytest.raises(AssertionError, match=told):
            with chromium.Browser(live_server.url) as browser:
                page = browser.page()
                page.goto("/admin/login/")
                page.evaluate(
                    "() => new Promise(done => setTimeout(() => { setTimeout(done);"
                    f" {script} }}))"
                )


def test_a_missing_chromium_is_a_failure(monkeypatch):
    """Without Chromium the tests that need it fail and name the package."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="apt-get install chromium"):
        chromium.Thread().start()
