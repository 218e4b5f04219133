"""Run the examples of the documentation, and read its table of backends."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

from tests.internals import Backend, Claim, DatabaseBackend

DOCS = Path(__file__).parent.parent / "docs"

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


def blocks(page: str, language: str = "python") -> list[str]:
    """Return the code blocks of a page in one language.

    The page docs/how-to/decorators.md is called "how-to/decorators".
    """
    text = (DOCS / f"{page}.md").read_text()
    found = [match for match in FENCE.finditer(text) if match["language"] == language]
    return [
        re.sub(f"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
        for match in found
    ]


def run(page: str, only: int | None = None, **names: object) -> types.ModuleType:
    """Run the Python blocks of a page from top to bottom as one module.

    ``only`` limits this to the first blocks. ``names`` are the names that the page
    takes for granted. Return the module.
    """
    module = types.ModuleType("docs_" + page.replace("/", "_").replace("-", "_"))
    # Tasks and tests look up their modules by name.
    sys.modules[module.__name__] = module
    vars(module).update(names)
    for code in blocks(page)[:only]:
        exec(compile(code, f"{page}.md", "exec"), vars(module))
    return module


def table_of_backends() -> dict[str, dict[str, str]]:
    """Return the rows of the table in docs/backends.md, with a cell per backend."""
    _, _, after = (DOCS / "backends.md").read_text().partition("\n| | Pessimistic |")
    table = ("| | Pessimistic |" + after).partition("\n\n")[0].splitlines()
    (_, *kinds), _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in table
    )
    return {row: dict(zip(kinds, cells, strict=True)) for row, *cells in rows}


# The row of that table that describes each flag.
TOLD_AS = {
    "supports_transactions": "Can belong to a",
    "supports_guard": "guarded-commits.md) a transaction",
    "supports_queue": "fair queue",
    "supports_sharing": "Can be [shared]",
    "supports_handover": "handed over",
}


def check_refusals(backend: Backend) -> None:
    """Check that the table says which claims a backend refuses."""
    table = table_of_backends()
    name = type(backend).__name__.removesuffix("Backend")
    shown = next(table[row][name] for row in table if "by commands and admin" in row)
    assert (shown == "yes") == isinstance(backend, DatabaseBackend)
    for part, options in (
        ("`takeover=False`", {"takeover": False}),
        ("by a limited number", {"shared": True, "permits": 3}),
    ):
        told = next(table[row][name] for row in table if part in row)
        refused = backend.refusal(Claim(key="k", ttl=1.0, **options)) is not None
        if refused or told != "–":
            # A dash stands for a backend that can share no keys or exclude nobody.
            assert refused == (told == "no" or (told == "–" and "permits" in options))


def told_of(kind: type) -> dict[str, bool]:
    """Return the flags that docs/backends.md documents for a backend."""
    table = table_of_backends()
    name = kind.__name__.removesuffix("Backend")
    return {
        flag: next(table[row][name] for row in table if part in row) != "no"
        for flag, part in TOLD_AS.items()
    }
