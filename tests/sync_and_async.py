"""Test cases that are written once and run with sync and async methods.

The cases are coroutines.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import asynccontextmanager

import pytest
from asgiref.sync import async_to_sync

from dlocks import aresume_hold, resume_hold


class Sync:
    """The sync methods.

    They never suspend, so the case runs to its end without an event loop.
    """

    @staticmethod
    def run(case):
        try:
            case.send(None)
        except StopIteration:
            return
        case.close()
        pytest.fail("a case with sync methods must not suspend")

    @asynccontextmanager
    async def block(self, lock):
        with lock as hold:
            yield hold

    async def ask(self, subject, name, *args, **kwargs):
        return getattr(subject, name)(*args, **kwargs)

    async def resume(self, text):
        return resume_hold(text)

    def function(self, body):
        return body

    async def call(self, function, *args, **kwargs):
        return function(*args, **kwargs)

    async def sync(self, function, *args, **kwargs):
        """Call a function that has nothing to do with locks, for example of the ORM."""
        return function(*args, **kwargs)


class Async:
    """The async methods."""

    @staticmethod
    def run(case):
        async def whole():
            await case

        async_to_sync(whole)()

    def block(self, lock):
        return lock

    async def ask(self, subject, name, *args, **kwargs):
        return await getattr(subject, f"a{name}")(*args, **kwargs)

    async def resume(self, text):
        return await aresume_hold(text)

    def function(self, body):
        @functools.wraps(body)
        async def coroutine(*args, **kwargs):
            return body(*args, **kwargs)

        return coroutine

    async def call(self, function, *args, **kwargs):
        return await function(*args, **kwargs)

    async def sync(self, function, *args, **kwargs):
        from asgiref.sync import sync_to_async

        return await sync_to_async(function)(*args, **kwargs)


def sync_and_async(case):
    """Run a case with the sync and the async methods, as its first argument."""
    signature = inspect.signature(case)

    @functools.wraps(case)
    def test(**kwargs):
        kwargs["do"].run(case(**kwargs))

    del test.__wrapped__
    test.__signature__ = signature
    return pytest.mark.parametrize("do", [Sync(), Async()], ids=["sync", "async"])(test)
