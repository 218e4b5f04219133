"""Requests to the members of a quorum that are interrupted, or that fail."""

from __future__ import annotations

import itertools
import threading
from concurrent import futures
from functools import partial

import pytest

from dlocks.backends.quorum import backend as quorum
from dlocks.backends.quorum import members
from tests.internals import MemoryBackend
from tests.promises.backends.others import claim
from tests.promises.backends.test_quorum import quorum_of

pytest_plugins = ["tests.moments"]
pytestmark = [pytest.mark.once, pytest.mark.engine("sqlite")]


class Late(MemoryBackend):
    """A backend that answers after its caller was struck, if that is soon."""

    struck = threading.Event()

    def acquire(self, claim):
        self.struck.wait(0.05)
        return super().acquire(claim)


def test_an_interrupt_leaves_no_thread_of_a_member_waiting(
    strike_in_dlocks, monkeypatch, until
):
    """That thread would count as one that answers the next request."""
    monkeypatch.setattr(members, "IDLE_CLOSE_AFTER", 0.02)
    # Where a caller waits for futures, too. That folder is not within dlocks.
    within = ("backends/quorum", *futures.__path__)

    def is_at_work():
        names = [thread.name for thread in threading.enumerate()]
        return any(name.startswith("dlocks-quorum-member") for name in names)

    for number in itertools.count():
        backend = quorum_of([Late(name) for name in "abc"])
        Late.struck.clear()
        acquire = partial(backend.acquire, claim())
        struck = strike_in_dlocks(number, acquire, within=within)
        Late.struck.set()
        until(lambda: not is_at_work())
        if not struck:
            break
    assert number > 100


def test_a_hold_that_could_not_be_renewed_just_then_is_not_forgotten(monkeypatch):
    class Failing(MemoryBackend):
        def renew(self, claims):
            return dict.fromkeys(super().renew(claims), 0.0)

    monkeypatch.setattr(quorum, "TERMS", 1)
    backend, held = quorum_of([Failing(name) for name in "abc"]), claim()
    assert backend.acquire(held)
    assert held.owner in backend.renew([held])
    assert backend.acquire(claim("another"))
    assert backend.verify([held], 1)
