"""The calls that the architecture page lists are those that the code makes."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path

import pytest

import dlocks
from dlocks import db_lock
from tests import pages
from tests.timing import eventually

pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]

PACKAGE = f"{Path(dlocks.__file__).parent}/"


def calls_by_thread(pipe):
    """Acquire a free key, wait for a busy one and renew a lease.

    Return the functions of the package that each thread called, with their files.
    """
    calls = {}

    def note(frame, event, _):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(PACKAGE):
            found = calls.setdefault(threading.get_ident(), [])
            found.append((frame.f_code.co_qualname, path.removeprefix(PACKAGE)))

    def made(function):
        return any(function in dict(found) for found in [*calls.values()])

    def wait():
        db_lock("stock:8", timeout=60).acquire().release()

    threading.setprofile(note)
    sys.setprofile(note)
    db_lock("stock:7").acquire().release()
    waiter = threading.Thread(target=wait)
    with db_lock("stock:8", ttl=3) as hold:
        waiter.start()
        eventually(hold.queue_length)
        eventually(lambda: made("Lease.record_answer"))
    waiter.join()
    sys.setprofile(None)
    threading.setprofile(None)
    return list(calls.values())


def test_the_page_lists_the_calls_in_their_order(doomed):
    text = (pages.DOCS / "architecture.md").read_text()
    lists = [
        [tuple(line.split()) for line in part.splitlines()]
        for block in re.findall(r"^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        if ".py\n" in block
        for part in block.split("\n\n")
    ]
    assert len(lists) == 7
    found = doomed().call(calls_by_thread)
    for listed in lists:
        missing = [first_missing(listed, iter(calls)) for calls in found]
        assert None in missing, missing


def first_missing(listed, calls):
    """Return the first call that does not follow those listed before it, or None."""
    return next((one for one in listed if one not in calls), None)
