"""What the process remembers of callers."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest
from asgiref.sync import sync_to_async
from django.db import connections, transaction

from dlocks import db_lock
from tests.internals import callers

pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]


def test_callers_that_ended_are_not_remembered(monkeypatch):
    """Threads that let a transaction end their holds, and tasks, leave nothing."""
    monkeypatch.setattr(callers, "CALLERS_PER_CLEANUP", 5)

    def acquire():
        with transaction.atomic():
            db_lock("stock:7").acquire()
        connections.close_all()

    for _ in range(10):
        thread = threading.Thread(target=acquire)
        thread.start()
        thread.join()
        # A hold and the marker of its transaction refer to each other.
        gc.collect()

    async def acquire_in_task():
        lock = db_lock("stock:7")
        await lock.aacquire()
        await lock.arelease()
        await sync_to_async(connections.close_all)()

    asyncio.run(acquire_in_task())
    assert len(callers._by_caller) <= 10
