"""The real browser of the tests, which reports the errors of a page."""

from __future__ import annotations

import shutil

import pytest

from tests import browser as chromium

pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.pages]


@pytest.mark.usefixtures("_chromium")
def test_an_error_in_a_page_fails_the_test(live_server):
    """A script error or a console error fails the test."""
    with pytest.raises(AssertionError) as failed:
        with chromium.Browser(live_server.url) as browser:
            page = browser.page()
            page.goto("/admin/login/")
            for script in ("throw new Error('oh no')", "console.error('and more')"):
                page.evaluate(
                    "() => new Promise(done => setTimeout(() => { setTimeout(done);"
                    f" {script} }}))"
                )
    assert "error in the page: oh no" in str(failed.value)
    assert "error on the console: and more" in str(failed.value)


def test_a_missing_chromium_is_a_failure(monkeypatch):
    """Without Chromium the tests that need it fail and name the package."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="apt-get install chromium"):
        chromium.Thread().start()
