"""The database backends use the public interfaces of others alone."""

import ast
from pathlib import Path

import pytest

from tests.internals import database, sql

pytestmark = pytest.mark.engine("sqlite")

MODULES = [
    module
    for package in (database, sql)
    for module in sorted(Path(package.__path__[0]).glob("*.py"))
]
TABLE = Path(database.__path__[0]).parent / "table.py"
# An interface of models that Django documents in spite of its name.
DOCUMENTED = {"_meta"}
# The functions that may write attributes of a connection: the restoration after an
# interrupt, the wrapper that an interrupt must not leave behind, and the two of psycopg
# that let it prepare what asks for it.
WRITERS = {
    "abandon": None,
    "_call_qualified": {"execute_wrappers"},
    "_can_prepare": {"prepare_threshold"},
    "_django_cursor": {"cursor_factory"},
}
CONNECTIONS = {"connection", "raw", "wrapper"}


def is_own(node):
    return isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}


def foreign_internals(tree):
    """Yield the uses of names of other objects that are not theirs to offer."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        name = node.attr
        private = name.startswith("_") and not name.startswith("__")
        if name == "pgconn" or (
            private and name not in DOCUMENTED and not is_own(node)
        ):
            yield f"{node.lineno}: {ast.unparse(node)}"


def writes_to_connections(tree):
    """Yield the assignments to attributes of connections, but for the few allowed."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load):
                continue
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else None
            name = owner.id if isinstance(owner, ast.Name) else name
            if name not in CONNECTIONS:
                continue
            allowed = WRITERS.get(function.name, set())
            if allowed is not None and node.attr not in allowed:
                yield f"{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_the_engine_uses_public_names_of_django_and_the_drivers(path):
    tree = ast.parse(path.read_text())
    assert list(foreign_internals(tree)) == []
    assert list(writes_to_connections(tree)) == []


def test_the_engine_has_its_rules_in_one_place():
    """The engine keeps no rule of a key besides ``dlocks.backends.table``."""
    rules = {"acquire", "admit", "clear", "enqueue", "exchange", "release", "tidy"}
    tree = ast.parse(TABLE.read_text())
    there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert rules <= there
    for path in MODULES:
        functions = ast.parse(path.read_text()).body
        names = {one.name for one in functions if isinstance(one, ast.FunctionDef)}
        assert not names & rules, path.name
