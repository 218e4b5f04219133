"""Changes of pages while the documentation is built.

In its search, guides come before the reference. A reader who searches for a word wants
the page that explains it, which has the word less often than a list of all names or a
page of measurements. The pages about the project are files of the repository's root,
from which their links to other pages begin with ``docs/``. The link to the repository
is only a link: the theme's script would ask GitHub for the number of stars.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Factors of the scores of pages, by the beginning of their path.
BOOSTS = {
    "reference/": 0.5,
    "migrating/": 0.5,
    "benchmarks": 0.2,
    "changelog": 0.2,
    "contributing": 0.2,
    "comparison": 0.5,
    "reliability": 0.5,
    "tutorial": 0.5,
    "how-to/decorators": 2.0,
    "how-to/settings": 3.0,
}


ABOUT_THE_PROJECT = {"changelog.md", "contributing.md", "security.md"}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page, and set its factor, which the theme's search reads."""
    for path, boost in BOOSTS.items():
        if page.file.src_uri.startswith(path):
            page.meta["search"] = {"boost": boost}
    if page.file.src_uri in ABOUT_THE_PROJECT:
        return markdown.replace("](docs/", "](")
    return markdown


def on_page_context(context: Any, *, page: Any, **_: Any) -> Any:
    """Remove the edit link of a page whose file is a link to one outside of docs/."""
    if Path(page.file.abs_src_path).is_symlink():
        page.edit_url = None
    return context


def on_post_page(output: str, **_: Any) -> str:
    """Return a page from which the theme's script fetches nothing."""
    return output.replace(' data-md-component="source"', "")
