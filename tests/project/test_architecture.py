"""The structure of the package: import circles, sizes and words.

``make lint`` checks the layers (``tool.importlinter`` in pyproject.toml).
"""

import ast
import re
from pathlib import Path

import grimp
import pytest

from tests.project.test_promises import is_public, named_in_the_docs

pytestmark = [pytest.mark.once, pytest.mark.engine("sqlite")]

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "dlocks"
MODULES = sorted(PACKAGE.rglob("*.py"))
LIMIT_OF_LINES = 600

# Phrases that language reviews rejected.
PHRASES = (
    r"\bWho(ever)? (?!is\b|are\b)[a-z]",
    r"give[ns]? back|given back",
    r"\bfor ever\b",
    r"\banew\b",
    r"\bis told\b",
    r"so many seconds",
    r"stands? in line",
)


def test_modules_do_not_import_each_other_in_circles():
    """A circle is also one through other modules, functions and imports for types.

    import-linter checks the layers, and knows circles of packages only.
    """
    graph = grimp.build_graph("dlocks", cache_dir=None)

    assert [
        module
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
        if graph.chain_exists(importer=imported, imported=module)
    ] == []


def test_files_are_short():
    """A file can be read in one go."""
    assert [
        path for path in MODULES if len(path.read_text().splitlines()) > LIMIT_OF_LINES
    ] == []


def test_no_loop_loses_the_handlers_of_its_block():
    """An interrupt at the end of a turn reaches ``with`` and ``try`` around the loop.

    CPython 3.13 and 3.14 compile some jumps outside of the handlers: those of filtered
    comprehensions, of ``while`` with a condition, and of loops that end with an ``if``.
    A generator has a frame of its own, and its caller's handlers hold.
    tests/promises/test_signals.py checks the same in the bytecode.
    """
    found = [
        f"{path}:{node.lineno}"
        for path in MODULES
        for block in ast.walk(ast.parse(path.read_text()))
        if isinstance(block, (ast.With, ast.AsyncWith, ast.Try, ast.TryStar))
        for node in inside(block)
        if loses_handlers(node)
    ]
    assert found == []


def inside(node):
    """Yield the nodes of a block, without those of functions that it defines."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from inside(child)


def loses_handlers(node):
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp)):
        return any(part.ifs for part in node.generators)
    if isinstance(node, ast.While) and not isinstance(node.test, ast.Constant):
        return True
    return isinstance(node, (ast.For, ast.AsyncFor, ast.While)) and ends_with_if(
        node.body
    )


def ends_with_if(body):
    return isinstance(body[-1], ast.If) and (
        not body[-1].orelse or ends_with_if(body[-1].orelse)
    )


def test_internals_are_imported_in_one_place():
    """If a module moves, only one file of the tests has to change, and its own."""
    public = named_in_the_docs()
    found = {
        (str(path.relative_to(ROOT)), node.module)
        for path in ROOT.glob("tests/**/*.py")
        # A unit test imports the module whose rules it shows. Authors of backends copy
        # the contract, which therefore imports nothing of the other tests.
        if path.name != "typed_usage.py"
        and not {"units", "contract"} & set(path.parts)
        # Parsing is slow, and nearly all files import only public names.
        and re.search(r"^from dlocks(\.| import)", path.read_text(), re.MULTILINE)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        for name in node.names
        if not is_public(f"{node.module}.{name.name}", public)
    }
    assert found == set()


# What waits for its turn, for longer than a mutex: to send a request on one connection,
# to make a client, to write the history, or for a call that is made once.
TURNS = {
    "backends/database/limits.py",
    "backends/redis/requests.py",
    "backends/session/session.py",
    "backends/zookeeper/ensemble.py",
    "history.py",
    "runtime/coroutines.py",
    "runtime/threads.py",
    "runtime/waiters.py",
}


def test_one_function_makes_all_mutexes():
    """All but turns are leaves of ``new_mutex()``. Conditions and events stay locked.

    See the docstring of ``dlocks.runtime.threads``.
    """
    found = {
        (str(path.relative_to(PACKAGE)), node.attr)
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "threading"
    }
    refused = {"Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier"}
    assert {one for one in found if one[1] in refused} == set()
    assert {path for path, name in found if name in {"Lock", "RLock"}} == TURNS


def test_no_code_uses_a_clock_that_a_test_can_stop():
    """All code of the package measures time with ``dlocks.runtime.clock``."""
    stoppable = re.compile(
        r"time\.(monotonic|perf_counter)|import .*\b(monotonic|perf_counter)\b"
        r"|asyncio\.(sleep\((?!0\))|timeout\(|wait_for\()|timeout=[^)]*return_when|loop\.time\("
    )
    found = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in sorted((PACKAGE / "runtime").rglob("*.py"))
        if path != PACKAGE / "runtime" / "clock.py"
        for line in path.read_text().splitlines()
        if stoppable.search(line)
    ]
    assert found == []


def test_no_phrase_of_the_old_style_returns():
    """Code, tests and documentation are written in plain English."""
    paths = [
        path
        for suffix in ("py", "md", "html", "sh")
        for path in ROOT.glob(f"[!.]*/**/*.{suffix}")
        # What "make docs" and "make package" write is a copy.
        if path.relative_to(ROOT).parts[0] not in {"site", "build", "dist"}
    ]
    text = "\n".join(
        path.read_text() for path in paths if path != Path(__file__).resolve()
    )

    assert [found[0] for phrase in PHRASES for found in re.finditer(phrase, text)] == []
