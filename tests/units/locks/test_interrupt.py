"""Interrupts at moments that only the names of the modules can choose."""

from __future__ import annotations

import asyncio
import time

import pytest
from asgiref.sync import AsyncToSync, async_to_sync
from django.db import connection

from dlocks import LockTimeout, aresume_hold, db_lock
from dlocks.testing import held_elsewhere
from tests.for_each import for_each
from tests.internals import backends, call_as_writer, coroutines
from tests.volume import volume

pytest_plugins = ["tests.alarms"]
pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.front
@for_each("when", ["before", "after"])
def test_an_interrupted_call_of_a_coroutine_ends(when, monkeypatch, is_busy):
    """The signal arrives before or after a request, in the thread of the task."""
    call, calls = coroutines._Call.__call__, []

    def interrupted(self):
        calls.append(self)
        if len(calls) > 1:
            return call(self)
        assert self._turn.acquire(blocking=False)
        if when == "after":
            self._function()
        raise ZeroDivisionError

    async def acquire():
        async with asyncio.timeout(20):
            await db_lock("stock:7").aacquire()

    monkeypatch.setattr(coroutines._Call, "__call__", interrupted)
    with pytest.raises(ZeroDivisionError):
        async_to_sync(acquire)()
    assert not is_busy()


@pytest.mark.front
@for_each(
    "case",
    [("block", "before"), ("block", "after"), ("detach", "after"), ("resume", "after")],
)
def test_an_interrupted_call_leaves_no_key_while_its_loop_runs(
    case, monkeypatch, is_busy
):
    """No caller receives the text, or the hold."""
    what, when = case
    lock, call = db_lock("stock:7"), coroutines._Call.__call__

    def interrupt():
        def interrupted(self):
            monkeypatch.setattr(coroutines._Call, "__call__", call)
            assert self._turn.acquire(blocking=False)
            if when == "after":
                self._function()
            raise ZeroDivisionError

        monkeypatch.setattr(coroutines._Call, "__call__", interrupted)

    async def use():
        if what == "block":
            async with lock:
                interrupt()
            return
        hold = await lock.aacquire()
        if what == "detach":
            interrupt()
        text = await hold.adetach(within=300)
        interrupt()
        await aresume_hold(text)

    async def main():
        async with asyncio.timeout(20):
            with pytest.raises(ZeroDivisionError):
                await use()
            return await asyncio.to_thread(is_busy)

    assert not async_to_sync(main)()


@pytest.mark.front
def test_a_waiting_thread_leaves_asgiref_s_lock_alone(monkeypatch):
    """An interrupt could leave it locked, and other threads would wait without end."""

    class Locked:
        def __getattr__(self, name):
            raise AssertionError(f"{name} was read")

    monkeypatch.setattr(AsyncToSync, "executors", Locked())
    with held_elsewhere("stock:7"), pytest.raises(LockTimeout):
        db_lock("stock:7", timeout=0.2).acquire()


@pytest.mark.engine("sqlite")
def test_a_signal_at_any_moment_keeps_the_connection_settings(alarm):
    """A lock shortens ``busy_timeout`` and relaxes ``synchronous`` for itself.

    Statements of the project keep their own settings.
    """
    usual = {"busy_timeout": 60_000, "synchronous": 2}
    raw = backends["default"].session.raw

    def settings():
        return {one: raw.execute(f"PRAGMA {one}").fetchall()[0][0] for one in usual}

    before = settings()
    for name, value in usual.items():
        raw.execute(f"PRAGMA {name} = {value}")
    interrupts, end = 0, time.monotonic() + 4
    while interrupts < volume(1_500) and time.monotonic() < end:
        try:
            alarm.arm()
            call_as_writer(connection, lambda: None, flush=False)
            alarm.disarm()
        except alarm.TimeIsUpError:
            interrupts += 1
        assert settings() == usual, f"after {interrupts} interrupts"
    for name, value in before.items():
        raw.execute(f"PRAGMA {name} = {value}")
    assert interrupts > 500
