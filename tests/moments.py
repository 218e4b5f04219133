"""The moments at which Python calls signal handlers, within dlocks."""

from __future__ import annotations

import contextlib
import dis
import inspect
import sys
from pathlib import Path

import pytest

import dlocks
from tests.strikes import StruckExit

PACKAGE = Path(dlocks.__file__).parent


@pytest.fixture
def strike_in_dlocks():
    """Return a function that calls another one, and strikes at a numbered moment.

    It returns whether the call has lasted until then. Python calls signal handlers when
    a call has returned, at the start of a function, and at a jump back. A strike raises
    an error, or calls a handler.
    """
    before = sys.gettrace()
    moments = {"CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD"}

    def strike(number, function, handler=None, within=("core",)):
        left, last, struck = [number], {}, []
        folders = tuple(str(PACKAGE / name) for name in within)

        def trace(frame, event, _):
            code = frame.f_code
            if not code.co_filename.startswith(folders):
                return None
            frame.f_trace_opcodes = True
            if event == "call":
                # RESUME is no opcode for a tracer. After an await it is no moment, nor
                # is the end of a generator.
                name, argument = code.co_code[frame.f_lasti : frame.f_lasti + 2]
                left[0] -= dis.opname[name] == "RESUME" and argument < 2
            elif event == "opcode":
                done = last.get(frame)
                last[frame] = dis.opname[code.co_code[frame.f_lasti]]
                left[0] -= done in moments
            if left[0] < 0 and not struck:
                struck.append(True)
                if handler is None:
                    raise StruckExit
                handler()
            return trace

        # Python 3.12 sends opcodes only if a frame asked for them before.
        inspect.currentframe().f_trace_opcodes = True
        with contextlib.suppress(StruckExit):
            sys.settrace(trace)
            try:
                function()
            finally:
                sys.settrace(before)
        return bool(struck)

    yield strike
    sys.settrace(before)
