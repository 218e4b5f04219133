"""An exception from a signal handler reaches the handlers around the code."""

from __future__ import annotations

import dis
import sys
from pathlib import Path
from types import CodeType

import pytest

import dlocks

pytestmark = pytest.mark.front

PACKAGE = Path(dlocks.__file__).parent


@pytest.mark.skipif(
    sys.version_info < (3, 13), reason="calls signal handlers after the jump"
)
def test_no_jump_of_this_python_leaves_the_handlers_of_its_block():
    """An interrupt never leaves a mutex locked, with the Python that runs this test.

    Python calls signal handlers at backward jumps. CPython 3.13 and 3.14 compile some
    of them outside of the handlers of the ``with`` or ``try`` around their loop.
    """
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for code in codes_in(compile(path.read_text(), str(path), "exec"))
        for line in lines_that_lose_handlers(code)
    ]
    assert found == []


def codes_in(code):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def lines_that_lose_handlers(code):
    """Yield the lines of loops whose jump back has fewer handlers than its target."""
    table = list(dis.Bytecode(code).exception_entries)
    instructions = {one.offset: one for one in dis.get_instructions(code)}

    def handlers(offset):
        # Handlers of comprehensions and generators restore variables, and are inside of
        # others.
        found, todo = set(), [offset]
        while todo:
            place = todo.pop()
            for entry in table:
                if entry.start <= place < entry.end and entry.target not in found:
                    found.add(entry.target)
                    todo.append(entry.target)
        return {one for one in found if instructions[one].opname == "PUSH_EXC_INFO"}

    for one in instructions.values():
        if one.opname == "JUMP_BACKWARD" and handlers(one.argval) - handlers(
            one.offset
        ):
            yield one.positions.lineno
