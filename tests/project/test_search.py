"""The built documentation: its search finds what users look for, at the first hit."""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import sys
import threading
from urllib.parse import urlparse

import pytest

from tests import browser as chromium
from tests import pages

pytestmark = [
    pytest.mark.engine("sqlite"),
    pytest.mark.once,
    pytest.mark.nightly,
    pytest.mark.usefixtures("_chromium"),
]

FOUND = {
    "how-to/async": ["async"],
    "how-to/decorators": ["async view"],
    "how-to/deployment": [
        "Aurora", "Cloud SQL", "database rights", "DATABASE_ROUTERS", "GRANT",
        "RDS Proxy", "read replica", "rolling deployment",
    ],
    "how-to/guarded-commits": ["idempotency", "idempotent"],
    "how-to/keys-of-users": ["per user"],
    "how-to/metrics": ["alert"],
    "how-to/read-write-and-semaphore": [
        "API limit", "rate limit", "semaphore", "throttle",
    ],
    "how-to/recipes": ["Channels"],
    "how-to/schedules": ["cron", "several servers"],
    "how-to/seeing-and-clearing": [
        "clear stale lock", "stale", "who blocks a key", "who holds the lock",
    ],
    "how-to/session-locks": ["advisory lock"],
    "how-to/settings": ["ttl"],
    "how-to/testing": ["test", "testing"],
    "how-to/waiting": ["pool size"],
    "how-to/zookeeper": ["kazoo"],
    "migrating/django-pglock": ["django-pglock", "django-pglocks", "django-pgware"],
    "migrating/redis-py": ["redis-py"],
}  # fmt: skip


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the documentation, and serve it."""
    pytest.importorskip("material")
    target = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", target],
        cwd=pages.DOCS.parent,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    handler = functools.partial(Quiet, directory=target)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_page_fetches_nothing_from_elsewhere(site):
    """The theme would fetch the number of stars of the repository."""
    with chromium.Browser(site) as browser:
        page = browser.page()
        page.goto("/how-to/async/")
        page.wait_for_load_state("networkidle")
        assert page.locator(".md-header a.md-source").count() == 1
        assert (
            page.locator("a[rel=edit]")
            .get_attribute("href")
            .endswith("/edit/main/docs/how-to/async.md")
        )
        fetched = page.evaluate(
            "performance.getEntriesByType('resource').map(_ => _.name)"
        )
    assert len(fetched) > 2
    assert [address for address in fetched if not address.startswith(site)] == []


def test_the_first_hit_is_the_page_that_explains_it(site):
    wrong = {}
    with chromium.Browser(site) as browser:
        page = browser.page()
        for expected, words in FOUND.items():
            for word in words:
                # The search of each word begins with an empty list.
                page.goto(f"/?q={word}")
                page.wait_for_selector(".md-search-result__link")
                link = page.evaluate(
                    "document.querySelector('.md-search-result__link').href"
                )
                if (first := urlparse(link).path.strip("/")) != expected:
                    wrong[word] = first
    assert wrong == {}
