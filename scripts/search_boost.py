"""The order of the results of the documentation's search: guides before the reference.

A reader who searches for a word wants the page that explains it, which has the word
less often than a list of all names or a page of measurements.
"""

from __future__ import annotations

from typing import Any

# Factors of the scores of pages, by the beginning of their path.
BOOSTS = {
    "reference/": 0.5,
    "migrating/": 0.5,
    "benchmarks": 0.2,
    "comparison": 0.5,
    "reliability": 0.5,
    "tutorial": 0.5,
    "how-to/settings": 3.0,
}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> None:
    """Set the factor of a page, which the search plugin of the theme reads."""
    for path, boost in BOOSTS.items():
        if page.file.src_uri.startswith(path):
            page.meta["search"] = {"boost": boost}
