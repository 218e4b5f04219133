"""Run the examples of the documentation, and read its table of backends."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import types
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from sybil import Document
from sybil.evaluators.python import PythonEvaluator

from tests.internals import Backend, Claim, DatabaseBackend
from tests.reader import code_blocks

DOCS = Path(__file__).parent.parent / "docs"


def parse(page: str, language: str = "python") -> Document:
    """Return a page with its code blocks in one language as examples.

    The page docs/how-to/decorators.md is called "how-to/decorators".
    """
    path = str(DOCS / f"{page}.md")
    return Document.parse(path, code_blocks(language, PythonEvaluator()))


def blocks(page: str, language: str = "python") -> list[str]:
    """Return the code blocks of a page in one language."""
    return [example.parsed for example in parse(page, language).examples()]


def run(page: str, only: int | None = None, **names: object) -> types.ModuleType:
    """Run the Python blocks of a page from top to bottom as one module.

    ``only`` limits this to the first blocks. ``names`` are the names that the page
    takes for granted. Return the module.
    """
    module = types.ModuleType("docs_" + page.replace("/", "_").replace("-", "_"))
    # Tasks and tests look up their modules by name.
    sys.modules[module.__name__] = module
    vars(module).update(names)
    document = parse(page)
    document.namespace = vars(module)
    with _a_project():
        for example in islice(document.examples(), only):
            example.evaluate()
    return module


@contextlib.contextmanager
def _a_project() -> Iterator[None]:
    """Let the examples import the app ``shop``, as in a project of their reader.

    Its models are those of the example project.
    """
    sys.modules["shop"] = types.ModuleType("shop")
    sys.modules["shop.models"] = importlib.import_module("example_project.shop.models")
    try:
        yield
    finally:
        del sys.modules["shop"], sys.modules["shop.models"]


def table_below(page: str, header: str) -> list[list[str]]:
    """Return the cells of the table of a page that begins with a header."""
    _, _, after = (DOCS / f"{page}.md").read_text().partition(f"\n| {header} |")
    _, _, *rows = after.partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def options_in(page: str) -> set[str]:
    """Return the options in the table of the page of a backend."""
    cells = (row[0] for row in table_below(page, "Option | Meaning | Default"))
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def tokens_of(kind: type) -> str:
    """Return what docs/backends.md says about the tokens of a backend."""
    return next(
        tokens
        for name, *_, tokens in table_below("backends", "`dlocks.backends.…`")
        if f".{kind.__name__}`" in name
    )


def names_in(part: str) -> set[str]:
    """Return the backends that docs/backends.md names for a feature."""
    (cell,) = (cell for row, cell in table_below("backends", "Feature") if part in row)
    names = {name.split()[0] for name in cell.split(", ")}
    if "database" in names:
        names |= {"Pessimistic", "Optimistic", "Insert"}
    return names


# The row of that table that describes each flag.
TOLD_AS = {
    "supports_transactions": "Locks in a",
    "supports_guard": "guarded-commits.md) transactions",
    "supports_queue": "Fair queue",
    "supports_sharing": "Read-write locks",
    "supports_handover": "Handover",
}


def check_refusals(backend: Backend) -> None:
    """Check that the table says which claims a backend refuses."""
    name = type(backend).__name__.removesuffix("Backend")
    rows = isinstance(backend, DatabaseBackend)
    assert (name in names_in("`reap_locks`")) == (rows or hasattr(backend, "reap"))
    assert (name in names_in("`list_locks`")) == (rows or not backend.unlisted)
    can_clear = type(backend).clear is not Backend.clear
    assert (name in names_in("`clear_lock`")) == can_clear
    for part, options in (
        ("`takeover=False`", {"takeover": False}),
        ("Semaphores", {"shared": True, "permits": 3}),
    ):
        refused = backend.refusal(Claim(key="k", ttl=1.0, **options)) is not None
        assert refused == (name not in names_in(part))


def told_of(kind: type) -> dict[str, bool]:
    """Return the flags that docs/backends.md documents for a backend."""
    name = kind.__name__.removesuffix("Backend")
    return {flag: name in names_in(part) for flag, part in TOLD_AS.items()}
