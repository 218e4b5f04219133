"""Interrupts while a lock connects, and at the edges of its own transactions."""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import inspect
import sys
from contextlib import suppress

import pytest
from django.db import connection
from django.db import transaction as of_django
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import atomic

from dlocks import db_lock
from tests.models import Counter
from tests.strikes import StruckExit

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.engine("sqlite", "postgresql", "mysql"),
]

EDGES = contextlib.__file__, of_django.__file__
CONNECTING = {
    inspect.unwrap(function).__code__
    for function in (BaseDatabaseWrapper.connect, BaseDatabaseWrapper.set_autocommit)
}
# Python calls signal handlers when a call has returned, and at the start of a function.
MOMENTS = {"CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME"}


@functools.cache
def names_and_handlers(code):
    """Return the name of the instruction at each offset, and its first handler."""
    table = dis.Bytecode(code).exception_entries
    names = {one.offset: one.opname for one in dis.get_instructions(code)}
    if code.co_filename == contextlib.__file__:
        # Its handlers are for other errors.
        table = []
    return names, {
        offset: next((one.target for one in table if one.start <= offset < one.end), 0)
        for offset in names
    }


def interrupted(function, number, within):
    """Call a function that an interrupt strikes at a numbered moment within others.

    Return the interrupt, or None if the function ends before that moment.
    """
    left, last, before = [number], {}, sys.gettrace()

    def trace(frame, event, _):
        code = frame.f_code
        if not within(code):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            names, handlers = names_and_handlers(code)
            done, here = last.get(frame), frame.f_lasti
            last[frame] = here
            # The error is raised one instruction too late. Where that has another
            # handler, it is no such moment.
            if names.get(done) in MOMENTS and handlers[done] == handlers[here]:
                left[0] -= 1
                if left[0] == -1:
                    raise StruckExit
        return trace

    # Python 3.12 sends opcodes only if a frame asked for them before.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        function()
    except StruckExit as error:
        return error
    finally:
        sys.settrace(before)
    return None


def use(number):
    with db_lock(f"a {number}", f"b {number}", ttl=1, timeout=5):
        pass


def test_an_interrupt_ends_no_later_transaction(in_other_thread):
    """The project keeps the interrupt for a while, as a framework does for its log.

    Its traceback refers to all that the interrupt has left. What is left then must not
    keep other threads from their locks. Nor may it end the transaction that happens to
    be open when the traceback is dropped.
    """

    def is_edge(code):
        return code.co_filename in EDGES

    use("warm")
    number, wrapper = 0, lambda execute, *arguments: execute(*arguments)
    while (kept := [interrupted(functools.partial(use, number), number, is_edge)])[0]:
        in_other_thread(db_lock("stock:7", timeout=5).acquire).release()
        with connection.execute_wrapper(wrapper), atomic():
            Counter.objects.create()
            kept.clear()
            gc.collect()
            assert connection.execute_wrappers == [wrapper]
        assert Counter.objects.all().delete()[0] == 1, f"after interrupt {number}"
        number += 1
    assert number > 20


# A connection of psycopg that an interrupt has kept Django from storing warns of that.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_locks_work_after_an_interrupt_while_one_connects():
    """Django would keep a connection without its settings, and without functions."""
    use("warm")
    connection.close()
    number = 0
    while interrupted(functools.partial(use, number), number, CONNECTING.__contains__):
        gc.collect()
        use(f"after {number}")
        assert connection.get_autocommit()
        connection.close()
        number += 1
    assert number > 5


@pytest.mark.engine("postgresql")
def test_the_transaction_of_the_project_ends_after_an_interrupt_in_a_savepoint():
    """A lock in a transaction uses savepoints. What one leaves must not be in its way.

    Django would take the end of the transaction for that of the savepoint, and commit
    nothing more.
    """

    def is_edge(code):
        return code.co_filename == of_django.__file__

    def acquire():
        db_lock(f"stock:{number}", timeout=0).acquire()

    number, interrupt = 0, True
    while interrupt:
        with suppress(StruckExit), atomic():
            interrupt = interrupted(acquire, number, is_edge)
            if interrupt:
                raise interrupt
        assert connection.get_autocommit(), f"after interrupt {number}"
        number += 1
    assert number > 5
