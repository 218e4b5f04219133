"""Waiting until a socket is readable."""

from __future__ import annotations

import select
import socket

import pytest

from tests.internals import polling

pytestmark = pytest.mark.engine("sqlite")


@pytest.fixture(params=["poll", "select"])
def ends(request, monkeypatch):
    """Return the two ends of a connection, with and without ``poll()``."""
    if request.param == "select":
        monkeypatch.delattr(select, "poll")
    here, there = socket.socketpair()
    with here, there:
        yield here, there


def test_a_file_is_ready_once_a_reply_is_there(ends):
    here, there = ends
    assert not polling.ready(here.fileno(), timeout=0)
    there.send(b"answer")
    assert polling.ready(here.fileno(), timeout=10) == {here.fileno()}


def test_a_closed_connection_is_reported_at_once(ends):
    here, there = ends
    there.close()
    assert polling.ready(here.fileno()) == {here.fileno()}
