"""How coroutines call synchronous code."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest
from asgiref.sync import sync_to_async

from dlocks import db_lock
from tests.internals import clock, coroutines

pytest_plugins = ["tests.moments"]
pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]


async def test_a_call_checks_a_busy_thread_less_and_less_often(monkeypatch):
    """A thousand tasks that wait for their turn need little processor time."""
    wait, pauses, go_on = clock.wait_for_any, [], threading.Event()

    async def look(futures, seconds):
        pauses.append(seconds)
        if len(pauses) == 4:
            go_on.set()
        await wait(futures, seconds)

    monkeypatch.setattr(clock, "wait_for_any", look)
    sibling = asyncio.create_task(sync_to_async(go_on.wait)(30))
    await asyncio.sleep(0)
    async with db_lock("stock:7", using="memory"):
        assert pauses[:4] == sorted(set(pauses[:4]))
    await sibling


def test_an_interrupted_thread_does_not_seem_to_wait(strike_in_dlocks):
    """Coroutines would not call anything in it any more."""

    def wait():
        with coroutines.waiting_for_a_lock():
            pass

    for number in itertools.count():
        struck = strike_in_dlocks(number, wait, within=("runtime",))
        assert coroutines._waiting == [], number
        if not struck:
            break
    assert number > 3
