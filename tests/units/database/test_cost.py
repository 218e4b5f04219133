"""The Python calls of a lock."""

from __future__ import annotations

import re
import sys

import pytest

from dlocks import db_lock
from tests.internals import History, Log, keeper, signals

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.engine("sqlite")
def test_a_lock_costs_about_a_hundred_python_calls(monkeypatch):
    """A lock costs about a hundred Python calls, without those of its backend.

    It raises no exception of its own. The access to Django's connections is not
    counted: it depends on their number, and asgiref raises an exception for each.

    With a server, each call costs several times as much, because the processor caches
    are cold after the wait.
    """
    # OpenTelemetry is not counted, if it is installed.
    monkeypatch.setattr(
        signals,
        "watchers",
        [one for one in signals.watchers if isinstance(one, (Log, History))],
    )
    lock = db_lock("stock:7", using="dummy")
    with lock:
        pass
    # The keeper waits for an earlier renewal, so the lock need not wake it.
    earlier = db_lock("earlier", using="dummy").acquire()
    keeper.catch_up()
    calls, errors = [], []

    def watch(frame, event, argument):
        frame.f_trace_lines = False
        if re.search("asgiref|django/utils/connection", frame.f_code.co_filename):
            return watch
        if event == "call":
            calls.append(frame.f_code.co_qualname)
        elif event == "exception":
            errors.append((frame.f_code.co_qualname, argument[0]))
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        with lock:
            pass
    finally:
        sys.settrace(before)
        earlier.release()
    assert not errors
    assert len(calls) <= 110, (len(calls), calls)
