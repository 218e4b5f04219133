"""Promises are tested by public names, so that the tests survive any rewrite."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.once, pytest.mark.engine("sqlite")]

ROOT = Path(__file__).resolve().parent.parent.parent
PROMISES = ROOT / "tests" / "promises"
# Names of other packages that begin with an underscore although they are documented.
DOCUMENTED = {"os._exit", "sys._current_frames", "sys._getframe"}
# The parts of a dotted path of the package, in code and in texts.
PATH = re.compile(r"\bdlocks(?:\.[a-zA-Z]\w*)+")
IMPORT = re.compile(r"\bfrom dlocks import ([\w, ]+)")
# Files that still use private names. The list may only shrink.
NOT_YET: set[str] = set()


def named_in_the_docs():
    """Return the modules that the documentation names, or of which it names a class."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    text = "\n".join(path.read_text() for path in pages)
    imported = ", ".join(IMPORT.findall(text)).split(", ")
    found = {*PATH.findall(text), *(f"dlocks.{name}" for name in imported)}
    return (
        {"dlocks"}
        | {name for name in found if is_module(name)}
        | {name.rpartition(".")[0] for name in found if not is_module(name)}
    )


def is_module(name):
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def private_names(path, public):
    """Yield what a file uses beyond public names, with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            name = node.attr
            own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
            if name.startswith("_") and not name.endswith("__") and not own:
                found = ast.unparse(node)
                if found not in DOCUMENTED:
                    yield node.lineno, found
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None)
            for one in node.names:
                name = f"{module}.{one.name}" if module else one.name
                if name.startswith("tests.internals") or not is_public(name, public):
                    yield node.lineno, name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # Paths for import_string() and for patches, and programs.
            for name in PATH.findall(node.value):
                if not is_public(name, public):
                    yield node.lineno, name


def is_public(name, public):
    """Return whether a module or something in it is public."""
    if name.partition(".")[0] != "dlocks" or name in public:
        return True
    return name.rpartition(".")[0] in public and not is_module(name)


def test_promises_use_public_names_only():
    public = named_in_the_docs()
    found = {
        f"{path.relative_to(PROMISES)}": names
        for path in sorted(PROMISES.rglob("*.py"))
        if (names := sorted(set(private_names(path, public))))
    }
    beyond = {file: names for file, names in found.items() if file not in NOT_YET}
    assert beyond == {}
    assert set(found) >= NOT_YET, "these files use public names only"


def test_private_names_are_found(tmp_path):
    """The test above finds an attribute, an import and a path in a text."""
    file = tmp_path / "test_some.py"
    file.write_text(
        "from dlocks import db_lock\n"
        "from dlocks.runtime.threads import Flag\n"
        "from tests.internals import keeper\n"
        "hold._state\n"
        "self._own\n"
        "os._exit(0)\n"
        "import_string('dlocks.core.life.HoldLife')\n"
        "import_string('dlocks.backends.memory.MemoryBackend')\n"
    )
    found = [line for line, _ in private_names(file, named_in_the_docs())]
    assert sorted(found) == [2, 3, 4, 7]
