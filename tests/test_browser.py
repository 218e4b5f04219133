"""The browser of the tests: a real one, that tells of what goes wrong in a page."""

from __future__ import annotations

import shutil

import pytest

from tests import browser as chromium
from tests.test_admin import person

pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.once]


@pytest.fixture
def client(transactional_db):
    return person("boss", is_superuser=True)


def test_it_is_logged_in_as_the_client_is(browser, client):
    """A page is what the test's client would see, with its style sheets and scripts."""
    page = browser.page(client)
    page.goto("/admin/dlocks/resourcelock/")
    browser.expect(page.get_by_role("heading", name="Select lock to view")).to_be_visible()
    assert page.evaluate("getComputedStyle(document.querySelector('#header')).display") == "flex"


@pytest.mark.usefixtures("_chromium")
@pytest.mark.parametrize(
    ("script", "told"), [("throw new Error('oh no')", "oh no"), ("console.error('and more')", "and more")]
)
def test_what_goes_wrong_in_a_page_fails_the_test(live_server, script, told):
    """An error of a script, or one on the console, is an error of the test."""
    with pytest.raises(AssertionError, match=told):
        with chromium.Browser(live_server.url) as browser:
            page = browser.page()
            page.goto("/admin/login/")
            page.evaluate(f"() => new Promise(done => setTimeout(() => {{ setTimeout(done); {script} }}))")


def test_a_missing_chromium_is_a_failure(monkeypatch):
    """Without Chromium the tests that need it fail, and say what to install."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="apt-get install chromium"):
        chromium.Thread().start()
